//! Several nodes in one process: what is lost, which ranks are notified, and how the others go on.

use crate::rig;

use rig::nodes::{DEADLINE, network, on_network, on_nodes, proxy, rig};
use rig::{MAX_TOKENS, PATIENCE, Rig, test_device};
use std::collections::VecDeque;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};
use tokenyard::internals::proxy::driver::ThreadConfig;
use tokenyard::internals::proxy::machine::Liveness;
use tokenyard::internals::transport::network::imm::ImmValue;
use tokenyard::internals::transport::network::sim::{Clock, Network, SimConfig, SimEndpoint};
use tokenyard::internals::transport::network::{
    DeviceNeeds, Event, Limits, Posted, RegionId, Released, Span, Transport, WriteImm,
};
use tokenyard::*;

/// Two experts of different ranks for each token, other ones each time.
fn choices(rank: usize, salt: usize) -> [[i32; 2]; MAX_TOKENS] {
    std::array::from_fn(|token| {
        let first = (rank + 3 * token + salt) % 8;
        [first as i32, ((first + 3) % 8) as i32]
    })
}

/// One dispatch and combine, whose sums must be the tokens' own rows, or half of them for every expert that is missing.
fn exchange(rig: &Rig, salt: usize, is_there: impl Fn(i32) -> bool) -> Result<()> {
    let choices = choices(rig.rank, salt);
    rig.route(&choices, salt);
    rig.round(MAX_TOKENS, rig.capacity)?;
    for (token, experts) in choices.iter().enumerate() {
        let weight = 0.5 * experts.iter().filter(|expert| is_there(**expert)).count() as f32;
        assert_eq!(rig.sum(token), rig.scaled_row(token, salt, weight), "token {token} of rank {}", rig.rank);
    }
    Ok(())
}

