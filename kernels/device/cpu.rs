//! The CPU device: memory, streams, graphs and events over the fiber executor (kernels/ffi/executor.h).
//!
//! Place: one backend of `device`. A free device runs its executor on a thread of its own, started here and joined when
//! the last clone, stream and buffer are gone; the devices of a seeded world share the executor of the calling thread
//! (`seeded`). Callers may be on any thread or host fiber. Nothing here waits but `synchronize` and `transfer`, which
//! copies on the executor's thread, so that no kernel runs meanwhile. Memory that is dropped while the executor may
//! still use it goes on a shelf and is freed once the streams have drained.

use super::Shape;
use super::view::{Owner, Span};
use crate::base::{Error, Result, wait};
use crate::ffi::executor as ffi;
use std::alloc::Layout;
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// What device memory holds at first, so that a kernel which relies on zeros fails here.
pub(super) const UNSPECIFIED: u8 = 0xA5;
const ALIGNMENT: usize = 256;
/// The executor has not returned.
const RUNNING: i32 = -1;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these locks, and their contents are valid between statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn error(what: impl Into<String>, advice: impl Into<String>) -> Error {
    Error::device(what, advice)
}

/// A C string of a static name, made once for each name: the executor keeps names for as long as it lives.
pub(super) fn static_c_str(name: &'static str) -> &'static CStr {
    static NAMES: OnceLock<Mutex<HashMap<&'static str, &'static CStr>>> = OnceLock::new();
    lock(NAMES.get_or_init(Mutex::default)).entry(name).or_insert_with(|| {
        let owned = CString::new(name).unwrap_or_default();
        Box::leak(owned.into_boxed_c_str())
    })
}

/// The error of a failed call or a returned executor. `what` is what was being done.
pub(super) fn explain(code: i32, what: &str, report: &str) -> Error {
    match u32::try_from(code).unwrap_or(u32::MAX) {
        ffi::TY_EXEC_OK => error(format!("{what}: the CPU device has stopped"), "make a new device").ending(),
        ffi::TY_EXEC_HANG => error(
            format!("{what}: every fiber of the CPU device waited and none could go on: {}", report.trim_end()),
            "see the wait sites; a peer that fails or returns early leaves the others waiting",
        ),
        ffi::TY_EXEC_NO_MEMORY => {
            error(format!("{what}: the CPU device lacks memory"), "use fewer blocks and threads, or smaller buffers")
        }
        ffi::TY_EXEC_UNKNOWN_KERNEL => {
            error(format!("{what}: the CPU build has no such kernel"), "name it in kernels/kernels.inc")
        }
        ffi::TY_EXEC_BAD_LAUNCH => error(
            format!("{what}: the launch is unusable"),
            "use whole warps, fewer threads, and the kernel's own struct",
        ),
        other => error(format!("{what}: the executor answered {other}"), "see kernels/ffi/executor.h"),
    }
}

/// An executor, and what must live exactly as long.
pub(super) struct Executor {
    raw: NonNull<ffi::ty_exec>,
    /// Identifies executors of this process.
    number: u64,
    /// What ty_exec_run returned, or RUNNING.
    ended: Arc<AtomicI32>,
    thread: Mutex<Option<JoinHandle<()>>>,
    shelf: Mutex<Shelf>,
    /// The stream of copies that the host waits for, once there was one. Destroyed with the executor.
    copies: Mutex<Option<StreamPtr>>,
}

// SAFETY: the executor's functions used here are open to any thread (executor.h); ty_exec_run and
// ty_exec_destroy are called by one owner each.
unsafe impl Send for Executor {}
// SAFETY: as above.
unsafe impl Sync for Executor {}

/// Streams in use, and what was dropped while work was pending.
#[derive(Default)]
struct Shelf {
    streams: Vec<StreamPtr>,
    dropped_streams: Vec<StreamPtr>,
    dropped_memory: Vec<(u64, Layout)>,
    retired: Vec<Owner>,
}

#[derive(Clone, Copy, PartialEq)]
struct StreamPtr(NonNull<ffi::ty_stream>);

// SAFETY: streams are open to any thread (executor.h).
unsafe impl Send for StreamPtr {}
// SAFETY: as above.
unsafe impl Sync for StreamPtr {}

impl StreamPtr {
    fn drained(self) -> bool {
        // SAFETY: pointers on a shelf are live: taken off before they are destroyed.
        unsafe { ffi::ty_stream_completed(self.0.as_ptr()) >= ffi::ty_stream_enqueued(self.0.as_ptr()) }
    }
}

impl Shelf {
    /// Takes what nothing can be using any more off the shelf. The caller drops what this returns, once the shelf is
    /// unlocked: an owner may free memory of this device.
    #[must_use]
    fn clear(&mut self, stopped: bool) -> Vec<Owner> {
        self.dropped_streams.retain(|stream| {
            let drained = stream.drained();
            if drained {
                // SAFETY: it drained, its owner dropped it, and it leaves the list.
                unsafe { ffi::ty_stream_destroy(stream.0.as_ptr()) };
            }
            !drained
        });
        let quiet = || self.streams.iter().chain(&self.dropped_streams).all(|stream| stream.drained());
        if self.dropped_memory.is_empty() && self.retired.is_empty() || !(stopped || quiet()) {
            return Vec::new();
        }
        for (ptr, layout) in self.dropped_memory.drain(..) {
            // SAFETY: allocated with this layout, dropped by its owner, and no stream has work left.
            unsafe { std::alloc::dealloc(ptr as *mut u8, layout) };
        }
        std::mem::take(&mut self.retired)
    }
}

impl Executor {
    pub(super) fn create(config: &ffi::ty_exec_config) -> Result<Executor> {
        // SAFETY: the config outlives the call; null is handled.
        let raw = NonNull::new(unsafe { ffi::ty_exec_create(config) });
        let raw = raw.ok_or_else(|| error("the CPU device's executor could not be made", "free memory"))?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Ok(Executor {
            raw,
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            ended: Arc::new(AtomicI32::new(RUNNING)),
            thread: Mutex::new(None),
            shelf: Mutex::default(),
            copies: Mutex::new(None),
        })
    }

    pub(super) fn raw(&self) -> *mut ffi::ty_exec {
        self.raw.as_ptr()
    }

    pub(super) fn set_ended(&self, code: i32) {
        self.ended.store(code, Ordering::Release);
    }

    fn start_thread(&self) -> Result<()> {
        struct Run(NonNull<ffi::ty_exec>, Arc<AtomicI32>);
        // SAFETY: ty_exec_run may be called by any one thread; the pointer stays valid until the thread is joined.
        unsafe impl Send for Run {}
        let run = Run(self.raw, self.ended.clone());
        let body = move || {
            let Run(raw, ended) = { run };
            // SAFETY: the executor is destroyed only after this thread was joined.
            let code = unsafe { ffi::ty_exec_run(raw.as_ptr()) };
            ended.store(code, Ordering::Release);
        };
        let thread = std::thread::Builder::new().name("tokenyard-cpu".into()).spawn(body);
        let thread = thread.map_err(|e| {
            error(format!("starting the CPU device's thread: {e}"), "raise the limit of threads").caused_by(e)
        })?;
        *lock(&self.thread) = Some(thread);
        Ok(())
    }

    /// The last report of waiting fibers. Only after the run has ended: until then it may be changing.
    pub(super) fn report(&self) -> String {
        // SAFETY: the executor is live; the string is null or lives as long as it does.
        let text = unsafe { ffi::ty_exec_report(self.raw()) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: not null, and a C string by executor.h.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    fn alive(&self, what: &str) -> Result<()> {
        match self.ended.load(Ordering::Acquire) {
            RUNNING => Ok(()),
            code => Err(explain(code, what, &self.report()).ending()),
        }
    }

    fn call(&self, stream: StreamPtr, call: Call) -> Result<()> {
        self.alive("enqueueing on the CPU device")?;
        let arg = Box::into_raw(Box::new(call)).cast::<c_void>();
        // SAFETY: the stream is live; run_call takes the box back, once.
        let code = unsafe { ffi::ty_stream_call(stream.0.as_ptr(), Some(run_call), arg) };
        if code == ffi::TY_EXEC_OK as i32 {
            return Ok(());
        }
        // SAFETY: it was not enqueued, so nobody else takes it.
        drop(unsafe { Box::from_raw(arg.cast::<Call>()) });
        Err(explain(code, "enqueueing on the CPU device", ""))
    }

    /// The stream of copies that the host waits for.
    fn copies(&self) -> Result<StreamPtr> {
        let mut copies = lock(&self.copies);
        if let Some(stream) = *copies {
            return Ok(stream);
        }
        // SAFETY: the executor is live and destroys the stream as it goes.
        let raw = NonNull::new(unsafe { ffi::ty_stream_create(self.raw(), 0) });
        let stream = StreamPtr(raw.ok_or_else(|| error("a stream could not be made", "free memory"))?);
        *copies = Some(stream);
        Ok(stream)
    }

    fn clear_shelf(&self) {
        let retired = lock(&self.shelf).clear(self.ended.load(Ordering::Acquire) != RUNNING);
        drop(retired);
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        if let Some(thread) = lock(&self.thread).take() {
            // SAFETY: the executor is live; stop is open to any thread.
            unsafe { ffi::ty_exec_stop(self.raw()) };
            // The thread runs no Rust code that can panic.
            let _ = thread.join();
        }
        let retired = lock(&self.shelf).clear(true);
        drop(retired);
        // SAFETY: no stream and no device refers to it any more, and its thread has ended.
        unsafe { ffi::ty_exec_destroy(self.raw()) };
    }
}

/// A rank's view of an executor.
#[derive(Clone)]
pub(super) struct CpuDevice {
    exec: Arc<Executor>,
    rank: u32,
}

impl CpuDevice {
    /// With an executor and a thread of its own.
    pub(super) fn new() -> Result<CpuDevice> {
        let config = ffi::ty_exec_config { mode: ffi::TY_EXEC_FREE, ..Default::default() };
        let exec = Executor::create(&config)?;
        exec.start_thread()?;
        Ok(CpuDevice { exec: Arc::new(exec), rank: 0 })
    }

    /// On an executor that others share.
    pub(super) fn shared(exec: Arc<Executor>, rank: u32) -> CpuDevice {
        CpuDevice { exec, rank }
    }

    /// Of its executor, in this process.
    pub(super) fn number(&self) -> u64 {
        self.exec.number
    }

    pub(super) fn new_stream(&self) -> Result<CpuStream> {
        self.exec.alive("creating a stream")?;
        self.exec.clear_shelf();
        // SAFETY: the executor is live and outlives the stream, which holds it.
        let raw = NonNull::new(unsafe { ffi::ty_stream_create(self.exec.raw(), self.rank) });
        let raw = StreamPtr(raw.ok_or_else(|| error("a stream could not be made", "free memory"))?);
        lock(&self.exec.shelf).streams.push(raw);
        Ok(CpuStream { exec: self.exec.clone(), raw, capture: Mutex::new(None) })
    }

    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()
    }

    /// Memory filled with `byte`.
    pub(super) fn alloc(&self, bytes: usize, byte: u8) -> Result<u64> {
        self.exec.clear_shelf();
        let lacking = || {
            error(format!("allocating {bytes} bytes of host memory failed"), "free memory, or plan for fewer tokens")
        };
        let layout = Self::layout(bytes).ok_or_else(lacking)?;
        // SAFETY: the layout's size is not zero.
        let ptr = unsafe { if byte == 0 { std::alloc::alloc_zeroed(layout) } else { std::alloc::alloc(layout) } };
        if ptr.is_null() {
            return Err(lacking());
        }
        if byte != 0 {
            // SAFETY: freshly allocated with this size.
            unsafe { std::ptr::write_bytes(ptr, byte, layout.size()) };
        }
        Ok(ptr as u64)
    }

    /// Host memory that kernels share with the host, zeroed. On this device it is memory like any other, but loads of
    /// it are counted in a seeded world.
    pub(super) fn alloc_host(&self, bytes: usize) -> Result<u64> {
        let ptr = self.alloc(bytes, 0)?;
        self.share_host(ptr, bytes, true);
        Ok(ptr)
    }

    /// Frees memory from `alloc_host`.
    ///
    /// # Safety
    /// As for `free`.
    pub(super) unsafe fn free_host(&self, ptr: u64, bytes: usize) {
        self.share_host(ptr, bytes, false);
        // SAFETY: passed on to the caller.
        unsafe { self.free(ptr, bytes) }
    }

    fn share_host(&self, ptr: u64, bytes: usize, shared: bool) {
        // SAFETY: the executor is live as long as this device.
        unsafe { ffi::ty_exec_share_host(self.exec.raw(), ptr as *const c_void, bytes as u64, i32::from(shared)) }
    }

    /// Frees memory once no stream of the executor has work left.
    ///
    /// # Safety
    /// `ptr` came from `alloc(bytes, _)` and is not used by its owner again.
    pub(super) unsafe fn free(&self, ptr: u64, bytes: usize) {
        if let Some(layout) = Self::layout(bytes) {
            lock(&self.exec.shelf).dropped_memory.push((ptr, layout));
            self.exec.clear_shelf();
        }
    }

    /// Makes a copy on the executor's thread, between rounds of its fibers, and waits for it. So no kernel of this
    /// device runs meanwhile, and a kernel that waits for a peer does not hold the copy up.
    ///
    /// # Safety
    /// The host's bytes are the caller's during the call; the device's bytes lie in an allocation of this device.
    pub(super) unsafe fn transfer(&self, copy: HostCopy) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.transfer_within(copy, COPY_TIMEOUT) }
    }

    /// # Safety
    /// As for `transfer`.
    unsafe fn transfer_within(&self, copy: HostCopy, timeout: Duration) -> Result<()> {
        let ended = || self.exec.ended.load(Ordering::Acquire) != RUNNING;
        if runs_here(self.exec.raw()) || ended() {
            // On the executor's thread, or after its end.
            copy.run();
            return Ok(());
        }
        let transfer = Arc::new(Transfer { copy: Mutex::new(Some(copy)), done: AtomicBool::new(false) });
        self.exec.call(self.exec.copies()?, Call::Transfer(transfer.clone()))?;
        let done = || (transfer.done.load(Ordering::Acquire) || ended()).then_some(());
        let waited =
            wait::poll_unless("copy to or from device memory", timeout, "nothing was copied; copy again", done);
        // Whoever takes the copy makes it or gives it up: after this the executor touches the host's bytes no more.
        // The wait does not unwind: an interrupt's check that panics counts as raised.
        match lock(&transfer.copy).take() {
            None => Ok(()),
            Some(copy) if ended() => {
                copy.run();
                Ok(())
            }
            Some(_) => {
                waited?;
                Err(error(
                    format!("a copy to or from device memory did not begin within {} ms", timeout.as_millis()),
                    "see which kernel runs without waiting for anything",
                ))
            }
        }
    }

    /// Drops the owner once no stream of the executor has work left.
    pub(super) fn retire(&self, owner: Owner) {
        lock(&self.exec.shelf).retired.push(owner);
        self.exec.clear_shelf();
    }

    pub(super) fn check(&self) -> Result<()> {
        self.exec.alive("checking the CPU device")
    }
}

