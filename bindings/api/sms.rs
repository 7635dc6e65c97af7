//! How many SMs a context's kernels take if the caller gives no budget: the fewest with which large calls are almost as
//! fast as with all, so that other work on the GPU keeps the rest.
//!
//! Beside the data path: computed while a context is built, from its shape alone. The model counts the bytes that a
//! call of a mean rank loads, stores and sends with uniform routing. Each of the four resources that carry them needs
//! this time for its own part:
//!
//! ```text
//!  multiprocessors  (loaded / load rate + stored / store rate + pushed / push rate) / how many there are
//!  memory           (loaded + stored + pushed) / its rate
//!  NVLink           pushed / its rate
//!  network          sent to other nodes / its rate
//!
//!  a call           LAUNCH_US + (the sum of their cubes)^(1/3)
//! ```
//!
//! The resources work in parallel, but not fully: a wait for one delays another. With the third power the model is
//! within a fifth of everything that was measured on one and two GPUs (benches/results, docs/notebook.md, "As many
//! multiprocessors as it takes"). Calls of few tokens wait for memory latency, not for bytes, and take all SMs; so do
//! large calls that would leave less than a quarter.

use super::shape::Shape;
use crate::kernels::{Device, DeviceKind};
use crate::proxy::Proxy;

/// Blocks of a context's kernels: the budget `given`, or the choice among the available SMs. The CPU device takes all.
pub(super) fn sms_of(given: Option<u32>, shape: &Shape, device: &Device, proxy: Option<&Proxy>) -> u32 {
    if let Some(sms) = given {
        return sms;
    }
    let available = sms_available(device, proxy);
    match device.kind() {
        DeviceKind::Cpu => available,
        DeviceKind::Cuda => Traffic::of(shape).choose(available),
    }
}

/// The sizes that determine the bytes that a mean rank moves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Traffic {
    /// Nodes, and ranks of the largest.
    pub nodes: usize,
    pub node_ranks: usize,
    pub top_k: usize,
    /// Tokens of a rank in a call.
    pub tokens: usize,
    /// A dispatched row with its scales; an expert's row; a partial row.
    pub row_bytes: usize,
    pub expert_bytes: usize,
    pub partial_bytes: usize,
    /// Whether the context has in-place output, and so no receive buffer for rows.
    pub in_place: bool,
}

/// What a call of a rank moves, in bytes.
#[derive(Debug, Clone, Copy)]
struct Moved {
    /// Loaded from the memory of its GPU.
    loaded: f64,
    /// Stored to that memory by its own SMs.
    stored: f64,
    /// Stored to other GPUs of its node.
    pushed: f64,
    /// Sent to other nodes.
    sent: f64,
}

/// Bytes per microsecond of one SM, and of the GPU's memory.
#[derive(Debug, Clone, Copy)]
struct Rates {
    load: f64,
    store: f64,
    push: f64,
    memory: f64,
}

/// Rates of dispatch and combine, fitted to calls of 4096 and 16 384 tokens with 8 to 132 SMs of one H200
/// (benches/results/h200-x1/sms-1.json); the push rate, to the most that a block reaches (docs/notebook.md, "Large
/// calls").
const DISPATCH: Rates = Rates { load: 55e3, store: 57e3, push: 45e3, memory: 3.0e6 };
const COMBINE: Rates = Rates { load: 110e3, store: 40e3, push: 40e3, memory: 3.85e6 };

/// NVLink of an H200, stores of all its SMs to seven other GPUs: measured, bytes per microsecond.
const NVLINK: f64 = 346e3;
/// The fastest network of a rank today, 800 Gb/s: over a slower network fewer SMs would do.
const NETWORK: f64 = 100e3;
/// Fixed time of a call, as fitted: one token takes 9 to 10 on one H200, with little overlap.
const LAUNCH_US: f64 = 8.0;
/// The most time of a call relative to all SMs: less than runs differ by.
const LOSS: f64 = 1.01;
/// SMs of an H100 or H200, if no GPU is given.
const OF_AN_H200: u32 = 132;
/// 1 / this of the SMs must be left, or all are taken: contexts for large calls also have small calls, which are faster
/// with all.
const LEFT: u32 = 4;
/// Tokens of a call per SM below which the call waits for memory latency.
const TOKENS_OF_FEW: usize = 16;
/// A choice is a multiple of this: SMs come in pairs, and the model is no finer.
const GRAIN: u32 = 4;

/// SMs of a device that a context may take: all except those that its network needs, but at least two then, one of them
/// to watch the proxy's words.
pub(super) fn sms_available(device: &Device, proxy: Option<&Proxy>) -> u32 {
    let (needed, all) = (proxy.map_or(0, |proxy| proxy.device_needs().blocks), device.multiprocessors());
    if needed == 0 { all } else { all.saturating_sub(needed).max(2) }
}

