//! The format of a call, and the room that an arena has for calls of several formats.

use super::format::RowFormat;
use crate::base::Dtype;
use std::fmt;

/// Where the weights of combine's sums come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Weights {
    /// With dispatch ([`Tokens::topk_weight`](super::Tokens::topk_weight)), whose call is refused without them.
    Dispatch,
    /// With combine ([`Rows::topk_weight`](super::Rows::topk_weight)), which sends them ahead to the expert ranks.
    Combine,
    /// Nowhere: every weight is 1.
    None,
}

/// What the rows of a call are, and how many tokens a rank may have in it. All ranks make a call in one format.
///
/// [`AllToAllBuilder::room_for`](super::AllToAllBuilder::room_for) makes room for calls of a format, and
/// [`Tokens::of`](super::Tokens::of) makes a call one of that format. Made by [`CallFormat::new`], and changed field by
/// field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CallFormat {
    /// Columns of a row, as [`AllToAllBuilder::hidden`](super::AllToAllBuilder::hidden).
    pub hidden: usize,
    /// Format in which dispatched rows travel, as [`AllToAllBuilder::format`](super::AllToAllBuilder::format).
    pub rows: RowFormat,
    /// Whether dispatch quantises, as [`AllToAllBuilder::quantize`](super::AllToAllBuilder::quantize).
    pub quantize: bool,
    /// Type of the experts' outputs, as [`AllToAllBuilder::combine_dtype`](super::AllToAllBuilder::combine_dtype).
    pub combine_dtype: Dtype,
    /// Where weights come from, as [`AllToAllBuilder::weights`](super::AllToAllBuilder::weights).
    pub weights: Weights,
    /// Most tokens of one rank in such a call, at most
    /// [`max_tokens_per_rank`](super::AllToAllBuilder::max_tokens_per_rank). A call that is known to be small on all
    /// ranks takes the kernels of small calls.
    pub max_tokens: usize,
    /// Of a combine: words of its side payload.
    pub(super) payload: Option<PayloadWords>,
    /// Of a dispatch: words of each token's side payload.
    pub(super) token_words: usize,
}

/// How many words a side payload has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PayloadWords {
    /// Of each row.
    pub of_row: usize,
    /// Of a token, at its source.
    pub of_token: usize,
    pub gathered: bool,
}

impl CallFormat {
    /// Rows of `hidden` columns, at most `max_tokens` of a rank; experts' outputs in bf16, weights with dispatch,
    /// nothing quantised.
    pub fn new(hidden: usize, rows: RowFormat, max_tokens: usize) -> CallFormat {
        let (combine_dtype, weights) = (Dtype::Bf16, Weights::Dispatch);
        CallFormat { hidden, rows, quantize: false, combine_dtype, weights, max_tokens, payload: None, token_words: 0 }
    }

    /// Sets [`quantize`](#structfield.quantize).
    pub fn quantize(self, quantize: bool) -> CallFormat {
        CallFormat { quantize, ..self }
    }

    /// Sets [`combine_dtype`](#structfield.combine_dtype).
    pub fn combine_dtype(self, combine_dtype: Dtype) -> CallFormat {
        CallFormat { combine_dtype, ..self }
    }

    /// Sets [`weights`](#structfield.weights).
    pub fn weights(self, weights: Weights) -> CallFormat {
        CallFormat { weights, ..self }
    }

    /// What dispatch has of it.
    pub(super) fn dispatch(self) -> CallFormat {
        CallFormat { combine_dtype: Dtype::Bf16, payload: None, ..self }
    }

    /// The same with other rows, where they are given. Only rows of this format are quantised unless that is given.
    pub(super) fn with_rows(
        self,
        hidden: Option<usize>,
        rows: Option<RowFormat>,
        quantize: Option<bool>,
    ) -> CallFormat {
        let rows = rows.unwrap_or(self.rows);
        let quantize = quantize.unwrap_or(self.quantize && rows == self.rows);
        CallFormat { hidden: hidden.unwrap_or(self.hidden), rows, quantize, ..self }
    }

