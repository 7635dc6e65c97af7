//! Safe code cannot hand kernels memory that is freed while they use it.

use crate::rig;

use rig::{MAX_TOKENS, PATIENCE, Rig, on_ranks, test_device};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokenyard::internals::kernels::{View, bench};
use tokenyard::*;

const fn is_send<T: Send>() {}
const fn is_send_and_sync<T: Send + Sync>() {}
const _: () = {
    is_send::<Handle>();
    is_send::<Sent>();
    is_send::<CombineSent>();
    is_send::<Graph>();
    is_send_and_sync::<AllToAll>();
    is_send_and_sync::<View>();
    is_send_and_sync::<Stream>();
};

// ---- views

/// Freeing a buffer waits for the work of its own device alone.
#[test]
fn views_of_another_device_are_refused_by_name() {
    on_ranks(1, |world| {
        let rig = Rig::new(&world);
        let other = Device::cpu().unwrap();
        let (foreign, foreign_stream) = (other.alloc(1 << 16).unwrap(), other.new_stream().unwrap());
        let refused = |outcome: Result<()>, name: &str| {
            let why = outcome.unwrap_err().to_string();
            let begins = why.starts_with(&format!("argument {name} is of CPU device "));
            assert!(begins && why.contains(": give one of "), "{why}");
        };
        refused(rig.stream.fill(&foreign.view(), 0), "view");
        let own = rig.out.slice(0, 16).unwrap();
        let part = foreign.slice(0, 16).unwrap();
        refused(rig.stream.copy(&own, &part), "src");
        refused(rig.stream.copy(&part, &own), "dst");
        let (tokens, output) = (|| rig.tokens(MAX_TOKENS), || rig.output(rig.capacity));
        let dispatch = |tokens: Tokens, output: Output| rig.ep.dispatch(&rig.stream, &tokens, &output).map(drop);
        refused(dispatch(tokens().x(foreign.view()), output()), "x");
        refused(dispatch(tokens().topk_idx(foreign.view()), output()), "topk_idx");
        refused(dispatch(tokens().topk_weight(foreign.view()), output()), "topk_weight");
        refused(dispatch(tokens().count(TokenCount::Device(foreign.view())), output()), "count");
        refused(dispatch(tokens(), output().rows(foreign.view())), "rows");
        refused(dispatch(tokens(), output().expert_count(foreign.view())), "expert_count");
        refused(dispatch(tokens(), output().source(foreign.view())), "source");
        refused(dispatch(tokens(), output().host_counts(foreign.view())), "host_counts");
        refused(rig.ep.dispatch(&foreign_stream, &tokens(), &output()).map(drop), "stream");
        let handle = rig.ep.dispatch(&rig.stream, &tokens(), &output()).unwrap();
        let combine = |rows: Rows, out: Combined| rig.ep.combine(&rig.stream, &handle, &rows, &out);
        refused(combine(rig.expert_rows().rows(foreign.view()), rig.combined()), "rows");
        refused(combine(rig.expert_rows(), rig.combined().out(foreign.view())), "out");
        combine(rig.expert_rows(), rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
    });
}

#[test]
fn a_view_keeps_the_memory_of_a_buffer_that_was_dropped() {
    on_ranks(1, |world| {
        let device = test_device(&world);
        let stream = device.new_stream().unwrap();
        let buffer = device.alloc(1 << 16).unwrap();
        buffer.fill(7).unwrap();
        let view = buffer.slice(1 << 15, 16).unwrap();
        drop(buffer);
        // Memory that was freed would be given out again, and overwritten.
        let others: Vec<DeviceBuffer> = (0..64).map(|_| device.alloc(1 << 16).unwrap()).collect();
        others.iter().for_each(|other| other.fill(1).unwrap());
        let seen = device.alloc(16).unwrap();
        stream.copy(&seen.view(), &view).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        let mut bytes = [0; 16];
        seen.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 16]);
    });
}

/// Whether ranks of the world share a GPU.
fn shares_gpu(world: &World) -> bool {
    test_device(world).kind() == DeviceKind::Cuda && Device::cuda_count() < world.size()
}

