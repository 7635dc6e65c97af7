//! Malformed input to a proxy: control messages, immediates, completion tokens, doorbell words and counts of chunks.
//!
//! A real driver over a transport that hands out what the test gives it. Valid traffic goes on in between, so that the
//! garbage meets every state. An independent model (`model.rs`) gives the allowed effects of each input: nothing
//! panics, nothing is flagged or posted that should not be, and every input is in exactly one counter.
//!
//! TOKENYARD_FUZZ_ROUNDS: number of rounds (default 500: a million messages and a million immediates).
//! TOKENYARD_FUZZ_SEED replays one.

mod model;
use crate::stub;

use model::{Model, OWN, Open};
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use stub::{Carrier, Stub};
use tokenyard::internals::api::{Plan, PlanInput};
use tokenyard::internals::proxy::driver::Driver;
use tokenyard::internals::proxy::machine::{ContextConfig, Liveness, Machine, MachineConfig};
use tokenyard::internals::proxy::wire::{ContextIdx, MessageShape, Nodes, Wire, WireInput};
use tokenyard::internals::transport::network::imm::{ImmValue, check_counts};
use tokenyard::internals::transport::network::{Event, MAX_MESSAGE, Posted, Reason, RegionId, WriteImm};
use tokenyard::{AllToAll, Error, Rank, Result, World};

const WORLD: usize = 8;
/// Of rank 0, whose devices have given no sign of life.
const HEARTBEAT: [u8; 20] = *b"tyhb\x03\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
const POLLS: usize = 250;

/// A seeded generator (splitmix64).
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        of.get(self.below(of.len() as u64) as usize).copied()
    }

    /// One to three bits of the lowest `width`.
    fn flips(&mut self, width: u64) -> u64 {
        (0..=self.below(3)).map(|_| 1 << self.below(width)).fold(0, |bits, bit: u64| bits ^ bit)
    }
}

#[derive(Clone)]
enum Given {
    Imm(u32),
    Message(Rank, Vec<u8>),
    Sent(u64),
    Failed(u64),
}

/// State that the test and its transport share.
#[derive(Default)]
struct Wires {
    given: Vec<Given>,
    posts: Vec<WriteImm>,
    sends: Vec<(Rank, Vec<u8>)>,
}

/// A transport that hands out the test's events, and accepts all posts.
struct Dictated(Arc<Mutex<Wires>>);

impl Carrier for Dictated {
    fn nics(&self) -> usize {
        3
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        self.0.lock().unwrap().posts.push(*write);
        Ok(Posted::Accepted)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        self.0.lock().unwrap().sends.push((peer, message.to_vec()));
        Ok(Posted::Accepted)
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        let given = std::mem::take(&mut self.0.lock().unwrap().given);
        for given in &given {
            on_event(match given {
                Given::Imm(bits) => Event::Imm { imm: ImmValue::from_bits(*bits) },
                Given::Message(peer, bytes) => Event::Message { peer: *peer, bytes },
                Given::Sent(token) => Event::Sent { token: *token },
                Given::Failed(token) => Event::Failed { token: *token, peer: Rank(1), failure: Reason::Other.into() },
            });
        }
        Ok(given.len())
    }
}

/// A proxy of rank 0, and its model.
struct Fuzzed {
    draw: Draw,
    driver: Driver<Stub<Dictated>>,
    wires: Arc<Mutex<Wires>>,
    model: Model,
    layouts: [Wire; 2],
    /// Tokens seen lately, completed or not.
    tokens: Vec<u64>,
    /// Immediates given lately.
    imms: Vec<u32>,
    /// The other shards of chunks that shall be whole.
    shards: Vec<u32>,
}

/// Contexts that are opened; the other two never are.
const OPENED: [usize; 2] = [0, 2];

fn layouts() -> [Wire; 2] {
    let of = |members: &[&[u32]], chunks: [u16; 4]| {
        let members = members.iter().map(|ranks| ranks.iter().copied().map(Rank).collect()).collect();
        let shapes = chunks.map(|chunks| MessageShape { first_bytes: 256, chunk_bytes: 192, chunks, rows_offset: 64 });
        let nodes = Nodes::new(members).unwrap();
        Wire::new(WireInput { nodes, nics: 3, shapes, staging_offset: 0, recv_buffer_offset: 1 << 20 }).unwrap()
    };
    [of(&[&[0, 1], &[2], &[3, 4, 5]], [5, 3, 0, 1]), of(&[&[0], &[4]], [2, 2, 1, 1])]
}

