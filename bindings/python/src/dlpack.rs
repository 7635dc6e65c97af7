//! Arrays that have `__dlpack__` alone, and tensors of torch by functions of C. The structures are those of DLPack's
//! header (`dlpack.h`). Producers are asked for version 1, whose capsules say what may not be written; older ones make
//! capsules without a version.

use super::arrays::{Dimensions, Element, Place};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::slice;

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: c_int,
    device_id: c_int,
    dimensions: c_int,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    /// In elements; null: without gaps.
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: Tensor,
}

/// `DLPACK_FLAG_BITMASK_READ_ONLY` and `DLPACK_FLAG_BITMASK_IS_COPIED`.
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

/// What a capsule says of its memory.
pub(super) struct Described {
    pub pointer: u64,
    pub shape: Dimensions,
    /// In bytes; None: without gaps.
    pub strides: Option<Dimensions>,
    pub element: Element,
    pub place: Place,
}

/// `kDLCPU` and `kDLCUDA`.
const CPU: c_int = 1;
const CUDA: c_int = 2;

/// Codes (`DLDataTypeCode`) and bits of types of elements.
const TYPES: [(u8, u8, Element); 10] = [
    (0, 32, Element::I32),
    (0, 64, Element::I64),
    (0, 8, Element::U8),
    (1, 8, Element::U8),
    (1, 16, Element::U16),
    (1, 32, Element::U32),
    (2, 16, Element::Fp16),
    (2, 32, Element::Fp32),
    (4, 16, Element::Bf16),
    (6, 8, Element::Bool),
];

/// `kDLFloat8_e4m3fn`.
const FP8: u8 = 10;

/// The capsule of an array, and what it says. The memory is there as long as the capsule.
pub(super) fn described<'py>(
    name: &'static str,
    value: &Bound<'py, PyAny>,
    writes: bool,
) -> PyResult<(Bound<'py, PyCapsule>, Described)> {
    let py = value.py();
    let (kind, _): (c_int, i64) = value.call_method0("__dlpack_device__")?.extract()?;
    let arguments = PyDict::new(py);
    if kind == CUDA {
        // -1: no wait for other streams. Arrays of a call belong to the call's stream, as any work of it.
        arguments.set_item("stream", -1)?;
    }
    let capsule = exported(value, &arguments)?;
    let tensor = if let Ok(pointer) = capsule.pointer_checked(Some(c"dltensor_versioned")) {
        // SAFETY: a capsule of this name holds a `DLManagedTensorVersioned`, which lives as long as the capsule, whose
        // name nobody changes, since it is ours alone. In every version it begins with the version.
        let major = unsafe { pointer.cast::<u32>().read() };
        if major != 1 {
            return Err(PyValueError::new_err(format!(
                "{name} is of version {major} of DLPack: give an array of version 1"
            )));
        }
        // SAFETY: as above, and of a version whose fields are these.
        let versioned = unsafe { pointer.cast::<Versioned>().as_ref() };
        let lost = [
            (READ_ONLY, "is read-only: give an array that can be written"),
            (IS_COPIED, "comes as a copy: give one whose memory is lent"),
        ];
        let lost = lost.iter().find(|(flag, _)| writes && versioned.flags & flag != 0);
        if let Some((_, why)) = lost {
            return Err(PyValueError::new_err(format!("{name} {why}")));
        }
        &versioned.tensor
    } else {
        let pointer = capsule.pointer_checked(Some(c"dltensor"))?.cast::<Tensor>();
        // SAFETY: a capsule of this name holds a `DLManagedTensor`, which begins with the tensor and lives as above.
        unsafe { pointer.as_ref() }
    };
    Ok((capsule, read(name, tensor)?))
}

/// What a tensor says of its memory.
fn read(name: &'static str, tensor: &Tensor) -> PyResult<Described> {
    let dimensions = usize::try_from(tensor.dimensions).unwrap_or(0);
    let whole = |name: &'static str, at: *const i64| -> PyResult<Dimensions> {
        if at.is_null() || dimensions == 0 {
            return Ok(Dimensions::new());
        }
        // SAFETY: shape and strides have an entry for each dimension.
        let entries = unsafe { slice::from_raw_parts(at, dimensions) };
        let entries = entries.iter().map(|entry| usize::try_from(*entry)).collect::<Result<_, _>>();
        entries.map_err(|_| PyValueError::new_err(format!("{name} runs backwards: give a copy of it")))
    };
    let Tensor { code, bits, lanes, .. } = *tensor;
    let known = TYPES.iter().find(|(a, b, _)| (*a, *b, 1) == (code, bits, lanes)).map(|(_, _, element)| *element);
    let element = known.or((code == FP8 && lanes == 1).then_some(Element::Fp8E4m3)).ok_or_else(|| {
        let advice = "give float, int32, int64 or bytes, one an element";
        PyTypeError::new_err(format!("{name} has elements of {lanes} of DLPack's type {code} of {bits} bits: {advice}"))
    })?;
    let place = match tensor.device_type {
        CPU => Place::Cpu,
        CUDA => Place::Cuda(usize::try_from(tensor.device_id).unwrap_or(0)),
        other => {
            return Err(PyValueError::new_err(format!(
                "{name} is on a device of DLPack's type {other}: give an array on the CPU or a CUDA device"
            )));
        }
    };
    let shape = whole(name, tensor.shape)?;
    let strides = if tensor.strides.is_null() {
        None
    } else {
        let bytes = |stride: usize| stride.saturating_mul(element.bytes());
        Some(whole(name, tensor.strides)?.into_iter().map(bytes).collect())
    };
    let pointer = (tensor.data as u64).wrapping_add(tensor.byte_offset);
    Ok(Described { pointer, shape, strides, element, place })
}

