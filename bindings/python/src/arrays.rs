//! Arrays of Python: tensors of torch, and what has `__array_interface__` (numpy), `__cuda_array_interface__` (cupy) or
//! `__dlpack__`.
//!
//! Nothing here imports torch: its types are asked of the module that is loaded once a tensor comes.

use super::dlpack;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyDict, PyString};
use smallvec::SmallVec;
use tokenyard::{Device, Dtype, View};

/// Type of an array's elements, as far as calls tell types apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    Bf16,
    Fp16,
    Fp32,
    Fp8E4m3,
    I32,
    I64,
    /// Bytes that may stand for anything of their size: uint8 for fp8 rows, uint16 for bf16.
    U8,
    U16,
    U32,
    Bool,
}

impl Element {
    /// What messages call it.
    pub fn name(self) -> &'static str {
        match self {
            Element::Bf16 => "bfloat16",
            Element::Fp16 => "float16",
            Element::Fp32 => "float32",
            Element::Fp8E4m3 => "float8_e4m3fn",
            Element::I32 => "int32",
            Element::I64 => "int64",
            Element::U8 => "uint8",
            Element::U16 => "uint16",
            Element::U32 => "uint32",
            Element::Bool => "bool",
        }
    }

    pub fn bytes(self) -> usize {
        match self {
            Element::Fp8E4m3 | Element::U8 | Element::Bool => 1,
            Element::Bf16 | Element::Fp16 | Element::U16 => 2,
            Element::Fp32 | Element::I32 | Element::U32 => 4,
            Element::I64 => 8,
        }
    }

    /// Whether torch has gradients of such elements.
    pub fn has_gradient(self) -> bool {
        matches!(self, Element::Bf16 | Element::Fp16 | Element::Fp32 | Element::Fp8E4m3)
    }

    /// The dtype of sums, and of rows for combine, whose elements these are; numpy has no bf16. None: there is none.
    pub fn of_sums(self) -> Option<Dtype> {
        match self {
            Element::Bf16 | Element::U16 => Some(Dtype::Bf16),
            Element::Fp16 => Some(Dtype::Fp16),
            Element::Fp32 => Some(Dtype::Fp32),
            _ => None,
        }
    }

    /// Whether rows of this dtype may lie in such an array: numpy has no bf16 and no fp8.
    pub fn holds(self, dtype: Dtype) -> bool {
        match dtype {
            Dtype::Bf16 => matches!(self, Element::Bf16 | Element::U16),
            Dtype::Fp16 => self == Element::Fp16,
            Dtype::Fp32 => self == Element::Fp32,
            Dtype::Fp8E4m3 => matches!(self, Element::Fp8E4m3 | Element::U8),
            _ => false,
        }
    }
}

/// What torch calls them.
const TORCH_TYPES: [(&str, Element); 10] = [
    ("bfloat16", Element::Bf16),
    ("float16", Element::Fp16),
    ("float32", Element::Fp32),
    ("float8_e4m3fn", Element::Fp8E4m3),
    ("int32", Element::I32),
    ("int64", Element::I64),
    ("uint8", Element::U8),
    ("uint16", Element::U16),
    ("uint32", Element::U32),
    ("bool", Element::Bool),
];

/// What array interfaces call them.
const TYPE_STRINGS: [(&str, Element); 9] = [
    ("<f2", Element::Fp16),
    ("<f4", Element::Fp32),
    ("<i4", Element::I32),
    ("<i8", Element::I64),
    ("|u1", Element::U8),
    ("<u2", Element::U16),
    ("<u4", Element::U32),
    ("|b1", Element::Bool),
    ("|i1", Element::U8),
];

/// A number for each dimension of an array. Calls make several of each array, so that those of few dimensions take no
/// memory of their own.
pub(super) type Dimensions = SmallVec<[usize; 4]>;

/// Where an array lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Cpu,
    Cuda(usize),
}

/// An array: its memory, shape and strides. Keeps the Python object, and so the memory, alive.
pub(super) struct Array {
    name: &'static str,
    /// None: a tensor that an operator of torch was given or made, which keeps it itself.
    owner: Option<Py<PyAny>>,
    /// What keeps the memory of an array that DLPack describes.
    pub capsule: Option<Py<PyCapsule>>,
    pointer: u64,
    shape: Dimensions,
    /// In bytes.
    strides: Dimensions,
    pub element: Element,
    place: Place,
}

