//! A whole world on one thread, under one seeded schedule that replays exactly.
//!
//! Place: tests and the simulator run it instead of a thread per rank. Everything runs on the calling thread: each
//! rank's host code on a host fiber, its kernels on device fibers of the same executor. While it runs, the thread's
//! waits (`base::wait`) yield to the scheduler, and their deadlines pass by the world's clock. It never starts a
//! thread.

use super::Device;
use super::cpu::{CpuDevice, Executor, RunsHere, explain, static_c_str};
use crate::base::{Error, wait};
use crate::ffi::executor as ffi;
use std::any::Any;
use std::cell::Cell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

/// What the schedule depends on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SeededConfig {
    /// The same seed gives the same schedule.
    pub seed: u64,
    /// Plain stores of a device fiber stay hidden from others until its next release, as a GPU may keep them.
    pub hold_stores: bool,
    /// A rank whose kernels stand still for a while, as if it had died, or were late.
    pub stopped: Option<Stopped>,
}

/// A rank whose kernels stand still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stopped {
    /// Which rank.
    pub rank: u32,
    /// Switches between fibers before that.
    pub after: u64,
    /// How long, by the clock of the devices.
    pub pause: Duration,
}

/// The result of a seeded run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeededReport {
    /// A hash of every scheduling decision: equal seeds and programs give equal hashes.
    pub trace_hash: u64,
    /// Switches between fibers.
    pub switches: u64,
    /// Loads of host memory by kernels.
    pub host_loads: u64,
    /// Those by other threads than the one of a kernel that polls host memory.
    pub further_pollers: u64,
    /// Which fiber waited where when none could go on, if that ever happened; device deadlines fire then.
    pub hang_report: Option<String>,
    /// Why the run could not start or did not end by itself. Host closures that were then still waiting were unwound
    /// from their waits: their locals were dropped, and their scopes ended.
    pub failure: Option<Error>,
}

/// One rank's host code, until it has returned.
struct HostTask<'a> {
    host: &'a (dyn Fn(usize, Device) + Sync),
    rank: usize,
    device: Cell<Option<Device>>,
    panic: Cell<Option<Box<dyn Any + Send>>>,
}

