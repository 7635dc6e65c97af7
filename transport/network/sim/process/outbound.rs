//! The sending half: this endpoint's posts, and its connections to its peers.
//!
//! Place in the data path: from `post` to the sockets; the other end is `inbound.rs` of the peer's process. Runs on the
//! thread that posts and polls. It never blocks: frames that a socket does not take wait in a queue. The bounds on
//! outstanding writes and messages bound this queue, too: a waiting write is a number, and its payload stays in place.
//!
//! ```text
//!          Depart, when its NIC has sent a piece            answer: Taken
//!  posted ──────────────▶ waiting ──▶ socket takes it ──┬───────────────────────▶ Done ──▶ Sent
//!     │                      ▲              │ more      │ eager: once all of it is taken
//!     │                      └── Depart ◀───┘           └───────────────────────▶ Done ──▶ Sent
//!     └─ fails, refused by the peer, or the peer is gone ───────────────────────▶ Done ──▶ Failed, Dropped
//! ```

use super::address::Address;
use super::frame::{self, Answer, Frame, Head, Hello, MAX_PIECE, Piece, Verdict};
use super::memory;
use super::shared::{Core, FlightId, READS_PER_POLL, Step};
use super::socket::{self, Nonce, Receipt, Sending, Shortage};
use crate::base::{Rank, Result};
use crate::transport::network::revoke::Notice;
use crate::transport::network::sim::config::DeadPeers;
use crate::transport::network::sim::endpoint_state::{Channel, Miss, Pending, Slot};
use crate::transport::network::{Posted, Reason, RegionId, WriteImm};
use crate::transport::world::fds::is_shortage;
use nix::errno::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Most bytes of one peer's writes that are read when posted; the rest is read when it leaves.
const MAX_EAGER: usize = 1 << 20;

/// Where a payload comes from.
#[derive(Debug)]
enum Source {
    /// Registered memory, read when each piece leaves.
    Memory(u64),
    /// Read already.
    Taken(Box<[u8]>),
}

#[derive(Debug)]
enum Cargo {
    Write { write: WriteImm, source: Source },
    Message(Box<[u8]>),
    Notice(Notice),
}

#[derive(Debug)]
struct Flight {
    peer: Rank,
    cargo: Cargo,
    /// Bytes that the socket has taken.
    sent: u32,
    /// The socket has taken all of it.
    gone: bool,
    /// When its NIC has sent the last scheduled piece, in picoseconds, and the stamp of that piece.
    until_ps: u64,
    stamp_ns: u64,
    /// It may complete as soon as the socket has taken all of it.
    eager: bool,
    /// The peer has answered.
    answered: bool,
    /// Its completion was queued; messages and notices have none.
    completed: bool,
    /// Why it will not arrive.
    missing: Option<Miss>,
}

impl Flight {
    fn nic(&self) -> usize {
        match &self.cargo {
            Cargo::Write { write, .. } => usize::from(write.nic),
            Cargo::Message(_) | Cargo::Notice(_) => 0,
        }
    }

    /// Whether it is a write to a region of `peer` that has not completed.
    fn is_outstanding(&self, peer: Rank, region: RegionId) -> bool {
        let there = matches!(&self.cargo, Cargo::Write { write, .. } if write.target.region == region);
        there && self.peer == peer && !self.completed
    }

    fn bytes(&self) -> u32 {
        match &self.cargo {
            Cargo::Write { write, .. } => write.bytes,
            Cargo::Message(bytes) => bytes.len() as u32,
            Cargo::Notice(_) => 0,
        }
    }

    /// Bytes of the next piece.
    fn piece(&self) -> u32 {
        (self.bytes() - self.sent).min(MAX_PIECE as u32)
    }
}

#[derive(Debug)]
enum Wire {
    /// To be retried: too many connections waited at the peer, or descriptors were short.
    Dialling,
    Up(OwnedFd),
    /// The peer has gone.
    Gone,
}

/// The connection of a channel of the endpoint state.
#[derive(Debug)]
struct Link {
    channel: u64,
    key: u64,
    nonce: Nonce,
    wire: Wire,
    /// Flights that have left the NIC and were not taken by the socket yet.
    waiting: VecDeque<FlightId>,
    /// The socket takes nothing until it is reported writable.
    blocked: bool,
    eager_bytes: usize,
}

