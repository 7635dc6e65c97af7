//! The tests that every transport must pass: one function for each promise of `transport/network/mod.rs`.
//!
//! A backend gives fresh endpoints of a world; `contract!` then makes a test of each function. Most drive all endpoints
//! from one thread, so that memory can be looked at between polls; one gives each its own thread.

use crate::rig::*;
pub use crate::taking_back::*;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::{Duration, Instant};
use tokenyard::internals::base::{Error, Rank};
use tokenyard::internals::transport::network::{
    Allocation, Event, MAX_MESSAGE, Place, Posted, RegionId, Released, Span, SpanMemory, Transport, WriteImm,
};

/// Makes a module with one test for each promise.
#[macro_export]
macro_rules! contract {
    ($name:ident, $backend:expr) => {
        contract!(@ $name, $backend,
            immediate_before_its_payload,
            bytes_outside_the_target_written,
            immediate_lost_or_delivered_twice,
            completion_lost_or_given_twice,
            source_read_after_its_completion,
            full_queue_is_an_error_or_forever,
            empty_write_skipped,
            order_taken_for_granted,
            one_nic_does_all_the_work,
            write_outside_a_region_let_through,
            write_to_nobody_let_through,
            message_torn_or_doubled,
            late_region_reached_by_an_old_address,
            garbage_for_an_address,
            dead_peer_holds_everyone_up,
            late_write_after_reset,
            region_touched_after_it_was_taken_back,
            region_held_by_a_peer_that_never_polls,
            regions_taken_back_under_a_storm,
            flush_that_loses_or_doubles,
            immediate_of_a_region_taken_back_comes_late,
            limits_that_are_not_so,
            memory_of_a_gpu_for_the_processor_to_move,
            threads_that_share_a_network,
        );
    };
    (@ $name:ident, $backend:expr, $($promise:ident),* $(,)?) => {
        mod $name {
            use super::*;
            $(#[test] fn $promise() {
                if $backend.is_there() {
                    $crate::contract::$promise(&$backend);
                }
            })*
        }
    };
}

const RANKS_OF_THREADS: usize = 4;

fn storm<B: Backend>(backend: &B, ranks: usize, seed: u64) -> (Cluster<B::Endpoint>, Tally) {
    let mut cluster = Cluster::new(backend, ranks);
    let tally = Storm::rage(&mut cluster, 1500, seed);
    (cluster, tally)
}

// ---- the promises

/// P1.
pub fn immediate_before_its_payload(backend: &impl Backend) {
    let (_, tally) = storm(backend, 3, 1);
    assert!(tally.torn.is_empty(), "{:?}", tally.torn);
}

/// P3: the slot around the payload, and all memory once the network is at rest.
pub fn bytes_outside_the_target_written(backend: &impl Backend) {
    let (cluster, tally) = storm(backend, 2, 2);
    assert!(tally.outside.is_empty(), "{:?}", tally.outside);
    for node in cluster.nodes.iter().flatten() {
        assert!(node.regions.recv_buffer.all().iter().all(|byte| *byte == GUARD), "written after the immediate");
        assert!(node.regions.source.all().iter().all(|byte| [0xEE, GUARD].contains(byte)), "a source was written");
    }
}

/// P3.
pub fn immediate_lost_or_delivered_twice(backend: &impl Backend) {
    let (_, tally) = storm(backend, 4, 3);
    assert_eq!(tally.log.imms.len(), tally.writes.len(), "an immediate is lost, or came to another rank");
    assert!(tally.log.imms.values().all(|times| *times == 1), "an immediate came twice");
    let bytes: usize = tally.writes.iter().map(|w| w.bytes).sum();
    assert!(bytes > 100_000 && tally.writes.iter().any(|w| w.bytes == 0), "the storm was a breeze");
}

/// P4.
pub fn completion_lost_or_given_twice(backend: &impl Backend) {
    let (_, tally) = storm(backend, 3, 4);
    assert_eq!(tally.log.sent.len(), tally.writes.len());
    assert!(tally.log.sent.values().all(|times| *times == 1) && tally.log.failed.is_empty());
}

/// P4: one source for all writes, overwritten as soon as each completes, though it may be arriving still.
pub fn source_read_after_its_completion(backend: &impl Backend) {
    const BYTES: usize = 512;
    let mut cluster = Cluster::new(backend, 2);
    let arrived = Cell::new(0);
    let start = Instant::now();
    for number in 0..300u32 {
        cluster.regions(0).source.write(0, &pattern(number, BYTES));
        let place = Place { region: SOURCE, offset: 0 };
        let write = WriteImm { source: place, ..write(1, number, number as usize % SLOTS, BYTES) };
        let (mut posted, mut sent) = (false, false);
        while !sent {
            assert!(start.elapsed() < PATIENCE, "write {number} does not complete");
            posted = posted || cluster.endpoint(0).post(&write).unwrap() == Posted::Accepted;
            cluster.pump(&mut |rank, regions, event| {
                sent |= matches!(event, Event::Sent { .. });
                check_arrival(rank, regions, event, BYTES, &arrived);
            });
        }
        cluster.regions(0).source.fill(0, BYTES, 0xEE);
    }
    while arrived.get() < 300 {
        assert!(start.elapsed() < PATIENCE, "{} of 300 arrived", arrived.get());
        cluster.pump(&mut |rank, regions, event| check_arrival(rank, regions, event, BYTES, &arrived));
    }
}

