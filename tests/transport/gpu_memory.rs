//! Registration of a GPU's memory, held to the double of libibverbs (here) and to that of EFA (`efa`): which way is
//! chosen, and what the device is given.
//!
//! The GPU is pretended: its memory has addresses that the process does not have, and its dma-bufs are memfds. Each
//! case runs in a process of its own, since the double reads its settings from the environment.

mod efa;

use crate::double;
use serde_json::Value;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use tokenyard::internals::base::{Error, Rank, Result};
use tokenyard::internals::kernels::Device;
use tokenyard::internals::transport::memory::{Arena, DmaBuf, DmaBufMapping, GpuDirect};
use tokenyard::internals::transport::network::verbs::{VerbsConfig, VerbsEndpoint};
use tokenyard::internals::transport::network::{Allocation, Gpu, Released, Span, SpanMemory, Transport};
use tokenyard::internals::transport::topology::record;

/// Of the GPU: an address that no process has mapped.
const BASE: u64 = 0x7000_0000_0000;
const PAGE: usize = 2 << 20;
const ORDINAL: usize = 3;
/// `IBV_ACCESS_…` of verbs.h.
const LOCAL_WRITE: u64 = 1;
const REMOTE_WRITE: u64 = 2;
const REMOTE_READ: u64 = 4;
const RELAXED_ORDERING: u64 = 1 << 20;

/// Set in the process of a case: whether the GPU makes dma-bufs.
const CASE: &str = "TOKENYARD_TEST_GPU_MEMORY";

/// So many pages of the GPU, from `page` on; the span leaves 4 KiB out at both ends.
fn span(ordinal: usize, page: usize, pages: usize) -> Span {
    let allocation = Allocation { base: BASE + (page * PAGE) as u64, bytes: pages * PAGE };
    let memory = SpanMemory::Gpu { ordinal, allocation };
    Span { base: allocation.base + 4096, bytes: allocation.bytes - 8192, memory }
}

fn exported(span: &Span, mapping: DmaBufMapping) -> Result<DmaBuf> {
    let SpanMemory::Gpu { allocation, .. } = span.memory else { panic!("{span:?}") };
    let name = match mapping {
        DmaBufMapping::Usual => "usual",
        DmaBufMapping::Pcie => "pcie",
    };
    // The double of EFA compares the address with what the name says.
    let name = CString::new(format!("{name}@{:x}", allocation.base)).unwrap();
    let fd = nix::sys::memfd::memfd_create(name.as_c_str(), nix::sys::memfd::MFdFlags::empty()).unwrap();
    File::from(fd.as_fd().try_clone_to_owned().unwrap()).set_len(allocation.bytes as u64).unwrap();
    Ok(DmaBuf { fd, offset: span.base - allocation.base })
}

fn not_exported(_: &Span, mapping: DmaBufMapping) -> Result<DmaBuf> {
    Err(Error::device(format!("no dma-buf is made ({mapping:?})"), "none"))
}

/// What a case does, in its own process; prints what the parent checks.
#[test]
fn of_a_case() {
    let Ok(case) = std::env::var(CASE) else { return };
    let facts = GpuDirect { pci: "0000:19:00.0".into(), supported: true, ordered: false };
    let export = if case == "no dma-buf" { not_exported } else { exported };
    // SAFETY: the double moves no bytes.
    let gpu = unsafe { Gpu::pretended(span(ORDINAL, 0, 1), facts, None, export) };
    let mut config = VerbsConfig::default();
    config.devices = vec!["mlx5_0".into(), "mlx5_1".into()];
    config.nics = 2;
    let mut endpoint = VerbsEndpoint::open_for(Rank(0), config, Some(gpu)).unwrap();
    endpoint.reach().for_each(|reach| println!("reach: {reach}"));
    let needs = endpoint.device_needs();
    println!("needs host memory: {}", needs.host_memory);
    let host = [0u64; 16];
    // SAFETY: the double moves no bytes.
    let mut register = |span| unsafe { endpoint.register(span) };
    let mut regions = vec![register(Span::host(host.as_ptr() as u64, 128)).unwrap()];
    match register(span(ORDINAL, 8, 5)) {
        Ok(region) => regions.push(region),
        Err(why) => println!("refused: {why}"),
    }
    println!("another GPU: {}", register(span(ORDINAL + 1, 8, 5)).unwrap_err());
    let beyond = Span { bytes: 5 * PAGE, ..span(ORDINAL, 8, 5) };
    println!("beyond: {}", register(beyond).unwrap_err());
    assert!(!endpoint.address(Rank(1)).unwrap().is_empty());
    for region in regions {
        assert_eq!(endpoint.deregister(region).unwrap(), Released::Done);
    }
}

