//! An emulated network between GPUs of one process, for timed runs of several nodes on one host.
//!
//! Place in the data path: where libfabric or verbs would be, under the proxies. Each rank's endpoint has a NIC kernel
//! on the rank's own device (`base::copies`: kernels/nic, on a stream of its own), which copies payload from the rank's
//! memory into the peer's, over NVLink where there are GPUs. Calls of an endpoint come from one thread, its proxy's;
//! endpoints meet in `Seat`s, whose locks are held for a few instructions. `post`, `send` and `poll` never wait;
//! `reset`, `deregister`, and dropping an endpoint, wait until copies that still touch its memory have ended.
//!
//! It is an emulator in three respects, which whoever reads its figures should know:
//!
//! - **Blocks.** The kernel takes [`DeviceNeeds::blocks`](crate::transport::network::DeviceNeeds) multiprocessors,
//!   which contexts leave to it by default. A NIC takes none.
//! - **Time.** The kernel copies as fast as it can, and the host says when a write is over: `poll` hands out a
//!   completion no earlier than the copy's end and than the model's, which is max(post, NIC free) + per_message + bytes
//!   / rate; and the immediate a latency later, and no earlier than the receiving NIC has taken in what came before, at
//!   the same rate. That is as good as slow copies, because nobody looks at bytes before their immediate: kernels wait
//!   for the flag that the proxy stores then, and for the flag of the completion before they pack again. What differs
//!   is when the GPUs' memory is busy: a little earlier, and for a shorter time. A link faster than the kernel is as
//!   fast as the kernel.
//! - **Overhead.** The ring crosses PCIe twice, and two threads hand the immediate over: `overhead` measures that,
//!   from the post of a small write to its immediate over a link without a model. Where it exceeds the model's own
//!   latency, times are too long by the difference.
//!
//! GPUs are given access to all arenas of the process, for the NIC kernels alone: contexts do not learn the addresses
//! of other nodes' arenas (`PeerMap::base_of` stays 0 for them). A launch of the kernel ends by itself when nothing was
//! posted for 20 ms, and the next post launches it again, so whatever has to wait for the GPU to come to rest waits for
//! no longer; with the endpoint it ends for good. Ranks that share a GPU need a hardware queue for each of their
//! streams, or kernels wait for others that wait for them: set CUDA_DEVICE_MAX_CONNECTIONS=32 there.
//!
//! ```text
//!  post ─▶ engine: ring ─▶ NIC kernel ─▶ bytes in the peer's memory
//!            │ completed                              peer
//!  poll ◀────┘  copied? ─▶ Seat of the peer: inbox ─▶ poll: due? ─▶ Imm
//!    └─▶ the model's end passed? ─▶ Sent
//! ```

mod overhead;
mod seat;

use crate::base::copies::{CopyDevice, CopyEngine};
use crate::base::{Error, Rank, Result, wait};
use crate::transport::network::address::{Address, number};
use crate::transport::network::imm::{ImmValue, MAX_NICS, MAX_RANKS};
use crate::transport::network::regions::{Regions, fits};
use crate::transport::network::sim::LinkModel;
use crate::transport::network::{
    DeviceNeeds, Event, Limits, MAX_MESSAGE, Place, Posted, Reason, RegionId, Released, Span, Transport, WriteImm,
};
pub use overhead::overhead;
use seat::{Content, Mail, Seat, lock};
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Control messages to one endpoint that may be on their way.
const MESSAGES: usize = 1024;
/// Most events of one poll.
const BATCH: usize = 64;
/// How long copies may take that a reset waits for.
const DRAIN: Duration = Duration::from_secs(30);

/// A network of some ranks of this process. Clones share it.
pub struct GpuNetwork<D: CopyDevice> {
    shared: Arc<Shared<D>>,
}

impl<D: CopyDevice> Clone for GpuNetwork<D> {
    fn clone(&self) -> Self {
        GpuNetwork { shared: self.shared.clone() }
    }
}

struct Shared<D: CopyDevice> {
    number: u64,
    nics: usize,
    model: LinkModel,
    start: Instant,
    seats: Vec<Seat<D>>,
}

impl<D: CopyDevice> std::fmt::Debug for GpuNetwork<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuNetwork({} ranks, {} NICs of {:?})", self.shared.seats.len(), self.shared.nics, self.shared.model)
    }
}

