//! Every transport under the contract, and the disturbances of the simulated one meanwhile.

use crate::{contract, rig};

use rig::{Backend, Cluster, Storm};
use tokenyard::internals::base::Rank;
use tokenyard::internals::transport::network::sim::{
    Clock, Counts, DeadPeers, LinkModel, Network, ProcessEndpoint, SimConfig, SimEndpoint,
};

/// Simulated networks of one configuration.
struct Sim(SimConfig);

impl Backend for Sim {
    type Endpoint = SimEndpoint;

    fn endpoints(&self, ranks: usize) -> Vec<SimEndpoint> {
        endpoints(&Network::new(ranks, impatient(&self.0)).unwrap(), ranks)
    }
}

/// Where time passes by polls, a peer that does not poll is waited for in few of them.
fn impatient(config: &SimConfig) -> SimConfig {
    let let_go_ns = if config.clock == Clock::Real { config.let_go_ns } else { 5_000_000 };
    SimConfig { let_go_ns, ..config.clone() }
}

fn endpoints(network: &Network, ranks: usize) -> Vec<SimEndpoint> {
    (0..ranks as u32).map(|rank| network.endpoint(Rank(rank)).unwrap()).collect()
}

/// A network that was made elsewhere, so that its counts can be read.
struct Made(Network);

impl Backend for Made {
    type Endpoint = SimEndpoint;

    fn endpoints(&self, ranks: usize) -> Vec<SimEndpoint> {
        endpoints(&self.0, ranks)
    }
}

/// Endpoints that share nothing but sockets, as those of different processes.
struct Processes(SimConfig);

impl Backend for Processes {
    type Endpoint = ProcessEndpoint;

    fn endpoints(&self, ranks: usize) -> Vec<ProcessEndpoint> {
        let open = |rank| ProcessEndpoint::open(Rank(rank), b"contract", impatient(&self.0)).unwrap();
        (0..ranks as u32).map(open).collect()
    }
}

/// Four NICs of a common kind of 100 Gb/s, and one of them slow.
fn uneven_nics() -> Vec<LinkModel> {
    let fast = LinkModel { gbps: 100.0, latency_us: 3.0, per_message_us: 0.1 };
    vec![fast, fast, fast, LinkModel { gbps: 10.0, latency_us: 20.0, per_message_us: 0.5 }]
}

contract!(calm, Sim(SimConfig::calm()));
contract!(hostile, Sim(SimConfig::hostile(1)));
contract!(silent_dead, Sim(SimConfig { dead_peers: DeadPeers::Silent, ..SimConfig::hostile(2) }));
contract!(four_uneven_nics, Sim(SimConfig { nics: uneven_nics(), ..SimConfig::hostile(3) }));
contract!(
    one_byte_packets,
    Sim(SimConfig { packet_bytes: 1, nic_queue: 2, peer_queue: 1, poll_batch: 1, ..SimConfig::hostile(4) })
);
contract!(real_time, Sim(SimConfig { clock: Clock::Real, ..SimConfig::hostile(5) }));
/// Each of these endpoints has a clock of its own, which nobody else's polls move: so a poll takes longer.
fn hostile_processes(seed: u64) -> SimConfig {
    SimConfig { clock: Clock::Virtual { tick_ns: 1000 }, ..SimConfig::hostile(seed) }
}

contract!(between_processes, Processes(SimConfig::calm()));
contract!(between_hostile_processes, Processes(hostile_processes(6)));
contract!(between_silent_processes, Processes(SimConfig { dead_peers: DeadPeers::Silent, ..hostile_processes(7) }));
contract!(
    between_processes_one_byte_packets,
    Processes(SimConfig { packet_bytes: 1, nic_queue: 2, peer_queue: 1, poll_batch: 1, ..hostile_processes(8) })
);
contract!(
    between_processes_in_real_time,
    Processes(SimConfig { clock: Clock::Real, nics: uneven_nics(), ..SimConfig::hostile(9) })
);

