//! One non-blocking TCP connection that carries frames.
//!
//! Place in the data path: none. Runs on the bootstrap thread. Never blocks: what cannot be sent now is
//! kept in order and sent when the socket takes it.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};

use super::wire::{Frame, FrameReader, HEADER_BYTES, MAX_HELLO_BODY, Malformed};

/// Bytes taken from the kernel per read.
const READ_BYTES: usize = 64 << 10;
/// Most bytes taken from a connection before it is admitted: a hello, and one byte that shows whether more came.
const FIRST_BYTES: usize = HEADER_BYTES + MAX_HELLO_BODY + 1;
/// Reads per poll, so that one busy peer cannot hold up the others.
const READS_PER_POLL: usize = 64;
/// Seconds between keep-alive probes; also the unanswered probes after which a silent host counts as gone.
const PROBE_SECONDS: u32 = 1;
const PROBES: u32 = 3;
/// How long sent bytes may stay unacknowledged by the peer's kernel.
const UNACKNOWLEDGED_MS: u32 = 10_000;

/// Why a connection gives no more frames.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ended {
    /// The peer closed it, or its kernel or host has gone.
    Closed,
    /// The peer sent something that is no frame.
    Malformed(Malformed),
}

/// The connection and its two queues.
pub(super) struct Conn {
    stream: TcpStream,
    reader: FrameReader,
    out: VecDeque<Arc<[u8]>>,
    /// Bytes of the front of `out` that the socket has taken.
    taken: usize,
    /// The other end, for messages.
    pub peer: String,
    /// Its address.
    ip: Option<IpAddr>,
}

impl Conn {
    /// Wraps a connected socket; bodies over `limit` bytes are refused.
    pub(super) fn new(stream: TcpStream, limit: usize) -> std::io::Result<Conn> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // Without these a dead host is noticed later; a dead process is noticed as soon either way.
        let _ = setsockopt(&stream, sockopt::KeepAlive, &true);
        let _ = setsockopt(&stream, sockopt::TcpKeepIdle, &PROBE_SECONDS);
        let _ = setsockopt(&stream, sockopt::TcpKeepInterval, &PROBE_SECONDS);
        let _ = setsockopt(&stream, sockopt::TcpKeepCount, &PROBES);
        let _ = setsockopt(&stream, sockopt::TcpUserTimeout, &UNACKNOWLEDGED_MS);
        let address = stream.peer_addr();
        let ip = address.as_ref().ok().map(|address| address.ip().to_canonical());
        let peer = address.map_or_else(|_| "an unknown address".into(), |a| a.to_string());
        Ok(Conn { stream, reader: FrameReader::new(limit), out: VecDeque::new(), taken: 0, peer, ip })
    }

    /// Changes the longest body accepted from now on.
    pub(super) fn set_limit(&mut self, limit: usize) {
        self.reader.set_limit(limit);
    }

    /// Where the other end's host is reached, as seen from here; empty if that is this host.
    pub(super) fn host(&self) -> String {
        host_at(self.ip)
    }

    /// Whether the other end is known to be on this host.
    pub(super) fn on_this_host(&self) -> bool {
        self.ip.is_some_and(|ip| ip.is_loopback())
    }

    /// Queues one encoded frame and sends what the socket takes.
    pub(super) fn send(&mut self, frame: Arc<[u8]>) {
        self.out.push_back(frame);
        self.flush();
    }

    /// Sends what the socket takes. A broken socket drops its queue; `receive` reports the end.
    pub(super) fn flush(&mut self) {
        while let Some(front) = self.out.front() {
            match self.stream.write(&front[self.taken..]) {
                Ok(0) => return,
                Ok(n) if self.taken + n < front.len() => self.taken += n,
                Ok(_) => {
                    self.taken = 0;
                    self.out.pop_front();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.taken = 0;
                    self.out.clear();
                }
            }
        }
    }

    /// Whether frames wait for the socket to take them.
    pub(super) fn sending(&self) -> bool {
        !self.out.is_empty()
    }

    /// Appends the frames that have come; an end is reported after the frames before it.
    pub(super) fn receive(&mut self, frames: &mut Vec<Frame>) -> Result<(), Ended> {
        let mut buffer = vec![0; READ_BYTES];
        for _ in 0..READS_PER_POLL {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(Ended::Closed),
                Ok(n) => {
                    self.reader.push(&buffer[..n]);
                    while let Some(frame) = self.reader.next_frame().map_err(Ended::Malformed)? {
                        frames.push(frame);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(_) => return Err(Ended::Closed),
            }
        }
        Ok(())
    }

    /// The next frame of a stranger, once the whole frame has come, and whether bytes followed it. The sender is not
    /// proved yet, so this reads at most the longest hello and one byte more.
    pub(super) fn receive_first(&mut self) -> Result<Option<(Frame, bool)>, Ended> {
        let mut buffer = [0; FIRST_BYTES];
        let mut closed = false;
        while !closed && self.reader.held() < FIRST_BYTES {
            match self.stream.read(&mut buffer[self.reader.held()..]) {
                Ok(0) => closed = true,
                Ok(n) => {
                    let from = self.reader.held();
                    self.reader.push(&buffer[from..from + n]);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => closed = true,
            }
        }
        let first = self.reader.next_frame().map_err(Ended::Malformed)?;
        if closed { Err(Ended::Closed) } else { Ok(first.map(|frame| (frame, self.reader.held() > 0))) }
    }

    /// Reads and discards; true when the peer has closed.
    fn drained(&mut self) -> bool {
        let mut buffer = [0; 4096];
        for _ in 0..READS_PER_POLL {
            match self.stream.read(&mut buffer) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return !matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock),
            }
        }
        false
    }

    /// Whether both ends have the same address: a connection to itself on a free port.
    pub(super) fn met_itself(&self) -> bool {
        matches!((self.stream.local_addr(), self.stream.peer_addr()), (Ok(a), Ok(b)) if a == b)
    }
}

