//! What a call is given: tensors that torch hands to an operator, or objects of a call in Python.

use super::Failure;
use super::plainness::plain_array;
use super::shim::Tensor;
use crate::arrays::Array;
use pyo3::prelude::*;
use std::any::Any;

pub(super) enum Arguments<'a, const N: usize> {
    /// Of an operator, with references of its own.
    OfTorch([Tensor; N]),
    /// Of a function in Python. The interpreter's lock is held.
    OfPython([Borrowed<'a, 'a, PyAny>; N]),
}

impl<'a, const N: usize> Arguments<'a, N> {
    /// What the arguments that have a name say. One that Python knows more of is none for operators, nor is one of
    /// which a gradient is asked; that is looked at here for functions alone.
    pub fn arrays(&self, names: [Option<&'static str>; N]) -> Result<[Option<Array>; N], Failure> {
        let mut arrays = std::array::from_fn(|_| None);
        for ((place, name), array) in names.iter().enumerate().zip(&mut arrays) {
            let Some(name) = name else { continue };
            let found = match self {
                Arguments::OfTorch(tensors) => tensors[place].array(name),
                Arguments::OfPython(objects) => plain_array(name, &objects[place])?.and_then(Array::lent),
            };
            *array = Some(found.ok_or(Failure::NotHere)?);
        }
        Ok(arrays)
    }

    /// Further references to them.
    pub fn again(&self) -> Box<dyn Any + Send> {
        match self {
            Arguments::OfTorch(tensors) => Box::new(again(tensors)),
            Arguments::OfPython(objects) => Box::new(objects.map(|object| object.to_owned().unbind())),
        }
    }

    /// A further reference to an argument that an operator returns; nothing of Python's, which has the object.
    pub fn returned(&self, place: usize) -> Result<Vec<Tensor>, Failure> {
        match self {
            Arguments::OfTorch(tensors) => Ok(vec![tensors[place].again().ok_or(Failure::NotHere)?]),
            Arguments::OfPython(_) => Ok(Vec::new()),
        }
    }

    /// The interpreter's lock, if it is held.
    pub fn lock(&self) -> Option<Python<'a>> {
        match self {
            Arguments::OfTorch(_) => None,
            Arguments::OfPython(objects) => objects.first().map(|object| object.py()),
        }
    }
}

/// Further references to tensors.
pub(super) fn again<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<Tensor> {
    tensors.into_iter().filter_map(Tensor::again).collect()
}
