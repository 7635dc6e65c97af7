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
//! ```
//! use tokenyard::topology::{Machine, PciAddress, Topology, Wanted};
//!
//! let machine = Machine::here();
//! let topology = Topology::of(&machine, &Wanted::default())?;
//! let gpu = PciAddress::parse("0000:59:00.0"); // as cuDeviceGetPCIBusId gives it
//! if let Some(place) = gpu.and_then(|gpu| topology.gpu(gpu)) {
//!     println!("lane 0 uses {:?}, the proxy may use {:?}", place.nic(0), place.cores);
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
//! | `nics`, `cores`, `places` | the decisions |

mod cores;
mod cpus;
mod machine;
mod nics;
mod pci;
mod places;
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
pub use wanted::{Wanted, WantedNics};
