//! Arguments of calls: what Python gives, as the API takes it.

use super::arrays::{Array, Element};
use super::errors;
use super::formats::Format;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokenyard::{
    Device, Dtype, IndexType, Layout, MissingRanks, NewRows, Partial, Payload, Placed, RowFormat, ScaleOrder,
    ScaleView, Scales, Strides, TokenCount, TokenPayload, View, Weights,
};

/// Refuses a word that is none of those known.
fn unknown(name: &str, given: &str, known: &[&str]) -> PyErr {
    PyValueError::new_err(format!("{name} is {given:?}: give one of {}", known.join(", ")))
}

/// A dtype of rows or sums.
pub(super) fn dtype(name: &str, given: &str) -> PyResult<Dtype> {
    match given {
        "bf16" => Ok(Dtype::Bf16),
        "fp16" => Ok(Dtype::Fp16),
        "fp32" => Ok(Dtype::Fp32),
        "fp8" => Ok(Dtype::Fp8E4m3),
        _ => Err(unknown(name, given, &["bf16", "fp16", "fp32", "fp8"])),
    }
}

/// The format of rows.
pub(super) fn row_format(py: Python<'_>, elements: &str, scales: Option<&str>) -> PyResult<RowFormat> {
    let scales = match scales {
        None => Scales::None,
        Some("fp32") => Scales::F32,
        Some("ue8m0") => Scales::Ue8m0,
        Some(other) => return Err(unknown("scales", other, &["fp32", "ue8m0"])),
    };
    RowFormat::new(dtype("dtype", elements)?, scales).map_err(|error| errors::raised(py, &error))
}

/// Where weights come from.
pub(super) fn weights(given: &str) -> PyResult<Weights> {
    match given {
        "dispatch" => Ok(Weights::Dispatch),
        "combine" => Ok(Weights::Combine),
        "none" => Ok(Weights::None),
        _ => Err(unknown("weights", given, &["dispatch", "combine", "none"])),
    }
}

/// What calls do about missing ranks.
pub(super) fn missing_ranks(given: &str) -> PyResult<MissingRanks> {
    match given {
        "fatal" => Ok(MissingRanks::Fatal),
        "masked" => Ok(MissingRanks::Masked),
        "masked_at_deadline" => Ok(MissingRanks::MaskedAtDeadline),
        _ => Err(unknown("missing_ranks", given, &["fatal", "masked", "masked_at_deadline"])),
    }
}

/// The format of partial rows.
pub(super) fn partial(given: &str) -> PyResult<Partial> {
    match given {
        "same" => Ok(Partial::Same),
        "fp32" => Ok(Partial::Fp32),
        "fp8" => Ok(Partial::Fp8),
        _ => Err(unknown("partial", given, &["same", "fp32", "fp8"])),
    }
}

/// Rows of the call's format and everything else that a dispatch reads.
pub(super) struct Given<'a, 'py> {
    pub x: &'a Bound<'py, PyAny>,
    pub topk_idx: &'a Bound<'py, PyAny>,
    pub topk_weights: Option<&'a Bound<'py, PyAny>>,
    pub scales: Option<&'a Bound<'py, PyAny>>,
    /// int32 `[1]`, on the device.
    pub count: Option<&'a Bound<'py, PyAny>>,
    /// fp32 `[tokens, words]`.
    pub payload: Option<&'a Bound<'py, PyAny>>,
}

/// Rows of tokens.
fn rows_of(x: &Bound<'_, PyAny>, dtype: Dtype) -> PyResult<Array> {
    let x = Array::of("x", x, false)?;
    x.must_have(2)?;
    x.must_be_rows_of(dtype)?;
    Ok(x)
}

/// Types of arrays of scales.
const SCALES: [Element; 3] = [Element::Fp32, Element::I32, Element::U32];

fn scale_order(column_major: bool) -> ScaleOrder {
    if column_major { ScaleOrder::ColumnMajor } else { ScaleOrder::RowMajor }
}

