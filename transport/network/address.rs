//! The address that endpoints of one process exchange: little end first, versioned, its length checked, with a
//! checksum. Used by the simulated network and by emulated NICs; the network's number names the network.
//!
//! ```text
//! byte  0      4        8        16   24    28    32    36                                   40+10n
//!       magic  version  network  key  rank  zero  nics  regions, as `regions::report_lengths`  checksum
//! ```
//!
//! Place: while a context is built, on the caller's or the proxy's thread.

use super::regions::{REPORTED, report_lengths, reported_lengths};
use crate::base::Rank;
use crate::base::checksum::fnv1a;

const MAGIC: [u8; 4] = *b"tyEP";
const VERSION: u32 = 2;
const HEAD: usize = 36;
const SUM: usize = 8;

/// An endpoint as its peers see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    /// Number of the network in this process.
    pub(crate) network: u64,
    /// Identifies the endpoint since its last reset; never used twice.
    pub(crate) key: u64,
    pub(crate) rank: Rank,
    pub(crate) nics: u32,
    /// Lengths of the registered spans; 0 for a span that was taken back.
    pub(crate) regions: Vec<u64>,
}

impl Address {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + 4 + REPORTED * self.regions.len().min(8) + SUM);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(self.network.to_le_bytes());
        out.extend(self.key.to_le_bytes());
        out.extend(self.rank.0.to_le_bytes());
        out.extend([0; 4]);
        out.extend(self.nics.to_le_bytes());
        report_lengths(&mut out, &self.regions);
        let sum = fnv1a(&out);
        out.extend(sum.to_le_bytes());
        out
    }

    /// Decodes an address; the error is the fault in the bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Address, &'static str> {
        let body = bytes.len().checked_sub(SUM).filter(|body| *body >= HEAD).ok_or("is too short")?;
        if bytes[..4] != MAGIC {
            return Err("is not of an endpoint of this process");
        }
        if read_u32(bytes, 4) != Some(VERSION) {
            return Err("is of another version");
        }
        if read_u64(bytes, body) != Some(fnv1a(&bytes[..body])) {
            return Err("has a wrong checksum");
        }
        let regions = reported_lengths(&bytes[HEAD..body]).ok_or("has a wrong length")?;
        let read = || {
            Some(Address {
                network: read_u64(bytes, 8)?,
                key: read_u64(bytes, 16)?,
                rank: Rank(read_u32(bytes, 24)?),
                nics: read_u32(bytes, 32)?,
                regions,
            })
        };
        read().ok_or("is too short")
    }
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// A number that no other network, or endpoint, of this process has.
pub(crate) fn number() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_wire_and_flipped_bits_do_not() {
        let address = Address { network: 3, key: 9, rank: Rank(2), nics: 4, regions: vec![1 << 20, 7] };
        let bytes = address.encode();
        assert_eq!(Address::decode(&bytes), Ok(address));
        for bit in 0..8 * bytes.len() {
            let mut bent = bytes.clone();
            bent[bit / 8] ^= 1 << (bit % 8);
            assert!(Address::decode(&bent).is_err(), "bit {bit}");
        }
        assert!((0..bytes.len()).all(|length| Address::decode(&bytes[..length]).is_err()));
    }
}
