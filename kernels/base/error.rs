//! The one error type: every value that matters, and a sentence that says what to try.

use super::Rank;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Longest text of an error that peers are sent, in bytes.
const MAX_PEER_TEXT: usize = 4096;

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong. Every variant carries its values; its text is one sentence with advice.
///
/// [`is_fatal`](Error::is_fatal) shows how to go on: after an error that is not fatal the next correct call works;
/// after a fatal one the context, world, proxy or device that returned it cannot go on, and returns an error at every
/// call. The crate's page states what outputs hold after an error and how to go on: [Errors](crate#errors).
///
/// # Epochs
///
/// The epoch is the number of a call. Dispatches, combines and barriers of a context are counted separately, each from
/// 1 ([`Tuning::first_epoch`](crate::Tuning::first_epoch)). A call takes the next number as it runs, eager or replayed,
/// whatever error it ends in; only a call that was refused (`Argument`, `Order` of calls) takes none. So ranks that
/// make the same calls count alike. Where calls go in several [rounds](crate::AllToAll::rounds), `Routing` and
/// [`refused_sources`](crate::AllToAll::refused_sources) count calls, and the other errors count rounds.
///
/// Implementations of `Transport` make theirs by [`Error::argument`], [`Error::transport`] and [`Error::device`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument of a call is unusable; nothing was enqueued. Never fatal.
    #[error("argument {name} is {value}: {advice}")]
    #[non_exhaustive]
    Argument {
        /// What was given.
        name: &'static str,
        /// Its value.
        value: String,
        /// What to try.
        advice: String,
    },
    /// A configuration cannot be built; no context exists. Never fatal: what was there before goes on.
    #[error("configuration {name} is {value}: {advice}")]
    #[non_exhaustive]
    Config {
        /// What was given.
        name: &'static str,
        /// Its value.
        value: String,
        /// What to try.
        advice: String,
    },
    /// The device found unusable routing input on this rank, which sent no tokens in that dispatch. Never fatal. The
    /// dispatch took place, and its handle is to be combined as on the other ranks: see [Errors](crate#errors).
    #[error(
        "rank {rank}, dispatch {epoch}: {problem}; nothing was sent and peers went on; correct that in the next call"
    )]
    #[non_exhaustive]
    Routing {
        /// The rank that reports.
        rank: Rank,
        /// Number of the dispatch or combine: see [Epochs](Error#epochs).
        epoch: u64,
        /// What is wrong, with values.
        problem: String,
    },
    /// The output of a dispatch was too small on this rank. No row was written, and counts are 0. Never fatal. The
    /// dispatch took place, and its handle is to be combined as on the other ranks: see [Errors](crate#errors).
    #[error(
        "rank {rank}, epoch {epoch}: {what} needs {needed} rows and has {given}; pass an output of at least \
         {needed} rows, or build the context with in_place of that many rows"
    )]
    #[non_exhaustive]
    Capacity {
        /// The rank that reports.
        rank: Rank,
        /// Number of the dispatch or combine: see [Epochs](Error#epochs).
        epoch: u64,
        /// What failed or lacks room.
        what: &'static str,
        /// Rows that would have fitted this dispatch, as the layout counts its capacity: of the whole output, padding
        /// included, or in the masked layout of the fullest expert.
        needed: u64,
        /// Rows given: the layout's capacity, or `per_expert`.
        given: u64,
    },
    /// A rank's dispatch output was too small, so its experts' parts are missing from this rank's sums, which hold the
    /// other ranks' parts. Never fatal. Every rank with a token that has a row there gets this error; so does the rank
    /// with the small output itself, where `peer` is that rank. Of several missing ranks, one is named.
    #[error(
        "rank {rank}, combine {epoch}: the sums lack rank {peer}'s experts, whose dispatch output overflowed; give rank {peer} a larger output"
    )]
    #[non_exhaustive]
    Incomplete {
        /// The rank that reports.
        rank: Rank,
        /// Number of the dispatch or combine: see [Epochs](Error#epochs).
        epoch: u64,
        /// The rank whose output was too small; this rank itself among them.
        peer: Rank,
    },
    /// Phases were called out of order; nothing was sent. Fatal only where a call stayed unfinished for good.
    #[error("rank {rank}: {problem}; {}", order_advice(*fatal))]
    #[non_exhaustive]
    Order {
        /// The rank that reports.
        rank: Rank,
        /// What is wrong, with values.
        problem: String,
        /// Whether the context is closed.
        fatal: bool,
    },
    /// A context or a new one over a world of a past generation, which this rank has left; nothing was enqueued. Always
    /// fatal: the world stays past.
    #[error(
        "rank {rank}: this is of generation {generation}, which ended for this rank when it entered generation {newest}; build a context over the world that regroup returned last"
    )]
    #[non_exhaustive]
    Generation {
        /// The rank that reports.
        rank: Rank,
        /// The generation of the world that was used.
        generation: u32,
        /// The newest generation that the rank has entered.
        newest: u32,
    },
    /// A progress deadline passed; the context is closed. Always fatal.
    #[error(
        "rank {rank} waited {waited_ms} ms for {site} of rank {peer} in epoch {epoch} (expected {expected:#x}, saw {seen:#x}); see what holds rank {peer} up, or raise the deadline{advice}"
    )]
    #[non_exhaustive]
    Timeout {
        /// The rank that reports.
        rank: Rank,
        /// The wait.
        site: &'static str,
        /// The other rank.
        peer: Rank,
        /// Number of the dispatch or combine: see [Epochs](Error#epochs).
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
    /// A peer is gone; the context is closed. Always fatal.
    #[error(
        "rank {rank} lost rank {peer}, {cause}, while waiting for {site} in epoch {epoch}; restart it, or build a new context without it"
    )]
    #[non_exhaustive]
    PeerLost {
        /// The rank that reports.
        rank: Rank,
        /// The other rank.
        peer: Rank,
        /// How that was noticed.
        cause: String,
        /// The wait.
        site: &'static str,
        /// Number of the dispatch or combine: see [Epochs](Error#epochs).
        epoch: u64,
    },
    /// The transport failed. Fatal where it ended this rank's endpoint or proxy, and so the contexts that use it.
    #[error("transport {what}: {advice}")]
    #[non_exhaustive]
    Transport {
        /// What failed or lacks room.
        what: String,
        /// What to try.
        advice: String,
        /// Whether the endpoint or the proxy has ended.
        fatal: bool,
        /// The error that caused this one.
        source: Option<Source>,
    },
    /// The device or its driver failed or lacks something. Fatal where the device cannot be used any more, as after an
    /// illegal address, or where it ended this rank's proxy.
    #[error("device: {what}: {advice}")]
    #[non_exhaustive]
    Device {
        /// What failed or lacks room.
        what: String,
        /// What to try.
        advice: String,
        /// Whether the device or the proxy has ended.
        fatal: bool,
        /// The driver's code: a CUresult.
        code: Option<i32>,
        /// The error that caused this one.
        source: Option<Source>,
    },
    /// Ranks could not find, understand or wait for each other. Fatal where the world can hold no further collective;
    /// not where no world was formed, or where a peer reports a failure of its own.
    #[error("bootstrap: {what}: {advice}")]
    #[non_exhaustive]
    Bootstrap {
        /// What failed or lacks room.
        what: String,
        /// What to try.
        advice: String,
        /// Whether the world's collectives have ended.
        fatal: bool,
        /// The error that caused this one.
        source: Option<Source>,
    },
    /// An [`Interrupt`](crate::Interrupt) that is in force for the calling thread was raised while the call waited.
    /// Fatal where it ended the world's collectives.
    #[error("interrupted in the wait \"{what}\": {left}")]
    #[non_exhaustive]
    Interrupted {
        /// The wait.
        what: &'static str,
        /// The state in which things are left, and what to try.
        left: &'static str,
        /// Whether the world's collectives have ended.
        fatal: bool,
    },
}

