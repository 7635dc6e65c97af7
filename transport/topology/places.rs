//! The table of GPUs, with each one's NICs and cores.

use super::cores;
use super::cpus::Cpus;
use super::machine::{Device, Machine};
use super::nics::{self, Candidates, LeftOut, NicsFrom, WhyNot};
use super::pci::PciAddress;
use super::wanted::{NicKind, OfGpu, Wanted, WantedNics};
use crate::base::{Error, Result, quoted};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// A NIC of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nic {
    /// Its PCI address, which stays while names change.
    pub address: PciAddress,
    /// The name of its RDMA device.
    pub name: String,
}

/// Where a GPU's cores come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoresFrom {
    /// They are of the GPU's NUMA node.
    Node(u32),
    /// The GPU's NUMA node is unknown, or this process may use none of its cores.
    Elsewhere(Option<u32>),
    /// A line of a file names them.
    File,
}

impl fmt::Display for CoresFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CoresFrom::Node(node) => write!(f, "NUMA node {node}"),
            CoresFrom::Elsewhere(None) => f.write_str("NUMA node unknown"),
            CoresFrom::Elsewhere(Some(node)) => write!(f, "none usable of NUMA node {node}"),
            CoresFrom::File => f.write_str("given"),
        }
    }
}

/// A GPU's place in the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuPlace {
    /// The GPU's PCI address.
    pub gpu: PciAddress,
    /// Its NUMA node, if known.
    pub node: Option<u32>,
    /// Its NICs in order of lanes; see [`nic`](GpuPlace::nic).
    pub nics: Vec<Nic>,
    /// Where the NICs come from.
    pub nics_from: NicsFrom,
    /// How many other GPUs use some of these NICs.
    pub nics_shared: usize,
    /// CPUs for the rank's threads, each of another core.
    pub cores: Vec<u32>,
    /// Where the cores come from.
    pub cores_from: CoresFrom,
}

impl GpuPlace {
    /// The NIC of a lane: lane `l` uses NIC `l` mod `k` of `k`. So ranks with unlike numbers of NICs have equally many
    /// lanes, and several lanes may share a NIC. `None` if there is no NIC.
    pub fn nic(&self, lane: usize) -> Option<&Nic> {
        self.nics.get(lane.checked_rem(self.nics.len())?)
    }
}

/// Which NICs and cores each GPU's rank takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// All GPUs of the machine, by address. Those that this process cannot use are among them, so that all processes
    /// of the host divide NICs and cores alike.
    pub gpus: Vec<GpuPlace>,
    /// NICs that no GPU uses, by address.
    pub left_out: Vec<LeftOut>,
    /// Sentences on what is unusual.
    pub notes: Vec<String>,
    /// A CPU of each core that ranks may use.
    pub cores: Vec<u32>,
    /// The lowest CPU of each CPU's core, where it has several.
    pub(super) core_of: BTreeMap<u32, u32>,
}

impl Topology {
    /// Decides from a machine's facts and what the user asks for.
    ///
    /// # Errors
    /// `Config` if the user asks for NICs, GPUs or CPUs that are not there or that this process may not use.
    pub fn of(machine: &Machine, wanted: &Wanted) -> Result<Topology> {
        let candidates = match &wanted.nics {
            WantedNics::Named(names) => {
                let named = names.iter().map(|name| nic_named(machine, name, wanted.kind));
                let named: Result<BTreeSet<PciAddress>> = named.collect();
                Candidates::named(machine, named?)
            }
            WantedNics::Chosen | WantedNics::Most(_) => Candidates::of(machine, wanted.kind),
        };
        let usable = match &wanted.cores {
            Some(cores) => usable(machine, cores, "")?,
            None => machine.allowed().clone(),
        };
        let mut nics = nics::deal(machine, &candidates.nics);
        if let WantedNics::Most(most) = wanted.nics {
            nics.values_mut().for_each(|(_, nics)| nics.truncate(most));
        }
        let cores = cores::deal(machine, &usable);
        let gpus = machine.devices().iter().filter(|(_, device)| device.is_gpu());
        let mut gpus: Vec<GpuPlace> = gpus
            .map(|(&gpu, device)| {
                let (nics_from, nics) = nics.remove(&gpu).unwrap_or((NicsFrom::Nowhere, Vec::new()));
                let node = machine.node_of(device);
                let (own, cores) = cores.get(&gpu).cloned().unwrap_or_default();
                let cores_from = match (own, node) {
                    (true, Some(node)) => CoresFrom::Node(node),
                    _ => CoresFrom::Elsewhere(node),
                };
                let nics = nics.into_iter().filter_map(|nic| described(machine, nic)).collect();
                GpuPlace { gpu, node, nics, nics_from, nics_shared: 0, cores, cores_from }
            })
            .collect();
        for (gpu, of) in &wanted.gpus {
            let Some(place) = gpus.iter_mut().find(|place| place.gpu == *gpu) else {
                return Err(of_line(of, "no such GPU", "see the list of tokenyard topology"));
            };
            replace(machine, place, of, wanted.kind)?;
        }
        let left_out = left_out(machine, &candidates, &gpus);
        count_sharers(&mut gpus);
        let core_of = machine.core_of();
        let notes = notes(machine, &gpus, &core_of);
        Ok(Topology { gpus, left_out, notes, cores: machine.one_of_each_core(&usable), core_of })
    }

    /// The place of a GPU, by the PCI address that its driver gives.
    pub fn gpu(&self, gpu: PciAddress) -> Option<&GpuPlace> {
        self.gpus.iter().find(|place| place.gpu == gpu)
    }
}

fn described(machine: &Machine, address: PciAddress) -> Option<Nic> {
    let rdma = machine.devices().get(&address)?.rdma.as_ref()?;
    Some(Nic { address, name: rdma.name.clone() })
}

