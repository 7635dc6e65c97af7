//! Where things lie on the wire: which ranks are linked, how bytes are cut into chunks and shards, and the offset of
//! each piece in wire staging, wire receive buffer and the words that device and proxy share.
//!
//! Place in the data path: none; pure arithmetic, the one author of these numbers. Kernels get bases and strides from
//! here, the machine gets finished offsets. Runs on any thread when a context is built; never does I/O.
//!
//! ```text
//!  one direction of the staging (or receive buffer) region:
//!
//!   parity 0                                   parity 1
//!  ┌──────────────┬──────────────┬── … ──┬────┬──────────────┬── …
//!  │ link 0       │ link 1       │       │    │ link 0       │        (receive buffer: source 0, source 1, …)
//!  └──────────────┴──────────────┴── … ──┴────┴──────────────┴── …
//!   └┬───────────┘
//!    ├─ chunk 0: head, headers or rows ─┬─ chunk 1: rows ─┬─ …         chunk 0 has a length of its own
//!    └─ shards by NIC: multiples of 16 bytes, of all NICs together the chunk
//! ```
//!
//! Everything is kept twice, by the parity of the epoch, the shared words too. A rank's X(e+1) may be rung before its
//! proxy has seen X(e), and a peer's X(e+2) may arrive while its X(e+1) is still under way; with one word per slot, the
//! later would hide the earlier. Words of a slot are rewritten at the earliest two epochs later, when X(e) is over.

use crate::base::{Error, Rank, Result};
use crate::ffi::layout as raw;
use crate::transport::network::imm::{self, Kind, MAX_CHUNKS, MAX_RANKS};

/// Directions, each with links, epochs, staging and receive buffer of its own.
pub const DIRECTIONS: usize = 4;
/// Unit of shards, in bytes: the width of the device's widest store.
const SHARD_UNIT: u32 = 16;
/// Bytes that slots are aligned to: two 64-byte lines, since lines are prefetched in pairs.
const SLOT_ALIGN: u64 = 128;

/// The direction of a message. Each direction has its own links and epochs. The numbers are the kernels'
/// (`TY_DIRECTION_*` in kernels/ffi/layout.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Direction {
    /// Routing metadata and rows, from the source to the rails of the other nodes.
    Dispatch = 0,
    /// Sums, back from each rail to the sources that it served.
    Combine = 1,
    /// Only the notice that a rank's node has reached a barrier, along dispatch's links.
    Barrier = 2,
    /// Weights that come with combine, sent ahead along dispatch's links, numbered as the combine.
    Weights = 3,
}

impl Direction {
    /// All of them, by index.
    pub const ALL: [Direction; DIRECTIONS] =
        [Direction::Dispatch, Direction::Combine, Direction::Barrier, Direction::Weights];

    /// The direction as an index into a table.
    pub fn index(self) -> usize {
        self as usize
    }

    /// The kind in its immediates.
    pub fn kind(self) -> Kind {
        match self {
            Direction::Dispatch => Kind::Dispatch,
            Direction::Combine => Kind::Combine,
            Direction::Weights => Kind::Weights,
            Direction::Barrier => Kind::Barrier,
        }
    }

    /// The direction of an immediate; `None` if it belongs to none.
    pub fn of(kind: Kind) -> Option<Direction> {
        match kind {
            Kind::Dispatch => Some(Direction::Dispatch),
            Kind::Combine => Some(Direction::Combine),
            Kind::Weights => Some(Direction::Weights),
            Kind::Barrier => Some(Direction::Barrier),
            Kind::Control | Kind::User => None,
        }
    }
}

/// A context of this process's proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContextIdx(pub u8);

/// A link of a rank and direction: the target's place among `Nodes::targets`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkIdx(pub u16);

/// A source of a rank and direction: its place among `Nodes::sources`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceIdx(pub u16);

/// A chunk of one epoch's message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkIdx(pub u16);

/// A NIC of a rank. NIC i speaks to NIC i.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NicIdx(pub u8);

