//! A network of two ranks in memory that is itself quiet, and the device of each rank.
//!
//! Rings of words with one writer and one reader take immediates and messages across; nothing is copied. The device is
//! played in `poll`, so that a rank is one thread: it rings an epoch's chunks once it has the peer's of the epoch
//! before and its staging is free.

use super::guard;
use super::stub::Carrier;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tokenyard::internals::proxy::driver::{ContextMemory, Words};
use tokenyard::internals::proxy::wire::{ARRIVAL_BITS, ChunkIdx, Direction, LinkIdx, Wire};
use tokenyard::internals::transport::network::imm::ImmValue;
use tokenyard::internals::transport::network::{Event, Posted, WriteImm};
use tokenyard::{Rank, Result};

/// Room of a ring: small, so that queues are full at times.
const ROOM: usize = 6;
/// Most events of one poll.
const BATCH: usize = 8;

/// A queue of pairs of words.
pub struct Ring {
    slots: [[AtomicU64; 2]; ROOM],
    written: AtomicUsize,
    read: AtomicUsize,
}

impl Ring {
    pub fn new() -> Arc<Ring> {
        let slots = [const { [const { AtomicU64::new(0) }; 2] }; ROOM];
        Arc::new(Ring { slots, written: AtomicUsize::new(0), read: AtomicUsize::new(0) })
    }

    fn push(&self, words: [u64; 2]) -> bool {
        let at = self.written.load(Ordering::Relaxed);
        if at - self.read.load(Ordering::Acquire) == ROOM {
            return false;
        }
        self.slots[at % ROOM].iter().zip(words).for_each(|(slot, word)| slot.store(word, Ordering::Relaxed));
        self.written.store(at + 1, Ordering::Release);
        true
    }

    fn pop(&self) -> Option<[u64; 2]> {
        let at = self.read.load(Ordering::Relaxed);
        if at == self.written.load(Ordering::Acquire) {
            return None;
        }
        let slot = &self.slots[at % ROOM];
        let words = [slot[0].load(Ordering::Relaxed), slot[1].load(Ordering::Relaxed)];
        self.read.store(at + 1, Ordering::Release);
        Some(words)
    }
}

/// What both ranks and the test share.
#[derive(Default)]
pub struct Shared {
    /// Threads to be guarded.
    pub guarded: AtomicU32,
    /// The devices may begin.
    pub go: AtomicBool,
    /// Devices that have received their last epoch in every direction.
    pub done: AtomicU32,
    pub posts: AtomicU64,
    pub full: AtomicU64,
    pub immediates: AtomicU64,
    pub messages: AtomicU64,
    /// Held by the test, for an offender that locks it.
    pub held: Mutex<u64>,
}

/// A forbidden act of a rank, to check that it is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offence {
    None,
    Allocation,
    Lock,
    Yield,
    Sleep,
    Print,
}

impl Offence {
    pub const ALL: [Offence; 6] =
        [Offence::None, Offence::Allocation, Offence::Lock, Offence::Yield, Offence::Sleep, Offence::Print];

    fn commit(self, shared: &Shared) {
        match self {
            Offence::None => {}
            Offence::Allocation => drop(std::hint::black_box(Box::new(7))),
            Offence::Lock => *shared.held.lock().unwrap() += 1,
            Offence::Yield => std::thread::yield_now(),
            Offence::Sleep => std::thread::sleep(std::time::Duration::from_micros(1)),
            Offence::Print => eprintln!("a proxy speaks"),
        }
    }
}

/// One direction of one context on the device.
struct Stream {
    memory: ContextMemory,
    wire: Wire,
    direction: Direction,
    sent: u64,
    received: u64,
}

fn load(words: &Words, at: usize) -> u64 {
    words.get(at).map_or(0, |word| word.load(Ordering::Acquire))
}

fn store(words: &Words, at: usize, value: u64) {
    if let Some(word) = words.get(at) {
        word.store(value, Ordering::Release);
    }
}

impl Stream {
    fn chunks(&self, epoch: u64) -> u16 {
        1 + (epoch % u64::from(self.wire.shape(self.direction).chunks)) as u16
    }

    fn step(&mut self, last: u64) {
        let Stream { memory, wire, direction, sent, received } = self;
        let (direction, epoch) = (*direction, *sent + 1);
        let free = wire.staging_free_word(direction, epoch, LinkIdx(0));
        if *sent == *received && *sent < last && (epoch <= 2 || load(&memory.staging_free, free) == epoch - 2) {
            let chunks = 1 + (epoch % u64::from(wire.shape(direction).chunks)) as u16;
            store(&memory.chunks, wire.chunks_word(direction, epoch, LinkIdx(0)), u64::from(chunks));
            for chunk in (0..chunks).map(ChunkIdx) {
                let bell = wire.doorbell_word(direction, epoch, LinkIdx(0), chunk);
                let bytes = u64::from(wire.shape(direction).chunk_capacity(chunk));
                store(&memory.doorbells, bell, epoch << 32 | bytes);
            }
            *sent = epoch;
        }
        let (epoch, arrived) = (self.received + 1, &self.memory.arrived);
        let word = |place| load(arrived, self.wire.arrival_word(direction, epoch, place));
        let mut places = 0..u32::from(self.chunks(epoch));
        if self.sent == epoch && places.all(|place| word(place) >> ARRIVAL_BITS == epoch) {
            self.received = epoch;
        }
    }
}

