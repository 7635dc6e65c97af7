//! The device's statistics of its own calls: stages, peers' notices, bytes sent; and nothing where not requested.

use crate::rig;

use rig::*;
use std::time::Duration;
use tokenyard::*;

/// Bytes of the rows of these choices by rank: a row goes once to each rank that holds one of its experts.
fn bytes_by_rank(ep: &AllToAll, ranks: usize, choices: &[[i32; TOP_K]]) -> Vec<u64> {
    let holds = |choice: &[i32; TOP_K], rank: u32| {
        choice.iter().any(|&expert| expert >= 0 && ep.placement().rank_of(expert as usize) == Some(rank))
    };
    let rows = |rank: usize| choices.iter().filter(|choice| holds(choice, rank as u32)).count();
    (0..ranks).map(|rank| (rows(rank) * HIDDEN * 2) as u64).collect()
}

fn names(call: &CallStatistics) -> Vec<&'static str> {
    call.stages.iter().map(|stage| stage.name).collect()
}

#[test]
fn a_call_reports_its_stages_its_peers_notices_and_what_it_sent() {
    on_ranks(3, |world| {
        for round_tokens in [MAX_TOKENS, 1] {
            let rig = Rig::with(&world, |builder| {
                builder.tuning(|t| {
                    t.statistics = true;
                    t.round_tokens = Some(round_tokens)
                })
            });
            assert_eq!(rig.ep.dispatched_bytes(), Some(vec![0; 3]), "nothing was sent yet");
            for (salt, choices) in [[[0, 7], [3, 4]], [[1, -1], [-1, -1]], [[6, 7], [7, 6]]].iter().enumerate() {
                rig.route(choices, salt);
                rig.round(2, rig.capacity).unwrap();
                assert_eq!(rig.ep.dispatched_bytes(), Some(bytes_by_rank(&rig.ep, 3, choices)));
                let [dispatch, combine] = [rig.ep.dispatch_statistics().unwrap(), rig.ep.combine_statistics().unwrap()];
                for call in [&dispatch, &combine] {
                    assert!(call.notified_ns.len() == 3 && call.notified_ns.iter().all(Option::is_some), "{call:?}");
                    assert!(
                        call.stages.iter().all(|s| s.first_ns <= s.median_ns && s.median_ns <= s.last_ns),
                        "{call:?}"
                    );
                    let last = call.stages.last().unwrap();
                    assert!(last.name == "done" && call.stages.iter().all(|s| s.last_ns <= last.last_ns), "{call:?}");
                }
                assert!(names(&dispatch).contains(&"rows placed") && names(&combine).contains(&"sums"));
                let received = dispatch.stages.iter().find(|stage| stage.name == "counts received").unwrap();
                assert!(dispatch.notified_ns.iter().flatten().all(|&ns| ns <= received.last_ns), "{dispatch:?}");
            }
        }
    });
}

#[test]
fn a_context_that_was_not_asked_reports_nothing() {
    on_ranks(1, |world| {
        let rig = Rig::new(&world);
        rig.good_round(1);
        assert!(rig.ep.dispatch_statistics().is_none() && rig.ep.combine_statistics().is_none());
        assert!(rig.ep.dispatched_bytes().is_none());
    });
}

