//! The order of work that is enqueued on several streams, and what a capture keeps for its graph.
//!
//! Place: beside `device`. Contexts declare which of their calls follow one another (`Chains`). Callers may be on any
//! thread. A lock is held while a call enqueues; nothing waits for a device.

use super::Queue;
use super::view::{Owner, View};
use crate::base::{Error, Membership, Result};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Chains of calls of a context: of dispatches, of combines and of barriers.
pub(crate) const CHAINS: usize = 3;

/// The calls of a context, on whichever streams: each runs after the earlier calls of its own chain.
pub(crate) struct Chains {
    number: u64,
    membership: Membership,
    enqueued: Mutex<Enqueued>,
}

/// Where a context's calls were enqueued.
pub(crate) struct Enqueued {
    /// Of each chain: the queue of the last call; earlier calls on other queues come before that queue's earlier work.
    last: [Option<Queue>; CHAINS],
    /// Queues that may still have work of the context.
    queues: Vec<Queue>,
    ordered: bool,
    /// Whether the device looks for overlaps once another library's capture has recorded calls, whose replays may
    /// overlap calls that are enqueued here.
    detects: bool,
    /// Whether it does so from now on.
    guarded: bool,
}

impl Chains {
    /// No call yet. Without `ordered` calls on several streams run in no order, and are guarded from the first on.
    /// `detects`: as of [`Enqueued::guard`]. `membership`: of the rank whose context it is.
    pub fn new(ordered: bool, detects: bool, membership: Membership) -> Chains {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let (last, queues) = Default::default();
        let enqueued = Enqueued { last, queues, ordered, detects, guarded: !ordered };
        Chains { number: NEXT.fetch_add(1, Ordering::Relaxed), membership, enqueued: Mutex::new(enqueued) }
    }

    /// Refuses a context whose rank has regrouped since: its peers have left.
    ///
    /// # Errors
    /// `Generation`, with both numbers.
    pub fn check_current(&self) -> Result<()> {
        self.membership.check()
    }

    /// Identifies contexts of one process.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Until the returned guard is dropped, no other call of the context is enqueued.
    pub fn lock(&self) -> MutexGuard<'_, Enqueued> {
        self.enqueued.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Enqueued {
    /// Orders the next call of `chain`, on `queue`, which does not capture, after the last one. That costs an event
    /// where the queue changes: the new queue waits for whatever the other queue holds by now, the context's work or
    /// not; if the other queue captures, for what was enqueued before its capture.
    ///
    /// # Errors
    /// As [`Queue::wait_for`].
    pub fn follow(&mut self, chain: usize, queue: &Queue) -> Result<()> {
        let Some(last) = self.last.get_mut(chain).filter(|_| self.ordered) else { return Ok(()) };
        if last.as_ref().is_some_and(|last| last.same(queue)) {
            return Ok(());
        }
        if let Some(before) = last.as_ref() {
            queue.wait_for(before)?;
        }
        *last = Some(queue.clone());
        Ok(())
    }

    /// Whether launches count themselves, so that the device detects overlaps: from the first call on that another
    /// library's capture records (`recorded`), in a context that detects them.
    pub fn guard(&mut self, recorded: bool) -> bool {
        self.guarded |= recorded && self.detects;
        self.guarded
    }

    /// Remembers where work is enqueued, for `drain`.
    pub fn note(&mut self, queue: &Queue) {
        note(&mut self.queues, queue);
    }

    /// Waits for all that was enqueued. Returns whether it is over.
    pub fn drain(&self, patience: Duration) -> bool {
        self.queues.iter().all(|queue| queue.drain(patience).is_ok())
    }
}

/// Adds a queue to those that may have work. Those that have none are forgotten as a new one comes.
pub(super) fn note(queues: &mut Vec<Queue>, queue: &Queue) {
    if !queues.iter().any(|known| known.same(queue)) {
        queues.retain(|known| !known.is_idle());
        queues.push(queue.clone());
    }
}

/// The last stream on which something was used that serves one piece of work after the other, as a handle does.
pub(crate) struct LastUse {
    /// As of the context's calls: without it uses run in no order.
    ordered: bool,
    /// One more than the queue's number, or 0: most uses are on the same queue, and take no lock.
    number: AtomicU64,
    queue: Mutex<Option<Queue>>,
    /// Calls of which the first half is enqueued and the second is not.
    halves: AtomicU32,
}

impl LastUse {
    /// No use yet.
    pub fn new(ordered: bool) -> LastUse {
        LastUse { ordered, number: AtomicU64::new(0), queue: Mutex::default(), halves: AtomicU32::new(0) }
    }

