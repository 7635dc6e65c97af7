//! What was asked for: shapes, layouts, types; and which rank routed which token where.

use std::collections::BTreeMap;
use std::ops::Range;

use super::elem::Elem;

/// How rows are scaled, and how scales are packed into 4-byte words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    None,
    /// One f32 for 128 columns.
    F32,
    /// One exponent byte for 128 columns, four to a word, little end first, unused bytes zero.
    Ue8m0,
}

/// When the router's weights are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    Dispatch,
    Combine,
    /// Never; every weight is 1.
    None,
}

/// The type in which sums of a rank, and of a node, travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Partial {
    /// The combine dtype.
    Same,
    /// f32.
    Fp32,
    /// e4m3 with one f32 for 128 columns.
    Fp8,
}

/// Where dispatched rows stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Expert by expert; each segment starts and ends at a multiple of `align`.
    Contiguous { align: usize, capacity: usize },
    /// Row i of local expert e at e · per_expert + i.
    Masked { per_expert: usize },
    /// One row per (source rank, token) that has an expert here.
    Token { capacity: usize },
}

/// Order of the dispatched scale words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleOrder {
    /// [row][word].
    RowMajor,
    /// [word][row], the row count rounded up to 4; in the masked layout one such block per expert.
    ColumnMajor,
}

/// One exchange, as the caller described it.
#[derive(Debug, Clone)]
pub struct Spec {
    pub ranks: usize,
    /// Ranks of each node, in order; their sum is `ranks`. What combine sums in which order depends on it, dispatch
    /// does not.
    pub nodes: Vec<usize>,
    pub hidden: usize,
    pub experts: usize,
    pub top_k: usize,
    /// The rank of each expert; local experts of a rank are its experts by ascending id.
    pub expert_rank: Vec<u32>,
    pub dtype: Elem,
    pub scales: Scales,
    /// Type of the rows that experts return.
    pub combine_dtype: Elem,
    pub partial: Partial,
    pub out_dtype: Elem,
    pub weights: Weights,
    pub layout: Layout,
    pub scale_order: ScaleOrder,
    /// Combine adds to what stands in its output.
    pub accumulate: bool,
    /// Rows between the end of an expert's rows and the next segment's start are zeroed, scales included. Without it
    /// they are untouched. The masked and token layouts have no such rows.
    pub zero_padding: bool,
    /// Rows without room are left out, where otherwise an output that is too small gets none. Not in the token layout.
    pub drop_overflow: bool,
    /// The byte with which every output was filled before the run.
    pub poison: u8,
    /// Whether a token may name an expert several times.
    pub duplicates: bool,
    /// The experts that tokens name, each with the experts of `expert_rank` that stand for it, ascending; empty: tokens
    /// name those themselves.
    pub replicas: Vec<Vec<u32>>,
}

impl Spec {
    /// Bytes of one dispatched row.
    pub fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.bytes()
    }

    /// 4-byte scale words of one row.
    pub fn scale_words(&self) -> usize {
        match self.scales {
            Scales::None => 0,
            Scales::F32 => self.hidden.div_ceil(128),
            Scales::Ue8m0 => self.hidden.div_ceil(512),
        }
    }

    /// The experts of a rank, by ascending id.
    pub fn local_experts(&self, rank: usize) -> Vec<usize> {
        (0..self.experts).filter(|&e| self.rank_of(e) == Some(rank)).collect()
    }

    /// The rank of an expert; none if there is no such expert.
    pub fn rank_of(&self, expert: usize) -> Option<usize> {
        self.expert_rank.get(expert).map(|&r| r as usize)
    }

    /// Number of experts that tokens may name.
    pub fn named_experts(&self) -> usize {
        if self.replicas.is_empty() { self.experts } else { self.replicas.len() }
    }

    /// The expert that a token of a rank gets for the one that it names; none if there is no such expert.
    ///
    /// Of its replicas the nearest compete: those of the rank, else of the rank's node, else all. The upper bits of the
    /// token's number times 2 654 435 769, in 32 bits, name a slot, of 16 for each replica that the expert with most
    /// has, rounded up to a power of two, at most 4096; slots take the competing replicas one after the other, from
    /// the rank's number on.
    fn replica(&self, rank: usize, token: usize, named: usize) -> Option<usize> {
        if self.replicas.is_empty() {
            return Some(named).filter(|&e| e < self.experts);
        }
        let node_of = |rank: usize| self.node_ranks().position(|ranks| ranks.contains(&rank));
        let distance = |expert: &u32| match self.rank_of(*expert as usize) {
            Some(other) if other == rank => 0,
            Some(other) if node_of(other) == node_of(rank) => 1,
            _ => 2,
        };
        let all = self.replicas.get(named)?;
        let least = all.iter().map(distance).min()?;
        let near: Vec<u32> = all.iter().copied().filter(|expert| distance(expert) == least).collect();
        let most = self.replicas.iter().map(Vec::len).max().unwrap_or(0);
        let bits = (16 * most).next_power_of_two().min(4096).trailing_zeros();
        let hash = (token as u32).wrapping_mul(2_654_435_769);
        let slot = (u64::from(hash) >> (32 - bits)) as usize;
        near.get((rank + slot) % near.len()).map(|&expert| expert as usize)
    }

    /// The ranks of each node, in order; none for a node without ranks.
    pub fn node_ranks(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.nodes.iter().scan(0, |next, &size| {
            let start = *next;
            *next += size;
            Some(start..*next)
        })
    }

    /// Rows that the output of a rank with `local` experts has room for.
    pub fn capacity_rows(&self, local: usize) -> usize {
        match self.layout {
            Layout::Contiguous { capacity, .. } | Layout::Token { capacity } => capacity,
            Layout::Masked { per_expert } => per_expert * local,
        }
    }
}

