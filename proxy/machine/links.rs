//! One open context: its links with their cursors, and its counters. Here a doorbell becomes a write (`Link::post`).
//!
//! Place in the data path: the machine's tables. Allocates in `new` alone.

use super::token::Token;
use super::watches::Watches;
use super::{Answer, BadDoorbell, ContextConfig, Flag, MachineStats, Outputs, Report, Watch};
use crate::base::{Error, Rank, Result};
use crate::proxy::counter::{Counted, ImmCounter};
use crate::proxy::wire::{self, ChunkIdx, ContextIdx, DIRECTIONS, Direction, LinkIdx, NicIdx, SourceIdx, Wire};
use crate::transport::network::imm::{ImmFields, ImmValue};
use crate::transport::network::{Place, RegionId, WriteImm};

/// Stands for "not linked" in a table of sources.
const NOBODY: u16 = u16::MAX;

/// Where a link stands; the diagram is in the machine's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinkState {
    Watching,
    /// NICs whose shard of the current chunk is not posted, a bit each.
    Blocked {
        left: u8,
    },
    Discarding,
    Stopped,
}

/// A message on its way, by the parity of its epoch.
#[derive(Debug, Clone, Copy, Default)]
struct UnderWay {
    epoch: u64,
    /// Posted and not completed.
    posts: u32,
    /// All chunks are posted (or given up), and the flag is not written.
    whole: bool,
}

/// One rank that this one posts to, in one direction.
#[derive(Debug)]
struct Link {
    direction: Direction,
    index: LinkIdx,
    peer: Rank,
    region: RegionId,
    /// This rank's receive buffer slot at the peer.
    slot: SourceIdx,
    state: LinkState,
    /// The next chunk to be rung, or the one that is blocked.
    epoch: u64,
    chunk: ChunkIdx,
    /// Where that chunk begins in its message.
    offset: u64,
    /// Of the message; known from chunk 0 on.
    chunks: u16,
    /// Of the blocked chunk.
    bytes: u32,
    under_way: [UnderWay; 2],
    /// By (parity, chunk): NICs whose shard is posted and not completed, a bit each.
    shards: Box<[u8]>,
}

/// Arrivals of one direction.
#[derive(Debug)]
struct Arrivals {
    /// By rank.
    source_of: Vec<u16>,
    counter: ImmCounter,
}

/// What all links of a context share.
#[derive(Debug)]
struct Common {
    rank: Rank,
    index: ContextIdx,
    serial: u32,
    generation: u8,
    region: RegionId,
    wire: Wire,
}

/// An open context.
#[derive(Debug)]
pub(super) struct Context {
    common: Common,
    links: Vec<Link>,
    /// By link: the doorbell that comes next. Beside the links, since every pass of the driver reads all of it.
    watches: Watches,
    /// By direction: its first link.
    first_link: [usize; DIRECTIONS],
    arrivals: [Arrivals; DIRECTIONS],
    /// All ranks that this one posts to, or that post to it.
    peers: Vec<Rank>,
}

/// The outcome of posting a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Posted,
    Full,
    Refused { peer: Rank },
}

impl Context {
    pub fn new(rank: Rank, index: ContextIdx, serial: u32, config_: &ContextConfig<'_>) -> Result<Context> {
        let ContextConfig { generation, first_epoch, wire, arenas } = *config_;
        if generation > 3 {
            return Err(Error::config("generation", generation, "is its low two bits"));
        }
        if first_epoch as u32 == 0 {
            return Err(Error::config(
                "first_epoch",
                first_epoch,
                "its low half would look like memory that was never written",
            ));
        }
        let (Some(region), true) = (arenas.get(rank.index()), wire.nodes().node_of(rank).is_some()) else {
            return Err(Error::config("rank", rank, "is in none of the context's nodes"));
        };
        let common = Common { rank, index, serial, generation, region: *region, wire: wire.clone() };
        let mut links = Vec::new();
        let first_link = Direction::ALL.map(|direction| {
            let first = links.len();
            let targets = wire.targets(direction, rank).into_iter().zip(0..);
            links.extend(targets.filter_map(|(peer, index)| {
                let slot = wire.recv_buffer_slot(direction, peer, rank)?;
                let region = *arenas.get(peer.index())?;
                let shards = vec![0; 2 * usize::from(wire.shape(direction).chunks)].into_boxed_slice();
                Some(Link {
                    direction,
                    index: LinkIdx(index),
                    peer,
                    region,
                    slot,
                    state: LinkState::Watching,
                    epoch: first_epoch,
                    chunk: ChunkIdx(0),
                    offset: 0,
                    chunks: 0,
                    bytes: 0,
                    under_way: [UnderWay::default(); 2],
                    shards,
                })
            }));
            first
        });
        let arrivals = Direction::ALL.map(|direction| {
            let sources = wire.sources(direction, rank);
            let mut source_of = vec![NOBODY; wire.nodes().world()];
            for (source, number) in sources.iter().zip(0..) {
                source_of[source.index()] = number;
            }
            let chunks = usize::from(wire.shape(direction).chunks);
            Arrivals { source_of, counter: ImmCounter::new(sources.len(), chunks, wire.nics(), first_epoch) }
        });
        let own = wire.nodes().node_of(rank);
        let begins = Direction::ALL.map(|direction| {
            links.iter().filter(|l| l.direction == direction && wire.nodes().node_of(l.peer) < own).count()
        });
        let watches = Watches::new(links.iter().map(|link| link.watch(&common)).collect(), &first_link, &begins);
        let sources = Direction::ALL.into_iter().flat_map(|direction| wire.sources(direction, rank));
        let mut peers: Vec<Rank> = links.iter().map(|link| link.peer).chain(sources).collect();
        peers.sort_unstable();
        peers.dedup();
        Ok(Context { common, links, watches, first_link, arrivals, peers })
    }

