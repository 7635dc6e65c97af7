//! The leaf that every layer may use: identifiers, errors, checksums, free memory, and waiting with a deadline.
//!
//! `copies` is what an emulated NIC asks of a device.
//!
//! It imports nothing of the crate, runs on any thread, and never allocates outside error paths, except to ask for free
//! memory.

pub mod checksum;
pub mod copies;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod generation;
mod ids;
pub mod interrupt;
pub mod memory;
mod quote;
pub mod targets;
pub mod wait;

pub use error::{Error, Result, Source};
pub use generation::Membership;
pub use ids::{Dtype, Rank};
pub use interrupt::Interrupt;
pub use quote::quoted;
