//! A context: one set of buffers and counters, and the calls that enqueue its kernels.

use super::agreement::{Differing, agree};
use super::budget::Budget;
use super::calls::{Combined, Layout, Output, OwnOutput, Rows, Tokens};
use super::config::{AllToAllBuilder, ArenaPlace, Scales, Shape, Weights, config};
use super::driver::Kept;
use super::handle::{CombineSent, Handle, Lease, Pool, Refused, Sent, SentRows};
use super::pick::{self, BOTH_PHASES};
use super::placement::Placement;
use super::plan::{Message, Plan};
use super::report::Reports;
use super::service::{FlagPlace, Number, Offer, Opening, SharedWords};
use super::sms::{Traffic, sms_available};
use super::statistics::{CallStatistics, Statistics};
use super::tables::{even_experts, home_words, inverse, nobody_left, owner_words, pack_words, reciprocal, state_words};
use super::wire::{ChunkIdx, Direction, LinkIdx, Wire};
use crate::base::{Error, Rank, Result};
use crate::ffi::layout as raw;
use crate::kernels::{Device, DeviceBuffer, DeviceKind, KernelArgs, Stream, View};
use crate::transport::link::{DeviceNeeds, Span};
use crate::transport::memory::gdr::GdrCopy;
use crate::transport::{Arena, PeerMap, World};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Blocks of the CPU device: two full warps each, so that block and warp boundaries both exist.
const CPU_BLOCK: u32 = 64;
/// Tokens of a tile of META, where the caller does not choose: the fewer, the sooner its block is through, but each block
/// has little to do then beside what it costs to begin (docs/performance.md).
const META_TILE: usize = 256;

/// Counts of what this rank has enqueued.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Dispatches sent, fused ones included.
    pub dispatches: u64,
    /// Combines sent, fused ones included.
    pub combines: u64,
    /// Errors that `check` or a call returned.
    pub errors: u64,
}

#[derive(Default)]
struct Counters {
    dispatches: AtomicU64,
    combines: AtomicU64,
    errors: AtomicU64,
}

/// Dispatch and combine over one world. See the crate's documentation for the order of calls.
pub struct AllToAll {
    shape: Shape,
    placement: Placement,
    plan: Plan,
    world: World,
    device: Device,
    sms: u32,
    block: u32,
    context: raw::ty_context,
    pool: Arc<Pool>,
    reports: Reports,
    statistics: Option<Statistics>,
    counters: Counters,
    id: u64,
    /// Held while the launches of one call are enqueued, so that calls of several threads do not mix theirs.
    enqueuing: Mutex<()>,
    /// Streams with work of this context: drained before it closes.
    streams: Mutex<Vec<Stream>>,
    /// Kernels read and write these as long as the context lives. Freeing a GPU's tables waits for its kernels, so
    /// they go before the arena.
    tables: Option<Tables>,
    flags: Option<FlagPlace>,
    /// Closed before the arena goes.
    opening: Option<Opening>,
    peers: Option<Arc<PeerMap>>,
    /// Given back behind all that waits for kernels.
    _budget: Option<Budget<'static>>,
}

/// Tokens up to which partial rows arrive, in one node of ranks with many blocks (docs/performance.md, "Rows that
/// arrive").
const ARRIVING_TOKENS: usize = 256;

/// Tells contexts of one process apart, so that a handle of another is refused.
static NEXT_CONTEXT: AtomicU64 = AtomicU64::new(1);

impl AllToAll {
    /// Starts the configuration of a context over `world`.
    pub fn builder(world: &World) -> AllToAllBuilder {
        AllToAllBuilder::new(world)
    }