/// The number of tokens that an array on the device holds, or the number of rows.
fn token_count(device: &Device, count: Option<&Bound<'_, PyAny>>, rows: usize) -> PyResult<TokenCount> {
    let Some(count) = count else { return Ok(TokenCount::Host(rows)) };
    let count = Array::of("count", count, false)?;
    count.must_be_shaped(&[1])?;
    count.must_hold(&[Element::I32])?;
    Ok(TokenCount::Device(count.view(device)?))
}

/// Scales of tokens.
fn scale_view(device: &Device, scales: &Bound<'_, PyAny>) -> PyResult<ScaleView> {
    let scales = Array::of("scales", scales, false)?;
    scales.must_have(2)?;
    scales.must_hold(&SCALES)?;
    let (token_bytes, word_bytes) = scales.strides();
    Ok(ScaleView::new(scales.view(device)?, token_bytes, word_bytes))
}

/// Words of each of so many tokens.
fn token_payload(device: &Device, payload: &Bound<'_, PyAny>, tokens: usize) -> PyResult<TokenPayload> {
    let payload = Array::whole("payload", payload, &[Element::Fp32], false)?;
    payload.must_have(2)?;
    let words = payload.shape().last().copied().unwrap_or(0);
    payload.must_be_shaped(&[tokens, words])?;
    Ok(TokenPayload { view: payload.view(device)?, words })
}

/// New rows of a dispatch by an earlier handle, of this format.
pub(super) fn new_rows(
    device: &Device,
    x: &Bound<'_, PyAny>,
    scales: Option<&Bound<'_, PyAny>>,
    count: Option<&Bound<'_, PyAny>>,
    payload: Option<&Bound<'_, PyAny>>,
    format: &Format,
) -> PyResult<NewRows> {
    let x = rows_of(x, format.input())?;
    let to = NewRows::new(x.view(device)?, token_count(device, count, x.len())?).pitch_bytes(x.pitch()?);
    let to = to.format(format.inner.rows).hidden(format.inner.hidden).quantize(format.inner.quantize);
    let scales = scales.map(|scales| scale_view(device, scales)).transpose()?;
    let payload = payload.map(|payload| token_payload(device, payload, x.len())).transpose()?;
    Ok(to.scales(scales).payload(payload))
}

/// Where they go. `dtype`: of the rows.
pub(super) fn placed(
    device: &Device,
    rows: &Bound<'_, PyAny>,
    scales: Option<&Bound<'_, PyAny>>,
    column_major: bool,
    payload: Option<&Bound<'_, PyAny>>,
    dtype: Dtype,
) -> PyResult<Placed> {
    let rows = Array::of("rows", rows, true)?;
    rows.must_be_rows_of(dtype)?;
    rows.must_be_contiguous()?;
    let mut to = Placed::new(rows.view(device)?);
    if let Some(scales) = scales {
        let scales = Array::whole("row_scales", scales, &SCALES, true)?;
        to = to.scales(scales.view(device)?).scale_order(scale_order(column_major));
    }
    if let Some(payload) = payload {
        to = to.payload(Array::whole("row_payload", payload, &[Element::Fp32], true)?.view(device)?);
    }
    Ok(to)
}

/// A side payload of combine, and where it goes.
pub(super) fn payload(device: &Device, given: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>) -> PyResult<(Payload, View)> {
    let given = Array::whole("payload", given, &[Element::Fp32], false)?;
    let out = Array::whole("payload_out", out, &[Element::Fp32], true)?;
    let words = given.shape().last().copied().unwrap_or(0);
    let gathered = out.shape().len() == 3;
    if out.shape().last() != Some(&words) || out.shape().len() < 2 {
        out.must_be_shaped(&[out.len(), words])?;
    }
    Ok((Payload { view: given.view(device)?, words, gathered }, out.view(device)?))
}

