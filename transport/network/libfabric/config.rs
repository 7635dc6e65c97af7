//! Settings of an endpoint over libfabric.

use super::provider::{NAMES, Provider};
use crate::base::{Error, Result, quoted};
use crate::transport::network::imm::MAX_NICS;
use crate::transport::network::revoke::LET_GO_NS;
use std::path::PathBuf;
use std::time::Duration;

/// Most writes of one NIC to one peer that may be outstanding, unless configured: enough to fill a link of 400 Gb/s
/// with writes of 8 KiB over 40 µs, and a small part of what NICs queue.
const PEER_POSTS: u32 = 256;
/// Most writes of a NIC that may be outstanding, to all peers together and so to one.
pub(super) const MAX_WRITES: usize = 4096;
/// Least time for a peer to let go of a region: threads that poll may be descheduled for some milliseconds, and clocks
/// are read to 10 ms.
const LEAST_LET_GO: Duration = Duration::from_millis(50);

/// Settings of a [`LibfabricEndpoint`](super::LibfabricEndpoint). All ranks give the same provider and as many NICs.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LibfabricConfig {
    /// The provider's name, as `fi_info -l` lists it: `tcp`, `shm` or `efa`; or `verbs;ofi_rxm`.
    pub provider: String,
    /// NICs of this rank, as its peers see them: each is a domain of its own.
    pub nics: usize,
    /// The local address or host name that `tcp` uses, or `verbs;ofi_rxm`; `None`: the first that the provider lists.
    pub source: Option<String>,
    /// Domains of `efa`, as `fi_info -p efa` names them, such as `rdmap79s0-rdm`, or of `verbs;ofi_rxm`, such as
    /// `mlx5_0`: NIC i uses domain i modulo their number. Empty: all that the provider lists, in its order.
    pub domains: Vec<String>,
    /// The GPU whose memory `efa` may register, as this process counts them; `None`: host memory alone.
    pub gpu: Option<usize>,
    /// Whether immediates of `efa` wait until a read has flushed what the NIC wrote into the GPU's memory; `None`:
    /// where the GPU's attributes and the NIC's place ask for it.
    pub flush: Option<bool>,
    /// Writes of one NIC to one peer that may be outstanding.
    pub peer_posts: u32,
    /// How long a peer may take to let go of a region that is taken back.
    pub let_go: Duration,
    /// Whether `shm` of libfabric before 2.1 may be used. A peer that is killed there may leave its survivors in a lock
    /// for ever, and a peer that closes crashes a sender of the same process.
    pub allow_old_shm: bool,
    /// The library's path; `None`: the one that `TOKENYARD_LIBFABRIC` names, else the system's.
    pub library: Option<PathBuf>,
}

impl LibfabricConfig {
    /// One NIC of a provider, and defaults.
    pub fn new(provider: impl Into<String>) -> LibfabricConfig {
        LibfabricConfig {
            provider: provider.into(),
            nics: 1,
            source: None,
            domains: Vec::new(),
            gpu: None,
            flush: None,
            peer_posts: PEER_POSTS,
            let_go: Duration::from_nanos(LET_GO_NS),
            allow_old_shm: false,
            library: None,
        }
    }

    pub(super) fn check(&self) -> Result<Provider> {
        // Others lack what this backend relies on: that a write's completion means its delivery.
        let Some(provider) = Provider::named(&self.provider) else {
            return Err(Error::config("provider", quoted(self.provider.as_bytes()), format!("give {NAMES}")));
        };
        if !(1..=MAX_NICS).contains(&self.nics) {
            return Err(Error::config("nics", self.nics, format!("use 1 to {MAX_NICS}")));
        }
        if !(1..=MAX_WRITES).contains(&(self.peer_posts as usize)) {
            return Err(Error::config("peer_posts", self.peer_posts, format!("allow 1 to {MAX_WRITES}")));
        }
        if self.let_go < LEAST_LET_GO {
            let value = format!("{:?}", self.let_go);
            return Err(Error::config("let_go", value, format!("give peers at least {LEAST_LET_GO:?}")));
        }
        // A source would be the endpoint's name over shm, and domains of one host's memory are one.
        let given = [
            ("nics", self.nics > 1, provider != Provider::Shm),
            ("source", self.source.is_some(), matches!(provider, Provider::Tcp | Provider::Verbs)),
            ("domains", !self.domains.is_empty(), provider.has_devices()),
            ("gpu", self.gpu.is_some(), provider == Provider::Efa),
            ("flush", self.flush.is_some(), provider == Provider::Efa),
        ];
        if let Some((name, ..)) = given.into_iter().find(|(_, given, serves)| *given && !serves) {
            let value = format!("given for {}", self.provider);
            return Err(Error::config(name, value, "leave it out, or use another provider"));
        }
        Ok(provider)
    }
}

/// Longest name of a provider.
pub(super) const MAX_PROVIDER: usize = 64;