    pub(crate) fn build(builder: AllToAllBuilder) -> Result<AllToAll> {
        let world = builder.world.clone();
        // Peers have left that world, too, so nobody would answer.
        world.check_current()?;
        let checked = builder.check();
        let few_blocks = match (&builder.device, &checked) {
            (Some(gpu), Ok((shape, _))) => sms_of(&builder, shape, gpu) <= raw::TY_FEW_BLOCKS,
            _ => true,
        };
        let receives = checked.as_ref().map_or(usize::MAX, |(shape, _)| shape.receives);
        let numbers = builder.proxy.as_ref().map_or(Offer::ANY, |proxy| proxy.offer(world.generation()));
        let agreed = agree(&world, &checked, builder.first_epoch, Differing { few_blocks, receives, numbers })?;
        let (mut shape, placement) = checked?;
        shape.arriving_tokens.get_or_insert(if agreed.few_blocks { 0 } else { ARRIVING_TOKENS });
        shape.receives = agreed.receives;
        let plan = Plan::new(&shape.plan_input())?;

        // Everything that can fail on one rank alone comes before the next exchange, which tells the others.
        let local = Local::allocate(&builder, &shape, &placement, &plan, agreed.numbers);
        world.agree("memory of a context", local.as_ref().err())?;
        let Local { device, arena, tables, reports, statistics, pool, proxied, budget } = local?;
        let peers = Arc::new(PeerMap::establish(&world, arena)?);

        let block = if device.kind() == DeviceKind::Cpu { CPU_BLOCK } else { raw::TY_MAX_BLOCK_THREADS };
        let sms = sms_of(&builder, &shape, &device);
        let shared =
            Shared { tables: &tables, reports: &reports, statistics: statistics.as_ref(), proxied: proxied.as_ref() };
        let context = device_context(&builder, &shape, &plan, &peers, &shared, sms);
        let flags = proxied.as_ref().map(|proxied| proxied.words.place);
        let opening = match (proxied, &plan.wire) {
            (Some(proxied), Some((wire, _))) => {
                let arena: (Span, Kept) = (peers.own().span(), peers.clone());
                let words = proxied.words.memory;
                Some(Opening::establish(&world, proxied.number, arena, wire, words, builder.first_epoch)?)
            }
            _ => None,
        };
        // Nobody rings before all have opened.
        world.barrier("context ready")?;
        Ok(AllToAll {
            shape,
            placement,
            plan,
            world,
            device,
            sms,
            block,
            context,
            pool,
            reports,
            statistics,
            counters: Counters::default(),
            id: NEXT_CONTEXT.fetch_add(1, Ordering::Relaxed),
            enqueuing: Mutex::default(),
            streams: Mutex::default(),
            tables: Some(tables),
            flags,
            opening,
            peers: Some(peers),
            _budget: budget,
        })
    }

    /// Sends this rank's tokens to the ranks of their experts and receives those for its own, in one kernel.
    ///
    /// # Errors
    /// `Argument` for unusable views or counts, and whatever [`check`](Self::check) finds; nothing is enqueued then.
    pub fn dispatch(&self, stream: &Stream, tokens: &Tokens, output: &Output) -> Result<Handle> {
        self.check()?;
        let lease = self.pool.take()?;
        let input = tokens.check(&self.shape)?;
        let out = self.check_output(output)?;
        let _call = self.begin_call();
        for wave in 0..self.plan.waves {
            self.launch_dispatch(stream, BOTH_PHASES, wave, lease.raw(), input, Some(out))?;
        }
        self.counters.dispatches.fetch_add(1, Ordering::Relaxed);
        Ok(self.handle(&self.sent(lease, tokens, input)?, output))
    }

    /// Launches that each call takes, one after the other; 1 unless its tokens go in waves
    /// ([`wave_tokens`](AllToAllBuilder::wave_tokens)).
    pub fn waves(&self) -> usize {
        self.plan.waves
    }

