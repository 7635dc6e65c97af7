//! Traffic: order, deaths, bounds and speeds.

use super::*;

/// Polls until nothing happens any more.
fn settle(nodes: &mut [Node]) {
    let mut quiet = 0;
    while quiet < 2000 {
        let events: usize = nodes.iter_mut().map(Node::poll).sum();
        quiet = if events == 0 { quiet + 1 } else { 0 };
    }
}

#[test]
fn payload_that_is_placed_all_at_once_or_in_order() {
    const LONG: usize = 150_000;
    let (mut partial, mut gaps) = (0, 0);
    for seed in 0..20 {
        let config = SimConfig { packet_bytes: 4096, full_permille: 0, stop_permille: 0, ..SimConfig::hostile(seed) };
        let mut nodes = world(2, LONG, config);
        nodes[0].fill(7);
        assert_eq!(nodes[0].post(1, seed as u32, LONG), Posted::Accepted);
        let start = Instant::now();
        while nodes[1].imms.is_empty() {
            assert!(start.elapsed() < Duration::from_secs(20));
            let placed: Vec<bool> = (0..LONG / 4096).map(|packet| nodes[1].byte(packet * 4096 + 4095) == 7).collect();
            let count = placed.iter().filter(|there| **there).count();
            partial += usize::from(count > 0 && count < placed.len());
            gaps += usize::from(placed.iter().skip_while(|there| **there).any(|there| *there));
            nodes.iter_mut().for_each(|node| _ = node.poll());
        }
        assert!(nodes[1].is_filled(7) && nodes[1].margins_are_untouched(), "seed {seed}");
        let counts = nodes[1].endpoint.counts();
        // 32 KiB are 8 packets; the fifth piece has 18928 bytes, so 5.
        assert_eq!(counts.packets, 4 * 8 + 5);
    }
    assert!(partial > 300 && gaps > 300, "{partial} views of a part, {gaps} with gaps");
}

#[test]
fn a_source_that_is_reused_too_early_and_arrives_intact() {
    let config = SimConfig { clock: Clock::Virtual { tick_ns: 1 }, ..SimConfig::calm() };
    let mut nodes = world(2, BYTES, config.clone());
    nodes[0].fill(1);
    assert_eq!(nodes[0].post(1, 1, BYTES), Posted::Accepted);
    nodes[0].fill(2);
    pump_until(&mut nodes, "a late source", |nodes| nodes[1].imms == [1]);
    assert!(nodes[1].is_filled(2), "read before it had to be");
    // And one that is filled only after the post: read at once.
    let mut nodes = world(2, BYTES, SimConfig { eager_permille: 1000, ..config });
    assert_eq!(nodes[0].post(1, 1, BYTES), Posted::Accepted);
    nodes[0].fill(2);
    pump_until(&mut nodes, "an early source", |nodes| nodes[1].imms == [1]);
    assert!(nodes[1].is_filled(0));
}

#[test]
fn a_completion_before_the_peer_has_taken_it_all() {
    let mut nodes = world(2, BYTES, SimConfig::calm());
    assert_eq!(nodes[0].post(1, 1, BYTES), Posted::Accepted);
    (0..2000).for_each(|_| _ = nodes[0].poll());
    assert!(nodes[0].sent.is_empty(), "nobody has polled at the other end");
    nodes[1].endpoint.stop(0, 100 * 500);
    (0..400).for_each(|_| nodes.iter_mut().for_each(|node| _ = node.poll()));
    assert!(nodes[0].sent.is_empty() && nodes[1].is_filled(0), "nothing has been placed");
    nodes[0].fill(9);
    pump_until(&mut nodes, "a completion", |nodes| nodes[0].sent == [1]);
    assert!(nodes[1].is_filled(0), "it was read before the NIC stopped");
}

#[test]
fn an_early_completion_of_what_then_does_not_arrive() {
    let mut nodes = world(2, BYTES, eager());
    for number in 0..10 {
        nodes[0].fill(number as u8 + 1);
        assert_eq!(nodes[0].post(1, number, BYTES), Posted::Accepted);
    }
    (0..20).for_each(|_| _ = nodes[0].poll());
    assert_eq!(nodes[0].sent.len(), 10, "read when posted, and the kernel has it all");
    assert_eq!(nodes[0].endpoint.counts().completed_early, 10);
    nodes.remove(0);
    pump_until(&mut nodes, "all from the dead", |nodes| nodes[0].imms.len() == 10);
    assert!(nodes[0].is_filled(10));
}

