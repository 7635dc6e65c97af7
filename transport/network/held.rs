//! Immediates that wait for a flush of what a NIC wrote into a GPU's memory: a read of that memory, which the NIC began
//! behind them, has to come back (E4 in docs/design.md).
//!
//! Place in the data path: between a NIC's completions and the events of a poll, which never waits for a read.
//! Source: a read request does not pass the writes before it (PCI Express Base Specification, 2.4.1), so that its
//! answer shows that they have reached the GPU.
//!
//! ```text
//!  immediates ──▶ held … ── poll ─▶ read posted ─▶ read done ──▶ handed out: those that were held when it was posted
//! ```

use std::collections::VecDeque;

/// Immediates of a NIC that wait for a flush.
#[derive(Debug)]
pub(super) struct Held {
    waiting: VecDeque<u32>,
    /// How many of them came before the read that is under way.
    covered: usize,
    is_reading: bool,
}

impl Held {
    /// Room for so many.
    pub fn new(most: u32) -> Held {
        Held { waiting: VecDeque::with_capacity(most as usize), covered: 0, is_reading: false }
    }

    /// An immediate has come.
    pub fn hold(&mut self, bits: u32) {
        self.waiting.push_back(bits);
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether a read is to be posted.
    pub fn wants_read(&self) -> bool {
        !self.is_reading && !self.waiting.is_empty()
    }

    /// A read was posted: one serves all that have come so far.
    pub fn read_posted(&mut self) {
        (self.is_reading, self.covered) = (true, self.waiting.len());
    }

    /// The read has ended well: what it covered may be handed out, by `next`.
    pub fn read_done(&mut self) {
        self.is_reading = false;
    }

    /// The read has failed: another must cover what waits.
    pub fn read_failed(&mut self) {
        (self.is_reading, self.covered) = (false, 0);
    }

    /// The next that may be handed out.
    pub fn next(&mut self) -> Option<u32> {
        if self.is_reading || self.covered == 0 {
            return None;
        }
        self.covered -= 1;
        self.waiting.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(held: &mut Held) -> Vec<u32> {
        std::iter::from_fn(|| held.next()).collect()
    }

    #[test]
    fn a_read_covers_what_came_before_it_and_nothing_else() {
        let mut held = Held::new(8);
        assert!(!held.wants_read() && held.is_empty());
        held.hold(1);
        held.hold(2);
        assert!(held.wants_read() && all(&mut held).is_empty());
        held.read_posted();
        held.hold(3);
        assert!(!held.wants_read() && all(&mut held).is_empty());
        held.read_done();
        assert_eq!(all(&mut held), [1, 2]);
        assert!(held.wants_read() && !held.is_empty());
        held.read_posted();
        held.read_failed();
        assert!(held.wants_read() && all(&mut held).is_empty());
        held.read_posted();
        held.hold(4);
        held.read_done();
        assert_eq!(all(&mut held), [3]);
    }
}
