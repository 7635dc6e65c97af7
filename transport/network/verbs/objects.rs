//! Open objects of libibverbs, each closed once.
//!
//! Place in the data path: none; opening and closing alone.

use super::ibverbs_sys::*;
use crate::base::{Error, Result};
use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether some object of this process could not be closed. What a device may still store into is leaked from then on.
static STUCK: AtomicBool = AtomicBool::new(false);

/// Whether memory that a closed object used may be freed.
pub(super) fn all_closed() -> bool {
    !STUCK.load(Ordering::Relaxed)
}

/// A type of the library's objects.
pub(super) trait Kind {
    /// What it is called in errors.
    const NAME: &'static str;
    /// The call that closes it.
    fn closer(library: &Library) -> unsafe extern "C" fn(*mut Self) -> std::ffi::c_int;
}

macro_rules! kinds {
    ($($type:ident $name:literal $closer:ident)*) => { $(
        impl Kind for $type {
            const NAME: &'static str = $name;

            fn closer(library: &Library) -> unsafe extern "C" fn(*mut Self) -> std::ffi::c_int {
                library.$closer
            }
        }
    )* };
}

kinds! {
    ibv_context "device" ibv_close_device
    ibv_pd "protection domain" ibv_dealloc_pd
    ibv_cq "completion queue" ibv_destroy_cq
    ibv_srq "shared receive queue" ibv_destroy_srq
    ibv_qp "queue pair" ibv_destroy_qp
    ibv_mr "memory region" ibv_dereg_mr
    ibv_ah "address handle" ibv_destroy_ah
}

/// An open object, closed when dropped.
pub(super) struct Object<T: Kind> {
    place: NonNull<T>,
    library: &'static Library,
}

// SAFETY: one thread at a time uses it, whoever has its endpoint; the library's objects belong to no thread.
unsafe impl<T: Kind> Send for Object<T> {}

impl<T: Kind> fmt::Debug for Object<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:p}", T::NAME, self.place)
    }
}

impl<T: Kind> Object<T> {
    /// Takes an object that a call has just opened; null is the call's failure.
    ///
    /// # Errors
    /// `Transport` with the system's text.
    ///
    /// # Safety
    /// Unless it is null, the object is open, and nothing else closes it. What it was opened on is closed later.
    pub unsafe fn new(library: &'static Library, object: *mut T, what: &str, advice: &str) -> Result<Object<T>> {
        match NonNull::new(object) {
            Some(place) => Ok(Object { place, library }),
            None => Err(refused(&format!("opens no {} ({what})", T::NAME), last(), advice)),
        }
    }

    pub fn as_ptr(&self) -> *mut T {
        self.place.as_ptr()
    }

    /// Closes it.
    ///
    /// # Errors
    /// The system's number; then the object stays open for good.
    pub fn close(self) -> std::result::Result<(), i32> {
        let object = std::mem::ManuallyDrop::new(self);
        // SAFETY: open, by `new`'s promise, and not used again.
        match unsafe { (T::closer(object.library))(object.as_ptr()) } {
            0 => Ok(()),
            code => {
                STUCK.store(true, Ordering::Relaxed);
                Err(code)
            }
        }
    }
}

impl<T: Kind> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: open, by `new`'s promise, and not used again.
        let code = unsafe { (T::closer(self.library))(self.place.as_ptr()) };
        if code != 0 {
            STUCK.store(true, Ordering::Relaxed);
            log::warn!(target: crate::base::targets::NETWORK, "libibverbs closes no {}: error {code}", T::NAME);
        }
    }
}

/// Keeps memory that devices use with this process when it forks. Kernels from 5.13 on do by themselves; older ones
/// need the library's help, which splits mappings for good.
///
/// # Errors
/// `Transport` if neither does.
pub(super) fn prepare_for_forks(library: &Library) -> Result<()> {
    // SAFETY: a call without arguments.
    let state = library.ibv_is_fork_initialized.map(|state| unsafe { state() });
    if state.is_some_and(|state| state != FORK_UNPREPARED) {
        return Ok(());
    }
    // SAFETY: before the process registers memory by this library, or at most late: then it answers EINVAL.
    match unsafe { (library.ibv_fork_init)() } {
        0 => Ok(()),
        code => {
            let advice = "use Linux 5.13 or later, or open the endpoint before any other memory is registered";
            Err(refused("prepares not for fork", code, advice))
        }
    }
}

/// `IBV_FORK_DISABLED` of verbs.h.
const FORK_UNPREPARED: u32 = 0;

/// The number of the last failure of this thread's calls.
pub(super) fn last() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or_default()
}

/// The error of a call that the library or the kernel refused.
pub(super) fn refused(what: &str, code: i32, advice: &str) -> Error {
    let why = io::Error::from_raw_os_error(code.saturating_abs());
    Error::transport(format!("libibverbs {what}: {why}"), advice)
}
