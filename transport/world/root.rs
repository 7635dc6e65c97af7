//! Rank 0's bootstrap thread: admits the members, runs the collectives, relays which ranks are gone.
//!
//! Place in the data path: none. Runs on its own thread, which alone touches the sockets. It waits in
//! `poll` only, so one slow or hostile connection holds up nobody.
//!
//! ```text
//!   Forming --all joined--> Formed --leave--> Leaving --peers closed, or patience over--> end
//!      |                                         ^
//!      +--deadline, or a member of another version: Fail to all
//! ```

use std::net::TcpListener;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::admit::{self, Greeting, Job, Judgement};
use super::collective::{Collective, Failure, Gone, RANKS_NAMED, Verdict, have};
use super::conn::{Closing, Conn, Ended, interest, may_be_ready, wait_ready};
use super::secret::{NONCE, Nonces, Role};
use super::socket_thread::{Command, Port};
use super::wire::{self, Frame, MAX_BODY, MAX_HELLO_BODY, Message, VERSION};
use crate::base::Rank;

/// Deadline for a connection's Hello; a member whose Hello was late connects again.
const HELLO_WAIT: Duration = Duration::from_secs(2);
/// Most connections without a Hello; the oldest is closed when one more comes.
const PENDING_LIMIT: usize = 256;
/// Most refused connections that are being sent the reason, each for at most `CLOSE_PATIENCE`; the oldest is cut off
/// when one more comes.
const DISMISSED_LIMIT: usize = 64;
/// How long a closing connection may take to send its last frames and be closed by its peer.
pub(super) const CLOSE_PATIENCE: Duration = Duration::from_millis(500);
/// Least time between two Progress frames to one member: their sum over a joining world is quadratic.
const PROGRESS_PERIOD: Duration = Duration::from_millis(100);
/// Longest sleep with nothing to do.
const IDLE: Duration = Duration::from_secs(30);

enum Stage {
    Forming,
    Formed,
    Leaving,
}

struct Pending {
    conn: Conn,
    /// When the peer must have joined; a challenge does not extend it.
    deadline: Instant,
    /// Nonces, once it was challenged.
    challenged: Option<Nonces>,
}

/// State of the thread.
pub(super) struct Root {
    port: Arc<Port>,
    job: Job,
    timeout: Duration,
    deadline: Instant,
    stage: Stage,
    listeners: Vec<TcpListener>,
    pending: Vec<Pending>,
    /// By rank; `None` at 0, before a rank has joined and after it has gone.
    members: Vec<Option<Conn>>,
    /// By rank: whether it has ever joined, even if it has gone since.
    came: Vec<bool>,
    /// By rank: where its host is reached; empty where this rank's is.
    hosts: Vec<String>,
    closing: Vec<Closing>,
    collective: Collective,
    last_refusal: Option<String>,
    /// The first rank of this job that was refused for its terms, and why.
    differing: Option<Failure>,
    /// When the next Progress may go out, if membership changed since the last.
    progress_due: Option<Instant>,
}

impl Root {
    /// Takes bound, non-blocking listeners; the deadline to form runs from now. `host` is the name or
    /// address of this rank's host for the others, or empty.
    pub(super) fn new(port: Arc<Port>, job: Job, host: String, listeners: Vec<TcpListener>, timeout: Duration) -> Root {
        let world = job.names.size();
        let mut hosts = vec![String::new(); world];
        hosts[0] = host;
        Root {
            port,
            timeout,
            deadline: Instant::now() + timeout,
            collective: Collective::new(job.names.clone()),
            job,
            stage: Stage::Forming,
            listeners,
            pending: Vec::new(),
            members: (0..world).map(|_| None).collect(),
            came: vec![false; world],
            hosts,
            closing: Vec::new(),
            last_refusal: None,
            differing: None,
            progress_due: None,
        }
    }

