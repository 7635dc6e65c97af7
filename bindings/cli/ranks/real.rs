//! The networks that are not simulated, as the command line names them.
//!
//! Beside the data path, on the thread that opens a rank's endpoint.

use tokenyard::internals::transport::network::Transport;
use tokenyard::internals::transport::network::libfabric::{LibfabricConfig, LibfabricEndpoint};
use tokenyard::internals::transport::network::verbs::{VerbsConfig, VerbsEndpoint};
use tokenyard::{Result, World};

use super::job::Job;
use crate::cli::cases::words::TransportWord;

/// A network's settings, which all ranks share.
#[derive(Debug, Clone)]
pub enum Real {
    Libfabric(LibfabricConfig),
    Verbs(VerbsConfig),
}

impl Real {
    /// Those of a run; `None`: its network is simulated.
    pub fn of(job: &Job) -> Option<Real> {
        let nics = job.case.nics.unwrap_or(1);
        if job.case.transport == TransportWord::Verbs {
            let mut config = VerbsConfig::default();
            (config.nics, config.devices) = (nics, job.nic_devices.clone());
            return Some(Real::Verbs(config));
        }
        libfabric_config(job.case.transport, nics, job.allow_old_shm).map(Real::Libfabric)
    }

    /// A rank's endpoint.
    ///
    /// # Errors
    /// If the network is not there, or opens nothing.
    pub fn open(&self, world: &World) -> Result<Box<dyn Transport>> {
        Ok(match self {
            Real::Libfabric(config) => Box::new(LibfabricEndpoint::open(world.rank(), config.clone())?),
            Real::Verbs(config) => Box::new(VerbsEndpoint::open(world.rank(), config.clone())?),
        })
    }
}

/// The settings of a network over libfabric, if it is that.
pub fn libfabric_config(transport: TransportWord, nics: usize, allow_old_shm: bool) -> Option<LibfabricConfig> {
    let provider = match transport {
        TransportWord::Sim | TransportWord::Verbs => return None,
        TransportWord::Tcp => "tcp",
        TransportWord::Shm => "shm",
        TransportWord::Efa => "efa",
    };
    let mut config = LibfabricConfig::new(provider);
    (config.nics, config.allow_old_shm) = (nics, allow_old_shm);
    Some(config)
}
