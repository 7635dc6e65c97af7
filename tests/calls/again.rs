//! Dispatches by an earlier handle: every row goes to the place that the token's row had, whatever else is called
//! meanwhile, and handles or counts that do not fit are refused.

use crate::rig;

use std::time::Duration;

use rig::*;
use tokenyard::internals::kernels::{SeededConfig, seeded_world};
use tokenyard::*;

const PITCH: usize = HIDDEN * 2;

/// Choices of a rank's tokens; ranks have different numbers of tokens, and one has none.
fn choices_of(rank: usize, salt: usize) -> Vec<[i32; TOP_K]> {
    let experts = EXPERTS as i32;
    let choice = |token: usize| {
        let first = ((rank * 5 + token * 3 + salt) as i32) % experts;
        [first, if (token + salt) % 3 == 2 { -1 } else { (first + 3 + token as i32) % experts }]
    };
    (0..(rank + salt) % (MAX_TOKENS + 1)).map(choice).collect()
}

/// The output's rows, with the fill byte where none is.
fn read(rows: &DeviceBuffer) -> Vec<u8> {
    let mut seen = vec![0; rows.len()];
    rows.read(0, &mut seen).unwrap();
    seen
}

/// New rows in the input, of another salt than the dispatch's, and an output for them.
struct Second {
    rows: DeviceBuffer,
}

impl Second {
    fn new(rig: &Rig) -> Second {
        Second { rows: rig.ep.device().alloc(rig.rows.len()).unwrap() }
    }

    fn fill(&self, rig: &Rig, tokens: usize, salt: usize) {
        self.rows.fill(0xEE).unwrap();
        (0..tokens).for_each(|token| rig.x.write(token * PITCH, &rig.row(token, salt)).unwrap());
    }

    fn placed(&self) -> Placed {
        Placed::new(self.rows.view()).pitch_bytes(PITCH)
    }

    /// Every row of the first output, with the source token's new row in its place.
    fn expect(&self, rig: &Rig, first: &[u8], ranks: usize, (from, to): (usize, usize)) {
        let seen = read(&self.rows);
        for (row, (first, seen)) in first.chunks(PITCH).zip(seen.chunks(PITCH)).enumerate() {
            let places = (0..ranks).flat_map(|rank| (0..MAX_TOKENS).map(move |token| (rank, token)));
            let of = places.clone().find(|&(rank, token)| Rig::row_of(rank, token, from) == first);
            let wanted = of.map_or(vec![0xEE; PITCH], |(rank, token)| Rig::row_of(rank, token, to));
            assert_eq!(seen, wanted, "rank {} row {row}, of {of:?}", rig.rank);
        }
    }
}

fn new_rows(rig: &Rig, count: usize) -> NewRows {
    NewRows::new(rig.x.view(), TokenCount::Host(count)).pitch_bytes(PITCH)
}

/// A dispatch, and dispatches by its handle: fused, in halves, captured, by the device's count, beside other dispatches
/// and after a combine.
fn replay(world: &World, rig: &Rig) {
    let second = Second::new(rig);
    world.barrier("outputs").unwrap();
    for salt in 0..4 {
        let choices = choices_of(rig.rank, salt);
        let count = choices.len();
        rig.rows.fill(0xEE).unwrap();
        rig.route(&choices, salt);
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(count), &rig.output(rig.capacity)).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let first = read(&rig.rows);
        for way in 0..5 {
            let new = 40 + salt * 7 + way;
            second.fill(rig, count, new);
            match way {
                0 => rig.ep.dispatch_again(&rig.stream, &handle, &new_rows(rig, count), &second.placed()).unwrap(),
                1 => {
                    let sent = rig.ep.dispatch_again_send(&rig.stream, &handle, &new_rows(rig, count)).unwrap();
                    rig.ep.dispatch_again_recv(&rig.stream, sent, &second.placed()).unwrap();
                }
                2 => {
                    rig.count.write(0, &(count as i32).to_ne_bytes()).unwrap();
                    let tokens = new_rows(rig, 0).count(TokenCount::Device(rig.count.view()));
                    rig.ep.dispatch_again(&rig.stream, &handle, &tokens, &second.placed()).unwrap();
                }
                3 => {
                    rig.stream.begin_capture().unwrap();
                    let captured = rig.ep.dispatch_again(&rig.stream, &handle, &new_rows(rig, count), &second.placed());
                    let graph = rig.stream.end_capture().unwrap();
                    captured.unwrap();
                    graph.launch(&rig.stream).unwrap();
                    graph.launch(&rig.stream).unwrap();
                    rig.stream.synchronize(PATIENCE).unwrap();
                }
                _ => {
                    // Another dispatch, and its combine, come between.
                    rig.good_round(salt + 90);
                    second.fill(rig, count, new);
                    rig.ep.dispatch_again(&rig.stream, &handle, &new_rows(rig, count), &second.placed()).unwrap();
                }
            }
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap_or_else(|error| panic!("way {way}, salt {salt}: {error}"));
            second.expect(rig, &first, world.size(), (salt, new));
        }
        // The handle is combined as ever.
        let rows = Rows::new(second.rows.view()).pitch_bytes(PITCH);
        rig.ep.combine(&rig.stream, &handle, &rows, &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        for (token, choices) in choices.iter().enumerate() {
            let factor = if choices[1] < 0 { 0.5 } else { 1.0 };
            assert_eq!(rig.sum(token), rig.scaled_row(token, 40 + salt * 7 + 4, factor), "rank {} {token}", rig.rank);
        }
    }
}

