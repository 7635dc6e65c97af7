//! One run described completely: shape, types, layout, routing, mode and seed.
//!
//! Before the data path; pure. `bench` makes a case from its options, `verify` draws cases, and a case prints as a text
//! from which it can be made again. The reference's view of a case is made here, from the formats' definitions and not
//! from the library's types.

use std::fmt;

use tokenyard::internals::api::most_local_experts;
use tokenyard::internals::base::Dtype;

use super::inputs::{Counter, Inputs, ScaleKind, Use};
use super::limits::{
    MAX_AHEAD, MAX_EXPERTS, MAX_GAP, MAX_HIDDEN, MAX_ITERS, MAX_NICS, MAX_NODE, MAX_ROWS, MAX_SMS, MAX_TOKENS,
    MAX_TOP_K, MAX_WORLD, number, seed,
};
use super::links::Link;
use super::routing::{Routed, Router, Routing, RoutingShape};
use super::words::{
    FaultWord, IndexWord, LayoutWord, MissingWord, Mode, NetworkWord, OrderWord, PartialWord, PlacementWord,
    TransportWord, WeightsWord, Word, WorldMode, word,
};
use crate::cli::reference::{self, Elem, SourceRank};
use crate::cli::usage::{Refusal, old_name};

/// Most words of a token's payload.
pub(super) const MAX_PAYLOAD: u64 = 4096;
/// Most ranks of a node with in-place output, or of which some may be missing.
pub(super) const MAX_IN_PLACE_RANKS: usize = 32;
/// Ranks times experts of one rank at the most: these counts fit there, too.
const MAX_COUNTS: usize = 8192;
/// Bytes that rows are multiples of.
pub(super) const ROW_QUANTUM: usize = 16;
/// Columns of one scale.
pub(super) const SCALE_COLUMNS: usize = 128;
/// The largest number of a first dispatch, the library's own limit.
const MAX_EPOCH: u64 = 1 << 42;
/// Chunks of a message at the most: an immediate numbers them in ten bits.
pub const MAX_CHUNKS: usize = 1024;

/// Everything that determines a run, except the device.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    pub world: usize,
    /// Ranks of each node, in order; empty where all ranks are one node.
    pub nodes: Vec<usize>,
    /// The network between nodes; the fields up to `hidden` configure the simulated network.
    pub transport: TransportWord,
    pub link: Link,
    pub network: NetworkWord,
    /// NICs of a rank, if other than the link model's own number.
    pub nics: Option<usize>,
    /// Rows of a chunk of a message between nodes, unless the library chooses.
    pub chunk_rows: Option<usize>,
    /// Received rows and partial rows between nodes are kept twice, if a second copy is not too large.
    pub double_buffer: bool,
    /// In one node: tokens up to which partial rows are LL rows, unless the library chooses.
    pub ll_tokens: Option<usize>,
    /// Tokens of each rank in a round, unless the library chooses.
    pub round_tokens: Option<usize>,
    /// Tokens whose routing metadata one block builds, unless the library chooses.
    pub meta_tile: Option<usize>,
    pub hidden: usize,
    pub experts: usize,
    pub top_k: usize,
    pub dtype: Dtype,
    pub scales: ScaleKind,
    /// Rows are given as bf16 and quantised as they are sent.
    pub quantize: bool,
    /// Type of the rows that experts return.
    pub combine_dtype: Dtype,
    /// Type of combine's output.
    pub out_dtype: Dtype,
    /// Type of partial rows.
    pub partial: PartialWord,
    pub placement: PlacementWord,
    pub weights: WeightsWord,
    pub layout: LayoutWord,
    pub align: usize,
    /// Rows of the output (masked: of each expert's); `None` for the worst case.
    pub capacity: Option<usize>,
    /// Whether dispatch has in-place output: peers store rows directly into the output in the arena.
    pub in_place: bool,
    /// Order of dispatched scales.
    pub scale_order: OrderWord,
    /// Order of the input scales.
    pub input_scales: OrderWord,
    pub index: IndexWord,
    /// Order of choices and of weights that come with dispatch: token by token, or choice by choice.
    pub index_order: OrderWord,
    pub zero_padding: bool,
    /// Rows without room are left out.
    pub drop_overflow: bool,
    pub accumulate: bool,
    /// Each rank draws its own count in 0..=tokens.
    pub ragged: bool,
    /// The token count is read from device memory.
    pub device_count: bool,
    /// Counts are also written to host memory, by source rank, and added to earlier ones.
    pub host_counts: bool,
    /// Bytes between the end of a row and the next, in every table of rows; a multiple of 16.
    pub gap: usize,
    pub tokens: usize,
    pub max_tokens: usize,
    pub routing: Routing,
    /// Chance in percent that a choice is -1.
    pub none_percent: usize,
    /// Replicas of each expert.
    pub replicas: usize,
    /// Tokens may name experts several times: chance in percent that a choice repeats an earlier one of its token.
    pub duplicate_percent: Option<usize>,
    /// Choices of each token in calls, where fewer than `top_k`.
    pub call_top_k: Option<usize>,
    /// Whether handles are compact, also small ones; see `Tuning::compact_handles`.
    pub compact_handles: bool,
    /// Each dispatch sends other rows first; its own rows then go by its handle.
    pub again: bool,
    /// Iterations alternate between calls of this case's format and of another one, in one context.
    pub mixed: bool,
    /// Whether calls go on without missing ranks, and whether one is missing from the first call on.
    pub missing: MissingWord,
    /// Words of each row's side payload in combine; 0 for none.
    pub payload: usize,
    /// Payloads are gathered, choice by choice, instead of summed.
    pub gathered: bool,
    /// Words of each token's side payload in dispatch; 0 for none.
    pub dispatch_payload: usize,
    pub mode: Mode,
    /// Dispatches that are enqueued before their combines; the combines then follow in an order that the seed draws.
    pub ahead: usize,
    /// All ranks meet at a barrier on the device before every dispatch and every combine.
    pub lockstep: bool,
    /// The planned fault of one iteration.
    pub fault: FaultWord,
    pub sms: Option<usize>,
    pub world_mode: WorldMode,
    /// One thread: plain stores stay hidden from other fibers until the next release.
    pub hold_stores: bool,
    pub iters: usize,
    pub seed: u64,
    /// Number of the first dispatch and combine, if other than the library's own.
    pub first_epoch: Option<u64>,
}

