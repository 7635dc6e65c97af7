//! Counts that come first: outputs of exactly as many rows as come, and every way in which counts do not come.

use crate::rig;

use std::thread::sleep;
use std::time::{Duration, Instant};

use rig::*;
use tokenyard::*;

/// Choices of a rank's tokens, in a round. Ranks have different numbers of tokens; one has none.
fn choices_of(rank: usize, salt: usize) -> Vec<[i32; TOP_K]> {
    let experts = EXPERTS as i32;
    let choice = |token: usize| {
        let first = ((rank * 3 + token * 5 + salt) as i32) % experts;
        [first, if token % 3 == 2 { -1 } else { (first + 1 + token as i32) % experts }]
    };
    (0..(rank + salt) % (MAX_TOKENS + 1)).map(choice).collect()
}

/// Rows of each local expert, and each rank's tokens with a row here, as the definition has them.
fn wanted(world: &World, salt: usize) -> (Vec<usize>, Vec<usize>) {
    let (ranks, rank) = (world.size(), world.rank().index());
    let owner = |expert: i32| expert as usize * ranks / EXPERTS;
    let all: Vec<Vec<[i32; TOP_K]>> = (0..ranks).map(|source| choices_of(source, salt)).collect();
    let is_here = |expert: &i32| *expert >= 0 && owner(*expert) == rank;
    let local = (0..EXPERTS as i32).filter(|expert| owner(*expert) == rank);
    let rows = |expert: i32| all.iter().flatten().flatten().filter(|other| **other == expert).count();
    let tokens = |choices: &Vec<[i32; TOP_K]>| choices.iter().filter(|token| token.iter().any(is_here)).count();
    (local.map(rows).collect(), all.iter().map(tokens).collect())
}

/// A token without a second choice gets half of its row.
fn expect_sums(rig: &Rig, salt: usize) {
    for (token, choices) in choices_of(rig.rank, salt).iter().enumerate() {
        let factor = if choices[1] < 0 { 0.5 } else { 1.0 };
        assert_eq!(rig.sum(token), rig.scaled_row(token, salt, factor), "rank {} token {token}", rig.rank);
    }
}

/// Rounds of dispatch and combine whose outputs have exactly as many rows as they need.
fn exact_rounds(world: &World, rig: &Rig) {
    for salt in 0..6 {
        let choices = choices_of(rig.rank, salt);
        rig.route(&choices, salt);
        let sent = rig.ep.dispatch_send_counts(&rig.stream, &rig.tokens(choices.len())).unwrap();
        let counts = rig.ep.counts(&sent, PATIENCE).unwrap();
        let (experts, sources) = wanted(world, salt);
        assert_eq!((&counts.experts, &counts.sources), (&experts, &sources), "rank {} round {salt}", rig.rank);
        assert_eq!(rig.ep.counts(&sent, PATIENCE), Ok(counts.clone()), "asked again");
        let Layout::Contiguous { capacity, .. } = counts.fit(Layout::Contiguous { align: 1, capacity: 0 }) else {
            panic!("another layout");
        };
        assert_eq!(capacity, experts.iter().sum::<usize>());
        let handle = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(capacity)).unwrap();
        rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        expect_sums(rig, salt);
    }
}

#[test]
fn outputs_have_exactly_as_many_rows_as_come() {
    for ranks in [1, 3, 5] {
        on_ranks(ranks, |world| exact_rounds(&world, &Rig::new(&world)));
    }
    // A call of several rounds, with metadata in several tiles.
    on_ranks(2, |world| {
        exact_rounds(&world, &Rig::with(&world, |builder| builder.tuning(|t| t.round_tokens = Some(1))));
    });
}