/// How long a copy that the host waits for may take to begin: as on a GPU.
const COPY_TIMEOUT: Duration = Duration::from_secs(60);

/// A copy between host and device memory, or a fill.
#[derive(Debug, Clone, Copy)]
pub(super) enum HostCopy {
    Write { dst: Span, data: *const u8 },
    Read { src: Span, data: *mut u8 },
    Fill { dst: Span, byte: u8 },
}

// SAFETY: whoever makes one vouches for the bytes until it has run or was given up.
unsafe impl Send for HostCopy {}

impl HostCopy {
    fn run(self) {
        match self {
            // SAFETY: both spans are valid, as `transfer` asks of its caller, who waits.
            HostCopy::Write { dst, data } => unsafe { std::ptr::copy(data, dst.ptr as *mut u8, dst.bytes) },
            // SAFETY: as above.
            HostCopy::Read { src, data } => unsafe { std::ptr::copy(src.ptr as *const u8, data, src.bytes) },
            // SAFETY: as above.
            HostCopy::Fill { dst, byte } => unsafe { std::ptr::write_bytes(dst.ptr as *mut u8, byte, dst.bytes) },
        }
    }
}

/// A copy that the host waits for.
#[derive(Debug)]
struct Transfer {
    /// None once it was taken: by the executor, which makes it under the lock, or by a caller that gave up.
    copy: Mutex<Option<HostCopy>>,
    done: AtomicBool,
}

