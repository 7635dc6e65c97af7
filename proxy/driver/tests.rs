//! Two proxies on their own threads over the simulated network; the test plays both devices.

use super::*;
use crate::base::{Interrupt, Rank};
use crate::proxy::machine::{Cause, Liveness, MachineConfig};
use crate::proxy::wire::{ChunkIdx, Direction, LinkIdx, MessageShape, Nodes, SourceIdx, WireInput};
use crate::transport::network::imm::ImmValue;
use crate::transport::network::sim::{Clock as SimClock, Network, SimConfig, SimEndpoint};
use crate::transport::network::{Place, RegionId, Span};

const CONTEXT: ContextIdx = ContextIdx(0);
const PATIENCE: Duration = Duration::from_secs(20);
const LIVENESS: Liveness =
    Liveness { heartbeat_ns: 10_000_000, silence_ns: 400_000_000, first_contact_ns: 2_000_000_000 };

struct Side {
    rank: Rank,
    /// As words, so that the network's accesses and the test's are to the same kind of memory.
    arena: Words,
    memory: ContextMemory,
    proxy: ProxyThread<SimEndpoint>,
}

fn wire() -> Wire {
    let nodes = Nodes::new(vec![vec![Rank(0)], vec![Rank(1)]]).unwrap();
    let shape = MessageShape { first_bytes: 256, chunk_bytes: 192, chunks: 3, rows_offset: 256 };
    let unused = MessageShape { chunks: 0, ..shape };
    let shapes = [shape, shape, unused, unused];
    Wire::new(WireInput { nodes, nics: 2, shapes, staging_offset: 0, recv_buffer_offset: 1 << 14 }).unwrap()
}

fn pair(seed: u64, wire: &Wire) -> (Network, Vec<Side>) {
    pair_over(SimConfig::hostile(seed), LIVENESS, wire)
}

fn pair_over(config: SimConfig, liveness: Liveness, wire: &Wire) -> (Network, Vec<Side>) {
    let network = Network::new(2, SimConfig { clock: SimClock::Real, ..config }).unwrap();
    let mut drivers = Vec::new();
    for rank in [Rank(0), Rank(1)] {
        let machine = Machine::new(&MachineConfig { rank, world: 2, liveness }).unwrap();
        let arena = Words::owned((1 << 15) / 8);
        let mut driver = Driver::new(machine, network.endpoint(rank).unwrap(), system_clock());
        let base = arena.get(0).unwrap().as_ptr() as u64;
        // SAFETY: the arena is dropped after the proxy, and only accessed as atomic words or while nothing is under
        // way.
        unsafe { driver.transport().register(Span::host(base, 1 << 15)) }.unwrap();
        drivers.push((driver, arena, ContextMemory::owned(wire.word_counts())));
    }
    let addresses: Vec<Vec<u8>> =
        drivers.iter_mut().map(|(driver, ..)| driver.transport().address(Rank(0)).unwrap()).collect();
    let sides = drivers.into_iter().zip([1, 0]).map(|((mut driver, arena, memory), peer)| {
        let rank = Rank(1 - peer as u32);
        driver.transport().connect(Rank(peer as u32), &addresses[peer]).unwrap();
        let config = ContextConfig { generation: 0, first_epoch: 1, wire, arenas: &[RegionId(0), RegionId(0)] };
        driver.open(CONTEXT, &config, memory.share()).unwrap();
        let proxy = ProxyThread::spawn(driver, ThreadConfig { core: None, spinners: 4 }).unwrap();
        Side { rank, arena, memory, proxy }
    });
    (network, sides.collect())
}

fn value(rank: Rank, epoch: u64, chunk: u16, at: u64) -> u64 {
    u64::from(rank.0 + 1) << 56 | epoch << 24 | u64::from(chunk) << 16 | at
}

