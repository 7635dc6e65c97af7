//! The simulated network between processes of one host: no rank accesses another's memory, and bytes travel over
//! sockets.
//!
//! Place in the data path: where libfabric or verbs would be, like its parent, which is for the ranks of one process.
//! An endpoint sends from its own registered memory and writes into its own registered memory; between them are Unix
//! sockets. It reorders as much as the promises of [the trait](crate::transport::network) leave open: the receiver cuts
//! each write into packets, places them in any order at later polls, and hands out the immediate when all are placed.
//! Chances, queues and speeds are a [`SimConfig`]'s; each endpoint draws from the seed and its rank, and counts its
//! events in [`Counts`].
//!
//! Runs on the caller's thread, and has none of its own: an endpoint that nobody polls neither sends nor receives. It
//! never blocks, trusts nothing that it receives, and never sends an address of memory. Unlike a real backend it
//! allocates and makes system calls in `post` and `poll`.
//!
//! ```text
//!   process of rank 0                                      process of rank 1
//!   post ─▶ Outbound ══ hello, writes, messages ══▶ Inbound ─▶ registered memory, poll
//!              ▲     ◀═════════ answers ══════════     │
//!              │                                       │      one socket for each of the two directions;
//!   poll ◀─ Inbound  ◀══ hello, writes, messages ══ Outbound  the other's answers come back on it
//! ```
//!
//! A job's ranks exchange addresses by any means; with a [`World`](crate::transport::World):
//!
//! ```no_run
//! use tokenyard::network::Transport;
//! use tokenyard::network::sim::{Clock, ProcessEndpoint, SimConfig};
//! use tokenyard::{Rank, Result, World};
//!
//! fn open(world: &World, token: &[u8]) -> Result<ProcessEndpoint> {
//!     let config = SimConfig { clock: Clock::Real, ..SimConfig::hostile(1) };
//!     let mut endpoint = ProcessEndpoint::open(world.rank(), token, config)?;
//!     // Register memory here: addresses contain the regions registered so far.
//!     // All peers connect by the same address; a network with connections would need one for each.
//!     let addresses = world.all_gather("endpoints", &endpoint.address(world.rank())?)?;
//!     for (peer, address) in (0u32..).map(Rank).zip(&addresses).filter(|(peer, _)| *peer != world.rank()) {
//!         endpoint.connect(peer, address)?;
//!     }
//!     world.barrier("connected")?;
//!     Ok(endpoint)
//! }
//! ```
//!
//! Each endpoint has its own time. With [`Clock::Real`](super::Clock::Real) stamps of the host's monotonic clock travel
//! with the bytes, so that the link model holds as long as both ends poll; with virtual time, which passes by polls,
//! latency counts from when a frame is read.
//!
//! A peer that ends in any way closes its sockets; writes to it then end by
//! [`dead_peers`](SimConfig::dead_peers). A process that the peer forked keeps them open, and hides that it is gone.

mod address;
mod frame;
mod inbound;
mod intake;
mod memory;
mod outbound;
mod shared;
mod socket;

use super::config::{Clock, SimConfig};
use super::counts::Counts;
use super::endpoint_state::Pending;
use crate::base::{Error, Rank, Result};
use crate::transport::network::imm::MAX_RANKS;
use crate::transport::network::{DeviceNeeds, Event, Limits, Posted, RegionId, Released, Span, Transport, WriteImm};
use crate::transport::world::fds::is_shortage;
use address::Address;
use frame::{MAX_FRAME, MAX_TOKEN};
use inbound::Inbound;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use outbound::Outbound;
use shared::{Core, Step};
use socket::Door;
use std::os::fd::AsFd;
use std::time::Duration;

