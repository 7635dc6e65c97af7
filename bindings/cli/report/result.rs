//! The result of a bench: the object for machines, the table for people.
//!
//! After the data path, on the main thread.

use serde::Serialize;

use super::table::table;
use crate::cli::cases::case::Case;
use crate::cli::cases::words::{ArenaWord, DeviceWord, PartialWord, Word};
use crate::cli::ranks::config::Config;
use crate::cli::ranks::gpus::sharing;
use crate::cli::ranks::network;
use crate::cli::ranks::places::Place;
use crate::cli::ranks::sample::{RankResult, Verdict};

/// A distribution of times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Percentiles {
    pub p50: f64,
    pub p95: f64,
    pub p99: f64,
    pub min: f64,
    pub max: f64,
    pub mean: f64,
}

impl Percentiles {
    /// Percentiles by nearest rank; `None` without samples.
    pub fn of(mut samples: Vec<f64>) -> Option<Percentiles> {
        samples.sort_unstable_by(f64::total_cmp);
        let (min, max) = (*samples.first()?, *samples.last()?);
        let at = |p: f64| {
            let place = (p * samples.len() as f64).ceil() as usize;
            round(samples[place.clamp(1, samples.len()) - 1])
        };
        let mean = samples.iter().sum::<f64>() / samples.len() as f64;
        Some(Percentiles {
            p50: at(0.5),
            p95: at(0.95),
            p99: at(0.99),
            min: round(min),
            max: round(max),
            mean: round(mean),
        })
    }
}

/// Rounds to nanoseconds, the resolution of clocks.
fn round(us: f64) -> f64 {
    (us * 1000.0).round() / 1000.0
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Bytes {
    pub dispatch_nvlink: u64,
    pub dispatch_wire: u64,
    pub combine_nvlink: u64,
    pub combine_wire: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Floor {
    pub dispatch: f64,
    pub combine: f64,
}

/// Times of bare stores of the same bytes between GPUs, measured in the same way as the calls.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Push {
    pub dispatch: Percentiles,
    pub combine: Percentiles,
}

/// Ranks of a node: one number if all nodes have equal size, else the list as given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum PerNode {
    Even(usize),
    Uneven(String),
}

impl PerNode {
    fn of(case: &Case) -> PerNode {
        match case.node_sizes().as_slice() {
            [first, rest @ ..] if rest.iter().all(|size| size == first) => PerNode::Even(*first),
            _ => PerNode::Uneven(case.nodes_text()),
        }
    }
}

/// The JSON object of one run. Fields and their order are part of the contract.
#[derive(Debug, Clone, Serialize)]
pub struct RunResult {
    pub version: &'static str,
    pub commit: &'static str,
    pub device: &'static str,
    pub device_name: String,
    pub world: usize,
    /// Only if ranks share GPUs; times then mean little.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks_per_gpu: Option<usize>,
    pub ranks_per_node: PerNode,
    pub transport: &'static str,
    pub link: String,
    pub launch: &'static str,
    pub preset: &'static str,
    pub hidden: usize,
    pub experts: usize,
    pub top_k: usize,
    pub dtype: &'static str,
    /// True: dispatch quantised bf16 rows to `dtype`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantize: Option<bool>,
    pub combine_dtype: &'static str,
    /// Type of partial rows, if other than `combine_dtype`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partial: Option<&'static str>,
    pub tokens: usize,
    pub routing: String,
    pub layout: &'static str,
    pub mode: &'static str,
    pub sms: u32,
    pub iters: usize,
    pub seed: u64,
    /// Further options of the run, as typed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    pub verified: bool,
    pub mismatches: u64,
    /// Null: a NaN was seen.
    pub max_rel_err: Option<f64>,
    pub dispatch_us: Percentiles,
    pub combine_us: Percentiles,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dispatch_send_us: Option<Percentiles>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dispatch_recv_us: Option<Percentiles>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub combine_send_us: Option<Percentiles>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub combine_recv_us: Option<Percentiles>,
    /// Where counts come first: from before the sending call until the host had them, and the same of kernels that only
    /// raise a flag in host memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counts_us: Option<Percentiles>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flag_us: Option<Percentiles>,
    /// With --replay: dispatches by handles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub again_us: Option<Percentiles>,
    pub bytes_per_rank: Bytes,
    pub floor_us: Floor,
    /// On GPUs with peers; floor_us is then its median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub push_us: Option<Push>,
    /// Time that an emulated NIC adds to a small write by itself. Times between nodes are too long by the part that
    /// exceeds the link's latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nic_us: Option<f64>,
    /// With --stages: medians over calls and ranks, in microseconds since a call's first block began.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages_us: Vec<StageUs>,
    pub arena_bytes: u64,
    /// `host` if arenas lie in host memory by choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arena: Option<&'static str>,
    /// By rank, if NICs or cores were chosen or given.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub places: Vec<Place>,
    /// The first findings; for people, not part of the object.
    #[serde(skip)]
    pub sentences: Vec<String>,
}

