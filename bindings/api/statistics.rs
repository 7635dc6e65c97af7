//! Statistics that the device records of its own calls: when each block completed each stage, when peers' counts and
//! flags arrived, how many rows went to each rank.
//!
//! The device writes them to host memory during the call, so reading needs no synchronisation. A read while a call runs
//! may mix two calls.

use crate::base::{Rank, Result};
use crate::ffi::layout as raw;
use crate::kernels::{Device, HostBuffer};
use std::sync::atomic::{AtomicU64, Ordering};

const STAGES: usize = raw::TY_STAGES as usize;
const PEERS: usize = raw::TY_MAX_RANKS as usize;
/// Directions with statistics: dispatch and combine.
const RECORDED: usize = 2;
/// Names of the stages, in the order of layout.h.
const NAMES: [[&str; STAGES]; RECORDED] = [
    ["begin", "routing metadata", "rows packed", "rows pushed", "forwarded", "counts received", "rows placed", "done"],
    [
        "begin",
        "announced",
        "partials sent inter-node",
        "partials sent intra-node",
        "node sums",
        "flags received",
        "sums",
        "done",
    ],
];

/// A stage of a call: when blocks completed it, in nanoseconds since the first block began the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stage {
    /// Name of the stage.
    pub name: &'static str,
    /// When the first block completed it.
    pub first_ns: u64,
    /// When the median block completed it.
    pub median_ns: u64,
    /// When the last block completed it.
    pub last_ns: u64,
}

/// The last call of one direction, as far as it has run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallStatistics {
    /// Stages that the call has reached, in order.
    pub stages: Vec<Stage>,
    /// By rank: nanoseconds from the call's begin until that rank's counts (dispatch) or flag (combine) arrived here;
    /// `None` if nothing has arrived. With several nodes, combine's flags come from rails.
    pub notified_ns: Vec<Option<u64>>,
}

/// Host memory that the device writes statistics to.
pub(crate) struct Statistics {
    memory: HostBuffer,
    blocks: usize,
    ranks: usize,
}

impl Statistics {
    pub fn allocate(device: &Device, blocks: u32, ranks: usize) -> Result<Statistics> {
        let blocks = blocks as usize;
        let words = RECORDED * (blocks * STAGES + PEERS) + PEERS;
        Ok(Statistics { memory: device.alloc_host(words * 8)?, blocks, ranks })
    }

    pub fn device_address(&self) -> u64 {
        self.memory.view().ptr()
    }

    fn word(&self, index: usize) -> u64 {
        let words = self.memory.host_ptr().cast::<u64>();
        // SAFETY: callers stay below what `allocate` made room for; words are 8-byte aligned, live as long as the
        // buffer, and are written atomically by the device.
        unsafe { AtomicU64::from_ptr(words.add(index)) }.load(Ordering::Relaxed)
    }

    /// The last call of a direction, as far as it has run.
    pub fn call(&self, direction: u32) -> CallStatistics {
        let direction = direction as usize;
        let at = |block: usize, stage: usize| self.word((direction * self.blocks + block) * STAGES + stage);
        let begins = (0..self.blocks).map(|block| at(block, 0)).filter(|&ns| ns != 0);
        let begin = begins.clone().min().unwrap_or(0);
        let since = |ns: u64| ns.checked_sub(begin).filter(|_| begin != 0);
        let stage = |index: usize| {
            let mut ends: Vec<u64> = (0..self.blocks)
                .filter(|&block| at(block, index) >= at(block, 0))
                .filter_map(|b| since(at(b, index)))
                .collect();
            ends.sort_unstable();
            Some(Stage {
                name: NAMES[direction][index],
                first_ns: *ends.first()?,
                median_ns: ends[ends.len() / 2],
                last_ns: *ends.last()?,
            })
        };
        let peers = RECORDED * self.blocks * STAGES;
        CallStatistics {
            stages: (0..STAGES).filter_map(stage).collect(),
            notified_ns: (0..self.ranks).map(|peer| since(self.word(peers + direction * PEERS + peer))).collect(),
        }
    }

    /// Bytes of rows that the last dispatch sent to a rank of the node, or through a rail to the rail's node.
    pub fn bytes_to(&self, rank: Rank) -> u64 {
        if rank.index() >= self.ranks {
            return 0;
        }
        self.word(RECORDED * (self.blocks * STAGES + PEERS) + rank.index())
    }
}
