//! File descriptors between the ranks of one node.
//!
//! Place in the data path: none; an arena's descriptor is handed to node peers while a context is built.
//! Runs on the caller's thread or host fiber and waits through `base::wait`. Never takes a descriptor from
//! a process of another user or one that is not a member.
//!
//! Each rank listens on a Unix socket with an abstract name, so nothing is left in a file system. Name and
//! a random key go to the members over the world's own collective. A sender sends the receiver's key and its
//! own rank with the descriptor, and both ends check that the other runs as the same user. The receiver answers
//! with one byte. A sender whose connection ends without that byte sends again, unless the peer listens no longer.
//! A sender may not just send and close: Linux (`__unix_dgram_recvmsg`) looks at the queue first and at the other
//! end's state later, so a receiver in between takes the connection for one that ended without a message.
//!
//! ```text
//!   all_gather(name, key) -> connect to each peer, send [its key, my rank] + fd, receive 1 byte -> all_gather(outcome)
//!                            accept from each peer, receive, send 1 byte
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IoSlice, Read};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind, connect, getsockopt,
    listen, recv, send, sendmsg, socket, sockopt,
};

use super::World;
use super::collective::{COLLECTIVE_LEFT, Failure, have};
use super::names::Names;
use crate::base::{Error, Rank, Result, quoted, wait};

const SITE: &str = "exchange_fds";
const KEY_BYTES: usize = 32;
/// Key and rank.
const HELLO_BYTES: usize = KEY_BYTES + 4;
/// Most descriptors the kernel passes in one message; room for all, so that none is cut off and leaked.
const KERNEL_FD_LIMIT: usize = 253;
/// As much control data, in words that are aligned for it.
const CONTROL_WORDS: usize =
    // SAFETY: arithmetic alone.
    unsafe { libc::CMSG_SPACE((KERNEL_FD_LIMIT * size_of::<RawFd>()) as u32) as usize }.div_ceil(size_of::<u64>());

type Key = [u8; KEY_BYTES];

/// Descriptors on offer to other ranks of this process, by ticket.
static OFFERED: Mutex<BTreeMap<u64, Arc<OwnedFd>>> = Mutex::new(BTreeMap::new());
static NEXT_TICKET: AtomicU64 = AtomicU64::new(0);

/// One offer; withdrawn when dropped. A rank that has looked it up keeps the descriptor open.
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

/// Exchange within one process: tickets are gathered, and each rank duplicates the descriptors that it needs.
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

/// Exchange between ranks of one host: the ranks of a node, among each other.
pub(super) fn exchange_between(world: &World, own: BorrowedFd<'_>) -> Result<Vec<Option<OwnedFd>>> {
    // A rank that cannot take part reports that in the collective, so that nobody waits for it.
    let (offer, listener) = match Listener::open(world.rank()) {
        Ok(listener) => (encode_offer(&listener), Ok(listener)),
        Err(problem) => (problem.clone().into_bytes(), Err(Stopped::Problem(problem))),
    };
    let offers = world.all_gather(SITE, &offer)?;
    let mut interrupted = None;
    let exchanged = listener.and_then(|listener| Exchange::new(world, listener, &offers)?.run(world, own));
    let received = exchanged.map_err(|stopped| match stopped {
        Stopped::Problem(problem) => problem,
        Stopped::Interrupted(error) => interrupted.insert(error.ending()).to_string(),
    });
    agree(world, received).map_err(|error| interrupted.unwrap_or(error))
}

/// Why an exchange ended.
enum Stopped {
    Problem(String),
    Interrupted(Error),
}

impl From<String> for Stopped {
    fn from(problem: String) -> Stopped {
        Stopped::Problem(problem)
    }
}

