//! Several contexts of a rank side by side, and contexts that are built while something is captured. On the CPU device
//! or, with `TOKENYARD_TEST_DEVICE=cuda`, on GPUs, which ranks share where there are fewer; there one test at a time
//! (`--test-threads=1`), since a framework's capture and budgets concern the whole process.

use crate::rig;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rig::{MAX_TOKENS, PATIENCE, Rig, builder, on_ranks, test_device};
use tokenyard::internals::kernels::{SeededConfig, seeded_world};
use tokenyard::*;

/// Enqueues a dispatch and a combine on the context's own stream.
fn enqueue(rig: &Rig, salt: usize) -> Handle {
    let choices = std::array::from_fn::<_, MAX_TOKENS, _>(|token| {
        let first = (rig.rank + 3 * token + salt) % rig::EXPERTS;
        [first as i32, ((first + 3) % rig::EXPERTS) as i32]
    });
    rig.route(&choices, salt);
    rig.enqueue(&rig.tokens(MAX_TOKENS), rig.capacity).unwrap()
}

/// A graph of what `enqueue` enqueues.
fn record(rig: &Rig, salt: usize) -> Graph {
    rig.stream.begin_capture().unwrap();
    drop(enqueue(rig, salt));
    rig.stream.end_capture().unwrap()
}

/// The rank's GPU; without one, prints that this test is skipped.
fn gpu(world: &World) -> Option<Device> {
    let device = test_device(world);
    if device.ordinal().is_none() {
        println!("skipped: no GPU is asked for, and on the CPU device there is nothing to refuse");
        return None;
    }
    Some(device)
}

fn expect(rig: &Rig, salt: usize) {
    rig.stream.synchronize(PATIENCE).unwrap();
    rig.ep.check().unwrap();
    rig.expect_own_rows(MAX_TOKENS, salt);
}

#[test]
fn two_contexts_on_two_streams_run_at_once() {
    on_ranks(2, |world| {
        let device = test_device(&world);
        let contexts = [Rig::on(&world, device.clone(), |b| b), Rig::on(&world, device, |b| b)];
        for salt in 0..6 {
            // Each rank begins with another one, so neither's calls come to an end before both contexts' are under way.
            let order = if world.rank().index() == 0 { [0, 1] } else { [1, 0] };
            let handles = order.map(|context| enqueue(&contexts[context], salt + 10 * context));
            world.barrier("all are enqueued").unwrap();
            (0..2).for_each(|context| expect(&contexts[context], salt + 10 * context));
            drop(handles);
        }
        world.barrier("done").unwrap();
    });
}

#[test]
fn a_context_of_a_past_generation_is_refused_at_once() {
    on_ranks(2, |world| {
        let before = Rig::new(&world);
        before.good_round(0);
        let graph = record(&before, 1);
        graph.launch(&before.stream).unwrap();
        self::expect(&before, 1);
        let next = world.regroup(1, &[Rank(0), Rank(1)]).unwrap();
        let start = std::time::Instant::now();
        let expect = |error: Option<Error>| {
            let Some(error) = error else { panic!("nothing was refused") };
            let (text, rank) = (error.to_string(), format!("rank {}:", world.rank()));
            assert!(matches!(error, Error::Generation { generation: 0, newest: 1, .. }), "{error:?}");
            assert!(text.starts_with(&rank) && error.is_fatal(), "{text}");
        };
        expect(before.ep.check().err());
        expect(before.round(MAX_TOKENS, before.capacity).err());
        expect(AllToAll::builder(&world).build().err());
        expect(graph.launch(&before.stream).err());
        before.stream.synchronize(PATIENCE).unwrap();
        assert!(start.elapsed() < std::time::Duration::from_secs(5), "without waiting for anybody");
        let after = Rig::new(&next);
        after.good_round(1);
        record(&after, 2).launch(&after.stream).unwrap();
        self::expect(&after, 2);
        next.barrier("done").unwrap();
    });
}

