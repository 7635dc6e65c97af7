//! Devices, streams, buffers, graphs and events: the same tests on the CPU device and, where there is one, on a GPU.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokenyard::internals::base::wait;
use tokenyard::internals::kernels::{KernelArgs, SeededConfig, View, seeded_world};
use tokenyard::{Device, DeviceKind, Error, Stream};

/// Long enough for a loaded machine; a test that waits it out has found a hang.
const PATIENCE: Duration = Duration::from_secs(30);

/// The arguments of `ty_bench_push`: a kernel that copies 16 bytes per thread and step.
#[repr(C)]
#[derive(Clone, Copy)]
struct Push {
    source: u64,
    destination: [u64; 64],
    bytes: [u64; 64],
    destinations: u32,
    reserved: u32,
}

// SAFETY: field by field ty_push_args of kernels/ffi/layout.h; devices compare the sizes as well.
unsafe impl KernelArgs for Push {}

fn push_args(source: View, destination: View) -> Push {
    let mut args = Push { source: source.ptr(), destination: [0; 64], bytes: [0; 64], destinations: 1, reserved: 0 };
    args.destination[0] = destination.ptr();
    args.bytes[0] = destination.len() as u64;
    args
}

fn push(stream: &Stream, source: View, destination: View) {
    // SAFETY: buffers of this device, whose freeing waits for its work.
    unsafe { stream.launch("ty_bench_push", 2, 64, 0, &push_args(source, destination)).unwrap() };
}

/// A GPU, or why there is none.
fn gpu() -> Option<Device> {
    if Device::cuda_count() == 0 {
        println!("skipped: no GPU");
        return None;
    }
    if !Device::cuda_built() {
        println!("skipped: built without nvcc");
        return None;
    }
    Some(Device::cuda(0).unwrap())
}

/// The test for each kind of device.
macro_rules! on_both {
    ($($name:ident),* $(,)?) => {
        mod cpu {
            $(#[test] fn $name() { super::$name(super::Device::cpu().unwrap()); })*
        }
        mod cuda {
            $(#[test] fn $name() { if let Some(device) = super::gpu() { super::$name(device); } })*
        }
    };
}

on_both!(
    buffers_hold_what_is_written_and_refuse_the_rest,
    work_of_a_stream_runs_in_order,
    kernels_reach_host_buffers,
    graph_runs_nothing_at_capture_and_all_of_it_at_each_launch,
    events_take_time_in_order_and_in_graphs,
    launches_that_cannot_run_are_refused_and_harm_nothing,
    misuse_of_captures_is_an_error,
    a_deadline_ends_the_wait_and_not_the_work,
    memory_and_streams_may_be_dropped_while_work_is_pending,
    streams_are_used_from_many_threads,
);

fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ salt).collect()
}

fn contents(buffer: &tokenyard::DeviceBuffer) -> Vec<u8> {
    let mut data = vec![0; buffer.len()];
    buffer.read(0, &mut data).unwrap();
    data
}

fn buffers_hold_what_is_written_and_refuse_the_rest(device: Device) {
    // More than one chunk of the GPU's staging buffer, and no multiple of anything.
    let buffer = device.alloc((9 << 20) + 13).unwrap();
    assert_eq!(buffer.view().ptr() % 256, 0);
    if device.kind() == DeviceKind::Cpu {
        assert!(contents(&buffer).iter().all(|byte| *byte == 0xA5), "fresh memory must not look zeroed");
    }
    let data = pattern(buffer.len(), 0);
    buffer.write(0, &data).unwrap();
    assert_eq!(contents(&buffer), data);
    buffer.write(5, &[1, 2, 3]).unwrap();
    let mut part = [0; 5];
    buffer.read(4, &mut part).unwrap();
    assert_eq!(part, [4, 1, 2, 3, 8]);
    buffer.fill(7).unwrap();
    assert!(contents(&buffer).iter().all(|byte| *byte == 7));
    assert_eq!(buffer.slice(256, 10).unwrap().ptr(), buffer.view().ptr() + 256);
    for (offset, bytes) in [(buffer.len(), 1), (0, buffer.len() + 1), (usize::MAX, 2)] {
        assert!(matches!(buffer.slice(offset, bytes), Err(Error::Argument { .. })));
    }
    assert!(buffer.write(buffer.len() - 1, &[0, 0]).is_err());
    assert!(device.alloc(usize::MAX / 2).is_err());
    let empty = device.alloc(0).unwrap();
    assert!(empty.is_empty());
    empty.write(0, &[]).unwrap();
    empty.fill(1).unwrap();
}

