//! Planned faults of a verification: in one iteration one rank's output is too small, or its routing is unusable.
//!
//! Before and after the data path; pure. Every rank derives the same fault from the case alone, and so the errors that
//! the library must return to it and the rows that must be missing. All other iterations must be right.

use std::collections::BTreeSet;

use tokenyard::{Error, Rank};

use crate::cli::cases::case::Case;
use crate::cli::cases::inputs::{Counter, Use};
use crate::cli::cases::words::{FaultWord, LayoutWord, Mode};
use crate::cli::reference::{Faults, Report, SourceRank, Spec, bad_routing, dropped_rows, expected_dispatch};

/// The planned fault of one iteration, if any.
#[derive(Debug, Clone, Default)]
pub struct Planned {
    /// The reference's view of the fault.
    faults: Faults,
    /// By rank: what its calls lack of ranks that are missing.
    missing: Vec<Lacking>,
    /// The rank whose output is too small: an error, unless rows without room are left out.
    overflow: Option<Overflow>,
    /// Room that this rank's output has if it is to fit exactly.
    exact: Option<usize>,
}

/// Which sources' rows do not come to a rank, and which ranks add nothing to its sums.
#[derive(Debug, Clone, Default)]
struct Lacking {
    sources: Vec<bool>,
    owners: Vec<bool>,
}

