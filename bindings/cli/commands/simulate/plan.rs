//! How messages are cut, and the order in which things are done where there is a choice.
//!
//! Before the simulated data path; pure.

use std::ops::Range;

use serde::Serialize;
use tokenyard::internals::proxy::wire::{Direction, Lane, rows_of_chunk};
use tokenyard::internals::transport::network::imm::MAX_CHUNKS;

use super::costs::Costs;
use super::workload::{HEAD_BYTES, Shape};
use crate::cli::cases::words::Assumption;

/// The order of things that a projection takes for granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// The proxy lists what has landed, and the one poller of a GPU reads on in the list; it need not look at the next
    /// words of every source, eight in a trip.
    pub landing_list: bool,
    /// Headers go ahead of the rows, in a chunk of their own.
    pub meta_ahead: bool,
    /// Partial rows for other nodes are summed before those of the own node, and a rail adds up a chunk as soon as its
    /// partial rows are there, not behind all partial rows of its own.
    pub early_sums: bool,
    /// A rail builds META of all its sources at once, on blocks of their own, not source after source on one block for
    /// each rank of its node.
    pub spread_meta: bool,
}

impl Order {
    /// As designed.
    pub const DESIGN: Order = Order { landing_list: true, meta_ahead: true, early_sums: true, spread_meta: true };

    /// Takes this for granted no longer.
    pub fn give_up(&mut self, assumption: Assumption) {
        match assumption {
            Assumption::LandingList => self.landing_list = false,
            Assumption::MetaAhead => self.meta_ahead = false,
            Assumption::EarlySums => self.early_sums = false,
            Assumption::SpreadMeta => self.spread_meta = false,
        }
    }
}

/// Words that one read of the poller covers (kernels/common/wire.cuh: relay_batch).
const POLL_WORDS: u64 = 8;

/// Something of each way.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Pair<T> {
    pub dispatch: T,
    pub combine: T,
}

/// How messages are cut.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub shape: Shape,
    pub order: Order,
    /// Rows of a chunk.
    pub chunk_rows: Pair<usize>,
}

impl Plan {
    /// For a shape and so many NICs a rank, with so many rows a chunk if given.
    pub fn new(shape: Shape, nics: u8, order: Order, chunk_rows: Option<usize>) -> Plan {
        let rows = |direction, row_bytes| {
            let rows = chunk_rows.unwrap_or_else(|| rows_of_chunk(direction, row_bytes as usize, nics));
            rows.max(shape.tokens.div_ceil(MAX_CHUNKS - 1)).clamp(1, shape.tokens.max(1))
        };
        let dispatch = rows(Direction::Dispatch, shape.row_bytes());
        let combine = rows(Direction::Combine, shape.sum_bytes());
        Plan { shape, order, chunk_rows: Pair { dispatch, combine } }
    }

    fn chunk_rows(&self, direction: Direction) -> usize {
        if direction == Direction::Dispatch { self.chunk_rows.dispatch } else { self.chunk_rows.combine }
    }

    /// Chunks before the rows: headers have one to themselves, if that is how it is done.
    fn before_rows(&self, direction: Direction) -> usize {
        usize::from(direction == Direction::Dispatch && self.order.meta_ahead)
    }

    /// Chunks of a message of so many rows.
    pub fn chunks(&self, direction: Direction, rows: usize) -> usize {
        let with_rows = rows.div_ceil(self.chunk_rows(direction));
        (self.before_rows(direction) + with_rows).max(1)
    }

    /// Rows of a chunk of a message.
    pub fn rows_in(&self, direction: Direction, rows: usize, chunk: usize) -> Range<usize> {
        let before =
            |chunk: usize| (chunk.saturating_sub(self.before_rows(direction)) * self.chunk_rows(direction)).min(rows);
        before(chunk)..before(chunk + 1)
    }

    /// Bytes of a chunk of a message.
    pub fn chunk_bytes(&self, direction: Direction, rows: usize, chunk: usize) -> u32 {
        let head = if chunk == 0 { self.head_bytes(direction, rows) } else { 0 };
        let here = self.rows_in(direction, rows, chunk).len() as u64;
        u32::try_from(here * self.row_bytes(direction) + head).unwrap_or(u32::MAX)
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
        let chunk_bytes = bytes(self.chunk_rows(direction) as u64 * self.row_bytes(direction));
        let rows_first = if self.before_rows(direction) == 0 { chunk_bytes } else { 0 };
        Lane {
            first_bytes: bytes(self.head_bytes(direction, self.shape.tokens)).saturating_add(rows_first),
            chunk_bytes,
            chunks: self.chunks(direction, self.shape.tokens) as u16,
        }
    }

    /// From a landing in host memory to the device's blocks. The poller reads on in one list of all sources; without,
    /// it looks at the next words of every source in each round, of which half of a mean message's have landed on the
    /// mean, and finds a word half a round late.
    pub fn relay_ns(&self, direction: Direction, costs: &Costs) -> u64 {
        let Shape { nodes, tokens, preset, .. } = self.shape;
        if self.order.landing_list {
            return costs.relay_ns;
        }
        let elsewhere = (1.0 - 1.0 / nodes as f64).powi(preset.top_k as i32);
        let chunks = self.chunks(direction, (tokens as f64 * (1.0 - elsewhere)) as usize) as u64;
        let words = (nodes as u64 - 1) * (chunks / 2).clamp(1, POLL_WORDS);
        // One read is in the crossing already.
        costs.relay_ns + costs.poll_ns * words.div_ceil(POLL_WORDS).saturating_sub(1) / 2
    }
}
