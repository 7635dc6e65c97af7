//! libibverbs' C interface as it is, the few calls of libmlx5 and libefa, and the libraries' opening at run time.
//!
//! Place in the data path: under the verbs network; calls are made on the thread of the proxy that owns the objects.
//! Nothing here is safe to call without what the manual pages ask for.
//!
//! `verbs.rs` is bindgen's output, and the same for all versions of rdma-core that have the allowed names; `by_hand.rs`
//! has what grows. Posting and polling go through the tables of the context, as the inline functions of verbs.h do. All
//! else is exported, and found without a symbol's version: the loader then gives the default one.

#![allow(non_camel_case_types)]

#[allow(missing_docs)]
mod by_hand;
#[rustfmt::skip]
#[allow(missing_docs, dead_code, non_upper_case_globals, unreachable_pub)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod verbs;

pub use by_hand::*;
pub use verbs::*;

use crate::base::{Error, Result};
use crate::transport::network::library::{Opened, Registry, path_of};
use libc::{pthread_cond_t, pthread_mutex_t};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::path::{Path, PathBuf};

/// The variable that names another library.
pub const VARIABLE: &str = "TOKENYARD_LIBIBVERBS";
/// The library's usual name; its number is that of the interface.
const USUAL: &str = "libibverbs.so.1";
const ADVICE: &str = "install rdma-core (Debian and Ubuntu: libibverbs1 and ibverbs-providers; Fedora: libibverbs), or set \
                      TOKENYARD_LIBIBVERBS to its path";

