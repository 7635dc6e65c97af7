//! A model of the device side: what the kernels of a rank do with wire staging, wire receive buffer and flags, step by
//! step.
//!
//! It keeps the grammar and the reuse rule and nothing more; all steps without a fixed order are reordered.

use super::draw::Phase;
use super::world::{Message, Shared};
use tokenyard::Rank;
use tokenyard::internals::proxy::wire::{ChunkIdx, Direction, LinkIdx, SourceIdx, arrival};

/// Flags between ranks of a node, and what rails relay; by rank.
pub struct NodeFlags {
    /// The dispatch and the combine that the rank has begun.
    begun: [Vec<u64>; 2],
    /// By rank and source: the dispatch whose routing metadata a rail has relayed.
    meta: Vec<Vec<u64>>,
}

impl NodeFlags {
    pub fn new(ranks: usize, first: u64) -> NodeFlags {
        let none = vec![first - 1; ranks];
        NodeFlags { begun: [none.clone(), none.clone()], meta: vec![none; ranks] }
    }
}

struct Sending {
    direction: Direction,
    link: LinkIdx,
    to: usize,
    /// Chunks not rung yet, a bit each; `None` before the first.
    left: Option<u32>,
}

struct Receiving {
    direction: Direction,
    source: SourceIdx,
    from: usize,
    /// Chunks not seen yet, a bit each.
    left: u32,
}

/// One rank's stream of one context.
pub struct Stream {
    rank: usize,
    context: usize,
    at: usize,
    begun: bool,
    /// The last dispatch and combine sent.
    sent: [u64; 2],
    sending: Vec<Sending>,
    receiving: Vec<Receiving>,
    /// All that was received in this phase: to be found unchanged at its end.
    received: Vec<(Message, SourceIdx)>,
}

impl Stream {
    pub fn new(rank: usize, context: usize, first: u64) -> Stream {
        let (sending, receiving, received) = (Vec::new(), Vec::new(), Vec::new());
        Stream { rank, context, at: 0, begun: false, sent: [first - 1; 2], sending, receiving, received }
    }

    pub fn phase(&self, shared: &Shared) -> Option<Phase> {
        shared.plan.programs[self.context].get(self.at).copied()
    }

    pub fn describe(&self, shared: &Shared) -> String {
        let waits: Vec<_> = self.receiving.iter().map(|r| (r.direction, r.from, r.left)).collect();
        let sends: Vec<_> = self.sending.iter().map(|s| (s.direction, s.to, s.left)).collect();
        let (rank, context, phase) = (self.rank, self.context, self.phase(shared));
        format!(
            "rank {rank} context {context} at {} {phase:?} of {:?}: waits {waits:?} sends {sends:?}",
            self.at, self.sent
        )
    }

    /// Does one thing, if anything can be done.
    pub fn step(&mut self, shared: &mut Shared, flags: &mut NodeFlags) -> bool {
        let Some(phase) = self.phase(shared) else { return false };
        if !self.begun {
            self.begun = true;
            self.begin(phase, shared, flags);
            return true;
        }
        let moved = self.send_one(shared, flags) || self.receive_one(shared, flags);
        if !moved && self.is_over(phase, shared, flags) {
            self.end(phase, shared);
            return true;
        }
        moved
    }

    fn begin(&mut self, phase: Phase, shared: &Shared, flags: &mut NodeFlags) {
        match phase {
            Phase::DispatchSend => {
                self.sent[0] += 1;
                flags.begun[0][self.rank] = self.sent[0];
                self.send(Direction::Dispatch, shared);
            }
            Phase::DispatchReceive => self.receive(Direction::Dispatch, shared),
            Phase::CombineSend => {
                self.sent[1] += 1;
                flags.begun[1][self.rank] = self.sent[1];
                self.send(Direction::Weights, shared);
                self.receive(Direction::Weights, shared);
                self.send(Direction::Combine, shared);
            }
            Phase::CombineReceive => self.receive(Direction::Combine, shared),
        }
    }

    fn epoch(&self, direction: Direction) -> u64 {
        self.sent[usize::from(direction != Direction::Dispatch)]
    }

    fn send(&mut self, direction: Direction, shared: &Shared) {
        let targets = shared.wire(self.context).targets(direction, Rank(self.rank as u32));
        self.sending.extend(targets.iter().enumerate().map(|(link, to)| {
            let (link, to) = (LinkIdx(link as u16), to.index());
            Sending { direction, link, to, left: None }
        }));
    }

    fn receive(&mut self, direction: Direction, shared: &Shared) {
        let (wire, epoch) = (shared.wire(self.context), self.epoch(direction));
        for (source, from) in wire.sources(direction, Rank(self.rank as u32)).iter().enumerate() {
            let from = from.index();
            let message = Message { context: self.context, direction, from, to: self.rank, epoch };
            let left = (1 << message.chunks(wire)) - 1;
            self.receiving.push(Receiving { direction, source: SourceIdx(source as u16), from, left });
        }
    }

