//! Operators of torch whose kernels are in C: `torch.ops.tokenyard._dispatch`, `_dispatch_into`, `_combine` and
//! `_combine_into`, for eager calls without gradients, and `_low_latency_dispatch` and `_low_latency_combine`, whose
//! handles are numbers. bindings/python/tokenyard/_eager.py calls them; operators in Python are there for everything
//! else.
//!
//! A call has no Python in it: torch gives back the interpreter's lock, and on a GPU the kernel takes it for errors
//! alone. It returns no tensors where the call is none for it, or raises something, which `take_pending` then has.
//! `direct` has the same calls as functions.

mod arguments;
mod direct;
mod halves;
mod handles;
mod plainness;
mod shim;

use super::arrays::{Array, Dimensions, Element, Place, packed};
use super::calls::{self, Call, Given, Output};
use super::context::{Context, Core, Inside, Open, Parts};
use super::errors;
use super::formats::Format;
use super::lock::with_lock;
use arguments::{Arguments, again};
use handles::{Slot, Untaken};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use shim::{Shim, Tensor, shim};
use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tokenyard::{Dtype, Layout, Stream};

pub(super) use direct::{
    direct_calls, direct_combine, direct_combine_into, direct_dispatch, direct_dispatch_into,
    direct_low_latency_combine, direct_low_latency_dispatch, direct_low_latency_send, direct_low_latency_send_back,
};
pub(super) use halves::{Half, half_is_kept, half_of, newest_half};
pub(super) use handles::{Number, Slots, operator_handle, operator_handles, taken_handle};
pub(super) use plainness::is_usual;

/// The operators' schemas. Tensors that a call lacks are `x` or `rows` once more, as flags say. `first` and `second`
/// are offsets alone, or in the token layout experts and weights of tokens. Tensors that are written are none of the
/// schemas' business: nothing traces these operators, and Python counts the writes.
const DISPATCH: &CStr =
    c"_dispatch(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor scales, int plan) -> (Tensor[], int)";
const DISPATCH_INTO: &CStr = c"_dispatch_into(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor scales, \
    Tensor rows, Tensor counts, Tensor row_scales, Tensor first, Tensor second, int plan) -> (Tensor[], int)";
const COMBINE: &CStr = c"_combine(Tensor rows, Tensor handle, Tensor topk_weights, int tokens) -> (Tensor[], int)";
const COMBINE_INTO: &CStr =
    c"_combine_into(Tensor rows, Tensor handle, Tensor topk_weights, Tensor out, int flags) -> (Tensor[], int)";
/// The number is the handle's. Tensors that are not as low-latency calls have them are none for these operators.
const LOW_LATENCY_DISPATCH: &CStr = c"_low_latency_dispatch(Tensor x, Tensor topk_idx, int plan) -> (Tensor[], int)";
/// The number is that of a sent half, for `half_of`.
const LOW_LATENCY_SEND: &CStr = c"_low_latency_send(Tensor x, Tensor topk_idx, int plan) -> (Tensor[], int)";
const LOW_LATENCY_SEND_BACK: &CStr =
    c"_low_latency_send_back(Tensor rows, Tensor topk_idx, Tensor topk_weights, int handle) -> (Tensor[], int)";
const LOW_LATENCY_COMBINE: &CStr =
    c"_low_latency_combine(Tensor rows, Tensor topk_idx, Tensor topk_weights, int handle) -> (Tensor[], int)";
/// Flags in the lowest bits of `plan` and `tokens`, and of `flags`.
const WEIGHTS: i64 = 1;
const SCALES: i64 = 2;
const ROW_SCALES: i64 = 4;
const FIRST: i64 = 8;
const SECOND: i64 = 16;
const PLAN_FLAGS: u32 = 5;
/// Of `_combine_into`.
const ACCUMULATE: i64 = 2;

/// Defines the operators; once, after torch was imported. False: this torch has no stable interface for them.
#[pyfunction]
pub(super) fn define_operators() -> bool {
    static DEFINED: Mutex<Option<bool>> = Mutex::new(None);
    let mut defined = DEFINED.lock().unwrap_or_else(PoisonError::into_inner);
    *defined.get_or_insert_with(|| {
        let operators = shim().and_then(|shim| Some((shim, shim.operators(c"tokenyard")?)));
        operators.is_some_and(|(shim, operators)| {
            operators.define(shim, c"_dispatch", DISPATCH, dispatch)
                && operators.define(shim, c"_dispatch_into", DISPATCH_INTO, dispatch_into)
                && operators.define(shim, c"_combine", COMBINE, combine)
                && operators.define(shim, c"_combine_into", COMBINE_INTO, combine_into)
                && operators.define(shim, c"_low_latency_dispatch", LOW_LATENCY_DISPATCH, low_latency_dispatch)
                && operators.define(shim, c"_low_latency_combine", LOW_LATENCY_COMBINE, low_latency_combine)
                && operators.define(shim, c"_low_latency_send", LOW_LATENCY_SEND, low_latency_send)
                && operators.define(shim, c"_low_latency_send_back", LOW_LATENCY_SEND_BACK, low_latency_send_back)
        })
    })
}

