//! What a call is given: views of device memory with their shapes, and the checks before anything is enqueued.

use super::shape::Shape;
use super::tables::inverse;
use crate::base::{Dtype, Error, Result};
use crate::ffi::layout as raw;
use crate::kernels::View;

/// Type of the routing indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexType {
    /// 32-bit signed.
    I32,
    /// 64-bit signed.
    I64,
}

impl IndexType {
    /// Size of one index in bytes.
    pub fn bytes(self) -> usize {
        match self {
            IndexType::I32 => 4,
            IndexType::I64 => 8,
        }
    }
}

/// How many tokens a rank dispatches.
#[derive(Debug, Clone, Copy)]
pub enum TokenCount {
    /// Known on the host.
    Host(usize),
    /// An int32 in device memory, read when the kernel runs.
    Device(View),
}

/// Scales of the input rows: 4-byte words, fp32 or four UE8M0 exponents each.
#[derive(Debug, Clone, Copy)]
pub struct ScaleView {
    /// The memory.
    pub view: View,
    /// Words from one token to the next.
    pub row_stride: usize,
    /// Words from one scale of a token to the next.
    pub col_stride: usize,
}

/// The tokens of this rank.
#[derive(Debug, Clone, Copy)]
pub struct Tokens {
    /// Rows, [tokens, hidden] of the context's dtype, or of bf16 where the context quantises; 16-byte aligned.
    pub x: View,
    /// Bytes from one row to the next; a multiple of 16.
    pub x_pitch: usize,
    /// Scales, where the context has them and does not make them itself.
    pub scales: Option<ScaleView>,
    /// Experts of each token, [tokens, top_k]; -1 for none.
    pub topk_idx: View,
    /// Type of the indices.
    pub index_type: IndexType,
    /// Weights, fp32 `[tokens, top_k]`, where the context's weights come with dispatch.
    pub topk_weight: Option<View>,
    /// Number of tokens.
    pub count: TokenCount,
}

/// Where received rows go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Expert by expert, each expert's first row at a multiple of `align`; `capacity` rows in all.
    Contiguous {
        /// Rows; 1 for none, 128 for DeepGEMM's contiguous grouped GEMM.
        align: usize,
        /// Rows of the output.
        capacity: usize,
    },
    /// `[local experts, per_expert, hidden]`.
    Masked {
        /// Rows of each expert.
        per_expert: usize,
    },
    /// One row per (source rank, token), in that order.
    Token {
        /// Rows of the output.
        capacity: usize,
    },
}

impl Layout {
    pub(crate) fn code(self) -> u32 {
        match self {
            Layout::Contiguous { .. } => raw::TY_LAYOUT_CONTIGUOUS,
            Layout::Masked { .. } => raw::TY_LAYOUT_MASKED,
            Layout::Token { .. } => raw::TY_LAYOUT_TOKEN,
        }
    }

    /// Rows of the whole output; `None` where that overflows.
    pub fn rows(self, local_experts: usize) -> Option<usize> {
        match self {
            Layout::Contiguous { capacity, .. } | Layout::Token { capacity } => Some(capacity),
            Layout::Masked { per_expert } => per_expert.checked_mul(local_experts),
        }
    }
}

/// Order of the output scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleOrder {
    /// `[rows, words]`.
    RowMajor,
    /// `[words, leading]`, `leading` = rows rounded up to 4 (16 bytes); in the masked layout one such block per expert.
    ColumnMajor,
}

