//! The object and the tables of a result whose fields all have values of their own, so that a field that is exchanged
//! with another, left out, or in another unit is seen.

use std::time::Duration;

use serde_json::{Value, json};
use tokenyard::internals::base::Dtype;

use super::*;
use crate::cli::cases::inputs::ScaleKind;
use crate::cli::cases::links::Link;
use crate::cli::cases::routing::Routing;
use crate::cli::cases::words::{Check, Launch, LayoutWord, Mode, NetworkWord, WeightsWord, WorldMode};
use crate::cli::ranks::config::Outputs;
use crate::cli::ranks::places::Places;
use crate::cli::ranks::sample::StageTimes;

/// Samples of each rank: the first rank has more than the second.
const FIRST: usize = 120;

/// 200 times in no order: `base` + i²/100 for i = 1 to 200, whose percentiles, mean and extremes all differ.
fn spread(base: f64) -> Vec<f64> {
    (0..200).map(|i| (i * 77 % 200 + 1) as f64).map(|i| base + i * i / 100.0).collect()
}

/// The distribution of `spread(base)`: places 100, 190 and 198 of 200; the sum of i² is 200 · 201 · 401 / 6.
fn spread_of(base: f64) -> Value {
    let at = |over: f64| ((base + over) * 1000.0).round() / 1000.0;
    json!({
        "p50": at(100.0), "p95": at(361.0), "p99": at(392.04), "min": at(0.01), "max": at(400.0),
        "mean": at(134.335),
    })
}

fn halves(samples: Vec<f64>) -> [Vec<f64>; 2] {
    [samples[..FIRST].to_vec(), samples[FIRST..].to_vec()]
}

/// Every setting of a bench, with a value that no other setting has.
pub fn config() -> Config {
    let case = Case {
        world: 6,
        nodes: vec![4, 2],
        link: Link::parse("100:3:0.5").unwrap(),
        network: NetworkWord::Hostile,
        nics: Some(2),
        chunk_rows: Some(5),
        double_buffer: false,
        ll_tokens: Some(9),
        round_tokens: Some(7),
        hidden: 256,
        experts: 24,
        top_k: 10,
        dtype: Dtype::Fp8E4m3,
        scales: ScaleKind::Ue8m0,
        quantize: true,
        combine_dtype: Dtype::Fp32,
        out_dtype: Dtype::Fp32,
        partial: PartialWord::Fp8,
        weights: WeightsWord::Combine,
        layout: LayoutWord::Masked,
        align: 8,
        capacity: Some(77),
        in_place: true,
        accumulate: true,
        ragged: true,
        max_tokens: 19,
        routing: Routing::parse("file:/a/folder/trace.safetensors").unwrap(),
        mode: Mode::Counts,
        iters: 3,
        seed: 41,
        world_mode: WorldMode::OneThread,
        ..Case::default()
    };
    Config {
        device: DeviceWord::Cpu,
        launch: Launch::Processes,
        arena: ArenaWord::Host,
        allow_old_shm: false,
        nic_devices: Vec::new(),
        places: Places::default(),
        placed_by: Vec::new(),
        preset: "kimi-k2",
        case,
        tokens: vec![17, 18],
        warmup: 11,
        check: Check::Every(13),
        timeout: Duration::from_secs(1),
        stages: true,
        outputs: Outputs::default(),
    }
}