    /// A number by which ranks recognise that their formats differ: 31 bits, not 0, of the FNV-1a hash of the fields
    /// (Fowler, Noll, Vo; draft-eastlake-fnv). Two formats have the same number once in 2^31.
    pub(super) fn number(&self) -> u32 {
        let CallFormat { hidden, rows, quantize, combine_dtype, weights, max_tokens, payload, token_words } = *self;
        let payload = payload.map_or(0, |words| 2 * words.of_row as u64 + u64::from(words.gathered));
        let codes =
            [rows.dtype as u64, rows.scales as u64, u64::from(quantize), combine_dtype as u64, weights as u64, payload];
        let words = [hidden as u64, max_tokens as u64, token_words as u64].into_iter().chain(codes);
        let hash = words
            .flat_map(u64::to_le_bytes)
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        ((hash >> 33) as u32).max(1)
    }
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Room { slot_bytes, partial_bytes, weights_with_dispatch, weights_with_combine, few_tokens } = self;
        let weights = u8::from(*weights_with_dispatch) + 2 * u8::from(*weights_with_combine);
        write!(f, "{slot_bytes}:{partial_bytes}:{weights}:{few_tokens}")
    }
}

/// The room that an arena has beyond its context's own format, for calls of other formats.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Room {
    /// Bytes of a dispatched row, scales included.
    pub slot_bytes: usize,
    /// Bytes of a partial row.
    pub partial_bytes: usize,
    pub weights_with_dispatch: bool,
    pub weights_with_combine: bool,
    /// Most tokens of those calls whose partial rows may be LL rows.
    pub few_tokens: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_states_a_part_of_its_format() {
        let own = CallFormat::new(256, RowFormat::FP8_F32, 64).quantize(true).weights(Weights::None);
        assert_eq!(own.with_rows(None, None, None), own);
        assert_eq!(own.with_rows(Some(128), None, None), CallFormat { hidden: 128, ..own });
        assert_eq!(own.with_rows(None, None, Some(false)), own.quantize(false));
        // Rows of another format are not quantised unless the call says so.
        let other = CallFormat { rows: RowFormat::BF16, quantize: false, ..own };
        assert_eq!(own.with_rows(None, Some(RowFormat::BF16), None), other);
        assert_eq!(own.with_rows(None, Some(RowFormat::BF16), Some(true)), other.quantize(true));
        assert_eq!(own.with_rows(None, Some(RowFormat::FP8_F32), None), own);
    }

    #[test]
    fn numbers_of_formats_differ_in_every_field() {
        let one = CallFormat::new(128, RowFormat::FP8_F32, 64);
        let all = [
            one,
            CallFormat { hidden: 256, ..one },
            CallFormat { rows: RowFormat::FP8, ..one },
            CallFormat { rows: RowFormat::FP8_UE8M0, ..one },
            CallFormat { rows: RowFormat::FP16, ..one },
            CallFormat { max_tokens: 65, ..one },
            CallFormat { hidden: 64, max_tokens: 128, ..one },
            one.quantize(true),
            one.combine_dtype(Dtype::Fp32),
            one.weights(Weights::Combine),
            one.weights(Weights::None),
            CallFormat { payload: Some(PayloadWords { of_row: 1, of_token: 1, gathered: false }), ..one },
            CallFormat { payload: Some(PayloadWords { of_row: 1, of_token: 1, gathered: true }), ..one },
            CallFormat { payload: Some(PayloadWords { of_row: 2, of_token: 2, gathered: false }), ..one },
            CallFormat { token_words: 1, ..one },
            CallFormat { token_words: 2, ..one },
        ];
        let mut numbers = all.map(|format| format.number());
        assert!(numbers.iter().all(|number| (1..1 << 31).contains(number)));
        numbers.sort_unstable();
        assert!(numbers.windows(2).all(|two| two[0] < two[1]), "{numbers:?}");
    }
}