    /// The sending half of [`dispatch`](Self::dispatch). The input may be reused once the stream has passed this call, or,
    /// where calls go in several waves, the receiving half.
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch).
    pub fn dispatch_send(&self, stream: &Stream, tokens: &Tokens) -> Result<Sent> {
        self.check()?;
        self.check_split()?;
        let lease = self.pool.take()?;
        let input = tokens.check(&self.shape)?;
        let _call = self.begin_call();
        self.launch_dispatch(stream, raw::TY_PHASE_SEND, 0, lease.raw(), input, None)?;
        self.counters.dispatches.fetch_add(1, Ordering::Relaxed);
        self.sent(lease, tokens, input)
    }

    /// The receiving half of [`dispatch`](Self::dispatch).
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch), with `sent`, which may be given again. Where the driver fails in the midst of a
    /// call of several waves, that is out of order, and the next call says so.
    pub fn dispatch_recv(
        &self,
        stream: &Stream,
        sent: Sent,
        output: &Output,
    ) -> std::result::Result<Handle, Refused<Sent>> {
        let received = self.receive_dispatch(stream, &sent, output);
        received.map_err(|error| Refused { error, given: Box::new(sent) })
    }

    fn receive_dispatch(&self, stream: &Stream, sent: &Sent, output: &Output) -> Result<Handle> {
        self.check()?;
        self.own("sent", sent.context)?;
        let out = self.check_output(output)?;
        let _call = self.begin_call();
        self.launch_dispatch(stream, raw::TY_PHASE_RECEIVE, 0, sent.lease.raw(), sent.tokens, Some(out))?;
        for wave in 1..self.plan.waves {
            self.launch_dispatch(stream, BOTH_PHASES, wave, sent.lease.raw(), sent.tokens, Some(out))?;
        }
        Ok(self.handle(sent, output))
    }

    /// Brings the experts' rows home and sums them there, in one kernel.
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch).
    pub fn combine(&self, stream: &Stream, handle: &Handle, rows: &Rows, out: &Combined) -> Result<()> {
        self.check()?;
        self.own("handle", handle.context)?;
        let rows = self.sent_rows(rows, handle)?;
        let _call = self.begin_call();
        for wave in 0..self.plan.waves {
            self.launch_combine(stream, BOTH_PHASES, wave, handle, rows, Some(out))?;
        }
        self.counters.combines.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The sending half of [`combine`](Self::combine). The rows may be reused once the stream has passed this call, or,
    /// where calls go in several waves, the receiving half.
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch).
    pub fn combine_send(&self, stream: &Stream, handle: &Handle, rows: &Rows) -> Result<CombineSent> {
        self.check()?;
        self.own("handle", handle.context)?;
        let rows = self.sent_rows(rows, handle)?;
        let _call = self.begin_call();
        self.launch_combine(stream, raw::TY_PHASE_SEND, 0, handle, rows, None)?;
        self.counters.combines.fetch_add(1, Ordering::Relaxed);
        Ok(CombineSent { handle: handle.share(), rows })
    }

    /// The receiving half of [`combine`](Self::combine).
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch), with `sent`, which may be given again. Where the driver fails in the midst of a
    /// call of several waves, that is out of order, and the next call says so.
    pub fn combine_recv(
        &self,
        stream: &Stream,
        sent: CombineSent,
        out: &Combined,
    ) -> std::result::Result<(), Refused<CombineSent>> {
        let received = self.receive_combine(stream, &sent, out);
        received.map_err(|error| Refused { error, given: Box::new(sent) })
    }

    fn receive_combine(&self, stream: &Stream, sent: &CombineSent, out: &Combined) -> Result<()> {
        self.check()?;
        self.own("sent", sent.handle.context)?;
        let _call = self.begin_call();
        self.launch_combine(stream, raw::TY_PHASE_RECEIVE, 0, &sent.handle, sent.rows, Some(out))?;
        for wave in 1..self.plan.waves {
            self.launch_combine(stream, BOTH_PHASES, wave, &sent.handle, sent.rows, Some(out))?;
        }
        Ok(())
    }

    /// A barrier of all ranks on their streams: nothing behind it runs before every rank's stream came here.
    ///
    /// # Errors
    /// Whatever [`check`](Self::check) finds, or a failed launch.
    pub fn barrier(&self, stream: &Stream) -> Result<()> {
        self.check()?;
        let _call = self.begin_call();
        let args = raw::ty_barrier_args { context: self.context };
        self.launch(stream, "ty_barrier", 1, CPU_BLOCK, raw::TY_COMBINE_SHARED_BYTES, &args)
    }

    /// What the device, the proxy or a peer found since the last look, the oldest unread error first. Never waits. An error
    /// that closed the context comes back every time; any other once, and the next correct call works.
    ///
    /// # Errors
    /// `Generation` once this rank has regrouped, whatever closed the context before; `Routing`, `Capacity`,
    /// `Incomplete`, `Order`, `Timeout`, `PeerLost`; `Transport` and `Device` where this rank's own proxy cannot go on.
    pub fn check(&self) -> Result<()> {
        self.world.check_current()?;
        let own = self.opening.as_ref().and_then(Opening::failure);
        self.reports.check(&self.world, own, &|| self.losses()).inspect_err(|_| {
            self.counters.errors.fetch_add(1, Ordering::Relaxed);
        })
    }

    /// Other ranks whose routing was unusable, by their ranks in the first generation, each with the epoch of its last such
    /// dispatch that this rank received: the one that the rank's own `Routing` error names. It sent no tokens in it. That
    /// is no error of this rank's, so [`check`](Self::check) says nothing of it, and good dispatches that follow take
    /// nothing back. Never waits: what a call heard is there once the stream has passed it.
    pub fn refused_sources(&self) -> Vec<(Rank, u64)> {
        self.reports.refused().map(|(rank, epoch)| (self.world.original(rank), epoch)).collect()
    }

    /// Ranks that are gone, as bootstrap and proxy know, by their ranks in the first generation; sorted.
    pub fn lost_peers(&self) -> Vec<Rank> {
        let mut lost: Vec<Rank> = self.losses().into_iter().map(|(rank, _)| rank).collect();
        lost.sort_unstable();
        lost.dedup();
        lost
    }

    /// The same, each with how that was noticed, as the proxy has it where both know.
    fn losses(&self) -> Vec<(Rank, String)> {
        let mut lost = self.opening.as_ref().map(Opening::losses).unwrap_or_default();
        let gone = |rank| (self.world.original(rank), "whose connection for bootstrap has ended".to_owned());
        lost.extend(self.world.lost_peers().into_iter().map(gone));
        lost
    }

    /// By rank of the first generation: whether it takes part. Tokens for experts of one that does not are dropped.
    pub fn mask(&self) -> Vec<bool> {
        let mut mask = vec![false; self.world.first_size()];
        for member in self.world.members() {
            if let Some(there) = mask.get_mut(member.index()) {
                *there = true;
            }
        }
        mask
    }

    /// What the device said of its last dispatch: when its blocks came through each stage, and when it heard of each
    /// rank; without waiting for the device, so that a call under way may show in part. `None` unless the context was
    /// built with [`statistics`](AllToAllBuilder::statistics). Rows per expert: see [`Output::host_counts`].
    pub fn dispatch_statistics(&self) -> Option<CallStatistics> {
        self.statistics.as_ref().map(|statistics| statistics.call(raw::TY_DIRECTION_DISPATCH))
    }

    /// As [`dispatch_statistics`](Self::dispatch_statistics), of combine.
    pub fn combine_statistics(&self) -> Option<CallStatistics> {
        self.statistics.as_ref().map(|statistics| statistics.call(raw::TY_DIRECTION_COMBINE))
    }

    /// Bytes of rows that the last dispatch sent to each rank of the node, and by each rail to the other nodes; `None` as
    /// [`dispatch_statistics`](Self::dispatch_statistics).
    pub fn dispatched_bytes(&self) -> Option<Vec<u64>> {
        let statistics = self.statistics.as_ref()?;
        let bytes = self.plan.slot_bytes as u64;
        Some((0..self.world.size()).map(|rank| statistics.rows_to(Rank(rank as u32)) * bytes).collect())
    }

    /// Counts of what was enqueued and found.
    pub fn stats(&self) -> Stats {
        Stats {
            dispatches: self.counters.dispatches.load(Ordering::Relaxed),
            combines: self.counters.combines.load(Ordering::Relaxed),
            errors: self.counters.errors.load(Ordering::Relaxed),
        }
    }

    /// The arena's plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Which rank holds which expert.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The device of this rank.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where the flags of this rank's proxy lie; `None` in a world of one node.
    pub fn flag_place(&self) -> Option<FlagPlace> {
        self.flags
    }

    /// The output in the arena, into which every dispatch goes; `None` unless the context was built with
    /// [`own_output`](AllToAllBuilder::own_output). What is there stays until the next dispatch begins.
    pub fn own_output(&self) -> Option<OwnOutput> {
        let (capacity, align) = self.shape.own_output?;
        let base = *self.context.peer_base.get(self.context.local as usize)?;
        let view =
            |region: &raw::ty_region, row_bytes: usize| View { ptr: base + region.offset, bytes: capacity * row_bytes };
        let regions = &self.plan.regions;
        Some(OwnOutput {
            layout: Layout::Contiguous { align, capacity },
            rows: view(&regions.own_rows, self.shape.row_bytes),
            rows_pitch: self.shape.row_bytes,
            scales: (self.shape.scale_words > 0).then(|| view(&regions.own_scales, 4 * self.shape.scale_words)),
        })
    }

    /// Blocks of a kernel.
    pub fn sms(&self) -> u32 {
        self.sms
    }

    /// Where this rank's arena and its kernels' `ty_state` lie, for tests of what kernels make of words that no call leaves.
    #[doc(hidden)]
    pub fn addresses(&self) -> Option<[u64; 2]> {
        Some([*self.context.peer_base.get(self.context.local as usize)?, self.context.state])
    }

    fn check_output(&self, output: &Output) -> Result<raw::ty_output> {
        if matches!(output.layout, Layout::Token { .. }) && self.shape.weights_with_combine() {
            let advice = "the caller sums a token's rows before combine, so weights must come with dispatch".into();
            return Err(config("layout", "token", advice));
        }
        if let Some(own) = self.own_output() {
            own.check(output)?;
        }
        output.check(&self.shape)
    }

    /// Refuses halves of a call where rows leave once counts are here.
    fn check_split(&self) -> Result<()> {
        if self.shape.own_output.is_none() {
            return Ok(());
        }
        let advice = "with an output in the arena rows leave once all counts are here, so that a call has no halves; use \
                      dispatch, or a context without own_output";
        Err(config("own_output", "of a split dispatch", advice.into()))
    }

    /// Until what it gives is dropped, launches are of the caller's call alone. No peer and no kernel is waited for
    /// meanwhile, unless the driver's queue of launches is full.
    fn begin_call(&self) -> MutexGuard<'_, ()> {
        self.enqueuing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn own(&self, name: &'static str, context: u64) -> Result<()> {
        if context == self.id {
            return Ok(());
        }
        Err(Error::Argument { name, value: "of another context".into(), advice: "use it where it was made".into() })
    }

    fn sent(&self, lease: Lease, tokens: &Tokens, input: raw::ty_tokens) -> Result<Sent> {
        Ok(Sent { lease: Arc::new(lease), room: tokens.room(&self.shape)?, tokens: input, context: self.id })
    }

    fn sent_rows(&self, rows: &Rows, handle: &Handle) -> Result<SentRows> {
        let topk_weight = rows.check(&self.shape, handle.rows, handle.room)?;
        Ok(SentRows { rows: rows.rows.ptr, pitch: rows.pitch as u64, topk_weight })
    }

    fn handle(&self, sent: &Sent, output: &Output) -> Handle {
        let rows = output.layout.rows(self.shape.local_experts).unwrap_or(0);
        Handle { lease: sent.lease.clone(), room: sent.room, rows, layout: output.layout, context: self.id }
    }

    fn launch_dispatch(
        &self,
        stream: &Stream,
        phases: u32,
        wave: usize,
        handle: raw::ty_handle,
        tokens: raw::ty_tokens,
        output: Option<raw::ty_output>,
    ) -> Result<()> {
        let args = raw::ty_dispatch_args {
            context: self.context,
            handle,
            tokens,
            output: output.unwrap_or_default(),
            phases,
            wave: wave as u32,
        };
        let (kernel, shared) = pick::dispatch(&args);
        self.launch(stream, kernel, self.sms, self.block, shared, &args)
    }

    fn launch_combine(
        &self,
        stream: &Stream,
        phases: u32,
        wave: usize,
        handle: &Handle,
        rows: SentRows,
        out: Option<&Combined>,
    ) -> Result<()> {
        let out_dtype = out.map_or(Ok(raw::TY_BF16), |out| out.check(&self.shape, handle.room))?;
        let args = raw::ty_combine_args {
            context: self.context,
            handle: handle.lease.raw(),
            rows: rows.rows,
            rows_pitch: rows.pitch,
            topk_weight: rows.topk_weight,
            out: out.map_or(0, |out| out.out.ptr),
            out_pitch: out.map_or(0, |out| out.pitch as u64),
            out_dtype,
            accumulate: out.map_or(0, |out| u32::from(out.accumulate)),
            layout: handle.layout.code(),
            phases,
            wave: wave as u32,
            reserved: 0,
        };
        let kernel = pick::combine(&args, self.shape.combine_dtype, self.shape.partial);
        self.launch(stream, kernel, self.sms, self.block, raw::TY_COMBINE_SHARED_BYTES, &args)
    }

    fn launch<A: KernelArgs>(
        &self,
        stream: &Stream,
        kernel: &'static str,
        grid: u32,
        block: u32,
        shared: u32,
        args: &A,
    ) -> Result<()> {
        self.device.expect_own("stream", stream.device())?;
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if !streams.iter().any(|known| known.raw() == stream.raw()) {
            streams.push(stream.clone());
        }
        drop(streams);
        stream.launch(kernel, grid, block, shared, args)
    }
}