fn check_arrival(rank: usize, regions: &Regions, event: Event<'_>, bytes: usize, arrived: &Cell<u32>) {
    let Event::Imm { imm } = event else { return };
    let slot = number(imm) as usize % SLOTS;
    assert_eq!(regions.recv_buffer.read(slot * SLOT, bytes), pattern(number(imm), bytes), "at rank {rank}");
    arrived.set(arrived.get() + 1);
}

/// P5.
pub fn full_queue_is_an_error_or_forever(backend: &impl Backend) {
    let mut cluster = Cluster::new(backend, 2);
    let mut log = Log::default();
    let mut accepted = 0u32;
    for round in 0..4 {
        let before = accepted;
        // An endpoint may look full for a moment; one that nobody polls must stay full in the end.
        let mut refused = 0;
        while refused < 20 {
            assert!(accepted - before < 1 << 17, "the queue has no bound");
            match cluster.endpoint(0).post(&write(1, accepted, 0, 8)).unwrap() {
                Posted::Accepted => (accepted, refused) = (accepted + 1, 0),
                Posted::Full => refused += 1,
            }
        }
        assert!(accepted > before, "no room in round {round} though all had completed");
        cluster.pump_until("room in the queue", &mut log, |log| log.completed(0, 0..u64::from(accepted)));
    }
    cluster.pump_until("immediates", &mut log, |log| log.imms.len() >= accepted as usize);
    cluster.settle(&mut log);
    assert_eq!(log.imms.len(), accepted as usize, "a refused write was done");
    assert!(log.imms.values().chain(log.sent.values()).all(|times| *times == 1));
}

/// P6.
pub fn empty_write_skipped(backend: &impl Backend) {
    let mut cluster = Cluster::new(backend, 2);
    let mut log = Log::default();
    for number in 0..200 {
        cluster.post(0, &write(1, number, number as usize % SLOTS, 0), &mut log);
    }
    cluster.pump_until("empty writes", &mut log, |log| log.imms.len() == 200 && log.completed(0, 0..200));
    cluster.settle(&mut log);
    assert!(log.imms.values().chain(log.sent.values()).all(|times| *times == 1));
    assert!(cluster.regions(1).recv_buffer.all().iter().all(|byte| *byte == GUARD), "an empty write wrote");
}

/// P2: nothing fails because of order. How much there was of it is the backend's to show.
pub fn order_taken_for_granted(backend: &impl Backend) {
    let mut cluster = Cluster::new(backend, 2);
    let tally = Storm::rage(&mut cluster, 4000, 5);
    assert_eq!((tally.torn.len(), tally.outside.len(), tally.log.imms.len()), (0, 0, 4000));
    println!("{} of 4000 immediates overtaken, {} posts found a full queue", tally.overtaken, tally.full);
}

/// P7.
pub fn one_nic_does_all_the_work(backend: &impl Backend) {
    let mut cluster = Cluster::new(backend, 2);
    let nics = cluster.endpoint(0).nics();
    assert!(nics > 0 && nics == cluster.endpoint(1).nics());
    let mut log = Log::default();
    for number in 0..40 * nics as u32 {
        let nic = (number as usize % nics) as u8;
        cluster.regions(0).source.write(number as usize % SLOTS * SLOT, &[nic; 16]);
        let write = WriteImm { nic, ..write(1, number, number as usize % SLOTS, 16) };
        cluster.post(0, &write, &mut log);
        cluster.pump_until("a shard", &mut log, |log| log.imms.contains_key(&(1, number)));
        cluster.pump_until("its completion", &mut log, |log| log.completed(0, [u64::from(number)]));
        assert_eq!(cluster.regions(1).recv_buffer.read(number as usize % SLOTS * SLOT, 16), [nic; 16]);
    }
    for nic in [nics as u8, 255] {
        let refused = cluster.endpoint(0).post(&WriteImm { nic, ..write(1, 0, 0, 16) });
        assert!(matches!(refused, Err(Error::Argument { .. })), "NIC {nic}: {refused:?}");
    }
}

/// P8.
pub fn write_outside_a_region_let_through(backend: &impl Backend) {
    let mut cluster = Cluster::new(backend, 2);
    let end = (SLOT * SLOTS) as u64;
    let good = write(1, 1, 0, 64);
    let place = |region, offset| Place { region, offset };
    let bad = [
        WriteImm { target: place(RECV_BUFFER, end - 63), ..good },
        WriteImm { target: place(RECV_BUFFER, end), ..good },
        WriteImm { target: place(RECV_BUFFER, u64::MAX), ..good },
        WriteImm { target: place(RECV_BUFFER, u64::MAX - 63), ..good },
        WriteImm { target: place(RECV_BUFFER, end + 1), bytes: 0, ..good },
        WriteImm { target: place(RECV_BUFFER, 0), bytes: u32::MAX, ..good },
        WriteImm { target: place(RegionId(2), 0), ..good },
        WriteImm { target: place(RegionId(u16::MAX), 0), bytes: 0, ..good },
        WriteImm { source: place(SOURCE, end - 63), ..good },
        WriteImm { source: place(SOURCE, u64::MAX - 63), ..good },
        WriteImm { source: place(RegionId(2), 0), ..good },
    ];
    for write in bad {
        let refused = cluster.endpoint(0).post(&write);
        assert!(matches!(refused, Err(Error::Argument { .. })), "{write:?}: {refused:?}");
    }
    let mut log = Log::default();
    cluster.settle(&mut log);
    assert!(log.imms.is_empty() && log.sent.is_empty() && log.failed.is_empty(), "{log:?}");
    assert!(cluster.regions(1).recv_buffer.all().iter().all(|byte| *byte == GUARD));
    // The last byte is inside.
    cluster.regions(0).source.fill(0, 64, 7);
    cluster.post(0, &WriteImm { target: place(RECV_BUFFER, end - 64), ..good }, &mut log);
    cluster.pump_until("the last bytes", &mut log, |log| log.imms.contains_key(&(1, 1)));
    assert_eq!(cluster.regions(1).recv_buffer.read(end as usize - 64, 64), [7; 64]);
}

