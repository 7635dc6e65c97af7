//! Whole numbers of callers.

use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;

/// A number of things, or of one of them. Refuses what is none, or more than the type holds.
pub(super) fn number<T: TryFrom<u64>>(name: &str, value: &Bound<'_, PyAny>) -> PyResult<T> {
    match value.extract::<u64>() {
        Ok(number) => T::try_from(number).map_err(|_| outside::<T>(name, value)),
        Err(raised) if raised.is_instance_of::<PyOverflowError>(value.py()) => Err(outside::<T>(name, value)),
        // Of the caller's own __index__, or Ctrl-C.
        Err(raised) if !raised.is_instance_of::<PyTypeError>(value.py()) => Err(raised),
        Err(_) => {
            let kind = value.get_type().name()?;
            Err(PyTypeError::new_err(format!("{name} is a {kind}: give a whole number")))
        }
    }
}

/// A list of them.
pub(super) fn numbers<T: TryFrom<u64>>(name: &str, values: &[Bound<'_, PyAny>]) -> PyResult<Vec<T>> {
    values.iter().map(|value| number(name, value)).collect()
}

/// One that the caller may leave out.
pub(super) fn maybe<T: TryFrom<u64>>(name: &str, value: Option<Bound<'_, PyAny>>) -> PyResult<Option<T>> {
    value.map(|value| number(name, &value)).transpose()
}

fn outside<T>(name: &str, value: &Bound<'_, PyAny>) -> PyErr {
    let bits = 8 * size_of::<T>();
    PyValueError::new_err(format!("{name} is {value}: give 0 or more, and less than 2^{bits}"))
}
