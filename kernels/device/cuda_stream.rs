//! Streams, graphs and events of a GPU.
//!
//! Place: a backend of `device`, beside `cuda`. Callers may be on any thread. Launches of kernels whose blocks wait for
//! each other are cooperative: the driver refuses a grid whose blocks cannot all be resident. Only `synchronize` waits;
//! it polls.

use super::Shape;
use super::cuda::{CudaDevice, lock};
use super::view::Span;
use crate::base::cuda::{self as driver, check};
use crate::base::{Error, Result, wait};
use cudarc::driver::sys::{self, CUstreamCaptureStatus as CaptureStatus};
use std::ffi::c_void;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A stream: the crate's own, or an engine's.
pub(super) struct CudaStream {
    device: Arc<CudaDevice>,
    raw: sys::CUstream,
    borrowed: bool,
    /// `Some` while a capture that this crate began goes on: the events that it recorded.
    capture: Mutex<Option<Vec<Arc<CudaEvent>>>>,
    /// `Some` while a capture that this crate began goes on: passed once the work enqueued before it is done.
    before: Mutex<Option<Arc<CudaEvent>>>,
}

// SAFETY: streams may be used from any thread; the driver locks internally.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub(super) fn new(device: &Arc<CudaDevice>) -> Result<CudaStream> {
        let _current = device.enter()?;
        let raw = driver::new_stream()?;
        Ok(CudaStream {
            device: device.clone(),
            raw,
            borrowed: false,
            capture: Mutex::new(None),
            before: Mutex::new(None),
        })
    }

    /// # Safety
    /// `handle` is a live CUDA stream, or 0 for the legacy default stream.
    pub(super) unsafe fn borrow(device: &Arc<CudaDevice>, handle: u64) -> Result<CudaStream> {
        let _current = device.enter()?;
        let raw = handle as usize as sys::CUstream;
        let mut of_stream: sys::CUcontext = std::ptr::null_mut();
        let mut of_device: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: the caller vouches for the handle.
        check(unsafe { sys::cuStreamGetCtx(raw, &mut of_stream) }, "asking the context of a borrowed stream")?;
        // SAFETY: the device's context is current; the variable outlives the call.
        check(unsafe { sys::cuCtxGetCurrent(&mut of_device) }, "asking the current context")?;
        if of_stream != of_device {
            return Err(Error::argument(
                "cu_stream",
                format!("{handle:#x}, of another context"),
                format!("pass a stream of GPU {}", device.ordinal()),
            ));
        }
        Ok(CudaStream {
            device: device.clone(),
            raw,
            borrowed: true,
            capture: Mutex::new(None),
            before: Mutex::new(None),
        })
    }

    /// # Safety
    /// `args` is valid for reads of `args_bytes`, and holds what the kernel takes.
    pub(super) unsafe fn launch(
        &self,
        kernel: &'static str,
        shape: Shape,
        args: *const c_void,
        args_bytes: usize,
    ) -> Result<()> {
        let found = self.device.kernel(kernel)?;
        if found.args_bytes != args_bytes {
            return Err(driver::error(
                format!("{kernel} takes {} bytes and was given {args_bytes}", found.args_bytes),
                "pass the kernel's own struct",
            ));
        }
        let _current = self.device.enter()?;
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        };
        attribute.value.cooperative = i32::from(shape.resident);
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: shape.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            hStream: self.raw,
            attrs: &mut attribute,
            numAttrs: 1,
        };
        let mut params = [args.cast_mut()];
        // SAFETY: the function takes one struct, which the driver copies during the call; the context is current.
        let code = unsafe { sys::cuLaunchKernelEx(&config, found.function, params.as_mut_ptr(), std::ptr::null_mut()) };
        check_with(code, || format!("launching {kernel} with {shape:?}"))
    }

    pub(super) fn synchronize(&self, timeout: Duration) -> Result<()> {
        if self.is_capturing()? {
            return Err(driver::error("synchronize on a stream that is capturing", "end the capture first"));
        }
        let _current = self.device.enter()?;
        // SAFETY: the stream is live as long as self and is not capturing.
        unsafe { driver::wait_stream(self.raw, "stream", timeout) }
    }

    /// Waits for all work enqueued so far, or, while the stream captures, for what came before the capture: the driver
    /// answers no query of a stream that captures.
    pub(super) fn drain(&self, timeout: Duration) -> Result<()> {
        if !self.is_capturing()? {
            return self.synchronize(timeout);
        }
        let before = lock(&self.before).clone();
        match before {
            Some(event) => event.wait(timeout),
            None => Err(driver::error(
                "work enqueued before another library's capture cannot be waited for",
                "end the capture before closing what is used on its stream",
            )),
        }
    }

    pub(super) fn fill(&self, view: Span, byte: u8) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: a view's span, whose owner's freeing waits for the GPU's work.
        check(unsafe { sys::cuMemsetD8Async(view.ptr, byte, view.bytes, self.raw) }, "filling device memory")
    }

    pub(super) fn copy(&self, dst: Span, src: Span) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: as in `fill`; the lengths are equal.
        check(unsafe { sys::cuMemcpyAsync(dst.ptr, src.ptr, dst.bytes, self.raw) }, "copying device memory")
    }

    pub(super) fn begin_capture(&self) -> Result<()> {
        let _current = self.device.enter()?;
        let before = if self.is_capturing()? { None } else { Some(self.record()?) };
        let mut capture = lock(&self.capture);
        // Relaxed: other threads and libraries may go on allocating meanwhile, and any thread may end it.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is live.
        check(unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) }, "beginning a capture")?;
        *capture = Some(Vec::new());
        *lock(&self.before) = before;
        Ok(())
    }

    pub(super) fn end_capture(&self) -> Result<CudaGraph> {
        let _current = self.device.enter()?;
        // Held until the capture has ended, so that nobody takes it for another library's.
        let mut capture = lock(&self.capture);
        let events = capture.take().unwrap_or_default();
        *lock(&self.before) = None;
        let mut graph: sys::CUgraph = std::ptr::null_mut();
        // SAFETY: the stream is live; the graph is destroyed below.
        check(unsafe { sys::cuStreamEndCapture(self.raw, &mut graph) }, "ending a capture")?;
        drop(capture);
        let mut exec: sys::CUgraphExec = std::ptr::null_mut();
        // SAFETY: the graph was just made; no flags.
        let made = check(unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) }, "instantiating a graph");
        // SAFETY: the graph is ours; an executable graph does not need it any more.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        made?;
        let graph = CudaGraph { device: self.device.clone(), exec, _events: events };
        // Now, not at the first launch, which may come after a kernel that waits for a peer.
        // SAFETY: both handles are live and the capture has ended.
        check(unsafe { sys::cuGraphUpload(graph.exec, self.raw) }, "uploading a graph")?;
        Ok(graph)
    }

    pub(super) fn is_capturing(&self) -> Result<bool> {
        let _current = self.device.enter()?;
        let mut status = CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is live; `status` outlives the call.
        check(unsafe { sys::cuStreamIsCapturing(self.raw, &mut status) }, "asking whether a stream is capturing")?;
        Ok(status != CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    pub(super) fn record(&self) -> Result<Arc<CudaEvent>> {
        let capturing = self.is_capturing()?;
        let _current = self.device.enter()?;
        let event = Arc::new(CudaEvent::new(&self.device)?);
        if !capturing {
            // SAFETY: both handles are live.
            check(unsafe { sys::cuEventRecord(event.raw, self.raw) }, "recording an event")?;
            return Ok(event);
        }
        // External: the graph gets a node that records the event, which can then be timed.
        let flags = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: both handles are live; whoever owns the capture keeps the event, below.
        check(unsafe { sys::cuEventRecordWithFlags(event.raw, self.raw, flags) }, "capturing an event")?;
        match lock(&self.capture).as_mut() {
            Some(events) => events.push(event.clone()),
            // An engine's own capture: its graph may be replayed as long as the process runs.
            None => std::mem::forget(event.clone()),
        }
        Ok(event)
    }

    /// Orders what is enqueued from here on after all that `after` has enqueued so far, or, while `after` captures,
    /// after what it had enqueued before the capture. This stream does not capture.
    pub(super) fn wait_for(&self, after: &CudaStream) -> Result<()> {
        // Held, so that no capture of this crate begins before the event is recorded.
        let capture = lock(&after.capture);
        let before = lock(&after.before).clone();
        let event = match before.filter(|_| capture.is_some()) {
            Some(before) => before,
            None if after.is_capturing()? => {
                return Err(Error::argument(
                    "stream",
                    "not the one of the last call, which another library captures",
                    "end that capture first, or go on where it is recorded",
                ));
            }
            None => after.record_now()?,
        };
        let _current = self.device.enter()?;
        // SAFETY: both handles are live; the driver keeps what streams still wait for.
        check(unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) }, "ordering two streams")
    }

    /// Whether `wait_for` finds what came before.
    pub(super) fn can_be_waited_for(&self) -> bool {
        lock(&self.before).is_some() || !self.is_capturing().unwrap_or(true)
    }

    /// An event without a time, on a stream that does not capture.
    fn record_now(&self) -> Result<Arc<CudaEvent>> {
        let _current = self.device.enter()?;
        let event = Arc::new(CudaEvent::untimed(&self.device)?);
        // SAFETY: both handles are live.
        check(unsafe { sys::cuEventRecord(event.raw, self.raw) }, "recording an event")?;
        Ok(event)
    }

    /// Whether nothing that was enqueued is left, as far as the driver shows.
    pub(super) fn is_idle(&self) -> bool {
        // A query would end a capture.
        if self.is_capturing().unwrap_or(true) {
            return false;
        }
        let Ok(_current) = self.device.enter() else { return false };
        // SAFETY: the stream is live and does not capture.
        driver::beside_captures(|| unsafe { sys::cuStreamQuery(self.raw) }) == sys::CUresult::CUDA_SUCCESS
    }

    pub(super) fn raw(&self) -> u64 {
        self.raw as usize as u64
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.borrowed {
            return;
        }
        if let Ok(_current) = self.device.enter() {
            // SAFETY: created in `new`, destroyed once; the driver lets pending work finish.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// As `check`, and builds the description only where it is needed: launches are on the hot path.
fn check_with(code: sys::CUresult, what: impl FnOnce() -> String) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(driver::failure(code, &what())) }
}

