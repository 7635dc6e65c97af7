//! The largest worlds and shapes that the program takes.
//!
//! Before the data path; constants alone.

/// Ranks at the most: what a block keeps words for.
pub const MAX_WORLD: u64 = 512;
/// Ranks of one node at the most, and nodes: masks of them have 64 bits.
pub const MAX_NODE: u64 = 64;
/// Choices of a token at the most: a warp's lanes hold one each.
pub const MAX_TOP_K: u64 = 32;
/// NICs of a rank at the most: an immediate numbers them in two bits.
pub const MAX_NICS: usize = 4;