#[test]
fn a_node_that_combines_another_dispatch_is_refused_on_all_nodes() {
    on_nodes(&[2, 2], |world, network| {
        let proxy = proxy(network, &world, 1000);
        let rig = rig(&world, &proxy);
        rig.route(&choices(rig.rank, 0), 0);
        let dispatch = || rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
        let handles = [dispatch(), dispatch()];
        let (own, other) = (1 + rig.rank / 2, 2 - rig.rank / 2);
        rig.ep.combine(&rig.stream, &handles[own - 1], &rig.expert_rows(), &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let error = rig.ep.check().unwrap_err();
        let (text, expected) =
            (error.to_string(), format!("of dispatch {own} here and that of dispatch {other} on rank "));
        assert!(matches!(error, Error::Order { .. }) && error.is_fatal() && text.contains(&expected), "{text}");
        world.barrier("done").unwrap();
    });
}

#[test]
fn rows_cross_nodes_of_any_sizes() {
    for sizes in [&[1, 1][..], &[2, 2], &[3, 1], &[1, 2, 3], &[1, 1, 1, 1]] {
        on_nodes(sizes, |world, network| {
            let proxy = proxy(network, &world, 10_000);
            let rig = rig(&world, &proxy);
            (0..6).for_each(|salt| exchange(&rig, salt, |_| true).unwrap());
            assert!(rig.ep.mask().iter().all(|there| *there));
            world.barrier("all done").unwrap();
        });
    }
}

#[test]
fn a_proxy_of_another_rank_or_world_is_refused_by_name() {
    let (outside, kept) = (network(3, 5), [const { Mutex::new(None) }; 2]);
    on_nodes(&[1, 1], |world, network| {
        let own = world.rank().index();
        let mine = proxy(network, &world, 10_000);
        *kept[own].lock().unwrap() = Some(mine.clone());
        world.barrier("all have one").unwrap();
        let of = |rank: usize| kept[rank].lock().unwrap().clone().unwrap();
        let build = |proxy: &Proxy| {
            let start = Instant::now();
            let built = rig::builder(&world, &test_device(&world)).proxy(proxy).timeout(DEADLINE).build();
            let text = built.map(drop).unwrap_err().to_string();
            assert!(start.elapsed() < world.timeout() / 2, "{text}");
            text
        };
        let refused = |rank: usize, own: usize| {
            format!("configuration proxy is that of rank {rank} of 2: this is rank {own} of 2: give each rank")
        };
        // Each other's.
        let text = build(&of(1 - own));
        assert!(text.starts_with(&refused(1 - own, own)), "{text}");
        // The same on both.
        let text = build(&of(0));
        let reported = format!("bootstrap: rank 1 failed in configuration of a context: {}", refused(0, 1));
        assert!(text.starts_with(&if own == 0 { reported } else { refused(0, 1) }), "{text}");
        // The same rank's, of a world of three.
        let third = World::threads(3).unwrap().into_iter().nth(own).unwrap();
        let text = build(&proxy(&outside, &third, 10_000));
        assert!(text.contains(&format!("that of rank {own} of 3: this is rank {own} of 2")), "{text}");
        let rig = rig(&world, &mine);
        exchange(&rig, 0, |_| true).unwrap();
        world.barrier("all done").unwrap();
        kept[own].lock().unwrap().take();
    });
}

/// As `exchange`, but for a culprit, which names an expert that does not exist.
fn exchange_but_for(rig: &Rig, is_culprit: bool, salt: usize, is_there: impl Fn(i32) -> bool) {
    if !is_culprit {
        return exchange(rig, salt, is_there).unwrap();
    }
    rig.route(&[[0, 1], [2, 3], [4, 8], [5, 6]], salt);
    let error = rig.round(MAX_TOKENS, rig.capacity).unwrap_err();
    assert!(matches!(error, Error::Routing { .. }), "{error:?}");
    assert!(rig.sums().iter().all(|byte| *byte == 0), "sums of a refused dispatch are zero");
}

#[test]
fn every_rank_of_every_node_is_notified_of_refused_routing() {
    for round_tokens in [MAX_TOKENS, MAX_TOKENS / 2] {
        on_nodes(&[2, 3, 1], |world, network| {
            let proxy = proxy(network, &world, 10_000);
            let builder = |builder: AllToAllBuilder| {
                builder.proxy(&proxy).tuning(|t| {
                    t.chunk_rows = Some(1);
                    t.round_tokens = Some(round_tokens)
                })
            };
            let rig = Rig::with(&world, |b| builder(b).timeout(DEADLINE));
            let own = world.rank();
            // In nodes of 3 and of 2, so that rails of all sizes of nodes serve a culprit; the last one counts.
            let culprits = [None, Some(Rank(4)), Some(Rank(1)), None, None, Some(Rank(4)), None];
            let reported = culprits.iter().enumerate().map(|(salt, culprit)| {
                exchange_but_for(&rig, *culprit == Some(own), salt, |_| true);
                rig.ep.refused_sources()
            });
            let reported: Vec<_> = reported.collect();
            // A rank that fails must not leave others waiting.
            world.barrier("all done").unwrap();
            let others = |all: &[(u32, u64)]| -> Vec<(Rank, u64)> {
                all.iter().map(|(rank, epoch)| (Rank(*rank), *epoch)).filter(|(rank, _)| *rank != own).collect()
            };
            let (one, two, again) = (others(&[(4, 2)]), others(&[(1, 3), (4, 2)]), others(&[(1, 3), (4, 6)]));
            let wanted = [vec![], one, two.clone(), two.clone(), two, again.clone(), again];
            assert_eq!(reported, wanted, "rank {own}, {round_tokens} tokens a round");
        });
    }
}

/// The error of `check` once the stream has ended.
fn order_problem(rig: &Rig) -> String {
    rig.stream.synchronize(PATIENCE).unwrap();
    let error = rig.ep.check().unwrap_err();
    assert!(matches!(error, Error::Order { .. }), "{error:?}");
    rig.ep.check().unwrap();
    error.to_string()
}

#[test]
fn calls_of_several_rounds_are_refused_whole() {
    on_nodes(&[2, 1], |world, network| {
        let proxy = proxy(network, &world, 10_000);
        let builder = |b: AllToAllBuilder| {
            b.proxy(&proxy).timeout(DEADLINE).tuning(|t| {
                t.chunk_rows = Some(1);
                t.round_tokens = Some(1);
                t.handles = 3;
            })
        };
        let rig = Rig::with(&world, builder);
        exchange(&rig, 0, |_| true).unwrap();
        let choices = choices(rig.rank, 1);
        rig.route(&choices, 1);
        let (tokens, output) = (rig.tokens(MAX_TOKENS), rig.output(rig.capacity));
        let sent = rig.ep.dispatch_send(&rig.stream, &tokens).unwrap();
        // One rank alone makes mistakes, which the others do not notice.
        let culprit = rig.rank == 1;
        if culprit {
            let extra = rig.ep.dispatch_send(&rig.stream, &tokens).unwrap();
            assert!(order_problem(&rig).contains("dispatch 5 was sent and not received"));
            drop(extra);
            let _extra = rig.ep.dispatch(&rig.stream, &tokens, &output).unwrap();
            assert!(order_problem(&rig).contains("dispatch 5 was sent and not received"));
        }
        let handle = if culprit {
            // Types rule out that one is received twice, but a graph may be launched twice.
            rig.stream.begin_capture().unwrap();
            let handle = rig.ep.dispatch_recv(&rig.stream, sent, &output).unwrap();
            let graph = rig.stream.end_capture().unwrap();
            graph.launch(&rig.stream).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            graph.launch(&rig.stream).unwrap();
            assert!(order_problem(&rig).contains("dispatch 8 was the last sent"));
            handle
        } else {
            rig.ep.dispatch_recv(&rig.stream, sent, &output).unwrap()
        };
        rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        (0..MAX_TOKENS).for_each(|token| assert_eq!(rig.sum(token), rig.row(token, 1), "token {token}"));
        (2..5).for_each(|salt| exchange(&rig, salt, |_| true).unwrap());
        world.barrier("all done").unwrap();
    });
}

#[test]
fn a_world_of_several_nodes_without_a_proxy_is_refused() {
    on_nodes(&[1, 1], |world, _| {
        let error = rig::builder(&world, &test_device(&world)).build().map(drop).unwrap_err().to_string();
        assert!(error.contains("proxy"), "{error}");
    });
}

#[test]
fn more_tokens_than_a_block_keeps_a_bitmap_of_are_refused() {
    on_nodes(&[1, 1], |world, _| {
        let plan = |tokens| rig::builder(&world, &test_device(&world)).max_tokens_per_rank(tokens).plan().map(drop);
        plan(132_095).unwrap();
        let error = plan(132_096).unwrap_err().to_string();
        let words = ["max_tokens_per_rank is 132096", "1 to 132095", "bitmap"];
        words.iter().for_each(|w| assert!(error.contains(w), "«{error}» lacks «{w}»"));
    });
}

#[test]
fn two_contexts_share_a_proxy() {
    on_nodes(&[2, 1], |world, network| {
        let proxy = proxy(network, &world, 10_000);
        let (one, two) = (rig(&world, &proxy), rig(&world, &proxy));
        for salt in 0..4 {
            exchange(&one, salt, |_| true).unwrap();
            exchange(&two, salt + 5, |_| true).unwrap();
        }
        world.barrier("all done").unwrap();
    });
}

#[test]
fn a_context_that_goes_first_is_hit_by_nothing_and_holds_up_nobody() {
    on_nodes(&[1, 1], |world, network| {
        let proxy = proxy(network, &world, 10_000);
        let (one, two) = (rig(&world, &proxy), rig(&world, &proxy));
        exchange(&one, 0, |_| true).unwrap();
        exchange(&two, 0, |_| true).unwrap();
        if world.rank() == Rank(1) {
            drop(one);
            world.barrier("gone").unwrap();
        } else {
            world.barrier("gone").unwrap();
            let before = network.counts();
            one.route(&choices(0, 1), 1);
            let _sent = one.ep.dispatch_send(&one.stream, &one.tokens(MAX_TOKENS)).unwrap();
            one.stream.synchronize(PATIENCE).unwrap();
            let start = Instant::now();
            while network.counts().dropped == before.dropped {
                assert!(start.elapsed() < PATIENCE, "late writes were not dropped: {}", network.counts());
                std::thread::yield_now();
            }
            drop(one);
        }
        exchange(&two, 1, |_| true).unwrap();
        let three = rig(&world, &proxy);
        (0..3).for_each(|salt| exchange(&three, salt, |_| true).unwrap());
        exchange(&two, 2, |_| true).unwrap();
        assert_eq!((proxy.remote().reports(), proxy.remote().failure()), (Vec::new(), None));
        world.barrier("all done").unwrap();
    });
}

#[test]
fn a_context_that_closes_at_once_has_sent_what_it_owed() {
    // A queue that is full with one write.
    let config = SimConfig { clock: Clock::Real, nic_queue: 1, ..SimConfig::hostile(7) };
    on_network(&Network::new(2, config).unwrap(), 2, &[1, 1], |world, network| {
        let proxy = proxy(network, &world, 10_000);
        let rig = rig(&world, &proxy);
        exchange(&rig, 0, |_| true).unwrap();
        world.barrier("met").unwrap();
        rig.route(&choices(rig.rank, 1), 1);
        if world.rank() == Rank(1) {
            (0..2).for_each(|nic| network.stop(Rank(1), nic, 200_000_000));
            let _sent = rig.ep.dispatch_send(&rig.stream, &rig.tokens(MAX_TOKENS)).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            drop(rig);
            world.barrier("received").unwrap();
        } else {
            let _received = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap();
            world.barrier("received").unwrap();
        }
    });
}

#[test]
fn a_barrier_crosses_nodes() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let arrived = AtomicUsize::new(0);
    on_nodes(&[2, 1, 2], |world, network| {
        let proxy = proxy(network, &world, 10_000);
        let rig = rig(&world, &proxy);
        for round in 1..=5 {
            // Another rank is the last one in each round.
            if (world.rank().index() + round) % 5 == 0 {
                std::thread::sleep(Duration::from_millis(30));
            }
            arrived.fetch_add(1, Ordering::SeqCst);
            rig.ep.barrier(&rig.stream).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            assert!(arrived.load(Ordering::SeqCst) >= 5 * round, "the barrier let a rank through early");
        }
        rig.ep.check().unwrap();
        world.barrier("all done").unwrap();
    });
}

