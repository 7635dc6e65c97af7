//! Properties of the simulated network beyond the contract: time, speeds, disturbances on demand, and replay.

use super::*;
use crate::transport::network::imm::ImmValue;
use crate::transport::network::{Failure, Place, Reason};

const BYTES: usize = 4096;

/// A rank with one region, for both ends of writes. The memory is leaked, so nothing outlives it.
struct Node {
    endpoint: SimEndpoint,
    base: *mut u8,
    sent: Vec<u64>,
    /// `None` of those that were dropped.
    failed: Vec<(u64, Option<Failure>)>,
    imms: Vec<u32>,
    messages: usize,
}

impl Node {
    fn new(network: &Network, rank: u32, bytes: usize) -> Node {
        let base = Box::leak(vec![0u8; bytes].into_boxed_slice()).as_mut_ptr();
        let mut endpoint = network.endpoint(Rank(rank)).unwrap();
        // SAFETY: leaked, and accessed through the pointer only.
        unsafe { endpoint.register(Span::host(base as u64, bytes)) }.unwrap();
        Node { endpoint, base, sent: vec![], failed: vec![], imms: vec![], messages: 0 }
    }

    fn poll(&mut self) -> usize {
        let Node { endpoint, sent, failed, imms, messages, .. } = self;
        let on_event = &mut |event: Event<'_>| match event {
            Event::Sent { token } => sent.push(token),
            Event::Failed { token, failure, .. } => failed.push((token, Some(failure))),
            Event::Dropped { token, .. } => failed.push((token, None)),
            Event::Imm { imm } => imms.push(imm.bits()),
            Event::Message { .. } => *messages += 1,
        };
        endpoint.poll(on_event).unwrap()
    }

    fn fill(&self, byte: u8) {
        // SAFETY: the first BYTES of this node's leaked memory.
        unsafe { self.base.write_bytes(byte, BYTES) };
    }

    fn byte(&self, offset: usize) -> u8 {
        // SAFETY: inside this node's leaked memory, by the tests below.
        unsafe { self.base.add(offset).read_volatile() }
    }

    fn post(&mut self, peer: u32, number: u32, bytes: usize) -> Posted {
        self.post_on(0, peer, number, bytes)
    }

    fn post_on(&mut self, nic: u8, peer: u32, number: u32, bytes: usize) -> Posted {
        let place = Place { region: RegionId(0), offset: 0 };
        let write = WriteImm {
            nic,
            peer: Rank(peer),
            source: place,
            target: place,
            bytes: bytes as u32,
            imm: ImmValue::from_bits(number),
            token: u64::from(number),
        };
        self.endpoint.post(&write).unwrap()
    }
}

fn world(ranks: usize, bytes: usize, config: SimConfig) -> (Network, Vec<Node>) {
    let network = Network::new(ranks, config).unwrap();
    let mut nodes: Vec<_> = (0..ranks as u32).map(|rank| Node::new(&network, rank, bytes)).collect();
    connect(&mut nodes);
    (network, nodes)
}

fn connect(nodes: &mut [Node]) {
    let addresses: Vec<_> =
        nodes.iter_mut().map(|node| (node.endpoint.rank(), node.endpoint.address(Rank(0)).unwrap())).collect();
    for node in nodes {
        let own = node.endpoint.rank();
        for (peer, address) in addresses.iter().filter(|(peer, _)| *peer != own) {
            node.endpoint.connect(*peer, address).unwrap();
        }
    }
}

/// Only the time that the test gives passes.
fn still() -> SimConfig {
    SimConfig { clock: Clock::Virtual { tick_ns: 0 }, ..SimConfig::calm() }
}

#[test]
fn memory_of_a_gpu_that_the_processor_would_move() {
    assert!(Network::new(1, SimConfig::calm()).unwrap().endpoint(Rank(0)).unwrap().device_needs().host_memory);
}

