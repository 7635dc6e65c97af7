//! Calls of contexts and what surrounds them: worlds, nodes, proxies, memory, errors, order, and ranks that die.

#[path = "../rig/double.rs"]
mod double;
#[path = "../rig/mod.rs"]
mod rig;

mod again;
mod agreements;
mod aliasing;
mod arena;
mod building;
mod contexts;
mod counts;
mod dispatch_payload;
mod extremes;
mod faults;
mod handles;
mod in_place;
mod interrupts;
mod kills;
mod missing;
mod nodes;
mod one_context;
mod overlap;
mod ownership;
mod payload;
mod refusals;
mod repeated;
mod routing;
mod statistics;
mod stopped;
mod transport_outside;
mod wide;
mod worlds;