    /// Rings one chunk of any link that may go on, in any order of chunks.
    fn send_one(&mut self, shared: &mut Shared, flags: &NodeFlags) -> bool {
        if self.sending.is_empty() {
            return false;
        }
        let at = shared.draw.index(self.sending.len());
        let Sending { direction, link, to, left } = self.sending[at];
        let epoch = self.epoch(direction);
        let message = Message { context: self.context, direction, from: self.rank, to, epoch };
        let wire = &shared.plan.wires[self.context];
        let chunks = message.chunks(wire);
        let left = match left {
            Some(left) => left,
            None if self.may_start(message, link, shared, flags) => (1 << chunks) - 1,
            None => return false,
        };
        let chunk = pick(left, shared.draw.below(u64::from(left.count_ones())));
        let bytes = message.bytes(wire, chunk);
        let bell = wire.doorbell_word(direction, epoch, link, chunk);
        let count = wire.chunks_word(direction, epoch, link);
        shared.pack(message, link, chunk);
        let side = &mut shared.sides[self.context][self.rank];
        side.rung[direction.index()] = epoch;
        side.words.chunks[count] = u64::from(chunks);
        side.words.doorbells[bell] = epoch << 32 | u64::from(bytes);
        shared.tally(message).rung += 1;
        let left = left & !(1 << chunk.0);
        self.sending[at].left = Some(left);
        if left == 0 {
            self.sending.swap_remove(at);
        }
        true
    }

    /// Whether the staging may be packed again, and its inputs are there.
    fn may_start(&self, message: Message, link: LinkIdx, shared: &Shared, flags: &NodeFlags) -> bool {
        let wire = shared.wire(self.context);
        let Message { direction, epoch, .. } = message;
        let first = shared.plan.first_epochs[self.context];
        let free =
            shared.sides[self.context][self.rank].words.staging_free[wire.staging_free_word(direction, epoch, link)];
        if epoch >= first + 2 && free != epoch - 2 {
            return false;
        }
        if direction != Direction::Combine {
            return true;
        }
        // A rail adds up its node's partial rows. It waits for the flag of every rank of its node even where a token
        // needs none of its rows: among uneven nodes, the source's own rail there may be another rank than its target,
        // and nothing else notifies the source's peers that the source has ended the combine before.
        let weights = self.receiving.iter().any(|r| r.direction == Direction::Weights && r.from == message.to);
        !weights && self.mates(shared).all(|mate| flags.begun[1][mate] == epoch || flags.begun[1][mate] == epoch + 1)
    }

    fn mates(&self, shared: &Shared) -> impl Iterator<Item = usize> {
        let nodes = shared.wire(self.context).nodes();
        let node = nodes.node_of(Rank(self.rank as u32)).unwrap_or(0);
        nodes.members()[node].iter().map(|mate| mate.index())
    }

    /// Polls for one chunk of any source.
    fn receive_one(&mut self, shared: &mut Shared, flags: &mut NodeFlags) -> bool {
        if self.receiving.is_empty() {
            return false;
        }
        let at = shared.draw.index(self.receiving.len());
        let Receiving { direction, source, from, left } = self.receiving[at];
        let epoch = self.epoch(direction);
        let message = Message { context: self.context, direction, from, to: self.rank, epoch };
        let chunk = pick(left, shared.draw.below(u64::from(left.count_ones())));
        let words = &shared.sides[self.context][self.rank].words.arrived;
        let wire = shared.wire(self.context);
        let most = (wire.recv_buffers(direction) * usize::from(wire.shape(direction).chunks)) as u32;
        let mut arrivals = (0..most).map(|place| words[wire.arrival_word(direction, epoch, place)]);
        if !arrivals.any(|word| word == arrival(epoch, source, chunk)) {
            return false;
        }
        assert_eq!(
            shared.recv_buffer_differs(message, source, chunk),
            None,
            "{message:?} {chunk:?} overwritten before read"
        );
        if direction == Direction::Dispatch && chunk.0 == 0 {
            for mate in self.mates(shared) {
                flags.meta[mate][from] = epoch;
            }
        }
        let left = left & !(1 << chunk.0);
        self.receiving[at].left = left;
        if left == 0 {
            self.receiving.swap_remove(at);
            self.received.push((message, source));
        }
        true
    }

    /// Whether everything of this phase was done and seen, by this rank and by those it needs.
    fn is_over(&self, phase: Phase, shared: &Shared, flags: &NodeFlags) -> bool {
        if !self.sending.is_empty() || !self.receiving.is_empty() {
            return false;
        }
        let epoch = self.sent;
        match phase {
            Phase::DispatchSend | Phase::CombineSend => true,
            Phase::DispatchReceive => {
                let nodes = shared.wire(self.context).nodes();
                let all = nodes.members().iter().flatten().map(|rank| rank.index());
                let own: Vec<usize> = self.mates(shared).collect();
                let mut flags_of =
                    all.map(|r| if own.contains(&r) { flags.begun[0][r] } else { flags.meta[self.rank][r] });
                flags_of.all(|seen| seen == epoch[0] || seen == epoch[0] + 1)
            }
            Phase::CombineReceive => {
                self.mates(shared).all(|mate| flags.begun[1][mate] == epoch[1] || flags.begun[1][mate] == epoch[1] + 1)
            }
        }
    }

    fn end(&mut self, phase: Phase, shared: &mut Shared) {
        for (message, source) in self.received.drain(..) {
            for chunk in (0..message.chunks(shared.wire(self.context))).map(ChunkIdx) {
                let differs = shared.recv_buffer_differs(message, source, chunk);
                assert_eq!(differs, None, "{message:?} {chunk:?} overwritten while it was read");
            }
        }
        let consumed = &mut shared.sides[self.context][self.rank].consumed;
        match phase {
            Phase::DispatchSend => {}
            Phase::DispatchReceive => consumed[Direction::Dispatch.index()] = self.sent[0],
            Phase::CombineSend => consumed[Direction::Weights.index()] = self.sent[1],
            Phase::CombineReceive => consumed[Direction::Combine.index()] = self.sent[1],
        }
        self.at += 1;
        self.begun = false;
    }
}

/// The `number`th set bit.
fn pick(bits: u32, number: u64) -> ChunkIdx {
    let mut left = bits;
    for _ in 0..number {
        left &= left - 1;
    }
    ChunkIdx(left.trailing_zeros() as u16)
}
