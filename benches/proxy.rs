//! Costs of a proxy on a CPU: the time from a doorbell to the post, its own code per post and completion, and a scatter
//! to many peers.
//!
//! Criterion reports the means of the last two. Percentiles are measured separately and written to
//! `benches/results/proxy-<cpu>.json`. With `--quick` everything runs in less than a minute and nothing is written:
//!
//! ```text
//! cargo bench --bench proxy [-- --quick]
//! ```
//!
//! A doorbell sample is disturbed if one of the two threads was switched out in its batch of 200. Samples of
//! undisturbed batches are reported separately, since the targets are for a thread with its own core.

#[path = "../tests/transport/stub.rs"]
mod stub;

use criterion::{BenchmarkId, Criterion, Throughput};
use crossbeam_utils::CachePadded;
use nix::unistd::{Pid, gettid};
use serde::Serialize;
use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use stub::{Carrier, Stub};
use tokenyard::internals::proxy::driver::{ContextMemory, Driver, ProxyThread, ThreadConfig, system_clock};
use tokenyard::internals::proxy::machine::{
    Answer, ContextConfig, Flag, Input, Liveness, Machine, MachineConfig, Outputs, Report, WatchId,
};
use tokenyard::internals::proxy::wire::{
    ChunkIdx, ContextIdx, Direction, LinkIdx, MessageShape, Nodes, Wire, WireInput,
};
use tokenyard::internals::transport::network::imm::{ImmFields, ImmValue};
use tokenyard::internals::transport::network::{Event, Posted, RegionId, WriteImm};
use tokenyard::{Rank, Result};

const CONTEXT: ContextIdx = ContextIdx(0);
const D: Direction = Direction::Dispatch;
const PEERS: [u32; 3] = [7, 63, 255];
/// Bytes of a chunk. The number does not matter: nothing is copied.
const BYTES: u32 = 4096;
/// Doorbells between two checks whether a thread was switched out.
const BATCH: u64 = 200;
/// Repetitions in which floor and doorbells alternate.
const ROUNDS: usize = 5;

const TARGETS: Targets =
    Targets { doorbell_to_post_p50_ns: 500.0, doorbell_to_post_p99_ns: 2000.0, post_ns: 150.0, completion_ns: 60.0 };

/// Nanoseconds of a clock that all threads share.
fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// One rank per node; dispatch, combine and barrier, as in a context without weights sent ahead.
fn wire(peers: u32) -> Wire {
    let shape = MessageShape { first_bytes: 64 + (256 << 10), chunk_bytes: 256 << 10, chunks: 4, rows_offset: 64 };
    let (unused, barrier) = (
        MessageShape { chunks: 0, ..shape },
        MessageShape { first_bytes: 16, chunk_bytes: 16, chunks: 1, rows_offset: 16 },
    );
    let nodes = Nodes::consecutive(&vec![1; peers as usize + 1]).unwrap();
    let shapes = [shape, shape, barrier, unused];
    Wire::new(WireInput { nodes, nics: 1, shapes, staging_offset: 0, recv_buffer_offset: 1 << 40 }).unwrap()
}

fn machine(peers: u32) -> Machine {
    // Heartbeats would be sent in the middle of a measurement.
    let never = u64::MAX / 4;
    let liveness = Liveness { heartbeat_ns: never / 2, silence_ns: never, first_contact_ns: never };
    Machine::new(&MachineConfig { rank: Rank(0), world: peers as usize + 1, liveness }).unwrap()
}

