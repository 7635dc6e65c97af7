//! The side payload of combine: words beside the experts' rows.

use super::call_format::PayloadWords;
use super::needs::Needs;
use super::shape::Shape;
use crate::base::{Error, Result};
use crate::kernels::View;

/// fp32 words beside each of the experts' rows, which combine brings to the tokens' sources: in training, the gradients
/// of router weights. The context must have room for them ([`payload_words`](super::Tuning::payload_words)). Such calls
/// have tagged partial rows.
#[derive(Debug, Clone)]
pub struct Payload {
    /// fp32 `[rows, words]`, in the layout dispatched. Words of padding rows are not read.
    pub view: View,
    /// Words of each row; 1 or more.
    pub words: usize,
    /// Whether [`Combined::payload`](super::Combined::payload) has the words of each choice's row, with their bits: 0
    /// where the choice is none, or led to no rank that returned it. Else it has sums, without weights, added in fp32
    /// in the order in which the rows are. Not in [`Layout::Token`](super::Layout::Token), which has one row for
    /// several choices.
    pub gathered: bool,
}

impl Payload {
    /// Checks the words, beside so many rows.
    pub(super) fn check(&self, needs: &mut Needs<'_>, rows: usize) -> Result<u64> {
        needs.need("payload", &self.view, self.words.checked_mul(4).and_then(|bytes| bytes.checked_mul(rows)), 4)
    }

    /// How many words there are, in a context of the shape `shape`. `by_token`: rows are those of the token layout.
    pub(super) fn size(&self, by_token: bool, shape: &Shape) -> Result<PayloadWords> {
        let Payload { words, gathered, .. } = *self;
        if words == 0 {
            return Err(Error::argument("words of payload", 0, "give 1 or more, or leave the payload out"));
        }
        if gathered && by_token {
            let advice = "a row of the token layout is of several choices; give sums, of top_k words for instance";
            return Err(Error::config("gathered", true, advice));
        }
        let of_token = if gathered { words.saturating_mul(shape.top_k) } else { words };
        if of_token > shape.payload_words {
            let most = shape.payload_words;
            let advice = format!("this context has room for {most}; build it with Tuning::payload_words");
            return Err(Error::argument("payload", format!("{of_token} words of a token"), advice));
        }
        Ok(PayloadWords { of_row: words, of_token, gathered })
    }
}
