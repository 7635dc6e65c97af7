//! torch's stable interface of C (`torch/csrc/stable/c/shim.h`, `torch/csrc/inductor/aoti_torch/c/shim.h`), by the
//! libraries of the torch that this process has loaded; and `wrap`, which is none of it.
//!
//! Of torch 2.11 and later, which has all of it. Functions return 0, or write why they do not to stderr.

use crate::arrays::{Array, Element, Place};
use libloading::os::unix::{Library, RTLD_LAZY};
use pyo3::prelude::*;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::slice;
use std::sync::OnceLock;

/// `RTLD_NOLOAD` of Linux: a library that is loaded already, or none.
const ONLY_LOADED: i32 = 4;

/// `AOTITorchError`.
type Status = i32;
/// `AtenTensorHandle`.
type Raw = *mut c_void;
/// A kernel (`StableIValue` is a word): arguments, which it owns, become results.
pub(super) type Kernel = unsafe extern "C" fn(*mut u64, u64, u64);
type Deleter = unsafe extern "C" fn(*mut c_void, *mut c_void);

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        #[allow(non_snake_case)]
        struct Functions { $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)* }

        impl Functions {
            fn of(library: &Library) -> Option<Functions> {
                // SAFETY: the functions have these types in every version that has them.
                Some(unsafe { Functions { $($name: *library.get(stringify!($name).as_bytes()).ok()?,)* } })
            }
        }
    };
}

functions! {
    aoti_torch_library_init_fragment: fn(*const c_char, *const c_char, u32, *mut Raw) -> Status;
    aoti_torch_library_init_impl: fn(*const c_char, *const c_char, *const c_char, u32, *mut Raw) -> Status;
    aoti_torch_library_def: fn(Raw, *const c_char) -> Status;
    torch_library_impl: fn(Raw, *const c_char, Kernel, u64) -> Status;
    aoti_torch_device_type_cpu: fn() -> i32;
    aoti_torch_device_type_cuda: fn() -> i32;
    aoti_torch_layout_strided: fn() -> i32;
    aoti_torch_dtype_bfloat16: fn() -> i32;
    aoti_torch_dtype_float16: fn() -> i32;
    aoti_torch_dtype_float32: fn() -> i32;
    aoti_torch_dtype_float8_e4m3fn: fn() -> i32;
    aoti_torch_dtype_int32: fn() -> i32;
    aoti_torch_dtype_int64: fn() -> i32;
    aoti_torch_dtype_uint8: fn() -> i32;
    aoti_torch_dtype_uint16: fn() -> i32;
    aoti_torch_dtype_uint32: fn() -> i32;
    aoti_torch_dtype_bool: fn() -> i32;
    aoti_torch_get_data_ptr: fn(Raw, *mut *mut c_void) -> Status;
    aoti_torch_get_storage_size: fn(Raw, *mut i64) -> Status;
    aoti_torch_get_dim: fn(Raw, *mut i64) -> Status;
    aoti_torch_get_sizes: fn(Raw, *mut *mut i64) -> Status;
    aoti_torch_get_strides: fn(Raw, *mut *mut i64) -> Status;
    aoti_torch_get_dtype: fn(Raw, *mut i32) -> Status;
    aoti_torch_get_device_type: fn(Raw, *mut i32) -> Status;
    aoti_torch_get_device_index: fn(Raw, *mut i32) -> Status;
    aoti_torch_get_layout: fn(Raw, *mut i32) -> Status;
    aoti_torch_new_tensor_handle: fn(Raw, *mut Raw) -> Status;
    aoti_torch_delete_tensor_object: fn(Raw) -> Status;
    aoti_torch_empty_strided: fn(i64, *const i64, *const i64, i32, i32, i32, *mut Raw) -> Status;
    aoti_torch__alloc_from_pool: fn(Raw, i64, i32, i64, *const i64, *const i64, *mut Raw) -> Status;
    torch_from_blob: fn(
        *mut c_void, i64, *const i64, *const i64, i64, i32, i32, i32, *mut Raw, i32, *const u8, i64, Deleter,
        *mut c_void
    ) -> Status;
    torch_new_list_reserve_size: fn(usize, *mut Raw) -> Status;
    torch_list_push_back: fn(Raw, u64) -> Status;
}

