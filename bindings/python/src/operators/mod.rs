//! Operators of torch whose kernels are in C: `torch.ops.tokenyard._dispatch`, `_dispatch_into`, `_combine` and
//! `_combine_into`, for eager calls without gradients. bindings/python/tokenyard/ops.py has what calls them, and
//! operators in Python for everything else.
//!
//! A call has no Python in it: torch gives back the interpreter's lock, and on a GPU the kernel takes it for errors
//! alone. It returns no tensors where the call is none for it, or raises something, which `take_pending` then has.

mod handles;
mod shim;

use super::arrays::{Array, Element, Place, packed};
use super::calls::{self, Given, Output};
use super::context::{Context, Core, Inside, Open, Parts};
use super::errors;
use super::formats::Format;
use super::lock::with_lock;
use handles::Slot;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use shim::{Shim, Tensor, shim};
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tokenyard::{Dtype, Layout, Stream};

pub(super) use handles::{Slots, operator_handle, operator_handles};

/// The operators' schemas. Tensors that a call lacks are `x` or `rows` once more, as flags say. `first` and `second`
/// are offsets alone, or in the token layout experts and weights of tokens. Tensors that are written are none of the
/// schemas' business: nothing traces these operators, and Python counts the writes.
const DISPATCH: &CStr =
    c"_dispatch(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor scales, int plan) -> Tensor[]";
const DISPATCH_INTO: &CStr = c"_dispatch_into(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor scales, \
    Tensor rows, Tensor counts, Tensor row_scales, Tensor first, Tensor second, int plan) -> Tensor[]";
const COMBINE: &CStr = c"_combine(Tensor rows, Tensor handle, Tensor topk_weights, int tokens) -> Tensor[]";
const COMBINE_INTO: &CStr =
    c"_combine_into(Tensor rows, Tensor handle, Tensor topk_weights, Tensor out, int flags) -> Tensor[]";
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
        })
    })
}

thread_local! {
    /// What the last call of this thread raised.
    static PENDING: Cell<Option<PyErr>> = const { Cell::new(None) };
}

