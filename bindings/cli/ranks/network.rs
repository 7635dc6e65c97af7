//! The network of a run of several nodes: an endpoint for each rank, and the proxy that drives it.
//!
//! The network is simulated, or a real one. Between ranks that are threads with GPUs, and arenas in GPU memory, an
//! emulated NIC on each GPU moves the bytes; otherwise the processor does.
//!
//! Beside the data path, on the thread that starts the ranks and on the ranks' threads. A world of one node has no
//! network. With one thread per rank, time is real and each rank's proxy is a thread. On one thread, virtual time
//! passes with every poll and each proxy is a fiber, numbered after the fibers of the ranks.

use tokenyard::internals::proxy::driver::ThreadConfig;
use tokenyard::internals::proxy::machine::Liveness;
use tokenyard::internals::proxy::{ProxyConfig, ProxyLoop};
use tokenyard::internals::transport::network::Transport;
use tokenyard::internals::transport::network::emulated::{self, GpuNetwork};
use tokenyard::internals::transport::network::sim::{Clock, LinkModel, Network, ProcessEndpoint, SimConfig};
use tokenyard::{AllToAllBuilder, Device, Error, Proxy, Result, World};

use super::forge::Forger;
use super::job::Job;
use super::meeting::Meeting;
use super::random::random_bytes;
use super::real::Real;
use crate::cli::cases::case::Case;
use crate::cli::cases::words::{ArenaWord, DeviceWord, FaultWord, NetworkWord};

/// When a silent peer counts as lost: many ranks may share few cores here.
const SILENCE_NS: u64 = 10_000_000_000;
/// Virtual time of a poll.
const TICK_NS: u64 = 100;
/// Largest random delay of a calm network, so that nothing can rely on order there either.
const CALM_JITTER_NS: u64 = 200;
/// Least number of NICs of a hostile network.
const HOSTILE_NICS: usize = 2;

/// A proxy that runs on a fiber instead of a thread.
pub struct ProxyFiber {
    proxy_loop: ProxyLoop,
    network: Network,
}

impl ProxyFiber {
    /// Runs until its rank's proxy and contexts are dropped. Virtual time passes with every poll, so messages in flight
    /// make progress.
    pub fn run(self) {
        let ProxyFiber { proxy_loop, network } = self;
        proxy_loop.run(|| network.next_due_ns().is_some());
    }
}

/// The NICs of every rank.
pub fn nics(case: &Case) -> Vec<LinkModel> {
    let own = case.link.nics();
    let usual = if case.network == NetworkWord::Hostile { own.max(HOSTILE_NICS) } else { own };
    vec![case.link.model(); case.nics.unwrap_or(usual)]
}

/// The simulated network that a case describes.
pub fn config(case: &Case, clock: Clock) -> SimConfig {
    let base = match case.network {
        NetworkWord::Calm => SimConfig { seed: case.seed, jitter_ns: CALM_JITTER_NS, ..SimConfig::calm() },
        NetworkWord::Hostile => SimConfig::hostile(case.seed),
    };
    SimConfig { clock, nics: nics(case), ..base }
}

/// The network that ranks which are threads share.
pub enum Shared {
    /// The processor copies.
    Sim(Network),
    /// A kernel on each GPU copies.
    Gpu {
        network: GpuNetwork<Device>,
        /// If calls are timed.
        measured: Option<Measured>,
    },
    /// Each rank opens its own endpoint.
    Real(Real, ArenaWord),
}

/// Needed to time calls over the emulation.
pub struct Measured {
    /// Time that the emulation itself adds to a small write, in µs.
    nic_us: f64,
    /// Where all ranks meet before timed calls.
    meeting: Meeting,
}

impl Shared {
    /// The endpoint of a rank.
    ///
    /// # Errors
    /// `Argument` if the rank has one already; `Device` where memory is lacking.
    pub fn endpoint(&self, world: &World, device: &Device) -> Result<Box<dyn Transport>> {
        Ok(match self {
            Shared::Sim(network) => endpoint(network, world)?,
            Shared::Gpu { network, .. } => Box::new(network.endpoint(world.rank(), device)?),
            Shared::Real(real, arena) => real.open(world, device, *arena)?,
        })
    }

    /// Time that the emulation adds to a small write, in µs, if measured.
    pub fn nic_us(&self) -> Option<f64> {
        self.measured().map(|measured| measured.nic_us)
    }

    /// Where ranks meet before timed calls, if they leave the barrier at different times.
    pub fn meeting(&self) -> Option<&Meeting> {
        self.measured().map(|measured| &measured.meeting)
    }