#[test]
fn an_early_completion_before_the_kernel_has_it_all() {
    // Not even the hello is read, so that the socket fills, before the first write is through.
    let mut nodes = world(2, 1 << 20, eager());
    for number in 0..40 {
        assert_eq!(nodes[0].post(1, number, if number == 0 { 100_000 } else { 16_000 }), Posted::Accepted);
    }
    (0..200).for_each(|_| _ = nodes[0].poll());
    let sent = nodes[0].sent.clone();
    assert!(!sent.is_empty() && sent.len() < 20, "{sent:?}: a socket holds no more");
    nodes.remove(0);
    pump_until(&mut nodes, "what had completed", |nodes| nodes[0].imms.len() >= sent.len());
    settle(&mut nodes);
    assert!(sent.iter().all(|token| nodes[0].imms.contains(&(*token as u32))));
    assert!(nodes[0].endpoint.counts().cut > 0, "what came in part was taken for whole");
}

#[test]
fn what_the_kernel_has_in_whole_counted_as_cut() {
    let mut nodes = world(2, 1 << 20, SimConfig::calm());
    let mut cut_by_a_reset = |posts: u32, bytes: usize| {
        connect(&mut nodes);
        let before = nodes[0].endpoint.counts().cut;
        (0..posts).for_each(|number| assert_eq!(nodes[0].post(1, number, bytes), Posted::Accepted));
        // The peer reads nothing, and so answers nothing.
        (0..200).for_each(|_| _ = nodes[0].poll());
        nodes[0].endpoint.reset().unwrap();
        nodes[0].endpoint.counts().cut - before
    };
    assert_eq!(cut_by_a_reset(4, BYTES), 0);
    let cut = cut_by_a_reset(60, 16_000);
    assert!(cut > 0 && cut < 60, "{cut}: a socket holds some of them, and not all");
}

#[test]
fn what_the_dead_had_sent_lost_with_their_socket() {
    let mut nodes = world(2, BYTES, SimConfig { nic_queue: 4096, peer_queue: 4096, ..eager() });
    let mut sent = 0;
    for number in 0..200 {
        assert_eq!(nodes[0].post(1, number, 64), Posted::Accepted);
    }
    // The receiver has read some and answered; the answers lie unread when the sender dies, which resets the socket
    // while there is more to read.
    (0..10).for_each(|_| _ = nodes[0].poll());
    (0..2).for_each(|_| _ = nodes[1].poll());
    sent += nodes[0].sent.len();
    assert!(sent > 2 * shared::READS_PER_POLL, "{sent}: too few to be read in one poll");
    // The dead one has a successor already.
    nodes[0] = Node::new(0, BYTES, eager());
    connect(&mut nodes);
    settle(&mut nodes);
    assert!(nodes[1].imms.len() >= sent, "{} of {sent} arrived", nodes[1].imms.len());
}

/// A poll that receives nothing.
fn send_only(node: &mut Node) {
    let ProcessEndpoint { core, outbound, .. } = &mut node.endpoint;
    core.tick();
    while let Some(due) = core.next_due() {
        if let Step::Depart(id) = due.step {
            outbound.depart(core, id, due.at_ns);
        }
    }
    outbound.talk(core).unwrap();
}

#[test]
fn answers_that_are_unread_when_a_write_finds_the_peer_dead() {
    let mut nodes = world(2, BYTES, SimConfig::calm());
    // A frame of answers for each, and more frames than a poll reads.
    for number in 0..3 * shared::READS_PER_POLL as u32 {
        assert_eq!(nodes[0].post(1, number, 64), Posted::Accepted);
        send_only(&mut nodes[0]);
        nodes[1].poll();
        nodes[1].poll();
    }
    let arrived = nodes.remove(1).imms.len();
    assert_eq!(arrived, 3 * shared::READS_PER_POLL);
    assert_eq!(nodes[0].post(1, 1000, 64), Posted::Accepted);
    pump_until(&mut nodes, "all completions", |nodes| nodes[0].sent.len() + nodes[0].failed.len() == arrived + 1);
    assert_eq!(nodes[0].failed, [(1000, Some(Reason::Unreachable.into()))]);
}

