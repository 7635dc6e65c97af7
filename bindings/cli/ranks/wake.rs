//! Brings the links between GPUs up before timed calls, if the GPU has waited for the host.
//!
//! A link that was idle for some milliseconds, as after a comparison, is slow for its first bytes: some 100 µs, which
//! the next timed dispatch would show in place of its own time. Calls in a model have other work right before them. So
//! bytes that no rank reads go to every peer of the node first, into memory of their own.
//!
//! On the rank's thread, before the barrier that starts ranks at the same time. It enqueues and never allocates; a rank
//! wakes its own links and waits for no other rank.

use tokenyard::internals::kernels::bench;
use tokenyard::{Device, DeviceKind, Result, Stream, View, World};

use super::slots::Slots;
use crate::cli::cases::words::ArenaWord;

/// Bytes of one push to a peer: fewer would need more launches, more would displace the peer's caches.
const PUSH_BYTES: usize = 4 << 20;
/// Least bytes in all: what a rank stores over NVLink, at 330 GB/s, in the 100 µs that a link takes to come up.
const WAKE_BYTES: usize = 32 << 20;

/// The bytes that wake a rank's links.
pub struct Wake {
    slots: Slots,
    destinations: Vec<View>,
    launches: usize,
}

impl Wake {
    /// `None` on the CPU device, whose memory has no links, and in a world of one rank. Collective.
    ///
    /// # Errors
    /// Any error of the device or of a peer.
    pub fn establish(world: &World, device: &Device, arena: ArenaWord) -> Result<Option<Wake>> {
        if device.kind() == DeviceKind::Cpu || world.size() < 2 {
            return Ok(None);
        }
        Ok(Some(Wake::of(Slots::establish(world, device, arena, PUSH_BYTES)?)))
    }

    /// A rank alone on its node wakes nothing: traffic between nodes goes through NICs.
    fn of(slots: Slots) -> Wake {
        let destinations: Vec<View> = slots.peers().into_iter().map(|(_, slot)| slot).collect();
        let once = slots.source().len() * destinations.len();
        let launches = if once == 0 { 0 } else { WAKE_BYTES.div_ceil(once) };
        Wake { slots, destinations, launches }
    }

    /// Enqueues the bytes.
    ///
    /// # Errors
    /// `Device` if a launch fails.
    pub fn enqueue(&self, stream: &Stream) -> Result<()> {
        let bytes = vec![self.slots.source().len(); self.destinations.len()];
        (0..self.launches).try_for_each(|_| bench::push(stream, &self.slots.source(), &self.destinations, &bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cli::ranks::slots::tests::received;

    /// Runs each rank on its own CPU device and thread.
    fn on_ranks(worlds: Vec<World>, code: impl Fn(World, Device) + Sync) {
        std::thread::scope(|scope| {
            for world in worlds {
                let code = &code;
                scope.spawn(move || code(world, Device::cpu().unwrap()));
            }
        });
    }

    #[test]
    fn the_cpu_device_and_a_single_rank_have_no_links_to_wake() {
        on_ranks(World::threads(2).unwrap(), |world, device| {
            assert!(Wake::establish(&world, &device, ArenaWord::Device).unwrap().is_none());
        });
    }

    #[test]
    fn bytes_go_to_every_peer_of_the_node_and_nowhere_else() {
        const BYTES: usize = 1 << 20;
        let worlds = World::threads(4).unwrap().into_iter().map(|world| world.with_nodes(&[1, 3]).unwrap());
        on_ranks(worlds.collect(), |world, device| {
            let slots = Slots::establish(&world, &device, ArenaWord::Device, BYTES).unwrap();
            let (rank, stream) = (world.rank().index(), device.new_stream().unwrap());
            let wake = Wake::of(slots);
            let peers = if rank == 0 { 0 } else { 2 };
            assert_eq!(wake.destinations.len(), peers);
            assert_eq!(wake.launches * peers * BYTES, if rank == 0 { 0 } else { WAKE_BYTES });
            wake.enqueue(&stream).unwrap();
            stream.synchronize(Duration::from_secs(60)).unwrap();
            world.barrier("woken").unwrap();
            for (source, slot) in received(&wake.slots).into_iter().enumerate() {
                let byte = u8::from(source != rank && rank > 0 && source > 0);
                assert!(slot.iter().all(|&b| b == byte), "slot of rank {source} at rank {rank}");
            }
            world.barrier("checked").unwrap();
        });
    }
}