impl Array {
    /// The array that an argument is.
    pub fn of(name: &'static str, value: &Bound<'_, PyAny>, writes: bool) -> PyResult<Array> {
        let py = value.py();
        if let Some(Some(tensors)) = TENSORS.get(py)
            && tensors.takes(value)
            && let Some(described) = tensors.described(name, value)
        {
            must_not_be_negative(name, tensors.is_negative(value)?)?;
            let mut array = Array::described(name, value, described, None);
            array.pointer = pointer_of_torch(value, array.pointer)?;
            return Ok(array);
        }
        if value.hasattr(intern!(py, "data_ptr"))? {
            TENSORS.get_or_try_init(py, || dlpack::Tensors::of_torch(value))?;
            return Array::of_torch(name, value);
        }
        if let Ok(interface) = value.getattr(intern!(py, "__cuda_array_interface__")) {
            let ordinal = value.getattr("device").and_then(|device| device.getattr("id")?.extract()).unwrap_or(0);
            return Array::of_interface(name, value, &interface, Place::Cuda(ordinal), writes);
        }
        if let Ok(interface) = value.getattr(intern!(py, "__array_interface__")) {
            return Array::of_interface(name, value, &interface, Place::Cpu, writes);
        }
        if value.hasattr(intern!(py, "__dlpack__"))? {
            return Array::of_dlpack(name, value, writes);
        }
        Err(PyTypeError::new_err(format!(
            "{name} is a {}: give a torch tensor, or an array with __array_interface__, __cuda_array_interface__ or \
             __dlpack__",
            value.get_type().name()?
        )))
    }

    fn of_dlpack(name: &'static str, value: &Bound<'_, PyAny>, writes: bool) -> PyResult<Array> {
        let (capsule, described) = dlpack::described(name, value, writes)?;
        Ok(Array::described(name, value, described, Some(capsule.unbind())))
    }

    /// A tensor of an operator of torch; `strides` in elements. The caller keeps it.
    pub fn of_operator(
        name: &'static str,
        pointer: u64,
        sizes: &[i64],
        strides: &[i64],
        element: Element,
        place: Place,
    ) -> Array {
        // torch has no negative ones.
        let whole = |number: &i64| usize::try_from(*number).unwrap_or(0);
        let shape = sizes.iter().map(whole).collect();
        let strides = strides.iter().map(|stride| whole(stride).saturating_mul(element.bytes())).collect();
        Array { name, owner: None, capsule: None, pointer, shape, strides, element, place }
    }

    /// The same, of a tensor that the caller keeps. None of one whose memory something else keeps.
    pub fn lent(mut self) -> Option<Array> {
        self.owner = None;
        self.capsule.is_none().then_some(self)
    }

    fn described(
        name: &'static str,
        value: &Bound<'_, PyAny>,
        described: dlpack::Described,
        capsule: Option<Py<PyCapsule>>,
    ) -> Array {
        let dlpack::Described { pointer, shape, strides, element, place } = described;
        let strides = strides.unwrap_or_else(|| packed(&shape, element.bytes()));
        Array { name, owner: Some(value.clone().unbind()), capsule, pointer, shape, strides, element, place }
    }

    /// An array without gaps whose elements are of one of these types.
    pub fn whole(name: &'static str, value: &Bound<'_, PyAny>, elements: &[Element], writes: bool) -> PyResult<Array> {
        let array = Array::of(name, value, writes)?;
        array.must_be_whole(elements)?;
        Ok(array)
    }

    /// Refuses gaps, and elements of other types.
    pub fn must_be_whole(&self, elements: &[Element]) -> PyResult<()> {
        self.must_hold(elements)?;
        self.must_be_contiguous()
    }