/// Rows of a token go once to each rank of the own node, and once to another node, whichever of its ranks is the rail.
#[test]
fn calls_of_several_rounds_over_nodes_report_what_they_sent() {
    const SIZES: [usize; 2] = [2, 1];
    rig::nodes::on_nodes(&SIZES, |world, network| {
        let proxy = rig::nodes::proxy(network, &world, 10_000);
        for round_tokens in [MAX_TOKENS, 1] {
            let rig = Rig::with(&world, |builder| {
                builder.proxy(&proxy).tuning(|t| {
                    t.statistics = true;
                    t.round_tokens = Some(round_tokens);
                })
            });
            for (salt, choices) in
                [[[0, 7], [3, 4], [1, 2]], [[1, -1], [-1, -1], [5, 6]], [[6, 7], [7, 6], [0, 3]]].iter().enumerate()
            {
                rig.route(choices, salt);
                rig.round(3, rig.capacity).unwrap();
                let seen = rig.ep.dispatched_bytes().unwrap();
                let own_node = if rig.rank < SIZES[0] { 0..SIZES[0] } else { SIZES[0]..3 };
                let by_rank = bytes_by_rank(&rig.ep, 3, choices);
                assert_eq!(seen[own_node.clone()], by_rank[own_node.clone()], "rank {}", rig.rank);
                let there = |choice: &[i32; TOP_K]| {
                    choice.iter().any(|&expert| {
                        let rank = usize::try_from(expert).ok().and_then(|expert| rig.ep.placement().rank_of(expert));
                        rank.is_some_and(|rank| !own_node.contains(&(rank as usize)))
                    })
                };
                let crossing = (choices.iter().filter(|choice| there(choice)).count() * HIDDEN * 2) as u64;
                let mut others = seen.clone();
                others.drain(own_node);
                others.retain(|bytes| *bytes != 0);
                assert_eq!(others, if crossing == 0 { vec![] } else { vec![crossing] }, "rank {}: {seen:?}", rig.rank);
                for call in [rig.ep.dispatch_statistics().unwrap(), rig.ep.combine_statistics().unwrap()] {
                    assert!(call.stages.iter().all(|s| s.first_ns <= s.last_ns), "{call:?}");
                    assert_eq!(call.stages.last().unwrap().name, "done", "{call:?}");
                }
            }
            world.barrier("measured").unwrap();
        }
    });
}

/// Nanoseconds for which a rank's dispatches have waited for each rank.
fn waited(times: &DeviceBuffer) -> Vec<u64> {
    let mut seen = vec![0; times.len()];
    times.read(0, &mut seen).unwrap();
    seen.as_chunks::<8>().0.iter().map(|time| u64::from_ne_bytes(*time)).collect()
}

/// Rank 2 is late with its dispatch or with its combine; what is there before is added to.
fn check_waits(world: &World, rounds: u64, change: impl Fn(AllToAllBuilder) -> AllToAllBuilder) {
    const LATE: Duration = Duration::from_millis(150);
    let device = test_device(world);
    let times = [device.alloc(3 * 8).unwrap(), device.alloc(3 * 8).unwrap()];
    times.iter().for_each(|times| times.write(0, &1_000u64.to_ne_bytes().repeat(3)).unwrap());
    let rig = Rig::on(world, device, change);
    let output = rig.output(rig.capacity).wait_times(times[0].view());
    let combined = rig.combined().wait_times(times[1].view());
    let mut before = [vec![1_000; 3], vec![1_000; 3]];
    for (salt, late) in [Some(0), Some(1), None].into_iter().enumerate() {
        rig.route_all(salt);
        let begin = |call| {
            rig.stream.synchronize(PATIENCE).unwrap();
            world.barrier("ranks are aligned").unwrap();
            if late == Some(call) && rig.rank == 2 {
                std::thread::sleep(LATE);
            }
        };
        begin(0);
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &output).unwrap();
        begin(1);
        rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &combined).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        rig.expect_own_rows(MAX_TOKENS, salt);
        for call in 0..2 {
            let now = waited(&times[call]);
            let added = now.iter().zip(&before[call]).map(|(now, before)| now.checked_sub(*before).unwrap());
            let added: Vec<u64> = added.collect();
            // Other ranks' threads may be held up, too.
            let waits = late == Some(call) && rig.rank != 2;
            assert!(!waits || added[2] > LATE.as_nanos() as u64 * 2 / 3, "rank {} call {call}: {added:?}", rig.rank);
            assert!(added.iter().all(|time| *time < rounds * 10_000_000_000), "rank {}: {added:?}", rig.rank);
            before[call] = now;
        }
    }
}

#[test]
fn a_call_adds_up_how_long_it_waits_for_each_rank() {
    on_ranks(3, |world| check_waits(&world, 1, |builder| builder));
    // Rank 2, alone in its node, is the rail of both others, and sends them its node's sums.
    nodes::on_nodes(&[2, 1], |world, network| {
        let proxy = nodes::proxy(network, &world, 3000);
        check_waits(&world, 2, |builder| builder.proxy(&proxy).tuning(|t| t.round_tokens = Some(2)));
    });
}