fn order_advice(fatal: bool) -> &'static str {
    if fatal {
        "build a new context"
    } else {
        "receive a dispatch before its handle is used, and each half before the next send of its kind"
    }
}

impl Error {
    /// An argument `name` of value `value` that a call cannot take; `advice` is what to give instead.
    #[cold]
    pub fn argument(name: &'static str, value: impl ToString, advice: impl Into<String>) -> Error {
        Error::Argument { name, value: value.to_string(), advice: advice.into() }
    }

    /// A setting `name` of value `value` with which nothing can be built; `advice` is what to set instead.
    #[cold]
    pub fn config(name: &'static str, value: impl ToString, advice: impl Into<String>) -> Error {
        Error::Config { name, value: value.to_string(), advice: advice.into() }
    }

    /// A failure of a transport that can go on; see [`ending`](Error::ending).
    #[cold]
    pub fn transport(what: impl Into<String>, advice: impl Into<String>) -> Error {
        Error::Transport { what: what.into(), advice: advice.into(), fatal: false, source: None }
    }

    /// A failure of a device that can go on; see [`ending`](Error::ending).
    #[cold]
    pub fn device(what: impl Into<String>, advice: impl Into<String>) -> Error {
        Error::Device { what: what.into(), advice: advice.into(), fatal: false, code: None, source: None }
    }

