//! An emulated network between GPUs of one process, for timed runs of several nodes on one host.
//!
//! Place in the data path: where libfabric or verbs would be, under the proxies. Each rank's endpoint has a NIC kernel
//! on the rank's own device (`base::copies`: kernels/nic, on its own stream), which copies payload from the rank's
//! memory into the peer's, over NVLink where there are GPUs. Calls of an endpoint come from one thread, its proxy's;
//! endpoints share `EndpointState`s, whose locks are held for a few instructions. `post`, `send` and `poll` never
//! wait; `reset`, `deregister`, and dropping an endpoint, wait until copies that still touch its memory have ended.
//!
//! It differs from a NIC in three respects, which matter for its figures:
//!
//! - **Blocks.** The kernel takes [`DeviceNeeds::blocks`](crate::transport::network::DeviceNeeds) multiprocessors,
//!   which contexts leave to it by default. A NIC takes none.
//! - **Time.** The kernel copies as fast as it can, and the host decides when a write is over. `poll` hands out a
//!   completion no earlier than the copy's end and the model's end, which is max(post, NIC free) + per_message + bytes
//!   / rate. It hands out the immediate a latency later, and no earlier than the receiving NIC has taken in earlier
//!   writes at the same rate. That is as good as slow copies, because nobody reads bytes before their immediate:
//!   kernels wait for the flag that the proxy stores then, and for the flag of the completion before they pack again.
//!   The GPUs' memory is busy a little earlier, and for a shorter time. A link faster than the kernel is as fast as
//!   the kernel.
//! - **Overhead.** The ring crosses PCIe twice, and two threads hand the immediate over: `overhead` measures that,
//!   from the post of a small write to its immediate over a link without a model. Where it exceeds the model's own
//!   latency, times are too long by the difference.
//!
//! GPUs are given access to all arenas of the process, for the NIC kernels alone: contexts do not get the addresses
//! of other nodes' arenas (`PeerMap::base_of` stays 0 for them). A launch of the kernel ends by itself when nothing was
//! posted for 20 ms, and the next post launches it again. So a wait for the GPU to become idle takes no longer; the
//! last launch ends with the endpoint. Ranks that share a GPU need a hardware queue for each of their streams, or
//! kernels wait for kernels that wait for them: set CUDA_DEVICE_MAX_CONNECTIONS=32 there.
//!
//! ```text
//!  post ─▶ engine: ring ─▶ NIC kernel ─▶ bytes in the peer's memory
//!            │ completed                              peer
//!  poll ◀────┘  copied? ─▶ EndpointState of the peer: queue of undelivered events ─▶ poll: due? ─▶ Imm
//!    └─▶ the model's end passed? ─▶ Sent
//! ```

mod endpoint_state;
mod overhead;

use crate::base::copies::{CopyDevice, CopyEngine};
use crate::base::{Error, Rank, Result, wait};
use crate::transport::network::address::{Address, number};
use crate::transport::network::imm::{ImmValue, MAX_NICS, MAX_RANKS};
use crate::transport::network::regions::{Regions, fits};
use crate::transport::network::sim::LinkModel;
use crate::transport::network::{
    DeviceNeeds, Event, Limits, MAX_MESSAGE, Place, Posted, Reason, RegionId, Released, Span, Transport, WriteImm,
};
use endpoint_state::{Content, EndpointState, Mail, lock};
pub use overhead::overhead;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Control messages to one endpoint that may be under way.
const MESSAGES: usize = 1024;
/// Most events of one poll.
const BATCH: usize = 64;
/// How long a reset waits for copies to end.
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
    endpoints: Vec<EndpointState<D>>,
}

impl<D: CopyDevice> std::fmt::Debug for GpuNetwork<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "GpuNetwork({} ranks, {} NICs of {:?})",
            self.shared.endpoints.len(),
            self.shared.nics,
            self.shared.model
        )
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
        let endpoints = (0..ranks).map(|_| EndpointState::default()).collect();
        Ok(GpuNetwork { shared: Arc::new(Shared { number: number(), nics, model, start: Instant::now(), endpoints }) })
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
                format!("take one endpoint for each of the {} ranks", self.shared.endpoints.len()),
            )
        };
        let endpoint = self.shared.endpoints.get(rank.index()).ok_or_else(refuse)?;
        let engine = Arc::new(Mutex::new(device.engine()?));
        let key = number();
        let mut inner = endpoint.lock();
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
            channels: BTreeMap::new(),
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

    fn endpoint(&self, rank: Rank) -> Option<&EndpointState<D>> {
        self.endpoints.get(rank.index())
    }
}

