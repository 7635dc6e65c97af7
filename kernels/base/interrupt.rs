//! A way to end the calling thread's waits before their deadlines.
//!
//! Place in the data path: none; waits look here on the thread that waits. It never blocks or locks. A host fiber has
//! interrupts of its own: they are not in force while other fibers of the thread run.
//!
//! ```text
//!   during ── in force ──▶ a wait that is not over: raised? ── yes ──▶ Error::Interrupted
//!      └──── closure ends: as it was before ◀──────────────────────────────┘
//! ```

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

type Check = Box<dyn Fn() -> bool + Send + Sync>;

struct Shared {
    raised: AtomicBool,
    check: Option<Check>,
}

/// Ends waits of a thread: of [`Stream::synchronize`](crate::Stream::synchronize), of a world's collectives, and of all
/// that is made of these, such as building a context. Clones are the same interrupt.
///
/// An interrupt is in force for the thread that calls [`during`](Self::during), and for as long as that call lasts. A
/// wait that finds it raised returns [`Error::Interrupted`](crate::Error::Interrupted). A wait whose event is there
/// already returns that event. Waits of destructors are never interrupted: memory may depend on them.
///
/// ```
/// use tokenyard::{Error, Interrupt, World};
///
/// let interrupt = Interrupt::new();
/// let raiser = interrupt.clone();
/// let raiser = std::thread::spawn(move || raiser.raise());
///
/// // Rank 1 never comes.
/// let worlds = World::threads(2)?;
/// let outcome = interrupt.during(|| worlds[0].barrier("start"));
/// assert!(matches!(outcome, Err(Error::Interrupted { what: "start", .. })));
/// # raiser.join().unwrap();
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct Interrupt {
    shared: Arc<Shared>,
}

thread_local! {
    /// The interrupts in force on this thread, the outermost first.
    static IN_FORCE: Cell<Vec<Interrupt>> = const { Cell::new(Vec::new()) };
}

/// Takes what is in force. A thread that ends has no interrupts any more, although its own values may still be dropped,
/// and wait.
fn take() -> Vec<Interrupt> {
    IN_FORCE.try_with(Cell::take).unwrap_or_default()
}

fn put(interrupts: Vec<Interrupt>) {
    let _ = IN_FORCE.try_with(|cell| cell.set(interrupts));
}

/// The interrupts that were in force; in force again when this is dropped.
struct Restored(Vec<Interrupt>);

impl Drop for Restored {
    fn drop(&mut self) {
        put(std::mem::take(&mut self.0));
    }
}

impl Default for Interrupt {
    fn default() -> Interrupt {
        Interrupt::new()
    }
}

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let raised = self.shared.raised.load(Ordering::Relaxed);
        f.debug_struct("Interrupt").field("raised", &raised).finish_non_exhaustive()
    }
}

impl Interrupt {
    /// One that is not raised.
    pub fn new() -> Interrupt {
        Interrupt { shared: Arc::new(Shared { raised: AtomicBool::new(false), check: None }) }
    }

    /// One that also asks `check`, on the thread that waits and about once a millisecond, whether it is raised, as
    /// Python's `PyErr_CheckSignals` must be asked. After the first yes it stays raised. A panic of `check` counts as
    /// yes. `check` may make calls that wait; those are not interrupted.
    pub fn asking(check: impl Fn() -> bool + Send + Sync + 'static) -> Interrupt {
        Interrupt { shared: Arc::new(Shared { raised: AtomicBool::new(false), check: Some(Box::new(check)) }) }
    }

    /// Ends the waits under way for which it is in force, and those that begin later. May be called from any thread
    /// and from a signal handler.
    pub fn raise(&self) {
        self.shared.raised.store(true, Ordering::Release);
    }

    /// Takes it back: waits that begin now are not interrupted.
    pub fn lower(&self) {
        self.shared.raised.store(false, Ordering::Release);
    }

    /// Whether it is raised. Does not ask the check.
    pub fn is_raised(&self) -> bool {
        self.shared.raised.load(Ordering::Acquire)
    }

    /// Runs `work` with this interrupt in force for the calling thread, beside those that are in force already.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let outer = take();
        let inner = outer.iter().chain([self]).cloned().collect();
        let _restored = Restored(outer);
        put(inner);
        work()
    }

    /// Whether an interrupt that is in force for the calling thread is raised; asks its check. For an
    /// [`AllGather`](crate::AllGather) that waits by itself.
    pub fn is_due() -> bool {
        due(true)
    }

    fn finds_raised(&self, ask: bool) -> bool {
        if !self.is_raised()
            && ask
            && let Some(check) = &self.shared.check
            && asks(check)
        {
            self.raise();
        }
        self.is_raised()
    }
}

/// The answer of a check; a check that panics answers yes. The panic's payload is leaked: dropping it could panic, and
/// unwind through a wait on which memory depends.
fn asks(check: &Check) -> bool {
    catch_unwind(AssertUnwindSafe(check)).unwrap_or_else(|payload| {
        std::mem::forget(payload);
        true
    })
}

/// Whether an interrupt in force is raised. `ask`: whether to ask checks, during which none is in force.
pub(super) fn due(ask: bool) -> bool {
    let in_force = Restored(take());
    in_force.0.iter().any(|interrupt| interrupt.finds_raised(ask))
}

/// Runs `work` with no interrupt in force: memory depends on the waits in it, or other fibers run.
pub fn uninterrupted<T>(work: impl FnOnce() -> T) -> T {
    let _restored = Restored(take());
    work()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn one_that_ends_with_its_closure_or_its_panic_and_leaves_the_outer_in_force() {
        let (outer, inner) = (Interrupt::new(), Interrupt::new());
        inner.raise();
        outer.during(|| {
            assert!(!Interrupt::is_due());
            inner.during(|| assert!(Interrupt::is_due()));
            let panicked = catch_unwind(AssertUnwindSafe(|| inner.during(|| panic!("on purpose"))));
            assert!(panicked.is_err() && !Interrupt::is_due(), "the inner one has ended");
            outer.raise();
            assert!(Interrupt::is_due());
            let fresh = Interrupt::new();
            fresh.during(|| assert!(Interrupt::is_due(), "the outer one counts within"));
            uninterrupted(|| assert!(!Interrupt::is_due()));
            assert!(Interrupt::is_due(), "in force again");
            outer.lower();
            assert!(!Interrupt::is_due());
        });
        outer.raise();
        assert!(!Interrupt::is_due(), "in force after its closure");
        std::thread::spawn(|| assert!(!Interrupt::is_due())).join().unwrap();
    }

    #[test]
    fn a_check_that_says_yes_once_is_remembered_and_is_not_asked_within_itself() {
        let asked = Arc::new(AtomicU32::new(0));
        let count = asked.clone();
        let interrupt = Interrupt::asking(move || {
            assert!(!Interrupt::is_due());
            count.fetch_add(1, Ordering::Relaxed) == 1
        });
        interrupt.during(|| {
            assert!(!due(true) && !due(false));
            assert!(due(true) && due(true) && due(false));
        });
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        let panics = Interrupt::asking(|| panic!("on purpose"));
        panics.during(|| assert!(due(true)));
    }

    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("as it is dropped");
        }
    }

    #[test]
    fn a_panic_that_would_panic_as_it_is_dropped_does_not_unwind_through_a_wait() {
        Interrupt::asking(|| std::panic::panic_any(Bomb)).during(|| assert!(due(true)));
    }
}
