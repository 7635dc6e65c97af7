//! A context: one set of buffers and counters, and the calls that enqueue its kernels.

use super::agreement::{Differing, agree};
use super::builder::AllToAllBuilder;
use super::call_format::CallFormat;
use super::calls::{Combined, InPlaceOutput, Output, Rows, Sums, Tokens};
use super::counts::{CountWords, Counts};
use super::device_memory::{Local, Shared, device_context};
use super::formats::{Formats, Kind};
use super::handle::{CombineSent, Handle, Lease, Refused, Sent, SentRows, Size};
use super::layout::Layout;
use super::missing::{Absences, MissingRanks, SilentRank};
use super::needs::Needs;
use super::open::{Call, InUse, Memory, Open};
use super::payload::{Payload, TokenPayload};
use super::pick::{self, BOTH_PHASES};
use super::placement::Placement;
use super::plan::Plan;
use super::sms::sms_of;
use super::statistics::CallStatistics;
use crate::base::{Error, Rank, Result, wait};
use crate::ffi::layout as raw;
use crate::kernels::{Chains, Device, DeviceKind, KernelArgs, Owner, Span as MemorySpan, Stream, View};
use crate::proxy::driver::Kept;
use crate::proxy::{FlagPlace, Offer, Opening};
use crate::transport::network::Span;
use crate::transport::{PeerMap, World};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

mod again;

/// Chains of calls.
const DISPATCHES: usize = 0;
const COMBINES: usize = 1;
const BARRIERS: usize = 2;

/// Looks for counts in one poll: they are here within some µs, and letting other threads run takes as long.
const LOOKS: u32 = 16;
/// Of so many polls for counts one looks for errors, too.
const ERROR_POLLS: u32 = 16;

/// Most deadlines that a wait takes for each rank where ranks may be missing: `most_timeouts` of
/// kernels/common/absence.cuh.
const MOST_TIMEOUTS: u32 = 8;

/// Blocks of the CPU device: two full warps each, so that block and warp boundaries both exist.
const CPU_BLOCK: u32 = 64;

/// Counts of what this rank has enqueued and found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Dispatches sent, fused ones included. A captured one counts once, as it is recorded; replays do not count.
    pub dispatches: u64,
    /// Combines sent, fused ones included; captured ones as for `dispatches`.
    pub combines: u64,
    /// How often `check` or a call returned an error of the device, a peer or the proxy: an error that closed the
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
/// Calls are of three kinds: dispatch, combine and barrier, halves included. Calls of one kind run in this order, on
/// any streams:
///
/// - An eager call runs after the eager calls and replays of its kind that were enqueued before it. If the last of them
///   is on another stream, the call waits for all work that the other stream holds by then. If the other stream is
///   capturing, the call waits for the work that stream held when the capture began. If another library began that
///   capture, the call is refused with `Argument`, since the driver cannot report that work.
/// - A recorded call has no place in this order: it does not run.
/// - A replay ([`Graph::launch`](crate::Graph::launch)) is ordered as one eager call of each kind that it holds.
///
/// Dropping a context waits for its streams. Calls that still run after the deadlines keep their memory for good. A
/// context stays open as long as a graph of its calls exists.
pub struct AllToAll {
    open: Arc<Open>,
    formats: Formats,
    placement: Placement,
    plan: Plan,
    world: World,
    device: Device,
    sms: u32,
    block: u32,
    counters: Counters,
    /// A call that was half enqueued.
    ended: OnceLock<Error>,
    flags: Option<FlagPlace>,
}

