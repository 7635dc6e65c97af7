//! The shape that a context was built for: the settings that its plan, its launches and the checks of its calls use.

use super::call_format::{CallFormat, PayloadWords, Room, Weights};
use super::format::{Partial, RowFormat, SCALE_COLUMNS, Scales};
use super::missing::MissingRanks;
use super::placement::Placement;
use super::plan::{CallBytes, PlanInput};
use super::tuning::ArenaPlace;
use crate::base::{Dtype, Error, Rank, Result};
use crate::ffi::layout as raw;
use crate::proxy::wire::Nodes;

/// Most columns of a row.
const MAX_HIDDEN: usize = 1 << 20;

/// At most so many blocks are few (`TY_FEW_BLOCKS`).
pub const FEW_BLOCKS: u32 = raw::TY_FEW_BLOCKS;

/// Tokens of a round up to which partial rows are LL rows, in one node of ranks with many blocks (docs/notebook.md,
/// "LL rows").
pub(super) const LL_TOKENS: usize = 256;

/// The shape that a context was built for.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    /// This rank and the number of ranks, in this generation.
    pub rank: usize,
    pub ranks: usize,
    /// Ranks of the first generation, as columns of `IndexType::Ranks`, and the first of them that holds no expert.
    pub first_ranks: usize,
    pub rank_without_experts: Option<usize>,
    /// This rank in the first generation, as nodes and placement name it.
    pub name: Rank,
    pub nodes: Nodes,
    pub nics: u8,
    pub chunk_rows: Option<usize>,
    /// Receives of a NIC that are meant for this context.
    pub receives: usize,
    pub double_buffer_bytes: u64,
    pub missing: MissingRanks,
    pub ll_tokens: Option<usize>,
    pub round_tokens: Option<usize>,
    /// Rows and alignment of the in-place output.
    pub in_place: Option<(usize, usize)>,
    pub arena: ArenaPlace,
    pub hidden: usize,
    pub experts: usize,
    pub top_k: usize,
    /// Whether a token may name an expert several times.
    pub duplicates: bool,
    pub max_tokens: usize,
    pub format: RowFormat,
    pub quantize: bool,
    pub combine_dtype: Dtype,
    /// Of calls that have a side payload.
    pub payload: Option<PayloadWords>,
    /// Most words of a token's side payload.
    pub payload_words: usize,
    /// Words of a token's side payload in dispatch, of calls that have one.
    pub token_words: usize,
    /// Most of them.
    pub dispatch_payload_words: usize,
    /// Of the arena, beyond this format.
    pub room: Room,
    pub partial: Partial,
    pub weights: Weights,
    pub row_bytes: usize,
    pub scale_words: usize,
    pub local_experts: usize,
    pub max_local_experts: usize,
}

impl Shape {
    /// The format of its calls.
    pub fn call_format(&self) -> CallFormat {
        let format = CallFormat::new(self.hidden, self.format, self.max_tokens).quantize(self.quantize);
        format.combine_dtype(self.combine_dtype).weights(self.weights)
    }

    /// The same with calls of another format.
    pub fn of_format(&self, format: &CallFormat) -> Shape {
        let CallFormat { hidden, rows, quantize, combine_dtype, weights, max_tokens, payload, token_words } = *format;
        let (row_bytes, scale_words) = (rows.row_bytes(hidden), rows.scale_bytes(hidden) / 4);
        let nodes = self.nodes.clone();
        Shape {
            hidden,
            format: rows,
            quantize,
            combine_dtype,
            weights,
            max_tokens,
            payload,
            token_words,
            row_bytes,
            scale_words,
            nodes,
            ..*self
        }
    }

