//! The device as the rest of the crate sees it: memory, streams, graphs and events of a GPU or of the CPU device.
//!
//! Place: between the proxy and a backend (`cpu` over the executor, `cuda` over the driver). Runs on any thread.
//! Launches, fills, copies and records enqueue and return; only `synchronize` and a buffer's `write`, `read` and
//! `fill` wait, each with a deadline. It never panics and knows nothing of ranks or peers.

pub(crate) mod budget;
mod cpu;
mod cpu_seeded;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cuda_stream;

pub use cpu_seeded::{SeededConfig, SeededReport, seeded_world};

use crate::base::{Error, Result};
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// The most dynamic shared memory a block may ask for: what Hopper and Blackwell give. The CPU device refuses
/// more as well, so that its tests find what would not launch on a GPU.
pub const MAX_SHARED_BYTES: u32 = 227 * 1024;
/// The most threads of a block: the launch bound that all kernels are built with.
pub const MAX_BLOCK_THREADS: u32 = crate::ffi::layout::TY_MAX_BLOCK_THREADS;

/// Where kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// The fiber executor on the host's processors.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// A struct that a kernel takes as its one argument.
///
/// # Safety
/// The type must be `repr(C)`, equal in layout to the C struct of every kernel it is launched with.
pub unsafe trait KernelArgs: Copy {}

/// A span of memory that the device can read and write. Whoever makes one vouches for the memory behind it:
/// kernels, fills and copies trust it, as they trust every address in their arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct View {
    /// Device-visible address.
    pub ptr: u64,
    /// Length in bytes.
    pub bytes: usize,
}

impl View {
    /// The `bytes` from `offset` on, if they lie inside.
    pub fn slice(&self, offset: usize, bytes: usize) -> Result<View> {
        check_span(offset, bytes, self.bytes)?;
        Ok(View { ptr: self.ptr + offset as u64, bytes })
    }
}

fn check_span(offset: usize, bytes: usize, len: usize) -> Result<()> {
    match offset.checked_add(bytes) {
        Some(end) if end <= len => Ok(()),
        _ => Err(Error::Argument {
            name: "offset",
            value: format!("{offset} with {bytes} bytes"),
            advice: format!("stay within the buffer's {len} bytes"),
        }),
    }
}

#[derive(Clone)]
enum Backend {
    Cpu(cpu::CpuDevice),
    #[cfg(feature = "cuda")]
    Cuda(Arc<cuda::CudaDevice>),
}

/// What tells devices apart for calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Host,
    Gpu(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("the CPU device"),
            Place::Gpu(ordinal) => write!(f, "GPU {ordinal}"),
        }
    }
}

impl Place {
    fn must_be(self, name: &'static str, wanted: Place) -> Result<()> {
        if self == wanted {
            return Ok(());
        }
        Err(Error::Argument { name, value: format!("of {self}"), advice: format!("give one of {wanted}") })
    }
}

/// A GPU or a CPU device. Clones share it; the last one dropped closes it.
#[derive(Clone)]
pub struct Device {
    backend: Backend,
}

impl Device {
    /// A CPU device of its own, running on a thread of its own until the last clone, stream and buffer are gone.
    pub fn cpu() -> Result<Device> {
        Ok(Device::from_cpu(cpu::CpuDevice::new()?))
    }

    /// GPU `ordinal`, in its primary context, with all kernels loaded.
    #[cfg(feature = "cuda")]
    pub fn cuda(ordinal: usize) -> Result<Device> {
        Ok(Device { backend: Backend::Cuda(cuda::CudaDevice::open(ordinal)?) })
    }

    /// GPU `ordinal`: this build has no GPU part, and says so.
    #[cfg(not(feature = "cuda"))]
    pub fn cuda(ordinal: usize) -> Result<Device> {
        Err(Error::Device {
            what: format!("GPU {ordinal} was asked for and this build has no GPU part"),
            advice: "build with the feature cuda, or use the CPU device".into(),
        })
    }

    /// How many GPUs this process can see; 0 without a driver, with one too old, or without the feature `cuda`.
    pub fn cuda_count() -> usize {
        #[cfg(feature = "cuda")]
        let count = crate::base::cuda::device_count().unwrap_or(0);
        #[cfg(not(feature = "cuda"))]
        let count = 0;
        count
    }

    /// Whether this build holds the GPU's kernels (feature `cuda`, and nvcc found when it was built).
    pub const fn cuda_built() -> bool {
        cfg!(all(feature = "cuda", tokenyard_fatbin))
    }

