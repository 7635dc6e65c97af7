//! Arenas mapped between ranks: threads and processes, the CPU device and, where there are any, GPUs.
//!
//! Ranks that are processes: this test program starts itself again with `CHILD` set, and the test of that name
//! plays the child.

use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokenyard::internals::base::Rank;
use tokenyard::internals::kernels::{SeededConfig, seeded_world};
use tokenyard::internals::transport::memory::{Arena, DmaBufMapping, PeerMap, dma_buf, gpu_direct};
use tokenyard::internals::transport::network::{Span, SpanMemory};
use tokenyard::{Device, Error, Stream, View, World};

const CHILD: &str = "TOKENYARD_TEST_MEMORY_CHILD";
const PATIENCE: Duration = Duration::from_secs(60);
/// No multiple of a page.
const BYTES: usize = 3 * (1 << 20) + 48;
/// Bytes that a rank stores in each arena.
const SLOT: usize = 16;

fn no_gpu() -> bool {
    if Device::cuda_count() == 0 {
        println!("skipped: no GPU");
    } else if !Device::cuda_built() {
        println!("skipped: built without nvcc");
    } else {
        return false;
    }
    true
}

/// The devices of a test's ranks.
#[derive(Clone, Copy)]
struct On {
    /// 0: the CPU device.
    gpus: usize,
    /// Arenas in host memory.
    host: bool,
}

const CPU: On = On { gpus: 0, host: true };

/// A rank's device and arena: on the CPU, or on a GPU of its own as far as there are enough.
fn place(world: &World, on: On) -> (Device, Arena) {
    if on.gpus == 0 {
        return (Device::cpu().unwrap(), Arena::cpu(BYTES).unwrap());
    }
    let ordinal = world.local_rank() % on.gpus;
    let arena = if on.host { Arena::cuda_host(ordinal, BYTES) } else { Arena::cuda(ordinal, BYTES) };
    (Device::cuda(ordinal).unwrap(), arena.unwrap())
}

/// As a network would: the processor reads the arena, in host memory.
fn look_from_the_host(world: &World, map: &PeerMap) {
    let first = world.rank().0 as u8 + 1;
    let at = (map.own().span().base as usize + BYTES - SLOT) as *const u8;
    // SAFETY: inside the own arena, in host memory; nobody writes now.
    assert_eq!(unsafe { at.read() }, first, "mark of rank 0");
}

fn at(device: &Device, map: &PeerMap, rank: u32, offset: usize, bytes: usize) -> View {
    // SAFETY: inside the arena of a rank of the same node, which is mapped as long as `map` lives: longer than the
    // work.
    unsafe { View::from_raw(device, map.base_of(Rank(rank)) + offset as u64, bytes) }
}

/// Every rank's device stores its mark at the end of every arena; every rank then finds all marks in its own.
fn exchange_marks(world: &World, device: &Device, stream: &Stream, arena: Arena, host: bool) {
    let map = PeerMap::establish(world, arena).unwrap();
    let (own, ranks) = (world.rank().0, world.size() as u32);
    assert_eq!(map.base_of(Rank(own)), map.own().base());
    assert_eq!(map.own().bytes(), BYTES);
    let seen = device.alloc(BYTES).unwrap();
    stream.copy(&seen.view(), &at(device, &map, own, 0, BYTES)).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    let mut bytes = vec![1; BYTES];
    seen.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "an arena starts zeroed");
    world.barrier("looked").unwrap();

    for peer in 0..ranks {
        let offset = BYTES - SLOT * (own as usize + 1);
        stream.fill(&at(device, &map, peer, offset, SLOT), (10 * own + peer + 1) as u8).unwrap();
    }
    stream.synchronize(PATIENCE).unwrap();
    world.barrier("stored").unwrap();
    stream.copy(&seen.view(), &at(device, &map, own, 0, BYTES)).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    seen.read(0, &mut bytes).unwrap();
    for peer in 0..ranks {
        let from = BYTES - SLOT * (peer as usize + 1);
        assert_eq!(bytes[from..from + SLOT], [(10 * peer + own + 1) as u8; SLOT], "mark of rank {peer}");
    }
    if host {
        look_from_the_host(world, &map);
    }
    world.barrier("checked").unwrap();
}

fn run_rank(world: World, on: On) {
    let (device, arena) = place(&world, on);
    let stream = device.new_stream().unwrap();
    exchange_marks(&world, &device, &stream, arena, on.host);
}

fn threads(ranks: usize, on: On) {
    std::thread::scope(|scope| {
        for world in World::threads(ranks).unwrap() {
            scope.spawn(move || run_rank(world, on));
        }
    });
}

fn processes(ranks: usize, on: On) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "memory::child", "--nocapture"])
            .env(CHILD, format!("{} {}", on.gpus, on.host))
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("TOKENYARD_PORT", port.to_string())
            .env("TOKENYARD_TOKEN", "arenas of processes")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = (0..ranks).map(start).collect();
    for (rank, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rank {rank}: {text}");
        assert!(text.contains("marks found"), "rank {rank} checked nothing: {text}");
    }
}

#[test]
fn child() {
    let Ok(on) = std::env::var(CHILD) else { return };
    let (gpus, host) = on.split_once(' ').unwrap();
    run_rank(World::from_env().unwrap(), On { gpus: gpus.parse().unwrap(), host: host.parse().unwrap() });
    println!("marks found");
}