/// P8.
pub fn write_to_nobody_let_through(backend: &impl Backend) {
    let mut nodes: Vec<_> = backend.endpoints(3).into_iter().map(Node::new).collect();
    let address = nodes[1].endpoint.address(Rank(0)).unwrap();
    nodes[0].endpoint.connect(Rank(1), &address).unwrap();
    for peer in [2, 3, 4096, u32::MAX] {
        let write = WriteImm { peer: Rank(peer), ..write(1, 0, 0, 8) };
        let refused = nodes[0].endpoint.post(&write);
        assert!(matches!(refused, Err(Error::Argument { .. })), "{peer}: {refused:?}");
        let refused = nodes[0].endpoint.send(Rank(peer), b"hello");
        assert!(matches!(refused, Err(Error::Argument { .. })), "{peer}: {refused:?}");
    }
}

/// P9.
pub fn message_torn_or_doubled(backend: &impl Backend) {
    let mut cluster = Cluster::new(backend, 3);
    let mut log = Log::default();
    let mut wanted = BTreeMap::new();
    for number in 0..600u32 {
        let (from, to) = (number as usize % 3, (number as usize + 1 + number as usize / 3 % 2) % 3);
        let len = [4, 5, 31, 32, 64, 200, MAX_MESSAGE][number as usize / 6 % 7];
        let mut message = number.to_le_bytes().to_vec();
        message.extend(pattern(number, len - 4));
        let start = Instant::now();
        while cluster.endpoint(from).send(Rank(to as u32), &message).unwrap() == Posted::Full {
            assert!(start.elapsed() < PATIENCE, "messages do not drain");
            cluster.pump(&mut |rank, _, event| log.note(rank, event));
        }
        wanted.insert((to, Rank(from as u32), message), 1);
    }
    cluster.pump_until("messages", &mut log, |log| log.messages.len() >= wanted.len());
    cluster.settle(&mut log);
    assert!(log.messages == wanted, "messages differ");
    let refused = cluster.endpoint(0).send(Rank(1), &[0; MAX_MESSAGE + 1]);
    assert!(matches!(refused, Err(Error::Argument { .. })), "{refused:?}");
    while cluster.endpoint(0).send(Rank(1), &[]).unwrap() == Posted::Full {
        cluster.pump(&mut |rank, _, event| log.note(rank, event));
    }
    cluster.pump_until("an empty message", &mut log, |log| log.messages.contains_key(&(1, Rank(0), vec![])));
}

/// Regions registered after an address was taken are reached by a later one.
pub fn late_region_reached_by_an_old_address(backend: &impl Backend) {
    // Dropped last: the endpoint of rank 1 keeps it registered.
    let late = Memory::new(SLOT);
    let mut cluster = Cluster::new(backend, 2);
    // SAFETY: accessed through raw pointers only, and dropped after the cluster.
    let region = unsafe { cluster.endpoint(1).register(late.span()) }.unwrap();
    assert_eq!(region, RegionId(2));
    let write = WriteImm { target: Place { region, offset: 100 }, ..write(1, 9, 3, 50) };
    let refused = cluster.endpoint(0).post(&write);
    assert!(matches!(refused, Err(Error::Argument { .. })), "{refused:?}");
    let address = cluster.endpoint(1).address(Rank(0)).unwrap();
    cluster.endpoint(0).connect(Rank(1), &address).unwrap();
    let mut log = Log::default();
    cluster.regions(0).source.write(3 * SLOT, &pattern(9, 50));
    cluster.post(0, &write, &mut log);
    cluster.pump_until("the late region", &mut log, |log| log.imms.contains_key(&(1, 9)));
    assert_eq!(late.read(100, 50), pattern(9, 50));
    assert!(late.read(0, 100).iter().chain(&late.read(150, 100)).all(|byte| *byte == GUARD));
}

