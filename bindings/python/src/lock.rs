//! The interpreter's lock where others have given it back.

use pyo3::ffi;
use pyo3::prelude::*;

/// Does `work` with the lock, which this thread may have or not. PyO3 takes it for held within every call of the
/// package, but torch gives it back around kernels of operators, which Python code within such a call, such as a
/// signal's handler, may have called. None while the interpreter ends.
pub(super) fn with_lock<R>(work: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    struct Held(ffi::PyGILState_STATE);
    impl Drop for Held {
        fn drop(&mut self) {
            // SAFETY: this thread took it, and releases in the opposite order.
            unsafe { ffi::PyGILState_Release(self.0) };
        }
    }
    // SAFETY: may be called at any time.
    if unsafe { ffi::Py_IsInitialized() } == 0 {
        return Python::try_attach(work);
    }
    // SAFETY: the interpreter is there; a thread may take the lock whether it has it or not.
    let _held = Held(unsafe { ffi::PyGILState_Ensure() });
    Python::try_attach(work)
}