thread_local! {
    /// What this thread's last calls raised.
    static PENDING: RefCell<Untaken<PyErr>> = const { RefCell::new(Untaken::new()) };
}

/// The exception of a call of this thread whose second result is the negative of this number, once.
#[pyfunction]
pub(super) fn take_pending(py: Python<'_>, number: i64) -> Option<Py<PyAny>> {
    let raised = PENDING.with_borrow_mut(|pending| pending.take(number));
    raised.map(|raised| raised.into_value(py).into_any())
}

/// Why a call has no result.
enum Failure {
    Raised(PyErr),
    Library(Box<tokenyard::Error>),
    /// It is none for these operators: an argument that Python knows more of, or no memory.
    NotHere,
}

impl From<PyErr> for Failure {
    fn from(raised: PyErr) -> Failure {
        Failure::Raised(raised)
    }
}

impl From<tokenyard::Error> for Failure {
    fn from(error: tokenyard::Error) -> Failure {
        Failure::Library(Box::new(error))
    }
}

/// What a call made.
#[derive(Default)]
struct Results {
    tensors: Vec<Tensor>,
    /// The number of its handle, where that is none of the tensors.
    number: i64,
    /// The place of an argument that a function in Python returns.
    returned: Option<usize>,
}

impl From<Vec<Tensor>> for Results {
    fn from(tensors: Vec<Tensor>) -> Results {
        Results { tensors, ..Results::default() }
    }
}

/// A call's results, and what is to be raised all the same: of a call that took place.
type Outcome = Result<(Results, Option<PyErr>), Failure>;

/// Notes what a call raised. Returns its results.
fn settled(outcome: Outcome) -> Results {
    let (mut results, raised) = match outcome {
        Ok(made) => made,
        Err(Failure::NotHere) => (Results::default(), None),
        Err(Failure::Raised(raised)) => (Results::default(), Some(raised)),
        Err(Failure::Library(error)) => {
            let raised = with_lock(|py| errors::raised(py, &error));
            let raised = raised.unwrap_or_else(|| PyRuntimeError::new_err(error.to_string()));
            (Results::default(), Some(raised))
        }
    };
    if let Some(raised) = raised {
        let number = if results.number != 0 { results.number } else { handles::next_number() };
        results.number = -number;
        let oldest = PENDING.with_borrow_mut(|pending| pending.put(number, raised));
        if oldest.is_some() {
            // Nobody took it.
            with_lock(|_| drop(oldest));
        }
    }
    results
}

/// Does a call, which may panic, and notes what it raised.
fn outcome_of(work: impl FnOnce() -> Outcome) -> Results {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    settled(outcome.unwrap_or_else(|_| {
        Err(Failure::Raised(PyRuntimeError::new_err("an operator panicked: report it, with the call")))
    }))
}

/// Runs a kernel: `count` tensors and a number become a list, and a number behind it, which is negative if something
/// was raised.
///
/// # Safety
/// `stack` is that of a kernel with these arguments and two results of types Tensor[] and int.
unsafe fn run<const N: usize>(stack: *mut u64, work: impl FnOnce(&'static Shim, &Arguments<'_, N>, i64) -> Outcome) {
    let Some(shim) = shim() else { return };
    // SAFETY: passed on to the caller.
    let (tensors, number) = unsafe {
        let tensors: [Tensor; N] = std::array::from_fn(|place| shim.taken(stack.add(place).read()));
        (tensors, stack.add(N).read() as i64)
    };
    let arguments = Arguments::OfTorch(tensors);
    let Results { tensors, number, .. } = outcome_of(|| work(shim, &arguments, number));
    let (list, number) = match shim.list(tensors) {
        Some(list) => (list, number),
        None => (shim.list(Vec::new()).unwrap_or(0), number.min(0)),
    };
    // SAFETY: as above. There is room for two words, as there are at least two arguments.
    unsafe {
        stack.write(list);
        stack.add(1).write(number as u64);
    }
}

unsafe extern "C" fn dispatch(stack: *mut u64, _arguments: u64, _results: u64) {
    // SAFETY: `DISPATCH` has four tensors, a number, a list and a number.
    unsafe { run(stack, dispatched) };
}

unsafe extern "C" fn dispatch_into(stack: *mut u64, _arguments: u64, _results: u64) {
    // SAFETY: `DISPATCH_INTO` has nine tensors, a number, a list and a number.
    unsafe { run(stack, dispatched_into) };
}

unsafe extern "C" fn combine(stack: *mut u64, _arguments: u64, _results: u64) {
    // SAFETY: `COMBINE` has three tensors, a number, a list and a number.
    unsafe { run(stack, combined) };
}

unsafe extern "C" fn combine_into(stack: *mut u64, _arguments: u64, _results: u64) {
    // SAFETY: `COMBINE_INTO` has four tensors, a number, a list and a number.
    unsafe { run(stack, combined_into) };
}

unsafe extern "C" fn low_latency_dispatch(stack: *mut u64, _arguments: u64, _results: u64) {
    // SAFETY: `LOW_LATENCY_DISPATCH` has two tensors, a number, a list and a number.
    unsafe { run(stack, low_latency_dispatched) };
}

