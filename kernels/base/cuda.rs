//! The little that kernels and transport both need of the CUDA driver: whether it is there, whether a call succeeded,
//! and which context is current.
//!
//! Runs on any thread. It never panics: nothing of the driver is called before its library was found, and only its
//! version before that was found new enough. It never leaves a context current.

use super::{Error, Result, wait};
use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;
use std::time::Duration;

/// The oldest driver interface this crate calls: every symbol it uses exists from this version on.
const OLDEST_DRIVER: c_int = 13_000;
/// How long a copy or fill that the host waits for may take; only a broken device takes longer.
const SETUP_TIMEOUT: Duration = Duration::from_secs(60);

/// A device error made of its parts.
pub fn error(what: impl Into<String>, advice: impl Into<String>) -> Error {
    Error::device(what, advice)
}

/// Makes the driver's answer to `what` a result whose error names the CUDA error and what to try.
pub fn check(code: CUresult, what: &str) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failure(code, what)) }
}

/// The error for a call `what` that answered `code`.
pub fn failure(code: CUresult, what: &str) -> Error {
    named_failure(code, &describe(code), what)
}

fn named_failure(code: CUresult, name: &str, what: &str) -> Error {
    let what = format!("{what} failed with {name}");
    let advice = advice(code).to_owned();
    Error::Device { what, advice, fatal: is_lost(code), code: Some(code as i32), source: None }
}

/// Such as `CUDA_ERROR_OUT_OF_MEMORY (2)`.
fn describe(code: CUresult) -> String {
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: the driver is loaded (it answered `code`); it stores a pointer to a static string, or null.
    let found = unsafe { sys::cuGetErrorName(code, &mut name) };
    if found != CUresult::CUDA_SUCCESS || name.is_null() {
        return format!("CUDA error {}", code as u32);
    }
    // SAFETY: on success the pointer is a static C string of the driver.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    format!("{name} ({})", code as u32)
}

/// Whether the process cannot use the GPU any more.
fn is_lost(code: CUresult) -> bool {
    matches!(
        code,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_DEINITIALIZED
    )
}

fn advice(code: CUresult) -> &'static str {
    match code {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => "free device memory, or plan for fewer tokens",
        CUresult::CUDA_ERROR_NO_DEVICE => "check nvidia-smi and CUDA_VISIBLE_DEVICES",
        CUresult::CUDA_ERROR_INVALID_DEVICE => "pass an ordinal below the number of visible GPUs",
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            "the kernels run on sm_90 and later; use such a GPU, or update the driver"
        }
        CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE => {
            "all blocks must be resident at once; use fewer blocks (sms) or leave more of the GPU free"
        }
        CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES | CUresult::CUDA_ERROR_INVALID_VALUE => {
            "check the launch's block size, shared memory and addresses"
        }
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_LAUNCH_FAILED => {
            "the context is lost; check the buffers' sizes and addresses, run under compute-sanitizer, restart the process"
        }
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH | CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "the driver's library does not match its kernel module; check LD_LIBRARY_PATH and reboot after an update"
        }
        CUresult::CUDA_ERROR_NOT_SUPPORTED | CUresult::CUDA_ERROR_NOT_PERMITTED => {
            "this GPU, driver or container does not offer it"
        }
        CUresult::CUDA_ERROR_NOT_READY => "synchronize the stream first",
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        | CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        | CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => {
            "open devices, build contexts and allocate before a capture begins, or capture in relaxed mode"
        }
        _ => "see the CUDA driver API's list of error codes",
    }
}

/// Finds the driver once, checks its version, and initialises it.
pub fn ready() -> Result<()> {
    static READY: OnceLock<Result<()>> = OnceLock::new();
    READY.get_or_init(find_driver).clone()
}

