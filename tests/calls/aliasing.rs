//! Memory of a call that overlaps other memory of the call: refused where the call writes it, naming both.

use crate::rig;

use rig::{HIDDEN, MAX_TOKENS, PATIENCE, Rig, TOP_K, builder, on_ranks, test_device};
use tokenyard::*;

/// Name of a view in errors, and the bytes that the call needs of it.
type Part = (&'static str, usize);

/// Bytes of each view, whatever is needed of it.
const VIEW: usize = 4096;
const ROWS: usize = MAX_TOKENS;

/// Separate views, but for two: the last needed bytes of `first` are the first of `second`, or, if `adjacent`, lie
/// right before them.
fn laid_out(memory: &View, parts: &[Part], first: usize, second: usize, adjacent: bool) -> Vec<View> {
    let mut places: Vec<usize> = (0..parts.len()).map(|number| number * VIEW).collect();
    let end = places[first] + parts[first].1.next_multiple_of(16);
    places[second] = if adjacent { end } else { end - 16 };
    places.into_iter().map(|place| memory.slice(place, VIEW).unwrap()).collect()
}

/// Makes the call with each two of its views adjacent and overlapping, in both orders. It writes all but the first
/// `read`.
fn judge(memory: &View, parts: &[Part], read: usize, call: impl Fn(&[View]) -> Result<()>) {
    for (a, b) in (0..parts.len()).flat_map(|b| (0..b).map(move |a| (a, b))) {
        for (first, second, adjacent) in [(a, b, true), (b, a, true), (a, b, false), (b, a, false)] {
            let outcome = call(&laid_out(memory, parts, first, second, adjacent));
            let ([(other, bytes), (written, own)], refused) = ([parts[a], parts[b]], !adjacent && b >= read);
            match outcome {
                Ok(()) => assert!(!refused, "{written} overlaps {other} unnoticed"),
                Err(Error::Argument { name, value, advice, .. }) if refused => {
                    assert_eq!(name, written, "{value}");
                    assert!(value.starts_with(&format!("{own} bytes at 0x")), "{name} {value}");
                    assert!(value.contains(&format!(", where {other} has {bytes} bytes at 0x")), "{name} {value}");
                    assert!(advice.contains("overlaps none of the call's"), "{advice}");
                }
                Err(error) => panic!("{other} and {written}, adjacent: {adjacent}: {error}"),
            }
        }
    }
}

#[test]
fn outputs_of_a_dispatch_lie_in_no_other_memory_of_the_call() {
    const COLUMNS: usize = 128;
    let parts = [
        ("x", MAX_TOKENS * COLUMNS),
        ("topk_idx", MAX_TOKENS * TOP_K * 4),
        ("topk_weight", MAX_TOKENS * TOP_K * 4),
        ("count", 4),
        ("scales", MAX_TOKENS * 4),
        ("payload", MAX_TOKENS * 3 * 4),
        ("rows", ROWS * COLUMNS),
        ("output scales", ROWS * 4),
        ("payload of output", ROWS * 3 * 4),
        ("expert_count", rig::EXPERTS * 4),
        ("expert_offset", (rig::EXPERTS + 1) * 4),
        ("row_expert", ROWS * 4),
        ("source", ROWS * 8),
        ("token_experts", ROWS * TOP_K * 4),
        ("token_weights", ROWS * TOP_K * 4),
        ("row_count", 4),
        ("host_counts", (rig::EXPERTS + 1) * 4),
        ("source_ranges", rig::EXPERTS * 8),
        ("total_counts", rig::EXPERTS * 4),
        ("wait_times", 8),
    ];
    let world = World::threads(1).unwrap().remove(0);
    let device = test_device(&world);
    let builder = builder(&world, &device).hidden(COLUMNS).format(RowFormat::FP8_F32);
    let ep = builder.tuning(|t| t.dispatch_payload_words = 3).build().unwrap();
    let (stream, memory) = (device.new_stream().unwrap(), device.alloc((parts.len() + 1) * VIEW).unwrap());
    judge(&memory.view(), &parts, 6, |views| {
        let [x, idx, weight, count, scales, payload, output @ ..] = views else { unreachable!() };
        let [rows, out_scales, words, expert_count, offset, row_expert, source, output @ ..] = output else {
            unreachable!()
        };
        let [experts, weights, row_count, host_counts, ranges, totals, waits] = output else { unreachable!() };
        // What overlaps among inputs alone may have been bad routing.
        let _ = ep.check();
        // Tokens without experts, as many as the bytes of the count give.
        memory.fill(0).unwrap();
        memory.write((idx.ptr() - memory.view().ptr()) as usize, &[0xff; MAX_TOKENS * TOP_K * 4]).unwrap();
        let tokens = Tokens::new(x.clone(), idx.clone(), TokenCount::Device(count.clone()));
        let tokens = tokens.topk_weight(weight.clone()).scales(ScaleView::new(scales.clone(), 4, 4));
        let tokens = tokens.payload(TokenPayload { view: payload.clone(), words: 3 });
        let output = Output::new(Layout::Token { capacity: ROWS }, rows.clone(), expert_count.clone())
            .scales(out_scales.clone())
            .payload(words.clone())
            .expert_offset(offset.clone())
            .row_expert(row_expert.clone())
            .source(source.clone())
            .token_experts(experts.clone())
            .token_weights(weights.clone())
            .row_count(row_count.clone())
            .host_counts(host_counts.clone())
            .source_ranges(ranges.clone())
            .total_counts(totals.clone())
            .wait_times(waits.clone());
        ep.dispatch(&stream, &tokens, &output)?;
        stream.synchronize(PATIENCE)
    });
}

#[test]
fn rows_that_go_again_lie_in_no_other_memory_of_the_call() {
    const COLUMNS: usize = 128;
    let parts = [
        ("x", MAX_TOKENS * COLUMNS),
        ("count", 4),
        ("scales", MAX_TOKENS * 4),
        ("payload", MAX_TOKENS * 3 * 4),
        ("rows", ROWS * COLUMNS),
        ("output scales", ROWS * 4),
        ("payload of output", ROWS * 3 * 4),
    ];
    let world = World::threads(1).unwrap().remove(0);
    let device = test_device(&world);
    let builder = builder(&world, &device).hidden(COLUMNS).format(RowFormat::FP8_F32);
    let ep = builder.tuning(|t| t.dispatch_payload_words = 3).build().unwrap();
    let (stream, memory) = (device.new_stream().unwrap(), device.alloc((parts.len() + 1) * VIEW).unwrap());
    let spare = device.alloc(8 * VIEW).unwrap();
    let part = |at: usize| spare.slice(at * VIEW, VIEW).unwrap();
    let tokens = Tokens::new(part(0), part(1), TokenCount::Host(0)).topk_weight(part(2));
    let tokens = tokens.scales(ScaleView::new(part(3), 4, 4));
    let output = Output::new(Layout::Token { capacity: ROWS }, part(4), part(5)).scales(part(6));
    let handle = ep.dispatch(&stream, &tokens, &output).unwrap();
    judge(&memory.view(), &parts, 4, |views| {
        let [x, count, scales, payload, rows, out_scales, words] = views else { unreachable!() };
        // What overlaps among inputs alone may have been another count.
        let _ = ep.check();
        memory.fill(0).unwrap();
        let tokens = NewRows::new(x.clone(), TokenCount::Device(count.clone()));
        let tokens = tokens.scales(ScaleView::new(scales.clone(), 4, 4));
        let tokens = tokens.payload(TokenPayload { view: payload.clone(), words: 3 });
        let placed = Placed::new(rows.clone()).scales(out_scales.clone()).payload(words.clone());
        ep.dispatch_again(&stream, &handle, &tokens, &placed)?;
        stream.synchronize(PATIENCE)
    });
}

#[test]
fn sums_lie_in_nothing_that_their_combine_reads() {
    const PITCH: usize = HIDDEN * 2;
    let parts = [
        ("rows", ROWS * PITCH),
        ("topk_weight", MAX_TOKENS * TOP_K * 4),
        ("payload", ROWS * 3 * 4),
        ("out", MAX_TOKENS * PITCH),
        ("wait_times", 8),
        ("payload of out", MAX_TOKENS * TOP_K * 3 * 4),
    ];
    let world = World::threads(1).unwrap().remove(0);
    let rig = Rig::with(&world, |builder| builder.weights(Weights::Combine).tuning(|t| t.payload_words = 3 * TOP_K));
    rig.route(&[[-1; TOP_K]; MAX_TOKENS], 0);
    let tokens = rig.tokens(MAX_TOKENS).topk_weight(None);
    let handle = rig.ep.dispatch(&rig.stream, &tokens, &rig.output(ROWS)).unwrap();
    let memory = rig.ep.device().alloc((parts.len() + 1) * VIEW).unwrap();
    memory.fill(0).unwrap();
    judge(&memory.view(), &parts, 3, |views| {
        let [rows, weight, words, out, waits, gathered] = views else { unreachable!() };
        let payload = Payload { view: words.clone(), words: 3, gathered: true };
        let rows = Rows::new(rows.clone()).topk_weight(weight.clone()).payload(payload);
        let out = Combined::new(out.clone()).wait_times(waits.clone()).payload(gathered.clone());
        rig.ep.combine(&rig.stream, &handle, &rows, &out)?;
        rig.stream.synchronize(PATIENCE)
    });
    rig.ep.check().unwrap();
}

/// The sending half of a call of one round has read its input when it ends; a call of several rounds reads it later.
#[test]
fn what_a_half_has_read_may_be_written_by_the_other() {
    for rounds in [1, 2] {
        on_ranks(2, |world| {
            let rig = Rig::with(&world, |b| b.tuning(|t| t.round_tokens = Some(MAX_TOKENS / rounds)));
            assert_eq!(rig.ep.rounds(), rounds);
            let input = rig.ep.device().alloc(rig.rows.len()).unwrap();
            // On a GPU that ranks share, memory is allocated while no kernel waits for a peer.
            world.barrier("input has its memory").unwrap();
            rig.route_all(rounds);
            rig.stream.copy(&input.view().slice(0, rig.x.len()).unwrap(), &rig.x.view()).unwrap();
            let output = rig.output(rig.capacity).rows(input.view());
            let sent = rig.ep.dispatch_send(&rig.stream, &rig.tokens(MAX_TOKENS).x(input.view())).unwrap();
            let refused = |error: &Error, name: &str, other: &str| {
                let text = error.to_string();
                let is_named = text.starts_with(&format!("argument {name} is ")) && text.contains(other);
                assert!(rounds > 1 && is_named && !error.is_fatal(), "{text}");
            };
            let (handle, rows) = match rig.ep.dispatch_recv(&rig.stream, sent, &output) {
                Ok(handle) => (handle, rig.expert_rows().rows(input.view())),
                Err(again) => {
                    refused(&again.error, "rows", "where x has ");
                    let output = rig.output(rig.capacity);
                    (rig.ep.dispatch_recv(&rig.stream, *again.given, &output).unwrap(), rig.expert_rows())
                }
            };
            let sent = rig.ep.combine_send(&rig.stream, &handle, &rows).unwrap();
            let into_rows = rig.combined().out(rows.rows.clone());
            match rig.ep.combine_recv(&rig.stream, sent, &into_rows) {
                Ok(()) => rig.stream.copy(&rig.out.view(), &rows.rows.slice(0, rig.out.len()).unwrap()).unwrap(),
                Err(again) => {
                    refused(&again.error, "out", "where rows has ");
                    rig.ep.combine_recv(&rig.stream, *again.given, &rig.combined()).unwrap();
                }
            }
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap();
            rig.expect_own_rows(MAX_TOKENS, rounds);
            assert_eq!(
                rounds == 1,
                rows.rows == input.view(),
                "a call of several rounds that overwrites what it reads"
            );
            world.barrier("done").unwrap();
        });
    }
}

/// Peers store into an output in the arena while this rank still reads.
#[test]
fn tokens_of_a_dispatch_do_not_overlap_the_output_in_the_arena() {
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |builder| builder.tuning(|t| t.in_place = Some((64, 1))));
        let own = rig.ep.in_place().unwrap();
        let output = rig.output(0).layout(own.layout).rows(own.rows.clone()).pitch_bytes(own.pitch_bytes);
        let inside = rig.tokens(MAX_TOKENS).x(own.rows.slice(HIDDEN * 2, rig.x.len()).unwrap());
        let text = rig.ep.dispatch(&rig.stream, &inside, &output).unwrap_err().to_string();
        assert!(text.starts_with("argument rows is ") && text.contains("where x has "), "{text}");
        rig.route_all(1);
        // On a GPU that ranks share, memory is allocated while no kernel waits for a peer.
        world.barrier("all have their memory").unwrap();
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &output).unwrap();
        let rows = Rows::new(own.rows.clone()).pitch_bytes(own.pitch_bytes);
        let into_rows = rig.combined().out(own.rows);
        let text = rig.ep.combine(&rig.stream, &handle, &rows, &into_rows).unwrap_err().to_string();
        assert!(text.starts_with("argument out is ") && text.contains("where rows has "), "{text}");
        rig.ep.combine(&rig.stream, &handle, &rows, &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        rig.expect_own_rows(MAX_TOKENS, 1);
        world.barrier("done").unwrap();
    });
}