/// Closing collective: all ranks succeed, or all name the rank that failed, and the reason.
fn agree(world: &World, received: std::result::Result<Vec<Option<OwnedFd>>, String>) -> Result<Vec<Option<OwnedFd>>> {
    let problem = received.as_ref().err().map_or("", String::as_str);
    let problems = world.all_gather("exchange_fds outcome", problem.as_bytes())?;
    match (received, problems.iter().position(|problem| !problem.is_empty())) {
        (Ok(fds), None) => Ok(fds),
        (_, at) => {
            let (rank, text) = at.map_or((0, String::new()), |at| (at, quoted(&problems[at])));
            let name = world.original(Rank(rank as u32));
            let what = format!("rank {name} could not exchange file descriptors: {text}");
            let advice = "run the ranks of a node on one host, as one user, in one network namespace, with room in their \
                          limit on open files (ulimit -n)";
            Err(Failure::new(what, advice).error())
        }
    }
}

/// What must be equal for abstract socket names to mean the same: the running kernel and the namespace.
pub(crate) fn host() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").map(|p| p.to_string_lossy().into_owned()).unwrap_or_default();
    format!("{} {network}", boot.trim())
}

/// Whether descriptors or the kernel's memory have run out. Another part of the process may cause it, and it may pass.
pub(crate) fn is_shortage(errno: Errno) -> bool {
    matches!(errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM)
}