impl Side {
    /// Packs and rings one message of `chunks` chunks.
    fn send(&self, wire: &Wire, direction: Direction, epoch: u64, chunks: u16) {
        if epoch > 2 {
            let word = wire.staging_free_word(direction, epoch, LinkIdx(0));
            wait_for("staging", &self.memory.staging_free, word, &[epoch - 2]);
        }
        let count = wire.chunks_word(direction, epoch, LinkIdx(0));
        self.memory.chunks.get(count).unwrap().store(u64::from(chunks), Ordering::Relaxed);
        for chunk in (0..chunks).map(ChunkIdx) {
            let shape = wire.shape(direction);
            let start = (wire.staging_offset(direction, epoch, LinkIdx(0)) + shape.chunk_offset(chunk)) / 8;
            let bytes = wire.shape(direction).chunk_capacity(chunk);
            for at in 0..u64::from(bytes / 8) {
                let word = self.arena.get((start + at) as usize).unwrap();
                word.store(value(self.rank, epoch, chunk.0, at), Ordering::Relaxed);
            }
            let bell = wire.doorbell_word(direction, epoch, LinkIdx(0), chunk);
            let bell = self.memory.doorbells.get(bell).unwrap();
            bell.store(epoch << 32 | u64::from(bytes), Ordering::Release);
        }
    }

    fn receive(&self, wire: &Wire, direction: Direction, epoch: u64, chunks: u16) {
        let peer = Rank(1 - self.rank.0);
        let mut left: Vec<ChunkIdx> = (0..chunks).map(ChunkIdx).collect();
        for place in 0..u32::from(chunks) {
            let word = wire.arrival_word(direction, epoch, place);
            let any = left.iter().map(|chunk| arrival(epoch, SourceIdx(0), *chunk)).collect::<Vec<_>>();
            let chunk = left.swap_remove(wait_for("arrived", &self.memory.arrived, word, &any));
            let shape = wire.shape(direction);
            let start = (wire.recv_buffer_offset(direction, epoch, SourceIdx(0)) + shape.chunk_offset(chunk)) / 8;
            for at in 0..u64::from(wire.shape(direction).chunk_capacity(chunk) / 8) {
                let seen = self.arena.get((start + at) as usize).unwrap().load(Ordering::Relaxed);
                assert_eq!(seen, value(peer, epoch, chunk.0, at), "epoch {epoch} {chunk:?} word {at}");
            }
        }
    }
}

/// Waits until a word has one of these values, and returns it.
fn wait_for(what: &'static str, words: &Words, at: usize, any: &[u64]) -> usize {
    let which = || {
        let word = words.get(at).unwrap().load(Ordering::Acquire);
        any.iter().position(|value| *value == word)
    };
    wait::poll(what, PATIENCE, which).unwrap_or_else(|| panic!("{what}: none of {any:?} ever comes"))
}

#[test]
fn rows_cross_a_hostile_network_between_threads() {
    let wire = wire();
    let (network, sides) = pair(7, &wire);
    std::thread::scope(|scope| {
        for side in &sides {
            let wire = &wire;
            scope.spawn(move || {
                for epoch in 1..200 {
                    let chunks = (epoch % 3 + 1) as u16;
                    for direction in [Direction::Dispatch, Direction::Combine] {
                        side.send(wire, direction, epoch, chunks);
                        side.receive(wire, direction, epoch, chunks);
                    }
                }
            });
        }
    });
    for side in sides {
        side.proxy.remote().close(CONTEXT, PATIENCE).unwrap();
        let stats = side.proxy.remote().ask(|driver| *driver.machine().stats()).unwrap();
        // What has arrived at the peer may complete here once the context is closed (P2).
        let completions = stats.completions + stats.stale_completions;
        assert_eq!((stats.posts, stats.impossible, stats.duplicates), (completions, 0, 0), "{stats:?}");
        assert!(stats.full > 0, "the network's queues never filled");
        assert_eq!((side.proxy.remote().reports(), side.proxy.remote().failure()), (Vec::new(), None));
        drop(side.proxy);
        drop(side.arena);
    }
    drop(network);
}

