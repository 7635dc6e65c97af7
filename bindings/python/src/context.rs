//! Contexts and their calls.

use super::arrays::{Array, Dimensions, Element, Place};
use super::calls::{self, Call, Given, Output};
use super::detached::{Closable, Detached};
use super::errors;
use super::exclusive::{Exclusive, Held};
use super::formats::Format;
use super::lock::with_lock;
use super::nested::Waits;
use super::numbers::{maybe, number, numbers};
use super::operators::{Number, Slots};
use super::proxies::Proxy;
use super::worlds::World;
use pyo3::exceptions::{PyAttributeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use pyo3::{PyClass, PyClassInitializer};
use std::any::Any;
use std::cell::RefCell;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokenyard::{Combined, Device, DeviceKind, Dtype, MissingRanks, Rank, Rows, Stream, TokenPayload, View};

/// Dispatch and combine over one world: `tokenyard.AllToAll` has one and makes outputs for it.
///
/// On the CPU device calls return once their work is done, and raise what the call's `check` finds. On a GPU they
/// enqueue work on `stream`, an address of a `cudaStream_t`, and return; `check` raises what calls found since.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct Context {
    core: Arc<Core>,
}

/// Halves that are a call of one thread together, as a context manager: others' calls of this kind wait for its end,
/// and on the CPU device all others' calls.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct OneCall {
    core: Arc<Core>,
    /// Whether the thread held it before, while this holds it.
    nested: Mutex<Option<bool>>,
}

#[pymethods]
impl OneCall {
    fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        self.core.ep.must_be_of_this_process()?;
        let nested = self.core.call.begin(py)?;
        *self.nested.lock().unwrap_or_else(PoisonError::into_inner) = Some(nested);
        Ok(())
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyAny>) {
        if let Some(nested) = self.nested.lock().unwrap_or_else(PoisonError::into_inner).take() {
            self.core.call.end(nested);
        }
    }
}

/// What a context is, which handles of torch's operators keep, too.
pub(super) struct Core {
    pub ep: Closable<Inside>,
    on_cpu: bool,
    /// The GPU's number.
    ordinal: Option<usize>,
    /// Held from a call to the end of its wait, so that a thread gets the errors of its own calls.
    call: Exclusive,
    /// What calls use whose wait ended before they did.
    in_use: Mutex<Vec<Box<dyn Any + Send>>>,
    /// Calls of the thread that holds `call`.
    waits: Waits,
    /// Longer than any call takes.
    patience: Duration,
    top_k: usize,
    ranks: usize,
    first_ranks: usize,
    rounds: usize,
    /// Of calls that do not state one.
    format: Format,
    local_experts: Vec<u32>,
    /// For handles on a GPU.
    pub slots: Option<&'static Slots>,
}

/// What goes when a context is closed.
pub(super) struct Inside {
    ep: tokenyard::AllToAll,
    pub device: Device,
    /// Of the CPU device; a GPU's calls go to the caller's.
    stream: Stream,
}

impl Deref for Context {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Deref for Inside {
    type Target = tokenyard::AllToAll;

    fn deref(&self) -> &tokenyard::AllToAll {
        &self.ep
    }
}

/// A received dispatch: what combine needs to return the rows. It may be combined several times, or never.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct Handle {
    parts: Arc<Parts>,
    /// By which operators of torch find it.
    number: Option<Number>,
}

/// What a handle is, which tensors of torch's operators keep, too.
pub(super) struct Parts {
    pub inner: tokenyard::Handle,
    pub tokens: usize,
    pub format: Format,
    /// Where the dispatch's rows lie: the dimensions before their columns.
    pub places: Dimensions,
}

impl Handle {
    pub fn new(parts: Arc<Parts>) -> Handle {
        Handle { parts, number: None }
    }

    /// One that operators of torch find by its number.
    pub fn numbered(parts: Arc<Parts>, number: Number) -> Handle {
        Handle { parts, number: Some(number) }
    }
}

impl Deref for Handle {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

/// The ranks that a context's calls go on without: int32 `[ranks]` on its device, as an array interface.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct RankMask {
    /// Keeps the memory.
    view: View,
    ranks: usize,
    on_cpu: bool,
}

/// A sent dispatch that is to be received.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct Sent {
    inner: Mutex<Option<tokenyard::Sent>>,
    tokens: usize,
    /// Of each token's payload.
    words: usize,
    format: Format,
    /// Calls in several rounds read them in the second half, too.
    _arrays: Vec<Py<PyAny>>,
}

