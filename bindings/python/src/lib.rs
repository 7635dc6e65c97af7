//! The Python extension module `tokenyard._native`: what the package `tokenyard` (bindings/python/tokenyard) is built
//! on.
//!
//! Place: a crate above `tokenyard`, whose public interface it uses. Objects are immutable for Python and may be used
//! by any thread. The interpreter's lock is released in everything that can wait, and such waits ask for signals, so
//! that Ctrl-C ends them. No thread is started by import.

mod arrays;
mod barriers;
mod calls;
mod context;
mod detached;
mod dlpack;
mod errors;
mod exclusive;
mod formats;
mod lock;
mod nested;
mod numbers;
mod operators;
mod process;
mod proxies;
mod worlds;

use pyo3::exceptions::{PyImportError, PyRuntimeWarning};
use pyo3::prelude::*;
use std::ffi::CString;
use std::path::PathBuf;
use tokenyard::cli;
use tokenyard::internals::COMMIT;

/// Runs the program `tokenyard` with these arguments, and returns its exit status. `program`: a file that does the
/// same, which `--launch processes` starts for each rank; refused without.
#[pyfunction]
#[pyo3(signature = (arguments, program=None))]
fn run_program(py: Python<'_>, arguments: Vec<String>, program: Option<PathBuf>) -> u8 {
    py.detach(|| {
        let mut out = std::io::stdout();
        let host = match program {
            Some(program) => cli::Host::process(&mut out).program(program),
            None => cli::Host::new(&mut out),
        };
        cli::run(arguments, host).into()
    })
}

/// What processes have in common that can be of one node: the kernel and the namespace of sockets.
#[pyfunction]
fn host() -> String {
    tokenyard::internals::host()
}

/// Refuses an interpreter beside the main one. Locks are taken by `PyGILState_Ensure`, which knows the main one alone,
/// and Python 3.11 initialises a module that another interpreter has imported without asking the module.
#[pyfunction]
fn must_be_main() -> PyResult<()> {
    // SAFETY: this thread has the lock of the interpreter that runs it.
    match unsafe { pyo3::ffi::PyInterpreterState_GetID(pyo3::ffi::PyInterpreterState_Get()) } {
        0 => Ok(()),
        number => Err(PyImportError::new_err(format!(
            "tokenyard is imported by interpreter {number} of this process: import it in the main one, or in a process"
        ))),
    }
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("version", format!("{}+g{COMMIT}", env!("CARGO_PKG_VERSION")))?;
    module.add_class::<worlds::World>()?;
    module.add_class::<proxies::Proxy>()?;
    module.add_class::<context::Context>()?;
    module.add_class::<context::Handle>()?;
    module.add_class::<context::RankMask>()?;
    module.add_class::<context::OneCall>()?;
    module.add_class::<formats::Format>()?;
    module.add_class::<context::Sent>()?;
    module.add_class::<context::CombineSent>()?;
    module.add_class::<calls::Output>()?;
    module.add_class::<operators::Plan>()?;
    module.add_class::<operators::Half>()?;
    module.add_function(wrap_pyfunction!(barriers::barrier, module)?)?;
    module.add_function(wrap_pyfunction!(operators::define_operators, module)?)?;
    module.add_function(wrap_pyfunction!(operators::direct_calls, module)?)?;
    module.add_function(wrap_pyfunction!(operators::direct_dispatch, module)?)?;
    module.add_function(wrap_pyfunction!(operators::direct_dispatch_into, module)?)?;
    module.add_function(wrap_pyfunction!(operators::direct_combine, module)?)?;
    module.add_function(wrap_pyfunction!(operators::direct_combine_into, module)?)?;
    module.add_function(wrap_pyfunction!(operators::direct_low_latency_dispatch, module)?)?;
    module.add_function(wrap_pyfunction!(operators::direct_low_latency_combine, module)?)?;
    module.add_function(wrap_pyfunction!(operators::direct_low_latency_send, module)?)?;
    module.add_function(wrap_pyfunction!(operators::direct_low_latency_send_back, module)?)?;
    module.add_function(wrap_pyfunction!(operators::operator_handle, module)?)?;
    module.add_function(wrap_pyfunction!(operators::operator_handles, module)?)?;
    module.add_function(wrap_pyfunction!(operators::is_usual, module)?)?;
    module.add_function(wrap_pyfunction!(operators::take_pending, module)?)?;
    module.add_function(wrap_pyfunction!(operators::taken_handle, module)?)?;
    module.add_function(wrap_pyfunction!(operators::half_of, module)?)?;
    module.add_function(wrap_pyfunction!(operators::half_is_kept, module)?)?;
    module.add_function(wrap_pyfunction!(operators::newest_half, module)?)?;
    errors::add_to(module)?;
    if let Err(refusal) = cli::install_logger() {
        let text = CString::new(refusal)?;
        PyErr::warn(module.py(), &module.py().get_type::<PyRuntimeWarning>(), &text, 0)?;
    }
    module.add_function(wrap_pyfunction!(host, module)?)?;
    module.add_function(wrap_pyfunction!(must_be_main, module)?)?;
    module.add_function(wrap_pyfunction!(run_program, module)?)
}