/// Counts of what an endpoint dropped because no connected member of its job sends it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Refused {
    /// Connections of another user or job, to another key, of another version, or that began with something else.
    pub connections: u64,
    /// Malformed frames: of another length, version or kind, or with impossible fields.
    pub malformed: u64,
    /// Frames to a key that is not this endpoint's present key.
    pub stale: u64,
    /// Frames that are out of order: answers to nothing, pieces of no write.
    pub out_of_order: u64,
    /// Pieces of writes that do not lie in a registered region.
    pub outside: u64,
    /// Frames of members to which this endpoint has not connected.
    pub unconnected: u64,
}

impl Refused {
    /// All of them.
    pub fn total(&self) -> u64 {
        let Refused { connections, malformed, stale, out_of_order, outside, unconnected } = self;
        connections + malformed + stale + out_of_order + outside + unconnected
    }
}

/// A rank's endpoint in the simulated network between processes of one host. Its peers may also be other endpoints of
/// the same process, or itself.
#[derive(Debug)]
pub struct ProcessEndpoint {
    core: Core,
    door: Door,
    outbound: Outbound,
    inbound: Inbound,
    /// Receives frames; one byte longer than any frame, so that a longer one is noticed.
    buffer: Box<[u8]>,
    /// The events of the present poll.
    batch: Vec<Pending>,
}

/// Whose socket is ready.
#[derive(Debug, Clone, Copy)]
enum Who {
    Door,
    Stranger,
    Guest(u64),
    Peer(Rank),
}

impl ProcessEndpoint {
    /// An endpoint that listens, with nothing registered and nobody connected. All ranks of a job give the same token
    /// (of at most 256 bytes), and configurations with equally many NICs.
    ///
    /// # Errors
    /// `Config` if a setting makes no sense; `Transport` if no socket can be opened.
    pub fn open(rank: Rank, token: &[u8], config: SimConfig) -> Result<ProcessEndpoint> {
        config.check()?;
        if !config.payload {
            let advice =
                "between processes bytes are all that travels: carry payloads, or use a network of one process";
            return Err(Error::config("payload", "false", advice));
        }
        if config.clock == (Clock::Virtual { tick_ns: 0 }) {
            let advice = "time must pass between processes: give a poll some, or take the real clock";
            return Err(Error::config("clock", format!("{:?}", config.clock), advice));
        }
        if config.receives != u32::MAX {
            let advice = "senders of other processes do not see a receiver's queue: leave it without a bound";
            return Err(Error::config("receives", config.receives, advice));
        }
        if rank.index() >= MAX_RANKS {
            return Err(Error::config("rank", rank, format!("an immediate can name {MAX_RANKS}; use fewer ranks")));
        }
        if token.len() > MAX_TOKEN {
            let advice = format!("use a token of at most {MAX_TOKEN} bytes");
            return Err(Error::config("token", format!("{} bytes long", token.len()), advice));
        }
        let nics = config.nics.len();
        log::info!(target: crate::base::targets::NETWORK, "rank {rank}: simulated between processes, {nics} NICs");
        let door = open_door()?;
        Ok(ProcessEndpoint {
            inbound: Inbound::new(token, config.nics.len()),
            core: Core::new(rank, door.key, config),
            door,
            outbound: Outbound::new(token),
            buffer: vec![0; MAX_FRAME + 1].into_boxed_slice(),
            batch: Vec::new(),
        })
    }

    /// Its rank.
    pub fn rank(&self) -> Rank {
        self.core.rank
    }

    /// Counts of events at this endpoint so far: of its posts and of its arrivals. Deaths are of peers whose
    /// connections ended; stops are of its own NICs.
    pub fn counts(&self) -> Counts {
        self.core.counts
    }

    /// Counts of what was dropped so far.
    pub fn refused(&self) -> Refused {
        self.core.refused
    }

    /// Stops one of its NICs: for that time nothing leaves it, and nothing that reaches it is placed.
    pub fn stop(&mut self, nic: u8, for_ns: u64) {
        self.core.look();
        self.core.stop(usize::from(nic), for_ns);
    }

