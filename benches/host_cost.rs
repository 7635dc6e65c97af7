//! What calls cost the host, in Rust and in C, beside an empty launch of the same grid, block and attributes.
//!
//! One rank of DeepSeek-V3's shape: 7168 columns, 256 experts, 8 choices, fp8 rows with fp32 scales. Calls of a kind go
//! sixteen times in a row, one kind after the other, and between them the host waits for the device outside of the
//! clock, so that no call waits for room in the launch queue. Then a graph of a dispatch and a combine is replayed, for
//! comparison with benches/python_cost.py. Rows are not compared with a reference: tests do that.
//!
//! ```text
//! cargo bench --features c --bench host_cost -- [--calls 2000] [--tokens 128] [--json FILE] [--cpu]
//! ```
//!
//! `--cpu` tries the program itself on the CPU device, which has no launch to compare with.

use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::{CStr, c_void};
use std::mem::zeroed;
use std::ptr::null_mut;
use std::time::{Duration, Instant};
use tokenyard::c::{calls, combine, config, context, device, dispatch, flight, status, stream, values, world};
use tokenyard::{
    AllToAll, Combined, Device, DeviceBuffer, Layout, Output, RowFormat, Rows, ScaleView, Stream, TokenCount, Tokens,
    View, World,
};

const HIDDEN: usize = 7168;
const EXPERTS: usize = 256;
const TOP_K: usize = 8;
/// Calls between two waits for the device.
const BURST: usize = 16;
/// Bursts of each kind before those that count.
const WARM_UP: usize = 3;
/// Replays between two waits, so many that the wait at their end adds nothing to each; and bursts of them.
const REPLAYS: u64 = 1000;
const REPLAY_BURSTS: usize = 11;
const PATIENCE: Duration = Duration::from_secs(30);

type Outcome<T> = Result<T, Box<dyn Error>>;

struct Arguments {
    calls: usize,
    tokens: usize,
    json: Option<String>,
    cpu: bool,
}

fn arguments() -> Outcome<Arguments> {
    let mut found = Arguments { calls: 2000, tokens: 128, json: None, cpu: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--calls" => found.calls = value()?.parse()?,
            "--tokens" => found.tokens = value()?.parse()?,
            "--json" => found.json = Some(value()?),
            "--cpu" => found.cpu = true,
            // Cargo's own.
            "--bench" => {}
            other => return Err(format!("{other} is no option: give --calls, --tokens, --json or --cpu").into()),
        }
    }
    Ok(found)
}

/// The memory of both contexts' calls.
struct Memory {
    x: DeviceBuffer,
    scales: DeviceBuffer,
    topk_idx: DeviceBuffer,
    topk_weight: DeviceBuffer,
    rows: DeviceBuffer,
    row_scales: DeviceBuffer,
    counts: DeviceBuffer,
    offsets: DeviceBuffer,
    expert_rows: DeviceBuffer,
    out: DeviceBuffer,
}

impl Memory {
    fn new(device: &Device, tokens: usize) -> Outcome<Memory> {
        let (choices, scales) = (tokens * TOP_K, HIDDEN / 128 * 4);
        let made = Memory {
            x: device.alloc(tokens * HIDDEN)?,
            scales: device.alloc(tokens * scales)?,
            topk_idx: device.alloc(choices * 4)?,
            topk_weight: device.alloc(choices * 4)?,
            rows: device.alloc(choices * HIDDEN)?,
            row_scales: device.alloc(choices * scales)?,
            counts: device.alloc(EXPERTS * 4)?,
            offsets: device.alloc((EXPERTS + 1) * 4)?,
            expert_rows: device.alloc(choices * HIDDEN * 2)?,
            out: device.alloc(tokens * HIDDEN * 2)?,
        };
        // Any numbers but zeros; a linear congruential generator's high bits (Knuth, MMIX).
        let mut state = 1u64;
        let mut draw = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as u32
        };
        let bytes = |count: usize, draw: &mut dyn FnMut() -> u32| -> Vec<u8> {
            // Below 0x7f, which is e4m3's NaN.
            (0..count).map(|_| (draw() % 0x7f) as u8).collect()
        };
        made.x.write(0, &bytes(tokens * HIDDEN, &mut draw))?;
        made.expert_rows.write(0, &bytes(choices * HIDDEN * 2, &mut draw))?;
        let ones: Vec<u8> = (0..tokens * scales / 4).flat_map(|_| 1f32.to_ne_bytes()).collect();
        made.scales.write(0, &ones)?;
        // Distinct experts of a token: an odd stride goes through all of 256.
        let chosen = (0..tokens).flat_map(|_| {
            let (first, stride) = (draw(), draw() | 1);
            (0..TOP_K as u32).map(move |k| first.wrapping_add(k.wrapping_mul(stride)) % EXPERTS as u32)
        });
        made.topk_idx.write(0, &chosen.flat_map(u32::to_ne_bytes).collect::<Vec<u8>>())?;
        let weights: Vec<u8> = (0..choices).flat_map(|at| (1.0 / (at % 7 + 2) as f32).to_ne_bytes()).collect();
        made.topk_weight.write(0, &weights)?;
        Ok(made)
    }
}