    pub fn generation(&self) -> u8 {
        self.common.generation
    }

    pub fn watches(&self) -> &Watches {
        &self.watches
    }

    /// Determines again whether a group is even.
    pub fn even_out(&mut self, group: usize) {
        self.watches.even_out(group);
    }

    /// All ranks that this one posts to, or that post to it.
    pub fn peers(&self) -> impl Iterator<Item = Rank> {
        self.peers.iter().copied()
    }

    pub fn is_blocked(&self, index: u16) -> bool {
        self.links.get(usize::from(index)).is_some_and(|link| matches!(link.state, LinkState::Blocked { .. }))
    }

    /// Whether no message is posted in part.
    pub fn is_settled(&self) -> bool {
        let between = |link: &Link| link.chunk.0 == 0 && !matches!(link.state, LinkState::Blocked { .. });
        self.links.iter().all(|link| between(link) || link.state == LinkState::Stopped)
    }

    /// Whether a peer owes a message: this rank has begun to send an epoch of which `peer` has sent nothing. In every
    /// epoch of a direction, all sources send a message.
    pub fn is_owed_by(&self, peer: Rank) -> bool {
        Direction::ALL.into_iter().zip(&self.arrivals).any(|(direction, arrivals)| {
            let begun = self.links.iter().filter(|link| link.direction == direction).filter_map(Link::begun).max();
            let source = arrivals.source_of.get(peer.index()).copied().filter(|source| *source != NOBODY);
            let (Some(epoch), Some(source)) = (begun, source) else { return false };
            !arrivals.counter.has_begun(SourceIdx(source), epoch)
        })
    }

    /// Takes a doorbell. True if there is now something to post.
    pub fn rung(&mut self, index: u16, bytes: u32, chunks: u32) -> std::result::Result<bool, Report> {
        let Some(link) = self.links.get_mut(usize::from(index)) else { return Ok(false) };
        if bytes == 0 || matches!(link.state, LinkState::Blocked { .. } | LinkState::Stopped) {
            return Ok(false);
        }
        // The link's watch changes only when the chunk is posted.
        link.take(&self.common, bytes, chunks).inspect_err(|_| {
            link.state = LinkState::Stopped;
            link.rewatch(usize::from(index), &self.common, &mut self.watches);
        })?;
        Ok(true)
    }

    /// Posts the shards of a chunk that are not posted yet, or gives the chunk up if its peer is lost.
    pub fn post(&mut self, index: u16, stats: &mut MachineStats, out: &mut impl Outputs) -> Outcome {
        let Some(link) = self.links.get_mut(usize::from(index)) else { return Outcome::Posted };
        let outcome = match link.state {
            LinkState::Watching => link.post(&self.common, all_nics(&self.common), stats, out),
            LinkState::Blocked { left } => link.post(&self.common, left, stats, out),
            LinkState::Discarding => {
                stats.discarded += 1;
                link.next_chunk(&self.common, out);
                Outcome::Posted
            }
            LinkState::Stopped => Outcome::Posted,
        };
        link.rewatch(usize::from(index), &self.common, &mut self.watches);
        outcome
    }