unsafe extern "C" fn low_latency_combine(stack: *mut u64, _arguments: u64, _results: u64) {
    // SAFETY: `LOW_LATENCY_COMBINE` has three tensors, a number, a list and a number.
    unsafe { run(stack, low_latency_combined) };
}

unsafe extern "C" fn low_latency_send(stack: *mut u64, _arguments: u64, _results: u64) {
    // SAFETY: `LOW_LATENCY_SEND` has two tensors, a number, a list and a number.
    unsafe { run(stack, low_latency_sent) };
}

unsafe extern "C" fn low_latency_send_back(stack: *mut u64, _arguments: u64, _results: u64) {
    // SAFETY: `LOW_LATENCY_SEND_BACK` has three tensors, a number, a list and a number.
    unsafe { run(stack, low_latency_sent_back) };
}

/// Memory of one output, or of several: then bytes.
struct Memory {
    sizes: Vec<i64>,
    strides: Vec<i64>,
    element: Element,
    /// How many calls of a stream take bytes of one memory, each those behind the ones of the call before.
    calls: i64,
    /// Whether there was a call: plans of one call take no memory for more.
    used: AtomicBool,
    /// Of some streams.
    shared: Mutex<Vec<SharedMemory>>,
}

/// Memory of which further calls take bytes.
struct SharedMemory {
    tensor: Tensor,
    stream: u64,
    /// Where those of the next call begin.
    next: i64,
}

/// Most calls that take bytes of one memory, and most bytes of it: they stay as long as any of these calls' outputs.
const SHARING_CALLS: i64 = 16;
const SHARED_BYTES: i64 = 4 << 20;
/// Streams whose calls share memory: two micro-batches may have one each. Calls of further ones have memory of their
/// own.
const SHARING_STREAMS: usize = 2;

impl Memory {
    fn new(sizes: Vec<i64>, strides: Vec<i64>, element: Element) -> Memory {
        Memory { sizes, strides, element, calls: 1, used: AtomicBool::new(false), shared: Mutex::new(Vec::new()) }
    }

    /// Lets calls share memory of bytes.
    fn share(&mut self) -> Option<()> {
        let bytes = aligned(self.sizes[0])?;
        self.calls = (SHARED_BYTES / bytes.max(1)).clamp(1, SHARING_CALLS);
        self.sizes[0] = bytes;
        Some(())
    }

    /// Memory for a call, and where its bytes begin there.
    fn made(&self, shim: &'static Shim, place: Place, stream: &Stream) -> Option<(Tensor, i64)> {
        let own = || Some((shim.empty(&self.sizes, &self.strides, self.element, place)?, 0));
        // What is made in a capture belongs to its graph.
        if self.calls == 1 || stream.is_capturing().unwrap_or(true) {
            return own();
        }
        let first = !self.used.swap(true, Ordering::Relaxed);
        if first {
            return own();
        }
        let (bytes, stream) = (self.sizes[0], stream.raw());
        let all_bytes = bytes * self.calls;
        let mut all = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|shared| shared.next < all_bytes && shared.tensor.has_bytes(all_bytes));
        if !all.iter().any(|shared| shared.stream == stream) {
            if all.len() == SHARING_STREAMS {
                return own();
            }
            let tensor = shim.empty(&[all_bytes], &[1], self.element, place)?;
            all.push(SharedMemory { tensor, stream, next: 0 });
        }
        let shared = all.iter_mut().find(|shared| shared.stream == stream)?;
        let taken = (shared.tensor.again()?, shared.next);
        shared.next += bytes;
        Some(taken)
    }
}

/// Bytes of which outputs begin at multiples in memory that they share, as tensors of their own do on a GPU.
const ALIGNED: i64 = 512;

fn aligned(bytes: i64) -> Option<i64> {
    Some(bytes.checked_add(ALIGNED - 1)? / ALIGNED * ALIGNED)
}

/// An output of a dispatch.
struct Made {
    name: &'static str,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    element: Element,
    /// Where it lies, by its memory's place among all and its offset there, in bytes.
    memory: usize,
    offset: i64,
    /// What is returned in place of the whole memory.
    seen: Option<Seen>,
}

/// A view, whose offset is that in its memory, in bytes.
struct Seen {
    sizes: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
}

/// What stays the same from one dispatch to the next.
struct Prepared {
    core: Arc<Core>,
    /// Of the context, in Python.
    context: i64,
    format: Format,
    layout: Layout,
    place: Place,
    memories: Vec<Memory>,
    made: Vec<Made>,
    /// Of scales.
    column_major: bool,
    drop_overflow: bool,
}

/// Dispatches of a context with outputs of the same layout and size, for `torch.ops.tokenyard._dispatch`.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct Plan {
    number: i64,
    _prepared: Arc<Prepared>,
}

static PLANS: Mutex<Option<HashMap<i64, Weak<Prepared>>>> = Mutex::new(None);

fn prepared(number: i64) -> Option<Arc<Prepared>> {
    PLANS.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(&number)?.upgrade()
}

/// Names and dtypes of outputs.
const NAMES: [&str; 9] =
    ["rows", "counts", "scales", "offsets", "token_experts", "token_weights", "source", "source_ranges", "row_count"];
