//! What is asked before an eager call: whether it is one without gradients that nothing looks at.

use crate::arrays::Array;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};
use pyo3::{ffi, intern};
use std::mem::transmute;
use std::ptr::null_mut;

/// A function of C that is called without arguments: by its address where its kind is known, which takes a third of the
/// time.
pub(super) struct Function {
    object: Py<PyAny>,
    nothing: Py<PyTuple>,
    address: Option<ffi::PyCFunction>,
    kind: i32,
}

impl Function {
    pub fn new(object: Bound<'_, PyAny>) -> Function {
        let (function, py) = (object.as_ptr(), object.py());
        // SAFETY: the object lives, and is asked for what it is of first.
        let (address, kind) = unsafe {
            match ffi::PyCFunction_Check(function) != 0 {
                true => (ffi::PyCFunction_GetFunction(function), ffi::PyCFunction_GetFlags(function)),
                false => (None, 0),
            }
        };
        Function { object: object.unbind(), nothing: PyTuple::empty(py).unbind(), address, kind }
    }

    /// Whether what it returns is true.
    pub fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        const WITH_KEYWORDS: i32 = ffi::METH_VARARGS | ffi::METH_KEYWORDS;
        let (object, nothing) = (self.object.as_ptr(), self.nothing.as_ptr());
        let returned = match (self.address, self.kind) {
            // SAFETY: the object is a function of this kind, and the interpreter's lock is held. It returns a new
            // reference, or null with an exception.
            (Some(address), ffi::METH_NOARGS) => unsafe { address(ffi::PyCFunction_GetSelf(object), null_mut()) },
            // SAFETY: as above.
            (Some(address), WITH_KEYWORDS) => unsafe {
                let address = transmute::<ffi::PyCFunction, ffi::PyCFunctionWithKeywords>(address);
                address(ffi::PyCFunction_GetSelf(object), nothing, null_mut())
            },
            // SAFETY: both objects live, and the lock is held; as above.
            _ => unsafe { ffi::PyObject_Call(object, nothing, null_mut()) },
        };
        // SAFETY: as above.
        unsafe { Bound::from_owned_ptr_or_err(py, returned) }?.is_truthy()
    }
}

/// Functions and types of torch.
struct Torch {
    /// Each tells of something that watches or transforms calls: a number of modes, or an object where there is one.
    watching: [Function; 4],
    /// Names of the module of forward-mode differentiation. Without it `_current_level` is negative.
    forward: Py<PyDict>,
    is_grad_enabled: Function,
    /// `Tensor` and `Parameter`, which live as long as the interpreter.
    types: [usize; 2],
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

fn torch(py: Python<'_>) -> PyResult<&Torch> {
    TORCH.get_or_try_init(py, || {
        let (torch, own) = (py.import("torch")?, py.import("torch._C")?);
        let of_own = |name: &str| Ok::<_, PyErr>(Function::new(own.getattr(name)?));
        let transforms = Function::new(own.getattr("_functorch")?.getattr("peek_interpreter_stack")?);
        let types = [torch.getattr("Tensor")?, torch.getattr("nn")?.getattr("Parameter")?];
        Ok(Torch {
            watching: [
                of_own("_len_torch_dispatch_stack")?,
                of_own("_len_torch_function_stack")?,
                of_own("_get_tracing_state")?,
                transforms,
            ],
            forward: py.import("torch.autograd.forward_ad")?.dict().unbind(),
            is_grad_enabled: Function::new(torch.getattr("is_grad_enabled")?),
            types: types.map(|kind| kind.as_ptr() as usize),
        })
    })
}

/// Whether something traces or transforms calls, or takes derivatives of them as they are made.
pub(super) fn is_watched(py: Python<'_>) -> PyResult<bool> {
    let torch = torch(py)?;
    for watching in &torch.watching {
        if watching.holds(py)? {
            return Ok(true);
        }
    }
    let level = torch.forward.bind(py).get_item(intern!(py, "_current_level"))?;
    Ok(level.map_or(Ok(-1), |level| level.extract::<i64>())? >= 0)
}

/// Whether a call may take an argument as it is: a tensor of torch's own type of which no gradient is asked. `array`:
/// what is known of it, so that it is no negative view, either, of which torch would hand an operator a copy.
pub(super) fn is_plain(argument: &Bound<'_, PyAny>, array: &Array) -> PyResult<bool> {
    let py = argument.py();
    let torch = torch(py)?;
    if !torch.types.contains(&(argument.get_type_ptr() as usize)) {
        return Ok(false);
    }
    let asked = array.element.has_gradient() && argument.getattr(intern!(py, "requires_grad"))?.is_truthy()?;
    Ok(!asked || !torch.is_grad_enabled.holds(py)?)
}

/// The same of all arguments of an operator.
pub(super) fn are_plain<'a, 'py: 'a>(objects: impl IntoIterator<Item = &'a Bound<'py, PyAny>>) -> PyResult<bool> {
    for object in objects {
        // What is no tensor is none for operators, either.
        let Ok(array) = Array::of("argument", object, false) else { return Ok(false) };
        if !is_plain(object, &array)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a call by an operator is one for it, and nothing watches it.
#[pyfunction]
#[pyo3(signature = (*objects))]
pub(crate) fn is_usual(py: Python<'_>, objects: Vec<Bound<'_, PyAny>>) -> PyResult<bool> {
    Ok(!is_watched(py)? && are_plain(&objects)?)
}