/// Two ranks' results of a point.
pub fn ranks() -> Vec<RankResult> {
    let bases = [1000.0, 2000.0, 3000.0, 4000.0, 5000.0, 6000.0, 7000.0, 8000.0, 9000.0];
    let times = bases.map(|base| halves(spread(base)));
    let stage = |name: &str, us: [&[f64]; 3]| StageTimes { name: name.to_string(), us: us.map(<[f64]>::to_vec) };
    let rank = |at: usize| RankResult {
        rank: at,
        device_name: format!("Device {at}"),
        sms: 21 + at as u32,
        arena_bytes: [3 << 20, 7 << 20][at],
        dispatch_us: times[0][at].clone(),
        combine_us: times[1][at].clone(),
        parts_us: [2, 3, 4, 5].map(|part: usize| times[part][at].clone()),
        counts_us: times[6][at].clone(),
        flag_us: times[7][at].clone(),
        again_us: times[8][at].clone(),
        iterations: [3, 1][at],
        dispatch_bytes: [40_000, 8_000][at],
        combine_bytes: [100_000, 20_004][at],
        wire_bytes: [[20_000, 50_000], [10_000, 10_002]][at],
        link_rate: [5_000.0, 3_000.0][at],
        push_us: [Vec::new(), Vec::new()],
        nic_us: Some([6.543_21, 1.0][at]),
        verdict: Verdict {
            iterations: 3,
            compared: 100,
            mismatches: [3, 4][at],
            max_rel_err: Some([0.25, 0.125][at]),
            sentences: vec![format!("rank {at} is wrong")],
            ..Verdict::default()
        },
        spans: Vec::new(),
        stages: match at {
            0 => vec![
                stage("dispatch: rows placed", [&[1.0], &[2.0], &[3.0]]),
                stage("combine: sums", [&[4.0, 6.0], &[7.0, 9.0], &[10.0, 12.0]]),
            ],
            // In another order: stages are matched by name.
            _ => vec![
                stage("combine: sums", [&[5.0], &[8.0], &[11.0]]),
                stage("dispatch: rows placed", [&[1.5, 1.3], &[2.5, 2.3], &[3.5, 3.3]]),
            ],
        },
    };
    vec![rank(0), rank(1)]
}

/// The result of a point of `tokens` tokens.
pub fn merged(tokens: usize) -> RunResult {
    let config = config();
    RunResult::merge(&config, &config.point(tokens), &ranks())
}

#[test]
fn every_field_of_the_object_has_its_own_value() {
    let options = [
        "--scales ue8m0",
        "--weights combine",
        "--accumulate",
        "--ragged",
        "--align 8",
        "--capacity 77",
        "--max-tokens 19",
        "--chunk-rows 5",
        "--ll-tokens 9",
        "--round-tokens 7",
        "--warmup 11",
        "--in-place",
        "--single-buffer",
        "--network hostile",
        "--world-mode one-thread",
        "--check 13",
    ];
    let mut wanted = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "commit": option_env!("TOKENYARD_COMMIT").unwrap_or("unknown"),
        "device": "cpu",
        "device_name": "Device 0",
        "world": 6,
        "ranks_per_node": "4,2",
        "transport": "sim",
        "link": "100:3:0.5",
        "launch": "processes",
        "preset": "kimi-k2",
        "hidden": 256,
        "experts": 24,
        "top_k": 10,
        "dtype": "fp8",
        "quantize": true,
        "combine_dtype": "fp32",
        "partial": "fp8",
        "tokens": 17,
        "routing": "file:trace.safetensors",
        "layout": "masked",
        "mode": "counts",
        "sms": 21,
        "iters": 3,
        "seed": 41,
        "options": options,
    });
    let measured = json!({
        "verified": false,
        "mismatches": 7,
        "max_rel_err": 0.25,
        "dispatch_us": spread_of(1000.0),
        "combine_us": spread_of(2000.0),
        "dispatch_send_us": spread_of(3000.0),
        "dispatch_recv_us": spread_of(4000.0),
        "combine_send_us": spread_of(5000.0),
        "combine_recv_us": spread_of(6000.0),
        "counts_us": spread_of(7000.0),
        "flag_us": spread_of(8000.0),
        "again_us": spread_of(9000.0),
        // Bytes of both ranks over their four iterations, rounded down.
        "bytes_per_rank": {
            "dispatch_nvlink": 48_000 / 4, "dispatch_wire": 30_000 / 4,
            "combine_nvlink": 120_004 / 4, "combine_wire": 60_002 / 4,
        },
        // Between nodes 2 NICs carry 25 000 bytes a µs, after 3 µs: 3.3 and 3.6 µs. Within them copies carry 4000 bytes
        // a µs, the mean: 3.0 and 7.50025 µs. The longer time counts.
        "floor_us": {"dispatch": 3.3, "combine": 7.5},
        "nic_us": 6.543,
        "stages_us": [
            {"stage": "dispatch: rows placed", "first": 1.3, "median": 2.3, "last": 3.3},
            {"stage": "combine: sums", "first": 5.0, "median": 8.0, "last": 11.0},
        ],
        "arena_bytes": 7 << 20,
        "arena": "host",
    });
    wanted.as_object_mut().unwrap().extend(measured.as_object().unwrap().clone());
    assert_eq!(serde_json::to_value(merged(17)).unwrap(), wanted);
    assert_eq!(merged(17).sentences, ["rank 0 is wrong", "rank 1 is wrong"]);
}

