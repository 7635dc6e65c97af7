//! The proxy's state machine, sans-IO: `step` takes the inputs, and `Outputs` gets what is to be done.
//!
//! Place in the data path: between the device's doorbells and the network, and between the network and the device's
//! flags. Runs on the proxy thread (`driver`), or under a test's virtual network and clock. It never blocks and,
//! except in `new`, `open` and `close`, never allocates; it never locks, logs, formats or makes a system call.
//!
//! Outgoing: every link (a direction and a rank that this rank posts to) goes through its chunks in order:
//!
//! ```text
//!                 doorbell of the next chunk: a shard is posted on every NIC
//!            ┌────────────────────────────────────────────────────────────────┐
//!            ▼             all accepted: next chunk, or next epoch            │
//!        Watching ────────────────────────────────────────────────────────────┘
//!            │ some queue was full            ▲
//!            ▼                                │ the rest was accepted
//!        Blocked {NICs left} ── time: retry ──┘          the link waits, others go on
//!            │
//!            │ peer lost, or closed the context (from    a doorbell that cannot be (from any state)
//!            ▼ Watching, too)                                               │
//!        Discarding: doorbells are taken, nothing is posted                 ▼
//!                                                            Stopped: not watched any more
//! ```
//!
//! A doorbell is the queue entry: the device cannot raise X(e+2) before `StagingFree` of X(e), so a link that is not
//! watched for a while loses nothing, and the machine needs no lists of its own that could overflow.
//!
//! ```text
//!   completion (sent or failed) ── the last one of an epoch whose chunks are all posted ──▶ flag StagingFree
//!   immediate ── generation, context, kind, source, chunk, NIC in order? ── ImmCounter ──▶ flag Arrived
//!   message ──▶ sign of life (peers.rs)      time ──▶ heartbeats, silence, retries
//!   failed write, refused post, silence ──▶ peer lost: one report, its links discard, all others go on
//!   dropped write, or failed to a peer that has left ──▶ the peer has closed the context: that one's links to it
//!                                                        discard, and nothing is reported
//!   silence of a peer that has left and owes a message ──▶ peer lost
//! ```

mod control;
mod links;
mod peers;
mod token;
mod watches;

use crate::base::{Error, Rank, Result};
use crate::proxy::counter::Counted;
use crate::proxy::wire::{ChunkIdx, ContextIdx, Direction, LinkIdx, NicIdx, SourceIdx, Wire};
use crate::transport::network::imm::{Decoded, ImmFields, ImmValue, MAX_CONTEXTS, MAX_RANKS};
use crate::transport::network::{Failure, RegionId, WriteImm};
use control::{Control, Life};
use links::{Context, Outcome};
use peers::{Peers, Silent, State};
use std::collections::VecDeque;
use token::Token;

/// An input of the machine.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// The doorbell that `watches` names shows the epoch that was looked for.
    Doorbell {
        /// Whose.
        watch: WatchId,
        /// Low half of the doorbell: bytes of the chunk. 0 is no doorbell yet.
        bytes: u32,
        /// For chunk 0, the companion word: chunks of the message. Otherwise anything.
        chunks: u32,
    },
    /// A write completed.
    Sent {
        /// As posted.
        token: u64,
    },
    /// A write completed and failed.
    Failed {
        /// As posted.
        token: u64,
        /// The transport's reason.
        failure: Failure,
    },
    /// A write completed without arriving: its peer has closed the context and taken its arena back.
    Dropped {
        /// As posted.
        token: u64,
    },
    /// A peer's write has arrived.
    Immediate {
        /// Untrusted bits.
        imm: ImmValue,
    },
    /// A peer's control message.
    Message {
        /// Who sent it.
        peer: Rank,
        /// Untrusted bytes.
        bytes: &'a [u8],
    },
    /// Time has passed, or a queue may have room again. To be given once per pass, after events.
    Time {
        /// Of a clock that never goes back.
        now_ns: u64,
    },
}