/// Nanoseconds of each call, by name.
type Times = BTreeMap<&'static str, Vec<u64>>;

/// Runs a call and notes its time.
fn timed<T>(times: &mut Times, name: &'static str, counts: bool, work: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let made = work();
    if counts {
        times.entry(name).or_default().push(begin.elapsed().as_nanos() as u64);
    }
    made
}

/// A context in Rust.
struct InRust<'a> {
    ep: AllToAll,
    stream: Stream,
    memory: &'a Memory,
    tokens: usize,
}

impl<'a> InRust<'a> {
    fn new(world: &World, device: &Device, memory: &'a Memory, tokens: usize) -> Outcome<InRust<'a>> {
        let ep = AllToAll::builder(world)
            .device(device.clone())
            .hidden(HIDDEN)
            .experts(EXPERTS)
            .top_k(TOP_K)
            .max_tokens_per_rank(tokens)
            .format(RowFormat::FP8_F32)
            .build()?;
        Ok(InRust { ep, stream: device.new_stream()?, memory, tokens })
    }

    fn calls(&self, times: &mut Times, count: bool) -> Outcome<()> {
        let m = self.memory;
        let handle = timed(times, "rust dispatch", count, || {
            let tokens = Tokens::new(m.x.view(), m.topk_idx.view(), TokenCount::Host(self.tokens))
                .scales(ScaleView::new(m.scales.view(), HIDDEN / 128 * 4, 4))
                .topk_weight(m.topk_weight.view());
            let layout = Layout::Contiguous { align: 1, capacity: self.tokens * TOP_K };
            let output = Output::new(layout, m.rows.view(), m.counts.view())
                .scales(m.row_scales.view())
                .expert_offset(m.offsets.view());
            self.ep.dispatch(&self.stream, &tokens, &output)
        })?;
        timed(times, "rust combine", count, || {
            let (rows, sums) = (Rows::new(m.expert_rows.view()), Combined::new(m.out.view()));
            self.ep.combine(&self.stream, &handle, &rows, &sums)
        })?;
        Ok(())
    }

    fn wait(&self) -> Outcome<()> {
        self.stream.synchronize(PATIENCE)?;
        Ok(self.ep.check()?)
    }

    /// Microseconds of each replay of a graph with a dispatch and a combine, one after the other: the median of bursts,
    /// after one that does not count.
    fn replay_time(&self, replays: u64) -> Outcome<f64> {
        self.stream.begin_capture()?;
        self.calls(&mut Times::new(), false)?;
        let graph = self.stream.end_capture()?;
        let mut bursts = Vec::with_capacity(REPLAY_BURSTS);
        for burst in 0..=REPLAY_BURSTS {
            let begin = Instant::now();
            for _ in 0..replays {
                graph.launch(&self.stream)?;
            }
            self.wait()?;
            if burst > 0 {
                bursts.push(begin.elapsed().as_nanos() as u64 / replays);
            }
        }
        bursts.sort_unstable();
        Ok(quantile(&bursts, 50))
    }
}

/// A status, with what the library says of it.
fn ok(status: status::tokenyard_status_t) -> Outcome<()> {
    if matches!(status, status::tokenyard_status_t::TOKENYARD_OK) {
        return Ok(());
    }
    // SAFETY: a text of this thread's, which lasts until its next call.
    let text = unsafe { CStr::from_ptr(status::tokenyard_last_error()) };
    Err(text.to_string_lossy().into_owned().into())
}

/// A context in C. Its objects last as long as the process.
struct InC<'a> {
    context: &'a context::tokenyard_context_t,
    stream: &'a stream::tokenyard_stream_t,
    handle: &'a flight::tokenyard_handle_t,
    tokens: calls::tokenyard_tokens_t,
    output: calls::tokenyard_output_t,
    rows: calls::tokenyard_rows_t,
    combined: calls::tokenyard_combined_t,
}

