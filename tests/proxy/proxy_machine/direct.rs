//! One machine against a network with given answers: cases that a drawn world meets too rarely, or not alone.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::HashSet;
use std::hint::black_box;
use std::time::Instant;
use tokenyard::Rank;
use tokenyard::internals::proxy::machine::*;
use tokenyard::internals::proxy::wire::*;
use tokenyard::internals::transport::network::imm::{Decoded, ImmFields, ImmValue};
use tokenyard::internals::transport::network::{Failure, Reason, RegionId, WriteImm};

const C: ContextIdx = ContextIdx(0);
const D: Direction = Direction::Dispatch;
const SECOND: u64 = 1_000_000_000;
/// Why writes fail here, with a vendor's code.
const REFUSED_ACCESS: Failure = Failure { reason: Reason::RemoteAccess, code: 0x88 };

/// Rank 0 of a world with one rank a node.
struct Bench {
    machine: Machine,
    wire: Wire,
    hands: Hands,
}

#[derive(Default)]
struct Hands {
    /// Writes accepted, and peers whose queue is full.
    posts: Vec<WriteImm>,
    full: HashSet<u32>,
    refused: HashSet<u32>,
    /// Room left in a queue that all share.
    room: Option<usize>,
    sends: Vec<(Rank, Vec<u8>)>,
    flags: Vec<Flag>,
    reports: Vec<Report>,
    life: u16,
}

impl Outputs for Hands {
    fn post(&mut self, write: &WriteImm) -> Answer {
        if self.refused.contains(&write.peer.0) {
            return Answer::Refused;
        }
        if self.full.contains(&write.peer.0) || self.room == Some(0) {
            return Answer::Full;
        }
        self.room = self.room.map(|room| room - 1);
        self.posts.push(*write);
        Answer::Accepted
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Answer {
        if self.full.contains(&peer.0) {
            return Answer::Full;
        }
        self.sends.push((peer, message.to_vec()));
        Answer::Accepted
    }

    fn life(&self, context: ContextIdx) -> u16 {
        if context == C { self.life } else { 0 }
    }

    fn flag(&mut self, flag: Flag) {
        self.flags.push(flag);
    }

    fn report(&mut self, report: Report) {
        self.reports.push(report);
    }
}

fn wire(ranks: u32, nics: u8) -> Wire {
    let shape = MessageShape { first_bytes: 1088, chunk_bytes: 1024, chunks: 4, rows_offset: 64 };
    let nodes = Nodes::new((0..ranks).map(|rank| vec![Rank(rank)]).collect()).unwrap();
    let unused = MessageShape { chunks: 0, ..shape };
    let shapes = [shape, shape, unused, unused];
    Wire::new(WireInput { nodes, nics, shapes, staging_offset: 0, recv_buffer_offset: 1 << 30 }).unwrap()
}

impl Bench {
    fn new(ranks: u32, nics: u8) -> Bench {
        let config = MachineConfig { rank: Rank(0), world: ranks as usize, liveness: Liveness::default() };
        let machine = Machine::new(&config).unwrap();
        let mut bench = Bench { machine, wire: wire(ranks, nics), hands: Hands::default() };
        bench.step(Input::Time { now_ns: 100 * SECOND });
        bench.open(0, 1);
        bench
    }

    fn open(&mut self, generation: u8, first_epoch: u64) {
        let arenas = vec![RegionId(0); self.wire.nodes().world()];
        let config = ContextConfig { generation, first_epoch, wire: &self.wire, arenas: &arenas };
        self.machine.open(C, &config).unwrap();
    }

    fn step(&mut self, input: Input<'_>) {
        self.machine.step(input, &mut self.hands);
    }

    fn time(&mut self, seconds: f64) {
        self.step(Input::Time { now_ns: 100 * SECOND + (seconds * SECOND as f64) as u64 });
    }

    /// Rings the next chunk of the link to `peer` in dispatch.
    fn ring(&mut self, peer: u32, bytes: u32, chunks: u32) {
        let watch = WatchId { context: C, index: peer as u16 - 1 };
        self.step(Input::Doorbell { watch, bytes, chunks });
    }

    fn posts_to(&self, peer: u32) -> usize {
        self.hands.posts.iter().filter(|write| write.peer == Rank(peer)).count()
    }

