//! The emulated NIC under the contract of transports and under whole contexts, on CPU devices: the same kernel as on
//! GPUs. The contexts' test runs on GPUs with `TOKENYARD_TEST_DEVICE=cuda`.

use crate::{context_rig, contract, rig};

use context_rig::{Rig, on_ranks, test_device};
use rig::{Backend, Cluster, Log, SLOT, SLOTS, pattern, write};
use std::time::{Duration, Instant};
use tokenyard::internals::base::{Error, Rank};
use tokenyard::internals::proxy::driver::ThreadConfig;
use tokenyard::internals::proxy::machine::Liveness;
use tokenyard::internals::transport::network::emulated::{GpuNetwork, GpuNicEndpoint, overhead};
use tokenyard::internals::transport::network::sim::{Clock, LinkModel, Network, SimConfig};
use tokenyard::internals::transport::network::{Event, MAX_MESSAGE, Released, Transport};
use tokenyard::internals::transport::{Arena, PeerMap};
use tokenyard::{ArenaPlace, Device, Proxy, ProxyConfig};

/// Emulated networks of one link model.
struct Nics(LinkModel, usize);

impl Backend for Nics {
    type Endpoint = GpuNicEndpoint<Device>;

    fn endpoints(&self, ranks: usize) -> Vec<GpuNicEndpoint<Device>> {
        let network = GpuNetwork::new(ranks, self.0, self.1).unwrap();
        (0..ranks as u32).map(|rank| network.endpoint(Rank(rank), &Device::cpu().unwrap()).unwrap()).collect()
    }
}

const SLOW: LinkModel = LinkModel { gbps: 10.0, latency_us: 20.0, per_message_us: 0.5 };

contract!(free_link, Nics(LinkModel::FREE, 1));
contract!(four_slow_nics, Nics(SLOW, 4));

/// Everything that one write of `bytes` takes until it is over, on both sides.
fn elapsed(cluster: &mut Cluster<GpuNicEndpoint<Device>>, number: u32, bytes: usize) -> Duration {
    let mut log = Log::default();
    cluster.regions(0).source.write(0, &pattern(number, bytes));
    let start = Instant::now();
    cluster.post(0, &write(1, number, 0, bytes), &mut log);
    cluster.pump_until("a write", &mut log, |log| log.imms.contains_key(&(1, number)));
    start.elapsed()
}

#[test]
fn a_write_is_never_faster_than_its_model() {
    // 8 Mb/s: a byte in a microsecond.
    let model = LinkModel { gbps: 0.008, latency_us: 3000.0, per_message_us: 1000.0 };
    let mut cluster = Cluster::new(&Nics(model, 2), 2);
    assert!(elapsed(&mut cluster, 1, 900) >= Duration::from_micros(4900));
    assert!(elapsed(&mut cluster, 2, 0) >= Duration::from_micros(4000));
    // Four writes on one NIC follow each other, and so share one latency.
    let mut log = Log::default();
    let start = Instant::now();
    for number in 10..14 {
        cluster.post(0, &write(1, number, number as usize % SLOTS, 500), &mut log);
    }
    cluster.pump_until("writes one after the other", &mut log, |log| log.imms.len() == 4);
    assert!(start.elapsed() >= Duration::from_micros(4 * 1500 + 3000));
    // The sender was polled before the receiver, perhaps before they were due, but one poll is enough now.
    cluster.pump(&mut |rank, _, event| log.note(rank, event));
    assert!(log.completed(0, 10..14), "a write is sent before it has arrived");
}

#[test]
fn completions_of_a_slow_link_come_before_its_source_may_change() {
    let model = LinkModel { gbps: 0.008, latency_us: 0.0, per_message_us: 0.0 };
    let mut cluster = Cluster::new(&Nics(model, 1), 2);
    let start = Instant::now();
    let mut log = Log::default();
    cluster.post(0, &write(1, 1, 0, 900), &mut log);
    cluster.pump_until("a completion", &mut log, |log| log.completed(0, [1]));
    assert!(start.elapsed() >= Duration::from_micros(900), "completed at {:?}", start.elapsed());
}

#[test]
fn an_immediate_that_is_not_due_is_forgotten_with_its_region() {
    let model = LinkModel { gbps: 100.0, latency_us: 20_000.0, per_message_us: 0.0 };
    for receiver_has_looked in [false, true] {
        let mut cluster = Cluster::new(&Nics(model, 1), 2);
        let mut log = Log::default();
        cluster.post(0, &write(1, 1, 0, 8), &mut log);
        let start = Instant::now();
        while !log.completed(0, [1]) {
            assert!(start.elapsed() < rig::PATIENCE, "the write does not complete");
            cluster.endpoint(0).poll(&mut |event| log.note(0, event)).unwrap();
        }
        if receiver_has_looked {
            assert_eq!(cluster.endpoint(1).poll(&mut |_| {}), Ok(0), "a link of 20 ms");
        }
        assert_eq!(cluster.endpoint(1).deregister(rig::RECV_BUFFER), Ok(Released::Done));
        std::thread::sleep(Duration::from_millis(40));
        assert_eq!(cluster.endpoint(1).poll(&mut |_| {}), Ok(0), "its number may mean something else by now");
    }
}

