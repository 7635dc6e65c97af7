//! The state that callers and the bootstrap thread of one process share.
//!
//! Place in the data path: none. Callers put commands in and wait for answers through `base::wait`; the
//! thread takes commands and puts answers in. Both hold a lock for a moment only and never across a wait.
//! Rank 0 and the others share this side: only the thread's body differs.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

use super::collective::{COLLECTIVE_LEFT, Failure, INTERRUPTED};
use crate::base::{Error, Rank, Result, wait};

/// How long rank 0 may take to answer that a deadline has passed, beyond that deadline.
const ANSWER_GRACE: Duration = Duration::from_secs(1);

/// What callers ask of the thread.
#[derive(Debug)]
pub(super) enum Command {
    /// Take part in collective `seq`.
    Gather { seq: u64, what: &'static str, payload: Vec<u8> },
    /// The deadline of collective `seq` has passed.
    GiveUp { seq: u64, waited_ms: u64 },
    /// Send a Goodbye, close, end.
    Leave,
}

/// What the thread reports.
#[derive(Debug, Default)]
pub(super) struct Reports {
    /// All ranks have joined.
    pub formed: bool,
    /// By rank, since then: where its host is reached; empty where rank 0's is.
    pub hosts: Vec<String>,
    /// The last finished collective, until it is picked up.
    pub gathered: Option<(u64, Vec<Vec<u8>>)>,
    /// Why the world cannot form or hold a further collective; the first reason stays.
    pub failure: Option<Failure>,
    /// Ranks whose connection ended without a goodbye, sorted.
    pub lost: Vec<Rank>,
    /// Connections and messages dropped as malformed or refused.
    pub refused: u64,
}

impl Reports {
    /// Notes that all ranks have joined, and where they are.
    pub(super) fn form(&mut self, hosts: Vec<String>) {
        (self.formed, self.hosts) = (true, hosts);
    }

    /// Keeps the first failure.
    pub(super) fn fail(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
    }

    /// Notes a lost rank once.
    pub(super) fn lose(&mut self, rank: Rank) {
        if let Err(at) = self.lost.binary_search(&rank) {
            self.lost.insert(at, rank);
        }
    }
}

/// The shared part: one per process and world.
pub(super) struct Port {
    commands: Mutex<VecDeque<Command>>,
    reports: Mutex<Reports>,
    bell: UnixStream,
    bell_received: UnixStream,
}

impl Port {
    pub(super) fn new() -> std::io::Result<Port> {
        let (bell, bell_received) = UnixStream::pair()?;
        bell.set_nonblocking(true)?;
        bell_received.set_nonblocking(true)?;
        Ok(Port { commands: Mutex::default(), reports: Mutex::default(), bell, bell_received })
    }

    /// Caller: hands a command to the thread and wakes it.
    pub(super) fn command(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push_back(command);
        // A full pipe means that the thread has been woken already.
        let _ = (&self.bell).write(&[1]);
    }

    /// Thread: the next command.
    pub(super) fn next_command(&self) -> Option<Command> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Thread: readable when commands may wait.
    pub(super) fn bell_fd(&self) -> BorrowedFd<'_> {
        self.bell_received.as_fd()
    }

    /// Thread: clears the bell; look at the commands after it.
    pub(super) fn receive_bell(&self) {
        let mut rings = [0; 64];
        while matches!((&self.bell_received).read(&mut rings), Ok(n) if n == rings.len()) {}
    }

    /// Either: looks at or changes the reports; do not wait while holding it.
    pub(super) fn reports(&self) -> MutexGuard<'_, Reports> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One collective at a time per rank; clones of a world wait for each other.
#[derive(Debug, Default)]
pub(super) struct Exclusive(Mutex<Option<ThreadId>>);

/// Held by the rank's current collective; released when dropped.
pub(super) struct Busy<'a>(&'a Exclusive);

impl Exclusive {
    fn holder(&self) -> MutexGuard<'_, Option<ThreadId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn take(&self, what: &'static str, timeout: Duration) -> Result<Busy<'_>> {
        let own = std::thread::current().id();
        if *self.holder() == Some(own) && !wait::has_fibers() {
            return Err(Error::bootstrap(
                format!("collective \"{what}\" is called in the middle of another collective of this rank"),
                "leave it out of signals' handlers and of the world's all-gather",
            ));
        }
        let free = || {
            let mut holder = self.holder();
            holder.is_none().then(|| {
                *holder = Some(own);
                Busy(self)
            })
        };
        let free = wait::poll_unless(what, timeout, "the collective has not begun; call it again", free)?;
        free.ok_or_else(|| {
            Error::bootstrap(
                format!("collective \"{what}\" waited {} ms for another collective of this rank", timeout.as_millis()),
                "call the collectives of one world from one thread",
            )
        })
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        *self.0.holder() = None;
    }
}

/// This process's membership in a world of processes; dropping it sends a Goodbye and ends the thread.
pub(super) struct SocketThread {
    /// The name of rank 0.
    root: Rank,
    port: Arc<Port>,
    thread: Option<JoinHandle<()>>,
    exclusive: Exclusive,
    seq: AtomicU64,
}

