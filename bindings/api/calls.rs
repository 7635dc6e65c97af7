//! Arguments of calls: views of device memory with their shapes, and the checks before anything is enqueued.

use super::call_format::{CallFormat, Weights};
use super::choices::{IndexType, Strides};
use super::format::RowFormat;
use super::layout::{Layout, ScaleOrder};
use super::needs::{Needs, rows_span, stride};
use super::payload::{Payload, TokenPayload};
use super::shape::Shape;
use super::tables::inverse;
use crate::base::{Dtype, Error, Result};
use crate::ffi::layout as raw;
use crate::kernels::View;

/// How many tokens a rank dispatches.
#[derive(Debug, Clone)]
pub enum TokenCount {
    /// Known on the host. With 0 tokens the views of tokens may be empty.
    Host(usize),
    /// An int32 in device memory, read when the kernel runs. The views of tokens need room for the most tokens of the
    /// call: [`Tokens::max_tokens`], or `max_tokens_per_rank`.
    Device(View),
}

/// Scales of the input rows: 4-byte words, fp32 or four UE8M0 exponents each.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ScaleView {
    /// The memory.
    pub view: View,
    /// Bytes from one token to the next; a multiple of 4.
    pub row_stride_bytes: usize,
    /// Bytes from one word of a token to the next; a multiple of 4.
    pub col_stride_bytes: usize,
}

impl ScaleView {
    /// Scales with `row_stride_bytes` from one token to the next and `col_stride_bytes` from one word of a token to the
    /// next, both multiples of 4.
    pub fn new(view: View, row_stride_bytes: usize, col_stride_bytes: usize) -> ScaleView {
        ScaleView { view, row_stride_bytes, col_stride_bytes }
    }
}

/// The tokens of this rank: made by [`Tokens::new`], and changed field by field.
///
/// Each call may state its format: [`of`](Self::of) sets all fields of it. The format must be the same on all ranks,
/// and the context must have room for it ([`room_for`](super::AllToAllBuilder::room_for)). Combine then takes rows of
/// as many columns, and weights from where the dispatch's format has them.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Tokens {
    /// Rows, `[tokens, hidden]` of the format's dtype, or of bf16 where the call quantises; 16-byte aligned.
    pub x: View,
    /// Bytes from one row to the next; a multiple of 16. `None`: rows without gaps.
    pub pitch_bytes: Option<usize>,
    /// Format in which rows travel. `None`: that of the context.
    pub format: Option<RowFormat>,
    /// Columns of a row. `None`: as many as rows of the context's format.
    pub hidden: Option<usize>,
    /// Whether dispatch quantises `x` from bf16 to the format. `None`: as the context was built if rows are of its
    /// format, else no.
    pub quantize: Option<bool>,
    /// Where weights come from. `None`: as the context was built.
    pub weights: Option<Weights>,
    /// Type of the experts' outputs, which the handle's combines have unless [`Rows::dtype`] says otherwise. `None`: as
    /// the context was built.
    pub combine_dtype: Option<Dtype>,
    /// Most tokens of any rank in this call. `None`: the context's most.
    pub max_tokens: Option<usize>,
    /// Scales, if the call's rows have scales and dispatch does not quantise.
    pub scales: Option<ScaleView>,
    /// Experts of each token, `[tokens, top_k]`; -1 for none. Where experts have [replicas](super::Placement::replicas)
    /// they are logical experts. If a token names an expert twice, or an expert that does not exist, the dispatch sends
    /// no tokens and ends in [`Routing`](crate::Error::Routing), which [`check`](super::AllToAll::check) returns.
    pub topk_idx: View,
    /// Choices of each token in this call, in `topk_idx` and in weights that come with dispatch; at most the context's
    /// top_k, which `None` stands for. Not with [`IndexType::Ranks`].
    pub top_k: Option<usize>,
    /// Type of the indices.
    pub index_type: IndexType,
    /// Where the indices lie. `None`: without gaps.
    pub topk_idx_strides: Option<Strides>,
    /// Weights, fp32 `[tokens, top_k]`, if the call's weights come with dispatch.
    pub topk_weight: Option<View>,
    /// Where the weights lie. `None`: without gaps.
    pub topk_weight_strides: Option<Strides>,
    /// Number of tokens.
    pub count: TokenCount,
    /// A side payload, on all ranks or on none.
    pub payload: Option<TokenPayload>,
}

