//! Memory, what it should contain, and the checks made on every step of a machine.

use super::draw::{Case, Draw, Plan, mix};
use super::net::{Memory, Net, Op};
use std::collections::HashMap;
use std::ops::Range;
use tokenyard::Rank;
use tokenyard::internals::proxy::machine::{Answer, Flag, Outputs, Report};
use tokenyard::internals::proxy::wire::{
    ARRIVAL_BITS, ChunkIdx, ContextIdx, DIRECTIONS, Direction, LinkIdx, SourceIdx, Wire, arrival,
};
use tokenyard::internals::transport::network::{RegionId, WriteImm};

/// One message: everything of one epoch from one rank to another in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Message {
    pub context: usize,
    pub direction: Direction,
    pub from: usize,
    pub to: usize,
    pub epoch: u64,
}

impl Message {
    fn hash(&self, salt: u64) -> u64 {
        let place = (self.context << 20 | self.direction.index() << 16 | self.from << 8 | self.to) as u64;
        mix(mix(place ^ salt << 32) ^ self.epoch)
    }

    pub fn chunks(&self, wire: &Wire) -> u16 {
        let most = u64::from(wire.shape(self.direction).chunks);
        let hash = self.hash(1);
        if hash.is_multiple_of(3) { 1 } else { (1 + (hash >> 8) % most) as u16 }
    }

    pub fn bytes(&self, wire: &Wire, chunk: ChunkIdx) -> u32 {
        let capacity = u64::from(wire.shape(self.direction).chunk_capacity(chunk));
        let hash = self.hash(2 + u64::from(chunk.0));
        (if hash.is_multiple_of(4) { capacity } else { 1 + (hash >> 8) % capacity }) as u32
    }

    /// Where a chunk begins in the message: behind the chunks before it, and behind the room for headers.
    fn offset(&self, wire: &Wire, chunk: ChunkIdx) -> u64 {
        let rows = u64::from(wire.shape(self.direction).rows_offset);
        (0..chunk.0).fold(0, |at, before| {
            let end = at + u64::from(self.bytes(wire, ChunkIdx(before)));
            if before == 0 { end.max(rows) } else { end }
        })
    }

    fn content(&self, chunk: ChunkIdx) -> impl Fn(usize) -> u8 + use<> {
        let hash = self.hash(1000 + u64::from(chunk.0));
        move |at| (hash.rotate_left((at % 64) as u32) as u8).wrapping_add(at as u8)
    }
}

/// The words that a device and its proxy share, by context.
pub struct Words {
    pub doorbells: Vec<u64>,
    pub chunks: Vec<u64>,
    pub arrived: Vec<u64>,
    pub staging_free: Vec<u64>,
}

/// How far a message is.
#[derive(Debug, Default, Clone, Copy)]
pub struct Tally {
    /// Rung by the device.
    pub rung: u16,
    pub posted: usize,
    /// Completions polled by the sender.
    pub completed: usize,
    pub arrived: u16,
    pub freed: bool,
    /// By chunk: immediates polled by the receiver.
    pub shards: [u8; 4],
}

/// One rank's side of one context.
pub struct Side {
    pub arena: Vec<u8>,
    pub words: Words,
    /// By direction: the newest epoch that the device has consumed in full, and the newest rung.
    pub consumed: [u64; DIRECTIONS],
    pub rung: [u64; DIRECTIONS],
}

/// The state that all ranks of a world share.
pub struct Shared {
    pub case: Case,
    pub plan: Plan,
    pub draw: Draw,
    pub now: u64,
    pub posts: u64,
    /// By context and rank.
    pub sides: Vec<Vec<Side>>,
    pub tallies: HashMap<Message, Tally>,
    pub reports: Vec<(usize, u64, Report)>,
    pub fail_at: Option<u64>,
    /// The write that failed.
    pub failed: Option<(usize, usize)>,
    pub full: u64,
}

/// The number of a rank's arena, different on every rank.
pub fn region(context: usize, rank: usize) -> RegionId {
    RegionId((context << 8 | rank) as u16)
}

impl Shared {
    pub fn new(case: Case, plan: Plan, draw: Draw) -> Shared {
        let sides = plan.wires.iter().zip(&plan.first_epochs).map(|(wire, first)| {
            let counts = wire.word_counts();
            let side = |_| Side {
                arena: vec![0xa5; (1 << 15) + wire.recv_buffer_bytes() as usize],
                words: Words {
                    doorbells: vec![0; counts.doorbells],
                    chunks: vec![0; counts.chunks],
                    arrived: vec![0; counts.arrived],
                    staging_free: vec![0; counts.staging_free],
                },
                consumed: [first - 1; DIRECTIONS],
                rung: [first - 1; DIRECTIONS],
            };
            assert!(wire.staging_bytes() + 256 <= 1 << 15);
            (0..case.ranks).map(side).collect()
        });
        let sides = sides.collect();
        Shared {
            case,
            plan,
            draw,
            now: 0,
            posts: 0,
            sides,
            tallies: HashMap::new(),
            reports: Vec::new(),
            fail_at: None,
            failed: None,
            full: 0,
        }
    }

