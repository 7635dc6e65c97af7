//! Bad input and bad luck inside one node: typed errors with values, on the ranks that should see them, and correct
//! results right afterwards.

use crate::rig;

use rig::*;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tokenyard::*;

const GOOD: [[i32; TOP_K]; 2] = [[0, 7], [3, 4]];

/// Rank 1 dispatches `bad` tokens: its own check must contain `words`, the others must go on, and so must all later.
fn bad_routing_on_rank_1(bad: [[i32; TOP_K]; 2], words: &[&str]) {
    on_ranks(3, |world| {
        let rig = Rig::new(&world);
        rig.good_round(1);
        assert_eq!(rig.ep.refused_sources(), []);
        rig.route(if rig.rank == 1 { &bad } else { &GOOD }, 2);
        let outcome = rig.round(2, rig.capacity);
        let noted = if rig.rank == 1 { vec![] } else { vec![(Rank(1), 2)] };
        assert_eq!(rig.ep.refused_sources(), noted, "rank {}", rig.rank);
        if rig.rank == 1 {
            let error = outcome.unwrap_err();
            assert!(matches!(error, Error::Routing { .. }), "{error:?}");
            words.iter().for_each(|w| assert!(error.to_string().contains(w), "«{error}» lacks «{w}»"));
            assert!(rig.sums()[..2 * HIDDEN * 2].iter().all(|&b| b == 0), "sums of a refused dispatch are zero");
        } else {
            outcome.unwrap();
            rig.expect_own_rows(2, 2);
        }
        rig.good_round(3);
        rig.good_round(4);
        assert_eq!(rig.ep.stats().errors, u64::from(rig.rank == 1));
        assert_eq!(rig.ep.refused_sources(), noted, "good dispatches are not noted");
    });
}

#[test]
fn expert_out_of_range_is_reported_where_it_happened() {
    bad_routing_on_rank_1([[0, 1], [2, 8]], &["rank 1", "dispatch 2", "choice 1", "token 1", "expert 8"]);
}

#[test]
fn negative_expert_other_than_minus_one_is_reported() {
    bad_routing_on_rank_1([[-2, 1], [2, 3]], &["choice 0", "token 0", "expert -2"]);
}

#[test]
fn expert_named_twice_is_reported() {
    bad_routing_on_rank_1([[0, 1], [5, 5]], &["choice 1", "token 1", "expert 5", "second time"]);
}

#[test]
fn device_count_beyond_the_maximum_is_reported() {
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        for (found, allowed, noted) in [(MAX_TOKENS as i32 + 1, false, 1), (-1, false, 2), (2, true, 2)] {
            rig.count.write(0, &(if rig.rank == 0 { found } else { 2 }).to_ne_bytes()).unwrap();
            rig.route(&GOOD, 5);
            let tokens = rig.tokens(0).count(TokenCount::Device(rig.count.view()));
            let handle = rig.ep.dispatch(&rig.stream, &tokens, &rig.output(rig.capacity)).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            let outcome = rig.ep.check();
            rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap();
            if rig.rank == 0 && !allowed {
                let text = outcome.unwrap_err().to_string();
                assert!(text.contains(&format!("count is {found}")) && text.contains("0 to 4"), "{text}");
            } else {
                outcome.unwrap();
                rig.expect_own_rows(2, 5);
            }
            let noted = if rig.rank == 0 { vec![] } else { vec![(Rank(0), noted)] };
            assert_eq!(rig.ep.refused_sources(), noted, "rank {}", rig.rank);
        }
    });
}

#[test]
fn too_small_output_writes_nothing_and_sources_are_notified() {
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        // All tokens of both ranks name experts 0 and 1, on rank 0: 8 rows, and there is room for 7.
        rig.route(&[[0, 1]; MAX_TOKENS], 1);
        rig.rows.fill(0xEE).unwrap();
        let capacity = if rig.rank == 0 { 15 } else { rig.capacity };
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(capacity)).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let outcome = rig.ep.check();
        if rig.rank == 0 {
            let error = outcome.unwrap_err();
            let Error::Capacity { rank: Rank(0), epoch: 1, what, needed: 16, given: 15, .. } = error else {
                panic!("{error:?}")
            };
            assert_eq!(what, "the contiguous output");
            let mut rows = vec![0u8; rig.rows.len()];
            rig.rows.read(0, &mut rows).unwrap();
            assert!(rows.iter().all(|&b| b == 0xEE), "an output that is too small stays untouched");
            let mut counts = [0xffu8; 8];
            rig.expert_count.read(0, &mut counts).unwrap();
            assert_eq!(counts, [0; 8], "nothing downstream may read rows that are not there");
        } else {
            outcome.unwrap();
        }
        rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let error = rig.ep.check().unwrap_err();
        let Error::Incomplete { rank, epoch: 1, peer: Rank(0), .. } = error else { panic!("{error:?}") };
        assert_eq!(rank.index(), rig.rank);
        assert!(rig.sums().iter().all(|&b| b == 0), "missing contributions count as nothing");
        rig.good_round(2);
    });
}