/// The second round reads its tokens in the receiving half.
#[test]
fn what_is_under_way_keeps_the_input_of_later_rounds() {
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |b| b.tuning(|t| t.round_tokens = Some(MAX_TOKENS / 2)));
        rig.route(&[[0, 4], [1, 5], [2, 6], [3, 7]], 1);
        let device = rig.ep.device();
        let copies = [&rig.x, &rig.idx, &rig.weight].map(|buffer| {
            let copy = device.alloc(buffer.len()).unwrap();
            rig.stream.copy(&copy.view(), &buffer.view()).unwrap();
            copy
        });
        let [x, idx, weight] = &copies;
        let input = rig.tokens(4).x(x.view()).topk_idx(idx.view()).topk_weight(weight.view());
        let rows = device.alloc(rig.rows.len()).unwrap();
        let sent = rig.ep.dispatch_send(&rig.stream, &input).unwrap();
        let lengths = copies.each_ref().map(DeviceBuffer::len);
        rig.stream.synchronize(PATIENCE).unwrap();
        // CUDA frees memory once the GPU's kernels have ended, and holds up all threads that share it until then: the
        // receiving half, which drops the input, would wait for a peer that cannot enqueue its own.
        let _kept = shares_gpu(&world).then(|| input.clone());
        drop((copies, input));
        // Freed memory would be given out again.
        let others: Vec<_> = (0..64).flat_map(|_| lengths.map(|bytes| device.alloc(bytes).unwrap())).collect();
        others.iter().for_each(|other| other.fill(0).unwrap());
        // On a GPU that ranks share, memory is allocated once no kernel waits for a peer.
        world.barrier("dispatch has its memory").unwrap();
        let handle = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity)).unwrap();
        rig.stream.copy(&rows.view(), &rig.rows.view()).unwrap();
        let sent = {
            let rows = rig.expert_rows().rows(rows.view());
            rig.ep.combine_send(&rig.stream, &handle, &rows).unwrap()
        };
        let bytes = rows.len();
        rig.stream.synchronize(PATIENCE).unwrap();
        let _rows_kept = shares_gpu(&world).then(|| rows.view());
        drop(rows);
        let others: Vec<_> = (0..64).map(|_| device.alloc(bytes).unwrap()).collect();
        others.iter().for_each(|other| other.fill(0).unwrap());
        world.barrier("combine has its memory").unwrap();
        rig.ep.combine_recv(&rig.stream, sent, &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        rig.expect_own_rows(MAX_TOKENS, 1);
        world.barrier("done").unwrap();
    });
}

// ---- copies that the host waits for

/// A kernel copies a buffer while the host overwrites it: the copy is of one content or another, never of two.
#[test]
fn the_host_writes_between_kernels_and_not_during_one() {
    const BYTES: usize = 1 << 20;
    let device = Device::cpu().unwrap();
    let stream = device.new_stream().unwrap();
    let (a, b) = (device.alloc(BYTES).unwrap(), device.alloc(BYTES).unwrap());
    a.fill(0).unwrap();
    let mut seen = vec![0; BYTES];
    for round in 0..100u8 {
        bench::push(&stream, &a.view(), &[b.view()], &[BYTES]).unwrap();
        match round % 2 {
            0 => a.fill(round).unwrap(),
            _ => a.write(0, &[round; BYTES]).unwrap(),
        }
        b.read(0, &mut seen).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        b.read(0, &mut seen).unwrap();
        assert!(seen.iter().all(|byte| *byte == seen[0]), "round {round}: a copy of two contents");
    }
}

