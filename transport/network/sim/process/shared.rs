//! State that both halves of an endpoint share: configuration, time, random generator, queues, and due steps.
//!
//! Place in the data path: under `outbound.rs` and `inbound.rs`. Runs on the thread that posts and polls. It uses
//! no sockets and never touches registered memory.

use super::Refused;
use crate::base::Rank;
use crate::transport::network::revoke::Notice;
use crate::transport::network::sim::config::{Clock, SimConfig};
use crate::transport::network::sim::counts::Counts;
use crate::transport::network::sim::endpoint_state::{EndpointState, Port};
use crate::transport::network::sim::random::Random;
use nix::time::{ClockId, clock_gettime};
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// Virtual time ends here, after some hundred days: enough, and far from overflowing.
const END_NS: u64 = 1 << 53;
/// Frames read from one connection in a poll, so that one busy peer does not hold up the others.
pub(super) const READS_PER_POLL: usize = 16;

/// A write or message, by the channel in which it was posted and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FlightId {
    pub(super) channel: u64,
    pub(super) number: u64,
}

/// A write or message that arrives, by its connection and its sender's number. A sender can use a number again. Packets
/// of the former arrival must not be taken for the new one's, so each arrival has a serial of this endpoint.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival {
    pub(super) guest: u64,
    pub(super) number: u64,
    pub(super) serial: u64,
}

/// A part of a write on its way from the NIC to memory.
#[derive(Debug)]
pub(super) struct Packet {
    pub(super) arrival: Arrival,
    pub(super) piece: Arc<[u8]>,
    /// Where it begins, in bytes, in the write, and in its piece.
    pub(super) at: u32,
    pub(super) start: u32,
    pub(super) len: u32,
    /// Its NIC has taken it in.
    pub(super) taken_in: bool,
}

/// A scheduled step.
#[derive(Debug)]
pub(super) enum Step {
    /// The next piece of a write, or a message, leaves its NIC.
    Depart(FlightId),
    /// A write completes.
    Done(FlightId),
    /// A packet reaches its NIC, or (if taken in) its memory.
    Packet(Packet),
    /// An immediate or a message is handed out.
    Deliver(Arrival),
    /// A peer's notice arrives.
    Notice(Rank, Notice),
}

#[derive(Debug)]
pub(super) struct Due {
    pub(super) at_ns: u64,
    /// Breaks ties in the order of scheduling.
    number: u64,
    pub(super) step: Step,
}

impl Ord for Due {
    /// The earliest is the greatest: a binary heap hands out its greatest.
    fn cmp(&self, other: &Due) -> Ordering {
        (other.at_ns, other.number).cmp(&(self.at_ns, self.number))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Due) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Due) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Due {}

#[derive(Debug)]
pub(super) struct Core {
    pub(super) rank: Rank,
    pub(super) config: SimConfig,
    pub(super) random: Random,
    pub(super) endpoint: EndpointState,
    pub(super) counts: Counts,
    pub(super) refused: Refused,
    /// Time of this endpoint's own clock.
    pub(super) now_ns: u64,
    /// The host's clock when this endpoint's clock began.
    origin_ns: u64,
    agenda: BinaryHeap<Due>,
    /// Numbers channels, guests and steps: none is used twice.
    numbers: u64,
    /// When the last executed step was due.
    #[cfg(test)]
    pub(super) last_ns: u64,
}

impl Core {
    pub(super) fn new(rank: Rank, key: u64, config: SimConfig) -> Core {
        let ports = vec![Port::default(); config.nics.len()];
        Core {
            rank,
            // One seed for all, and for each rank its own sequence.
            random: Random::new(config.seed.wrapping_add(u64::from(rank.0) << 32)),
            endpoint: EndpointState { alive: true, key, ports, ..EndpointState::default() },
            counts: Counts::default(),
            refused: Refused::default(),
            now_ns: 0,
            origin_ns: monotonic_ns(),
            agenda: BinaryHeap::new(),
            numbers: 0,
            #[cfg(test)]
            last_ns: 0,
            config,
        }
    }

    pub(super) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    // ---- time