#[test]
fn a_second_send_before_the_receive_is_refused_and_harmless() {
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        rig.route(&GOOD, 1);
        let sent = rig.ep.dispatch_send(&rig.stream, &rig.tokens(2)).unwrap();
        let extra = rig.ep.dispatch_send(&rig.stream, &rig.tokens(2)).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let error = rig.ep.check().unwrap_err();
        assert!(matches!(error, Error::Order { fatal: false, .. }), "{error:?}");
        assert!(error.to_string().contains("dispatch 1"), "{error}");
        drop(extra);
        let handle = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity)).unwrap();
        let combine = rig.ep.combine_send(&rig.stream, &handle, &rig.expert_rows()).unwrap();
        // Types rule out that one is received twice, but a graph may be launched twice.
        rig.stream.begin_capture().unwrap();
        rig.ep.combine_recv(&rig.stream, combine, &rig.combined()).unwrap();
        let graph = rig.stream.end_capture().unwrap();
        graph.launch(&rig.stream).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        rig.expect_own_rows(2, 1);
        graph.launch(&rig.stream).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let error = rig.ep.check().unwrap_err();
        assert!(error.to_string().contains("combine 1 was the last sent"), "{error}");
        rig.good_round(2);
    });
}

#[test]
fn a_receive_that_is_refused_gives_back_what_it_took() {
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        rig.route(&GOOD, 1);
        let sent = rig.ep.dispatch_send(&rig.stream, &rig.tokens(2)).unwrap();
        let small = rig.output(rig.capacity).pitch_bytes(0);
        let refused = rig.ep.dispatch_recv(&rig.stream, sent, &small).unwrap_err();
        assert!(matches!(refused.error, Error::Argument { name: "pitch_bytes of rows", .. }), "{refused}");
        let handle = rig.ep.dispatch_recv(&rig.stream, *refused.given, &rig.output(rig.capacity)).unwrap();
        let sent = rig.ep.combine_send(&rig.stream, &handle, &rig.expert_rows()).unwrap();
        // A call under way owns the memory that it refers to.
        drop(handle);
        let narrow = rig.combined().pitch_bytes(0);
        let refused = rig.ep.combine_recv(&rig.stream, sent, &narrow).unwrap_err();
        assert!(matches!(refused.error, Error::Argument { name: "pitch_bytes of out", .. }), "{refused}");
        rig.ep.combine_recv(&rig.stream, *refused.given, &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        rig.expect_own_rows(2, 1);
        rig.good_round(2);
    });
}

#[test]
fn a_call_whose_half_is_dropped_is_abandoned() {
    fn is_send<T: Send>() {}
    is_send::<(Sent, CombineSent, Handle)>();
    on_ranks(1, |world| {
        let rig = Rig::new(&world);
        rig.route(&GOOD, 1);
        let handle = rig.enqueue(&rig.tokens(2), rig.capacity).unwrap();
        drop(rig.ep.combine_send(&rig.stream, &handle, &rig.expert_rows()).unwrap());
        rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let error = rig.ep.check().unwrap_err();
        assert!(error.to_string().contains("combine 2 was sent and not received"), "{error}");
        drop(rig.ep.dispatch_send(&rig.stream, &rig.tokens(2)).unwrap());
        for _ in 0..2 {
            let _handle = rig.ep.dispatch(&rig.stream, &rig.tokens(2), &rig.output(rig.capacity)).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            let error = rig.ep.check().unwrap_err();
            assert!(error.to_string().contains("dispatch 2 was sent and not received"), "{error}");
        }
    });
}

#[test]
fn combine_of_a_dispatch_that_was_not_received_is_refused() {
    on_ranks(1, |world| {
        let rig = Rig::new(&world);
        rig.route(&GOOD, 1);
        let sent = rig.ep.dispatch_send(&rig.stream, &rig.tokens(2)).unwrap();
        let graph_order_mistake = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity)).unwrap();
        let again = rig.ep.dispatch_send(&rig.stream, &rig.tokens(2)).unwrap();
        drop(graph_order_mistake);
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        // Receiving twice from one send, as a graph can: the second is out of order.
        rig.stream.begin_capture().unwrap();
        let _received = rig.ep.dispatch_recv(&rig.stream, again, &rig.output(rig.capacity)).unwrap();
        let graph = rig.stream.end_capture().unwrap();
        graph.launch(&rig.stream).unwrap();
        graph.launch(&rig.stream).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        assert!(rig.ep.check().unwrap_err().to_string().contains("dispatch 2 was the last sent"));
        rig.good_round(2);
    });
}

