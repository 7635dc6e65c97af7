//! Halves of low-latency calls that operators sent, which hooks receive.

use super::handles::{self, Untaken};
use super::shim::{Tensor, shim};
use crate::arrays::Dimensions;
use crate::calls;
use crate::context::{Core, Handle, Parts, received_already, with};
use crate::errors;
use crate::formats::Format;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::any::Any;
use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};
use tokenyard::{CombineSent, Combined, Layout, Output, Sent};

/// A sent dispatch or combine that is to be received, into the tensors that the operator made.
#[pyclass(frozen, module = "tokenyard._native")]
pub(crate) struct Half(Arc<SentHalf>);

struct SentHalf {
    core: Arc<Core>,
    inner: Mutex<Option<Inner>>,
}

struct Inner {
    sent: Way,
    /// What the call reads, if it goes in several rounds.
    reads: Box<dyn Any + Send>,
    /// What it writes, and where that was when it was sent.
    writes: Vec<(Tensor, Option<u64>)>,
}

pub(super) enum Way {
    Dispatch(Box<DispatchHalf>),
    Combine(Box<CombineHalf>),
}

pub(super) struct DispatchHalf {
    pub sent: Sent,
    pub output: Output,
    pub context: i64,
    pub layout: Layout,
    pub tokens: usize,
    pub format: Format,
    pub places: Dimensions,
}

pub(super) struct CombineHalf {
    pub sent: CombineSent,
    pub to: Combined,
}

type Used = (Box<dyn Any + Send>, Vec<(Tensor, Option<u64>)>);

thread_local! {
    static UNTAKEN: RefCell<Untaken<Arc<SentHalf>>> = const { RefCell::new(Untaken::new()) };
}

/// A number for a half, from 1, until `half_is_kept` on this thread.
pub(super) fn number(core: Arc<Core>, sent: Way, reads: Box<dyn Any + Send>, writes: Vec<Tensor>) -> i64 {
    let placed = |tensor: Tensor| {
        let address = tensor.memory();
        (tensor, address)
    };
    let writes = writes.into_iter().map(placed).collect();
    let half = Arc::new(SentHalf { core, inner: Mutex::new(Some(Inner { sent, reads, writes })) });
    let number = handles::next_number();
    let oldest = UNTAKEN.with_borrow_mut(|untaken| untaken.put(number, half));
    drop(oldest);
    number
}

/// The half of a number that a call of this thread returned; None after many calls whose halves nobody kept. It stays
/// here until `half_is_kept`, as Ctrl-C may come before the caller has it.
#[pyfunction]
pub(crate) fn half_of(number: i64) -> Option<Half> {
    UNTAKEN.with_borrow(|untaken| untaken.get(number).cloned()).map(Half)
}

/// The caller keeps the half of this number.
#[pyfunction]
pub(crate) fn half_is_kept(number: i64) {
    let kept = UNTAKEN.with_borrow_mut(|untaken| untaken.take(number));
    drop(kept);
}

/// The last half of this thread that nobody keeps, as where Ctrl-C came.
#[pyfunction]
pub(crate) fn newest_half() -> Option<Half> {
    UNTAKEN.with_borrow_mut(Untaken::take_newest).map(Half)
}

#[pymethods]
impl Half {
    /// Receives on the stream of torch that is current. Of a dispatch it returns the handle, which an error of a
    /// dispatch that took place has as its `handle`.
    fn receive(&self, py: Python<'_>) -> PyResult<Option<Handle>> {
        let stream = self.0.core.ordinal().map(|ordinal| shim().and_then(|shim| shim.current_stream(ordinal)));
        let no_stream = || PyRuntimeError::new_err("torch has no current stream");
        let stream = stream.map_or(Ok(0), |found| found.ok_or_else(no_stream))?;
        let (ep, stream, _held) = self.0.core.begin(py, stream)?;
        let Inner { sent, reads, writes } = self.take(py)?;
        let used = Mutex::new((reads, writes));
        let handle = match sent {
            Way::Dispatch(half) => {
                let DispatchHalf { sent, output, context, layout, tokens, format, places } = *half;
                match py.detach(|| ep.dispatch_recv(&stream, sent, &output)) {
                    Ok(inner) => {
                        let parts = Parts { inner, tokens, format, places };
                        Some(handles::numbered(self.0.core.clone(), context, calls::layout_name(layout), parts))
                    }
                    Err(refused) => {
                        let sent = *refused.given;
                        let half = DispatchHalf { sent, output, context, layout, tokens, format, places };
                        return Err(self.left(py, Way::Dispatch(Box::new(half)), used, &refused.error));
                    }
                }
            }
            Way::Combine(half) => {
                let CombineHalf { sent, to } = *half;
                match py.detach(|| ep.combine_recv(&stream, sent, &to)) {
                    Ok(()) => None,
                    Err(refused) => {
                        let half = CombineHalf { sent: *refused.given, to };
                        return Err(self.left(py, Way::Combine(Box::new(half)), used, &refused.error));
                    }
                }
            }
        };
        match (self.0.core.finished_with(py, &ep, || Box::new(used)), handle) {
            (Ok(()), handle) => Ok(handle),
            // The dispatch took place: other ranks combine it, and so must this one.
            (Err(raised), Some(handle)) => Err(with(py, raised, "handle", handle)),
            (Err(raised), None) => Err(raised),
        }
    }
}

impl Half {
    /// Refuses what was received already, and tensors that have other memory than they had.
    fn take(&self, py: Python<'_>) -> PyResult<Inner> {
        let mut inner = self.0.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(found) = inner.take() else { return Err(received_already(py, "this half")) };
        if found.writes.iter().any(|(tensor, address)| tensor.memory() != *address) {
            *inner = Some(found);
            return Err(PyValueError::new_err(
                "what this half writes has other memory than when it was sent: leave its tensors as they are until then",
            ));
        }
        Ok(found)
    }

    /// Leaves what was refused to be received again.
    fn left(&self, py: Python<'_>, sent: Way, used: Mutex<Used>, error: &tokenyard::Error) -> PyErr {
        let (reads, writes) = used.into_inner().unwrap_or_else(PoisonError::into_inner);
        *self.0.inner.lock().unwrap_or_else(PoisonError::into_inner) = Some(Inner { sent, reads, writes });
        errors::raised(py, error)
    }
}