#[test]
fn payload_that_is_placed_all_at_once_or_in_order() {
    let (mut partial, mut gaps) = (0, 0);
    for seed in 0..50 {
        let config = SimConfig { seed, clock: still().clock, stop_permille: 0, ..SimConfig::hostile(seed) };
        let (network, mut nodes) = world(2, BYTES, SimConfig { full_permille: 0, eager_permille: 0, ..config });
        nodes[0].fill(7);
        assert_eq!(nodes[0].post(1, seed as u32, BYTES), Posted::Accepted);
        nodes[0].endpoint.flush().unwrap();
        while nodes[1].imms.is_empty() {
            let placed: Vec<bool> = (0..BYTES / 64).map(|packet| nodes[1].byte(packet * 64 + 63) == 7).collect();
            let count = placed.iter().filter(|there| **there).count();
            partial += usize::from(count > 0 && count < placed.len());
            gaps += usize::from(placed.iter().skip_while(|there| **there).any(|there| *there));
            network.advance_ns(500);
            nodes[1].poll();
        }
        assert!((0..BYTES).all(|at| nodes[1].byte(at) == 7));
    }
    assert!(partial > 300 && gaps > 300, "{partial} views of a part, {gaps} with gaps");
}

/// One run of a hostile world on this thread.
fn run(seed: u64) -> (u64, Counts, Vec<Vec<u32>>) {
    let config = SimConfig { fail_permille: 20, ..SimConfig::hostile(seed) };
    let (network, mut nodes) = world(3, BYTES, config);
    for number in 0..150 {
        let from = number as usize % 3;
        let _ = nodes[from].post_on(number as u8 % 2, (from as u32 + 1 + number % 2) % 3, number, number as usize * 20);
        let _ = nodes[from].endpoint.send(Rank((from as u32 + 1) % 3), &number.to_le_bytes()).unwrap();
        nodes.iter_mut().for_each(|node| _ = node.poll());
    }
    network.kill(Rank(2));
    while let Some(at_ns) = network.next_due_ns() {
        network.advance_ns(at_ns.saturating_sub(network.now_ns()));
        nodes[..2].iter_mut().for_each(|node| _ = node.poll());
    }
    (network.trace_hash(), network.counts(), nodes.into_iter().map(|node| node.imms).collect())
}

#[test]
fn a_seed_that_does_not_replay() {
    let mut hashes = std::collections::BTreeSet::new();
    for seed in 0..40 {
        let first = run(seed);
        assert_eq!(first, run(seed), "seed {seed}");
        hashes.insert(first.0);
    }
    assert_eq!(hashes.len(), 40, "seeds change nothing");
}

#[test]
fn virtual_time_that_passes_by_itself() {
    let (network, mut nodes) = world(2, BYTES, SimConfig { nics: vec![cx7()], ..still() });
    assert_eq!(nodes[0].post(1, 1, 100), Posted::Accepted);
    (0..1000).for_each(|_| assert_eq!(nodes[0].poll() + nodes[1].poll(), 0));
    assert_eq!(network.now_ns(), 0);
    network.advance_ns(u64::MAX);
    assert_eq!((nodes[0].poll(), nodes[1].poll()), (1, 1));
    assert_eq!(network.next_due_ns(), None);
}

/// 400 Gb/s: 50 bytes a nanosecond.
fn cx7() -> LinkModel {
    LinkModel { gbps: 400.0, latency_us: 2.0, per_message_us: 0.1 }
}

/// When `count` immediates have reached a node.
fn time_of_arrival(network: &Network, node: &mut Node, count: usize) -> u64 {
    while node.imms.len() < count {
        network.advance_ns(network.next_due_ns().unwrap() - network.now_ns());
        while node.poll() > 0 {}
    }
    network.now_ns()
}

