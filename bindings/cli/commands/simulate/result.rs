//! Results of a simulation: the JSON object, the table.
//!
//! After the simulated data path, on the main thread.

use serde::Serialize;

use tokenyard::internals::transport::network::sim::models::Link;

use super::plan::{Pair, Plan};
use crate::cli::report::result::{Bytes, Floor, Percentiles};
use crate::cli::report::table::table;

/// Bytes per ns that a GPU can store to its peers at best, all peers at the same time (measured, 112 blocks).
const NVLINK_RATE: f64 = 346.0;

/// Bytes that a phase moves.
#[derive(Debug, Clone)]
pub struct Traffic {
    /// By rank: bytes to and from other nodes.
    pub out: Vec<u64>,
    pub back: Vec<u64>,
    /// Bytes of all ranks to other ranks of their node.
    pub nvlink: u64,
}

impl Traffic {
    pub fn new(ranks: usize) -> Traffic {
        Traffic { out: vec![0; ranks], back: vec![0; ranks], nvlink: 0 }
    }

    pub fn wire(&mut self, from: usize, to: usize, bytes: u32) {
        self.out[from] += u64::from(bytes);
        self.back[to] += u64::from(bytes);
    }

    fn wire_bytes(&self) -> u64 {
        self.out.iter().sum()
    }
}

/// Samples of one direction in all iterations.
#[derive(Debug, Default)]
pub struct Samples {
    pub us: Vec<f64>,
    wire_bytes: u64,
    nvlink_bytes: u64,
    posts: u64,
}

impl Samples {
    pub fn add(&mut self, us: impl Iterator<Item = f64>, traffic: &Traffic, posts: u64) {
        self.us.extend(us);
        self.wire_bytes += traffic.wire_bytes();
        self.nvlink_bytes += traffic.nvlink;
        self.posts += posts;
    }

    /// Mean per sample, which is a rank in an iteration.
    fn mean(&self, sum: u64) -> f64 {
        sum as f64 / self.us.len().max(1) as f64
    }

    /// The shortest time in which a mean rank's bytes can be moved.
    fn floor_us(&self, link: &Link) -> f64 {
        link.floor_us(self.mean(self.wire_bytes)).max(self.mean(self.nvlink_bytes) / NVLINK_RATE / 1e3)
    }
}

/// The object of one projection.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Projection {
    pub version: &'static str,
    pub commit: &'static str,
    pub nodes: usize,
    pub ranks_per_node: usize,
    pub ranks: usize,
    pub link: String,
    pub preset: &'static str,
    pub hidden: usize,
    pub experts: usize,
    pub top_k: usize,
    pub dtype: &'static str,
    pub combine_dtype: &'static str,
    pub tokens: usize,
    pub routing: &'static str,
    pub iters: usize,
    pub seed: u64,
    pub chunk_rows: Pair<usize>,
    pub without: Vec<&'static str>,
    pub dispatch_us: Percentiles,
    pub combine_us: Percentiles,
    pub floor_us: Floor,
    pub messages_per_rank: Pair<f64>,
    pub bytes_per_rank: Bytes,
}

/// Settings that a projection's object repeats.
#[derive(Debug, Clone)]
pub struct About {
    pub link: String,
    pub iters: usize,
    pub without: Vec<&'static str>,
}