    fn complete_all(&mut self) {
        for write in std::mem::take(&mut self.hands.posts) {
            self.step(Input::Sent { token: write.token });
        }
    }

    fn heartbeat_from(&mut self, peer: u32) {
        self.receive(peer, 1, 0);
    }

    fn leave_from(&mut self, peer: u32) {
        self.heartbeat_from(peer);
        self.receive(peer, 2, 0);
    }

    /// A control message from rank `peer` to rank 0.
    fn receive(&mut self, peer: u32, kind: u8, sequence: u16) {
        let mut message = [0; 20];
        message[..5].copy_from_slice(b"tyhb\x03");
        message[5] = kind;
        message[6..8].copy_from_slice(&sequence.to_le_bytes());
        message[8..12].copy_from_slice(&peer.to_le_bytes());
        self.step(Input::Message { peer: Rank(peer), bytes: &message });
    }

    /// Lets time pass, in which rank 2 lives.
    fn pass(&mut self, from: f64, to: f64) {
        let tenths = |seconds: f64| (seconds * 10.0) as u32;
        for tenth in tenths(from)..=tenths(to) {
            self.heartbeat_from(2);
            self.time(f64::from(tenth) / 10.0);
        }
    }
}

fn imm(source: u32, epoch: u64, chunk: u16, nic: u8) -> ImmValue {
    let fields = ImmFields {
        generation: 0,
        context: 0,
        kind: D.kind(),
        epoch: (epoch & 3) as u8,
        source: Rank(source),
        chunk,
        nic,
    };
    ImmValue::new(&fields).unwrap()
}

#[test]
fn a_blocked_peer_holds_up_nobody_else() {
    let mut b = Bench::new(5, 2);
    b.hands.full.insert(2);
    for epoch in 1..=6 {
        for peer in [1, 2, 3, 4] {
            b.ring(peer, 100, 1);
        }
        b.step(Input::Time { now_ns: 100 * SECOND + epoch });
        assert_eq!([1, 2, 3, 4].map(|peer| b.posts_to(peer)), [2, 0, 2, 2], "epoch {epoch}");
        assert!(b.machine.watches(C)[1].asleep && !b.machine.watches(C)[0].asleep);
        b.complete_all();
    }
    b.hands.full.clear();
    b.time(0.001);
    assert_eq!(b.posts_to(2), 2);
    assert!(!b.machine.watches(C)[1].asleep);
}

#[test]
fn a_link_that_moves_or_waits_takes_its_group_out_of_the_row() {
    let mut b = Bench::new(21, 1);
    let rows = |b: &Bench| b.machine.groups(C).iter().map(|group| group.row.is_some()).collect::<Vec<_>>();
    assert_eq!(rows(&b), [true; 6], "20 links in two directions");
    b.ring(10, 100, 2);
    assert_eq!(rows(&b), [true, false, true, true, true, true]);
    b.machine.even_out(C, 1);
    assert!(!rows(&b)[1], "peer 10 is a chunk ahead");
    [9, 11, 12, 13, 14, 15, 16].into_iter().for_each(|peer| b.ring(peer, 100, 2));
    b.machine.even_out(C, 1);
    let group = b.machine.groups(C)[1];
    let watch = b.machine.watches(C)[8];
    assert_eq!(group, Group { first: 8, links: 8, row: Some(Row { word: watch.word, epoch: watch.epoch }) });
    b.hands.full.insert(12);
    b.ring(12, 100, 2);
    b.machine.even_out(C, 1);
    assert!(!rows(&b)[1], "peer 12 is asleep in its old place");
}

#[test]
fn the_first_room_does_not_always_go_to_the_same_link() {
    let mut b = Bench::new(5, 1);
    b.hands.room = Some(0);
    (1..=4).for_each(|peer| b.ring(peer, 100, 1));
    for poll_once in 0..4 {
        b.hands.room = Some(1);
        b.step(Input::Time { now_ns: 100 * SECOND + poll_once });
        (1..=4).for_each(|peer| b.ring(peer, 100, 1));
    }
    assert_eq!([1, 2, 3, 4].map(|peer| b.posts_to(peer)), [1; 4]);
}

#[test]
fn a_full_queue_of_one_nic_posts_the_other_shards_once() {
    let mut b = Bench::new(2, 4);
    b.hands.room = Some(3);
    b.ring(1, 1088, 1);
    assert_eq!(b.hands.posts.len(), 3);
    b.hands.room = None;
    b.time(0.001);
    let nics: Vec<u8> = b.hands.posts.iter().map(|write| write.nic).collect();
    assert_eq!(nics, [0, 1, 2, 3]);
    assert_eq!(b.hands.posts.iter().map(|write| write.bytes).sum::<u32>(), 1088);
    b.complete_all();
    let free = Flag::StagingFree { context: C, direction: D, link: LinkIdx(0), epoch: 1 };
    assert_eq!(b.hands.flags, [free]);
}

#[test]
fn a_lost_peers_staging_becomes_free_and_its_doorbells_are_taken() {
    let mut b = Bench::new(3, 1);
    b.hands.full.insert(1);
    b.ring(1, 100, 1);
    b.ring(2, 100, 1);
    for tenth in 0..=302 {
        b.heartbeat_from(2);
        b.time(f64::from(tenth) / 10.0);
    }
    assert!(matches!(
        b.hands.reports[..],
        [Report::PeerLost { peer: Rank(1), cause: Cause::NeverReceived { silent_ns: 30_000_000_000.. } }]
    ));
    b.ring(1, 100, 2);
    b.ring(1, 100, 0);
    let free = |epoch| Flag::StagingFree { context: C, direction: D, link: LinkIdx(0), epoch };
    assert_eq!(b.hands.flags, [free(1), free(2)]);
    assert_eq!(b.posts_to(1), 0);
    assert_eq!(b.machine.stats().discarded, 3);
}

#[test]
fn a_peer_lost_by_a_failed_write_is_reported_once_and_not_posted_to() {
    let mut b = Bench::new(3, 2);
    b.ring(1, 100, 1);
    b.ring(2, 100, 1);
    let tokens: Vec<(u32, u64)> = b.hands.posts.iter().map(|write| (write.peer.0, write.token)).collect();
    for (peer, token) in tokens {
        let failed = Input::Failed { token, failure: REFUSED_ACCESS };
        b.step(if peer == 1 { failed } else { Input::Sent { token } });
    }
    let [Report::PeerLost { cause, .. }] = b.hands.reports[..] else { panic!("{:?}", b.hands.reports) };
    assert!(matches!(cause, Cause::WriteFailed { failure: REFUSED_ACCESS, .. }), "{cause:?}");
    let text = cause.to_string();
    assert!(text.contains("refused access to its memory, code 0x88;"), "{text}");
    assert!(b.machine.is_lost(Rank(1)) && !b.machine.is_lost(Rank(2)));
    assert_eq!(b.hands.flags.len(), 2, "both stagings are free");
    b.hands.posts.clear();
    b.ring(1, 100, 1);
    b.ring(2, 100, 1);
    assert_eq!((b.posts_to(1), b.posts_to(2)), (0, 2));
    b.hands.refused.insert(2);
    b.ring(2, 100, 1);
    assert_eq!(b.hands.reports[1], Report::PeerLost { peer: Rank(2), cause: Cause::Refused });
    b.machine.close(C);
    b.open(1, 1);
    assert!(!b.machine.is_lost(Rank(1)), "a context that names a peer brings it back");
}

#[test]
fn a_peer_that_closed_one_context_is_not_lost_to_the_others() {
    let mut b = Bench::new(3, 2);
    b.ring(1, 100, 1);
    b.ring(2, 100, 1);
    let tokens: Vec<(u32, u64)> = b.hands.posts.iter().map(|write| (write.peer.0, write.token)).collect();
    for (peer, token) in tokens {
        b.step(if peer == 1 { Input::Dropped { token } } else { Input::Sent { token } });
    }
    assert_eq!((b.machine.stats().dropped, b.machine.stats().lost, b.machine.under_way(C)), (2, 0, 0));
    assert!(b.hands.reports.is_empty() && !b.machine.is_lost(Rank(1)));
    assert_eq!(b.hands.flags.len(), 2, "both stagings are free");
    b.hands.posts.clear();
    b.ring(1, 100, 1);
    b.ring(2, 100, 1);
    assert_eq!((b.posts_to(1), b.posts_to(2), b.machine.stats().discarded), (0, 2, 1));
    // Another context goes on with the same peer.
    let arenas = [RegionId(0); 3];
    let config = ContextConfig { generation: 0, first_epoch: 1, wire: &b.wire, arenas: &arenas };
    let other = ContextIdx(1);
    b.machine.open(other, &config).unwrap();
    b.hands.posts.clear();
    b.step(Input::Doorbell { watch: WatchId { context: other, index: 0 }, bytes: 100, chunks: 1 });
    assert_eq!(b.posts_to(1), 2);
}

#[test]
fn a_peer_whose_context_is_still_open_is_sent_heartbeats_when_the_own_one_is_closed() {
    let heartbeats = |b: &mut Bench, from: f64, to: f64| {
        b.hands.sends.clear();
        b.pass(from, to);
        let to_each = |peer: u32| b.hands.sends.iter().filter(|(rank, _)| rank.0 == peer).count();
        [to_each(1), to_each(2)]
    };
    let mut b = Bench::new(3, 1);
    b.heartbeat_from(1);
    b.pass(0.0, 0.5);
    b.machine.close(C);
    // Rank 1 is silent, which is nobody's loss any more; rank 2 lives.
    assert!(heartbeats(&mut b, 0.6, 5.0).iter().all(|heartbeats| *heartbeats > 30), "{:?}", b.hands.sends.len());
    assert_eq!((&b.hands.reports[..], b.machine.stats().strange_messages), (&[][..], 0));
    // It is given up, and rank 2 leaves.
    b.pass(5.0, 40.0);
    let [given_up, living] = heartbeats(&mut b, 40.0, 42.0);
    assert!(given_up == 0 && living > 10, "{given_up} {living}");
    b.leave_from(2);
    b.hands.sends.clear();
    (430..450).for_each(|tenth| b.time(f64::from(tenth) / 10.0));
    assert_eq!((&b.hands.sends[..], &b.hands.reports[..]), (&[][..], &[][..]));
    // One that is named anew is missed again, and a network that begins anew has nobody to send to.
    b.open(1, 7);
    b.pass(45.0, 46.0);
    b.machine.close(C);
    b.machine.forget_parted();
    assert_eq!(heartbeats(&mut b, 46.0, 48.0), [0, 0]);
}

#[test]
fn a_peer_that_left_is_lost_once_it_owes_a_message() {
    let lost =
        |b: &Bench| matches!(b.hands.reports[..], [Report::PeerLost { peer: Rank(1), cause: Cause::Left { .. } }]);
    let mut b = Bench::new(3, 1);
    b.leave_from(1);
    b.pass(0.0, 3.0);
    assert_eq!(b.hands.reports, [], "nobody waits for it");
    // Its message may have left before it did, and come later.
    b.ring(2, 100, 1);
    b.step(Input::Immediate { imm: imm(1, 1, 0, 0) });
    b.pass(3.0, 6.0);
    assert_eq!(b.hands.reports, [], "its message is here");
    b.ring(2, 100, 1);
    assert_eq!(b.hands.reports, [], "not before its silence has lasted");
    b.pass(6.0, 8.0);
    assert!(lost(&b), "{:?}", b.hands.reports);
    // Also where only the own link shows that the epoch has begun.
    let mut b = Bench::new(3, 1);
    b.leave_from(1);
    b.ring(1, 100, 1);
    b.pass(0.0, 0.9);
    assert_eq!(b.hands.reports, []);
    b.pass(0.9, 2.0);
    assert!(lost(&b), "{:?}", b.hands.reports);
}

#[test]
fn writes_that_fail_to_a_peer_that_has_left_do_not_lose_it() {
    let mut b = Bench::new(3, 1);
    b.ring(1, 100, 1);
    b.leave_from(1);
    let token = b.hands.posts[0].token;
    b.step(Input::Failed { token, failure: REFUSED_ACCESS });
    b.hands.refused.insert(1);
    b.ring(1, 100, 1);
    assert_eq!((b.hands.reports.len(), b.machine.is_lost(Rank(1))), (0, false));
    assert_eq!((b.machine.stats().dropped, b.hands.flags.len()), (1, 2), "both stagings are free");
    let mut b = Bench::new(3, 1);
    b.leave_from(1);
    b.hands.refused.insert(1);
    b.ring(1, 100, 2);
    b.ring(1, 100, 0);
    assert_eq!((b.hands.reports.len(), b.hands.flags.len()), (0, 1), "refused first");
}

#[test]
fn messages_are_settled_once_all_of_them_are_posted() {
    let mut b = Bench::new(3, 2);
    assert!(b.machine.is_settled(C) && b.machine.is_settled(ContextIdx(3)));
    b.ring(1, 100, 2);
    assert!(!b.machine.is_settled(C), "a chunk is to come");
    b.hands.room = Some(1);
    b.ring(1, 100, 0);
    assert!(!b.machine.is_settled(C), "a shard is refused");
    b.hands.room = None;
    b.time(0.1);
    assert!(b.machine.is_settled(C) && b.machine.under_way(C) == 4);
    b.ring(2, 5000, 1);
    assert!(b.machine.is_settled(C), "a link that has stopped posts nothing any more");
}

#[test]
fn a_doorbell_that_cannot_be_stops_its_link_alone() {
    for (bytes, chunks) in [(1089, 1), (100, 0), (100, 5)] {
        let mut b = Bench::new(3, 1);
        b.ring(1, bytes, chunks);
        b.ring(2, 1088, 4);
        assert!(matches!(b.hands.reports[..], [Report::BadDoorbell { peer: Rank(1), epoch: 1, .. }]));
        assert_eq!((b.posts_to(1), b.posts_to(2)), (0, 1));
        assert!(b.machine.watches(C)[0].asleep);
        b.ring(1, 100, 1);
        assert_eq!(b.posts_to(1), 0, "a stopped link goes on");
    }
    // Staging packed again before the epoch two before has left.
    let mut b = Bench::new(2, 1);
    (0..3).for_each(|_| b.ring(1, 100, 1));
    let Report::BadDoorbell { epoch: 3, problem, .. } = b.hands.reports[0] else { panic!("{:?}", b.hands.reports) };
    assert_eq!((problem, b.posts_to(1)), (BadDoorbell::StagingInUse { posts: 1 }, 2));
}

#[test]
fn memory_that_was_never_written_is_no_doorbell() {
    let mut b = Bench::new(2, 1);
    b.machine.close(C);
    b.open(1, (1 << 32) - 1);
    b.ring(1, 100, 1);
    let watch = b.machine.watches(C)[0];
    assert_eq!(watch.epoch, 0);
    assert!(!watch.is_rung(0) && watch.is_rung(100));
}

#[test]
fn own_pause_is_not_a_peers_silence() {
    let mut b = Bench::new(2, 1);
    b.heartbeat_from(1);
    b.time(0.1);
    b.time(9.0);
    assert!(b.hands.reports.is_empty(), "the peer's heartbeats were not polled yet: {:?}", b.hands.reports);
    // Now this thread runs, and the peer is silent indeed.
    (1..30).for_each(|tenth| b.time(9.0 + f64::from(tenth) / 10.0));
    assert!(matches!(b.hands.reports[..], [Report::PeerLost { peer: Rank(1), cause: Cause::Silent { .. } }]));
}

#[test]
fn a_peer_that_reports_busy_may_be_silent_for_longer_until_it_is_back() {
    let mut b = Bench::new(3, 1);
    let limit = Liveness::default().first_contact_ns as f64 / 1e9;
    b.receive(1, 1, 1);
    // One that was sent before, and is late.
    b.receive(1, 1, 0);
    b.pass(0.0, limit - 1.0);
    assert!(b.hands.reports.is_empty(), "{:?}", b.hands.reports);
    // Back, and a late report of being busy: the usual time again.
    b.receive(1, 1, 2);
    b.receive(1, 1, 1);
    b.pass(limit - 0.9, limit + 1.0);
    let [Report::PeerLost { peer: Rank(1), cause: Cause::Silent { silent_ns } }] = b.hands.reports[..] else {
        panic!("{:?}", b.hands.reports)
    };
    assert!(silent_ns < 2 * SECOND, "{silent_ns}");
    // A busy peer is not waited for for ever, and its successor begins with its own sequence.
    b.machine.close(C);
    b.open(1, 7);
    b.receive(1, 1, 0);
    b.receive(1, 1, 1);
    b.pass(limit + 1.1, 2.0 * limit + 2.0);
    let [_, Report::PeerLost { peer: Rank(1), cause: Cause::Silent { silent_ns } }] = b.hands.reports[..] else {
        panic!("{:?}", b.hands.reports)
    };
    assert!(silent_ns > Liveness::default().first_contact_ns, "{silent_ns}");
}

#[test]
fn busy_is_reported_at_once_and_again_with_every_heartbeat() {
    let mut b = Bench::new(4, 1);
    let polls = |b: &mut Bench| {
        let sends = std::mem::take(&mut b.hands.sends);
        sends.into_iter().map(|(peer, bytes)| (peer.0, bytes[6])).collect::<HashSet<(u32, u8)>>()
    };
    b.time(0.01);
    b.hands.sends.clear();
    b.machine.set_busy(true);
    assert!(!b.machine.has_notified());
    b.hands.full.insert(2);
    b.time(0.01);
    assert_eq!((polls(&mut b), b.machine.has_notified()), (HashSet::from([(1, 1), (3, 1)]), false), "a queue is full");
    b.hands.full.clear();
    b.time(0.01);
    assert_eq!((polls(&mut b), b.machine.has_notified()), (HashSet::from([(2, 1)]), true));
    (2..=24).for_each(|hundredth| b.time(f64::from(hundredth) / 100.0));
    assert_eq!(polls(&mut b), HashSet::from([(1, 1), (2, 1), (3, 1)]));
    b.machine.set_busy(true);
    b.machine.set_busy(false);
    b.time(0.24);
    assert_eq!(polls(&mut b), HashSet::from([(1, 2), (2, 2), (3, 2)]));
}

#[test]
fn heartbeats_are_spread_over_the_interval() {
    let mut b = Bench::new(101, 1);
    let mut most = 0;
    for ms in 1..=200u32 {
        let before = b.hands.sends.len();
        b.time(f64::from(ms) / 1000.0);
        most = most.max(b.hands.sends.len() - before);
    }
    let peers: HashSet<u32> = b.hands.sends.iter().map(|(peer, _)| peer.0).collect();
    assert_eq!(peers.len(), 100);
    assert!((180..=220).contains(&b.hands.sends.len()) && most <= 4, "{} heartbeats, {most}", b.hands.sends.len());
}

#[test]
fn a_duplicate_or_impossible_immediate_is_counted_and_flags_nothing() {
    let mut b = Bench::new(3, 2);
    for nic in [0, 0, 1, 1] {
        b.step(Input::Immediate { imm: imm(1, 1, 0, nic) });
    }
    assert_eq!((b.hands.flags.len(), b.machine.stats().duplicates), (1, 2));
    let impossible = [imm(0, 1, 0, 0), imm(2047, 1, 0, 0), imm(1, 1, 4, 0), imm(1, 1, 0, 2)];
    let kinds = [3, 4, 5, 6, 7].map(|kind| ImmValue::from_bits(imm(1, 1, 0, 0).bits() | kind << 25));
    for imm in impossible.into_iter().chain(kinds) {
        b.step(Input::Immediate { imm });
    }
    for token in [0, 1 << 30, (1 << 32) | 1 << 13, (1 << 32) | 1 << 26, 1 << 32] {
        b.step(Input::Sent { token });
    }
    let stats = *b.machine.stats();
    assert_eq!((stats.impossible, stats.stale_completions), (9 + 4, 1), "{stats:?}");
    assert_eq!((b.hands.flags.len(), b.hands.reports.len()), (1, 0));
}

#[test]
fn a_late_write_of_a_closed_generation_counts_for_nothing() {
    let mut b = Bench::new(2, 1);
    b.ring(1, 100, 1);
    let token = b.hands.posts[0].token;
    b.machine.close(C);
    assert_eq!(b.machine.under_way(C), 1);
    b.step(Input::Immediate { imm: imm(1, 1, 0, 0) });
    b.open(1, 1);
    b.step(Input::Immediate { imm: imm(1, 1, 0, 0) });
    b.step(Input::Sent { token });
    let stats = b.machine.stats();
    assert_eq!((stats.stale_immediates, stats.stale_completions, b.hands.flags.len()), (2, 1, 0));
    b.ring(1, 100, 1);
    let Some(Decoded::Own(fields)) = b.hands.posts[1].imm.decode() else { panic!() };
    assert_eq!(fields.generation, 1);
    b.machine.close(C);
    b.step(Input::Sent { token: b.hands.posts[1].token });
    assert_eq!(b.machine.under_way(C), 0, "a closed context drains");
}

#[test]
fn what_cannot_be_opened_is_a_configuration_error() {
    let mut b = Bench::new(2, 1);
    let arenas = [RegionId(0); 2];
    let good = ContextConfig { generation: 0, first_epoch: 1, wire: &b.wire, arenas: &arenas };
    assert!(b.machine.open(C, &good).is_err(), "open already");
    let other = ContextIdx(1);
    let alone = wire(1, 1);
    let three = wire(3, 1);
    for bad in [
        ContextConfig { generation: 4, ..good },
        ContextConfig { first_epoch: 1 << 32, ..good },
        ContextConfig { arenas: &arenas[..1], ..good },
        ContextConfig { wire: &three, ..good },
    ] {
        assert!(b.machine.open(other, &bad).is_err(), "{bad:?}");
    }
    b.machine.open(other, &ContextConfig { wire: &alone, ..good }).unwrap();
    b.machine.open(ContextIdx(3), &good).unwrap();
    assert!(b.machine.open(ContextIdx(4), &good).is_err());
    let config = MachineConfig { rank: Rank(2), world: 2, liveness: Liveness::default() };
    assert!(Machine::new(&config).is_err());
    for (heartbeat_ns, silence_ns, first_contact_ns) in [(5, 5, 9), (9, 10, 9), (u64::MAX, u64::MAX, u64::MAX)] {
        let liveness = Liveness { heartbeat_ns, silence_ns, first_contact_ns };
        assert!(Machine::new(&MachineConfig { rank: Rank(0), world: 2, liveness }).is_err(), "{liveness:?}");
    }
    let rarely = Liveness { heartbeat_ns: u64::MAX - 1, silence_ns: u64::MAX, first_contact_ns: u64::MAX };
    let mut machine = Machine::new(&MachineConfig { rank: Rank(0), world: 2, liveness: rarely }).unwrap();
    machine.open(C, &ContextConfig { generation: 0, first_epoch: 1, wire: &wire(2, 1), arenas: &arenas }).unwrap();
    for now_ns in [1, u64::MAX / 2, u64::MAX] {
        machine.step(Input::Time { now_ns }, &mut b.hands);
    }
}

/// Counts this thread's allocations.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn ten_thousand_epochs_allocate_nothing() {
    let peers = 63;
    let mut b = Bench::new(peers + 1, 2);
    let mut sink = Sink { tokens: Vec::with_capacity(2 * peers as usize), ..Sink::default() };
    let mut imms = Vec::with_capacity(2 * peers as usize);
    let before = ALLOCATIONS.with(Cell::get);
    for epoch in 1..10_000u64 {
        // Every other epoch meets full queues, and gets through by retries.
        sink.room = if epoch % 2 == 0 { 20 } else { usize::MAX };
        for index in 0..peers as u16 {
            let watch = WatchId { context: C, index };
            b.machine.step(Input::Doorbell { watch, bytes: 1000, chunks: 1 }, &mut sink);
        }
        sink.room = usize::MAX;
        b.machine.step(Input::Time { now_ns: 100 * SECOND + epoch * 10_000 }, &mut sink);
        while let Some(token) = sink.tokens.pop() {
            b.machine.step(Input::Sent { token }, &mut sink);
        }
        imms.extend((1..=peers).flat_map(|source| [imm(source, epoch, 0, 1), imm(source, epoch, 0, 0)]));
        for imm in imms.drain(..) {
            b.machine.step(Input::Immediate { imm }, &mut sink);
        }
    }
    assert_eq!(ALLOCATIONS.with(Cell::get), before);
    assert_eq!(sink.flags, 2 * 9_999 * u64::from(peers));
    assert!(b.machine.stats().full > 0 && b.machine.stats().heartbeats > 0);
}