    pub fn wire(&self, context: usize) -> &Wire {
        &self.plan.wires[context]
    }

    pub fn tally(&mut self, message: Message) -> &mut Tally {
        self.tallies.entry(message).or_default()
    }

    /// The device packs a chunk. Nothing may still read what lay there before.
    pub fn pack(&mut self, message: Message, link: LinkIdx, chunk: ChunkIdx) {
        let before = Message { epoch: message.epoch.wrapping_sub(2), ..message };
        let old = self.tallies.get(&before).copied().unwrap_or_default();
        assert_eq!(old.posted, old.completed, "{message:?} is packed over {before:?}, which is under way: {old:?}");
        let wire = &self.plan.wires[message.context];
        let start = wire.staging_offset(message.direction, message.epoch, link);
        let offset = (start + message.offset(wire, chunk)) as usize;
        let content = message.content(chunk);
        let arena = &mut self.sides[message.context][message.from].arena;
        for at in 0..message.bytes(wire, chunk) as usize {
            arena[offset + at] = content(at);
        }
    }

    /// Whether a chunk is in its receiver's receive buffer, every byte of it; answers the first wrong byte.
    pub fn recv_buffer_differs(&self, message: Message, source: SourceIdx, chunk: ChunkIdx) -> Option<usize> {
        let wire = self.wire(message.context);
        let start = wire.recv_buffer_offset(message.direction, message.epoch, source);
        let offset = (start + message.offset(wire, chunk)) as usize;
        let content = message.content(chunk);
        let arena = &self.sides[message.context][message.to].arena;
        (0..message.bytes(wire, chunk) as usize).find(|at| arena[offset + at] != content(*at))
    }

    /// The message that a write belongs to: its epoch is one of the last two that were rung.
    pub fn message_of(&self, from: usize, write: &WriteImm) -> Message {
        let Some(tokenyard::internals::transport::network::imm::Decoded::Own(fields)) = write.imm.decode() else {
            panic!("{:?} does not decode", write.imm);
        };
        let (context, to) = (usize::from(fields.context), write.peer.index());
        let direction = Direction::of(fields.kind).unwrap();
        assert_eq!(fields.source.index(), from, "a write names another rank as its source");
        let rung = self.sides[context][from].rung[direction.index()];
        let epoch = rung.wrapping_sub(rung.wrapping_sub(u64::from(fields.epoch)) & 3);
        assert!(rung.wrapping_sub(epoch) <= 1, "rank {from} posts for an epoch that is neither {rung} nor before");
        Message { context, direction, from, to, epoch }
    }

    fn arrived(
        &mut self,
        rank: usize,
        context: ContextIdx,
        direction: Direction,
        at: (SourceIdx, ChunkIdx),
        epoch: u64,
        place: u32,
    ) {
        let (source, chunk) = at;
        let wire = self.wire(context.index());
        let from = wire.sources(direction, Rank(rank as u32))[source.index()].index();
        let message = Message { context: context.index(), direction, from, to: rank, epoch };
        assert!(chunk.0 < message.chunks(wire), "{message:?} has no chunk {chunk:?} that could arrive");
        let nics = wire.nics();
        let words = |place: u32| wire.arrival_word(direction, epoch, place);
        let (word, before) = (words(place), place.checked_sub(1).map(words));
        let shards = self.tally(message).shards[chunk.index()];
        assert_eq!(shards, nics, "{message:?} {chunk:?} flagged after {shards} of {nics} shards");
        let differs = self.recv_buffer_differs(message, source, chunk);
        assert_eq!(differs, None, "{message:?} {chunk:?} flagged before that byte arrived");
        self.tally(message).arrived += 1;
        let words = &mut self.sides[context.index()][rank].words.arrived;
        let epoch_at = |word: usize| words[word] >> ARRIVAL_BITS;
        assert_ne!(epoch_at(word), epoch, "{message:?} {chunk:?} flagged where another of its epoch stands");
        assert!(before.is_none_or(|before| epoch_at(before) == epoch), "{message:?} {chunk:?} flagged behind a gap");
        words[word] = arrival(epoch, source, chunk);
    }

