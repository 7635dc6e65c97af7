//! The sockets between processes of one host: Unix sockets that keep message boundaries and never block.
//!
//! Place in the data path: under `outbound.rs` and `inbound.rs`. Runs on the thread that polls. Each endpoint listens
//! on an abstract name with a nonce in it, so that nothing is left in a file system and nobody finds it by chance.
//! Neither end accepts a process of another user.

use crate::transport::world::fds::may_open;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind, connect, getsockopt, listen, recv,
    send, socket, sockopt,
};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// The random part of a door's name.
pub(super) type Nonce = [u8; 16];

/// How many resets in a row a socket may report before it counts as reset; see [`receive`].
const RESETS: usize = 3;

/// How long a shortage may last before it is an error: well below the time after which peers take an endpoint without a
/// first sign of life for lost, so that the cause is reported first.
const SHORTAGE_PATIENCE: Duration = Duration::from_secs(10);

/// How long one step has failed at every try because of a shortage.
#[derive(Debug)]
pub(super) struct Shortage {
    since: Option<Instant>,
    pub(super) patience: Duration,
}

impl Default for Shortage {
    fn default() -> Shortage {
        Shortage { since: None, patience: SHORTAGE_PATIENCE }
    }
}

impl Shortage {
    /// The step was tried or was not needed. Fails with how long the shortage has lasted, if that is too long.
    pub(super) fn note(&mut self, short: Option<Errno>) -> Result<(), (Duration, Errno)> {
        let Some(errno) = short else {
            self.since = None;
            return Ok(());
        };
        let lasted = self.since.get_or_insert_with(Instant::now).elapsed();
        if lasted >= self.patience { Err((lasted, errno)) } else { Ok(()) }
    }
}

/// The listening socket of an endpoint; peers get nonce and key by its address, and must show the key.
#[derive(Debug)]
pub(super) struct Door {
    fd: OwnedFd,
    pub(super) nonce: Nonce,
    pub(super) key: u64,
}

impl Door {
    /// # Errors
    /// The missing resource, with the system's error.
    pub(super) fn open() -> Result<Door, (&'static str, std::io::Error)> {
        let problem = |error: std::io::Error| ("/dev/urandom", error);
        let (mut nonce, mut key) = (Nonce::default(), [0; 8]);
        let mut random = File::open("/dev/urandom").map_err(problem)?;
        random.read_exact(&mut nonce).and_then(|()| random.read_exact(&mut key)).map_err(problem)?;
        let fd = listening(&nonce).map_err(|errno| ("a Unix socket", errno.into()))?;
        Ok(Door { fd, nonce, key: u64::from_le_bytes(key) })
    }

    /// The next waiting connection; `None` if none waits.
    pub(super) fn accept(&self) -> nix::Result<Option<OwnedFd>> {
        may_open()?;
        match accept4(self.fd.as_raw_fd(), SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC) {
            // SAFETY: accept4 has just made this descriptor, and nothing else owns it.
            Ok(raw) => Ok(Some(unsafe { OwnedFd::from_raw_fd(raw) })),
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ECONNABORTED) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

impl AsFd for Door {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn listening(nonce: &Nonce) -> nix::Result<OwnedFd> {
    let fd = unix_socket()?;
    bind(fd.as_raw_fd(), &door_of(nonce)?)?;
    listen(&fd, Backlog::MAXCONN)?;
    Ok(fd)
}

fn door_of(nonce: &Nonce) -> nix::Result<UnixAddr> {
    let hex: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
    UnixAddr::new_abstract(format!("tokenyard-sim-{hex}").as_bytes())
}

fn unix_socket() -> nix::Result<OwnedFd> {
    may_open()?;
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
}

/// Connects; `None` if the door's queue is full, to be retried later.
pub(super) fn dial(nonce: &Nonce) -> nix::Result<Option<OwnedFd>> {
    let fd = unix_socket()?;
    match connect(fd.as_raw_fd(), &door_of(nonce)?) {
        Ok(()) if same_user(&fd) => Ok(Some(fd)),
        Ok(()) => Err(Errno::EPERM),
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Whether the process at the other end runs as this process's user.
pub(super) fn same_user(fd: &OwnedFd) -> bool {
    getsockopt(fd, sockopt::PeerCredentials).is_ok_and(|peer| peer.uid() == nix::unistd::geteuid().as_raw())
}

/// The outcome of sending a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sending {
    Sent,
    /// The socket takes it later.
    Full,
    /// The other end is closed. Its earlier frames can still be read.
    Closed,
    /// This socket will never take it.
    Broken,
}

pub(super) fn send_frame(fd: &OwnedFd, frame: &[u8]) -> Sending {
    match send(fd.as_raw_fd(), frame, MsgFlags::MSG_NOSIGNAL) {
        Ok(_) => Sending::Sent,
        Err(Errno::EAGAIN | Errno::EINTR | Errno::ENOBUFS | Errno::ENOMEM) => Sending::Full,
        Err(Errno::EPIPE | Errno::ECONNRESET | Errno::ENOTCONN) => Sending::Closed,
        Err(_) => Sending::Broken,
    }
}

/// The outcome of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Receipt {
    /// A frame of so many bytes. A frame that does not fit the buffer fills it.
    Frame(usize),
    Nothing,
    Ended,
}

/// Reads one frame. An end that closes with unread frames resets the socket, and the kernel reports the reset before
/// that end's last frames: so a reset is no reason to stop reading.
pub(super) fn receive(fd: &OwnedFd, buffer: &mut [u8]) -> Receipt {
    for _ in 0..RESETS {
        match recv(fd.as_raw_fd(), buffer, MsgFlags::empty()) {
            Ok(0) => return Receipt::Ended,
            Ok(bytes) => return Receipt::Frame(bytes),
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ENOMEM) => return Receipt::Nothing,
            Err(Errno::ECONNRESET) => {}
            Err(_) => return Receipt::Ended,
        }
    }
    Receipt::Ended
}
