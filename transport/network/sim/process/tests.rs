//! Properties of the network between processes beyond the contract: refusals, what survives a death, bounds, and
//! speed.

use super::frame::tests::{Dice, samples};
use super::frame::{Frame, Head, Hello, Piece, encode};
use super::*;
use crate::transport::network::imm::ImmValue;
use crate::transport::network::sim::config::{DeadPeers, LinkModel};
use crate::transport::network::sim::endpoint_state;
use crate::transport::network::{Failure, Place, Reason};
use crate::transport::world::fds::SHORT_HERE;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

mod traffic;

const BYTES: usize = 4096;
/// Around each region, and never written.
const MARGIN: usize = 1 << 16;
const GUARD: u8 = 0xA5;
const TOKEN: &[u8] = b"token of these tests";

/// A rank with one region, for both ends of writes. The memory is leaked, so nothing outlives it.
struct Node {
    endpoint: ProcessEndpoint,
    base: *mut u8,
    bytes: usize,
    sent: Vec<u64>,
    /// `None` of those that were dropped.
    failed: Vec<(u64, Option<Failure>)>,
    imms: Vec<u32>,
    messages: Vec<Vec<u8>>,
}

impl Node {
    fn new(rank: u32, bytes: usize, config: SimConfig) -> Node {
        let endpoint = ProcessEndpoint::open(Rank(rank), TOKEN, config).unwrap();
        let all = Box::leak(vec![GUARD; bytes + 2 * MARGIN].into_boxed_slice()).as_mut_ptr();
        let base = all.wrapping_add(MARGIN);
        let mut node = Node { endpoint, base, bytes, sent: vec![], failed: vec![], imms: vec![], messages: vec![] };
        node.fill(0);
        // SAFETY: leaked, and accessed through the pointer only.
        unsafe { node.endpoint.register(Span::host(base.expose_provenance() as u64, bytes)) }.unwrap();
        node
    }

    fn poll(&mut self) -> usize {
        let Node { endpoint, sent, failed, imms, messages, .. } = self;
        let on_event = &mut |event: Event<'_>| match event {
            Event::Sent { token } => sent.push(token),
            Event::Failed { token, failure, .. } => failed.push((token, Some(failure))),
            Event::Dropped { token, .. } => failed.push((token, None)),
            Event::Imm { imm } => imms.push(imm.bits()),
            Event::Message { bytes, .. } => messages.push(bytes.into()),
        };
        endpoint.poll(on_event).unwrap()
    }

    fn fill(&self, byte: u8) {
        // SAFETY: this node's leaked memory.
        unsafe { self.base.write_bytes(byte, self.bytes) };
    }

    fn byte(&self, offset: usize) -> u8 {
        // SAFETY: inside this node's leaked memory, by the tests below.
        unsafe { self.base.add(offset).read_volatile() }
    }

    fn is_filled(&self, byte: u8) -> bool {
        (0..self.bytes).all(|at| self.byte(at) == byte)
    }

    fn margins_are_untouched(&self) -> bool {
        let all = self.base.wrapping_sub(MARGIN);
        // SAFETY: the margins were allocated with the region.
        let byte = |at: usize| unsafe { all.add(at).read_volatile() };
        (0..MARGIN).chain(MARGIN + self.bytes..2 * MARGIN + self.bytes).all(|at| byte(at) == GUARD)
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

fn world(ranks: u32, bytes: usize, config: SimConfig) -> Vec<Node> {
    let mut nodes: Vec<_> = (0..ranks).map(|rank| Node::new(rank, bytes, config.clone())).collect();
    connect(&mut nodes);
    nodes
}

/// Every rank with every other, and with itself.
fn connect(nodes: &mut [Node]) {
    let addresses: Vec<_> =
        nodes.iter_mut().map(|node| (node.endpoint.rank(), node.endpoint.address(Rank(0)).unwrap())).collect();
    for node in nodes {
        for (peer, address) in &addresses {
            node.endpoint.connect(*peer, address).unwrap();
        }
    }
}

/// Polls all nodes until `done`.
fn pump_until(nodes: &mut [Node], what: &str, done: impl Fn(&[Node]) -> bool) {
    let start = Instant::now();
    while !done(nodes) {
        assert!(start.elapsed() < Duration::from_secs(20), "waited in vain for {what}");
        nodes.iter_mut().for_each(|node| _ = node.poll());
    }
}

fn pump(nodes: &mut [Node], times: usize) {
    (0..times).for_each(|_| nodes.iter_mut().for_each(|node| _ = node.poll()));
}

fn cx7() -> LinkModel {
    LinkModel { gbps: 400.0, latency_us: 2.0, per_message_us: 0.1 }
}

fn eager() -> SimConfig {
    SimConfig { eager_permille: 1000, ..SimConfig::calm() }
}

// ---- who is let in, and with what

/// A connection to a node's door, with nothing sent yet.
fn dial(node: &Node) -> OwnedFd {
    socket::dial(&node.endpoint.door.nonce).unwrap().unwrap()
}

fn hello(node: &Node, token: &[u8]) -> Vec<u8> {
    let hello = Hello { rank: Rank(7), nics: 1, key: 77, token };
    let mut out = Vec::new();
    encode(&mut out, Head { key: node.endpoint.core.endpoint.key, stamp_ns: 0 }, &Frame::Hello(hello));
    out
}

#[test]
fn a_stranger_let_in() {
    let mut node = Node::new(0, BYTES, SimConfig::calm());
    let good = hello(&node, TOKEN);
    let changed = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    };
    let key = node.endpoint.core.endpoint.key;
    let mut message = Vec::new();
    encode(&mut message, Head { key, stamp_ns: 0 }, &Frame::Message { number: 1, bytes: b"let me in" });
    let longer = hello(&node, &[TOKEN, b"!"].concat());
    let strangers: [(&str, Vec<u8>); 10] = [
        ("another format", changed(0)),
        ("another version", changed(4)),
        ("another kind", changed(6)),
        ("another key", changed(8)),
        ("a rank beyond all", changed(24 + 3)),
        ("other NICs", changed(24 + 4)),
        ("another token", changed(24 + 16)),
        ("half a token", good[..good.len() - 4].to_vec()),
        ("a longer token", longer),
        ("no hello", message),
    ];
    for (number, (what, bytes)) in (1u64..).zip(&strangers) {
        let fd = dial(&node);
        assert_eq!(socket::send_frame(&fd, bytes), socket::Sending::Sent);
        node.poll();
        assert_eq!(node.endpoint.refused().total(), number, "{what}");
        assert_eq!(node.endpoint.refused().connections, number, "{what}");
        assert_eq!(socket::receive(&fd, &mut [0; 64]), socket::Receipt::Ended, "{what}: not hung up on");
    }
    let fd = dial(&node);
    assert_eq!(socket::send_frame(&fd, &good), socket::Sending::Sent);
    node.poll();
    assert_eq!(node.endpoint.refused().total(), strangers.len() as u64);
    assert_eq!(socket::receive(&fd, &mut [0; 64]), socket::Receipt::Nothing, "a member is hung up on");
}