    /// Counts a completion and returns the peer of its post; `None` if no such shard is under way, so that no repeated
    /// or damaged token frees staging that the network still reads.
    pub fn completed(&mut self, token: &Token, out: &mut impl Outputs) -> Option<Rank> {
        let at = self.first_link[token.direction.index()] + token.link.index();
        let link = self.links.get_mut(at).filter(|l| l.direction == token.direction && l.index == token.link)?;
        let chunks = usize::from(self.common.wire.shape(token.direction).chunks);
        let shard = link.shards.get_mut(shard_index(token.parity, chunks, token.chunk)?)?;
        let bit = 1u8.checked_shl(u32::from(token.nic.0))? & *shard;
        if bit == 0 {
            return None;
        }
        *shard &= !bit;
        let under_way = &mut link.under_way[usize::from(token.parity & 1)];
        under_way.posts = under_way.posts.checked_sub(1)?;
        link.settle(&self.common, token.parity, out);
        Some(link.peer)
    }

    /// Counts an immediate; `None` if its source is not linked.
    pub fn count(&mut self, fields: &ImmFields, direction: Direction) -> Option<(SourceIdx, Counted)> {
        let arrivals = &mut self.arrivals[direction.index()];
        let source = *arrivals.source_of.get(fields.source.index())?;
        if source == NOBODY {
            return None;
        }
        let source = SourceIdx(source);
        let counted = arrivals.counter.count(source, fields.epoch, ChunkIdx(fields.chunk), NicIdx(fields.nic));
        Some((source, counted))
    }

    /// From now on takes the doorbells of the links to `peer`, which is lost or has closed the context, and posts
    /// nothing, so that their staging becomes free.
    pub fn discard(&mut self, peer: Rank, stats: &mut MachineStats, out: &mut impl Outputs) {
        for (at, link) in self.links.iter_mut().enumerate().filter(|(_, link)| link.peer == peer) {
            match link.state {
                LinkState::Watching => link.state = LinkState::Discarding,
                LinkState::Blocked { .. } => {
                    link.state = LinkState::Discarding;
                    stats.discarded += 1;
                    link.next_chunk(&self.common, out);
                }
                LinkState::Discarding | LinkState::Stopped => {}
            }
            link.rewatch(at, &self.common, &mut self.watches);
        }
    }
}

/// A bit for every NIC.
fn all_nics(common: &Common) -> u8 {
    ((1u16 << common.wire.nics()) - 1) as u8
}

fn parity(epoch: u64) -> usize {
    (epoch & 1) as usize
}

/// The place of a chunk in a link's `shards`; `None` beyond the direction's chunks.
fn shard_index(parity: u8, chunks: usize, chunk: ChunkIdx) -> Option<usize> {
    (chunk.index() < chunks).then_some(usize::from(parity & 1) * chunks + chunk.index())
}

impl Link {
    /// The doorbell that the driver should watch.
    fn watch(&self, common: &Common) -> Watch {
        let wire = &common.wire;
        let word = wire.doorbell_word(self.direction, self.epoch, self.index, self.chunk) as u32;
        let first = self.chunk.0 == 0;
        Watch {
            word,
            chunks_word: first.then(|| wire.chunks_word(self.direction, self.epoch, self.index) as u32),
            epoch: self.epoch as u32,
            asleep: matches!(self.state, LinkState::Blocked { .. } | LinkState::Stopped),
        }
    }

    /// Has the driver watch the link's next doorbell; `at` is the link's index among all links.
    fn rewatch(&self, at: usize, common: &Common, watches: &mut Watches) {
        watches.set(self.direction.index(), self.index.index(), at, self.watch(common));
    }

    /// The newest epoch that was rung, if any was.
    fn begun(&self) -> Option<u64> {
        let newest = self.under_way[0].epoch.max(self.under_way[1].epoch);
        (newest != 0).then_some(newest)
    }

    /// Checks a doorbell, and stores its values.
    fn take(&mut self, common: &Common, bytes: u32, chunks: u32) -> std::result::Result<(), Report> {
        let shape = common.wire.shape(self.direction);
        let before = self.under_way[parity(self.epoch)];
        let capacity = shape.chunk_capacity(self.chunk);
        if self.chunk.0 == 0 && (before.posts != 0 || before.whole) {
            return Err(self.bad(common, BadDoorbell::StagingInUse { posts: before.posts }));
        }
        if self.chunk.0 == 0 && (chunks == 0 || chunks > u32::from(shape.chunks)) {
            return Err(self.bad(common, BadDoorbell::Chunks { chunks, most: shape.chunks }));
        }
        if bytes > capacity {
            return Err(self.bad(common, BadDoorbell::Bytes { bytes, capacity }));
        }
        if self.chunk.0 == 0 {
            self.chunks = chunks as u16;
            self.under_way[parity(self.epoch)].epoch = self.epoch;
        }
        self.bytes = bytes;
        Ok(())
    }