/// The rank that an error names as missing.
fn missing(error: &Error) -> Option<Rank> {
    match error {
        Error::PeerLost { peer, .. } | Error::Timeout { peer, .. } => Some(*peer),
        _ => None,
    }
}

#[test]
fn a_lost_rank_is_named_masked_and_comes_back() {
    for lost in [0u32, 1, 3, 4] {
        let met = Barrier::new(5);
        on_nodes(&[2, 3], |world, network| {
            let own = world.rank();
            let first = proxy(network, &world, 1_500);
            let before = rig(&world, &first);
            let (mut reported, mut refused) = (Vec::new(), Vec::new());
            (0..3).for_each(|salt| exchange(&before, salt, |_| true).unwrap());
            met.wait();
            if own == Rank(lost) {
                network.kill(own);
                let ended = tokenyard::internals::base::wait::poll("its own end", PATIENCE, || before.ep.check().err());
                assert!(matches!(ended, Some(Error::Transport { .. })), "{ended:?}");
                drop((before, first));
            } else {
                let start = Instant::now();
                let error = (3..).find_map(|salt| exchange(&before, salt, |_| true).err()).unwrap();
                assert_eq!(missing(&error), Some(Rank(lost)), "rank {own}: {error}");
                assert!(start.elapsed() < DEADLINE + Duration::from_secs(3), "{:?}", start.elapsed());
                let error = exchange(&before, 9, |_| true).unwrap_err();
                assert_eq!(missing(&error), Some(Rank(lost)), "the context stays closed: {error}");
                drop(before);
                let members: Vec<Rank> = (0..5).map(Rank).filter(|rank| rank.0 != lost).collect();
                let (past, world) = (world.clone(), world.regroup(1, &members).unwrap());
                let after = rig(&world, &first);
                // Building over the past world would close the newer generation.
                let error = AllToAll::builder(&past).proxy(&first).build().err();
                let Some(Error::Generation { rank, generation: 0, newest: 1, .. }) = error else { panic!("{error:?}") };
                assert_eq!(rank, own);
                let mask = after.ep.mask();
                assert_eq!((mask.len(), mask.iter().position(|there| !there)), (5, Some(lost as usize)));
                let placement = after.ep.placement().clone();
                let is_there = |expert: i32| placement.rank_of(expert as usize) != Some(lost);
                for salt in 0..5 {
                    let outcome = exchange(&after, salt, is_there);
                    assert_eq!(outcome, Ok(()), "{:?} {:?}", first.remote().reports(), first.remote().failure());
                }
                let culprit = members[3];
                exchange_but_for(&after, own == culprit, 5, is_there);
                reported = after.ep.refused_sources();
                refused = (own != culprit).then_some((culprit, 6)).into_iter().collect();
                world.barrier("masked").unwrap();
                drop((after, first));
            }
            met.wait();
            // The lost rank comes back; all ranks take new endpoints, as new processes would.
            let world = world.regroup(2, &(0..5).map(Rank).collect::<Vec<_>>()).unwrap();
            let second = proxy(network, &world, 10_000);
            let again = rig(&world, &second);
            for salt in 0..3 {
                let outcome = exchange(&again, salt, |_| true);
                assert_eq!(outcome, Ok(()), "{:?}", second.remote().reports());
            }
            world.barrier("all back").unwrap();
            assert_eq!(reported, refused, "by names of the first generation");
        });
    }
}

