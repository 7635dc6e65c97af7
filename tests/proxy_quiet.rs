//! After start a proxy thread neither allocates, nor waits for a lock, nor calls the system: ten thousand epochs of two
//! ranks that talk, under an allocator that counts and a seccomp filter that stops a thread at its first call.
//!
//! The network is one of memory alone, or the library's endpoint over the double of EFA.
//!
//! A lock that nobody else holds makes no call and is not seen here; that the code of a poll names no lock is tested by
//! its text. The filter stays on a thread until its process ends, so each run has its own process.

#[cfg(feature = "c")]
#[path = "proxy_quiet/c_calls.rs"]
mod c_calls;
#[path = "proxy_quiet/device.rs"]
mod device;
#[path = "rig/double.rs"]
mod double;
#[path = "proxy_quiet/efa.rs"]
mod efa;
#[path = "proxy_quiet/guard.rs"]
mod guard;
#[path = "proxy_quiet/loopback.rs"]
mod loopback;
#[path = "transport/stub.rs"]
mod stub;

use device::{Device, Offence, Shared};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};
use stub::Stub;
use tokenyard::Rank;
use tokenyard::internals::proxy::driver::{ContextMemory, Driver, ProxyThread, ThreadConfig, system_clock};
use tokenyard::internals::proxy::machine::{ContextConfig, Liveness, Machine, MachineConfig};
use tokenyard::internals::proxy::wire::{ContextIdx, MessageShape, Nodes, Wire, WireInput};
use tokenyard::internals::transport::network::libfabric::libfabric_sys::VARIABLE;
use tokenyard::internals::transport::network::{RegionId, Transport};

#[global_allocator]
static COUNTING: guard::Counting = guard::Counting;

const EPOCHS: u64 = 10_000;
const NICS: u8 = 3;
const MODE: &str = "TOKENYARD_QUIET_MODE";
/// For a machine on which the two threads share a core by time slices.
const PATIENCE: Duration = Duration::from_secs(300);
/// Heartbeats come often, and a peer that waits for its time slice is not lost.
const LIVENESS: Liveness =
    Liveness { heartbeat_ns: 100_000, silence_ns: 600_000_000_000, first_contact_ns: 600_000_000_000 };

fn wire() -> Wire {
    let shape = |chunks| MessageShape { first_bytes: 1088, chunk_bytes: 1024, chunks, rows_offset: 64 };
    let nodes = Nodes::consecutive(&[1, 1]).unwrap();
    let shapes = [shape(4), shape(3), shape(1), shape(0)];
    Wire::new(WireInput { nodes, nics: NICS, shapes, staging_offset: 0, recv_buffer_offset: 1 << 20 }).unwrap()
}

/// Both ranks' proxies, with two contexts each. `device_of` is that of an endpoint's rank.
fn drivers<T: Transport + 'static>(endpoints: [T; 2], device_of: fn(&mut T) -> &mut Device) -> [Driver<T>; 2] {
    let wire = wire();
    let mut rank = 0;
    endpoints.map(|mut endpoint| {
        let contexts = [0, 1].map(|context| (ContextIdx(context), ContextMemory::owned(wire.word_counts())));
        contexts.iter().for_each(|(_, memory)| device_of(&mut endpoint).bind(&wire, memory));
        let machine = Machine::new(&MachineConfig { rank: Rank(rank), world: 2, liveness: LIVENESS }).unwrap();
        let mut driver = Driver::new(machine, endpoint, system_clock());
        rank += 1;
        for (context, memory) in contexts {
            let arenas = [RegionId(0); 2];
            let config = ContextConfig { generation: 0, first_epoch: 1, wire: &wire, arenas: &arenas };
            driver.open(context, &config, memory).unwrap();
        }
        driver
    })
}

/// Runs in its own process, which it ends: prints what two proxies did wrong, if anything.
fn child(mode: &str) -> ! {
    // A guarded thread cannot be joined, so nothing may unwind.
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        std::process::exit(101);
    }));
    guard::prepare();
    let offence = Offence::ALL.into_iter().find(|offence| mode.ends_with(&format!("{offence:?}"))).unwrap();
    let shared = Arc::new(Shared::default());
    let _held = shared.held.lock().unwrap();
    if guard::clock_is_a_call() {
        println!("the clock is a system call on this machine, and allowed");
    }
    let guarded = if mode.starts_with("threads") { 2 } else { 1 };
    shared.guarded.store(guarded, Ordering::Relaxed);
    // Time slices of two threads make an epoch over the double long.
    let epochs = if mode.starts_with("threads efa") { EPOCHS / 10 } else { EPOCHS };
    if mode.contains("efa") {
        let endpoints = efa::pair(&shared, NICS, epochs, offence);
        start(drivers(endpoints, |endpoint| &mut endpoint.device), guarded);
    } else {
        let endpoints = loopback::pair(&shared, NICS, epochs, offence).map(Stub);
        start(drivers(endpoints, |endpoint| &mut endpoint.0.device), guarded);
    }
    let (start, mut begun) = (Instant::now(), Instant::now());
    let verdict = loop {
        std::thread::sleep(Duration::from_millis(1));
        if guard::GUARDED.load(Ordering::Acquire) == guarded && !shared.go.swap(true, Ordering::AcqRel) {
            begun = Instant::now();
        }
        if let Some(call) = guard::call() {
            break call;
        }
        if shared.done.load(Ordering::Acquire) == 2 {
            break match guard::ALLOCATIONS.load(Ordering::Relaxed) {
                0 => "quiet".to_owned(),
                count => format!("{count} allocations"),
            };
        }
        if start.elapsed() > PATIENCE {
            break format!("not through {epochs} epochs in time");
        }
    };
    if guard::REFUSED.load(Ordering::Relaxed) != 0 {
        println!("no filter: errno {}", guard::REFUSED.load(Ordering::Relaxed));
    }
    println!();
    let count = |what: &str, number: &std::sync::atomic::AtomicU64| {
        println!("count {} {what}", number.load(Ordering::Relaxed));
    };
    count("writes posted", &shared.posts);
    count("full queues met", &shared.full);
    count("immediates handed out", &shared.immediates);
    count("heartbeats handed out", &shared.messages);
    println!("verdict after {:.2} s: {verdict}", begun.elapsed().as_secs_f64());
    std::process::exit(0)
}

