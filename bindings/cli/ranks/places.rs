//! The NICs and the proxy's core of each rank: by the machine's topology, unless they are given.
//!
//! Before the data path, on the main thread. It reads /proc and /sys or a record, and asks the driver for the PCI
//! addresses of GPUs. Each rank that is a process decides for all ranks, and alike.

use std::path::Path;

use serde::Serialize;
use tokenyard::Device;
use tokenyard::internals::base::Result;
use tokenyard::internals::transport::network::imm::MAX_NICS;
use tokenyard::topology::{Machine, NicKind, PciAddress, RankPlace, Topology, Wanted, WantedNics, record};

use super::gpus::usable_gpus;
use crate::cli::args::BenchArgs;
use crate::cli::cases::case::Case;
use crate::cli::cases::words::{DeviceWord, TransportWord, WorldMode};
use crate::cli::usage::Refusal;

/// What a rank takes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Place {
    /// Domains of EFA, or devices of verbs. Empty: the network's own choice.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// The CPU that its proxy is pinned to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core: Option<usize>,
}

/// The places of a run's ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Places {
    /// By rank; empty if nothing is chosen.
    pub ranks: Vec<Place>,
    /// NICs of each rank, unless given: as many as the best rank has, or as there are devices.
    pub nics: Option<usize>,
    /// Sentences for the user.
    pub notes: Vec<String>,
}

impl Places {
    /// Each rank of so many takes all of these devices.
    pub fn devices(devices: &[String], world: usize) -> Places {
        let place = Place { devices: devices.to_vec(), core: None };
        if devices.is_empty() {
            return Places::default();
        }
        Places { ranks: vec![place; world], nics: Some(devices.len().min(MAX_NICS)), notes: Vec::new() }
    }

    /// The place of a rank. Hosts are alike.
    pub fn of(&self, rank: usize) -> Place {
        let local = rank.checked_rem(self.ranks.len());
        local.and_then(|local| self.ranks.get(local)).cloned().unwrap_or_default()
    }

    /// The places for a run of which so many ranks are on this host.
    ///
    /// # Errors
    /// If files are unusable, or the given cores are too few.
    pub fn new(
        args: &BenchArgs,
        device: DeviceWord,
        case: &Case,
        ranks_here: usize,
    ) -> std::result::Result<Places, Refusal> {
        let asked = [("--cores", args.cores.as_ref().map(ToString::to_string)), ("--topology", args.topology.clone())];
        let asked = asked.into_iter().find_map(|(name, value)| Some((name, value?)));
        if !case.several_nodes() || case.world_mode == WorldMode::OneThread {
            let advice = "the ranks have no proxy threads; give several nodes by --ranks-per-node, and threads";
            return asked.map_or(Ok(Places::default()), |(name, value)| Err(Refusal::of(name, value, advice)));
        }
        let given = args.transport.as_ref().map_or(&[][..], |transport| &transport.devices);
        let mut places = Places::devices(given, ranks_here);
        let kind = match case.transport {
            TransportWord::Efa => NicKind::Efa,
            TransportWord::Verbs => NicKind::Verbs,
            _ => NicKind::Any,
        };
        if kind == NicKind::Any && asked.is_none() && device == DeviceWord::Cpu {
            return Ok(places);
        }
        let (machine, wanted) = facts(args)?;
        places.notes.extend(crowded(&machine, device, ranks_here));
        if kind == NicKind::Any && asked.is_none() {
            return Ok(places);
        }
        let topology = Topology::of(&machine, &wanted.of_kind(kind)).map_err(|error| Refusal::from_error(&error))?;
        let ranks = match gpus(device, ranks_here).and_then(|gpus| topology.ranks(&gpus)) {
            Ok(ranks) => ranks,
            Err(error) if asked.is_some() => return Err(Refusal::from_error(&error)),
            Err(error) => {
                places.notes.push(format!("NICs and cores are not chosen: {error}"));
                return Ok(places);
            }
        };
        places.ranks.resize(ranks_here, Place::default());
        if kind != NicKind::Any && given.is_empty() {
            places.take_devices(&ranks);
        }
        let near = machine.nodes().len() > 1 && given.is_empty() && places.nics.is_some();
        if near || asked.is_some() {
            places.pin(&topology, &ranks, asked)?;
        }
        if places.ranks.iter().all(|place| *place == Place::default()) {
            places.ranks.clear();
        }
        Ok(places)
    }

    fn take_devices(&mut self, ranks: &[RankPlace]) {
        let most = ranks.iter().map(|rank| rank.devices.len()).max().unwrap_or(0);
        if most > MAX_NICS {
            self.notes.push(format!("of up to {most} NICs of a GPU {MAX_NICS} are used, as many as a rank may have"));
        }
        self.nics = Some(most.min(MAX_NICS)).filter(|nics| *nics > 0);
        self.ranks.iter_mut().zip(ranks).for_each(|(place, rank)| place.devices.clone_from(&rank.devices));
    }

    fn pin(
        &mut self,
        topology: &Topology,
        ranks: &[RankPlace],
        asked: Option<(&str, String)>,
    ) -> std::result::Result<(), Refusal> {
        match (topology.proxy_cores(ranks), asked) {
            (Ok(cores), _) => self.ranks.iter_mut().zip(cores).for_each(|(place, core)| place.core = Some(core)),
            (Err(error), Some(("--cores", _))) => return Err(Refusal::from_error(&error)),
            (Err(error), _) => self.notes.push(format!("proxies are not pinned: {error}")),
        }
        Ok(())
    }
}

/// A sentence if more threads spin than there are cores for them.
fn crowded(machine: &Machine, device: DeviceWord, world: usize) -> Option<String> {
    // A proxy for each rank, and an executor of the CPU device.
    let spinners = if device == DeviceWord::Cpu { 2 * world } else { world };
    let cores = machine.one_of_each_core(machine.allowed()).len();
    (0 < cores && cores < spinners).then(|| {
        format!(
            "{spinners} threads spin, and this process may use {cores} cores (CPUs {}): idle proxies yield, and times \
             mean little; give it more CPUs, or run fewer ranks",
            machine.allowed()
        )
    })
}

/// The machine that the topology is of, and what the user asks of it.
fn facts(args: &BenchArgs) -> std::result::Result<(Machine, Wanted), Refusal> {
    let here = Machine::here();
    let wanted = Wanted::new(WantedNics::Chosen, args.cores.clone());
    let Some(file) = &args.topology else { return Ok((here, wanted)) };
    let (path, refused) = (Path::new(file), |error| Refusal::of_file("--topology", file, &error));
    if record::is_record(path).map_err(refused)? {
        let recorded = record::read(path).map_err(refused)?;
        // Threads are pinned on this machine, whatever the recording process was allowed.
        return Ok((recorded.within(here.allowed()), wanted));
    }
    Ok((here, wanted.and_file(path).map_err(refused)?))
}

/// The PCI address of each rank's GPU; none on the CPU device, whose ranks stand for GPUs in order.
fn gpus(device: DeviceWord, world: usize) -> Result<Vec<Option<PciAddress>>> {
    if device == DeviceWord::Cpu {
        return Ok(vec![None; world]);
    }
    let count = usable_gpus().max(1);
    let addresses: Result<Vec<String>> = (0..count.min(world)).map(Device::cuda_pci_address).collect();
    let addresses: Vec<Option<PciAddress>> = addresses?.iter().map(|text| PciAddress::parse(text)).collect();
    Ok((0..world).map(|rank| addresses.get(rank % count).copied().flatten()).collect())
}
