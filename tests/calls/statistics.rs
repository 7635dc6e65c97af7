//! The device's statistics of its own calls: stages, peers' notices, bytes sent; and nothing where not requested.

use crate::rig;

use rig::*;
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
