//! The operators' calls without torch's dispatcher, which takes as long as the call itself: functions in Python that
//! take and return what the operators do. What torch does around an operator needs the operator: profiles, which are
//! looked for here, and traces and gradients, for which a call is none for these functions.

use super::arguments::Arguments;
use super::plainness::{Function, are_plain, is_watched};
use super::shim::{self, Shim, Tensor, Wrap};
use super::{Outcome, Results, outcome_of};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyTuple};

/// Functions of torch.
struct Torch {
    /// Makes a tensor's object, sooner than what torch's own compiled functions have theirs made by
    /// (docs/notebook-host.md, "Objects without capsules").
    wrap: Wrap,
    /// Whether a profiler runs, which knows of operators alone.
    profiled: Function,
    operators: [Py<PyAny>; 8],
}

static TORCH: PyOnceLock<Option<Torch>> = PyOnceLock::new();

/// Whether the torch that is loaded has what these functions need. Takes the operators, in the order of `calls`, which
/// they call where a profiler runs.
#[pyfunction]
pub(crate) fn direct_calls(py: Python<'_>, operators: [Py<PyAny>; 8]) -> bool {
    let found = || -> PyResult<Option<Torch>> {
        let profiled = Function::new(py.import("torch._C._autograd")?.getattr("_profiler_enabled")?);
        Ok(shim::wrap().map(|wrap| Torch { wrap, profiled, operators }))
    };
    TORCH.get_or_init(py, || found().ok().flatten()).is_some()
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
    let Some((shim, torch)) = shim::shim().zip(TORCH.get(py).and_then(Option::as_ref)) else {
        return Err(PyRuntimeError::new_err("this torch has no direct calls: call the operator"));
    };
    if is_watched(py)? {
        return Ok((PyList::empty(py).into_any(), 0));
    }
    if torch.profiled.holds(py)? {
        if !are_plain(objects)? {
            return Ok((PyList::empty(py).into_any(), 0));
        }
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
    Ok((made(py, torch, &tensors)?, number))
}

/// Tensors as objects.
fn made<'py>(py: Python<'py>, torch: &Torch, tensors: &[Tensor]) -> PyResult<Bound<'py, PyAny>> {
    let objects = tensors.iter().map(|tensor| tensor.object(py, torch.wrap)).collect::<PyResult<Vec<_>>>()?;
    Ok(PyList::new(py, objects)?.into_any())
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
