//! The steps of a flight as time passes.
//!
//! ```text
//!            launch                         last packet placed
//!  boarded ─────────▶ packets placed in any ──────────────────▶ Deliver ──▶ Imm or Message at the receiver
//!     │               order, at any time   └──────────────────▶ Done ─────▶ Sent at the sender
//!     │                                      (eager: from the start)
//!     └─ fails, or its peer is not there ────────────────────▶ Done ─────▶ Failed
//! ```
//!
//! A flight keeps its slot until it has both arrived and completed. Deaths and resets take packets away in
//! `state.rs`; a step that finds another flight in its slot, or none, does nothing.

use super::endpoint_state::{Pending, Slot};
use super::flight::{Cargo, Due, Flight, Step};
use super::memory::Source;
use super::state::State;
use crate::base::Rank;
use crate::transport::network::{Reason, WriteImm};

impl State {
    pub(super) fn schedule(&mut self, at_ns: u64, slot: u32, step: Step) {
        let Some(stamp) = self.flights[slot as usize].as_ref().map(|flight| flight.stamp) else { return };
        let number = self.number();
        self.due.push(Due { at_ns, number, slot, stamp, step });
    }

    /// When the next step is due.
    pub(super) fn next_due_ns(&self) -> Option<u64> {
        self.due.peek().map(|due| due.at_ns)
    }

    /// Sends a boarded flight on its way: schedules its packets through the sender's NIC.
    pub(super) fn launch(&mut self, slot: u32) {
        let Some(flight) = self.flights[slot as usize].as_ref() else { return };
        let (from, nic, packets) = (flight.from, flight.nic, flight.packets);
        let (bytes, eager) = match &flight.cargo {
            Cargo::Write { write, source, .. } => (write.bytes, matches!(source, Source::Taken(_))),
            Cargo::Message(message) => (message.len() as u32, false),
            Cargo::Notice(_) => (0, false),
        };
        let model = self.config.nics[nic];
        let now_ps = self.now_ns * 1000;
        let mut sent_ps = self.endpoints[from.index()].ports[nic].sends_until_ps.max(now_ps) + model.per_message_ps();
        for index in 0..packets {
            sent_ps += u64::from(self.packet_len(bytes, index)) * model.ps_per_byte();
            let late = self.lateness();
            self.schedule(
                sent_ps.div_ceil(1000) + model.latency_ns() + late,
                slot,
                Step::Packet { index, taken_in: false },
            );
        }
        self.endpoints[from.index()].ports[nic].sends_until_ps = sent_ps;
        if eager {
            let at_ns = self.now_ns + self.jitter();
            self.schedule(at_ns, slot, Step::Done);
        }
    }

    fn lateness(&mut self) -> u64 {
        let late = self.jitter();
        if !self.random.permille(self.config.delay_permille) {
            return late;
        }
        self.counts.delayed += 1;
        late + self.random.up_to(self.config.delay_ns)
    }

    fn packet_len(&self, bytes: u32, index: u32) -> u32 {
        let start = index * self.config.packet_bytes;
        (bytes - start).min(self.config.packet_bytes)
    }

    /// Lets time pass, and executes all steps that are due by then.
    pub(super) fn run_until(&mut self, to_ns: u64) {
        while self.due.peek().is_some_and(|due| due.at_ns <= to_ns) {
            let Some(due) = self.due.pop() else { break };
            self.now_ns = self.now_ns.max(due.at_ns);
            let place = &mut self.flights[due.slot as usize];
            let Some(mut flight) = place.take_if(|flight| flight.stamp == due.stamp) else { continue };
            self.happen(&mut flight, &due);
            if flight.arrived && flight.completed {
                self.free.push(due.slot);
            } else {
                self.flights[due.slot as usize] = Some(flight);
            }
        }
        self.now_ns = self.now_ns.max(to_ns);
    }

    fn happen(&mut self, flight: &mut Flight, due: &Due) {
        match due.step {
            Step::Packet { .. } if flight.arrived => {}
            Step::Packet { index, taken_in: false } => {
                if let Some(at_ns) = self.held_back(flight) {
                    self.counts.stalled += 1;
                    self.again(due, at_ns, Step::Packet { index, taken_in: false });
                } else if let Some(at_ns) = self.take_in(flight, index) {
                    self.again(due, at_ns, Step::Packet { index, taken_in: true });
                } else {
                    self.place(flight, index, due);
                }
            }
            Step::Packet { index, taken_in: true } => self.place(flight, index, due),
            Step::Deliver if flight.arrived => {}
            Step::Deliver => self.deliver(flight),
            Step::Done if flight.completed => {}
            Step::Done => self.done(flight),
        }
    }

    /// Schedules a step of the present flight, which is not in its slot while it is handled.
    fn again(&mut self, due: &Due, at_ns: u64, step: Step) {
        let number = self.number();
        self.due.push(Due { at_ns, number, slot: due.slot, stamp: due.stamp, step });
    }

    /// When a packet may try again, if a NIC on its way is stopped.
    fn held_back(&mut self, flight: &Flight) -> Option<u64> {
        let until = |rank: Rank| self.endpoints[rank.index()].ports[flight.nic].stopped_until_ns;
        let until_ns = until(flight.from).max(until(flight.to));
        (until_ns > self.now_ns).then(|| until_ns + self.jitter())
    }

