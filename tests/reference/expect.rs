//! Which row must stand where in the output of a rank: by the definition, with no algorithm to get wrong.
//!
//! Every (expert, source rank, token) that was routed to the rank is listed, the list is sorted, and rows are laid out
//! in that order. Two passes over the routing, one sort, no prefix sums over ranks.

use std::collections::BTreeMap;

use super::spec::{Faults, Layout, SourceRank, Spec};

/// The token whose row stands in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub source: usize,
    pub token: usize,
    /// Local expert index; none in the token layout.
    pub local: Option<usize>,
}

/// What a row of the output must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// The row of this token.
    Token(Place),
    /// Between an expert's last row and the next segment.
    Padding,
    /// Nothing: after the rows used.
    Free,
}

/// The whole expected output of one rank.
#[derive(Debug, Clone)]
pub struct Expected {
    /// One per row of capacity.
    pub slots: Vec<Slot>,
    /// Global ids of the local experts, ascending.
    pub experts: Vec<usize>,
    /// Rows of each local expert that are there.
    pub counts: Vec<usize>,
    /// Contiguous: segment starts, and the end of the last; masked: e · per_expert; token layout: empty.
    pub offsets: Vec<usize>,
    /// Contiguous: rows used with padding; masked: sum of the counts; token layout: rows. Rows that are left out count.
    pub used: usize,
    /// Capacity needed: rows used, or in the masked layout rows of the fullest expert.
    pub needed: usize,
    /// Capacity given, in the unit of `needed`.
    pub given: usize,
}

impl Expected {
    /// Whether the output is too small for what was routed here.
    pub fn overflow(&self) -> bool {
        self.needed > self.given
    }

    /// An output that is too small stays untouched, and its counts and offsets are zero.
    fn refused(mut self, spec: &Spec) -> Expected {
        self.slots.fill(Slot::Free);
        self.counts.fill(0);
        if !matches!(spec.layout, Layout::Masked { .. }) {
            self.offsets.fill(0);
        }
        self.used = 0;
        self
    }

    /// An output without room for all rows has those before its end, or before the end of each expert's.
    fn cut(mut self, spec: &Spec) -> Expected {
        for (e, count) in self.counts.iter_mut().enumerate() {
            let start = if let Layout::Contiguous { .. } = spec.layout { self.offsets[e] } else { 0 };
            *count = (*count).min(self.given.saturating_sub(start));
        }
        if let Layout::Contiguous { capacity, .. } = spec.layout {
            self.offsets.iter_mut().for_each(|offset| *offset = (*offset).min(capacity));
        }
        self
    }
}

/// The rows of a rank's output that are left out for lack of room, by expert, source rank and token. Of several rows of
/// a token and an expert the last choices' are left out.
pub fn dropped_rows(
    spec: &Spec,
    sources: &[SourceRank],
    faults: &Faults,
    dst: usize,
) -> BTreeMap<(usize, usize, usize), usize> {
    let Expected { slots, experts, .. } = expected_dispatch(spec, sources, faults, dst);
    let mut left = BTreeMap::new();
    for (local, source, token) in routed_here(spec, sources, faults, &experts) {
        *left.entry((experts[local], source, token)).or_default() += 1;
    }
    for slot in slots {
        let Slot::Token(Place { source, token, local: Some(local) }) = slot else { continue };
        if let Some(rows) = left.get_mut(&(experts[local], source, token)) {
            *rows -= 1;
        }
    }
    left.retain(|_, rows: &mut usize| *rows > 0);
    left
}

/// The expected output of rank `dst`.
pub fn expected_dispatch(spec: &Spec, sources: &[SourceRank], faults: &Faults, dst: usize) -> Expected {
    let experts = spec.local_experts(dst);
    let routed = routed_here(spec, sources, faults, &experts);
    let counts: Vec<usize> = (0..experts.len()).map(|e| routed.iter().filter(|r| r.0 == e).count()).collect();
    let mut slots = vec![Slot::Free; spec.capacity_rows(experts.len())];
    let mut put = |row: usize, slot: Slot| {
        if let Some(place) = slots.get_mut(row) {
            *place = slot;
        }
    };
    let (offsets, used, needed, given) = match spec.layout {
        Layout::Contiguous { align, capacity } => {
            let mut offsets = vec![0];
            for (e, &count) in counts.iter().enumerate() {
                let start = offsets[e];
                let end = (start + count).next_multiple_of(align.max(1));
                let of_expert = routed.iter().filter(|r| r.0 == e);
                for (i, &(_, source, token)) in of_expert.enumerate() {
                    put(start + i, Slot::Token(Place { source, token, local: Some(e) }));
                }
                (start + count..end).for_each(|row| put(row, Slot::Padding));
                offsets.push(end);
            }
            let used = offsets[counts.len()];
            (offsets, used, used, capacity)
        }
        Layout::Masked { per_expert } => {
            for e in 0..counts.len() {
                let of_expert = routed.iter().filter(|r| r.0 == e);
                for (i, &(_, source, token)) in of_expert.enumerate().take(per_expert) {
                    put(e * per_expert + i, Slot::Token(Place { source, token, local: Some(e) }));
                }
            }
            let offsets = (0..=counts.len()).map(|e| e * per_expert).collect();
            (offsets, routed.len(), counts.iter().copied().max().unwrap_or(0), per_expert)
        }
        Layout::Token { capacity } => {
            let mut tokens: Vec<(usize, usize)> = routed.iter().map(|&(_, source, token)| (source, token)).collect();
            tokens.sort_unstable();
            tokens.dedup();
            for (row, &(source, token)) in tokens.iter().enumerate() {
                put(row, Slot::Token(Place { source, token, local: None }));
            }
            (Vec::new(), tokens.len(), tokens.len(), capacity)
        }
    };
    let expected = Expected { slots, experts, counts, offsets, used, needed, given };
    match (expected.overflow(), spec.drop_overflow) {
        (false, _) => expected,
        (true, true) => expected.cut(spec),
        (true, false) => expected.refused(spec),
    }
}

/// Every (local expert, source rank, token) routed to the given experts, sorted.
fn routed_here(spec: &Spec, sources: &[SourceRank], faults: &Faults, experts: &[usize]) -> Vec<(usize, usize, usize)> {
    let mut routed = Vec::new();
    for (rank, source) in sources.iter().enumerate().filter(|(rank, _)| !faults.is_silent(*rank)) {
        for token in 0..source.tokens {
            for k in 0..spec.top_k {
                let local = source.expert(spec, token, k).and_then(|e| experts.binary_search(&e).ok());
                if let Some(local) = local {
                    routed.push((local, rank, token));
                }
            }
        }
    }
    routed.sort_unstable();
    routed
}
