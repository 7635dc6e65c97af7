//! A world whose ranks are threads or host fibers of one process.
//!
//! Place in the data path: none. Runs on the callers. The lock is held for a deposit or a look, never
//! across a wait, so that all ranks may share one OS thread as fibers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::collective::{COLLECTIVE_LEFT, Collective, Failure, Gone, INTERRUPTED, Verdict};
use super::names::Names;
use super::socket_thread::Exclusive;
use super::terms;
use crate::base::{Rank, Result, wait};

type Parts = Arc<Vec<Vec<u8>>>;

/// What all members share.
struct Table {
    collective: Collective,
    /// Finished rounds that a rank has not picked up yet: at most one, as it deposits next after picking up.
    ready: Vec<VecDeque<Parts>>,
}

/// Worlds that grew out of one, by generation and members.
type Family = Mutex<BTreeMap<(u32, Vec<Rank>), Meeting>>;

/// The world of a later generation, from its first member's call of `regroup` on.
struct Meeting {
    table: Arc<Mutex<Table>>,
    /// Members that have called, by their ranks in the first generation.
    came: Vec<Rank>,
}

impl Meeting {
    fn new(members: &[Rank]) -> Meeting {
        Meeting { table: table(Names::new(members)), came: Vec::new() }
    }

    /// Whether members that have called wait for `members` that have not.
    fn is_open(&self, members: &[Rank]) -> bool {
        self.came.len() < members.len() && lock(&self.table).collective.failure().is_none()
    }
}

/// One rank's membership; dropping it notifies the others that the rank has left.
pub(super) struct ThreadMember {
    rank: Rank,
    family: Arc<Family>,
    table: Arc<Mutex<Table>>,
    exclusive: Exclusive,
    seq: AtomicU64,
}

fn table(names: Names) -> Arc<Mutex<Table>> {
    let ready = vec![VecDeque::new(); names.size()];
    Arc::new(Mutex::new(Table { collective: Collective::new(names), ready }))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Two ranks regroup, one of which waits for the other, with these generations and members.
fn differing(ours: (Rank, &(u32, Vec<Rank>)), theirs: (Rank, &(u32, Vec<Rank>))) -> Failure {
    let [ours, theirs] = [ours, theirs].map(|(rank, (generation, members))| {
        let members = terms::listed(members);
        format!("rank {rank} regroups to generation {generation} of members {members}")
    });
    let advice = "name the same members on all of them, and one generation; a rank that is behind takes the newer one";
    Failure::new(format!("{ours} while {theirs}"), advice)
}

/// Memberships of ranks `0..size`.
pub(super) fn members(size: usize) -> Vec<ThreadMember> {
    let (table, family) = (table(Names::all(size)), Arc::new(Family::default()));
    let member = |rank| ThreadMember {
        rank,
        family: family.clone(),
        table: table.clone(),
        exclusive: Exclusive::default(),
        seq: AtomicU64::new(0),
    };
    (0..size as u32).map(Rank).map(member).collect()
}

impl ThreadMember {
    /// A membership in the world of a later generation. The first member to come makes that world, and makes it again
    /// after a failure, so that the members can retry.
    ///
    /// If members wait with another generation or other members, a side that waits for a rank of the other side fails
    /// at once, with the values of both, unless its generation is the newer one: that rank may come once its own call
    /// is over. Then the error at the deadline has the values.
    pub(super) fn regroup(&self, generation: u32, members: &[Rank], rank: Rank) -> ThreadMember {
        let mut family = lock(&self.family);
        let (own, terms) = (members[rank.index()], (generation, members.to_vec()));
        let meeting = family.entry(terms.clone()).or_insert_with(|| Meeting::new(members));
        if lock(&meeting.table).collective.failure().is_some() {
            *meeting = Meeting::new(members);
        }
        if !meeting.came.contains(&own) {
            meeting.came.push(own);
        }
        let table = meeting.table.clone();
        // A rank that calls twice at once is in both meetings, and neither waits for it.
        let apart = |other: &Meeting| !other.came.contains(&own);
        for (theirs, other) in family.iter().filter(|(theirs, other)| other.is_open(&theirs.1) && apart(other)) {
            let shared = other.came.iter().find(|came| members.contains(came));
            let Some(peer) = shared.or(other.came.first()) else { continue };
            let failure = differing((own, &terms), (*peer, theirs));
            if shared.is_some() {
                lock(&table).collective.differ(failure.clone(), generation <= theirs.0);
            }
            if theirs.1.contains(&own) {
                lock(&other.table).collective.differ(failure, theirs.0 <= generation);
            }
        }
        ThreadMember {
            rank,
            family: self.family.clone(),
            table,
            exclusive: Exclusive::default(),
            seq: AtomicU64::new(0),
        }
    }

    /// All ranks' payloads, by rank.
    pub(super) fn gather(&self, what: &'static str, payload: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let _exclusive = self.exclusive.take(what, timeout)?;
        let seq = self.seq.fetch_add(1, Ordering::Relaxed);
        {
            let mut table = self.table();
            if let Verdict::Complete { parts, .. } = table.collective.deposit(self.rank, seq, what, payload.to_vec()) {
                let parts = Arc::new(parts);
                table.ready.iter_mut().for_each(|queue| queue.push_back(parts.clone()));
            }
        }
        let waited = match wait::poll_unless(what, timeout, COLLECTIVE_LEFT, || self.outcome()) {
            Ok(Some(outcome)) => return outcome,
            Ok(None) => Ok(timeout.as_millis() as u64),
            Err(interrupted) => Err(interrupted),
        };
        // Either the round is still open and fails here, or it was completed since the last poll.
        self.table().collective.give_up(self.rank, seq, waited.as_ref().map_or(INTERRUPTED, |waited_ms| *waited_ms));
        match (self.outcome(), waited) {
            (Some(Ok(parts)), _) => Ok(parts),
            (_, Err(interrupted)) => Err(interrupted.ending()),
            (Some(failed), Ok(_)) => failed,
            (None, Ok(_)) => Err(Failure::new(format!("collective \"{what}\" timed out"), "retry").ending()),
        }
    }

    /// The finished round if there is one, else the failure if there is one.
    fn outcome(&self) -> Option<Result<Vec<Vec<u8>>>> {
        let mut table = self.table();
        if let Some(parts) = table.ready[self.rank.index()].pop_front() {
            drop(table);
            return Some(Ok(Arc::unwrap_or_clone(parts)));
        }
        table.collective.failure().map(|failure| Err(failure.ending()))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }
}

impl Drop for ThreadMember {
    fn drop(&mut self) {
        self.table().collective.depart(self.rank, Gone::Left);
    }
}
