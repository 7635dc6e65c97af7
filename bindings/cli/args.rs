//! The command line: options, their help, and the reading of single values.
//!
//! Before the data path, on the main thread. `config` checks how options combine; `usage` words refusals. Nothing here
//! prints or exits.

use std::collections::BTreeSet;
use std::fmt;

use clap::{Args, Parser, Subcommand};
use tokenyard::internals::base::Dtype;
use tokenyard::topology::{Cpus, WantedNics};

use crate::cli::cases::inputs::ScaleKind;
use crate::cli::cases::limits::{
    MAX_EXPERTS, MAX_HIDDEN, MAX_ITERS, MAX_NICS, MAX_NODE, MAX_ROWS, MAX_SMS, MAX_TOKENS, MAX_TOP_K, MAX_WORLD,
    number, seed,
};
use crate::cli::cases::links::Link;
use crate::cli::cases::routing::Routing;
use crate::cli::cases::words::{
    ArenaWord, Assumption, Check, DeviceWord, IndexWord, Launch, LayoutWord, MissingWord, Mode, NetworkWord,
    PartialWord, TransportWord, WeightsWord, Word, WorldMode, scale_kind, summed, word,
};

/// Most ranks of a projected node: no host links more GPUs than 16.
const MAX_PROJECTED_NODE: u64 = 16;
/// Longest deadline: a day.
const MAX_TIMEOUT_MS: u64 = 86_400_000;

/// Expert-parallel dispatch and combine: benchmark, verification, memory plan, projection, and a check of this machine.
#[derive(Debug, Parser)]
#[command(name = "tokenyard", version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Runs dispatch and combine and checks them against an independent reference
    #[command(allow_negative_numbers = true)]
    Bench(Box<BenchArgs>),
    /// Runs random shapes, ranks, layouts, dtypes and routings against the reference
    #[command(allow_negative_numbers = true)]
    Verify(VerifyArgs),
    /// Prints every buffer, its offset and size, and the total, without running
    #[command(allow_negative_numbers = true)]
    Plan(Box<BenchArgs>),
    /// Projects a world of several nodes over a virtual clock
    #[command(allow_negative_numbers = true)]
    Simulate(SimulateArgs),
    /// Shows what this machine offers and lacks
    #[command(allow_negative_numbers = true)]
    Doctor(DoctorArgs),
    /// Shows the NICs and cores of each GPU, and why they were chosen
    #[command(allow_negative_numbers = true)]
    Topology(TopologyArgs),
    /// Compares this library with a bare loop over the same network, between two processes
    #[command(allow_negative_numbers = true)]
    Wire(WireArgs),
}