#[test]
fn rails_forward_what_the_counts_need() {
    for sizes in [&[1, 1][..], &[2, 1], &[1, 3], &[2, 2, 1]] {
        for rounds in [None, Some(2)] {
            nodes::on_nodes(sizes, |world, network| {
                let proxy = nodes::proxy(network, &world, 1500);
                let rig = Rig::with(&world, |builder| {
                    let builder = builder.proxy(&proxy).timeout(nodes::DEADLINE);
                    builder.tuning(|t| (t.chunk_rows, t.round_tokens) = (Some(1), rounds))
                });
                exact_rounds(&world, &rig);
                world.barrier("all are done").unwrap();
            });
        }
    }
}

/// Some ranks ask for counts, the others make whole calls.
#[test]
fn a_rank_may_ask_for_counts_alone() {
    for sizes in [&[3][..], &[2, 1], &[1, 1, 1]] {
        nodes::on_nodes(sizes, |world, network| {
            let proxy = (sizes.len() > 1).then(|| nodes::proxy(network, &world, 1500));
            let rig = Rig::with(&world, |builder| match &proxy {
                Some(proxy) => builder.proxy(proxy).timeout(nodes::DEADLINE),
                None => builder,
            });
            for salt in 0..6 {
                let choices = choices_of(rig.rank, salt);
                rig.route(&choices, salt);
                let (tokens, output) = (rig.tokens(choices.len()), rig.output(rig.capacity));
                let handle = match (rig.rank + salt) % 3 {
                    0 => {
                        let sent = rig.ep.dispatch_send_counts(&rig.stream, &tokens).unwrap();
                        let counts = rig.ep.counts(&sent, PATIENCE).unwrap();
                        assert_eq!((counts.experts, counts.sources), wanted(&world, salt));
                        rig.ep.dispatch_recv(&rig.stream, sent, &output).unwrap()
                    }
                    1 => rig.ep.dispatch(&rig.stream, &tokens, &output).unwrap(),
                    _ => {
                        let sent = rig.ep.dispatch_send(&rig.stream, &tokens).unwrap();
                        rig.ep.dispatch_recv(&rig.stream, sent, &output).unwrap()
                    }
                };
                rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
                rig.stream.synchronize(PATIENCE).unwrap();
                rig.ep.check().unwrap();
                expect_sums(&rig, salt);
            }
            world.barrier("all are done").unwrap();
        });
    }
}

#[test]
fn counts_wait_for_the_last_rank_and_may_be_asked_for_again() {
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        rig.route_all(1);
        world.barrier("rigs are ready").unwrap();
        if rig.rank == 1 {
            sleep(Duration::from_millis(400));
        }
        let sent = rig.ep.dispatch_send_counts(&rig.stream, &rig.tokens(MAX_TOKENS)).unwrap();
        if rig.rank == 0 {
            let early = rig.ep.counts(&sent, Duration::from_millis(20)).unwrap_err();
            let text = early.to_string();
            assert!(text.contains("had not come after 20ms") && !early.is_fatal(), "{text}");
            let interrupt = Interrupt::new();
            interrupt.raise();
            let stopped = interrupt.during(|| rig.ep.counts(&sent, PATIENCE)).unwrap_err();
            assert!(matches!(&stopped, Error::Interrupted { what: "counts", .. }) && !stopped.is_fatal(), "{stopped}");
        }
        rig.ep.counts(&sent, PATIENCE).unwrap();
        let handle = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity)).unwrap();
        rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        rig.expect_own_rows(MAX_TOKENS, 1);
    });
}

/// The device's deadline names the rank, long before the host's own.
#[test]
fn a_rank_that_never_sends_is_named() {
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |builder| builder.timeout(Duration::from_millis(300)));
        rig.route_all(1);
        if rig.rank == 0 {
            let sent = rig.ep.dispatch_send_counts(&rig.stream, &rig.tokens(MAX_TOKENS)).unwrap();
            let began = Instant::now();
            let lost = rig.ep.counts(&sent, Duration::from_secs(60)).unwrap_err();
            assert!(matches!(&lost, Error::Timeout { peer: Rank(1), .. }), "{lost}");
            assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
            assert_eq!(rig.ep.counts(&sent, PATIENCE), Err(lost.clone()), "the context is closed");
            let refused = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity)).map(drop).unwrap_err();
            assert_eq!(refused.error, lost);
        }
        world.barrier("the deadline has passed").unwrap();
    });
}

