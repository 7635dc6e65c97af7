//! Numbers that stand for choices, and views of memory.
//!
//! Place: what structs of calls and of configurations have in common. Pure.

use crate::base::{Dtype, Error, Result};
use crate::bindings::api::{
    ArenaPlace, IndexType, Layout, MissingRanks, Partial, RowFormat, ScaleOrder, Strides, Weights,
};
use crate::kernels::{Device, View};
use std::ffi::c_void;
use std::fmt::Display;
use std::time::Duration;

/// Stands for 0 where a field's 0 stands for the default.
pub const TOKENYARD_ZERO: u64 = u64::MAX;

/// A yes or a no; 0 stands for the default.
pub type tokenyard_choice_t = u32;
/// Yes.
pub const TOKENYARD_YES: tokenyard_choice_t = 1;
/// No.
pub const TOKENYARD_NO: tokenyard_choice_t = 2;

/// Type of an element; 0 stands for the default.
pub type tokenyard_dtype_t = u32;
/// bfloat16.
pub const TOKENYARD_DTYPE_BF16: tokenyard_dtype_t = 1;
/// IEEE binary16.
pub const TOKENYARD_DTYPE_FP16: tokenyard_dtype_t = 2;
/// IEEE binary32.
pub const TOKENYARD_DTYPE_FP32: tokenyard_dtype_t = 3;

/// Format of dispatched rows: elements and scales; 0 stands for the default.
pub type tokenyard_format_t = u32;
/// bf16 elements.
pub const TOKENYARD_FORMAT_BF16: tokenyard_format_t = 1;
/// fp16 elements.
pub const TOKENYARD_FORMAT_FP16: tokenyard_format_t = 2;
/// fp32 elements.
pub const TOKENYARD_FORMAT_FP32: tokenyard_format_t = 3;
/// fp8 e4m3 elements without scales.
pub const TOKENYARD_FORMAT_FP8: tokenyard_format_t = 4;
/// fp8 e4m3 elements, and an fp32 scale per 128 columns.
pub const TOKENYARD_FORMAT_FP8_F32: tokenyard_format_t = 5;
/// fp8 e4m3 elements, and a UE8M0 exponent per 128 columns, four in a word.
pub const TOKENYARD_FORMAT_FP8_UE8M0: tokenyard_format_t = 6;

/// Where the weights of combine's sums come from; 0 stands for the default.
pub type tokenyard_weights_t = u32;
/// With dispatch: `tokenyard_tokens_t.topk_weight`.
pub const TOKENYARD_WEIGHTS_DISPATCH: tokenyard_weights_t = 1;
/// With combine: `tokenyard_rows_t.topk_weight`.
pub const TOKENYARD_WEIGHTS_COMBINE: tokenyard_weights_t = 2;
/// Nowhere: every weight is 1.
pub const TOKENYARD_WEIGHTS_NONE: tokenyard_weights_t = 3;

/// Type of routing indices; 0 stands for int32.
pub type tokenyard_index_t = u32;
/// int32 experts.
pub const TOKENYARD_INDEX_I32: tokenyard_index_t = 1;
/// int64 experts.
pub const TOKENYARD_INDEX_I64: tokenyard_index_t = 2;
/// A byte for each rank, `[tokens, ranks]`, which is not 0 where the token goes to that rank.
pub const TOKENYARD_INDEX_RANKS: tokenyard_index_t = 3;

/// Order of the output scales; 0 stands for row-major.
pub type tokenyard_scale_order_t = u32;
/// `[rows, words]`.
pub const TOKENYARD_SCALES_ROW_MAJOR: tokenyard_scale_order_t = 1;
/// `[words, rows rounded up to 4]`; in the masked layout one such block per expert.
pub const TOKENYARD_SCALES_COLUMN_MAJOR: tokenyard_scale_order_t = 2;

/// Order of received rows; it is never left out.
pub type tokenyard_layout_kind_t = u32;
/// Expert by expert, each expert's first row at a multiple of `align`; `capacity` rows in all.
pub const TOKENYARD_LAYOUT_CONTIGUOUS: tokenyard_layout_kind_t = 1;
/// `[local experts, capacity, hidden]`.
pub const TOKENYARD_LAYOUT_MASKED: tokenyard_layout_kind_t = 2;
/// One row per (source rank, token), in that order; `capacity` rows.
pub const TOKENYARD_LAYOUT_TOKEN: tokenyard_layout_kind_t = 3;

/// Format in which partial rows travel; 0 stands for the combine dtype.
pub type tokenyard_partial_t = u32;
/// The combine dtype.
pub const TOKENYARD_PARTIAL_SAME: tokenyard_partial_t = 1;
/// fp32.
pub const TOKENYARD_PARTIAL_FP32: tokenyard_partial_t = 2;
/// fp8 e4m3 with an fp32 scale per 128 columns.
pub const TOKENYARD_PARTIAL_FP8: tokenyard_partial_t = 3;