/// P10.
pub fn garbage_for_an_address(backend: &impl Backend) {
    let mut cluster = Cluster::new(backend, 3);
    let good = cluster.endpoint(1).address(Rank(0)).unwrap();
    let mut draw = Draw::new(6);
    fn refuse<E: Transport>(cluster: &mut Cluster<E>, address: &[u8], what: &str) {
        match cluster.endpoint(0).connect(Rank(1), address) {
            Err(Error::Transport { .. }) => {}
            other => panic!("{what} of {} bytes: {other:?}", address.len()),
        }
    }
    for len in 0..good.len() {
        refuse(&mut cluster, &good[..len], "a truncated address");
    }
    for _ in 0..3000 {
        let bytes: Vec<u8> = (0..draw.below(200)).map(|_| draw.below(256) as u8).collect();
        refuse(&mut cluster, &bytes, "noise");
        refuse(&mut cluster, &[&good[..], &bytes, &[0]].concat(), "a prolonged address");
    }
    // A flipped bit may go unnoticed until somebody posts; it must not panic.
    for _ in 0..3000 {
        let mut bytes = good.clone();
        let at = draw.below(bytes.len());
        bytes[at] ^= 1 << draw.below(8);
        let _ = cluster.endpoint(2).connect(Rank(1), &bytes);
    }
    refuse(&mut cluster, &vec![0xFF; 1 << 16], "a long address");
    // Refused addresses change nothing.
    let mut log = Log::default();
    cluster.post(0, &write(1, 5, 0, 100), &mut log);
    cluster.pump_until("a write after refused addresses", &mut log, |log| log.imms.contains_key(&(1, 5)));
}

/// P11, and P3 and P4 for the dead: writes to a peer that has gone fail or wait, and the living go on.
pub fn dead_peer_holds_everyone_up(backend: &impl Backend) {
    let mut cluster = Cluster::new(backend, 3);
    let mut log = Log::default();
    for number in 0..12 {
        let (from, to) = [(0, 2), (0, 1), (2, 0), (2, 1)][number as usize % 4];
        cluster.regions(from).source.write(number as usize * SLOT, &pattern(number, MOST));
        cluster.post(from, &write(to, number, number as usize, MOST), &mut log);
    }
    cluster.pump(&mut |rank, _, event| log.note(rank, event));
    let Some(Node { endpoint, regions: grave }) = cluster.nodes[2].take() else { unreachable!() };
    drop(endpoint);
    let buried = grave.recv_buffer.all();
    grave.source.fill(0, SLOT * SLOTS, 0xDD);
    let mut to_dead: Vec<u64> = vec![0, 4, 8];
    for number in 100..104 {
        if cluster.endpoint(0).post(&write(2, number, 0, 64)).is_ok_and(|posted| posted == Posted::Accepted) {
            to_dead.push(u64::from(number));
        }
    }
    let living: Vec<u64> = (200..300).collect();
    for number in 200..300 {
        cluster.post(0, &write(1, number, number as usize % SLOTS, 64), &mut log);
    }
    let done =
        |log: &Log| log.completed(0, living.iter().copied()) && (200..300).all(|n| log.imms.contains_key(&(1, n)));
    cluster.pump_until("writes to the living", &mut log, done);
    cluster.settle(&mut log);
    assert!(grave.recv_buffer.all() == buried, "memory of a dropped endpoint was written");
    for number in [2u32, 3, 6, 7, 10, 11] {
        let to = if number % 4 == 2 { 0 } else { 1 };
        assert!(log.imms.get(&(to, number)).is_none_or(|times| *times == 1));
        // At rank 1 the writes from 200 on have reused the slots.
        if to == 0 && log.imms.contains_key(&(to, number)) {
            let seen = cluster.regions(to).recv_buffer.read(number as usize * SLOT, MOST);
            assert!(seen == pattern(number, MOST), "an immediate of the dead came before its payload");
        }
    }
    cluster.endpoint(0).reset().unwrap();
    cluster.pump_until("what waits for the dead", &mut log, |log| log.completed(0, to_dead.iter().copied()));
    cluster.settle(&mut log);
    for token in to_dead {
        assert_eq!(log.completions(0, token), 1, "write {token}");
    }
}

/// P12.
pub fn late_write_after_reset(backend: &impl Backend) {
    for round in 0..8 {
        let mut cluster = Cluster::new(backend, 2);
        let mut log = Log::default();
        for number in 0..10 {
            cluster.regions(0).source.write(number as usize * SLOT, &pattern(number, MOST));
            cluster.post(0, &write(1, number, number as usize, MOST), &mut log);
            cluster.post(1, &write(0, 50 + number, number as usize, 8), &mut log);
        }
        (0..round).for_each(|_| _ = cluster.pump(&mut |rank, _, event| log.note(rank, event)));
        cluster.endpoint(1).reset().unwrap();
        let frozen = cluster.regions(1).recv_buffer.all();
        let imms = log.imms.keys().filter(|(rank, _)| *rank == 1).count();
        assert!(matches!(cluster.endpoint(1).post(&write(0, 60, 0, 8)), Err(Error::Argument { .. })));
        // This side is open again; the other still posts to the old address, which may be accepted and must not arrive.
        let address = cluster.endpoint(0).address(Rank(1)).unwrap();
        cluster.endpoint(1).connect(Rank(0), &address).unwrap();
        let mut posted = 10;
        while posted < 15 && cluster.endpoint(0).post(&write(1, posted, 20, 8)).is_ok_and(|p| p == Posted::Accepted) {
            posted += 1;
        }
        cluster.settle(&mut log);
        assert!(cluster.regions(1).recv_buffer.all() == frozen, "a write of a closed generation arrived");
        assert_eq!(log.imms.keys().filter(|(rank, _)| *rank == 1).count(), imms, "and was handed out");
        assert!(log.completed(1, 50..60), "writes outstanding at reset did not complete: {log:?}");
        cluster.endpoint(0).reset().unwrap();
        cluster.pump_until("all completions", &mut log, |log| log.completed(0, 0..u64::from(posted)));
        cluster.connect();
        cluster.regions(0).source.write(0, &pattern(70, MOST));
        cluster.post(0, &write(1, 70, 0, MOST), &mut log);
        cluster.pump_until("the new generation", &mut log, |log| log.imms.contains_key(&(1, 70)));
        assert_eq!(cluster.regions(1).recv_buffer.read(0, MOST), pattern(70, MOST));
        cluster.settle(&mut log);
        let tokens = (0..u64::from(posted)).map(|t| (0, t)).chain((50..60).map(|t| (1, t))).chain([(0, 70)]);
        for (rank, token) in tokens {
            assert_eq!(log.completions(rank, token), 1, "write {token} of rank {rank}");
        }
        assert!(log.imms.values().all(|times| *times == 1));
    }
}

