//! What every rank of a run is told.
//!
//! Before the data path; plain data.

use std::time::Duration;

use crate::cli::cases::case::Case;
use crate::cli::cases::words::{ArenaWord, Check};

/// What every rank of a run is told.
#[derive(Debug, Clone)]
pub struct Job {
    pub case: Case,
    /// Iterations before the timed ones.
    pub warmup: usize,
    pub check: Check,
    /// Progress deadline of every wait.
    pub timeout: Duration,
    /// Where arenas lie.
    pub arena: ArenaWord,
    /// Whether calls are timed, the links are measured, and a timeline is kept.
    pub measured: bool,
    /// Whether the device notes when it comes through each stage of a call.
    pub stages: bool,
}

impl Job {
    /// How long all work of an iteration may take: waits have their own deadlines, kernels of a CPU device take long.
    pub fn patience(&self) -> Duration {
        self.timeout * 4 + Duration::from_secs(120)
    }

    pub fn iterations(&self) -> usize {
        self.warmup + self.case.iters
    }
}
