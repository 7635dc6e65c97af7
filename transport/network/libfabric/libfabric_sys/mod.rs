//! libfabric's C interface as it is, and the library's opening at run time.
//!
//! Place in the data path: under the libfabric network; calls are made on the thread of the proxy that owns the
//! objects. Nothing here is safe to call without what the manual pages ask for, and nothing here allocates, locks
//! or logs but the opening.
//!
//! | file | what |
//! |---|---|
//! | `fabric.rs` | bindgen's output for what is the same in all versions from 1.17 to 2.6 |
//! | `grown.rs` | by hand: structs and tables that have grown since 1.17, numbers of anonymous enums |
//! | `calls.rs` | the inline functions, through the objects' tables |
//!
//! **One program for all versions.** Between 1.17 and 2.6 structs and tables grow at their end only. So `fabric.rs` has
//! what all versions share, and bindgen makes the same text from the headers of each; a test compares it with whichever
//! headers are installed. What grows is written by hand in its longest form, since a library writes no more of a struct
//! than it knows, and reads no more. Structs that the library allocates (infos) are made by it alone, by
//! [`Library::fi_dupinfo`]. A C program prints sizes, offsets and numbers of the installed headers, and a test
//! compares them. The version asked for is the lesser of the library's and [`NEWEST`].

#![allow(non_camel_case_types)]

mod calls;
#[rustfmt::skip]
#[allow(missing_docs, dead_code, non_upper_case_globals, unreachable_pub)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod fabric;
#[allow(missing_docs)]
mod grown;

pub use calls::*;
pub use fabric::*;
pub use grown::*;

use crate::base::{Error, Result};
use crate::transport::network::library::{Opened, Registry, path_of};
use libc::iovec;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::transmute;
use std::path::{Path, PathBuf};

/// The variable that names another library.
pub const VARIABLE: &str = "TOKENYARD_LIBFABRIC";
/// The library's usual name; its number is that of the interface.
const USUAL: &str = "libfabric.so.1";
const ADVICE: &str = "install libfabric 1.17 or later (Debian and Ubuntu: libfabric1; Fedora: libfabric; on AWS the EFA \
                      installer), or set TOKENYARD_LIBFABRIC to its path";

/// A version of the library or of its interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(u32);

/// The oldest version that the bindings were compared with.
pub const OLDEST: Version = Version::new(1, 17);
/// The newest version that the bindings were compared with.
pub const NEWEST: Version = Version::new(2, 6);

impl Version {
    /// A version by its two numbers.
    pub const fn new(major: u16, minor: u16) -> Version {
        Version((major as u32) << 16 | minor as u32)
    }

    /// As the library's functions take it.
    pub const fn number(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 >> 16, self.0 & 0xffff)
    }
}

type FiVersion = unsafe extern "C" fn() -> u32;
type FiGetinfo =
    unsafe extern "C" fn(u32, *const c_char, *const c_char, u64, *const fi_info, *mut *mut fi_info) -> c_int;
type FiFreeinfo = unsafe extern "C" fn(*mut fi_info);
type FiDupinfo = unsafe extern "C" fn(*const fi_info) -> *mut fi_info;
type FiFabric = unsafe extern "C" fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int;
type FiStrerror = unsafe extern "C" fn(c_int) -> *const c_char;

/// The library, open to the end of the process. Its fields are the exported functions.
#[derive(Debug)]
pub struct Library {
    version: Version,
    path: PathBuf,
    /// Finds providers: fi_getinfo(3).
    pub fi_getinfo: FiGetinfo,
    /// Frees a list of infos.
    pub fi_freeinfo: FiFreeinfo,
    /// Copies an info, or makes an empty one of null.
    pub fi_dupinfo: FiDupinfo,
    /// Opens a fabric: fi_fabric(3).
    pub fi_fabric: FiFabric,
    fi_strerror: FiStrerror,
}