impl Drop for AllToAll {
    /// Waits for enqueued work, at most a little longer than its own deadlines; what still runs then keeps its memory.
    /// Of a graph only what was launched through its streams is known. Of a stream that captures, what was enqueued before
    /// is waited for; where an engine began the capture, that cannot be known, and the memory is kept.
    fn drop(&mut self) {
        let patience = Duration::from_nanos(self.context.timeout_ns).saturating_add(Duration::from_secs(5));
        let streams = self.streams.get_mut().unwrap_or_else(PoisonError::into_inner);
        if streams.iter().any(|stream| stream.drain(patience).is_err()) {
            std::mem::forget((self.peers.take(), self.tables.take(), self._budget.take()));
        }
        // Takes the arena back from the network: from then on peers' late writes miss it.
        self.opening = None;
    }
}

/// Blocks of a kernel: the budget, or what is chosen of the multiprocessors that there are. The CPU device has none to spare
/// anybody.
fn sms_of(builder: &AllToAllBuilder, shape: &Shape, device: &Device) -> u32 {
    if let Some(sms) = builder.sms {
        return sms;
    }
    let available = sms_available(device, builder.proxy.as_ref());
    match device.kind() {
        DeviceKind::Cpu => available,
        DeviceKind::Cuda => Traffic::of(shape).choose(available),
    }
}

