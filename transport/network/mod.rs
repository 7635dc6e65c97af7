//! Networks between nodes, and the promises that callers may rely on.
//!
//! **Unstable**: everything in this module may change with any version, until real networks have used it. Semantic
//! versioning does not cover it.
//!
//! Place in the data path: between the proxies. A proxy posts writes into memory of its rails and polls for their
//! completions and for arrivals. One endpoint belongs to each rank and is used by one thread at a time.
//! After [`connect`](Transport::connect), `post`, `send`, `flush` and `poll` of a backend for real networks never
//! block, allocate, lock or log, unless they return an error. `register`, `deregister`, `address`, `connect` and
//! `reset` may take long: the proxy notifies its peers before that it will be silent, but posts and polls for nobody
//! meanwhile.
//!
//! The promises, which every backend keeps and `tests/transport/contract.rs` holds it to:
//!
//! - **P1 payload before immediate.** When an [`Event::Imm`] is handed out, all bytes of that write are in place:
//!   visible to the thread that polls, and to the device that owns the region once it has acquired what that thread
//!   releases from then on (E3, E5 and E6 in `docs/design.md`). A NIC that writes into a GPU's memory past the
//!   processor may need a flush for that; the backend makes it. Nothing is promised about any other write.
//! - **P2 no order.** Writes overtake each other, and so do the packets of one write: until its immediate, any part of
//!   its target may be old or new. Immediates, completions and messages come in any order, too; a completion does
//!   not imply arrival, nor arrival completion.
//! - **P3 exactly once.** Each accepted write whose completion is `Sent` delivers its immediate once (but for P12 and
//!   P13). A failed write delivers it at most once, and leaves any mixture of old and new bytes in its target and
//!   nowhere else.
//! - **P4 one completion.** Each accepted write completes once, as [`Event::Sent`], [`Event::Failed`] or
//!   [`Event::Dropped`], with its token. Until then the source belongs to the transport, which may read it at any
//!   moment; from then on it may be reused.
//! - **P5 a full queue is an answer.** [`Posted::Full`] means that nothing was done; post again after a poll. Some
//!   queue of the endpoint is full, not necessarily those to other peers or NICs: try those. Queues are bounded.
//! - **P6 zero bytes** may be written; the immediate arrives as for any other write.
//! - **P7 NICs.** A write posted on NIC i leaves by NIC i and arrives by the peer's NIC i. All ranks have equally many.
//!   They are numbers that ranks agree on: on a machine with k devices, NIC i is device i mod k.
//! - **P8 refusals.** `post` refuses with `Argument`, and does nothing of, a write that is outside a registered region
//!   (of either side), names an unknown NIC, peer or region, or has more bytes than the limit (P14).
//! - **P9 messages** arrive whole, once, in any order, with their sender's rank. They have no completion. A message is
//!   lost only if its peer is.
//! - **P10 addresses** are untrusted bytes: `connect` refuses an unusable address with `Transport` and changes
//!   nothing. An address is made for one peer, and another peer may be refused with it.
//! - **P11 dead peers.** A write to a peer that has gone fails or stays outstanding; it never holds up writes to other
//!   peers for good, except through a queue they share. To notice sooner, use heartbeats.
//! - **P12 reset.** After [`reset`](Transport::reset) no earlier post towards this endpoint can touch its memory or be
//!   handed out, and all earlier posts of this endpoint complete.
//! - **P13 taking back.** No network can drop a late write and spare all others, so peers are asked first. The first
//!   `deregister` gives the region up: the endpoint notifies the peers that may write to it. A peer that is notified
//!   completes its later posts to the region as `Dropped`, whatever address it has, and may do so with posts that it
//!   still holds (P15); it answers when its earlier ones have completed, which arrive like all others. Until all
//!   living peers have answered, and while own writes from the region are outstanding, the answer is
//!   [`Released::Busy`]: poll, and ask again. A peer that does not answer in time (200 ms if nothing else is
//!   configured) is cut off: its writes to the region that are still outstanding complete as `Dropped` or `Failed`.
//!   From [`Released::Done`] on, nothing reads or writes the region. No write to another region fails because of it.
//!   Immediates of writes to the region may still be handed out, no later than with polls that begin after the write
//!   has completed at its sender, up to the first poll that finds nothing.
//! - **P14 limits.** [`Transport::limits`] never changes, and is neither more nor less than the endpoint can do. A
//!   write finds a receive as long as no more immediates are under way to a NIC of its peer than that NIC has receives;
//!   writes beyond may fail. Whoever opens contexts keeps to the limits: each context takes its part of the receives
//!   for as long as it lives.
//! - **P15 flush.** A write or message that was accepted may stay with the endpoint, so that one doorbell of the NIC
//!   serves several, until `flush` or `poll`, whichever comes first.
//!
//! A whole network between the ranks of a process, over which contexts run (`tests/calls/transport_outside.rs`):
//!
//! ```
#![doc = include_str!("../../tests/calls/transport_outside/loopback.rs")]
//! # fn main() {}
//! ```

