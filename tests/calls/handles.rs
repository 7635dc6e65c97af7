//! Handles: many at once, compact ones, and the order in which engines that overlap two micro-batches enqueue halves.

use crate::rig;

use rig::*;
use tokenyard::*;

/// More experts than a token may take, so that a choice can be none.
const CHOICES: i32 = EXPERTS as i32 + 1;

/// A routing of its own for each number. A token names an expert once, or none.
fn choices_of(number: usize) -> [[i32; TOP_K]; MAX_TOKENS] {
    std::array::from_fn(|token| {
        let first = ((number * 7 + token * 5 + number / 9) as i32) % CHOICES;
        let second = (first + 1 + ((number / 3 + token) as i32) % (CHOICES - 1)) % CHOICES;
        [first, second].map(|expert| if expert == CHOICES - 1 { -1 } else { expert })
    })
}

/// The output rows of a token of one rank's dispatch: experts one after the other, each with its tokens in order.
fn rows_of(choices: &[[i32; TOP_K]], token: usize) -> impl Iterator<Item = usize> {
    choices[token].into_iter().filter(|expert| *expert >= 0).map(move |expert| {
        let before = choices.iter().flatten().filter(|other| (0..expert).contains(*other)).count();
        before + choices[..token].iter().flatten().filter(|other| **other == expert).count()
    })
}

/// The handle's sums are of its own rows and of no other handle's.
fn expect_sums(rig: &Rig, handle: &Handle, number: usize) {
    rig.out.fill(0xEE).unwrap();
    rig.ep.combine(&rig.stream, handle, &rig.expert_rows(), &rig.combined()).unwrap();
    rig.stream.synchronize(PATIENCE).unwrap();
    rig.ep.check().unwrap();
    let choices = choices_of(number);
    for token in 0..MAX_TOKENS {
        let sum: f32 = rows_of(&choices, token).map(|row| 0.5 * (row + 1) as f32).sum();
        assert_eq!(values(&rig.sum(token)), vec![sum; HIDDEN], "dispatch {number}, token {token}");
    }
}

/// Some are combined late, in another order than they were dispatched in, some twice, and some never.
#[test]
fn a_thousand_handles_live_at_once() {
    for compact in [false, true] {
        on_ranks(1, |world| {
            let rig = Rig::with(&world, |builder| {
                builder.tuning(|t| (t.handles, t.compact_handles, t.handle_rows) = (1, Some(compact), Some(1)))
            });
            let dispatch = |number| {
                rig.route(&choices_of(number), number);
                let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity));
                // The input is written again.
                rig.stream.synchronize(PATIENCE).unwrap();
                handle.unwrap()
            };
            let handles: Vec<Handle> = (0..1000).map(dispatch).collect();
            // Row r is r + 1 in bf16.
            for row in 0..rig.capacity {
                let value = (((row + 1) as f32).to_bits() >> 16) as u16;
                rig.rows.write(row * HIDDEN * 2, &value.to_ne_bytes().repeat(HIDDEN)).unwrap();
            }
            for (number, handle) in handles.iter().enumerate().rev().filter(|(number, _)| number % 5 != 0) {
                (0..1 + usize::from(number % 3 == 0)).for_each(|_| expect_sums(&rig, handle, number));
            }
        });
    }
}

/// The rows of calls before a capture that was refused for lack of room, and those of the captured dispatches.
#[test]
fn calls_before_a_capture_make_room_for_all_of_its_calls() {
    for (before, at_once, captured) in [
        // One handle at a time, as in the layers of a warm-up; the graph has them all at once.
        (&[5, 5][..], false, &[5, 5, 5][..]),
        (&[3, 5], true, &[3, 5]),
        (&[5, 2], false, &[5]),
    ] {
        on_ranks(1, |world| {
            let rig = Rig::with(&world, |builder| {
                builder.tuning(|t| (t.handles, t.compact_handles, t.handle_rows) = (3, Some(true), Some(3)))
            });
            rig.route(&choices_of(0)[..1], 1);
            let tokens = rig.tokens(1);
            let dispatch = |rows: &usize| rig.ep.dispatch(&rig.stream, &tokens, &rig.output(*rows)).unwrap();
            if at_once {
                drop(before.iter().map(dispatch).collect::<Vec<Handle>>());
            } else {
                before.iter().for_each(|rows| drop(dispatch(rows)));
            }
            rig.stream.begin_capture().unwrap();
            let handles: Vec<Handle> = captured.iter().map(dispatch).collect();
            rig.ep.combine(&rig.stream, handles.last().unwrap(), &rig.expert_rows(), &rig.combined()).unwrap();
            let graph = rig.stream.end_capture().unwrap();
            graph.launch(&rig.stream).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap();
            assert_eq!(rig.sum(0), rig.row(0, 1));
        });
    }
}

