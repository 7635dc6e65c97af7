//! `tokenyard verify`: random configurations, three iterations or more each, every one compared with the reference.
//!
//! On the main thread; each configuration's ranks run on threads, or all on one under a seeded schedule. What a
//! configuration is follows from its seed alone; a failure prints it whole, so that it can be run again and changed.

use std::fmt;
use std::process::ExitCode;
use std::time::Duration;

use tokenyard::Error;

use super::args::{Check, VerifyArgs};
use super::case::Case;
use super::config::{self, note_sharing, or_here};
use super::draw::{RANKS, as_asked, draw};
use super::rank::Job;
use super::report::Progress;
use super::sample::{RankResult, Verdict};
use super::schedules::schedules;
use super::tally::Tally;
use super::team::{self, Schedule};
use super::usage::Refusal;
use super::words::{ArenaWord, DeviceWord, FaultWord, Launch, Word};

/// Configurations by default.
const SEEDS: usize = 100;
/// From so many on, every pair of values occurs, if need be in configurations beyond.
const ALL_PAIRS: usize = 500;
/// Seeds that are looked at for a pair that is still missing.
const SEARCH: u64 = 20_000;
/// Progress deadline of a configuration: small runs that take longer hang.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Failures after which no more is run: each may have waited for its deadline.
pub const ENOUGH: usize = 5;

/// Models' full sizes, for `--full`.
const FULL: [&str; 10] = [
    "world=8,hidden=7168,experts=256,top_k=8,dtype=fp8,scales=f32,tokens=128,max_tokens=128,routing=v3-groups,iters=3",
    "world=8,hidden=7168,experts=384,top_k=8,dtype=fp8,scales=ue8m0,quantize=yes,scale_order=column,align=128,\
     zero_padding=yes,tokens=64,max_tokens=64,iters=3",
    "world=8,hidden=4096,experts=128,top_k=8,layout=token,partial=fp32,out_dtype=fp32,tokens=128,max_tokens=128,iters=3,\
     mode=split",
    "world=4,hidden=2880,experts=128,top_k=4,layout=masked,weights=combine,ragged=yes,tokens=128,max_tokens=128,iters=3",
    "world=8,hidden=7168,experts=256,top_k=8,dtype=fp8,scales=f32,partial=fp8,tokens=64,max_tokens=64,routing=v3-groups,\
     iters=3",
    "world=4,hidden=2944,experts=128,top_k=4,combine_dtype=fp16,out_dtype=fp16,layout=token,partial=fp8,accumulate=yes,\
     ragged=yes,tokens=128,max_tokens=128,mode=split,iters=3",
    "world=8,hidden=6144,experts=8,top_k=2,accumulate=yes,ragged=yes,device_count=yes,mode=graph,tokens=128,max_tokens=160,\
     routing=zipf:1.2,iters=3",
    // META in several tiles: so many experts leave room for few tokens in a block's bitmap.
    "world=2,hidden=64,experts=4000,top_k=4,tokens=300,max_tokens=300,iters=2",
    // The same, with a faulty choice in one of them.
    "world=3,hidden=64,experts=12,top_k=3,tokens=160,max_tokens=160,meta_tile=32,fault=routing,iters=6",
    // Many ranks of few blocks, some of which send apart from the others.
    "world=6,sms=4,hidden=128,experts=24,top_k=4,tokens=70,max_tokens=70,meta_tile=32,iters=4",
];

/// The same over several nodes.
const FULL_NODES: [&str; 5] = [
    "world=8,nodes=4+4,hidden=7168,experts=256,top_k=8,dtype=fp8,scales=f32,quantize=yes,tokens=128,max_tokens=128,\
     routing=v3-groups,network=calm,iters=3",
    "world=8,nodes=3+5,hidden=7168,experts=384,top_k=8,dtype=fp8,scales=ue8m0,scale_order=column,align=128,\
     zero_padding=yes,chunk_rows=8,nics=4,tokens=64,max_tokens=64,network=calm,link=efa-p5,iters=3",
    "world=8,nodes=2+2+4,hidden=2880,experts=128,top_k=4,layout=masked,weights=combine,ragged=yes,chunk_rows=16,\
     tokens=64,max_tokens=64,mode=split,iters=3",
    "world=8,nodes=3+5,hidden=7168,experts=256,top_k=8,dtype=fp8,scales=f32,partial=fp8,weights=combine,chunk_rows=8,\
     wave_tokens=40,tokens=64,max_tokens=64,routing=v3-groups,iters=3",
    "world=4,nodes=2+2,hidden=64,experts=4000,top_k=4,tokens=300,max_tokens=300,wave_tokens=70,ahead=2,iters=4",
];

