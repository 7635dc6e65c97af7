//! Options combined: defaults that depend on the device, presets and their overrides, and all refusals before anything
//! runs.
//!
//! On the main thread. It asks the driver for the number of GPUs and touches nothing else.

use std::time::Duration;

use tokenyard::internals::base::Dtype;
use tokenyard::internals::base::memory::available_bytes;

use super::buffers;
use super::builder;
use super::gpus::{sharing, usable_gpus};
use super::job::Job;
use super::places::Places;
use super::real::Settings;
use crate::cli::args::{BenchArgs, List, or_default};
use crate::cli::cases::case::Case;
use crate::cli::cases::inputs::ScaleKind;
use crate::cli::cases::limits::MAX_WORLD;
use crate::cli::cases::links::Link;
use crate::cli::cases::presets;
use crate::cli::cases::routing::Routing;
use crate::cli::cases::words::{
    ArenaWord, Check, DeviceWord, IndexWord, Launch, LayoutWord, MissingWord, Mode, NetworkWord, PartialWord,
    TransportWord, WeightsWord, Word, WorldMode,
};
use crate::cli::files::check_outputs;
use crate::cli::out::Out;
use crate::cli::usage::Refusal;

/// Ranks of the CPU device by default, and of its nodes.
const CPU_WORLD: usize = 8;
const CPU_NODE: usize = 4;
/// Most ranks of a run: on GPUs, which ranks may share, and on the CPU device. Plans may have more.
const CUDA_RANKS: usize = 16;
const CPU_RANKS: usize = 64;
/// Tokens by default: a decode step.
const TOKENS: usize = 128;
/// On a GPU one of so many iterations is compared with the reference: the comparison takes much longer than the run.
const CUDA_CHECK: usize = 16;
/// Progress deadline by default.
const TIMEOUT_MS: usize = 30_000;

/// The configuration of a bench, with every default filled in.
#[derive(Debug, Clone)]
pub struct Config {
    pub device: DeviceWord,
    pub launch: Launch,
    /// Where arenas lie.
    pub arena: ArenaWord,
    pub allow_old_shm: bool,
    /// Devices that all ranks were given, and each rank's place.
    pub nic_devices: Vec<String>,
    pub places: Places,
    /// Options that places follow from, as typed.
    pub placed_by: Vec<String>,
    pub preset: &'static str,
    /// The run, with the first count of `tokens`.
    pub case: Case,
    pub tokens: Vec<usize>,
    pub warmup: usize,
    pub check: Check,
    pub timeout: Duration,
    /// Whether the device records the stages of its calls.
    pub stages: bool,
    pub outputs: Outputs,
}

/// Where results go.
#[derive(Debug, Clone, Default)]
pub struct Outputs {
    pub json: Option<String>,
    pub plot: Option<String>,
    pub trace: Option<String>,
}

impl Outputs {
    /// Whether stdout is for one object alone.
    pub fn quiet(&self) -> bool {
        self.json.as_deref() == Some("-")
    }
}

/// Whether the bench is to run here, or only to be described.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Run,
    Plan,
}

impl Config {
    /// The run of one point of the sweep.
    pub fn point(&self, tokens: usize) -> Case {
        Case { tokens, ..self.case.clone() }
    }

    /// Most ranks of a host: of a job's, those of its largest node.
    pub fn host_ranks(&self) -> usize {
        host_ranks(self.launch, &self.case)
    }

    /// The settings that every rank gets for one point of the sweep.
    pub fn job(&self, tokens: usize) -> Job {
        Job {
            case: self.point(tokens),
            warmup: self.warmup,
            check: self.check,
            timeout: self.timeout,
            arena: self.arena,
            allow_old_shm: self.allow_old_shm,
            places: self.places.clone(),
            measured: true,
            stages: self.stages,
            host_ranks: self.host_ranks(),
        }
    }