/// The interface of the torch that is loaded.
pub(super) struct Shim {
    functions: Functions,
    /// Numbers of torch's dtypes.
    elements: [(i32, Element); 10],
    cpu: i32,
    cuda: i32,
    strided: i32,
    /// `aoti_torch_get_current_cuda_stream`, of the library of GPUs; looked for once a tensor there comes.
    current_stream: OnceLock<Option<unsafe extern "C" fn(i32, *mut *mut c_void) -> Status>>,
}

fn loaded(name: &str) -> Option<Library> {
    // SAFETY: no library is loaded here, so none runs code of its own.
    unsafe { Library::open(Some(name), RTLD_LAZY | ONLY_LOADED) }.ok()
}

/// That of the torch that is loaded; None before that, and of a version that lacks it.
pub(super) fn shim() -> Option<&'static Shim> {
    static SHIM: OnceLock<Shim> = OnceLock::new();
    if SHIM.get().is_none() {
        let found = Shim::of_loaded()?;
        let _ = SHIM.set(found);
    }
    SHIM.get()
}

/// `PyObject *THPVariable_Wrap(const at::TensorBase &)` (`torch/csrc/autograd/python_variable.h`), which is no part of
/// the stable interface: its mangled name says what it takes. `AtenTensorHandle` is an `at::Tensor *`. An exception of
/// C++ ends the process: the function throws where there is no memory for an object.
pub(super) type Wrap = unsafe extern "C-unwind" fn(*const c_void) -> *mut pyo3::ffi::PyObject;

/// That of the torch that is loaded; None of a version that lacks it.
pub(super) fn wrap() -> Option<Wrap> {
    let library = loaded("libtorch_python.so")?;
    // SAFETY: a function of this name has this type.
    let found = unsafe { library.get(b"_Z16THPVariable_WrapRKN2at10TensorBaseE") }.ok().map(|found| *found);
    // It stays loaded.
    std::mem::forget(library);
    found
}

/// A library of operators that lasts as long as the process.
pub(super) struct Operators {
    definitions: Raw,
    kernels: Raw,
    version: u64,
}

impl Operators {
    /// Defines an operator of this schema, with a kernel of every device. False: torch refuses it.
    pub fn define(&self, shim: &Shim, name: &CStr, schema: &CStr, kernel: Kernel) -> bool {
        let functions = &shim.functions;
        // SAFETY: the libraries live as long as the process, and so does the kernel.
        unsafe {
            (functions.aoti_torch_library_def)(self.definitions, schema.as_ptr()) == 0
                && (functions.torch_library_impl)(self.kernels, name.as_ptr(), kernel, self.version) == 0
        }
    }
}

impl Shim {
    fn of_loaded() -> Option<Shim> {
        let library = loaded("libtorch_cpu.so")?;
        let f = Functions::of(&library)?;
        // It stays loaded.
        std::mem::forget(library);
        // SAFETY: they only return numbers.
        let elements = unsafe {
            [
                ((f.aoti_torch_dtype_bfloat16)(), Element::Bf16),
                ((f.aoti_torch_dtype_float16)(), Element::Fp16),
                ((f.aoti_torch_dtype_float32)(), Element::Fp32),
                ((f.aoti_torch_dtype_float8_e4m3fn)(), Element::Fp8E4m3),
                ((f.aoti_torch_dtype_int32)(), Element::I32),
                ((f.aoti_torch_dtype_int64)(), Element::I64),
                ((f.aoti_torch_dtype_uint8)(), Element::U8),
                ((f.aoti_torch_dtype_uint16)(), Element::U16),
                ((f.aoti_torch_dtype_uint32)(), Element::U32),
                ((f.aoti_torch_dtype_bool)(), Element::Bool),
            ]
        };
        // SAFETY: as above.
        let (cpu, cuda, strided) = unsafe {
            ((f.aoti_torch_device_type_cpu)(), (f.aoti_torch_device_type_cuda)(), (f.aoti_torch_layout_strided)())
        };
        Some(Shim { functions: f, elements, cpu, cuda, strided, current_stream: OnceLock::new() })
    }

    /// Operators of this namespace; None where torch refuses.
    pub fn operators(&self, namespace: &CStr) -> Option<Operators> {
        let (functions, file) = (&self.functions, c"bindings/python/src/operators");
        let (mut definitions, mut kernels) = (null_mut(), null_mut());
        let key = c"CompositeExplicitAutograd";
        // SAFETY: the strings end with 0, and the results have room.
        let made = unsafe {
            (functions.aoti_torch_library_init_fragment)(namespace.as_ptr(), file.as_ptr(), 0, &mut definitions) == 0
                && (functions.aoti_torch_library_init_impl)(
                    namespace.as_ptr(),
                    key.as_ptr(),
                    file.as_ptr(),
                    0,
                    &mut kernels,
                ) == 0
        };
        // `TORCH_VERSION_2_11_0`: the version of the interface that kernels speak.
        made.then_some(Operators { definitions, kernels, version: (2 << 56) | (11 << 48) })
    }

