//! Reports on broken connections, as datagrams.
//!
//! ```text
//! byte  0      4     8     16  24           28   29     30       32     40       44
//!       magic  rank  from  to  incarnation  NIC  flags  line, 0  taken  notices  0, 4 bytes
//! ```
//!
//! A report counts only if it is to this endpoint's present key and from the key that its sender's address named.

use super::lane::Line;
use super::resumption::Report;
use crate::base::Rank;
use crate::transport::network::message::PITCH;

const MAGIC: [u8; 4] = *b"tyRP";
/// Bytes of a report.
pub(super) const BYTES: usize = 48;
const OPEN: u8 = 1;
const CONFIRMED: u8 = 2;

/// A report, and the connection that it is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Letter {
    pub rank: Rank,
    pub from: u64,
    pub to: u64,
    pub nic: u8,
    pub line: Line,
    pub report: Report,
    /// How many regions the sender has taken back from the receiver so far.
    pub notices: u32,
}

impl Letter {
    pub fn encode(&self) -> [u8; PITCH] {
        let Letter { rank, from, to, nic, line, report, notices } = *self;
        let flags = if report.open { OPEN } else { 0 } | if report.confirmed { CONFIRMED } else { 0 };
        let mut out = [0; PITCH];
        let fields: [&[u8]; 9] = [
            &MAGIC,
            &rank.0.to_le_bytes(),
            &from.to_le_bytes(),
            &to.to_le_bytes(),
            &report.incarnation.to_le_bytes(),
            &[nic, flags, line as u8, 0],
            &report.taken.to_le_bytes(),
            &notices.to_le_bytes(),
            &[0; 4],
        ];
        out.iter_mut().zip(fields.into_iter().flatten()).for_each(|(place, byte)| *place = *byte);
        out
    }

    /// Reads a report; `None` if it is malformed.
    pub fn decode(bytes: &[u8]) -> Option<Letter> {
        let (magic, rest) = bytes.get(..BYTES)?.split_first_chunk::<4>()?;
        let (rank, rest) = rest.split_first_chunk()?;
        let (from, rest) = rest.split_first_chunk()?;
        let (to, rest) = rest.split_first_chunk()?;
        let (incarnation, rest) = rest.split_first_chunk()?;
        let ([nic, flags, line, _], rest) = rest.split_first_chunk::<4>()?;
        let (taken, rest) = rest.split_first_chunk()?;
        let (notices, _) = rest.split_first_chunk()?;
        let line = [Line::Writes, Line::Messages].into_iter().find(|known| *known as u8 == *line)?;
        if *magic != MAGIC || flags & !(OPEN | CONFIRMED) != 0 {
            return None;
        }
        let report = Report {
            incarnation: u32::from_le_bytes(*incarnation),
            open: flags & OPEN != 0,
            confirmed: flags & CONFIRMED != 0,
            taken: u64::from_le_bytes(*taken),
        };
        Some(Letter {
            rank: Rank(u32::from_le_bytes(*rank)),
            from: u64::from_le_bytes(*from),
            to: u64::from_le_bytes(*to),
            nic: *nic,
            line,
            report,
            notices: u32::from_le_bytes(*notices),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_survive_the_wire_and_malformed_ones_are_none() {
        let report = Report { incarnation: 7, open: true, confirmed: false, taken: 1 << 40 };
        let letter = Letter { rank: Rank(3), from: 1 << 60, to: 5, nic: 2, line: Line::Messages, report, notices: 9 };
        let bytes = letter.encode();
        assert_eq!(Letter::decode(&bytes), Some(letter));
        let other = Letter { line: Line::Writes, report: Report { open: false, confirmed: true, ..report }, ..letter };
        assert_eq!(Letter::decode(&other.encode()), Some(other));
        assert_eq!(Letter::decode(&bytes[..BYTES]), Some(letter));
        assert_eq!(Letter::decode(&bytes[..BYTES - 1]), None);
        // The magic word, unknown flags, an unknown line.
        for (at, byte) in [(0, 0), (29, 4), (30, 2)] {
            let mut bad = bytes;
            bad[at] = byte;
            assert_eq!(Letter::decode(&bad), None, "byte {at} is {byte}");
        }
    }
}