/// Refuses an arena in memory of a GPU that the network does not reach.
fn check_reach(needs: DeviceNeeds, gpu: Option<usize>, place: ArenaPlace) -> Result<()> {
    if !needs.host_memory || gpu.is_none() || place == ArenaPlace::Host {
        return Ok(());
    }
    let advice = "the network between nodes moves bytes by the processor, which does not reach a GPU's memory: give \
                  arena(ArenaPlace::Host), or a proxy over a network that reaches it";
    Err(config("arena", "Device", advice.into()))
}

/// What a rank allocates for itself.
struct Local {
    device: Device,
    arena: Arena,
    tables: Tables,
    reports: Reports,
    statistics: Option<Statistics>,
    pool: Arc<Pool>,
    /// With several nodes.
    proxied: Option<Proxied>,
    budget: Option<Budget<'static>>,
}

/// Tables in device memory.
struct Tables {
    state: DeviceBuffer,
    expert_home: DeviceBuffer,
    even_experts: u32,
    tiling: Tiling,
    /// Tags of tiles, then their rows.
    tiles: DeviceBuffer,
    source_owner: DeviceBuffer,
    rank_names: DeviceBuffer,
    /// Ranks behind links of dispatch, then behind its sources.
    rails: DeviceBuffer,
    served: DeviceBuffer,
    /// What the relay passes on, counts of packed rows.
    relay: DeviceBuffer,
}