    /// Options that differ from their defaults and that no other field of a result shows, as typed.
    pub fn further_options(&self) -> Vec<String> {
        let case = &self.case;
        let mut options = Vec::new();
        let mut add = |differs: bool, text: String| {
            if differs {
                options.push(text);
            }
        };
        add(case.scales == ScaleKind::Ue8m0, format!("--scales {}", case.scales.name()));
        add(case.weights != WeightsWord::Dispatch, format!("--weights {}", case.weights.name()));
        add(case.accumulate, "--accumulate".to_string());
        add(case.index != IndexWord::I64, format!("--index {}", case.index.name()));
        add(case.ragged, "--ragged".to_string());
        add(case.align != 1, format!("--align {}", case.align));
        let largest = self.tokens.iter().copied().max().unwrap_or(0).max(1);
        let numbers = [
            ("--capacity", case.capacity),
            ("--replicas", Some(case.replicas).filter(|replicas| *replicas > 1)),
            ("--duplicates", case.duplicate_percent),
            ("--call-top-k", case.call_top_k),
            ("--max-tokens", Some(case.max_tokens).filter(|most| *most != largest)),
            ("--chunk-rows", case.chunk_rows),
            ("--ll-tokens", case.ll_tokens),
            ("--round-tokens", case.round_tokens),
            ("--warmup", Some(self.warmup).filter(|warmup| *warmup != warmups(self.device))),
        ];
        for (name, number) in numbers {
            add(number.is_some(), format!("{name} {}", number.unwrap_or_default()));
        }
        add(case.in_place, "--in-place".to_string());
        add(case.compact_handles, "--compact-handles".to_string());
        add(case.again, "--replay".to_string());
        add(case.mixed, "--mixed".to_string());
        add(case.missing != MissingWord::No, format!("--missing {}", case.missing.name()));
        add(case.payload > 0, format!("--payload {}", case.payload));
        add(case.gathered, "--gather".to_string());
        add(case.dispatch_payload > 0, format!("--dispatch-payload {}", case.dispatch_payload));
        add(!case.double_buffer, "--single-buffer".to_string());
        add(case.network != NetworkWord::Calm, format!("--network {}", case.network.name()));
        add(self.allow_old_shm, "--allow-old-shm".to_string());
        let devices = self.nic_devices.join(",");
        add(!devices.is_empty(), format!("--transport {}:{devices}", case.transport.name()));
        self.placed_by.iter().for_each(|option| add(true, option.clone()));
        add(case.world_mode != WorldMode::Threads, format!("--world-mode {}", case.world_mode.name()));
        let check = match self.check {
            Check::All => "all".to_string(),
            Check::First => "first".to_string(),
            Check::Every(n) => n.to_string(),
        };
        add(self.check != checks(self.device), format!("--check {check}"));
        options
    }