#[cfg(test)]
thread_local! {
    /// Tests let descriptors run out for their own thread alone.
    pub(crate) static SHORT_HERE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Asked before each socket is opened; fails in tests alone.
pub(crate) fn may_open() -> nix::Result<()> {
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
    fn open(rank: Rank) -> std::result::Result<Listener, String> {
        let mut random = [0; 16 + KEY_BYTES];
        let mut source = File::open("/dev/urandom").map_err(|error| format!("/dev/urandom: {error}"))?;
        source.read_exact(&mut random).map_err(|error| format!("/dev/urandom: {error}"))?;
        let (nonce, secret) = random.split_at(16);
        let mut key = [0; KEY_BYTES];
        key.copy_from_slice(secret);
        let nonce: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("tokenyard-{rank}-{nonce}");
        let fd = unix_socket().map_err(text)?;
        let addr = UnixAddr::new_abstract(name.as_bytes()).map_err(text)?;
        bind(fd.as_raw_fd(), &addr).map_err(text)?;
        listen(&fd, Backlog::MAXCONN).map_err(text)?;
        Ok(Listener { fd, name, key })
    }
}

/// A socket that keeps message boundaries and never blocks.
fn unix_socket() -> nix::Result<OwnedFd> {
    may_open()?;
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
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

/// A descriptor that a peer has not acknowledged.
struct Unsent {
    key: Key,
    addr: UnixAddr,
    /// The connection over which it was sent last, until its answer is read.
    sent: Option<OwnedFd>,
    /// Whether it was ever sent.
    tried: bool,
}

impl Unsent {
    fn new(key: Key, addr: UnixAddr) -> Unsent {
        Unsent { key, addr, sent: None, tried: false }
    }

    /// Sends if no connection waits for its answer; whether the peer has the descriptor.
    fn advance(&mut self, rank: Rank, own: BorrowedFd<'_>) -> nix::Result<bool> {
        if self.sent.is_none() {
            match send_to(&self.addr, &self.key, rank, own) {
                Ok(connection) => (self.sent, self.tried) = (Some(connection), true),
                // The peer's exchange is over, and its name may be another user's by now. The closing collective tells
                // how it ended.
                Err(Errno::ECONNREFUSED | Errno::EPERM) if self.tried => return Ok(true),
                // The peer closed its listener in between; the next connection tells.
                Err(Errno::EPIPE | Errno::ECONNRESET) => return Ok(false),
                Err(errno) => return Err(errno),
            }
        }
        let answer = self.sent.as_ref().map_or(Ok(0), |fd| recv(fd.as_raw_fd(), &mut [0], MsgFlags::empty()));
        match answer {
            Ok(1) => return Ok(true),
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            // Closed without an answer.
            Ok(_) | Err(_) => self.sent = None,
        }
        Ok(false)
    }
}

/// One rank's side of the exchange between the two collectives.
struct Exchange {
    rank: Rank,
    names: Names,
    listener: Listener,
    /// By rank; `None` once acknowledged, for this rank, and for ranks of other nodes.
    unsent: Vec<Option<Unsent>>,
    /// Ranks of this node.
    peers: std::ops::Range<usize>,
    accepted: Vec<OwnedFd>,
    received: Vec<Option<OwnedFd>>,
    /// What the last step could not do for lack of descriptors or memory; retried until the deadline.
    shortage: Option<String>,
    /// Why the last connection was given up whose descriptor could not be taken.
    lost: Option<String>,
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
            let who = world.original(Rank(rank as u32));
            let (key, name, host) =
                decode_offer(offer).ok_or_else(|| format!("rank {who} could not open a socket ({})", quoted(offer)))?;
            if host != here {
                return Err(format!("rank {who} is on another host or in another network namespace"));
            }
            unsent.push(Some(Unsent::new(key, UnixAddr::new_abstract(name.as_bytes()).map_err(text)?)));
        }
        let received = offers.iter().map(|_| None).collect();
        let (rank, names, peers) = (world.rank(), world.family.names.clone(), world.node_peers());
        let accepted = Vec::new();
        Ok(Exchange { rank, names, peers, listener, unsent, accepted, received, shortage: None, lost: None })
    }

    fn run(mut self, world: &World, own: BorrowedFd<'_>) -> std::result::Result<Vec<Option<OwnedFd>>, Stopped> {
        // Less than the collectives' deadline, so that the outcome is reported before the others give up.
        let timeout = world.timeout() - world.timeout() / 4;
        let finished = wait::poll_unless(SITE, timeout, COLLECTIVE_LEFT, || match self.step(own) {
            Err(problem) => Some(Err(problem)),
            Ok(()) => match world.lost_peers().first() {
                Some(peer) => Some(Err(format!("rank {} is lost", self.names.of(*peer)))),
                None => (self.unsent.iter().all(Option::is_none) && self.absent().is_empty()).then_some(Ok(())),
            },
        });
        match finished.map_err(Stopped::Interrupted)? {
            Some(outcome) => Ok(outcome.map(|()| self.received)?),
            None => Ok(self.late(timeout)?),
        }
    }

    /// The outcome at the deadline. Whoever lacks what this rank has sent reports that; else the answer alone was lost.
    fn late(self, timeout: Duration) -> std::result::Result<Vec<Option<OwnedFd>>, String> {
        if self.absent().is_empty() && self.never_sent() == 0 { Ok(self.received) } else { Err(self.too_late(timeout)) }
    }

    fn too_late(&self, timeout: Duration) -> String {
        let (absent, unsent) = (self.absent(), self.never_sent());
        let mut problem = format!("after {} ms", timeout.as_millis());
        if !absent.is_empty() {
            let absent: Vec<Rank> = absent.iter().map(|rank| self.names.of(*rank)).collect();
            problem += &format!(" {} not sent theirs", have(&absent, absent.len()));
        }
        if unsent > 0 {
            problem +=
                &format!("{} it could not send its own to {unsent}", if absent.is_empty() { "" } else { ", and" });
        }
        for reason in self.shortage.iter().chain(&self.lost) {
            problem += &format!(" ({reason})");
        }
        problem
    }

    fn never_sent(&self) -> usize {
        self.unsent.iter().flatten().filter(|unsent| !unsent.tried).count()
    }

    fn absent(&self) -> Vec<Rank> {
        let ranks = (0u32..).map(Rank).zip(&self.received);
        let awaited = |rank: Rank| rank != self.rank && self.peers.contains(&rank.index());
        ranks.filter(|(rank, fd)| awaited(*rank) && fd.is_none()).map(|(rank, _)| rank).collect()
    }

    fn step(&mut self, own: BorrowedFd<'_>) -> std::result::Result<(), String> {
        self.shortage = None;
        for (rank, slot) in self.unsent.iter_mut().enumerate() {
            let Some(unsent) = slot else { continue };
            let name = self.names.of(Rank(rank as u32));
            match unsent.advance(self.rank, own) {
                Ok(true) => *slot = None,
                Ok(false) => {}
                // Its queue is full for now.
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(errno) if is_shortage(errno) => self.shortage = Some(format!("sending to rank {name}: {errno}")),
                Err(Errno::EPERM) => return Err(format!("sending to rank {name}: it runs as another user")),
                Err(errno) => return Err(format!("sending to rank {name}: {errno}")),
            }
        }
        self.accept();
        self.receive(&mut [0; CONTROL_WORDS]);
        Ok(())
    }

    /// Accepts waiting connections. A connection that cannot be accepted now keeps waiting.
    fn accept(&mut self) {
        loop {
            let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
            match may_open().and_then(|()| accept4(self.listener.fd.as_raw_fd(), flags)) {
                Ok(raw) => {
                    // SAFETY: accept4 has just made this descriptor, and nothing else owns it.
                    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
                    if same_user(&fd) {
                        self.accepted.push(fd);
                    }
                }
                Err(Errno::EINTR | Errno::ECONNABORTED) => {}
                Err(Errno::EAGAIN) => return,
                Err(errno) => {
                    self.shortage = Some(format!("taking a connection: {errno}"));
                    return;
                }
            }
        }
    }

    /// Receives what has come; a connection is closed after its first message, whoever sent it. What could not be taken
    /// is not answered, so its sender sends it again.
    fn receive(&mut self, control: &mut [u64]) {
        for fd in std::mem::take(&mut self.accepted) {
            let (rank, passed) = match receive_one(&fd, control) {
                Ok(Some((key, rank, passed))) if same_key(&key, &self.listener.key) => (rank, passed),
                Ok(_) => continue,
                Err(errno) => {
                    if matches!(errno, Errno::EAGAIN | Errno::EINTR) || is_shortage(errno) {
                        self.accepted.push(fd);
                    } else {
                        self.lost = Some(format!("a connection broke: {errno}"));
                    }
                    continue;
                }
            };
            let Some(slot) = self.received.get_mut(rank.index()).filter(|_| rank != self.rank) else { continue };
            if slot.is_none() && passed.is_none() {
                let name = self.names.of(rank);
                self.lost = Some(format!("the descriptor of rank {name} came when this process could open no more"));
                continue;
            }
            *slot = slot.take().or(passed);
            self.lost = None;
            // A sender that does not get this sends again.
            let _ = send(fd.as_raw_fd(), &[1], MsgFlags::MSG_NOSIGNAL);
        }
    }
}

