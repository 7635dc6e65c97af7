//! The device for the rest of the crate: memory, streams, graphs and events of a GPU or of the CPU device.
//!
//! A backend is `cpu` over the executor, or `cuda` over the driver. Launches, fills, copies and records enqueue and
//! return; only `synchronize` and a buffer's `write`, `read` and `fill` wait, each with a deadline. Knows no ranks.

pub(crate) mod budget;
mod cpu;
mod cpu_seeded;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cuda_stream;
mod gpus;
pub(crate) mod recording;
pub(crate) mod view;

pub use cpu_seeded::{SeededConfig, SeededReport, Stopped, seeded_world};

use self::cpu::HostCopy;
use self::recording::{Recording, note};
use self::view::{Owner, Place, Span, View};
use crate::base::wait::uninterrupted;
use crate::base::{Error, Result};
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The most dynamic shared memory a block may ask for: what Hopper and Blackwell have. The CPU device refuses more as
/// well, so that its tests find what would not launch on a GPU.
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

#[derive(Clone)]
enum Backend {
    Cpu(cpu::CpuDevice),
    #[cfg(feature = "cuda")]
    Cuda(Arc<cuda::CudaDevice>),
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

    /// GPU `ordinal`: always an error that names the missing GPU part of this build.
    #[cfg(not(feature = "cuda"))]
    pub fn cuda(ordinal: usize) -> Result<Device> {
        Err(Error::device(
            format!("GPU {ordinal} was asked for and this build has no GPU part"),
            "build with the feature cuda, or use the CPU device",
        ))
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

    /// Identifies the device: memory is freed once the work of its own device is done.
    pub(crate) fn place(&self) -> Place {
        match (self.ordinal(), &self.backend) {
            (Some(ordinal), _) => Place::Gpu(ordinal),
            (None, Backend::Cpu(device)) => Place::Cpu(device.number()),
            #[cfg(feature = "cuda")]
            (None, Backend::Cuda(device)) => Place::Gpu(device.ordinal()),
        }
    }

    /// Refuses a thing of `other` where one of this device is needed.
    ///
    /// # Errors
    /// `Argument`, with both devices.
    pub(crate) fn expect_own(&self, name: &'static str, other: &Device) -> Result<()> {
        other.place().must_be(name, self.place())
    }

    /// Whether kernels of this device can be given access to memory of `other`, of the same process.
    ///
    /// # Errors
    /// `Device` if the driver gives no answer.
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
        Ok(Stream::new(self, backend))
    }

