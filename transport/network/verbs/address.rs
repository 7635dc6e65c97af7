//! The address of an endpoint for one peer: little end first, versioned, its length checked, with a checksum.
//!
//! ```text
//! byte  0      4        8    16    20     24        26                28
//!       magic  version  key  rank  peer   NICs u16  messages' number u32 and first packet u32
//!       then for each NIC   GID 16, LID u16, MTU u8, service level u8, kind u8, P_Key u16, number of datagrams' queue
//!                           pair u32, number of writes' queue pair u32, its first packet u32
//!       then                the regions, as `encoding::Reported`
//!       then                checksum u64
//! ```
//!
//! The checksum tells damage from sense, not friend from foe: what a peer names is its own memory.

use super::device::Route;
use crate::base::Rank;
use crate::transport::network::encoding::{Format, Reported};
use crate::transport::network::encoding::{PLACE, Rest};
use crate::transport::network::regions::REPORTED;

const FORMAT: Format = Format { magic: *b"tyVB", version: 2, foreign: "is not of an endpoint over verbs" };
/// Queue pairs and packets are numbered by 24 bits.
pub(super) const NUMBERS: u32 = (1 << 24) - 1;

/// One side of a connection: its queue pair, and the number of its first packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct End {
    pub number: u32,
    pub packet: u32,
}

/// A NIC of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Port {
    pub route: Route,
    /// The queue pair that takes reports on broken connections.
    pub datagrams: u32,
    pub writes: End,
}

/// Bytes of a NIC.
const PORT: usize = 16 + 2 + 1 + 1 + 1 + 2 + 4 + 8;
const HEAD: usize = 8 + 8 + 4 + 4 + 2 + 8;

/// An endpoint as one of its peers sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    /// Drawn at random at each opening and reset.
    pub key: u64,
    pub rank: Rank,
    /// Whom it is for.
    pub peer: Rank,
    pub messages: End,
    pub ports: Vec<Port>,
    pub regions: Reported,
}

/// Most regions that fit into an address of `most` bytes.
pub(super) fn room(most: usize, nics: usize) -> usize {
    most.saturating_sub(HEAD + nics * PORT + 4 + 4 + 8) / (REPORTED + nics * PLACE)
}

impl Address {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = FORMAT.begin();
        out.extend(self.key.to_le_bytes());
        out.extend(self.rank.0.to_le_bytes());
        out.extend(self.peer.0.to_le_bytes());
        out.extend((self.ports.len() as u16).to_le_bytes());
        put_end(&mut out, self.messages);
        for Port { route: Route { gid, lid, mtu, service_level, kind, pkey }, datagrams, writes } in &self.ports {
            out.extend(gid);
            out.extend(lid.to_le_bytes());
            out.extend([*mtu, *service_level, *kind]);
            out.extend(pkey.to_le_bytes());
            out.extend(datagrams.to_le_bytes());
            put_end(&mut out, *writes);
        }
        self.regions.put(&mut out);
        Format::end(out)
    }

    /// Decodes an address; the error is the fault in the bytes.
    pub fn decode(bytes: &[u8]) -> Result<Address, &'static str> {
        let mut rest = FORMAT.open(bytes)?;
        let address = address(&mut rest).filter(|_| rest.0.is_empty()).ok_or("has a wrong length")?;
        let ends = address.ports.iter().flat_map(|port| [port.writes, End { number: port.datagrams, packet: 0 }]);
        if ends.chain([address.messages]).any(|end| end.number > NUMBERS || end.packet > NUMBERS) {
            return Err("names a queue pair or packet beyond 24 bits");
        }
        let sane = |port: &Port| port.route.gid != [0; 16] && (1..=5).contains(&port.route.mtu);
        if !address.ports.iter().all(sane) {
            return Err("has a NIC without a GID or an MTU");
        }
        Ok(address)
    }
}

fn put_end(out: &mut Vec<u8>, End { number, packet }: End) {
    out.extend(number.to_le_bytes());
    out.extend(packet.to_le_bytes());
}

fn end(rest: &mut Rest<'_>) -> Option<End> {
    Some(End { number: rest.u32()?, packet: rest.u32()? })
}

fn port(rest: &mut Rest<'_>) -> Option<Port> {
    let (gid, lid, [mtu, service_level, kind]) = (rest.array()?, rest.u16()?, rest.array()?);
    let route = Route { gid, lid, mtu, service_level, kind, pkey: rest.u16()? };
    Some(Port { route, datagrams: rest.u32()?, writes: end(rest)? })
}

fn address(rest: &mut Rest<'_>) -> Option<Address> {
    let (key, rank, peer) = (rest.u64()?, Rank(rest.u32()?), Rank(rest.u32()?));
    let nics = rest.u16()?;
    let messages = end(rest)?;
    let ports = (0..nics).map(|_| port(rest)).collect::<Option<Vec<Port>>>()?;
    let regions = Reported::read(rest, ports.len())?;
    Some(Address { key, rank, peer, messages, ports, regions })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::network::encoding::Remote;

    fn address() -> Address {
        let end = |number| End { number, packet: number + 1 };
        let port = |number: u8| Port {
            route: Route { gid: [number; 16], lid: 7, mtu: 5, service_level: 3, kind: 2, pkey: 0x8001 },
            datagrams: 9,
            writes: end(u32::from(number)),
        };
        let remote = |n| Remote { base: n << 40, key: n };
        Address {
            key: 9,
            rank: Rank(2),
            peer: Rank(5),
            messages: end(77),
            ports: vec![port(1), port(2)],
            regions: Reported { lengths: vec![4096, 0, 7], remotes: (3..7).map(remote).collect() },
        }
    }

    #[test]
    fn addresses_survive_the_wire_and_flipped_bits_do_not() {
        let bytes = address().encode();
        assert_eq!(Address::decode(&bytes), Ok(address()));
        for bit in 0..8 * bytes.len() {
            let mut bent = bytes.clone();
            bent[bit / 8] ^= 1 << (bit % 8);
            assert!(Address::decode(&bent).is_err(), "bit {bit}");
        }
        assert!((0..bytes.len()).all(|length| Address::decode(&bytes[..length]).is_err()));
    }

    #[test]
    fn whole_addresses_that_cannot_be_are_refused() {
        let bent = |bend: fn(&mut Address)| {
            let mut address = address();
            bend(&mut address);
            Address::decode(&address.encode()).unwrap_err()
        };
        let beyond = "names a queue pair or packet beyond 24 bits";
        assert_eq!(bent(|address| _ = address.regions.remotes.pop()), "has a wrong length");
        assert_eq!(bent(|address| address.ports[1].writes.number = 1 << 24), beyond);
        assert_eq!(bent(|address| address.ports[0].datagrams = 1 << 24), beyond);
        assert_eq!(bent(|address| address.messages.packet = 1 << 24), beyond);
        let without = "has a NIC without a GID or an MTU";
        assert_eq!(bent(|address| address.ports[1].route.gid = [0; 16]), without);
        assert_eq!(bent(|address| address.ports[0].route.mtu = 6), without);
    }

    #[test]
    fn as_many_regions_as_fit() {
        for nics in [1, 2, 4] {
            let most = 64 << 10;
            let regions = room(most, nics);
            let place = Remote { base: 1, key: 2 };
            let whole = Address {
                ports: vec![address().ports[0]; nics],
                regions: Reported { lengths: vec![1; regions], remotes: vec![place; regions * nics] },
                ..address()
            };
            let bytes = whole.encode().len();
            assert!(bytes <= most && bytes + REPORTED + PLACE * nics > most, "{nics} NICs: {regions}, {bytes} bytes");
        }
    }
}
