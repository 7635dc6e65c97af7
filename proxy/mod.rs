//! The host proxy between nodes: one rank's thread that makes writes over a network of the kernels' doorbells, and
//! flags that kernels poll of completions.
//!
//! It does not depend on the interface in `bindings`.
//!
//! | what | file |
//! |---|---|
//! | a rank's proxy and its thread, as contexts use it | `service` |
//! | the loop over a transport: looks at doorbells, posts, polls, stores flags | `driver`, `driver/scan` |
//! | the state machine: doorbells and completions in, writes and flags out | `machine` |
//! | a doorbell becomes a write | `machine/links` (`Link::post`) |
//! | immediates become arrivals | `counter` |
//! | opens a network by its kind | `network` |
//! | offsets of messages and words | `wire` |

mod cards;
pub mod counter;
pub mod driver;
pub mod machine;
mod network;
mod service;
pub mod wire;

pub use network::{Network, NetworkConfig};
pub use service::{AnyTransport, FlagPlace, Proxy, ProxyConfig, ProxyLoop};
pub(crate) use service::{Number, Offer, Opening, SharedWords};