fn with_config<R>(wire: &Wire, open: impl FnOnce(&ContextConfig<'_>) -> R) -> R {
    let arenas = vec![RegionId(0); wire.nodes().world()];
    open(&ContextConfig { generation: 0, first_epoch: 1, wire, arenas: &arenas })
}

/// The machine alone, and its inputs.
struct Bare {
    machine: Machine,
    peers: u32,
    epoch: u64,
    sink: Sink,
}

#[derive(Default)]
struct Sink {
    tokens: Vec<u64>,
}

impl Outputs for Sink {
    fn post(&mut self, write: &WriteImm) -> Answer {
        self.tokens.push(black_box(write).token);
        Answer::Accepted
    }

    fn send(&mut self, _: Rank, _: &[u8]) -> Answer {
        Answer::Accepted
    }

    fn flag(&mut self, flag: Flag) {
        black_box(flag);
    }

    fn report(&mut self, report: Report) {
        panic!("{report:?}");
    }
}

/// Times of one epoch with every peer.
#[derive(Clone, Copy, Default)]
struct Took {
    posts: Duration,
    sent: Duration,
    immediates: Duration,
}

impl Bare {
    fn new(peers: u32) -> Bare {
        let mut machine = machine(peers);
        with_config(&wire(peers), |config| machine.open(CONTEXT, config)).unwrap();
        Bare { machine, peers, epoch: 0, sink: Sink { tokens: Vec::with_capacity(peers as usize) } }
    }

    fn epoch(&mut self) -> Took {
        self.epoch += 1;
        let start = Instant::now();
        for index in 0..self.peers as u16 {
            let watch = WatchId { context: CONTEXT, index };
            self.machine.step(Input::Doorbell { watch, bytes: BYTES, chunks: 1 }, &mut self.sink);
        }
        let posts = start.elapsed();
        let tokens = std::mem::take(&mut self.sink.tokens);
        let start = Instant::now();
        for token in &tokens {
            self.machine.step(Input::Sent { token: *token }, &mut self.sink);
        }
        let sent = start.elapsed();
        self.sink.tokens = tokens;
        self.sink.tokens.clear();
        let imms: Vec<ImmValue> = (1..=self.peers).map(|source| imm(source, self.epoch)).collect();
        let start = Instant::now();
        for imm in &imms {
            self.machine.step(Input::Immediate { imm: *imm }, &mut self.sink);
        }
        Took { posts, sent, immediates: start.elapsed() }
    }
}

fn imm(source: u32, epoch: u64) -> ImmValue {
    let (generation, context, source) = (0, CONTEXT.0, Rank(source));
    let epoch = (epoch & 3) as u8;
    ImmValue::new(&ImmFields { generation, context, kind: D.kind(), epoch, source, chunk: 0, nic: 0 }).unwrap()
}

/// Takes every write, notes when the last one was posted, and with `completes` completes it in the next poll.
struct Counter {
    posted_ns: Arc<AtomicU64>,
    tokens: Vec<u64>,
    completes: bool,
    notes: bool,
}

impl Carrier for Counter {
    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        if self.notes {
            self.posted_ns.store(now_ns(), Ordering::Release);
        }
        self.tokens.push(black_box(write).token);
        Ok(Posted::Accepted)
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        if !self.completes {
            return Ok(0);
        }
        let count = self.tokens.len();
        self.tokens.drain(..).for_each(|token| on_event(Event::Sent { token }));
        Ok(count)
    }
}

/// A driver with an open context, and the words that the device writes.
struct Whole {
    driver: Driver<Stub<Counter>>,
    wire: Wire,
    memory: ContextMemory,
    peers: u32,
    epoch: u64,
}

impl Whole {
    fn new(peers: u32, notes: bool) -> Whole {
        let (wire, tokens) = (wire(peers), Vec::with_capacity(peers as usize));
        let counter = Counter { posted_ns: Arc::default(), tokens, completes: notes, notes };
        let mut driver = Driver::new(machine(peers), Stub(counter), system_clock());
        let memory = ContextMemory::owned(wire.word_counts());
        (0..memory.chunks.len()).for_each(|at| memory.chunks.get(at).unwrap().store(1, Ordering::Relaxed));
        with_config(&wire, |config| driver.open(CONTEXT, config, memory.share())).unwrap();
        Whole { driver, wire, memory, peers, epoch: 0 }
    }

    /// Time of the poll that finds a doorbell for every peer.
    fn scatter(&mut self) -> Duration {
        self.epoch += 1;
        (0..self.peers as u16).for_each(|link| ring(&self.wire, &self.memory, self.epoch, link));
        let start = Instant::now();
        self.driver.poll_once();
        let took = start.elapsed();
        assert_eq!(self.driver.transport().0.tokens.len(), self.peers as usize);
        self.driver.transport().0.completes = true;
        self.driver.poll_once();
        self.driver.transport().0.completes = false;
        took
    }

    /// Time of a poll that finds nothing.
    fn idle(&mut self) -> Duration {
        let start = Instant::now();
        self.driver.poll_once();
        start.elapsed()
    }
}

fn ring(wire: &Wire, memory: &ContextMemory, epoch: u64, link: u16) {
    let bell = wire.doorbell_word(D, epoch, LinkIdx(link), ChunkIdx(0));
    memory.doorbells.get(bell).unwrap().store(epoch << 32 | u64::from(BYTES), Ordering::Release);
}

/// The first and the last core that this process may use; `None` if there are fewer than two.
fn cores() -> Option<(usize, usize)> {
    let mut usable = core_affinity::get_core_ids()?.into_iter().map(|core| core.id);
    Some((usable.next()?, usable.next_back()?))
}

