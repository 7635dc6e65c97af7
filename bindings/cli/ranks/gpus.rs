//! How many GPUs there are for a run, and how many ranks share one.
//!
//! On the main thread and the ranks' own. It asks the driver how many GPUs there are and touches nothing else.

use tokenyard::internals::kernels::Device;

use crate::cli::cases::words::DeviceWord;
use crate::cli::out::Out;

/// GPUs that this build has kernels for.
pub fn usable_gpus() -> usize {
    if Device::cuda_built() { Device::cuda_count() } else { 0 }
}

/// Ranks that a GPU has at the most, in a world of so many.
pub fn sharing(world: usize) -> usize {
    world.div_ceil(usable_gpus().max(1))
}

/// Notes that ranks share GPUs, where they do: times mean little then.
pub fn note_sharing(device: DeviceWord, world: usize, out: &Out) {
    if device == DeviceWord::Cuda && sharing(world) > 1 {
        note!(out, "tokenyard: {} ranks share a GPU", sharing(world));
    }
}