#[test]
fn a_crowd_of_silent_strangers_that_keeps_members_out() {
    let mut nodes = vec![Node::new(0, BYTES, SimConfig::calm()), Node::new(1, BYTES, SimConfig::calm())];
    let crowd: Vec<OwnedFd> = (0..300).map(|_| dial(&nodes[1])).collect();
    connect(&mut nodes);
    assert_eq!(nodes[0].post(1, 1, 8), Posted::Accepted);
    pump_until(&mut nodes, "a write past the crowd", |nodes| nodes[1].imms == [1]);
    assert!(nodes[1].endpoint.refused().connections >= 44, "more strangers than may wait");
    drop(crowd);
    pump(&mut nodes, 10);
    assert_eq!(nodes[1].endpoint.refused().connections, 300);
}

#[test]
fn a_peer_with_another_token_that_reaches_memory() {
    let mut nodes = vec![Node::new(0, BYTES, SimConfig::calm()), Node::new(1, BYTES, SimConfig::calm())];
    nodes[1].endpoint = ProcessEndpoint::open(Rank(1), b"another job", SimConfig::calm()).unwrap();
    let span = Span::host(nodes[1].base.expose_provenance() as u64, BYTES);
    // SAFETY: leaked, and accessed through the pointer only.
    unsafe { nodes[1].endpoint.register(span) }.unwrap();
    connect(&mut nodes);
    nodes[0].fill(1);
    assert_eq!(nodes[0].post(1, 1, BYTES), Posted::Accepted);
    pump_until(&mut nodes, "a failure", |nodes| nodes[0].failed.len() == 1);
    pump(&mut nodes, 100);
    assert!(nodes[1].imms.is_empty() && nodes[1].is_filled(0));
    assert_eq!(nodes[1].endpoint.refused().connections, 1);
}

#[test]
fn a_peer_that_has_not_connected_back() {
    let mut nodes = vec![Node::new(0, BYTES, SimConfig::calm()), Node::new(1, BYTES, SimConfig::calm())];
    let address = nodes[1].endpoint.address(Rank(0)).unwrap();
    nodes[0].endpoint.connect(Rank(1), &address).unwrap();
    nodes[0].fill(5);
    assert_eq!(nodes[0].post(1, 1, 8), Posted::Accepted);
    assert_eq!(nodes[0].endpoint.send(Rank(1), b"anyone?"), Ok(Posted::Accepted));
    pump_until(&mut nodes, "a failure", |nodes| !nodes[0].failed.is_empty());
    pump(&mut nodes, 100);
    assert_eq!(nodes[0].failed, [(1, Some(Reason::Unreachable.into()))]);
    assert!(nodes[1].imms.is_empty() && nodes[1].messages.is_empty() && nodes[1].is_filled(0));
    assert_eq!((nodes[1].endpoint.refused().unconnected, nodes[0].endpoint.counts().unreachable), (2, 1));
    // Nothing of it appears later, and later posts arrive.
    let address = nodes[0].endpoint.address(Rank(0)).unwrap();
    nodes[1].endpoint.connect(Rank(0), &address).unwrap();
    assert_eq!(nodes[0].post(1, 2, 8), Posted::Accepted);
    pump_until(&mut nodes, "a write", |nodes| nodes[1].imms == [2]);
}

