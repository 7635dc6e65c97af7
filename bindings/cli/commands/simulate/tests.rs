use std::sync::mpsc;
use std::time::Duration;

use super::workload::tests::v3;
use super::*;
use crate::cli::cases::words::Assumption;
use crate::cli::report::result::Percentiles;

/// One iteration: times of each rank, traffic and posts.
struct Iteration {
    dispatch: (Vec<f64>, result::Traffic, u64),
    combine: (Vec<f64>, result::Traffic, u64),
}

fn one(shape: Shape, order: Order, rows: Option<usize>, link: &str) -> Iteration {
    let link = models::parse(link).unwrap();
    let plan = Plan::new(shape, link.nics, order, rows);
    let mut world = World::new(&shape, &plan, &link, Costs::H200).unwrap();
    let workload = Workload::draw(shape, 0).unwrap();
    let mut dispatch = Dispatch::new(&plan, Costs::H200, &workload);
    world.run(&mut dispatch).unwrap();
    let between = world.posts();
    let mut combine = Combine::new(&plan, Costs::H200, &workload);
    world.run(&mut combine).unwrap();
    Iteration {
        dispatch: (dispatch.times_us().collect(), dispatch.traffic, between),
        combine: (combine.times_us().collect(), combine.traffic, world.posts() - between),
    }
}

fn designed(shape: Shape, link: &str) -> Iteration {
    one(shape, Order::DESIGN, None, link)
}

fn median(us: &[f64]) -> f64 {
    Percentiles::of(us.to_vec()).unwrap().p50
}

/// Medians of dispatch and combine.
fn medians(iteration: &Iteration) -> [f64; 2] {
    [median(&iteration.dispatch.0), median(&iteration.combine.0)]
}

fn most(numbers: &[u64]) -> f64 {
    numbers.iter().copied().max().unwrap_or(0) as f64
}

#[test]
fn the_floor_of_the_busiest_rank_is_never_undercut() {
    for link in ["cx7", "efa-p5en", "100:3:0.5", "50:0:0"] {
        for (nodes, per_node) in [(2, 4), (4, 2), (3, 3)] {
            let iteration = designed(v3(nodes, per_node), link);
            for (us, traffic, _) in [iteration.dispatch, iteration.combine] {
                let bytes = most(&traffic.out).max(most(&traffic.back));
                let floor = models::parse(link).unwrap().floor_us(bytes);
                let slowest = us.iter().copied().fold(0.0, f64::max);
                assert!(slowest > floor && floor > 0.0, "{link} {nodes} x {per_node}: {slowest} < {floor}");
                assert_eq!(us.len(), nodes * per_node, "every rank ends");
            }
        }
    }
}

#[test]
fn a_faster_link_shortens_by_what_its_bytes_save() {
    let shape = v3(4, 2);
    let (slow, fast) = (designed(shape, "100:2:0"), designed(shape, "200:2:0"));
    let saved = |bytes: u64| bytes as f64 * 8e-3 * (1.0 / 100.0 - 1.0 / 200.0);
    let bytes = [slow.dispatch.1.out[0], slow.combine.1.out[0]];
    for ((slow, fast), bytes) in medians(&slow).into_iter().zip(medians(&fast)).zip(bytes) {
        let share = (slow - fast) / saved(bytes);
        assert!((0.7..1.3).contains(&share), "{slow} - {fast} is not about {}", saved(bytes));
    }
}

#[test]
fn latency_is_paid_once_a_phase() {
    let shape = v3(4, 2);
    let (short, long) = (designed(shape, "400:2:0"), designed(shape, "400:52:0"));
    for (short, long) in medians(&short).into_iter().zip(medians(&long)) {
        assert!((45.0..55.0).contains(&(long - short)), "{short} and {long} do not differ by about 50");
    }
}

#[test]
fn the_cost_of_a_message_is_paid_for_every_message() {
    let shape = v3(3, 2);
    let free = one(shape, Order::DESIGN, Some(4), "400:2:0");
    let dear = one(shape, Order::DESIGN, Some(4), "400:2:5");
    let posts = free.dispatch.2 as f64 / 6.0;
    assert!(medians(&dear)[0] - medians(&free)[0] > 0.7 * (5.0 * posts - medians(&free)[0]), "{posts} posts");
}

#[test]
fn the_same_seed_gives_the_same_times_and_another_gives_others() {
    let times = |seed| {
        let iteration = designed(Shape { seed, ..v3(2, 3) }, "cx7");
        (iteration.dispatch.0, iteration.combine.0)
    };
    assert_eq!(times(5), times(5));
    assert_ne!(times(5), times(6));
}

