//! One GPU: its primary context, the loaded kernels, and memory.
//!
//! Place: one backend of `device`; `cuda_stream` holds streams, graphs and events. Callers may be on any thread; each
//! call makes the context current for its own time. All kernels, and the driver's own fill and copy kernels, are loaded
//! when the context is opened: loading may wait for running kernels, which would be a deadlock after a kernel that
//! waits for a peer. Nothing here panics.

use crate::base::cuda::{self as driver, Current, PrimaryContext, check, failure};
use crate::base::{Error, Result};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUfunction_attribute as FunctionAttribute, CUresult};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// Bytes of the pinned buffer through which set-up copies go: large enough to hide its waits.
const STAGING_BYTES: usize = 4 << 20;

/// The kernels, as nvcc built them: a fatbin of each translation unit.
#[cfg(tokenyard_fatbin)]
static FATBINS: &[&Aligned<[u8]>] = {
    macro_rules! image {
        ($path:literal) => {
            &Aligned { start: [], bytes: *include_bytes!($path) }
        };
    }
    &include!(concat!(env!("OUT_DIR"), "/images.rs"))
};

/// Bytes at an address the driver can read headers from.
#[cfg(tokenyard_fatbin)]
#[repr(C)]
struct Aligned<T: ?Sized> {
    start: [u64; 0],
    bytes: T,
}

fn images() -> Result<Vec<*const c_void>> {
    #[cfg(tokenyard_fatbin)]
    let images = Ok(FATBINS.iter().map(|fatbin| fatbin.bytes.as_ptr().cast()).collect());
    #[cfg(not(tokenyard_fatbin))]
    let images = Err(driver::error(
        "this build holds no GPU kernels: nvcc was not found when it was built",
        "install nvcc 13.0, point TOKENYARD_NVCC, CUDA_HOME or PATH at it, and build again; or use the CPU device",
    ));
    images
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A loaded kernel and the size of the struct it takes.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub function: sys::CUfunction,
    pub args_bytes: usize,
}

/// Loaded modules and their kernels by name.
struct Kernels {
    modules: Vec<sys::CUmodule>,
    by_name: HashMap<&'static str, Kernel>,
}

/// A stream and pinned memory for the copies that the host waits for.
struct Staging {
    stream: sys::CUstream,
    host: *mut u8,
    /// A copy never finished: the memory may still be written to, so it is not used again.
    broken: bool,
}

/// An open GPU.
pub(super) struct CudaDevice {
    ordinal: usize,
    name: String,
    multiprocessors: u32,
    kernels: Kernels,
    staging: Mutex<Staging>,
    // Last: everything above is freed within it.
    context: PrimaryContext,
}

// SAFETY: driver handles may be used from any thread; mutable state is under locks.
unsafe impl Send for CudaDevice {}
// SAFETY: as above.
unsafe impl Sync for CudaDevice {}

impl CudaDevice {
    /// Opens GPU `ordinal`, or shares it if it is open in this process.
    pub(super) fn open(ordinal: usize) -> Result<Arc<CudaDevice>> {
        static OPEN: OnceLock<Mutex<HashMap<usize, Weak<CudaDevice>>>> = OnceLock::new();
        let mut open = lock(OPEN.get_or_init(Mutex::default));
        if let Some(device) = open.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let device = Arc::new(Self::open_anew(ordinal)?);
        open.insert(ordinal, Arc::downgrade(&device));
        Ok(device)
    }