#[test]
fn a_rank_that_never_comes_is_named_with_the_wait_within_the_deadline() {
    on_ranks(3, |world| {
        let rig = Rig::with(&world, |b| b.timeout(Duration::from_millis(300)));
        if rig.rank == 2 {
            // Alive, but does not dispatch.
            std::thread::sleep(Duration::from_secs(2));
            return;
        }
        rig.route(&GOOD, 1);
        let start = Instant::now();
        let error = rig.round(2, rig.capacity).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        let Error::Timeout { peer, site, epoch, waited_ms, .. } = &error else { panic!("{error:?}") };
        assert_eq!((*peer, *site, *epoch), (Rank(2), "routing metadata", 1));
        assert!((300..1500).contains(waited_ms), "{waited_ms}");
        assert_eq!(rig.round(2, rig.capacity).unwrap_err(), error, "the context stays closed");
        assert_eq!(rig.ep.barrier(&rig.stream).unwrap_err(), error);
    });
}

/// The block that reports first is random, so that one round could miss an error that hides the other.
#[test]
fn of_two_errors_in_a_launch_the_one_that_closes_the_context_is_reported() {
    on_ranks(2, |world| {
        for round in 0..8 {
            let rig = Rig::with(&world, |b| b.timeout(Duration::from_millis(100)));
            if rig.rank == 0 {
                rig.route(&[[99, 1], [0, 1]], 1);
                rig.ep.dispatch(&rig.stream, &rig.tokens(2), &rig.output(rig.capacity)).unwrap();
                rig.stream.synchronize(PATIENCE).unwrap();
                let error = rig.ep.check().unwrap_err();
                assert!(matches!(error, Error::Timeout { peer: Rank(1), .. }), "round {round}: {error:?}");
            }
            world.barrier("the rank that came alone has given up").unwrap();
        }
    });
}

#[test]
fn a_rank_missing_from_combine_is_named() {
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |b| b.timeout(Duration::from_millis(300)));
        rig.route(&GOOD, 1);
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(2), &rig.output(rig.capacity)).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        if rig.rank == 1 {
            std::thread::sleep(Duration::from_secs(1));
            return;
        }
        rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let error = rig.ep.check().unwrap_err();
        assert!(matches!(error, Error::Timeout { peer: Rank(1), site: "the combine flag", .. }), "{error:?}");
    });
}

#[test]
fn a_rank_missing_from_the_barrier_is_named() {
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |b| b.timeout(Duration::from_millis(200)));
        for _ in 0..5 {
            rig.ep.barrier(&rig.stream).unwrap();
        }
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        if rig.rank == 1 {
            std::thread::sleep(Duration::from_millis(800));
            return;
        }
        rig.ep.barrier(&rig.stream).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        assert!(rig.ep.check().unwrap_err().to_string().contains("the barrier flag of rank 1"));
    });
}

#[test]
fn zero_tokens_on_any_or_all_ranks_are_ordinary() {
    on_ranks(3, |world| {
        let rig = Rig::new(&world);
        for epoch in 0..8usize {
            let count = if epoch >> (rig.rank.min(2)) & 1 == 1 { 2 } else { 0 };
            rig.route(&GOOD, epoch);
            rig.round(count, rig.capacity).unwrap();
            rig.expect_own_rows(count, epoch);
        }
    });
}

#[test]
fn tokens_without_experts_sum_to_zero() {
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        rig.route(&[[-1, -1], [3, 4]], 1);
        rig.round(2, rig.capacity).unwrap();
        let sums = rig.sums();
        assert!(sums[..HIDDEN * 2].iter().all(|&b| b == 0));
        assert_eq!(sums[HIDDEN * 2..][..HIDDEN * 2], rig.row(1, 1));
    });
}