fn work_of_a_stream_runs_in_order(device: Device) {
    let stream = device.new_stream().unwrap();
    let (a, b, c) = (device.alloc(4096).unwrap(), device.alloc(4096).unwrap(), device.alloc(4096).unwrap());
    for salt in 0..20 {
        a.write(0, &pattern(4096, salt)).unwrap();
        stream.fill(&b.view(), 0xFF).unwrap();
        push(&stream, a.view(), b.slice(0, 4080).unwrap());
        stream.copy(&c.view(), &b.view()).unwrap();
        stream.fill(&c.slice(1, 2).unwrap(), 9).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        let mut expected = pattern(4096, salt);
        expected[4080..].fill(0xFF);
        expected[1..3].fill(9);
        assert_eq!(contents(&c), expected);
    }
    let unequal = stream.copy(&c.view(), &b.slice(0, 4).unwrap());
    assert!(matches!(unequal, Err(Error::Argument { name: "dst", .. })));
    device.check().unwrap();
}

fn kernels_reach_host_buffers(device: Device) {
    let stream = device.new_stream().unwrap();
    let (source, back) = (device.alloc_host(1024).unwrap(), device.alloc_host(1024).unwrap());
    // SAFETY: 1024 bytes that no kernel uses now.
    let host = unsafe { std::slice::from_raw_parts_mut(source.host_ptr(), 1024) };
    assert!(host.iter().all(|byte| *byte == 0), "host memory starts zeroed");
    host.copy_from_slice(&pattern(1024, 3));
    push(&stream, source.view(), back.view());
    stream.synchronize(PATIENCE).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { std::slice::from_raw_parts(back.host_ptr(), 1024) }, pattern(1024, 3));
}

fn graph_runs_nothing_at_capture_and_all_of_it_at_each_launch(device: Device) {
    let stream = device.new_stream().unwrap();
    let (a, b, c) = (device.alloc(1024).unwrap(), device.alloc(1024).unwrap(), device.alloc(1024).unwrap());
    b.fill(0).unwrap();
    c.fill(0).unwrap();
    a.write(0, &pattern(1024, 1)).unwrap();
    stream.begin_capture().unwrap();
    assert!(stream.is_capturing().unwrap());
    {
        // The arguments' memory is gone when the graph runs.
        let args = Box::new(push_args(a.view(), b.view()));
        // SAFETY: both buffers outlive the graph's replays.
        unsafe { stream.launch("ty_bench_push", 2, 64, 0, &*args).unwrap() };
    }
    stream.copy(&c.slice(16, 512).unwrap(), &b.slice(0, 512).unwrap()).unwrap();
    stream.fill(&c.slice(0, 16).unwrap(), 5).unwrap();
    let graph = stream.end_capture().unwrap();
    assert!(!stream.is_capturing().unwrap());
    stream.synchronize(PATIENCE).unwrap();
    assert!(contents(&b).iter().chain(&contents(&c)).all(|byte| *byte == 0), "capturing must not run anything");
    for salt in 0..5 {
        a.write(0, &pattern(1024, salt)).unwrap();
        c.fill(0).unwrap();
        graph.launch(&stream).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(contents(&b), pattern(1024, salt));
        let mut expected = vec![0; 1024];
        expected[..16].fill(5);
        expected[16..528].copy_from_slice(&pattern(1024, salt)[..512]);
        assert_eq!(contents(&c), expected);
    }
    let other = device.new_stream().unwrap();
    graph.launch(&other).unwrap();
    graph.launch(&other).unwrap();
    drop(graph);
    other.synchronize(PATIENCE).unwrap();
}

fn events_take_time_in_order_and_in_graphs(device: Device) {
    let stream = device.new_stream().unwrap();
    let (a, b) = (device.alloc(1 << 20).unwrap(), device.alloc(1 << 20).unwrap());
    let start = stream.record().unwrap();
    push(&stream, a.view(), b.view());
    let end = stream.record().unwrap();
    stream.synchronize(PATIENCE).unwrap();
    let took = end.elapsed_us(&start).unwrap();
    assert!(took > 0.0 && took < 30e6, "{took} us");
    assert!(start.elapsed_us(&end).unwrap() <= 0.0);

    stream.begin_capture().unwrap();
    let start = stream.record().unwrap();
    push(&stream, a.view(), b.view());
    let end = stream.record().unwrap();
    let graph = stream.end_capture().unwrap();
    assert!(end.elapsed_us(&start).is_err(), "an event that was never passed has no time");
    for _ in 0..3 {
        graph.launch(&stream).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        let took = end.elapsed_us(&start).unwrap();
        assert!(took > 0.0 && took < 30e6, "{took} us");
    }
}

