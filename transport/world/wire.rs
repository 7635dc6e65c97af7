//! The bootstrap protocol's bytes: frames, messages, and a decoder that trusts nothing.
//!
//! Place in the data path: none; frames travel between bootstrap threads. Runs on those threads. Never
//! panics, whatever the bytes, and never allocates by a length that it has not received.
//!
//! ```text
//!  0      3 4     5 6     7 8          11 12
//! +--------+-------+-------+-------------+---------------- - -
//! | "TKYD" |version| kind  | body length | body             all integers little-endian
//! +--------+-------+-------+-------------+---------------- - -
//! ```
//!
//! Stable in all versions from 3 on, so that two versions can recognise each other and report it: the header, the kinds
//! of Hello, Challenge and Join, the nonces with which the first two begin (in a Hello after `u16 length`, where older
//! versions had the token), and that a Join begins with a proof of all that follows (secret.rs).

use super::secret::{NONCE, Nonce, Proof};
use super::terms::Terms;

/// First bytes of every frame.
pub(super) const MAGIC: [u8; 4] = *b"TKYD";
/// Version of the protocol spoken here; raised by any change to a message.
pub(super) const VERSION: u16 = 3;
/// Bytes before a body.
pub(super) const HEADER_BYTES: usize = 12;
/// Longest body between members: a gathered result of all ranks.
pub(super) const MAX_BODY: usize = 64 << 20;
/// Longest body from a connection that has not proved that it has the token.
pub(super) const MAX_HELLO_BODY: usize = 4096;
/// Longest job token.
pub(super) const MAX_TOKEN: usize = 256;
/// Longest string sent; longer ones are cut.
const MAX_TEXT: usize = 4096;

/// Kind of a Hello, which admission inspects before it decodes.
pub(super) const KIND_HELLO: u16 = 1;
/// Kinds of the next two.
pub(super) const KIND_CHALLENGE: u16 = 11;
pub(super) const KIND_JOIN: u16 = 12;

/// One message; each variant names its sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    /// Member, first: its nonce, and whether its secret is its host's, as it has no token.
    Hello { nonce: Nonce, own_host: bool },
    /// Rank 0, to a Hello: its own nonce.
    Challenge { nonce: Nonce },
    /// Member, to a Challenge: asks to be a rank of the job, and proves that it may. `host` is the name or
    /// address of its host for the others; if empty, rank 0 takes the connection's source address.
    Join { proof: Proof, rank: u32, world: u32, host: String, terms: Terms },
    /// Rank 0, to a Join: the member is in, and here is proof that this is rank 0.
    Accept { proof: Proof },
    /// Rank 0: refusal of a Hello, or the end of the job for all.
    Fail { what: String, advice: String },
    /// Rank 0, until the job is formed: how many ranks have not joined, and the first few of them.
    Progress { absent: u32, first: Vec<u32> },
    /// Rank 0: all ranks have joined. By rank, where its host is reached; empty where rank 0's is.
    Welcome { hosts: Vec<String> },
    /// Member: its part of collective number `seq`.
    Gather { seq: u64, what: String, payload: Vec<u8> },
    /// Rank 0: all parts of collective number `seq`, by rank.
    Gathered { seq: u64, payloads: Vec<Vec<u8>> },
    /// Member: its deadline for collective `seq` has passed.
    GiveUp { seq: u64, waited_ms: u64 },
    /// Rank 0: that rank's connection closed without a goodbye.
    Lost { rank: u32 },
    /// Rank 0: that rank left in order.
    Left { rank: u32 },
    /// Either: what follows is an orderly close.
    Goodbye,
}

/// Why bytes are no frame or a frame is no message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Malformed {
    /// The bytes do not start as a frame does.
    Magic,
    /// The header announces more than this connection may send.
    Length { announced: usize, limit: usize },
    /// The kind is not one of this version.
    Kind(u16),
    /// The body is not what its kind requires.
    Body(&'static str),
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Malformed::Magic => write!(f, "bytes that are no frame"),
            Malformed::Length { announced, limit } => write!(f, "a frame of {announced} bytes where {limit} may come"),
            Malformed::Kind(kind) => write!(f, "a frame of unknown kind {kind}"),
            Malformed::Body(part) => write!(f, "a frame with a malformed {part}"),
        }
    }
}

/// One frame as received; its version may be foreign.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub version: u16,
    pub kind: u16,
    pub body: Vec<u8>,
}

/// Cuts a byte stream into frames; holds at most one unfinished frame of the allowed length.
#[derive(Debug)]
pub(super) struct FrameReader {
    bytes: Vec<u8>,
    /// How many of these bytes belong to frames that were handed out. They are removed together when more bytes come:
    /// removing them frame by frame would move all later bytes once per small frame.
    taken: usize,
    limit: usize,
}