#[test]
fn a_killed_peer_is_reported_by_name_and_one_that_leaves_is_not() {
    let wire = wire();
    let (network, mut sides) = pair(8, &wire);
    let heartbeats_seen = |side: &Side| {
        wait::poll("heartbeats", PATIENCE, || {
            let heartbeats = side.proxy.remote().ask(|driver| driver.machine().stats().heartbeats).unwrap();
            (heartbeats > 4).then_some(())
        })
    };
    assert!(sides.iter().all(|side| heartbeats_seen(side).is_some()));
    network.kill(Rank(1));
    let lost = wait::poll("loss", PATIENCE, || sides[0].proxy.remote().reports().first().copied());
    let Some(Report::PeerLost { peer: Rank(1), cause: Cause::Silent { silent_ns } }) = lost else { panic!("{lost:?}") };
    assert!(silent_ns > LIVENESS.silence_ns);
    assert_eq!(sides[0].proxy.remote().lost_peers(), [Rank(1)]);
    // The killed rank and its device see the end of its own endpoint.
    assert!(sides[1].proxy.remote().end().is_some_and(|error| error.is_fatal()));
    assert!(sides[1].proxy.remote().failure().is_some());
    assert_eq!(sides[1].memory.lost.get(0).unwrap().load(Ordering::Acquire), 2);
    assert_eq!(sides[0].proxy.remote().end(), None);
    sides.clear();

    let (_network, mut sides) = pair(9, &wire);
    assert!(sides.iter().all(|side| heartbeats_seen(side).is_some()));
    let stays = sides.swap_remove(0);
    sides.clear();
    std::thread::sleep(Duration::from_nanos(2 * LIVENESS.silence_ns));
    assert_eq!(stays.proxy.remote().reports(), []);
}

#[test]
fn what_was_rung_before_a_context_closes_is_posted_though_its_queue_is_full() {
    let wire = wire();
    // Nobody is lost, however long the machine pauses a proxy.
    let patient = Liveness { silence_ns: 60_000_000_000, first_contact_ns: 60_000_000_000, ..LIVENESS };
    let (network, sides) = pair_over(SimConfig { nic_queue: 2, ..SimConfig::hostile(13) }, patient, &wire);
    let [first, second] = &sides[..] else { panic!("{} sides", sides.len()) };
    let remote = first.proxy.remote();
    // The proxy waits while all is rung. Then it finds the doorbells, and the queues of its NICs full, which have just
    // been stopped.
    let ((begun, begins), (rung, all_rung)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
    let blocked = std::thread::scope(|scope| {
        let nics = network.clone();
        let asked = scope.spawn(move || {
            remote.ask(move |driver| {
                begun.send(()).unwrap();
                let is_rung = all_rung.recv_timeout(PATIENCE).is_ok();
                (0..2).for_each(|nic| nics.stop(Rank(0), nic, 1_000_000_000));
                // The first finds the doorbells, the second what full queues have left.
                driver.settle(CONTEXT);
                is_rung && !driver.settle(CONTEXT)
            })
        });
        begins.recv_timeout(PATIENCE).unwrap();
        for epoch in 1..3 {
            for direction in [Direction::Dispatch, Direction::Combine] {
                first.send(&wire, direction, epoch, 3);
            }
        }
        rung.send(()).unwrap();
        asked.join().unwrap().unwrap()
    });
    assert!(blocked, "nothing was left to be posted, so this shows nothing");
    let settled =
        wait::poll("messages", PATIENCE, || remote.ask(|driver| driver.settle(CONTEXT)).unwrap().then_some(()));
    assert!(settled.is_some());
    remote.close(CONTEXT, PATIENCE).unwrap();
    for epoch in 1..3 {
        for direction in [Direction::Dispatch, Direction::Combine] {
            second.receive(&wire, direction, epoch, 3);
        }
    }
    drop(sides);
}

#[test]
fn a_proxy_that_panics_notifies_its_device_and_its_callers() {
    let wire = wire();
    let (_network, mut sides) = pair(14, &wire);
    let side = sides.swap_remove(0);
    let remote = side.proxy.remote();
    let error = remote.ask(|_| panic!("on request")).unwrap_err();
    assert!(error.is_fatal(), "{error:?}");
    let error = error.to_string();
    assert!(error.contains("the proxy thread panicked: on request"), "{error}");
    assert_eq!(remote.ask(|_| ()).unwrap_err().to_string(), error);
    assert_eq!(side.memory.lost.get(0).unwrap().load(Ordering::Acquire), 1);
}

#[test]
fn a_request_that_nobody_waits_for_any_more_is_not_done() {
    let network = Network::new(1, SimConfig::calm()).unwrap();
    let machine = Machine::new(&MachineConfig { rank: Rank(0), world: 1, liveness: LIVENESS }).unwrap();
    let mut driver = Driver::new(machine, network.endpoint(Rank(0)).unwrap(), system_clock());
    let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let flag = Arc::clone(&done);
    let error =
        driver.remote().ask_within(Duration::from_millis(5), move |_| flag.store(true, Ordering::Relaxed), |_, ()| ());
    assert!(error.unwrap_err().to_string().contains("does not answer"));
    assert_eq!(Arc::strong_count(&done), 1, "what it captured is gone");
    driver.poll_once();
    assert!(!done.load(Ordering::Relaxed));
}

#[test]
fn an_answer_that_comes_when_its_caller_has_left_is_undone() {
    let network = Network::new(1, SimConfig::calm()).unwrap();
    let machine = Machine::new(&MachineConfig { rank: Rank(0), world: 1, liveness: LIVENESS }).unwrap();
    let mut driver = Driver::new(machine, network.endpoint(Rank(0)).unwrap(), system_clock());
    let remote = driver.remote();
    let (begins, begun) = std::sync::mpsc::channel();
    let (leaves, left) = std::sync::mpsc::channel();
    let (undoes, undone) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let request = move |_: &mut Driver<SimEndpoint>| {
                begins.send(()).unwrap();
                left.recv_timeout(PATIENCE).unwrap();
                7
            };
            // Long enough for the driver to begin.
            let answer =
                remote.ask_within(Duration::from_millis(500), request, move |_, late| undoes.send(late).unwrap());
            assert!(answer.unwrap_err().to_string().contains("does not answer"));
            leaves.send(()).unwrap();
        });
        wait::poll("the request", PATIENCE, || {
            driver.poll_once();
            begun.try_recv().ok()
        });
    });
    assert_eq!(undone.try_iter().collect::<Vec<_>>(), [7]);
}