impl<D: CopyDevice> GpuNetwork<D> {
    /// A network without endpoints yet. All NICs of all ranks are alike.
    ///
    /// # Errors
    /// `Config` if a setting makes no sense.
    pub fn new(ranks: usize, model: LinkModel, nics: usize) -> Result<GpuNetwork<D>> {
        if ranks == 0 || ranks > MAX_RANKS {
            return Err(Error::config("ranks", ranks, format!("give 1 to {MAX_RANKS}")));
        }
        if nics == 0 || nics > MAX_NICS {
            return Err(Error::config("nics", nics, format!("give a rank 1 to {MAX_NICS} NICs")));
        }
        model.check()?;
        log::info!(target: crate::base::targets::NETWORK, "emulated between GPUs of {ranks} ranks, {nics} NICs each");
        let seats = (0..ranks).map(|_| Seat::default()).collect();
        Ok(GpuNetwork { shared: Arc::new(Shared { number: number(), nics, model, start: Instant::now(), seats }) })
    }

    /// The endpoint of a rank that has none, or whose last was dropped. Its NIC kernel runs on `device`.
    ///
    /// # Errors
    /// `Argument` if the rank is outside the world or has one; `Device` where memory is lacking.
    pub fn endpoint(&self, rank: Rank, device: &D) -> Result<GpuNicEndpoint<D>> {
        let refuse = || {
            Error::argument(
                "rank",
                rank,
                format!("take one endpoint for each of the {} ranks", self.shared.seats.len()),
            )
        };
        let seat = self.shared.seats.get(rank.index()).ok_or_else(refuse)?;
        let engine = Arc::new(Mutex::new(device.engine()?));
        let key = number();
        let mut inner = seat.lock();
        if inner.key != 0 {
            return Err(refuse());
        }
        (inner.key, inner.device, inner.engine) = (key, Some(device.clone()), Some(engine.clone()));
        drop(inner);
        Ok(GpuNicEndpoint {
            network: self.clone(),
            rank,
            key,
            device: device.clone(),
            engine,
            regions: Regions::default(),
            lanes: BTreeMap::new(),
            flights: VecDeque::new(),
            free_ps: [0; MAX_NICS],
            arrived: BinaryHeap::new(),
        })
    }
}

impl<D: CopyDevice> Shared<D> {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn seat(&self, rank: Rank) -> Option<&Seat<D>> {
        self.seats.get(rank.index())
    }
}

/// A peer, as its address described it.
struct Lane {
    key: u64,
    /// Lengths of its regions; 0 of one that was taken back.
    regions: Vec<u64>,
}

/// A write whose completion was not handed out.
struct Flight {
    to: Rank,
    /// The peer's key when it was posted.
    key: u64,
    nic: usize,
    imm: ImmValue,
    token: u64,
    /// Where it comes from.
    region: RegionId,
    /// Of the peer: where it goes.
    target: RegionId,
    bytes: u64,
    /// The request that copies it; `None` if nothing does.
    request: Option<u64>,
    /// When the NIC has sent it, by the model.
    sent_ps: u64,
    /// It is in the peer's inbox, or will never be.
    delivered: bool,
    /// Why it did not arrive.
    missed: Option<Miss>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Miss {
    Failed(Reason),
    /// Its target was taken back.
    Dropped,
}

/// A rank's endpoint in an emulated network.
pub struct GpuNicEndpoint<D: CopyDevice> {
    network: GpuNetwork<D>,
    rank: Rank,
    key: u64,
    device: D,
    engine: Arc<Mutex<D::Engine>>,
    regions: Regions,
    lanes: BTreeMap<Rank, Lane>,
    /// Oldest first.
    flights: VecDeque<Flight>,
    /// When each NIC has sent all that was posted.
    free_ps: [u64; MAX_NICS],
    /// What was delivered and is not handed out.
    arrived: BinaryHeap<Mail>,
}

impl<D: CopyDevice> std::fmt::Debug for GpuNicEndpoint<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuNicEndpoint(rank {} of {:?})", self.rank, self.network)
    }
}

#[cold]
fn outside(name: &'static str, place: Place, bytes: u32, length: Option<u64>) -> Error {
    let value = format!("{bytes} bytes at {} of region {}", place.offset, place.region.0);
    let advice = match length {
        Some(length) => format!("that region has {length} bytes; stay inside it"),
        None => {
            "no such region is known, or no more; register it before the address is taken, and connect again".to_owned()
        }
    };
    Error::argument(name, value, advice)
}