/// P13: writes under way, or posted later by an old address, are dropped, and everything else goes on.
pub fn region_touched_after_it_was_taken_back(backend: &impl Backend) {
    for round in 0..8 {
        // Before the cluster, which a failing test drops first.
        let taken = Memory::new(SLOT * SLOTS);
        let mut cluster = Cluster::new(backend, 2);
        // SAFETY: accessed through raw pointers only, and dropped after it was taken back or after the cluster.
        let region = unsafe { cluster.endpoint(1).register(taken.span()) }.unwrap();
        let older = cluster.endpoint(1).address(Rank(0)).unwrap();
        cluster.endpoint(0).connect(Rank(1), &older).unwrap();
        let mut log = Log::default();
        for number in 50..60 {
            let from = Place { region, offset: 0 };
            cluster.post(1, &WriteImm { source: from, ..write(0, number, number as usize, 8) }, &mut log);
        }
        let start = Instant::now();
        while !log.completed(1, 50..60) {
            assert!(start.elapsed() < PATIENCE, "writes from the region do not complete: {log:?}");
            assert_eq!(cluster.endpoint(1).deregister(region), Ok(Released::Busy), "round {round}");
            cluster.pump(&mut |rank, _, event| log.note(rank, event));
        }
        let target = |number: u32| Place { region, offset: u64::from(number) * SLOT as u64 };
        let late = |number| WriteImm { target: target(number), ..write(1, number, number as usize, MOST) };
        for number in 0..15 {
            cluster.regions(0).source.write(number as usize * SLOT, &pattern(number, MOST));
        }
        (0..10).for_each(|number| cluster.post(0, &late(number), &mut log));
        (0..round).for_each(|_| _ = cluster.pump(&mut |rank, _, event| log.note(rank, event)));
        cluster.take_back(1, region, &mut log);
        let last = taken.all();
        taken.fill(0, SLOT * SLOTS, 0xDD);
        (10..15).for_each(|number| cluster.post(0, &late(number), &mut log));
        for number in 20..30 {
            cluster.regions(0).source.write(number as usize * SLOT, &pattern(number, MOST));
            cluster.post(0, &write(1, number, number as usize, MOST), &mut log);
        }
        cluster.pump_until("all completions", &mut log, |log| log.completed(0, (0..15).chain(20..30)));
        cluster.pump_until("other writes", &mut log, |log| (20..30).all(|number| log.imms.contains_key(&(1, number))));
        cluster.settle(&mut log);
        assert!(taken.all().iter().all(|byte| *byte == 0xDD), "round {round}: written after it was taken back");
        for number in 0..15u32 {
            let token = u64::from(number);
            assert_eq!(log.completions(0, token), 1, "write {number}");
            assert!(!log.failed.contains_key(&(0, token)), "write {number} failed, though its peer is well");
            if log.imms.contains_key(&(1, number)) {
                let at = number as usize * SLOT;
                assert!(number < 10 && !log.dropped.contains_key(&(0, token)), "write {number} came nevertheless");
                assert!(last[at..at + MOST] == pattern(number, MOST), "an immediate without its payload");
            }
        }
        for number in 20..30 {
            assert!(log.sent.contains_key(&(0, u64::from(number))), "write {number} to another region");
            assert_eq!(cluster.regions(1).recv_buffer.read(number as usize * SLOT, MOST), pattern(number, MOST));
        }
        drop(taken);
        refuse_what_is_gone(&mut cluster, region, &older);
    }
}

/// Memory that a backend does not reach is refused, whatever its address, and takes no number.
pub fn memory_of_a_gpu_for_the_processor_to_move(backend: &impl Backend) {
    // Before the cluster, which uses it.
    let memory = Memory::new(SLOT);
    let mut cluster = Cluster::new(backend, 2);
    if !cluster.endpoint(0).device_needs().host_memory {
        println!("this one reaches GPUs");
        return;
    }
    let Span { base, bytes, .. } = memory.span();
    let allocation = Allocation { base, bytes };
    let of_a_gpu = Span { memory: SpanMemory::Gpu { ordinal: 3, allocation }, ..memory.span() };
    // SAFETY: it is refused.
    let refused = unsafe { cluster.endpoint(0).register(of_a_gpu) };
    let Err(Error::Argument { value, .. }) = &refused else { panic!("{refused:?}") };
    assert!(value.contains("GPU 3"), "{value}");
    // SAFETY: accessed through raw pointers only, and dropped after the cluster.
    assert_eq!(unsafe { cluster.endpoint(0).register(memory.span()) }, Ok(RegionId(2)));
}

