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
    /// `Config` for a field that this network has no use for; `Transport` if the network is not there, or opens
    /// nothing; as each network's endpoint.
    pub fn open(&self, world: &World) -> Result<AnyTransport> {
        self.must_serve()?;
        // Proxies know each other by their ranks of the first generation.
        let rank = world.original(world.rank());
        let provider = match self.network {
            Network::Verbs => {
                let (devices, nics, gpu) = (self.names.clone(), self.nics, self.gpu);
                let config = VerbsConfig { devices, nics, gpu, ..VerbsConfig::default() };
                return Ok(Box::new(VerbsEndpoint::open(rank, config)?));
            }
            Network::Simulated => {
                let config = SimConfig { clock: Clock::Real, ..SimConfig::hostile(self.seed) };
                return Ok(Box::new(ProcessEndpoint::open(rank, &token(world)?, config)?));
            }
            Network::Efa => "efa",
            Network::Tcp => "tcp",
            Network::Shm => "shm",
        };
        let mut config = LibfabricConfig::new(provider);
        (config.nics, config.domains) = (self.nics, self.names.clone());
        (config.source, config.gpu) = (self.source.clone(), self.gpu);
        Ok(Box::new(LibfabricEndpoint::open(rank, config)?))
    }

    /// Refuses what this network would leave unread, but for the seed.
    fn must_serve(&self) -> Result<()> {
        let simulated_nics = SimConfig::hostile(self.seed).nics.len();
        let on_devices = matches!(self.network, Network::Verbs | Network::Efa);
        let given = [
            ("nics", self.nics > simulated_nics, self.network != Network::Simulated),
            ("names", !self.names.is_empty(), on_devices),
            ("source", self.source.is_some(), self.network == Network::Tcp),
            ("gpu", self.gpu.is_some(), on_devices),
        ];
        let Some((name, ..)) = given.into_iter().find(|(_, given, serves)| *given && !serves) else { return Ok(()) };
        let value = format!("given for {:?}", self.network);
        Err(Error::config(name, value, "leave it out, or use another network"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_that_a_network_would_leave_unread_are_refused() {
        let given = |network, set: fn(&mut NetworkConfig)| {
            let mut config = NetworkConfig::new(network);
            set(&mut config);
            config.must_serve().map_err(|error| error.to_string())
        };
        let names: fn(&mut NetworkConfig) = |config| config.names = vec!["mlx5_0".to_owned()];
        let source: fn(&mut NetworkConfig) = |config| config.source = Some("127.0.0.1".to_owned());
        let gpu: fn(&mut NetworkConfig) = |config| config.gpu = Some(0);
        let nics: fn(&mut NetworkConfig) = |config| config.nics = 3;
        let none: fn(&mut NetworkConfig) = |_| {};
        // What is set, and the networks that use it.
        let table = [
            ("names", names, vec![Network::Verbs, Network::Efa]),
            ("source", source, vec![Network::Tcp]),
            ("gpu", gpu, vec![Network::Verbs, Network::Efa]),
            ("nics", nics, vec![Network::Verbs, Network::Efa, Network::Tcp, Network::Shm]),
            ("", none, vec![Network::Verbs, Network::Efa, Network::Tcp, Network::Shm, Network::Simulated]),
        ];
        for (name, set, users) in table {
            for network in [Network::Verbs, Network::Efa, Network::Tcp, Network::Shm, Network::Simulated] {
                let refused = given(network, set).err();
                assert_eq!(refused.is_none(), users.contains(&network), "{name} for {network:?}: {refused:?}");
                assert!(refused.is_none_or(|text| text.contains(name)), "{name} for {network:?}");
            }
        }
        // As many as the simulated network has.
        assert_eq!(given(Network::Simulated, |config| config.nics = 2), Ok(()));
    }
}