/// A process whose files may be no longer than a page: making one longer would end it.
#[test]
fn an_arena_longer_than_the_limit_on_files_is_refused() {
    const NAME: &str = "memory::an_arena_longer_than_the_limit_on_files_is_refused";
    const LIMITED: &str = "TOKENYARD_TEST_MEMORY_LIMITED";
    if std::env::var_os(LIMITED).is_some() {
        let (soft, hard) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
        setrlimit(Resource::RLIMIT_FSIZE, 4096, hard).unwrap();
        assert_eq!(Arena::cpu(4096).unwrap().bytes(), 4096);
        let error = Arena::cpu(BYTES).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Device { .. }), "{error:?}");
        assert!(text.contains(&format!("{BYTES} bytes")) && text.contains("may have 4096 bytes"), "{text}");
        assert!(text.contains("ulimit -f"), "{text}");
        // A test that coverage is counted of writes a longer file when it ends.
        setrlimit(Resource::RLIMIT_FSIZE, soft, hard).unwrap();
        println!("refused");
        return;
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args([NAME, "--exact", "--nocapture"])
        .env(LIMITED, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout) + String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && text.contains("refused"), "{}: {text}", child.status);
}

#[test]
fn cpu_ranks_that_are_threads_share_arenas() {
    threads(4, CPU);
}

#[test]
fn cpu_ranks_that_are_processes_share_arenas() {
    processes(3, CPU);
}

#[test]
fn ranks_on_host_fibers_share_arenas() {
    let worlds = World::threads(3).unwrap();
    let report = seeded_world(SeededConfig { seed: 2, hold_stores: false, stopped: None }, 3, |rank, device| {
        let stream = device.new_stream().unwrap();
        exchange_marks(&worlds[rank], &device, &stream, Arena::cpu(BYTES).unwrap(), true);
    });
    assert_eq!(report.failure, None);
}

#[test]
fn host_waits_in_a_row_are_no_hang() {
    let worlds = World::threads(3).unwrap();
    let report = seeded_world(SeededConfig { seed: 1, hold_stores: false, stopped: None }, 3, |rank, _| {
        for _ in 0..300 {
            worlds[rank].barrier("again").unwrap();
        }
    });
    assert_eq!((report.failure, report.hang_report), (None, None));
}

#[test]
fn ranks_of_one_gpu_that_are_threads_share_arenas() {
    if !no_gpu() {
        threads(2, On { gpus: 1, host: false });
    }
}

#[test]
fn ranks_of_one_gpu_that_are_processes_share_arenas() {
    if !no_gpu() {
        processes(2, On { gpus: 1, host: false });
    }
}

#[test]
fn ranks_of_several_gpus_share_arenas() {
    let gpus = Device::cuda_count();
    if no_gpu() {
        return;
    }
    if gpus < 2 {
        println!("skipped: one GPU");
        return;
    }
    for host in [false, true] {
        threads(gpus, On { gpus, host });
        processes(gpus, On { gpus, host });
    }
}

#[test]
fn ranks_of_one_gpu_share_arenas_in_host_memory() {
    if !no_gpu() {
        threads(2, On { gpus: 1, host: true });
        processes(2, On { gpus: 1, host: true });
    }
}

#[test]
fn networks_learn_whose_memory_an_arena_is() {
    let host = Arena::cpu(5000).unwrap();
    assert_eq!(host.span(), Span::host(host.base(), 5000));
    let why = dma_buf(&host.span(), DmaBufMapping::Usual).unwrap_err().to_string();
    assert!(why.contains("by its address"), "{why}");
    if no_gpu() {
        return;
    }
    let pinned = Arena::cuda_host(0, 5000).unwrap();
    assert_eq!((pinned.span().memory, pinned.span().bytes), (SpanMemory::Host, 5000));
    let arena = Arena::cuda(0, 5000).unwrap();
    let span = arena.span();
    let SpanMemory::Gpu { ordinal: 0, allocation } = span.memory else { panic!("{span:?}") };
    assert!(
        (span.base, span.bytes) == (arena.base(), 5000) && allocation.bytes >= 5000 && allocation.base <= span.base
    );
    let facts = gpu_direct(0).unwrap();
    println!("{facts:?}");
    assert!(facts.pci.len() >= 12 && gpu_direct(9999).is_err());
    for mapping in [DmaBufMapping::Usual, DmaBufMapping::Pcie] {
        assert!(dma_buf(&Span { bytes: allocation.bytes + 1, ..span }, mapping).is_err());
        match dma_buf(&Span { base: span.base + 4096, bytes: 8, ..span }, mapping) {
            Ok(buffer) => assert_eq!(buffer.offset, span.base + 4096 - allocation.base),
            Err(why) => println!("skipped: no dma-buf is made here: {why}"),
        }
    }
}

#[test]
fn an_arena_larger_than_the_gpu_is_refused_with_what_is_needed_and_what_is_free() {
    if no_gpu() {
        return;
    }
    let why = Arena::cuda(0, 1 << 45).unwrap_err().to_string();
    assert!(why.contains("bytes"), "{why}");
    println!("{why}");
    // The failure left no memory allocated.
    Arena::cuda(0, 1 << 20).unwrap();
}

#[test]
fn different_settings_are_found_before_anything_is_mapped() {
    std::thread::scope(|scope| {
        for world in World::threads(2).unwrap() {
            scope.spawn(move || {
                let arena = Arena::cpu(4096 * (1 + world.rank().index())).unwrap();
                let why = PeerMap::establish(&world, arena).unwrap_err().to_string();
                assert!(why.contains("equal settings"), "{why}");
            });
        }
    });
}