/// Where dispatch writes: made by [`Output::new`], and changed field by field. Optional views are left out by `None`.
/// None of its views may overlap another view of the call, the views of [`Tokens`] included. A view counts from the
/// first to the last byte that the call needs of it, so views with interleaved pitches overlap.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Output {
    /// Order and capacity of the rows.
    pub layout: Layout,
    /// Rows of the dispatch's format; 16-byte aligned.
    pub rows: View,
    /// Bytes from one row to the next; a multiple of 16. `None`: rows without gaps.
    pub pitch_bytes: Option<usize>,
    /// Scales of the rows, where the context has them.
    pub scales: Option<View>,
    /// Order of the scales.
    pub scale_order: ScaleOrder,
    /// int32 `[local experts]`: rows of each expert.
    pub expert_count: View,
    /// int32 `[local experts + 1]`: first row of each expert, then the end of the last one's segment, padding included.
    pub expert_offset: Option<View>,
    /// int32 `[rows of the layout]`: local expert of each row, -1 for padding and for rows after the last segment. All
    /// -1 in the token layout.
    pub row_expert: Option<View>,
    /// int32 `[rows of the layout, 2]`: source rank and token of each row, -1 as in `row_expert`.
    pub source: Option<View>,
    /// Token layout: int32 `[rows, top_k]`, local expert or -1.
    pub token_experts: Option<View>,
    /// Token layout: fp32 `[rows, top_k]`.
    pub token_weights: Option<View>,
    /// int32 `[1]`: rows used, padding between and after segments included.
    pub row_count: Option<View>,
    /// Contiguous layout: whether the padding rows between segments are zeroed.
    pub zero_padding: bool,
    /// Contiguous and masked layouts: whether rows without room are left out, in place of an error with no rows at all.
    /// Those are the last rows of the output, in the masked layout of each expert. They add nothing to sums. The
    /// capacity is a multiple of `align`. `expert_count`, `expert_offset`, `source_ranges` and `total_counts` are of
    /// the rows that are there. `row_count` and the last of `host_counts` are of all rows that came, so in the
    /// contiguous layout more than the capacity if some were left out, and in the masked layout more than the sum of
    /// `expert_count`. Other ranks may choose otherwise. Such calls take general kernels. Not with in-place output.
    pub drop_overflow: bool,
    /// int32 `[local experts + 1]` in host memory the device can write: rows of each expert, then rows used. Written by
    /// the end of the call. [`HostBuffer::read_i32`](crate::HostBuffer::read_i32) reads them.
    pub host_counts: Option<View>,
    /// int64 `[local experts, ranks]`: where the rows of each source rank begin among an expert's rows, times 2^32,
    /// plus how many they are. Ranks are those of this generation, in order. DeepEP's `layout_range`.
    pub source_ranges: Option<View>,
    /// int32 `[local experts]`: the rows of each expert are added to what is there, modulo 2^32. The caller sets it
    /// to 0 when it begins to count.
    pub total_counts: Option<View>,
    /// int64 `[ranks]` of this generation, added to: nanoseconds for which the call waited until the counts of each
    /// rank were here, a rank that is late with its call included. Each round adds. Such calls take general kernels.
    /// Of a call whose counts come first the sending half waits for them, which is not added.
    pub wait_times: Option<View>,
    /// fp32 `[rows of the layout, words]`, where the call's [`Tokens`] have a payload: beside each row the words of its
    /// token. Those of a row that no token fills are as the row is: left as they were, or 0 where padding is zeroed.
    pub payload: Option<View>,
}

/// The in-place output of a context, in its arena. Every [`Output`] of such a context must have these values, with
/// [`ScaleOrder::RowMajor`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct InPlaceOutput {
    /// The contiguous layout of the context.
    pub layout: Layout,
    /// Rows of the context's dtype.
    pub rows: View,
    /// Bytes from one row to the next.
    pub pitch_bytes: usize,
    /// Scales of the rows, where the context has them.
    pub scales: Option<View>,
}

impl InPlaceOutput {
    /// Refuses an output that differs from this in-place output.
    pub(crate) fn check(&self, output: &Output) -> Result<()> {
        // The caller's views may be longer, never shorter: `Output::check` refuses shorter ones.
        let scales = match (&self.scales, &output.scales) {
            (Some(own), Some(given)) => own.ptr() == given.ptr(),
            (own, given) => own.is_none() && given.is_none(),
        };
        let rows =
            output.rows.ptr() == self.rows.ptr() && output.pitch_bytes.unwrap_or(self.pitch_bytes) == self.pitch_bytes;
        if output.drop_overflow {
            let advice = "in-place output takes all rows or none; leave it out, or build the context without in_place";
            return Err(Error::argument("drop_overflow", "set", advice));
        }
        if rows && scales && output.layout == self.layout && output.scale_order == ScaleOrder::RowMajor {
            return Ok(());
        }
        let advice = "this context has in-place output; give the output that in_place() returns";
        Err(Error::argument("output", format!("{:?} at {:#x}", output.layout, output.rows.ptr()), advice))
    }
}

