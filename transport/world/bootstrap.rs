//! Who a process is in its job and where rank 0 waits: read from the environment, checked, and turned
//! into a membership.
//!
//! Place in the data path: none. Runs on the caller's thread. The bootstrap thread does what can take time. Two short
//! waits stay on the caller's thread: looking up a name that must mean this host, and trying for a port that is held.

use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{self, TryRecvError};
use std::time::{Duration, Instant};

use super::admit::{Job, is_host};
use super::collective::Failure;
use super::member::Member;
use super::names::Names;
use super::root::Root;
use super::secret::Secret;
use super::socket_thread::{Port, SocketThread};
use super::terms::Terms;
use super::wire::MAX_TOKEN;
use super::{all_ranks, check_nodes, place};
use crate::base::{Error, Rank, Result, quoted, wait};

/// Port of rank 0 where none is given; not torchrun's 29500, which its own store may hold.
pub const DEFAULT_PORT: u16 = 29611;
/// Deadline of joins and collectives where none is given: processes start at different speeds.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// Most ranks of a world; bounds tables and descriptors at rank 0.
pub const MAX_WORLD: usize = 16_384;
/// How long rank 0 tries for a port that is held.
const BIND_PATIENCE: Duration = Duration::from_secs(1);
/// Deadline for looking up this host's own name, which needs only a file.
const LOOKUP_PATIENCE: Duration = Duration::from_secs(5);
/// Longest deadline: a day.
const MAX_TIMEOUT_MS: u64 = 86_400_000;
pub(super) const MAX_TIMEOUT: Duration = Duration::from_millis(MAX_TIMEOUT_MS);

/// Sizes of nodes, as in `4,4`.
fn node_sizes(text: &str) -> Result<Vec<usize>> {
    let sizes: Option<Vec<usize>> = text.split(',').map(|size| size.trim().parse().ok()).collect();
    sizes.ok_or_else(|| {
        let value = format!("\"{}\"", quoted(text.as_bytes()));
        Error::config("TOKENYARD_NODES", value, "set it to the nodes' sizes, as in 4,4")
    })
}

/// Nodes of `each` ranks, if they make up the world and are several.
fn equal_nodes(world: u64, each: u64) -> Option<Vec<usize>> {
    (each < world && world.is_multiple_of(each)).then(|| vec![each as usize; (world / each) as usize])
}

/// One process's place in a job.
#[derive(Clone, PartialEq, Eq)]
pub struct Bootstrap {
    /// This process's rank.
    pub rank: Rank,
    /// Number of ranks.
    pub world: usize,
    /// Index among the ranks of this host.
    pub local_rank: usize,
    /// Host name or address of rank 0.
    pub addr: String,
    /// Port on which rank 0 listens until the world has formed.
    pub port: u16,
    /// Secret of the job, the same on all ranks. It keeps strangers and other jobs out: rank 0 and each other rank
    /// prove to each other that they have the token, and the token never travels. Later messages travel in the clear:
    /// the token gives no protection from anyone who reads or changes network traffic. Whoever takes rank 0's port can
    /// guess a short token. Empty only on loopback addresses, where a secret file of this user takes its place
    /// (`/tmp/tokenyard-UID`).
    pub token: String,
    /// Deadline for the world to form, and for each collective.
    pub timeout: Duration,
    /// Ranks of each node, if there are several; see [`World::nodes`](super::World::nodes).
    pub nodes: Option<Vec<usize>>,
    /// How often the job has regrouped; 0 for its start. See [`World::regroup`](super::World::regroup).
    pub generation: u32,
    /// By rank, ascending: its rank in the first generation. Default: the same.
    pub members: Option<Vec<Rank>>,
    /// Ranks of each node of the first generation; `nodes` must be the members' share of them. Default: `nodes`.
    pub first_nodes: Option<Vec<usize>>,
    /// Name or address of this process's host for the other ranks, which connect there if this process becomes rank 0
    /// of a later generation. Default: the address from which this process's connection reaches rank 0.
    pub own_addr: Option<String>,
}

