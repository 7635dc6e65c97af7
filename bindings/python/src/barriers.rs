//! Barriers of a context's ranks on their streams.

use super::context::Context;
use super::errors;
use pyo3::prelude::*;

/// Later work of `stream` runs after every rank's stream came here. On the CPU device the host waits for it.
#[pyfunction]
pub(super) fn barrier(py: Python<'_>, context: &Context, stream: u64) -> PyResult<()> {
    let core = context.core();
    let (ep, stream, _held) = core.begin(py, stream)?;
    py.detach(|| ep.barrier(&stream)).map_err(|error| errors::raised(py, &error))?;
    core.finished_with(py, &ep, || Box::new(()))
}
