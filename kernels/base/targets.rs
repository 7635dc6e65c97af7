//! Targets of the library's log, by the facade of the crate `log`.
//!
//! Events are written where something is made, ends, is lost or falls back on something else: never in a call, and
//! never in a proxy's loop except for the peers that it loses.

/// Worlds that are formed, and those that regroup.
pub const WORLD: &str = "tokenyard::world";
/// Contexts that are built, with their sizes, and those that close.
pub const CONTEXT: &str = "tokenyard::context";
/// Proxies that start and end, and peers that they lose.
pub const PROXY: &str = "tokenyard::proxy";
/// Networks and endpoints between nodes.
pub const NETWORK: &str = "tokenyard::network";
/// Arenas that ranks map, and words that are placed elsewhere than they could be.
pub const MEMORY: &str = "tokenyard::memory";
/// All of them.
pub const ALL: [&str; 5] = [WORLD, CONTEXT, PROXY, NETWORK, MEMORY];
