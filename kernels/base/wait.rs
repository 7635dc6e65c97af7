//! Waiting on the host: every wait has a name and a deadline, and lets others run.
//!
//! On an ordinary thread `relax` yields to the operating system, and deadlines pass by its clock. On a host fiber of
//! the one-thread CPU world it yields to the fiber scheduler instead, and deadlines pass by that world's clock, so that
//! a schedule does not depend on how fast it runs; the executor installs both for its thread (`Fibers`).
//!
//! `poll` waits whatever happens: for destructors, and where memory depends on the event. `poll_unless` ends where an
//! interrupt is raised (`interrupt.rs`). docs/failure.md, "Waits", lists them.

use super::interrupt;
use super::{Error, Result};
use std::cell::Cell;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub use super::interrupt::uninterrupted;

/// How often the checks of interrupts are asked; a check may take an interpreter's lock.
const ASK: Duration = Duration::from_millis(1);

/// What an interrupted wait for a stream leaves.
pub const STREAM_LEFT: &str = "the stream's work goes on; synchronize again before its memory is used";

/// How a thread that runs fibers waits on one of them.
#[derive(Clone, Copy)]
pub struct Fibers {
    /// Lets others run. It is passed the wait's name and how often this wait has yielded before: 0 means that the
    /// caller made progress since its last wait.
    pub yield_fiber: fn(&'static str, u32),
    /// The time since any fixed moment, by which deadlines of waits pass.
    pub now: fn() -> Duration,
}

thread_local! {
    static FIBERS: Cell<Option<Fibers>> = const { Cell::new(None) };
}

/// Installs (or, with `None`, removes) this thread's way to wait.
pub fn set_fibers(fibers: Option<Fibers>) {
    FIBERS.with(|f| f.set(fibers));
}

/// Whether other waits of this thread may run in the middle of one: of an ordinary thread none can.
pub fn has_fibers() -> bool {
    FIBERS.with(Cell::get).is_some()
}

/// The operating system's clock, from its first use in this process on.
pub fn system_now() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// The clock of this thread's waits.
fn now() -> Duration {
    FIBERS.with(Cell::get).map_or_else(system_now, |fibers| (fibers.now)())
}

/// Lets others run once; `site` names the wait, which has polled `polls` times before.
pub fn relax(site: &'static str, polls: u32) {
    match FIBERS.with(Cell::get) {
        // The interrupts in force are this fiber's.
        Some(fibers) => uninterrupted(|| (fibers.yield_fiber)(site, polls)),
        None if polls < 64 => std::hint::spin_loop(),
        None if polls < 256 => std::thread::yield_now(),
        None => std::thread::sleep(Duration::from_micros(50)),
    }
}

/// Polls `ready` until it returns `Some`, or until `timeout` passed; then returns `None`. Is not interrupted.
pub fn poll<T>(site: &'static str, timeout: Duration, ready: impl FnMut() -> Option<T>) -> Option<T> {
    match poll_until(site, timeout, |_| false, ready) {
        Waited::Ready(value) => Some(value),
        Waited::TimedOut | Waited::Interrupted => None,
    }
}

/// As `poll`, unless an interrupt that is in force for this thread is raised. `left` is a clause that names the state
/// in which things are left then, and what to try.
///
/// # Errors
/// `Interrupted`.
pub fn poll_unless<T>(
    site: &'static str,
    timeout: Duration,
    left: &'static str,
    ready: impl FnMut() -> Option<T>,
) -> Result<Option<T>> {
    let mut asked = now();
    let due = |now: Duration| {
        let ask = now.saturating_sub(asked) >= ASK;
        if ask {
            asked = now;
        }
        interrupt::due(ask)
    };
    match poll_until(site, timeout, due, ready) {
        Waited::Ready(value) => Ok(Some(value)),
        Waited::TimedOut => Ok(None),
        Waited::Interrupted => Err(Error::interrupted(site, left)),
    }
}

enum Waited<T> {
    Ready(T),
    TimedOut,
    Interrupted,
}

fn poll_until<T>(
    site: &'static str,
    timeout: Duration,
    mut due: impl FnMut(Duration) -> bool,
    mut ready: impl FnMut() -> Option<T>,
) -> Waited<T> {
    let start = now();
    let mut polls = 0u32;
    loop {
        // The clock is read before the look, so a process that was stopped for long looks once more.
        let now = now();
        if let Some(value) = ready() {
            return Waited::Ready(value);
        }
        if now.saturating_sub(start) >= timeout {
            return Waited::TimedOut;
        }
        if due(now) {
            return Waited::Interrupted;
        }
        relax(site, polls);
        polls = polls.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::interrupt::Interrupt;

    #[test]
    fn a_wait_that_is_over_is_not_interrupted_and_one_for_memory_never_is() {
        let interrupt = Interrupt::new();
        interrupt.raise();
        let never = || None::<()>;
        interrupt.during(|| {
            assert_eq!(poll_unless("a", Duration::ZERO, "b", || Some(7)), Ok(Some(7)));
            assert_eq!(poll_unless("a", Duration::ZERO, "b", never), Ok(None), "its deadline has passed");
            let why = poll_unless("gate", Duration::MAX, "nothing was done; go on", never).unwrap_err();
            assert_eq!(why.to_string(), "interrupted in the wait \"gate\": nothing was done; go on");
            let mut looks = 0;
            let memory = poll("memory", Duration::from_secs(20), || {
                looks += 1;
                (looks == 300).then_some(())
            });
            assert_eq!(memory, Some(()));
            assert_eq!(uninterrupted(|| poll_unless("a", Duration::from_millis(2), "b", never)), Ok(None));
        });
    }

    #[test]
    fn a_deadline_that_passed_during_a_look_followed_by_one_more() {
        let mut looks = 0;
        let found = poll("stopped", Duration::from_millis(200), || {
            looks += 1;
            std::thread::sleep(Duration::from_millis(250));
            (looks == 2).then_some(())
        });
        assert_eq!(found, Some(()));
    }

    #[test]
    fn other_fibers_of_the_thread_are_not_interrupted_for_this_one() {
        let yield_fiber = |_, _| assert!(!Interrupt::is_due());
        set_fibers(Some(Fibers { yield_fiber, now: system_now }));
        let interrupt = Interrupt::new();
        let mut looks = 0;
        let outcome = interrupt.during(|| {
            poll_unless("fiber", Duration::from_secs(20), "", || {
                looks += 1;
                if looks == 3 {
                    interrupt.raise();
                }
                relax("another fiber", 1);
                None::<()>
            })
        });
        set_fibers(None);
        assert!(outcome.is_err() && looks == 3, "{looks} looks");
    }
}