impl Fuzzed {
    fn new(seed: u64) -> Fuzzed {
        let wires = Arc::new(Mutex::new(Wires::default()));
        let machine = Machine::new(&MachineConfig { rank: OWN, world: WORLD, liveness: Liveness::default() }).unwrap();
        let driver = Driver::new(machine, Stub(Dictated(Arc::clone(&wires))), Box::new(|| 1));
        let (tokens, imms, shards) = (Vec::new(), Vec::new(), Vec::new());
        let mut fuzzed = Fuzzed {
            draw: Draw(seed),
            driver,
            wires,
            model: Model::default(),
            layouts: layouts(),
            tokens,
            imms,
            shards,
        };
        OPENED.into_iter().for_each(|at| fuzzed.open(at));
        fuzzed
    }

    fn open(&mut self, at: usize) {
        let generation = self.draw.below(4) as u8;
        let first_epoch = self.draw.pick(&[1, 2, 3, (1 << 32) - 2, (1 << 32) - 1, (1 << 40) + 3]).unwrap();
        let wire = &self.layouts[at / 2];
        let open = Open::new(wire, generation, first_epoch);
        let arenas: Vec<RegionId> = (0..WORLD as u16).map(RegionId).collect();
        let config = ContextConfig { generation, first_epoch, wire, arenas: &arenas };
        self.driver.open(ContextIdx(at as u8), &config, open.memory.share()).unwrap();
        self.model.set(at, Some(open));
    }

    fn close(&mut self, at: usize) {
        self.driver.close(ContextIdx(at as u8));
        self.model.set(at, None);
    }

    fn message(&mut self) -> (Rank, Vec<u8>) {
        let draw = &mut self.draw;
        let peer = match draw.below(16) {
            0 => draw.next() as u32,
            _ => draw.below(WORLD as u64 + 1) as u32,
        };
        let mut bytes = HEARTBEAT;
        bytes[8..12].copy_from_slice(&peer.to_le_bytes());
        let mut bytes = bytes.to_vec();
        match draw.below(10) {
            0 => bytes[5] = 2,
            1 => bytes.truncate(draw.below(20) as usize),
            2 => bytes.extend((0..=draw.below(MAX_MESSAGE as u64 - 20)).map(|_| 0)),
            3 => bytes[4] = draw.next() as u8,
            4 => bytes[5] = draw.next() as u8,
            5 => bytes[8..12].copy_from_slice(&(draw.below(WORLD as u64) as u32).to_le_bytes()),
            6 => bytes = (0..draw.below(MAX_MESSAGE as u64 + 1)).map(|_| draw.next() as u8).collect(),
            7 => {}
            _ => (0..=draw.below(3)).for_each(|_| bytes[draw.below(12) as usize] ^= 1 << draw.below(8)),
        }
        (Rank(peer), bytes)
    }

    fn imm(&mut self) -> u32 {
        if self.draw.below(2) == 0
            && let Some(imm) = self.shards.pop()
        {
            return imm;
        }
        let at = OPENED[self.draw.below(2) as usize];
        let generation = self.model.contexts[at].as_ref().map_or(0, |open| open.generation);
        let draw = &mut self.draw;
        let kind = draw.pick(&[0u32, 1, 2, 5]).unwrap();
        let source = draw.pick(&[2u32, 3, 4, 5]).unwrap();
        let (epoch, chunk, nic) = (draw.below(4) as u32, draw.below(3) as u32, draw.below(3) as u32);
        let valid = u32::from(generation) << 30
            | (at as u32) << 28
            | kind << 25
            | epoch << 23
            | source << 12
            | chunk << 2
            | nic;
        match draw.below(8) {
            0 => draw.next() as u32,
            1 => valid ^ draw.flips(32) as u32,
            2 => draw.pick(&self.imms).unwrap_or(valid),
            3 => valid | 3,
            4 => valid ^ (draw.below(1024) as u32) << 2,
            5 => draw.pick(&self.imms).unwrap_or(valid) & !3 | nic,
            _ => {
                self.shards.extend((0..3).filter(|other| *other != nic).map(|other| valid & !3 | other));
                valid
            }
        }
    }

    fn token(&mut self) -> u64 {
        let Some(token) = self.draw.pick(&self.tokens) else { return self.draw.next() };
        match self.draw.below(10) {
            0 => self.draw.next(),
            1..4 => token ^ self.draw.flips(64),
            4 => token ^ self.draw.flips(32),
            _ => token,
        }
    }