    /// Makes the next `count` writes that it posts fail.
    pub fn fail_next(&mut self, count: u32) {
        self.core.endpoint.fail_next = count;
    }

    /// Polls, without waiting, which sockets can be read or take more.
    fn ready(&self) -> Vec<(Who, PollFlags)> {
        let interest = |reads: bool, blocked: bool| {
            let read = if reads { PollFlags::POLLIN } else { PollFlags::empty() };
            if blocked { read | PollFlags::POLLOUT } else { read }
        };
        let mut whose = vec![Who::Door];
        let mut fds = vec![PollFd::new(self.door.as_fd(), PollFlags::POLLIN)];
        for fd in self.inbound.strangers() {
            whose.push(Who::Stranger);
            fds.push(PollFd::new(fd, PollFlags::POLLIN));
        }
        for (id, fd, reads, blocked) in self.inbound.sockets(&self.core) {
            whose.push(Who::Guest(id));
            fds.push(PollFd::new(fd, interest(reads, blocked)));
        }
        for (peer, fd, blocked) in self.outbound.sockets() {
            whose.push(Who::Peer(peer));
            fds.push(PollFd::new(fd, interest(true, blocked)));
        }
        match poll(&mut fds, PollTimeout::ZERO) {
            Ok(0) => Vec::new(),
            Ok(_) => {
                let found = fds.iter().map(|fd| fd.revents().unwrap_or(PollFlags::all()));
                whose.into_iter().zip(found).filter(|(_, found)| !found.is_empty()).collect()
            }
            // Interrupted, or more descriptors than the kernel polls: then each is tried.
            Err(_) => whose.into_iter().map(|who| (who, PollFlags::all())).collect(),
        }
    }

    /// Reads from all ready sockets.
    fn receive(&mut self) -> Result<()> {
        let ready = self.ready();
        let ProcessEndpoint { core, door, outbound, inbound, buffer, .. } = self;
        for (who, _) in ready.iter().filter(|(_, found)| found.contains(PollFlags::POLLOUT)) {
            match who {
                Who::Guest(id) => inbound.unblock(*id),
                Who::Peer(peer) => outbound.unblock(*peer),
                Who::Door | Who::Stranger => {}
            }
        }
        let (mut door_opens, mut stranger_speaks) = (false, false);
        for (who, _) in ready {
            match who {
                Who::Door => door_opens = true,
                Who::Stranger => stranger_speaks = true,
                Who::Guest(id) => inbound.receive(core, id, buffer),
                Who::Peer(peer) => outbound.receive(core, peer, buffer),
            }
        }
        let welcomed = if door_opens { inbound.welcome(core, door) } else { Ok(()) };
        if door_opens || stranger_speaks {
            inbound.meet(core, buffer);
        }
        let short = match welcomed {
            Err(errno) if !is_shortage(errno) => {
                return Err(Error::transport(
                    format!("endpoint of rank {} cannot take connections ({errno})", core.rank),
                    "form a new world; its endpoints open new sockets",
                )
                .ending()
                .caused_by(errno));
            }
            outcome => outcome.err(),
        };
        inbound.shortage.note(short).map_err(|lasting| too_short(core.rank, "take", lasting))
    }

    /// Executes all steps that are due by now.
    fn run_due(&mut self) {
        while let Some(due) = self.core.next_due() {
            match due.step {
                Step::Depart(id) => self.outbound.depart(&mut self.core, id, due.at_ns),
                Step::Done(id) => self.outbound.done(&mut self.core, id),
                Step::Packet(packet) => self.inbound.packet(&mut self.core, packet, due.at_ns),
                Step::Deliver(arrival) => self.inbound.deliver(&mut self.core, arrival),
                Step::Notice(peer, notice) => self.core.endpoint.revocations.take_in(peer, notice),
            }
        }
    }
}

