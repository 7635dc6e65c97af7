//! Side payloads: words beside the experts' rows in combine, and beside the tokens' rows in dispatch.

use super::call_format::PayloadWords;
use super::needs::Needs;
use super::shape::Shape;
use crate::base::{Error, Result};
use crate::kernels::View;

/// fp32 words beside each of the experts' rows, which combine brings to the tokens' sources: in training, the gradients
/// of router weights. The context must have room for them ([`payload_words`](super::Tuning::payload_words)).
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

/// fp32 words of each token, which dispatch brings with the token's row to every rank that gets it: in training, for
/// instance, probabilities, or gradients of them. The bits stay as they are, those of -0 and of NaNs too. The context
/// must have room for them ([`dispatch_payload_words`](super::Tuning::dispatch_payload_words)), and all ranks make the
/// call with as many words. Such calls have kernels of their own.
#[derive(Debug, Clone)]
pub struct TokenPayload {
    /// fp32 `[tokens, words]`, without gaps.
    pub view: View,
    /// Words of each token; 1 or more.
    pub words: usize,
}

impl TokenPayload {
    /// How many words each token has, in a context of the shape `shape`.
    pub(super) fn words_of(payload: Option<&TokenPayload>, shape: &Shape) -> Result<usize> {
        let most = shape.dispatch_payload_words;
        match payload.map(|payload| payload.words) {
            None => Ok(0),
            Some(0) => Err(Error::argument("words of payload", 0, "give 1 or more, or leave the payload out")),
            Some(words) if words > most => {
                let advice = format!("this context has room for {most}; build it with dispatch_payload_words");
                Err(Error::argument("payload", format!("{words} words of a token"), advice))
            }
            Some(words) => Ok(words),
        }
    }

    /// Checks the words of so many tokens, and returns where they are and how many each token has, as kernels take it.
    pub(super) fn check(payload: Option<&TokenPayload>, needs: &mut Needs<'_>, tokens: usize) -> Result<(u64, u32)> {
        let Some(TokenPayload { view, words }) = payload else { return Ok((0, 0)) };
        let bytes = words.checked_mul(4).and_then(|bytes| bytes.checked_mul(tokens));
        Ok((needs.need("payload", view, bytes, 4)?, *words as u32))
    }

    /// Checks where the words of so many output rows go.
    pub(super) fn check_output(view: Option<&View>, needs: &mut Needs<'_>, rows: usize) -> Result<u64> {
        let words = needs.shape.token_words;
        let why = if words > 0 { "the call's tokens have a payload" } else { "the call's tokens have no payload" };
        let bytes = words.checked_mul(4).and_then(|bytes| bytes.checked_mul(rows));
        needs.need_if("payload of output", words > 0, why, view, bytes)
    }
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
            let advice = format!("this context has room for {most}; build it with payload_words");
            return Err(Error::argument("payload", format!("{of_token} words of a token"), advice));
        }
        Ok(PayloadWords { of_row: words, of_token, gathered })
    }
}
