//! `tokenyard verify --schedules`: tiny worlds, each on one thread under a seeded schedule of its own.
//!
//! On the main thread, which runs all ranks' fibers. Every second one holds stores back until a release of their thread
//! has sufficient scope. Some are run twice: a seed that does not give the same schedule again could not be replayed.

use std::collections::BTreeSet;

use super::draw::draw_small;
use super::report::Progress;
use super::sample::Verdict;
use super::tally::Tally;
use super::verify::{ENOUGH, Judge, Judged, Outcome};

/// Every so many schedules one is run twice.
const TWICE: usize = 50;

/// Runs `count` schedules; whether all were right. Stops once enough have failed.
pub fn schedules(count: usize, first: u64, judge: &Judge) -> bool {
    let bar = Progress::new();
    let mut hashes = BTreeSet::new();
    let (mut verdict, mut tally) = (Verdict::new(), Tally::default());
    let (mut run, mut held, mut switches, mut twice, mut failures) = (0, 0, 0, 0, 0);
    let mut host_loads = 0;
    for i in 0..count {
        bar.show("schedules", i, count);
        let case = draw_small(first.wrapping_add(i as u64));
        let Judged { mut outcome, schedule } = judge.judge(&case);
        run += 1;
        tally.count(&case, matches!(outcome, Outcome::Refused(_)));
        held += usize::from(case.hold_stores);
        let pollers = schedule.as_ref().map_or(0, |schedule| schedule.further_pollers);
        host_loads += schedule.as_ref().map_or(0, |schedule| schedule.host_loads);
        let trace = schedule.map(|schedule| (schedule.trace_hash, schedule.switches));
        hashes.extend(trace.map(|(hash, _)| hash));
        switches += trace.map_or(0, |(_, switches)| switches);
        if i % TWICE == 0 {
            twice += 1;
            let again = judge.judge(&case).schedule.map(|schedule| (schedule.trace_hash, schedule.switches));
            if again != trace && matches!(outcome, Outcome::Right(_)) {
                outcome = Outcome::Wrong(vec![format!("run again, its schedule was another: {trace:x?}, {again:x?}")]);
            }
        }
        if pollers > 0 && matches!(outcome, Outcome::Right(_)) {
            outcome = Outcome::Wrong(vec![format!("{pollers} loads of host memory by a second thread of a kernel")]);
        }
        match outcome {
            Outcome::Right(found) => verdict.merge(found),
            Outcome::Refused(error) => {
                failures += 1;
                bar.clear();
                judge.print_failure(&case, &[error.to_string()]);
            }
            Outcome::Wrong(sentences) => {
                failures += 1;
                bar.clear();
                judge.print_failure(&case, &sentences);
            }
        }
        if failures >= ENOUGH {
            break;
        }
    }
    bar.clear();
    println!(
        "{run} schedules run, {held} of them with held stores: {} distinct traces, {switches} switches, {twice} run \
         twice",
        hashes.len()
    );
    println!("{host_loads} loads of host memory, all of a kernel's by one thread");
    println!("{}", tally.nodes_line());
    println!("{} overflows, {} refused routings seen; {failures} failed", verdict.overflows, verdict.refusals);
    failures == 0
}
