//! The network over verbs: so far its raw bindings and their opening at run time.

pub mod ibverbs_sys;