#[test]
fn an_address_with_one_bit_changed() {
    let mut nodes = world(3, BYTES, SimConfig::calm());
    let good = nodes[1].endpoint.address(Rank(0)).unwrap();
    for bit in 0..good.len() * 8 {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(nodes[0].endpoint.connect(Rank(1), &bytes).is_err(), "bit {bit}");
    }
    let fields = Address::decode(&good).unwrap();
    let forged = [
        ("another door", Address { nonce: [7; 16], key: 1, ..fields.clone() }),
        ("other NICs", Address { nics: 2, ..fields.clone() }),
        ("a shrunken region", Address { regions: vec![5], ..fields.clone() }),
    ];
    for (what, address) in forged {
        let refused = nodes[0].endpoint.connect(Rank(1), &address.encode());
        assert!(matches!(refused, Err(Error::Transport { .. })), "{what}: {refused:?}");
    }
    assert!(nodes[0].endpoint.connect(Rank(2), &good).is_err(), "the address of another rank");
    assert_eq!(nodes[0].post(1, 1, 8), Posted::Accepted);
    pump_until(&mut nodes, "a write after refused addresses", |nodes| nodes[1].imms == [1] && nodes[0].sent == [1]);
}

#[test]
fn a_write_beyond_the_regions_of_its_receiver() {
    let mut nodes = vec![Node::new(0, 1 << 20, SimConfig::calm()), Node::new(1, BYTES, SimConfig::calm())];
    let address = nodes[0].endpoint.address(Rank(0)).unwrap();
    nodes[1].endpoint.connect(Rank(0), &address).unwrap();
    let fields = Address::decode(&nodes[1].endpoint.address(Rank(0)).unwrap()).unwrap();
    let forged = Address { regions: vec![1 << 20, 64], ..fields };
    nodes[0].endpoint.connect(Rank(1), &forged.encode()).unwrap();
    nodes[0].fill(3);
    assert_eq!(nodes[0].post(1, 1, BYTES + 1), Posted::Accepted);
    assert_eq!(nodes[0].post(1, 2, 1 << 20), Posted::Accepted);
    let region = Place { region: RegionId(1), offset: 0 };
    let place = Place { region: RegionId(0), offset: 0 };
    let imm = ImmValue::from_bits(3);
    let none = WriteImm { nic: 0, peer: Rank(1), source: place, target: region, bytes: 0, imm, token: 3 };
    assert_eq!(nodes[0].endpoint.post(&none), Ok(Posted::Accepted));
    assert_eq!(nodes[0].post(1, 4, BYTES), Posted::Accepted);
    pump_until(&mut nodes, "all ends", |nodes| nodes[0].failed.len() + nodes[0].sent.len() == 4);
    pump(&mut nodes, 100);
    nodes[0].failed.sort_by_key(|(token, _)| *token);
    assert_eq!(nodes[0].failed, [1, 2, 3].map(|token| (token, Some(Reason::RemoteAccess.into()))));
    assert_eq!((&nodes[0].sent[..], &nodes[1].imms[..]), (&[4][..], &[4][..]));
    assert!(nodes[1].is_filled(3) && nodes[1].margins_are_untouched());
    assert!(nodes[1].endpoint.refused().outside >= 3);
    assert_eq!(nodes[1].endpoint.refused().total(), nodes[1].endpoint.refused().outside);
}

#[test]
fn settings_that_make_no_sense() {
    let open = |rank, token: &[u8], config| ProcessEndpoint::open(Rank(rank), token, config).map(drop);
    let still = SimConfig { clock: Clock::Virtual { tick_ns: 0 }, ..SimConfig::calm() };
    let bad = [
        ("clock", open(0, b"", still)),
        ("rank", open(MAX_RANKS as u32, b"", SimConfig::calm())),
        ("token", open(0, &[0; MAX_TOKEN + 1], SimConfig::calm())),
        ("packet_bytes", open(0, b"", SimConfig { packet_bytes: 0, ..SimConfig::calm() })),
    ];
    for (wanted, outcome) in bad {
        assert!(matches!(&outcome, Err(Error::Config { name, .. }) if *name == wanted), "{wanted}: {outcome:?}");
    }
    assert_eq!(open(MAX_RANKS as u32 - 1, &[0; MAX_TOKEN], SimConfig::calm()), Ok(()));
}