/// All connections to peers, and the flights to them.
#[derive(Debug)]
pub(super) struct Outbound {
    token: Box<[u8]>,
    links: BTreeMap<Rank, Link>,
    flights: BTreeMap<FlightId, Flight>,
    /// Writes that stay until the next flush or poll.
    held: Vec<FlightId>,
    buffer: Vec<u8>,
    /// Shortage in connecting, and whether `talk` has met one.
    pub(super) shortage: Shortage,
    short: Option<Errno>,
}

impl Outbound {
    pub(super) fn new(token: &[u8]) -> Outbound {
        Outbound {
            token: token.into(),
            links: BTreeMap::new(),
            flights: BTreeMap::new(),
            held: Vec::new(),
            buffer: Vec::with_capacity(frame::MAX_FRAME),
            shortage: Shortage::default(),
            short: None,
        }
    }

    // ---- connecting

    /// Connects to an address; an error leaves everything as it was.
    pub(super) fn connect(&mut self, core: &mut Core, address: Address) -> std::result::Result<(), String> {
        if address.nics as usize != core.config.nics.len() {
            return Err(format!("is of an endpoint with {} NICs, not {}", address.nics, core.config.nics.len()));
        }
        let peer = address.rank;
        match (core.endpoint.channels.get_mut(&peer), self.links.get(&peer)) {
            (Some(channel), Some(link)) if channel.key == address.key => {
                if matches!(link.wire, Wire::Gone) {
                    return Err("is of an endpoint that is gone or was reset".into());
                }
                // Either of two addresses may be the older one: a region that is gone in one of them is gone.
                let both = channel.regions.iter().zip(&address.regions);
                if both.clone().any(|(known, reported)| known != reported && *known != 0 && *reported != 0) {
                    return Err("contradicts an earlier one of the same endpoint".into());
                }
                let mut regions: Vec<u64> = both.map(|(known, reported)| *known.min(reported)).collect();
                let longer = if channel.regions.len() > regions.len() { &channel.regions } else { &address.regions };
                regions.extend_from_slice(&longer[regions.len()..]);
                channel.regions = regions;
                Ok(())
            }
            _ => self.replace(core, address),
        }
    }

    fn replace(&mut self, core: &mut Core, address: Address) -> std::result::Result<(), String> {
        let (peer, key) = (address.rank, address.key);
        let wire = self.dial(core, &address.nonce, key).map_err(|errno| format!("cannot be reached ({errno})"))?;
        let channel = core.number();
        if let Some(old) = self.links.remove(&peer) {
            self.fail_channel(core, old.channel, Reason::Flushed);
        }
        let link =
            Link { channel, key, nonce: address.nonce, wire, waiting: VecDeque::new(), blocked: false, eager_bytes: 0 };
        self.links.insert(peer, link);
        core.endpoint.revocations.forget(peer);
        core.endpoint
            .channels
            .insert(peer, Channel { key, id: channel, regions: address.regions, ..Channel::default() });
        Ok(())
    }

    fn dial(&mut self, core: &Core, nonce: &Nonce, key: u64) -> nix::Result<Wire> {
        let fd = match socket::dial(nonce) {
            Ok(Some(fd)) => fd,
            Ok(None) => return Ok(Wire::Dialling),
            Err(errno) if is_shortage(errno) => {
                self.short = Some(errno);
                return Ok(Wire::Dialling);
            }
            Err(errno) => return Err(errno),
        };
        let nics = core.config.nics.len() as u32;
        let hello = Hello { rank: core.rank, nics, key: core.endpoint.key, token: &self.token };
        let head = Head { key, stamp_ns: core.stamp(core.now_ns) };
        frame::encode(&mut self.buffer, head, &Frame::Hello(hello));
        match socket::send_frame(&fd, &self.buffer) {
            Sending::Sent => Ok(Wire::Up(fd)),
            Sending::Full => Ok(Wire::Dialling),
            Sending::Closed | Sending::Broken => Err(Errno::ECONNREFUSED),
        }
    }

    /// Forgets all peers, and completes all posts to them.
    pub(super) fn reset(&mut self, core: &mut Core) {
        let channels: Vec<u64> = self.links.values().map(|link| link.channel).collect();
        channels.into_iter().for_each(|channel| self.fail_channel(core, channel, Reason::Flushed));
        self.links.clear();
        self.held.clear();
        core.endpoint.channels.clear();
        core.endpoint.revocations.clear();
    }