#[test]
fn rows_go_where_the_first_ones_went() {
    for ranks in [1, 3, 5] {
        for compact in [false, true] {
            on_ranks(ranks, |world| {
                replay(&world, &Rig::with(&world, |builder| builder.tuning(|t| t.compact_handles = Some(compact))));
            });
        }
    }
    on_ranks(2, |world| {
        replay(&world, &Rig::with(&world, |builder| builder.tuning(|t| t.round_tokens = Some(1))));
    });
    // Dedicated senders: few blocks, many ranks.
    on_ranks(6, |world| replay(&world, &Rig::with(&world, |builder| builder.sms(3))));
}

#[test]
fn rails_forward_rows_to_where_the_first_ones_went() {
    for sizes in [&[1, 1][..], &[2, 1], &[1, 3], &[2, 2, 1]] {
        for (rounds, compact) in [(None, true), (Some(2), false)] {
            nodes::on_nodes(sizes, |world, network| {
                let proxy = nodes::proxy(network, &world, 1500);
                let rig = Rig::with(&world, |builder| {
                    let builder = builder.proxy(&proxy).timeout(nodes::DEADLINE).sms(3);
                    builder.tuning(|t| {
                        (t.chunk_rows, t.round_tokens, t.compact_handles) = (Some(1), rounds, Some(compact));
                    })
                });
                replay(&world, &rig);
                world.barrier("all are done").unwrap();
            });
        }
    }
}

/// One rank's count on the device differs: its rows stay away, it gets the error, and the next calls work.
fn other_count(world: &World, rig: &Rig, bad: usize) {
    let second = Second::new(rig);
    rig.rows.fill(0xEE).unwrap();
    rig.route_all(1);
    let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
    rig.stream.synchronize(PATIENCE).unwrap();
    let first = read(&rig.rows);
    let mut last = 0;
    for wrong in [-1, 0, MAX_TOKENS as i32 - 1, MAX_TOKENS as i32 + 1] {
        second.fill(rig, MAX_TOKENS, 7);
        let count = if rig.rank == bad { wrong } else { MAX_TOKENS as i32 };
        rig.count.write(0, &count.to_ne_bytes()).unwrap();
        world.barrier("counts").unwrap();
        let tokens = new_rows(rig, 0).count(TokenCount::Device(rig.count.view()));
        rig.ep.dispatch_again(&rig.stream, &handle, &tokens, &second.placed()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        match rig.ep.check() {
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(&format!("the call has {wrong} tokens")) && text.contains("had 4"), "{text}");
                assert_eq!(rig.ep.check(), Ok(()), "reported once");
                assert!(matches!(error, Error::Routing { .. }) && rig.rank == bad, "{error}");
            }
            Ok(()) => {
                assert_ne!(rig.rank, bad);
                // Each rank has some token of each other, and learns which dispatch had none.
                let refused = rig.ep.refused_sources();
                assert!(
                    refused.len() == 1 && refused[0].0 == Rank(bad as u32) && refused[0].1 > last,
                    "{refused:?}, {last}"
                );
                last = refused[0].1;
            }
        }
        // What the other ranks sent is here.
        let theirs = |row: &[u8]| !(0..MAX_TOKENS).any(|token| Rig::row_of(bad, token, 1) == row);
        let blank = |row: &[u8]| if theirs(row) { row.to_vec() } else { vec![0xEE; PITCH] };
        let kept: Vec<u8> = first.chunks(PITCH).flat_map(blank).collect();
        second.expect(rig, &kept, world.size(), (1, 7));
        world.barrier("compared").unwrap();
    }
    rig.good_round(2);
    second.fill(rig, MAX_TOKENS, 8);
    rig.ep.dispatch_again(&rig.stream, &handle, &new_rows(rig, MAX_TOKENS), &second.placed()).unwrap();
    rig.stream.synchronize(PATIENCE).unwrap();
    rig.ep.check().unwrap();
    second.expect(rig, &first, world.size(), (1, 8));
}