impl Default for Case {
    fn default() -> Case {
        Case {
            world: 1,
            nodes: Vec::new(),
            transport: TransportWord::Sim,
            link: Link::None,
            // Verification looks for trouble.
            network: NetworkWord::Hostile,
            nics: None,
            chunk_rows: None,
            double_buffer: true,
            ll_tokens: None,
            round_tokens: None,
            meta_tile: None,
            hidden: 128,
            experts: 8,
            top_k: 2,
            dtype: Dtype::Bf16,
            scales: ScaleKind::None,
            quantize: false,
            combine_dtype: Dtype::Bf16,
            out_dtype: Dtype::Bf16,
            partial: PartialWord::Same,
            placement: PlacementWord::Even,
            weights: WeightsWord::Dispatch,
            layout: LayoutWord::Contiguous,
            align: 1,
            capacity: None,
            in_place: false,
            scale_order: OrderWord::Row,
            input_scales: OrderWord::Row,
            index: IndexWord::I64,
            index_order: OrderWord::Row,
            zero_padding: false,
            drop_overflow: false,
            accumulate: false,
            ragged: false,
            device_count: false,
            host_counts: false,
            gap: 0,
            tokens: 1,
            max_tokens: 1,
            routing: Routing::Uniform,
            none_percent: 0,
            replicas: 1,
            duplicate_percent: None,
            call_top_k: None,
            compact_handles: false,
            again: false,
            mixed: false,
            missing: MissingWord::No,
            payload: 0,
            gathered: false,
            dispatch_payload: 0,
            mode: Mode::Fused,
            ahead: 1,
            lockstep: false,
            fault: FaultWord::None,
            sms: None,
            world_mode: WorldMode::Threads,
            hold_stores: false,
            iters: 1,
            seed: 1,
            first_epoch: None,
        }
    }
}

/// The reference's name of a type.
pub fn elem(dtype: Dtype) -> Elem {
    match dtype {
        Dtype::Fp8E4m3 => Elem::E4m3,
        Dtype::Bf16 => Elem::Bf16,
        Dtype::Fp16 => Elem::Fp16,
        Dtype::Fp32 => Elem::Fp32,
    }
}

impl Case {
    /// Ranks of each node, in order.
    pub fn node_sizes(&self) -> Vec<usize> {
        if self.nodes.is_empty() { vec![self.world] } else { self.nodes.clone() }
    }