    /// Completes all posts of a channel as failed, at once, and forgets it. Frames that its socket has taken may
    /// arrive.
    fn fail_channel(&mut self, core: &mut Core, channel: u64, reason: Reason) {
        let first = FlightId { channel, number: 0 };
        let after = FlightId { channel: channel + 1, number: 0 };
        let mut posted = self.flights.split_off(&first);
        self.flights.append(&mut posted.split_off(&after));
        for flight in posted.into_values() {
            core.counts.cut += u64::from(!flight.gone && flight.missing.is_none());
            if let (false, Cargo::Write { write, .. }) = (flight.completed, &flight.cargo) {
                let slot = Slot { nic: flight.nic(), peer: flight.peer, channel, region: write.source.region };
                core.endpoint.complete(Pending::Missed { token: write.token, slot, miss: reason.into() });
            }
        }
    }

    // ---- posting

    pub(super) fn post(&mut self, core: &mut Core, write: &WriteImm) -> Result<Posted> {
        let address = core.endpoint.admit(write, core.config.write_bytes)?;
        let nic = usize::from(write.nic);
        let (Some(channel), Some(link)) = (core.endpoint.channels.get(&write.peer), self.links.get_mut(&write.peer))
        else {
            return Ok(Posted::Full);
        };
        let room = core.endpoint.ports[nic].outstanding < core.config.nic_queue
            && channel.outstanding[nic] < core.config.peer_queue;
        if core.is_full(room) {
            return Ok(Posted::Full);
        }
        core.maybe_stop(nic);
        let gone = matches!(link.wire, Wire::Gone);
        let revoked = core.endpoint.revocations.is_revoked(write.peer, write.target.region);
        let eager = core.random.permille(core.config.eager_permille);
        let fails = core.fails();
        let bytes = write.bytes as usize;
        let eager = eager && !gone && !fails && !revoked && link.eager_bytes + bytes <= MAX_EAGER;
        let source = if eager {
            link.eager_bytes += bytes;
            let mut taken = Vec::new();
            // SAFETY: `admit` found the source inside a registered region of this endpoint.
            unsafe { memory::append(&mut taken, address, bytes) };
            Source::Taken(taken.into_boxed_slice())
        } else {
            Source::Memory(address)
        };
        let id = self.board(core, write.peer, Cargo::Write { write: *write, source }, eager);
        core.counts.writes += 1;
        core.endpoint.ports[nic].outstanding += 1;
        core.endpoint.regions.posted(write.source.region);
        if let Some(channel) = core.endpoint.channels.get_mut(&write.peer) {
            channel.outstanding[nic] += 1;
        }
        if fails {
            core.counts.failed += 1;
            let after_ns = core.config.nics[nic].latency_ns();
            self.miss(core, id, Some(after_ns), Miss::INJECTED);
        } else if gone {
            core.counts.unreachable += 1;
            self.fail_dead(core, id);
        } else if revoked {
            core.counts.dropped += 1;
            self.miss(core, id, Some(0), Miss::Dropped);
        } else if core.random.permille(core.config.hold_permille) {
            core.counts.held += 1;
            self.held.push(id);
        } else {
            self.launch(core, id);
        }
        Ok(Posted::Accepted)
    }

    pub(super) fn send(&mut self, core: &mut Core, peer: Rank, message: &[u8]) -> Result<Posted> {
        core.endpoint.admit_message(peer, message)?;
        let room =
            core.endpoint.channels.get(&peer).is_some_and(|channel| channel.messages < core.config.message_queue);
        if core.is_full(room) {
            return Ok(Posted::Full);
        }
        core.counts.messages += 1;
        let gone = self.links.get(&peer).is_none_or(|link| matches!(link.wire, Wire::Gone));
        let held = core.config.dead_peers == DeadPeers::Silent;
        if let Some(channel) = core.endpoint.channels.get_mut(&peer).filter(|_| !gone || held) {
            channel.messages += 1;
        }
        if gone {
            core.counts.unreachable += 1;
            return Ok(Posted::Accepted);
        }
        let id = self.board(core, peer, Cargo::Message(message.into()), false);
        self.launch(core, id);
        Ok(Posted::Accepted)
    }

    /// Sends the writes on their way that were kept until now.
    pub(super) fn flush(&mut self, core: &mut Core) {
        for id in std::mem::take(&mut self.held) {
            self.launch(core, id);
        }
    }