    /// The thread's body.
    pub(super) fn run(mut self) {
        self.form_if_complete();
        while !(matches!(self.stage, Stage::Leaving) && self.closing.is_empty()) {
            let ready = self.wait();
            self.port.receive_bell();
            // Members before newcomers: a rank that ended and came back is not a duplicate.
            ready.into_iter().for_each(|rank| self.serve(rank));
            self.commands();
            if matches!(self.stage, Stage::Forming) {
                self.accept();
                self.greet();
                self.form_if_complete();
                self.report_progress();
                self.check_deadline();
            }
            self.closing.retain_mut(|closing| !closing.done());
        }
    }

    /// Waits for anything to do; answers the members whose sockets are ready.
    fn wait(&self) -> Vec<Rank> {
        let members: Vec<(Rank, &Conn)> = self.present().collect();
        let mut fds: Vec<PollFd> = members.iter().map(|(_, conn)| interest(conn)).collect();
        fds.push(PollFd::new(self.port.bell_fd(), PollFlags::POLLIN));
        fds.extend(self.listeners.iter().map(|listener| PollFd::new(listener.as_fd(), PollFlags::POLLIN)));
        fds.extend(self.pending.iter().map(|pending| interest(&pending.conn)));
        fds.extend(self.closing.iter().map(|closing| interest(closing.conn())));
        let known = wait_ready(&mut fds, self.next_deadline());
        members.iter().zip(&fds).filter(|(_, fd)| may_be_ready(known, fd)).map(|((rank, _), _)| *rank).collect()
    }

    fn next_deadline(&self) -> Instant {
        let forming = matches!(self.stage, Stage::Forming).then_some(self.deadline);
        let pending = self.pending.iter().map(|pending| pending.deadline);
        let closing = self.closing.iter().map(Closing::deadline);
        pending.chain(closing).chain(forming).chain(self.progress_due).min().unwrap_or_else(|| Instant::now() + IDLE)
    }

    fn present(&self) -> impl Iterator<Item = (Rank, &Conn)> {
        (0u32..).map(Rank).zip(&self.members).filter_map(|(rank, conn)| conn.as_ref().map(|conn| (rank, conn)))
    }

    // ---- forming

    fn accept(&mut self) {
        for listener in &self.listeners {
            // As many as fit one pass; the rest are taken in the next.
            for _ in 0..PENDING_LIMIT {
                match listener.accept() {
                    Ok((stream, _)) => match Conn::new(stream, MAX_HELLO_BODY) {
                        Ok(conn) => {
                            let deadline = Instant::now() + HELLO_WAIT;
                            self.pending.push(Pending { conn, deadline, challenged: None });
                        }
                        Err(_) => self.port.reports().refused += 1,
                    },
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => {}
                    Err(_) => {
                        // Out of descriptors: strangers make room, and the thread does not spin.
                        self.port.reports().refused += self.pending.drain(..).count() as u64;
                        std::thread::sleep(Duration::from_millis(10));
                        break;
                    }
                }
            }
        }
        let surplus = self.pending.len().saturating_sub(PENDING_LIMIT);
        self.port.reports().refused += self.pending.drain(..surplus).count() as u64;
    }

    /// Answers the connections whose next frame has come.
    fn greet(&mut self) {
        for mut pending in std::mem::take(&mut self.pending) {
            match pending.conn.receive_first() {
                Err(Ended::Malformed(malformed)) => self.refused(&pending.conn.peer, &malformed.to_string()),
                Err(Ended::Closed) => self.refused(&pending.conn.peer, "a connection closed before it was admitted"),
                Ok(Some((_, true))) => self.refused(&pending.conn.peer, "bytes right behind a hello"),
                Ok(Some((frame, false))) => match pending.challenged {
                    None => self.challenge(pending, &frame),
                    Some(nonces) => self.judge(pending.conn, &frame, &nonces),
                },
                Ok(None) if Instant::now() >= pending.deadline => {
                    self.refused(&pending.conn.peer, "no hello in time");
                }
                Ok(None) => self.pending.push(pending),
            }
            if !matches!(self.stage, Stage::Forming) {
                return;
            }
        }
    }