    /// Whether ranks are on more than one node.
    pub fn several_nodes(&self) -> bool {
        self.nodes.len() > 1
    }

    /// Whether nodes have different numbers of ranks.
    pub fn uneven_nodes(&self) -> bool {
        self.nodes.windows(2).any(|pair| pair[0] != pair[1])
    }

    /// The ranks of each node as an argument: "8", "4,4" or "3,5".
    pub fn nodes_text(&self) -> String {
        self.node_sizes().iter().map(usize::to_string).collect::<Vec<_>>().join(",")
    }

    /// Words of a token's payload at its source.
    pub fn payload_words(&self) -> usize {
        if self.gathered { self.top_k * self.payload } else { self.payload }
    }

    /// Inputs of one iteration.
    pub fn inputs(&self, iteration: u64) -> Inputs {
        let (dtype, scales) = if self.quantize { (Dtype::Bf16, ScaleKind::None) } else { (self.dtype, self.scales) };
        Inputs { seed: self.seed, iteration, hidden: self.hidden, dtype, scales, uneven: self.quantize }
    }

    /// 4-byte scale words of one dispatched row.
    pub fn scale_words(&self) -> usize {
        self.scales.words(self.hidden)
    }

    /// The reference's name of the scales.
    pub fn reference_scales(&self) -> reference::Scales {
        match self.scales {
            ScaleKind::None => reference::Scales::None,
            ScaleKind::F32 => reference::Scales::F32,
            ScaleKind::Ue8m0 => reference::Scales::Ue8m0,
        }
    }

    /// Draws the routing of every iteration.
    ///
    /// # Errors
    /// If the routing is impossible in this shape, or its file is unusable.
    pub fn router(&self) -> tokenyard::internals::base::Result<Router> {
        let shape = RoutingShape {
            ranks: self.world,
            experts: self.experts,
            top_k: self.top_k,
            max_tokens: self.max_tokens,
            none: self.none_percent as f64 / 100.0,
            duplicate: self.duplicate_percent.unwrap_or(0) as f64 / 100.0,
            seed: self.seed,
        };
        Router::new(&self.routing, shape)
    }

    /// Experts with all their replicas: replica r of expert e is number r · experts + e of them.
    pub fn placed_experts(&self) -> usize {
        self.experts.saturating_mul(self.replicas)
    }

    /// The replicas of each expert; none where experts have one each.
    pub fn replica_lists(&self) -> Vec<Vec<u32>> {
        let of =
            |expert: usize| (0..self.replicas).map(move |replica| (replica * self.experts + expert) as u32).collect();
        if self.replicas == 1 { Vec::new() } else { (0..self.experts).map(of).collect() }
    }

    /// What a rank dispatches, by what the router has drawn. Choices of ranks lead to the ranks of the drawn experts.
    pub fn source(&self, rank: usize, tokens: usize, drawn: Routed) -> SourceRank {
        let Routed { mut topk_idx, topk_weight } = drawn;
        let by_rank = self.index == IndexWord::Ranks;
        if by_rank {
            let placed = self.expert_rank();
            for choices in topk_idx.chunks_mut(self.top_k) {
                let there = |expert: &i64| usize::try_from(*expert).ok().and_then(|e| placed.get(e));
                let ranks: Vec<u32> = choices.iter().filter_map(there).copied().collect();
                choices.fill(-1);
                ranks.iter().for_each(|&rank| choices[rank as usize] = i64::from(rank));
            }
        }
        if let Some(columns) = self.call_top_k {
            topk_idx.chunks_mut(self.top_k).for_each(|choices| choices[columns..].fill(-1));
        }
        SourceRank { rank, tokens, topk_idx, by_rank, topk_weight }
    }

    /// Choices that each token gives.
    pub fn columns(&self) -> usize {
        if self.index == IndexWord::Ranks { self.world } else { self.call_top_k.unwrap_or(self.top_k) }
    }

    /// The rank of each expert, replicas included.
    pub fn expert_rank(&self) -> Vec<u32> {
        let placed = self.placed_experts();
        match self.placement {
            PlacementWord::Even => (0..placed).map(|e| (e * self.world / placed) as u32).collect(),
            PlacementWord::Table => {
                // A token number that no token has, so that placement and choices are unrelated.
                let mut counter = Counter::new(self.seed, Use::Choice, u64::MAX - 1, 0, usize::MAX);
                (0..placed).map(|_| counter.below(self.world) as u32).collect()
            }
        }
    }