// ---- no descriptors left

/// Whether a poll reports that descriptors are short, in words that lead to the limit.
fn complains(node: &mut Node) -> bool {
    let polled = node.endpoint.poll(&mut |_| ());
    let named = |what: &str, advice: &str| what.contains("EMFILE") && advice.contains("open files");
    polled.is_err_and(|error| matches!(&error, Error::Transport { what, advice, .. } if named(what, advice)))
}

#[test]
fn a_shortage_of_descriptors_that_ends_an_endpoint() {
    let mut nodes: Vec<_> = (0..2).map(|rank| Node::new(rank, BYTES, SimConfig::calm())).collect();
    SHORT_HERE.set(true);
    connect(&mut nodes);
    assert_eq!(nodes[0].post(1, 1, 8), Posted::Accepted);
    pump(&mut nodes, 50);
    nodes[0].endpoint.outbound.shortage.patience = Duration::ZERO;
    assert!(complains(&mut nodes[0]), "connections that cannot be opened are not reported");
    // Now it can connect, and cannot be accepted.
    SHORT_HERE.set(false);
    nodes[0].poll();
    SHORT_HERE.set(true);
    pump(&mut nodes, 50);
    nodes[1].endpoint.inbound.shortage.patience = Duration::ZERO;
    assert!(complains(&mut nodes[1]), "connections that cannot be taken are not reported");
    assert!(nodes[0].failed.is_empty() && nodes[1].imms.is_empty());
    SHORT_HERE.set(false);
    pump_until(&mut nodes, "a write after the shortage", |nodes| nodes[1].imms == [1] && nodes[0].sent == [1]);
    assert_eq!(nodes.iter().map(|node| node.endpoint.counts().deaths).sum::<u64>(), 0);
}

// ---- frames that no member sends

/// A node that has one guest, to which it has connected.
fn host(config: SimConfig) -> (Vec<Node>, u64) {
    let nics = config.nics.len() as u32;
    let mut nodes = vec![Node::new(0, BYTES, config.clone()), Node::new(1, BYTES, config)];
    let address = nodes[1].endpoint.address(Rank(0)).unwrap();
    nodes[0].endpoint.connect(Rank(1), &address).unwrap();
    let ProcessEndpoint { core, inbound, .. } = &mut nodes[0].endpoint;
    let key = core.endpoint.channels[&Rank(1)].key;
    let mut bytes = Vec::new();
    let hello = Hello { rank: Rank(1), nics, key, token: TOKEN };
    encode(&mut bytes, Head { key: core.endpoint.key, stamp_ns: 0 }, &Frame::Hello(hello));
    inbound.introduce(core, None, &bytes);
    let guest = core.number() - 1;
    (nodes, guest)
}

/// Mostly whole pieces and messages in order, so that many are taken.
fn plausible(dice: &mut Dice, key: u64, number: u64, samples: &[(Vec<u8>, usize)]) -> Vec<u8> {
    let head = Head { key, stamp_ns: dice.roll() };
    let total = [0, 1, 700, BYTES as u32][dice.below(4)];
    let piece = Piece {
        number,
        nic: dice.below(2) as u8,
        target: Place { region: RegionId(0), offset: dice.below(BYTES) as u64 },
        imm: ImmValue::from_bits(dice.roll() as u32),
        total,
        at: 0,
    };
    let mut bytes = Vec::new();
    match dice.below(4) {
        0 => bytes = samples[[0, 2, 4, 5, 7][dice.below(5)]].0.clone(),
        1 => encode(&mut bytes, head, &Frame::Message { number, bytes: &[1; 20] }),
        2 => encode(&mut bytes, head, &Frame::Write(piece, &vec![9; total as usize])),
        _ => encode(&mut bytes, head, &Frame::Write(piece, &vec![9; (total as usize).div_ceil(2)])),
    }
    bytes
}

#[test]
fn a_frame_neither_taken_nor_counted() {
    let (mut nodes, guest) = host(SimConfig { packet_bytes: 512, ..SimConfig::hostile(1) });
    let (samples, mut taken) = (samples(), 0u64);
    let mut dice = Dice(1);
    for number in 0..300_000u64 {
        let ProcessEndpoint { core, inbound, .. } = &mut nodes[0].endpoint;
        let mut bytes = plausible(&mut dice, core.endpoint.key, number / 2, &samples);
        if dice.below(3) > 0 {
            dice.damage(&mut bytes);
        }
        let (refused, waiting) = (core.refused.total(), core.scheduled());
        inbound.take(core, guest, &bytes);
        let (counted, scheduled) = (core.refused.total() - refused, core.scheduled() - waiting);
        assert!(counted <= 1 && (counted == 1) == (scheduled == 0), "frame {number}: {counted} and {scheduled}");
        taken += 1 - counted;
        if number % 16 == 0 {
            nodes[0].poll();
        }
    }
    let refused = nodes[0].endpoint.refused();
    println!("{taken} of 300000 frames taken; {refused:?}");
    assert!(taken > 50_000 && refused.total() == 300_000 - taken);
    let kinds = [refused.malformed, refused.stale, refused.out_of_order, refused.outside];
    assert!(kinds.iter().all(|times| *times > 1000), "{refused:?}");
    assert!(nodes[0].margins_are_untouched() && !nodes[0].is_filled(0));
    pump_until(&mut nodes[..1], "rest", |nodes| nodes[0].endpoint.core.scheduled() == 0);
    assert!(!nodes[0].imms.is_empty() && !nodes[0].messages.is_empty());
}

