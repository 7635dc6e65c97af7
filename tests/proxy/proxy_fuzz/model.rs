//! A model of what a proxy may do with its inputs, written from the documents and run beside the real proxy.
//!
//! It uses the layout (`Wire`), and nothing of the machine.

use std::collections::{HashMap, HashSet};
use tokenyard::Rank;
use tokenyard::internals::proxy::driver::ContextMemory;
use tokenyard::internals::proxy::machine::MachineStats;
use tokenyard::internals::proxy::wire::{ChunkIdx, Direction, LinkIdx, SourceIdx, Wire, arrival};
use tokenyard::internals::transport::network::{RegionId, WriteImm};

/// Ranks.
const WORLD: u32 = super::WORLD as u32;

/// The rank of the proxy.
pub const OWN: Rank = Rank(0);

/// One rank that the proxy posts to, in one direction.
pub struct Link {
    pub direction: Direction,
    pub index: LinkIdx,
    peer: Rank,
    pub epoch: u64,
    pub chunk: u16,
    /// Where the chunk begins in its message.
    offset: u64,
    pub chunks: u16,
    pub stopped: bool,
    /// By parity: writes that have not completed, and the epoch if all chunks are posted.
    under_way: [(u32, Option<u64>); 2],
}

/// Arrivals from one source: by parity and chunk, the epoch and the NICs' shards.
struct Source {
    rank: u32,
    newest: i64,
    slots: [Vec<(i64, u8)>; 2],
}

enum Verdict {
    Partial,
    Arrived(u64),
    Duplicate,
    Impossible,
}

impl Source {
    fn count(&mut self, epoch_bits: u32, chunk: u32, nic: u32, full: u8, lists: &[(i64, u32); 2]) -> Verdict {
        let is_partial = |(_, mask): &(i64, u8)| *mask != 0 && *mask != full;
        let named = |epoch: &i64| epoch.rem_euclid(4) == i64::from(epoch_bits);
        let epoch = (self.newest - 1..=self.newest + 2).find(named).unwrap();
        let slot = &mut self.slots[(epoch & 1) as usize];
        let in_use = epoch > self.newest && slot.iter().any(is_partial);
        let Some(entry) = slot.get_mut(chunk as usize) else { return Verdict::Impossible };
        if in_use || full >> nic & 1 == 0 || entry.0 != epoch && is_partial(entry) {
            return Verdict::Impossible;
        }
        let seen = if entry.0 == epoch { entry.1 } else { 0 };
        if seen >> nic & 1 == 1 {
            return Verdict::Duplicate;
        }
        if epoch < lists[(epoch & 1) as usize].0 {
            return Verdict::Impossible;
        }
        *entry = (epoch, seen | 1 << nic);
        self.newest = self.newest.max(epoch);
        if entry.1 == full { Verdict::Arrived(epoch as u64) } else { Verdict::Partial }
    }
}

/// An open context.
pub struct Open {
    pub wire: Wire,
    pub generation: u8,
    pub memory: ContextMemory,
    /// Expected doorbell words in memory: as written, but cleared for later chunks that the proxy took.
    pub doorbells: Vec<u64>,
    pub links: Vec<Link>,
    sources: [Vec<Source>; 4],
    /// By direction and parity: the newest epoch with arrivals, and how many of its chunks have arrived.
    lists: [[(i64, u32); 2]; 4],
    arrived: Vec<u64>,
    staging_free: Vec<u64>,
    /// Writes that have not completed, by token: link and parity.
    tokens: HashMap<u64, (usize, usize)>,
}

