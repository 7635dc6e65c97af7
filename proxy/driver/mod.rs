//! Feeds the machine from real memory and a real transport.
//!
//! Place in the data path: around the machine; one per rank. Runs on its own thread, pinned to a core where one
//! was named, or on a host fiber of the one-thread world, which calls `run` or `poll_once` itself. After start, a pass
//! of `poll_once` never blocks, allocates, locks, logs, formats or makes a system call, with three exceptions: it locks
//! once per request of another thread, an idle thread yields its core where more threads spin than there are cores, and
//! the loss of a peer is logged once.
//!
//! ```text
//!   poll_once:  requests ─▶ doorbells ─▶ step ─▶ post   (Acquire: the device's rows are visible to the NIC before, E2)
//!               poll ─▶ step ─▶ flags                   (Release: E5, E10)
//!               time ─▶ step ─▶ retries, heartbeats ─▶ flush
//! ```
//!
//! Long requests (registering memory, connecting) stop the thread and all its contexts. The proxy notifies its peers
//! before (`begin_busy`), so that they do not take it for dead.
//!
//! Between generations, through `Remote::ask`: close all contexts, reset the transport, exchange addresses, connect,
//! open the contexts anew, and only after a barrier let the devices ring.

mod mailbox;
mod scan;
mod sync;
mod thread;
mod words;

use crate::base::{Error, Rank, Result, wait};
use crate::proxy::machine::{Answer, Cause, ContextConfig, Flag, Group, Input, Machine, Outputs, Report, WatchId};
use crate::proxy::wire::{ContextIdx, Wire, arrival};
use crate::transport::network::imm::MAX_CONTEXTS;
use crate::transport::network::{Event, Failure, Posted, RegionId, Released, Span, Transport, WriteImm};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
pub use thread::{ProxyThread, Remote, ThreadConfig};
use thread::{Request, Shared};
pub use words::{ContextMemory, Words};

/// Passes between two reads of the clock while there is work: a read costs as much as a post.
const POLLS_PER_LOOK: u32 = 64;
/// Steps of time, each with a poll of the transport, after which a notice to peers counts as sent.
const POLLS_TO_NOTIFY: u32 = 4;
/// Longest time to drain an endpoint that always finds more: much longer than all pending events take.
const DRAIN_NS: u64 = 1_000_000_000;
/// How long a proxy that stops tries to notify its peers.
const LEAVE_TIMEOUT_NS: u64 = 100_000_000;

/// The time of a proxy, in nanoseconds from any start; it never goes back. **Unstable**, as
/// [`with_loop`](crate::Proxy::with_loop) is, which takes it.
pub type Clock = Box<dyn Fn() -> u64 + Send>;

/// The clock of the operating system.
pub fn system_clock() -> Clock {
    let start = Instant::now();
    Box::new(move || u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX))
}

/// An open context's memory and its layout.
struct Bound {
    memory: ContextMemory,
    wire: Wire,
}

/// What keeps registered memory alive.
pub type Kept = Arc<dyn Any + Send + Sync>;

/// One rank's proxy.
pub struct Driver<T: Transport> {
    machine: Machine,
    transport: T,
    contexts: [Option<Bound>; MAX_CONTEXTS],
    clock: Clock,
    now_ns: u64,
    /// Passes left until the next read of the clock.
    look_in: u32,
    /// The endpoint returned an error; it is not called again.
    broken: bool,
    shared: Arc<Shared<T>>,
    /// Memory that the transport has registered; dropped after the transport.
    kept: Vec<(RegionId, Kept)>,
    /// Regions of closed contexts that had writes outstanding when they were to be taken back.
    leaving: Vec<RegionId>,
    generation: u32,
    /// Callers with a long request.
    busy: u32,
    /// Peers that were lost by a failed write which the transport has not explained yet.
    failed: Vec<(Rank, Failure)>,
}

/// The machine's access to memory and transport.
struct Hands<'a, T: Transport> {
    /// `None` while the transport hands out events; a post is then refused as `Full` and retried in the next pass.
    transport: Option<&'a mut T>,
    contexts: &'a [Option<Bound>; MAX_CONTEXTS],
    shared: &'a Shared<T>,
    own: Rank,
    /// Peers that were lost by a failed write, and why it failed.
    failed: &'a mut Vec<(Rank, Failure)>,
}

