//! tokenyard moves tokens to experts and back in Mixture-of-Experts inference.
//!
//! Each rank (one GPU, or one worker of the CPU device) holds some experts. **Dispatch** sends the row of every token
//! to the ranks of the experts that the token names, and lays the rows out there expert by expert. **Combine** brings
//! the experts' outputs back to the token's source rank as a weighted sum. A row goes to a rank once, however many of
//! the token's experts are there, and that rank sums their outputs before it sends the sum back. Calls enqueue work on
//! a stream and return: they do not wait on the host, and each can be captured in a CUDA graph.
//!
//! ```
//! use tokenyard::{AllToAll, Combined, Device, Layout, Output, Rows, TokenCount, Tokens, World};
//! use std::time::Duration;
//!
//! // One rank that holds two experts; each of its two tokens goes to one of them.
//! let world = World::threads(1)?.remove(0);
//! let device = Device::cpu()?;
//! let stream = device.new_stream()?;
//! let ep = AllToAll::builder(&world)
//!     .device(device.clone())
//!     .hidden(8)
//!     .experts(2)
//!     .top_k(1)
//!     .max_tokens_per_rank(2)
//!     .build()?;
//!
//! let (x, y, out) = (device.alloc(32)?, device.alloc(32)?, device.alloc(32)?);
//! let (idx, weight, count) = (device.alloc(8)?, device.alloc(8)?, device.alloc(8)?);
//! x.write(0, &[0x3f80u16, 0x4000].map(|v| [v; 8]).concat().iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<_>>())?;
//! idx.write(0, &[1i32, 0].map(i32::to_ne_bytes).concat())?;
//! weight.write(0, &[0.5f32, 2.0].map(f32::to_ne_bytes).concat())?;
//!
//! let tokens = Tokens::new(x.view(), idx.view(), TokenCount::Host(2)).topk_weight(weight.view());
//! let output = Output::new(Layout::Contiguous { align: 1, capacity: 2 }, y.view(), count.view());
//! let handle = ep.dispatch(&stream, &tokens, &output)?;
//! // The experts would run here; these ones return what they get.
//! ep.combine(&stream, &handle, &Rows::new(y.view()), &Combined::new(out.view()))?;
//! stream.synchronize(Duration::from_secs(10))?;
//! ep.check()?;
//!
//! let mut bytes = [0u8; 32];
//! out.read(0, &mut bytes)?;
//! assert_eq!(bytes[..2], 0x3f00u16.to_ne_bytes()); // 0.5 x 1.0
//! assert_eq!(bytes[16..18], 0x4080u16.to_ne_bytes()); // 2.0 x 2.0
//! # Ok::<(), tokenyard::Error>(())
//! ```
//!
//! The next example has two ranks with two experts each. The experts differ: expert `e` multiplies by `e + 1`. Dispatch
//! writes the number of rows of each expert to host memory, where the host reads it without a copy:
//!
//! ```
//! use tokenyard::{
//!     AllToAll, Combined, Device, Dtype, Layout, Output, Result, RowFormat, Rows, TokenCount, Tokens, World,
//! };
//! use std::time::Duration;
//!
//! fn run(world: World, value: f32, experts: [i32; 2]) -> Result<f32> {
//!     let device = Device::cpu()?; // or Device::cuda(world.local_rank())?
//!     let (stream, patience) = (device.new_stream()?, Duration::from_secs(10));
//!     let ep = AllToAll::builder(&world)
//!         .device(device.clone())
//!         .hidden(4)
//!         .experts(4)
//!         .top_k(2)
//!         .max_tokens_per_rank(1)
//!         .format(RowFormat::FP32)
//!         .combine_dtype(Dtype::Fp32)
//!         .build()?;
//!
//!     // One token of each rank. There is room for both at both experts of a rank.
//!     let (x, idx, weight, out) = (device.alloc(16)?, device.alloc(8)?, device.alloc(8)?, device.alloc(16)?);
//!     x.write(0, &value.to_ne_bytes().repeat(4))?;
//!     idx.write(0, &experts.map(i32::to_ne_bytes).concat())?;
//!     weight.write(0, &[0.25f32, 0.75].map(f32::to_ne_bytes).concat())?;
//!     let (y, count, host_counts) = (device.alloc(4 * 16)?, device.alloc(8)?, device.alloc_host(12)?);
//!     let tokens = Tokens::new(x.view(), idx.view(), TokenCount::Host(1)).topk_weight(weight.view());
//!     let output = Output::new(Layout::Contiguous { align: 1, capacity: 4 }, y.view(), count.view());
//!     let handle = ep.dispatch(&stream, &tokens, &output.host_counts(host_counts.view()))?;
//!
//!     // The experts, here on the host: rows lie expert by expert.
//!     stream.synchronize(patience)?;
//!     let (mut counts, mut row, mut at) = ([0; 2], [0; 16], 0);
//!     host_counts.read_i32(0, &mut counts)?;
//!     for (expert, rows) in ep.placement().local_experts(world.original(world.rank()).index()).iter().zip(counts) {
//!         for _ in 0..rows {
//!             y.read(at, &mut row)?;
//!             let [a, b, c, d, ..] = row;
//!             let product = f32::from_ne_bytes([a, b, c, d]) * (expert + 1) as f32;
//!             y.write(at, &product.to_ne_bytes().repeat(4))?;
//!             at += 16;
//!         }
//!     }
//!     ep.combine(&stream, &handle, &Rows::new(y.view()), &Combined::new(out.view()).dtype(Dtype::Fp32))?;
//!     stream.synchronize(patience)?;
//!     ep.check()?;
//!     world.barrier("done")?; // see "Teardown"
//!     let mut sum = [0; 4];
//!     out.read(0, &mut sum)?;
//!     Ok(f32::from_ne_bytes(sum))
//! }
//!
//! // Ranks are threads here; as processes each has one world, of `World::from_env()?`.
//! let [first, second] = World::threads(2)?.try_into().map_err(|_| "two ranks")?;
//! let second = std::thread::spawn(|| run(second, 2.0, [1, 3]));
//! assert_eq!(run(first, 1.0, [0, 3])?, 0.25 * 1.0 + 0.75 * 4.0);
//! assert_eq!(second.join().map_err(|_| "a panic")??, 2.0 * (0.25 * 2.0 + 0.75 * 4.0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Grammar
//!
//! These rules hold for the calls of a context, on all its ranks alike:
//!
//! 1. The receive of a dispatch comes before the next dispatch is sent, and likewise for combine. The device checks
//!    this rule, in ordered replays too: a call out of order does nothing and ends in [`Error::Order`].
//! 2. With several nodes, all ranks of a node enqueue `combine_send` and `dispatch_recv` in the same order; `combine`
//!    and `dispatch` contain these halves, and `dispatch_again` and its halves count as dispatches. A breach ends in an
//!    [`Error::Timeout`] that names this rule.
//! 3. All ranks combine the same dispatches in the same order, and dispatch again by the same ones. A breach closes the
//!    context: with an [`Error::Order`], or between nodes with a `Timeout` that may come first.
//! 4. All ranks enqueue the calls of one stream in the same order: a fused call, a receive, a barrier and
//!    `dispatch_send_counts` wait for the other ranks' sends, and hold up what the stream has behind them. If rank 0
//!    combines before it dispatches and rank 1 dispatches before it combines, each on one stream, both wait until the
//!    deadline. On two streams they do not. A breach ends in a `Timeout` that names this rule.
//! 5. All ranks make a call in the same format ([`CallFormat`]), with a payload of as many words, or without. A breach
//!    closes the context: with an [`Error::Order`], or with a `Timeout` that may come first.
//!
//! Anything else is allowed, such as another dispatch before a combine, or a dispatch beside a combine. A dispatch may
//! be combined once, several times or not at all. Calls may go on any streams: dispatches of a context run one after
//! the other, and so do its combines and its barriers (see [`AllToAll`]). Captures and replays of another library are
//! the exception: the caller orders them (see [`Device::stream_from_raw`]).
//!
//! # Errors
//!
//! A call returns the errors that the host can see, in arguments and views; such a call was not enqueued. Errors that
//! the device, a peer or the proxy finds while a call runs come later, from [`AllToAll::check`]. Every call runs
//! `check` first, so the next call may return the error of an earlier call. Then the next call was not enqueued,
//! either: [`AllToAll::dispatch`] shows what to do. [`Error::is_fatal`] states whether the context is closed.
//!
//! After these errors the context goes on, and outputs hold:
//!
//! | error | where | what outputs hold |
//! |---|---|---|
//! | [`Capacity`](Error::Capacity) | dispatch, on the rank whose output was too small | No row was written. `expert_count`, `row_count`, `host_counts` and the contiguous layout's `expert_offset` are 0; `row_expert` and `source` are -1. `needed` is the capacity that would have fitted |
//! | [`Routing`](Error::Routing) | dispatch, on the rank whose routing was unusable | This rank sent no tokens; what the other ranks sent to it is there. This rank's combine of that dispatch gives sums of zeros and reports no error; after [`dispatch_again`](AllToAll::dispatch_again) that is so only if the handle's own dispatch was refused; where the token count in device memory was out of range, it writes no rows |
//! | [`Incomplete`](Error::Incomplete) | combine, on each rank with a token that had a row at a rank without room | The sums hold the parts of the other ranks |
//!
//! After `Capacity` and `Routing` the dispatch took place, and its handle is good. The other ranks did not get the
//! error. So this rank combines the handle as they do, or all ranks agree that none of them combines it. If one rank
//! alone leaves a combine out, its peers wait for it until their deadline: a `Timeout`, which closes their contexts.
//! [`AllToAll::refused_sources`] names the ranks whose routing was unusable to their peers.
//!
//! # Graphs
//!
//! Every call but [`AllToAll::dispatch_send_counts`] can be captured. A capture records the call and runs nothing.
//! Errors of a replay come from [`AllToAll::check`], as for an eager call. This example records a dispatch, experts and
//! a combine, and replays them with other tokens:
//!
//! ```
//! # use tokenyard::{AllToAll, Combined, Device, Layout, Output, Rows, TokenCount, Tokens, World};
//! # use std::time::Duration;
//! # let world = World::threads(1)?.remove(0);
//! # let device = Device::cpu()?;
//! # let stream = device.new_stream()?;
//! # let ep = AllToAll::builder(&world)
//! #     .device(device.clone())
//! #     .hidden(8)
//! #     .experts(2)
//! #     .top_k(1)
//! #     .max_tokens_per_rank(2)
//! #     .build()?;
//! # let (x, y, out) = (device.alloc(32)?, device.alloc(32)?, device.alloc(32)?);
//! # let (idx, weight, counts) = (device.alloc(8)?, device.alloc(8)?, device.alloc(8)?);
//! # x.fill(0)?;
//! # idx.fill(0)?;
//! # weight.fill(0)?;
//! let (count, host_counts) = (device.alloc(4)?, device.alloc_host(4 * (2 + 1))?); // of two local experts
//! let tokens = Tokens::new(x.view(), idx.view(), TokenCount::Device(count.view())).topk_weight(weight.view());
//! let output = Output::new(Layout::Contiguous { align: 1, capacity: 2 }, y.view(), counts.view());
//!
//! stream.begin_capture()?;
//! let handle = ep.dispatch(&stream, &tokens, &output.host_counts(host_counts.view()))?;
//! // The experts' kernels are recorded here; these experts return what they get.
//! ep.combine(&stream, &handle, &Rows::new(y.view()), &Combined::new(out.view()))?;
//! let graph = stream.end_capture()?;
//!
//! for now in [2i32, 0, 1] {
//!     count.write(0, &now.to_ne_bytes())?; // and new rows, experts and weights where the old ones were
//!     graph.launch(&stream)?;
//!     stream.synchronize(Duration::from_secs(10))?;
//!     ep.check()?;
//!     let mut rows = [0; 3]; // of each expert, then in all
//!     host_counts.read_i32(0, &mut rows)?;
//!     assert_eq!(rows[2], now);
//! }
//! # Ok::<(), tokenyard::Error>(())
//! ```
//!
//! - A replay reads and writes the views that were recorded. With [`TokenCount::Device`] the views have room for
//!   `max_tokens_per_rank` tokens, and each replay reads its number of tokens from device memory.
//! - Experts that run on the host, or whose launch depends on `host_counts`, need two graphs with the same handle: one
//!   of the dispatch, one of the combine. The experts run between the two.
//! - A replay counts as the calls that it holds. A rank may replay while another rank makes the same calls eagerly.
//! - A graph keeps what it uses: buffers, handles and the context. Each recorded dispatch takes one of the handles that
//!   are free ([`Tuning::handles`]), since no memory is allocated while a stream captures.
//!
//! # Waits
//!
//! Every wait of the host has a name and a deadline. An [`Interrupt`] ends a thread's waits before their deadlines, as
//! for a signal. docs/failure.md lists all waits.
//!
//! # Teardown
//!
//! On each rank: wait for the streams of the last calls ([`Stream::synchronize`]), call [`AllToAll::check`], hold a
//! [`World::barrier`], and drop everything in any order. A drop waits for no other rank. But where a rank leaves
//! without the barrier, calls and collectives of peers that still need that rank end in errors, some at their
//! deadlines.
//!
//! | dropped | waits for |
//! |---|---|
//! | [`AllToAll`] | its calls on all streams, for its deadline and 5 s at most; calls that still run then keep their memory for good. Between nodes also its messages and its own writes, 1 s each at most. While there is a [`Graph`] of its calls, the drop waits for nothing: the context closes with the last such graph |
//! | [`Graph`] | its replays, at most for the longest deadline of its contexts and 5 s, or for 30 s if that is longer |
//! | [`DeviceBuffer`], [`HostBuffer`] | nothing while a [`View`], a graph or an unfinished half of a call keeps the memory. The last of these frees it. A GPU's driver then waits for the GPU's work, without a deadline; the CPU device frees later instead |
//! | [`Handle`], [`Stream`] | nothing; enqueued work goes on |
//! | [`Sent`], [`SentAgain`], [`CombineSent`] | nothing; but the call is abandoned, and the context can only be dropped |
//! | [`Proxy`] | the end of its thread, about 100 ms, once the last clone and the last context of the proxy are gone |
//! | [`World`] | the end of its thread, 500 ms at most, once the last clone and the last context of the world are gone and where ranks are processes. From then on collectives that need this rank fail: all of them, if it is rank 0 |
//!
//! # Stability
//!
//! Semantic versioning covers everything at the crate's root except:
//!
//! - [`network`], which is unstable until real networks have used it: the trait [`Transport`](network::Transport),
//!   what the trait is called with, and the simulated and emulated networks. Items at the root that refer to `network`
//!   are unstable, too: [`AnyTransport`], [`Proxy::spawn`], [`Proxy::with_loop`] and its [`Clock`],
//!   [`Proxy::device_needs`], [`dma_buf`] and its [`DmaBuf`].
//! - [`topology`], unstable until real networks have used it, too.
//! - `internals`, which is hidden and changes without notice.
//! - `c`: its header is stable within a `TOKENYARD_ABI_VERSION`, its Rust paths and types are not.
//! - `cli`: the options and exit statuses of the program are stable, its functions, texts and the JSON's further fields
//!   are not.
//!
//! Before version 1.0 a breaking change raises the minor version. Enumerations and structures that may grow are
//! `non_exhaustive`. A new variant or public field of any other is a breaking change: [`ProxyConfig`],
//! [`ThreadConfig`] and [`Liveness`] are written as literals. Texts of errors and of the log may change at any time;
//! variants and fields of [`Error`] do not. The oldest Rust that builds the crate is 1.91 (`rust-version` in
//! Cargo.toml); raising it raises the minor version.
//!
//! Two Cargo features are on by default. `cuda` adds GPUs; without it the CPU device is the only one. `cli` adds the
//! program and its dependencies. A third one, `c`, adds the C interface, which `bindings/c/install.sh` builds and
//! installs. Its constant `TOKENYARD_ABI_VERSION` and the library's soname change with every breaking change.
//!
//! Folders: `bindings` (every way in; the interface is `bindings/api`, and for C `bindings/c`), `proxy` (the host proxy
//! between nodes), `kernels` (device code, devices, the leaf `base`), `transport` (worlds, memory, networks).
//! docs/design.md has the map.

