//! Control messages between proxies. Whatever arrives is either exactly one of these or is dropped.
//!
//! ```text
//!  byte 0        4         5      6          8        12                20
//!       | magic  | version | kind | sequence | sender | counts of life |        little end first
//! ```
//!
//! The counts, of 16 bits for each context number, are by the sender's devices: of signs that they are alive and wait
//! for others. They go to the devices of the receiver as they are.
//!
//! The sequence counts how often the sender has become busy or come back; while it is odd, the sender is busy. Every
//! message carries it, so the next message makes up for a lost or late one, and the receiver recognises an overtaken
//! one.

use crate::base::Rank;
use crate::transport::network::imm::MAX_CONTEXTS;

const MAGIC: [u8; 4] = *b"tyhb";
const VERSION: u8 = 3;
/// Length of every control message.
pub(super) const BYTES: usize = 12 + 2 * MAX_CONTEXTS;

/// Signs of life of a rank's devices, by context number.
pub(super) type Life = [u16; MAX_CONTEXTS];

/// A message from proxy to proxy besides data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Control {
    /// The sender is alive.
    Heartbeat,
    /// The sender leaves in good order: its silence means nothing from now on.
    Leave,
}

impl Control {
    pub fn encode(self, sender: Rank, sequence: Sequence, life: Life) -> [u8; BYTES] {
        let kind = match self {
            Control::Heartbeat => 1,
            Control::Leave => 2,
        };
        let mut bytes = [0; BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&[VERSION, kind]);
        bytes[6..8].copy_from_slice(&sequence.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&sender.0.to_le_bytes());
        for (to, count) in bytes[12..].chunks_exact_mut(2).zip(life) {
            to.copy_from_slice(&count.to_le_bytes());
        }
        bytes
    }

    /// `None` unless the message is well-formed in every byte and its sender is the one who sent it.
    pub fn decode(bytes: &[u8], sender: Rank) -> Option<(Control, Sequence, Life)> {
        let half = |at: usize| Some(u16::from_le_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]));
        let sequence = Sequence(half(6)?);
        let mut life = Life::default();
        for (context, count) in life.iter_mut().enumerate() {
            *count = half(12 + 2 * context)?;
        }
        let mut kinds = [Control::Heartbeat, Control::Leave].into_iter();
        Some((kinds.find(|control| control.encode(sender, sequence, life) == bytes)?, sequence, life))
    }
}

/// How often a rank has become busy or come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Sequence(pub u16);

impl Sequence {
    pub fn is_busy(self) -> bool {
        self.0 & 1 != 0
    }

    pub fn next(self) -> Sequence {
        Sequence(self.0.wrapping_add(1))
    }

    /// Whether it is later than `other`; valid for two that differ by less than half of all sequence values.
    pub fn is_after(self, other: Sequence) -> bool {
        self.0.wrapping_sub(other.0) as i16 > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_damaged_byte_is_noticed() {
        let sender = Rank(1027);
        for control in [Control::Heartbeat, Control::Leave] {
            let life = [1, 0, u16::MAX, 0x1234];
            let bytes = control.encode(sender, Sequence(0xfffe), life);
            assert_eq!(Control::decode(&bytes, sender), Some((control, Sequence(0xfffe), life)));
            assert_eq!(Control::decode(&bytes, Rank(1026)), None);
            assert_eq!(Control::decode(&bytes[..BYTES - 1], sender), None);
            assert_eq!(Control::decode(&[&bytes[..], &[0]].concat(), sender), None);
            for at in (0..12).filter(|at| !(5..8).contains(at)) {
                let mut damaged = bytes;
                damaged[at] ^= 0x40;
                assert_eq!(Control::decode(&damaged, sender), None, "byte {at}");
            }
        }
        assert_eq!(Control::decode(&[], sender), None);
    }

    #[test]
    fn sequences_wrap() {
        assert!(
            Sequence(0).is_after(Sequence(u16::MAX))
                && !Sequence(u16::MAX).is_after(Sequence(0))
                && !Sequence(3).is_after(Sequence(3))
        );
        assert!(Sequence(u16::MAX).is_busy() && !Sequence(u16::MAX).next().is_busy());
    }
}