impl fmt::Debug for Bootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Bootstrap { rank, world, local_rank, addr, port, token, timeout, nodes, generation, members, .. } = self;
        let Bootstrap { first_nodes, own_addr, .. } = self;
        let token = format_args!("({} bytes)", token.len());
        f.debug_struct("Bootstrap")
            .field("rank", rank)
            .field("world", world)
            .field("local_rank", local_rank)
            .field("addr", addr)
            .field("port", port)
            .field("token", &token)
            .field("timeout", timeout)
            .field("nodes", nodes)
            .field("generation", generation)
            .field("members", members)
            .field("first_nodes", first_nodes)
            .field("own_addr", own_addr)
            .finish()
    }
}

impl Bootstrap {
    /// Reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK` (default: the rank), `MASTER_ADDR` (default 127.0.0.1),
    /// `TOKENYARD_PORT` (default 29611), `TOKENYARD_TOKEN`, `TOKENYARD_TIMEOUT_MS` (default 30000) and `TOKENYARD_ADDR`
    /// (default: this host as rank 0 sees it).
    ///
    /// Without `TOKENYARD_TOKEN` the run id that torchrun sets is the token, unless it is torchrun's default `none`,
    /// which every job shares and which is no secret. A run id on a command line (`--rdzv-id`) is no secret either:
    /// every user of the host can read it.
    ///
    /// Nodes: `TOKENYARD_NODES` (sizes, as in `4,4`), else `LOCAL_WORLD_SIZE` ranks each, where torchrun sets it and it
    /// divides the world, else one.
    pub fn from_env() -> Result<Bootstrap> {
        Bootstrap::from_vars(|name| match std::env::var(name) {
            Ok(value) => Ok(Some(value)),
            Err(std::env::VarError::NotPresent) => Ok(None),
            Err(std::env::VarError::NotUnicode(_)) => Err(Error::config(name, "not Unicode", "set it to plain text")),
        })
    }

    /// `from_env` over any source of variables.
    fn from_vars(var: impl Fn(&'static str) -> Result<Option<String>>) -> Result<Bootstrap> {
        let number = |name: &'static str, range: std::ops::RangeInclusive<u64>, default: Option<u64>| {
            let Some(text) = var(name)? else {
                return default.ok_or_else(|| {
                    Error::config(name, "not set", "start with torchrun, or set RANK and WORLD_SIZE for each process")
                });
            };
            text.trim().parse().ok().filter(|n| range.contains(n)).ok_or_else(|| {
                Error::config(
                    name,
                    format!("\"{}\"", quoted(text.as_bytes())),
                    format!("set it to a number from {} to {}", range.start(), range.end()),
                )
            })
        };
        let world = number("WORLD_SIZE", 1..=MAX_WORLD as u64, None)?;
        let rank = number("RANK", 0..=world - 1, None)?;
        let local_rank = number("LOCAL_RANK", 0..=MAX_WORLD as u64 - 1, Some(rank))?;
        let port = number("TOKENYARD_PORT", 1..=u64::from(u16::MAX), Some(u64::from(DEFAULT_PORT)))?;
        let default_ms = DEFAULT_TIMEOUT.as_millis() as u64;
        let timeout_ms = number("TOKENYARD_TIMEOUT_MS", 1..=MAX_TIMEOUT_MS, Some(default_ms))?;
        let addr = var("MASTER_ADDR")?.unwrap_or_else(|| Ipv4Addr::LOCALHOST.to_string());
        let token = match var("TOKENYARD_TOKEN")? {
            Some(token) => token,
            None => match var("TORCHELASTIC_RUN_ID")?.filter(|id| !id.is_empty() && id != "none") {
                Some(id) => format!("torchelastic:{id}"),
                None => String::new(),
            },
        };
        let bootstrap = Bootstrap {
            rank: Rank(rank as u32),
            world: world as usize,
            local_rank: local_rank as usize,
            addr,
            port: port as u16,
            token,
            timeout: Duration::from_millis(timeout_ms),
            nodes: match var("TOKENYARD_NODES")? {
                Some(text) => Some(node_sizes(&text)?),
                None => equal_nodes(world, number("LOCAL_WORLD_SIZE", 1..=MAX_WORLD as u64, Some(world))?),
            },
            generation: 0,
            members: None,
            first_nodes: None,
            own_addr: var("TOKENYARD_ADDR")?.filter(|addr| !addr.is_empty()),
        };
        bootstrap.check()?;
        Ok(bootstrap)
    }