    fn from_cpu(device: cpu::CpuDevice) -> Device {
        Device { backend: Backend::Cpu(device) }
    }

    /// Where kernels of this device run.
    pub fn kind(&self) -> DeviceKind {
        match &self.backend {
            Backend::Cpu(_) => DeviceKind::Cpu,
            #[cfg(feature = "cuda")]
            Backend::Cuda(_) => DeviceKind::Cuda,
        }
    }

    /// Its name, as the driver gives it.
    pub fn name(&self) -> String {
        match &self.backend {
            Backend::Cpu(_) => "CPU device".into(),
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => device.name().into(),
        }
    }

    /// The GPU's ordinal in this process.
    pub fn ordinal(&self) -> Option<usize> {
        match &self.backend {
            Backend::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => Some(device.ordinal()),
        }
    }

    /// Where its memory is: CPU devices of a process reach the same memory, each GPU has its own.
    fn place(&self) -> Place {
        match self.ordinal() {
            Some(ordinal) => Place::Gpu(ordinal),
            None => Place::Host,
        }
    }

    /// Refuses what belongs to `other` where something of this device is needed.
    ///
    /// # Errors
    /// `Argument`, with both devices.
    pub(crate) fn expect_own(&self, name: &'static str, other: &Device) -> Result<()> {
        other.place().must_be(name, self.place())
    }

    /// Whether kernels of this device can be given access to memory of `other`, of the same process.
    ///
    /// # Errors
    /// `Device` if the driver cannot say.
    pub fn can_store_into(&self, other: &Device) -> Result<bool> {
        match (&self.backend, &other.backend) {
            (Backend::Cpu(_), Backend::Cpu(_)) => Ok(true),
            #[cfg(feature = "cuda")]
            (Backend::Cuda(device), Backend::Cuda(other)) => device.can_store_into(other),
            #[cfg(feature = "cuda")]
            _ => Ok(false),
        }
    }

    /// Streaming multiprocessors; on the CPU device the number of blocks that a launch defaults to.
    pub fn multiprocessors(&self) -> u32 {
        match &self.backend {
            Backend::Cpu(_) => 4,
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => device.multiprocessors(),
        }
    }

    /// A new stream, which waits for no other.
    pub fn new_stream(&self) -> Result<Stream> {
        let backend = match &self.backend {
            Backend::Cpu(device) => StreamBackend::Cpu(Arc::new(device.new_stream()?)),
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => StreamBackend::Cuda(Arc::new(cuda_stream::CudaStream::new(device)?)),
        };
        Ok(Stream { device: self.clone(), backend })
    }

    /// An engine's CUDA stream, borrowed: it is not destroyed here.
    ///
    /// # Safety
    /// `cu_stream` must be a live stream of this device's primary context (0 is the legacy default stream) and
    /// outlive the returned stream and its clones; contexts that were used on it keep one until they are dropped.
    pub unsafe fn stream_from_raw(&self, cu_stream: u64) -> Result<Stream> {
        match &self.backend {
            Backend::Cpu(_) => Err(Error::Argument {
                name: "cu_stream",
                value: format!("{cu_stream:#x}"),
                advice: "the CPU device has no CUDA streams; use new_stream".into(),
            }),
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => {
                // SAFETY: passed on to the caller.
                let stream = unsafe { cuda_stream::CudaStream::borrow(device, cu_stream)? };
                Ok(Stream { device: self.clone(), backend: StreamBackend::Cuda(Arc::new(stream)) })
            }
        }
    }

    /// Device memory, 256-byte aligned. Its contents are unspecified (CPU device: every byte 0xA5).
    pub fn alloc(&self, bytes: usize) -> Result<DeviceBuffer> {
        let ptr = match &self.backend {
            Backend::Cpu(device) => device.alloc(bytes, cpu::UNSPECIFIED)?,
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => device.alloc(bytes)?,
        };
        Ok(DeviceBuffer { device: self.clone(), ptr, bytes })
    }

