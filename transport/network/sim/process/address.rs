//! What endpoints of different processes tell each other before they can talk: little end first, versioned, its length
//! checked, with a checksum.
//!
//! ```text
//! byte  0      4        8             24   32    36    40                                   44+10n
//!       magic  version  door's nonce  key  rank  nics  regions, as `regions::tell_lengths`  checksum
//! ```

use super::frame::{Cursor, Malformed};
use super::socket::Nonce;
use crate::base::Rank;
use crate::base::checksum::fnv1a;
use crate::transport::network::regions::{lengths_told, tell_lengths};

const MAGIC: [u8; 4] = *b"tyPA";
const VERSION: u32 = 3;
const SUM: usize = 8;

/// An endpoint as its peers know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    /// Of the socket on which it listens. The rest of that socket's name is fixed, so that no address can lead to a
    /// socket of anything else.
    pub(super) nonce: Nonce,
    /// Which endpoint, since which reset.
    pub(super) key: u64,
    pub(super) rank: Rank,
    pub(super) nics: u32,
    /// Lengths of the registered spans; 0 of one that was taken back.
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
        tell_lengths(&mut out, &self.regions);
        out.extend(fnv1a(&out).to_le_bytes());
        out
    }

    /// What is wrong with the bytes, if anything.
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
        let regions = lengths_told(cursor.0).ok_or("has a wrong length")?;
        Ok(Address { nonce, key, rank, nics, regions })
    }
}
