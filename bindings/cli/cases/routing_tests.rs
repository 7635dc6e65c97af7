//! Each routing against a plain definition of it, written apart.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

const SEED: u64 = 11;
/// Most standard deviations that a count is off.
const SIGMAS: f64 = 4.5;

fn shape(experts: usize, top_k: usize) -> RoutingShape {
    RoutingShape { ranks: 4, experts, top_k, max_tokens: 64, none: 0.0, duplicate: 0.0, seed: SEED }
}

fn router(text: &str, shape: RoutingShape) -> Router {
    Router::new(&Routing::parse(text).unwrap(), shape).unwrap()
}

/// The choices of so many tokens, a row each.
fn rows(text: &str, shape: RoutingShape, tokens: usize) -> Vec<Vec<i64>> {
    let routed = router(text, shape).draw(5, 2, tokens);
    routed.topk_idx.chunks(shape.top_k).map(<[i64]>::to_vec).collect()
}

/// Counts must be about as many as their chances say, of `all` draws; what has no chance must not occur.
fn assert_counts<K: Ord + std::fmt::Debug>(what: &str, drawn: impl Iterator<Item = K>, chances: &[(K, f64)]) {
    let mut counts = BTreeMap::new();
    drawn.for_each(|key| *counts.entry(key).or_insert(0_usize) += 1);
    let all = counts.values().sum::<usize>() as f64;
    for (key, chance) in chances {
        let count = counts.remove(key).unwrap_or(0) as f64;
        let most = SIGMAS * (all * chance * (1.0 - chance)).sqrt();
        assert!((count - all * chance).abs() <= most, "{what} {key:?}: {count} of {all}, and not {:.1}", all * chance);
    }
    assert!(counts.is_empty(), "{what}: these have no chance: {counts:?}");
}

#[test]
fn a_tokens_routing_follows_from_seed_iteration_rank_and_token_alone() {
    for text in ["uniform", "v3-groups", "zipf:1.2", "zipf:0", "hot:2"] {
        let of = |seed: u64, iteration: u64, rank: usize, tokens: usize| {
            router(text, RoutingShape { seed, ..shape(64, 6) }).draw(iteration, rank, tokens)
        };
        let (all, first) = (of(SEED, 5, 2, 30), of(SEED, 5, 2, 10));
        assert_eq!(
            (&all.topk_idx[..60], &all.topk_weight[..60]),
            (&first.topk_idx[..], &first.topk_weight[..]),
            "{text}"
        );
        let others = [of(SEED + 1, 5, 2, 30), of(SEED, 6, 2, 30), of(SEED, 5, 3, 30), of(SEED, 2, 5, 30)];
        for other in &others {
            let alike = |a: &[i64], b: &[i64]| a.chunks(6).zip(b.chunks(6)).filter(|(a, b)| a == b).count();
            assert!(alike(&all.topk_idx, &other.topk_idx) <= 1, "{text}: hardly a token has the same choices");
            assert!(all.topk_weight.iter().zip(&other.topk_weight).filter(|(a, b)| a == b).count() <= 1, "{text}");
        }
        let distinct: BTreeSet<&[i64]> = all.topk_idx.chunks(6).collect();
        assert!(distinct.len() >= 29, "{text}: tokens differ");
    }
}

#[test]
fn uniform_draws_every_ordered_choice_equally_often() {
    // Three of twelve are drawn one by one until they differ, two of four by exchanges.
    for (experts, top_k) in [(12, 3), (4, 2)] {
        let rows = rows("uniform", shape(experts, top_k), 100 * experts * (experts - 1));
        let pairs = (0..experts as i64).flat_map(|a| (0..experts as i64).map(move |b| (a, b))).filter(|(a, b)| a != b);
        let chances: Vec<((i64, i64), f64)> =
            pairs.map(|pair| (pair, 1.0 / (experts * (experts - 1)) as f64)).collect();
        for (a, b) in [(0, 1), (0, top_k - 1), (top_k - 2, top_k - 1)] {
            assert_counts(&format!("{experts}: {a}, {b}"), rows.iter().map(|ids| (ids[a], ids[b])), &chances);
        }
    }
}

