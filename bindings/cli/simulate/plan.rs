//! How messages are cut, and the order in which things are done where there is a choice.
//!
//! Before the simulated data path; pure.

use std::ops::Range;

use tokenyard::proxy::wire::{Direction, Lane};
use tokenyard::transport::imm::MAX_CHUNKS;

use super::costs::Costs;
use super::workload::{HEAD_BYTES, Shape};
use crate::words::Word;

/// Bytes of dispatched rows in a chunk, about, unless rows are asked for; chosen by measurement in docs/simulate.md.
const CHUNK_BYTES: u64 = 128 << 10;

/// The order of things that a projection takes for granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// The one poller of a GPU has eight words in a trip, not one after the other.
    pub wide_poll: bool,
    /// Partial rows for other nodes are summed before those of the own node, and a rail adds up a chunk as soon as its
    /// partial rows are there, not behind all partial rows of its own.
    pub early_sums: bool,
    /// A rail builds META of all its sources at once, on blocks of their own, not source after source on one block for each
    /// rank of its node.
    pub spread_meta: bool,
}

impl Order {
    /// As designed.
    pub const DESIGN: Order = Order { wide_poll: true, early_sums: true, spread_meta: true };
}

/// An assumption that can be dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Assumption {
    WidePoll,
    EarlySums,
    SpreadMeta,
}

impl Word for Assumption {
    const ALL: &'static [Assumption] = &[Assumption::WidePoll, Assumption::EarlySums, Assumption::SpreadMeta];
    fn name(self) -> &'static str {
        match self {
            Assumption::WidePoll => "wide-poll",
            Assumption::EarlySums => "early-sums",
            Assumption::SpreadMeta => "spread-meta",
        }
    }
}

impl Assumption {
    pub fn drop_from(self, order: &mut Order) {
        match self {
            Assumption::WidePoll => order.wide_poll = false,
            Assumption::EarlySums => order.early_sums = false,
            Assumption::SpreadMeta => order.spread_meta = false,
        }
    }
}

/// Words that one read covers, where it is wide (kernels/wire.cuh: relay_batch).
const POLL_WORDS: u64 = 8;
/// Words of one source that the poller looks at in a turn.
const POLL_WINDOW: u64 = 8;

/// How messages are cut.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub shape: Shape,
    pub order: Order,
    /// Rows of a chunk, the same both ways.
    pub chunk_rows: usize,
}

impl Plan {
    /// For a shape, with so many rows a chunk if given.
    pub fn new(shape: Shape, order: Order, chunk_rows: Option<usize>) -> Plan {
        let rows = chunk_rows.unwrap_or(CHUNK_BYTES.div_ceil(shape.row_bytes()) as usize);
        let rows = rows.max(shape.tokens.div_ceil(MAX_CHUNKS)).clamp(1, shape.tokens.max(1));
        Plan { shape, order, chunk_rows: rows }
    }

    /// Chunks of a message of so many rows.
    pub fn chunks(&self, rows: usize) -> usize {
        rows.div_ceil(self.chunk_rows).max(1)
    }

    /// Rows of a chunk of a message.
    pub fn rows_in(&self, rows: usize, chunk: usize) -> Range<usize> {
        (chunk * self.chunk_rows).min(rows)..((chunk + 1) * self.chunk_rows).min(rows)
    }

    /// Bytes of a chunk of a message.
    pub fn chunk_bytes(&self, direction: Direction, rows: usize, chunk: usize) -> u32 {
        let head = if chunk == 0 { self.head_bytes(direction, rows) } else { 0 };
        u32::try_from(self.rows_in(rows, chunk).len() as u64 * self.row_bytes(direction) + head).unwrap_or(u32::MAX)
    }

    fn row_bytes(&self, direction: Direction) -> u64 {
        if direction == Direction::Dispatch { self.shape.row_bytes() } else { self.shape.sum_bytes() }
    }

    /// Head and headers of a message.
    fn head_bytes(&self, direction: Direction, rows: usize) -> u64 {
        let header = if direction == Direction::Dispatch { self.shape.header_bytes() } else { 0 };
        HEAD_BYTES + rows as u64 * header
    }

    /// The most that messages of a direction may hold.
    pub fn lane(&self, direction: Direction) -> Lane {
        let bytes = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        Lane {
            head_bytes: bytes(self.head_bytes(direction, self.shape.tokens)),
            chunk_bytes: bytes(self.chunk_rows as u64 * self.row_bytes(direction)),
            chunks: self.chunks(self.shape.tokens) as u16,
        }
    }

    /// From a flag in host memory to the device's blocks. In each round the poller looks at the next words of every
    /// source; half of a mean message's chunks have landed on the mean, and a flag is half a round late.
    pub fn relay_ns(&self, costs: &Costs) -> u64 {
        let Shape { nodes, tokens, preset, .. } = self.shape;
        let elsewhere = (1.0 - 1.0 / nodes as f64).powi(preset.top_k as i32);
        let chunks = self.chunks((tokens as f64 * (1.0 - elsewhere)) as usize) as u64;
        let words = (nodes as u64 - 1) * (chunks / 2).clamp(1, POLL_WINDOW);
        let reads = if self.order.wide_poll { words.div_ceil(POLL_WORDS) } else { words };
        // One read is in the crossing already.
        costs.relay_ns + costs.poll_ns * reads.saturating_sub(1) / 2
    }
}