    /// Checks everything that needs no peer.
    fn check(&self) -> Result<()> {
        if self.world == 0 || self.world > MAX_WORLD {
            return Err(Error::config("WORLD_SIZE", self.world, format!("use 1 to {MAX_WORLD} ranks")));
        }
        if self.rank.index() >= self.world {
            let advice = format!("use a rank below the world size {}", self.world);
            return Err(Error::config("RANK", self.rank, advice));
        }
        if let Some(nodes) = &self.nodes {
            check_nodes(nodes, self.world)?;
        }
        if self.members.as_ref().is_some_and(|members| members.len() != self.world) {
            return Err(Error::config("members", "of another number", format!("name all {} ranks", self.world)));
        }
        self.layout()?;
        if self.port == 0 {
            return Err(Error::config("TOKENYARD_PORT", "0", "all ranks need the same port: set one from 1 to 65535"));
        }
        if !is_host(&self.addr) {
            let advice = "set it to the host name or address of rank 0";
            return Err(Error::config("MASTER_ADDR", format!("{:?}", self.addr), advice));
        }
        if let Some(own) = self.own_addr.as_ref().filter(|own| !is_host(own)) {
            let advice = "set it to the host name or address of this process, or not at all";
            return Err(Error::config("TOKENYARD_ADDR", format!("{own:?}"), advice));
        }
        if self.timeout.is_zero() || self.timeout > Duration::from_millis(MAX_TIMEOUT_MS) {
            let value = format!("{} ms", self.timeout.as_millis());
            return Err(Error::config("TOKENYARD_TIMEOUT_MS", &value, format!("use 1 to {MAX_TIMEOUT_MS}")));
        }
        if self.token.len() > MAX_TOKEN {
            let value = format!("{} bytes long", self.token.len());
            return Err(Error::config("TOKENYARD_TOKEN", &value, format!("use a token of at most {MAX_TOKEN} bytes")));
        }
        if self.token.is_empty() && !self.is_loopback()? {
            let advice = format!(
                "set it to the same random string on all ranks; without one, MASTER_ADDR must be a loopback address, \
                 and it is {}",
                self.addr
            );
            return Err(Error::config("TOKENYARD_TOKEN", "not set", advice));
        }
        Ok(())
    }

    /// Whether the address of rank 0 can mean this host alone. A name that does not resolve does not.
    fn is_loopback(&self) -> Result<bool> {
        match self.look_up() {
            Ok(addrs) => Ok(!addrs.is_empty() && addrs.iter().all(|addr| addr.ip().is_loopback())),
            Err(error) if error.kind() == ErrorKind::TimedOut => Err(self.cannot_look_up(error).error()),
            Err(_) => Ok(false),
        }
    }