#[test]
fn a_rank_that_is_late_but_lives_is_a_timeout_and_no_loss() {
    on_nodes(&[1, 2], |world, network| {
        let proxy = proxy(network, &world, 10_000);
        let rig = rig(&world, &proxy);
        exchange(&rig, 0, |_| true).unwrap();
        if world.rank() == Rank(0) {
            std::thread::sleep(DEADLINE + Duration::from_secs(1));
        } else {
            let error = exchange(&rig, 1, |_| true).unwrap_err();
            assert!(matches!(error, Error::Timeout { peer: Rank(0), .. }), "{error}");
            assert!(rig.ep.lost_peers().is_empty());
        }
        world.barrier("all done").unwrap();
    });
}

/// A dispatch is under way while the one before is combined, its halves in an order that each rank chooses; the first
/// error.
fn overlapping(rig: &Rig, combine_first: bool) -> Result<()> {
    rig.route_all(0);
    let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity))?;
    let sent = rig.ep.dispatch_send(&rig.stream, &rig.tokens(MAX_TOKENS))?;
    let receive = || rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity));
    let combine = || rig.ep.combine_send(&rig.stream, &handle, &rig.expert_rows());
    let (_next, combining) = if combine_first {
        let combining = combine()?;
        (receive()?, combining)
    } else {
        (receive()?, combine()?)
    };
    rig.ep.combine_recv(&rig.stream, combining, &rig.combined())?;
    rig.stream.synchronize(PATIENCE)?;
    rig.ep.check()
}

