//! Words of a context's tables in device memory, as kernels/ffi/layout.h defines them, and factors with which kernels
//! divide.
//!
//! Beside the data path: pure arithmetic, computed while a context is built.

use super::placement::Placement;
use crate::base::Rank;
use crate::ffi::layout as raw;
use crate::proxy::wire::{Direction, Nodes};

/// A `ty_state` followed by the words of `blocks` blocks, about to start `first_epoch` of dispatch and combine and the
/// first barrier.
pub(super) fn state_words(first_epoch: u64, blocks: u32) -> Vec<u64> {
    const { assert!(size_of::<raw::ty_progress>() == 32 && std::mem::offset_of!(raw::ty_progress, ended) == 24) };
    const { assert!(size_of::<raw::ty_state>() == 128 && std::mem::offset_of!(raw::ty_state, ended) == 96) };
    let mut words = vec![0; size_of::<raw::ty_state>() / 8];
    // As after so many guarded launches: the counts wrap in a context's first calls, and so in every test.
    let guarded = u32::MAX - 1;
    let [many, one] = [blocks, 1].map(|blocks| u64::from(guarded.wrapping_mul(blocks)));
    for (word, blocks) in words.iter_mut().skip(12).zip([many << 32 | many, one]) {
        *word = blocks;
    }
    for direction in 0..raw::TY_CALL_DIRECTIONS {
        let last = if direction == raw::TY_DIRECTION_BARRIER { 0 } else { first_epoch - 1 };
        words.extend((0..blocks).flat_map(|_| [last, last, 0, u64::from(guarded) << 32 | u64::from(guarded)]));
    }
    words
}

/// `ty_expert_owner` of every expert: node, rank in it, local index.
pub(super) fn expert_owner_words(placement: &Placement, nodes: &Nodes) -> Vec<u64> {
    let owner = |expert: usize| {
        let rank = Rank(placement.rank_of(expert)?);
        let (node, local) = (nodes.node_of(rank)? as u64, nodes.local_of(rank)? as u64);
        Some(node | local << 16 | u64::from(placement.local_index(expert)?) << 32)
    };
    // A node that does not exist gets nothing.
    (0..placement.experts()).map(|expert| owner(expert).unwrap_or(u64::from(u16::MAX))).collect()
}

/// The first expert of every rank of the first generation, or -1.
pub(super) fn first_experts(placement: &Placement) -> Vec<u64> {
    let first = |rank| placement.local_experts(rank).first().copied().unwrap_or(u32::MAX);
    (0..placement.ranks()).map(|rank| u64::from(first(rank))).collect()
}

/// Experts of every rank, if rank r holds the experts from r times this number on and all nodes have equal size, so
/// that kernels can compute owners; else 0.
pub(super) fn even_experts(placement: &Placement, nodes: &Nodes) -> u32 {
    let (experts, ranks) = (placement.experts(), nodes.ranks().count());
    let first = nodes.members().first().map_or(0, Vec::len);
    if ranks == 0 || !experts.is_multiple_of(ranks) || nodes.members().iter().any(|node| node.len() != first) {
        return 0;
    }
    let each = experts / ranks;
    let follows = |expert: usize| {
        let (rank, local) = ((expert / each) as u32, (expert % each) as u32);
        placement.rank_of(expert) == Some(rank) && placement.local_index(expert) == Some(local)
    };
    if (0..experts).all(follows) && nobody_left(nodes) { each as u32 } else { 0 }
}

/// Whether all ranks have the numbers that they had in the first generation: lost ranks leave gaps.
pub(super) fn nobody_left(nodes: &Nodes) -> bool {
    nodes.ranks().enumerate().all(|(i, rank)| rank.index() == i)
}

/// Numbers as uint32, two in a word.
pub(super) fn pack_words(numbers: &[u64]) -> Vec<u64> {
    let pair = |pair: &[u64]| pair[0] | pair.get(1).copied().unwrap_or(0) << 32;
    let words: Vec<u64> = numbers.chunks(2).map(pair).collect();
    if words.is_empty() { vec![0] } else { words }
}

/// `ty_source_owner` of every rank, for a rank's node: the rank there that takes the partial rows of its tokens.
pub(super) fn owner_words(nodes: &Nodes, rank: Rank) -> Vec<u64> {
    let own = nodes.node_of(rank);
    let owner = |source: Rank| {
        let node = nodes.node_of(source)?;
        if Some(node) == own {
            return Some(node as u64 | (nodes.local_of(source)? as u64) << 16);
        }
        let rail = nodes.rail(source, own?)?;
        let part = 1 + nodes.sources(Direction::Dispatch, rail).iter().position(|served| *served == source)?;
        Some(node as u64 | (nodes.local_of(rail)? as u64) << 16 | (part as u64) << 32)
    };
    nodes.ranks().map(|source| owner(source).unwrap_or(u64::from(u16::MAX))).collect()
}

/// The factor with which kernels divide numbers below 2^16 by `divisor`: the upper half of the product is the
/// quotient.
pub(super) fn reciprocal(divisor: u64) -> u64 {
    (1 << 32) / divisor.max(1) + 1
}

/// The factor with which kernels divide by `divisor`: see `divide` in kernels/common/context.cuh.
pub(super) fn inverse(divisor: u32) -> u32 {
    u32::MAX / divisor.max(1)
}