impl<T: Transport> Hands<'_, T> {
    fn answer(&self, posted: Result<Posted>) -> Answer {
        match posted {
            Ok(Posted::Accepted) => Answer::Accepted,
            Ok(Posted::Full) => Answer::Full,
            Err(error) => {
                self.shared.fail(error);
                Answer::Refused
            }
        }
    }
}

/// Ends the waits of the devices of some contexts because of `rank`: a peer that is lost, or this rank, whose proxy
/// cannot go on.
fn notify_devices(contexts: &[Option<Bound>], rank: Rank, concerns: impl Fn(&Wire) -> bool) {
    for Bound { memory, wire } in contexts.iter().flatten() {
        if concerns(wire) {
            memory.lost.publish(1 + rank.index(), u64::MAX);
            // After the rank's own word, which a device looks at once it sees this one.
            memory.lost.publish(0, u64::from(rank.0) + 1);
        }
    }
}

impl<T: Transport> Outputs for Hands<'_, T> {
    fn post(&mut self, write: &WriteImm) -> Answer {
        let Some(transport) = &mut self.transport else { return Answer::Full };
        let posted = transport.post(write);
        self.answer(posted)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Answer {
        let Some(transport) = &mut self.transport else { return Answer::Full };
        let posted = transport.send(peer, message);
        self.answer(posted)
    }

    fn life(&self, context: ContextIdx) -> u16 {
        let bound = self.contexts.get(context.index()).and_then(Option::as_ref);
        let word = bound.and_then(|Bound { memory, wire }| memory.chunks.get(wire.life_word()));
        word.map_or(0, |word| word.load(Ordering::Relaxed) as u16)
    }

    fn flag(&mut self, flag: Flag) {
        let (Flag::Arrived { context, .. } | Flag::StagingFree { context, .. } | Flag::Life { context, .. }) = flag;
        let Some(Bound { memory, wire }) = self.contexts.get(context.index()).and_then(Option::as_ref) else { return };
        let (words, at, word) = match flag {
            Flag::Arrived { direction, source, chunk, epoch, place, .. } => {
                (&memory.arrived, wire.arrival_word(direction, epoch, place), arrival(epoch, source, chunk))
            }
            Flag::StagingFree { direction, link, epoch, .. } => {
                (&memory.staging_free, wire.staging_free_word(direction, epoch, link), epoch)
            }
            Flag::Life { peer, count, .. } => (&memory.lost, 1 + peer.index(), u64::from(count)),
        };
        // E5, E10: acquired by the one device thread that polls these words.
        words.publish(at, word);
    }

    fn report(&mut self, report: Report) {
        match report {
            Report::PeerLost { peer, ref cause } => {
                log::warn!(target: crate::base::targets::PROXY, "rank {}: lost rank {peer}: {cause}", self.own);
                if let Cause::WriteFailed { failure, .. } = cause {
                    self.failed.push((peer, *failure));
                }
                notify_devices(self.contexts, peer, |wire| wire.nodes().node_of(peer).is_some())
            }
            Report::BadDoorbell { context, .. } => {
                let stopped = self.contexts.get(context.index()).map_or(&[][..], std::slice::from_ref);
                notify_devices(stopped, self.own, |_| true);
            }
        }
        self.shared.report(report);
    }
}

