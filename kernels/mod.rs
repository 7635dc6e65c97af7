//! Devices and what runs on them.
//!
//! Place: below the proxy, above the driver and the CPU executor. `device` is the front, with its backends. One kernel
//! source (the .cu files) is built for both. Nothing here depends on transport.
//!
//! | folder | what |
//! |---|---|
//! | `base` | the leaf that all layers use: ids, errors, waiting with a deadline |
//! | `ffi` | layout.h and executor.h, and what bindgen made of them |
//! | `device` | devices, streams and graphs: the front, the CPU device, CUDA |
//! | `cpu` | the CPU device's executor, in C++ |
//! | `common` | device code that dispatch, combine and the wire share |
//! | `dispatch`, `combine` | device code of the two directions |
//! | `nic` | the copies of an emulated NIC |
//! | `bench` | kernels of benchmarks and of the conformance tests |

pub mod base;
pub mod bench;
pub mod device;
pub(crate) mod ffi;
mod nic;

pub(crate) use device::recording::{Chains, Enqueued, Half, LastUse, Recording};
pub use device::view::View;
pub(crate) use device::view::{Owner, Place, Span};
pub use device::{
    Device, DeviceBuffer, DeviceKind, Event, Graph, HostBuffer, KernelArgs, MAX_BLOCK_THREADS, MAX_SHARED_BYTES,
    SeededConfig, SeededReport, Stopped, Stream, seeded_world,
};
pub(crate) use device::{Queue, budget};

use crate::ffi::layout;

/// The list of all kernels, a `TY_KERNEL_ENTRY(name)` a line; cpu/table.cpp includes the same.
const KERNEL_LIST: &str = include_str!("kernels.inc");

/// Every kernel by name.
pub fn kernel_names() -> impl Iterator<Item = &'static str> {
    KERNEL_LIST.lines().filter_map(|line| line.strip_prefix("TY_KERNEL_ENTRY(")?.strip_suffix(')'))
}

/// Bytes of the argument of a dispatch kernel.
pub const DISPATCH_ARGUMENT_BYTES: usize = size_of::<layout::ty_dispatch_args>();

macro_rules! kernel_args {
    ($($name:ident),* $(,)?) => {
        // SAFETY: generated from the header that the kernels include, layout asserted at build time.
        $(unsafe impl KernelArgs for layout::$name {})*
    };
}

kernel_args!(
    ty_dispatch_args,
    ty_combine_args,
    ty_barrier_args,
    ty_expert_args,
    ty_push_args,
    ty_hold_args,
    ty_meet_args,
    ty_nic_args
);