/// The exception of this thread's last call, once.
#[pyfunction]
pub(super) fn take_pending(py: Python<'_>) -> Option<Py<PyAny>> {
    PENDING.take().map(|raised| raised.into_value(py).into_any())
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

/// A call's tensors, and what is to be raised all the same: of a call that took place.
type Outcome = Result<(Vec<Tensor>, Option<PyErr>), Failure>;

/// Notes what a call raised. Returns its tensors.
fn settled(outcome: Outcome) -> Vec<Tensor> {
    let (tensors, raised) = match outcome {
        Ok(made) => made,
        Err(Failure::NotHere) => (Vec::new(), None),
        Err(Failure::Raised(raised)) => (Vec::new(), Some(raised)),
        Err(Failure::Library(error)) => {
            let raised = with_lock(|py| errors::raised(py, &error));
            let raised = raised.unwrap_or_else(|| PyRuntimeError::new_err(error.to_string()));
            (Vec::new(), Some(raised))
        }
    };
    if let Some(former) = PENDING.replace(raised) {
        // Nobody took it.
        with_lock(|_| drop(former));
    }
    tensors
}

/// Runs a kernel: `count` tensors and a number become a list.
///
/// # Safety
/// `stack` is that of a kernel with these arguments and one result of type Tensor[].
unsafe fn run<const N: usize>(stack: *mut u64, work: impl FnOnce(&'static Shim, [Tensor; N], i64) -> Outcome) {
    let Some(shim) = shim() else { return };
    // SAFETY: passed on to the caller.
    let (tensors, number) = unsafe {
        let tensors: [Tensor; N] = std::array::from_fn(|place| shim.taken(stack.add(place).read()));
        (tensors, stack.add(N).read() as i64)
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| work(shim, tensors, number)));
    let outcome = outcome.unwrap_or_else(|_| {
        Err(Failure::Raised(PyRuntimeError::new_err("an operator panicked: report it, with the call")))
    });
    let list = shim.list(settled(outcome)).or_else(|| shim.list(Vec::new())).unwrap_or(0);
    // SAFETY: as above.
    unsafe { stack.write(list) };
}

unsafe extern "C" fn dispatch(stack: *mut u64, _arguments: u64, _results: u64) {
    // SAFETY: `DISPATCH` has four tensors, a number and a list.
    unsafe { run(stack, dispatched) };
}

unsafe extern "C" fn dispatch_into(stack: *mut u64, _arguments: u64, _results: u64) {
    // SAFETY: `DISPATCH_INTO` has nine tensors, a number and a list.
    unsafe { run(stack, dispatched_into) };
}

unsafe extern "C" fn combine(stack: *mut u64, _arguments: u64, _results: u64) {
    // SAFETY: `COMBINE` has three tensors, a number and a list.
    unsafe { run(stack, combined) };
}

unsafe extern "C" fn combine_into(stack: *mut u64, _arguments: u64, _results: u64) {
    // SAFETY: `COMBINE_INTO` has four tensors, a number and a list.
    unsafe { run(stack, combined_into) };
}

/// An output of a dispatch.
struct Made {
    name: &'static str,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    element: Element,
}

/// A view of an output, which is returned in its place.
struct Seen {
    name: &'static str,
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
    made: Vec<Made>,
    /// Of scales.
    column_major: bool,
    seen: Vec<Seen>,
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
const NAMES: [&str; 8] =
    ["rows", "counts", "scales", "offsets", "token_experts", "token_weights", "source", "source_ranges"];
const DTYPES: [(&str, Element); 6] = [
    ("bf16", Element::Bf16),
    ("fp16", Element::Fp16),
    ("fp32", Element::Fp32),
    ("fp8", Element::Fp8E4m3),
    ("i32", Element::I32),
    ("i64", Element::I64),
];

/// A view in Python: the output's name, sizes, strides and offset, in elements.
type View = (String, Vec<i64>, Vec<i64>, i64);

#[pymethods]
impl Plan {
    /// `number`: of the context, in Python. `outputs`: name, shape and dtype of each, in the order in which the
    /// operator returns them after the handle. `column_major`: of scales. `views`: of outputs, which are returned in
    /// their place: name, sizes, strides and offset, in elements.
    #[new]
    #[pyo3(signature = (context, number, format, layout, align, outputs, *, column_major=false, views=None))]
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
    ) -> PyResult<Plan> {
        let of_output = |(name, shape, dtype): &(String, Vec<usize>, String)| -> PyResult<Made> {
            let element = DTYPES.iter().find(|(known, _)| known == dtype).map(|(_, element)| *element);
            let (Some(name), Some(element)) = (NAMES.iter().copied().find(|known| known == name), element) else {
                return Err(PyValueError::new_err(format!("no output is called {name} with elements of {dtype}")));
            };
            let signed = |lengths: &[usize]| -> PyResult<Vec<i64>> {
                let signed: Result<Vec<i64>, _> = lengths.iter().map(|length| i64::try_from(*length)).collect();
                signed.map_err(|_| {
                    PyValueError::new_err(format!("{name} would have the shape {shape:?}: give less capacity"))
                })
            };
            Ok(Made { name, sizes: signed(shape)?, strides: signed(&packed(shape, 1))?, element })
        };
        let made: Vec<Made> = outputs.iter().map(of_output).collect::<PyResult<_>>()?;
        let rows = outputs.iter().find(|(name, ..)| name == "rows").map(|(_, shape, _)| shape.as_slice());
        let layout = calls::layout(layout, align, rows.unwrap_or(&[]))?;
        let core = context.core();
        let place = core.place();
        let format = format.clone();
        let of_view = |(name, sizes, strides, offset): View| -> PyResult<Seen> {
            let output = made.iter().find(|made| made.name == name);
            let output = output.ok_or_else(|| PyValueError::new_err(format!("no output is called {name}")))?;
            must_be_inside(output, &sizes, &strides, offset)?;
            Ok(Seen { name: output.name, sizes, strides, offset })
        };
        let seen = views.unwrap_or_default().into_iter().map(of_view).collect::<PyResult<_>>()?;
        let prepared = Prepared { core, context: number, format, layout, place, made, column_major, seen };
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

/// An argument that Python knows more of is none for these operators.
fn read(name: &'static str, tensor: &Tensor) -> Result<Array, Failure> {
    tensor.array(name).ok_or(Failure::NotHere)
}

/// Runs a call on the stream that is current, and on the CPU device to its end. `work` enqueues it, and returns what
/// the call made; `used`, what its memory lasts as long as.
fn on_device(
    shim: &'static Shim,
    core: &Core,
    work: impl FnOnce(&Open, &Stream) -> Result<Vec<Tensor>, Failure> + Send,
    used: impl FnOnce(&[Tensor]) -> Vec<Tensor>,
) -> Outcome {
    let Some(ordinal) = core.ordinal() else {
        let done = with_lock(|py| {
            let (ep, stream, _held) = core.begin(py, 0)?;
            // Other threads may hold what it needs for a moment.
            let made = py.detach(|| work(&ep, &stream))?;
            let raised = core.finished_with(py, &ep, || Box::new(used(&made))).err();
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
    Ok((work(&ep, &stream)?, None))
}

/// The tensors of a call: what it was given, and what it made.
fn used<const N: usize>(given: [Tensor; N], made: &[Tensor]) -> Vec<Tensor> {
    given.into_iter().chain(made.iter().filter_map(Tensor::again)).collect()
}

/// What a dispatch is given, by the flags of its plan.
fn given(tensors: &[Tensor], plan: i64) -> Result<Given, Failure> {
    let [x, topk_idx, topk_weights, scales, ..] = tensors else { return Err(Failure::NotHere) };
    Ok(Given {
        x: read("x", x)?,
        topk_idx: read("topk_idx", topk_idx)?,
        topk_weights: flagged(plan, WEIGHTS, "topk_weights", topk_weights)?,
        scales: flagged(plan, SCALES, "scales", scales)?,
        count: None,
        payload: None,
    })
}

/// A tensor that a call has if a flag says so.
fn flagged(flags: i64, flag: i64, name: &'static str, tensor: &Tensor) -> Result<Option<Array>, Failure> {
    if flags & flag == 0 { Ok(None) } else { read(name, tensor).map(Some) }
}

fn dispatched(shim: &'static Shim, tensors: [Tensor; 4], plan: i64) -> Outcome {
    let prepared = prepared(plan >> PLAN_FLAGS).ok_or(Failure::NotHere)?;
    let given = given(&tensors, plan)?;
    let work = |ep: &Open, stream: &Stream| prepared.dispatch(shim, ep, stream, &given);
    // What torch was given lasts as long as the tensors of the call.
    on_device(shim, &prepared.core, work, |made| used(tensors, made))
}

fn dispatched_into(shim: &'static Shim, tensors: [Tensor; 9], plan: i64) -> Outcome {
    let prepared = prepared(plan >> PLAN_FLAGS).ok_or(Failure::NotHere)?;
    let given = given(&tensors, plan)?;
    let [.., rows, counts, scales, first, second] = &tensors;
    let names = match prepared.layout {
        Layout::Token { .. } => ("token_experts", "token_weights"),
        _ => ("offsets", "token_weights"),
    };
    let mut others = Vec::with_capacity(2);
    for (flag, name, tensor) in [(FIRST, names.0, first), (SECOND, names.1, second)] {
        others.extend(flagged(plan, flag, name, tensor)?.map(|array| (name, array)));
    }
    let scales = flagged(plan, ROW_SCALES, "scales", scales)?;
    let align = if let Layout::Contiguous { align, .. } = prepared.layout { align } else { 1 };
    let (layout, rows, counts) = (calls::layout_name(prepared.layout), read("rows", rows)?, read("counts", counts)?);
    let output = Output::of_arrays(layout, align, rows, counts, scales, others)?;
    let work = |ep: &Open, stream: &Stream| {
        let call = prepared.core.call_of(ep, &prepared.format);
        let (tokens, room) = calls::tokens(&call, &given)?;
        let to = output.given(&call, 0)?;
        let slot = handles::slot(shim, &prepared.core).ok_or(Failure::NotHere)?;
        let inner = ep.dispatch(stream, &tokens, &to)?;
        Ok(vec![prepared.handle(slot, inner, room, output.places().to_vec())])
    };
    on_device(shim, &prepared.core, work, |made| used(tensors, made))
}

impl Prepared {
    /// The handle, and the outputs.
    fn dispatch(
        &self,
        shim: &'static Shim,
        ep: &Inside,
        stream: &Stream,
        given: &Given,
    ) -> Result<Vec<Tensor>, Failure> {
        let call = self.core.call_of(ep, &self.format);
        let (tokens, room) = calls::tokens(&call, given)?;
        let mut made = Vec::with_capacity(1 + self.made.len());
        let (mut rows, mut counts, mut scales, mut others) = (None, None, None, Vec::new());
        for Made { name, sizes, strides, element } in &self.made {
            let tensor = shim.empty(sizes, strides, *element, self.place).ok_or(Failure::NotHere)?;
            let address = tensor.address().ok_or(Failure::NotHere)?;
            let array = Array::of_operator(name, address, sizes, strides, *element, self.place);
            match *name {
                "rows" => rows = Some(array),
                "counts" => counts = Some(array),
                "scales" => scales = Some(array),
                other => others.push((other, array)),
            }
            made.push(tensor);
        }
        let (Some(rows), Some(counts)) = (rows, counts) else { return Err(Failure::NotHere) };
        let places = rows.places().to_vec();
        let output = Output::made(self.layout, rows, counts, scales, self.column_major, others).given(&call, 0)?;
        let slot = handles::slot(shim, &self.core).ok_or(Failure::NotHere)?;
        for Seen { name, sizes, strides, offset } in &self.seen {
            let Some(place) = self.made.iter().position(|made| made.name == *name) else { continue };
            made[place] = made[place].view(sizes, strides, *offset).ok_or(Failure::NotHere)?;
        }
        let inner = ep.dispatch(stream, &tokens, &output)?;
        made.insert(0, self.handle(slot, inner, room, places));
        Ok(made)
    }

    /// The tensor that stands for a handle.
    fn handle(&self, slot: Slot, inner: tokenyard::Handle, tokens: usize, places: Vec<usize>) -> Tensor {
        let parts = Parts { inner, tokens, format: self.format.clone(), places };
        slot.filled(self.core.clone(), self.context, calls::layout_name(self.layout), parts)
    }
}

fn combined(shim: &'static Shim, tensors: [Tensor; 3], tokens: i64) -> Outcome {
    let [rows, handle, topk_weights] = &tensors;
    let (kept, call) = combining(rows, handle, topk_weights, tokens)?;
    let work = |ep: &Open, stream: &Stream| {
        let hidden = kept.parts.format.inner.hidden as i64;
        let (sizes, strides) = ([tokens >> 1, hidden], [hidden, 1]);
        let out = shim.empty(&sizes, &strides, call.rows.element, kept.core.place()).ok_or(Failure::NotHere)?;
        call.combine(&kept, ep, stream, &read("out", &out)?, false)?;
        Ok(vec![out])
    };
    on_device(shim, &kept.core, work, |made| used(tensors, made))
}

fn combined_into(shim: &'static Shim, tensors: [Tensor; 4], flags: i64) -> Outcome {
    let [rows, handle, topk_weights, out] = &tensors;
    let (kept, call) = combining(rows, handle, topk_weights, flags)?;
    let to = read("out", out)?;
    let done = vec![out.again().ok_or(Failure::NotHere)?];
    let work = |ep: &Open, stream: &Stream| {
        call.combine(&kept, ep, stream, &to, flags & ACCUMULATE != 0)?;
        Ok(done)
    };
    on_device(shim, &kept.core, work, |made| used(tensors, made))
}

/// What a combine is given.
struct Combining {
    rows: Array,
    weights: Option<Array>,
    dtype: Dtype,
}

/// The handle's dispatch, and the rest.
fn combining(
    rows: &Tensor,
    handle: &Tensor,
    weights: &Tensor,
    flags: i64,
) -> Result<(Arc<handles::Kept>, Combining), Failure> {
    let kept = handles::found(handle).ok_or(Failure::NotHere)?;
    let (rows, weights) = (read("rows", rows)?, flagged(flags, WEIGHTS, "topk_weights", weights)?);
    // torch has bf16 of its own.
    let dtype = rows.element.of_sums().filter(|_| rows.element != Element::U16).ok_or(Failure::NotHere)?;
    Ok((kept, Combining { rows, weights, dtype }))
}

impl Combining {
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