#[test]
fn what_another_context_sent_is_refused() {
    on_ranks(1, |world| {
        let rigs = [Rig::new(&world), Rig::new(&world)];
        rigs.iter().for_each(|rig| rig.route_all(0));
        let [own, other] = &rigs;
        let receive = |rig: &Rig, sent| rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity));
        let send = |rig: &Rig| rig.ep.dispatch_send(&rig.stream, &rig.tokens(MAX_TOKENS)).unwrap();
        let (sent, theirs) = (send(own), send(other));
        let refused = receive(own, theirs).unwrap_err();
        assert!(matches!(refused.error, Error::Argument { name: "sent", .. }), "{refused}");
        let (handle, strange) = (receive(own, sent).unwrap(), receive(other, *refused.given).unwrap());
        let refused = own.ep.combine_send(&own.stream, &strange, &own.expert_rows()).unwrap_err();
        assert!(matches!(refused, Error::Argument { name: "handle", .. }), "{refused}");
        let sent = own.ep.combine_send(&own.stream, &handle, &own.expert_rows()).unwrap();
        let theirs = other.ep.combine_send(&other.stream, &strange, &other.expert_rows()).unwrap();
        let refused = own.ep.combine_recv(&own.stream, theirs, &own.combined()).unwrap_err();
        assert!(matches!(refused.error, Error::Argument { name: "sent", .. }), "{refused}");
        for (rig, sent) in [(own, sent), (other, *refused.given)] {
            rig.ep.combine_recv(&rig.stream, sent, &rig.combined()).unwrap();
            expect(rig, 0);
        }
    });
}

/// A rank without experts has an output of no rows, whatever room it names for each expert.
#[test]
fn columns_of_scales_that_no_number_counts_are_refused_where_a_rank_has_no_experts() {
    let mut worlds = World::threads(2).unwrap();
    let (other, world) = (worlds.remove(1), worlds.remove(0));
    let build = |world: &World, device: &Device| {
        let placement = Placement::table(vec![0; rig::EXPERTS], 2).unwrap();
        builder(world, device).hidden(128).format(RowFormat::FP8_F32).placement(placement).build().unwrap()
    };
    let peer = std::thread::spawn(move || drop(build(&world, &test_device(&world))));
    let device = test_device(&other);
    let (ep, stream) = (build(&other, &device), device.new_stream().unwrap());
    let memory = device.alloc(4096).unwrap();
    let scales = ScaleView::new(memory.view(), 4, 4);
    let tokens = Tokens::new(memory.view(), memory.view(), TokenCount::Host(1));
    let tokens = tokens.topk_weight(memory.view()).scales(scales);
    for per_expert in [usize::MAX, usize::MAX - 3, 1 << 32] {
        let output = Output::new(Layout::Masked { per_expert }, memory.view(), memory.view());
        let output = output.scales(memory.view()).scale_order(ScaleOrder::ColumnMajor);
        let why = ep.dispatch(&stream, &tokens, &output).unwrap_err().to_string();
        assert!(why.contains("at most 2^32 - 1 words apart"), "{why}");
    }
    peer.join().unwrap();
}

/// As above: the alignment would be cut to 32 bits.
#[test]
fn starts_that_are_aligned_beyond_int32_are_refused_where_a_rank_has_no_experts() {
    on_ranks(2, |world| {
        let placement = Placement::table(vec![0; rig::EXPERTS], 2).unwrap();
        let rig = Rig::with(&world, |builder| builder.placement(placement.clone()));
        for align in [1 << 31, 1 << 32, (1 << 32) + 1, usize::MAX] {
            let layout = Layout::Contiguous { align, capacity: rig.capacity };
            let output = rig.output(rig.capacity).layout(layout);
            let error = rig.ep.dispatch(&rig.stream, &rig.tokens(1), &output).unwrap_err();
            let text = error.to_string();
            let wanted = format!("argument layout is Contiguous {{ align: {align}, capacity: {} }}: ", rig.capacity);
            assert!(text.starts_with(&wanted) && text.contains("counted in int32"), "{text}");
        }
        rig.good_round(1);
        world.barrier("done").unwrap();
    });
}

/// The context reports one half that was refused as another call's, and then nothing.
fn expect_another_call(rig: &Rig) {
    rig.stream.synchronize(PATIENCE).unwrap();
    let error = rig.ep.check().unwrap_err();
    assert!(matches!(error, Error::Order { .. }) && !error.is_fatal(), "{error}");
    assert!(error.to_string().contains("by another call"), "{error}");
    rig.ep.check().unwrap();
}