    /// When the receiver's NIC has taken a packet in, if it is busy with others.
    fn take_in(&mut self, flight: &Flight, index: u32) -> Option<u64> {
        let Cargo::Write { write, .. } = &flight.cargo else { return None };
        let needed_ps = u64::from(self.packet_len(write.bytes, index)) * self.config.nics[flight.nic].ps_per_byte();
        let now_ps = self.now_ns * 1000;
        let port = &mut self.endpoints[flight.to.index()].ports[flight.nic];
        // An idle NIC takes a packet in while it arrives: only its last byte, which arrives now, is left.
        port.receives_until_ps = (port.receives_until_ps + needed_ps).max(now_ps);
        let at_ns = port.receives_until_ps.div_ceil(1000);
        (at_ns > self.now_ns).then_some(at_ns)
    }

    fn place(&mut self, flight: &mut Flight, index: u32, due: &Due) {
        if let Cargo::Write { source, target, write } = &flight.cargo
            && self.config.payload
        {
            let start = index * self.config.packet_bytes;
            let len = self.packet_len(write.bytes, index);
            // SAFETY: `post` found source and target inside regions of living endpoints; the lock that taking regions
            // back takes is held, and when they went, this flight was removed or marked as arrived.
            unsafe { source.copy(start, target + u64::from(start), len) };
            if self.config.watch_sources {
                // SAFETY: as above.
                flight.sum = flight.sum.wrapping_add(unsafe { source.sum(start, len) });
            }
        }
        self.counts.packets += 1;
        self.counts.packets_out_of_order += u64::from(index < flight.furthest);
        self.note(flight, u64::from(index));
        flight.furthest = flight.furthest.max(index + 1);
        flight.packets_left -= 1;
        if flight.packets_left > 0 {
            return;
        }
        let at_ns = self.now_ns + self.jitter();
        self.again(due, at_ns, Step::Deliver);
        let at_ns = self.now_ns + self.config.nics[flight.nic].latency_ns() + self.lateness();
        let at_ns = at_ns + self.config.lost_acknowledgement(&mut self.random, &mut self.counts);
        self.again(due, at_ns, Step::Done);
    }

    fn deliver(&mut self, flight: &mut Flight) {
        flight.arrived = true;
        self.note(flight, u64::MAX);
        let channel = self.endpoints[flight.from.index()].channels.get_mut(&flight.to);
        if let Some(channel) = channel.filter(|channel| channel.id == flight.channel) {
            self.counts.reordered += u64::from(flight.number < channel.delivered);
            channel.delivered = channel.delivered.max(flight.number);
            channel.messages -= u32::from(matches!(flight.cargo, Cargo::Message(_)));
        }
        let to = &mut self.endpoints[flight.to.index()];
        match &mut flight.cargo {
            Cargo::Write { write, .. } => {
                // The receive is the immediate's from now on.
                flight.holds_receive = false;
                to.undelivered.push_back(Pending::Imm { imm: write.imm, nic: flight.nic });
            }
            Cargo::Message(bytes) => {
                to.undelivered.push_back(Pending::Message { peer: flight.from, bytes: std::mem::take(bytes) });
            }
            Cargo::Notice(notice) => to.notices.push((flight.from, *notice)),
        }
    }

    fn done(&mut self, flight: &mut Flight) {
        flight.completed = true;
        if flight.missing.is_none() && self.has_changed(flight) {
            // Its source was changed before it completed.
            flight.missing = Some(Reason::Local.into());
        }
        let Cargo::Write { write: WriteImm { token, source, .. }, .. } = flight.cargo else { return };
        self.note(flight, u64::MAX - 1);
        let slot = Slot { nic: flight.nic, peer: flight.to, channel: flight.channel, region: source.region };
        let pending = match flight.missing {
            Some(miss) => Pending::Missed { token, slot, miss },
            None => Pending::Sent { token, slot },
        };
        self.counts.completed_early += u64::from(flight.missing.is_none() && flight.packets_left > 0);
        self.endpoints[flight.from.index()].complete(pending);
    }

    /// Whether a watched source has changed since it was sent.
    fn has_changed(&self, flight: &Flight) -> bool {
        let Cargo::Write { source, write, .. } = &flight.cargo else { return false };
        if !self.config.watch_sources || !self.config.payload || flight.packets_left > 0 {
            return false;
        }
        let sum_of = |index: u32| {
            // SAFETY: `post` found the source inside a region of the sender, which it keeps until the completion is
            // handed out; where it went away, this flight was completed or removed. The lock that taking it back takes
            // is held.
            unsafe { source.sum(index * self.config.packet_bytes, self.packet_len(write.bytes, index)) }
        };
        (0..flight.packets).map(sum_of).fold(0, u64::wrapping_add) != flight.sum
    }

    /// Adds an event to the trace.
    fn note(&mut self, flight: &Flight, what: u64) {
        for word in [self.now_ns, u64::from(flight.from.0), u64::from(flight.to.0), flight.number, what] {
            self.trace = (self.trace.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
    }
}
