//! Host memory that GPUs reach too: the file of `host`, registered with the driver.
//!
//! Place: used by `memory` for GPUs whose arenas lie in host memory. Kernels reach it over PCIe; a network that moves
//! bytes with the processor reaches it as it does memory of the CPU device. Runs on the caller's thread and never
//! waits. Ownership is teardown order: the registration goes before the mapping.
//!
//! A mapping is registered once in a process, for all its GPUs (portable). A peer of another process maps the file
//! anew and registers its own mapping.

use super::BUS_ID_BYTES;
use super::cuda::bus_id_of;
use super::host::HostMemory;
use crate::base::Result;
use crate::base::cuda::{PrimaryContext, check};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Host memory, own or a peer's, registered for GPUs.
#[derive(Debug)]
pub(super) struct PinnedMemory {
    // Before the memory and the context: it is unregistered first, within its context.
    registration: Registration,
    host: HostMemory,
    /// The device for which it was made or imported.
    ordinal: usize,
    bus_id: [u8; BUS_ID_BYTES],
}

/// A registered span.
#[derive(Debug)]
struct Registration {
    host_base: u64,
    /// Its address on the registering GPU.
    base: u64,
    context: PrimaryContext,
}

impl PinnedMemory {
    /// Zeroed memory for GPU `ordinal`.
    pub(super) fn create(ordinal: usize, bytes: usize) -> Result<PinnedMemory> {
        PinnedMemory::register(ordinal, HostMemory::create(bytes)?, bytes)
    }

    /// A peer's memory, by its descriptor, for this memory's GPU.
    pub(super) fn import(&self, file: OwnedFd, bytes: usize) -> Result<PinnedMemory> {
        PinnedMemory::register(self.ordinal, HostMemory::import(file, bytes)?, bytes)
    }

    fn register(ordinal: usize, host: HostMemory, bytes: usize) -> Result<PinnedMemory> {
        let context = PrimaryContext::retain(ordinal)?;
        let registration = Registration::of(context, host.base(), bytes)?;
        let bus_id = bus_id_of(registration.context.device())?;
        Ok(PinnedMemory { registration, host, ordinal, bus_id })
    }

    /// Its address on its own GPU.
    pub(super) fn base(&self) -> u64 {
        self.registration.base
    }

    /// Its address in this process.
    pub(super) fn host_base(&self) -> u64 {
        self.host.base()
    }

    /// Its address on the GPU of `viewer`, of this process.
    pub(super) fn seen_by(&self, viewer: &PinnedMemory) -> Result<u64> {
        device_address(&viewer.registration.context, self.host.base())
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.host.fd()
    }

    pub(super) fn ordinal(&self) -> usize {
        self.ordinal
    }

    pub(super) fn bus_id(&self) -> [u8; BUS_ID_BYTES] {
        self.bus_id
    }
}

impl Registration {
    fn of(context: PrimaryContext, base: u64, bytes: usize) -> Result<Registration> {
        let current = context.enter()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's mapping has that length and outlives the registration; a context is current.
        let code = unsafe { sys::cuMemHostRegister_v2(pointer(base), bytes, flags) };
        check(code, &format!("registering {bytes} bytes of host memory with the GPU"))?;
        drop(current);
        // From here on dropping it unregisters.
        let mut registration = Registration { host_base: base, base: 0, context };
        registration.base = device_address(&registration.context, base)?;
        Ok(registration)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: registered in `of` and unregistered once, while the mapping is still there; kernels that used it
            // have ended.
            let _ = unsafe { sys::cuMemHostUnregister(pointer(self.host_base)) };
        }
    }
}

fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// The GPU's address of registered memory. With unified addressing it equals the host's address; the driver is asked
/// all the same.
fn device_address(context: &PrimaryContext, base: u64) -> Result<u64> {
    let _current = context.enter()?;
    let mut address: sys::CUdeviceptr = 0;
    // SAFETY: the address was registered with DEVICEMAP, for all contexts; the variable outlives the call.
    let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, pointer(base), 0) };
    check(code, "asking where the GPU finds host memory")?;
    Ok(address)
}
