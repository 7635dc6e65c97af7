//! The life of one rank in its own process: joins, builds, plays round after round, and, if it is the victim, dies at
//! the given point. A survivor prints the error that ended its world, and ends by itself.

use crate::rig::*;
use std::io::Write;
use std::time::{Duration, Instant};
use tokenyard::internals::proxy::driver::ThreadConfig;
use tokenyard::internals::proxy::machine::Liveness;
use tokenyard::internals::transport::network::Transport;
use tokenyard::internals::transport::network::libfabric::{LibfabricConfig, LibfabricEndpoint};
use tokenyard::internals::transport::network::sim::{Clock, ProcessEndpoint, SimConfig};
use tokenyard::internals::transport::network::verbs::{VerbsConfig, VerbsEndpoint};
use tokenyard::*;

/// Names the point; set in ranks alone.
pub const POINT: &str = "TOKENYARD_TEST_KILL_POINT";
pub const VICTIM: &str = "TOKENYARD_TEST_KILL_VICTIM";
/// How long after the start of its build a victim dies, in microseconds.
pub const DELAY: &str = "TOKENYARD_TEST_KILL_DELAY_US";

/// Set where calls go on without the dead.
pub const TOLERANT: &str = "TOKENYARD_TEST_KILL_TOLERANT";

/// What carries bytes between nodes: one of these, or a provider of libfabric.
pub const NETWORK: &str = "TOKENYARD_TEST_KILL_NETWORK";
pub const SIMULATED: &str = "simulated";
/// By a device of verbs: that of `TOKENYARD_TEST_VERBS` named first, or else soft-RoCE's.
pub const VERBS: &str = "verbs";

/// The device of verbs.
pub fn device() -> String {
    let given = std::env::var("TOKENYARD_TEST_VERBS").unwrap_or_else(|_| "rxe0".to_owned());
    given.split(',').next().unwrap_or_default().to_owned()
}

/// How many times longer all takes over a network: soft-RoCE is in a VM, whose processors are emulated.
pub fn slowness(network: &str) -> u32 {
    if network == VERBS { 10 } else { 1 }
}

/// As `slowness`, in a rank.
fn own_slowness() -> u32 {
    slowness(&std::env::var(NETWORK).unwrap_or_default())
}

/// Deadline of every wait on the device.
pub const DEADLINE: Duration = Duration::from_millis(1000);
/// The round in which victims die; earlier ones work.
pub const FATAL_ROUND: usize = 5;

/// Where a victim dies, once all that it enqueued before has run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    BeforeJoin,
    AfterJoin,
    DuringBuild,
    AfterBuild,
    AfterDispatchSend,
    AfterDispatch,
    AfterCombineSend,
    AfterRound,
    /// The same, while the rank after the victim comes late to the next round.
    AfterRoundWhileOneIsLate,
    BeforeBarrier,
    /// Whenever the parent kills it.
    Whenever,
}

use Point::*;

const POINTS: [Point; 11] = [
    BeforeJoin,
    AfterJoin,
    DuringBuild,
    AfterBuild,
    AfterDispatchSend,
    AfterDispatch,
    AfterCombineSend,
    AfterRound,
    AfterRoundWhileOneIsLate,
    BeforeBarrier,
    Whenever,
];

/// The role of this process.
struct Fate {
    point: Point,
    victim: usize,
    rank: usize,
    delay: Duration,
    tolerant: bool,
}

/// Rounds of survivors that play on, of all as many, since the silence of a victim shows in different ones. It dies in
/// an early one.
const ROUNDS: usize = 150;

fn setting(name: &str) -> usize {
    std::env::var(name).unwrap().parse().unwrap()
}

fn die() -> ! {
    let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
    unreachable!("a process outlived SIGKILL");
}

/// A line that the parent reads.
fn print_line(line: &str) {
    println!("{line}");
    std::io::stdout().flush().unwrap();
}

/// Prints the error and the time since the last step that worked.
fn print_error(error: &Error, since: Instant) {
    print_line(&format!("after {}", since.elapsed().as_millis()));
    print_line(&format!("error {error:?}"));
    print_line(&format!("sentence {error}"));
}

/// Plays a rank, if this process is one.
pub fn live() {
    let Ok(name) = std::env::var(POINT) else { return };
    let fate = Fate {
        point: POINTS.into_iter().find(|point| format!("{point:?}") == name).unwrap(),
        victim: setting(VICTIM),
        rank: setting("RANK"),
        delay: Duration::from_micros(setting(DELAY) as u64),
        tolerant: std::env::var_os(TOLERANT).is_some(),
    };
    // The test harness may have begun a line.
    println!();
    fate.play();
}

impl Fate {
    fn dies_at(&self, point: Point) -> bool {
        self.rank == self.victim && self.point == point
    }