#[test]
fn writes_faster_or_slower_than_the_link() {
    let config = SimConfig { nics: vec![cx7(), LinkModel { gbps: 100.0, ..cx7() }], ..still() };
    let mib = 1 << 20;
    let assert_close =
        |time: u64, wanted: u64| assert!(time.abs_diff(wanted) <= wanted / 100, "{time} ns, not {wanted}");
    let (network, mut nodes) = world(2, mib, config.clone());
    let _ = nodes[0].post(1, 1, mib);
    assert_close(time_of_arrival(&network, &mut nodes[1], 1), 100 + 20_972 + 2_000);
    // Each NIC has its own speed, and they work side by side.
    let (network, mut nodes) = world(2, mib, config.clone());
    let _ = (nodes[0].post_on(0, 1, 1, mib), nodes[0].post_on(1, 1, 2, mib));
    assert_close(time_of_arrival(&network, &mut nodes[1], 1), 100 + 20_972 + 2_000);
    assert_close(time_of_arrival(&network, &mut nodes[1], 2), 100 + 83_886 + 2_000);
    // Three senders share the receiver's NIC.
    let (network, mut nodes) = world(4, mib, config.clone());
    (1..4).for_each(|rank| _ = nodes[rank].post(0, rank as u32, mib));
    assert_close(time_of_arrival(&network, &mut nodes[0], 3), 100 + 3 * 20_972 + 2_000);
    // The time of a message beyond its bytes.
    let (network, mut nodes) = world(2, mib, config);
    (0..1000).for_each(|number| _ = nodes[0].post(1, number, 0));
    assert_close(time_of_arrival(&network, &mut nodes[1], 1000), 100 * 1000 + 2_000);
}

#[test]
fn a_stopped_nic_that_stops_others_or_never_resumes() {
    let (network, mut nodes) = world(3, BYTES, SimConfig { nics: vec![LinkModel::FREE; 2], ..still() });
    network.stop(Rank(1), 0, 10_000);
    let _ = (nodes[0].post_on(0, 1, 1, 64), nodes[0].post_on(1, 1, 2, 64), nodes[0].post_on(0, 2, 3, 64));
    network.advance_ns(9_999);
    nodes.iter_mut().for_each(|node| _ = node.poll());
    assert_eq!((&nodes[1].imms[..], &nodes[2].imms[..]), (&[2][..], &[3][..]));
    network.advance_ns(1);
    nodes[1].poll();
    assert_eq!(nodes[1].imms, [2, 1]);
    assert_eq!((network.counts().stops, network.counts().stalled), (1, 1));
}

#[test]
fn a_failed_write_of_which_something_arrives() {
    let (network, mut nodes) = world(2, BYTES, SimConfig::calm());
    nodes[0].fill(9);
    network.fail_next(Rank(0), 2);
    (0..3).for_each(|number| _ = nodes[0].post(1, number, if number == 2 { 64 } else { BYTES }));
    network.advance_ns(100_000);
    nodes.iter_mut().for_each(|node| while node.poll() > 0 {});
    assert_eq!(
        nodes[0].failed,
        [0, 1].map(|token| (token, Some(Failure { reason: Reason::Other, code: endpoint_state::INJECTED })))
    );
    assert_eq!((&nodes[0].sent[..], &nodes[1].imms[..]), (&[2][..], &[2][..]));
    assert!(nodes[1].byte(63) == 9 && nodes[1].byte(64) == 0);
}

#[test]
fn one_full_peer_that_fills_the_queue_of_others() {
    let config = SimConfig { nic_queue: 8, peer_queue: 3, dead_peers: DeadPeers::Silent, ..still() };
    let (network, mut nodes) = world(4, BYTES, config);
    network.kill(Rank(1));
    let accepted = |node: &mut Node, peer| (0..10).filter(|n| node.post(peer, *n, 8) == Posted::Accepted).count();
    assert_eq!(accepted(&mut nodes[0], 1), 3);
    assert_eq!(accepted(&mut nodes[0], 2), 3);
    assert_eq!(accepted(&mut nodes[0], 3), 2, "the NIC's own queue has a bound, too");
    network.advance_ns(1);
    assert_eq!(accepted(&mut nodes[0], 2), 0, "slots are free when completions are handed out, not before");
    while nodes[0].poll() > 0 {}
    assert_eq!(nodes[0].sent.len(), 5);
    assert_eq!(accepted(&mut nodes[0], 2), 3);
    assert_eq!(accepted(&mut nodes[0], 1), 0);
}