#[test]
fn a_reset_that_peers_do_not_notice_or_that_lets_something_through() {
    let mut nodes = world(2, BYTES, SimConfig::calm());
    nodes[0].fill(1);
    nodes[1].endpoint.stop(0, 20_000);
    assert_eq!(nodes[0].post(1, 1, BYTES), Posted::Accepted);
    assert_eq!(nodes[0].endpoint.send(Rank(1), b"before"), Ok(Posted::Accepted));
    pump(&mut nodes, 20);
    assert_eq!(nodes[1].endpoint.inbound.held(), BYTES, "it waits for the NIC");
    nodes[1].endpoint.reset().unwrap();
    assert_eq!((nodes[1].endpoint.inbound.held(), nodes[1].endpoint.counts().cut), (0, 2));
    let address = nodes[0].endpoint.address(Rank(0)).unwrap();
    nodes[1].endpoint.connect(Rank(0), &address).unwrap();
    pump_until(&mut nodes, "a failure", |nodes| !nodes[0].failed.is_empty());
    settle(&mut nodes);
    assert!(nodes[1].imms.is_empty() && nodes[1].messages.is_empty() && nodes[1].is_filled(0));
    let address = nodes[1].endpoint.address(Rank(0)).unwrap();
    nodes[0].endpoint.connect(Rank(1), &address).unwrap();
    assert_eq!(nodes[0].post(1, 2, BYTES), Posted::Accepted);
    pump_until(&mut nodes, "the new generation", |nodes| nodes[1].imms == [2] && nodes[0].sent == [2]);
    assert_eq!(nodes[0].failed.len(), 1);
}

#[test]
fn payloads_read_early_without_bound() {
    const LONG: usize = 200_000;
    let mut nodes = world(2, LONG, eager());
    for number in 0..30 {
        assert_eq!(nodes[0].post(1, number, LONG), Posted::Accepted);
    }
    let eager_bytes = |node: &Node| node.endpoint.outbound.eager_bytes();
    assert_eq!(eager_bytes(&nodes[0]), 5 * LONG, "as many as fit into a MiB");
    pump_until(&mut nodes, "all", |nodes| nodes[0].sent.len() == 30 && nodes[1].imms.len() == 30);
    assert_eq!(eager_bytes(&nodes[0]), 0);
    // And what is refused after its first piece is let go, too.
    let mut nodes = [Node::new(0, LONG, eager()), Node::new(1, LONG, eager())];
    let address = nodes[1].endpoint.address(Rank(0)).unwrap();
    nodes[0].endpoint.connect(Rank(1), &address).unwrap();
    for number in 0..30 {
        assert_eq!(nodes[0].post(1, number, LONG), Posted::Accepted);
    }
    pump_until(&mut nodes, "all refusals", |nodes| nodes[0].failed.len() + nodes[0].sent.len() == 30);
    assert_eq!(eager_bytes(&nodes[0]), 0);
    assert!(!nodes[0].failed.is_empty());
}

#[test]
fn answers_of_the_dead_lost_with_their_socket() {
    let mut nodes = world(2, BYTES, SimConfig::calm());
    for number in 0..5 {
        assert_eq!(nodes[0].post(1, number, 64), Posted::Accepted);
    }
    nodes[0].poll();
    (0..10).for_each(|_| _ = nodes[1].poll());
    assert_eq!(nodes[1].imms.len(), 5);
    // More, which is never read: so the receiver's death resets the socket.
    for number in 5..8 {
        assert_eq!(nodes[0].post(1, number, 64), Posted::Accepted);
    }
    send_only(&mut nodes[0]);
    nodes.remove(1);
    pump_until(&mut nodes, "all completions", |nodes| nodes[0].sent.len() + nodes[0].failed.len() == 8);
    nodes[0].sent.sort();
    nodes[0].failed.sort_by_key(|(token, _)| *token);
    let failed = [5, 6, 7].map(|token| (token, Some(Reason::Unreachable.into())));
    assert_eq!((&nodes[0].sent[..], &nodes[0].failed[..]), (&[0, 1, 2, 3, 4][..], &failed[..]));
}