/// The functions of a library, each with its type: first those that it must have, then those that came later.
macro_rules! library {
    ($(#[$doc:meta])* $library:ident,
     needs { $($need:ident: fn($($in:ty),*) $(-> $out:ty)?;)* }
     may { $($(#[$note:meta])* $may:ident: $symbol:literal fn($($mayin:ty),*) $(-> $mayout:ty)?;)* }) => {
        $(#[$doc])*
        #[derive(Debug)]
        #[allow(missing_docs)]
        pub struct $library {
            path: PathBuf,
            $(pub $need: unsafe extern "C" fn($($in),*) $(-> $out)?,)*
            $($(#[$note])* pub $may: Option<unsafe extern "C" fn($($mayin),*) $(-> $mayout)?>,)*
        }

        impl $library {
            fn from(library: &Opened, first: &CStr) -> Result<$library> {
                let path = library.file_of(library.function(first)?);
                $(
                    let name = CStr::from_bytes_with_nul(concat!(stringify!($need), "\0").as_bytes()).unwrap_or(c"");
                    let found = library.function(name)?;
                    // SAFETY: the type that the library's header declares, and the library is never closed.
                    let $need = unsafe {
                        transmute::<*mut c_void, unsafe extern "C" fn($($in),*) $(-> $out)?>(found)
                    };
                )*
                $(
                    // SAFETY: as above.
                    let $may = library.optional($symbol).map(|found| unsafe {
                        transmute::<*mut c_void, unsafe extern "C" fn($($mayin),*) $(-> $mayout)?>(found)
                    });
                )*
                Ok($library { path, $($need,)* $($may,)* })
            }

            /// The file that the loader found.
            pub fn path(&self) -> &Path {
                &self.path
            }
        }
    };
}

library! {
    /// libibverbs, open to the end of the process.
    Library,
    needs {
        ibv_get_device_list: fn(*mut c_int) -> *mut *mut ibv_device;
        ibv_free_device_list: fn(*mut *mut ibv_device);
        ibv_get_device_name: fn(*mut ibv_device) -> *const c_char;
        ibv_open_device: fn(*mut ibv_device) -> *mut ibv_context;
        ibv_close_device: fn(*mut ibv_context) -> c_int;
        ibv_query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        ibv_query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        ibv_query_gid: fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        ibv_query_pkey: fn(*mut ibv_context, u8, c_int, *mut u16) -> c_int;
        ibv_get_async_event: fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ibv_ack_async_event: fn(*mut ibv_async_event);
        ibv_alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd: fn(*mut ibv_pd) -> c_int;
        ibv_reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        ibv_dereg_mr: fn(*mut ibv_mr) -> c_int;
        ibv_create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        ibv_destroy_cq: fn(*mut ibv_cq) -> c_int;
        ibv_create_srq: fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
        ibv_destroy_srq: fn(*mut ibv_srq) -> c_int;
        ibv_create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        ibv_modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        ibv_query_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
        ibv_destroy_qp: fn(*mut ibv_qp) -> c_int;
        ibv_create_ah: fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
        ibv_destroy_ah: fn(*mut ibv_ah) -> c_int;
        ibv_wc_status_str: fn(c_uint) -> *const c_char;
        ibv_event_type_str: fn(c_uint) -> *const c_char;
        ibv_fork_init: fn() -> c_int;
    }
    may {
        /// IBVERBS_1.8: registers at an address of the caller's choice, with optional access such as relaxed ordering.
        ibv_reg_mr_iova2: c"ibv_reg_mr_iova2" fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
        /// IBVERBS_1.11: a GID with its type and net device.
        ibv_query_gid_ex: c"_ibv_query_gid_ex"
            fn(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;
        /// IBVERBS_1.12: registers a dma-buf.
        ibv_reg_dmabuf_mr: c"ibv_reg_dmabuf_mr" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
        /// IBVERBS_1.13: whether fork needs care.
        ibv_is_fork_initialized: c"ibv_is_fork_initialized" fn() -> c_uint;
    }
}

library! {
    /// libmlx5: data direct, of rdma-core 54 and later.
    Mlx5,
    needs {}
    may {
        mlx5dv_reg_dmabuf_mr: c"mlx5dv_reg_dmabuf_mr"
            fn(*mut ibv_pd, u64, usize, u64, c_int, c_int, c_int) -> *mut ibv_mr;
        mlx5dv_get_data_direct_sysfs_path: c"mlx5dv_get_data_direct_sysfs_path"
            fn(*mut ibv_context, *mut c_char, usize) -> c_int;
    }
}

library! {
    /// libefa.
    Efa,
    needs {
        efadv_query_device: fn(*mut ibv_context, *mut efadv_device_attr, u32) -> c_int;
    }
    may {}
}

static OPEN: Registry<Library> = Registry::new();
static MLX5: Registry<Mlx5> = Registry::new();
static EFA: Registry<Efa> = Registry::new();

impl Library {
    /// The library that `TOKENYARD_LIBIBVERBS` names, else the system's.
    ///
    /// # Errors
    /// `Transport` if it is not there or lacks a function; advice says where to get it.
    pub fn open() -> Result<&'static Library> {
        Library::at(&path_of(VARIABLE, USUAL))
    }

    /// The library of that path, or of that name where it has no slash. It is opened once a process.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn at(path: &Path) -> Result<&'static Library> {
        OPEN.get(path, |path| Library::from(&Opened::at(path, ADVICE)?, c"ibv_get_device_list"))
    }

    /// What the library offers beside the calls that all versions have.
    pub fn offers(&self) -> String {
        let all = [
            ("dma-buf", self.ibv_reg_dmabuf_mr.is_some()),
            ("relaxed ordering", self.ibv_reg_mr_iova2.is_some()),
            ("types of GIDs", self.ibv_query_gid_ex.is_some()),
        ];
        let there: Vec<&str> = all.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect();
        if there.is_empty() { "nothing optional".into() } else { there.join(", ") }
    }

    /// A call that came with a later version.
    ///
    /// # Errors
    /// `Transport` that names the call and the version of rdma-core that has it.
    pub fn need<T: Copy>(&self, call: Option<T>, name: &str, rdma_core: u32) -> Result<T> {
        let lack = || Error::transport(format!("{} has no {name}", self.path.display()), later(rdma_core));
        call.ok_or_else(lack)
    }
}

fn later(rdma_core: u32) -> String {
    format!("install rdma-core {rdma_core} or later, or set {VARIABLE} to the path of its libibverbs")
}

impl Mlx5 {
    /// The library that `TOKENYARD_LIBMLX5` names, else the system's.
    ///
    /// # Errors
    /// `Transport` if it is not there.
    pub fn open() -> Result<&'static Mlx5> {
        let advice = "install rdma-core 54 or later (Debian: ibverbs-providers) for data direct";
        MLX5.get(&path_of("TOKENYARD_LIBMLX5", "libmlx5.so.1"), |path| {
            Mlx5::from(&Opened::at(path, advice)?, c"mlx5dv_is_supported")
        })
    }
}

impl Efa {
    /// The system's libefa.
    ///
    /// # Errors
    /// `Transport` if it is not there.
    pub fn open() -> Result<&'static Efa> {
        let advice = "install rdma-core (Debian: ibverbs-providers) or the EFA installer";
        EFA.get(Path::new("libefa.so.1"), |path| Efa::from(&Opened::at(path, advice)?, c"efadv_query_device"))
    }
}

/// Calls a function of a context's table, or answers `ENOSYS` as the table lacks it.
macro_rules! call {
    ($context:expr, $name:ident ($($argument:expr),*), $lack:expr) => {{
        let context: *mut ibv_context = $context;
        // SAFETY: an open context, by the caller's promise; the arguments likewise.
        match unsafe { (*context).ops.$name } {
            // SAFETY: as above.
            Some(function) => unsafe { function($($argument),*) },
            None => $lack,
        }
    }};
}

/// Posts a list of requests; 0, or an errno with the first that was not taken.
///
/// # Safety
/// As ibv_post_send(3) asks for.
pub unsafe fn ibv_post_send(qp: *mut ibv_qp, list: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: an open queue pair, by the caller's promise.
    call!(unsafe { (*qp).context }, post_send(qp, list, bad), libc::ENOSYS)
}

/// Posts a list of receives; 0, or an errno with the first that was not taken.
///
/// # Safety
/// As ibv_post_recv(3) asks for.
pub unsafe fn ibv_post_recv(qp: *mut ibv_qp, list: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: an open queue pair, by the caller's promise.
    call!(unsafe { (*qp).context }, post_recv(qp, list, bad), libc::ENOSYS)
}

/// Posts a list of receives to a shared queue; 0, or an errno with the first that was not taken.
///
/// # Safety
/// As ibv_post_srq_recv(3) asks for.
pub unsafe fn ibv_post_srq_recv(srq: *mut ibv_srq, list: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: an open shared queue, by the caller's promise.
    call!(unsafe { (*srq).context }, post_srq_recv(srq, list, bad), libc::ENOSYS)
}

/// Reads completions; their number, or less than 0.
///
/// # Safety
/// As ibv_poll_cq(3) asks for.
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, count: c_int, entries: *mut ibv_wc) -> c_int {
    // SAFETY: an open queue, by the caller's promise.
    call!(unsafe { (*cq).context }, poll_cq(cq, count, entries), -libc::ENOSYS)
}

#[cfg(test)]
#[path = "../ibverbs_sys_tests.rs"]
mod tests;