/// A sent combine that is to be received.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct CombineSent {
    inner: Mutex<Option<tokenyard::CombineSent>>,
    format: Format,
    #[pyo3(get)]
    tokens: usize,
    /// As of a dispatch.
    _arrays: Vec<Py<PyAny>>,
}

/// The device of a name: "cpu", "cuda" (the GPU of the local rank) or "cuda:N".
fn device_of(py: Python<'_>, name: &str, local_rank: usize) -> PyResult<Device> {
    let device = match name.split_once(':') {
        None if name == "cpu" => Device::cpu(),
        None if name == "cuda" => Device::cuda(local_rank),
        Some(("cuda", ordinal)) => match ordinal.parse() {
            Ok(ordinal) => Device::cuda(ordinal),
            Err(_) => return Err(PyValueError::new_err(format!("device is {name:?}: give cpu, cuda or cuda:N"))),
        },
        _ => return Err(PyValueError::new_err(format!("device is {name:?}: give cpu, cuda or cuda:N"))),
    };
    device.map_err(|error| errors::raised(py, &error))
}

/// A time that Python gives in seconds.
pub(super) fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    // Above: no deadline that anybody means, and more than some waits can count.
    let meant = (0.0..=1e9).contains(&seconds).then(|| Duration::from_secs_f64(seconds));
    meant.ok_or_else(|| PyValueError::new_err(format!("{name} is {seconds:e}: give seconds from 0 to 1e9")))
}

