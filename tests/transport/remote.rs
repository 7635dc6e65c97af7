//! Endpoints that live in processes of their own, driven by the test's process: each call of the trait is a line to the
//! child, and its answer a line back.
//!
//! The test program starts itself again, and the test `serve` plays an endpoint. The memory of the tests is shared, so
//! that a test looks at it as if the endpoint were its own.

use crate::rig::shared_memory;
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;
use tokenyard::internals::base::{Error, Rank, Result};
use tokenyard::internals::transport::network::imm::ImmValue;
use tokenyard::internals::transport::network::libfabric::{LibfabricConfig, LibfabricEndpoint, libfabric_sys};
use tokenyard::internals::transport::network::verbs::{VerbsConfig, VerbsEndpoint};
use tokenyard::internals::transport::network::{
    DeviceNeeds, Event, Failure, Limits, Place, Posted, Reason, RegionId, Released, Span, SpanMemory, Transport,
    WriteImm,
};

/// Set in children alone: the network, NICs and rank.
const ENDPOINT: &str = "TOKENYARD_TEST_ENDPOINT";

/// An endpoint over a real network in a process of its own.
pub struct RemoteEndpoint {
    /// Answers come back on it. A lock, since limits are asked for by reference; nobody else ever has it.
    line: Mutex<BufReader<UnixStream>>,
    child: Child,
    nics: usize,
    limits: Limits,
}

impl RemoteEndpoint {
    /// An endpoint over a provider of libfabric, by the given library if there is one, or over devices of verbs
    /// (`verbs:DEVICE,...`).
    pub fn open(rank: Rank, network: &str, nics: usize, libfabric: Option<&Path>) -> RemoteEndpoint {
        let (own, other) = UnixStream::pair().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        if let Some(libfabric) = libfabric {
            command.env(libfabric_sys::VARIABLE, libfabric);
        }
        let child = command
            .args(["remote::serve", "--exact", "--nocapture", "--test-threads=1"])
            .env(ENDPOINT, format!("{network} {nics} {rank}"))
            .stdin(Stdio::from(OwnedFd::from(other)))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut endpoint = RemoteEndpoint { line: Mutex::new(BufReader::new(own)), child, nics, limits: Limits::NONE };
        let limits = endpoint.ask(json!(["limits"])).unwrap();
        let number = |at: usize| limits[at].as_u64().unwrap() as u32;
        endpoint.limits = Limits { posts: number(0), receives: number(1), regions: number(2), write_bytes: number(3) };
        endpoint
    }

    fn ask(&self, question: Value) -> Result<Value> {
        let mut line = self.line.lock().unwrap();
        let mut text = question.to_string();
        text.push('\n');
        line.get_mut().write_all(text.as_bytes()).unwrap();
        text.clear();
        line.read_line(&mut text).unwrap();
        let answer: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{question} is answered {text:?}"));
        match (answer.get("argument"), answer.get("transport")) {
            (Some(why), _) => Err(Error::argument("remote", why, "see above")),
            (_, Some(why)) => Err(Error::transport(why.to_string(), "see above")),
            _ => Ok(answer),
        }
    }

    fn posted(&self, question: Value) -> Result<Posted> {
        Ok(if self.ask(question)? == true { Posted::Accepted } else { Posted::Full })
    }
}

impl Drop for RemoteEndpoint {
    fn drop(&mut self) {
        // The child drops its endpoint once it reads the end.
        let line = self.line.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        _ = line.get_mut().shutdown(std::net::Shutdown::Both);
        let status = self.child.wait();
        if !std::thread::panicking() {
            assert!(status.as_ref().is_ok_and(|status| status.success()), "{status:?}");
        }
    }
}

fn bytes_of(value: &Value) -> Vec<u8> {
    value.as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect()
}

