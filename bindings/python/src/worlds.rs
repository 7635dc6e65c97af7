//! Worlds of ranks.

use super::context::duration;
use super::detached::Closable;
use super::errors;
use super::numbers::{maybe, number, numbers};
use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};
use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokenyard::{Error, Rank};

/// The ranks of a job. `World.threads(n)` makes the worlds of n ranks that are threads of this process;
/// `World.from_env()` joins the job that torchrun's variables describe; `World.over(rank, size, all_gather)` uses the
/// caller's all-gather. `tokenyard.World.from_group(group)` is made of the last one. With `with` a world is closed at
/// the end of the block.
#[pyclass(frozen, module = "tokenyard._native")]
pub(super) struct World {
    pub inner: Closable<tokenyard::World>,
    /// The caller's, which calls of this object lend to the library (`LENT`): the library owns none, so that the
    /// garbage collector sees each reference.
    all_gather: Mutex<Option<Py<PyAny>>>,
    // Facts that stay known when the world is closed.
    rank: u32,
    size: usize,
    local_rank: usize,
    generation: u32,
}

impl World {
    fn of(inner: tokenyard::World, all_gather: Option<Py<PyAny>>) -> World {
        let (rank, size, local_rank) = (inner.rank().0, inner.size(), inner.local_rank());
        let (generation, all_gather) = (inner.generation(), Mutex::new(all_gather));
        World { inner: Closable::new("world", inner), all_gather, rank, size, local_rank, generation }
    }

    /// The caller's all-gather, if it is one.
    fn lent(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let all_gather = self.all_gather.lock().unwrap_or_else(PoisonError::into_inner);
        all_gather.as_ref().map(|all_gather| all_gather.clone_ref(py))
    }

    /// Runs what may wait, with the caller's all-gather.
    pub fn wait<T: Send>(&self, py: Python<'_>, work: impl FnOnce() -> tokenyard::Result<T> + Send) -> PyResult<T> {
        lending(py, self.lent(py), work)
    }
}

#[pymethods]
impl World {
    /// The worlds of `n` ranks in this process, by rank; each is to be used by a thread of its own.
    #[staticmethod]
    fn threads(py: Python<'_>, n: &Bound<'_, PyAny>) -> PyResult<Vec<World>> {
        let worlds = tokenyard::World::threads(number("n", n)?).map_err(|error| errors::raised(py, &error))?;
        Ok(worlds.into_iter().map(|inner| World::of(inner, None)).collect())
    }

    /// Joins the job of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR, over a port of its own.
    #[staticmethod]
    fn from_env(py: Python<'_>) -> PyResult<World> {
        Ok(World::of(errors::wait(py, tokenyard::World::from_env)?, None))
    }

    /// A world over the caller's all-gather: a callable `all_gather(what: str, own: bytes, seconds: float)` that
    /// returns every rank's bytes, by rank, and keeps the deadline itself. Collective.
    #[staticmethod]
    #[pyo3(signature = (rank, size, all_gather, *, local_rank=None))]
    fn over(
        py: Python<'_>,
        rank: &Bound<'_, PyAny>,
        size: &Bound<'_, PyAny>,
        all_gather: Py<PyAny>,
        local_rank: Option<Bound<'_, PyAny>>,
    ) -> PyResult<World> {
        let (rank, size, local_rank) = (number("rank", rank)?, number("size", size)?, maybe("local_rank", local_rank)?);
        let lent = Some(all_gather.clone_ref(py));
        let inner = lending(py, lent, || tokenyard::World::over(rank, size, local_rank, gathered))?;
        Ok(World::of(inner, Some(all_gather)))
    }