/// Options of bench and plan.
#[derive(Debug, Clone, Default, Args)]
pub struct BenchArgs {
    /// What ranks run on [default: cuda where a GPU is found, else cpu]
    #[arg(long, value_name = "cpu|cuda", value_parser = word::<DeviceWord>)]
    pub device: Option<DeviceWord>,
    /// Ranks [default: all GPUs; 8 on cpu]
    #[arg(long, value_name = "N", value_parser = |t: &str| number(t, 1, MAX_WORLD))]
    pub world: Option<usize>,
    /// Ranks that share memory; a list where nodes are uneven [default: cuda N, one node; cpu 4, and what is left]
    #[arg(long, value_name = "G[,G...]", value_parser = nodes)]
    pub ranks_per_node: Option<List>,
    /// Network between nodes: sim, libfabric:tcp, libfabric:shm, libfabric:efa or verbs; the last two by those NICs of
    /// each rank's GPU that tokenyard topology shows, or all ranks by the devices given [default: sim]
    #[arg(long, value_name = "sim|libfabric:PROVIDER[:DOMAIN,...]|verbs[:DEVICE,...]", value_parser = transport)]
    pub transport: Option<TransportArg>,
    /// Use libfabric:shm of libfabric before 2.1, whose ranks may hang when one is killed
    #[arg(long)]
    pub allow_old_shm: bool,
    /// NICs of each rank [default: those of the link model; over efa and verbs as many as a GPU has, or as devices are
    /// given; else 1]
    #[arg(long, value_name = "N", value_parser = |t: &str| number(t, 1, MAX_NICS))]
    pub nics: Option<usize>,
    /// CPUs that the ranks' proxies are pinned to, each to a core of its own [default: over efa and verbs those near
    /// the GPU's NICs, if the machine has several NUMA nodes]
    #[arg(long, value_name = "CPUS", value_parser = Cpus::listed)]
    pub cores: Option<Cpus>,
    /// Where NICs and cores come from: facts that topology --record wrote, or lines for single GPUs as for topology
    /// --choice [default: this machine's facts]
    #[arg(long, value_name = "FILE")]
    pub topology: Option<String>,
    /// Link model of sim: none, cx7, efa-p5, efa-p5en or GBPS:LATENCY_US:PER_MESSAGE_US [default: none]
    #[arg(long, value_name = "MODEL", value_parser = Link::parse)]
    pub link: Option<Link>,
    /// Behaviour of sim: as good as it can be, or as bad as its interface allows [default: calm]
    #[arg(long, value_name = "calm|hostile", value_parser = word::<NetworkWord>)]
    pub network: Option<NetworkWord>,
    /// Rows of a chunk of a message between nodes [default: chosen by the library]
    #[arg(long, value_name = "ROWS", value_parser = |t: &str| number(t, 1, MAX_TOKENS))]
    pub chunk_rows: Option<usize>,
    /// Keep one copy of rows and partial rows received between nodes, however small a second copy is
    #[arg(long)]
    pub single_buffer: bool,
    /// In one node: tokens of a rank up to which partial rows are LL rows, without fences and tags; 0 for never
    /// [default: chosen by the library]
    #[arg(long, value_name = "TOKENS", value_parser = |t: &str| number(t, 0, MAX_TOKENS))]
    pub ll_tokens: Option<usize>,
    /// Tokens of each rank in a round; a larger call goes in several rounds [default: chosen by the library]
    #[arg(long, value_name = "TOKENS", value_parser = |t: &str| number(t, 1, MAX_TOKENS))]
    pub round_tokens: Option<usize>,
    /// Where arenas lie on GPUs: with host the processor copies between nodes; with device NICs do, which are emulated
    /// with a simulated network [default: device, where the network between nodes reaches it; else host]
    #[arg(long, value_name = "device|host", value_parser = word::<ArenaWord>)]
    pub arena: Option<ArenaWord>,
    /// Ranks as threads of one process, as processes of this host, or env: this process is one rank of the job that the
    /// environment describes, as torchrun starts them, and rank 0 writes the results [default: threads]
    #[arg(long, value_name = "threads|processes|env", value_parser = word::<Launch>)]
    pub launch: Option<Launch>,
    /// A published model's shape: v3, kimi-k2, qwen3-235b, gpt-oss-120b or mixtral-8x22b [default: v3]
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    /// Columns of a token row [default: the preset's]
    #[arg(long, value_name = "H", value_parser = |t: &str| number(t, 1, MAX_HIDDEN))]
    pub hidden: Option<usize>,
    /// Experts of all ranks [default: the preset's]
    #[arg(long, value_name = "E", value_parser = |t: &str| number(t, 1, MAX_EXPERTS))]
    pub experts: Option<usize>,
    /// Experts of a token [default: the preset's]
    #[arg(long, value_name = "K", value_parser = |t: &str| number(t, 1, MAX_TOP_K))]
    pub top_k: Option<usize>,
    /// Type of dispatched rows [default: the preset's]
    #[arg(long, value_name = "fp8|bf16|fp16|fp32", value_parser = word::<Dtype>)]
    pub dtype: Option<Dtype>,
    /// Scales of fp8 rows [default: f32]
    #[arg(long, value_name = "f32|ue8m0", value_parser = scale_kind)]
    pub scales: Option<ScaleKind>,
    /// Dispatch takes bf16 rows and quantises them to fp8 rows with scales
    #[arg(long)]
    pub quantize: bool,
    /// Type of the rows that come back [default: bf16]
    #[arg(long, value_name = "bf16|fp16|fp32", value_parser = summed)]
    pub combine_dtype: Option<Dtype>,
    /// Type of partial rows, from an expert's rank to a rail or the source rank [default: same, the combine dtype]
    #[arg(long, value_name = "same|fp32|fp8", value_parser = word::<PartialWord>)]
    pub partial: Option<PartialWord>,
    /// Tokens of each rank; a list sweeps, one result each [default: 128]
    #[arg(long, value_name = "T[,T...]", value_parser = tokens)]
    pub tokens: Option<List>,
    /// Most tokens of each rank that the context is built for [default: the largest T]
    #[arg(long, value_name = "T", value_parser = |t: &str| number(t, 1, MAX_TOKENS))]
    pub max_tokens: Option<usize>,
    /// Each rank draws its own count in 0..=T each iteration
    #[arg(long)]
    pub ragged: bool,
    /// uniform, v3-groups, zipf:S, hot:N or file:PATH [default: uniform]
    #[arg(long, value_name = "KIND", value_parser = routing)]
    pub routing: Option<Routing>,
    /// Tokens may name an expert several times: chance in percent that a choice repeats an earlier one of its token
    #[arg(long, value_name = "PERCENT", value_parser = |t: &str| number(t, 0, 100))]
    pub duplicates: Option<usize>,
    /// Choices of each token in calls, of a context for --top-k [default: all]
    #[arg(long, value_name = "K", value_parser = |t: &str| number(t, 1, MAX_TOP_K))]
    pub call_top_k: Option<usize>,
    /// Handles are compact, also small ones
    #[arg(long)]
    pub compact_handles: bool,
    /// Each dispatch is followed by one by its handle, of new rows: without metadata, and without a wait for counts
    #[arg(long)]
    pub replay: bool,
    /// Calls of another format alternate with these, in the same context; these alone are timed
    #[arg(long)]
    pub mixed: bool,
    /// Combine also brings so many fp32 words beside each of the experts' rows, summed [default: 0]
    #[arg(long, value_name = "K", value_parser = |t: &str| number(t, 0, 4096))]
    pub payload: Option<usize>,
    /// These words are gathered choice by choice instead
    #[arg(long)]
    pub gather: bool,
    /// Dispatch also brings so many fp32 words beside each token's row [default: 0]
    #[arg(long, value_name = "K", value_parser = |t: &str| number(t, 0, 4096))]
    pub dispatch_payload: Option<usize>,
    /// Whether calls go on without missing ranks; with one the last rank is missing [default: no]
    #[arg(long, value_name = "no|able|one", value_parser = word::<MissingWord>)]
    pub missing: Option<MissingWord>,
    /// Replicas of each expert, of which each token takes one of the nearest
    #[arg(long, value_name = "N", value_parser = |t: &str| number(t, 1, MAX_EXPERTS))]
    pub replicas: Option<usize>,
    /// Type of the choices; with ranks tokens name ranks, not experts [default: i64]
    #[arg(long, value_name = "i32|i64|ranks", value_parser = word::<IndexWord>)]
    pub index: Option<IndexWord>,
    /// When the router's weights are given [default: dispatch]
    #[arg(long, value_name = "dispatch|combine|none", value_parser = word::<WeightsWord>)]
    pub weights: Option<WeightsWord>,
    /// Combine adds to the old contents of its output
    #[arg(long)]
    pub accumulate: bool,
    /// Layout of dispatched rows [default: contiguous]
    #[arg(long, value_name = "contiguous|masked|token", value_parser = word::<LayoutWord>)]
    pub layout: Option<LayoutWord>,
    /// Alignment of each expert's first row, in rows (contiguous) [default: 1]
    #[arg(long, value_name = "A", value_parser = |t: &str| number(t, 1, MAX_TOKENS))]
    pub align: Option<usize>,
    /// Rows of the output; of each expert's in the masked layout [default: the worst case]
    #[arg(long, value_name = "ROWS", value_parser = |t: &str| number(t, 1, MAX_ROWS))]
    pub capacity: Option<usize>,