impl Projection {
    pub fn new(plan: &Plan, link: &Link, about: &About, dispatch: Samples, combine: Samples) -> Projection {
        let shape = plan.shape;
        let round = |us: f64| (us * 1e3).round() / 1e3;
        let floor_us = Floor { dispatch: round(dispatch.floor_us(link)), combine: round(combine.floor_us(link)) };
        let bytes = |samples: &Samples, sum: u64| samples.mean(sum).round() as u64;
        Projection {
            version: env!("CARGO_PKG_VERSION"),
            commit: option_env!("TOKENYARD_COMMIT").unwrap_or("unknown"),
            nodes: shape.nodes,
            ranks_per_node: shape.per_node,
            ranks: shape.ranks(),
            link: about.link.clone(),
            preset: shape.preset.name,
            hidden: shape.preset.hidden,
            experts: shape.preset.experts,
            top_k: shape.preset.top_k,
            dtype: shape.preset.dtype.name(),
            combine_dtype: "bf16",
            tokens: shape.tokens,
            routing: "uniform",
            iters: about.iters,
            seed: shape.seed,
            chunk_rows: plan.chunk_rows,
            without: about.without.clone(),
            floor_us,
            messages_per_rank: Pair {
                dispatch: round(dispatch.mean(dispatch.posts)),
                combine: round(combine.mean(combine.posts)),
            },
            bytes_per_rank: Bytes {
                dispatch_nvlink: bytes(&dispatch, dispatch.nvlink_bytes),
                dispatch_wire: bytes(&dispatch, dispatch.wire_bytes),
                combine_nvlink: bytes(&combine, combine.nvlink_bytes),
                combine_wire: bytes(&combine, combine.wire_bytes),
            },
            dispatch_us: Percentiles::of(dispatch.us).unwrap_or_default(),
            combine_us: Percentiles::of(combine.us).unwrap_or_default(),
        }
    }
}