#[test]
fn counts_are_read_from_host_memory_without_unsafe_code() {
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        let local = rig::EXPERTS / 2;
        let counts = rig.ep.device().alloc_host((local + 1) * 4).unwrap();
        // Of each rank three tokens go to expert 0 and to this rank's second.
        let second = (world.rank().index() * local + 1) as i32;
        rig.route(&[[0, second], [0, second], [0, second]], 1);
        let output = rig.output(rig.capacity).host_counts(counts.view());
        // On a GPU that ranks share, memory is allocated while no kernel waits for a peer.
        world.barrier("counts have their memory").unwrap();
        rig.ep.dispatch(&rig.stream, &rig.tokens(3), &output).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let (mut all, mut last) = ([-1; 5], [-1; 1]);
        counts.read_i32(0, &mut all).unwrap();
        counts.read_i32(local, &mut last).unwrap();
        let wanted = if world.rank() == Rank(0) { [6, 3, 0, 0, 9] } else { [0, 3, 0, 0, 3] };
        assert_eq!((all, last), (wanted, [wanted[4]]));
        for (first, numbers) in [(0, 6), (local + 1, 1), (usize::MAX, 2), (6, 0)] {
            let error = counts.read_i32(first, &mut vec![0; numbers]).unwrap_err().to_string();
            let value =
                format!("argument first is {first}, with {numbers} from there: stay within the buffer's 5 numbers");
            assert_eq!(error, value);
        }
        counts.read_i32(local + 1, &mut []).unwrap();
        world.barrier("done").unwrap();
    });
}

#[test]
fn copies_go_on_while_a_kernel_waits() {
    let device = Device::cpu().unwrap();
    let stream = device.new_stream().unwrap();
    let (words, buffer) = (device.alloc_host(16).unwrap(), device.alloc(16).unwrap());
    bench::hold(&stream, &words.view(), 1, PATIENCE).unwrap();
    buffer.write(0, &[5; 16]).unwrap();
    let mut seen = [0; 16];
    buffer.read(0, &mut seen).unwrap();
    assert_eq!(seen, [5; 16]);
    assert!(stream.synchronize(Duration::from_millis(1)).is_err(), "the kernel was to wait still");
    // SAFETY: an aligned word in memory that host and device share, accessed atomically by both.
    unsafe { AtomicU64::from_ptr(words.host_ptr().cast()) }.store(1, Ordering::Release);
    stream.synchronize(PATIENCE).unwrap();
}

// ---- graphs

/// Holds a stream until it is released.
struct Held {
    words: HostBuffer,
}

impl Held {
    fn hold(stream: &Stream) -> Held {
        let words = stream.device().alloc_host(16).unwrap();
        bench::hold(stream, &words.view(), 1, Duration::from_secs(60)).unwrap();
        Held { words }
    }

    fn let_go(&self) {
        // SAFETY: an aligned word in memory that host and device share, accessed atomically by both.
        unsafe { AtomicU64::from_ptr(self.words.host_ptr().cast()) }.store(1, Ordering::Release);
    }
}

const MOMENT: Duration = Duration::from_millis(100);

fn is_held(stream: &Stream) -> bool {
    stream.synchronize(MOMENT).is_err()
}

/// Memory that was freed would be given out again, and overwritten.
fn overwrite_what_is_free(device: &Device) {
    let lengths = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];
    let others: Vec<_> = (0..32).flat_map(|_| lengths.map(|bytes| device.alloc(bytes).unwrap())).collect();
    others.iter().for_each(|other| other.fill(0xFF).unwrap());
}

#[test]
fn a_graph_keeps_its_context_its_handles_and_its_buffers() {
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        rig.good_round(0);
        rig.route_all(1);
        rig.stream.begin_capture().unwrap();
        let tokens = rig.tokens(0).count(TokenCount::Device(rig.count.view()));
        rig.count.write(0, &(MAX_TOKENS as i32).to_ne_bytes()).unwrap();
        drop(rig.enqueue(&tokens, rig.capacity).unwrap());
        let graph = rig.stream.end_capture().unwrap();
        let wanted: Vec<u8> = (0..MAX_TOKENS).flat_map(|token| rig.row(token, 1)).collect();
        let (device, sums) = (rig.ep.device().clone(), rig.out.view());
        drop((rig, tokens));
        overwrite_what_is_free(&device);
        let stream = device.new_stream().unwrap();
        let seen = device.alloc(wanted.len()).unwrap();
        // On a GPU that ranks share, memory is allocated and freed while no kernel waits for a peer.
        world.barrier("what is free is overwritten").unwrap();
        for _ in 0..3 {
            stream.fill(&sums, 0xEE).unwrap();
            graph.launch(&stream).unwrap();
            stream.copy(&seen.view(), &sums).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            let mut bytes = vec![0; wanted.len()];
            seen.read(0, &mut bytes).unwrap();
            assert_eq!(bytes, wanted);
        }
        world.barrier("done").unwrap();
    });
}

