//! The side payload of combine: words beside the experts' rows come to the tokens' sources, summed or gathered with
//! their bits, whatever partial rows are made of; and what cannot be asked for is refused.

use crate::rig;

use rig::{EXPERTS, MAX_TOKENS, PATIENCE, Rig, TOP_K, builder, nodes, on_ranks, test_device};
use std::time::Duration;
use tokenyard::*;

const MOST: usize = 100;

/// Bits beside a row: of a number, zeros of either sign among them, or any, those of zeros and NaNs among them.
fn word(expert: usize, source: usize, token: usize, j: usize, gathered: bool) -> u32 {
    let mixed = (expert * 7919 + source * 104_729 + token * 1_299_709 + j * 15_485_863) as u32;
    match (gathered, (expert + token + j) % 4) {
        (true, 0) => 0x8000_0000,
        (true, 1) => 0x7fc0_0001 + mixed % 100,
        (true, 2) => 0,
        (true, _) => mixed.wrapping_mul(2_654_435_769),
        (false, 0) => (mixed % 2) << 31,
        (false, _) => ((mixed % 1000) as f32 / 8.0 - 60.0).to_bits(),
    }
}

fn words_of(buffer: &DeviceBuffer) -> Vec<u32> {
    let mut bytes = vec![0; buffer.len()];
    buffer.read(0, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word)).collect()
}

/// Choices of a rank's token: one of them none, or both at one rank, for some.
fn choices(rank: usize, token: usize, salt: usize) -> [i32; TOP_K] {
    let first = (rank * 3 + token + salt) % EXPERTS;
    match (token + salt) % 4 {
        0 => [first as i32, -1],
        1 => [first as i32, (first ^ 1) as i32],
        _ => [first as i32, ((first + 3) % EXPERTS) as i32],
    }
}

/// Combines of one dispatch, with payloads of several sizes and without, fused and in halves.
fn bring(world: &World, rig: &Rig) {
    let alloc = |words: usize| rig.ep.device().alloc(4 * words).unwrap();
    let (experts, source) = (alloc(rig.capacity), alloc(2 * rig.capacity));
    let (payload, out) = (alloc(rig.capacity * MOST), alloc((MAX_TOKENS + 1) * MOST));
    let per_rank = EXPERTS / world.size();
    world.barrier("buffers").unwrap();
    for salt in 0..4 {
        let routed: Vec<[i32; TOP_K]> = (0..MAX_TOKENS).map(|token| choices(rig.rank, token, salt)).collect();
        rig.route(&routed, salt);
        let output = rig.output(rig.capacity).row_expert(experts.view()).source(source.view());
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &output).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let (local, places) = (words_of(&experts), words_of(&source));
        for (words, gathered, split) in [
            (1, true, false),
            (1, false, true),
            (0, false, false),
            (3, true, true),
            (6, false, false),
            (10, true, false),
            (20, false, true),
            // More than go while a short row is loaded.
            (100, false, false),
            (50, true, true),
        ] {
            let made: Vec<u8> = (0..rig.capacity)
                .flat_map(|row| (0..words).map(move |j| (row, j)))
                .flat_map(|(row, j)| {
                    let here = (local[row] as i32) >= 0;
                    let expert = rig.rank * per_rank + local[row] as usize % EXPERTS;
                    let (source, token) = (places[2 * row] as usize % 64, places[2 * row + 1] as usize % 64);
                    if here { word(expert, source, token, j, gathered) } else { 0x1234_5678 }.to_ne_bytes()
                })
                .collect();
            payload.write(0, &made).unwrap();
            out.fill(0xEE).unwrap();
            let view = payload.view();
            let rows = rig.expert_rows().payload((words > 0).then_some(Payload { view, words, gathered }));
            let combined = rig.combined().payload((words > 0).then(|| out.view()));
            if split {
                let sent = rig.ep.combine_send(&rig.stream, &handle, &rows).unwrap();
                rig.ep.combine_recv(&rig.stream, sent, &combined).unwrap();
            } else {
                rig.ep.combine(&rig.stream, &handle, &rows, &combined).unwrap();
            }
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap_or_else(|error| panic!("{words} {gathered}: {error}"));
            let of_choice = |token: usize, k: usize, j: usize| {
                let expert = routed[token][k];
                (expert >= 0).then(|| word(expert as usize, rig.rank, token, j, gathered))
            };
            let each = if gathered { TOP_K * words } else { words };
            let mut wanted = vec![0xEEEE_EEEE; (MAX_TOKENS + 1) * MOST];
            for token in 0..MAX_TOKENS {
                for w in 0..each {
                    wanted[token * each + w] = if gathered {
                        of_choice(token, w / words, w % words).unwrap_or(0)
                    } else {
                        // Eighths: exact in any order.
                        let terms = (0..TOP_K).filter_map(|k| of_choice(token, k, w));
                        terms.map(f32::from_bits).fold(0.0f32, |sum, term| sum + term).to_bits()
                    };
                }
            }
            assert_eq!(words_of(&out), wanted, "rank {}, {words} words, gathered: {gathered}", rig.rank);
        }
    }
}