fn find_driver() -> Result<()> {
    // SAFETY: opens and closes the driver's library, whose initialisers any CUDA program runs.
    if !unsafe { sys::is_culib_present() } {
        return Err(error(
            "the NVIDIA driver's library libcuda.so.1 was not found",
            "install the driver, or use the CPU device",
        ));
    }
    let mut version: c_int = 0;
    // SAFETY: the library is there; this call exists in every version and needs no initialisation.
    check(unsafe { sys::cuDriverGetVersion(&mut version) }, "asking the driver's version")?;
    if version < OLDEST_DRIVER {
        return Err(error(
            format!("the NVIDIA driver offers CUDA {}.{}", version / 1000, version % 1000 / 10),
            "the kernels need CUDA 13.0: update the driver to version 580 or later",
        ));
    }
    // SAFETY: the library is there; flags must be 0.
    check(unsafe { sys::cuInit(0) }, "initialising the NVIDIA driver")
}

/// How many GPUs are visible to this process.
pub fn device_count() -> Result<usize> {
    ready()?;
    let mut count: c_int = 0;
    // SAFETY: the driver is initialised; `count` outlives the call.
    check(unsafe { sys::cuDeviceGetCount(&mut count) }, "counting the GPUs")?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// The driver's handle of GPU `ordinal`, or an error that names how many there are.
pub fn device(ordinal: usize) -> Result<sys::CUdevice> {
    let count = device_count()?;
    if ordinal >= count {
        return Err(error(
            format!("GPU {ordinal} was asked for and {count} can be seen"),
            "pass a smaller ordinal, or check CUDA_VISIBLE_DEVICES",
        ));
    }
    let mut device: sys::CUdevice = 0;
    // SAFETY: the driver is initialised and the ordinal is below the count.
    check(unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) }, "opening the GPU")?;
    Ok(device)
}

/// The PCI address of GPU `ordinal`, as `0000:59:00.0`. Opens no context.
pub fn pci_address(ordinal: usize) -> Result<String> {
    let device = device(ordinal)?;
    let mut text: [c_char; 32] = [0; 32];
    // SAFETY: the buffer has the length passed, less one so that it always ends in 0.
    let code = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as c_int - 1, device) };
    check(code, "asking the GPU's PCI address")?;
    // SAFETY: the last byte is 0.
    Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

/// Whether kernels of `from` can be given access to memory of `to`.
pub fn can_access(from: sys::CUdevice, to: sys::CUdevice) -> Result<bool> {
    if from == to {
        return Ok(true);
    }
    let mut can: c_int = 0;
    // SAFETY: both are devices of this process; `can` outlives the call.
    check(unsafe { sys::cuDeviceCanAccessPeer(&mut can, from, to) }, "asking for peer access")?;
    Ok(can != 0)
}

/// One attribute of a GPU.
pub fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<i32> {
    let mut value: c_int = 0;
    // SAFETY: the driver is initialised (a device handle exists); `value` outlives the call.
    check(unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) }, "asking an attribute of the GPU")?;
    Ok(value)
}

