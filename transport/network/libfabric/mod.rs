//! The network over libfabric's reliable datagram endpoints, by the providers `tcp`, `shm`, `efa` and
//! `verbs;ofi_rxm`.
//!
//! Place in the data path: under the proxies. Runs on the caller's thread, which alone makes progress; it starts none.
//! Calls of EFA and verbs do not enter the kernel, but for connections; those of tcp and shm do.
//!
//! ```text
//!  post ─▶ waiting, by peer and NIC ── flush, poll ─▶ fi_writemsg ══▶ the peer's memory, its completion queue
//!            └ credits: of the peer, of the NIC               completion ─▶ poll
//! ```
//!
//! - **Exactly once.** The provider tcp completes a write when the kernel has it, so that a reset would lose writes
//!   that were `Sent`: every write asks for FI_DELIVERY_COMPLETE. Over shm a completed write is in the peer's queue.
//! - **Full.** tcp never says so: writes wait for credits of this endpoint's own.
//! - **Empty writes** go as 8 bytes into a line of the peer's endpoint: libfabric 1.17's shm loses empty ones that ask
//!   for delivery, and other providers have no path for them.
//! - **One doorbell.** `flush` and `poll` hand all waiting writes of a NIC over as one batch (FI_MORE), where the
//!   provider has doorbells.
//! - **Completion queues** of EFA lose what does not fit: they hold all operations and the immediates that
//!   [`Limits::receives`] allows. An error that may be that of an arrived write closes the endpoint there, since an
//!   immediate may be lost.
//! - **Regions** are taken back by asking the peers (`revoke.rs`). A peer that does not answer in time is cut off: over
//!   tcp and verbs a late write of it breaks its connection, and with it its other writes.
//! - **An endpoint that was silent** for half of that time may have missed a notice. It asks each peer, and hands the
//!   writes that wait for that peer to the provider once the peer has answered, and all notices before that have come.
//! - **Addresses** are the same for all peers. Messages carry the random keys of both endpoints.

mod address;
mod bare;
mod config;
mod contexts;
mod info;
mod lane;
#[doc(hidden)]
pub mod libfabric_sys;
mod memory;
mod object;
mod peer;
mod provider;
mod reasons;

#[doc(hidden)]
pub use bare::Bare;
pub use config::LibfabricConfig;

use self::address::{Address, Port};
use self::contexts::Operation;
use self::info::Facts;
use self::lane::{BATCH, Destination, Done, Lane};
use self::libfabric_sys::{FI_EAGAIN, Library, Version};
use self::peer::{Notices, Path, Peer};
use self::provider::Provider;
use super::clock::coarse_now_ns;
use super::flight::{Flight, Outcome, Pending};
use super::imm::{ImmValue, MAX_NICS, MAX_RANKS};
use super::keys::random;
use super::message::{self, Content, PITCH, Parties};
use super::reach::{Gpu, Reach};
use super::regions::Regions;
use super::registration::{self, Nic};
use super::remote::admit;
use super::revoke::{Notice, Revocations};
use super::slab::Slab;
use super::slots::Slots;
use super::{
    DeviceNeeds, Event, Failure, Limits, MAX_ADDRESS, MAX_MESSAGE, Posted, Reason, RegionId, Released, Span, Transport,
    WriteImm,
};
use crate::base::{Error, Rank, Result};
use std::collections::{BTreeMap, VecDeque};

/// Messages of an endpoint that may be under way, to one peer and to all.
const PEER_MESSAGES: usize = 16;
const MESSAGES: u32 = 1024;
/// Receives of messages that are posted; further messages wait at the provider.
const RECEIVES: u32 = 256;
/// How often a message is sent again that the provider could not deliver: connections break and come back.
const TRIES: u32 = 3;
/// How many times `let_go` an answer is waited for.
const DOUBT: u64 = 4;
/// Reads of a completion queue in a poll, as long as they find no event.
const READS: usize = 64;
/// Most regions over an endpoint's life.
const REGIONS: usize = 4096;
/// Polls between two looks at the event queues.
const EVENTS_EVERY: u32 = 256;
/// Bytes of the longest write, as limits are of 32 bits and NICs take about as many.
const LONGEST: usize = 1 << 30;

