//! The configuration of a context.
//!
//! Place: before a context is built. Pure.

use super::arguments::{Versioned, list};
use super::device::tokenyard_device_t;
use super::proxy::tokenyard_proxy_t;
use super::values::{
    arena, choice, dtype, format, length, milliseconds, missing, number, partial, tokenyard_arena_t,
    tokenyard_choice_t, tokenyard_dtype_t, tokenyard_format_t, tokenyard_missing_t, tokenyard_partial_t,
    tokenyard_weights_t, weights,
};
use crate::base::{Dtype, Error, Result};
use crate::bindings::api::placement::{MAX_EXPERTS, MAX_REPLICA_SLOTS};
use crate::bindings::api::{AllToAll, AllToAllBuilder, CallFormat, Placement, RowFormat, Tuning, Weights};
use crate::transport::World;

/// Rows of calls of another format, for which the arena has room.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_call_format_t {
    /// Columns of a row.
    pub hidden: usize,
    /// Most tokens of one rank in such a call.
    pub max_tokens: usize,
    /// Format in which dispatched rows travel; 0: bf16.
    pub format: tokenyard_format_t,
    /// Whether dispatch quantises; 0: no.
    pub quantize: tokenyard_choice_t,
    /// Type of the experts' outputs; 0: bf16.
    pub combine_dtype: tokenyard_dtype_t,
    /// Where weights come from; 0: with dispatch.
    pub weights: tokenyard_weights_t,
}

/// Optional settings of a context. A field that is 0 has the default; `TOKENYARD_ZERO` stands for 0 in fields whose
/// text names it. The fields of the same names in Rust's `Tuning` have the details.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_tuning_t {
    /// Bytes of this struct.
    pub size: u32,
    /// Format in which partial rows travel.
    pub partial: tokenyard_partial_t,
    /// Where the arena lies.
    pub arena: tokenyard_arena_t,
    /// Whether a token may name an expert several times; default no.
    pub duplicates: tokenyard_choice_t,
    /// Whether handles are compact; default by size.
    pub compact_handles: tokenyard_choice_t,
    /// Whether the device records the times of stages; default no.
    pub statistics: tokenyard_choice_t,
    /// Whether the device detects launches that overlap once another library's capture has recorded calls; by default
    /// `TOKENYARD_DETECT_OVERLAPS` decides, else no. Costs time. Ranks may differ.
    pub detect_overlaps: tokenyard_choice_t,
    /// Most words of a token's side payload in combine; default none.
    pub payload_words: usize,
    /// Most words of a token's side payload in dispatch; default none.
    pub dispatch_payload_words: usize,
    /// Rows of the in-place output; default none.
    pub in_place_rows: usize,
    /// Alignment of experts' first rows in the in-place output; 0 counts as 1.
    pub in_place_align: usize,
    /// Tokens of each rank in a round; default all.
    pub round_tokens: usize,
    /// Handles allocated with the context; default 4.
    pub handles: usize,
    /// Output rows for which compact handles have room at first.
    pub handle_rows: usize,
    /// Rows of a chunk between nodes.
    pub chunk_rows: usize,
    /// Most tokens whose routing metadata one block builds; default 256.
    pub meta_tile: usize,
    /// Largest number of tokens with which partial rows are LL rows. `TOKENYARD_ZERO`: never.
    pub ll_tokens: u64,
    /// Largest arena in which received rows are kept twice, in bytes. `TOKENYARD_ZERO`: always one copy.
    pub double_buffer_bytes: u64,
    /// Number of the first epoch; default 1.
    pub first_epoch: u64,
    /// Which replica this rank's tokens take, `[logical experts, slots]`; NULL: the default table.
    pub replica_table: *const u32,
    /// Entries of `replica_table`.
    pub replica_table_count: usize,
}

// SAFETY: a C struct of numbers and pointers that begins with its size.
unsafe impl Versioned for tokenyard_tuning_t {
    const FIRST: usize = 144;
}

