//! Counts immediates: per source and chunk, which shards have arrived, in two epochs at a time; and numbers the chunks
//! of an epoch in order of arrival.
//!
//! Place in the data path: between a completion and the `arrived` flag. Runs on the proxy thread. Never blocks,
//! allocates (after construction) or trusts its input: a duplicate or an impossible immediate is a return value.
//!
//! An immediate carries the low two bits of its epoch, which are enough. Let M be the newest epoch seen of a source:
//!
//! ```text
//!      M−1          M            M+1          M+2
//!    may still    may still    the source    the source saw that we had begun X(M+1), which we do after our receive
//!    be under     be under     went on       of X(M): M is complete here, M+1 may not have begun to arrive
//!    way          way
//! ```
//!
//! Nothing older than M−1 can be under way: the source sent X(M) after it saw that we had begun X(M−1), which we do
//! after our receive of X(M−2). So epoch mod 4 names one of these four, and the two parities of a slot hold all open
//! epochs.
//!
//! That receive was of all sources. So once X(M+2) of any source begins to arrive, X(M) of every source has arrived and
//! was seen: the list of an epoch's arrivals restarts two epochs later, for all sources together.

use super::wire::{ChunkIdx, NicIdx, SourceIdx};

/// The outcome of counting an immediate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// Other shards of the chunk are under way.
    Partial,
    /// That was the chunk's last shard.
    Arrived {
        /// The full epoch number.
        epoch: u64,
        /// How many chunks of that epoch, from any source, arrived before.
        place: u32,
    },
    /// The shard was counted before, or belongs to an epoch before the context's first.
    Duplicate,
    /// The shard's slot is still in use by an epoch that must have been over.
    Impossible,
}

/// Bits of an entry that hold the NICs' mask.
const MASK_BITS: u32 = 4;
const MASK: u64 = (1 << MASK_BITS) - 1;

/// Counts the shards of one direction.
#[derive(Debug)]
pub struct ImmCounter {
    sources: usize,
    chunks: usize,
    /// A bit for every NIC.
    full: u64,
    /// By source: newest epoch seen.
    newest: Vec<u64>,
    /// By (parity, source): chunks with some shards counted, and not all.
    open: Vec<u16>,
    /// By (parity, source, chunk): `epoch << 4 | NICs counted`. An entry of an older epoch is reset by its first shard.
    entries: Vec<u64>,
    /// By parity.
    lists: [List; 2],
}

/// Arrivals in the newest epoch of a parity.
#[derive(Debug, Clone, Copy)]
struct List {
    epoch: u64,
    chunks: u32,
}

impl List {
    /// The list of an epoch; `None` if a later epoch has begun.
    fn of(self, epoch: u64) -> Option<List> {
        match epoch.wrapping_sub(self.epoch) {
            0 => Some(self),
            ahead if ahead < 1 << 63 => Some(List { epoch, chunks: 0 }),
            _ => None,
        }
    }
}

impl ImmCounter {
    /// For messages of up to `chunks` chunks by `sources` sources over `nics` NICs (at most 4), from `first_epoch` on.
    pub fn new(sources: usize, chunks: usize, nics: u8, first_epoch: u64) -> ImmCounter {
        let full = (1 << nics.min(MASK_BITS as u8)) - 1;
        // Epochs from before the context are complete, so that their late shards are duplicates.
        let last = |parity: u64| {
            let last = first_epoch.wrapping_sub(1);
            if last & 1 == parity { last } else { last.wrapping_sub(1) }
        };
        let complete = |parity: u64| tag(last(parity)) | full;
        let mut entries = vec![complete(0); sources * chunks];
        entries.resize(2 * sources * chunks, complete(1));
        let newest = vec![first_epoch.wrapping_sub(1); sources];
        let lists = [0, 1].map(|parity| List { epoch: last(parity), chunks: 0 });
        ImmCounter { sources, chunks, full, newest, open: vec![0; 2 * sources], entries, lists }
    }

    /// Whether anything of `epoch`, or of a later one, has come from a source.
    pub fn has_begun(&self, source: SourceIdx, epoch: u64) -> bool {
        self.newest.get(source.index()).is_some_and(|newest| newest.wrapping_sub(epoch) < 1 << 63)
    }

    /// Counts one shard. `epoch_bits` is the epoch modulo 4. Indices beyond the configured ones are `Impossible`.
    pub fn count(&mut self, source: SourceIdx, epoch_bits: u8, chunk: ChunkIdx, nic: NicIdx) -> Counted {
        let bit = 1u64 << (nic.0 & 63) & self.full;
        if source.index() >= self.sources || chunk.index() >= self.chunks || bit == 0 {
            return Counted::Impossible;
        }
        let newest = self.newest[source.index()];
        let oldest = newest.wrapping_sub(1);
        let epoch = oldest.wrapping_add(u64::from(epoch_bits).wrapping_sub(oldest) & 3);
        let slot = (epoch & 1) as usize * self.sources + source.index();
        let later = epoch != oldest && epoch != newest;
        if later && self.open[slot] != 0 {
            return Counted::Impossible;
        }
        let entry = &mut self.entries[slot * self.chunks + chunk.index()];
        let before = if *entry & !MASK == tag(epoch) { *entry & MASK } else { 0 };
        if before == 0 && !(*entry & MASK == 0 || *entry & MASK == self.full) {
            return Counted::Impossible;
        }
        if before & bit != 0 {
            return Counted::Duplicate;
        }
        let Some(mut list) = self.lists[(epoch & 1) as usize].of(epoch) else { return Counted::Impossible };
        let now = before | bit;
        *entry = tag(epoch) | now;
        if later {
            self.newest[source.index()] = epoch;
        }
        self.open[slot] = self.open[slot] + u16::from(before == 0) - u16::from(now == self.full);
        if now != self.full {
            return Counted::Partial;
        }
        let place = list.chunks;
        list.chunks += 1;
        self.lists[(epoch & 1) as usize] = list;
        Counted::Arrived { epoch, place }
    }
}

