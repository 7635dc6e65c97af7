//! The configuration of a simulated network: speeds, bounds and disturbances.

use super::counts::Counts;
use super::random::Random;
use crate::base::{Error, Result};
use crate::transport::network::imm::MAX_NICS;
use crate::transport::network::revoke::LET_GO_NS;
use crate::transport::network::{Limits, MAX_REGIONS};

/// Where the network's time comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// Time passes when [`Network::advance_ns`](super::Network::advance_ns) is called, and by `tick_ns` at each poll of
    /// any endpoint. With all ranks on one thread, all events depend on the seed alone.
    Virtual {
        /// How much time a poll takes; 0 leaves time to the caller.
        tick_ns: u64,
    },
    /// The operating system's monotonic clock.
    Real,
}

/// The outcome of writes to a peer that was killed or dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeadPeers {
    /// They fail after this time.
    Fail {
        /// From the post, or from the death.
        after_ns: u64,
    },
    /// They stay outstanding until their sender is reset.
    Silent,
}

/// The speed of one NIC, both ways.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkModel {
    /// Bits per nanosecond; infinite for no limit.
    pub gbps: f64,
    /// From the end of sending a packet to its placement, in an idle network.
    pub latency_us: f64,
    /// Time of every message on its sender's NIC before its first byte.
    pub per_message_us: f64,
}

impl LinkModel {
    /// No limit and no latency.
    pub const FREE: LinkModel = LinkModel { gbps: f64::INFINITY, latency_us: 0.0, per_message_us: 0.0 };

    pub(crate) fn ps_per_byte(&self) -> u64 {
        (8000.0 / self.gbps).round() as u64
    }

    pub(crate) fn latency_ns(&self) -> u64 {
        (self.latency_us * 1e3).round() as u64
    }

    pub(crate) fn per_message_ps(&self) -> u64 {
        (self.per_message_us * 1e6).round() as u64
    }

    /// Refuses impossible values.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_sane() {
            return Ok(());
        }
        Err(Error::config("nics", format!("{self:?}"), "give at least 0.001 Gb/s, and times from 0 to a second"))
    }

    pub(super) fn is_sane(&self) -> bool {
        let time = |us: f64| (0.0..=1e6).contains(&us);
        self.gbps >= 1e-3 && time(self.latency_us) && time(self.per_message_us)
    }
}

/// Everything about a simulated network. Chances are in thousandths; each draw comes from the one seed.
#[derive(Debug, Clone, PartialEq)]
pub struct SimConfig {
    /// Seed of all draws.
    pub seed: u64,
    /// Where time comes from.
    pub clock: Clock,
    /// The NICs of every rank.
    pub nics: Vec<LinkModel>,
    /// Payload of one packet; the last of a write may be shorter.
    pub packet_bytes: u32,
    /// Every packet, delivery and completion is late by up to so much, which reorders them.
    pub jitter_ns: u64,
    /// Chance of a packet or completion to be late by up to `delay_ns` more.
    pub delay_permille: u32,
    /// See `delay_permille`.
    pub delay_ns: u64,
    /// Chance of a completion to be late by up to `late_ns` besides, as if its acknowledgement were lost: longer than a
    /// whole exchange with another rank takes.
    pub late_permille: u32,
    /// See `late_permille`.
    pub late_ns: u64,
    /// Writes of one NIC that may be outstanding: posted, and their completion not handed out.
    pub nic_queue: u32,
    /// Writes of one NIC to one peer that may be outstanding.
    pub peer_queue: u32,
    /// Control messages to one peer that may be under way.
    pub message_queue: u32,
    /// Receives of one NIC: each write to the NIC takes a receive when it is posted; handing out its immediate frees
    /// the receive. A write without a free receive fails. `u32::MAX`: no bound, and the only choice between processes.
    pub receives: u32,
    /// Most bytes of a write; longer ones are refused.
    pub write_bytes: u32,
    /// Chance of a post or send to be answered `Full` though there is room.
    pub full_permille: u32,
    /// Chance of an accepted write to fail; nothing of it reaches the peer.
    pub fail_permille: u32,
    /// Chance of an accepted write to be read when posted, so that it may complete before anything arrives.
    pub eager_permille: u32,
    /// Chance of an accepted write to stay with its endpoint until that endpoint is flushed or polled.
    pub hold_permille: u32,
    /// Whether a write fails if its source has changed when it completes: until then a NIC may have to send it again.
    /// Between ranks of one process; endpoints of processes do not check.
    pub watch_sources: bool,
    /// Chance of a post to stop the sender's or the receiver's NIC, for up to `stop_ns`.
    pub stop_permille: u32,
    /// See `stop_permille`.
    pub stop_ns: u64,
    /// The outcome of writes to dead peers.
    pub dead_peers: DeadPeers,
    /// How long a peer may take to let go of a region that is taken back.
    pub let_go_ns: u64,
    /// Most events of one poll.
    pub poll_batch: usize,
    /// Whether bytes move. Without payload, a run computes only its packets' times, and registered spans are never
    /// touched: they need not be memory. For projections of large worlds.
    pub payload: bool,
}