macro_rules! as_index {
    ($($name:ident),*) => {$(
        impl $name {
            /// The number as an index into a table.
            pub fn index(self) -> usize {
                usize::from(self.0)
            }
        }
    )*};
}
as_index!(ContextIdx, LinkIdx, SourceIdx, ChunkIdx, NicIdx);

/// The ranks of each node, and so which ranks send to which.
///
/// The rail of rank s on node m is local index `local(s) mod size(m)` there. Dispatch goes from a rank to its rail on
/// every other node; combine comes back the same way. Among nodes of one size that is one link a node. Among nodes
/// of different sizes a rank may serve several ranks of a larger node, or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nodes {
    members: Vec<Vec<Rank>>,
    /// By rank: node and place in it.
    places: Vec<Option<(usize, usize)>>,
}

impl Nodes {
    /// Nodes by their members. Ranks may be missing (lost ones, for instance), none may stand twice.
    ///
    /// # Errors
    /// `Config` for an empty node, a rank in two places, or one beyond what an immediate can name.
    pub fn new(members: Vec<Vec<Rank>>) -> Result<Nodes> {
        let world = members.iter().flatten().map(|r| r.index() + 1).max().unwrap_or(0);
        imm::check_counts(world, 0, 0, 0)?;
        let mut places = vec![None; world];
        for (node, ranks) in members.iter().enumerate() {
            if ranks.is_empty() {
                return Err(Error::config("nodes", node, "this node has no rank; leave it out"));
            }
            for (local, rank) in ranks.iter().enumerate() {
                if places[rank.index()].replace((node, local)).is_some() {
                    return Err(Error::config("nodes", node, format!("rank {rank} stands in two places")));
                }
            }
        }
        Ok(Nodes { members, places })
    }

    /// One more than the highest rank.
    pub fn world(&self) -> usize {
        self.places.len()
    }

    /// Members by node.
    pub fn members(&self) -> &[Vec<Rank>] {
        &self.members
    }

    /// Nodes of the given sizes, to which ranks are dealt in order.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_sizes(sizes: &[usize], ranks: &[Rank]) -> Result<Nodes> {
        let mut rest = ranks;
        let members = sizes.iter().map(|size| {
            let (node, others) = rest.split_at(rest.len().min(*size));
            rest = others;
            node.to_vec()
        });
        Nodes::new(members.collect())
    }

    /// Nodes of the given sizes, whose ranks are 0, 1, and so on.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn consecutive(sizes: &[usize]) -> Result<Nodes> {
        let ranks: Vec<Rank> = (0..sizes.iter().sum::<usize>() as u32).map(Rank).collect();
        Nodes::of_sizes(sizes, &ranks)
    }

    /// All ranks, node by node.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + '_ {
        self.members.iter().flatten().copied()
    }

    /// A rank's place among all ranks; `None` if it is in no node.
    pub fn index_of(&self, rank: Rank) -> Option<usize> {
        let (node, local) = self.place(rank)?;
        Some(self.members[..node].iter().map(Vec::len).sum::<usize>() + local)
    }

    /// A rank's place in its node; `None` if it is in none.
    pub fn local_of(&self, rank: Rank) -> Option<usize> {
        Some(self.place(rank)?.1)
    }

    /// Most ranks of a node.
    pub fn largest(&self) -> usize {
        self.members.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Most sources that one rank serves as their rail.
    pub fn most_served(&self) -> usize {
        self.most(|rank| self.served(rank))
    }

    /// The node of a rank; `None` if it is in none.
    pub fn node_of(&self, rank: Rank) -> Option<usize> {
        Some(self.place(rank)?.0)
    }

    fn place(&self, rank: Rank) -> Option<(usize, usize)> {
        self.places.get(rank.index()).copied().flatten()
    }

    /// The rail of `rank` on `node`.
    pub fn rail(&self, rank: Rank, node: usize) -> Option<Rank> {
        let (_, local) = self.place(rank)?;
        let members = self.members.get(node)?;
        Some(members[local % members.len()])
    }

    /// The ranks that `rank` posts to, node by node. The index in this list is the `LinkIdx`.
    pub fn targets(&self, direction: Direction, rank: Rank) -> Vec<Rank> {
        match direction {
            Direction::Dispatch | Direction::Weights | Direction::Barrier => self.rails(rank),
            Direction::Combine => self.served(rank),
        }
    }

    /// The ranks that post to `rank`, node by node. The index in this list is the `SourceIdx`.
    pub fn sources(&self, direction: Direction, rank: Rank) -> Vec<Rank> {
        match direction {
            Direction::Dispatch | Direction::Weights | Direction::Barrier => self.served(rank),
            Direction::Combine => self.rails(rank),
        }
    }

    /// The rails of `rank` on the other nodes.
    fn rails(&self, rank: Rank) -> Vec<Rank> {
        let own = self.node_of(rank);
        (0..self.members.len()).filter(|n| Some(*n) != own).filter_map(|n| self.rail(rank, n)).collect()
    }

    /// The ranks of other nodes whose rail `rank` is.
    fn served(&self, rank: Rank) -> Vec<Rank> {
        let Some(own) = self.node_of(rank) else { return Vec::new() };
        let others = self.members.iter().enumerate().filter(|(n, _)| *n != own).flat_map(|(_, ranks)| ranks);
        others.copied().filter(|other| self.rail(*other, own) == Some(rank)).collect()
    }

    /// The most entries that `list` has on any rank, so that all ranks can use the same strides.
    fn most(&self, list: impl Fn(Rank) -> Vec<Rank>) -> usize {
        self.members.iter().flatten().map(|rank| list(*rank).len()).max().unwrap_or(0)
    }
}

