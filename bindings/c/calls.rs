//! Structs of calls: what the caller gives, as `api` takes it.
//!
//! Place: between a C call and the check of its arguments in `api`. Pure; allocates nothing.

use super::arguments::{Versioned, reserved};
use super::context::tokenyard_context_t;
use super::values::{
    choice, dtype, format, index_type, length, scale_order, strides, tokenyard_choice_t, tokenyard_dtype_t,
    tokenyard_format_t, tokenyard_index_t, tokenyard_layout_t, tokenyard_scale_order_t, tokenyard_view_t,
    tokenyard_weights_t, weights,
};
use crate::base::{Dtype, Error, Result};
use crate::bindings::api::{
    Combined, NewRows, Output, Payload, Placed, RowFormat, Rows, ScaleView, TokenCount, TokenPayload, Tokens,
};
use crate::kernels::{Device, View};

/// The tokens of this rank in a dispatch. A field that is 0 has the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_tokens_t {
    /// Bytes of this struct.
    pub size: u32,
    /// Format in which rows travel; default that of the context.
    pub format: tokenyard_format_t,
    /// Whether dispatch quantises `x` from bf16 to the format; default as the context, if the format is the context's.
    pub quantize: tokenyard_choice_t,
    /// Where weights come from; default as the context.
    pub weights: tokenyard_weights_t,
    /// Type of the experts' outputs; default as the context.
    pub combine_dtype: tokenyard_dtype_t,
    /// Type of the indices.
    pub index_type: tokenyard_index_t,
    /// Choices of each token in this call; default the context's `top_k`. Not with `TOKENYARD_INDEX_RANKS`.
    pub top_k: u32,
    /// Words of each token's side payload.
    pub payload_words: u32,
    /// Columns of a row; default as the context.
    pub hidden: usize,
    /// Most tokens of any rank in this call; default the context's most.
    pub max_tokens: usize,
    /// Number of tokens, where `device_count` is left out.
    pub count: usize,
    /// int32 in device memory: number of tokens, read when the kernel runs.
    pub device_count: tokenyard_view_t,
    /// Rows, `[tokens, hidden]`; 16-byte aligned.
    pub x: tokenyard_view_t,
    /// Bytes from one row to the next; default without gaps.
    pub pitch_bytes: usize,
    /// Scales, where the call's rows have scales and dispatch does not quantise: 4-byte words.
    pub scales: tokenyard_view_t,
    /// Bytes from one token's scales to the next. Default with the other stride: without gaps.
    pub scale_row_stride_bytes: usize,
    /// Bytes from one scale word of a token to the next.
    pub scale_column_stride_bytes: usize,
    /// Experts of each token, `[tokens, top_k]`; -1 for none.
    pub topk_idx: tokenyard_view_t,
    /// Bytes from one token's indices to the next. Default with the other stride: without gaps.
    pub topk_idx_token_bytes: usize,
    /// Bytes from one index of a token to the next.
    pub topk_idx_choice_bytes: usize,
    /// Weights, fp32 `[tokens, top_k]`, where weights come with dispatch.
    pub topk_weight: tokenyard_view_t,
    /// Bytes from one token's weights to the next. Default with the other stride: without gaps.
    pub topk_weight_token_bytes: usize,
    /// Bytes from one weight of a token to the next.
    pub topk_weight_choice_bytes: usize,
    /// Side payload, fp32 `[tokens, payload_words]`; on all ranks or on none.
    pub payload: tokenyard_view_t,
}

// SAFETY: a C struct of numbers and pointers that begins with its size.
unsafe impl Versioned for tokenyard_tokens_t {
    const FIRST: usize = 208;
}