mod address;
mod clock;
pub mod emulated;
mod encoding;
mod flight;
mod held;
pub mod imm;
mod keys;
pub mod libfabric;
mod library;
mod message;
mod reach;
mod regions;
mod registration;
mod remote;
mod revoke;
pub mod sim;
mod slab;
mod slots;
pub mod verbs;

#[doc(hidden)]
pub use reach::Gpu;
pub use reach::{Reach, Way};

use self::imm::ImmValue;
use crate::base::{Error, Rank, Result};
use std::fmt;

/// Longest control message in bytes.
pub const MAX_MESSAGE: usize = 256;
/// Longest address of an endpoint in bytes; each rank gathers those of all others at once.
pub const MAX_ADDRESS: usize = 64 << 10;

/// Memory of this process, or of its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Address of the first byte: for host memory the processor's address, for GPU memory the GPU's.
    pub base: u64,
    /// Length in bytes.
    pub bytes: usize,
    /// Which memory it is.
    pub memory: SpanMemory,
}

/// The memory that a span is part of, which decides how a backend registers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanMemory {
    /// Pages of this process, which processor and NICs reach by their address. Kernels may use them, too.
    Host,
    /// A GPU's own memory. A NIC reaches it by a dma-buf of its allocation ([`dma_buf`](super::memory::dma_buf)), or by
    /// the address itself where the driver has a peer-memory client; the processor does not.
    Gpu {
        /// The GPU, as this process counts them.
        ordinal: usize,
        /// The whole allocation that the span lies in.
        allocation: Allocation,
    },
}

/// An allocation of a GPU's memory, which begins and ends at the GPU's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// Address of the first byte.
    pub base: u64,
    /// Length in bytes.
    pub bytes: usize,
}

impl Span {
    /// Host memory.
    pub const fn host(base: u64, bytes: usize) -> Span {
        Span { base, bytes, memory: SpanMemory::Host }
    }

    /// Bytes from the start of an allocation to the span.
    ///
    /// # Errors
    /// `Argument` if the span is not inside it.
    pub(crate) fn offset_in(&self, allocation: Allocation) -> Result<u64> {
        let offset = self.base.checked_sub(allocation.base);
        let inside = offset.filter(|at| at.saturating_add(self.bytes as u64) <= allocation.bytes as u64);
        inside.ok_or_else(|| Error::argument("span", format!("{self:?}"), "give a span inside its allocation"))
    }
}

/// A registered span: its number among the spans of its rank, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u16);

/// A place in a registered span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The span: for a source a span of this rank, for a target a span of the peer.
    pub region: RegionId,
    /// Bytes from the start of the span.
    pub offset: u64,
}

/// A write into a peer's memory, with an immediate that notifies the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteImm {
    /// Which NIC, of both sides.
    pub nic: u8,
    /// The rank whose memory is written.
    pub peer: Rank,
    /// The source, in this rank's memory.
    pub source: Place,
    /// The target, in the peer's memory.
    pub target: Place,
    /// Bytes to write; may be 0, and the places must be valid all the same.
    pub bytes: u32,
    /// The immediate that the peer receives.
    pub imm: ImmValue,
    /// Returned with the completion; the transport does not interpret it.
    pub token: u64,
}

/// The answer to something posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Posted {
    /// It is under way.
    Accepted,
    /// There was no room; nothing was done (P5).
    Full,
}

/// The answer to taking a region back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Released {
    /// Nothing touches it any more.
    Done,
    /// Writes from it have not completed, or peers have not let go of it. Ask again after a poll.
    Busy,
}

/// Why a write failed: a completion's status, whatever the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// In terms that all networks share.
    pub reason: Reason,
    /// The vendor's own code, as in its manuals; 0 for none.
    pub code: u32,
}

