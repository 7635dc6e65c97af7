//! The whole network, under its one lock: who is there, and what is asked of it. What moves is in `traffic.rs`.

use super::config::{DeadPeers, SimConfig};
use super::counts::Counts;
use super::flight::{Cargo, Due, Flight, Step};
use super::memory::Source;
use super::random::Random;
use super::seat::{Lane, Miss, Pending, Port, Seat, Slot};
use crate::base::{Rank, Result};
use crate::transport::network::address::Address;
use crate::transport::network::{Posted, Reason, RegionId, Released, WriteImm};
use std::collections::BinaryHeap;

#[derive(Debug)]
pub(super) struct State {
    pub(super) config: SimConfig,
    pub(super) random: Random,
    pub(super) now_ns: u64,
    pub(super) seats: Vec<Seat>,
    /// What is on its way, each in its slot; `None` is a free slot.
    pub(super) flights: Vec<Option<Flight>>,
    pub(super) free: Vec<u32>,
    pub(super) due: BinaryHeap<Due>,
    pub(super) counts: Counts,
    /// Hash of everything that happened.
    pub(super) trace: u64,
    /// Numbers flights, steps and keys: none is used twice.
    numbers: u64,
}

/// How an endpoint leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parting {
    Death,
    Reset,
}

impl State {
    pub(super) fn new(ranks: usize, config: SimConfig) -> State {
        let ports = vec![Port::default(); config.nics.len()];
        let seat = || Seat { ports: ports.clone(), ..Seat::default() };
        State {
            random: Random::new(config.seed),
            now_ns: 0,
            seats: (0..ranks).map(|_| seat()).collect(),
            flights: Vec::new(),
            free: Vec::new(),
            due: BinaryHeap::new(),
            counts: Counts::default(),
            trace: 0,
            numbers: 0,
            config,
        }
    }

    pub(super) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(super) fn jitter(&mut self) -> u64 {
        let most = self.config.jitter_ns;
        self.random.up_to(most)
    }

    /// Seats an endpoint; `None` if the rank has one.
    pub(super) fn sit(&mut self, rank: Rank) -> Option<u64> {
        let key = self.number();
        let seat = self.seats.get_mut(rank.index()).filter(|seat| !seat.alive)?;
        (seat.alive, seat.key) = (true, key);
        seat.life += 1;
        Some(seat.life)
    }