fn with_room(builder: AllToAllBuilder) -> AllToAllBuilder {
    builder.tuning(|tuning| tuning.payload_words = MOST)
}

#[test]
fn words_come_to_their_sources_with_their_bits() {
    for ranks in [1, 2, 4] {
        for ll_tokens in [0, MAX_TOKENS] {
            for compact in [false, true] {
                on_ranks(ranks, |world| {
                    let rig = Rig::with(&world, |builder| {
                        let builder = with_room(builder);
                        builder.tuning(|t| (t.ll_tokens, t.compact_handles) = (Some(ll_tokens), Some(compact)))
                    });
                    bring(&world, &rig);
                    world.barrier("all are done").unwrap();
                });
            }
        }
    }
    on_ranks(2, |world| {
        bring(&world, &Rig::with(&world, |builder| with_room(builder).tuning(|t| t.round_tokens = Some(1))))
    });
    for (sizes, chunk_rows) in [(&[1, 1][..], 1), (&[2, 2], 3), (&[1, 2, 1], 2)] {
        nodes::on_nodes(sizes, |world, network| {
            let proxy = nodes::proxy(network, &world, 1500);
            let rig = Rig::with(&world, |builder| {
                let builder = with_room(builder).proxy(&proxy).timeout(nodes::DEADLINE).sms(3);
                builder.tuning(|t| t.chunk_rows = Some(chunk_rows))
            });
            bring(&world, &rig);
            world.barrier("all are done").unwrap();
        });
    }
}

/// Rows that never come bring no words, in this call and in later ones: of a rank whose output was too small, and of a
/// rank whose routing was refused.
#[test]
fn rows_that_are_missing_bring_no_words() {
    for ll_tokens in [0, MAX_TOKENS] {
        on_ranks(2, |world| {
            let rig = Rig::with(&world, |builder| with_room(builder).tuning(|t| t.ll_tokens = Some(ll_tokens)));
            let out = rig.ep.device().alloc(4 * MAX_TOKENS * MOST).unwrap();
            let given = rig.ep.device().alloc(4 * rig.capacity * 3).unwrap();
            given.write(0, &(8.0 + rig.rank as f32).to_ne_bytes().repeat(rig.capacity * 3)).unwrap();
            for (number, what) in
                ["all", "full", "all", "refused", "all", "full", "full", "all"].into_iter().enumerate()
            {
                // One choice at either rank, but the last token's, which are both at rank 1.
                let mut choices = [[0, 4], [5, 1], [2, 6], [7, 4]];
                let refused = what == "refused" && rig.rank == 1;
                if refused {
                    choices[2] = [EXPERTS as i32, 0];
                }
                rig.route(&choices, number);
                let capacity = if what == "full" && rig.rank == 0 { 5 } else { rig.capacity };
                let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(capacity)).unwrap();
                rig.stream.synchronize(PATIENCE).unwrap();
                let found = rig.ep.check();
                assert_eq!(found.is_err(), refused || capacity == 5, "{number}: {what}: {found:?}");
                let (words, gathered) = [(3, false), (3, true)][number % 2];
                out.fill(0xEE).unwrap();
                let rows = rig.expert_rows().payload(Payload { view: given.view(), words, gathered });
                rig.ep.combine(&rig.stream, &handle, &rows, &rig.combined().payload(out.view())).unwrap();
                rig.stream.synchronize(PATIENCE).unwrap();
                let found = rig.ep.check();
                assert_eq!(found.is_err(), what == "full", "{number}: {what}: {found:?}");
                let of_choice = |expert: i32| match (what, expert / 4) {
                    _ if refused => 0.0f32,
                    ("full", 0) => 0.0,
                    (_, rank) => 8.0 + rank as f32,
                };
                let of_token = |choices: &[i32; TOP_K]| match gathered {
                    true => choices.iter().flat_map(|expert| [of_choice(*expert); 3]).collect::<Vec<f32>>(),
                    false => vec![choices.iter().map(|expert| of_choice(*expert)).sum(); 3],
                };
                let wanted: Vec<u32> = choices.iter().flat_map(of_token).map(f32::to_bits).collect();
                assert_eq!(words_of(&out)[..wanted.len()], wanted, "rank {}, {number}: {what}", rig.rank);
            }
            world.barrier("all are done").unwrap();
        });
    }
}