#[test]
fn the_dead_who_answer_early_or_not_at_all() {
    let config = SimConfig { dead_peers: DeadPeers::Fail { after_ns: 50_000 }, ..SimConfig::calm() };
    let mut nodes = world(3, BYTES, config.clone());
    let sends =
        |node: &mut Node| (0..100).filter(|_| node.endpoint.send(Rank(1), b"?") == Ok(Posted::Accepted)).count();
    let queue = SimConfig::calm().message_queue as usize;
    assert_eq!(sends(&mut nodes[0]), queue);
    nodes.remove(1);
    assert_eq!(nodes[0].post(1, 1, 8), Posted::Accepted);
    (0..400).for_each(|_| _ = nodes[0].poll());
    assert!(nodes[0].failed.is_empty(), "after 40 of 50 us");
    (0..200).for_each(|_| _ = nodes[0].poll());
    assert_eq!(nodes[0].failed.len(), 1);
    assert_eq!(nodes[0].post(1, 2, 8), Posted::Accepted);
    (0..600).for_each(|_| _ = nodes[0].poll());
    assert_eq!((nodes[0].failed.len(), nodes[0].endpoint.counts().unreachable), (2, 1));
    assert_eq!(sends(&mut nodes[0]), 100, "messages to the dead fill a queue");
    let silent = SimConfig { dead_peers: DeadPeers::Silent, peer_queue: 3, nic_queue: 8, ..config };
    let mut nodes = world(3, BYTES, silent);
    nodes.remove(1);
    let posts = |node: &mut Node, peer| (0..10).filter(|n| node.post(peer, *n, 8) == Posted::Accepted).count();
    assert_eq!(posts(&mut nodes[0], 1), 3);
    settle(&mut nodes);
    assert_eq!((nodes[0].failed.len(), nodes[0].sent.len()), (0, 0));
    assert_eq!(posts(&mut nodes[0], 1), 0, "the dead one's queue is full");
    assert_eq!(posts(&mut nodes[0], 2), 3, "and nobody else's");
    let sends =
        |node: &mut Node| (0..100).filter(|_| node.endpoint.send(Rank(1), b"?") == Ok(Posted::Accepted)).count();
    assert_eq!(sends(&mut nodes[0]), SimConfig::calm().message_queue as usize);
    settle(&mut nodes);
    assert_eq!((nodes[0].sent.len(), sends(&mut nodes[0])), (3, 0));
    nodes[0].endpoint.reset().unwrap();
    settle(&mut nodes);
    assert_eq!(nodes[0].failed.len(), 3, "{:?}", nodes[0].failed);
}

#[test]
fn completions_of_a_former_peer_that_make_room_in_the_queue_of_the_new_one() {
    let config = SimConfig { peer_queue: 2, ..SimConfig::calm() };
    let mut nodes = world(2, BYTES, config.clone());
    let _ = (nodes[0].post(1, 1, 8), nodes[0].post(1, 2, 8));
    nodes[1] = Node::new(1, BYTES, config);
    connect(&mut nodes);
    assert_eq!([3, 4, 5].map(|n| nodes[0].post(1, n, 8)), [Posted::Accepted, Posted::Accepted, Posted::Full]);
    nodes[0].poll();
    assert_eq!(nodes[0].failed, [1, 2].map(|token| (token, Some(Reason::Flushed.into()))));
    assert_eq!(nodes[0].post(1, 6, 8), Posted::Full);
    pump_until(&mut nodes, "the new peer", |nodes| nodes[0].sent.len() == 2 && nodes[1].imms.len() == 2);
    assert_eq!(nodes[0].post(1, 7, 8), Posted::Accepted);
}

#[test]
fn a_failed_write_of_which_something_arrives() {
    let mut nodes = world(2, BYTES, SimConfig::calm());
    nodes[0].fill(9);
    nodes[0].endpoint.fail_next(2);
    (0..3).for_each(|number| _ = nodes[0].post(1, number, if number == 2 { 64 } else { BYTES }));
    settle(&mut nodes);
    assert_eq!(
        nodes[0].failed,
        [0, 1].map(|token| (token, Some(Failure { reason: Reason::Other, code: endpoint_state::INJECTED })))
    );
    assert_eq!((&nodes[0].sent[..], &nodes[1].imms[..]), (&[2][..], &[2][..]));
    assert!(nodes[1].byte(63) == 9 && nodes[1].byte(64) == 0);
}

