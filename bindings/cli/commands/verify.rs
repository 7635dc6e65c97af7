//! `tokenyard verify`: random configurations, three iterations or more each, every one compared with the reference.
//!
//! On the main thread; each configuration's ranks run on threads, or all on one thread under a seeded schedule. A
//! configuration depends on its seed alone; a failure prints all of it, so that it can be run again and changed.

mod judge;
mod schedules;

use std::time::{Duration, Instant};

use crate::cli::args::VerifyArgs;
use crate::cli::cases::case::Case;
use crate::cli::cases::draw::{RANKS, as_asked, draw};
use crate::cli::cases::words::{DeviceWord, FaultWord, Word};
use crate::cli::out::Out;
use crate::cli::progress::Progress;
use crate::cli::ranks::config::{check_case, check_memory, check_ranks, or_here};
use crate::cli::ranks::gpus::note_sharing;
use crate::cli::ranks::sample::Verdict;
use crate::cli::report::tally::Tally;
use crate::cli::status::Status;
use crate::cli::usage::Refusal;
use judge::{ENOUGH, Judge, Judged, Outcome, TIMEOUT};
use schedules::schedules;

/// Configurations by default.
const SEEDS: usize = 100;
/// From so many configurations on, every pair of values must occur, if necessary in further configurations.
const ALL_PAIRS: usize = 500;
/// Seeds that are searched for missing pairs.
const SEARCH: u64 = 20_000;

/// Models' full sizes, for `--full`.
const FULL: [&str; 13] = [
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
    // Routing metadata in several tiles: so many experts leave room for few tokens in a block's bitmap.
    "world=2,hidden=64,experts=4000,top_k=4,tokens=300,max_tokens=300,iters=2",
    // The same, with a faulty choice in one of them.
    "world=3,hidden=64,experts=12,top_k=3,tokens=160,max_tokens=160,meta_tile=32,fault=routing,iters=6",
    // The same, of tiles that are half as large, since they are no more than the blocks.
    "world=3,sms=32,hidden=64,experts=1200,top_k=3,tokens=290,max_tokens=290,meta_tile=64,iters=4",
    "world=3,sms=32,hidden=64,experts=12,top_k=3,tokens=290,max_tokens=290,meta_tile=64,fault=routing,iters=6",
    // The same, where dedicated sender blocks leave fewer blocks than tiles.
    "world=5,sms=16,hidden=128,experts=20,top_k=3,tokens=300,max_tokens=300,iters=4",
    // Many ranks of few blocks, with dedicated sender blocks.
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
     round_tokens=40,tokens=64,max_tokens=64,routing=v3-groups,iters=3",
    "world=4,nodes=2+2,hidden=64,experts=4000,top_k=4,tokens=300,max_tokens=300,round_tokens=70,ahead=2,iters=4",
];

