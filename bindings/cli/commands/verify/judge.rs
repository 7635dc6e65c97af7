//! Runs one configuration and judges its outcome against the reference.
//!
//! On the main thread; the configuration's ranks run on threads, or all on one thread under a seeded schedule.

use std::fmt;
use std::time::Duration;

use tokenyard::Error;

use crate::cli::cases::case::Case;
use crate::cli::cases::words::{ArenaWord, Check, DeviceWord, FaultWord, Launch, Word};
use crate::cli::out::Out;
use crate::cli::ranks::config;
use crate::cli::ranks::job::Job;
use crate::cli::ranks::places::Places;
use crate::cli::ranks::sample::{RankResult, Verdict};
use crate::cli::ranks::team::{self, Schedule};

/// Progress deadline of a configuration: small runs that take longer hang.
pub const TIMEOUT: Duration = Duration::from_secs(20);
/// Failures after which nothing more is run: each may have waited for its deadline.
pub const ENOUGH: usize = 5;

/// The outcome of a configuration.
pub enum Outcome {
    Right(Verdict),
    /// Refused as it must be.
    Refused(Error),
    /// Messages were tampered with, and the harm that this may do was seen.
    Harmed(Harm),
    Wrong(Vec<String>),
}

/// Harm that tampered messages may do.
#[derive(Debug, Clone, PartialEq)]
pub enum Harm {
    /// Outputs are wrong.
    Outputs,
    /// A call ended with an error.
    Ended(Error),
}

impl fmt::Display for Harm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Harm::Outputs => write!(f, "outputs are wrong"),
            Harm::Ended(error) => error.fmt(f),
        }
    }
}

/// The outcome of a configuration, and its schedule if it had one.
pub struct Judged {
    pub outcome: Outcome,
    pub schedule: Option<Schedule>,
}

/// Runs configurations and judges their outcomes.
#[derive(Clone, Copy)]
pub struct Judge<'a, 'w> {
    pub device: DeviceWord,
    pub timeout: Duration,
    /// Where arenas lie, if given.
    pub arena: Option<ArenaWord>,
    /// Where failures are printed.
    pub out: &'a Out<'w>,
}

impl Judge<'_, '_> {
    pub fn judge(&self, case: &Case) -> Judged {
        let (check, timeout) = (Check::All, self.timeout);
        let arena = match config::arena(self.arena, self.device, Launch::Threads, case) {
            Ok(arena) => arena,
            Err(refusal) => return Judged { outcome: Outcome::Wrong(vec![refusal.to_string()]), schedule: None },
        };
        let job = Job {
            case: case.clone(),
            warmup: 0,
            check,
            timeout,
            arena,
            allow_old_shm: false,
            places: Places::default(),
            measured: false,
            stages: false,
            host_ranks: case.world,
        };
        let (result, schedule) = team::run_reported(&job, self.device, &|_| {});
        if case.fault == FaultWord::Forged {
            return Judged { outcome: harmed(result, case), schedule };
        }
        let mut outcome = match (result, case.refused_by_design()) {
            (Err(error), Some(field)) if names(&error, field) => Outcome::Refused(error),
            (Err(error), _) => Outcome::Wrong(vec![error.to_string()]),
            (Ok(_), Some(field)) => {
                Outcome::Wrong(vec![format!("it ran, but should have been refused for its {field}")])
            }
            (Ok(ranks), None) => {
                let mut verdict = verdict_of(&ranks);
                if !compared_all(&ranks, case) {
                    verdict.mismatches += 1;
                    verdict.sentences.push(NOT_COMPARED.to_string());
                }
                if verdict.ok() { Outcome::Right(verdict) } else { Outcome::Wrong(verdict.sentences) }
            }
        };
        // A world that hung is wrong whatever its outcome.
        if let Some(report) = schedule.as_ref().and_then(|schedule| schedule.report.hang_report.as_ref()) {
            let sentence = format!("no thread could continue: {}", report.lines().collect::<Vec<_>>().join("; "));
            match &mut outcome {
                Outcome::Wrong(sentences) => sentences.push(sentence),
                _ => outcome = Outcome::Wrong(vec![sentence]),
            }
        }
        Judged { outcome, schedule }
    }

    /// Prints how to run the configuration again, and the findings.
    pub fn print_failure(&self, case: &Case, sentences: &[String]) {
        let deadline = match self.timeout {
            TIMEOUT => String::new(),
            given => format!(" --timeout-ms {}", given.as_millis()),
        };
        let arena = self.arena.map_or_else(String::new, |arena| format!(" --arena {}", arena.name()));
        say!(self.out, "FAILED: tokenyard verify --device {}{arena}{deadline} --replay '{case}'", self.device.name());
        sentences.iter().for_each(|sentence| say!(self.out, "  {sentence}"));
    }
}

/// The findings of all ranks.
fn verdict_of(ranks: &[RankResult]) -> Verdict {
    let mut verdict = Verdict::new();
    ranks.iter().for_each(|rank| verdict.merge(rank.verdict.clone()));
    verdict
}

const NOT_COMPARED: &str = "not every rank compared every iteration";

fn compared_all(ranks: &[RankResult], case: &Case) -> bool {
    ranks.len() == case.world && ranks.iter().all(|rank| rank.verdict.iterations == case.iters as u64)
}

/// With tampered messages only a defect is wrong; a crash or a hang does not come here.
fn harmed(result: tokenyard::Result<Vec<RankResult>>, case: &Case) -> Outcome {
    match result {
        Ok(ranks) if !compared_all(&ranks, case) => Outcome::Wrong(vec![NOT_COMPARED.to_string()]),
        Ok(ranks) => match verdict_of(&ranks) {
            // Callers use these indices, whatever the rows are.
            verdict if verdict.strays != 0 => Outcome::Wrong(verdict.sentences),
            verdict if verdict.ok() => Outcome::Right(verdict),
            _ => Outcome::Harmed(Harm::Outputs),
        },
        Err(error @ (Error::Device { .. } | Error::Config { .. } | Error::Argument { .. })) => {
            Outcome::Wrong(vec![error.to_string()])
        }
        Err(error) => Outcome::Harmed(Harm::Ended(error)),
    }
}

/// Whether the error is a refusal that names this field.
fn names(error: &Error, field: &str) -> bool {
    matches!(error, Error::Config { name, .. } | Error::Argument { name, .. } if *name == field)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_refused_for_another_reason_than_it_must_be_is_wrong() {
        let mut lines = Vec::new();
        let out = Out::new(&mut lines, None, false);
        let judge = Judge { device: DeviceWord::Cpu, timeout: TIMEOUT, arena: None, out: &out };
        let refused = Case { quantize: true, ..Case::default() };
        assert!(matches!(judge.judge(&refused).outcome, Outcome::Refused(_)));
        // Epochs are checked first.
        let other = Case { first_epoch: Some(u64::from(u32::MAX)), ..refused };
        let Outcome::Wrong(sentences) = judge.judge(&other).outcome else { panic!("any refusal will do") };
        assert!(sentences.iter().any(|sentence| sentence.contains("first_epoch")), "{sentences:?}");
    }
}