/// The primary context of a GPU, kept alive until dropped: the one that engines use too.
#[derive(Debug)]
pub struct PrimaryContext {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: a context may be used from any thread; the driver locks internally.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above; the fields are never changed after construction.
unsafe impl Sync for PrimaryContext {}

impl PrimaryContext {
    /// Retains the context of GPU `ordinal`.
    pub fn retain(ordinal: usize) -> Result<PrimaryContext> {
        let device = device(ordinal)?;
        let mut context: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: `device` is a valid handle; released in drop.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) }, "opening the GPU's context")?;
        Ok(PrimaryContext { device, context })
    }

    /// The GPU's handle.
    pub fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// Makes the context current on this thread until the guard is dropped, and then what was before.
    pub fn enter(&self) -> Result<Current> {
        let mut now: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: the driver is initialised; `now` outlives the call.
        check(unsafe { sys::cuCtxGetCurrent(&mut now) }, "asking the current context")?;
        if now == self.context {
            return Ok(Current { pushed: false, stays: std::marker::PhantomData });
        }
        // SAFETY: the context is retained by self; popped by the guard on this same thread.
        check(unsafe { sys::cuCtxPushCurrent_v2(self.context) }, "making the GPU's context current")?;
        Ok(Current { pushed: true, stays: std::marker::PhantomData })
    }

    /// Makes the context current on this thread for good.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained by self.
        check(unsafe { sys::cuCtxSetCurrent(self.context) }, "making the GPU's context current")
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // SAFETY: retained once in `retain`; at teardown nobody is left to report a failure to.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// While it lives, a context is current on this thread. Not Send: a context is current per thread.
#[derive(Debug)]
pub struct Current {
    pushed: bool,
    stays: std::marker::PhantomData<*const ()>,
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: sys::CUcontext = std::ptr::null_mut();
            // SAFETY: this guard pushed a context on this thread, and guards nest.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

/// Creates a stream that does not wait for the legacy default stream. The context must be current.
pub fn new_stream() -> Result<sys::CUstream> {
    let mut stream: sys::CUstream = std::ptr::null_mut();
    let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: a context is current (or the driver refuses); the caller destroys the stream.
    check(unsafe { sys::cuStreamCreate(&mut stream, flags) }, "creating a stream")?;
    Ok(stream)
}

/// Asks the driver something while other streams may be captured, by whichever library and thread: of a thread that is
/// not in relaxed mode it takes a query of a stream or an event for unsafe, refuses it, and ends those captures.
pub fn beside_captures<T>(ask: impl FnOnce() -> T) -> T {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the variable outlives the call, which stores the thread's former mode there.
    let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) } == CUresult::CUDA_SUCCESS;
    let answer = ask();
    if exchanged {
        // SAFETY: as above; `mode` is the driver's own value.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    }
    answer
}

/// Polls until all work of `stream` is done; ends where an interrupt is raised.
///
/// # Safety
/// `stream` must be a live stream that is not being captured.
pub unsafe fn wait_stream(stream: sys::CUstream, site: &'static str, timeout: Duration) -> Result<()> {
    let done = wait::poll_unless(site, timeout, wait::STREAM_LEFT, || {
        // SAFETY: the caller vouches for the stream.
        match beside_captures(|| unsafe { sys::cuStreamQuery(stream) }) {
            CUresult::CUDA_SUCCESS => Some(Ok(())),
            CUresult::CUDA_ERROR_NOT_READY => None,
            code => Some(Err(failure(code, "the stream's work"))),
        }
    });
    done?.unwrap_or_else(|| {
        Err(error(
            format!("the {site} did not finish within {} ms", timeout.as_millis()),
            "see which kernel runs, and whether it waits for a peer; or pass a longer timeout",
        ))
    })
}

/// As `wait_stream`, for copies and fills of set-up, whose memory depends on it: is not interrupted.
///
/// # Safety
/// As `wait_stream`.
pub unsafe fn wait_setup(stream: sys::CUstream) -> Result<()> {
    // SAFETY: passed on to the caller.
    wait::uninterrupted(|| unsafe { wait_stream(stream, "set-up stream", SETUP_TIMEOUT) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_answered_is_reported_with_its_code_and_whether_the_gpu_is_lost() {
        for (code, number, lost) in [
            (CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, 700, true),
            (CUresult::CUDA_ERROR_LAUNCH_FAILED, 719, true),
            (CUresult::CUDA_ERROR_OUT_OF_MEMORY, 2, false),
            (CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906, false),
        ] {
            let error = named_failure(code, "CUDA_ERROR_X (9)", "a copy");
            assert_eq!((error.driver_code(), error.is_fatal()), (Some(number), lost), "{error}");
            assert!(error.to_string().starts_with("device: a copy failed with CUDA_ERROR_X (9): "), "{error}");
        }
        assert_eq!(super::error("no driver", "install one").driver_code(), None);
    }
}
