//! How ranks find each other, agree, and reach each other's memory.
//!
//! Place in the data path: beside it. A [`World`] is formed once, before any context exists; its
//! collectives carry configurations, addresses and file descriptors while a context is built, and it
//! watches for peers that die. `memory` maps the arenas of node peers, through which kernels then store
//! rows without any call into this layer. For worlds of several nodes, `link` is the trait that every
//! network keeps, `imm` its 32-bit immediates, and `sim` a network in memory that lies about order, to
//! which proxies post; endpoints of one process tell each other their `address`.
//!
//! Threads: collectives run on the caller's thread (or host fiber) and wait through `base::wait`. In a
//! world of processes, one background thread per process owns all sockets.
//!
//! It never imports `kernels`, never unpickles or trusts unauthenticated bytes, and never waits without
//! a name and a deadline.
//!
//! ```text
//!            World (world.rs)                      Bootstrap (bootstrap.rs): who and where
//!            /              \                             |
//!   Seat (local.rs)     Station (station.rs) <---- join --+
//!   ranks of one        callers <-> thread
//!   process                 |
//!        \            Root (root.rs) <== TCP ==> Member (member.rs)
//!         \            |      \                    |
//!          Hub (hub.rs)   admit.rs            Conn (conn.rs), frames (wire.rs)
//!          one collective                     fds (fds.rs): Unix sockets, node peers only
//! ```

pub mod imm;
pub mod link;
pub mod memory;
pub mod sim;

pub(crate) mod address;
mod admit;
pub mod bootstrap;
mod conn;
mod fds;
mod hub;
mod local;
mod member;
pub(crate) mod regions;
mod root;
mod secret;
mod station;
mod terms;
mod wire;
pub mod world;

pub use bootstrap::Bootstrap;
pub use memory::{Arena, PeerMap};
pub use world::World;