#[test]
fn an_answer_neither_taken_nor_counted() {
    let config = SimConfig { nic_queue: 1 << 20, peer_queue: 1 << 20, ..SimConfig::calm() };
    let mut nodes = [Node::new(0, BYTES, config.clone()), Node::new(1, BYTES, config)];
    let address = nodes[1].endpoint.address(Rank(0)).unwrap();
    nodes[0].endpoint.connect(Rank(1), &address).unwrap();
    let mut dice = Dice(2);
    let (mut answers, mut posted) = (0, 0);
    for number in 0..200_000u64 {
        if number % 64 == 0 {
            assert_eq!(nodes[0].post(1, posted, 0), Posted::Accepted);
            posted += 1;
            nodes[0].poll();
        }
        let ProcessEndpoint { core, outbound, .. } = &mut nodes[0].endpoint;
        let number = dice.below(posted as usize + 3) as u64;
        let (taken, dropped) = (frame::Verdict::Taken, frame::Verdict::Dropped);
        let verdicts = [taken, frame::Verdict::Outside, frame::Verdict::Unconnected, dropped];
        let answer = frame::Answer { number, stamp_ns: dice.roll(), verdict: verdicts[dice.below(4)] };
        let mut bytes = Vec::new();
        frame::encode_answers(&mut bytes, Head { key: core.endpoint.key, stamp_ns: 0 }, std::iter::once(&answer));
        if dice.below(3) > 0 {
            dice.damage(&mut bytes);
        }
        answers += match frame::decode(&bytes) {
            Ok((_, Frame::Answers(all))) => all.iter().count() as u64,
            _ => 1,
        };
        outbound.take(core, Rank(1), &bytes);
    }
    (0..1000).for_each(|_| _ = nodes[0].poll());
    let refused = nodes[0].endpoint.refused();
    let mut ended: Vec<u64> = nodes[0].sent.iter().copied().chain(nodes[0].failed.iter().map(|(t, _)| *t)).collect();
    let all = ended.len();
    ended.sort();
    ended.dedup();
    assert_eq!(ended.len(), all, "a write completed twice");
    println!("{all} writes completed; {refused:?}");
    assert!(all > 200 && refused.malformed > 10_000 && refused.stale > 1000 && refused.out_of_order > 10_000);
    // A frame to another key counts once, whatever is in it.
    assert!(refused.total() + all as u64 <= answers && refused.total() >= 190_000, "{refused:?}, {all}, {answers}");
}

#[test]
fn noise_from_a_member_that_reaches_memory() {
    let mut nodes = vec![Node::new(0, BYTES, SimConfig::calm()), Node::new(1, BYTES, SimConfig::calm())];
    let address = nodes[1].endpoint.address(Rank(0)).unwrap();
    nodes[0].endpoint.connect(Rank(1), &address).unwrap();
    let fd = dial(&nodes[0]);
    let key = nodes[0].endpoint.core.endpoint.channels[&Rank(1)].key;
    let mut bytes = Vec::new();
    let hello = Hello { rank: Rank(1), nics: 1, key, token: TOKEN };
    encode(&mut bytes, Head { key: nodes[0].endpoint.core.endpoint.key, stamp_ns: 0 }, &Frame::Hello(hello));
    assert_eq!(socket::send_frame(&fd, &bytes), socket::Sending::Sent);
    nodes[0].poll();
    let mut dice = Dice(3);
    let mut longest = samples()[3].0.clone();
    longest[8..16].copy_from_slice(&nodes[0].endpoint.core.endpoint.key.to_le_bytes());
    longest[24 + 30] = 0;
    assert!(frame::decode(&longest).is_ok() && longest.len() == MAX_FRAME, "but for its region, as good as any");
    for number in 0..5000u64 {
        let noise: Vec<u8> = (0..1 + dice.below(200)).map(|_| dice.roll() as u8).collect();
        // The longest frame that there can be, and more.
        let frame = if number % 100 == 0 { [&longest[..], &noise].concat() } else { noise };
        assert_eq!(socket::send_frame(&fd, &frame), socket::Sending::Sent);
        nodes[0].poll();
        assert_eq!(nodes[0].endpoint.refused().malformed, number + 1);
    }
    // The connection has not suffered.
    let piece = Piece {
        number: 1,
        nic: 0,
        target: Place { region: RegionId(0), offset: 0 },
        imm: ImmValue::from_bits(5),
        total: 1,
        at: 0,
    };
    let head = Head { key: nodes[0].endpoint.core.endpoint.key, stamp_ns: 0 };
    encode(&mut bytes, head, &Frame::Write(piece, &[6]));
    assert_eq!(socket::send_frame(&fd, &bytes), socket::Sending::Sent);
    pump_until(&mut nodes, "a write after noise", |nodes| nodes[0].imms == [5]);
    assert!(nodes[0].byte(0) == 6 && nodes[0].byte(1) == 0 && nodes[0].margins_are_untouched());
}