    fn open_anew(ordinal: usize) -> Result<CudaDevice> {
        let handle = driver::device(ordinal)?;
        let name = device_name(handle)?;
        let images = images()?;
        require_capability(handle, &name)?;
        let context = PrimaryContext::retain(ordinal)?;
        let _current = context.enter()?;
        let shared = driver::attribute(handle, Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let multiprocessors = driver::attribute(handle, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        // SAFETY: the images are fatbins that live for ever; the context is current.
        let kernels = unsafe { Kernels::load(&images, shared)? };
        let staging = Mutex::new(Staging::new()?);
        let device = CudaDevice {
            ordinal,
            name,
            multiprocessors: u32::try_from(multiprocessors).unwrap_or(1),
            kernels,
            staging,
            context,
        };
        device.warm_up()?;
        Ok(device)
    }

    /// Uses fills and copies once, so that the driver has loaded its kernels for them.
    fn warm_up(&self) -> Result<()> {
        let ptr = self.alloc(STAGING_BYTES)?;
        let mut byte = [0u8];
        let used = (|| {
            self.fill(ptr, STAGING_BYTES, 1)?;
            self.fill(ptr, 3, 2)?;
            self.write(ptr, &[3])?;
            self.copy_once(ptr + STAGING_BYTES as u64 / 2, ptr, STAGING_BYTES / 2)?;
            self.read(ptr + STAGING_BYTES as u64 / 2, &mut byte)
        })();
        // SAFETY: allocated above, and the copies were waited for.
        unsafe { self.free(ptr) };
        used?;
        if byte != [3] {
            return Err(driver::error(
                format!("{} did not return what was written to it", self.name),
                "check the GPU's health with nvidia-smi",
            ));
        }
        Ok(())
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn ordinal(&self) -> usize {
        self.ordinal
    }

    pub(super) fn can_store_into(&self, other: &CudaDevice) -> Result<bool> {
        driver::can_access(self.context.device(), other.context.device())
    }

    pub(super) fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Makes the context current until the guard is dropped.
    pub(super) fn enter(&self) -> Result<Current> {
        self.context.enter()
    }

    pub(super) fn bind(&self) -> Result<()> {
        self.context.bind()
    }

    pub(super) fn kernel(&self, name: &str) -> Result<Kernel> {
        self.kernels.by_name.get(name).copied().ok_or_else(|| unknown_kernel(name))
    }

    /// Whether the context still answers: errors of kernels stay with it.
    pub(super) fn check(&self) -> Result<()> {
        let _current = self.enter()?;
        let staging = lock(&self.staging);
        // SAFETY: the stream lives as long as self and is never captured.
        match driver::beside_captures(|| unsafe { sys::cuStreamQuery(staging.stream) }) {
            CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            code => Err(failure(code, "checking the GPU")),
        }
    }

    pub(super) fn alloc(&self, bytes: usize) -> Result<u64> {
        let _current = self.enter()?;
        let mut ptr: sys::CUdeviceptr = 0;
        // SAFETY: the context is current; freed by the buffer's drop.
        match unsafe { sys::cuMemAlloc_v2(&mut ptr, bytes.max(1)) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(out_of_memory(&self.name, bytes)),
            code => check(code, "allocating device memory").map(|()| ptr),
        }
    }

    /// # Safety
    /// `ptr` came from `alloc` and is not used again.
    pub(super) unsafe fn free(&self, ptr: u64) {
        if let Ok(_current) = self.enter() {
            // SAFETY: the caller's promise; the driver waits for work that uses it.
            let _ = unsafe { sys::cuMemFree_v2(ptr) };
        }
    }

    /// Pinned memory, zeroed: its address here and on the device.
    pub(super) fn alloc_host(&self, bytes: usize) -> Result<(*mut u8, u64)> {
        let _current = self.enter()?;
        let host = pinned(bytes.max(1))?;
        let mut ptr: sys::CUdeviceptr = 0;
        // SAFETY: `host` is pinned memory allocated with DEVICEMAP in this context.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut ptr, host.cast(), 0) };
        if let Err(why) = check(code, "mapping pinned memory") {
            // SAFETY: allocated above and given to nobody.
            let _ = unsafe { sys::cuMemFreeHost(host.cast()) };
            return Err(why);
        }
        Ok((host, ptr))
    }

    /// # Safety
    /// `host` came from `alloc_host` and is not used again.
    pub(super) unsafe fn free_host(&self, host: *mut u8) {
        if let Ok(_current) = self.enter() {
            // SAFETY: the caller's promise.
            let _ = unsafe { sys::cuMemFreeHost(host.cast()) };
        }
    }

    /// Copies host bytes to the device and waits.
    pub(super) fn write(&self, ptr: u64, data: &[u8]) -> Result<()> {
        let _current = self.enter()?;
        let mut staging = lock(&self.staging);
        for (index, chunk) in data.chunks(STAGING_BYTES).enumerate() {
            let at = ptr + (index * STAGING_BYTES) as u64;
            staging.transfer(|stream, host| {
                // SAFETY: the staging buffer holds a chunk, and no copy is using it.
                unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), host, chunk.len()) };
                // SAFETY: the caller checked the span; the staging buffer stays until the copy was waited for.
                unsafe { sys::cuMemcpyHtoDAsync_v2(at, host.cast_const().cast(), chunk.len(), stream) }
            })?;
        }
        Ok(())
    }

