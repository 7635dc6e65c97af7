//! Missing ranks between nodes, in seeded schedules: ranks, kernels, proxies and network on one thread.

use super::nodes::{WEIGHTS, rounds, wrong_rows_of_any};
use super::*;
use std::sync::Mutex;
use tokenyard::internals::proxy::ProxyLoop;
use tokenyard::internals::proxy::machine::Liveness;
use tokenyard::internals::transport::network::sim::{Clock, Network, SimConfig};

const SHAPES: [&[usize]; 3] = [&[2, 2], &[2, 2], &[1, 1, 1, 1]];
const RANKS: usize = 4;
/// Of virtual time, in which messages take some µs.
const DEADLINE: Duration = Duration::from_millis(4);

type Held<T> = Vec<Mutex<Option<T>>>;

/// A world of several nodes, with a proxy for each rank and its loop.
struct Nodes {
    network: Network,
    worlds: Vec<World>,
    proxies: Held<Proxy>,
    loops: Held<ProxyLoop>,
}

impl Nodes {
    fn new(sizes: &[usize], seed: u64) -> Nodes {
        let config = SimConfig { seed, jitter_ns: 200, clock: Clock::Virtual { tick_ns: 100 }, ..SimConfig::calm() };
        let network = Network::new(RANKS, config).unwrap();
        let worlds: Vec<World> =
            World::threads(RANKS).unwrap().into_iter().map(|world| world.with_nodes(sizes).unwrap()).collect();
        let (mut proxies, mut loops) = (Vec::new(), Vec::new());
        for world in &worlds {
            let times = network.clone();
            // Nobody is lost: the schedule decides how long a rank is silent.
            let liveness = Liveness { heartbeat_ns: 2_000, silence_ns: 1 << 60, first_contact_ns: 1 << 60 };
            let endpoint = Box::new(network.endpoint(world.rank()).unwrap());
            let (proxy, proxy_loop) =
                Proxy::with_loop(world, endpoint, liveness, Box::new(move || times.now_ns())).unwrap();
            proxies.push(Mutex::new(Some(proxy)));
            loops.push(Mutex::new(Some(proxy_loop)));
        }
        Nodes { network, worlds, proxies, loops }
    }

    /// Runs `body` as every rank.
    fn run(&self, config: SeededConfig, single: bool, weights: Weights, body: impl Fn(Member) + Sync) {
        let report = seeded_world(config, 2 * RANKS, |rank, device| {
            if rank >= RANKS {
                let own = self.loops[rank - RANKS].lock().unwrap().take().unwrap();
                return own.run(|| self.network.next_due_ns().is_some());
            }
            let proxy = self.proxies[rank].lock().unwrap().take().unwrap();
            let change = with_masks(MissingRanks::MaskedAtDeadline, DEADLINE);
            let tune = |tuning: &mut Tuning| {
                tuning.chunk_rows = Some(1);
                if single {
                    tuning.double_buffer_bytes = 0;
                }
            };
            let build = |builder| change(builder).proxy(&proxy).weights(weights).tuning(tune);
            body(Member::new(&self.worlds[rank], device, build).with_weights(weights));
        });
        assert_eq!(report.failure, None, "seed {}: {:?}", config.seed, report.hang_report);
    }
}

fn any_source(member: &Member, call: Call) -> Option<String> {
    wrong_rows_of_any(member, call, &[Came::Not; RANKS])
}

fn any_owners() -> Vec<Vec<bool>> {
    (0..1usize << RANKS).map(|bits| (0..RANKS).map(|rank| bits >> rank & 1 == 1).collect()).collect()
}

