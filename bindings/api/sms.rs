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

    fn of(nodes: usize, node_ranks: usize, top_k: usize, in_place: bool) -> Traffic {
        // 100 tokens of rows of 10, 20 and 40 bytes.
        Traffic { nodes, node_ranks, top_k, tokens: 100, row_bytes: 10, expert_bytes: 20, partial_bytes: 40, in_place }
    }

    fn numbers(moved: Moved) -> [f64; 4] {
        [moved.loaded, moved.stored, moved.pushed, moved.sent].map(|bytes| (bytes * 1e6).round() / 1e6)
    }

    #[test]
    fn a_mean_rank_moves_the_bytes_of_uniform_routing() {
        // Dispatch and combine: loaded, stored, pushed, sent. All rows of a rank together have R = 1000 bytes as
        // dispatched, E = 2000 as experts' rows and P = 4000 as partial rows.
        for (traffic, dispatch, combine) in [
            // One rank takes its 3 choices from its own memory: R loaded, 3 R stored. It sums 3 E to P, adds P to E.
            (of(1, 1, 3, false), [1000.0, 3000.0, 0.0, 0.0], [10_000.0, 6000.0, 0.0, 0.0]),
            // Of 4 ranks one is hit, with chance 3/4 another: R to send and R to place; P of 3/4 of the tokens is
            // pushed, and of the rest stored.
            (of(1, 4, 1, false), [2000.0, 1000.0, 750.0, 0.0], [6000.0, 3000.0, 3000.0, 0.0]),
            // Of 2 nodes of one rank one is hit, with chance 1/2 the other: R to send, R / 2 to forward, R to place.
            (of(2, 1, 1, false), [2500.0, 1500.0, 0.0, 500.0], [8000.0, 8000.0, 0.0, 2000.0]),
            // 2 choices among 4 ranks of 2 nodes hit 4 (1 - (3/4)^2) = 7/4 ranks, and 3/2 nodes, of which 3/4 are
            // others. Half of the rows for ranks are pushed: 7/8.
            (of(2, 2, 2, false), [3500.0, 2750.0, 875.0, 750.0], [14_000.0, 8500.0, 3500.0, 3000.0]),
            // 2 choices of 2 ranks hit 3/2 ranks, of which 3/4 are others. Own rows are placed at once (3/4); rows for
            // both experts of another rank, 1/4 of the tokens, are copied there.
            (of(1, 2, 2, true), [2000.0, 1250.0, 750.0, 0.0], [10_000.0, 5000.0, 3000.0, 0.0]),
        ] {
            assert_eq!(numbers(traffic.dispatch()), dispatch, "dispatch of {traffic:?}");
            assert_eq!(numbers(traffic.combine()), combine, "combine of {traffic:?}");
        }
    }

    #[test]
    fn each_resource_needs_its_bytes_over_its_rate_and_their_cubes_add_up() {
        let none = Moved { loaded: 0.0, stored: 0.0, pushed: 0.0, sent: 0.0 };
        let free = Rates { load: 1e18, store: 1e18, push: 1e18, memory: 1e18 };
        let close = |moved: Moved, rates: Rates, sms: u32, us: f64| {
            let found = time_us(&moved, &rates, sms);
            assert!((found - us).abs() < 1e-6, "{moved:?} at {rates:?} with {sms}: {found}, and not {us}");
        };
        close(none, free, 1, 8.0);
        // 10 + 20 + 30 us of one SM, and 12 of five.
        let rates = Rates { load: 100.0, store: 10.0, push: 1.0, ..free };
        let moved = Moved { loaded: 1000.0, stored: 200.0, pushed: 30.0, sent: 0.0 };
        close(moved, rates, 1, 68.0);
        close(moved, rates, 5, 20.0);
        close(moved, rates, 0, 68.0);
        // 1230 bytes of memory.
        close(moved, Rates { memory: 10.0, ..free }, 132, 131.0);
        // NVLink at 346 kB a us, the network at 100.
        close(Moved { pushed: 346e4, ..none }, free, 132, 18.0);
        close(Moved { sent: 2e6, ..none }, free, 132, 28.0);
        // Cubes of 3, 4 and 5 are together that of 6.
        let moved = Moved { loaded: 300.0, pushed: 4.0 * 346e3, sent: 5.0 * 100e3, ..none };
        close(moved, Rates { load: 1.0, ..free }, 100, 14.0);
    }

    #[test]
    fn times_are_those_of_the_documented_rates() {
        // Computed apart from the head of this file and the rates: 4096 tokens of V3.
        let in_place = Traffic { in_place: true, ..V3 };
        for (traffic, sms, wanted) in [
            (V3, 132, [424.837, 802.934]),
            (V3, 80, [428.457, 806.356]),
            (Traffic { nodes: 8, ..V3 }, 44, [1449.565, 2789.328]),
            (in_place, 132, [413.555, 802.934]),
            (in_place, 24, [455.469, 940.514]),
        ] {
            let found = traffic.times_us(sms).map(|us| (us * 1e3).round() / 1e3);
            assert_eq!(found, wanted, "{traffic:?} with {sms}");
        }
    }

    #[test]
    fn the_choice_is_the_fewest_within_a_percent_by_the_formula() {
        // Nodes, ranks of each, choices, SMs there are: the choice. Computed apart from the formula, step by step of
        // four; beside it what the slower call then takes, and with four SMs fewer, relative to all SMs.
        for (nodes, node_ranks, top_k, available, sms) in [
            (1, 8, 8, 132, 80),  // 1.0085, 1.0103
            (1, 4, 8, 132, 96),  // 1.0083, 1.0101
            (1, 3, 8, 132, 132), // would be more than three quarters
            (2, 8, 8, 132, 76),  // 1.0090, 1.0109
            (8, 8, 8, 132, 44),  // 1.0085, 1.0115
            (64, 8, 8, 132, 32), // 1.0097, 1.0147
            (2, 1, 8, 132, 72),  // 1.0086, 1.0105
            (1, 8, 1, 132, 80),  // 1.0097, 1.0118
            (1, 8, 2, 132, 76),
            // 96 of 132 leave more than a quarter, 100 would not.
            (1, 8, 26, 132, 96),
            (1, 8, 27, 132, 132),
            // Of 108 SMs 76, and 1.0083, 1.0105. Of 96 three quarters are just enough, of 92 they are not.
            (1, 8, 8, 108, 76),
            (1, 8, 8, 96, 72),
            (1, 8, 8, 92, 92),
        ] {
            let traffic = Traffic { nodes, node_ranks, top_k, ..V3 };
            assert_eq!(traffic.choose(available), sms, "{traffic:?} of {available}");
        }
        // In place combine is the slower call: 1.0094 with 64 SMs, and 1.0117 with 60.
        assert_eq!(Traffic { in_place: true, ..V3 }.choose(132), 64);
    }

    #[test]
    fn sizes_of_rows_change_the_choice_where_the_launch_or_combine_decides() {
        let rows = |tokens, row_bytes, expert_bytes, partial_bytes, in_place| {
            Traffic { tokens, row_bytes, expert_bytes, partial_bytes, in_place, ..V3 }.choose(132)
        };
        // The smaller the rows, the more of a call is its launch, which takes no SMs.
        assert_eq!([rows(2112, 528, 1024, 1024, false), rows(16_384, 528, 1024, 1024, false)], [72, 76]);
        assert_eq!([rows(2112, 4224, 8192, 8192, false), rows(16_384, 4224, 8192, 8192, false)], [76, 80]);
        // bf16 rows instead of fp8 rows; then fp8 and fp32 partial rows.
        assert_eq!(rows(2112, 8192, 8192, 8192, false), 80);
        assert_eq!([rows(4096, 7392, 14_336, 7392, true), rows(4096, 7392, 14_336, 28_672, true)], [80, 56]);
    }

    #[test]
    fn sixteen_tokens_a_multiprocessor_are_no_longer_few() {
        for (available, sms) in [(132, 80), (96, 72), (148, 80)] {
            let few = 16 * available as usize;
            assert_eq!(Traffic { tokens: few - 1, ..V3 }.choose(available), available);
            assert_eq!(Traffic { tokens: few, ..V3 }.choose(available), sms);
        }
        assert!(Traffic { tokens: 2111, ..V3 }.explain(None).contains("calls of up to 2111 tokens wait for memory"));
        assert!(Traffic { tokens: 2112, ..V3 }.explain(None).contains("by the model"));
    }

    #[test]
    fn more_ranks_or_nodes_never_take_more() {
        let chosen = |of: &dyn Fn(usize) -> Traffic| (1..=16).map(|n| of(n).choose(132)).collect::<Vec<u32>>();
        let ranks = chosen(&|node_ranks| Traffic { node_ranks, ..V3 });
        let in_place = chosen(&|node_ranks| Traffic { node_ranks, in_place: true, ..V3 });
        let nodes = chosen(&|nodes| Traffic { nodes, ..V3 });
        for chosen in [&ranks, &in_place, &nodes] {
            assert!(chosen.is_sorted_by(|a, b| a >= b) && chosen[0] > chosen[15], "{chosen:?}");
            assert!(chosen.iter().all(|sms| sms % 4 == 0), "{chosen:?}");
        }
        assert!(ranks.iter().zip(&in_place).all(|(placed, stored)| placed >= stored), "{ranks:?} {in_place:?}");
        let times = |sms: u32| Traffic { nodes: 2, ..V3 }.times_us(sms);
        assert!((1..132).all(|sms| (0..2).all(|call| times(sms)[call] > times(sms + 1)[call])));
    }

    #[test]
    fn a_choice_is_explained_with_its_times() {
        assert_eq!(
            Traffic { tokens: 128, ..V3 }.explain(Some(116)),
            "a GPU's kernels take 116 of 116 multiprocessors unless sms is given: calls of up to 128 tokens wait for \
             memory latency, not for bytes"
        );
        assert_eq!(
            V3.explain(None),
            "a GPU's kernels take 80 of 132 multiprocessors unless sms is given: by the model dispatch and combine take \
             428 and 806 us with them, 425 and 803 us with all"
        );
        assert_eq!(
            Traffic { node_ranks: 1, ..V3 }.explain(Some(108)),
            "a GPU's kernels take 108 of 108 multiprocessors unless sms is given: with three quarters of them large \
             calls would take more than 1 % longer"
        );
    }

    #[test]
    fn the_traffic_of_a_context_has_the_sizes_of_its_shape() {
        use super::super::{AllToAll, Partial, RowFormat};
        use crate::base::Dtype;
        let world = crate::transport::World::threads(7).unwrap().remove(0).with_nodes(&[3, 4]).unwrap();
        let builder = AllToAll::builder(&world).hidden(512).experts(28).top_k(5).max_tokens_per_rank(60);
        let builder = builder.format(RowFormat::FP8_F32).quantize(true).combine_dtype(Dtype::Fp32);
        let of = |partial: Partial| {
            let builder = builder.clone().tuning(|tuning| (tuning.partial, tuning.round_tokens) = (partial, Some(20)));
            let Traffic { nodes, node_ranks, top_k, tokens, row_bytes, expert_bytes, partial_bytes, in_place } =
                Traffic::of(&builder.check().unwrap().0);
            ([nodes, node_ranks, top_k, tokens, row_bytes, expert_bytes, partial_bytes], in_place)
        };
        // Rows travel as fp8 with four scales; partial rows as fp32, or as fp8 with four scales.
        assert_eq!(of(Partial::Same), ([2, 4, 5, 60, 512 + 16, 2048, 2048], false));
        assert_eq!(of(Partial::Fp8), ([2, 4, 5, 60, 512 + 16, 2048, 512 + 16], false));
        let one = crate::transport::World::threads(2).unwrap().remove(0);
        let placed = AllToAll::builder(&one).hidden(64).experts(4).top_k(2).max_tokens_per_rank(8);
        let placed = placed.tuning(|tuning| tuning.in_place = Some((32, 1))).check().unwrap().0;
        assert!(Traffic::of(&placed).in_place);
    }

    #[test]
    fn a_given_budget_and_the_cpu_device_need_no_choice() {
        let world = crate::transport::World::threads(1).unwrap().remove(0);
        let builder = super::super::AllToAll::builder(&world);
        let shape = builder.hidden(64).experts(4).top_k(2).max_tokens_per_rank(100_000).check().unwrap().0;
        let cpu = Device::cpu().unwrap();
        assert_eq!(sms_of(Some(3), &shape, &cpu, None), 3);
        assert_eq!(sms_of(None, &shape, &cpu, None), cpu.multiprocessors());
        assert_eq!(sms_available(&cpu, None), cpu.multiprocessors());
    }
}