/// Takes everything and keeps what the cost measurement gives back.
struct Sink {
    tokens: Vec<u64>,
    room: usize,
    imms: u64,
    flags: u64,
}

impl Default for Sink {
    fn default() -> Sink {
        Sink { tokens: Vec::new(), room: usize::MAX, imms: 0, flags: 0 }
    }
}

impl Outputs for Sink {
    fn post(&mut self, write: &WriteImm) -> Answer {
        if self.room == 0 {
            return Answer::Full;
        }
        self.room -= 1;
        self.tokens.push(black_box(write).token);
        self.imms += u64::from(write.imm.bits());
        Answer::Accepted
    }

    fn send(&mut self, _: Rank, _: &[u8]) -> Answer {
        Answer::Accepted
    }

    fn flag(&mut self, flag: Flag) {
        black_box(flag);
        self.flags += 1;
    }

    fn report(&mut self, report: Report) {
        panic!("{report:?}");
    }
}

#[test]
fn own_code_costs_little() {
    for peers in [7u32, 63, 255] {
        let mut b = Bench::new(peers + 1, 1);
        let mut sink = Sink { tokens: Vec::with_capacity(peers as usize), ..Sink::default() };
        let (mut post, mut sent, mut count) = (u128::MAX, u128::MAX, u128::MAX);
        for epoch in 1..400u64 {
            let start = Instant::now();
            for index in 0..peers as u16 {
                let watch = WatchId { context: C, index };
                b.machine.step(Input::Doorbell { watch, bytes: 1000, chunks: 1 }, &mut sink);
            }
            post = post.min(start.elapsed().as_nanos());
            let start = Instant::now();
            for at in 0..sink.tokens.len() {
                b.machine.step(Input::Sent { token: sink.tokens[at] }, &mut sink);
            }
            sent = sent.min(start.elapsed().as_nanos());
            sink.tokens.clear();
            let imms: Vec<ImmValue> = (1..=peers).map(|source| imm(source, epoch, 0, 0)).collect();
            let start = Instant::now();
            for imm in imms {
                b.machine.step(Input::Immediate { imm }, &mut sink);
            }
            count = count.min(start.elapsed().as_nanos());
        }
        let each = |total: u128| total as f64 / f64::from(peers);
        println!(
            "{peers:4} peers: {:6.1} ns a post, {:6.1} ns a completion, {:6.1} ns an immediate",
            each(post),
            each(sent),
            each(count)
        );
        assert!(each(post) < 5000.0 && each(sent) < 5000.0 && each(count) < 5000.0, "own code is slow");
    }
}