/// What calls do about ranks that are missing; 0 stands for fatal.
pub type tokenyard_missing_t = u32;
/// A silent rank closes the context.
pub const TOKENYARD_MISSING_FATAL: tokenyard_missing_t = 1;
/// Ranks can be masked. A silent rank that is not masked closes the context.
pub const TOKENYARD_MISSING_MASKED: tokenyard_missing_t = 2;
/// Ranks can be masked, and a deadline masks the rank that is silent.
pub const TOKENYARD_MISSING_MASKED_AT_DEADLINE: tokenyard_missing_t = 3;

/// Where the arena lies; 0 stands for auto.
pub type tokenyard_arena_t = u32;
/// In the GPU's own memory if the network reaches it, else in host memory.
pub const TOKENYARD_ARENA_AUTO: tokenyard_arena_t = 1;
/// In the GPU's own memory.
pub const TOKENYARD_ARENA_DEVICE: tokenyard_arena_t = 2;
/// In host memory.
pub const TOKENYARD_ARENA_HOST: tokenyard_arena_t = 3;

/// Memory that the caller owns and the device of the call can read and write: on a GPU device memory or mapped host
/// memory, on the CPU device any memory. NULL leaves an optional view out.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_view_t {
    /// Its first byte, in the device's addresses.
    pub pointer: *mut c_void,
    /// Its length.
    pub bytes: usize,
}

/// Order and capacity of received rows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_layout_t {
    /// One of `TOKENYARD_LAYOUT_*`.
    pub kind: tokenyard_layout_kind_t,
    /// Of the contiguous layout: each expert's first row lies at a multiple of it. 0 counts as 1.
    pub align: u32,
    /// Rows of the output; in the masked layout rows of each expert.
    pub capacity: u64,
}

#[cold]
fn unknown(name: &'static str, given: impl Display) -> Error {
    Error::argument(name, given, "give one of the constants that tokenyard.h lists for it")
}

/// `None` for the default.
pub(super) fn choice(name: &'static str, given: tokenyard_choice_t) -> Result<Option<bool>> {
    match given {
        0 => Ok(None),
        TOKENYARD_YES => Ok(Some(true)),
        TOKENYARD_NO => Ok(Some(false)),
        _ => Err(unknown(name, given)),
    }
}

pub(super) fn dtype(name: &'static str, given: tokenyard_dtype_t) -> Result<Option<Dtype>> {
    match given {
        0 => Ok(None),
        TOKENYARD_DTYPE_BF16 => Ok(Some(Dtype::Bf16)),
        TOKENYARD_DTYPE_FP16 => Ok(Some(Dtype::Fp16)),
        TOKENYARD_DTYPE_FP32 => Ok(Some(Dtype::Fp32)),
        _ => Err(unknown(name, given)),
    }
}

pub(super) fn format(name: &'static str, given: tokenyard_format_t) -> Result<Option<RowFormat>> {
    match given {
        0 => Ok(None),
        TOKENYARD_FORMAT_BF16 => Ok(Some(RowFormat::BF16)),
        TOKENYARD_FORMAT_FP16 => Ok(Some(RowFormat::FP16)),
        TOKENYARD_FORMAT_FP32 => Ok(Some(RowFormat::FP32)),
        TOKENYARD_FORMAT_FP8 => Ok(Some(RowFormat::FP8)),
        TOKENYARD_FORMAT_FP8_F32 => Ok(Some(RowFormat::FP8_F32)),
        TOKENYARD_FORMAT_FP8_UE8M0 => Ok(Some(RowFormat::FP8_UE8M0)),
        _ => Err(unknown(name, given)),
    }
}

pub(super) fn weights(name: &'static str, given: tokenyard_weights_t) -> Result<Option<Weights>> {
    match given {
        0 => Ok(None),
        TOKENYARD_WEIGHTS_DISPATCH => Ok(Some(Weights::Dispatch)),
        TOKENYARD_WEIGHTS_COMBINE => Ok(Some(Weights::Combine)),
        TOKENYARD_WEIGHTS_NONE => Ok(Some(Weights::None)),
        _ => Err(unknown(name, given)),
    }
}

pub(super) fn index_type(name: &'static str, given: tokenyard_index_t) -> Result<IndexType> {
    match given {
        0 | TOKENYARD_INDEX_I32 => Ok(IndexType::I32),
        TOKENYARD_INDEX_I64 => Ok(IndexType::I64),
        TOKENYARD_INDEX_RANKS => Ok(IndexType::Ranks),
        _ => Err(unknown(name, given)),
    }
}

pub(super) fn scale_order(name: &'static str, given: tokenyard_scale_order_t) -> Result<ScaleOrder> {
    match given {
        0 | TOKENYARD_SCALES_ROW_MAJOR => Ok(ScaleOrder::RowMajor),
        TOKENYARD_SCALES_COLUMN_MAJOR => Ok(ScaleOrder::ColumnMajor),
        _ => Err(unknown(name, given)),
    }
}