/// What a rank's kernels find besides the arena.
struct Shared<'a> {
    tables: &'a Tables,
    reports: &'a Reports,
    statistics: Option<&'a Statistics>,
    proxied: Option<&'a Proxied>,
}

/// A context's number at its proxy, and the words that they share.
struct Proxied {
    number: Number,
    words: SharedWords,
}

impl Local {
    fn allocate(
        builder: &AllToAllBuilder,
        shape: &Shape,
        placement: &Placement,
        plan: &Plan,
        numbers: Offer,
    ) -> Result<Local> {
        let device = builder.device.clone().map_or_else(Device::cpu, Ok)?;
        if let Some(proxy) = builder.proxy.as_ref().filter(|_| plan.wire.is_some()) {
            check_reach(proxy.device_needs(), device.ordinal(), shape.arena)?;
        }
        let budget = Budget::take(&device, "sms", builder.sms)?;
        let bytes = usize::try_from(plan.arena_bytes())
            .map_err(|_| config("max_tokens", shape.max_tokens, "the arena exceeds the address space".into()))?;
        let arena = match (device.ordinal(), shape.arena) {
            (Some(ordinal), ArenaPlace::Device) => Arena::cuda(ordinal, bytes)?,
            (Some(ordinal), ArenaPlace::Host) => Arena::cuda_host(ordinal, bytes)?,
            (None, _) => Arena::cpu(bytes)?,
        };
        if builder.proxy.as_ref().is_some_and(|proxy| plan.wire.is_some() && proxy.device_needs().access) {
            arena.grant_process()?;
        }
        let proxied = match (&plan.wire, &builder.proxy) {
            (None, _) => None,
            (Some((wire, _)), Some(proxy)) => Some(Proxied {
                number: proxy.take_number(numbers, wire)?,
                words: {
                    let gdrcopy = builder.gdrcopy.map_or_else(GdrCopy::from_env, Ok)?;
                    SharedWords::allocate(&device, wire.word_counts(), gdrcopy)?
                },
            }),
            (Some(_), None) => {
                let advice = "several nodes need a proxy on every rank: start one and pass it to the builder".into();
                return Err(config("proxy", "missing", advice));
            }
        };
        let index = |rank: &Rank| shape.nodes.index_of(*rank).unwrap_or(0) as u64;
        let indices = |ranks: Vec<Rank>| pack_words(&ranks.iter().map(index).collect::<Vec<_>>());
        let names: Vec<u64> = shape.nodes.ranks().map(|rank| u64::from(rank.0)).collect();
        let blocks = sms_of(builder, shape, &device);
        let tiling = Tiling::of(builder, shape);
        let tables = Tables {
            state: upload(&device, &state_words(builder.first_epoch, blocks))?,
            expert_home: upload(&device, &home_words(placement, &shape.nodes))?,
            even_experts: even_experts(placement, &shape.nodes),
            tiling,
            tiles: upload(&device, &vec![0; tiling.tags() + tiling.row_words()])?,
            source_owner: upload(&device, &owner_words(&shape.nodes, shape.name))?,
            rails: upload(&device, &indices(shape.nodes.targets(Direction::Dispatch, shape.name)))?,
            served: upload(&device, &indices(shape.nodes.sources(Direction::Dispatch, shape.name)))?,
            rank_names: upload(&device, &pack_words(&names))?,
            relay: upload(&device, &vec![0; Relay::of(plan).words])?,
        };
        let reports = Reports::allocate(&device, shape.ranks)?;
        let statistics = builder.statistics.then(|| Statistics::allocate(&device, blocks, shape.ranks)).transpose()?;
        let pool = Pool::new(&device, shape, plan.waves, builder.handles)?;
        Ok(Local { device, arena, tables, reports, statistics, pool, proxied, budget })
    }
}