#[test]
fn bare_stores_of_gpus_are_reported_beside_the_floor_and_shared_gpus_behind_the_world() {
    let mut ranks = ranks();
    let pushes = [7.0, 8.0].map(|base| halves(spread(base)));
    for (at, rank) in ranks.iter_mut().enumerate() {
        rank.push_us = [pushes[0][at].clone(), pushes[1][at].clone()];
        rank.iterations = 1_000_000;
    }
    let config = config();
    let result = RunResult { ranks_per_gpu: Some(12), ..RunResult::merge(&config, &config.point(17), &ranks) };
    let found = serde_json::to_value(&result).unwrap();
    assert_eq!(found["push_us"], json!({"dispatch": spread_of(7.0), "combine": spread_of(8.0)}));
    assert_eq!(found["floor_us"], json!({"dispatch": 107.0, "combine": 108.0}));
    assert_eq!((&found["ranks_per_gpu"], &found["world"]), (&json!(12), &json!(6)));
    assert_eq!(result.machine(), "6 ranks, 12 on each Device 0");
    assert_eq!(RunResult { ranks_per_gpu: None, ..result.clone() }.machine(), "6 x Device 0");
    // In the order of the contract, as text.
    let text = serde_json::to_string(&result).unwrap();
    let order = "version commit device device_name world ranks_per_gpu ranks_per_node transport link launch preset \
                 hidden experts top_k dtype quantize combine_dtype partial tokens routing layout mode sms iters seed \
                 options verified mismatches max_rel_err dispatch_us combine_us dispatch_send_us dispatch_recv_us \
                 combine_send_us combine_recv_us counts_us flag_us again_us bytes_per_rank floor_us push_us nic_us stages_us arena_bytes arena";
    let places: Vec<Option<usize>> =
        order.split_whitespace().map(|field| text.find(&format!("\"{field}\":"))).collect();
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{text}");
    assert_eq!(found.as_object().unwrap().len(), places.len());
}

#[test]
fn fields_of_the_usual_kind_are_left_out() {
    let case = Case { tokens: 5, ..Case::default() };
    let mut config = Config { case: case.clone(), arena: ArenaWord::Device, ..config() };
    (config.tokens, config.warmup, config.check) = (vec![1], 1, Check::All);
    config.case.network = NetworkWord::Calm;
    let verdict = Verdict { iterations: 1, ..Verdict::new() };
    let right = RankResult { verdict, ..RankResult::default() };
    let found = serde_json::to_value(RunResult::merge(&config, &case, &[right.clone(), right.clone()])).unwrap();
    let fields: Vec<&str> = found.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(fields.len(), 30, "{fields:?}");
    assert_eq!((&found["verified"], &found["ranks_per_node"]), (&json!(true), &json!(1)));
    assert_eq!(found["floor_us"], json!({"dispatch": 0.0, "combine": 0.0}));
    // A rank that compared nothing, or that saw a NaN.
    let merge = |other: Verdict| {
        let ranks = [right.clone(), RankResult { verdict: other, ..RankResult::default() }];
        let merged = RunResult::merge(&config, &case, &ranks);
        (merged.verified, merged.max_rel_err)
    };
    assert_eq!(merge(Verdict::new()), (false, Some(0.0)));
    assert_eq!(merge(Verdict { iterations: 1, ..Verdict::default() }), (true, None));
    assert_eq!(merge(Verdict { iterations: 1, mismatches: 1, ..Verdict::new() }), (false, Some(0.0)));
}

