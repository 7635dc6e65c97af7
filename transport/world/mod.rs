//! The ranks of one job as one rank sees them.
//!
//! Place in the data path: none; a world is used while contexts are built, and to see which ranks have died.
//! Runs on the caller's thread or host fiber, waits through `base::wait` with a deadline, and never blocks the
//! thread in the operating system while another rank must run on it.
//!
//! Collectives are called by all ranks in the same order. The first that fails, fails on every rank that
//! is still there, and ends the world's collectives: survivors form a new world.
//! A [`World`] is formed once, before any context exists; its collectives carry configurations, addresses and file
//! descriptors while a context is built, and it watches for peers that die.
//!
//! Threads: collectives run on the caller's thread (or host fiber) and wait through `base::wait`. In a world of
//! processes, one background thread per process owns all sockets.
//!
//! ```text
//!   Over (over.rs): the caller's own all-gather
//!                  \
//!            World (mod.rs)                        Bootstrap (bootstrap.rs): who and where
//!            /              \                              |
//!   ThreadMember (local.rs)  SocketThread (socket_thread.rs) <---- join
//!   ranks of one             callers <-> thread
//!   process                    |
//!        \                   Root (root.rs) <== TCP ==> Member (member.rs)
//!         \                  |      \                    |
//!          Collective (collective.rs)   admit.rs        Conn (conn.rs), frames (wire.rs)
//!          one collective               fds (fds.rs): Unix sockets, node peers only
//! ```

mod admit;
pub mod bootstrap;
mod collective;
mod conn;
pub(crate) mod fds;
mod local;
mod member;
mod names;
mod over;
mod root;
mod secret;
mod socket_thread;
mod terms;
mod wire;

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use self::bootstrap::{Bootstrap, DEFAULT_TIMEOUT, MAX_WORLD};
use self::local::ThreadMember;
use self::names::Names;
pub use self::over::AllGather;
use self::over::Over;
use self::socket_thread::SocketThread;
use self::wire::MAX_BODY;
use crate::base::{Error, Membership, Rank, Result, quoted};

/// Longest payload of one rank: a frame, less its description.
const MAX_PAYLOAD: usize = MAX_BODY - (8 << 10);

/// A rank's membership in a world; clones share it, and dropping the last one notifies the others.
#[derive(Clone)]
pub struct World {
    link: Link,
    rank: Rank,
    size: usize,
    local_rank: usize,
    timeout: Duration,
    /// Ranks of each node.
    nodes: Arc<[usize]>,
    family: Arc<Family>,
    /// The newest generation that this rank has entered, shared by all worlds that grew out of its first one.
    newest: Arc<AtomicU32>,
}

/// What a world has in common with the worlds that it grew out of.
struct Family {
    /// How often the job has regrouped.
    generation: u32,
    names: Names,
    /// Nodes of the first generation.
    first_nodes: Vec<usize>,
    /// By rank in the first generation: where its host was reached last. Empty for ranks of one process.
    hosts: BTreeMap<Rank, String>,
}

#[derive(Clone)]
enum Link {
    /// Ranks of this process.
    Threads(Arc<ThreadMember>),
    /// Ranks are processes, in a star around rank 0.
    Star(Arc<SocketThread>, Arc<Bootstrap>),
    /// Ranks are wherever the caller's all-gather reaches them.
    Over(Arc<Over>),
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
    Err(Error::config("nodes", format!("{sizes:?}"), advice))
}

pub(super) fn all_ranks(count: usize) -> Vec<Rank> {
    (0..count as u32).map(Rank).collect()
}

impl Family {
    fn first(size: usize, nodes: &[usize]) -> Family {
        let hosts = BTreeMap::new();
        Family { generation: 0, names: Names::all(size), first_nodes: nodes.to_vec(), hosts }
    }
}

