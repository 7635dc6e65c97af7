//! What can be asked of the GPUs without opening one. On any thread; it asks the driver.

use super::Device;
use crate::base::Result;

impl Device {
    /// How many GPUs are visible to this process; 0 without a driver, with one too old, or without the feature `cuda`.
    pub fn cuda_count() -> usize {
        #[cfg(feature = "cuda")]
        let count = crate::base::cuda::device_count().unwrap_or(0);
        #[cfg(not(feature = "cuda"))]
        let count = 0;
        count
    }

    /// The PCI address of GPU `ordinal`, which [`PciAddress::parse`](crate::topology::PciAddress::parse) reads. The GPU
    /// is not opened.
    ///
    /// # Errors
    /// `Device` if there is no such GPU.
    pub fn cuda_pci_address(ordinal: usize) -> Result<String> {
        #[cfg(feature = "cuda")]
        let address = crate::base::cuda::pci_address(ordinal);
        #[cfg(not(feature = "cuda"))]
        let address = Device::cuda(ordinal).map(|device| device.name());
        address
    }

    /// Whether this build holds the GPU's kernels (feature `cuda`, and nvcc found when it was built).
    pub const fn cuda_built() -> bool {
        cfg!(all(feature = "cuda", tokenyard_fatbin))
    }
}
