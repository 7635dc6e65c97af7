//! GPU memory that other GPUs and other processes can map: the driver's virtual memory management.
//!
//! Place: used by `memory` for GPUs. Runs on the caller's thread; waits only for the zeroing of a new arena.
//! Ownership is teardown order: unmap, give the addresses back, release the allocation, release the context.

use super::{BUS_ID_BYTES, DmaBufMapping, GpuDirect};
use crate::base::cuda::{self as driver, PrimaryContext, check, error, failure};
use crate::base::{Error, Result};
use crate::transport::network::Allocation as SpanAllocation;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUmemAllocationHandleType as HandleType, CUresult};
use std::collections::BTreeSet;
use std::ffi::{CString, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// How allocations pass between processes.
const SHARED_AS: HandleType = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const PRIVATE: HandleType = HandleType::CU_MEM_HANDLE_TYPE_NONE;
/// `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE` of cuda.h.
const MAPPED_BY_PCIE: u64 = 1;
/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER` of cuda.h: kernels of the GPU that owns the memory need no flush.
const ORDERED_FOR_OWNER: i32 = 100;

/// Mapped GPU memory, own or a peer's.
#[derive(Debug)]
pub(super) struct CudaMemory {
    mapping: Mapping,
    /// The device that maps it: the owner's, or for a peer's memory this rank's.
    ordinal: usize,
    bus_id: [u8; BUS_ID_BYTES],
    shareable: bool,
    // Last: the mapping is undone within it.
    context: PrimaryContext,
}

/// An allocation mapped at an address of its own. Dropped while the context it was made in is retained.
#[derive(Debug)]
struct Mapping {
    allocation: Allocation,
    base: sys::CUdeviceptr,
    bytes: usize,
}

/// A reference to physical memory.
#[derive(Debug)]
struct Allocation {
    handle: sys::CUmemGenericAllocationHandle,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: created or imported once; the memory itself goes when its last mapping does.
        let _ = unsafe { sys::cuMemRelease(self.handle) };
    }
}

impl CudaMemory {
    /// Zeroed memory of GPU `ordinal`.
    pub(super) fn create(ordinal: usize, bytes: usize) -> Result<CudaMemory> {
        let context = PrimaryContext::retain(ordinal)?;
        let current = context.enter()?;
        let device = context.device();
        require_vmm(ordinal, device)?;
        let (allocation, bytes, shareable) = allocate(ordinal, device, bytes)?;
        let mapping = Mapping::of(allocation, bytes)?;
        mapping.allow(&[device])?;
        zero(&mapping)?;
        drop(current);
        Ok(CudaMemory { mapping, ordinal, bus_id: bus_id_of(device)?, shareable, context })
    }

    /// A peer's memory, by its descriptor, mapped for this memory's GPU. `bus_id` is the PCI address of its GPU.
    pub(super) fn import(&self, fd: OwnedFd, bus_id: &str) -> Result<CudaMemory> {
        let context = PrimaryContext::retain(self.ordinal)?;
        let current = context.enter()?;
        let device = context.device();
        // A GPU that CUDA_VISIBLE_DEVICES hides cannot be asked; then the mapping itself is the test.
        if let Some(peer) = device_at(bus_id) {
            require_peer_access(device, peer, &format!("GPU {}", self.ordinal), &format!("the GPU at {bus_id}"))?;
        }
        let mut handle: sys::CUmemGenericAllocationHandle = 0;
        let os_handle = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the driver takes the descriptor's number in place of a pointer, and keeps its own reference.
        let code = unsafe { sys::cuMemImportFromShareableHandle(&mut handle, os_handle, SHARED_AS) };
        check(code, "importing a peer's arena")?;
        let mapping = Mapping::of(Allocation { handle }, self.mapping.bytes)?;
        mapping.allow(&[device])?;
        drop(current);
        Ok(CudaMemory { mapping, ordinal: self.ordinal, bus_id: [0; BUS_ID_BYTES], shareable: false, context })
    }

    /// A descriptor by which another process can import it.
    pub(super) fn export(&self) -> Result<OwnedFd> {
        if !self.shareable {
            return Err(error(
                format!("GPU {} gave memory that cannot be shared between processes", self.ordinal),
                "allow the container to export GPU memory, or run all ranks in one process",
            ));
        }
        let mut fd: c_int = -1;
        // SAFETY: the driver stores a descriptor, an int, at the address.
        let code = unsafe {
            let out: *mut c_int = &mut fd;
            sys::cuMemExportToShareableHandle(out.cast(), self.mapping.allocation.handle, SHARED_AS, 0)
        };
        check(code, "exporting an arena")?;
        if fd < 0 {
            return Err(error("exporting an arena gave no descriptor", "update the driver"));
        }
        // SAFETY: the driver made this descriptor for us; nobody else closes it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Lets the GPUs of this process given by `ordinals` store into it.
    pub(super) fn grant(&self, ordinals: impl Iterator<Item = usize>) -> Result<()> {
        let mut devices = vec![self.context.device()];
        for ordinal in ordinals.collect::<BTreeSet<_>>() {
            let peer = driver::device(ordinal)?;
            if peer == self.context.device() {
                continue;
            }
            let (from, to) = (format!("GPU {ordinal}"), format!("GPU {}", self.ordinal));
            require_peer_access(peer, self.context.device(), &from, &to)?;
            devices.push(peer);
        }
        let _current = self.context.enter()?;
        self.mapping.allow(&devices)
    }

    /// Lets every GPU of this process that can reach it store into it.
    pub(super) fn grant_all(&self) -> Result<()> {
        let own = self.context.device();
        let mut devices = vec![own];
        for ordinal in 0..driver::device_count()? {
            let peer = driver::device(ordinal)?;
            if peer != own && driver::can_access(peer, own)? {
                devices.push(peer);
            }
        }
        let _current = self.context.enter()?;
        self.mapping.allow(&devices)
    }

    pub(super) fn base(&self) -> u64 {
        self.mapping.base
    }

    /// All of it, which is rounded up to the GPU's pages.
    pub(super) fn allocation(&self) -> SpanAllocation {
        SpanAllocation { base: self.mapping.base, bytes: self.mapping.bytes }
    }

    pub(super) fn ordinal(&self) -> usize {
        self.ordinal
    }

    pub(super) fn bus_id(&self) -> [u8; BUS_ID_BYTES] {
        self.bus_id
    }
}

impl Mapping {
    /// Reserves addresses and maps all of the allocation there; no device can use it yet.
    fn of(allocation: Allocation, bytes: usize) -> Result<Mapping> {
        let mut base: sys::CUdeviceptr = 0;
        // SAFETY: any address and the default alignment will do; given back below or in drop.
        let code = unsafe { sys::cuMemAddressReserve(&mut base, bytes, 0, 0, 0) };
        check(code, &format!("reserving {bytes} bytes of addresses"))?;
        // SAFETY: the range was reserved above and is not mapped.
        let code = unsafe { sys::cuMemMap(base, bytes, 0, allocation.handle, 0) };
        if let Err(why) = check(code, &format!("mapping {bytes} bytes of GPU memory")) {
            // SAFETY: reserved above, not mapped.
            let _ = unsafe { sys::cuMemAddressFree(base, bytes) };
            return Err(why);
        }
        Ok(Mapping { allocation, base, bytes })
    }

    /// Lets `devices` read and write it.
    fn allow(&self, devices: &[sys::CUdevice]) -> Result<()> {
        let access = |device: &sys::CUdevice| sys::CUmemAccessDesc {
            location: location(*device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let access: Vec<sys::CUmemAccessDesc> = devices.iter().map(access).collect();
        // SAFETY: the whole range is mapped; the list outlives the call.
        let code = unsafe { sys::cuMemSetAccess(self.base, self.bytes, access.as_ptr(), access.len()) };
        check(code, &format!("giving {} GPUs access to an arena", devices.len()))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped and reserved in `of`, undone once; kernels that used it have ended.
        unsafe {
            let _ = sys::cuMemUnmap(self.base, self.bytes);
            let _ = sys::cuMemAddressFree(self.base, self.bytes);
        }
    }
}

/// What GPU `ordinal` offers to NICs.
pub(super) fn gpu_direct(ordinal: usize) -> Result<GpuDirect> {
    let device = driver::device(ordinal)?;
    let supported = driver::attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)? != 0;
    let order = driver::attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?;
    let pci = bus_id_of(device)?.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect();
    Ok(GpuDirect { pci, supported, ordered: order >= ORDERED_FOR_OWNER })
}

/// A descriptor of an allocation of GPU `ordinal`, for NICs.
pub(super) fn dma_buf(ordinal: usize, allocation: SpanAllocation, mapping: DmaBufMapping) -> Result<OwnedFd> {
    let context = PrimaryContext::retain(ordinal)?;
    let _current = context.enter()?;
    if driver::attribute(context.device(), Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)? == 0 {
        return Err(error(
            format!("GPU {ordinal} makes no dma-bufs"),
            "use the driver's open kernel modules, or a NIC that registers by address (nvidia-peermem)",
        ));
    }
    let mut fd: c_int = -1;
    let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    let SpanAllocation { base, bytes } = allocation;
    let flags = match mapping {
        DmaBufMapping::Usual => 0,
        DmaBufMapping::Pcie => MAPPED_BY_PCIE,
    };
    // SAFETY: the driver stores a descriptor, an int, at the address, and refuses a range that is none of its own.
    let code = unsafe {
        let out: *mut c_int = &mut fd;
        sys::cuMemGetHandleForAddressRange(out.cast(), base, bytes, kind, flags)
    };
    check(code, &format!("making a dma-buf ({mapping:?}) of {bytes} bytes of GPU {ordinal}"))?;
    if fd < 0 {
        return Err(error("making a dma-buf gave no descriptor", "update the driver"));
    }
    // SAFETY: the driver made this descriptor for us; nobody else closes it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

fn require_vmm(ordinal: usize, device: sys::CUdevice) -> Result<()> {
    let which = Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
    if driver::attribute(device, which)? != 0 {
        return Ok(());
    }
    Err(error(format!("GPU {ordinal} has no virtual memory management"), "update the driver, or use another GPU"))
}

/// Whether `from` can store into memory of `to`.
fn require_peer_access(from: sys::CUdevice, to: sys::CUdevice, from_name: &str, to_name: &str) -> Result<()> {
    if driver::can_access(from, to)? {
        return Ok(());
    }
    Err(error(
        format!("{from_name} cannot access the memory of {to_name}"),
        "ranks of a node must reach each other: use GPUs joined by NVLink (see nvidia-smi topo -m)",
    ))
}

/// Physical memory, as sharable as this machine allows; with its rounded length and whether it can be exported.
fn allocate(ordinal: usize, device: sys::CUdevice, wanted: usize) -> Result<(Allocation, usize, bool)> {
    let exports =
        driver::attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?;
    let rdma = driver::attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?;
    // Containers may refuse what the GPU offers, so fall back step by step.
    let kinds = [(exports != 0, rdma != 0), (exports != 0, false), (false, false)];
    let mut last = CUresult::CUDA_ERROR_NOT_SUPPORTED;
    for (shared, for_nics) in kinds {
        let properties = properties(device, shared, for_nics);
        let bytes = round_up(wanted, granularity(&properties)?)?;
        let mut handle: sys::CUmemGenericAllocationHandle = 0;
        // SAFETY: the properties outlive the call; the handle is released by its owner.
        match unsafe { sys::cuMemCreate(&mut handle, bytes, &properties, 0) } {
            CUresult::CUDA_SUCCESS => return Ok((Allocation { handle }, bytes, shared)),
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(out_of_memory(ordinal, bytes)),
            code => last = code,
        }
    }
    Err(failure(last, &format!("allocating an arena of {wanted} bytes on GPU {ordinal}")))
}

fn properties(device: sys::CUdevice, shared: bool, for_nics: bool) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: if shared { SHARED_AS } else { PRIVATE },
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: u8::from(for_nics),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn granularity(properties: &sys::CUmemAllocationProp) -> Result<usize> {
    let mut bytes = 0usize;
    let which = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: both outlive the call.
    let code = unsafe { sys::cuMemGetAllocationGranularity(&mut bytes, properties, which) };
    check(code, "asking the granularity of GPU memory")?;
    Ok(bytes.max(1))
}

fn round_up(bytes: usize, unit: usize) -> Result<usize> {
    bytes
        .checked_next_multiple_of(unit)
        .ok_or_else(|| Error::argument("bytes", bytes, "take an arena's length from the plan"))
}

/// The GPU's context must be current.
fn out_of_memory(ordinal: usize, needed: usize) -> Error {
    let (mut free, mut total) = (0usize, 0usize);
    // SAFETY: a context is current; both outlive the call.
    let known = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) } == CUresult::CUDA_SUCCESS;
    let rest = if known { format!("{free} of its {total} bytes are free") } else { "it has less free".into() };
    error(
        format!("GPU {ordinal} was asked for an arena of {needed} bytes and {rest}"),
        "plan for fewer tokens, or free GPU memory",
    )
}

/// Sets all of it to 0 and waits. The GPU's context must be current.
fn zero(mapping: &Mapping) -> Result<()> {
    let stream = driver::new_stream()?;
    // SAFETY: the range is mapped and writable.
    let filled = check(unsafe { sys::cuMemsetD8Async(mapping.base, 0, mapping.bytes, stream) }, "zeroing an arena");
    // SAFETY: the stream is live and not captured.
    let done = filled.and_then(|()| unsafe { driver::wait_setup(stream) });
    // SAFETY: created above and destroyed once.
    let _ = unsafe { sys::cuStreamDestroy_v2(stream) };
    done
}

/// Such as `0000:1b:00.0`, ended by 0.
pub(super) fn bus_id_of(device: sys::CUdevice) -> Result<[u8; BUS_ID_BYTES]> {
    let mut text: [c_char; BUS_ID_BYTES] = [0; BUS_ID_BYTES];
    // SAFETY: the buffer has the length passed.
    let code = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), BUS_ID_BYTES as c_int, device) };
    check(code, "asking the GPU's PCI address")?;
    Ok(text.map(|byte| byte as u8))
}

/// The GPU of this process at a PCI address, if it can be seen.
fn device_at(bus_id: &str) -> Option<sys::CUdevice> {
    let text = CString::new(bus_id).ok().filter(|text| !text.is_empty())?;
    let mut device: sys::CUdevice = 0;
    // SAFETY: the text is a C string; the driver is initialised.
    let code = unsafe { sys::cuDeviceGetByPCIBusId(&mut device, text.as_ptr()) };
    (code == CUresult::CUDA_SUCCESS).then_some(device)
}