/// A send that is refused as one too many; its half is received instead of the first one's, which then can still be.
#[test]
fn a_dispatch_that_another_call_sent_is_not_received() {
    for (arriving, round) in [(MAX_TOKENS, None), (0, None), (0, Some(1))] {
        on_ranks(2, |world| {
            let rig = Rig::with(&world, |b| b.tuning(|t| (t.ll_tokens, t.round_tokens) = (Some(arriving), round)));
            rig.route_all(1);
            let sent = rig.ep.dispatch_send(&rig.stream, &rig.tokens(MAX_TOKENS)).unwrap();
            let extra = rig.ep.dispatch_send(&rig.stream, &rig.tokens(1)).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            let error = rig.ep.check().unwrap_err();
            assert!(error.to_string().contains("another cannot be sent"), "{error}");
            let stranger = rig.ep.dispatch_recv(&rig.stream, extra, &rig.output(rig.capacity)).unwrap();
            expect_another_call(&rig);
            let handle = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity)).unwrap();
            rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
            expect(&rig, 1);
            drop(stranger);
            rig.good_round(2);
            world.barrier("done").unwrap();
        });
    }
}

/// Of the same handle, so that only the call differs.
#[test]
fn a_combine_that_another_call_sent_is_not_received() {
    for round in [None, Some(1)] {
        on_ranks(2, |world| {
            let rig = Rig::with(&world, |b| b.tuning(|t| t.round_tokens = round));
            rig.route_all(1);
            let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
            let zeros = rig.ep.device().alloc(rig.rows.len()).unwrap();
            let sent = rig.ep.combine_send(&rig.stream, &handle, &rig.expert_rows()).unwrap();
            let pitch = rig.expert_rows().pitch_bytes.unwrap();
            let extra = rig.ep.combine_send(&rig.stream, &handle, &Rows::new(zeros.view()).pitch_bytes(pitch)).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            let error = rig.ep.check().unwrap_err();
            assert!(error.to_string().contains("another cannot be sent"), "{error}");
            rig.ep.combine_recv(&rig.stream, extra, &rig.combined()).unwrap();
            expect_another_call(&rig);
            rig.ep.combine_recv(&rig.stream, sent, &rig.combined()).unwrap();
            expect(&rig, 1);
            rig.good_round(2);
            world.barrier("done").unwrap();
        });
    }
}

/// Graphs of halves, launched in another order than their calls were made.
#[test]
fn a_graph_does_not_receive_what_another_call_sent() {
    for arriving in [MAX_TOKENS, 0] {
        on_ranks(2, |world| {
            let rig = Rig::with(&world, |b| b.tuning(|t| t.ll_tokens = Some(arriving)));
            rig.route_all(1);
            let record = || {
                rig.stream.begin_capture().unwrap();
                let sent = rig.ep.dispatch_send(&rig.stream, &rig.tokens(MAX_TOKENS)).unwrap();
                let send = rig.stream.end_capture().unwrap();
                rig.stream.begin_capture().unwrap();
                let handle = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity)).unwrap();
                (send, rig.stream.end_capture().unwrap(), handle)
            };
            let (one, other) = (record(), record());
            for salt in 1..4 {
                rig.route_all(salt);
                one.0.launch(&rig.stream).unwrap();
                other.1.launch(&rig.stream).unwrap();
                expect_another_call(&rig);
                one.1.launch(&rig.stream).unwrap();
                rig.ep.combine(&rig.stream, &one.2, &rig.expert_rows(), &rig.combined()).unwrap();
                expect(&rig, salt);
            }
            world.barrier("done").unwrap();
        });
    }
}

/// A receiving half in rounds whose handle is empty: the first round reports that, and later rounds report nothing.
#[test]
fn the_first_launch_of_a_call_in_rounds_reports_why_it_is_refused() {
    for round in [None, Some(1)] {
        on_ranks(1, |world| {
            let rig = Rig::with(&world, |b| b.tuning(|t| t.round_tokens = round));
            rig.route_all(1);
            rig.stream.begin_capture().unwrap();
            let sent = rig.ep.dispatch_send(&rig.stream, &rig.tokens(MAX_TOKENS)).unwrap();
            let send = rig.stream.end_capture().unwrap();
            rig.stream.begin_capture().unwrap();
            let handle = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity)).unwrap();
            let receive = rig.stream.end_capture().unwrap();
            rig.stream.begin_capture().unwrap();
            let sent = rig.ep.combine_send(&rig.stream, &handle, &rig.expert_rows()).unwrap();
            let send_back = rig.stream.end_capture().unwrap();
            rig.stream.begin_capture().unwrap();
            rig.ep.combine_recv(&rig.stream, sent, &rig.combined()).unwrap();
            let receive_back = rig.stream.end_capture().unwrap();
            [&send, &receive, &send_back, &send].iter().for_each(|graph| graph.launch(&rig.stream).unwrap());
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap();
            receive_back.launch(&rig.stream).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            let error = rig.ep.check().unwrap_err().to_string();
            assert!(error.contains("a handle whose dispatch has not been received"), "{round:?}: {error}");
            rig.ep.check().unwrap();
        });
    }
}

