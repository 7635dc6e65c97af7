//! Messages between nodes that no rank of this program would send: as a peer of another build might send, or a broken
//! peer.
//!
//! Between a proxy and its endpoint, on the proxy's fiber. Rows and sums may then be wrong, and calls may end with an
//! error; but no call may touch memory that is not its own, or last beyond its deadline.

use tokenyard::internals::transport::network::{
    DeviceNeeds, Event, Limits, Posted, RegionId, Released, Span, Transport, WriteImm,
};
use tokenyard::{Rank, Result};

use crate::cli::cases::inputs::{Counter, Use};

/// Share of writes that are tampered with, in thousandths: a call has some tens of writes.
const PERMILLE: usize = 40;
/// Most words of a write that are changed.
const WORDS: usize = 3;
/// Words at the front of a write, with heads and headers: at least half of the changes are there.
const FRONT: usize = 16;
/// Bytes of a word. Messages and their parts are multiples of it.
const WORD: usize = 4;

/// An endpoint of host memory that changes some words of the writes it posts.
pub struct Forger<T> {
    inner: T,
    dice: Counter,
    /// First address of each region.
    bases: Vec<u64>,
}

impl<T: Transport> Forger<T> {
    /// Wraps the endpoint of a rank. The changes follow from the seed.
    pub fn new(inner: T, rank: Rank, seed: u64) -> Forger<T> {
        Forger { inner, dice: Counter::new(seed, Use::Choice, u64::MAX - 9, rank.index(), 0), bases: Vec::new() }
    }

    fn forge(&mut self, write: &WriteImm) {
        let words = write.bytes as usize / WORD;
        if words == 0 || self.dice.below(1000) >= PERMILLE {
            return;
        }
        let Some(base) = self.bases.get(usize::from(write.source.region.0)) else { return };
        for _ in 0..1 + self.dice.below(WORDS) {
            let among = if self.dice.below(2) == 0 { words.min(FRONT) } else { words };
            let word = (base + write.source.offset + (WORD * self.dice.below(among)) as u64) as *mut u32;
            // SAFETY: it lies in a region that `register` was given, which its endpoint may use, and in wire staging,
            // which the kernels leave alone from the doorbell until the write has completed. It has not been posted.
            unsafe { word.write_unaligned(changed(&mut self.dice, word.read_unaligned())) };
        }
    }
}

/// Another word: an extreme, any word, a small number, or a word close to the old one.
fn changed(dice: &mut Counter, old: u32) -> u32 {
    match dice.below(6) {
        0 => 0,
        1 => u32::MAX,
        2 => dice.next() as u32,
        3 => dice.below(300) as u32,
        4 => old ^ 1 << dice.below(32),
        _ => old.wrapping_add(1),
    }
}

impl<T: Transport> Transport for Forger<T> {
    fn nics(&self) -> usize {
        self.inner.nics()
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn device_needs(&self) -> DeviceNeeds {
        self.inner.device_needs()
    }

    unsafe fn register(&mut self, span: Span) -> Result<RegionId> {
        // SAFETY: passed on to the caller.
        let region = unsafe { self.inner.register(span)? };
        let at = usize::from(region.0);
        self.bases.resize(self.bases.len().max(at + 1), 0);
        self.bases[at] = span.base;
        Ok(region)
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        self.inner.deregister(region)
    }

    fn address(&mut self, peer: Rank) -> Result<Vec<u8>> {
        self.inner.address(peer)
    }

    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()> {
        self.inner.connect(peer, address)
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        self.forge(write);
        self.inner.post(write)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        self.inner.send(peer, message)
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        self.inner.poll(on_event)
    }

    fn reset(&mut self) -> Result<()> {
        self.inner.reset()
    }
}
