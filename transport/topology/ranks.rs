//! What each rank of a host takes.

use super::cpus::Cpus;
use super::nics::part;
use super::pci::PciAddress;
use super::places::{GpuPlace, Topology};
use crate::base::{Error, Result};
use std::collections::BTreeSet;

/// What a rank takes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankPlace {
    /// Names of its RDMA devices in order of lanes: lane `l` uses device `l` mod their number.
    /// [`VerbsConfig::devices`](crate::network::verbs::VerbsConfig::devices) and, for EFA,
    /// [`LibfabricConfig::domains`](crate::network::libfabric::LibfabricConfig::domains) take them as they are. Empty
    /// if no NIC of its GPU is known: then the network chooses.
    pub devices: Vec<String>,
    /// CPUs for its threads, each of another core. Empty if the process may use none.
    pub cores: Vec<u32>,
}

impl Topology {
    /// The places of all ranks of this host, in order of local ranks, by the PCI addresses of their GPUs.
    ///
    /// A rank without an address, such as one of the CPU device, takes the place of GPU `l` mod `n`, where `l` is its
    /// local rank. Ranks of one GPU share its NICs and divide its cores. On a machine without GPUs the ranks divide all
    /// cores, and no NICs are chosen.
    ///
    /// All ranks of a world have equally many lanes (`nics` of the network's settings), whatever numbers of devices
    /// they have: agree on one number, such as the largest of any rank.
    ///
    /// # Errors
    /// `Config` if the machine has GPUs, and not the one at an address.
    pub fn ranks(&self, gpus: &[Option<PciAddress>]) -> Result<Vec<RankPlace>> {
        let at = |local_rank: usize, gpu: &Option<PciAddress>| match gpu {
            _ if self.gpus.is_empty() => Ok(None),
            None => Ok(self.gpus.get(local_rank % self.gpus.len())),
            Some(address) => self.gpu(*address).map(Some).ok_or_else(|| self.no_such_gpu(*address)),
        };
        let places: Result<Vec<Option<&GpuPlace>>> = gpus.iter().enumerate().map(|(rank, gpu)| at(rank, gpu)).collect();
        let places = places?;
        let of = |place: &Option<&GpuPlace>| place.map(|place| place.gpu);
        let rank = |(local_rank, place): (usize, &Option<&GpuPlace>)| {
            let sharers = places.iter().filter(|other| of(other) == of(place)).count();
            let number = places.iter().take(local_rank).filter(|other| of(other) == of(place)).count();
            let cores = place.map_or(&self.cores, |place| &place.cores);
            let nics = place.iter().flat_map(|place| &place.nics);
            RankPlace { devices: nics.map(|nic| nic.name.clone()).collect(), cores: part(cores, sharers, number) }
        };
        Ok(places.iter().enumerate().map(rank).collect())
    }

    /// A core for the proxy of each of these ranks, by its CPU, for [`ThreadConfig::core`](crate::ThreadConfig::core):
    /// the last of the rank's cores that is free, since the first ones of a machine serve the kernel. No two proxies
    /// get the same core, nor two hyperthreads of one.
    ///
    /// # Errors
    /// `Config` with the cores that there are, if they are too few. Proxies that are pinned to one core would stall
    /// each other; leave them unpinned then.
    pub fn proxy_cores(&self, ranks: &[RankPlace]) -> Result<Vec<usize>> {
        let mut order: Vec<usize> = (0..ranks.len()).collect();
        // Those with the least choice come first.
        order.sort_by_key(|&rank| ranks.get(rank).map(|rank| rank.cores.len()));
        let (mut taken, mut chosen) = (BTreeSet::new(), vec![0; ranks.len()]);
        for (rank, place) in order.into_iter().filter_map(|rank| Some((rank, ranks.get(rank)?))) {
            let mut last_first = place.cores.iter().rev().copied();
            let free = last_first.find(|cpu| taken.insert(self.core_of.get(cpu).copied().unwrap_or(*cpu)));
            match (chosen.get_mut(rank), free) {
                (Some(chosen), Some(cpu)) => *chosen = cpu as usize,
                _ => return Err(self.too_few(ranks, rank)),
            }
        }
        Ok(chosen)
    }

    fn no_such_gpu(&self, address: PciAddress) -> Error {
        let there: Vec<String> = self.gpus.iter().map(|place| place.gpu.to_string()).collect();
        Error::config("GPU", address, format!("the topology has {}; record this machine", there.join(", ")))
    }

    fn too_few(&self, ranks: &[RankPlace], rank: usize) -> Error {
        let of = |cpus: &[u32]| cpus.iter().copied().collect::<Cpus>().to_string();
        let (own, all) = (ranks.get(rank).map_or_else(String::new, |rank| of(&rank.cores)), of(&self.cores));
        let own = if own.is_empty() { "none".to_owned() } else { own };
        let advice = format!(
            "{} proxies spin on this host, each on a core of its own, and rank {rank} has no free core left; all ranks \
             may use {} cores (CPUs {all}): give more CPUs, or run fewer ranks",
            ranks.len(),
            self.cores.len()
        );
        Error::config("cores", own, advice)
    }
}
