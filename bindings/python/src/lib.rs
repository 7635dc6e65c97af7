//! The Python extension module `tokenyard._native`: what the package `tokenyard` (bindings/python/tokenyard) is built
//! on.
//!
//! Place: a crate above `tokenyard`, whose public interface it uses. Objects are immutable for Python and may be used
//! by any thread. The interpreter's lock is released in everything that can wait, and such waits ask for signals, so
//! that Ctrl-C ends them. No thread is started by import.

mod arrays;
mod calls;
mod context;
mod detached;
mod errors;
mod worlds;

use pyo3::prelude::*;
use tokenyard::cli;
use tokenyard::internals::COMMIT;

/// Runs the program `tokenyard` with these arguments, and returns its exit status.
#[pyfunction]
fn run_program(py: Python<'_>, arguments: Vec<String>) -> u8 {
    py.detach(|| cli::run(arguments, cli::Host::process(&mut std::io::stdout())).into())
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("version", format!("{}+g{COMMIT}", env!("CARGO_PKG_VERSION")))?;
    module.add_class::<worlds::World>()?;
    module.add_class::<context::Context>()?;
    module.add_class::<context::Handle>()?;
    module.add_class::<context::Sent>()?;
    module.add_class::<context::CombineSent>()?;
    module.add_class::<calls::Output>()?;
    errors::add_to(module)?;
    module.add_function(wrap_pyfunction!(run_program, module)?)
}
