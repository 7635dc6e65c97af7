//! A context: one set of buffers and counters, and the calls that enqueue its kernels.

use super::agreement::{Differing, agree};
use super::builder::AllToAllBuilder;
use super::calls::{Combined, Layout, Needs, Output, OwnOutput, Rows, Sums, Tokens};
use super::device_memory::{Local, Shared, device_context};
use super::handle::{CombineSent, Handle, Lease, Refused, Sent, SentRows};
use super::open::{Call, InUse, Memory, Open};
use super::pick::{self, BOTH_PHASES};
use super::placement::Placement;
use super::plan::Plan;
use super::shape::Shape;
use super::sms::sms_of;
use super::statistics::CallStatistics;
use crate::base::{Error, Rank, Result};
use crate::ffi::layout as raw;
use crate::kernels::{Chains, Device, DeviceKind, KernelArgs, Owner, Span as MemorySpan, Stream, View};
use crate::proxy::driver::Kept;
use crate::proxy::{FlagPlace, Offer, Opening};
use crate::transport::network::Span;
use crate::transport::{PeerMap, World};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Chains of calls.
const DISPATCHES: usize = 0;
const COMBINES: usize = 1;
const BARRIERS: usize = 2;

/// Blocks of the CPU device: two full warps each, so that block and warp boundaries both exist.
const CPU_BLOCK: u32 = 64;

/// Counts of what this rank has enqueued and found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Dispatches sent, fused ones included. A captured one counts once, as it is recorded; replays do not count.
    pub dispatches: u64,
    /// Combines sent, fused ones included; captured ones as for `dispatches`.
    pub combines: u64,
    /// Errors of the device, a peer or the proxy, as often as `check` or a call returned one: an error that closed the
    /// context counts every time. `Argument`, `Config` and `Generation` do not count, nor does the `Device` error of a
    /// call's first launch.
    pub errors: u64,
}

#[derive(Default)]
struct Counters {
    dispatches: AtomicU64,
    combines: AtomicU64,
    errors: AtomicU64,
}

/// Dispatch and combine over one world. [Grammar](crate#grammar) has the order in which calls are allowed.
///
/// Calls are of three kinds: dispatch, combine and barrier, halves included. They run in this order, on whichever
/// streams they are:
///
/// - An eager call runs behind the eager calls and replays of its kind that were enqueued before it. Where the last of
///   these was enqueued on another stream, the call waits for all that the other stream holds by then. If the other
///   stream captures by now, the call waits for what that stream held as the capture began. If another library began
///   that capture, the call is refused with `Argument`, since the driver tells nothing of that work.
/// - A recorded call has no place in this order: it does not run.
/// - A replay ([`Graph::launch`](crate::Graph::launch)) takes its place as an eager call of each kind that it holds.
///
/// Dropping a context waits for its streams; what still runs after its deadlines keeps its memory for good. A context
/// stays open as long as there is a graph of its calls.
pub struct AllToAll {
    open: Arc<Open>,
    shape: Shape,
    placement: Placement,
    plan: Plan,
    world: World,
    device: Device,
    sms: u32,
    block: u32,
    context: raw::ty_context,
    counters: Counters,
    /// A call that was half enqueued.
    ended: OnceLock<Error>,
    flags: Option<FlagPlace>,
}

/// Tokens up to which partial rows arrive, in one node of ranks with many blocks (docs/performance.md, "Rows that
/// arrive").
const ARRIVING_TOKENS: usize = 256;

