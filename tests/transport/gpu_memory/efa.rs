//! A GPU's memory over EFA, by its double: how it is registered, and that immediates wait for its flush.

use super::{BASE, CASE, ORDINAL, PAGE, exported, span};
use crate::double;
use crate::rig::{Memory, PATIENCE};
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use tokenyard::internals::base::{Rank, Result};
use tokenyard::internals::transport::memory::{DmaBuf, DmaBufMapping, GpuDirect};
use tokenyard::internals::transport::network::imm::ImmValue;
use tokenyard::internals::transport::network::libfabric::{LibfabricConfig, LibfabricEndpoint};
use tokenyard::internals::transport::network::{
    Event, Gpu, Place, Posted, RegionId, Released, Span, Transport, WriteImm,
};

/// `FI_…` of fabric.h.
const READ: u64 = 1 << 8;
const WRITE: u64 = 1 << 9;
const REMOTE_READ: u64 = 1 << 12;
const REMOTE_WRITE: u64 = 1 << 13;
/// Writes of each side, and bytes between the places of two.
const WRITES: usize = 300;
const PITCH: usize = 4096;

fn gpu() -> Gpu {
    let facts = GpuDirect { pci: "0000:19:00.0".into(), supported: true, ordered: false };
    // SAFETY: the double reaches its memory by the dma-bufs' files alone.
    unsafe { Gpu::pretended(span(ORDINAL, 0, 1), facts, None, kept) }
}

/// The files that stand for the GPU's memory, by the address of the allocation.
static FILES: Mutex<BTreeMap<u64, std::fs::File>> = Mutex::new(BTreeMap::new());

/// As `exported`, and always the same memory of the same allocation.
fn kept(span: &Span, mapping: DmaBufMapping) -> Result<DmaBuf> {
    let made = exported(span, mapping)?;
    let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    let file = files.entry(span.base - made.offset).or_insert_with(|| made.fd.into());
    Ok(DmaBuf { fd: file.try_clone().unwrap().into(), offset: made.offset })
}

/// Reads or writes the memory of the allocation that begins at `base`.
fn file<T>(base: u64, of: impl FnOnce(&std::fs::File) -> T) -> T {
    of(&FILES.lock().unwrap_or_else(PoisonError::into_inner)[&base])
}

fn config(nics: usize, flush: Option<bool>) -> LibfabricConfig {
    let mut config = LibfabricConfig::new("efa");
    (config.nics, config.flush) = (nics, flush);
    config
}

/// Registers host memory and a GPU's, in a process of its own.
#[test]
fn of_a_case() {
    if std::env::var(CASE).is_err() {
        return;
    }
    let mut endpoint = LibfabricEndpoint::open_for(Rank(0), config(2, None), Some(gpu())).unwrap();
    endpoint.reach().for_each(|reach| println!("reach: {reach}"));
    println!("needs host memory: {}", endpoint.device_needs().host_memory);
    let host = Memory::new(4096);
    // SAFETY: no peer connects.
    let mut register = |span| unsafe { endpoint.register(span) };
    let mut regions = vec![register(host.span()).unwrap()];
    match register(span(ORDINAL, 8, 5)) {
        Ok(region) => regions.push(region),
        Err(why) => println!("refused: {why}"),
    }
    println!("another GPU: {}", register(span(ORDINAL + 1, 8, 5)).unwrap_err());
    for region in regions {
        assert_eq!(endpoint.deregister(region).unwrap(), Released::Done);
    }
}

/// Runs a test in a process of its own over the double; its output, and what the double logged.
fn run(test: &str, case: &str, settings: &[(&str, &str)]) -> Option<(String, Vec<Value>)> {
    let library = double::efa()?;
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let output = Command::new(std::env::current_exe().unwrap())
        .args([&format!("gpu_memory::efa::{test}"), "--exact", "--nocapture", "--test-threads=1"])
        .env(CASE, case)
        .env("TOKENYARD_LIBFABRIC", library)
        .env("TOKENYARD_EFA_LOG", &log)
        .env("TOKENYARD_EFA_DIR", folder.path())
        .envs(settings.iter().map(|(name, value)| (format!("TOKENYARD_EFA_{name}"), value)))
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{case} {settings:?}: {printed}{}", text(&output.stderr));
    let lines = std::fs::read_to_string(&log).unwrap_or_default();
    Some((printed, lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()))
}