    /// Writes a doorbell word, and the word of the number of chunks.
    fn word(&mut self) {
        let Some(open) = &mut self.model.contexts[OPENED[self.draw.below(2) as usize]] else { return };
        let draw = &mut self.draw;
        let at = draw.below(open.links.len() as u64) as usize;
        let link = &open.links[at];
        let (bell, count) = open.words(at);
        let shape = open.wire.shape(link.direction);
        let epoch = link.epoch << 32;
        let good = epoch | (1 + draw.below(u64::from(shape.chunk_bytes)));
        let (bell, word) = match draw.below(16) {
            0 => (draw.below(open.memory.doorbells.len() as u64) as usize, draw.next()),
            1 => (bell, draw.next()),
            2 => (bell, epoch | draw.next() >> 32),
            3 => (bell, epoch),
            4 => (bell, good ^ 1 << (32 + draw.below(32))),
            5 => (bell, good.wrapping_add(draw.pick(&[1 << 32, 2 << 32, u64::MAX << 32]).unwrap())),
            6 => (draw.below(open.memory.doorbells.len() as u64) as usize, good),
            _ => (bell, good),
        };
        let chunks = match draw.below(16) {
            0 => draw.next(),
            1 => draw.pick(&[0, u64::from(shape.chunks) + 1, 1 << 16 | 1, 1 << 32 | 1, u64::MAX]).unwrap(),
            _ => 1 + draw.below(u64::from(shape.chunks)),
        };
        open.memory.chunks.get(count).unwrap().store(chunks, Ordering::Relaxed);
        open.memory.doorbells.get(bell).unwrap().store(word, Ordering::Release);
        open.doorbells[bell] = word;
    }

    /// Gives one poll's input to both, and compares.
    fn poll_once(&mut self) {
        if self.draw.below(24) == 0 {
            let at = OPENED[self.draw.below(2) as usize];
            if self.model.contexts[at].is_some() { self.close(at) } else { self.open(at) }
        } else if let Some(at) = OPENED.into_iter().find(|at| self.model.contexts[*at].is_none()) {
            self.open(at);
        }
        (0..2).for_each(|_| self.word());
        let mut given = Vec::new();
        for _ in 0..8 {
            let (peer, bytes) = self.message();
            given.push(Given::Message(peer, bytes));
            let imm = self.imm();
            self.imms.push(imm);
            given.push(Given::Imm(imm));
        }
        for _ in 0..2 {
            let token = self.token();
            // A failure of a real write is a loss, which is not malformed: failures are of openings long ago or to
            // come.
            let other_opening = token | 1 << (40 + self.draw.below(24));
            let failed = self.draw.below(4) == 0;
            given.push(if failed { Given::Failed(other_opening) } else { Given::Sent(token) });
        }
        let keep = self.imms.len().saturating_sub(32);
        self.imms.drain(..keep);
        self.give(given);
    }

    fn give(&mut self, given: Vec<Given>) {
        self.wires.lock().unwrap().given = given.clone();
        self.driver.poll_once();
        let posts = std::mem::take(&mut self.wires.lock().unwrap().posts);
        self.model.doorbells(&posts);
        for given in given {
            match given {
                Given::Imm(bits) => self.model.immediate(bits),
                Given::Message(peer, bytes) => self.model.message(peer.0, &bytes),
                Given::Sent(token) | Given::Failed(token) => self.model.completion(token),
            }
        }
        self.tokens.extend(posts.iter().map(|write| write.token));
        let keep = self.tokens.len().saturating_sub(24);
        self.tokens.drain(..keep);
        let machine = self.driver.machine();
        self.model.check(machine.stats(), |context| machine.under_way(ContextIdx(context as u8)));
        for (peer, bytes) in self.wires.lock().unwrap().sends.drain(..) {
            assert_eq!((bytes, (2..=5).contains(&peer.0)), (HEARTBEAT.to_vec(), true), "to {peer}");
        }
    }

    fn run(mut self) -> Totals {
        (0..POLLS).for_each(|_| self.poll_once());
        let remote = self.driver.remote();
        assert_eq!(remote.failure(), None);
        let stats = *self.driver.machine().stats();
        assert_eq!(remote.reports().len() as u64, stats.bad_doorbells, "{:?}", remote.reports());
        let Model { immediates, messages, tokens, rung, .. } = self.model;
        Totals([
            ("messages", messages),
            ("of them malformed", stats.bad_messages),
            ("of ranks that no context names", stats.strange_messages),
            ("immediates", immediates),
            ("of them counted", stats.immediates),
            ("chunks arrived", stats.arrived),
            ("stale immediates", stats.stale_immediates),
            ("duplicates", stats.duplicates),
            ("impossible immediates and tokens", stats.impossible),
            ("tokens", tokens),
            ("of them of a write under way", stats.completions),
            ("stale tokens", stats.stale_completions),
            ("doorbells rung", rung),
            ("of them bad", stats.bad_doorbells),
            ("writes posted", stats.posts),
        ])
    }
}