/// A peer, as its address described it.
struct Channel {
    key: u64,
    /// Lengths of its regions; 0 for a region that was taken back.
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
    /// The source region.
    region: RegionId,
    /// The target region, of the peer.
    target: RegionId,
    bytes: u64,
    /// The request that copies it; `None` if there is none.
    request: Option<u64>,
    /// When the NIC has sent it, by the model.
    sent_ps: u64,
    /// It is in the peer's queue of undelivered events, or will never be.
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
    channels: BTreeMap<Rank, Channel>,
    /// Oldest first.
    flights: VecDeque<Flight>,
    /// By NIC: when it has sent all posted writes.
    free_ps: [u64; MAX_NICS],
    /// Delivered events that are not handed out.
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

    fn channel(&self, peer: Rank) -> Result<&Channel> {
        self.channels.get(&peer).ok_or_else(|| Error::argument("peer", peer, "connect to it with its address first"))
    }

    /// The address of a write's source, if the write is valid.
    fn admit(&self, write: &WriteImm) -> Result<u64> {
        let nics = self.network.shared.nics;
        if usize::from(write.nic) >= nics {
            let advice = format!("there are {nics} NICs, counted from 0");
            return Err(Error::argument("nic", write.nic, advice));
        }
        let channel = self.channel(write.peer)?;
        let Some(source) = self.regions.locate(write.source, write.bytes) else {
            let length = self.regions.length(write.source.region);
            return Err(outside("source", write.source, write.bytes, length));
        };
        let length = channel.regions.get(usize::from(write.target.region.0)).copied();
        if length.is_none_or(|length| !fits(length, write.target.offset, write.bytes)) {
            return Err(outside("target", write.target, write.bytes, length.filter(|length| *length > 0)));
        }
        Ok(source)
    }

    /// Has the kernel copy a write, unless the peer is gone. `None`: the ring is full.
    fn copy(&self, write: &WriteImm, key: u64, source: u64) -> Result<Option<Start>> {
        let failed = |reason| Ok(Some(Start::Missed(Miss::Failed(reason))));
        let Some(endpoint) = self.network.shared.endpoint(write.peer) else { return failed(Reason::Unreachable) };
        let inner = endpoint.lock();
        if inner.key == 0 {
            return failed(Reason::Unreachable);
        }
        if inner.key != key || inner.peers.get(&self.rank) != Some(&self.key) {
            return failed(Reason::Unreachable);
        }
        let Some(target) = inner.regions.locate(write.target, write.bytes) else {
            return Ok(Some(Start::Missed(Miss::Dropped)));
        };
        // Under the peer's lock: the peer's reset changes the key first (or its deregistration removes the region), and
        // then waits for the copies in this ring.
        let request = lock(&self.engine).post(source, target, u64::from(write.bytes))?;
        Ok(request.map(Start::Request))
    }