/// The NIC with an RDMA device of this name, or at this address.
fn nic_named(machine: &Machine, name: &str, kind: NicKind) -> Result<PciAddress> {
    let mut nics = machine.devices().iter().filter(|(_, device)| device.is_nic() && device.rdma.is_some());
    let address = PciAddress::parse(name);
    let is = |(at, device): &(&PciAddress, &Device)| {
        address == Some(**at) || device.rdma.as_ref().is_some_and(|rdma| rdma.name == name)
    };
    match nics.clone().find(is) {
        Some((&address, device)) if kind.has(device) => Ok(address),
        Some((_, device)) => {
            let (is, network) = if device.is_efa() { ("an EFA", "verbs") } else { ("no EFA", "libfabric:efa") };
            let advice = format!("it is {is}, which {network} does not use; name others");
            Err(Error::config("NIC", quoted(name.as_bytes()), advice))
        }
        None => {
            let there: Vec<String> =
                nics.by_ref().filter_map(|(_, device)| Some(device.rdma.as_ref()?.name.clone())).collect();
            let there = if there.is_empty() { "there is none".to_string() } else { there.join(", ") };
            Err(Error::config("NIC", quoted(name.as_bytes()), format!("no such RDMA device; there are: {there}")))
        }
    }
}

/// The CPUs, if the process may use all of them.
fn usable(machine: &Machine, cores: &Cpus, at: &str) -> Result<Cpus> {
    match cores.iter().find(|&cpu| !machine.allowed().contains(cpu)) {
        Some(cpu) => Err(Error::config(
            "cores",
            format!("{at}{cores}"),
            format!("this process may not use CPU {cpu}; give some of {}", machine.allowed()),
        )),
        None => Ok(cores.clone()),
    }
}

fn of_line(of: &OfGpu, what: &str, advice: impl Into<String>) -> Error {
    Error::config("choice of NICs and cores", format!("line {}, {what}", of.line), advice)
}

/// Puts what a file's line names in place of what was chosen.
fn replace(machine: &Machine, place: &mut GpuPlace, of: &OfGpu, kind: NicKind) -> Result<()> {
    if let Some(names) = &of.nics {
        let nics: Result<Vec<PciAddress>> = names.iter().map(|name| nic_named(machine, name, kind)).collect();
        place.nics = nics?.into_iter().filter_map(|nic| described(machine, nic)).collect();
        place.nics_from = NicsFrom::File;
    }
    if let Some(cores) = &of.cores {
        let cores = usable(machine, cores, &format!("line {}, ", of.line))?;
        place.cores = machine.one_of_each_core(&cores);
        if let Some(second) = cores.iter().find(|cpu| !place.cores.contains(cpu)) {
            return Err(of_line(
                of,
                &format!("CPU {second}"),
                "another CPU of the list is a hyperthread of its core; give one",
            ));
        }
        place.cores_from = CoresFrom::File;
    }
    Ok(())
}

fn left_out(machine: &Machine, candidates: &Candidates, gpus: &[GpuPlace]) -> Vec<LeftOut> {
    let used: BTreeSet<PciAddress> = gpus.iter().flat_map(|gpu| gpu.nics.iter().map(|nic| nic.address)).collect();
    let beyond = candidates.nics.iter().filter(|_| !gpus.is_empty()).map(|&nic| (nic, WhyNot::Beyond));
    let all = candidates.left_out.iter().copied().chain(beyond).filter(|(nic, _)| !used.contains(nic));
    let name = |nic| machine.devices().get(&nic)?.rdma.as_ref().map(|rdma| rdma.name.clone());
    let all: BTreeMap<PciAddress, WhyNot> = all.collect();
    all.into_iter().map(|(address, why)| LeftOut { address, name: name(address), why }).collect()
}

fn count_sharers(gpus: &mut [GpuPlace]) {
    let nics: Vec<BTreeSet<PciAddress>> =
        gpus.iter().map(|gpu| gpu.nics.iter().map(|nic| nic.address).collect()).collect();
    for (at, gpu) in gpus.iter_mut().enumerate() {
        let others = nics.iter().enumerate().filter(|(other, _)| *other != at);
        gpu.nics_shared = others.filter(|(_, nics)| gpu.nics.iter().any(|nic| nics.contains(&nic.address))).count();
    }
}

fn notes(machine: &Machine, gpus: &[GpuPlace], core_of: &BTreeMap<u32, u32>) -> Vec<String> {
    let mut notes = Vec::new();
    let device = |nic: &Nic| machine.devices().get(&nic.address);
    let nics = || gpus.iter().flat_map(|gpu| &gpu.nics).filter_map(device);
    if gpus.is_empty() {
        notes.push("there is no GPU: ranks may take any NIC and any core".to_string());
    }
    if nics().any(Device::lacks_rdma_write) {
        notes.push(
            "EFA of this generation (1d0f:efa0) has no RDMA write: writes would be emulated by messages".to_string(),
        );
    }
    if nics().any(|nic| nic.rdma.as_ref().is_some_and(|rdma| rdma.active == Some(false))) {
        notes.push("no NIC that could be used has an active port: bring a link up".to_string());
    }
    if gpus.iter().any(|gpu| gpu.nics_shared > 0) {
        notes.push("several GPUs share a NIC".to_string());
    }
    let taken = || gpus.iter().flat_map(|gpu| &gpu.cores).map(|cpu| core_of.get(cpu).unwrap_or(cpu));
    if taken().collect::<BTreeSet<&u32>>().len() < taken().count() {
        notes.push("several GPUs share a core: give the process more cores".to_string());
    }
    if gpus.iter().any(|gpu| gpu.cores.is_empty()) {
        notes.push("this process may use no core".to_string());
    }
    notes
}