/// An epoch's bits in an entry.
fn tag(epoch: u64) -> u64 {
    epoch << MASK_BITS
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: SourceIdx = SourceIdx(0);

    fn count(counter: &mut ImmCounter, epoch: u64, chunk: u16, nic: u8) -> Counted {
        counter.count(S, (epoch & 3) as u8, ChunkIdx(chunk), NicIdx(nic))
    }

    #[test]
    fn a_chunk_arrives_with_its_last_shard_in_any_order() {
        let mut c = ImmCounter::new(1, 2, 3, 1);
        assert_eq!(count(&mut c, 1, 1, 2), Counted::Partial);
        assert_eq!(count(&mut c, 1, 0, 0), Counted::Partial);
        assert_eq!(count(&mut c, 1, 1, 0), Counted::Partial);
        assert_eq!(count(&mut c, 1, 1, 1), Counted::Arrived { epoch: 1, place: 0 });
        assert_eq!(count(&mut c, 1, 0, 2), Counted::Partial);
        assert_eq!(count(&mut c, 1, 0, 1), Counted::Arrived { epoch: 1, place: 1 });
    }

    #[test]
    fn epochs_overlap_by_one_around_the_wrap_of_their_low_bits() {
        for first in [1, 2, 3, u64::from(u32::MAX) - 1, (1 << 32) + 1, 1 << 40] {
            let mut c = ImmCounter::new(1, 1, 2, first);
            assert_eq!(count(&mut c, first, 0, 0), Counted::Partial);
            for e in first..first + 9 {
                // The next epoch arrives in whole or in part before this one is complete, or even begun.
                assert_eq!(count(&mut c, e + 1, 0, 1), Counted::Partial, "early shard of {}", e + 1);
                assert_eq!(
                    count(&mut c, e, 0, if e == first { 1 } else { 0 }),
                    Counted::Arrived { epoch: e, place: 0 }
                );
            }
        }
    }

    #[test]
    fn chunks_of_all_sources_of_an_epoch_are_numbered_together() {
        let mut c = ImmCounter::new(2, 2, 1, 5);
        let mut arrives = |source: u16, epoch: u64, chunk: u16| match c.count(
            SourceIdx(source),
            (epoch & 3) as u8,
            ChunkIdx(chunk),
            NicIdx(0),
        ) {
            Counted::Arrived { epoch: counted, place } if counted == epoch => Some(place),
            Counted::Impossible => None,
            other => panic!("{other:?}"),
        };
        assert_eq!([arrives(1, 5, 1), arrives(0, 5, 0), arrives(1, 6, 0), arrives(1, 5, 0)], [0, 1, 0, 2].map(Some));
        // The list restarts two epochs later, when the missing chunks of the former epoch can no longer come.
        assert_eq!([arrives(0, 5, 1), arrives(1, 7, 0), arrives(0, 7, 1)], [3, 0, 1].map(Some));
        assert_eq!([arrives(1, 6, 1), arrives(1, 8, 0), arrives(0, 6, 0)], [Some(1), Some(0), None]);
    }

    #[test]
    fn two_epochs_on_arrives_before_any_of_the_next() {
        let mut c = ImmCounter::new(1, 1, 1, 5);
        assert_eq!(count(&mut c, 5, 0, 0), Counted::Arrived { epoch: 5, place: 0 });
        assert_eq!(count(&mut c, 7, 0, 0), Counted::Arrived { epoch: 7, place: 0 });
        assert_eq!(count(&mut c, 6, 0, 0), Counted::Arrived { epoch: 6, place: 0 });
        assert_eq!(count(&mut c, 6, 0, 0), Counted::Duplicate);
        assert_eq!(count(&mut c, 8, 0, 0), Counted::Arrived { epoch: 8, place: 0 });
    }

    #[test]
    fn duplicates_and_the_impossible_are_answers() {
        let mut c = ImmCounter::new(1, 2, 2, 5);
        assert_eq!(count(&mut c, 4, 0, 0), Counted::Duplicate, "from before the context");
        assert_eq!(count(&mut c, 3, 0, 0), Counted::Duplicate, "from before the context");
        assert_eq!(count(&mut c, 5, 0, 1), Counted::Partial);
        assert_eq!(count(&mut c, 5, 0, 1), Counted::Duplicate);
        assert_eq!(count(&mut c, 7, 0, 1), Counted::Impossible, "5 is open");
        assert_eq!(count(&mut c, 7, 1, 1), Counted::Impossible, "5 is open, in another chunk");
        assert_eq!(count(&mut c, 5, 2, 0), Counted::Impossible);
        assert_eq!(count(&mut c, 5, 0, 2), Counted::Impossible);
        assert_eq!(c.count(SourceIdx(1), 1, ChunkIdx(0), NicIdx(0)), Counted::Impossible);
        assert_eq!(count(&mut c, 5, 0, 0), Counted::Arrived { epoch: 5, place: 0 });
    }
}
