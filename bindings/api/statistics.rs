//! What the device says of its own calls: when each block came through each stage, when peers were heard of, how many
//! rows went to whom.
//!
//! In host memory that the device writes as it goes, so that reading needs no synchronisation; what is read while a
//! call runs may be of two calls.

use crate::base::{Rank, Result};
use crate::ffi::layout as raw;
use crate::kernels::{Device, HostBuffer};
use std::sync::atomic::{AtomicU64, Ordering};

const STAGES: usize = raw::TY_STAGES as usize;
const PEERS: usize = raw::TY_MAX_RANKS as usize;
/// Directions that are told of: dispatch and combine.
const TOLD: usize = 2;
/// Names of the stages, in the order of layout.h.
const NAMES: [[&str; STAGES]; TOLD] = [
    ["begin", "META", "rows packed", "rows pushed", "forwarded", "counts heard", "rows placed", "done"],
    ["begin", "announced", "partials sent far", "partials sent near", "node sums", "flags heard", "sums", "done"],
];

/// A stage of a call: when its blocks came to the end of it, in nanoseconds since the first block began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stage {
    /// What was done.
    pub name: &'static str,
    /// The first block's end.
    pub first_ns: u64,
    /// The middle block's.
    pub median_ns: u64,
    /// The last block's.
    pub last_ns: u64,
}

/// One direction's last call, as far as it has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallStatistics {
    /// Stages that the call came to, in order.
    pub stages: Vec<Stage>,
    /// By rank: nanoseconds from the call's begin until this rank heard of it; `None` for a rank not heard of. Over
    /// nodes, combine hears of rails.
    pub heard_ns: Vec<Option<u64>>,
}

/// Where the device writes.
pub(crate) struct Statistics {
    memory: HostBuffer,
    blocks: usize,
    ranks: usize,
}

impl Statistics {
    pub fn allocate(device: &Device, blocks: u32, ranks: usize) -> Result<Statistics> {
        let blocks = blocks as usize;
        let words = TOLD * (blocks * STAGES + PEERS) + PEERS;
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

    /// The last call of a direction, as far as it has come.
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
        let peers = TOLD * self.blocks * STAGES;
        CallStatistics {
            stages: (0..STAGES).filter_map(stage).collect(),
            heard_ns: (0..self.ranks).map(|peer| since(self.word(peers + direction * PEERS + peer))).collect(),
        }
    }

    /// Rows that the last dispatch sent to a rank, or by its rail to the node of a rank.
    pub fn rows_to(&self, rank: Rank) -> u64 {
        if rank.index() >= self.ranks {
            return 0;
        }
        self.word(TOLD * (self.blocks * STAGES + PEERS) + rank.index())
    }
}