/// The shape of one direction's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageShape {
    /// Bytes that chunk 0 may hold: the head, and either headers of rows or rows.
    pub first_bytes: u32,
    /// Bytes of rows that any other chunk may hold.
    pub chunk_bytes: u32,
    /// Most chunks of one message; 0 for a direction that is not used.
    pub chunks: u16,
    /// From a message's start to its rows: headers of fewer rows leave a gap before them.
    pub rows_offset: u32,
}

impl MessageShape {
    /// Where the next chunk starts, after a chunk of `bytes` bytes at `offset`. Calls of one context may have rows of
    /// different sizes, so chunks of rows simply follow one another: all but the last hold as many rows as they can.
    pub fn next_offset(&self, chunk: ChunkIdx, offset: u64, bytes: u32) -> u64 {
        if chunk.0 == 0 { u64::from(bytes.max(self.rows_offset)) } else { offset + u64::from(bytes) }
    }

    /// Where a chunk starts in its slot, if all chunks before it are as large as they may be.
    pub fn chunk_offset(&self, chunk: ChunkIdx) -> u64 {
        let before = chunk.0.checked_sub(1);
        before.map_or(0, |chunks| u64::from(self.first_bytes) + u64::from(chunks) * u64::from(self.chunk_bytes))
    }

    /// The most bytes of a chunk.
    pub fn chunk_capacity(&self, chunk: ChunkIdx) -> u32 {
        if chunk.0 == 0 { self.first_bytes } else { self.chunk_bytes }
    }

    /// Bytes of one message's slot.
    pub fn slot_bytes(&self) -> u64 {
        self.chunk_offset(ChunkIdx(self.chunks)).next_multiple_of(SLOT_ALIGN)
    }
}

/// A NIC's share of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// From the chunk's start.
    pub offset: u32,
    /// May be 0; it is posted and counted all the same.
    pub bytes: u32,
}

/// NIC `nic`'s share of a chunk of `bytes` bytes: as even as multiples of 16 bytes allow; the last one may be odd.
pub fn shard(bytes: u32, nics: u8, nic: NicIdx) -> Shard {
    let units = u64::from(bytes.div_ceil(SHARD_UNIT));
    let nics = u64::from(nics.max(1));
    let edge = |n: u64| (units * n / nics * u64::from(SHARD_UNIT)).min(u64::from(bytes)) as u32;
    let offset = edge(u64::from(nic.0));
    Shard { offset, bytes: edge(u64::from(nic.0) + 1) - offset }
}

