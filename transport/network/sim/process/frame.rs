//! The frames between endpoints of different processes, and a decoder that trusts nothing.
//!
//! Place in the data path: between `outbound.rs` of one process and `inbound.rs` of another. Runs on the thread that
//! polls. Never panics, whatever the bytes, and allocates nothing but the buffer it encodes into.
//!
//! A frame is one message of a socket that keeps message boundaries: a malformed frame affects only itself. All
//! integers are little-endian; the first eight bytes of the head are the same in all versions.
//!
//! ```text
//! byte  0       4        6     8                   16         24
//!       "tySP"  version  kind  key of its receiver  stamp, ns  body
//!
//! hello    1    rank u32, NICs u32, key of the sender u64, token to the end
//! write    2    number u64, offset u64, imm u32, total u32, at u32, region u16, NIC u8, 0 u8, payload to the end
//! message  3    number u64, bytes to the end
//! answers  4    number u64, stamp u64, verdict u8; once more to the end
//! notice   5    region u16, what u8, 0 u8
//! ```
//!
//! A stamp is a time of the host's monotonic clock: when the last byte left its NIC, or when the last packet was
//! placed.

use crate::base::Rank;
use crate::transport::network::imm::ImmValue;
use crate::transport::network::revoke::Notice;
use crate::transport::network::{MAX_MESSAGE, Place, RegionId};

/// First bytes of every frame.
const MAGIC: [u8; 4] = *b"tySP";
/// Raised by any change to a body, or to what it means.
pub(super) const VERSION: u16 = 3;
const HEAD_BYTES: usize = 24;
const WRITE_BYTES: usize = 32;
const ANSWER_BYTES: usize = 17;
/// Longest piece of a payload: a few fit into a socket's default buffer.
pub(super) const MAX_PIECE: usize = 32 << 10;
/// Longest frame; a longer one is malformed, even if its first bytes are not.
pub(super) const MAX_FRAME: usize = HEAD_BYTES + WRITE_BYTES + MAX_PIECE;
/// Longest job token.
pub(super) const MAX_TOKEN: usize = 256;
/// Most answers of one frame.
pub(super) const MAX_ANSWERS: usize = 512;

const HELLO: u16 = 1;
const WRITE: u16 = 2;
const MESSAGE: u16 = 3;
const ANSWERS: u16 = 4;
const NOTICE: u16 = 5;

/// What a notice says.
const REVOKE: u8 = 1;
const LET_GO: u8 = 2;

/// The head of every frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    /// The receiver's key, from its address.
    pub(super) key: u64,
    pub(super) stamp_ns: u64,
}

/// First frame on every connection, from the side that dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello<'a> {
    pub(super) rank: Rank,
    pub(super) nics: u32,
    pub(super) key: u64,
    pub(super) token: &'a [u8],
}

/// A write, as each piece of its payload repeats it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Its number among all posts of the sender to this peer.
    pub(super) number: u64,
    pub(super) nic: u8,
    pub(super) target: Place,
    pub(super) imm: ImmValue,
    /// Bytes of the whole write.
    pub(super) total: u32,
    /// Where in the write this piece begins.
    pub(super) at: u32,
}

/// The outcome of a write or a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is placed in full.
    Taken,
    /// It does not lie in a region; nothing of it was done.
    Outside,
    /// The receiver has not connected to the sender; nothing of it was done.
    Unconnected,
    /// The receiver has taken its target back.
    Dropped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) number: u64,
    pub(super) stamp_ns: u64,
    pub(super) verdict: Verdict,
}

/// One frame, checked as far as possible without the state of its sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame<'a> {
    Hello(Hello<'a>),
    /// A piece and its payload, which lies inside the write.
    Write(Piece, &'a [u8]),
    Message {
        number: u64,
        bytes: &'a [u8],
    },
    Answers(Answers<'a>),
    Notice(Notice),
}

/// Answers that were checked already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answers<'a>(&'a [u8]);

impl Answers<'_> {
    pub(super) fn iter(&self) -> impl Iterator<Item = Answer> {
        self.0.chunks_exact(ANSWER_BYTES).filter_map(|bytes| Cursor(bytes).answer().ok())
    }
}

/// Why bytes are no frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Malformed {
    Magic,
    Version(u16),
    Kind(u16),
    /// Shorter or longer than its kind allows.
    Length(usize),
    /// A field with an impossible value.
    Field(&'static str),
}

pub(super) fn decode(bytes: &[u8]) -> Result<(Head, Frame<'_>), Malformed> {
    if bytes.len() > MAX_FRAME {
        return Err(Malformed::Length(bytes.len()));
    }
    let mut cursor = Cursor(bytes);
    let short = |_| Malformed::Length(bytes.len());
    if cursor.array::<4>().map_err(short)? != MAGIC {
        return Err(Malformed::Magic);
    }
    let version = cursor.u16().map_err(short)?;
    if version != VERSION {
        return Err(Malformed::Version(version));
    }
    let kind = cursor.u16().map_err(short)?;
    let head = Head { key: cursor.u64().map_err(short)?, stamp_ns: cursor.u64().map_err(short)? };
    let frame = match kind {
        HELLO => cursor.hello()?,
        WRITE => cursor.write()?,
        MESSAGE => cursor.message()?,
        ANSWERS => cursor.answers()?,
        NOTICE => cursor.notice()?,
        kind => return Err(Malformed::Kind(kind)),
    };
    Ok((head, frame))
}

/// Replaces the buffer's contents by a frame. A write's payload may be appended afterwards.
pub(super) fn encode(out: &mut Vec<u8>, head: Head, frame: &Frame<'_>) {
    let kind = match frame {
        Frame::Hello(_) => HELLO,
        Frame::Write(..) => WRITE,
        Frame::Message { .. } => MESSAGE,
        Frame::Answers(_) => ANSWERS,
        Frame::Notice(_) => NOTICE,
    };
    begin(out, head, kind);
    match frame {
        Frame::Hello(hello) => {
            out.extend(hello.rank.0.to_le_bytes());
            out.extend(hello.nics.to_le_bytes());
            out.extend(hello.key.to_le_bytes());
            out.extend(hello.token);
        }
        Frame::Write(piece, payload) => {
            out.extend(piece.number.to_le_bytes());
            out.extend(piece.target.offset.to_le_bytes());
            out.extend(piece.imm.bits().to_le_bytes());
            out.extend(piece.total.to_le_bytes());
            out.extend(piece.at.to_le_bytes());
            out.extend(piece.target.region.0.to_le_bytes());
            out.extend([piece.nic, 0]);
            out.extend(*payload);
        }
        Frame::Message { number, bytes } => {
            out.extend(number.to_le_bytes());
            out.extend(*bytes);
        }
        Frame::Answers(Answers(bytes)) => out.extend(*bytes),
        Frame::Notice(Notice::Revoke(region)) => out.extend([region.0.to_le_bytes(), [REVOKE, 0]].concat()),
        Frame::Notice(Notice::LetGo(region)) => out.extend([region.0.to_le_bytes(), [LET_GO, 0]].concat()),
    }
}

/// The same for answers; at most `MAX_ANSWERS` of them.
pub(super) fn encode_answers<'a>(out: &mut Vec<u8>, head: Head, answers: impl Iterator<Item = &'a Answer>) {
    begin(out, head, ANSWERS);
    for answer in answers.take(MAX_ANSWERS) {
        out.extend(answer.number.to_le_bytes());
        out.extend(answer.stamp_ns.to_le_bytes());
        out.push(answer.verdict as u8);
    }
}