    /// In-place output: peers store rows directly into an output in the arena (contiguous, in one node)
    #[arg(long)]
    pub in_place: bool,
    /// One call each way, separate send and receive calls, captured and replayed calls, or separate calls between which
    /// the host learns how many rows come, for outputs of exactly as many [default: fused]
    #[arg(long, value_name = "fused|split|graph|counts", value_parser = word::<Mode>)]
    pub mode: Option<Mode>,
    /// As --mode counts, which it takes the place of
    #[arg(long)]
    pub counts_first: bool,
    /// SM budget of a kernel [default: chosen by a model of bytes: all for few tokens, else the fewest within 1 %]
    #[arg(long, value_name = "N", value_parser = |t: &str| number(t, 1, MAX_SMS))]
    pub sms: Option<usize>,
    /// Timed iterations [default: cpu 5, cuda 1000]
    #[arg(long, value_name = "N", value_parser = |t: &str| number(t, 1, MAX_ITERS))]
    pub iters: Option<usize>,
    /// Iterations before the timed ones [default: cpu 1, cuda 100]
    #[arg(long, value_name = "N", value_parser = |t: &str| number(t, 0, MAX_ITERS))]
    pub warmup: Option<usize>,
    /// Seed of inputs, routing and schedule [default: 1]
    #[arg(long, value_name = "S", value_parser = seed)]
    pub seed: Option<u64>,
    /// On cpu: everything on one thread under one seeded schedule, or a thread per rank [default: threads]
    #[arg(long, value_name = "one-thread|threads", value_parser = word::<WorldMode>)]
    pub world_mode: Option<WorldMode>,
    /// Iterations that are compared with the reference: all, first, or every Nth [default: cpu all, cuda 16]
    #[arg(long, value_name = "all|first|N", value_parser = check)]
    pub check: Option<Check>,
    /// Progress deadline of any wait [default: 30000]
    #[arg(long, value_name = "MS", value_parser = |t: &str| number(t, 1, MAX_TIMEOUT_MS))]
    pub timeout_ms: Option<usize>,
    /// Where results go; - is stdout, and then nothing else is printed
    #[arg(long, value_name = "PATH")]
    pub json: Option<String>,
    /// A plot of latency and of bandwidth against tokens
    #[arg(long, value_name = "PATH.svg")]
    pub plot: Option<String>,
    /// A timeline that Perfetto opens
    #[arg(long, value_name = "PATH.json")]
    pub trace: Option<String>,
    /// Also reports when the blocks of a call complete each stage, as the device records it
    #[arg(long)]
    pub stages: bool,
    /// This process is one rank that `--launch processes` started
    #[arg(long, hide = true)]
    pub as_rank: bool,
}

