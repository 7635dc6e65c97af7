//! A rank is killed, anywhere from before it joins to the middle of a round: every survivor gets a typed error that
//! names it, in time, and ends by itself.
//!
//! Ranks are processes: this test program starts itself again, and the test `rank` plays one.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

mod life;

use crate::double;
use life::Point::{self, *};
use life::{DEADLINE, FATAL_ROUND};
use tokenyard::internals::transport::network::libfabric::libfabric_sys;

const RANKS: usize = 3;
/// Deadline to join and of collectives where nobody is missing from the start: never waited out.
const JOINING: Duration = Duration::from_secs(8);
/// The deadline where a rank never joins: waited out.
const JOINING_IN_VAIN: Duration = Duration::from_millis(1500);
/// Time that a loaded machine may add to a deadline.
const SLACK: Duration = Duration::from_secs(3);
/// Time that the next generation may take.
const GOING_ON: Duration = Duration::from_secs(8);
/// Beyond this a process hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// A process that starts holds all descriptors for a moment; no listener of `place` may be among them.
static FORKING: Mutex<()> = Mutex::new(());

/// An address of this world alone (all of 127/8 is this host) and a port free there.
fn place() -> (String, u16) {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let (pid, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let addr = format!("127.{}.{}.{}", 1 + pid / 251 % 250, 1 + pid % 251, 1 + next % 250);
    let _guard = FORKING.lock().unwrap_or_else(PoisonError::into_inner);
    let port = TcpListener::bind((addr.as_str(), 0)).unwrap().local_addr().unwrap().port();
    (addr, port)
}

/// Address of a rank's host, so that the next generation needs nothing of rank 0's.
fn own_addr(place: &(String, u16), rank: usize) -> String {
    let last = place.0.splitn(3, '.').last().unwrap();
    format!("127.{}.{last}", 251 + rank)
}

/// What kills which rank.
#[derive(Debug, Clone, Copy)]
struct Blow {
    point: Point,
    victim: usize,
    delay: Duration,
    /// Sizes of nodes, as in the environment.
    nodes: &'static str,
    /// What carries bytes between nodes.
    network: &'static str,
    /// Whether calls go on without the victim.
    tolerant: bool,
}

impl Blow {
    fn at(point: Point, victim: usize) -> Blow {
        Blow { point, victim, delay: Duration::ZERO, nodes: "3", network: life::SIMULATED, tolerant: false }
    }

    fn joining(self) -> Duration {
        self.slowly(if self.point == BeforeJoin { JOINING_IN_VAIN } else { JOINING })
    }

    /// A time, as long as it is over this network.
    fn slowly(self, time: Duration) -> Duration {
        time * life::slowness(self.network)
    }
}

/// A process and its output.
struct Process {
    child: Child,
    printed: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
    ended: Option<(ExitStatus, Instant)>,
}

impl Process {
    fn start(blow: Blow, place: &(String, u16), rank: usize) -> Process {
        let guard = FORKING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut command = Command::new(std::env::current_exe().unwrap());
        if blow.network == "efa" {
            command.env(libfabric_sys::VARIABLE, double::efa().unwrap());
        }
        if blow.tolerant {
            command.env(life::TOLERANT, "1");
        }
        let mut child = command
            .args(["kills::rank", "--exact", "--nocapture", "--test-threads=1"])
            .env(life::POINT, format!("{:?}", blow.point))
            .env(life::VICTIM, blow.victim.to_string())
            .env(life::DELAY, blow.delay.as_micros().to_string())
            .env(life::NETWORK, blow.network)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", RANKS.to_string())
            .env("MASTER_ADDR", &place.0)
            .env("TOKENYARD_ADDR", own_addr(place, rank))
            .env("TOKENYARD_PORT", place.1.to_string())
            .env("TOKENYARD_TOKEN", "kills")
            .env("TOKENYARD_NODES", blow.nodes)
            .env("TOKENYARD_TIMEOUT_MS", blow.joining().as_millis().to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(guard);
        let printed = Arc::new(Mutex::new(String::new()));
        let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let readers = vec![listen(out, printed.clone()), listen(err, printed.clone())];
        Process { child, printed, readers, ended: None }
    }

    fn printed(&self) -> String {
        self.printed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether it has ended; notes when.
    fn ended(&mut self) -> bool {
        if self.ended.is_none()
            && let Some(status) = self.child.try_wait().unwrap()
        {
            self.ended = Some((status, Instant::now()));
        }
        self.ended.is_some()
    }

    /// The rest of the line that begins with `word`.
    fn value_of(&self, word: &str) -> Option<String> {
        self.printed().lines().find_map(|line| line.strip_prefix(word).map(|rest| rest.trim().to_owned()))
    }
}

/// Collects the lines of a stream until it ends.
fn listen(from: impl Read + Send + 'static, into: Arc<Mutex<String>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            let mut printed = into.lock().unwrap_or_else(PoisonError::into_inner);
            printed.push_str(&line);
            printed.push('\n');
        }
    })
}

