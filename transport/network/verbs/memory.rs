//! Registration of memory with a device: the host's, and a GPU's by the best way that works.
//!
//! Place in the data path: beside it, when memory is registered.

use super::device::Device;
use super::ibverbs_sys::*;
use super::objects::{Object, last, refused};
use crate::base::{Error, Result};
use crate::transport::memory::DmaBufMapping;
use crate::transport::network::reach::{Gpu, Reach, Way, choose};
use crate::transport::network::{Allocation, Span, SpanMemory};
use nix::sys::resource::{Resource, getrlimit};
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::AsRawFd;

const ADVICE: &str = "see `ibv_devinfo -v` for the device's limits";
/// A GPU has so many ways to a device.
const WAYS: [Way; 3] = [Way::DataDirect, Way::DmaBuf, Way::PeerMemory];

/// A device's way to a GPU's memory.
#[derive(Debug)]
pub(super) struct Reached {
    pub reach: Reach,
    /// The memory that flushes read; `None`: the device does not reach the GPU.
    pub probe: Option<Object<ibv_mr>>,
}

/// Finds the best way of a device to a GPU's memory, by registering some for flushes.
pub(super) fn reach(device: &Device, gpu: &Gpu, flush: Option<bool>) -> Reached {
    // Without relaxed ordering: the flush relies on the order of its read behind the writes before it.
    let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
    let (chosen, lacking) = match gpu.probe.memory {
        SpanMemory::Gpu { allocation, .. } => {
            choose(&WAYS, |way| register_by(way, device, gpu, (&gpu.probe, allocation), access))
        }
        SpanMemory::Host => (None, Vec::new()),
    };
    let (way, probe) = chosen.map_or((None, None), |(way, probe)| (Some(way), Some(probe)));
    let flush = flush.unwrap_or_else(|| gpu.needs_flush(&device.name));
    Reached { reach: Reach { device: device.name.clone(), gpu: gpu.ordinal, way, lacking, flush }, probe }
}

/// Registers the whole allocation of a span of a GPU's memory. Addresses are the GPU's.
///
/// # Errors
/// `Transport` or `Device` with what the way lacks.
pub(super) fn register_by(
    way: Way,
    device: &Device,
    gpu: &Gpu,
    (span, allocation): (&Span, Allocation),
    access: ibv_access_flags,
) -> Result<Object<ibv_mr>> {
    let (library, domain, name) = (device.library, device.domain.as_ptr(), &device.name);
    let Allocation { base, bytes } = allocation;
    let region = match way {
        Way::DataDirect => {
            let mlx5 = Mlx5::open()?;
            let (Some(path), Some(register)) = (mlx5.mlx5dv_get_data_direct_sysfs_path, mlx5.mlx5dv_reg_dmabuf_mr)
            else {
                let what = format!("{} knows no data direct", mlx5.path().display());
                return Err(Error::transport(what, "install rdma-core 54 or later"));
            };
            let mut place: [c_char; 256] = [0; 256];
            // SAFETY: an open device, and a place of as many bytes; other makers' devices are refused.
            let code = unsafe { path(device.context.as_ptr(), place.as_mut_ptr(), place.len()) };
            if code != 0 {
                return Err(refused(&format!("knows no function for data direct of {name}"), code, "none"));
            }
            let buffer = (gpu.export)(span, DmaBufMapping::Pcie)?;
            let (fd, flags) = (buffer.fd.as_raw_fd(), MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT);
            // SAFETY: an open domain and dma-buf of a whole allocation, which the caller of `register` answers for.
            unsafe { register(domain, 0, bytes, base, fd, access as c_int, flags) }
        }
        Way::DmaBuf => {
            let register = library.need(library.ibv_reg_dmabuf_mr, "ibv_reg_dmabuf_mr", 34)?;
            let buffer = (gpu.export)(span, DmaBufMapping::Usual)?;
            // SAFETY: as above.
            unsafe { register(domain, 0, bytes, base, buffer.fd.as_raw_fd(), access as c_int) }
        }
        Way::PeerMemory | Way::Provider => by_address(device, base, bytes, access),
    };
    if region.is_null() {
        let code = last();
        return Err(refused(&format!("registers no {bytes} bytes of GPU {} on {name}", gpu.ordinal), code, ADVICE));
    }
    // SAFETY: just made.
    unsafe { Object::new(library, region, name, ADVICE) }
}

/// Registers host memory.
///
/// # Errors
/// `Transport` with the limit on locked memory.
pub(super) fn register_host(device: &Device, span: Span, access: ibv_access_flags) -> Result<Object<ibv_mr>> {
    let region = by_address(device, span.base, span.bytes, access);
    if region.is_null() {
        let code = last();
        let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(u64::MAX, |(soft, _)| soft);
        let limit = if limit == u64::MAX { "no limit".to_owned() } else { format!("a limit of {limit} bytes") };
        let what = format!("registers no {} bytes on {}, with {limit} on locked memory", span.bytes, device.name);
        return Err(refused(&what, code, "raise it by `ulimit -l` or the container's memlock, or register less"));
    }
    // SAFETY: just made.
    unsafe { Object::new(device.library, region, &device.name, ADVICE) }
}

/// Every address is its own key's offset, whichever call the library has.
fn by_address(device: &Device, base: u64, bytes: usize, access: ibv_access_flags) -> *mut ibv_mr {
    let (library, domain, address) = (device.library, device.domain.as_ptr(), base as *mut c_void);
    // SAFETY: an open domain, and memory that the caller of `register` answers for.
    unsafe {
        match library.ibv_reg_mr_iova2 {
            Some(register) => register(domain, address, bytes, base, access),
            None => (library.ibv_reg_mr)(domain, address, bytes, (access & !IBV_ACCESS_RELAXED_ORDERING) as c_int),
        }
    }
}
