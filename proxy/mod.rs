//! The host side of the data path: the buffer plan, contexts, handles, and what the device reports.
//!
//! Calls enqueue kernels and return. Between nodes, `service` is one rank's proxy: `machine` its state machine (doorbells
//! and completions in, posts and flags out), `counter` counts immediates, `wire` authors offsets, and `driver` runs it on
//! a pinned thread over a transport. `gpu_nic` is a transport itself: an emulated network between GPUs of one process.
//!
//! Runs on the caller's thread. Calls never wait on the host; only building a context does, with deadlines.

mod agreement;
mod budget;
mod calls;
mod config;
mod context;
pub mod counter;
pub mod driver;
pub mod gpu_nic;
mod handle;
pub mod machine;
mod open;
mod pick;
mod placement;
mod plan;
mod report;
mod service;
mod sms;
mod statistics;
mod tables;
pub mod wire;

pub use calls::{Combined, IndexType, Layout, Output, OwnOutput, Rows, ScaleOrder, ScaleView, TokenCount, Tokens};
pub use config::{AllToAllBuilder, ArenaPlace, Partial, Scales, Weights};
pub use context::{AllToAll, Stats};
pub use handle::{CombineSent, Handle, Refused, Sent};
pub use placement::Placement;
pub use plan::{Buffer, Plan, PlanInput};
pub use service::{AnyTransport, FlagPlace, Proxy, ProxyConfig, ProxyLoop};
pub use statistics::{CallStatistics, Stage};
