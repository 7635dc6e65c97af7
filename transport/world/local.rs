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
use crate::base::{Rank, Result, wait};

type Parts = Arc<Vec<Vec<u8>>>;

/// What all members share.
struct Table {
    collective: Collective,
    /// Finished rounds that a rank has not picked up yet: at most one, as it deposits next after picking up.
    ready: Vec<VecDeque<Parts>>,
}

/// Worlds that grew out of one, by generation and members.
type Family = Mutex<BTreeMap<(u32, Vec<Rank>), Arc<Mutex<Table>>>>;

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
    pub(super) fn regroup(&self, generation: u32, members: &[Rank], rank: Rank) -> ThreadMember {
        let mut family = self.family.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = family.entry((generation, members.to_vec()));
        let made = entry.or_insert_with(|| table(Names::new(members)));
        if made.lock().unwrap_or_else(PoisonError::into_inner).collective.failure().is_some() {
            *made = table(Names::new(members));
        }
        let table = made.clone();
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
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ThreadMember {
    fn drop(&mut self) {
        self.table().collective.depart(self.rank, Gone::Left);
    }
}