    /// Host memory, zeroed, that the device can read and write too.
    pub fn alloc_host(&self, bytes: usize) -> Result<HostBuffer> {
        let (host, ptr) = match &self.backend {
            Backend::Cpu(device) => {
                let ptr = device.alloc_host(bytes)?;
                (ptr as *mut u8, ptr)
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => device.alloc_host(bytes)?,
        };
        Ok(HostBuffer { device: self.clone(), host, ptr, bytes })
    }

    /// Binds a GPU's context to this thread. Other calls make it current for their own time only.
    pub fn make_current(&self) -> Result<()> {
        match &self.backend {
            Backend::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => device.bind(),
        }
    }

    /// Whether the device still works: a stopped executor or a lost context is an error.
    pub fn check(&self) -> Result<()> {
        match &self.backend {
            Backend::Cpu(device) => device.check(),
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => device.check(),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name()).field("ordinal", &self.ordinal()).finish()
    }
}

/// Device memory; freed when dropped. On the CPU device that waits for the streams to drain.
#[derive(Debug)]
pub struct DeviceBuffer {
    device: Device,
    ptr: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// The whole of it.
    pub fn view(&self) -> View {
        View { ptr: self.ptr, bytes: self.bytes }
    }

    /// A part of it.
    pub fn slice(&self, offset: usize, bytes: usize) -> Result<View> {
        self.view().slice(offset, bytes)
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Copies host bytes in and waits. For set-up: no kernel may be using these bytes.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        let at = self.slice(offset, data.len())?;
        match &self.device.backend {
            // SAFETY: `at` lies inside this allocation, which lives as long as self.
            Backend::Cpu(_) => unsafe { std::ptr::copy(data.as_ptr(), at.ptr as *mut u8, at.bytes) },
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => device.write(at.ptr, data)?,
        }
        Ok(())
    }

    /// Copies bytes out and waits. For checks: no kernel may be writing these bytes.
    pub fn read(&self, offset: usize, data: &mut [u8]) -> Result<()> {
        let at = self.slice(offset, data.len())?;
        match &self.device.backend {
            // SAFETY: `at` lies inside this allocation, every byte of which was initialised by `alloc`.
            Backend::Cpu(_) => unsafe { std::ptr::copy(at.ptr as *const u8, data.as_mut_ptr(), at.bytes) },
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => device.read(at.ptr, data)?,
        }
        Ok(())
    }

    /// Sets every byte and waits. For set-up: no kernel may be using the buffer.
    pub fn fill(&self, byte: u8) -> Result<()> {
        match &self.device.backend {
            // SAFETY: the whole allocation, which lives as long as self.
            Backend::Cpu(_) => unsafe { std::ptr::write_bytes(self.ptr as *mut u8, byte, self.bytes) },
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => device.fill(self.ptr, self.bytes, byte)?,
        }
        Ok(())
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        match &self.device.backend {
            // SAFETY: `ptr` came from this device's `alloc` with this length and is freed once.
            Backend::Cpu(device) => unsafe { device.free(self.ptr, self.bytes) },
            #[cfg(feature = "cuda")]
            // SAFETY: as above.
            Backend::Cuda(device) => unsafe { device.free(self.ptr) },
        }
    }
}

/// Host memory that the device sees too; freed when dropped.
#[derive(Debug)]
pub struct HostBuffer {
    device: Device,
    host: *mut u8,
    ptr: u64,
    bytes: usize,
}

// SAFETY: it owns its memory and hands out addresses alone; whoever dereferences them vouches for the access.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// The whole of it, as the device sees it.
    pub fn view(&self) -> View {
        View { ptr: self.ptr, bytes: self.bytes }
    }

    /// Its whole 64-bit words, which host and device access atomically. Zero at first.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the buffer is aligned to a page, zeroed when made, and lives as long as `self`; kernels and hosts access
        // words that are shared like this atomically.
        unsafe { std::slice::from_raw_parts(self.host.cast(), self.bytes / 8) }
    }

    /// Its first byte, as the host sees it.
    pub fn host_ptr(&self) -> *mut u8 {
        self.host
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        match &self.device.backend {
            // SAFETY: `ptr` came from this device's `alloc` with this length and is freed once.
            Backend::Cpu(device) => unsafe { device.free_host(self.ptr, self.bytes) },
            #[cfg(feature = "cuda")]
            // SAFETY: `host` came from this device's `alloc_host` and is freed once.
            Backend::Cuda(device) => unsafe { device.free_host(self.host) },
        }
    }
}

#[derive(Clone)]
enum StreamBackend {
    Cpu(Arc<cpu::CpuStream>),
    #[cfg(feature = "cuda")]
    Cuda(Arc<cuda_stream::CudaStream>),
}

/// A queue of work, done in order. Clones are the same queue.
#[derive(Clone)]
pub struct Stream {
    device: Device,
    backend: StreamBackend,
}

/// The shape of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub grid: u32,
    pub block: u32,
    pub shared_bytes: u32,
    /// All blocks at once, or none yet. Blocks of a CPU device always are.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only GPUs are asked for it"))]
    pub resident: bool,
}