#[pymethods]
impl Context {
    #[new]
    #[pyo3(signature = (
        world, format, *, experts, top_k, payload_words, dispatch_payload_words, device="cuda", room_for=None,
        timeout=30.0, sms=None, placement=None, duplicates=false, missing_ranks="fatal", partial="same",
        round_tokens=None, handles=None, handle_rows=None, proxy=None,
    ))]
    // The parameters are Python's keywords.
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        world: &World,
        format: PyRef<'_, Format>,
        experts: &Bound<'_, PyAny>,
        top_k: &Bound<'_, PyAny>,
        payload_words: &Bound<'_, PyAny>,
        dispatch_payload_words: &Bound<'_, PyAny>,
        device: &str,
        room_for: Option<Vec<PyRef<'_, Format>>>,
        timeout: f64,
        sms: Option<Bound<'_, PyAny>>,
        placement: Option<Vec<Bound<'_, PyAny>>>,
        duplicates: bool,
        missing_ranks: &str,
        partial: &str,
        round_tokens: Option<Bound<'_, PyAny>>,
        handles: Option<Bound<'_, PyAny>>,
        handle_rows: Option<Bound<'_, PyAny>>,
        proxy: Option<&Proxy>,
    ) -> PyResult<Context> {
        let timeout = duration("timeout", timeout)?;
        let (experts, top_k) = (number("experts", experts)?, number("top_k", top_k)?);
        let payload_words = number("payload_words", payload_words)?;
        let dispatch_payload_words = number("dispatch_payload_words", dispatch_payload_words)?;
        let (round_tokens, handles) = (maybe("round_tokens", round_tokens)?, maybe("handles", handles)?);
        let handle_rows = maybe("handle_rows", handle_rows)?;
        let of = world.inner.get(py)?;
        let device = device_of(py, device, of.local_rank())?;
        let (own, partial) = (&format.inner, calls::partial(partial)?);
        let mut builder = tokenyard::AllToAll::builder(&of)
            .device(device.clone())
            .hidden(own.hidden)
            .experts(experts)
            .top_k(top_k)
            .max_tokens_per_rank(own.max_tokens)
            .format(own.rows)
            .quantize(own.quantize)
            .combine_dtype(own.combine_dtype)
            .weights(own.weights)
            .timeout(timeout)
            .tuning(|tuning| {
                (tuning.duplicates, tuning.partial, tuning.round_tokens) = (duplicates, partial, round_tokens);
                (tuning.payload_words, tuning.dispatch_payload_words) = (payload_words, dispatch_payload_words);
                (tuning.handles, tuning.handle_rows) = (handles.unwrap_or(tuning.handles), handle_rows);
            });
        for other in room_for.iter().flatten() {
            builder = builder.room_for(other.inner);
        }
        if let Some(sms) = maybe("sms", sms)? {
            builder = builder.sms(sms);
        }
        if let Some(proxy) = proxy {
            let proxy = proxy.inner.get(py)?;
            builder = builder.proxy(&proxy);
        }
        if let Some(table) = placement {
            let placement = tokenyard::Placement::table(numbers("placement", &table)?, of.size());
            builder = builder.placement(placement.map_err(|error| errors::raised(py, &error))?);
        }
        let missing = calls::missing_ranks(missing_ranks)?;
        let ep = world.wait(py, || builder.missing_ranks(missing).build())?;
        let stream = device.new_stream().map_err(|error| errors::raised(py, &error))?;
        let own = of.original(of.rank()).index();
        let local_experts = ep.placement().local_experts(own).to_vec();
        // Ranks that wait for each other show signs of life, and then count as missing after eight deadlines.
        let deadlines = if missing == MissingRanks::Fatal { 2 } else { 20 };
        let patience = timeout.saturating_mul(deadlines).saturating_add(Duration::from_secs(1));
        let (ranks, first_ranks, rounds) = (of.size(), ep.placement().ranks(), ep.rounds());
        let (on_cpu, ordinal) = (device.kind() == DeviceKind::Cpu, device.ordinal());
        let slots = Slots::on(&device).map_err(|error| errors::raised(py, &error))?;
        let (ep, call, in_use) =
            (Closable::new("context", Inside { ep, device, stream }), Exclusive::default(), Mutex::default());
        let format = format.clone();
        let core = Core {
            ep,
            on_cpu,
            ordinal,
            call,
            in_use,
            waits: Waits::default(),
            patience,
            top_k,
            ranks,
            first_ranks,
            rounds,
            format,
            local_experts,
            slots,
        };
        Ok(Context { core: Arc::new(core) })
    }

    /// The format of calls that do not state one.
    #[getter]
    fn format(&self) -> Format {
        self.format.clone()
    }

    /// Makes the halves of a call one call of this thread.
    fn one_call(&self) -> OneCall {
        OneCall { core: self.core.clone(), nested: Mutex::default() }
    }

    /// In how many rounds each call goes.
    #[getter]
    fn rounds(&self) -> usize {
        self.rounds
    }

    /// Numbers of the experts of this rank, in the order of outputs.
    #[getter]
    fn local_experts(&self) -> Vec<u32> {
        self.local_experts.clone()
    }

    /// Whether calls run on the CPU device.
    #[getter(on_cpu)]
    fn is_on_cpu(&self) -> bool {
        self.on_cpu
    }

    /// Sends the rows of this rank's tokens to the ranks of their experts, and receives those for its own experts.
    #[pyo3(signature = (
        x, topk_idx, topk_weights, output, *, scales=None, count=None, payload=None, format=None, stream=0
    ))]
    // The parameters are Python's keywords.
    #[allow(clippy::too_many_arguments)]
    fn dispatch(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        topk_idx: &Bound<'_, PyAny>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        output: &Bound<'_, Output>,
        scales: Option<&Bound<'_, PyAny>>,
        count: Option<&Bound<'_, PyAny>>,
        payload: Option<&Bound<'_, PyAny>>,
        format: Option<&Format>,
        stream: u64,
    ) -> PyResult<Handle> {
        let (ep, stream, _held) = self.begin(py, stream)?;
        let call = self.call_of(&ep, format.unwrap_or(&self.format));
        let given = Given::of(x, topk_idx, topk_weights, scales, count, payload)?;
        let (tokens, room) = calls::tokens(&call, &given)?;
        let out = output.get().of(py, &call, words_of(&tokens.payload))?;
        let inner = self.enqueued(py, || ep.dispatch(&stream, &tokens, &out))?;
        let places = output.get().places().into();
        let handle = Handle::new(Arc::new(Parts { inner, tokens: room, format: call.format.clone(), places }));
        let arrays = [Some(x), Some(topk_idx), topk_weights, scales, count, payload, Some(output.as_any())];
        match self.finished(py, &ep, &call, arrays) {
            Ok(()) => Ok(handle),
            // The dispatch took place: other ranks combine it, and so must this one.
            Err(raised) => Err(with(py, raised, "handle", handle)),
        }
    }

    /// The sending half of a dispatch. With `counts` the host can ask for its counts before it is received.
    #[pyo3(signature = (
        x, topk_idx, topk_weights=None, *, scales=None, count=None, payload=None, format=None, counts=false, stream=0
    ))]
    // The parameters are Python's keywords.
    #[allow(clippy::too_many_arguments)]
    fn dispatch_send(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        topk_idx: &Bound<'_, PyAny>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        scales: Option<&Bound<'_, PyAny>>,
        count: Option<&Bound<'_, PyAny>>,
        payload: Option<&Bound<'_, PyAny>>,
        format: Option<&Format>,
        counts: bool,
        stream: u64,
    ) -> PyResult<Sent> {
        let (ep, stream, _held) = self.begin(py, stream)?;
        let call = self.call_of(&ep, format.unwrap_or(&self.format));
        let given = Given::of(x, topk_idx, topk_weights, scales, count, payload)?;
        let (tokens, room) = calls::tokens(&call, &given)?;
        let send = || match counts {
            true => ep.dispatch_send_counts(&stream, &tokens),
            false => ep.dispatch_send(&stream, &tokens),
        };
        let sent = self.enqueued(py, send)?;
        let arrays = [Some(x), Some(topk_idx), topk_weights, scales, count, payload];
        let (words, format) = (words_of(&tokens.payload), call.format.clone());
        let sent =
            Sent { inner: Mutex::new(Some(sent)), tokens: room, words, format, _arrays: kept(py, &call, arrays) };
        match self.finished(py, &ep, &call, arrays) {
            Ok(()) => Ok(sent),
            // It is to be received, as on the other ranks.
            Err(raised) => Err(with(py, raised, "sent", sent)),
        }
    }

    /// Waits for the counts of a dispatch that was sent with `counts`: rows of each local expert, and rows in the token
    /// layout from each rank.
    fn counts(&self, py: Python<'_>, sent: &Sent, seconds: f64) -> PyResult<(Vec<usize>, Vec<usize>)> {
        let seconds = duration("seconds", seconds)?;
        let _held = self.hold(py)?;
        let ep = self.ep.get(py)?;
        // Not under the mutex: another thread that wants it may hold the interpreter's lock.
        let given = taken(&sent.inner, "sent")?;
        let found = errors::wait(py, || ep.counts(&given, seconds));
        *sent.inner.lock().unwrap_or_else(PoisonError::into_inner) = Some(given);
        found.map(|counts| (counts.experts, counts.sources))
    }

    /// Sends new rows to the places that those of an earlier dispatch had in its output: the same tokens, without
    /// routing. `rows` has the layout and capacity of that output.
    #[pyo3(signature = (
        handle, x, rows, *, scales=None, row_scales=None, column_major=false, count=None, payload=None,
        row_payload=None, format=None, stream=0
    ))]
    // The parameters are Python's keywords.
    #[allow(clippy::too_many_arguments)]
    fn dispatch_again(
        &self,
        py: Python<'_>,
        handle: &Handle,
        x: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        scales: Option<&Bound<'_, PyAny>>,
        row_scales: Option<&Bound<'_, PyAny>>,
        column_major: bool,
        count: Option<&Bound<'_, PyAny>>,
        payload: Option<&Bound<'_, PyAny>>,
        row_payload: Option<&Bound<'_, PyAny>>,
        format: Option<&Format>,
        stream: u64,
    ) -> PyResult<()> {
        let (ep, stream, _held) = self.begin(py, stream)?;
        let call = self.call_of(&ep, format.unwrap_or(&handle.format));
        let tokens = calls::new_rows(&call, x, scales, count, payload)?;
        let (places, words) = (&handle.places, words_of(&tokens.payload));
        let placed = calls::placed(&call, rows, row_scales, column_major, row_payload, places, words)?;
        self.enqueued(py, || ep.dispatch_again(&stream, &handle.inner, &tokens, &placed))?;
        self.finished(py, &ep, &call, [Some(x), Some(rows), scales, row_scales, count, payload, row_payload])
    }

    /// The receiving half.
    #[pyo3(signature = (sent, output, *, stream=0))]
    fn dispatch_recv(
        &self,
        py: Python<'_>,
        sent: &Bound<'_, Sent>,
        output: &Bound<'_, Output>,
        stream: u64,
    ) -> PyResult<Handle> {
        let (ep, stream, _held) = self.begin(py, stream)?;
        let half = sent.get();
        let call = self.call_of(&ep, &half.format);
        let out = output.get().of(py, &call, half.words)?;
        let given = taken(&half.inner, "sent")?;
        let outcome = py.detach(|| ep.dispatch_recv(&stream, given, &out));
        let inner = outcome.map_err(|refused| {
            *half.inner.lock().unwrap_or_else(PoisonError::into_inner) = Some(*refused.given);
            errors::raised(py, &refused.error)
        })?;
        let places = output.get().places().into();
        let parts = Parts { inner, tokens: half.tokens, format: half.format.clone(), places };
        let handle = Handle::new(Arc::new(parts));
        match self.finished(py, &ep, &call, [Some(output.as_any()), Some(sent.as_any())]) {
            Ok(()) => Ok(handle),
            Err(raised) => Err(with(py, raised, "handle", handle)),
        }
    }

    /// Returns the experts' rows to their tokens' source ranks, as weighted sums in `out`. `payload`: fp32 words beside
    /// each row, `[rows, words]`; `payload_out` gets their sums `[tokens, words]`, or with three dimensions each
    /// choice's words `[tokens, top_k, words]`. `dtype`: of `rows`, if not the combine dtype of the handle's format.
    #[pyo3(signature = (
        rows, handle, out, *, topk_weights=None, accumulate=false, payload=None, payload_out=None, dtype=None,
        wait_times=None, stream=0
    ))]
    // The parameters are Python's keywords.
    #[allow(clippy::too_many_arguments)]
    fn combine(
        &self,
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        handle: &Handle,
        out: &Bound<'_, PyAny>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        accumulate: bool,
        payload: Option<&Bound<'_, PyAny>>,
        payload_out: Option<&Bound<'_, PyAny>>,
        dtype: Option<&str>,
        wait_times: Option<&Bound<'_, PyAny>>,
        stream: u64,
    ) -> PyResult<()> {
        let (ep, stream, _held) = self.begin(py, stream)?;
        let call = self.call_of(&ep, &handle.format);
        let given = Array::of("rows", rows, false)?;
        let weights = calls::read("topk_weights", topk_weights)?;
        let (mut from, places) = self.expert_rows(&call, &given, handle, weights.as_ref(), calls::dtype_of(dtype)?)?;
        let mut to = self.sums(&call, &Array::of("out", out, true)?, accumulate, wait_times)?;
        if let (Some(payload), Some(payload_out)) = (payload, payload_out) {
            let (given, got) = calls::payload(&call, payload, payload_out, &places)?;
            (from, to) = (from.payload(given), to.payload(got));
        } else if payload.is_some() || payload_out.is_some() {
            return Err(PyValueError::new_err("one of payload and payload_out is missing: give both, or none"));
        }
        self.enqueued(py, || ep.combine(&stream, &handle.inner, &from, &to))?;
        let used = [Some(rows), Some(out), topk_weights, payload, payload_out, wait_times];
        self.finished(py, &ep, &call, used).map_err(|raised| into(py, raised, out))
    }

    /// The sending half of a combine.
    #[pyo3(signature = (rows, handle, *, topk_weights=None, dtype=None, stream=0))]
    fn combine_send(
        &self,
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        handle: &Handle,
        topk_weights: Option<&Bound<'_, PyAny>>,
        dtype: Option<&str>,
        stream: u64,
    ) -> PyResult<CombineSent> {
        let (ep, stream, _held) = self.begin(py, stream)?;
        let call = self.call_of(&ep, &handle.format);
        let given = Array::of("rows", rows, false)?;
        let weights = calls::read("topk_weights", topk_weights)?;
        let (from, _) = self.expert_rows(&call, &given, handle, weights.as_ref(), calls::dtype_of(dtype)?)?;
        let sent = self.enqueued(py, || ep.combine_send(&stream, &handle.inner, &from))?;
        let arrays = [Some(rows), topk_weights];
        let (inner, format) = (Mutex::new(Some(sent)), handle.format.clone());
        let sent = CombineSent { inner, format, tokens: handle.parts.tokens, _arrays: kept(py, &call, arrays) };
        match self.finished(py, &ep, &call, arrays) {
            Ok(()) => Ok(sent),
            Err(raised) => Err(with(py, raised, "sent", sent)),
        }
    }

    /// The receiving half.
    #[pyo3(signature = (sent, out, *, accumulate=false, wait_times=None, stream=0))]
    fn combine_recv(
        &self,
        py: Python<'_>,
        sent: &Bound<'_, CombineSent>,
        out: &Bound<'_, PyAny>,
        accumulate: bool,
        wait_times: Option<&Bound<'_, PyAny>>,
        stream: u64,
    ) -> PyResult<()> {
        let (ep, stream, _held) = self.begin(py, stream)?;
        let half = sent.get();
        let call = self.call_of(&ep, &half.format);
        let to = self.sums(&call, &Array::of("out", out, true)?, accumulate, wait_times)?;
        let given = taken(&half.inner, "sent")?;
        py.detach(|| ep.combine_recv(&stream, given, &to)).map_err(|refused| {
            *half.inner.lock().unwrap_or_else(PoisonError::into_inner) = Some(*refused.given);
            errors::raised(py, &refused.error)
        })?;
        let used = [Some(out), wait_times, Some(sent.as_any())];
        self.finished(py, &ep, &call, used).map_err(|raised| into(py, raised, out))
    }

    /// Goes on without a rank, by its number in the first generation, also while a call waits for it.
    fn mask_rank(&self, py: Python<'_>, rank: &Bound<'_, PyAny>) -> PyResult<()> {
        let rank = number("rank", rank)?;
        let ep = self.ep.get(py)?;
        py.detach(|| ep.mask_rank(Rank(rank))).map_err(|error| errors::raised(py, &error))
    }

    /// The mask that calls read and deadlines write. An entry that is not 0 masks its rank.
    fn rank_mask(&self, py: Python<'_>) -> PyResult<RankMask> {
        let view = self.ep.get(py)?.rank_mask().map_err(|error| errors::raised(py, &error))?;
        Ok(RankMask { ranks: view.len() / 4, view, on_cpu: self.on_cpu() })
    }

    /// Ranks that a deadline masked here: each one's number in the first generation, the call and its epoch.
    fn silent_ranks(&self, py: Python<'_>) -> PyResult<Vec<(u32, String, u64)>> {
        let silent = self.ep.get(py)?.silent_ranks().into_iter();
        Ok(silent.map(|silent| (silent.rank.0, silent.call.to_owned(), silent.epoch)).collect())
    }

    /// Raises what earlier calls found: unusable routing, an output without room, a lost peer, a deadline.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.hold(py)?;
        let ep = self.ep.get(py)?;
        held.map_or(Ok(()), |held| self.settle_outer(py, &ep, &held))?;
        self.found(py, &ep, 0)
    }

    /// Gives the context up, after calls of other threads on the CPU device. Later calls raise `ClosedError`; handles
    /// may go before or after. Local; may be called again, and in the child of a fork, where it does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if !self.ep.is_of_this_process() {
            return Ok(());
        }
        let _held = self.hold(py)?;
        self.settle();
        Ok(())
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.ep.is_closed()
    }

    /// The GPU's number; None on the CPU device.
    #[getter(ordinal)]
    fn gpu(&self) -> Option<usize> {
        self.ordinal
    }
}

