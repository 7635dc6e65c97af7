//! Values whose drop may wait, such as contexts.

use pyo3::Python;
use std::mem::ManuallyDrop;
use std::ops::Deref;

/// Drops its value without the interpreter's lock.
pub(super) struct Detached<T: Send>(ManuallyDrop<T>);

impl<T: Send> Detached<T> {
    pub fn new(value: T) -> Detached<T> {
        Detached(ManuallyDrop::new(value))
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        // SAFETY: the only place that takes it, and the value is not used afterwards.
        let mut left = Some(unsafe { ManuallyDrop::take(&mut self.0) });
        // None while the interpreter ends: then there is no lock to give back, and `left` is dropped here.
        Python::try_attach(|py| {
            let value = left.take();
            py.detach(move || drop(value));
        });
    }
}
