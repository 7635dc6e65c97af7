//! How a run of the program ends.

use std::process::ExitCode;

/// How a run of the program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Status {
    /// Everything that was asked for ran, and every comparison was right.
    Success = 0,
    /// Something did not run or was wrong, or the output could not be written.
    Failure = 1,
    /// The arguments or the environment are unusable; one sentence states why.
    Unusable = 2,
}

impl From<bool> for Status {
    /// Whether all was right.
    fn from(right: bool) -> Status {
        if right { Status::Success } else { Status::Failure }
    }
}

impl From<Status> for u8 {
    /// The exit status of the program.
    fn from(status: Status) -> u8 {
        status as u8
    }
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> ExitCode {
        ExitCode::from(u8::from(status))
    }
}