/// An executable graph and the events it records.
pub(super) struct CudaGraph {
    device: Arc<CudaDevice>,
    exec: sys::CUgraphExec,
    _events: Vec<Arc<CudaEvent>>,
}

impl CudaGraph {
    /// Of the GPU that it was captured on.
    pub(super) fn ordinal(&self) -> usize {
        self.device.ordinal()
    }
}

// SAFETY: the driver locks graph launches; the handle is never changed.
unsafe impl Send for CudaGraph {}
// SAFETY: as above.
unsafe impl Sync for CudaGraph {}

impl CudaGraph {
    pub(super) fn launch(&self, stream: &CudaStream) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: both handles are live.
        check(unsafe { sys::cuGraphLaunch(self.exec, stream.raw) }, "launching a graph")
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: instantiated once; the driver defers this until running launches have ended.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}

/// An event that takes the time.
pub(super) struct CudaEvent {
    device: Arc<CudaDevice>,
    raw: sys::CUevent,
}

// SAFETY: events may be used from any thread; the handle is never changed.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// The context must be current.
    fn new(device: &Arc<CudaDevice>) -> Result<CudaEvent> {
        CudaEvent::with(device, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// One that only orders. The context must be current.
    fn untimed(device: &Arc<CudaDevice>) -> Result<CudaEvent> {
        CudaEvent::with(device, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn with(device: &Arc<CudaDevice>, flags: sys::CUevent_flags) -> Result<CudaEvent> {
        let mut raw: sys::CUevent = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed in drop.
        check(unsafe { sys::cuEventCreate(&mut raw, flags as u32) }, "creating an event")?;
        Ok(CudaEvent { device: device.clone(), raw })
    }

    /// Waits until the stream has passed the event; polls.
    fn wait(&self, timeout: Duration) -> Result<()> {
        let _current = self.device.enter()?;
        let done = wait::poll("event", timeout, || {
            // SAFETY: the event is live as long as self, and was recorded outside of any capture.
            match driver::beside_captures(|| unsafe { sys::cuEventQuery(self.raw) }) {
                sys::CUresult::CUDA_SUCCESS => Some(Ok(())),
                sys::CUresult::CUDA_ERROR_NOT_READY => None,
                code => Some(Err(driver::failure(code, "the work before an event"))),
            }
        });
        done.unwrap_or_else(|| {
            Err(driver::error(
                format!("the work before an event did not finish within {} ms", timeout.as_millis()),
                "see which kernel runs, and whether it waits for a peer; or pass a longer timeout",
            ))
        })
    }

    pub(super) fn elapsed_us(&self, since: &CudaEvent) -> Result<f64> {
        let _current = self.device.enter()?;
        let mut ms = 0f32;
        // SAFETY: both events are live; `ms` outlives the call.
        check(unsafe { sys::cuEventElapsedTime_v2(&mut ms, since.raw, self.raw) }, "timing two events")?;
        Ok(f64::from(ms) * 1000.0)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: created in `new` and destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