#[test]
fn a_silent_peer_whose_writes_never_end() {
    let (network, mut nodes) = world(3, BYTES, SimConfig { dead_peers: DeadPeers::Silent, ..SimConfig::calm() });
    let _ = (nodes[0].post(1, 1, BYTES), nodes[2].post(1, 2, BYTES));
    network.kill(Rank(1));
    let _ = (nodes[0].post(1, 3, BYTES), nodes[2].post(1, 4, BYTES));
    network.advance_ns(1 << 40);
    assert_eq!(nodes[0].poll() + nodes[2].poll(), 0);
    // By a reset, or when the peer is replaced.
    nodes[0].endpoint.reset().unwrap();
    nodes[0].poll();
    assert_eq!(nodes[0].failed, [1, 3].map(|token| (token, Some(Reason::Flushed.into()))));
    nodes[1] = Node::new(&network, 1, BYTES);
    let address = nodes[1].endpoint.address(Rank(0)).unwrap();
    nodes[2].endpoint.connect(Rank(1), &address).unwrap();
    nodes[2].poll();
    assert_eq!(nodes[2].failed, [2, 4].map(|token| (token, Some(Reason::Flushed.into()))));
    assert_eq!((nodes[2].post(1, 5, 8), network.counts().unreachable), (Posted::Accepted, 3));
}

#[test]
fn messages_under_way_to_a_peer_that_leaves_keep_their_room_if_it_is_dead_and_silent() {
    let fail = DeadPeers::Fail { after_ns: 10 };
    for (dead_peers, dies, answer) in [
        (DeadPeers::Silent, true, Posted::Full),
        (fail, true, Posted::Accepted),
        (DeadPeers::Silent, false, Posted::Accepted),
        (fail, false, Posted::Accepted),
    ] {
        let (network, mut nodes) = world(2, BYTES, SimConfig { dead_peers, message_queue: 2, ..still() });
        let send = |nodes: &mut [Node]| nodes[0].endpoint.send(Rank(1), b"under way").unwrap();
        let sent = [(); 3].map(|()| send(&mut nodes));
        assert_eq!(sent, [Posted::Accepted, Posted::Accepted, Posted::Full]);
        if dies {
            network.kill(Rank(1));
        } else {
            nodes[1].endpoint.reset().unwrap();
        }
        assert_eq!(send(&mut nodes), answer, "{dead_peers:?}, dies: {dies}");
    }
}

#[test]
fn a_rank_that_comes_back_and_is_taken_for_its_former_self() {
    let (network, mut nodes) = world(2, BYTES, SimConfig::calm());
    let stale = nodes[1].endpoint.address(Rank(0)).unwrap();
    assert!(network.endpoint(Rank(1)).is_err(), "two endpoints for one rank");
    assert!(network.endpoint(Rank(2)).is_err());
    network.kill(Rank(1));
    let dead = std::mem::replace(&mut nodes[1], Node::new(&network, 1, BYTES));
    let mut endpoint = dead.endpoint;
    assert!(matches!(endpoint.poll(&mut |_| ()), Err(Error::Transport { .. })));
    assert!(endpoint.reset().is_err() && endpoint.address(Rank(0)).is_err());
    assert!(matches!(endpoint.send(Rank(0), b"boo"), Err(Error::Transport { .. })));
    drop(endpoint);
    assert!(nodes[0].endpoint.connect(Rank(1), &stale).is_err(), "connected to the dead");
    assert_eq!(nodes[0].post(1, 1, 8), Posted::Accepted);
    connect(&mut nodes);
    nodes[0].fill(3);
    let _ = (nodes[0].post(1, 2, 8), nodes[0].endpoint.send(Rank(1), b"welcome").unwrap());
    network.advance_ns(100_000);
    nodes.iter_mut().for_each(|node| while node.poll() > 0 {});
    assert_eq!((&nodes[1].imms[..], nodes[1].messages, nodes[1].byte(7)), (&[2][..], 1, 3));
    assert_eq!((nodes[0].failed.len(), &nodes[0].sent[..]), (1, &[2][..]));
}