/// The tokens of a call of this format. The lengths of arrays are compared here, the rest by the call.
pub(super) fn tokens(device: &Device, given: &Given<'_, '_>, format: &Format) -> PyResult<tokenyard::Tokens> {
    let x = rows_of(given.x, format.input())?;
    let ids = Array::of("topk_idx", given.topk_idx, false)?;
    ids.must_have(2)?;
    ids.must_hold(&[Element::I32, Element::I64, Element::Bool])?;
    let (tokens, choices) = (x.len(), ids.shape().get(1).copied().unwrap_or(0));
    ids.must_be_shaped(&[tokens, choices])?;
    let count = token_count(device, given.count, tokens)?;
    let strides_of = |array: &Array| {
        let (token_bytes, choice_bytes) = array.strides();
        Strides { token_bytes, choice_bytes }
    };
    let (kind, top_k) = match ids.element {
        Element::I64 => (IndexType::I64, Some(choices)),
        Element::I32 => (IndexType::I32, Some(choices)),
        _ => (IndexType::Ranks, None),
    };
    let mut to = tokenyard::Tokens::new(x.view(device)?, ids.view(device)?, count).index_type(kind).top_k(top_k);
    to = to.of(&format.inner).pitch_bytes(x.pitch()?);
    if tokens > 0 {
        to = to.topk_idx_strides(strides_of(&ids));
    }
    if let Some(weights) = given.topk_weights {
        let weights = Array::of("topk_weights", weights, false)?;
        weights.must_be_shaped(&[tokens, choices])?;
        weights.must_hold(&[Element::Fp32])?;
        to = to.topk_weight(weights.view(device)?);
        if tokens > 0 {
            to = to.topk_weight_strides(strides_of(&weights));
        }
    }
    if let Some(scales) = given.scales {
        to = to.scales(scale_view(device, scales)?);
    }
    let payload = given.payload.map(|payload| token_payload(device, payload, tokens)).transpose()?;
    Ok(to.payload(payload))
}

/// Where a dispatch writes: arrays that the caller owns. Made once, it may serve many calls.
///
/// `layout` is "contiguous" (`rows` `[capacity, hidden]`, each expert's first row at a multiple of `align`), "masked"
/// (`rows` `[local experts, per expert, hidden]`) or "token" (`rows` `[capacity, hidden]`, a row a source token). The
/// other arrays are as in the library's `Output`: `counts` int32 `[local experts]`; optional ones `offsets` int32
/// `[local experts + 1]`, `row_expert` int32 `[rows]`, `source` int32 `[rows, 2]`, `token_experts` int32 and
/// `token_weights` fp32 `[rows, top_k]`, `row_count` int32 `[1]`, `scales` of 4-byte words `[rows, words]`, or with
/// `column_major` `[words, rows rounded up to 4]`, `payload` fp32 `[rows, words]`, `source_ranges` int64
/// `[local experts, ranks]`, and, added to, `total_counts` int32 `[local experts]` and `wait_times` int64 `[ranks]`.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct Output {
    layout: Layout,
    rows: Array,
    counts: Array,
    scales: Option<Array>,
    column_major: bool,
    zero_padding: bool,
    others: Vec<(&'static str, Array)>,
}

