//! The receiving half: the connections to this endpoint, and their arrivals. This half reorders.
//!
//! Place in the data path: from the sockets to `poll`; the other end is `outbound.rs` of the sender's process. Runs on
//! the thread that polls, and alone writes into this process's registered memory. It never blocks, and never holds more
//! of one peer than the constants below allow: it stops reading, the socket fills, and the sender waits.
//!
//! ```text
//!  stranger ── hello: version, token, key ──▶ guest ── piece ──▶ cut into packets, each late by its own chance
//!                                              ▲                        │ NIC stopped or busy: later
//!                                              │                        ▼
//!                                              │                 packets placed in memory
//!                                              │                        │ the last one
//!                                              └── answer: Taken ◀──────┼──────────▶ Deliver ──▶ Imm
//! ```

use super::frame::{self, Answer, Frame, Head, Hello, MAX_ANSWERS, Piece, Verdict};
use super::intake::Intake;
use super::memory;
use super::shared::{Arrival, Core, Packet, READS_PER_POLL, Step};
use super::socket::{self, Door, Receipt, Sending, Shortage};
use crate::base::Rank;
use crate::transport::network::imm::{ImmValue, MAX_RANKS};
use crate::transport::network::sim::endpoint_state::Pending;
use crate::transport::network::{Place, RegionId};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Most connections without a hello.
const MAX_STRANGERS: usize = 256;
/// Most connections of members: a present and a former endpoint of every possible rank.
const MAX_GUESTS: usize = 2 * MAX_RANKS;
/// Most bytes of one guest that have not been placed yet.
pub(super) const MAX_HELD: usize = 8 << 20;
/// Most writes and messages of one guest that have arrived in full and were not handed out.
const MAX_READY: usize = 4096;
/// Most writes of one guest that have come only in part.
const MAX_PARTIAL: usize = 1 << 16;
/// Most events that wait for the caller to poll.
pub(super) const MAX_UNDELIVERED: usize = 8192;

#[derive(Debug)]
enum Cargo {
    Write { imm: ImmValue, target: Place },
    Message(Box<[u8]>),
}

#[derive(Debug)]
struct Incoming {
    /// See [`Arrival`].
    serial: u64,
    nic: usize,
    cargo: Cargo,
    total: u32,
    received: u32,
    placed: u32,
    /// End of the furthest packet that has been placed, in bytes.
    furthest: u32,
    /// All of it has been placed, and is to be handed out.
    whole: bool,
}

impl Incoming {
    fn is_bound_for(&self, wanted: RegionId) -> bool {
        matches!(self.cargo, Cargo::Write { target, .. } if target.region == wanted)
    }
}

/// A connection from a member.
#[derive(Debug)]
struct Guest {
    /// `None` once the other end is closed; writes that have come in full are still placed.
    fd: Option<OwnedFd>,
    rank: Rank,
    key: u64,
    /// This endpoint has connected to the guest.
    known: bool,
    arrivals: BTreeMap<u64, Incoming>,
    ready: usize,
    held: usize,
    answers: VecDeque<Answer>,
    /// The socket takes nothing until it is reported writable.
    blocked: bool,
    /// The highest number that was handed out.
    delivered: u64,
}

impl Guest {
    fn is_paused(&self, core: &Core) -> bool {
        self.held >= MAX_HELD
            || self.ready >= MAX_READY
            || self.answers.len() >= MAX_READY
            || core.endpoint.undelivered.len() >= MAX_UNDELIVERED
    }

    /// Whether this endpoint has connected to the guest. A known guest stays known: its rank may be replaced while
    /// writes that it counts as sent are under way.
    fn is_known(&mut self, core: &Core) -> bool {
        self.known |= core.endpoint.channels.get(&self.rank).is_some_and(|channel| channel.key == self.key);
        self.known
    }

    /// Its connection is closed, and no arrival of it is left.
    fn is_over(&self) -> bool {
        self.fd.is_none() && self.arrivals.is_empty()
    }

    fn answer(&mut self, number: u64, stamp_ns: u64, verdict: Verdict) {
        self.answers.push_back(Answer { number, stamp_ns, verdict });
    }
}

