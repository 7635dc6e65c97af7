//! Launchers of the benchmark's own kernels: experts that compute different functions, and bare pushes.
//!
//! Not part of the data path. Runs on the caller's thread; enqueues and returns.

use super::{DeviceKind, Stream, View};
use crate::base::{Dtype, Error, Result};
use crate::ffi::layout as raw;
use std::time::Duration;

/// One run of the benchmark's experts over dispatched rows; formulas in tests/reference/expert.rs.
#[derive(Debug, Clone)]
pub struct ExpertCall {
    /// Dispatched rows.
    pub rows: View,
    /// Bytes from one row to the next.
    pub rows_pitch: usize,
    /// Their scales, if any.
    pub scales: Option<View>,
    /// Scale words of a row.
    pub scale_words: usize,
    /// Column-major scales: words from one column to the next; 0 for row-major.
    pub scale_leading: usize,
    /// Column-major scales of the masked layout: rows of one expert; else 0.
    pub rows_per_block: usize,
    /// Whether scales are UE8M0.
    pub ue8m0: bool,
    /// int32 `[row_total]`: local expert or -1; for the expert-major layouts.
    pub row_expert: Option<View>,
    /// int32 `[row_total, top_k]`; for the token layout.
    pub token_experts: Option<View>,
    /// fp32 `[row_total, top_k]`; `None` for 1.
    pub token_weights: Option<View>,
    /// uint32 `[local experts]`: global ids.
    pub global_expert: View,
    /// The experts' outputs.
    pub y: View,
    /// Bytes from one output row to the next.
    pub y_pitch: usize,
    /// Rows of the output.
    pub row_total: usize,
    /// Columns.
    pub hidden: usize,
    /// Choices of a token.
    pub top_k: usize,
    /// Type of the dispatched rows.
    pub dtype: Dtype,
    /// Type of the experts' outputs.
    pub combine_dtype: Dtype,
    /// uint32 `[row_total, words]`: each row's payload, with its words, and whether they are any bits, or else numbers.
    pub payload: Option<(View, usize, bool)>,
}

fn code(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::Bf16 => raw::TY_BF16,
        Dtype::Fp16 => raw::TY_FP16,
        Dtype::Fp32 => raw::TY_FP32,
        Dtype::Fp8E4m3 => raw::TY_FP8_E4M3,
    }
}

fn address(view: &Option<View>) -> u64 {
    view.as_ref().map_or(0, View::ptr)
}

/// Blocks and threads that suit a kernel without waits.
fn grid(stream: &Stream) -> (u32, u32) {
    match stream.device().kind() {
        DeviceKind::Cpu => (2, 64),
        DeviceKind::Cuda => (stream.device().multiprocessors(), raw::TY_MAX_BLOCK_THREADS),
    }
}

/// Enqueues the experts.
///
/// # Errors
/// `Device` if the launch fails.
///
/// # Safety
/// The views are of the stream's device, hold the output of a dispatch of this shape (`row_expert` and `token_experts`
/// lead to `global_expert` unchecked), have room for `row_total` rows, and last until the launch or the last replay of
/// its graph is done.
pub unsafe fn expert(stream: &Stream, call: &ExpertCall) -> Result<()> {
    let args = raw::ty_expert_args {
        rows: call.rows.ptr(),
        rows_pitch: call.rows_pitch as u64,
        scales: address(&call.scales),
        scale_leading: call.scale_leading as u64,
        scale_words: call.scale_words as u64,
        row_expert: address(&call.row_expert),
        token_experts: address(&call.token_experts),
        token_weights: address(&call.token_weights),
        global_expert: call.global_expert.ptr(),
        y: call.y.ptr(),
        y_pitch: call.y_pitch as u64,
        row_total: call.row_total as u64,
        rows_per_block: call.rows_per_block as u64,
        hidden: call.hidden as u32,
        top_k: call.top_k as u32,
        in_dtype: code(call.dtype),
        out_dtype: code(call.combine_dtype),
        ue8m0: u32::from(call.ue8m0),
        payload: call.payload.as_ref().map_or(0, |(view, ..)| view.ptr()),
        payload_words: call.payload.as_ref().map_or(0, |(_, words, _)| *words as u32),
        payload_gathered: call.payload.as_ref().map_or(0, |(.., gathered)| u32::from(*gathered)),
        reserved: 0,
    };
    let views = [Some(&call.rows), Some(&call.global_expert), Some(&call.y)];
    let optional = [&call.scales, &call.row_expert, &call.token_experts, &call.token_weights];
    let payload = call.payload.as_ref().map(|(view, ..)| view);
    let views = views.into_iter().chain(optional.map(Option::as_ref)).chain([payload]).flatten();
    // SAFETY: passed on to the caller.
    stream.with(views, || unsafe { stream.launch_independent("ty_bench_expert", grid(stream), &args) })
}

