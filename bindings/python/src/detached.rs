//! Values whose drop may wait, such as contexts.

use super::errors;
use super::lock::with_lock;
use super::process;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

/// Drops its value without the interpreter's lock. After a fork the child leaves the value as it is: its threads are
/// the parent's alone.
pub(super) struct Detached<T: Send> {
    value: ManuallyDrop<T>,
    process: u32,
}

impl<T: Send> Detached<T> {
    pub fn new(value: T) -> Detached<T> {
        Detached { value: ManuallyDrop::new(value), process: process::id() }
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        if self.process != process::id() {
            return;
        }
        // SAFETY: the only place that takes it, and the value is not used afterwards.
        let mut left = Some(unsafe { ManuallyDrop::take(&mut self.value) });
        // None while the interpreter ends: then there is no lock to give back, and `left` is dropped here.
        with_lock(|py| {
            let value = left.take();
            py.detach(move || drop(value));
        });
    }
}

/// A value that may be closed before its object goes. A call that is under way keeps the value to its end.
pub(super) struct Closable<T: Send + Sync> {
    what: &'static str,
    process: u32,
    value: Mutex<Option<Arc<Detached<T>>>>,
}

impl<T: Send + Sync> Closable<T> {
    /// `what`: its name in messages.
    pub fn new(what: &'static str, value: T) -> Closable<T> {
        let value = Mutex::new(Some(Arc::new(Detached::new(value))));
        Closable { what, process: process::id(), value }
    }

    /// Whether this is the process that made it. Takes no lock, which a thread of the parent may hold in a fork.
    pub fn is_of_this_process(&self) -> bool {
        self.process == process::id()
    }

    /// Refuses the child of a fork.
    pub fn must_be_of_this_process(&self) -> PyResult<()> {
        if self.is_of_this_process() {
            return Ok(());
        }
        let (what, process) = (self.what, self.process);
        Err(PyRuntimeError::new_err(format!(
            "this {what} was made before a fork, in process {process}: make it in the process that uses it"
        )))
    }

    /// The value. Refuses the child of a fork, and what was closed.
    pub fn get(&self, py: Python<'_>) -> PyResult<Arc<Detached<T>>> {
        self.must_be_of_this_process()?;
        let value = self.value.lock().unwrap_or_else(PoisonError::into_inner).clone();
        value.ok_or_else(|| errors::closed(py, self.what))
    }

    /// The value; None of one that was closed, and in the child of a fork. Needs no interpreter.
    pub fn open(&self) -> Option<Arc<Detached<T>>> {
        if !self.is_of_this_process() {
            return None;
        }
        self.value.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether it was closed; false in the child of a fork.
    pub fn is_closed(&self) -> bool {
        self.is_of_this_process() && self.value.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Refuses later calls, and returns the value, which goes with the last call that uses it. None of one that was
    /// closed, and in the child of a fork.
    pub fn close(&self) -> Option<Arc<Detached<T>>> {
        if !self.is_of_this_process() {
            return None;
        }
        self.value.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