/// The experts' outputs, in the layout dispatched: made by [`Rows::new`], and changed field by field. Padding rows are
/// not read.
///
/// Experts do not apply weights; combine does, except in [`Layout::Token`]. Within a rank a token's rows are added in
/// top-k order, from 0: each step is sum + weight · row as one fused multiply-add in fp32. The sum is rounded as
/// [`Partial`](super::Partial) says. These partial rows are added in fp32 in the order of ranks, then of nodes, and the
/// result is rounded once to the type of [`Combined`]. So the same input gives the same bits.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Rows {
    /// Rows, `[rows, hidden]` of the combine dtype; 16-byte aligned.
    pub rows: View,
    /// Bytes from one row to the next; a multiple of 16. `None`: rows without gaps.
    pub pitch_bytes: Option<usize>,
    /// Type of the elements, the same on all ranks. `None`: the combine dtype of the handle's dispatch.
    pub dtype: Option<Dtype>,
    /// Weights of this rank's own tokens, fp32 `[tokens, top_k]` with the context's top_k, if the context's weights
    /// come with combine.
    pub topk_weight: Option<View>,
    /// A side payload, on all ranks or on none.
    pub payload: Option<Payload>,
}

/// Where combine writes: made by [`Combined::new`], and changed field by field. It may not overlap the views of the
/// call's [`Rows`]. A view counts from the first to the last byte that the call needs of it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Combined {
    /// `[tokens, hidden]`; 16-byte aligned. It needs room for as many tokens as the dispatch's views of [`Tokens`].
    ///
    /// A token that names no expert gets zeros, or has zeros added with [`accumulate`](#structfield.accumulate). Rows
    /// beyond the dispatch's number of tokens stay untouched. A rank without tokens may give an empty view.
    pub out: View,
    /// Bytes from one row to the next; a multiple of 16. `None`: rows without gaps.
    pub pitch_bytes: Option<usize>,
    /// bf16, fp16 or fp32, whatever the experts' rows are.
    pub dtype: Dtype,
    /// Add to what `out` holds instead of overwriting it.
    pub accumulate: bool,
    /// int64 `[ranks]` of this generation, added to: nanoseconds for which the call waited until each rank of the own
    /// node, and of each other node the rank that sends this rank the node's sums, had come to its combine. Each round
    /// adds. Such calls take general kernels.
    pub wait_times: Option<View>,
    /// fp32, where the call's [`Rows`] have a payload: `[tokens, words]` for sums, `[tokens, top_k, words]` for
    /// gathered words, with the context's top_k. Overwritten also with [`accumulate`](#structfield.accumulate).
    pub payload: Option<View>,
}

impl Tokens {
    /// `count` tokens with their rows and int32 expert indices, `[tokens, hidden]` and `[tokens, top_k]`, both without
    /// gaps; no scales, no weights.
    pub fn new(x: View, topk_idx: View, count: TokenCount) -> Tokens {
        Tokens {
            x,
            pitch_bytes: None,
            format: None,
            hidden: None,
            quantize: None,
            weights: None,
            combine_dtype: None,
            max_tokens: None,
            scales: None,
            topk_idx,
            top_k: None,
            index_type: IndexType::I32,
            topk_idx_strides: None,
            topk_weight: None,
            topk_weight_strides: None,
            count,
            payload: None,
        }
    }

    /// Sets [`x`](#structfield.x).
    pub fn x(self, x: View) -> Tokens {
        Tokens { x, ..self }
    }

    /// Sets [`pitch_bytes`](#structfield.pitch_bytes).
    pub fn pitch_bytes(self, pitch_bytes: impl Into<Option<usize>>) -> Tokens {
        Tokens { pitch_bytes: pitch_bytes.into(), ..self }
    }

    /// Sets [`format`](#structfield.format).
    pub fn format(self, format: impl Into<Option<RowFormat>>) -> Tokens {
        Tokens { format: format.into(), ..self }
    }

    /// Sets [`hidden`](#structfield.hidden).
    pub fn hidden(self, hidden: impl Into<Option<usize>>) -> Tokens {
        Tokens { hidden: hidden.into(), ..self }
    }

    /// Sets [`quantize`](#structfield.quantize).
    pub fn quantize(self, quantize: impl Into<Option<bool>>) -> Tokens {
        Tokens { quantize: quantize.into(), ..self }
    }

    /// Sets [`weights`](#structfield.weights).
    pub fn weights(self, weights: impl Into<Option<Weights>>) -> Tokens {
        Tokens { weights: weights.into(), ..self }
    }

    /// Sets [`max_tokens`](#structfield.max_tokens).
    pub fn max_tokens(self, max_tokens: impl Into<Option<usize>>) -> Tokens {
        Tokens { max_tokens: max_tokens.into(), ..self }
    }

