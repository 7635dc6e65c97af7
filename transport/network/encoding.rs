//! How addresses are encoded, little end first: what those of all networks have in common.
//!
//! Place: while a context is built, on the endpoint's thread.

use super::regions::{report_lengths, reported_lengths};
use crate::base::checksum::fnv1a;

/// What an address begins with: a network's mark, and the version of its addresses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Format {
    pub magic: [u8; 4],
    pub version: u32,
    /// The fault of an address that begins otherwise.
    pub foreign: &'static str,
}

impl Format {
    /// An empty address.
    pub fn begin(&self) -> Vec<u8> {
        [self.magic, self.version.to_le_bytes()].concat()
    }

    /// Ends an address by its checksum, which tells damage from sense, not friend from foe.
    pub fn end(mut out: Vec<u8>) -> Vec<u8> {
        let sum = fnv1a(&out);
        out.extend(sum.to_le_bytes());
        out
    }

    /// What stands between beginning and checksum.
    ///
    /// # Errors
    /// The fault of the bytes.
    pub fn open<'a>(&self, bytes: &'a [u8]) -> std::result::Result<Rest<'a>, &'static str> {
        let (body, sum) = bytes.split_last_chunk::<8>().ok_or("is too short")?;
        let mut rest = Rest(body);
        if rest.array::<4>().ok_or("is too short")? != self.magic {
            return Err(self.foreign);
        }
        if rest.u32().ok_or("is too short")? != self.version {
            return Err("is of another version");
        }
        if u64::from_le_bytes(*sum) != fnv1a(body) {
            return Err("has a wrong checksum");
        }
        Ok(rest)
    }
}

/// A place that a peer writes to: an address, or an offset where the network counts from 0, and a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Remote {
    pub base: u64,
    pub key: u64,
}

/// Bytes of a place in an address.
pub(super) const PLACE: usize = 16;

/// The regions of an endpoint in its address.
///
/// ```text
/// length u32 of the lengths, as `regions::report_lengths`; for each region there and each NIC address u64, key u64
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reported {
    /// By number; 0: taken back.
    pub lengths: Vec<u64>,
    /// By region that is there, then by NIC.
    pub remotes: Vec<Remote>,
}

impl Reported {
    pub fn put(&self, out: &mut Vec<u8>) {
        let mut lengths = Vec::new();
        report_lengths(&mut lengths, &self.lengths);
        out.extend((lengths.len() as u32).to_le_bytes());
        out.extend(lengths);
        self.remotes.iter().for_each(|remote| put(out, *remote));
    }

    pub fn read(rest: &mut Rest<'_>, nics: usize) -> Option<Reported> {
        let bytes = rest.u32()? as usize;
        let lengths = reported_lengths(rest.take(bytes)?)?;
        let there = lengths.iter().filter(|length| **length > 0).count();
        let remotes = (0..there * nics).map(|_| rest.remote()).collect::<Option<Vec<Remote>>>()?;
        Some(Reported { lengths, remotes })
    }
}

/// Appends a place.
pub(super) fn put(out: &mut Vec<u8>, Remote { base, key }: Remote) {
    out.extend(base.to_le_bytes());
    out.extend(key.to_le_bytes());
}

/// What has not been read.
pub(super) struct Rest<'a>(pub &'a [u8]);

impl<'a> Rest<'a> {
    pub fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn remote(&mut self) -> Option<Remote> {
        Some(Remote { base: self.u64()?, key: self.u64()? })
    }
}