    fn of_torch(name: &'static str, tensor: &Bound<'_, PyAny>) -> PyResult<Array> {
        let py = tensor.py();
        let element = torch_element(name, &tensor.getattr(intern!(py, "dtype"))?)?;
        let device = tensor.getattr(intern!(py, "device"))?;
        let kind = device.getattr(intern!(py, "type"))?;
        let place = match kind.cast::<PyString>()?.to_cow()?.as_ref() {
            "cpu" => Place::Cpu,
            "cuda" => Place::Cuda(device.getattr(intern!(py, "index"))?.extract::<Option<usize>>()?.unwrap_or(0)),
            other => return Err(PyValueError::new_err(format!("{name} is on {other}: give a tensor on cpu or cuda"))),
        };
        if !tensor.getattr(intern!(py, "layout"))?.is(dense(py)?) {
            let layout = tensor.getattr(intern!(py, "layout"))?;
            return Err(PyTypeError::new_err(format!("{name} has the layout {layout}: give a dense tensor")));
        }
        must_not_be_negative(name, tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()?)?;
        let asked = || -> PyResult<(u64, Dimensions, Dimensions)> {
            let pointer = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
            let shape: Vec<usize> = tensor.getattr(intern!(py, "shape"))?.extract()?;
            let strides: Vec<usize> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
            Ok((pointer, shape.into(), strides.into()))
        };
        let (pointer, shape, mut strides) = asked().map_err(|why| {
            let raised = PyTypeError::new_err(format!(
                "{name} is a tensor without one memory, as in vmap, in transforms of torch.func and of nested tensors: \
                 give a plain tensor, or a detached one"
            ));
            raised.set_cause(py, Some(why));
            raised
        })?;
        strides.iter_mut().for_each(|stride| *stride = stride.saturating_mul(element.bytes()));
        let pointer = pointer_of_torch(tensor, pointer)?;
        Ok(Array { name, owner: Some(tensor.clone().unbind()), capsule: None, pointer, shape, strides, element, place })
    }