#[test]
fn a_graph_keeps_the_handle_that_it_combines_with() {
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |b| b.tuning(|t| t.handles = 1));
        rig.route_all(1);
        let record = |calls: &dyn Fn() -> Option<Handle>| {
            rig.stream.begin_capture().unwrap();
            let handle = calls();
            (rig.stream.end_capture().unwrap(), handle)
        };
        let (tokens, output) = (rig.tokens(MAX_TOKENS), rig.output(rig.capacity));
        let (dispatch, handle) = record(&|| Some(rig.ep.dispatch(&rig.stream, &tokens, &output).unwrap()));
        let (combine, _) = record(&|| {
            let handle = handle.as_ref().unwrap();
            rig.ep.combine(&rig.stream, handle, &rig.expert_rows(), &rig.combined()).unwrap();
            None
        });
        drop(handle);
        dispatch.launch(&rig.stream).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        // Other rows, of fewer tokens, elsewhere.
        let elsewhere = rig.ep.device().alloc(rig.rows.len()).unwrap();
        let output = output.rows(elsewhere.view());
        drop(rig.ep.dispatch(&rig.stream, &rig.tokens(1), &output).unwrap());
        combine.launch(&rig.stream).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        rig.expect_own_rows(MAX_TOKENS, 1);
    });
}

#[test]
fn fills_and_copies_of_a_graph_keep_their_buffers() {
    let device = Device::cpu().unwrap();
    let stream = device.new_stream().unwrap();
    let seen = device.alloc(512).unwrap();
    let (from, pushed) = (device.alloc(512).unwrap(), device.alloc(512).unwrap());
    from.fill(9).unwrap();
    stream.begin_capture().unwrap();
    bench::push(&stream, &from.view(), &[pushed.view()], &[512]).unwrap();
    stream.copy(&seen.view(), &pushed.view()).unwrap();
    let graph = stream.end_capture().unwrap();
    drop((from, pushed));
    overwrite_what_is_free(&device);
    graph.launch(&stream).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    let mut bytes = [0; 512];
    seen.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [9; 512]);
}

/// It would dispatch into the handle that is being combined.
#[test]
fn a_graph_is_refused_between_the_halves_of_a_combine_with_its_handle() {
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        rig.route_all(1);
        rig.stream.begin_capture().unwrap();
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
        let graph = rig.stream.end_capture().unwrap();
        for _ in 0..2 {
            graph.launch(&rig.stream).unwrap();
            let sent = rig.ep.combine_send(&rig.stream, &handle, &rig.expert_rows()).unwrap();
            let error = graph.launch(&rig.stream).unwrap_err();
            assert!(error.to_string().contains("enqueue its receiving half first") && !error.is_fatal(), "{error}");
            rig.ep.combine_recv(&rig.stream, sent, &rig.combined()).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap();
            rig.expect_own_rows(MAX_TOKENS, 1);
        }
        world.barrier("done").unwrap();
    });
}

#[test]
fn a_dropped_graph_waits_for_its_replays() {
    on_ranks(1, |world| {
        let rig = Rig::new(&world);
        rig.good_round(0);
        rig.stream.begin_capture().unwrap();
        drop(rig.enqueue(&rig.tokens(MAX_TOKENS), rig.capacity).unwrap());
        let graph = rig.stream.end_capture().unwrap();
        let other = rig.ep.device().new_stream().unwrap();
        let held = Held::hold(&other);
        graph.launch(&other).unwrap();
        let gone = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                drop(graph);
                gone.store(true, Ordering::SeqCst);
            });
            std::thread::sleep(MOMENT);
            assert!(!gone.load(Ordering::SeqCst), "the graph went while its kernels were to run");
            held.let_go();
        });
        other.synchronize(PATIENCE).unwrap();
        rig.good_round(1);
    });
}

// ---- order between streams

