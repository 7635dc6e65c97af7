//! The simulated network between real processes, one of which is killed in mid-storm: writes to it fail (or,
//! if so configured, stay outstanding), and everything else goes on as if nothing had happened.
//!
//! This test program starts itself again for each rank, and the test `rank` plays it. Ranks find each other as in
//! any job, with a `World`; after that, nothing but the endpoints connects them.

use crate::rig::{Draw, Memory, RECV_BUFFER, SOURCE, pattern};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokenyard::internals::base::Rank;
use tokenyard::internals::transport::World;
use tokenyard::internals::transport::network::imm::{Decoded, ImmValue};
use tokenyard::internals::transport::network::sim::{Clock, DeadPeers, ProcessEndpoint, SimConfig};
use tokenyard::internals::transport::network::{Event, Place, Posted, Transport, WriteImm};

/// Set in ranks alone: the seed, and the outcome of writes to the dead.
const STORM: &str = "TOKENYARD_TEST_STORM";
const RANKS: usize = 4;
/// Slots that one rank has in the receive buffer of each other.
const SLOTS: usize = 8;
/// Longer than any piece in which a payload may travel.
const SLOT: usize = 100_000;
/// Writes that must reach every survivor from every other after the death.
const AFTERWARDS: u32 = 200;
/// Writes that each survivor posts to the dead once it has noticed.
const POSTED_TO_THE_DEAD: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(30);

// ---- one rank

/// The state of one slot at a peer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Slot {
    Free,
    /// In use: whether its write has completed, and whether the peer has given it back.
    Busy {
        completed: bool,
        returned: bool,
    },
}

/// All that one rank counts about another.
#[derive(Clone, Copy)]
struct Peer {
    slots: [Slot; SLOTS],
    posted: u32,
    sent: u32,
    failed: u32,
    arrived: u32,
    /// `arrived` when the death was noticed.
    at_death: u32,
    dead: bool,
}

struct Storm {
    rank: usize,
    endpoint: ProcessEndpoint,
    source: Memory,
    recv_buffer: Memory,
    draw: Draw,
    peers: Vec<Peer>,
    /// Slots to give back, by rank; a full queue makes them wait.
    returns: VecDeque<(usize, u8)>,
    start: Instant,
}

/// Of the number that a write of this rank in this slot has.
fn length(rank: usize, number: u32) -> usize {
    let long = number.wrapping_mul(0x9e37_79b1) as usize;
    if (number as usize + rank).is_multiple_of(5) { long % SLOT } else { long % 300 }
}

fn seed_of(rank: usize, number: u32) -> u32 {
    number * RANKS as u32 + rank as u32
}

