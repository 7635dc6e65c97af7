//! What errors call the ranks of a world.
//!
//! Place in the data path: none. Within a world ranks are counted from 0; errors name ranks as in the job's first
//! generation, which is how the reader of an error counts them.

use std::fmt;
use std::sync::Arc;

use crate::base::Rank;

/// By rank of a world: its rank in the first generation.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Names(Arc<[Rank]>);

impl Names {
    pub(super) fn new(members: &[Rank]) -> Names {
        Names(members.into())
    }

    /// Of a first generation.
    pub(super) fn all(size: usize) -> Names {
        Names((0..size as u32).map(Rank).collect())
    }

    /// The rank's name; itself if it is not of the world.
    pub(super) fn of(&self, rank: Rank) -> Rank {
        self.0.get(rank.index()).copied().unwrap_or(rank)
    }

    /// The name of rank 0, through which collectives of processes go.
    pub(super) fn root(&self) -> Rank {
        self.of(Rank(0))
    }

    /// Ranks of the world.
    pub(super) fn size(&self) -> usize {
        self.0.len()
    }

    /// All of them, by rank.
    pub(super) fn members(&self) -> &[Rank] {
        &self.0
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
