//! File descriptors between the ranks of one node.
//!
//! Place in the data path: none; an arena's descriptor is handed to node peers while a context is built.
//! Runs on the caller's thread or host fiber and waits through `base::wait`. Never takes a descriptor from
//! a process of another user or one that is not a member.
//!
//! Each rank listens on a Unix socket with an abstract name, so nothing is left in a file system. Name and
//! a random key go to the members over the world's own collective; a sender shows the receiver's key and
//! its rank beside the descriptor, and both ends check that the other runs as the same user.
//!
//! ```text
//!   all_gather(name, key) -> connect to each peer, send [its key, my rank] + fd -> all_gather(outcome)
//!                            accept from each peer
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind,
    connect, getsockopt, listen, recvmsg, sendmsg, socket, sockopt,
};

use super::hub::{Failure, have};
use super::world::World;
use crate::base::{Rank, Result, wait};

const SITE: &str = "exchange_fds";
const KEY_BYTES: usize = 32;
/// Key and rank.
const HELLO_BYTES: usize = KEY_BYTES + 4;
/// Most descriptors the kernel passes in one message; room for all, so that none is cut off and leaked.
const KERNEL_FD_LIMIT: usize = 253;

type Key = [u8; KEY_BYTES];

/// Descriptors on offer to other ranks of this process, by ticket.
static OFFERED: Mutex<BTreeMap<u64, Arc<OwnedFd>>> = Mutex::new(BTreeMap::new());
static NEXT_TICKET: AtomicU64 = AtomicU64::new(0);

/// One offer; withdrawn when dropped. Whoever has looked it up keeps the descriptor open meanwhile.
struct Ticket(u64);

impl Ticket {
    fn offer(fd: BorrowedFd<'_>) -> std::io::Result<Ticket> {
        let copy = Arc::new(fd.try_clone_to_owned()?);
        let number = NEXT_TICKET.fetch_add(1, Ordering::Relaxed);
        OFFERED.lock().unwrap_or_else(PoisonError::into_inner).insert(number, copy);
        Ok(Ticket(number))
    }

    fn redeem(number: u64) -> std::result::Result<OwnedFd, String> {
        let found = OFFERED.lock().unwrap_or_else(PoisonError::into_inner).get(&number).cloned();
        let fd = found.ok_or("a descriptor was withdrawn")?;
        fd.try_clone().map_err(|error| error.to_string())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        OFFERED.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// Ranks of one process: tickets are gathered, and each rank duplicates what it needs.
pub(super) fn exchange_within(world: &World, own: BorrowedFd<'_>) -> Result<Vec<Option<OwnedFd>>> {
    let ticket = Ticket::offer(own).map_err(|error| error.to_string());
    let number = ticket.as_ref().map_or(u64::MAX, |ticket| ticket.0);
    let numbers = world.all_gather(SITE, &number.to_le_bytes())?;
    let copies = numbers.iter().enumerate().map(|(rank, number)| {
        if rank == world.rank().index() || !world.node_peers().contains(&rank) {
            return Ok(None);
        }
        let number = number.as_slice().try_into().map_err(|_| "a malformed ticket".to_string())?;
        Ticket::redeem(u64::from_le_bytes(number)).map(Some)
    });
    let copies = copies.collect::<std::result::Result<Vec<_>, String>>();
    // The ticket outlives the closing collective, and with it every rank's use of it.
    agree(world, ticket.as_ref().map_err(String::clone).and(copies))
}

/// Ranks of one host, those of a node among each other.
pub(super) fn exchange_between(world: &World, own: BorrowedFd<'_>) -> Result<Vec<Option<OwnedFd>>> {
    // A rank that cannot take part says so in the collective, so that nobody waits for it.
    let (offer, listener) = match Listener::open(world) {
        Ok(listener) => (encode_offer(&listener), Ok(listener)),
        Err(problem) => (Vec::new(), Err(problem)),
    };
    let offers = world.all_gather(SITE, &offer)?;
    let received = listener.and_then(|listener| Exchange::new(world, listener, &offers)?.run(world, own));
    agree(world, received)
}

/// Closing collective: all ranks succeed or all name who did not, and why.
fn agree(world: &World, received: std::result::Result<Vec<Option<OwnedFd>>, String>) -> Result<Vec<Option<OwnedFd>>> {
    let problem = received.as_ref().err().map_or("", String::as_str);
    let problems = world.all_gather("exchange_fds outcome", problem.as_bytes())?;
    match (received, problems.iter().position(|problem| !problem.is_empty())) {
        (Ok(fds), None) => Ok(fds),
        (_, at) => {
            let (rank, text) = at.map_or((0, "".into()), |at| (at, String::from_utf8_lossy(&problems[at])));
            let what = format!("rank {rank} could not exchange file descriptors: {text}");
            Err(Failure::new(what, "run the ranks of a node on one host, as one user, in one network namespace")
                .error())
        }
    }
}

/// What must be equal for abstract socket names to mean the same: the running kernel and the namespace.
fn host() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").map(|p| p.to_string_lossy().into_owned()).unwrap_or_default();
    format!("{} {network}", boot.trim())
}

/// Whether descriptors or the kernel's memory have run out. That may be another part of the process, and pass.
pub(super) fn is_shortage(errno: Errno) -> bool {
    matches!(errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM)
}

#[cfg(test)]
thread_local! {
    /// Tests let descriptors run out for their own thread alone.
    pub(super) static SHORT_HERE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Asked before each socket is opened; fails in tests alone.
pub(super) fn may_open() -> nix::Result<()> {
    #[cfg(test)]
    if SHORT_HERE.get() {
        return Err(Errno::EMFILE);
    }
    Ok(())
}

struct Listener {
    fd: OwnedFd,
    name: String,
    key: Key,
}

impl Listener {
    fn open(world: &World) -> std::result::Result<Listener, String> {
        let mut random = [0; 16 + KEY_BYTES];
        let mut source = File::open("/dev/urandom").map_err(|error| format!("/dev/urandom: {error}"))?;
        source.read_exact(&mut random).map_err(|error| format!("/dev/urandom: {error}"))?;
        let (nonce, secret) = random.split_at(16);
        let mut key = [0; KEY_BYTES];
        key.copy_from_slice(secret);
        let nonce: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("tokenyard-{}-{nonce}", world.rank());
        let fd = unix_socket()?;
        let addr = UnixAddr::new_abstract(name.as_bytes()).map_err(text)?;
        bind(fd.as_raw_fd(), &addr).map_err(text)?;
        listen(&fd, Backlog::MAXCONN).map_err(text)?;
        Ok(Listener { fd, name, key })
    }
}

/// A socket that keeps message boundaries and never blocks.
fn unix_socket() -> std::result::Result<OwnedFd, String> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).map_err(text)
}