impl Open {
    pub fn new(wire: &Wire, generation: u8, first_epoch: u64) -> Open {
        let counts = wire.word_counts();
        let links = Direction::ALL.into_iter().flat_map(|direction| {
            wire.targets(direction, OWN).into_iter().zip(0..).map(move |(peer, index)| Link {
                direction,
                index: LinkIdx(index),
                peer,
                epoch: first_epoch,
                chunk: 0,
                offset: 0,
                chunks: 0,
                stopped: false,
                under_way: [(0, None); 2],
            })
        });
        let full = (1u8 << wire.nics()) - 1;
        let before = first_epoch as i64 - 1;
        let of_parity = |parity: i64| if before & 1 == parity { before } else { before - 1 };
        let sources = Direction::ALL.map(|direction| {
            let chunks = usize::from(wire.shape(direction).chunks);
            let slots = [0, 1].map(|parity| vec![(of_parity(parity), full); chunks]);
            let of = |rank: Rank| Source { rank: rank.0, newest: before, slots: slots.clone() };
            wire.sources(direction, OWN).into_iter().map(of).collect()
        });
        Open {
            wire: wire.clone(),
            generation,
            memory: ContextMemory::owned(counts),
            doorbells: vec![0; counts.doorbells],
            links: links.collect(),
            sources,
            lists: [[0, 1].map(|parity| (of_parity(parity), 0)); 4],
            arrived: vec![0; counts.arrived],
            staging_free: vec![0; counts.staging_free],
            tokens: HashMap::new(),
        }
    }

    fn names(&self, rank: u32) -> bool {
        let sources = self.sources.iter().flatten().any(|source| source.rank == rank);
        sources || self.links.iter().any(|link| link.peer.0 == rank)
    }

    /// The device's words that the link polls next.
    pub fn words(&self, link: usize) -> (usize, usize) {
        let Link { direction, index, epoch, chunk, .. } = self.links[link];
        let bell = self.wire.doorbell_word(direction, epoch, index, ChunkIdx(chunk));
        (bell, self.wire.chunks_word(direction, epoch, index))
    }

    /// Takes what memory shows for one link; `None` if it is no doorbell. Else the bytes that are to be posted, or that
    /// it is a bad one.
    fn ring(&mut self, at: usize) -> Option<Result<u32, ()>> {
        let (bell, count) = self.words(at);
        let word = self.doorbells[bell];
        let link = &mut self.links[at];
        let bytes = word as u32;
        if link.stopped || word >> 32 != link.epoch & 0xffff_ffff || bytes == 0 {
            return None;
        }
        let shape = self.wire.shape(link.direction);
        let first = link.chunk == 0;
        if !first {
            self.doorbells[bell] = 0;
        }
        let chunks = load(&self.memory.chunks, count);
        let in_use = first && link.under_way[(link.epoch & 1) as usize] != (0, None);
        let most = if first { shape.first_bytes } else { shape.chunk_bytes };
        if in_use || first && !(1..=u64::from(shape.chunks)).contains(&chunks) || bytes > most {
            link.stopped = true;
            return Some(Err(()));
        }
        if first {
            link.chunks = chunks as u16;
        }
        Some(Ok(bytes))
    }

    /// Checks the writes of one chunk, and goes on to the next chunk.
    fn posted(&mut self, context: u8, at: usize, bytes: u32, writes: &[WriteImm]) {
        let Open { wire, links, tokens, generation, .. } = self;
        let link = &mut links[at];
        let Link { direction, index, peer, epoch, chunk, .. } = *link;
        let slot = wire.sources(direction, peer).iter().position(|rank| *rank == OWN).unwrap();
        let offset = link.offset;
        let mut source = wire.staging_offset(direction, epoch, index) + offset;
        let mut target = wire.recv_buffer_offset(direction, epoch, SourceIdx(slot as u16)) + offset;
        let end = source + u64::from(bytes);
        assert_eq!(writes.len(), usize::from(wire.nics()), "one write for each NIC");
        for (write, nic) in writes.iter().zip(0u32..) {
            let imm = u32::from(*generation) << 30
                | u32::from(context) << 28
                | (direction.kind() as u32) << 25
                | ((epoch & 3) as u32) << 23
                | u32::from(chunk) << 2
                | nic;
            assert_eq!((u32::from(write.nic), write.peer, write.imm.bits()), (nic, peer, imm));
            assert_eq!((write.source.region, write.source.offset), (RegionId(OWN.0 as u16), source));
            assert_eq!((write.target.region, write.target.offset), (RegionId(peer.0 as u16), target));
            source += u64::from(write.bytes);
            target += u64::from(write.bytes);
            let twice = tokens.insert(write.token, (at, (epoch & 1) as usize));
            assert!(twice.is_none(), "two writes with one token");
        }
        assert_eq!(source, end, "bytes posted");
        let under_way = &mut link.under_way[(epoch & 1) as usize];
        under_way.0 += u32::from(wire.nics());
        let rows = u64::from(wire.shape(direction).rows_offset);
        link.offset += u64::from(bytes);
        if chunk == 0 {
            link.offset = link.offset.max(rows);
        }
        link.chunk += 1;
        if link.chunk == link.chunks {
            link.offset = 0;
            under_way.1 = Some(epoch);
            (link.epoch, link.chunk) = (epoch + 1, 0);
        }
    }