impl Transfer {
    fn run(&self) {
        let mut copy = lock(&self.copy);
        if let Some(copy) = copy.take() {
            copy.run();
        }
        drop(copy);
        self.done.store(true, Ordering::Release);
    }
}

thread_local! {
    /// The executor of a seeded world that runs on this thread, or null.
    static RUNS_HERE: Cell<*const ffi::ty_exec> = const { Cell::new(std::ptr::null()) };
}

fn runs_here(exec: *const ffi::ty_exec) -> bool {
    RUNS_HERE.with(|here| here.get() == exec)
}

/// Until it is dropped, `exec` is the executor that runs on this thread.
pub(super) struct RunsHere;

impl RunsHere {
    pub(super) fn new(exec: &Executor) -> RunsHere {
        RUNS_HERE.with(|here| here.set(exec.raw()));
        RunsHere
    }
}

impl Drop for RunsHere {
    fn drop(&mut self) {
        RUNS_HERE.with(|here| here.set(std::ptr::null()));
    }
}

/// A host-side piece of work, run by the executor in stream order.
#[derive(Debug, Clone)]
enum Call {
    Transfer(Arc<Transfer>),
    Fill { dst: Span, byte: u8 },
    Copy { dst: Span, src: Span },
    Stamp(Arc<AtomicU64>),
}