#[test]
fn a_region_is_released_once_however_often_it_is_asked() {
    let network = Network::new(1, SimConfig::calm()).unwrap();
    let machine = Machine::new(&MachineConfig { rank: Rank(0), world: 1, liveness: LIVENESS }).unwrap();
    let mut driver = Driver::new(machine, network.endpoint(Rank(0)).unwrap(), system_clock());
    let arena = Words::owned(8);
    let base = arena.get(0).unwrap().as_ptr() as u64;
    // SAFETY: the arena is dropped after the driver, and nothing accesses it.
    let region = unsafe { driver.register(Span::host(base, 64), Arc::new(())) }.unwrap();
    (0..2).for_each(|_| driver.release(region));
    assert_eq!((driver.take_back().len(), driver.is_registered(region)), (1, false));
    driver.release(region);
    assert!(driver.take_back().is_empty() && driver.remote().failure().is_none());
    drop(driver);
}

#[test]
fn whatever_ends_a_proxy_is_a_fatal_error() {
    for (error, same) in [(Error::device("NIC 3", "restart"), true), (Error::argument("bytes", 9, "give 8"), false)] {
        let shared = Arc::new(Shared::<SimEndpoint>::new());
        shared.give_up(error.clone());
        let end = Remote::new(shared).end().unwrap();
        assert!(end.is_fatal() && end.to_string().contains(&error.to_string()), "{end:?}");
        assert_eq!(end == error.clone().ending(), same);
        let source = std::error::Error::source(&end).map(ToString::to_string);
        assert_eq!(source, (!same).then(|| error.to_string()));
    }
}

#[test]
fn the_newest_reports_are_kept_and_all_are_counted() {
    let shared = Arc::new(Shared::<SimEndpoint>::new());
    let remote = Remote::new(Arc::clone(&shared));
    let report = |rank| Report::PeerLost { peer: Rank(rank), cause: Cause::Refused };
    (0..5000).for_each(|rank| shared.report(report(rank)));
    assert_eq!((remote.reported(), remote.reports().last().copied()), (5000, Some(report(4999))));
    assert_eq!(remote.reports_since(4998), [report(4998), report(4999)]);
    assert!(remote.reports_since(5000).is_empty() && remote.reports().len() >= 2047, "a world's worth is kept");
}

