//! Which peers are alive: heartbeats out, signs of life in, and peers that have been silent for too long.
//!
//! ```text
//!                 first sign of life                 silent for silence_ns, a write failed
//!   Expected ───────────────────────────▶ Alive ───────────────────────────────────────────▶ Lost
//!      │                                    │                                                  ▲
//!      │ silent for first_contact_ns, a write failed                                           │
//!      └───────────────────────────────────────────────────────────────────────────────────────┘
//!                                           │ Leave                                            │
//!                                           └────────▶ Left ───────────────────────────────────┘
//!                                                           silent for silence_ns, and it owes a message
//! ```
//!
//! A peer that no open context names any more is **Parted**: the peer may still have a context open, and would miss
//! this rank. So this rank sends it heartbeats until it leaves or has been silent for `first_contact_ns`; its silence
//! is no loss.
//!
//! A peer that has reported to be **busy** has `first_contact_ns`: its thread registers memory or connects, and cannot
//! send heartbeats meanwhile. Each message carries the sender's sequence (control.rs); of two messages, the later
//! sequence holds, whichever comes last.
//!
//! Opening a context that names a peer sets it to Expected, unless it is Alive. Nothing is sent to a lost peer, so that
//! a loss seen by one side is soon seen by both.

use super::control::{Control, Life, Sequence};
use super::{Answer, Liveness, Outputs};
use crate::base::Rank;
use crate::proxy::wire::ContextIdx;
use std::collections::VecDeque;

/// Most heartbeats sent in one pass: bounds the pass's cost beside data.
const HEARTBEATS_PER_POLL: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// No open context names it.
    Unlinked,
    /// No open context names it any more.
    Parted,
    Expected,
    Alive,
    Left,
    Lost,
}

#[derive(Debug, Clone, Copy)]
struct Peer {
    state: State,
    received_ns: u64,
    /// Its latest sequence, if one was received since a context named it anew.
    sequence: Option<Sequence>,
    /// Whether it is queued for a heartbeat.
    due: bool,
    /// Its devices' signs of life, as last received.
    life: Life,
}

/// A peer that was silent for too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Silent {
    pub peer: Rank,
    pub silent_ns: u64,
    /// Its state until then: expected, alive, or gone in good order.
    pub state: State,
}

/// All peers that open contexts name, or did.
#[derive(Debug)]
pub(super) struct Peers {
    own: Rank,
    liveness: Liveness,
    now_ns: u64,
    /// By rank.
    table: Vec<Peer>,
    /// The peers that are checked and sent a heartbeat one after the other, evenly over `heartbeat_ns`.
    linked: Vec<Rank>,
    next: usize,
    next_ns: u64,
    /// Peers whose heartbeat is due, each at most once; a peer whose queue is full goes to the end.
    due: VecDeque<Rank>,
    leaving: bool,
    /// This rank's own sequence: whether it is busy, and how often it was.
    sequence: Sequence,
}

impl Peers {
    pub fn new(own: Rank, world: usize, liveness: Liveness) -> Peers {
        Peers {
            own,
            liveness,
            now_ns: 0,
            table: vec![
                Peer {
                    state: State::Unlinked,
                    received_ns: 0,
                    sequence: None,
                    due: false,
                    life: Life::default()
                };
                world
            ],
            linked: Vec::with_capacity(world),
            next: 0,
            next_ns: 0,
            due: VecDeque::with_capacity(world),
            leaving: false,
            sequence: Sequence::default(),
        }
    }

    /// Sets the peers of all open contexts; `fresh` are those of a context that was just opened.
    pub fn link(&mut self, all: impl Iterator<Item = Rank>, fresh: impl Iterator<Item = Rank>) {
        self.linked.clear();
        self.next = 0;
        self.next_ns = self.next_ns.max(self.now_ns);
        for rank in all {
            if !self.linked.contains(&rank) {
                self.linked.push(rank);
            }
        }
        for (rank, peer) in self.table.iter_mut().enumerate() {
            let rank = Rank(rank as u32);
            if self.linked.contains(&rank) {
                continue;
            }
            peer.state = match peer.state {
                State::Expected | State::Alive | State::Parted => State::Parted,
                State::Unlinked | State::Left => State::Unlinked,
                State::Lost => State::Lost,
            };
            if peer.state == State::Parted {
                self.linked.push(rank);
            }
        }
        for rank in fresh {
            if let Some(peer) = self.table.get_mut(rank.index())
                && peer.state != State::Alive
            {
                // It may be another process, whose sequences begin anew.
                (peer.state, peer.received_ns, peer.sequence) = (State::Expected, self.now_ns, None);
            }
        }
    }

    /// Forgets peers that no open context names: the network does, too.
    pub fn forget_parted(&mut self) {
        for peer in self.table.iter_mut().filter(|peer| peer.state == State::Parted) {
            peer.state = State::Unlinked;
        }
        self.linked.retain(|rank| self.table.get(rank.index()).is_some_and(|peer| peer.state != State::Unlinked));
        self.next = 0;
    }

    pub fn state(&self, rank: Rank) -> State {
        self.table.get(rank.index()).map_or(State::Unlinked, |peer| peer.state)
    }

    /// Takes any arrival from a peer as a sign of life.
    pub fn received_from(&mut self, rank: Rank) {
        let Some(peer) = self.table.get_mut(rank.index()) else { return };
        peer.received_ns = self.now_ns;
        if peer.state == State::Expected {
            peer.state = State::Alive;
        }
    }