/// Gives the guest's frame to the host.
fn deliver(nodes: &mut [Node], guest: u64, piece: Piece, payload: &[u8]) {
    let ProcessEndpoint { core, inbound, .. } = &mut nodes[0].endpoint;
    let mut bytes = Vec::new();
    encode(&mut bytes, Head { key: core.endpoint.key, stamp_ns: u64::MAX }, &Frame::Write(piece, payload));
    inbound.take(core, guest, &bytes);
}

#[test]
fn a_piece_out_of_order() {
    let real = SimConfig { clock: Clock::Real, nics: vec![LinkModel::FREE; 2], ..SimConfig::calm() };
    let (mut nodes, guest) = host(real);
    let target = Place { region: RegionId(0), offset: 100 };
    let first = Piece { number: 1, nic: 0, target, imm: ImmValue::from_bits(5), total: 200, at: 0 };
    let second = Piece { at: 80, ..first };
    deliver(&mut nodes, guest, second, &[9; 120]);
    assert_eq!(nodes[0].endpoint.refused().out_of_order, 1, "a second piece before the first");
    deliver(&mut nodes, guest, first, &[1; 80]);
    assert_eq!(nodes[0].endpoint.refused().out_of_order, 1);
    let wrong = [
        ("again", first),
        ("a gap", Piece { at: 81, ..first }),
        ("an overlap", Piece { at: 79, ..first }),
        ("another number", Piece { number: 2, ..second }),
        ("another NIC", Piece { nic: 1, ..second }),
        ("another place", Piece { target: Place { offset: 101, ..target }, ..second }),
        ("another immediate", Piece { imm: ImmValue::from_bits(6), ..second }),
        ("another length", Piece { total: 201, ..second }),
    ];
    for (count, (what, piece)) in (2..).zip(wrong) {
        deliver(&mut nodes, guest, piece, &[9; 80]);
        assert_eq!(nodes[0].endpoint.refused().out_of_order, count, "{what}");
    }
    pump(&mut nodes, 10);
    assert!(nodes[0].imms.is_empty() && nodes[0].byte(180) == 0);
    // Stamps from the end of time: a frame that was read has arrived, whatever its stamp.
    deliver(&mut nodes, guest, second, &[2; 120]);
    pump_until(&mut nodes, "the write", |nodes| nodes[0].imms == [5]);
    let seen: Vec<u8> = (99..301).map(|at| nodes[0].byte(at)).collect();
    assert_eq!(seen, [&[0][..], &[1; 80], &[2; 120], &[0]].concat());
    assert_eq!(nodes[0].endpoint.refused().total(), 9);
}

#[test]
fn an_answer_to_what_was_not_sent() {
    let mut nodes = [Node::new(0, 1 << 20, SimConfig::calm()), Node::new(1, 1 << 20, SimConfig::calm())];
    let address = nodes[1].endpoint.address(Rank(0)).unwrap();
    nodes[0].endpoint.connect(Rank(1), &address).unwrap();
    // More than the socket takes: so a part of the first is sent, and nothing of the second is once its NIC stops.
    assert_eq!(nodes[0].post(1, 1, 1 << 20), Posted::Accepted);
    (0..20).for_each(|_| _ = nodes[0].poll());
    nodes[0].endpoint.stop(0, 1 << 40);
    assert_eq!(nodes[0].post(1, 2, 8), Posted::Accepted);
    nodes[0].poll();
    let mut answer = |number, verdict| {
        let ProcessEndpoint { core, outbound, .. } = &mut nodes[0].endpoint;
        let (mut bytes, head) = (Vec::new(), Head { key: core.endpoint.key, stamp_ns: 0 });
        let answer = frame::Answer { number, stamp_ns: 0, verdict };
        frame::encode_answers(&mut bytes, head, std::iter::once(&answer));
        outbound.take(core, Rank(1), &bytes);
        nodes[0].poll();
        (nodes[0].endpoint.refused().out_of_order, nodes[0].sent.len(), nodes[0].failed.len())
    };
    assert_eq!(answer(1, frame::Verdict::Taken), (1, 0, 0), "a part is not all");
    assert_eq!(answer(2, frame::Verdict::Taken), (2, 0, 0));
    assert_eq!(answer(2, frame::Verdict::Outside), (3, 0, 0));
    assert_eq!(answer(3, frame::Verdict::Taken), (4, 0, 0));
    assert_eq!(answer(1, frame::Verdict::Outside), (4, 0, 1), "refused by its first piece");
    assert_eq!(answer(1, frame::Verdict::Taken), (5, 0, 1));
}