    /// Answers a hello.
    fn challenge(&mut self, mut pending: Pending, hello: &Frame) {
        match admit::challenge(&self.job, hello, &pending.conn.peer, pending.conn.on_this_host()) {
            Greeting::Challenge(nonces) => {
                if let Ok(frame) = wire::encode(&Message::Challenge { nonce: nonces.root }) {
                    pending.conn.send(frame.into());
                }
                self.pending.push(Pending { challenged: Some(nonces), ..pending });
            }
            Greeting::Refuse(failure) => {
                self.refused(&pending.conn.peer, &failure.what);
                self.dismiss(pending.conn, &fail(&failure));
            }
            Greeting::Drop(why) => self.refused(&pending.conn.peer, why),
        }
    }

    /// Acts on a frame that should prove that its sender may join.
    fn judge(&mut self, mut conn: Conn, join: &Frame, nonces: &Nonces) {
        // The present holder of the place may have ended since this pass began.
        if let Ok(Message::Join { rank, .. }) = wire::decode(join) {
            self.serve(Rank(rank));
        }
        let judgement = admit::judge(&self.job, join, nonces, &conn.peer, |rank| self.members[rank.index()].is_some());
        match judgement {
            Judgement::Admit(rank, host) => {
                self.hosts[rank.index()] = host.unwrap_or_else(|| conn.host());
                let fields = join.body.get(NONCE..).unwrap_or_default();
                let proof = self.job.secret.prove(Role::Root, nonces, fields);
                if let Ok(frame) = wire::encode(&Message::Accept { proof }) {
                    conn.send(frame.into());
                }
                self.members[rank.index()] = Some(conn);
                self.came[rank.index()] = true;
                self.membership_changed();
            }
            Judgement::Differ(failure) => {
                self.refused(&conn.peer, &failure.what);
                self.dismiss(conn, &fail(&failure));
                self.differing.get_or_insert(failure);
            }
            Judgement::Refuse(failure) => {
                self.refused(&conn.peer, &failure.what);
                self.dismiss(conn, &fail(&failure));
            }
            Judgement::Stop(failure) => {
                self.refused(&conn.peer, &failure.what);
                self.dismiss(conn, &fail(&failure));
                self.abandon(failure);
            }
            Judgement::Drop(why) => self.refused(&conn.peer, why),
        }
    }

    fn refused(&mut self, peer: &str, why: &str) {
        self.port.reports().refused += 1;
        self.last_refusal = Some(format!("{peer}: {why}"));
    }

    fn membership_changed(&mut self) {
        self.progress_due.get_or_insert_with(|| Instant::now() + PROGRESS_PERIOD);
    }

    /// Ranks that have never joined; if all have, those that have gone since.
    fn absent(&self) -> Vec<Rank> {
        let absent = |ever: bool| {
            let ranks = (0u32..).map(Rank).zip(&self.members).skip(1);
            let ranks = ranks.filter(|(rank, conn)| conn.is_none() && self.came[rank.index()] == ever);
            ranks.map(|(rank, _)| rank).collect::<Vec<_>>()
        };
        let never = absent(false);
        if never.is_empty() { absent(true) } else { never }
    }

    fn report_progress(&mut self) {
        if self.progress_due.take_if(|due| Instant::now() >= *due).is_some() {
            let absent = self.absent();
            let first = absent.iter().take(RANKS_NAMED).map(|rank| rank.0).collect();
            self.broadcast(&Message::Progress { absent: absent.len() as u32, first });
        }
    }

    fn form_if_complete(&mut self) {
        if !matches!(self.stage, Stage::Forming) || self.members.iter().skip(1).any(Option::is_none) {
            return;
        }
        self.stage = Stage::Formed;
        self.progress_due = None;
        self.listeners.clear();
        self.port.reports().refused += self.pending.drain(..).count() as u64;
        self.members.iter_mut().flatten().for_each(|conn| conn.set_limit(MAX_BODY));
        let hosts = std::mem::take(&mut self.hosts);
        self.broadcast(&Message::Welcome { hosts: hosts.clone() });
        self.port.reports().form(hosts);
    }