impl AsFd for Conn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// An address as other hosts can use it; empty for a loopback address, which means this host.
fn host_at(ip: Option<IpAddr>) -> String {
    ip.filter(|ip| !ip.is_loopback()).map(|ip| ip.to_string()).unwrap_or_default()
}

/// A connection that sends its last frames and waits for the peer to close: closing at once with unread
/// input would reset it, and the peer could lose what was sent.
pub(super) struct Closing {
    conn: Conn,
    deadline: Instant,
    half_closed: bool,
}

impl Closing {
    pub(super) fn new(conn: Conn, patience: Duration) -> Closing {
        Closing { conn, deadline: Instant::now() + patience, half_closed: false }
    }

    /// Advances; true when it can be dropped.
    pub(super) fn done(&mut self) -> bool {
        self.conn.flush();
        if !self.conn.sending() && !self.half_closed {
            self.half_closed = true;
            let _ = self.conn.stream.shutdown(Shutdown::Write);
        }
        self.conn.drained() || Instant::now() >= self.deadline
    }

    pub(super) fn conn(&self) -> &Conn {
        &self.conn
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }
}

/// The events to wait for on a socket.
pub(super) fn interest(conn: &Conn) -> PollFd<'_> {
    let out = if conn.sending() { PollFlags::POLLOUT } else { PollFlags::empty() };
    PollFd::new(conn.as_fd(), PollFlags::POLLIN | out)
}

/// Waits until one of `fds` is ready or `until` has come. Only the bootstrap thread may wait like this. False if the
/// system does not tell which are ready: any of them may be.
pub(super) fn wait_ready(fds: &mut [PollFd], until: Instant) -> bool {
    let left = until.saturating_duration_since(Instant::now());
    // One more, so that a fraction of a millisecond does not become a busy loop.
    let millis = u16::try_from(left.as_millis() + 1).unwrap_or(u16::MAX);
    let known = tells_of_ready(poll(fds, PollTimeout::from(millis)));
    if !known {
        // Check all sockets again a little later.
        std::thread::sleep(Duration::from_millis(10));
    }
    known
}