pub(super) fn partial(name: &'static str, given: tokenyard_partial_t) -> Result<Partial> {
    match given {
        0 | TOKENYARD_PARTIAL_SAME => Ok(Partial::Same),
        TOKENYARD_PARTIAL_FP32 => Ok(Partial::Fp32),
        TOKENYARD_PARTIAL_FP8 => Ok(Partial::Fp8),
        _ => Err(unknown(name, given)),
    }
}

pub(super) fn missing(name: &'static str, given: tokenyard_missing_t) -> Result<MissingRanks> {
    match given {
        0 | TOKENYARD_MISSING_FATAL => Ok(MissingRanks::Fatal),
        TOKENYARD_MISSING_MASKED => Ok(MissingRanks::Masked),
        TOKENYARD_MISSING_MASKED_AT_DEADLINE => Ok(MissingRanks::MaskedAtDeadline),
        _ => Err(unknown(name, given)),
    }
}

pub(super) fn arena(name: &'static str, given: tokenyard_arena_t) -> Result<ArenaPlace> {
    match given {
        0 | TOKENYARD_ARENA_AUTO => Ok(ArenaPlace::Auto),
        TOKENYARD_ARENA_DEVICE => Ok(ArenaPlace::Device),
        TOKENYARD_ARENA_HOST => Ok(ArenaPlace::Host),
        _ => Err(unknown(name, given)),
    }
}

/// A number of which 0 stands for the default, and `TOKENYARD_ZERO` for 0.
pub(super) fn number(given: u64) -> Option<usize> {
    match given {
        0 => None,
        TOKENYARD_ZERO => Some(0),
        // Beyond the address space is beyond every limit.
        _ => Some(usize::try_from(given).unwrap_or(usize::MAX)),
    }
}

/// A length, of which 0 stands for the default.
pub(super) fn length(given: usize) -> Option<usize> {
    (given != 0).then_some(given)
}

/// A time in milliseconds, of which 0 stands for the default.
pub(super) fn milliseconds(given: u64) -> Option<Duration> {
    (given != 0).then_some(Duration::from_millis(given))
}

/// Strides, of which 0 and 0 stand for elements without gaps.
pub(super) fn strides(token_bytes: usize, choice_bytes: usize) -> Option<Strides> {
    ((token_bytes, choice_bytes) != (0, 0)).then_some(Strides { token_bytes, choice_bytes })
}

impl tokenyard_layout_t {
    pub(super) fn layout(self) -> Result<Layout> {
        let capacity = usize::try_from(self.capacity).unwrap_or(usize::MAX);
        match self.kind {
            TOKENYARD_LAYOUT_CONTIGUOUS => Ok(Layout::Contiguous { align: self.align.max(1) as usize, capacity }),
            TOKENYARD_LAYOUT_MASKED => Ok(Layout::Masked { per_expert: capacity }),
            TOKENYARD_LAYOUT_TOKEN => Ok(Layout::Token { capacity }),
            kind => Err(unknown("layout.kind", kind)),
        }
    }

    pub(super) fn of(layout: Layout) -> tokenyard_layout_t {
        let (kind, align, capacity) = match layout {
            Layout::Contiguous { align, capacity } => (TOKENYARD_LAYOUT_CONTIGUOUS, align, capacity),
            Layout::Masked { per_expert } => (TOKENYARD_LAYOUT_MASKED, 0, per_expert),
            Layout::Token { capacity } => (TOKENYARD_LAYOUT_TOKEN, 0, capacity),
        };
        tokenyard_layout_t { kind, align: u32::try_from(align).unwrap_or(u32::MAX), capacity: capacity as u64 }
    }
}

impl tokenyard_view_t {
    /// No memory.
    pub(super) const NONE: tokenyard_view_t = tokenyard_view_t { pointer: std::ptr::null_mut(), bytes: 0 };

    pub(super) fn of(view: &View) -> tokenyard_view_t {
        tokenyard_view_t { pointer: view.ptr() as *mut c_void, bytes: view.len() }
    }

    /// The view of a call on `device`; `None` if it is left out.
    pub(super) fn given(self, name: &'static str, device: &Device) -> Result<Option<View>> {
        if self.pointer.is_null() && self.bytes == 0 {
            return Ok(None);
        }
        self.needed(name, device).map(Some)
    }

    /// As `given`, of a view that is never left out: no bytes at all may do where there are no tokens.
    pub(super) fn needed(self, name: &'static str, device: &Device) -> Result<View> {
        let begin = self.pointer as u64;
        if (begin == 0 && self.bytes != 0) || begin.checked_add(self.bytes as u64).is_none() {
            let advice = "give memory that exists, or NULL and 0 bytes to leave it out";
            return Err(Error::argument(name, format!("{} bytes at {begin:#x}", self.bytes), advice));
        }
        // SAFETY: the caller of the C function vouches for the memory of views: `tokenyard_view_t`.
        Ok(unsafe { View::from_raw(device, begin, self.bytes) })
    }
}