impl FrameReader {
    /// A reader that refuses bodies longer than `limit`.
    pub(super) fn new(limit: usize) -> FrameReader {
        FrameReader { bytes: Vec::new(), taken: 0, limit }
    }

    /// Changes the longest body accepted from now on.
    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Appends received bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..std::mem::take(&mut self.taken));
        self.bytes.extend_from_slice(bytes);
    }

    /// Bytes that were pushed and not handed out.
    pub(super) fn held(&self) -> usize {
        self.bytes.len() - self.taken
    }

    /// The next whole frame, `None` if more bytes must come first.
    pub(super) fn next_frame(&mut self) -> Result<Option<Frame>, Malformed> {
        let bytes = &self.bytes[self.taken..];
        let seen = bytes.len().min(MAGIC.len());
        if bytes[..seen] != MAGIC[..seen] {
            return Err(Malformed::Magic);
        }
        if bytes.len() < HEADER_BYTES {
            return Ok(None);
        }
        let mut header = Cursor { rest: &bytes[MAGIC.len()..HEADER_BYTES] };
        let (version, kind, announced) = (header.u16()?, header.u16()?, header.u32()? as usize);
        if announced > self.limit {
            return Err(Malformed::Length { announced, limit: self.limit });
        }
        let end = HEADER_BYTES + announced;
        if bytes.len() < end {
            return Ok(None);
        }
        let body = bytes[HEADER_BYTES..end].to_vec();
        self.taken += end;
        Ok(Some(Frame { version, kind, body }))
    }
}

/// The nonce of a Hello of any version from 3 on, and what follows it.
pub(super) fn hello_nonce(body: &[u8]) -> Result<(Nonce, &[u8]), Malformed> {
    let mut cursor = Cursor { rest: body };
    if cursor.u16()? as usize != NONCE {
        return Err(Malformed::Body("nonce"));
    }
    Ok((cursor.array()?, cursor.rest))
}

/// The nonce of a Challenge, or the proof of a Join, of any version, and what follows it.
pub(super) fn first_bytes(body: &[u8]) -> Result<([u8; NONCE], &[u8]), Malformed> {
    let mut cursor = Cursor { rest: body };
    Ok((cursor.array()?, cursor.rest))
}

/// The fields of a Join that follow its proof, encoded.
pub(super) fn fields_after_proof(join: &Message) -> Result<Vec<u8>, Malformed> {
    let mut body = Vec::new();
    put_body(&mut body, join)?;
    Ok(first_bytes(&body)?.1.to_vec())
}

/// Decodes the body of a frame of this version.
pub(super) fn decode(frame: &Frame) -> Result<Message, Malformed> {
    let mut cursor = Cursor { rest: &frame.body };
    let message = match frame.kind {
        KIND_HELLO => {
            let (nonce, rest) = hello_nonce(&frame.body)?;
            cursor.rest = rest;
            Message::Hello { nonce, own_host: cursor.flag()? }
        }
        2 => Message::Fail { what: cursor.text()?, advice: cursor.text()? },
        3 => Message::Progress { absent: cursor.u32()?, first: cursor.list(4, Cursor::u32)? },
        4 => Message::Welcome { hosts: cursor.list(2, Cursor::text)? },
        5 => Message::Gather { seq: cursor.u64()?, what: cursor.text()?, payload: cursor.blob()? },
        6 => Message::Gathered { seq: cursor.u64()?, payloads: cursor.list(4, Cursor::blob)? },
        7 => Message::GiveUp { seq: cursor.u64()?, waited_ms: cursor.u64()? },
        8 => Message::Lost { rank: cursor.u32()? },
        9 => Message::Left { rank: cursor.u32()? },
        10 => Message::Goodbye,
        KIND_CHALLENGE => Message::Challenge { nonce: cursor.array()? },
        KIND_JOIN => {
            let (proof, rank, world) = (cursor.array()?, cursor.u32()?, cursor.u32()?);
            let host = cursor.text()?;
            let terms = Terms { generation: cursor.u32()?, members: cursor.text()?, nodes: cursor.text()? };
            Message::Join { proof, rank, world, host, terms }
        }
        13 => Message::Accept { proof: cursor.array()? },
        kind => return Err(Malformed::Kind(kind)),
    };
    if cursor.rest.is_empty() { Ok(message) } else { Err(Malformed::Body("end")) }
}

/// Encodes a message as one frame of this version; an error if its body is longer than `MAX_BODY`.
pub(super) fn encode(message: &Message) -> Result<Vec<u8>, Malformed> {
    let mut out = Vec::new();
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&kind_of(message).to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    put_body(&mut out, message)?;
    let body = out.len() - HEADER_BYTES;
    if body > MAX_BODY {
        return Err(Malformed::Length { announced: body, limit: MAX_BODY });
    }
    out[8..HEADER_BYTES].copy_from_slice(&(body as u32).to_le_bytes());
    Ok(out)
}