#[test]
fn what_cannot_be_opened_or_asked_is_an_error() {
    let wire = wire();
    let (_network, mut sides) = pair(10, &wire);
    let side = sides.swap_remove(0);
    let remote = side.proxy.remote().clone();
    let wire_there = wire.clone();
    let twice = remote.ask(move |driver| {
        let config =
            ContextConfig { generation: 0, first_epoch: 1, wire: &wire_there, arenas: &[RegionId(0), RegionId(0)] };
        let again = driver.open(CONTEXT, &config, ContextMemory::owned(wire_there.word_counts()));
        let short = driver.open(ContextIdx(1), &config, ContextMemory::owned(Default::default()));
        (again.unwrap_err().to_string(), short.unwrap_err().to_string())
    });
    let (again, short) = twice.unwrap();
    assert!(again.contains("is open") && short.contains("shared words"), "{again}; {short}");
    drop(side);
    assert!(remote.ask(|_| ()).unwrap_err().to_string().contains("does not answer"));
    let words: Arc<Vec<u64>> = Arc::new(vec![0; 2]);
    // SAFETY: refused before it is used.
    assert!(unsafe { Words::from_raw(words.as_ptr().cast_mut().byte_add(4), 1, words.clone()) }.is_err());
    let (_network, mut sides) = pair(11, &wire);
    let driver = sides.swap_remove(0);
    drop(driver);
}

/// How many of `arrived` immediates a drain leaves. A poll hands out one; the drain's clock reads 0, then `end_ns`.
fn left_by_a_drain(arrived: usize, end_ns: u64) -> usize {
    let network = Network::new(2, SimConfig { poll_batch: 1, ..SimConfig::calm() }).unwrap();
    let machine = Machine::new(&MachineConfig { rank: Rank(0), world: 2, liveness: LIVENESS }).unwrap();
    let begun = std::sync::Mutex::new(0);
    // `new` reads the clock, too.
    let clock = move || {
        let mut times = begun.lock().unwrap();
        *times += 1;
        if *times > 2 { end_ns } else { 0 }
    };
    let mut driver = Driver::new(machine, network.endpoint(Rank(0)).unwrap(), Box::new(clock));
    let mut peer = network.endpoint(Rank(1)).unwrap();
    let memory = Words::owned(1);
    let span = Span::host(memory.get(0).unwrap().as_ptr() as u64, 8);
    // SAFETY: the memory outlives both endpoints, and nothing else accesses it.
    let regions = unsafe { [peer.register(span).unwrap(), driver.transport().register(span).unwrap()] };
    peer.connect(Rank(0), &driver.transport().address(Rank(1)).unwrap()).unwrap();
    driver.transport().connect(Rank(1), &peer.address(Rank(0)).unwrap()).unwrap();
    let [source, target] = regions.map(|region| Place { region, offset: 0 });
    for token in 0..arrived as u64 {
        let imm = ImmValue::user(0, 0, 1).unwrap();
        let write = WriteImm { nic: 0, peer: Rank(0), source, target, bytes: 0, imm, token };
        assert_eq!(peer.post(&write), Ok(Posted::Accepted));
    }
    let mut sent = 0;
    while sent < arrived {
        sent += peer.poll(&mut |_| {}).unwrap();
    }
    driver.drain();
    std::iter::from_fn(|| Some(driver.transport().poll(&mut |_| {}).unwrap())).take_while(|count| *count > 0).sum()
}

/// What is left would be counted as the next context's; a peer that sends for ever would keep a context from opening.
#[test]
fn a_drain_takes_in_all_that_has_arrived_and_ends_after_a_second() {
    assert_eq!(left_by_a_drain(5, DRAIN_NS - 1), 0);
    assert_eq!(left_by_a_drain(5, DRAIN_NS), 4);
}

