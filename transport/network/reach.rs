//! How NICs reach a GPU's memory, and what decides it.
//!
//! Place in the data path: beside it, while an endpoint is opened and memory is registered.

use super::{Allocation, Span, SpanMemory};
use crate::base::{Error, Result};
use crate::transport::Arena;
use crate::transport::memory::{DmaBuf, DmaBufMapping, GpuDirect, dma_buf, gpu_direct};
use crate::transport::topology::{Machine, PciAddress};
use std::fmt;

/// Bytes of GPU memory with which each way is tried, and which flushes read: a page of the GPU.
const PROBE: usize = 2 << 20;

/// A way of registering a GPU's memory, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Way {
    /// By a dma-buf that is mapped over PCIe, and the NIC's own PCI function for GPUs.
    DataDirect,
    /// By a dma-buf.
    DmaBuf,
    /// By the address, through a kernel module that knows whose it is (`nvidia_peermem`).
    PeerMemory,
    /// By the address, in whichever way libfabric's provider has.
    Provider,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::DataDirect => "data direct",
            Way::DmaBuf => "dma-buf",
            Way::PeerMemory => "peer memory",
            Way::Provider => "the provider's own way",
        })
    }
}

/// Ways, and what each lacks.
type Lacking = Vec<(Way, String)>;

/// How a NIC reaches a GPU's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reach {
    /// The NIC's device.
    pub device: String,
    /// The GPU, as this process counts them.
    pub gpu: usize,
    /// The best way that works; `None`: none does.
    pub way: Option<Way>,
    /// The better ways, and what each lacks.
    pub lacking: Vec<(Way, String)>,
    /// Whether immediates wait for a flush of what the NIC wrote into the GPU's memory.
    pub flush: bool,
}

impl Reach {
    /// Nothing is known of the device and GPU: no way, and a flush to be safe.
    pub fn unknown(device: &str, gpu: usize) -> Reach {
        Reach { device: device.into(), gpu, way: None, lacking: Vec::new(), flush: true }
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reach { device, gpu, way, lacking, flush } = self;
        match way {
            Some(way) => write!(f, "{device} reaches memory of GPU {gpu} by {way}")?,
            None => write!(f, "{device} reaches no memory of GPU {gpu}")?,
        }
        if way.is_some() {
            f.write_str(if *flush { ", with a flush" } else { ", without a flush" })?;
        }
        lacking.iter().try_for_each(|(way, why)| write!(f, "; {way}: {why}"))
    }
}

/// The first way by which memory can be registered, with what `register` gave, and why the ways before it cannot.
pub(super) fn choose<T>(ways: &[Way], mut register: impl FnMut(Way) -> Result<T>) -> (Option<(Way, T)>, Lacking) {
    let mut lacking = Vec::new();
    for way in ways {
        match register(*way) {
            Ok(registered) => return (Some((*way, registered)), lacking),
            Err(why) => lacking.push((*way, what_of(why))),
        }
    }
    (None, lacking)
}

/// An error's text without advice, since the next way may do.
fn what_of(error: Error) -> String {
    match error {
        Error::Transport { what, .. } | Error::Device { what, .. } => what,
        other => other.to_string(),
    }
}

/// A GPU whose memory an endpoint is to register.
#[derive(Debug)]
pub struct Gpu {
    pub(super) ordinal: usize,
    facts: GpuDirect,
    /// Which NICs are near it. `None`: nothing is known.
    machine: Option<Machine>,
    /// Memory of the GPU.
    pub(super) probe: Span,
    pub(super) export: Export,
    _memory: Option<Arena>,
}

impl Gpu {
    /// # Errors
    /// `Device` if there is no such GPU, or it has no memory left; `Transport` if its memory cannot be reached at all.
    pub fn open(ordinal: usize) -> Result<Gpu> {
        let facts = gpu_direct(ordinal)?;
        if !facts.supported {
            let what = format!("GPU {ordinal} ({}) lets no device reach its memory", facts.pci);
            return Err(Error::transport(what, "use a data centre's GPU, or an arena in host memory"));
        }
        let memory = Arena::cuda(ordinal, PROBE)?;
        let (probe, machine) = (memory.span(), Some(Machine::here()));
        Ok(Gpu { ordinal, facts, machine, probe, export: dma_buf, _memory: Some(memory) })
    }

