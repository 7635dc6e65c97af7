//! The clock of polls.
//!
//! Place in the data path: in polls.

use nix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Time as it was at the kernel's last tick, at most 10 ms ago: what is late or silent is so by more, and a poll is to
/// take little.
pub(super) fn coarse_now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