    fn measured(&self) -> Option<&Measured> {
        match self {
            Shared::Sim(_) | Shared::Real(..) => None,
            Shared::Gpu { measured, .. } => measured.as_ref(),
        }
    }
}

/// The network of ranks that are threads; `None` for one node. `open_device` opens the device of a rank.
///
/// # Errors
/// `Config` if the case makes no sense; errors of the emulation's measurement.
pub fn real_time(
    job: &Job,
    device: DeviceWord,
    open_device: impl Fn(usize) -> Result<Device>,
) -> Result<Option<Shared>> {
    let case = &job.case;
    if let Some(real) = Real::of(job).filter(|_| case.several_nodes()) {
        return Ok(Some(Shared::Real(real, job.arena)));
    }
    if !case.several_nodes() || device == DeviceWord::Cpu || job.arena == ArenaWord::Host {
        return Ok(open(case, Clock::Real)?.map(Shared::Sim));
    }
    let nics = nics(case);
    let model = nics.first().copied().unwrap_or(LinkModel::FREE);
    let measured = if job.measured {
        // From a rank to one of another node.
        let (from, to) = (open_device(0)?, open_device(case.nodes.first().copied().unwrap_or(0))?);
        Some(Measured { nic_us: emulated::overhead(&from, &to)?, meeting: Meeting::new(&from, case.world)? })
    } else {
        None
    };
    Ok(Some(Shared::Gpu { network: GpuNetwork::new(case.world, model, nics.len())?, measured }))
}

/// The network of ranks that are all on one thread; `None` for one node.
///
/// # Errors
/// `Config` if the case makes no sense.
pub fn virtual_time(case: &Case) -> Result<Option<Network>> {
    open(case, Clock::Virtual { tick_ns: TICK_NS })
}

fn open(case: &Case, clock: Clock) -> Result<Option<Network>> {
    if case.several_nodes() { Network::new(case.world, config(case, clock)).map(Some) } else { Ok(None) }
}

/// The world, with its ranks on the case's nodes.
///
/// # Errors
/// `Config` if they do not fit.
pub fn place(world: World, case: &Case) -> Result<World> {
    if case.several_nodes() { world.with_nodes(&case.nodes) } else { Ok(world) }
}

/// All ranks of this process, on their nodes.
///
/// # Errors
/// As [`place`].
pub fn worlds(case: &Case) -> Result<Vec<World>> {
    World::threads(case.world)?.into_iter().map(|world| place(world, case)).collect()
}

/// A thread that drives a rank's endpoint.
///
/// # Errors
/// Any error of the library.
pub fn spawn(world: &World, endpoint: Box<dyn Transport>, core: Option<usize>) -> Result<Proxy> {
    let liveness = Liveness { silence_ns: SILENCE_NS, ..Liveness::default() };
    Proxy::spawn(world, endpoint, ProxyConfig { thread: threads_of(world, core), liveness })
}

/// Each rank of this process has a proxy and an executor that spin.
fn threads_of(world: &World, core: Option<usize>) -> ThreadConfig {
    let ranks = if world.same_process() { world.size() } else { 1 };
    ThreadConfig { core, spinners: 2 * ranks }
}

/// As [`spawn`], but a fiber runs the proxy.
///
/// # Errors
/// Any error of the library.
pub fn fiber(network: &Network, world: &World, case: &Case) -> Result<(Proxy, ProxyFiber)> {
    let clock = {
        let network = network.clone();
        Box::new(move || network.now_ns())
    };
    let mut endpoint = endpoint(network, world)?;
    if case.fault == FaultWord::Forged {
        endpoint = Box::new(Forger::new(endpoint, world.rank(), case.seed));
    }
    let (proxy, proxy_loop) = Proxy::with_loop(world, endpoint, Liveness::default(), clock)?;
    Ok((proxy, ProxyFiber { proxy_loop, network: network.clone() }))
}

/// The endpoint of a rank that shares a network with the other ranks of its process.
///
/// # Errors
/// `Argument` if the rank has one already.
pub fn endpoint(network: &Network, world: &World) -> Result<Box<dyn Transport>> {
    Ok(Box::new(network.endpoint(world.rank())?))
}

