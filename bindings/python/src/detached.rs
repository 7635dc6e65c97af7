//! Values whose drop may wait, such as contexts.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::ops::Deref;

/// Drops its value without the interpreter's lock. After a fork the child leaves the value as it is: its threads are
/// the parent's alone.
pub(super) struct Detached<T: Send> {
    value: ManuallyDrop<T>,
    process: u32,
}

impl<T: Send> Detached<T> {
    pub fn new(value: T) -> Detached<T> {
        Detached { value: ManuallyDrop::new(value), process: std::process::id() }
    }

    /// Refuses the child of a fork.
    pub fn must_be_of_this_process(&self, what: &str) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let advice = "make it in the process that uses it";
        Err(PyRuntimeError::new_err(format!(
            "this {what} was made before a fork, in process {}: {advice}",
            self.process
        )))
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
        if self.process != std::process::id() {
            return;
        }
        // SAFETY: the only place that takes it, and the value is not used afterwards.
        let mut left = Some(unsafe { ManuallyDrop::take(&mut self.value) });
        // None while the interpreter ends: then there is no lock to give back, and `left` is dropped here.
        Python::try_attach(|py| {
            let value = left.take();
            py.detach(move || drop(value));
        });
    }
}