#[pymethods]
impl Handle {
    /// Tokens that this rank dispatched, or has room for where they are counted on the device.
    #[getter(tokens)]
    fn room(&self) -> usize {
        self.tokens
    }

    /// By which operators find it; None of one that they have not made.
    #[getter(number)]
    pub fn number(&self) -> Option<i64> {
        self.number.as_ref().map(|number| number.0)
    }

    /// Of the dispatch.
    #[getter(format)]
    fn own_format(&self) -> Format {
        self.format.clone()
    }
}

#[pymethods]
impl RankMask {
    /// On the CPU device.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.interface(py, true)
    }

    /// On a GPU.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.interface(py, false)
    }
}

impl RankMask {
    fn interface<'py>(&self, py: Python<'py>, on_cpu: bool) -> PyResult<Bound<'py, PyDict>> {
        if on_cpu != self.on_cpu {
            return Err(PyAttributeError::new_err("the mask is on another device"));
        }
        let interface = PyDict::new(py);
        interface.set_item("shape", (self.ranks,))?;
        interface.set_item("typestr", "<i4")?;
        interface.set_item("data", (self.view.ptr(), false))?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.settle();
    }
}

impl Context {
    /// What the context is.
    pub fn core(&self) -> Arc<Core> {
        self.core.clone()
    }
}

