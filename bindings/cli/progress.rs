//! The progress bar.
//!
//! Beside the data path, on the thread of rank 0 or the main thread. Drawn on the notes' stream, if that is a terminal.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::out::Out;

/// A bar, drawn if there is a terminal.
pub struct Progress<'a, 'w> {
    shown: Option<&'a Out<'w>>,
    last: Mutex<Option<Instant>>,
}

/// Time between two drawings.
const REDRAW: Duration = Duration::from_millis(100);
const BAR: usize = 30;

impl<'a, 'w> Progress<'a, 'w> {
    pub fn new(out: &'a Out<'w>) -> Progress<'a, 'w> {
        Progress { shown: out.bars().then_some(out), last: Mutex::new(None) }
    }

    /// A bar that is never drawn.
    pub fn hidden() -> Progress<'a, 'w> {
        Progress { shown: None, last: Mutex::new(None) }
    }

    /// Draws `done` of `total`, at most once per `REDRAW`.
    pub fn show(&self, what: &str, done: usize, total: usize) {
        let Some(out) = self.shown else { return };
        let Ok(mut last) = self.last.lock() else { return };
        if last.is_some_and(|at| at.elapsed() < REDRAW) && done < total {
            return;
        }
        *last = Some(Instant::now());
        let filled = BAR * done.min(total) / total.max(1);
        out.draw(&format!("\r{what} [{}{}] {done}/{total} ", "#".repeat(filled), " ".repeat(BAR - filled)));
    }

    /// Wipes the bar.
    pub fn clear(&self) {
        if let Some(out) = self.shown {
            out.draw("\r\x1b[K");
        }
    }
}