#[test]
fn rows_of_another_number_of_tokens_stay_away() {
    for bad in 0..3 {
        on_ranks(3, |world| other_count(&world, &Rig::new(&world), bad));
        for sizes in [&[1, 2][..], &[1, 1, 1], &[2, 1]] {
            nodes::on_nodes(sizes, |world, network| {
                let proxy = nodes::proxy(network, &world, 1500);
                other_count(&world, &nodes::rig(&world, &proxy), bad);
                world.barrier("all are done").unwrap();
            });
        }
    }
}

#[test]
fn handles_of_two_dispatches_close_the_context() {
    for sizes in [&[2][..], &[1, 1], &[2, 1]] {
        nodes::on_nodes(sizes, |world, network| {
            let proxy = (sizes.len() > 1).then(|| nodes::proxy(network, &world, 1500));
            let rig = Rig::with(&world, |builder| match &proxy {
                Some(proxy) => builder.proxy(proxy).timeout(nodes::DEADLINE),
                None => builder.timeout(Duration::from_secs(2)),
            });
            let second = Second::new(&rig);
            let dispatch = |salt| {
                rig.route_all(salt);
                let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
                rig.stream.synchronize(PATIENCE).unwrap();
                handle
            };
            // The same routing, so that no row is missing.
            let handles = [dispatch(1), dispatch(1)];
            let handle = &handles[usize::from(rig.rank == 0)];
            rig.ep.dispatch_again(&rig.stream, handle, &new_rows(&rig, MAX_TOKENS), &second.placed()).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            world.barrier("all are closed").unwrap();
            let error = rig.ep.check().unwrap_err();
            let text = error.to_string();
            assert!(error.is_fatal(), "{text}");
            if sizes == [2] {
                assert!(
                    matches!(error, Error::Order { .. }) && text.contains("handles of the same dispatch"),
                    "{text}"
                );
            }
        });
    }
}

/// By the handle that one rank gives it waits for rows of the other; by the one that the other gives no rows come.
#[test]
fn who_waits_for_rows_finds_that_their_source_gave_another_handle() {
    (0..2).for_each(wait_for_rows_of_another_handle);
}

/// With two blocks the first places the rows of rank 0, and looks at what the other gave once they are there.
fn wait_for_rows_of_another_handle(waits: usize) {
    const MANY: usize = 96;
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |builder| builder.max_tokens_per_rank(MANY).sms(2).timeout(PATIENCE));
        let [x, rows, idx, weight] =
            [PITCH, 2 * TOP_K * PITCH, TOP_K * 4, TOP_K * 4].map(|bytes| rig.ep.device().alloc(MANY * bytes).unwrap());
        weight.write(0, &0.5f32.to_ne_bytes().repeat(MANY * TOP_K)).unwrap();
        x.fill(0x3f).unwrap();
        let dispatch = |to: usize| {
            let first = (to * EXPERTS / 2) as i32;
            idx.write(0, &[first, first + 1].map(i32::to_ne_bytes).concat().repeat(MANY)).unwrap();
            let tokens =
                Tokens::new(x.view(), idx.view(), TokenCount::Host(MANY)).pitch_bytes(PITCH).topk_weight(weight.view());
            let layout = Layout::Contiguous { align: 1, capacity: 2 * TOP_K * MANY };
            let output = Output::new(layout, rows.view(), rig.expert_count.view()).pitch_bytes(PITCH);
            let handle = rig.ep.dispatch(&rig.stream, &tokens, &output).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap();
            handle
        };
        let [across, within] = [dispatch(1 - rig.rank), dispatch(rig.rank)];
        let handle = if rig.rank == waits { &across } else { &within };
        let (new, placed) = (
            NewRows::new(x.view(), TokenCount::Host(MANY)).pitch_bytes(PITCH),
            Placed::new(rows.view()).pitch_bytes(PITCH),
        );
        rig.ep.dispatch_again(&rig.stream, handle, &new, &placed).unwrap();
        rig.stream.synchronize(2 * PATIENCE).unwrap();
        let error = rig.ep.check().unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Order { .. }) && text.contains("handles of the same dispatch"), "{text}");
        world.barrier("all are closed").unwrap();
    });
}