/// Actions of the machine, to be done at once and in order.
pub trait Outputs {
    /// Posts a write.
    fn post(&mut self, write: &WriteImm) -> Answer;
    /// Sends a control message.
    fn send(&mut self, peer: Rank, message: &[u8]) -> Answer;
    /// How many signs of life this rank's device has given in a context, modulo 2^16: heartbeats carry it.
    fn life(&self, _context: ContextIdx) -> u16 {
        0
    }
    /// Writes a flag, with Release: the device acts on it at once.
    fn flag(&mut self, flag: Flag);
    /// Reports a fault.
    fn report(&mut self, report: Report);
}

/// The answer to a post.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It will complete.
    Accepted,
    /// Nothing was done; the caller is to retry.
    Full,
    /// It can never be done.
    Refused,
}

/// A word that the device waits for. Its value holds an epoch that does not wrap, because a word can stay unwritten for
/// any number of epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Flag {
    /// All shards of a chunk are in the receive buffer.
    Arrived {
        /// Of which context.
        context: ContextIdx,
        /// In which direction.
        direction: Direction,
        /// The sender.
        source: SourceIdx,
        /// Which chunk.
        chunk: ChunkIdx,
        /// Of which epoch.
        epoch: u64,
        /// How many chunks of that epoch have arrived before, whoever sent them.
        place: u32,
    },
    /// All posts of a message completed: its staging may be packed again.
    StagingFree {
        /// Of which context.
        context: ContextIdx,
        /// In which direction.
        direction: Direction,
        /// The link it was posted on.
        link: LinkIdx,
        /// Of which epoch.
        epoch: u64,
    },
    /// A peer's device shows that it is alive, though its messages do not come.
    Life {
        /// Of which context.
        context: ContextIdx,
        /// Whose.
        peer: Rank,
        /// How many such signs it has given, modulo 2^16.
        count: u16,
    },
}

/// A fault. Everything else goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// A peer is lost; reported once, until a context that names the peer is opened again.
    PeerLost {
        /// Who.
        peer: Rank,
        /// How the loss was noticed.
        cause: Cause,
    },
    /// The device rang an invalid doorbell; its link has stopped.
    BadDoorbell {
        /// Of which context.
        context: ContextIdx,
        /// In which direction.
        direction: Direction,
        /// The peer of the doorbell's link.
        peer: Rank,
        /// Of which epoch.
        epoch: u64,
        /// Which chunk.
        chunk: ChunkIdx,
        /// The fault.
        problem: BadDoorbell,
    },
}

/// How a loss was noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// The peer gave signs of life before, and then none for this long.
    #[error("which gave no sign of life for {} ms", silent_ns / 1_000_000)]
    Silent {
        /// So long.
        silent_ns: u64,
    },
    /// The peer has given no sign of life since a context named it.
    #[error("from which nothing was received for {} ms", silent_ns / 1_000_000)]
    NeverReceived {
        /// So long.
        silent_ns: u64,
    },
    /// The peer left in good order, and owes a message.
    #[error("which left {} ms ago", silent_ns / 1_000_000)]
    Left {
        /// So long ago.
        silent_ns: u64,
    },
    /// A write to the peer failed.
    #[error("to which a write failed ({failure}; context {}, {direction:?}, chunk {}, NIC {})", context.0, chunk.0, nic.0)]
    WriteFailed {
        /// Of which context.
        context: ContextIdx,
        /// In which direction.
        direction: Direction,
        /// Parity of the epoch.
        parity: u8,
        /// Which chunk.
        chunk: ChunkIdx,
        /// On which NIC.
        nic: NicIdx,
        /// The transport's reason.
        failure: Failure,
    },
    /// The transport refuses writes to the peer.
    #[error("to which the transport refuses writes")]
    Refused,
}