fn launches_that_cannot_run_are_refused_and_harm_nothing(device: Device) {
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Wrong(u64);
    // SAFETY: deliberately not what the kernel takes, to see it refused by its size.
    unsafe impl KernelArgs for Wrong {}

    let stream = device.new_stream().unwrap();
    let buffer = device.alloc(64).unwrap();
    let args = push_args(buffer.view(), buffer.view());
    for (grid, block, shared) in [(0, 64, 0), (1, 0, 0), (1, 33, 0), (1, 1024, 0), (1, 64, 228 * 1024)] {
        // SAFETY: nothing runs.
        let refused = unsafe { stream.launch("ty_bench_push", grid, block, shared, &args) };
        assert!(matches!(refused, Err(Error::Argument { .. })), "{grid} x {block}, {shared}: {refused:?}");
    }
    // SAFETY: as above.
    let unknown = unsafe { stream.launch("ty_no_such_kernel", 1, 64, 0, &args) }.unwrap_err().to_string();
    assert!(unknown.contains("ty_no_such_kernel"), "{unknown}");
    // SAFETY: as above.
    let wrong = unsafe { stream.launch("ty_bench_push", 1, 64, 0, &Wrong(1)) }.unwrap_err().to_string();
    assert!(wrong.contains("ty_bench_push") && wrong.contains("struct"), "{wrong}");
    if device.kind() == DeviceKind::Cuda {
        // SAFETY: as above.
        let too_many = unsafe { stream.launch("ty_bench_push", 1 << 20, 512, 0, &args) }.unwrap_err().to_string();
        assert!(too_many.contains("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE (720)"), "{too_many}");
    }
    // SAFETY: the buffer outlives the work that is waited for below.
    unsafe { stream.launch("ty_bench_push", 1, 64, 227 * 1024, &args).unwrap() };
    stream.synchronize(PATIENCE).unwrap();
    device.check().unwrap();
}

fn misuse_of_captures_is_an_error(device: Device) {
    let stream = device.new_stream().unwrap();
    assert!(stream.end_capture().is_err());
    stream.begin_capture().unwrap();
    assert!(stream.begin_capture().is_err());
    assert!(stream.synchronize(PATIENCE).is_err());
    let empty = stream.end_capture().unwrap();
    empty.launch(&stream).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    let other = device.new_stream().unwrap();
    other.begin_capture().unwrap();
    assert!(matches!(empty.launch(&other), Err(Error::Argument { .. })));
    drop(other); // with its capture open
    device.check().unwrap();
}

/// Enough copying that it cannot be done at the host's first poll.
fn long_work(device: &Device, stream: &Stream) -> Vec<tokenyard::DeviceBuffer> {
    let (bytes, times) = match device.kind() {
        DeviceKind::Cpu => (8 << 20, 4),
        DeviceKind::Cuda => (64 << 20, 200),
    };
    let buffers = vec![device.alloc(bytes).unwrap(), device.alloc(bytes).unwrap()];
    for _ in 0..times {
        push(stream, buffers[0].view(), buffers[1].view());
    }
    buffers
}

fn a_deadline_ends_the_wait_and_not_the_work(device: Device) {
    let stream = device.new_stream().unwrap();
    let _buffers = long_work(&device, &stream);
    let late = stream.synchronize(Duration::ZERO).unwrap_err().to_string();
    assert!(late.contains("stream did not finish within 0 ms"), "{late}");
    stream.synchronize(PATIENCE).unwrap();
}

fn memory_and_streams_may_be_dropped_while_work_is_pending(device: Device) {
    for _ in 0..3 {
        let stream = device.new_stream().unwrap();
        let buffers = long_work(&device, &stream);
        drop(stream);
        drop(buffers);
    }
    let stream = device.new_stream().unwrap();
    let buffer = device.alloc(64).unwrap();
    drop(device);
    stream.fill(&buffer.view(), 1).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(contents(&buffer), [1; 64]);
}