static OPEN: Registry<Library> = Registry::new();

impl Library {
    /// The library that `TOKENYARD_LIBFABRIC` names, else the system's.
    ///
    /// # Errors
    /// `Transport` if it is not there, is too old, or lacks a function; advice says where to get it.
    pub fn open() -> Result<&'static Library> {
        Library::at(&path_of(VARIABLE, USUAL))
    }

    /// The library of that path, or of that name where it has no slash. It is opened once a process.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn at(path: &Path) -> Result<&'static Library> {
        OPEN.get(path, Library::load)
    }

    fn load(path: &Path) -> Result<Library> {
        let library = Opened::at(path, ADVICE)?;
        let first = library.function(c"fi_version")?;
        // SAFETY: the type that rdma/fabric.h gives it; it takes nothing.
        let version = Version(unsafe { transmute::<*mut c_void, FiVersion>(first)() });
        let path = library.file_of(first);
        if version < OLDEST {
            let what = format!("{} is libfabric {version}, and {OLDEST} is wanted", path.display());
            return Err(Error::transport(what, ADVICE));
        }
        // SAFETY: each has the type that rdma/fabric.h declares, and the library is never closed.
        unsafe {
            Ok(Library {
                version,
                path,
                fi_getinfo: transmute::<*mut c_void, FiGetinfo>(library.function(c"fi_getinfo")?),
                fi_freeinfo: transmute::<*mut c_void, FiFreeinfo>(library.function(c"fi_freeinfo")?),
                fi_dupinfo: transmute::<*mut c_void, FiDupinfo>(library.function(c"fi_dupinfo")?),
                fi_fabric: transmute::<*mut c_void, FiFabric>(library.function(c"fi_fabric")?),
                fi_strerror: transmute::<*mut c_void, FiStrerror>(library.function(c"fi_strerror")?),
            })
        }
    }

    /// The library's version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The version to ask for: the lesser of the library's and [`NEWEST`].
    pub fn asked(&self) -> Version {
        self.version.min(NEWEST)
    }

    /// The file that the loader found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The library's text of an error; negative numbers count as positive ones.
    pub fn strerror(&self, code: c_int) -> String {
        // SAFETY: takes any number, and answers null or a C string that stays.
        let text = unsafe { (self.fi_strerror)(code.saturating_abs()) };
        if text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Names of the providers that are there, each once, in the library's order.
    ///
    /// # Errors
    /// `Transport` with the library's text.
    pub fn providers(&self) -> Result<Vec<String>> {
        let mut found = std::ptr::null_mut();
        // SAFETY: no hints; the list's address outlives the call.
        let code = unsafe {
            (self.fi_getinfo)(
                self.asked().number(),
                std::ptr::null(),
                std::ptr::null(),
                0,
                std::ptr::null(),
                &mut found,
            )
        };
        if code == -FI_ENODATA {
            return Ok(Vec::new());
        }
        if code != 0 {
            let what = format!("libfabric {} lists no providers: {}", self.version, self.strerror(code));
            return Err(Error::transport(what, "set FI_LOG_LEVEL=warn to see its reasons"));
        }
        let mut names: Vec<String> = Vec::new();
        let mut info = found;
        while !info.is_null() {
            // SAFETY: an info of the library's list, whose fabric attributes and name may be null.
            unsafe {
                let fabric = (*info).fabric_attr;
                if !fabric.is_null() && !(*fabric).prov_name.is_null() {
                    let name = CStr::from_ptr((*fabric).prov_name).to_string_lossy().into_owned();
                    if !names.contains(&name) {
                        names.push(name);
                    }
                }
                info = (*info).next;
            }
        }
        // SAFETY: the list that fi_getinfo gave, freed once.
        unsafe { (self.fi_freeinfo)(found) };
        Ok(names)
    }
}

#[cfg(test)]
#[path = "../libfabric_sys_tests.rs"]
mod tests;