/// Where dispatch writes. Optional views are left out by `None`.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    /// Order and capacity of the rows.
    pub layout: Layout,
    /// Rows of the context's dtype; 16-byte aligned.
    pub rows: View,
    /// Bytes from one row to the next; a multiple of 16.
    pub rows_pitch: usize,
    /// Scales of the rows, where the context has them.
    pub scales: Option<View>,
    /// Order of the scales.
    pub scale_order: ScaleOrder,
    /// int32 `[local experts]`: rows of each expert.
    pub expert_count: View,
    /// int32 `[local experts + 1]`: first row of each expert, then the end.
    pub expert_offset: Option<View>,
    /// int32 `[rows]`: local expert of each row, -1 for padding. All -1 in the token layout.
    pub row_expert: Option<View>,
    /// int32 `[rows, 2]`: source rank and token of each row, -1 for padding.
    pub source: Option<View>,
    /// Token layout: int32 `[rows, top_k]`, local expert or -1.
    pub token_experts: Option<View>,
    /// Token layout: fp32 `[rows, top_k]`.
    pub token_weights: Option<View>,
    /// int32 `[1]`: rows used.
    pub row_count: Option<View>,
    /// Contiguous layout: whether the padding rows between segments are zeroed.
    pub zero_padding: bool,
    /// int32 `[local experts + 1]` in host memory the device can write: counts, then rows used; there once the call is over.
    pub host_counts: Option<View>,
}

/// A context's output in its arena: what [`Output`] has to say there, scales being row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnOutput {
    /// Contiguous.
    pub layout: Layout,
    /// Rows of the context's dtype.
    pub rows: View,
    /// Bytes from one row to the next.
    pub rows_pitch: usize,
    /// Scales of the rows, where the context has them.
    pub scales: Option<View>,
}

impl OwnOutput {
    /// Refuses an output that is not this one.
    pub(crate) fn check(&self, output: &Output) -> Result<()> {
        let given = OwnOutput {
            layout: output.layout,
            rows: View { bytes: self.rows.bytes, ..output.rows },
            rows_pitch: output.rows_pitch,
            scales: output.scales.map(|view| View { bytes: self.scales.map_or(0, |own| own.bytes), ..view }),
        };
        if given == *self && output.scale_order == ScaleOrder::RowMajor {
            return Ok(());
        }
        let advice = "this context has an output in its arena; give what own_output() says".into();
        Err(argument("output", format!("{:?} at {:#x}", output.layout, output.rows.ptr), advice))
    }
}

/// The experts' outputs, in the layout dispatched.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// Rows, [rows, hidden] of the context's combine dtype; 16-byte aligned.
    pub rows: View,
    /// Bytes from one row to the next; a multiple of 16.
    pub pitch: usize,
    /// Weights of this rank's own tokens, fp32 `[tokens, top_k]`, where the context's weights come with combine.
    pub topk_weight: Option<View>,
}

/// Where combine writes.
#[derive(Debug, Clone, Copy)]
pub struct Combined {
    /// [tokens, hidden]; 16-byte aligned.
    pub out: View,
    /// Bytes from one row to the next; a multiple of 16.
    pub pitch: usize,
    /// bf16, fp16 or fp32.
    pub dtype: Dtype,
    /// Add to what `out` holds instead of overwriting it.
    pub accumulate: bool,
}

fn argument(name: &'static str, value: String, advice: String) -> Error {
    Error::Argument { name, value, advice }
}

/// Scale words from one column to the next, which the device keeps in 32 bits.
fn stride(name: &'static str, words: usize) -> Result<u32> {
    let advice = "columns of scales are at most 2^32 - 1 words apart; lay them out closer".into();
    u32::try_from(words).map_err(|_| argument(name, words.to_string(), advice))
}

/// Refuses a view that is too small or misaligned.
fn need(name: &'static str, view: View, bytes: Option<usize>, align: u64) -> Result<()> {
    let Some(bytes) = bytes else {
        return Err(argument(name, "beyond 64 bits".into(), "ask for fewer rows".into()));
    };
    if view.bytes < bytes {
        return Err(argument(name, format!("{} bytes", view.bytes), format!("{bytes} bytes are needed")));
    }
    if bytes > 0 && view.ptr == 0 {
        return Err(argument(name, "a null pointer".into(), format!("{bytes} bytes are needed")));
    }
    if !view.ptr.is_multiple_of(align) {
        return Err(argument(name, format!("address {:#x}", view.ptr), format!("align it to {align} bytes")));
    }
    Ok(())
}