fn streams_are_used_from_many_threads(device: Device) {
    let shared = device.new_stream().unwrap();
    std::thread::scope(|scope| {
        for salt in 0..4 {
            let (device, shared) = (device.clone(), shared.clone());
            scope.spawn(move || {
                let own = device.new_stream().unwrap();
                let (a, b) = (device.alloc(2048).unwrap(), device.alloc(2048).unwrap());
                for round in 0..20 {
                    let data = pattern(2048, salt * 31 + round);
                    a.write(0, &data).unwrap();
                    let stream = if round % 2 == 0 { &own } else { &shared };
                    push(stream, a.view(), b.view());
                    stream.synchronize(PATIENCE).unwrap();
                    assert_eq!(contents(&b), data);
                }
            });
        }
    });
}

// ---- GPUs alone

#[test]
fn a_gpu_that_is_not_there_is_an_error_in_a_sentence() {
    let count = Device::cuda_count();
    let why = Device::cuda(count).unwrap_err().to_string();
    println!("{why}");
    assert!(why.starts_with("device: "), "{why}");
    if count > 0 {
        assert!(why.contains(&format!("{count} can be seen")), "{why}");
    }
}

#[test]
fn an_engines_stream_can_be_borrowed() {
    let Some(device) = gpu() else { return };
    let owner = device.new_stream().unwrap();
    // SAFETY: a live stream of the primary context, which outlives the borrower.
    let borrowed = unsafe { device.stream_from_raw(owner.raw()).unwrap() };
    let buffer = device.alloc(4096).unwrap();
    owner.begin_capture().unwrap();
    assert!(borrowed.is_capturing().unwrap(), "a borrower sees the engine's capture");
    let stamp = borrowed.record().unwrap();
    borrowed.fill(&buffer.view(), 3).unwrap();
    let graph = owner.end_capture().unwrap();
    graph.launch(&borrowed).unwrap();
    drop(borrowed);
    owner.synchronize(PATIENCE).unwrap();
    assert!(contents(&buffer).iter().all(|byte| *byte == 3));
    assert_eq!(stamp.elapsed_us(&stamp).unwrap(), 0.0);
    // SAFETY: the legacy default stream always lives.
    let legacy = unsafe { device.stream_from_raw(0).unwrap() };
    push(&legacy, buffer.view(), buffer.view());
    legacy.synchronize(PATIENCE).unwrap();
}

#[test]
fn opening_a_gpu_twice_shares_it_and_all_kernels_are_loaded() {
    let Some(device) = gpu() else { return };
    let again = Device::cuda(0).unwrap();
    assert_eq!((device.name(), device.ordinal()), (again.name(), Some(0)));
    assert!(device.multiprocessors() > 0);
    let buffer = device.alloc(16).unwrap();
    drop(device);
    again.make_current().unwrap();
    let stream = again.new_stream().unwrap();
    stream.fill(&buffer.view(), 1).unwrap();
    stream.synchronize(PATIENCE).unwrap();
}

// ---- the CPU device alone

#[test]
fn cpu_devices_end_their_threads() {
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    for _ in 0..50 {
        let device = Device::cpu().unwrap();
        let stream = device.new_stream().unwrap();
        let _pending = long_enough_to_drop(&device, &stream);
    }
    // Other tests start threads too, but not fifty.
    assert!(threads() < before + 40, "{} threads, {before} before", threads());
}

fn long_enough_to_drop(device: &Device, stream: &Stream) -> tokenyard::DeviceBuffer {
    let buffer = device.alloc(1 << 16).unwrap();
    push(stream, buffer.view(), buffer.view());
    buffer
}

#[test]
fn cpu_device_has_no_cuda_streams() {
    let device = Device::cpu().unwrap();
    // SAFETY: refused before anything is done with the number.
    assert!(matches!(unsafe { device.stream_from_raw(1) }, Err(Error::Argument { name: "cu_stream", .. })));
    assert_eq!((device.kind(), device.ordinal(), device.multiprocessors()), (DeviceKind::Cpu, None, 4));
}

// ---- seeded worlds