    /// A tensor that an argument owns.
    ///
    /// # Safety
    /// The word is that of an argument of type Tensor of a kernel, and is taken once.
    pub unsafe fn taken(&'static self, word: u64) -> Tensor {
        Tensor { shim: self, raw: word as Raw }
    }

    /// Memory of torch's own allocator; `strides` in elements. None: there is none.
    pub fn empty(&'static self, sizes: &[i64], strides: &[i64], element: Element, place: Place) -> Option<Tensor> {
        let mut raw = null_mut();
        let dimensions = sizes.len() as i64;
        let (dtype, (kind, index)) = (self.dtype(element)?, self.device(place));
        // SAFETY: sizes and strides have an entry for each dimension.
        let status = unsafe {
            let (sizes, strides) = (sizes.as_ptr(), strides.as_ptr());
            (self.functions.aoti_torch_empty_strided)(dimensions, sizes, strides, dtype, kind, index, &mut raw)
        };
        (status == 0).then_some(Tensor { shim: self, raw })
    }

    /// An int64 `[1]` at this address, of which torch tells `deleter` when nothing uses it.
    ///
    /// # Safety
    /// The memory is there until `deleter` was called with `context`, which may be on any thread. None: it never is.
    pub unsafe fn lent(
        &'static self,
        address: u64,
        place: Place,
        deleter: Deleter,
        context: *mut c_void,
    ) -> Option<Tensor> {
        let (mut raw, one) = (null_mut(), [1i64]);
        let (dtype, (kind, index)) = (self.dtype(Element::I64)?, self.device(place));
        // SAFETY: passed on to the caller.
        let status = unsafe {
            (self.functions.torch_from_blob)(
                address as *mut c_void,
                1,
                one.as_ptr(),
                one.as_ptr(),
                0,
                dtype,
                kind,
                index,
                &mut raw,
                self.strided,
                std::ptr::null(),
                0,
                deleter,
                context,
            )
        };
        (status == 0).then_some(Tensor { shim: self, raw })
    }

    /// The word of a result of type Tensor[]; None where there is no memory.
    pub fn list(&self, tensors: Vec<Tensor>) -> Option<u64> {
        let mut list = null_mut();
        // SAFETY: the result has room.
        if unsafe { (self.functions.torch_new_list_reserve_size)(tensors.len(), &mut list) } != 0 {
            return None;
        }
        for tensor in tensors {
            let raw = tensor.raw;
            std::mem::forget(tensor);
            // SAFETY: the list is new, and takes the tensor.
            unsafe { (self.functions.torch_list_push_back)(list, raw as u64) };
        }
        Some(list as u64)
    }

    /// The stream that is current on a GPU.
    pub fn current_stream(&self, ordinal: usize) -> Option<u64> {
        let function = self.current_stream.get_or_init(|| {
            let library = loaded("libtorch_cuda.so")?;
            // SAFETY: the function has this type in every version that has it.
            let found = unsafe { library.get(b"aoti_torch_get_current_cuda_stream") }.ok().map(|found| *found);
            std::mem::forget(library);
            found
        });
        let mut stream = null_mut();
        // SAFETY: the result has room.
        let status = unsafe { (*function)?(i32::try_from(ordinal).ok()?, &mut stream) };
        (status == 0).then_some(stream as u64)
    }

    fn dtype(&self, element: Element) -> Option<i32> {
        self.elements.iter().find(|(_, known)| *known == element).map(|(dtype, _)| *dtype)
    }

    fn device(&self, place: Place) -> (i32, i32) {
        match place {
            // Any: the CPU has no numbers.
            Place::Cpu => (self.cpu, -1),
            Place::Cuda(ordinal) => (self.cuda, ordinal as i32),
        }
    }
}

/// A tensor, with a reference of its own.
pub(super) struct Tensor {
    shim: &'static Shim,
    raw: Raw,
}

// SAFETY: torch counts references atomically, and what is called of a tensor reads what does not change.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: the reference is this one's own.
        unsafe { (self.shim.functions.aoti_torch_delete_tensor_object)(self.raw) };
    }
}