/// See [`Failure`]. The table gives the statuses of verbs and libfabric for each reason.
///
/// | reason | ibverbs (`IBV_WC_…`) | libfabric (`FI_…`) |
/// |---|---|---|
/// | `Flushed` | `WR_FLUSH_ERR` | `ECANCELED` |
/// | `Unreachable` | `RETRY_EXC_ERR`, `REM_ABORT_ERR` | `EHOSTUNREACH`, `ETIMEDOUT`, `ECONNRESET` |
/// | `NotReady` | `RNR_RETRY_EXC_ERR` | `ENORX` |
/// | `RemoteAccess` | `REM_ACCESS_ERR`, `REM_INV_REQ_ERR`, `REM_OP_ERR` | `EACCES`, `EINVAL` of the remote side |
/// | `Local` | `LOC_…_ERR`, `MW_BIND_ERR` | `ETRUNC`, `EIO` |
/// | `Other` | all others | all others |
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// Its connection was closed before the write was carried out, by this side or because of another write.
    #[error("it was cut off, as its connection was closed")]
    Flushed,
    /// Nobody answered, however often it was sent: the peer, or the path to it, is gone.
    #[error("the peer does not answer")]
    Unreachable,
    /// The peer answered that it had no receive for the immediate (P14).
    #[error("the peer had no receive left for it")]
    NotReady,
    /// The peer's side refused it: no such memory, or none that this side may write.
    #[error("the peer refused access to its memory")]
    RemoteAccess,
    /// This side could not carry it out: memory, length or state of the connection.
    #[error("this side could not carry it out")]
    Local,
    /// Anything else; see the code.
    #[error("the network gave a reason of its own")]
    Other,
}

impl From<Reason> for Failure {
    fn from(reason: Reason) -> Failure {
        Failure { reason, code: 0 }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure { reason, code: 0 } => write!(f, "{reason}"),
            Failure { reason, code } => write!(f, "{reason}, code {code:#x}"),
        }
    }
}

/// An event that a poll hands out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// A write completed: its source may be reused (P4).
    Sent {
        /// Of the write.
        token: u64,
    },
    /// A write completed and failed (P3, P4).
    Failed {
        /// Of the write.
        token: u64,
        /// The rank to which it was posted.
        peer: Rank,
        /// Why.
        failure: Failure,
    },
    /// A write completed without arriving: the peer has taken its target back (P13). The peer itself is well.
    Dropped {
        /// Of the write.
        token: u64,
        /// The rank to which it was posted.
        peer: Rank,
    },
    /// A peer's write has arrived in full (P1). Only the immediate can name the writer.
    Imm {
        /// As the peer posted it. Untrusted bits.
        imm: ImmValue,
    },
    /// A peer's control message (P9).
    Message {
        /// Who sent it.
        peer: Rank,
        /// The message. Untrusted bytes, of any length up to [`MAX_MESSAGE`].
        bytes: &'a [u8],
    },
}

/// A backend's needs of GPUs and of their arenas. Backends for NICs that reach GPUs' memory need nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceNeeds {
    /// Thread blocks that it runs on the rank's device. Contexts leave them free.
    pub blocks: u32,
    /// Whether kernels on other GPUs of this process store into registered spans, so that these GPUs need access.
    pub access: bool,
    /// Whether registered spans must be host memory: the processor moves the bytes, and would fault on GPU memory. Then
    /// `register` refuses other memory.
    pub host_memory: bool,
}

/// Limits of an endpoint, at once or over its life (P14). Where only memory is a bound: the type's largest value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Writes of one NIC to one peer that may be outstanding: posted, and their completion not handed out. An endpoint
    /// may be full with fewer if it has writes to other peers outstanding.
    pub posts: u32,
    /// Immediates that may be under way to one NIC of this endpoint, from all peers together, or have arrived and not
    /// been handed out. A network that takes a posted receive for each posts so many, besides the receives for
    /// messages.
    pub receives: u32,
    /// Regions that may be registered in its life, since numbers are not used again.
    pub regions: u32,
    /// Bytes of one write.
    pub write_bytes: u32,
}

impl Limits {
    /// No bounds; the base for a backend that sets some.
    pub const NONE: Limits =
        Limits { posts: u32::MAX, receives: u32::MAX, regions: MAX_REGIONS, write_bytes: u32::MAX };
}

/// Regions that have a number.
pub const MAX_REGIONS: u32 = u16::MAX as u32;

/// One rank's endpoint. The promises are in the module's documentation. **Unstable**, as all of the module.
///
/// ```text
///  register … ──▶ address … ──▶ (exchange) ──▶ connect … ──▶ (barrier) ──▶ post, send, flush, poll …
///                    ▲                                                          │
///                    ├────────────── reset: regions stay, peers do not ◀────────┤
///                    └────────────── deregister: one region less ◀──────────────┘
/// ```
///
/// Peers must have connected to each other, both ways, before either posts; earlier posts may fail or be lost.
/// Dropping an endpoint stops it: its memory is not touched afterwards, and traffic under way is cut off.
pub trait Transport: Send {
    /// NICs of this rank, and of every other; at most [`MAX_NICS`](imm::MAX_NICS).
    fn nics(&self) -> usize;

    /// The endpoint's limits (P14).
    fn limits(&self) -> Limits;

    /// The backend's needs of GPUs.
    fn device_needs(&self) -> DeviceNeeds {
        DeviceNeeds::default()
    }

