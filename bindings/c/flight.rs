//! What calls leave: handles, and halves that are under way.
//!
//! Place: between a call and the next one that needs what the call left. An object is made once and filled by call
//! after call, so that calls allocate nothing for it. On any thread; calls that share an object wait for each other.
//!
//! ```text
//!   empty ── send ──▶ full ── receive ──▶ empty      a refused receive leaves it full
//!   empty or full ── dispatch ──▶ full               a handle: the former dispatch is let go
//! ```

use super::arguments::{Out, object};
use super::status::{destroy, guarded, tokenyard_status_t};
use crate::base::{Error, Result};
use crate::bindings::api::{CombineSent, Handle, Refused, Sent, SentAgain};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A place for what a call leaves.
pub(super) struct Slot<T> {
    value: Mutex<Option<T>>,
    /// The thread whose call has the lock, by [`this_thread`]; else 0.
    holder: AtomicUsize,
}

/// A slot's value during a call.
struct Held<'a, T> {
    value: MutexGuard<'a, Option<T>>,
    holder: &'a AtomicUsize,
}

impl<T> Drop for Held<'_, T> {
    fn drop(&mut self) {
        // Before the lock is let go.
        self.holder.store(0, Ordering::Relaxed);
    }
}

/// A number of the calling thread, which no other thread has meanwhile.
fn this_thread() -> usize {
    thread_local!(static PLACE: u8 = const { 0 });
    PLACE.with(|place| std::ptr::from_ref(place).addr())
}

/// A received dispatch: what combine needs to bring the rows back. It is empty until a dispatch fills it.
pub struct tokenyard_handle_t(pub(super) Slot<Handle>);

/// A dispatch under way, between its halves. It is empty until `tokenyard_dispatch_send` fills it, and again once it is
/// received.
pub struct tokenyard_sent_t(pub(super) Slot<Sent>);

/// A dispatch by an earlier handle under way, between its halves.
pub struct tokenyard_sent_again_t(pub(super) Slot<SentAgain>);

/// A combine under way, between its halves.
pub struct tokenyard_combine_sent_t(pub(super) Slot<CombineSent>);

#[cold]
fn empty(name: &'static str) -> Error {
    Error::argument(name, "empty", "let the call before fill it: a dispatch, or a half that sends")
}

impl<T> Slot<T> {
    fn new() -> Slot<T> {
        Slot { value: Mutex::new(None), holder: AtomicUsize::new(0) }
    }

    /// Waits for calls of other threads. A call that a function of the caller makes during a call with the same object,
    /// such as the check of an interrupt, would wait for itself.
    fn hold(&self, name: &'static str) -> Result<Held<'_, T>> {
        // Only this thread stores its own number, so another thread's store is never taken for it.
        if self.holder.load(Ordering::Relaxed) == this_thread() {
            let advice = "a function of yours that a call with this object calls may not use the object";
            return Err(Error::argument(name, "in use by a call of this thread", advice));
        }
        let value = self.lock();
        self.holder.store(this_thread(), Ordering::Relaxed);
        Ok(Held { value, holder: &self.holder })
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a new value in; the former one is dropped.
    pub fn set(&self, value: T) {
        let former = self.lock().replace(value);
        // Without the lock, since a drop may take a while.
        drop(former);
    }

    pub fn clear(&self) {
        let former = self.lock().take();
        drop(former);
    }

    /// Calls with the value.
    pub fn with<R>(&self, name: &'static str, call: impl FnOnce(&T) -> Result<R>) -> Result<R> {
        self.hold(name)?.value.as_ref().map_or_else(|| Err(empty(name)), call)
    }

    /// A half that sends fills it.
    pub fn send(&self, name: &'static str, call: impl FnOnce() -> Result<T>) -> Result<()> {
        let mut slot = self.hold(name)?;
        if slot.value.is_some() {
            let advice = "receive that first, or give another object: halves that are not received close a context";
            return Err(Error::argument(name, "full with what was sent before", advice));
        }
        *slot.value = Some(call()?);
        Ok(())
    }

    /// A half that receives empties it, unless the half is refused.
    pub fn receive<R>(
        &self,
        name: &'static str,
        call: impl FnOnce(T) -> std::result::Result<R, Refused<T>>,
    ) -> Result<R> {
        let mut slot = self.hold(name)?;
        let sent = slot.value.take().ok_or_else(|| empty(name))?;
        call(sent).map_err(|refused| {
            *slot.value = Some(*refused.given);
            refused.error
        })
    }
}

/// An empty handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_handle_create(handle: *mut *mut tokenyard_handle_t) -> tokenyard_status_t {
    // SAFETY: the caller's pointer.
    guarded(|| unsafe { Out::new("handle", handle) }.map(|out| out.give(tokenyard_handle_t(Slot::new()))))
}

/// Makes `to` a handle of the dispatch of `from`, too.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_handle_copy(
    to: Option<&tokenyard_handle_t>,
    from: Option<&tokenyard_handle_t>,
) -> tokenyard_status_t {
    guarded(|| {
        let to = object("to", to)?;
        let handle = object("from", from)?.0.with("from", |handle| Ok(handle.clone()))?;
        to.0.set(handle);
        Ok(())
    })
}

/// Empties the handle: its device memory is used again once the work enqueued with it has run.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_handle_clear(handle: Option<&tokenyard_handle_t>) -> tokenyard_status_t {
    guarded(|| {
        object("handle", handle)?.0.clear();
        Ok(())
    })
}

/// Destroys the object, as `tokenyard_handle_clear` empties it. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_handle_destroy(handle: *mut tokenyard_handle_t) {
    // SAFETY: the caller's pointer, of `tokenyard_handle_create`.
    unsafe { destroy(handle) }
}

/// An empty object for `tokenyard_dispatch_send`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_sent_create(sent: *mut *mut tokenyard_sent_t) -> tokenyard_status_t {
    // SAFETY: the caller's pointer.
    guarded(|| unsafe { Out::new("sent", sent) }.map(|out| out.give(tokenyard_sent_t(Slot::new()))))
}

/// Destroys the object. If a dispatch is under way in it, that is abandoned, and its context can only be destroyed.
/// NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_sent_destroy(sent: *mut tokenyard_sent_t) {
    // SAFETY: the caller's pointer, of `tokenyard_sent_create`.
    unsafe { destroy(sent) }
}

/// An empty object for `tokenyard_dispatch_again_send`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_sent_again_create(sent: *mut *mut tokenyard_sent_again_t) -> tokenyard_status_t {
    // SAFETY: the caller's pointer.
    guarded(|| unsafe { Out::new("sent", sent) }.map(|out| out.give(tokenyard_sent_again_t(Slot::new()))))
}

/// As `tokenyard_sent_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_sent_again_destroy(sent: *mut tokenyard_sent_again_t) {
    // SAFETY: the caller's pointer, of `tokenyard_sent_again_create`.
    unsafe { destroy(sent) }
}

/// An empty object for `tokenyard_combine_send`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_combine_sent_create(sent: *mut *mut tokenyard_combine_sent_t) -> tokenyard_status_t {
    // SAFETY: the caller's pointer.
    guarded(|| unsafe { Out::new("sent", sent) }.map(|out| out.give(tokenyard_combine_sent_t(Slot::new()))))
}

/// As `tokenyard_sent_destroy`, of a combine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_combine_sent_destroy(sent: *mut tokenyard_combine_sent_t) {
    // SAFETY: the caller's pointer, of `tokenyard_combine_sent_create`.
    unsafe { destroy(sent) }
}
