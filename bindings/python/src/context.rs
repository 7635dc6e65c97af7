//! Contexts and their calls.

use super::arrays::{Array, Element};
use super::calls::{self, Given, Output};
use super::detached::Detached;
use super::errors;
use super::exclusive::{Exclusive, Held};
use super::worlds::World;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::{PyClass, PyClassInitializer};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokenyard::{Combined, Device, DeviceKind, Dtype, Rows, Stream};

/// Dispatch and combine over one world: `tokenyard.AllToAll` has one and makes outputs for it.
///
/// On the CPU device calls return once their work is done, and raise what the call's `check` finds. On a GPU they
/// enqueue work on `stream`, an address of a `cudaStream_t`, and return; `check` raises what calls found since.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct Context {
    ep: Detached<tokenyard::AllToAll>,
    device: Device,
    /// Of the CPU device; a GPU's calls go to the caller's.
    stream: Stream,
    /// Held from a call to the end of its wait, so that a thread gets the errors of its own calls.
    call: Exclusive,
    /// What calls use whose wait ended before they did.
    in_use: Mutex<Vec<Py<PyAny>>>,
    timeout: Duration,
    hidden: usize,
    rows: Dtype,
    combine: Dtype,
    top_k: usize,
    quantizes: bool,
    local_experts: Vec<u32>,
}

/// A received dispatch: what combine needs to return the rows. It may be combined several times, or never.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct Handle {
    inner: tokenyard::Handle,
    tokens: usize,
}

/// A sent dispatch that is to be received.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct Sent {
    inner: Mutex<Option<tokenyard::Sent>>,
    tokens: usize,
    /// Calls in several rounds read them in the second half, too.
    _arrays: Vec<Py<PyAny>>,
}

/// A sent combine that is to be received.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct CombineSent {
    inner: Mutex<Option<tokenyard::CombineSent>>,
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
fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    // Above: no deadline that anybody means, and more than some waits can count.
    let meant = (0.0..=1e9).contains(&seconds).then(|| Duration::from_secs_f64(seconds));
    meant.ok_or_else(|| PyValueError::new_err(format!("{name} is {seconds:e}: give seconds from 0 to 1e9")))
}