#[test]
fn a_stopped_nic_that_stops_others_or_never_resumes() {
    let mut nodes = world(3, BYTES, SimConfig { nics: vec![LinkModel::FREE; 2], ..SimConfig::calm() });
    // One at the sender, one at a receiver: what is on its way waits for both.
    nodes[0].endpoint.stop(0, 20_000);
    nodes[2].endpoint.stop(1, 20_000);
    let _ = (nodes[0].post_on(0, 1, 1, 64), nodes[0].post_on(1, 1, 2, 64), nodes[0].post_on(1, 2, 3, 64));
    pump(&mut nodes, 190);
    assert_eq!((&nodes[1].imms[..], &nodes[2].imms[..]), (&[2][..], &[][..]));
    pump_until(&mut nodes, "the rest", |nodes| nodes[1].imms == [2, 1] && nodes[2].imms == [3]);
    let counts = nodes.iter().map(|node| node.endpoint.counts());
    let (stops, stalled) = counts.fold((0, 0), |sum, c| (sum.0 + c.stops, sum.1 + c.stalled));
    assert_eq!((stops, stalled), (2, 2));
}

#[test]
fn a_write_to_itself() {
    let mut nodes = world(1, BYTES, SimConfig::hostile(1));
    while nodes[0].post(0, 1, 100) == Posted::Full {}
    pump_until(&mut nodes, "itself", |nodes| nodes[0].imms == [1] && nodes[0].sent == [1]);
}

#[test]
fn a_peer_that_does_not_poll_holds_up_the_others() {
    const LONG: usize = 100_000;
    let mut nodes = world(3, LONG, SimConfig { nic_queue: 32, peer_queue: 8, ..SimConfig::calm() });
    let mut posted = 0;
    while nodes[0].post(1, posted, LONG) == Posted::Accepted {
        posted += 1;
        (0..50).for_each(|_| _ = nodes[0].poll());
    }
    assert_eq!(posted, 8);
    for number in 100..200 {
        assert_eq!(nodes[0].post(2, number, LONG), Posted::Accepted);
        let start = Instant::now();
        while nodes[0].sent.last() != Some(&u64::from(number)) {
            assert!(start.elapsed() < Duration::from_secs(20), "held up");
            [0, 2].iter().for_each(|at| _ = nodes[*at].poll());
        }
    }
    assert_eq!((nodes[0].sent.len(), nodes[2].imms.len()), (100, 100));
    pump_until(&mut nodes, "the one who was late", |nodes| nodes[1].imms.len() == 8 && nodes[0].sent.len() == 108);
}

#[test]
fn a_receiver_that_holds_without_bound() {
    const LONG: usize = 1 << 20;
    let config = SimConfig { clock: Clock::Virtual { tick_ns: 1 }, ..SimConfig::calm() };
    let mut nodes = world(2, LONG, config);
    nodes[1].endpoint.stop(0, 20_000);
    for number in 0..64 {
        assert_eq!(nodes[0].post(1, number, LONG), Posted::Accepted);
    }
    pump(&mut nodes, 10_000);
    let held = nodes[1].endpoint.inbound.held();
    assert!((inbound::MAX_HELD..inbound::MAX_HELD + MAX_FRAME).contains(&held), "{held} bytes of 64 MiB are held");
    assert!(nodes[1].is_filled(0));
    pump_until(&mut nodes, "all of it", |nodes| nodes[1].imms.len() == 64 && nodes[0].sent.len() == 64);
    assert_eq!(nodes[1].endpoint.inbound.held(), 0);
}

#[test]
fn a_stream_of_small_things_that_is_taken_without_bound() {
    let queue = 1 << 17;
    let config = SimConfig { nic_queue: queue, peer_queue: queue, message_queue: queue, ..SimConfig::calm() };
    let mut nodes = world(2, BYTES, SimConfig { poll_batch: 1, ..config });
    for number in 0..20_000 {
        assert_eq!(nodes[0].post(1, number, 0), Posted::Accepted);
        assert_eq!(nodes[0].endpoint.send(Rank(1), b"and this"), Ok(Posted::Accepted));
    }
    let mut most = 0;
    for _ in 0..10_000 {
        pump(&mut nodes, 1);
        most = most.max(nodes[1].endpoint.core.endpoint.undelivered.len());
    }
    assert!((inbound::MAX_UNDELIVERED..inbound::MAX_UNDELIVERED + 100).contains(&most), "{most} wait");
    let arrived = |node: &Node| node.imms.len() + node.messages.len();
    pump_until(&mut nodes, "everything", |nodes| arrived(&nodes[1]) == 40_000 && nodes[0].sent.len() == 20_000);
}