#[test]
fn zipf_draws_in_proportion_to_a_power_of_the_place_without_replacement() {
    const EXPERTS: usize = 5;
    let rows = rows("zipf:1.5", shape(EXPERTS, 2), 20_000);
    // An expert's place is its rank by first choices.
    let load = |expert: i64| rows.iter().filter(|ids| ids[0] == expert).count();
    let mut by_place: Vec<i64> = (0..EXPERTS as i64).collect();
    by_place.sort_by_key(|expert| std::cmp::Reverse(load(*expert)));
    let sum: f64 = (1..=EXPERTS).map(|place| (place as f64).powf(-1.5)).sum();
    let chance: Vec<(i64, f64)> = (1..).zip(&by_place).map(|(p, e)| (*e, f64::from(p).powf(-1.5) / sum)).collect();
    assert_counts("first choices", rows.iter().map(|ids| ids[0]), &chance);
    // The second choice is among those that are left.
    let pairs: Vec<((i64, i64), f64)> = chance
        .iter()
        .flat_map(|(a, of_a)| chance.iter().map(move |(b, of_b)| ((*a, *b), of_a * of_b / (1.0 - of_a))))
        .filter(|((a, b), _)| a != b)
        .collect();
    assert_counts("both choices", rows.iter().map(|ids| (ids[0], ids[1])), &pairs);
    let flat: Vec<(i64, f64)> = (0..7).map(|expert| (expert, 1.0 / 7.0)).collect();
    assert_counts("exponent 0", self::rows("zipf:0", shape(7, 1), 7000).into_iter().map(|ids| ids[0]), &flat);
}

#[test]
fn places_of_zipf_are_the_runs_and_another_seeds_are_others() {
    // With this exponent the first choice is the expert in the first place, and the second that in the second.
    let places = |seed: u64, iteration: u64, rank: usize| {
        let routed = router("zipf:20", RoutingShape { seed, ..shape(9, 2) }).draw(iteration, rank, 50);
        let mut seen: BTreeMap<Vec<i64>, usize> = BTreeMap::new();
        routed.topk_idx.chunks(2).for_each(|ids| *seen.entry(ids.to_vec()).or_default() += 1);
        seen.into_iter().max_by_key(|(_, times)| *times).filter(|(_, times)| *times >= 48).unwrap().0
    };
    for (iteration, rank) in [(0, 1), (1, 0), (9, 3)] {
        assert_eq!(places(3, iteration, rank), places(3, 0, 0));
    }
    let firsts: BTreeSet<i64> = (0..60).map(|seed| places(seed, 0, 0)[0]).collect();
    assert_eq!(firsts.len(), 9, "every expert is in the first place for some seed");
}

#[test]
fn hot_experts_come_first_and_the_others_are_uniform() {
    for (hot, experts, top_k) in [(3_usize, 10, 5), (1, 6, 2), (4, 9, 4), (6, 6, 3), (5, 8, 2)] {
        let rows = rows(&format!("hot:{hot}"), shape(experts, top_k), 4000);
        let first = hot.min(top_k);
        assert!(rows.iter().all(|ids| ids[..first].iter().copied().eq(0..first as i64)), "{hot} of {experts}");
        let chances: Vec<(i64, f64)> =
            (hot..experts).map(|expert| (expert as i64, 1.0 / (experts - hot) as f64)).collect();
        for place in first..top_k {
            assert_counts(&format!("{hot} of {experts}: {place}"), rows.iter().map(|ids| ids[place]), &chances);
        }
    }
}

#[test]
fn v3_groups_takes_the_best_experts_of_the_four_groups_with_the_best_pairs() {
    for (experts, top_k) in [(256, 8), (64, 8), (16, 5), (8, 4)] {
        let shape = shape(experts, top_k);
        for (token, ids) in rows("v3-groups", shape, 40).iter().enumerate() {
            let mut counter = Counter::new(SEED, Use::Choice, 5, 2, token);
            let scores: Vec<u64> = (0..experts).map(|_| counter.next() >> 1).collect();
            let size = experts / 8;
            // A group is worth its two best scores.
            let worth = |group: usize| {
                let members = &scores[group * size..(group + 1) * size];
                let pairs = members
                    .iter()
                    .enumerate()
                    .flat_map(|(i, a)| members[i + 1..].iter().map(move |b| u128::from(*a) + u128::from(*b)));
                pairs.max().unwrap_or(u128::from(members[0]))
            };
            let better = |group: usize| (0..8).filter(|other| worth(*other) > worth(group)).count();
            let groups: Vec<usize> = (0..8).filter(|group| better(*group) < 4).collect();
            let usable: Vec<usize> = groups.iter().flat_map(|group| group * size..(group + 1) * size).collect();
            for (place, id) in ids.iter().enumerate() {
                let above = usable.iter().filter(|expert| scores[**expert] > scores[*id as usize]).count();
                assert!(usable.contains(&(*id as usize)) && above == place, "{experts}, token {token}: {ids:?}");
            }
        }
    }
}

#[test]
fn dropped_choices_are_as_many_as_asked_for_and_change_no_other() {
    let whole = rows("uniform", shape(20, 4), 3000);
    let some = rows("uniform", RoutingShape { none: 0.3, ..shape(20, 4) }, 3000);
    for place in 0..4 {
        let dropped = some.iter().map(|ids| ids[place] == -1);
        assert_counts(&format!("choice {place}"), dropped, &[(true, 0.3), (false, 0.7)]);
    }
    let both = some.iter().map(|ids| (ids[0] == -1, ids[1] == -1));
    let chances = [((true, true), 0.09), ((true, false), 0.21), ((false, true), 0.21), ((false, false), 0.49)];
    assert_counts("two choices of a token", both, &chances);
    for (all, some) in whole.iter().flatten().zip(some.iter().flatten()) {
        assert!(all == some || *some == -1, "{all} became {some}");
    }
    let none = rows("hot:3", RoutingShape { none: 1.0, ..shape(20, 4) }, 50);
    assert!(none.iter().flatten().all(|id| *id == -1));
}