impl Tensor {
    /// The tensor's object in Python, with a reference of its own.
    pub fn object<'py>(&self, py: Python<'py>, wrap: Wrap) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: the tensor lives, and the interpreter's lock is held; the result is a new reference, or null with an
        // exception.
        unsafe { Bound::from_owned_ptr_or_err(py, wrap(self.raw)) }
    }

    /// Another reference; None where there is no memory.
    pub fn again(&self) -> Option<Tensor> {
        let mut raw = null_mut();
        // SAFETY: the tensor lives, and the result has room.
        let status = unsafe { (self.shim.functions.aoti_torch_new_tensor_handle)(self.raw, &mut raw) };
        (status == 0).then_some(Tensor { shim: self.shim, raw })
    }

    /// A tensor in memory that begins where this one does, so many bytes behind it; `strides` in elements. None: torch
    /// refuses it.
    pub fn part(&self, offset: i64, element: Element, sizes: &[i64], strides: &[i64]) -> Option<Tensor> {
        let (mut raw, dtype) = (null_mut(), self.shim.dtype(element)?);
        // SAFETY: the tensor lives, and sizes and strides have an entry for each dimension.
        let status = unsafe {
            let (dimensions, sizes, strides) = (sizes.len() as i64, sizes.as_ptr(), strides.as_ptr());
            let part = self.shim.functions.aoti_torch__alloc_from_pool;
            part(self.raw, offset, dtype, dimensions, sizes, strides, &mut raw)
        };
        (status == 0).then_some(Tensor { shim: self.shim, raw })
    }

    /// The address of its first element.
    pub fn address(&self) -> Option<u64> {
        let mut address = null_mut();
        // SAFETY: the tensor lives, and the result has room.
        let status = unsafe { (self.shim.functions.aoti_torch_get_data_ptr)(self.raw, &mut address) };
        (status == 0).then_some(address as u64)
    }

    /// The address of its first element; None where its storage was freed.
    pub fn memory(&self) -> Option<u64> {
        self.address().filter(|_| self.has_bytes(1))
    }

    /// Whether its storage has so many bytes: Python may free or shrink it.
    pub fn has_bytes(&self, wanted: i64) -> bool {
        let mut bytes = 0;
        // SAFETY: the tensor lives, and the result has room.
        let status = unsafe { (self.shim.functions.aoti_torch_get_storage_size)(self.raw, &mut bytes) };
        status == 0 && bytes >= wanted
    }

    /// What calls ask of it. None of one that is better asked in Python, which knows why it is refused.
    pub fn array(&self, name: &'static str) -> Option<Array> {
        let (f, raw) = (&self.shim.functions, self.raw);
        let (mut dimensions, mut memory, mut dtype, mut kind, mut index, mut layout) = (0i64, 0i64, 0, 0, 0, 0);
        let (mut sizes, mut strides) = (null_mut(), null_mut());
        // SAFETY: the tensor lives, and the results have room.
        let failed = unsafe {
            (f.aoti_torch_get_layout)(raw, &mut layout) != 0
                || layout != self.shim.strided
                || (f.aoti_torch_get_storage_size)(raw, &mut memory) != 0
                || (f.aoti_torch_get_dim)(raw, &mut dimensions) != 0
                || (f.aoti_torch_get_dtype)(raw, &mut dtype) != 0
                || (f.aoti_torch_get_device_type)(raw, &mut kind) != 0
                || (f.aoti_torch_get_device_index)(raw, &mut index) != 0
                || (f.aoti_torch_get_sizes)(raw, &mut sizes) != 0
                || (f.aoti_torch_get_strides)(raw, &mut strides) != 0
        };
        if failed {
            return None;
        }
        let place = match kind {
            kind if kind == self.shim.cpu => Place::Cpu,
            kind if kind == self.shim.cuda => Place::Cuda(usize::try_from(index).ok()?),
            _ => return None,
        };
        let element = self.shim.elements.iter().find(|(known, _)| *known == dtype)?.1;
        let dimensions = usize::try_from(dimensions).ok()?;
        let entries = |at: *mut i64| match dimensions {
            0 => &[],
            // SAFETY: sizes and strides have an entry for each dimension, and last as long as the tensor.
            _ => unsafe { slice::from_raw_parts(at.cast_const(), dimensions) },
        };
        if memory == 0 && !entries(sizes).contains(&0) {
            // Its storage was freed; the address is its offset there.
            return None;
        }
        Some(Array::of_operator(name, self.address()?, entries(sizes), entries(strides), element, place))
    }
}