    /// Refuses dispatched rows that no context has.
    ///
    /// # Errors
    /// `Config`.
    pub fn check_rows(&self) -> Result<()> {
        if !(1..=MAX_HIDDEN).contains(&self.hidden) {
            return Err(Error::config("hidden", self.hidden, format!("use 1 to {MAX_HIDDEN} columns")));
        }
        if !self.row_bytes.is_multiple_of(16) {
            let advice = format!("a row of {} bytes is no multiple of 16; pad the hidden size", self.row_bytes);
            return Err(Error::config("hidden", self.hidden, advice));
        }
        let blocks = self.hidden.is_multiple_of(SCALE_COLUMNS);
        if self.format.dtype == Dtype::Fp8E4m3 && !blocks {
            return Err(Error::config("hidden", self.hidden, "fp8 rows have a scale per 128 columns; use a multiple"));
        }
        if self.quantize && (self.format.dtype != Dtype::Fp8E4m3 || self.format.scales == Scales::None) {
            let advice = format!(
                "it makes fp8 rows with scales, and these are {} with scales {:?}; use fp8 with F32 or Ue8m0",
                self.format.dtype, self.format.scales
            );
            return Err(Error::config("quantize", true, advice));
        }
        Ok(())
    }

    /// Refuses experts' rows, or partial rows, that no context has. `combine_dtype`: what errors call their type.
    ///
    /// # Errors
    /// `Config`.
    pub fn check_sums(&self, combine_dtype: &'static str) -> Result<()> {
        self.float_code(combine_dtype, self.combine_dtype)?;
        if self.partial == Partial::Fp8 && !self.hidden.is_multiple_of(SCALE_COLUMNS) {
            let advice = "fp8 partial rows have a scale per 128 columns; use a multiple, or other partial rows";
            return Err(Error::config("hidden", self.hidden, advice));
        }
        Ok(())
    }

    /// Bytes of a dispatched row in the arena, scales and side payload included.
    pub fn slot_bytes(&self) -> usize {
        (self.row_bytes + 4 * (self.scale_words + self.token_words)).next_multiple_of(16)
    }

    /// `room`, and that for calls of this shape, whose partial rows may be LL rows for at most `ll_tokens` tokens.
    pub fn add_to(&self, room: Room, ll_tokens: usize) -> Room {
        let few = if self.max_tokens <= ll_tokens { self.max_tokens } else { 0 };
        Room {
            slot_bytes: room.slot_bytes.max(self.slot_bytes()),
            partial_bytes: room.partial_bytes.max(self.partial_bytes()),
            weights_with_dispatch: room.weights_with_dispatch || self.weights_with_dispatch(),
            weights_with_combine: room.weights_with_combine || self.weights_with_combine(),
            few_tokens: room.few_tokens.max(few),
        }
    }

    /// What its calls take of the arena.
    pub fn call_bytes(&self) -> CallBytes {
        let (slot_bytes, partial_bytes) = (self.slot_bytes(), self.partial_bytes());
        CallBytes { slot_bytes, partial_bytes, weights_with_dispatch: self.weights_with_dispatch() }
    }

    /// Chooses which partial rows are LL rows, unless `Tuning::ll_tokens` did. `few_blocks`: whether calls of any rank
    /// have few blocks.
    pub fn choose_ll_tokens(&mut self, few_blocks: bool) {
        self.ll_tokens.get_or_insert(if few_blocks { 0 } else { LL_TOKENS });
        // A row that is not waited for to its end would stay.
        if self.missing != MissingRanks::Fatal {
            self.ll_tokens = Some(0);
        }
    }

    /// Bits of a token in a row of a tile's bitmap (`ty_context.bitmap_bits`): whether it goes there, or how often.
    pub fn bitmap_bits(&self) -> usize {
        token_bits(self.top_k, self.duplicates)
    }

    /// Words of a tile's bitmap for an expert, where tiles have so many groups of 32 tokens: the tokens' bits, and the
    /// rows before each group; of each an odd number (`bitmap_row`, `rows_before_groups`).
    pub fn bitmap_words(&self, groups: usize) -> usize {
        expert_words(self.bitmap_bits(), groups)
    }

    /// TY_WEIGHTS_*.
    pub fn weights_code(&self) -> u32 {
        match self.weights {
            Weights::Dispatch => raw::TY_WEIGHTS_DISPATCH,
            Weights::Combine => raw::TY_WEIGHTS_COMBINE,
            Weights::None => raw::TY_WEIGHTS_NONE,
        }
    }

    /// From vectors of 16 elements to scale words: a scale covers 128 elements, and a word holds one or four scales.
    pub fn scale_shift(&self) -> u32 {
        match self.format.scales {
            Scales::None => 31,
            Scales::F32 => 3,
            Scales::Ue8m0 => 5,
        }
    }