fn pin(core: usize) {
    assert!(
        core_affinity::set_for_current(core_affinity::CoreId { id: core }),
        "no thread can be pinned to core {core}"
    );
}

/// How often a thread of this process was switched out.
fn switches(thread: Pid) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap_or_default();
    let counts = status.lines().filter_map(|line| line.split_once("voluntary_ctxt_switches:"));
    counts.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum()
}

/// Samples in nanoseconds: of all batches, and of those in which neither thread was switched out.
#[derive(Default)]
struct Samples {
    all: Vec<f64>,
    undisturbed: Vec<f64>,
    batches: u64,
    disturbed_batches: u64,
}

impl Samples {
    fn add(&mut self, other: Samples) {
        self.all.extend(other.all);
        self.undisturbed.extend(other.undisturbed);
        self.batches += other.batches;
        self.disturbed_batches += other.disturbed_batches;
    }
}

/// Rings on the calling thread until there are enough samples or time is up. The thread `answerer` writes a time to
/// `answer`; `settled` returns whether it is ready for the next ring.
fn ring_and_time(
    (enough, limit): (usize, Duration),
    answerer: Pid,
    answer: &AtomicU64,
    mut ring: impl FnMut(u64),
    settled: impl Fn(u64) -> bool,
) -> Samples {
    let mut samples = Samples::default();
    let (own, start) = (gettid(), Instant::now());
    let (mut epoch, mut noise) = (0u64, 0x2545_f491_4f6c_dd1du64);
    let mut switched = switches(own) + switches(answerer);
    while samples.undisturbed.len() < enough && start.elapsed() < limit {
        let first = samples.all.len();
        for _ in 0..BATCH {
            epoch += 1;
            answer.store(0, Ordering::Relaxed);
            // Waits up to about a microsecond, or rings would come in step with the other thread's polls.
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            (0..noise % 64).for_each(|_| spin_loop());
            let rung = now_ns();
            ring(epoch);
            let posted = loop {
                match answer.load(Ordering::Acquire) {
                    0 => spin_loop(),
                    at => break at,
                }
            };
            samples.all.push(posted.saturating_sub(rung) as f64);
            while !settled(epoch) {
                spin_loop();
            }
        }
        let now = switches(own) + switches(answerer);
        samples.batches += 1;
        if now == switched {
            samples.undisturbed.extend_from_slice(&samples.all[first..]);
        } else {
            samples.disturbed_batches += 1;
        }
        switched = now;
    }
    samples
}

/// From the store of a doorbell on one core to the call of post on another.
fn doorbell_to_post(peers: u32, budget: (usize, Duration), core: usize) -> Samples {
    let Whole { mut driver, wire, memory, .. } = Whole::new(peers, true);
    let posted_ns = Arc::clone(&driver.transport().0.posted_ns);
    let thread = ProxyThread::spawn(driver, ThreadConfig { core: Some(core), spinners: 0 }).unwrap();
    let answerer = thread.remote().ask(|_| gettid()).unwrap();
    let link = peers as u16 / 2;
    let is_free = |epoch: u64| {
        let word = memory.staging_free.get(wire.staging_free_word(D, epoch, LinkIdx(link))).unwrap();
        word.load(Ordering::Acquire) == epoch
    };
    ring_and_time(budget, answerer, &posted_ns, |epoch| ring(&wire, &memory, epoch, link), is_free)
}

/// The same between two threads, one of which only polls one word: the machine's own latency.
fn floor(budget: (usize, Duration), core: usize) -> Samples {
    // Each on its own cache line.
    let (word, answer) = (CachePadded::new(AtomicU64::new(0)), CachePadded::new(AtomicU64::new(0)));
    let (id, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(core);
            id.store(gettid().as_raw() as u64, Ordering::Release);
            let mut next = 1;
            while !stop.load(Ordering::Relaxed) {
                if word.load(Ordering::Acquire) == next {
                    answer.store(now_ns(), Ordering::Release);
                    next += 1;
                }
                spin_loop();
            }
        });
        while id.load(Ordering::Acquire) == 0 {
            std::thread::yield_now();
        }
        let answerer = Pid::from_raw(id.load(Ordering::Acquire) as i32);
        let samples = ring_and_time(budget, answerer, &answer, |epoch| word.store(epoch, Ordering::Release), |_| true);
        stop.store(true, Ordering::Relaxed);
        samples
    })
}

