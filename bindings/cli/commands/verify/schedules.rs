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

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard::internals::kernels::SeededReport;

    fn schedule(trace_hash: u64, switches: u64, host_loads: u64) -> Schedule {
        let (further_pollers, hang_report, failure) = (0, None, None);
        let report = SeededReport { trace_hash, switches, host_loads, further_pollers, hang_report, failure };
        Schedule { report, network: Counts { writes: 3, delayed: 5, ..Counts::default() } }
    }

    #[test]
    fn the_summary_names_every_sum() {
        let mut sum = Sum { twice: 6, harmed: [7, 8], ..Sum::default() };
        let case = |hold_stores| Case { hold_stores, ..Case::default() };
        sum.add(&case(true), Some(&schedule(1, 10, 100)));
        sum.add(&case(true), Some(&schedule(2, 20, 200)));
        sum.add(&case(false), Some(&schedule(2, 40, 400)));
        sum.add(&case(true), None);
        let mut tally = Tally::default();
        tally.count(&case(true), false);
        let mut printed = Vec::new();
        sum.print(&tally, &Out::new(&mut printed, None, false));
        let printed = String::from_utf8(printed).unwrap();
        let lines: Vec<&str> = printed.lines().collect();
        assert_eq!(
            lines[0],
            "4 schedules run, 3 of them with held stores: 2 distinct traces, 70 switches, 6 run twice"
        );
        assert_eq!(lines[1], "700 loads of host memory, all of a kernel's by one thread");
        assert!(lines[2].starts_with("networks: 9 writes, 0 messages, ") && lines[2].contains(", 15 delayed, "));
        assert_eq!(lines[3], "messages tampered with: 7 worlds with wrong outputs, 8 ended with an error");
        assert_eq!((lines[4], lines.len()), ("nodes: 1 in 1", 5));
    }

    #[test]
    fn many_schedules_must_meet_every_disturbance_of_the_network() {
        let all = Counts {
            reordered: 1,
            packets_out_of_order: 1,
            delayed: 1,
            full: 1,
            completed_early: 1,
            completed_late: 1,
            stops: 1,
            stalled: 1,
            ..Counts::default()
        };
        let missed = |network: Counts, harmed: [usize; 2], nodes, forge| {
            Sum { run: ALL_MET, network, harmed, ..Sum::default() }.missed(nodes, forge)
        };
        assert!(missed(all, [0, 0], true, false).is_empty() && missed(all, [1, 1], true, true).is_empty());
        assert_eq!(missed(all, [1, 0], true, true), ["errors"]);
        assert_eq!(missed(all, [0, 1], false, true), ["wrong outputs"]);
        assert!(missed(Counts::default(), [0, 0], false, false).is_empty(), "one node has no network");
        for (network, what) in [
            (Counts { reordered: 0, ..all }, "writes overtaken"),
            (Counts { packets_out_of_order: 0, ..all }, "packets out of order"),
            (Counts { delayed: 0, ..all }, "delays"),
            (Counts { full: 0, ..all }, "full queues"),
            (Counts { completed_early: 0, ..all }, "early completions"),
            (Counts { completed_late: 0, ..all }, "late completions"),
            (Counts { stops: 0, ..all }, "links that stop"),
            (Counts { stalled: 0, ..all }, "packets that wait for them"),
        ] {
            assert_eq!(missed(network, [0, 0], true, false), [what]);
            let few = Sum { run: ALL_MET - 1, network, ..Sum::default() };
            assert!(few.missed(true, false).is_empty(), "few schedules need not meet it");
        }
    }
}
