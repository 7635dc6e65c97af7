//! Arguments of a dispatch by an earlier dispatch's handle: new rows for the same tokens' places.

use super::call_format::CallFormat;
use super::calls::{ScaleView, Source, Target, TokenCount};
use super::format::RowFormat;
use super::layout::{Layout, ScaleOrder};
use super::needs::Needs;
use super::payload::TokenPayload;
use crate::base::Result;
use crate::ffi::layout as raw;
use crate::kernels::View;

/// New rows of the tokens that a dispatch sent: made by [`NewRows::new`], and changed field by field.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NewRows {
    /// Rows, `[tokens, hidden]`, as [`Tokens::x`](super::Tokens::x).
    pub x: View,
    /// Bytes from one row to the next; a multiple of 16. `None`: rows without gaps.
    pub pitch_bytes: Option<usize>,
    /// Format in which rows travel. `None`: that of the handle's dispatch.
    pub format: Option<RowFormat>,
    /// Columns of a row. `None`: as many as in the handle's dispatch.
    pub hidden: Option<usize>,
    /// Whether dispatch quantises `x` from bf16 to the format. `None`: as the handle's dispatch did if rows are of its
    /// format, else no.
    pub quantize: Option<bool>,
    /// Scales, as [`Tokens::scales`](super::Tokens::scales).
    pub scales: Option<ScaleView>,
    /// Number of tokens: that of the handle's dispatch.
    pub count: TokenCount,
    /// A side payload of these rows, on all ranks or on none, whatever the handle's dispatch had.
    pub payload: Option<TokenPayload>,
}

/// Where these rows go: made by [`Placed::new`], and changed field by field. Each row goes to the place that it had in
/// the output of the handle's dispatch. Padding and unused rows are left as they are.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Placed {
    /// Rows, in the layout and with the capacity of the handle's dispatch; 16-byte aligned.
    pub rows: View,
    /// Bytes from one row to the next; a multiple of 16. `None`: rows without gaps.
    pub pitch_bytes: Option<usize>,
    /// Scales of the rows, where the context has them.
    pub scales: Option<View>,
    /// Order of the scales.
    pub scale_order: ScaleOrder,
    /// The words of each row, where the [`NewRows`] have a payload, as [`Output::payload`](super::Output::payload).
    pub payload: Option<View>,
}

impl NewRows {
    /// `count` rows without gaps and without scales.
    pub fn new(x: View, count: TokenCount) -> NewRows {
        NewRows { x, pitch_bytes: None, format: None, hidden: None, quantize: None, scales: None, count, payload: None }
    }

    /// Sets [`x`](#structfield.x).
    pub fn x(self, x: View) -> NewRows {
        NewRows { x, ..self }
    }

    /// Sets [`pitch_bytes`](#structfield.pitch_bytes).
    pub fn pitch_bytes(self, pitch_bytes: impl Into<Option<usize>>) -> NewRows {
        NewRows { pitch_bytes: pitch_bytes.into(), ..self }
    }

    /// Sets [`format`](#structfield.format).
    pub fn format(self, format: impl Into<Option<RowFormat>>) -> NewRows {
        NewRows { format: format.into(), ..self }
    }

    /// Sets [`hidden`](#structfield.hidden).
    pub fn hidden(self, hidden: impl Into<Option<usize>>) -> NewRows {
        NewRows { hidden: hidden.into(), ..self }
    }

    /// Sets [`quantize`](#structfield.quantize).
    pub fn quantize(self, quantize: impl Into<Option<bool>>) -> NewRows {
        NewRows { quantize: quantize.into(), ..self }
    }

    /// Sets [`scales`](#structfield.scales).
    pub fn scales(self, scales: impl Into<Option<ScaleView>>) -> NewRows {
        NewRows { scales: scales.into(), ..self }
    }

    /// Sets [`count`](#structfield.count).
    pub fn count(self, count: TokenCount) -> NewRows {
        NewRows { count, ..self }
    }

    /// Sets [`payload`](#structfield.payload).
    pub fn payload(self, payload: impl Into<Option<TokenPayload>>) -> NewRows {
        NewRows { payload: payload.into(), ..self }
    }

    pub(super) fn views(&self) -> impl Iterator<Item = &View> {
        let scales = self.scales.as_ref().map(|scales| &scales.view);
        let payload = self.payload.as_ref().map(|payload| &payload.view);
        [Some(&self.x), scales, self.count.view(), payload].into_iter().flatten()
    }

    /// The format of the call, by the handle of a dispatch of the format `handle`.
    pub(super) fn call_format(&self, handle: &CallFormat) -> CallFormat {
        handle.with_rows(self.hidden, self.format, self.quantize)
    }

    pub(super) fn check(&self, needs: &mut Needs<'_>) -> Result<raw::ty_tokens> {
        let NewRows { x, pitch_bytes, scales, count, payload, .. } = self;
        let (scales, payload) = (scales.as_ref(), payload.as_ref());
        Source { x, pitch_bytes: *pitch_bytes, scales, count, payload }.check(needs)
    }
}

impl Placed {
    /// Rows without gaps and without scales.
    pub fn new(rows: View) -> Placed {
        Placed { rows, pitch_bytes: None, scales: None, scale_order: ScaleOrder::RowMajor, payload: None }
    }

    /// Sets [`rows`](#structfield.rows).
    pub fn rows(self, rows: View) -> Placed {
        Placed { rows, ..self }
    }

    /// Sets [`pitch_bytes`](#structfield.pitch_bytes).
    pub fn pitch_bytes(self, pitch_bytes: impl Into<Option<usize>>) -> Placed {
        Placed { pitch_bytes: pitch_bytes.into(), ..self }
    }

    /// Sets [`scales`](#structfield.scales).
    pub fn scales(self, scales: impl Into<Option<View>>) -> Placed {
        Placed { scales: scales.into(), ..self }
    }

    /// Sets [`scale_order`](#structfield.scale_order).
    pub fn scale_order(self, scale_order: ScaleOrder) -> Placed {
        Placed { scale_order, ..self }
    }

    /// Sets [`payload`](#structfield.payload).
    pub fn payload(self, payload: impl Into<Option<View>>) -> Placed {
        Placed { payload: payload.into(), ..self }
    }

    pub(super) fn views(&self) -> impl Iterator<Item = &View> {
        [Some(&self.rows), self.scales.as_ref(), self.payload.as_ref()].into_iter().flatten()
    }

    pub(super) fn check(&self, layout: Layout, needs: &mut Needs<'_>) -> Result<raw::ty_output> {
        let Placed { rows, pitch_bytes, scales, scale_order, payload } = self;
        let (scales, payload) = (scales.as_ref(), payload.as_ref());
        Target { layout, rows, pitch_bytes: *pitch_bytes, scales, scale_order: *scale_order, payload }.check(needs)
    }
}
