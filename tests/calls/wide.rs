//! A node of more ranks than a warp has lanes, on the CPU device or, with `TOKENYARD_TEST_DEVICE=cuda`, on GPUs that
//! share them: two at least, since each rank needs a queue of its own.
//!
//! Shifts by more than a word's bits are undefined, and on x86 may even give the intended result: tests/all.sh runs
//! such worlds under UndefinedBehaviorSanitizer, too.

use crate::rig;

use rig::{MAX_TOKENS, Rig, TOP_K, on_ranks};

const RANKS: usize = 40;

#[test]
fn rows_reach_all_ranks_of_a_wide_node() {
    on_ranks(RANKS, |world| {
        let rig = Rig::with(&world, |builder| builder.experts(RANKS));
        for salt in 0..3 {
            // One expert a rank; of a token's two, one is among the first 32 and the other is not.
            let choices: [[i32; TOP_K]; MAX_TOKENS] = std::array::from_fn(|token| {
                let first = (rig.rank * 7 + token * 5 + salt) % 32;
                [first as i32, (32 + (first + token) % (RANKS - 32)) as i32]
            });
            rig.route(&choices, salt);
            rig.round(MAX_TOKENS, rig.capacity).unwrap();
            rig.expect_own_rows(MAX_TOKENS, salt);
        }
        world.barrier("done").unwrap();
    });
}
