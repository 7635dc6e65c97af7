//! What differs between libfabric 1.17 and 2.6, written by hand: structs that grow at their end, tables that grow, and
//! numbers of anonymous enums. `tests/rules/network_ffi.rs` compares all of it with the installed headers.
//!
//! Source: include/rdma of the tags v1.17.0 to v2.6.0 of ofiwg/libfabric. Fields that came after 1.17 are private where
//! a library writes the struct in its own memory, and are read through a function that takes the library's version.

use super::*;
use core::ffi::{c_char, c_int, c_void};
use libc::{iovec, ssize_t};
use std::mem::offset_of;

/// A type that only the library looks into.
macro_rules! opaque {
    ($($name:ident)*) => { $(
        #[repr(C)]
        pub struct $name {
            _private: [u8; 0],
        }
    )* };
}

opaque!(fi_wait_attr fid_wait fid_pep fid_nic fid_mc fi_ops_tagged fi_ops_atomic fi_ops_collective);

/// Where a domain stands. Written by the library, in its own memory: never made here, always behind a pointer.
#[repr(C)]
pub struct fi_domain_attr {
    pub domain: *mut fid_domain,
    pub name: *mut c_char,
    pub threading: fi_threading,
    pub control_progress: fi_progress,
    pub data_progress: fi_progress,
    pub resource_mgmt: fi_resource_mgmt,
    pub av_type: fi_av_type,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
    pub cq_data_size: usize,
    pub cq_cnt: usize,
    pub ep_cnt: usize,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
    pub max_ep_tx_ctx: usize,
    pub max_ep_rx_ctx: usize,
    pub max_ep_stx_ctx: usize,
    pub max_ep_srx_ctx: usize,
    pub cntr_cnt: usize,
    pub mr_iov_limit: usize,
    pub caps: u64,
    pub mode: u64,
    pub auth_key: *mut u8,
    pub auth_key_size: usize,
    pub max_err_data: usize,
    pub mr_cnt: usize,
    pub tclass: u32,
    /// From 1.20 on.
    max_ep_auth_key: usize,
}

impl fi_domain_attr {
    /// How many authorisation keys an endpoint takes, where the library knows.
    ///
    /// # Safety
    /// The struct is one that a library of that version allocated.
    pub unsafe fn max_ep_auth_key(this: *const fi_domain_attr, library: Version) -> Option<usize> {
        if library < Version::new(1, 20) {
            return None;
        }
        // SAFETY: the struct is as long, by the caller's promise.
        Some(unsafe { (&raw const (*this).max_ep_auth_key).read() })
    }
}

/// An endpoint's attributes. Written by the library, in its own memory; a later version may append to it.
#[repr(C)]
pub struct fi_ep_attr {
    pub type_: fi_ep_type,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
    pub msg_prefix_size: usize,
    pub max_order_raw_size: usize,
    pub max_order_war_size: usize,
    pub max_order_waw_size: usize,
    pub mem_tag_format: u64,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
}

/// A dma-buf to register; libraries from 1.20 on take it, with `FI_MR_DMABUF`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fi_mr_dmabuf {
    pub fd: c_int,
    pub offset: u64,
    pub len: usize,
    pub base_addr: *mut c_void,
}

/// Memory to register. Read by the library, which looks at as much of it as its version knows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fi_mr_attr {
    /// With `FI_MR_DMABUF` the address of a `fi_mr_dmabuf`.
    pub mr_iov: *const iovec,
    pub iov_count: usize,
    pub access: u64,
    pub offset: u64,
    pub requested_key: u64,
    pub context: *mut c_void,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
    pub iface: fi_hmem_iface,
    /// A union; for CUDA the device's number as an int, in its first bytes.
    pub device: u64,
    /// From 1.19 on.
    pub hmem_data: *mut c_void,
    /// From 1.22 on.
    pub page_size: usize,
    /// From 2.0 on.
    pub base_mr: *const fid_mr,
    /// From 2.0 on.
    pub sub_mr_cnt: usize,
}

