//! Measurements and findings of one rank, and how ranks' results are merged.
//!
//! After the data path. A rank of another process sends its result as a line of JSON; threads hand over the same type.

use serde::{Deserialize, Serialize};

use tokenyard::CallStatistics;

use crate::cli::reference::Report;

/// A span of time on a rank's stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Span {
    pub name: String,
    pub iteration: usize,
    /// Time since the rank's first timed iteration began.
    pub start_us: f64,
    pub length_us: f64,
}

/// When a call's blocks completed a stage: one time per iteration, since the call's first block began.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StageTimes {
    pub name: String,
    /// Times of the first, the median and the last block.
    pub us: [Vec<f64>; 3],
}

/// Times of one iteration.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Times {
    pub dispatch_us: f64,
    pub combine_us: f64,
    /// dispatch send and receive, combine send and receive.
    pub parts_us: Option<[f64; 4]>,
    /// Until the host had the counts, where they come first.
    pub counts_us: Option<f64>,
    /// Of the dispatch by the handle.
    pub again_us: Option<f64>,
}

/// Results of the reference, all iterations together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Iterations that were compared.
    pub iterations: u64,
    pub compared: u64,
    pub mismatches: u64,
    /// `None`: a NaN was seen.
    pub max_rel_err: Option<f64>,
    /// Outputs that were too small as planned, and were reported.
    pub overflows: u64,
    /// Routings that were unusable as planned, and were reported.
    pub refusals: u64,
    /// Indices in outputs that lead outside of the world.
    pub strays: u64,
    /// The first findings.
    pub sentences: Vec<String>,
}

/// Most findings that are kept.
const SENTENCES: usize = 12;

impl Verdict {
    /// A verdict before any comparison.
    pub fn new() -> Verdict {
        Verdict { max_rel_err: Some(0.0), ..Verdict::default() }
    }

    /// Adds a comparison; `where_` is put before its sentences.
    pub fn add(&mut self, report: Report, where_: &str) {
        let finite = report.max_rel_err.is_finite().then_some(report.max_rel_err);
        self.merge(Verdict {
            compared: report.compared,
            mismatches: report.mismatches,
            max_rel_err: finite,
            sentences: report.sentences.iter().map(|sentence| format!("{where_}: {sentence}")).collect(),
            ..Verdict::default()
        });
    }

    /// Adds sentences about indices in outputs that lead outside of the world.
    pub fn add_strays(&mut self, sentences: Vec<String>, where_: &str) {
        let sentences: Vec<String> = sentences.into_iter().map(|sentence| format!("{where_}: {sentence}")).collect();
        self.merge(Verdict { strays: sentences.len() as u64, sentences, ..Verdict::new() });
    }

    /// Adds the findings of another rank.
    pub fn merge(&mut self, other: Verdict) {
        self.iterations += other.iterations;
        self.compared += other.compared;
        self.mismatches += other.mismatches;
        self.overflows += other.overflows;
        self.refusals += other.refusals;
        self.strays += other.strays;
        self.max_rel_err = self.max_rel_err.zip(other.max_rel_err).map(|(a, b)| a.max(b));
        let room = SENTENCES.saturating_sub(self.sentences.len());
        self.sentences.extend(other.sentences.into_iter().take(room));
    }

    /// Whether something was compared and all of it was right.
    pub fn ok(&self) -> bool {
        self.iterations > 0 && self.mismatches == 0
    }
}

/// One rank's part of one run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RankResult {
    pub rank: usize,
    pub device_name: String,
    pub sms: u32,
    pub arena_bytes: u64,
    pub dispatch_us: Vec<f64>,
    pub combine_us: Vec<f64>,
    /// Split mode: dispatch send and receive, combine send and receive.
    pub parts_us: [Vec<f64>; 4],
    /// Where counts come first: from before the sending call until the host had them, and the same of kernels that only
    /// raise a flag in host memory.
    pub counts_us: Vec<f64>,
    pub flag_us: Vec<f64>,
    /// Dispatches by handles.
    pub again_us: Vec<f64>,
    /// Timed iterations.
    pub iterations: u64,
    /// Payload of this rank's tokens that went between ranks of one node, all timed iterations together.
    pub dispatch_bytes: u64,
    /// The same for the partial rows that came back.
    pub combine_bytes: u64,
    /// Payload of this rank's tokens between nodes: rows out, and nodes' sums back.
    pub wire_bytes: [u64; 2],
    /// Bytes per µs that this rank can store into others' memory while all do; only on the CPU device.
    pub link_rate: f64,
    /// On GPUs: times of bare stores of an iteration's bytes to other ranks, as dispatch and as combine send them.
    pub push_us: [Vec<f64>; 2],
    /// Time that an emulated NIC adds to a small write by itself, in µs.
    pub nic_us: Option<f64>,
    pub verdict: Verdict,
    pub spans: Vec<Span>,
    /// Stages of calls, in the order in which calls first reached them.
    pub stages: Vec<StageTimes>,
}