/// P14: an endpoint can do what its limits state, and no more.
pub fn limits_that_are_not_so(backend: &impl Backend) {
    count_posts(backend);
    count_receives(backend);
    count_regions(backend);
    measure_a_write(backend);
}

/// Writes of an endpoint that nobody polls.
fn count_posts(backend: &impl Backend) {
    let mut cluster = Cluster::new(backend, 2);
    let limits = cluster.endpoint(0).limits();
    let most = limits.posts.min(1 << 17);
    let (mut accepted, mut refused) = (0, 0);
    while accepted < most && refused < 20 {
        match cluster.endpoint(0).post(&write(1, accepted, 0, 8)).unwrap() {
            Posted::Accepted => (accepted, refused) = (accepted + 1, 0),
            Posted::Full => refused += 1,
        }
    }
    assert_eq!(accepted, most, "it is full earlier than {limits:?}");
    if most == limits.posts {
        assert_eq!(
            cluster.endpoint(0).post(&write(1, accepted, 0, 8)),
            Ok(Posted::Full),
            "it takes more than {limits:?}"
        );
    }
    assert_eq!(cluster.endpoint(0).limits(), limits);
}

/// Immediates on their way to an endpoint that nobody polls, as many as it has receives for or queues have room for.
fn count_receives(backend: &impl Backend) {
    const RANKS: usize = 4;
    const ROUNDS_WITHOUT_ROOM: u32 = 200;
    let mut cluster = Cluster::new(backend, RANKS);
    let most = cluster.endpoint(0).limits().receives.min(3000);
    let mut log = Log::default();
    let (mut posted, mut full) = (0, 0);
    while posted < most && full < ROUNDS_WITHOUT_ROOM {
        let from = 1 + posted as usize % (RANKS - 1);
        match cluster.endpoint(from).post(&write(0, posted, posted as usize % SLOTS, 8)).unwrap() {
            Posted::Accepted => (posted, full) = (posted + 1, 0),
            Posted::Full => full += 1,
        }
        for rank in 1..RANKS {
            cluster.endpoint(rank).poll(&mut |event| log.note(rank, event)).unwrap();
        }
    }
    cluster.pump_until("immediates that waited", &mut log, |log| log.imms.len() >= posted as usize);
    cluster.settle(&mut log);
    assert!(log.failed.is_empty() && log.dropped.is_empty(), "some found no receive: {log:?}");
    assert!(log.imms.values().chain(log.sent.values()).all(|times| *times == 1));
    assert_eq!(log.sent.len(), posted as usize);
}

fn count_regions(backend: &impl Backend) {
    // Before the cluster, which uses it.
    let memory = Memory::new(SLOT);
    let mut cluster = Cluster::new(backend, 2);
    let limits = cluster.endpoint(0).limits();
    for number in 2..limits.regions {
        // SAFETY: accessed through raw pointers only, and dropped after the cluster.
        let region = unsafe { cluster.endpoint(0).register(memory.span()) };
        assert_eq!(region.map(|region| u32::from(region.0)), Ok(number), "{limits:?}");
    }
    // SAFETY: as above.
    let refused = unsafe { cluster.endpoint(0).register(memory.span()) };
    assert!(matches!(refused, Err(Error::Argument { .. })), "{refused:?}");
}

/// The longest write, if it is one that memory can be spared for.
fn measure_a_write(backend: &impl Backend) {
    const SPARE: usize = 1 << 20;
    let memory = [(); 2].map(|()| Memory::new(SPARE + 1));
    let mut cluster = Cluster::new(backend, 2);
    let most = cluster.endpoint(0).limits().write_bytes as usize;
    for (rank, memory) in memory.iter().enumerate() {
        // SAFETY: accessed through raw pointers only, and dropped after the cluster.
        assert_eq!(unsafe { cluster.endpoint(rank).register(memory.span()) }, Ok(RegionId(2)));
    }
    cluster.connect();
    let bytes = most.min(SPARE);
    let place = Place { region: RegionId(2), offset: 0 };
    let longest = WriteImm { source: place, target: place, ..write(1, 7, 0, bytes) };
    if most <= SPARE {
        let refused = cluster.endpoint(0).post(&WriteImm { bytes: most as u32 + 1, ..longest });
        assert!(matches!(refused, Err(Error::Argument { .. })), "{refused:?}");
    }
    memory[0].write(0, &pattern(7, bytes));
    let mut log = Log::default();
    cluster.post(0, &longest, &mut log);
    cluster.pump_until("the longest write", &mut log, |log| log.imms.contains_key(&(1, 7)));
    assert!(memory[1].read(0, bytes) == pattern(7, bytes) && memory[1].read(bytes, 1) == [GUARD]);
}