/// One rank's endpoint and device.
pub struct Endpoint {
    shared: Arc<Shared>,
    nics: usize,
    peer: Rank,
    /// Immediates, and messages: to the peer, and from it.
    imms: [Arc<Ring>; 2],
    messages: [Arc<Ring>; 2],
    /// Own posts that complete with the next polls.
    completions: Arc<Ring>,
    streams: Vec<Stream>,
    last: u64,
    done: bool,
    offence: Offence,
}

/// The two endpoints, without contexts yet.
pub fn pair(shared: &Arc<Shared>, nics: u8, last: u64, offence: Offence) -> [Endpoint; 2] {
    let (imms, messages) = ([Ring::new(), Ring::new()], [Ring::new(), Ring::new()]);
    [0usize, 1].map(|rank| Endpoint {
        shared: Arc::clone(shared),
        nics: usize::from(nics),
        peer: Rank(1 - rank as u32),
        imms: [rank, 1 - rank].map(|at| Arc::clone(&imms[at])),
        messages: [rank, 1 - rank].map(|at| Arc::clone(&messages[at])),
        completions: Ring::new(),
        streams: Vec::new(),
        last,
        done: false,
        // One offender is enough.
        offence: if rank == 1 { offence } else { Offence::None },
    })
}

impl Endpoint {
    /// Adds a context to the device.
    pub fn bind(&mut self, wire: &Wire, memory: &ContextMemory) {
        let used = Direction::ALL.into_iter().filter(|direction| wire.shape(*direction).chunks > 0);
        self.streams.extend(used.map(|direction| Stream {
            memory: memory.share(),
            wire: wire.clone(),
            direction,
            sent: 0,
            received: 0,
        }));
    }

    fn device(&mut self) {
        if !self.shared.go.load(Ordering::Acquire) {
            return;
        }
        self.streams.iter_mut().for_each(|stream| stream.step(self.last));
        let least = self.streams.iter().map(|stream| stream.received).min().unwrap_or(0);
        if least > self.last / 2 {
            std::mem::replace(&mut self.offence, Offence::None).commit(&self.shared);
        }
        if least == self.last && !self.done {
            self.done = true;
            self.shared.done.fetch_add(1, Ordering::Release);
        }
    }
}

impl Carrier for Endpoint {
    fn nics(&self) -> usize {
        self.nics
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        let imm = [u64::from(write.imm.bits()), 0];
        if self.completions.written.load(Ordering::Relaxed) - self.completions.read.load(Ordering::Relaxed) == ROOM
            || !self.imms[0].push(imm)
        {
            self.shared.full.fetch_add(1, Ordering::Relaxed);
            return Ok(Posted::Full);
        }
        self.completions.push([write.token, 0]);
        self.shared.posts.fetch_add(1, Ordering::Relaxed);
        Ok(Posted::Accepted)
    }

    fn send(&mut self, _: Rank, message: &[u8]) -> Result<Posted> {
        let mut bytes = [0; 16];
        bytes.iter_mut().zip(message).for_each(|(to, from)| *to = *from);
        let bits = u128::from_le_bytes(bytes);
        Ok(if self.messages[0].push([bits as u64, (bits >> 64) as u64]) { Posted::Accepted } else { Posted::Full })
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        guard::begin_if_asked(self.shared.guarded.load(Ordering::Relaxed));
        let mut count = 0;
        for _ in 0..BATCH {
            if let Some([token, _]) = self.completions.pop() {
                count += 1;
                on_event(Event::Sent { token });
            }
            if let Some([imm, _]) = self.imms[1].pop() {
                count += 1;
                self.shared.immediates.fetch_add(1, Ordering::Relaxed);
                on_event(Event::Imm { imm: ImmValue::from_bits(imm as u32) });
            }
        }
        if let Some([low, high]) = self.messages[1].pop() {
            count += 1;
            self.shared.messages.fetch_add(1, Ordering::Relaxed);
            let bytes = (u128::from(high) << 64 | u128::from(low)).to_le_bytes();
            on_event(Event::Message { peer: self.peer, bytes: &bytes[..12] });
        }
        self.device();
        Ok(count)
    }
}
