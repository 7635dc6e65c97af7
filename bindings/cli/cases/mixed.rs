//! The second format of a mixed case.
//!
//! Before the data path; pure.

use tokenyard::internals::base::Dtype;

use super::case::{Case, ROW_QUANTUM, SCALE_COLUMNS};
use super::inputs::{Counter, ScaleKind, Use};
use super::words::{LayoutWord, WeightsWord};

impl Case {
    /// The case with which a mixed case alternates: rows of another type, and by the seed also of fewer columns, sums
    /// of another type, weights from elsewhere, fewer tokens at the most, and no words
    /// beside rows.
    pub fn other(&self) -> Case {
        let mut counter = Counter::new(self.seed, Use::Choice, u64::MAX - 15, 0, 0);
        let mut bit = || counter.below(2) == 1;
        let mut case = self.clone();
        if self.hidden.is_multiple_of(2 * SCALE_COLUMNS) && bit() {
            case.hidden = self.hidden / 2;
        }
        let fits = |dtype: Dtype| {
            let quantum = if dtype == Dtype::Fp8E4m3 { SCALE_COLUMNS } else { ROW_QUANTUM / dtype.bytes() };
            case.hidden.is_multiple_of(quantum)
        };
        let next = |dtype: Dtype, all: &[Dtype]| {
            let at = all.iter().position(|one| *one == dtype).unwrap_or(0);
            (1..=all.len()).map(|step| all[(at + step) % all.len()]).find(|one| fits(*one)).unwrap_or(dtype)
        };
        let dtype = next(self.dtype, &[Dtype::Bf16, Dtype::Fp8E4m3, Dtype::Fp32, Dtype::Fp16]);
        let combine_dtype = next(self.combine_dtype, &[Dtype::Bf16, Dtype::Fp16, Dtype::Fp32]);
        let scaled = dtype == Dtype::Fp8E4m3 && bit();
        (case.dtype, case.scales) = (dtype, if scaled { ScaleKind::F32 } else { ScaleKind::None });
        case.quantize = scaled && bit();
        if bit() {
            case.combine_dtype = combine_dtype;
        }
        if bit() && !self.several_nodes() && self.layout != LayoutWord::Token {
            case.weights = match self.weights {
                WeightsWord::Dispatch => WeightsWord::Combine,
                WeightsWord::Combine => WeightsWord::None,
                WeightsWord::None => WeightsWord::Dispatch,
            };
        }
        // Calls of several rounds have as many tokens at the most as the context.
        if bit() && self.round_tokens.is_none_or(|tokens| tokens >= self.max_tokens) {
            case.max_tokens = self.max_tokens.div_ceil(2);
            case.tokens = self.tokens.min(case.max_tokens);
        }
        if bit() {
            case.dispatch_payload = 0;
        }
        case
    }
}
