//! The network over verbs' reliable connections: ConnectX and its like, over InfiniBand and RoCE.
//!
//! Place in the data path: under the proxies. Runs on the caller's thread, which alone makes progress; it starts none.
//! Posting and polling do not enter the kernel where the device's library does not (soft-RoCE's does), but for a look
//! at the device's events now and then. While a connection is broken they may, and may take milliseconds.
//!
//! ```text
//!  post ─▶ waiting, by peer and NIC ── flush, poll ─▶ ibv_post_send, a chain ══▶ the peer's memory, its queue
//!            └ credits: of the peer, of the NIC                      completion ─▶ poll
//! ```
//!
//! - **Connections.** A queue pair for writes per peer and NIC, and one for messages per peer by the first NIC: a write
//!   with an immediate takes whichever receive is next, and messages need receives with memory. Addresses name the
//!   queue pairs, so that each is for one peer.
//! - **Receives** are shared by all connections of a NIC, as many as [`Limits::receives`], and posted again before an
//!   immediate is handed out. A sender that finds none waits at the device, without end.
//! - **One doorbell.** `flush` and `poll` link what waits for a connection into one post; its last request alone
//!   reports its completion, since a connection completes in order.
//! - **A connection that breaks** (a link that fell, a peer that cut it off) is opened again by both sides, behind what
//!   was taken: each write arrives once (`resumption.rs`). What cannot be resumed within `resume_within` fails.
//! - **A write that is refused** (a key that is gone) breaks its connection, too. It fails; all others go on behind it.
//! - **Regions** are taken back by asking the peers (`revoke.rs`). The connections of a peer that does not answer in
//!   time are broken first, and resume without its late writes: it hears of the region before it posts again.

mod address;
mod bare;
mod channel;
mod config;
mod connect;
mod device;
mod flush;
#[doc(hidden)]
pub mod ibverbs_sys;
mod lane;
mod mark;
mod memory;
mod objects;
mod pair;
mod peer;
mod reasons;
mod recovery;
mod report;
mod resumption;

pub use bare::Bare;
pub use config::VerbsConfig;
pub(super) use reasons::reason_of_status;

use self::address::{Address, Port};
use self::connect::unusable;
use self::device::Device;
use self::ibverbs_sys::{IBV_WC_SUCCESS, Library, ibv_wc};
use self::lane::{BATCH, CHAIN, Lane, Line};
use self::mark::Mark;
use self::objects::all_closed;
use self::peer::{Peer, Remote};
use self::recovery::break_off;
use super::clock::coarse_now_ns;
use super::flight::{Flight, Outcome, Pending};
use super::imm::{ImmValue, MAX_RANKS};
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
const PEER_MESSAGES: u32 = 16;
const MESSAGES: u32 = 1024;
/// Messages that wait for a connection that is broken.
const BROKEN_MESSAGES: usize = 2;
/// Receives of messages that are posted; senders of further ones wait at their devices.
const RECEIVES: u32 = 1024;
/// Most regions over an endpoint's life.
const REGIONS: usize = 4096;
/// Bytes of the longest write, as limits are of 32 bits and devices take about as many.
const LONGEST: u32 = 1 << 30;
/// Reads of a completion queue in a poll, as long as they find no event.
const READS: usize = 64;
/// Polls between two looks at the devices' events, while all connections work.
const EVENTS_EVERY: u32 = 256;
/// How long a queue pair that was closed may go on to report what it took, where the device does not say when it has
/// ended.
const COUNTED_NS: u64 = 20_000_000;
/// Times between two reports of a connection: shorter where it has just broken.
const REPORT_NS: [u64; 2] = [4_000_000, 250_000_000];
/// Time until a connection that could not be opened is tried again.
const RETRY_NS: u64 = 50_000_000;

