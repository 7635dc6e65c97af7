//! The device of each rank, played between polls: it rings an epoch's chunks once it has the peer's of the epoch before
//! and its staging is free.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokenyard::internals::proxy::driver::{ContextMemory, Words};
use tokenyard::internals::proxy::wire::{ARRIVAL_BITS, ChunkIdx, Direction, LinkIdx, Wire};
use tokenyard::internals::transport::network::Event;

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

/// A rank's device.
pub struct Device {
    pub shared: Arc<Shared>,
    streams: Vec<Stream>,
    last: u64,
    done: bool,
    offence: Offence,
}

impl Device {
    /// That of a rank, which stops at an epoch.
    pub fn new(shared: &Arc<Shared>, rank: usize, last: u64, offence: Offence) -> Device {
        // One offender is enough.
        let offence = if rank == 1 { offence } else { Offence::None };
        Device { shared: Arc::clone(shared), streams: Vec::new(), last, done: false, offence }
    }

    /// Adds a context.
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

    /// Counts what the network hands out.
    pub fn note(&self, event: &Event<'_>) {
        match event {
            Event::Imm { .. } => self.shared.immediates.fetch_add(1, Ordering::Relaxed),
            Event::Message { .. } => self.shared.messages.fetch_add(1, Ordering::Relaxed),
            _ => 0,
        };
    }

    /// What it does between two polls.
    pub fn step(&mut self) {
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