/// All connections to this endpoint, and their arrivals.
#[derive(Debug, Default)]
pub(super) struct Inbound {
    token: Box<[u8]>,
    strangers: VecDeque<OwnedFd>,
    guests: BTreeMap<u64, Guest>,
    /// By NIC.
    intakes: Vec<Intake>,
    buffer: Vec<u8>,
    /// Of taking connections.
    pub(super) shortage: Shortage,
}

impl Inbound {
    pub(super) fn new(token: &[u8], nics: usize) -> Inbound {
        Inbound { token: token.into(), intakes: vec![Intake::default(); nics], ..Inbound::default() }
    }

    /// Closes all connections, and drops arrivals that have not been handed out.
    pub(super) fn reset(&mut self, core: &mut Core) {
        core.counts.cut += self.guests.values().map(|guest| guest.arrivals.len() as u64).sum::<u64>();
        self.guests.clear();
        self.strangers.clear();
    }

    /// Drops writes under way to a region that was taken back.
    pub(super) fn drop_arriving(&mut self, core: &mut Core, region: RegionId) {
        let now = core.stamp(core.now_ns);
        for guest in self.guests.values_mut() {
            let dropped = guest.arrivals.extract_if(.., |_, incoming| incoming.is_bound_for(region));
            for (number, incoming) in dropped.collect::<Vec<_>>() {
                guest.ready -= usize::from(incoming.received == incoming.total);
                // A write that was placed in full was answered; its immediate is not handed out.
                if !incoming.whole {
                    core.counts.dropped += 1;
                    guest.answer(number, now, Verdict::Dropped);
                }
            }
        }
        self.guests.retain(|_, guest| !guest.is_over());
    }