#[test]
fn halves_go_in_one_order_within_a_node_and_a_timeout_names_the_rule() {
    // Whether combine comes first on each rank; ranks of different nodes may differ.
    for (orders, works) in [([true, true, false], true), ([false, false, true], true), ([true, false, true], false)] {
        on_nodes(&[2, 1], |world, network| {
            let proxy = proxy(network, &world, 10_000);
            let rig = rig(&world, &proxy);
            let outcome = overlapping(&rig, orders[world.rank().index()]);
            if works {
                assert_eq!(outcome, Ok(()));
            } else if world.node_peers().len() > 1 {
                let text = outcome.unwrap_err().to_string();
                assert!(text.contains("all ranks of a node combine_send and dispatch_recv"), "{text}");
            }
            world.barrier("all done").unwrap();
        });
    }
}

/// Receives that one context of two nodes of a rank each needs, with chunks of a row: of each peer two epochs of head
/// and 4 rows, of 4 sums, and of a barrier.
const RECEIVES: u32 = 2 * (1 + 4 + 4 + 1);

#[test]
fn a_context_does_with_the_receives_that_it_asks_for() {
    for sizes in [&[1, 1][..], &[2, 2], &[1, 1, 1]] {
        let ranks = sizes.iter().sum();
        let peers = sizes.len() as u32 - 1;
        let config = SimConfig { clock: Clock::Real, receives: peers * RECEIVES, ..SimConfig::hostile(21) };
        let network = Network::new(ranks, config).unwrap();
        on_network(&network, ranks, sizes, |world, network| {
            let proxy = proxy(network, &world, 10_000);
            let rig = rig(&world, &proxy);
            (0..20).for_each(|salt| exchange(&rig, salt, |_| true).unwrap());
            rig.ep.barrier(&rig.stream).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            world.barrier("all done").unwrap();
        });
        assert_eq!(network.counts().unready, 0, "{sizes:?}: a write found no receive");
    }
}