/// The configuration of a context, the same on all ranks but for `device` and what says otherwise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_config_t {
    /// Bytes of this struct.
    pub size: u32,
    /// Experts a token may name, at most 32. Mandatory.
    pub top_k: u32,
    /// The device of this rank; NULL: a CPU device of its own.
    pub device: *const tokenyard_device_t,
    /// Columns of a row; a row's bytes are a multiple of 16. Mandatory.
    pub hidden: usize,
    /// Experts of the layer, over all ranks. Mandatory.
    pub experts: usize,
    /// Most tokens of one rank in one call. Mandatory.
    pub max_tokens_per_rank: usize,
    /// Format in which dispatched rows travel; default bf16.
    pub format: tokenyard_format_t,
    /// Whether dispatch quantises bf16 rows to the format; default no.
    pub quantize: tokenyard_choice_t,
    /// Type of the experts' outputs; default bf16.
    pub combine_dtype: tokenyard_dtype_t,
    /// Where weights come from; default with dispatch.
    pub weights: tokenyard_weights_t,
    /// What calls do about ranks that are missing; default fatal.
    pub missing_ranks: tokenyard_missing_t,
    /// Thread blocks per kernel; default by the device and `max_tokens_per_rank`. Ranks may differ.
    pub sms: u32,
    /// Progress deadline of every wait on the device; default 30 s.
    pub timeout_ms: u64,
    /// The rank of each expert, `[experts]`, by ranks of the first generation; NULL: consecutive experts, as many on
    /// each rank.
    pub placement: *const u32,
    /// The logical expert of each expert, `[experts]`, which makes experts replicas; NULL: no replicas.
    pub logical_experts: *const u32,
    /// Formats of calls for which the arena has room beyond the context's own format; may be NULL.
    pub other_formats: *const tokenyard_call_format_t,
    /// How many `other_formats` there are.
    pub other_formats_count: usize,
    /// This rank's proxy, mandatory in a world of several nodes. Ranks differ.
    pub proxy: *const tokenyard_proxy_t,
    /// Optional settings; NULL: defaults.
    pub tuning: *const tokenyard_tuning_t,
}

// SAFETY: as above.
unsafe impl Versioned for tokenyard_config_t {
    const FIRST: usize = 120;
}

impl tokenyard_call_format_t {
    fn given(self) -> Result<CallFormat> {
        let rows = format("other_formats.format", self.format)?.unwrap_or(RowFormat::BF16);
        Ok(CallFormat::new(self.hidden, rows, self.max_tokens)
            .quantize(choice("other_formats.quantize", self.quantize)?.unwrap_or(false))
            .combine_dtype(dtype("other_formats.combine_dtype", self.combine_dtype)?.unwrap_or(Dtype::Bf16))
            .weights(weights("other_formats.weights", self.weights)?.unwrap_or(Weights::Dispatch)))
    }
}

/// # Safety
/// Its pointer is NULL or of as many numbers as it states.
unsafe fn tune(given: &tokenyard_tuning_t, experts: usize, tuning: &mut Tuning) -> Result<()> {
    let no = TuningChoices::of(given)?;
    tuning.partial = partial("tuning.partial", given.partial)?;
    tuning.arena = arena("tuning.arena", given.arena)?;
    (tuning.duplicates, tuning.compact_handles, tuning.statistics) = (no.duplicates, no.compact, no.statistics);
    tuning.detect_overlaps = no.detect_overlaps;
    tuning.payload_words = given.payload_words;
    tuning.dispatch_payload_words = given.dispatch_payload_words;
    tuning.in_place = length(given.in_place_rows).map(|rows| (rows, given.in_place_align.max(1)));
    tuning.round_tokens = length(given.round_tokens);
    tuning.handles = length(given.handles).unwrap_or(tuning.handles);
    tuning.handle_rows = length(given.handle_rows);
    tuning.chunk_rows = length(given.chunk_rows);
    tuning.meta_tile = length(given.meta_tile);
    tuning.ll_tokens = number(given.ll_tokens);
    tuning.double_buffer_bytes =
        number(given.double_buffer_bytes).map_or(tuning.double_buffer_bytes, |bytes| bytes as u64);
    tuning.first_epoch = if given.first_epoch == 0 { tuning.first_epoch } else { given.first_epoch };
    if !given.replica_table.is_null() {
        let most = experts.saturating_mul(MAX_REPLICA_SLOTS);
        if given.replica_table_count > most {
            let value = format!("{} entries", given.replica_table_count);
            let advice = format!("give at most {most}, {MAX_REPLICA_SLOTS} for each expert");
            return Err(Error::config("replica_table", value, advice));
        }
        // SAFETY: as the caller says.
        let table = unsafe { list("replica_table", given.replica_table, given.replica_table_count)? };
        tuning.replica_table = Some(table.to_vec());
    }
    Ok(())
}

