//! Which NICs are of the network that GPUs use, and which of them each GPU gets.

use super::machine::{Above, Device, Link, Machine};
use super::pci::{PciAddress, PciBus};
use super::wanted::NicKind;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Where a GPU's NICs come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NicsFrom {
    /// They are behind this bridge, the nearest that is above the GPU and NICs.
    Bridge(PciAddress),
    /// They are on this root bus, and no bridge is above the GPU and NICs.
    Root(PciBus),
    /// They are of the GPU's NUMA node.
    Node(u32),
    /// There are no nearer ones.
    Any,
    /// A line of a file names them.
    File,
    /// The machine has no NIC that can be used.
    Nowhere,
}

impl fmt::Display for NicsFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NicsFrom::Bridge(bridge) => write!(f, "bridge {bridge}"),
            NicsFrom::Root(bus) => write!(f, "root bus {bus}"),
            NicsFrom::Node(node) => write!(f, "NUMA node {node}"),
            NicsFrom::Any => f.write_str("none nearer"),
            NicsFrom::File => f.write_str("given"),
            NicsFrom::Nowhere => f.write_str("no NIC"),
        }
    }
}

/// A NIC that no GPU gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// Its PCI address.
    pub address: PciAddress,
    /// The name of its RDMA device, if it has one.
    pub name: Option<String>,
    /// The reason.
    pub why: WhyNot,
}

/// Why a NIC is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhyNot {
    /// Its driver has made no RDMA device.
    NoRdma,
    /// This process lacks its node in /dev/infiniband, and has others'.
    NoNode,
    /// Its port is not active, and others' are.
    Down,
    /// Others, of another vendor or link layer, reach more GPUs by bridges or are faster.
    OtherKind,
    /// It is one of a bond's, and others are not.
    Bond,
    /// It is behind no GPU's bridge, and others are: a NIC for storage or management.
    Apart,
    /// As `Apart`, where GPUs reach it through their processor by NVLink-C2C: a second class of NIC.
    SecondClass,
    /// No NIC is behind a GPU's bridge, and it is slower than others.
    Slower,
    /// The network that NICs are wanted for does not use it.
    OtherNetwork,
    /// The user names others.
    NotNamed,
    /// Dealt to no GPU: at most so many for each GPU were asked for.
    Beyond,
}

impl fmt::Display for WhyNot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WhyNot::NoRdma => "no RDMA device: its driver is not loaded",
            WhyNot::NoNode => "this process lacks its node in /dev/infiniband",
            WhyNot::Down => "its port is down",
            WhyNot::OtherKind => "NICs of another kind reach more GPUs or are faster",
            WhyNot::Bond => "part of a bond",
            WhyNot::Apart => "behind no GPU's bridge, as others are: for storage or management",
            WhyNot::SecondClass => {
                "second class: reached through the processor (C2C), and others are behind GPUs' bridges"
            }
            WhyNot::Slower => "slower than others",
            WhyNot::OtherNetwork => "of another network",
            WhyNot::NotNamed => "not named",
            WhyNot::Beyond => "more than were asked for",
        })
    }
}

/// NICs that can be dealt out, in order of their addresses, and those that cannot.
pub(super) struct Candidates {
    pub nics: Vec<PciAddress>,
    pub left_out: Vec<(PciAddress, WhyNot)>,
}

/// NICs of one make can be the lanes of one network.
type Make = (u16, Option<Link>);

fn make(nic: &Device) -> Make {
    (nic.vendor, if nic.is_efa() { None } else { nic.rdma.as_ref().and_then(|rdma| rdma.link) })
}

impl Candidates {
    /// The NICs that a user has named, and no others.
    pub fn named(machine: &Machine, nics: BTreeSet<PciAddress>) -> Candidates {
        let others = machine.devices().iter().filter(|(address, device)| device.is_nic() && !nics.contains(address));
        let left_out = others.map(|(&address, _)| (address, WhyNot::NotNamed)).collect();
        Candidates { nics: nics.into_iter().collect(), left_out }
    }