#[test]
fn contexts_that_need_more_receives_together_than_there_are_are_refused_until_one_goes() {
    let config = SimConfig { clock: Clock::Real, receives: 2 * RECEIVES - 1, ..SimConfig::hostile(22) };
    let network = Network::new(2, config).unwrap();
    on_network(&network, 2, &[1, 1], |world, network| {
        let proxy = proxy(network, &world, 10_000);
        let builder = || rig::builder(&world, &test_device(&world)).proxy(&proxy);
        let refusal = |builder: AllToAllBuilder| builder.build().err().map(|why| why.to_string()).unwrap_or_default();
        let first = rig(&world, &proxy);
        let why = refusal(builder().tuning(|t| t.chunk_rows = Some(1)));
        let limit = format!("has {} for each NIC", 2 * RECEIVES - 1);
        for part in [&format!("{RECEIVES}, and {RECEIVES} of other contexts"), &limit, "larger chunk_rows"] {
            assert!(why.contains(part), "{why}");
        }
        // By default chunks are as large as it takes, so that four contexts fit.
        let by_default = builder().build().unwrap();
        exchange(&first, 1, |_| true).unwrap();
        drop((first, by_default));
        let again = rig(&world, &proxy);
        exchange(&again, 2, |_| true).unwrap();
        world.barrier("all done").unwrap();
    });
}

#[test]
fn chunks_that_the_network_does_not_write_at_once_are_refused() {
    let config = SimConfig { clock: Clock::Real, write_bytes: 64, ..SimConfig::hostile(23) };
    let network = Network::new(2, config).unwrap();
    on_network(&network, 2, &[1, 1], |world, network| {
        let proxy = proxy(network, &world, 10_000);
        let builder = rig::builder(&world, &test_device(&world)).proxy(&proxy);
        let why = builder.build().err().map(|why| why.to_string()).unwrap_or_default();
        assert!(why.contains("largest chunk") && why.contains("at most 64 bytes"), "{why}");
    });
}

#[test]
fn a_write_that_fails_is_explained_in_the_error_of_the_call() {
    on_nodes(&[1, 1], |world, network| {
        let proxy = proxy(network, &world, 10_000);
        let rig = rig(&world, &proxy);
        exchange(&rig, 1, |_| true).unwrap();
        world.barrier("one good round").unwrap();
        if world.rank() == Rank(0) {
            network.fail_next(Rank(0), 1);
            let why = exchange(&rig, 2, |_| true).unwrap_err().to_string();
            assert!(why.contains("a write failed (the network gave a reason of its own, code 0x51"), "{why}");
        }
        world.barrier("all done").unwrap();
    });
}

/// Immediates that a network hands out late: immediates of a closed context, repeated as if they were of other writes
/// that its peer had posted to it before it closed.
struct Late {
    /// From when a connection is made, which is just before a context opens.
    after: Duration,
    /// How many each time, and how often each.
    most: usize,
    times: usize,
    seen: VecDeque<ImmValue>,
    closed: Vec<ImmValue>,
    waiting: Vec<ImmValue>,
    from: Option<Instant>,
}

impl Late {
    fn new(after: Duration, most: usize, times: usize) -> Late {
        Late { after, most, times, seen: VecDeque::new(), closed: Vec::new(), waiting: Vec::new(), from: None }
    }

    /// One of those that are due.
    fn next(&mut self) -> Option<ImmValue> {
        self.from.filter(|from| from.elapsed() >= self.after)?;
        self.waiting.pop()
    }
}

/// An endpoint that behaves as real ones: registering memory, connecting and taking memory back take long, and it hands
/// out immediates of a region that it has taken back.
struct Real {
    inner: SimEndpoint,
    delay: Duration,
    late: Late,
}