/// Where a dispatch writes. A field that is 0 has the default, and a view that is NULL is left out. None of its views
/// may overlap another view of the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_output_t {
    /// Bytes of this struct.
    pub size: u32,
    /// Order of the scales.
    pub scale_order: tokenyard_scale_order_t,
    /// Contiguous layout: whether the padding rows between segments are zeroed; default no.
    pub zero_padding: tokenyard_choice_t,
    /// Contiguous and masked layouts: whether rows without room are left out, in place of an error with no rows at all;
    /// default no. Those are the last rows, in the masked layout of each expert, and they add nothing to sums. The
    /// capacity is a multiple of the alignment.
    /// `row_count` and the last of `host_counts` are then of all rows that came, other counts of those that are there.
    pub drop_overflow: tokenyard_choice_t,
    /// Order and capacity of the rows.
    pub layout: tokenyard_layout_t,
    /// Rows of the dispatch's format; 16-byte aligned.
    pub rows: tokenyard_view_t,
    /// Bytes from one row to the next; default without gaps.
    pub pitch_bytes: usize,
    /// Scales of the rows, where the format has scales.
    pub scales: tokenyard_view_t,
    /// int32 `[local experts]`: rows of each expert.
    pub expert_count: tokenyard_view_t,
    /// int32 `[local experts + 1]`: first row of each expert, then the end of the last one's segment.
    pub expert_offset: tokenyard_view_t,
    /// int32 `[rows]`: local expert of each row, -1 where there is none.
    pub row_expert: tokenyard_view_t,
    /// int32 `[rows, 2]`: source rank and token of each row, -1 where there is none.
    pub source: tokenyard_view_t,
    /// Token layout: int32 `[rows, top_k]`, local expert or -1.
    pub token_experts: tokenyard_view_t,
    /// Token layout: fp32 `[rows, top_k]`.
    pub token_weights: tokenyard_view_t,
    /// int32 `[1]`: rows used, padding included.
    pub row_count: tokenyard_view_t,
    /// int32 `[local experts + 1]` in host memory that the device can write: rows of each expert, then rows used.
    pub host_counts: tokenyard_view_t,
    /// int64 `[local experts, ranks]`: first row of each source rank among an expert's rows, times 2^32, plus how many.
    pub source_ranges: tokenyard_view_t,
    /// int32 `[local experts]`, added to: rows of each expert.
    pub total_counts: tokenyard_view_t,
    /// int64 `[ranks]`, added to: nanoseconds waited for each rank.
    pub wait_times: tokenyard_view_t,
    /// fp32 `[rows, payload_words]`, where the tokens have a payload.
    pub payload: tokenyard_view_t,
}

// SAFETY: as above.
unsafe impl Versioned for tokenyard_output_t {
    const FIRST: usize = 264;
}

/// The experts' outputs, in the layout dispatched. Experts do not apply weights.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_rows_t {
    /// Bytes of this struct.
    pub size: u32,
    /// Type of the elements; default the combine dtype of the dispatch.
    pub dtype: tokenyard_dtype_t,
    /// Words of each row's side payload.
    pub payload_words: u32,
    /// Whether the payload is gathered choice by choice, not summed; default no.
    pub payload_gathered: tokenyard_choice_t,
    /// Rows, `[rows, hidden]`; 16-byte aligned.
    pub rows: tokenyard_view_t,
    /// Bytes from one row to the next; default without gaps.
    pub pitch_bytes: usize,
    /// Weights of this rank's own tokens, fp32 `[tokens, top_k]`, where weights come with combine.
    pub topk_weight: tokenyard_view_t,
    /// Side payload, fp32 `[rows, payload_words]`; on all ranks or on none.
    pub payload: tokenyard_view_t,
}

// SAFETY: as above.
unsafe impl Versioned for tokenyard_rows_t {
    const FIRST: usize = 72;
}

/// Where a combine writes. It may not overlap the views of `tokenyard_rows_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_combined_t {
    /// Bytes of this struct.
    pub size: u32,
    /// Type of the sums; default bf16.
    pub dtype: tokenyard_dtype_t,
    /// Whether sums are added to what `out` holds; default no.
    pub accumulate: tokenyard_choice_t,
    /// 0.
    pub reserved: u32,
    /// `[tokens, hidden]`; 16-byte aligned.
    pub out: tokenyard_view_t,
    /// Bytes from one row to the next; default without gaps.
    pub pitch_bytes: usize,
    /// int64 `[ranks]`, added to: nanoseconds waited for each rank.
    pub wait_times: tokenyard_view_t,
    /// fp32 `[tokens, words]`, or of gathered words `[tokens, top_k, words]`, where the rows have a payload.
    pub payload: tokenyard_view_t,
}

// SAFETY: as above.
unsafe impl Versioned for tokenyard_combined_t {
    const FIRST: usize = 72;
}

