//! What a peer or a stranger may send, over tcp in one process.

use super::*;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);

/// Endpoints of ranks 0, 1, …; none where libfabric is missing, which fails under TOKENYARD_STRICT=1.
fn endpoints<const N: usize>() -> Option<[LibfabricEndpoint; N]> {
    if let Err(why) = Library::open() {
        println!("skipped: {why}");
        assert_ne!(std::env::var("TOKENYARD_STRICT").as_deref(), Ok("1"), "{why}");
        return None;
    }
    let mut config = LibfabricConfig::new("tcp");
    config.source = Some("127.0.0.1".into());
    Some(std::array::from_fn(|rank| LibfabricEndpoint::open(Rank(rank as u32), config.clone()).unwrap()))
}

fn join(from: &mut LibfabricEndpoint, to: &mut LibfabricEndpoint) {
    let address = to.address(from.rank).unwrap();
    from.connect(to.rank, &address).unwrap();
}

#[test]
fn addresses_that_would_mislead_the_provider_are_refused() {
    let Some([mut one, mut two]) = endpoints() else { return };
    let memory = [0u64; 8];
    // SAFETY: nobody writes there: no peer connects to this endpoint.
    unsafe { two.register(Span::host(memory.as_ptr() as u64, 64)) }.unwrap();
    let good = Address::decode(&two.address(Rank(0)).unwrap()).unwrap();
    let mut refused = |change: &dyn Fn(&mut Address)| {
        let mut address = good.clone();
        change(&mut address);
        let why = one.connect(Rank(1), &address.encode()).unwrap_err().to_string();
        assert!(why.contains("address of rank 1"), "{why}");
        why
    };
    let family = |family: u8| move |address: &mut Address| address.ports[0].name[0] = family;
    let names: [&dyn Fn(&mut Address); 4] = [
        &|address| address.ports[0].name.truncate(3),
        &|address| address.ports[0].name.push(0),
        &family(10),
        &family(0),
    ];
    assert!(names.iter().all(|change| refused(change).contains("names no endpoint")));
    assert!(refused(&|address| address.regions.remotes[0].base = u64::MAX).contains("has a region that wraps"));
    assert!(refused(&|address| address.provider = "shm".into()).contains("is of the provider \"shm\""));
    assert!(refused(&|address| address.virtual_addresses ^= true).contains("is of the provider"));
    assert!(one.peers.is_empty(), "a refused address changes nothing");
    one.connect(Rank(1), &good.encode()).unwrap();
    let mut refused = |change: &dyn Fn(&mut Address)| {
        let mut address = good.clone();
        change(&mut address);
        one.connect(Rank(1), &address.encode()).unwrap_err().to_string()
    };
    for change in
        [(|address| address.regions.lengths[0] = 32) as fn(&mut Address), |address| address.regions.remotes[0].key += 1]
    {
        assert!(refused(&change).contains("contradicts an earlier one of the same endpoint"));
    }
}

#[test]
fn messages_of_strangers_are_dropped_and_short_ones_do_not_repeat_others() {
    let Some([mut own, mut peer, mut stranger]) = endpoints() else { return };
    join(&mut own, &mut peer);
    join(&mut peer, &mut own);
    join(&mut stranger, &mut own);
    // It passes itself off as the peer, whose key it does not have.
    stranger.rank = Rank(1);
    stranger.peers.get_mut(&Rank(0)).unwrap().sent += 40;
    let (mut events, start) = (Vec::new(), Instant::now());
    let note = |events: &mut Vec<String>, event: Event<'_>| events.push(format!("{event:?}"));
    assert_eq!(peer.send(Rank(0), b"hello"), Ok(Posted::Accepted));
    while events.is_empty() {
        assert!(start.elapsed() < PATIENCE, "no message");
        own.poll(&mut |event| note(&mut events, event)).unwrap();
        peer.poll(&mut |_| {}).unwrap();
    }
    assert!(events[0].contains("peer: Rank(1)"), "{events:?}");
    // Enough of them to come to each place where a message is received; as long as a kind and a length, and shorter.
    assert_eq!(stranger.send(Rank(0), b"hello"), Ok(Posted::Accepted));
    let to = stranger.peers[&Rank(0)].paths[0].address;
    let (mut sent, mut ended) = (0, 0);
    while ended <= 2 * RECEIVES {
        assert!(start.elapsed() < PATIENCE, "{sent} messages sent, {ended} completed");
        if sent < 2 * RECEIVES && stranger.lanes[0].send(100 + sent, to, &stranger.slab, sent as usize % 5) == 0 {
            sent += 1;
        }
        let mut found = [Done::NONE; BATCH];
        let count = stranger.lanes[0].poll(&mut found).unwrap();
        ended +=
            found[..count].iter().filter(|done| matches!(done, Done::Operation(Operation::Send(_)))).count() as u32;
        stranger.submit_messages();
        own.poll(&mut |event| note(&mut events, event)).unwrap();
    }
    for _ in 0..2000 {
        own.poll(&mut |event| note(&mut events, event)).unwrap();
    }
    assert_eq!(events.len(), 1, "{events:?}");
    // And the peer still is.
    assert_eq!(peer.send(Rank(0), b"again"), Ok(Posted::Accepted));
    while events.len() < 2 {
        assert!(start.elapsed() < PATIENCE, "no message any more");
        own.poll(&mut |event| note(&mut events, event)).unwrap();
        peer.poll(&mut |_| {}).unwrap();
    }
}