/// A rank's endpoint over libfabric. See the module for what it does and how.
#[derive(Debug)]
pub struct LibfabricEndpoint {
    rank: Rank,
    config: LibfabricConfig,
    provider: Provider,
    limits: Limits,
    /// Drawn at random, at each reset too.
    key: u64,
    regions: Regions,
    revocations: Revocations,
    peers: BTreeMap<Rank, Peer>,
    /// Numbers the channels.
    channels: u64,
    /// Peers and NICs with writes that the provider has not taken.
    waiting: Vec<(Rank, usize)>,
    /// Peers with messages that the provider has not taken.
    mute: Vec<Rank>,
    /// Receives that the provider has not taken.
    unposted: Vec<u32>,
    /// Notices that are not on their way; those to a peer are in order.
    notices: VecDeque<(Rank, Notice)>,
    /// Peers that have asked, and the numbers of their questions.
    asked: Vec<(Rank, u16)>,
    /// When this endpoint last polled.
    polled_ns: u64,
    /// Counts polls.
    polls: u32,
    /// What a read of a completion queue gave.
    found: Box<[Done; BATCH]>,
    sends: Slots<Send>,
    /// Completions that the provider does not hand out.
    pending: VecDeque<Pending>,
    /// Before the slab, which their providers use.
    lanes: Vec<Lane>,
    slab: Slab,
    /// The GPU whose memory it registers; its memory outlives the lanes' registrations.
    gpu: Option<Gpu>,
    reach: Vec<Reach>,
}

/// A message under way.
#[derive(Debug, Clone, Copy)]
struct Send {
    peer: Rank,
    channel: u64,
    bytes: usize,
    /// Of the messages to that peer.
    number: u64,
    /// How often it has failed.
    failed: u32,
}

impl LibfabricEndpoint {
    /// An endpoint with nothing registered and nobody connected.
    ///
    /// # Errors
    /// `Config` if a setting makes no sense, or the provider is shm of a version that is refused; `Transport` if the
    /// library or the provider is not there, or opens nothing.
    pub fn open(rank: Rank, config: LibfabricConfig) -> Result<LibfabricEndpoint> {
        config.check()?;
        let gpu = config.gpu.map(Gpu::open).transpose()?;
        LibfabricEndpoint::open_for(rank, config, gpu)
    }

    /// As `open`, for the GPU that is given.
    ///
    /// # Errors
    /// As `open`.
    #[doc(hidden)]
    pub fn open_for(rank: Rank, config: LibfabricConfig, gpu: Option<Gpu>) -> Result<LibfabricEndpoint> {
        let provider = config.check()?;
        if rank.index() >= MAX_RANKS {
            return Err(Error::config("rank", rank, format!("an immediate can name {MAX_RANKS}; use fewer ranks")));
        }
        let library = config.library.as_deref().map_or_else(Library::open, Library::at)?;
        if provider == Provider::Shm && library.version() < Version::new(2, 1) && !config.allow_old_shm {
            let advice = "a peer that is killed may leave others in a lock for ever: use libfabric 2.1 or later, or \
                          tcp; where no rank is killed the program's --allow-old-shm allows it";
            return Err(Error::config("provider", format!("shm of libfabric {}", library.version()), advice));
        }
        let slab = Slab::new(MESSAGES, RECEIVES, object::all_closed)?;
        let open = |gpu: Option<&Gpu>| {
            let lanes = (0..config.nics).map(|nic| Lane::open(library, &config, provider, &slab, (nic, gpu)));
            lanes.collect::<Result<Vec<Lane>>>()
        };
        let mut lanes = open(gpu.as_ref())?;
        let reach = lanes.iter().filter_map(|lane| lane.reached.as_ref()).map(|reached| reached.reach.clone());
        let reach: Vec<Reach> = reach.collect();
        let gpu = gpu.filter(|_| reach.iter().all(|reach| reach.way.is_some()));
        if gpu.is_none() && !reach.is_empty() {
            // What a provider offers for GPUs may be less for the host.
            drop(lanes);
            lanes = open(None)?;
        }
        if let Some(Lane { facts, .. }) = lanes.first() {
            log::info!(
                target: crate::base::targets::NETWORK,
                "rank {rank}: libfabric {} at {}, provider {}, {} NICs, {} operations each",
                library.version(), library.path().display(), facts.kind(), lanes.len(), facts.queue
            );
        }
        let mut endpoint = LibfabricEndpoint {
            rank,
            key: random()?,
            provider,
            limits: limits(&lanes, &config),
            regions: Regions::default(),
            revocations: Revocations::default(),
            peers: BTreeMap::new(),
            channels: 0,
            waiting: Vec::new(),
            mute: Vec::new(),
            unposted: (0..RECEIVES).collect(),
            notices: VecDeque::new(),
            asked: Vec::new(),
            polled_ns: coarse_now_ns(),
            polls: 0,
            found: Box::new([Done::NONE; BATCH]),
            sends: Slots::new(lanes.first().map_or(0, |lane| lane.messages)),
            pending: VecDeque::new(),
            lanes,
            slab,
            gpu,
            reach,
            config,
        };
        for reach in endpoint.reach() {
            let level = if reach.way.is_some() { log::Level::Info } else { log::Level::Warn };
            log::log!(target: crate::base::targets::NETWORK, level, "rank {rank}: {reach}");
        }
        endpoint.post_receives()?;
        Ok(endpoint)
    }