impl Traffic {
    pub fn of(shape: &Shape) -> Traffic {
        Traffic {
            nodes: shape.nodes.members().len(),
            node_ranks: shape.nodes.largest(),
            top_k: shape.top_k,
            tokens: shape.max_tokens,
            row_bytes: shape.row_bytes + 4 * shape.scale_words,
            expert_bytes: shape.combine_row_bytes(),
            partial_bytes: shape.partial_bytes(),
            in_place: shape.in_place.is_some(),
        }
    }

    /// Mean rows of a token: one per rank it goes to, and one per other node.
    fn spread(&self) -> (f64, f64) {
        let (nodes, ranks) = (self.nodes as f64, (self.nodes * self.node_ranks) as f64);
        let hit = |places: f64| places * (1.0 - (1.0 - 1.0 / places).powi(self.top_k as i32));
        (hit(ranks), hit(nodes) * (nodes - 1.0) / nodes)
    }

    fn dispatch(&self) -> Moved {
        let (ranks, nodes) = self.spread();
        let (row, k) = ((self.tokens * self.row_bytes) as f64, self.top_k as f64);
        let pushed = ranks * (1.0 - 1.0 / self.node_ranks as f64);
        // Loads: own rows to send, arrived rows to forward, rows of the receive buffer to place.
        let sends = if pushed + nodes > 0.0 { 1.0 } else { 0.0 };
        if self.in_place {
            // Of other ranks' rows only those for several experts of a rank.
            let (places, choices) = (self.node_ranks as f64, self.top_k as i32);
            let alone = choices as f64 * (1.0 - 1.0 / places).powi(choices - 1);
            let again = (ranks - alone).max(0.0) * (1.0 - 1.0 / places);
            return Moved {
                loaded: row * (sends + ranks - pushed + again),
                stored: row * (k - pushed),
                pushed: row * pushed,
                sent: 0.0,
            };
        }
        Moved {
            loaded: row * (sends + nodes + ranks),
            stored: row * (nodes + k),
            pushed: row * pushed,
            sent: row * nodes,
        }
    }

    fn combine(&self) -> Moved {
        let (ranks, nodes) = self.spread();
        let (expert, partial) = ((self.tokens * self.expert_bytes) as f64, (self.tokens * self.partial_bytes) as f64);
        let pushed = ranks * (1.0 - 1.0 / self.node_ranks as f64);
        // Experts' rows, partial rows at rails and sources, sums of other nodes; and the source's output.
        Moved {
            loaded: expert * self.top_k as f64 + partial * (ranks + nodes),
            stored: partial * (ranks - pushed + nodes) + expert,
            pushed: partial * pushed,
            sent: partial * nodes,
        }
    }

    /// Microseconds of dispatch and of combine with `sms` SMs.
    pub fn times_us(&self, sms: u32) -> [f64; 2] {
        [time_us(&self.dispatch(), &DISPATCH, sms), time_us(&self.combine(), &COMBINE, sms)]
    }

    /// How many of `available` SMs the kernels take: the fewest with which neither call takes more than 1 % longer than
    /// with all, if that leaves a quarter.
    pub fn choose(&self, available: u32) -> u32 {
        if self.tokens < TOKENS_OF_FEW * available as usize {
            return available;
        }
        // With several nodes one block only watches the network.
        let watching = u32::from(self.nodes > 1);
        let best = self.times_us(available - watching.min(available));
        let enough = |sms: u32| self.times_us(sms).iter().zip(best).all(|(time, best)| *time <= LOSS * best);
        let worth = available - available / LEFT;
        (GRAIN..=worth).step_by(GRAIN as usize).find(|sms| enough(sms - watching)).unwrap_or(available)
    }

    /// The choice among the SMs of a GPU, or of an H200, and its reason, for people.
    pub fn explain(&self, gpu: Option<u32>) -> String {
        let available = gpu.unwrap_or(OF_AN_H200);
        let sms = self.choose(available);
        let times = |sms| {
            let [dispatch, combine] = self.times_us(sms);
            format!("{dispatch:.0} and {combine:.0} us")
        };
        let why = if self.tokens < TOKENS_OF_FEW * available as usize {
            format!("calls of up to {} tokens wait for memory latency, not for bytes", self.tokens)
        } else if sms == available {
            "with three quarters of them large calls would take more than 1 % longer".into()
        } else {
            format!("by the model dispatch and combine take {} with them, {} with all", times(sms), times(available))
        };
        format!("a GPU's kernels take {sms} of {available} multiprocessors unless sms is given: {why}")
    }
}