    /// Delivers the writes that are copied.
    fn deliver(&mut self) -> Result<()> {
        let mut engine = lock(&self.engine);
        engine.keep_running()?;
        let completed = engine.completed();
        drop(engine);
        let shared = &self.network.shared;
        for flight in self.flights.iter_mut().filter(|flight| !flight.delivered) {
            if flight.request.is_some_and(|request| request >= completed) {
                // Requests are counted in order of posting, whatever the order of their copies.
                break;
            }
            flight.delivered = true;
            let Some(endpoint) = shared.endpoint(flight.to) else { continue };
            let mut inner = endpoint.lock();
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
            endpoint
                .deliver(&mut inner, Mail { due_ns, content: Content::Imm { imm: flight.imm, region: flight.target } });
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

    /// Replaces this endpoint's key in the network by `key`, and waits until no earlier copy touches its memory,
    /// neither of its own kernel nor of any other.
    fn part(&mut self, key: u64) -> Result<()> {
        let shared = self.network.shared.clone();
        if let Some(endpoint) = shared.endpoint(self.rank) {
            let mut inner = endpoint.lock();
            inner.key = key;
            inner.peers.clear();
            endpoint.purge(&mut inner);
        }
        self.key = key;
        self.channels.clear();
        self.arrived.clear();
        for flight in self.flights.iter_mut().filter(|flight| !flight.delivered) {
            flight.delivered = true;
            flight.missed = flight.missed.or(Some(Miss::Failed(Reason::Flushed)));
        }
        self.drain_all()
    }

    /// Waits until no copy that was posted so far, by any endpoint, is still to be made.
    fn drain_all(&self) -> Result<()> {
        let engines: Vec<_> =
            self.network.shared.endpoints.iter().filter_map(|endpoint| endpoint.lock().engine.clone()).collect();
        engines.iter().try_for_each(|engine| Self::drain(engine))
    }
}

/// The start of an accepted write.
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
        if let Some(endpoint) = self.network.shared.endpoint(self.rank) {
            // Both tables differ only in outstanding writes, so the answer is the same.
            endpoint.lock().regions.register(span)?;
        }
        Ok(region)
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        let released = self.regions.take_back(region)?;
        if let Some(endpoint) = self.network.shared.endpoint(self.rank) {
            let mut inner = endpoint.lock();
            if released == Released::Busy {
                return inner.regions.give_up(region).map(|_| released);
            }
            let _ = inner.regions.take_back(region)?;
            inner.forget(region);
        }
        // Writes that have been placed there and are not due yet: their region is gone.
        self.arrived.retain(|mail| !mail.is_of(region));
        // Waits for copies that others had begun before.
        self.drain_all().map(|()| released)
    }

    fn address(&mut self, _peer: Rank) -> Result<Vec<u8>> {
        let (shared, regions) = (&self.network.shared, self.regions.lengths());
        let (network, nics) = (shared.number, shared.nics as u32);
        Ok(Address { network, key: self.key, rank: self.rank, nics, regions }.encode())
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
        let endpoint =
            shared.endpoint(peer).filter(|_| address.rank == peer).ok_or_else(|| refuse("is of another rank"))?;
        let device = {
            let inner = endpoint.lock();
            if inner.key != address.key || !inner.regions.have_reported(&address.regions) {
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
        if let Some(own) = shared.endpoint(self.rank) {
            own.lock().peers.insert(peer, address.key);
        }
        self.channels.insert(peer, Channel { key: address.key, regions: address.regions });
        Ok(())
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        let source = self.admit(write)?;
        let key = self.channel(write.peer)?.key;
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
        let key = self.channel(peer)?.key;
        if message.len() > MAX_MESSAGE {
            let advice = format!("send at most {MAX_MESSAGE} bytes at once");
            return Err(Error::argument("message", format!("{} bytes", message.len()), advice));
        }
        let shared = &self.network.shared;
        let Some(endpoint) = shared.endpoint(peer) else { return Ok(Posted::Accepted) };
        let mut inner = endpoint.lock();
        if inner.key != key || inner.peers.get(&self.rank) != Some(&self.key) {
            // Lost because its peer is.
            return Ok(Posted::Accepted);
        }
        if endpoint.messages.load(Ordering::Relaxed) >= MESSAGES {
            return Ok(Posted::Full);
        }
        endpoint.messages.fetch_add(1, Ordering::Relaxed);
        let due_ns = shared.now_ns() + shared.model.per_message_ps() / 1000 + shared.model.latency_ns();
        let content = Content::Message { peer: self.rank, bytes: message.into() };
        endpoint.deliver(&mut inner, Mail { due_ns, content });
        Ok(Posted::Accepted)
    }

    /// The NIC kernel polls the ring itself.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        if !self.flights.is_empty() {
            self.deliver()?;
        }
        let shared = self.network.shared.clone();
        let Some(endpoint) = shared.endpoint(self.rank) else { return Ok(0) };
        endpoint.collect(&mut self.arrived);
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
                    endpoint.messages.fetch_sub(1, Ordering::Relaxed);
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
        // A failure here cannot be reported; the memory stays in use as long as its GPU hangs.
        let _ = self.part(0);
        if let Some(endpoint) = self.network.shared.endpoint(self.rank) {
            let mut inner = endpoint.lock();
            (inner.device, inner.regions) = (None, Regions::default());
            drop(inner.engine.take());
        }
    }
}

/// The error for copies that do not end.
fn stuck(what: &str) -> Error {
    Error::transport(
        format!("{what}: the NIC kernel does not end its copies"),
        "see whether its GPU works, and whether other kernels leave it its blocks",
    )
}