#[pymethods]
impl Context {
    #[new]
    #[pyo3(signature = (
        world, *, hidden, experts, top_k, max_tokens_per_rank, device="cuda", dtype="bf16", scales=None,
        quantize=false, combine_dtype="bf16", weights="dispatch", timeout=30.0, sms=None, placement=None,
        duplicates=false, payload_words=0,
    ))]
    // The parameters are Python's keywords.
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        world: &World,
        hidden: usize,
        experts: usize,
        top_k: usize,
        max_tokens_per_rank: usize,
        device: &str,
        dtype: &str,
        scales: Option<&str>,
        quantize: bool,
        combine_dtype: &str,
        weights: &str,
        timeout: f64,
        sms: Option<u32>,
        placement: Option<Vec<u32>>,
        duplicates: bool,
        payload_words: usize,
    ) -> PyResult<Context> {
        let timeout = duration("timeout", timeout)?;
        let device = device_of(py, device, world.inner.local_rank())?;
        let (rows, combine) = (calls::row_format(py, dtype, scales)?, calls::dtype("combine_dtype", combine_dtype)?);
        let mut builder = tokenyard::AllToAll::builder(&world.inner)
            .device(device.clone())
            .hidden(hidden)
            .experts(experts)
            .top_k(top_k)
            .max_tokens_per_rank(max_tokens_per_rank)
            .format(rows)
            .quantize(quantize)
            .combine_dtype(combine)
            .weights(calls::weights(weights)?)
            .timeout(timeout)
            .tuning(|tuning| (tuning.duplicates, tuning.payload_words) = (duplicates, payload_words));
        if let Some(sms) = sms {
            builder = builder.sms(sms);
        }
        if let Some(table) = placement {
            let placement = tokenyard::Placement::table(table, world.inner.size());
            builder = builder.placement(placement.map_err(|error| errors::raised(py, &error))?);
        }
        let ep = errors::wait(py, || builder.build())?;
        let stream = device.new_stream().map_err(|error| errors::raised(py, &error))?;
        let own = world.inner.original(world.inner.rank()).index();
        let local_experts = ep.placement().local_experts(own).to_vec();
        let rows = rows.dtype();
        let (ep, call, in_use) = (Detached::new(ep), Exclusive::default(), Mutex::default());
        Ok(Context {
            ep,
            device,
            stream,
            call,
            in_use,
            timeout,
            hidden,
            rows,
            combine,
            top_k,
            quantizes: quantize,
            local_experts,
        })
    }

    /// Numbers of the experts of this rank, in the order of outputs.
    #[getter]
    fn local_experts(&self) -> Vec<u32> {
        self.local_experts.clone()
    }

    /// Whether calls run on the CPU device.
    #[getter]
    fn on_cpu(&self) -> bool {
        self.device.kind() == DeviceKind::Cpu
    }

    /// Sends the rows of this rank's tokens to the ranks of their experts, and receives those for its own experts.
    #[pyo3(signature = (x, topk_idx, topk_weights, output, *, scales=None, count=None, stream=0))]
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
        stream: u64,
    ) -> PyResult<Handle> {
        let (stream, _held) = self.begin(py, stream)?;
        let given = Given { x, topk_idx, topk_weights, scales, count };
        let tokens = calls::tokens(&self.device, &given, self.input())?;
        let out = output.get().of(py, &self.device, self.hidden, self.rows)?;
        let inner = self.enqueued(py, || self.ep.dispatch(&stream, &tokens, &out))?;
        let handle = Handle { inner, tokens: x.len()? };
        match self.finished(py, [Some(x), Some(topk_idx), topk_weights, scales, count, Some(output.as_any())]) {
            Ok(()) => Ok(handle),
            // The dispatch took place: other ranks combine it, and so must this one.
            Err(raised) => Err(with(py, raised, "handle", handle)),
        }
    }

    /// The sending half of a dispatch. With `counts` the host can ask for its counts before it is received.
    #[pyo3(signature = (x, topk_idx, topk_weights=None, *, scales=None, count=None, counts=false, stream=0))]
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
        counts: bool,
        stream: u64,
    ) -> PyResult<Sent> {
        let (stream, _held) = self.begin(py, stream)?;
        let given = Given { x, topk_idx, topk_weights, scales, count };
        let tokens = calls::tokens(&self.device, &given, self.input())?;
        let send = || match counts {
            true => self.ep.dispatch_send_counts(&stream, &tokens),
            false => self.ep.dispatch_send(&stream, &tokens),
        };
        let sent = self.enqueued(py, send)?;
        let arrays = [Some(x), Some(topk_idx), topk_weights, scales, count];
        let sent = Sent { inner: Mutex::new(Some(sent)), tokens: x.len()?, _arrays: kept(arrays) };
        match self.finished(py, arrays) {
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
        // Not under the mutex: another thread that wants it may hold the interpreter's lock.
        let given = taken(&sent.inner, "sent")?;
        let found = errors::wait(py, || self.ep.counts(&given, seconds));
        *sent.inner.lock().unwrap_or_else(PoisonError::into_inner) = Some(given);
        found.map(|counts| (counts.experts, counts.sources))
    }

    /// Sends new rows to the places that those of an earlier dispatch had in its output: the same tokens, without
    /// routing. `rows` has the layout and capacity of that output.
    #[pyo3(signature = (handle, x, rows, *, scales=None, row_scales=None, column_major=false, count=None, stream=0))]
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
        stream: u64,
    ) -> PyResult<()> {
        let (stream, _held) = self.begin(py, stream)?;
        let tokens = calls::new_rows(&self.device, x, scales, count, self.input())?;
        let placed = calls::placed(&self.device, rows, row_scales, column_major, self.rows)?;
        self.enqueued(py, || self.ep.dispatch_again(&stream, &handle.inner, &tokens, &placed))?;
        self.finished(py, [Some(x), Some(rows), scales, row_scales, count])
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
        let (stream, _held) = self.begin(py, stream)?;
        let out = output.get().of(py, &self.device, self.hidden, self.rows)?;
        let half = sent.get();
        let given = taken(&half.inner, "sent")?;
        let outcome = py.detach(|| self.ep.dispatch_recv(&stream, given, &out));
        let inner = outcome.map_err(|refused| {
            *half.inner.lock().unwrap_or_else(PoisonError::into_inner) = Some(*refused.given);
            errors::raised(py, &refused.error)
        })?;
        let handle = Handle { inner, tokens: half.tokens };
        match self.finished(py, [Some(output.as_any()), Some(sent.as_any())]) {
            Ok(()) => Ok(handle),
            Err(raised) => Err(with(py, raised, "handle", handle)),
        }
    }

    /// Returns the experts' rows to their tokens' source ranks, as weighted sums in `out`. `payload`: fp32 words beside
    /// each row, `[rows, words]`; `payload_out` gets their sums `[tokens, words]`, or with three dimensions each
    /// choice's words `[tokens, top_k, words]`.
    #[pyo3(signature = (
        rows, handle, out, *, topk_weights=None, accumulate=false, payload=None, payload_out=None, stream=0
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
        stream: u64,
    ) -> PyResult<()> {
        let (stream, _held) = self.begin(py, stream)?;
        let (mut from, mut to) = (self.expert_rows(rows, handle, topk_weights)?, self.sums(out, accumulate)?);
        if let (Some(payload), Some(payload_out)) = (payload, payload_out) {
            let (given, got) = calls::payload(&self.device, payload, payload_out)?;
            (from, to) = (from.payload(given), to.payload(got));
        } else if payload.is_some() || payload_out.is_some() {
            return Err(PyValueError::new_err("one of payload and payload_out is missing: give both, or none"));
        }
        self.enqueued(py, || self.ep.combine(&stream, &handle.inner, &from, &to))?;
        self.finished(py, [Some(rows), Some(out), topk_weights, payload, payload_out])
    }

    /// The sending half of a combine.
    #[pyo3(signature = (rows, handle, *, topk_weights=None, stream=0))]
    fn combine_send(
        &self,
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        handle: &Handle,
        topk_weights: Option<&Bound<'_, PyAny>>,
        stream: u64,
    ) -> PyResult<CombineSent> {
        let (stream, _held) = self.begin(py, stream)?;
        let from = self.expert_rows(rows, handle, topk_weights)?;
        let sent = self.enqueued(py, || self.ep.combine_send(&stream, &handle.inner, &from))?;
        let arrays = [Some(rows), topk_weights];
        let sent = CombineSent { inner: Mutex::new(Some(sent)), _arrays: kept(arrays) };
        match self.finished(py, arrays) {
            Ok(()) => Ok(sent),
            Err(raised) => Err(with(py, raised, "sent", sent)),
        }
    }

    /// The receiving half.
    #[pyo3(signature = (sent, out, *, accumulate=false, stream=0))]
    fn combine_recv(
        &self,
        py: Python<'_>,
        sent: &Bound<'_, CombineSent>,
        out: &Bound<'_, PyAny>,
        accumulate: bool,
        stream: u64,
    ) -> PyResult<()> {
        let (stream, _held) = self.begin(py, stream)?;
        let to = self.sums(out, accumulate)?;
        let half = sent.get();
        let given = taken(&half.inner, "sent")?;
        py.detach(|| self.ep.combine_recv(&stream, given, &to)).map_err(|refused| {
            *half.inner.lock().unwrap_or_else(PoisonError::into_inner) = Some(*refused.given);
            errors::raised(py, &refused.error)
        })?;
        self.finished(py, [Some(out), Some(sent.as_any())])
    }

    /// Raises what earlier calls found: unusable routing, an output without room, a lost peer, a deadline.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let _held = self.hold(py)?;
        self.found(py)
    }

    /// The GPU's number; None on the CPU device.
    #[getter]
    fn ordinal(&self) -> Option<usize> {
        self.device.ordinal()
    }
}

