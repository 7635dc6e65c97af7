//! What a proxy's thread and its callers exchange: requests, the flag for waiting requests, answers, and the end.
//!
//! Place in the data path: the proxy's thread loads one flag here in each pass of its loop. It locks only where a
//! request waits. Callers lock for a few instructions. No thread waits while it holds a lock.
//!
//! ```text
//!   caller                                          proxy's thread
//!   put: lock, push, `waiting` = true ──────▶ take: `waiting`? lock, pop; if empty `waiting` = false
//!   look: `ended`? then the answer    ◀────── Slip::run: the answer is stored
//!   leave: the answer, or nobody waits ─────▶ Slip::run: the answer comes back, to be undone
//!   reason                            ◀────── give_up: the reason is set; end: `ended` = true
//! ```
//!
//! - `waiting` is loaded without a lock. It is written only under the lock of the queue, so it is true whenever the
//!   queue has something and nobody holds the lock. It orders nothing: the lock protects the queue.
//! - `ended` is loaded without a lock, too. It is released after everything that the thread did. A caller that acquires
//!   it finds the reason, and the answer if there is one, but must load the answer after `ended`: an earlier load may
//!   have been too early.
//!
//! `tests/loom.rs` runs this file over all orders of two and three threads, with the memory model's stale loads.

use super::sync::{AtomicBool, CachePadded, Mutex, MutexGuard, OnceLock, Ordering};
use std::collections::VecDeque;
use std::sync::PoisonError;

/// Requests of any threads to one thread, and the reason for its end.
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

    /// Queues a request for the thread.
    pub fn put(&self, request: R) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.push_back(request);
        // Relaxed: the lock protects the queue.
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

    /// Sets the reason for which the thread is about to end. The first reason counts.
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

    /// The reason for which the thread ended, if one was set.
    pub fn reason(&self) -> Option<&E> {
        self.reason.get()
    }
}

/// One request and its answer. The thread that takes the request out runs it or drops it.
pub struct Slip<Q, A> {
    request: Mutex<Option<Q>>,
    answer: Mutex<Answer<A>>,
}

struct Answer<A> {
    answer: Option<A>,
    /// Nobody waits for it any more.
    unwanted: bool,
}

impl<Q, A> Slip<Q, A> {
    /// Not run yet.
    pub fn new(request: Q) -> Slip<Q, A> {
        Slip { request: Mutex::new(Some(request)), answer: Mutex::new(Answer { answer: None, unwanted: false }) }
    }

    /// Takes the request out, unless it was taken before. Releases the lock before it returns.
    fn open(&self) -> Option<Q> {
        self.request.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// On the thread: runs the request and stores its answer, unless it was withdrawn. Gives the answer back if the
    /// caller has left.
    pub fn run(&self, request: impl FnOnce(Q) -> A) -> Option<A> {
        let answer = request(self.open()?);
        let mut place = self.answer();
        if place.unwanted {
            return Some(answer);
        }
        place.answer = Some(answer);
        None
    }

    fn answer(&self) -> MutexGuard<'_, Answer<A>> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The caller's poll: `None` to poll again, `Some(None)` if the thread has ended without an answer.
    pub fn look<R, E>(&self, mailbox: &Mailbox<R, E>) -> Option<Option<A>> {
        // Loaded before the answer: the thread may store an answer and end between the two loads.
        let ended = mailbox.has_ended();
        let answer = self.answer().answer.take();
        if answer.is_none() && ended { Some(None) } else { answer.map(Some) }
    }

    /// Ends the caller's wait: a request that has not begun never begins. True if it had not begun.
    pub fn withdraw(&self) -> bool {
        self.open().is_some()
    }

    /// Ends the caller's wait for a request that may have begun: its answer, if that is there by now. A later one goes
    /// back to the thread.
    pub fn leave(&self) -> Option<A> {
        let mut place = self.answer();
        place.unwanted = true;
        place.answer.take()
    }
}
