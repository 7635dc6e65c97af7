//! What is asked before an eager call: whether it is one without gradients that nothing looks at.

use crate::arrays::Array;
use crate::dlpack::without_arguments;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use pyo3::{ffi, intern};
use std::ptr::null_mut;

/// A function that is called without arguments: by its address if it is one of C that takes none.
pub(super) struct Function {
    object: Py<PyAny>,
    address: Option<ffi::PyCFunction>,
}

impl Function {
    pub fn new(object: Bound<'_, PyAny>) -> Function {
        Function { address: without_arguments(&object), object: object.unbind() }
    }

    /// Whether what it returns is true.
    pub fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(address) = self.address else { return self.object.bind(py).call0()?.is_truthy() };
        // SAFETY: the object is a function of C that takes no arguments, and the interpreter's lock is held. It returns
        // a new reference, or null with an exception.
        unsafe {
            let returned = address(ffi::PyCFunction_GetSelf(self.object.as_ptr()), null_mut());
            Bound::from_owned_ptr_or_err(py, returned)
        }?
        .is_truthy()
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

/// What an argument says that a call may take as it is: a tensor of torch's own type that is no negative view, of which
/// torch would hand an operator a copy to write into, and of which no gradient is asked. None of another; of one of
/// another type nothing is asked, since that may have code of its own.
pub(super) fn plain_array(name: &'static str, argument: &Bound<'_, PyAny>) -> PyResult<Option<Array>> {
    let py = argument.py();
    let torch = torch(py)?;
    if !torch.types.contains(&(argument.get_type_ptr() as usize)) {
        return Ok(None);
    }
    let Ok(array) = Array::of(name, argument, false) else { return Ok(None) };
    let asked = array.element.has_gradient() && argument.getattr(intern!(py, "requires_grad"))?.is_truthy()?;
    Ok((!asked || !torch.is_grad_enabled.holds(py)?).then_some(array))
}

/// Whether an operator may take all of these.
pub(super) fn are_plain<'a, 'py: 'a>(objects: impl IntoIterator<Item = &'a Bound<'py, PyAny>>) -> PyResult<bool> {
    for object in objects {
        if plain_array("argument", object)?.is_none() {
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