    /// Peers that are connected to this endpoint, and may write to its regions.
    pub(super) fn writers(&self, core: &Core) -> Vec<Rank> {
        let is_present = |guest: &&Guest| {
            let key = core.endpoint.channels.get(&guest.rank).map(|channel| channel.key);
            guest.fd.is_some() && guest.known && key == Some(guest.key)
        };
        self.guests.values().filter(is_present).map(|guest| guest.rank).collect()
    }

    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.guests.values().map(|guest| guest.held).sum()
    }

    // ---- connections

    /// Accepts waiting connections. Fails if this process can open no more descriptors; the connections then wait for
    /// the next try.
    pub(super) fn welcome(&mut self, core: &mut Core, door: &Door) -> nix::Result<()> {
        for _ in 0..MAX_STRANGERS {
            let Some(fd) = door.accept()? else { return Ok(()) };
            if !socket::same_user(&fd) {
                core.refused.connections += 1;
                continue;
            }
            if self.strangers.len() == MAX_STRANGERS {
                core.refused.connections += 1;
                self.strangers.pop_front();
            }
            self.strangers.push_back(fd);
        }
        Ok(())
    }

    /// Receives the first frames of strangers; drops a connection unless that frame is a member's hello.
    pub(super) fn meet(&mut self, core: &mut Core, buffer: &mut [u8]) {
        for fd in std::mem::take(&mut self.strangers) {
            match socket::receive(&fd, buffer) {
                Receipt::Nothing => self.strangers.push_back(fd),
                Receipt::Frame(bytes) => self.introduce(core, Some(fd), &buffer[..bytes]),
                Receipt::Ended => core.refused.connections += 1,
            }
        }
    }

    /// Takes a connection's first frame.
    pub(super) fn introduce(&mut self, core: &mut Core, fd: Option<OwnedFd>, bytes: &[u8]) {
        let member = |head: &Head, hello: &Hello<'_>| {
            head.key == core.endpoint.key
                && same_token(hello.token, &self.token)
                && hello.nics as usize == core.config.nics.len()
                && hello.rank.index() < MAX_RANKS
                && self.guests.len() < MAX_GUESTS
        };
        let (rank, key) = match frame::decode(bytes) {
            Ok((head, Frame::Hello(hello))) if member(&head, &hello) => (hello.rank, hello.key),
            _ => {
                core.refused.connections += 1;
                return;
            }
        };
        let mut guest = Guest {
            fd,
            rank,
            key,
            known: false,
            arrivals: BTreeMap::new(),
            ready: 0,
            held: 0,
            answers: VecDeque::new(),
            blocked: false,
            delivered: 0,
        };
        guest.is_known(core);
        self.guests.insert(core.number(), guest);
    }

    // ---- the sockets

    pub(super) fn strangers(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.strangers.iter().map(OwnedFd::as_fd)
    }

    /// The connections of guests: whether this endpoint wants to read from each, and whether it waits for the socket to
    /// take more.
    pub(super) fn sockets(&self, core: &Core) -> impl Iterator<Item = (u64, BorrowedFd<'_>, bool, bool)> {
        self.guests.iter().filter_map(|(id, guest)| {
            let fd = guest.fd.as_ref()?;
            Some((*id, fd.as_fd(), !guest.is_paused(core), guest.blocked))
        })
    }

    /// A socket can take more.
    pub(super) fn unblock(&mut self, id: u64) {
        if let Some(guest) = self.guests.get_mut(&id) {
            guest.blocked = false;
        }
    }

    /// Reads what a guest has sent.
    pub(super) fn receive(&mut self, core: &mut Core, id: u64, buffer: &mut [u8]) {
        for _ in 0..READS_PER_POLL {
            let Some(guest) = self.guests.get(&id).filter(|guest| !guest.is_paused(core)) else { return };
            let Some(fd) = &guest.fd else { return };
            match socket::receive(fd, buffer) {
                Receipt::Frame(bytes) => self.take(core, id, &buffer[..bytes]),
                Receipt::Nothing => return,
                Receipt::Ended => return self.part(core, id),
            }
        }
    }

    /// A guest's end is closed: writes that have come in part are cut off, and the others are still placed.
    fn part(&mut self, core: &mut Core, id: u64) {
        let Some(guest) = self.guests.get_mut(&id) else { return };
        guest.fd = None;
        guest.answers.clear();
        let before = guest.arrivals.len();
        guest.arrivals.retain(|_, incoming| incoming.received == incoming.total);
        core.counts.cut += (before - guest.arrivals.len()) as u64;
        self.sweep(id);
    }

    /// Forgets a guest that is over.
    fn sweep(&mut self, id: u64) {
        if self.guests.get(&id).is_some_and(Guest::is_over) {
            self.guests.remove(&id);
        }
    }

    /// Sends as many answers as the sockets take.
    pub(super) fn talk(&mut self, core: &Core) {
        for guest in self.guests.values_mut() {
            let Some(fd) = guest.fd.as_ref() else { continue };
            while !guest.blocked && !guest.answers.is_empty() {
                let head = Head { key: guest.key, stamp_ns: core.stamp(core.now_ns) };
                frame::encode_answers(&mut self.buffer, head, guest.answers.iter());
                match socket::send_frame(fd, &self.buffer) {
                    Sending::Sent => drop(guest.answers.drain(..MAX_ANSWERS.min(guest.answers.len()))),
                    Sending::Full => guest.blocked = true,
                    // No receiver is left.
                    Sending::Closed | Sending::Broken => guest.answers.clear(),
                }
            }
        }
    }

    // ---- arrivals

    /// One frame of a guest. Each is taken, or counted as refused.
    pub(super) fn take(&mut self, core: &mut Core, id: u64, bytes: &[u8]) {
        let Some(guest) = self.guests.get_mut(&id) else { return };
        let (head, frame) = match frame::decode(bytes) {
            Ok(decoded) => decoded,
            Err(_) => {
                core.refused.malformed += 1;
                return;
            }
        };
        if head.key != core.endpoint.key {
            core.refused.stale += 1;
            return;
        }
        let now = core.stamp(core.now_ns);
        match frame {
            Frame::Write(piece, _) if usize::from(piece.nic) >= core.config.nics.len() => core.refused.malformed += 1,
            Frame::Write(piece, _) if !guest.is_known(core) => {
                core.refused.unconnected += 1;
                // Each piece repeats the write; one answer, to the first piece, is enough.
                if piece.at == 0 {
                    guest.answer(piece.number, now, Verdict::Unconnected);
                }
            }
            Frame::Write(piece, payload) => take_piece(core, id, guest, head, piece, payload),
            Frame::Message { number, .. } if !guest.is_known(core) => {
                core.refused.unconnected += 1;
                guest.answer(number, now, Verdict::Unconnected);
            }
            Frame::Message { number, .. } if guest.arrivals.contains_key(&number) => core.refused.out_of_order += 1,
            Frame::Message { number, bytes } => {
                let cargo = Cargo::Message(bytes.into());
                let serial = core.number();
                guest.arrivals.insert(number, Incoming { cargo, ..Incoming::new(serial, 0, 0) });
                guest.ready += 1;
                let arrival = Arrival { guest: id, number, serial };
                let packet = Packet { arrival, piece: Arc::default(), at: 0, start: 0, len: 0, taken_in: false };
                let at_ns = core.unstamp(head.stamp_ns).saturating_add(core.config.nics[0].latency_ns());
                let at_ns = at_ns.saturating_add(core.lateness());
                core.schedule(at_ns, Step::Packet(packet));
            }
            Frame::Notice(_) if !guest.is_known(core) => core.refused.unconnected += 1,
            Frame::Notice(notice) => {
                let peer = guest.rank;
                let at_ns = core.unstamp(head.stamp_ns).saturating_add(core.config.nics[0].latency_ns());
                let at_ns = at_ns.saturating_add(core.lateness());
                core.schedule(at_ns, Step::Notice(peer, notice));
            }
            Frame::Hello(_) | Frame::Answers(_) => core.refused.out_of_order += 1,
        }
    }

    /// A packet passes its NIC, or is placed.
    pub(super) fn packet(&mut self, core: &mut Core, mut packet: Packet, at_ns: u64) {
        let Arrival { guest: id, number, serial } = packet.arrival;
        let Some(guest) = self.guests.get_mut(&id) else { return };
        let Some(incoming) = guest.arrivals.get_mut(&number).filter(|incoming| incoming.serial == serial) else {
            guest.held -= packet.len as usize;
            return;
        };
        if !packet.taken_in {
            if let Some(at_ns) = core.held_back(incoming.nic, at_ns) {
                return core.schedule(at_ns, Step::Packet(packet));
            }
            let needed_ps = match incoming.cargo {
                Cargo::Write { .. } => core.config.nics[incoming.nic].ps_per_byte().saturating_mul(packet.len.into()),
                Cargo::Message(_) => 0,
            };
            let taken_ps = self.intakes[incoming.nic].take(at_ns.saturating_mul(1000), needed_ps);
            let taken_ns = taken_ps.div_ceil(1000);
            if taken_ns > at_ns {
                packet.taken_in = true;
                return core.schedule(taken_ns, Step::Packet(packet));
            }
        }
        if let Cargo::Write { target, .. } = incoming.cargo {
            let bytes = &packet.piece[packet.start as usize..(packet.start + packet.len) as usize];
            let place = Place { offset: target.offset.saturating_add(packet.at.into()), ..target };
            // Taking a region back removes its arrivals, so this one's region is registered.
            if let Some(address) = core.endpoint.regions.locate(place, packet.len) {
                // SAFETY: `locate` has just found all of it inside a registered region of this endpoint.
                unsafe { memory::place(bytes, address) };
            }
        }
        guest.held -= packet.len as usize;
        core.counts.packets += 1;
        core.counts.packets_out_of_order += u64::from(packet.at < incoming.furthest);
        incoming.placed += packet.len;
        incoming.furthest = incoming.furthest.max(packet.at + packet.len);
        if incoming.placed < incoming.total {
            return;
        }
        incoming.whole = true;
        let deliver_ns = at_ns.saturating_add(core.jitter());
        core.schedule(deliver_ns, Step::Deliver(packet.arrival));
        if let Cargo::Write { .. } = incoming.cargo {
            guest.answer(number, core.stamp(at_ns), Verdict::Taken);
        }
    }

    /// Hands out an arrival that is complete.
    pub(super) fn deliver(&mut self, core: &mut Core, arrival: Arrival) {
        let Some(guest) = self.guests.get_mut(&arrival.guest) else { return };
        // A complete arrival keeps its number until now, unless its region was taken back: another may have it then.
        if guest.arrivals.get(&arrival.number).is_none_or(|incoming| incoming.serial != arrival.serial) {
            return;
        }
        let Some(incoming) = guest.arrivals.remove(&arrival.number) else { return };
        guest.ready -= 1;
        core.counts.reordered += u64::from(arrival.number < guest.delivered);
        guest.delivered = guest.delivered.max(arrival.number);
        core.endpoint.undelivered.push_back(match incoming.cargo {
            Cargo::Write { imm, .. } => Pending::Imm { imm, nic: incoming.nic },
            Cargo::Message(bytes) => {
                guest.answer(arrival.number, core.stamp(core.now_ns), Verdict::Taken);
                Pending::Message { peer: guest.rank, bytes }
            }
        });
        self.sweep(arrival.guest);
    }
}

