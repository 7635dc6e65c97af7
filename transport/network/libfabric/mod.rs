//! The network over libfabric: so far its raw bindings and their opening at run time.

pub mod libfabric_sys;