fn time_us(moved: &Moved, rates: &Rates, sms: u32) -> f64 {
    let by_sms =
        (moved.loaded / rates.load + moved.stored / rates.store + moved.pushed / rates.push) / f64::from(sms.max(1));
    let by_memory = (moved.loaded + moved.stored + moved.pushed) / rates.memory;
    let parts = [by_sms, by_memory, moved.pushed / NVLINK, moved.sent / NETWORK];
    LAUNCH_US + parts.iter().map(|part| part.powi(3)).sum::<f64>().cbrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    const V3: Traffic = Traffic {
        nodes: 1,
        node_ranks: 8,
        top_k: 8,
        tokens: 4096,
        row_bytes: 7392,
        expert_bytes: 14336,
        partial_bytes: 14336,
        in_place: false,
    };

    fn within(what: &str, model: f64, measured: f64, part: f64) {
        let off = model / measured - 1.0;
        assert!(
            off.abs() <= part,
            "{what}: {model:.1} us by the model, {measured:.1} measured ({:+.0} %)",
            off * 100.0
        );
    }

    /// Results of `tokenyard bench` in a file under benches/results: tokens, experts a token, ranks, multiprocessors,
    /// times.
    fn measured(file: &str) -> Vec<(Traffic, u32, [f64; 2])> {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/results").join(file);
        let found: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let number = |result: &serde_json::Value, name: &str| result[name].as_u64().unwrap();
        let results = found["results"].as_array().cloned().unwrap_or_else(|| vec![found.clone()]);
        let read = |result: &serde_json::Value| {
            let size = |name| usize::try_from(number(result, name)).unwrap();
            let traffic = Traffic { node_ranks: size("world"), top_k: size("top_k"), tokens: size("tokens"), ..V3 };
            let time = |name: &str| result[name]["p50"].as_f64().unwrap();
            (traffic, number(result, "sms") as u32, [time("dispatch_us"), time("combine_us")])
        };
        results.iter().map(read).collect()
    }

    #[test]
    fn large_calls_take_what_the_model_says() {
        let files = ["h200-x1/sms-1.json", "h200-x2/prefill-2.json", "h200-x2/prefill-sms24-2.json"];
        let mut seen = 0;
        for (traffic, sms, times) in files.iter().flat_map(|file| measured(file)) {
            if traffic.tokens < 4096 {
                continue;
            }
            let what = format!("{} tokens of {} ranks with {sms} multiprocessors", traffic.tokens, traffic.node_ranks);
            let model = traffic.times_us(sms);
            within(&format!("dispatch, {what}"), model[0], times[0], 0.2);
            within(&format!("combine, {what}"), model[1], times[1], 0.2);
            seen += 1;
        }
        assert!(seen >= 14, "{seen}");
    }

    #[test]
    fn few_tokens_take_all() {
        assert_eq!(Traffic { tokens: 128, ..V3 }.choose(132), 132);
        assert_eq!(Traffic { tokens: 128, nodes: 8, ..V3 }.choose(116), 116);
        assert!(Traffic { tokens: 128, ..V3 }.explain(None).contains("132 of 132"));
    }

    #[test]
    fn the_slower_the_links_the_fewer() {
        let [pair, node, nodes] =
            [(1, 2), (1, 8), (8, 8)].map(|(nodes, node_ranks)| Traffic { nodes, node_ranks, ..V3 });
        let in_place = Traffic { in_place: true, ..node };
        let chosen = [pair, node, in_place, nodes].map(|traffic| traffic.choose(132));
        assert!(chosen.is_sorted_by(|a, b| a >= b), "{chosen:?}");
        assert_eq!(chosen[0], 132, "a few fewer are no gain");
        assert!(node.choose(132) < 100 && nodes.choose(132) < 50, "{chosen:?}");
        assert!(node.explain(Some(132)).contains(&format!("{} of 132", chosen[1])));
    }

    #[test]
    fn a_choice_costs_a_percent_at_the_most_and_one_fewer_step_costs_more() {
        for (nodes, node_ranks, tokens) in [(1, 1, 4096), (1, 4, 4096), (1, 8, 8192), (2, 8, 4096), (64, 8, 16384)] {
            let traffic = Traffic { nodes, node_ranks, tokens, ..V3 };
            let (sms, watching) = (traffic.choose(132), u32::from(nodes > 1));
            let loss = |sms: u32| {
                let (some, all) = (traffic.times_us(sms - watching), traffic.times_us(132 - watching));
                (some[0] / all[0]).max(some[1] / all[1])
            };
            assert!(loss(sms) <= LOSS, "{traffic:?}: {sms}");
            // If fewer are enough, three quarters are.
            assert!(sms == GRAIN || loss(sms.min(100) - GRAIN) > LOSS, "{traffic:?}: {sms}");
        }
    }

    #[test]
    fn no_shape_has_no_choice() {
        for (top_k, tokens, available) in [(1, 1, 1), (1, 262_144, 1), (32, 262_144, 3), (32, 1, 132)] {
            let traffic = Traffic { nodes: 64, node_ranks: 1, top_k, tokens, ..V3 };
            assert!((1..=available).contains(&traffic.choose(available)), "{traffic:?}");
        }
    }
}