impl Call {
    fn run(self) {
        match self {
            // SAFETY: a view's span, whose owner waits for the streams as it frees it.
            Call::Fill { dst, byte } => unsafe { std::ptr::write_bytes(dst.ptr as *mut u8, byte, dst.bytes) },
            // SAFETY: as above; the lengths were compared when it was enqueued.
            Call::Copy { dst, src } => unsafe {
                std::ptr::copy(src.ptr as *const u8, dst.ptr as *mut u8, dst.bytes);
            },
            Call::Stamp(cell) => cell.store(now_ns(), Ordering::Release),
            Call::Transfer(transfer) => transfer.run(),
        }
    }
}

unsafe extern "C" fn run_call(call: *mut c_void) {
    // SAFETY: made by Box::into_raw in `Executor::call` and run once.
    let call = unsafe { Box::from_raw(call.cast::<Call>()) };
    call.run();
}

/// Nanoseconds by the operating system's clock; never 0, which means "not yet".
fn now_ns() -> u64 {
    u64::try_from(wait::system_now().as_nanos()).unwrap_or(u64::MAX).max(1)
}

#[derive(Clone)]
enum Op {
    Launch { kernel: &'static str, shape: Shape, args: Box<[MaybeUninit<u8>]> },
    Call(Call),
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Launch { kernel, shape, .. } => write!(f, "{kernel} {shape:?}"),
            Op::Call(call) => call.fmt(f),
        }
    }
}