const DTYPES: [(&str, Element); 6] = [
    ("bf16", Element::Bf16),
    ("fp16", Element::Fp16),
    ("fp32", Element::Fp32),
    ("fp8", Element::Fp8E4m3),
    ("i32", Element::I32),
    ("i64", Element::I64),
];

/// An output's name and elements, as Python has them.
fn named(name: &str, dtype: &str) -> PyResult<(&'static str, Element)> {
    let element = DTYPES.iter().find(|(known, _)| *known == dtype).map(|(_, element)| *element);
    NAMES
        .iter()
        .copied()
        .find(|known| *known == name)
        .zip(element)
        .ok_or_else(|| PyValueError::new_err(format!("no output is called {name} with elements of {dtype}")))
}

/// Elements of an array of this shape; None of more than can be counted.
fn elements(shape: &[usize]) -> Option<i64> {
    let all = shape.iter().try_fold(1usize, |all, length| all.checked_mul(*length))?;
    i64::try_from(all).ok()
}

/// Bytes of an array of this shape.
fn bytes(shape: &[usize], element: Element) -> Option<i64> {
    elements(shape)?.checked_mul(element.bytes() as i64)
}

/// A view in Python: the output's name, sizes, strides and offset, in elements.
type View = (String, Vec<i64>, Vec<i64>, i64);

#[pymethods]
impl Plan {
    /// `number`: of the context, in Python. `outputs`: name, shape and dtype of each, in the order in which the
    /// operator returns them after the handle. `column_major`: of scales. `views`: of outputs, which are returned in
    /// their place: name, sizes, strides and offset, in elements. `together`: names of outputs that share one memory in
    /// this order, in groups, since each memory takes time to make. torch may make the last of a group larger.
    /// `shared`: which group's memory is shared by several calls of a stream, too, from the second on and outside
    /// captures: of small outputs that live for a similar time. `drop_overflow`: as of an `Output`.
    #[new]
    #[pyo3(signature = (
        context, number, format, layout, align, outputs, *, column_major=false, views=None, together=None,
        shared=None, drop_overflow=false,
    ))]
    // The parameters are Python's.
    #[allow(clippy::too_many_arguments)]
    fn new(
        context: &Context,
        number: i64,
        format: &Format,
        layout: &str,
        align: usize,
        outputs: Vec<(String, Vec<usize>, String)>,
        column_major: bool,
        views: Option<Vec<View>>,
        together: Option<Vec<Vec<String>>>,
        shared: Option<usize>,
        drop_overflow: bool,
    ) -> PyResult<Plan> {
        let groups = together.unwrap_or_default();
        // The memory of each group, once it has an output.
        let mut of_groups: Vec<Option<usize>> = vec![None; groups.len()];
        let mut memories: Vec<Memory> = Vec::new();
        let mut of_output = |(name, shape, dtype): &(String, Vec<usize>, String)| -> PyResult<Made> {
            let (name, element) = named(name, dtype)?;
            let too_large =
                || PyValueError::new_err(format!("{name} would have the shape {shape:?}: give less capacity"));
            let signed = |lengths: &[usize]| -> PyResult<Vec<i64>> {
                let signed: Result<Vec<i64>, _> = lengths.iter().map(|length| i64::try_from(*length)).collect();
                signed.map_err(|_| too_large())
            };
            let (sizes, strides) = (signed(shape)?, signed(&packed(shape, 1))?);
            let Some(group) = groups.iter().position(|group| group.iter().any(|shares| shares == name)) else {
                memories.push(Memory::new(sizes.clone(), strides.clone(), element));
                return Ok(Made { name, sizes, strides, element, memory: memories.len() - 1, offset: 0, seen: None });
            };
            let memory = *of_groups[group].get_or_insert_with(|| {
                memories.push(Memory::new(vec![0], vec![1], Element::U8));
                memories.len() - 1
            });
            let before = groups[group].iter().take_while(|before| *before != name);
            let mut before = before.filter_map(|before| outputs.iter().find(|(other, ..)| other == before));
            let offset = before.try_fold(0i64, |all, (other, shape, dtype)| {
                let (_, element) = named(other, dtype)?;
                let own = bytes(shape, element).and_then(aligned);
                own.and_then(|own| all.checked_add(own)).ok_or_else(too_large)
            })?;
            let end = bytes(shape, element).and_then(|own| offset.checked_add(own)).ok_or_else(too_large)?;
            memories[memory].sizes[0] = memories[memory].sizes[0].max(end);
            let seen = Some(Seen { sizes: sizes.clone(), strides: strides.clone(), offset });
            Ok(Made { name, sizes, strides, element, memory, offset, seen })
        };
        let mut made: Vec<Made> = outputs.iter().map(&mut of_output).collect::<PyResult<_>>()?;
        if let Some(group) = shared {
            let memory = of_groups.get(group).copied().flatten().and_then(|memory| memories.get_mut(memory));
            let memory =
                memory.ok_or_else(|| PyValueError::new_err(format!("shared is {group}: no group has outputs")))?;
            memory
                .share()
                .ok_or_else(|| PyValueError::new_err("the outputs that are shared are too large: give less"))?;
        }
        let rows = outputs.iter().find(|(name, ..)| name == "rows").map(|(_, shape, _)| shape.as_slice());
        let layout = calls::layout(layout, align, rows.unwrap_or(&[]))?;
        let core = context.core();
        let place = core.place();
        let format = format.clone();
        for (name, sizes, strides, offset) in views.unwrap_or_default() {
            let output = made.iter_mut().find(|made| made.name == name);
            let output = output.ok_or_else(|| PyValueError::new_err(format!("no output is called {name}")))?;
            must_be_inside(output, &sizes, &strides, offset)?;
            let offset = offset.checked_mul(output.element.bytes() as i64).and_then(|it| output.offset.checked_add(it));
            let offset =
                offset.ok_or_else(|| PyValueError::new_err(format!("a view of {name} begins too far behind it")))?;
            output.seen = Some(Seen { sizes, strides, offset });
        }
        let context = number;
        let prepared = Prepared { core, context, format, layout, place, memories, made, column_major, drop_overflow };
        let prepared = Arc::new(prepared);
        static NUMBERS: AtomicI64 = AtomicI64::new(1);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
        plans.get_or_insert_with(HashMap::new).insert(number, Arc::downgrade(&prepared));
        Ok(Plan { number, _prepared: prepared })
    }

    /// What operators take, with flags in the lowest five bits: 1 with weights, 2 with scales; and of outputs of the
    /// caller 4 with scales, 8 with offsets or the tokens' experts, 16 with the tokens' weights.
    #[getter]
    fn number(&self) -> i64 {
        self.number << PLAN_FLAGS
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        if let Some(plans) = &mut *PLANS.lock().unwrap_or_else(PoisonError::into_inner) {
            plans.remove(&self.number);
        }
    }
}