impl SimConfig {
    /// A network without disturbances: one fast NIC, in order, without chance.
    pub fn calm() -> SimConfig {
        SimConfig {
            seed: 0,
            clock: Clock::Virtual { tick_ns: 100 },
            nics: vec![LinkModel::FREE],
            packet_bytes: 4096,
            jitter_ns: 0,
            delay_permille: 0,
            delay_ns: 0,
            late_permille: 0,
            late_ns: 0,
            nic_queue: 1024,
            peer_queue: 1024,
            message_queue: 64,
            receives: u32::MAX,
            write_bytes: u32::MAX,
            full_permille: 0,
            fail_permille: 0,
            eager_permille: 0,
            hold_permille: 0,
            watch_sources: false,
            stop_permille: 0,
            stop_ns: 0,
            dead_peers: DeadPeers::Fail { after_ns: 10_000 },
            let_go_ns: LET_GO_NS,
            poll_batch: 64,
            payload: true,
        }
    }

    /// A network that does everything that the promises leave open, and loses nothing: two NICs, small packets, short
    /// queues; with every fourth seed, lost acknowledgements.
    pub fn hostile(seed: u64) -> SimConfig {
        SimConfig {
            seed,
            nics: vec![LinkModel::FREE; 2],
            packet_bytes: 64,
            jitter_ns: 5_000,
            delay_permille: 20,
            delay_ns: 50_000,
            late_permille: if seed % 4 == 1 { 100 } else { 0 },
            late_ns: 400_000,
            nic_queue: 24,
            peer_queue: 16,
            message_queue: 4,
            full_permille: 30,
            eager_permille: 250,
            hold_permille: 300,
            watch_sources: true,
            stop_permille: 8,
            stop_ns: 40_000,
            poll_batch: 5,
            ..SimConfig::calm()
        }
    }

    /// The limits of its endpoints.
    pub(super) fn limits(&self) -> Limits {
        let posts = self.nic_queue.min(self.peer_queue);
        Limits { posts, receives: self.receives, regions: MAX_REGIONS, write_bytes: self.write_bytes }
    }

    /// The further delay of a completion.
    pub(super) fn lost_acknowledgement(&self, random: &mut Random, counts: &mut Counts) -> u64 {
        if !random.permille(self.late_permille) {
            return 0;
        }
        counts.completed_late += 1;
        random.up_to(self.late_ns)
    }