    /// TY_QUANTIZE_*.
    pub fn quantize_code(&self) -> u32 {
        match (self.quantize, self.format.scales) {
            (true, Scales::F32) => raw::TY_QUANTIZE_F32,
            (true, Scales::Ue8m0) => raw::TY_QUANTIZE_UE8M0,
            _ => raw::TY_QUANTIZE_NONE,
        }
    }

    pub fn weights_with_dispatch(&self) -> bool {
        self.weights == Weights::Dispatch
    }

    pub fn weights_with_combine(&self) -> bool {
        self.weights == Weights::Combine
    }

    /// Whether int32 can number the rows of so many experts, of any routing, with each expert's start aligned to
    /// `align`. The alignment itself must fit int32 even if there is no expert.
    pub fn is_counted(&self, experts: usize, align: usize) -> bool {
        let rows = self.ranks.saturating_mul(self.max_tokens).saturating_mul(self.top_k);
        rows.saturating_add(experts.max(1).saturating_mul(align)) <= i32::MAX as usize
    }

    pub fn weights_sentence(&self) -> &'static str {
        match self.weights {
            Weights::Dispatch => "this call takes weights with dispatch",
            Weights::Combine => "this call takes weights with combine",
            Weights::None => "this call has no weights",
        }
    }

    pub fn scales_sentence(&self) -> &'static str {
        match self.format.scales {
            Scales::None => "rows of this call have no scales",
            _ => "rows of this call have scales",
        }
    }

    /// Bytes of a row as the caller gives it.
    pub fn input_row_bytes(&self) -> usize {
        if self.quantize { self.hidden * Dtype::Bf16.bytes() } else { self.row_bytes }
    }

    /// Whether rows are given with scales, and why.
    pub fn input_scales(&self) -> (bool, &'static str) {
        match (self.quantize, self.format.scales) {
            (true, _) => (false, "this call makes the scales as it quantises bf16 rows"),
            (false, scales) => (scales != Scales::None, self.scales_sentence()),
        }
    }

    pub fn combine_row_bytes(&self) -> usize {
        self.hidden * self.combine_dtype.bytes()
    }

    /// Pitch of a partial row, side payload included.
    pub fn partial_bytes(&self) -> usize {
        self.sum_bytes() + self.payload_bytes(self.payload.map_or(0, |words| words.of_token))
    }

    /// Bytes of so many words behind a partial row, which stays a multiple of 16. Behind an LL row, which only worlds
    /// of one node have, a word takes 8.
    fn payload_bytes(&self, words: usize) -> usize {
        let each = if self.nodes.members().len() > 1 { 4 } else { 8 };
        (each * words).next_multiple_of(16)
    }

    /// Bytes of a partial row without its payload; in an fp8 row the scales follow the elements.
    pub fn sum_bytes(&self) -> usize {
        match self.partial {
            Partial::Same => self.hidden * self.combine_dtype.bytes(),
            Partial::Fp32 => self.hidden * 4,
            Partial::Fp8 => (self.hidden + self.hidden.div_ceil(SCALE_COLUMNS) * 4).next_multiple_of(16),
        }
    }

    /// Device code of a float type of 16 or 32 bits; the error names `what`.
    pub fn float_code(&self, what: &'static str, dtype: Dtype) -> Result<u32> {
        let code = match dtype {
            Dtype::Bf16 => raw::TY_BF16,
            Dtype::Fp16 => raw::TY_FP16,
            Dtype::Fp32 => raw::TY_FP32,
            Dtype::Fp8E4m3 => return Err(Error::config(what, dtype.name(), "use bf16, fp16 or fp32")),
        };
        if !(self.hidden * dtype.bytes()).is_multiple_of(16) {
            let advice = format!("a row of {} {dtype} elements is no multiple of 16 bytes", self.hidden);
            return Err(Error::config(what, dtype.name(), advice));
        }
        Ok(code)
    }

    pub fn plan_input(&self) -> PlanInput {
        PlanInput {
            nodes: self.nodes.clone(),
            max_tokens: self.max_tokens,
            round_tokens: self.round_tokens,
            top_k: self.top_k,
            row_bytes: self.row_bytes,
            scale_words: self.scale_words,
            other_slot_bytes: self.room.slot_bytes,
            slot_payload_bytes: (4 * self.dispatch_payload_words).next_multiple_of(16),
            partial_bytes: self.partial_bytes().max(self.room.partial_bytes) + self.payload_bytes(self.payload_words),
            max_local_experts: self.max_local_experts,
            weights_with_dispatch: self.weights_with_dispatch() || self.room.weights_with_dispatch,
            weights_with_combine: self.weights_with_combine() || self.room.weights_with_combine,
            nics: self.nics,
            chunk_rows: self.chunk_rows,
            receives: self.receives,
            double_buffer_bytes: self.double_buffer_bytes,
            ll_tokens: self.ll_tokens.unwrap_or(0),
            few_tokens: self.room.few_tokens,
            slot_of_rank: self.missing != MissingRanks::Fatal,
            in_place_rows: self.in_place.map_or(0, |(rows, _)| rows),
        }
    }

    /// All settings that must be equal on all ranks, as text.
    pub fn fingerprint(&self, placement: &Placement, first_epoch: u64, generation: u32) -> String {
        let table: u64 = (0..placement.experts()).fold(0xcbf2_9ce4_8422_2325, |hash: u64, expert| {
            let add = |hash: u64, number: Option<u32>| {
                (hash ^ u64::from(number.unwrap_or(0))).wrapping_mul(0x0000_0100_0000_01b3)
            };
            add(add(hash, placement.rank_of(expert)), placement.logical_of(expert))
        });
        let names = |ranks: &Vec<Rank>| ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join("+");
        let sizes: Vec<String> = self.nodes.members().iter().map(names).collect();
        format!(
            "tokenyard {} generation={} ranks={} nodes={} nics={} chunk_rows={} double_buffer_bytes={} ll_tokens={} missing_ranks={:?} in_place={} arena={:?} hidden={} experts={} top_k={} duplicates={} \
             max_tokens={} round_tokens={} dtype={} scales={:?} quantize={} combine_dtype={} \
             partial={:?} weights={:?} payload_words={} dispatch_payload_words={} room={} placement={table:016x} first_epoch={first_epoch}",
            env!("CARGO_PKG_VERSION"),
            generation,
            self.ranks,
            sizes.join(","),
            self.nics,
            self.chunk_rows.unwrap_or(0),
            self.double_buffer_bytes,
            self.ll_tokens.map_or("default".into(), |tokens| tokens.to_string()),
            self.missing,
            self.in_place.map_or("none".into(), |(rows, align)| format!("{rows}:{align}")),
            self.arena,
            self.hidden,
            self.experts,
            self.top_k,
            self.duplicates,
            self.max_tokens,
            self.round_tokens.unwrap_or(0),
            self.format.dtype,
            self.format.scales,
            self.quantize,
            self.combine_dtype,
            self.partial,
            self.weights,
            self.payload_words,
            self.dispatch_payload_words,
            self.room,
        )
    }
}

/// Experts of one rank at the most, where tokens have that many choices, which may be one expert several times or not.
pub fn most_local_experts(top_k: usize, duplicates: bool) -> usize {
    let room = raw::TY_BITMAP_WORDS as usize / expert_words(token_bits(top_k, duplicates), 1) - 1;
    room.min(raw::TY_MAX_LOCAL_EXPERTS as usize)
}

fn token_bits(top_k: usize, duplicates: bool) -> usize {
    match (duplicates, top_k) {
        (false, _) => 1,
        (true, ..16) => 4,
        (true, _) => 8,
    }
}

fn expert_words(bits: usize, groups: usize) -> usize {
    ((groups * bits) | 1) + (groups | 1)
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_expert_has_odd_numbers_of_words() {
        let found = [(1, 1), (1, 2), (1, 8), (4, 2), (8, 8)].map(|(bits, groups)| super::expert_words(bits, groups));
        assert_eq!(found, [1 + 1, 3 + 3, 9 + 9, 9 + 3, 65 + 9]);
    }
}
