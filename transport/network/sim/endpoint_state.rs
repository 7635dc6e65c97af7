//! One rank's side of the network: its memory, its peers, its queues, and the events for its next polls.

use crate::base::{Error, Rank, Result};
use crate::transport::network::imm::{ImmValue, MAX_NICS};
use crate::transport::network::regions::{Regions, fits, outside};
use crate::transport::network::revoke::{Notice, Revocations};
use crate::transport::network::{Event, Failure, MAX_MESSAGE, Reason, RegionId, WriteImm};
use std::collections::{BTreeMap, VecDeque};

/// The code of writes that fail by chance or by order.
pub(super) const INJECTED: u32 = 0x51;

/// A peer, as the address that was connected described it.
#[derive(Debug, Default)]
pub(super) struct Channel {
    /// The endpoint's key; after a drop or reset, it is never used again.
    pub(super) key: u64,
    /// Distinguishes it from earlier channels between the same ranks: each has its own counts.
    pub(super) id: u64,
    /// Lengths of its regions; 0 for a region that was taken back.
    pub(super) regions: Vec<u64>,
    /// Writes outstanding, by NIC.
    pub(super) outstanding: [u32; MAX_NICS],
    /// Messages under way.
    pub(super) messages: u32,
    /// Writes and messages posted so far; numbers them.
    pub(super) posted: u64,
    /// The highest such number that was delivered.
    pub(super) delivered: u64,
}

/// One NIC of a rank.
#[derive(Debug, Default, Clone)]
pub(super) struct Port {
    /// When it has sent all posted writes, in picoseconds.
    pub(super) sends_until_ps: u64,
    /// When it has taken in all packets that have reached it, in picoseconds.
    pub(super) receives_until_ps: u64,
    /// It moves nothing before this time.
    pub(super) stopped_until_ns: u64,
    /// Writes outstanding.
    pub(super) outstanding: u32,
    /// Receives taken: by writes under way to this NIC, and by immediates that were not handed out.
    pub(super) receives: u32,
}

/// Which queue slots a completion frees.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub(super) nic: usize,
    pub(super) peer: Rank,
    /// The channel in which it was posted.
    pub(super) channel: u64,
    /// The region it was posted from.
    pub(super) region: RegionId,
}

/// Why a write completes without having arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Miss {
    Failed(Failure),
    /// Its target was taken back.
    Dropped,
}

impl From<Reason> for Miss {
    fn from(reason: Reason) -> Miss {
        Miss::Failed(reason.into())
    }
}

impl Miss {
    /// Of a write that fails by chance or by order.
    pub(super) const INJECTED: Miss = Miss::Failed(Failure { reason: Reason::Other, code: INJECTED });
}

/// An event for a later poll.
#[derive(Debug)]
pub(super) enum Pending {
    Sent { token: u64, slot: Slot },
    Missed { token: u64, slot: Slot, miss: Miss },
    Imm { imm: ImmValue, nic: usize },
    Message { peer: Rank, bytes: Box<[u8]> },
}

impl Pending {
    /// Of a completion.
    pub(super) fn slot(&self) -> Option<Slot> {
        match self {
            Pending::Sent { slot, .. } | Pending::Missed { slot, .. } => Some(*slot),
            Pending::Imm { .. } | Pending::Message { .. } => None,
        }
    }

    pub(super) fn event(&self) -> Event<'_> {
        match self {
            Pending::Sent { token, .. } => Event::Sent { token: *token },
            Pending::Missed { token, slot, miss: Miss::Failed(failure) } => {
                Event::Failed { token: *token, peer: slot.peer, failure: *failure }
            }
            Pending::Missed { token, slot, miss: Miss::Dropped } => Event::Dropped { token: *token, peer: slot.peer },
            Pending::Imm { imm, .. } => Event::Imm { imm: *imm },
            Pending::Message { peer, bytes } => Event::Message { peer: *peer, bytes },
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct EndpointState {
    pub(super) alive: bool,
    /// Counts the endpoints that this rank has had, so that a former endpoint cannot act for the present one.
    pub(super) life: u64,
    pub(super) key: u64,
    pub(super) regions: Regions,
    pub(super) channels: BTreeMap<Rank, Channel>,
    pub(super) ports: Vec<Port>,
    pub(super) undelivered: VecDeque<Pending>,
    pub(super) revocations: Revocations,
    /// Notices that have arrived, for the next poll.
    pub(super) notices: Vec<(Rank, Notice)>,
    /// Writes that stay until the next flush or poll: their slots and stamps.
    pub(super) held: Vec<(u32, u64)>,
    /// How many of the next writes fail.
    pub(super) fail_next: u32,
}

impl EndpointState {
    /// Queues a completion, unless the rank has no endpoint.
    pub(super) fn complete(&mut self, pending: Pending) {
        if self.alive {
            self.undelivered.push_back(pending);
        }
    }

    /// Takes the next event, and frees its slots.
    pub(super) fn take(&mut self) -> Option<Pending> {
        let pending = self.undelivered.pop_front()?;
        if let Some(slot) = pending.slot() {
            self.free(slot);
        }
        if let Pending::Imm { nic, .. } = pending {
            self.give_receive_back(nic);
        }
        Some(pending)
    }

    /// Frees one receive of a NIC.
    pub(super) fn give_receive_back(&mut self, nic: usize) {
        if let Some(port) = self.ports.get_mut(nic) {
            port.receives = port.receives.saturating_sub(1);
        }
    }

    fn free(&mut self, slot: Slot) {
        self.regions.completed(slot.region);
        if let Some(port) = self.ports.get_mut(slot.nic) {
            port.outstanding = port.outstanding.saturating_sub(1);
        }
        if let Some(channel) = self.channels.get_mut(&slot.peer).filter(|channel| channel.id == slot.channel) {
            channel.outstanding[slot.nic] = channel.outstanding[slot.nic].saturating_sub(1);
        }
    }

    /// The address of a write's source, if the write is valid and has at most `most` bytes.
    pub(super) fn admit(&self, write: &WriteImm, most: u32) -> Result<u64> {
        if usize::from(write.nic) >= self.ports.len() {
            let advice = format!("there are {} NICs, counted from 0", self.ports.len());
            return Err(Error::argument("nic", write.nic, advice));
        }
        if write.bytes > most {
            return Err(Error::argument("bytes", write.bytes, format!("a write has at most {most}; cut it")));
        }
        let channel = self.channel(write.peer)?;
        let Some(source) = self.regions.locate(write.source, write.bytes) else {
            return Err(outside("source", write, self.regions.length(write.source.region)));
        };
        let length = channel.regions.get(usize::from(write.target.region.0)).copied();
        if length.is_none_or(|length| !fits(length, write.target.offset, write.bytes)) {
            return Err(outside("target", write, length.filter(|length| *length > 0)));
        }
        Ok(source)
    }

    pub(super) fn admit_message(&self, peer: Rank, message: &[u8]) -> Result<()> {
        self.channel(peer)?;
        if message.len() > MAX_MESSAGE {
            let advice = format!("send at most {MAX_MESSAGE} bytes at once");
            return Err(Error::argument("message", format!("{} bytes", message.len()), advice));
        }
        Ok(())
    }

    fn channel(&self, peer: Rank) -> Result<&Channel> {
        self.channels.get(&peer).ok_or_else(|| Error::argument("peer", peer, "connect to it with its address first"))
    }
}