/// Port of a later generation: this generation's port plus the difference of the numbers.
fn later_port(now: &Bootstrap, generation: u32) -> Result<u16> {
    let port = u64::from(now.port) + u64::from(generation.saturating_sub(now.generation));
    u16::try_from(port).map_err(|_| {
        let last = now.generation.saturating_add(u32::from(u16::MAX - now.port));
        let advice = format!(
            "generation {} met on port {}, so that it would meet on port {port}: give at most {last}, or start the job \
             with a lower TOKENYARD_PORT",
            now.generation, now.port
        );
        Error::config("generation", generation, advice)
    })
}

fn not_a_member(own: Rank) -> Error {
    Error::config("members", "without this rank", format!("rank {own} must be one"))
}

/// A member's rank among the members, and the members of each node that has some.
pub(super) fn place(members: &[Rank], own: Rank, first_nodes: &[usize]) -> Result<(Rank, Vec<usize>)> {
    let size: usize = first_nodes.iter().sum();
    let ascending = members.windows(2).all(|two| two[0] < two[1]);
    if !ascending || members.iter().any(|member| member.index() >= size) {
        let advice = format!("name ranks below {size} in ascending order");
        let numbers: Vec<u32> = members.iter().map(|member| member.0).collect();
        return Err(Error::config("members", format!("{numbers:?}"), advice));
    }
    let rank = members.iter().position(|member| *member == own).ok_or_else(|| not_a_member(own))?;
    let mut first = 0;
    let mut nodes = Vec::new();
    for node in first_nodes {
        let here = members.iter().filter(|member| (first..first + node).contains(&member.index())).count();
        first += node;
        if here > 0 {
            nodes.push(here);
        }
    }
    Ok((Rank(rank as u32), nodes))
}

fn check_size(name: &'static str, ranks: usize) -> Result<()> {
    if ranks == 0 || ranks > MAX_WORLD {
        return Err(Error::config(name, ranks, format!("give the number of ranks, 1 to {MAX_WORLD}")));
    }
    Ok(())
}

impl World {
    /// `n` ranks in one process, to be moved to threads or host fibers; by rank.
    ///
    /// Contexts accept at most 512 ranks, and 64 per node. All `n` ranks are in one node unless
    /// [`with_nodes`](Self::with_nodes) splits them.
    ///
    /// # Errors
    /// `Config` if `n` is 0 or above 16 384.
    pub fn threads(n: usize) -> Result<Vec<World>> {
        check_size("world", n)?;
        let family = Arc::new(Family::first(n, &[n]));
        let world = |(rank, member)| World {
            link: Link::Threads(Arc::new(member)),
            rank: Rank(rank as u32),
            size: n,
            local_rank: rank,
            timeout: DEFAULT_TIMEOUT,
            nodes: Arc::new([n]),
            family: family.clone(),
            newest: Arc::default(),
        };
        log::info!(target: crate::base::targets::WORLD, "{n} ranks in one process");
        Ok(local::members(n).into_iter().enumerate().map(world).collect())
    }

    /// Collective: a world of `size` ranks over the caller's own all-gather, as engines have one; it needs nothing else
    /// of the environment. Contexts work over it as over any world. Ranks of a node still pass their memory over Unix
    /// sockets, so they are processes (or threads) of one host and user, each with its own device. `local_rank`
    /// is `rank` by default.
    ///
    /// Nobody watches the peers: [`lost_peers`](Self::lost_peers) stays empty. A rank that has gone shows as an error
    /// or the deadline of `gather`, and while contexts run as the deadline of their calls. Dropping the world notifies
    /// nobody.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tokenyard::{Result, World};
    ///
    /// let alone = |_what: &str, own: &[u8], _timeout: Duration| -> Result<Vec<Vec<u8>>> { Ok(vec![own.to_vec()]) };
    /// let world = World::over(0, 1, None, alone)?;
    /// assert_eq!(world.all_gather("greeting", b"hello")?, [b"hello"]);
    /// # Ok::<(), tokenyard::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Config` for no ranks or more than a world has, or a rank that is not below `size`; the errors of `gather`;
    /// `Bootstrap` where its parts are too few or too many, or are of another step or other ranks.
    pub fn over(
        rank: usize,
        size: usize,
        local_rank: Option<usize>,
        gather: impl AllGather + 'static,
    ) -> Result<World> {
        check_size("size", size)?;
        if rank >= size {
            let advice = format!("ranks are counted from 0, so give one below the size {size}");
            return Err(Error::config("rank", rank, advice));
        }
        let rank = Rank(rank as u32);
        let world = World {
            link: Link::Over(Arc::new(Over::new(Box::new(gather), rank, Names::all(size), 0))),
            rank,
            size,
            local_rank: local_rank.unwrap_or(rank.index()),
            timeout: DEFAULT_TIMEOUT,
            nodes: Arc::new([size]),
            family: Arc::new(Family::first(size, &[size])),
            newest: Arc::default(),
        };
        world.barrier("world over an all-gather").map_err(Error::passing)?;
        log::info!(target: crate::base::targets::WORLD, "rank {rank} of {size}: over the caller's all-gather");
        Ok(world)
    }