    /// Experts of each rank.
    pub fn local_counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.world];
        for rank in self.expert_rank() {
            counts[rank as usize] += 1;
        }
        counts
    }

    /// Rows of the output of every rank (masked: of each expert's): the given number, or the worst case.
    pub fn capacity(&self) -> usize {
        let worst_case =
            || if self.drop_overflow { self.worst_case().next_multiple_of(self.align) } else { self.worst_case() };
        self.capacity.unwrap_or_else(worst_case)
    }

    fn worst_case(&self) -> usize {
        let sent = self.world.saturating_mul(self.max_tokens);
        let local = self.local_counts().into_iter().max().unwrap_or(0);
        // Rows of a token for one expert.
        let times = if self.duplicate_percent.is_some() { self.top_k } else { 1 };
        let rows = match self.layout {
            LayoutWord::Token => sent,
            LayoutWord::Masked => sent.saturating_mul(times),
            LayoutWord::Contiguous => {
                let rows = sent.saturating_mul(self.top_k.min(local.saturating_mul(times)));
                // Every expert that has rows may waste all but one row of its last block.
                let padded = rows.saturating_add(local.min(rows).saturating_mul(self.align - 1));
                padded / self.align * self.align
            }
        };
        rows.max(1)
    }

    /// Payload bytes of one dispatched row with its scales, and of one partial row.
    pub fn row_bytes(&self) -> (u64, u64) {
        let row = self.hidden * self.dtype.bytes() + 4 * self.scale_words();
        let partial = match self.partial {
            PartialWord::Same => self.hidden * self.combine_dtype.bytes(),
            PartialWord::Fp32 => self.hidden * Dtype::Fp32.bytes(),
            PartialWord::Fp8 => self.hidden + 4 * self.hidden.div_ceil(SCALE_COLUMNS),
        };
        (row as u64, partial as u64)
    }

    /// The reference's view of this run; `poison` is the fill byte of outputs.
    pub fn spec(&self, poison: u8) -> reference::Spec {
        reference::Spec {
            ranks: self.world,
            nodes: self.node_sizes(),
            hidden: self.hidden,
            experts: self.placed_experts(),
            top_k: self.top_k,
            expert_rank: self.expert_rank(),
            dtype: elem(self.dtype),
            scales: self.reference_scales(),
            combine_dtype: elem(self.combine_dtype),
            partial: match self.partial {
                PartialWord::Same => reference::Partial::Same,
                PartialWord::Fp32 => reference::Partial::Fp32,
                PartialWord::Fp8 => reference::Partial::Fp8,
            },
            out_dtype: elem(self.out_dtype),
            weights: match self.weights {
                WeightsWord::Dispatch => reference::Weights::Dispatch,
                WeightsWord::Combine => reference::Weights::Combine,
                WeightsWord::None => reference::Weights::None,
            },
            layout: self.reference_layout(self.capacity()),
            scale_order: match self.scale_order {
                OrderWord::Row => reference::ScaleOrder::RowMajor,
                OrderWord::Column => reference::ScaleOrder::ColumnMajor,
            },
            accumulate: self.accumulate,
            zero_padding: self.zero_padding,
            drop_overflow: self.drop_overflow,
            duplicates: self.duplicate_percent.is_some(),
            replicas: self.replica_lists(),
            poison,
        }
    }

    /// The layout, as the reference names it, of an output with that much room.
    pub fn reference_layout(&self, capacity: usize) -> reference::Layout {
        match self.layout {
            LayoutWord::Contiguous => reference::Layout::Contiguous { align: self.align, capacity },
            LayoutWord::Masked => reference::Layout::Masked { per_expert: capacity },
            LayoutWord::Token => reference::Layout::Token { capacity },
        }
    }

    /// Rows of the output of a rank, all experts together.
    pub fn output_rows(&self, local: usize) -> usize {
        if self.layout == LayoutWord::Masked { self.capacity() * local } else { self.capacity() }
    }

    /// Global ids of a rank's experts, ascending.
    pub fn local_experts(&self, rank: usize) -> Vec<u32> {
        let here = |&(_, &owner): &(usize, &u32)| owner as usize == rank;
        self.expert_rank().iter().enumerate().filter(here).map(|(e, _)| e as u32).collect()
    }

    /// Columns come in multiples of this.
    pub fn hidden_quantum(&self) -> usize {
        let smallest =
            [self.dtype, self.combine_dtype, self.out_dtype].map(Dtype::bytes).into_iter().min().unwrap_or(1);
        if self.dtype == Dtype::Fp8E4m3 || self.partial == PartialWord::Fp8 {
            SCALE_COLUMNS
        } else {
            ROW_QUANTUM / smallest
        }
    }

    /// Refuses a case that cannot be run, naming the option.
    ///
    /// # Errors
    /// The first unusable option.
    pub fn check(&self) -> Result<(), Refusal> {
        self.check_shape()?;
        self.check_nodes()?;
        self.check_layout()?;
        if self.duplicate_percent.is_some() && self.max_tokens.saturating_mul(self.top_k) as u64 > MAX_TOKENS {
            let advice =
                format!("with duplicates give at most {}, for top-{}", MAX_TOKENS / self.top_k as u64, self.top_k);
            return Err(Refusal::of("--max-tokens", self.max_tokens, advice));
        }
        if self.max_tokens < self.tokens {
            return Err(Refusal::of(
                "--max-tokens",
                self.max_tokens,
                format!("give at least {}, the --tokens", self.tokens),
            ));
        }
        if !self.gap.is_multiple_of(ROW_QUANTUM) {
            return Err(Refusal::of("gap", self.gap, "give a multiple of 16"));
        }
        if self.again && self.fault == FaultWord::Overflow && !self.drop_overflow {
            let advice = "rows of an output that was too small have no places to go to again; give another fault";
            return Err(Refusal::of("fault", self.fault.name(), advice));
        }
        if self.mode == Mode::Graph && self.ragged && !self.device_count {
            let advice = "a captured call keeps the host's count, and these change; give device_count=yes";
            return Err(Refusal::of("device_count", "no", advice));
        }
        if !(1..=MAX_AHEAD).contains(&(self.ahead as u64)) {
            return Err(Refusal::of("ahead", self.ahead, format!("give 1 to {MAX_AHEAD} dispatches")));
        }
        self.router().map(|_| ()).map_err(|error| Refusal::from_error(&error))
    }

    fn check_shape(&self) -> Result<(), Refusal> {
        let refuse = |name: &str, value: String, advice: String| Err(Refusal::of(name, value, advice));
        if self.world == 0 || self.world as u64 > MAX_WORLD {
            return refuse("--world", self.world.to_string(), format!("give 1 to {MAX_WORLD} ranks"));
        }
        if self.top_k == 0 || self.top_k as u64 > MAX_TOP_K || self.top_k > self.experts {
            let most = self.experts.min(MAX_TOP_K as usize);
            return refuse(
                "--top-k",
                self.top_k.to_string(),
                format!("give 1 to {most}, with {} experts", self.experts),
            );
        }
        if self.placed_experts() as u64 > MAX_EXPERTS {
            let advice = format!("with {} experts give at most {}", self.experts, MAX_EXPERTS / self.experts as u64);
            return refuse("--replicas", self.replicas.to_string(), advice);
        }
        let counts = self.local_counts();
        if self.index == IndexWord::Ranks && (self.top_k < self.world || counts.contains(&0)) {
            let advice = format!(
                "tokens name ranks where --top-k is at least the {} ranks, and each holds an expert; give i32 or i64",
                self.world
            );
            return refuse("--index", self.index.name().to_string(), advice);
        }
        if let Some(given) = self.call_top_k.filter(|given| *given > self.top_k || self.index == IndexWord::Ranks) {
            let advice = format!(
                "a token has --top-k {} choices, or one for each rank; give at most that many, and no ranks",
                self.top_k
            );
            return refuse("--call-top-k", given.to_string(), advice);
        }
        let most = counts.into_iter().max().unwrap_or(0);
        let room = most_local_experts(self.top_k, self.duplicate_percent.is_some());
        if most > room {
            let advice = format!("{most} would live on one rank; give at most {room} for each rank");
            return refuse("--experts", self.experts.to_string(), advice);
        }
        if self.world * most > MAX_COUNTS {
            let advice = format!(
                "{most} would live on one of {} ranks, and ranks times those must not exceed {MAX_COUNTS}; give fewer",
                self.world
            );
            return refuse("--experts", self.experts.to_string(), advice);
        }
        let quantum = self.hidden_quantum();
        if self.hidden == 0 || !self.hidden.is_multiple_of(quantum) {
            let why = match (self.dtype, self.partial) {
                (Dtype::Fp8E4m3, _) => "fp8 rows have a scale for 128 columns",
                (_, PartialWord::Fp8) => "fp8 partial rows have a scale for 128 columns",
                _ => "rows are multiples of 16 bytes",
            };
            let nearest = self.hidden.next_multiple_of(quantum).max(quantum);
            return refuse(
                "--hidden",
                self.hidden.to_string(),
                format!("{why}; give a multiple of {quantum}, say {nearest}"),
            );
        }
        if self.scales != ScaleKind::None && self.dtype != Dtype::Fp8E4m3 {
            let advice =
                format!("only fp8 rows have scales and these are {}; leave it out or give --dtype fp8", self.dtype);
            return refuse("--scales", self.scales.name().to_string(), advice);
        }
        if self.quantize && self.scales == ScaleKind::None {
            let advice =
                format!("it makes fp8 rows with scales and these are {}; leave it out or give --dtype fp8", self.dtype);
            return refuse("--quantize", "given".to_string(), advice);
        }
        Ok(())
    }

    fn check_nodes(&self) -> Result<(), Refusal> {
        let nodes = self.nodes_text();
        let sum: usize = self.node_sizes().iter().sum();
        if sum != self.world || self.nodes.contains(&0) {
            let advice = format!("the nodes sum to {sum} and the world has {} ranks; make them agree", self.world);
            return Err(Refusal::of("--ranks-per-node", nodes, advice));
        }
        let sizes = self.node_sizes();
        let largest = sizes.iter().copied().max().unwrap_or(0);
        if sizes.len().max(largest) as u64 > MAX_NODE {
            let advice = format!("give at most {MAX_NODE} nodes of at most {MAX_NODE} ranks");
            return Err(Refusal::of("--ranks-per-node", nodes, advice));
        }
        if self.link != Link::None && !self.several_nodes() {
            let advice = "the world is one node and has no such link; leave it out, or give fewer --ranks-per-node";
            return Err(Refusal::of("--link", self.link, advice));
        }
        if self.transport != TransportWord::Sim && self.world_mode == WorldMode::OneThread {
            let advice = "a world on one thread has time of its own, which no real network keeps; give sim";
            return Err(Refusal::of("--transport", self.transport.name(), advice));
        }
        if self.fault == FaultWord::Forged && !(self.several_nodes() && self.world_mode == WorldMode::OneThread) {
            let advice = "messages are tampered with between nodes, of worlds on one thread; give nodes and world_mode=one-thread";
            return Err(Refusal::of("fault", self.fault.name(), advice));
        }
        if let Some(nics) = self.nics.filter(|nics| !(1..=MAX_NICS).contains(&(*nics as u64))) {
            return Err(Refusal::of("nics", nics, format!("give 1 to {MAX_NICS}")));
        }
        let round = self.round_tokens.unwrap_or(self.max_tokens).clamp(1, self.max_tokens.max(1));
        // Routing metadata has a chunk of its own.
        let least = round.div_ceil(MAX_CHUNKS - 1).max(1);
        if let Some(rows) = self.chunk_rows.filter(|rows| self.several_nodes() && *rows < least) {
            let advice = format!("a message has at most {MAX_CHUNKS} chunks; give at least {least}, or leave it out");
            return Err(Refusal::of("--chunk-rows", rows, advice));
        }
        Ok(())
    }

    fn check_layout(&self) -> Result<(), Refusal> {
        let refuse = |name: &str, value: String, advice: String| Err(Refusal::of(name, value, advice));
        if let Some(why) = self.why_nobody_is_missing() {
            return refuse("--missing", self.missing.name().to_string(), format!("{why}; leave one of them out"));
        }
        if let Some(why) = self.why_no_payload() {
            return refuse("--payload", self.payload.to_string(), why.to_string());
        }
        if self.align == 0 || (self.layout != LayoutWord::Contiguous && self.align != 1) {
            let advice = "only the contiguous layout aligns, to 1 row or more; leave it out".to_string();
            return refuse("--align", self.align.to_string(), advice);
        }
        if self.drop_overflow && self.layout == LayoutWord::Contiguous && !self.capacity().is_multiple_of(self.align) {
            let advice = format!("with drop_overflow give a multiple of {}, the alignment", self.align);
            return refuse("--capacity", self.capacity().to_string(), advice);
        }
        if let Some(why) = self.why_not_in_place().filter(|_| self.in_place) {
            return refuse("--in-place", "given".to_string(), format!("{why}; leave it out"));
        }
        if self.drop_overflow && self.layout == LayoutWord::Token {
            let advice = "rows of the token layout are for several experts, so none is left out; give no";
            return refuse("drop_overflow", "yes".to_string(), advice.to_string());
        }
        if self.layout == LayoutWord::Token && self.weights == WeightsWord::Combine {
            let advice = "in the token layout the caller sums a rank's experts, and needs the weights at dispatch; give \
                          dispatch or none, or another --layout";
            return refuse("--weights", self.weights.name().to_string(), advice.to_string());
        }
        let rows = self.world.saturating_mul(self.max_tokens).saturating_mul(self.top_k);
        if rows > i32::MAX as usize {
            let most = i32::MAX as usize / self.world / self.top_k;
            let advice = format!(
                "row numbers have 32 bits; give at most {most} with {} ranks and top-{}",
                self.world, self.top_k
            );
            return refuse("--max-tokens", self.max_tokens.to_string(), advice);
        }
        let capacity = self.capacity();
        let experts =
            if self.layout == LayoutWord::Masked { self.local_counts().into_iter().max().unwrap_or(1) } else { 1 };
        let all = capacity.saturating_mul(experts);
        if capacity == 0 || all > i32::MAX as usize {
            // The worst case depends on other options.
            let (name, value, instead) = match (self.capacity, self.layout) {
                (Some(_), _) => ("--capacity", capacity, ""),
                (None, LayoutWord::Contiguous) => ("--align", self.align, ""),
                (None, _) => ("--max-tokens", self.max_tokens, ", or give a --capacity"),
            };
            let advice = format!("row numbers have 32 bits; stay below {} rows in all, not {all}{instead}", i32::MAX);
            return refuse(name, value.to_string(), advice);
        }
        Ok(())
    }
}