/// A rank's kernels stop anywhere, for ever or for a while. Each source's rows are there whole, in part or not at all,
/// and each sum is of some ranks' rows, of all ranks, the one that stopped included.
#[test]
fn a_rank_that_stops_anywhere_between_nodes_tears_nothing() {
    let missed = AtomicUsize::new(0);
    for seed in 0..288u64 {
        let (victim, weights) = ((seed % RANKS as u64) as usize, WEIGHTS[seed as usize / 12 % 2]);
        let pause = DEADLINE * [3, 1, 6, 40][(seed / 4 % 4) as usize] + DEADLINE * (seed % 41) as u32 / 41;
        let after = 20_000 + seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 120_000;
        let stopped = Some(Stopped { rank: victim as u32, after, pause });
        let config = SeededConfig { seed, hold_stores: seed.is_multiple_of(2), stopped };
        Nodes::new(SHAPES[seed as usize % 3], seed).run(config, seed / 2 % 2 == 1, weights, |member| {
            let rank = member.rig.rank;
            for round in 0..4 {
                let call = member.call(seed as usize + round);
                let what = format!("seed {seed}, after {after}, rank {rank}, {victim} stops, {call:?}");
                member.put(call);
                let handle = match member.dispatch(call) {
                    Err(_) if rank == victim => return,
                    outcome => outcome.unwrap_or_else(|error| panic!("{what}: {error}")),
                };
                assert_eq!(any_source(&member, call), None, "{what}");
                match member.combine(call, &handle) {
                    Err(_) if rank == victim => return,
                    outcome => outcome.unwrap_or_else(|error| panic!("{what}: {error}")),
                }
                assert_eq!(member.wrong_sums_of_any(call, &any_owners()), None, "{what}");
            }
            missed.fetch_add(usize::from(member.silent().contains(&victim)), Ordering::Relaxed);
        });
    }
    assert!(missed.into_inner() > 100);
}

/// Ranks mask others in the middle of their calls: nothing is torn, and no context is closed.
#[test]
fn masks_at_any_time_between_nodes_tear_nothing() {
    for seed in 0..168u64 {
        let config = SeededConfig { seed, hold_stores: seed.is_multiple_of(2), stopped: None };
        let weights = WEIGHTS[seed as usize / 12 % 2];
        let (ended, begun) = (AtomicUsize::new(0), Instant::now());
        Nodes::new(SHAPES[seed as usize % 3], seed).run(config, seed / 4 % 2 == 1, weights, |member| {
            let (ep, stream, rank) = (&member.rig.ep, &member.rig.stream, member.rig.rank);
            rounds(&member, 0..2, &[]);
            let looks = ep.device().new_stream().unwrap();
            let mut random = seed * 32 + rank as u64 + 1;
            let mut below = |most: u64| {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                (random >> 33) % most
            };
            // In which round, in which half, after how many looks, and whom.
            let (at, in_combine, wait, whom) = (below(4), below(2) == 0, below(40), below(RANKS as u64) as usize);
            let act = |round: u64, combines: bool| {
                if (round, combines) != (at, in_combine) || whom == rank || (seed + rank as u64).is_multiple_of(3) {
                    return;
                }
                for _ in 0..wait {
                    looks.copy(&member.spare.view(), &ep.rank_mask().unwrap()).unwrap();
                    looks.synchronize(PATIENCE).unwrap();
                }
                ep.mask_rank(Rank(whom as u32)).unwrap();
            };
            for round in 0..6 {
                let call = Call { halves: false, counts_first: false, ..member.call(5 + round as usize) };
                let what = format!("seed {seed}, rank {rank}, {call:?}");
                member.put(call);
                let handle = ep.dispatch(stream, &member.tokens(), &member.output(call)).unwrap();
                act(round, false);
                stream.synchronize(PATIENCE).unwrap();
                ep.check().unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(any_source(&member, call), None, "{what} {:?}", member.mask());
                member.compute(call);
                ep.combine(stream, &handle, &member.rows(), &member.rig.combined()).unwrap();
                act(round, true);
                stream.synchronize(PATIENCE).unwrap();
                ep.check().unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(member.wrong_sums_of_any(call, &any_owners()), None, "{what} {:?}", member.mask());
            }
            // All stay until the last has ended: where nothing moves, not even proxies, the clock jumps far beyond all
            // deadlines, and a rank's wait for its own rows might end before the one for weights that they are behind.
            ended.fetch_add(1, Ordering::Release);
            while ended.load(Ordering::Acquire) < RANKS && begun.elapsed() < PATIENCE {
                member.mask();
            }
        });
    }
}