/// The most chunks a message may have so that a receive queue of `queue` entries holds everything that `peers` peers
/// can have under way: 4 (two epochs, two directions) for every chunk and one to spare.
pub fn most_chunks(queue: usize, peers: usize) -> usize {
    (queue / (4 * peers.max(1))).saturating_sub(1).min(MAX_CHUNKS)
}

/// The inputs of the wire's layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireInput {
    /// Ranks by node.
    pub nodes: Nodes,
    /// NICs of each rank.
    pub nics: u8,
    /// By direction.
    pub shapes: [MessageShape; DIRECTIONS],
    /// Where wire staging starts in the arena.
    pub staging_offset: u64,
    /// Where the wire receive buffer starts in the arena.
    pub recv_buffer_offset: u64,
}

/// A region or word array of one direction, by parity and slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Strides {
    /// Of the first slot of parity 0.
    pub base: u64,
    /// From parity 0 to parity 1.
    pub parity: u64,
    /// From slot to slot.
    pub slot: u64,
}

impl Strides {
    /// Of a slot in an epoch.
    pub fn at(&self, epoch: u64, slot: usize) -> u64 {
        self.base + (epoch & 1) * self.parity + slot as u64 * self.slot
    }
}

/// Every offset of the wire, the same on every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wire {
    input: WireInput,
    staging: [Strides; DIRECTIONS],
    recv_buffer: [Strides; DIRECTIONS],
    staging_bytes: u64,
    recv_buffer_bytes: u64,
    links: [usize; DIRECTIONS],
    sources: [usize; DIRECTIONS],
    words: [WordBases; DIRECTIONS],
    lengths: WordCounts,
}

/// First words of a direction in each array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct WordBases {
    doorbell: usize,
    per_link: usize,
    arrived: usize,
}

/// Lengths in words of the arrays that device and proxy share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WordCounts {
    /// `{epoch's low 32, bytes}`, by device for proxy.
    pub doorbells: usize,
    /// Chunks of the message, by device for proxy, before the doorbell of chunk 0; and a word of the device's own.
    pub chunks: usize,
    /// Arrivals, by proxy for device; and the epochs that the device's relay makes of them.
    pub arrived: usize,
    /// Epochs, by proxy for device.
    pub staging_free: usize,
    /// One more than the rank of the last lost peer, by proxy for device, 0 while none is; then a word for each rank.
    pub lost: usize,
}

impl Wire {
    /// Lays the wire out.
    ///
    /// # Errors
    /// `Config` if something does not fit the fields of an immediate or 64 bits; the error names it.
    pub fn new(input: WireInput) -> Result<Wire> {
        check(&input)?;
        let overflow = || {
            Error::config("max_tokens", "too large", "wire staging and receive buffer would overflow 64 bits; lower it")
        };
        let links = Direction::ALL.map(|d| input.nodes.most(|rank| input.nodes.targets(d, rank)));
        let sources = Direction::ALL.map(|d| input.nodes.most(|rank| input.nodes.sources(d, rank)));
        let (staging, end) = regions(&input.shapes, &links, input.staging_offset).ok_or_else(overflow)?;
        let staging_bytes = end - input.staging_offset;
        let (recv_buffer, end) = regions(&input.shapes, &sources, input.recv_buffer_offset).ok_or_else(overflow)?;
        let recv_buffer_bytes = end - input.recv_buffer_offset;
        let mut lengths = WordCounts { lost: 1 + input.nodes.world(), ..WordCounts::default() };
        let words = Direction::ALL.map(|d| {
            let bases = WordBases { doorbell: lengths.doorbells, per_link: lengths.chunks, arrived: lengths.arrived };
            let chunks = usize::from(input.shapes[d.index()].chunks);
            let per_link = if chunks == 0 { 0 } else { 2 * links[d.index()] };
            lengths.doorbells += per_link * chunks;
            lengths.chunks += per_link;
            lengths.staging_free += per_link;
            lengths.arrived += 2 * sources[d.index()] * chunks;
            bases
        });
        lengths.chunks += 1;
        Ok(Wire { input, staging, recv_buffer, staging_bytes, recv_buffer_bytes, links, sources, words, lengths })
    }