impl<T: Transport + 'static> Driver<T> {
    /// A proxy without contexts.
    pub fn new(machine: Machine, transport: T, clock: Clock) -> Driver<T> {
        let now_ns = clock();
        let shared = Arc::new(Shared::new());
        Driver {
            machine,
            transport,
            contexts: Default::default(),
            clock,
            now_ns,
            look_in: 0,
            broken: false,
            shared,
            kept: Vec::new(),
            leaving: Vec::new(),
            generation: 0,
            busy: 0,
            failed: Vec::new(),
        }
    }

    /// A handle for other threads (or fibers): requests and reports.
    pub fn remote(&self) -> Remote<T> {
        Remote::new(Arc::clone(&self.shared))
    }

    /// The machine, read-only.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The endpoint, to register memory and to connect.
    pub fn transport(&mut self) -> &mut T {
        &mut self.transport
    }

    /// Begins a generation, unless it has begun: closes all contexts and resets the transport, so that peers must
    /// exchange addresses anew.
    ///
    /// # Errors
    /// `Generation` if a later one has begun; `Transport` if the endpoint is broken.
    pub fn enter_generation(&mut self, generation: u32) -> Result<()> {
        if let Some(reason) = self.shared.reason() {
            return Err(reason);
        }
        if self.generation == generation {
            return Ok(());
        }
        // Going back would close the contexts of the newer generation.
        if generation < self.generation {
            return Err(Error::Generation { rank: self.machine.rank(), generation, newest: self.generation });
        }
        (0..MAX_CONTEXTS as u8).for_each(|index| self.close(ContextIdx(index)));
        self.machine.forget_parted();
        self.transport.reset()?;
        self.generation = generation;
        Ok(())
    }

    /// Notifies peers that this rank may be silent for a while, because a long request takes the thread. Lasts until
    /// as many calls of [`end_busy`](Self::end_busy).
    pub fn begin_busy(&mut self) {
        self.busy += 1;
        self.machine.set_busy(true);
    }

    /// Whether peers have been notified, as far as their queues had room; no notice waits for another pass.
    pub fn has_notified(&mut self) -> bool {
        for _ in 0..POLLS_TO_NOTIFY {
            let now_ns = self.now_ns;
            self.step(Input::Time { now_ns });
            // An endpoint may send only when polled.
            self.events();
        }
        self.machine.has_notified() || self.broken
    }

    /// Notifies peers that this rank is back, unless another caller's long request goes on.
    pub fn end_busy(&mut self) {
        self.busy = self.busy.saturating_sub(1);
        if self.busy == 0 {
            self.tick();
            self.machine.set_busy(false);
        }
    }

    /// Polls until nothing more has arrived, for a second at most: leftover immediates of closed contexts, which no
    /// open context counts.
    pub fn drain(&mut self) {
        let until = (self.clock)().saturating_add(DRAIN_NS);
        while self.events() && (self.clock)() < until {}
    }

    /// The generation that the proxy has entered.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Registers memory, and keeps it alive until it is taken back or the transport is gone.
    ///
    /// # Errors
    /// As [`Transport::register`].
    ///
    /// # Safety
    /// The span lives as long as `memory`, and is accessed through raw addresses alone.
    pub unsafe fn register(&mut self, span: Span, memory: Kept) -> Result<RegionId> {
        // SAFETY: the caller's promise; `memory` is kept until nothing touches the span any more.
        let region = unsafe { self.transport.register(span) }?;
        self.kept.push((region, memory));
        Ok(region)
    }

    /// Has a region taken back as soon as nothing posted from it is outstanding and peers have let go of it (P13): by
    /// the [`take_back`](Self::take_back) after that.
    pub fn release(&mut self, region: RegionId) {
        if self.is_registered(region) && !self.is_leaving(region) {
            self.leaving.push(region);
        }
    }

    /// Whether a region that was released is still to be taken back.
    pub fn is_leaving(&self, region: RegionId) -> bool {
        self.leaving.contains(&region)
    }

    /// Whether a region is not taken back, or could not be.
    pub fn is_registered(&self, region: RegionId) -> bool {
        self.kept.iter().any(|(kept, _)| *kept == region)
    }

    /// Takes back released regions without outstanding writes. Returns their memory for the caller to drop: freeing it
    /// may wait for kernels, which may wait for this thread.
    pub fn take_back(&mut self) -> Vec<Kept> {
        let mut freed = Vec::new();
        for region in std::mem::take(&mut self.leaving) {
            match self.transport.deregister(region) {
                Ok(Released::Busy) => self.leaving.push(region),
                Ok(Released::Done) => {
                    freed.extend(self.kept.extract_if(.., |(kept, _)| *kept == region).map(|(_, memory)| memory));
                }
                // The region may still be accessed: it is kept until the transport is gone.
                Err(error) => self.shared.fail(error),
            }
        }
        freed
    }

    /// Opens a context. All its ranks must have opened it before any of them rings.
    ///
    /// # Errors
    /// `Config` if the machine refuses it, or the memory does not have the lengths that the wire asks for.
    pub fn open(&mut self, index: ContextIdx, config: &ContextConfig<'_>, memory: ContextMemory) -> Result<()> {
        let (asked, given) = (config.wire.word_counts(), memory.counts());
        if asked != given {
            return Err(Error::config("shared words", format!("{given:?}"), format!("the wire asks for {asked:?}")));
        }
        // Peers' time limits run from now on.
        self.tick();
        let now_ns = self.now_ns;
        self.step(Input::Time { now_ns });
        self.machine.open(index, config)?;
        if let Some(context) = self.contexts.get_mut(index.index()) {
            *context = Some(Bound { memory, wire: config.wire.clone() });
        }
        Ok(())
    }

    /// Posts what a context's device has rung by now. True if nothing that can be posted is left.
    pub fn settle(&mut self, index: ContextIdx) -> bool {
        if self.broken {
            return true;
        }
        let rung = self.doorbells_of(index);
        let now_ns = self.now_ns;
        self.step(Input::Time { now_ns });
        !rung && self.machine.is_settled(index)
    }

    /// Closes a context: chunks not posted by then are never posted ([`settle`](Self::settle)). The transport may read
    /// its staging until `Machine::under_way` is 0; peers may write its receive buffer until its arena is taken back.
    pub fn close(&mut self, index: ContextIdx) {
        self.machine.close(index);
        if let Some(context) = self.contexts.get_mut(index.index()) {
            *context = None;
        }
    }

    /// Runs until `Remote::stop`, then notifies the peers. When idle and `yields()`, yields through `base::wait`.
    pub fn run(&mut self, yields: impl Fn() -> bool) {
        let mut idle = 0u32;
        while !self.shared.is_stopped() {
            idle = if self.poll_once() { 0 } else { idle.saturating_add(1) };
            match idle {
                0 => {}
                _ if yields() => wait::relax("proxy", idle),
                _ => std::hint::spin_loop(),
            }
        }
        self.leave(yields);
        self.shared.end();
    }

    /// Whether the proxy was asked to stop.
    pub fn is_stopped(&self) -> bool {
        self.shared.is_stopped()
    }

    /// Notifies the peers and ends, where `poll_once` is called instead of `run`.
    pub fn finish(&mut self) {
        self.leave(|| true);
        self.shared.end();
    }

    fn leave(&mut self, yields: impl Fn() -> bool) {
        self.machine.leave();
        let until = (self.clock)().saturating_add(LEAVE_TIMEOUT_NS);
        while !self.machine.has_left() && !self.broken && (self.clock)() < until {
            self.poll_once();
            if yields() {
                wait::relax("proxy leaving", 0);
            }
        }
    }

    /// Polls requests, doorbells, transport and time once. False if there was nothing to do.
    pub fn poll_once(&mut self) -> bool {
        let mut busy = self.requests();
        if self.broken {
            // Time is not stepped, so that no peer counts as silent.
            return busy;
        }
        busy |= self.doorbells();
        busy |= self.events();
        if self.look_in == 0 || !busy {
            self.tick();
        }
        self.look_in -= 1;
        let now_ns = self.now_ns;
        self.step(Input::Time { now_ns });
        busy
    }

    fn tick(&mut self) {
        self.now_ns = (self.clock)();
        self.look_in = POLLS_PER_LOOK;
    }

    /// Steps the machine, and rings the doorbells of what it has posted since the last poll.
    fn step(&mut self, input: Input<'_>) {
        let Driver { machine, transport, contexts, shared, failed, .. } = self;
        let own = machine.rank();
        let sound = if self.broken { None } else { Some(&mut *transport) };
        machine.step(input, &mut Hands { transport: sound, contexts, shared, own, failed });
        if self.broken {
            return;
        }
        if let Err(error) = transport.flush() {
            self.give_up(error);
        }
    }

    fn requests(&mut self) -> bool {
        let mut any = false;
        while let Some(request) = self.shared.next_request() {
            let request: Request<T> = request;
            request(self);
            any = true;
        }
        any
    }

    fn doorbells(&mut self) -> bool {
        (0..MAX_CONTEXTS as u8).fold(false, |any, context| any | self.doorbells_of(ContextIdx(context)))
    }

    /// Gives each rung doorbell of a context to the machine, which posts its chunk before the next one is searched.
    fn doorbells_of(&mut self, context: ContextIdx) -> bool {
        let Driver { machine, transport, contexts, shared, failed, .. } = self;
        let Some(Bound { memory, .. }) = contexts.get(context.index()).and_then(Option::as_ref) else { return false };
        let own = machine.rank();
        let mut hands = Hands { transport: Some(transport), contexts, shared, own, failed };
        let (mut any, mut from) = (false, 0);
        while let Some(group) = scan::next_group(machine.groups(context), from, memory.doorbells.all()) {
            let watches = machine.groups(context).get(group).map_or(0..0, Group::range);
            for index in watches {
                any |= ring(machine, WatchId { context, index: index as u16 }, memory, &mut hands);
            }
            machine.even_out(context, group);
            from = group + 1;
        }
        any
    }

    /// Gives the transport's events to the machine.
    fn events(&mut self) -> bool {
        if self.broken {
            return false;
        }
        let Driver { machine, transport, contexts, shared, failed, .. } = self;
        let own = machine.rank();
        let mut hands = Hands { transport: None, contexts, shared, own, failed };
        let polled = transport.poll(&mut |event| machine.step(input(event), &mut hands));
        for (peer, failure) in self.failed.drain(..) {
            self.shared.explain(peer, self.transport.explain(failure));
        }
        match polled {
            Ok(count) => count > 0,
            Err(error) => {
                self.give_up(error);
                false
            }
        }
    }

    /// Ends all traffic: the rank's devices are notified, so that they do not wait, and callers get `error`.
    fn give_up(&mut self, error: Error) {
        self.broken = true;
        self.shared.give_up(error);
        notify_devices(&self.contexts, self.machine.rank(), |_| true);
    }
}

