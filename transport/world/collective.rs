//! State of one world's collectives: which ranks have arrived, with which payloads, and which never will.
//!
//! Place in the data path: none. Rank 0's bootstrap thread runs one for a world of processes; a world of
//! threads shares one behind a lock. A state machine: it never waits, locks, sends or reads a clock.
//!
//! ```text
//!            deposit by the last rank
//!   round s ------------------------------> round s+1, parts handed to all
//!      |
//!      +-- another name, another number, a rank gone, a rank giving up --> failed, for good
//! ```
//!
//! A failure is permanent because ranks could no longer agree on which round is next; survivors form a
//! new world.

use super::names::Names;
use crate::base::{Error, Rank, Source, quoted};

/// What a caller's error states, on any rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    pub what: String,
    pub advice: String,
    /// The system's error that caused it; peers receive only its text.
    pub source: Option<Source>,
}

impl Failure {
    pub(super) fn new(what: impl Into<String>, advice: impl Into<String>) -> Failure {
        Failure { what: what.into(), advice: advice.into(), source: None }
    }

    pub(super) fn caused_by(self, cause: std::io::Error) -> Failure {
        Failure { source: Some(Source::new(cause)), ..self }
    }

    /// The failure as the crate's error, where there is no world yet or the world goes on.
    pub(super) fn error(&self) -> Error {
        let mut error = Error::bootstrap(self.what.clone(), self.advice.clone());
        error.set_source(self.source.clone());
        error
    }

    /// The same, where the world can hold no further collective.
    pub(super) fn ending(&self) -> Error {
        self.error().ending()
    }
}

/// In `waited_ms` of a rank that gave up: the rank was interrupted.
pub(super) const INTERRUPTED: u64 = u64::MAX;

/// State after an interrupted collective, for its error.
pub(super) const COLLECTIVE_LEFT: &str =
    "the world's collectives end on all ranks, as they could not agree which one is next; form a new world";

/// How a rank went away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gone {
    /// Its process or connection ended without a goodbye.
    Lost,
    /// It dropped its world.
    Left,
}

/// The effect of a step on the round.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing to hand out yet.
    Open,
    /// All parts of round `seq`, by rank; the next round has begun.
    Complete { seq: u64, parts: Vec<Vec<u8>> },
    /// The world can hold no further collective.
    Failed(Failure),
}

/// State of the collectives of one world.
#[derive(Debug)]
pub(super) struct Collective {
    names: Names,
    seq: u64,
    name: Option<(Rank, String)>,
    parts: Vec<Option<Vec<u8>>>,
    gone: Vec<Option<Gone>>,
    failure: Option<Failure>,
    /// Why a rank may not come to this round.
    differing: Option<Failure>,
}

impl Collective {
    /// A collective for all ranks that have names, in round 0.
    pub(super) fn new(names: Names) -> Collective {
        let size = names.size();
        let (parts, gone) = (vec![None; size], vec![None; size]);
        Collective { names, seq: 0, name: None, parts, gone, failure: None, differing: None }
    }

    /// Why no collective can succeed any more.
    pub(super) fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Rank `rank` brings its part of round `seq`, which it calls `what`.
    pub(super) fn deposit(&mut self, rank: Rank, seq: u64, what: &str, payload: Vec<u8>) -> Verdict {
        if let Some(failure) = &self.failure {
            return Verdict::Failed(failure.clone());
        }
        // Errors have it, and a member may send any text.
        let what = quoted(what.as_bytes());
        if let Some(problem) = self.misfit(rank, seq, &what) {
            return self.fail(problem);
        }
        self.name.get_or_insert((rank, what));
        self.parts[rank.index()] = Some(payload);
        if self.parts.iter().any(Option::is_none) {
            return self.check_gone();
        }
        self.seq += 1;
        (self.name, self.differing) = (None, None);
        Verdict::Complete { seq, parts: self.parts.iter_mut().filter_map(Option::take).collect() }
    }