    /// Resolves the address of rank 0 within a short deadline.
    fn look_up(&self) -> std::io::Result<Vec<SocketAddr>> {
        if let Ok(ip) = self.addr.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, self.port)]);
        }
        let place = (self.addr.clone(), self.port);
        within(LOOKUP_PATIENCE.min(self.timeout), move || Ok(place.to_socket_addrs()?.collect()))
    }

    fn cannot_look_up(&self, error: std::io::Error) -> Failure {
        let advice = "mend this host's name resolution, or set MASTER_ADDR to an address in numbers";
        let (addr, root) = (&self.addr, self.names().root());
        let what = format!("the name {addr} of rank {root}'s host could not be looked up ({error})");
        Failure::new(what, advice).caused_by(error)
    }

    /// Starts this process's bootstrap thread and waits until all ranks have joined.
    pub(super) fn join(&self) -> Result<SocketThread> {
        self.check()?;
        let socket_thread = self.start(self.terms()?).map_err(|failure| failure.error())?;
        socket_thread.wait_formed(self.timeout)?;
        Ok(socket_thread)
    }

    /// By rank: its rank in the first generation.
    pub(super) fn members(&self) -> Vec<Rank> {
        self.members.clone().unwrap_or_else(|| all_ranks(self.world))
    }

    fn names(&self) -> Names {
        Names::new(&self.members())
    }

    /// Ranks of each node, of this generation and of the first; an error if members, nodes and first nodes make no
    /// sense together.
    pub(super) fn layout(&self) -> Result<(Vec<usize>, Vec<usize>)> {
        let Some(first_nodes) = self.first_nodes.clone().or_else(|| self.nodes.clone()) else {
            return self.placed(vec![self.world]);
        };
        let sum = first_nodes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size));
        if first_nodes.contains(&0) || sum.is_none_or(|sum| sum > MAX_WORLD || sum < self.world) {
            let advice =
                format!("give the first generation's sizes of at least 1, {} to {MAX_WORLD} together", self.world);
            return Err(Error::config("first_nodes", format!("{first_nodes:?}"), advice));
        }
        self.placed(first_nodes)
    }

    /// The members' nodes among the first ones, which must be those given.
    fn placed(&self, first_nodes: Vec<usize>) -> Result<(Vec<usize>, Vec<usize>)> {
        let members = self.members();
        let own = members.get(self.rank.index()).copied().unwrap_or(self.rank);
        let (_, placed) = place(&members, own, &first_nodes)?;
        match &self.nodes {
            Some(nodes) if *nodes != placed => {
                let advice =
                    format!("the members are {placed:?} of the first nodes {first_nodes:?}: give that, or none");
                Err(Error::config("nodes", format!("{nodes:?}"), advice))
            }
            _ => Ok((placed, first_nodes)),
        }
    }

    fn terms(&self) -> Result<Terms> {
        let (nodes, first_nodes) = self.layout()?;
        Ok(Terms::new(self.generation, &self.members(), &nodes, &first_nodes))
    }

    fn start(&self, terms: Terms) -> std::result::Result<SocketThread, Failure> {
        let port = Port::new().map_err(|error| {
            Failure::new(format!("no socket pair could be made ({error})"), "raise the limit on open files")
                .caused_by(error)
        })?;
        let port = Arc::new(port);
        // A world of one rank needs no secret.
        let secret = if self.token.is_empty() && self.world > 1 { Secret::host()? } else { Secret::token(&self.token) };
        let host = self.own_addr.clone().unwrap_or_default();
        let names = self.names();
        let (name, root) = (names.of(self.rank), names.root());
        if self.rank == Rank(0) {
            let listeners = if self.world == 1 { Vec::new() } else { self.listen()? };
            let job = Job { secret, names, terms };
            let thread = Root::new(port.clone(), job, host, listeners, self.timeout);
            return SocketThread::start(name, root, port, move || thread.run());
        }
        let member = Member {
            port: port.clone(),
            rank: self.rank,
            names,
            secret,
            terms,
            host,
            root: (self.addr.clone(), self.port),
            timeout: self.timeout,
            deadline: Instant::now() + self.timeout,
            absent: None,
            asked: None,
            problem: String::from("not tried yet"),
        };
        SocketThread::start(name, root, port, move || member.run())
    }

    /// Binds; retries for a moment while the port is held, for example by a predecessor that is ending.
    fn listen(&self) -> std::result::Result<Vec<TcpListener>, Failure> {
        let literal = self.addr.parse::<IpAddr>().is_ok();
        let own = if literal || self.token.is_empty() || self.addr == "localhost" {
            self.look_up().map_err(|error| self.cannot_look_up(error))?
        } else {
            Vec::new()
        };
        let mut last = Err(ErrorKind::AddrInUse.into());
        wait::poll("port of rank 0", BIND_PATIENCE.min(self.timeout), || {
            last = self.listen_once(&own);
            (!matches!(&last, Err(error) if error.kind() == ErrorKind::AddrInUse)).then_some(())
        });
        last.map_err(|error| self.cannot_listen(error))
    }

    /// Binds where the others will connect. A host's own name may resolve to another address on the host than
    /// elsewhere, and an address may be a gateway's. In both cases rank 0 listens on all addresses; the token protects
    /// it.
    fn listen_once(&self, own: &[SocketAddr]) -> std::io::Result<Vec<TcpListener>> {
        let mut bound = bind_each(own.iter().copied())?;
        for any in [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)] {
            if bound.is_empty() && !self.token.is_empty() {
                bound = bind_each([SocketAddr::new(any, self.port)].into_iter())?;
            }
        }
        if bound.is_empty() { Err(ErrorKind::AddrNotAvailable.into()) } else { Ok(bound) }
    }

    fn cannot_listen(&self, error: std::io::Error) -> Failure {
        let advice = match self.generation {
            0 => {
                "set MASTER_ADDR to a name or address of rank 0's host and TOKENYARD_PORT to a free port, on all ranks"
            }
            _ => {
                "set TOKENYARD_ADDR to an address of this host that the others reach, and TOKENYARD_PORT, on all ranks, \
                 so that the ports behind it are free, one for each generation"
            }
        };
        let (root, addr, port) = (self.names().root(), &self.addr, self.port);
        Failure::new(format!("rank {root} cannot listen on {addr}:{port} ({error})"), advice).caused_by(error)
    }
}

