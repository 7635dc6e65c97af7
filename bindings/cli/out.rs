//! The program's output and its notes: the one way to both.
//!
//! On any thread, beside the data path. An [`Out`] belongs to one run and is handed down to whatever prints, so that
//! runs in one process know nothing of each other. A stream that takes no more never ends a command, which would lose
//! work that is under way:
//!
//! - the output closed by its reader (`| head -1`): the command goes on in silence and ends with the status that it
//!   earned;
//! - any other error of the output (a full disk): one note, no further write, and status 1;
//! - any error of the notes' stream: nothing, since nobody is left to be told.
//!
//! `println!` and its kin panic there, so the program denies them.

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
    /// Whether it takes no more; nothing is written then.
    ended: bool,
    /// Whether it ended with an error that the status must show.
    failed: bool,
}

enum Notes<'a> {
    Stderr,
    Given(&'a mut (dyn Write + Send)),
}

impl<'a> Out<'a> {
    /// Notes go to stderr where no other stream is given. `bars`: they reach a terminal, which can show bars of
    /// progress.
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

    /// Writes to the notes' stream as it is, for bars of progress.
    pub fn draw(&self, text: &str) {
        // Nobody is left to be told of an error.
        let _ = match &mut *held(&self.notes) {
            Notes::Stderr => io::stderr().write_all(text.as_bytes()),
            Notes::Given(to) => to.write_all(text.as_bytes()).and_then(|()| to.flush()),
        };
    }

    /// Whether bars of progress are shown.
    pub fn bars(&self) -> bool {
        self.bars
    }

    /// The status of a command that earned `earned`: failure, if what it printed did not all reach an open stream.
    pub fn status(&self, earned: Status) -> Status {
        if held(&self.lines).failed && earned == Status::Success { Status::Failure } else { earned }
    }
}

/// A stream stays usable after a thread that held it panicked.
fn held<T>(stream: &Mutex<T>) -> MutexGuard<'_, T> {
    stream.lock().unwrap_or_else(PoisonError::into_inner)
}