/// Recorded work.
#[derive(Debug)]
pub(super) struct CpuGraph {
    ops: Vec<Op>,
    /// Of the executor that it was captured on.
    number: u64,
}

impl CpuGraph {
    /// Of the executor that it was captured on.
    pub(super) fn number(&self) -> u64 {
        self.number
    }
}

/// The time at which a stream reached a point; 0 until then.
#[derive(Debug)]
pub(super) struct CpuEvent {
    ns: Arc<AtomicU64>,
}

impl CpuEvent {
    pub(super) fn elapsed_us(&self, since: &CpuEvent) -> Result<f64> {
        let (end, start) = (self.ns.load(Ordering::Acquire), since.ns.load(Ordering::Acquire));
        if end == 0 || start == 0 {
            return Err(error("an event was not reached yet", "synchronize the stream first"));
        }
        Ok((end as f64 - start as f64) / 1000.0)
    }
}

/// A stream of the executor, or a recording in progress.
pub(super) struct CpuStream {
    exec: Arc<Executor>,
    raw: StreamPtr,
    /// `Some` while capturing. Held while work is enqueued, so that a graph's replay is not interleaved.
    capture: Mutex<Option<Vec<Op>>>,
}

impl CpuStream {
    /// # Safety
    /// `args` is valid for reads of `args_bytes`, and holds what the kernel takes.
    pub(super) unsafe fn launch(
        &self,
        kernel: &'static str,
        shape: Shape,
        args: *const c_void,
        args_bytes: usize,
    ) -> Result<()> {
        let mut capture = lock(&self.capture);
        if let Some(ops) = capture.as_mut() {
            // SAFETY: the name is a C string.
            if unsafe { ffi::ty_kernel_exists(static_c_str(kernel).as_ptr()) } == 0 {
                return Err(explain(ffi::TY_EXEC_UNKNOWN_KERNEL as i32, kernel, ""));
            }
            let mut copy = vec![MaybeUninit::<u8>::uninit(); args_bytes].into_boxed_slice();
            // SAFETY: both spans have args_bytes; padding may stay uninitialised.
            unsafe { std::ptr::copy_nonoverlapping(args.cast::<MaybeUninit<u8>>(), copy.as_mut_ptr(), args_bytes) };
            ops.push(Op::Launch { kernel, shape, args: copy });
            return Ok(());
        }
        // SAFETY: passed on to the caller.
        unsafe { self.enqueue_launch(kernel, shape, args, args_bytes) }
    }