    /// Copies device bytes to the host and waits.
    pub(super) fn read(&self, ptr: u64, data: &mut [u8]) -> Result<()> {
        let _current = self.enter()?;
        let mut staging = lock(&self.staging);
        for (index, chunk) in data.chunks_mut(STAGING_BYTES).enumerate() {
            let at = ptr + (index * STAGING_BYTES) as u64;
            staging.transfer(|stream, host| {
                // SAFETY: as in `write`.
                unsafe { sys::cuMemcpyDtoHAsync_v2(host.cast(), at, chunk.len(), stream) }
            })?;
            // SAFETY: the copy was waited for; the buffer is initialised and holds a chunk.
            unsafe { std::ptr::copy_nonoverlapping(staging.host, chunk.as_mut_ptr(), chunk.len()) };
        }
        Ok(())
    }

    /// Sets device bytes and waits.
    pub(super) fn fill(&self, ptr: u64, bytes: usize, byte: u8) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.enter()?;
        // SAFETY: the caller checked the span.
        lock(&self.staging).transfer(|stream, _| unsafe { sys::cuMemsetD8Async(ptr, byte, bytes, stream) })
    }

    fn copy_once(&self, dst: u64, src: u64, bytes: usize) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: both spans are the caller's.
        lock(&self.staging).transfer(|stream, _| unsafe { sys::cuMemcpyAsync(dst, src, bytes, stream) })
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        lock(&self.staging).close();
        // SAFETY: no stream, graph or buffer holds this device any more, and the context is current.
        unsafe { self.kernels.unload() };
    }
}

impl Kernels {
    /// Loads every kernel now and lets each use all the shared memory a block can have.
    ///
    /// # Safety
    /// `images` are fatbins; the context is current.
    unsafe fn load(images: &[*const c_void], shared_bytes: c_int) -> Result<Kernels> {
        let mut kernels = Kernels { modules: Vec::new(), by_name: HashMap::new() };
        // SAFETY: passed on to the caller.
        let loaded = unsafe { kernels.load_all(images, shared_bytes) };
        if loaded.is_err() {
            // SAFETY: used by nobody yet.
            unsafe { kernels.unload() };
        }
        loaded.map(|()| kernels)
    }

    /// # Safety
    /// As `load`.
    unsafe fn load_all(&mut self, images: &[*const c_void], shared_bytes: c_int) -> Result<()> {
        let mut found = HashMap::new();
        for image in images {
            let mut module: sys::CUmodule = std::ptr::null_mut();
            // SAFETY: passed on to the caller.
            check(unsafe { sys::cuModuleLoadData(&mut module, *image) }, "loading the kernels")?;
            self.modules.push(module);
            // SAFETY: it was loaded above.
            found.extend(unsafe { functions_of(module)? });
        }
        for name in crate::kernels::kernel_names() {
            let function = found.get(name).ok_or_else(|| unknown_kernel(name))?;
            // SAFETY: of a module that was loaded above.
            let kernel = unsafe { load_kernel(*function, name, shared_bytes)? };
            self.by_name.insert(name, kernel);
        }
        Ok(())
    }

    /// # Safety
    /// The context is current, and nobody uses the kernels any more.
    unsafe fn unload(&mut self) {
        for module in self.modules.drain(..) {
            // SAFETY: loaded once; passed on to the caller.
            let _ = unsafe { sys::cuModuleUnload(module) };
        }
    }
}

/// The kernels of a module by name. Asking a module for one that another has would be an error of the driver, which
/// compute-sanitizer reports.
///
/// # Safety
/// `module` is loaded and its context current.
unsafe fn functions_of(module: sys::CUmodule) -> Result<Vec<(String, sys::CUfunction)>> {
    let mut count = 0;
    // SAFETY: passed on to the caller; `count` outlives the call.
    check(unsafe { sys::cuModuleGetFunctionCount(&mut count, module) }, "counting the kernels")?;
    let mut functions: Vec<sys::CUfunction> = vec![std::ptr::null_mut(); count as usize];
    // SAFETY: as above; there is room for so many.
    check(unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) }, "listing the kernels")?;
    let named = |function: sys::CUfunction| {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: of the loaded module; `name` outlives the call.
        check(unsafe { sys::cuFuncGetName(&mut name, function) }, "asking a kernel's name")?;
        // SAFETY: a C string, which lasts as long as the module.
        Ok((unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(), function))
    };
    functions.into_iter().map(named).collect()
}