    /// Opens a call whose second half is to come: until the returned value is dropped, no graph that uses the same
    /// thing is launched. The caller holds its context's lock.
    pub fn open(self: &Arc<Self>) -> Half {
        self.halves.fetch_add(1, Ordering::Relaxed);
        Half(self.clone())
    }

    /// Orders what is enqueued next, on `queue`, which does not capture, after the last use. The caller holds its
    /// context's lock.
    ///
    /// # Errors
    /// As [`Queue::wait_for`].
    pub fn follow(&self, queue: &Queue) -> Result<()> {
        let number = queue.raw().wrapping_add(1);
        if !self.ordered || self.number.load(Ordering::Relaxed) == number {
            return Ok(());
        }
        let mut last = self.lock();
        if let Some(before) = last.as_ref() {
            queue.wait_for(before)?;
        }
        *last = Some(queue.clone());
        self.number.store(number, Ordering::Relaxed);
        Ok(())
    }

    /// Whether work on `queue` comes after the last use by itself. The caller holds its context's lock.
    pub fn is_on(&self, queue: &Queue) -> bool {
        [0, queue.raw().wrapping_add(1)].contains(&self.number.load(Ordering::Relaxed))
    }

    /// Whether another queue can wait for it now.
    pub fn can_be_followed(&self) -> bool {
        self.lock().as_ref().is_none_or(Queue::can_be_waited_for)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Queue>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call's first half, as long as its second was not enqueued.
pub(crate) struct Half(Arc<LastUse>);

impl Drop for Half {
    fn drop(&mut self) {
        self.0.halves.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A bit beside those of the chains of a context's recorded calls: some of the calls are not guarded.
const UNGUARDED: u8 = 1 << CHAINS;

/// What a capture keeps, and its graph afterwards.
#[derive(Default)]
pub(crate) struct Recording {
    owners: Vec<Owner>,
    /// The contexts' chains, with a bit for each chain that has recorded calls, and `UNGUARDED`; ordered by number, in
    /// which order they are locked.
    chains: Vec<(Arc<Chains>, u8)>,
    /// The last uses of what recorded work uses: a launch is a use.
    uses: Vec<Arc<LastUse>>,
    patience: Duration,
}

impl Recording {
    pub fn keep(&mut self, owner: Owner) {
        self.owners.push(owner);
    }

    pub fn keep_view(&mut self, view: &View) {
        self.owners.extend(view.owner().cloned());
    }

    /// Records that a call of a context was captured, `guarded` or not. `context` is what it needs, `patience` how long
    /// its kernels may take to end.
    pub fn call(
        &mut self,
        chains: &Arc<Chains>,
        chain: usize,
        guarded: bool,
        context: impl FnOnce() -> Owner,
        patience: Duration,
    ) {
        let bit = 1 << chain | if guarded { 0 } else { UNGUARDED };
        match self.chains.binary_search_by_key(&chains.number, |(known, _)| known.number) {
            Ok(at) => self.chains.iter_mut().skip(at).take(1).for_each(|(_, bits)| *bits |= bit),
            Err(at) => {
                self.chains.insert(at, (chains.clone(), bit));
                self.owners.push(context());
                self.patience = self.patience.max(patience);
            }
        }
    }

    /// Records that captured work uses the thing of `last`.
    pub fn uses(&mut self, last: &Arc<LastUse>) {
        if !self.uses.iter().any(|known| Arc::ptr_eq(known, last)) {
            self.uses.push(last.clone());
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    pub(super) fn patience(&self) -> Duration {
        self.patience
    }

    /// Locks the contexts that recorded calls.
    pub(super) fn chains(&self) -> Locked<'_> {
        let mut each = self.chains.iter().map(|(chains, bits)| (chains.lock(), *bits));
        Locked { first: each.next(), further: each.collect() }
    }

    /// Whether its graph may be launched now.
    ///
    /// # Errors
    /// `Generation` where the rank of one of its contexts has regrouped since: a replay would wait for peers that have
    /// left. `Argument` between the halves of a call that uses the same thing: the graph may dispatch into its handle.
    pub(super) fn check(&self) -> Result<()> {
        self.chains.iter().try_for_each(|(chains, _)| chains.check_current())?;
        if self.uses.iter().any(|last| last.halves.load(Ordering::Relaxed) != 0) {
            return Err(Error::argument(
                "graph",
                "recorded with the handle of a combine, or of a dispatch again, that is sent and not received",
                "enqueue its receiving half first",
            ));
        }
        Ok(())
    }

    /// Orders a launch, on `queue`, after the last use of all that it uses.
    pub(super) fn follow_uses(&self, queue: &Queue) -> Result<()> {
        self.uses.iter().try_for_each(|last| last.follow(queue))
    }
}

/// Contexts of a graph, none of whose other calls is enqueued meanwhile. Most graphs have one context, and then nothing
/// is allocated.
pub(super) struct Locked<'a> {
    first: Option<(MutexGuard<'a, Enqueued>, u8)>,
    further: Vec<(MutexGuard<'a, Enqueued>, u8)>,
}

impl Locked<'_> {
    /// Orders the graph's calls, on `queue`, after earlier calls.
    ///
    /// # Errors
    /// `Argument` if they are not guarded though another library's graphs have calls of the same context: nothing would
    /// detect an overlap of the two. `Device` if the driver refuses.
    pub fn follow(mut self, queue: &Queue) -> Result<Self> {
        if self.first.iter().chain(&self.further).any(|(enqueued, bits)| enqueued.guarded && bits & UNGUARDED != 0) {
            return Err(Error::argument(
                "graph",
                "recorded before another library's capture recorded calls of the same context",
                "record it again, so that its launches are guarded against that library's",
            ));
        }
        for (enqueued, bits) in self.first.iter_mut().chain(&mut self.further) {
            for chain in (0..CHAINS).filter(|chain| *bits & (1 << chain) != 0) {
                enqueued.follow(chain, queue)?;
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Device;

    /// Of another library's capture: its replays are enqueued unseen.
    #[test]
    fn a_graph_that_nothing_guards_is_refused_once_another_library_has_recorded_calls() {
        let device = Device::cpu().unwrap();
        let stream = device.new_stream().unwrap();
        let chains = Arc::new(Chains::new(true, true, Membership::default()));
        let record = |guarded| {
            let mut recording = Recording::default();
            recording.call(&chains, 0, guarded, || Arc::new(()), Duration::ZERO);
            recording.call(&chains, 1, true, || Arc::new(()), Duration::ZERO);
            recording
        };
        let launch = |recording: &Recording| recording.chains().follow(stream.queue()).map(|_| ());
        let (before, after) = (record(false), record(true));
        assert!(!chains.lock().guard(false), "no capture of another library yet");
        launch(&before).unwrap();
        assert!(chains.lock().guard(true) && chains.lock().guard(false), "it stays");
        let refused = launch(&before).unwrap_err();
        assert!(refused.to_string().contains("record it again"), "{refused}");
        launch(&after).unwrap();
    }

    /// The caller promised to order that library's replays.
    #[test]
    fn calls_are_guarded_only_in_contexts_that_detect_overlaps() {
        let guarded = |detects| Chains::new(true, detects, Membership::default()).lock().guard(true);
        assert_eq!([true, false].map(guarded), [true, false]);
    }

    #[test]
    fn queues_without_work_are_forgotten_when_another_comes() {
        let device = Device::cpu().unwrap();
        let chains = Chains::new(true, true, Membership::default());
        for _ in 0..100 {
            let stream = device.new_stream().unwrap();
            chains.lock().note(stream.queue());
            chains.lock().note(stream.queue());
        }
        assert_eq!(chains.lock().queues.len(), 1);
        let captures = device.new_stream().unwrap();
        captures.begin_capture().unwrap();
        chains.lock().note(captures.queue());
        chains.lock().note(device.new_stream().unwrap().queue());
        assert_eq!(chains.lock().queues.len(), 2, "a queue that captures is not idle");
    }
}
