//! Open objects of libfabric, each closed once.
//!
//! Place in the data path: none; opening and closing alone.

use super::libfabric_sys::*;
use crate::base::{Error, Result};
use std::ffi::c_int;
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether some object of this process could not be closed. What a provider may still store into is leaked from then
/// on.
static STUCK: AtomicBool = AtomicBool::new(false);

/// Whether memory that a closed object used may be freed.
pub(super) fn all_closed() -> bool {
    !STUCK.load(Ordering::Relaxed)
}

/// An object of the library's interface.
///
/// # Safety
/// The type begins with its `fid`.
pub(super) unsafe trait Fid {
    /// What it is called in errors.
    const NAME: &'static str;
}

macro_rules! fids {
    ($($type:ident $name:literal)*) => { $(
        const _: () = assert!(std::mem::offset_of!($type, fid) == 0);
        // SAFETY: just asserted.
        unsafe impl Fid for $type {
            const NAME: &'static str = $name;
        }
    )* };
}

fids! {
    fid_fabric "fabric"
    fid_domain "domain"
    fid_eq "event queue"
    fid_cq "completion queue"
    fid_av "address vector"
    fid_ep "endpoint"
    fid_mr "memory region"
}

/// An open object, closed when dropped.
pub(super) struct Object<T: Fid>(NonNull<T>);

impl<T: Fid> fmt::Debug for Object<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:p}", T::NAME, self.0)
    }
}

impl<T: Fid> Object<T> {
    /// Opens an object by a call that stores it.
    ///
    /// # Errors
    /// `Transport` with the library's text.
    ///
    /// # Safety
    /// Where the call answers 0 it has stored an open object of this type, which nothing else closes. What it was
    /// opened on is closed later.
    pub unsafe fn open(origin: &Origin, advice: &str, call: impl FnOnce(*mut *mut T) -> c_int) -> Result<Object<T>> {
        let mut found = null_mut();
        let code = call(&mut found);
        match NonNull::new(found).filter(|_| code == 0) {
            Some(object) => Ok(Object(object)),
            None => Err(origin.refused(&format!("opens no {}", T::NAME), code, advice)),
        }
    }

    pub fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }

    /// As the functions for all objects take it.
    pub fn fid(&self) -> *mut fid {
        self.0.as_ptr().cast()
    }

    /// Closes it.
    ///
    /// # Errors
    /// The library's code; then the object stays open for good.
    pub fn close(self) -> std::result::Result<(), c_int> {
        let object = std::mem::ManuallyDrop::new(self);
        // SAFETY: open, by `open`'s promise, and not used again.
        match unsafe { fi_close(object.fid()) } {
            0 => Ok(()),
            code => {
                STUCK.store(true, Ordering::Relaxed);
                Err(code)
            }
        }
    }
}

impl<T: Fid> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: open, by `open`'s promise, and not used again.
        let code = unsafe { fi_close(self.fid()) };
        if code != 0 {
            STUCK.store(true, Ordering::Relaxed);
            log::warn!(target: crate::base::targets::NETWORK, "libfabric closes no {}: error {code}", T::NAME);
        }
    }
}

/// What objects come from, for errors.
#[derive(Debug, Clone)]
pub(super) struct Origin {
    pub library: &'static Library,
    /// The provider, and where it was asked for.
    pub provider: String,
}

impl Origin {
    /// The error of a call that the library refused.
    pub fn refused(&self, what: &str, code: c_int, advice: &str) -> Error {
        let Origin { library, provider } = self;
        let why = library.strerror(code);
        Error::transport(format!("libfabric {} {provider} {what}: {why} ({code})", library.version()), advice)
    }
}