impl<D: CopyDevice> GpuNicEndpoint<D> {
    /// Its rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    fn lane(&self, peer: Rank) -> Result<&Lane> {
        self.lanes.get(&peer).ok_or_else(|| Error::argument("peer", peer, "connect to it with its address first"))
    }

    /// The address of a write's source, if everything about the write is something that could be done.
    fn admit(&self, write: &WriteImm) -> Result<u64> {
        let nics = self.network.shared.nics;
        if usize::from(write.nic) >= nics {
            let advice = format!("there are {nics} NICs, counted from 0");
            return Err(Error::argument("nic", write.nic, advice));
        }
        let lane = self.lane(write.peer)?;
        let Some(source) = self.regions.locate(write.source, write.bytes) else {
            let length = self.regions.length(write.source.region);
            return Err(outside("source", write.source, write.bytes, length));
        };
        let length = lane.regions.get(usize::from(write.target.region.0)).copied();
        if length.is_none_or(|length| !fits(length, write.target.offset, write.bytes)) {
            return Err(outside("target", write.target, write.bytes, length.filter(|length| *length > 0)));
        }
        Ok(source)
    }

    /// Has the kernel copy a write, unless the peer is not there any more. `None`: the ring is full.
    fn copy(&self, write: &WriteImm, key: u64, source: u64) -> Result<Option<Start>> {
        let failed = |reason| Ok(Some(Start::Missed(Miss::Failed(reason))));
        let Some(seat) = self.network.shared.seat(write.peer) else { return failed(Reason::Unreachable) };
        let inner = seat.lock();
        if inner.key == 0 {
            return failed(Reason::Unreachable);
        }
        if inner.key != key || inner.peers.get(&self.rank) != Some(&self.key) {
            return failed(Reason::Unreachable);
        }
        let Some(target) = inner.regions.locate(write.target, write.bytes) else {
            return Ok(Some(Start::Missed(Miss::Dropped)));
        };
        // Under the peer's lock: its reset changes the key first (or taking a region back takes that away), and then it
        // waits for what is in this ring.
        let request = lock(&self.engine).post(source, target, u64::from(write.bytes))?;
        Ok(request.map(Start::Request))
    }

    /// Delivers what is copied.
    fn deliver(&mut self) -> Result<()> {
        let mut engine = lock(&self.engine);
        engine.keep_running()?;
        let completed = engine.completed();
        drop(engine);
        let shared = &self.network.shared;
        for flight in self.flights.iter_mut().filter(|flight| !flight.delivered) {
            if flight.request.is_some_and(|request| request >= completed) {
                // They are counted in order, in whichever they are carried out.
                break;
            }
            flight.delivered = true;
            let Some(seat) = shared.seat(flight.to) else { continue };
            let mut inner = seat.lock();
            if flight.missed.is_some() {
                continue;
            }
            if inner.key != flight.key || inner.peers.get(&self.rank) != Some(&self.key) {
                flight.missed = Some(Miss::Failed(Reason::Unreachable));
                continue;
            }
            if inner.regions.is_gone(flight.target) {
                flight.missed = Some(Miss::Dropped);
                continue;
            }
            let takes_ps = flight.bytes * shared.model.ps_per_byte();
            let due_ps = inner.take_in(flight.nic, flight.sent_ps, takes_ps);
            let due_ns = due_ps.div_ceil(1000) + shared.model.latency_ns();
            seat.deliver(&mut inner, Mail { due_ns, content: Content::Imm { imm: flight.imm, region: flight.target } });
        }
        Ok(())
    }

    /// Waits until nothing that was posted so far to an engine is still to be copied.
    fn drain(engine: &Mutex<D::Engine>) -> Result<()> {
        let until = lock(engine).posted();
        let drained = wait::poll("copies of the NIC kernel", DRAIN, || {
            let mut engine = lock(engine);
            match engine.keep_running() {
                Err(error) => Some(Err(error)),
                Ok(()) if engine.completed() >= until => Some(Ok(())),
                Ok(()) => None,
            }
        });
        drained.unwrap_or_else(|| Err(stuck("closing an endpoint")))
    }

    /// Takes this endpoint's key out of the network, puts `key` in its place, and waits until no copy that was posted
    /// before touches its memory: those of its own kernel and those of all others.
    fn part(&mut self, key: u64) -> Result<()> {
        let shared = self.network.shared.clone();
        if let Some(seat) = shared.seat(self.rank) {
            let mut inner = seat.lock();
            inner.key = key;
            inner.peers.clear();
            seat.purge(&mut inner);
        }
        self.key = key;
        self.lanes.clear();
        self.arrived.clear();
        for flight in self.flights.iter_mut().filter(|flight| !flight.delivered) {
            flight.delivered = true;
            flight.missed = flight.missed.or(Some(Miss::Failed(Reason::Flushed)));
        }
        self.drain_all()
    }

    /// Waits until no copy that was posted so far, by any endpoint, is still to be made.
    fn drain_all(&self) -> Result<()> {
        let engines: Vec<_> = self.network.shared.seats.iter().filter_map(|seat| seat.lock().engine.clone()).collect();
        engines.iter().try_for_each(|engine| Self::drain(engine))
    }
}