    /// How each NIC of these settings reaches memory of their GPU; none without a GPU. An endpoint is opened, and
    /// closed again.
    ///
    /// # Errors
    /// As `open`.
    pub fn reach_of(config: &LibfabricConfig) -> Result<Vec<Reach>> {
        let endpoint = LibfabricEndpoint::open(Rank(0), config.clone())?;
        Ok(endpoint.reach().cloned().collect())
    }

    /// How each NIC reaches memory of the GPU that the endpoint was opened for; none without a GPU.
    pub fn reach(&self) -> impl Iterator<Item = &Reach> {
        self.reach.iter()
    }

    /// Its rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    fn peer(&self, rank: Rank) -> Result<&Peer> {
        self.peers.get(&rank).ok_or_else(|| Error::argument("peer", rank, "connect to it with its address first"))
    }

    // ---- posting

    /// The address of a write's source, if the write is valid.
    fn admit(&self, write: &WriteImm) -> Result<u64> {
        admit(write, (self.lanes.len(), self.limits.write_bytes), &self.regions, || Ok(&self.peer(write.peer)?.regions))
    }

    /// Completes waiting writes to regions that their peers have taken back as dropped, and those from regions that
    /// this side has lost as failed; answers how many writes of each NIC are left to hand over.
    fn drop_revoked(&mut self) -> [u32; MAX_NICS] {
        let mut left = [0; MAX_NICS];
        let LibfabricEndpoint { peers, lanes, pending, waiting, revocations, .. } = self;
        for (rank, nic) in waiting.iter() {
            let (Some(peer), Some(lane)) = (peers.get_mut(rank), lanes.get_mut(*nic)) else { continue };
            let (true, Some(path)) = (peer.notices == Notices::Known, peer.paths.get_mut(*nic)) else { continue };
            path.unsent.retain(|number| {
                let Some(Flight { write, .. }) = lane.writes.get(*number) else { return false };
                let outcome = if revocations.is_revoked(*rank, write.target.region) {
                    Outcome::Dropped
                } else if write.bytes > 0 && !lane.has(write.source.region) {
                    Outcome::Failed(Reason::Local.into())
                } else {
                    return true;
                };
                let flight = lane.writes.end(*number);
                pending.extend(flight.map(|flight| Pending { nic: *nic, flight, outcome }));
                false
            });
            if let Some(left) = left.get_mut(*nic) {
                *left += path.unsent.len() as u32;
            }
        }
        left
    }

    /// Hands over all that waits, as far as the provider takes it.
    fn hand_over(&mut self, now_ns: u64) {
        self.ask(now_ns);
        self.submit();
        self.submit_messages();
    }

    /// Gives the provider what it takes of the writes that wait for it.
    fn submit(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let mut left = self.drop_revoked();
        let LibfabricEndpoint { peers, lanes, pending, waiting, slab, provider, .. } = self;
        waiting.retain(|(rank, nic)| {
            let (Some(peer), Some(lane)) = (peers.get_mut(rank), lanes.get_mut(*nic)) else { return false };
            if peer.notices != Notices::Known {
                return true;
            }
            let Peer { paths, regions, .. } = peer;
            let nics = paths.len();
            let (Some(path), Some(left)) = (paths.get_mut(*nic), left.get_mut(*nic)) else { return false };
            while let Some(number) = path.unsent.front().copied() {
                let Some(flight) = lane.writes.get(number) else {
                    path.unsent.pop_front();
                    continue;
                };
                let target = regions.place(flight.write.target.region, *nic, nics).unwrap_or(path.scratch);
                let to = Destination { address: path.address, target, scratch: path.scratch };
                let code = lane.write(number, flight, &to, slab, *left > 1);
                if code == -FI_EAGAIN {
                    *left = left.saturating_sub(path.unsent.len() as u32);
                    return true;
                }
                *left = left.saturating_sub(1);
                path.unsent.pop_front();
                if code == 0 {
                    continue;
                }
                if let Some(flight) = lane.writes.end(number) {
                    pending.push_back(Pending { nic: *nic, flight, outcome: Outcome::Failed(provider.refusal(code)) });
                }
            }
            false
        });
    }

    /// Gives the provider what it takes of the messages that wait for it. A message that it refuses several times is
    /// lost, as its peer is.
    fn submit_messages(&mut self) {
        let LibfabricEndpoint { peers, lanes, mute, sends, slab, .. } = self;
        let Some(lane) = lanes.first() else { return };
        mute.retain(|rank| {
            let Some(peer) = peers.get_mut(rank) else { return false };
            let Some(address) = peer.paths.first().map(|path| path.address) else { return false };
            while let Some(number) = peer.unsent.front().copied() {
                let bytes = sends.get(number).map_or(0, |send| send.bytes);
                let code = lane.send(number, address, slab, bytes);
                if code == -FI_EAGAIN {
                    return true;
                }
                if code != 0 && sends.get(number).is_some_and(|send| send.failed < TRIES) {
                    sends.change(number, |send| send.failed += 1);
                    return true;
                }
                peer.unsent.pop_front();
                if code != 0
                    && let Some(send) = sends.end(number)
                {
                    peer.ended(send.number);
                }
            }
            false
        });
    }

    /// Takes a message for a peer; false if there is no room.
    fn enqueue(&mut self, rank: Rank, content: Content<'_>) -> bool {
        let LibfabricEndpoint { peers, sends, mute, slab, .. } = self;
        let most = sends.share(peers.len(), PEER_MESSAGES);
        let Some(peer) = peers.get_mut(&rank) else { return true };
        let Some(count) = peer.number(most) else { return false };
        let send = Send { peer: rank, channel: peer.channel, bytes: 0, number: count, failed: 0 };
        let Some(number) = sends.take(send) else {
            peer.ended(count);
            return false;
        };
        let mut place = [0; PITCH];
        let parties = Parties { rank: self.rank, from: self.key, to: peer.key, number: count };
        let bytes = message::encode(&mut place, parties, content);
        slab.store(number, &place);
        sends.change(number, |send| send.bytes = bytes);
        if peer.unsent.is_empty() {
            mute.push(rank);
        }
        peer.unsent.push_back(number);
        true
    }

    /// Lets go of revoked regions to which no write is outstanding, and sends this endpoint's notices.
    fn send_notices(&mut self) {
        if self.revocations.owes() {
            let (lanes, pending) = (&self.lanes, &self.pending);
            let leads =
                |flight: &Flight, peer, region| flight.write.peer == peer && flight.write.target.region == region;
            self.revocations.settle(|peer, region| {
                lanes.iter().any(|lane| lane.writes.flying().any(|(_, flight)| leads(flight, peer, region)))
                    || pending.iter().any(|pending| leads(&pending.flight, peer, region))
            });
        }
        while let Some((rank, notice)) = self.revocations.next_notice() {
            if let (Notice::Revoke(_), Some(peer)) = (notice, self.peers.get_mut(&rank)) {
                peer.taken_back = peer.taken_back.wrapping_add(1);
            }
            self.notices.push_back((rank, notice));
        }
        // A peer that takes no messages holds nobody else up.
        for _ in 0..self.notices.len() {
            let Some((peer, notice)) = self.notices.pop_front() else { break };
            if !self.enqueue(peer, Content::Notice(notice)) {
                self.notices.push_back((peer, notice));
            }
        }
        let mut at = 0;
        while let Some((rank, question)) = self.asked.get(at).copied() {
            let taken_back = self.peers.get(&rank).map_or(0, |peer| peer.taken_back);
            if self.enqueue(rank, Content::Answer(question, taken_back)) {
                self.asked.swap_remove(at);
            } else {
                at += 1;
            }
        }
    }

    fn let_go_ns(&self) -> u64 {
        u64::try_from(self.config.let_go.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Doubts what is known of the peers' notices, if this endpoint was silent for so long that it may have missed
    /// some.
    fn doubt(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.polled_ns) <= self.let_go_ns() / 2 {
            return;
        }
        self.peers.values_mut().for_each(|peer| peer.doubt(now_ns));
    }

    /// Asks the peers for which writes wait and whose notices are in doubt. A peer that does not answer is not waited
    /// for longer than several times what it would have had to let go.
    fn ask(&mut self, now_ns: u64) {
        let let_go_ns = self.let_go_ns();
        for at in 0..self.waiting.len() {
            let Some((rank, _)) = self.waiting.get(at).copied() else { break };
            let Some(peer) = self.peers.get_mut(&rank).filter(|peer| peer.notices != Notices::Known) else { continue };
            if now_ns.saturating_sub(peer.doubted_ns) > let_go_ns.saturating_mul(DOUBT) {
                peer.give_up();
                continue;
            }
            let old = now_ns.saturating_sub(peer.asked_ns) > let_go_ns / 2;
            if peer.notices == Notices::Missed || old {
                let question = peer.question.wrapping_add(1);
                (peer.question, peer.asked_ns) = (question, now_ns);
                let asked = self.enqueue(rank, Content::Ask(question));
                if let Some(peer) = self.peers.get_mut(&rank) {
                    peer.notices = if asked { Notices::Asked } else { Notices::Missed };
                }
            }
        }
    }

    /// Gives the provider the receives that it has not taken.
    fn post_receives(&mut self) -> Result<()> {
        let Some(lane) = self.lanes.first() else { return Ok(()) };
        while let Some(number) = self.unposted.last() {
            match lane.receive(*number, &self.slab) {
                0 => _ = self.unposted.pop(),
                code if code == -FI_EAGAIN => break,
                code => {
                    let why = lane.explain(self.provider.refusal(code).code);
                    let what = format!("libfabric takes no receive: {why}");
                    return Err(Error::transport(what, "open another endpoint").ending());
                }
            }
        }
        Ok(())
    }

    // ---- completions

    /// Refuses to go on after an error that may be that of an immediate.
    ///
    /// # Errors
    /// `Transport`, which closes the endpoint.
    fn judge(&self, nic: usize, done: Done) -> Result<()> {
        let (Done::Stray(failure, true), Some(lane)) = (done, self.lanes.get(nic)) else { return Ok(()) };
        let what = format!(
            "rank {}: NIC {} reports an error of no write, perhaps of a write that arrived: {failure} ({})",
            self.rank,
            lane.facts.domain,
            lane.explain(failure.code)
        );
        Err(Error::transport(what, "reset the endpoint, and connect to its peers anew").ending())
    }

    /// Hands the completion of a write out, and frees what it held.
    fn hand_out(&mut self, pending: Pending, on_event: &mut dyn FnMut(Event<'_>)) {
        let Pending { nic, flight: Flight { write, channel, .. }, .. } = &pending;
        self.regions.completed(write.source.region);
        let peer = self.peers.get_mut(&write.peer).filter(|peer| peer.channel == *channel);
        if let Some(path) = peer.and_then(|peer| peer.paths.get_mut(*nic)) {
            path.outstanding = path.outstanding.saturating_sub(1);
        }
        on_event(pending.event());
    }

    /// Hands out what a completion means; answers how many events that gave.
    fn complete(&mut self, nic: usize, done: Done, on_event: &mut dyn FnMut(Event<'_>)) -> usize {
        let (operation, outcome) = match done {
            Done::Immediate(bits) => {
                if let Some(flush) = self.lanes.get_mut(nic).and_then(|lane| lane.flush.as_mut()) {
                    flush.held.hold(bits);
                    return 0;
                }
                on_event(Event::Imm { imm: ImmValue::from_bits(bits) });
                return 1;
            }
            Done::Operation(operation) => (operation, Outcome::Sent),
            Done::Failed(operation, failure) => (operation, Outcome::Failed(failure)),
            // Of no operation, or of one that a provider does not name: `poll` has judged it.
            Done::Stray(..) => return 0,
        };
        match operation {
            Operation::Write(number) => {
                let Some(flight) = self.lanes.get_mut(nic).and_then(|lane| lane.writes.end(number)) else { return 0 };
                let WriteImm { peer, target, .. } = flight.write;
                let refused = matches!(outcome, Outcome::Failed(Failure { reason: Reason::RemoteAccess, .. }));
                let outcome = if refused && self.revocations.is_revoked(peer, target.region) {
                    Outcome::Dropped
                } else {
                    outcome
                };
                self.hand_out(Pending { nic, flight, outcome }, on_event);
                1
            }
            Operation::Send(number) => {
                self.end_send(number, matches!(outcome, Outcome::Sent));
                0
            }
            Operation::Receive(number) => {
                let message = self.slab.take(number);
                self.unposted.push(number);
                usize::from(matches!(outcome, Outcome::Sent) && self.take_in(&message, on_event))
            }
            Operation::Flush => {
                let Some(flush) = self.lanes.get_mut(nic).and_then(|lane| lane.flush.as_mut()) else { return 0 };
                if !matches!(outcome, Outcome::Sent) {
                    flush.failed += 1;
                    flush.held.read_failed();
                    return 0;
                }
                flush.failed = 0;
                flush.held.read_done();
                let covered = std::iter::from_fn(|| flush.held.next());
                covered.map(|bits| on_event(Event::Imm { imm: ImmValue::from_bits(bits) })).count()
            }
        }
    }

    /// Ends a message, or sends it again if its peer is still connected: a connection that broke may come back.
    fn end_send(&mut self, number: u32, sent: bool) {
        let Some(Send { peer: rank, channel, number: count, failed, .. }) = self.sends.get(number).copied() else {
            return;
        };
        let peer = self.peers.get_mut(&rank).filter(|peer| peer.channel == channel);
        if let Some(peer) = peer {
            if !sent && failed < TRIES {
                self.sends.change(number, |send| send.failed += 1);
                if peer.unsent.is_empty() {
                    self.mute.push(rank);
                }
                peer.unsent.push_back(number);
                return;
            }
            peer.ended(count);
        }
        self.sends.end(number);
    }

    /// Takes a message in; answers whether that is an event.
    fn take_in(&mut self, message: &[u8; PITCH], on_event: &mut dyn FnMut(Event<'_>)) -> bool {
        let Some((Parties { rank, from, to, number }, content)) = message::decode(message) else { return false };
        let peer = self.peers.get_mut(&rank).filter(|peer| to == self.key && peer.key == from);
        if !peer.is_some_and(|peer| peer.come.take(number)) {
            return false;
        }
        match content {
            Content::Message(bytes) => on_event(Event::Message { peer: rank, bytes }),
            Content::Notice(Notice::Revoke(region)) if usize::from(region.0) >= REGIONS => {}
            Content::Notice(notice) => {
                self.revocations.take_in(rank, notice);
                if let (Notice::Revoke(_), Some(peer)) = (notice, self.peers.get_mut(&rank)) {
                    peer.lose_region();
                }
            }
            Content::Ask(question) => {
                self.asked.retain(|(other, _)| *other != rank);
                self.asked.push((rank, question));
            }
            Content::Answer(question, taken_back) => {
                let (now_ns, patience_ns) = (coarse_now_ns(), self.let_go_ns() / 2);
                if let Some(peer) = self.peers.get_mut(&rank) {
                    peer.answered(question, taken_back, now_ns, patience_ns);
                }
            }
        }
        matches!(content, Content::Message(_))
    }

    // ---- peers

    /// Connects to an address; an error leaves everything as it was.
    fn join(&mut self, address: Address) -> std::result::Result<(), String> {
        let (nics, there) = (self.lanes.len(), address.ports.len());
        if there != nics {
            return Err(format!("is of an endpoint with {there} NICs, not {nics}"));
        }
        let facts = self.lanes.first().map(|lane| &lane.facts);
        if let Some(facts) = facts
            .filter(|facts| facts.kind() != address.provider || facts.virtual_addresses != address.virtual_addresses)
        {
            return Err(format!("is of the provider {:?}, not {:?}", address.provider, facts.kind()));
        }
        match self.peers.get_mut(&address.rank).filter(|peer| peer.key == address.key) {
            Some(peer) => peer.regions.update(&address.regions, nics),
            None => self.replace(address),
        }
    }

    fn replace(&mut self, address: Address) -> std::result::Result<(), String> {
        let mut paths: Vec<Path> = Vec::with_capacity(self.lanes.len());
        for (lane, port) in self.lanes.iter_mut().zip(&address.ports) {
            let Ok(found) = lane.insert(self.rank, &port.name) else {
                self.lanes.iter_mut().zip(&paths).for_each(|(lane, path)| lane.remove(path.address));
                return Err("names no endpoint that the provider knows".into());
            };
            let unsent = VecDeque::with_capacity(self.config.peer_posts as usize);
            paths.push(Path { address: found, scratch: port.scratch, outstanding: 0, unsent });
        }
        let mut peer = Peer::new(&address, self.channels + 1, paths, PEER_MESSAGES);
        if let Err(why) = peer.regions.update(&address.regions, self.lanes.len()) {
            self.lanes.iter_mut().zip(&peer.paths).for_each(|(lane, path)| lane.remove(path.address));
            return Err(why);
        }
        self.forget(address.rank);
        self.channels += 1;
        self.peers.insert(address.rank, peer);
        let (peers, nics) = (self.peers.len(), self.lanes.len());
        self.waiting.reserve(peers * nics);
        self.mute.reserve(peers);
        self.asked.reserve(peers);
        self.pending.reserve(peers * nics * self.config.peer_posts as usize);
        Ok(())
    }

    /// Forgets a peer. What the provider has of it completes as it may; all else fails.
    fn forget(&mut self, rank: Rank) {
        let Some(peer) = self.peers.remove(&rank) else { return };
        self.revocations.forget(rank);
        self.waiting.retain(|(other, _)| *other != rank);
        self.mute.retain(|other| *other != rank);
        self.notices.retain(|(other, _)| *other != rank);
        self.asked.retain(|(other, _)| *other != rank);
        for number in peer.unsent {
            self.sends.end(number);
        }
        for (nic, (lane, path)) in self.lanes.iter_mut().zip(peer.paths).enumerate() {
            for number in path.unsent {
                if let Some(flight) = lane.writes.end(number) {
                    let outcome = Outcome::Failed(Reason::Flushed.into());
                    self.pending.push_back(Pending { nic, flight, outcome });
                }
            }
            let writes = lane.writes.flying().any(|(_, flight)| flight.channel == peer.channel);
            if !writes && !self.sends.flying().any(|(_, send)| send.channel == peer.channel) {
                lane.remove(path.address);
            }
        }
    }
}

/// The limits of an endpoint with these NICs.
fn limits(lanes: &[Lane], config: &LibfabricConfig) -> Limits {
    let least = |of: fn(&Lane) -> usize| lanes.iter().map(of).min().unwrap_or(0);
    let posts = least(|lane| lane.room).min(config.peer_posts as usize) as u32;
    let regions = address::room(MAX_ADDRESS, lanes.len()).min(REGIONS) as u32;
    let write_bytes = least(|lane| lane.facts.longest).min(LONGEST) as u32;
    let receives = lanes.iter().filter_map(Lane::receives).min();
    let receives = receives.map_or(u32::MAX, |receives| receives as u32);
    Limits { posts, receives, regions, write_bytes }
}

impl Transport for LibfabricEndpoint {
    fn nics(&self) -> usize {
        self.lanes.len()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn device_needs(&self) -> DeviceNeeds {
        DeviceNeeds { host_memory: self.gpu.is_none(), ..DeviceNeeds::default() }
    }

    unsafe fn register(&mut self, span: Span) -> Result<RegionId> {
        let regions = (&mut self.regions, self.limits.regions);
        registration::register(&mut self.lanes, regions, span, self.gpu.as_ref())
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        let used = self.regions.give_up(region)?;
        let living: Vec<Rank> = self.peers.keys().copied().collect();
        // Answers may lie unread: a peer is late by the last poll, however long ago that was.
        let now_ns = if self.revocations.is_leaving(region) { self.polled_ns } else { coarse_now_ns() };
        let late = self.revocations.take_back(region, &living, now_ns, self.let_go_ns());
        self.send_notices();
        self.submit_messages();
        let (Some(late), false) = (late, used) else { return Ok(Released::Busy) };
        if late > 0 {
            log::warn!(target: crate::base::targets::NETWORK, "rank {}: {late} peers did not let go of region {}", self.rank, region.0);
        }
        for lane in &mut self.lanes {
            lane.release(region)?;
        }
        self.revocations.end(region);
        self.regions.take_back(region)
    }

    fn address(&mut self, _peer: Rank) -> Result<Vec<u8>> {
        let ports = self
            .lanes
            .iter()
            .map(|lane| Ok(Port { name: lane.name(self.rank)?.to_vec(), scratch: lane.scratch(&self.slab) }));
        let ports = ports.collect::<Result<Vec<Port>>>()?;
        let regions = registration::reported(&self.lanes, &self.regions);
        let facts = self.lanes.first().map(|lane| &lane.facts);
        let address = Address {
            key: self.key,
            rank: self.rank,
            virtual_addresses: facts.is_some_and(|facts| facts.virtual_addresses),
            provider: facts.map_or_else(String::new, Facts::kind),
            ports,
            regions,
        };
        Ok(address.encode())
    }

    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()> {
        for lane in &self.lanes {
            lane.name(self.rank)?;
        }
        let outcome = match Address::decode(address) {
            Err(why) => Err(why.to_owned()),
            Ok(Address { rank, .. }) if rank != peer => Err(format!("is of rank {rank}")),
            Ok(address) => self.join(address),
        };
        outcome.map_err(|why| {
            Error::transport(
                format!("address of rank {peer} ({} bytes) {why}", address.len()),
                "exchange the addresses anew, between ranks with the same version of tokenyard, provider and NICs",
            )
        })
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        let source = self.admit(write)?;
        let nic = usize::from(write.nic);
        let revoked = self.revocations.is_revoked(write.peer, write.target.region);
        let most = self.config.peer_posts;
        let (Some(peer), Some(lane)) = (self.peers.get_mut(&write.peer), self.lanes.get_mut(nic)) else {
            return Ok(Posted::Full);
        };
        let channel = peer.channel;
        let Some(path) = peer.paths.get_mut(nic).filter(|path| path.outstanding < most) else {
            return Ok(Posted::Full);
        };
        let flight = Flight { write: *write, source, channel };
        if revoked {
            self.pending.push_back(Pending { nic, flight, outcome: Outcome::Dropped });
        } else {
            let Some(number) = lane.writes.take(flight) else { return Ok(Posted::Full) };
            if path.unsent.is_empty() {
                self.waiting.push((write.peer, nic));
            }
            path.unsent.push_back(number);
        }
        path.outstanding += 1;
        self.regions.posted(write.source.region);
        Ok(Posted::Accepted)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        self.peer(peer)?;
        if message.len() > MAX_MESSAGE {
            let advice = format!("send at most {MAX_MESSAGE} bytes at once");
            return Err(Error::argument("message", format!("{} bytes", message.len()), advice));
        }
        Ok(if self.enqueue(peer, Content::Message(message)) { Posted::Accepted } else { Posted::Full })
    }

    fn flush(&mut self) -> Result<()> {
        let now_ns = coarse_now_ns();
        self.doubt(now_ns);
        self.hand_over(now_ns);
        Ok(())
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        // A queue is short beside what frequent polls read: notices do not lie in it for long.
        let began_ns = coarse_now_ns();
        self.doubt(began_ns);
        self.polled_ns = began_ns;
        let mut events = 0;
        while let Some(pending) = self.pending.pop_front() {
            self.hand_out(pending, on_event);
            events += 1;
        }
        for nic in 0..self.lanes.len() {
            // What is no event may lie before what is one.
            for _ in 0..READS {
                let LibfabricEndpoint { lanes, found, .. } = self;
                let Some(lane) = lanes.get_mut(nic) else { break };
                let count = lane.poll(found)?;
                for at in 0..count {
                    let done = self.found.get(at).copied().unwrap_or(Done::NONE);
                    self.judge(nic, done)?;
                    events += self.complete(nic, done, on_event);
                }
                if events > 0 || count == 0 {
                    break;
                }
            }
        }
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(EVENTS_EVERY) {
            self.lanes.iter().try_for_each(Lane::check_events)?;
        }
        self.post_receives()?;
        // What waits for a flush is yet to be handed out.
        for lane in &mut self.lanes {
            lane.flush(&self.slab)?;
            events = events.max(usize::from(lane.is_holding()));
        }
        self.send_notices();
        self.hand_over(began_ns);
        Ok(events)
    }

    /// An error leaves the endpoint closed to all but another reset.
    fn reset(&mut self) -> Result<()> {
        let key = random()?;
        let peers: Vec<Rank> = self.peers.keys().copied().collect();
        peers.into_iter().for_each(|peer| self.forget(peer));
        self.revocations.clear();
        self.notices.clear();
        self.asked.clear();
        self.key = key;
        let mut shut = Ok(());
        for (nic, lane) in self.lanes.iter_mut().enumerate() {
            if let Err(why) = lane.shut() {
                shut = Err(why);
                continue;
            }
            for number in lane.writes.flying().map(|(number, _)| number).collect::<Vec<u32>>() {
                if let Some(flight) = lane.writes.end(number) {
                    let outcome = Outcome::Failed(Reason::Flushed.into());
                    self.pending.push_back(Pending { nic, flight, outcome });
                }
            }
        }
        shut?;
        self.sends = Slots::new(self.lanes.first().map_or(0, |lane| lane.messages));
        self.unposted = (0..RECEIVES).collect();
        self.lanes.iter_mut().try_for_each(Lane::reopen)?;
        self.post_receives()
    }

    fn explain(&self, failure: Failure) -> String {
        match failure.code {
            0 => String::new(),
            code => self.lanes.first().map_or_else(String::new, |lane| lane.explain(code)),
        }
    }
}

#[cfg(test)]
mod tests;