impl RunResult {
    /// Ranks and their device.
    pub fn machine(&self) -> String {
        let RunResult { world, device_name, .. } = self;
        match self.ranks_per_gpu {
            Some(ranks) => format!("{world} ranks, {ranks} on each {device_name}"),
            None => format!("{world} x {device_name}"),
        }
    }

    /// Merges the ranks' results of one run.
    pub fn merge(config: &Config, case: &Case, ranks: &[RankResult]) -> RunResult {
        let all =
            |of: fn(&RankResult) -> &Vec<f64>| Percentiles::of(ranks.iter().flat_map(|r| of(r).clone()).collect());
        let mut verdict = Verdict::new();
        ranks.iter().for_each(|rank| verdict.merge(rank.verdict.clone()));
        let bytes = bytes_per_rank(ranks);
        let first = ranks.first().cloned().unwrap_or_default();
        let push_us = match (all(|r| &r.push_us[0]), all(|r| &r.push_us[1])) {
            (Some(dispatch), Some(combine)) => Some(Push { dispatch, combine }),
            _ => None,
        };
        RunResult {
            version: env!("CARGO_PKG_VERSION"),
            commit: option_env!("TOKENYARD_COMMIT").unwrap_or("unknown"),
            device: config.device.name(),
            device_name: first.device_name,
            world: case.world,
            ranks_per_gpu: (config.device == DeviceWord::Cuda)
                .then(|| sharing(config.host_ranks()))
                .filter(|ranks| *ranks > 1),
            ranks_per_node: PerNode::of(case),
            transport: case.transport.name(),
            link: case.link.to_string(),
            launch: config.launch.name(),
            preset: config.preset,
            hidden: case.hidden,
            experts: case.experts,
            top_k: case.top_k,
            dtype: case.dtype.name(),
            quantize: case.quantize.then_some(true),
            combine_dtype: case.combine_dtype.name(),
            partial: (case.partial != PartialWord::Same).then(|| case.partial.name()),
            tokens: case.tokens,
            routing: case.routing.label(),
            layout: case.layout.name(),
            mode: case.mode.name(),
            sms: first.sms,
            iters: case.iters,
            seed: case.seed,
            options: config.further_options(),
            verified: verdict.ok() && ranks.iter().all(|rank| rank.verdict.ok()),
            mismatches: verdict.mismatches,
            max_rel_err: verdict.max_rel_err,
            dispatch_us: all(|r| &r.dispatch_us).unwrap_or_default(),
            combine_us: all(|r| &r.combine_us).unwrap_or_default(),
            dispatch_send_us: all(|r| &r.parts_us[0]),
            dispatch_recv_us: all(|r| &r.parts_us[1]),
            combine_send_us: all(|r| &r.parts_us[2]),
            combine_recv_us: all(|r| &r.parts_us[3]),
            counts_us: all(|r| &r.counts_us),
            flag_us: all(|r| &r.flag_us),
            again_us: all(|r| &r.again_us),
            bytes_per_rank: bytes,
            floor_us: floor(bytes, ranks, push_us, case),
            push_us,
            nic_us: first.nic_us.map(round),
            stages_us: stages(ranks),
            arena_bytes: ranks.iter().map(|r| r.arena_bytes).max().unwrap_or(0),
            arena: (config.arena == ArenaWord::Host).then(|| config.arena.name()),
            places: config.places.ranks.clone(),
            sentences: verdict.sentences,
        }
    }
}

