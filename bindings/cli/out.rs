//! Standard output and standard error: the one way to both.
//!
//! On any thread, beside the data path. A stream that takes no more never ends a command, which would lose work that is
//! under way:
//!
//! - stdout closed by its reader (`| head -1`): the command goes on in silence and ends with the status that it earned;
//! - any other error of stdout (a full disk): one sentence on stderr, no further write, and status 1;
//! - any error of stderr: nothing, since nobody is left to be told.
//!
//! `println!` and its kin panic there, so the crate denies them.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Whether stdout takes no more; set once, and then nothing is written to it.
static ENDED: AtomicBool = AtomicBool::new(false);
/// Whether it ended with an error that the status must show.
static FAILED: AtomicBool = AtomicBool::new(false);

/// Prints a line to stdout, as `println!` would.
macro_rules! say {
    ($($format:tt)*) => { $crate::out::line(format_args!($($format)*)) };
}

/// Prints a line to stderr, as `eprintln!` would.
macro_rules! note {
    ($($format:tt)*) => { $crate::out::note(format_args!($($format)*)) };
}

/// Writes a line to stdout; use `say!`.
pub fn line(text: Arguments<'_>) {
    if !ENDED.load(Relaxed) {
        let mut stdout = io::stdout().lock();
        settle(writeln!(stdout, "{text}").and_then(|()| stdout.flush()));
    }
}

/// Writes a line to stderr, in one piece; use `note!`.
pub fn note(text: Arguments<'_>) {
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Heeds the result of a write to stdout.
pub fn settle(written: io::Result<()>) {
    let Err(error) = written else { return };
    let first = !ENDED.swap(true, Relaxed);
    if first && error.kind() != ErrorKind::BrokenPipe {
        FAILED.store(true, Relaxed);
        note!("tokenyard: stdout cannot be written ({error}); free space there, or send it elsewhere");
    }
}

/// The status of a command that earned `earned`: failure, if what it printed did not all reach an open stdout.
pub fn status(earned: ExitCode) -> ExitCode {
    if FAILED.load(Relaxed) && earned == ExitCode::SUCCESS { ExitCode::FAILURE } else { earned }
}