#[test]
fn a_frame_for_the_time_before_a_reset() {
    let (mut nodes, _) = host(SimConfig::calm());
    let old = nodes[0].endpoint.address(Rank(0)).unwrap();
    let old_key = nodes[0].endpoint.core.endpoint.key;
    nodes[0].endpoint.reset().unwrap();
    let address = nodes[1].endpoint.address(Rank(0)).unwrap();
    nodes[0].endpoint.connect(Rank(1), &address).unwrap();
    let ProcessEndpoint { core, inbound, .. } = &mut nodes[0].endpoint;
    let mut bytes = Vec::new();
    let hello = Hello { rank: Rank(1), nics: 1, key: core.endpoint.channels[&Rank(1)].key, token: TOKEN };
    encode(&mut bytes, Head { key: core.endpoint.key, stamp_ns: 0 }, &Frame::Hello(hello));
    inbound.introduce(core, None, &bytes);
    let guest = core.number() - 1;
    let piece = Piece {
        number: 1,
        nic: 0,
        target: Place { region: RegionId(0), offset: 0 },
        imm: ImmValue::from_bits(5),
        total: 1,
        at: 0,
    };
    encode(&mut bytes, Head { key: old_key, stamp_ns: 0 }, &Frame::Write(piece, &[6]));
    inbound.take(core, guest, &bytes);
    pump(&mut nodes, 100);
    assert_eq!((nodes[0].endpoint.refused().stale, nodes[0].endpoint.refused().total()), (1, 1));
    assert!(nodes[0].imms.is_empty() && nodes[0].is_filled(0));
    let refused = nodes[1].endpoint.connect(Rank(0), &old);
    assert!(matches!(refused, Err(Error::Transport { .. })), "the address before the reset: {refused:?}");
}

#[test]
fn a_region_taken_back_between_two_pieces_of_a_write() {
    let (mut nodes, guest) = host(SimConfig::calm());
    let piece = |number, at| Piece {
        number,
        nic: 0,
        target: Place { region: RegionId(0), offset: 100 },
        imm: ImmValue::from_bits(5),
        total: 200,
        at,
    };
    deliver(&mut nodes, guest, piece(1, 0), &[1; 80]);
    // A part of a write to another region, which goes on.
    let other = Box::leak(vec![GUARD; BYTES].into_boxed_slice()).as_mut_ptr();
    let span = Span::host(other.expose_provenance() as u64, BYTES);
    // SAFETY: leaked, and accessed through the pointer only.
    let region = unsafe { nodes[0].endpoint.register(span) }.unwrap();
    let there = |at| Piece { target: Place { region, offset: 0 }, ..piece(3, at) };
    deliver(&mut nodes, guest, there(0), &[4; 120]);
    assert_eq!(nodes[0].endpoint.deregister(RegionId(0)), Ok(Released::Done));
    nodes[0].fill(7);
    deliver(&mut nodes, guest, piece(1, 80), &[2; 120]);
    deliver(&mut nodes, guest, piece(2, 0), &[2; 120]);
    deliver(&mut nodes, guest, piece(2, 120), &[2; 80]);
    deliver(&mut nodes, guest, there(120), &[4; 80]);
    pump(&mut nodes, 100);
    assert!(nodes[0].is_filled(7) && nodes[0].endpoint.inbound.held() == 0);
    // SAFETY: inside the leaked memory.
    let seen = [0, 199, 200].map(|at| unsafe { other.add(at).read_volatile() });
    assert_eq!((seen, &nodes[0].imms[..]), ([4, 4, GUARD], &[5][..]));
    assert_eq!((nodes[0].endpoint.counts().dropped, nodes[0].endpoint.refused().total()), (2, 0));
}

