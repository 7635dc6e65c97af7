//! Worlds, memory and storms of writes for the tests of transports.

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::unistd::ftruncate;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokenyard::internals::base::Rank;
use tokenyard::internals::transport::network::imm::{Decoded, ImmValue};
use tokenyard::internals::transport::network::{Event, Place, Posted, RegionId, Released, Span, Transport, WriteImm};

/// Makes worlds to test.
pub trait Backend {
    type Endpoint: Transport;
    /// Endpoints of ranks 0, 1, …: nothing registered, nobody connected.
    fn endpoints(&self, ranks: usize) -> Vec<Self::Endpoint>;
    /// Whether this machine has it. What it lacks is printed, and fails under TOKENYARD_STRICT=1.
    fn is_there(&self) -> bool {
        true
    }
    /// Polls without an event after which a network is at rest. Fewer where a poll takes as long as many elsewhere.
    fn quiet_polls(&self) -> usize {
        2000
    }
}

pub const PATIENCE: Duration = Duration::from_secs(30);
/// One write's place: some bytes of it are payload, all others must stay as they are.
pub const SLOT: usize = 1024;
pub const MOST: usize = 900;
pub const SLOTS: usize = 64;
pub const GUARD: u8 = 0xA5;
pub const SOURCE: RegionId = RegionId(0);
pub const RECV_BUFFER: RegionId = RegionId(1);

/// xorshift64*, so that a failing case is replayed by its seed.
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Draw {
        Draw(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((u128::from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)) * bound as u128) >> 64) as usize
    }
}

/// Memory that a transport may touch at any time: never behind a reference. Other processes may map it, too.
pub struct Memory {
    base: *mut u8,
    bytes: usize,
    file: OwnedFd,
}

// SAFETY: plain memory that this value owns; whoever has the value reads and writes it through raw pointers only.
unsafe impl Send for Memory {}

/// By address: the bytes and the file of all memory of the tests.
static SHARED: Mutex<BTreeMap<u64, (usize, i32)>> = Mutex::new(BTreeMap::new());

/// The file of the memory that an address lies in, and the offset in it.
pub fn shared_memory(address: u64) -> (i32, u64) {
    let shared = SHARED.lock().unwrap();
    let (base, (bytes, file)) = shared.range(..=address).next_back().unwrap();
    assert!(address < base + *bytes as u64, "an address in no memory of the tests");
    (*file, address - base)
}

impl Memory {
    pub fn new(bytes: usize) -> Memory {
        let file = memfd_create("tests", MFdFlags::MFD_CLOEXEC).unwrap();
        ftruncate(&file, bytes as i64).unwrap();
        let (access, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED);
        // SAFETY: a new mapping of a new file.
        let base = unsafe { mmap(None, NonZeroUsize::new(bytes).unwrap(), access, flags, &file, 0) }.unwrap();
        let memory = Memory { base: base.as_ptr().cast(), bytes, file };
        SHARED.lock().unwrap().insert(memory.base as u64, (bytes, memory.file.as_raw_fd()));
        memory.fill(0, bytes, GUARD);
        memory
    }

    pub fn span(&self) -> Span {
        Span::host(self.base as u64, self.bytes)
    }

    pub fn fill(&self, offset: usize, len: usize, byte: u8) {
        assert!(offset + len <= self.bytes);
        // SAFETY: inside this memory, as just checked.
        unsafe { self.base.add(offset).write_bytes(byte, len) };
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.bytes);
        // SAFETY: inside this memory, as just checked.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.base.add(offset), bytes.len()) };
    }

    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.bytes);
        let mut out = vec![0; len];
        // SAFETY: inside this memory, as just checked.
        unsafe { std::ptr::copy(self.base.add(offset), out.as_mut_ptr(), len) };
        out
    }

    pub fn all(&self) -> Vec<u8> {
        self.read(0, self.bytes)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        SHARED.lock().unwrap_or_else(PoisonError::into_inner).remove(&(self.base as u64));
        let base = std::ptr::NonNull::new(self.base.cast()).unwrap();
        // SAFETY: mapped by `new`, as many bytes.
        unsafe { munmap(base, self.bytes) }.unwrap();
    }
}

