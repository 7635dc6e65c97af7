//! Control messages between proxies. Whatever arrives is either exactly one of these or is dropped.
//!
//! ```text
//!  byte 0        4         5      6         8          12
//!       | magic  | version | kind |  turn   | sender   |        little end first
//! ```
//!
//! The turn counts how often the sender has become busy or come back: while it is odd, the sender is busy. As every
//! message has it, one that is lost or late is made up for by the next, and one that was overtaken is known by it.

use crate::base::Rank;

const MAGIC: [u8; 4] = *b"tyhb";
const VERSION: u8 = 2;
/// Length of every control message.
pub(super) const BYTES: usize = 12;

/// What a proxy tells another besides data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Control {
    /// I live.
    Heartbeat,
    /// I leave in good order: my silence means nothing from now on.
    Leave,
}

impl Control {
    pub fn encode(self, sender: Rank, turn: Turn) -> [u8; BYTES] {
        let kind = match self {
            Control::Heartbeat => 1,
            Control::Leave => 2,
        };
        let mut bytes = [0; BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&[VERSION, kind]);
        bytes[6..8].copy_from_slice(&turn.0.to_le_bytes());
        bytes[8..].copy_from_slice(&sender.0.to_le_bytes());
        bytes
    }

    /// `None` unless the message is well-formed in every byte and its sender is the one who sent it.
    pub fn decode(bytes: &[u8], sender: Rank) -> Option<(Control, Turn)> {
        let turn = Turn(u16::from_le_bytes([*bytes.get(6)?, *bytes.get(7)?]));
        let kinds = [Control::Heartbeat, Control::Leave].into_iter();
        Some((kinds.clone().find(|control| control.encode(sender, turn) == bytes)?, turn))
    }
}

/// How often a rank has become busy or come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Turn(pub u16);

impl Turn {
    pub fn is_busy(self) -> bool {
        self.0 & 1 != 0
    }

    pub fn next(self) -> Turn {
        Turn(self.0.wrapping_add(1))
    }

    /// Whether it was taken after another; of two that are less than half of all turns apart.
    pub fn is_after(self, other: Turn) -> bool {
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
            let bytes = control.encode(sender, Turn(0xfffe));
            assert_eq!(Control::decode(&bytes, sender), Some((control, Turn(0xfffe))));
            assert_eq!(Control::decode(&bytes, Rank(1026)), None);
            assert_eq!(Control::decode(&bytes[..BYTES - 1], sender), None);
            assert_eq!(Control::decode(&[&bytes[..], &[0]].concat(), sender), None);
            for at in (0..BYTES).filter(|at| !(5..8).contains(at)) {
                let mut damaged = bytes;
                damaged[at] ^= 0x40;
                assert_eq!(Control::decode(&damaged, sender), None, "byte {at}");
            }
        }
        assert_eq!(Control::decode(&[], sender), None);
    }

    #[test]
    fn turns_wrap() {
        assert!(Turn(0).is_after(Turn(u16::MAX)) && !Turn(u16::MAX).is_after(Turn(0)) && !Turn(3).is_after(Turn(3)));
        assert!(Turn(u16::MAX).is_busy() && !Turn(u16::MAX).next().is_busy());
    }
}