/// Starts the guarded threads, which never end.
fn start<T: Transport + Send + 'static>(drivers: [Driver<T>; 2], guarded: u32) {
    if guarded == 2 { own_threads(drivers) } else { one(drivers) }
}

/// Two real proxy threads, asked to be guarded.
fn own_threads<T: Transport + 'static>(drivers: [Driver<T>; 2]) {
    let spawn = |driver| ProxyThread::spawn(driver, ThreadConfig { core: None, spinners: 0 }).unwrap();
    let threads: Vec<_> = drivers.into_iter().map(spawn).collect();
    threads.iter().for_each(|thread| thread.remote().ask(|_| guard::ask()).unwrap());
    std::mem::forget(threads);
}

/// One thread that polls both, one after the other, and never yields.
fn one<T: Transport + Send + 'static>(drivers: [Driver<T>; 2]) {
    let [mut a, mut b] = drivers;
    std::thread::spawn(move || {
        guard::ask();
        loop {
            a.poll_once();
            b.poll_once();
        }
    });
}

/// Not a test of its own: the other tests start it.
#[test]
fn run_of_two_proxies() {
    if let Ok(mode) = std::env::var(MODE) {
        child(&mode);
    }
}

/// The output of a run; `None` if the machine does not allow it.
fn run(mode: &str) -> Option<String> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    if mode.contains("efa") {
        command.env(VARIABLE, double::efa()?).envs(efa::SETTINGS);
    }
    let output = command
        .args(["run_of_two_proxies", "--exact", "--nocapture", "--test-threads=1"])
        .env(MODE, mode)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<&str> =
        printed.lines().filter(|line| ["count", "verdict", "the clock"].iter().any(|w| line.starts_with(w))).collect();
    println!("{mode}: {}", lines.join("; "));
    if let Some(reason) = printed.lines().find(|line| line.starts_with("no filter")) {
        println!("skipped: seccomp filters are not to be had here ({reason})");
        return None;
    }
    let printed_all = format!("{printed}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && printed.contains("verdict"), "{mode}: {} {printed_all}", output.status);
    Some(printed)
}

fn assert_quiet(mode: &str) {
    let Some(printed) = run(mode) else { return };
    assert!(printed.contains(": quiet"), "{mode}: {printed}");
    for line in printed.lines().filter(|line| line.starts_with("count")) {
        assert!(!line.starts_with("count 0 "), "{mode} does not show it: {line}");
    }
}

#[test]
fn ten_thousand_epochs_of_two_proxies_on_one_thread_are_quiet() {
    assert_quiet("one None");
}

#[test]
fn ten_thousand_epochs_over_the_double_of_efa_are_quiet() {
    assert_quiet("one efa None");
}

/// Two threads, on a machine on which neither has to yield.
fn assert_threads_quiet(mode: &str) {
    let cores = available_parallelism().map_or(1, |cores| cores.get());
    if cores < 2 {
        println!(
            "skipped: two proxy threads on {cores} core give it up to each other when idle, which is a system call"
        );
        return;
    }
    assert_quiet(mode);
}

#[test]
fn ten_thousand_epochs_of_two_proxy_threads_are_quiet() {
    assert_threads_quiet("threads None");
}

#[test]
fn a_thousand_epochs_of_two_proxy_threads_over_the_double_of_efa_are_quiet() {
    assert_threads_quiet("threads efa None");
}

#[test]
fn what_a_proxy_must_not_do_is_noticed() {
    for network in ["", "efa "] {
        for (offence, verdict) in [
            (Offence::Allocation, "2 allocations"),
            (Offence::Lock, "(futex)"),
            (Offence::Yield, "(sched_yield)"),
            (Offence::Sleep, "nanosleep)"),
            (Offence::Print, "(write)"),
        ] {
            let Some(printed) = run(&format!("one {network}{offence:?}")) else { break };
            assert!(printed.contains(verdict), "{network}{offence:?} is not noticed: {printed}");
        }
    }
}

#[test]
fn nothing_that_a_poll_runs_names_a_lock() {
    let polled = [
        "machine/mod.rs",
        "machine/links.rs",
        "machine/peers.rs",
        "machine/token.rs",
        "machine/watches.rs",
        "machine/control.rs",
        "counter.rs",
        "driver/mod.rs",
        "driver/scan.rs",
        "driver/words.rs",
    ];
    for file in polled {
        let path = format!("{}/proxy/{file}", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text
            .lines()
            .map(|line| line.split("//").next().unwrap_or(""))
            .take_while(|line| !line.contains("cfg(test)"));
        for line in code {
            let locks = ["Mutex", "RwLock", "Condvar", ".lock()", "println!", "eprintln!", "yield_now", "sleep("];
            assert!(!locks.iter().any(|lock| line.contains(lock)), "{file}: {line}");
        }
    }
}
