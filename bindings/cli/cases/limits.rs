//! The largest worlds and shapes that the program takes, and numbers between such bounds.
//!
//! Before the data path; pure. A command line and a replayed case are held to the same bounds.

/// Ranks at the most: what a block keeps words for.
pub const MAX_WORLD: u64 = 512;
/// Ranks of one node at the most, and nodes: masks of them have 64 bits.
pub const MAX_NODE: u64 = 64;
/// Choices of a token at the most: a warp's lanes hold one each.
pub const MAX_TOP_K: u64 = 32;
/// NICs of a rank at the most: an immediate numbers them in two bits.
pub const MAX_NICS: u64 = 4;
/// Columns at the most: rows of 4 MiB in fp32, much more than any model.
pub const MAX_HIDDEN: u64 = 1 << 20;
/// Experts at the most, over all ranks; what one rank may hold is checked against the world.
pub const MAX_EXPERTS: u64 = 1 << 15;
/// Tokens of a call at the most: the library's limit of a context.
pub const MAX_TOKENS: u64 = 1 << 20;
/// Rows of an output at the most: their numbers have 32 bits.
pub const MAX_ROWS: u64 = i32::MAX as u64;
/// Blocks of a kernel at the most: many more than any GPU has SMs.
pub const MAX_SMS: u64 = 1024;
/// Iterations at the most: their samples fit in memory.
pub const MAX_ITERS: u64 = 10_000_000;
/// Dispatches before their combines at the most.
pub const MAX_AHEAD: u64 = 8;
/// Bytes between two rows of a table at the most: much more than any alignment.
pub const MAX_GAP: u64 = 1 << 16;

/// Reads a whole number between two bounds.
pub fn number(text: &str, least: u64, most: u64) -> Result<usize, String> {
    let value = text.parse::<u64>().ok().filter(|v| (least..=most).contains(v));
    let value = value.and_then(|v| usize::try_from(v).ok());
    value.ok_or_else(|| format!("give a whole number from {least} to {most}"))
}

/// Reads a seed: any number of 64 bits.
pub fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("give a whole number from 0 to {}", u64::MAX))
}