    /// Rank `rank` is gone; a round that waits for it fails now.
    pub(super) fn depart(&mut self, rank: Rank, how: Gone) -> Verdict {
        if let Some(slot) = self.gone.get_mut(rank.index()) {
            *slot = Some(how);
        }
        self.check_gone()
    }

    /// Rank `rank` waited out its deadline in round `seq`, or was interrupted in it; stale if that round is over.
    pub(super) fn give_up(&mut self, rank: Rank, seq: u64, waited_ms: u64) -> Verdict {
        if self.failure.is_some() || seq != self.seq {
            return Verdict::Open;
        }
        let absent = ranks(self.parts.len()).filter(|r| self.parts[r.index()].is_none());
        let absent: Vec<Rank> = absent.map(|r| self.names.of(r)).collect();
        let name = self.name.as_ref().map_or("", |(_, name)| name);
        let (rank, absent) = (self.names.of(rank), have(&absent, absent.len()));
        if waited_ms == INTERRUPTED {
            let what = format!("rank {rank} was interrupted in collective \"{name}\" while {absent} not arrived");
            return self.fail(Failure::new(what, "form a new world, or end"));
        }
        let what = format!("rank {rank} waited {waited_ms} ms in collective \"{name}\" and {absent} not arrived");
        if let Some(Failure { what: difference, advice, .. }) = self.differing.take() {
            return self.fail(Failure::new(format!("{what}: {difference}"), advice));
        }
        self.fail(Failure::new(what, "see what holds them up, or raise the timeout"))
    }

    /// A rank that the round waits for differs in what ranks must agree on. That fails the round `now`, or is part of
    /// the error of its deadline.
    pub(super) fn differ(&mut self, failure: Failure, now: bool) {
        if now {
            self.fail(failure);
        } else {
            self.differing = Some(failure);
        }
    }

    /// Ends the world's collectives for a reason found outside.
    pub(super) fn fail(&mut self, failure: Failure) -> Verdict {
        let failure = self.failure.get_or_insert(failure).clone();
        self.parts.iter_mut().for_each(|part| *part = None);
        Verdict::Failed(failure)
    }

    fn misfit(&self, rank: Rank, seq: u64, what: &str) -> Option<Failure> {
        let advice = "call the same collectives in the same order on all ranks";
        let part = self.parts.get(rank.index());
        let rank = self.names.of(rank);
        match part {
            None => Some(Failure::new(format!("rank {rank} is not of this world"), advice)),
            Some(part) if seq != self.seq || part.is_some() => {
                let problem = format!("rank {rank} brings collective number {seq} during number {}", self.seq);
                Some(Failure::new(problem, advice))
            }
            Some(_) => match &self.name {
                Some((first, name)) if name != what => {
                    let first = self.names.of(*first);
                    let problem =
                        format!("rank {rank} calls collective \"{what}\" while rank {first} calls \"{name}\"");
                    Some(Failure::new(problem, advice))
                }
                _ => None,
            },
        }
    }

    /// Fails a begun round that waits for a rank that is gone.
    fn check_gone(&mut self) -> Verdict {
        let Some((_, name)) = &self.name else {
            return Verdict::Open;
        };
        let awaited = ranks(self.parts.len())
            .filter(|rank| self.parts[rank.index()].is_none())
            .find_map(|rank| self.gone[rank.index()].map(|how| (self.names.of(rank), how)));
        match awaited {
            None => Verdict::Open,
            Some((rank, Gone::Lost)) => {
                let what =
                    format!("rank {rank} is lost (its process or host has gone) and collective \"{name}\" needs it");
                self.fail(Failure::new(what, "restart it and form a new world, or form one without it"))
            }
            Some((rank, Gone::Left)) => {
                let what = format!("rank {rank} has left the world and collective \"{name}\" needs it");
                self.fail(Failure::new(what, "keep every rank's world until all collectives are done"))
            }
        }
    }
}

fn ranks(size: usize) -> impl Iterator<Item = Rank> {
    (0..size as u32).map(Rank)
}