    /// The nodes, and so which ranks are linked.
    pub fn nodes(&self) -> &Nodes {
        &self.input.nodes
    }

    /// NICs of each rank.
    pub fn nics(&self) -> u8 {
        self.input.nics
    }

    /// The shape of a direction's messages.
    pub fn shape(&self, direction: Direction) -> MessageShape {
        self.input.shapes[direction.index()]
    }

    /// The ranks that `rank` posts to in a direction; none if the direction is not used.
    pub fn targets(&self, direction: Direction, rank: Rank) -> Vec<Rank> {
        if self.shape(direction).chunks == 0 { Vec::new() } else { self.nodes().targets(direction, rank) }
    }

    /// The ranks that post to `rank` in a direction; none if the direction is not used.
    pub fn sources(&self, direction: Direction, rank: Rank) -> Vec<Rank> {
        if self.shape(direction).chunks == 0 { Vec::new() } else { self.nodes().sources(direction, rank) }
    }

    /// Receives that `rank` needs on each of its NICs: from each source, two epochs of every direction may be under way
    /// or not polled yet, since the source begins X(e+2) only once this rank has all of X(e).
    pub fn receives(&self, rank: Rank) -> u64 {
        let of = |d: Direction| self.sources(d, rank).len() as u64 * u64::from(self.shape(d).chunks);
        2 * Direction::ALL.into_iter().map(of).sum::<u64>()
    }

    /// Bytes of the largest write: a NIC's share of a chunk.
    pub fn largest_write(&self) -> u32 {
        let chunks = self.input.shapes.iter().filter(|shape| shape.chunks > 0);
        let bytes = chunks.map(|shape| shape.first_bytes.max(if shape.chunks > 1 { shape.chunk_bytes } else { 0 }));
        let shards = |bytes| (0..self.nics()).map(move |nic| shard(bytes, self.nics(), NicIdx(nic)).bytes);
        bytes.flat_map(shards).max().unwrap_or(0)
    }

    /// Bytes of wire staging.
    pub fn staging_bytes(&self) -> u64 {
        self.staging_bytes
    }

    /// Bytes of the wire receive buffer.
    pub fn recv_buffer_bytes(&self) -> u64 {
        self.recv_buffer_bytes
    }

    /// Staging slots of a direction, by link.
    pub fn staging(&self, direction: Direction) -> Strides {
        self.staging[direction.index()]
    }

    /// Receive buffer slots of a direction, by source.
    pub fn recv_buffer(&self, direction: Direction) -> Strides {
        self.recv_buffer[direction.index()]
    }

    /// Where a message is packed in this rank's arena.
    pub fn staging_offset(&self, direction: Direction, epoch: u64, link: LinkIdx) -> u64 {
        self.staging(direction).at(epoch, link.index())
    }

    /// Where a message arrives in the receiver's arena.
    pub fn recv_buffer_offset(&self, direction: Direction, epoch: u64, source: SourceIdx) -> u64 {
        self.recv_buffer(direction).at(epoch, source.index())
    }

    /// Which of `target`'s receive buffer slots `source` writes; `None` if they are not linked in this direction.
    pub fn recv_buffer_slot(&self, direction: Direction, target: Rank, source: Rank) -> Option<SourceIdx> {
        let slot = self.sources(direction, target).iter().position(|rank| *rank == source)?;
        u16::try_from(slot).ok().map(SourceIdx)
    }

    /// Lengths of the shared arrays.
    pub fn word_counts(&self) -> WordCounts {
        self.lengths
    }

    /// Most links of any rank in a direction: the stride of words by link.
    pub fn links(&self, direction: Direction) -> usize {
        self.links[direction.index()]
    }

