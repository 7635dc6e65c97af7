//! The program's output and its notes: all printing goes through here.
//!
//! On any thread, beside the data path. An [`Out`] belongs to one run and is passed to everything that prints, so that
//! runs in one process do not mix. An error of a stream never ends a command, which would lose running work:
//!
//! - output closed by its reader (`| head -1`): the command continues without output and returns its own status;
//! - any other error of the output (a full disk): one note, no further write, and status 1;
//! - any error of the notes' stream: ignored, since there is nowhere to report it.
//!
//! `println!` and its relatives panic on such errors, so the program denies them.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::status::Status;

/// Prints a line to the output, as `println!` would to stdout: `say!(out, "{} ranks", 8)`.
macro_rules! say {
    ($out:expr, $($format:tt)*) => { $out.line(format_args!($($format)*)) };
}

/// Prints a line of notes, as `eprintln!` would to stderr.
macro_rules! note {
    ($out:expr, $($format:tt)*) => { $out.note(format_args!($($format)*)) };
}

/// The streams of one run.
pub struct Out<'a> {
    lines: Mutex<Lines<'a>>,
    notes: Mutex<Notes<'a>>,
    bars: bool,
}

struct Lines<'a> {
    to: &'a mut (dyn Write + Send),
    /// Whether a write has failed; nothing is written after that.
    ended: bool,
    /// Whether the write failed with an error that the status must show.
    failed: bool,
}

enum Notes<'a> {
    Stderr,
    Given(&'a mut (dyn Write + Send)),
}

impl<'a> Out<'a> {
    /// Notes go to stderr if no other stream is given. `bars`: notes reach a terminal, which can show progress bars.
    pub fn new(lines: &'a mut (dyn Write + Send), notes: Option<&'a mut (dyn Write + Send)>, bars: bool) -> Out<'a> {
        let lines = Lines { to: lines, ended: false, failed: false };
        Out { lines: Mutex::new(lines), notes: Mutex::new(notes.map_or(Notes::Stderr, Notes::Given)), bars }
    }

    /// Writes a line of output, in one piece; use `say!`.
    pub fn line(&self, text: Arguments<'_>) {
        let mut lines = held(&self.lines);
        if lines.ended {
            return;
        }
        let written = lines.to.write_all(format!("{text}\n").as_bytes()).and_then(|()| lines.to.flush());
        let Err(error) = written else { return };
        lines.ended = true;
        if error.kind() != ErrorKind::BrokenPipe {
            lines.failed = true;
            note!(self, "tokenyard: stdout cannot be written ({error}); free space there, or send it elsewhere");
        }
    }

    /// Writes a line of notes, in one piece; use `note!`.
    pub fn note(&self, text: Arguments<'_>) {
        self.draw(&format!("{text}\n"));
    }

    /// Writes text unchanged to the notes' stream, for progress bars.
    pub fn draw(&self, text: &str) {
        // There is nowhere to report an error.
        let _ = match &mut *held(&self.notes) {
            Notes::Stderr => io::stderr().write_all(text.as_bytes()),
            Notes::Given(to) => to.write_all(text.as_bytes()).and_then(|()| to.flush()),
        };
    }

    /// Whether progress bars are shown.
    pub fn bars(&self) -> bool {
        self.bars
    }

    /// The status of a command with status `earned`: failure, if a write to an open stream failed.
    pub fn status(&self, earned: Status) -> Status {
        if held(&self.lines).failed && earned == Status::Success { Status::Failure } else { earned }
    }
}

/// A stream stays usable after a thread that held it panicked.
fn held<T>(stream: &Mutex<T>) -> MutexGuard<'_, T> {
    stream.lock().unwrap_or_else(PoisonError::into_inner)
}