#[derive(Serialize)]
struct Targets {
    doorbell_to_post_p50_ns: f64,
    doorbell_to_post_p99_ns: f64,
    post_ns: f64,
    completion_ns: f64,
}

#[derive(Serialize)]
struct Percentiles {
    p50: f64,
    p95: f64,
    p99: f64,
    min: f64,
    max: f64,
    mean: f64,
    samples: usize,
}

impl Percentiles {
    fn of(mut samples: Vec<f64>) -> Option<Percentiles> {
        samples.sort_by(f64::total_cmp);
        let at = |part: f64| samples.get(((samples.len() as f64 * part).ceil() as usize).saturating_sub(1)).copied();
        let round = |ns: f64| (ns * 10.0).round() / 10.0;
        Some(Percentiles {
            p50: round(at(0.5)?),
            p95: round(at(0.95)?),
            p99: round(at(0.99)?),
            min: round(at(0.0)?),
            max: round(at(1.0)?),
            mean: round(samples.iter().sum::<f64>() / samples.len() as f64),
            samples: samples.len(),
        })
    }
}

#[derive(Serialize)]
struct Latency {
    peers: u32,
    watches: u32,
    undisturbed_ns: Option<Percentiles>,
    all_ns: Option<Percentiles>,
    batches: u64,
    disturbed_batches: u64,
}

impl Latency {
    fn of(peers: u32, samples: Samples) -> Latency {
        let Samples { all, undisturbed, batches, disturbed_batches } = samples;
        let (undisturbed_ns, all_ns) = (Percentiles::of(undisturbed), Percentiles::of(all));
        Latency { peers, watches: 3 * peers, undisturbed_ns, all_ns, batches, disturbed_batches }
    }
}

#[derive(Serialize)]
struct OwnCode {
    peers: u32,
    post_ns: Option<Percentiles>,
    sent_ns: Option<Percentiles>,
    immediate_ns: Option<Percentiles>,
    scatter_us: Option<Percentiles>,
    idle_poll_ns: Option<Percentiles>,
}

#[derive(Serialize)]
struct Results {
    version: &'static str,
    commit: &'static str,
    command: &'static str,
    cpu: String,
    cores: usize,
    load_average: String,
    targets: Targets,
    floor: Option<Latency>,
    doorbell_to_post: Vec<Latency>,
    own_code: Vec<OwnCode>,
    date: String,
}

/// Each sample is one epoch with all peers, per write for posts, completions and immediates.
fn own_code(peers: u32, epochs: usize) -> OwnCode {
    let (mut bare, mut whole) = (Bare::new(peers), Whole::new(peers, false));
    let mut samples: [Vec<f64>; 5] = std::array::from_fn(|_| Vec::with_capacity(epochs));
    for epoch in 0..epochs + epochs / 10 {
        let took = bare.epoch();
        let (scatter, idle) = (whole.scatter(), whole.idle());
        if epoch < epochs / 10 {
            continue;
        }
        let each = |took: Duration| took.as_nanos() as f64 / f64::from(peers);
        let (scatter, idle) = (scatter.as_nanos() as f64 / 1e3, idle.as_nanos() as f64);
        let all = [each(took.posts), each(took.sent), each(took.immediates), scatter, idle];
        samples.iter_mut().zip(all).for_each(|(samples, one)| samples.push(one));
    }
    let [post_ns, sent_ns, immediate_ns, scatter_us, idle_poll_ns] = samples.map(Percentiles::of);
    OwnCode { peers, post_ns, sent_ns, immediate_ns, scatter_us, idle_poll_ns }
}

/// In repetitions, since the machine's load, and the cores that the threads run on, change within seconds.
fn latencies((enough, limit): (usize, Duration)) -> (Option<Latency>, Vec<Latency>) {
    let Some((mine, other)) = cores() else {
        println!("skipped: doorbell to post needs two cores");
        return (None, Vec::new());
    };
    pin(mine);
    let budget = (enough / ROUNDS, limit / ROUNDS as u32);
    let (mut words, mut doorbells) = (Samples::default(), PEERS.map(|peers| (peers, Samples::default())));
    for _ in 0..ROUNDS {
        words.add(floor(budget, other));
        for (peers, samples) in &mut doorbells {
            samples.add(doorbell_to_post(*peers, budget, other));
        }
    }
    let floor = Latency { watches: 1, ..Latency::of(1, words) };
    (Some(floor), doorbells.into_iter().map(|(peers, samples)| Latency::of(peers, samples)).collect())
}