// Receives and bytes of a write that are few, for the promises that do with them.
contract!(@ bounded, Sim(SimConfig { receives: 40, write_bytes: 3000, ..SimConfig::hostile(10) }), limits_that_are_not_so);
contract!(@ short_writes, Sim(SimConfig { write_bytes: 900, ..SimConfig::hostile(11) }),
    immediate_before_its_payload, write_outside_a_region_let_through, limits_that_are_not_so);
contract!(@ short_writes_between_processes, Processes(SimConfig { write_bytes: 900, ..hostile_processes(12) }),
    immediate_before_its_payload, write_outside_a_region_let_through, limits_that_are_not_so);

#[test]
fn disturbances_that_never_happened() {
    let mut sum = Counts::default();
    let (mut overtaken, mut failed) = (0, 0);
    for seed in 0..100 {
        let config = SimConfig { fail_permille: if seed % 4 == 0 { 20 } else { 0 }, ..SimConfig::hostile(seed) };
        let network = Network::new(3, config).unwrap();
        let mut cluster = Cluster::new(&Made(network.clone()), 3);
        let tally = Storm::rage(&mut cluster, 200, seed);
        assert!(tally.torn.is_empty() && tally.outside.is_empty(), "seed {seed}: {:?} {:?}", tally.torn, tally.outside);
        assert_eq!(tally.log.sent.len() + tally.log.failed.len(), 200, "seed {seed}");
        assert_eq!(tally.log.imms.len(), tally.log.sent.len(), "seed {seed}: failed writes arrived, or others did not");
        assert!(tally.log.imms.values().chain(tally.log.sent.values()).all(|times| *times == 1), "seed {seed}");
        overtaken += tally.overtaken;
        failed += tally.log.failed.len();
        drop(cluster);
        sum += network.counts();
    }
    println!("100 seeds: {sum}");
    assert_eq!((sum.writes, sum.failed, sum.deaths), (20_000, failed as u64, 300));
    // The network counts what the receivers saw, before they saw it.
    assert!(overtaken > 1000 && sum.reordered as usize > overtaken / 2, "{overtaken}");
    check_disturbances(&sum);
}

#[test]
fn disturbances_that_never_happened_between_processes() {
    let mut sum = Counts::default();
    let (mut overtaken, mut failed) = (0, 0);
    for seed in 0..100 {
        let config = SimConfig { fail_permille: if seed % 4 == 0 { 20 } else { 0 }, ..hostile_processes(seed) };
        let mut cluster = Cluster::new(&Processes(config), 3);
        let tally = Storm::rage(&mut cluster, 200, seed);
        assert!(tally.torn.is_empty() && tally.outside.is_empty(), "seed {seed}: {:?} {:?}", tally.torn, tally.outside);
        assert_eq!(tally.log.sent.len() + tally.log.failed.len(), 200, "seed {seed}");
        assert_eq!(tally.log.imms.len(), tally.log.sent.len(), "seed {seed}: failed writes arrived, or others did not");
        assert!(tally.log.imms.values().chain(tally.log.sent.values()).all(|times| *times == 1), "seed {seed}");
        overtaken += tally.overtaken;
        failed += tally.log.failed.len();
        for rank in 0..3 {
            assert_eq!(cluster.endpoint(rank).refused().total(), 0, "seed {seed}");
            sum += cluster.endpoint(rank).counts();
        }
    }
    println!("100 seeds: {sum}");
    assert_eq!((sum.writes, sum.failed, sum.deaths, sum.cut), (20_000, failed as u64, 0, 0));
    // Each endpoint counts what it hands out.
    assert!(overtaken > 1000 && sum.reordered as usize > overtaken / 2, "{overtaken}");
    check_disturbances(&sum);
}

fn check_disturbances(sum: &Counts) {
    let disturbances = [
        ("packets out of order", sum.packets_out_of_order),
        ("delayed", sum.delayed),
        ("full", sum.full - sum.full_injected),
        ("full, injected", sum.full_injected),
        ("completed early", sum.completed_early),
        ("completed late", sum.completed_late),
        ("stops", sum.stops),
        ("stalled", sum.stalled),
        ("held", sum.held),
        ("failed", sum.failed),
    ];
    for (what, times) in disturbances {
        assert!(times > 50, "{what}: {times}");
    }
}
