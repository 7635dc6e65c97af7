//! What an emulated NIC needs of a device: an engine that copies while nobody waits.
//!
//! The one seam between `transport`, which has the emulated NIC, and `kernels`, which has its copy kernel
//! (`kernels/nic`): neither depends on the other.

use super::Result;
use std::fmt;

/// A device that can copy between arenas on its own.
pub trait CopyDevice: Clone + fmt::Debug + Send + Sync + Sized + 'static {
    /// The type of its engines.
    type Engine: CopyEngine;

    /// The number of the GPU; `None` for a device in host memory.
    fn ordinal(&self) -> Option<usize>;

    /// SMs that an engine keeps for itself; 0 for a device in host memory.
    fn engine_sms(&self) -> u32;

    /// A new engine on this device.
    ///
    /// # Errors
    /// `Config` if the device has no room for it; `Device` where memory is lacking.
    fn engine(&self) -> Result<Self::Engine>;

    /// Whether engines of this device can store into memory of `other`.
    ///
    /// # Errors
    /// `Device` if the driver gives no answer.
    fn can_store_into(&self, other: &Self) -> Result<bool>;
}

/// A queue of copies that are carried out in any order. Dropping it ends it once all that was posted is copied.
pub trait CopyEngine: Send + 'static {
    /// Copies that may be outstanding.
    const SLOTS: u64;

    /// Posts a copy of `bytes` from address `source` to address `target` and returns its number, counted from 0; `None`
    /// if the queue is full. Never waits.
    ///
    /// # Errors
    /// `Device` if the driver refuses.
    fn post(&mut self, source: u64, target: u64, bytes: u64) -> Result<Option<u64>>;

    /// Copies posted since the beginning.
    fn posted(&self) -> u64;

    /// Copies carried out: all before this number. Their bytes are in place.
    fn completed(&mut self) -> u64;

    /// Restarts the device's work if copies are left that nothing carries out. Never waits.
    ///
    /// # Errors
    /// `Device` if the driver refuses.
    fn keep_running(&mut self) -> Result<()>;
}