/// An older generation would close the contexts of the newer one and reset the transport under them.
#[test]
fn a_generation_that_is_past_is_refused_and_changes_nothing() {
    let wire = wire();
    let (_network, sides) = pair(15, &wire);
    let remote = sides[0].proxy.remote();
    let [newer, same, older] = [3, 3, 2].map(|generation| {
        let wire = wire.clone();
        remote.ask(move |driver| {
            let entered = driver.enter_generation(generation);
            let open = driver.contexts[0].is_some();
            if !open {
                let config =
                    ContextConfig { generation: 3, first_epoch: 1, wire: &wire, arenas: &[RegionId(0), RegionId(0)] };
                driver.open(CONTEXT, &config, ContextMemory::owned(wire.word_counts())).unwrap();
            }
            (entered, driver.generation(), open)
        })
    });
    assert_eq!(newer.unwrap(), (Ok(()), 3, false), "contexts of older generations are closed");
    assert_eq!(same.unwrap(), (Ok(()), 3, true));
    let refused = Error::Generation { rank: Rank(0), generation: 2, newest: 3 };
    assert_eq!(older.unwrap(), (Err(refused), 3, true));
}

#[test]
fn a_core_that_is_not_there_is_refused() {
    let network = Network::new(1, SimConfig::calm()).unwrap();
    let machine = Machine::new(&MachineConfig { rank: Rank(0), world: 1, liveness: LIVENESS }).unwrap();
    let driver = Driver::new(machine, network.endpoint(Rank(0)).unwrap(), system_clock());
    let refused = ProxyThread::spawn(driver, ThreadConfig { core: Some(1 << 20), spinners: 0 });
    let error = refused.err().unwrap().to_string();
    let usable = format!("{:?}", core_affinity::get_core_ids().unwrap().iter().map(|core| core.id).collect::<Vec<_>>());
    assert!(error.contains("proxy core is 1048576") && error.contains(&usable), "{error}");
}

#[test]
fn an_arena_is_freed_once_its_writes_have_left_and_not_before() {
    let wire = wire();
    let (network, sides) = pair(12, &wire);
    let [first, second] = &sides[..] else { panic!("{} sides", sides.len()) };
    let memory = Arc::new(vec![0u64; 512]);
    let span = Span::host(memory.as_ptr() as u64, 4096);
    let (freed, keep): (_, Kept) = (Arc::downgrade(&memory), memory);
    // SAFETY: nothing but the network accesses the words, which `keep` holds.
    let region = first.proxy.remote().ask(move |driver| unsafe { driver.register(span, keep) }).unwrap().unwrap();
    network.stop(Rank(0), 0, 50_000_000);
    let place = |region| crate::transport::network::Place { region, offset: 0 };
    let imm = crate::transport::network::imm::ImmValue::user(0, 0, 1).unwrap();
    let (source, target) = (place(region), place(RegionId(0)));
    let write = WriteImm { nic: 0, peer: Rank(1), source, target, bytes: 8, imm, token: 0 };
    let take_back = move |driver: &mut Driver<SimEndpoint>| (driver.take_back(), driver.is_leaving(region));
    let (unfreed, leaving) = first
        .proxy
        .remote()
        .ask(move |driver| {
            while driver.transport().post(&write).unwrap() == Posted::Full {}
            driver.release(region);
            take_back(driver)
        })
        .unwrap();
    assert!(unfreed.is_empty() && leaving && freed.upgrade().is_some());
    let gone = wait::poll("the region to go", PATIENCE, || {
        let (memory, leaving) = first.proxy.remote().ask(take_back).unwrap();
        assert_eq!(memory.len(), usize::from(!leaving));
        (!leaving).then_some(())
    });
    assert!(gone.is_some() && freed.upgrade().is_none());
    assert_eq!((first.proxy.remote().failure(), second.proxy.remote().failure()), (None, None));
    drop(sides);
}