/// Registers an arena of GPU 0 with an endpoint that reaches it, in a process of its own; prints its allocation.
#[test]
fn of_a_real_gpu() {
    if std::env::var(CASE).is_err() || Device::cuda_count() == 0 {
        return;
    }
    let mut config = VerbsConfig::default();
    (config.devices, config.gpu) = (vec!["mlx5_0".into()], Some(0));
    let mut endpoint = VerbsEndpoint::open(Rank(0), config).unwrap();
    endpoint.reach().for_each(|reach| println!("reach: {reach}"));
    println!("needs host memory: {}", endpoint.device_needs().host_memory);
    let arena = Arena::cuda(0, 5_000_000).unwrap();
    let SpanMemory::Gpu { allocation, .. } = arena.span().memory else { panic!("no memory of a GPU") };
    println!("allocation: {} {}", allocation.base, allocation.bytes);
    // SAFETY: the double moves no bytes.
    match unsafe { endpoint.register(arena.span()) } {
        Ok(region) => assert_eq!(endpoint.deregister(region).unwrap(), Released::Done),
        Err(why) => println!("refused: {why}"),
    }
}

struct Outcome {
    text: String,
    events: Vec<Value>,
}

impl Outcome {
    fn of(libraries: [&Path; 2], case: &str, settings: &[(&str, &str)]) -> Outcome {
        Outcome::of_test("of_a_case", libraries, case, settings)
    }