    /// Whether kernels may see immediates of a device before what it wrote: they do not if the GPU keeps the order of
    /// writes, and the device is below the same root bus. Source: `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER` in the
    /// CUDA driver's interface; between root buses PCIe promises no order.
    pub fn needs_flush(&self, device: &str) -> bool {
        let root = |address| self.machine.as_ref().and_then(|machine| machine.above(address).last().copied());
        let nic = self.machine.as_ref().and_then(|machine| {
            let mut devices = machine.devices().iter();
            devices.find(|(_, found)| found.rdma.as_ref().is_some_and(|rdma| rdma.name == device))
        });
        let gpu = PciAddress::parse(&self.facts.pci.to_lowercase()).and_then(root);
        let near = gpu.is_some() && gpu == nic.and_then(|(address, _)| root(*address));
        !(self.facts.ordered && near)
    }

    /// A GPU that this machine does not have, for tests: dma-bufs are of the caller's making.
    ///
    /// # Safety
    /// NICs may read and write the probe, and what is registered as memory of this GPU, as long as an endpoint has it.
    pub unsafe fn pretended(probe: Span, facts: GpuDirect, machine: Option<Machine>, export: Export) -> Gpu {
        let ordinal = match probe.memory {
            SpanMemory::Gpu { ordinal, .. } => ordinal,
            SpanMemory::Host => 0,
        };
        Gpu { ordinal, facts, machine, probe, export, _memory: None }
    }
}

/// Makes dma-bufs.
pub type Export = fn(&Span, DmaBufMapping) -> Result<DmaBuf>;

/// The allocation of a span in memory of a GPU that an endpoint reaches; `None` for host memory.
///
/// # Errors
/// `Argument` for memory of another GPU, or if NICs do not reach it.
pub(super) fn allocation(span: &Span, reached: Option<usize>) -> Result<Option<Allocation>> {
    let SpanMemory::Gpu { ordinal, allocation } = span.memory else { return Ok(None) };
    if reached == Some(ordinal) {
        return span.offset_in(allocation).map(|_| Some(allocation));
    }
    let advice = match reached {
        Some(other) => format!("this endpoint was opened for GPU {other}; open one for each GPU"),
        None => "this endpoint reaches host memory alone: register that, or open it with the GPU as its setting".into(),
    };
    Err(Error::argument("span", format!("memory of GPU {ordinal}"), advice))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_way_that_works_is_chosen_and_those_before_it_say_what_they_lack() {
        let ways = [Way::DataDirect, Way::DmaBuf, Way::PeerMemory];
        let (chosen, lacking) = choose(&ways, |way| match way {
            Way::DataDirect => Err(Error::transport("no such function", "none")),
            Way::DmaBuf => Ok(7),
            Way::PeerMemory | Way::Provider => Ok(8),
        });
        assert_eq!(chosen, Some((Way::DmaBuf, 7)));
        assert_eq!(lacking, [(Way::DataDirect, "no such function".to_owned())]);
        let reach = Reach { device: "mlx5_2".into(), gpu: 3, way: Some(Way::DmaBuf), lacking, flush: true };
        let text = "mlx5_2 reaches memory of GPU 3 by dma-buf, with a flush; data direct: no such function";
        assert_eq!(reach.to_string(), text);
        let (none, all) = choose(&ways, |way| Err::<(), _>(Error::device(format!("not by {way}"), "none")));
        assert!(none.is_none() && all.len() == 3 && all[2] == (Way::PeerMemory, "not by peer memory".to_owned()));
    }

    #[test]
    fn memory_of_the_gpu_that_an_endpoint_was_opened_for_is_admitted() {
        let allocation_of = Allocation { base: 4096, bytes: 8192 };
        let span =
            |ordinal, base| Span { base, bytes: 4096, memory: SpanMemory::Gpu { ordinal, allocation: allocation_of } };
        assert_eq!(allocation(&Span::host(64, 64), None).unwrap(), None);
        assert_eq!(allocation(&span(1, 8192), Some(1)).unwrap(), Some(allocation_of));
        for (span, reached, text) in [
            (span(1, 4096), None, "host memory alone"),
            (span(1, 4096), Some(0), "opened for GPU 0"),
            (span(1, 8193), Some(1), "inside its allocation"),
            (span(1, 4095), Some(1), "inside its allocation"),
        ] {
            let why = allocation(&span, reached).unwrap_err().to_string();
            assert!(why.contains(text), "{why}");
        }
    }
}