/// P13: an endpoint that polls until nothing is found, after writes to a region that was taken back have completed at
/// their sender, has seen the last of their immediates.
pub fn immediate_of_a_region_taken_back_comes_late(backend: &impl Backend) {
    const WRITES: u32 = 6;
    // Before the cluster, which a failing test drops first.
    let taken = Memory::new(SLOT);
    let mut cluster = Cluster::new(backend, 2);
    let mut log = Log::default();
    for round in 0..120 {
        // SAFETY: accessed through raw pointers only, and dropped after the cluster.
        let region = unsafe { cluster.endpoint(1).register(taken.span()) }.unwrap();
        let address = cluster.endpoint(1).address(Rank(0)).unwrap();
        cluster.endpoint(0).connect(Rank(1), &address).unwrap();
        let numbers = round * WRITES..(round + 1) * WRITES;
        for number in numbers.clone() {
            let target = Place { region, offset: 0 };
            cluster.post(0, &WriteImm { target, ..write(1, number, number as usize % SLOTS, 8) }, &mut log);
        }
        (0..round % 40).for_each(|_| _ = cluster.pump(&mut |rank, _, event| log.note(rank, event)));
        cluster.take_back(1, region, &mut log);
        let start = Instant::now();
        while !log.completed(0, numbers.clone().map(u64::from)) {
            assert!(start.elapsed() < PATIENCE, "round {round}: writes do not complete");
            cluster.pump(&mut |rank, _, event| log.note(rank, event));
        }
        while cluster.endpoint(1).poll(&mut |event| log.note(1, event)).unwrap() > 0 {}
        let of_the_round = |log: &Log| numbers.clone().filter(|number| log.imms.contains_key(&(1, *number))).count();
        let seen = of_the_round(&log);
        (0..200).for_each(|_| _ = cluster.pump(&mut |rank, _, event| log.note(rank, event)));
        std::thread::sleep(Duration::from_micros(60));
        (0..20).for_each(|_| _ = cluster.pump(&mut |rank, _, event| log.note(rank, event)));
        assert_eq!(of_the_round(&log), seen, "round {round}: an immediate came later than it may");
    }
}

fn refuse_what_is_gone<E: Transport>(cluster: &mut Cluster<E>, region: RegionId, older: &[u8]) {
    for gone in [region, RegionId(9)] {
        let refused = cluster.endpoint(1).deregister(gone);
        assert!(matches!(refused, Err(Error::Argument { .. })), "{gone:?}: {refused:?}");
    }
    let place = Place { region, offset: 0 };
    let from = cluster.endpoint(1).post(&WriteImm { source: place, ..write(0, 1, 0, 0) });
    assert!(matches!(from, Err(Error::Argument { .. })), "from there: {from:?}");
    // An older address is still good for other regions; a newer one shows the region as gone.
    cluster.endpoint(0).connect(Rank(1), older).unwrap();
    let newer = cluster.endpoint(1).address(Rank(0)).unwrap();
    cluster.endpoint(0).connect(Rank(1), &newer).unwrap();
    let to = cluster.endpoint(0).post(&WriteImm { target: place, ..write(1, 1, 0, 0) });
    assert!(matches!(to, Err(Error::Argument { .. })), "to there: {to:?}");
    let another = Memory::new(SLOT);
    // SAFETY: accessed through raw pointers only; nobody learns of it, so nothing is outstanding when it is taken back.
    let number = unsafe { cluster.endpoint(1).register(another.span()) }.unwrap();
    assert!(number > region, "the number of a region that is gone was used again");
    cluster.take_back(1, number, &mut Log::default());
}

/// P13: a peer that does not poll holds a region up for a time alone, and pays for it with its own writes to it.
pub fn region_held_by_a_peer_that_never_polls(backend: &impl Backend) {
    const WRITES: u32 = 8;
    // Before the cluster, which a failing test drops first.
    let taken = Memory::new(SLOT * SLOTS);
    let mut cluster = Cluster::new(backend, 3);
    let mut log = Log::default();
    // SAFETY: accessed through raw pointers only, and dropped after the cluster.
    let region = unsafe { cluster.endpoint(1).register(taken.span()) }.unwrap();
    cluster.connect_to(0, 1);
    cluster.connect_to(2, 1);
    let to_it = |number: u32| {
        let target = Place { region, offset: (number as usize * SLOT) as u64 };
        WriteImm { target, ..write(1, number, number as usize, 64) }
    };
    for number in 0..WRITES {
        cluster.post(0, &to_it(number), &mut log);
        cluster.post(2, &to_it(20 + number), &mut log);
        // To another region, by the peer that falls silent.
        cluster.post(2, &write(1, 40 + number, number as usize, 64), &mut log);
    }
    // From now on rank 2 does not poll; the others' traffic goes on.
    let start = Instant::now();
    let mut number = 60;
    loop {
        let answer = cluster.endpoint(1).deregister(region).unwrap();
        if answer == Released::Done {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "a silent peer holds a region up for good: {log:?}");
        let slot = number as usize % SLOTS;
        if number < 1000 && cluster.endpoint(0).post(&write(1, number, slot, 8)).unwrap() == Posted::Accepted {
            number += 1;
        }
        for rank in [0, 1] {
            cluster.endpoint(rank).poll(&mut |event| log.note(rank, event)).unwrap();
        }
    }
    taken.fill(0, SLOT * SLOTS, 0xDD);
    let others = || (60..number).map(u64::from).chain(0..u64::from(WRITES));
    cluster.pump_until("the others' writes", &mut log, |log| log.completed(0, others()));
    let silent = || (20..20 + WRITES).chain(40..40 + WRITES).map(u64::from);
    cluster.pump_until("writes of the silent peer", &mut log, |log| log.completed(2, silent()));
    cluster.settle(&mut log);
    assert!(taken.all().iter().all(|byte| *byte == 0xDD), "written after it was taken back");
    assert!(others().all(|token| log.completions(0, token) == 1 && !log.failed.contains_key(&(0, token))));
    assert!(silent().all(|token| log.completions(2, token) == 1), "{log:?}");
    for number in 40..40 + WRITES {
        assert!(log.sent.contains_key(&(2, u64::from(number))), "write {number} to another region: {log:?}");
        assert_eq!(log.imms.get(&(1, number)), Some(&1), "its immediate");
    }
    // The peer is well again.
    cluster.post(2, &write(1, 2000, 3, 8), &mut log);
    cluster.pump_until("a later write", &mut log, |log| log.imms.contains_key(&(1, 2000)) && log.completed(2, [2000]));
    assert!(log.sent.contains_key(&(2, 2000)));
}