    /// Sets [`combine_dtype`](#structfield.combine_dtype).
    pub fn combine_dtype(self, combine_dtype: impl Into<Option<Dtype>>) -> Tokens {
        Tokens { combine_dtype: combine_dtype.into(), ..self }
    }

    /// Makes the call, and the handle's combines, one of this format.
    pub fn of(self, format: &CallFormat) -> Tokens {
        let tokens = self.format(format.rows).hidden(format.hidden).quantize(format.quantize);
        tokens.weights(format.weights).combine_dtype(format.combine_dtype).max_tokens(format.max_tokens)
    }

    /// Sets [`scales`](#structfield.scales).
    pub fn scales(self, scales: impl Into<Option<ScaleView>>) -> Tokens {
        Tokens { scales: scales.into(), ..self }
    }

    /// Sets [`topk_idx`](#structfield.topk_idx).
    pub fn topk_idx(self, topk_idx: View) -> Tokens {
        Tokens { topk_idx, ..self }
    }

    /// Sets [`top_k`](#structfield.top_k).
    pub fn top_k(self, top_k: impl Into<Option<usize>>) -> Tokens {
        Tokens { top_k: top_k.into(), ..self }
    }

    /// Sets [`index_type`](#structfield.index_type).
    pub fn index_type(self, index_type: IndexType) -> Tokens {
        Tokens { index_type, ..self }
    }

    /// Sets [`topk_weight`](#structfield.topk_weight).
    pub fn topk_weight(self, topk_weight: impl Into<Option<View>>) -> Tokens {
        Tokens { topk_weight: topk_weight.into(), ..self }
    }

    /// Sets [`topk_idx_strides`](#structfield.topk_idx_strides).
    pub fn topk_idx_strides(self, strides: impl Into<Option<Strides>>) -> Tokens {
        Tokens { topk_idx_strides: strides.into(), ..self }
    }

    /// Sets [`topk_weight_strides`](#structfield.topk_weight_strides).
    pub fn topk_weight_strides(self, strides: impl Into<Option<Strides>>) -> Tokens {
        Tokens { topk_weight_strides: strides.into(), ..self }
    }

    /// Sets [`count`](#structfield.count).
    pub fn count(self, count: TokenCount) -> Tokens {
        Tokens { count, ..self }
    }

    /// Sets [`payload`](#structfield.payload).
    pub fn payload(self, payload: impl Into<Option<TokenPayload>>) -> Tokens {
        Tokens { payload: payload.into(), ..self }
    }
}

impl Output {
    /// Rows in a layout, without gaps, and the rows of each expert; nothing else.
    pub fn new(layout: Layout, rows: View, expert_count: View) -> Output {
        Output {
            layout,
            rows,
            pitch_bytes: None,
            scales: None,
            scale_order: ScaleOrder::RowMajor,
            expert_count,
            expert_offset: None,
            row_expert: None,
            source: None,
            token_experts: None,
            token_weights: None,
            row_count: None,
            zero_padding: false,
            drop_overflow: false,
            host_counts: None,
            source_ranges: None,
            total_counts: None,
            wait_times: None,
            payload: None,
        }
    }

    /// Sets [`layout`](#structfield.layout).
    pub fn layout(self, layout: Layout) -> Output {
        Output { layout, ..self }
    }

    /// Sets [`rows`](#structfield.rows).
    pub fn rows(self, rows: View) -> Output {
        Output { rows, ..self }
    }

    /// Sets [`pitch_bytes`](#structfield.pitch_bytes).
    pub fn pitch_bytes(self, pitch_bytes: impl Into<Option<usize>>) -> Output {
        Output { pitch_bytes: pitch_bytes.into(), ..self }
    }

    /// Sets [`scales`](#structfield.scales).
    pub fn scales(self, scales: impl Into<Option<View>>) -> Output {
        Output { scales: scales.into(), ..self }
    }

    /// Sets [`scale_order`](#structfield.scale_order).
    pub fn scale_order(self, scale_order: ScaleOrder) -> Output {
        Output { scale_order, ..self }
    }

    /// Sets [`expert_count`](#structfield.expert_count).
    pub fn expert_count(self, expert_count: View) -> Output {
        Output { expert_count, ..self }
    }

    /// Sets [`expert_offset`](#structfield.expert_offset).
    pub fn expert_offset(self, expert_offset: impl Into<Option<View>>) -> Output {
        Output { expert_offset: expert_offset.into(), ..self }
    }

    /// Sets [`row_expert`](#structfield.row_expert).
    pub fn row_expert(self, row_expert: impl Into<Option<View>>) -> Output {
        Output { row_expert: row_expert.into(), ..self }
    }

    /// Sets [`source`](#structfield.source).
    pub fn source(self, source: impl Into<Option<View>>) -> Output {
        Output { source: source.into(), ..self }
    }