/// How META of a call is cut: into tiles of tokens, which blocks of a rank build side by side.
#[derive(Debug, Clone, Copy)]
struct Tiling {
    /// Of 32 tokens each, in a tile.
    words: u32,
    /// Tiles of a call at the most.
    most: u32,
    /// Pairs of a source, own or served, and a rank of the node.
    pairs: usize,
    /// Counts of a tile: experts of a rank at the most, and the rank.
    counts: usize,
}

impl Tiling {
    fn of(builder: &AllToAllBuilder, shape: &Shape) -> Tiling {
        let counts = shape.max_local_experts + 1;
        let room = raw::TY_BITMAP_WORDS as usize / counts;
        let words = builder.meta_tile.unwrap_or(META_TILE).div_ceil(32).clamp(1, room.max(1));
        let served = shape.nodes.sources(Direction::Dispatch, shape.name).len();
        Tiling {
            words: words as u32,
            most: shape.max_tokens.div_ceil(32 * words) as u32,
            pairs: (1 + served) * shape.nodes.largest(),
            counts,
        }
    }

    fn tags(&self) -> usize {
        self.pairs * self.most as usize
    }

    /// Words of 64 bits that counts of 32 take.
    fn row_words(&self) -> usize {
        (self.tags() * self.counts).div_ceil(2)
    }
}

/// Where things lie in the relay's table, in words.
struct Relay {
    free: usize,
    counters: usize,
    words: usize,
}

impl Relay {
    fn of(plan: &Plan) -> Relay {
        let Some((wire, _)) = &plan.wire else { return Relay { free: 0, counters: 0, words: 1 } };
        let counts = wire.word_counts();
        let free = counts.landed;
        let counters = free + counts.staging_free;
        Relay { free, counters, words: counters + counts.doorbells.div_ceil(2) + 1 }
    }
}

fn upload(device: &Device, words: &[u64]) -> Result<DeviceBuffer> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let buffer = device.alloc(bytes.len())?;
    buffer.write(0, &bytes)?;
    Ok(buffer)
}

fn device_context(
    builder: &AllToAllBuilder,
    shape: &Shape,
    plan: &Plan,
    peers: &PeerMap,
    shared: &Shared<'_>,
    blocks: u32,
) -> raw::ty_context {
    let Shared { tables, reports, statistics, proxied } = *shared;
    let node = shape.nodes.node_of(shape.name).unwrap_or(0);
    let local = shape.nodes.local_of(shape.name).unwrap_or(0);
    let node_ranks = shape.nodes.members().get(node).map_or(0, Vec::len);
    let node_first = shape.rank - local;
    let mut peer_base = [0u64; raw::TY_MAX_NODE_RANKS as usize];
    for (peer, base) in peer_base.iter_mut().enumerate().take(node_ranks) {
        *base = peers.base_of(Rank((node_first + peer) as u32));
    }
    raw::ty_context {
        rank: shape.rank as u32,
        ranks: shape.ranks as u32,
        local: local as u32,
        node_ranks: node_ranks as u32,
        node_first: node_first as u32,
        node: node as u32,
        nodes: shape.nodes.members().len() as u32,
        experts: shape.experts as u32,
        local_experts: shape.local_experts as u32,
        top_k: shape.top_k as u32,
        max_tokens: shape.max_tokens as u32,
        waves: plan.waves as u32,
        wave_tokens: plan.wave_tokens as u32,
        hidden: shape.hidden as u32,
        weights: match shape.weights {
            Weights::Dispatch => raw::TY_WEIGHTS_DISPATCH,
            Weights::Combine => raw::TY_WEIGHTS_COMBINE,
            Weights::None => raw::TY_WEIGHTS_NONE,
        },
        row_bytes: shape.row_bytes as u32,
        scale_words: shape.scale_words as u32,
        // Vectors of 16 elements; a scale is for 128 of those, and a word has one or four of them.
        scale_shift: match shape.scales {
            Scales::None => 31,
            Scales::F32 => 3,
            Scales::Ue8m0 => 5,
        },
        slot_bytes: plan.slot_bytes as u32,
        partial_bytes: shape.partial_bytes() as u32,
        slots: plan.slots as u32,
        max_local_experts: shape.max_local_experts as u32,
        tile_words: tables.tiling.words,
        max_tiles: tables.tiling.most,
        quantize: match (shape.quantize, shape.scales) {
            (true, Scales::F32) => raw::TY_QUANTIZE_F32,
            (true, Scales::Ue8m0) => raw::TY_QUANTIZE_UE8M0,
            _ => raw::TY_QUANTIZE_NONE,
        },
        even_experts: tables.even_experts,
        even_inverse: reciprocal(u64::from(tables.even_experts)),
        even_nodes: if shape.nodes.members().len() > 1 { reciprocal(node_ranks as u64) } else { 0 },
        ranks_inverse: inverse(shape.ranks as u32),
        counts_inverse: inverse(shape.local_experts as u32 + 3),
        choice_inverse: (1 << 16) / shape.top_k.max(1) as u32 + 1,
        free_flags: u32::from(plan.regions.dispatch_free.source_stride != 0),
        // What some waits add to it must not make it small.
        timeout_ns: u64::try_from(builder.timeout.as_nanos()).unwrap_or(u64::MAX).min(u64::MAX / 2),
        first_epoch: builder.first_epoch,
        state: tables.state.view().ptr,
        errors: reports.records_address(),
        expert_home: tables.expert_home.view().ptr,
        rank_names: if nobody_left(&shape.nodes) { 0 } else { tables.rank_names.view().ptr },
        source_owner: tables.source_owner.view().ptr,
        stats: statistics.map_or(0, Statistics::device_address),
        blocks: u64::from(blocks),
        tile_rows: tables.tiles.view().ptr + 8 * tables.tiling.tags() as u64,
        tile_tags: tables.tiles.view().ptr,
        refused: reports.refused_address(),
        regions: plan.regions,
        wire: device_wire(plan, shape.name, tables, proxied),
        peer_base,
    }
}