#[test]
fn unusable_views_and_counts_are_refused_before_anything_is_enqueued() {
    on_ranks(1, |world| {
        let rig = Rig::new(&world);
        let good = rig.tokens(2);
        let out = rig.output(rig.capacity);
        let short = |view: &View, bytes: usize| view.slice(0, bytes).unwrap();
        let odd = |view: &View| view.slice(2, view.len() - 2).unwrap();
        let refused = |tokens: Tokens, output: Output, words: &[&str]| {
            let error = rig.ep.dispatch(&rig.stream, &tokens, &output).map(drop).unwrap_err();
            words.iter().for_each(|w| assert!(error.to_string().contains(w), "«{error}» lacks «{w}»"));
        };
        refused(good.clone().count(TokenCount::Host(5)), out.clone(), &["count is 5", "at most 4"]);
        refused(good.clone().x(short(&good.x, 255)), out.clone(), &["x is 255 bytes", "256 bytes"]);
        refused(good.clone().x(odd(&good.x)), out.clone(), &["x is address", "16 bytes"]);
        refused(good.clone().pitch_bytes(100), out.clone(), &["pitch_bytes of x is 100", "at least 128"]);
        refused(good.clone().pitch_bytes(136), out.clone(), &["pitch_bytes of x is 136", "multiple of 16"]);
        refused(good.clone().topk_idx(short(&good.topk_idx, 15)), out.clone(), &["topk_idx is 15 bytes", "16 bytes"]);
        refused(
            good.clone().index_type(IndexType::I64).count(TokenCount::Host(4)),
            out.clone(),
            &["topk_idx", "64 bytes"],
        );
        refused(good.clone().topk_weight(None), out.clone(), &["topk_weight is missing", "with dispatch"]);
        let scales = Some(ScaleView::new(good.x.clone(), 4, 4));
        refused(good.clone().scales(scales), out.clone(), &["scales is given", "no scales"]);
        let layout = Layout::Contiguous { align: 0, capacity: 4 };
        refused(good.clone(), out.clone().layout(layout), &["align is 0"]);
        let layout = Layout::Contiguous { align: 1, capacity: rig.capacity + 1 };
        refused(good.clone(), out.clone().layout(layout), &["rows is 1024 bytes", "1152 bytes"]);
        let layout = Layout::Masked { per_expert: usize::MAX };
        refused(good.clone(), out.clone().layout(layout), &["layout is Masked", "fewer"]);
        refused(
            good.clone(),
            out.clone().expert_count(short(&out.expert_count, 31)),
            &["expert_count is 31", "32 bytes"],
        );
        refused(good.clone(), out.clone().source(short(&out.rows, 8)), &["source is 8 bytes", "64 bytes"]);
        refused(good.clone(), out.clone().token_experts(out.rows.clone()), &["token_experts is given", "token layout"]);
        rig.good_round(1);

        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(0), &out).unwrap();
        let refused = |rows: Rows, combined: Combined, words: &[&str]| {
            let error = rig.ep.combine(&rig.stream, &handle, &rows, &combined).unwrap_err();
            words.iter().for_each(|w| assert!(error.to_string().contains(w), "«{error}» lacks «{w}»"));
        };
        let (rows, combined) = (rig.expert_rows(), rig.combined());
        refused(rows.clone().rows(short(&rows.rows, 100)), combined.clone(), &["rows is 100 bytes", "1024 bytes"]);
        refused(
            rows.clone().topk_weight(rows.rows.clone()),
            combined.clone(),
            &["topk_weight is given", "with dispatch"],
        );
        refused(rows.clone(), combined.clone().dtype(Dtype::Fp8E4m3), &["dtype of out is fp8"]);
        refused(rows.clone(), combined.clone().pitch_bytes(0), &["pitch_bytes of out is 0"]);
        rig.ep.combine(&rig.stream, &handle, &rows, &combined).unwrap();
        rig.good_round(2);
    });
}

#[test]
fn scales_of_the_wrong_shape_are_refused() {
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |b| b.hidden(256).format(RowFormat::FP8_F32));
        let x = rig.ep.device().alloc(4 * 256).unwrap();
        let scales = rig.ep.device().alloc(4 * 2 * 4).unwrap();
        let given =
            |bytes: usize, row_stride: usize| Some(ScaleView::new(scales.slice(0, bytes).unwrap(), 4 * row_stride, 4));
        let refused = |scales: Option<ScaleView>, out_scales: Option<View>, words: &[&str]| {
            let tokens = rig.tokens(4).x(x.view()).pitch_bytes(256).scales(scales);
            let layout = Layout::Contiguous { align: 1, capacity: 4 };
            let output = rig.output(4).layout(layout).rows(x.view()).pitch_bytes(256).scales(out_scales);
            let error = rig.ep.dispatch(&rig.stream, &tokens, &output).map(drop).unwrap_err();
            words.iter().for_each(|w| assert!(error.to_string().contains(w), "«{error}» lacks «{w}»"));
        };
        let out = Some(scales.view());
        refused(None, out.clone(), &["scales is missing", "have scales"]);
        refused(given(31, 2), out.clone(), &["scales is 31 bytes", "32 bytes"]);
        refused(given(32, 3), out.clone(), &["scales is 32 bytes", "44 bytes"]);
        refused(given(32, usize::MAX / 4), out, &["scales is beyond 64 bits"]);
        refused(given(32, 2), None, &["output scales is missing"]);
        refused(given(32, 2), Some(scales.slice(0, 28).unwrap()), &["output scales is 28 bytes", "32 bytes"]);
    });
}