#[test]
fn calls_of_a_kind_run_one_after_the_other_on_whichever_stream() {
    on_ranks(1, |world| {
        for ordered in [true, false] {
            let rig = Rig::with(&world, |b| if ordered { b } else { b.tuning(|t| t.ordered = false) });
            rig.good_round(0);
            let device = rig.ep.device();
            let [first, second, third] = [(); 3].map(|()| device.new_stream().unwrap());
            let (tokens, output) = (rig.tokens(MAX_TOKENS), rig.output(rig.capacity));
            let early = rig.ep.dispatch(&rig.stream, &tokens, &output).unwrap();
            rig.stream.synchronize(PATIENCE).unwrap();
            let held = Held::hold(&first);
            let handle = rig.ep.dispatch(&first, &tokens, &output).unwrap();
            rig.ep.dispatch(&second, &tokens, &output).unwrap();
            // Combines follow no dispatch by themselves.
            rig.ep.combine(&third, &early, &rig.expert_rows(), &rig.combined()).unwrap();
            third.synchronize(PATIENCE).unwrap();
            assert_eq!((is_held(&first), is_held(&second)), (true, ordered));
            rig.ep.combine(&first, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
            rig.ep.combine(&third, &early, &rig.expert_rows(), &rig.combined()).unwrap();
            rig.ep.barrier(&first).unwrap();
            rig.ep.barrier(&second).unwrap();
            assert_eq!((is_held(&third), is_held(&second)), (ordered, ordered));
            held.let_go();
            [&first, &second, &third].iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
            rig.ep.check().unwrap();
            rig.good_round(1);
        }
    });
}

#[test]
fn replays_run_after_eager_calls_and_these_after_replays() {
    on_ranks(1, |world| {
        let rig = Rig::new(&world);
        rig.good_round(0);
        let record = || {
            rig.stream.begin_capture().unwrap();
            let handle = rig.enqueue(&rig.tokens(MAX_TOKENS), rig.capacity).unwrap();
            (rig.stream.end_capture().unwrap(), handle)
        };
        let (graph, _handle) = record();
        let [first, second] = [(); 2].map(|()| rig.ep.device().new_stream().unwrap());
        let dispatch = |stream: &Stream| {
            drop(rig.ep.dispatch(stream, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap());
        };
        let held = Held::hold(&first);
        dispatch(&first);
        graph.launch(&second).unwrap();
        assert!(is_held(&second), "a replay overtook a call");
        // A recorded call is no call yet.
        drop(record());
        held.let_go();
        second.synchronize(PATIENCE).unwrap();
        let held = Held::hold(&second);
        graph.launch(&second).unwrap();
        dispatch(&first);
        assert!(is_held(&first), "a call overtook a replay");
        held.let_go();
        first.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        rig.good_round(1);
    });
}

// ---- handles

#[test]
fn a_handle_that_came_back_is_used_on_another_stream_after_its_last_use() {
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |b| b.tuning(|t| t.handles = 1));
        rig.route_all(0);
        let (first, second) = (&rig.stream, rig.ep.device().new_stream().unwrap());
        let (tokens, output) = (rig.tokens(MAX_TOKENS), rig.output(rig.capacity));
        let handle = rig.ep.dispatch(&second, &tokens, &output).unwrap();
        second.synchronize(PATIENCE).unwrap();
        let held = Held::hold(first);
        rig.ep.combine(first, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
        drop(handle);
        rig.ep.dispatch(&second, &tokens, &output).unwrap();
        assert!(is_held(&second), "the handle was overwritten ahead of its combine");
        held.let_go();
        second.synchronize(PATIENCE).unwrap();
        first.synchronize(PATIENCE).unwrap();
        rig.expect_own_rows(MAX_TOKENS, 0);
        rig.good_round(1);
    });
}