    /// Fills in defaults and checks.
    ///
    /// # Errors
    /// The first unusable option.
    pub fn new(args: &BenchArgs, purpose: Purpose) -> Result<Config, Refusal> {
        let gpus = usable_gpus();
        let device = args.device.unwrap_or(if gpus > 0 { DeviceWord::Cuda } else { DeviceWord::Cpu });
        let launch = or_default(args.launch, Launch::Threads);
        let world = world(args, device, launch, gpus, purpose)?;
        let nodes = nodes(args, device, world)?;
        let world_mode = world_mode(args, device, launch)?;
        let preset = presets::find(args.preset.as_deref().unwrap_or(presets::PRESETS[0].name))
            .map_err(|error| Refusal::from_error(&error))?;
        let dtype = args.dtype.unwrap_or(preset.dtype);
        let combine_dtype = args.combine_dtype.unwrap_or(Dtype::Bf16);
        let (tokens, max_tokens) = sweep(args)?;
        let cuda = device == DeviceWord::Cuda;
        let mode = match (args.counts_first, args.mode) {
            (true, Some(mode)) if mode != Mode::Counts => {
                let advice = "counts come first in calls of their own; leave out --mode or --counts-first";
                return Err(Refusal::of("--counts-first with --mode", mode.name(), advice));
            }
            (true, _) => Mode::Counts,
            (false, mode) => or_default(mode, Mode::Fused),
        };
        let mut case = Case {
            world,
            nodes,
            transport: args.transport.as_ref().map_or(TransportWord::Sim, |transport| transport.word),
            link: args.link.unwrap_or(Link::None),
            network: or_default(args.network, NetworkWord::Calm),
            nics: args.nics,
            chunk_rows: args.chunk_rows,
            double_buffer: !args.single_buffer,
            ll_tokens: args.ll_tokens,
            round_tokens: args.round_tokens,
            hidden: args.hidden.unwrap_or(preset.hidden),
            experts: args.experts.unwrap_or(preset.experts),
            top_k: args.top_k.unwrap_or(preset.top_k),
            dtype,
            scales: args.scales.unwrap_or(if dtype == Dtype::Fp8E4m3 { ScaleKind::F32 } else { ScaleKind::None }),
            quantize: args.quantize,
            combine_dtype,
            out_dtype: combine_dtype,
            partial: or_default(args.partial, PartialWord::Same),
            weights: or_default(args.weights, WeightsWord::Dispatch),
            layout: or_default(args.layout, LayoutWord::Contiguous),
            align: args.align.unwrap_or(1),
            capacity: args.capacity,
            in_place: args.in_place,
            accumulate: args.accumulate,
            ragged: args.ragged,
            // A replayed graph needs its changing count in device memory.
            device_count: mode == Mode::Graph && args.ragged,
            tokens: tokens.first().copied().unwrap_or(TOKENS),
            max_tokens,
            routing: args.routing.clone().unwrap_or(Routing::Uniform),
            replicas: args.replicas.unwrap_or(1),
            index: or_default(args.index, IndexWord::I64),
            duplicate_percent: args.duplicates,
            compact_handles: args.compact_handles,
            again: args.replay,
            mixed: args.mixed,
            missing: or_default(args.missing, MissingWord::No),
            payload: args.payload.unwrap_or(0),
            gathered: args.gather,
            dispatch_payload: args.dispatch_payload.unwrap_or(0),
            call_top_k: args.call_top_k,
            mode,
            lockstep: true,
            sms: args.sms,
            world_mode,
            iters: args.iters.unwrap_or(if cuda { 1000 } else { 5 }),
            seed: args.seed.unwrap_or(1),
            ..Case::default()
        };
        check_case(&case, device)?;
        check_transport(args, &case)?;
        if case.transport == TransportWord::Shm && case.several_nodes() && launch == Launch::Threads {
            let advice = "ranks over libfabric:shm are processes: one that closes would crash others of its process; give \
                          processes, or another --transport";
            return Err(Refusal::of("--launch", Launch::Threads.name(), advice));
        }
        let places = if purpose == Purpose::Run {
            Places::new(args, device, &case, host_ranks(launch, &case))?
        } else {
            Places::default()
        };
        case.nics = case.nics.or(places.nics);
        let outputs = Outputs { json: args.json.clone(), plot: args.plot.clone(), trace: args.trace.clone() };
        // A rank that is a process writes none of them, unless it is the first of a job.
        if !args.as_rank && (launch != Launch::Env || variable("RANK") == Some(0)) {
            let drawn = [("--plot", outputs.plot.as_deref()), ("--trace", outputs.trace.as_deref())];
            check_outputs(outputs.json.as_deref(), &drawn)?;
        }
        Ok(Config {
            device,
            launch,
            arena: check_arena(
                args.arena.or_else(|| found_arena(args, &case, device, &places)),
                device,
                launch,
                &case,
            )?,
            allow_old_shm: args.allow_old_shm,
            nic_devices: args.transport.as_ref().map_or_else(Vec::new, |transport| transport.devices.clone()),
            places,
            placed_by: placed_by(args),
            preset: preset.name,
            case,
            tokens,
            warmup: args.warmup.unwrap_or_else(|| warmups(device)),
            check: args.check.unwrap_or_else(|| checks(device)),
            timeout: Duration::from_millis(args.timeout_ms.unwrap_or(TIMEOUT_MS) as u64),
            stages: args.stages || args.trace.is_some(),
            outputs,
        })
    }
}