impl AllToAllBuilder {
    /// Builds the context. Collective: every rank of the world calls it with the same configuration.
    ///
    /// # Errors
    /// `Config` for a shape that is not supported or that differs between ranks, and for a budget of
    /// [`sms`](Self::sms) that exceeds what the GPU has left; `Device` where memory or peer access is lacking;
    /// `Bootstrap` where a rank does not join. A failure on one rank is an error on all.
    pub fn build(self) -> Result<AllToAll> {
        let builder = self;
        let world = builder.world.clone();
        // Peers have left an old world, too, so no rank would answer.
        world.check_current()?;
        let checked = builder.check();
        let few_blocks = checked.as_ref().map_or(true, |(shape, _)| builder.has_few_blocks(shape));
        let receives = checked.as_ref().map_or(usize::MAX, |(shape, _)| shape.receives);
        // A refused rank sends no numbers to anybody, and its proxy may be another rank's.
        let proxy = builder.proxy.as_ref().filter(|_| checked.is_ok());
        let numbers = proxy.map_or(Offer::ANY, |proxy| proxy.offer(world.generation()));
        let agreed = agree(&world, &checked, builder.tuning.first_epoch, Differing { few_blocks, receives, numbers })?;
        let (mut shape, placement) = checked?;
        shape.choose_ll_tokens(agreed.few_blocks);
        shape.receives = agreed.receives;
        let plan = Plan::new(&shape.plan_input())?;
        let handle_bytes = Size::of(&shape, plan.rounds, &builder.tuning).in_all();
        let plan = plan.with_handles(handle_bytes);

        // Everything that can fail on one rank alone comes before the next exchange, which notifies the others.
        let local = Local::allocate(&builder, &shape, &placement, &plan, agreed.numbers);
        world.agree("memory of a context", local.as_ref().err())?;
        let Local { device, arena, tables, reports, statistics, absences, pool, proxied, budget, detects_overlaps } =
            local?;
        let peers = Arc::new(PeerMap::establish(&world, arena)?);

        let absence = shape.missing != MissingRanks::Fatal && shape.nodes.members().len() > 1;
        let block = match device.kind() {
            DeviceKind::Cpu => CPU_BLOCK,
            DeviceKind::Cuda if absence => raw::TY_ABSENCE_BLOCK_THREADS,
            DeviceKind::Cuda => raw::TY_MAX_BLOCK_THREADS,
        };
        let sms = sms_of(builder.sms, &shape, &device, builder.proxy.as_ref());
        let shared = Shared {
            tables: &tables,
            reports: &reports,
            statistics: statistics.as_ref(),
            absences: absences.as_ref(),
            proxied: proxied.as_ref(),
        };
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
        let (rank, bytes, rounds) = (world.original(world.rank()), plan.arena_bytes(), plan.rounds);
        let sizes = format_args!("arena of {bytes} bytes, {sms} blocks, {rounds} rounds, words {flags:?}");
        log::info!(target: crate::base::targets::CONTEXT, "rank {rank}: built, {sizes}");
        let keep = || Arc::new(InUse::new(&device, peers.clone())) as Owner;
        let arena = shape.in_place.is_some().then(keep);
        let timeouts = if shape.missing == MissingRanks::Fatal { 1 } else { MOST_TIMEOUTS * world.size() as u32 };
        let longest = Duration::from_nanos(context.timeout_ns).saturating_mul(timeouts);
        let patience = longest.saturating_add(Duration::from_secs(5));
        let memory =
            Arc::new(Memory { _tables: tables, reports, statistics, absences, arena, _peers: peers, _budget: budget });
        let chains = Arc::new(Chains::new(builder.tuning.ordered, detects_overlaps, world.membership()));
        let open = Arc::new(Open { chains, pool, opening, memory, patience, rank });
        let (counters, ended) = (Counters::default(), OnceLock::new());
        let formats = Formats::new(shape, &plan, &context);
        Ok(AllToAll { open, formats, placement, plan, world, device, sms, block, counters, ended, flags })
    }
}

/// What all launches of a dispatch are given. Inline, as are other functions that return such structs: they are large,
/// and each copy takes as long as what a call is checked for.
#[inline(always)]
fn dispatch_args(
    call: &Call<'_>,
    kind: &Kind,
    handle: raw::ty_handle,
    tokens: raw::ty_tokens,
    output: raw::ty_output,
    counts: Option<&CountWords>,
) -> raw::ty_dispatch_args {
    let (first_counts, counts_number) = counts.map_or((0, 0), |counts| (counts.address(), counts.number()));
    let (context, reserved, phases, round) = (call.context(kind), 0, 0, 0);
    raw::ty_dispatch_args { context, handle, tokens, output, first_counts, counts_number, reserved, phases, round }
}

impl AllToAll {
    /// Starts the configuration of a context over `world`.
    pub fn builder(world: &World) -> AllToAllBuilder {
        AllToAllBuilder::new(world)
    }

    /// The most that [`max_tokens_per_rank`](AllToAllBuilder::max_tokens_per_rank) of a context over `world` may be.
    pub fn most_tokens_per_rank(world: &World) -> usize {
        super::builder::most_tokens(world.nodes().len())
    }

