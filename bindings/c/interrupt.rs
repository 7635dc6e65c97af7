//! Ends of waits before their deadlines.
//!
//! Place in the data path: none. On the thread that waits.

use super::arguments::{Out, object, write};
use super::status::{destroy, guarded, tokenyard_status_t};
use crate::base::{Error, Interrupt, Result};
use std::ffi::c_void;

/// Ends waits of a thread: of `tokenyard_stream_synchronize`, of collectives of a world, and of what is made of these.
pub struct tokenyard_interrupt_t(Interrupt);

/// Asks the caller, on the thread that waits and about once a millisecond, whether an interrupt is raised: not 0 for
/// yes.
pub type tokenyard_check_t = Option<unsafe extern "C" fn(user: *mut c_void) -> i32>;

/// Work of the caller, during which an interrupt is in force. It throws nothing.
pub type tokenyard_work_t = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// The check of a caller in C.
struct Check {
    ask: unsafe extern "C" fn(*mut c_void) -> i32,
    user: *mut c_void,
}

// SAFETY: any thread that waits may call it with `user` (tokenyard_interrupt_create).
unsafe impl Send for Check {}
// SAFETY: as above.
unsafe impl Sync for Check {}

impl Check {
    fn is_yes(&self) -> bool {
        // SAFETY: the caller's function, with the caller's pointer.
        unsafe { (self.ask)(self.user) != 0 }
    }
}

/// An interrupt that is not raised. `check` may be NULL; any thread for which the interrupt is in force calls it with
/// `user`, until the interrupt is destroyed and no such work is under way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_interrupt_create(
    check: tokenyard_check_t,
    user: *mut c_void,
    interrupt: *mut *mut tokenyard_interrupt_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("interrupt", interrupt)? };
        let check = check.map(|ask| Check { ask, user });
        let made = check.map_or_else(Interrupt::new, |check| Interrupt::asking(move || check.is_yes()));
        out.give(tokenyard_interrupt_t(made));
        Ok(())
    })
}

/// Calls `work(user)` with the interrupt in force for this thread. Waits in it end with `TOKENYARD_INTERRUPTED` once
/// the interrupt is raised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_interrupt_during(
    interrupt: Option<&tokenyard_interrupt_t>,
    work: tokenyard_work_t,
    user: *mut c_void,
) -> tokenyard_status_t {
    guarded(|| -> Result<()> {
        let interrupt = object("interrupt", interrupt)?;
        let work = work.ok_or_else(|| Error::argument("work", "NULL", "give a function"))?;
        // SAFETY: the caller's function, with the caller's pointer.
        interrupt.0.during(|| unsafe { work(user) });
        Ok(())
    })
}

/// Ends the waits under way for which it is in force, and those that begin later. From any thread, and from a signal
/// handler.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_interrupt_raise(interrupt: Option<&tokenyard_interrupt_t>) -> tokenyard_status_t {
    guarded(|| object("interrupt", interrupt).map(|interrupt| interrupt.0.raise()))
}

/// Takes it back: waits that begin now are not interrupted.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_interrupt_lower(interrupt: Option<&tokenyard_interrupt_t>) -> tokenyard_status_t {
    guarded(|| object("interrupt", interrupt).map(|interrupt| interrupt.0.lower()))
}

/// `*due` is 1 if an interrupt that is in force for this thread is raised, and else 0: for an all-gather of the
/// caller's that waits by itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_interrupt_is_due(due: *mut u32) -> tokenyard_status_t {
    // SAFETY: the caller's pointer.
    guarded(|| unsafe { write("due", due, u32::from(Interrupt::is_due())) })
}

/// Destroys the object. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_interrupt_destroy(interrupt: *mut tokenyard_interrupt_t) {
    // SAFETY: the caller's pointer, of `tokenyard_interrupt_create`.
    unsafe { destroy(interrupt) }
}