#[test]
fn completion_taken_for_arrival() {
    let config = SimConfig { eager_permille: 1000, nics: vec![cx7()], ..still() };
    let (network, mut nodes) = world(2, BYTES, config);
    nodes[0].fill(1);
    let _ = nodes[0].post(1, 1, BYTES);
    network.advance_ns(10);
    nodes[0].poll();
    assert_eq!((&nodes[0].sent[..], nodes[1].byte(0)), (&[1][..], 0));
    nodes[0].fill(2);
    network.kill(Rank(0));
    network.advance_ns(1 << 20);
    nodes[1].poll();
    assert_eq!((&nodes[1].imms[..], nodes[1].byte(BYTES - 1)), (&[1][..], 1), "what was read must still arrive");
    assert_eq!(network.counts().completed_early, 1);
}

#[test]
fn a_source_that_changes_before_its_completion_fails_the_write() {
    for (changes, watch_sources) in [(true, true), (false, true), (true, false)] {
        let (network, mut nodes) = world(2, BYTES, SimConfig { watch_sources, nics: vec![cx7()], ..still() });
        nodes[0].fill(1);
        let _ = nodes[0].post(1, 1, BYTES);
        while nodes[1].poll() == 0 {
            network.advance_ns(10);
        }
        nodes[0].fill(if changes { 2 } else { 1 });
        network.advance_ns(1 << 20);
        nodes[0].poll();
        let (sent, failed) = (&nodes[0].sent[..], &nodes[0].failed[..]);
        match changes && watch_sources {
            true => assert_eq!((sent, failed), (&[][..], &[(1, Some(Reason::Local.into()))][..])),
            false => assert_eq!((sent, failed), (&[1][..], &[][..])),
        }
        assert_eq!(nodes[1].byte(BYTES - 1), 1);
    }
}

#[test]
fn an_address_with_one_bit_changed() {
    let (network, mut nodes) = world(3, BYTES, SimConfig::calm());
    let good = nodes[1].endpoint.address(Rank(0)).unwrap();
    for bit in 0..good.len() * 8 {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(nodes[0].endpoint.connect(Rank(1), &bytes).is_err(), "bit {bit}");
    }
    assert!(nodes[0].endpoint.connect(Rank(2), &good).is_err(), "the address of another rank");
    let forged = Address { regions: vec![1 << 40], ..Address::decode(&good).unwrap() };
    assert!(nodes[0].endpoint.connect(Rank(1), &forged.encode()).is_err(), "a longer region than there is");
    let mut other = Network::new(3, SimConfig::calm()).unwrap().endpoint(Rank(1)).unwrap();
    assert!(
        nodes[0].endpoint.connect(Rank(1), &other.address(Rank(0)).unwrap()).is_err(),
        "the address of another network"
    );
    drop(network);
}

#[test]
fn a_peer_that_has_not_connected_back() {
    let network = Network::new(2, SimConfig::calm()).unwrap();
    let mut nodes = [Node::new(&network, 0, BYTES), Node::new(&network, 1, BYTES)];
    let address = nodes[1].endpoint.address(Rank(0)).unwrap();
    nodes[0].endpoint.connect(Rank(1), &address).unwrap();
    nodes[0].fill(5);
    let _ = (nodes[0].post(1, 1, 8), nodes[0].endpoint.send(Rank(1), b"anyone?").unwrap());
    network.advance_ns(100_000);
    nodes.iter_mut().for_each(|node| _ = node.poll());
    assert_eq!((nodes[0].failed.len(), nodes[1].imms.len(), nodes[1].messages, nodes[1].byte(0)), (1, 0, 0, 0));
}