fn flag(on: bool) -> String {
    if on { "yes" } else { "no" }.to_string()
}

fn read_flag(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err("give yes or no".to_string()),
    }
}

fn within<const LEAST: u64, const MOST: u64>(text: &str) -> Result<usize, String> {
    number(text, LEAST, MOST)
}

/// A number, or `-` for none.
fn or_none<const LEAST: u64, const MOST: u64>(text: &str) -> Result<Option<usize>, String> {
    if text == "-" { Ok(None) } else { number(text, LEAST, MOST).map(Some) }
}

fn read_epoch(text: &str) -> Result<Option<u64>, String> {
    if text == "-" { Ok(None) } else { number(text, 1, MAX_EPOCH).map(|epoch| Some(epoch as u64)) }
}

/// A number, or `-` for none.
fn optional<T: fmt::Display>(value: Option<T>) -> String {
    value.map_or("-".to_string(), |v| v.to_string())
}

/// Sizes joined by `+`, since fields are separated by commas; `-` for one node.
fn show_nodes(nodes: Vec<usize>) -> String {
    let sizes: Vec<String> = nodes.iter().map(usize::to_string).collect();
    if sizes.is_empty() { "-".to_string() } else { sizes.join("+") }
}

fn read_nodes(text: &str) -> Result<Vec<usize>, String> {
    if text == "-" {
        return Ok(Vec::new());
    }
    let sizes: Result<Vec<usize>, String> = text.split('+').map(|size| number(size, 1, MAX_NODE)).collect();
    sizes.map_err(|advice| format!("{advice} for each node, say 3+5"))
}