/// GPU memory, where the rank's NICs of the network that was asked for reach it.
fn found_arena(args: &BenchArgs, case: &Case, device: DeviceWord, places: &Places) -> Option<ArenaWord> {
    if device != DeviceWord::Cuda || !case.several_nodes() || !reaches_gpus(case.transport) {
        return None;
    }
    let rank = variable("LOCAL_RANK").unwrap_or(0);
    let devices = places.of(rank).devices;
    let settings = Settings::new(case.transport, case.nics.unwrap_or(1), devices, args.allow_old_shm)?;
    settings.reaches(rank % usable_gpus().max(1)).then_some(ArenaWord::Device)
}

/// Most ranks of a host. Where the environment describes the job, each node may be a host.
fn host_ranks(launch: Launch, case: &Case) -> usize {
    let largest = || case.nodes.iter().copied().max();
    if launch == Launch::Env { largest().unwrap_or(case.world) } else { case.world }
}

/// A number of the environment that describes the job; `World::from_env` names what is wrong with it.
fn variable(name: &str) -> Option<usize> {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok())
}

fn placed_by(args: &BenchArgs) -> Vec<String> {
    let cores = args.cores.as_ref().map(|cores| format!("--cores {cores}"));
    cores.into_iter().chain(args.topology.as_ref().map(|file| format!("--topology {file}"))).collect()
}

/// Iterations before the timed ones, by default.
fn warmups(device: DeviceWord) -> usize {
    if device == DeviceWord::Cuda { 100 } else { 1 }
}

/// Iterations that are compared by default.
fn checks(device: DeviceWord) -> Check {
    if device == DeviceWord::Cuda { Check::Every(CUDA_CHECK) } else { Check::All }
}

/// The given device, or the best of this machine.
///
/// # Errors
/// If GPUs are given and there are none.
pub fn or_here(given: Option<DeviceWord>) -> Result<DeviceWord, Refusal> {
    let gpus = usable_gpus();
    match given {
        Some(DeviceWord::Cuda) if gpus == 0 => Err(no_gpu()),
        Some(device) => Ok(device),
        None => Ok(if gpus > 0 { DeviceWord::Cuda } else { DeviceWord::Cpu }),
    }
}

/// Most ranks of a GPU that have an emulated NIC each. A NIC takes 16 SMs: of an H200's 132, four NICs leave 17 for
/// each rank's calls, and eight leave none.
const NICS_OF_A_GPU: usize = 4;

/// Where arenas lie: the given place, or else one that the network between nodes reaches. Emulated NICs reach GPU
/// memory, within a process and if few ranks share a GPU. They are never hostile, whatever the case asks for.
///
/// # Errors
/// If the network does not reach the given place.
pub fn arena(given: Option<ArenaWord>, device: DeviceWord, launch: Launch, case: &Case) -> Result<ArenaWord, Refusal> {
    let inter_node = device == DeviceWord::Cuda && case.several_nodes();
    let processor = inter_node && case.transport != TransportWord::Sim;
    let processes = launch != Launch::Threads;
    let sharers = sharing(host_ranks(launch, case));
    match given {
        // The network says what it lacks, if it does not reach it.
        Some(ArenaWord::Device) if processor && reaches_gpus(case.transport) => Ok(ArenaWord::Device),
        Some(ArenaWord::Device) if processor => {
            let advice = "this network copies with the processor, which cannot reach it; give host";
            Err(Refusal::of("--arena", ArenaWord::Device.name(), advice))
        }
        None if processor => Ok(ArenaWord::Host),
        Some(ArenaWord::Device) if inter_node && processes => {
            let advice =
                "between processes the simulated network copies with the processor, which cannot reach it; give host";
            Err(Refusal::of("--arena", ArenaWord::Device.name(), advice))
        }
        Some(ArenaWord::Device) if inter_node && sharers > NICS_OF_A_GPU => {
            let advice = format!(
                "{sharers} ranks a GPU leave no room for an emulated NIC each, but {NICS_OF_A_GPU} do; give host"
            );
            Err(Refusal::of("--arena", ArenaWord::Device.name(), &advice))
        }
        Some(given) => Ok(given),
        None if inter_node && (processes || case.network == NetworkWord::Hostile || sharers > NICS_OF_A_GPU) => {
            Ok(ArenaWord::Host)
        }
        None => Ok(ArenaWord::Device),
    }
}