#[test]
fn a_peer_that_does_not_answer_is_asked_again_and_not_waited_for_for_ever() {
    let Some([mut own, mut peer]) = endpoints() else { return };
    let (source, target) = ([7u64; 8], [0u64; 8]);
    // SAFETY: both are read and written here through raw pointers alone while writes are under way.
    let regions = unsafe {
        let register = |endpoint: &mut LibfabricEndpoint, memory: &[u64; 8]| {
            endpoint.register(Span::host(memory.as_ptr() as u64, 64)).unwrap()
        };
        [register(&mut own, &source), register(&mut peer, &target)]
    };
    join(&mut own, &mut peer);
    join(&mut peer, &mut own);
    // The provider connects to the peer, which takes both of them.
    let (mut came, start) = (false, Instant::now());
    assert_eq!(own.send(Rank(1), b"hello"), Ok(Posted::Accepted));
    while !came {
        assert!(start.elapsed() < PATIENCE, "no message");
        own.poll(&mut |_| {}).unwrap();
        peer.poll(&mut |event| came |= matches!(event, Event::Message { .. })).unwrap();
    }
    let place = |region| super::super::Place { region, offset: 0 };
    let imm = ImmValue::user(0, 0, 1).unwrap();
    let write = WriteImm {
        nic: 0,
        peer: Rank(1),
        source: place(regions[0]),
        target: place(regions[1]),
        bytes: 8,
        imm,
        token: 5,
    };
    assert_eq!(own.post(&write), Ok(Posted::Accepted));
    // Times are the test's own, so that a machine that pauses it is not taken for a peer that does not answer.
    let (let_go_ns, silent_until_ns) = (own.let_go_ns(), coarse_now_ns());
    let flush_after = |own: &mut LibfabricEndpoint, silence_ns: u64| {
        own.doubt(silent_until_ns + silence_ns);
        own.hand_over(silent_until_ns + silence_ns);
        (own.peers[&Rank(1)].notices, own.peers[&Rank(1)].question, own.waiting.len())
    };
    own.peers.get_mut(&Rank(1)).unwrap().notices = Notices::Known;
    own.polled_ns = silent_until_ns.saturating_sub(let_go_ns / 2 + 1);
    let first = own.peers[&Rank(1)].question + 1;
    assert_eq!(flush_after(&mut own, 0), (Notices::Asked, first, 1), "the write waits for an answer");
    // The peer does not poll, and so does not answer.
    assert_eq!(flush_after(&mut own, let_go_ns / 2), (Notices::Asked, first, 1), "it has time to answer");
    assert_eq!(flush_after(&mut own, let_go_ns / 2 + 1), (Notices::Asked, first + 1, 1), "asked again");
    let last = flush_after(&mut own, DOUBT * let_go_ns);
    assert_eq!((last.0, last.2), (Notices::Asked, 1), "it is waited for so long");
    assert_eq!(flush_after(&mut own, DOUBT * let_go_ns + 1).0, Notices::Known, "a write waits for ever");
    let (mut seen, start) = (false, Instant::now());
    let mut sent = false;
    while !(seen && sent) {
        assert!(start.elapsed() < PATIENCE, "the write does not arrive");
        own.poll(&mut |event| sent |= matches!(event, Event::Sent { token: 5 })).unwrap();
        peer.poll(&mut |event| seen |= matches!(event, Event::Imm { .. })).unwrap();
    }
}

#[test]
fn an_owner_that_did_not_poll_does_not_cut_its_peers_off() {
    let Some([mut own, mut peer]) = endpoints() else { return };
    let memory = [0u64; 8];
    // SAFETY: nobody writes there.
    let region = unsafe { own.register(Span::host(memory.as_ptr() as u64, 64)) }.unwrap();
    join(&mut own, &mut peer);
    join(&mut peer, &mut own);
    own.poll(&mut |_| {}).unwrap();
    assert_eq!(own.deregister(region), Ok(Released::Busy));
    std::thread::sleep(own.config.let_go + Duration::from_millis(50));
    assert_eq!(own.deregister(region), Ok(Released::Busy), "the answer may be there");
    let start = Instant::now();
    while own.deregister(region) == Ok(Released::Busy) {
        assert!(start.elapsed() < PATIENCE, "a region is not taken back");
        own.poll(&mut |_| {}).unwrap();
        peer.poll(&mut |_| {}).unwrap();
    }
}

