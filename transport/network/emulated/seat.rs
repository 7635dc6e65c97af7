//! What the endpoints of a network know of each other: one seat for each rank, behind a lock of its own.
//!
//! Place: between endpoints. Any endpoint's thread takes a seat's lock for a few instructions; nobody waits while it
//! holds one. Order of locks: a seat, then an engine; never two seats.

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

/// A rank's place in the network.
pub(super) struct Seat<D: CopyDevice> {
    inner: Mutex<Inner<D>>,
    /// Something is in the inbox: looked at without the lock.
    mail: AtomicBool,
    /// Messages sent here that no poll has handed out.
    pub messages: AtomicUsize,
}

pub(super) struct Inner<D: CopyDevice> {
    /// The endpoint's key; 0 where there is none. An endpoint that is dropped or reset never has it again.
    pub key: u64,
    pub device: Option<D>,
    pub engine: Option<Arc<Mutex<D::Engine>>>,
    pub regions: Regions,
    /// Keys of the peers that this endpoint has connected to.
    pub peers: BTreeMap<Rank, u64>,
    inbox: Vec<Mail>,
    /// When each NIC has taken in all that was delivered, in picoseconds.
    receives_until_ps: [u64; MAX_NICS],
}

impl<D: CopyDevice> Default for Seat<D> {
    fn default() -> Self {
        let inner = Inner {
            key: 0,
            device: None,
            engine: None,
            regions: Regions::default(),
            peers: BTreeMap::new(),
            inbox: Vec::new(),
            receives_until_ps: [0; MAX_NICS],
        };
        Seat { inner: Mutex::new(inner), mail: AtomicBool::new(false), messages: AtomicUsize::new(0) }
    }
}

impl<D: CopyDevice> Seat<D> {
    pub fn lock(&self) -> MutexGuard<'_, Inner<D>> {
        lock(&self.inner)
    }

    /// Puts something into the inbox, whose lock the caller holds.
    pub fn deliver(&self, inner: &mut Inner<D>, mail: Mail) {
        inner.inbox.push(mail);
        self.mail.store(true, Ordering::Release);
    }

    /// Moves what is in the inbox to `arrived`.
    pub fn collect(&self, arrived: &mut impl Extend<Mail>) {
        if self.mail.load(Ordering::Acquire) {
            let mut inner = self.lock();
            self.mail.store(false, Ordering::Release);
            arrived.extend(inner.inbox.drain(..));
        }
    }

    /// Throws away what is in the inbox.
    pub fn purge(&self, inner: &mut Inner<D>) {
        inner.inbox.clear();
        self.mail.store(false, Ordering::Release);
        self.messages.store(0, Ordering::Relaxed);
    }
}

impl<D: CopyDevice> Inner<D> {
    /// Throws away what is in the inbox of writes to a region.
    pub fn forget(&mut self, region: RegionId) {
        self.inbox.retain(|mail| !mail.is_of(region));
    }

    /// When a write is in that would be in at `arrives_ps` if this NIC had nothing else to take in. A NIC that is idle
    /// takes a write in while it arrives.
    pub fn take_in(&mut self, nic: usize, arrives_ps: u64, takes_ps: u64) -> u64 {
        let Some(until_ps) = self.receives_until_ps.get_mut(nic) else { return arrives_ps };
        *until_ps = arrives_ps.max(*until_ps + takes_ps);
        *until_ps
    }
}

/// Something that a later poll hands out.
pub(super) struct Mail {
    pub due_ns: u64,
    pub content: Content,
}

/// See [`Mail`].
pub(super) enum Content {
    /// `region` is where the write went.
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
