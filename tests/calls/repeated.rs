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
        // 6 planes of 1366 rows of a word.
        let full = |experts| move |builder: AllToAllBuilder| allowed(builder.experts(experts).top_k(32));
        let refused = plan(&full(1365)).unwrap_err().to_string();
        assert!(refused.contains("1365 experts on a rank") && refused.contains("at most 1364"), "{refused}");
        assert!(plan(&full(1364)).is_ok());
    });
}
