//! Ranks of one process that regroup: with other members or another generation than others.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokenyard::internals::base::{Error, Rank, wait};

use super::support::*;

/// What the error of either side names.
fn regroups(rank: u32, generation: u32, members: &str) -> String {
    format!("rank {rank} regroups to generation {generation} of members {members}")
}

/// They wait for each other, whichever comes first. Both can retry.
#[test]
fn threads_that_regroup_with_different_members_wait_out_their_deadlines() {
    let start = Instant::now();
    let texts = threaded(3, |world| {
        let members: &[u32] = if world.rank() == Rank(0) { &[0, 1, 2] } else { &[0, 1] };
        if world.rank() == Rank(2) {
            return None;
        }
        let error = bootstrap_error(world.regroup(1, &members.iter().copied().map(Rank).collect::<Vec<_>>()));
        assert!(!error.is_fatal(), "{error:?}");
        exchange_many(world.regroup(2, &[Rank(0), Rank(1)]).unwrap());
        Some(error.to_string())
    });
    for text in texts.iter().flatten() {
        let both = [regroups(0, 1, "0-2"), regroups(1, 1, "0-1")];
        assert!(both.iter().all(|side| text.contains(side)) && text.contains("name the same members"), "{text}");
    }
    assert!(texts.iter().flatten().count() == 2 && start.elapsed() < PATIENCE / 2, "{texts:?}");
}

/// The rank that is behind fails at once and can follow to the newer generation. There the other one waits for it, and
/// if it does not come names what it last called with.
#[test]
fn a_thread_that_regroups_to_an_older_generation_waits_out_its_deadline() {
    for (follows, last) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
        let start = Instant::now();
        threaded(2, |world| {
            let both = [Rank(0), Rank(1)];
            let names_both = |error: Error| {
                let text = error.to_string();
                let sides = [regroups(0, 1, "0-1"), regroups(1, 2, "0-1")];
                assert!(sides.iter().all(|side| text.contains(side)) && !error.is_fatal(), "{text}");
            };
            if world.rank() == Rank(last) {
                std::thread::sleep(Duration::from_millis(50));
            }
            match (world.rank(), follows) {
                (Rank(0), _) => {
                    names_both(bootstrap_error(world.regroup(1, &both)));
                    if follows {
                        exchange_many(world.regroup(2, &both).unwrap());
                    }
                }
                (_, true) => exchange_many(world.regroup(2, &both).unwrap()),
                _ => names_both(bootstrap_error(world.clone().with_timeout(SHORT).regroup(2, &both))),
            }
        });
        assert!(start.elapsed() < PATIENCE / 2, "{follows}, {last}");
    }
}

/// As one that comes back while the others still form a world without it.
#[test]
fn a_rank_that_is_early_for_a_later_generation_ends_an_earlier_one() {
    let came = AtomicUsize::new(0);
    threaded(3, |world| {
        if world.rank() == Rank(2) {
            came.store(1, Ordering::Relaxed);
        } else {
            wait::poll("rank 2", PATIENCE, || (came.load(Ordering::Relaxed) == 1).then_some(())).unwrap();
            // Nothing shows that a rank waits in its regroup.
            std::thread::sleep(Duration::from_millis(50));
            exchange_many(world.regroup(1, &[Rank(0), Rank(1)]).unwrap());
        }
        exchange_many(world.regroup(2, &[0, 1, 2].map(Rank)).unwrap());
    });
}

/// Survivors go on without a rank that takes them for more, be it before them or after them.
#[test]
fn a_rank_that_names_more_members_ends_the_regroup_of_those_that_do_not_name_it() {
    for rank_0_first in [true, false] {
        let came = AtomicUsize::new(0);
        let wait_for = |count| {
            wait::poll("others", PATIENCE, || (came.load(Ordering::Relaxed) >= count).then_some(())).unwrap();
            // Nothing shows that a rank waits in its regroup.
            std::thread::sleep(Duration::from_millis(50));
        };
        threaded(3, |world| {
            let rank = world.rank().0;
            match (rank, rank_0_first) {
                (0, true) | (1, false) => {}
                (0, false) | (1, true) => wait_for(1),
                _ => wait_for(2),
            }
            came.fetch_add(1, Ordering::Relaxed);
            if rank > 0 {
                return exchange_many(world.regroup(1, &[Rank(1), Rank(2)]).unwrap());
            }
            let text = bootstrap_text(world.regroup(1, &[0, 1, 2].map(Rank)));
            assert!(text.contains("of members 0-2") && text.contains("rank 1 regroups to generation 1 of"), "{text}");
        });
    }
}

#[test]
fn a_regroup_of_processes_has_the_deadline_of_its_world() {
    let both = [Rank(0), Rank(1)];
    joined(2, |world| {
        let given = PATIENCE / 3;
        let next = world.with_timeout(given).regroup(1, &both).unwrap();
        assert_eq!(next.timeout(), given);
        exchange_many(next.clone());
        if next.rank() == Rank(0) {
            let start = Instant::now();
            let error = bootstrap_error(next.clone().with_timeout(SHORT).regroup(2, &both));
            assert!(start.elapsed() < PATIENCE / 2 && error.to_string().contains("rank 1 has not joined"), "{error}");
        }
    });
}
