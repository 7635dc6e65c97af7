//! The ranks of one job as one rank sees them.
//!
//! Place in the data path: none; a world is used while contexts are built, and to see who has died. Runs
//! on the caller's thread or host fiber, waits through `base::wait` with a deadline, and never blocks the
//! thread in the operating system while another rank must run on it.
//!
//! Collectives are called by all ranks in the same order. The first that fails, fails on every rank that
//! is still there, and ends the world's collectives: survivors form a new world.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::bootstrap::{Bootstrap, DEFAULT_TIMEOUT};
use super::fds;
use super::local::{self, Seat};
use super::station::Station;
use super::wire::MAX_BODY;
use crate::base::{Error, Rank, Result};

/// Longest payload of one rank: a frame, less what describes it.
const MAX_PAYLOAD: usize = MAX_BODY - (8 << 10);

/// A rank's membership in a world; clones share it, and dropping the last one says goodbye to the others.
#[derive(Clone)]
pub struct World {
    link: Link,
    rank: Rank,
    size: usize,
    local_rank: usize,
    timeout: Duration,
    /// Ranks of each node.
    nodes: Arc<[usize]>,
}

#[derive(Clone)]
enum Link {
    /// Ranks of this process.
    Threads(Arc<Seat>),
    /// Ranks are processes, in a star around rank 0.
    Star(Arc<Station>),
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World(rank {} of {}, local rank {})", self.rank, self.size, self.local_rank)
    }
}

/// Refuses sizes of nodes that do not make up a world.
pub(super) fn check_nodes(sizes: &[usize], world: usize) -> Result<()> {
    let sum = sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size));
    if sum == Some(world) && sizes.iter().all(|size| *size > 0) {
        return Ok(());
    }
    let advice = format!("give sizes of at least 1 that add up to the {world} ranks of the world");
    Err(Error::Config { name: "nodes", value: format!("{sizes:?}"), advice })
}

impl World {
    /// `n` ranks in one process, to be moved to threads or host fibers; by rank.
    pub fn threads(n: usize) -> Vec<World> {
        let world = |(rank, seat)| World {
            link: Link::Threads(Arc::new(seat)),
            rank: Rank(rank as u32),
            size: n,
            local_rank: rank,
            timeout: DEFAULT_TIMEOUT,
            nodes: Arc::new([n]),
        };
        local::seats(n).into_iter().enumerate().map(world).collect()
    }

    /// Joins the job that the environment describes; see [`Bootstrap::from_env`].
    pub fn from_env() -> Result<World> {
        World::join(&Bootstrap::from_env()?)
    }

    /// Joins a job; returns when all ranks have joined, or an error on each within the deadline.
    pub fn join(b: &Bootstrap) -> Result<World> {
        let station = b.join()?;
        Ok(World {
            link: Link::Star(Arc::new(station)),
            rank: b.rank,
            size: b.world,
            local_rank: b.local_rank,
            timeout: b.timeout,
            nodes: b.nodes.clone().unwrap_or_else(|| vec![b.world]).into(),
        })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Index of this rank on its host.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Ranks of each node: the first node's are the first so many, and so on. One node, unless the environment or
    /// [`with_nodes`](Self::with_nodes) says otherwise.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// Splits the world into nodes of the given sizes, the same on every rank. Ranks of different nodes never map each
    /// other's memory.
    ///
    /// # Errors
    /// `Config` if a node is empty or the sizes do not add up to the world's.
    pub fn with_nodes(self, sizes: &[usize]) -> Result<World> {
        check_nodes(sizes, self.size)?;
        Ok(World { nodes: sizes.into(), ..self })
    }

    /// The ranks of this rank's node.
    pub fn node_peers(&self) -> std::ops::Range<usize> {
        let mut first = 0;
        for size in self.nodes.iter() {
            if self.rank.index() < first + size {
                return first..first + size;
            }
            first += size;
        }
        self.rank.index()..self.rank.index() + 1
    }

    /// Whether all ranks live in this process and see its addresses.
    pub fn same_process(&self) -> bool {
        matches!(self.link, Link::Threads(_))
    }

    /// Changes the deadline of this handle's collectives. A deadline that passes ends the world's
    /// collectives on all ranks.
    pub fn with_timeout(mut self, timeout: Duration) -> World {
        self.timeout = timeout;
        self
    }

    /// The deadline of this handle's collectives.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Collective: every rank's payload, by rank. `what` names the step, in errors too; ranks that name
    /// different steps get an error instead of each other's bytes.
    pub fn all_gather(&self, what: &'static str, payload: &[u8]) -> Result<Vec<Vec<u8>>> {
        if payload.len() > MAX_PAYLOAD {
            let value = format!("{} bytes", payload.len());
            let advice = format!("gather at most {MAX_PAYLOAD} bytes a rank, and {MAX_BODY} together");
            return Err(Error::Argument { name: "payload", value, advice });
        }
        match &self.link {
            Link::Threads(seat) => seat.gather(what, payload, self.timeout),
            Link::Star(station) => station.gather(what, payload, self.timeout),
        }
    }

    /// Collective: returns when all ranks have called it.
    pub fn barrier(&self, what: &'static str) -> Result<()> {
        self.all_gather(what, &[]).map(drop)
    }

    /// Collective: every node peer's descriptor, by rank in the world, as this process's own duplicate; `None` for this
    /// rank and for ranks of other nodes. The ranks of a node are on one host.
    pub fn exchange_fds(&self, own: BorrowedFd<'_>) -> Result<Vec<Option<OwnedFd>>> {
        if self.same_process() { fds::exchange_within(self, own) } else { fds::exchange_between(self, own) }
    }

    /// Peers whose process has gone, as seen now; sorted. Empty for ranks of one process. A peer that
    /// dropped its world is not lost. News of others comes through rank 0, and ends when it is lost or leaves.
    /// A process that a peer forked keeps the peer's connection open, and hides its death, until it ends too.
    pub fn lost_peers(&self) -> Vec<Rank> {
        match &self.link {
            Link::Threads(_) => Vec::new(),
            Link::Star(station) => station.lost(),
        }
    }

    /// Connections and control messages that this rank dropped because they were malformed, not of this
    /// job, or a duplicate.
    pub fn refused(&self) -> u64 {
        match &self.link {
            Link::Threads(_) => 0,
            Link::Star(station) => station.refused(),
        }
    }
}
