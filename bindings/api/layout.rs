//! Orders of received rows and of their scales.

use crate::base::{Error, Result};
use crate::ffi::layout as raw;

/// Where received rows go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// Expert by expert, each expert's first row at a multiple of `align`; `capacity` rows in all. A token has a row at
    /// each of its experts here. Rows of one expert are in the order of (source rank, token) in every schedule.
    ///
    /// Any routing fits into ranks · `max_tokens_per_rank` · min(top_k, local experts) rows, with
    /// [`duplicates`](super::Tuning::duplicates) ranks · `max_tokens_per_rank` · top_k rows, plus `align` - 1 rows for
    /// each local expert: every expert's segment, the last included, is rounded up to `align`. A smaller capacity is
    /// allowed: a dispatch whose rows do not fit ends in [`Capacity`](crate::Error::Capacity), or with
    /// [`Output::drop_overflow`](super::Output::drop_overflow) leaves out those without room.
    Contiguous {
        /// Rows; 1 for none, 128 for DeepGEMM's contiguous grouped GEMM.
        align: usize,
        /// Rows of the output. A call whose [`Output::rows`](super::Output::rows) holds fewer is refused with
        /// `Argument`.
        capacity: usize,
    },
    /// `[local experts, per_expert, hidden]`; rows of one expert are in the order of (source rank, token).
    Masked {
        /// Rows of each expert.
        per_expert: usize,
    },
    /// One row per (source rank, token), in that order. The caller sums a token's rows, with
    /// [`Output::token_weights`](super::Output::token_weights), before combine, which then applies no weights.
    Token {
        /// Rows of the output.
        capacity: usize,
    },
}

impl Layout {
    pub(crate) fn code(self) -> u32 {
        match self {
            Layout::Contiguous { .. } => raw::TY_LAYOUT_CONTIGUOUS,
            Layout::Masked { .. } => raw::TY_LAYOUT_MASKED,
            Layout::Token { .. } => raw::TY_LAYOUT_TOKEN,
        }
    }

    /// Whether rows without room can be left out ([`Output::drop_overflow`](super::Output::drop_overflow)).
    ///
    /// # Errors
    /// `Argument` for the token layout, and for a capacity that is no multiple of `align`.
    pub fn check_drops(self) -> Result<()> {
        match self {
            Layout::Token { .. } => {
                let advice = "a row of the token layout is for several experts, so leave it out";
                Err(Error::argument("drop_overflow", "set", advice))
            }
            Layout::Contiguous { align, capacity } if !capacity.is_multiple_of(align) => {
                let advice =
                    format!("with drop_overflow give a multiple of align, {align}: segments begin and end there");
                Err(Error::argument("capacity", capacity, advice))
            }
            _ => Ok(()),
        }
    }

    /// Rows of the whole output; `None` where that overflows.
    pub fn rows(self, local_experts: usize) -> Option<usize> {
        match self {
            Layout::Contiguous { capacity, .. } | Layout::Token { capacity } => Some(capacity),
            Layout::Masked { per_expert } => per_expert.checked_mul(local_experts),
        }
    }
}

/// Order of the output scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleOrder {
    /// `[rows, words]`.
    RowMajor,
    /// `[words, leading]`, `leading` = rows rounded up to 4 (16 bytes); in the masked layout one such block per expert.
    ColumnMajor,
}