#[test]
fn settings_that_make_no_sense() {
    let calm = SimConfig::calm;
    let bad = [
        ("fail_permille", SimConfig { fail_permille: 1001, ..calm() }),
        ("full_permille", SimConfig { full_permille: 1000, ..calm() }),
        ("packet_bytes", SimConfig { packet_bytes: 0, ..calm() }),
        ("poll_batch", SimConfig { poll_batch: 0, ..calm() }),
        ("nics", SimConfig { nics: vec![], ..calm() }),
        ("nics", SimConfig { nics: vec![LinkModel::FREE; 5], ..calm() }),
        ("nics", SimConfig { nics: vec![LinkModel { gbps: f64::NAN, ..cx7() }], ..calm() }),
        ("nics", SimConfig { nics: vec![LinkModel { latency_us: -1.0, ..cx7() }], ..calm() }),
    ];
    for (wanted, config) in bad {
        let error = Network::new(2, config).map(drop).unwrap_err();
        assert!(matches!(&error, Error::Config { name, .. } if *name == wanted), "{error}");
    }
    for ranks in [0, MAX_RANKS + 1] {
        assert!(Network::new(ranks, calm()).is_err());
    }
}

#[test]
fn completions_of_a_former_peer_that_make_room_in_the_queue_of_the_new_one() {
    let (network, mut nodes) = world(2, BYTES, SimConfig { peer_queue: 2, nics: vec![cx7()], ..still() });
    let _ = (nodes[0].post(1, 1, 8), nodes[0].post(1, 2, 8));
    network.kill(Rank(1));
    nodes[1] = Node::new(&network, 1, BYTES);
    connect(&mut nodes);
    assert_eq!([3, 4, 5].map(|n| nodes[0].post(1, n, 8)), [Posted::Accepted, Posted::Accepted, Posted::Full]);
    nodes[0].poll();
    assert_eq!((nodes[0].failed.len(), nodes[0].post(1, 6, 8)), (2, Posted::Full));
}

#[test]
fn a_region_taken_back_in_the_middle_of_a_write() {
    let nics = vec![LinkModel { gbps: 8.0, latency_us: 1.0, per_message_us: 0.0 }];
    let (network, mut nodes) = world(3, BYTES, SimConfig { nics, packet_bytes: 64, let_go_ns: 0, ..still() });
    nodes[0].fill(3);
    let _ = (nodes[0].post(1, 1, BYTES), nodes[0].post(2, 2, BYTES));
    // A byte takes a nanosecond.
    network.advance_ns(1000 + BYTES as u64 / 2);
    let placed = |node: &Node| (0..BYTES).filter(|at| node.byte(*at) == 3).count();
    assert!((1..BYTES).contains(&placed(&nodes[1])));
    assert_eq!(nodes[1].endpoint.deregister(RegionId(0)), Ok(Released::Done));
    nodes[1].fill(9);
    assert_eq!(nodes[0].post(1, 3, BYTES), Posted::Accepted, "it is not notified yet");
    network.advance_ns(1 << 20);
    nodes.iter_mut().for_each(|node| while node.poll() > 0 {});
    assert_eq!((placed(&nodes[1]), nodes[1].imms.len(), &nodes[2].imms[..]), (0, 0, &[2][..]));
    assert_eq!((&nodes[0].sent[..], &nodes[0].failed[..]), (&[2][..], &[(1, None), (3, None)][..]));
    let counts = network.counts();
    assert_eq!((counts.dropped, counts.unreachable, counts.cut, counts.cut_off), (2, 0, 0, 1));
}