impl Transport for Real {
    fn nics(&self) -> usize {
        self.inner.nics()
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn device_needs(&self) -> DeviceNeeds {
        self.inner.device_needs()
    }

    unsafe fn register(&mut self, span: Span) -> Result<RegionId> {
        std::thread::sleep(self.delay);
        // SAFETY: passed on to the caller.
        unsafe { self.inner.register(span) }
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        std::thread::sleep(self.delay);
        self.late.closed.extend(self.late.seen.drain(..));
        self.inner.deregister(region)
    }

    fn address(&mut self, peer: Rank) -> Result<Vec<u8>> {
        self.inner.address(peer)
    }

    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()> {
        std::thread::sleep(self.delay);
        let closed = std::mem::take(&mut self.late.closed);
        (0..self.late.times).for_each(|_| self.late.waiting.extend(&closed));
        self.late.from = Some(Instant::now());
        self.inner.connect(peer, address)
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        self.inner.post(write)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        self.inner.send(peer, message)
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        let Real { inner, late, .. } = self;
        if let Some(imm) = late.next() {
            on_event(Event::Imm { imm });
            return Ok(1);
        }
        inner.poll(&mut |event| {
            if let Event::Imm { imm } = event {
                late.seen.push_back(imm);
                late.seen.drain(..late.seen.len().saturating_sub(late.most));
            }
            on_event(event);
        })
    }

    fn reset(&mut self) -> Result<()> {
        self.inner.reset()
    }
}

/// A proxy over such an endpoint.
fn real_proxy(network: &Network, world: &World, silence_ms: u64, delay: Duration, late: Late) -> Proxy {
    let inner = network.endpoint(world.rank()).unwrap();
    let liveness = Liveness { silence_ns: silence_ms * 1_000_000, ..Liveness::default() };
    let config = ProxyConfig { liveness, thread: ThreadConfig { core: None, spinners: 64 } };
    Proxy::spawn(world, Box::new(Real { inner, delay, late }), config).unwrap()
}

#[test]
fn a_rank_that_registers_or_connects_for_longer_than_the_silence_limit_is_not_lost() {
    const SILENCE_MS: u64 = 400;
    on_nodes(&[1, 1, 1], |world, network| {
        // Rank 0 is slow, and the others' contexts go on meanwhile.
        let delay = Duration::from_millis(if world.rank() == Rank(0) { 2 * SILENCE_MS } else { 0 });
        let proxy = real_proxy(network, &world, SILENCE_MS, delay, Late::new(Duration::ZERO, 0, 0));
        let build =
            || Rig::with(&world, |builder| builder.proxy(&proxy).tuning(|t| t.chunk_rows = Some(1)).timeout(PATIENCE));
        let first = build();
        let lost = |when: &str| assert_eq!(first.ep.lost_peers(), [], "{when}");
        exchange(&first, 1, |_| true).unwrap();
        let (start, second) = (Instant::now(), build());
        assert!(start.elapsed() > Duration::from_millis(4 * SILENCE_MS), "rank 0 was not slow");
        lost("while it built");
        exchange(&second, 2, |_| true).unwrap();
        drop(second);
        exchange(&first, 3, |_| true).unwrap();
        lost("while it closed");
        world.barrier("all done").unwrap();
    });
}

/// A context, and another after it, while so many others are open: late immediates of the first must not count for the
/// second. `times`: how often each immediate comes.
fn late_immediates(others: usize, after: Duration, times: usize) {
    const MOST: usize = 60;
    on_nodes(&[1, 1], |world, network| {
        let proxy = real_proxy(network, &world, 10_000, Duration::ZERO, Late::new(after, MOST, times));
        let kept: Vec<Rig> = (0..others).map(|_| rig(&world, &proxy)).collect();
        for round in 0..6 {
            let rig = rig(&world, &proxy);
            // What comes after the context has opened.
            std::thread::sleep(after);
            (0..6).for_each(|salt| exchange(&rig, salt + round, |_| true).unwrap());
        }
        let stats = proxy.remote().ask(|driver| *driver.machine().stats()).unwrap();
        assert!(stats.stale_immediates >= 4 * MOST as u64, "{stats:?}");
        assert_eq!((stats.duplicates, stats.impossible), (0, 0), "{stats:?}");
        drop(kept);
        world.barrier("all done").unwrap();
    });
}

#[test]
fn immediates_that_are_left_of_a_closed_context_do_not_reach_the_next_of_its_number() {
    // The three others leave one number. So many come that the passes between connecting and opening do not see them
    // all.
    late_immediates(3, Duration::ZERO, 1000);
}

#[test]
fn immediates_of_a_closed_context_that_come_late_find_no_context_of_its_number() {
    late_immediates(0, Duration::from_millis(60), 1);
}