#[test]
fn receivers_take_in_one_write_after_the_other() {
    let model = LinkModel { gbps: 0.008, latency_us: 0.0, per_message_us: 0.0 };
    let mut cluster = Cluster::new(&Nics(model, 1), 4);
    let mut log = Log::default();
    let start = Instant::now();
    for from in 1..4 {
        cluster.post(from, &write(0, from as u32, from, 900), &mut log);
    }
    cluster.pump_until("three writes to one rank", &mut log, |log| log.imms.len() == 3);
    assert!(start.elapsed() >= Duration::from_micros(2700), "{:?}", start.elapsed());
}

#[test]
fn a_kernel_that_went_idle_comes_back() {
    let mut cluster = Cluster::new(&Nics(LinkModel::FREE, 1), 2);
    for number in 0..6 {
        elapsed(&mut cluster, number, 700);
        assert_eq!(cluster.regions(1).recv_buffer.read(0, 700), pattern(number, 700));
        std::thread::sleep(Duration::from_millis(if number % 2 == 0 { 60 } else { 19 }));
    }
}

/// Two connected endpoints; the first writes from its `source` into the second's `recv_buffer`.
struct Pair {
    // Before the memory, which they use.
    ends: [GpuNicEndpoint<Device>; 2],
    source: rig::Memory,
    recv_buffer: rig::Memory,
}

impl Pair {
    fn new(bytes: usize) -> Pair {
        let network = GpuNetwork::new(2, LinkModel::FREE, 1).unwrap();
        let (source, recv_buffer) = (rig::Memory::new(bytes), rig::Memory::new(bytes));
        let mut ends = [0, 1].map(|rank| network.endpoint(Rank(rank), &Device::cpu().unwrap()).unwrap());
        // SAFETY: accessed through raw pointers only, and dropped after the endpoints.
        unsafe { (ends[0].register(source.span()).unwrap(), ends[1].register(recv_buffer.span()).unwrap()) };
        let addresses = [ends[0].address(Rank(1)).unwrap(), ends[1].address(Rank(0)).unwrap()];
        ends[0].connect(Rank(1), &addresses[1]).unwrap();
        ends[1].connect(Rank(0), &addresses[0]).unwrap();
        Pair { ends, source, recv_buffer }
    }

    fn post(&mut self, number: usize, from: usize, to: usize, bytes: usize) {
        let mut write = write(1, number as u32, 0, bytes);
        (write.source.offset, write.target.offset, write.target.region) = (from as u64, to as u64, rig::SOURCE);
        let _ = self.ends[0].post(&write).unwrap();
    }

    /// Waits for so many immediates.
    fn arrive(&mut self, count: usize) {
        let (start, mut arrived) = (Instant::now(), 0);
        while arrived < count {
            assert!(start.elapsed() < rig::PATIENCE, "{arrived} of {count} writes");
            self.ends[0].poll(&mut |_| {}).unwrap();
            self.ends[1].poll(&mut |event| arrived += usize::from(matches!(event, Event::Imm { .. }))).unwrap();
        }
    }
}

#[test]
fn large_and_crooked_writes_arrive_whole() {
    const BYTES: usize = 1 << 20;
    let mut pair = Pair::new(BYTES);
    pair.source.write(0, &pattern(1, BYTES));
    let cases = [(0, 0, BYTES), (3, 19, 500_001), (5, 6, 70_000), (8, 8, 65_537), (15, 31, 16), (9, 1, 3), (1, 17, 14)];
    for (number, (from, to, bytes)) in cases.into_iter().enumerate() {
        pair.recv_buffer.fill(0, BYTES, rig::GUARD);
        pair.post(number, from, to, bytes);
        pair.arrive(1);
        let seen = pair.recv_buffer.all();
        assert!(seen[to..to + bytes] == pattern(1, BYTES)[from..from + bytes], "case {number}");
        assert!(seen[..to].iter().chain(&seen[to + bytes..]).all(|byte| *byte == rig::GUARD), "case {number}");
    }
}