#[pymethods]
impl Handle {
    /// Tokens that this rank dispatched, or has room for where they are counted on the device.
    #[getter]
    fn tokens(&self) -> usize {
        self.tokens
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let in_use = std::mem::take(self.in_use.get_mut().unwrap_or_else(PoisonError::into_inner));
        if in_use.is_empty() {
            return;
        }
        if self.ep.must_be_of_this_process("context").is_err() {
            return std::mem::forget(in_use);
        }
        let (stream, patience) = (self.stream.clone(), self.patience());
        let ended = Python::try_attach(|py| py.detach(|| stream.synchronize(patience).is_ok()));
        if ended != Some(true) {
            std::mem::forget(in_use);
        }
    }
}

impl Context {
    /// Dtype of what dispatch reads.
    fn input(&self) -> Dtype {
        if self.quantizes { Dtype::Bf16 } else { self.rows }
    }

    /// Makes this thread the only one of the CPU device's calls. Refuses the child of a fork.
    fn hold(&self, py: Python<'_>) -> PyResult<Option<Held<'_>>> {
        self.ep.must_be_of_this_process("context")?;
        if self.on_cpu() { self.call.hold(py).map(Some) } else { Ok(None) }
    }

    /// The stream of a call, and what it holds until its wait ends. Before addresses of arrays are taken: other threads
    /// run in the wait for it, and may give tensors other memory.
    fn begin(&self, py: Python<'_>, given: u64) -> PyResult<(Stream, Option<Held<'_>>)> {
        let held = self.hold(py)?;
        if held.is_some() {
            return Ok((self.stream.clone(), held));
        }
        // SAFETY: the caller's stream is of this device and lives until its work is done, as the class documents;
        // torch's streams live as long as the process.
        let stream = unsafe { self.device.stream_from_raw(given) }.map_err(|error| errors::raised(py, &error))?;
        Ok((stream, None))
    }

    /// Enqueues a call. It waits for nobody, but other threads may hold what it needs for a moment.
    fn enqueued<T: Send>(&self, py: Python<'_>, call: impl FnOnce() -> tokenyard::Result<T> + Send) -> PyResult<T> {
        py.detach(call).map_err(|error| errors::raised(py, &error))
    }

    /// On the CPU device, waits until a call with these arrays is done, and raises what it found.
    fn finished<const N: usize>(&self, py: Python<'_>, arrays: [Option<&Bound<'_, PyAny>>; N]) -> PyResult<()> {
        if !self.on_cpu() {
            return Ok(());
        }
        // A call ends by its own deadline, which the device keeps.
        let waited = errors::wait(py, || self.stream.synchronize(self.patience()));
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        if waited.is_err() {
            // By a signal, say: work goes on, in arrays that the caller may let go of.
            in_use.extend(kept(arrays));
        }
        let ended = if waited.is_ok() { std::mem::take(&mut *in_use) } else { Vec::new() };
        drop(in_use);
        drop(ended);
        waited?;
        self.found(py)
    }

