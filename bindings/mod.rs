//! Every way into the crate: `api` for Rust; `cli` is the program.

pub mod api;
#[cfg(feature = "cli")]
pub mod cli;