fn text(errno: Errno) -> String {
    errno.to_string()
}

fn encode_offer(listener: &Listener) -> Vec<u8> {
    [&listener.key[..], listener.name.as_bytes(), b"\n", host().as_bytes()].concat()
}

fn decode_offer(offer: &[u8]) -> Option<(Key, &str, &str)> {
    let (key, names) = offer.split_first_chunk::<KEY_BYTES>()?;
    let (name, host) = std::str::from_utf8(names).ok()?.split_once('\n')?;
    Some((*key, name, host))
}

/// One rank's side of the exchange between the two collectives.
struct Exchange {
    rank: Rank,
    listener: Listener,
    /// By rank; `None` once sent, for this rank, and for those of other nodes.
    unsent: Vec<Option<(Key, UnixAddr)>>,
    /// Ranks of this node.
    peers: std::ops::Range<usize>,
    accepted: Vec<OwnedFd>,
    received: Vec<Option<OwnedFd>>,
}

impl Exchange {
    fn new(world: &World, listener: Listener, offers: &[Vec<u8>]) -> std::result::Result<Exchange, String> {
        let here = host();
        let mut unsent = Vec::with_capacity(offers.len());
        for (rank, offer) in offers.iter().enumerate() {
            if rank == world.rank().index() || !world.node_peers().contains(&rank) {
                unsent.push(None);
                continue;
            }
            let (key, name, host) = decode_offer(offer).ok_or(format!("rank {rank} could not open a socket"))?;
            if host != here {
                return Err(format!("rank {rank} is on another host or in another network namespace"));
            }
            unsent.push(Some((key, UnixAddr::new_abstract(name.as_bytes()).map_err(text)?)));
        }
        let received = offers.iter().map(|_| None).collect();
        Ok(Exchange { rank: world.rank(), peers: world.node_peers(), listener, unsent, accepted: Vec::new(), received })
    }

    fn run(mut self, world: &World, own: BorrowedFd<'_>) -> std::result::Result<Vec<Option<OwnedFd>>, String> {
        // Less than the collectives' deadline, so that the outcome is told before the others give up.
        let timeout = world.timeout() - world.timeout() / 4;
        let finished = wait::poll(SITE, timeout, || match self.step(own) {
            Err(problem) => Some(Err(problem)),
            Ok(()) => match world.lost_peers().first() {
                Some(peer) => Some(Err(format!("rank {peer} is lost"))),
                None => (self.unsent.iter().all(Option::is_none) && self.absent().is_empty()).then_some(Ok(())),
            },
        });
        match finished {
            Some(outcome) => outcome.map(|()| self.received),
            None => {
                let absent = self.absent();
                Err(format!("after {} ms {} not sent theirs", timeout.as_millis(), have(&absent, absent.len())))
            }
        }
    }

    fn absent(&self) -> Vec<Rank> {
        let ranks = (0u32..).map(Rank).zip(&self.received);
        let awaited = |rank: Rank| rank != self.rank && self.peers.contains(&rank.index());
        ranks.filter(|(rank, fd)| awaited(*rank) && fd.is_none()).map(|(rank, _)| rank).collect()
    }