/// What can be wrong with a doorbell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadDoorbell {
    /// More than a chunk holds.
    #[error("{bytes} bytes, where a chunk holds {capacity}")]
    Bytes {
        /// As rung.
        bytes: u32,
        /// At most.
        capacity: u32,
    },
    /// No chunks, or more than a message has.
    #[error("{chunks} chunks, where a message has 1 to {most}")]
    Chunks {
        /// As given.
        chunks: u32,
        /// At most.
        most: u16,
    },
    /// The message two epochs ago has not left this staging yet.
    #[error("staging that {posts} posts still read")]
    StagingInUse {
        /// Posts that have not completed.
        posts: u32,
    },
}

/// Intervals of heartbeats, and when peers count as lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Liveness {
    /// Time from one heartbeat to the next.
    pub heartbeat_ns: u64,
    /// A peer that gave signs of life, and then none for this long, is lost. Noticed at most a heartbeat later.
    pub silence_ns: u64,
    /// The limit for a peer without a sign of life since a context named it, as peers may be slower to build theirs,
    /// and for a peer that has reported to be busy ([`Machine::set_busy`]).
    pub first_contact_ns: u64,
}

impl Default for Liveness {
    fn default() -> Liveness {
        Liveness { heartbeat_ns: 100_000_000, silence_ns: 1_000_000_000, first_contact_ns: 30_000_000_000 }
    }
}

/// The configuration of a machine.
#[derive(Debug, Clone, Copy)]
pub struct MachineConfig {
    /// This rank.
    pub rank: Rank,
    /// Ranks of the world.
    pub world: usize,
    /// When peers count as lost.
    pub liveness: Liveness,
}

/// The configuration of a context, the same on all its ranks but for the numbers of regions.
///
/// All ranks must have opened a context before any of them rings: earlier arrivals are dropped as stale.
#[derive(Debug, Clone, Copy)]
pub struct ContextConfig<'a> {
    /// Low two bits of the generation.
    pub generation: u8,
    /// Number of the first epoch in every direction; its low half is not 0.
    pub first_epoch: u64,
    /// The layout of the wire.
    pub wire: &'a Wire,
    /// By rank: the region that holds its arena. This rank's own is the source of its writes.
    pub arenas: &'a [RegionId],
}

/// A link to watch: an index into `Machine::watches`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WatchId {
    /// Of which context.
    pub context: ContextIdx,
    /// Index among that context's watches.
    pub index: u16,
}

/// The doorbell that a link waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watch {
    /// Index of the doorbell.
    pub word: u32,
    /// Index of the word with the number of the message's chunks, if it must be read: with chunk 0.
    pub chunks_word: Option<u32>,
    /// Low half of the epoch looked for, which the doorbell has in its upper half once it is rung.
    pub epoch: u32,
    /// Not to be polled for now.
    pub asleep: bool,
}

impl Watch {
    /// Whether a doorbell that reads `word` is to be given to `Machine::step`. Memory that was never written differs
    /// from an epoch whose low half is 0 only in its 0 bytes.
    pub fn is_rung(&self, word: u64) -> bool {
        !self.asleep && (word >> 32) as u32 == self.epoch && word as u32 != 0
    }

    /// Whether the doorbell may stay unwritten for any number of epochs. It must then be cleared once it is taken, or
    /// it would look rung 2³² epochs later. True for every chunk but the first, as messages may stay short for long;
    /// chunk 0's doorbell, which comes with the number of chunks, is written in every epoch of its parity.
    pub fn may_go_stale(&self) -> bool {
        self.chunks_word.is_none()
    }
}

/// Most links of a group: a line's worth of doorbells.
pub const GROUP_LINKS: usize = 8;

/// Some neighbouring links of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Index of the first among the context's watches.
    pub first: u16,
    /// How many; at most `GROUP_LINKS`.
    pub links: u16,
    /// Their doorbells, if all wait for the same chunk of the same epoch; `None` also if that was not checked since one
    /// of the links moved.
    pub row: Option<Row>,
}