/// Longest list of ranks spelled out in a sentence.
pub(super) const RANKS_NAMED: usize = 16;

/// "rank 3 has", "ranks 1, 2 have", "ranks 0, 1, … and 40 more have": `shown` are the first of `total`.
pub(super) fn have(shown: &[Rank], total: usize) -> String {
    let shown = &shown[..shown.len().min(RANKS_NAMED)];
    let list = shown.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ");
    match total.saturating_sub(shown.len()) {
        0 if total == 1 => format!("rank {list} has"),
        0 => format!("ranks {list} have"),
        more => format!("ranks {list} and {more} more have"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(verdict: Verdict) -> String {
        match verdict {
            Verdict::Failed(failure) => failure.what,
            other => panic!("{other:?} where a failure was due"),
        }
    }

    #[test]
    fn parts_handed_out_in_order_of_arrival() {
        let mut collective = Collective::new(Names::all(3));
        assert_eq!(collective.deposit(Rank(2), 0, "a", vec![2]), Verdict::Open);
        assert_eq!(collective.deposit(Rank(0), 0, "a", vec![]), Verdict::Open);
        assert_eq!(
            collective.deposit(Rank(1), 0, "a", vec![1]),
            Verdict::Complete { seq: 0, parts: vec![vec![], vec![1], vec![2]] }
        );
        assert_eq!(collective.deposit(Rank(1), 1, "b", vec![]), Verdict::Open);
    }

    #[test]
    fn one_rank_arriving_twice_counted_as_two() {
        let mut collective = Collective::new(Names::all(2));
        collective.deposit(Rank(0), 0, "a", vec![]);
        assert!(problem(collective.deposit(Rank(0), 0, "a", vec![])).contains("rank 0 brings collective number 0"));
        assert!(problem(collective.deposit(Rank(1), 0, "a", vec![])).contains("rank 0"), "a failure is for good");
    }

    #[test]
    fn different_collectives_taken_for_the_same() {
        let mut collective = Collective::new(Names::all(2));
        collective.deposit(Rank(1), 0, "left", vec![]);
        let text = problem(collective.deposit(Rank(0), 0, "right", vec![]));
        assert_eq!(text, "rank 0 calls collective \"right\" while rank 1 calls \"left\"");
    }

    #[test]
    fn a_round_that_waits_for_the_dead() {
        let mut collective = Collective::new(Names::all(3));
        collective.deposit(Rank(2), 0, "a", vec![]);
        assert_eq!(collective.depart(Rank(2), Gone::Lost), Verdict::Open, "its part is here");
        collective.deposit(Rank(0), 0, "a", vec![]);
        assert!(matches!(collective.deposit(Rank(1), 0, "a", vec![]), Verdict::Complete { .. }));
        assert!(problem(collective.deposit(Rank(0), 1, "b", vec![])).contains("rank 2 is lost"));
    }

    #[test]
    fn a_stale_deadline_that_ends_the_next_round() {
        let mut collective = Collective::new(Names::all(2));
        collective.deposit(Rank(0), 0, "a", vec![]);
        collective.deposit(Rank(1), 0, "a", vec![]);
        assert_eq!(collective.give_up(Rank(0), 0, 10), Verdict::Open);
        assert!(collective.failure().is_none());
    }

    #[test]
    fn a_deadline_that_names_those_who_came() {
        let mut collective = Collective::new(Names::all(4));
        collective.deposit(Rank(1), 0, "a", vec![]);
        let text = problem(collective.give_up(Rank(1), 0, 10));
        assert_eq!(text, "rank 1 waited 10 ms in collective \"a\" and ranks 0, 2, 3 have not arrived");
    }

    #[test]
    fn a_list_of_thousands_in_one_sentence() {
        let all: Vec<Rank> = ranks(2000).collect();
        assert!(have(&all, 2000).ends_with("15 and 1984 more have"));
        assert_eq!(have(&all[4..5], 1), "rank 4 has");
    }
}