/// A handle's former contents could lead a combine out of its rows.
#[test]
fn a_combine_on_another_stream_runs_after_its_dispatch_eager_or_replayed() {
    on_ranks(1, |world| {
        for replayed in [false, true] {
            let rig = Rig::new(&world);
            rig.route_all(0);
            let (first, second) = (&rig.stream, rig.ep.device().new_stream().unwrap());
            let dispatch = || rig.ep.dispatch(first, &rig.tokens(MAX_TOKENS), &rig.output(rig.capacity)).unwrap();
            let (handle, held);
            if replayed {
                first.begin_capture().unwrap();
                handle = dispatch();
                let graph = first.end_capture().unwrap();
                held = Held::hold(first);
                graph.launch(first).unwrap();
                std::mem::forget(graph);
            } else {
                held = Held::hold(first);
                handle = dispatch();
            }
            rig.ep.combine(&second, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
            assert!(is_held(&second), "a combine overtook its dispatch");
            held.let_go();
            second.synchronize(PATIENCE).unwrap();
            rig.ep.check().unwrap();
            rig.expect_own_rows(MAX_TOKENS, 0);
        }
    });
}

/// Calls that were enqueued before a capture run eagerly, and have their place in the order.
#[test]
fn calls_on_a_stream_that_captures_by_now_are_followed_all_the_same() {
    on_ranks(1, |world| {
        let rig = Rig::new(&world);
        rig.good_round(0);
        let device = rig.ep.device();
        let (first, [second, third]) = (&rig.stream, [(); 2].map(|()| device.new_stream().unwrap()));
        let (tokens, output) = (rig.tokens(MAX_TOKENS), rig.output(rig.capacity));
        // The third stream has the last combine, so that only the handle orders its next one.
        let early = rig.ep.dispatch(first, &tokens, &output).unwrap();
        rig.ep.combine(&third, &early, &rig.expert_rows(), &rig.combined()).unwrap();
        third.synchronize(PATIENCE).unwrap();
        let held = Held::hold(first);
        let handle = rig.ep.dispatch(first, &tokens, &output).unwrap();
        first.begin_capture().unwrap();
        rig.ep.dispatch(&second, &tokens, &output).unwrap();
        rig.ep.combine(&third, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
        assert_eq!((is_held(&second), is_held(&third)), (true, true), "a call overtook what came before the capture");
        let recorded = rig.ep.dispatch(first, &tokens, &output).unwrap();
        rig.ep.combine(first, &recorded, &rig.expert_rows(), &rig.combined()).unwrap();
        let graph = first.end_capture().unwrap();
        graph.launch(&second).unwrap();
        assert!(is_held(&second), "a replay overtook what it follows");
        held.let_go();
        [first, &second, &third].iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
        rig.ep.check().unwrap();
        rig.good_round(1);
    });
}

/// As above, where a capture takes the handle: its graph waits when it is launched.
#[test]
fn a_graph_that_took_a_handle_comes_after_the_handles_last_use() {
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |b| b.tuning(|t| t.handles = 1));
        rig.route_all(0);
        let (first, second) = (&rig.stream, rig.ep.device().new_stream().unwrap());
        let (tokens, output) = (rig.tokens(MAX_TOKENS), rig.output(rig.capacity));
        // Dispatches follow the last one, which is on the stream of the launch.
        let third = rig.ep.device().new_stream().unwrap();
        let handle = rig.ep.dispatch(&third, &tokens, &output).unwrap();
        third.synchronize(PATIENCE).unwrap();
        let held = Held::hold(first);
        rig.ep.combine(first, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
        drop(handle);
        second.begin_capture().unwrap();
        rig.ep.dispatch(&second, &tokens, &output).unwrap();
        drop(second.end_capture().unwrap());
        // A graph that is never launched has waited for nothing.
        second.begin_capture().unwrap();
        drop(rig.ep.dispatch(&second, &tokens, &output).unwrap());
        let graph = second.end_capture().unwrap();
        graph.launch(&third).unwrap();
        assert!(is_held(&third), "the handle was overwritten ahead of its combine");
        held.let_go();
        third.synchronize(PATIENCE).unwrap();
        first.synchronize(PATIENCE).unwrap();
        rig.expect_own_rows(MAX_TOKENS, 0);
    });
}

#[test]
fn handles_and_halves_may_outlive_their_context() {
    on_ranks(1, |world| {
        let rig = Rig::new(&world);
        rig.route_all(0);
        let handle = rig.enqueue(&rig.tokens(MAX_TOKENS), rig.capacity).unwrap();
        let sent = rig.ep.dispatch_send(&rig.stream, &rig.tokens(MAX_TOKENS)).unwrap();
        let Rig { ep, stream, .. } = rig;
        drop(ep);
        drop(stream);
        drop((handle, sent));
    });
}

// ---- a context that cannot wait any longer