    /// Reads the clock, if it is the real one.
    pub(super) fn look(&mut self) {
        if self.config.clock == Clock::Real {
            self.now_ns = self.now_ns.max(monotonic_ns().saturating_sub(self.origin_ns));
        }
    }

    /// A poll begins.
    pub(super) fn tick(&mut self) {
        self.look();
        if let Clock::Virtual { tick_ns } = self.config.clock {
            self.now_ns = self.now_ns.saturating_add(tick_ns).min(END_NS);
        }
    }

    /// A time of this endpoint as others can read it. Virtual time means nothing to them: the stamp is then the
    /// present.
    pub(super) fn stamp(&self, at_ns: u64) -> u64 {
        match self.config.clock {
            Clock::Virtual { .. } => u64::MAX,
            Clock::Real => at_ns.saturating_add(self.origin_ns),
        }
    }

    /// The time of another endpoint's stamp; never in the future, whatever the stamp.
    pub(super) fn unstamp(&self, stamp_ns: u64) -> u64 {
        match self.config.clock {
            Clock::Virtual { .. } => self.now_ns,
            Clock::Real => stamp_ns.saturating_sub(self.origin_ns).min(self.now_ns),
        }
    }

    pub(super) fn schedule(&mut self, at_ns: u64, step: Step) {
        let number = self.number();
        self.agenda.push(Due { at_ns, number, step });
    }

    /// The next step that is due by now, the earliest first.
    pub(super) fn next_due(&mut self) -> Option<Due> {
        let next_ns = self.agenda.peek()?.at_ns;
        if next_ns > self.now_ns {
            return None;
        }
        #[cfg(test)]
        {
            self.last_ns = next_ns;
        }
        self.agenda.pop()
    }

    #[cfg(test)]
    pub(super) fn scheduled(&self) -> usize {
        self.agenda.len()
    }

    /// Drops all scheduled steps.
    pub(super) fn clear_agenda(&mut self) {
        self.agenda.clear();
    }

    // ---- chance

    pub(super) fn jitter(&mut self) -> u64 {
        let most = self.config.jitter_ns;
        self.random.up_to(most)
    }

    pub(super) fn lateness(&mut self) -> u64 {
        let late = self.jitter();
        if !self.random.permille(self.config.delay_permille) {
            return late;
        }
        self.counts.delayed += 1;
        late.saturating_add(self.random.up_to(self.config.delay_ns))
    }

    /// Whether to answer `Full`.
    pub(super) fn is_full(&mut self, room: bool) -> bool {
        let injected = room && self.random.permille(self.config.full_permille);
        self.counts.full += u64::from(!room || injected);
        self.counts.full_injected += u64::from(injected);
        !room || injected
    }

    /// Whether a write that was just accepted fails, by order or by chance.
    pub(super) fn fails(&mut self) -> bool {
        let ordered = self.endpoint.fail_next > 0;
        self.endpoint.fail_next -= u32::from(ordered);
        ordered || self.random.permille(self.config.fail_permille)
    }

    /// Stops a NIC by chance. Each write draws twice, at its sender and at its receiver, each with half the chance.
    pub(super) fn maybe_stop(&mut self, nic: usize) {
        if self.random.permille(self.config.stop_permille) && self.random.up_to(1) == 0 {
            let for_ns = self.random.up_to(self.config.stop_ns);
            self.stop(nic, for_ns);
        }
    }

    pub(super) fn stop(&mut self, nic: usize, for_ns: u64) {
        let until_ns = self.now_ns.saturating_add(for_ns);
        if let Some(port) = self.endpoint.ports.get_mut(nic) {
            port.stopped_until_ns = port.stopped_until_ns.max(until_ns);
            self.counts.stops += 1;
        }
    }

    /// When a packet that would pass a NIC at `at_ns` may try again, if the NIC is stopped then.
    pub(super) fn held_back(&mut self, nic: usize, at_ns: u64) -> Option<u64> {
        let until_ns = self.endpoint.ports[nic].stopped_until_ns;
        if until_ns <= at_ns {
            return None;
        }
        self.counts.stalled += 1;
        Some(until_ns.saturating_add(self.jitter()))
    }
}

/// The host's monotonic clock, which its processes share.
fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(std::time::Duration::ZERO, std::time::Duration::from);
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
