//! What safe code cannot do: hand kernels memory that goes while they use it.

mod rig;

use rig::{MAX_TOKENS, PATIENCE, Rig, on_ranks, test_device};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokenyard::kernels::{View, bench};
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
        let (far, far_stream) = (other.alloc(1 << 16).unwrap(), other.new_stream().unwrap());
        let refused = |outcome: Result<()>, name: &str| {
            let why = outcome.unwrap_err().to_string();
            let begins = why.starts_with(&format!("argument {name} is of CPU device "));
            assert!(begins && why.contains(": give one of "), "{why}");
        };
        refused(rig.stream.fill(&far.view(), 0), "view");
        let near = rig.out.slice(0, 16).unwrap();
        let part = far.slice(0, 16).unwrap();
        refused(rig.stream.copy(&near, &part), "src");
        refused(rig.stream.copy(&part, &near), "dst");
        let (tokens, output) = (|| rig.tokens(MAX_TOKENS), || rig.output(rig.capacity));
        let dispatch = |tokens: Tokens, output: Output| rig.ep.dispatch(&rig.stream, &tokens, &output).map(drop);
        refused(dispatch(Tokens { x: far.view(), ..tokens() }, output()), "x");
        refused(dispatch(Tokens { topk_idx: far.view(), ..tokens() }, output()), "topk_idx");
        refused(dispatch(Tokens { topk_weight: Some(far.view()), ..tokens() }, output()), "topk_weight");
        refused(dispatch(Tokens { count: TokenCount::Device(far.view()), ..tokens() }, output()), "count");
        refused(dispatch(tokens(), Output { rows: far.view(), ..output() }), "rows");
        refused(dispatch(tokens(), Output { expert_count: far.view(), ..output() }), "expert_count");
        refused(dispatch(tokens(), Output { source: Some(far.view()), ..output() }), "source");
        refused(dispatch(tokens(), Output { host_counts: Some(far.view()), ..output() }), "host_counts");
        refused(rig.ep.dispatch(&far_stream, &tokens(), &output()).map(drop), "stream");
        let handle = rig.ep.dispatch(&rig.stream, &tokens(), &output()).unwrap();
        let combine = |rows: Rows, out: Combined| rig.ep.combine(&rig.stream, &handle, &rows, &out);
        refused(combine(Rows { rows: far.view(), ..rig.expert_rows() }, rig.combined()), "rows");
        refused(combine(rig.expert_rows(), Combined { out: far.view(), ..rig.combined() }), "out");
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

/// The second wave reads its tokens in the receiving half.
#[test]
fn what_is_under_way_keeps_the_input_of_later_waves() {
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |b| b.wave_tokens(MAX_TOKENS / 2));
        rig.route(&[[0, 4], [1, 5], [2, 6], [3, 7]], 1);
        let device = rig.ep.device();
        let copies = [&rig.x, &rig.idx, &rig.weight].map(|buffer| {
            let copy = device.alloc(buffer.len()).unwrap();
            rig.stream.copy(&copy.view(), &buffer.view()).unwrap();
            copy
        });
        let [x, idx, weight] = &copies;
        let input = Tokens { x: x.view(), topk_idx: idx.view(), topk_weight: Some(weight.view()), ..rig.tokens(4) };
        let sent = rig.ep.dispatch_send(&rig.stream, &input).unwrap();
        let lengths = copies.each_ref().map(DeviceBuffer::len);
        rig.stream.synchronize(PATIENCE).unwrap();
        drop((copies, input));
        // What was freed would be given out again.
        let others: Vec<_> = (0..64).flat_map(|_| lengths.map(|bytes| device.alloc(bytes).unwrap())).collect();
        others.iter().for_each(|other| other.fill(0).unwrap());
        let handle = rig.ep.dispatch_recv(&rig.stream, sent, &rig.output(rig.capacity)).unwrap();
        let rows = device.alloc(rig.rows.len()).unwrap();
        rig.stream.copy(&rows.view(), &rig.rows.view()).unwrap();
        let sent = {
            let rows = Rows { rows: rows.view(), ..rig.expert_rows() };
            rig.ep.combine_send(&rig.stream, &handle, &rows).unwrap()
        };
        let bytes = rows.len();
        rig.stream.synchronize(PATIENCE).unwrap();
        drop(rows);
        let others: Vec<_> = (0..64).map(|_| device.alloc(bytes).unwrap()).collect();
        others.iter().for_each(|other| other.fill(0).unwrap());
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