/// What becomes of a write that is accepted.
enum Start {
    /// The number of its request.
    Request(u64),
    Missed(Miss),
}

impl<D: CopyDevice> Transport for GpuNicEndpoint<D> {
    fn nics(&self) -> usize {
        self.network.shared.nics
    }

    fn limits(&self) -> Limits {
        Limits { posts: D::Engine::SLOTS as u32, ..Limits::NONE }
    }

    fn device_needs(&self) -> DeviceNeeds {
        match self.device.ordinal() {
            None => DeviceNeeds { host_memory: true, ..DeviceNeeds::default() },
            Some(_) => DeviceNeeds { blocks: self.device.engine_sms(), access: true, host_memory: false },
        }
    }

    unsafe fn register(&mut self, span: Span) -> Result<RegionId> {
        let region = match self.device.ordinal() {
            None => self.regions.register_host(span)?,
            Some(_) => self.regions.register(span)?,
        };
        if let Some(seat) = self.network.shared.seat(self.rank) {
            // The same table but for what is outstanding, so the same answer.
            seat.lock().regions.register(span)?;
        }
        Ok(region)
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        let released = self.regions.take_back(region)?;
        if released == Released::Busy {
            return Ok(released);
        }
        if let Some(seat) = self.network.shared.seat(self.rank) {
            let mut inner = seat.lock();
            let _ = inner.regions.take_back(region)?;
            inner.forget(region);
        }
        // What has landed there and is not due yet: its number may soon mean something else.
        self.arrived.retain(|mail| !mail.is_of(region));
        // What others had begun to copy before ends now.
        self.drain_all().map(|()| released)
    }