#[test]
fn slots_of_requests_in_several_parts_come_around() {
    // One after the other, so that groups work side by side, and small writes are over before large ones; the last is
    // so large that its parts take longer than this thread takes to look at them: a late one is noticed as missing.
    const SIZES: [usize; 5] = [24_000, 16, 8_000, 1, 400_000];
    const BYTES: usize = 432_017;
    let mut pair = Pair::new(BYTES);
    // More than twice the slots, so that each is used again.
    for round in 0..120 {
        pair.source.write(0, &pattern(round as u32, BYTES));
        pair.recv_buffer.fill(0, BYTES, rig::GUARD);
        let mut from = 0;
        for (number, bytes) in SIZES.into_iter().enumerate() {
            pair.post(round * SIZES.len() + number, from, from, bytes);
            from += bytes;
        }
        assert_eq!(from, BYTES);
        pair.arrive(SIZES.len());
        assert!(pair.recv_buffer.all() == pattern(round as u32, BYTES), "round {round}");
    }
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    assert!(GpuNetwork::<Device>::new(0, LinkModel::FREE, 1).is_err());
    assert!(GpuNetwork::<Device>::new(2, LinkModel::FREE, 5).is_err());
    assert!(GpuNetwork::<Device>::new(2, LinkModel { gbps: 0.0, ..LinkModel::FREE }, 1).is_err());
    let network = GpuNetwork::new(2, LinkModel::FREE, 1).unwrap();
    let device = Device::cpu().unwrap();
    let mut first = network.endpoint(Rank(0), &device).unwrap();
    for rank in [0, 2] {
        assert!(matches!(network.endpoint(Rank(rank), &device), Err(Error::Argument { .. })));
    }
    // An address of another network is refused as such.
    let mut other = GpuNetwork::new(2, LinkModel::FREE, 1).unwrap().endpoint(Rank(1), &device).unwrap();
    let why = first.connect(Rank(1), &other.address(Rank(0)).unwrap()).unwrap_err().to_string();
    assert!(why.contains("another network"), "{why}");
    assert!(first.send(Rank(1), &[0; MAX_MESSAGE]).is_err());
}

#[test]
fn the_emulator_measures_itself() {
    let us = overhead(&Device::cpu().unwrap(), &Device::cpu().unwrap()).unwrap();
    println!("{us:.1} us from post to immediate on CPU devices");
    assert!(us > 0.0);
}

/// Two nodes of two ranks: rows and sums go over the emulated NIC.
fn rounds_over_nodes(model: LinkModel, nics: usize, chunk_rows: Option<usize>) {
    let network = GpuNetwork::new(4, model, nics).unwrap();
    on_ranks(4, |world| {
        let world = world.with_nodes(&[2, 2]).unwrap();
        let device = test_device(&world);
        let endpoint = network.endpoint(world.rank(), &device).unwrap();
        let thread = ThreadConfig { core: None, spinners: 8 };
        let config = ProxyConfig { liveness: Liveness::default(), thread };
        let proxy = Proxy::spawn(&world, Box::new(endpoint), config).unwrap();
        let rig = Rig::on(&world, device, |builder| match chunk_rows {
            Some(rows) => builder.proxy(&proxy).tuning(|t| t.chunk_rows = Some(rows)),
            None => builder.proxy(&proxy),
        });
        for salt in 0..6 {
            rig.good_round(salt);
        }
        // Longer than the kernel waits for work.
        std::thread::sleep(Duration::from_millis(50));
        rig.good_round(9);
        world.barrier("done").unwrap();
    });
}

#[test]
fn contexts_over_nodes_get_every_row() {
    rounds_over_nodes(LinkModel::FREE, 1, None);
}

#[test]
fn contexts_over_slow_nics_and_many_chunks_get_every_row() {
    rounds_over_nodes(SLOW, 2, Some(1));
}

#[test]
fn arenas_of_other_nodes_stay_unknown_to_contexts() {
    on_ranks(3, |world| {
        let world = world.with_nodes(&[2, 1]).unwrap();
        let device = test_device(&world);
        let arena = match device.ordinal() {
            Some(ordinal) => Arena::cuda(ordinal, 5 * SLOT).unwrap(),
            None => Arena::cpu(5 * SLOT).unwrap(),
        };
        arena.grant_process().unwrap();
        let map = PeerMap::establish(&world, arena).unwrap();
        for rank in 0..3 {
            assert_eq!(map.base_of(Rank(rank)) != 0, (rank < 2) == (world.rank().0 < 2));
        }
        world.barrier("done").unwrap();
    });
}

#[test]
fn contexts_on_gpus_over_a_network_that_the_processor_moves_need_arenas_in_host_memory() {
    let network = Network::new(2, SimConfig { clock: Clock::Real, ..SimConfig::calm() }).unwrap();
    on_ranks(2, |world| {
        let world = world.with_nodes(&[1, 1]).unwrap();
        let device = test_device(&world);
        let endpoint = network.endpoint(world.rank()).unwrap();
        assert!(endpoint.device_needs().host_memory);
        if device.ordinal().is_none() {
            println!("skipped: no GPU is asked for, and the processor reaches all other memory");
            return;
        }
        let thread = ThreadConfig { core: None, spinners: 4 };
        let config = ProxyConfig { liveness: Liveness::default(), thread };
        let proxy = Proxy::spawn(&world, Box::new(endpoint), config).unwrap();
        let on_device = context_rig::builder(&world, &device).tuning(|t| t.arena = ArenaPlace::Device);
        let refused = on_device.proxy(&proxy).build().map(drop).unwrap_err().to_string();
        assert!(refused.contains("ArenaPlace::Auto"), "{refused}");
        let rig = Rig::on(&world, device, |builder| builder.proxy(&proxy));
        rig.good_round(1);
        world.barrier("done").unwrap();
    });
}