    /// Sets [`token_experts`](#structfield.token_experts).
    pub fn token_experts(self, token_experts: impl Into<Option<View>>) -> Output {
        Output { token_experts: token_experts.into(), ..self }
    }

    /// Sets [`token_weights`](#structfield.token_weights).
    pub fn token_weights(self, token_weights: impl Into<Option<View>>) -> Output {
        Output { token_weights: token_weights.into(), ..self }
    }

    /// Sets [`row_count`](#structfield.row_count).
    pub fn row_count(self, row_count: impl Into<Option<View>>) -> Output {
        Output { row_count: row_count.into(), ..self }
    }

    /// Sets [`zero_padding`](#structfield.zero_padding).
    pub fn zero_padding(self, zero_padding: bool) -> Output {
        Output { zero_padding, ..self }
    }

    /// Sets [`drop_overflow`](#structfield.drop_overflow).
    pub fn drop_overflow(self, drop_overflow: bool) -> Output {
        Output { drop_overflow, ..self }
    }

    /// Sets [`host_counts`](#structfield.host_counts).
    pub fn host_counts(self, host_counts: impl Into<Option<View>>) -> Output {
        Output { host_counts: host_counts.into(), ..self }
    }

    /// Sets [`source_ranges`](#structfield.source_ranges).
    pub fn source_ranges(self, source_ranges: impl Into<Option<View>>) -> Output {
        Output { source_ranges: source_ranges.into(), ..self }
    }

    /// Sets [`total_counts`](#structfield.total_counts).
    pub fn total_counts(self, total_counts: impl Into<Option<View>>) -> Output {
        Output { total_counts: total_counts.into(), ..self }
    }

    /// Sets [`wait_times`](#structfield.wait_times).
    pub fn wait_times(self, wait_times: impl Into<Option<View>>) -> Output {
        Output { wait_times: wait_times.into(), ..self }
    }

    /// Sets [`payload`](#structfield.payload).
    pub fn payload(self, payload: impl Into<Option<View>>) -> Output {
        Output { payload: payload.into(), ..self }
    }
}

impl Rows {
    /// Rows of the combine dtype, without gaps and without weights.
    pub fn new(rows: View) -> Rows {
        Rows { rows, pitch_bytes: None, dtype: None, topk_weight: None, payload: None }
    }

    /// Sets [`rows`](#structfield.rows).
    pub fn rows(self, rows: View) -> Rows {
        Rows { rows, ..self }
    }

    /// Sets [`pitch_bytes`](#structfield.pitch_bytes).
    pub fn pitch_bytes(self, pitch_bytes: impl Into<Option<usize>>) -> Rows {
        Rows { pitch_bytes: pitch_bytes.into(), ..self }
    }

    /// Sets [`dtype`](#structfield.dtype).
    pub fn dtype(self, dtype: impl Into<Option<Dtype>>) -> Rows {
        Rows { dtype: dtype.into(), ..self }
    }

    /// Sets [`topk_weight`](#structfield.topk_weight).
    pub fn topk_weight(self, topk_weight: impl Into<Option<View>>) -> Rows {
        Rows { topk_weight: topk_weight.into(), ..self }
    }

    /// Sets [`payload`](#structfield.payload).
    pub fn payload(self, payload: impl Into<Option<Payload>>) -> Rows {
        Rows { payload: payload.into(), ..self }
    }
}

impl Combined {
    /// bf16 rows, without gaps, that overwrite what `out` holds.
    pub fn new(out: View) -> Combined {
        Combined { out, pitch_bytes: None, dtype: Dtype::Bf16, accumulate: false, wait_times: None, payload: None }
    }

    /// Sets [`out`](#structfield.out).
    pub fn out(self, out: View) -> Combined {
        Combined { out, ..self }
    }

    /// Sets [`pitch_bytes`](#structfield.pitch_bytes).
    pub fn pitch_bytes(self, pitch_bytes: impl Into<Option<usize>>) -> Combined {
        Combined { pitch_bytes: pitch_bytes.into(), ..self }
    }

    /// Sets [`dtype`](#structfield.dtype).
    pub fn dtype(self, dtype: Dtype) -> Combined {
        Combined { dtype, ..self }
    }

    /// Sets [`accumulate`](#structfield.accumulate).
    pub fn accumulate(self, accumulate: bool) -> Combined {
        Combined { accumulate, ..self }
    }

    /// Sets [`wait_times`](#structfield.wait_times).
    pub fn wait_times(self, wait_times: impl Into<Option<View>>) -> Combined {
        Combined { wait_times: wait_times.into(), ..self }
    }

    /// Sets [`payload`](#structfield.payload).
    pub fn payload(self, payload: impl Into<Option<View>>) -> Combined {
        Combined { payload: payload.into(), ..self }
    }
}