    /// Joins the job that the environment describes; see [`Bootstrap::from_env`].
    pub fn from_env() -> Result<World> {
        World::join(&Bootstrap::from_env()?)
    }

    /// Joins a job; returns when all ranks have joined, or an error on each within the deadline.
    pub fn join(b: &Bootstrap) -> Result<World> {
        World::join_knowing(b, BTreeMap::new())
    }

    /// As `join`, with the hosts of members of earlier generations.
    fn join_knowing(b: &Bootstrap, mut hosts: BTreeMap<Rank, String>) -> Result<World> {
        let socket_thread = b.join()?;
        let (nodes, first_nodes) = b.layout()?;
        let members = b.members();
        let reached = socket_thread.hosts().into_iter().map(|host| if host.is_empty() { b.addr.clone() } else { host });
        hosts.extend(members.iter().copied().zip(reached));
        let names = Names::new(&members);
        let (own, rank, world, generation) = (names.of(b.rank), b.rank, b.world, b.generation);
        log::info!(target: crate::base::targets::WORLD, "rank {own}: {rank} of {world}, joined generation {generation}");
        let family = Family { generation, names, first_nodes, hosts };
        Ok(World {
            link: Link::Star(Arc::new(socket_thread), Arc::new(b.clone())),
            rank: b.rank,
            size: b.world,
            local_rank: b.local_rank,
            timeout: b.timeout,
            nodes: nodes.into(),
            family: Arc::new(family),
            newest: Arc::new(AtomicU32::new(b.generation)),
        })
    }

    /// This world as the successor of an older world of this rank, which is past from then on.
    fn succeeding(self, older: &World) -> World {
        let newest = older.newest.clone();
        newest.fetch_max(self.family.generation, Ordering::Release);
        World { newest, ..self }
    }

    /// Refuses a world that this rank has left for one of a later generation.
    ///
    /// # Errors
    /// `Generation`, with both numbers.
    pub(crate) fn check_current(&self) -> Result<()> {
        self.membership().check()
    }

    /// This rank's membership in this world's generation, for what outlives a look at the world.
    pub(crate) fn membership(&self) -> Membership {
        let (rank, generation) = (self.original(self.rank), self.family.generation);
        Membership { rank, generation, newest: self.newest.clone() }
    }