/// Doorbells of a group that stand side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Index of the first.
    pub word: u32,
    /// Low half of the epoch that all of them are watched for.
    pub epoch: u32,
}

impl Group {
    /// Its watches.
    pub fn range(&self) -> std::ops::Range<usize> {
        usize::from(self.first)..usize::from(self.first) + usize::from(self.links)
    }
}

/// Counts of events so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MachineStats {
    /// Writes accepted.
    pub posts: u64,
    /// Writes answered by `Full`.
    pub full: u64,
    /// Completions, failed and dropped ones included.
    pub completions: u64,
    /// Writes to a context that the peer had closed.
    pub dropped: u64,
    /// Immediates counted.
    pub immediates: u64,
    /// Chunks flagged as arrived.
    pub arrived: u64,
    /// Heartbeats and leaves accepted.
    pub heartbeats: u64,
    /// Peers lost.
    pub lost: u64,
    /// Chunks not posted because their peer was lost, or had closed the context.
    pub discarded: u64,
    /// Immediates of another generation or a closed context, dropped.
    pub stale_immediates: u64,
    /// Completions of a closed context, dropped.
    pub stale_completions: u64,
    /// Immediates that had been counted before, dropped.
    pub duplicates: u64,
    /// Impossible immediates and completions, dropped.
    pub impossible: u64,
    /// Control messages that are malformed, dropped.
    pub bad_messages: u64,
    /// Control messages of a rank that no open context names, dropped.
    pub strange_messages: u64,
    /// Invalid doorbells.
    pub bad_doorbells: u64,
}

/// The state of one rank's proxy.
#[derive(Debug)]
pub struct Machine {
    rank: Rank,
    world: usize,
    contexts: [Option<Box<Context>>; MAX_CONTEXTS],
    /// By context, closed ones included: writes that have not completed.
    under_way: [u32; MAX_CONTEXTS],
    /// By context: which opening the number belongs to.
    serials: [u32; MAX_CONTEXTS],
    peers: Peers,
    /// Links with shards that a full queue has refused, in the order in which they try again.
    blocked: VecDeque<(WatchId, u32)>,
    stats: MachineStats,
}

impl Machine {
    /// A machine with no contexts.
    ///
    /// # Errors
    /// `Config` if the rank is not of the world, or the world is larger than an immediate can name.
    pub fn new(config_: &MachineConfig) -> Result<Machine> {
        let MachineConfig { rank, world, liveness } = *config_;
        if world > MAX_RANKS || rank.index() >= world {
            return Err(Error::config("rank", rank, "must be below the world's size, which is at most 2048"));
        }
        if liveness.heartbeat_ns >= liveness.silence_ns.min(liveness.first_contact_ns) {
            let value = format!("{liveness:?}");
            return Err(Error::config(
                "liveness",
                value,
                "peers would be lost between two heartbeats; send them several times as often",
            ));
        }
        Ok(Machine {
            rank,
            world,
            contexts: Default::default(),
            under_way: [0; MAX_CONTEXTS],
            serials: [0; MAX_CONTEXTS],
            peers: Peers::new(rank, world, liveness),
            blocked: VecDeque::new(),
            stats: MachineStats::default(),
        })
    }

    /// Opens a context. Allocates its tables; nothing is allocated afterwards.
    ///
    /// # Errors
    /// `Config` if the context is open already, or something does not fit.
    pub fn open(&mut self, index: ContextIdx, config_: &ContextConfig<'_>) -> Result<()> {
        if self.contexts.get(index.index()).is_none_or(Option::is_some) {
            return Err(Error::config(
                "context",
                index.0,
                "is open, or beyond the four that an immediate can name; close it",
            ));
        }
        if config_.wire.nodes().world() > self.world || config_.arenas.len() < config_.wire.nodes().world() {
            return Err(Error::config(
                "nodes",
                config_.wire.nodes().world(),
                "names ranks beyond the world or its arenas",
            ));
        }
        let serial = self.serials[index.index()].wrapping_add(1);
        let context = Box::new(Context::new(self.rank, index, serial, config_)?);
        let fresh = context.peers().collect::<Vec<_>>();
        self.serials[index.index()] = serial;
        self.under_way[index.index()] = 0;
        self.contexts[index.index()] = Some(context);
        self.peers.link(self.contexts.iter().flatten().flat_map(|c| c.peers()), fresh.into_iter());
        self.blocked.reserve(self.contexts.iter().flatten().map(|c| c.watches().list().len()).sum());
        Ok(())
    }