#[test]
fn a_payload_without_room_or_of_other_partial_rows_is_refused() {
    let world = World::threads(1).unwrap().remove(0);
    let device = test_device(&world);
    let rig = Rig::new(&world);
    rig.route_all(1);
    let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
    let payload = Payload { view: rig.rows.view(), words: 1, gathered: false };
    let rows = rig.expert_rows().payload(payload);
    let error = rig.ep.combine(&rig.stream, &handle, &rows, &rig.combined()).unwrap_err().to_string();
    assert!(error.contains("1 words of a token") && error.contains("with payload_words"), "{error}");
    rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
    rig.stream.synchronize(PATIENCE).unwrap();
    rig.ep.check().unwrap();
    // Words beyond any number are refused as others are.
    let few = 20;
    let room =
        Rig::with(&world, |builder| builder.tuning(|tuning| tuning.payload_words = few).combine_dtype(Dtype::Bf16));
    room.route_all(1);
    let handle = room.ep.dispatch(&room.stream, &room.tokens(MAX_TOKENS), &room.output(room.capacity)).unwrap();
    for words in [few + 1, 1 << 32, 1 << 62, 1 << 63, usize::MAX] {
        for gathered in [false, true] {
            let rows = room.expert_rows().payload(Payload { view: room.rows.view(), words, gathered });
            let error = room.ep.combine(&room.stream, &handle, &rows, &room.combined()).unwrap_err();
            assert!(matches!(error, Error::Argument { name: "payload", .. }), "{error}");
        }
    }
    let rows =
        room.expert_rows().dtype(Dtype::Fp32).payload(Payload { view: room.rows.view(), words: few, gathered: false });
    let error = room.ep.combine(&room.stream, &handle, &rows, &room.combined()).unwrap_err().to_string();
    assert!(error.contains("416 bytes with its payload") && error.contains("this arena have 288"), "{error}");
    // A dtype that no combine takes is refused where it is stated.
    let tokens = room.tokens(MAX_TOKENS).combine_dtype(Dtype::Fp8E4m3);
    let error = room.ep.dispatch(&room.stream, &tokens, &room.output(room.capacity)).map(drop).unwrap_err();
    assert!(error.to_string().contains("dtype of rows is fp8"), "{error}");
    for (partial, words) in [(Partial::Fp8, 1), (Partial::Fp32, 1), (Partial::Same, 4097)] {
        let builder = builder(&world, &device).hidden(128).tuning(|t| (t.partial, t.payload_words) = (partial, words));
        let error = builder.build().map(drop).unwrap_err().to_string();
        assert!(error.contains(&format!("payload_words is {words}")), "{error}");
    }
}

#[test]
fn ranks_that_differ_in_their_payload_find_it() {
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |builder| with_room(builder).timeout(Duration::from_millis(700)));
        rig.route_all(1);
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
        let out = rig.ep.device().alloc(4 * MAX_TOKENS * MOST).unwrap();
        let words = 1 + rig.rank;
        let payload = Payload { view: rig.rows.view(), words, gathered: false };
        let rows = rig.expert_rows().payload(payload);
        rig.ep.combine(&rig.stream, &handle, &rows, &rig.combined().payload(out.view())).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let text = rig.ep.check().unwrap_err().to_string();
        assert!(text.contains("another format here than on rank"), "{text}");
        world.barrier("both found it").unwrap();
    });
}