impl Storm {
    fn new(world: &World, seed: u64, dead_peers: DeadPeers) -> Storm {
        let config = SimConfig { clock: Clock::Real, packet_bytes: 4096, dead_peers, ..SimConfig::hostile(seed) };
        let mut endpoint = ProcessEndpoint::open(world.rank(), b"storm", config).unwrap();
        let memory = || Memory::new(RANKS * SLOTS * SLOT);
        let (source, recv_buffer) = (memory(), memory());
        // SAFETY: both are accessed through raw pointers only, and outlive the endpoint by the order of the fields.
        let ids = unsafe { [endpoint.register(source.span()), endpoint.register(recv_buffer.span())] };
        assert_eq!(ids, [Ok(SOURCE), Ok(RECV_BUFFER)]);
        let addresses = world.all_gather("endpoints", &endpoint.address(Rank(0)).unwrap()).unwrap();
        for (peer, address) in addresses.iter().enumerate().filter(|(peer, _)| *peer != world.rank().index()) {
            endpoint.connect(Rank(peer as u32), address).unwrap();
        }
        world.barrier("connected").unwrap();
        let slots = [Slot::Free; SLOTS];
        let peer = Peer { slots, posted: 0, sent: 0, failed: 0, arrived: 0, at_death: 0, dead: false };
        Storm {
            rank: world.rank().index(),
            endpoint,
            source,
            recv_buffer,
            draw: Draw::new(seed * RANKS as u64 + u64::from(world.rank().0)),
            peers: vec![peer; RANKS],
            returns: VecDeque::new(),
            start: Instant::now(),
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let rank = self.rank;
        (0..RANKS).filter(move |peer| *peer != rank)
    }

    fn post_some(&mut self) {
        (0..4).for_each(|_| self.post());
    }

    /// Posts to somebody, if a slot there is free.
    fn post(&mut self) {
        let to = (self.rank + 1 + self.draw.below(RANKS - 1)) % RANKS;
        let slot = self.draw.below(SLOTS);
        let Peer { slots, dead, .. } = self.peers[to];
        if slots[slot] == Slot::Free && !dead {
            let _ = self.post_at(to, slot);
        }
    }

    fn post_at(&mut self, to: usize, slot: usize) -> Posted {
        let number = self.peers[to].posted;
        let (here, there) = (to * SLOTS + slot, self.rank * SLOTS + slot);
        let bytes = length(self.rank, number);
        self.source.write(here * SLOT, &pattern(seed_of(self.rank, number), bytes));
        let write = WriteImm {
            nic: self.draw.below(self.endpoint.nics()) as u8,
            peer: Rank(to as u32),
            source: Place { region: SOURCE, offset: (here * SLOT) as u64 },
            target: Place { region: RECV_BUFFER, offset: (there * SLOT) as u64 },
            bytes: bytes as u32,
            imm: ImmValue::user(0, 0, number << 5 | there as u32).unwrap(),
            token: here as u64,
        };
        let posted = self.endpoint.post(&write).unwrap();
        if posted == Posted::Accepted {
            self.peers[to].posted += 1;
            self.peers[to].slots[slot] = Slot::Busy { completed: false, returned: false };
        }
        posted
    }

    fn poll(&mut self) {
        assert!(self.start.elapsed() < PATIENCE, "rank {}: {}", self.rank, self.tale());
        let Storm { rank, endpoint, source, recv_buffer, peers, returns, .. } = self;
        let events = endpoint.poll(&mut |event| match event {
            Event::Sent { token } => {
                let (to, slot) = (token as usize / SLOTS, token as usize % SLOTS);
                peers[to].sent += 1;
                source.fill(token as usize * SLOT, SLOT, 0xEE);
                peers[to].pass(slot, true);
            }
            Event::Failed { token, peer, .. } => {
                assert_eq!(token as usize / SLOTS, peer.index());
                peers[peer.index()].failed += 1;
            }
            Event::Dropped { peer, .. } => panic!("rank {rank}: {peer} took nothing back"),
            Event::Imm { imm } => {
                let Some(Decoded::User { payload, .. }) = imm.decode() else { panic!("{imm:?} was never posted") };
                let (number, from, slot) = (payload >> 5, payload as usize / SLOTS % RANKS, payload as usize % SLOTS);
                let bytes = length(from, number);
                let seen = recv_buffer.read((from * SLOTS + slot) * SLOT, bytes);
                assert!(seen == pattern(seed_of(from, number), bytes), "rank {rank}: write {number} of {from} is torn");
                peers[from].arrived += 1;
                returns.push_back((from, slot as u8));
            }
            Event::Message { peer, bytes } => peers[peer.index()].pass(usize::from(bytes[0]), false),
        });
        if events.unwrap() == 0 {
            std::thread::yield_now();
        }
        if let Some((to, slot)) = self.returns.pop_front()
            && self.endpoint.send(Rank(to as u32), &[slot]).unwrap() == Posted::Full
        {
            self.returns.push_back((to, slot));
        }
    }

    /// Writes that have not completed.
    fn outstanding(&self, peer: usize) -> u32 {
        let Peer { posted, sent, failed, .. } = self.peers[peer];
        posted - sent - failed
    }

    fn tale(&self) -> String {
        let peer = |peer: usize| {
            let Peer { posted, sent, failed, arrived, .. } = self.peers[peer];
            format!("{peer}: {posted} posted {sent} sent {failed} failed {arrived} arrived; ")
        };
        self.others().map(peer).chain([self.endpoint.counts().to_string()]).collect()
    }

    /// Rages until a peer is dead, and on until the survivors have proved that they are not.
    fn rage(&mut self, victim: usize) {
        while self.endpoint.counts().deaths == 0 {
            self.post_some();
            self.poll();
        }
        for slot in 0..POSTED_TO_THE_DEAD as usize {
            while self.post_at(victim, slot) == Posted::Full {
                self.poll();
            }
        }
        self.peers[victim].dead = true;
        self.peers.iter_mut().for_each(|peer| peer.at_death = peer.arrived);
        let living: Vec<usize> = self.others().filter(|peer| *peer != victim).collect();
        let enough = |storm: &Storm, peer: &usize| {
            let Peer { arrived, at_death, .. } = storm.peers[*peer];
            arrived >= at_death + AFTERWARDS
        };
        while !living.iter().all(|peer| enough(self, peer)) {
            self.post_some();
            self.poll();
        }
    }
}

impl Peer {
    /// A slot is free again when its write has completed here and was seen there.
    fn pass(&mut self, at: usize, completes: bool) {
        let slot = &mut self.slots[at];
        *slot = match *slot {
            Slot::Busy { returned: true, .. } if completes => Slot::Free,
            Slot::Busy { completed: true, .. } if !completes => Slot::Free,
            Slot::Busy { completed, returned } => {
                Slot::Busy { completed: completed || completes, returned: returned || !completes }
            }
            Slot::Free => Slot::Free,
        };
    }
}

/// A line that the parent reads.
fn print(line: &str) {
    println!("{line}");
    std::io::stdout().flush().unwrap();
}

/// Plays a rank, if this process is one.
#[test]
fn rank() {
    let Ok(storm) = std::env::var(STORM) else { return };
    let (seed, silent, victim) = match storm.split(' ').collect::<Vec<_>>()[..] {
        [seed, policy, victim] => (seed.parse().unwrap(), policy == "silent", victim.parse().unwrap()),
        _ => panic!("{storm}"),
    };
    // The test harness may have begun a line.
    println!();
    let world = World::from_env().unwrap();
    let dead_peers = if silent { DeadPeers::Silent } else { DeadPeers::Fail { after_ns: 1_000_000 } };
    let mut storm = Storm::new(&world, seed, dead_peers);
    print("up");
    storm.rage(victim);
    let living: Vec<usize> = storm.others().filter(|peer| *peer != victim).collect();
    print("enough");
    // The parent sends one byte when all have enough, and closes when all have finished: nobody stops or leaves while
    // the others still need it.
    let stage = Arc::new(AtomicUsize::new(0));
    let seen_stage = stage.clone();
    std::thread::spawn(move || {
        for next in 1..=2 {
            let _ = std::io::stdin().read(&mut [0]);
            seen_stage.store(next, Ordering::Release);
        }
    });
    while stage.load(Ordering::Acquire) < 1 {
        storm.post_some();
        storm.poll();
    }
    let finished = |storm: &Storm| {
        living.iter().all(|peer| storm.outstanding(*peer) == 0) && (silent || storm.outstanding(victim) == 0)
    };
    while !finished(&storm) {
        storm.poll();
    }
    print("done");
    while stage.load(Ordering::Acquire) < 2 {
        storm.poll();
    }
    let tale = storm.tale();
    assert!(living.iter().all(|peer| storm.peers[*peer].failed == 0), "writes to the living failed: {tale}");
    assert!(living.iter().all(|peer| storm.peers[*peer].posted > AFTERWARDS), "a breeze: {tale}");
    assert_eq!(storm.endpoint.refused().total(), 0, "{:?}; {tale}", storm.endpoint.refused());
    let (failed, left) = (storm.peers[victim].failed, storm.outstanding(victim));
    if silent {
        assert!(failed == 0 && left > 0, "the silent dead: {tale}");
        storm.endpoint.reset().unwrap();
        storm.returns.clear();
        while storm.outstanding(victim) > 0 {
            storm.poll();
        }
        assert_eq!(storm.peers[victim].failed, left);
    } else {
        assert!(failed > 0 && left == 0, "writes to the dead: {tale}");
    }
    print(&format!("well {failed} {tale}"));
}

// ---- all of them

struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    printed: Arc<Mutex<String>>,
}