impl Tokens {
    pub(crate) fn views(&self) -> impl Iterator<Item = &View> {
        let scales = self.scales.as_ref().map(|scales| &scales.view);
        let payload = self.payload.as_ref().map(|payload| &payload.view);
        let views =
            [Some(&self.x), scales, Some(&self.topk_idx), self.topk_weight.as_ref(), self.count.view(), payload];
        views.into_iter().flatten()
    }

    pub(crate) fn check(&self, needs: &mut Needs<'_>) -> Result<raw::ty_tokens> {
        let shape = needs.shape;
        let room = self.count.room(shape)?;
        let choices = self.index_type.columns(self.top_k, shape)?;
        let Tokens { x, pitch_bytes, scales, count, payload, .. } = self;
        let (scales, payload) = (scales.as_ref(), payload.as_ref());
        let source = Source { x, pitch_bytes: *pitch_bytes, scales, count, payload };
        let input = source.check(needs)?;
        let index_bytes = self.index_type.bytes();
        let indices = self.topk_idx_strides.unwrap_or(Strides::packed(index_bytes, choices));
        let [index_pitch, index_stride] = indices.words("topk_idx_strides", index_bytes)?;
        let span = indices.span(index_bytes, room, choices);
        needs.need("topk_idx", &self.topk_idx, span, index_bytes as u64)?;
        let weighed = self.topk_weight_strides.unwrap_or(Strides::packed(4, choices));
        let [weight_pitch, weight_stride] = weighed.words("topk_weight_strides", 4)?;
        let weights = needs.need_if(
            "topk_weight",
            shape.weights_with_dispatch(),
            shape.weights_sentence(),
            self.topk_weight.as_ref(),
            weighed.span(4, room, choices),
        )?;
        Ok(raw::ty_tokens {
            topk_idx: self.topk_idx.ptr(),
            topk_weight: weights,
            index_bytes: index_bytes as u32,
            choices: choices as u32,
            index_pitch,
            index_stride,
            weight_pitch,
            weight_stride,
            ..input
        })
    }

    /// The format of the call, in a context of the format `own`.
    pub(crate) fn call_format(&self, own: &CallFormat) -> CallFormat {
        CallFormat {
            weights: self.weights.unwrap_or(own.weights),
            combine_dtype: self.combine_dtype.unwrap_or(own.combine_dtype),
            max_tokens: self.max_tokens.unwrap_or(own.max_tokens),
            ..own.with_rows(self.hidden, self.format, self.quantize)
        }
    }
}

impl TokenCount {
    /// Tokens for which views must have room: the host's count, or the maximum if the count is in device memory.
    pub(crate) fn room(&self, shape: &Shape) -> Result<usize> {
        match *self {
            TokenCount::Host(count) if count > shape.max_tokens => Err(Error::argument(
                "count",
                count,
                format!("this call has at most {} tokens a rank", shape.max_tokens),
            )),
            TokenCount::Host(count) => Ok(count),
            TokenCount::Device(_) => Ok(shape.max_tokens),
        }
    }

    pub(super) fn view(&self) -> Option<&View> {
        match self {
            TokenCount::Host(_) => None,
            TokenCount::Device(view) => Some(view),
        }
    }
}

/// Rows that a call sends, with their scales, and how many they are.
pub(super) struct Source<'a> {
    pub x: &'a View,
    pub pitch_bytes: Option<usize>,
    pub scales: Option<&'a ScaleView>,
    pub count: &'a TokenCount,
    pub payload: Option<&'a TokenPayload>,
}

