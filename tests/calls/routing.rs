//! Routing as it comes: choices with strides, ranks instead of experts, experts with replicas.

use crate::rig;

use rig::*;
use tokenyard::*;

/// Experts of each rank that the dispatch's rows came for, from counts.
fn counts(rig: &Rig, experts: usize) -> Vec<u32> {
    let mut seen = vec![0u8; experts * 4];
    rig.expert_count.read(0, &mut seen).unwrap();
    seen.as_chunks::<4>().0.iter().map(|count| u32::from_ne_bytes(*count)).collect()
}

fn run(rig: &Rig, tokens: &Tokens) -> Result<()> {
    rig.round_of(tokens, rig.capacity)
}

fn refusal(rig: &Rig, tokens: &Tokens) -> String {
    let refused = rig.ep.dispatch(&rig.stream, tokens, &rig.output(rig.capacity));
    refused.unwrap_err().to_string()
}

#[test]
fn choices_are_read_where_their_strides_say() {
    on_ranks(2, |world| {
        let device = test_device(&world);
        let rig = Rig::on(&world, device.clone(), |builder| builder);
        // Choice by choice, with gaps: int64 of 3 tokens at 24 k + 8 t, and weights at 40 k + 12 t, of which those
        // between are not read.
        let (idx, weight) = (device.alloc(48).unwrap(), device.alloc(68).unwrap());
        let choices = [[0i64, 5], [7, -1], [3, 4]];
        let mut weights = vec![0xffu8; 68];
        for (token, chosen) in choices.iter().enumerate() {
            for (k, expert) in chosen.iter().enumerate() {
                idx.write(24 * k + 8 * token, &expert.to_ne_bytes()).unwrap();
                weights[40 * k + 12 * token..][..4].copy_from_slice(&[0.25f32, 0.75][k].to_ne_bytes());
            }
        }
        weight.write(0, &weights).unwrap();
        rig.route(&[[0; 2]; 3], 5);
        let tokens = rig
            .tokens(3)
            .topk_idx(idx.view())
            .index_type(IndexType::I64)
            .topk_idx_strides(Strides { token_bytes: 8, choice_bytes: 24 })
            .topk_weight(weight.view())
            .topk_weight_strides(Strides { token_bytes: 12, choice_bytes: 40 });
        run(&rig, &tokens).unwrap();
        assert_eq!(rig.sum(0), rig.scaled_row(0, 5, 1.0));
        assert_eq!(rig.sum(1), rig.scaled_row(1, 5, 0.25));
        assert_eq!(rig.sum(2), rig.scaled_row(2, 5, 1.0));
        // The last element ends the view, to the byte.
        let short = tokens.clone().topk_weight(weight.slice(0, 67).unwrap());
        assert!(refusal(&rig, &short).contains("68 bytes are needed"));
        let short = tokens.clone().topk_idx(idx.slice(0, 47).unwrap());
        assert!(refusal(&rig, &short).contains("48 bytes are needed"));
        for (strides, named) in [((4, 24), "4 bytes"), ((8, 20), "20 bytes"), ((1 << 32, 24), "4294967296 bytes")] {
            let strides = Strides { token_bytes: strides.0, choice_bytes: strides.1 };
            let text = refusal(&rig, &tokens.clone().topk_idx_strides(strides));
            assert!(
                text.contains("topk_idx_strides") && text.contains(named) && text.contains("multiples of 8"),
                "{text}"
            );
        }
        let beyond = Strides { token_bytes: 2, choice_bytes: 4 };
        assert!(refusal(&rig, &tokens.clone().topk_weight_strides(beyond)).contains("multiples of 4"));
        // All tokens share their choices, and the rank its memory with nobody: 0 is a stride, too.
        let shared = tokens.topk_idx_strides(Strides { token_bytes: 0, choice_bytes: 24 });
        run(&rig, &shared).unwrap();
        (0..3).for_each(|token| assert_eq!(rig.sum(token), rig.scaled_row(token, 5, 1.0)));
    });
}

#[test]
fn a_call_may_have_fewer_choices_than_its_context() {
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |builder| builder.top_k(4));
        // The same words as one column and as two.
        rig.route(&[[6, 1], [1, -1], [0; 2], [0; 2]], 3);
        let (first, tokens) = (rig.tokens(4).top_k(1), rig.tokens(2).top_k(2));
        run(&rig, &first).unwrap();
        for (token, factor) in [0.5, 0.5, 0.5, 0.0].into_iter().enumerate() {
            assert_eq!(rig.sum(token), rig.scaled_row(token, 3, factor));
        }
        run(&rig, &tokens).unwrap();
        assert_eq!((rig.sum(0), rig.sum(1)), (rig.scaled_row(0, 3, 1.0), rig.scaled_row(1, 3, 0.5)));
        for (given, advice) in [(0, "1 to 4 choices"), (5, "1 to 4 choices")] {
            let text = refusal(&rig, &rig.tokens(1).top_k(given));
            assert!(text.contains(&format!("top_k is {given}")) && text.contains(advice), "{text}");
        }
        let text = refusal(&rig, &rig.tokens(1).index_type(IndexType::Ranks).top_k(2));
        assert!(text.contains("leave it out"), "{text}");
    });
}

