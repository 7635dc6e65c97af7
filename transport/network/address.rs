//! The address that endpoints of one process exchange: little end first, versioned, its length checked, with a
//! checksum. Used by the simulated network and by emulated NICs; the network's number names the network.
//!
//! ```text
//! byte  0      4        8        16   24    28    32    36                                   40+10n
//!       magic  version  network  key  rank  zero  nics  regions, as `regions::report_lengths`  checksum
//! ```
//!
//! Place: while a context is built, on the caller's or the proxy's thread.

use super::encoding::Format;
use super::regions::{report_lengths, reported_lengths};
use crate::base::Rank;

const FORMAT: Format = Format { magic: *b"tyEP", version: 2, foreign: "is not of an endpoint of this process" };

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
        let mut out = FORMAT.begin();
        out.extend(self.network.to_le_bytes());
        out.extend(self.key.to_le_bytes());
        out.extend(self.rank.0.to_le_bytes());
        out.extend([0; 4]);
        out.extend(self.nics.to_le_bytes());
        report_lengths(&mut out, &self.regions);
        Format::end(out)
    }

    /// Decodes an address; the error is the fault in the bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Address, &'static str> {
        let mut rest = FORMAT.open(bytes)?;
        let mut head = || {
            let (network, key, rank) = (rest.u64()?, rest.u64()?, Rank(rest.u32()?));
            rest.u32()?;
            Some((network, key, rank, rest.u32()?))
        };
        let (network, key, rank, nics) = head().ok_or("is too short")?;
        let regions = reported_lengths(rest.0).ok_or("has a wrong length")?;
        Ok(Address { network, key, rank, nics, regions })
    }
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