impl Source<'_> {
    /// Without what names their experts.
    pub fn check(&self, needs: &mut Needs<'_>) -> Result<raw::ty_tokens> {
        let (shape, room) = (needs.shape, self.count.room(needs.shape)?);
        let pitch = self.pitch_bytes.unwrap_or(shape.input_row_bytes());
        needs.need("x", self.x, rows_span("pitch_bytes of x", room, pitch, shape.input_row_bytes())?, 16)?;
        let (count, count_ptr) = match self.count {
            TokenCount::Host(count) => (*count as u32, 0),
            TokenCount::Device(view) => (0, needs.need("count", view, Some(4), 4)?),
        };
        self.check_scales(needs, room)?;
        let (payload, payload_words) = TokenPayload::check(self.payload, needs, room)?;
        let scales = self.scales;
        Ok(raw::ty_tokens {
            x: self.x.ptr(),
            x_pitch: pitch as u64,
            scales: scales.map_or(0, |s| s.view.ptr()),
            scale_row_stride: scales.map_or(0, |s| (s.row_stride_bytes / 4) as u64),
            scale_column_stride: scales
                .map_or(Ok(0), |s| stride("col_stride_bytes of scales", s.col_stride_bytes / 4))?,
            count_ptr,
            count,
            payload,
            payload_words,
            ..raw::ty_tokens::default()
        })
    }

    fn check_scales(&self, needs: &mut Needs<'_>, room: usize) -> Result<()> {
        let (shape, scales) = (needs.shape, self.scales);
        let span = scales.and_then(|s| {
            let last = room.saturating_sub(1).checked_mul(s.row_stride_bytes)?;
            let column = shape.scale_words.saturating_sub(1).checked_mul(s.col_stride_bytes)?;
            if room == 0 { Some(0) } else { last.checked_add(column)?.checked_add(4) }
        });
        let span = if scales.is_some() { span } else { Some(0) };
        let (wanted, why) = shape.input_scales();
        needs.need_if("scales", wanted, why, scales.map(|s| &s.view), span)?;
        for (name, bytes) in scales.iter().flat_map(|s| {
            [("row_stride_bytes of scales", s.row_stride_bytes), ("col_stride_bytes of scales", s.col_stride_bytes)]
        }) {
            if !bytes.is_multiple_of(4) {
                return Err(Error::argument(name, format!("{bytes} bytes"), "use a multiple of 4: scales are words"));
            }
        }
        Ok(())
    }
}

impl Output {
    pub(crate) fn views(&self) -> impl Iterator<Item = &View> {
        let optional = [
            &self.scales,
            &self.expert_offset,
            &self.row_expert,
            &self.source,
            &self.token_experts,
            &self.token_weights,
            &self.row_count,
            &self.host_counts,
            &self.source_ranges,
            &self.total_counts,
            &self.wait_times,
            &self.payload,
        ];
        [&self.rows, &self.expert_count].into_iter().chain(optional.into_iter().flatten())
    }

    pub(crate) fn check(&self, needs: &mut Needs<'_>) -> Result<raw::ty_output> {
        let target = Target {
            layout: self.layout,
            rows: &self.rows,
            pitch_bytes: self.pitch_bytes,
            scales: self.scales.as_ref(),
            scale_order: self.scale_order,
            payload: self.payload.as_ref(),
        };
        let out = target.check(needs)?;
        let (shape, local) = (needs.shape, needs.shape.local_experts);
        let rows = self.layout.rows(local).unwrap_or(0);
        needs.need("expert_count", &self.expert_count, Some(4 * local), 4)?;
        let is_token = matches!(self.layout, Layout::Token { .. });
        let only_token = "only the token layout has it";
        for (name, view) in [("token_experts", &self.token_experts), ("token_weights", &self.token_weights)] {
            if !is_token && view.is_some() {
                return Err(Error::argument(name, "given", format!("{only_token}, so leave it out")));
            }
        }
        if self.drop_overflow {
            self.layout.check_drops()?;
        }
        let per_choice = rows.checked_mul(4 * shape.top_k);
        Ok(raw::ty_output {
            expert_count: self.expert_count.ptr(),
            expert_offset: needs.optional("expert_offset", &self.expert_offset, Some(4 * (local + 1)))?,
            row_expert: needs.optional("row_expert", &self.row_expert, rows.checked_mul(4))?,
            source: needs.optional("source", &self.source, rows.checked_mul(8))?,
            token_experts: needs.optional("token_experts", &self.token_experts, per_choice)?,
            token_weights: needs.optional("token_weights", &self.token_weights, per_choice)?,
            row_count: needs.optional("row_count", &self.row_count, Some(4))?,
            host_counts: needs.optional("host_counts", &self.host_counts, Some(4 * (local + 1)))?,
            source_ranges: needs.wide("source_ranges", &self.source_ranges, Some(8 * local * shape.ranks))?,
            total_counts: needs.optional("total_counts", &self.total_counts, Some(4 * local))?,
            wait_times: needs.wide("wait_times", &self.wait_times, Some(8 * shape.ranks))?,
            zero_padding: u32::from(self.zero_padding),
            drop_overflow: u32::from(self.drop_overflow),
            ..out
        })
    }
}

/// Where rows go, with their scales.
pub(super) struct Target<'a> {
    pub layout: Layout,
    pub rows: &'a View,
    pub pitch_bytes: Option<usize>,
    pub scales: Option<&'a View>,
    pub scale_order: ScaleOrder,
    pub payload: Option<&'a View>,
}