macro_rules! fields {
    ($($field:ident: $show:expr, $read:expr;)+) => {
        impl Case {
            /// Every field by name, printed.
            pub(super) fn fields(&self) -> Vec<(&'static str, String)> {
                vec![$((stringify!($field), $show(self.$field.clone()))),+]
            }

            /// Sets a field by its name; none if there is no such field.
            fn set(&mut self, name: &str, text: &str) -> Option<Result<(), String>> {
                match name {
                    $(stringify!($field) => Some($read(text).map(|value| self.$field = value)),)+
                    _ => None,
                }
            }
        }
    };
}

fn show<T: fmt::Display>(value: T) -> String {
    value.to_string()
}

fn show_word<T: Word>(value: T) -> String {
    value.name().to_string()
}

fn read_routing(text: &str) -> Result<Routing, String> {
    Routing::parse(text).map_err(|error| error.to_string())
}

fields! {
    world: show, within::<1, MAX_WORLD>;
    nodes: show_nodes, read_nodes;
    transport: show_word, word;
    link: show, Link::parse;
    network: show_word, word;
    nics: optional, or_none::<1, MAX_NICS>;
    chunk_rows: optional, or_none::<1, MAX_TOKENS>;
    double_buffer: flag, read_flag;
    ll_tokens: optional, or_none::<0, MAX_TOKENS>;
    round_tokens: optional, or_none::<1, MAX_TOKENS>;
    meta_tile: optional, or_none::<1, MAX_TOKENS>;
    hidden: show, within::<1, MAX_HIDDEN>;
    experts: show, within::<1, MAX_EXPERTS>;
    top_k: show, within::<1, MAX_TOP_K>;
    dtype: show_word, word;
    scales: show_word, word;
    quantize: flag, read_flag;
    combine_dtype: show_word, word;
    out_dtype: show_word, word;
    partial: show_word, word;
    placement: show_word, word;
    weights: show_word, word;
    layout: show_word, word;
    align: show, within::<1, MAX_TOKENS>;
    capacity: optional, or_none::<1, MAX_ROWS>;
    in_place: flag, read_flag;
    scale_order: show_word, word;
    input_scales: show_word, word;
    index: show_word, word;
    index_order: show_word, word;
    zero_padding: flag, read_flag;
    drop_overflow: flag, read_flag;
    accumulate: flag, read_flag;
    ragged: flag, read_flag;
    device_count: flag, read_flag;
    host_counts: flag, read_flag;
    gap: show, within::<0, MAX_GAP>;
    tokens: show, within::<0, MAX_TOKENS>;
    max_tokens: show, within::<1, MAX_TOKENS>;
    routing: show, read_routing;
    none_percent: show, within::<0, 100>;
    replicas: show, within::<1, MAX_EXPERTS>;
    duplicate_percent: optional, or_none::<0, 100>;
    call_top_k: optional, or_none::<1, MAX_TOP_K>;
    compact_handles: flag, read_flag;
    again: flag, read_flag;
    mixed: flag, read_flag;
    missing: show_word, word;
    payload: show, within::<0, MAX_PAYLOAD>;
    gathered: flag, read_flag;
    dispatch_payload: show, within::<0, MAX_PAYLOAD>;
    mode: show_word, word;
    ahead: show, within::<1, MAX_AHEAD>;
    lockstep: flag, read_flag;
    fault: show_word, word;
    sms: optional, or_none::<1, MAX_SMS>;
    world_mode: show_word, word;
    hold_stores: flag, read_flag;
    iters: show, within::<1, MAX_ITERS>;
    seed: show, seed;
    first_epoch: optional, read_epoch;
}

