//! What `mailbox.rs` locks and flags with. `tests/loom.rs` puts loom's in its place.

pub use crossbeam_utils::CachePadded;
pub use std::sync::atomic::{AtomicBool, Ordering};
pub use std::sync::{Mutex, OnceLock};