/// When blocks completed a stage.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageUs {
    pub stage: String,
    pub first: f64,
    pub median: f64,
    pub last: f64,
}

fn stages(ranks: &[RankResult]) -> Vec<StageUs> {
    let Some(first) = ranks.first() else { return Vec::new() };
    let median = |name: &str, which: usize| {
        let of_all = ranks.iter().flat_map(|rank| &rank.stages).filter(|stage| stage.name == name);
        Percentiles::of(of_all.flat_map(|stage| stage.us[which].clone()).collect()).unwrap_or_default().p50
    };
    let of = |name: &String| StageUs {
        first: median(name, 0),
        median: median(name, 1),
        last: median(name, 2),
        stage: name.clone(),
    };
    first.stages.iter().map(|stage| of(&stage.name)).collect()
}

/// The stages of a bench's calls; empty if none were recorded.
pub fn stages_table(results: &[RunResult]) -> String {
    let rows: Vec<Vec<String>> = results
        .iter()
        .flat_map(|r| r.stages_us.iter().map(move |s| (r.tokens, s)))
        .map(|(tokens, s)| {
            let us = |value: f64| format!("{value:.1}");
            vec![s.stage.clone(), tokens.to_string(), us(s.first), us(s.median), us(s.last)]
        })
        .collect();
    if rows.is_empty() {
        String::new()
    } else {
        table(&["stage ends at, us", "tokens", "first block", "median", "last"], &rows)
    }
}

/// Payload of an iteration between ranks of a node, and between nodes, mean over ranks and iterations. Rows that a rail
/// forwards within its node count at the token's source rank; the mean is the same.
fn bytes_per_rank(ranks: &[RankResult]) -> Bytes {
    let iterations = ranks.iter().map(|r| r.iterations).sum::<u64>().max(1);
    Bytes {
        dispatch_nvlink: ranks.iter().map(|r| r.dispatch_bytes).sum::<u64>() / iterations,
        dispatch_wire: ranks.iter().map(|r| r.wire_bytes[0]).sum::<u64>() / iterations,
        combine_nvlink: ranks.iter().map(|r| r.combine_bytes).sum::<u64>() / iterations,
        combine_wire: ranks.iter().map(|r| r.wire_bytes[1]).sum::<u64>() / iterations,
    }
}

/// The longer of two times: that of the bytes within nodes, and that of the bytes between nodes.
fn floor(bytes: Bytes, ranks: &[RankResult], push: Option<Push>, case: &Case) -> Floor {
    let intra_node = intra_node_floor(bytes, ranks, push);
    let inter_node = |bytes: u64| round(inter_node_floor(bytes, ranks, case));
    Floor {
        dispatch: intra_node.dispatch.max(inter_node(bytes.dispatch_wire)),
        combine: intra_node.combine.max(inter_node(bytes.combine_wire)),
    }
}

/// The median of bare stores if they were timed; else the time of the bytes at the measured rate, 0 without a rate.
fn intra_node_floor(bytes: Bytes, ranks: &[RankResult], push: Option<Push>) -> Floor {
    if let Some(push) = push {
        return Floor { dispatch: push.dispatch.p50, combine: push.combine.p50 };
    }
    let time = |bytes: u64| round(time_at(bytes, copy_rate(ranks)));
    Floor { dispatch: time(bytes.dispatch_nvlink), combine: time(bytes.combine_nvlink) }
}