/// New rows of the tokens that an earlier dispatch sent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_new_rows_t {
    /// Bytes of this struct.
    pub size: u32,
    /// Format in which rows travel; default that of the handle's dispatch.
    pub format: tokenyard_format_t,
    /// Whether dispatch quantises `x`; default as the handle's dispatch, if the format is the same.
    pub quantize: tokenyard_choice_t,
    /// Words of each token's side payload.
    pub payload_words: u32,
    /// Columns of a row; default as the handle's dispatch.
    pub hidden: usize,
    /// Number of tokens, that of the handle's dispatch, where `device_count` is left out.
    pub count: usize,
    /// int32 in device memory: number of tokens.
    pub device_count: tokenyard_view_t,
    /// Rows, `[tokens, hidden]`; 16-byte aligned.
    pub x: tokenyard_view_t,
    /// Bytes from one row to the next; default without gaps.
    pub pitch_bytes: usize,
    /// Scales, as in `tokenyard_tokens_t`.
    pub scales: tokenyard_view_t,
    /// Bytes from one token's scales to the next. Mandatory with scales.
    pub scale_row_stride_bytes: usize,
    /// Bytes from one scale word of a token to the next. Mandatory with scales.
    pub scale_column_stride_bytes: usize,
    /// Side payload, fp32 `[tokens, payload_words]`; on all ranks or on none.
    pub payload: tokenyard_view_t,
}

// SAFETY: as above.
unsafe impl Versioned for tokenyard_new_rows_t {
    const FIRST: usize = 120;
}

/// Where new rows go: to the places that the tokens' rows had in the output of the handle's dispatch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_placed_t {
    /// Bytes of this struct.
    pub size: u32,
    /// Order of the scales.
    pub scale_order: tokenyard_scale_order_t,
    /// Rows, in the layout and with the capacity of the handle's dispatch; 16-byte aligned.
    pub rows: tokenyard_view_t,
    /// Bytes from one row to the next; default without gaps.
    pub pitch_bytes: usize,
    /// Scales of the rows, where the format has scales.
    pub scales: tokenyard_view_t,
    /// fp32 `[rows, payload_words]`, where the new rows have a payload.
    pub payload: tokenyard_view_t,
}

// SAFETY: as above.
unsafe impl Versioned for tokenyard_placed_t {
    const FIRST: usize = 64;
}

fn count_of(count: usize, device_count: tokenyard_view_t, device: &Device) -> Result<TokenCount> {
    Ok(device_count.given("device_count", device)?.map_or(TokenCount::Host(count), TokenCount::Device))
}

/// Scales with the strides given, or without gaps in rows of `hidden` columns.
fn scales_of(view: View, (row, column): (usize, usize), format: RowFormat, hidden: usize) -> ScaleView {
    match (row, column) {
        (0, 0) => ScaleView::new(view, format.scale_bytes(hidden), 4),
        _ => ScaleView::new(view, row, column),
    }
}

fn payload_of(words: u32, view: tokenyard_view_t, device: &Device) -> Result<Option<TokenPayload>> {
    let view = view.given("payload", device)?;
    // Words without a view are a payload, too, of ranks without tokens.
    match (words, view) {
        (0, None) => Ok(None),
        (words, Some(view)) => Ok(Some(TokenPayload { view, words: words as usize })),
        (words, None) => {
            let view = tokenyard_view_t::NONE.needed("payload", device)?;
            Ok(Some(TokenPayload { view, words: words as usize }))
        }
    }
}

impl tokenyard_tokens_t {
    pub(super) fn given(&self, context: &tokenyard_context_t) -> Result<Tokens> {
        let device = context.all.device();
        let (rows, hidden) = (format("format", self.format)?, length(self.hidden));
        let count = count_of(self.count, self.device_count, device)?;
        let x = self.x.needed("x", device)?;
        let mut tokens = Tokens::new(x, self.topk_idx.needed("topk_idx", device)?, count);
        let strided = (self.scale_row_stride_bytes, self.scale_column_stride_bytes);
        let (scale_rows, scale_hidden) = (rows.unwrap_or(context.format), hidden.unwrap_or(context.hidden));
        let scales = self.scales.given("scales", device)?;
        tokens.scales = scales.map(|view| scales_of(view, strided, scale_rows, scale_hidden));
        (tokens.format, tokens.hidden) = (rows, hidden);
        tokens.pitch_bytes = length(self.pitch_bytes);
        tokens.quantize = choice("quantize", self.quantize)?;
        tokens.weights = weights("weights", self.weights)?;
        tokens.combine_dtype = dtype("combine_dtype", self.combine_dtype)?;
        tokens.max_tokens = length(self.max_tokens);
        tokens.top_k = length(self.top_k as usize);
        tokens.index_type = index_type("index_type", self.index_type)?;
        tokens.topk_idx_strides = strides(self.topk_idx_token_bytes, self.topk_idx_choice_bytes);
        tokens.topk_weight = self.topk_weight.given("topk_weight", device)?;
        tokens.topk_weight_strides = strides(self.topk_weight_token_bytes, self.topk_weight_choice_bytes);
        tokens.payload = payload_of(self.payload_words, self.payload, device)?;
        Ok(tokens)
    }
}