impl Transport for RemoteEndpoint {
    fn nics(&self) -> usize {
        self.nics
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn device_needs(&self) -> DeviceNeeds {
        DeviceNeeds { host_memory: true, ..DeviceNeeds::default() }
    }

    unsafe fn register(&mut self, span: Span) -> Result<RegionId> {
        if let SpanMemory::Gpu { ordinal, .. } = span.memory {
            return Err(Error::argument("span", format!("memory of GPU {ordinal}"), "tested where it lies"));
        }
        let (number, offset) = shared_memory(span.base);
        let answer = self.ask(json!(["register", std::process::id(), number, offset, span.bytes]))?;
        Ok(RegionId(answer.as_u64().unwrap() as u16))
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        Ok(if self.ask(json!(["deregister", region.0]))? == true { Released::Done } else { Released::Busy })
    }

    fn address(&mut self, peer: Rank) -> Result<Vec<u8>> {
        self.ask(json!(["address", peer.0])).map(|answer| bytes_of(&answer))
    }

    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()> {
        self.ask(json!(["connect", peer.0, address])).map(drop)
    }

    fn post(&mut self, w: &WriteImm) -> Result<Posted> {
        let (source, target) = ((w.source.region.0, w.source.offset), (w.target.region.0, w.target.offset));
        self.posted(json!(["post", w.nic, w.peer.0, source, target, w.bytes, w.imm.bits(), w.token]))
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        self.posted(json!(["send", peer.0, message]))
    }

    fn flush(&mut self) -> Result<()> {
        self.ask(json!(["flush"])).map(drop)
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        let answer = self.ask(json!(["poll"]))?;
        let events = answer.as_array().unwrap();
        for event in events {
            let number = |at: usize| event[at].as_u64().unwrap();
            let peer = || Rank(number(2) as u32);
            match event[0].as_str().unwrap() {
                "sent" => on_event(Event::Sent { token: number(1) }),
                "dropped" => on_event(Event::Dropped { token: number(1), peer: peer() }),
                "imm" => on_event(Event::Imm { imm: ImmValue::from_bits(number(1) as u32) }),
                "message" => on_event(Event::Message { peer: peer(), bytes: &bytes_of(&event[1]) }),
                _ => {
                    let failure = Failure { reason: Reason::Other, code: number(3) as u32 };
                    on_event(Event::Failed { token: number(1), peer: peer(), failure });
                }
            }
        }
        Ok(events.len())
    }

    fn reset(&mut self) -> Result<()> {
        self.ask(json!(["reset"])).map(drop)
    }
}

// ---- the child

/// The memory of a test, mapped here once.
fn map(maps: &mut HashMap<u64, u64>, process: u64, fd: u64) -> u64 {
    *maps.entry(fd).or_insert_with(|| {
        let file = File::options().read(true).write(true).open(format!("/proc/{process}/fd/{fd}")).unwrap();
        let bytes = NonZeroUsize::new(file.metadata().unwrap().len() as usize).unwrap();
        let (access, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED);
        // SAFETY: a new mapping, which stays.
        unsafe { mmap(None, bytes, access, flags, &file, 0) }.unwrap().as_ptr() as u64
    })
}

fn answer(endpoint: &mut dyn Transport, maps: &mut HashMap<u64, u64>, question: &Value) -> Result<Value> {
    let number = |at: usize| question[at].as_u64().unwrap();
    let place = |at: usize| Place {
        region: RegionId(question[at][0].as_u64().unwrap() as u16),
        offset: question[at][1].as_u64().unwrap(),
    };
    Ok(match question[0].as_str().unwrap() {
        "limits" => {
            let Limits { posts, receives, regions, write_bytes } = endpoint.limits();
            json!([posts, receives, regions, write_bytes])
        }
        "register" => {
            let base = map(maps, number(1), number(2)) + number(3);
            // SAFETY: inside a mapping that stays; the tests access it by raw pointers alone.
            json!(unsafe { endpoint.register(Span::host(base, number(4) as usize)) }?.0)
        }
        "deregister" => json!(endpoint.deregister(RegionId(number(1) as u16))? == Released::Done),
        "address" => json!(endpoint.address(Rank(number(1) as u32))?),
        "connect" => json!(endpoint.connect(Rank(number(1) as u32), &bytes_of(&question[2]))?),
        "post" => {
            let write = WriteImm {
                nic: number(1) as u8,
                peer: Rank(number(2) as u32),
                source: place(3),
                target: place(4),
                bytes: number(5) as u32,
                imm: ImmValue::from_bits(number(6) as u32),
                token: number(7),
            };
            json!(endpoint.post(&write)? == Posted::Accepted)
        }
        "send" => json!(endpoint.send(Rank(number(1) as u32), &bytes_of(&question[2]))? == Posted::Accepted),
        "flush" => json!(endpoint.flush()?),
        "reset" => json!(endpoint.reset()?),
        "poll" => {
            let mut events = Vec::new();
            endpoint.poll(&mut |event| {
                events.push(match event {
                    Event::Sent { token } => json!(["sent", token]),
                    Event::Failed { token, peer, failure } => json!(["failed", token, peer.0, failure.code]),
                    Event::Dropped { token, peer } => json!(["dropped", token, peer.0]),
                    Event::Imm { imm } => json!(["imm", imm.bits()]),
                    Event::Message { peer, bytes } => json!(["message", bytes, peer.0]),
                });
            })?;
            Value::Array(events)
        }
        other => panic!("{other}"),
    })
}

fn endpoint(network: &str, nics: usize, rank: Rank) -> Box<dyn Transport> {
    if let Some(devices) = network.strip_prefix("verbs:") {
        let mut config = VerbsConfig::default();
        config.devices = devices.split(',').map(str::to_owned).collect();
        // Processors that are emulated may not run a process for long.
        (config.nics, config.let_go) = (nics, Duration::from_secs(5));
        return Box::new(VerbsEndpoint::open(rank, config).unwrap());
    }
    let mut config = LibfabricConfig::new(network);
    (config.nics, config.allow_old_shm) = (nics, true);
    // Processes that share few cores may not be scheduled for long.
    config.let_go = Duration::from_secs(2);
    config.source = (network == "tcp").then(|| "127.0.0.1".into());
    Box::new(LibfabricEndpoint::open(rank, config).unwrap())
}

/// Plays an endpoint, if this process is one.
#[test]
fn serve() {
    let Ok(given) = std::env::var(ENDPOINT) else { return };
    let [network, nics, rank] = given.split(' ').collect::<Vec<_>>()[..] else { panic!("{given}") };
    let mut endpoint = endpoint(network, nics.parse().unwrap(), Rank(rank.parse().unwrap()));
    let (mut maps, mut line) = (HashMap::new(), String::new());
    // SAFETY: stdin is the socket, and nothing else of this process uses it.
    let socket = unsafe { <UnixStream as std::os::fd::FromRawFd>::from_raw_fd(0) };
    let mut socket = BufReader::new(socket);
    loop {
        line.clear();
        if socket.read_line(&mut line).unwrap_or(0) == 0 {
            break;
        }
        let question = serde_json::from_str(&line).unwrap();
        let found = match answer(&mut *endpoint, &mut maps, &question) {
            Ok(found) => found,
            Err(why @ Error::Argument { .. }) => json!({"argument": why.to_string()}),
            Err(why) => json!({"transport": why.to_string()}),
        };
        if socket.get_mut().write_all(format!("{found}\n").as_bytes()).is_err() {
            break;
        }
    }
}