    /// The NICs of the network that GPUs use, as far as facts show it.
    pub fn of(machine: &Machine, kind: NicKind) -> Candidates {
        let all = machine.devices().iter().filter(|(_, device)| device.is_nic());
        let mut these = Candidates { nics: all.map(|(&address, _)| address).collect(), left_out: Vec::new() };
        let device = |nic: &PciAddress| machine.devices().get(nic);
        let rdma = |nic: &PciAddress| device(nic).and_then(|device| device.rdma.as_ref());
        let bridges = bridges_of_gpus(machine);
        let is_near = |nic: &PciAddress| machine.above(*nic).iter().any(|above| bridges.contains(above));
        let rate = |nic: &PciAddress| rdma(nic).and_then(|rdma| rdma.rate_gbps).unwrap_or(0);

        these.keep(WhyNot::OtherNetwork, |nic| device(nic).is_some_and(|nic| kind.has(nic)));
        these.keep(WhyNot::NoRdma, |nic| rdma(nic).is_some());
        these.prefer(WhyNot::NoNode, |nic| rdma(nic).is_some_and(|rdma| rdma.node != Some(false)));
        these.prefer(WhyNot::Down, |nic| rdma(nic).is_some_and(|rdma| rdma.active != Some(false)));
        let best = best_make(machine, &these.nics);
        these.keep(WhyNot::OtherKind, |nic| device(nic).map(make) == best);
        these.prefer(WhyNot::Bond, |nic| rdma(nic).is_some_and(|rdma| !rdma.bond));
        let coherent = machine.devices().values().any(Device::is_coherent);
        let apart = if coherent { WhyNot::SecondClass } else { WhyNot::Apart };
        these.prefer(apart, is_near);
        if !these.nics.iter().any(is_near) {
            let fastest = these.nics.iter().map(rate).max().unwrap_or(0);
            these.keep(WhyNot::Slower, |nic| rate(nic) == 0 || rate(nic) == fastest);
        }
        these
    }

    /// Leaves out those that do not fit.
    fn keep(&mut self, why: WhyNot, fits: impl Fn(&PciAddress) -> bool) {
        let (keep, leave) = std::mem::take(&mut self.nics).into_iter().partition(|nic| fits(nic));
        self.nics = keep;
        let leave: Vec<PciAddress> = leave;
        self.left_out.extend(leave.into_iter().map(|nic| (nic, why)));
    }

    /// The same, if any fits.
    fn prefer(&mut self, why: WhyNot, fits: impl Fn(&PciAddress) -> bool) {
        if self.nics.iter().any(&fits) {
            self.keep(why, fits);
        }
    }
}

/// Every bridge above a GPU. Root buses are none: on some machines all NICs share them with GPUs.
fn bridges_of_gpus(machine: &Machine) -> BTreeSet<Above> {
    let gpus = machine.devices().iter().filter(|(_, device)| device.is_gpu());
    let above = gpus.flat_map(|(&gpu, _)| machine.above(gpu));
    above.filter(|above| matches!(above, Above::Bridge(_))).collect()
}

/// The make that reaches most GPUs by bridges; of equals the fastest, then the one of most NICs, then InfiniBand.
fn best_make(machine: &Machine, nics: &[PciAddress]) -> Option<Make> {
    let mut makes: BTreeMap<Make, Vec<PciAddress>> = BTreeMap::new();
    for nic in nics {
        if let Some(device) = machine.devices().get(nic) {
            makes.entry(make(device)).or_default().push(*nic);
        }
    }
    let gpus: Vec<Vec<Above>> =
        machine.devices().iter().filter(|(_, device)| device.is_gpu()).map(|(&gpu, _)| machine.above(gpu)).collect();
    let worth = |make: &Make, nics: &Vec<PciAddress>| {
        let above: BTreeSet<Above> = nics.iter().flat_map(|&nic| machine.above(nic)).collect();
        let shares = |gpu: &&Vec<Above>| gpu.iter().any(|at| matches!(at, Above::Bridge(_)) && above.contains(at));
        let rate = |nic: &PciAddress| machine.devices().get(nic)?.rdma.as_ref()?.rate_gbps;
        let fastest = nics.iter().filter_map(rate).max();
        (gpus.iter().filter(shares).count(), fastest, nics.len(), make.1 == Some(Link::InfiniBand))
    };
    makes.iter().max_by_key(|(make, nics)| worth(make, nics)).map(|(&make, _)| make)
}