#[test]
fn packets_of_a_region_taken_back_that_meet_a_write_of_the_same_number() {
    // All of a write but its last bytes is on its way when its region goes, and its number is used again: for a write
    // to a region that is too short for those packets, and for a message.
    let (mut nodes, guest) = host(SimConfig { packet_bytes: 64, ..SimConfig::calm() });
    let long = Piece {
        number: 1,
        nic: 0,
        target: Place { region: RegionId(0), offset: 0 },
        imm: ImmValue::from_bits(5),
        total: BYTES as u32,
        at: 0,
    };
    for number in [1, 2] {
        deliver(&mut nodes, guest, Piece { number, ..long }, &[1; BYTES - 1]);
    }
    let other = Box::leak(vec![GUARD; 2 * BYTES].into_boxed_slice()).as_mut_ptr();
    let span = Span::host(other.expose_provenance() as u64, 16);
    // SAFETY: leaked, and accessed through the pointer only.
    let region = unsafe { nodes[0].endpoint.register(span) }.unwrap();
    let short = Piece { target: Place { region, offset: 8 }, imm: ImmValue::from_bits(6), total: 8, ..long };
    // One that goes on, and keeps the guest.
    let third = Piece { number: 3, target: Place { region, offset: 0 }, ..short };
    deliver(&mut nodes, guest, third, &[4; 4]);
    assert_eq!(nodes[0].endpoint.deregister(RegionId(0)), Ok(Released::Done));
    nodes[0].fill(7);
    deliver(&mut nodes, guest, short, &[4; 4]);
    let ProcessEndpoint { core, inbound, .. } = &mut nodes[0].endpoint;
    let mut bytes = Vec::new();
    encode(&mut bytes, Head { key: core.endpoint.key, stamp_ns: 0 }, &Frame::Message { number: 2, bytes: b"again" });
    inbound.take(core, guest, &bytes);
    pump(&mut nodes, 100);
    assert!(nodes[0].imms.is_empty(), "half of a write, and its immediate is here");
    for piece in [short, third] {
        deliver(&mut nodes, guest, Piece { at: 4, ..piece }, &[4; 4]);
    }
    pump(&mut nodes, 100);
    // SAFETY: inside the leaked memory.
    let byte = |at: usize| unsafe { other.add(at).read_volatile() };
    let wrong = (0..2 * BYTES).find(|at| byte(*at) != if *at < 16 { 4 } else { GUARD });
    assert_eq!((wrong, nodes[0].is_filled(7)), (None, true));
    assert_eq!((&nodes[0].imms[..], &nodes[0].messages[..]), (&[6, 6][..], &[b"again".to_vec()][..]));
    assert_eq!((nodes[0].endpoint.inbound.held(), nodes[0].endpoint.refused().total()), (0, 0));
}

#[test]
fn a_write_that_was_dropped_before_its_time_and_delivers_another_of_its_number() {
    let (mut nodes, guest) = host(SimConfig::calm());
    let target = Place { region: RegionId(0), offset: 0 };
    let piece = |at| Piece { number: 1, nic: 0, target, imm: ImmValue::from_bits(6), total: 16, at };
    // As of a write that was placed, whose region was taken back before it was to be delivered.
    let earlier = shared::Arrival { guest, number: 1, serial: nodes[0].endpoint.core.number() };
    deliver(&mut nodes, guest, piece(0), &[1; 8]);
    let ProcessEndpoint { core, inbound, .. } = &mut nodes[0].endpoint;
    inbound.deliver(core, earlier);
    pump(&mut nodes, 100);
    assert!(nodes[0].imms.is_empty(), "half of a write, and its immediate is here");
    deliver(&mut nodes, guest, piece(8), &[2; 8]);
    pump_until(&mut nodes, "the write", |nodes| nodes[0].imms == [6]);
    assert_eq!([7, 8].map(|at| nodes[0].byte(at)), [1, 2]);
}

#[test]
fn a_network_between_processes_that_carries_no_payload() {
    let config = SimConfig { payload: false, ..SimConfig::calm() };
    let error = ProcessEndpoint::open(Rank(0), TOKEN, config).map(drop).unwrap_err();
    assert!(matches!(&error, Error::Config { name: "payload", .. }), "{error}");
}

#[test]
fn posts_to_a_revoked_region_are_dropped_while_another_peer_holds_it() {
    let mut nodes = world(3, BYTES, SimConfig::calm());
    pump(&mut nodes, 50);
    let give_back = |nodes: &mut [Node]| nodes[1].endpoint.deregister(RegionId(0)).unwrap();
    let poll_both = |nodes: &mut [Node]| (0..50).for_each(|_| nodes[..2].iter_mut().for_each(|node| _ = node.poll()));
    assert_eq!(give_back(&mut nodes), Released::Busy);
    // Rank 2 does not poll, so it does not let go.
    poll_both(&mut nodes);
    assert_eq!(nodes[0].post(1, 3, 8), Posted::Accepted);
    poll_both(&mut nodes);
    assert_eq!(give_back(&mut nodes), Released::Busy);
    assert_eq!((nodes[0].sent.len(), nodes[0].failed.len(), nodes[1].imms.len()), (0, 1, 0));
    assert_eq!(nodes[0].endpoint.counts().dropped, 1, "its sender dropped it");
    pump(&mut nodes, 100);
    assert_eq!(give_back(&mut nodes), Released::Done);
}
