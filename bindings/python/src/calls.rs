//! Arguments of calls: what Python gives, as the API takes it.

use super::arrays::{Array, Element};
use super::errors;
use super::formats::Format;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::cell::RefCell;
use tokenyard::{
    Device, Dtype, IndexType, Layout, MissingRanks, NewRows, Partial, Payload, Placed, RowFormat, ScaleOrder,
    ScaleView, Scales, Strides, TokenCount, TokenPayload, View, Weights,
};

/// Refuses a word that is none of those known.
pub(super) fn unknown(name: &str, given: &str, known: &[&str]) -> PyErr {
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

/// The dtype of an argument `dtype`, if it is given.
pub(super) fn dtype_of(given: Option<&str>) -> PyResult<Option<Dtype>> {
    given.map(|given| dtype("dtype", given)).transpose()
}

/// What layouts are called.
const LAYOUTS: [&str; 3] = ["contiguous", "masked", "token"];

/// The layout of rows in these places: the dimensions before their columns, of which the masked layout has two.
pub(super) fn layout(given: &str, align: usize, places: &[usize]) -> PyResult<Layout> {
    let length = |place: usize| places.get(place).copied().unwrap_or(0);
    match given {
        "contiguous" => Ok(Layout::Contiguous { align, capacity: length(0) }),
        "masked" => Ok(Layout::Masked { per_expert: length(1) }),
        "token" => Ok(Layout::Token { capacity: length(0) }),
        other => Err(unknown("layout", other, &LAYOUTS)),
    }
}

/// What a layout is called.
pub(super) fn layout_name(layout: Layout) -> &'static str {
    let [contiguous, masked, token] = LAYOUTS;
    match layout {
        Layout::Masked { .. } => masked,
        Layout::Token { .. } => token,
        _ => contiguous,
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

/// A call under way: what its arguments are to fit, and what their memory lasts as long as.
pub(super) struct Call<'a> {
    pub device: &'a Device,
    pub format: &'a Format,
    pub top_k: usize,
    /// Ranks of the world.
    pub ranks: usize,
    /// Ranks of the first generation, which tokens may name.
    pub first_ranks: usize,
    /// Of the arrays that DLPack describes.
    pub capsules: RefCell<Vec<Py<PyAny>>>,
}

impl Call<'_> {
    /// The memory of an array, of which a capsule is kept with the call.
    pub fn view(&self, array: &Array) -> PyResult<View> {
        let view = array.view(self.device)?;
        if let Some(capsule) = &array.capsule {
            let capsule = Python::attach(|py| capsule.clone_ref(py).into_any());
            self.capsules.borrow_mut().push(capsule);
        }
        Ok(view)
    }
}

/// Rows of the call's format and everything else that a dispatch reads.
pub(super) struct Given {
    pub x: Array,
    pub topk_idx: Array,
    pub topk_weights: Option<Array>,
    pub scales: Option<Array>,
    /// int32 `[1]`, on the device.
    pub count: Option<Array>,
    /// fp32 `[tokens, words]`.
    pub payload: Option<Array>,
}