    pub(super) fn check(&self) -> Result<()> {
        let chances = [
            ("delay_permille", self.delay_permille),
            ("late_permille", self.late_permille),
            ("full_permille", self.full_permille),
            ("fail_permille", self.fail_permille),
            ("eager_permille", self.eager_permille),
            ("hold_permille", self.hold_permille),
            ("stop_permille", self.stop_permille),
        ];
        if let Some((name, value)) = chances.into_iter().find(|(_, value)| *value > 1000) {
            return Err(Error::config(name, value, "give a chance in thousandths"));
        }
        if self.full_permille == 1000 {
            return Err(Error::config("full_permille", self.full_permille, "leave some posts a chance"));
        }
        let sizes = [
            ("packet_bytes", self.packet_bytes),
            ("nic_queue", self.nic_queue),
            ("peer_queue", self.peer_queue),
            ("message_queue", self.message_queue),
            ("receives", self.receives),
            ("write_bytes", self.write_bytes),
            ("poll_batch", self.poll_batch.min(1) as u32),
        ];
        if let Some((name, value)) = sizes.into_iter().find(|(_, value)| *value == 0) {
            return Err(Error::config(name, value, "give at least 1"));
        }
        if self.nics.is_empty() || self.nics.len() > MAX_NICS {
            return Err(Error::config("nics", self.nics.len(), "give a rank 1 to 4 NICs"));
        }
        self.nics.iter().try_for_each(LinkModel::check)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Event, Network, Posted, RegionId, SimEndpoint, Span, Transport, WriteImm};
    use super::*;
    use crate::base::Rank;
    use crate::transport::network::Place;
    use crate::transport::network::imm::ImmValue;

    /// Two ranks, one write; the trace, and whether it arrived. Spans are at `bases`.
    fn write_once(config: SimConfig, bases: [u64; 2]) -> (u64, bool) {
        let network = Network::new(2, config).unwrap();
        let mut ends: Vec<SimEndpoint> = (0..2).map(|rank| network.endpoint(Rank(rank)).unwrap()).collect();
        for (end, base) in ends.iter_mut().zip(bases) {
            // SAFETY: a span that lives as long as the test, or one of a network that moves no payload.
            unsafe { end.register(Span::host(base, 10_000)).unwrap() };
        }
        let addresses: Vec<Vec<u8>> = ends.iter_mut().map(|end| end.address(Rank(0)).unwrap()).collect();
        ends[0].connect(Rank(1), &addresses[1]).unwrap();
        ends[1].connect(Rank(0), &addresses[0]).unwrap();
        let place = Place { region: RegionId(0), offset: 0 };
        let imm = ImmValue::user(0, 0, 7).unwrap();
        let write = WriteImm { nic: 0, peer: Rank(1), source: place, target: place, bytes: 10_000, imm, token: 0 };
        assert_eq!(ends[0].post(&write), Ok(Posted::Accepted));
        network.advance_ns(1_000_000);
        let mut arrived = false;
        ends[1].poll(&mut |event| arrived |= matches!(event, Event::Imm { .. })).unwrap();
        (network.trace_hash(), arrived)
    }

    #[test]
    fn without_payload_time_passes_alike_and_spans_are_not_touched() {
        for eager_permille in [0, 1000] {
            let calm = SimConfig { clock: Clock::Virtual { tick_ns: 0 }, eager_permille, ..SimConfig::calm() };
            let (source, target) = (vec![1u8; 10_000], vec![0u8; 10_000]);
            let bases = [source.as_ptr().expose_provenance() as u64, target.as_ptr().expose_provenance() as u64];
            let empty = SimConfig { payload: false, ..calm.clone() };
            let without = write_once(empty.clone(), bases);
            assert!(without.1 && target.iter().all(|byte| *byte == 0), "nothing was written");
            assert_eq!(write_once(empty, [1 << 12, 1 << 13]), without, "spans are never touched");
            let mut memory = [vec![1u8; 10_000], vec![0u8; 10_000]];
            let bases = memory.each_mut().map(|bytes| bytes.as_mut_ptr().expose_provenance() as u64);
            assert_eq!(write_once(calm, bases), without);
            assert_eq!(memory[0], memory[1]);
        }
    }
}