/// A rank's registered memory.
pub struct Regions {
    pub source: Memory,
    pub recv_buffer: Memory,
}

/// One rank: its endpoint, which goes before its memory.
pub struct Node<E: Transport> {
    pub endpoint: E,
    pub regions: Regions,
}

impl<E: Transport> Node<E> {
    pub fn new(mut endpoint: E) -> Node<E> {
        let regions = Regions { source: Memory::new(SLOT * SLOTS), recv_buffer: Memory::new(SLOT * SLOTS) };
        // SAFETY: both are accessed through raw pointers only, and outlive the endpoint by the order of the fields.
        let ids = unsafe { [endpoint.register(regions.source.span()), endpoint.register(regions.recv_buffer.span())] };
        assert_eq!(ids, [Ok(SOURCE), Ok(RECV_BUFFER)]);
        Node { endpoint, regions }
    }
}

/// A connected world, driven by one thread.
pub struct Cluster<E: Transport> {
    /// By rank; `None` is a rank that has gone.
    pub nodes: Vec<Option<Node<E>>>,
    quiet_polls: usize,
}

impl<E: Transport> Cluster<E> {
    pub fn new(backend: &impl Backend<Endpoint = E>, ranks: usize) -> Cluster<E> {
        let nodes = backend.endpoints(ranks).into_iter().map(|e| Some(Node::new(e))).collect();
        let mut cluster = Cluster { nodes, quiet_polls: backend.quiet_polls() };
        cluster.connect();
        cluster
    }

    pub fn connect(&mut self) {
        for rank in 0..self.nodes.len() {
            for peer in (0..self.nodes.len()).filter(|peer| *peer != rank) {
                if self.nodes[rank].is_some() && self.nodes[peer].is_some() {
                    self.connect_to(rank, peer);
                }
            }
        }
    }

    /// Connects a rank to a peer by the peer's present address.
    pub fn connect_to(&mut self, rank: usize, peer: usize) {
        let address = self.endpoint(peer).address(Rank(rank as u32)).unwrap();
        self.endpoint(rank).connect(Rank(peer as u32), &address).unwrap();
    }

    /// Takes a region of a rank back, polling everyone while the answer is `Busy`.
    pub fn take_back(&mut self, rank: usize, region: RegionId, log: &mut Log) {
        let start = Instant::now();
        while self.endpoint(rank).deregister(region).unwrap() == Released::Busy {
            assert!(start.elapsed() < PATIENCE, "a region is not taken back: {log:?}");
            self.pump(&mut |rank, _, event| log.note(rank, event));
        }
    }

    pub fn endpoint(&mut self, rank: usize) -> &mut E {
        &mut self.nodes[rank].as_mut().unwrap().endpoint
    }

    pub fn regions(&self, rank: usize) -> &Regions {
        &self.nodes[rank].as_ref().unwrap().regions
    }