/// Refuses an optional view that is missing where it is needed, given where it is unused, or unusable.
fn need_if(name: &'static str, wanted: bool, why: &str, view: Option<View>, bytes: Option<usize>) -> Result<u64> {
    match (wanted, view) {
        (true, None) => Err(argument(name, "missing".into(), format!("{why}, so give it"))),
        (false, Some(_)) => Err(argument(name, "given".into(), format!("{why}, so leave it out"))),
        (true, Some(view)) => need(name, view, bytes, 4).map(|()| view.ptr),
        (false, None) => Ok(0),
    }
}

fn optional(name: &'static str, view: Option<View>, bytes: Option<usize>) -> Result<u64> {
    view.map_or(Ok(0), |view| need(name, view, bytes, 4).map(|()| view.ptr))
}

/// Bytes of `rows` rows of `row_bytes`, `pitch` apart; checks the pitch.
fn rows_span(name: &'static str, rows: usize, pitch: usize, row_bytes: usize) -> Result<Option<usize>> {
    if pitch < row_bytes || !pitch.is_multiple_of(16) {
        let advice = format!("use a multiple of 16 that is at least {row_bytes}");
        return Err(argument(name, format!("{pitch} bytes"), advice));
    }
    Ok(if rows == 0 { Some(0) } else { (rows - 1).checked_mul(pitch).and_then(|b| b.checked_add(row_bytes)) })
}

impl Tokens {
    /// Tokens for which views must have room: the host's count, or the maximum where only the device knows.
    pub(crate) fn room(&self, shape: &Shape) -> Result<usize> {
        match self.count {
            TokenCount::Host(count) if count > shape.max_tokens => Err(argument(
                "count",
                count.to_string(),
                format!("this context was built for at most {} tokens a rank", shape.max_tokens),
            )),
            TokenCount::Host(count) => Ok(count),
            TokenCount::Device(_) => Ok(shape.max_tokens),
        }
    }

    pub(crate) fn check(&self, shape: &Shape) -> Result<raw::ty_tokens> {
        let room = self.room(shape)?;
        let choices = room.checked_mul(shape.top_k);
        need("x", self.x, rows_span("x_pitch", room, self.x_pitch, shape.input_row_bytes())?, 16)?;
        let index_bytes = self.index_type.bytes();
        need("topk_idx", self.topk_idx, choices.and_then(|n| n.checked_mul(index_bytes)), index_bytes as u64)?;
        let weights = need_if(
            "topk_weight",
            shape.weights_with_dispatch(),
            shape.weights_sentence(),
            self.topk_weight,
            choices.and_then(|n| n.checked_mul(4)),
        )?;
        let (count, count_ptr) = match self.count {
            TokenCount::Host(count) => (count as u32, 0),
            TokenCount::Device(view) => need("count", view, Some(4), 4).map(|()| (0, view.ptr))?,
        };
        let scales = self.check_scales(shape, room)?;
        Ok(raw::ty_tokens {
            x: self.x.ptr,
            x_pitch: self.x_pitch as u64,
            scales: scales.map_or(0, |s| s.view.ptr),
            scale_row_stride: scales.map_or(0, |s| s.row_stride as u64),
            topk_idx: self.topk_idx.ptr,
            topk_weight: weights,
            count_ptr,
            count,
            index_bytes: index_bytes as u32,
            scale_column_stride: scales.map_or(Ok(0), |s| stride("scales.col_stride", s.col_stride))?,
            reserved: 0,
        })
    }

    fn check_scales(&self, shape: &Shape, room: usize) -> Result<Option<ScaleView>> {
        let span = self.scales.and_then(|s| {
            let last = room.saturating_sub(1).checked_mul(s.row_stride)?;
            let column = shape.scale_words.saturating_sub(1).checked_mul(s.col_stride)?;
            let words = if room == 0 { 0 } else { last.checked_add(column)?.checked_add(1)? };
            words.checked_mul(4)
        });
        let view = self.scales.map(|s| s.view);
        let span = if self.scales.is_some() { span } else { Some(0) };
        let (wanted, why) = shape.input_scales();
        need_if("scales", wanted, why, view, span)?;
        Ok(self.scales)
    }
}

