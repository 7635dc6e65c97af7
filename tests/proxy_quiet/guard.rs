//! Watches a thread: counts what it allocates, and stops it at its first system call.
//!
//! The filter can never be taken off a thread again, so a guarded thread must not end; its process does.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, AtomicU64, Ordering};

/// Allocations and releases of guarded threads.
pub static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// Threads that asked to be guarded.
static ASKS: AtomicU32 = AtomicU32::new(0);
/// Threads that are guarded.
pub static GUARDED: AtomicU32 = AtomicU32::new(0);
/// The first system call of a guarded thread; -1 while there was none.
static CALL: AtomicI64 = AtomicI64::new(NONE);
/// Why a filter could not be installed; 0 if none failed.
pub static REFUSED: AtomicI32 = AtomicI32::new(0);

const NONE: i64 = -1;

thread_local! {
    static ASKED: Cell<bool> = const { Cell::new(false) };
    static ON: Cell<bool> = const { Cell::new(false) };
    /// Allocations and releases of this thread, guarded or not.
    static OWN: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, and a count of what guarded threads ask of it.
pub struct Counting;

fn note() {
    OWN.with(|own| own.set(own.get() + 1));
    if ON.with(Cell::get) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        note();
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Allocations and releases of the calling thread while it works.
#[cfg(feature = "c")]
pub fn allocations_during(work: impl FnOnce()) -> u64 {
    let before = OWN.with(Cell::get);
    work();
    OWN.with(Cell::get) - before
}

/// Has the calling thread guarded from a `begin_if_asked` on, once all have asked.
pub fn ask() {
    ASKED.with(|asked| asked.set(true));
    ASKS.fetch_add(1, Ordering::Release);
}

/// Begins to guard the calling thread, if it asked and so did all `threads`. A guarded thread that stops might hold
/// what another needs to ask.
pub fn begin_if_asked(threads: u32) {
    if !ASKED.with(Cell::get) || ASKS.load(Ordering::Acquire) < threads {
        return;
    }
    ASKED.with(|asked| asked.set(false));
    if let Err(error) = install() {
        REFUSED.store(error, Ordering::Relaxed);
    }
    ON.with(|on| on.set(true));
    GUARDED.fetch_add(1, Ordering::Release);
}

/// The first system call of a guarded thread.
pub fn call() -> Option<String> {
    let number = CALL.load(Ordering::Acquire);
    let known = [
        (libc::SYS_futex, "futex"),
        (libc::SYS_sched_yield, "sched_yield"),
        (libc::SYS_nanosleep, "nanosleep"),
        (libc::SYS_clock_nanosleep, "clock_nanosleep"),
        (libc::SYS_clock_gettime, "clock_gettime"),
        (libc::SYS_write, "write"),
        (libc::SYS_read, "read"),
        (libc::SYS_mmap, "mmap"),
        (libc::SYS_munmap, "munmap"),
        (libc::SYS_brk, "brk"),
        (libc::SYS_madvise, "madvise"),
    ];
    let name = known.iter().find(|(known, _)| *known == number).map_or("see syscall.h", |(_, name)| name);
    (number != NONE).then(|| format!("system call {number} ({name})"))
}

/// Whether the clock needs a system call on this machine.
pub fn clock_is_a_call() -> bool {
    let source = std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    let without = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"];
    source.is_ok_and(|source| !without.contains(&source.trim()))
}

/// Stops the thread where it is, for good: what it would do next without its call is anyone's guess.
extern "C" fn trapped(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: of SIGSYS, the kernel fills {signal, errno, code, padding, address of the call, number of the call, …}.
    let number = unsafe { info.byte_add(24).cast::<i32>().read() };
    let _ = CALL.compare_exchange(NONE, i64::from(number), Ordering::AcqRel, Ordering::Relaxed);
    loop {
        std::hint::spin_loop();
    }
}

/// Has SIGSYS noted; for the process, before any thread is guarded.
pub fn prepare() {
    // SAFETY: zeroed is a valid sigaction; `trapped` is async-signal-safe and has the signature that SA_SIGINFO asks
    // for.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = trapped as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut())
    };
    assert_eq!(done, 0, "no handler of SIGSYS");
}

fn jump_if(number: libc::c_long, skip: u8) -> libc::sock_filter {
    let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    libc::sock_filter { code, jt: skip, jf: 0, k: number as u32 }
}

fn answer(with: u32) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: with }
}

/// Traps every system call of this thread but the return from a signal, and the clock where it is a call.
fn install() -> Result<(), i32> {
    let clock = if clock_is_a_call() { libc::SYS_clock_gettime } else { libc::SYS_rt_sigreturn };
    let number = libc::sock_filter { code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, jt: 0, jf: 0, k: 0 };
    let mut filter = [
        number,
        jump_if(libc::SYS_rt_sigreturn, 2),
        jump_if(clock, 1),
        answer(libc::SECCOMP_RET_TRAP),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its filter are valid for the call, which copies them; both calls concern this thread.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program, 0, 0) == 0
    };
    if done { Ok(()) } else { Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(-1)) }
}