    /// Whether the token is one of a write under way.
    fn complete(&mut self, token: u64) -> bool {
        let Some((at, parity)) = self.tokens.remove(&token) else { return false };
        let link = &mut self.links[at];
        let (posts, whole) = &mut link.under_way[parity];
        *posts -= 1;
        if *posts == 0
            && let Some(epoch) = whole.take()
        {
            let word = self.wire.staging_free_word(link.direction, epoch, link.index);
            self.staging_free[word] = epoch;
        }
        true
    }

    fn arrive(&mut self, bits: u32) -> Verdict {
        let direction = match bits >> 25 & 7 {
            0 => Direction::Dispatch,
            1 => Direction::Combine,
            2 => Direction::Weights,
            5 => Direction::Barrier,
            _ => return Verdict::Impossible,
        };
        let full = (1u8 << self.wire.nics()) - 1;
        let (rank, chunk) = (bits >> 12 & 0x7ff, bits >> 2 & 0x3ff);
        let sources = &mut self.sources[direction.index()];
        let Some(at) = sources.iter().position(|source| source.rank == rank) else { return Verdict::Impossible };
        let lists = &mut self.lists[direction.index()];
        let verdict = sources[at].count(bits >> 23 & 3, chunk, bits & 3, full, lists);
        if let Verdict::Arrived(epoch) = verdict {
            let list = &mut lists[(epoch & 1) as usize];
            if list.0 != epoch as i64 {
                *list = (epoch as i64, 0);
            }
            let word = self.wire.arrival_word(direction, epoch, list.1);
            self.arrived[word] = arrival(epoch, SourceIdx(at as u16), ChunkIdx(chunk as u16));
            list.1 += 1;
        }
        verdict
    }
}

/// The value of one of the device's or the proxy's words.
pub fn load(words: &tokenyard::internals::proxy::driver::Words, at: usize) -> u64 {
    words.get(at).unwrap().load(std::sync::atomic::Ordering::Acquire)
}

/// All contexts of a proxy, and its expected counts.
#[derive(Default)]
pub struct Model {
    pub contexts: [Option<Open>; 4],
    pub counted: MachineStats,
    /// Given in all, by kind.
    pub immediates: u64,
    pub messages: u64,
    pub tokens: u64,
    pub rung: u64,
    /// Well-formed messages.
    well_formed: u64,
    /// Peers named only by closed contexts, which are kept until they leave; then those that have left.
    parted: HashSet<u32>,
    left: HashSet<u32>,
    /// Completions of nothing: either stale or impossible.
    dropped_tokens: u64,
}

impl Model {
    fn named(&self) -> HashSet<u32> {
        (0..WORLD).filter(|peer| self.contexts.iter().flatten().any(|open| open.names(*peer))).collect()
    }

    /// A context is opened, whose peers begin anew, or closed.
    pub fn set(&mut self, at: usize, context: Option<Open>) {
        let before = self.named();
        let fresh: HashSet<u32> = (0..WORLD).filter(|peer| context.as_ref().is_some_and(|c| c.names(*peer))).collect();
        self.contexts[at] = context;
        let named = self.named();
        self.parted.extend(before);
        self.parted.retain(|peer| !named.contains(peer) && !self.left.contains(peer));
        self.left.retain(|peer| named.contains(peer) && !fresh.contains(peer));
    }