    /// Lets go of revoked regions to which no write is outstanding, and sends this endpoint's notices.
    pub(super) fn send_notices(&mut self, core: &mut Core) {
        if core.endpoint.revocations.owes() {
            let flights = &self.flights;
            let outstanding = |peer, region| flights.values().any(|flight| flight.is_outstanding(peer, region));
            core.endpoint.revocations.settle(outstanding);
        }
        while let Some((peer, notice)) = core.endpoint.revocations.next_notice() {
            if self.links.get(&peer).is_some_and(|link| !matches!(link.wire, Wire::Gone)) {
                let id = self.board(core, peer, Cargo::Notice(notice), false);
                self.launch(core, id);
            }
        }
    }

    fn board(&mut self, core: &mut Core, peer: Rank, cargo: Cargo, eager: bool) -> FlightId {
        let id = core.endpoint.channels.get_mut(&peer).map_or(FlightId { channel: 0, number: 0 }, |channel| {
            channel.posted += 1;
            FlightId { channel: channel.id, number: channel.posted }
        });
        let flight = Flight {
            peer,
            completed: !matches!(cargo, Cargo::Write { .. }),
            cargo,
            sent: 0,
            gone: false,
            until_ps: 0,
            stamp_ns: 0,
            eager,
            answered: false,
            missing: None,
        };
        self.flights.insert(id, flight);
        id
    }

    /// Gives a flight its time on its NIC, and schedules its first piece.
    fn launch(&mut self, core: &mut Core, id: FlightId) {
        let Some(flight) = self.flights.get_mut(&id) else { return };
        let model = core.config.nics[flight.nic()];
        let port = &mut core.endpoint.ports[flight.nic()];
        let now_ps = core.now_ns.saturating_mul(1000);
        flight.until_ps = port.sends_until_ps.max(now_ps).saturating_add(model.per_message_ps());
        let whole_ps = u64::from(flight.bytes()).saturating_mul(model.ps_per_byte());
        port.sends_until_ps = flight.until_ps.saturating_add(whole_ps);
        schedule_piece(core, id, flight);
    }

    // ---- steps as time passes

    pub(super) fn depart(&mut self, core: &mut Core, id: FlightId, at_ns: u64) {
        let Some(flight) = self.flights.get_mut(&id).filter(|flight| flight.missing.is_none()) else { return };
        if let Some(at_ns) = core.held_back(flight.nic(), at_ns) {
            flight.stamp_ns = at_ns;
            return core.schedule(at_ns, Step::Depart(id));
        }
        if let Some(link) = self.links.get_mut(&flight.peer).filter(|link| link.channel == id.channel) {
            link.waiting.push_back(id);
        }
    }

    pub(super) fn done(&mut self, core: &mut Core, id: FlightId) {
        let Some(flight) = self.flights.get_mut(&id).filter(|flight| !flight.completed) else { return };
        let Cargo::Write { write, .. } = &flight.cargo else { return };
        flight.completed = true;
        let (token, region) = (write.token, write.source.region);
        let slot = Slot { nic: flight.nic(), peer: flight.peer, channel: id.channel, region };
        core.counts.completed_early += u64::from(flight.missing.is_none() && !flight.answered);
        core.endpoint.complete(match flight.missing {
            Some(miss) => Pending::Missed { token, slot, miss },
            None => Pending::Sent { token, slot },
        });
        // A flight that completed early is kept until its answer comes.
        if flight.missing.is_some() || flight.answered {
            self.flights.remove(&id);
        }
    }