/// Refuses options of the simulated network for another one.
fn check_transport(args: &BenchArgs, case: &Case) -> Result<(), Refusal> {
    if case.transport == TransportWord::Sim {
        return Ok(());
    }
    let advice = format!("{} is as it is; leave it out, or give --transport sim", case.transport.name());
    match (args.link, args.network) {
        (Some(link), _) if link != Link::None => Err(Refusal::of("--link", link, &advice)),
        (_, Some(network)) => Err(Refusal::of("--network", network.name(), &advice)),
        _ => Ok(()),
    }
}

/// Whether NICs of that network may reach memory of GPUs.
fn reaches_gpus(transport: TransportWord) -> bool {
    matches!(transport, TransportWord::Efa | TransportWord::Verbs)
}

/// As [`arena`], for a network that was asked for.
fn check_arena(
    given: Option<ArenaWord>,
    device: DeviceWord,
    launch: Launch,
    case: &Case,
) -> Result<ArenaWord, Refusal> {
    let emulated = device == DeviceWord::Cuda && case.several_nodes() && given == Some(ArenaWord::Device);
    if emulated && case.network == NetworkWord::Hostile {
        let advice = "emulated NICs do their best; give calm, or --arena host";
        return Err(Refusal::of("--network", case.network.name(), advice));
    }
    arena(given, device, launch, case)
}

/// Notes that arenas are in host memory although that was not given.
pub fn note_arena(given: Option<ArenaWord>, chosen: ArenaWord, out: &Out) {
    if given.is_none() && chosen == ArenaWord::Host {
        note!(out, "tokenyard: arenas are in host memory, where the network reaches them");
    }
}

fn no_gpu() -> Refusal {
    let advice = "no GPU can be used here; give cpu, and see tokenyard doctor for what is lacking";
    Refusal::of("--device", DeviceWord::Cuda.name(), advice)
}

fn world(
    args: &BenchArgs,
    device: DeviceWord,
    launch: Launch,
    gpus: usize,
    purpose: Purpose,
) -> Result<usize, Refusal> {
    let run_on_gpus = device == DeviceWord::Cuda && purpose == Purpose::Run;
    if run_on_gpus && gpus == 0 {
        return Err(no_gpu());
    }
    let job = variable("WORLD_SIZE").filter(|_| launch == Launch::Env);
    if let Some(size) = job.filter(|size| !(1..=MAX_WORLD).contains(&(*size as u64))) {
        let advice = format!("a job of this program has 1 to {MAX_WORLD} ranks; start so many");
        return Err(Refusal::of_variable("WORLD_SIZE", size, advice));
    }
    let default = job.unwrap_or(if device == DeviceWord::Cuda && gpus > 0 { gpus } else { CPU_WORLD });
    let world = args.world.unwrap_or(default);
    if run_on_gpus && world > gpus && launch == Launch::Processes {
        let advice =
            format!("processes cannot share a GPU; give at most {gpus}, or --launch threads, whose ranks share them");
        return Err(Refusal::of("--world", world, advice));
    }
    if purpose == Purpose::Run && launch != Launch::Env {
        check_ranks(world, device)?;
    }
    Ok(world)
}