#[test]
fn a_context_whose_kernels_do_not_end_goes_and_leaves_them_their_memory() {
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |b| b.timeout(Duration::from_millis(50)).tuning(|t| t.statistics = true));
        rig.good_round(0);
        rig.route_all(1);
        let held = Held::hold(&rig.stream);
        let handle = rig.enqueue(&rig.tokens(MAX_TOKENS), rig.capacity).unwrap();
        let Rig { ep, stream, out, .. } = rig;
        drop(handle);
        let started = Instant::now();
        drop(ep);
        assert!(started.elapsed() < PATIENCE, "it waited for what does not end");
        assert!(is_held(&stream));
        held.let_go();
        stream.synchronize(PATIENCE).unwrap();
        let mut seen = vec![0; out.len()];
        out.read(0, &mut seen).unwrap();
        assert!(seen.iter().any(|byte| *byte != 0xEE), "the kernels did not run");
    });
}

/// A handle's memory held a larger dispatch before; its own dispatch never runs, so combine must not use the old one.
#[test]
fn a_handle_whose_dispatch_never_ran_is_not_combined_by_what_its_memory_held() {
    on_ranks(1, |world| {
        let rig = Rig::with(&world, |b| b.tuning(|t| t.handles = 1));
        rig.good_round(0);
        let small = rig.ep.device().alloc(128).unwrap();
        rig.stream.begin_capture().unwrap();
        let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(1), &rig.output(2)).unwrap();
        let graph = rig.stream.end_capture().unwrap();
        let rows = Rows::new(rig.rows.view().slice(0, 256).unwrap());
        rig.ep.combine(&rig.stream, &handle, &rows, &Combined::new(small.view())).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let error = rig.ep.check().unwrap_err();
        assert!(matches!(error, Error::Order { fatal: false, .. }), "{error}");
        // Once it has run, the handle is as good as any.
        rig.route_all(1);
        graph.launch(&rig.stream).unwrap();
        rig.ep.combine(&rig.stream, &handle, &rig.expert_rows(), &rig.combined()).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        rig.expect_own_rows(1, 1);
    });
}

// ---- ends of threads, and loggers that panic

thread_local! {
    static KEPT: std::cell::RefCell<Option<(Rig, Graph)>> = const { std::cell::RefCell::new(None) };
    static PANICS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Storage that was used first is dropped last, when whatever waits keep for the thread is gone.
#[test]
fn a_context_and_a_graph_in_a_threads_own_storage_are_dropped_with_the_thread() {
    let thread = std::thread::spawn(|| {
        KEPT.with_borrow(|kept| assert!(kept.is_none()));
        let rig = Rig::new(&World::threads(1).unwrap().remove(0));
        rig.good_round(0);
        rig.stream.begin_capture().unwrap();
        drop(rig.enqueue(&rig.tokens(MAX_TOKENS), rig.capacity).unwrap());
        let graph = rig.stream.end_capture().unwrap();
        graph.launch(&rig.stream).unwrap();
        KEPT.set(Some((rig, graph)));
    });
    thread.join().unwrap();
}

/// Panics on threads that ask for it.
struct Panicking;

impl log::Log for Panicking {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        assert!(!PANICS.get(), "a logger that panics at: {}", record.args());
    }

    fn flush(&self) {}
}

#[test]
fn a_logger_that_panics_lets_a_context_wait_for_its_kernels_all_the_same() {
    const HELD: Duration = Duration::from_millis(300);
    log::set_logger(&Panicking).unwrap();
    log::set_max_level(log::LevelFilter::Info);
    let rig = Rig::new(&World::threads(1).unwrap().remove(0));
    rig.route_all(1);
    let held = Held::hold(&rig.stream);
    drop(rig.enqueue(&rig.tokens(MAX_TOKENS), rig.capacity).unwrap());
    let Rig { ep, stream, out, .. } = rig;
    let started = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(HELD);
            held.let_go();
        });
        PANICS.set(true);
        let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(ep)));
        PANICS.set(false);
        assert!(dropped.is_err(), "nothing was logged");
        assert!(started.elapsed() >= HELD, "memory was freed under kernels");
    });
    stream.synchronize(PATIENCE).unwrap();
    let mut seen = vec![0; out.len()];
    out.read(0, &mut seen).unwrap();
    assert!(seen.iter().any(|byte| *byte != 0xEE), "the kernels did not run");
}