    /// An engine's CUDA stream, borrowed: it is not destroyed here.
    ///
    /// # Safety
    /// `cu_stream` must be a live stream of this device's primary context (0 is the legacy default stream) and
    /// outlive the returned stream and its clones; contexts that were used on it, and graphs that were launched on it,
    /// keep one until they are gone.
    ///
    /// What a capture records needs its memory at every replay. A capture that this crate begins, records and ends on
    /// clones of one `Stream` keeps that memory. Where another library captures `cu_stream`, or where the capture is
    /// recorded through another `Stream`, nobody keeps it. Whoever captures then has three duties:
    ///
    /// - Keep every buffer, handle and context that was used until the last replay is over.
    /// - Before the first capture of a context's calls, wait for the calls that were enqueued (torch.cuda.graph does).
    /// - Order replays against the other calls of their contexts, by one stream or by events: replays are invisible to
    ///   this crate. Dispatches of a context must not overlap each other, nor must its combines or its barriers, nor a
    ///   dispatch the combines of its handle.
    ///
    /// With [`Tuning::detect_overlaps`](crate::Tuning::detect_overlaps) the device detects launches of a context that
    /// overlap, from the first such capture on. These end in `Order`, which closes the context, and store nothing
    /// outside of what they were given. Otherwise nothing is promised of them: rows may be mixed, memory may be
    /// overwritten, and a launch may never end.
    pub unsafe fn stream_from_raw(&self, cu_stream: u64) -> Result<Stream> {
        match &self.backend {
            Backend::Cpu(_) => Err(Error::argument(
                "cu_stream",
                format!("{cu_stream:#x}"),
                "the CPU device has no CUDA streams; use new_stream",
            )),
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => {
                // SAFETY: passed on to the caller.
                let stream = unsafe { cuda_stream::CudaStream::borrow(device, cu_stream)? };
                Ok(Stream::new(self, StreamBackend::Cuda(Arc::new(stream))))
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
        Ok(DeviceBuffer { memory: Arc::new(DeviceMemory { device: self.clone(), ptr, bytes }) })
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
        Ok(HostBuffer { memory: Arc::new(HostMemory { device: self.clone(), host, ptr, bytes }) })
    }

    /// Drops `owner` once no work of this device can be using its memory: on the CPU device later, on a GPU before this
    /// returns. For memory whose own freeing does not wait, such as arenas.
    pub(crate) fn retire(&self, owner: Owner) {
        match &self.backend {
            Backend::Cpu(device) => device.retire(owner),
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => match device.alloc(1) {
                Ok(ptr) => {
                    // SAFETY: allocated above and used by nobody. The driver waits for all work of the GPU.
                    unsafe { device.free(ptr) };
                    drop(owner);
                }
                // Nothing shows when its work is over.
                Err(_) => std::mem::forget(owner),
            },
        }
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

/// Device memory, freed when the buffer, its views and the graphs that use them are gone. Freeing waits for the
/// device's work: on the CPU device by keeping the memory until its streams have drained, on a GPU in the driver. That
/// holds up all threads that use the GPU: ranks that share one must free memory while no call is under way.
#[derive(Debug)]
pub struct DeviceBuffer {
    memory: Arc<DeviceMemory>,
}

#[derive(Debug)]
struct DeviceMemory {
    device: Device,
    ptr: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// The whole of it.
    pub fn view(&self) -> View {
        let DeviceMemory { device, ptr, bytes } = &*self.memory;
        let owner: Owner = self.memory.clone();
        View::owned(device.place(), Span { ptr: *ptr, bytes: *bytes }, owner)
    }

    /// A part of it.
    pub fn slice(&self, offset: usize, bytes: usize) -> Result<View> {
        self.view().slice(offset, bytes)
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.memory.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.memory.bytes == 0
    }

    fn part(&self, offset: usize, bytes: usize) -> Result<Span> {
        Span { ptr: self.memory.ptr, bytes: self.memory.bytes }.slice(offset, bytes)
    }

    /// Copies host bytes in and waits, in no order with any stream: what a kernel that runs meanwhile reads of them is
    /// unspecified. A kernel that waits for a peer does not hold the copy up.
    ///
    /// # Errors
    /// `Argument` beyond the buffer; `Device` if the copy is not made within a minute.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        let at = self.part(offset, data.len())?;
        match &self.memory.device.backend {
            // SAFETY: `at` lies inside this allocation, which lives as long as self.
            Backend::Cpu(device) => unsafe { device.transfer(HostCopy::Write { dst: at, data: data.as_ptr() })? },
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => device.write(at.ptr, data)?,
        }
        Ok(())
    }

    /// Copies bytes out and waits, as [`write`](Self::write).
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn read(&self, offset: usize, data: &mut [u8]) -> Result<()> {
        let at = self.part(offset, data.len())?;
        match &self.memory.device.backend {
            // SAFETY: `at` lies inside this allocation, every byte of which was initialised by `alloc`.
            Backend::Cpu(device) => unsafe { device.transfer(HostCopy::Read { src: at, data: data.as_mut_ptr() })? },
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => device.read(at.ptr, data)?,
        }
        Ok(())
    }

    /// Sets every byte and waits, as [`write`](Self::write).
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn fill(&self, byte: u8) -> Result<()> {
        let at = self.part(0, self.len())?;
        match &self.memory.device.backend {
            // SAFETY: the whole allocation, which lives as long as self.
            Backend::Cpu(device) => unsafe { device.transfer(HostCopy::Fill { dst: at, byte })? },
            #[cfg(feature = "cuda")]
            Backend::Cuda(device) => device.fill(at.ptr, at.bytes, byte)?,
        }
        Ok(())
    }
}

impl Drop for DeviceMemory {
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

/// Host memory that the device can access too; freed as a [`DeviceBuffer`] is.
#[derive(Debug)]
pub struct HostBuffer {
    memory: Arc<HostMemory>,
}

#[derive(Debug)]
struct HostMemory {
    device: Device,
    host: *mut u8,
    ptr: u64,
    bytes: usize,
}

// SAFETY: it owns its memory and hands out addresses alone; whoever dereferences them vouches for the access.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostBuffer {
    /// The whole of it, in the device's addresses.
    pub fn view(&self) -> View {
        let HostMemory { device, ptr, bytes, .. } = &*self.memory;
        let owner: Owner = self.memory.clone();
        View::owned(device.place(), Span { ptr: *ptr, bytes: *bytes }, owner)
    }

    /// Its whole 64-bit words, which host and device access atomically. Zero at first.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the buffer is aligned to a page, zeroed when made, and lives as long as `self`; kernels and hosts
        // access words that are shared like this atomically.
        unsafe { std::slice::from_raw_parts(self.memory.host.cast(), self.memory.bytes / 8) }
    }

    /// The int32 numbers from number `first` on, as [`Output::host_counts`](crate::Output::host_counts) are. Never
    /// waits: what a call wrote is there once its stream has passed it; until then each number is an older or a newer
    /// one.
    ///
    /// # Errors
    /// `Argument` beyond the buffer.
    pub fn read_i32(&self, first: usize, numbers: &mut [i32]) -> Result<()> {
        let words = self.words_i32(first, numbers.len())?;
        numbers.iter_mut().zip(words).for_each(|(number, word)| *number = word.load(Ordering::Acquire));
        Ok(())
    }

    /// The words of `count` int32 numbers from number `first` on, which host and device access atomically.
    pub(crate) fn words_i32(&self, first: usize, count: usize) -> Result<&[AtomicI32]> {
        let there = self.memory.bytes / size_of::<i32>();
        // SAFETY: the buffer is aligned to more than 4 bytes, zeroed when made, and lives as long as `self`; the host
        // accesses it atomically alone, and kernels store aligned words.
        let words = unsafe { std::slice::from_raw_parts(self.memory.host.cast::<AtomicI32>(), there) };
        let end = first.checked_add(count);
        end.and_then(|end| words.get(first..end)).ok_or_else(|| {
            let value = format!("{first}, with {count} from there");
            Error::argument("first", value, format!("stay within the buffer's {there} numbers"))
        })
    }

    /// Its first byte, in the host's addresses.
    pub fn host_ptr(&self) -> *mut u8 {
        self.memory.host
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.memory.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.memory.bytes == 0
    }
}

impl Drop for HostMemory {
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
    queue: Queue,
    /// `Some` while a capture that this crate began goes on. Held while work is enqueued, so that no work is recorded
    /// without what it needs.
    recording: Arc<Mutex<Option<Recording>>>,
}

/// A stream without what its capture keeps, so that a list of streams does not keep its own owner alive.
#[derive(Clone)]
pub(crate) struct Queue {
    device: Device,
    backend: StreamBackend,
}

impl Queue {
    /// Whether it is the same queue, under whatever name. Both are of one device.
    pub fn same(&self, other: &Queue) -> bool {
        self.raw() == other.raw()
    }

    pub fn raw(&self) -> u64 {
        match &self.backend {
            StreamBackend::Cpu(stream) => stream.raw(),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.raw(),
        }
    }

    pub fn is_capturing(&self) -> Result<bool> {
        match &self.backend {
            StreamBackend::Cpu(stream) => Ok(stream.is_capturing()),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.is_capturing(),
        }
    }

    /// Whether `wait_for` finds what came before: always, unless another library captures it.
    pub fn can_be_waited_for(&self) -> bool {
        match &self.backend {
            StreamBackend::Cpu(_) => true,
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.can_be_waited_for(),
        }
    }

    /// Whether it does not capture and nothing that was enqueued is left.
    pub fn is_idle(&self) -> bool {
        match &self.backend {
            StreamBackend::Cpu(stream) => !stream.is_capturing() && stream.is_idle(),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.is_idle(),
        }
    }

    /// As `synchronize`, also while the stream captures: waits for what was enqueued before the capture began. An error
    /// where an engine began the capture on a GPU, since the driver then gives no answer about that work. Is not
    /// interrupted: memory is freed after a drain.
    pub fn drain(&self, timeout: Duration) -> Result<()> {
        uninterrupted(|| match &self.backend {
            StreamBackend::Cpu(stream) => stream.drain(timeout),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.drain(timeout),
        })
    }

    /// Orders what is enqueued from here on after all that `after` has enqueued so far, or, while `after` captures,
    /// after what it had enqueued before the capture. This one does not capture.
    ///
    /// # Errors
    /// `Argument` where another library captures `after`, since the driver then gives no answer about earlier work.
    /// `Device` if the driver refuses.
    pub fn wait_for(&self, after: &Queue) -> Result<()> {
        match (&self.backend, &after.backend) {
            (StreamBackend::Cpu(stream), StreamBackend::Cpu(after)) => stream.wait_for(after),
            #[cfg(feature = "cuda")]
            (StreamBackend::Cuda(stream), StreamBackend::Cuda(after)) => stream.wait_for(after),
            #[cfg(feature = "cuda")]
            _ => self.device.expect_own("stream", &after.device),
        }
    }

    /// Sets every byte of `span`, in stream order; the caller keeps the memory.
    pub fn fill(&self, span: Span, byte: u8) -> Result<()> {
        match &self.backend {
            StreamBackend::Cpu(stream) => stream.fill(span, byte),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.fill(span, byte),
        }
    }
}

/// The shape of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub grid: u32,
    pub block: u32,
    pub shared_bytes: u32,
    /// All blocks at once, or none yet. Blocks of a CPU device always are resident at once.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only GPUs are asked for it"))]
    pub resident: bool,
}

impl Shape {
    fn check(self) -> Result<Shape> {
        if self.grid == 0 {
            return Err(Error::argument("grid", self.grid, "launch at least one block"));
        }
        if self.block == 0 || self.block > MAX_BLOCK_THREADS || !self.block.is_multiple_of(32) {
            return Err(Error::argument("block", self.block, "use a multiple of 32 threads, 512 at the most"));
        }
        if self.shared_bytes > MAX_SHARED_BYTES {
            return Err(Error::argument(
                "shared_bytes",
                self.shared_bytes,
                "a block has 232448 bytes of shared memory at the most",
            ));
        }
        Ok(self)
    }
}

impl Stream {
    fn new(device: &Device, backend: StreamBackend) -> Stream {
        Stream { queue: Queue { device: device.clone(), backend }, recording: Arc::default() }
    }

    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Until the returned guard is dropped, no capture of this stream begins or ends. `Some` during a capture that this
    /// crate began: what it keeps.
    pub(crate) fn enter(&self) -> MutexGuard<'_, Option<Recording>> {
        // Nothing panics while it holds the lock.
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues something that uses these views; a capture keeps them.
    pub(super) fn with<'a>(
        &self,
        views: impl IntoIterator<Item = &'a View>,
        enqueue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut recording = self.enter();
        if let Some(recording) = recording.as_mut() {
            views.into_iter().for_each(|view| recording.keep_view(view));
        }
        enqueue()
    }

