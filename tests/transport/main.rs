//! What carries bytes between ranks: the host's connections, memory, devices and networks.

#[path = "../rig/mod.rs"]
mod context_rig;
mod contract;
#[path = "../rig/double.rs"]
mod double;
mod processes;
mod remote;
mod rig;
mod taking_back;

mod bootstrap;
mod conformance;
mod device;
mod efa;
mod gpu_memory;
mod gpu_nic;
mod handshake;
mod ibverbs;
mod libfabric;
mod memory;
mod transport_contract;
mod verbs_regions;
mod verbs_routes;