#[test]
fn a_context_that_quantizes_takes_bf16_rows_without_scales() {
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |b| b.hidden(256).format(RowFormat::FP8_F32).quantize(true));
        let alloc = |bytes: usize| rig.ep.device().alloc(bytes).unwrap();
        let (x, rows, scales) = (alloc(4 * 512), alloc(8 * 256), alloc(8 * 2 * 4));
        let good = rig.tokens(4).x(x.view()).pitch_bytes(512).scales(None);
        let layout = Layout::Contiguous { align: 1, capacity: 8 };
        let out = rig.output(8).layout(layout).rows(rows.view()).pitch_bytes(256).scales(scales.view());
        let refused = |tokens: Tokens, output: Output, words: &[&str]| {
            let error = rig.ep.dispatch(&rig.stream, &tokens, &output).map(drop).unwrap_err();
            assert!(matches!(error, Error::Argument { .. }), "{error:?}");
            words.iter().for_each(|w| assert!(error.to_string().contains(w), "«{error}» lacks «{w}»"));
        };
        let given = Some(ScaleView::new(scales.view(), 8, 4));
        refused(good.clone().scales(given), out.clone(), &["scales is given", "makes the scales", "leave it out"]);
        // Rows of fp8.
        refused(good.clone().pitch_bytes(256), out.clone(), &["pitch_bytes of x is 256", "at least 512"]);
        let short = x.slice(0, 4 * 512 - 1).unwrap();
        refused(good.clone().x(short), out.clone(), &["x is 2047 bytes", "2048 bytes"]);
        refused(good.clone(), out.clone().scales(None), &["output scales is missing", "have scales"]);

        // Columns of 7 and 448: the scale is 1, and 7 is 1.75 * 2^2 in e4m3.
        let row: Vec<u8> = (0..256).flat_map(|c| if c % 2 == 0 { 0x40e0u16 } else { 0x43e0 }.to_ne_bytes()).collect();
        x.write(0, &row.repeat(4)).unwrap();
        rig.idx.write(0, &[0i32, 5].map(i32::to_ne_bytes).concat().repeat(4)).unwrap();
        rig.ep.dispatch(&rig.stream, &good, &out).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        let (mut seen, mut words) = (vec![0; 8 * 256], vec![0; 8 * 2 * 4]);
        rows.read(0, &mut seen).unwrap();
        scales.read(0, &mut words).unwrap();
        assert_eq!(seen, [0x4e, 0x7e].repeat(8 * 128));
        assert_eq!(words, 1f32.to_ne_bytes().repeat(16));
    });
}

#[test]
fn ranks_that_differ_in_quantizing_are_refused() {
    on_ranks(2, |world| {
        let fp8 = builder(&world, &Device::cpu().unwrap()).hidden(128).format(RowFormat::FP8_F32);
        let built = fp8.quantize(world.rank().index() == 1).build();
        let why = built.err().map(|why| why.to_string()).unwrap_or_default();
        assert!(why.contains("quantize=true") && why.contains("quantize=false"), "{why}");
    });
}

#[test]
fn ranks_that_differ_in_their_partial_rows_are_refused() {
    on_ranks(2, |world| {
        let partial = [Partial::Same, Partial::Fp8][world.rank().index()];
        let built = builder(&world, &Device::cpu().unwrap()).hidden(128).tuning(|t| t.partial = partial).build();
        let why = built.err().map(|why| why.to_string()).unwrap_or_default();
        assert!(why.contains("partial=Same") && why.contains("partial=Fp8"), "{why}");
    });
}

#[test]
fn partial_rows_of_fp8_take_a_byte_a_column_and_four_a_block() {
    let world = World::threads(2).unwrap().remove(0);
    let device = Device::cpu().unwrap();
    let bytes = |hidden: usize, partial: Partial| {
        let plan = builder(&world, &device).hidden(hidden).tuning(|t| t.partial = partial).plan().unwrap();
        plan.buffers().iter().find(|buffer| buffer.name == "partial rows").unwrap().bytes as usize
    };
    // Of MAX_TOKENS tokens and two ranks each, twice.
    let rows = 2 * MAX_TOKENS * 2;
    for (partial, row) in [(Partial::Same, 14336), (Partial::Fp32, 28672), (Partial::Fp8, 7168 + 224)] {
        assert_eq!(bytes(7168, partial), rows * row, "{partial:?}");
    }
    // Rows begin at multiples of 16 bytes.
    assert_eq!(bytes(128, Partial::Fp8), rows * (128 + 16));
}