/// Binds those addresses that are this host's.
fn bind_each(addrs: impl Iterator<Item = SocketAddr>) -> std::io::Result<Vec<TcpListener>> {
    let mut bound = Vec::new();
    for addr in addrs {
        match TcpListener::bind(addr).and_then(|listener| listener.set_nonblocking(true).map(|()| listener)) {
            Ok(listener) => bound.push(listener),
            Err(error) if matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::PermissionDenied) => {
                return Err(error);
            }
            // Another host's address, or a family that this host lacks.
            Err(_) => {}
        }
    }
    Ok(bound)
}

/// Runs a system call of unbounded duration on its own thread, and waits for the answer. A thread that is late ends by
/// itself.
fn within<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> std::io::Result<T> {
    let (sender, answers) = mpsc::channel();
    std::thread::Builder::new().name("ty-lookup".into()).spawn(move || sender.send(work()))?;
    let answer = wait::poll("host name", patience, || match answers.try_recv() {
        Err(TryRecvError::Empty) => None,
        Err(TryRecvError::Disconnected) => Some(Err(std::io::Error::other("the look-up ended without an answer"))),
        Ok(answer) => Some(answer),
    });
    answer.unwrap_or_else(|| {
        let what = format!("no answer within {} ms", patience.as_millis());
        Err(std::io::Error::new(ErrorKind::TimedOut, what))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<Bootstrap> {
        let find = |name: &'static str| Ok(vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()));
        Bootstrap::from_vars(find)
    }

    const BASE: [(&str, &str); 2] = [("RANK", "1"), ("WORLD_SIZE", "2")];

    fn with(name: &'static str, value: &'static str) -> Result<Bootstrap> {
        let mut vars: Vec<_> = BASE.into_iter().filter(|(n, _)| *n != name).collect();
        vars.push((name, value));
        read(&vars)
    }

    #[test]
    fn a_default_that_differs_from_the_documented() {
        let b = read(&BASE).unwrap();
        assert_eq!((b.rank, b.world, b.local_rank, b.addr.as_str(), b.port), (Rank(1), 2, 1, "127.0.0.1", 29611));
        assert_eq!((b.token.as_str(), b.timeout, b.own_addr), ("", Duration::from_secs(30), None));
        assert_eq!(with("TOKENYARD_ADDR", "node-1").unwrap().own_addr.as_deref(), Some("node-1"));
        assert_eq!(with("TOKENYARD_ADDR", "").unwrap().own_addr, None);
    }

    #[test]
    fn a_malformed_variable_taken_for_its_default() {
        let long = "x".repeat(MAX_TOKEN + 1);
        let long: &'static str = Box::leak(long.into_boxed_str());
        for (name, value) in [
            ("RANK", "2"),
            ("RANK", "-1"),
            ("RANK", ""),
            ("WORLD_SIZE", "0"),
            ("WORLD_SIZE", "two"),
            ("WORLD_SIZE", "99999999999999999999"),
            ("LOCAL_RANK", "1.0"),
            ("TOKENYARD_PORT", "0"),
            ("TOKENYARD_PORT", "65536"),
            ("TOKENYARD_TIMEOUT_MS", "0"),
            ("TOKENYARD_TIMEOUT_MS", "soon"),
            ("MASTER_ADDR", ""),
            ("MASTER_ADDR", "a b"),
            ("TOKENYARD_TOKEN", long),
            ("TOKENYARD_ADDR", "a b"),
            ("TOKENYARD_ADDR", long),
        ] {
            match with(name, value) {
                Err(Error::Config { name: named, .. }) => assert_eq!(named, name, "{name}={value}"),
                other => panic!("{name}={value} gave {other:?}"),
            }
        }
        assert!(matches!(read(&[("WORLD_SIZE", "2")]), Err(Error::Config { name: "RANK", .. })));
        assert!(matches!(read(&[("RANK", "0")]), Err(Error::Config { name: "WORLD_SIZE", .. })));
    }

    #[test]
    fn a_variable_with_control_characters_shown_as_it_is() {
        const NAMES: [&str; 9] = [
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "TOKENYARD_PORT",
            "TOKENYARD_TIMEOUT_MS",
            "TOKENYARD_NODES",
            "TOKENYARD_ADDR",
        ];
        // Every variable that is read is in this list, but for secrets, which no error shows.
        let asked =
            std::cell::RefCell::new(std::collections::BTreeSet::from(["TOKENYARD_TOKEN", "TORCHELASTIC_RUN_ID"]));
        let all = |name: &'static str| {
            asked.borrow_mut().insert(name);
            Ok(BASE.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
        };
        Bootstrap::from_vars(all).unwrap();
        let known: std::collections::BTreeSet<&str> =
            NAMES.into_iter().chain(["TOKENYARD_TOKEN", "TORCHELASTIC_RUN_ID"]).collect();
        assert_eq!(asked.into_inner(), known);
        for name in NAMES {
            let error = with(name, "1\x1b[31m\r\n2").unwrap_err();
            assert!(matches!(error, Error::Config { name: named, .. } if named == name), "{name}: {error}");
            let text = error.to_string();
            assert!(!text.contains(char::is_control), "{name}: {text:?}");
            assert!(text.contains(r#""1\u{1b}[31m\r\n2""#), "{name}: {text}");
        }
    }

    #[test]
    fn a_job_without_token_open_to_the_network() {
        for addr in ["192.0.2.1", "0.0.0.0", "::"] {
            let error = with("MASTER_ADDR", addr).unwrap_err();
            assert!(matches!(error, Error::Config { name: "TOKENYARD_TOKEN", .. }), "{addr}: {error}");
        }
        for addr in ["127.0.0.1", "127.8.9.10", "::1"] {
            assert!(with("MASTER_ADDR", addr).is_ok(), "{addr}");
        }
    }

    #[test]
    fn a_name_server_that_never_answers_waited_for() {
        let (hold, held) = mpsc::channel::<()>();
        let late = within(Duration::from_millis(20), move || Ok(held.recv_timeout(Duration::from_secs(5)).is_ok()));
        assert!(late.is_err_and(|error| error.kind() == ErrorKind::TimedOut));
        drop(hold);
        assert_eq!(within(DEFAULT_TIMEOUT, || Ok(7)).ok(), Some(7));
        let dead = within::<()>(DEFAULT_TIMEOUT, || Err(ErrorKind::NotFound.into()));
        assert!(dead.is_err_and(|error| error.kind() == ErrorKind::NotFound));
    }

    #[test]
    fn a_name_that_means_this_host_refused_without_a_token() {
        assert!(with("MASTER_ADDR", "localhost").is_ok());
    }

    #[test]
    fn a_run_id_that_every_job_shares_taken_for_a_secret() {
        assert_eq!(with("TORCHELASTIC_RUN_ID", "none").unwrap().token, "");
        assert_eq!(with("TORCHELASTIC_RUN_ID", "").unwrap().token, "");
        assert_eq!(with("TORCHELASTIC_RUN_ID", "a1b2").unwrap().token, "torchelastic:a1b2");
        let both = read(&[BASE[0], BASE[1], ("TORCHELASTIC_RUN_ID", "a1b2"), ("TOKENYARD_TOKEN", "mine")]);
        assert_eq!(both.unwrap().token, "mine");
    }

    #[test]
    fn members_or_nodes_that_make_no_sense_believed() {
        let error = |members: &[u32], nodes: Option<&[usize]>, first_nodes: Option<&[usize]>| {
            let mut b = read(&BASE).unwrap();
            (b.rank, b.world, b.generation) = (Rank(0), members.len(), 1);
            b.members = Some(members.iter().copied().map(Rank).collect());
            (b.nodes, b.first_nodes) = (nodes.map(<[usize]>::to_vec), first_nodes.map(<[usize]>::to_vec));
            match b.check() {
                Ok(()) => "",
                Err(Error::Config { name, .. }) => name,
                Err(other) => panic!("{other}"),
            }
        };
        let first: Option<&[usize]> = Some(&[2, 2]);
        assert_eq!(error(&[0, 1, 3], Some(&[2, 1]), first), "");
        assert_eq!(error(&[0, 1, 3], None, first), "");
        assert_eq!(error(&[0, 1, 2], None, None), "");
        // Out of range, twice, descending; of a first generation that was not given.
        for members in [[0, 1, 4], [0, 1, 1], [1, 0, 2]] {
            assert_eq!(error(&members, Some(&[2, 1]), first), "members", "{members:?}");
        }
        assert_eq!(error(&[0, 1, 3], None, None), "members");
        // Nodes without these members, or whose sizes do not add up.
        assert_eq!(error(&[0, 1, 3], Some(&[1, 2]), first), "nodes");
        assert_eq!(error(&[0, 1, 3], Some(&[2, 2]), first), "nodes");
        for first_nodes in [&[2, 0, 2][..], &[2], &[usize::MAX, 3], &[MAX_WORLD, 1]] {
            assert_eq!(error(&[0, 1, 3], None, Some(first_nodes)), "first_nodes", "{first_nodes:?}");
        }
        let mut b = read(&BASE).unwrap();
        b.first_nodes = Some(vec![1, 1]);
        assert_eq!(b.layout().unwrap().0, [1, 1]);
    }

    #[test]
    fn a_token_in_debug_output() {
        assert!(!format!("{:?}", with("TOKENYARD_TOKEN", "hush").unwrap()).contains("hush"));
    }
}
