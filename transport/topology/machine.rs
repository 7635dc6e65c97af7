//! The facts of a machine, as far as NICs and cores are chosen by them.

use super::cpus::Cpus;
use super::pci::{PciAddress, PciBus};
use std::collections::BTreeMap;

/// Most PCI devices of a machine: GPUs, NICs and the bridges above them.
pub(super) const MAX_DEVICES: usize = 4096;
/// Most bridges above a device. PCI numbers 256 buses, of which real trees nest 6.
pub(super) const MAX_DEPTH: usize = 32;

const NVIDIA: u16 = 0x10de;
const AMAZON: u16 = 0x1d0f;
const MELLANOX: u16 = 0x15b3;
/// GPUs that are linked to their processor by NVLink-C2C, by their PCI ids: GH200 (480 GB and 144 GB), GB200, GB300.
const COHERENT: [u16; 5] = [0x2342, 0x2348, 0x2941, 0x2942, 0x31c2];

/// Facts of a machine.
///
/// Every parent is a device of the machine, and no device is above itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    pub(super) allowed: Cpus,
    pub(super) cores: Vec<Cpus>,
    pub(super) nodes: BTreeMap<u32, Cpus>,
    pub(super) devices: BTreeMap<PciAddress, Device>,
}

/// A PCI function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Class and subclass: 0x0302 and 0x0300 are GPUs, 0x0207 and 0x0200 network controllers, 0x0604 bridges.
    pub class: u16,
    /// The vendor's PCI id; 0x10de is NVIDIA.
    pub vendor: u16,
    /// The device's PCI id.
    pub device: u16,
    /// NUMA node; `None` where the kernel says −1.
    pub node: Option<u32>,
    /// CPUs that the kernel calls local to the device; empty if it does not say, or says all of the node's.
    pub local: Cpus,
    /// The bridge above; `None` on a root bus.
    pub parent: Option<PciAddress>,
    /// The RDMA device, of NICs whose driver has made one.
    pub rdma: Option<Rdma>,
}

/// An RDMA device, and its first port.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rdma {
    /// Its name in /sys/class/infiniband.
    pub name: String,
    /// The port's link layer, if known.
    pub link: Option<Link>,
    /// The port's rate in Gb/s, if known.
    pub rate_gbps: Option<u32>,
    /// Whether the port is active, if known.
    pub active: Option<bool>,
    /// Whether the port is one of a bond's.
    pub bond: bool,
    /// Whether this process has the device's node in /dev/infiniband, if known.
    pub node: Option<bool>,
}

/// Link layer of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Link {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE or iWARP.
    Ethernet,
    /// Neither, as EFA says.
    Other,
}

/// What is above a device: bridges, then the root bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Above {
    /// A bridge: a root port, or a port of a switch.
    Bridge(PciAddress),
    /// A root bus, and so the processor's own PCI.
    Root(PciBus),
}

/// Why devices do not make a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Misplaced {
    /// The device's parent is missing.
    Missing(PciAddress, PciAddress),
    /// More than [`MAX_DEPTH`] bridges, or a circle of them.
    Deep(PciAddress),
}

impl Device {
    /// A bridge of which nothing else is known.
    pub(super) fn bridge(parent: Option<PciAddress>) -> Device {
        let local = Cpus::default();
        Device { class: 0x0604, vendor: 0, device: 0, node: None, local, parent, rdma: None }
    }

    /// Whether it is a GPU that CUDA may offer.
    pub fn is_gpu(&self) -> bool {
        matches!(self.class, 0x0300 | 0x0302) && self.vendor == NVIDIA
    }

    /// Whether it is a network controller that can have an RDMA device: one that has it, EFA, or ConnectX.
    pub fn is_nic(&self) -> bool {
        matches!(self.class, 0x0200 | 0x0207) && (self.rdma.is_some() || self.is_efa() || self.vendor == MELLANOX)
    }