impl Shape {
    fn check(self) -> Result<Shape> {
        let refuse = |name, value: u32, advice: &str| {
            Err(Error::Argument { name, value: value.to_string(), advice: advice.into() })
        };
        if self.grid == 0 {
            return refuse("grid", self.grid, "launch at least one block");
        }
        if self.block == 0 || self.block > MAX_BLOCK_THREADS || !self.block.is_multiple_of(32) {
            return refuse("block", self.block, "use a multiple of 32 threads, 512 at the most");
        }
        if self.shared_bytes > MAX_SHARED_BYTES {
            return refuse("shared_bytes", self.shared_bytes, "a block has 232448 bytes of shared memory at the most");
        }
        Ok(self)
    }
}

impl Stream {
    /// The device it belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Enqueues a kernel with `grid` blocks of `block` threads, all resident at once (a cooperative launch), or
    /// records it when capturing. `args` is copied. Addresses in `args` must stay valid until the kernel is done.
    pub fn launch<A: KernelArgs>(
        &self,
        kernel: &'static str,
        grid: u32,
        block: u32,
        shared_bytes: u32,
        args: &A,
    ) -> Result<()> {
        self.launch_shape(kernel, Shape { grid, block, shared_bytes, resident: true }, args)
    }

    /// As `launch`, of a kernel without shared memory in which no block waits for another: blocks run as they find room.
    /// A GPU whose other kernels wait for what comes behind this one may never have room for all at once.
    pub(super) fn launch_independent<A: KernelArgs>(
        &self,
        kernel: &'static str,
        (grid, block): (u32, u32),
        args: &A,
    ) -> Result<()> {
        self.launch_shape(kernel, Shape { grid, block, shared_bytes: 0, resident: false }, args)
    }

    fn launch_shape<A: KernelArgs>(&self, kernel: &'static str, shape: Shape, args: &A) -> Result<()> {
        let shape = shape.check()?;
        let args_ptr: *const c_void = std::ptr::from_ref(args).cast();
        match &self.backend {
            // SAFETY: `args_ptr` is valid for the size of A, and A is what the kernel takes (KernelArgs).
            StreamBackend::Cpu(stream) => unsafe { stream.launch(kernel, shape, args_ptr, size_of::<A>()) },
            #[cfg(feature = "cuda")]
            // SAFETY: as above.
            StreamBackend::Cuda(stream) => unsafe { stream.launch(kernel, shape, args_ptr, size_of::<A>()) },
        }
    }

    /// Waits until all work enqueued so far is done; polls, so that host fibers can wait too.
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        match &self.backend {
            StreamBackend::Cpu(stream) => stream.synchronize(timeout),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.synchronize(timeout),
        }
    }

    /// As `synchronize`, also while the stream captures: waits for what was enqueued before the capture began. An error
    /// where an engine began the capture on a GPU, since the driver says nothing of that work then.
    pub(crate) fn drain(&self, timeout: Duration) -> Result<()> {
        match &self.backend {
            StreamBackend::Cpu(stream) => stream.drain(timeout),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.drain(timeout),
        }
    }

    /// Sets every byte of `view`, in stream order.
    pub fn fill(&self, view: View, byte: u8) -> Result<()> {
        match &self.backend {
            _ if view.bytes == 0 => Ok(()),
            StreamBackend::Cpu(stream) => stream.fill(view, byte),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.fill(view, byte),
        }
    }

    /// Copies `src` to `dst`, of equal length, in stream order. They must not overlap.
    pub fn copy(&self, dst: View, src: View) -> Result<()> {
        if dst.bytes != src.bytes {
            return Err(Error::Argument {
                name: "dst",
                value: format!("{} bytes", dst.bytes),
                advice: format!("pass views of equal length; src has {} bytes", src.bytes),
            });
        }
        match &self.backend {
            _ if dst.bytes == 0 => Ok(()),
            StreamBackend::Cpu(stream) => stream.copy(dst, src),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.copy(dst, src),
        }
    }

    /// From here on work is recorded, not run, until `end_capture`.
    pub fn begin_capture(&self) -> Result<()> {
        match &self.backend {
            StreamBackend::Cpu(stream) => stream.begin_capture(),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.begin_capture(),
        }
    }

    /// What was recorded since `begin_capture`, ready to be launched any number of times.
    pub fn end_capture(&self) -> Result<Graph> {
        let backend = match &self.backend {
            StreamBackend::Cpu(stream) => GraphBackend::Cpu(stream.end_capture()?),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => GraphBackend::Cuda(stream.end_capture()?),
        };
        Ok(Graph { backend })
    }

    /// Whether work is recorded now, be it for this crate or for an engine.
    pub fn is_capturing(&self) -> Result<bool> {
        match &self.backend {
            StreamBackend::Cpu(stream) => Ok(stream.is_capturing()),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.is_capturing(),
        }
    }

    /// A time stamp in stream order. Recorded into a graph when capturing; then each replay stamps it anew.
    pub fn record(&self) -> Result<Event> {
        let backend = match &self.backend {
            StreamBackend::Cpu(stream) => EventBackend::Cpu(stream.record()?),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => EventBackend::Cuda(stream.record()?),
        };
        Ok(Event { backend })
    }

    /// The CUDA stream's handle, or a number that tells CPU streams apart.
    pub fn raw(&self) -> u64 {
        match &self.backend {
            StreamBackend::Cpu(stream) => stream.raw(),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.raw(),
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", &self.device).field("raw", &self.raw()).finish()
    }
}