impl Given {
    /// Arguments of a call.
    pub fn of(
        x: &Bound<'_, PyAny>,
        topk_idx: &Bound<'_, PyAny>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        scales: Option<&Bound<'_, PyAny>>,
        count: Option<&Bound<'_, PyAny>>,
        payload: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Given> {
        Ok(Given {
            x: Array::of("x", x, false)?,
            topk_idx: Array::of("topk_idx", topk_idx, false)?,
            topk_weights: read("topk_weights", topk_weights)?,
            scales: read("scales", scales)?,
            count: read("count", count)?,
            payload: read("payload", payload)?,
        })
    }
}

/// An argument that is read, if it is given.
pub(super) fn read(name: &'static str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Array>> {
    value.map(|value| Array::of(name, value, false)).transpose()
}

/// Refuses what are no rows of tokens.
fn must_be_tokens(x: &Array, format: &Format) -> PyResult<()> {
    x.must_have(2)?;
    x.must_be_rows_of(format.input())?;
    x.must_have_columns(format.inner.hidden)
}

/// Types of arrays of scales.
const SCALES: [Element; 3] = [Element::Fp32, Element::I32, Element::U32];

fn scale_order(column_major: bool) -> ScaleOrder {
    if column_major { ScaleOrder::ColumnMajor } else { ScaleOrder::RowMajor }
}

/// The number of tokens that an array on the device holds, or the number of rows.
fn token_count(call: &Call<'_>, count: Option<&Array>, rows: usize) -> PyResult<TokenCount> {
    let Some(count) = count else { return Ok(TokenCount::Host(rows)) };
    count.must_be_shaped(&[1])?;
    count.must_hold(&[Element::I32])?;
    Ok(TokenCount::Device(call.view(count)?))
}

/// Scales of so many tokens.
fn scale_view(call: &Call<'_>, scales: &Array, tokens: usize) -> PyResult<ScaleView> {
    scales.must_hold(&SCALES)?;
    // Without scales in the format the call refuses them.
    let words = call.format.scale_words().or(scales.shape().last().copied()).unwrap_or(0);
    scales.must_be_shaped(&[tokens, words])?;
    let (token_bytes, word_bytes) = scales.strides();
    Ok(ScaleView::new(call.view(scales)?, token_bytes, word_bytes))
}

/// Words of each of so many tokens.
fn token_payload(call: &Call<'_>, payload: &Array, tokens: usize) -> PyResult<TokenPayload> {
    payload.must_hold(&[Element::Fp32])?;
    payload.must_be_contiguous()?;
    payload.must_have(2)?;
    let words = payload.columns();
    payload.must_be_shaped(&[tokens, words])?;
    Ok(TokenPayload { view: call.view(payload)?, words })
}

/// New rows of a dispatch by an earlier handle.
pub(super) fn new_rows(
    call: &Call<'_>,
    x: &Bound<'_, PyAny>,
    scales: Option<&Bound<'_, PyAny>>,
    count: Option<&Bound<'_, PyAny>>,
    payload: Option<&Bound<'_, PyAny>>,
) -> PyResult<NewRows> {
    let format = call.format;
    let x = Array::of("x", x, false)?;
    must_be_tokens(&x, format)?;
    let count = token_count(call, read("count", count)?.as_ref(), x.len())?;
    let to = NewRows::new(call.view(&x)?, count).pitch_bytes(x.pitch()?);
    let to = to.format(format.inner.rows).hidden(format.inner.hidden).quantize(format.inner.quantize);
    let scales = read("scales", scales)?.map(|scales| scale_view(call, &scales, x.len())).transpose()?;
    let payload = read("payload", payload)?.map(|payload| token_payload(call, &payload, x.len())).transpose()?;
    Ok(to.scales(scales).payload(payload))
}

/// Where they go: to these places, with so many words of a payload.
pub(super) fn placed(
    call: &Call<'_>,
    rows: &Bound<'_, PyAny>,
    scales: Option<&Bound<'_, PyAny>>,
    column_major: bool,
    payload: Option<&Bound<'_, PyAny>>,
    places: &[usize],
    words: usize,
) -> PyResult<Placed> {
    let rows = Array::of("rows", rows, true)?;
    rows.must_be_rows_of(call.format.inner.rows.dtype())?;
    must_lie(&rows, places, call.format)?;
    rows.must_be_contiguous()?;
    let mut to = Placed::new(call.view(&rows)?);
    if let Some(scales) = scales {
        let scales = Array::whole("row_scales", scales, &SCALES, true)?;
        must_be_scales(&scales, places, column_major, call.format)?;
        to = to.scales(call.view(&scales)?).scale_order(scale_order(column_major));
    }
    if let Some(payload) = payload {
        let payload = Array::whole("row_payload", payload, &[Element::Fp32], true)?;
        payload.must_be_beside(rows.places(), if words > 0 { words } else { payload.columns() })?;
        to = to.payload(call.view(&payload)?);
    }
    Ok(to)
}

/// Refuses rows that are not of the format, or whose experts are not as far apart as in the dispatch's output.
pub(super) fn must_lie(rows: &Array, places: &[usize], format: &Format) -> PyResult<()> {
    rows.must_have_columns(format.inner.hidden)?;
    if rows.shape().len() == 2 {
        return Ok(());
    }
    rows.must_be_in(places, format.inner.hidden)
}

/// Refuses scales that are not in the shape of those of rows in these places.
fn must_be_scales(scales: &Array, places: &[usize], column_major: bool, format: &Format) -> PyResult<()> {
    match (format.scale_words(), places.split_last()) {
        (Some(words), Some((last, experts))) if column_major => {
            let leading = last.checked_next_multiple_of(4).unwrap_or(usize::MAX);
            scales.must_be_shaped(&[experts, &[words, leading]].concat())
        }
        (Some(words), _) => scales.must_be_beside(places, words),
        // The call refuses them.
        (None, _) => Ok(()),
    }
}

/// A side payload of combine beside rows in these places, and where it goes.
pub(super) fn payload(
    call: &Call<'_>,
    given: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    places: &[usize],
) -> PyResult<(Payload, View)> {
    let given = Array::whole("payload", given, &[Element::Fp32], false)?;
    let out = Array::whole("payload_out", out, &[Element::Fp32], true)?;
    let words = given.columns();
    given.must_be_beside(places, words)?;
    let gathered = out.shape().len() == 3;
    let wanted = if gathered { vec![out.len(), call.top_k, words] } else { vec![out.len(), words] };
    out.must_be_shaped(&wanted)?;
    Ok((Payload { view: call.view(&given)?, words, gathered }, call.view(&out)?))
}

/// The tokens of a call, and for how many arrays have room. Their shapes are compared here, the rest by the call.
pub(super) fn tokens(call: &Call<'_>, given: &Given) -> PyResult<(tokenyard::Tokens, usize)> {
    let (format, x, ids) = (call.format, &given.x, &given.topk_idx);
    must_be_tokens(x, format)?;
    ids.must_have(2)?;
    ids.must_hold(&[Element::I32, Element::I64, Element::Bool])?;
    let tokens = x.len();
    let choices = if ids.element == Element::Bool { call.first_ranks } else { ids.columns() };
    ids.must_be_shaped(&[tokens, choices])?;
    let count = token_count(call, given.count.as_ref(), tokens)?;
    let strides_of = |array: &Array| {
        let (token_bytes, choice_bytes) = array.strides();
        Strides { token_bytes, choice_bytes }
    };
    let (kind, top_k) = match ids.element {
        Element::I64 => (IndexType::I64, Some(choices)),
        Element::I32 => (IndexType::I32, Some(choices)),
        _ => (IndexType::Ranks, None),
    };
    let mut to = tokenyard::Tokens::new(call.view(x)?, call.view(ids)?, count).index_type(kind).top_k(top_k);
    to = to.of(&format.inner).pitch_bytes(x.pitch()?);
    if tokens > 0 {
        to = to.topk_idx_strides(strides_of(ids));
    }
    if let Some(weights) = &given.topk_weights {
        weights.must_be_shaped(&[tokens, choices])?;
        weights.must_hold(&[Element::Fp32])?;
        to = to.topk_weight(call.view(weights)?);
        if tokens > 0 {
            to = to.topk_weight_strides(strides_of(weights));
        }
    }
    if let Some(scales) = &given.scales {
        to = to.scales(scale_view(call, scales, tokens)?);
    }
    let payload = given.payload.as_ref().map(|payload| token_payload(call, payload, tokens)).transpose()?;
    Ok((to.payload(payload), tokens))
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
/// `drop_overflow`: rows without room are left out, in place of an error; `row_count` is then of all rows that came.
/// Not in the token layout; the capacity is a multiple of `align`.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct Output {
    layout: Layout,
    rows: Array,
    counts: Array,
    scales: Option<Array>,
    column_major: bool,
    zero_padding: bool,
    drop_overflow: bool,
    others: Vec<(&'static str, Array)>,
}

#[pymethods]
impl Output {
    #[new]
    #[pyo3(signature = (
        layout, rows, counts, *, align=1, scales=None, column_major=false, zero_padding=false, offsets=None,
        row_expert=None, source=None, token_experts=None, token_weights=None, row_count=None, payload=None,
        source_ranges=None, total_counts=None, wait_times=None, drop_overflow=false,
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
        drop_overflow: bool,
    ) -> PyResult<Output> {
        let array = |name, value: &Bound<'_, PyAny>| Array::of(name, value, true);
        let (rows, counts) = (array("rows", rows)?, array("counts", counts)?);
        let scales = scales.map(|scales| array("scales", scales)).transpose()?;
        let given = [
            ("offsets", offsets),
            ("row_expert", row_expert),
            ("source", source),
            ("row_count", row_count),
            ("token_experts", token_experts),
            ("token_weights", token_weights),
            ("source_ranges", source_ranges),
            ("total_counts", total_counts),
            ("wait_times", wait_times),
            ("payload", payload),
        ];
        let others = given.into_iter().filter_map(|(name, value)| value.map(|value| Ok((name, array(name, value)?))));
        let output = Output::of_arrays(layout, align, rows, counts, scales, others.collect::<PyResult<_>>()?)?;
        Output { column_major, zero_padding, ..output }.dropping(drop_overflow)
    }
}

impl Output {
    /// Where rows lie: the dimensions before their columns.
    pub fn places(&self) -> &[usize] {
        self.rows.places()
    }