    /// Most sources of any rank in a direction: the stride of words by source.
    pub fn recv_buffers(&self, direction: Direction) -> usize {
        self.sources[direction.index()]
    }

    /// The doorbell of a chunk. Links are adjacent, because the proxy mostly watches chunk 0 of all of them.
    pub fn doorbell_word(&self, direction: Direction, epoch: u64, link: LinkIdx, chunk: ChunkIdx) -> usize {
        let d = direction.index();
        let row = (epoch & 1) as usize * usize::from(self.input.shapes[d].chunks) + chunk.index();
        self.words[d].doorbell + row * self.links[d] + link.index()
    }

    /// The word with the number of a message's chunks.
    pub fn chunks_word(&self, direction: Direction, epoch: u64, link: LinkIdx) -> usize {
        let d = direction.index();
        self.words[d].per_link + (epoch & 1) as usize * self.links[d] + link.index()
    }

    /// The word, among those of chunks, by which the device counts its signs of life.
    pub fn life_word(&self) -> usize {
        self.lengths.chunks - 1
    }

    /// The flag that a message's staging may be packed again.
    pub fn staging_free_word(&self, direction: Direction, epoch: u64, link: LinkIdx) -> usize {
        self.chunks_word(direction, epoch, link)
    }

    /// The word of an epoch's arrival number `place`, which holds an `arrival`: chunks are listed as they arrive, so
    /// that the device's relay finds arrivals of any source in one read.
    pub fn arrival_word(&self, direction: Direction, epoch: u64, place: u32) -> usize {
        let d = direction.index();
        let most = self.sources[d] * usize::from(self.input.shapes[d].chunks);
        self.words[d].arrived + (epoch & 1) as usize * most + place as usize
    }
}

/// Approximate bytes of rows per chunk: large enough that a write's fixed cost (below 1 us) is a small part of its
/// time at 50 GB/s, small enough that forwarding overlaps with it. Chosen with docs/simulate.md.
const CHUNK_BYTES: usize = 128 << 10;
/// The same for sums where there are several NICs. Several NICs are EFA's, whose writes are assumed to cost 0.3 us
/// each; and sums are not forwarded.
const SUMS_BYTES: usize = 640 << 10;

/// Default rows per chunk, for rows of `row_bytes` bytes.
pub fn rows_of_chunk(direction: Direction, row_bytes: usize, nics: u8) -> usize {
    let bytes = match direction {
        Direction::Combine if nics > 1 => SUMS_BYTES,
        _ => CHUNK_BYTES,
    };
    bytes.div_ceil(row_bytes.max(1))
}

/// Bits of an arrival below its epoch.
pub const ARRIVAL_BITS: u32 = raw::TY_ARRIVAL_CHUNK_BITS + raw::TY_ARRIVAL_SOURCE_BITS;

/// The word for a chunk that has arrived: epoch, source and chunk (layout.h).
pub fn arrival(epoch: u64, source: SourceIdx, chunk: ChunkIdx) -> u64 {
    epoch << ARRIVAL_BITS | u64::from(source.0) << raw::TY_ARRIVAL_CHUNK_BITS | u64::from(chunk.0)
}

const _: () = assert!(1 << raw::TY_ARRIVAL_CHUNK_BITS >= MAX_CHUNKS && 1 << raw::TY_ARRIVAL_SOURCE_BITS >= MAX_RANKS);

/// Slots of all directions, one after the other, and where they end.
fn regions(
    shapes: &[MessageShape; DIRECTIONS],
    slots: &[usize; DIRECTIONS],
    start: u64,
) -> Option<([Strides; DIRECTIONS], u64)> {
    let mut next = start;
    let mut all = [Strides::default(); DIRECTIONS];
    for ((strides, shape), slots) in all.iter_mut().zip(shapes).zip(slots) {
        if shape.chunks == 0 {
            continue;
        }
        let parity = shape.slot_bytes().checked_mul(*slots as u64)?;
        *strides = Strides { base: next, parity, slot: shape.slot_bytes() };
        next = next.checked_add(parity.checked_mul(2)?)?;
    }
    Some((all, next))
}