    /// The world of a torch.distributed group; `None`: the default group. Collective.
    #[staticmethod]
    #[pyo3(signature = (group=None))]
    fn from_group<'py>(py: Python<'py>, group: Option<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
        py.import("tokenyard._worlds")?.call_method1("world_of_group", (group,))
    }

    /// This rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.rank
    }

    /// How many ranks there are.
    #[getter]
    fn size(&self) -> usize {
        self.size
    }

    /// This rank among those of its host: the GPU that is its own by default.
    #[getter]
    fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Counts how often ranks have regrouped.
    #[getter]
    fn generation(&self) -> u32 {
        self.generation
    }

    /// Ranks of each node, in rank order. One node, unless the environment or `with_nodes` gives several.
    #[getter]
    fn nodes(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        Ok(self.inner.get(py)?.nodes().to_vec())
    }

    /// The most tokens of a rank in a call of a context over this world.
    #[getter]
    fn most_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        let world = self.inner.get(py)?;
        Ok(tokenyard::AllToAll::most_tokens_per_rank(&world))
    }

    /// The world with nodes of these many ranks, in rank order, the same on all ranks: ranks of different nodes share
    /// no memory, and write to each other over the network of their proxies.
    fn with_nodes(&self, py: Python<'_>, sizes: Vec<Bound<'_, PyAny>>) -> PyResult<World> {
        let sizes: Vec<usize> = numbers("sizes", &sizes)?;
        let world = (**self.inner.get(py)?).clone();
        let split = world.with_nodes(&sizes).map_err(|error| errors::raised(py, &error))?;
        Ok(World::of(split, self.lent(py)))
    }

    /// Seconds that collectives wait, those by which contexts are made among them. An all-gather of the caller gets
    /// them, and may have a deadline of its own.
    #[getter]
    fn timeout(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.inner.get(py)?.timeout().as_secs_f64())
    }

    /// The world with another `timeout`, which each rank chooses for itself.
    fn with_timeout(&self, py: Python<'_>, seconds: f64) -> PyResult<World> {
        let timeout = duration("seconds", seconds)?;
        let world = (**self.inner.get(py)?).clone();
        Ok(World::of(world.with_timeout(timeout), self.lent(py)))
    }

    /// Waits until every rank has come here. Collective.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        let world = self.inner.get(py)?;
        self.wait(py, || world.barrier("barrier of Python"))
    }

    /// Every rank's bytes, by rank. Collective.
    fn all_gather<'py>(&self, py: Python<'py>, own: &[u8]) -> PyResult<Bound<'py, PyList>> {
        let world = self.inner.get(py)?;
        let all = self.wait(py, || world.all_gather("all-gather of Python", own))?;
        PyList::new(py, all.iter().map(|bytes| PyBytes::new(py, bytes)))
    }

    /// The world of the members that go on, by their ranks of the first generation. Collective of the members. Worlds
    /// of a group or of `over` need an all-gather of the members alone, in their order: `all_gather` as of `over`, or
    /// that of a torch.distributed group.
    #[pyo3(signature = (generation, members, *, all_gather=None, group=None))]
    fn regroup(
        &self,
        py: Python<'_>,
        generation: &Bound<'_, PyAny>,
        members: Vec<Bound<'_, PyAny>>,
        all_gather: Option<Py<PyAny>>,
        group: Option<Bound<'_, PyAny>>,
    ) -> PyResult<World> {
        let all_gather = match (all_gather, group) {
            (Some(_), Some(_)) => {
                return Err(PyValueError::new_err("group is given beside all_gather: give one of them"));
            }
            (None, Some(group)) => Some(py.import("tokenyard._worlds")?.call_method1("gather_of", (group,))?.unbind()),
            (given, None) => given,
        };
        let generation = number("generation", generation)?;
        let members: Vec<Rank> = numbers("members", &members)?.into_iter().map(Rank).collect();
        let world = self.inner.get(py)?;
        let Some(all_gather) = all_gather else {
            return Ok(World::of(self.wait(py, || world.regroup(generation, &members))?, None));
        };
        let lent = Some(all_gather.clone_ref(py));
        let inner = lending(py, lent, || world.regroup_over(generation, &members, gathered))?;
        Ok(World::of(inner, Some(all_gather)))
    }

    /// Leaves the world, which is done once no context of it is alive. Later collectives raise `ClosedError`. Local;
    /// may be called again, before or after contexts of the world are closed, and in the child of a fork, where it does
    /// nothing.
    fn close(&self, py: Python<'_>) {
        let left = self.inner.close();
        let all_gather = self.all_gather.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Not under the lock, nor with the interpreter's: both may run other code.
        py.detach(|| drop(left));
        drop(all_gather);
    }

    fn __enter__(this: Py<World>) -> Py<World> {
        this
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // Held for a moment, by a thread that was stopped there: then the reference counts as one from outside.
        self.all_gather.try_lock().map_or(Ok(()), |all_gather| visit.call(&*all_gather))
    }

    fn __clear__(&self) {
        let gone = self.all_gather.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(gone);
    }

    fn __repr__(&self) -> String {
        let closed = if self.inner.is_closed() { ", closed" } else { "" };
        format!("<tokenyard.World: rank {} of {}{closed}>", self.rank, self.size)
    }
}

thread_local! {
    /// The all-gathers of the calls that are under way on this thread, the innermost last.
    static LENT: RefCell<Vec<Option<Py<PyAny>>>> = const { RefCell::new(Vec::new()) };
}

/// Runs what may wait while `gathered` uses this all-gather.
fn lending<T: Send>(
    py: Python<'_>,
    all_gather: Option<Py<PyAny>>,
    work: impl FnOnce() -> tokenyard::Result<T> + Send,
) -> PyResult<T> {
    LENT.with_borrow_mut(|lent| lent.push(all_gather));
    let outcome = errors::wait(py, work);
    let back = LENT.with_borrow_mut(Vec::pop);
    drop(back);
    outcome
}

/// One use of the all-gather that the call lends; its exceptions become errors, with their text.
fn gathered(what: &str, own: &[u8], timeout: Duration) -> tokenyard::Result<Vec<Vec<u8>>> {
    Python::attach(|py| {
        let lent = LENT.with_borrow(|lent| lent.last()?.as_ref().map(|all_gather| all_gather.clone_ref(py)));
        let Some(all_gather) = lent else {
            return Err(Error::bootstrap("the world has no all_gather any more", "use a world before it is closed"));
        };
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