impl tokenyard_output_t {
    pub(super) fn given(&self, device: &Device) -> Result<Output> {
        let (rows, counts) = (self.rows.needed("rows", device)?, self.expert_count.needed("expert_count", device)?);
        let mut output = Output::new(self.layout.layout()?, rows, counts);
        output.pitch_bytes = length(self.pitch_bytes);
        output.scales = self.scales.given("output scales", device)?;
        output.scale_order = scale_order("scale_order", self.scale_order)?;
        output.expert_offset = self.expert_offset.given("expert_offset", device)?;
        output.row_expert = self.row_expert.given("row_expert", device)?;
        output.source = self.source.given("source", device)?;
        output.token_experts = self.token_experts.given("token_experts", device)?;
        output.token_weights = self.token_weights.given("token_weights", device)?;
        output.row_count = self.row_count.given("row_count", device)?;
        output.zero_padding = choice("zero_padding", self.zero_padding)?.unwrap_or(false);
        output.drop_overflow = choice("drop_overflow", self.drop_overflow)?.unwrap_or(false);
        output.host_counts = self.host_counts.given("host_counts", device)?;
        output.source_ranges = self.source_ranges.given("source_ranges", device)?;
        output.total_counts = self.total_counts.given("total_counts", device)?;
        output.wait_times = self.wait_times.given("wait_times", device)?;
        output.payload = self.payload.given("payload of output", device)?;
        Ok(output)
    }
}

impl tokenyard_rows_t {
    pub(super) fn given(&self, device: &Device) -> Result<Rows> {
        let mut rows = Rows::new(self.rows.needed("rows", device)?);
        rows.pitch_bytes = length(self.pitch_bytes);
        rows.dtype = dtype("dtype of rows", self.dtype)?;
        rows.topk_weight = self.topk_weight.given("topk_weight", device)?;
        let gathered = choice("payload_gathered", self.payload_gathered)?.unwrap_or(false);
        let payload = payload_of(self.payload_words, self.payload, device)?;
        rows.payload = payload.map(|TokenPayload { view, words }| Payload { view, words, gathered });
        Ok(rows)
    }
}

impl tokenyard_combined_t {
    pub(super) fn given(&self, device: &Device) -> Result<Combined> {
        reserved(self.reserved)?;
        let mut combined = Combined::new(self.out.needed("out", device)?);
        combined.pitch_bytes = length(self.pitch_bytes);
        combined.dtype = dtype("dtype of out", self.dtype)?.unwrap_or(Dtype::Bf16);
        combined.accumulate = choice("accumulate", self.accumulate)?.unwrap_or(false);
        combined.wait_times = self.wait_times.given("wait_times", device)?;
        combined.payload = self.payload.given("payload of out", device)?;
        Ok(combined)
    }
}

impl tokenyard_new_rows_t {
    pub(super) fn given(&self, device: &Device) -> Result<NewRows> {
        let count = count_of(self.count, self.device_count, device)?;
        let mut rows = NewRows::new(self.x.needed("x", device)?, count);
        rows.pitch_bytes = length(self.pitch_bytes);
        rows.format = format("format", self.format)?;
        rows.hidden = length(self.hidden);
        rows.quantize = choice("quantize", self.quantize)?;
        let (row, column) = (self.scale_row_stride_bytes, self.scale_column_stride_bytes);
        let scales = self.scales.given("scales", device)?;
        if scales.is_some() && (row, column) == (0, 0) {
            let advice = "the format may be that of any dispatch, so give the strides of its scales";
            return Err(Error::argument("scale_row_stride_bytes", 0, advice));
        }
        rows.scales = scales.map(|view| ScaleView::new(view, row, column));
        rows.payload = payload_of(self.payload_words, self.payload, device)?;
        Ok(rows)
    }
}

impl tokenyard_placed_t {
    pub(super) fn given(&self, device: &Device) -> Result<Placed> {
        let mut placed = Placed::new(self.rows.needed("rows", device)?);
        placed.pitch_bytes = length(self.pitch_bytes);
        placed.scales = self.scales.given("output scales", device)?;
        placed.scale_order = scale_order("scale_order", self.scale_order)?;
        placed.payload = self.payload.given("payload of output", device)?;
        Ok(placed)
    }
}
