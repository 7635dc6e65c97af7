//! The number of this process, which objects are of: the child of a fork has none of its parent's threads.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// 0: to be asked.
static KNOWN: AtomicU32 = AtomicU32::new(0);

/// The system is asked once, and in the child of a fork once more: calls compare the number, and to ask took
/// 0.5 µs of each on a machine whose kernel is gVisor (docs/notebook-host.md).
pub(super) fn id() -> u32 {
    match KNOWN.load(Ordering::Relaxed) {
        0 => asked(),
        known => known,
    }
}

/// Whether a fork's child forgets the number.
static FORGETS: AtomicU8 = AtomicU8::new(NOT_YET);
const NOT_YET: u8 = 0;
const UNDER_WAY: u8 = 1;
const DONE: u8 = 2;

#[cold]
fn asked() -> u32 {
    // Waits for no other thread, which a child of a fork would not have.
    if FORGETS.compare_exchange(NOT_YET, UNDER_WAY, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        // SAFETY: the function may be called in the child of a fork, as it stores a word.
        let status = unsafe { libc::pthread_atfork(None, None, Some(forget)) };
        FORGETS.store(if status == 0 { DONE } else { NOT_YET }, Ordering::Relaxed);
    }
    let own = std::process::id();
    // Without memory for the handler the system is asked each time.
    if FORGETS.load(Ordering::Relaxed) == DONE {
        KNOWN.store(own, Ordering::Relaxed);
    }
    own
}

unsafe extern "C" fn forget() {
    KNOWN.store(0, Ordering::Relaxed);
}