#[test]
fn a_compact_handle_grows_with_the_output_but_not_while_a_stream_captures() {
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |builder| {
            builder.tuning(|t| (t.handles, t.compact_handles, t.handle_rows) = (1, Some(true), Some(3)))
        });
        rig.route(&choices_of(0)[..1], 1);
        let (halves, capture) = (rig.tokens(1), || rig.stream.begin_capture().unwrap());
        let dispatch = |rows| rig.ep.dispatch(&rig.stream, &halves, &rig.output(rows));
        capture();
        let text = dispatch(4).map(drop).unwrap_err().to_string();
        assert!(text.contains("room for 3 rows while the stream captures, where the output has 4"), "{text}");
        // A received half that is refused can be made again.
        let sent = rig.ep.dispatch_send(&rig.stream, &halves).unwrap();
        let refused = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(5)).map(drop).unwrap_err();
        assert!(refused.error.to_string().contains("has 5"), "{refused}");
        let handle = rig.ep.dispatch_recv(&rig.stream, *refused.given, &rig.output(3)).unwrap();
        let graph = rig.stream.end_capture().unwrap();
        drop(handle);
        // The graph has the only handle. A new one grows; a capture then takes that one.
        drop(dispatch(5).unwrap());
        capture();
        let recorded = dispatch(5).unwrap();
        rig.ep.combine(&rig.stream, &recorded, &rig.expert_rows(), &rig.combined()).unwrap();
        let larger = rig.stream.end_capture().unwrap();
        for _ in 0..3 {
            graph.launch(&rig.stream).unwrap();
            larger.launch(&rig.stream).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap();
            assert_eq!(rig.sum(0), rig.row(0, 1));
        }
    });
}

/// vLLM (DBO) and SGLang (TBO) run two micro-batches alternately: while the rows of one are under way, the other
/// computes. Each micro-batch has a context of its own. `streams`: both share one stream, or each has its own.
/// `compact`: whether rank 0 has compact handles; the others then have none, or the other way round.
fn two_micro_batches(streams: usize, compact: bool) {
    on_ranks(3, |world| {
        let device = test_device(&world);
        let compact = (world.rank().index() == 0) == compact;
        let batch = || Rig::on(&world, device.clone(), |builder| builder.tuning(|t| t.compact_handles = Some(compact)));
        let batches = [batch(), batch()];
        let stream = |batch: usize| &batches[batch % streams].stream;
        let mut combining = [None, None];
        for layer in 0..20 {
            let salt = |batch: usize| 2 * layer + batch;
            let send = |batch: usize| {
                batches[batch].route_all(salt(batch));
                batches[batch].ep.dispatch_send(stream(batch), &batches[batch].tokens(MAX_TOKENS)).unwrap()
            };
            let receive = |batch: usize, sent| {
                let rig: &Rig = &batches[batch];
                let handle = rig.ep.dispatch_recv(stream(batch), sent, &rig.output(rig.capacity)).unwrap();
                rig.ep.combine_send(stream(batch), &handle, &rig.expert_rows()).unwrap()
            };
            let finish = |batch: usize, sent: CombineSent, salt: usize| {
                let rig: &Rig = &batches[batch];
                rig.ep.combine_recv(stream(batch), sent, &rig.combined()).unwrap();
                stream(batch).synchronize(PATIENCE).unwrap();
                rig.ep.check().unwrap();
                (0..MAX_TOKENS).for_each(|token| assert_eq!(rig.sum(token), rig.row(token, salt), "layer {layer}"));
            };
            // The second batch is half a layer behind: its combine of the layer before is finished while the first
            // batch's dispatch is under way, and so on.
            let first = send(0);
            if let Some(sent) = combining[1].take() {
                finish(1, sent, salt(1) - 2);
            }
            let second = send(1);
            combining[0] = Some(receive(0, first));
            combining[1] = Some(receive(1, second));
            finish(0, combining[0].take().unwrap(), salt(0));
        }
    });
}

#[test]
fn halves_of_two_micro_batches_overlap() {
    for streams in [1, 2] {
        for compact in [false, true] {
            two_micro_batches(streams, compact);
        }
    }
}

/// Fused, in halves and in rounds; a handle that has not been received is refused on all ranks.
#[test]
fn the_matrix_of_rows_has_the_tokens_from_each_rank_to_each_rank() {
    for (sizes, rounds) in [(&[3][..], None), (&[2, 1], None), (&[2, 1], Some(1)), (&[1, 1, 1], Some(3))] {
        nodes::on_nodes(sizes, |world, network| {
            let proxy = (sizes.len() > 1).then(|| nodes::proxy(network, &world, 1500));
            let rig = Rig::with(&world, |builder| {
                let builder =
                    builder.tuning(|t| (t.round_tokens, t.compact_handles) = (rounds, Some(rounds.is_some())));
                match &proxy {
                    Some(proxy) => builder.proxy(proxy),
                    None => builder,
                }
            });
            let ranks = world.size();
            let choices = |rank: usize| choices_of(rank).into_iter().take(rank + 2).collect::<Vec<_>>();
            rig.route(&choices(rig.rank), 1);
            let sent = rig.ep.dispatch_send(&rig.stream, &rig.tokens(rig.rank + 2)).unwrap();
            let handle = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity)).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            let goes = |token: &[i32; TOP_K], to: usize| {
                token.iter().any(|expert| *expert >= 0 && *expert as usize * ranks / EXPERTS == to)
            };
            let count = |from: usize, to: usize| choices(from).iter().filter(|token| goes(token, to)).count();
            let wanted: Vec<Vec<usize>> =
                (0..ranks).map(|from| (0..ranks).map(|to| count(from, to)).collect()).collect();
            assert_eq!(rig.ep.row_matrix(&handle), Ok(wanted));
            // One rank's handle is of a capture that has not run.
            rig.stream.begin_capture().unwrap();
            let recorded = rig.ep.dispatch(&rig.stream, &rig.tokens(1), &rig.output(rig.capacity));
            drop(rig.stream.end_capture().unwrap());
            let recorded = recorded.unwrap();
            let asked = if rig.rank == 1 { &recorded } else { &handle };
            let text = rig.ep.row_matrix(asked).unwrap_err().to_string();
            assert!(text.contains("of a dispatch that has not been received"), "{text}");
            world.barrier("all are done").unwrap();
        });
    }
}
