//! The address of an endpoint: little end first, versioned, its length checked, with a checksum.
//!
//! ```text
//! byte  0      4        8    16    20        22                24
//!       magic  version  key  rank  NICs u16  virtual or not u16  provider: length u8, bytes
//!       then for each NIC                         name: length u16, bytes; scratch place
//!       then                                      the regions, as `encoding::Reported`
//!       then                                      checksum u64                     a place: address u64, key u64
//! ```
//!
//! The checksum tells damage from sense, not friend from foe: what a peer names is its own memory.

use super::config::MAX_PROVIDER;
use crate::base::Rank;
use crate::transport::network::encoding::{Format, Reported};
use crate::transport::network::encoding::{PLACE, Remote, Rest, put};
use crate::transport::network::regions::REPORTED;

const FORMAT: Format = Format { magic: *b"tyLF", version: 1, foreign: "is not of an endpoint over libfabric" };
/// Longest name of a provider's endpoint.
pub(super) const MAX_NAME: usize = 512;

/// A NIC of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Port {
    /// As fi_getname(3) gives it.
    pub name: Vec<u8>,
    /// Where empty writes go.
    pub scratch: Remote,
}

/// An endpoint as its peers see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    /// Drawn at random at each opening and reset.
    pub key: u64,
    pub rank: Rank,
    /// Whether places are virtual addresses, as the provider wants them.
    pub virtual_addresses: bool,
    pub provider: String,
    pub ports: Vec<Port>,
    pub regions: Reported,
}

/// Most regions that fit into an address of `most` bytes.
pub(super) fn room(most: usize, nics: usize) -> usize {
    let head = 24 + 1 + MAX_PROVIDER + nics * (2 + MAX_NAME + PLACE) + 4 + 4 + 8;
    most.saturating_sub(head) / (REPORTED + nics * PLACE)
}

impl Address {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = FORMAT.begin();
        out.extend(self.key.to_le_bytes());
        out.extend(self.rank.0.to_le_bytes());
        out.extend((self.ports.len() as u16).to_le_bytes());
        out.extend(u16::from(self.virtual_addresses).to_le_bytes());
        out.push(self.provider.len() as u8);
        out.extend(self.provider.as_bytes());
        for Port { name, scratch } in &self.ports {
            out.extend((name.len() as u16).to_le_bytes());
            out.extend(name);
            put(&mut out, *scratch);
        }
        self.regions.put(&mut out);
        Format::end(out)
    }

    /// Decodes an address; the error is the fault in the bytes.
    pub fn decode(bytes: &[u8]) -> Result<Address, &'static str> {
        let mut rest = FORMAT.open(bytes)?;
        rest.address().filter(|_| rest.0.is_empty()).ok_or("has a wrong length")
    }
}

impl Rest<'_> {
    fn port(&mut self) -> Option<Port> {
        let length = usize::from(self.u16()?);
        let name = self.take(length).filter(|_| (1..=MAX_NAME).contains(&length))?.to_vec();
        Some(Port { name, scratch: self.remote()? })
    }

    fn address(&mut self) -> Option<Address> {
        let (key, rank) = (self.u64()?, Rank(self.u32()?));
        let nics = self.u16()?;
        let virtual_addresses = match self.u16()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        let [length] = self.array()?;
        let provider = String::from_utf8(self.take(usize::from(length))?.to_vec()).ok()?;
        let ports = (0..nics).map(|_| self.port()).collect::<Option<Vec<Port>>>()?;
        let regions = Reported::read(self, ports.len())?;
        Some(Address { key, rank, virtual_addresses, provider, ports, regions })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_wire_and_flipped_bits_do_not() {
        let remote = |n| Remote { base: n << 40, key: n };
        let port = |n: u8| Port { name: vec![n; 16], scratch: remote(u64::from(n)) };
        let address = Address {
            key: 9,
            rank: Rank(2),
            virtual_addresses: true,
            provider: "tcp;ofi_rxm".into(),
            ports: vec![port(1), port(2)],
            regions: Reported { lengths: vec![4096, 0, 7], remotes: (3..7).map(remote).collect() },
        };
        let bytes = address.encode();
        assert_eq!(Address::decode(&bytes), Ok(address.clone()));
        for bit in 0..8 * bytes.len() {
            let mut bent = bytes.clone();
            bent[bit / 8] ^= 1 << (bit % 8);
            assert!(Address::decode(&bent).is_err(), "bit {bit}");
        }
        assert!((0..bytes.len()).all(|length| Address::decode(&bytes[..length]).is_err()));
        // Whole, but for one thing each.
        let fewer = address.regions.remotes[1..].to_vec();
        let bent = [
            Address { regions: Reported { remotes: fewer, ..address.regions.clone() }, ..address.clone() },
            Address { ports: vec![port(1)], ..address.clone() },
            Address { ports: vec![Port { name: Vec::new(), ..port(1) }, port(2)], ..address.clone() },
            Address { ports: vec![Port { name: vec![0; MAX_NAME + 1], ..port(1) }, port(2)], ..address },
        ];
        assert_eq!(bent.map(|address| Address::decode(&address.encode()).unwrap_err()), ["has a wrong length"; 4]);
    }

    #[test]
    fn as_many_regions_as_fit() {
        for nics in [1, 2, 4] {
            let most = 64 << 10;
            let regions = room(most, nics);
            let place = Remote { base: 1, key: 2 };
            let port = Port { name: vec![7; MAX_NAME], scratch: place };
            let address = Address {
                key: 1,
                rank: Rank(0),
                virtual_addresses: false,
                provider: "p".repeat(MAX_PROVIDER),
                ports: vec![port; nics],
                regions: Reported { lengths: vec![1; regions], remotes: vec![place; regions * nics] },
            };
            let bytes = address.encode().len();
            assert!(bytes <= most && bytes + 10 + 16 * nics > most, "{nics} NICs: {regions} regions, {bytes} bytes");
        }
    }
}