/// With a link model: the bytes at the rate of all NICs, plus one latency, which a message without rows has too.
/// Without a model: the time of copies at the measured rate.
fn inter_node_floor(bytes: u64, ranks: &[RankResult], case: &Case) -> f64 {
    if !case.several_nodes() {
        return 0.0;
    }
    let model = case.link.model();
    // 1 Gb/s is 125 bytes per µs.
    let rate = model.gbps * 125.0 * network::nics(case).len() as f64;
    if rate.is_finite() { time_at(bytes, rate) + model.latency_us } else { time_at(bytes, copy_rate(ranks)) }
}

/// Bytes per µs of a rank's copies.
fn copy_rate(ranks: &[RankResult]) -> f64 {
    ranks.iter().map(|r| r.link_rate).sum::<f64>() / ranks.len().max(1) as f64
}

/// µs that the bytes take; 0 without a rate.
fn time_at(bytes: u64, rate: f64) -> f64 {
    if rate > 0.0 { bytes as f64 / rate } else { 0.0 }
}

/// A time as a multiple of its floor: "3.2x"; "-" without a floor.
fn ratio(us: f64, floor: f64) -> String {
    if floor > 0.0 { format!("{:.1}x", us / floor) } else { "-".to_string() }
}

/// The table of a bench.
pub fn bench_table(results: &[RunResult]) -> String {
    let split = results.iter().any(|r| r.dispatch_send_us.is_some());
    let mut head =
        vec!["tokens", "dispatch p50", "p99", "floor", "p50/floor", "combine p50", "p99", "floor", "p50/floor"];
    if split {
        head.extend(["d.send", "d.recv", "c.send", "c.recv"]);
    }
    let counted = results.iter().any(|r| r.counts_us.is_some());
    if counted {
        head.extend(["counts", "flag"]);
    }
    let again = results.iter().any(|r| r.again_us.is_some());
    if again {
        head.push("again");
    }
    let inter_node = results.iter().any(|r| r.bytes_per_rank.dispatch_wire > 0);
    head.extend(["KB out", "KB back"]);
    if inter_node {
        head.extend(["wire out", "wire back"]);
    }
    head.extend(["max rel err", "verified"]);
    let us = |value: f64| format!("{value:.1}");
    let rows: Vec<Vec<String>> = results
        .iter()
        .map(|r| {
            let (d, c, f) = (&r.dispatch_us, &r.combine_us, &r.floor_us);
            let mut row = vec![r.tokens.to_string(), us(d.p50), us(d.p99), us(f.dispatch), ratio(d.p50, f.dispatch)];
            row.extend([us(c.p50), us(c.p99), us(f.combine), ratio(c.p50, f.combine)]);
            if split {
                let parts = [r.dispatch_send_us, r.dispatch_recv_us, r.combine_send_us, r.combine_recv_us];
                row.extend(parts.iter().map(|p| p.map_or("-".to_string(), |p| us(p.p50))));
            }
            if counted {
                row.extend([r.counts_us, r.flag_us].map(|p| p.map_or("-".to_string(), |p| us(p.p50))));
            }
            if again {
                row.push(r.again_us.map_or("-".to_string(), |p| us(p.p50)));
            }
            let bytes = r.bytes_per_rank;
            let kilo = |bytes: u64| us(bytes as f64 / 1000.0);
            row.extend([bytes.dispatch_nvlink, bytes.combine_nvlink].map(kilo));
            if inter_node {
                row.extend([bytes.dispatch_wire, bytes.combine_wire].map(kilo));
            }
            row.push(r.max_rel_err.map_or("NaN".to_string(), |e| format!("{e:.2e}")));
            row.push(if r.verified { "yes".to_string() } else { format!("NO ({} wrong)", r.mismatches) });
            row
        })
        .collect();
    let Some(r) = results.first() else { return String::new() };
    let nodes = match &r.ranks_per_node {
        PerNode::Even(size) if *size == r.world => String::new(),
        PerNode::Even(size) => format!(" in nodes of {size}, {}, link {}{}", r.transport, r.link, emulated(r)),
        PerNode::Uneven(list) => format!(" in nodes of {list}, {}, link {}{}", r.transport, r.link, emulated(r)),
    };
    format!(
        "{} ({}{nodes}), {}: hidden {}, {} experts, top-{}, {} out, {} back{}, {} layout, {} routing, {}; {} SMs; \
         arena {:.1} MiB{}; \
         times in us\n{}",
        r.machine(),
        r.launch,
        r.preset,
        r.hidden,
        r.experts,
        r.top_k,
        r.dtype,
        r.combine_dtype,
        r.partial.map_or_else(String::new, |partial| format!(" by {partial} partial rows")),
        r.layout,
        r.routing,
        r.mode,
        r.sms,
        r.arena_bytes as f64 / f64::from(1 << 20),
        if r.arena.is_some() { " in host memory" } else { "" },
        table(&head, &rows)
    )
}