/// Refuses more ranks than a run on one host may have.
///
/// # Errors
/// If there are more.
pub fn check_ranks(world: usize, device: DeviceWord) -> Result<(), Refusal> {
    let most = if device == DeviceWord::Cuda { CUDA_RANKS } else { CPU_RANKS };
    if world > most {
        let advice = format!("a run has at most {most} ranks on one host; give 1 to {most}, or plan or simulate more");
        return Err(Refusal::of("--world", world, advice));
    }
    Ok(())
}

/// Refuses a case that the device cannot run or the library does not accept.
///
/// # Errors
/// The first unusable option.
pub fn check_case(case: &Case, device: DeviceWord) -> Result<(), Refusal> {
    if device == DeviceWord::Cpu && case.sms == Some(1) {
        return Err(Refusal::of("--sms", 1, "the CPU device needs two blocks; give at least 2"));
    }
    case.check()?;
    builder::planned(case, device).map(|_| ())
}

/// Refuses `host_ranks` ranks of the CPU device whose buffers together exceed the free memory: the system would kill
/// the program.
///
/// # Errors
/// If they do.
pub fn check_memory(case: &Case, device: DeviceWord, host_ranks: usize) -> Result<(), Refusal> {
    let need = host_ranks.saturating_mul(buffers::bytes(case));
    let free = available_bytes().filter(|free| device == DeviceWord::Cpu && need as u64 > *free);
    let Some(free) = free else { return Ok(()) };
    let (name, value, instead) = match case.capacity {
        Some(rows) => ("--capacity", rows, "fewer"),
        None => ("--max-tokens", case.max_tokens, "fewer, or a --capacity"),
    };
    let advice = format!("buffers of all ranks take {need} bytes, and {free} bytes of memory are free; give {instead}");
    Err(Refusal::of(name, value, advice))
}

/// Ranks of each node; empty for one node. The case checks that they fit the world.
fn nodes(args: &BenchArgs, device: DeviceWord, world: usize) -> Result<Vec<usize>, Refusal> {
    let sizes = match &args.ranks_per_node {
        None if device == DeviceWord::Cpu => cut(world, CPU_NODE),
        None => vec![world],
        Some(List(nodes)) => match nodes.as_slice() {
            [one] if *one > world => {
                let advice = format!("the world has {world} ranks; give at most that");
                return Err(Refusal::of("--ranks-per-node", one, advice));
            }
            [one] if world.is_multiple_of(*one) => cut(world, *one),
            [one] => {
                let list: Vec<String> = cut(world, *one).iter().map(usize::to_string).collect();
                let advice = format!("{world} ranks are no multiple of it; for uneven nodes give {}", list.join(","));
                return Err(Refusal::of("--ranks-per-node", one, advice));
            }
            _ => nodes.clone(),
        },
    };
    Ok(if sizes == [world] { Vec::new() } else { sizes })
}

/// Tokens of each point, and the capacity for all of them.
fn sweep(args: &BenchArgs) -> Result<(Vec<usize>, usize), Refusal> {
    let tokens = args.tokens.clone().unwrap_or(List(vec![TOKENS])).0;
    let most = tokens.iter().copied().max().unwrap_or(TOKENS);
    let max_tokens = args.max_tokens.unwrap_or(most.max(1));
    if max_tokens < most {
        let advice = format!("give at least {most}, the largest of --tokens, or leave it out");
        return Err(Refusal::of("--max-tokens", max_tokens, advice));
    }
    Ok((tokens, max_tokens))
}

/// Nodes of `size` ranks; the last may be smaller.
fn cut(world: usize, size: usize) -> Vec<usize> {
    (0..world.div_ceil(size.max(1))).map(|node| size.min(world - node * size)).collect()
}

