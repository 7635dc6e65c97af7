//! Counts that come first: what the host learns of a dispatch before its rows are placed.
//!
//! Place: between the halves of a dispatch. The sending half's launch writes the words, and the caller's thread polls
//! them.

use super::layout::Layout;
use crate::kernels::HostBuffer;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many rows a dispatch brings to this rank, from [`AllToAll::counts`](super::AllToAll::counts). A rank whose
/// routing was unusable sends none.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Rows of each local expert.
    pub experts: Vec<usize>,
    /// For each rank of this generation, in order: its tokens that have a row here, which are its rows in
    /// [`Layout::Token`].
    pub sources: Vec<usize>,
}

impl Counts {
    /// Rows of each local expert, rounded up to a multiple of `align`, as [`Layout::Contiguous`] places them; 0 counts
    /// as 1.
    pub fn aligned(&self, align: usize) -> Vec<usize> {
        let align = align.max(1);
        // Kernels refuse counts beyond int32, and an alignment beyond it has no output.
        self.experts.iter().map(|rows| rows.div_ceil(align).saturating_mul(align)).collect()
    }

    /// The layout with exactly as many rows as the dispatch needs.
    pub fn fit(&self, layout: Layout) -> Layout {
        match layout {
            Layout::Contiguous { align, .. } => {
                let rows = self.aligned(align).into_iter().fold(0, usize::saturating_add);
                Layout::Contiguous { align, capacity: rows }
            }
            Layout::Masked { .. } => Layout::Masked { per_expert: self.experts.iter().copied().max().unwrap_or(0) },
            Layout::Token { .. } => Layout::Token { capacity: self.sources.iter().sum() },
        }
    }
}

/// The words of one dispatch that its launch writes. Each bears the number of the words' use, so that those of the use
/// before are not taken for new ones, and no order among the stores matters. Every use writes all words, so that no
/// word is ever 2^32 uses old.
#[derive(Debug, Clone)]
pub(crate) struct CountWords {
    words: Arc<HostBuffer>,
    experts: usize,
    number: u32,
}

impl CountWords {
    /// Bytes of the words for so many local experts and ranks.
    pub fn bytes(experts: usize, ranks: usize) -> usize {
        8 * (experts + ranks)
    }

    /// For use `number` of the words, another one than that of the last use and, at first, than 0.
    pub fn new(words: Arc<HostBuffer>, experts: usize, number: u32) -> CountWords {
        CountWords { words, experts, number }
    }

    /// The number of the words' use.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Where kernels write them.
    pub fn address(&self) -> u64 {
        self.words.view().ptr()
    }

    /// The counts, once all words are here.
    pub fn read(&self) -> Option<Counts> {
        let own = |word: &AtomicU64| {
            let word = word.load(Ordering::Relaxed);
            (word >> 32 == u64::from(self.number)).then_some((word & 0xffff_ffff) as usize)
        };
        let (experts, sources) = self.words.words().split_at_checked(self.experts)?;
        // The last first: while it is missing, a look is one load.
        own(sources.last()?)?;
        // A vector that grows as it is collected would be allocated seven times for 256 experts.
        let all = |words: &[AtomicU64]| {
            let mut counts = Vec::with_capacity(words.len());
            for word in words {
                counts.push(own(word)?);
            }
            Some(counts)
        };
        Some(Counts { experts: all(experts)?, sources: all(sources)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Device;

    fn words(number: u32) -> CountWords {
        let device = Device::cpu().unwrap();
        CountWords::new(Arc::new(device.alloc_host(CountWords::bytes(3, 2)).unwrap()), 3, number)
    }

    #[test]
    fn counts_are_here_once_every_word_bears_the_uses_number() {
        let words = words(7);
        let at = |i: usize| &words.words.words()[i];
        assert_eq!(words.read(), None);
        for (i, value) in [(4, 9), (0, 1), (3, 4), (1, 0)] {
            at(i).store(7 << 32 | value, Ordering::Relaxed);
            assert_eq!(words.read(), None, "{i}");
        }
        at(2).store(6 << 32 | 5, Ordering::Relaxed);
        assert_eq!(words.read(), None, "of another use");
        at(2).store(7 << 32 | 5, Ordering::Relaxed);
        assert_eq!(words.read(), Some(Counts { experts: vec![1, 0, 5], sources: vec![4, 9] }));
        let next = CountWords::new(words.words.clone(), 3, 8);
        assert_eq!(next.read(), None, "of the use before");
    }

    #[test]
    fn outputs_fit_exactly() {
        let counts = Counts { experts: vec![1, 0, 5, 8], sources: vec![4, 9] };
        assert_eq!(counts.aligned(4), [4, 0, 8, 8]);
        assert_eq!(counts.aligned(0), [1, 0, 5, 8]);
        let contiguous = |align, capacity| Layout::Contiguous { align, capacity };
        assert_eq!(counts.fit(contiguous(4, 999)), contiguous(4, 20));
        assert_eq!(counts.fit(contiguous(1, 0)), contiguous(1, 14));
        assert_eq!(counts.fit(Layout::Masked { per_expert: 99 }), Layout::Masked { per_expert: 8 });
        assert_eq!(counts.fit(Layout::Token { capacity: 99 }), Layout::Token { capacity: 13 });
        let huge = Counts { experts: vec![1, 1], sources: vec![1] };
        assert_eq!(huge.fit(contiguous(usize::MAX, 0)), contiguous(usize::MAX, usize::MAX));
    }
}