fn begin(out: &mut Vec<u8>, head: Head, kind: u16) {
    out.clear();
    out.extend(MAGIC);
    out.extend(VERSION.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend(head.key.to_le_bytes());
    out.extend(head.stamp_ns.to_le_bytes());
}

/// Reads fields off the front; running out of bytes is an answer, not a panic.
pub(super) struct Cursor<'a>(pub(super) &'a [u8]);

impl<'a> Cursor<'a> {
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, tail) = self.0.split_first_chunk::<N>().ok_or(Malformed::Length(self.0.len()))?;
        self.0 = tail;
        Ok(*head)
    }

    pub(super) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// All that is left, if it is not more than may be.
    fn rest(&mut self, most: usize) -> Result<&'a [u8], Malformed> {
        let rest = std::mem::take(&mut self.0);
        if rest.len() > most { Err(Malformed::Length(rest.len())) } else { Ok(rest) }
    }

    fn hello(&mut self) -> Result<Frame<'a>, Malformed> {
        let (rank, nics, key) = (Rank(self.u32()?), self.u32()?, self.u64()?);
        Ok(Frame::Hello(Hello { rank, nics, key, token: self.rest(MAX_TOKEN)? }))
    }

    fn write(&mut self) -> Result<Frame<'a>, Malformed> {
        let (number, offset, imm) = (self.u64()?, self.u64()?, ImmValue::from_bits(self.u32()?));
        let (total, at, region) = (self.u32()?, self.u32()?, RegionId(self.u16()?));
        let [nic, zero] = self.array()?;
        if zero != 0 {
            return Err(Malformed::Field("zero"));
        }
        let payload = self.rest(MAX_PIECE)?;
        let end = u64::from(at) + payload.len() as u64;
        if end > u64::from(total) || (payload.is_empty() && total > 0) {
            return Err(Malformed::Field("piece"));
        }
        Ok(Frame::Write(Piece { number, nic, target: Place { region, offset }, imm, total, at }, payload))
    }

    fn message(&mut self) -> Result<Frame<'a>, Malformed> {
        Ok(Frame::Message { number: self.u64()?, bytes: self.rest(MAX_MESSAGE)? })
    }

    fn answers(&mut self) -> Result<Frame<'a>, Malformed> {
        let bytes = self.rest(MAX_ANSWERS * ANSWER_BYTES)?;
        if bytes.is_empty() || !bytes.len().is_multiple_of(ANSWER_BYTES) {
            return Err(Malformed::Length(bytes.len()));
        }
        bytes.chunks_exact(ANSWER_BYTES).try_for_each(|bytes| Cursor(bytes).answer().map(drop))?;
        Ok(Frame::Answers(Answers(bytes)))
    }

    fn notice(&mut self) -> Result<Frame<'a>, Malformed> {
        let region = RegionId(self.u16()?);
        let what = self.array()?;
        self.rest(0)?;
        match what {
            [REVOKE, 0] => Ok(Frame::Notice(Notice::Revoke(region))),
            [LET_GO, 0] => Ok(Frame::Notice(Notice::LetGo(region))),
            _ => Err(Malformed::Field("notice")),
        }
    }

    fn answer(&mut self) -> Result<Answer, Malformed> {
        let (number, stamp_ns, [verdict]) = (self.u64()?, self.u64()?, self.array()?);
        let verdicts = [Verdict::Taken, Verdict::Outside, Verdict::Unconnected, Verdict::Dropped];
        let verdict = verdicts.into_iter().find(|known| *known as u8 == verdict).ok_or(Malformed::Field("verdict"))?;
        Ok(Answer { number, stamp_ns, verdict })
    }
}

#[cfg(test)]
#[path = "frame_tests.rs"]
pub(super) mod tests;
