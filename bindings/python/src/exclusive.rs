//! One thread at a time, without holding the interpreter's lock in the wait.

use pyo3::prelude::*;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How long a thread waits before it looks for signals.
const PATIENCE: Duration = Duration::from_millis(50);

/// What one thread at a time may hold.
#[derive(Default)]
pub(super) struct Exclusive {
    held: Mutex<bool>,
    freed: Condvar,
}

/// Holds it until dropped.
pub(super) struct Held<'a>(&'a Exclusive);

impl Exclusive {
    /// Waits until no other thread holds it. The exception of a signal's handler ends the wait.
    pub fn hold(&self, py: Python<'_>) -> PyResult<Held<'_>> {
        while !py.detach(|| self.take()) {
            py.check_signals()?;
        }
        Ok(Held(self))
    }

    /// Whether it was free within a short time, and is the caller's.
    fn take(&self) -> bool {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.freed.wait_timeout_while(held, PATIENCE, |held| *held);
        let (mut held, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !std::mem::replace(&mut *held, true)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        *self.0.held.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.freed.notify_one();
    }
}