    fn play(&self) {
        let start = Instant::now();
        if self.dies_at(BeforeJoin) {
            die();
        }
        let world = match World::from_env() {
            Ok(world) => world,
            Err(error) => return print_error(&error, start),
        };
        if self.dies_at(AfterJoin) {
            die();
        }
        if self.dies_at(DuringBuild) {
            let delay = self.delay;
            std::thread::spawn(move || {
                std::thread::sleep(delay);
                die()
            });
        }
        // Opening a GPU takes a second of its own, whoever dies.
        let device = test_device(&world);
        let start = Instant::now();
        let proxy = (world.nodes().len() > 1).then(|| proxy(&world));
        let rig = match build(&world, device.clone(), proxy.as_ref(), self.tolerant) {
            Ok(rig) => rig,
            Err(error) => return print_error(&error, start),
        };
        if self.dies_at(AfterBuild) {
            die();
        }
        if self.tolerant {
            return self.play_on(&world, device, rig);
        }
        let mut number = 1;
        let error = loop {
            let start = Instant::now();
            if let Err(error) = self.round(&rig, number) {
                print_error(&error, start);
                break error;
            }
            if number == 3 {
                print_line("up");
            }
            number += 1;
        };
        drop(rig);
        match go_on(&world, device, proxy.as_ref(), &error) {
            Ok(()) => print_line("masked well"),
            Err(error) => print_line(&format!("masked {error}")),
        }
    }

    /// Plays on without the victim, then in a generation without it.
    fn play_on(&self, world: &World, device: Device, rig: Rig) {
        for number in 1..=ROUNDS {
            self.round(&rig, number).unwrap();
            if number == 3 {
                print_line("up");
            }
        }
        let silent: Vec<usize> = rig.ep.silent_ranks().iter().map(|silent| silent.rank.index()).collect();
        assert_eq!(silent, [self.victim]);
        drop(rig);
        go_on_without(world, device, None, Rank(self.victim as u32)).unwrap();
        print_line("went on");
    }

    /// The sums have what the victim's experts add, or none of them has; none once the victim is masked.
    fn check_sums(&self, rig: &Rig, choices: &[[i32; TOP_K]], number: usize, masked: bool) {
        let placement = rig.ep.placement();
        let of_victim = |expert: &i32| placement.rank_of(*expert as usize) == Some(self.victim as u32);
        let wanted = |with: bool| -> Vec<Vec<u8>> {
            let there = |experts: &[i32; TOP_K]| experts.iter().filter(|expert| with || !of_victim(expert)).count();
            let of = |(token, experts)| rig.scaled_row(token, number, 0.5 * there(experts) as f32);
            choices.iter().enumerate().map(of).collect()
        };
        let seen: Vec<Vec<u8>> = (0..MAX_TOKENS).map(|token| rig.sum(token)).collect();
        let right = seen == wanted(false) || (seen == wanted(true) && !masked);
        let shares: Vec<f32> = (0..MAX_TOKENS).map(|t| values(&seen[t])[0] / values(&rig.row(t, number))[0]).collect();
        let silent = rig.ep.silent_ranks();
        assert!(right, "round {number}, masked: {masked}, {silent:?}, {choices:?}: shares {shares:?}");
    }

    /// The victim dies here, in its last round, when its stream is empty.
    fn pass(&self, rig: &Rig, point: Point, number: usize) {
        if self.dies_at(point) && number == FATAL_ROUND {
            rig.stream.synchronize(PATIENCE * own_slowness()).unwrap();
            rig.ep.check().unwrap();
            die();
        }
    }

    /// Dispatch and combine, in one kernel each or, in odd rounds, in two; every row must come back.
    fn round(&self, rig: &Rig, number: usize) -> Result<()> {
        let choice = |token: usize| (rig.rank + token * 3 + number) % EXPERTS;
        let choices: Vec<_> =
            (0..MAX_TOKENS).map(|t| [choice(t) as i32, ((choice(t) + 1 + t) % EXPERTS) as i32]).collect();
        let masked = !rig.ep.silent_ranks().is_empty();
        rig.route(&choices, number);
        let (tokens, output) = (rig.tokens(MAX_TOKENS), rig.output(rig.capacity));
        let (rows, combined) = (rig.expert_rows(), rig.combined());
        if number.is_multiple_of(2) {
            let handle = rig.ep.dispatch(&rig.stream, &tokens, &output)?;
            rig.ep.combine(&rig.stream, &handle, &rows, &combined)?;
        } else {
            let sent = rig.ep.dispatch_send(&rig.stream, &tokens)?;
            self.pass(rig, AfterDispatchSend, number);
            let handle = rig.ep.dispatch_recv(&rig.stream, sent, &output)?;
            self.pass(rig, AfterDispatch, number);
            let sent = rig.ep.combine_send(&rig.stream, &handle, &rows)?;
            self.pass(rig, AfterCombineSend, number);
            rig.ep.combine_recv(&rig.stream, sent, &combined)?;
        }
        rig.stream.synchronize(PATIENCE * own_slowness())?;
        rig.ep.check()?;
        if self.tolerant {
            self.check_sums(rig, &choices, number, masked);
        } else {
            rig.expect_own_rows(MAX_TOKENS, number);
        }
        self.pass(rig, AfterRound, number);
        self.pass(rig, AfterRoundWhileOneIsLate, number);
        let late = self.point == AfterRoundWhileOneIsLate && self.rank == (self.victim + 1) % setting("WORLD_SIZE");
        if late && number == FATAL_ROUND {
            std::thread::sleep(DEADLINE * own_slowness() * 3 / 2);
        }
        if self.point == BeforeBarrier {
            self.pass(rig, BeforeBarrier, number);
            rig.ep.barrier(&rig.stream)?;
            rig.stream.synchronize(PATIENCE * own_slowness())?;
            rig.ep.check()?;
        }
        Ok(())
    }
}