/// The table of a simulation.
pub fn projection_table(results: &[Projection]) -> String {
    let Some(r) = results.first() else { return String::new() };
    let head = [
        "tokens",
        "dispatch p50",
        "p95",
        "floor",
        "combine p50",
        "p95",
        "floor",
        "KB out",
        "KB back",
        "posts out",
        "posts back",
    ];
    let us = |value: f64| format!("{value:.1}");
    let row = |r: &Projection| {
        let (d, c, f, b, m) = (&r.dispatch_us, &r.combine_us, &r.floor_us, &r.bytes_per_rank, &r.messages_per_rank);
        let mut row = vec![r.tokens.to_string(), us(d.p50), us(d.p95), us(f.dispatch), us(c.p50), us(c.p95)];
        row.extend([us(f.combine), us(b.dispatch_wire as f64 / 1e3), us(b.combine_wire as f64 / 1e3)]);
        row.extend([us(m.dispatch), us(m.combine)]);
        row
    };
    let without = if r.without.is_empty() { String::new() } else { format!("; without {}", r.without.join(", ")) };
    format!(
        "projected: {} nodes x {} over {}, {}: hidden {}, {} experts, top-{}, {} out, {} back; {} iterations{without}; \
         times in us, bytes and posts of a rank between nodes\n{}",
        r.nodes,
        r.ranks_per_node,
        r.link,
        r.preset,
        r.hidden,
        r.experts,
        r.top_k,
        r.dtype,
        r.combine_dtype,
        r.iters,
        table(&head, &results.iter().map(row).collect::<Vec<_>>())
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::cases::presets;
    use crate::cli::commands::simulate::plan::Order;
    use crate::cli::commands::simulate::workload::Shape;
    use serde_json::{Value, json};
    use tokenyard::internals::transport::network::sim::models;

    /// 200 times in no order: `base` + i²/100 for i = 1 to 200, whose percentiles, mean and extremes all differ.
    fn spread(base: f64) -> Vec<f64> {
        (0..200).map(|i| f64::from(i * 77 % 200 + 1)).map(|i| base + i * i / 100.0).collect()
    }

    /// Its distribution: places 100, 190 and 198 of 200; the sum of i² is 200 · 201 · 401 / 6.
    fn spread_of(base: f64) -> Value {
        let at = |over: f64| ((base + over) * 1000.0).round() / 1000.0;
        json!({
            "p50": at(100.0), "p95": at(361.0), "p99": at(392.04), "min": at(0.01), "max": at(400.0),
            "mean": at(134.335),
        })
    }

    /// A projection whose fields all have values of their own, over 100 Gb/s with a latency of 5 us. A rank and
    /// iteration has 1/200 of all bytes and posts.
    fn projection(tokens: usize) -> Projection {
        let preset = presets::find("qwen3-235b").unwrap();
        let shape = Shape { nodes: 3, per_node: 2, preset, tokens, seed: 9 };
        let plan = Plan { shape, order: Order::DESIGN, chunk_rows: Pair { dispatch: 11, combine: 13 } };
        let about = About { link: "100:5:0.2".to_string(), iters: 17, without: vec!["early-sums", "spread-meta"] };
        let dispatch =
            Samples { us: spread(1000.0), wire_bytes: 200 * 250_000 + 150, nvlink_bytes: 200 * 6_920_000, posts: 1300 };
        let combine =
            Samples { us: spread(2000.0), wire_bytes: 200 * 100_000, nvlink_bytes: 200 * 10_380_000, posts: 460 };
        Projection::new(&plan, &models::parse("100:5:0.2").unwrap(), &about, dispatch, combine)
    }

    #[test]
    fn every_field_of_the_object_has_its_own_value() {
        let wanted = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "commit": option_env!("TOKENYARD_COMMIT").unwrap_or("unknown"),
            "nodes": 3,
            "ranks_per_node": 2,
            "ranks": 6,
            "link": "100:5:0.2",
            "preset": "qwen3-235b",
            "hidden": 4096,
            "experts": 128,
            "top_k": 8,
            "dtype": "bf16",
            "combine_dtype": "bf16",
            "tokens": 48,
            "routing": "uniform",
            "iters": 17,
            "seed": 9,
            "chunk_rows": {"dispatch": 11, "combine": 13},
            "without": ["early-sums", "spread-meta"],
            "dispatch_us": spread_of(1000.0),
            "combine_us": spread_of(2000.0),
            // 250 000.75 bytes at 12 500 a us, after 5 us, which is more than 6.92 MB at 346 000 a us; 100 000 bytes
            // in 8 us, after 5 us, which is less than 10.38 MB in 30 us.
            "floor_us": {"dispatch": 25.0, "combine": 30.0},
            "messages_per_rank": {"dispatch": 6.5, "combine": 2.3},
            "bytes_per_rank": {
                "dispatch_nvlink": 6_920_000, "dispatch_wire": 250_001,
                "combine_nvlink": 10_380_000, "combine_wire": 100_000,
            },
        });
        assert_eq!(serde_json::to_value(projection(48)).unwrap(), wanted);
    }

    #[test]
    fn every_cell_of_the_table_is_under_its_head() {
        let table = projection_table(&[projection(48), projection(49)]);
        let (about, rest) = table.split_once('\n').unwrap();
        assert_eq!(
            about,
            "projected: 3 nodes x 2 over 100:5:0.2, qwen3-235b: hidden 4096, 128 experts, top-8, bf16 out, bf16 back; 17 \
             iterations; without early-sums, spread-meta; times in us, bytes and posts of a rank between nodes"
        );
        let cells = |line: &str| -> Vec<String> {
            line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_string).collect()
        };
        let lines: Vec<Vec<String>> = rest.lines().map(cells).collect();
        let head = "tokens|dispatch p50|p95|floor|combine p50|p95|floor|KB out|KB back|posts out|posts back";
        let values = "1100.0|1361.0|25.0|2100.0|2361.0|30.0|250.0|100.0|6.5|2.3";
        let row = |text: &str| text.split('|').map(str::to_string).collect::<Vec<String>>();
        assert_eq!((lines.len(), &lines[0]), (4, &row(head)));
        assert_eq!(lines[2..], [row(&format!("48|{values}")), row(&format!("49|{values}"))]);
        let all = Projection { without: Vec::new(), ..projection(48) };
        assert!(projection_table(&[all]).contains("; 17 iterations; times in us, "));
    }

    #[test]
    fn samples_add_up_over_iterations() {
        let mut traffic = Traffic::new(3);
        traffic.wire(0, 2, 10);
        traffic.wire(0, 1, 20);
        traffic.wire(1, 2, 40);
        traffic.nvlink = 7;
        assert_eq!((&traffic.out, &traffic.back), (&vec![30, 40, 0], &vec![0, 20, 50]));
        let mut samples = Samples::default();
        samples.add([1.0, 2.0, 3.0].into_iter(), &traffic, 100);
        samples.add([4.0, 5.0, 6.0].into_iter(), &traffic, 200);
        assert_eq!((samples.us.as_slice(), samples.posts), (&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0][..], 300));
        assert_eq!((samples.wire_bytes, samples.nvlink_bytes), (140, 14));
    }
}
