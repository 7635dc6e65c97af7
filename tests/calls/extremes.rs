//! Values at the ends of what a word, a mask or a warp holds: ranks past a word, every pair of equal choices, weights
//! of any bits, and the ranks that rows are said to come from after a regroup.

use crate::rig;

use rig::*;
use tokenyard::*;

/// Bytes of a row.
const ROW: usize = 2 * HIDDEN;

/// Errors of the calls so far, until there are no more.
fn errors(rig: &Rig) -> Vec<Error> {
    std::iter::from_fn(|| rig.check().err()).take(8).collect()
}

fn words(buffer: &DeviceBuffer, count: usize) -> Vec<i32> {
    let mut bytes = vec![0; 4 * count];
    buffer.read(0, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|word| i32::from_ne_bytes(*word)).collect()
}

fn upload<const N: usize>(rig: &Rig, words: impl IntoIterator<Item = [u8; N]>) -> DeviceBuffer {
    let bytes: Vec<u8> = words.into_iter().flatten().collect();
    let buffer = rig.ep.device().alloc(bytes.len()).unwrap();
    buffer.write(0, &bytes).unwrap();
    buffer
}

#[test]
fn an_output_that_overflows_is_named_whichever_rank_of_a_wide_node_has_it() {
    const RANKS: usize = 40;
    on_ranks(RANKS, |world| {
        let rig = Rig::with(&world, |builder| builder.experts(RANKS));
        for (salt, full) in [0, 31, 32, 39].into_iter().enumerate() {
            // All ranks but one send it a row.
            let choices: [[i32; TOP_K]; MAX_TOKENS] = std::array::from_fn(|token| {
                let first = if token == 1 && rig.rank != 5 { full } else { 1 + (rig.rank + token) % 30 };
                [first as i32, 33 + (rig.rank + token) as i32 % 6]
            });
            rig.route(&choices, salt);
            let result = rig.enqueue(&rig.tokens(MAX_TOKENS), if rig.rank == full { 38 } else { rig.capacity });
            rig.stream.synchronize(PATIENCE).unwrap();
            drop(result.unwrap());
            let seen = errors(&rig);
            let incomplete = |e: &Error| matches!(e, Error::Incomplete { peer, .. } if peer.index() == full);
            let capacity = |e: &Error| matches!(e, Error::Capacity { needed: 39, given: 38, .. });
            assert_eq!(seen.iter().filter(|e| incomplete(e)).count(), usize::from(rig.rank != 5), "{full} {seen:?}");
            assert_eq!(seen.iter().filter(|e| capacity(e)).count(), usize::from(rig.rank == full), "{full} {seen:?}");
            assert_eq!(seen.len(), usize::from(rig.rank != 5) + usize::from(rig.rank == full), "{full} {seen:?}");
            // Tokens that the rank has no part in are whole.
            for token in (0..MAX_TOKENS).filter(|token| *token != 1 || rig.rank == 5) {
                assert_eq!(rig.sum(token), rig.row(token, salt), "token {token} of rank {}", rig.rank);
            }
        }
        world.barrier("done").unwrap();
    });
}

/// More choices than a lane takes at once.
const CHOICES: usize = 12;

/// A context of `CHOICES` choices for each token, over three ranks of eight experts.
fn many_choices(builder: AllToAllBuilder) -> AllToAllBuilder {
    builder.experts(24).top_k(CHOICES)
}

/// Each pair of a token's choices is one expert once, on one rank after the other.
fn refuses_every_pair(rig: &Rig) {
    let weights = upload(rig, (0..CHOICES).map(|_| 0.5f32.to_ne_bytes()));
    let pairs: Vec<(usize, usize)> = (1..CHOICES).flat_map(|j| (0..j).map(move |i| (i, j))).collect();
    for (number, &(i, j)) in pairs.iter().enumerate() {
        let mut choices: [i32; CHOICES] = std::array::from_fn(|k| ((2 * k + rig.rank + number) % 24) as i32);
        let culprit = number % 3;
        if rig.rank == culprit {
            choices[j] = choices[i];
        }
        let idx = upload(rig, choices.map(i32::to_ne_bytes));
        let tokens = Tokens::new(rig.x.view(), idx.view(), TokenCount::Host(1)).topk_weight(weights.view());
        let handle = rig.enqueue(&tokens, rig.capacity).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let (seen, refused) = (errors(rig), rig.ep.refused_sources());
        if rig.rank == culprit {
            let [Error::Routing { problem, .. }] = &seen[..] else { panic!("{i} {j}: {seen:?}") };
            assert!(problem.contains(&format!("expert {}", choices[i])), "{i} {j}: {problem}");
        } else {
            assert!(seen.is_empty(), "{i} {j}: {seen:?}");
            let newest = refused.iter().max_by_key(|(_, epoch)| *epoch).unwrap();
            assert_eq!(*newest, (Rank(culprit as u32), 1 + number as u64), "{i} {j}: {refused:?}");
        }
        drop(handle);
    }
}