unsafe extern "C" fn run_host(task: *mut c_void) {
    // SAFETY: `seeded_world` passes a task that outlives the run, to one fiber.
    let task = unsafe { &*task.cast::<HostTask<'_>>() };
    if let Some(device) = task.device.take() {
        // Unwinding must not leave the fiber: its caller is not Rust.
        let outcome = catch_unwind(AssertUnwindSafe(|| (task.host)(task.rank, device)));
        task.panic.set(outcome.err().filter(|payload| !payload.is::<Left>()));
    }
}

/// The payload that unwinds a host closure whose world hung.
struct Left;

/// The thread's way to wait while a seeded world runs on it. The first poll of a wait is progress: the wait before
/// ended.
fn yield_fiber(site: &'static str, polls: u32) {
    // SAFETY: the question may be asked anywhere; the yield only on a fiber, with a name that lives for ever.
    unsafe {
        if ffi::ty_exec_on_fiber() != 0 {
            if polls == 0 {
                ffi::ty_exec_note_progress();
            }
            ffi::ty_exec_host_yield(static_c_str(site).as_ptr());
            // A wait during unwinding, as in destructors, goes on until its own deadline.
            if ffi::ty_exec_ending() != 0 && !std::thread::panicking() {
                resume_unwind(Box::new(Left));
            }
        } else {
            std::thread::yield_now();
        }
    }
}

/// The world's clock, by which deadlines on its fibers pass; elsewhere on its thread the system's.
fn fiber_now() -> Duration {
    // SAFETY: may be asked anywhere; the clock of a fiber's executor only on one.
    match unsafe { ffi::ty_exec_on_fiber() } {
        0 => wait::system_now(),
        // SAFETY: on a fiber.
        _ => Duration::from_nanos(unsafe { ffi::ty_exec_fiber_now_ns() }),
    }
}

/// The thread waits as its fibers do, until this is dropped, also when a panic is raised again.
struct WaitsOfFibers;

impl WaitsOfFibers {
    fn begin() -> WaitsOfFibers {
        wait::set_fibers(Some(wait::Fibers { yield_fiber, now: fiber_now }));
        WaitsOfFibers
    }
}

impl Drop for WaitsOfFibers {
    fn drop(&mut self) {
        wait::set_fibers(None);
    }
}

/// Runs `host(rank, device)` for every rank below `ranks` on the calling thread, as `config` schedules them, until
/// all have returned and their streams have drained. A panic of one rank is raised again when the run has ended.
pub fn seeded_world(config: SeededConfig, ranks: usize, host: impl Fn(usize, Device) + Sync) -> SeededReport {
    // SAFETY: the question may be asked anywhere.
    if unsafe { ffi::ty_exec_on_fiber() } != 0 {
        return failed(Error::device(
            "a seeded world was started inside another",
            "run one after the other, or on threads of their own",
        ));
    }
    match Executor::create(&ffi::ty_exec_config {
        seed: config.seed,
        mode: ffi::TY_EXEC_SEEDED,
        hold_stores: u32::from(config.hold_stores),
        stopped_after: config.stopped.map_or(0, |stopped| stopped.after),
        stopped_ns: config.stopped.map_or(0, |stopped| stopped.pause.as_nanos() as u64),
        stopped_rank: config.stopped.map_or(0, |stopped| stopped.rank + 1),
        ..Default::default()
    }) {
        Ok(exec) => run(&Arc::new(exec), ranks, &host),
        Err(why) => failed(why),
    }
}

fn failed(why: Error) -> SeededReport {
    SeededReport {
        trace_hash: 0,
        switches: 0,
        host_loads: 0,
        further_pollers: 0,
        hang_report: None,
        failure: Some(why),
    }
}

fn run(exec: &Arc<Executor>, ranks: usize, host: &(dyn Fn(usize, Device) + Sync)) -> SeededReport {
    let task = |rank| HostTask {
        host,
        rank,
        device: Cell::new(Some(Device::from_cpu(CpuDevice::shared(exec.clone(), rank as u32)))),
        panic: Cell::new(None),
    };
    let tasks: Vec<HostTask<'_>> = (0..ranks).map(task).collect();
    let code = spawn_and_run(exec, &tasks);
    let report = exec.report();
    if let Some(payload) = tasks.iter().find_map(|task| task.panic.take()) {
        resume_unwind(payload);
    }
    SeededReport {
        // SAFETY: the executor is live.
        trace_hash: unsafe { ffi::ty_exec_trace_hash(exec.raw()) },
        // SAFETY: as above.
        switches: unsafe { ffi::ty_exec_switches(exec.raw()) },
        // SAFETY: as above.
        host_loads: unsafe { ffi::ty_exec_host_loads(exec.raw()) },
        // SAFETY: as above.
        further_pollers: unsafe { ffi::ty_exec_further_pollers(exec.raw()) },
        failure: (code != ffi::TY_EXEC_OK as i32).then(|| explain(code, "the seeded world", &report).ending()),
        hang_report: (!report.is_empty()).then_some(report),
    }
}

fn spawn_and_run(exec: &Executor, tasks: &[HostTask<'_>]) -> i32 {
    let _waits = WaitsOfFibers::begin();
    let _here = RunsHere::new(exec);
    for task in tasks {
        let arg: *const HostTask<'_> = task;
        // SAFETY: the executor is live, and the task outlives the runs below.
        let code = unsafe { ffi::ty_exec_spawn_host(exec.raw(), Some(run_host), arg.cast_mut().cast()) };
        if code != ffi::TY_EXEC_OK as i32 {
            exec.set_ended(code);
            return code;
        }
    }
    // SAFETY: the executor is live and no other thread runs it.
    let code = unsafe { ffi::ty_exec_run(exec.raw()) };
    exec.set_ended(code);
    if code != ffi::TY_EXEC_OK as i32 {
        // No host fiber may be left where it waits. Its closure may have lent what lies on its stack, or what it
        // borrowed of the caller, to threads of a scope, and only the scope's end ensures that they are done with it.
        // The caller's borrows end with this call, and the stack goes to another fiber. Device fibers are left: they
        // borrow nothing. SAFETY: the run has ended on this thread; the fibers return to it, as nothing unwinds out of
        // `run_host`.
        unsafe { ffi::ty_exec_end_hosts(exec.raw()) };
    }
    code
}
