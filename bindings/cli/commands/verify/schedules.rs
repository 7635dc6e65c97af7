//! `tokenyard verify --schedules`: tiny worlds, each on one thread under a seeded schedule of its own.
//!
//! On the main thread, which runs all ranks' fibers. Every second schedule holds stores back until a release of their
//! thread has sufficient scope. Some are run twice: a seed must give the same schedule again, or it could not be
//! replayed.

use std::collections::BTreeSet;

use tokenyard::internals::transport::network::sim::Counts;

use super::judge::{ENOUGH, Harm, Judge, Judged, Outcome};
use crate::cli::args::VerifyArgs;
use crate::cli::cases::case::Case;
use crate::cli::cases::draw::{as_asked, draw_small, forged};
use crate::cli::out::Out;
use crate::cli::progress::Progress;
use crate::cli::ranks::sample::Verdict;
use crate::cli::ranks::team::Schedule;
use crate::cli::report::tally::Tally;

/// One of so many schedules is run twice.
const TWICE: usize = 50;

/// At least so many schedules must have met every disturbance of the network.
const ALL_MET: usize = 500;

/// Sums over all schedules.
#[derive(Default)]
struct Sum {
    run: usize,
    held: usize,
    twice: usize,
    switches: u64,
    host_loads: u64,
    hashes: BTreeSet<u64>,
    network: Counts,
    /// With tampered messages: worlds whose outputs were wrong, and worlds that ended with an error.
    harmed: [usize; 2],
}

impl Sum {
    fn add(&mut self, case: &Case, schedule: Option<&Schedule>) {
        self.run += 1;
        self.held += usize::from(case.hold_stores);
        let Some(Schedule { report, network }) = schedule else { return };
        self.hashes.insert(report.trace_hash);
        self.switches += report.switches;
        self.host_loads += report.host_loads;
        self.network += *network;
    }

    /// Disturbances that never happened although so many schedules, of several `nodes`, must have met them; and with
    /// `forge` the kinds of harm.
    fn missed(&self, nodes: bool, forge: bool) -> Vec<&'static str> {
        let n = &self.network;
        let disturbances = [
            ("writes overtaken", n.reordered),
            ("packets out of order", n.packets_out_of_order),
            ("delays", n.delayed),
            ("full queues", n.full),
            ("early completions", n.completed_early),
            ("late completions", n.completed_late),
            ("links that stop", n.stops),
            ("packets that wait for them", n.stalled),
        ];
        let harm = [("wrong outputs", self.harmed[0] as u64), ("errors", self.harmed[1] as u64)];
        let disturbances = disturbances.into_iter().filter(|_| nodes);
        let demanded = disturbances.chain(harm.into_iter().filter(|_| forge));
        demanded.filter(|(_, times)| *times == 0 && self.run >= ALL_MET).map(|(what, _)| what).collect()
    }

    fn print(&self, tally: &Tally, out: &Out) {
        say!(
            out,
            "{} schedules run, {} of them with held stores: {} distinct traces, {} switches, {} run twice",
            self.run,
            self.held,
            self.hashes.len(),
            self.switches,
            self.twice
        );
        say!(out, "{} loads of host memory, all of a kernel's by one thread", self.host_loads);
        say!(out, "networks: {}", self.network);
        if self.harmed != [0; 2] {
            let [outputs, ended] = self.harmed;
            say!(out, "messages tampered with: {outputs} worlds with wrong outputs, {ended} ended with an error");
        }
        say!(out, "{}", tally.nodes_line());
    }
}

/// Flaws of a schedule whose results are right; runs some schedules again.
fn flaws(i: usize, case: &Case, schedule: Option<&Schedule>, judge: &Judge, sum: &mut Sum) -> Vec<String> {
    let mut flaws = Vec::new();
    let pollers = schedule.map_or(0, |schedule| schedule.report.further_pollers);
    if pollers > 0 {
        flaws.push(format!("{pollers} loads of host memory by a second thread of a kernel"));
    }
    if i.is_multiple_of(TWICE) {
        sum.twice += 1;
        let trace = |schedule: &Schedule| (schedule.report.trace_hash, schedule.report.switches);
        let (once, again) = (schedule.map(trace), judge.judge(case).schedule.as_ref().map(trace));
        if again != once {
            flaws.push(format!("its second run had another schedule: {once:x?}, {again:x?}"));
        }
    }
    flaws
}

/// Runs `count` schedules, on request all with quantised rows or with tampered messages; returns whether all were
/// right. Stops after `ENOUGH` failures.
pub fn schedules(count: usize, first: u64, args: &VerifyArgs, judge: &Judge) -> bool {
    let out = judge.out;
    let bar = Progress::new(out);
    let (mut verdict, mut tally, mut sum) = (Verdict::new(), Tally::default(), Sum::default());
    let mut failures = 0;
    for i in 0..count {
        bar.show("schedules", i, count);
        let drawn = draw_small(first.wrapping_add(i as u64));
        let drawn = as_asked(drawn, args.quantize, args.in_place);
        let case = if args.forge { forged(drawn) } else { drawn };
        let Judged { outcome, schedule } = judge.judge(&case);
        tally.count(&case, matches!(outcome, Outcome::Refused(_)));
        sum.add(&case, schedule.as_ref());
        let flaws = flaws(i, &case, schedule.as_ref(), judge, &mut sum);
        let sentences = match outcome {
            Outcome::Right(found) if flaws.is_empty() => {
                verdict.merge(found);
                continue;
            }
            Outcome::Harmed(harm) if flaws.is_empty() => {
                sum.harmed[usize::from(matches!(harm, Harm::Ended(_)))] += 1;
                continue;
            }
            Outcome::Right(_) | Outcome::Harmed(_) => flaws,
            Outcome::Refused(error) => vec![error.to_string()],
            Outcome::Wrong(sentences) => sentences,
        };
        failures += 1;
        bar.clear();
        judge.print_failure(&case, &sentences);
        if failures >= ENOUGH {
            break;
        }
    }
    bar.clear();
    sum.print(&tally, judge.out);
    let missed = sum.missed(!args.in_place, args.forge);
    if !missed.is_empty() {
        say!(out, "never met: {}", missed.join(", "));
    }
    say!(out, "{} overflows, {} refused routings seen; {failures} failed", verdict.overflows, verdict.refusals);
    failures == 0 && missed.is_empty()
}
