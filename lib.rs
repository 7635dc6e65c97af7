//! tokenyard moves tokens to experts and back in Mixture-of-Experts inference.
//!
//! Each rank (one GPU, or one worker of the CPU device) holds some experts. **Dispatch** sends every token's row to the
//! ranks of the experts it names, laid out there expert by expert; **combine** brings the experts' outputs home and
//! forms the weighted sum. Rows go once per (token, rank); sums are formed before the way back. All calls enqueue on a
//! stream and return; nothing waits on the host, and everything can be captured in a CUDA graph.
//!
//! ```
//! use tokenyard::{AllToAll, Combined, IndexType, Layout, Output, Rows, ScaleOrder, TokenCount, Tokens, World};
//! use tokenyard::{Device, Dtype};
//! use std::time::Duration;
//!
//! // One rank that holds two experts; each of its two tokens goes to one of them.
//! let world = World::threads(1).remove(0);
//! let device = Device::cpu()?;
//! let stream = device.new_stream()?;
//! let ep = AllToAll::builder(&world)
//!     .device(device.clone())
//!     .hidden(8)
//!     .experts(2)
//!     .top_k(1)
//!     .max_tokens(2)
//!     .dtype(Dtype::Bf16)
//!     .build()?;
//!
//! let (x, y, out) = (device.alloc(32)?, device.alloc(32)?, device.alloc(32)?);
//! let (idx, weight, count) = (device.alloc(8)?, device.alloc(8)?, device.alloc(8)?);
//! x.write(0, &[0x3f80u16, 0x4000].map(|v| [v; 8]).concat().iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<_>>())?;
//! idx.write(0, &[1i32, 0].map(i32::to_ne_bytes).concat())?;
//! weight.write(0, &[0.5f32, 2.0].map(f32::to_ne_bytes).concat())?;
//!
//! let tokens = Tokens {
//!     x: x.view(),
//!     x_pitch: 16,
//!     scales: None,
//!     topk_idx: idx.view(),
//!     index_type: IndexType::I32,
//!     topk_weight: Some(weight.view()),
//!     count: TokenCount::Host(2),
//! };
//! let output = Output {
//!     layout: Layout::Contiguous { align: 1, capacity: 2 },
//!     rows: y.view(),
//!     rows_pitch: 16,
//!     scales: None,
//!     scale_order: ScaleOrder::RowMajor,
//!     expert_count: count.view(),
//!     expert_offset: None,
//!     row_expert: None,
//!     source: None,
//!     token_experts: None,
//!     token_weights: None,
//!     row_count: None,
//!     zero_padding: false,
//!     host_counts: None,
//! };
//! let handle = ep.dispatch(&stream, &tokens, &output)?;
//! // The experts would run here; these ones return what they get.
//! let rows = Rows { rows: y.view(), pitch: 16, topk_weight: None };
//! ep.combine(&stream, &handle, &rows, &Combined { out: out.view(), pitch: 16, dtype: Dtype::Bf16, accumulate: false })?;
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
//! Grammar, the same on all ranks of a context: the receive of a dispatch comes before the next dispatch is sent, and
//! likewise for combine. With several nodes, all ranks of a node enqueue `combine_send` and `dispatch_recv` in the same
//! order. Dispatches of a context run one after the other, and so do its combines and its barriers: enqueue them, and
//! graphs that hold them, on one stream, or order their streams by events. Anything else is allowed, such as another
//! dispatch before a combine, or a dispatch beside a combine. The device checks the first and the third rule, in graph
//! replays too; the `Timeout` that follows from a breach of the second names it. Launches of one direction that run at the
//! same time end in `Order`, which closes the context, and store nothing outside of what they were given.
//!
//! Layers: `bindings` use this file, which uses `proxy` (contexts, plans), which uses `kernels` (device code, devices)
//! and `transport` (worlds, memory); all use the leaf `base`.

// The layers keep the places that docs/design.md gives them.
#[path = "kernels/base/mod.rs"]
pub mod base;
#[path = "bindings/ffi/mod.rs"]
mod ffi;
pub mod kernels;
pub mod proxy;
pub mod transport;

pub use base::{Dtype, Error, Rank, Result};
pub use kernels::{Device, DeviceBuffer, DeviceKind, Event, Graph, HostBuffer, Stream, View};
pub use proxy::{
    AllToAll, AllToAllBuilder, ArenaPlace, Buffer, CallStatistics, CombineSent, Combined, FlagPlace, Handle, IndexType,
    Layout, Output, OwnOutput, Partial, Placement, Plan, Proxy, ProxyConfig, Refused, Rows, ScaleOrder, ScaleView,
    Scales, Sent, Stage, Stats, TokenCount, Tokens, Weights,
};
pub use transport::memory::gdr::GdrCopy;
pub use transport::{Bootstrap, World};