    /// Makes a span usable as source and as target. Peers that connect with an address taken later can write there.
    /// Safe code cannot, since nothing shows that the span is memory:
    ///
    /// ```compile_fail,E0133
    /// # use tokenyard::network::{Span, Transport};
    /// fn register(endpoint: &mut dyn Transport, span: Span) {
    ///     let region = endpoint.register(span);
    /// }
    /// ```
    ///
    /// # Errors
    /// `Argument` for a span that is empty or wraps, one too many, or memory that the backend does not reach
    /// ([`DeviceNeeds::host_memory`]); `Transport` if the backend cannot register it.
    ///
    /// # Safety
    /// The span is memory that this endpoint's backend may read and write at any time until the region is taken back or
    /// the endpoint is dropped, and nothing holds a Rust reference to parts of it that are the target of a write in
    /// flight.
    unsafe fn register(&mut self, span: Span) -> Result<RegionId>;

    /// Takes a region back (P13); its number is not used again. Asked again until the answer is `Done`. Addresses taken
    /// from the first time on do not contain the region; older addresses stay valid for other regions. May wait for
    /// writes that are being placed in it.
    ///
    /// # Errors
    /// `Argument` if there is no such region; `Transport` if the backend cannot ensure that nothing touches it any
    /// more: then it must stay as it is until the endpoint is dropped.
    fn deregister(&mut self, region: RegionId) -> Result<Released>;

    /// The address with which `peer` connects to this endpoint and reaches the regions registered so far: at most
    /// [`MAX_ADDRESS`] bytes. With a longer address, building a context fails on all ranks. A network with connections
    /// gives each peer an address of its own; others give all peers the same. A region that is taken back before the
    /// peers have connected to each other is gone without a notice (P13): a write to it by this address fails.
    ///
    /// # Errors
    /// `Transport` if the backend has no connection left for the peer, or is broken.
    fn address(&mut self, peer: Rank) -> Result<Vec<u8>>;

    /// Connects to a peer by its address. Connecting again with a newer address of the same endpoint adds the regions
    /// registered since and removes the regions taken back; the address of another endpoint, or of the same one after a
    /// reset, replaces the peer.
    ///
    /// # Errors
    /// `Transport` if the address is malformed, of another version, of another rank or cannot be reached (P10).
    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()>;

    /// Posts a write.
    ///
    /// # Errors
    /// `Argument` if the write is invalid (P8); `Transport` if this endpoint itself is broken.
    fn post(&mut self, write: &WriteImm) -> Result<Posted>;

    /// Sends a control message of at most [`MAX_MESSAGE`] bytes, which are copied.
    ///
    /// # Errors
    /// As `post`.
    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted>;

    /// Rings the doorbells of what was posted or sent (P15). A poll does so, too.
    ///
    /// # Errors
    /// `Transport` if this endpoint itself is broken.
    fn flush(&mut self) -> Result<()>;

    /// Hands out some events and returns how many; at least 1 if immediates that have arrived wait for a flush (P1). 0
    /// means none for now. Makes progress: an endpoint that nobody polls may neither send nor receive. `on_event` must
    /// not panic: events that were read with the present one would be lost.
    ///
    /// # Errors
    /// `Transport` if this endpoint itself is broken.
    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize>;

    /// Closes a generation: forgets all peers, and drops what they still send to this endpoint (P12). This endpoint's
    /// outstanding writes complete with the next polls. Regions stay; the address changes, so all ranks exchange
    /// addresses and connect again.
    ///
    /// # Errors
    /// `Transport` if this endpoint itself is broken.
    fn reset(&mut self) -> Result<()>;

    /// The network's own words for a failure of one of this endpoint's writes; empty if it has none.
    fn explain(&self, failure: Failure) -> String {
        let _ = failure;
        String::new()
    }
}

impl<T: Transport + ?Sized> Transport for Box<T> {
    fn nics(&self) -> usize {
        (**self).nics()
    }

    fn limits(&self) -> Limits {
        (**self).limits()
    }

    fn device_needs(&self) -> DeviceNeeds {
        (**self).device_needs()
    }

    unsafe fn register(&mut self, span: Span) -> Result<RegionId> {
        // SAFETY: passed on to the caller.
        unsafe { (**self).register(span) }
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        (**self).deregister(region)
    }

    fn address(&mut self, peer: Rank) -> Result<Vec<u8>> {
        (**self).address(peer)
    }

    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()> {
        (**self).connect(peer, address)
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        (**self).post(write)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        (**self).send(peer, message)
    }

    fn flush(&mut self) -> Result<()> {
        (**self).flush()
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        (**self).poll(on_event)
    }

    fn reset(&mut self) -> Result<()> {
        (**self).reset()
    }

    fn explain(&self, failure: Failure) -> String {
        (**self).explain(failure)
    }
}
