//! The host side of the data path: the buffer plan, contexts, handles, and what the device reports.
//!
//! Every world is one node at present, so there is no proxy thread yet: calls enqueue kernels and return. Threads that
//! post to a network, their state machines, counters and flags belong here too.
//!
//! Runs on the caller's thread. Calls never wait on the host; only building a context does, with deadlines.

mod calls;
mod config;
mod context;
mod handle;
mod placement;
mod plan;
mod report;

pub use calls::{Combined, IndexType, Layout, Output, Rows, ScaleOrder, ScaleView, TokenCount, Tokens};
pub use config::{AllToAllBuilder, Scales, Weights};
pub use context::{AllToAll, Stats};
pub use handle::{CombineSent, Handle, Sent};
pub use placement::Placement;
pub use plan::{Buffer, Plan, PlanInput};