    /// Raises what calls found.
    fn found(&self, py: Python<'_>) -> PyResult<()> {
        self.ep.check().map_err(|error| errors::raised(py, &error))
    }

    /// Longer than any call takes.
    fn patience(&self) -> Duration {
        self.timeout.saturating_mul(2).saturating_add(Duration::from_secs(1))
    }

    fn expert_rows(
        &self,
        rows: &Bound<'_, PyAny>,
        handle: &Handle,
        topk_weights: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Rows> {
        let rows = Array::of("rows", rows, false)?;
        rows.must_be_rows_of(self.combine)?;
        if rows.shape().last() != Some(&self.hidden) {
            rows.must_be_shaped(&[rows.len(), self.hidden])?;
        }
        let mut to = Rows::new(rows.view(&self.device)?);
        if rows.shape().len() == 2 {
            to = to.pitch_bytes(rows.pitch()?);
        } else {
            rows.must_be_contiguous()?;
        }
        if let Some(weights) = topk_weights {
            let weights = Array::of("topk_weights", weights, false)?;
            weights.must_be_shaped(&[handle.tokens, self.top_k])?;
            weights.must_hold(&[Element::Fp32])?;
            weights.must_be_contiguous()?;
            to = to.topk_weight(weights.view(&self.device)?);
        }
        Ok(to)
    }

    fn sums(&self, out: &Bound<'_, PyAny>, accumulate: bool) -> PyResult<Combined> {
        let out = Array::of("out", out, true)?;
        out.must_be_shaped(&[out.len(), self.hidden])?;
        let dtype = match out.element {
            Element::Bf16 | Element::U16 => Dtype::Bf16,
            Element::Fp16 => Dtype::Fp16,
            _ => {
                out.must_hold(&[Element::Fp32, Element::Fp16, Element::Bf16, Element::U16])?;
                Dtype::Fp32
            }
        };
        let to = Combined::new(out.view(&self.device)?).dtype(dtype).accumulate(accumulate);
        Ok(to.pitch_bytes(out.pitch()?))
    }
}

/// Arrays that what is in flight keeps alive.
fn kept<const N: usize>(arrays: [Option<&Bound<'_, PyAny>>; N]) -> Vec<Py<PyAny>> {
    arrays.into_iter().flatten().map(|array| array.clone().unbind()).collect()
}

/// The exception, with what the call that raised it made all the same.
fn with<T>(py: Python<'_>, raised: PyErr, name: &str, made: T) -> PyErr
where
    T: PyClass + Into<PyClassInitializer<T>>,
{
    let attached = Py::new(py, made).and_then(|made| raised.value(py).setattr(name, made));
    attached.err().unwrap_or(raised)
}

/// What is in flight, which the receiving half consumes.
fn taken<T>(place: &Mutex<Option<T>>, name: &str) -> PyResult<T> {
    let found = place.lock().unwrap_or_else(PoisonError::into_inner).take();
    found.ok_or_else(|| {
        PyValueError::new_err(format!(
            "{name} was received already, or another thread uses it: receive each half once, and send again"
        ))
    })
}
