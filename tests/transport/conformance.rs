//! Every primitive of the kernels keeps its promise, bit for bit: on the CPU device, in seeded worlds and on a GPU.
//!
//! One kernel uses them all (kernels/bench/conformance.cuh). The expected results are computed here with integers,
//! independently of both builds of the primitives.

use std::sync::LazyLock;
use std::time::Duration;
use tokenyard::internals::kernels::{KernelArgs, SeededConfig, seeded_world};
use tokenyard::{Device, DeviceBuffer};

mod inputs;
mod quantized;
mod soft;
mod threads;

use quantized::Kind;
use soft::{BF16, E4M3, FP16, FP32, NAN};

const GRID: u32 = 2;
const BLOCK: u32 = 64;
const THREADS: u32 = GRID * BLOCK;
const SHARED_BYTES: u32 = 2048;
const WORK_BYTES: usize = 4096;
/// The result of a 16-bit conversion of a NaN.
const NARROW_NAN: u32 = 0x7fff;
const E4M3_NAN: u32 = 0x7f;
/// Long enough for a loaded machine; a test that waits it out has found a hang.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes after each output, which nothing may touch; then the byte that fills them and the outputs before a launch.
const GUARD: usize = 64;
const BLANK: u8 = 0xEE;

/// The arguments of `ty_conformance`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Args {
    input: u64,
    floats: u64,
    triples: u64,
    work: u64,
    timeout_ns: u64,
    conversions: u64,
    e4m3: u64,
    narrowed: u64,
    arithmetic: u64,
    threads: u64,
    vectors: u64,
    stores8: u64,
    stores2: u64,
    stores1: u64,
    messages: u64,
    rows: u64,
    quantized: u64,
    float_count: u32,
    triple_count: u32,
    row_count: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<Args>() == 152);

// SAFETY: field by field ty_conformance_args of kernels/bench/conformance.cuh; devices compare the sizes as well.
unsafe impl KernelArgs for Args {}

/// Inputs, and the outputs that depend on them.
struct Case {
    input: [u8; 64],
    floats: Vec<u32>,
    triples: Vec<[u32; 3]>,
    rows: Vec<quantized::Row>,
    narrowed: Vec<u32>,
    arithmetic: Vec<u32>,
    quantized: Vec<u32>,
}

impl Case {
    fn new(floats: Vec<u32>, triples: Vec<[u32; 3]>, rows: Vec<quantized::Row>, seed: u64) -> Case {
        let mut source = inputs::Random(seed);
        let e4m3 = |bits: u32| E4M3.encode(FP32.decode(bits), E4M3_NAN);
        let narrow = |(bits, next): (&u32, &u32)| {
            let number = FP32.decode(*bits);
            let pair = e4m3(*bits) | e4m3(*next) << 8;
            [BF16.encode(number, NARROW_NAN), FP16.encode(number, NARROW_NAN), pair]
        };
        let blank = u32::from_ne_bytes([BLANK; 4]);
        let kinds = [Kind::F32, Kind::Ue8m0];
        Case {
            input: std::array::from_fn(|_| source.word() as u8),
            narrowed: floats.iter().zip(floats.iter().cycle().skip(1)).flat_map(narrow).collect(),
            arithmetic: triples.iter().flat_map(|triple| soft::arithmetic(*triple)).collect(),
            quantized: kinds
                .iter()
                .flat_map(|kind| rows.iter().flat_map(|row| quantized::expected(*kind, row, blank)))
                .collect(),
            floats,
            triples,
            rows,
        }
    }

    /// A part that a seeded world can walk through step by step.
    fn part_of(whole: &Case, seed: u64) -> Case {
        let (floats, triples) =
            (inputs::sample(&whole.floats, 3000, seed), inputs::sample(&whole.triples, 3000, !seed));
        Case::new(floats, triples, inputs::sample(&whole.rows, 10, seed), seed)
    }
}

/// Everything there is.
static WHOLE: LazyLock<Case> =
    LazyLock::new(|| Case::new(inputs::floats(20_000), inputs::triples(50_000, 20_000), quantized::rows(2001), 1));

/// bf16 and fp16 to float of all 16-bit patterns.
static CONVERSIONS: LazyLock<Vec<u32>> = LazyLock::new(|| {
    let fp16 = (0..=0xffff).map(|bits| FP32.encode(FP16.decode(bits), NAN));
    (0..=0xffff).map(|bits| bits << 16).chain(fp16).collect()
});