#[test]
fn a_nan_stays_one_in_fp8_partial_rows_and_an_infinity_takes_its_block_along() {
    const COLUMNS: usize = 384;
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |b| b.hidden(COLUMNS).tuning(|t| t.partial = Partial::Fp8));
        let alloc = |rows: usize| rig.ep.device().alloc(rows * COLUMNS * 2).unwrap();
        let (x, rows, out) = (alloc(MAX_TOKENS), alloc(rig.capacity), alloc(MAX_TOKENS));
        // 448 and 7, whose scale is 1; a NaN, and in the next block an infinity.
        let mut row: Vec<u16> = [0x43e0, 0x40e0].repeat(COLUMNS / 2);
        (row[3], row[130]) = (0x7fc0, 0x7f80);
        x.write(0, &row.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>().repeat(MAX_TOKENS)).unwrap();
        // Experts of the first rank alone: its sum is the row.
        rig.idx.write(0, &[0i32, 1].map(i32::to_ne_bytes).concat().repeat(MAX_TOKENS)).unwrap();
        let tokens = rig.tokens(MAX_TOKENS).x(x.view()).pitch_bytes(COLUMNS * 2);
        let output = rig.output(rig.capacity).rows(rows.view()).pitch_bytes(COLUMNS * 2);
        let handle = rig.ep.dispatch(&rig.stream, &tokens, &output).unwrap();
        let returned = Rows::new(rows.view()).pitch_bytes(COLUMNS * 2);
        let combined = rig.combined().out(out.view()).pitch_bytes(COLUMNS * 2);
        rig.ep.combine(&rig.stream, &handle, &returned, &combined).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        let mut seen = vec![0; MAX_TOKENS * COLUMNS * 2];
        out.read(0, &mut seen).unwrap();
        let wanted = |c: usize| if c == 3 || (128..256).contains(&c) { 0x7fff } else { row[c] };
        let wanted: Vec<u8> = (0..COLUMNS).flat_map(|c| wanted(c).to_ne_bytes()).collect();
        assert_eq!(seen, wanted.repeat(MAX_TOKENS), "rank {}", rig.rank);
    });
}

#[test]
fn shapes_that_cannot_be_served_are_refused() {
    let world = World::threads(2).unwrap().remove(0);
    let device = Device::cpu().unwrap();
    let base = || builder(&world, &device);
    let refused = |builder: AllToAllBuilder, words: &[&str]| {
        let error = builder.plan().unwrap_err();
        assert!(matches!(error, Error::Config { .. }), "{error:?}");
        words.iter().for_each(|w| assert!(error.to_string().contains(w), "«{error}» lacks «{w}»"));
    };
    refused(base().hidden(0), &["hidden is 0"]);
    refused(base().hidden(65), &["hidden is 65", "130 bytes", "multiple of 16"]);
    refused(base().hidden(136).format(RowFormat::FP8), &["136 bytes"]);
    refused(base().hidden(144).format(RowFormat::FP8), &["hidden is 144", "128"]);
    refused(base().hidden(4).format(RowFormat::FP32), &["combine_dtype is bf16", "4 bf16"]);
    refused(base().quantize(true), &["quantize is true", "these are bf16"]);
    let why = RowFormat::new(Dtype::Bf16, Scales::F32).unwrap_err().to_string();
    assert!(why.contains("scales is F32") && why.contains("bf16"), "{why}");
    assert_eq!(RowFormat::new(Dtype::Fp8E4m3, Scales::Ue8m0), Ok(RowFormat::FP8_UE8M0));
    let fp8 = || base().hidden(128).format(RowFormat::FP8);
    refused(fp8().quantize(true), &["quantize is true", "scales None", "F32 or Ue8m0"]);
    assert!(fp8().format(RowFormat::FP8_UE8M0).quantize(true).plan().is_ok());
    refused(base().tuning(|t| t.partial = Partial::Fp8), &["hidden is 64", "fp8 partial rows", "128"]);
    assert!(base().hidden(128).tuning(|t| t.partial = Partial::Fp8).plan().is_ok());
    refused(base().top_k(9), &["top_k is 9", "1 to 8"]);
    refused(base().experts(64).top_k(33), &["top_k is 33", "1 to 32"]);
    refused(base().experts(0), &["experts is 0"]);
    refused(base().experts(5000), &["2500 experts on a rank", "2047"]);
    refused(base().max_tokens_per_rank(0), &["max_tokens_per_rank is 0"]);
    refused(base().max_tokens_per_rank(1 << 30), &["max_tokens"]);
    refused(base().combine_dtype(Dtype::Fp8E4m3), &["combine_dtype is fp8"]);
    refused(base().placement(Placement::even(7, 2).unwrap()), &["7 experts on 2 ranks", "8 on 2"]);
    refused(base().sms(1), &["sms is 1", "two blocks"]);
    refused(base().sms(1025), &["sms is 1025", "2 to 1024 blocks", "stack"]);
    refused(base().sms(u32::MAX), &["sms is 4294967295", "2 to 1024 blocks"]);
    assert!(base().sms(1024).plan().is_ok());
    refused(base().tuning(|t| t.handles = 0), &["handles is 0"]);
    let rounds = |max: usize, tokens| base().max_tokens_per_rank(max).tuning(|t| t.round_tokens = Some(tokens));
    refused(rounds(1 << 20, 1), &["round_tokens is 1:", "1048576 rounds", "4096 are the most", "at least 256"]);
    refused(rounds((1 << 20) - 1, 255), &["round_tokens is 255:", "4113 rounds", "at least 256"]);
    refused(rounds(4097, 1), &["round_tokens is 1:", "4097 rounds", "at least 2"]);
    assert!(rounds(4097, 2).plan().is_ok() && rounds(4096, 1).plan().is_ok() && rounds(1 << 20, 256).plan().is_ok());
    refused(base().tuning(|t| t.first_epoch = 0), &["first_epoch is 0", "fresh memory"]);
    refused(base().tuning(|t| t.first_epoch = (1 << 32) - 1), &["first_epoch is 4294967295"]);
    refused(base().tuning(|t| t.first_epoch = (1 << 43) - 3), &["first_epoch is 8796093022205", "2^42"]);
}