/// A queue to open. Read by the library.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fi_cq_attr {
    pub size: usize,
    pub flags: u64,
    pub format: fi_cq_format,
    pub wait_obj: fi_wait_obj,
    pub signaling_vector: c_int,
    pub wait_cond: fi_cq_wait_cond,
    pub wait_set: *mut fid_wait,
    /// Zeros, where versions after 2.6 look for a pointer that may be null.
    pub room: [u64; 2],
}

/// A completion with an error. Written by the library, which fills as much of it as its version knows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fi_cq_err_entry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    /// To be 0 before the call, or the room that `err_data` points to.
    pub err_data_size: usize,
    /// From 1.20 on; older libraries leave what was there.
    pub src_addr: fi_addr_t,
    /// For what a later version may append.
    pub room: [u64; 4],
}

/// The beginning of a domain's table, the same in all versions.
#[repr(C)]
pub struct fi_ops_domain {
    pub size: usize,
    pub av_open: Option<unsafe extern "C" fn(*mut fid_domain, *mut fi_av_attr, *mut *mut fid_av, *mut c_void) -> c_int>,
    pub cq_open: Option<unsafe extern "C" fn(*mut fid_domain, *mut fi_cq_attr, *mut *mut fid_cq, *mut c_void) -> c_int>,
    pub endpoint: Option<unsafe extern "C" fn(*mut fid_domain, *mut fi_info, *mut *mut fid_ep, *mut c_void) -> c_int>,
}

/// The beginning of an address vector's table, the same in all versions.
#[repr(C)]
pub struct fi_ops_av {
    pub size: usize,
    pub insert:
        Option<unsafe extern "C" fn(*mut fid_av, *const c_void, usize, *mut fi_addr_t, u64, *mut c_void) -> c_int>,
    pub insertsvc: *const c_void,
    pub insertsym: *const c_void,
    pub remove: Option<unsafe extern "C" fn(*mut fid_av, *mut fi_addr_t, usize, u64) -> c_int>,
    pub lookup: Option<unsafe extern "C" fn(*mut fid_av, fi_addr_t, *mut c_void, *mut usize) -> c_int>,
    pub straddr: Option<unsafe extern "C" fn(*mut fid_av, *const c_void, *mut c_char, *mut usize) -> *const c_char>,
}

/// The beginning of an endpoint's table, the same in all versions.
#[repr(C)]
pub struct fi_ops_ep {
    pub size: usize,
    pub cancel: Option<unsafe extern "C" fn(*mut fid, *mut c_void) -> ssize_t>,
    pub getopt: Option<unsafe extern "C" fn(*mut fid, c_int, c_int, *mut c_void, *mut usize) -> c_int>,
    pub setopt: Option<unsafe extern "C" fn(*mut fid, c_int, c_int, *const c_void, usize) -> c_int>,
}

/// The beginning of a completion queue's table, the same in all versions.
#[repr(C)]
pub struct fi_ops_cq {
    pub size: usize,
    pub read: Option<unsafe extern "C" fn(*mut fid_cq, *mut c_void, usize) -> ssize_t>,
    pub readfrom: Option<unsafe extern "C" fn(*mut fid_cq, *mut c_void, usize, *mut fi_addr_t) -> ssize_t>,
    pub readerr: Option<unsafe extern "C" fn(*mut fid_cq, *mut fi_cq_err_entry, u64) -> ssize_t>,
    pub sread: *const c_void,
    pub sreadfrom: *const c_void,
    pub signal: *const c_void,
    pub strerror: Option<unsafe extern "C" fn(*mut fid_cq, c_int, *const c_void, *mut c_char, usize) -> *const c_char>,
}

