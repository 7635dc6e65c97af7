//! libfabric's inline functions: each goes through a table that the object points to.
//!
//! A provider may leave out tables and functions, and a table may be shorter than this module's: `size` gives its
//! length. Such a call answers `-FI_ENOSYS`.
//!
//! # Safety
//! Of every function here: objects are open ones of the library, and arguments are what fi_rma(3), fi_cq(3), fi_av(3),
//! fi_endpoint(3), fi_mr(3) and fi_eq(3) ask for.

use super::*;
use core::ffi::{c_char, c_int, c_void};
use libc::ssize_t;
use std::mem::offset_of;

/// Calls a function of a table, if the table is there, long enough, and has the function.
macro_rules! call {
    ($table:expr, $type:ident . $name:ident ($($argument:expr),*), $lack:expr) => {{
        let table: *const $type = $table;
        let end = offset_of!($type, $name) + size_of::<usize>();
        // SAFETY: an object's table is null or begins with its size, by the caller's promise; the function lies in it.
        match unsafe { (!table.is_null() && (*table).size >= end).then(|| (*table).$name).flatten() } {
            // SAFETY: by the caller's promise.
            Some(function) => unsafe { function($($argument),*) },
            None => $lack,
        }
    }};
}

/// A thin function over a table: its object's table, the function in it, and the answer's type.
macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident: $object:ident: $of:ty => [$($path:tt)+] $type:ident . $function:ident
       ($($argument:ident: $kind:ty),*) -> $answer:ty;)*) => { $(
        $(#[$doc])*
        ///
        /// # Safety
        /// As the module says.
        pub unsafe fn $name($object: *mut $of, $($argument: $kind),*) -> $answer {
            // SAFETY: an open object, by the caller's promise.
            let table = unsafe { (*$object).$($path)+ };
            call!(table, $type.$function($object $(, $argument)*), -(FI_ENOSYS as $answer))
        }
    )* };
}

calls! {
    /// Opens an access domain of a fabric.
    fi_domain: fabric: fid_fabric => [ops] fi_ops_fabric.domain
        (info: *mut fi_info, domain: *mut *mut fid_domain, context: *mut c_void) -> c_int;
    /// Opens an event queue.
    fi_eq_open: fabric: fid_fabric => [ops] fi_ops_fabric.eq_open
        (attr: *mut fi_eq_attr, eq: *mut *mut fid_eq, context: *mut c_void) -> c_int;
    /// Opens an endpoint.
    fi_endpoint: domain: fid_domain => [ops] fi_ops_domain.endpoint
        (info: *mut fi_info, ep: *mut *mut fid_ep, context: *mut c_void) -> c_int;
    /// Opens a completion queue.
    fi_cq_open: domain: fid_domain => [ops] fi_ops_domain.cq_open
        (attr: *mut fi_cq_attr, cq: *mut *mut fid_cq, context: *mut c_void) -> c_int;
    /// Opens an address vector.
    fi_av_open: domain: fid_domain => [ops] fi_ops_domain.av_open
        (attr: *mut fi_av_attr, av: *mut *mut fid_av, context: *mut c_void) -> c_int;
    /// Posts a write; `FI_REMOTE_CQ_DATA` among the flags sends the immediate.
    fi_writemsg: ep: fid_ep => [rma] fi_ops_rma.writemsg (msg: *const fi_msg_rma, flags: u64) -> ssize_t;
    /// Posts a read.
    fi_readmsg: ep: fid_ep => [rma] fi_ops_rma.readmsg (msg: *const fi_msg_rma, flags: u64) -> ssize_t;
    /// Posts a message.
    fi_sendmsg: ep: fid_ep => [msg] fi_ops_msg.sendmsg (msg: *const fi_msg, flags: u64) -> ssize_t;
    /// Posts a receive.
    fi_recvmsg: ep: fid_ep => [msg] fi_ops_msg.recvmsg (msg: *const fi_msg, flags: u64) -> ssize_t;
    /// Reads completions of the queue's format.
    fi_cq_read: cq: fid_cq => [ops] fi_ops_cq.read (entries: *mut c_void, count: usize) -> ssize_t;
    /// Reads the completion with an error that is next.
    fi_cq_readerr: cq: fid_cq => [ops] fi_ops_cq.readerr (entry: *mut fi_cq_err_entry, flags: u64) -> ssize_t;
    /// Adds addresses to a vector; answers how many.
    fi_av_insert: av: fid_av => [ops] fi_ops_av.insert
        (addresses: *const c_void, count: usize, found: *mut fi_addr_t, flags: u64, context: *mut c_void) -> c_int;
    /// Takes addresses out of a vector.
    fi_av_remove: av: fid_av => [ops] fi_ops_av.remove (addresses: *mut fi_addr_t, count: usize, flags: u64) -> c_int;
    /// Reads an event.
    fi_eq_read: eq: fid_eq => [ops] fi_ops_eq.read
        (event: *mut u32, room: *mut c_void, len: usize, flags: u64) -> ssize_t;
    /// Reads the event of an error that is next.
    fi_eq_readerr: eq: fid_eq => [ops] fi_ops_eq.readerr (entry: *mut fi_eq_err_entry, flags: u64) -> ssize_t;
    /// Closes any object.
    fi_close: object: fid => [ops] fi_ops.close () -> c_int;
    /// Binds an object to another.
    fi_bind: object: fid => [ops] fi_ops.bind (other: *mut fid, flags: u64) -> c_int;
    /// A command to an object, such as `FI_ENABLE` to an endpoint.
    fi_control: object: fid => [ops] fi_ops.control (command: c_int, argument: *mut c_void) -> c_int;
}