    /// Collective of `members` alone: forms a later generation's world of them, without ranks that were lost or with
    /// ranks that come back. All members name the same `members`: first-generation ranks in ascending order. Within
    /// the new world, ranks are counted anew. The ranks of a node stay together. Once this rank is in the new world,
    /// contexts of older worlds answer every call with `Generation`.
    ///
    /// Processes meet at the host of the first member, which all members got when they joined together, on the port of
    /// the first generation plus the generation's number. No other rank is needed, not even the first generation's
    /// rank 0. A process that comes back joins with a [`Bootstrap`] that gives this address and port, generation and
    /// members.
    ///
    /// # Errors
    /// `Config` if this rank is not a member, the members are not ascending ranks of the first generation, the first
    /// member's host is unknown, or the generation is not a later one or has no port up to 65535. `Bootstrap`, naming
    /// the absent, if not all come; the same members may then retry with a generation later than any that one of them
    /// has entered. `Bootstrap`, with both values, where a member that this rank waits for regroups with other members
    /// or a newer generation: at once between ranks of one process, and for a process whose values differ from those of
    /// the first member.
    pub fn regroup(&self, generation: u32, members: &[Rank]) -> Result<World> {
        if let Link::Over(_) = &self.link {
            let advice =
                "its all-gather reaches all ranks of this one: regroup over one of the members alone (regroup_over)";
            return Err(Error::config("regroup", "of a world over an all-gather", advice));
        }
        let (own, rank, nodes) = self.next_place(generation, members)?;
        let first_nodes = self.family.first_nodes.clone();
        if let Link::Star(_, bootstrap) = &self.link {
            let port = later_port(bootstrap, generation)?;
            let first = members.first().copied().unwrap_or(own);
            let addr = self.family.hosts.get(&first).cloned().ok_or_else(|| {
                Error::config(
                    "members",
                    format!("rank {first} first"),
                    "its host is not known here, as it came back later; join with a Bootstrap that names it",
                )
            })?;
            let next = Bootstrap {
                rank,
                world: members.len(),
                addr,
                port,
                nodes: Some(nodes),
                generation,
                members: Some(members.to_vec()),
                first_nodes: Some(first_nodes),
                timeout: self.timeout.min(bootstrap::MAX_TIMEOUT),
                ..(**bootstrap).clone()
            };
            return Ok(World::join_knowing(&next, self.family.hosts.clone())?.succeeding(self));
        }
        let Link::Threads(member) = &self.link else { return Err(not_a_member(own)) };
        let world = World {
            link: Link::Threads(Arc::new(member.regroup(generation, members, rank))),
            rank,
            size: members.len(),
            local_rank: self.local_rank,
            timeout: self.timeout,
            nodes: nodes.into(),
            family: Arc::new(Family { generation, names: Names::new(members), first_nodes, hosts: BTreeMap::new() }),
            newest: Arc::default(),
        };
        // The new world has ended and is dropped; this world goes on.
        world.barrier("regroup").map_err(Error::passing)?;
        let size = members.len();
        log::info!(target: crate::base::targets::WORLD, "rank {own}: {rank} of {size} in generation {generation}");
        Ok(world.succeeding(self))
    }

    /// As [`regroup`](Self::regroup), over an all-gather of the members alone, in which a member's rank is its index in
    /// `members`. This world may be of any kind.
    ///
    /// # Errors
    /// `Config` if this rank is not a member, the members are not ascending ranks of the first generation, or the
    /// generation is not a later one; as [`over`](Self::over); `Bootstrap` where ranks name different members.
    pub fn regroup_over(&self, generation: u32, members: &[Rank], gather: impl AllGather + 'static) -> Result<World> {
        let (own, rank, nodes) = self.next_place(generation, members)?;
        let (size, names, first_nodes) = (members.len(), Names::new(members), self.family.first_nodes.clone());
        let world = World {
            link: Link::Over(Arc::new(Over::new(Box::new(gather), rank, names.clone(), generation))),
            rank,
            size,
            local_rank: self.local_rank,
            timeout: self.timeout,
            nodes: nodes.into(),
            family: Arc::new(Family { generation, names, first_nodes, hosts: BTreeMap::new() }),
            newest: Arc::default(),
        };
        over::check_terms(&world, "regroup").map_err(Error::passing)?;
        log::info!(target: crate::base::targets::WORLD, "rank {own}: {rank} of {size} in generation {generation}");
        Ok(world.succeeding(self))
    }

