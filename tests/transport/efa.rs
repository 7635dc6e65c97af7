//! libfabric's provider efa under the contract, by its double (tests/doubles): within a process, and with each endpoint
//! in a process of its own. And the doorbells that the double counts.

use crate::contract;
use crate::double;
use crate::libfabric::{Libfabric, LibfabricProcesses};
use crate::rig::{Backend, Cluster, Log, Memory, PATIENCE, write};
use std::ffi::{CString, c_void};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tokenyard::internals::base::Rank;
use tokenyard::internals::transport::network::imm::ImmValue;
use tokenyard::internals::transport::network::libfabric::LibfabricEndpoint;
use tokenyard::internals::transport::network::{Event, Place, Posted, RegionId, Transport, WriteImm};

contract!(four_nics, Libfabric::efa(4));
contract!(between_processes, LibfabricProcesses("efa"));
contract!(@ from_threads, Libfabric::efa(1), regions_taken_back_from_threads);
contract!(@ processes_from_threads, LibfabricProcesses("efa"), regions_taken_back_from_threads);

/// Set in the process of its own that a test runs in: what the double counts is of its whole process.
const ALONE: &str = "TOKENYARD_TEST_ALONE";

/// Whether this is the process of the test alone; otherwise runs it in one, with these settings of the double.
fn alone(test: &str, settings: &[(&str, &str)]) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(ALONE, "1")
        .envs(settings.iter().map(|(name, value)| (format!("TOKENYARD_EFA_{name}"), value)))
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (printed, complained) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && printed.contains("1 passed"), "{printed}{complained}");
    false
}

