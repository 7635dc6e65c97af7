//! What the ranks of a context exchange before their proxies connect: its arena's region, and an address for each peer.
//!
//! Place in the data path: while a context is built, on the caller's thread. Bytes of other ranks are untrusted.
//!
//! ```text
//! byte  0        4       6     8            12                            entry, for each linked peer
//!       context  region  zero  shared, S    what all addresses begin with  rank u32, length L u32, the rest of the
//!       u32      u16     u16   u32          (S bytes)                      peer's address (L bytes)
//! ```
//!
//! Addresses have most of their bytes in common, or all of them where a network has no connections. A rank that has no
//! arena sends {`NO_CONTEXT` u32, zero u32, reason} instead.

use super::wire::ContextIdx;
use crate::base::{Error, Rank, Result, quoted};
use crate::transport::World;
use crate::transport::network::{MAX_ADDRESS, RegionId};

/// In place of a context's number: the rank has none.
const NO_CONTEXT: u32 = u32::MAX;

/// A peer's arena on the network, and the peer's address for this rank: `None` if the peer is not linked with it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PeerCard {
    pub region: RegionId,
    pub address: Option<Vec<u8>>,
}

/// A rank's card: `addresses` are for its linked peers.
///
/// # Errors
/// `Transport` if an address is too long.
pub(super) fn card(rank: Rank, region: RegionId, index: ContextIdx, addresses: &[(Rank, Vec<u8>)]) -> Result<Vec<u8>> {
    if let Some((peer, address)) = addresses.iter().find(|(_, address)| address.len() > MAX_ADDRESS) {
        return Err(Error::transport(
            format!("endpoint of rank {rank} has an address of {} bytes for rank {peer}", address.len()),
            format!("peers take at most {MAX_ADDRESS}: have Transport::address give a shorter one"),
        ));
    }
    let shared = shared_bytes(addresses);
    let mut out = Vec::new();
    out.extend(u32::from(index.0).to_le_bytes());
    out.extend(region.0.to_le_bytes());
    out.extend([0; 2]);
    out.extend((shared.len() as u32).to_le_bytes());
    out.extend(shared);
    for (peer, address) in addresses {
        let rest = address.get(shared.len()..).unwrap_or_default();
        out.extend(peer.0.to_le_bytes());
        out.extend((rest.len() as u32).to_le_bytes());
        out.extend(rest);
    }
    Ok(out)
}

/// The bytes that all addresses begin with.
fn shared_bytes(addresses: &[(Rank, Vec<u8>)]) -> &[u8] {
    let Some(((_, first), others)) = addresses.split_first() else { return &[] };
    let in_common = |other: &[u8]| first.iter().zip(other).take_while(|(a, b)| a == b).count();
    let length = others.iter().map(|(_, other)| in_common(other)).min().unwrap_or(first.len());
    first.get(..length).unwrap_or_default()
}

/// In place of a card where a rank has none.
pub(super) fn refusal_card(why: &Error) -> Vec<u8> {
    [&NO_CONTEXT.to_le_bytes()[..], &[0; 4], why.text_for_peers().as_bytes()].concat()
}

/// Decodes the cards of all ranks of a world, by rank.
///
/// # Errors
/// `Bootstrap` that names the rank whose card has no arena, another context, or another form.
pub(super) fn read_cards(world: &World, cards: &[Vec<u8>], index: ContextIdx) -> Result<Vec<PeerCard>> {
    let own = world.original(world.rank());
    let card = |(rank, bytes): (Rank, &Vec<u8>)| read_card(world.original(rank), bytes, own, index);
    (0u32..).map(Rank).zip(cards).map(card).collect()
}

fn read_card(rank: Rank, bytes: &[u8], own: Rank, wanted: ContextIdx) -> Result<PeerCard> {
    let broken = |what: String| Error::bootstrap(what, "see that rank's own error");
    let Some(([a, b, c, d, e, f, zero @ ..], table)) = bytes.split_first_chunk::<8>() else {
        return Err(broken(format!("rank {rank} sent no address of its endpoint")));
    };
    let index = u32::from_le_bytes([*a, *b, *c, *d]);
    if index == NO_CONTEXT {
        return Err(Error::bootstrap(
            format!("rank {rank} has no arena on the network: {}", quoted(table)),
            format!("mend rank {rank} and build again on every rank"),
        ));
    }
    if index != u32::from(wanted.0) {
        return Err(broken(format!("rank {rank} opens context {index} where this rank opens {}", wanted.0)));
    }
    let table = (*zero == [0; 2]).then(|| find_address(table, own)).flatten();
    let Some(address) = table else {
        return Err(Error::bootstrap(
            format!("rank {rank} sent a malformed table of addresses, of {} bytes", bytes.len()),
            "run the same version of tokenyard on all ranks",
        ));
    };
    Ok(PeerCard { region: RegionId(u16::from_le_bytes([*e, *f])), address })
}

