// A network between the ranks of one process: a write is a copy, made as it is posted. One lock stands in for the wire.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokenyard::network::imm::ImmValue;
use tokenyard::network::{
    DeviceNeeds, Event, Limits, Place, Posted, RegionId, Released, Span, SpanMemory, Transport, WriteImm,
};
use tokenyard::{Error, Rank, Result};

/// An arrival at a rank that was not handed out yet.
enum Arrived {
    Imm(ImmValue),
    Message(Rank, Vec<u8>),
}

/// The state of one rank's endpoint, shared with the others.
#[derive(Default)]
struct EndpointState {
    /// Part of the address: another one after each reset, so that writes to earlier ones miss.
    life: u64,
    /// By number; `None` once taken back.
    regions: Vec<Option<Span>>,
    arrived: VecDeque<Arrived>,
}

/// The endpoint states of all ranks.
#[derive(Clone, Default)]
pub struct Loopback(Arc<Mutex<BTreeMap<Rank, EndpointState>>>);

/// How an own write completed.
enum Completed {
    Sent(u64),
    Dropped(u64, Rank),
}

/// A rank's endpoint.
pub struct Endpoint {
    network: Loopback,
    rank: Rank,
    /// Lives of the peers that this endpoint has connected to.
    peers: BTreeMap<Rank, u64>,
    completed: VecDeque<Completed>,
}

fn argument(name: &'static str, value: impl std::fmt::Debug) -> Error {
    Error::argument(name, format!("{value:?}"), "register and connect first")
}

/// Where a write begins or ends, if all of it lies in the region. The inner `None`: the region was taken back.
fn place(endpoint: &EndpointState, place: Place, bytes: u32) -> Option<Option<*mut u8>> {
    let Some(span) = endpoint.regions.get(usize::from(place.region.0))? else { return Some(None) };
    let end = place.offset.checked_add(u64::from(bytes))?;
    (end <= span.bytes as u64).then(|| Some((span.base + place.offset) as *mut u8))
}

impl Loopback {
    pub fn endpoint(&self, rank: Rank) -> Endpoint {
        self.endpoints().insert(rank, EndpointState::default());
        Endpoint { network: self.clone(), rank, peers: BTreeMap::new(), completed: VecDeque::new() }
    }

    fn endpoints(&self) -> MutexGuard<'_, BTreeMap<Rank, EndpointState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for Endpoint {
    fn nics(&self) -> usize {
        1
    }

    fn limits(&self) -> Limits {
        Limits::NONE
    }

    fn device_needs(&self) -> DeviceNeeds {
        DeviceNeeds { host_memory: true, ..DeviceNeeds::default() }
    }

    unsafe fn register(&mut self, span: Span) -> Result<RegionId> {
        if span.bytes == 0 || span.memory != SpanMemory::Host {
            return Err(argument("span", span));
        }
        let mut endpoints = self.network.endpoints();
        let regions = &mut endpoints.entry(self.rank).or_default().regions;
        regions.push(Some(span));
        Ok(RegionId(regions.len() as u16 - 1))
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        let mut endpoints = self.network.endpoints();
        let regions = &mut endpoints.entry(self.rank).or_default().regions;
        // Copies are made under the lock, so none is under way.
        match regions.get_mut(usize::from(region.0)).and_then(Option::take) {
            Some(_) => Ok(Released::Done),
            None => Err(argument("region", region)),
        }
    }

    fn address(&mut self, _peer: Rank) -> Result<Vec<u8>> {
        let life = self.network.endpoints().get(&self.rank).map_or(0, |endpoint| endpoint.life);
        Ok([&self.rank.0.to_le_bytes()[..], &life.to_le_bytes()].concat())
    }

    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()> {
        let life = address.split_first_chunk::<4>().and_then(|(rank, life)| {
            (u32::from_le_bytes(*rank) == peer.0).then_some(u64::from_le_bytes(life.try_into().ok()?))
        });
        let refused = || Error::transport(format!("no address of rank {peer}"), "exchange them");
        self.peers.insert(peer, life.ok_or_else(refused)?);
        Ok(())
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        let mut endpoints = self.network.endpoints();
        let own = endpoints.get(&self.rank).and_then(|endpoint| place(endpoint, write.source, write.bytes));
        let Some(Some(source)) = own else { return Err(argument("source", write.source)) };
        let life = self.peers.get(&write.peer).ok_or_else(|| argument("peer", write.peer))?;
        let endpoint = endpoints.get_mut(&write.peer).filter(|endpoint| endpoint.life == *life);
        let target =
            endpoint.map(|endpoint| place(endpoint, write.target, write.bytes).map(|target| (target, endpoint)));
        match target {
            Some(None) => return Err(argument("target", write.target)),
            Some(Some((Some(target), endpoint))) => {
                // SAFETY: both places are inside registered spans, whose owners let them be read and written
                // until they are taken back, and that takes the lock that is held here.
                unsafe { std::ptr::copy(source, target, write.bytes as usize) };
                endpoint.arrived.push_back(Arrived::Imm(write.imm));
                self.completed.push_back(Completed::Sent(write.token));
            }
            // The peer has taken the region back, or was reset.
            Some(Some((None, _))) | None => self.completed.push_back(Completed::Dropped(write.token, write.peer)),
        }
        Ok(Posted::Accepted)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        let life = self.peers.get(&peer).ok_or_else(|| argument("peer", peer))?;
        if let Some(endpoint) = self.network.endpoints().get_mut(&peer).filter(|endpoint| endpoint.life == *life) {
            endpoint.arrived.push_back(Arrived::Message(self.rank, message.to_vec()));
        }
        Ok(Posted::Accepted)
    }

    // Nothing waits: a post copies at once.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        let arrived =
            self.network.endpoints().get_mut(&self.rank).map(|endpoint| std::mem::take(&mut endpoint.arrived));
        let (arrived, completed) = (arrived.unwrap_or_default(), std::mem::take(&mut self.completed));
        let events = arrived.len() + completed.len();
        for event in completed {
            on_event(match event {
                Completed::Sent(token) => Event::Sent { token },
                Completed::Dropped(token, peer) => Event::Dropped { token, peer },
            });
        }
        for event in &arrived {
            on_event(match event {
                Arrived::Imm(imm) => Event::Imm { imm: *imm },
                Arrived::Message(peer, bytes) => Event::Message { peer: *peer, bytes },
            });
        }
        Ok(events)
    }

    fn reset(&mut self) -> Result<()> {
        self.peers.clear();
        if let Some(endpoint) = self.network.endpoints().get_mut(&self.rank) {
            endpoint.life += 1;
            endpoint.arrived.clear();
        }
        Ok(())
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.network.endpoints().remove(&self.rank);
    }
}