/// Three ranks that copy round a ring through kernels, and wait for each other on host fibers.
fn ring(seed: u64) -> (u64, u64) {
    let arrived = Mutex::new([0usize; 3]);
    let report = seeded_world(SeededConfig { seed, hold_stores: false, stopped: None }, 3, |rank, device| {
        let stream = device.new_stream().unwrap();
        let (a, b) = (device.alloc(512).unwrap(), device.alloc(512).unwrap());
        for round in 1..=4 {
            a.write(0, &pattern(512, (rank * 16 + round) as u8)).unwrap();
            push(&stream, a.view(), b.view());
            stream.synchronize(PATIENCE).unwrap();
            assert_eq!(contents(&b), pattern(512, (rank * 16 + round) as u8));
            arrived.lock().unwrap()[rank] = round;
            let all = || arrived.lock().unwrap().iter().all(|seen| *seen >= round).then_some(());
            wait::poll("ring", PATIENCE, all).unwrap();
        }
    });
    assert_eq!((&report.failure, &report.hang_report), (&None, &None));
    assert_eq!(*arrived.lock().unwrap(), [4; 3]);
    (report.trace_hash, report.switches)
}

#[test]
fn a_seed_gives_the_same_schedule_again_and_another_seed_another() {
    let first = ring(7);
    assert!(first.1 > 0);
    assert_eq!(ring(7), first);
    assert!((8..12).any(|seed| ring(seed).0 != first.0));
}

#[test]
fn seeded_worlds_run_side_by_side_on_threads() {
    let alone = ring(3);
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..2).map(|_| scope.spawn(|| ring(3))).collect();
        for run in runs {
            assert_eq!(run.join().unwrap(), alone);
        }
    });
}

#[test]
fn graphs_events_and_fills_work_on_host_fibers() {
    let report = seeded_world(SeededConfig { seed: 1, hold_stores: true, stopped: None }, 2, |rank, device| {
        let stream = device.new_stream().unwrap();
        let (a, b) = (device.alloc(256).unwrap(), device.alloc(256).unwrap());
        stream.begin_capture().unwrap();
        let start = stream.record().unwrap();
        push(&stream, a.view(), b.view());
        let end = stream.record().unwrap();
        let graph = stream.end_capture().unwrap();
        for round in 0..3 {
            stream.fill(&a.view(), (rank * 3 + round) as u8).unwrap();
            graph.launch(&stream).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            assert_eq!(contents(&b), vec![(rank * 3 + round) as u8; 256]);
        }
        assert!(end.elapsed_us(&start).unwrap() >= 0.0);
    });
    assert_eq!(report.failure, None);
}

#[test]
fn a_ranks_panic_is_raised_after_the_others_have_ended() {
    let ended = Mutex::new(Vec::new());
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        seeded_world(SeededConfig { seed: 5, hold_stores: false, stopped: None }, 3, |rank, device| {
            let stream = device.new_stream().unwrap();
            let buffer = device.alloc(64).unwrap();
            push(&stream, buffer.view(), buffer.view());
            assert_ne!(rank, 1, "rank 1 gives up");
            stream.synchronize(PATIENCE).unwrap();
            ended.lock().unwrap().push(rank);
        })
    }));
    let payload = outcome.unwrap_err();
    let text = payload.downcast_ref::<String>().expect("the panic's own message");
    assert!(text.contains("rank 1 gives up"), "{text}");
    let mut ended = ended.lock().unwrap().clone();
    ended.sort_unstable();
    assert_eq!(ended, [0, 2]);
    // This thread waits in the ordinary way again.
    assert_eq!(wait::poll("nothing", Duration::from_millis(5), || None::<()>), None);
    ring(1);
}

#[test]
fn a_world_in_which_nobody_can_go_on_is_reported_and_not_waited_for() {
    let started = Instant::now();
    let report = seeded_world(SeededConfig { seed: 5, hold_stores: false, stopped: None }, 2, |_, device| {
        let _stream = device.new_stream().unwrap();
        wait::poll("a peer that never comes", Duration::from_secs(3600), || None::<()>);
    });
    assert!(started.elapsed() < PATIENCE);
    assert!(report.hang_report.as_ref().is_some_and(|text| text.contains("a peer that never comes")), "{report:?}");
    let failure = report.failure.unwrap().to_string();
    assert!(failure.contains("a peer that never comes"), "{failure}");
}