    /// Sends this rank's tokens to the ranks of their experts and receives the tokens for its own experts, in one
    /// kernel.
    ///
    /// # Errors
    /// `Argument` for unusable views or counts, overlapping views included. Whatever [`check`](Self::check) returns.
    /// `Config` for the token layout where weights come with combine. After these errors nothing is enqueued. `Device`
    /// where the driver refuses a launch: after the first of several [`rounds`](Self::rounds) of a call the error is
    /// fatal and closes the context, since peers have the earlier rounds.
    ///
    /// Every call runs `check` first. So this call may return the error of an earlier call, and then this call was not
    /// enqueued. Unless the error [`is_fatal`](Error::is_fatal), make this call again, since the other ranks have made
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
        let kind = self.kind_of(tokens)?;
        let mut needs = self.needs(&kind);
        let input = tokens.check(&mut needs)?;
        let out = self.check_output(output, &mut needs)?;
        let mut call = self.begin_call(stream, DISPATCHES)?;
        let lease = call.take(Some(self.rows(output)))?;
        call.keep(tokens.views().chain(output.views()));
        let mut args = dispatch_args(&call, &kind, lease.raw(), input, out, None);
        self.in_rounds(&call, |round| self.launch_dispatch(&call, BOTH_PHASES, round, &mut args, false))?;
        self.counters.dispatches.fetch_add(1, Ordering::Relaxed);
        let room = tokens.count.room(&kind.shape)?;
        Ok(self.handle(lease, kind, room, &input, output))
    }

    /// Rounds of each call, one launch each; 1 unless `max_tokens_per_rank` exceeds the tokens of a round
    /// ([`round_tokens`](super::Tuning::round_tokens)).
    pub fn rounds(&self) -> usize {
        self.plan.rounds
    }

    /// The sending half of [`dispatch`](Self::dispatch). The input may be reused once the stream has passed this call,
    /// or with several rounds, once it has passed the receiving half.
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch), errors of earlier calls included. `Config` in a context with
    /// [`in_place`](super::Tuning::in_place), whose dispatches have no halves.
    pub fn dispatch_send(&self, stream: &Stream, tokens: &Tokens) -> Result<Sent> {
        self.send_dispatch(stream, tokens, false)
    }

    /// As [`dispatch_send`](Self::dispatch_send), and [`counts`](Self::counts) then returns how many rows come, before
    /// they are placed. So [`dispatch_recv`](Self::dispatch_recv) can be given an output of exactly as many rows. The
    /// launch waits for the dispatch of every other rank; in a world of several nodes also for those ranks of the own
    /// node that make another call than this one to receive it.
    ///
    /// # Errors
    /// As for [`dispatch_send`](Self::dispatch_send). `Argument` if the stream captures: the host learns nothing of a
    /// replay.
    pub fn dispatch_send_counts(&self, stream: &Stream, tokens: &Tokens) -> Result<Sent> {
        self.send_dispatch(stream, tokens, true)
    }

    fn send_dispatch(&self, stream: &Stream, tokens: &Tokens, counted: bool) -> Result<Sent> {
        self.check()?;
        self.check_split()?;
        let kind = self.kind_of(tokens)?;
        let input = tokens.check(&mut self.needs(&kind))?;
        let mut call = self.begin_call(stream, DISPATCHES)?;
        if counted && call.is_recorded() {
            let advice = "a graph cannot wait for the host; give it an output with room for any routing, by dispatch_send \
                          or dispatch, and read expert_count on the device";
            return Err(Error::argument("stream", "capturing a dispatch whose counts come first", advice));
        }
        let lease = call.take(None)?;
        let counts = if counted { lease.counts()? } else { None };
        call.keep(tokens.views());
        let mut args = dispatch_args(&call, &kind, lease.raw(), input, raw::ty_output::default(), counts.as_ref());
        self.launch_dispatch(&call, raw::TY_PHASE_SEND, 0, &mut args, false)?;
        self.counters.dispatches.fetch_add(1, Ordering::Relaxed);
        self.sent(lease, kind, tokens, input, counts)
    }

    /// Waits for the counts of a dispatch that [`dispatch_send_counts`](Self::dispatch_send_counts) sent, at most for
    /// `timeout`. They are here once every rank has sent its counts, whether or not its rows have come. They may be
    /// asked for again.
    ///
    /// # Errors
    /// Whatever [`check`](Self::check) returns, of this dispatch too: after an error that is not fatal ask again.
    /// `Argument` for a `Sent` of another context, or of a call without counts. `Device` once `timeout` has passed,
    /// after which the dispatch goes on; `Interrupted`. A dispatch that was sent out of order has no counts: `Order`
    /// comes once, and then `Device`.
    pub fn counts(&self, sent: &Sent, timeout: Duration) -> Result<Counts> {
        self.check()?;
        self.own("sent", sent.context)?;
        let Some(words) = &sent.counts else {
            let advice = "send with dispatch_send_counts to have counts first";
            return Err(Error::argument("sent", "of a call without counts", advice));
        };
        let left = "the dispatch goes on; ask for its counts again";
        let mut polls = 0u32;
        let found = wait::poll_unless("counts", timeout, left, || {
            polls = polls.wrapping_add(1);
            for _ in 0..LOOKS {
                if let Some(counts) = words.read() {
                    return Some(Ok(counts));
                }
                std::hint::spin_loop();
            }
            // Errors come late, and looking for them takes longer than looking for counts.
            if polls.is_multiple_of(ERROR_POLLS) { self.check().err().map(Err) } else { None }
        })?;
        found.unwrap_or_else(|| {
            let what = format!("the counts of a dispatch had not come after {timeout:?}");
            let advice = "a rank has not sent its dispatch yet, or this rank's stream has not reached it, so wait longer; \
                          or this dispatch ended in Order, and has no counts";
            Err(Error::device(what, advice))
        })
    }

    /// The receiving half of [`dispatch`](Self::dispatch).
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch), errors of earlier calls included. The error returns `sent`: unless the
    /// context is closed, call again with it.
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
        let mut needs = self.needs(&sent.kind);
        // The input of a call of one round has been read.
        if let Some(tokens) = &sent.views {
            tokens.check(&mut needs)?;
        }
        let out = self.check_output(output, &mut needs)?;
        let mut call = self.begin_call(stream, DISPATCHES)?;
        call.uses(&sent.lease)?;
        call.make_room(&sent.lease, self.rows(output))?;
        call.keep(sent.views.iter().flat_map(Tokens::views).chain(output.views()));
        let mut args = dispatch_args(&call, &sent.kind, sent.lease.raw(), sent.tokens, out, sent.counts.as_ref());
        self.in_rounds(&call, |round| {
            let phases = if round == 0 { raw::TY_PHASE_RECEIVE } else { BOTH_PHASES };
            self.launch_dispatch(&call, phases, round, &mut args, false)
        })?;
        Ok(self.handle(sent.lease.clone(), sent.kind.clone(), sent.room, &sent.tokens, output))
    }

    /// Brings the experts' rows back to the tokens' source ranks and sums them there, in one kernel. All ranks combine
    /// the same dispatches in the same order. A breach closes the context with [`Error::Order`], or between nodes with
    /// a `Timeout` that may come first.
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch). This call may return an error of the combined dispatch, and then this
    /// combine was not enqueued: after [`Capacity` and `Routing`](crate#errors) make it again, since the other ranks
    /// wait for it.
    pub fn combine(&self, stream: &Stream, handle: &Handle, rows: &Rows, out: &Combined) -> Result<()> {
        self.check()?;
        let kind = self.kind_combined(handle, rows)?;
        let mut needs = self.needs(&kind);
        let sent = self.sent_rows(rows, handle, &mut needs)?;
        let sums = self.check_sums(out, handle, &mut needs)?;
        let mut call = self.begin_call(stream, COMBINES)?;
        call.uses(&handle.lease)?;
        call.keep(rows.views().chain(out.views()));
        self.in_rounds(&call, |round| {
            self.launch_combine(&call, BOTH_PHASES, round, (handle, &kind), sent, Some(sums))
        })?;
        self.counters.combines.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The sending half of [`combine`](Self::combine). The rows may be reused once the stream has passed this call, or
    /// with several rounds, once it has passed the receiving half.
    ///
    /// # Errors
    /// As for [`combine`](Self::combine).
    pub fn combine_send(&self, stream: &Stream, handle: &Handle, rows: &Rows) -> Result<CombineSent> {
        self.check()?;
        let kind = self.kind_combined(handle, rows)?;
        let sent = self.sent_rows(rows, handle, &mut self.needs(&kind))?;
        let mut call = self.begin_call(stream, COMBINES)?;
        call.uses(&handle.lease)?;
        call.keep(rows.views());
        self.launch_combine(&call, raw::TY_PHASE_SEND, 0, (handle, &kind), sent, None)?;
        self.counters.combines.fetch_add(1, Ordering::Relaxed);
        let views = (self.plan.rounds > 1).then(|| rows.clone());
        Ok(CombineSent { handle: handle.clone(), kind, rows: sent, views, _half: call.half(&handle.lease) })
    }

    /// The receiving half of [`combine`](Self::combine).
    ///
    /// # Errors
    /// As for [`combine`](Self::combine). The error returns `sent`: unless the context is closed, call again with it.
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
        let mut needs = self.needs(&sent.kind);
        // As in receive_dispatch.
        if let Some(rows) = &sent.views {
            self.sent_rows(rows, &sent.handle, &mut needs)?;
        }
        let sums = self.check_sums(out, &sent.handle, &mut needs)?;
        let mut call = self.begin_call(stream, COMBINES)?;
        call.uses(&sent.handle.lease)?;
        call.keep(sent.views.iter().flat_map(Rows::views).chain(out.views()));
        self.in_rounds(&call, |round| {
            let phases = if round == 0 { raw::TY_PHASE_RECEIVE } else { BOTH_PHASES };
            self.launch_combine(&call, phases, round, (&sent.handle, &sent.kind), sent.rows, Some(sums))
        })
    }

    /// A barrier of all ranks on their streams: later work of a stream runs only after every rank's stream came here.
    ///
    /// # Errors
    /// Whatever [`check`](Self::check) returns, also of an earlier call: then this barrier was not enqueued, as for
    /// [`dispatch`](Self::dispatch). `Argument` for a stream of another device; `Device` where the driver refuses.
    pub fn barrier(&self, stream: &Stream) -> Result<()> {
        self.check()?;
        let call = self.begin_call(stream, BARRIERS)?;
        let args = raw::ty_barrier_args { context: call.context(self.own_kind()) };
        self.launch(stream, pick::barrier(&args), 1, CPU_BLOCK, raw::TY_COMBINE_SHARED_BYTES, &args)
    }

    /// Returns an error that the device, the proxy or a peer has reported since the last `check`. Never waits: the
    /// errors of a call are there once the call's stream has passed the call.
    ///
    /// `check` returns one error at a time: first the error with which the device closed the context, then one of
    /// dispatch, then one of combine, then the error that ended this rank's proxy. Every `check` returns an error that
    /// closed the context; any other error is returned once. Of errors that leave the context open, only the newest per
    /// direction is kept: the error of a later dispatch replaces an unread error of an earlier dispatch. Call `check`
    /// after every call or replay whose errors matter, until it returns `Ok` or a fatal error.
    ///
    /// [Errors](crate#errors) lists what outputs hold after an error, and how to go on. [Epochs](Error#epochs) explains
    /// which call an error belongs to.
    ///
    /// # Errors
    /// `Generation` once this rank has regrouped, whatever closed the context before; `Routing`, `Capacity`,
    /// `Incomplete`, `Order`, `Timeout`, `PeerLost`; `Transport` and `Device` where this rank's own proxy cannot go on.
    pub fn check(&self) -> Result<()> {
        self.open.chains.check_current()?;
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
    /// [`check`](Self::check) does not report it. Later good dispatches do not remove an entry. Never waits: the
    /// entries of a call are there once the stream has passed the call.
    pub fn refused_sources(&self) -> Vec<(Rank, u64)> {
        self.open.memory.reports.refused().map(|(rank, epoch)| (self.world.original(rank), epoch)).collect()
    }

    /// Lost ranks, as bootstrap and proxy have noticed, by their ranks in the first generation; sorted.
    pub fn lost_peers(&self) -> Vec<Rank> {
        let mut lost: Vec<Rank> = self.losses().into_iter().map(|(rank, _)| rank).collect();
        lost.sort_unstable();
        lost.dedup();
        lost
    }

    /// Lost ranks, each with its cause: the proxy's where proxy and bootstrap both have noticed.
    fn losses(&self) -> Vec<(Rank, String)> {
        let mut lost = self.open.opening.as_ref().map(Opening::losses).unwrap_or_default();
        let gone = |rank| (self.world.original(rank), "whose connection for bootstrap has ended".to_owned());
        lost.extend(self.world.lost_peers().into_iter().map(gone));
        lost
    }

    /// The ranks that calls of this rank go on without: int32 `[ranks]` in device memory, in the order of
    /// [`World::members`](crate::World::members). An entry that is not 0 masks its rank, from the next call that reads
    /// it on, also in replays of graphs; the own rank's entry has no effect. Any work on the device may read and write
    /// the tensor. The entry of a rank is set, too, by a deadline that masks the rank, and if the rank has masked
    /// this one. Once a call has seen a rank masked, the rank stays masked, also if its entry is set to 0.
    ///
    /// # Errors
    /// `Argument` for a context without [`missing_ranks`](AllToAllBuilder::missing_ranks).
    pub fn rank_mask(&self) -> Result<View> {
        self.absences("rank_mask").map(Absences::mask)
    }

    /// Masks a rank, by its number in the first generation, as a store into [`rank_mask`](Self::rank_mask) does; also
    /// while a call waits for it. No other rank takes part.
    ///
    /// # Errors
    /// `Argument` for this rank, for one that is not in the world, and as [`rank_mask`](Self::rank_mask); `Device`
    /// where the copy fails.
    pub fn mask_rank(&self, rank: Rank) -> Result<()> {
        let absences = self.absences("mask_rank")?;
        let own = self.world.original(self.world.rank());
        match self.world.members().iter().position(|member| *member == rank) {
            Some(place) if rank != own => absences.set(place),
            Some(_) => {
                Err(Error::argument("rank", rank, "it is this rank, which takes part in its own calls; mask others"))
            }
            None => {
                Err(Error::argument("rank", rank, "it is not in this world; AllToAll::mask has the ranks that are"))
            }
        }
    }

    /// Ranks that a deadline has masked here ([`MissingRanks::MaskedAtDeadline`]), in the order of the world. Never
    /// waits: entries of a call are there once the stream has passed the call.
    pub fn silent_ranks(&self) -> Vec<SilentRank> {
        let silent = self.open.memory.absences.iter().flat_map(Absences::silent);
        silent.map(|(rank, call, epoch)| SilentRank { rank: self.world.original(rank), call, epoch }).collect()
    }

    fn absences(&self, name: &'static str) -> Result<&Absences> {
        let advice = "the context has no mask of ranks; build it with AllToAllBuilder::missing_ranks";
        self.open.memory.absences.as_ref().ok_or_else(|| Error::argument(name, "without missing_ranks", advice))
    }

    /// By rank of the first generation: whether the rank takes part. Tokens for experts of other ranks are dropped.
    pub fn mask(&self) -> Vec<bool> {
        let mut mask = vec![false; self.world.first_size()];
        for member in self.world.members() {
            if let Some(there) = mask.get_mut(member.index()) {
                *there = true;
            }
        }
        mask
    }

    /// Times of the device's last dispatch: when its blocks completed each stage, and when each rank's counts arrived.
    /// Does not wait for the device, so a call under way may show in part. `None` unless the context was built with
    /// [`statistics`](super::Tuning::statistics). Rows per expert: see [`Output::host_counts`].
    pub fn dispatch_statistics(&self) -> Option<CallStatistics> {
        self.open.memory.statistics.as_ref().map(|statistics| statistics.call(raw::TY_DIRECTION_DISPATCH))
    }

    /// As [`dispatch_statistics`](Self::dispatch_statistics), of combine and its flags.
    pub fn combine_statistics(&self) -> Option<CallStatistics> {
        self.open.memory.statistics.as_ref().map(|statistics| statistics.call(raw::TY_DIRECTION_COMBINE))
    }

    /// Tokens of each source that a dispatch sent to each destination: `[source][destination]`, ranks of this
    /// generation in order. They are the rows of [`Layout::Token`]; also where an output was too small for them. For
    /// tests and tools: it reads the handle's memory back. Collective; every rank gives the handle of the same
    /// dispatch, whose stream has passed it.
    ///
    /// # Errors
    /// `Argument` for a handle of another context, or of a dispatch that has not been received; `Bootstrap` where a
    /// rank does not join. A failure on one rank is an error on all.
    pub fn row_matrix(&self, handle: &Handle) -> Result<Vec<Vec<usize>>> {
        let own = self.own("handle", handle.context);
        let here = own.and_then(|()| handle.lease.tokens_of_sources(handle.kind.shape.max_tokens, self.plan.rounds));
        self.world.agree("rows of a handle", here.as_ref().err())?;
        let bytes: Vec<u8> = here?.iter().flat_map(|tokens| tokens.to_le_bytes()).collect();
        let columns = self.world.all_gather("rows of a handle", &bytes)?;
        let cell = |column: &Vec<u8>, source: usize| {
            column.as_chunks::<4>().0.get(source).map_or(0, |tokens| u32::from_le_bytes(*tokens) as usize)
        };
        Ok((0..columns.len()).map(|source| columns.iter().map(|column| cell(column, source)).collect()).collect())
    }

    /// Bytes of rows that the last dispatch with choices sent to each rank of the node, and by each rail to the other
    /// nodes; `None` as [`dispatch_statistics`](Self::dispatch_statistics).
    pub fn dispatched_bytes(&self) -> Option<Vec<u64>> {
        let statistics = self.open.memory.statistics.as_ref()?;
        Some((0..self.world.size()).map(|rank| statistics.bytes_to(Rank(rank as u32))).collect())
    }

    /// Counts of the calls enqueued and the errors returned.
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

    /// The in-place output in the arena, to which every dispatch writes; `None` unless the context was built with
    /// [`in_place`](super::Tuning::in_place). Its rows stay until the next dispatch begins.
    pub fn in_place(&self) -> Option<InPlaceOutput> {
        let Kind { shape, context, .. } = self.own_kind();
        let (capacity, align) = shape.in_place?;
        let base = *context.peer_base.get(context.local as usize)?;
        let owner = self.open.memory.arena.as_ref()?;
        let view = |region: &raw::ty_region, row_bytes: usize| {
            let span = MemorySpan { ptr: base + region.offset, bytes: capacity * row_bytes };
            View::owned(self.device.place(), span, owner.clone())
        };
        let regions = &self.plan.regions;
        Some(InPlaceOutput {
            layout: Layout::Contiguous { align, capacity },
            rows: view(&regions.in_place_rows, shape.row_bytes),
            pitch_bytes: shape.row_bytes,
            scales: (shape.scale_words > 0).then(|| view(&regions.in_place_scales, 4 * shape.scale_words)),
        })
    }

    /// Thread blocks per kernel.
    pub fn sms(&self) -> u32 {
        self.sms
    }

    fn needs<'a>(&self, kind: &'a Kind) -> Needs<'a> {
        Needs::new(&kind.shape, self.device.place())
    }

    /// Calls of the context's own format.
    fn own_kind(&self) -> &Kind {
        self.formats.own()
    }

    fn kind_of(&self, tokens: &Tokens) -> Result<Arc<Kind>> {
        let own = self.own_kind();
        let token_words = TokenPayload::words_of(tokens.payload.as_ref(), &own.shape)?;
        let kind = self.formats.of(&CallFormat { token_words, ..tokens.call_format(&own.format) }, &self.plan)?;
        // A dtype of sums that is stated is one that combine takes.
        if tokens.combine_dtype.is_some() { kind.combines.clone().map(|()| kind) } else { Ok(kind) }
    }

    /// A combine of a handle.
    fn kind_combined(&self, handle: &Handle, rows: &Rows) -> Result<Arc<Kind>> {
        self.own("handle", handle.context)?;
        let combine_dtype = rows.dtype.unwrap_or(handle.kind.format.combine_dtype);
        let by_token = matches!(handle.layout, Layout::Token { .. });
        let size = |payload: &Payload| payload.size(by_token, &self.own_kind().shape);
        let payload = rows.payload.as_ref().map(size).transpose()?;
        let format = CallFormat { combine_dtype, payload, token_words: 0, ..handle.kind.format };
        let kind = self.formats.of(&format, &self.plan)?;
        kind.combines.clone().map(|()| kind)
    }

    /// Addresses of this rank's arena and of its kernels' `ty_state`, for tests that write words which no call leaves.
    #[doc(hidden)]
    pub fn addresses(&self) -> Option<[u64; 2]> {
        let context = &self.own_kind().context;
        Some([*context.peer_base.get(context.local as usize)?, context.state])
    }

    /// `needs` has the call's inputs.
    fn check_output(&self, output: &Output, needs: &mut Needs<'_>) -> Result<raw::ty_output> {
        if matches!(output.layout, Layout::Token { .. }) && needs.shape.weights_with_combine() {
            let advice = "the caller sums a token's rows before combine, so weights must come with dispatch";
            return Err(Error::config("layout", "token", advice));
        }
        if let Some(own) = self.in_place() {
            own.check(output)?;
        }
        needs.begin_written();
        let out = output.check(needs)?;
        needs.check_apart()?;
        Ok(out)
    }

    /// Where the sums of a combine go; `needs` has the memory that the call reads.
    fn check_sums(&self, out: &Combined, handle: &Handle, needs: &mut Needs<'_>) -> Result<Sums> {
        needs.begin_written();
        let sums = out.check(needs, handle.room)?;
        needs.check_apart()?;
        if sums.accumulate != 0 && self.open.memory.absences.is_some() {
            let advice =
                "a token is summed again if a rank falls silent, when its old value is gone; add the sum later";
            return Err(Error::argument("accumulate", true, advice));
        }
        Ok(sums)
    }

    /// Refuses halves of a call with in-place output, whose rows leave after all counts have arrived.
    fn check_split(&self) -> Result<()> {
        if self.own_kind().shape.in_place.is_none() {
            return Ok(());
        }
        let advice = "with in-place output rows leave after all counts have arrived, so a call has no halves; use \
                      dispatch, or a context without in_place";
        Err(Error::config("in_place", "of a split dispatch", advice))
    }

    /// Begins a call. Until the returned `Call` is dropped, all launches are of this call, after earlier calls of the
    /// chain. The host waits for no peer and no kernel, unless the driver's queue of launches is full.
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

    fn sent(
        &self,
        lease: Arc<Lease>,
        kind: Arc<Kind>,
        tokens: &Tokens,
        input: raw::ty_tokens,
        counts: Option<CountWords>,
    ) -> Result<Sent> {
        let room = tokens.count.room(&kind.shape)?;
        let views = (self.plan.rounds > 1).then(|| tokens.clone());
        Ok(Sent { lease, room, tokens: input, views, counts, kind, context: self.id() })
    }

    fn sent_rows(&self, rows: &Rows, handle: &Handle, needs: &mut Needs<'_>) -> Result<SentRows> {
        let topk_weight = rows.check(needs, handle.rows, handle.room)?;
        let payload = rows.payload.as_ref().map_or(Ok(0), |payload| payload.check(needs, handle.rows))?;
        let (rows, pitch) = (rows.rows.ptr(), rows.pitch(needs.shape) as u64);
        Ok(SentRows { rows, pitch, topk_weight, payload, call: self.open.pool.number() })
    }

    /// Rows of an output, which was checked.
    fn rows(&self, output: &Output) -> usize {
        output.layout.rows(self.own_kind().shape.local_experts).unwrap_or(0)
    }

    fn handle(
        &self,
        lease: Arc<Lease>,
        kind: Arc<Kind>,
        room: usize,
        input: &raw::ty_tokens,
        output: &Output,
    ) -> Handle {
        let (rows, layout, context) = (self.rows(output), output.layout, self.id());
        // A count in device memory has an address.
        let tokens = (input.count_ptr == 0).then_some(input.count as usize);
        Handle { lease, room, tokens, rows, layout, kind, context }
    }

    /// Launches a call round by round. If the driver refuses a later round, the call is half enqueued for good, which
    /// closes the context. A recorded call does not close it: nothing of the call runs before its graph does.
    fn in_rounds(&self, call: &Call<'_>, mut launch: impl FnMut(usize) -> Result<()>) -> Result<()> {
        (0..self.plan.rounds).try_for_each(|round| {
            launch(round).map_err(|error| if round > 0 && !call.is_recorded() { self.end(round, error) } else { error })
        })
    }

    /// Closes the context because a call is half enqueued; returns the error.
    #[cold]
    fn end(&self, round: usize, error: Error) -> Error {
        let rounds = self.plan.rounds;
        let error = match error {
            Error::Device { what, advice, code, source, .. } => {
                let what = format!("{what} (launch {} of the {rounds} of a call, of which it has {round})", round + 1);
                let advice = format!("{advice}; the call stays unfinished, so build a new context on all ranks");
                Error::Device { what, advice, fatal: true, code, source }
            }
            other => other.ending(),
        };
        self.counters.errors.fetch_add(1, Ordering::Relaxed);
        self.ended.get_or_init(|| error).clone()
    }

    /// `args` are those of all launches of the call, from `dispatch_args`, but for what differs between them. `again`:
    /// by an earlier handle.
    fn launch_dispatch(
        &self,
        call: &Call<'_>,
        phases: u32,
        round: usize,
        args: &mut raw::ty_dispatch_args,
        again: bool,
    ) -> Result<()> {
        (args.phases, args.round) = (phases, round as u32);
        let (kernel, shared) = pick::dispatch(args, again);
        self.launch(call.stream(), kernel, self.sms, self.block, shared, args)
    }

    fn launch_combine(
        &self,
        call: &Call<'_>,
        phases: u32,
        round: usize,
        (handle, kind): (&Handle, &Kind),
        rows: SentRows,
        sums: Option<Sums>,
    ) -> Result<()> {
        let args = raw::ty_combine_args {
            context: call.context(kind),
            handle: raw::ty_handle { call: rows.call, output_rows: handle.rows as u64, ..handle.lease.raw() },
            rows: rows.rows,
            rows_pitch: rows.pitch,
            topk_weight: rows.topk_weight,
            out: sums.map_or(0, |sums| sums.out),
            out_pitch: sums.map_or(0, |sums| sums.pitch),
            out_dtype: sums.map_or(raw::TY_BF16, |sums| sums.dtype),
            accumulate: sums.map_or(0, |sums| sums.accumulate),
            wait_times: sums.map_or(0, |sums| sums.wait_times),
            payload: rows.payload,
            payload_out: sums.map_or(0, |sums| sums.payload),
            payload_words: kind.shape.payload.map_or(0, |words| words.of_row as u32),
            payload_gathered: kind.shape.payload.map_or(0, |words| words.gathered.into()),
            payload_offset: kind.shape.sum_bytes() as u32,
            reserved: 0,
            layout: handle.layout.code(),
            phases,
            round: round as u32,
            tokens: handle.room as u32,
        };
        let kernel = pick::combine(&args, kind.shape.combine_dtype, kind.shape.partial);
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
        // SAFETY: the views in `args` were checked against what the kernel does with them, and are of this device; the
        // rest is the context's memory, which waits for its streams before it is freed.
        unsafe { stream.launch(kernel, grid, block, shared, args) }
    }
}

#[cfg(test)]
#[path = "context_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "context_metadata_tests.rs"]
mod metadata_tests;