    fn check_deadline(&mut self) {
        if !matches!(self.stage, Stage::Forming) || Instant::now() < self.deadline {
            return;
        }
        let names = &self.job.names;
        let absent: Vec<Rank> = self.absent().into_iter().map(|rank| names.of(rank)).collect();
        let (root, waited) = (names.root(), self.timeout.as_millis());
        let mut what = format!("rank {root} waited {waited} ms and {} not joined", have(&absent, absent.len()));
        if let Some(Failure { what: difference, advice, .. }) = self.differing.take() {
            return self.abandon(Failure::new(format!("{what}: {difference}"), advice));
        }
        if let Some(refusal) = &self.last_refusal {
            what += &format!(" ({} connections refused, the last from {refusal})", self.port.reports().refused);
        }
        self.abandon(Failure::new(what, "start them or see why they ended; TOKENYARD_TIMEOUT_MS sets the deadline"));
    }

    /// Ends an unformed world for all who have come.
    fn abandon(&mut self, failure: Failure) {
        self.broadcast(&fail(&failure));
        self.port.reports().fail(failure);
        self.close_all();
    }

    // ---- formed

    /// Takes what a member has sent.
    fn serve(&mut self, rank: Rank) {
        let Some(conn) = self.members.get_mut(rank.index()).and_then(Option::as_mut) else {
            return;
        };
        conn.flush();
        let mut frames = Vec::new();
        let end = conn.receive(&mut frames);
        for frame in frames {
            if !self.obey(rank, frame) {
                return;
            }
        }
        match end {
            Ok(()) => {}
            Err(Ended::Closed) => self.depart(rank, Gone::Lost),
            Err(Ended::Malformed(malformed)) => self.expel(rank, &malformed.to_string()),
        }
    }

    /// Acts on one frame of a member; false when the member is gone with it.
    fn obey(&mut self, rank: Rank, frame: Frame) -> bool {
        let message = match wire::decode(&frame) {
            _ if frame.version != VERSION => Err(format!("a message of version {}, not {VERSION}", frame.version)),
            decoded => decoded.map_err(|malformed| malformed.to_string()),
        };
        let verdict = match (message, &self.stage) {
            (Ok(Message::Goodbye), _) => {
                self.depart(rank, Gone::Left);
                return false;
            }
            (Ok(Message::Gather { seq, what, payload }), Stage::Formed) => {
                self.collective.deposit(rank, seq, &what, payload)
            }
            (Ok(Message::GiveUp { seq, waited_ms }), Stage::Formed) => self.collective.give_up(rank, seq, waited_ms),
            (Ok(_), _) => {
                self.expel(rank, "a message that no member sends then");
                return false;
            }
            (Err(sent), _) => {
                self.expel(rank, &sent);
                return false;
            }
        };
        self.act(verdict);
        true
    }