/// A fused call holds up what its stream has behind it, until all ranks have made it.
#[test]
fn fused_calls_in_other_orders_need_streams_of_their_own_or_end_with_the_rule() {
    for own_stream in [true, false] {
        on_ranks(2, |world| {
            let rig = Rig::with(&world, |b| b.timeout(if own_stream { PATIENCE } else { Duration::from_millis(700) }));
            let second = rig.ep.device().new_stream().unwrap();
            rig.route_all(1);
            let dispatch = || rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
            let combine = |handle: &Handle| {
                let stream = if own_stream { &second } else { &rig.stream };
                rig.ep.combine(stream, handle, &rig.expert_rows(), &rig.combined()).unwrap();
            };
            let first = dispatch();
            rig.stream.synchronize(PATIENCE).unwrap();
            world.barrier("first dispatched").unwrap();
            let scratch = rig.ep.device().alloc(rig.rows.len()).unwrap();
            let output = rig.output(rig.capacity).rows(scratch.view());
            let again = || rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &output).unwrap();
            if world.rank() == Rank(0) {
                combine(&first);
                drop(again());
            } else {
                drop(again());
                combine(&first);
            }
            rig.stream.synchronize(PATIENCE).unwrap();
            second.synchronize(PATIENCE).unwrap();
            if own_stream {
                rig.ep.check().unwrap();
                rig.expect_own_rows(MAX_TOKENS, 1);
            } else {
                let error = rig.ep.check().unwrap_err();
                assert!(matches!(error, Error::Timeout { .. }), "{error}");
                assert!(
                    error.to_string().contains("all ranks must enqueue their calls on a stream in the same"),
                    "{error}"
                );
            }
            world.barrier("done").unwrap();
        });
    }
}

/// As after a combine that was refused on one rank alone. With LL rows, and with tagged rows.
#[test]
fn a_combine_of_another_dispatch_than_the_peers_is_refused_on_all_ranks() {
    for arriving in [MAX_TOKENS, 0] {
        on_ranks(3, |world| {
            let rank = world.rank().index();
            let rig = Rig::with(&world, |b| b.tuning(|t| t.ll_tokens = Some(arriving)));
            rig.route_all(0);
            let dispatch = || rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
            let handles = [dispatch(), dispatch()];
            world.barrier("all have dispatched").unwrap();
            let handle = &handles[usize::from(rank != 1)];
            rig.ep.combine(&rig.stream, handle, &rig.expert_rows(), &rig.combined()).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            let error = rig.ep.check().unwrap_err();
            let text = error.to_string();
            let expected = match rank {
                1 => "the handle of dispatch 1 here and that of dispatch 2 on rank ",
                _ => "the handle of dispatch 2 here and that of dispatch 1 on rank 1,",
            };
            assert!(matches!(error, Error::Order { .. }) && error.is_fatal() && text.contains(expected), "{text}");
            assert_eq!(rig.ep.check().map_err(|again| again.to_string()), Err(text), "the context stays closed");
            world.barrier("done").unwrap();
        });
    }
}

/// What a rank does while ranks combine different dispatches, which closes their contexts.
#[derive(Clone, Copy, PartialEq)]
enum Meanwhile {
    /// The same launch begins.
    Nothing,
    Halves,
    Dispatches,
    Barriers,
}