/// As documented for `World::threads`.
#[test]
fn worlds_of_more_ranks_than_contexts_accept_are_refused() {
    let device = Device::cpu().unwrap();
    let planned = |ranks: usize| builder(&World::threads(ranks).unwrap().remove(0), &device).experts(ranks).plan();
    let refused = |ranks: usize| planned(ranks).unwrap_err().to_string();
    let worlds = |ranks: usize| World::threads(ranks).map(|worlds| worlds.len());
    for ranks in [0, 16_385, usize::MAX] {
        let text = worlds(ranks).unwrap_err().to_string();
        assert!(text.contains(&format!("world is {ranks}: give the number of ranks, 1 to 16384")), "{text}");
    }
    assert_eq!(worlds(16_384), Ok(16_384));
    assert!(planned(64).is_ok());
    assert!(refused(65).contains("ranks of a node is 65: use 1 to 64"), "{}", refused(65));
    assert!(refused(513).contains("world is 513: use 1 to 512"), "{}", refused(513));
}

/// Rank 1 comes after rank 0 has given up its first dispatch, after which a second one was enqueued.
#[test]
fn a_rank_that_gave_up_sends_nothing_more() {
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |b| b.timeout(Duration::from_millis(400)));
        rig.route_all(1);
        let dispatch = || rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
        let both = || {
            let _handles = [dispatch(), dispatch()];
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap_err()
        };
        let early = (world.rank() == Rank(0)).then(both);
        world.barrier("rank 0 has given up").unwrap();
        let error = early.unwrap_or_else(both);
        let epoch = 1 + u64::from(world.rank().0);
        let other = Rank(1 - world.rank().0);
        assert!(matches!(error, Error::Timeout { peer, epoch: at, .. } if peer == other && at == epoch), "{error}");
        world.barrier("done").unwrap();
    });
}

#[test]
fn ranks_with_different_configurations_are_notified() {
    on_ranks(2, |world| {
        let device = Device::cpu().unwrap();
        let hidden = 64 + 64 * world.rank().index();
        let error = builder(&world, &device).hidden(hidden).build().map(drop).unwrap_err();
        let other = 1 - world.rank().index();
        assert!(error.to_string().contains(&format!("hidden={hidden}: rank {other} has hidden=")), "{error}");
    });
}

#[test]
fn a_rank_that_cannot_build_fails_all_by_name() {
    on_ranks(2, |world| {
        let device = Device::cpu().unwrap();
        let top_k = if world.rank().index() == 1 { 99 } else { TOP_K };
        let error = builder(&world, &device).top_k(top_k).build().map(drop).unwrap_err();
        let wanted =
            if world.rank().index() == 1 { "top_k is 99" } else { "rank 1 failed in configuration of a context" };
        assert!(error.to_string().contains(wanted), "{error}");
    });
}

/// On the CPU device blocks always fit, and nothing is counted; `kernels/device/budget.rs` tests the sums themselves.
#[test]
fn budgets_beyond_a_gpu_fail_on_all_ranks_by_name_and_come_back() {
    let on_one_gpu = |share: u32| {
        let outcomes = Mutex::new(Vec::new());
        on_ranks(2, |world| {
            let device = test_device(&World::threads(1).unwrap()[0]);
            let built = builder(&world, &device).sms((device.multiprocessors() / share).max(2)).build();
            outcomes.lock().unwrap().push((built.as_ref().err().cloned(), device.kind()));
            world.barrier("budgets were asked for").unwrap();
        });
        outcomes.into_inner().unwrap()
    };
    let outcomes = on_one_gpu(1);
    let gpu = outcomes.iter().all(|(_, kind)| *kind == DeviceKind::Cuda);
    let errors: Vec<Error> = outcomes.into_iter().filter_map(|(error, _)| error).collect();
    assert_eq!(errors.len(), if gpu { 2 } else { 0 }, "{errors:?}");
    assert_eq!(errors.iter().filter(|e| matches!(e, Error::Config { name: "sms", .. })).count(), usize::from(gpu));
    for error in errors {
        let text = error.to_string();
        let by_name = matches!(error, Error::Config { .. }) || text.contains("failed in memory of a context");
        assert!(by_name && text.contains("multiprocessors"), "{text}");
    }
    assert!(on_one_gpu(4).iter().all(|(error, _)| error.is_none()), "what was refused was not taken");
}

