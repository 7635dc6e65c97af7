//! What a proxy's thread and its callers hand each other: requests, the flag that says so, answers, and the end.
//!
//! Place in the data path: the proxy's thread loads one flag here in each pass of its loop. It locks only where a
//! request waits. Callers lock for a few instructions. Nobody waits while it holds a lock.
//!
//! ```text
//!   caller                                          proxy's thread
//!   put: lock, push, `waiting` = true ──────▶ take: `waiting`? lock, pop; if empty `waiting` = false
//!   look: `ended`? then the answer    ◀────── Slip::run: the answer is stored
//!   reason                            ◀────── give_up: the reason is set; end: `ended` = true
//! ```
//!
//! - `waiting` is looked at without a lock. It is written under the lock of the queue alone, so it is true whenever the
//!   queue has something and nobody holds the lock. It orders nothing: what it announces lies behind the lock.
//! - `ended` is looked at without a lock, too. It is released after everything that the thread did. Whoever acquires it
//!   finds the reason, and the answer if there is one, but must look for the answer afterwards: before, it may not have
//!   been there.
//!
//! `tests/loom.rs` runs this file over all orders of two and three threads, with the memory model's stale loads.

use super::sync::{AtomicBool, CachePadded, Mutex, OnceLock, Ordering};
use std::collections::VecDeque;
use std::sync::PoisonError;

/// Requests of any threads to one, and why that one ended.
pub struct Mailbox<R, E> {
    /// On a line of its own, as the proxy's thread loads it all the time.
    waiting: CachePadded<AtomicBool>,
    requests: Mutex<VecDeque<R>>,
    ended: AtomicBool,
    /// The first reason that was given.
    reason: OnceLock<E>,
}

impl<R, E> Mailbox<R, E> {
    /// No request, and not ended.
    pub fn new() -> Mailbox<R, E> {
        Mailbox {
            waiting: CachePadded::new(AtomicBool::new(false)),
            requests: Mutex::new(VecDeque::new()),
            ended: AtomicBool::new(false),
            reason: OnceLock::new(),
        }
    }

    /// Leaves a request for the thread.
    pub fn put(&self, request: R) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.push_back(request);
        // Relaxed: what it announces lies behind the lock.
        self.waiting.store(true, Ordering::Relaxed);
    }

    /// The oldest request. Only the thread takes.
    pub fn take(&self) -> Option<R> {
        if !self.waiting.load(Ordering::Relaxed) {
            return None;
        }
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let request = requests.pop_front();
        if request.is_none() {
            self.waiting.store(false, Ordering::Relaxed);
        }
        request
    }

    /// Why the thread is about to end. The first reason counts.
    pub fn give_up(&self, reason: E) {
        let _ = self.reason.set(reason);
    }

    /// The thread takes no more requests.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Whether the thread takes no more requests.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Why nothing comes or goes any more, if a reason was given.
    pub fn reason(&self) -> Option<&E> {
        self.reason.get()
    }
}

/// One request and its answer. Whoever takes the request out runs it or drops it.
pub struct Slip<Q, A> {
    request: Mutex<Option<Q>>,
    answer: Mutex<Option<A>>,
}

impl<Q, A> Slip<Q, A> {
    /// Not run yet.
    pub fn new(request: Q) -> Slip<Q, A> {
        Slip { request: Mutex::new(Some(request)), answer: Mutex::new(None) }
    }

    /// Takes the request out, unless somebody has. The lock is not held any more when this returns.
    fn open(&self) -> Option<Q> {
        self.request.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// On the thread: runs the request and stores its answer, unless it was withdrawn.
    pub fn run(&self, request: impl FnOnce(Q) -> A) {
        let Some(asked) = self.open() else { return };
        let answer = request(asked);
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
    }

    /// The caller's look: `None` to look again, `Some(None)` if the thread has ended and there will be no answer.
    pub fn look<R, E>(&self, mailbox: &Mailbox<R, E>) -> Option<Option<A>> {
        // Before the answer is looked at: an answer may be stored, and the thread end, between the two.
        let ended = mailbox.has_ended();
        let answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if answer.is_none() && ended { Some(None) } else { answer.map(Some) }
    }

    /// The caller waits no longer: a request that has not begun never does. Whether it had not.
    pub fn withdraw(&self) -> bool {
        self.open().is_some()
    }
}