// The program refers to the library by the name that users write.
#[cfg(feature = "cli")]
extern crate self as tokenyard;

mod bindings;
mod kernels;
mod proxy;
mod transport;

// Every folder refers to the leaves by these paths.
use kernels::{base, ffi};

// ---- the world of ranks, and how it forms
pub use transport::{AllGather, Bootstrap, World};

// ---- devices, memory, streams, graphs
pub use base::{Dtype, Rank};
pub use kernels::{Device, DeviceBuffer, DeviceKind, Event, Graph, HostBuffer, Stream, View};

// ---- contexts and their configuration
pub use bindings::api::{
    AllToAll, AllToAllBuilder, ArenaPlace, Buffer, CallFormat, InPlaceOutput, MissingRanks, Partial, Placement, Plan,
    RowFormat, Scales, Tuning, Weights,
};

// ---- calls: their arguments, and calls under way
pub use bindings::api::{
    CombineSent, Combined, Counts, Handle, IndexType, Layout, NewRows, Output, Payload, Placed, Refused, Rows,
    ScaleOrder, ScaleView, Sent, SentAgain, Strides, TokenCount, TokenPayload, Tokens,
};

// ---- errors and statistics of a context, and how to end a wait
pub use base::{Error, Interrupt, Result, Source};
pub use bindings::api::{CallStatistics, SilentRank, Stage, Stats};

