//! Whether what was made in one generation of a job may still be used.

use super::{Error, Rank, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A rank's membership in one generation, beside the newest generation that the rank has entered.
#[derive(Debug, Clone, Default)]
pub struct Membership {
    /// The rank, in the first generation.
    pub rank: Rank,
    /// The generation it is a member of.
    pub generation: u32,
    /// The newest generation that the rank has entered; all its memberships share it.
    pub newest: Arc<AtomicU32>,
}

impl Membership {
    /// Refuses a generation that the rank has left for a later one. Takes no lock.
    ///
    /// # Errors
    /// `Generation`, with both numbers.
    pub fn check(&self) -> Result<()> {
        let newest = self.newest.load(Ordering::Acquire);
        if newest <= self.generation {
            return Ok(());
        }
        Err(Error::Generation { rank: self.rank, generation: self.generation, newest })
    }
}