/// Two ranks combine different dispatches under a schedule.
fn closed_meanwhile(seed: u64, meanwhile: Meanwhile) {
    let worlds = World::threads(2).unwrap();
    let report = seeded_world(SeededConfig { seed, hold_stores: false, stopped: None }, 2, |rank, device| {
        let arriving = if seed.is_multiple_of(2) { 0 } else { MAX_TOKENS };
        let rig = Rig::on(&worlds[rank], device.clone(), |b| {
            b.timeout(Duration::from_millis(500))
                .sms(2 + 2 * (seed % 2) as u32)
                .tuning(|t| t.ll_tokens = Some(arriving))
        });
        rig.route_all(seed as usize);
        let (tokens, output) = (rig.tokens(MAX_TOKENS), rig.output(rig.capacity));
        let dispatch = || rig.ep.dispatch(&rig.stream, &tokens, &output).unwrap();
        let handles = [dispatch(), dispatch()];
        let (beside, rows) = (device.new_stream().unwrap(), device.alloc(rig.rows.len()).unwrap());
        let counts = device.alloc(rig::EXPERTS * 4).unwrap();
        let mut others = Vec::new();
        if matches!(meanwhile, Meanwhile::Dispatches | Meanwhile::Barriers) {
            rig.stream.synchronize(PATIENCE).unwrap();
        }
        // A context that is closed by then refuses them.
        match meanwhile {
            Meanwhile::Dispatches => {
                let output = rig.output(rig.capacity).rows(rows.view()).expert_count(counts.view());
                others.extend((0..3).filter_map(|_| rig.ep.dispatch(&beside, &tokens, &output).ok()));
            }
            Meanwhile::Barriers => assert!((0..12).all(|_| rig.ep.barrier(&beside).is_ok())),
            _ => {}
        }
        if meanwhile == Meanwhile::Halves {
            let sent = rig.ep.combine_send(&rig.stream, &handles[rank], &rig.expert_rows()).unwrap();
            let _ = rig.ep.combine_recv(&rig.stream, sent, &rig.combined());
        } else {
            rig.ep.combine(&rig.stream, &handles[rank], &rig.expert_rows(), &rig.combined()).unwrap();
        }
        [&rig.stream, &beside].iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
        let error = rig.ep.check().unwrap_err();
        assert!(matches!(error, Error::Order { .. }) && error.is_fatal(), "seed {seed}: {error}");
    });
    assert_eq!(report.failure, None, "seed {seed}: {:?}", report.hang_report);
}

/// Blocks of a launch, or of a concurrent one, may begin while another block closes the context. If only some threads
/// of a block saw the closing, the others would wait for them for ever.
#[test]
fn threads_of_a_block_agree_whether_their_context_is_closed() {
    (0..120).for_each(|seed| closed_meanwhile(seed, Meanwhile::Nothing));
    (0..20).for_each(|seed| closed_meanwhile(seed, Meanwhile::Halves));
    // Lanes of a warp that sends see it differently in one of 180.
    (0..1000).for_each(|seed| closed_meanwhile(seed, Meanwhile::Dispatches));
    (0..60).for_each(|seed| closed_meanwhile(seed, Meanwhile::Barriers));
}

/// Where `closed` lies in `ty_state`.
const CLOSED: u64 = 92;

/// The error that closed the context is reported; later launches do nothing, the general dispatch before the
/// specialised combine, too.
#[test]
fn launches_of_a_closed_context_report_nothing() {
    for seed in 0..600 {
        let worlds = World::threads(1).unwrap();
        let report = seeded_world(SeededConfig { seed, hold_stores: false, stopped: None }, 1, |rank, device| {
            let rig = Rig::on(&worlds[rank], device, |b| b);
            rig.route_all(1);
            let [_, state] = rig.ep.addresses().unwrap();
            // SAFETY: an aligned word of the state of a context that is alive, and whose streams are idle.
            unsafe { ((state + CLOSED) as *mut u32).write_volatile(1) };
            rig.ep.barrier(&rig.stream).unwrap();
            let output = rig.output(rig.capacity).zero_padding(true);
            let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &output).unwrap();
            rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            assert_eq!(rig.ep.check(), Ok(()), "seed {seed}");
        });
        assert_eq!(report.failure, None, "seed {seed}: {:?}", report.hang_report);
    }
}

#[test]
fn calls_of_two_threads_do_not_mix_their_launches() {
    const THREADS: usize = 2;
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |builder| builder.tuning(|t| t.round_tokens = Some(1)));
        rig.route_all(0);
        let together = std::sync::Barrier::new(THREADS);
        for _ in 0..200 {
            std::thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        together.wait();
                        let output = rig.output(rig.capacity);
                        drop(rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &output).unwrap());
                    });
                }
            });
            rig.stream.synchronize(PATIENCE).unwrap();
            assert_eq!(rig.ep.check(), Ok(()));
        }
        rig.good_round(1);
    });
}

#[test]
fn contexts_that_exceed_a_gpu_together_are_refused_until_one_goes() {
    on_ranks(1, |world| {
        let Some(device) = gpu(&world) else { return };
        let all = device.multiprocessors();
        let first = builder(&world, &device).sms(all).build().unwrap();
        let why = builder(&world, &device).sms(1).build().err().map(|why| why.to_string()).unwrap_or_default();
        assert!(why.contains("sms is 1") && why.contains(&format!("with {all} of other contexts")), "{why}");
        drop(first);
        Rig::on(&world, device, |b| b.sms(all)).good_round(1);
    });
}