/// All processes of one world; none outlives a failing test.
struct Team {
    blow: Blow,
    processes: Vec<Process>,
    /// The next generation's port at rank 0's first address, where nobody may meet: as if that host were gone.
    _gone: TcpListener,
}

impl Drop for Team {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

/// A survivor's error.
#[derive(Debug)]
struct Survivor {
    rank: usize,
    after: Duration,
    /// As `Debug` prints it.
    error: String,
    sentence: String,
    /// How the next generation went, if there was one.
    masked: Option<String>,
}

impl Team {
    fn start(blow: Blow) -> Team {
        let place = place();
        let gone = TcpListener::bind((place.0.as_str(), place.1 + 1)).unwrap();
        Team { blow, processes: (0..RANKS).map(|rank| Process::start(blow, &place, rank)).collect(), _gone: gone }
    }

    /// Polls until all processes are as `wanted`.
    fn wait_for(&mut self, what: &str, wanted: impl Fn(&mut Process) -> bool) {
        let start = Instant::now();
        loop {
            // Each is checked in each pass, so that the time of every end is noted.
            let there = self.processes.iter_mut().map(&wanted).filter(|there| *there).count();
            if there == RANKS {
                return;
            }
            let late = start.elapsed() >= self.blow.slowly(PATIENCE);
            assert!(!late, "{:?}: not all ranks {what}; their output:\n{}", self.blow, self.transcript());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn transcript(&self) -> String {
        let printed = self.processes.iter().enumerate();
        printed.map(|(rank, process)| format!("-- rank {rank}\n{}", process.printed())).collect()
    }

    /// The survivors' reports. The victim must have been killed, and all others have ended well and in time.
    fn finish(mut self) -> Vec<Survivor> {
        self.wait_for("ended", Process::ended);
        for process in &mut self.processes {
            process.readers.drain(..).for_each(|reader| reader.join().unwrap());
        }
        let blow = self.blow;
        let transcript = format!("{blow:?}\n{}", self.transcript());
        let (status, died) = self.processes[blow.victim].ended.unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{transcript}");
        let limit = blow.slowly(SLACK + if blow.point == BeforeJoin { JOINING_IN_VAIN } else { DEADLINE });
        let survivors = self.processes.iter().enumerate().filter(|(rank, _)| *rank != blow.victim);
        survivors
            .map(|(rank, process)| {
                let (status, ended) = process.ended.unwrap();
                assert!(status.success(), "rank {rank}: {status}; {transcript}");
                assert!(!process.printed().contains("panicked"), "rank {rank} panicked; {transcript}");
                let late = ended.saturating_duration_since(died);
                assert!(
                    late < limit + blow.slowly(GOING_ON),
                    "rank {rank} ended {late:?} after the victim; {transcript}"
                );
                let value =
                    |word| process.value_of(word).unwrap_or_else(|| panic!("rank {rank}: no {word}; {transcript}"));
                let after = Duration::from_millis(value("after").parse().unwrap());
                assert!(after < limit, "rank {rank} saw the error {after:?} after its last step; {transcript}");
                let masked = process.value_of("masked");
                Survivor { rank, after, error: value("error"), sentence: value("sentence"), masked }
            })
            .collect()
    }
}

impl Survivor {
    fn names(&self, victim: usize) -> bool {
        let peer = format!("peer: Rank({victim})");
        match self.error.split([' ', '(']).next() {
            Some("PeerLost" | "Timeout") => self.error.contains(&peer),
            Some("Bootstrap" | "Transport") => {
                self.rank != victim && self.sentence.contains(&format!("rank {victim} "))
            }
            _ => false,
        }
    }

    /// The context's error after a wait of its whole deadline, since rank `victim` is known to be gone.
    fn lost(&self, victim: usize, sites: &[&str], epoch: usize) {
        let wanted = |site: &&str| {
            let rank = self.rank;
            let cause = "whose connection for bootstrap has ended";
            format!(
                "PeerLost {{ rank: Rank({rank}), peer: Rank({victim}), cause: {cause:?}, site: {site:?}, epoch: {epoch} }}"
            )
        };
        assert!(sites.iter().any(|site| wanted(site) == self.error), "{self:?}; due: {:?}", wanted(&sites[0]));
        assert!(self.after >= DEADLINE, "{self:?}");
        self.went_on();
    }

    /// The survivors formed a new generation, in which the lost rank is masked.
    fn went_on(&self) {
        assert_eq!(self.masked.as_deref(), Some("well"), "{self:?}");
    }
}

/// Kills at a point of a round; survivors then wait at one of `sites` of number `epoch`.
fn kill_in_round(point: Point, victim: usize, sites: &[&str], epoch: usize) {
    for survivor in Team::start(Blow::at(point, victim)).finish() {
        survivor.lost(victim, sites, epoch);
    }
}

fn kill_in_rounds(victim: usize) {
    const RETURN: [&str; 2] = ["the combine flag", "a partial row"];
    kill_in_round(AfterBuild, victim, &["routing metadata"], 1);
    kill_in_round(AfterDispatchSend, victim, &RETURN, FATAL_ROUND);
    kill_in_round(AfterDispatch, victim, &RETURN, FATAL_ROUND);
    kill_in_round(AfterCombineSend, victim, &["routing metadata"], FATAL_ROUND + 1);
    kill_in_round(AfterRound, victim, &["routing metadata"], FATAL_ROUND + 1);
    kill_in_round(BeforeBarrier, victim, &["the barrier flag"], FATAL_ROUND);
}

#[test]
fn rank() {
    life::live();
}

#[test]
fn a_death_in_a_round_that_survivors_wait_out_without_end() {
    kill_in_rounds(1);
}

#[test]
fn the_death_of_rank_0_in_a_round_that_survivors_wait_out_without_end() {
    kill_in_rounds(0);
}

#[test]
fn a_death_behind_the_back_of_a_rank_that_is_only_late() {
    for victim in 0..RANKS {
        kill_in_round(AfterRoundWhileOneIsLate, victim, &["routing metadata"], FATAL_ROUND + 1);
    }
}

#[test]
fn a_death_before_the_world_has_formed() {
    for victim in [0, 2] {
        for survivor in Team::start(Blow::at(BeforeJoin, victim)).finish() {
            assert!(survivor.error.starts_with("Bootstrap"), "{survivor:?}");
            let due = if victim == 0 { "for rank 0 at 127." } else { "and rank 2 has not joined" };
            assert!(survivor.sentence.contains(due), "{survivor:?}");
        }
        for survivor in Team::start(Blow::at(AfterJoin, victim)).finish() {
            assert!(survivor.error.starts_with("Bootstrap"), "{survivor:?}");
            assert!(survivor.sentence.contains(&format!("rank {victim} is lost")), "{survivor:?}");
            assert!(survivor.after < DEADLINE, "nobody waits for the dead: {survivor:?}");
        }
    }
}

#[test]
fn a_death_while_contexts_are_built() {
    for step in 0..8 {
        let blow = Blow { delay: Duration::from_micros(100 << step), ..Blow::at(DuringBuild, [1, 0][step % 2]) };
        for survivor in Team::start(blow).finish() {
            assert!(survivor.names(blow.victim), "{blow:?}: {survivor:?}");
        }
    }
}

#[test]
fn a_death_at_any_moment_of_a_round() {
    for seed in 0..6u64 {
        let random = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let (victim, delay) = (seed as usize % RANKS, Duration::from_micros(random % 50_000));
        let mut team = Team::start(Blow { delay, ..Blow::at(Whenever, victim) });
        team.wait_for("play", |process| process.value_of("up").is_some());
        std::thread::sleep(delay);
        team.processes[victim].child.kill().unwrap();
        for survivor in team.finish() {
            assert!(survivor.names(victim), "seed {seed}, after {delay:?}: {survivor:?}");
        }
    }
}

/// Of processes whose calls go on without missing ranks.
#[test]
fn survivors_play_on_without_the_dead_and_then_form_a_generation() {
    let at = [AfterBuild, AfterDispatchSend, AfterDispatch, AfterCombineSend, AfterRound, BeforeBarrier];
    for seed in 0..runs(9) {
        let point = at.get(seed as usize).copied().unwrap_or(Whenever);
        let random = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let (victim, delay) = (seed as usize % RANKS, Duration::from_micros(random % 50_000));
        let mut team = Team::start(Blow { tolerant: true, delay, ..Blow::at(point, victim) });
        if point == Whenever {
            team.wait_for("play", |process| process.value_of("up").is_some());
            std::thread::sleep(delay);
            team.processes[victim].child.kill().unwrap();
        }
        team.wait_for("ended", Process::ended);
        let transcript = team.transcript();
        for (rank, process) in team.processes.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
            let (status, _) = process.ended.unwrap();
            process.readers.drain(..).for_each(|reader| reader.join().unwrap());
            let well = status.success() && process.value_of("went on").is_some();
            assert!(well, "{point:?}, after {delay:?}, rank {rank}: {status}; {transcript}");
        }
    }
}

/// How many deaths at random points are tried: so many, or as TOKENYARD_KILL_RUNS says.
fn runs(usual: u64) -> u64 {
    std::env::var("TOKENYARD_KILL_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(usual)
}

#[test]
fn a_death_anywhere_on_one_two_and_three_nodes() {
    die_anywhere(life::SIMULATED, runs(12));
}

#[test]
fn a_death_anywhere_over_libfabric_tcp() {
    if let Err(why) = libfabric_sys::Library::open() {
        println!("skipped: {why}");
        assert_ne!(std::env::var("TOKENYARD_STRICT").as_deref(), Ok("1"), "{why}");
        return;
    }
    die_anywhere("tcp", runs(10));
}

#[test]
fn a_death_anywhere_over_the_double_of_efa() {
    if double::efa().is_some() {
        die_anywhere("efa", runs(10));
    }
}

#[test]
fn a_death_anywhere_over_verbs() {
    let device = format!("/sys/class/infiniband/{}", life::device());
    if std::path::Path::new(&device).exists() {
        die_anywhere(life::VERBS, runs(3));
    } else {
        println!("skipped: no device {}; run this by tests/verbs/vm.sh", life::device());
    }
}

fn die_anywhere(network: &'static str, runs: u64) {
    const ANYWHERE: [Point; 10] = [
        BeforeJoin,
        AfterJoin,
        DuringBuild,
        AfterBuild,
        AfterDispatchSend,
        AfterDispatch,
        AfterCombineSend,
        AfterRound,
        BeforeBarrier,
        Whenever,
    ];
    for seed in 0..runs {
        let random = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let point = ANYWHERE[(seed % 10) as usize];
        let nodes = ["1,2", "2,1", "1,1,1", "3"][(random % 4) as usize];
        let victim = (random / 4 % 3) as usize;
        let delay = Duration::from_micros(random % 50_000);
        let blow = Blow { nodes, network, delay, ..Blow::at(point, victim) };
        let mut team = Team::start(blow);
        if point == Whenever {
            team.wait_for("play", |process| process.value_of("up").is_some());
            std::thread::sleep(delay);
            team.processes[victim].child.kill().unwrap();
        }
        for survivor in team.finish() {
            assert!(survivor.names(victim), "seed {seed}: {blow:?}: {survivor:?}");
            if !matches!(point, BeforeJoin | AfterJoin | DuringBuild) {
                survivor.went_on();
            }
        }
    }
}
