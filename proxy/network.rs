//! Opens a network between nodes by its kind, as the interfaces in C and Python name it.
//!
//! Beside the data path, on the thread that starts a rank's proxy.

use super::AnyTransport;
use crate::base::{Error, Result};
use crate::transport::World;
use crate::transport::network::libfabric::{LibfabricConfig, LibfabricEndpoint};
use crate::transport::network::sim::{Clock, ProcessEndpoint, SimConfig};
use crate::transport::network::verbs::{VerbsConfig, VerbsEndpoint};

/// A kind of network between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Network {
    /// RDMA NICs of InfiniBand or RoCE, by libibverbs.
    Verbs,
    /// EFA, by libfabric.
    Efa,
    /// TCP, by libfabric.
    Tcp,
    /// Memory of one host, by libfabric 2.1 or later.
    Shm,
    /// A simulated network between processes of one host, which delays and reorders as much as a real one may: for
    /// tests.
    Simulated,
}

/// A network, and a rank's part of it: what each network's own configuration
/// ([`network`](crate::network)) has beside this is its default.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NetworkConfig {
    /// The same on all ranks.
    pub network: Network,
    /// NICs of this rank, as its peers see them. The simulated network has two.
    pub nics: usize,
    /// Devices of verbs or domains of EFA: NIC i uses number i modulo their number. Empty: all that there are.
    pub names: Vec<String>,
    /// TCP: the local address or host name; `None`: the first that the provider lists.
    pub source: Option<String>,
    /// The GPU whose memory verbs or EFA may register; `None`: host memory alone.
    pub gpu: Option<usize>,
    /// Of the simulated network: what its delays are drawn from.
    pub seed: u64,
}

impl NetworkConfig {
    /// One NIC of this rank, and defaults.
    pub fn new(network: Network) -> NetworkConfig {
        NetworkConfig { network, nics: 1, names: Vec::new(), source: None, gpu: None, seed: 0 }
    }

    /// Opens the rank's endpoint, which [`Proxy::spawn`](super::Proxy::spawn) takes. Collective with the simulated
    /// network.
    ///
    /// # Errors
    /// `Transport` if the network is not there, or opens nothing; as each network's endpoint.
    pub fn open(&self, world: &World) -> Result<AnyTransport> {
        let provider = match self.network {
            Network::Verbs => {
                let (devices, nics, gpu) = (self.names.clone(), self.nics, self.gpu);
                let config = VerbsConfig { devices, nics, gpu, ..VerbsConfig::default() };
                return Ok(Box::new(VerbsEndpoint::open(world.rank(), config)?));
            }
            Network::Simulated => {
                let config = SimConfig { clock: Clock::Real, ..SimConfig::hostile(self.seed) };
                return Ok(Box::new(ProcessEndpoint::open(world.rank(), &token(world)?, config)?));
            }
            Network::Efa => "efa",
            Network::Tcp => "tcp",
            Network::Shm => "shm",
        };
        let mut config = LibfabricConfig::new(provider);
        (config.nics, config.domains) = (self.nics, self.names.clone());
        (config.source, config.gpu) = (self.source.clone(), self.gpu);
        Ok(Box::new(LibfabricEndpoint::open(world.rank(), config)?))
    }
}

/// Rank 0's random number, by which ranks of a simulated network know each other. Collective.
fn token(world: &World) -> Result<Vec<u8>> {
    let mut own = [0u8; 16];
    let drawn = getrandom::fill(&mut own).map_err(|error| {
        Error::bootstrap(format!("no random token: {error}"), "the simulated network needs the system's random numbers")
    });
    world.agree("token of a simulated network", drawn.as_ref().err())?;
    drawn?;
    Ok(world.all_gather("token of a simulated network", &own)?.into_iter().next().unwrap_or_default())
}