impl RankResult {
    /// Adds the times of one timed iteration.
    pub fn add_times(&mut self, times: &Times) {
        self.iterations += 1;
        self.dispatch_us.push(times.dispatch_us);
        self.combine_us.push(times.combine_us);
        self.counts_us.extend(times.counts_us);
        self.again_us.extend(times.again_us);
        if let Some(parts) = times.parts_us {
            self.parts_us.iter_mut().zip(parts).for_each(|(all, us)| all.push(us));
        }
    }

    /// Adds the device's statistics of one dispatch and its combine.
    pub fn add_stages(&mut self, statistics: &[Option<CallStatistics>; 2]) {
        for (call, statistics) in ["dispatch", "combine"].into_iter().zip(statistics) {
            for stage in statistics.iter().flat_map(|statistics| &statistics.stages) {
                let name = format!("{call}: {}", stage.name);
                let place = self.stages.iter().position(|known| known.name == name).unwrap_or_else(|| {
                    self.stages.push(StageTimes { name, ..StageTimes::default() });
                    self.stages.len() - 1
                });
                let ns = [stage.first_ns, stage.median_ns, stage.last_ns];
                self.stages[place].us.iter_mut().zip(ns).for_each(|(all, ns)| all.push(ns as f64 / 1000.0));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard::Stage;

    #[test]
    fn times_of_iterations_stand_side_by_side() {
        let mut result = RankResult::default();
        result.add_times(&Times {
            dispatch_us: 1.0,
            combine_us: 2.0,
            parts_us: Some([3.0, 4.0, 5.0, 6.0]),
            counts_us: None,
            again_us: None,
        });
        result.add_times(&Times {
            dispatch_us: 7.0,
            combine_us: 8.0,
            parts_us: None,
            counts_us: Some(9.0),
            again_us: Some(10.0),
        });
        let wanted = RankResult {
            iterations: 2,
            dispatch_us: vec![1.0, 7.0],
            combine_us: vec![2.0, 8.0],
            parts_us: [vec![3.0], vec![4.0], vec![5.0], vec![6.0]],
            counts_us: vec![9.0],
            again_us: vec![10.0],
            ..RankResult::default()
        };
        assert_eq!(result, wanted);
    }

    #[test]
    fn stages_of_the_device_are_kept_by_name_and_in_microseconds() {
        let stage = |name, first_ns, median_ns, last_ns| Stage { name, first_ns, median_ns, last_ns };
        let call = |stages: &[Stage]| Some(CallStatistics { stages: stages.to_vec(), notified_ns: Vec::new() });
        let mut result = RankResult::default();
        result.add_stages(&[call(&[stage("done", 1_000, 2_500, 4_000)]), call(&[stage("done", 5_000, 6_000, 7_001)])]);
        result.add_stages(&[
            call(&[stage("begin", 8, 9, 10), stage("done", 11_000, 12_000, 13_000)]),
            call(&[stage("done", 14_000, 15_000, 16_000)]),
        ]);
        result.add_stages(&[None, None]);
        let times = |name: &str, us: [&[f64]; 3]| StageTimes { name: name.into(), us: us.map(<[f64]>::to_vec) };
        assert_eq!(
            result.stages,
            [
                times("dispatch: done", [&[1.0, 11.0], &[2.5, 12.0], &[4.0, 13.0]]),
                times("combine: done", [&[5.0, 14.0], &[6.0, 15.0], &[7.001, 16.0]]),
                times("dispatch: begin", [&[0.008], &[0.009], &[0.01]]),
            ]
        );
    }

    #[test]
    fn verdicts_add_up_and_keep_the_first_sentences() {
        let sentences = |from: usize, to: usize| (from..to).map(|i| format!("it {i}")).collect::<Vec<_>>();
        let mut sum = Verdict::new();
        for (at, kept) in [(1, 5), (2, 10), (3, SENTENCES)] {
            sum.merge(Verdict {
                iterations: at,
                compared: 10 * at,
                mismatches: 100 * at,
                max_rel_err: Some(1.0 / at as f64),
                overflows: 1000 * at,
                refusals: 10_000 * at,
                strays: 100_000 * at,
                sentences: sentences(5 * (at as usize - 1), 5 * at as usize),
            });
            assert_eq!(sum.sentences, sentences(0, kept));
        }
        let wanted = Verdict {
            iterations: 6,
            compared: 60,
            mismatches: 600,
            max_rel_err: Some(1.0),
            overflows: 6_000,
            refusals: 60_000,
            strays: 600_000,
            sentences: sentences(0, SENTENCES),
        };
        assert_eq!(sum, wanted);
    }
}
