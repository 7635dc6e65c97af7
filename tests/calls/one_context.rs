//! One context, calls of two kinds: an engine's code, against the present types. A call of another format than the
//! context's is refused as yet, with the reason; nothing else about the program will change.

use crate::rig;

use rig::{TOP_K, builder, on_ranks};
use std::time::Duration;
use tokenyard::*;

const HIDDEN: usize = 256;
const TOKENS: usize = 4;
const PATIENCE: Duration = Duration::from_secs(20);

/// One rank's buffers.
struct Buffers {
    bf16: DeviceBuffer,
    fp8: DeviceBuffer,
    scales: DeviceBuffer,
    topk_idx: DeviceBuffer,
    topk_weight: DeviceBuffer,
    rows: DeviceBuffer,
    row_scales: DeviceBuffer,
    expert_count: DeviceBuffer,
    out: DeviceBuffer,
}

impl Buffers {
    fn new(device: &Device, capacity: usize) -> Result<Buffers> {
        let topk_idx = device.alloc(TOKENS * TOP_K * 4)?;
        topk_idx.write(0, &(0..TOKENS * TOP_K).flat_map(|i| (i as i32 % 8).to_ne_bytes()).collect::<Vec<_>>())?;
        Ok(Buffers {
            bf16: device.alloc(TOKENS * HIDDEN * 2)?,
            fp8: device.alloc(TOKENS * HIDDEN)?,
            scales: device.alloc(TOKENS * HIDDEN / 128 * 4)?,
            topk_idx,
            topk_weight: device.alloc(TOKENS * TOP_K * 4)?,
            rows: device.alloc(capacity * HIDDEN * 2)?,
            row_scales: device.alloc(capacity * HIDDEN / 128 * 4)?,
            expert_count: device.alloc(8 * 4)?,
            out: device.alloc(TOKENS * HIDDEN * 2)?,
        })
    }
}

/// A prefill step: bf16 rows, expert by expert, starts aligned for a grouped GEMM.
fn prefill(ep: &AllToAll, stream: &Stream, b: &Buffers, capacity: usize) -> Result<()> {
    let tokens = Tokens::new(b.bf16.view(), b.topk_idx.view(), TokenCount::Host(TOKENS))
        .format(RowFormat::BF16)
        .hidden(HIDDEN)
        .topk_weight(b.topk_weight.view());
    let output = Output::new(Layout::Contiguous { align: 4, capacity }, b.rows.view(), b.expert_count.view());
    let handle = ep.dispatch(stream, &tokens, &output)?;
    ep.combine(stream, &handle, &Rows::new(b.rows.view()).dtype(Dtype::Bf16), &Combined::new(b.out.view()))
}

/// A decode step: fp8 rows with fp32 scales, so many places for each expert.
fn decode(ep: &AllToAll, stream: &Stream, b: &Buffers, capacity: usize) -> Result<()> {
    let tokens = Tokens::new(b.fp8.view(), b.topk_idx.view(), TokenCount::Host(TOKENS))
        .format(RowFormat::FP8_F32)
        .hidden(HIDDEN)
        .scales(ScaleView::new(b.scales.view(), HIDDEN / 128 * 4, 4))
        .topk_weight(b.topk_weight.view());
    let layout = Layout::Masked { per_expert: capacity / 8 };
    let output = Output::new(layout, b.rows.view(), b.expert_count.view()).scales(b.row_scales.view());
    let handle = ep.dispatch(stream, &tokens, &output)?;
    ep.combine(stream, &handle, &Rows::new(b.rows.view()), &Combined::new(b.out.view()))
}

#[test]
fn prefill_runs_and_decode_of_another_format_is_refused_with_the_reason() {
    on_ranks(2, |world| {
        let device = Device::cpu().unwrap();
        let capacity = 64;
        let ep = builder(&world, &device).hidden(HIDDEN).format(RowFormat::BF16).build().unwrap();
        let (stream, buffers) = (device.new_stream().unwrap(), Buffers::new(&device, capacity).unwrap());
        prefill(&ep, &stream, &buffers, capacity).unwrap();
        let error = decode(&ep, &stream, &buffers, capacity).unwrap_err().to_string();
        for words in ["format is fp8", "with scales F32", "built for bf16 rows"] {
            assert!(error.contains(words), "{error}");
        }
        // Nothing was enqueued, so calls go on.
        prefill(&ep, &stream, &buffers, capacity).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        ep.check().unwrap();
    });
}

#[test]
fn a_call_that_is_not_what_the_context_was_built_for_is_refused() {
    on_ranks(1, |world| {
        let device = Device::cpu().unwrap();
        let ep = builder(&world, &device).hidden(HIDDEN).build().unwrap();
        let (stream, b) = (device.new_stream().unwrap(), Buffers::new(&device, 64).unwrap());
        let tokens = || {
            let count = TokenCount::Host(TOKENS);
            Tokens::new(b.bf16.view(), b.topk_idx.view(), count).topk_weight(b.topk_weight.view())
        };
        let output = || {
            let layout = Layout::Contiguous { align: 1, capacity: 64 };
            Output::new(layout, b.rows.view(), b.expert_count.view())
        };
        for (given, words) in [
            (tokens().hidden(128), ["hidden is 128", "built for 256"]),
            (tokens().quantize(true), ["quantize is true", "built for false"]),
            (tokens().format(RowFormat::FP16), ["format is fp16", "built for bf16"]),
        ] {
            let error = ep.dispatch(&stream, &given, &output()).unwrap_err().to_string();
            assert!(words.iter().all(|words| error.contains(words)), "{error}");
        }
        let same = tokens().hidden(HIDDEN).quantize(false).format(RowFormat::BF16);
        let handle = ep.dispatch(&stream, &same, &output()).unwrap();
        let rows = Rows::new(b.rows.view()).dtype(Dtype::Fp32);
        let error = ep.combine(&stream, &handle, &rows, &Combined::new(b.out.view())).unwrap_err().to_string();
        assert!(error.contains("dtype of rows is fp32") && error.contains("built for bf16"), "{error}");
        let rows = Rows::new(b.rows.view()).dtype(Dtype::Bf16);
        ep.combine(&stream, &handle, &rows, &Combined::new(b.out.view())).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        ep.check().unwrap();
    });
}
