//! Control messages between proxies. Whatever arrives is either exactly one of these or is dropped.
//!
//! ```text
//!  byte 0        4         5      6         8          12
//!       | magic  | version | kind |    0    | sender   |        little end first
//! ```

use crate::base::Rank;

const MAGIC: [u8; 4] = *b"tyhb";
const VERSION: u8 = 1;
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
    pub fn encode(self, sender: Rank) -> [u8; BYTES] {
        let kind = match self {
            Control::Heartbeat => 1,
            Control::Leave => 2,
        };
        let mut bytes = [0; BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&[VERSION, kind]);
        bytes[8..].copy_from_slice(&sender.0.to_le_bytes());
        bytes
    }

    /// `None` unless the message is well-formed in every byte and its sender is the one who sent it.
    pub fn decode(bytes: &[u8], sender: Rank) -> Option<Control> {
        [Control::Heartbeat, Control::Leave].into_iter().find(|control| control.encode(sender) == bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_damaged_byte_is_noticed() {
        let sender = Rank(1027);
        for control in [Control::Heartbeat, Control::Leave] {
            let bytes = control.encode(sender);
            assert_eq!(Control::decode(&bytes, sender), Some(control));
            assert_eq!(Control::decode(&bytes, Rank(1026)), None);
            assert_eq!(Control::decode(&bytes[..BYTES - 1], sender), None);
            assert_eq!(Control::decode(&[&bytes[..], &[0]].concat(), sender), None);
            for at in (0..BYTES).filter(|at| *at != 5) {
                let mut damaged = bytes;
                damaged[at] ^= 0x40;
                assert_eq!(Control::decode(&damaged, sender), None, "byte {at}");
            }
        }
        assert_eq!(Control::decode(&[], sender), None);
    }
}
