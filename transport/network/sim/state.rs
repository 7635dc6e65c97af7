//! The whole network, under its one lock: its endpoints and their calls. Traffic is in `traffic.rs`.

use super::config::{DeadPeers, SimConfig};
use super::counts::Counts;
use super::endpoint_state::{Channel, EndpointState, Miss, Pending, Port, Slot};
use super::flight::{Cargo, Due, Flight, Step};
use super::memory::Source;
use super::random::Random;
use crate::base::{Rank, Result};
use crate::transport::network::address::Address;
use crate::transport::network::{Posted, Reason, RegionId, Released, WriteImm};
use std::collections::BinaryHeap;

#[derive(Debug)]
pub(super) struct State {
    pub(super) config: SimConfig,
    pub(super) random: Random,
    pub(super) now_ns: u64,
    pub(super) endpoints: Vec<EndpointState>,
    /// Writes and messages under way, each in its slot; `None` is a free slot.
    pub(super) flights: Vec<Option<Flight>>,
    pub(super) free: Vec<u32>,
    pub(super) due: BinaryHeap<Due>,
    pub(super) counts: Counts,
    /// Hash of all events.
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
        let endpoint = || EndpointState { ports: ports.clone(), ..EndpointState::default() };
        State {
            random: Random::new(config.seed),
            now_ns: 0,
            endpoints: (0..ranks).map(|_| endpoint()).collect(),
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

    /// Gives a rank a new endpoint; `None` if it has one.
    pub(super) fn add_endpoint(&mut self, rank: Rank) -> Option<u64> {
        let key = self.number();
        let endpoint = self.endpoints.get_mut(rank.index()).filter(|endpoint| !endpoint.alive)?;
        (endpoint.alive, endpoint.key) = (true, key);
        endpoint.life += 1;
        Some(endpoint.life)
    }

    pub(super) fn connect(&mut self, rank: Rank, address: Address) -> std::result::Result<(), &'static str> {
        let peer = address.rank;
        let endpoint = self.endpoints.get(peer.index()).ok_or("is of a rank outside the world")?;
        if address.nics as usize != self.config.nics.len() {
            return Err("is of an endpoint with another number of NICs");
        }
        if !endpoint.alive || endpoint.key != address.key {
            return Err("is of an endpoint that is gone or was reset");
        }
        if !endpoint.regions.have_reported(&address.regions) {
            return Err("names regions that do not exist");
        }
        let id = self.number();
        let channel = self.endpoints[rank.index()].channels.entry(peer).or_default();
        if channel.key == address.key {
            channel.regions = address.regions;
        } else {
            *channel = Channel { key: address.key, id, regions: address.regions, ..Channel::default() };
            self.endpoints[rank.index()].revocations.forget(peer);
            self.fail_outgoing(rank, |flight| flight.to == peer, Reason::Flushed);
        }
        Ok(())
    }

