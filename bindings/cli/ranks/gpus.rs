//! The number of GPUs of a run, and of ranks that share one.
//!
//! On the main thread and the ranks' threads. It asks the driver for the number of GPUs and touches nothing else.

use tokenyard::internals::kernels::Device;

use crate::cli::cases::words::DeviceWord;
use crate::cli::out::Out;

/// GPUs that this build has kernels for.
pub fn usable_gpus() -> usize {
    if Device::cuda_built() { Device::cuda_count() } else { 0 }
}

/// Most ranks that share a GPU, where a host has so many ranks.
pub fn sharing(host_ranks: usize) -> usize {
    host_ranks.div_ceil(usable_gpus().max(1))
}

/// Notes that ranks share GPUs, if they do: times then mean little.
pub fn note_sharing(device: DeviceWord, host_ranks: usize, out: &Out) {
    if device == DeviceWord::Cuda && sharing(host_ranks) > 1 {
        note!(out, "tokenyard: {} ranks share a GPU", sharing(host_ranks));
    }
}
