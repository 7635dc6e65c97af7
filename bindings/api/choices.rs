//! What the choices of a call's tokens are, and where they lie.

use super::shape::Shape;
use crate::base::{Error, Result};

/// Type of the routing indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexType {
    /// 32-bit signed.
    I32,
    /// 64-bit signed.
    I64,
    /// No experts: a byte for each rank of the first generation, `[tokens, ranks]`, which is not 0 where the token goes
    /// to that rank, as one row for the rank's first expert. For contexts in which each rank holds an expert and
    /// `top_k` is at least the number of ranks (so at most 32 ranks). Weights are `[tokens, ranks]`, too, if they come
    /// with dispatch; in [`token_experts`](super::Output::token_experts) and in combine, choice k is rank k.
    Ranks,
}

impl IndexType {
    /// Size of one index in bytes.
    pub fn bytes(self) -> usize {
        match self {
            IndexType::I32 => 4,
            IndexType::I64 => 8,
            IndexType::Ranks => 1,
        }
    }

    /// Choices of each token of a call: columns of indices and weights. `given`: `Tokens::top_k`.
    pub(super) fn columns(self, given: Option<usize>, shape: &Shape) -> Result<usize> {
        match (self, given) {
            (IndexType::Ranks, None) => by_rank(shape),
            (IndexType::Ranks, Some(given)) => {
                let advice = "tokens that name ranks have a choice for each rank; leave it out";
                Err(Error::argument("top_k", given, advice))
            }
            (_, None) => Ok(shape.top_k),
            (_, Some(given)) if (1..=shape.top_k).contains(&given) => Ok(given),
            (_, Some(given)) => {
                let advice = format!("this context was built for 1 to {} choices of a token", shape.top_k);
                Err(Error::argument("top_k", given, advice))
            }
        }
    }
}

/// Columns of choices that are ranks.
fn by_rank(shape: &Shape) -> Result<usize> {
    let columns = shape.first_ranks;
    let why = if columns > shape.top_k {
        format!("{columns} ranks are more than the top_k {} of this context; build it with a larger one", shape.top_k)
    } else if let Some(rank) = shape.rank_without_experts {
        format!("rank {rank} holds no expert in this context; place one there")
    } else {
        return Ok(columns);
    };
    Err(Error::argument("index_type", "Ranks", why))
}

/// Where elements `[tokens, choices]` lie, if not one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    /// Bytes from one token to the next; a multiple of the element's size, below 2^32. 0: the tokens share their
    /// elements.
    pub token_bytes: usize,
    /// Bytes from one choice of a token to the next, likewise.
    pub choice_bytes: usize,
}

impl Strides {
    /// Elements of `size` bytes without gaps, `choices` for each token.
    pub(super) fn packed(size: usize, choices: usize) -> Strides {
        Strides { token_bytes: choices.saturating_mul(size), choice_bytes: size }
    }

    /// Bytes from the first to the last of `tokens` times `choices` elements of `size` bytes; `None` beyond 64 bits.
    pub(super) fn span(self, size: usize, tokens: usize, choices: usize) -> Option<usize> {
        let (Some(last), Some(choice)) = (tokens.checked_sub(1), choices.checked_sub(1)) else { return Some(0) };
        let ends = last.checked_mul(self.token_bytes)?.checked_add(choice.checked_mul(self.choice_bytes)?)?;
        ends.checked_add(size)
    }

    /// As kernels take them: token to token, choice to choice.
    pub(super) fn words(self, name: &'static str, size: usize) -> Result<[u32; 2]> {
        let word = |bytes: usize| {
            let fits = u32::try_from(bytes).ok().filter(|_| bytes.is_multiple_of(size));
            let advice = || format!("use multiples of {size}, the size of an element, below 2^32");
            fits.ok_or_else(|| Error::argument(name, format!("{bytes} bytes"), advice()))
        };
        Ok([word(self.token_bytes)?, word(self.choice_bytes)?])
    }
}