    fn act(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Open => {}
            Verdict::Failed(failure) => {
                self.broadcast(&fail(&failure));
                self.port.reports().fail(failure);
            }
            Verdict::Complete { seq, parts } => {
                let message = Message::Gathered { seq, payloads: parts };
                if self.broadcast(&message)
                    && let Message::Gathered { payloads, .. } = message
                {
                    self.port.reports().gathered = Some((seq, payloads));
                } else {
                    let what = format!("the parts of one collective exceed {MAX_BODY} bytes together");
                    let verdict = self.collective.fail(Failure::new(what, "gather less at a time"));
                    self.act(verdict);
                }
            }
        }
    }

    /// Drops a member that sent what is no message of a member; everyone is given the reason.
    fn expel(&mut self, rank: Rank, sent: &str) {
        self.port.reports().refused += 1;
        if !matches!(self.stage, Stage::Forming) {
            let (name, root) = (self.job.names.of(rank), self.job.names.root());
            let what = format!("rank {name} sent {sent}, and rank {root} has dropped its connection");
            let advice = "install the same release on all ranks, and see what else writes to that rank's connection";
            let verdict = self.collective.fail(Failure::new(what, advice));
            self.act(verdict);
        }
        self.depart(rank, Gone::Lost);
    }

    /// A member is gone: its place is free while forming; later, everyone is notified.
    fn depart(&mut self, rank: Rank, how: Gone) {
        self.members[rank.index()] = None;
        if matches!(self.stage, Stage::Forming) {
            return self.membership_changed();
        }
        match how {
            Gone::Lost => {
                self.port.reports().lose(rank);
                self.broadcast(&Message::Lost { rank: rank.0 });
            }
            Gone::Left => {
                self.broadcast(&Message::Left { rank: rank.0 });
            }
        }
        let verdict = self.collective.depart(rank, how);
        self.act(verdict);
    }

    fn commands(&mut self) {
        while let Some(command) = self.port.next_command() {
            let verdict = match command {
                Command::Gather { seq, what, payload } => self.collective.deposit(Rank(0), seq, what, payload),
                Command::GiveUp { seq, waited_ms } => self.collective.give_up(Rank(0), seq, waited_ms),
                Command::Leave if matches!(self.stage, Stage::Forming) => {
                    let what = format!("rank {} gave up before the world formed", self.job.names.root());
                    return self.abandon(Failure::new(what, "see why it did"));
                }
                Command::Leave => {
                    self.broadcast(&Message::Goodbye);
                    return self.close_all();
                }
            };
            self.act(verdict);
        }
    }

    // ---- sending

    /// Sends to all members; false if the message cannot be sent at all.
    fn broadcast(&mut self, message: &Message) -> bool {
        let Ok(frame) = wire::encode(message) else {
            return false;
        };
        let frame: Arc<[u8]> = frame.into();
        self.members.iter_mut().flatten().for_each(|conn| conn.send(frame.clone()));
        true
    }

    fn dismiss(&mut self, mut conn: Conn, last: &Message) {
        if let Ok(frame) = wire::encode(last) {
            conn.send(frame.into());
        }
        let surplus = (self.closing.len() + 1).saturating_sub(DISMISSED_LIMIT);
        self.closing.drain(..surplus);
        self.closing.push(Closing::new(conn, CLOSE_PATIENCE));
    }

    fn close_all(&mut self) {
        self.stage = Stage::Leaving;
        self.listeners.clear();
        self.pending.clear();
        let members = self.members.iter_mut().filter_map(Option::take);
        self.closing.extend(members.map(|conn| Closing::new(conn, CLOSE_PATIENCE)));
    }
}

fn fail(failure: &Failure) -> Message {
    Message::Fail { what: failure.what.clone(), advice: failure.advice.clone() }
}

#[cfg(test)]
mod tests {
    use super::super::names::Names;
    use super::super::secret::Secret;
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn refused_strangers_kept_without_bound() {
        let job = Job { secret: Secret::token("x"), names: Names::all(2), terms: Default::default() };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let mut root = Root::new(Arc::new(Port::new().unwrap()), job, String::new(), Vec::new(), CLOSE_PATIENCE);
        // They do not close, whatever they receive.
        let strangers: Vec<_> = (0..3 * DISMISSED_LIMIT)
            .map(|_| {
                let stranger = TcpStream::connect(addr).unwrap();
                let conn = Conn::new(listener.accept().unwrap().0, MAX_HELLO_BODY).unwrap();
                root.dismiss(conn, &fail(&Failure::new("no", "go")));
                stranger
            })
            .collect();
        assert_eq!((root.closing.len(), strangers.len()), (DISMISSED_LIMIT, 3 * DISMISSED_LIMIT));
        std::thread::sleep(CLOSE_PATIENCE);
        root.closing.retain_mut(|closing| !closing.done());
        assert!(root.closing.is_empty(), "{} are waited for", root.closing.len());
    }
}