#[test]
fn one_node_sends_nothing_over_the_wire() {
    let iteration = designed(v3(1, 8), "cx7");
    for (us, traffic, posts) in [iteration.dispatch, iteration.combine] {
        assert_eq!((posts, most(&traffic.out)), (0, 0.0));
        assert!(traffic.nvlink > 0 && us.len() == 8);
    }
}

#[test]
fn every_chunk_of_every_link_is_posted_once_on_each_nic() {
    let shape = v3(3, 2);
    let workload = Workload::draw(shape, 0).unwrap();
    let messages: Vec<u64> = (0..6)
        .flat_map(|source| (0..3).filter(move |node| *node != source / 2).map(move |node| (source, node)))
        .map(|(source, node)| workload.rows(source, node).len().div_ceil(7) as u64)
        .collect();
    // Routing metadata is a chunk of its own; the head of sums precedes the first chunk.
    let sums: u64 = messages.iter().map(|chunks| chunks.max(&1)).sum();
    let rows = messages.iter().sum::<u64>() + messages.len() as u64;
    for (link, nics) in [("cx7", 1), ("efa-p5en", 2), ("efa-p5", 4)] {
        let iteration = one(shape, Order::DESIGN, Some(7), link);
        assert_eq!((iteration.dispatch.2, iteration.combine.2), (rows * nics, sums * nics), "{link}");
    }
}

#[test]
fn bytes_are_heads_headers_and_rows() {
    let shape = v3(2, 1);
    let workload = Workload::draw(shape, 0).unwrap();
    let rows = workload.rows(0, 1).len() as u64;
    let iteration = designed(shape, "none");
    assert_eq!(iteration.dispatch.1.out[0], 32 + rows * (80 + 7392));
    assert_eq!(iteration.combine.1.back[0], 32 + rows * 14336);
    assert_eq!(iteration.dispatch.1.nvlink + iteration.combine.1.nvlink, 0, "a rank of its own node");
}

#[test]
fn no_tokens_are_ordinary() {
    let iteration = designed(Shape { tokens: 0, ..v3(2, 2) }, "cx7");
    assert_eq!((iteration.dispatch.2, iteration.combine.2), (4, 4), "heads are sent, too");
    assert!(medians(&iteration).iter().all(|us| (20.0..60.0).contains(us)));
}

#[test]
fn dropping_an_assumption_costs_time() {
    // One block a rank keeps up with routing metadata of few sources.
    let (few, many) = (v3(6, 2), v3(64, 2));
    for (assumption, shape, phase) in [
        (Assumption::ArrivalList, v3(12, 2), 0),
        (Assumption::MetadataAhead, Shape { tokens: 16, ..v3(8, 2) }, 0),
        (Assumption::EarlySums, few, 1),
        (Assumption::SpreadMetadata, many, 0),
    ] {
        let design = medians(&designed(shape, "cx7"));
        let mut order = Order::DESIGN;
        order.give_up(assumption);
        let without = medians(&one(shape, order, None, "cx7"));
        assert!(without[phase] > design[phase] + 1.0, "{assumption:?}: {without:?} against {design:?}");
    }
    let mut order = Order::DESIGN;
    order.give_up(Assumption::SpreadMetadata);
    assert_eq!(medians(&one(few, order, None, "cx7")), medians(&designed(few, "cx7")));
}