/// Runs the configurations. Success: all were right, or refused as they must be.
///
/// # Errors
/// Unusable arguments.
pub fn verify(args: &VerifyArgs, out: &Out) -> Result<Status, Refusal> {
    if args.schedules.is_some() && args.device == Some(DeviceWord::Cuda) {
        let advice = "only the CPU device runs seeded schedules; give cpu, or leave it out";
        return Err(Refusal::of("--device", DeviceWord::Cuda.name(), advice));
    }
    // Schedules alone need no GPU, and do not search for one.
    let only_schedules = args.schedules.is_some() && args.seeds.is_none();
    let device = if only_schedules { DeviceWord::Cpu } else { or_here(args.device)? };
    let timeout = args.timeout_ms.map_or(TIMEOUT, |ms| Duration::from_millis(ms as u64));
    let judge = Judge { device, timeout, arena: args.arena, out };
    if let Some(text) = &args.replay {
        let drawn = [
            ("--seeds", args.seeds.is_some()),
            ("--seconds", args.seconds.is_some()),
            ("--schedules", args.schedules.is_some()),
            ("--seed", args.seed.is_some()),
            ("--quantize", args.quantize),
            ("--in-place", args.in_place),
            ("--full", args.full),
        ];
        if let Some((name, _)) = drawn.iter().find(|(_, given)| *given) {
            return Err(Refusal::of("--replay", text, format!("it describes the whole run; leave {name} out")));
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
    Ok(right.into())
}

/// Runs the random configurations, and full sizes if asked for; whether all were right.
fn seeds(args: &VerifyArgs, first: u64, judge: Judge<'_, '_>) -> Result<bool, Refusal> {
    let out = judge.out;
    note_sharing(judge.device, RANKS, out);
    let count = args.seeds.unwrap_or(SEEDS);
    let mut session = Session::new(judge);
    let end = args.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds as u64));
    let is_over = || end.is_some_and(|end| Instant::now() >= end);
    for i in (0..count).take_while(|_| !is_over()) {
        session.bar.show("verify", i, count);
        let drawn = draw(first.wrapping_add(i as u64), judge.device);
        session.run(&as_asked(drawn, args.quantize, args.in_place));
    }
    let cut = session.run < count && is_over();
    let all_pairs = count >= ALL_PAIRS && !args.quantize && !args.in_place && !cut;
    if all_pairs {
        session.run_missing_pairs(first.wrapping_add(count as u64));
    }
    for text in FULL.iter().chain(&FULL_NODES).filter(|_| args.full) {
        let case = Case::parse(text)?;
        session.bar.clear();
        say!(out, "full size: {case}");
        session.run(&case);
    }
    session.bar.clear();
    say!(out, "{}\n{}", session.tally.table(), session.tally.nodes_line());
    say!(out, "{} overflows, {} refused routings seen", session.verdict.overflows, session.verdict.refusals);
    if cut {
        say!(
            out,
            "the time was over before all {count} random configurations; pairs that were not drawn are not listed"
        );
    }
    say!(out, "{} configurations run on {}, {} failed", session.run, judge.device.name(), session.failures);
    let missing = if all_pairs { session.tally.missing() } else { Vec::new() };
    missing.iter().for_each(|pair| say!(out, "never drawn: {pair}"));
    Ok(session.failures == 0 && missing.is_empty())
}

fn replay(text: &str, judge: &Judge) -> Result<Status, Refusal> {
    let case = Case::parse(text)?;
    let usable = case.without_refused();
    check_ranks(case.world, judge.device)?;
    check_case(&usable, judge.device)?;
    check_memory(&usable, judge.device, usable.world)?;
    if case.fault == FaultWord::Forged && judge.device == DeviceWord::Cuda {
        let advice = "only worlds on one thread tamper with messages; give cpu";
        return Err(Refusal::of("--device", DeviceWord::Cuda.name(), advice));
    }
    let out = judge.out;
    note_sharing(judge.device, case.world, out);
    let Judged { outcome, schedule } = judge.judge(&case);
    match &outcome {
        Outcome::Right(verdict) => say!(out, "right: {} elements compared", verdict.compared),
        Outcome::Refused(error) => say!(out, "refused by design: {error}"),
        Outcome::Harmed(harm) => say!(out, "harmed by tampered messages: {harm}"),
        Outcome::Wrong(sentences) => sentences.iter().for_each(|s| say!(out, "wrong: {s}")),
    }
    if let Some(schedule) = schedule {
        say!(out, "schedule {:016x}, {} switches", schedule.report.trace_hash, schedule.report.switches);
    }
    Ok((!matches!(outcome, Outcome::Wrong(_))).into())
}

struct Session<'a, 'w> {
    judge: Judge<'a, 'w>,
    bar: Progress<'a, 'w>,
    tally: Tally,
    verdict: Verdict,
    failures: usize,
    run: usize,
}

impl<'a, 'w> Session<'a, 'w> {
    fn new(judge: Judge<'a, 'w>) -> Session<'a, 'w> {
        let (bar, tally, verdict) = (Progress::new(judge.out), Tally::default(), Verdict::default());
        Session { judge, bar, tally, verdict, failures: 0, run: 0 }
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::cases::links::Link;

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
