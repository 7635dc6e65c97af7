//! Every way into the crate: `api` for Rust; `c` for C; `cli` is the program.

pub mod api;
#[cfg(feature = "c")]
pub mod c;
#[cfg(feature = "cli")]
pub mod cli;