/// Runs the configurations. Success: all were right, or refused as they must be.
///
/// # Errors
/// Unusable arguments.
pub fn verify(args: &VerifyArgs) -> Result<ExitCode, Refusal> {
    if args.schedules.is_some() && args.device == Some(DeviceWord::Cuda) {
        let advice = "only the CPU device runs seeded schedules; give cpu, or leave it out";
        return Err(Refusal::of("--device", DeviceWord::Cuda.name(), advice));
    }
    // Schedules alone need no GPU, and do not look for one.
    let only_schedules = args.schedules.is_some() && args.seeds.is_none();
    let device = if only_schedules { DeviceWord::Cpu } else { or_here(args.device)? };
    let timeout = args.timeout_ms.map_or(TIMEOUT, |ms| Duration::from_millis(ms as u64));
    let judge = Judge { device, timeout, arena: args.arena };
    if let Some(text) = &args.replay {
        let drawn = [
            ("--seeds", args.seeds.is_some()),
            ("--schedules", args.schedules.is_some()),
            ("--seed", args.seed.is_some()),
            ("--quantize", args.quantize),
            ("--own-output", args.own_output),
            ("--full", args.full),
        ];
        if let Some((name, _)) = drawn.iter().find(|(_, given)| *given) {
            return Err(Refusal::of("--replay", text, format!("it says all of what runs; leave {name} out")));
        }
        return replay(text, &judge);
    }
    let first = args.seed.unwrap_or(1);
    let mut right = true;
    if let Some(count) = args.schedules {
        right &= schedules(count, first, args, &Judge { device: DeviceWord::Cpu, ..judge });
    }
    if !only_schedules {
        right &= seeds(args, first, judge)?;
    }
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the random configurations, and full sizes if asked for; whether all were right.
fn seeds(args: &VerifyArgs, first: u64, judge: Judge) -> Result<bool, Refusal> {
    note_sharing(judge.device, RANKS);
    let count = args.seeds.unwrap_or(SEEDS);
    let mut session = Session { judge, bar: Progress::new(), tally: Tally::default(), ..Session::default() };
    for i in 0..count {
        session.bar.show("verify", i, count);
        let drawn = draw(first.wrapping_add(i as u64), judge.device);
        session.run(&as_asked(drawn, args.quantize, args.own_output));
    }
    let all_pairs = count >= ALL_PAIRS && !args.quantize && !args.own_output;
    if all_pairs {
        session.run_missing_pairs(first.wrapping_add(count as u64));
    }
    for text in FULL.iter().chain(&FULL_NODES).filter(|_| args.full) {
        let case = Case::parse(text)?;
        session.bar.clear();
        say!("full size: {case}");
        session.run(&case);
    }
    session.bar.clear();
    say!("{}\n{}", session.tally.table(), session.tally.nodes_line());
    say!("{} overflows, {} refused routings seen", session.verdict.overflows, session.verdict.refusals);
    say!("{} configurations run on {}, {} failed", session.run, judge.device.name(), session.failures);
    let missing = if all_pairs { session.tally.missing() } else { Vec::new() };
    missing.iter().for_each(|pair| say!("never drawn: {pair}"));
    Ok(session.failures == 0 && missing.is_empty())
}

fn replay(text: &str, judge: &Judge) -> Result<ExitCode, Refusal> {
    let case = Case::parse(text)?;
    if case.refused_by_design().is_none() {
        case.check()?;
    }
    if case.fault == FaultWord::Forged && judge.device == DeviceWord::Cuda {
        let advice = "only worlds on one thread tamper with messages; give cpu";
        return Err(Refusal::of("--device", DeviceWord::Cuda.name(), advice));
    }
    note_sharing(judge.device, case.world);
    let Judged { outcome, schedule } = judge.judge(&case);
    match &outcome {
        Outcome::Right(verdict) => say!("right: {} elements compared", verdict.compared),
        Outcome::Refused(error) => say!("refused by design: {error}"),
        Outcome::Harmed(harm) => say!("harmed by what was tampered with: {harm}"),
        Outcome::Wrong(sentences) => sentences.iter().for_each(|s| say!("wrong: {s}")),
    }
    if let Some(schedule) = schedule {
        say!("schedule {:016x}, {} switches", schedule.report.trace_hash, schedule.report.switches);
    }
    Ok(if matches!(outcome, Outcome::Wrong(_)) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

#[derive(Default)]
struct Session {
    judge: Judge,
    bar: Progress,
    tally: Tally,
    verdict: Verdict,
    failures: usize,
    run: usize,
}

impl Session {
    /// Runs a configuration, unless enough have failed.
    fn run(&mut self, case: &Case) {
        if self.failures >= ENOUGH {
            return;
        }
        self.run += 1;
        let outcome = self.judge.judge(case).outcome;
        self.tally.count(case, matches!(outcome, Outcome::Refused(_)));
        match outcome {
            Outcome::Right(verdict) => self.verdict.merge(verdict),
            Outcome::Refused(_) | Outcome::Harmed(_) => {}
            Outcome::Wrong(sentences) => {
                self.failures += 1;
                self.bar.clear();
                self.judge.print_failure(case, &sentences);
            }
        }
    }

    /// Runs further seeds until every pair of values has occurred.
    fn run_missing_pairs(&mut self, first: u64) {
        for offset in 0..SEARCH {
            if self.tally.missing().is_empty() {
                return;
            }
            let case = draw(first.wrapping_add(offset), self.judge.device);
            if self.tally.is_news(&case) {
                self.run(&case);
            }
        }
    }
}

/// What became of a configuration.
pub enum Outcome {
    Right(Verdict),
    /// Refused as it must be.
    Refused(Error),
    /// Messages were tampered with, and it shows; as it may.
    Harmed(Harm),
    Wrong(Vec<String>),
}

/// How it shows that messages were tampered with.
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

/// What became of a configuration, and its schedule where it had one.
pub struct Judged {
    pub outcome: Outcome,
    pub schedule: Option<Schedule>,
}

/// Runs configurations and says what became of them.
#[derive(Debug, Clone, Copy)]
pub struct Judge {
    pub device: DeviceWord,
    pub timeout: Duration,
    /// Where arenas lie, if that was asked for.
    pub arena: Option<ArenaWord>,
}

impl Default for Judge {
    fn default() -> Judge {
        Judge { device: DeviceWord::Cpu, timeout: TIMEOUT, arena: None }
    }
}

impl Judge {
    pub fn judge(&self, case: &Case) -> Judged {
        let (check, timeout) = (Check::All, self.timeout);
        let arena = match config::arena(self.arena, self.device, Launch::Threads, case) {
            Ok(arena) => arena,
            Err(refusal) => return Judged { outcome: Outcome::Wrong(vec![refusal.to_string()]), schedule: None },
        };
        let job = Job { case: case.clone(), warmup: 0, check, timeout, arena, measured: false, stages: false };
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
        // A world that came to a stand is wrong whatever became of it.
        if let Some(report) = schedule.as_ref().and_then(|schedule| schedule.report.hang_report.as_ref()) {
            let sentence = format!("nobody could go on: {}", report.lines().collect::<Vec<_>>().join("; "));
            match &mut outcome {
                Outcome::Wrong(sentences) => sentences.push(sentence),
                _ => outcome = Outcome::Wrong(vec![sentence]),
            }
        }
        Judged { outcome, schedule }
    }

    /// Prints how to run it again, and what was found.
    pub fn print_failure(&self, case: &Case, sentences: &[String]) {
        let deadline = match self.timeout {
            TIMEOUT => String::new(),
            given => format!(" --timeout-ms {}", given.as_millis()),
        };
        let arena = self.arena.map_or_else(String::new, |arena| format!(" --arena {}", arena.name()));
        say!("FAILED: tokenyard verify --device {}{arena}{deadline} --replay '{case}'", self.device.name());
        sentences.iter().for_each(|sentence| say!("  {sentence}"));
    }
}

/// What all ranks found.
fn verdict_of(ranks: &[RankResult]) -> Verdict {
    let mut verdict = Verdict::new();
    ranks.iter().for_each(|rank| verdict.merge(rank.verdict.clone()));
    verdict
}

const NOT_COMPARED: &str = "not every rank compared every iteration";

fn compared_all(ranks: &[RankResult], case: &Case) -> bool {
    ranks.len() == case.world && ranks.iter().all(|rank| rank.verdict.iterations == case.iters as u64)
}

/// Where messages were tampered with, all is well but a defect; what has crashed or hangs does not come here.
fn harmed(result: tokenyard::Result<Vec<RankResult>>, case: &Case) -> Outcome {
    match result {
        Ok(ranks) if !compared_all(&ranks, case) => Outcome::Wrong(vec![NOT_COMPARED.to_string()]),
        Ok(ranks) => match verdict_of(&ranks) {
            verdict if verdict.ok() => Outcome::Right(verdict),
            _ => Outcome::Harmed(Harm::Outputs),
        },
        Err(error @ (Error::Device { .. } | Error::Config { .. } | Error::Argument { .. })) => {
            Outcome::Wrong(vec![error.to_string()])
        }
        Err(error) => Outcome::Harmed(Harm::Ended(error)),
    }
}

/// Whether it is the configuration error that names this field.
fn names(error: &Error, field: &str) -> bool {
    matches!(error, Error::Config { name, .. } if *name == field)
}

#[cfg(test)]
mod tests {
    use super::super::links::Link;
    use super::*;

    #[test]
    fn full_sizes_are_usable() {
        for text in FULL.iter().chain(&FULL_NODES) {
            let case = Case::parse(text).unwrap();
            assert!(case.check().is_ok(), "{text}: {:?}", case.check());
        }
        for case in FULL_NODES.map(|text| Case::parse(text).unwrap()) {
            let one = Case { nodes: Vec::new(), link: Link::None, ..case.clone() };
            assert!(case.several_nodes() && one.check().is_ok(), "{case}: {:?}", one.check());
        }
    }
}