impl Core {
    /// Closes the context. Waits for calls whose wait ended before they did, and lets go of what they use.
    fn settle(&self) {
        if !self.ep.is_of_this_process() {
            // A thread of the parent may have held the lock in the fork.
            if let Ok(mut in_use) = self.in_use.try_lock() {
                std::mem::forget(std::mem::take(&mut *in_use));
            }
            return;
        }
        let open = self.ep.close();
        let in_use = std::mem::take(&mut *self.in_use.lock().unwrap_or_else(PoisonError::into_inner));
        if in_use.is_empty() {
            return;
        }
        let ended = open.and_then(|open| with_lock(|py| py.detach(|| open.stream.synchronize(self.patience).is_ok())));
        if ended != Some(true) {
            std::mem::forget(in_use);
        }
    }

    /// Makes this thread the only one of the CPU device's calls. Refuses the child of a fork.
    fn hold(&self, py: Python<'_>) -> PyResult<Option<Held<'_>>> {
        self.ep.must_be_of_this_process()?;
        if self.on_cpu() { self.call.hold(py).map(Some) } else { Ok(None) }
    }

    /// The open context, the stream of a call, and what it holds until its wait ends. Before addresses of arrays are
    /// taken: other threads run in the wait for it, and may give tensors other memory.
    pub fn begin(&self, py: Python<'_>, given: u64) -> PyResult<(Open, Stream, Option<Held<'_>>)> {
        let held = self.hold(py)?;
        let ep = self.ep.get(py)?;
        if let Some(here) = &held {
            self.settle_outer(py, &ep, here)?;
            self.waits.take(0).map_or(Ok(()), |error| Err(errors::raised(py, &error)))?;
            let stream = ep.stream.clone();
            return Ok((ep, stream, held));
        }
        // SAFETY: the caller's stream is of this device and lives until its work is done, as the class documents;
        // torch's streams live as long as the process.
        let stream = unsafe { ep.device.stream_from_raw(given) }.map_err(|error| errors::raised(py, &error))?;
        Ok((ep, stream, None))
    }

    /// Before a call of a signal's handler: waits for the call that it interrupted, and keeps what that one found,
    /// which this one would take for its own.
    fn settle_outer(&self, py: Python<'_>, ep: &Inside, held: &Held<'_>) -> PyResult<()> {
        if let Some(outer) = self.waits.innermost().filter(|_| held.is_nested()) {
            errors::wait(py, || ep.stream.synchronize(self.patience))?;
            self.waits.keep(outer, ep.check().err());
        }
        Ok(())
    }

    /// Raises what the call of a wait found.
    fn found(&self, py: Python<'_>, ep: &tokenyard::AllToAll, wait: usize) -> PyResult<()> {
        self.waits.take(wait).map_or_else(|| ep.check(), Err).map_err(|error| errors::raised(py, &error))
    }

    /// Enqueues a call. It waits for nobody, but other threads may hold what it needs for a moment.
    fn enqueued<T: Send>(&self, py: Python<'_>, call: impl FnOnce() -> tokenyard::Result<T> + Send) -> PyResult<T> {
        py.detach(call).map_err(|error| errors::raised(py, &error))
    }

    /// On the CPU device, waits until a call with these arrays is done, and raises what it found.
    fn finished<const N: usize>(
        &self,
        py: Python<'_>,
        ep: &Inside,
        call: &Call<'_>,
        arrays: [Option<&Bound<'_, PyAny>>; N],
    ) -> PyResult<()> {
        self.finished_with(py, ep, || Box::new(kept(py, call, arrays)))
    }

    /// The same, of a call that uses what `used` returns.
    pub fn finished_with(
        &self,
        py: Python<'_>,
        ep: &Inside,
        used: impl FnOnce() -> Box<dyn Any + Send>,
    ) -> PyResult<()> {
        if !self.on_cpu() {
            return Ok(());
        }
        // A call ends by its own deadline, which the device keeps.
        let wait = self.waits.begin();
        let waited = errors::wait(py, || ep.stream.synchronize(self.patience));
        self.waits.end(wait, waited.is_err());
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        if waited.is_err() {
            // By a signal, say: work goes on, in arrays that the caller may let go of.
            in_use.push(used());
        }
        let ended = if waited.is_ok() { std::mem::take(&mut *in_use) } else { Vec::new() };
        drop(in_use);
        drop(ended);
        waited?;
        self.found(py, ep, wait)?;
        // The wait may have ended before it asked for signals, and outside of this call what it made would be lost.
        py.check_signals()
    }

    /// A call of this format.
    pub fn call_of<'a>(&self, ep: &'a Inside, format: &'a Format) -> Call<'a> {
        let (top_k, ranks, first_ranks) = (self.top_k, self.ranks, self.first_ranks);
        Call { device: &ep.device, format, top_k, ranks, first_ranks, capsules: RefCell::default() }
    }

    /// Whether calls run on the CPU device.
    pub fn on_cpu(&self) -> bool {
        self.on_cpu
    }

    /// Choices of a token, at most.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Where arrays of calls lie.
    pub fn place(&self) -> Place {
        self.ordinal.map_or(Place::Cpu, Place::Cuda)
    }

    /// The GPU's number.
    pub fn ordinal(&self) -> Option<usize> {
        self.ordinal
    }

    /// The experts' rows, and where they lie.
    pub fn expert_rows(
        &self,
        call: &Call<'_>,
        rows: &Array,
        handle: &Parts,
        topk_weights: Option<&Array>,
        dtype: Option<Dtype>,
    ) -> PyResult<(Rows, Dimensions)> {
        let dtype = dtype.unwrap_or(handle.format.inner.combine_dtype);
        rows.must_be_rows_of(dtype)?;
        calls::must_lie(rows, &handle.places, call.format)?;
        let mut to = Rows::new(call.view(rows)?).dtype(dtype);
        if rows.shape().len() == 2 {
            to = to.pitch_bytes(rows.pitch()?);
        } else {
            rows.must_be_contiguous()?;
        }
        if let Some(weights) = topk_weights {
            weights.must_be_shaped(&[handle.tokens, self.top_k])?;
            weights.must_hold(&[Element::Fp32])?;
            weights.must_be_contiguous()?;
            to = to.topk_weight(call.view(weights)?);
        }
        Ok((to, rows.places().into()))
    }

    /// Where sums go.
    pub fn sums(
        &self,
        call: &Call<'_>,
        out: &Array,
        accumulate: bool,
        wait_times: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Combined> {
        out.must_be_shaped(&[out.len(), call.format.inner.hidden])?;
        out.must_hold(&[Element::Fp32, Element::Fp16, Element::Bf16, Element::U16])?;
        let dtype = out.element.of_sums().unwrap_or(Dtype::Fp32);
        let to = Combined::new(call.view(out)?).dtype(dtype).accumulate(accumulate);
        let times = wait_times.map(|times| Array::whole("wait_times", times, &[Element::I64], true)).transpose()?;
        let times = times.map(|times| call.view(&times)).transpose()?;
        Ok(to.pitch_bytes(out.pitch()?).wait_times(times))
    }
}

/// A context that stays until its call ends.
pub(super) type Open = Arc<Detached<Inside>>;

/// Words of each token's payload.
fn words_of(payload: &Option<TokenPayload>) -> usize {
    payload.as_ref().map_or(0, |payload| payload.words)
}

/// Arrays that what is in flight keeps alive.
fn kept<const N: usize>(py: Python<'_>, call: &Call<'_>, arrays: [Option<&Bound<'_, PyAny>>; N]) -> Vec<Py<PyAny>> {
    let capsules = call.capsules.borrow();
    let capsules = capsules.iter().map(|capsule| capsule.clone_ref(py));
    arrays.into_iter().flatten().map(|array| array.clone().unbind()).chain(capsules).collect()
}

/// The exception, with what the call that raised it made all the same.
pub(super) fn with<T>(py: Python<'_>, raised: PyErr, name: &str, made: T) -> PyErr
where
    T: PyClass + Into<PyClassInitializer<T>>,
{
    let attached = Py::new(py, made).and_then(|made| raised.value(py).setattr(name, made));
    attached.err().unwrap_or(raised)
}

/// An exception that came after a combine was enqueued, with where its sums come.
fn into(py: Python<'_>, raised: PyErr, out: &Bound<'_, PyAny>) -> PyErr {
    raised.value(py).setattr("out", out).err().unwrap_or(raised)
}

/// What is in flight, which the receiving half consumes.
fn taken<T>(place: &Mutex<Option<T>>, name: &str) -> PyResult<T> {
    let found = place.lock().unwrap_or_else(PoisonError::into_inner).take();
    found.ok_or_else(|| Python::attach(|py| received_already(py, name)))
}

/// The error of a half that is in flight no more; it has the field `received`.
pub(super) fn received_already(py: Python<'_>, name: &str) -> PyErr {
    let raised = PyValueError::new_err(format!(
        "{name} was received already, or another thread uses it: receive each half once, and send again"
    ));
    raised.value(py).setattr("received", true).err().unwrap_or(raised)
}