#[test]
fn an_expert_chosen_twice_is_refused_wherever_both_choices_stand() {
    on_ranks(3, |world| {
        refuses_every_pair(&Rig::with(&world, many_choices));
        world.barrier("done").unwrap();
    });
}

#[test]
fn an_expert_chosen_twice_is_refused_over_nodes_wherever_both_choices_stand() {
    nodes::on_nodes(&[1, 2], |world, network| {
        let proxy = nodes::proxy(network, &world, 10_000);
        refuses_every_pair(&Rig::with(&world, |builder| many_choices(builder).proxy(&proxy)));
        world.barrier("done").unwrap();
    });
}

/// Bits of weights that arithmetic would change, or that look like no weight.
const BITS: [u32; MAX_TOKENS * TOP_K] =
    [0, 0x8000_0000, 1, 0x7f80_0000, 0xff80_0001, 0x7fc0_1234, 0xffff_fffe, 0xffff_ffff];

/// The weight of a choice; other ones on each rank and in each round.
fn weight(rank: usize, choice: usize, round: usize) -> u32 {
    BITS[(choice + 3 * rank + round) % BITS.len()]
}

/// Weights arrive as they are, but for all ones, which become another NaN.
fn weights_arrive(rig: &Rig, ranks: usize) {
    let (capacity, device) = (ranks * MAX_TOKENS, rig.ep.device());
    let alloc = |bytes: usize| device.alloc(bytes).unwrap();
    let [source, experts, weights] = [8, 4 * TOP_K, 4 * TOP_K].map(|bytes| alloc(capacity * bytes));
    let count = alloc(4);
    for round in 0..BITS.len() {
        rig.route_all(round);
        let own = (0..BITS.len()).map(|choice| weight(rig.rank, choice, round).to_ne_bytes());
        let own = upload(rig, own);
        let tokens = rig.tokens(MAX_TOKENS).topk_weight(own.view());
        let output = Output::new(Layout::Token { capacity }, rig.rows.view(), rig.expert_count.view())
            .source(source.view())
            .token_experts(experts.view())
            .token_weights(weights.view())
            .row_count(count.view());
        let handle = rig.ep.dispatch(&rig.stream, &tokens, &output).unwrap();
        rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        let rows = words(&count, 1)[0] as usize;
        assert!(rows > 0, "rank {} has rows", rig.rank);
        let (source, experts, weights) =
            (words(&source, 2 * rows), words(&experts, TOP_K * rows), words(&weights, TOP_K * rows));
        for (place, expert) in experts.iter().enumerate() {
            let (row, k) = (place / TOP_K, place % TOP_K);
            let (rank, token) = (source[2 * row] as usize, source[2 * row + 1] as usize);
            let sent = weight(rank, token * TOP_K + k, round);
            let wanted = if *expert < 0 { 0 } else { sent.min(0xffff_fffe) };
            assert_eq!(weights[place] as u32, wanted, "choice {k} of token {token} of rank {rank}, round {round}");
        }
    }
}

#[test]
fn weights_of_any_bits_arrive() {
    on_ranks(3, |world| {
        weights_arrive(&Rig::new(&world), 3);
        world.barrier("done").unwrap();
    });
}

#[test]
fn weights_of_any_bits_cross_nodes() {
    nodes::on_nodes(&[2, 1], |world, network| {
        let proxy = nodes::proxy(network, &world, 10_000);
        weights_arrive(&nodes::rig(&world, &proxy), 3);
        world.barrier("done").unwrap();
    });
}

#[test]
fn rows_are_said_to_come_from_ranks_of_the_first_generation() {
    let members = [0, 2, 3].map(Rank);
    on_ranks(4, |world| {
        if !members.contains(&world.rank()) {
            return;
        }
        let world = world.regroup(1, &members).unwrap();
        let (rig, own) = (Rig::new(&world), world.original(world.rank()).index());
        let alloc = |words: usize| rig.ep.device().alloc(4 * words).unwrap();
        let (source, offsets) = (alloc(2 * rig.capacity), alloc(EXPERTS + 1));
        let local = rig.ep.placement().local_experts(own).len();
        let mut seen = std::collections::BTreeSet::new();
        for salt in 0..EXPERTS {
            rig.route_all(salt);
            let output = rig.output(rig.capacity).source(source.view()).expert_offset(offsets.view());
            let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &output).unwrap();
            rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap();
            let rows = words(&offsets, local + 1)[local] as usize;
            let mut bytes = vec![0; ROW * rows];
            rig.rows.read(0, &mut bytes).unwrap();
            for (row, pair) in words(&source, 2 * rows).as_chunks::<2>().0.iter().enumerate() {
                let [name, token] = pair.map(|index| index as usize);
                let rank = members.iter().position(|member| member.index() == name);
                let rank = rank.unwrap_or_else(|| panic!("row {row} is said to come from rank {name}"));
                assert_eq!(bytes[ROW * row..][..ROW], Rig::row_of(rank, token, salt), "row {row} of {pair:?}");
                seen.insert(name);
            }
        }
        assert_eq!(seen.len(), members.len(), "{seen:?}");
        world.barrier("done").unwrap();
    });
}