/// A capsule of version 1, or without a version from a producer that knows none.
fn exported<'py>(value: &Bound<'py, PyAny>, arguments: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyCapsule>> {
    let py = value.py();
    let with_version = arguments.copy()?;
    with_version.set_item("max_version", (1, 0))?;
    let made = match value.call_method("__dlpack__", (), Some(&with_version)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            value.call_method("__dlpack__", (), Some(arguments))?
        }
        made => made?,
    };
    Ok(made.cast_into::<PyCapsule>()?)
}

/// `DLPackExchangeAPI`: functions of C by which a library tells of its arrays, without Python in between.
#[repr(C)]
struct Exchange {
    major: u32,
    minor: u32,
    earlier: *mut c_void,
    allocate: *mut c_void,
    lend: *mut c_void,
    make: *mut c_void,
    /// What an array says, as long as nobody changes it. 0, or -1 with an exception.
    describe: Option<unsafe extern "C" fn(*mut c_void, *mut MaybeUninit<Tensor>) -> c_int>,
}

/// A function of C that takes no arguments.
pub(super) fn without_arguments(function: &Bound<'_, PyAny>) -> Option<ffi::PyCFunction> {
    let object = function.as_ptr();
    // SAFETY: the object lives, and is asked for what it is of first.
    unsafe {
        let fits = ffi::PyCFunction_Check(object) != 0 && ffi::PyCFunction_GetFlags(object) == ffi::METH_NOARGS;
        if fits { ffi::PyCFunction_GetFunction(object) } else { None }
    }
}

/// torch's way to tell of tensors, where its version has one.
pub(super) struct Tensors {
    describe: unsafe extern "C" fn(*mut c_void, *mut MaybeUninit<Tensor>) -> c_int,
    /// The types whose objects it takes, which live as long as the interpreter.
    types: [usize; 2],
    /// `Tensor.is_neg`, of torch's module, which stays loaded: to look for it in each tensor takes as long as the call.
    is_neg: Option<ffi::PyCFunction>,
}

impl Tensors {
    /// That of the torch that is loaded, once a tensor comes.
    pub fn of_torch(value: &Bound<'_, PyAny>) -> PyResult<Option<Tensors>> {
        let py = value.py();
        let torch = py.import("torch")?;
        let tensor = torch.getattr("Tensor")?;
        let Ok(capsule) = tensor.getattr("__dlpack_c_exchange_api__") else { return Ok(None) };
        let Ok(capsule) = capsule.cast_into::<PyCapsule>() else { return Ok(None) };
        let Ok(exchange) = capsule.pointer_checked(Some(c"dlpack_exchange_api")) else { return Ok(None) };
        // SAFETY: a capsule of this name holds a `DLPackExchangeAPI`, which is static; in every version it begins with
        // the version.
        let major = unsafe { exchange.cast::<u32>().read() };
        if major != 1 {
            return Ok(None);
        }
        // SAFETY: as above, and of a version whose fields are these.
        let describe = unsafe { exchange.cast::<Exchange>().as_ref() }.describe;
        let parameter = torch.getattr("nn")?.getattr("Parameter")?;
        let types = [tensor.as_ptr() as usize, parameter.as_ptr() as usize];
        // Of another type it may be another function.
        let is_neg = match types.contains(&(value.get_type_ptr() as usize)) {
            true => without_arguments(&value.getattr("is_neg")?),
            false => None,
        };
        Ok(describe.map(|describe| Tensors { describe, types, is_neg }))
    }

    /// Whether it takes this object.
    pub fn takes(&self, value: &Bound<'_, PyAny>) -> bool {
        self.types.contains(&(value.get_type_ptr() as usize))
    }

    /// Whether a tensor is a negative view.
    pub fn is_negative(&self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Some(is_neg) = self.is_neg else { return value.call_method0(intern!(value.py(), "is_neg"))?.is_truthy() };
        // SAFETY: the object is of a type whose method this is, and the interpreter's lock is held; the result is a new
        // reference, or null with an exception.
        unsafe { Bound::from_owned_ptr_or_err(value.py(), is_neg(value.as_ptr(), null_mut())) }?.is_truthy()
    }

    /// What a tensor says; None of one that is better asked in Python, which knows why it is refused.
    pub fn described(&self, name: &'static str, value: &Bound<'_, PyAny>) -> Option<Described> {
        let mut tensor = MaybeUninit::uninit();
        // SAFETY: the object is of a type that the function takes, and the interpreter's lock is held.
        if unsafe { (self.describe)(value.as_ptr().cast(), &mut tensor) } != 0 {
            drop(PyErr::take(value.py()));
            return None;
        }
        // SAFETY: the function has filled it. Nothing runs that could change the tensor before it is read.
        let tensor = unsafe { tensor.assume_init_ref() };
        // int8, which torch's tensors of rows may not be.
        if (tensor.code, tensor.bits) == (0, 8) {
            return None;
        }
        read(name, tensor).ok()
    }
}