    fn address(&self) -> Vec<u8> {
        let shared = &self.network.shared;
        let regions = self.regions.lengths();
        Address { network: shared.number, key: self.key, rank: self.rank, nics: shared.nics as u32, regions }.encode()
    }

    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()> {
        let refuse = |why: &str| {
            Error::transport(
                format!("address of rank {peer} ({} bytes) {why}", address.len()),
                "exchange the addresses anew, with the same version of tokenyard on all ranks",
            )
        };
        let shared = &self.network.shared;
        let address = Address::decode(address).map_err(refuse)?;
        if address.network != shared.number || address.nics as usize != shared.nics {
            return Err(refuse("is of another network"));
        }
        let seat = shared.seat(peer).filter(|_| address.rank == peer).ok_or_else(|| refuse("is of another rank"))?;
        let device = {
            let inner = seat.lock();
            if inner.key != address.key || !inner.regions.have_told(&address.regions) {
                return Err(refuse("is of an endpoint that is gone or was reset"));
            }
            inner.device.clone()
        };
        if let Some(device) = device
            && !self.device.can_store_into(&device)?
        {
            return Err(Error::transport(
                format!("{:?} of rank {} cannot store into {device:?} of rank {peer}", self.device, self.rank),
                "the emulated NIC needs GPUs that reach each other; see nvidia-smi topo -m",
            ));
        }
        if let Some(own) = shared.seat(self.rank) {
            own.lock().peers.insert(peer, address.key);
        }
        self.lanes.insert(peer, Lane { key: address.key, regions: address.regions });
        Ok(())
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        let source = self.admit(write)?;
        let key = self.lane(write.peer)?.key;
        if self.flights.len() as u64 >= D::Engine::SLOTS {
            return Ok(Posted::Full);
        }
        let now_ps = self.network.shared.now_ns() * 1000;
        let Some(start) = self.copy(write, key, source)? else { return Ok(Posted::Full) };
        let (request, missed) = match start {
            Start::Request(number) => (Some(number), None),
            Start::Missed(why) => (None, Some(why)),
        };
        let (model, nic) = (&self.network.shared.model, usize::from(write.nic));
        let bytes = u64::from(write.bytes);
        let sent_ps = now_ps.max(self.free_ps[nic]) + model.per_message_ps() + bytes * model.ps_per_byte();
        if missed.is_none() {
            self.free_ps[nic] = sent_ps;
        }
        let (to, imm, token, region, target) =
            (write.peer, write.imm, write.token, write.source.region, write.target.region);
        self.regions.posted(region);
        let delivered = false;
        self.flights.push_back(Flight {
            to,
            key,
            nic,
            imm,
            token,
            region,
            target,
            bytes,
            request,
            sent_ps,
            delivered,
            missed,
        });
        Ok(Posted::Accepted)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        let key = self.lane(peer)?.key;
        if message.len() > MAX_MESSAGE {
            let advice = format!("send at most {MAX_MESSAGE} bytes at once");
            return Err(Error::argument("message", format!("{} bytes", message.len()), advice));
        }
        let shared = &self.network.shared;
        let Some(seat) = shared.seat(peer) else { return Ok(Posted::Accepted) };
        let mut inner = seat.lock();
        if inner.key != key || inner.peers.get(&self.rank) != Some(&self.key) {
            // Lost because its peer is.
            return Ok(Posted::Accepted);
        }
        if seat.messages.load(Ordering::Relaxed) >= MESSAGES {
            return Ok(Posted::Full);
        }
        seat.messages.fetch_add(1, Ordering::Relaxed);
        let due_ns = shared.now_ns() + shared.model.per_message_ps() / 1000 + shared.model.latency_ns();
        let content = Content::Message { peer: self.rank, bytes: message.into() };
        seat.deliver(&mut inner, Mail { due_ns, content });
        Ok(Posted::Accepted)
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        if !self.flights.is_empty() {
            self.deliver()?;
        }
        let shared = self.network.shared.clone();
        let Some(seat) = shared.seat(self.rank) else { return Ok(0) };
        seat.collect(&mut self.arrived);
        let now_ns = shared.now_ns();
        let mut events = 0;
        let over = |flight: &Flight| flight.delivered && (flight.missed.is_some() || flight.sent_ps <= now_ns * 1000);
        while let Some(at) = self.flights.iter().position(over).filter(|_| events < BATCH) {
            let Some(Flight { token, to: peer, region, missed, .. }) = self.flights.remove(at) else { break };
            self.regions.completed(region);
            on_event(match missed {
                Some(Miss::Failed(reason)) => Event::Failed { token, peer, failure: reason.into() },
                Some(Miss::Dropped) => Event::Dropped { token, peer },
                None => Event::Sent { token },
            });
            events += 1;
        }
        while events < BATCH && self.arrived.peek().is_some_and(|mail| mail.due_ns <= now_ns) {
            match self.arrived.pop().map(|mail| mail.content) {
                Some(Content::Imm { imm, .. }) => on_event(Event::Imm { imm }),
                Some(Content::Message { peer, bytes }) => {
                    seat.messages.fetch_sub(1, Ordering::Relaxed);
                    on_event(Event::Message { peer, bytes: &bytes });
                }
                None => break,
            }
            events += 1;
        }
        Ok(events)
    }

    fn reset(&mut self) -> Result<()> {
        self.part(number())
    }
}

impl<D: CopyDevice> Drop for GpuNicEndpoint<D> {
    fn drop(&mut self) {
        // What does not end has nobody to tell; its memory is in use as long as its GPU hangs.
        let _ = self.part(0);
        if let Some(seat) = self.network.shared.seat(self.rank) {
            let mut inner = seat.lock();
            (inner.device, inner.regions) = (None, Regions::default());
            drop(inner.engine.take());
        }
    }
}

/// What a wait for copies that do not end says.
fn stuck(what: &str) -> Error {
    Error::transport(
        format!("{what}: the NIC kernel does not end its copies"),
        "see whether its GPU works, and whether other kernels leave it its blocks",
    )
}