    /// Closes a context: nothing of it is posted, counted or flagged any more. Its staging still belongs to the
    /// transport until `under_way` is 0.
    pub fn close(&mut self, index: ContextIdx) {
        if let Some(context) = self.contexts.get_mut(index.index()) {
            *context = None;
        }
        self.blocked.retain(|(watch, _)| watch.context != index);
        self.peers.link(self.contexts.iter().flatten().flat_map(|c| c.peers()), std::iter::empty());
    }

    /// Writes of a context, open or closed, that have not completed.
    pub fn under_way(&self, index: ContextIdx) -> u32 {
        self.under_way.get(index.index()).copied().unwrap_or(0)
    }

    /// The watches of a context's doorbells; empty if it is not open. Entries change with every step.
    #[inline]
    pub fn watches(&self, index: ContextIdx) -> &[Watch] {
        self.contexts.get(index.index()).and_then(Option::as_ref).map_or(&[], |c| c.watches().list())
    }

    /// The same watches in groups; a group with a `Row` can be scanned as a whole.
    #[inline]
    pub fn groups(&self, index: ContextIdx) -> &[Group] {
        self.contexts.get(index.index()).and_then(Option::as_ref).map_or(&[], |c| c.watches().groups())
    }

    /// Finds the row of a group that had none. To be called after its watches have been polled one by one.
    pub fn even_out(&mut self, index: ContextIdx, group: usize) {
        if let Some(context) = self.contexts.get_mut(index.index()).and_then(Option::as_mut) {
            context.even_out(group);
        }
    }

