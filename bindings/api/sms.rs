//! How many multiprocessors a context's kernels take where the caller gives no budget: as few as large calls need to be
//! all but as fast as with all of them, so that what else runs on the GPU keeps the rest.
//!
//! Beside the data path: reckoned while a context is built, from its shape alone. The model is one of bytes. Of a mean
//! rank, with uniform routing, what a call loads, stores and sends is known; each of the four things that carry it
//! needs so long for its own part:
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
//! They work side by side, but not wholly: what one waits for holds up another. With the third power the model is
//! within a fifth of everything that was measured on one and two GPUs (benches/results, docs/performance.md, "As many
//! multiprocessors as it takes"). Calls of few tokens wait for trips to memory, not for bytes, and take all; so do
//! large ones that would leave but a few.

use super::shape::Shape;
use crate::kernels::{Device, DeviceKind};
use crate::proxy::Proxy;

/// Blocks of a context's kernels: the budget that it was `given`, or what is chosen of the multiprocessors that there
/// are. The CPU device has none to spare anybody.
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

/// Where a context's calls move bytes, of a mean rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Traffic {
    /// Nodes, and ranks of the largest.
    pub nodes: usize,
    pub node_ranks: usize,
    pub top_k: usize,
    /// Of a rank, in a call.
    pub tokens: usize,
    /// A dispatched row with its scales; an expert's row; a partial row.
    pub row_bytes: usize,
    pub expert_bytes: usize,
    pub partial_bytes: usize,
    /// Whether rows are stored where they belong, and no inbox lies between.
    pub in_place: bool,
}

/// What a call of a rank moves, in bytes.
#[derive(Debug, Clone, Copy)]
struct Moved {
    /// From its GPU's memory.
    loaded: f64,
    /// To it, by its own multiprocessors.
    stored: f64,
    /// To other GPUs of its node.
    pushed: f64,
    /// To other nodes.
    sent: f64,
}

/// What a multiprocessor moves in a microsecond, and what the memory does, in bytes.
#[derive(Debug, Clone, Copy)]
struct Rates {
    load: f64,
    store: f64,
    push: f64,
    memory: f64,
}

/// Of dispatch and of combine, fitted to calls of 4096 and 16 384 tokens with 8 to 132 multiprocessors of one H200
/// (benches/results/h200-x1/sms-1.json); a push, to what a block reaches at the most (docs/performance.md, "Large
/// calls").
const DISPATCH: Rates = Rates { load: 55e3, store: 57e3, push: 45e3, memory: 3.0e6 };
const COMBINE: Rates = Rates { load: 110e3, store: 40e3, push: 40e3, memory: 3.85e6 };

/// NVLink of an H200, stores of all its multiprocessors to seven others: measured, bytes a microsecond.
const NVLINK: f64 = 346e3;
/// A network that no rank outdoes today, 800 Gb/s: where it is slower, fewer multiprocessors would do.
const NETWORK: f64 = 100e3;
/// What any call takes beside its bytes, as fitted: one token takes 9 to 10 on one H200, in which little overlaps.
const LAUNCH_US: f64 = 8.0;
/// What a call may take longer than with all multiprocessors: less than runs differ by.
const LOSS: f64 = 1.01;
/// Multiprocessors of an H100 or H200, where no GPU is given.
const OF_AN_H200: u32 = 132;
/// Of the multiprocessors as many must be left, or all are taken: contexts for large calls have small ones, too, which
/// would rather have all.
const LEFT: u32 = 4;
/// Tokens of a call for each multiprocessor below which trips to memory are what it waits for.
const TOKENS_OF_FEW: usize = 16;
/// A choice is a multiple of this: multiprocessors come in pairs, and the last digit says nothing.
const GRAIN: u32 = 4;

/// Multiprocessors of a device that a context may take: all but those that its network needs; two at least then, one of
/// which watches the proxy's words.
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
            in_place: shape.own_output.is_some(),
        }
    }

    /// Rows of a token: ranks that it goes to, and other nodes.
    fn spread(&self) -> (f64, f64) {
        let (nodes, ranks) = (self.nodes as f64, (self.nodes * self.node_ranks) as f64);
        let hit = |places: f64| places * (1.0 - (1.0 - 1.0 / places).powi(self.top_k as i32));
        (hit(ranks), hit(nodes) * (nodes - 1.0) / nodes)
    }

    fn dispatch(&self) -> Moved {
        let (ranks, nodes) = self.spread();
        let (row, k) = ((self.tokens * self.row_bytes) as f64, self.top_k as f64);
        let pushed = ranks * (1.0 - 1.0 / self.node_ranks as f64);
        // Own rows are loaded to be sent, those that landed to be forwarded, those of the inbox to be placed.
        let sends = if pushed + nodes > 0.0 { 1.0 } else { 0.0 };
        if self.in_place {
            // Of others' rows those alone that several experts of a rank want.
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
        // Experts' rows, partial rows at rails and at home, sums of other nodes; and home's own sums.
        Moved {
            loaded: expert * self.top_k as f64 + partial * (ranks + nodes),
            stored: partial * (ranks - pushed + nodes) + expert,
            pushed: partial * pushed,
            sent: partial * nodes,
        }
    }

    /// Microseconds of dispatch and of combine with so many multiprocessors.
    pub fn times_us(&self, sms: u32) -> [f64; 2] {
        [time_us(&self.dispatch(), &DISPATCH, sms), time_us(&self.combine(), &COMBINE, sms)]
    }

    /// How many of `available` multiprocessors its kernels take: the fewest by which neither call takes more than a
    /// percent longer than with all of them, if that leaves a quarter.
    pub fn choose(&self, available: u32) -> u32 {
        if self.tokens < TOKENS_OF_FEW * available as usize {
            return available;
        }
        // With several nodes one block watches the network alone.
        let watching = u32::from(self.nodes > 1);
        let best = self.times_us(available - watching.min(available));
        let enough = |sms: u32| self.times_us(sms).iter().zip(best).all(|(time, best)| *time <= LOSS * best);
        let worth = available - available / LEFT;
        (GRAIN..=worth).step_by(GRAIN as usize).find(|sms| enough(sms - watching)).unwrap_or(available)
    }

    /// The choice among those of a GPU, or of an H200, and what it rests on, for people.
    pub fn explain(&self, gpu: Option<u32>) -> String {
        let available = gpu.unwrap_or(OF_AN_H200);
        let sms = self.choose(available);
        let times = |sms| {
            let [dispatch, combine] = self.times_us(sms);
            format!("{dispatch:.0} and {combine:.0} us")
        };
        let why = if self.tokens < TOKENS_OF_FEW * available as usize {
            format!("calls of up to {} tokens wait for trips to memory, not for bytes", self.tokens)
        } else if sms == available {
            "with three quarters of them large calls would take more than a percent longer".into()
        } else {
            format!("dispatch and combine are reckoned to take {} with them, {} with all", times(sms), times(available))
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
        let [near, node, nodes] =
            [(1, 2), (1, 8), (8, 8)].map(|(nodes, node_ranks)| Traffic { nodes, node_ranks, ..V3 });
        let in_place = Traffic { in_place: true, ..node };
        let chosen = [near, node, in_place, nodes].map(|traffic| traffic.choose(132));
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
            // Where fewer do, three quarters are enough.
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