/// fp8 e4m3 to float: no infinities, one NaN of each sign.
fn e4m3(bits: u32) -> u32 {
    let (exponent, mantissa) = (bits >> 3 & 15, (bits & 7) as f64);
    let sign = (bits & 0x80) << 24;
    let magnitude = match (exponent, bits & 7) {
        (15, 7) => return NAN,
        (0, _) => mantissa / 512.0,
        _ => (8.0 + mantissa) / 8.0 * 2f64.powi(exponent as i32 - 7),
    };
    (magnitude as f32).to_bits() | sign
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Memory that a launch writes, with a guard after it.
struct Output {
    name: &'static str,
    buffer: DeviceBuffer,
}

impl Output {
    fn new(device: &Device, name: &'static str, bytes: usize) -> Output {
        Output { name, buffer: device.alloc(bytes + GUARD).unwrap() }
    }

    fn address(&self) -> u64 {
        self.buffer.view().ptr()
    }

    fn words(&self, label: &str) -> Vec<u32> {
        let mut bytes = vec![0; self.buffer.len()];
        self.buffer.read(0, &mut bytes).unwrap();
        let guard = bytes.split_off(bytes.len() - GUARD);
        assert!(guard.iter().all(|byte| *byte == BLANK), "{label}: {} was written beyond its end", self.name);
        bytes.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect()
    }

    /// Compares word by word; `origin` describes a word's inputs.
    fn expect(&self, label: &str, wanted: &[u32], origin: impl Fn(usize) -> String) {
        let seen = self.words(label);
        assert_eq!(seen.len(), wanted.len(), "{label}: {}", self.name);
        let wrong: Vec<usize> = (0..seen.len()).filter(|i| seen[*i] != wanted[*i]).collect();
        if let Some(&i) = wrong.first() {
            panic!(
                "{label}: {} words of {} are wrong; the first, {i}, is {:#x} and should be {:#x} ({})",
                wrong.len(),
                self.name,
                seen[i],
                wanted[i],
                origin(i)
            );
        }
    }
}

/// All buffers of the kernel on one device.
struct Bench<'a> {
    case: &'a Case,
    /// Input, floats, triples, rows.
    given: [DeviceBuffer; 4],
    work: DeviceBuffer,
    conversions: Output,
    e4m3: Output,
    narrowed: Output,
    arithmetic: Output,
    quantized: Output,
    threads: Output,
    vectors: Output,
    stores8: Output,
    stores2: Output,
    stores1: Output,
    messages: Output,
}

