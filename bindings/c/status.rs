//! Statuses, and the last error of each thread.
//!
//! Place: around every function. On the caller's thread; only a failure allocates.

use super::arguments::{Made, Versioned, write_struct};
use crate::base::{Error, Rank, Result};
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The version of this interface. Within a version, structs only grow at their ends, and functions are only added.
pub const TOKENYARD_ABI_VERSION: u32 = 0;

/// What became of a call.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum tokenyard_status_t {
    /// The call did what it was asked for.
    TOKENYARD_OK = 0,
    /// An argument is unusable. Nothing was enqueued or made. The name is that of the argument.
    TOKENYARD_INVALID_ARGUMENT = 1,
    /// A configuration cannot be built. The name is that of the setting.
    TOKENYARD_INVALID_CONFIG = 2,
    /// Routing input of this rank is unusable. The dispatch took place without this rank's tokens.
    TOKENYARD_ROUTING = 3,
    /// The output of a dispatch was too small on this rank. No row was written; `needed` rows would have fitted.
    TOKENYARD_CAPACITY = 4,
    /// Sums of a combine lack the parts of rank `peer`, whose output was too small.
    TOKENYARD_INCOMPLETE = 5,
    /// Calls came out of order.
    TOKENYARD_ORDER = 6,
    /// A context or a world of a generation that this rank has left.
    TOKENYARD_GENERATION = 7,
    /// A deadline on the device passed, and the context is closed. The name is that of the wait.
    TOKENYARD_TIMEOUT = 8,
    /// Rank `peer` is gone, and the context is closed. The name is that of the wait.
    TOKENYARD_PEER_LOST = 9,
    /// The network failed.
    TOKENYARD_TRANSPORT = 10,
    /// The device or its driver failed, or lacks something; or a wait of the host passed its deadline.
    TOKENYARD_DEVICE = 11,
    /// Ranks could not find, understand or wait for each other.
    TOKENYARD_BOOTSTRAP = 12,
    /// An interrupt ended a wait. The name is that of the wait.
    TOKENYARD_INTERRUPTED = 13,
    /// A defect of this library. The objects of the call are to be destroyed.
    TOKENYARD_INTERNAL = 14,
}

use tokenyard_status_t::*;

/// The values of an error; see `tokenyard_last_error_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_error_info_t {
    /// Bytes of this struct, which the caller sets.
    pub size: u32,
    /// What the failed call returned; `TOKENYARD_OK` if no call of this thread has failed.
    pub status: tokenyard_status_t,
    /// 1 if the context, world or device that returned the error cannot go on; else 0.
    pub fatal: u32,
    /// The rank that reports; -1 if the error names none.
    pub rank: i32,
    /// The other rank; -1 if the error names none.
    pub peer: i32,
    /// The code of the CUDA driver; 0 if no call of the driver failed.
    pub driver_code: i32,
    /// Number of the dispatch, combine or barrier; 0 if the error names none.
    pub epoch: u64,
    /// Of `TOKENYARD_CAPACITY`: rows that would have fitted.
    pub needed: u64,
    /// Of `TOKENYARD_CAPACITY`: rows that the output had.
    pub given: u64,
    /// Of `TOKENYARD_TIMEOUT`: the value that was waited for.
    pub expected: u64,
    /// Of `TOKENYARD_TIMEOUT`: the value that was seen last.
    pub seen: u64,
    /// Of `TOKENYARD_TIMEOUT`: milliseconds waited.
    pub waited_ms: u64,
    /// The argument, the setting or the wait; empty if the error names none. It is good until the thread's next
    /// failure.
    pub name: *const c_char,
    /// As `tokenyard_last_error`.
    pub message: *const c_char,
}

// SAFETY: a C struct that begins with its size. It is only written, never read.
unsafe impl Versioned for tokenyard_error_info_t {
    const FIRST: usize = 88;
}

/// The last failure of a thread.
struct Last {
    status: tokenyard_status_t,
    error: Option<Error>,
    name: CString,
    message: CString,
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

fn status_of(error: &Error) -> tokenyard_status_t {
    match error {
        Error::Argument { .. } => TOKENYARD_INVALID_ARGUMENT,
        Error::Config { .. } => TOKENYARD_INVALID_CONFIG,
        Error::Routing { .. } => TOKENYARD_ROUTING,
        Error::Capacity { .. } => TOKENYARD_CAPACITY,
        Error::Incomplete { .. } => TOKENYARD_INCOMPLETE,
        Error::Order { .. } => TOKENYARD_ORDER,
        Error::Generation { .. } => TOKENYARD_GENERATION,
        Error::Timeout { .. } => TOKENYARD_TIMEOUT,
        Error::PeerLost { .. } => TOKENYARD_PEER_LOST,
        Error::Transport { .. } => TOKENYARD_TRANSPORT,
        Error::Device { .. } => TOKENYARD_DEVICE,
        Error::Bootstrap { .. } => TOKENYARD_BOOTSTRAP,
        Error::Interrupted { .. } => TOKENYARD_INTERRUPTED,
    }
}

fn name_of(error: &Error) -> &'static str {
    match error {
        Error::Argument { name, .. } | Error::Config { name, .. } => name,
        Error::Timeout { site, .. } | Error::PeerLost { site, .. } => site,
        Error::Interrupted { what, .. } | Error::Capacity { what, .. } => what,
        _ => "",
    }
}