/// Rank r of three holds experts 3 r to 3 r + 2.
fn check_by_rank(world: &World, change: impl Fn(AllToAllBuilder) -> AllToAllBuilder) {
    let device = test_device(world);
    let rig = &Rig::on(world, device.clone(), |builder| change(builder.experts(9).top_k(4)));
    let (there, weight) = (device.alloc(12).unwrap(), device.alloc(48).unwrap());
    // Any byte but 0 is yes.
    let wanted = [[1u8, 0, 255], [0, 0, 0], [0, 2, 0], [0, 0, 1]];
    there.write(0, &wanted.concat()).unwrap();
    weight.write(0, &[0.5f32, 0.25, 0.125].map(f32::to_ne_bytes).concat().repeat(4)).unwrap();
    rig.route(&[[0; 2]; 4], 3);
    let tokens = rig.tokens(4).topk_idx(there.view()).index_type(IndexType::Ranks).topk_weight(weight.view());
    let output = Output::new(Layout::Contiguous { align: 1, capacity: 12 }, rig.rows.view(), rig.expert_count.view())
        .pitch_bytes(HIDDEN * 2);
    let handle = rig.ep.dispatch(&rig.stream, &tokens, &output).unwrap();
    rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
    rig.stream.synchronize(PATIENCE).unwrap();
    rig.ep.check().unwrap();
    // Every source sends the same; all of it goes to the rank's first expert.
    let here = wanted.iter().filter(|token| token[rig.rank] != 0).count() as u32;
    assert_eq!(counts(rig, 3), [3 * here, 0, 0], "rank {}", rig.rank);
    for (token, factor) in [0.625, 0.0, 0.25, 0.125].into_iter().enumerate() {
        assert_eq!(values(&rig.sum(token)), scaled(&rig.row(token, 3), factor), "rank {} token {token}", rig.rank);
    }
}

#[test]
fn tokens_may_name_ranks() {
    on_ranks(3, |world| check_by_rank(&world, |builder| builder));
    nodes::on_nodes(&[1, 2], |world, network| {
        let proxy = nodes::proxy(network, &world, 3000);
        check_by_rank(&world, |builder| builder.proxy(&proxy));
    });
}

#[test]
fn contexts_in_which_tokens_cannot_name_ranks_say_why() {
    on_ranks(3, |world| {
        let rig = Rig::new(&world);
        let named = rig.tokens(4).index_type(IndexType::Ranks);
        let text = refusal(&rig, &named);
        assert!(text.contains("3 ranks are more than the top_k 2"), "{text}");
        let placed = Placement::table(vec![0, 0, 2], 3).unwrap();
        let rig = Rig::with(&world, |builder| builder.experts(3).top_k(3).placement(placed.clone()));
        let text = refusal(&rig, &named);
        assert!(text.contains("rank 1 holds no expert"), "{text}");
    });
}

/// Four experts with two replicas each, and one with a third: ranks 0, 1 and 2 hold 3 of these nine each.
fn replicated() -> Placement {
    Placement::even(9, 3).unwrap().replicas(vec![0, 1, 2, 3, 0, 1, 2, 3, 0]).unwrap()
}

/// The replica that a token of a rank takes in one node, by the rule as it is documented.
fn replica(rank: usize, token: usize, logical: usize) -> usize {
    let all: Vec<usize> =
        [0, 1, 2, 3, 0, 1, 2, 3, 0].iter().enumerate().filter(|e| *e.1 == logical).map(|e| e.0).collect();
    let own: Vec<usize> = all.iter().copied().filter(|expert| expert / 3 == rank).collect();
    let candidates = if own.is_empty() { all } else { own };
    // 16 slots for each of three replicas, rounded up to 64.
    let slot = (token as u32).wrapping_mul(2_654_435_769) >> 26;
    candidates[(rank + slot as usize) % candidates.len()]
}

