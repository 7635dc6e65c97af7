//! What calls need of views: room, alignment, and that none that is written overlaps another.
//!
//! Place: before anything is enqueued. Runs on the caller's thread; pure.

use super::shape::Shape;
use crate::base::{Error, Result};
use crate::kernels::{Place, View};
use std::fmt;

/// Refuses memory that lies in other memory of the call.
#[cold]
fn overlap(written: &Used, other: &Used) -> Error {
    Error::argument(
        written.name,
        format!("{written}, where {} has {other}", other.name),
        "give memory that overlaps none of the call's, as a call writes its outputs while it reads its inputs",
    )
}

/// Scale words from one column to the next, which the device keeps in 32 bits.
pub(super) fn stride(name: &'static str, words: usize) -> Result<u32> {
    let advice = "columns of scales are at most 2^32 - 1 words apart; lay them out closer";
    u32::try_from(words).map_err(|_| Error::argument(name, words, advice))
}

/// Most views of a call: the views of a dispatch.
const MAX_VIEWS: usize = 20;

/// Bytes that a call reads or writes, from the first to the last.
#[derive(Clone, Copy, Default)]
struct Used {
    name: &'static str,
    begin: u64,
    end: u64,
}

impl fmt::Display for Used {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.end - self.begin, self.begin)
    }
}

/// What views are checked against: the context's shape, its device, and the call's other views.
pub(crate) struct Needs<'a> {
    pub shape: &'a Shape,
    pub place: Place,
    used: [Used; MAX_VIEWS],
    count: usize,
    /// How many of them are only read.
    read: usize,
}

impl Needs<'_> {
    pub fn new(shape: &Shape, place: Place) -> Needs<'_> {
        Needs { shape, place, used: [Used::default(); MAX_VIEWS], count: 0, read: 0 }
    }

    /// Marks all views that follow as written by the call.
    pub fn begin_written(&mut self) {
        self.read = self.count;
    }

    /// Refuses written views that overlap other views of the call: the call would read what it has written, for example
    /// as experts or counts, and so would its peers.
    pub fn check_apart(&self) -> Result<()> {
        let used = self.used.get(..self.count).unwrap_or_default();
        for (at, written) in used.iter().enumerate().skip(self.read) {
            for other in &used[..at] {
                if written.begin < other.end && other.begin < written.end {
                    return Err(overlap(written, other));
                }
            }
        }
        Ok(())
    }

    /// Refuses a view that is of another device, too small or misaligned.
    pub fn need(&mut self, name: &'static str, view: &View, bytes: Option<usize>, align: u64) -> Result<u64> {
        view.of(name, self.place)?;
        let Some(bytes) = bytes else {
            return Err(Error::argument(name, "beyond 64 bits", "ask for fewer rows"));
        };
        if view.len() < bytes {
            return Err(Error::argument(name, format!("{} bytes", view.len()), format!("{bytes} bytes are needed")));
        }
        if bytes > 0 && view.ptr() == 0 {
            return Err(Error::argument(name, "a null pointer", format!("{bytes} bytes are needed")));
        }
        if !view.ptr().is_multiple_of(align) {
            return Err(Error::argument(
                name,
                format!("address {:#x}", view.ptr()),
                format!("align it to {align} bytes"),
            ));
        }
        if let (true, Some(used)) = (bytes > 0, self.used.get_mut(self.count)) {
            *used = Used { name, begin: view.ptr(), end: view.ptr().saturating_add(bytes as u64) };
            self.count += 1;
        }
        Ok(view.ptr())
    }

    /// Refuses an optional view that is missing where it is needed, given where it is unused, or unusable.
    pub fn need_if(
        &mut self,
        name: &'static str,
        wanted: bool,
        why: &str,
        view: Option<&View>,
        bytes: Option<usize>,
    ) -> Result<u64> {
        match (wanted, view) {
            (true, None) => Err(Error::argument(name, "missing", format!("{why}, so give it"))),
            (false, Some(_)) => Err(Error::argument(name, "given", format!("{why}, so leave it out"))),
            (true, Some(view)) => self.need(name, view, bytes, 4),
            (false, None) => Ok(0),
        }
    }

    pub fn optional(&mut self, name: &'static str, view: &Option<View>, bytes: Option<usize>) -> Result<u64> {
        view.as_ref().map_or(Ok(0), |view| self.need(name, view, bytes, 4))
    }

    /// The same, of words of 8 bytes.
    pub fn wide(&mut self, name: &'static str, view: &Option<View>, bytes: Option<usize>) -> Result<u64> {
        view.as_ref().map_or(Ok(0), |view| self.need(name, view, bytes, 8))
    }
}

/// Bytes of `rows` rows of `row_bytes`, `pitch` apart; checks the pitch.
pub(super) fn rows_span(name: &'static str, rows: usize, pitch: usize, row_bytes: usize) -> Result<Option<usize>> {
    if pitch < row_bytes || !pitch.is_multiple_of(16) {
        let advice = format!("use a multiple of 16 that is at least {row_bytes}");
        return Err(Error::argument(name, format!("{pitch} bytes"), advice));
    }
    Ok(if rows == 0 { Some(0) } else { (rows - 1).checked_mul(pitch).and_then(|b| b.checked_add(row_bytes)) })
}