fn kind_of(message: &Message) -> u16 {
    match message {
        Message::Hello { .. } => KIND_HELLO,
        Message::Fail { .. } => 2,
        Message::Progress { .. } => 3,
        Message::Welcome { .. } => 4,
        Message::Gather { .. } => 5,
        Message::Gathered { .. } => 6,
        Message::GiveUp { .. } => 7,
        Message::Lost { .. } => 8,
        Message::Left { .. } => 9,
        Message::Goodbye => 10,
        Message::Challenge { .. } => KIND_CHALLENGE,
        Message::Join { .. } => KIND_JOIN,
        Message::Accept { .. } => 13,
    }
}

fn put_body(out: &mut Vec<u8>, message: &Message) -> Result<(), Malformed> {
    match message {
        Message::Hello { nonce, own_host } => {
            out.extend_from_slice(&(NONCE as u16).to_le_bytes());
            out.extend_from_slice(nonce);
            out.push(u8::from(*own_host));
        }
        Message::Challenge { nonce: bytes } | Message::Accept { proof: bytes } => out.extend_from_slice(bytes),
        Message::Join { proof, rank, world, host, terms } => {
            out.extend_from_slice(proof);
            out.extend_from_slice(&rank.to_le_bytes());
            out.extend_from_slice(&world.to_le_bytes());
            put_text(out, host);
            out.extend_from_slice(&terms.generation.to_le_bytes());
            put_text(out, &terms.members);
            put_text(out, &terms.nodes);
        }
        Message::Fail { what, advice } => {
            put_text(out, what);
            put_text(out, advice);
        }
        Message::Progress { absent, first } => {
            out.extend_from_slice(&absent.to_le_bytes());
            out.extend_from_slice(&length_of(first.len())?);
            first.iter().for_each(|rank| out.extend_from_slice(&rank.to_le_bytes()));
        }
        Message::Gather { seq, what, payload } => {
            out.extend_from_slice(&seq.to_le_bytes());
            put_text(out, what);
            put_blob(out, payload)?;
        }
        Message::Gathered { seq, payloads } => {
            out.extend_from_slice(&seq.to_le_bytes());
            out.extend_from_slice(&length_of(payloads.len())?);
            payloads.iter().try_for_each(|payload| put_blob(out, payload))?;
        }
        Message::GiveUp { seq, waited_ms } => {
            out.extend_from_slice(&seq.to_le_bytes());
            out.extend_from_slice(&waited_ms.to_le_bytes());
        }
        Message::Lost { rank } | Message::Left { rank } => out.extend_from_slice(&rank.to_le_bytes()),
        Message::Welcome { hosts } => {
            out.extend_from_slice(&length_of(hosts.len())?);
            hosts.iter().for_each(|host| put_text(out, host));
        }
        Message::Goodbye => {}
    }
    Ok(())
}

fn length_of(count: usize) -> Result<[u8; 4], Malformed> {
    let short = u32::try_from(count).map_err(|_| Malformed::Length { announced: count, limit: MAX_BODY })?;
    Ok(short.to_le_bytes())
}

fn put_blob(out: &mut Vec<u8>, blob: &[u8]) -> Result<(), Malformed> {
    out.extend_from_slice(&length_of(blob.len())?);
    out.extend_from_slice(blob);
    Ok(())
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    let cut = text.floor_char_boundary(MAX_TEXT);
    out.extend_from_slice(&(cut as u16).to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..cut]);
}

/// Reads fields off the front of a body; running out of bytes is an answer, not a panic.
struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], Malformed> {
        let (head, tail) = self.rest.split_at_checked(bytes).ok_or(Malformed::Body("length"))?;
        self.rest = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, tail) = self.rest.split_first_chunk::<N>().ok_or(Malformed::Body("length"))?;
        self.rest = tail;
        Ok(*head)
    }

    fn flag(&mut self) -> Result<bool, Malformed> {
        match self.array()? {
            [flag @ 0..=1] => Ok(flag == 1),
            [_] => Err(Malformed::Body("flag")),
        }
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<String, Malformed> {
        let bytes = self.u16()? as usize;
        let text = std::str::from_utf8(self.take(bytes)?).map_err(|_| Malformed::Body("string"))?;
        Ok(text.to_owned())
    }

    fn blob(&mut self) -> Result<Vec<u8>, Malformed> {
        let bytes = self.u32()? as usize;
        Ok(self.take(bytes)?.to_vec())
    }

    /// A counted list whose items take at least `least` bytes each, so that a count cannot promise more
    /// items than bytes came.
    fn list<T>(
        &mut self,
        least: usize,
        item: fn(&mut Cursor<'a>) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let count = self.u32()? as usize;
        if count > self.rest.len() / least {
            return Err(Malformed::Body("count"));
        }
        (0..count).map(|_| item(self)).collect()
    }
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
