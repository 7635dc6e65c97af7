//! Control messages and notices between endpoints: a header, and at most [`MAX_MESSAGE`] bytes.
//!
//! ```text
//! byte  0     2           4     8          16        24      32
//!       kind  length u16  rank  from: key  to: key   number  message, or numbers of a region, question, notices
//! ```
//!
//! A message counts only if it is to this endpoint's present key and from the key that its sender's address named: what
//! comes from a closed generation, or from a stranger who found the port, is dropped. Its number counts the messages to
//! the peer: a message that is sent again, after an error that came too late, counts once.

use crate::base::Rank;
use crate::transport::network::revoke::Notice;
use crate::transport::network::{MAX_MESSAGE, RegionId};

/// Bytes of the header. One of zeros is of no message.
pub(super) const HEAD: usize = 32;
/// Bytes of the longest message with its header.
pub(super) const LONGEST: usize = HEAD + MAX_MESSAGE;
/// Bytes from one message to the next in a slab: whole cache lines.
pub(super) const PITCH: usize = LONGEST.next_multiple_of(64);

const MESSAGE: u16 = 1;
const REVOKE: u16 = 2;
const LET_GO: u16 = 3;
const ASK: u16 = 4;
const ANSWER: u16 = 5;

/// Who sends, and to which endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Parties {
    pub rank: Rank,
    pub from: u64,
    pub to: u64,
    /// Of the message among those from the one to the other.
    pub number: u64,
}

/// What travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content<'a> {
    Message(&'a [u8]),
    Notice(Notice),
    /// Asks for an answer of this number once all earlier notices are on their way.
    Ask(u16),
    /// The number of the question, and how many regions the sender has taken back from the receiver by then: messages
    /// overtake each other.
    Answer(u16, u16),
}

/// Writes a message into its place; answers its bytes. Bytes of a message beyond [`MAX_MESSAGE`] are cut off.
pub(super) fn encode(
    out: &mut [u8; PITCH],
    Parties { rank, from, to, number }: Parties,
    content: Content<'_>,
) -> usize {
    let (kind, first, second) = match content {
        Content::Message(_) => (MESSAGE, 0, 0),
        Content::Notice(Notice::Revoke(RegionId(region))) => (REVOKE, region, 0),
        Content::Notice(Notice::LetGo(RegionId(region))) => (LET_GO, region, 0),
        Content::Ask(question) => (ASK, question, 0),
        Content::Answer(question, notices) => (ANSWER, question, notices),
    };
    let ([a, b], [c, d]) = (first.to_le_bytes(), second.to_le_bytes());
    let numbers = [a, b, c, d];
    let body = match content {
        Content::Message(bytes) => &bytes[..bytes.len().min(MAX_MESSAGE)],
        Content::Answer(..) => &numbers,
        _ => &numbers[..2],
    };
    out[..2].copy_from_slice(&u16::to_le_bytes(kind));
    out[2..4].copy_from_slice(&(body.len() as u16).to_le_bytes());
    out[4..8].copy_from_slice(&rank.0.to_le_bytes());
    out[8..16].copy_from_slice(&from.to_le_bytes());
    out[16..24].copy_from_slice(&to.to_le_bytes());
    out[24..32].copy_from_slice(&number.to_le_bytes());
    out[HEAD..HEAD + body.len()].copy_from_slice(body);
    HEAD + body.len()
}

/// Reads a message; `None` if it is malformed. Its length is in it, since providers differ in what they report.
pub(super) fn decode(bytes: &[u8; PITCH]) -> Option<(Parties, Content<'_>)> {
    let (kind, rest) = bytes.split_first_chunk()?;
    let (length, rest) = rest.split_first_chunk()?;
    let (rank, rest) = rest.split_first_chunk()?;
    let (from, rest) = rest.split_first_chunk()?;
    let (to, rest) = rest.split_first_chunk()?;
    let (count, rest) = rest.split_first_chunk()?;
    let length = usize::from(u16::from_le_bytes(*length));
    let body = rest.get(..length).filter(|_| length <= MAX_MESSAGE)?;
    let number = || body.try_into().ok().map(u16::from_le_bytes);
    let two = || {
        let (first, second) = body.split_first_chunk()?;
        Some((u16::from_le_bytes(*first), u16::from_le_bytes(second.try_into().ok()?)))
    };
    let content = match u16::from_le_bytes(*kind) {
        MESSAGE => Content::Message(body),
        REVOKE => Content::Notice(Notice::Revoke(RegionId(number()?))),
        LET_GO => Content::Notice(Notice::LetGo(RegionId(number()?))),
        ASK => Content::Ask(number()?),
        ANSWER => two().map(|(question, notices)| Content::Answer(question, notices))?,
        _ => return None,
    };
    let rank = Rank(u32::from_le_bytes(*rank));
    let [from, to, number] = [from, to, count].map(|bytes| u64::from_le_bytes(*bytes));
    Some((Parties { rank, from, to, number }, content))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_notices_survive_the_wire() {
        let parties = Parties { rank: Rank(7), from: 1 << 60, to: 3, number: 1 << 33 };
        let longest = [9; MAX_MESSAGE];
        let contents = [
            (Content::Message(b""), HEAD),
            (Content::Message(b"hello"), HEAD + 5),
            (Content::Message(&longest), LONGEST),
            (Content::Notice(Notice::Revoke(RegionId(300))), HEAD + 2),
            (Content::Notice(Notice::LetGo(RegionId(u16::MAX))), HEAD + 2),
            (Content::Ask(1), HEAD + 2),
            (Content::Answer(2, 700), HEAD + 4),
        ];
        for (content, bytes) in contents {
            let mut place = [0xAA; PITCH];
            assert_eq!(encode(&mut place, parties, content), bytes);
            assert_eq!(decode(&place), Some((parties, content)));
        }
    }

    #[test]
    fn malformed_messages_are_none() {
        let mut good = [0; PITCH];
        let parties = Parties { rank: Rank(0), from: 1, to: 2, number: 0 };
        encode(&mut good, parties, Content::Notice(Notice::Revoke(RegionId(1))));
        for (at, byte) in [(0, 0), (0, 6), (1, 1), (2, 1), (2, 3), (3, 2)] {
            let mut bad = good;
            bad[at] = byte;
            assert_eq!(decode(&bad), None, "byte {at} is {byte}");
        }
        let mut long = good;
        long[..4].copy_from_slice(&[1, 0, 1, 1]);
        assert_eq!(decode(&long), None, "257 bytes");
    }
}