#[test]
fn signs_of_life_of_devices_cross_with_heartbeats_and_those_of_lost_peers_do_not() {
    let mut b = Bench::new(3, 1);
    b.hands.life = 0x1234;
    b.time(0.2);
    assert!(!b.hands.sends.is_empty());
    for (_, message) in &b.hands.sends {
        let at = 12 + 2 * usize::from(C.0);
        assert_eq!(message[at..at + 2], [0x34, 0x12]);
    }
    let mut message = [0; 20];
    message[..6].copy_from_slice(b"tyhb\x03\x01");
    message[8] = 1;
    // Of this context and of one that is not open.
    for (count, other) in [(1u16, 0u8), (1, 3), (2, 0), (u16::MAX, 0), (0, 0)] {
        message[12..].fill(other);
        message[12 + 2 * usize::from(C.0)..][..2].copy_from_slice(&count.to_le_bytes());
        b.step(Input::Message { peer: Rank(1), bytes: &message });
    }
    let shown = [1, 2, u16::MAX, 0].map(|count| Flag::Life { context: C, peer: Rank(1), count });
    assert_eq!(b.hands.flags, shown);
    // A write that fails loses the peer.
    b.ring(1, 100, 1);
    let token = b.hands.posts[0].token;
    b.step(Input::Failed { token, failure: REFUSED_ACCESS });
    message[12..].fill(7);
    b.step(Input::Message { peer: Rank(1), bytes: &message });
    assert!(b.hands.flags.iter().filter(|flag| matches!(flag, Flag::Life { .. })).count() == shown.len());
}