/// One driver, whose peer never answers: only the doorbells matter.
#[test]
fn a_doorbell_of_2_to_the_32_epochs_ago_is_not_taken_for_one_that_rings() {
    let wire = wire();
    let network = Network::new(2, SimConfig { clock: SimClock::Real, ..SimConfig::hostile(11) }).unwrap();
    let memory = ContextMemory::owned(wire.word_counts());
    let arenas = [Words::owned((1 << 15) / 8), Words::owned((1 << 15) / 8)];
    let mut ends = [Rank(0), Rank(1)].map(|rank| network.endpoint(rank).unwrap());
    for (end, arena) in ends.iter_mut().zip(&arenas) {
        let base = arena.get(0).unwrap().as_ptr() as u64;
        // SAFETY: the arenas are dropped after the network's ends, and nothing else accesses them.
        unsafe { end.register(Span::host(base, 1 << 15)) }.unwrap();
    }
    let address = ends[1].address(Rank(0)).unwrap();
    let [mut end, _peer] = ends;
    end.connect(Rank(1), &address).unwrap();
    let liveness = Liveness { first_contact_ns: 60_000_000_000, ..LIVENESS };
    let machine = Machine::new(&MachineConfig { rank: Rank(0), world: 2, liveness }).unwrap();
    let mut driver = Driver::new(machine, end, system_clock());
    let direction = Direction::Dispatch;
    let ring = |epoch: u64, chunk: u16| {
        let bytes = u64::from(wire.shape(direction).chunk_capacity(ChunkIdx(chunk)));
        let count = wire.chunks_word(direction, epoch, LinkIdx(0));
        memory.chunks.get(count).unwrap().store(2, Ordering::Relaxed);
        let bell = wire.doorbell_word(direction, epoch, LinkIdx(0), ChunkIdx(chunk));
        memory.doorbells.get(bell).unwrap().store(epoch << 32 | bytes, Ordering::Release);
    };
    // Indistinguishable from one chunk in every epoch between: the words are those of the first context.
    for (first_epoch, chunks, settled) in [((1 << 32) - 1, 2, true), ((1 << 33) - 1, 1, false)] {
        let config = ContextConfig { generation: 0, first_epoch, wire: &wire, arenas: &[RegionId(0), RegionId(0)] };
        driver.open(CONTEXT, &config, memory.share()).unwrap();
        (0..chunks).for_each(|chunk| ring(first_epoch, chunk));
        let taken = wait::poll("doorbells", if settled { PATIENCE } else { Duration::from_millis(200) }, || {
            driver.poll_once();
            (driver.settle(CONTEXT) && driver.machine().stats().posts > 0).then_some(())
        });
        assert_eq!(taken.is_some(), settled, "from epoch {first_epoch}: {:?}", driver.machine().stats());
        wait::poll("writes", PATIENCE, || {
            (!driver.poll_once() && driver.machine().under_way(CONTEXT) == 0).then_some(())
        });
        driver.close(CONTEXT);
    }
    assert_eq!((driver.machine().stats().bad_doorbells, driver.broken), (0, false));
}

#[test]
fn a_driver_that_was_dropped_answers_nobody_and_keeps_nobody_waiting() {
    let network = Network::new(2, SimConfig { clock: SimClock::Real, ..SimConfig::hostile(12) }).unwrap();
    let machine = Machine::new(&MachineConfig { rank: Rank(0), world: 2, liveness: LIVENESS }).unwrap();
    let driver = Driver::new(machine, network.endpoint(Rank(0)).unwrap(), system_clock());
    let remote = driver.remote();
    drop(driver);
    let start = Instant::now();
    assert!(remote.ask(|driver| driver.generation()).is_err());
    assert!(start.elapsed() < REQUEST_TIMEOUT / 2, "{:?}", start.elapsed());
}

/// If its caller did not wait, the result of a request would be lost, and nobody would undo its effect.
#[test]
fn a_request_that_has_begun_is_waited_for_whatever_is_raised() {
    let (_network, sides) = pair(1, &wire());
    let (interrupt, raiser) = (Interrupt::new(), Interrupt::new());
    interrupt.raise();
    let begun = raiser.clone();
    let slow = move |_: &mut Driver<_>| {
        begun.raise();
        std::thread::sleep(Duration::from_millis(20));
        7
    };
    assert_eq!(raiser.during(|| sides[0].proxy.remote().ask(slow)), Ok(7));
    // While a long request runs, the next one has not begun.
    std::thread::scope(|scope| {
        let remote = sides[0].proxy.remote();
        let (first, inside) = (remote.clone(), std::sync::Arc::new(std::sync::Barrier::new(2)));
        let here = inside.clone();
        scope.spawn(move || {
            first.ask(move |_| {
                here.wait();
                std::thread::sleep(Duration::from_millis(50));
            })
        });
        inside.wait();
        let outcome = interrupt.during(|| remote.ask(|_| ()));
        assert!(matches!(outcome, Err(Error::Interrupted { .. })), "{outcome:?}");
    });
}