/// All results with percentiles.
fn percentiles(quick: bool) -> Results {
    let (epochs, budget) = match quick {
        true => (2_000, (20_000, Duration::from_secs(3))),
        false => (20_000, (400_000, Duration::from_secs(30))),
    };
    let all_cores = std::thread::available_parallelism().map_or(0, |cores| cores.get());
    let own_code = PEERS.map(|peers| own_code(peers, epochs)).into();
    let (floor, doorbell_to_post) = latencies(budget);
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = text("/proc/cpuinfo");
    let cpu = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let date = std::process::Command::new("date").args(["-u", "+%F"]).output().map(|out| out.stdout);
    Results {
        version: env!("CARGO_PKG_VERSION"),
        commit: option_env!("TOKENYARD_COMMIT").unwrap_or("unknown"),
        command: "cargo bench --bench proxy",
        cpu: cpu.map_or("unknown", |(_, name)| name.trim()).to_owned(),
        cores: all_cores,
        load_average: text("/proc/loadavg").split(' ').take(3).collect::<Vec<_>>().join(" "),
        targets: TARGETS,
        floor,
        doorbell_to_post,
        own_code,
        date: String::from_utf8_lossy(&date.unwrap_or_default()).trim().to_owned(),
    }
}

fn print(results: &Results) {
    let line = |name: String, samples: &Option<Percentiles>, unit: &str, target: &str| match samples {
        Some(s) => println!("{name:38} p50 {:8.1}  p99 {:8.1} {unit} of {} {target}", s.p50, s.p99, s.samples),
        None => println!("{name:38} no sample"),
    };
    println!("\n{}, {} cores, load {}", results.cpu, results.cores, results.load_average);
    for (name, latency, target) in results
        .floor
        .iter()
        .map(|floor| ("a word from core to core", floor, ""))
        .chain(results.doorbell_to_post.iter().map(|l| ("doorbell to post", l, "(targets 500, 2000)")))
    {
        let Latency { watches, undisturbed_ns, all_ns, batches, disturbed_batches, .. } = latency;
        line(format!("{name}, {watches} watched"), undisturbed_ns, "ns", target);
        line("  with disturbed batches".into(), all_ns, "ns", &format!("({disturbed_batches} of {batches} disturbed)"));
    }
    for own in &results.own_code {
        println!("{} peers", own.peers);
        line("  a post".into(), &own.post_ns, "ns", "(target 150)");
        line("  a completion".into(), &own.sent_ns, "ns", "(target 60)");
        line("  an immediate".into(), &own.immediate_ns, "ns", "(target 60)");
        line("  scatter to all".into(), &own.scatter_us, "us", "");
        line("  a poll with nothing to do".into(), &own.idle_poll_ns, "ns", "");
    }
}

/// One of the times of an epoch.
type Part = fn(Took) -> Duration;

fn criterion_means(criterion: &mut Criterion) {
    for peers in PEERS {
        let mut group = criterion.benchmark_group("proxy");
        group.throughput(Throughput::Elements(u64::from(peers)));
        group.sample_size(30).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
        let mut bare = Bare::new(peers);
        let parts: [(&str, Part); 3] =
            [("posts", |took| took.posts), ("sent", |took| took.sent), ("immediates", |took| took.immediates)];
        for (name, part) in parts {
            group.bench_function(BenchmarkId::new(name, peers), |bencher| {
                bencher.iter_custom(|iters| (0..iters).map(|_| part(bare.epoch())).sum());
            });
        }
        let mut whole = Whole::new(peers, false);
        group.bench_function(BenchmarkId::new("scatter", peers), |bencher| {
            bencher.iter_custom(|iters| (0..iters).map(|_| whole.scatter()).sum());
        });
        group.finish();
    }
}

fn main() {
    let has = |name: &str| std::env::args().any(|argument| argument == name);
    let mut criterion = Criterion::default().configure_from_args();
    criterion_means(&mut criterion);
    criterion.final_summary();
    if has("--test") || has("--list") {
        return;
    }
    let results = percentiles(has("--quick"));
    print(&results);
    if has("--quick") {
        return;
    }
    let name: Vec<String> = results.cpu.split_whitespace().map(str::to_lowercase).collect();
    let file = format!("{}/benches/results/proxy-{}.json", env!("CARGO_MANIFEST_DIR"), name.join("-"));
    std::fs::write(&file, format!("{}\n", serde_json::to_string(&results).unwrap())).unwrap();
    println!("written to benches/results/proxy-{}.json", name.join("-"));
}