#[test]
fn handles_are_allocated_on_demand_but_not_while_a_stream_captures() {
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |b| b.tuning(|t| t.handles = 1));
        rig.route(&GOOD, 1);
        let dispatch = || rig.ep.dispatch(&rig.stream, &rig.tokens(2), &rig.output(rig.capacity));
        let (first, second) = (dispatch().unwrap(), dispatch().unwrap());
        rig.stream.begin_capture().unwrap();
        let error = dispatch().map(drop).unwrap_err().to_string();
        assert!(error.contains("none free while the stream captures") && error.contains("handles"), "{error}");
        drop(first);
        let recorded = dispatch().unwrap();
        let error = dispatch().map(drop).unwrap_err().to_string();
        assert!(error.contains("none free"), "{error}");
        let graph = rig.stream.end_capture().unwrap();
        drop((recorded, second));
        // Of three that were in use at once one is the graph's.
        let _both = (dispatch().unwrap(), dispatch().unwrap());
        graph.launch(&rig.stream).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
    });
}

#[test]
fn a_handle_of_another_context_is_refused() {
    on_ranks(1, |world| {
        let (rig, other) = (Rig::new(&world), Rig::new(&world));
        rig.route(&GOOD, 1);
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(2), &rig.output(rig.capacity)).unwrap();
        let error = other.ep.combine(&other.stream, &handle, &other.expert_rows(), &other.combined()).unwrap_err();
        assert!(error.to_string().contains("another context"), "{error}");
    });
}

#[test]
fn token_layout_with_weights_at_combine_is_refused_with_the_reason() {
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |b| b.weights(Weights::Combine));
        let output = rig.output(4).layout(Layout::Token { capacity: 4 });
        let tokens = rig.tokens(2).topk_weight(None);
        let error = rig.ep.dispatch(&rig.stream, &tokens, &output).map(drop).unwrap_err();
        assert!(matches!(error, Error::Config { .. }) && error.to_string().contains("token"), "{error}");
    });
}

#[test]
fn several_dispatches_before_their_combines_keep_their_rows_separate() {
    on_ranks(3, |world| {
        let rig = Rig::new(&world);
        let buffers: Vec<DeviceBuffer> =
            (0..3).map(|_| rig.ep.device().alloc(rig.capacity * HIDDEN * 2).unwrap()).collect();
        let handles: Vec<Handle> = buffers
            .iter()
            .enumerate()
            .map(|(salt, rows)| {
                rig.route(&GOOD, salt);
                let output = rig.output(rig.capacity).rows(rows.view());
                let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(2), &output).unwrap();
                rig.stream.synchronize(PATIENCE).unwrap();
                handle
            })
            .collect();
        for salt in [2, 0, 1] {
            rig.out.fill(0xEE).unwrap();
            let rows = rig.expert_rows().rows(buffers[salt].view());
            rig.ep.combine(&rig.stream, &handles[salt], &rows, &rig.combined()).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap();
            rig.expect_own_rows(2, salt);
        }
    });
}

#[test]
fn epochs_and_flags_wrap() {
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |b| b.tuning(|t| t.first_epoch = (1 << 32) - 3));
        (0..8).for_each(|salt| rig.good_round(salt));
    });
}

#[test]
fn a_captured_sequence_replays_with_new_routing_and_mixes_with_eager_calls() {
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        rig.good_round(0);
        rig.stream.begin_capture().unwrap();
        let tokens = rig.tokens(0).count(TokenCount::Device(rig.count.view()));
        let handle = rig.enqueue(&tokens, rig.capacity).unwrap();
        let graph = rig.stream.end_capture().unwrap();
        for salt in 1..6 {
            let count = (salt + rig.rank) % 3;
            rig.count.write(0, &(count as i32).to_ne_bytes()).unwrap();
            rig.route(&[[salt as i32, 7], [3, 6 - salt as i32 % 3]], salt);
            graph.launch(&rig.stream).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap();
            rig.expect_own_rows(count, salt);
            rig.good_round(salt + 10);
        }
        drop(handle);
    });
}