#[test]
fn unusable_routing_sends_no_rows_and_its_rank_gets_the_error_first() {
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        rig.route_all(1);
        if rig.rank == 1 {
            rig.idx.write(0, &99i32.to_ne_bytes()).unwrap();
        }
        let sent = rig.ep.dispatch_send_counts(&rig.stream, &rig.tokens(MAX_TOKENS)).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        if rig.rank == 1 {
            assert!(matches!(rig.ep.counts(&sent, PATIENCE), Err(Error::Routing { rank: Rank(1), .. })));
        }
        let counts = rig.ep.counts(&sent, PATIENCE).unwrap();
        assert_eq!(counts.sources[1], 0);
        let handle = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity)).unwrap();
        rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        if rig.rank == 0 {
            rig.expect_own_rows(MAX_TOKENS, 1);
        }
        rig.good_round(2);
    });
}

#[test]
fn an_output_that_is_smaller_than_the_counts_is_reported() {
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        rig.route_all(1);
        let sent = rig.ep.dispatch_send_counts(&rig.stream, &rig.tokens(MAX_TOKENS)).unwrap();
        let counts = rig.ep.counts(&sent, PATIENCE).unwrap();
        let rows: usize = counts.experts.iter().sum();
        rig.rows.fill(0x77).unwrap();
        let _handle = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rows - 1)).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let short = rig.ep.check().unwrap_err();
        let (needed, given) = (rows as u64, rows as u64 - 1);
        assert!(matches!(short, Error::Capacity { needed: n, given: g, .. } if (n, g) == (needed, given)), "{short}");
        let mut seen = vec![0; rig.rows.len()];
        rig.rows.read(0, &mut seen).unwrap();
        assert_eq!(seen, vec![0x77; rig.rows.len()], "nothing is stored");
        rig.good_round(2);
    });
}

#[test]
fn counts_that_cannot_come_are_refused() {
    on_ranks(1, |world| {
        let (rig, other) = (Rig::new(&world), Rig::new(&world));
        rig.route_all(1);
        let tokens = rig.tokens(MAX_TOKENS);
        rig.stream.begin_capture().unwrap();
        let text = rig.ep.dispatch_send_counts(&rig.stream, &tokens).map(drop).unwrap_err().to_string();
        assert!(text.contains("stream is capturing a dispatch whose counts come first"), "{text}");
        drop(rig.stream.end_capture().unwrap());
        let sent = rig.ep.dispatch_send(&rig.stream, &tokens).unwrap();
        let text = rig.ep.counts(&sent, PATIENCE).unwrap_err().to_string();
        assert!(text.contains("of a call without counts") && text.contains("dispatch_send_counts"), "{text}");
        drop(rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity)).unwrap());
        let sent = rig.ep.dispatch_send_counts(&rig.stream, &tokens).unwrap();
        let text = other.ep.counts(&sent, PATIENCE).unwrap_err().to_string();
        assert!(text.contains("of another context"), "{text}");
        assert_eq!(rig.ep.counts(&sent, PATIENCE).unwrap().sources, [MAX_TOKENS]);
        drop(rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity)).unwrap());
        rig.good_round(2);
    });
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |builder| builder.tuning(|t| t.in_place = Some((1, MAX_TOKENS * TOP_K))));
        rig.route_all(1);
        let text = rig.ep.dispatch_send_counts(&rig.stream, &rig.tokens(MAX_TOKENS)).map(drop).unwrap_err().to_string();
        assert!(text.contains("has no halves"), "{text}");
    });
}