/// What lies between nodes, as the device needs it.
fn device_wire(plan: &Plan, rank: Rank, tables: &Tables, proxied: Option<&Proxied>) -> raw::ty_wire {
    let (Some((wire, messages)), Some(proxied)) = (&plan.wire, proxied) else { return raw::ty_wire::default() };
    let relay = Relay::of(plan);
    let table = |word: usize| tables.relay.view().ptr + 8 * word as u64;
    let mut first_counter = 0;
    let lanes = Direction::ALL.map(|direction| {
        let lane = device_lane(wire, &messages[direction.index()], direction, rank, first_counter);
        first_counter += lane.links * lane.chunks;
        lane
    });
    let [doorbells, chunk_counts, host_landed, host_free, host_lost] = proxied.words.addresses;
    raw::ty_wire {
        lanes,
        doorbells,
        chunk_counts,
        host_landed,
        host_free,
        host_lost,
        landed: table(0),
        free: table(relay.free),
        counters: table(relay.counters),
        rails: tables.rails.view().ptr,
        served: tables.served.view().ptr,
    }
}

fn device_lane(wire: &Wire, message: &Message, direction: Direction, rank: Rank, first_counter: u32) -> raw::ty_lane {
    let (staging, inbox, lane) = (wire.staging(direction), wire.inbox(direction), wire.lane(direction));
    if lane.chunks == 0 {
        return raw::ty_lane::default();
    }
    let (link, chunk) = (LinkIdx(0), ChunkIdx(0));
    raw::ty_lane {
        staging: staging.base,
        staging_parity: staging.parity,
        staging_link: staging.slot,
        inbox: inbox.base,
        inbox_parity: inbox.parity,
        inbox_source: inbox.slot,
        rows_offset: message.rows_offset,
        chunk_rows: message.chunk_rows,
        chunk_shift: message.chunk_shift,
        header_bytes: message.header_bytes,
        row_bytes: message.row_bytes,
        chunks: u32::from(lane.chunks),
        targets: wire.targets(direction, rank).len() as u32,
        sources: wire.sources(direction, rank).len() as u32,
        links: wire.links(direction) as u32,
        inboxes: wire.inboxes(direction) as u32,
        first_doorbell: wire.doorbell_word(direction, 0, link, chunk) as u32,
        first_link_word: wire.chunks_word(direction, 0, link) as u32,
        first_landed: wire.landing_word(direction, 0, 0) as u32,
        first_counter,
        chunk_inverse: inverse(message.chunk_rows),
        reserved: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_that_the_network_does_not_reach_are_refused() {
        let processor = DeviceNeeds { host_memory: true, ..DeviceNeeds::default() };
        let error = check_reach(processor, Some(0), ArenaPlace::Device).unwrap_err().to_string();
        assert!(error.contains("arena") && error.contains("ArenaPlace::Host"), "{error}");
        for (needs, gpu, place) in [
            (processor, None, ArenaPlace::Device),
            (processor, Some(0), ArenaPlace::Host),
            (DeviceNeeds::default(), Some(0), ArenaPlace::Device),
        ] {
            check_reach(needs, gpu, place).unwrap();
        }
    }
}
