//! The networks that are not simulated, as the command line names them.
//!
//! Beside the data path, on the thread that opens a rank's endpoint.

use tokenyard::internals::transport::network::Transport;
use tokenyard::internals::transport::network::libfabric::{LibfabricConfig, LibfabricEndpoint};
use tokenyard::internals::transport::network::verbs::{VerbsConfig, VerbsEndpoint};
use tokenyard::{Device, Result, World};

use super::job::Job;
use super::places::Places;
use crate::cli::cases::words::{ArenaWord, TransportWord};

/// A network's settings, which all ranks share, and the NICs of each rank.
#[derive(Debug, Clone)]
pub struct Real {
    pub settings: Settings,
    places: Places,
}

/// A network's settings.
#[derive(Debug, Clone)]
pub enum Settings {
    Libfabric(LibfabricConfig),
    Verbs(VerbsConfig),
}

impl Settings {
    /// Those of a network, with domains of EFA or devices of verbs; `None`: it is simulated.
    pub fn new(transport: TransportWord, nics: usize, devices: Vec<String>, allow_old_shm: bool) -> Option<Settings> {
        let provider = match transport {
            TransportWord::Sim => return None,
            TransportWord::Verbs => {
                let mut config = VerbsConfig::default();
                (config.nics, config.devices) = (nics, devices);
                return Some(Settings::Verbs(config));
            }
            TransportWord::Tcp => "tcp",
            TransportWord::Shm => "shm",
            TransportWord::Efa => "efa",
        };
        let mut config = LibfabricConfig::new(provider);
        (config.nics, config.domains, config.allow_old_shm) = (nics, devices, allow_old_shm);
        Some(Settings::Libfabric(config))
    }

    /// Whether all NICs reach memory of a GPU.
    pub fn reaches(self, gpu: usize) -> bool {
        let reach = match self {
            Settings::Libfabric(mut config) => {
                config.gpu = Some(gpu);
                LibfabricEndpoint::reach_of(&config)
            }
            Settings::Verbs(mut config) => {
                config.gpu = Some(gpu);
                VerbsEndpoint::reach_of(&config)
            }
        };
        reach.is_ok_and(|reach| reach.iter().all(|reach| reach.way.is_some()))
    }
}

impl Real {
    /// That of a run; `None`: its network is simulated.
    pub fn of(job: &Job) -> Option<Real> {
        let nics = job.case.nics.unwrap_or(1);
        let settings = Settings::new(job.case.transport, nics, Vec::new(), job.allow_old_shm)?;
        Some(Real { settings, places: job.places.clone() })
    }

    /// The settings of a rank.
    pub fn of_rank(&self, rank: usize) -> Settings {
        let (mut settings, devices) = (self.settings.clone(), self.places.of(rank).devices);
        match &mut settings {
            Settings::Libfabric(config) => config.domains = devices,
            Settings::Verbs(config) => config.devices = devices,
        }
        settings
    }

    /// A rank's endpoint, which reaches its GPU's memory if the arena is to lie there.
    ///
    /// # Errors
    /// If the network is not there, or opens nothing.
    pub fn open(&self, world: &World, device: &Device, arena: ArenaWord) -> Result<Box<dyn Transport>> {
        let gpu = device.ordinal().filter(|_| arena == ArenaWord::Device);
        Ok(match self.of_rank(world.rank().index()) {
            Settings::Libfabric(mut config) => {
                config.gpu = gpu;
                Box::new(LibfabricEndpoint::open(world.rank(), config)?)
            }
            Settings::Verbs(mut config) => {
                config.gpu = gpu;
                Box::new(VerbsEndpoint::open(world.rank(), config)?)
            }
        })
    }
}
