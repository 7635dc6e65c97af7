//! What DeepEP's size hints ask for, beside a plan of this library: buffers that DeepEP's users allocate for the same
//! tokens, columns, ranks and experts.
//!
//! Pure. After csrc/config.hpp and deep_ep/buffer.py of DeepEP 1 (github.com/deepseek-ai/DeepEP).

use serde::Serialize;

use crate::cli::cases::case::Case;

/// Bytes of a rank's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SizeHints {
    /// `get_low_latency_rdma_size_hint`.
    pub low_latency_bytes: u64,
    /// `get_nvl_buffer_size_hint` and `get_rdma_buffer_size_hint` of bf16 rows; none for a number of ranks without a
    /// configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub normal_bytes: Option<u64>,
}

/// Ranks of a node.
const NODE: u64 = 8;
/// Choices and scales of a token for which buffers of the normal mode have room.
const MOST: u64 = 128;
/// Half of the default number of SMs.
const CHANNELS: u64 = 10;
/// Bytes of what accompanies a row.
const DESCRIBED: u64 = 8;
/// Buffers are multiples of this.
const ALIGN: u64 = 128;

/// Rows that a channel of the normal mode receives over NVLink and over RDMA, by the configurations of combine.
fn channel_rows(ranks: u64) -> Option<(u64, u64)> {
    match ranks {
        2 | 4 | 8 => Some((256, 0)),
        16 | 24 | 32 | 64 => Some((288, 140)),
        128 => Some((560, 132)),
        144 | 160 => Some((720, 128)),
        _ => None,
    }
}

impl SizeHints {
    /// The hints for a case.
    pub fn of(case: &Case) -> SizeHints {
        let [tokens, hidden, ranks, experts] =
            [case.max_tokens, case.hidden, case.world, case.placed_experts()].map(|number| number as u64);
        SizeHints {
            low_latency_bytes: low_latency(tokens, hidden, experts),
            normal_bytes: channel_rows(ranks).map(|rows| normal(2 * hidden, ranks, rows)),
        }
    }
}

/// Two send buffers, two receive buffers of all experts, and signals.
fn low_latency(tokens: u64, hidden: u64, experts: u64) -> u64 {
    let (dispatched, combined) = (16 + 2 * hidden, hidden / 128 * 4 + 2 * hidden);
    let of_all = experts * tokens;
    let send = (tokens * dispatched).max(of_all * combined);
    let receive = of_all * dispatched.max(combined);
    let bytes = 2 * (send + receive + (8 * experts).next_multiple_of(ALIGN));
    (bytes / ALIGN + 1) * ALIGN
}

/// Buffers of NVLink, and between nodes of RDMA.
fn normal(row_bytes: u64, ranks: u64, (nvlink, rdma): (u64, u64)) -> u64 {
    let (nodes, peers) = ((ranks / NODE).max(1), ranks.min(NODE));
    let described = row_bytes + DESCRIBED + MOST * (8 + 4 + 4);
    let of_nvlink = CHANNELS * peers * (nvlink * described + (2 * nodes + 3) * 4);
    let of_rdma = 2 * CHANNELS * nodes * (rdma * (described + 16) + (2 * NODE + 2) * 4) + (1 << 20);
    of_nvlink.next_multiple_of(ALIGN) + if ranks > NODE { of_rdma.next_multiple_of(ALIGN) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v3(world: usize, max_tokens: usize) -> Case {
        Case { world, max_tokens, hidden: 7168, experts: 256, top_k: 8, ..Case::default() }
    }

    #[test]
    fn hints_are_those_of_the_published_formulas() {
        // 256 experts of 128 rows of 14560 bytes, four times, and 2048 bytes of signals twice; one unit more.
        let eight = SizeHints::of(&v3(8, 128));
        assert_eq!(eight.low_latency_bytes, 4 * 256 * 128 * 14560 + 2 * 2048 + 128);
        // 10 channels of 8 ranks of 256 rows of 14336 + 8 + 2048 bytes, and 20 bytes.
        assert_eq!(eight.normal_bytes, Some(10 * 8 * (256 * 16392 + 20) + (128 - 10 * 8 * 20 % 128)));
        // A prefill's normal buffers do not grow with tokens.
        assert_eq!(SizeHints::of(&v3(8, 4096)).normal_bytes, eight.normal_bytes);
        assert_eq!(SizeHints::of(&v3(7, 128)).normal_bytes, None);
        let nodes = SizeHints::of(&v3(64, 128)).normal_bytes.unwrap();
        let (nvlink, rdma) = (80 * (288 * 16392 + 76), 160 * (140 * 16408 + 72) + (1 << 20));
        assert_eq!(nodes, u64::next_multiple_of(nvlink, 128) + u64::next_multiple_of(rdma, 128));
    }
}