/// Registers memory.
///
/// # Safety
/// As the module says.
pub unsafe fn fi_mr_regattr(
    domain: *mut fid_domain,
    attr: *const fi_mr_attr,
    flags: u64,
    mr: *mut *mut fid_mr,
) -> c_int {
    // SAFETY: an open domain, by the caller's promise.
    let (table, object) = unsafe { ((*domain).mr, &raw mut (*domain).fid) };
    call!(table, fi_ops_mr.regattr(object, attr, flags, mr), -FI_ENOSYS)
}

/// An endpoint's own address.
///
/// # Safety
/// As the module says.
pub unsafe fn fi_getname(ep: *mut fid_ep, address: *mut c_void, len: *mut usize) -> c_int {
    // SAFETY: an open endpoint, by the caller's promise.
    let (table, object) = unsafe { ((*ep).cm, &raw mut (*ep).fid) };
    call!(table, fi_ops_cm.getname(object, address, len), -FI_ENOSYS)
}

/// Sets an option of an endpoint.
///
/// # Safety
/// As the module says.
pub unsafe fn fi_setopt(ep: *mut fid_ep, level: c_int, option: c_int, value: *const c_void, len: usize) -> c_int {
    // SAFETY: an open endpoint, by the caller's promise.
    let (table, object) = unsafe { ((*ep).ops, &raw mut (*ep).fid) };
    call!(table, fi_ops_ep.setopt(object, level, option, value, len), -FI_ENOSYS)
}

/// Reads an option of an endpoint.
///
/// # Safety
/// As the module says.
pub unsafe fn fi_getopt(ep: *mut fid_ep, level: c_int, option: c_int, value: *mut c_void, len: *mut usize) -> c_int {
    // SAFETY: an open endpoint, by the caller's promise.
    let (table, object) = unsafe { ((*ep).ops, &raw mut (*ep).fid) };
    call!(table, fi_ops_ep.getopt(object, level, option, value, len), -FI_ENOSYS)
}

/// The provider's text of its own error; null if it has none.
///
/// # Safety
/// As the module says.
pub unsafe fn fi_cq_strerror(
    cq: *mut fid_cq,
    prov_errno: c_int,
    data: *const c_void,
    room: *mut c_char,
    len: usize,
) -> *const c_char {
    // SAFETY: an open queue, by the caller's promise.
    let table = unsafe { (*cq).ops };
    call!(table, fi_ops_cq.strerror(cq, prov_errno, data, room, len), std::ptr::null())
}
