//! Which NICs and which cores a rank takes, by its GPU's place in the machine.
//!
//! Place in the data path: before it. The tables are computed once, on the caller's thread, when a rank starts. Nothing
//! here opens a device, asks a driver, or pins a thread.
//!
//! [`Machine`] holds facts: PCI devices, NUMA nodes, cores, and the CPUs that this process may use. They come from
//! sysfs ([`Machine::here`], [`Machine::below`]) or from a record ([`record`]). [`Topology::of`] decides from the
//! facts, with what the user asks for ([`Wanted`]). All processes of a host that may use the same CPUs decide alike, so
//! they need no messages to divide NICs and cores.
//!
//! ```no_run
//! use tokenyard::network::verbs::VerbsConfig;
//! use tokenyard::topology::{Machine, NicKind, PciAddress, Topology, Wanted};
//!
//! let topology = Topology::of(&Machine::here(), &Wanted::default().of_kind(NicKind::Verbs))?;
//! // For each rank of this host; Device::cuda_pci_address(ordinal) gives it.
//! let gpus = ["0000:59:00.0", "0000:5a:00.0"].map(PciAddress::parse);
//! let ranks = topology.ranks(&gpus)?;
//! let cores = topology.proxy_cores(&ranks)?; // for ThreadConfig::core
//! for rank in &ranks {
//!     let mut config = VerbsConfig::default();
//!     config.devices.clone_from(&rank.devices); // of EFA: LibfabricConfig::domains
//! }
//! # Ok::<(), tokenyard::Error>(())
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `pci`, `cpus` | addresses; sets of CPUs |
//! | `machine` | the facts, and what is above a device |
//! | `sysfs`, `record` | where facts come from |
//! | `wanted` | what the user asks for |
//! | `nics`, `cores`, `places` | the decisions, by GPU |
//! | `ranks` | the same, by rank |

mod cores;
mod cpus;
mod machine;
mod nics;
mod pci;
mod places;
mod ranks;
pub mod record;
mod sysfs;
mod wanted;

#[cfg(test)]
mod tests;

pub use cpus::{Cpus, MAX_CPUS};
pub use machine::{Above, Device, Link, Machine, Rdma};
pub use nics::{LeftOut, NicsFrom, WhyNot};
pub use pci::{PciAddress, PciBus};
pub use places::{CoresFrom, GpuPlace, Nic, Topology};
pub use ranks::RankPlace;
pub use wanted::{NicKind, Wanted, WantedNics};