/// This rank's proxy, over a network between processes; the simulated one reorders.
fn proxy(world: &World) -> Proxy {
    let rank = world.original(world.rank());
    let endpoint: Box<dyn Transport> = match std::env::var(NETWORK).unwrap().as_str() {
        SIMULATED => {
            let config = SimConfig { clock: Clock::Real, ..SimConfig::hostile(7) };
            Box::new(ProcessEndpoint::open(rank, b"kills", config).unwrap())
        }
        VERBS => {
            let mut config = VerbsConfig::default();
            (config.devices, config.let_go) = (vec![device()], Duration::from_secs(5));
            Box::new(VerbsEndpoint::open(rank, config).unwrap())
        }
        provider => {
            let mut config = LibfabricConfig::new(provider);
            // Ranks of other hosts reach no loopback address.
            let one_host = std::env::var("MASTER_ADDR").is_ok_and(|addr| addr.starts_with("127."));
            config.source = (provider == "tcp" && one_host).then(|| "127.0.0.1".into());
            Box::new(LibfabricEndpoint::open(rank, config).unwrap())
        }
    };
    let liveness = Liveness { silence_ns: 3_000_000_000 * u64::from(own_slowness()), ..Liveness::default() };
    let thread = ThreadConfig { core: None, spinners: 64 };
    Proxy::spawn(world, endpoint, ProxyConfig { liveness, thread }).unwrap()
}

/// The survivors' next generation: sums lack what the lost rank's experts would have added, and nothing else.
fn go_on(world: &World, device: Device, proxy: Option<&Proxy>, error: &Error) -> Result<()> {
    let lost = match error {
        Error::PeerLost { peer, .. } | Error::Timeout { peer, .. } => *peer,
        other => return Err(other.clone()),
    };
    go_on_without(world, device, proxy, lost)
}

fn go_on_without(world: &World, device: Device, proxy: Option<&Proxy>, lost: Rank) -> Result<()> {
    let members: Vec<Rank> = world.members().iter().copied().filter(|member| *member != lost).collect();
    let world = world.regroup(world.generation() + 1, &members)?;
    let rig = build(&world, device, proxy, false)?;
    let placement = rig.ep.placement().clone();
    for salt in 0..4 {
        let choices: [[i32; TOP_K]; MAX_TOKENS] = std::array::from_fn(|token| {
            let first = (rig.rank + 3 * token + salt) % EXPERTS;
            [first as i32, ((first + 3) % EXPERTS) as i32]
        });
        rig.route(&choices, salt);
        rig.round(MAX_TOKENS, rig.capacity)?;
        for (token, experts) in choices.iter().enumerate() {
            let there = experts.iter().filter(|e| placement.rank_of(**e as usize) != Some(lost.0)).count();
            assert_eq!(rig.sum(token), rig.scaled_row(token, salt, 0.5 * there as f32), "token {token}");
        }
    }
    world.barrier("masked")
}

/// A rig whose building may fail.
fn build(world: &World, device: Device, proxy: Option<&Proxy>, tolerant: bool) -> Result<Rig> {
    let mut builder = builder(world, &device).timeout(DEADLINE * own_slowness());
    if tolerant {
        builder = builder.missing_ranks(MissingRanks::MaskedAtDeadline);
    }
    if let Some(proxy) = proxy {
        // Where the network reaches them on GPUs, too.
        builder = builder.proxy(proxy).tuning(|t| {
            t.chunk_rows = Some(1);
            t.arena = ArenaPlace::Host
        });
    }
    let ep = builder.build()?;
    let capacity = world.size() * MAX_TOKENS * TOP_K;
    let row_bytes = HIDDEN * 2;
    let rig = Rig {
        stream: device.new_stream()?,
        rank: world.rank().index(),
        idx: device.alloc(MAX_TOKENS * TOP_K * 4)?,
        x: device.alloc(MAX_TOKENS * row_bytes)?,
        weight: device.alloc(MAX_TOKENS * TOP_K * 4)?,
        count: device.alloc(4)?,
        rows: device.alloc(capacity * row_bytes)?,
        expert_count: device.alloc(EXPERTS * 4)?,
        out: device.alloc(MAX_TOKENS * row_bytes)?,
        capacity,
        early: Default::default(),
        ep,
    };
    rig.weight.write(0, &0.5f32.to_ne_bytes().repeat(MAX_TOKENS * TOP_K))?;
    Ok(rig)
}