    /// A failure among ranks that leaves the world usable, if there is one; see [`ending`](Error::ending).
    #[cold]
    pub fn bootstrap(what: impl Into<String>, advice: impl Into<String>) -> Error {
        Error::Bootstrap { what: what.into(), advice: advice.into(), fatal: false, source: None }
    }

    /// The wait `what` ended as an [`Interrupt`](crate::Interrupt) was raised; `left` names the state in which things
    /// are left, and what to try. See [`ending`](Error::ending).
    #[cold]
    pub fn interrupted(what: &'static str, left: &'static str) -> Error {
        Error::Interrupted { what, left, fatal: false }
    }

    /// The same error, fatal: whatever returns it cannot go on. Changes `Order`, `Transport`, `Device`, `Bootstrap` and
    /// `Interrupted`; each of the other variants is always fatal or never.
    #[must_use]
    pub fn ending(mut self) -> Error {
        match &mut self {
            Error::Order { fatal, .. }
            | Error::Transport { fatal, .. }
            | Error::Device { fatal, .. }
            | Error::Bootstrap { fatal, .. }
            | Error::Interrupted { fatal, .. } => *fatal = true,
            _ => {}
        }
        self
    }

    /// The same error, not fatal: the caller can go on, as what ended was only there for that call.
    pub(crate) fn passing(mut self) -> Error {
        match &mut self {
            Error::Transport { fatal, .. }
            | Error::Device { fatal, .. }
            | Error::Bootstrap { fatal, .. }
            | Error::Interrupted { fatal, .. } => *fatal = false,
            _ => {}
        }
        self
    }

    /// The same error with its cause, which [`source`](std::error::Error::source) then returns. Changes `Transport`,
    /// `Device` and `Bootstrap`; the other variants have no cause.
    #[must_use]
    pub fn caused_by(mut self, cause: impl std::error::Error + Send + Sync + 'static) -> Error {
        self.set_source(Some(Source::new(cause)));
        self
    }

    pub(crate) fn set_source(&mut self, cause: Option<Source>) {
        match self {
            Error::Transport { source, .. } | Error::Device { source, .. } | Error::Bootstrap { source, .. } => {
                *source = cause;
            }
            _ => {}
        }
    }

    /// The error's text, cut to what peers are sent: errors of a caller's own transport or all-gather may be of any
    /// length.
    pub(crate) fn text_for_peers(&self) -> String {
        let mut text = self.to_string();
        text.truncate(text.floor_char_boundary(MAX_PEER_TEXT));
        text
    }

    /// Whether the context, world, proxy or device that returned it cannot go on: it returns an error at every further
    /// call, and a new one has to be made. After any other error the next correct call works.
    pub fn is_fatal(&self) -> bool {
        match self {
            Error::Argument { .. }
            | Error::Config { .. }
            | Error::Routing { .. }
            | Error::Capacity { .. }
            | Error::Incomplete { .. } => false,
            Error::Generation { .. } | Error::Timeout { .. } | Error::PeerLost { .. } => true,
            Error::Order { fatal, .. }
            | Error::Transport { fatal, .. }
            | Error::Device { fatal, .. }
            | Error::Bootstrap { fatal, .. }
            | Error::Interrupted { fatal, .. } => *fatal,
        }
    }

    /// The CUDA driver's code, a CUresult, where a call of the driver failed.
    pub fn driver_code(&self) -> Option<i32> {
        match self {
            Error::Device { code, .. } => *code,
            _ => None,
        }
    }
}