#[derive(Debug, Clone, Args)]
pub struct VerifyArgs {
    /// Random configurations [default: 100]
    #[arg(long, value_name = "N", value_parser = |t: &str| number(t, 1, MAX_ITERS))]
    pub seeds: Option<usize>,
    /// No further random configuration begins after so many seconds
    #[arg(long, value_name = "S", value_parser = |t: &str| number(t, 1, MAX_ITERS))]
    pub seconds: Option<usize>,
    /// Number of seeded schedules, each of another tiny world on one thread; without --seeds only schedules run
    #[arg(long, value_name = "N", value_parser = |t: &str| number(t, 1, MAX_ITERS))]
    pub schedules: Option<usize>,
    /// Seed of the first configuration; the others have the seeds after it [default: 1]
    #[arg(long, value_name = "S", value_parser = seed)]
    pub seed: Option<u64>,
    /// What ranks run on [default: cuda where a GPU is found, else cpu]
    #[arg(long, value_name = "cpu|cuda", value_parser = word::<DeviceWord>)]
    pub device: Option<DeviceWord>,
    /// Where arenas lie on GPUs [default: device; host where the network between nodes is hostile]
    #[arg(long, value_name = "device|host", value_parser = word::<ArenaWord>)]
    pub arena: Option<ArenaWord>,
    /// Progress deadline of any wait [default: 20000]
    #[arg(long, value_name = "MS", value_parser = |t: &str| number(t, 1, MAX_TIMEOUT_MS))]
    pub timeout_ms: Option<usize>,
    /// Every configuration quantises bf16 rows to fp8 in dispatch, instead of some
    #[arg(long)]
    pub quantize: bool,
    /// Every configuration has in-place output, instead of some
    #[arg(long, conflicts_with_all = ["quantize", "forge"])]
    pub in_place: bool,
    /// Every schedule has several nodes, and messages between them are tampered with: results may be wrong and calls
    /// may end with errors, but nothing else may happen
    #[arg(long, requires = "schedules")]
    pub forge: bool,
    /// Also the full sizes of models
    #[arg(long)]
    pub full: bool,
    /// Runs one configuration again, given as a failure printed it
    #[arg(long, value_name = "CONFIGURATION")]
    pub replay: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub struct SimulateArgs {
    /// Nodes
    #[arg(long, value_name = "N", required_unless_present = "calibrate", value_parser = |t: &str| number(t, 1, 2048))]
    pub nodes: Option<usize>,
    /// Ranks of each node
    #[arg(long, value_name = "G", required_unless_present = "calibrate", value_parser = |t: &str| number(t, 1, MAX_PROJECTED_NODE))]
    pub ranks_per_node: Option<usize>,
    /// Link model: none, cx7, efa-p5, efa-p5en or GBPS:LATENCY_US:PER_MESSAGE_US
    #[arg(long, value_name = "MODEL", required_unless_present = "calibrate", value_parser = link)]
    pub link: Option<String>,
    /// A published model's shape [default: v3]
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    /// Tokens of each rank; a list sweeps [default: 128]
    #[arg(long, value_name = "T[,T...]", value_parser = tokens)]
    pub tokens: Option<List>,
    /// Rows of a chunk between nodes, both ways [default: as the library chooses, 128 KiB over one NIC]
    #[arg(long, value_name = "ROWS", value_parser = |t: &str| number(t, 1, MAX_TOKENS))]
    pub chunk_rows: Option<usize>,
    /// Assumptions to switch off, see docs/simulate.md
    #[arg(long, value_name = "arrival-list|meta-ahead|early-sums|spread-meta", value_delimiter = ',', value_parser = word::<Assumption>)]
    pub without: Option<Vec<Assumption>>,
    /// Iterations, each with routing of its own [default: 3 to 50, fewer for more ranks]
    #[arg(long, value_name = "N", value_parser = |t: &str| number(t, 1, MAX_ITERS))]
    pub iters: Option<usize>,
    /// Seed of routing [default: 1]
    #[arg(long, value_name = "S", value_parser = seed)]
    pub seed: Option<u64>,
    /// Projects published results of others and measured results of one node, and compares
    #[arg(long)]
    pub calibrate: bool,
    /// Where results go; - is stdout
    #[arg(long, value_name = "PATH")]
    pub json: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// Where findings go as JSON; - is stdout
    #[arg(long, value_name = "PATH")]
    pub json: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub struct TopologyArgs {
    /// Writes this machine's facts to a file, which --from reads on any machine
    #[arg(long, value_name = "FILE")]
    pub record: Option<String>,
    /// Decides from facts that --record wrote, not from this machine's
    #[arg(long, value_name = "FILE")]
    pub from: Option<String>,
    /// These NICs for all GPUs, by name or PCI address; or at most so many for each [default: chosen from the facts]
    #[arg(long, value_name = "N|NIC[,NIC...]", value_parser = WantedNics::parse)]
    pub nics: Option<WantedNics>,
    /// CPUs for all GPUs, as in 0-11,48-59 [default: all that this process may use]
    #[arg(long, value_name = "CPUS", value_parser = Cpus::listed)]
    pub cores: Option<Cpus>,
    /// File that names NICs and cores of single GPUs, in lines such as gpu 0000:59:00.0 nics=mlx5_0 cores=0-3
    #[arg(long, value_name = "FILE")]
    pub choice: Option<String>,
    /// Where the table goes as JSON; - is stdout
    #[arg(long, value_name = "PATH")]
    pub json: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub struct WireArgs {
    /// Network: libfabric:tcp, libfabric:shm, libfabric:efa, or verbs by the first device or the one given
    #[arg(long, value_name = "libfabric:PROVIDER|verbs[:DEVICE]", value_parser = transport)]
    pub transport: TransportArg,
    /// Use libfabric:shm of libfabric before 2.1, whose processes may hang when one is killed
    #[arg(long)]
    pub allow_old_shm: bool,
    /// Two processes of this host, or env: this process is one of the two ranks of the job that the environment
    /// describes, and rank 0 writes the table [default: processes]
    #[arg(long, value_name = "processes|env", value_parser = word::<Launch>)]
    pub launch: Option<Launch>,
    /// Pairs of slices of each row, behind one that warms up
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = |t: &str| number(t, 1, MAX_ITERS))]
    pub pairs: usize,
    /// Milliseconds of a slice
    #[arg(long, value_name = "MS", default_value_t = 50, value_parser = |t: &str| number(t, 1, 10_000).map(|ms| ms as u64))]
    pub slice_ms: u64,
    /// Where the table goes as JSON; - is stdout
    #[arg(long, value_name = "PATH")]
    pub json: Option<String>,
    /// This process is the follower that the leader started
    #[arg(long, hide = true)]
    pub as_rank: bool,
}

/// Numbers separated by commas; at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List(pub Vec<usize>);

fn list(text: &str, least: u64, most: u64, example: &str) -> Result<List, String> {
    let items: Result<Vec<usize>, String> = text.split(',').map(|item| number(item.trim(), least, most)).collect();
    items
        .map(List)
        .map_err(|_| format!("give whole numbers from {least} to {most}, separated by commas, say {example}"))
}

fn tokens(text: &str) -> Result<List, String> {
    list(text, 0, MAX_TOKENS, "128 or 1,16,128")
}

fn nodes(text: &str) -> Result<List, String> {
    list(text, 1, MAX_NODE, "8 or 3,5")
}

/// A network, and the devices of it that ranks use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportArg {
    pub word: TransportWord,
    /// Of EFA or verbs, for all ranks; empty: by the topology.
    pub devices: Vec<String>,
}

