//! The host proxy between nodes: one rank's thread that turns doorbells of kernels into writes over a network, and
//! completions into flags that kernels poll.
//!
//! `service` owns a rank's proxy and its thread; `driver` runs `machine`, the state machine (doorbells and completions
//! in, posts and flags out), over a transport; `counter` counts immediates; `wire` authors the offsets of messages. It
//! knows nothing of the interface in `bindings`.

pub mod counter;
pub mod driver;
pub mod machine;
mod service;
pub mod wire;

pub use service::{AnyTransport, FlagPlace, Proxy, ProxyConfig, ProxyLoop};
pub(crate) use service::{Number, Offer, Opening, SharedWords};