    pub(super) fn connect(&mut self, rank: Rank, address: Address) -> std::result::Result<(), &'static str> {
        let peer = address.rank;
        let seat = self.seats.get(peer.index()).ok_or("is of a rank outside the world")?;
        if address.nics as usize != self.config.nics.len() {
            return Err("is of an endpoint with another number of NICs");
        }
        if !seat.alive || seat.key != address.key {
            return Err("is of an endpoint that is gone or was reset");
        }
        if !seat.regions.have_told(&address.regions) {
            return Err("names regions that do not exist");
        }
        let id = self.number();
        let lane = self.seats[rank.index()].lanes.entry(peer).or_default();
        if lane.key == address.key {
            lane.regions = address.regions;
        } else {
            *lane = Lane { key: address.key, id, regions: address.regions, ..Lane::default() };
            self.fail_outgoing(rank, |flight| flight.to == peer, Reason::Flushed);
        }
        Ok(())
    }

    pub(super) fn post(&mut self, rank: Rank, write: &WriteImm) -> Result<Posted> {
        let seat = &self.seats[rank.index()];
        let address = seat.admit(write, self.config.write_bytes)?;
        let nic = usize::from(write.nic);
        let Some(lane) = seat.lanes.get(&write.peer) else { return Ok(Posted::Full) };
        let room =
            seat.ports[nic].outstanding < self.config.nic_queue && lane.outstanding[nic] < self.config.peer_queue;
        if self.is_full(room) {
            return Ok(Posted::Full);
        }
        self.maybe_stop(rank, write.peer, nic);
        let reach = self.reach(rank, write.peer);
        let eager = self.random.permille(self.config.eager_permille);
        let fails = self.fails(rank);
        let target = self.seats[write.peer.index()].regions.locate(write.target, write.bytes);
        let eager = eager && reach == Reach::Open && !fails && target.is_some();
        let source = if eager && !self.config.payload {
            Source::Taken(Box::default())
        } else if eager {
            // SAFETY: `admit` found the source inside a span of this endpoint, which lives, under the network's lock.
            unsafe { Source::take(address, write.bytes) }
        } else {
            Source::Memory(address)
        };
        // Without a target nothing lands: see below.
        let cargo = Cargo::Write { write: *write, source, target: target.unwrap_or(0) };
        let packets = write.bytes.div_ceil(self.config.packet_bytes).max(1);
        let slot = self.board(rank, write.peer, nic, packets, cargo);
        self.counts.writes += 1;
        self.seats[rank.index()].ports[nic].outstanding += 1;
        self.seats[rank.index()].regions.posted(write.source.region);
        if let Some(lane) = self.seats[rank.index()].lanes.get_mut(&write.peer) {
            lane.outstanding[nic] += 1;
        }
        match reach {
            _ if fails => {
                self.counts.failed += 1;
                let after_ns = self.config.nics[nic].latency_ns();
                self.miss_later(slot, Some(after_ns), Miss::INJECTED);
            }
            Reach::Open if target.is_none() => {
                self.counts.dropped += 1;
                let after_ns = self.config.nics[nic].latency_ns();
                self.miss_later(slot, Some(after_ns), Miss::Dropped);
            }
            Reach::Open if !self.take_receive(slot) => {
                self.counts.unready += 1;
                let after_ns = self.config.nics[nic].latency_ns();
                self.miss_later(slot, Some(after_ns), Reason::NotReady.into());
            }
            Reach::Open => self.launch(slot),
            Reach::Closed => {
                self.counts.unreachable += 1;
                self.miss_later(slot, Some(0), Reason::Unreachable.into());
            }
            Reach::Dead => {
                self.counts.unreachable += 1;
                self.fail_dead(slot);
            }
        }
        Ok(Posted::Accepted)
    }

    pub(super) fn send(&mut self, rank: Rank, peer: Rank, message: &[u8]) -> Result<Posted> {
        let seat = &self.seats[rank.index()];
        seat.admit_message(peer, message)?;
        let room = seat.lanes.get(&peer).is_some_and(|lane| lane.messages < self.config.message_queue);
        if self.is_full(room) {
            return Ok(Posted::Full);
        }
        self.counts.messages += 1;
        let reach = self.reach(rank, peer);
        let held = reach == Reach::Dead && self.config.dead_peers == DeadPeers::Silent;
        if let Some(lane) = self.seats[rank.index()].lanes.get_mut(&peer).filter(|_| reach == Reach::Open || held) {
            lane.messages += 1;
        }
        if reach != Reach::Open {
            self.counts.unreachable += 1;
            return Ok(Posted::Accepted);
        }
        let slot = self.board(rank, peer, 0, 1, Cargo::Message(message.into()));
        self.launch(slot);
        Ok(Posted::Accepted)
    }

    /// Takes a receive for a write that is about to leave; false if its receiver has none.
    fn take_receive(&mut self, slot: u32) -> bool {
        let Some(flight) = self.flights[slot as usize].as_mut() else { return false };
        let Some(port) = self.seats[flight.to.index()].ports.get_mut(flight.nic) else { return false };
        flight.holds_receive = port.receives < self.config.receives;
        port.receives += u32::from(flight.holds_receive);
        flight.holds_receive
    }

    /// Whether to answer `Full`.
    fn is_full(&mut self, room: bool) -> bool {
        let injected = room && self.random.permille(self.config.full_permille);
        self.counts.full += u64::from(!room || injected);
        self.counts.full_injected += u64::from(injected);
        !room || injected
    }

    fn fails(&mut self, rank: Rank) -> bool {
        let seat = &mut self.seats[rank.index()];
        let ordered = seat.fail_next > 0;
        seat.fail_next -= u32::from(ordered);
        ordered || self.random.permille(self.config.fail_permille)
    }

    fn maybe_stop(&mut self, rank: Rank, peer: Rank, nic: usize) {
        if self.random.permille(self.config.stop_permille) {
            let which = if self.random.up_to(1) == 0 { rank } else { peer };
            let for_ns = self.random.up_to(self.config.stop_ns);
            self.stop(which, nic, for_ns);
        }
    }

    pub(super) fn stop(&mut self, rank: Rank, nic: usize, for_ns: u64) {
        let until = self.now_ns.saturating_add(for_ns);
        if let Some(port) = self.seats.get_mut(rank.index()).and_then(|seat| seat.ports.get_mut(nic)) {
            port.stopped_until_ns = port.stopped_until_ns.max(until);
            self.counts.stops += 1;
        }
    }

    /// Whether what `rank` posts to `peer` has somewhere to go.
    fn reach(&self, rank: Rank, peer: Rank) -> Reach {
        let (from, to) = (&self.seats[rank.index()], &self.seats[peer.index()]);
        let known = |seat: &Seat, other: Rank| seat.lanes.get(&other).map(|lane| lane.key);
        match to.alive {
            false => Reach::Dead,
            true if known(from, peer) == Some(to.key) && known(to, rank) == Some(from.key) => Reach::Open,
            true => Reach::Closed,
        }
    }

    /// Gives a flight a slot.
    fn board(&mut self, from: Rank, to: Rank, nic: usize, packets: u32, cargo: Cargo) -> u32 {
        let stamp = self.number();
        let lane = self.seats[from.index()].lanes.get_mut(&to);
        let (number, lane) = lane.map_or((0, 0), |lane| {
            lane.posted += 1;
            (lane.posted, lane.id)
        });
        let completed = matches!(cargo, Cargo::Message(_));
        let flight = Flight {
            stamp,
            from,
            to,
            nic,
            lane,
            number,
            cargo,
            packets,
            packets_left: packets,
            furthest: 0,
            sum: 0,
            holds_receive: false,
            arrived: false,
            completed,
            missing: None,
        };
        match self.free.pop() {
            Some(slot) => {
                self.flights[slot as usize] = Some(flight);
                slot
            }
            None => {
                self.flights.push(Some(flight));
                (self.flights.len() - 1) as u32
            }
        }
    }

    /// Lets a flight end without arriving, after a time or (`None`) never.
    fn miss_later(&mut self, slot: u32, after_ns: Option<u64>, miss: Miss) {
        let at_ns = after_ns.map(|after_ns| self.now_ns + after_ns + self.jitter());
        if let Some(flight) = self.flights[slot as usize].as_mut() {
            flight.missing = Some(miss);
            flight.arrived = true;
        }
        self.give_receive_back(slot);
        if let Some(at_ns) = at_ns {
            self.schedule(at_ns, slot, Step::Done);
        }
    }

    fn fail_dead(&mut self, slot: u32) {
        let after_ns = match self.config.dead_peers {
            DeadPeers::Fail { after_ns } => Some(after_ns),
            DeadPeers::Silent => None,
        };
        self.miss_later(slot, after_ns, Reason::Unreachable.into());
    }

    pub(super) fn kill(&mut self, rank: Rank) {
        if !self.seats.get(rank.index()).is_some_and(|seat| seat.alive) {
            return;
        }
        self.counts.deaths += 1;
        self.part(rank, Parting::Death);
        let seat = &mut self.seats[rank.index()];
        let life = seat.life;
        let ports = vec![Port::default(); seat.ports.len()];
        *seat = Seat { life, ports, ..Seat::default() };
    }

    pub(super) fn reset(&mut self, rank: Rank) {
        self.part(rank, Parting::Reset);
        let key = self.number();
        let seat = &mut self.seats[rank.index()];
        seat.key = key;
        seat.lanes.clear();
        seat.inbox.retain(|pending| pending.slot().is_some());
        seat.ports.iter_mut().for_each(|port| port.receives = 0);
    }

    /// Takes a region of `rank` back, and drops what is on its way there.
    pub(super) fn deregister(&mut self, rank: Rank, region: RegionId) -> Result<Released> {
        let released = self.seats[rank.index()].regions.take_back(region)?;
        if released == Released::Busy {
            return Ok(released);
        }
        for slot in 0..self.flights.len() {
            let bound = |flight: &&mut Flight| flight.to == rank && flight.is_bound_for(region);
            let Some(flight) = self.flights[slot].as_mut().filter(bound) else { continue };
            flight.arrived = true;
            let landed = flight.packets_left == 0;
            let completed = flight.completed;
            self.counts.dropped += u64::from(!landed);
            if landed && !completed {
                // It completes as sent, and its immediate is not handed out.
                self.give_receive_back(slot as u32);
            } else if completed {
                self.remove(slot as u32);
            } else {
                self.miss_later(slot as u32, Some(0), Miss::Dropped);
            }
        }
        Ok(released)
    }

    /// Ends everything on its way that would still touch the memory of `rank`, or be handed out to it.
    fn part(&mut self, rank: Rank, how: Parting) {
        self.fail_outgoing(rank, |_| true, Reason::Flushed);
        for slot in 0..self.flights.len() {
            let Some(flight) = self.flights[slot].as_mut().filter(|flight| flight.to == rank) else { continue };
            if flight.arrived {
                continue;
            }
            self.counts.cut += 1;
            flight.arrived = true;
            if matches!(flight.cargo, Cargo::Message(_)) {
                let (from, id) = (flight.from, flight.lane);
                let held = how == Parting::Death && self.config.dead_peers == DeadPeers::Silent;
                let lane = self.seats[from.index()].lanes.get_mut(&rank);
                if let Some(lane) = lane.filter(|lane| lane.id == id && !held) {
                    lane.messages = lane.messages.saturating_sub(1);
                }
                self.remove(slot as u32);
            } else if flight.completed {
                self.remove(slot as u32);
            } else if how == Parting::Death {
                self.fail_dead(slot as u32);
            } else {
                self.miss_later(slot as u32, Some(0), Reason::Unreachable.into());
            }
        }
    }

    /// Completes what `rank` has outstanding as failed. What no longer needs its memory may arrive all the same.
    fn fail_outgoing(&mut self, rank: Rank, which: impl Fn(&Flight) -> bool, reason: Reason) {
        for slot in 0..self.flights.len() {
            let chosen = |flight: &&mut Flight| flight.from == rank && which(flight);
            let Some(flight) = self.flights[slot].as_mut().filter(chosen) else { continue };
            let Cargo::Write { write, source, .. } = &flight.cargo else { continue };
            let reads_on = matches!(source, Source::Memory(_)) && flight.packets_left > 0 && !flight.arrived;
            if !flight.completed {
                let region = write.source.region;
                let slot = Slot { nic: flight.nic, peer: flight.to, lane: flight.lane, region };
                let pending = Pending::Missed { token: write.token, slot, miss: reason.into() };
                self.seats[rank.index()].complete(pending);
                flight.completed = true;
            }
            if reads_on {
                self.counts.cut += 1;
            }
            if reads_on || flight.arrived {
                self.remove(slot as u32);
            }
        }
    }

    /// A flight that will not deliver an immediate needs no receive.
    fn give_receive_back(&mut self, slot: u32) {
        let Some(flight) = self.flights[slot as usize].as_mut() else { return };
        if std::mem::take(&mut flight.holds_receive) {
            self.seats[flight.to.index()].give_receive_back(flight.nic);
        }
    }

    pub(super) fn remove(&mut self, slot: u32) {
        self.give_receive_back(slot);
        self.flights[slot as usize] = None;
        self.free.push(slot);
    }
}

/// Whether something posted has somewhere to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    Open,
    /// The peer lives, and is no longer (or not yet) connected both ways.
    Closed,
    Dead,
}