enum GraphBackend {
    Cpu(cpu::CpuGraph),
    #[cfg(feature = "cuda")]
    Cuda(cuda_stream::CudaGraph),
}

/// Recorded work. What it points to must outlive its last replay.
pub struct Graph {
    backend: GraphBackend,
}

impl Graph {
    /// Enqueues the recorded work once more, on a stream that is not itself capturing.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        if stream.is_capturing()? {
            return Err(Error::Argument {
                name: "stream",
                value: "capturing".into(),
                advice: "end the capture before launching a graph on it".into(),
            });
        }
        let placed = stream.device.place().must_be("stream", self.place());
        match (&self.backend, &stream.backend) {
            (GraphBackend::Cpu(graph), StreamBackend::Cpu(stream)) => placed.and_then(|()| stream.replay(graph)),
            #[cfg(feature = "cuda")]
            (GraphBackend::Cuda(graph), StreamBackend::Cuda(stream)) => placed.and_then(|()| graph.launch(stream)),
            #[cfg(feature = "cuda")]
            (GraphBackend::Cpu(_), StreamBackend::Cuda(_)) | (GraphBackend::Cuda(_), StreamBackend::Cpu(_)) => placed,
        }
    }

    /// Where it was captured.
    fn place(&self) -> Place {
        match &self.backend {
            GraphBackend::Cpu(_) => Place::Host,
            #[cfg(feature = "cuda")]
            GraphBackend::Cuda(graph) => Place::Gpu(graph.ordinal()),
        }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.backend {
            GraphBackend::Cpu(graph) => f.debug_tuple("Graph").field(graph).finish(),
            #[cfg(feature = "cuda")]
            GraphBackend::Cuda(_) => f.write_str("Graph(CUDA)"),
        }
    }
}

enum EventBackend {
    Cpu(cpu::CpuEvent),
    #[cfg(feature = "cuda")]
    Cuda(Arc<cuda_stream::CudaEvent>),
}

/// A time stamp that a stream passes.
pub struct Event {
    backend: EventBackend,
}

impl Event {
    /// Microseconds from `since` to this one. Both must have been passed: synchronize first.
    pub fn elapsed_us(&self, since: &Event) -> Result<f64> {
        match (&self.backend, &since.backend) {
            (EventBackend::Cpu(end), EventBackend::Cpu(start)) => end.elapsed_us(start),
            #[cfg(feature = "cuda")]
            (EventBackend::Cuda(end), EventBackend::Cuda(start)) => end.elapsed_us(start),
            #[cfg(feature = "cuda")]
            _ => Err(Error::Argument {
                name: "since",
                value: "an event of another kind of device".into(),
                advice: "compare events of one device".into(),
            }),
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.backend {
            EventBackend::Cpu(event) => f.debug_tuple("Event").field(event).finish(),
            #[cfg(feature = "cuda")]
            EventBackend::Cuda(_) => f.write_str("Event(CUDA)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_of_another_device_is_refused_by_name() {
        for (given, wanted) in
            [(Place::Host, Place::Gpu(0)), (Place::Gpu(1), Place::Gpu(0)), (Place::Gpu(0), Place::Host)]
        {
            let error = given.must_be("stream", wanted).unwrap_err().to_string();
            assert_eq!(error, format!("argument stream is of {given}: give one of {wanted}"));
        }
        for place in [Place::Host, Place::Gpu(3)] {
            place.must_be("stream", place).unwrap();
        }
        // CPU devices reach one another's memory.
        Device::cpu().unwrap().expect_own("stream", &Device::cpu().unwrap()).unwrap();
    }
}