/// A rank's endpoint over verbs. See the module for what it does and how.
#[derive(Debug)]
pub struct VerbsEndpoint {
    rank: Rank,
    config: VerbsConfig,
    limits: Limits,
    /// Drawn at random, at each reset too.
    key: u64,
    regions: Regions,
    revocations: Revocations,
    /// Their queue pairs go before the queues of `lanes`.
    peers: BTreeMap<Rank, Peer>,
    /// Numbers the peers' endpoints.
    channels: u64,
    /// Numbers the openings of queue pairs.
    openings: u32,
    /// Peers and NICs with writes that the device has not taken.
    waiting: Vec<(Rank, usize)>,
    /// Peers with messages that the device has not taken.
    mute: Vec<Rank>,
    /// Connections that are broken, or whose peers have not confirmed that theirs are open.
    unwell: Vec<(Rank, usize, Line)>,
    /// Notices that are not on their way; those to a peer are in order.
    notices: VecDeque<(Rank, Notice)>,
    /// Counts polls.
    polls: u32,
    messages: Slots<usize>,
    /// Completions that the devices do not hand out.
    pending: VecDeque<Pending>,
    /// What came while a peer was replaced.
    late: VecDeque<Late>,
    /// Before the slab, which their devices use.
    lanes: Vec<Lane>,
    slab: Slab,
    /// The GPU whose memory it registers; its memory outlives the lanes' registrations.
    gpu: Option<Gpu>,
}

#[derive(Debug)]
enum Late {
    Immediate(u32),
    Message(Rank, Vec<u8>),
}

impl VerbsEndpoint {
    /// An endpoint with nothing registered and nobody connected.
    ///
    /// # Errors
    /// `Config` if a setting makes no sense; `Transport` if the library or a device is not there, or opens nothing;
    /// `Device` if there is no such GPU.
    pub fn open(rank: Rank, config: VerbsConfig) -> Result<VerbsEndpoint> {
        let gpu = config.gpu.map(Gpu::open).transpose()?;
        VerbsEndpoint::open_for(rank, config, gpu)
    }

    /// As `open`, for the GPU that is given.
    ///
    /// # Errors
    /// As `open`.
    #[doc(hidden)]
    pub fn open_for(rank: Rank, config: VerbsConfig, gpu: Option<Gpu>) -> Result<VerbsEndpoint> {
        config.check()?;
        if rank.index() >= MAX_RANKS {
            return Err(Error::config("rank", rank, format!("an immediate can name {MAX_RANKS}; use fewer ranks")));
        }
        let library = config.library.as_deref().map_or_else(Library::open, Library::at)?;
        objects::prepare_for_forks(library)?;
        let slab = Slab::new(MESSAGES, RECEIVES, all_closed)?;
        let devices = Device::names(library, &config)?.into_iter().cycle().take(config.nics).enumerate();
        let lanes = devices.map(|(nic, device)| {
            let messages = (nic == 0).then_some(&slab);
            Lane::open(library, &config, device, messages, gpu.as_ref())
        });
        let lanes = lanes.collect::<Result<Vec<Lane>>>()?;
        let endpoint = VerbsEndpoint {
            rank,
            key: random()?,
            limits: limits(&lanes),
            regions: Regions::default(),
            revocations: Revocations::default(),
            peers: BTreeMap::new(),
            channels: 0,
            openings: 0,
            waiting: Vec::new(),
            mute: Vec::new(),
            unwell: Vec::new(),
            notices: VecDeque::new(),
            polls: 0,
            messages: Slots::new(MESSAGES),
            pending: VecDeque::new(),
            late: VecDeque::new(),
            lanes,
            slab,
            gpu,
            config,
        };
        for reach in endpoint.reach() {
            let level = if reach.way.is_some() { log::Level::Info } else { log::Level::Warn };
            log::log!(target: crate::base::targets::NETWORK, level, "rank {rank}: {reach}");
        }
        log::info!(
            target: crate::base::targets::NETWORK,
            "rank {rank}: libibverbs at {}, {:?}",
            library.path().display(), endpoint.lanes.iter().map(|lane| &lane.device).collect::<Vec<_>>()
        );
        Ok(endpoint)
    }

    /// How each device of these settings reaches memory of their GPU; none without a GPU. Devices are opened, and
    /// closed again.
    ///
    /// # Errors
    /// As `open`.
    pub fn reach_of(config: &VerbsConfig) -> Result<Vec<Reach>> {
        let Some(gpu) = config.gpu.map(Gpu::open).transpose()? else { return Ok(Vec::new()) };
        config.check()?;
        let library = config.library.as_deref().map_or_else(Library::open, Library::at)?;
        let devices = Device::names(library, config)?.into_iter().take(config.nics);
        let reach = |name| {
            let device = Device::open(library, config, name)?;
            let reached = memory::reach(&device, &gpu, config.flush);
            Ok(reached.reach.clone())
        };
        devices.map(reach).collect()
    }