/// Collects the lines of a stream until it ends.
fn listen(from: impl Read + Send + 'static, into: Arc<Mutex<String>>) {
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            let mut printed = into.lock().unwrap_or_else(PoisonError::into_inner);
            printed.push_str(&line);
            printed.push('\n');
        }
    });
}

impl Process {
    fn start(storm: &str, place: &(String, u16), rank: usize) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["processes::rank", "--exact", "--nocapture", "--test-threads=1"])
            .env(STORM, storm)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", RANKS.to_string())
            .env("MASTER_ADDR", &place.0)
            .env("TOKENYARD_PORT", place.1.to_string())
            .env("TOKENYARD_TOKEN", "storm")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let printed = Arc::new(Mutex::new(String::new()));
        listen(child.stdout.take().unwrap(), printed.clone());
        listen(child.stderr.take().unwrap(), printed.clone());
        Process { stdin: child.stdin.take(), child, printed }
    }

    fn printed(&self) -> String {
        self.printed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn has_notified(&self, word: &str) -> bool {
        self.printed().lines().any(|line| line.split(' ').next() == Some(word))
    }
}

/// All processes of one world; none outlives a failing test.
struct Team(Vec<Process>);

impl Drop for Team {
    fn drop(&mut self) {
        for process in &mut self.0 {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

impl Team {
    fn wait_for(&mut self, word: &str, but: Option<usize>) {
        let start = Instant::now();
        while !self.0.iter().enumerate().all(|(rank, process)| Some(rank) == but || process.has_notified(word)) {
            let printed = || self.0.iter().map(Process::printed).collect::<Vec<_>>().join("--\n");
            assert!(
                start.elapsed() < PATIENCE + Duration::from_secs(5),
                "not all are {word}; their output:\n{}",
                printed()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// An address of this world alone (all of 127/8 is this host) and a port free there.
fn place() -> (String, u16) {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let (pid, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let addr = format!("127.{}.{}.{}", 1 + pid / 251 % 250, 1 + pid % 251, next);
    let port = TcpListener::bind((addr.as_str(), 0)).unwrap().local_addr().unwrap().port();
    (addr, port)
}

/// Returns how many writes failed, as their senders saw it.
fn kill_in_a_storm(seed: u64, policy: &str, victim: usize) -> u32 {
    let storm = format!("{seed} {policy} {victim}");
    let place = place();
    let mut team = Team((0..RANKS).map(|rank| Process::start(&storm, &place, rank)).collect());
    team.wait_for("up", None);
    std::thread::sleep(Duration::from_millis(Draw::new(seed + 1).below(150) as u64));
    team.0[victim].child.kill().unwrap();
    assert_eq!(team.0[victim].child.wait().unwrap().signal(), Some(libc::SIGKILL));
    team.wait_for("enough", Some(victim));
    let survivors = team.0.iter_mut().enumerate().filter(|(rank, _)| *rank != victim);
    survivors.for_each(|(_, process)| process.stdin.as_mut().unwrap().write_all(b".").unwrap());
    team.wait_for("done", Some(victim));
    team.0.iter_mut().for_each(|process| drop(process.stdin.take()));
    team.wait_for("well", Some(victim));
    let mut failed = 0;
    for (rank, process) in team.0.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
        assert!(process.child.wait().unwrap().success(), "rank {rank}: {}", process.printed());
        let printed = process.printed();
        let well = printed.lines().find(|line| line.starts_with("well")).unwrap();
        println!("rank {rank}: {well}");
        failed += well.split(' ').nth(1).unwrap().parse::<u32>().unwrap();
    }
    failed
}

#[test]
fn a_death_in_a_storm_that_others_suffer_from() {
    let failed: u32 = (0..4).map(|seed| kill_in_a_storm(seed, "fail", (seed as usize + 1) % RANKS)).sum();
    assert!(failed > 4 * 3 * POSTED_TO_THE_DEAD, "nothing was on its way when they died");
}

#[test]
fn a_death_in_a_storm_that_is_reported_though_the_dead_are_silent() {
    for seed in 10..12 {
        assert_eq!(kill_in_a_storm(seed, "silent", seed as usize % RANKS), 0);
    }
}