    /// Lets a flight end without arriving, after `after_ns` or (`None`) never.
    fn miss(&mut self, core: &mut Core, id: FlightId, after_ns: Option<u64>, miss: Miss) {
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.missing = Some(miss);
        }
        if let Some(after_ns) = after_ns {
            let at_ns = core.now_ns.saturating_add(after_ns).saturating_add(core.jitter());
            core.schedule(at_ns, Step::Done(id));
        }
    }

    fn fail_dead(&mut self, core: &mut Core, id: FlightId) {
        let after_ns = match core.config.dead_peers {
            DeadPeers::Fail { after_ns } => Some(after_ns),
            DeadPeers::Silent => None,
        };
        self.miss(core, id, after_ns, Reason::Unreachable.into());
    }

    // ---- the sockets

    /// The connections, and whether each waits for its socket to take more.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (Rank, BorrowedFd<'_>, bool)> {
        self.links.iter().filter_map(|(peer, link)| match &link.wire {
            Wire::Up(fd) => Some((*peer, fd.as_fd(), link.blocked)),
            Wire::Dialling | Wire::Gone => None,
        })
    }

    #[cfg(test)]
    pub(super) fn eager_bytes(&self) -> usize {
        self.links.values().map(|link| link.eager_bytes).sum()
    }

    /// A socket can take more.
    pub(super) fn unblock(&mut self, peer: Rank) {
        if let Some(link) = self.links.get_mut(&peer) {
            link.blocked = false;
        }
    }

    /// Reads a peer's answers.
    pub(super) fn receive(&mut self, core: &mut Core, peer: Rank, buffer: &mut [u8]) {
        for _ in 0..READS_PER_POLL {
            let Some(Link { wire: Wire::Up(fd), .. }) = self.links.get(&peer) else { return };
            match socket::receive(fd, buffer) {
                Receipt::Frame(bytes) => self.take(core, peer, &buffer[..bytes]),
                Receipt::Nothing => return,
                Receipt::Ended => return self.lose(core, peer),
            }
        }
    }

    /// One frame from a peer that this endpoint connected to.
    pub(super) fn take(&mut self, core: &mut Core, peer: Rank, bytes: &[u8]) {
        let Some(channel) = self.links.get(&peer).map(|link| link.channel) else { return };
        match frame::decode(bytes) {
            Err(_) => core.refused.malformed += 1,
            Ok((head, _)) if head.key != core.endpoint.key => core.refused.stale += 1,
            Ok((_, Frame::Answers(answers))) => {
                for answer in answers.iter() {
                    self.answer(core, FlightId { channel, number: answer.number }, answer);
                }
            }
            Ok(_) => core.refused.out_of_order += 1,
        }
    }

    fn answer(&mut self, core: &mut Core, id: FlightId, answer: Answer) {
        let taken = answer.verdict == Verdict::Taken;
        let expected = |flight: &&mut Flight| !flight.answered && (flight.gone || (!taken && flight.sent > 0));
        let Some(flight) = self.flights.get_mut(&id).filter(expected) else {
            core.refused.out_of_order += 1;
            return;
        };
        flight.answered = true;
        let (peer, nic) = (flight.peer, flight.nic());
        if let Cargo::Message(_) = flight.cargo {
            self.flights.remove(&id);
            free_message(core, peer, id.channel);
        } else if flight.completed {
            self.flights.remove(&id);
        } else if taken {
            let latency_ns = core.config.nics[nic].latency_ns();
            let at_ns = core.unstamp(answer.stamp_ns).saturating_add(latency_ns).saturating_add(core.lateness());
            let late_ns = core.config.lost_acknowledgement(&mut core.random, &mut core.counts);
            let at_ns = at_ns.saturating_add(late_ns);
            core.schedule(at_ns, Step::Done(id));
        } else {
            free_eager(self.links.get_mut(&peer), flight);
            let miss = match answer.verdict {
                Verdict::Dropped => Miss::Dropped,
                Verdict::Unconnected => Reason::Unreachable.into(),
                Verdict::Outside | Verdict::Taken => Reason::RemoteAccess.into(),
            };
            core.counts.unreachable += u64::from(miss != Miss::Dropped);
            self.miss(core, id, Some(0), miss);
        }
    }

    /// A peer's end is closed, and all its frames were read.
    fn lose(&mut self, core: &mut Core, peer: Rank) {
        let Some(link) = self.links.get_mut(&peer) else { return };
        let channel = link.channel;
        (link.wire, link.blocked) = (Wire::Gone, false);
        link.waiting.clear();
        core.counts.deaths += 1;
        let held = core.config.dead_peers == DeadPeers::Silent;
        let range = FlightId { channel, number: 0 }..FlightId { channel: channel + 1, number: 0 };
        let ids: Vec<FlightId> = self.flights.range(range).map(|(id, _)| *id).collect();
        for id in ids {
            let Some(flight) = self.flights.get_mut(&id).filter(|flight| flight.missing.is_none()) else { continue };
            core.counts.cut += u64::from(!flight.gone);
            // Its completion is scheduled, or only a drawn delay is left before it.
            let completing = flight.answered || (flight.eager && flight.gone);
            match (&flight.cargo, flight.completed) {
                (Cargo::Write { .. }, false) if completing => flight.answered = true,
                (Cargo::Write { .. }, false) => self.fail_dead(core, id),
                (Cargo::Write { .. }, true) => drop(self.flights.remove(&id)),
                (Cargo::Notice(_), _) => drop(self.flights.remove(&id)),
                (Cargo::Message(_), _) => {
                    self.flights.remove(&id);
                    if !held {
                        free_message(core, peer, channel);
                    }
                }
            }
        }
    }

    /// Sends what the sockets take, and retries connections that could not be made. Fails if connecting has failed for
    /// long for lack of descriptors or memory.
    pub(super) fn talk(&mut self, core: &mut Core) -> std::result::Result<(), (Duration, Errno)> {
        self.short = None;
        let peers: Vec<Rank> = self.links.keys().copied().collect();
        for peer in peers {
            let Some(link) = self.links.get(&peer) else { continue };
            if let Wire::Dialling = link.wire {
                let (nonce, key) = (link.nonce, link.key);
                let wire = self.dial(core, &nonce, key);
                match (wire, self.links.get_mut(&peer)) {
                    (Ok(wire), Some(link)) => link.wire = wire,
                    _ => self.lose(core, peer),
                }
            }
            while self.send_next(core, peer) {}
        }
        self.shortage.note(self.short)
    }

    /// Sends one frame to a peer; false if there is none, or if its socket takes none.
    fn send_next(&mut self, core: &mut Core, peer: Rank) -> bool {
        let Some(link) = self.links.get_mut(&peer).filter(|link| !link.blocked) else { return false };
        let (Wire::Up(fd), Some(id)) = (&link.wire, link.waiting.front().copied()) else { return false };
        let Some(flight) = self.flights.get_mut(&id).filter(|flight| flight.missing.is_none()) else {
            link.waiting.pop_front();
            return true;
        };
        let head = Head { key: link.key, stamp_ns: core.stamp(flight.stamp_ns) };
        put_frame(&mut self.buffer, head, id.number, flight);
        match socket::send_frame(fd, &self.buffer) {
            Sending::Sent => {}
            // The frames that the peer sent before it closed are read first; then it is lost.
            Sending::Full | Sending::Closed => {
                link.blocked = true;
                return false;
            }
            Sending::Broken => {
                self.lose(core, peer);
                return false;
            }
        }
        link.waiting.pop_front();
        flight.sent += flight.piece();
        flight.gone = flight.sent == flight.bytes();
        if !flight.gone {
            schedule_piece(core, id, flight);
            return true;
        }
        if let Cargo::Notice(_) = flight.cargo {
            self.flights.remove(&id);
            return true;
        }
        free_eager(Some(link), flight);
        if flight.eager {
            let at_ns = core.now_ns.saturating_add(core.jitter());
            core.schedule(at_ns, Step::Done(id));
        }
        true
    }
}

