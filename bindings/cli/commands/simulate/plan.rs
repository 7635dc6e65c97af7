//! How messages are cut into chunks, and the order of work where there is a choice.
//!
//! Before the simulated data path; pure.

use std::ops::Range;

use serde::Serialize;
use tokenyard::internals::proxy::wire::{Direction, MessageShape, rows_of_chunk};
use tokenyard::internals::transport::network::imm::MAX_CHUNKS;

use super::costs::Costs;
use super::workload::{HEAD_BYTES, Shape};
use crate::cli::cases::words::Assumption;

/// The order of work that a projection assumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// The proxy lists arrivals, and the one poller of a GPU reads the list. Without the list it reads the next words
    /// of every source, eight per read.
    pub arrival_list: bool,
    /// Headers go before the rows, in a chunk of their own.
    pub metadata_ahead: bool,
    /// Partial rows for other nodes are summed before those for the own node, and a rail adds up a chunk as soon as its
    /// partial rows are there. Otherwise a rail adds after all its own partial rows.
    pub early_sums: bool,
    /// A rail builds the routing metadata of all its sources in parallel, on separate blocks. Otherwise it builds
    /// source after source, on one block for each rank of its node.
    pub spread_metadata: bool,
}

impl Order {
    /// As designed.
    pub const DESIGN: Order =
        Order { arrival_list: true, metadata_ahead: true, early_sums: true, spread_metadata: true };

    /// Switches an assumption off.
    pub fn give_up(&mut self, assumption: Assumption) {
        match assumption {
            Assumption::ArrivalList => self.arrival_list = false,
            Assumption::MetadataAhead => self.metadata_ahead = false,
            Assumption::EarlySums => self.early_sums = false,
            Assumption::SpreadMetadata => self.spread_metadata = false,
        }
    }
}

/// Words that one read of the poller covers (kernels/common/wire.cuh: relay_batch).
const POLL_WORDS: u64 = 8;

/// A value for each direction.
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
    /// A plan for a shape and `nics` NICs per rank, with `chunk_rows` rows per chunk if given.
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

    /// Chunks before the rows: one for headers, if they have a chunk of their own.
    fn before_rows(&self, direction: Direction) -> usize {
        usize::from(direction == Direction::Dispatch && self.order.metadata_ahead)
    }

    /// Chunks of a message of `rows` rows.
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

    /// The largest message of a direction.
    pub fn shape(&self, direction: Direction) -> MessageShape {
        let bytes = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        let chunk_bytes = bytes(self.chunk_rows(direction) as u64 * self.row_bytes(direction));
        let rows_first = if self.before_rows(direction) == 0 { chunk_bytes } else { 0 };
        let rows_offset = bytes(self.head_bytes(direction, self.shape.tokens));
        MessageShape {
            rows_offset,
            first_bytes: rows_offset.saturating_add(rows_first),
            chunk_bytes,
            chunks: self.chunks(direction, self.shape.tokens) as u16,
        }
    }

    /// Time from an arrival in host memory to the device's blocks. With the list, the poller reads one list of all
    /// sources. Without it, each pass reads the next words of every source, with half of a mean message's words arrived
    /// on average, and finds a word half a pass late.
    pub fn relay_ns(&self, direction: Direction, costs: &Costs) -> u64 {
        let Shape { nodes, tokens, preset, .. } = self.shape;
        if self.order.arrival_list {
            return costs.relay_ns;
        }
        let elsewhere = (1.0 - 1.0 / nodes as f64).powi(preset.top_k as i32);
        let chunks = self.chunks(direction, (tokens as f64 * (1.0 - elsewhere)) as usize) as u64;
        let words = (nodes as u64 - 1) * (chunks / 2).clamp(1, POLL_WORDS);
        // The crossing already contains one read.
        costs.relay_ns + costs.poll_ns * words.div_ceil(POLL_WORDS).saturating_sub(1) / 2
    }
}