impl<T: Transport> Drop for Driver<T> {
    /// However the driver ends, as when its loop is unwound or never run: callers are notified, and do not wait for an
    /// answer.
    fn drop(&mut self) {
        self.shared.end();
    }
}

/// Gives one doorbell to the machine, if it is rung.
fn ring<T: Transport>(machine: &mut Machine, watch: WatchId, memory: &ContextMemory, hands: &mut Hands<'_, T>) -> bool {
    let Some(wanted) = machine.watches(watch.context).get(usize::from(watch.index)).copied() else { return false };
    let Some(doorbell) = memory.doorbells.get(wanted.word as usize) else { return false };
    // E1: the device released the rows, and the count of chunks, before the doorbell.
    let word = doorbell.load(Ordering::Acquire);
    if !wanted.is_rung(word) {
        return false;
    }
    let count = wanted.chunks_word.and_then(|at| memory.chunks.get(at as usize));
    let chunks = count.map_or(0, |word| word.load(Ordering::Relaxed));
    let chunks = u32::try_from(chunks).unwrap_or(u32::MAX);
    if wanted.may_go_stale() {
        // The device rings it again at the earliest once staging is free, which is published after this store.
        doorbell.store(0, Ordering::Relaxed);
    }
    machine.step(Input::Doorbell { watch, bytes: word as u32, chunks }, hands);
    true
}

fn input(event: Event<'_>) -> Input<'_> {
    match event {
        Event::Sent { token } => Input::Sent { token },
        Event::Failed { token, failure, .. } => Input::Failed { token, failure },
        Event::Dropped { token, .. } => Input::Dropped { token },
        Event::Imm { imm } => Input::Immediate { imm },
        Event::Message { peer, bytes } => Input::Message { peer, bytes },
    }
}

/// How long a request to a proxy may take: one pass of the loop, and the request's own work.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests;