/// Schedules the next piece of a flight for the time at which its NIC has sent it.
fn schedule_piece(core: &mut Core, id: FlightId, flight: &mut Flight) {
    let piece_ps = u64::from(flight.piece()).saturating_mul(core.config.nics[flight.nic()].ps_per_byte());
    flight.until_ps = flight.until_ps.saturating_add(piece_ps);
    flight.stamp_ns = flight.until_ps.div_ceil(1000);
    let at_ns = flight.stamp_ns.saturating_add(core.jitter());
    core.schedule(at_ns, Step::Depart(id));
}

/// Builds the frame of the next piece: this is when a source is read.
fn put_frame(out: &mut Vec<u8>, head: Head, number: u64, flight: &Flight) {
    let (at, bytes) = (flight.sent, flight.piece() as usize);
    match &flight.cargo {
        Cargo::Message(bytes) => frame::encode(out, head, &Frame::Message { number, bytes }),
        Cargo::Notice(notice) => frame::encode(out, head, &Frame::Notice(*notice)),
        Cargo::Write { write, source } => {
            let WriteImm { nic, target, imm, bytes: total, .. } = *write;
            frame::encode(out, head, &Frame::Write(Piece { number, nic, target, imm, total, at }, &[]));
            match source {
                Source::Taken(taken) => out.extend(&taken[at as usize..at as usize + bytes]),
                // SAFETY: `post` found the source inside a region of this endpoint, which cannot be taken back before
                // this write has completed, and the piece is a part of it.
                Source::Memory(address) => unsafe { memory::append(out, address + u64::from(at), bytes) },
            }
        }
    }
}

/// Frees a payload that was read when posted.
fn free_eager(link: Option<&mut Link>, flight: &mut Flight) {
    if let (Some(link), Cargo::Write { source: Source::Taken(taken), .. }) = (link, &mut flight.cargo) {
        link.eager_bytes -= std::mem::take(taken).len();
    }
}

fn free_message(core: &mut Core, peer: Rank, id: u64) {
    if let Some(channel) = core.endpoint.channels.get_mut(&peer).filter(|channel| channel.id == id) {
        channel.messages = channel.messages.saturating_sub(1);
    }
}
