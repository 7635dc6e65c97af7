//! What goes with what: fields of a case that the library refuses by design, and those that exclude each other.
//!
//! Before the data path; pure functions on any thread.

use super::case::{Case, MAX_IN_PLACE_RANKS, MAX_PAYLOAD, SCALE_COLUMNS};
use super::inputs::ScaleKind;
use super::words::{FaultWord, LayoutWord, MissingWord, OrderWord, PartialWord, WeightsWord};
use tokenyard::internals::base::Dtype;

impl Case {
    /// The field of this case that the library refuses by design, as its error names it.
    pub fn refused_by_design(&self) -> Option<&'static str> {
        if self.scales != ScaleKind::None && self.dtype != Dtype::Fp8E4m3 {
            Some("scales")
        } else if self.payload > 0 && self.partial != PartialWord::Same {
            Some("payload_words")
        } else if self.missing != MissingWord::No && self.builds_no_missing() {
            Some("missing_ranks")
        } else if self.quantize && self.scales == ScaleKind::None {
            Some("quantize")
        } else if self.partial == PartialWord::Fp8 && !self.hidden.is_multiple_of(SCALE_COLUMNS) {
            Some("hidden")
        } else if self.layout == LayoutWord::Token && self.weights == WeightsWord::Combine {
            Some("layout")
        } else if self.missing != MissingWord::No && self.again {
            Some("missing_ranks")
        } else if self.gathered && self.layout == LayoutWord::Token {
            Some("gathered")
        } else if self.drop_overflow && self.layout == LayoutWord::Token {
            Some("drop_overflow")
        } else {
            None
        }
    }

    /// This case without the fields refused by design: the rest must still be usable.
    #[must_use]
    pub fn without_refused(&self) -> Case {
        let mut case = self.clone();
        while let Some(field) = case.refused_by_design() {
            match field {
                "scales" => case.scales = ScaleKind::None,
                "quantize" => case.quantize = false,
                "hidden" => case.partial = PartialWord::Same,
                "payload_words" => (case.payload, case.gathered) = (0, false),
                "gathered" => case.gathered = false,
                "drop_overflow" => case.drop_overflow = false,
                "missing_ranks" => case.missing = MissingWord::No,
                _ => case.weights = WeightsWord::Dispatch,
            }
        }
        case
    }

    /// Why this case cannot have in-place output, if there is a reason.
    pub fn why_not_in_place(&self) -> Option<&'static str> {
        let reasons = [
            (self.layout != LayoutWord::Contiguous, "its layout is contiguous"),
            (self.several_nodes(), "it is for worlds of one node"),
            (self.world > MAX_IN_PLACE_RANKS, "it is for at most 32 ranks"),
            (self.quantize, "rows that are quantised have none"),
            (self.mode.is_split(), "a dispatch to it has no halves"),
            (self.round_tokens.is_some_and(|tokens| tokens < self.max_tokens), "calls to it go in one round"),
            (self.scale_order != OrderWord::Row, "its scales are row by row"),
            (self.ahead > 1, "the next dispatch overwrites it"),
            (self.gap > 0, "its rows lie side by side"),
            (self.fault == FaultWord::Overflow, "it has as many rows in every call"),
            (self.again, "its handles do not have the places of rows"),
            (self.mixed, "its calls are of one format"),
            (self.dispatch_payload > 0, "it has no place for words beside its rows"),
            (self.drop_overflow, "it takes all rows or none"),
        ];
        reasons.into_iter().find(|(holds, _)| *holds).map(|(_, why)| why)
    }

    /// Whether the library builds no context of such a case that goes on without missing ranks.
    fn builds_no_missing(&self) -> bool {
        self.uneven_nodes() || self.partial != PartialWord::Same || self.payload > 0 || self.dispatch_payload > 0
    }

    /// Why calls of this case do not go on without missing ranks, if there is a reason.
    pub fn why_nobody_is_missing(&self) -> Option<&'static str> {
        let reasons = [
            (self.world > MAX_IN_PLACE_RANKS, "it is for at most 32 ranks"),
            (self.uneven_nodes(), "its nodes have equally many ranks"),
            (self.partial != PartialWord::Same, "partial rows are of the combine dtype"),
            (self.payload > 0, "its sums have no payload"),
            (self.dispatch_payload > 0, "its rows have no payload"),
            (self.in_place, "its output is not in place"),
            (self.round_tokens.is_some_and(|tokens| tokens < self.max_tokens), "its calls go in one round"),
            (self.again, "its handles do not serve again"),
            (self.accumulate, "sums may have to be made again"),
        ];
        reasons.into_iter().find(|(holds, _)| *holds && self.missing != MissingWord::No).map(|(_, why)| why)
    }

    /// The ranks that a rank masks: the last one, and the last one all others.
    pub fn masked_by(&self, rank: usize) -> Vec<bool> {
        let apart = |rank: usize| self.missing == MissingWord::One && rank + 1 == self.world;
        (0..self.world).map(|other| apart(other) != apart(rank)).collect()
    }

    /// The ranks whose rows do not come to a rank: that are masked, or whose rail in the rank's node is.
    pub fn sources_missing_from(&self, rank: usize) -> Vec<bool> {
        (0..self.world).map(|source| self.is_cut(rank, source, rank)).collect()
    }

    /// The ranks that add nothing to a rank's sums: that are masked, or by way of whose node's rail rows do not go.
    pub fn owners_missing_from(&self, rank: usize) -> Vec<bool> {
        (0..self.world).map(|owner| self.is_cut(rank, rank, owner)).collect()
    }

    /// Whether nothing goes from `source` to `owner`, by the masks of the rank `by`, which is one of them.
    fn is_cut(&self, by: usize, source: usize, owner: usize) -> bool {
        let masked = self.masked_by(by);
        // Where ranks are missing, nodes have equally many.
        let ranks = self.world / self.node_sizes().len();
        let (from, to) = (source / ranks, owner / ranks);
        let rail = to * ranks + source % ranks;
        masked[source] || masked[owner] || (from != to && masked.get(rail).is_some_and(|masked| *masked))
    }

    /// Why this case cannot have such a payload, if there is a reason.
    pub fn why_no_payload(&self) -> Option<&'static str> {
        let reasons = [
            (self.payload == 0 && self.gathered, "words are gathered where there are some; give --payload"),
            (self.payload_words() as u64 > MAX_PAYLOAD, "a token's payload has at most 4096 words; give fewer"),
            (
                self.payload > 0 && self.partial != PartialWord::Same,
                "partial rows with a payload are of the combine dtype; leave it out",
            ),
            (
                self.gathered && self.layout == LayoutWord::Token,
                "a row of the token layout is of several choices; leave --gather out",
            ),
        ];
        reasons.into_iter().find(|(holds, _)| *holds).map(|(_, why)| why)
    }
}