#[test]
fn memory_of_a_gpu_is_registered_whole_where_the_provider_offers_it() {
    let old = "dma-buf: libfabric 1.18 takes no dma-bufs";
    let none = "dma-buf: efa offers no memory of GPUs";
    for (settings, way, kind, lacking) in [
        (&[][..], Some("dma-buf"), "dmabuf", ""),
        (&[("DMABUF", "95")], Some("the provider's own way"), "address", "dma-buf: libfabric"),
        (&[("VERSION", "1.18")], Some("the provider's own way"), "address", old),
        (&[("GPUS", "0")], None, "", none),
        (&[("DIRECT", "1"), ("P2P", "0"), ("VERSION", "2.4")], None, "", "reaches no memory"),
    ] {
        let Some((text, events)) = run("of_a_case", "registers", settings) else { return };
        let reaches = text.matches("reaches memory of GPU 3 by ").count();
        assert_eq!(reaches, if way.is_some() { 2 } else { 0 }, "{settings:?}: {text}");
        assert!(text.contains(way.unwrap_or("reaches no memory of GPU 3")) && text.contains(lacking), "{text}");
        assert!(text.contains(&format!("needs host memory: {}", way.is_none())), "{settings:?}: {text}");
        assert!(text.contains("another GPU: argument span is memory of GPU 4"), "{text}");
        assert_eq!(text.contains("refused: "), way.is_none(), "{text}");
        let of_gpu = |event: &&Value| event["iface"] == "cuda" && event["event"] == "register";
        for nic in ["rdmap0s0", "rdmap1s0"] {
            let number = |event: &Value, name: &str| event[name].as_u64().unwrap_or_default();
            let row = |event: &Value| {
                (number(event, "offset"), number(event, "length"), number(event, "base"), number(event, "access"))
            };
            let here = events.iter().filter(of_gpu).filter(|event| event["device"] == nic);
            let found: Vec<_> = here.clone().map(row).collect();
            let whole =
                |page: usize, pages: usize, access| (0, (pages * PAGE) as u64, BASE + (page * PAGE) as u64, access);
            let wanted = [whole(0, 1, READ | WRITE | REMOTE_READ), whole(8, 5, WRITE | REMOTE_WRITE)];
            assert_eq!(found, if way.is_some() { wanted.to_vec() } else { Vec::new() }, "{settings:?} {nic}");
            assert!(here.into_iter().all(|event| event["kind"] == kind && event["hmem_device"] == ORDINAL), "{nic}");
        }
        let count = |name: &str| events.iter().filter(|event| event["event"] == name).count();
        assert_eq!(count("register"), count("deregister"), "{settings:?}");
    }
}

/// Writes into a GPU's memory and out of it, in a process of its own; prints how many immediates came before their
/// bytes.
#[test]
fn of_writes() {
    let Ok(case) = std::env::var(CASE) else { return };
    let flush = (case == "no flush").then_some(false);
    let mut ends = [0, 1].map(|rank| {
        let gpu = (rank == 1).then(gpu);
        LibfabricEndpoint::open_for(Rank(rank), config(2, flush.filter(|_| rank == 1)), gpu).unwrap()
    });
    let host = Memory::new(2 * WRITES * PITCH);
    let device = span(ORDINAL, 8, 2);
    // SAFETY: accessed through raw pointers only, and dropped after the endpoints; the GPU's memory is a file.
    unsafe {
        assert_eq!(ends[0].register(host.span()), Ok(RegionId(0)));
        assert_eq!(ends[1].register(device), Ok(RegionId(0)));
    }
    for (own, other) in [(0, 1), (1, 0)] {
        let address = ends[other].address(Rank(own as u32)).unwrap();
        ends[own].connect(Rank(other as u32), &address).unwrap();
    }
    let base = BASE + (8 * PAGE) as u64;
    let bytes = |number: usize| 1 + number * 37 % 4000;
    let pattern = |number: usize| vec![(number % 251) as u8 + 1; bytes(number)];
    // The span begins 4 KiB behind its allocation. What goes out lies in the second half of both.
    let at = |number: usize| (number % WRITES) * PITCH;
    let half = |number: usize| WRITES * PITCH + at(number);
    let (mut posted, mut done, mut early) = ([0; 2], [0; 2], 0);
    let start = Instant::now();
    while done.iter().any(|done| *done < 2 * WRITES) {
        assert!(start.elapsed() < PATIENCE, "{posted:?} posted, {done:?} done");
        for own in 0..2 {
            let number = posted[own];
            if number < WRITES {
                let (from, to) = if own == 0 { (at(number), at(number)) } else { (half(number), half(number)) };
                if own == 0 {
                    host.write(from, &pattern(number));
                } else {
                    file(base, |file| file.write_all_at(&pattern(number), 4096 + from as u64)).unwrap();
                }
                let place = |offset: usize| Place { region: RegionId(0), offset: offset as u64 };
                let write = WriteImm {
                    nic: (number % 2) as u8,
                    peer: Rank(1 - own as u32),
                    source: place(from),
                    target: place(to),
                    bytes: bytes(number) as u32,
                    imm: ImmValue::from_bits(number as u32),
                    token: number as u64,
                };
                posted[own] += usize::from(ends[own].post(&write).unwrap() == Posted::Accepted);
            }
            ends[own]
                .poll(&mut |event| match event {
                    Event::Imm { imm } if own == 1 => {
                        let (number, mut seen) = (imm.bits() as usize, vec![0; bytes(imm.bits() as usize)]);
                        file(base, |file| file.read_exact_at(&mut seen, 4096 + at(number) as u64)).unwrap();
                        early += usize::from(seen != pattern(number));
                        done[own] += 1;
                    }
                    Event::Imm { imm } => {
                        let number = imm.bits() as usize;
                        assert_eq!(host.read(half(number), bytes(number)), pattern(number), "write {number}");
                        done[own] += 1;
                    }
                    Event::Sent { .. } => done[own] += 1,
                    other => panic!("{other:?}"),
                })
                .unwrap();
        }
    }
    println!("early: {early}");
}

#[test]
fn immediates_wait_until_what_the_nic_wrote_into_the_gpu_is_there() {
    let unflushed = [("UNFLUSHED", "1")];
    let Some((text, events)) = run("of_writes", "flush", &unflushed) else { return };
    assert!(text.contains("early: 0\n"), "{text}");
    let reads = events.iter().filter(|event| event["event"] == "read").count();
    println!("{reads} reads for {WRITES} writes");
    assert!((1..=WRITES).contains(&reads));
    let (text, events) = run("of_writes", "no flush", &unflushed).unwrap();
    assert!(!text.contains("early: 0\n") && events.iter().all(|event| event["event"] != "read"), "{text}");
}