#[test]
fn a_link_that_is_slow_beyond_use_takes_no_longer_to_simulate() {
    let start = std::time::Instant::now();
    let iteration = designed(Shape { tokens: 8, ..v3(2, 2) }, "0.01:1000:0");
    assert!(medians(&iteration)[0] > 10_000.0);
    assert!(start.elapsed() < std::time::Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn a_link_over_which_a_heartbeat_is_always_in_flight_still_ends() {
    // Latencies of half the time between two heartbeats and of a second, and the same per message, heartbeats included.
    // With seven peers a heartbeat to one of them is always in flight.
    for (link, latency_us) in [("1:50100:1", 50_100.0), ("400:1000000:0", 1e6), ("400:1000000:1000000", 2e6)] {
        let (sent, received) = mpsc::channel();
        // With a defect the thread never ends; the test fails and leaves it.
        std::thread::spawn(move || sent.send(medians(&designed(Shape { tokens: 8, ..v3(8, 1) }, link))));
        let medians = received.recv_timeout(Duration::from_secs(20)).unwrap_or_else(|error| panic!("{link}: {error}"));
        for us in medians {
            assert!((latency_us..40.0 * latency_us).contains(&us), "{link}: {us}");
        }
    }
}

#[test]
fn a_peer_that_a_slow_link_keeps_silent_is_not_lost() {
    // Rows of more than a minute.
    let iteration = designed(Shape { tokens: 32, ..v3(2, 2) }, "0.001:0:0");
    assert!(medians(&iteration)[1] > 2e6, "{:?}", medians(&iteration));
}

#[test]
fn what_is_published_and_what_was_measured_come_out_within_the_limit() {
    let points = calibrate::points(64, &|_, _| {}).unwrap();
    for point in &points {
        println!("{point:?}");
    }
    assert_eq!(points.len(), 30 + 12);
    let outside: Vec<_> = points.iter().filter(|point| !point.is_within_limit()).collect();
    assert!(outside.is_empty(), "{outside:?}");
}

#[test]
fn a_doorbell_that_is_rung_after_its_check_does_not_wait_for_the_network() {
    for seed in 0..6 {
        let iteration = designed(Shape { seed, ..v3(4, 8) }, "100:500:0.3");
        let us = &iteration.dispatch.0;
        let (least, most) = (us.iter().copied().fold(f64::MAX, f64::min), us.iter().copied().fold(0.0, f64::max));
        assert!(most - least < 150.0, "{least} to {most}");
    }
}

/// Rows over NVLink and over the wire in an iteration, by a definition apart from the phases; as many come back.
fn rows_moved(shape: Shape) -> [u64; 2] {
    let preset = shape.preset;
    let routing = crate::cli::cases::routing::RoutingShape {
        ranks: shape.ranks(),
        experts: preset.experts,
        top_k: preset.top_k,
        max_tokens: shape.tokens,
        none: 0.0,
        duplicate: 0.0,
        seed: shape.seed,
    };
    let uniform = crate::cli::cases::routing::Routing::Uniform;
    let router = crate::cli::cases::routing::Router::new(&uniform, routing).unwrap();
    let [mut nvlink, mut wire] = [0, 0];
    for source in 0..shape.ranks() {
        let routed = router.draw(0, source, shape.tokens);
        for ids in routed.topk_idx.chunks(preset.top_k) {
            let rank_of = |id: &i64| *id as usize * shape.ranks() / preset.experts;
            let ranks: std::collections::BTreeSet<usize> = ids.iter().map(rank_of).collect();
            for node in 0..shape.nodes {
                let here: Vec<usize> = ranks.iter().copied().filter(|rank| rank / shape.per_node == node).collect();
                // The source itself, or the rank in its place on the node.
                let from = node * shape.per_node + source % shape.per_node;
                wire += u64::from(from != source && !here.is_empty());
                nvlink += here.iter().filter(|rank| **rank != from).count() as u64;
            }
        }
    }
    [nvlink, wire]
}

#[test]
fn a_projection_moves_the_rows_of_its_routing_and_counts_every_message() {
    let shape = v3(3, 4);
    let link = models::parse("cx7").unwrap();
    let plan = Plan::new(shape, link.nics, Order::DESIGN, None);
    let (dispatch, combine) = run(&plan, &link, Costs::H200, 1, &|_| {}).unwrap();
    let same = designed(shape, "cx7");
    assert_eq!((&dispatch.us, &combine.us), (&same.dispatch.0, &same.combine.0));
    let about = About { link: "cx7".to_string(), iters: 1, without: Vec::new() };
    let projection = Projection::new(&plan, &link, &about, dispatch, combine);
    let [nvlink, wire] = rows_moved(shape).map(|rows| rows as f64);
    // 12 ranks, each with a message to and from two nodes. A dispatched row has 7392 bytes, and between nodes a header
    // of 80; a sum has 14 336.
    let mean = |bytes: f64| (bytes / 12.0).round() as u64;
    let bytes = projection.bytes_per_rank;
    assert_eq!(
        [bytes.dispatch_nvlink, bytes.combine_nvlink, bytes.dispatch_wire, bytes.combine_wire],
        [
            mean(nvlink * 7392.0),
            mean(nvlink * 14_336.0),
            mean(wire * (7392.0 + 80.0) + 24.0 * 32.0),
            mean(wire * 14_336.0 + 24.0 * 32.0)
        ]
    );
    let posts = [same.dispatch.2, same.combine.2].map(|posts| (posts as f64 / 12.0 * 1e3).round() / 1e3);
    assert_eq!([projection.messages_per_rank.dispatch, projection.messages_per_rank.combine], posts);
    assert!(posts[0] != posts[1]);
}