/// Settings of the tuning that are a yes or a no.
struct TuningChoices {
    duplicates: bool,
    compact: Option<bool>,
    statistics: bool,
    detect_overlaps: Option<bool>,
}

impl TuningChoices {
    fn of(given: &tokenyard_tuning_t) -> Result<TuningChoices> {
        Ok(TuningChoices {
            duplicates: choice("tuning.duplicates", given.duplicates)?.unwrap_or(false),
            compact: choice("tuning.compact_handles", given.compact_handles)?,
            statistics: choice("tuning.statistics", given.statistics)?.unwrap_or(false),
            detect_overlaps: choice("tuning.detect_overlaps", given.detect_overlaps)?,
        })
    }
}

/// The builder of a configuration, and the format of its rows.
///
/// # Safety
/// Its pointers are NULL, or of objects, structs and lists as their fields state.
pub(super) unsafe fn builder(world: &World, given: &tokenyard_config_t) -> Result<(AllToAllBuilder, RowFormat)> {
    let rows = format("format", given.format)?.unwrap_or(RowFormat::BF16);
    let mut builder = AllToAll::builder(world)
        .hidden(given.hidden)
        .experts(given.experts)
        .top_k(given.top_k as usize)
        .max_tokens_per_rank(given.max_tokens_per_rank)
        .format(rows)
        .quantize(choice("quantize", given.quantize)?.unwrap_or(false))
        .combine_dtype(dtype("combine_dtype", given.combine_dtype)?.unwrap_or(Dtype::Bf16))
        .weights(weights("weights", given.weights)?.unwrap_or(Weights::Dispatch))
        .missing_ranks(missing("missing_ranks", given.missing_ranks)?);
    // SAFETY: as the caller says.
    if let Some(device) = unsafe { given.device.as_ref() } {
        builder = builder.device(device.0.clone());
    }
    // SAFETY: as the caller says.
    if let Some(proxy) = unsafe { given.proxy.as_ref() } {
        builder = builder.proxy(&proxy.0);
    }
    if given.sms != 0 {
        builder = builder.sms(given.sms);
    }
    if let Some(timeout) = milliseconds(given.timeout_ms) {
        builder = builder.timeout(timeout);
    }
    // SAFETY: as the caller says.
    if let Some(placement) = unsafe { placement(world, given)? } {
        builder = builder.placement(placement);
    }
    // SAFETY: as the caller says.
    let others = unsafe { list("other_formats", given.other_formats, given.other_formats_count)? };
    for other in others {
        builder = builder.room_for(other.given()?);
    }
    if !given.tuning.is_null() {
        // SAFETY: as the caller says.
        let tuning = unsafe { super::arguments::read("tuning", given.tuning)? };
        let mut tuned = Ok(());
        // SAFETY: as the caller says.
        builder = builder.tuning(|there| tuned = unsafe { tune(&tuning, given.experts, there) });
        tuned?;
    }
    Ok((builder, rows))
}

/// # Safety
/// As `builder`.
unsafe fn placement(world: &World, given: &tokenyard_config_t) -> Result<Option<Placement>> {
    if given.placement.is_null() {
        if given.logical_experts.is_null() {
            return Ok(None);
        }
        let advice = "replicas lie where the placement says; give that, too";
        return Err(Error::argument("logical_experts", "given without placement", advice));
    }
    if given.experts > MAX_EXPERTS {
        // The builder refuses it. A table of that length is not read: it may end before.
        return Ok(None);
    }
    // SAFETY: as the caller says.
    let table = unsafe { list("placement", given.placement, given.experts)? };
    let placement = Placement::table(table.to_vec(), world.first_size())?;
    if given.logical_experts.is_null() {
        return Ok(Some(placement));
    }
    // SAFETY: as the caller says.
    let logical = unsafe { list("logical_experts", given.logical_experts, given.experts)? };
    placement.replicas(logical.to_vec()).map(Some)
}