#[test]
fn a_percentile_is_the_least_sample_that_so_many_samples_do_not_exceed() {
    for n in 1..=220_usize {
        // In no order: 7919 is a prime larger than n.
        let samples: Vec<f64> = (1..=n).map(|i| (i * 7919 % n) as f64 * 1.5).collect();
        let found = Percentiles::of(samples.clone()).unwrap();
        let least = |percent: usize| {
            let enough = |value: &f64| 100 * samples.iter().filter(|sample| *sample <= value).count() >= percent * n;
            samples.iter().copied().filter(enough).fold(f64::INFINITY, f64::min)
        };
        assert_eq!((found.p50, found.p95, found.p99), (least(50), least(95), least(99)), "{n} samples");
    }
    let rounded = Percentiles::of(vec![1.000_4, 1.001_2]).unwrap();
    assert_eq!((rounded.min, rounded.p50, rounded.mean, rounded.max), (1.0, 1.0, 1.001, 1.001));
}

/// The cells of a table's lines; cells are at least two blanks apart.
fn cells(table: &str) -> Vec<Vec<&str>> {
    table.lines().map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()).collect()
}

#[test]
fn every_cell_of_the_table_is_under_its_head() {
    let table = bench_table(&[merged(17), merged(18)]);
    let (about, rest) = table.split_once('\n').unwrap();
    assert_eq!(
        about,
        "6 x Device 0 (processes in nodes of 4,2, sim, link 100:3:0.5 by emulated NICs, 6.5 us for a small write), \
         kimi-k2: hidden 256, 24 experts, top-10, fp8 out, fp32 back by fp8 partial rows, masked layout, \
         file:trace.safetensors routing, counts; 21 SMs; arena 7.0 MiB in host memory; times in us"
    );
    let lines = cells(rest);
    let row = |text: &'static str| text.split('|').collect::<Vec<&str>>();
    let head = "tokens|dispatch p50|p99|floor|p50/floor|combine p50|p99|floor|p50/floor|d.send|d.recv|c.send|c.recv|counts|flag|again|\
                KB out|KB back|wire out|wire back|max rel err|verified";
    let values = "1100.0|1392.0|3.3|333.3x|2100.0|2392.0|7.5|280.0x|3100.0|4100.0|5100.0|6100.0|7100.0|8100.0|9100.0|\
                  12.0|30.0|7.5|15.0|2.50e-1|NO (7 wrong)";
    assert_eq!((lines.len(), &lines[0]), (4, &row(head)));
    for (line, tokens) in lines[2..].iter().zip(["17", "18"]) {
        assert_eq!(*line, [vec![tokens], row(values)].concat());
    }
}

#[test]
fn a_table_of_one_node_has_no_columns_of_wires_and_halves() {
    let mut result = merged(17);
    result.ranks_per_node = PerNode::Even(6);
    (result.dispatch_send_us, result.counts_us, result.again_us) = (None, None, None);
    result.bytes_per_rank.dispatch_wire = 0;
    (result.partial, result.arena, result.max_rel_err, result.verified) = (None, None, None, true);
    let table = bench_table(std::slice::from_ref(&result));
    assert!(
        table.starts_with("6 x Device 0 (processes), kimi-k2: ") && table.contains(", fp32 back, masked"),
        "{table}"
    );
    assert!(table.contains("; arena 7.0 MiB; times in us\n"), "{table}");
    let lines = cells(&table);
    assert_eq!(lines[1][9..], ["KB out", "KB back", "max rel err", "verified"]);
    assert_eq!(lines[3][9..], ["12.0", "30.0", "NaN", "yes"]);
    result.ranks_per_node = PerNode::Even(3);
    assert!(bench_table(&[result]).contains("(processes in nodes of 3, sim, link 100:3:0.5 by emulated NICs, "));
}

#[test]
fn stages_are_listed_with_their_first_middle_and_last_block() {
    let table = stages_table(&[merged(17)]);
    let wanted: [&[&str]; 3] = [
        &["stage ends at, us", "tokens", "first block", "median", "last"],
        &["dispatch: rows placed", "17", "1.3", "2.3", "3.3"],
        &["combine: sums", "17", "5.0", "8.0", "11.0"],
    ];
    let lines = cells(&table);
    assert_eq!([&lines[0], &lines[2], &lines[3]].map(Vec::as_slice), wanted);
    let without = RunResult { stages_us: Vec::new(), ..merged(17) };
    assert_eq!(stages_table(&[without]), "");
}