/// Refuses a view that is not inside its output.
fn must_be_inside(output: &Made, sizes: &[i64], strides: &[i64], offset: i64) -> PyResult<()> {
    let elements = output.sizes.iter().try_fold(1i64, |all, length| all.checked_mul(*length));
    let last = sizes.iter().zip(strides).try_fold(offset, |last, (length, stride)| {
        if *length < 0 || *stride < 0 { None } else { last.checked_add((length - 1).max(0).checked_mul(*stride)?) }
    });
    let empty = sizes.contains(&0);
    let inside = last.zip(elements).is_some_and(|(last, elements)| empty || last < elements);
    if offset >= 0 && sizes.len() == strides.len() && inside {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("a view {sizes:?} of {} is not inside {:?}", output.name, output.sizes)))
}

/// Runs a call on the stream that is current, and on the CPU device to its end. `work` is given what the arguments with
/// names say, which may get other memory while another thread's call is waited for, enqueues the call, and returns what
/// it made.
fn on_device<const N: usize>(
    shim: &'static Shim,
    core: &Core,
    arguments: &Arguments<'_, N>,
    names: [Option<&'static str>; N],
    work: impl FnOnce([Option<Array>; N], &Open, &Stream) -> Result<Results, Failure> + Send,
) -> Outcome {
    let Some(ordinal) = core.ordinal() else {
        let done = with_lock(|py| {
            let (ep, stream, _held) = core.begin(py, 0)?;
            let arrays = arguments.arrays(names)?;
            // Other threads may hold what it needs for a moment.
            let made = py.detach(|| work(arrays, &ep, &stream))?;
            let used = || -> Box<dyn Any + Send> { Box::new((arguments.again(), again(&made.tensors))) };
            let raised = core.finished_with(py, &ep, used).err();
            Ok((made, raised))
        });
        return done.unwrap_or(Err(Failure::NotHere));
    };
    let Some(ep) = core.ep.open() else {
        // Closed, or of another process.
        let refused = with_lock(|py| core.ep.get(py).err()).flatten();
        return Err(refused.map_or(Failure::NotHere, Failure::Raised));
    };
    let stream = shim.current_stream(ordinal).ok_or(Failure::NotHere)?;
    // SAFETY: torch's streams live as long as the process.
    let stream = unsafe { ep.device.stream_from_raw(stream) }?;
    let arrays = arguments.arrays(names)?;
    let made = match arguments.lock() {
        // As above.
        Some(py) => py.detach(|| work(arrays, &ep, &stream)),
        None => work(arrays, &ep, &stream),
    };
    Ok((made?, None))
}

/// The name of an argument that a call has if a flag says so.
fn flagged(flags: i64, flag: i64, name: &'static str) -> Option<&'static str> {
    (flags & flag != 0).then_some(name)
}

/// What a dispatch is given.
fn given(arrays: [Option<Array>; 4]) -> Result<Given, Failure> {
    let [Some(x), Some(topk_idx), topk_weights, scales] = arrays else { return Err(Failure::NotHere) };
    Ok(Given { x, topk_idx, topk_weights, scales, count: None, payload: None })
}

fn dispatched(shim: &'static Shim, arguments: &Arguments<'_, 4>, plan: i64) -> Outcome {
    let prepared = prepared(plan >> PLAN_FLAGS).ok_or(Failure::NotHere)?;
    let [weights, scales] = [flagged(plan, WEIGHTS, "topk_weights"), flagged(plan, SCALES, "scales")];
    let work = |arrays: [_; 4], ep: &Open, stream: &Stream| {
        let given = given(arrays)?;
        let slot = handles::slot(shim, &prepared.core).ok_or(Failure::NotHere)?;
        let (mut made, parts) = prepared.dispatch(shim, ep, stream, &given)?;
        made.insert(0, prepared.handle(slot, parts));
        Ok(made.into())
    };
    on_device(shim, &prepared.core, arguments, [Some("x"), Some("topk_idx"), weights, scales], work)
}

/// A dispatch whose handle is a number.
fn low_latency_dispatched(shim: &'static Shim, arguments: &Arguments<'_, 2>, plan: i64) -> Outcome {
    let prepared = prepared(plan >> PLAN_FLAGS).ok_or(Failure::NotHere)?;
    let work = |arrays: [_; 2], ep: &Open, stream: &Stream| {
        let (tensors, parts) = prepared.dispatch(shim, ep, stream, &prepared.low_latency_given(arrays)?)?;
        let (core, layout) = (prepared.core.clone(), calls::layout_name(prepared.layout));
        let handle = handles::numbered(core, prepared.context, layout, parts);
        Ok(Results { tensors, number: handles::number(handle), returned: None })
    };
    on_device(shim, &prepared.core, arguments, LOW_LATENCY, work)
}

/// What a low-latency dispatch is given.
const LOW_LATENCY: [Option<&str>; 2] = [Some("x"), Some("topk_idx")];

/// Its sending half.
fn low_latency_sent(shim: &'static Shim, arguments: &Arguments<'_, 2>, plan: i64) -> Outcome {
    let prepared = prepared(plan >> PLAN_FLAGS).ok_or(Failure::NotHere)?;
    let reads = arguments.again();
    let work = |arrays: [_; 2], ep: &Open, stream: &Stream| {
        let given = prepared.low_latency_given(arrays)?;
        let call = prepared.core.call_of(ep, &prepared.format);
        let (tokens, room) = calls::tokens(&call, &given)?;
        let (made, output, places) = prepared.outputs(shim, &call, stream)?;
        let sent = ep.dispatch_send(stream, &tokens)?;
        let Prepared { context, layout, ref format, ref core, .. } = *prepared;
        let format = format.clone();
        let half = halves::DispatchHalf { sent, output, context, layout, tokens: room, format, places };
        let sent = halves::Way::Dispatch(Box::new(half));
        let number = halves::number(core.clone(), sent, reads, again(&made));
        Ok(Results { number, ..Results::from(made) })
    };
    on_device(shim, &prepared.core, arguments, LOW_LATENCY, work)
}

fn dispatched_into(shim: &'static Shim, arguments: &Arguments<'_, 9>, plan: i64) -> Outcome {
    let prepared = prepared(plan >> PLAN_FLAGS).ok_or(Failure::NotHere)?;
    let first = match prepared.layout {
        Layout::Token { .. } => "token_experts",
        _ => "offsets",
    };
    let [weights, scales] = [flagged(plan, WEIGHTS, "topk_weights"), flagged(plan, SCALES, "scales")];
    let names = [
        Some("x"),
        Some("topk_idx"),
        weights,
        scales,
        Some("rows"),
        Some("counts"),
        flagged(plan, ROW_SCALES, "scales"),
        flagged(plan, FIRST, first),
        flagged(plan, SECOND, "token_weights"),
    ];
    let work = |arrays: [_; 9], ep: &Open, stream: &Stream| {
        let [x, topk_idx, weights, scales, Some(rows), Some(counts), row_scales, experts, token_weights] = arrays
        else {
            return Err(Failure::NotHere);
        };
        let given = given([x, topk_idx, weights, scales])?;
        let others = [(first, experts), ("token_weights", token_weights)].into_iter();
        let others = others.filter_map(|(name, array)| Some((name, array?))).collect();
        let align = if let Layout::Contiguous { align, .. } = prepared.layout { align } else { 1 };
        let layout = calls::layout_name(prepared.layout);
        let output =
            Output::of_arrays(layout, align, rows, counts, row_scales, others)?.dropping(prepared.drop_overflow)?;
        let call = prepared.core.call_of(ep, &prepared.format);
        let (tokens, room) = calls::tokens(&call, &given)?;
        let to = output.given(&call, 0)?;
        let slot = handles::slot(shim, &prepared.core).ok_or(Failure::NotHere)?;
        let inner = ep.dispatch(stream, &tokens, &to)?;
        let (format, places) = (prepared.format.clone(), output.places().into());
        Ok(vec![prepared.handle(slot, Parts { inner, tokens: room, format, places })].into())
    };
    on_device(shim, &prepared.core, arguments, names, work)
}

impl Prepared {
    /// What a low-latency dispatch is given.
    fn low_latency_given(&self, [x, topk_idx]: [Option<Array>; 2]) -> Result<Given, Failure> {
        let given = given([x, topk_idx, None, None])?;
        self.must_suit(&given)?;
        Ok(given)
    }

    /// Refuses tensors that are not as low-latency calls have them; Python says why.
    fn must_suit(&self, given: &Given) -> Result<(), Failure> {
        let (format, x, ids) = (&self.format, &given.x, &given.topk_idx);
        let kinds = x.element == Element::Bf16 && matches!(ids.element, Element::I32 | Element::I64);
        let (&[tokens, hidden], &[of, choices]) = (x.shape(), ids.shape()) else { return Err(Failure::NotHere) };
        let fits = hidden == format.inner.hidden && tokens <= format.inner.max_tokens && choices <= self.core.top_k();
        let suits = kinds && fits && of == tokens && x.place() == self.place && ids.place() == self.place;
        if suits { Ok(()) } else { Err(Failure::NotHere) }
    }

    /// The outputs, and what a handle is.
    fn dispatch(
        &self,
        shim: &'static Shim,
        ep: &Inside,
        stream: &Stream,
        given: &Given,
    ) -> Result<(Vec<Tensor>, Parts), Failure> {
        let call = self.core.call_of(ep, &self.format);
        let (tokens, room) = calls::tokens(&call, given)?;
        let (made, output, places) = self.outputs(shim, &call, stream)?;
        let inner = ep.dispatch(stream, &tokens, &output)?;
        Ok((made, Parts { inner, tokens: room, format: self.format.clone(), places }))
    }

    /// The outputs, as torch and as the API take them, and where rows lie.
    fn outputs(
        &self,
        shim: &'static Shim,
        call: &Call<'_>,
        stream: &Stream,
    ) -> Result<(Vec<Tensor>, tokenyard::Output, Dimensions), Failure> {
        let mut memories = Vec::with_capacity(self.memories.len());
        for memory in &self.memories {
            let (tensor, begin) = memory.made(shim, self.place, stream).ok_or(Failure::NotHere)?;
            let address = tensor.address().ok_or(Failure::NotHere)?;
            memories.push((Some(tensor), address, begin));
        }
        // One more for a handle's tensor.
        let mut made = Vec::with_capacity(1 + self.made.len());
        let (mut rows, mut counts, mut scales, mut others) = (None, None, None, Vec::with_capacity(self.made.len()));
        for Made { name, sizes, strides, element, memory, offset, seen } in &self.made {
            let (tensor, address, begin) = &mut memories[*memory];
            let address = *address + (*begin + *offset) as u64;
            let array = Array::of_operator(name, address, sizes, strides, *element, self.place);
            match *name {
                "rows" => rows = Some(array),
                "counts" => counts = Some(array),
                "scales" => scales = Some(array),
                other => others.push((other, array)),
            }
            let shown = match (seen, tensor.as_ref()) {
                (Some(seen), Some(tensor)) => tensor.part(*begin + seen.offset, *element, &seen.sizes, &seen.strides),
                _ => tensor.take(),
            };
            made.push(shown.ok_or(Failure::NotHere)?);
        }
        let (Some(rows), Some(counts)) = (rows, counts) else { return Err(Failure::NotHere) };
        let places = rows.places().into();
        let output = Output::made(self.layout, rows, counts, scales, self.column_major, others);
        let output = output.dropping(self.drop_overflow)?.given(call, 0)?;
        Ok((made, output, places))
    }

    /// The tensor that stands for a handle.
    fn handle(&self, slot: Slot, parts: Parts) -> Tensor {
        slot.filled(self.core.clone(), self.context, calls::layout_name(self.layout), parts)
    }
}

/// What a handle's tensor stands for.
fn kept_of<const N: usize>(arguments: &Arguments<'_, N>, place: usize) -> Result<Arc<handles::Kept>, Failure> {
    let mut names = [None; N];
    names[place] = Some("handle");
    let array = arguments.arrays(names)?.into_iter().flatten().next();
    array.and_then(|array| handles::found(&array)).ok_or(Failure::NotHere)
}

fn combined(shim: &'static Shim, arguments: &Arguments<'_, 3>, tokens: i64) -> Outcome {
    // More tokens than the dispatch had are refused elsewhere.
    let kept = kept_of(arguments, 1)?;
    if tokens >> 1 > kept.parts.tokens as i64 {
        return Err(Failure::NotHere);
    }
    let work = |[rows, _, weights]: [_; 3], ep: &Open, stream: &Stream| {
        Combining::of(rows, weights)?.sums(shim, &kept, ep, stream, tokens >> 1)
    };
    let names = [Some("rows"), None, flagged(tokens, WEIGHTS, "topk_weights")];
    on_device(shim, &kept.core, arguments, names, work)
}

/// What a low-latency combine is given.
const LOW_LATENCY_BACK: [Option<&str>; 3] = [Some("rows"), Some("topk_idx"), Some("topk_weights")];

/// A combine of a dispatch whose handle is a number.
fn low_latency_combined(shim: &'static Shim, arguments: &Arguments<'_, 3>, handle: i64) -> Outcome {
    let kept = handles::of_number(handle).ok_or(Failure::NotHere)?;
    let tokens = kept.parts.tokens as i64;
    let work = |arrays: [_; 3], ep: &Open, stream: &Stream| {
        Combining::of_low_latency(arrays, &kept)?.sums(shim, &kept, ep, stream, tokens)
    };
    on_device(shim, &kept.core, arguments, LOW_LATENCY_BACK, work)
}

/// Its sending half.
fn low_latency_sent_back(shim: &'static Shim, arguments: &Arguments<'_, 3>, handle: i64) -> Outcome {
    let kept = handles::of_number(handle).ok_or(Failure::NotHere)?;
    let reads = arguments.again();
    let work = |arrays: [_; 3], ep: &Open, stream: &Stream| {
        let (core, parts) = (&kept.core, &kept.parts);
        let combining = Combining::of_low_latency(arrays, &kept)?;
        let call = core.call_of(ep, &parts.format);
        let out = combining.empty(shim, &kept, parts.tokens as i64)?;
        let weights = combining.weights.as_ref();
        let (from, _) = core.expert_rows(&call, &combining.rows, parts, weights, Some(combining.dtype))?;
        let to = core.sums(&call, &out.array("out").ok_or(Failure::NotHere)?, false, None)?;
        let sent = ep.combine_send(stream, &parts.inner, &from)?;
        let sent = halves::Way::Combine(Box::new(halves::CombineHalf { sent, to }));
        let number = halves::number(core.clone(), sent, reads, again([&out]));
        Ok(Results { number, ..Results::from(vec![out]) })
    };
    on_device(shim, &kept.core, arguments, LOW_LATENCY_BACK, work)
}

fn combined_into(shim: &'static Shim, arguments: &Arguments<'_, 4>, flags: i64) -> Outcome {
    let kept = kept_of(arguments, 1)?;
    // Before the call: without what it returns it would be made again.
    let done = Results { tensors: arguments.returned(3)?, number: 0, returned: Some(3) };
    let work = |[rows, _, weights, out]: [_; 4], ep: &Open, stream: &Stream| {
        let (call, out) = (Combining::of(rows, weights)?, out.ok_or(Failure::NotHere)?);
        call.combine(&kept, ep, stream, &out, flags & ACCUMULATE != 0)?;
        Ok(done)
    };
    let names = [Some("rows"), None, flagged(flags, WEIGHTS, "topk_weights"), Some("out")];
    on_device(shim, &kept.core, arguments, names, work)
}

/// What a combine is given.
struct Combining {
    rows: Array,
    weights: Option<Array>,
    dtype: Dtype,
}

impl Combining {
    fn of(rows: Option<Array>, weights: Option<Array>) -> Result<Combining, Failure> {
        let rows = rows.ok_or(Failure::NotHere)?;
        // torch has bf16 of its own.
        let dtype = rows.element.of_sums().filter(|_| rows.element != Element::U16).ok_or(Failure::NotHere)?;
        Ok(Combining { rows, weights, dtype })
    }

    /// Of a low-latency combine.
    fn of_low_latency([rows, ids, weights]: [Option<Array>; 3], kept: &handles::Kept) -> Result<Combining, Failure> {
        let (ids, call) = (ids.ok_or(Failure::NotHere)?, Combining::of(rows, weights)?);
        let wanted = [kept.parts.tokens, kept.core.top_k()];
        let numbers = matches!(ids.element, Element::I32 | Element::I64);
        // Python knows more of fewer choices, and copies weights. Another number of weights is refused as anywhere.
        let weights = call.weights.as_ref().filter(|weights| weights.element == Element::Fp32);
        if !numbers || ids.shape() != wanted || weights.is_none_or(|weights| weights.must_be_contiguous().is_err()) {
            return Err(Failure::NotHere);
        }
        Ok(call)
    }

    /// Sums of so many tokens, in memory of their own.
    fn sums(
        &self,
        shim: &'static Shim,
        kept: &handles::Kept,
        ep: &Open,
        stream: &Stream,
        tokens: i64,
    ) -> Result<Results, Failure> {
        let out = self.empty(shim, kept, tokens)?;
        self.combine(kept, ep, stream, &out.array("out").ok_or(Failure::NotHere)?, false)?;
        Ok(vec![out].into())
    }

    /// Memory of sums of so many tokens.
    fn empty(&self, shim: &'static Shim, kept: &handles::Kept, tokens: i64) -> Result<Tensor, Failure> {
        let (hidden, place) = (kept.parts.format.inner.hidden as i64, kept.core.place());
        let (sizes, strides) = ([tokens, hidden], [hidden, 1]);
        shim.empty(&sizes, &strides, self.rows.element, place).ok_or(Failure::NotHere)
    }

    fn combine(
        &self,
        kept: &handles::Kept,
        ep: &Open,
        stream: &Stream,
        out: &Array,
        accumulate: bool,
    ) -> Result<(), Failure> {
        let (core, parts) = (&kept.core, &kept.parts);
        let call = core.call_of(ep, &parts.format);
        let (from, _) = core.expert_rows(&call, &self.rows, parts, self.weights.as_ref(), Some(self.dtype))?;
        let to = core.sums(&call, out, accumulate, None)?;
        Ok(ep.combine(stream, &parts.inner, &from, &to)?)
    }
}
