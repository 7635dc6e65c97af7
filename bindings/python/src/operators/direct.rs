//! The operators' calls without torch's dispatcher, which takes as long as the call itself: functions in Python that
//! take and return what the operators do. What torch does around an operator (traces, gradients, profiles) needs the
//! operator, and bindings/python/tokenyard/_eager.py asks for that before.

use super::arguments::Arguments;
use super::shim::{Shim, Tensor, shim};
use super::{Outcome, Results, outcome_of};
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyTuple};
use std::mem::forget;
use std::ptr::null;

/// Functions of torch.
struct Torch {
    /// What torch's own compiled functions have their results made by: a list of capsules of `AtenTensorHandle`, which
    /// it takes over, becomes a list of tensors.
    made_of: Py<PyAny>,
    /// Whether a profiler runs, which knows of operators alone.
    profiled: Py<PyAny>,
    operators: [Py<PyAny>; 8],
}

static TORCH: PyOnceLock<Option<Torch>> = PyOnceLock::new();

/// Whether the torch that is loaded has what these functions need. Takes the operators, in the order of `calls`, which
/// they call where a profiler runs.
#[pyfunction]
pub(crate) fn direct_calls(py: Python<'_>, operators: [Py<PyAny>; 8]) -> bool {
    let found = || -> PyResult<Torch> {
        let of_torch = |module: &str, name: &str| Ok::<_, PyErr>(py.import(module)?.getattr(name)?.unbind());
        let made_of = of_torch("torch._C._aoti", "alloc_tensors_by_stealing_from_void_ptrs")?;
        let profiled = of_torch("torch._C._autograd", "_profiler_enabled")?;
        Ok(Torch { made_of, profiled, operators })
    };
    TORCH.get_or_init(py, || found().ok()).is_some()
}

type Returned<'py> = PyResult<(Bound<'py, PyAny>, i64)>;

/// A call with these tensors. `place`: of its operator.
fn called<'py, const N: usize>(
    py: Python<'py>,
    place: usize,
    objects: [&Bound<'py, PyAny>; N],
    number: i64,
    work: impl FnOnce(&'static Shim, &Arguments<'_, N>, i64) -> Outcome,
) -> Returned<'py> {
    let Some((shim, torch)) = shim().zip(TORCH.get(py).and_then(Option::as_ref)) else {
        return Err(PyRuntimeError::new_err("this torch has no direct calls: call the operator"));
    };
    if torch.profiled.bind(py).call0()?.is_truthy()? {
        let number = number.into_pyobject(py)?.into_any();
        let arguments: Vec<_> = objects.into_iter().chain([&number]).collect();
        let arguments = PyTuple::new(py, arguments)?;
        return torch.operators[place].bind(py).call1(arguments)?.extract();
    }
    let arguments = Arguments::OfPython(objects.map(|object| object.as_borrowed()));
    let Results { tensors, number, returned } = outcome_of(|| work(shim, &arguments, number));
    if let Some(place) = returned {
        return Ok((PyList::new(py, [objects[place]])?.into_any(), number));
    }
    Ok((made(py, torch.made_of.bind(py), tensors)?, number))
}

/// Tensors as objects.
fn made<'py>(py: Python<'py>, made_of: &Bound<'py, PyAny>, tensors: Vec<Tensor>) -> PyResult<Bound<'py, PyAny>> {
    if tensors.is_empty() {
        return Ok(PyList::empty(py).into_any());
    }
    let capsules = tensors.iter().map(|tensor| capsule(py, tensor)).collect::<PyResult<Vec<_>>>()?;
    let made = made_of.call1((PyList::new(py, capsules)?,));
    // torch has their references now; after an exception it may have some.
    tensors.into_iter().for_each(forget);
    made
}

/// A capsule of a tensor's handle. It owns nothing.
fn capsule<'py>(py: Python<'py>, tensor: &Tensor) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the interpreter's lock is held; the result is a new reference, or null with an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(tensor.handle(), null(), None)) }
}

/// Calls by their names: `tensors` of Python and a number become what the operator returns.
macro_rules! calls {
    ($($place:literal: $name:ident = $work:ident($($tensor:ident),*; $number:ident);)*) => {$(
        #[pyfunction]
        // The parameters are the operator's.
        #[allow(clippy::too_many_arguments)]
        pub(crate) fn $name<'py>(
            py: Python<'py>,
            $($tensor: &Bound<'py, PyAny>,)*
            $number: i64,
        ) -> Returned<'py> {
            called(py, $place, [$($tensor),*], $number, super::$work)
        }
    )*};
}

calls! {
    0: direct_dispatch = dispatched(x, topk_idx, topk_weights, scales; plan);
    1: direct_dispatch_into =
        dispatched_into(x, topk_idx, topk_weights, scales, rows, counts, row_scales, first, second; plan);
    2: direct_combine = combined(rows, handle, topk_weights; tokens);
    3: direct_combine_into = combined_into(rows, handle, topk_weights, out; flags);
    4: direct_low_latency_dispatch = low_latency_dispatched(x, topk_idx; plan);
    5: direct_low_latency_send = low_latency_sent(x, topk_idx; plan);
    6: direct_low_latency_send_back = low_latency_sent_back(rows, topk_idx, topk_weights; handle);
    7: direct_low_latency_combine = low_latency_combined(rows, topk_idx, topk_weights; handle);
}
