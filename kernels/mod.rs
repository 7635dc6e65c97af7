//! Devices and what runs on them.
//!
//! Place: below the proxy, above the driver and the CPU executor. `device` is the front; `cpu` and `cuda` are its
//! backends. One kernel source (kernels.cu) is built for both. It knows nothing of transport.

pub mod bench;
mod cpu;
mod cpu_seeded;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cuda_stream;
pub mod device;
mod recording;
mod view;

pub use cpu_seeded::{SeededConfig, SeededReport, seeded_world};
pub(crate) use device::Queue;
pub use device::{
    Device, DeviceBuffer, DeviceKind, Event, Graph, HostBuffer, KernelArgs, MAX_BLOCK_THREADS, MAX_SHARED_BYTES, Stream,
};
pub(crate) use recording::{Chains, Enqueued, Recording};
pub use view::View;
pub(crate) use view::{Owner, Place, Span};

use crate::ffi::layout;

/// Every kernel: what a GPU loads when its context is made, and what TY_KERNEL_TABLE in kernels.cu names.
pub const KERNELS: &[&str] = &[
    "ty_dispatch",
    "ty_dispatch_nodes",
    "ty_dispatch_in_place",
    "ty_dispatch_plain_contiguous",
    "ty_dispatch_plain_contiguous_nodes",
    "ty_dispatch_plain_masked",
    "ty_dispatch_plain_masked_nodes",
    "ty_dispatch_plain_token",
    "ty_dispatch_plain_token_nodes",
    "ty_dispatch_quantize_contiguous",
    "ty_dispatch_quantize_contiguous_nodes",
    "ty_dispatch_quantize_masked",
    "ty_dispatch_quantize_masked_nodes",
    "ty_combine_bf16",
    "ty_combine_bf16_nodes",
    "ty_combine_fp16",
    "ty_combine_fp16_nodes",
    "ty_combine_fp32",
    "ty_combine_fp32_nodes",
    "ty_combine_bf16_fp32",
    "ty_combine_bf16_fp32_nodes",
    "ty_combine_fp16_fp32",
    "ty_combine_fp16_fp32_nodes",
    "ty_combine_bf16_fp8",
    "ty_combine_bf16_fp8_nodes",
    "ty_combine_fp16_fp8",
    "ty_combine_fp16_fp8_nodes",
    "ty_combine_fp32_fp8",
    "ty_combine_fp32_fp8_nodes",
    "ty_combine_plain",
    "ty_combine_plain_tagged",
    "ty_combine_plain_nodes",
    "ty_combine_plain_token",
    "ty_combine_plain_token_tagged",
    "ty_combine_plain_token_nodes",
    "ty_combine_plain_late",
    "ty_combine_plain_late_tagged",
    "ty_combine_plain_late_nodes",
    "ty_barrier",
    "ty_bench_expert",
    "ty_bench_push",
    "ty_bench_hold",
    "ty_bench_meet",
    "ty_nic",
    "ty_conformance",
];

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
