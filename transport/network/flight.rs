//! Writes under way and their ends: the same for all real networks.
//!
//! Place in the data path: between `post` and the completion that `poll` hands out. On the endpoint's thread.

use super::{Event, Failure, WriteImm};

/// A write under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flight {
    pub write: WriteImm,
    /// Where its bytes are.
    pub source: u64,
    /// The peer's endpoint that it was posted to.
    pub channel: u64,
}

/// How a write ends.
#[derive(Debug, Clone, Copy)]
pub(super) enum Outcome {
    Sent,
    Failed(Failure),
    Dropped,
}

/// The completion of a write.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pending {
    pub nic: usize,
    pub flight: Flight,
    pub outcome: Outcome,
}

impl Pending {
    /// As it is handed out.
    pub fn event(&self) -> Event<'static> {
        let WriteImm { token, peer, .. } = self.flight.write;
        match self.outcome {
            Outcome::Sent => Event::Sent { token },
            Outcome::Failed(failure) => Event::Failed { token, peer, failure },
            Outcome::Dropped => Event::Dropped { token, peer },
        }
    }
}
