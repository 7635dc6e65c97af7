//! The locks and atomics of `mailbox.rs`. `tests/loom.rs` replaces them with loom's.

pub use crossbeam_utils::CachePadded;
pub use std::sync::atomic::{AtomicBool, Ordering};
pub use std::sync::{Mutex, MutexGuard, OnceLock};