#[test]
fn handles_that_have_no_rows_to_go_to_are_reported() {
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        let second = Second::new(&rig);
        let again = |handle: &Handle, tokens| {
            second.fill(&rig, MAX_TOKENS, 5);
            rig.ep.dispatch_again(&rig.stream, handle, &tokens, &second.placed())
        };
        rig.rows.fill(0xEE).unwrap();
        rig.route_all(1);
        // An output that was too small, on one rank.
        let capacity = if rig.rank == 0 { 1 } else { rig.capacity };
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(capacity)).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        assert_eq!(rig.ep.check().is_err(), rig.rank == 0);
        let first = read(&rig.rows);
        again(&handle, new_rows(&rig, MAX_TOKENS)).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        if rig.rank == 0 {
            let text = rig.ep.check().unwrap_err().to_string();
            assert!(text.contains("whose output was too small"), "{text}");
        }
        rig.ep.check().unwrap();
        second.expect(&rig, &first, 2, (1, 5));
        world.barrier("compared").unwrap();
        // Routing that was refused sent no rows, and sends none again.
        rig.rows.fill(0xEE).unwrap();
        rig.route_all(1);
        if rig.rank == 1 {
            rig.idx.write(0, &99i32.to_ne_bytes()).unwrap();
        }
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        assert_eq!(rig.ep.check().is_err(), rig.rank == 1);
        let first = read(&rig.rows);
        again(&handle, new_rows(&rig, MAX_TOKENS)).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        second.expect(&rig, &first, 2, (1, 5));
        rig.good_round(3);
    });
}

#[test]
fn what_cannot_go_again_is_refused() {
    on_ranks(1, |world| {
        let (rig, other) = (Rig::new(&world), Rig::new(&world));
        let second = Second::new(&rig);
        rig.route_all(1);
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(3), &rig.output(rig.capacity)).unwrap();
        let again = |handle: &Handle, tokens: NewRows, placed: Placed| {
            rig.ep.dispatch_again(&rig.stream, handle, &tokens, &placed).unwrap_err().to_string()
        };
        let text = again(&handle, new_rows(&rig, 2), second.placed());
        assert!(text.contains("count is 2: the handle's dispatch had 3 tokens"), "{text}");
        let theirs = other.ep.dispatch(&other.stream, &other.tokens(0), &other.output(other.capacity)).unwrap();
        let text = again(&theirs, new_rows(&rig, 3), second.placed());
        assert!(text.contains("handle is of another context"), "{text}");
        let short = second.rows.slice(0, second.rows.len() - 16).unwrap();
        let text = again(&handle, new_rows(&rig, 3), Placed::new(short).pitch_bytes(PITCH));
        assert!(text.contains("rows is") && text.contains("bytes are needed"), "{text}");
        let text = again(&handle, new_rows(&rig, 3), Placed::new(rig.x.view()).pitch_bytes(PITCH));
        assert!(text.contains("rows is") || text.contains("overlap"), "{text}");
        let text = again(&handle, new_rows(&rig, 3).pitch_bytes(PITCH + 8), second.placed());
        assert!(text.contains("pitch_bytes of x"), "{text}");
        let text = again(&handle, new_rows(&rig, 3), second.placed().scales(rig.x.view()));
        assert!(text.contains("output scales is given"), "{text}");
        // A handle of a capture that has not run.
        rig.stream.begin_capture().unwrap();
        let captured = rig.ep.dispatch(&rig.stream, &rig.tokens(3), &rig.output(rig.capacity));
        let graph = rig.stream.end_capture().unwrap();
        let captured = captured.unwrap();
        rig.ep.dispatch_again(&rig.stream, &captured, &new_rows(&rig, 3), &second.placed()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let text = rig.ep.check().unwrap_err().to_string();
        assert!(text.contains("whose dispatch has not been received"), "{text}");
        graph.launch(&rig.stream).unwrap();
        rig.ep.dispatch_again(&rig.stream, &captured, &new_rows(&rig, 3), &second.placed()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        // A half of another call.
        let sent = rig.ep.dispatch_again_send(&rig.stream, &handle, &new_rows(&rig, 3)).unwrap();
        rig.ep.dispatch_again(&rig.stream, &handle, &new_rows(&rig, 3), &second.placed()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        assert!(matches!(rig.ep.check(), Err(Error::Order { fatal: false, .. })));
        rig.ep.dispatch_again_recv(&rig.stream, sent, &second.placed()).unwrap();
        rig.good_round(2);
    });
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |builder| builder.tuning(|t| t.in_place = Some((1, MAX_TOKENS * TOP_K))));
        let second = Second::new(&rig);
        rig.route_all(1);
        let own = rig.ep.in_place().unwrap();
        let output = Output::new(own.layout, own.rows, rig.expert_count.view());
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(3), &output).unwrap();
        let again = rig.ep.dispatch_again(&rig.stream, &handle, &new_rows(&rig, 3), &second.placed());
        assert!(matches!(&again, Err(Error::Config { .. })), "{again:?}");
    });
}

