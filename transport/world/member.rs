//! The bootstrap thread of every rank but 0: joins, carries this rank's part of collectives to rank 0,
//! and receives from rank 0 which ranks are gone.
//!
//! Place in the data path: none. Runs on its own thread, which alone touches the socket; it may block in
//! connecting and name resolution, so callers never do these themselves.
//!
//! ```text
//!   Dialing --connected--> Greeted --Challenge--> Proved --Accept--> Accepted --Welcome--> Joined --Leave--> end
//!      ^                      |                     |                   |                    |
//!      +----- closed ---------+---------------------+-------------------+                    +--closed: rank 0 is lost
//!      +--deadline, Fail, no bootstrap protocol there, no proof that it is rank 0: failure
//! ```

use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::admit;
use super::collective::{Failure, have};
use super::conn::{Closing, Conn, Ended, interest, wait_ready};
use super::names::Names;
use super::root::CLOSE_PATIENCE;
use super::secret::{self, Nonce, Nonces, Role, Secret};
use super::socket_thread::{Command, Port};
use super::terms::Terms;
use super::wire::{self, Frame, KIND_CHALLENGE, MAX_BODY, Message, VERSION};
use crate::base::{Rank, quoted};

/// First and longest pause between two attempts to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// Longest single attempt to connect.
const DIAL_PATIENCE: Duration = Duration::from_secs(1);
/// How much longer than its own deadline a rank waits once rank 0 has admitted it: rank 0, which started at
/// about the same time, has the list of missing ranks.
const VERDICT_GRACE: Duration = Duration::from_millis(500);
/// Longest sleep with nothing to do.
const IDLE: Duration = Duration::from_secs(30);

/// State of the thread.
pub(super) struct Member {
    pub port: Arc<Port>,
    pub rank: Rank,
    /// Of all ranks of the world.
    pub names: Names,
    pub secret: Secret,
    pub terms: Terms,
    /// Name or address of this rank's host for the others, or empty.
    pub host: String,
    /// Host and port of rank 0.
    pub root: (String, u16),
    pub timeout: Duration,
    pub deadline: Instant,
    /// From rank 0's last Progress: how many ranks have not joined, and the names of the first of them.
    pub absent: Option<(usize, Vec<Rank>)>,
    /// Number of the collective that this rank takes part in, or took part in last.
    pub asked: Option<u64>,
    /// Why the last attempt failed.
    pub problem: String,
}

/// How far a connection is.
enum Stage {
    /// Hello with this nonce is sent.
    Greeted(Nonce),
    /// Join is sent; the fields that follow its proof.
    Proved(Nonces, Vec<u8>),
    /// The other side has proved that it is rank 0.
    Accepted,
    /// The world has formed.
    Joined,
}

/// What to do after a connection has ended.
enum Next {
    DialAgain,
    End,
}