#[test]
fn a_choice_goes_to_one_replica_of_the_nearest() {
    on_ranks(3, |world| {
        let rig = Rig::with(&world, |builder| builder.experts(9).placement(replicated()));
        let choices = |rank: usize| [[0, 1], [2, 3], [rank as i32, 3], [0, 3]];
        rig.route(&choices(rig.rank), 1);
        rig.round(4, rig.capacity).unwrap();
        rig.expect_own_rows(4, 1);
        let mut wanted = [0u32; 9];
        for rank in 0..3 {
            for (token, chosen) in choices(rank).iter().enumerate() {
                chosen.iter().for_each(|logical| wanted[replica(rank, token, *logical as usize)] += 1);
            }
        }
        assert_eq!(counts(&rig, 3), wanted[3 * rig.rank..][..3], "rank {}", rig.rank);
        // An expert that is named twice is one expert, whichever replica it takes.
        rig.route(&[[1, 1]], 2);
        let refused = rig.round(1, rig.capacity).unwrap_err().to_string();
        assert!(refused.contains("names expert 1 a second time"), "{refused}");
        // Numbers of replicas are not numbers of experts.
        rig.route(&[[4, 0]], 2);
        let refused = rig.round(1, rig.capacity).unwrap_err().to_string();
        assert!(refused.contains("names expert 4, which does not exist"), "{refused}");
        // The next correct call works.
        rig.route(&choices(rig.rank), 4);
        rig.round(4, rig.capacity).unwrap();
        rig.expect_own_rows(4, 4);
    });
}

#[test]
fn the_callers_table_of_replicas_is_taken() {
    on_ranks(3, |world| {
        // Rank r takes the last replica of each expert, with one slot; the others of ranks 1 and 2 with two slots.
        let table = [vec![8u32, 5, 6, 7], vec![0, 8, 1, 1, 2, 2, 3, 3], vec![0, 1, 2, 3]][world.rank().index()].clone();
        let rig = Rig::with(&world, |builder| {
            builder.experts(9).placement(replicated()).tuning(|tuning| tuning.replica_table = Some(table.clone()))
        });
        rig.route(&[[0, 1], [2, 3], [0, 3], [1, 2]], 1);
        rig.round(4, rig.capacity).unwrap();
        rig.expect_own_rows(4, 1);
        let slot = |token: u32| token.wrapping_mul(2_654_435_769) >> 31;
        let second = (slot(0) + slot(2)) as usize;
        let mut wanted = [0u32; 9];
        for (expert, rows) in [(8, 2 + second), (5, 2), (6, 2), (7, 2), (0, 2 + 2 - second), (1, 4), (2, 4), (3, 4)] {
            wanted[expert] += rows as u32;
        }
        assert_eq!(counts(&rig, 3), wanted[3 * rig.rank..][..3], "rank {}", rig.rank);
    });
}

#[test]
fn unusable_replicas_are_refused_with_both_values() {
    let even = || Placement::even(4, 2).unwrap();
    let refused = |logical: Vec<u32>| even().replicas(logical).unwrap_err().to_string();
    let text = refused(vec![0, 1, 0]);
    assert!(text.contains("3 entries") && text.contains("each of the 4 experts"), "{text}");
    let text = refused(vec![0, 2, 0, 2]);
    assert!(text.contains("without one of logical expert 1"), "{text}");
    let text = refused(vec![0, u32::MAX, 1, 2]);
    assert!(text.contains("logical expert 3"), "{text}");
    let placed = even().replicas(vec![0, 1, 1, 0]).unwrap();
    assert_eq!((placed.experts(), placed.logical_experts(), placed.logical_of(2)), (4, 2, Some(1)));
    assert_eq!((placed.logical_of(4), even().logical_of(3), even().logical_of(4)), (None, Some(3), None));
    assert_eq!(placed.logical_rows(&[1, 10, 100, 1000]), [1001, 110]);
    assert_eq!(even().logical_rows(&[1, 10]), [1, 10, 0, 0]);
    on_ranks(2, |world| {
        let device = test_device(&world);
        let plan = |table: Vec<u32>| {
            let builder = builder(&world, &device).experts(4).placement(placed.clone()).top_k(2);
            builder.tuning(|tuning| tuning.replica_table = Some(table)).plan()
        };
        let refused = |table: Vec<u32>| plan(table).unwrap_err().to_string();
        for entries in [0, 1, 3, 6, 2 * 8192] {
            let text = refused(vec![0; entries]);
            assert!(text.contains(&format!("{entries} entries")) && text.contains("power of two"), "{text}");
        }
        let text = refused(vec![0, 0, 3, 1]);
        assert!(text.contains("expert 3") && text.contains("entry 2 must be a replica of logical expert 1"), "{text}");
        assert!(refused(vec![0, 4, 1, 1]).contains("expert 4"));
        assert!(plan(vec![3, 0, 2, 2]).is_ok());
        let many = builder(&world, &device).experts(4).placement(placed.clone()).top_k(3).plan();
        assert!(many.unwrap_err().to_string().contains("use 1 to 2"));
    });
}

#[test]
fn ranks_that_disagree_about_replicas_learn_so() {
    on_ranks(2, |world| {
        let device = test_device(&world);
        let logical = if world.rank().index() == 0 { vec![0, 1, 0, 1] } else { vec![0, 1, 1, 0] };
        let placed = Placement::even(4, 2).unwrap().replicas(logical).unwrap();
        let refused = builder(&world, &device).experts(4).placement(placed).build().err().unwrap().to_string();
        assert!(refused.contains("placement"), "{refused}");
    });
}
