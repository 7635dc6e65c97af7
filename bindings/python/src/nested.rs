//! Whose error is whose where calls are nested: a signal's handler calls in the wait of the call that it interrupted.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use tokenyard::Error;

/// The calls of one thread that wait, each in a handler of the one before.
#[derive(Default)]
pub(super) struct Waits {
    /// How many there are.
    number: AtomicUsize,
    /// What a call found while an inner one looked: which of them it is, from 1; 0 of one whose wait was interrupted.
    kept: Mutex<Vec<(usize, Error)>>,
}

impl Waits {
    /// Begins the innermost one, and returns its number.
    pub fn begin(&self) -> usize {
        self.number.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Ends it. What it would have raised is left to the next look if it was interrupted.
    pub fn end(&self, wait: usize, interrupted: bool) {
        self.number.fetch_sub(1, Ordering::Relaxed);
        if interrupted {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.iter_mut().filter(|(of, _)| *of == wait).for_each(|(of, _)| *of = 0);
        }
    }

    /// The innermost one.
    pub fn innermost(&self) -> Option<usize> {
        Some(self.number.load(Ordering::Relaxed)).filter(|number| *number > 0)
    }

    /// Keeps what it found.
    pub fn keep(&self, wait: usize, found: Option<Error>) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).extend(found.map(|error| (wait, error)));
    }

    /// What is kept of a wait, or with 0 of those that were interrupted.
    pub fn take(&self, wait: usize) -> Option<Error> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(of, _)| *of == wait)?;
        Some(kept.remove(at).1)
    }
}
