//! Which cores each GPU's rank gets.

use super::cpus::Cpus;
use super::machine::Machine;
use super::nics::part;
use super::pci::PciAddress;
use std::collections::{BTreeMap, BTreeSet};

/// Deals cores to all GPUs of the machine: of each core the first hyperthread that is in `usable`, to the GPUs of its
/// NUMA node in equal parts. With each GPU comes whether the cores are of its own node.
///
/// GPUs whose node is unknown, or has no usable core, share the nodes that no other GPU takes cores of; if there are
/// none, each joins the node with the fewest GPUs. So two GPUs share a core only if their node has fewer cores than
/// GPUs.
pub(super) fn deal(machine: &Machine, usable: &Cpus) -> BTreeMap<PciAddress, (bool, Vec<u32>)> {
    let cores = machine.one_of_each_core(usable);
    let node_of = |cpu: u32| machine.nodes().iter().find(|(_, cpus)| cpus.contains(cpu)).map(|(&node, _)| node);
    let mut pools: BTreeMap<Option<u32>, Vec<u32>> = BTreeMap::new();
    for core in cores {
        pools.entry(node_of(core)).or_default().push(core);
    }
    let (mut groups, mut floating): (BTreeMap<Option<u32>, BTreeSet<PciAddress>>, _) = (BTreeMap::new(), Vec::new());
    let mut own = BTreeSet::new();
    for (&gpu, device) in machine.devices().iter().filter(|(_, device)| device.is_gpu()) {
        let node = machine.node_of(device);
        if node.is_some() && pools.contains_key(&node) {
            groups.entry(node).or_default().insert(gpu);
            own.insert(gpu);
        } else {
            floating.push(gpu);
        }
    }
    let mut dealt = BTreeMap::new();
    let free = pools.iter().filter(|(node, _)| !groups.contains_key(node));
    let free: Vec<u32> = free.flat_map(|(_, cores)| cores.iter().copied()).collect();
    if free.is_empty() {
        for &gpu in &floating {
            let fewest = pools.keys().min_by_key(|node| groups.get(node).map_or(0, BTreeSet::len)).copied();
            groups.entry(fewest.unwrap_or_default()).or_default().insert(gpu);
        }
    } else {
        for (at, &gpu) in floating.iter().enumerate() {
            dealt.insert(gpu, (false, part(&free, floating.len(), at)));
        }
    }
    for (node, gpus) in groups {
        let pool = pools.get(&node).map(Vec::as_slice).unwrap_or_default();
        for (at, &gpu) in gpus.iter().enumerate() {
            dealt.insert(gpu, (own.contains(&gpu), part(pool, gpus.len(), at)));
        }
    }
    dealt
}