/// Every CPU device is another one.
#[test]
fn a_stream_and_a_graph_of_another_device_are_refused_by_name() {
    on_ranks(1, |world| {
        let rig = Rig::new(&world);
        let elsewhere = Device::cpu().unwrap().new_stream().unwrap();
        let refused = |outcome: Result<()>| {
            let why = outcome.unwrap_err().to_string();
            assert!(why.starts_with("argument stream is of CPU device "), "{why}");
        };
        rig.route_all(0);
        let (tokens, output) = (rig.tokens(MAX_TOKENS), rig.output(rig.capacity));
        refused(rig.ep.barrier(&elsewhere));
        refused(rig.ep.dispatch(&elsewhere, &tokens, &output).map(drop));
        refused(rig.ep.dispatch_send(&elsewhere, &tokens).map(drop));
        let sent = rig.ep.dispatch_send(&rig.stream, &tokens).unwrap();
        let back = rig.ep.dispatch_recv(&elsewhere, sent, &output).unwrap_err();
        refused(Err(back.error));
        let handle = rig.ep.dispatch_recv(&rig.stream, *back.given, &output).unwrap();
        let (rows, sums) = (rig.expert_rows(), rig.combined());
        refused(rig.ep.combine(&elsewhere, &handle, &rows, &sums));
        refused(rig.ep.combine_send(&elsewhere, &handle, &rows).map(drop));
        let sent = rig.ep.combine_send(&rig.stream, &handle, &rows).unwrap();
        let back = rig.ep.combine_recv(&elsewhere, sent, &sums).unwrap_err();
        refused(Err(back.error));
        rig.ep.combine_recv(&rig.stream, *back.given, &sums).unwrap();
        expect(&rig, 0);
        let graph = record(&rig, 1);
        refused(graph.launch(&elsewhere));
        graph.launch(&rig.stream).unwrap();
        expect(&rig, 1);
    });
}

#[test]
fn a_context_can_be_built_while_an_own_capture_goes_on() {
    on_ranks(2, |world| {
        let early = Rig::new(&world);
        early.good_round(0);
        early.stream.begin_capture().unwrap();
        let late = Rig::new(&world);
        let handle = enqueue(&early, 1);
        let graph = early.stream.end_capture().unwrap();
        late.good_round(2);
        graph.launch(&early.stream).unwrap();
        expect(&early, 1);
        drop(handle);
        world.barrier("done").unwrap();
    });
}

/// A stream that captures still runs earlier work.
#[test]
fn a_context_dropped_during_a_capture_waits_for_what_came_before_it() {
    let peer_came = AtomicBool::new(false);
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        if world.rank().index() == 1 {
            std::thread::sleep(Duration::from_millis(300));
            peer_came.store(true, Ordering::SeqCst);
            drop(enqueue(&rig, 1));
            expect(&rig, 1);
            world.barrier("done").unwrap();
            return;
        }
        let handle = enqueue(&rig, 1);
        rig.stream.begin_capture().unwrap();
        let (context, stream) = (rig.ep, rig.stream);
        drop(context);
        assert!(peer_came.load(Ordering::SeqCst), "the context went while its kernels waited for the peer");
        stream.end_capture().unwrap();
        drop(handle);
        world.barrier("done").unwrap();
    });
}

/// Frameworks capture so that nothing else may allocate meanwhile.
#[cfg(feature = "cuda")]
#[test]
fn a_context_that_is_built_within_a_frameworks_capture_is_refused_and_the_next_is_not() {
    use cudarc::driver::sys;
    on_ranks(1, |world| {
        let Some(device) = gpu(&world) else { return };
        let stream = device.new_stream().unwrap();
        device.make_current().unwrap();
        let raw = stream.raw() as sys::CUstream;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream is live, and nothing else is enqueued on it.
        assert_eq!(unsafe { sys::cuStreamBeginCapture_v2(raw, mode) }, sys::CUresult::CUDA_SUCCESS);
        let why = builder(&world, &device).build().err().map(|why| why.to_string()).unwrap_or_default();
        let mut graph: sys::CUgraph = std::ptr::null_mut();
        // SAFETY: as above; the graph is destroyed where there is one.
        unsafe {
            let _ = sys::cuStreamEndCapture(raw, &mut graph);
            if !graph.is_null() {
                let _ = sys::cuGraphDestroy(graph);
            }
        }
        assert!(why.contains("before a capture begins"), "{why}");
        Rig::on(&world, device, |b| b).good_round(1);
    });
}