    /// Counts of events so far.
    pub fn stats(&self) -> &MachineStats {
        &self.stats
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Whether all messages of a context that were rung, as far as the machine got their doorbells, are posted; true if
    /// the context is not open.
    pub fn is_settled(&self, index: ContextIdx) -> bool {
        self.contexts.get(index.index()).and_then(Option::as_ref).is_none_or(|context| context.is_settled())
    }

    /// Whether a peer has been lost, and no context that names it was opened since.
    pub fn is_lost(&self, peer: Rank) -> bool {
        self.peers.state(peer) == State::Lost
    }

    /// Forgets peers that no open context names any more; they get heartbeats until then.
    pub fn forget_parted(&mut self) {
        self.peers.forget_parted();
    }

    /// Notifies all peers that this rank leaves, with the next inputs of time; see `has_left`.
    pub fn leave(&mut self) {
        self.peers.leave();
    }

    /// Notifies all peers that this rank is busy, and may give no sign of life for as long as
    /// `Liveness::first_contact_ns`, or that it is back; with the next inputs of time, see `has_notified`.
    pub fn set_busy(&mut self, busy: bool) {
        self.peers.set_busy(busy);
    }

    /// Whether all peers whose queue had room have been notified of the change.
    pub fn has_notified(&self) -> bool {
        self.peers.has_notified()
    }

    /// Whether all peers whose queue had room have been notified of the leave.
    pub fn has_left(&self) -> bool {
        self.peers.has_left()
    }

    /// Takes one input and acts on it. Only `Doorbell` and `Time` post or send.
    pub fn step(&mut self, input: Input<'_>, out: &mut impl Outputs) {
        match input {
            Input::Doorbell { watch, bytes, chunks } => self.doorbell(watch, bytes, chunks, out),
            Input::Sent { token } => self.completed(token, Ending::Sent, out),
            Input::Failed { token, failure } => self.completed(token, Ending::Failed(failure), out),
            Input::Dropped { token } => self.completed(token, Ending::Dropped, out),
            Input::Immediate { imm } => self.immediate(imm, out),
            Input::Message { peer, bytes } => self.message(peer, bytes, out),
            Input::Time { now_ns } => self.time(now_ns, out),
        }
    }

    fn doorbell(&mut self, watch: WatchId, bytes: u32, chunks: u32, out: &mut impl Outputs) {
        let Some(context) = self.contexts.get_mut(watch.context.index()).and_then(Option::as_mut) else { return };
        match context.rung(watch.index, bytes, chunks) {
            Ok(true) => self.post(watch, out),
            Ok(false) => {}
            Err(report) => {
                self.stats.bad_doorbells += 1;
                out.report(report);
            }
        }
    }

    /// Posts what is left of a link's chunk.
    fn post(&mut self, watch: WatchId, out: &mut impl Outputs) {
        let slot = watch.context.index();
        let Some(context) = self.contexts.get_mut(slot).and_then(Option::as_mut) else { return };
        let before = self.stats.posts;
        let outcome = context.post(watch.index, &mut self.stats, out);
        self.under_way[slot] += (self.stats.posts - before) as u32;
        match outcome {
            Outcome::Posted => {}
            Outcome::Full => self.blocked.push_back((watch, self.serials[slot])),
            Outcome::Refused { peer } if self.peers.state(peer) == State::Left => self.let_go(peer, out),
            Outcome::Refused { peer } => self.lose(peer, Cause::Refused, out),
        }
    }

    fn completed(&mut self, token: u64, ending: Ending, out: &mut impl Outputs) {
        let Some(token) = Token::unpack(token) else {
            self.stats.impossible += 1;
            return;
        };
        let slot = token.context.index();
        if token.serial != self.serials[slot] {
            self.stats.stale_completions += 1;
            return;
        }
        let under_way = self.under_way[slot].saturating_sub(1);
        let Some(context) = self.contexts[slot].as_mut() else {
            // The context's tables are gone; its writes under way are only counted down.
            self.under_way[slot] = under_way;
            self.stats.stale_completions += 1;
            return;
        };
        let Some(peer) = context.completed(&token, out) else {
            self.stats.impossible += 1;
            return;
        };
        self.under_way[slot] = under_way;
        self.stats.completions += 1;
        match ending {
            Ending::Sent => {}
            Ending::Failed(failure) if self.peers.state(peer) != State::Left => {
                let Token { context, direction, parity, chunk, nic, .. } = token;
                self.lose(peer, Cause::WriteFailed { context, direction, parity, chunk, nic, failure }, out);
            }
            Ending::Failed(_) | Ending::Dropped => {
                // The peer is well or has left, and other contexts go on.
                self.stats.dropped += 1;
                context.discard(peer, &mut self.stats, out);
            }
        }
    }

    fn immediate(&mut self, imm: ImmValue, out: &mut impl Outputs) {
        let Some(context) = self.contexts.get_mut(usize::from(imm.context())).and_then(Option::as_mut) else {
            self.stats.stale_immediates += 1;
            return;
        };
        if context.generation() != imm.generation() {
            self.stats.stale_immediates += 1;
            return;
        }
        let Some((fields, direction)) = own(imm) else {
            self.stats.impossible += 1;
            return;
        };
        let Some((source, counted)) = context.count(&fields, direction) else {
            self.stats.impossible += 1;
            return;
        };
        match counted {
            Counted::Partial => self.stats.immediates += 1,
            Counted::Arrived { epoch, place } => {
                self.stats.immediates += 1;
                self.stats.arrived += 1;
                let (context, chunk) = (ContextIdx(fields.context), ChunkIdx(fields.chunk));
                out.flag(Flag::Arrived { context, direction, source, chunk, epoch, place });
            }
            Counted::Duplicate => self.stats.duplicates += 1,
            Counted::Impossible => self.stats.impossible += 1,
        }
        self.peers.received_from(fields.source);
    }

    fn message(&mut self, peer: Rank, bytes: &[u8], out: &mut impl Outputs) {
        match (Control::decode(bytes, peer), self.peers.state(peer)) {
            (None, _) => self.stats.bad_messages += 1,
            (Some(_), State::Unlinked) => self.stats.strange_messages += 1,
            (
                Some((control, sequence, life)),
                State::Parted | State::Expected | State::Alive | State::Left | State::Lost,
            ) => {
                let before = self.peers.control(peer, control, sequence, life);
                if self.peers.state(peer) != State::Lost {
                    self.show_life(peer, before, life, out);
                }
            }
        }
    }

    /// Passes on what has changed among a peer's signs of life.
    fn show_life(&self, peer: Rank, before: Life, now: Life, out: &mut impl Outputs) {
        for (index, (before, count)) in (0u8..).zip(before.into_iter().zip(now)) {
            let context = self.contexts.get(usize::from(index)).and_then(Option::as_ref);
            if before != count && context.is_some_and(|context| context.peers().any(|named| named == peer)) {
                out.flag(Flag::Life { context: ContextIdx(index), peer, count });
            }
        }
    }

    fn time(&mut self, now_ns: u64, out: &mut impl Outputs) {
        self.peers.advance(now_ns);
        while let Some(silent) = self.peers.check() {
            let Silent { peer, silent_ns, state } = silent;
            match state {
                State::Left if !self.is_owed_by(peer) => {}
                State::Left => self.lose(peer, Cause::Left { silent_ns }, out),
                State::Expected => self.lose(peer, Cause::NeverReceived { silent_ns }, out),
                State::Unlinked | State::Parted | State::Alive | State::Lost => {
                    self.lose(peer, Cause::Silent { silent_ns }, out)
                }
            }
        }
        self.stats.heartbeats += self.peers.heartbeat(out);
        self.retry(out);
    }

    fn is_owed_by(&self, peer: Rank) -> bool {
        self.contexts.iter().flatten().any(|context| context.is_owed_by(peer))
    }

    /// Each blocked link retries once. Links that are still refused go to the end, so that not always the same link
    /// takes the first room.
    fn retry(&mut self, out: &mut impl Outputs) {
        for _ in 0..self.blocked.len() {
            let Some((watch, serial)) = self.blocked.pop_front() else { return };
            let slot = watch.context.index();
            let context = self.contexts.get(slot).and_then(Option::as_ref);
            if serial == self.serials[slot] && context.is_some_and(|c| c.is_blocked(watch.index)) {
                self.post(watch, out);
            }
        }
    }

    /// Declares a peer lost; all others go on.
    fn lose(&mut self, peer: Rank, cause: Cause, out: &mut impl Outputs) {
        if self.peers.lose(peer) {
            self.stats.lost += 1;
            out.report(Report::PeerLost { peer, cause });
        }
        self.let_go(peer, out);
    }

    /// Discards the chunks of the links to a peer.
    fn let_go(&mut self, peer: Rank, out: &mut impl Outputs) {
        for context in self.contexts.iter_mut().flatten() {
            context.discard(peer, &mut self.stats, out);
        }
    }
}

/// How a write completed.
#[derive(Debug, Clone, Copy)]
enum Ending {
    Sent,
    Failed(Failure),
    Dropped,
}

/// The fields of an immediate that belongs to a direction.
fn own(imm: ImmValue) -> Option<(ImmFields, Direction)> {
    match imm.decode()? {
        Decoded::Own(fields) => Some((fields, Direction::of(fields.kind)?)),
        Decoded::User { .. } => None,
    }
}
