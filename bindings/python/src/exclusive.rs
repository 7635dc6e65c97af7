//! One thread at a time, without holding the interpreter's lock in the wait.

use pyo3::prelude::*;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::{ThreadId, current};
use std::time::Duration;

/// How long a thread waits before it looks for signals.
const PATIENCE: Duration = Duration::from_millis(50);

/// What one thread at a time may hold, several times if need be: a signal's handler runs in the middle of a call, and
/// may make another one.
#[derive(Default)]
pub(super) struct Exclusive {
    holder: Mutex<Option<ThreadId>>,
    freed: Condvar,
}

/// Holds it until dropped.
pub(super) struct Held<'a> {
    of: &'a Exclusive,
    /// An outer one of the same thread goes on to hold it.
    nested: bool,
}

impl Exclusive {
    /// Waits until no other thread holds it. What a thread does meanwhile ends by a deadline of its own, and so does
    /// this wait; the exception of a signal's handler ends it, too.
    pub fn hold(&self, py: Python<'_>) -> PyResult<Held<'_>> {
        self.begin(py).map(|nested| Held { of: self, nested })
    }

    /// The same, until `end` gets what this returns.
    pub fn begin(&self, py: Python<'_>) -> PyResult<bool> {
        loop {
            if let Some(nested) = py.detach(|| self.take()) {
                return Ok(nested);
            }
            py.check_signals()?;
        }
    }

    /// By the thread that began.
    pub fn end(&self, nested: bool) {
        if !nested {
            *self.holder.lock().unwrap_or_else(PoisonError::into_inner) = None;
            self.freed.notify_one();
        }
    }

    /// Takes it if it is free within a short time, or this thread's already: whether it is nested.
    fn take(&self) -> Option<bool> {
        let own = current().id();
        let holder = self.holder.lock().unwrap_or_else(PoisonError::into_inner);
        let is_others = |holder: &mut Option<ThreadId>| holder.is_some_and(|holder| holder != own);
        let waited = self.freed.wait_timeout_while(holder, PATIENCE, is_others);
        let (mut holder, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match holder.replace(own) {
            None => Some(false),
            Some(before) if before == own => Some(true),
            before => {
                *holder = before;
                None
            }
        }
    }
}

impl Held<'_> {
    /// Whether the thread held it before.
    pub fn is_nested(&self) -> bool {
        self.nested
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.of.end(self.nested);
    }
}
