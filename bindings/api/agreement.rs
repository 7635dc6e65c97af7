//! What ranks agree on before they build a context, so that all ranks continue or none does.
//!
//! Place in the data path: none. Runs on the caller's thread or host fiber while a context is built, and waits only in
//! the world's collectives.

use super::placement::Placement;
use super::shape::Shape;
use crate::base::{Error, Rank, Result, quoted};
use crate::proxy::Offer;
use crate::transport::World;

/// Values in which ranks may differ; all ranks then use the same combination of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Differing {
    pub few_blocks: bool,
    /// Receives that the network has for one context.
    pub receives: usize,
    /// Numbers that the context may have at the proxy.
    pub numbers: Offer,
}

impl Differing {
    const BYTES: usize = 9;

    fn encode(self) -> [u8; Differing::BYTES] {
        let receives = u32::try_from(self.receives).unwrap_or(u32::MAX);
        let ([a, b, c, d], [e, f, g, h]) = (receives.to_le_bytes(), self.numbers.0);
        [u8::from(self.few_blocks), a, b, c, d, e, f, g, h]
    }

    fn decode([few, a, b, c, d, numbers @ ..]: [u8; Differing::BYTES]) -> Differing {
        let receives = u32::from_le_bytes([a, b, c, d]) as usize;
        Differing { few_blocks: few != 0, receives, numbers: Offer(numbers) }
    }

    /// The combination with another rank's values.
    fn with(self, other: Differing) -> Differing {
        let few_blocks = self.few_blocks || other.few_blocks;
        let (receives, numbers) = (self.receives.min(other.receives), self.numbers.with(other.numbers));
        Differing { few_blocks, receives, numbers }
    }
}

/// Checks that all ranks have the same, usable configuration. Returns the combination of the values in which ranks may
/// differ.
pub(super) fn agree(
    world: &World,
    checked: &Result<(Shape, Placement)>,
    first_epoch: u64,
    differing: Differing,
) -> Result<Differing> {
    let own = checked.as_ref().map(|(shape, placement)| shape.fingerprint(placement, first_epoch, world.generation()));
    world.agree("configuration of a context", own.as_ref().err().copied())?;
    let Ok(own) = own else { return Ok(differing) };
    let sent = [&differing.encode(), own.as_bytes()].concat();
    let mut agreed = differing;
    for (rank, received) in world.all_gather("configuration", &sent)?.iter().enumerate() {
        let (head, theirs) = received.split_first_chunk().unwrap_or((&[0; Differing::BYTES], &[]));
        agreed = agreed.with(Differing::decode(*head));
        if theirs == own.as_bytes() {
            continue;
        }
        let theirs = quoted(theirs);
        // If one text is a prefix of the other, no word differs: the error quotes both texts.
        let differs = own.split(' ').zip(theirs.split(' ')).find(|(mine, theirs)| mine != theirs);
        let (mine, theirs) = differs.unwrap_or((&own, &theirs));
        let name = world.original(Rank(rank as u32));
        let advice = format!("rank {name} has {theirs}; give all ranks the same configuration");
        return Err(Error::config("of this rank", mine, advice));
    }
    Ok(agreed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_in_which_ranks_differ_are_combined_alike_on_all_of_them() {
        let one = Differing { few_blocks: true, receives: 7, numbers: Offer([1, 2, 3, 4]) };
        let other = Differing { few_blocks: false, receives: usize::MAX, numbers: Offer([4, 3, 2, 0]) };
        let both = Differing { few_blocks: true, receives: 7, numbers: Offer([1, 2, 2, 0]) };
        assert_eq!([one.with(other), other.with(one)], [both; 2]);
        for differing in [one, both, Differing { few_blocks: false, ..one }] {
            assert_eq!(Differing::decode(differing.encode()), differing);
        }
        assert_eq!(Differing::decode(other.encode()), Differing { receives: u32::MAX as usize, ..other });
    }
}
