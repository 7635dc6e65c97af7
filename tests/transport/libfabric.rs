//! libfabric under the contract: tcp within a process, tcp and shm with each endpoint in a process of its own, since a
//! sender over shm of libfabric 1.17 crashes when a peer of its process closes.

use crate::contract;
use crate::double;
use crate::remote::RemoteEndpoint;
use crate::rig::{Backend, PATIENCE};
use std::path::Path;
use std::time::{Duration, Instant};
use tokenyard::internals::base::Rank;
use tokenyard::internals::transport::network::libfabric::libfabric_sys::{Library, Version};
use tokenyard::internals::transport::network::libfabric::{LibfabricConfig, LibfabricEndpoint};
use tokenyard::internals::transport::network::{Event, Failure, Posted, Reason, Transport};

/// Endpoints over libfabric in this process; each has objects of its own, as those of different processes.
pub struct Libfabric(pub LibfabricConfig);

impl Libfabric {
    fn tcp(nics: usize) -> Libfabric {
        let mut config = LibfabricConfig::new("tcp");
        (config.nics, config.source) = (nics, Some("127.0.0.1".into()));
        // A machine under load may not run this process for long.
        config.let_go = Duration::from_secs(1);
        Libfabric(config)
    }

    /// EFA as its double plays it.
    pub fn efa(nics: usize) -> Libfabric {
        let mut config = LibfabricConfig::new("efa");
        (config.nics, config.library) = (nics, double::efa().map(Path::to_owned));
        config.let_go = Duration::from_secs(1);
        Libfabric(config)
    }
}

impl Backend for Libfabric {
    type Endpoint = LibfabricEndpoint;

    fn endpoints(&self, ranks: usize) -> Vec<LibfabricEndpoint> {
        let open = |rank| LibfabricEndpoint::open(Rank(rank), self.0.clone()).unwrap();
        (0..ranks as u32).map(open).collect()
    }

    fn is_there(&self) -> bool {
        if self.0.provider == "efa" {
            return double::efa().is_some();
        }
        let Err(why) = Library::open() else { return true };
        println!("skipped: {why}");
        assert_ne!(std::env::var("TOKENYARD_STRICT").as_deref(), Ok("1"), "{why}");
        false
    }
}

/// Endpoints over libfabric, each in a process of its own.
pub struct LibfabricProcesses(pub &'static str);

impl Backend for LibfabricProcesses {
    type Endpoint = RemoteEndpoint;

    fn endpoints(&self, ranks: usize) -> Vec<RemoteEndpoint> {
        let library = if self.0 == "efa" { double::efa() } else { None };
        (0..ranks as u32).map(|rank| RemoteEndpoint::open(Rank(rank), self.0, 1, library)).collect()
    }

    fn is_there(&self) -> bool {
        if self.0 == "efa" { double::efa().is_some() } else { Libfabric::tcp(1).is_there() }
    }
}

contract!(tcp, Libfabric::tcp(1));
contract!(tcp_between_processes, LibfabricProcesses("tcp"));
contract!(shm_between_processes, LibfabricProcesses("shm"));
contract!(tcp_of_two_nics, Libfabric::tcp(2));
contract!(@ tcp_from_threads, Libfabric::tcp(1), regions_taken_back_from_threads);
contract!(@ tcp_processes_from_threads, LibfabricProcesses("tcp"), regions_taken_back_from_threads);
contract!(@ shm_processes_from_threads, LibfabricProcesses("shm"), regions_taken_back_from_threads);

#[test]
fn what_cannot_be_opened_is_named_with_what_is_there() {
    if !Libfabric::tcp(1).is_there() {
        return;
    }
    let open = |config: LibfabricConfig| LibfabricEndpoint::open(Rank(0), config).unwrap_err().to_string();
    let why = open(LibfabricConfig::new("net"));
    assert!(why.contains("provider is net") && why.contains("give tcp, shm, efa or verbs;ofi_rxm"), "{why}");
    let mut elsewhere = LibfabricConfig::new("tcp");
    elsewhere.library = Some("/nowhere/libfabric.so".into());
    let why = open(elsewhere);
    assert!(why.contains("/nowhere/libfabric.so") && why.contains("libfabric1"), "{why}");
    let mut foreign = LibfabricConfig::new("tcp");
    foreign.source = Some("192.0.2.77".into());
    let why = open(foreign);
    assert!(why.contains("provider tcp at ") && why.contains("192.0.2.77"), "{why}");
    let (mut none, mut many, mut few) =
        (LibfabricConfig::new(""), LibfabricConfig::new("tcp"), LibfabricConfig::new("tcp"));
    (none.nics, many.nics, few.peer_posts) = (1, 5, 0);
    let refusals = [(none, "provider"), (many, "nics"), (few, "peer_posts")].map(|(config, name)| (open(config), name));
    assert!(refusals.iter().all(|(why, name)| why.contains(&format!("configuration {name} is"))), "{refusals:?}");
    if Library::open().unwrap().version() < Version::new(2, 1) {
        let why = open(LibfabricConfig::new("shm"));
        assert!(why.contains("shm of libfabric 1.") && why.contains("libfabric 2.1 or later"), "{why}");
    }
}

#[test]
fn endpoints_that_differ_are_refused_with_both_values() {
    if !Libfabric::tcp(1).is_there() {
        return;
    }
    let open = |rank, nics| LibfabricEndpoint::open(Rank(rank), Libfabric::tcp(nics).0).unwrap();
    let (mut one, mut two) = (open(0, 1), open(1, 2));
    let address = two.address(Rank(0)).unwrap();
    let why = one.connect(Rank(1), &address).unwrap_err().to_string();
    assert!(why.contains("is of an endpoint with 2 NICs, not 1"), "{why}");
    let why = one.connect(Rank(2), &address).unwrap_err().to_string();
    assert!(why.contains("address of rank 2") && why.contains("is of rank 1"), "{why}");
    let address = open(1, 1).address(Rank(0)).unwrap();
    assert_eq!(one.connect(Rank(1), &address), Ok(()));
    assert_eq!(one.explain(Failure { reason: Reason::Unreachable, code: 111 }), "Connection refused");
    assert_eq!(one.explain(Reason::Flushed.into()), "");
}

#[test]
fn messages_to_a_peer_that_was_replaced_for_a_while() {
    if !Libfabric::tcp(1).is_there() {
        return;
    }
    let open = |rank| LibfabricEndpoint::open(Rank(rank), Libfabric::tcp(1).0).unwrap();
    let (mut own, mut peer, mut other) = (open(0), open(1), open(1));
    let [address, another] = [&mut peer, &mut other].map(|endpoint| endpoint.address(Rank(0)).unwrap());
    peer.connect(Rank(0), &own.address(Rank(1)).unwrap()).unwrap();
    for (round, to) in [&address, &another, &address].into_iter().enumerate() {
        own.connect(Rank(1), to).unwrap();
        let (start, mut come, expected) = (Instant::now(), Vec::new(), [b'a', b'b', b'c'].map(|byte| vec![byte]));
        if to == &another {
            continue;
        }
        for message in &expected {
            assert_eq!(own.send(Rank(1), message), Ok(Posted::Accepted));
        }
        while come.len() < expected.len() {
            assert!(start.elapsed() < PATIENCE, "of the messages of round {round} came {come:?}");
            own.poll(&mut |_| {}).unwrap();
            let mut take = |event: Event<'_>| match event {
                Event::Message { bytes, .. } => come.push(bytes.to_vec()),
                other => panic!("{other:?}"),
            };
            peer.poll(&mut take).unwrap();
        }
        come.sort();
        assert_eq!(come, expected);
    }
}
