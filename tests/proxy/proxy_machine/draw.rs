//! Seeded numbers, and the case that a seed draws.

use tokenyard::Rank;
use tokenyard::internals::proxy::wire::{DIRECTIONS, Direction, MessageShape, Nodes, Wire, WireInput};

/// splitmix64.
pub struct Draw(pub u64);

pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Draw {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    DispatchSend,
    DispatchReceive,
    CombineSend,
    CombineReceive,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// The write of this number fails.
    Write(u64),
    /// A rank stops when so many writes were posted.
    Death {
        at: u64,
        rank: usize,
    },
}

/// One generation of a drawn world.
#[derive(Clone)]
pub struct Plan {
    pub wires: Vec<Wire>,
    pub generation: u8,
    pub first_epochs: Vec<u64>,
    /// By context, the same on all ranks.
    pub programs: Vec<Vec<Phase>>,
}

#[derive(Clone)]
pub struct Case {
    pub ranks: usize,
    pub plan: Plan,
    pub fault: Fault,
    /// Writes to a dead rank fail after a while, or never complete.
    pub dead_fails: bool,
    /// Most writes under way on one NIC, and to one peer.
    pub nic_depth: usize,
    pub peer_depth: usize,
    /// Ordinary delay of each step of a write, up to.
    pub delay_ns: u64,
    /// One write in so many takes 40 times as long.
    pub slow_in: u64,
    /// One post in so many finds its link stopped for a while.
    pub stop_in: u64,
    /// One poll in so many is skipped: by rank, device and proxy.
    pub lazy: Vec<(u64, u64)>,
    /// A rank leaves in good order at the end.
    pub leave: bool,
    pub second_generation: bool,
}

/// A program that obeys the grammar: X's receive before X's next send, and a combine for a dispatch that was received.
fn program(draw: &mut Draw, length: usize) -> Vec<Phase> {
    let (mut ds, mut dr, mut cs, mut cr) = (0, 0, 0, 0);
    let mut phases = Vec::new();
    while phases.len() < length || ds != dr || cs != cr {
        let may = [
            (ds == dr && phases.len() < length, Phase::DispatchSend),
            (dr < ds, Phase::DispatchReceive),
            (cs == cr && cs < dr && phases.len() < length, Phase::CombineSend),
            (cr < cs, Phase::CombineReceive),
        ];
        let may: Vec<Phase> = may.into_iter().filter(|(may, _)| *may).map(|(_, phase)| phase).collect();
        let phase = may[draw.index(may.len())];
        match phase {
            Phase::DispatchSend => ds += 1,
            Phase::DispatchReceive => dr += 1,
            Phase::CombineSend => cs += 1,
            Phase::CombineReceive => cr += 1,
        }
        phases.push(phase);
    }
    phases
}

fn shape(draw: &mut Draw) -> MessageShape {
    let chunks = draw.within(1, 4) as u16;
    let (first, chunk_bytes) = (draw.within(1, 9), 16 * draw.within(1, 6) as u32);
    let rows_offset = 16 * draw.within(1, first) as u32;
    MessageShape { first_bytes: 16 * first as u32, chunk_bytes, chunks, rows_offset }
}

pub fn plan(draw: &mut Draw, members: &[Vec<Rank>], generation: u8) -> Plan {
    let contexts = if draw.once_in(3) { draw.within(2, 4) as usize } else { 1 };
    let nics = draw.within(1, 4) as u8;
    let near_wrap = [1, 2, 3, 1 << 33, u64::from(u32::MAX) - 1, u64::from(u32::MAX) - 3];
    let mut plan = Plan { wires: vec![], generation, first_epochs: vec![], programs: vec![] };
    for _ in 0..contexts {
        let mut shapes: [MessageShape; DIRECTIONS] = [shape(draw), shape(draw), shape(draw), shape(draw)];
        if draw.once_in(2) {
            shapes[Direction::Weights.index()].chunks = 0;
        }
        let first = near_wrap[draw.index(near_wrap.len())];
        plan.first_epochs.push(if first as u32 == 0 { first + 1 } else { first });
        let length = draw.within(12, 40) as usize / contexts.min(2);
        plan.programs.push(program(draw, length));
        let nodes = Nodes::new(members.to_vec()).unwrap();
        let (staging_offset, recv_buffer_offset) = (64 * draw.below(3), 1 << 15);
        plan.wires.push(Wire::new(WireInput { nodes, nics, shapes, staging_offset, recv_buffer_offset }).unwrap());
    }
    plan
}

impl Case {
    pub fn new(draw: &mut Draw) -> Case {
        let nodes = draw.within(1, 4) as usize;
        let ranks = draw.within(nodes as u64, 12) as usize;
        let mut sizes = vec![1; nodes];
        if ranks.is_multiple_of(nodes) && draw.once_in(2) {
            sizes.fill(ranks / nodes);
        }
        while sizes.iter().sum::<usize>() < ranks {
            sizes[draw.index(nodes)] += 1;
        }
        let mut next = 0;
        let members = sizes.iter().map(|size| {
            next += size;
            (next - size..next).map(|rank| Rank(rank as u32)).collect()
        });
        let members: Vec<Vec<Rank>> = members.collect();
        let generation = draw.below(4) as u8;
        let plan = plan(draw, &members, generation);
        let fault = match draw.below(4) {
            0 => Fault::Write(draw.below(300)),
            1 => Fault::Death { at: draw.below(300), rank: draw.index(ranks) },
            _ => Fault::None,
        };
        let lazy = (0..ranks).map(|_| if draw.once_in(3) { (draw.within(1, 12), draw.within(1, 12)) } else { (2, 2) });
        Case {
            lazy: lazy.collect(),
            ranks,
            plan,
            fault,
            dead_fails: draw.once_in(2),
            nic_depth: if draw.once_in(2) { draw.within(1, 6) as usize } else { 64 },
            peer_depth: if draw.once_in(2) { draw.within(1, 4) as usize } else { 64 },
            delay_ns: draw.within(1, 3000),
            slow_in: draw.within(4, 60),
            stop_in: draw.within(40, 400),
            leave: draw.once_in(4),
            second_generation: draw.once_in(3),
        }
    }
}
