//! The leaf that every layer may use: identifiers, errors, and waiting with a deadline.
//!
//! It imports nothing of the crate, runs on any thread, and never allocates outside error paths.

#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod ids;
pub mod wait;

pub use error::{Error, Result};
pub use ids::{Dtype, Rank};