/// A write of rank 0 to rank 1, and its memory.
fn write_between(own: &mut LibfabricEndpoint, peer: &mut LibfabricEndpoint, memory: &[[u64; 8]; 2]) -> WriteImm {
    let span = |at: usize| Span::host(memory[at].as_ptr() as u64, 64);
    // SAFETY: the callers access it no more.
    let regions = unsafe { [own.register(span(0)).unwrap(), peer.register(span(1)).unwrap()] };
    join(own, peer);
    join(peer, own);
    let [source, target] = regions.map(|region| super::super::Place { region, offset: 0 });
    let imm = ImmValue::user(0, 0, 1).unwrap();
    WriteImm { nic: 0, peer: Rank(1), source, target, bytes: 8, imm, token: 5 }
}

#[test]
fn a_completion_returns_one_credit() {
    let Some([mut own, mut peer]) = endpoints() else { return };
    let memory = [[7; 8], [0; 8]];
    let write = write_between(&mut own, &mut peer, &memory);
    (0..3).for_each(|_| assert_eq!(own.post(&write), Ok(Posted::Accepted)));
    let flight = own.lanes[0].writes.end(0).unwrap();
    own.hand_out(Pending { nic: 0, flight, outcome: Outcome::Sent }, &mut |_| {});
    assert_eq!(own.peers[&Rank(1)].paths[0].outstanding, 2);
}

#[test]
fn a_region_is_let_go_of_once_writes_to_it_have_completed() {
    let Some([mut own, mut peer]) = endpoints() else { return };
    let memory = [[7; 8], [0; 8]];
    let write = write_between(&mut own, &mut peer, &memory);
    assert_eq!(own.post(&write), Ok(Posted::Accepted));
    own.revocations.take_in(Rank(1), Notice::Revoke(write.target.region));
    own.send_notices();
    assert!(own.revocations.owes(), "the write is outstanding");
    let (mut dropped, start) = (false, Instant::now());
    while own.revocations.owes() {
        assert!(start.elapsed() < PATIENCE && !peer.lanes.is_empty(), "a write to a region that is gone stays");
        own.poll(&mut |event| dropped |= matches!(event, Event::Dropped { token: 5, .. })).unwrap();
    }
    assert!(dropped);
}

#[test]
fn an_owner_that_asks_long_after_each_poll_gets_its_region_back() {
    let Some([mut own, mut peer]) = endpoints() else { return };
    let memory = [0u64; 8];
    // SAFETY: nobody writes there.
    let mut register = || unsafe { own.register(Span::host(memory.as_ptr() as u64, 64)) }.unwrap();
    let regions = [register(), register()];
    join(&mut own, &mut peer);
    join(&mut peer, &mut own);
    for (region, answers) in regions.into_iter().zip([true, false]) {
        let start = Instant::now();
        while own.deregister(region) == Ok(Released::Busy) {
            assert!(start.elapsed() < PATIENCE, "a region is not taken back from a peer, which answers: {answers}");
            own.poll(&mut |_| {}).unwrap();
            if answers {
                peer.poll(&mut |_| {}).unwrap();
            }
            std::thread::sleep(own.config.let_go / 5);
        }
    }
}

#[test]
fn messages_to_peers_that_are_gone_leave_room_for_others() {
    let Some([mut own, mut gone, mut peer]) = endpoints() else { return };
    let address = Address::decode(&gone.address(Rank(0)).unwrap()).unwrap();
    drop(gone);
    join(&mut own, &mut peer);
    join(&mut peer, &mut own);
    let others = (3..3 + MESSAGES / PEER_MESSAGES as u32 + 6).map(Rank);
    for rank in others.clone() {
        let address = Address { rank, key: u64::from(rank.0), ..address.clone() };
        own.connect(rank, &address.encode()).unwrap();
    }
    let (mut sent, mut come, start) = (false, false, Instant::now());
    while !come {
        assert!(start.elapsed() < PATIENCE, "no message; sent: {sent}");
        for rank in others.clone() {
            while own.send(rank, b"lost") == Ok(Posted::Accepted) {}
        }
        sent = sent || own.send(Rank(2), b"hello") == Ok(Posted::Accepted);
        own.poll(&mut |_| {}).unwrap();
        peer.poll(&mut |event| come |= matches!(event, Event::Message { .. })).unwrap();
    }
}