// ---- speed

/// Ranks post to rank 0, at one time; returns when the last write had arrived by the link model, and when the last
/// completed. By the clock it takes at least as long, and on a busy machine longer.
fn times(nodes: &mut [Node], writes: &[(u8, u32, usize)]) -> [Duration; 2] {
    let start = Instant::now();
    nodes[0].endpoint.core.look();
    let posted = nodes[0].endpoint.core.stamp(nodes[0].endpoint.core.now_ns);
    let place = Place { region: RegionId(0), offset: 0 };
    for (nic, from, bytes) in writes {
        let ProcessEndpoint { core, outbound, .. } = &mut nodes[*from as usize].endpoint;
        core.look();
        core.now_ns = core.unstamp(posted);
        let (imm, bytes) = (ImmValue::from_bits(0), *bytes as u32);
        let write = WriteImm { nic: *nic, peer: Rank(0), source: place, target: place, bytes, imm, token: 0 };
        assert_eq!(outbound.post(core, &write), Ok(Posted::Accepted));
    }
    let last = |node: &Node| {
        let core = &node.endpoint.core;
        let time = Duration::from_nanos(core.stamp(core.last_ns) - posted);
        assert!(start.elapsed() >= time, "before its time");
        time
    };
    pump_until(nodes, "arrivals", |nodes| nodes[0].imms.len() == writes.len());
    let arrived = last(&nodes[0]);
    let sent = |nodes: &[Node]| nodes.iter().map(|node| node.sent.len()).sum::<usize>();
    pump_until(nodes, "completions", |nodes| sent(nodes) == writes.len());
    let completed = writes.iter().map(|(_, from, _)| last(&nodes[*from as usize])).max().unwrap();
    nodes[0].imms.clear();
    nodes.iter_mut().for_each(|node| node.sent.clear());
    [arrived, completed]
}

#[test]
fn writes_faster_or_slower_than_the_link() {
    // A byte takes 8 ns: a MiB 8.4 ms.
    let slow = LinkModel { gbps: 1.0, latency_us: 3000.0, per_message_us: 100.0 };
    let config = SimConfig { clock: Clock::Real, nics: vec![slow; 2], ..SimConfig::calm() };
    const MIB: usize = 1 << 20;
    let (mib, latency) = (Duration::from_nanos(8 * MIB as u64), Duration::from_millis(3));
    let each = Duration::from_micros(100);
    let mut nodes = world(4, MIB, config);
    let mut expect = |sending: Duration, writes: &[(u8, u32, usize)]| {
        let wanted = [sending + latency, sending + 2 * latency];
        for (time, wanted) in times(&mut nodes, writes).into_iter().zip(wanted) {
            let close = time.abs_diff(wanted) <= wanted / 100;
            assert!(close, "{time:?}, not {wanted:?}, for {} writes", writes.len());
        }
    };
    expect(each + mib, &[(0, 1, MIB)]);
    // One after the other on one NIC, side by side on two.
    expect(2 * (each + mib), &[(0, 1, MIB), (0, 1, MIB)]);
    expect(each + mib, &[(0, 1, MIB), (1, 1, MIB)]);
    // Three senders share the receiver's NIC.
    expect(each + 3 * mib, &[(0, 1, MIB), (0, 2, MIB), (0, 3, MIB)]);
    // The time of a message beyond its bytes.
    expect(100 * each, &[(0, 1, 0); 100]);
}

#[test]
fn latency_that_counts_from_when_a_frame_is_read() {
    let distant = LinkModel { latency_us: 20_000.0, ..cx7() };
    let mut nodes = world(2, BYTES, SimConfig { clock: Clock::Real, nics: vec![distant], ..SimConfig::calm() });
    let start = Instant::now();
    assert_eq!(nodes[0].post(1, 1, 8), Posted::Accepted);
    while nodes[0].endpoint.core.now_ns < 1_000_000 || start.elapsed() < Duration::from_millis(1) {
        nodes[0].poll();
    }
    std::thread::sleep(Duration::from_millis(25));
    nodes[1].poll();
    nodes[1].poll();
    assert_eq!(nodes[1].imms, [1], "its time was over before it was read");
}