/// What one rank dispatched. An id below zero is no expert.
#[derive(Debug, Clone, Default)]
pub struct SourceRank {
    pub rank: usize,
    pub tokens: usize,
    /// [tokens][top_k].
    pub topk_idx: Vec<i64>,
    /// Ids are ranks, each of which stands for its first expert.
    pub by_rank: bool,
    /// [tokens][top_k]; may be empty where weights are not given.
    pub topk_weight: Vec<f32>,
}

impl SourceRank {
    /// Entry `k` of a token: its expert, if there is one.
    pub fn expert(&self, spec: &Spec, token: usize, k: usize) -> Option<usize> {
        let id = usize::try_from(*self.topk_idx.get(token * spec.top_k + k)?).ok()?;
        if self.by_rank {
            return spec.expert_rank.iter().position(|&rank| rank as usize == id);
        }
        spec.replica(self.rank, token, id)
    }

    /// Entry `k` of a token: its weight, 1 where none are given.
    pub fn weight(&self, spec: &Spec, token: usize, k: usize) -> f32 {
        match spec.weights {
            Weights::None => 1.0,
            _ => self.topk_weight.get(token * spec.top_k + k).copied().unwrap_or(f32::NAN),
        }
    }
}

/// Gives the rows that were dispatched; they may be made again on demand instead of stored.
pub trait RowSource {
    /// The bytes of a token's row; `out` is exactly one row long.
    fn row(&self, rank: usize, token: usize, out: &mut [u8]);
    /// The scale words of a token; `out` is exactly `Spec::scale_words` long.
    fn scales(&self, rank: usize, token: usize, out: &mut [u32]);
    /// The words beside a token's row in dispatch; none where that has no side payload.
    fn words(&self, _rank: usize, _token: usize, out: &mut [u32]) {
        out.fill(0);
    }
}

/// Ranks that are known not to have done their part. Empty vectors: all did.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Ranks whose routing was unusable: they sent nothing, to no node, and their own sums are empty.
    pub silent: Vec<bool>,
    /// Ranks whose output was too small: nothing of theirs enters anybody's sums, on their node or another.
    pub overflowed: Vec<bool>,
    /// Rows that were left out, by expert, source rank and token: as `expect::dropped_rows` gives them.
    pub dropped: BTreeMap<(usize, usize, usize), usize>,
}

impl Faults {
    pub fn is_silent(&self, rank: usize) -> bool {
        self.silent.get(rank).copied().unwrap_or(false)
    }

    pub fn is_overflowed(&self, rank: usize) -> bool {
        self.overflowed.get(rank).copied().unwrap_or(false)
    }
}

/// Why a rank's routing is unusable, if it is: an id out of range, or one expert twice in a token where that is not
/// allowed.
pub fn bad_routing(spec: &Spec, source: &SourceRank) -> Option<String> {
    for token in 0..source.tokens {
        let start = token * spec.top_k;
        let Some(ids) = source.topk_idx.get(start..start + spec.top_k) else {
            return Some(format!("token {token} has no routing"));
        };
        for (k, &id) in ids.iter().enumerate() {
            if id < -1 || id >= spec.named_experts() as i64 {
                return Some(format!("token {token}, choice {k}: there is no expert {id}"));
            }
            if id >= 0 && !spec.duplicates && ids[..k].contains(&id) {
                return Some(format!("token {token}, choice {k}: expert {id} is chosen twice"));
            }
        }
    }
    None
}