/// # Safety
/// `function` is of a loaded module and its context current.
unsafe fn load_kernel(function: sys::CUfunction, name: &str, shared_bytes: c_int) -> Result<Kernel> {
    // SAFETY: passed on to the caller.
    check(unsafe { sys::cuFuncLoad(function) }, &format!("loading kernel {name}"))?;
    let mut fixed: c_int = 0;
    // SAFETY: as above; `fixed` outlives the call.
    let code = unsafe {
        sys::cuFuncGetAttribute(&mut fixed, FunctionAttribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
    };
    check(code, &format!("asking the shared memory of kernel {name}"))?;
    let dynamic = shared_bytes.saturating_sub(fixed);
    let which = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: as above.
    let code = unsafe { sys::cuFuncSetAttribute(function, which, dynamic) };
    check(code, &format!("allowing kernel {name} {dynamic} bytes of shared memory"))?;
    let (mut offset, mut args_bytes) = (0usize, 0usize);
    // SAFETY: as above; both outlive the call.
    let code = unsafe { sys::cuFuncGetParamInfo(function, 0, &mut offset, &mut args_bytes) };
    check(code, &format!("asking the argument of kernel {name}"))?;
    Ok(Kernel { function, args_bytes })
}

impl Staging {
    /// The context must be current.
    fn new() -> Result<Staging> {
        let stream = driver::new_stream()?;
        match pinned(STAGING_BYTES) {
            Ok(host) => Ok(Staging { stream, host, broken: false }),
            Err(why) => {
                // SAFETY: created above and used by nobody.
                let _ = unsafe { sys::cuStreamDestroy_v2(stream) };
                Err(why)
            }
        }
    }

    /// Enqueues one piece of work that may use the staging buffer, and waits for it.
    fn transfer(&mut self, enqueue: impl FnOnce(sys::CUstream, *mut u8) -> CUresult) -> Result<()> {
        if self.broken {
            return Err(driver::error(
                "an earlier copy to or from the GPU never finished",
                "the GPU hangs: restart the process, and look at nvidia-smi",
            ));
        }
        check(enqueue(self.stream, self.host), "copying to or from the GPU")?;
        // SAFETY: the stream lives as long as self and is never captured.
        let done = unsafe { driver::wait_setup(self.stream) };
        self.broken = done.is_err();
        done
    }

    /// The context must be current.
    fn close(&mut self) {
        // SAFETY: created in `new` and closed once; the driver lets pending work finish.
        unsafe {
            let _ = sys::cuStreamDestroy_v2(self.stream);
            if !self.broken {
                let _ = sys::cuMemFreeHost(self.host.cast());
            }
        }
    }
}

/// Pinned, mapped, portable memory, zeroed. The context must be current.
fn pinned(bytes: usize) -> Result<*mut u8> {
    let mut host: *mut c_void = std::ptr::null_mut();
    let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
    // SAFETY: a context is current; the caller frees it.
    let code = unsafe { sys::cuMemHostAlloc(&mut host, bytes, flags) };
    check(code, &format!("pinning {bytes} bytes of host memory"))?;
    // SAFETY: freshly allocated with this size.
    unsafe { std::ptr::write_bytes(host.cast::<u8>(), 0, bytes) };
    Ok(host.cast())
}

fn unknown_kernel(name: &str) -> Error {
    driver::error(format!("the GPU build has no kernel {name}"), "name it in kernels/kernels.inc and build again")
}

fn device_name(device: sys::CUdevice) -> Result<String> {
    let mut name: [c_char; 128] = [0; 128];
    // SAFETY: the buffer has the length passed, less one so that it always ends in 0.
    let code = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, device) };
    check(code, "asking the GPU's name")?;
    // SAFETY: the last byte is 0.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

/// The kernels need Hopper or later.
fn require_capability(device: sys::CUdevice, name: &str) -> Result<()> {
    let major = driver::attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = driver::attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    if major >= 9 {
        return Ok(());
    }
    Err(driver::error(
        format!("{name} has compute capability {major}.{minor}"),
        "the kernels need 9.0 (Hopper) or later; use such a GPU, or the CPU device",
    ))
}

/// The context must be current.
fn out_of_memory(name: &str, needed: usize) -> Error {
    let (mut free, mut total) = (0usize, 0usize);
    // SAFETY: a context is current; both outlive the call.
    let known = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) } == CUresult::CUDA_SUCCESS;
    let rest = if known { format!("{free} of its {total} bytes are free") } else { "it has less free".into() };
    driver::error(
        format!("{name} was asked for {needed} bytes and {rest}"),
        "free device memory, or plan for fewer tokens",
    )
}
