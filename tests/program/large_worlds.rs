//! Configurations past the words, masks and warps that `verify` draws from: many nodes, ranks, experts and choices.

use super::rig;

/// Verifies a replayed configuration on one thread.
fn verify(case: &str) {
    let words = format!("verify --timeout-ms 30000 --replay hidden=16,sms=2,world_mode=one-thread,{case}");
    let output = rig::run(&words);
    assert!(output.status.success(), "{words}: {}{}", rig::text(&output.stdout), rig::text(&output.stderr));
    assert!(rig::text(&output.stdout).contains("right: "), "{words}: {}", rig::text(&output.stdout));
}

/// `sizes`, again and again, as nodes.
fn nodes(sizes: &[usize], times: usize) -> String {
    let all: Vec<String> = sizes.repeat(times).iter().map(ToString::to_string).collect();
    format!("world={},nodes={}", sizes.iter().sum::<usize>() * times, all.join("+"))
}

#[test]
fn rows_cross_as_many_nodes_as_there_may_be() {
    verify(&format!("{},experts=64,top_k=3,tokens=2,max_tokens=2,iters=2", nodes(&[1], 64)));
    // Nodes on both sides of a word, with and without ranks to forward to.
    let cases = format!("{},experts=100,top_k=5,tokens=3,max_tokens=3,ragged=yes,iters=2", nodes(&[1, 1, 2], 12));
    verify(&cases);
    verify(&format!("{cases},weights=combine,layout=masked,chunk_rows=1"));
}

#[test]
fn faults_are_the_same_among_many_nodes() {
    for seed in 1..=4 {
        let shape = "experts=40,top_k=12,tokens=3,max_tokens=3,iters=2";
        verify(&format!("{},{shape},fault=routing,seed={seed}", nodes(&[1], 12)));
        verify(&format!("{},{shape},fault=overflow,seed={seed}", nodes(&[1, 2], 4)));
    }
}

#[test]
fn a_rank_has_more_experts_than_a_block_has_threads() {
    for layout in ["contiguous", "masked", "token"] {
        let shape = format!("experts=1300,top_k=9,tokens=40,max_tokens=40,meta_tile=32,layout={layout},iters=3");
        verify(&format!("world=2,{shape}"));
        verify(&format!("world=3,nodes=1+2,placement=table,{shape}"));
    }
}

#[test]
fn rows_of_as_many_choices_as_a_warp_has_lanes_arrive() {
    for layout in ["contiguous", "token"] {
        let shape = format!("experts=64,top_k=32,tokens=20,max_tokens=20,layout={layout},iters=2");
        verify(&format!("world=5,{shape}"));
        verify(&format!("world=4,nodes=1+3,{shape},fault=routing"));
    }
}