impl Output {
    pub(crate) fn check(&self, shape: &Shape) -> Result<raw::ty_output> {
        let (capacity, align) = match self.layout {
            Layout::Contiguous { align: 0, .. } => {
                return Err(argument("align", "0".into(), "use 1 for no alignment".into()));
            }
            Layout::Contiguous { align, capacity } => (capacity, align),
            Layout::Masked { per_expert } => (per_expert, 1),
            Layout::Token { capacity } => (capacity, 1),
        };
        let local = shape.local_experts;
        let rows = self.layout.rows(local).filter(|&rows| rows <= i32::MAX as usize);
        let (Some(rows), true) = (rows, shape.is_counted(local, align)) else {
            let advice = "rows are counted in int32, those by which experts' starts are aligned, too; ask for fewer";
            return Err(argument("layout", format!("{:?}", self.layout), advice.into()));
        };
        need("rows", self.rows, rows_span("rows_pitch", rows, self.rows_pitch, shape.row_bytes)?, 16)?;
        need("expert_count", self.expert_count, Some(4 * local), 4)?;
        let leading = match self.scale_order {
            ScaleOrder::RowMajor => 0,
            ScaleOrder::ColumnMajor => capacity.next_multiple_of(4),
        };
        let scale_rows = match (self.scale_order, self.layout) {
            (ScaleOrder::RowMajor, _) => Some(rows),
            (ScaleOrder::ColumnMajor, Layout::Masked { .. }) => leading.checked_mul(local),
            (ScaleOrder::ColumnMajor, _) => Some(leading),
        };
        let scale_bytes = scale_rows.and_then(|r| r.checked_mul(4 * shape.scale_words));
        let scales =
            need_if("output scales", shape.scale_words > 0, shape.scales_sentence(), self.scales, scale_bytes)?;
        let is_token = matches!(self.layout, Layout::Token { .. });
        let only_token = "only the token layout has it";
        for (name, view) in [("token_experts", self.token_experts), ("token_weights", self.token_weights)] {
            if !is_token && view.is_some() {
                return Err(argument(name, "given".into(), format!("{only_token}, so leave it out")));
            }
        }
        let per_choice = rows.checked_mul(4 * shape.top_k);
        Ok(raw::ty_output {
            rows: self.rows.ptr,
            rows_pitch: self.rows_pitch as u64,
            scales,
            expert_count: self.expert_count.ptr,
            expert_offset: optional("expert_offset", self.expert_offset, Some(4 * (local + 1)))?,
            row_expert: optional("row_expert", self.row_expert, rows.checked_mul(4))?,
            source: optional("source", self.source, rows.checked_mul(8))?,
            token_experts: optional("token_experts", self.token_experts, per_choice)?,
            token_weights: optional("token_weights", self.token_weights, per_choice)?,
            row_count: optional("row_count", self.row_count, Some(4))?,
            host_counts: optional("host_counts", self.host_counts, Some(4 * (local + 1)))?,
            capacity: capacity as u64,
            scale_leading: stride("capacity", leading)?,
            layout: self.layout.code(),
            align: align as u32,
            align_inverse: inverse(align as u32),
            zero_padding: u32::from(self.zero_padding),
        })
    }
}

impl Rows {
    /// Checks the experts' rows; `rows` is the handle's number of output rows, `room` that of own tokens.
    pub(crate) fn check(&self, shape: &Shape, rows: usize, room: usize) -> Result<u64> {
        need("rows", self.rows, rows_span("pitch", rows, self.pitch, shape.combine_row_bytes())?, 16)?;
        need_if(
            "topk_weight",
            shape.weights_with_combine(),
            shape.weights_sentence(),
            self.topk_weight,
            room.checked_mul(4 * shape.top_k),
        )
    }
}

impl Combined {
    pub(crate) fn check(&self, shape: &Shape, room: usize) -> Result<u32> {
        let code = shape.float_code("dtype of out", self.dtype)?;
        let row_bytes = shape.hidden * self.dtype.bytes();
        need("out", self.out, rows_span("pitch of out", room, self.pitch, row_bytes)?, 16)?;
        Ok(code)
    }
}
