//! A connection to a peer by one NIC: its queue pair, and what was posted to it.
//!
//! Place in the data path: between `post` and the queue pair. On the endpoint's thread.
//!
//! ```text
//!  unsent ── submit ──▶ posted ── completed, or taken by the peer ──▶ done
//!    ▲                    │
//!    └── the rest, once ──┘
//!        a broken connection has been opened again
//! ```

use super::address::End;
use super::config::VerbsConfig;
use super::ibverbs_sys::ibv_qp;
use super::objects::Object;
use super::resumption::Resumption;
use crate::transport::network::Failure;
use std::collections::VecDeque;

/// A connection. What is posted has numbers: of writes on a NIC, or of messages.
#[derive(Debug)]
pub(super) struct Channel {
    pub pair: Object<ibv_qp>,
    pub own: End,
    /// The peer's, once connected.
    pub other: Option<End>,
    pub resumption: Resumption,
    /// Distinguishes completions of this opening from those of former ones.
    pub opening: u32,
    /// How many the peer has taken, as far as is known: the number in the sequence of the first that is posted.
    pub done: u64,
    pub posted: VecDeque<u32>,
    pub unsent: VecDeque<u32>,
    /// Which in the sequence can never be carried out, and why.
    pub offence: Option<(u64, Failure)>,
    /// Why it broke.
    pub cause: Option<Failure>,
    /// Since when nothing has got through; 0: it works.
    pub stalled_ns: u64,
    /// When it was opened last, and when it is to be opened next.
    pub opened_ns: u64,
    pub retry_ns: u64,
    /// How many were posted, and failed before the peer reported whether it took them.
    pub given_up: u64,
    /// The peer's counts contradict what it acknowledged: it is not resumed.
    pub lost: bool,
    /// Of both endpoints' keys: packets of former endpoints are refused.
    pub salt: u32,
    /// Bytes that a request carries itself.
    pub inline: u32,
    /// When what it took is counted, at the latest.
    pub counted_ns: u64,
    /// The device takes nothing more for it.
    pub drained: bool,
    /// Events of former closings that have not come: they say nothing of this one.
    pub owed_events: u32,
    /// When it reports next.
    pub report_ns: u64,
    /// Notices of the peer that must have come before posts go out.
    pub notices: u32,
}

impl Channel {
    pub fn new(pair: Object<ibv_qp>, own: End, inline: u32, room: usize) -> Channel {
        Channel {
            pair,
            own,
            other: None,
            resumption: Resumption::new(),
            opening: 0,
            done: 0,
            posted: VecDeque::with_capacity(room),
            unsent: VecDeque::with_capacity(room),
            offence: None,
            cause: None,
            stalled_ns: 0,
            opened_ns: 0,
            retry_ns: 0,
            given_up: 0,
            lost: false,
            salt: 0,
            inline,
            counted_ns: 0,
            drained: false,
            owed_events: 0,
            report_ns: 0,
            notices: 0,
        }
    }

    /// The number in the sequence of the next that is posted.
    pub fn next(&self) -> u64 {
        self.done + self.posted.len() as u64
    }

    /// Whether nothing has got through for longer than a peer may take to resume.
    pub fn is_late(&self, now_ns: u64, config: &VerbsConfig) -> bool {
        self.lost || self.stalled_ns != 0 && now_ns.saturating_sub(self.stalled_ns) > config.resume_within_ns()
    }

    /// It has just broken. What it took long to carry out before does not count.
    pub fn stall(&mut self, now_ns: u64, config: &VerbsConfig) {
        if self.stalled_ns == 0 || now_ns.saturating_sub(self.opened_ns) > config.resume_within_ns() {
            self.stalled_ns = now_ns.max(1);
        }
    }

    /// Whether the peer can have taken so many.
    pub fn admits(&self, count: u64) -> bool {
        let most = self.next().saturating_add(self.given_up);
        (self.done..=most).contains(&count)
    }

    /// The peer has taken so many: answers those of them that were posted, which leave it.
    pub fn confirm(&mut self, count: u64) -> impl Iterator<Item = u32> + '_ {
        let steps = count.saturating_sub(self.done) as usize;
        self.done = self.done.max(count);
        let steps = steps.min(self.posted.len());
        self.posted.drain(..steps)
    }

    /// The connection is open again behind what the peer has taken: the rest is posted anew.
    pub fn rewind(&mut self, count: u64) {
        (self.done, self.given_up) = (count, 0);
        while let Some(number) = self.posted.pop_back() {
            self.unsent.push_front(number);
        }
    }

    /// The device has reported that it takes nothing more. Each closing of a queue pair gives one such event, which may
    /// come after the next opening.
    pub fn drain_reported(&mut self) {
        match self.owed_events.checked_sub(1) {
            Some(left) => self.owed_events = left,
            None => self.drained = true,
        }
    }

    /// The closing has ended.
    pub fn closed(&mut self) {
        self.owed_events += u32::from(!self.drained);
        self.resumption.closed();
    }

    /// A new connection to another endpoint. What waited is the caller's to end.
    pub fn start(&mut self, other: End, salt: u32) {
        (self.other, self.salt) = (Some(other), salt);
        self.owed_events += u32::from(self.resumption.is_closing() && !self.drained);
        self.resumption = Resumption::new();
        self.posted.clear();
        self.unsent.clear();
        (self.done, self.notices) = (0, 0);
        (self.offence, self.cause) = (None, None);
        (self.stalled_ns, self.opened_ns, self.retry_ns, self.given_up) = (0, 0, 0, 0);
        (self.drained, self.lost) = (false, false);
    }
}