/// A C string of a text, without what C cannot have in one.
pub(super) fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', "?")).unwrap_or_default()
}

#[cold]
fn failed(status: tokenyard_status_t, text: &str, error: Option<Error>) -> tokenyard_status_t {
    let name = c_string(error.as_ref().map_or("", name_of));
    let last = Last { status, error, name, message: c_string(text) };
    // A thread that ends has no last error any more.
    let _ = LAST.try_with(|slot| slot.try_borrow_mut().map(|mut slot| slot.replace(last)));
    status
}

/// Runs the body of a function: errors and panics become statuses.
pub(super) fn guarded(work: impl FnOnce() -> Result<()>) -> tokenyard_status_t {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => TOKENYARD_OK,
        Ok(Err(error)) => failed(status_of(&error), &error.to_string(), Some(error)),
        Err(payload) => {
            let text = payload.downcast_ref::<&str>().copied();
            let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text");
            let status = failed(TOKENYARD_INTERNAL, &format!("a defect of tokenyard: {text}; please report it"), None);
            // Dropping it could panic.
            std::mem::forget(payload);
            status
        }
    }
}

/// Destroys an object, or nothing if `object` is NULL. The child of a fork leaves its copies of the parent's objects as
/// they are: it has none of their threads, so that it would wait for them, and connections are the parent's.
///
/// # Safety
/// `object` is NULL or of [`make`], and is not used again.
pub(super) unsafe fn destroy<T>(object: *mut T) {
    let made = object.cast::<Made<T>>();
    // SAFETY: as the caller says; the object is the first field.
    if made.is_null() || unsafe { (*made).process } != std::process::id() {
        return;
    }
    // SAFETY: as above.
    let made = unsafe { Box::from_raw(made) };
    let _ = guarded(|| {
        drop(made);
        Ok(())
    });
}

fn none_if(number: Option<Rank>) -> i32 {
    number.and_then(|rank| i32::try_from(rank.0).ok()).unwrap_or(-1)
}

fn info_of(last: &Last) -> tokenyard_error_info_t {
    let (name, message) = (last.name.as_ptr(), last.message.as_ptr());
    let none = tokenyard_error_info_t { status: last.status, name, message, ..no_error() };
    let Some(error) = &last.error else { return tokenyard_error_info_t { fatal: 1, ..none } };
    let (rank, peer, epoch) = match error {
        Error::Routing { rank, epoch, .. } | Error::Capacity { rank, epoch, .. } => (Some(*rank), None, *epoch),
        Error::Incomplete { rank, epoch, peer }
        | Error::Timeout { rank, epoch, peer, .. }
        | Error::PeerLost { rank, epoch, peer, .. } => (Some(*rank), Some(*peer), *epoch),
        Error::Order { rank, .. } | Error::Generation { rank, .. } => (Some(*rank), None, 0),
        _ => (None, None, 0),
    };
    let (needed, given) = match error {
        Error::Capacity { needed, given, .. } => (*needed, *given),
        _ => (0, 0),
    };
    let (expected, seen, waited_ms) = match error {
        Error::Timeout { expected, seen, waited_ms, .. } => (*expected, *seen, *waited_ms),
        _ => (0, 0, 0),
    };
    tokenyard_error_info_t {
        fatal: u32::from(error.is_fatal()),
        rank: none_if(rank),
        peer: none_if(peer),
        driver_code: error.driver_code().unwrap_or(0),
        epoch,
        needed,
        given,
        expected,
        seen,
        waited_ms,
        ..none
    }
}

fn no_error() -> tokenyard_error_info_t {
    tokenyard_error_info_t {
        size: 0,
        status: TOKENYARD_OK,
        fatal: 0,
        rank: -1,
        peer: -1,
        driver_code: 0,
        epoch: 0,
        needed: 0,
        given: 0,
        expected: 0,
        seen: 0,
        waited_ms: 0,
        name: c"".as_ptr(),
        message: c"".as_ptr(),
    }
}

/// The version of this interface that the library was built with: `TOKENYARD_ABI_VERSION` of its header.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_abi_version() -> u32 {
    TOKENYARD_ABI_VERSION
}

/// The version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The text of the calling thread's last failure, which ends with what to try; empty if no call has failed. A call that
/// succeeds leaves it as it is. It is good until the thread's next failure.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_last_error() -> *const c_char {
    let message = LAST.try_with(|slot| slot.try_borrow().ok()?.as_ref().map(|last| last.message.as_ptr()));
    message.ok().flatten().unwrap_or(c"".as_ptr())
}