    /// The device it belongs to.
    pub fn device(&self) -> &Device {
        &self.queue.device
    }

    /// Enqueues a kernel with `grid` blocks of `block` threads, all resident at once (a cooperative launch), or
    /// records it when capturing. `args` is copied. Safe code cannot launch by hand:
    ///
    /// ```compile_fail,E0133
    /// # use tokenyard::{Stream, internals::kernels::KernelArgs};
    /// fn launch<A: KernelArgs>(stream: &Stream, args: &A) {
    ///     stream.launch("ty_barrier", 1, 32, 0, args);
    /// }
    /// ```
    ///
    /// # Safety
    /// Every address in `args` must be of memory of this stream's device that the kernel may use as it does until it is
    /// done; where the launch is recorded, until every replay is done.
    #[doc(hidden)]
    pub unsafe fn launch<A: KernelArgs>(
        &self,
        kernel: &'static str,
        grid: u32,
        block: u32,
        shared_bytes: u32,
        args: &A,
    ) -> Result<()> {
        self.launch_shape(kernel, Shape { grid, block, shared_bytes, resident: true }, args)
    }

    /// As `launch`, of a kernel without shared memory in which no block waits for another: blocks run as they find
    /// room. A GPU whose other kernels wait for work enqueued after this may never have room for all blocks at once.
    ///
    /// # Safety
    /// As for `launch`.
    pub(super) unsafe fn launch_independent<A: KernelArgs>(
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
        match &self.queue.backend {
            // SAFETY: `args_ptr` is valid for the size of A, and A is what the kernel takes (KernelArgs).
            StreamBackend::Cpu(stream) => unsafe { stream.launch(kernel, shape, args_ptr, size_of::<A>()) },
            #[cfg(feature = "cuda")]
            // SAFETY: as above.
            StreamBackend::Cuda(stream) => unsafe { stream.launch(kernel, shape, args_ptr, size_of::<A>()) },
        }
    }

