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