/// Whether poll(2) tells which are ready: not if it is out of kernel memory, or has more descriptors than its limit.
fn tells_of_ready(polled: Result<i32, Errno>) -> bool {
    matches!(polled, Ok(_) | Err(Errno::EINTR))
}

/// Whether a descriptor may be ready after [`wait_ready`], which returned `known`.
pub(super) fn may_be_ready(known: bool, fd: &PollFd) -> bool {
    !known || fd.any() != Some(false)
}

#[cfg(test)]
mod tests {
    use super::super::wire::{self, Message};
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn any_may_be_ready_after_a_poll_that_failed() {
        assert!(tells_of_ready(Ok(0)) && tells_of_ready(Err(Errno::EINTR)));
        assert!(!tells_of_ready(Err(Errno::EINVAL)) && !tells_of_ready(Err(Errno::ENOMEM)));
        let (_quiet, strange) = pair();
        let mut quiet = [PollFd::new(strange.as_fd(), PollFlags::POLLIN)];
        let known = wait_ready(&mut quiet, Instant::now() + Duration::from_millis(5));
        assert_eq!([known, true, false].map(|known| may_be_ready(known, &quiet[0])), [false, false, true]);
    }

    /// Both ends of a connection; this one takes frames of strangers.
    fn pair() -> (Conn, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Conn::new(listener.accept().unwrap().0, MAX_HELLO_BODY).unwrap(), theirs)
    }

    /// The first frame's kind, once it is known.
    fn first(conn: &mut Conn) -> Result<(u16, bool), Ended> {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(10) {
            if let Some((frame, more)) = conn.receive_first()? {
                return Ok((frame.kind, more));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("no first frame");
    }

    #[test]
    fn a_stranger_who_is_read_to_the_end() {
        let hello = Message::Hello { nonce: [7; 32], own_host: false };
        let (hello, goodbye) = (wire::encode(&hello).unwrap(), wire::encode(&Message::Goodbye).unwrap());
        let (mut conn, mut theirs) = pair();
        theirs.set_nonblocking(true).unwrap();
        let mut flood = hello.clone();
        (0..100_000).for_each(|_| flood.extend(&goodbye));
        let sent = theirs.write(&flood).unwrap();
        assert!(sent > 2 * FIRST_BYTES, "{sent}");
        assert_eq!(first(&mut conn), Ok((1, true)));
        assert!(conn.reader.held() + hello.len() <= FIRST_BYTES, "{} bytes of a stranger", conn.reader.held());
        // A hello and no further bytes, in two parts; a hello cut short; and bytes that are no hello.
        let (mut conn, mut theirs) = pair();
        theirs.write_all(&hello[..20]).unwrap();
        assert!(matches!(conn.receive_first(), Ok(None)));
        theirs.write_all(&hello[20..]).unwrap();
        assert_eq!(first(&mut conn), Ok((1, false)));
        let (mut conn, mut theirs) = pair();
        theirs.write_all(&hello[..20]).unwrap();
        drop(theirs);
        assert_eq!(first(&mut conn), Err(Ended::Closed));
        let (mut conn, mut theirs) = pair();
        theirs.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        drop(theirs);
        assert_eq!(first(&mut conn), Err(Ended::Malformed(Malformed::Magic)));
    }

    #[test]
    fn a_loopback_address_sent_to_other_hosts() {
        let host = |text: &str| host_at(text.parse::<IpAddr>().ok().map(|ip| ip.to_canonical()));
        assert_eq!(["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"].map(host), [""; 4]);
        assert_eq!(["10.1.2.3", "::ffff:10.1.2.3", "2001:db8::7"].map(host), ["10.1.2.3", "10.1.2.3", "2001:db8::7"]);
        assert_eq!(host_at(None), "");
    }
}