/// Connects and sends; `EAGAIN` if the peer's queue is full for now, `EPERM` if it runs as another user. The peer's
/// answer comes over the connection.
fn send_to(addr: &UnixAddr, key: &Key, rank: Rank, own: BorrowedFd<'_>) -> nix::Result<OwnedFd> {
    let fd = unix_socket()?;
    connect(fd.as_raw_fd(), addr)?;
    if !same_user(&fd) {
        return Err(Errno::EPERM);
    }
    let hello = [&key[..], &rank.0.to_le_bytes()].concat();
    let passed = [own.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&passed)];
    sendmsg::<UnixAddr>(fd.as_raw_fd(), &[IoSlice::new(&hello)], &rights, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(fd)
}

/// One message, `None` if it is not a hello with one descriptor. The descriptor is `None` if it was sent but the
/// kernel could not install it in this process. All received descriptors are owned, so surplus ones are closed.
fn receive_one(fd: &OwnedFd, control: &mut [u64]) -> nix::Result<Option<(Key, Rank, Option<OwnedFd>)>> {
    let mut hello = [0u8; HELLO_BYTES + 1];
    let Message { bytes, mut passed, cut } = receive_message(fd, &mut hello, control)?;
    let one = passed.pop();
    let hello: &[u8; HELLO_BYTES + 1] = &hello;
    match (bytes, passed.is_empty() && one.is_some() != cut, hello.split_first_chunk::<KEY_BYTES>()) {
        (HELLO_BYTES, true, Some((key, [a, b, c, d, ..]))) => {
            Ok(Some((*key, Rank(u32::from_le_bytes([*a, *b, *c, *d])), one)))
        }
        _ => Ok(None),
    }
}

struct Message {
    bytes: usize,
    passed: Vec<OwnedFd>,
    /// Not all descriptors that were sent have come: the buffer or the process had no room for them.
    cut: bool,
}