    /// An output of a caller's arrays, of whose shapes it refuses those that do not fit each other.
    pub fn of_arrays(
        layout: &str,
        align: usize,
        rows: Array,
        counts: Array,
        scales: Option<Array>,
        others: Vec<(&'static str, Array)>,
    ) -> PyResult<Output> {
        let layout = self::layout(layout, align, rows.places())?;
        let dimensions = if matches!(layout, Layout::Masked { .. }) { 3 } else { 2 };
        rows.must_have(dimensions)?;
        let all = rows.shape().iter().take(dimensions - 1).fold(1, |all: usize, length| all.saturating_mul(*length));
        counts.must_be_whole(&[Element::I32])?;
        counts.must_have(1)?;
        let experts = counts.len();
        if dimensions == 3 && rows.len() != experts {
            rows.must_be_shaped(&[experts, rows.shape()[1], rows.shape()[2]])?;
        }
        if let Some(scales) = &scales {
            scales.must_be_whole(&SCALES)?;
        }
        for (name, array) in &others {
            // None: as long as the caller likes, which the call compares with what it needs.
            let (shape, element): (&[Option<usize>], Element) = match *name {
                "offsets" => (&[Some(experts + 1)], Element::I32),
                "row_expert" => (&[Some(all)], Element::I32),
                "source" => (&[Some(all), Some(2)], Element::I32),
                "row_count" => (&[Some(1)], Element::I32),
                "token_experts" => (&[Some(all), None], Element::I32),
                "token_weights" => (&[Some(all), None], Element::Fp32),
                "source_ranges" => (&[Some(experts), None], Element::I64),
                "total_counts" => (&[Some(experts)], Element::I32),
                "wait_times" => (&[None], Element::I64),
                _ => {
                    array.must_be_whole(&[Element::Fp32])?;
                    array.must_be_beside(rows.places(), array.columns())?;
                    continue;
                }
            };
            array.must_be_whole(&[element])?;
            array.must_have(shape.len())?;
            if shape.iter().zip(array.shape()).any(|(wanted, found)| wanted.is_some_and(|wanted| wanted != *found)) {
                let wanted = shape.iter().zip(array.shape()).map(|(wanted, found)| wanted.unwrap_or(*found));
                array.must_be_shaped(&wanted.collect::<Vec<_>>())?;
            }
        }
        let (column_major, zero_padding, drop_overflow) = (false, false, false);
        Ok(Output { layout, rows, counts, scales, column_major, zero_padding, drop_overflow, others })
    }

    /// An output of arrays that an operator made.
    pub fn made(
        layout: Layout,
        rows: Array,
        counts: Array,
        scales: Option<Array>,
        column_major: bool,
        others: Vec<(&'static str, Array)>,
    ) -> Output {
        Output { layout, rows, counts, scales, column_major, zero_padding: false, drop_overflow: false, others }
    }

    /// The same, of which rows without room are left out if `drop_overflow`. Refuses layouts and capacities of which
    /// none are.
    pub fn dropping(self, drop_overflow: bool) -> PyResult<Output> {
        if drop_overflow {
            self.layout.check_drops().map_err(|refused| PyValueError::new_err(refused.to_string()))?;
        }
        Ok(Output { drop_overflow, ..self })
    }

    /// As the API takes it, for a call whose tokens have so many words of a payload.
    pub fn of(&self, py: Python<'_>, call: &Call<'_>, words: usize) -> PyResult<tokenyard::Output> {
        let scales = self.scales.as_ref().map(|scales| scales.renewed(py)).transpose()?;
        let others = self.others.iter().map(|(name, array)| Ok((*name, array.renewed(py)?)));
        Output {
            layout: self.layout,
            rows: self.rows.renewed(py)?,
            counts: self.counts.renewed(py)?,
            scales,
            others: others.collect::<PyResult<_>>()?,
            ..*self
        }
        .given(call, words)
    }

    /// The same, of arrays that are as they were when it was made.
    pub fn given(&self, call: &Call<'_>, words: usize) -> PyResult<tokenyard::Output> {
        let (format, rows) = (call.format, &self.rows);
        rows.must_be_rows_of(format.inner.rows.dtype())?;
        rows.must_have_columns(format.inner.hidden)?;
        let mut to = tokenyard::Output::new(self.layout, call.view(rows)?, call.view(&self.counts)?);
        if matches!(self.layout, Layout::Masked { .. }) {
            rows.must_be_contiguous()?;
        } else {
            to = to.pitch_bytes(rows.pitch()?);
        }
        if let Some(scales) = &self.scales {
            must_be_scales(scales, rows.places(), self.column_major, format)?;
            to = to.scales(call.view(scales)?).scale_order(scale_order(self.column_major));
        }
        to = to.zero_padding(self.zero_padding).drop_overflow(self.drop_overflow);
        for (name, array) in &self.others {
            match *name {
                "token_experts" | "token_weights" => array.must_have_columns(call.top_k)?,
                "source_ranges" => array.must_have_columns(call.ranks)?,
                "payload" if words > 0 => array.must_have_columns(words)?,
                _ => {}
            }
            let view = call.view(array)?;
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