impl fmt::Display for TransportArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word.name())?;
        if self.devices.is_empty() { Ok(()) } else { write!(f, ":{}", self.devices.join(",")) }
    }
}

fn transport(text: &str) -> Result<TransportArg, String> {
    let listed = [TransportWord::Efa, TransportWord::Verbs].into_iter();
    let listed = listed.filter_map(|word| Some((word, text.strip_prefix(word.name())?.strip_prefix(':')?))).next();
    let Some((word, devices)) = listed else {
        return word(text).map(|word| TransportArg { word, devices: Vec::new() });
    };
    let devices: Vec<String> = devices.split(',').map(str::to_owned).collect();
    let named = |device: &String| {
        !device.is_empty() && device.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
    };
    let example = if word == TransportWord::Efa { "libfabric:efa:rdmap79s0,rdmap80s0" } else { "verbs:mlx5_0,mlx5_1" };
    if !devices.iter().all(named) {
        return Err(format!("name devices as ibv_devices lists them, such as {example}"));
    }
    if devices.len() as u64 > MAX_NICS || devices.iter().collect::<BTreeSet<_>>().len() < devices.len() {
        return Err(format!(
            "name at most {MAX_NICS} devices, as many as a rank may have, each once, such as {example}"
        ));
    }
    Ok(TransportArg { word, devices })
}

fn check(text: &str) -> Result<Check, String> {
    match text {
        "all" => Ok(Check::All),
        "first" => Ok(Check::First),
        _ => match number(text, 1, MAX_ITERS) {
            Ok(n) => Ok(Check::Every(n)),
            Err(_) => Err("give all, first, or a number N for every Nth".to_string()),
        },
    }
}

/// A link model as typed, for a command that parses it itself.
fn link(text: &str) -> Result<String, String> {
    match tokenyard::internals::transport::network::sim::models::parse(text) {
        Ok(_) => Ok(text.to_string()),
        Err(tokenyard::internals::base::Error::Argument { advice, .. }) => Err(advice),
        Err(other) => Err(other.to_string()),
    }
}

fn routing(text: &str) -> Result<Routing, String> {
    Routing::parse(text).map_err(|error| match error {
        tokenyard::internals::base::Error::Argument { advice, .. } => advice,
        other => other.to_string(),
    })
}

/// The word given for an option, or its default.
pub fn or_default<T: Word>(given: Option<T>, default: T) -> T {
    given.unwrap_or(default)
}