/// A context is closed by a combine while dispatches by a handle begin beside it: its threads agree on that.
#[test]
fn threads_agree_whether_their_context_is_closed() {
    for seed in 0..200 {
        let worlds = World::threads(2).unwrap();
        let report = seeded_world(SeededConfig { seed, hold_stores: false, stopped: None }, 2, |rank, device| {
            let rig = Rig::on(&worlds[rank], device.clone(), |builder| {
                let builder = builder.timeout(Duration::from_millis(500)).sms(2 + 2 * (seed % 2) as u32);
                builder.tuning(|t| t.compact_handles = Some(false))
            });
            rig.route_all(seed as usize);
            let (tokens, output) = (rig.tokens(MAX_TOKENS), rig.output(rig.capacity));
            let dispatch = || rig.ep.dispatch(&rig.stream, &tokens, &output).unwrap();
            let (handles, third) = ([dispatch(), dispatch()], dispatch());
            let (beside, second) = (device.new_stream().unwrap(), Second::new(&rig));
            rig.stream.synchronize(PATIENCE).unwrap();
            for _ in 0..3 {
                let _ = rig.ep.dispatch_again(&beside, &third, &new_rows(&rig, MAX_TOKENS), &second.placed());
            }
            // Of another dispatch on each rank, which closes the context.
            let _ = rig.ep.combine(&rig.stream, &handles[rank], &rig.expert_rows(), &rig.combined());
            [&rig.stream, &beside].iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
        });
        assert_eq!(report.failure, None, "seed {seed}: {:?}", report.hang_report);
    }
}

/// One rank gives a handle and the other choices. Messages carry no number of an earlier dispatch.
#[test]
fn handles_and_choices_of_one_call_close_the_context() {
    for handle_on in [0, 1] {
        nodes::on_nodes(&[1, 1], |world, network| {
            let proxy = nodes::proxy(network, &world, 1500);
            let rig = nodes::rig(&world, &proxy);
            let second = Second::new(&rig);
            // Rank 0 has no tokens, so none is missed of it.
            let count = rig.rank * MAX_TOKENS;
            rig.route_all(1);
            let dispatch = || rig.ep.dispatch(&rig.stream, &rig.tokens(count), &rig.output(rig.capacity)).unwrap();
            let again = |handle: &Handle| {
                rig.ep.dispatch_again(&rig.stream, handle, &new_rows(&rig, count), &second.placed()).unwrap();
            };
            let handle = dispatch();
            again(&handle);
            drop(dispatch());
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap();
            world.barrier("alike so far").unwrap();
            if rig.rank == handle_on {
                again(&handle);
            } else {
                drop(dispatch());
            }
            rig.stream.synchronize(PATIENCE).unwrap();
            let error = rig.ep.check().unwrap_err();
            assert!(error.is_fatal(), "{error}");
            let text = error.to_string();
            assert!(text.contains("choices") || matches!(error, Error::Timeout { .. }), "{text}");
            world.barrier("all are closed").unwrap();
        });
    }
}

/// Though later rounds, of the receiving half, find it again.
#[test]
fn another_count_is_reported_once_a_call() {
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |builder| builder.tuning(|t| t.round_tokens = Some(1)));
        let second = Second::new(&rig);
        rig.route_all(1);
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.count.write(0, &2i32.to_ne_bytes()).unwrap();
        let tokens = new_rows(&rig, 0).count(TokenCount::Device(rig.count.view()));
        let sent = rig.ep.dispatch_again_send(&rig.stream, &handle, &tokens).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        assert!(matches!(rig.ep.check(), Err(Error::Routing { .. })));
        rig.ep.dispatch_again_recv(&rig.stream, sent, &second.placed()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        assert_eq!(rig.ep.check(), Ok(()));
    });
}