    fn of_interface(
        name: &'static str,
        value: &Bound<'_, PyAny>,
        interface: &Bound<'_, PyAny>,
        place: Place,
        writes: bool,
    ) -> PyResult<Array> {
        let interface = interface.cast::<PyDict>()?;
        let field = |key: &str| -> PyResult<Bound<'_, PyAny>> {
            let found = interface.get_item(key)?;
            found.ok_or_else(|| PyTypeError::new_err(format!("{name}: its array interface has no {key}")))
        };
        let none = |key: &str, why: PyErr| {
            PyTypeError::new_err(format!("{name}: the {key} of its array interface is none ({why})"))
        };
        let text: String = field("typestr")?.extract().map_err(|why| none("typestr", why))?;
        let element = TYPE_STRINGS.iter().find(|(known, _)| *known == text).map(|(_, element)| *element);
        let element = element.ok_or_else(|| {
            PyTypeError::new_err(format!("{name} has elements of type {text}: give float, int32, int64 or bytes"))
        })?;
        let Ok((pointer, read_only)) = field("data")?.extract::<(u64, bool)>() else {
            return Err(PyTypeError::new_err(format!("{name}: the data of its array interface is no address")));
        };
        if writes && read_only {
            return Err(PyValueError::new_err(format!("{name} is read-only: give an array that can be written")));
        }
        let shape: Dimensions = field("shape")?.extract::<Vec<usize>>().map_err(|why| none("shape", why))?.into();
        let strides = interface.get_item("strides")?.filter(|strides| !strides.is_none());
        let strides = match strides {
            Some(strides) => {
                let signed: Vec<isize> = strides.extract().map_err(|why| none("strides", why))?;
                let forward = signed.iter().map(|stride| usize::try_from(*stride)).collect::<Result<_, _>>();
                forward.map_err(|_| PyValueError::new_err(format!("{name} runs backwards: give a copy of it")))?
            }
            None => packed(&shape, element.bytes()),
        };
        if strides.len() != shape.len() {
            let (of, dimensions) = (strides.len(), shape.len());
            let found = format!("{name}: its array interface has {of} strides of {dimensions} dimensions");
            return Err(PyValueError::new_err(format!("{found}: give one for each")));
        }
        Ok(Array { name, owner: Some(value.clone().unbind()), capsule: None, pointer, shape, strides, element, place })
    }

    /// The same array as it is now: torch can give a tensor other memory. Refuses another shape, stride or type.
    pub fn renewed(&self, py: Python<'_>) -> PyResult<Array> {
        let Some(owner) = &self.owner else {
            return Err(PyValueError::new_err(format!("{} is an operator's own: give an array", self.name)));
        };
        let now = Array::of(self.name, owner.bind(py), true)?;
        // An array that DLPack describes is where it was: another place is that of a copy, or no longer the producer's.
        let moved = now.capsule.is_some() && now.pointer != self.pointer;
        if moved || (&now.shape, &now.strides, now.element) != (&self.shape, &self.strides, self.element) {
            let name = self.name;
            return Err(PyValueError::new_err(format!("{name} has changed since the output was made: make a new one")));
        }
        Ok(now)
    }

    /// The address of its first element.
    pub fn address(&self) -> u64 {
        self.pointer
    }

    /// Where it lies.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Elements of the first dimension.
    pub fn len(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Refuses another number of dimensions.
    pub fn must_have(&self, dimensions: usize) -> PyResult<()> {
        if self.shape.len() == dimensions {
            return Ok(());
        }
        Err(PyValueError::new_err(format!(
            "{} has the shape {:?}: give an array of {dimensions} dimensions",
            self.name, self.shape
        )))
    }

    /// Refuses another shape.
    pub fn must_be_shaped(&self, shape: &[usize]) -> PyResult<()> {
        if self.shape[..] == *shape {
            return Ok(());
        }
        Err(PyValueError::new_err(format!("{} has the shape {:?}: give {shape:?}", self.name, self.shape)))
    }

    /// Refuses another length of the last dimension.
    pub fn must_have_columns(&self, columns: usize) -> PyResult<()> {
        if self.shape.last() == Some(&columns) {
            return Ok(());
        }
        self.must_be_in(self.places(), columns)
    }

    /// Refuses what does not lie beside rows: in the shape of the rows but for the columns, or row after row.
    pub fn must_be_beside(&self, rows: &[usize], columns: usize) -> PyResult<()> {
        let all = rows.iter().fold(1usize, |all, length| all.saturating_mul(*length));
        if self.shape[..] == [all, columns] { Ok(()) } else { self.must_be_in(rows, columns) }
    }

    /// Refuses another shape than that of rows in these places.
    pub fn must_be_in(&self, places: &[usize], columns: usize) -> PyResult<()> {
        if self.shape.split_last() == Some((&columns, places)) {
            return Ok(());
        }
        self.must_be_shaped(&[places, &[columns]].concat())
    }

    /// Length of the last dimension.
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }

    /// Lengths of the dimensions before the last.
    pub fn places(&self) -> &[usize] {
        self.shape.split_last().map_or(&[], |(_, places)| places)
    }

    /// Refuses elements of another type.
    pub fn must_hold(&self, elements: &[Element]) -> PyResult<()> {
        if elements.contains(&self.element) {
            return Ok(());
        }
        let wanted: Vec<_> = elements.iter().map(|element| element.name()).collect();
        let (name, found) = (self.name, self.element.name());
        Err(PyTypeError::new_err(format!("{name} has elements of type {found}: give {}", wanted.join(" or "))))
    }

    /// Refuses rows that cannot be of the dtype.
    pub fn must_be_rows_of(&self, dtype: Dtype) -> PyResult<()> {
        if self.element.holds(dtype) {
            return Ok(());
        }
        let found = self.element.name();
        Err(PyTypeError::new_err(format!("{} has elements of type {found}: give rows of {dtype}", self.name)))
    }

    /// Bytes from one row to the next of an array whose rows have no gaps inside; None where there is no next one.
    pub fn pitch(&self) -> PyResult<Option<usize>> {
        let inner = packed(&self.shape, self.element.bytes());
        if self.shape.contains(&0) {
            return Ok(None);
        }
        let rows_apart = self.strides.first().copied().unwrap_or(0);
        let inside = self.strides.iter().zip(&inner).zip(&self.shape).skip(1);
        if inside.into_iter().any(|((stride, packed), length)| *length > 1 && stride != packed) {
            return Err(PyValueError::new_err(format!(
                "{} has the strides {:?} in bytes: its rows must be contiguous; give a contiguous copy",
                self.name, self.strides
            )));
        }
        Ok((self.len() > 1).then_some(rows_apart))
    }

    /// Refuses gaps.
    pub fn must_be_contiguous(&self) -> PyResult<()> {
        let packed = packed(&self.shape, self.element.bytes());
        let gaps = self.strides.iter().zip(&packed).zip(&self.shape).any(|((a, b), length)| *length > 1 && a != b);
        if gaps && !self.shape.contains(&0) {
            return Err(PyValueError::new_err(format!(
                "{} has the strides {:?} in bytes: give a contiguous array",
                self.name, self.strides
            )));
        }
        Ok(())
    }

    /// Strides of two dimensions, in bytes.
    pub fn strides(&self) -> (usize, usize) {
        (self.strides.first().copied().unwrap_or(0), self.strides.get(1).copied().unwrap_or(0))
    }

    /// The memory from the first to the last element; the caller keeps the array until the work with it is done.
    pub fn view(&self, device: &Device) -> PyResult<View> {
        let wanted = device.ordinal().map_or(Place::Cpu, Place::Cuda);
        if self.place != wanted {
            return Err(PyValueError::new_err(format!(
                "{} is on {:?} and the context on {wanted:?}: give arrays on the context's device",
                self.name, self.place
            )));
        }
        let bytes = if self.shape.contains(&0) {
            0
        } else {
            let last: Option<usize> = self
                .shape
                .iter()
                .zip(&self.strides)
                .try_fold(0usize, |sum, (length, stride)| sum.checked_add((length - 1).checked_mul(*stride)?));
            let end = last.and_then(|last| last.checked_add(self.element.bytes()));
            end.ok_or_else(|| PyValueError::new_err(format!("{} is larger than memory", self.name)))?
        };
        if self.pointer == 0 && bytes > 0 {
            return Err(PyValueError::new_err(format!(
                "{} has no memory, as a fake tensor, a wrapper or one whose storage was freed, and {bytes} bytes are \
                 needed: give an array that has, or a wrapper's local tensor once it is there",
                self.name
            )));
        }
        // SAFETY: the array holds these bytes as long as its object lives. Calls of the CPU device keep the object
        // until they have ended (context.rs, `finished`); GPU libraries free memory in the order of the stream's
        // work. That nothing else writes meanwhile is the caller's promise, as for any library that takes arrays.
        Ok(unsafe { View::from_raw(device, self.pointer, bytes) })
    }
}