impl Incoming {
    fn new(serial: u64, nic: u8, total: u32) -> Incoming {
        let cargo = Cargo::Message(Box::default());
        Incoming { serial, nic: usize::from(nic), cargo, total, received: 0, placed: 0, furthest: 0, whole: false }
    }
}

/// Takes a piece of a write, whose NIC exists, and schedules its packets.
fn take_piece(core: &mut Core, id: u64, guest: &mut Guest, head: Head, piece: Piece, payload: &[u8]) {
    if core.endpoint.regions.locate(piece.target, piece.total).is_none() {
        // Of a write that was dropped, only the first piece is counted.
        let first = u64::from(piece.at == 0);
        let verdict = if core.endpoint.regions.is_gone(piece.target.region) {
            core.counts.dropped += first;
            Verdict::Dropped
        } else {
            core.refused.outside += 1;
            Verdict::Outside
        };
        if first == 1 {
            guest.answer(piece.number, core.stamp(core.now_ns), verdict);
        }
        return;
    }
    let partial = guest.arrivals.len() - guest.ready;
    if piece.at == 0 && partial < MAX_PARTIAL && !guest.arrivals.contains_key(&piece.number) {
        core.maybe_stop(usize::from(piece.nic));
        let cargo = Cargo::Write { imm: piece.imm, target: piece.target };
        let serial = core.number();
        guest.arrivals.insert(piece.number, Incoming { cargo, ..Incoming::new(serial, piece.nic, piece.total) });
    } else if piece.at == 0 {
        core.refused.out_of_order += 1;
        return;
    }
    let next = |incoming: &&mut Incoming| {
        let same =
            matches!(incoming.cargo, Cargo::Write { imm, target, .. } if imm == piece.imm && target == piece.target);
        same && (incoming.nic, incoming.total, incoming.received) == (usize::from(piece.nic), piece.total, piece.at)
    };
    let Some(incoming) = guest.arrivals.get_mut(&piece.number).filter(next) else {
        core.refused.out_of_order += 1;
        return;
    };
    incoming.received += payload.len() as u32;
    guest.ready += usize::from(incoming.received == incoming.total);
    guest.held += payload.len();
    let arrival = Arrival { guest: id, number: piece.number, serial: incoming.serial };
    schedule_packets(core, arrival, head, piece, payload);
}