    /// # Safety
    /// As `launch`.
    unsafe fn enqueue_launch(
        &self,
        kernel: &'static str,
        shape: Shape,
        args: *const c_void,
        args_bytes: usize,
    ) -> Result<()> {
        self.exec.alive(kernel)?;
        let name = static_c_str(kernel).as_ptr();
        // SAFETY: the stream is live, the name static, and args are copied during the call.
        let code = unsafe {
            ffi::ty_stream_launch(
                self.raw.0.as_ptr(),
                name,
                shape.grid,
                shape.block,
                shape.shared_bytes,
                args,
                args_bytes,
            )
        };
        if code == ffi::TY_EXEC_OK as i32 { Ok(()) } else { Err(explain(code, kernel, "")) }
    }

    fn enqueue_call(&self, call: Call) -> Result<()> {
        self.exec.call(self.raw, call)
    }

    fn submit(&self, call: Call) -> Result<()> {
        match lock(&self.capture).as_mut() {
            Some(ops) => {
                ops.push(Op::Call(call));
                Ok(())
            }
            None => self.enqueue_call(call),
        }
    }

    pub(super) fn fill(&self, dst: Span, byte: u8) -> Result<()> {
        self.submit(Call::Fill { dst, byte })
    }

    pub(super) fn copy(&self, dst: Span, src: Span) -> Result<()> {
        self.submit(Call::Copy { dst, src })
    }

    pub(super) fn record(&self) -> Result<CpuEvent> {
        let ns = Arc::new(AtomicU64::new(0));
        self.submit(Call::Stamp(ns.clone()))?;
        Ok(CpuEvent { ns })
    }

    /// Orders what is enqueued from here on after all that `after` has enqueued so far.
    pub(super) fn wait_for(&self, after: &CpuStream) -> Result<()> {
        self.exec.alive("ordering two streams")?;
        // SAFETY: both streams are live.
        let code = unsafe { ffi::ty_stream_wait(self.raw.0.as_ptr(), after.raw.0.as_ptr()) };
        if code == ffi::TY_EXEC_OK as i32 { Ok(()) } else { Err(explain(code, "ordering two streams", "")) }
    }