/// The endpoint of a rank that is a process. Collective.
///
/// # Errors
/// If the network cannot be joined.
pub fn process_endpoint(world: &World, device: &Device, job: &Job) -> Result<Box<dyn Transport>> {
    if let Some(real) = Real::of(job) {
        return real.open(world, device, job.arena);
    }
    let mut secret = [0u8; 16];
    if world.rank().index() == 0 {
        secret = random_bytes()
            .map_err(|error| Error::bootstrap(error, "the network between processes needs a random token"))?;
    }
    let tokens = world.all_gather("network token", &secret)?;
    let token = tokens.first().map_or(&[][..], Vec::as_slice);
    Ok(Box::new(ProcessEndpoint::open(world.rank(), token, config(&job.case, Clock::Real))?))
}

/// Gives a context its rank's proxy, and the case's settings between nodes.
pub fn attach(mut builder: AllToAllBuilder, proxy: Option<&Proxy>, case: &Case) -> AllToAllBuilder {
    if let Some(proxy) = proxy {
        builder = builder.proxy(proxy);
    }
    builder.tuning(|tuning| {
        tuning.chunk_rows = case.chunk_rows;
        if !case.double_buffer {
            tuning.double_buffer_bytes = 0;
        }
        tuning.ll_tokens = case.ll_tokens;
        tuning.meta_tile = case.meta_tile;
        tuning.round_tokens = case.round_tokens;
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::cases::links::Link;
    use crate::cli::cases::words::{Check, TransportWord};
    use crate::cli::ranks::places::Places;
    use crate::cli::ranks::real::Settings;

    /// With fewer, proxies on a machine of few cores would take them from the ranks for whose rows they wait.
    #[test]
    fn each_rank_of_a_process_spins_twice() {
        let spinners = |world| threads_of(&World::threads(world).unwrap()[0], None).spinners;
        assert_eq!([1, 2, 3, 8].map(spinners), [2, 4, 6, 16]);
    }

    #[test]
    fn a_network_follows_from_its_case() {
        let case = Case { world: 4, nodes: vec![2, 2], link: Link::EfaP5, seed: 9, ..Case::default() };
        let hostile = config(&case, Clock::Real);
        assert_eq!((hostile.seed, hostile.nics.len(), hostile.clock), (9, 4, Clock::Real));
        assert!(hostile.full_permille > 0 && hostile.delay_permille > 0 && hostile.nics[0].gbps == 100.0);
        let calm = config(&Case { network: NetworkWord::Calm, nics: Some(3), ..case.clone() }, Clock::Real);
        assert!(calm.full_permille == 0 && calm.jitter_ns > 0 && calm.nics.len() == 3);
        let free = config(&Case { link: Link::None, ..case.clone() }, Clock::Real);
        assert_eq!(free.nics, vec![LinkModel::FREE; 2], "one NIC cannot overtake another");
        assert!(virtual_time(&case).is_ok_and(|network| network.is_some()));
        let job = |case| Job {
            case,
            warmup: 0,
            check: Check::All,
            timeout: std::time::Duration::from_secs(1),
            arena: ArenaWord::Device,
            allow_old_shm: true,
            places: Places::devices(&["rxe7".into()], 4),
            measured: false,
            stages: false,
            host_ranks: 4,
        };
        let shared = |case, device| real_time(&job(case), device, |_| Device::cpu()).unwrap();
        assert!(shared(Case { nodes: Vec::new(), ..case.clone() }, DeviceWord::Cuda).is_none());
        assert!(matches!(shared(case.clone(), DeviceWord::Cpu), Some(Shared::Sim(_))));
        assert!(matches!(shared(case.clone(), DeviceWord::Cuda), Some(Shared::Gpu { measured: None, .. })));
        for (transport, provider) in
            [(TransportWord::Tcp, "tcp"), (TransportWord::Shm, "shm"), (TransportWord::Efa, "efa")]
        {
            let case = Case { transport, nics: Some(3), ..case.clone() };
            assert!(shared(Case { nodes: Vec::new(), ..case.clone() }, DeviceWord::Cuda).is_none());
            let Some(Shared::Real(real, _)) = shared(case, DeviceWord::Cuda) else { panic!("not real") };
            let Settings::Libfabric(config) = real.of_rank(1) else { panic!("not {provider}") };
            assert_eq!((config.provider.as_str(), config.nics, config.allow_old_shm), (provider, 3, true));
        }
        let case = Case { transport: TransportWord::Verbs, nics: Some(2), ..case.clone() };
        let Some(Shared::Real(real, _)) = shared(case, DeviceWord::Cpu) else { panic!("not real") };
        let Settings::Verbs(config) = real.of_rank(1) else { panic!("not verbs") };
        assert_eq!((config.nics, config.devices), (2, vec!["rxe7".to_owned()]));
    }
}