/// The cause of an [`Error`], such as a [`std::io::Error`]. Two are equal if their texts are.
#[derive(Clone)]
pub struct Source(Arc<dyn std::error::Error + Send + Sync + 'static>);

impl Source {
    pub(crate) fn new(cause: impl std::error::Error + Send + Sync + 'static) -> Source {
        Source(Arc::new(cause))
    }
}

impl Deref for Source {
    type Target = dyn std::error::Error + Send + Sync + 'static;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl PartialEq for Source {
    fn eq(&self, other: &Source) -> bool {
        self.0.to_string() == other.0.to_string()
    }
}

impl Eq for Source {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;

    const OWN: Rank = Rank(71);
    const PEER: Rank = Rank(72);

    /// One of each variant, with whether it is fatal as it is, whether it can be made so, and words that its text must
    /// contain.
    fn all() -> Vec<(Error, bool, bool, &'static [&'static str])> {
        let order = Error::Order { rank: OWN, problem: "dispatch 9 twice".into(), fatal: false };
        let timeout = Error::Timeout {
            rank: OWN,
            site: "routing metadata",
            peer: PEER,
            epoch: 5,
            expected: 0xabc,
            seen: 0xdef,
            waited_ms: 1234,
            advice: "; mind the order",
        };
        let lost = Error::PeerLost {
            rank: OWN,
            peer: PEER,
            cause: "which hung up".into(),
            site: "routing metadata",
            epoch: 5,
        };
        vec![
            (Error::argument("pitch", 17, "give 16"), false, false, &["argument pitch is 17", "give 16"]),
            (Error::config("hidden", "65", "give 64"), false, false, &["configuration hidden is 65", "give 64"]),
            (
                Error::Routing { rank: OWN, epoch: 5, problem: "expert 99".into() },
                false,
                false,
                &["rank 71", "dispatch 5", "expert 99", "correct that in the next call"],
            ),
            (
                Error::Capacity { rank: OWN, epoch: 5, what: "the output", needed: 33, given: 32 },
                false,
                false,
                &["rank 71", "epoch 5", "the output needs 33 rows and has 32", "at least 33 rows"],
            ),
            (
                Error::Incomplete { rank: OWN, epoch: 5, peer: PEER },
                false,
                false,
                &["rank 71", "combine 5", "give rank 72 a larger output"],
            ),
            (order, false, true, &["rank 71", "dispatch 9 twice", "receive a dispatch before its handle is used"]),
            (
                Error::Generation { rank: OWN, generation: 3, newest: 4 },
                true,
                false,
                &["rank 71", "generation 3", "generation 4", "build a context"],
            ),
            (
                timeout,
                true,
                false,
                &[
                    "rank 71",
                    "1234 ms",
                    "routing metadata of rank 72",
                    "epoch 5",
                    "0xabc",
                    "0xdef",
                    "deadline; mind the order",
                ],
            ),
            (lost, true, false, &["rank 71", "rank 72, which hung up", "routing metadata", "epoch 5", "restart it"]),
            (Error::transport("write 6", "reconnect"), false, true, &["transport write 6: reconnect"]),
            (Error::device("GPU 8", "reboot"), false, true, &["device: GPU 8: reboot"]),
            (Error::bootstrap("rank 2", "start it"), false, true, &["bootstrap: rank 2: start it"]),
            (Error::interrupted("gate", "go on"), false, true, &["the wait \"gate\": go on"]),
        ]
    }

    #[test]
    fn every_variant_has_its_values_and_what_to_try() {
        for (error, _, _, words) in all() {
            let text = error.to_string();
            words.iter().for_each(|word| assert!(text.contains(word), "«{text}» lacks «{word}»"));
        }
    }

    #[test]
    fn errors_that_end_a_context_are_fatal_and_others_are_not() {
        for (error, fatal, settable, _) in all() {
            assert_eq!(error.is_fatal(), fatal, "{error}");
            let ending = error.clone().ending();
            assert_eq!(ending.is_fatal(), fatal || settable, "{ending}");
            assert_eq!(ending == error, !settable, "{ending}");
        }
    }

    #[test]
    fn an_order_error_that_closes_the_context_advises_a_new_one() {
        let error = Error::Order { rank: OWN, problem: "launch 7".into(), fatal: true };
        assert_eq!(error.to_string(), "rank 71: launch 7; build a new context");
    }

    #[test]
    fn the_cause_is_found_with_its_type_and_compared_by_its_text() {
        let io = |text: &str| std::io::Error::new(std::io::ErrorKind::AddrInUse, text.to_owned());
        for (error, ..) in all() {
            assert!(error.source().is_none(), "{error}");
            let caused = error.clone().caused_by(io("taken"));
            assert_eq!(caused.to_string(), error.to_string());
            let has_one = matches!(error, Error::Transport { .. } | Error::Device { .. } | Error::Bootstrap { .. });
            let found = caused.source().and_then(|source| source.downcast_ref::<std::io::Error>());
            assert_eq!(found.map(std::io::Error::kind), has_one.then_some(std::io::ErrorKind::AddrInUse), "{error}");
            assert_eq!(caused, error.clone().caused_by(io("taken")));
            assert_eq!(caused != error.clone().caused_by(io("free")), has_one, "{error}");
            assert!(format!("{caused:?}").contains("taken") == has_one);
        }
    }

    #[test]
    fn only_errors_of_the_driver_have_its_code() {
        for (error, ..) in all() {
            assert_eq!(error.driver_code(), None, "{error}");
        }
        let (what, advice) = (String::new(), String::new());
        let error = Error::Device { what, advice, fatal: false, code: Some(700), source: None };
        assert_eq!(error.driver_code(), Some(700));
    }
}