#[derive(Clone, Copy)]
struct Totals([(&'static str, u64); 15]);

impl Totals {
    fn add(mut self, other: Totals) -> Totals {
        self.0.iter_mut().zip(other.0).for_each(|(mine, other)| mine.1 += other.1);
        self
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

fn run_seed(seed: u64) -> Totals {
    catch_unwind(|| Fuzzed::new(seed).run()).unwrap_or_else(|_| {
        panic!("seed {seed} fails; TOKENYARD_FUZZ_SEED={seed} cargo test --test proxy proxy_fuzz replays it")
    })
}

#[test]
fn malformed_input_is_dropped_and_counted() {
    if let Some(seed) = number("TOKENYARD_FUZZ_SEED") {
        run_seed(seed);
        return;
    }
    let rounds = number("TOKENYARD_FUZZ_ROUNDS").unwrap_or(500);
    let (start, next) = (Instant::now(), AtomicU64::new(0));
    let seeds = || std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| *seed < rounds));
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let totals = std::thread::scope(|scope| {
        let work = || seeds().map(run_seed).reduce(Totals::add);
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let joined = workers.into_iter().filter_map(|worker| worker.join().expect("a seed failed; see above"));
        joined.reduce(Totals::add)
    });
    println!("{rounds} rounds in {:.1} s:", start.elapsed().as_secs_f64());
    for (name, count) in totals.into_iter().flat_map(|totals| totals.0) {
        println!("{count:12} {name}");
        assert!(count > 0 || rounds < 50, "{name}: never happened");
    }
}

fn plan_of(sizes: &[usize], nics: u8) -> PlanInput {
    PlanInput {
        nodes: Nodes::consecutive(sizes).unwrap(),
        max_tokens: 128,
        top_k: 8,
        row_bytes: 512,
        scale_words: 0,
        other_slot_bytes: 0,
        slot_payload_bytes: 0,
        partial_bytes: 512,
        max_local_experts: 8,
        weights_with_dispatch: true,
        weights_with_combine: false,
        nics,
        chunk_rows: None,
        receives: usize::MAX,
        double_buffer_bytes: 0,
        few_tokens: 0,
        ll_tokens: 0,
        slot_of_rank: false,
        in_place_rows: 0,
        round_tokens: None,
    }
}

/// Name, value and advice of a configuration error.
fn refused<T>(outcome: Result<T>) -> (&'static str, String, String) {
    match outcome.map(|_| ()) {
        Err(Error::Config { name, value, advice, .. }) => (name, value, advice),
        other => panic!("no configuration error: {other:?}"),
    }
}

#[test]
fn counts_beyond_an_immediate_are_refused_by_name_and_number() {
    // Headers have a chunk of their own.
    let fine = PlanInput { chunk_rows: Some(1), max_tokens: 1023, ..plan_of(&[2, 2], 4) };
    Plan::new(&fine).unwrap();
    for (input, name, value, most) in [
        (PlanInput { max_tokens: 100_000, ..fine.clone() }, "chunks", "100001", "1024"),
        (PlanInput { max_tokens: 1024, ..fine.clone() }, "chunks", "1025", "1024"),
        (PlanInput { max_tokens: 100_000, chunk_rows: Some(97), ..fine.clone() }, "chunks", "1032", "1024"),
        (PlanInput { nics: 5, ..fine.clone() }, "nics", "5", "4"),
    ] {
        let (named, given, advice) = refused(Plan::new(&input));
        assert_eq!((named, &*given), (name, value), "{advice}");
        assert!(advice.contains(most), "{advice}");
    }
    for (counts, name, value) in
        [([2049, 0, 0, 0], "ranks", "2049"), ([1, 1, 1, 5], "contexts", "5"), ([1, usize::MAX, 1, 1], "chunks", "1844")]
    {
        let (named, given, _) = refused(check_counts(counts[0], counts[1], counts[2], counts[3]));
        assert!(named == name && given.starts_with(value), "{named} {given}");
    }
    assert_eq!(refused(Nodes::consecutive(&[1, 2048])).0, "ranks");
    assert_eq!(refused(Nodes::new(vec![vec![Rank(u32::MAX)]])).0, "ranks");
}

#[test]
fn a_context_refuses_chunks_that_an_immediate_cannot_number() {
    let builder = |max_tokens, rows: usize| {
        let world = World::threads(2).unwrap().remove(0).with_nodes(&[1, 1]).unwrap();
        AllToAll::builder(&world)
            .hidden(128)
            .experts(4)
            .top_k(2)
            .max_tokens_per_rank(max_tokens)
            .tuning(|t| t.chunk_rows = Some(rows))
    };
    builder(1023, 1).plan().unwrap();
    let (name, value, advice) = refused(builder(100_000, 1).plan());
    assert_eq!((name, &*value), ("chunks", "100001"), "{advice}");
    assert!(advice.contains("1024") && advice.contains("larger chunks"), "{advice}");
    assert_eq!(refused(builder(1023, 0).plan()).0, "chunk_rows");
}
