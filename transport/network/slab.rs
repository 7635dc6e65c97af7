//! An endpoint's own memory: where peers' empty writes go, and messages on their way.
//!
//! Place in the data path: under messages. The network reads and writes it at any time, so that no reference covers
//! it.
//!
//! ```text
//!  0          64              128         128 + sends × PITCH        + receives × PITCH
//!  scratch    source of       sends …     receives …
//!  line       empty writes
//! ```

use super::message::{HEAD, PITCH};
use crate::base::{Error, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// Bytes of the scratch line, and of the line that empty writes come from.
pub(super) const LINE: usize = 64;
/// Bytes that a write of none has on the wire: some versions of some providers lose writes without bytes.
pub(super) const EMPTY: usize = 8;

#[derive(Debug)]
pub(super) struct Slab {
    base: NonNull<u8>,
    layout: Layout,
    sends: usize,
    receives: usize,
    /// Whether nothing stores into it any more.
    all_closed: fn() -> bool,
}

// SAFETY: memory that it owns and accesses by copies alone.
unsafe impl Send for Slab {}

impl Slab {
    /// Room for messages to send and to receive. It is freed only if `all_closed` says so by then.
    pub fn new(sends: u32, receives: u32, all_closed: fn() -> bool) -> Result<Slab> {
        let (sends, receives) = (sends as usize, receives as usize);
        let bytes = 2 * LINE + (sends + receives) * PITCH;
        let lack = || Error::transport(format!("no {bytes} bytes for messages"), "raise the limit on memory");
        let layout = Layout::from_size_align(bytes, 4096).map_err(|_| lack())?;
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(lack)?;
        Ok(Slab { base, layout, sends, receives, all_closed })
    }

    fn at(&self, offset: usize) -> u64 {
        self.base.as_ptr() as u64 + offset as u64
    }

    /// The line that peers may write to.
    pub fn scratch(&self) -> u64 {
        self.at(0)
    }

    /// The source of empty writes.
    pub fn empty(&self) -> u64 {
        self.at(LINE)
    }

    /// All but the scratch line, and its bytes.
    pub fn local(&self) -> (u64, usize) {
        (self.at(LINE), self.layout.size() - LINE)
    }

    pub fn sends(&self) -> u32 {
        self.sends as u32
    }

    pub fn receives(&self) -> u32 {
        self.receives as u32
    }

    /// The place of a message to send.
    pub fn send(&self, number: u32) -> u64 {
        debug_assert!((number as usize) < self.sends);
        self.at(2 * LINE + number as usize % self.sends * PITCH)
    }

    /// The place that a message is received in.
    pub fn receive(&self, number: u32) -> u64 {
        debug_assert!((number as usize) < self.receives);
        self.at(2 * LINE + (self.sends + number as usize % self.receives) * PITCH)
    }

    /// Stores a message to send.
    pub fn store(&mut self, number: u32, message: &[u8; PITCH]) {
        let place = self.send(number) as *mut u8;
        // SAFETY: the place has as many bytes, and no operation is under way by its number.
        unsafe { std::ptr::copy_nonoverlapping(message.as_ptr(), place, PITCH) };
    }

    /// Takes a message that was received. Its header is erased: a shorter message that comes to the same place must not
    /// go on with this one's.
    pub fn take(&mut self, number: u32) -> [u8; PITCH] {
        let mut message = [0; PITCH];
        let place = self.receive(number) as *mut u8;
        // SAFETY: the place has as many bytes, and its receive has completed.
        unsafe {
            std::ptr::copy_nonoverlapping(place, message.as_mut_ptr(), PITCH);
            place.write_bytes(0, HEAD);
        }
        message
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if !(self.all_closed)() {
            return;
        }
        // SAFETY: allocated by `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_taken_once() {
        let mut slab = Slab::new(1, 2, || true).unwrap();
        let place = slab.receive(1) as *mut u8;
        // SAFETY: the place has as many bytes, and nothing else uses it.
        unsafe { place.write_bytes(9, PITCH) };
        assert_eq!((slab.take(1), slab.take(0)), ([9; PITCH], [0; PITCH]));
        // A shorter one that comes to the same place does not go on with it.
        assert_eq!(slab.take(1)[..HEAD], [0; HEAD]);
    }
}
