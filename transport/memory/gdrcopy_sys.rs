//! GDRCopy's C interface as it is: raw bindings of `gdrapi.h` 2 (2.5 is the newest that they were compared with), as
//! far as `gdr.rs` needs them. Names, types and numbers are the header's.
//!
//! Place in the data path: none; `gdr.rs` calls these functions on the caller's thread while a context is built or
//! dropped. Nothing here is safe to call without what the header asks for. There is no crate of these bindings. The
//! library is opened at run time, so that nothing needs it to build or to start, and its header need not be there
//! either.

#![allow(non_camel_case_types)]

use crate::base::{Error, Result};
use std::ffi::{CStr, CString, c_int, c_uint, c_ulong, c_void};
use std::mem::transmute;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The library's name; its number is that of the interface.
const LIBRARY: &str = "libgdrapi.so.2";

/// Bytes of a GPU's page: pinned memory begins at a multiple, and is a number of whole pages.
pub(super) const GPU_PAGE_SIZE: u64 = 1 << 16;

/// A session with the driver; null for none.
pub(super) type gdr_t = *mut c_void;

/// A handle of pinned memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct gdr_mh_t {
    pub h: c_ulong,
}

/// Where pinned memory is mapped; an older library fills a shorter one with the same beginning.
#[repr(C)]
#[derive(Default)]
pub(super) struct gdr_info_v2_t {
    /// The first address of the GPU's that is mapped.
    pub va: u64,
    /// Bytes that are mapped.
    pub mapped_size: u64,
    pub page_size: u32,
    pub tm_cycles: u64,
    pub cycles_per_ms: u32,
    /// Bit 0: `mapped`; bit 1: `wc_mapping`.
    pub flags: c_uint,
    pub mapping_type: c_uint,
    /// Room for fields that a later minor version may add.
    pub room: [u64; 8],
}

const _: () = {
    assert!(size_of::<usize>() == size_of::<u64>(), "addresses of GPUs are 64 bits");
    assert!(std::mem::offset_of!(gdr_info_v2_t, tm_cycles) == 24);
    assert!(std::mem::offset_of!(gdr_info_v2_t, mapping_type) == 40);
};

type gdr_open = unsafe extern "C" fn() -> gdr_t;
type gdr_close = unsafe extern "C" fn(gdr_t) -> c_int;
type gdr_pin_buffer = unsafe extern "C" fn(gdr_t, c_ulong, usize, u64, u32, *mut gdr_mh_t) -> c_int;
type gdr_unpin_buffer = unsafe extern "C" fn(gdr_t, gdr_mh_t) -> c_int;
type gdr_map = unsafe extern "C" fn(gdr_t, gdr_mh_t, *mut *mut c_void, usize) -> c_int;
type gdr_unmap = unsafe extern "C" fn(gdr_t, gdr_mh_t, *mut c_void, usize) -> c_int;
type gdr_get_info_v2 = unsafe extern "C" fn(gdr_t, gdr_mh_t, *mut gdr_info_v2_t) -> c_int;

/// The library's functions. It stays loaded to the end of the process.
#[derive(Debug, Clone, Copy)]
pub struct Library {
    pub(super) gdr_open: gdr_open,
    pub(super) gdr_close: gdr_close,
    pub(super) gdr_pin_buffer: gdr_pin_buffer,
    pub(super) gdr_unpin_buffer: gdr_unpin_buffer,
    pub(super) gdr_map: gdr_map,
    pub(super) gdr_unmap: gdr_unmap,
    pub(super) gdr_get_info_v2: gdr_get_info_v2,
}

/// The text of `dlerror` for the last call.
fn reason() -> String {
    // SAFETY: answers null or a C string that lives until this thread's next call.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".into();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

impl Library {
    /// Finds the library where the system looks for libraries.
    ///
    /// # Errors
    /// `Device` if it is not there, or lacks a function.
    pub fn find() -> Result<Library> {
        Library::at(Path::new(LIBRARY))
    }

    /// The library of that path, or of that name where it has no slash.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub fn at(path: &Path) -> Result<Library> {
        let advice = "install GDRCopy 2 (libgdrapi), or leave TOKENYARD_GDRCOPY at auto";
        let error = |what: String| Error::device(what, advice);
        let name = CString::new(path.as_os_str().as_bytes());
        let name = name.map_err(|_| error(format!("{path:?} is no path of a library")))?;
        // SAFETY: a C string; the library's initialisers are those of GDRCopy.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(error(format!("{} cannot be opened: {}", path.display(), reason())));
        }
        let function = |name: &CStr| {
            // SAFETY: an open library and a C string.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            let lack = || error(format!("{} has no {}", path.display(), name.to_string_lossy()));
            if found.is_null() { Err(lack()) } else { Ok(found) }
        };
        type Found = *mut c_void;
        // SAFETY: each has the type that gdrapi.h of GDRCopy 2 declares, and the library is never unloaded.
        unsafe {
            Ok(Library {
                gdr_open: transmute::<Found, gdr_open>(function(c"gdr_open")?),
                gdr_close: transmute::<Found, gdr_close>(function(c"gdr_close")?),
                gdr_pin_buffer: transmute::<Found, gdr_pin_buffer>(function(c"gdr_pin_buffer")?),
                gdr_unpin_buffer: transmute::<Found, gdr_unpin_buffer>(function(c"gdr_unpin_buffer")?),
                gdr_map: transmute::<Found, gdr_map>(function(c"gdr_map")?),
                gdr_unmap: transmute::<Found, gdr_unmap>(function(c"gdr_unmap")?),
                gdr_get_info_v2: transmute::<Found, gdr_get_info_v2>(function(c"gdr_get_info_v2")?),
            })
        }
    }
}
