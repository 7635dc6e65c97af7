//! The one error type: every value that matters, and a sentence that says what to try.

use super::Rank;

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong. Every variant carries its values; its text is one sentence with advice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument of a call is unusable; nothing was enqueued.
    #[error("argument {name} is {value}: {advice}")]
    Argument {
        /// What was given.
        name: &'static str,
        /// Its value.
        value: String,
        /// What to try.
        advice: String,
    },
    /// A configuration cannot be built; no context exists.
    #[error("configuration {name} is {value}: {advice}")]
    Config {
        /// What was given.
        name: &'static str,
        /// Its value.
        value: String,
        /// What to try.
        advice: String,
    },
    /// The device found unusable routing input on this rank; nothing was sent in that epoch.
    #[error(
        "rank {rank}, dispatch {epoch}: {problem}; nothing was sent and peers went on; correct the routing and call again"
    )]
    Routing {
        /// The rank that reports.
        rank: Rank,
        /// Number of the dispatch or combine.
        epoch: u64,
        /// What is wrong, with values.
        problem: String,
    },
    /// An output was too small; nothing was written beyond it.
    #[error(
        "rank {rank}, epoch {epoch}: {what} needs {needed} rows and has {given}; pass an output of at least \
         {needed} rows, or build the context with that in own_output"
    )]
    Capacity {
        /// The rank that reports.
        rank: Rank,
        /// Number of the dispatch or combine.
        epoch: u64,
        /// What failed or lacks room.
        what: &'static str,
        /// Rows needed.
        needed: u64,
        /// Rows given.
        given: u64,
    },
    /// A peer's output was too small, so its experts' contributions are missing from this rank's sums.
    #[error(
        "rank {rank}, combine {epoch}: the sums lack rank {peer}'s experts, whose dispatch output overflowed; give rank {peer} a larger output"
    )]
    Incomplete {
        /// The rank that reports.
        rank: Rank,
        /// Number of the dispatch or combine.
        epoch: u64,
        /// The other rank.
        peer: Rank,
    },
    /// Phases were called out of order; nothing was sent.
    #[error("rank {rank}: {problem}; finish the receive of an epoch before the next send of the same kind")]
    Order {
        /// The rank that reports.
        rank: Rank,
        /// What is wrong, with values.
        problem: String,
    },
    /// A context or a new one over a world of a past generation, which this rank has left; nothing was enqueued.
    #[error(
        "rank {rank}: this is of generation {generation}, which ended for this rank when it entered generation {newest}; build a context over the world that regroup returned last"
    )]
    Generation {
        /// The rank that reports.
        rank: Rank,
        /// The generation of the world that was used.
        generation: u32,
        /// The newest generation that the rank has entered.
        newest: u32,
    },
    /// A progress deadline passed; the context is closed.
    #[error(
        "rank {rank} waited {waited_ms} ms for {site} of rank {peer} in epoch {epoch} (expected {expected:#x}, saw {seen:#x}); see what holds rank {peer} up, or raise the deadline{advice}"
    )]
    Timeout {
        /// The rank that reports.
        rank: Rank,
        /// The wait.
        site: &'static str,
        /// The other rank.
        peer: Rank,
        /// Number of the dispatch or combine.
        epoch: u64,
        /// Value waited for.
        expected: u64,
        /// Value last seen.
        seen: u64,
        /// Time waited, in milliseconds.
        waited_ms: u64,
        /// What else may be the cause: empty, or a clause that begins with a semicolon.
        advice: &'static str,
    },
    /// A peer is gone; the context is closed.
    #[error(
        "rank {rank} lost rank {peer}, {cause}, while waiting for {site} in epoch {epoch}; restart it, or build a new context without it"
    )]
    PeerLost {
        /// The rank that reports.
        rank: Rank,
        /// The other rank.
        peer: Rank,
        /// How that was noticed.
        cause: String,
        /// The wait.
        site: &'static str,
        /// Number of the dispatch or combine.
        epoch: u64,
    },
    /// The transport failed.
    #[error("transport {what}: {advice}")]
    Transport {
        /// What failed or lacks room.
        what: String,
        /// What to try.
        advice: String,
    },
    /// The device or its driver failed or lacks something.
    #[error("device: {what}: {advice}")]
    Device {
        /// What failed or lacks room.
        what: String,
        /// What to try.
        advice: String,
    },
    /// Ranks could not find, understand or wait for each other at start.
    #[error("bootstrap: {what}: {advice}")]
    Bootstrap {
        /// What failed or lacks room.
        what: String,
        /// What to try.
        advice: String,
    },
    /// An [`Interrupt`](crate::Interrupt) that is in force for the calling thread was raised while the call waited.
    #[error("interrupted in the wait \"{what}\": {left}")]
    Interrupted {
        /// The wait.
        what: &'static str,
        /// What state things are left in, and what to try.
        left: &'static str,
    },
}