#[test]
fn a_region_waits_until_its_owners_writes_have_completed() {
    // The write takes 3.3 ms by a NIC of its own, and peers let go long before.
    let link = |gbps| LinkModel { gbps, latency_us: 1.0, per_message_us: 0.0 };
    let (network, mut nodes) = world(2, BYTES, SimConfig { nics: vec![link(8.0), link(0.01)], ..still() });
    assert_eq!(nodes[1].post_on(1, 0, 1, BYTES), Posted::Accepted);
    let give_back = |nodes: &mut [Node]| nodes[1].endpoint.deregister(RegionId(0)).unwrap();
    for _ in 0..10 {
        assert_eq!(give_back(&mut nodes), Released::Busy);
        network.advance_ns(200_000);
        nodes.iter_mut().for_each(|node| while node.poll() > 0 {});
    }
    assert!(nodes[1].sent.is_empty());
    // Less than after which peers that did not let go are cut.
    network.advance_ns(1 << 22);
    nodes.iter_mut().for_each(|node| while node.poll() > 0 {});
    assert_eq!((give_back(&mut nodes), &nodes[1].sent[..]), (Released::Done, &[1][..]));
}

#[test]
fn a_region_waits_until_its_writers_have_let_go() {
    let nics = vec![LinkModel { gbps: 8.0, latency_us: 1.0, per_message_us: 0.0 }];
    let (network, mut nodes) = world(3, BYTES, SimConfig { nics, ..still() });
    nodes[0].fill(3);
    let _ = nodes[0].post(1, 1, BYTES);
    let give_back = |nodes: &mut [Node]| nodes[1].endpoint.deregister(RegionId(0)).unwrap();
    assert_eq!(give_back(&mut nodes), Released::Busy);
    network.advance_ns(1 << 20);
    assert_eq!(give_back(&mut nodes), Released::Busy, "nobody has polled");
    nodes[2].poll();
    nodes[1].poll();
    assert_eq!(give_back(&mut nodes), Released::Busy, "rank 0 has not polled");
    // The write has arrived by now; what rank 0 posts after the notice is dropped.
    assert_eq!(nodes[0].post(1, 2, 8), Posted::Accepted);
    nodes[0].poll();
    assert_eq!(nodes[0].post(1, 3, 8), Posted::Accepted);
    network.advance_ns(1 << 20);
    nodes.iter_mut().for_each(|node| while node.poll() > 0 {});
    network.advance_ns(1 << 20);
    nodes.iter_mut().for_each(|node| while node.poll() > 0 {});
    assert_eq!(give_back(&mut nodes), Released::Done);
    assert_eq!(
        (&nodes[0].sent[..], &nodes[0].failed[..], &nodes[1].imms[..]),
        (&[1, 2][..], &[(3, None)][..], &[1, 2][..])
    );
    assert_eq!((network.counts().dropped, network.counts().cut_off), (1, 0));
}

#[test]
fn writes_take_receives_until_their_immediates_are_handed_out() {
    let config = SimConfig { receives: 3, clock: Clock::Virtual { tick_ns: 0 }, ..SimConfig::calm() };
    let (network, mut nodes) = world(3, BYTES, config);
    let post = |nodes: &mut [Node], from: usize, numbers: std::ops::Range<u32>| {
        numbers.for_each(|number| assert_eq!(nodes[from].post(2, number, 8), Posted::Accepted));
        network.advance_ns(1_000_000);
        nodes[from].poll();
    };
    // Of both peers together; the fourth finds none.
    post(&mut nodes, 0, 0..2);
    post(&mut nodes, 1, 2..4);
    assert_eq!((nodes[0].sent.len(), nodes[1].sent.len(), nodes[1].failed.len()), (2, 1, 1));
    assert_eq!(nodes[1].failed, [(3, Some(Reason::NotReady.into()))]);
    assert_eq!(network.counts().unready, 1);
    nodes[2].poll();
    assert_eq!(nodes[2].imms, [0, 1, 2]);
    post(&mut nodes, 0, 4..7);
    assert_eq!((nodes[0].sent.len(), nodes[0].failed.len()), (5, 0));
    // A write that a reset discards holds none.
    nodes[2].endpoint.reset().unwrap();
    connect(&mut nodes);
    post(&mut nodes, 0, 7..10);
    assert_eq!((nodes[0].sent.len(), nodes[0].failed.len(), network.counts().unready), (8, 0, 1));
}
