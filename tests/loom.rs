//! proxy/driver/mailbox.rs, the file itself, under loom: every order of its threads' steps, and every value that the
//! memory model lets their loads see. `sync` below takes the place of proxy/driver/sync.rs.

#[path = "../proxy/driver/mailbox.rs"]
mod mailbox;

/// Loom's parts for the mailbox.
mod sync {
    pub use loom::sync::atomic::{AtomicBool, Ordering};
    pub use loom::sync::{Mutex, MutexGuard};

    use loom::cell::UnsafeCell;
    use loom::sync::atomic::AtomicU8;
    use std::ops::Deref;

    /// Padding decides nothing here.
    pub struct CachePadded<T>(T);

    impl<T> CachePadded<T> {
        pub fn new(value: T) -> CachePadded<T> {
            CachePadded(value)
        }
    }

    impl<T> Deref for CachePadded<T> {
        type Target = T;

        fn deref(&self) -> &T {
            &self.0
        }
    }

    const EMPTY: u8 = 0;
    const SETTING: u8 = 1;
    const SET: u8 = 2;

    /// As std's, which loom does not have: one flag, acquired by `get`, and no lock that would order anything else.
    pub struct OnceLock<T> {
        state: AtomicU8,
        value: UnsafeCell<Option<T>>,
    }

    // SAFETY: the value is written once, by whoever moved the state from EMPTY, and read only after SET.
    unsafe impl<T: Send + Sync> Sync for OnceLock<T> {}

    impl<T> OnceLock<T> {
        pub fn new() -> OnceLock<T> {
            OnceLock { state: AtomicU8::new(EMPTY), value: UnsafeCell::new(None) }
        }

        pub fn set(&self, value: T) -> Result<(), T> {
            if self.state.compare_exchange(EMPTY, SETTING, Ordering::Acquire, Ordering::Acquire).is_err() {
                return Err(value);
            }
            // SAFETY: this thread alone moved the state from EMPTY, and nobody reads before SET.
            self.value.with_mut(|place| unsafe { *place = Some(value) });
            self.state.store(SET, Ordering::Release);
            Ok(())
        }

        pub fn get(&self) -> Option<&T> {
            if self.state.load(Ordering::Acquire) != SET {
                return None;
            }
            // SAFETY: set, and never written again.
            self.value.with(|place| unsafe { (*place).as_ref() })
        }
    }
}

use loom::sync::Arc;
use loom::thread;
use mailbox::{Mailbox, Slip};

type Requests = Mailbox<u32, &'static str>;

#[test]
fn a_request_is_put_while_the_queue_is_found_empty() {
    loom::model(|| {
        let mailbox = Arc::new(Requests::new());
        let callers = [1, 2].map(|request| {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || mailbox.put(request))
        });
        // Each pass of the loop takes until nothing waits.
        let mut taken = Vec::new();
        for _ in 0..2 {
            taken.extend(std::iter::from_fn(|| mailbox.take()));
        }
        callers.into_iter().for_each(|caller| caller.join().unwrap());
        taken.extend(std::iter::from_fn(|| mailbox.take()));
        taken.sort_unstable();
        assert_eq!(taken, [1, 2]);
    });
}

#[test]
fn the_end_is_seen_before_its_reason() {
    loom::model(|| {
        let mailbox = Arc::new(Requests::new());
        let ends = Arc::clone(&mailbox);
        let thread = thread::spawn(move || {
            ends.give_up("first");
            ends.give_up("second");
            ends.end();
        });
        if mailbox.has_ended() {
            assert_eq!(mailbox.reason(), Some(&"first"));
        }
        thread.join().unwrap();
        assert!(mailbox.has_ended());
    });
}

type Job = Arc<Slip<u32, u32>>;

#[test]
fn an_answer_is_stored_just_before_the_end() {
    loom::model(|| {
        let mailbox: Arc<Mailbox<Job, ()>> = Arc::new(Mailbox::new());
        let slip: Job = Arc::new(Slip::new(20));
        mailbox.put(Arc::clone(&slip));
        let ends = Arc::clone(&mailbox);
        let thread = thread::spawn(move || {
            while let Some(slip) = ends.take() {
                slip.run(|asked| asked + 1);
            }
            ends.end();
        });
        let answer = loop {
            match slip.look(&mailbox) {
                Some(answer) => break answer,
                None => thread::yield_now(),
            }
        };
        assert_eq!(answer, Some(21));
        thread.join().unwrap();
    });
}

#[test]
fn a_request_is_put_after_the_last_look() {
    loom::model(|| {
        let mailbox: Arc<Mailbox<Job, ()>> = Arc::new(Mailbox::new());
        let ends = Arc::clone(&mailbox);
        let thread = thread::spawn(move || {
            while let Some(slip) = ends.take() {
                slip.run(|asked| asked + 1);
            }
            ends.end();
        });
        let slip: Job = Arc::new(Slip::new(20));
        mailbox.put(Arc::clone(&slip));
        let answer = loop {
            match slip.look(&mailbox) {
                Some(answer) => break answer,
                None => thread::yield_now(),
            }
        };
        thread.join().unwrap();
        // Run and answered, or never begun.
        assert_eq!(answer.is_none(), slip.withdraw());
    });
}

#[test]
fn a_request_is_withdrawn_while_it_is_taken() {
    loom::model(|| {
        let mailbox: Arc<Mailbox<Job, ()>> = Arc::new(Mailbox::new());
        let slip: Job = Arc::new(Slip::new(20));
        mailbox.put(Arc::clone(&slip));
        let takes = Arc::clone(&mailbox);
        let thread = thread::spawn(move || {
            let mut runs = 0;
            while let Some(slip) = takes.take() {
                slip.run(|asked| {
                    runs += 1;
                    asked
                });
            }
            runs
        });
        let withdrawn = slip.withdraw();
        assert_eq!(thread.join().unwrap(), u32::from(!withdrawn));
    });
}

#[test]
fn a_caller_leaves_while_its_request_runs() {
    loom::model(|| {
        let mailbox: Arc<Mailbox<Job, ()>> = Arc::new(Mailbox::new());
        let slip: Job = Arc::new(Slip::new(20));
        mailbox.put(Arc::clone(&slip));
        let takes = Arc::clone(&mailbox);
        let thread = thread::spawn(move || takes.take().and_then(|slip| slip.run(|asked| asked + 1)));
        // As a caller at its deadline.
        let withdrawn = slip.withdraw();
        let answer = if withdrawn { None } else { slip.leave() };
        let undone = thread.join().unwrap();
        // Whatever was done, one of both knows.
        assert_eq!(
            [answer, undone].into_iter().flatten().collect::<Vec<_>>(),
            if withdrawn { vec![] } else { vec![21] }
        );
    });
}