    /// Polls everyone once; returns how much happened.
    pub fn pump(&mut self, on_event: &mut dyn FnMut(usize, &Regions, Event<'_>)) -> usize {
        let mut events = 0;
        for (rank, node) in self.nodes.iter_mut().enumerate() {
            let Some(Node { endpoint, regions }) = node else { continue };
            events += endpoint.poll(&mut |event| on_event(rank, regions, event)).unwrap();
        }
        events
    }

    /// Polls until `done`, and complains if that takes too long.
    pub fn pump_until(&mut self, what: &str, log: &mut Log, done: impl Fn(&Log) -> bool) {
        let start = Instant::now();
        while !done(log) {
            assert!(start.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}: {log:?}");
            self.pump(&mut |rank, _, event| log.note(rank, event));
        }
    }

    /// Polls for long enough that whatever is still on its way should have come.
    pub fn settle(&mut self, log: &mut Log) {
        let (start, mut quiet) = (Instant::now(), 0);
        while quiet < self.quiet_polls || start.elapsed() < Duration::from_millis(20) {
            assert!(start.elapsed() < PATIENCE, "the network does not come to rest: {log:?}");
            quiet = if self.pump(&mut |rank, _, event| log.note(rank, event)) == 0 { quiet + 1 } else { 0 };
        }
    }

    /// Posts, polling while the answer is `Full`.
    pub fn post(&mut self, rank: usize, write: &WriteImm, log: &mut Log) {
        let start = Instant::now();
        while self.endpoint(rank).post(write).unwrap() == Posted::Full {
            assert!(start.elapsed() < PATIENCE, "a queue stays full");
            self.pump(&mut |rank, _, event| log.note(rank, event));
        }
    }
}

/// Everything that was handed out, by rank.
#[derive(Debug, Default)]
pub struct Log {
    pub sent: BTreeMap<(usize, u64), u32>,
    pub failed: BTreeMap<(usize, u64), u32>,
    pub dropped: BTreeMap<(usize, u64), u32>,
    pub imms: BTreeMap<(usize, u32), u32>,
    pub messages: BTreeMap<(usize, Rank, Vec<u8>), u32>,
}

impl Log {
    pub fn note(&mut self, rank: usize, event: Event<'_>) {
        match event {
            Event::Sent { token } => *self.sent.entry((rank, token)).or_default() += 1,
            Event::Failed { token, .. } => *self.failed.entry((rank, token)).or_default() += 1,
            Event::Dropped { token, .. } => *self.dropped.entry((rank, token)).or_default() += 1,
            Event::Imm { imm } => *self.imms.entry((rank, number(imm))).or_default() += 1,
            Event::Message { peer, bytes } => *self.messages.entry((rank, peer, bytes.into())).or_default() += 1,
        }
    }

    pub fn completions(&self, rank: usize, token: u64) -> u32 {
        let of = |map: &BTreeMap<_, u32>| map.get(&(rank, token)).copied().unwrap_or(0);
        of(&self.sent) + of(&self.failed) + of(&self.dropped)
    }

    pub fn completed(&self, rank: usize, tokens: impl IntoIterator<Item = u64>) -> bool {
        tokens.into_iter().all(|token| self.completions(rank, token) > 0)
    }
}

/// The number that a test gave a write.
pub fn number(imm: ImmValue) -> u32 {
    match imm.decode() {
        Some(Decoded::User { payload, .. }) => payload,
        other => panic!("an immediate that nobody posted: {other:?}"),
    }
}

/// A write from slot to slot; its number is immediate and token.
pub fn write(peer: usize, number: u32, slot: usize, bytes: usize) -> WriteImm {
    WriteImm {
        nic: 0,
        peer: Rank(peer as u32),
        source: Place { region: SOURCE, offset: (slot * SLOT) as u64 },
        target: Place { region: RECV_BUFFER, offset: (slot * SLOT) as u64 },
        bytes: bytes as u32,
        imm: ImmValue::user(0, 0, number).unwrap(),
        token: u64::from(number),
    }
}

/// Bytes that no other write has in this place.
pub fn pattern(number: u32, len: usize) -> Vec<u8> {
    (0..len as u32)
        .map(|i| (number.wrapping_mul(0x9e37_79b1).wrapping_add(i.wrapping_mul(0x0101_6b55)) >> 11) as u8)
        .collect()
}

/// The findings of a storm of writes between all ranks.
#[derive(Debug, Default)]
pub struct Tally {
    pub log: Log,
    /// Writes whose payload was not all there when their immediate was.
    pub torn: Vec<u32>,
    /// Writes around whose payload something changed.
    pub outside: Vec<u32>,
    /// Immediates delivered after a later one between the same ranks.
    pub overtaken: usize,
    pub full: usize,
    pub writes: Vec<Flown>,
}

/// A write of a storm.
#[derive(Debug, Clone, Copy)]
pub struct Flown {
    pub from: usize,
    pub to: usize,
    pub source: usize,
    pub slot: usize,
    pub offset: usize,
    pub bytes: usize,
}

/// Thousands of writes of all lengths, between all pairs, on all NICs. Slots are used again as soon as the promises
/// allow: the target's from its immediate on, the source's from its completion on.
pub struct Storm<'a, E: Transport> {
    cluster: &'a mut Cluster<E>,
    draw: Draw,
    free_sources: Vec<Vec<usize>>,
    free_slots: Vec<Vec<usize>>,
    delivered: BTreeMap<(usize, usize), u32>,
    tally: Tally,
}

