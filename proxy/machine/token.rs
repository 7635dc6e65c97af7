//! The token of a post, by which the machine identifies the link and chunk of a completion.
//!
//! ```text
//!   63          32 31  30 29   28 27     26 25     13   12   11    2 1   0
//!  +--------------+------+-------+---------+---------+------+-------+-----+
//!  |    serial    |  0   |context|direction|  link   |parity| chunk | nic |
//!  +--------------+------+-------+---------+---------+------+-------+-----+
//! ```
//!
//! The serial counts openings of contexts, so that a completion of a closed context touches nothing.

use crate::proxy::wire::{ChunkIdx, ContextIdx, Direction, LinkIdx, NicIdx};

/// The parts of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token {
    pub serial: u32,
    pub context: ContextIdx,
    pub direction: Direction,
    pub link: LinkIdx,
    pub parity: u8,
    pub chunk: ChunkIdx,
    pub nic: NicIdx,
}

impl Token {
    pub fn pack(self) -> u64 {
        u64::from(self.serial) << 32
            | u64::from(self.context.0 & 3) << 28
            | (self.direction as u64) << 26
            | u64::from(self.link.0 & 0x1fff) << 13
            | u64::from(self.parity & 1) << 12
            | u64::from(self.chunk.0 & 0x3ff) << 2
            | u64::from(self.nic.0 & 3)
    }

    /// `None` if the bits between serial and context are not 0; all else is for the caller to check.
    pub fn unpack(bits: u64) -> Option<Token> {
        if bits >> 30 & 3 != 0 {
            return None;
        }
        Some(Token {
            serial: (bits >> 32) as u32,
            context: ContextIdx((bits >> 28 & 3) as u8),
            direction: Direction::ALL.get((bits >> 26 & 3) as usize).copied()?,
            link: LinkIdx((bits >> 13 & 0x1fff) as u16),
            parity: (bits >> 12 & 1) as u8,
            chunk: ChunkIdx((bits >> 2 & 0x3ff) as u16),
            nic: NicIdx((bits & 3) as u8),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_back_as_it_went() {
        for (serial, context, link, parity, chunk, nic) in [(0, 0, 0, 0, 0, 0), (u32::MAX, 3, 2047, 1, 1023, 3)] {
            for direction in Direction::ALL {
                let (context, link) = (ContextIdx(context), LinkIdx(link));
                let token =
                    Token { serial, context, direction, link, parity, chunk: ChunkIdx(chunk), nic: NicIdx(nic) };
                assert_eq!(Token::unpack(token.pack()), Some(token));
            }
        }
        assert_eq!(Token::unpack(1 << 30), None);
    }
}