/// The address of a tensor's first element; 0 of one whose storage was freed, of which torch gives the offset there.
fn pointer_of_torch(tensor: &Bound<'_, PyAny>, pointer: u64) -> PyResult<u64> {
    // No offset is as large as usual addresses are, and to ask for the storage takes longer than all else.
    if pointer == 0 || pointer >= 1 << 40 {
        return Ok(pointer);
    }
    let py = tensor.py();
    let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
    let bytes: u64 = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    Ok(if bytes == 0 { 0 } else { pointer })
}

/// Strides of an array without gaps, in what an element takes: bytes, or 1.
pub(super) fn packed(shape: &[usize], element: usize) -> Dimensions {
    let mut strides = Dimensions::with_capacity(shape.len());
    let mut next = element;
    for length in shape.iter().rev() {
        strides.push(next);
        next = next.saturating_mul((*length).max(1));
    }
    strides.reverse();
    strides
}

/// How torch tells of tensors in C, where it does; looked for once a tensor comes.
static TENSORS: PyOnceLock<Option<dlpack::Tensors>> = PyOnceLock::new();

/// Refuses a view whose memory holds the negative of its elements.
fn must_not_be_negative(name: &str, negative: bool) -> PyResult<()> {
    if !negative {
        return Ok(());
    }
    let advice = "its memory holds the negative: give its resolve_neg()";
    Err(PyValueError::new_err(format!("{name} is a negative view, {advice}")))
}

/// torch's layout of dense tensors, a single object.
fn dense(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static DENSE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let dense = DENSE.get_or_try_init(py, || py.import("torch")?.getattr("strided").map(Bound::unbind))?;
    Ok(dense.bind(py))
}

/// The element of one of torch's dtypes, which are single objects.
fn torch_element(name: &'static str, dtype: &Bound<'_, PyAny>) -> PyResult<Element> {
    static KNOWN: PyOnceLock<Vec<(usize, Element)>> = PyOnceLock::new();
    let py = dtype.py();
    let known = KNOWN.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        let of = |(name, element): &(&str, Element)| {
            torch.getattr(*name).ok().map(|dtype| (dtype.as_ptr() as usize, *element))
        };
        Ok::<_, PyErr>(TORCH_TYPES.iter().filter_map(of).collect())
    })?;
    let found = known.iter().find(|(object, _)| *object == dtype.as_ptr() as usize);
    found.map(|(_, element)| *element).ok_or_else(|| {
        let types = TORCH_TYPES.map(|(name, _)| name).join(", ");
        PyTypeError::new_err(format!("{name} has the dtype {dtype}: give one of {types}"))
    })
}
