// A network between the ranks of one process: a write is a copy, made as it is posted. One lock stands in for the wire.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokenyard::network::imm::ImmValue;
use tokenyard::network::{
    DeviceNeeds, Event, Limits, Place, Posted, RegionId, Released, Span, SpanMemory, Transport, WriteImm,
};
use tokenyard::{Error, Rank, Result};

/// What has come for a rank and was not handed out yet.
enum Arrived {
    Imm(ImmValue),
    Message(Rank, Vec<u8>),
}

/// One rank, as the others reach it.
#[derive(Default)]
struct Seat {
    /// Part of the address: another one behind each reset, so that writes to earlier ones miss.
    life: u64,
    /// By number; `None` once taken back.
    regions: Vec<Option<Span>>,
    arrived: VecDeque<Arrived>,
}

/// All ranks' seats.
#[derive(Clone, Default)]
pub struct Loopback(Arc<Mutex<BTreeMap<Rank, Seat>>>);

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
fn place(seat: &Seat, place: Place, bytes: u32) -> Option<Option<*mut u8>> {
    let Some(span) = seat.regions.get(usize::from(place.region.0))? else { return Some(None) };
    let end = place.offset.checked_add(u64::from(bytes))?;
    (end <= span.bytes as u64).then(|| Some((span.base + place.offset) as *mut u8))
}

impl Loopback {
    pub fn endpoint(&self, rank: Rank) -> Endpoint {
        self.seats().insert(rank, Seat::default());
        Endpoint { network: self.clone(), rank, peers: BTreeMap::new(), completed: VecDeque::new() }
    }

    fn seats(&self) -> MutexGuard<'_, BTreeMap<Rank, Seat>> {
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
        let mut seats = self.network.seats();
        let regions = &mut seats.entry(self.rank).or_default().regions;
        regions.push(Some(span));
        Ok(RegionId(regions.len() as u16 - 1))
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        let mut seats = self.network.seats();
        let regions = &mut seats.entry(self.rank).or_default().regions;
        // Copies are made under the lock, so none is under way.
        match regions.get_mut(usize::from(region.0)).and_then(Option::take) {
            Some(_) => Ok(Released::Done),
            None => Err(argument("region", region)),
        }
    }

    fn address(&self) -> Vec<u8> {
        let life = self.network.seats().get(&self.rank).map_or(0, |seat| seat.life);
        [&self.rank.0.to_le_bytes()[..], &life.to_le_bytes()].concat()
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
        let mut seats = self.network.seats();
        let own = seats.get(&self.rank).and_then(|seat| place(seat, write.source, write.bytes));
        let Some(Some(source)) = own else { return Err(argument("source", write.source)) };
        let life = self.peers.get(&write.peer).ok_or_else(|| argument("peer", write.peer))?;
        let seat = seats.get_mut(&write.peer).filter(|seat| seat.life == *life);
        let target = seat.map(|seat| place(seat, write.target, write.bytes).map(|target| (target, seat)));
        match target {
            Some(None) => return Err(argument("target", write.target)),
            Some(Some((Some(target), seat))) => {
                // SAFETY: both places are inside registered spans, whose owners let them be read and written
                // until they are taken back, and that takes the lock that is held here.
                unsafe { std::ptr::copy(source, target, write.bytes as usize) };
                seat.arrived.push_back(Arrived::Imm(write.imm));
                self.completed.push_back(Completed::Sent(write.token));
            }
            // The peer has taken the region back, or is in another life.
            Some(Some((None, _))) | None => self.completed.push_back(Completed::Dropped(write.token, write.peer)),
        }
        Ok(Posted::Accepted)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        let life = self.peers.get(&peer).ok_or_else(|| argument("peer", peer))?;
        if let Some(seat) = self.network.seats().get_mut(&peer).filter(|seat| seat.life == *life) {
            seat.arrived.push_back(Arrived::Message(self.rank, message.to_vec()));
        }
        Ok(Posted::Accepted)
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        let arrived = self.network.seats().get_mut(&self.rank).map(|seat| std::mem::take(&mut seat.arrived));
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
        if let Some(seat) = self.network.seats().get_mut(&self.rank) {
            seat.life += 1;
            seat.arrived.clear();
        }
        Ok(())
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.network.seats().remove(&self.rank);
    }
}
