//! The facts of a machine, read from sysfs and procfs.
//!
//! A file that is missing or unreadable is an unknown fact, never an error: containers hide parts of sysfs.

use super::cpus::Cpus;
use super::machine::{Device, Link, MAX_DEVICES, Machine, Rdma};
use super::pci::{PciAddress, hex};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Most bytes of a file that are read; sysfs gives a page at most, and procfs's status is shorter.
const MAX_FILE: u64 = 64 << 10;
const PCI: &str = "sys/bus/pci/devices";

impl Machine {
    /// The machine that this process runs on.
    pub fn here() -> Machine {
        Machine::below(Path::new("/"))
    }

    /// The machine whose `sys`, `proc` and `dev` are below `root`.
    pub fn below(root: &Path) -> Machine {
        let tree = Tree { root };
        let online = tree.cpus("sys/devices/system/cpu/online");
        let nodes = tree.nodes();
        let all = online.clone().unwrap_or_else(|| nodes.values().flat_map(Cpus::iter).collect());
        let mut allowed = tree.affinity().unwrap_or_else(|| all.clone());
        if online.is_some() {
            allowed = allowed.both(&all);
        }
        let devices = tree.devices(&nodes);
        let machine = Machine { allowed, cores: tree.cores(&all), nodes, devices };
        // Parents are the kernel's; should they make no tree, no device is known.
        machine.clone().placed().unwrap_or(Machine { devices: BTreeMap::new(), ..machine })
    }
}

/// A file system, from its root.
struct Tree<'a> {
    root: &'a Path,
}

impl Tree<'_> {
    fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let mut text = String::new();
        File::open(self.root.join(path)).ok()?.take(MAX_FILE).read_to_string(&mut text).ok()?;
        Some(text.trim().to_string())
    }

    fn cpus(&self, path: impl AsRef<Path>) -> Option<Cpus> {
        Cpus::parse(&self.text(path)?)
    }

    /// A number after `0x`.
    fn hex(&self, path: impl AsRef<Path>) -> Option<u32> {
        hex(self.text(path)?.strip_prefix("0x")?, 1..=8)
    }

    /// Names in a folder, sorted.
    fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.take(16 * MAX_DEVICES).map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// What the calling thread may use: its affinity within its cpuset.
    fn affinity(&self) -> Option<Cpus> {
        let status = self.text("proc/thread-self/status").or_else(|| self.text("proc/self/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        Cpus::parse(line.trim())
    }

    fn nodes(&self) -> BTreeMap<u32, Cpus> {
        let folder = "sys/devices/system/node";
        let number = |name: &str| name.strip_prefix("node")?.parse::<u32>().ok();
        let names = self.names(folder);
        let nodes = names.iter().filter_map(|name| {
            let cpus = self.cpus(format!("{folder}/{name}/cpulist"))?;
            Some((number(name)?, cpus)).filter(|(_, cpus)| !cpus.is_empty())
        });
        nodes.collect()
    }

    /// The hyperthreads of each core, of those that have several.
    fn cores(&self, all: &Cpus) -> Vec<Cpus> {
        let threads = |cpu: u32| {
            let folder = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            // Named core_cpus_list since Linux 5.3.
            let names = ["core_cpus_list", "thread_siblings_list"];
            names.iter().find_map(|name| self.cpus(format!("{folder}/{name}")))
        };
        let mut cores: Vec<Cpus> = all.iter().filter_map(threads).filter(|threads| threads.len() > 1).collect();
        cores.sort();
        cores.dedup();
        cores
    }

    /// GPUs, NICs, and the bridges above them.
    fn devices(&self, nodes: &BTreeMap<u32, Cpus>) -> BTreeMap<PciAddress, Device> {
        let mut devices = BTreeMap::new();
        for name in self.names(PCI) {
            let Some(address) = PciAddress::parse(&name) else { continue };
            let chain = self.bridges(&name);
            let Some(device) = self.device(&name, chain.last().copied(), nodes) else { continue };
            if devices.len() + chain.len() >= MAX_DEVICES || !(device.is_gpu() || device.is_nic()) {
                continue;
            }
            devices.insert(address, device);
            for (at, &bridge) in chain.iter().enumerate() {
                let parent = at.checked_sub(1).and_then(|at| chain.get(at)).copied();
                let unknown = || Device::bridge(parent);
                devices
                    .entry(bridge)
                    .or_insert_with(|| self.device(&bridge.to_string(), parent, nodes).unwrap_or_else(unknown));
            }
        }
        devices
    }

    /// The bridges above a device, from the root bus on: the link in /sys/bus/pci names them all.
    fn bridges(&self, name: &str) -> Vec<PciAddress> {
        let link = fs::read_link(self.root.join(PCI).join(name)).unwrap_or_default();
        let mut parts: Vec<_> = link.iter().map(|part| PciAddress::parse(&part.to_string_lossy())).collect();
        parts.pop();
        parts.into_iter().flatten().collect()
    }

    fn device(&self, name: &str, parent: Option<PciAddress>, nodes: &BTreeMap<u32, Cpus>) -> Option<Device> {
        let folder = Path::new(PCI).join(name);
        let id = |file: &str| self.hex(folder.join(file)).and_then(|id| u16::try_from(id).ok());
        let node = self.text(folder.join("numa_node")).and_then(|node| node.parse::<u32>().ok());
        let local = self.cpus(folder.join("local_cpulist")).unwrap_or_default();
        let same = node.and_then(|node| nodes.get(&node)).is_some_and(|cpus| *cpus == local);
        Some(Device {
            class: u16::try_from(self.hex(folder.join("class"))? >> 8).ok()?,
            vendor: id("vendor")?,
            device: id("device")?,
            node,
            local: if same { Cpus::default() } else { local },
            parent,
            rdma: self.rdma(&folder),
        })
    }

    fn rdma(&self, folder: &Path) -> Option<Rdma> {
        let name = self.names(folder.join("infiniband")).into_iter().next()?;
        let ports = folder.join("infiniband").join(&name).join("ports");
        let port = self.names(&ports).into_iter().next().map(|port| ports.join(port));
        let fact = |file: &str| port.as_ref().and_then(|port| self.text(port.join(file)));
        let bonded = |net: String| self.root.join(folder).join("net").join(net).join("master/bonding").exists();
        let verbs = self.names(folder.join("infiniband_verbs")).into_iter().next();
        Some(Rdma {
            bond: name.contains("bond") || self.names(folder.join("net")).into_iter().any(bonded),
            // "400 Gb/sec (4X NDR)", "4: ACTIVE"
            rate_gbps: fact("rate").and_then(|rate| rate.split(['.', ' ']).next()?.parse().ok()),
            active: fact("state").map(|state| state.contains("ACTIVE")),
            link: fact("link_layer").map(|link| match link.as_str() {
                "InfiniBand" => Link::InfiniBand,
                "Ethernet" => Link::Ethernet,
                _ => Link::Other,
            }),
            node: verbs.map(|verbs| self.root.join(PathBuf::from("dev/infiniband").join(verbs)).exists()),
            name,
        })
    }
}