    /// Whether nothing that was enqueued is left.
    pub(super) fn is_idle(&self) -> bool {
        self.raw.drained()
    }

    pub(super) fn replay(&self, graph: &CpuGraph) -> Result<()> {
        let _in_order = lock(&self.capture);
        for (enqueued, op) in graph.ops.iter().enumerate() {
            let outcome = match op {
                // SAFETY: the copied arguments of a launch that `launch` vouched for.
                Op::Launch { kernel, shape, args } => unsafe {
                    self.enqueue_launch(kernel, *shape, args.as_ptr().cast(), args.len())
                },
                Op::Call(call) => self.enqueue_call(call.clone()),
            };
            // A graph of which a part is enqueued cannot be launched again.
            outcome.map_err(|error| if enqueued > 0 { error.ending() } else { error })?;
        }
        Ok(())
    }

    pub(super) fn begin_capture(&self) -> Result<()> {
        let mut capture = lock(&self.capture);
        if capture.is_some() {
            return Err(error("begin_capture on a stream that is capturing", "end the first capture"));
        }
        *capture = Some(Vec::new());
        Ok(())
    }

    pub(super) fn end_capture(&self) -> Result<CpuGraph> {
        let ops = lock(&self.capture).take();
        let ops = ops.ok_or_else(|| error("end_capture on a stream that is not capturing", "begin a capture first"))?;
        Ok(CpuGraph { ops, number: self.exec.number })
    }

    pub(super) fn is_capturing(&self) -> bool {
        lock(&self.capture).is_some()
    }

    pub(super) fn synchronize(&self, timeout: Duration) -> Result<()> {
        if self.is_capturing() {
            return Err(error("synchronize on a stream that is capturing", "end the capture first"));
        }
        self.drain(timeout)
    }

    /// As `synchronize`, also while the stream captures: what is recorded is not enqueued, so it is not waited for.
    pub(super) fn drain(&self, timeout: Duration) -> Result<()> {
        let stream = self.raw.0.as_ptr();
        // SAFETY: the stream is live as long as self.
        let target = unsafe { ffi::ty_stream_enqueued(stream) };
        let done = wait::poll_unless("stream", timeout, wait::STREAM_LEFT, || {
            // SAFETY: as above.
            if unsafe { ffi::ty_stream_completed(stream) } >= target {
                return Some(Ok(()));
            }
            self.exec.alive("waiting for the stream").err().map(Err)
        });
        done?.unwrap_or_else(|| {
            Err(error(
                format!("the stream did not finish within {} ms", timeout.as_millis()),
                "see which kernel runs, and whether it waits for a peer; or pass a longer timeout",
            ))
        })
    }

    pub(super) fn raw(&self) -> u64 {
        self.raw.0.as_ptr() as u64
    }
}