impl Target<'_> {
    /// Without what describes the rows.
    pub fn check(&self, needs: &mut Needs<'_>) -> Result<raw::ty_output> {
        let shape = needs.shape;
        let (capacity, align) = match self.layout {
            Layout::Contiguous { align: 0, .. } => {
                return Err(Error::argument("align", "0", "use 1 for no alignment"));
            }
            Layout::Contiguous { align, capacity } => (capacity, align),
            Layout::Masked { per_expert } => (per_expert, 1),
            Layout::Token { capacity } => (capacity, 1),
        };
        let local = shape.local_experts;
        let rows = self.layout.rows(local).filter(|&rows| rows <= i32::MAX as usize);
        let (Some(rows), true) = (rows, shape.is_counted(local, align)) else {
            let advice = "rows are counted in int32, padding for alignment included; ask for fewer";
            return Err(Error::argument("layout", format!("{:?}", self.layout), advice));
        };
        let pitch = self.pitch_bytes.unwrap_or(shape.row_bytes);
        needs.need("rows", self.rows, rows_span("pitch_bytes of rows", rows, pitch, shape.row_bytes)?, 16)?;
        let leading = match self.scale_order {
            ScaleOrder::RowMajor => 0,
            // Beyond 64 bits is beyond the stride's 32 bits, too: refused below.
            ScaleOrder::ColumnMajor => capacity.checked_next_multiple_of(4).unwrap_or(usize::MAX),
        };
        let scale_rows = match (self.scale_order, self.layout) {
            (ScaleOrder::RowMajor, _) => Some(rows),
            (ScaleOrder::ColumnMajor, Layout::Masked { .. }) => leading.checked_mul(local),
            (ScaleOrder::ColumnMajor, _) => Some(leading),
        };
        let scale_bytes = scale_rows.and_then(|r| r.checked_mul(4 * shape.scale_words));
        let (wanted, why) = (shape.scale_words > 0, shape.scales_sentence());
        let scales = needs.need_if("output scales", wanted, why, self.scales, scale_bytes)?;
        let payload = TokenPayload::check_output(self.payload, needs, rows)?;
        Ok(raw::ty_output {
            rows: self.rows.ptr(),
            rows_pitch: pitch as u64,
            scales,
            capacity: capacity as u64,
            scale_leading: stride("capacity", leading)?,
            layout: self.layout.code(),
            align: align as u32,
            align_inverse: inverse(align as u32),
            payload,
            ..raw::ty_output::default()
        })
    }
}

impl Rows {
    pub(crate) fn views(&self) -> impl Iterator<Item = &View> {
        let payload = self.payload.as_ref().map(|payload| &payload.view);
        [Some(&self.rows), self.topk_weight.as_ref(), payload].into_iter().flatten()
    }

    /// Bytes from one row to the next.
    pub(crate) fn pitch(&self, shape: &Shape) -> usize {
        self.pitch_bytes.unwrap_or(shape.combine_row_bytes())
    }

    /// Checks the experts' rows; `rows` is the handle's number of output rows, `room` the number of own tokens.
    pub(crate) fn check(&self, needs: &mut Needs<'_>, rows: usize, room: usize) -> Result<u64> {
        let shape = needs.shape;
        let row_bytes = shape.combine_row_bytes();
        let span = rows_span("pitch_bytes of rows", rows, self.pitch(shape), row_bytes)?;
        needs.need("rows", &self.rows, span, 16)?;
        needs.need_if(
            "topk_weight",
            shape.weights_with_combine(),
            shape.weights_sentence(),
            self.topk_weight.as_ref(),
            room.checked_mul(4 * shape.top_k),
        )
    }
}

impl Combined {
    pub(crate) fn views(&self) -> impl Iterator<Item = &View> {
        [Some(&self.out), self.wait_times.as_ref(), self.payload.as_ref()].into_iter().flatten()
    }

    pub(crate) fn check(&self, needs: &mut Needs<'_>, room: usize) -> Result<Sums> {
        let shape = needs.shape;
        let dtype = shape.float_code("dtype of out", self.dtype)?;
        let row_bytes = shape.hidden * self.dtype.bytes();
        let pitch = self.pitch_bytes.unwrap_or(row_bytes);
        let out = needs.need("out", &self.out, rows_span("pitch_bytes of out", room, pitch, row_bytes)?, 16)?;
        let wait_times = needs.wide("wait_times", &self.wait_times, Some(8 * shape.ranks))?;
        let words = shape.payload.map_or(0, |words| words.of_token);
        let why = if words > 0 { "the call's rows have a payload" } else { "the call's rows have no payload" };
        let bytes = room.checked_mul(4 * words);
        let payload = needs.need_if("payload of out", words > 0, why, self.payload.as_ref(), bytes)?;
        Ok(Sums { out, pitch: pitch as u64, dtype, accumulate: u32::from(self.accumulate), wait_times, payload })
    }
}

/// Where sums go, as kernels take it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sums {
    pub out: u64,
    pub pitch: u64,
    pub dtype: u32,
    pub accumulate: u32,
    pub wait_times: u64,
    pub payload: u64,
}
