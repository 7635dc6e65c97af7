//! The settings of a run that every rank gets.
//!
//! Before the data path; data without behaviour.

use std::time::Duration;

use super::places::Places;
use crate::cli::cases::case::Case;
use crate::cli::cases::words::{ArenaWord, Check};

/// The settings of a run that every rank gets.
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
    pub allow_old_shm: bool,
    /// Each rank's NICs and the core of its proxy.
    pub places: Places,
    /// Whether calls are timed, the links are measured, and a timeline is kept.
    pub measured: bool,
    /// Whether the device records when blocks complete each stage of a call.
    pub stages: bool,
    /// Most ranks of a host.
    pub host_ranks: usize,
}

impl Job {
    /// Time limit of all work of an iteration: waits have their own deadlines, and kernels of a CPU device are slow.
    pub fn patience(&self) -> Duration {
        self.timeout * 4 + Duration::from_secs(120)
    }

    pub fn iterations(&self) -> usize {
        self.warmup + self.case.iters
    }
}