    /// This rank's number in the first generation, its rank in a later one of `members`, and the members of each node.
    fn next_place(&self, generation: u32, members: &[Rank]) -> Result<(Rank, Rank, Vec<usize>)> {
        let own = self.original(self.rank);
        let (rank, nodes) = place(members, own, &self.family.first_nodes)?;
        let newest = self.newest.load(Ordering::Acquire).max(self.family.generation);
        if generation <= newest {
            let advice = format!("this rank is of generation {newest}; give a later one");
            return Err(Error::config("generation", generation, advice));
        }
        Ok((own, rank, nodes))
    }

    /// How often the job has regrouped.
    pub fn generation(&self) -> u32 {
        self.family.generation
    }

    /// By rank of this world: its rank in the first generation.
    pub fn members(&self) -> &[Rank] {
        self.family.names.members()
    }

    /// The first-generation rank of a rank of this world.
    pub fn original(&self, rank: Rank) -> Rank {
        self.family.names.of(rank)
    }

    /// Ranks of the first generation.
    pub fn first_size(&self) -> usize {
        self.family.first_nodes.iter().sum()
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

    /// Ranks of each node, in rank order: the first `nodes()[0]` ranks are node 0. One node, unless the environment or
    /// [`with_nodes`](Self::with_nodes) gives several.
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
        let family = match self.family.generation {
            0 => {
                let hosts = self.family.hosts.clone();
                Arc::new(Family { hosts, ..Family::first(self.size, sizes) })
            }
            _ => self.family.clone(),
        };
        Ok(World { nodes: sizes.into(), family, ..self })
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

    /// Whether all ranks live in this process and see its addresses. False over an all-gather, wherever the ranks are.
    pub fn same_process(&self) -> bool {
        matches!(self.link, Link::Threads(_))
    }

    /// Changes the deadline of this handle's collectives, and of worlds that are regrouped from it. A deadline that
    /// passes ends the world's collectives on all ranks.
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
            return Err(Error::argument("payload", value, advice));
        }
        match &self.link {
            Link::Threads(member) => member.gather(what, payload, self.timeout),
            Link::Star(socket_thread, _) => socket_thread.gather(what, payload, self.timeout),
            Link::Over(over) => over.gather(what, payload, self.timeout),
        }
    }

    /// Collective: reports a failure on any rank to every rank, before a step that no rank can take alone. `what` names
    /// the step before it.
    ///
    /// # Errors
    /// The rank's own failure, or `Bootstrap` that names the first rank with a failure.
    pub fn agree(&self, what: &'static str, failure: Option<&Error>) -> Result<()> {
        let text = failure.map_or_else(String::new, Error::text_for_peers);
        let all = self.all_gather(what, text.as_bytes())?;
        if let Some(error) = failure {
            return Err(error.clone());
        }
        match all.iter().enumerate().find(|(_, text)| !text.is_empty()) {
            None => Ok(()),
            Some((rank, text)) => {
                let name = self.original(Rank(rank as u32));
                Err(Error::bootstrap(
                    format!("rank {name} failed in {what}: {}", quoted(text)),
                    format!("mend rank {name} and begin again on every rank"),
                ))
            }
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

    /// Peers whose process has gone, as seen now, by their ranks in this world; sorted. Empty for ranks of one process
    /// and over an all-gather. A peer that dropped its world is not lost. Reports of other peers come through rank 0,
    /// and end when rank 0 is lost or leaves. A process that a peer forked keeps the peer's connection open, and hides
    /// the peer's death, until the forked process ends too.
    pub fn lost_peers(&self) -> Vec<Rank> {
        match &self.link {
            Link::Threads(_) | Link::Over(_) => Vec::new(),
            Link::Star(socket_thread, _) => socket_thread.lost(),
        }
    }

    /// Connections and control messages that this rank dropped because they were malformed, not of this
    /// job, or a duplicate.
    pub fn refused(&self) -> u64 {
        match &self.link {
            Link::Threads(_) | Link::Over(_) => 0,
            Link::Star(socket_thread, _) => socket_thread.refused(),
        }
    }
}