    fn step(&mut self, own: BorrowedFd<'_>) -> std::result::Result<(), String> {
        for (rank, slot) in self.unsent.iter_mut().enumerate() {
            if let Some((key, addr)) = slot
                && send_to(addr, key, self.rank, own).map_err(|problem| format!("sending to rank {rank}: {problem}"))?
            {
                *slot = None;
            }
        }
        self.accept();
        self.receive();
        Ok(())
    }

    fn accept(&mut self) {
        while let Ok(raw) = accept4(self.listener.fd.as_raw_fd(), SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC) {
            // SAFETY: accept4 has just made this descriptor, and nothing else owns it.
            let fd = unsafe { OwnedFd::from_raw_fd(raw) };
            if same_user(&fd) {
                self.accepted.push(fd);
            }
        }
    }

    /// Takes what has come; a connection is done with its first message, whoever sent it.
    fn receive(&mut self) {
        for fd in std::mem::take(&mut self.accepted) {
            match receive_one(&fd) {
                Err(Errno::EAGAIN | Errno::EINTR) => self.accepted.push(fd),
                Ok(Some((key, rank, passed))) if same_key(&key, &self.listener.key) && rank != self.rank => {
                    if let Some(slot @ None) = self.received.get_mut(rank.index()) {
                        *slot = Some(passed);
                    }
                }
                _ => {}
            }
        }
    }
}

/// Connects and sends; false if the peer's queue is full for now. The kernel keeps message and descriptor
/// for the receiver when this end closes.
fn send_to(addr: &UnixAddr, key: &Key, rank: Rank, own: BorrowedFd<'_>) -> std::result::Result<bool, String> {
    let fd = unix_socket()?;
    match connect(fd.as_raw_fd(), addr) {
        Ok(()) => {}
        Err(Errno::EAGAIN | Errno::EINTR) => return Ok(false),
        Err(errno) => return Err(text(errno)),
    }
    if !same_user(&fd) {
        return Err("it runs as another user".into());
    }
    let hello = [&key[..], &rank.0.to_le_bytes()].concat();
    let passed = [own.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&passed)];
    match sendmsg::<UnixAddr>(fd.as_raw_fd(), &[IoSlice::new(&hello)], &rights, MsgFlags::MSG_NOSIGNAL, None) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
        Err(errno) => Err(text(errno)),
    }
}

/// One message, `None` if it is not a hello with one descriptor. All descriptors that came are owned, so
/// that surplus ones are closed.
fn receive_one(fd: &OwnedFd) -> nix::Result<Option<(Key, Rank, OwnedFd)>> {
    let mut hello = [0u8; HELLO_BYTES + 1];
    let mut control = nix::cmsg_space!([std::os::fd::RawFd; KERNEL_FD_LIMIT]);
    let mut parts = [IoSliceMut::new(&mut hello)];
    let message = recvmsg::<UnixAddr>(fd.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut passed = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raws) = control {
            // SAFETY: the kernel has just made these descriptors for this process; nothing else owns them.
            passed.extend(raws.into_iter().map(|raw| unsafe { OwnedFd::from_raw_fd(raw) }));
        }
    }
    let bytes = message.bytes;
    let hello: &[u8; HELLO_BYTES + 1] = &hello;
    match (bytes, passed.pop(), passed.is_empty(), hello.split_first_chunk::<KEY_BYTES>()) {
        (HELLO_BYTES, Some(one), true, Some((key, [a, b, c, d, ..]))) => {
            Ok(Some((*key, Rank(u32::from_le_bytes([*a, *b, *c, *d])), one)))
        }
        _ => Ok(None),
    }
}

/// Whether the process at the other end runs as this process's user.
fn same_user(fd: &OwnedFd) -> bool {
    getsockopt(fd, sockopt::PeerCredentials).is_ok_and(|peer| peer.uid() == nix::unistd::geteuid().as_raw())
}

fn same_key(theirs: &Key, ours: &Key) -> bool {
    theirs.iter().zip(ours).fold(0u8, |acc, (a, b)| std::hint::black_box(acc | (a ^ b))) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Bootstrap;
    use std::os::fd::AsFd;
    use std::time::Duration;

    fn alone() -> World {
        let bootstrap = Bootstrap {
            rank: Rank(0),
            world: 1,
            local_rank: 0,
            addr: "127.0.0.1".into(),
            port: 1,
            token: "alone".into(),
            timeout: Duration::from_secs(20),
            nodes: None,
            generation: 0,
            members: None,
            first_nodes: None,
            own_addr: None,
        };
        World::join(&bootstrap).unwrap()
    }

    #[test]
    fn a_deadline_that_never_comes_too_long_to_reckon_with() {
        let world = alone().with_timeout(Duration::MAX);
        let own = File::open("/dev/null").unwrap();
        assert!(matches!(world.exchange_fds(own.as_fd()).as_deref(), Ok([None])));
    }
}