/// Cuts a piece into packets, each of which arrives when its last byte does, and later by its own chance.
fn schedule_packets(core: &mut Core, arrival: Arrival, head: Head, piece: Piece, payload: &[u8]) {
    let model = core.config.nics[usize::from(piece.nic)];
    let (bytes, len) = (Arc::<[u8]>::from(payload), payload.len() as u32);
    let end_ns = core.unstamp(head.stamp_ns).saturating_add(model.latency_ns());
    let mut start = 0;
    loop {
        let part = (len - start).min(core.config.packet_bytes);
        let behind_ns = u64::from(len - start - part).saturating_mul(model.ps_per_byte()) / 1000;
        let at_ns = end_ns.saturating_sub(behind_ns).saturating_add(core.lateness());
        let packet = Packet { arrival, piece: bytes.clone(), at: piece.at + start, start, len: part, taken_in: false };
        core.schedule(at_ns, Step::Packet(packet));
        start += part;
        if start == len {
            return;
        }
    }
}

/// Whether two tokens are equal, in a time that does not depend on where they differ.
fn same_token(theirs: &[u8], ours: &[u8]) -> bool {
    theirs.len() == ours.len()
        && theirs.iter().zip(ours).fold(0u8, |acc, (a, b)| std::hint::black_box(acc | (a ^ b))) == 0
}