impl Drop for CpuStream {
    fn drop(&mut self) {
        let mut shelf = lock(&self.exec.shelf);
        shelf.streams.retain(|stream| *stream != self.raw);
        shelf.dropped_streams.push(self.raw);
        let retired = shelf.clear(self.exec.ended.load(Ordering::Acquire) != RUNNING);
        drop(shelf);
        drop(retired);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Shows this test program that no other test runs in it: stacks are counted for the process.
    const ALONE: &str = "TOKENYARD_TEST_ALONE";
    /// More executors than the process keeps chunks of stacks for the next.
    const DEVICES: usize = 100;

    /// Runs a kernel on `DEVICES` devices at once; returns how many stacks have a guard page after they have gone.
    fn guarded_after_devices() -> u64 {
        let devices: Vec<_> = (0..DEVICES).map(|_| crate::kernels::Device::cpu().unwrap()).collect();
        for device in &devices {
            let stream = device.new_stream().unwrap();
            let word = device.alloc(64).unwrap();
            let mut args = crate::ffi::layout::ty_push_args { source: word.view().ptr(), ..Default::default() };
            args.destination[0] = word.view().ptr();
            args.destinations = 1;
            // SAFETY: it copies no bytes.
            unsafe { stream.launch("ty_bench_push", 1, 32, 0, &args).unwrap() };
            stream.synchronize(Duration::from_secs(60)).unwrap();
        }
        drop(devices);
        // SAFETY: open to any thread.
        unsafe { ffi::ty_exec_guarded_stacks() }
    }

    /// The executor never runs, like one whose kernel waits for nothing and never ends.
    #[test]
    fn a_copy_that_is_given_up_is_not_made_later() {
        let config = ffi::ty_exec_config { mode: ffi::TY_EXEC_SEEDED, ..Default::default() };
        let device = CpuDevice::shared(Arc::new(Executor::create(&config).unwrap()), 0);
        let ptr = device.alloc(16, 1).unwrap();
        let (src, mut host) = (Span { ptr, bytes: 16 }, [7u8; 16]);
        let copy = HostCopy::Read { src, data: host.as_mut_ptr() };
        // SAFETY: both spans live until the end of the test.
        let why = unsafe { device.transfer_within(copy, Duration::from_millis(20)) }.unwrap_err().to_string();
        assert!(why.contains("a copy to or from device memory did not begin within 20 ms"), "{why}");
        let (interrupt, copy) = (crate::base::Interrupt::new(), HostCopy::Read { src, data: host.as_mut_ptr() });
        interrupt.raise();
        // SAFETY: as above.
        let why = interrupt.during(|| unsafe { device.transfer(copy) }).unwrap_err().to_string();
        assert!(why.contains("\"copy to or from device memory\": nothing was copied"), "{why}");
        // SAFETY: nobody else runs it.
        assert_eq!(unsafe { ffi::ty_exec_run(device.exec.raw()) }, ffi::TY_EXEC_OK as i32);
        assert_eq!(host, [7; 16]);
        // SAFETY: allocated above; the copy was given up.
        unsafe { device.free(ptr, 16) };
    }

    /// Blocks of a launch whose shared memory together is more than the process may have.
    #[test]
    fn a_lack_of_memory_for_a_launch_is_reported() {
        use nix::sys::resource::{Resource, setrlimit};
        const ROOM: u64 = 128 << 20;
        if std::env::var(ALONE).is_err() {
            let name = "kernels::device::cpu::tests::a_lack_of_memory_for_a_launch_is_reported";
            let mut alone = Command::new(std::env::current_exe().unwrap());
            let alone = alone.args([name, "--exact", "--test-threads=1"]).env(ALONE, "1").output().unwrap();
            let printed = String::from_utf8_lossy(&alone.stdout);
            assert!(alone.status.success() && printed.contains("1 passed"), "{}: {printed}", alone.status);
            return;
        }
        let device = crate::kernels::Device::cpu().unwrap();
        let stream = device.new_stream().unwrap();
        let word = device.alloc(64).unwrap();
        let mut args = crate::ffi::layout::ty_push_args { source: word.view().ptr(), ..Default::default() };
        args.destination[0] = word.view().ptr();
        args.destinations = 1;
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
        let most = 4096 * pages + ROOM;
        setrlimit(Resource::RLIMIT_AS, most, most).unwrap();
        // SAFETY: it copies no bytes.
        unsafe { stream.launch("ty_bench_push", 1024, 32, 227 << 10, &args).unwrap() };
        let why = stream.synchronize(Duration::from_secs(60)).unwrap_err().to_string();
        assert!(why.contains("the CPU device lacks memory: use fewer blocks"), "{why}");
    }

    #[test]
    fn guard_pages_that_are_unmapped_are_counted_down() {
        if std::env::var(ALONE).is_err() {
            let name = "kernels::device::cpu::tests::guard_pages_that_are_unmapped_are_counted_down";
            let mut alone = Command::new(std::env::current_exe().unwrap());
            let alone = alone.args([name, "--exact", "--test-threads=1"]).env(ALONE, "1").output().unwrap();
            let printed = String::from_utf8_lossy(&alone.stdout);
            assert!(alone.status.success() && printed.contains("1 passed"), "{printed}");
            return;
        }
        let first = guarded_after_devices();
        assert!(first > 0);
        assert_eq!([guarded_after_devices(), guarded_after_devices()], [first; 2]);
    }
}