/// Deals `nics` to all GPUs of the machine: each gets those of the nearest place that has some. Of a place that several
/// GPUs share, each gets an equal part, in order; or one that it shares, if there are fewer NICs than GPUs.
pub(super) fn deal(machine: &Machine, nics: &[PciAddress]) -> BTreeMap<PciAddress, (NicsFrom, Vec<PciAddress>)> {
    let gpus: Vec<PciAddress> =
        machine.devices().iter().filter(|(_, device)| device.is_gpu()).map(|(&gpu, _)| gpu).collect();
    let above = |these: &[PciAddress]| these.iter().flat_map(|&this| machine.above(this)).collect::<BTreeSet<Above>>();
    let (above_nics, above_gpus) = (above(nics), above(&gpus));
    let nearest = |of: PciAddress, above_others: &BTreeSet<Above>| {
        machine.above(of).into_iter().find(|above| above_others.contains(above))
    };
    let node = |of: &PciAddress| machine.devices().get(of).and_then(|device| machine.node_of(device));
    let nodes: BTreeSet<u32> = nics.iter().filter_map(node).collect();
    let mut places: BTreeMap<NicsFrom, Vec<PciAddress>> = BTreeMap::new();
    for &gpu in &gpus {
        let by_node = || {
            let own = node(&gpu)?;
            nodes.contains(&own).then_some(NicsFrom::Node(own))
        };
        let place = match nearest(gpu, &above_nics) {
            Some(Above::Bridge(bridge)) => NicsFrom::Bridge(bridge),
            Some(Above::Root(bus)) => NicsFrom::Root(bus),
            None => by_node().unwrap_or(if nics.is_empty() { NicsFrom::Nowhere } else { NicsFrom::Any }),
        };
        places.entry(place).or_default().push(gpu);
    }
    let mut dealt = BTreeMap::new();
    for (place, sharers) in places {
        let above = match place {
            NicsFrom::Bridge(bridge) => Some(Above::Bridge(bridge)),
            NicsFrom::Root(bus) => Some(Above::Root(bus)),
            _ => None,
        };
        let here = |nic: &&PciAddress| match (above, place) {
            (Some(above), _) => machine.above(**nic).contains(&above),
            (None, NicsFrom::Node(own)) => node(nic) == Some(own),
            _ => true,
        };
        let all: Vec<PciAddress> = nics.iter().filter(here).copied().collect();
        // NICs that are nearer to other GPUs are left to these, if there are others here.
        let own: Vec<PciAddress> = all.iter().copied().filter(|&nic| nearest(nic, &above_gpus) == above).collect();
        let pool = if own.is_empty() { all } else { own };
        for (at, &gpu) in sharers.iter().enumerate() {
            dealt.insert(gpu, (place, part(&pool, sharers.len(), at)));
        }
    }
    dealt
}

/// The part of the `at`th of so many sharers. Parts are in order, differ in length by one at most, and hold one item at
/// least: with fewer items than sharers, neighbours share one.
pub(super) fn part<T: Copy>(items: &[T], sharers: usize, at: usize) -> Vec<T> {
    let first = at * items.len() / sharers.max(1);
    let end = ((at + 1) * items.len() / sharers.max(1)).max(first + 1);
    items.get(first..end.min(items.len())).unwrap_or_default().to_vec()
}