    /// The doorbells of one pass, whose writes are `writes`.
    pub fn doorbells(&mut self, mut writes: &[WriteImm]) {
        for (context, open) in self.contexts.iter_mut().enumerate() {
            let Some(open) = open else { continue };
            for at in 0..open.links.len() {
                let Some(rung) = open.ring(at) else { continue };
                self.rung += 1;
                let Ok(bytes) = rung else {
                    self.counted.bad_doorbells += 1;
                    continue;
                };
                let nics = usize::from(open.wire.nics()).min(writes.len());
                let (these, others) = writes.split_at(nics);
                open.posted(context as u8, at, bytes, these);
                self.counted.posts += nics as u64;
                writes = others;
            }
        }
        assert!(writes.is_empty(), "posted without a doorbell: {writes:?}");
        for open in self.contexts.iter().flatten() {
            let there: Vec<u64> = (0..open.doorbells.len()).map(|at| load(&open.memory.doorbells, at)).collect();
            assert_eq!(there, open.doorbells, "doorbells in memory");
        }
    }

    pub fn immediate(&mut self, bits: u32) {
        self.immediates += 1;
        let counted = &mut self.counted;
        let context = self.contexts[(bits >> 28 & 3) as usize].as_mut();
        let Some(open) = context.filter(|open| u32::from(open.generation) == bits >> 30) else {
            counted.stale_immediates += 1;
            return;
        };
        match open.arrive(bits) {
            Verdict::Partial => counted.immediates += 1,
            Verdict::Arrived(_) => {
                counted.immediates += 1;
                counted.arrived += 1;
            }
            Verdict::Duplicate => counted.duplicates += 1,
            Verdict::Impossible => counted.impossible += 1,
        }
    }

    pub fn message(&mut self, peer: u32, bytes: &[u8]) {
        self.messages += 1;
        let good = matches!(bytes, [b't', b'y', b'h', b'b', 3, 1 | 2, _, _, sender @ ..] if sender.len() == 12 && sender[..4] == peer.to_le_bytes());
        let known = self.parted.contains(&peer) || self.named().contains(&peer);
        if good && known && bytes[5] == 2 {
            self.left.insert(peer);
        }
        match (good, known) {
            (false, _) => self.counted.bad_messages += 1,
            (true, false) => self.counted.strange_messages += 1,
            (true, true) => self.well_formed += 1,
        }
    }

    pub fn completion(&mut self, token: u64) {
        self.tokens += 1;
        let taken = self.contexts.iter_mut().flatten().any(|open| open.complete(token));
        if taken {
            self.counted.completions += 1;
        } else {
            self.dropped_tokens += 1;
        }
    }

    /// Compares a proxy with the model: every input is in exactly one counter, and every word has its expected value.
    pub fn check(&self, stats: &MachineStats, under_way: impl Fn(usize) -> u32) {
        let dropped = stats.impossible + stats.stale_completions;
        assert_eq!(dropped, self.counted.impossible + self.dropped_tokens, "dropped immediates and completions");
        let MachineStats { impossible, stale_completions, heartbeats, .. } = *stats;
        assert_eq!(*stats, MachineStats { impossible, stale_completions, heartbeats, ..self.counted });
        let imms = stats.immediates + stats.duplicates + stats.stale_immediates;
        assert_eq!(imms + stats.completions + dropped, self.immediates + self.tokens, "each is counted once");
        assert_eq!(stats.bad_messages + stats.strange_messages + self.well_formed, self.messages);
        for (context, open) in self.contexts.iter().enumerate() {
            let Some(Open { memory, arrived, staging_free, tokens, links, .. }) = open else { continue };
            assert_eq!(under_way(context), tokens.len() as u32, "writes under way in context {context}");
            (0..arrived.len()).for_each(|at| assert_eq!(load(&memory.arrived, at), arrived[at], "arrived {at}"));
            let free = &memory.staging_free;
            (0..staging_free.len()).for_each(|at| assert_eq!(load(free, at), staging_free[at], "staging free {at}"));
            // The device rang an invalid doorbell, so its waits must end.
            let own = u64::from(OWN.0) + 1;
            let lost = if links.iter().any(|link| link.stopped) { own } else { 0 };
            assert_eq!(load(&memory.lost, 0), lost, "the device's word for a lost rank");
        }
    }
}