    /// Whether it is an Elastic Fabric Adapter, of any generation.
    pub fn is_efa(&self) -> bool {
        self.vendor == AMAZON && self.device & 0xfff0 == 0xefa0
    }

    /// Whether it is an EFA whose device cannot write into remote memory: that of p4d.
    pub fn lacks_rdma_write(&self) -> bool {
        self.vendor == AMAZON && self.device == 0xefa0
    }

    /// Whether it is a GPU that its processor reaches by NVLink-C2C.
    pub fn is_coherent(&self) -> bool {
        self.vendor == NVIDIA && COHERENT.contains(&self.device)
    }
}

impl Machine {
    /// CPUs that this process may use, by its affinity and its cpuset, and that are online.
    pub fn allowed(&self) -> &Cpus {
        &self.allowed
    }

    /// CPUs of each NUMA node that has some.
    pub fn nodes(&self) -> &BTreeMap<u32, Cpus> {
        &self.nodes
    }

    /// Devices by address: GPUs, NICs, and bridges above them.
    pub fn devices(&self) -> &BTreeMap<PciAddress, Device> {
        &self.devices
    }

    /// The same machine, of which the process may use none but these CPUs: for a record that another process made.
    #[must_use]
    pub fn within(self, cpus: &Cpus) -> Machine {
        Machine { allowed: self.allowed.both(cpus), ..self }
    }

    /// The lowest CPU of each CPU's core, for cores of several CPUs.
    pub(super) fn core_of(&self) -> BTreeMap<u32, u32> {
        let of = |core: &Cpus| core.iter().next().map(|first| core.iter().map(move |cpu| (cpu, first)).collect());
        let several = self.cores.iter().filter(|core| core.len() > 1).filter_map(of);
        several.flat_map(|core: Vec<(u32, u32)>| core).collect()
    }

    /// Checks that every parent is there, and that none is above itself.
    pub(super) fn placed(self) -> Result<Machine, Misplaced> {
        for (&address, device) in &self.devices {
            let (mut at, mut depth) = (device, 0);
            while let Some(parent) = at.parent {
                at = self.devices.get(&parent).ok_or(Misplaced::Missing(address, parent))?;
                depth += 1;
                if depth > MAX_DEPTH {
                    return Err(Misplaced::Deep(address));
                }
            }
        }
        Ok(self)
    }

    /// What is above a device, the nearest first. Empty for a device that the machine does not have.
    pub fn above(&self, address: PciAddress) -> Vec<Above> {
        let mut above = Vec::new();
        let mut top = address;
        let Some(mut at) = self.devices.get(&address) else { return above };
        while let Some(parent) = at.parent.filter(|_| above.len() < MAX_DEPTH) {
            above.push(Above::Bridge(parent));
            top = parent;
            let Some(next) = self.devices.get(&parent) else { break };
            at = next;
        }
        above.push(Above::Root(top.bus()));
        above
    }

    /// The NUMA node of a device; where the kernel names none, the one node that has all CPUs local to the device.
    pub fn node_of(&self, device: &Device) -> Option<u32> {
        let by_cpus = || {
            let within = |cpus: &Cpus| !device.local.is_empty() && device.local.is_within(cpus);
            self.nodes.iter().find(|(_, cpus)| within(cpus)).map(|(&node, _)| node)
        };
        device.node.or_else(by_cpus)
    }

    /// One CPU of each core, in ascending order: the first hyperthread that is in `cpus`.
    pub fn one_of_each_core(&self, cpus: &Cpus) -> Vec<u32> {
        let mut core_of: BTreeMap<u32, usize> = BTreeMap::new();
        for (core, threads) in self.cores.iter().enumerate() {
            core_of.extend(threads.iter().map(|cpu| (cpu, core)));
        }
        let mut taken = vec![false; self.cores.len()];
        let mut first = |cpu: &u32| match core_of.get(cpu).and_then(|&core| taken.get_mut(core)) {
            Some(taken) => !std::mem::replace(taken, true),
            None => true,
        };
        cpus.iter().filter(&mut first).collect()
    }
}