fn check(input: &WireInput) -> Result<()> {
    if input.nics == 0 {
        return Err(Error::config("nics", 0, "a rank of several nodes needs a NIC"));
    }
    for shape in &input.shapes {
        imm::check_counts(0, usize::from(shape.chunks), usize::from(input.nics), 0)?;
        if shape.chunks == 0 {
            continue;
        }
        for (name, bytes) in [("first_bytes", shape.first_bytes), ("chunk_bytes", shape.chunk_bytes)] {
            if bytes == 0 || !bytes.is_multiple_of(SHARD_UNIT) {
                return Err(Error::config(name, bytes, "must be a multiple of 16, and chunks not empty"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(sizes: &[u32]) -> Nodes {
        let mut next = 0;
        let members = sizes.iter().map(|size| {
            next += size;
            (next - size..next).map(Rank).collect()
        });
        Nodes::new(members.collect()).unwrap()
    }

    fn wire(sizes: &[u32], nics: u8) -> Wire {
        let shape = MessageShape { first_bytes: 48, chunk_bytes: 160, chunks: 3, rows_offset: 48 };
        let weights = MessageShape { first_bytes: 16, chunk_bytes: 16, chunks: 1, rows_offset: 16 };
        let shapes = [shape, MessageShape { chunks: 2, ..shape }, weights, weights];
        Wire::new(WireInput { nodes: nodes(sizes), nics, shapes, staging_offset: 256, recv_buffer_offset: 1 << 20 })
            .unwrap()
    }

    #[test]
    fn shards_cover_each_chunk_once_in_multiples_of_16() {
        for nics in 1..=4 {
            for bytes in 0..300 {
                let mut next = 0;
                for nic in 0..nics {
                    let shard = shard(bytes, nics, NicIdx(nic));
                    assert_eq!(shard.offset, next);
                    assert!(shard.offset.is_multiple_of(16) || shard.bytes == 0);
                    next += shard.bytes;
                    assert!(shard.bytes <= bytes.div_ceil(16).div_ceil(u32::from(nics)) * 16);
                }
                assert_eq!(next, bytes);
            }
        }
        assert_eq!(shard(u32::MAX, 1, NicIdx(0)).bytes, u32::MAX);
    }

    #[test]
    fn links_of_uneven_nodes_meet() {
        for sizes in [&[2, 2][..], &[4, 2], &[1, 3, 2], &[5, 1, 4, 2], &[1, 1], &[3]] {
            let nodes = nodes(sizes);
            let all: Vec<Rank> = nodes.members().iter().flatten().copied().collect();
            for direction in Direction::ALL {
                for a in &all {
                    for b in &all {
                        let there = nodes.targets(direction, *a).contains(b);
                        assert_eq!(there, nodes.sources(direction, *b).contains(a));
                        assert!(!there || nodes.node_of(*a) != nodes.node_of(*b));
                    }
                }
            }
            for rank in &all {
                assert_eq!(nodes.targets(Direction::Dispatch, *rank).len(), sizes.len() - 1);
                assert_eq!(nodes.targets(Direction::Dispatch, *rank), nodes.sources(Direction::Combine, *rank));
            }
        }
    }

    #[test]
    fn no_two_chunks_share_bytes_and_no_two_words_an_index() {
        let wire = wire(&[4, 2, 1], 2);
        let (mut staging, mut recv_buffer) = (Vec::new(), Vec::new());
        let (mut bells, mut counts, mut arrived) = (Vec::new(), Vec::new(), Vec::new());
        for d in Direction::ALL {
            let shape = wire.shape(d);
            for epoch in [6, 7] {
                for link in (0..wire.links[d.index()]).map(|l| LinkIdx(l as u16)) {
                    counts.push(wire.chunks_word(d, epoch, link));
                    for chunk in (0..shape.chunks).map(ChunkIdx) {
                        let start = wire.staging_offset(d, epoch, link) + shape.chunk_offset(chunk);
                        staging.push((start, shape.chunk_capacity(chunk)));
                        bells.push(wire.doorbell_word(d, epoch, link, chunk));
                    }
                }
                for source in (0..wire.sources[d.index()]).map(|s| SourceIdx(s as u16)) {
                    for chunk in (0..shape.chunks).map(ChunkIdx) {
                        let start = wire.recv_buffer_offset(d, epoch, source) + shape.chunk_offset(chunk);
                        recv_buffer.push((start, shape.chunk_capacity(chunk)));
                        let place = u32::from(source.0) * u32::from(shape.chunks) + u32::from(chunk.0);
                        arrived.push(wire.arrival_word(d, epoch, place));
                    }
                }
            }
        }
        counts.push(wire.life_word());
        for (mut spans, start, bytes) in
            [(staging, 256, wire.staging_bytes()), (recv_buffer, 1 << 20, wire.recv_buffer_bytes())]
        {
            spans.sort_unstable();
            assert!(spans.windows(2).all(|two| two[0].0 + u64::from(two[0].1) <= two[1].0));
            assert!(spans[0].0 >= start && spans.last().unwrap().0 < start + bytes);
        }
        let lengths = wire.word_counts();
        for (mut words, length) in [(bells, lengths.doorbells), (counts, lengths.chunks), (arrived, lengths.arrived)] {
            words.sort_unstable();
            assert_eq!(words, (0..length).collect::<Vec<_>>(), "words overlap, or leave gaps");
        }
    }

    #[test]
    fn what_an_immediate_cannot_name_is_refused_by_name() {
        let good = wire(&[2, 2], 1).input;
        let refused = |change: &dyn Fn(&mut WireInput), name: &str| {
            let mut input = good.clone();
            change(&mut input);
            let error = Wire::new(input).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        };
        refused(&|i| i.nics = 5, "nics");
        refused(&|i| i.nics = 0, "nics");
        refused(&|i| i.shapes[0].chunks = 1025, "chunks");
        refused(&|i| i.shapes[1].chunk_bytes = 8, "chunk_bytes");
        refused(&|i| i.shapes[1].first_bytes = 0, "first_bytes");
        refused(&|i| i.staging_offset = u64::MAX - 8, "max_tokens");
        assert!(Nodes::new(vec![vec![Rank(2048)]]).unwrap_err().to_string().contains("ranks"));
        assert!(Nodes::new(vec![vec![Rank(1)], vec![Rank(1)]]).is_err());
        assert!(Nodes::new(vec![vec![Rank(1)], vec![]]).is_err());
    }

    #[test]
    fn chunk_counts_fit_the_receive_queue() {
        assert_eq!(most_chunks(1024, 7), 35);
        assert_eq!(most_chunks(8, 7), 0);
        let shape = MessageShape { first_bytes: 64, chunk_bytes: 1024, chunks: 4, rows_offset: 64 };
        let offsets = [0, 1, 3].map(|chunk| shape.chunk_offset(ChunkIdx(chunk)));
        assert_eq!((offsets, shape.slot_bytes()), ([0, 64, 64 + 2 * 1024], 3200));
    }

    #[test]
    fn chunks_follow_one_another_behind_the_room_for_headers() {
        let headed = MessageShape { first_bytes: 96, chunk_bytes: 160, chunks: 3, rows_offset: 96 };
        assert_eq!([48, 96].map(|bytes| headed.next_offset(ChunkIdx(0), 0, bytes)), [96, 96]);
        assert_eq!(headed.next_offset(ChunkIdx(1), 96, 144), 240);
        let bare = MessageShape { first_bytes: 192, rows_offset: 32, ..headed };
        assert_eq!([32, 176, 192].map(|bytes| bare.next_offset(ChunkIdx(0), 0, bytes)), [32, 176, 192]);
        assert_eq!(bare.next_offset(ChunkIdx(2), 176, 160), 336);
    }
}
