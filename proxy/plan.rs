//! The buffer plan: the one author of every offset in a rank's arena.
//!
//! Pure arithmetic, on the host, before anything is allocated. The plan is the same on every rank, so a rank can
//! compute any address in a peer's arena from the peer's base.
//!
//! A world of one node keeps every region twice, by the parity of the epoch. Nothing else protects reuse: a rank
//! writes X(e+2) into its peer only after its own receive of X(e+1), which needed the peer's X(e+1), which the peer
//! sent only after its receive of X(e) was through.

use crate::base::{Error, Result};
use crate::ffi::layout as raw;

/// Bytes that regions and flags are aligned to: two 64-byte lines, since lines are prefetched in pairs.
const ALIGN: u64 = 128;

/// What the plan depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanInput {
    /// Ranks of the node.
    pub ranks: usize,
    /// Most tokens a rank dispatches in one call.
    pub max_tokens: usize,
    /// Experts a token may name.
    pub top_k: usize,
    /// Bytes of a token row without its scales; a multiple of 16.
    pub row_bytes: usize,
    /// 4-byte scale words of a row.
    pub scale_words: usize,
    /// Bytes of a partial row; a multiple of 16.
    pub partial_bytes: usize,
    /// Most experts on one rank.
    pub max_local_experts: usize,
    /// Whether weights come with combine, which sends them ahead to the expert ranks.
    pub weights_with_combine: bool,
}

/// One buffer of the arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffer {
    /// What it holds.
    pub name: String,
    /// Bytes from the arena's start.
    pub offset: u64,
    /// Its size in bytes, both parities.
    pub bytes: u64,
}

/// Every buffer of a rank's arena.
#[derive(Debug, Clone)]
pub struct Plan {
    buffers: Vec<Buffer>,
    bytes: u64,
    pub(crate) regions: raw::ty_regions,
    pub(crate) slot_bytes: usize,
    pub(crate) slots: usize,
}

/// Hands out consecutive aligned pieces of the arena.
struct Cursor {
    buffers: Vec<Buffer>,
    next: u64,
}

impl Cursor {
    /// A region of `sources` parts of `part_bytes` each, kept once per parity.
    fn region(&mut self, name: &str, sources: u64, part_bytes: u64) -> Option<raw::ty_region> {
        let source_stride = part_bytes.checked_next_multiple_of(ALIGN)?;
        let parity_stride = source_stride.checked_mul(sources)?;
        let bytes = parity_stride.checked_mul(2)?;
        let offset = self.next;
        self.next = offset.checked_add(bytes)?;
        self.buffers.push(Buffer { name: name.to_owned(), offset, bytes });
        Some(raw::ty_region { offset, parity_stride, source_stride })
    }
}

impl Plan {
    /// Plans the arena of one rank.
    ///
    /// # Errors
    /// `Config` if the arena would not fit a 64-bit address space.
    pub fn new(input: &PlanInput) -> Result<Plan> {
        Self::lay_out(input).ok_or_else(|| Error::Config {
            name: "max_tokens",
            value: input.max_tokens.to_string(),
            advice: format!(
                "the arena of {} ranks and {} bytes a row would overflow 64 bits; lower it",
                input.ranks, input.row_bytes
            ),
        })
    }

    fn lay_out(input: &PlanInput) -> Option<Plan> {
        let ranks = input.ranks as u64;
        let tokens = input.max_tokens as u64;
        let choices = tokens.checked_mul(input.top_k as u64)?;
        let slots = input.top_k.min(input.ranks);
        let slot_bytes = (input.row_bytes + 4 * input.scale_words).next_multiple_of(16);
        let places = tokens.checked_mul(slots as u64)?;
        let mut cursor = Cursor { buffers: Vec::new(), next: 0 };
        let ahead = if input.weights_with_combine { choices.checked_mul(4)? } else { 0 };
        let regions = raw::ty_regions {
            rows: cursor.region("dispatch rows", ranks, tokens.checked_mul(slot_bytes as u64)?)?,
            row_tags: cursor.region("dispatch row tags", ranks, tokens.checked_mul(8)?)?,
            meta_flags: cursor.region("META flags", ranks, 8)?,
            meta_counts: cursor.region("META counts", ranks, (input.max_local_experts as u64 + 2) * 4)?,
            meta_rows: cursor.region("META rows", ranks, tokens * 4)?,
            meta_slots: cursor.region("META slots", ranks, tokens * 4)?,
            meta_experts: cursor.region("META experts", ranks, choices.checked_mul(4)?)?,
            meta_positions: cursor.region("META positions", ranks, choices.checked_mul(4)?)?,
            meta_weights: cursor.region("META weights", ranks, choices.checked_mul(4)?)?,
            partials: cursor.region("partial rows", 1, places.checked_mul(input.partial_bytes as u64)?)?,
            partial_tags: cursor.region("partial row tags", 1, places.checked_mul(8)?)?,
            combine_flags: cursor.region("combine flags", ranks, 8)?,
            ahead_weights: cursor.region("weights sent ahead", ranks, ahead)?,
            barrier_flags: cursor.region("barrier flags", ranks, 8)?,
        };
        Some(Plan { bytes: cursor.next, buffers: cursor.buffers, regions, slot_bytes, slots })
    }

    /// Every buffer, in the order of offsets.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Size of a rank's arena in bytes.
    pub fn arena_bytes(&self) -> u64 {
        self.bytes
    }

    /// The assumption and the formula behind the total, for people.
    pub fn explain(input: &PlanInput) -> String {
        let d = (input.row_bytes + 4 * input.scale_words).next_multiple_of(16);
        format!(
            "one node, any routing: 2 parities x {} tokens x ({} ranks x {d} B a row + min(top-k {}, ranks {}) x {} B \
             a partial row), plus flags, tags and META; one wave",
            input.max_tokens, input.ranks, input.top_k, input.ranks, input.partial_bytes
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v3(tokens: usize) -> PlanInput {
        PlanInput {
            ranks: 8,
            max_tokens: tokens,
            top_k: 8,
            row_bytes: 7168,
            scale_words: 56,
            partial_bytes: 14336,
            max_local_experts: 32,
            weights_with_combine: true,
        }
    }

    #[test]
    fn buffers_neither_overlap_nor_leave_the_arena() {
        let plan = Plan::new(&v3(128)).unwrap();
        let mut next = 0;
        for buffer in plan.buffers() {
            assert_eq!(buffer.offset, next, "{} leaves a gap or overlaps", buffer.name);
            assert_eq!(buffer.offset % ALIGN, 0);
            next += buffer.bytes;
        }
        assert_eq!(next, plan.arena_bytes());
    }

    #[test]
    fn v3_arenas_stay_within_the_limits_of_the_design() {
        assert!(Plan::new(&v3(128)).unwrap().arena_bytes() <= 256 << 20);
        assert!(Plan::new(&v3(4096)).unwrap().arena_bytes() <= 2 << 30);
    }

    #[test]
    fn an_arena_beyond_64_bits_is_refused() {
        let error = Plan::new(&PlanInput { max_tokens: usize::MAX / 2, ..v3(1) }).unwrap_err();
        assert!(error.to_string().contains("max_tokens"), "{error}");
    }
}