/// Copies `bytes[i]` bytes (a multiple of 16) from `source` to `destinations[i]`, all at once: the floor of the links.
///
/// # Errors
/// `Argument` for too many destinations, a view of another device or a span beyond its view; `Device` if the launch
/// fails.
pub fn push(stream: &Stream, source: &View, destinations: &[View], bytes: &[usize]) -> Result<()> {
    let place = stream.device().place();
    destinations.iter().try_for_each(|view| view.of("destinations", place))?;
    source.of("source", place)?;
    let (blocks, threads) = grid(stream);
    let most = (raw::TY_MAX_NODE_RANKS).min(blocks) as usize;
    let fits = destinations.len() == bytes.len()
        && destinations.iter().zip(bytes).all(|(view, &n)| n % 16 == 0 && n <= view.len() && n <= source.len());
    if destinations.is_empty() || destinations.len() > most || !fits {
        return Err(Error::argument(
            "destinations",
            format!("{} of {bytes:?} bytes", destinations.len()),
            format!("give 1 to {most}, each within its view and a multiple of 16 bytes"),
        ));
    }
    let mut args = raw::ty_push_args {
        source: source.ptr(),
        destination: [0; raw::TY_MAX_NODE_RANKS as usize],
        bytes: [0; raw::TY_MAX_NODE_RANKS as usize],
        destinations: destinations.len() as u32,
        reserved: 0,
    };
    for (i, (view, &n)) in destinations.iter().zip(bytes).enumerate() {
        args.destination[i] = view.ptr();
        args.bytes[i] = n as u64;
    }
    // SAFETY: the spans lie in views of this device, and no others are used.
    let launch = || unsafe { stream.launch_independent("ty_bench_push", (blocks, threads), &args) };
    stream.with(destinations.iter().chain([source]), launch)
}

/// Holds the stream until the host releases `number`, or `timeout` passed. Work that is enqueued after it starts
/// together, with the host's launches out of the way. `words` are in host memory, `uint64 [2]`, zeroed: the number that
/// the host releases, and the last number that was given up, or 0; `number` is 1 or more and greater each time.
///
/// # Errors
/// `Argument` if the words are too few; `Device` if the launch fails.
pub fn hold(stream: &Stream, words: &View, number: u64, timeout: Duration) -> Result<()> {
    words.of("words", stream.device().place())?;
    if words.len() < 2 * size_of::<u64>() {
        return Err(Error::argument("words", format!("{} bytes", words.len()), "give 16 bytes"));
    }
    let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
    let args = raw::ty_hold_args { words: words.ptr(), number, timeout_ns };
    // SAFETY: the two words lie in a view of this device.
    stream.with([words], || unsafe { stream.launch("ty_bench_hold", 1, 32, 0, &args) })
}

/// Has the stream report that `rank` is here, and wait until all of `ranks` are, or until `timeout` passed. `words` are
/// in host memory that the devices of all ranks reach, `uint64 [2][ranks]`, zeroed: the last number that each rank
/// reached, and {number, missing peer} of the last meeting that it gave up, or 0; `number` is 1 or more, below 2^32,
/// and greater with each meeting.
///
/// # Errors
/// `Argument` if the words are too few; `Device` if the launch fails.
pub fn meet(
    stream: &Stream,
    words: &View,
    (rank, ranks): (usize, usize),
    number: u64,
    timeout: Duration,
) -> Result<()> {
    words.of("words", stream.device().place())?;
    if rank >= ranks || words.len() / (2 * size_of::<u64>()) < ranks {
        return Err(Error::argument(
            "words",
            format!("{} bytes for rank {rank} of {ranks}", words.len()),
            "give 16 bytes for each rank, counted from 0",
        ));
    }
    let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
    let (rank, ranks) = (rank as u32, ranks as u32);
    let args = raw::ty_meet_args { words: words.ptr(), number, timeout_ns, rank, ranks };
    // SAFETY: the words of all ranks lie in a view of this device.
    stream.with([words], || unsafe { stream.launch("ty_bench_meet", 1, 32, 0, &args) })
}