#[test]
fn repeated_choices_are_as_many_as_asked_for_and_repeat_an_earlier_one() {
    let whole = rows("uniform", shape(20, 3), 3000);
    let some = rows("uniform", RoutingShape { duplicate: 0.4, ..shape(20, 3) }, 3000);
    let earlier = |ids: &[i64], place: usize| ids[..place].iter().position(|id| *id == ids[place]);
    assert!(whole.iter().all(|ids| earlier(ids, 1).is_none() && earlier(ids, 2).is_none()));
    assert_counts("second", some.iter().map(|ids| earlier(ids, 1)), &[(None, 0.6), (Some(0), 0.4)]);
    // Where the second repeats the first, the first is found for both.
    let third = some.iter().map(|ids| (earlier(ids, 1), earlier(ids, 2)));
    let chances = [((None, None), 0.36), ((None, Some(0)), 0.12), ((None, Some(1)), 0.12), ((Some(0), None), 0.24)];
    assert_counts("third", third, &[&chances[..], &[((Some(0), Some(0)), 0.16)]].concat());
    for (all, some) in whole.iter().zip(&some) {
        assert!((0..3).all(|k| all[k] == some[k] || earlier(some, k).is_some()), "{all:?} became {some:?}");
    }
    let alike = rows("uniform", RoutingShape { duplicate: 1.0, ..shape(20, 4) }, 50);
    assert!(alike.iter().all(|ids| ids.iter().all(|id| *id == ids[0])));
}

#[test]
fn ragged_counts_are_uniform_and_each_ranks_own() {
    let counts = |seed: u64, rank: usize| (0..3000).map(move |i| ragged_count(seed, i, rank, 4));
    let fifth: Vec<(usize, f64)> = (0..=4).map(|count| (count, 0.2)).collect();
    for rank in [0, 1, 7] {
        assert_counts("tokens", counts(SEED, rank), &fifth);
    }
    for (what, others) in [("rank", counts(SEED, 1)), ("seed", counts(SEED + 1, 0))] {
        let alike = counts(SEED, 0).zip(others).map(|(a, b)| a == b);
        assert_counts(&format!("another {what}"), alike, &[(true, 0.2), (false, 0.8)]);
    }
    assert_eq!(ragged_count(SEED, 1, 0, 0), 0);
}

/// A trace of [ranks, tokens, K], whose choices are the numbers from 0 and whose weights are those and a half.
fn trace(path: &std::path::Path, shape: [usize; 3]) {
    let count = shape.iter().product::<usize>();
    let tensor = |kind: &str, from: usize| {
        format!("{{\"dtype\":\"{kind}\",\"shape\":{shape:?},\"data_offsets\":[{from},{}]}}", from + 4 * count)
    };
    let header = format!("{{\"topk_idx\":{},\"topk_weight\":{}}}", tensor("I32", 0), tensor("F32", 4 * count));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    (0..count as i32).for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
    (0..count as u16).for_each(|id| bytes.extend_from_slice(&(f32::from(id) + 0.5).to_le_bytes()));
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_trace_is_read_row_after_row_and_begins_again_at_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.safetensors");
    // Two ranks of five tokens of three choices, for five ranks. Three of them read the file's first rank: from its
    // begin, from a third of its tokens on, and from two thirds on.
    trace(&path, [2, 5, 3]);
    let starts = [0, 0, 1, 1, 3];
    for max_tokens in [1, 2, 5, 7] {
        let shape = RoutingShape { ranks: 5, experts: 30, top_k: 3, max_tokens, none: 0.0, duplicate: 0.0, seed: SEED };
        let router = router(&format!("file:{}", path.display()), shape);
        for (rank, start) in starts.into_iter().enumerate() {
            // A rank's rows of all iterations, one after the other.
            let file_rank = 5 * (rank % 2);
            let mut rows = (file_rank..file_rank + 5).cycle().skip(start);
            for iteration in 0..13 {
                let here: Vec<usize> = rows.by_ref().take(max_tokens).collect();
                // A ragged iteration has fewer tokens; the next begins at its place all the same.
                let tokens = max_tokens - iteration % 2;
                let ids = here[..tokens].iter().flat_map(|row| 3 * row..3 * row + 3);
                let wanted = Routed {
                    topk_idx: ids.clone().map(|id| id as i64).collect(),
                    topk_weight: ids.map(|id| id as f32 + 0.5).collect(),
                };
                assert_eq!(router.draw(iteration as u64, rank, tokens), wanted, "{iteration} of rank {rank}");
            }
        }
    }
}
