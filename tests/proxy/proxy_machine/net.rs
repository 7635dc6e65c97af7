//! The virtual network: keeps what `transport/network/mod.rs` promises, and nothing more.
//!
//! A write is read from its source in up to three parts at any times before its completion, each part is placed at any
//! later time, and the immediate comes at any time after all parts. Completions come at any time after the last read.

use super::draw::{Case, Draw};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use tokenyard::Rank;
use tokenyard::internals::transport::network::WriteImm;
use tokenyard::internals::transport::network::imm::ImmValue;

/// Delivered to a rank, to be polled in any order.
#[derive(Debug, Clone)]
pub enum Arrival {
    Sent(usize),
    Failed(usize),
    Imm(usize),
    /// An immediate of another generation.
    Stray(ImmValue),
    /// A completion of a generation that was closed.
    Late {
        token: u64,
    },
    Message {
        peer: Rank,
        bytes: Vec<u8>,
    },
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Read { op: usize, part: usize },
    Place { op: usize, part: usize },
    Imm { op: usize },
    Complete { op: usize, failed: bool },
    Message { from: usize, to: usize, bytes: Vec<u8> },
}

/// A write, and how far it has come.
pub struct Op {
    pub from: usize,
    pub write: WriteImm,
    pub epoch: u64,
    data: Vec<u8>,
    parts: usize,
    pub completed: bool,
}

impl Op {
    pub fn to(&self) -> usize {
        self.write.peer.index()
    }

    fn span(&self, part: usize) -> std::ops::Range<usize> {
        let bytes = self.write.bytes as usize;
        part * bytes / self.parts..(part + 1) * bytes / self.parts
    }
}

/// The network's access to memory.
pub trait Memory {
    fn read(&mut self, op: &Op, range: std::ops::Range<usize>, into: &mut [u8]);
    fn place(&mut self, op: &Op, range: std::ops::Range<usize>, from: &[u8]);
}

pub struct Net {
    now: u64,
    order: u64,
    due: BinaryHeap<Reverse<(u64, u64, Due)>>,
    pub ops: Vec<Op>,
    /// Posted, and not polled as completed.
    pub under_way: usize,
    dead_fails: bool,
    /// By rank.
    pub recv_buffer: Vec<Vec<Arrival>>,
    pub dead: Vec<bool>,
    /// Under way by (rank, NIC) and (rank, peer).
    by_nic: Vec<[usize; 4]>,
    by_peer: Vec<Vec<usize>>,
    stopped_until: Vec<Vec<u64>>,
    pub delays: u64,
    pub stops: u64,
}

impl Net {
    pub fn new(ranks: usize, dead_fails: bool, now: u64) -> Net {
        Net {
            now,
            order: 0,
            due: BinaryHeap::new(),
            ops: Vec::new(),
            under_way: 0,
            dead_fails,
            recv_buffer: vec![Vec::new(); ranks],
            dead: vec![false; ranks],
            by_nic: vec![[0; 4]; ranks],
            by_peer: vec![vec![0; ranks]; ranks],
            stopped_until: vec![vec![0; ranks]; ranks],
            delays: 0,
            stops: 0,
        }
    }

    fn at(&mut self, time: u64, due: Due) {
        self.order += 1;
        self.due.push(Reverse((time, self.order, due)));
    }

    pub fn has_room(&self, case: &Case, from: usize, to: usize, nic: u8) -> bool {
        self.by_nic[from][usize::from(nic)] < case.nic_depth && self.by_peer[from][to] < case.peer_depth
    }