fn view(buffer: &DeviceBuffer) -> values::tokenyard_view_t {
    let view: View = buffer.view();
    values::tokenyard_view_t { pointer: view.ptr() as *mut c_void, bytes: view.len() }
}

impl InC<'_> {
    fn new(memory: &Memory, tokens: usize, cpu: bool) -> Outcome<InC<'static>> {
        let (mut worlds, mut on, mut ep) = ([null_mut(); 1], null_mut(), null_mut());
        let (mut queue, mut handle) = (null_mut(), null_mut());
        // SAFETY: pointers to this function's variables; objects that calls made, none of which is destroyed. Structs
        // of numbers and pointers, all zeros but what is set, as the header's functions with _init make them.
        unsafe {
            ok(world::tokenyard_world_threads(1, worlds.as_mut_ptr()))?;
            ok(if cpu { device::tokenyard_device_cpu(&mut on) } else { device::tokenyard_device_cuda(0, &mut on) })?;
            let mut config: config::tokenyard_config_t = zeroed();
            config.size = size_of_val(&config) as u32;
            config.device = on;
            (config.hidden, config.experts, config.top_k) = (HIDDEN, EXPERTS, TOP_K as u32);
            config.max_tokens_per_rank = tokens;
            config.format = values::TOKENYARD_FORMAT_FP8_F32;
            ok(context::tokenyard_context_create(worlds[0].as_ref(), &config, &mut ep))?;
            ok(stream::tokenyard_stream_create(on.as_ref(), &mut queue))?;
            ok(flight::tokenyard_handle_create(&mut handle))?;
            let mut given: calls::tokenyard_tokens_t = zeroed();
            given.size = size_of_val(&given) as u32;
            (given.count, given.index_type) = (tokens, values::TOKENYARD_INDEX_I32);
            (given.x, given.scales) = (view(&memory.x), view(&memory.scales));
            (given.topk_idx, given.topk_weight) = (view(&memory.topk_idx), view(&memory.topk_weight));
            let mut output: calls::tokenyard_output_t = zeroed();
            output.size = size_of_val(&output) as u32;
            output.layout.kind = values::TOKENYARD_LAYOUT_CONTIGUOUS;
            output.layout.capacity = (tokens * TOP_K) as u64;
            (output.rows, output.scales) = (view(&memory.rows), view(&memory.row_scales));
            (output.expert_count, output.expert_offset) = (view(&memory.counts), view(&memory.offsets));
            let mut rows: calls::tokenyard_rows_t = zeroed();
            rows.size = size_of_val(&rows) as u32;
            rows.rows = view(&memory.expert_rows);
            let mut combined: calls::tokenyard_combined_t = zeroed();
            combined.size = size_of_val(&combined) as u32;
            combined.out = view(&memory.out);
            let made = ep.as_ref().zip(queue.as_ref()).zip(handle.as_ref());
            let ((context, stream), handle) = made.ok_or("a call in C made nothing")?;
            Ok(InC { context, stream, handle, tokens: given, output, rows, combined })
        }
    }

    fn calls(&self, times: &mut Times, count: bool) -> Outcome<()> {
        let (context, stream, handle) = (Some(self.context), Some(self.stream), Some(self.handle));
        // SAFETY: structs of this object, views of memory that outlasts it.
        ok(timed(times, "c dispatch", count, || unsafe {
            dispatch::tokenyard_dispatch(context, stream, &self.tokens, &self.output, handle)
        }))?;
        // SAFETY: as above.
        ok(timed(times, "c combine", count, || unsafe {
            combine::tokenyard_combine(context, stream, handle, &self.rows, &self.combined)
        }))
    }

    fn wait(&self) -> Outcome<()> {
        ok(stream::tokenyard_stream_synchronize(Some(self.stream), PATIENCE.as_millis() as u64))?;
        ok(context::tokenyard_context_check(Some(self.context)))
    }
}

/// A kernel that does nothing, with an argument as large as a dispatch's.
#[cfg(feature = "cuda")]
mod empty {
    use super::Outcome;
    use cudarc::driver::sys;
    use std::ptr::null_mut;
    use tokenyard::internals::kernels::{DISPATCH_ARGUMENT_BYTES as ARGUMENT_BYTES, MAX_BLOCK_THREADS as BLOCK};

    pub struct Empty {
        function: sys::CUfunction,
        stream: sys::CUstream,
        blocks: u32,
    }