    fn freed(&mut self, rank: usize, context: ContextIdx, direction: Direction, link: LinkIdx, epoch: u64) {
        let wire = self.wire(context.index());
        let to = wire.targets(direction, Rank(rank as u32))[link.index()].index();
        let message = Message { context: context.index(), direction, from: rank, to, epoch };
        let (chunks, nics) = (message.chunks(wire), usize::from(wire.nics()));
        let word = wire.staging_free_word(direction, epoch, link);
        let lost = self.lost(rank, to);
        let tally = self.tally(message);
        assert!(!tally.freed, "{message:?} freed twice");
        assert_eq!(tally.rung, chunks, "{message:?} freed before it was rung");
        assert_eq!(tally.posted, tally.completed, "{message:?} freed with writes under way");
        assert!(
            lost || tally.posted == usize::from(chunks) * nics,
            "{message:?} freed before it was posted: {tally:?}"
        );
        tally.freed = true;
        self.sides[context.index()][rank].words.staging_free[word] = epoch;
    }

    /// Whether `rank` has reported the loss of `peer`.
    pub fn lost(&self, rank: usize, peer: usize) -> bool {
        let names = |r: &Report| matches!(r, Report::PeerLost { peer: p, .. } if p.index() == peer);
        self.reports.iter().any(|(who, _, report)| *who == rank && names(report))
    }
}

impl Memory for Shared {
    fn read(&mut self, op: &Op, range: Range<usize>, into: &mut [u8]) {
        let context = usize::from(op.write.source.region.0 >> 8);
        let start = op.write.source.offset as usize;
        into.copy_from_slice(&self.sides[context][op.from].arena[start + range.start..start + range.end]);
    }

    fn place(&mut self, op: &Op, range: Range<usize>, from: &[u8]) {
        let context = usize::from(op.write.target.region.0 >> 8);
        let message = self.message_of_op(op);
        let side = &mut self.sides[context][op.to()];
        let consumed = side.consumed[message.direction.index()];
        let behind = op.epoch.wrapping_sub(consumed);
        assert!((1..=2).contains(&behind), "{message:?} written into a slot that is unread: {consumed} is consumed");
        let start = op.write.target.offset as usize;
        side.arena[start + range.start..start + range.end].copy_from_slice(from);
    }
}

impl Shared {
    pub fn message_of_op(&self, op: &Op) -> Message {
        let (context, direction) = (usize::from(op.write.imm.context()), op.write.imm.kind().and_then(Direction::of));
        Message { context, direction: direction.unwrap(), from: op.from, to: op.to(), epoch: op.epoch }
    }
}

/// The outputs of one rank's machine.
pub struct Hands<'a> {
    pub rank: usize,
    pub shared: &'a mut Shared,
    pub net: &'a mut Net,
}

impl Outputs for Hands<'_> {
    fn post(&mut self, write: &WriteImm) -> Answer {
        let (from, to) = (self.rank, write.peer.index());
        let context = usize::from(write.imm.context());
        assert_eq!(write.source.region, region(context, from), "from another region than this rank's arena");
        assert_eq!(write.target.region, region(context, to), "into another region than the peer's arena");
        assert!(!self.shared.lost(from, to), "rank {from} posts to rank {to}, which it lost");
        if !self.net.has_room(&self.shared.case, from, to, write.nic) {
            self.shared.full += 1;
            return Answer::Full;
        }
        let message = self.shared.message_of(from, write);
        self.shared.tally(message).posted += 1;
        let failed = self.shared.fail_at == Some(self.shared.posts);
        if failed {
            self.shared.failed = Some((from, to));
        }
        self.shared.posts += 1;
        let shared = &mut *self.shared;
        self.net.post(&shared.case, &mut shared.draw, from, *write, message.epoch, failed);
        Answer::Accepted
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Answer {
        assert!(!self.shared.lost(self.rank, peer.index()), "rank {} heartbeats for a peer it lost", self.rank);
        if self.shared.draw.once_in(8) {
            return Answer::Full;
        }
        self.net.send(&mut self.shared.draw, self.rank, peer.index(), message);
        Answer::Accepted
    }

    fn flag(&mut self, flag: Flag) {
        match flag {
            Flag::Arrived { context, direction, source, chunk, epoch, place } => {
                self.shared.arrived(self.rank, context, direction, (source, chunk), epoch, place);
            }
            // Nobody here gives signs.
            Flag::Life { .. } => panic!("a sign of life"),
            Flag::StagingFree { context, direction, link, epoch } => {
                self.shared.freed(self.rank, context, direction, link, epoch);
            }
        }
    }

    fn report(&mut self, report: Report) {
        self.shared.reports.push((self.rank, self.shared.now, report));
    }
}