const _: () = {
    assert!(offset_of!(fi_domain_attr, mr_mode) == 36 && offset_of!(fi_domain_attr, tclass) == 184);
    assert!(offset_of!(fi_domain_attr, max_ep_auth_key) == 192);
    assert!(offset_of!(fi_ep_attr, max_msg_size) == 16 && size_of::<fi_ep_attr>() == 96);
    assert!(offset_of!(fi_mr_attr, iface) == 64 && offset_of!(fi_mr_attr, device) == 72);
    assert!(offset_of!(fi_mr_attr, hmem_data) == 80 && size_of::<fi_mr_attr>() == 112);
    assert!(offset_of!(fi_cq_attr, wait_set) == 32 && offset_of!(fi_cq_attr, room) == 40);
    assert!(offset_of!(fi_cq_err_entry, prov_errno) == 60 && offset_of!(fi_cq_err_entry, src_addr) == 80);
    assert!(offset_of!(fi_ops_cq, readerr) == 24 && offset_of!(fi_ops_cq, strerror) == 56);
    assert!(offset_of!(fi_ops_av, remove) == 32 && offset_of!(fi_ops_domain, endpoint) == 24);
    assert!(offset_of!(fi_ops_ep, setopt) == 24 && size_of::<fi_mr_dmabuf>() == 32);
};

/// `FI_MR_DMABUF` of 1.20 and later.
pub const FI_MR_DMABUF: u64 = 1 << 40;
/// Single-writer progress of 1.21 and later.
pub const FI_PROGRESS_CONTROL_UNIFIED: fi_progress = 3;
pub const FI_ADDR_UNSPEC: fi_addr_t = u64::MAX;
pub const FI_ADDR_NOTAVAIL: fi_addr_t = u64::MAX;

pub const FI_OPT_ENDPOINT: c_int = 0;
pub const FI_OPT_FI_HMEM_P2P: c_int = 8;
/// Its value: the provider reaches the GPU's memory without the processor, or refuses.
pub const FI_HMEM_P2P_REQUIRED: c_int = 1;
/// From 1.18 on.
pub const FI_OPT_CUDA_API_PERMITTED: c_int = 10;
/// From 1.18 on.
pub const FI_OPT_SHARED_MEMORY_PERMITTED: c_int = 11;
/// Options of the provider efa count up from here.
pub const FI_OPT_EFA_RNR_RETRY: c_int = -(0xefa << 16);
/// From 1.18 on.
pub const FI_OPT_EFA_EMULATED_WRITE: c_int = FI_OPT_EFA_RNR_RETRY + 2;
/// From 1.18 on.
pub const FI_OPT_EFA_USE_DEVICE_RDMA: c_int = FI_OPT_EFA_RNR_RETRY + 4;
/// From 2.2 on.
pub const FI_OPT_EFA_HOMOGENEOUS_PEERS: c_int = FI_OPT_EFA_RNR_RETRY + 7;
/// From 2.5 on.
pub const FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV: c_int = FI_OPT_EFA_RNR_RETRY + 8;
/// A command of `fi_control`: enables an endpoint.
pub const FI_ENABLE: c_int = 6;

pub const FI_EINTR: c_int = libc::EINTR;
pub const FI_EIO: c_int = libc::EIO;
pub const FI_EAGAIN: c_int = libc::EAGAIN;
pub const FI_ENOMEM: c_int = libc::ENOMEM;
pub const FI_EINVAL: c_int = libc::EINVAL;
pub const FI_ENOSYS: c_int = libc::ENOSYS;
pub const FI_ENODATA: c_int = libc::ENODATA;
pub const FI_EMSGSIZE: c_int = libc::EMSGSIZE;
pub const FI_ENOPROTOOPT: c_int = libc::ENOPROTOOPT;
pub const FI_EOPNOTSUPP: c_int = libc::EOPNOTSUPP;
pub const FI_ECONNABORTED: c_int = libc::ECONNABORTED;
pub const FI_ENOTCONN: c_int = libc::ENOTCONN;
pub const FI_ECANCELED: c_int = libc::ECANCELED;
pub const FI_EAVAIL: c_int = 259;
pub const FI_ENOAV: c_int = 267;
pub const FI_EOVERRUN: c_int = 268;
pub const FI_ENORX: c_int = 269;