    pub fn post(&mut self, case: &Case, draw: &mut Draw, from: usize, write: WriteImm, epoch: u64, failed: bool) {
        let to = write.peer.index();
        self.under_way += 1;
        self.by_nic[from][usize::from(write.nic)] += 1;
        self.by_peer[from][to] += 1;
        if draw.once_in(case.stop_in) && !failed {
            self.stopped_until[from][to] = self.now + draw.within(20_000, 400_000);
            self.stops += 1;
        }
        let start = self.now.max(self.stopped_until[from][to]);
        let slow = draw.once_in(case.slow_in);
        self.delays += u64::from(slow);
        let most = if slow { 40 * case.delay_ns } else { case.delay_ns };
        let parts = draw.within(1, 3) as usize;
        let op = self.ops.len();
        let data = vec![0xee; write.bytes as usize];
        self.ops.push(Op { from, write, epoch, data, parts, completed: false });
        let (mut read_by, mut placed_by) = (start, start);
        // A failed write may have done any part of its work.
        let done = if failed { draw.within(0, parts as u64) as usize } else { parts };
        for part in 0..done {
            let read = start + draw.below(most);
            let place = read + draw.below(most);
            self.at(read, Due::Read { op, part });
            self.at(place, Due::Place { op, part });
            (read_by, placed_by) = (read_by.max(read), placed_by.max(place));
        }
        if !failed || (done == parts && draw.once_in(2)) {
            self.at(placed_by + draw.below(most), Due::Imm { op });
        }
        if !self.dead[to] || self.dead_fails {
            self.at(read_by + draw.below(most), Due::Complete { op, failed });
        }
    }

    pub fn send(&mut self, draw: &mut Draw, from: usize, to: usize, bytes: &[u8]) {
        let time = self.now + draw.below(50_000);
        self.at(time, Due::Message { from, to, bytes: bytes.to_vec() });
    }

    /// A rank's completion was polled: there is room again.
    pub fn polled(&mut self, op: usize) {
        let op = &mut self.ops[op];
        assert!(!op.completed, "the virtual network completed a write twice");
        op.completed = true;
        self.under_way -= 1;
        self.by_nic[op.from][usize::from(op.write.nic)] -= 1;
        self.by_peer[op.from][op.write.peer.index()] -= 1;
    }

    /// A rank stops: nothing of it moves any more.
    pub fn kill(&mut self, rank: usize) {
        self.dead[rank] = true;
    }

    pub fn next_time(&self) -> Option<u64> {
        self.due.peek().map(|Reverse((time, ..))| *time)
    }

    /// Does everything that is due. True if there was anything but messages.
    pub fn advance(&mut self, now: u64, memory: &mut impl Memory) -> bool {
        self.now = now;
        let mut moved = false;
        while self.next_time().is_some_and(|time| time <= now) {
            let Some(Reverse((_, _, due))) = self.due.pop() else { break };
            moved |= !matches!(due, Due::Message { .. });
            self.happen(due, memory);
        }
        moved
    }

    fn happen(&mut self, due: Due, memory: &mut impl Memory) {
        let op = match &due {
            Due::Read { op, .. } | Due::Place { op, .. } | Due::Imm { op } | Due::Complete { op, .. } => *op,
            Due::Message { from, to, bytes } => {
                if !self.dead[*from] && !self.dead[*to] {
                    let peer = Rank(*from as u32);
                    self.recv_buffer[*to].push(Arrival::Message { peer, bytes: bytes.clone() });
                }
                return;
            }
        };
        let (from, to) = (self.ops[op].from, self.ops[op].to());
        // Parts that a dead rank had not read are never sent; parts not placed are gone. Its peers' writes fail, or
        // hang.
        if self.dead[from] {
            return;
        }
        match due {
            Due::Read { op, part } => {
                let range = self.ops[op].span(part);
                let mut data = std::mem::take(&mut self.ops[op].data);
                memory.read(&self.ops[op], range.clone(), &mut data[range]);
                self.ops[op].data = data;
            }
            Due::Place { op, part } if !self.dead[to] => {
                let range = self.ops[op].span(part);
                memory.place(&self.ops[op], range.clone(), &self.ops[op].data[range]);
            }
            Due::Imm { op } if !self.dead[to] => self.recv_buffer[to].push(Arrival::Imm(op)),
            Due::Complete { op, failed } => {
                if failed || self.dead[to] {
                    if failed || self.dead_fails {
                        self.recv_buffer[from].push(Arrival::Failed(op));
                    }
                } else {
                    self.recv_buffer[from].push(Arrival::Sent(op));
                }
            }
            _ => {}
        }
    }
}