/// What the double has counted, by number in `struct tokenyard_double_counts`: 12 numbers, one for each of 17 rules,
/// then posts and doorbells of 32 NICs.
fn counted(library: &Path, number: usize) -> u64 {
    let path = CString::new(library.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: C strings; the library is open already, and its function takes nothing and answers an address that stays.
    unsafe {
        let opened = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        assert!(!opened.is_null());
        let counts = libc::dlsym(opened, c"tokenyard_double_counts".as_ptr());
        assert!(!counts.is_null());
        let counts = std::mem::transmute::<*mut c_void, extern "C" fn() -> *const u64>(counts)();
        assert_eq!(*counts, 8 * (12 + 17 + 64), "the structure is another");
        assert!(number < 12 + 17 + 64);
        counts.add(number).read_volatile()
    }
}

/// Posts and doorbells of the first two NICs.
fn posts_and_doorbells(library: &Path) -> [[u64; 2]; 2] {
    [[29, 30], [61, 62]].map(|pair| pair.map(|number| counted(library, number)))
}

/// Completions that found no room: RULE_OVERRUN.
fn overruns(library: &Path) -> u64 {
    counted(library, 12 + 11)
}

/// The device delivers while its process sleeps. A rank may have as many writes outstanding as its queue takes, and as
/// many messages and immediates may come to it as it has receives for: together they find room in its completion queue.
#[test]
fn a_completion_queue_overruns_while_its_rank_sleeps() {
    const PEERS: usize = 16;
    const MESSAGES: usize = 256;
    let Some(library) = double::efa() else { return };
    if !alone("efa::a_completion_queue_overruns_while_its_rank_sleeps", &[("AUTO", "1")]) {
        return;
    }
    let mut backend = Libfabric::efa(1);
    // Nobody asks the sleeper for anything.
    backend.0.let_go = Duration::from_secs(600);
    let mut cluster = Cluster::new(&backend, 1 + PEERS);
    let limits = cluster.endpoint(0).limits();
    let mut log = Log::default();
    let (mut own, mut full) = (0, 0);
    while full < PEERS {
        match cluster.endpoint(0).post(&write(1 + own as usize % PEERS, own, 0, 8)).unwrap() {
            Posted::Accepted => (own, full) = (own + 1, 0),
            Posted::Full => full += 1,
        }
    }
    assert!(own > 2000, "its queue takes {own}");
    for number in 0..MESSAGES {
        let peer = 1 + number % PEERS;
        for (from, to) in [(0, peer), (peer, 0)] {
            assert_eq!(cluster.endpoint(from).send(Rank(to as u32), &number.to_le_bytes()), Ok(Posted::Accepted));
        }
    }
    cluster.endpoint(0).flush().unwrap();
    // From here on rank 0 sleeps. The others post and poll until all of theirs has completed, and all of its has come.
    let came = |log: &Log, asleep: bool| log.imms.keys().filter(|(to, _)| (*to == 0) == asleep).count() as u32;
    let (start, mut posted) = (Instant::now(), 0);
    while log.sent.len() < limits.receives as usize || came(&log, false) < own {
        assert!(start.elapsed() < PATIENCE, "{posted} posted and {} sent within {limits:?}", log.sent.len());
        for peer in 1..=PEERS {
            while posted < limits.receives
                && cluster.endpoint(peer).post(&write(0, posted, peer, 8)) == Ok(Posted::Accepted)
            {
                posted += 1;
            }
            cluster.endpoint(peer).poll(&mut |event| log.note(peer, event)).unwrap();
        }
    }
    assert_eq!(overruns(library), 0, "completions of a rank that sleeps are lost");
    cluster.pump_until("all completions", &mut log, |log| {
        log.sent.len() == (limits.receives + own) as usize
            && came(log, true) == limits.receives
            && log.messages.len() == 2 * MESSAGES
    });
    assert!(log.failed.is_empty() && log.dropped.is_empty());
    assert_eq!(overruns(library), 0);
}

#[test]
fn a_batch_of_writes_rings_one_doorbell_of_each_nic() {
    const PEERS: u32 = 63;
    const NICS: u8 = 2;
    let Some(library) = double::efa() else { return };
    if !alone("efa::a_batch_of_writes_rings_one_doorbell_of_each_nic", &[]) {
        return;
    }
    let mut config = Libfabric::efa(NICS.into()).0;
    // Nobody polls for long here, and asks nobody for it.
    config.let_go = Duration::from_secs(600);
    let memory = Memory::new(4096);
    let open = |rank| LibfabricEndpoint::open(Rank(rank), config.clone()).unwrap();
    let mut ranks: Vec<LibfabricEndpoint> = (0..=PEERS).map(open).collect();
    for rank in &mut ranks {
        // SAFETY: accessed through raw pointers only, and dropped after the endpoints.
        assert_eq!(unsafe { rank.register(memory.span()) }, Ok(RegionId(0)));
    }
    let (first, peers) = ranks.split_first_mut().unwrap();
    for (rank, peer) in (1..).map(Rank).zip(peers.iter_mut()) {
        first.connect(rank, &peer.address(Rank(0)).unwrap()).unwrap();
        peer.connect(Rank(0), &first.address(rank).unwrap()).unwrap();
    }
    let place = Place { region: RegionId(0), offset: 0 };
    let write = |nic, peer: u32| WriteImm {
        nic,
        peer: Rank(peer),
        source: place,
        target: place,
        bytes: 64,
        imm: ImmValue::from_bits(peer),
        token: 0,
    };
    let to_all: Vec<WriteImm> = (1..=PEERS).map(|peer| write(0, peer)).collect();
    let to_one: Vec<WriteImm> = [write(1, 9); 16].to_vec();
    let by_both: Vec<WriteImm> = (1..=40).map(|peer| write((peer % 2) as u8, peer)).collect();
    for (writes, doorbells) in [(to_all, [1, 0]), (to_one, [0, 1]), (by_both, [1, 1])] {
        let before = posts_and_doorbells(library);
        for write in &writes {
            assert_eq!(first.post(write), Ok(Posted::Accepted));
        }
        first.flush().unwrap();
        let after = posts_and_doorbells(library);
        let counted = |what: usize| [after[what][0] - before[what][0], after[what][1] - before[what][1]];
        let posts = |nic| writes.iter().filter(|write| write.nic == nic).count() as u64;
        assert_eq!((counted(0), counted(1)), ([posts(0), posts(1)], doorbells));
        let (start, mut sent, mut arrived) = (Instant::now(), 0, 0);
        while sent < writes.len() || arrived < writes.len() {
            assert!(start.elapsed() < PATIENCE, "{sent} sent and {arrived} arrived of {}", writes.len());
            first.poll(&mut |event| sent += usize::from(matches!(event, Event::Sent { .. }))).unwrap();
            for peer in peers.iter_mut() {
                peer.poll(&mut |event| arrived += usize::from(matches!(event, Event::Imm { .. }))).unwrap();
            }
        }
    }
}

/// An address with another key and a region that wraps, whose checksum is right: fnv1a of all before its last 8 bytes.
fn bent(address: &[u8]) -> Vec<u8> {
    let mut bent = address.to_vec();
    let end = bent.len() - 8;
    bent[8] ^= 1;
    bent[end - 16..end - 8].copy_from_slice(&u64::MAX.to_le_bytes());
    let sum = bent[..end]
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    bent[end..].copy_from_slice(&sum.to_le_bytes());
    bent
}

#[test]
fn a_refused_address_leaves_the_peer_of_the_same_name() {
    let Some(library) = double::efa() else { return };
    if !alone("efa::a_refused_address_leaves_the_peer_of_the_same_name", &[]) {
        return;
    }
    let mut config = Libfabric::efa(2).0;
    config.domains = ["rdmap1s0-rdm", "rdmap0s0"].map(String::from).to_vec();
    let memory = Memory::new(4096);
    let mut open = |rank| {
        let mut endpoint = LibfabricEndpoint::open(Rank(rank), config.clone()).unwrap();
        // SAFETY: accessed through raw pointers only, and dropped after the endpoints.
        assert_eq!(unsafe { endpoint.register(memory.span()) }, Ok(RegionId(0)));
        endpoint
    };
    let [mut one, mut two] = [0, 1].map(&mut open);
    let address = two.address(Rank(0)).unwrap();
    one.connect(Rank(1), &address).unwrap();
    two.connect(Rank(0), &one.address(Rank(1)).unwrap()).unwrap();
    let refused = one.connect(Rank(1), &bent(&address)).unwrap_err().to_string();
    assert!(refused.contains("has a region that wraps"), "{refused}");
    let place = Place { region: RegionId(0), offset: 0 };
    let write = WriteImm {
        nic: 0,
        peer: Rank(1),
        source: place,
        target: place,
        bytes: 64,
        imm: ImmValue::from_bits(5),
        token: 0,
    };
    let before = posts_and_doorbells(library);
    assert_eq!(one.post(&write), Ok(Posted::Accepted));
    let (start, mut events) = (Instant::now(), Vec::new());
    while events.len() < 2 {
        assert!(start.elapsed() < PATIENCE, "{events:?}");
        for rank in [&mut one, &mut two] {
            rank.poll(&mut |event| events.push(format!("{event:?}"))).unwrap();
        }
    }
    assert!(events.contains(&"Sent { token: 0 }".to_owned()), "{events:?}");
    let after = posts_and_doorbells(library);
    assert_eq!([after[0][0] - before[0][0], after[0][1] - before[0][1]], [0, 1], "NIC 0 is the second domain");
    config.domains = vec!["rdmap9s0-rdm".into()];
    let refused = LibfabricEndpoint::open(Rank(2), config).unwrap_err().to_string();
    assert!(refused.contains("rdmap9s0-rdm") && refused.contains("rdmap0s0-rdm, rdmap1s0-rdm"), "{refused}");
}

/// On the fabric `efa` the first write to a peer asks for a handshake. The error of one that nobody answers goes to the
/// event queue, and names no write.
#[test]
fn a_peer_gone_before_its_handshake_takes_others_with_it() {
    let Some(library) = double::efa() else { return };
    if !alone("efa::a_peer_gone_before_its_handshake_takes_others_with_it", &[("DIRECT", "0")]) {
        return;
    }
    let mut cluster = Cluster::new(&Libfabric::efa(1), 3);
    cluster.nodes[1] = None;
    let mut log = Log::default();
    for number in 0..4 {
        cluster.post(0, &write(1, number, 0, 8), &mut log);
    }
    for number in 4..40 {
        cluster.post(0, &write(2, number, 1, 8), &mut log);
    }
    cluster.pump_until("writes to the living", &mut log, |log| log.imms.len() == 36 && log.sent.len() == 36);
    cluster.settle(&mut log);
    assert!((0..4).all(|token| log.completions(0, token) == 0), "nothing names what waits for a handshake: {log:?}");
    assert_eq!(counted(library, 12 + 5), 1, "the handshake's packet finds no queue pair: RULE_DEST_QPN");
}

/// Within the fabric `efa` the provider shm would carry what goes to a peer of the same host, with faults of its own.
#[test]
fn a_peer_of_this_host_reached_by_shm() {
    if double::efa().is_none() || !alone("efa::a_peer_of_this_host_reached_by_shm", &[("DIRECT", "0"), ("LOCAL", "1")])
    {
        return;
    }
    let mut cluster = Cluster::new(&Libfabric::efa(1), 2);
    let mut log = Log::default();
    cluster.post(0, &write(1, 7, 0, 8), &mut log);
    cluster.pump_until("a write", &mut log, |log| log.completed(0, [7]));
    assert_eq!((log.sent.len(), log.failed.len()), (1, 0), "{log:?}");
}
