//! Every way into the crate: `api` for Rust; `cli` is the program.

pub mod api;
