//! The networks that are not simulated, as the command line names them.
//!
//! Beside the data path, on the thread that opens a rank's endpoint.

use tokenyard::internals::transport::network::Transport;
use tokenyard::internals::transport::network::libfabric::{LibfabricConfig, LibfabricEndpoint};
use tokenyard::internals::transport::network::verbs::{VerbsConfig, VerbsEndpoint};
use tokenyard::{Device, Result, World};

use super::job::Job;
use crate::cli::cases::words::{ArenaWord, TransportWord};

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
        Real::new(job.case.transport, nics, job.nic_devices.clone(), job.allow_old_shm)
    }

    /// Those of a network, with devices of verbs; `None`: it is simulated.
    pub fn new(transport: TransportWord, nics: usize, devices: Vec<String>, allow_old_shm: bool) -> Option<Real> {
        let provider = match transport {
            TransportWord::Sim => return None,
            TransportWord::Verbs => {
                let mut config = VerbsConfig::default();
                (config.nics, config.devices) = (nics, devices);
                return Some(Real::Verbs(config));
            }
            TransportWord::Tcp => "tcp",
            TransportWord::Shm => "shm",
            TransportWord::Efa => "efa",
        };
        let mut config = LibfabricConfig::new(provider);
        (config.nics, config.allow_old_shm) = (nics, allow_old_shm);
        Some(Real::Libfabric(config))
    }

    /// A rank's endpoint, which reaches its GPU's memory if the arena is to lie there.
    ///
    /// # Errors
    /// If the network is not there, or opens nothing.
    pub fn open(&self, world: &World, device: &Device, arena: ArenaWord) -> Result<Box<dyn Transport>> {
        let gpu = device.ordinal().filter(|_| arena == ArenaWord::Device);
        Ok(match self {
            Real::Libfabric(config) => {
                let mut config = config.clone();
                config.gpu = gpu;
                Box::new(LibfabricEndpoint::open(world.rank(), config)?)
            }
            Real::Verbs(config) => {
                let mut config = config.clone();
                config.gpu = gpu;
                Box::new(VerbsEndpoint::open(world.rank(), config)?)
            }
        })
    }

    /// Whether all NICs reach memory of a GPU.
    pub fn reaches(self, gpu: usize) -> bool {
        let reach = match self {
            Real::Libfabric(mut config) => {
                config.gpu = Some(gpu);
                LibfabricEndpoint::reach_of(&config)
            }
            Real::Verbs(mut config) => {
                config.gpu = Some(gpu);
                VerbsEndpoint::reach_of(&config)
            }
        };
        reach.is_ok_and(|reach| reach.iter().all(|reach| reach.way.is_some()))
    }
}