fn world_mode(args: &BenchArgs, device: DeviceWord, launch: Launch) -> Result<WorldMode, Refusal> {
    let mode = or_default(args.world_mode, WorldMode::Threads);
    if let (Some(given), DeviceWord::Cuda) = (args.world_mode, device) {
        let advice = "GPUs schedule themselves; give --device cpu, or leave it out";
        return Err(Refusal::of("--world-mode", given.name(), advice));
    }
    if mode == WorldMode::OneThread && launch != Launch::Threads {
        let advice = "one thread cannot be several processes; give --launch threads, or --world-mode threads";
        return Err(Refusal::of("--world-mode", mode.name(), advice));
    }
    Ok(mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ranks_per_node: Option<&[usize]>, device: DeviceWord, world: usize) -> Result<Vec<usize>, String> {
        let args = BenchArgs { ranks_per_node: ranks_per_node.map(|list| List(list.to_vec())), ..BenchArgs::default() };
        nodes(&args, device, world).map_err(|refusal| refusal.to_string())
    }

    #[test]
    fn arenas_lie_where_the_network_reaches_them() {
        let (device, host) = (ArenaWord::Device, ArenaWord::Host);
        let calm = Case { world: 4, nodes: vec![2, 2], network: NetworkWord::Calm, ..Case::default() };
        let hostile = Case { network: NetworkWord::Hostile, ..calm.clone() };
        let one = Case { nodes: Vec::new(), ..calm.clone() };
        let of =
            |given, launch, case| check_arena(given, DeviceWord::Cuda, launch, case).map_err(|why| why.to_string());
        assert_eq!(of(None, Launch::Threads, &calm), Ok(device));
        assert_eq!(of(None, Launch::Processes, &calm), Ok(host));
        assert_eq!(of(None, Launch::Threads, &hostile), Ok(host));
        assert_eq!(of(None, Launch::Processes, &one), Ok(device));
        assert_eq!(of(Some(host), Launch::Threads, &one), Ok(host));
        assert!(of(Some(device), Launch::Processes, &calm).is_err_and(|why| why.contains("give host")));
        assert!(of(Some(device), Launch::Threads, &hostile).is_err_and(|why| why.contains("--network is `hostile`")));
        assert_eq!(check_arena(None, DeviceWord::Cpu, Launch::Threads, &hostile).ok(), Some(device));
    }

    #[test]
    fn each_node_of_a_job_may_be_a_host() {
        let of = |nodes: &[usize]| Case { world: 5, nodes: nodes.to_vec(), ..Case::default() };
        let ranks = |launch, nodes| host_ranks(launch, &of(nodes));
        assert_eq!((ranks(Launch::Env, &[2, 3]), ranks(Launch::Env, &[])), (3, 5));
        assert_eq!((ranks(Launch::Processes, &[2, 3]), ranks(Launch::Threads, &[2, 3])), (5, 5));
    }

    #[test]
    fn nodes_are_cut_as_asked_for() {
        for (given, world, nodes) in [
            (&[8][..], 8, &[][..]),
            (&[4], 8, &[4, 4]),
            (&[1], 3, &[1, 1, 1]),
            (&[3, 5], 8, &[3, 5]),
            (&[5, 3], 8, &[5, 3]),
        ] {
            assert_eq!(of(Some(given), DeviceWord::Cpu, world), Ok(nodes.to_vec()), "{given:?}");
        }
        assert!(of(Some(&[3]), DeviceWord::Cpu, 8).is_err_and(|why| why.contains("uneven nodes give 3,3,2")));
        assert!(of(Some(&[9]), DeviceWord::Cpu, 8).is_err_and(|why| why.contains("at most")));
        assert_eq!(of(None, DeviceWord::Cpu, 8), Ok(vec![4, 4]));
        assert_eq!(of(None, DeviceWord::Cuda, 8), Ok(Vec::new()));
        assert_eq!((cut(6, 4), cut(4, 4), cut(3, 4)), (vec![4, 2], vec![4], vec![3]));
    }
}