    fn of_test(test: &str, libraries: [&Path; 2], case: &str, settings: &[(&str, &str)]) -> Outcome {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([&format!("gpu_memory::{test}"), "--exact", "--nocapture", "--test-threads=1"]).env(CASE, case);
        command.env("TOKENYARD_LIBIBVERBS", libraries[0]).env("TOKENYARD_LIBMLX5", libraries[1]);
        command.env("TOKENYARD_IBVERBS_LOG", &log).env("TOKENYARD_IBVERBS_DEVICES", "mlx5_0,mlx5_1");
        command.envs(settings.iter().map(|(name, value)| (format!("TOKENYARD_IBVERBS_{name}"), value)));
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{settings:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
        let events = double::ibverbs_log(&log);
        for event in &events {
            assert!(event["event"] != "leak" && event["event"] != "misuse", "{settings:?}: {event}");
        }
        Outcome { text, events }
    }

    /// Registrations of a device by dma-buf or by addresses of the GPU: kind, dma-buf's name, offset, length, address
    /// for peers, and access.
    fn registered(&self, device: &str) -> Vec<(String, String, u64, u64, u64, u64)> {
        let of_gpu = |event: &&Value| {
            let address = event["iova"].as_u64().unwrap_or_default();
            event["event"] == "register" && event["device"] == device && (BASE..BASE << 1).contains(&address) && {
                // The process's own memory lies above.
                address < BASE + (64 * PAGE) as u64
            }
        };
        let number = |event: &Value, name: &str| event[name].as_u64().unwrap_or_default();
        let text = |event: &Value, name: &str| event[name].as_str().unwrap_or_default().to_owned();
        let row = |event: &Value| {
            let name = text(event, "fd_name");
            let name = name.trim_start_matches("/memfd:").split('@').next().unwrap_or_default().to_owned();
            let place = (number(event, "offset"), number(event, "length"), number(event, "iova"));
            (text(event, "kind"), name, place.0, place.1, place.2, number(event, "access"))
        };
        self.events.iter().filter(of_gpu).map(row).collect()
    }
}

fn doubles() -> Option<[[&'static Path; 2]; 2]> {
    Some([[double::ibverbs()?, double::mlx5()?], [double::first_ibverbs()?, double::first_mlx5()?]])
}

/// What both NICs are given: the probe, then the region.
fn given(kind: &str, name: &str) -> Vec<(String, String, u64, u64, u64, u64)> {
    let row = |page: usize, pages: usize, access| {
        let base = BASE + (page * PAGE) as u64;
        (kind.to_owned(), name.to_owned(), 0, (pages * PAGE) as u64, base, access)
    };
    let write = LOCAL_WRITE | REMOTE_WRITE | RELAXED_ORDERING;
    vec![row(0, 1, LOCAL_WRITE | REMOTE_READ), row(8, 5, write)]
}

#[test]
fn memory_of_a_gpu_is_registered_by_the_best_way_that_works_and_whole() {
    let Some([libraries, first]) = doubles() else { return };
    let direct: &[(&str, &str)] = &[("DATA_DIRECT", "1")];
    let gb200: &[(&str, &str)] = &[("DATA_DIRECT", "1"), ("MATCHING", "1")];
    let plain: &[(&str, &str)] = &[];
    let failing: &[(&str, &str)] = &[("DATA_DIRECT", "1"), ("DATA_DIRECT_ERRNO", "524")];
    let peer: &[(&str, &str)] = &[("DMABUF", "0"), ("PEER_MEMORY", "1")];
    let old: &[(&str, &str)] = &[("PEER_MEMORY", "1")];
    let lacks = "data direct: libibverbs knows no function for data direct of mlx5_0";
    for (libraries, case, settings, kind, name, way, lacking) in [
        (libraries, "", direct, "data_direct", "pcie", "data direct", ""),
        (libraries, "", gb200, "data_direct", "pcie", "data direct", ""),
        (libraries, "", plain, "dmabuf", "usual", "dma-buf", lacks),
        (libraries, "", failing, "dmabuf", "usual", "dma-buf", "data direct: libibverbs registers no 2097152 bytes"),
        (libraries, "", peer, "iova", "", "peer memory", "dma-buf: libibverbs registers no 2097152 bytes"),
        (libraries, "no dma-buf", old, "iova", "", "peer memory", "dma-buf: no dma-buf is made (Usual)"),
        (first, "", old, "plain", "", "peer memory", "has no ibv_reg_dmabuf_mr"),
    ] {
        let outcome = Outcome::of(libraries, case, settings);
        for nic in ["mlx5_0", "mlx5_1"] {
            let reach = format!("reach: {nic} reaches memory of GPU 3 by {way}, with a flush");
            assert!(outcome.text.contains(&reach), "{settings:?}: {}", outcome.text);
            let mut wanted = given(kind, name);
            if kind == "plain" {
                // Without the newer call, access has no relaxed ordering.
                wanted[1].5 &= !RELAXED_ORDERING;
            }
            assert_eq!(outcome.registered(nic), wanted, "{settings:?}");
        }
        assert!(outcome.text.contains(lacking), "{settings:?}: {}", outcome.text);
        assert!(outcome.text.contains("needs host memory: false"), "{}", outcome.text);
        assert!(outcome.text.contains("another GPU: argument span is memory of GPU 4"), "{}", outcome.text);
        assert!(outcome.text.contains("beyond: argument span is"), "{}", outcome.text);
        let count = |event: &str| outcome.events.iter().filter(|line| line["event"] == event).count();
        assert_eq!(count("register"), count("deregister"), "{settings:?}");
    }
}

#[test]
fn an_endpoint_one_of_whose_nics_does_not_reach_the_gpu_needs_host_memory() {
    let Some([libraries, _]) = doubles() else { return };
    for (settings, reached) in [(("DMABUF", "1,0"), 1), (("DMABUF", "0"), 0)] {
        let outcome = Outcome::of(libraries, "", &[settings]);
        let lines = |text: &str| outcome.text.matches(text).count();
        assert_eq!((lines("reaches memory of GPU 3"), lines("reaches no memory of GPU 3")), (reached, 2 - reached));
        assert!(outcome.text.contains("needs host memory: true"), "{}", outcome.text);
        assert!(outcome.text.contains("refused: argument span is memory of GPU 3"), "{}", outcome.text);
        for way in ["data direct: ", "dma-buf: ", "peer memory: "] {
            assert!(lines(way) >= 1, "{way}: {}", outcome.text);
        }
        // Nothing of the region stays with the NIC that reaches the GPU.
        assert_eq!(outcome.registered("mlx5_0").len(), 2 * reached);
        let count = |event: &str| outcome.events.iter().filter(|line| line["event"] == event).count();
        assert_eq!(count("register"), count("deregister"));
    }
}

#[test]
fn an_arena_of_a_gpu_is_registered_whole() {
    let Some([libraries, _]) = doubles() else { return };
    if Device::cuda_count() == 0 {
        println!("skipped: no GPU can be used here");
        return;
    }
    for settings in [&[("DATA_DIRECT", "1")][..], &[("DATA_DIRECT", "0")], &[("DMABUF", "0"), ("PEER_MEMORY", "1")]] {
        let outcome = Outcome::of_test("of_a_real_gpu", libraries, "", settings);
        println!("{settings:?}: {}", outcome.text);
        let line = outcome.text.lines().find_map(|line| line.strip_prefix("allocation: ")).unwrap();
        let (base, bytes) = line.split_once(' ').unwrap();
        let (base, bytes): (u64, u64) = (base.parse().unwrap(), bytes.parse().unwrap());
        assert!(bytes >= 5_000_000 && bytes.is_multiple_of(PAGE as u64) && base.is_multiple_of(PAGE as u64));
        // Where the driver makes no dma-buf, none is registered, and the reason is there.
        let region = outcome.events.iter().find(|event| event["event"] == "register" && event["iova"] == base);
        let Some(region) = region else {
            assert!(outcome.text.contains("reaches no memory") && outcome.text.contains("dma-buf: "), "{line}");
            continue;
        };
        assert!(outcome.text.contains("needs host memory: false"), "{}", outcome.text);
        assert_eq!((&region["length"], &region["offset"]), (&bytes.into(), &0.into()), "{region}");
        let by_fd = region["kind"] == "dmabuf" || region["kind"] == "data_direct";
        assert!(!by_fd || region["fd_bytes"].as_u64().unwrap() >= bytes, "{region}");
        println!("{region}");
    }
}

#[test]
fn whether_a_flush_is_needed_follows_from_the_gpu_and_from_the_place_of_the_nic() {
    let text = include_str!("../data/topology/p5en");
    let machine = record::parse(text).unwrap();
    let mut devices = machine.devices().iter();
    let (gpu, _) = devices.find(|(_, device)| device.is_gpu()).unwrap();
    let root = |at| machine.above(at).last().copied();
    let nics: Vec<_> = machine.devices().iter().filter(|(_, device)| device.rdma.is_some()).collect();
    let near = nics.iter().find(|(at, _)| root(**at) == root(*gpu)).unwrap().1;
    let far = nics.iter().find(|(at, _)| root(**at) != root(*gpu)).unwrap().1;
    let name = |device: &tokenyard::internals::transport::topology::Device| device.rdma.as_ref().unwrap().name.clone();
    let needs = |ordered, pci: &str, machine, nic: &str| {
        let facts = GpuDirect { pci: pci.into(), supported: true, ordered };
        // SAFETY: no endpoint has it.
        unsafe { Gpu::pretended(span(0, 0, 1), facts, machine, exported) }.needs_flush(nic)
    };
    let pci = gpu.to_string();
    let known = || Some(machine.clone());
    assert!(!needs(true, &pci, known(), &name(near)) && !needs(true, &pci.to_uppercase(), known(), &name(near)));
    assert!(needs(false, &pci, known(), &name(near)), "a GPU that keeps no order");
    assert!(needs(true, &pci, known(), &name(far)), "another root bus");
    assert!(needs(true, &pci, known(), "mlx5_99") && needs(true, "", known(), &name(near)), "not known");
    assert!(needs(true, &pci, None, &name(near)), "nothing known");
}