/// The error of a shortage that lasts.
fn too_short(rank: Rank, verb: &str, (lasted, errno): (Duration, Errno)) -> Error {
    Error::transport(
        format!("endpoint of rank {rank} could not {verb} a connection for {} ms ({errno})", lasted.as_millis()),
        "raise the limit on open files (ulimit -n), or see what holds so many",
    )
    .caused_by(errno)
}

fn open_door() -> Result<Door> {
    Door::open().map_err(|(lacking, error)| {
        let what = format!("endpoint cannot listen: {lacking}: {error}");
        Error::transport(what, "raise the limit on open files").caused_by(error)
    })
}

impl Transport for ProcessEndpoint {
    fn nics(&self) -> usize {
        self.core.config.nics.len()
    }

    fn limits(&self) -> Limits {
        self.core.config.limits()
    }

    fn device_needs(&self) -> DeviceNeeds {
        DeviceNeeds { host_memory: true, ..DeviceNeeds::default() }
    }

    unsafe fn register(&mut self, span: Span) -> Result<RegionId> {
        self.core.endpoint.regions.register_host(span)
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        let ProcessEndpoint { core, inbound, outbound, .. } = self;
        core.look();
        let used = core.endpoint.regions.give_up(region)?;
        let (living, now_ns, let_go_ns) = (inbound.writers(core), core.now_ns, core.config.let_go_ns);
        let late = core.endpoint.revocations.take_back(region, &living, now_ns, let_go_ns);
        outbound.send_notices(core);
        let (Some(late), false) = (late, used) else { return Ok(Released::Busy) };
        core.counts.cut_off += u64::from(late > 0);
        core.endpoint.revocations.end(region);
        let released = core.endpoint.regions.take_back(region)?;
        inbound.drop_arriving(core, region);
        Ok(released)
    }

    fn address(&mut self, _peer: Rank) -> Result<Vec<u8>> {
        let regions = self.core.endpoint.regions.lengths();
        let (nonce, key, nics) = (self.door.nonce, self.core.endpoint.key, self.nics() as u32);
        Ok(Address { nonce, key, rank: self.core.rank, nics, regions }.encode())
    }

    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()> {
        self.core.look();
        let outcome = match Address::decode(address) {
            Err(why) => Err(why.to_owned()),
            Ok(Address { rank, .. }) if rank != peer => Err(format!("is of rank {rank}")),
            Ok(address) => self.outbound.connect(&mut self.core, address),
        };
        outcome.map_err(|why| {
            Error::transport(
                format!("address of rank {peer} ({} bytes) {why}", address.len()),
                "exchange the addresses anew, between ranks of one host, user and network namespace, with the same \
                     version of tokenyard and the same NICs",
            )
        })
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        self.core.look();
        self.outbound.post(&mut self.core, write)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        self.core.look();
        self.outbound.send(&mut self.core, peer, message)
    }

    fn flush(&mut self) -> Result<()> {
        self.core.look();
        self.outbound.flush(&mut self.core);
        Ok(())
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        self.core.tick();
        self.outbound.flush(&mut self.core);
        self.receive()?;
        self.run_due();
        self.outbound.send_notices(&mut self.core);
        let talked = self.outbound.talk(&mut self.core);
        self.inbound.talk(&self.core);
        talked.map_err(|lasting| too_short(self.core.rank, "open", lasting))?;
        let mut batch = std::mem::take(&mut self.batch);
        batch.clear();
        batch.extend(std::iter::from_fn(|| self.core.endpoint.take()).take(self.core.config.poll_batch));
        for pending in &batch {
            on_event(pending.event());
        }
        self.batch = batch;
        Ok(self.batch.len())
    }

    /// An error leaves everything as it was.
    fn reset(&mut self) -> Result<()> {
        let door = open_door()?;
        self.outbound.reset(&mut self.core);
        self.inbound.reset(&mut self.core);
        self.core.clear_agenda();
        let endpoint = &mut self.core.endpoint;
        endpoint.key = door.key;
        endpoint.undelivered.retain(|pending| pending.slot().is_some());
        self.door = door;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
