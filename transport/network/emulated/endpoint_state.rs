//! The state that the endpoints of a network share: one endpoint state per rank, each with its own lock.
//!
//! Place: between endpoints. Any endpoint's thread takes an endpoint state's lock for a few instructions; no thread
//! waits while it holds one. Order of locks: an endpoint state, then an engine; never two endpoint states.

use crate::base::Rank;
use crate::base::copies::CopyDevice;
use crate::transport::network::RegionId;
use crate::transport::network::imm::{ImmValue, MAX_NICS};
use crate::transport::network::regions::Regions;
use std::cmp::Ordering as Order;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state of a rank's endpoint, shared with its peers.
pub(super) struct EndpointState<D: CopyDevice> {
    inner: Mutex<Inner<D>>,
    /// Whether the queue of undelivered events has entries; loaded without the lock.
    mail: AtomicBool,
    /// Messages sent to this rank that no poll has handed out.
    pub messages: AtomicUsize,
}

pub(super) struct Inner<D: CopyDevice> {
    /// The endpoint's key; 0 without an endpoint. After a drop or reset, the key is never used again.
    pub key: u64,
    pub device: Option<D>,
    pub engine: Option<Arc<Mutex<D::Engine>>>,
    pub regions: Regions,
    /// Keys of the peers that this endpoint has connected to.
    pub peers: BTreeMap<Rank, u64>,
    undelivered: Vec<Mail>,
    /// By NIC: when it has taken in all delivered writes, in picoseconds.
    receives_until_ps: [u64; MAX_NICS],
}

impl<D: CopyDevice> Default for EndpointState<D> {
    fn default() -> Self {
        let inner = Inner {
            key: 0,
            device: None,
            engine: None,
            regions: Regions::default(),
            peers: BTreeMap::new(),
            undelivered: Vec::new(),
            receives_until_ps: [0; MAX_NICS],
        };
        EndpointState { inner: Mutex::new(inner), mail: AtomicBool::new(false), messages: AtomicUsize::new(0) }
    }
}

impl<D: CopyDevice> EndpointState<D> {
    pub fn lock(&self) -> MutexGuard<'_, Inner<D>> {
        lock(&self.inner)
    }

    /// Puts an event into the queue of undelivered events, whose lock the caller holds.
    pub fn deliver(&self, inner: &mut Inner<D>, mail: Mail) {
        inner.undelivered.push(mail);
        self.mail.store(true, Ordering::Release);
    }

    /// Moves the queue of undelivered events to `arrived`.
    pub fn collect(&self, arrived: &mut impl Extend<Mail>) {
        if self.mail.load(Ordering::Acquire) {
            let mut inner = self.lock();
            self.mail.store(false, Ordering::Release);
            arrived.extend(inner.undelivered.drain(..));
        }
    }

    /// Discards the queue of undelivered events.
    pub fn purge(&self, inner: &mut Inner<D>) {
        inner.undelivered.clear();
        self.mail.store(false, Ordering::Release);
        self.messages.store(0, Ordering::Relaxed);
    }
}

impl<D: CopyDevice> Inner<D> {
    /// Discards undelivered events of writes to a region.
    pub fn forget(&mut self, region: RegionId) {
        self.undelivered.retain(|mail| !mail.is_of(region));
    }

    /// When a write has been taken in that would be in at `arrives_ps` if this NIC had nothing else to take in. An idle
    /// NIC takes a write in while it arrives.
    pub fn take_in(&mut self, nic: usize, arrives_ps: u64, takes_ps: u64) -> u64 {
        let Some(until_ps) = self.receives_until_ps.get_mut(nic) else { return arrives_ps };
        *until_ps = arrives_ps.max(*until_ps + takes_ps);
        *until_ps
    }
}

/// An event that a later poll hands out.
pub(super) struct Mail {
    pub due_ns: u64,
    pub content: Content,
}

/// See [`Mail`].
pub(super) enum Content {
    /// `region` is the target of the write.
    Imm {
        imm: ImmValue,
        region: RegionId,
    },
    Message {
        peer: Rank,
        bytes: Box<[u8]>,
    },
}

impl Mail {
    /// Whether it is the immediate of a write to a region.
    pub fn is_of(&self, wanted: RegionId) -> bool {
        matches!(self.content, Content::Imm { region, .. } if region == wanted)
    }
}

// In a heap, the earliest comes first.
impl Ord for Mail {
    fn cmp(&self, other: &Mail) -> Order {
        other.due_ns.cmp(&self.due_ns)
    }
}

impl PartialOrd for Mail {
    fn partial_cmp(&self, other: &Mail) -> Option<Order> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Mail {
    fn eq(&self, other: &Mail) -> bool {
        self.cmp(other) == Order::Equal
    }
}

impl Eq for Mail {}
