//! The host side of the data path: the buffer plan, contexts, handles, and what the device reports.
//!
//! Every world is one node at present: calls enqueue kernels and return. For several nodes, `machine` is the proxy's
//! state machine (doorbells and completions in, posts and flags out), `counter` counts its immediates, `wire` authors
//! its offsets, and `driver` runs it on a pinned thread over a transport. Contexts do not start one yet.
//!
//! Runs on the caller's thread. Calls never wait on the host; only building a context does, with deadlines.

mod calls;
mod config;
mod context;
pub mod counter;
pub mod driver;
mod handle;
pub mod machine;
mod placement;
mod plan;
mod report;
pub mod wire;

pub use calls::{Combined, IndexType, Layout, Output, Rows, ScaleOrder, ScaleView, TokenCount, Tokens};
pub use config::{AllToAllBuilder, Scales, Weights};
pub use context::{AllToAll, Stats};
pub use handle::{CombineSent, Handle, Sent};
pub use placement::Placement;
pub use plan::{Buffer, Plan, PlanInput};