impl<'a, E: Transport> Storm<'a, E> {
    pub fn rage(cluster: &'a mut Cluster<E>, writes: usize, seed: u64) -> Tally {
        let ranks = cluster.nodes.len();
        let free = || vec![(0..SLOTS).collect::<Vec<_>>(); ranks];
        let (free_sources, free_slots, delivered) = (free(), free(), BTreeMap::new());
        let (draw, tally) = (Draw::new(seed), Tally::default());
        let mut storm = Storm { cluster, draw, free_sources, free_slots, delivered, tally };
        let start = Instant::now();
        while storm.tally.writes.len() < writes || !storm.is_over() {
            assert!(start.elapsed() < PATIENCE, "seed {seed}: writes do not end: {:?}", storm.tally.log);
            if storm.tally.writes.len() == writes || !storm.post() {
                storm.pump();
            }
        }
        storm.cluster.settle(&mut storm.tally.log);
        storm.tally
    }

    fn is_over(&self) -> bool {
        let log = &self.tally.log;
        let ends = |n: u64, w: &Flown| {
            let arrived = log.imms.contains_key(&(w.to, n as u32)) || log.failed.contains_key(&(w.from, n));
            arrived && log.completions(w.from, n) > 0
        };
        // From the latest, which are those likely to be open.
        self.tally.writes.iter().enumerate().rev().all(|(n, w)| ends(n as u64, w))
    }

    /// Posts a write if there is room for it; false if it is time to poll.
    fn post(&mut self) -> bool {
        let ranks = self.cluster.nodes.len();
        let from = self.draw.below(ranks);
        let to = (from + 1 + self.draw.below(ranks - 1)) % ranks;
        if self.free_sources[from].is_empty() || self.free_slots[to].is_empty() {
            return false;
        }
        let source = self.free_sources[from].remove(0);
        let slot = self.free_slots[to].remove(0);
        let nic = self.draw.below(self.cluster.endpoint(from).nics()) as u8;
        let bytes = [0, 1, self.draw.below(MOST), MOST][self.draw.below(4)];
        let offset = self.draw.below(SLOT - bytes + 1);
        let number = self.tally.writes.len() as u32;
        self.cluster.regions(from).source.write(source * SLOT, &pattern(number, bytes));
        let mut write = write(to, number, slot, bytes);
        write.nic = nic;
        write.source.offset = (source * SLOT) as u64;
        write.target.offset += offset as u64;
        if self.cluster.endpoint(from).post(&write).unwrap() == Posted::Full {
            self.tally.full += 1;
            self.cluster.regions(from).source.fill(source * SLOT, SLOT, 0xEE);
            self.free_sources[from].push(source);
            self.free_slots[to].push(slot);
            return false;
        }
        self.tally.writes.push(Flown { from, to, source, slot, offset, bytes });
        true
    }

    fn pump(&mut self) {
        let Storm { cluster, free_sources, free_slots, delivered, tally, .. } = self;
        cluster.pump(&mut |rank, regions, event| {
            tally.log.note(rank, event);
            match event {
                Event::Imm { imm } => {
                    let number = number(imm);
                    let w = tally.writes[number as usize];
                    assert_eq!(w.to, rank, "write {number} went to another rank");
                    let seen = regions.recv_buffer.read(w.slot * SLOT, SLOT);
                    let (before, rest) = seen.split_at(w.offset);
                    let (payload, after) = rest.split_at(w.bytes);
                    if payload != pattern(number, w.bytes) {
                        tally.torn.push(number);
                    }
                    if before.iter().chain(after).any(|byte| *byte != GUARD) {
                        tally.outside.push(number);
                    }
                    let last = delivered.entry((w.from, w.to)).or_default();
                    tally.overtaken += usize::from(number < *last);
                    *last = number.max(*last);
                    regions.recv_buffer.fill(w.slot * SLOT, SLOT, GUARD);
                    free_slots[rank].push(w.slot);
                }
                Event::Sent { token } => {
                    let source = tally.writes[token as usize].source;
                    regions.source.fill(source * SLOT, SLOT, 0xEE);
                    free_sources[rank].push(source);
                }
                _ => {}
            }
        });
    }
}