    /// Waits until all work enqueued so far is done; polls, so that host fibers can wait too. Does not report calls
    /// that ended with an error: see [`AllToAll::check`](crate::AllToAll::check).
    ///
    /// # Errors
    /// `Device` once `timeout` has passed, after which work goes on and may be waited for again, or if the device
    /// failed; `Interrupted`.
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        match &self.queue.backend {
            StreamBackend::Cpu(stream) => stream.synchronize(timeout),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.synchronize(timeout),
        }
    }

    /// Sets every byte of `view`, in stream order.
    ///
    /// # Errors
    /// `Argument` for a view of another device; `Device` if the driver refuses.
    pub fn fill(&self, view: &View, byte: u8) -> Result<()> {
        view.of("view", self.queue.device.place())?;
        if view.is_empty() { Ok(()) } else { self.with([view], || self.queue.fill(view.span(), byte)) }
    }

    /// Copies `src` to `dst`, of equal length, in stream order. Where they overlap, the contents are unspecified.
    ///
    /// # Errors
    /// `Argument` for views of another device or of unequal length; `Device` if the driver refuses.
    pub fn copy(&self, dst: &View, src: &View) -> Result<()> {
        dst.of("dst", self.queue.device.place())?;
        src.of("src", self.queue.device.place())?;
        if dst.len() != src.len() {
            return Err(Error::argument(
                "dst",
                format!("{} bytes", dst.len()),
                format!("pass views of equal length; src has {} bytes", src.len()),
            ));
        }
        self.with([dst, src], || match &self.queue.backend {
            _ if dst.is_empty() => Ok(()),
            StreamBackend::Cpu(stream) => stream.copy(dst.span(), src.span()),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.copy(dst.span(), src.span()),
        })
    }

    /// From here on work is recorded, not run, until `end_capture`. The capture, and then its graph, keeps what the
    /// recorded work uses: views' memory, handles and whole contexts ([example](crate#graphs)).
    ///
    /// # Errors
    /// `Device` if the stream captures already, or if the driver refuses.
    pub fn begin_capture(&self) -> Result<()> {
        let mut recording = self.enter();
        match &self.queue.backend {
            StreamBackend::Cpu(stream) => stream.begin_capture()?,
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.begin_capture()?,
        }
        *recording = Some(Recording::default());
        Ok(())
    }

    /// What was recorded since `begin_capture`, ready to be launched any number of times.
    ///
    /// # Errors
    /// `Device` if the stream does not capture, or if the driver refuses what was recorded. The capture is over then,
    /// and nothing is kept.
    pub fn end_capture(&self) -> Result<Graph> {
        let mut recording = self.enter();
        let backend = match &self.queue.backend {
            StreamBackend::Cpu(stream) => stream.end_capture().map(GraphBackend::Cpu),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => stream.end_capture().map(GraphBackend::Cuda),
        };
        let kept = recording.take().unwrap_or_default();
        // What a failed capture kept is freed once the stream is unlocked: a dropped context may wait.
        drop(recording);
        Ok(Graph { backend: backend?, kept: Mutex::new(kept), launched: Mutex::default() })
    }

    /// Whether work is being recorded, be it for this crate or for an engine.
    pub fn is_capturing(&self) -> Result<bool> {
        self.queue.is_capturing()
    }

    /// A time stamp in stream order. During a capture the event is recorded into the graph: each replay stamps it anew.
    pub fn record(&self) -> Result<Event> {
        let backend = match &self.queue.backend {
            StreamBackend::Cpu(stream) => EventBackend::Cpu(stream.record()?),
            #[cfg(feature = "cuda")]
            StreamBackend::Cuda(stream) => EventBackend::Cuda(stream.record()?),
        };
        Ok(Event { backend })
    }

    /// The CUDA stream's handle, or a number that identifies a CPU stream.
    pub fn raw(&self) -> u64 {
        self.queue.raw()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", &self.queue.device).field("raw", &self.raw()).finish()
    }
}

