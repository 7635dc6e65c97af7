//! Tokens that name an expert several times, where a context allows it.

use crate::rig;

use rig::*;
use tokenyard::*;

fn allowed(builder: AllToAllBuilder) -> AllToAllBuilder {
    builder.tuning(|tuning| tuning.duplicates = true)
}

/// Rows of each expert of a rank, counted from all ranks' choices.
fn rows_of(ep: &AllToAll, rank: usize, choices: &[Vec<[i32; TOP_K]>]) -> Vec<u32> {
    let own = (0..EXPERTS).filter(|expert| ep.placement().rank_of(*expert) == Some(rank as u32));
    own.map(|expert| choices.iter().flatten().flatten().filter(|choice| **choice == expert as i32).count() as u32)
        .collect()
}

/// Three rounds of a rank of three.
fn check(rig: &Rig) {
    // By rank.
    let choices =
        [vec![[1, 1], [1, 5], [7, 7], [-1, 2]], vec![[3, 3], [3, 3], [0, 3]], vec![[7, 7], [7, 7], [7, 6], [6, 6]]];
    rig.weight.write(0, &[0.5f32, 1.5].map(f32::to_ne_bytes).concat().repeat(MAX_TOKENS)).unwrap();
    for salt in 0..3 {
        rig.route(&choices[rig.rank], salt);
        rig.round(choices[rig.rank].len(), rig.capacity).unwrap();
        let mut seen = [0u8; EXPERTS * 4];
        rig.expert_count.read(0, &mut seen).unwrap();
        let rows = rows_of(&rig.ep, rig.rank, &choices);
        let seen: Vec<u32> = seen.as_chunks::<4>().0.iter().map(|count| u32::from_ne_bytes(*count)).collect();
        assert_eq!(&seen[..rows.len()], rows, "rank {}", rig.rank);
        for (token, choice) in choices[rig.rank].iter().enumerate() {
            let factor = if choice[0] < 0 { 1.5 } else { 2.0 };
            let wanted = scaled(&rig.row(token, salt), factor);
            assert_eq!(values(&rig.sum(token)), wanted, "rank {} token {token}", rig.rank);
        }
    }
}

#[test]
fn each_time_has_a_row_and_a_weight_of_its_own() {
    on_ranks(3, |world| check(&Rig::with(&world, allowed)));
    nodes::on_nodes(&[1, 2], |world, network| {
        let proxy = nodes::proxy(network, &world, 3000);
        check(&Rig::with(&world, |builder| allowed(builder.proxy(&proxy))));
    });
}

/// A token of each rank names one expert with all its `all` choices, the next with one less.
fn check_all(rig: &Rig, all: usize) {
    let device = rig.ep.device();
    let named = |rank: usize, token: usize| (rank * 7 + token * 5) % all;
    let choices: Vec<i32> = (0..MAX_TOKENS)
        .flat_map(|token| (0..all).map(move |k| if k < token { -1 } else { named(rig.rank, token) as i32 }))
        .collect();
    let capacity = 3 * MAX_TOKENS * all;
    let alloc = |bytes: usize| device.alloc(bytes).unwrap();
    let [idx, weights] = [4 * choices.len(); 2].map(alloc);
    let (rows, count) = (alloc(capacity * HIDDEN * 2), alloc(4 * all));
    idx.write(0, &choices.iter().flat_map(|choice| choice.to_ne_bytes()).collect::<Vec<_>>()).unwrap();
    weights.write(0, &(1.0f32 / 16.0).to_ne_bytes().repeat(choices.len())).unwrap();
    rig.route(&[[0; TOP_K]; MAX_TOKENS], 3);
    let tokens = rig.tokens(MAX_TOKENS).topk_idx(idx.view()).topk_weight(weights.view());
    let output = Output::new(Layout::Contiguous { align: 1, capacity }, rows.view(), count.view());
    let handle = rig.ep.dispatch(&rig.stream, &tokens, &output).unwrap();
    rig.ep.combine(&rig.stream, &handle, &Rows::new(rows.view()), &rig.combined()).unwrap();
    rig.stream.synchronize(PATIENCE).unwrap();
    rig.ep.check().unwrap();
    let own: Vec<usize> =
        (0..all).filter(|expert| rig.ep.placement().rank_of(*expert) == Some(rig.rank as u32)).collect();
    let mut wanted = vec![0; own.len()];
    for (rank, token) in (0..3).flat_map(|rank| (0..MAX_TOKENS).map(move |token| (rank, token))) {
        if let Some(place) = own.iter().position(|expert| *expert == named(rank, token)) {
            wanted[place] += (all - token) as u32;
        }
    }
    let mut seen = vec![0u8; 4 * own.len()];
    count.read(0, &mut seen).unwrap();
    let seen: Vec<u32> = seen.as_chunks::<4>().0.iter().map(|count| u32::from_ne_bytes(*count)).collect();
    assert_eq!(seen, wanted, "rank {}", rig.rank);
    for token in 0..MAX_TOKENS {
        let factor = (all - token) as f32 / 16.0;
        assert_eq!(values(&rig.sum(token)), scaled(&rig.row(token, 3), factor), "rank {} token {token}", rig.rank);
    }
}

#[test]
fn a_token_may_name_one_expert_with_all_its_choices() {
    // The most of 4 bits, the fewest of 8, and the most of any context.
    for all in [15, 16, 32] {
        let wide = |builder: AllToAllBuilder| allowed(builder.experts(all).top_k(all));
        on_ranks(3, |world| check_all(&Rig::with(&world, wide), all));
        nodes::on_nodes(&[1, 2], |world, network| {
            let proxy = nodes::proxy(network, &world, 3000);
            check_all(&Rig::with(&world, |builder| wide(builder.proxy(&proxy))), all);
        });
    }
}

#[test]
fn what_limits_contexts_that_allow_it_is_named() {
    on_ranks(1, |world| {
        let device = test_device(&world);
        let plan = |change: &dyn Fn(AllToAllBuilder) -> AllToAllBuilder| change(builder(&world, &device)).plan();
        let few = |builder: AllToAllBuilder| builder.experts(2).top_k(4);
        let refused = plan(&few).unwrap_err().to_string();
        assert!(refused.contains("top_k is 4") && refused.contains("use 1 to 2"), "{refused}");
        assert!(plan(&|builder| allowed(few(builder))).is_ok());
        let many = |builder: AllToAllBuilder| allowed(builder.max_tokens_per_rank((1 << 19) + 1));
        let refused = plan(&many).unwrap_err().to_string();
        assert!(refused.contains("max_tokens_per_rank is 524289") && refused.contains("use 1 to 524288"), "{refused}");
        // 1365 rows of 6 words, and 819 of 10.
        for (top_k, most) in [(15, 1364), (16, 818)] {
            let full = |experts| move |builder: AllToAllBuilder| allowed(builder.experts(experts).top_k(top_k));
            let refused = plan(&full(most + 1)).unwrap_err().to_string();
            let (found, advice) = (format!("{} experts on a rank", most + 1), format!("at most {most}"));
            assert!(refused.contains(&found) && refused.contains(&advice), "{refused}");
            assert!(plan(&full(most)).is_ok());
        }
    });
}