#[pymethods]
impl Output {
    #[new]
    #[pyo3(signature = (
        layout, rows, counts, *, align=1, scales=None, column_major=false, zero_padding=false, offsets=None,
        row_expert=None, source=None, token_experts=None, token_weights=None, row_count=None, payload=None,
        source_ranges=None, total_counts=None, wait_times=None,
    ))]
    // The parameters are Python's keywords.
    #[allow(clippy::too_many_arguments)]
    fn new(
        layout: &str,
        rows: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
        align: usize,
        scales: Option<&Bound<'_, PyAny>>,
        column_major: bool,
        zero_padding: bool,
        offsets: Option<&Bound<'_, PyAny>>,
        row_expert: Option<&Bound<'_, PyAny>>,
        source: Option<&Bound<'_, PyAny>>,
        token_experts: Option<&Bound<'_, PyAny>>,
        token_weights: Option<&Bound<'_, PyAny>>,
        row_count: Option<&Bound<'_, PyAny>>,
        payload: Option<&Bound<'_, PyAny>>,
        source_ranges: Option<&Bound<'_, PyAny>>,
        total_counts: Option<&Bound<'_, PyAny>>,
        wait_times: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Output> {
        let rows = Array::of("rows", rows, true)?;
        let (layout, dimensions) = match layout {
            "contiguous" => (Layout::Contiguous { align, capacity: rows.len() }, 2),
            "masked" => (Layout::Masked { per_expert: rows.shape().get(1).copied().unwrap_or(0) }, 3),
            "token" => (Layout::Token { capacity: rows.len() }, 2),
            other => return Err(unknown("layout", other, &["contiguous", "masked", "token"])),
        };
        rows.must_have(dimensions)?;
        let all = rows.shape().iter().take(dimensions - 1).fold(1, |all: usize, length| all.saturating_mul(*length));
        let counts = Array::whole("counts", counts, &[Element::I32], true)?;
        counts.must_have(1)?;
        let experts = counts.len();
        if dimensions == 3 && rows.len() != experts {
            rows.must_be_shaped(&[experts, rows.shape()[1], rows.shape()[2]])?;
        }
        let scales = scales.map(|scales| Array::whole("scales", scales, &SCALES, true)).transpose()?;
        let mut others = Vec::new();
        // None: as long as the caller likes, which the call compares with what it needs.
        let given = [
            ("offsets", offsets, vec![Some(experts + 1)], Element::I32),
            ("row_expert", row_expert, vec![Some(all)], Element::I32),
            ("source", source, vec![Some(all), Some(2)], Element::I32),
            ("row_count", row_count, vec![Some(1)], Element::I32),
            ("token_experts", token_experts, vec![Some(all), None], Element::I32),
            ("token_weights", token_weights, vec![Some(all), None], Element::Fp32),
            ("source_ranges", source_ranges, vec![Some(experts), None], Element::I64),
            ("total_counts", total_counts, vec![Some(experts)], Element::I32),
            ("wait_times", wait_times, vec![None], Element::I64),
        ];
        for (name, value, shape, element) in given {
            let Some(value) = value else { continue };
            let array = Array::whole(name, value, &[element], true)?;
            array.must_have(shape.len())?;
            let wanted = shape.iter().zip(array.shape()).map(|(wanted, found)| wanted.unwrap_or(*found));
            array.must_be_shaped(&wanted.collect::<Vec<_>>())?;
            others.push((name, array));
        }
        if let Some(payload) = payload {
            let array = Array::whole("payload", payload, &[Element::Fp32], true)?;
            // Of the rows' shape, or row after row.
            let words = array.shape().last().copied().unwrap_or(0);
            let of_rows = rows.shape().iter().take(dimensions - 1).copied().chain([words]);
            if array.shape() != [all, words] {
                array.must_be_shaped(&of_rows.collect::<Vec<_>>())?;
            }
            others.push(("payload", array));
        }
        Ok(Output { layout, rows, counts, scales, column_major, zero_padding, others })
    }
}

impl Output {
    /// As the API takes it, for a call of this format.
    pub fn of(&self, py: Python<'_>, device: &Device, format: &Format) -> PyResult<tokenyard::Output> {
        let (rows, counts) = (self.rows.renewed(py)?, self.counts.renewed(py)?);
        rows.must_be_rows_of(format.inner.rows.dtype())?;
        let mut shape = rows.shape().to_vec();
        if let Some(columns) = shape.last_mut() {
            *columns = format.inner.hidden;
        }
        rows.must_be_shaped(&shape)?;
        let mut to = tokenyard::Output::new(self.layout, rows.view(device)?, counts.view(device)?);
        if matches!(self.layout, Layout::Masked { .. }) {
            rows.must_be_contiguous()?;
        } else {
            to = to.pitch_bytes(rows.pitch()?);
        }
        if let Some(scales) = &self.scales {
            let scales = scales.renewed(py)?;
            to = to.scales(scales.view(device)?).scale_order(scale_order(self.column_major));
        }
        to = to.zero_padding(self.zero_padding);
        for (name, array) in &self.others {
            let view = array.renewed(py)?.view(device)?;
            to = match *name {
                "offsets" => to.expert_offset(view),
                "row_expert" => to.row_expert(view),
                "source" => to.source(view),
                "row_count" => to.row_count(view),
                "token_experts" => to.token_experts(view),
                "token_weights" => to.token_weights(view),
                "payload" => to.payload(view),
                "source_ranges" => to.source_ranges(view),
                "total_counts" => to.total_counts(view),
                _ => to.wait_times(view),
            };
        }
        Ok(to)
    }
}