    fn checked(code: sys::CUresult) -> Outcome<()> {
        if code == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(format!("the driver says {code:?}").into()) }
    }

    impl Empty {
        /// On a stream of a device whose context this thread has used.
        pub fn new(stream: u64, blocks: u32) -> Outcome<Empty> {
            let text = format!(
                ".version 8.0\n.target sm_90\n.address_size 64\n\
                 .visible .entry empty(.param .align 8 .b8 a[{ARGUMENT_BYTES}]) {{ ret; }}\n\0"
            );
            let (mut module, mut function, mut context) = (null_mut(), null_mut(), null_mut());
            // SAFETY: pointers to this function's variables, and texts that end in 0. The context is current for good.
            unsafe {
                checked(sys::cuDevicePrimaryCtxRetain(&mut context, 0))?;
                checked(sys::cuCtxSetCurrent(context))?;
                checked(sys::cuModuleLoadData(&mut module, text.as_ptr().cast()))?;
                checked(sys::cuModuleGetFunction(&mut function, module, c"empty".as_ptr()))?;
            }
            Ok(Empty { function, stream: stream as sys::CUstream, blocks })
        }

        pub fn launch(&self) -> Outcome<()> {
            let mut argument = [0u8; ARGUMENT_BYTES];
            let mut attribute = sys::CUlaunchAttribute {
                id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
                pad: [0; 4],
                value: sys::CUlaunchAttributeValue { cooperative: 1 },
            };
            let config = sys::CUlaunchConfig {
                gridDimX: self.blocks,
                gridDimY: 1,
                gridDimZ: 1,
                blockDimX: BLOCK,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: 0,
                hStream: self.stream,
                attrs: &mut attribute,
                numAttrs: 1,
            };
            let mut params = [argument.as_mut_ptr().cast()];
            // SAFETY: the kernel takes one argument, which the driver copies during the call.
            checked(unsafe { sys::cuLaunchKernelEx(&config, self.function, params.as_mut_ptr(), null_mut()) })
        }
    }
}

fn quantile(sorted: &[u64], hundredth: usize) -> f64 {
    sorted.get(sorted.len() * hundredth / 100).map_or(f64::NAN, |nanoseconds| *nanoseconds as f64 / 1000.0)
}

fn main() -> Outcome<()> {
    let arguments = arguments()?;
    let device = if arguments.cpu { Device::cpu()? } else { Device::cuda(0)? };
    let world = World::threads(1)?.pop().ok_or("no world")?;
    let memory = Memory::new(&device, arguments.tokens)?;
    let rust = InRust::new(&world, &device, &memory, arguments.tokens)?;
    let c = InC::new(&memory, arguments.tokens, arguments.cpu)?;
    #[cfg(feature = "cuda")]
    let empty = if arguments.cpu { None } else { Some(empty::Empty::new(rust.stream.raw(), rust.ep.sms())?) };
    let mut times = Times::new();
    for burst in 0..WARM_UP + arguments.calls.div_ceil(BURST) {
        let count = burst >= WARM_UP;
        #[cfg(feature = "cuda")]
        if let Some(empty) = &empty {
            for _ in 0..BURST {
                timed(&mut times, "an empty launch", count, || empty.launch())?;
            }
            rust.wait()?;
        }
        for _ in 0..BURST {
            rust.calls(&mut times, count)?;
        }
        rust.wait()?;
        for _ in 0..BURST {
            c.calls(&mut times, count)?;
        }
        c.wait()?;
    }
    let mut results = serde_json::Map::new();
    for (name, times) in &mut times {
        times.sort_unstable();
        let (p50, p99) = (quantile(times, 50), quantile(times, 99));
        println!("{name:<16} p50 {p50:7.2} us   p99 {p99:7.2} us");
        results.insert((*name).into(), serde_json::json!({ "p50": p50, "p99": p99 }));
    }
    let replay = rust.replay_time(if arguments.cpu { 10 } else { REPLAYS })?;
    println!("a replay of dispatch and combine: {replay:.2} us");
    if let Some(path) = &arguments.json {
        let commit = tokenyard::internals::COMMIT;
        let all = serde_json::json!({
            "commit": commit, "device": device.name(), "tokens": arguments.tokens, "sms": rust.ep.sms(),
            "calls": arguments.calls, "host_us": results,
            "replay_us": replay,
        });
        std::fs::write(path, format!("{all}\n"))?;
    }
    Ok(())
}
