//! Python exceptions of the library's errors, and waits that signals end.
//!
//! `tokenyard.Error` is a RuntimeError with the fields that the error has (`rank`, `peer`, `wait`, `seconds`, `epoch`,
//! `needed`, `given`, `name`) and `fatal`. `ArgumentError` and `ConfigError` are ValueErrors as well. `ClosedError` is
//! of this package alone: a call on a world or a context that was closed.

use pyo3::exceptions::{PyException, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};
use tokenyard::{Error, Interrupt};

/// The exception classes: each one's name, and whether it is a ValueError, too. `Error` is the base of the others.
const CLASSES: [(&str, bool); 15] = [
    ("Error", false),
    ("ArgumentError", true),
    ("ConfigError", true),
    ("RoutingError", false),
    ("CapacityError", false),
    ("IncompleteError", false),
    ("OrderError", false),
    ("GenerationError", false),
    ("TimeoutError", false),
    ("PeerLostError", false),
    ("TransportError", false),
    ("DeviceError", false),
    ("BootstrapError", false),
    ("InterruptedError", false),
    ("ClosedError", false),
];

static MADE: PyOnceLock<Vec<Py<PyType>>> = PyOnceLock::new();

/// The classes, in the order of `CLASSES`.
fn classes(py: Python<'_>) -> PyResult<&'static [Py<PyType>]> {
    let make = || {
        let mut made: Vec<Py<PyType>> = Vec::new();
        let metaclass = py.get_type::<PyType>();
        for (name, is_value) in CLASSES {
            let runtime = py.get_type::<PyRuntimeError>();
            let base = made.first().map_or(runtime, |first| first.bind(py).clone());
            let bases = if is_value {
                PyTuple::new(py, [base, py.get_type::<PyValueError>()])?
            } else {
                PyTuple::new(py, [base])?
            };
            let namespace = PyDict::new(py);
            namespace.set_item("__module__", "tokenyard")?;
            made.push(metaclass.call1((name, bases, namespace))?.cast_into::<PyType>()?.unbind());
        }
        Ok::<_, PyErr>(made)
    };
    Ok(MADE.get_or_try_init(py, make)?)
}

/// Adds the classes to the module.
pub(super) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    for ((name, _), class) in CLASSES.iter().zip(classes(module.py())?) {
        module.add(*name, class.bind(module.py()))?;
    }
    Ok(())
}

/// The name of an error's class, and the fields that Python reads.
fn described(error: &Error) -> (&'static str, Vec<(&'static str, u64)>) {
    match error {
        Error::Argument { .. } => ("ArgumentError", vec![]),
        Error::Config { .. } => ("ConfigError", vec![]),
        Error::Routing { rank, epoch, .. } => ("RoutingError", vec![("rank", rank.0.into()), ("epoch", *epoch)]),
        Error::Capacity { rank, epoch, needed, given, .. } => {
            let fields = vec![("rank", rank.0.into()), ("epoch", *epoch), ("needed", *needed), ("given", *given)];
            ("CapacityError", fields)
        }
        Error::Incomplete { rank, epoch, peer, .. } => {
            ("IncompleteError", vec![("rank", rank.0.into()), ("epoch", *epoch), ("peer", peer.0.into())])
        }
        Error::Order { rank, .. } => ("OrderError", vec![("rank", rank.0.into())]),
        Error::Generation { rank, generation, newest, .. } => {
            let fields =
                vec![("rank", rank.0.into()), ("generation", (*generation).into()), ("newest", (*newest).into())];
            ("GenerationError", fields)
        }
        Error::Timeout { rank, peer, epoch, .. } => {
            ("TimeoutError", vec![("rank", rank.0.into()), ("peer", peer.0.into()), ("epoch", *epoch)])
        }
        Error::PeerLost { rank, peer, epoch, .. } => {
            ("PeerLostError", vec![("rank", rank.0.into()), ("peer", peer.0.into()), ("epoch", *epoch)])
        }
        Error::Transport { .. } => ("TransportError", vec![]),
        Error::Device { .. } => ("DeviceError", vec![]),
        Error::Bootstrap { .. } => ("BootstrapError", vec![]),
        Error::Interrupted { .. } => ("InterruptedError", vec![]),
        // Of a later version of the library.
        _ => ("Error", vec![]),
    }
}

/// The exception of an error.
pub(super) fn raised(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error).unwrap_or_else(|why| why)
}

fn exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let (name, fields) = described(error);
    let place = CLASSES.iter().position(|(class, _)| *class == name).unwrap_or(0);
    let class = classes(py)?.get(place).ok_or_else(|| PyRuntimeError::new_err(error.to_string()))?;
    let value = class.bind(py).call1((error.to_string(),))?;
    value.setattr("fatal", error.is_fatal())?;
    for (field, number) in fields {
        value.setattr(field, number)?;
    }
    match error {
        Error::Argument { name, .. } | Error::Config { name, .. } => value.setattr("name", name)?,
        Error::Timeout { site, waited_ms, .. } => {
            value.setattr("wait", site)?;
            value.setattr("seconds", *waited_ms as f64 / 1000.0)?;
        }
        Error::PeerLost { site, .. } => value.setattr("wait", site)?,
        _ => {}
    }
    Ok(PyErr::from_value(value))
}

/// The exception of a call on what was closed.
pub(super) fn closed(py: Python<'_>, what: &str) -> PyErr {
    let made = || {
        let place = CLASSES.iter().position(|(class, _)| *class == "ClosedError").unwrap_or(0);
        let class = classes(py)?.get(place).map(|class| class.bind(py).clone());
        let class = class.unwrap_or_else(|| py.get_type::<PyRuntimeError>());
        let value = class.call1((format!("this {what} is closed: make another one, with all ranks"),))?;
        value.setattr("fatal", true)?;
        Ok(PyErr::from_value(value))
    };
    made().unwrap_or_else(|why| why)
}

thread_local! {
    /// What a callable of the caller raised in the wait that is under way on this thread.
    static CAUSE: Cell<Option<PyErr>> = const { Cell::new(None) };
}

/// Notes why a wait of this thread fails, for the exception that it raises.
pub(super) fn note_cause(cause: PyErr) {
    CAUSE.set(Some(cause));
}

/// Runs what may wait, without the interpreter's lock. Signals are asked for about once a millisecond: an exception of
/// a signal's handler, such as KeyboardInterrupt, ends the wait and is raised.
pub(super) fn wait<T: Send>(py: Python<'_>, work: impl FnOnce() -> tokenyard::Result<T> + Send) -> PyResult<T> {
    let signal: Arc<Mutex<Option<PyErr>>> = Arc::default();
    let noted = signal.clone();
    let interrupt = Interrupt::asking(move || {
        Python::attach(|py| match py.check_signals() {
            Ok(()) => false,
            Err(raised) => {
                *noted.lock().unwrap_or_else(PoisonError::into_inner) = Some(raised);
                true
            }
        })
    });
    CAUSE.set(None);
    let outcome = py.detach(|| interrupt.during(work));
    let by_signal = signal.lock().unwrap_or_else(PoisonError::into_inner).take();
    match (outcome, by_signal) {
        // What came to an end in spite of the signal is lost to the caller, who gets the signal's exception.
        (_, Some(raised)) => Err(raised),
        (Err(error), None) => Err(match CAUSE.take() {
            // KeyboardInterrupt and the like go to the caller as they are.
            Some(cause) if !cause.is_instance_of::<PyException>(py) => cause,
            cause => {
                let raised = self::raised(py, &error);
                raised.set_cause(py, cause);
                raised
            }
        }),
        (Ok(value), None) => Ok(value),
    }
}
