//! Writes and messages under way, and their scheduled steps, which `traffic.rs` executes.

use super::endpoint_state::Miss;
use super::memory::Source;
use crate::base::Rank;
use crate::transport::network::revoke::Notice;
use crate::transport::network::{RegionId, WriteImm};
use std::cmp::Ordering;

#[derive(Debug)]
pub(super) enum Cargo {
    /// `target` is the address of the write's target.
    Write {
        write: WriteImm,
        source: Source,
        target: u64,
    },
    Message(Box<[u8]>),
    Notice(Notice),
}

#[derive(Debug)]
pub(super) struct Flight {
    /// Distinguishes it from earlier flights in the same slot.
    pub(super) stamp: u64,
    pub(super) from: Rank,
    pub(super) to: Rank,
    pub(super) nic: usize,
    /// The sender's channel in which it was posted.
    pub(super) channel: u64,
    /// Its number among all posts of that channel.
    pub(super) number: u64,
    pub(super) cargo: Cargo,
    pub(super) packets: u32,
    pub(super) packets_left: u32,
    /// One more than the highest packet that has been placed.
    pub(super) furthest: u32,
    /// Sum over the placed packets, where sources are watched.
    pub(super) sum: u64,
    /// It has taken a receive of its receiver's NIC.
    pub(super) holds_receive: bool,
    /// Its immediate or message was delivered, or never will be.
    pub(super) arrived: bool,
    /// Its completion was queued; messages and notices have none.
    pub(super) completed: bool,
    /// Why it will not arrive.
    pub(super) missing: Option<Miss>,
}

impl Flight {
    /// Whether it is a write of `from` to a region of `to` that has not completed.
    pub(super) fn is_outstanding(&self, from: Rank, to: Rank, region: RegionId) -> bool {
        let there = matches!(&self.cargo, Cargo::Write { write, .. } if write.target.region == region);
        there && (self.from, self.to) == (from, to) && !self.completed
    }

    /// Whether it will still write to a region of its receiver, or deliver its immediate.
    pub(super) fn is_bound_for(&self, region: RegionId) -> bool {
        let there = matches!(&self.cargo, Cargo::Write { write, .. } if write.target.region == region);
        there && !self.arrived
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// A packet reaches the receiver's NIC, or (`taken_in`) its memory.
    Packet {
        index: u32,
        taken_in: bool,
    },
    Deliver,
    Done,
}

/// A scheduled step of a flight.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Due {
    pub(super) at_ns: u64,
    /// Breaks ties in the order of scheduling.
    pub(super) number: u64,
    pub(super) slot: u32,
    pub(super) stamp: u64,
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