    pub(super) fn post(&mut self, rank: Rank, write: &WriteImm) -> Result<Posted> {
        let endpoint = &self.endpoints[rank.index()];
        let address = endpoint.admit(write, self.config.write_bytes)?;
        let nic = usize::from(write.nic);
        let Some(channel) = endpoint.channels.get(&write.peer) else { return Ok(Posted::Full) };
        let room = endpoint.ports[nic].outstanding < self.config.nic_queue
            && channel.outstanding[nic] < self.config.peer_queue;
        if self.is_full(room) {
            return Ok(Posted::Full);
        }
        self.maybe_stop(rank, write.peer, nic);
        let reach = self.reach(rank, write.peer);
        let eager = self.random.permille(self.config.eager_permille);
        let fails = self.fails(rank);
        let revoked = self.endpoints[rank.index()].revocations.is_revoked(write.peer, write.target.region);
        let target = self.endpoints[write.peer.index()].regions.locate(write.target, write.bytes).filter(|_| !revoked);
        let eager = eager && reach == Reach::Open && !fails && target.is_some();
        let source = if eager && !self.config.payload {
            Source::Taken(Box::default())
        } else if eager {
            // SAFETY: `admit` found the source inside a span of this endpoint, which lives, under the network's lock.
            unsafe { Source::take(address, write.bytes) }
        } else {
            Source::Memory(address)
        };
        // Without a target nothing is placed: see below.
        let cargo = Cargo::Write { write: *write, source, target: target.unwrap_or(0) };
        let packets = write.bytes.div_ceil(self.config.packet_bytes).max(1);
        let slot = self.board(rank, write.peer, nic, packets, cargo);
        self.counts.writes += 1;
        self.endpoints[rank.index()].ports[nic].outstanding += 1;
        self.endpoints[rank.index()].regions.posted(write.source.region);
        if let Some(channel) = self.endpoints[rank.index()].channels.get_mut(&write.peer) {
            channel.outstanding[nic] += 1;
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
            Reach::Open if self.random.permille(self.config.hold_permille) => {
                self.counts.held += 1;
                self.hold(rank, slot);
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
        let endpoint = &self.endpoints[rank.index()];
        endpoint.admit_message(peer, message)?;
        let room = endpoint.channels.get(&peer).is_some_and(|channel| channel.messages < self.config.message_queue);
        if self.is_full(room) {
            return Ok(Posted::Full);
        }
        self.counts.messages += 1;
        let reach = self.reach(rank, peer);
        let held = reach == Reach::Dead && self.config.dead_peers == DeadPeers::Silent;
        if let Some(channel) =
            self.endpoints[rank.index()].channels.get_mut(&peer).filter(|_| reach == Reach::Open || held)
        {
            channel.messages += 1;
        }
        if reach != Reach::Open {
            self.counts.unreachable += 1;
            return Ok(Posted::Accepted);
        }
        let slot = self.board(rank, peer, 0, 1, Cargo::Message(message.into()));
        self.launch(slot);
        Ok(Posted::Accepted)
    }

    /// Keeps a write until its sender's next flush or poll.
    fn hold(&mut self, rank: Rank, slot: u32) {
        if let Some(flight) = &self.flights[slot as usize] {
            self.endpoints[rank.index()].held.push((slot, flight.stamp));
        }
    }

    /// Sends the writes on their way that were kept until now.
    pub(super) fn flush(&mut self, rank: Rank) {
        for (slot, stamp) in std::mem::take(&mut self.endpoints[rank.index()].held) {
            // A death, a reset or the end of its target's region may have taken it away.
            let there = |flight: &&Flight| flight.stamp == stamp && !flight.arrived;
            if self.flights[slot as usize].as_ref().is_some_and(|flight| there(&flight)) {
                self.launch(slot);
            }
        }
    }

    /// Takes in the notices that have reached `rank`, and sends its own.
    pub(super) fn exchange_notices(&mut self, rank: Rank) {
        let endpoint = &mut self.endpoints[rank.index()];
        let arrived = std::mem::take(&mut endpoint.notices);
        let mut revocations = std::mem::take(&mut endpoint.revocations);
        arrived.into_iter().for_each(|(peer, notice)| revocations.take_in(peer, notice));
        if revocations.owes() {
            let flights = || self.flights.iter().flatten();
            revocations.settle(|peer, region| flights().any(|flight| flight.is_outstanding(rank, peer, region)));
        }
        while let Some((peer, notice)) = revocations.next_notice() {
            if self.reach(rank, peer) == Reach::Open {
                let slot = self.board(rank, peer, 0, 1, Cargo::Notice(notice));
                self.launch(slot);
            }
        }
        self.endpoints[rank.index()].revocations = revocations;
    }

    /// Takes a receive for a write that is about to leave; false if none is free.
    fn take_receive(&mut self, slot: u32) -> bool {
        let Some(flight) = self.flights[slot as usize].as_mut() else { return false };
        let Some(port) = self.endpoints[flight.to.index()].ports.get_mut(flight.nic) else { return false };
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
        let endpoint = &mut self.endpoints[rank.index()];
        let ordered = endpoint.fail_next > 0;
        endpoint.fail_next -= u32::from(ordered);
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
        if let Some(port) = self.endpoints.get_mut(rank.index()).and_then(|endpoint| endpoint.ports.get_mut(nic)) {
            port.stopped_until_ns = port.stopped_until_ns.max(until);
            self.counts.stops += 1;
        }
    }

    /// Whether `rank` can reach `peer`.
    fn reach(&self, rank: Rank, peer: Rank) -> Reach {
        let (from, to) = (&self.endpoints[rank.index()], &self.endpoints[peer.index()]);
        let known = |endpoint: &EndpointState, other: Rank| endpoint.channels.get(&other).map(|channel| channel.key);
        match to.alive {
            false => Reach::Dead,
            true if known(from, peer) == Some(to.key) && known(to, rank) == Some(from.key) => Reach::Open,
            true => Reach::Closed,
        }
    }

    /// Gives a flight a slot.
    fn board(&mut self, from: Rank, to: Rank, nic: usize, packets: u32, cargo: Cargo) -> u32 {
        let stamp = self.number();
        let channel = self.endpoints[from.index()].channels.get_mut(&to);
        let (number, channel) = channel.map_or((0, 0), |channel| {
            channel.posted += 1;
            (channel.posted, channel.id)
        });
        let completed = !matches!(cargo, Cargo::Write { .. });
        let flight = Flight {
            stamp,
            from,
            to,
            nic,
            channel,
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

    /// Lets a flight end without arriving, after `after_ns` or (`None`) never.
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
        if !self.endpoints.get(rank.index()).is_some_and(|endpoint| endpoint.alive) {
            return;
        }
        self.counts.deaths += 1;
        self.part(rank, Parting::Death);
        let endpoint = &mut self.endpoints[rank.index()];
        let life = endpoint.life;
        let ports = vec![Port::default(); endpoint.ports.len()];
        *endpoint = EndpointState { life, ports, ..EndpointState::default() };
    }

    pub(super) fn reset(&mut self, rank: Rank) {
        self.part(rank, Parting::Reset);
        let key = self.number();
        let endpoint = &mut self.endpoints[rank.index()];
        endpoint.key = key;
        endpoint.channels.clear();
        endpoint.revocations.clear();
        endpoint.notices.clear();
        endpoint.held.clear();
        endpoint.undelivered.retain(|pending| pending.slot().is_some());
        endpoint.ports.iter_mut().for_each(|port| port.receives = 0);
    }

    /// Takes a region of `rank` back, once its peers have let go of it, and drops the writes under way to it: of peers
    /// that were cut off, and those that completed before they arrived.
    pub(super) fn deregister(&mut self, rank: Rank, region: RegionId) -> Result<Released> {
        let used = self.endpoints[rank.index()].regions.give_up(region)?;
        let peers = (0..self.endpoints.len() as u32).map(Rank);
        let living: Vec<Rank> = peers.filter(|peer| self.reach(*peer, rank) == Reach::Open).collect();
        let revocations = &mut self.endpoints[rank.index()].revocations;
        let late = revocations.take_back(region, &living, self.now_ns, self.config.let_go_ns);
        self.exchange_notices(rank);
        let (Some(late), false) = (late, used) else { return Ok(Released::Busy) };
        self.counts.cut_off += u64::from(late > 0);
        self.endpoints[rank.index()].revocations.end(region);
        let released = self.endpoints[rank.index()].regions.take_back(region)?;
        for slot in 0..self.flights.len() {
            let bound = |flight: &&mut Flight| flight.to == rank && flight.is_bound_for(region);
            let Some(flight) = self.flights[slot].as_mut().filter(bound) else { continue };
            flight.arrived = true;
            let placed = flight.packets_left == 0;
            let completed = flight.completed;
            self.counts.dropped += u64::from(!placed);
            if placed && !completed {
                // The write completes as sent, and its immediate is not handed out.
                self.give_receive_back(slot as u32);
            } else if completed {
                self.remove(slot as u32);
            } else {
                self.miss_later(slot as u32, Some(0), Miss::Dropped);
            }
        }
        Ok(released)
    }

    /// Ends all flights that would still touch the memory of `rank`, or be handed out to it.
    fn part(&mut self, rank: Rank, how: Parting) {
        self.fail_outgoing(rank, |_| true, Reason::Flushed);
        for slot in 0..self.flights.len() {
            let Some(flight) = self.flights[slot].as_mut().filter(|flight| flight.to == rank) else { continue };
            if flight.arrived {
                continue;
            }
            self.counts.cut += 1;
            flight.arrived = true;
            if matches!(flight.cargo, Cargo::Notice(_)) {
                self.remove(slot as u32);
            } else if matches!(flight.cargo, Cargo::Message(_)) {
                let (from, id) = (flight.from, flight.channel);
                let held = how == Parting::Death && self.config.dead_peers == DeadPeers::Silent;
                let channel = self.endpoints[from.index()].channels.get_mut(&rank);
                if let Some(channel) = channel.filter(|channel| channel.id == id && !held) {
                    channel.messages = channel.messages.saturating_sub(1);
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

    /// Completes the outstanding writes of `rank` as failed. Writes that no longer need its memory may still arrive.
    fn fail_outgoing(&mut self, rank: Rank, which: impl Fn(&Flight) -> bool, reason: Reason) {
        for slot in 0..self.flights.len() {
            let chosen = |flight: &&mut Flight| flight.from == rank && which(flight);
            let Some(flight) = self.flights[slot].as_mut().filter(chosen) else { continue };
            let Cargo::Write { write, source, .. } = &flight.cargo else { continue };
            let reads_on = matches!(source, Source::Memory(_)) && flight.packets_left > 0 && !flight.arrived;
            if !flight.completed {
                let region = write.source.region;
                let slot = Slot { nic: flight.nic, peer: flight.to, channel: flight.channel, region };
                let pending = Pending::Missed { token: write.token, slot, miss: reason.into() };
                self.endpoints[rank.index()].complete(pending);
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
            self.endpoints[flight.to.index()].give_receive_back(flight.nic);
        }
    }

    pub(super) fn remove(&mut self, slot: u32) {
        self.give_receive_back(slot);
        self.flights[slot as usize] = None;
        self.free.push(slot);
    }
}

/// Whether a post can reach its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    Open,
    /// The peer lives, and is no longer (or not yet) connected both ways.
    Closed,
    Dead,
}