impl AllToAllBuilder {
    /// Builds the context. Collective: every rank of the world calls it with the same configuration.
    ///
    /// # Errors
    /// `Config` for a shape that cannot be served or that differs between ranks, and for a budget of
    /// [`sms`](Self::sms) that its GPU does not have left; `Device` where memory or peer access
    /// is lacking; `Bootstrap` where a rank does not come. A failure on one rank is an error on all.
    pub fn build(self) -> Result<AllToAll> {
        let builder = self;
        let world = builder.world.clone();
        // Peers have left that world, too, so nobody would answer.
        world.check_current()?;
        let checked = builder.check();
        let few_blocks = match (&builder.device, &checked) {
            (Some(gpu), Ok((shape, _))) => {
                sms_of(builder.sms, shape, gpu, builder.proxy.as_ref()) <= raw::TY_FEW_BLOCKS
            }
            _ => true,
        };
        let receives = checked.as_ref().map_or(usize::MAX, |(shape, _)| shape.receives);
        // Of a rank that is refused nobody hears numbers, and its proxy may be another's.
        let proxy = builder.proxy.as_ref().filter(|_| checked.is_ok());
        let numbers = proxy.map_or(Offer::ANY, |proxy| proxy.offer(world.generation()));
        let agreed = agree(&world, &checked, builder.tuning.first_epoch, Differing { few_blocks, receives, numbers })?;
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
        let sms = sms_of(builder.sms, &shape, &device, builder.proxy.as_ref());
        let shared =
            Shared { tables: &tables, reports: &reports, statistics: statistics.as_ref(), proxied: proxied.as_ref() };
        let context = device_context(&builder, &shape, &plan, &peers, &shared, sms);
        let flags = proxied.as_ref().map(|proxied| proxied.words.place);
        let opening = match (proxied, &plan.wire) {
            (Some(proxied), Some((wire, _))) => {
                let arena: (Span, Kept) = (peers.own().span(), peers.clone());
                let words = proxied.words.memory;
                Some(Opening::establish(&world, proxied.number, arena, wire, words, builder.tuning.first_epoch)?)
            }
            _ => None,
        };
        // Nobody rings before all have opened.
        world.barrier("context ready")?;
        let (rank, bytes, waves) = (world.original(world.rank()), plan.arena_bytes(), plan.waves);
        let sizes = format_args!("arena of {bytes} bytes, {sms} blocks, {waves} waves, words {flags:?}");
        log::info!(target: crate::base::targets::CONTEXT, "rank {rank}: built, {sizes}");
        let keep = || Arc::new(InUse::new(&device, peers.clone())) as Owner;
        let arena = shape.own_output.is_some().then(keep);
        let patience = Duration::from_nanos(context.timeout_ns).saturating_add(Duration::from_secs(5));
        let memory = Arc::new(Memory { _tables: tables, reports, statistics, arena, _peers: peers, _budget: budget });
        let chains = Arc::new(Chains::new(builder.tuning.ordered));
        let open = Arc::new(Open { chains, pool, opening, memory, patience, rank });
        let (counters, ended) = (Counters::default(), OnceLock::new());
        Ok(AllToAll { open, shape, placement, plan, world, device, sms, block, context, counters, ended, flags })
    }
}

/// Where the sums of a combine go; `needs` has what it reads.
fn check_sums(out: &Combined, handle: &Handle, needs: Needs<'_>) -> Result<Sums> {
    let mut needs = needs.written();
    let sums = out.check(&mut needs, handle.room)?;
    needs.check_apart()?;
    Ok(sums)
}

impl AllToAll {
    /// Starts the configuration of a context over `world`.
    pub fn builder(world: &World) -> AllToAllBuilder {
        AllToAllBuilder::new(world)
    }

    /// Sends this rank's tokens to the ranks of their experts and receives those for its own, in one kernel.
    ///
    /// # Errors
    /// `Argument` for unusable views or counts, views that overlap among them, and whatever [`check`](Self::check)
    /// finds; nothing is enqueued then. `Config` for the token layout where weights come with combine. `Device` where
    /// the driver refuses a launch: fatal in the midst of a call of several [`waves`](Self::waves), which closes the
    /// context, since peers have the first of them.
    ///
    /// Every call looks at `check` first. So an error of an earlier call may come back here, and then this call was
    /// not enqueued. Unless the error [`is_fatal`](Error::is_fatal), make this call again, as the other ranks have made
    /// theirs:
    ///
    /// ```
    /// # use tokenyard::{AllToAll, Error, Handle, Output, Result, Stream, Tokens};
    /// fn dispatch(ep: &AllToAll, stream: &Stream, tokens: &Tokens, output: &Output) -> Result<Handle> {
    ///     loop {
    ///         match ep.dispatch(stream, tokens, output) {
    ///             // Of earlier calls, never of this one. Each comes back once, so the loop ends.
    ///             Err(
    ///                 earlier @ (Error::Routing { .. }
    ///                 | Error::Capacity { .. }
    ///                 | Error::Incomplete { .. }
    ///                 | Error::Order { fatal: false, .. }),
    ///             ) => eprintln!("{earlier}"),
    ///             outcome => return outcome,
    ///         }
    ///     }
    /// }
    /// ```
    pub fn dispatch(&self, stream: &Stream, tokens: &Tokens, output: &Output) -> Result<Handle> {
        self.check()?;
        let mut needs = self.needs();
        let input = tokens.check(&mut needs)?;
        let out = self.check_output(output, needs)?;
        let mut call = self.begin_call(stream, DISPATCHES)?;
        let lease = call.take()?;
        call.keep(tokens.views().chain(output.views()));
        self.in_waves(&call, |wave| self.launch_dispatch(&call, BOTH_PHASES, wave, lease.raw(), input, Some(out)))?;
        self.counters.dispatches.fetch_add(1, Ordering::Relaxed);
        Ok(self.handle(&self.sent(lease, tokens, input)?, output))
    }