impl<'a> Bench<'a> {
    fn new(device: &Device, case: &'a Case) -> Bench<'a> {
        let upload = |bytes: &[u8]| {
            let buffer = device.alloc(bytes.len()).unwrap();
            buffer.write(0, bytes).unwrap();
            buffer
        };
        let output = |name, bytes| Output::new(device, name, bytes);
        let threads = THREADS as usize;
        Bench {
            case,
            given: [
                upload(&case.input),
                upload(&bytes_of(&case.floats)),
                upload(&bytes_of(case.triples.as_flattened())),
                upload(&case.rows.as_flattened().iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>()),
            ],
            work: device.alloc(WORK_BYTES).unwrap(),
            conversions: output("conversions", 2 * 65536 * 4),
            e4m3: output("e4m3", 3 * 256 * 4),
            narrowed: output("narrowed", case.narrowed.len() * 4),
            arithmetic: output("arithmetic", case.arithmetic.len() * 4),
            quantized: output("quantized", case.quantized.len() * 4),
            threads: output("threads", threads * threads::WORDS * 4),
            vectors: output("vectors", 3 * threads * 16),
            stores8: output("stores8", threads * 8),
            stores2: output("stores2", threads * 2),
            stores1: output("stores1", threads),
            messages: output("messages", 16 * 4),
        }
    }

    fn outputs(&self) -> [&Output; 11] {
        [
            &self.conversions,
            &self.e4m3,
            &self.narrowed,
            &self.arithmetic,
            &self.quantized,
            &self.threads,
            &self.vectors,
            &self.stores8,
            &self.stores2,
            &self.stores1,
            &self.messages,
        ]
    }

    fn prepare(&self) {
        self.work.fill(0).unwrap();
        self.outputs().iter().for_each(|output| output.buffer.fill(BLANK).unwrap());
        self.messages.buffer.write(0, &[0; 64]).unwrap();
    }

    fn args(&self) -> Args {
        let [input, floats, triples, rows] = &self.given;
        Args {
            input: input.view().ptr(),
            floats: floats.view().ptr(),
            triples: triples.view().ptr(),
            work: self.work.view().ptr(),
            timeout_ns: PATIENCE.as_nanos() as u64 / 2,
            conversions: self.conversions.address(),
            e4m3: self.e4m3.address(),
            narrowed: self.narrowed.address(),
            arithmetic: self.arithmetic.address(),
            threads: self.threads.address(),
            vectors: self.vectors.address(),
            stores8: self.stores8.address(),
            stores2: self.stores2.address(),
            stores1: self.stores1.address(),
            messages: self.messages.address(),
            rows: rows.view().ptr(),
            quantized: self.quantized.address(),
            float_count: self.case.floats.len() as u32,
            triple_count: self.case.triples.len() as u32,
            row_count: self.case.rows.len() as u32,
            reserved: 0,
        }
    }

    fn check(&self, label: &str) {
        let case = self.case;
        self.conversions.expect(label, &CONVERSIONS, |i| format!("{} {:#06x}", ["bf16", "fp16"][i >> 16], i & 0xffff));
        let wanted: Vec<u32> = (0..3 * 256).map(|i| e4m3(i % 256)).collect();
        let place = ["alone", "low in a pair", "high in a pair"];
        self.e4m3.expect(label, &wanted, |i| format!("{:#04x} {}", i % 256, place[i / 256]));
        self.narrowed.expect(label, &case.narrowed, |i| {
            format!("{} of {:#010x}", ["bf16", "fp16", "e4m3"][i % 3], case.floats[i / 3])
        });
        self.arithmetic.expect(label, &case.arithmetic, |i| {
            let names = ["fma", "sum", "product", "quotient", "larger magnitude"];
            format!("{} of {:#010x?}", names[i % 5], case.triples[i / 5])
        });
        self.quantized.expect(label, &case.quantized, |i| {
            let (kind, row) = (i / quantized::WORDS / case.rows.len(), i / quantized::WORDS % case.rows.len());
            let word = i % quantized::WORDS;
            let place =
                if word < 160 { format!("columns from {}", 4 * word) } else { format!("scale word {}", word - 160) };
            format!("{place} of row {row} with {} scales", ["f32", "UE8M0"][kind])
        });
        threads::check(label, &self.threads.words(label), &case.input);
        self.check_stores(label);
        let mut wanted = [0; 16];
        wanted[..5].fill(32 * 32);
        wanted[6] = (1..=THREADS).sum();
        wanted[7] = 1;
        wanted[13] = 2 * (1..=THREADS / 2).sum::<u32>();
        wanted[14] = 2;
        self.messages.expect(label, &wanted, |_| "words received, sums, last blocks and warps, timeouts".into());
    }

    fn check_stores(&self, label: &str) {
        let lines = words_of(&self.case.input);
        let line = |i: usize| lines[i / 4 % 4 * 4 + i % 4];
        let wanted: Vec<u32> = (0..3 * THREADS as usize * 4).map(line).collect();
        self.vectors.expect(label, &wanted, |i| format!("thread {}", i / 4 % THREADS as usize));
        let words = |bytes: Vec<u8>| words_of(&bytes);
        let threads = 0..u64::from(THREADS);
        let wide = threads.clone().flat_map(|t| (0x1_0000_0001 * t + 7).to_ne_bytes()).collect();
        self.stores8.expect(label, &words(wide), |i| format!("thread {}", i / 2));
        let narrow = threads.clone().flat_map(|t| (257 * t as u16 + 3).to_ne_bytes()).collect();
        self.stores2.expect(label, &words(narrow), |i| format!("threads {} and {}", 2 * i, 2 * i + 1));
        let single = threads.map(|t| 255 - t as u8).collect();
        self.stores1.expect(label, &words(single), |i| format!("threads {} to {}", 4 * i, 4 * i + 3));
    }
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect()
}

fn launch_and_check(device: &Device, case: &Case, launches: usize, label: &str) {
    let stream = device.new_stream().unwrap();
    let bench = Bench::new(device, case);
    for _ in 0..launches {
        bench.prepare();
        // SAFETY: the bench's own buffers, which outlive the work.
        unsafe { stream.launch("ty_conformance", GRID, BLOCK, SHARED_BYTES, &bench.args()).unwrap() };
        stream.synchronize(PATIENCE).unwrap();
        bench.check(label);
    }
}

fn in_seeded_worlds(seeds: std::ops::Range<u64>, hold_stores: bool) {
    for seed in seeds {
        let label = format!("seed {seed}, hold_stores {hold_stores}");
        let case = Case::part_of(&WHOLE, seed);
        let config = SeededConfig { seed, hold_stores, stopped: None };
        let report = seeded_world(config, 1, |_, device| launch_and_check(&device, &case, 1, &label));
        assert_eq!((report.failure, report.hang_report), (None, None), "{label}");
    }
}

#[test]
fn primitives_keep_their_promises_on_the_cpu_device() {
    launch_and_check(&Device::cpu().unwrap(), &WHOLE, 3, "CPU device");
}

#[test]
fn primitives_keep_their_promises_under_seeded_schedules() {
    in_seeded_worlds(0..4, false);
}

#[test]
fn primitives_keep_their_promises_with_stores_held_back() {
    in_seeded_worlds(4..8, true);
}

#[test]
fn primitives_keep_their_promises_on_a_gpu() {
    if Device::cuda_count() == 0 {
        println!("skipped: no GPU");
        return;
    }
    if !Device::cuda_built() {
        println!("skipped: built without nvcc");
        return;
    }
    let device = Device::cuda(0).unwrap();
    launch_and_check(&device, &WHOLE, 20, &device.name());
}

#[test]
fn the_reference_agrees_with_the_host_on_numbers() {
    let canonical = |x: f32| if x.is_nan() { NAN } else { x.to_bits() };
    for (triple, wanted) in WHOLE.triples.iter().zip(WHOLE.arithmetic.as_chunks::<5>().0) {
        let [x, y, z] = triple.map(f32::from_bits);
        let larger = 0f32.max(x.abs()).max(y.abs());
        let seen = [x.mul_add(y, z), x + y, x * y, x / y, larger].map(canonical);
        assert_eq!(seen, *wanted, "{triple:#010x?}: the host has {seen:#010x?}, the reference {wanted:#010x?}");
    }
}