impl SocketThread {
    /// Starts `run` on a thread for the rank called `name`, in a world whose rank 0 is called `root`.
    pub(super) fn start(
        name: Rank,
        root: Rank,
        port: Arc<Port>,
        run: impl FnOnce() + Send + 'static,
    ) -> std::result::Result<SocketThread, Failure> {
        let thread = std::thread::Builder::new().name(format!("ty-boot-{name}")).spawn(run).map_err(|error| {
            Failure::new(format!("no bootstrap thread could start ({error})"), "raise the limit on threads")
                .caused_by(error)
        })?;
        Ok(SocketThread { root, port, thread: Some(thread), exclusive: Exclusive::default(), seq: AtomicU64::new(0) })
    }

    /// Waits until all ranks have joined. The thread keeps the deadline; the wait here is a little longer.
    pub(super) fn wait_formed(&self, timeout: Duration) -> Result<()> {
        let formed = || {
            let reports = self.port.reports();
            match &reports.failure {
                Some(failure) => Some(Err(failure.error())),
                None => reports.formed.then_some(Ok(())),
            }
        };
        let left = "this rank has left, and the others wait for it until their deadline; join again";
        wait::poll_unless("world formed", timeout.saturating_add(ANSWER_GRACE), left, formed)?.unwrap_or_else(|| {
            let what = format!("the world did not form within {} ms", timeout.as_millis());
            Err(Failure::new(what, "check that names resolve and that this process gets processor time").error())
        })
    }

    /// All ranks' payloads, by rank.
    pub(super) fn gather(&self, what: &'static str, payload: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let _exclusive = self.exclusive.take(what, timeout)?;
        if let Some(failure) = &self.port.reports().failure {
            return Err(failure.ending());
        }
        let seq = self.seq.fetch_add(1, Ordering::Relaxed);
        self.port.command(Command::Gather { seq, what, payload: payload.to_vec() });
        let interrupted = match wait::poll_unless(what, timeout, COLLECTIVE_LEFT, || self.outcome(seq)) {
            Ok(Some(outcome)) => return outcome,
            Ok(None) => None,
            Err(interrupted) => Some(interrupted),
        };
        let waited_ms = timeout.as_millis() as u64;
        let waited = if interrupted.is_some() { INTERRUPTED } else { waited_ms };
        self.port.command(Command::GiveUp { seq, waited_ms: waited });
        let outcome = wait::poll(what, ANSWER_GRACE, || self.outcome(seq)).unwrap_or_else(|| {
            let root = self.root;
            let what = format!("rank {root} did not answer within {waited_ms} ms in collective \"{what}\"");
            let failure = Failure::new(what, format!("see what holds rank {root} up, or raise the timeout"));
            self.port.reports().fail(failure.clone());
            Err(failure.ending())
        });
        outcome.map_err(|failed| interrupted.map_or(failed, Error::ending))
    }

    /// By rank: where its host is reached; empty where rank 0's is.
    pub(super) fn hosts(&self) -> Vec<String> {
        self.port.reports().hosts.clone()
    }

    /// Ranks known to be lost.
    pub(super) fn lost(&self) -> Vec<Rank> {
        self.port.reports().lost.clone()
    }

    /// Connections and messages dropped so far.
    pub(super) fn refused(&self) -> u64 {
        self.port.reports().refused
    }

    fn outcome(&self, seq: u64) -> Option<Result<Vec<Vec<u8>>>> {
        let mut reports = self.port.reports();
        match reports.gathered.take_if(|(number, _)| *number == seq) {
            Some((_, payloads)) => Some(Ok(payloads)),
            None => reports.failure.as_ref().map(|failure| Err(failure.ending())),
        }
    }
}

impl Drop for SocketThread {
    fn drop(&mut self) {
        self.port.command(Command::Leave);
        let formed = self.port.reports().formed;
        match self.thread.take() {
            // The thread closes within a bounded time; a panic in it has been reported by the runtime.
            Some(thread) if formed => drop(thread.join()),
            // A thread that still tries to connect ends on its own.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_released_by_a_caller_that_only_asked() {
        let exclusive = Exclusive::default();
        let taken = exclusive.take("first", Duration::from_millis(1)).unwrap();
        for _ in 0..2 {
            std::thread::scope(|scope| {
                let other = scope.spawn(|| exclusive.take("second", Duration::from_millis(1)).err());
                assert!(other.join().unwrap().unwrap().to_string().contains("waited 1 ms for another collective"));
            });
            // This thread would wait for itself.
            let refused = exclusive.take("second", Duration::from_secs(3600)).err().unwrap();
            assert!(refused.to_string().contains("in the middle of another collective"), "{refused}");
        }
        drop(taken);
        assert!(exclusive.take("third", Duration::from_millis(1)).is_ok());
    }

    #[test]
    fn a_lost_rank_listed_twice() {
        let mut reports = Reports::default();
        [3, 1, 3].into_iter().for_each(|rank| reports.lose(Rank(rank)));
        assert_eq!(reports.lost, [Rank(1), Rank(3)]);
    }
}