// ---- networks between nodes
pub use proxy::driver::{Clock, ThreadConfig};
pub use proxy::machine::Liveness;
pub use proxy::{AnyTransport, FlagPlace, Network, NetworkConfig, Proxy, ProxyConfig, ProxyLoop};
pub use transport::memory::gdr::GdrCopy;
pub use transport::memory::{DmaBuf, DmaBufMapping, GpuDirect, dma_buf, gpu_direct};
pub use transport::{network, topology};

// ---- the program
#[cfg(feature = "cli")]
pub use bindings::cli;

// ---- the C interface
#[cfg(feature = "c")]
pub use bindings::c;

// The guide's programs run as tests.
#[cfg(doctest)]
#[doc = include_str!("docs/guide.md")]
mod guide {}

/// A stream whose liveness nothing shows is not taken from safe code:
///
/// ```compile_fail,E0133
/// fn borrow(device: &tokenyard::Device, cu_stream: u64) {
///     let stream = device.stream_from_raw(cu_stream);
/// }
/// ```
#[cfg(doctest)]
mod refusals {}

/// Internals for the crate's tests, benchmarks and program. No part of the interface: they change without notice.
#[doc(hidden)]
pub mod internals {
    /// The commit that this was built of, or "unknown".
    pub const COMMIT: &str = env!("TOKENYARD_COMMIT");

    /// What processes have in common that can be of one node: the kernel and the namespace of sockets.
    pub fn host() -> String {
        crate::transport::world::fds::host()
    }

    /// Contexts from inside.
    pub mod api {
        pub use crate::bindings::api::*;
    }
    /// The leaf.
    pub mod base {
        pub use crate::kernels::base::*;
    }
    /// Devices from inside.
    pub mod kernels {
        pub use crate::kernels::*;
    }
    /// The host proxy.
    pub mod proxy {
        pub use crate::proxy::*;
    }
    /// Worlds, memory, networks.
    pub mod transport {
        pub use crate::transport::*;
    }
}