/// Receives one message. Not through `nix`: when some descriptors were cut off, `nix` hides the descriptors that did
/// come, and nobody could close them.
fn receive_message(fd: &OwnedFd, bytes: &mut [u8], control: &mut [u64]) -> nix::Result<Message> {
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: a kernel struct of integers and pointers; zeros mean absent in all of them.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
    (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), std::mem::size_of_val(control) as _);
    // SAFETY: the header names two buffers that live, and their lengths.
    let received = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut header, libc::MSG_CMSG_CLOEXEC) };
    let bytes = Errno::result(received)? as usize;
    let mut passed = Vec::new();
    // SAFETY: the kernel has filled the control buffer up to the length that the header has now, which the macros heed;
    // it is aligned for its entries, and the descriptors in it are new and owned by nothing else.
    unsafe {
        let mut entry = libc::CMSG_FIRSTHDR(&header);
        while let Some(found) = entry.as_ref() {
            if (found.cmsg_level, found.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let count = found.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
                let raws = libc::CMSG_DATA(entry).cast::<RawFd>();
                passed.extend((0..count).map(|at| OwnedFd::from_raw_fd(raws.add(at).read_unaligned())));
            }
            entry = libc::CMSG_NXTHDR(&header, entry);
        }
    }
    Ok(Message { bytes, passed, cut: header.msg_flags & libc::MSG_CTRUNC != 0 })
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
    fn a_deadline_that_never_comes_too_long_to_compute_with() {
        let world = alone().with_timeout(Duration::MAX);
        let own = File::open("/dev/null").unwrap();
        assert!(matches!(world.exchange_fds(own.as_fd()).as_deref(), Ok([None])));
    }

    /// Rank 0 of two, which has sent its own.
    fn exchange() -> Exchange {
        Exchange {
            rank: Rank(0),
            names: Names::all(2),
            peers: 0..2,
            listener: Listener::open(Rank(0)).unwrap(),
            unsent: vec![None, None],
            accepted: Vec::new(),
            received: vec![None, None],
            shortage: None,
            lost: None,
        }
    }

    #[test]
    fn a_shortage_of_descriptors_reported_as_a_rank_that_sends_nothing() {
        let (mut exchange, own) = (exchange(), File::open("/dev/null").unwrap());
        let addr = UnixAddr::new_abstract(exchange.listener.name.as_bytes()).unwrap();
        let key = exchange.listener.key;
        let _connection = send_to(&addr, &key, Rank(1), own.as_fd()).unwrap();
        exchange.unsent[1] = Some(Unsent::new(key, addr));
        SHORT_HERE.set(true);
        let (step, text) = (exchange.step(own.as_fd()), exchange.too_late(Duration::from_millis(7)));
        SHORT_HERE.set(false);
        assert_eq!(step, Ok(()), "it may pass");
        assert!(text.starts_with("after 7 ms rank 1 has not sent theirs") && text.contains("EMFILE"), "{text}");
        // The shortage has passed: the waiting connection is accepted, and the unsent message is sent (to this socket).
        assert_eq!(exchange.step(own.as_fd()), Ok(()));
        assert!(exchange.received[1].is_some() && exchange.shortage.is_none());
        assert!(exchange.unsent[1].as_ref().is_some_and(|unsent| unsent.tried));
    }

    /// A message with `count` descriptors of a pipe's write end, and the read end.
    fn message(hello: &[u8], count: usize) -> (OwnedFd, File) {
        let (reader, writer) = std::io::pipe().unwrap();
        let (ours, theirs) =
            nix::sys::socket::socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .unwrap();
        let raws = vec![writer.as_raw_fd(); count];
        let rights = [ControlMessage::ScmRights(&raws)];
        sendmsg::<UnixAddr>(theirs.as_raw_fd(), &[IoSlice::new(hello)], &rights, MsgFlags::empty(), None).unwrap();
        (ours, OwnedFd::from(reader).into())
    }

    #[test]
    fn descriptors_that_came_with_some_cut_off_left_open() {
        let hello = [&[7; KEY_BYTES][..], &1u32.to_le_bytes()].concat();
        let taken = |count: usize, words: usize| {
            let (socket, mut reader) = message(&hello, count);
            let taken = receive_one(&socket, &mut vec![0; words]).unwrap();
            let taken = taken.map(|(key, rank, passed)| (key == [7; KEY_BYTES], rank, passed.is_some()));
            // Ends at once if no write end is open.
            drop(socket);
            nix::fcntl::fcntl(&reader, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK)).unwrap();
            (taken, reader.read(&mut [0]).map_err(|error| error.kind()))
        };
        // Room for two descriptors is three words.
        assert_eq!(taken(1, CONTROL_WORDS), (Some((true, Rank(1), true)), Ok(0)));
        assert_eq!(taken(3, CONTROL_WORDS), (None, Ok(0)), "surplus");
        assert_eq!(taken(3, 3), (None, Ok(0)), "surplus, of which two came");
        assert_eq!(taken(1, 0), (Some((true, Rank(1), false)), Ok(0)), "cut off");
        assert_eq!(taken(0, CONTROL_WORDS), (None, Ok(0)));
    }

    /// Ends of both sides, and what is sent at first cannot be taken.
    fn sent_again(spoil: impl FnOnce(&mut Exchange), expected: &str) {
        let (mut exchange, own) = (exchange(), File::open("/dev/null").unwrap());
        let addr = UnixAddr::new_abstract(exchange.listener.name.as_bytes()).unwrap();
        let mut peer = Unsent::new(exchange.listener.key, addr);
        assert_eq!(peer.advance(Rank(1), own.as_fd()), Ok(false), "nobody has answered");
        exchange.accept();
        spoil(&mut exchange);
        assert!(exchange.received[1].is_none());
        let text = exchange.too_late(Duration::from_millis(7));
        assert!(text.contains("rank 1 has not sent theirs") && text.contains(expected), "{text}");
        assert_eq!(peer.advance(Rank(1), own.as_fd()), Ok(false), "it sends again after this");
        assert_eq!(peer.advance(Rank(1), own.as_fd()), Ok(false));
        assert_eq!(exchange.step(own.as_fd()), Ok(()));
        assert!(exchange.received[1].is_some());
        drop(exchange);
        assert_eq!(peer.advance(Rank(1), own.as_fd()), Ok(true), "the answer outlives its sender");
    }

    #[test]
    fn a_descriptor_that_was_cut_off_sent_again() {
        sent_again(
            |exchange| exchange.receive(&mut []),
            "the descriptor of rank 1 came when this process could open no more",
        );
    }

    #[test]
    fn a_descriptor_on_a_connection_that_broke_sent_again() {
        let broken = |exchange: &mut Exchange| {
            // Not a socket.
            exchange.accepted = vec![File::open("/dev/null").unwrap().into()];
            exchange.receive(&mut [0; CONTROL_WORDS]);
        };
        sent_again(broken, "a connection broke: ENOTSOCK");
    }

    #[test]
    fn a_descriptor_sent_before_to_a_rank_that_is_through_done_with() {
        let (exchange, own) = (exchange(), File::open("/dev/null").unwrap());
        let addr = UnixAddr::new_abstract(exchange.listener.name.as_bytes()).unwrap();
        let [mut sent, mut never] = [(); 2].map(|()| Unsent::new(exchange.listener.key, addr));
        assert_eq!(sent.advance(Rank(1), own.as_fd()), Ok(false));
        drop(exchange);
        assert_eq!((0..2).map(|_| sent.advance(Rank(1), own.as_fd())).collect::<Vec<_>>(), [Ok(false), Ok(true)]);
        assert_eq!(never.advance(Rank(1), own.as_fd()), Err(Errno::ECONNREFUSED), "nothing was sent");
    }

    #[test]
    fn a_rank_that_lacks_answers_alone_through_at_its_deadline() {
        for (tried, expected) in [(true, Ok(2)), (false, Err("after 7 ms it could not send its own to 1".to_string()))]
        {
            let mut exchange = exchange();
            exchange.received[1] = Some(File::open("/dev/null").unwrap().into());
            let addr = UnixAddr::new_abstract(exchange.listener.name.as_bytes()).unwrap();
            exchange.unsent[1] = Some(Unsent { tried, ..Unsent::new(exchange.listener.key, addr) });
            assert_eq!(exchange.late(Duration::from_millis(7)).map(|fds| fds.len()), expected);
        }
    }
}