/// Fields that are not the default's, `name=value`, separated by commas.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for ((name, value), (_, default)) in self.fields().into_iter().zip(Case::default().fields()) {
            if value != default {
                write!(f, "{separator}{name}={value}")?;
                separator = ",";
            }
        }
        Ok(())
    }
}

impl Case {
    /// Reads the printed form of a case.
    ///
    /// # Errors
    /// The first field that does not exist, is not usable by itself, or is given twice. A field's old name is refused
    /// with its new name.
    pub fn parse(text: &str) -> Result<Case, Refusal> {
        let mut case = Case::default();
        let mut given = Vec::new();
        for field in text.split(',').filter(|field| !field.is_empty()) {
            let (name, value) = field.split_once('=').unwrap_or((field, ""));
            match case.set(name, value) {
                None => {
                    let advice = old_name(name).unwrap_or_else(|| {
                        format!("there is no `{name}`; give name=value pairs as a failure printed them")
                    });
                    return Err(Refusal::of("--replay", field, advice));
                }
                Some(Err(advice)) => return Err(Refusal::of("--replay", field, advice)),
                Some(Ok(())) if given.contains(&name) => {
                    return Err(Refusal::of(
                        "--replay",
                        field,
                        format!("`{name}` is given more than once: give it once"),
                    ));
                }
                Some(Ok(())) => given.push(name),
            }
        }
        Ok(case)
    }
}

#[cfg(test)]
#[path = "case_tests.rs"]
mod tests;
