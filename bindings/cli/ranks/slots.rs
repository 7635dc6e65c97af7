//! Memory for bare stores between ranks: every rank has a slot for each rank.
//!
//! Beside the data path, on the rank's thread. Making it is collective.

use tokenyard::internals::transport::{Arena, PeerMap};
use tokenyard::{Device, DeviceBuffer, Rank, Result, View, World};

use crate::cli::cases::words::ArenaWord;

/// Targets of bare stores: a slot for each rank in every rank's memory.
pub struct Slots {
    rank: usize,
    ranks: usize,
    /// Bytes of a slot.
    bytes: usize,
    map: PeerMap,
    source: DeviceBuffer,
    device: Device,
}

impl Slots {
    /// Makes this rank's slots of `bytes` bytes each and maps its peers' slots. Collective.
    ///
    /// # Errors
    /// Any error of the device or of a peer.
    pub fn establish(world: &World, device: &Device, arena: ArenaWord, bytes: usize) -> Result<Slots> {
        let all = bytes.saturating_mul(world.size());
        let arena = match (device.ordinal(), arena) {
            (None, _) => Arena::cpu(all),
            (Some(ordinal), ArenaWord::Device) => Arena::cuda(ordinal, all),
            (Some(ordinal), ArenaWord::Host) => Arena::cuda_host(ordinal, all),
        };
        let own = arena.and_then(|arena| {
            let source = device.alloc(bytes)?;
            source.fill(1)?;
            Ok((arena, source))
        });
        world.agree("memory of link buffers", own.as_ref().err())?;
        let (arena, source) = own?;
        let map = PeerMap::establish(world, arena)?;
        Ok(Slots { rank: world.rank().index(), ranks: world.size(), bytes, map, source, device: device.clone() })
    }

    /// Each other rank of the node, and this rank's slot there.
    pub fn peers(&self) -> Vec<(usize, View)> {
        let base = |peer: usize| self.map.base_of(Rank(peer as u32));
        let own = (self.rank * self.bytes) as u64;
        let others = (0..self.ranks).filter(|&peer| peer != self.rank && base(peer) != 0);
        // SAFETY: this rank's slot in the peer's arena, where no other rank writes. The map keeps it until this rank's
        // work was waited for.
        let slot = |peer| unsafe { View::from_raw(&self.device, base(peer) + own, self.bytes) };
        others.map(|peer| (peer, slot(peer))).collect()
    }

    /// The memory to store from, of a slot's size.
    pub fn source(&self) -> View {
        self.source.view()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    #[test]
    fn a_rank_without_memory_for_its_slots_is_named_to_the_others() {
        let asked = |rank: usize| if rank == 1 { usize::MAX / 4 } else { 64 };
        let errors: Vec<String> = std::thread::scope(|scope| {
            let establish = |world: World| {
                let (device, bytes) = (Device::cpu().unwrap(), asked(world.rank().index()));
                Slots::establish(&world, &device, ArenaWord::Device, bytes).map(drop).unwrap_err().to_string()
            };
            let ranks: Vec<_> =
                World::threads(3).unwrap().into_iter().map(|world| scope.spawn(move || establish(world))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for rank in [0, 2] {
            assert!(errors[rank].contains("rank 1 failed in memory of link buffers"), "{}", errors[rank]);
        }
        assert!(!errors[1].contains("rank 1 failed in"), "its own error, {}", errors[1]);
    }

    /// Contents of this rank's memory, slot by slot; no rank may be storing there.
    pub fn received(slots: &Slots) -> Vec<Vec<u8>> {
        let own = slots.map.own();
        // SAFETY: an arena of the CPU device is host memory, zeroed, of that length, and lives as long as the slots.
        let bytes = unsafe { std::slice::from_raw_parts(own.base() as *const u8, own.bytes()) };
        bytes.chunks(slots.bytes).map(<[u8]>::to_vec).collect()
    }
}