enum GraphBackend {
    Cpu(cpu::CpuGraph),
    #[cfg(feature = "cuda")]
    Cuda(cuda_stream::CudaGraph),
}

/// Recorded work. It keeps what the work uses: memory of views, handles, and contexts, which stay open as long.
///
/// Dropping a graph waits for the streams that it was launched on, at most for the longest deadline of its contexts and
/// 5 s, or for 30 s if that is longer. Replays that still run then keep their memory for good.
pub struct Graph {
    backend: GraphBackend,
    kept: Mutex<Recording>,
    /// Queues on which it may still run.
    launched: Mutex<Vec<Queue>>,
}

/// How long a dropped graph waits for its replays, at the least.
const GRAPH_PATIENCE: Duration = Duration::from_secs(30);

impl Graph {
    /// Enqueues the recorded work once more, on a stream that is not itself capturing. It runs after earlier calls of
    /// its contexts that are of the kinds it holds, whichever stream they are on. Replays of a context that
    /// [`AllToAll::check`](crate::AllToAll::check) reports as closed run and do nothing.
    ///
    /// # Errors
    /// `Argument` for a stream that captures or is of another device, between the halves of a combine with a handle of
    /// this graph, and, where a context detects overlaps, for a graph recorded before
    /// [another library's capture](crate::Device::stream_from_raw) recorded calls of that context. `Generation` for a
    /// context of a past generation. `Device` if the driver refuses.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (chains, recording) = (kept.chains(), stream.enter());
        if recording.is_some() || stream.is_capturing()? {
            return Err(Error::argument("stream", "capturing", "end the capture before launching a graph on it"));
        }
        stream.queue.device.place().must_be("stream", self.place())?;
        kept.check()?;
        let chains = chains.follow(&stream.queue)?;
        kept.follow_uses(&stream.queue)?;
        note(&mut self.launched.lock().unwrap_or_else(PoisonError::into_inner), &stream.queue);
        let launched = match (&self.backend, &stream.queue.backend) {
            (GraphBackend::Cpu(graph), StreamBackend::Cpu(stream)) => stream.replay(graph),
            #[cfg(feature = "cuda")]
            (GraphBackend::Cuda(graph), StreamBackend::Cuda(stream)) => graph.launch(stream),
            #[cfg(feature = "cuda")]
            // One of them is of another device, which was refused.
            (GraphBackend::Cpu(_), StreamBackend::Cuda(_)) | (GraphBackend::Cuda(_), StreamBackend::Cpu(_)) => Ok(()),
        };
        drop(chains);
        launched
    }

    /// Where it was captured.
    fn place(&self) -> Place {
        match &self.backend {
            GraphBackend::Cpu(graph) => Place::Cpu(graph.number()),
            #[cfg(feature = "cuda")]
            GraphBackend::Cuda(graph) => Place::Gpu(graph.ordinal()),
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let kept = self.kept.get_mut().unwrap_or_else(PoisonError::into_inner);
        let launched = self.launched.get_mut().unwrap_or_else(PoisonError::into_inner);
        let patience = kept.patience().max(GRAPH_PATIENCE);
        if !kept.is_empty() && launched.iter().any(|queue| queue.drain(patience).is_err()) {
            std::mem::forget(std::mem::take(kept));
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
            _ => Err(Error::argument("since", "an event of another kind of device", "compare events of one device")),
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