impl Lacking {
    fn of(case: &Case, rank: usize) -> Lacking {
        Lacking { sources: case.sources_missing_from(rank), owners: case.owners_missing_from(rank) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Overflow {
    rank: usize,
    needed: usize,
    given: usize,
}

/// An expected error, without its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Routing,
    Capacity { needed: u64, given: u64 },
    Incomplete { peer: usize },
    Other,
}

impl Kind {
    fn of(error: &Error) -> Kind {
        match error {
            Error::Routing { .. } => Kind::Routing,
            Error::Capacity { needed, given, .. } => Kind::Capacity { needed: *needed, given: *given },
            Error::Incomplete { peer, .. } => Kind::Incomplete { peer: peer.index() },
            _ => Kind::Other,
        }
    }
}

/// Whether a context stays usable after this error.
pub fn is_passing(error: &Error) -> bool {
    Kind::of(error) != Kind::Other
}

impl Planned {
    /// Draws the fault of this iteration; unusable routing is put into `sources`.
    pub fn draw(case: &Case, spec: &Spec, sources: &mut [SourceRank], iteration: usize) -> Planned {
        let mut dice = Counter::new(case.seed, Use::Choice, u64::MAX - 4, 0, 0);
        // An iteration that is not the last.
        let at = dice.below(case.iters.saturating_sub(1));
        let first = dice.below(case.world);
        let missing: Vec<_> = (0..case.world).map(|rank| Lacking::of(case, rank)).collect();
        if iteration != at {
            return Planned { missing, ..Planned::default() };
        }
        let ranks = (0..case.world).map(|i| (first + i) % case.world);
        let planned = match case.fault {
            FaultWord::None | FaultWord::Forged => Planned::default(),
            FaultWord::Routing => spoil(case, spec, sources, ranks, &mut dice),
            FaultWord::Overflow => shrink(case, spec, sources, ranks, &mut dice),
        };
        Planned { missing, ..planned }
    }

    /// The reference's view of what a rank's calls lack.
    pub fn faults_of(&self, rank: usize) -> Faults {
        with_missing(&self.faults, &self.missing[rank])
    }

    /// Has the output of `rank` fit exactly, unless it is to be too small. `sources` are those of all ranks.
    pub fn fit(&mut self, spec: &Spec, sources: &[SourceRank], rank: usize) {
        self.exact = Some(expected_dispatch(spec, sources, &self.faults_of(rank), rank).needed);
    }

    /// Whether the output of `rank` has the room that it needs.
    pub fn fits(&self, rank: usize) -> bool {
        self.overflow.is_none_or(|o| o.rank != rank)
    }

    /// Room that a rank's output claims to have.
    pub fn capacity(&self, case: &Case, rank: usize) -> usize {
        let small = self.overflow.filter(|o| o.rank == rank).map(|o| o.given);
        small.or(self.exact).unwrap_or_else(|| case.capacity())
    }

    /// The reference's view of one rank's output.
    pub fn spec(&self, case: &Case, spec: &Spec, rank: usize) -> Spec {
        Spec { layout: case.reference_layout(self.capacity(case, rank)), ..spec.clone() }
    }

    /// The ranks whose routing is unusable.
    pub fn refusing(&self) -> impl Iterator<Item = usize> + '_ {
        self.faults.silent.iter().enumerate().filter(|(_, silent)| **silent).map(|(rank, _)| rank)
    }

    /// The errors that a rank must get.
    fn expected(&self, spec: &Spec, sources: &[SourceRank], rank: usize) -> Vec<Kind> {
        let mut kinds = Vec::new();
        if self.faults.is_silent(rank) {
            kinds.push(Kind::Routing);
        }
        if let Some(Overflow { rank: full, needed, given }) = self.overflow.filter(|_| !spec.drop_overflow) {
            if full == rank {
                kinds.push(Kind::Capacity { needed: needed as u64, given: given as u64 });
            }
            if sends_to(spec, &sources[rank], full) && !self.missing[rank].owners[full] {
                kinds.push(Kind::Incomplete { peer: full });
            }
        }
        kinds
    }
}

/// Faults, and ranks that send nothing and add nothing.
fn with_missing(faults: &Faults, lacking: &Lacking) -> Faults {
    let either = |faulty: &[bool], missing: &[bool]| {
        let of = |(rank, missing): (usize, &bool)| *missing || faulty.get(rank).copied().unwrap_or(false);
        missing.iter().enumerate().map(of).collect()
    };
    let silent = either(&faults.silent, &lacking.sources);
    let overflowed = either(&faults.overflowed, &lacking.owners);
    Faults { silent, overflowed, dropped: faults.dropped.clone() }
}

/// Compares the refusing ranks that a context has reported so far (`seen`, each with the epoch of its dispatch) with
/// the expected ones: all ranks whose routing was unusable, except this rank itself.
pub fn check_refused(refusing: &BTreeSet<usize>, rank: usize, seen: &[(Rank, u64)]) -> Report {
    let expected: Vec<usize> = refusing.iter().copied().filter(|&other| other != rank).collect();
    let mut reported: Vec<usize> =
        seen.iter().filter(|(_, epoch)| *epoch != 0).map(|(other, _)| other.index()).collect();
    reported.sort_unstable();
    let mut report = Report { compared: expected.len() as u64, ..Report::default() };
    if expected != reported {
        report.mismatches = expected.len().max(reported.len()) as u64;
        report.sentences =
            vec![format!("rank {rank} should have reported refusals of the ranks {expected:?}, and reported {seen:?}")];
    }
    report
}

/// Compares the errors that a rank got while these iterations ran with the expected errors.
pub fn check_errors(planned: &[(&Planned, &[SourceRank])], spec: &Spec, rank: usize, seen: &[Error]) -> Report {
    let mut expected: Vec<Kind> = planned.iter().flat_map(|(p, sources)| p.expected(spec, sources, rank)).collect();
    let mut got: Vec<Kind> = seen.iter().map(Kind::of).collect();
    expected.sort_unstable();
    got.sort_unstable();
    let mut report = Report { compared: expected.len() as u64, ..Report::default() };
    if expected != got {
        report.mismatches = expected.len().max(got.len()) as u64;
        let words: Vec<String> = seen.iter().map(ToString::to_string).collect();
        report.sentences = vec![format!("rank {rank} should have seen the errors {expected:?}, and saw {words:?}")];
    }
    report
}

fn sends_to(spec: &Spec, source: &SourceRank, rank: usize) -> bool {
    let here = |token: usize, k: usize| source.expert(spec, token, k).and_then(|e| spec.rank_of(e)) == Some(rank);
    (0..source.tokens).any(|token| (0..spec.top_k).any(|k| here(token, k)))
}

/// One rank that has tokens names an expert that does not exist, or an expert twice.
fn spoil(
    case: &Case,
    spec: &Spec,
    sources: &mut [SourceRank],
    mut ranks: impl Iterator<Item = usize>,
    dice: &mut Counter,
) -> Planned {
    // A rank that exists is never wrong.
    let spoils = |rank: &usize| sources[*rank].tokens > 0 && !sources[*rank].by_rank;
    let Some(rank) = ranks.find(spoils) else { return Planned::default() };
    let source = &mut sources[rank];
    let place = dice.below(source.tokens) * case.top_k;
    let k = dice.below(case.columns());
    let other = place + (k + 1) % case.columns();
    source.topk_idx[place + k] = match dice.below(4) {
        0 => -2,
        1 if case.columns() > 1 && source.topk_idx[other] >= 0 => source.topk_idx[other],
        2 => i64::from(i32::MAX),
        _ => case.experts as i64,
    };
    let mut planned = Planned::default();
    if bad_routing(spec, source).is_some() {
        planned.faults.silent = (0..case.world).map(|r| r == rank).collect();
    }
    planned
}

/// One rank that needs rows gets an output with fewer. Not for captured calls, whose output is fixed.
fn shrink(
    case: &Case,
    spec: &Spec,
    sources: &[SourceRank],
    ranks: impl Iterator<Item = usize>,
    dice: &mut Counter,
) -> Planned {
    if case.mode == Mode::Graph {
        return Planned::default();
    }
    for rank in ranks {
        let missing = with_missing(&Faults::default(), &Lacking::of(case, rank));
        let needed = expected_dispatch(spec, sources, &missing, rank).needed;
        if needed > 0 {
            // Mostly one row too few.
            let given = (needed - 1).saturating_sub(dice.below(3) * dice.below(needed));
            let aligned = spec.drop_overflow && case.layout == LayoutWord::Contiguous;
            let given = if aligned { given - given % case.align } else { given };
            let small = Spec { layout: case.reference_layout(given), ..spec.clone() };
            let faults = if spec.drop_overflow {
                Faults { dropped: dropped_rows(&small, sources, &missing, rank), ..Faults::default() }
            } else {
                Faults { overflowed: (0..case.world).map(|r| r == rank).collect(), ..Faults::default() }
            };
            return Planned { faults, overflow: Some(Overflow { rank, needed, given }), ..Planned::default() };
        }
    }
    Planned::default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(case: &Case, tokens: usize) -> Vec<SourceRank> {
        let router = case.router().unwrap();
        let of = |rank| case.source(rank, tokens, router.draw(0, rank, tokens));
        (0..case.world).map(of).collect()
    }

    fn planned(case: &Case, tokens: usize) -> Vec<(Planned, Vec<SourceRank>)> {
        let spec = case.spec(0);
        let of = |i| {
            let mut made = sources(case, tokens);
            (Planned::draw(case, &spec, &mut made, i), made)
        };
        (0..case.iters).map(of).collect()
    }

    #[test]
    fn a_fault_strikes_one_rank_in_one_iteration_that_is_not_the_last() {
        for (seed, fault) in (0..60).flat_map(|seed| [(seed, FaultWord::Overflow), (seed, FaultWord::Routing)]) {
            let case = Case { seed, fault, world: 3, iters: 4, max_tokens: 5, ..Case::default() };
            let spec = case.spec(0);
            let all = planned(&case, 5);
            let errors = |i: usize| -> Vec<Vec<Kind>> {
                (0..case.world).map(|rank| all[i].0.expected(&spec, &all[i].1, rank)).collect()
            };
            let struck: Vec<usize> = (0..case.iters).filter(|&i| errors(i).iter().any(|e| !e.is_empty())).collect();
            assert_eq!(struck.len(), 1, "{seed} {fault:?}");
            assert!(struck[0] + 1 < case.iters);
            let own = |kinds: &&Vec<Kind>| kinds.iter().any(|k| matches!(k, Kind::Routing | Kind::Capacity { .. }));
            assert_eq!(errors(struck[0]).iter().filter(own).count(), 1);
        }
    }

    #[test]
    fn without_tokens_nothing_goes_wrong_and_errors_that_come_all_the_same_are_counted() {
        let case = Case { fault: FaultWord::Overflow, world: 2, iters: 2, ..Case::default() };
        let all = planned(&case, 0);
        let lists: Vec<(&Planned, &[SourceRank])> = all.iter().map(|(p, s)| (p, s.as_slice())).collect();
        assert!(check_errors(&lists, &case.spec(0), 1, &[]).ok());
        let error = Error::Incomplete { rank: tokenyard::Rank(1), epoch: 1, peer: tokenyard::Rank(0) };
        let report = check_errors(&lists, &case.spec(0), 1, &[error]);
        assert_eq!(report.mismatches, 1);
        assert!(report.sentences[0].contains("rank 1 should have seen"), "{}", report.sentences[0]);
    }

    #[test]
    fn refusals_must_be_reported_of_every_other_rank_that_refused_and_of_no_other() {
        let refusing = BTreeSet::from([1, 3]);
        let (one, three) = ((Rank(1), 7), (Rank(3), 9));
        assert!(check_refused(&refusing, 0, &[three, one]).ok());
        assert!(check_refused(&refusing, 3, &[one]).ok());
        assert_eq!(check_refused(&BTreeSet::new(), 2, &[]).mismatches, 0);
        for seen in [vec![one], vec![one, three, (Rank(2), 1)], vec![one, (Rank(3), 0)], Vec::new()] {
            let report = check_refused(&refusing, 0, &seen);
            assert!(report.mismatches > 0 && report.sentences[0].contains("the ranks [1, 3]"), "{seen:?}");
        }
    }

    #[test]
    fn every_kind_of_fault_strikes_every_rank_and_iteration_equally_often() {
        let alike = |what: &str, drawn: &[usize], kinds: usize| {
            let mean = drawn.len() as f64 / kinds as f64;
            for kind in 0..kinds {
                let count = drawn.iter().filter(|drawn| **drawn == kind).count() as f64;
                assert!((count - mean).abs() < 4.5 * mean.sqrt(), "{what} {kind}: {count} times, and not {mean}");
            }
            assert!(drawn.iter().all(|drawn| *drawn < kinds), "{what}: {drawn:?}");
        };
        let [mut overflows, mut refusals, mut at] = [Vec::new(), Vec::new(), Vec::new()];
        let (mut kinds, mut places, mut short, mut by_one) = (Vec::new(), Vec::new(), 0, 0.0);
        for (seed, fault) in (0..600).flat_map(|seed| [(seed, FaultWord::Overflow), (seed, FaultWord::Routing)]) {
            let case = Case { seed, fault, world: 3, iters: 4, max_tokens: 5, ..Case::default() };
            let (spec, clean) = (case.spec(0), sources(&case, 5));
            for i in 0..4 {
                let mut made = clean.clone();
                let planned = Planned::draw(&case, &spec, &mut made, i);
                if let Some(Overflow { rank, needed, given }) = planned.overflow {
                    overflows.push(rank);
                    at.push(i);
                    // One row is lacking, or as many more as the product of a number below 3 and one below the needed.
                    assert!(given < needed && planned.capacity(&case, rank) == given);
                    short += usize::from(given + 1 < needed);
                    by_one += 1.0 / 3.0 + 2.0 / 3.0 / needed as f64;
                }
                for rank in planned.refusing() {
                    refusals.push(rank);
                    let changed: Vec<usize> =
                        (0..10).filter(|at| made[rank].topk_idx[*at] != clean[rank].topk_idx[*at]).collect();
                    assert_eq!(changed.len(), 1);
                    places.push(changed[0]);
                    kinds.push(match made[rank].topk_idx[changed[0]] {
                        -2 => 0,
                        8 => 1,
                        2_147_483_647 => 2,
                        twin if twin == clean[rank].topk_idx[changed[0] ^ 1] => 3,
                        other => panic!("a choice became {other}"),
                    });
                }
            }
        }
        assert_eq!((overflows.len(), refusals.len()), (600, 600));
        alike("an overflow of rank", &overflows, 3);
        alike("a refusal of rank", &refusals, 3);
        alike("iteration", &at, 3);
        alike("the kind", &kinds, 4);
        alike("the choice", &places, 10);
        let off = (600 - short) as f64 - by_one;
        assert!(off.abs() < 50.0, "{short} outputs lack several rows, and {by_one} should lack one");
    }
}
