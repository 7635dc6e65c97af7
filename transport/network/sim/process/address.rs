//! The address that endpoints of different processes exchange before they connect: little end first, versioned, its
//! length checked, with a checksum.
//!
//! ```text
//! byte  0      4        8             24   32    36    40                                   44+10n
//!       magic  version  door's nonce  key  rank  nics  regions, as `regions::report_lengths`  checksum
//! ```

use super::frame::{Cursor, Malformed};
use super::socket::Nonce;
use crate::base::Rank;
use crate::base::checksum::fnv1a;
use crate::transport::network::regions::{report_lengths, reported_lengths};

const MAGIC: [u8; 4] = *b"tyPA";
const VERSION: u32 = 3;
const SUM: usize = 8;

/// An endpoint as its peers see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    /// Nonce in the name of its listening socket. The rest of the name is fixed, so that no address can lead to a
    /// foreign socket.
    pub(super) nonce: Nonce,
    /// Identifies the endpoint since its last reset.
    pub(super) key: u64,
    pub(super) rank: Rank,
    pub(super) nics: u32,
    /// Lengths of the registered spans; 0 for a span that was taken back.
    pub(super) regions: Vec<u64>,
}

impl Address {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(self.nonce);
        out.extend(self.key.to_le_bytes());
        out.extend(self.rank.0.to_le_bytes());
        out.extend(self.nics.to_le_bytes());
        report_lengths(&mut out, &self.regions);
        out.extend(fnv1a(&out).to_le_bytes());
        out
    }

    /// Decodes an address; the error is the fault in the bytes.
    pub(super) fn decode(bytes: &[u8]) -> Result<Address, &'static str> {
        let body = bytes.len().checked_sub(SUM).ok_or("is too short")?;
        let (body, sum) = bytes.split_at(body);
        let mut cursor = Cursor(body);
        let short = |_: Malformed| "is too short";
        if cursor.array::<4>().map_err(short)? != MAGIC {
            return Err("is not of an endpoint of the simulated network between processes");
        }
        if cursor.u32().map_err(short)? != VERSION {
            return Err("is of another version");
        }
        if sum != fnv1a(body).to_le_bytes() {
            return Err("has a wrong checksum");
        }
        let nonce = cursor.array().map_err(short)?;
        let key = cursor.u64().map_err(short)?;
        let rank = Rank(cursor.u32().map_err(short)?);
        let nics = cursor.u32().map_err(short)?;
        let regions = reported_lengths(cursor.0).ok_or("has a wrong length")?;
        Ok(Address { nonce, key, rank, nics, regions })
    }
}