/// The address for `own` in a card's table, if it is there; `None` if the table is malformed.
fn find_address(table: &[u8], own: Rank) -> Option<Option<Vec<u8>>> {
    let (shared, mut entries) = counted(table)?;
    let mut found = None;
    while let Some((rank, entry)) = entries.split_first_chunk::<4>() {
        let (rest, others) = counted(entry)?;
        if Rank(u32::from_le_bytes(*rank)) == own {
            found = Some([shared, rest].concat());
        }
        entries = others;
    }
    entries.is_empty().then_some(found)
}

/// The bytes behind a length, and what comes after them.
fn counted(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    rest.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INDEX: ContextIdx = ContextIdx(2);
    const REGION: RegionId = RegionId(700);

    fn read(bytes: &[u8], own: u32) -> std::result::Result<Option<Vec<u8>>, String> {
        let card = read_card(Rank(9), bytes, Rank(own), INDEX).map_err(|why| why.to_string())?;
        assert_eq!(card.region, REGION);
        Ok(card.address)
    }

    fn of(addresses: &[(u32, &[u8])]) -> Vec<u8> {
        let addresses: Vec<_> = addresses.iter().map(|(peer, address)| (Rank(*peer), address.to_vec())).collect();
        card(Rank(9), REGION, INDEX, &addresses).unwrap()
    }

    #[test]
    fn each_peer_finds_its_own_address() {
        let tables: [&[(u32, &[u8])]; 5] = [
            &[(1, b"same"), (5, b"same"), (2047, b"same")],
            &[(1, b"of rank 1"), (5, b"of rank 5"), (7, b"of")],
            &[(1, b"a"), (5, b"b")],
            &[(4, b""), (5, b"x")],
            &[(0, b"alone")],
        ];
        for addresses in tables {
            let bytes = of(addresses);
            for (peer, address) in addresses {
                assert_eq!(read(&bytes, *peer), Ok(Some(address.to_vec())));
            }
            assert_eq!(read(&bytes, 6), Ok(None), "not linked");
        }
        assert_eq!(read(&of(&[]), 0), Ok(None));
        let same: Vec<(u32, &[u8])> = (0..100).map(|peer| (peer, &[7; 300][..])).collect();
        assert_eq!(of(&same).len(), 12 + 300 + 100 * 8, "what is in common is there once");
    }

    #[test]
    fn a_table_that_is_cut_or_prolonged_is_refused() {
        let good = of(&[(1, b"of rank 1"), (5, b"of rank 5")]);
        let whole = [8 + 4 + b"of rank ".len(), 8 + 4 + 8 + 8 + 1];
        for length in 8..good.len() {
            let why = read(&good[..length], 1);
            // A table that ends between two entries is a shorter table.
            assert_eq!(why.is_err(), !whole.contains(&length), "{length} bytes: {why:?}");
        }
        for end in [&[0][..], &[0; 7], &[1, 0, 0, 0, 1, 0, 0, 0]] {
            let why = read(&[&good, end].concat(), 1).unwrap_err();
            assert!(why.contains("rank 9 sent a malformed table of addresses"), "{why}");
        }
        let bent = |at: usize| {
            let mut bytes = good.clone();
            bytes[at] ^= 0x80;
            read(&bytes, 1).unwrap_err()
        };
        assert!(bent(0).contains("rank 9 opens context 130 where this rank opens 2"));
        assert!([6, 7, 8, 9, 10, 11].map(bent).iter().all(|why| why.contains("malformed table")));
    }

    #[test]
    fn an_address_that_is_too_long_is_not_sent() {
        let longest = vec![0; MAX_ADDRESS];
        assert!(card(Rank(9), REGION, INDEX, &[(Rank(1), longest.clone())]).is_ok());
        let why = card(Rank(9), REGION, INDEX, &[(Rank(1), vec![]), (Rank(3), [longest, vec![0]].concat())]);
        let why = why.unwrap_err().to_string();
        assert!(why.contains("rank 9 has an address of 65537 bytes for rank 3"), "{why}");
    }
}
