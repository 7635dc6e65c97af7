//! Worlds of ranks.

use super::detached::Detached;
use super::errors;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::time::Duration;
use tokenyard::{Error, Rank};

/// The ranks of a job. `World.threads(n)` makes the worlds of n ranks that are threads of this process;
/// `World.from_env()` joins the job that torchrun's variables describe; `World.over(rank, size, all_gather)` uses the
/// caller's all-gather. `tokenyard.World.from_group(group)` is made of the last one.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct World {
    pub inner: Detached<tokenyard::World>,
}

#[pymethods]
impl World {
    /// The worlds of `n` ranks in this process, by rank; each is to be used by a thread of its own.
    #[staticmethod]
    fn threads(py: Python<'_>, n: usize) -> PyResult<Vec<World>> {
        let worlds = tokenyard::World::threads(n).map_err(|error| errors::raised(py, &error))?;
        Ok(worlds.into_iter().map(|inner| World { inner: Detached::new(inner) }).collect())
    }

    /// Joins the job of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR, over a port of its own.
    #[staticmethod]
    fn from_env(py: Python<'_>) -> PyResult<World> {
        Ok(World { inner: Detached::new(errors::wait(py, tokenyard::World::from_env)?) })
    }

    /// A world over the caller's all-gather: a callable `all_gather(what: str, own: bytes, seconds: float)` that
    /// returns every rank's bytes, by rank, and keeps the deadline itself. Collective.
    #[staticmethod]
    #[pyo3(signature = (rank, size, all_gather, *, local_rank=None))]
    fn over(
        py: Python<'_>,
        rank: usize,
        size: usize,
        all_gather: Py<PyAny>,
        local_rank: Option<usize>,
    ) -> PyResult<World> {
        let gather = move |what: &str, own: &[u8], timeout: Duration| gathered(&all_gather, what, own, timeout);
        let inner = errors::wait(py, || tokenyard::World::over(rank, size, local_rank, gather))?;
        Ok(World { inner: Detached::new(inner) })
    }

    /// The world of a torch.distributed group of processes on one host; `None`: the default group. Collective.
    #[staticmethod]
    #[pyo3(signature = (group=None))]
    fn from_group<'py>(py: Python<'py>, group: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
        py.import("tokenyard._worlds")?.call_method1("world_of_group", (group,))
    }

    /// This rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.inner.rank().0
    }

    /// How many ranks there are.
    #[getter]
    fn size(&self) -> usize {
        self.inner.size()
    }

    /// This rank among those of its host: the GPU that is its own by default.
    #[getter]
    fn local_rank(&self) -> usize {
        self.inner.local_rank()
    }

    /// Counts how often ranks have regrouped.
    #[getter]
    fn generation(&self) -> u32 {
        self.inner.generation()
    }

    /// Ranks of each node, in rank order. One node, unless the environment or `with_nodes` gives several.
    #[getter]
    fn nodes(&self) -> Vec<usize> {
        self.inner.nodes().to_vec()
    }

    /// The world with nodes of these many ranks, in rank order, the same on all ranks: ranks of different nodes share no
    /// memory, and write to each other over the network of their proxies.
    fn with_nodes(&self, py: Python<'_>, sizes: Vec<usize>) -> PyResult<World> {
        self.inner.must_be_of_this_process("world")?;
        let split = (*self.inner).clone().with_nodes(&sizes).map_err(|error| errors::raised(py, &error))?;
        Ok(World { inner: Detached::new(split) })
    }

    /// Waits until every rank has come here. Collective.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.must_be_of_this_process("world")?;
        errors::wait(py, || self.inner.barrier("barrier of Python"))
    }

    /// Every rank's bytes, by rank. Collective.
    fn all_gather<'py>(&self, py: Python<'py>, own: &[u8]) -> PyResult<Bound<'py, PyList>> {
        self.inner.must_be_of_this_process("world")?;
        let all = errors::wait(py, || self.inner.all_gather("all-gather of Python", own))?;
        PyList::new(py, all.iter().map(|bytes| PyBytes::new(py, bytes)))
    }

    /// The world of the members that go on, by their ranks of the first generation. Collective of the members.
    fn regroup(&self, py: Python<'_>, generation: u32, members: Vec<u32>) -> PyResult<World> {
        let members: Vec<Rank> = members.into_iter().map(Rank).collect();
        self.inner.must_be_of_this_process("world")?;
        let inner = errors::wait(py, || self.inner.regroup(generation, &members))?;
        Ok(World { inner: Detached::new(inner) })
    }

    fn __repr__(&self) -> String {
        format!("<tokenyard.World: rank {} of {}>", self.inner.rank().0, self.inner.size())
    }
}

/// One use of the caller's all-gather; its exceptions become errors, with their text.
fn gathered(all_gather: &Py<PyAny>, what: &str, own: &[u8], timeout: Duration) -> tokenyard::Result<Vec<Vec<u8>>> {
    Python::attach(|py| {
        let call = || -> PyResult<Vec<Vec<u8>>> {
            let all = all_gather.bind(py).call1((what, PyBytes::new(py, own), timeout.as_secs_f64()))?;
            all.try_iter()?.map(|bytes| Ok(bytes?.cast::<PyBytes>()?.as_bytes().to_vec())).collect()
        };
        call().map_err(|why| {
            let error = Error::bootstrap(format!("all_gather raised {why}"), "see why, or give another all_gather");
            errors::note_cause(why);
            error.ending()
        })
    })
}