    fn bad(&self, common: &Common, problem: BadDoorbell) -> Report {
        let &Link { direction, peer, epoch, chunk, .. } = self;
        Report::BadDoorbell { context: common.index, direction, peer, epoch, chunk, problem }
    }

    /// Posts the current chunk's shards of the NICs in `wanted`.
    fn post(&mut self, common: &Common, wanted: u8, stats: &mut MachineStats, out: &mut impl Outputs) -> Outcome {
        let source = common.wire.staging_offset(self.direction, self.epoch, self.index) + self.offset;
        let target = common.wire.recv_buffer_offset(self.direction, self.epoch, self.slot) + self.offset;
        let mut left = wanted;
        let mut outcome = Outcome::Posted;
        for nic in (0..common.wire.nics()).filter(|nic| wanted & 1 << nic != 0) {
            let answer = match self.write(common, source, target, NicIdx(nic)) {
                Some(write) => out.post(&write),
                None => Answer::Refused,
            };
            match answer {
                Answer::Accepted => {
                    left &= !(1 << nic);
                    stats.posts += 1;
                    self.mark(common, nic);
                    self.under_way[parity(self.epoch)].posts += 1;
                }
                Answer::Full => {
                    stats.full += 1;
                    outcome = Outcome::Full;
                }
                Answer::Refused => {
                    self.state = LinkState::Blocked { left };
                    return Outcome::Refused { peer: self.peer };
                }
            }
        }
        if left == 0 {
            self.state = LinkState::Watching;
            self.next_chunk(common, out);
        } else {
            self.state = LinkState::Blocked { left };
        }
        outcome
    }

    /// Notes that a shard of the current chunk is under way.
    fn mark(&mut self, common: &Common, nic: u8) {
        let chunks = usize::from(common.wire.shape(self.direction).chunks);
        let at = shard_index(parity(self.epoch) as u8, chunks, self.chunk);
        if let Some(shard) = at.and_then(|at| self.shards.get_mut(at)) {
            *shard |= 1 << nic;
        }
    }

    /// One NIC's shard. `None` if its immediate cannot be encoded, which the checks of `Wire` exclude.
    fn write(&self, common: &Common, source: u64, target: u64, nic: NicIdx) -> Option<WriteImm> {
        let shard = wire::shard(self.bytes, common.wire.nics(), nic);
        let fields = ImmFields {
            generation: common.generation,
            context: common.index.0,
            kind: self.direction.kind(),
            epoch: (self.epoch & 3) as u8,
            source: common.rank,
            chunk: self.chunk.0,
            nic: nic.0,
        };
        let token = Token {
            serial: common.serial,
            context: common.index,
            direction: self.direction,
            link: self.index,
            parity: (self.epoch & 1) as u8,
            chunk: self.chunk,
            nic,
        };
        Some(WriteImm {
            nic: nic.0,
            peer: self.peer,
            source: Place { region: common.region, offset: source + u64::from(shard.offset) },
            target: Place { region: self.region, offset: target + u64::from(shard.offset) },
            bytes: shard.bytes,
            imm: ImmValue::new(&fields).ok()?,
            token: token.pack(),
        })
    }

    /// The current chunk is done with: all posted, or given up.
    fn next_chunk(&mut self, common: &Common, out: &mut impl Outputs) {
        self.offset = common.wire.shape(self.direction).next_offset(self.chunk, self.offset, self.bytes);
        self.chunk.0 += 1;
        if self.chunk.0 < self.chunks {
            return;
        }
        let finished = parity(self.epoch);
        self.under_way[finished].whole = true;
        self.epoch = self.epoch.wrapping_add(1);
        (self.chunk, self.offset) = (ChunkIdx(0), 0);
        self.settle(common, finished as u8, out);
    }

    /// Frees a message's staging once all of it is posted and all posts completed.
    fn settle(&mut self, common: &Common, parity: u8, out: &mut impl Outputs) {
        let under_way = &mut self.under_way[usize::from(parity & 1)];
        if under_way.whole && under_way.posts == 0 {
            under_way.whole = false;
            let (direction, link, epoch) = (self.direction, self.index, under_way.epoch);
            out.flag(Flag::StagingFree { context: common.index, direction, link, epoch });
        }
    }
}
