//! How ranks find each other, reach each other's memory, and send between nodes.
//!
//! Place in the data path: beside it, but for `network`, to which proxies post. It never imports `kernels`, never
//! unpickles or trusts unauthenticated bytes, and never waits without a name and a deadline.
//!
//! | folder | what |
//! |---|---|
//! | `world` | the ranks of a job: bootstrap, collectives, lost ranks |
//! | `memory` | arenas, and how node peers map them |
//! | `network` | the trait that every inter-node network implements, immediates, and the networks |
//! | `topology` | the NICs and cores of each GPU, from sysfs |

pub mod memory;
pub mod network;
pub mod topology;
pub mod world;

pub use memory::{Arena, PeerMap};
pub use world::bootstrap::Bootstrap;
pub use world::{AllGather, World};