/// P15: whenever an endpoint is flushed, everything arrives once.
pub fn flush_that_loses_or_doubles(backend: &impl Backend) {
    let mut cluster = Cluster::new(backend, 2);
    let (mut log, mut draw) = (Log::default(), Draw::new(15));
    cluster.endpoint(0).flush().unwrap();
    for number in 0..600u32 {
        cluster.post(0, &write(1, number, number as usize % SLOTS, draw.below(64)), &mut log);
        if number % 50 == 0 {
            _ = cluster.endpoint(0).send(Rank(1), &number.to_le_bytes()).unwrap();
        }
        (0..draw.below(3)).for_each(|_| cluster.endpoint(0).flush().unwrap());
        if draw.below(8) == 0 {
            cluster.pump(&mut |rank, _, event| log.note(rank, event));
        }
    }
    cluster.pump_until("immediates", &mut log, |log| log.imms.len() == 600 && log.completed(0, 0..600));
    cluster.settle(&mut log);
    assert!(log.imms.values().chain(log.sent.values()).chain(log.messages.values()).all(|times| *times == 1));
    assert_eq!((log.sent.len(), log.imms.len()), (600, 600));
}

/// The same from a thread each: every rank writes to the next, and checks what the one before wrote.
pub fn threads_that_share_a_network(backend: &impl Backend) {
    const RANKS: usize = RANKS_OF_THREADS;
    const WRITES: u32 = 400;
    let cluster = Cluster::new(backend, RANKS);
    let arrived: Vec<Vec<AtomicBool>> = (0..RANKS).map(|_| (0..SLOTS).map(|_| Default::default()).collect()).collect();
    let finished = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (rank, node) in cluster.nodes.into_iter().enumerate() {
            let (arrived, finished) = (&arrived, &finished);
            scope.spawn(move || {
                let mut node = node.unwrap();
                run_rank(rank, &mut node, &arrived[rank], &arrived[(rank + 1) % RANKS], WRITES);
                // An endpoint that is dropped stops moving others' packets. A rank that fails never gets here.
                finished.fetch_add(1, AcqRel);
                let start = Instant::now();
                while finished.load(Acquire) < RANKS && start.elapsed() < PATIENCE {
                    std::thread::yield_now();
                }
            });
        }
    });
}

/// `busy[slot]` of this rank's receive buffer is set by its sender and cleared here once the write was checked.
fn run_rank<E: Transport>(
    rank: usize,
    node: &mut Node<E>,
    busy: &[AtomicBool],
    busy_there: &[AtomicBool],
    writes: u32,
) {
    let peer = (rank + 1) % RANKS_OF_THREADS;
    let (mut posted, mut completed, mut arrived) = (0u32, 0u32, 0u32);
    let mut sources = [false; SLOTS];
    let start = Instant::now();
    while completed < writes || arrived < writes {
        assert!(start.elapsed() < PATIENCE, "rank {rank}: {posted} posted, {completed} done, {arrived} arrived");
        let slot = posted as usize % SLOTS;
        if posted < writes && !sources[slot] && !busy_there[slot].load(Acquire) {
            let bytes = posted as usize * 37 % MOST;
            node.regions.source.write(slot * SLOT, &pattern(posted, bytes));
            let nic = (posted as usize % node.endpoint.nics()) as u8;
            busy_there[slot].store(true, Release);
            if node.endpoint.post(&WriteImm { nic, ..write(peer, posted, slot, bytes) }).unwrap() == Posted::Accepted {
                sources[slot] = true;
                posted += 1;
            } else {
                busy_there[slot].store(false, Release);
            }
        }
        let regions = &node.regions;
        let events = node.endpoint.poll(&mut |event| match event {
            Event::Sent { token } => {
                sources[token as usize % SLOTS] = false;
                completed += 1;
            }
            Event::Imm { imm } => {
                let (number, slot) = (number(imm), number(imm) as usize % SLOTS);
                let bytes = number as usize * 37 % MOST;
                assert_eq!(regions.recv_buffer.read(slot * SLOT, bytes), pattern(number, bytes), "rank {rank}");
                busy[slot].store(false, Release);
                arrived += 1;
            }
            other => panic!("{other:?}"),
        });
        if events.unwrap() == 0 {
            std::thread::yield_now();
        }
    }
}