    /// How each NIC reaches memory of the GPU that the endpoint was opened for; none without a GPU.
    pub fn reach(&self) -> impl Iterator<Item = &Reach> {
        self.lanes.iter().filter_map(|lane| lane.reached.as_ref()).map(|reached| &reached.reach)
    }

    /// Its rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    fn remote(&self, rank: Rank) -> Result<&Remote> {
        let peer = self.peers.get(&rank).and_then(|peer| peer.remote.as_ref());
        peer.ok_or_else(|| Error::argument("peer", rank, "connect to it with its address first"))
    }

    // ---- posting

    /// The address of a write's source, if the write is valid.
    fn admit(&self, write: &WriteImm) -> Result<u64> {
        admit(write, (self.lanes.len(), self.limits.write_bytes), &self.regions, || {
            Ok(&self.remote(write.peer)?.regions)
        })
    }

    /// Gives the devices the writes that wait for them.
    fn submit(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let VerbsEndpoint { peers, lanes, pending, waiting, revocations, config, unwell, .. } = self;
        let now_ns = coarse_now_ns();
        let nics = lanes.len();
        waiting.retain(|(rank, nic)| {
            let (Some(peer), Some(lane)) = (peers.get_mut(rank), lanes.get_mut(*nic)) else { return false };
            let Some(Remote { regions, revoked, .. }) = &peer.remote else { return false };
            let Some(channel) = peer.writes.get_mut(*nic) else { return false };
            channel.unsent.retain(|number| {
                let dropped = lane
                    .writes
                    .get(*number)
                    .is_none_or(|flight| revocations.is_revoked(*rank, flight.write.target.region));
                if dropped && let Some(flight) = lane.writes.end(*number) {
                    pending.push_back(Pending { nic: *nic, flight, outcome: Outcome::Dropped });
                }
                !dropped
            });
            if channel.unsent.is_empty() {
                return false;
            }
            if !channel.resumption.may_post() {
                return true;
            }
            if channel.notices.wrapping_sub(*revoked) as i32 > 0 {
                // It posts again once the notices of regions that are gone have come. `tend` fails what waits too long.
                channel.stalled_ns = if channel.stalled_ns == 0 { now_ns.max(1) } else { channel.stalled_ns };
                let place = (*rank, *nic, Line::Writes);
                if !unwell.contains(&place) {
                    unwell.push(place);
                }
                return true;
            }
            while !channel.unsent.is_empty() {
                let mut linked = 0;
                while linked < CHAIN
                    && let Some(number) = channel.unsent.front().copied()
                {
                    let Some(flight) = lane.writes.get(number).copied() else { break };
                    let mark = Mark::Request { opening: channel.opening, sequence: channel.next() };
                    let target = regions.place(flight.write.target.region, *nic, nics);
                    channel.unsent.pop_front();
                    if target.is_some_and(|target| {
                        lane.link_write(mark, &flight, target, channel.inline, config.split_bytes)
                    }) {
                        channel.posted.push_back(number);
                        linked += 1;
                    } else if let Some(flight) = lane.writes.end(number) {
                        // Its own region is gone.
                        let outcome = Outcome::Failed(Reason::Local.into());
                        pending.push_back(Pending { nic: *nic, flight, outcome });
                    }
                }
                if lane.post(&channel.pair).is_err() {
                    break_off(lane, channel, unwell, (*rank, *nic, Line::Writes), (now_ns, config));
                    return !channel.unsent.is_empty();
                }
            }
            false
        });
    }

    /// Gives the device the messages that wait for it.
    fn submit_messages(&mut self) {
        let VerbsEndpoint { peers, lanes, mute, messages, slab, unwell, config, .. } = self;
        let Some(lane) = lanes.first_mut() else { return };
        mute.retain(|rank| {
            let Some(channel) = peers.get_mut(rank).map(|peer| &mut peer.messages) else { return false };
            if !channel.resumption.may_post() {
                return !channel.unsent.is_empty();
            }
            while !channel.unsent.is_empty() {
                let mut linked = 0;
                while linked < CHAIN
                    && let Some(number) = channel.unsent.pop_front()
                {
                    let bytes = messages.get(number).copied().unwrap_or_default();
                    let mark = Mark::Request { opening: channel.opening, sequence: channel.next() };
                    lane.link_message(mark, slab.send(number), bytes as u32, channel.inline);
                    channel.posted.push_back(number);
                    linked += 1;
                }
                if lane.post(&channel.pair).is_err() {
                    break_off(lane, channel, unwell, (*rank, 0, Line::Messages), (coarse_now_ns(), config));
                    return !channel.unsent.is_empty();
                }
            }
            false
        });
    }

    /// Takes a message for a peer; false if there is no room.
    fn enqueue(&mut self, rank: Rank, content: Content<'_>) -> bool {
        let VerbsEndpoint { peers, messages, mute, slab, .. } = self;
        let most = messages.share(peers.len(), PEER_MESSAGES as usize);
        let Some(peer) = peers.get_mut(&rank) else { return true };
        let Some(key) = peer.remote.as_ref().map(|remote| remote.key) else { return true };
        let channel = &mut peer.messages;
        if channel.posted.len() + channel.unsent.len() >= most {
            return false;
        }
        // Peers that are gone must not hold all room for messages; notices are few.
        let waits = !channel.resumption.may_post() && channel.unsent.len() >= BROKEN_MESSAGES;
        if waits && matches!(content, Content::Message(_)) {
            return false;
        }
        let Some(number) = messages.take(0) else { return false };
        let mut place = [0; PITCH];
        let parties = Parties { rank: self.rank, from: self.key, to: key, number: 0 };
        let bytes = message::encode(&mut place, parties, content);
        slab.store(number, &place);
        messages.change(number, |kept| *kept = bytes);
        if channel.unsent.is_empty() {
            mute.push(rank);
        }
        channel.unsent.push_back(number);
        true
    }

    /// Lets go of revoked regions to which no write is outstanding, and sends this endpoint's notices.
    fn send_notices(&mut self) {
        if self.revocations.owes() {
            let (lanes, pending, peers) = (&self.lanes, &self.pending, &self.peers);
            let idle = |rank| {
                let remote = peers.get(&rank).and_then(|peer| peer.remote.as_ref());
                remote.is_none_or(|remote| remote.outstanding.iter().all(|outstanding| *outstanding == 0))
            };
            let leads =
                |flight: &Flight, peer, region| flight.write.peer == peer && flight.write.target.region == region;
            self.revocations.settle(|peer, region| {
                if idle(peer) {
                    return false;
                }
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
    }

    // ---- completions

    /// Hands the completion of a write out, and frees what it held.
    fn hand_out(&mut self, pending: Pending, on_event: &mut dyn FnMut(Event<'_>)) {
        let Pending { nic, flight: Flight { write, channel, .. }, .. } = &pending;
        self.regions.completed(write.source.region);
        let remote = self.peers.get_mut(&write.peer).and_then(|peer| peer.remote.as_mut());
        let remote = remote.filter(|remote| remote.channel == *channel);
        if let Some(outstanding) = remote.and_then(|remote| remote.outstanding.get_mut(*nic)) {
            *outstanding = outstanding.saturating_sub(1);
        }
        on_event(pending.event());
    }

    /// Hands out what waits to be handed out; answers how much.
    fn hand_out_pending(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> usize {
        let mut events = 0;
        while let Some(pending) = self.pending.pop_front() {
            self.hand_out(pending, on_event);
            events += 1;
        }
        events
    }

    /// Reads a NIC's completions once, and hands out what they mean; those of writes wait. Answers how many there were,
    /// and how many were events.
    fn read(&mut self, nic: usize, on_event: &mut dyn FnMut(Event<'_>)) -> Result<(usize, usize)> {
        let Some(lane) = self.lanes.get_mut(nic) else { return Ok((0, 0)) };
        let count = lane.poll()?;
        if count == 0 {
            return Ok((0, 0));
        }
        // All receives are there again before the first event is handed out.
        let entries = lane.entries.iter().take(count);
        let taken = entries.filter(|entry| Mark::decode(entry.wr_id) == Some(Mark::Immediate)).count();
        lane.post_receives(taken as u32)?;
        let mut events = 0;
        for at in 0..count {
            let Some(entry) = self.lanes.get(nic).and_then(|lane| lane.entries.get(at)).copied() else { break };
            events += self.complete(nic, &entry, on_event)?;
        }
        Ok((count, events))
    }

    /// Reads all of a NIC's completions, and hands out what they mean; answers how many were events.
    fn drain(&mut self, nic: usize, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        let events = self.drain_into_pending(nic, on_event)?;
        Ok(events + self.hand_out_pending(on_event))
    }

    /// As `drain`, but those of writes wait to be handed out.
    fn drain_into_pending(&mut self, nic: usize, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        let (mut events, mut left) = (0, self.lanes.get(nic).map_or(0, Lane::most_completions));
        loop {
            let (count, some) = self.read(nic, on_event)?;
            events += some;
            // What was there when this began has been read, once the queue was empty or as much as it can hold was.
            left = left.saturating_sub(count);
            if count < BATCH || left == 0 {
                return Ok(events);
            }
        }
    }

    /// Hands out what a completion means; answers how many events that gave.
    fn complete(&mut self, nic: usize, entry: &ibv_wc, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        let good = entry.status == IBV_WC_SUCCESS;
        match Mark::decode(entry.wr_id) {
            Some(Mark::Request { opening, sequence }) => {
                self.complete_request(nic, entry, opening, sequence);
                Ok(0)
            }
            Some(Mark::Immediate) => {
                let owner = self.lanes.get(nic).and_then(|lane| lane.owner(entry.qp_num));
                let Some((rank, line)) = owner else { return Ok(0) };
                if !good {
                    self.break_connection(rank, nic, line);
                    return Ok(0);
                }
                if !self.channel(rank, nic, line).is_some_and(|channel| channel.resumption.take()) {
                    return Ok(0);
                }
                // SAFETY: the completion of a receive by a write with an immediate.
                let bits = u32::from_be(unsafe { entry.__bindgen_anon_1.imm_data });
                if let Some(flush) = self.lanes.get_mut(nic).and_then(|lane| lane.flush.as_mut()) {
                    flush.held.hold(bits);
                    return Ok(0);
                }
                on_event(Event::Imm { imm: ImmValue::from_bits(bits) });
                Ok(1)
            }
            Some(Mark::Flush) => {
                let Some(flush) = self.lanes.get_mut(nic).and_then(|lane| lane.flush.as_mut()) else { return Ok(0) };
                if !good {
                    flush.fail(coarse_now_ns());
                    return Ok(0);
                }
                flush.succeed();
                let covered = std::iter::from_fn(|| flush.held.next());
                Ok(covered.map(|bits| on_event(Event::Imm { imm: ImmValue::from_bits(bits) })).count())
            }
            Some(Mark::Message(place)) => self.take_message(nic, entry, place, on_event).map(usize::from),
            Some(Mark::SentReport(place)) => {
                if let Some(lane) = self.lanes.get_mut(nic) {
                    lane.sent_reports.end(place);
                    lane.is_mute |= !good;
                }
                Ok(0)
            }
            Some(Mark::Report(place)) => {
                self.take_report(nic, entry, place);
                Ok(0)
            }
            None => Ok(0),
        }
    }

    fn complete_request(&mut self, nic: usize, entry: &ibv_wc, opening: u32, sequence: u64) {
        let Some((rank, line)) = self.lanes.get(nic).and_then(|lane| lane.owner(entry.qp_num)) else { return };
        let Some(channel) = self.channel(rank, nic, line).filter(|channel| channel.opening == opening) else { return };
        if entry.status == IBV_WC_SUCCESS {
            (channel.stalled_ns, channel.cause) = (0, None);
            self.confirm(rank, nic, line, sequence + 1);
            return;
        }
        let failure = reasons::failure(entry.status, entry.vendor_err);
        if reasons::is_final(entry.status) {
            channel.offence = Some((sequence, failure));
            // The peer refused it, behind all before it.
            if failure.reason == Reason::RemoteAccess {
                self.confirm(rank, nic, line, sequence);
            }
        } else if failure.reason != Reason::Flushed {
            channel.cause = Some(failure);
        }
        self.break_connection(rank, nic, line);
    }

    /// A peer has taken what was posted to it, up to that number in the sequence.
    fn confirm(&mut self, rank: Rank, nic: usize, line: Line, count: u64) {
        let VerbsEndpoint { peers, lanes, pending, messages, .. } = self;
        let Some(peer) = peers.get_mut(&rank) else { return };
        match line {
            Line::Writes => {
                let (Some(channel), Some(lane)) = (peer.writes.get_mut(nic), lanes.get_mut(nic)) else { return };
                for number in channel.confirm(count) {
                    if let Some(flight) = lane.writes.end(number) {
                        pending.push_back(Pending { nic, flight, outcome: Outcome::Sent });
                    }
                }
            }
            Line::Messages => peer.messages.confirm(count).for_each(|number| _ = messages.end(number)),
        }
    }

    /// Takes a message in; answers whether that is an event.
    fn take_message(
        &mut self,
        nic: usize,
        entry: &ibv_wc,
        place: u32,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<bool> {
        let bytes = self.slab.take(place);
        let Some(lane) = self.lanes.get_mut(nic) else { return Ok(false) };
        lane.receive_message(place, self.slab.receive(place))?;
        let Some((rank, line)) = lane.owner(entry.qp_num) else { return Ok(false) };
        if entry.status != IBV_WC_SUCCESS {
            self.break_connection(rank, nic, line);
            return Ok(false);
        }
        if !self.channel(rank, nic, line).is_some_and(|channel| channel.resumption.take()) {
            return Ok(false);
        }
        let Some((parties, content)) = message::decode(&bytes) else { return Ok(false) };
        let remote = self.peers.get_mut(&rank).and_then(|peer| peer.remote.as_mut());
        let Some(remote) = remote.filter(|remote| (parties.to, parties.from) == (self.key, remote.key)) else {
            return Ok(false);
        };
        match content {
            Content::Message(bytes) => on_event(Event::Message { peer: rank, bytes }),
            Content::Notice(Notice::Revoke(region)) if usize::from(region.0) >= REGIONS => {}
            Content::Notice(notice) => {
                if matches!(notice, Notice::Revoke(_)) {
                    remote.revoked = remote.revoked.wrapping_add(1);
                }
                self.revocations.take_in(rank, notice);
            }
            Content::Ask(_) | Content::Answer(..) => {}
        }
        Ok(matches!(content, Content::Message(_)))
    }
}

/// The limits of an endpoint with these NICs.
fn limits(lanes: &[Lane]) -> Limits {
    let least = |of: fn(&Lane) -> u32| lanes.iter().map(of).min().unwrap_or(0);
    Limits {
        posts: least(|lane| lane.posts),
        receives: least(|lane| lane.immediates),
        regions: address::room(MAX_ADDRESS, lanes.len()).min(REGIONS) as u32,
        write_bytes: least(|lane| lane.device.longest()).min(LONGEST),
    }
}

impl Transport for VerbsEndpoint {
    fn nics(&self) -> usize {
        self.lanes.len()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn device_needs(&self) -> DeviceNeeds {
        let reaches = self.gpu.is_some() && self.reach().all(|reach| reach.way.is_some());
        DeviceNeeds { host_memory: !reaches, ..DeviceNeeds::default() }
    }

    unsafe fn register(&mut self, span: Span) -> Result<RegionId> {
        let regions = (&mut self.regions, self.limits.regions);
        registration::register(&mut self.lanes, regions, span, self.gpu.as_ref())
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        let used = self.regions.give_up(region)?;
        let connected = self.peers.iter().filter(|(_, peer)| peer.remote.is_some());
        let living: Vec<Rank> = connected.map(|(rank, _)| *rank).collect();
        let waiting = self.revocations.waiting(region).to_vec();
        let let_go_ns = u64::try_from(self.config.let_go.as_nanos()).unwrap_or(u64::MAX);
        let late = self.revocations.take_back(region, &living, coarse_now_ns(), let_go_ns);
        self.send_notices();
        self.submit_messages();
        let Some(late) = late else { return Ok(Released::Busy) };
        if late > 0 {
            log::warn!(target: crate::base::targets::NETWORK, "rank {}: {late} peers did not let go of region {}", self.rank, region.0);
            self.cut_off(&waiting);
        }
        if used {
            return Ok(Released::Busy);
        }
        for lane in &mut self.lanes {
            lane.release(region)?;
        }
        self.revocations.end(region);
        self.regions.take_back(region)
    }

    fn address(&mut self, peer: Rank) -> Result<Vec<u8>> {
        let (messages, writes) = self.prepare(peer)?.ends();
        let service_level = self.config.service_level;
        let ports = self.lanes.iter().zip(writes).map(|(lane, writes)| {
            let route = lane.device.route(service_level);
            Port { route, datagrams: lane.datagrams(), writes }
        });
        let ports = ports.collect();
        let regions = registration::reported(&self.lanes, &self.regions);
        Ok(Address { key: self.key, rank: self.rank, peer, messages, ports, regions }.encode())
    }

    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()> {
        match Address::decode(address) {
            Err(why) => Err(unusable(peer, format!("({} bytes) {why}", address.len()))),
            Ok(Address { rank, .. }) if rank != peer => Err(unusable(peer, format!("is of rank {rank}"))),
            Ok(Address { peer, .. }) if peer != self.rank => Err(unusable(peer, format!("is for rank {peer}"))),
            Ok(address) => self.join(&address),
        }
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        let source = self.admit(write)?;
        let nic = usize::from(write.nic);
        let revoked = self.revocations.is_revoked(write.peer, write.target.region);
        let most = self.limits.posts;
        let (Some(peer), Some(lane)) = (self.peers.get_mut(&write.peer), self.lanes.get_mut(nic)) else {
            return Ok(Posted::Full);
        };
        let (Some(remote), Some(channel)) = (peer.remote.as_mut(), peer.writes.get_mut(nic)) else {
            return Ok(Posted::Full);
        };
        let Some(outstanding) = remote.outstanding.get_mut(nic).filter(|outstanding| **outstanding < most) else {
            return Ok(Posted::Full);
        };
        let flight = Flight { write: *write, source, channel: remote.channel };
        if revoked {
            self.pending.push_back(Pending { nic, flight, outcome: Outcome::Dropped });
        } else {
            let Some(number) = lane.writes.take(flight) else { return Ok(Posted::Full) };
            if channel.unsent.is_empty() {
                self.waiting.push((write.peer, nic));
            }
            channel.unsent.push_back(number);
        }
        *outstanding += 1;
        self.regions.posted(write.source.region);
        Ok(Posted::Accepted)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        self.remote(peer)?;
        if message.len() > MAX_MESSAGE {
            let advice = format!("send at most {MAX_MESSAGE} bytes at once");
            return Err(Error::argument("message", format!("{} bytes", message.len()), advice));
        }
        Ok(if self.enqueue(peer, Content::Message(message)) { Posted::Accepted } else { Posted::Full })
    }

    fn flush(&mut self) -> Result<()> {
        self.submit();
        self.submit_messages();
        Ok(())
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        let mut events = self.hand_out_pending(on_event);
        while let Some(late) = self.late.pop_front() {
            match &late {
                Late::Immediate(bits) => on_event(Event::Imm { imm: ImmValue::from_bits(*bits) }),
                Late::Message(peer, bytes) => on_event(Event::Message { peer: *peer, bytes }),
            }
            events += 1;
        }
        for nic in 0..self.lanes.len() {
            // What is no event may lie before what is one.
            for _ in 0..READS {
                let (count, some) = self.read(nic, on_event)?;
                events += some + self.hand_out_pending(on_event);
                if events > 0 || count < BATCH {
                    break;
                }
            }
        }
        let unwell = !self.unwell.is_empty() || self.lanes.iter().any(|lane| lane.is_mute);
        self.polls = self.polls.wrapping_add(1);
        // A connection that is being closed waits for an event.
        let closing = |(rank, nic, line): &(Rank, usize, Line)| {
            self.peers.get(rank).is_some_and(|peer| peer.is_closing(*nic, *line))
        };
        if self.polls.is_multiple_of(EVENTS_EVERY) || unwell && self.unwell.iter().any(closing) {
            self.read_events()?;
        }
        if unwell {
            events += self.tend(coarse_now_ns(), on_event)?;
        }
        // What waits for a flush is yet to be handed out.
        for lane in &mut self.lanes {
            lane.flush(&self.config, coarse_now_ns)?;
            events = events.max(usize::from(lane.is_holding()));
        }
        self.send_notices();
        self.submit();
        self.submit_messages();
        Ok(events)
    }

    /// An error leaves the endpoint closed to all but another reset.
    fn reset(&mut self) -> Result<()> {
        let key = random()?;
        for rank in self.peers.keys().copied().collect::<Vec<Rank>>() {
            self.abandon(rank);
        }
        // Their queue pairs, before the queues.
        self.peers.clear();
        self.revocations.clear();
        self.notices.clear();
        self.late.clear();
        self.messages = Slots::new(MESSAGES);
        self.key = key;
        let VerbsEndpoint { slab, lanes, config, .. } = self;
        let mut lanes = lanes.iter_mut().enumerate();
        lanes.try_for_each(|(nic, lane)| lane.renew((nic == 0).then_some(&*slab), config))
    }

    fn explain(&self, failure: Failure) -> String {
        match failure.code {
            0 => String::new(),
            code => self.lanes.first().map_or_else(String::new, |lane| lane.device.explain(code)),
        }
    }
}