/// So a schedule does not depend on how fast it runs.
#[test]
fn deadlines_of_a_seeded_world_pass_by_its_own_clock() {
    let (begun, arrived) = (AtomicBool::new(false), AtomicBool::new(false));
    let started = Instant::now();
    let report = seeded_world(SeededConfig { seed: 8, hold_stores: false, stopped: None }, 2, |rank, _| {
        if rank == 1 {
            wait::poll("the other rank", PATIENCE, || begun.load(Ordering::Relaxed).then_some(())).unwrap();
            std::thread::sleep(Duration::from_millis(200));
            // The other looks meanwhile, in fewer rounds than the clock waits for before it jumps.
            (1..8).for_each(|polls| wait::relax("late", polls));
            arrived.store(true, Ordering::Relaxed);
            return;
        }
        let look = || {
            begun.store(true, Ordering::Relaxed);
            arrived.load(Ordering::Relaxed).then_some(())
        };
        assert_eq!(wait::poll("a rank that sleeps", Duration::from_millis(100), look), Some(()));
        assert_eq!(wait::poll("nothing", Duration::from_secs(10), || None::<()>), None);
    });
    assert_eq!(report.failure, None);
    assert!(started.elapsed() < PATIENCE);
}

/// What it waits for, such as a thread, does not go by the world's clock.
#[test]
fn waits_of_destructors_in_a_world_that_hangs_pass_by_the_systems_clock() {
    struct Waits<'a>(&'a Mutex<Option<Duration>>);
    impl Drop for Waits<'_> {
        fn drop(&mut self) {
            let began = Instant::now();
            let waited = wait::poll("an answer", Duration::from_millis(300), || None::<()>);
            *self.0.lock().unwrap() = waited.is_none().then(|| began.elapsed());
        }
    }
    let took = Mutex::new(None);
    let report = seeded_world(SeededConfig { seed: 9, hold_stores: false, stopped: None }, 1, |_, _| {
        let _waits = Waits(&took);
        wait::poll("a peer that never comes", Duration::from_secs(3600), || None::<()>);
    });
    assert!(report.failure.is_some(), "{report:?}");
    let took = took.lock().unwrap().expect("the wait did not end");
    assert!(took >= Duration::from_millis(290) && took < PATIENCE, "{took:?}");
}

/// A scope's threads may use what its fiber's stack and the caller own, and end before either goes.
#[test]
fn host_closures_of_a_world_that_hangs_are_unwound_and_their_scopes_end() {
    let ended = AtomicUsize::new(0);
    struct Counts<'a>(&'a AtomicUsize);
    impl Drop for Counts<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(100, Ordering::Relaxed);
        }
    }
    let report = seeded_world(SeededConfig { seed: 6, hold_stores: false, stopped: None }, 3, |rank, device| {
        let stream = device.new_stream().unwrap();
        let _counts = Counts(&ended);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                ended.fetch_add(1, Ordering::Relaxed);
            });
            match rank {
                0 => drop(wait::poll("a peer that never comes", Duration::from_secs(3600), || None::<()>)),
                _ => loop {
                    stream.synchronize(PATIENCE).unwrap();
                    wait::relax("another that never comes", 1);
                },
            }
        });
    });
    assert_eq!(ended.load(Ordering::Relaxed), 303);
    assert!(report.failure.is_some(), "{report:?}");
    ring(2);
}

#[test]
fn a_device_that_outlives_its_seeded_world_reports_it() {
    let escaped = Mutex::new(None);
    let report = seeded_world(SeededConfig::default(), 1, |_, device| {
        let stream = device.new_stream().unwrap();
        let buffer = device.alloc(64).unwrap();
        *escaped.lock().unwrap() = Some((device, stream, buffer));
    });
    assert_eq!(report.failure, None);
    let (device, stream, buffer) = escaped.into_inner().unwrap().unwrap();
    assert!(device.check().is_err());
    assert!(device.new_stream().is_err());
    let why = stream.fill(&buffer.view(), 0).unwrap_err().to_string();
    assert!(why.contains("has stopped"), "{why}");
    // SAFETY: nothing runs.
    assert!(unsafe { stream.launch("ty_bench_push", 1, 32, 0, &push_args(buffer.view(), buffer.view())) }.is_err());
}

#[test]
fn seeded_worlds_do_not_nest() {
    let report = seeded_world(SeededConfig::default(), 1, |_, _| {
        let inner = seeded_world(SeededConfig::default(), 1, |_, _| unreachable!("it must be refused"));
        assert!(inner.failure.is_some());
    });
    assert_eq!(report.failure, None);
}