impl Member {
    /// The thread's body.
    pub(super) fn run(mut self) {
        let mut pause = FIRST_PAUSE;
        while Instant::now() < self.deadline {
            if let Some(conn) = self.dial()
                && matches!(self.attend(conn), Next::End)
            {
                return;
            }
            let mut bell = [PollFd::new(self.port.bell_fd(), PollFlags::POLLIN)];
            wait_ready(&mut bell, (Instant::now() + pause).min(self.deadline));
            if matches!(self.port.next_command(), Some(Command::Leave)) {
                return;
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        let failure = self.too_late();
        self.port.reports().fail(failure);
    }

    fn dial(&mut self) -> Option<Conn> {
        let addrs = match (self.root.0.as_str(), self.root.1).to_socket_addrs() {
            Ok(addrs) => addrs,
            Err(error) => {
                self.problem = format!("its name did not resolve: {error}");
                return None;
            }
        };
        for addr in addrs {
            let left = self.deadline.saturating_duration_since(Instant::now()).min(DIAL_PATIENCE);
            if left.is_zero() {
                return None;
            }
            match TcpStream::connect_timeout(&addr, left).and_then(|stream| Conn::new(stream, MAX_BODY)) {
                Ok(conn) if conn.met_itself() => self.problem = "nobody listens there".into(),
                Ok(conn) => return Some(conn),
                Err(error) => self.problem = error.to_string(),
            }
        }
        None
    }

    /// Sends a Hello and serves the connection until the connection or the world ends.
    fn attend(&mut self, mut conn: Conn) -> Next {
        let nonce = match secret::nonce() {
            Ok(nonce) => nonce,
            Err(failure) => {
                self.part(conn, failure);
                return Next::End;
            }
        };
        send(&mut conn, &Message::Hello { nonce, own_host: self.secret.own_host });
        self.problem = "it does not answer".into();
        let mut stage = Stage::Greeted(nonce);
        loop {
            let give_up = if self.absent.is_some() { self.deadline + VERDICT_GRACE } else { self.deadline };
            let joined = matches!(stage, Stage::Joined);
            let until = if joined { Instant::now() + IDLE } else { give_up };
            let mut fds = [interest(&conn), PollFd::new(self.port.bell_fd(), PollFlags::POLLIN)];
            wait_ready(&mut fds, until);
            self.port.receive_bell();
            conn.flush();
            let mut frames = Vec::new();
            let end = conn.receive(&mut frames);
            for frame in frames {
                if let Err(failure) = self.obey(frame, &mut conn, &mut stage) {
                    self.part(conn, failure);
                    return Next::End;
                }
            }
            let joined = matches!(stage, Stage::Joined);
            while let Some(command) = self.port.next_command() {
                match command {
                    Command::Gather { seq, what, payload } => {
                        self.asked = Some(seq);
                        send(&mut conn, &Message::Gather { seq, what: what.into(), payload });
                    }
                    Command::GiveUp { seq, waited_ms } => send(&mut conn, &Message::GiveUp { seq, waited_ms }),
                    Command::Leave => {
                        send(&mut conn, &Message::Goodbye);
                        self.close(conn);
                        return Next::End;
                    }
                }
            }
            match end {
                Ok(()) if joined || Instant::now() < give_up => {}
                Ok(()) => {
                    let failure = self.too_late();
                    self.part(conn, failure);
                    return Next::End;
                }
                Err(ended) => return self.ended(ended, joined, &conn.peer),
            }
        }
    }

    /// Acts on one frame of the peer that should be rank 0; an error ends the membership.
    fn obey(&mut self, frame: Frame, conn: &mut Conn, stage: &mut Stage) -> Result<(), Failure> {
        match stage {
            Stage::Greeted(member) if frame.kind == KIND_CHALLENGE => *stage = self.prove(&frame, conn, *member)?,
            Stage::Greeted(_) => return Err(self.refusal(&frame, &conn.peer)),
            Stage::Proved(nonces, fields) => {
                self.check_accept(&frame, &conn.peer, nonces, fields)?;
                *stage = Stage::Accepted;
            }
            Stage::Accepted | Stage::Joined => return self.follow(frame, &conn.peer, stage),
        }
        Ok(())
    }

    /// Answers a challenge: names this rank, and proves that it may join.
    fn prove(&self, frame: &Frame, conn: &mut Conn, member: Nonce) -> Result<Stage, Failure> {
        let malformed = |peer: &str, malformed: wire::Malformed| self.not_root(peer, &malformed.to_string());
        let (root, _) = wire::first_bytes(&frame.body).map_err(|error| malformed(&conn.peer, error))?;
        let nonces = Nonces { member, root };
        let join = |proof| Message::Join {
            proof,
            rank: self.rank.0,
            world: self.names.size() as u32,
            host: self.host.clone(),
            terms: self.terms.clone(),
        };
        let fields = wire::fields_after_proof(&join([0; 32])).map_err(|error| malformed(&conn.peer, error))?;
        send(conn, &join(self.secret.prove(Role::Member, &nonces, &fields)));
        // A rank 0 of another version gets this rank's name before both end, and notifies all members.
        if frame.version != VERSION {
            return Err(admit::other_version(&conn.peer, frame.version));
        }
        Ok(Stage::Proved(nonces, fields))
    }

    /// Checks that the accepting side has the secret, too.
    fn check_accept(&self, frame: &Frame, peer: &str, nonces: &Nonces, fields: &[u8]) -> Result<(), Failure> {
        match wire::decode(frame) {
            Ok(Message::Accept { proof }) if frame.version == VERSION => {
                if self.secret.proved(Role::Root, nonces, fields, &proof) {
                    return Ok(());
                }
                Err(self.not_root(peer, "a proof of another job token"))
            }
            _ => Err(self.refusal(frame, peer)),
        }
    }

    /// Acts on one frame of rank 0, which has proved its role.
    fn follow(&mut self, frame: Frame, peer: &str, stage: &mut Stage) -> Result<(), Failure> {
        if frame.version != VERSION {
            return Err(admit::other_version(peer, frame.version));
        }
        let (joined, size) = (matches!(stage, Stage::Joined), self.names.size());
        let message = wire::decode(&frame).map_err(|malformed| self.not_root(peer, &malformed.to_string()))?;
        let mut reports = self.port.reports();
        match message {
            Message::Fail { what, advice } if joined => reports.fail(reported(&what, &advice)),
            Message::Fail { what, advice } => return Err(reported(&what, &advice)),
            Message::Progress { absent, first } => {
                let first = first.into_iter().map(|rank| self.names.of(Rank(rank))).collect();
                self.absent = Some((absent as usize, first));
            }
            Message::Welcome { hosts } => {
                let usable = |host: &&String| host.is_empty() || admit::is_host(host);
                if hosts.len() != size {
                    let sent = format!("a welcome of {} ranks to a world of {size}", hosts.len());
                    return Err(self.not_root(peer, &sent));
                }
                if let Some(host) = hosts.iter().find(|host| !usable(host)) {
                    return Err(self.not_root(peer, &format!("{host:?} as the host of a rank")));
                }
                *stage = Stage::Joined;
                reports.form(hosts);
            }
            Message::Gathered { payloads, .. } if payloads.len() != size => {
                let sent = format!("the parts of {} ranks in a world of {size}", payloads.len());
                return Err(self.not_root(peer, &sent));
            }
            Message::Gathered { seq, .. } if self.asked != Some(seq) => {
                let own = self.asked.map_or("none".into(), |asked| asked.to_string());
                return Err(self.not_root(peer, &format!("collective number {seq}, and this rank's is number {own}")));
            }
            Message::Gathered { seq, payloads } => reports.gathered = Some((seq, payloads)),
            Message::Lost { rank } if (rank as usize) < size => reports.lose(Rank(rank)),
            Message::Lost { rank } => {
                return Err(self.not_root(peer, &format!("the loss of rank {rank} in a world of {size}")));
            }
            Message::Left { .. } => {}
            Message::Goodbye => {
                return Err(Failure::new(
                    format!("rank {} has left the world, and collectives go through it", self.names.root()),
                    "keep every rank's world until all collectives are done",
                ));
            }
            _ => return Err(self.not_root(peer, "a message that only members send")),
        }
        Ok(())
    }

    /// The connection ended on its own.
    fn ended(&mut self, ended: Ended, joined: bool, peer: &str) -> Next {
        let mut reports = self.port.reports();
        if joined {
            reports.refused += u64::from(matches!(ended, Ended::Malformed(_)));
            reports.lose(Rank(0));
            let root = self.names.root();
            reports.fail(Failure::new(
                format!("rank {root} is lost (its process or host has gone), and collectives go through it"),
                "restart it and form a new world",
            ));
            return Next::End;
        }
        match ended {
            Ended::Closed => {
                self.problem = "it closed the connection".into();
                self.absent = None;
                Next::DialAgain
            }
            Ended::Malformed(malformed) => {
                reports.fail(self.not_root(peer, &malformed.to_string()));
                Next::End
            }
        }
    }

    fn too_late(&self) -> Failure {
        let (rank, root, waited) = (self.names.of(self.rank), self.names.root(), self.timeout.as_millis());
        let (host, port) = &self.root;
        match &self.absent {
            Some((total, first)) if *total > 0 => Failure::new(
                format!("rank {rank} waited {waited} ms and {} not joined", have(first, *total)),
                "start them or see why they ended; TOKENYARD_TIMEOUT_MS sets the deadline",
            ),
            _ => Failure::new(
                format!("rank {rank} waited {waited} ms for rank {root} at {host}:{port} ({})", self.problem),
                format!(
                    "start rank {root} or see why it ended; MASTER_ADDR and TOKENYARD_PORT are its address, \
                     TOKENYARD_TIMEOUT_MS sets the deadline"
                ),
            ),
        }
    }

    /// The failure for a frame of a peer that has not proved to be rank 0. Such a peer may give a reason for refusal,
    /// and nothing else.
    fn refusal(&self, frame: &Frame, peer: &str) -> Failure {
        if frame.version != VERSION {
            return admit::other_version(peer, frame.version);
        }
        match wire::decode(frame) {
            Ok(Message::Fail { what, advice }) => reported(&what, &advice),
            Ok(_) => self.not_root(peer, "no proof that it has the job token"),
            Err(malformed) => self.not_root(peer, &malformed.to_string()),
        }
    }

    fn not_root(&self, peer: &str, sent: &str) -> Failure {
        Failure::new(
            format!("{peer}, where rank {} should be, sent {sent}", self.names.root()),
            "check MASTER_ADDR and TOKENYARD_PORT, and that nothing else listens there",
        )
    }

    /// Ends the membership for a reason on this side.
    fn part(&self, mut conn: Conn, failure: Failure) {
        self.port.reports().fail(failure);
        send(&mut conn, &Message::Goodbye);
        self.close(conn);
    }

    fn close(&self, conn: Conn) {
        let mut closing = Closing::new(conn, CLOSE_PATIENCE);
        while !closing.done() {
            wait_ready(&mut [interest(closing.conn())], closing.deadline());
        }
    }
}

/// A failure that the other side reports.
fn reported(what: &str, advice: &str) -> Failure {
    Failure::new(quoted(what.as_bytes()), quoted(advice.as_bytes()))
}

/// Sends a message. A member's message always fits a frame: payloads are bounded where they enter.
fn send(conn: &mut Conn, message: &Message) {
    if let Ok(frame) = wire::encode(message) {
        conn.send(frame.into());
    }
}