/// The values of the calling thread's last failure, as `tokenyard_last_error` has its text. `info->size` must be set.
/// A failure of this function itself is not recorded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_last_error_info(info: *mut tokenyard_error_info_t) -> tokenyard_status_t {
    let last = LAST.try_with(|slot| slot.try_borrow().ok()?.as_ref().map(info_of)).ok().flatten();
    // SAFETY: `info` is NULL or the caller's struct.
    let written = catch_unwind(|| unsafe { write_struct("info", info, last.unwrap_or_else(no_error)) });
    match written {
        Ok(Ok(())) => TOKENYARD_OK,
        Ok(Err(_)) => TOKENYARD_INVALID_ARGUMENT,
        Err(_) => TOKENYARD_INTERNAL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last() -> String {
        // SAFETY: a string that is good until this thread's next failure.
        unsafe { CStr::from_ptr(tokenyard_last_error()) }.to_string_lossy().into_owned()
    }

    fn info() -> tokenyard_error_info_t {
        let mut info = tokenyard_error_info_t { size: size_of::<tokenyard_error_info_t>() as u32, ..no_error() };
        // SAFETY: a struct of its size.
        assert_eq!(unsafe { tokenyard_last_error_info(&raw mut info) }, TOKENYARD_OK);
        info
    }

    fn name(info: &tokenyard_error_info_t) -> &str {
        // SAFETY: a string that is good until this thread's next failure.
        unsafe { CStr::from_ptr(info.name) }.to_str().unwrap()
    }

    #[test]
    fn a_panic_becomes_a_status_and_its_text_the_last_error() {
        for panics in [|| panic!("on purpose"), || panic!("on {}", "purpose")] {
            assert_eq!(guarded(panics), TOKENYARD_INTERNAL);
            assert_eq!(last(), "a defect of tokenyard: on purpose; please report it");
            assert_eq!((info().status, info().fatal), (TOKENYARD_INTERNAL, 1));
        }
    }

    #[test]
    fn an_error_has_its_values_until_the_thread_s_next_failure() {
        assert_eq!((last().as_str(), info().status), ("", TOKENYARD_OK));
        let timeout = Error::Timeout {
            rank: Rank(1),
            site: "a flag",
            peer: Rank(2),
            epoch: 3,
            expected: 4,
            seen: 5,
            waited_ms: 6,
            advice: "",
        };
        assert_eq!(guarded(|| Err(timeout)), TOKENYARD_TIMEOUT);
        assert_eq!(guarded(|| Ok(())), TOKENYARD_OK);
        let found = info();
        assert_eq!((found.status, found.fatal, found.rank, found.peer), (TOKENYARD_TIMEOUT, 1, 1, 2));
        assert_eq!((found.epoch, found.expected, found.seen, found.waited_ms), (3, 4, 5, 6));
        assert_eq!(name(&found), "a flag");
        assert!(last().contains("rank 1 waited 6 ms for a flag of rank 2"), "{}", last());
        std::thread::spawn(|| assert_eq!(last(), "")).join().unwrap();
        let text = "a \0 within";
        assert_eq!(guarded(|| Err(Error::argument("pitch", text, "mend it"))), TOKENYARD_INVALID_ARGUMENT);
        assert_eq!((name(&info()), last().as_str()), ("pitch", "argument pitch is a ? within: mend it"));
        assert_eq!((info().fatal, info().rank, info().peer, info().epoch), (0, -1, -1, 0));
    }

    #[test]
    fn every_error_has_a_status_of_its_own() {
        let (rank, peer, site) = (Rank(0), Rank(1), "a wait");
        let errors = [
            Error::argument("a", 1, ""),
            Error::config("a", 1, ""),
            Error::Routing { rank, epoch: 1, problem: String::new() },
            Error::Capacity { rank, epoch: 1, what: "", needed: 2, given: 1 },
            Error::Incomplete { rank, epoch: 1, peer },
            Error::Order { rank, problem: String::new(), fatal: false },
            Error::Generation { rank, generation: 0, newest: 1 },
            Error::Timeout { rank, site, peer, epoch: 1, expected: 0, seen: 0, waited_ms: 0, advice: "" },
            Error::PeerLost { rank, peer, cause: String::new(), site, epoch: 1 },
            Error::transport("", ""),
            Error::device("", ""),
            Error::bootstrap("", ""),
            Error::interrupted(site, ""),
        ];
        for (number, error) in errors.into_iter().enumerate() {
            assert_eq!(status_of(&error) as usize, number + 1, "{error}");
            assert_eq!(guarded(|| Err(error.clone())), status_of(&error));
            assert_eq!(info().fatal == 1, error.is_fatal(), "{error}");
        }
    }
}