    /// Launches that each call takes, one after the other; 1 unless its tokens go in waves
    /// ([`wave_tokens`](super::Tuning::wave_tokens)).
    pub fn waves(&self) -> usize {
        self.plan.waves
    }

    /// The sending half of [`dispatch`](Self::dispatch). The input may be reused once the stream has passed this call,
    /// or, where calls go in several waves, the receiving half.
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch), errors of earlier calls included. `Config` in a context with
    /// [`own_output`](super::Tuning::own_output), whose dispatches have no halves.
    pub fn dispatch_send(&self, stream: &Stream, tokens: &Tokens) -> Result<Sent> {
        self.check()?;
        self.check_split()?;
        let input = tokens.check(&mut self.needs())?;
        let mut call = self.begin_call(stream, DISPATCHES)?;
        let lease = call.take()?;
        call.keep(tokens.views());
        self.launch_dispatch(&call, raw::TY_PHASE_SEND, 0, lease.raw(), input, None)?;
        self.counters.dispatches.fetch_add(1, Ordering::Relaxed);
        self.sent(lease, tokens, input)
    }

    /// The receiving half of [`dispatch`](Self::dispatch).
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch), errors of earlier calls included. The error comes with `sent`: unless the
    /// context is closed, give `sent` again.
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
        let mut needs = self.needs();
        // What is sent in one wave has been read.
        if let Some(tokens) = &sent.views {
            tokens.check(&mut needs)?;
        }
        let out = self.check_output(output, needs)?;
        let mut call = self.begin_call(stream, DISPATCHES)?;
        call.uses(&sent.lease)?;
        call.keep(sent.views.iter().flat_map(Tokens::views).chain(output.views()));
        self.in_waves(&call, |wave| {
            let phases = if wave == 0 { raw::TY_PHASE_RECEIVE } else { BOTH_PHASES };
            self.launch_dispatch(&call, phases, wave, sent.lease.raw(), sent.tokens, Some(out))
        })?;
        Ok(self.handle(sent, output))
    }

    /// Brings the experts' rows home and sums them there, in one kernel. All ranks combine the same dispatches in the
    /// same order; a context in which they do not is closed by [`Error::Order`], or between nodes perhaps by `Timeout`.
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch). An error of the combined dispatch may come back here, and then this combine
    /// was not enqueued: after [`Capacity` and `Routing`](crate#errors) make it again, as the other ranks wait for it.
    pub fn combine(&self, stream: &Stream, handle: &Handle, rows: &Rows, out: &Combined) -> Result<()> {
        self.check()?;
        self.own("handle", handle.context)?;
        let mut needs = self.needs();
        let sent = self.sent_rows(rows, handle, &mut needs)?;
        let sums = check_sums(out, handle, needs)?;
        let mut call = self.begin_call(stream, COMBINES)?;
        call.uses(&handle.lease)?;
        call.keep(rows.views().chain([&out.out]));
        self.in_waves(&call, |wave| self.launch_combine(&call, BOTH_PHASES, wave, handle, sent, Some(sums)))?;
        self.counters.combines.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The sending half of [`combine`](Self::combine). The rows may be reused once the stream has passed this call, or,
    /// where calls go in several waves, the receiving half.
    ///
    /// # Errors
    /// As for [`combine`](Self::combine).
    pub fn combine_send(&self, stream: &Stream, handle: &Handle, rows: &Rows) -> Result<CombineSent> {
        self.check()?;
        self.own("handle", handle.context)?;
        let sent = self.sent_rows(rows, handle, &mut self.needs())?;
        let mut call = self.begin_call(stream, COMBINES)?;
        call.uses(&handle.lease)?;
        call.keep(rows.views());
        self.launch_combine(&call, raw::TY_PHASE_SEND, 0, handle, sent, None)?;
        self.counters.combines.fetch_add(1, Ordering::Relaxed);
        let views = (self.plan.waves > 1).then(|| rows.clone());
        Ok(CombineSent { handle: handle.share(), rows: sent, views, _half: call.half(&handle.lease) })
    }

    /// The receiving half of [`combine`](Self::combine).
    ///
    /// # Errors
    /// As for [`combine`](Self::combine). The error comes with `sent`: unless the context is closed, give `sent` again.
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
        let mut needs = self.needs();
        // As in receive_dispatch.
        if let Some(rows) = &sent.views {
            self.sent_rows(rows, &sent.handle, &mut needs)?;
        }
        let sums = check_sums(out, &sent.handle, needs)?;
        let mut call = self.begin_call(stream, COMBINES)?;
        call.uses(&sent.handle.lease)?;
        call.keep(sent.views.iter().flat_map(Rows::views).chain([&out.out]));
        self.in_waves(&call, |wave| {
            let phases = if wave == 0 { raw::TY_PHASE_RECEIVE } else { BOTH_PHASES };
            self.launch_combine(&call, phases, wave, &sent.handle, sent.rows, Some(sums))
        })
    }

    /// A barrier of all ranks on their streams: nothing behind it runs before every rank's stream came here.
    ///
    /// # Errors
    /// Whatever [`check`](Self::check) finds, be it of an earlier call: then this barrier was not enqueued, as for
    /// [`dispatch`](Self::dispatch). `Argument` for a stream of another device; `Device` where the driver refuses.
    pub fn barrier(&self, stream: &Stream) -> Result<()> {
        self.check()?;
        let call = self.begin_call(stream, BARRIERS)?;
        let args = raw::ty_barrier_args { context: call.context(&self.context) };
        self.launch(stream, "ty_barrier", 1, CPU_BLOCK, raw::TY_COMBINE_SHARED_BYTES, &args)
    }

    /// What the device, the proxy or a peer found since the last look. Never waits: what a call found is there once its
    /// stream has passed the call.
    ///
    /// One look returns one error: first the one by which the device closed the context, then one of dispatch, then one
    /// of combine, then what ended this rank's proxy. An error that closed the context comes back at every look, any
    /// other once. Of errors that leave the context open, one a direction is kept, the newest: the error of a later
    /// dispatch takes the place of an earlier dispatch's that nobody has read. Look after every call or replay whose
    /// errors matter, until `check` returns `Ok` or a fatal error.
    ///
    /// [Errors](crate#errors) has what outputs hold after an error, and how to go on. [Epochs](Error#epochs) has which
    /// call an error is of.
    ///
    /// # Errors
    /// `Generation` once this rank has regrouped, whatever closed the context before; `Routing`, `Capacity`,
    /// `Incomplete`, `Order`, `Timeout`, `PeerLost`; `Transport` and `Device` where this rank's own proxy cannot go on.
    pub fn check(&self) -> Result<()> {
        self.world.check_current()?;
        if let Some(ended) = self.ended.get() {
            self.counters.errors.fetch_add(1, Ordering::Relaxed);
            return Err(ended.clone());
        }
        let own = self.open.opening.as_ref().and_then(Opening::failure);
        self.open.memory.reports.check(&self.world, own, &|| self.losses()).inspect_err(|_| {
            self.counters.errors.fetch_add(1, Ordering::Relaxed);
        })
    }

    /// Other ranks whose routing was unusable, by their ranks in the first generation. Each comes with the
    /// [epoch](Error#epochs) of its last such dispatch that this rank received, which the other rank's own `Routing`
    /// error names. The other rank sent no tokens in that dispatch. This rank has no error of it, so
    /// [`check`](Self::check) does not tell of it. Good dispatches that follow do not remove an entry. Never waits:
    /// what a call heard is there once the stream has passed the call.
    pub fn refused_sources(&self) -> Vec<(Rank, u64)> {
        self.open.memory.reports.refused().map(|(rank, epoch)| (self.world.original(rank), epoch)).collect()
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
        let mut lost = self.open.opening.as_ref().map(Opening::losses).unwrap_or_default();
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
    /// built with [`statistics`](super::Tuning::statistics). Rows per expert: see [`Output::host_counts`].
    pub fn dispatch_statistics(&self) -> Option<CallStatistics> {
        self.open.memory.statistics.as_ref().map(|statistics| statistics.call(raw::TY_DIRECTION_DISPATCH))
    }

    /// As [`dispatch_statistics`](Self::dispatch_statistics), of combine.
    pub fn combine_statistics(&self) -> Option<CallStatistics> {
        self.open.memory.statistics.as_ref().map(|statistics| statistics.call(raw::TY_DIRECTION_COMBINE))
    }

    /// Bytes of rows that the last dispatch sent to each rank of the node, and by each rail to the other nodes; `None`
    /// as [`dispatch_statistics`](Self::dispatch_statistics).
    pub fn dispatched_bytes(&self) -> Option<Vec<u64>> {
        let statistics = self.open.memory.statistics.as_ref()?;
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
    /// [`own_output`](super::Tuning::own_output). What is there stays until the next dispatch begins.
    pub fn own_output(&self) -> Option<OwnOutput> {
        let (capacity, align) = self.shape.own_output?;
        let base = *self.context.peer_base.get(self.context.local as usize)?;
        let owner = self.open.memory.arena.as_ref()?;
        let view = |region: &raw::ty_region, row_bytes: usize| {
            let span = MemorySpan { ptr: base + region.offset, bytes: capacity * row_bytes };
            View::owned(self.device.place(), span, owner.clone())
        };
        let regions = &self.plan.regions;
        Some(OwnOutput {
            layout: Layout::Contiguous { align, capacity },
            rows: view(&regions.own_rows, self.shape.row_bytes),
            pitch_bytes: self.shape.row_bytes,
            scales: (self.shape.scale_words > 0).then(|| view(&regions.own_scales, 4 * self.shape.scale_words)),
        })
    }

    /// Blocks of a kernel.
    pub fn sms(&self) -> u32 {
        self.sms
    }

    fn needs(&self) -> Needs<'_> {
        Needs::new(&self.shape, self.device.place())
    }

    /// Where this rank's arena and its kernels' `ty_state` lie, for tests of what kernels make of words that no call
    /// leaves.
    #[doc(hidden)]
    pub fn addresses(&self) -> Option<[u64; 2]> {
        Some([*self.context.peer_base.get(self.context.local as usize)?, self.context.state])
    }

    /// `needs` has the call's inputs.
    fn check_output(&self, output: &Output, needs: Needs<'_>) -> Result<raw::ty_output> {
        if matches!(output.layout, Layout::Token { .. }) && self.shape.weights_with_combine() {
            let advice = "the caller sums a token's rows before combine, so weights must come with dispatch";
            return Err(Error::config("layout", "token", advice));
        }
        if let Some(own) = self.own_output() {
            own.check(output)?;
        }
        let mut needs = needs.written();
        let out = output.check(&mut needs)?;
        needs.check_apart()?;
        Ok(out)
    }

    /// Refuses halves of a call where rows leave once counts are here.
    fn check_split(&self) -> Result<()> {
        if self.shape.own_output.is_none() {
            return Ok(());
        }
        let advice = "with an output in the arena rows leave once all counts are here, so that a call has no halves; use \
                      dispatch, or a context without own_output";
        Err(Error::config("own_output", "of a split dispatch", advice))
    }

    /// Until what it gives is dropped, launches are of the caller's call alone, behind earlier ones of the chain. No
    /// peer and no kernel is waited for meanwhile, unless the driver's queue of launches is full.
    fn begin_call<'a>(&'a self, stream: &'a Stream, chain: usize) -> Result<Call<'a>> {
        self.device.expect_own("stream", stream.device())?;
        Call::begin(&self.open, stream, chain)
    }

    fn id(&self) -> u64 {
        self.open.chains.number()
    }

    fn own(&self, name: &'static str, context: u64) -> Result<()> {
        if context == self.id() {
            return Ok(());
        }
        Err(Error::argument(name, "of another context", "use it where it was made"))
    }

    fn sent(&self, lease: Arc<Lease>, tokens: &Tokens, input: raw::ty_tokens) -> Result<Sent> {
        let room = tokens.room(&self.shape)?;
        let views = (self.plan.waves > 1).then(|| tokens.clone());
        Ok(Sent { lease, room, tokens: input, views, context: self.id() })
    }

    fn sent_rows(&self, rows: &Rows, handle: &Handle, needs: &mut Needs<'_>) -> Result<SentRows> {
        let topk_weight = rows.check(needs, handle.rows, handle.room)?;
        let (rows, pitch) = (rows.rows.ptr(), rows.pitch(&self.shape) as u64);
        Ok(SentRows { rows, pitch, topk_weight, call: self.open.pool.number() })
    }

    fn handle(&self, sent: &Sent, output: &Output) -> Handle {
        let rows = output.layout.rows(self.shape.local_experts).unwrap_or(0);
        Handle { lease: sent.lease.clone(), room: sent.room, rows, layout: output.layout, context: self.id() }
    }

    /// Launches a call wave by wave. Where the driver refuses a later one, the call is half enqueued for good, which
    /// closes the context; but nothing of one that was to be recorded runs before its graph does.
    fn in_waves(&self, call: &Call<'_>, launch: impl Fn(usize) -> Result<()>) -> Result<()> {
        (0..self.plan.waves).try_for_each(|wave| {
            launch(wave).map_err(|error| if wave > 0 && !call.is_recorded() { self.end(wave, error) } else { error })
        })
    }

    /// Closes the context over a call that is half enqueued; answers why.
    #[cold]
    fn end(&self, wave: usize, error: Error) -> Error {
        let waves = self.plan.waves;
        let error = match error {
            Error::Device { what, advice, code, source, .. } => {
                let what = format!("{what} (launch {} of the {waves} of a call, of which it has {wave})", wave + 1);
                let advice = format!("{advice}; the call stays unfinished, so build a new context on all ranks");
                Error::Device { what, advice, fatal: true, code, source }
            }
            other => other.ending(),
        };
        self.counters.errors.fetch_add(1, Ordering::Relaxed);
        self.ended.get_or_init(|| error).clone()
    }

    fn launch_dispatch(
        &self,
        call: &Call<'_>,
        phases: u32,
        wave: usize,
        handle: raw::ty_handle,
        tokens: raw::ty_tokens,
        output: Option<raw::ty_output>,
    ) -> Result<()> {
        let args = raw::ty_dispatch_args {
            context: call.context(&self.context),
            handle,
            tokens,
            output: output.unwrap_or_default(),
            phases,
            wave: wave as u32,
        };
        let (kernel, shared) = pick::dispatch(&args);
        self.launch(call.stream(), kernel, self.sms, self.block, shared, &args)
    }

    fn launch_combine(
        &self,
        call: &Call<'_>,
        phases: u32,
        wave: usize,
        handle: &Handle,
        rows: SentRows,
        sums: Option<Sums>,
    ) -> Result<()> {
        let args = raw::ty_combine_args {
            context: call.context(&self.context),
            handle: raw::ty_handle { call: rows.call, ..handle.lease.raw() },
            rows: rows.rows,
            rows_pitch: rows.pitch,
            topk_weight: rows.topk_weight,
            out: sums.map_or(0, |sums| sums.out),
            out_pitch: sums.map_or(0, |sums| sums.pitch),
            out_dtype: sums.map_or(raw::TY_BF16, |sums| sums.dtype),
            accumulate: sums.map_or(0, |sums| sums.accumulate),
            layout: handle.layout.code(),
            phases,
            wave: wave as u32,
            tokens: handle.room as u32,
        };
        let kernel = pick::combine(&args, self.shape.combine_dtype, self.shape.partial);
        self.launch(call.stream(), kernel, self.sms, self.block, raw::TY_COMBINE_SHARED_BYTES, &args)
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
        #[cfg(test)]
        tests::launched()?;
        // SAFETY: the views in `args` were held against what the kernel does with them, and are of this device; the
        // rest is the context's memory, which waits for its streams as it goes.
        unsafe { stream.launch(kernel, grid, block, shared, args) }
    }
}

#[cfg(test)]
#[path = "context_tests.rs"]
mod tests;
