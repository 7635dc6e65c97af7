//! Waiting on the host: every wait has a name and a deadline, and lets others run.
//!
//! On an ordinary thread `relax` yields to the operating system. On a host fiber of the one-thread
//! CPU world it yields to the fiber scheduler instead; the executor installs that hook for its thread.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Yields at a named wait, which has yielded so many times before.
type RelaxHook = fn(&'static str, u32);

thread_local! {
    static HOOK: Cell<Option<RelaxHook>> = const { Cell::new(None) };
}

/// Installs (or, with `None`, removes) this thread's way to let others run. It is passed the wait's name and how often
/// this wait has yielded before: 0 says that the caller got somewhere since its last wait.
pub fn set_relax_hook(hook: Option<fn(&'static str, u32)>) {
    HOOK.with(|h| h.set(hook));
}

/// Lets others run once; `site` names the wait.
pub fn relax(site: &'static str, turns: u32) {
    match HOOK.with(Cell::get) {
        Some(yield_fiber) => yield_fiber(site, turns),
        None if turns < 64 => std::hint::spin_loop(),
        None if turns < 256 => std::thread::yield_now(),
        None => std::thread::sleep(Duration::from_micros(50)),
    }
}

/// Polls `ready` until it answers `Some`, or until `timeout` passed, then answers `None`.
pub fn poll<T>(site: &'static str, timeout: Duration, mut ready: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    let mut turns = 0u32;
    loop {
        if let Some(value) = ready() {
            return Some(value);
        }
        if start.elapsed() >= timeout {
            return None;
        }
        relax(site, turns);
        turns = turns.saturating_add(1);
    }
}