/// The cost of an emulated NIC.
fn emulated(result: &RunResult) -> String {
    result.nic_us.map_or_else(String::new, |us| format!(" by emulated NICs, {us:.1} us for a small write"))
}

#[cfg(test)]
#[path = "result_tests.rs"]
pub mod object_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::cases::links::Link;
    use crate::cli::cases::words::NetworkWord;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let of = |n: usize| Percentiles::of((1..=n).rev().map(|v| v as f64).collect()).unwrap();
        let hundred = of(100);
        assert_eq!((hundred.p50, hundred.p95, hundred.p99), (50.0, 95.0, 99.0));
        assert_eq!((hundred.min, hundred.max, hundred.mean), (1.0, 100.0, 50.5));
        let one = of(1);
        assert_eq!((one.p50, one.p99, one.mean), (1.0, 1.0, 1.0));
        assert_eq!(Percentiles::of(Vec::new()), None);
    }

    #[test]
    fn bare_stores_are_the_floor_where_they_were_timed() {
        let bytes = Bytes { dispatch_nvlink: 1000, combine_nvlink: 2000, ..Bytes::default() };
        let rank = RankResult { link_rate: 100.0, ..RankResult::default() };
        let one = Case::default();
        assert_eq!(floor(bytes, std::slice::from_ref(&rank), None, &one), Floor { dispatch: 10.0, combine: 20.0 });
        let of = |us: f64| Percentiles { p50: us, ..Percentiles::default() };
        let push = Push { dispatch: of(3.0), combine: of(4.0) };
        assert_eq!(floor(bytes, &[rank], Some(push), &one), Floor { dispatch: 3.0, combine: 4.0 });
        assert_eq!((ratio(9.6, 3.0), ratio(9.6, 0.0)), ("3.2x".to_string(), "-".to_string()));
    }

    #[test]
    fn the_slower_one_of_wire_and_node_is_the_floor() {
        let bytes = Bytes { dispatch_nvlink: 1000, dispatch_wire: 5000, combine_nvlink: 90_000, combine_wire: 5000 };
        let ranks = [RankResult { link_rate: 100.0, ..RankResult::default() }];
        let case = Case { world: 4, nodes: vec![2, 2], network: NetworkWord::Calm, ..Case::default() };
        // Without a model both are copies; with one, 8 Gb/s are 1000 bytes per µs, and a latency.
        assert_eq!(floor(bytes, &ranks, None, &case), Floor { dispatch: 50.0, combine: 900.0 });
        let given = Case { link: Link::parse("8:3:1").unwrap(), ..case.clone() };
        assert_eq!(floor(bytes, &ranks, None, &given), Floor { dispatch: 10.0, combine: 900.0 });
        let twice = Case { nics: Some(2), ..given };
        let inter_node = floor(Bytes { combine_nvlink: 0, ..bytes }, &ranks, None, &twice);
        assert_eq!(inter_node, Floor { dispatch: 10.0, combine: 5.5 });
    }

    #[test]
    fn ranks_per_node_are_printed_as_they_are_given() {
        let of = |world: usize, nodes: &[usize]| {
            let case = Case { world, nodes: nodes.to_vec(), ..Case::default() };
            serde_json::to_string(&PerNode::of(&case)).unwrap()
        };
        assert_eq!((of(3, &[]), of(8, &[4, 4]), of(8, &[3, 5])), ("3".into(), "4".into(), "\"3,5\"".into()));
    }
}
