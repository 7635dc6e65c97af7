//! A network of two ranks in memory that is itself quiet.
//!
//! Rings of words with one writer and one reader take immediates and messages across; nothing is copied. The device is
//! played in `poll`, so that a rank is one thread.

use super::device::{Device, Offence, Shared};
use super::guard;
use super::stub::Carrier;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
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

/// One rank's endpoint and device.
pub struct Endpoint {
    pub device: Device,
    nics: usize,
    peer: Rank,
    /// Immediates, and messages: to the peer, and from it.
    imms: [Arc<Ring>; 2],
    messages: [Arc<Ring>; 2],
    /// Own posts that complete with the next polls.
    completions: Arc<Ring>,
}

/// The two endpoints, without contexts yet.
pub fn pair(shared: &Arc<Shared>, nics: u8, last: u64, offence: Offence) -> [Endpoint; 2] {
    let (imms, messages) = ([Ring::new(), Ring::new()], [Ring::new(), Ring::new()]);
    [0usize, 1].map(|rank| Endpoint {
        device: Device::new(shared, rank, last, offence),
        nics: usize::from(nics),
        peer: Rank(1 - rank as u32),
        imms: [rank, 1 - rank].map(|at| Arc::clone(&imms[at])),
        messages: [rank, 1 - rank].map(|at| Arc::clone(&messages[at])),
        completions: Ring::new(),
    })
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
            self.device.shared.full.fetch_add(1, Ordering::Relaxed);
            return Ok(Posted::Full);
        }
        self.completions.push([write.token, 0]);
        self.device.shared.posts.fetch_add(1, Ordering::Relaxed);
        Ok(Posted::Accepted)
    }

    fn send(&mut self, _: Rank, message: &[u8]) -> Result<Posted> {
        let mut bytes = [0; 16];
        bytes.iter_mut().zip(message).for_each(|(to, from)| *to = *from);
        let bits = u128::from_le_bytes(bytes);
        Ok(if self.messages[0].push([bits as u64, (bits >> 64) as u64]) { Posted::Accepted } else { Posted::Full })
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        guard::begin_if_asked(self.device.shared.guarded.load(Ordering::Relaxed));
        let mut count = 0;
        for _ in 0..BATCH {
            if let Some([token, _]) = self.completions.pop() {
                count += 1;
                on_event(Event::Sent { token });
            }
            if let Some([imm, _]) = self.imms[1].pop() {
                count += 1;
                let event = Event::Imm { imm: ImmValue::from_bits(imm as u32) };
                self.device.note(&event);
                on_event(event);
            }
        }
        if let Some([low, high]) = self.messages[1].pop() {
            count += 1;
            let bytes = (u128::from(high) << 64 | u128::from(low)).to_le_bytes();
            let event = Event::Message { peer: self.peer, bytes: &bytes[..12] };
            self.device.note(&event);
            on_event(event);
        }
        self.device.step();
        Ok(count)
    }
}