    /// A control message of a linked peer. Returns the former signs of life of its devices.
    pub fn control(&mut self, rank: Rank, control: Control, sequence: Sequence, life: Life) -> Life {
        self.received_from(rank);
        let Some(peer) = self.table.get_mut(rank.index()) else { return life };
        if peer.sequence.is_none_or(|before| sequence.is_after(before)) {
            peer.sequence = Some(sequence);
        }
        // Messages overtake each other: a heartbeat from before the leave may come after it and changes nothing.
        if control == Control::Leave && matches!(peer.state, State::Alive | State::Parted) {
            peer.state = State::Left;
        }
        std::mem::replace(&mut peer.life, life)
    }

    /// Marks a peer as lost; false if it was lost already.
    pub fn lose(&mut self, rank: Rank) -> bool {
        let Some(peer) = self.table.get_mut(rank.index()) else { return false };
        let news = peer.state != State::Lost;
        peer.state = State::Lost;
        news
    }

    /// From now on notifies each peer once that this rank leaves, and sends no heartbeats.
    pub fn leave(&mut self) {
        self.leaving = true;
        for at in 0..self.linked.len() {
            self.enqueue(self.linked[at]);
        }
    }

    /// Whether all peers that can be notified of the leave have been.
    pub fn has_left(&self) -> bool {
        self.leaving && self.due.is_empty()
    }

    /// Notifies peers, at once and with every later heartbeat, that this rank is busy, or that it is back.
    pub fn set_busy(&mut self, busy: bool) {
        if self.sequence.is_busy() != busy {
            self.sequence = self.sequence.next();
            for at in 0..self.linked.len() {
                self.enqueue(self.linked[at]);
            }
        }
    }

    /// Whether no heartbeat is due; a peer whose queue is full keeps its heartbeat due.
    pub fn has_notified(&self) -> bool {
        self.due.is_empty()
    }

    /// Advances the clock. A gap between two passes that is long enough to be taken for silence is this thread's, not
    /// the peers': their messages of that time have yet to be polled.
    pub fn advance(&mut self, now_ns: u64) {
        let gap = now_ns.saturating_sub(self.now_ns);
        if gap > self.liveness.silence_ns / 2 {
            for peer in &mut self.table {
                peer.received_ns = peer.received_ns.saturating_add(gap).min(now_ns);
            }
        }
        self.now_ns = self.now_ns.max(now_ns);
    }

    /// Checks the peers that are due; returns the next that was silent for too long, a peer that left included. To be
    /// called until `None`.
    pub fn check(&mut self) -> Option<Silent> {
        for _ in 0..self.linked.len() {
            if self.now_ns < self.next_ns {
                return None;
            }
            let count = self.linked.len() as u64;
            // After a long gap, the missed checks are skipped.
            let not_before = self.now_ns.saturating_sub(self.liveness.heartbeat_ns);
            self.next_ns = self.next_ns.max(not_before).saturating_add((self.liveness.heartbeat_ns / count).max(1));
            self.next = (self.next + 1) % self.linked.len();
            let rank = self.linked[self.next];
            if !self.leaving {
                self.enqueue(rank);
            }
            match self.silent(rank) {
                Some(Silent { state: State::Parted, .. }) => self.set(rank, State::Unlinked),
                Some(silent) => return Some(silent),
                None => {}
            }
        }
        None
    }

    fn set(&mut self, rank: Rank, state: State) {
        if let Some(peer) = self.table.get_mut(rank.index()) {
            peer.state = state;
        }
    }

    fn silent(&self, rank: Rank) -> Option<Silent> {
        let peer = self.table.get(rank.index())?;
        let limit = match peer.state {
            State::Expected | State::Parted => self.liveness.first_contact_ns,
            State::Alive if peer.sequence.is_some_and(Sequence::is_busy) => {
                self.liveness.first_contact_ns.max(self.liveness.silence_ns)
            }
            State::Alive | State::Left => self.liveness.silence_ns,
            State::Unlinked | State::Lost => return None,
        };
        let silent_ns = self.now_ns.saturating_sub(peer.received_ns);
        (silent_ns > limit).then_some(Silent { peer: rank, silent_ns, state: peer.state })
    }

    fn enqueue(&mut self, rank: Rank) {
        let Some(peer) = self.table.get_mut(rank.index()) else { return };
        if !peer.due {
            peer.due = true;
            self.due.push_back(rank);
        }
    }

    /// Sends some of the heartbeats that are due; returns how many were accepted.
    pub fn heartbeat(&mut self, out: &mut impl Outputs) -> u64 {
        let mut sent = 0;
        for _ in 0..self.due.len().min(HEARTBEATS_PER_POLL) {
            let Some(rank) = self.due.pop_front() else { break };
            let state = self.state(rank);
            let control = if self.leaving { Control::Leave } else { Control::Heartbeat };
            let wanted = matches!(state, State::Expected | State::Alive | State::Parted);
            let life = std::array::from_fn(|context| out.life(ContextIdx(context as u8)));
            if wanted && out.send(rank, &control.encode(self.own, self.sequence, life)) == Answer::Full {
                self.due.push_back(rank);
                continue;
            }
            sent += u64::from(wanted);
            if let Some(peer) = self.table.get_mut(rank.index()) {
                peer.due = false;
            }
        }
        sent
    }
}
