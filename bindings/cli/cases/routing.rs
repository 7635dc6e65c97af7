//! Routings of a run: which experts each token goes to, drawn afresh for every iteration or taken from a trace.
//!
//! Before the data path, on any thread. A draw is a function of (seed, iteration, rank, token): ranks in different
//! processes draw each other's routing without talking.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;

use tokenyard::internals::base::{Dtype, Error, Result};

use super::inputs::{Counter, Inputs, ScaleKind, Use};
use super::trace_file::TraceFile;

/// Expert groups of DeepSeek-V3's router, and how many of them a token may use.
const GROUPS: usize = 8;
const GROUPS_OF_TOKEN: usize = 4;
/// A group is judged by the sum of this many of its best scores.
const GROUP_BEST: usize = 2;

const FORMS: &str = "give uniform, v3-groups, zipf:S (say zipf:1.2), hot:N (say hot:4) or file:PATH";

/// `--routing`.
#[derive(Debug, Clone, PartialEq)]
pub enum Routing {
    /// K distinct experts of all.
    Uniform,
    /// The best K of the experts in the best 4 of 8 groups, by random scores.
    V3Groups,
    /// K distinct experts, drawn one after the other with chances in proportion to 1 / place^S; places are a
    /// permutation that the seed fixes for the run.
    Zipf(f64),
    /// Experts 0 to min(N, K) − 1 for every token, the rest uniform among the experts that are not hot.
    Hot(usize),
    /// From a file.
    File(String),
}

impl Routing {
    /// Reads the argument of `--routing`.
    pub fn parse(text: &str) -> Result<Routing> {
        let refuse = |advice: &str| Error::argument("--routing", format!("`{text}`"), advice.to_string());
        match text.split_once(':') {
            None if text == "uniform" => Ok(Routing::Uniform),
            None if text == "v3-groups" => Ok(Routing::V3Groups),
            Some(("zipf", s)) => match s.parse::<f64>() {
                Ok(s) if (0.0..=20.0).contains(&s) => Ok(Routing::Zipf(s)),
                _ => Err(refuse("zipf takes an exponent from 0 (uniform) to 20, say zipf:1.2")),
            },
            Some(("hot", n)) => match n.parse::<usize>() {
                Ok(n) if n > 0 => Ok(Routing::Hot(n)),
                _ => Err(refuse("hot takes a number of experts, at least 1, say hot:4")),
            },
            Some(("file", path)) if !path.is_empty() => Ok(Routing::File(path.to_string())),
            _ => Err(refuse(FORMS)),
        }
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Routing::Uniform => write!(f, "uniform"),
            Routing::V3Groups => write!(f, "v3-groups"),
            Routing::Zipf(s) => write!(f, "zipf:{s}"),
            Routing::Hot(n) => write!(f, "hot:{n}"),
            Routing::File(path) => write!(f, "file:{path}"),
        }
    }
}

impl Routing {
    /// As a result names it: for a file only its name, since its folder belongs to the machine.
    pub fn label(&self) -> String {
        let Routing::File(path) = self else { return self.to_string() };
        let name = Path::new(path).file_name().map_or_else(|| path.into(), OsStr::to_string_lossy);
        format!("file:{name}")
    }
}

/// The shape that a run's routing must fit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoutingShape {
    pub ranks: usize,
    pub experts: usize,
    pub top_k: usize,
    /// Most tokens of a rank; the stride of a trace's window.
    pub max_tokens: usize,
    /// Chance that a choice is dropped (becomes -1).
    pub none: f64,
    /// The chance that a choice repeats an earlier one of its token.
    pub duplicate: f64,
    pub seed: u64,
}

/// The routing of one rank in one iteration.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Routed {
    /// [tokens][top_k].
    pub topk_idx: Vec<i64>,
    /// [tokens][top_k].
    pub topk_weight: Vec<f32>,
}

/// Draws routings of one kind and shape.
#[derive(Debug)]
pub struct Router {
    routing: Routing,
    shape: RoutingShape,
    /// Zipf: the chance of each expert, not normalised.
    chances: Vec<f64>,
    trace: Option<TraceFile>,
}

impl Router {
    /// Checks that the routing is possible in this shape, and reads its file if it has one.
    pub fn new(routing: &Routing, shape: RoutingShape) -> Result<Router> {
        let RoutingShape { experts, top_k, ranks, .. } = shape;
        if top_k == 0 || top_k > experts {
            let advice = format!("choose 1 to {experts}, the number of experts");
            return Err(Error::argument("--top-k", top_k, advice));
        }
        for (what, chance) in [("a dropped choice", shape.none), ("a repeated choice", shape.duplicate)] {
            if !(0.0..=1.0).contains(&chance) {
                return Err(Error::argument("chance", format!("{chance} of {what}"), "choose 0 to 1"));
            }
        }
        let mut router = Router { routing: routing.clone(), shape, chances: Vec::new(), trace: None };
        match routing {
            Routing::Uniform => {}
            Routing::V3Groups => {
                let reachable = experts / GROUPS * GROUPS_OF_TOKEN;
                if experts % GROUPS != 0 || reachable < top_k {
                    let advice = format!(
                        "with {experts} experts, {GROUPS_OF_TOKEN} of {GROUPS} groups give {reachable} for top-{top_k}; \
                         make --experts a multiple of {GROUPS} and at least {}, or take uniform",
                        (top_k.div_ceil(GROUPS_OF_TOKEN)) * GROUPS
                    );
                    return Err(Error::argument("--routing", "`v3-groups`", advice));
                }
            }
            Routing::Zipf(s) => router.chances = zipf_chances(shape.seed, experts, *s),
            Routing::Hot(n) => {
                let others = experts.saturating_sub(*n);
                if *n > experts || top_k - top_k.min(*n) > others {
                    return Err(Error::argument(
                        "--routing",
                        format!("`{routing}`"),
                        format!("choose at most {experts} hot experts"),
                    ));
                }
            }
            Routing::File(path) => router.trace = Some(TraceFile::load(path, ranks, experts, top_k)?),
        }
        Ok(router)
    }

    /// Routing of `tokens` tokens of a rank. Weights are the trace's, or [`Inputs::fill_weights`]'s.
    pub fn draw(&self, iteration: u64, rank: usize, tokens: usize) -> Routed {
        let RoutingShape { top_k, seed, .. } = self.shape;
        let mut routed = Routed { topk_idx: vec![-1; tokens * top_k], topk_weight: vec![0.0; tokens * top_k] };
        let inputs = Inputs { seed, iteration, hidden: 0, dtype: Dtype::Fp32, scales: ScaleKind::None, uneven: false };
        let rows = routed.topk_idx.chunks_mut(top_k).zip(routed.topk_weight.chunks_mut(top_k));
        for (token, (ids, weights)) in rows.enumerate() {
            let mut counter = Counter::new(seed, Use::Choice, iteration, rank, token);
            match &self.trace {
                Some(trace) => trace.token(iteration, rank, token, self.shape.max_tokens, ids, weights),
                None => {
                    inputs.fill_weights(rank, token, weights);
                    self.choose(&mut counter, ids);
                }
            }
            for k in 1..ids.len() {
                if self.shape.duplicate > 0.0 && counter.unit() < self.shape.duplicate {
                    ids[k] = ids[counter.below(k)];
                }
            }
            for id in ids {
                if self.shape.none > 0.0 && counter.unit() < self.shape.none {
                    *id = -1;
                }
            }
        }
        routed
    }

    /// Fills `ids` with distinct experts.
    fn choose(&self, counter: &mut Counter, ids: &mut [i64]) {
        let experts = self.shape.experts;
        match &self.routing {
            Routing::V3Groups => best_in_groups(counter, experts, ids),
            Routing::Zipf(_) => {
                // The k smallest of exponential waiting times are k draws without replacement.
                let times = self.chances.iter().map(|chance| -counter.unit().ln() / chance).enumerate();
                let mut by_time: Vec<(usize, f64)> = times.collect();
                let last = ids.len().saturating_sub(1);
                by_time.select_nth_unstable_by(last, |a, b| a.1.total_cmp(&b.1));
                by_time[..=last].sort_unstable_by(|a, b| a.1.total_cmp(&b.1));
                ids.iter_mut().zip(by_time).for_each(|(id, (expert, _))| *id = expert as i64);
            }
            Routing::Hot(n) => {
                let hot = ids.len().min(*n);
                let (first, rest) = ids.split_at_mut(hot);
                first.iter_mut().enumerate().for_each(|(e, id)| *id = e as i64);
                distinct(counter, *n, experts, rest);
            }
            Routing::Uniform | Routing::File(_) => distinct(counter, 0, experts, ids),
        }
    }
}

/// Tokens of a rank in a ragged iteration: 0..=max, zero included.
pub fn ragged_count(seed: u64, iteration: u64, rank: usize, max: usize) -> usize {
    Counter::new(seed, Use::Count, iteration, rank, 0).below(max + 1)
}

/// Fills `ids` with distinct numbers of `from..to`, every ordered choice equally likely; there must be enough of them.
fn distinct(counter: &mut Counter, from: usize, to: usize, ids: &mut [i64]) {
    let n = to - from;
    if ids.len() * 4 <= n {
        // Few of many: draw again what was drawn before.
        for k in 0..ids.len() {
            ids[k] = loop {
                let id = (from + counter.below(n)) as i64;
                if !ids[..k].contains(&id) {
                    break id;
                }
            };
        }
        return;
    }
    let mut all: Vec<i64> = (from as i64..to as i64).collect();
    for (k, id) in ids.iter_mut().enumerate() {
        all.swap(k, k + counter.below(n - k));
        *id = all[k];
    }
}

/// DeepSeek-V3's choice by random scores: a group is worth its two best scores, the best four groups stay, and of their
/// experts the best are taken, best first.
fn best_in_groups(counter: &mut Counter, experts: usize, ids: &mut [i64]) {
    let size = experts / GROUPS;
    let mut scores: Vec<(u64, usize)> = (0..experts).map(|e| (counter.next() >> 1, e)).collect();
    let mut worth: Vec<(u64, usize)> = scores
        .chunks(size.max(1))
        .enumerate()
        .map(|(group, members)| {
            let mut best: Vec<u64> = members.iter().map(|m| m.0).collect();
            best.sort_unstable_by(|a, b| b.cmp(a));
            (best.iter().take(GROUP_BEST).map(|s| s >> 1).sum(), group)
        })
        .collect();
    worth.sort_unstable_by(|a, b| b.cmp(a));
    let chosen: Vec<usize> = worth.iter().take(GROUPS_OF_TOKEN).map(|w| w.1).collect();
    scores.retain(|(_, e)| chosen.contains(&(e / size.max(1))));
    scores.sort_unstable_by(|a, b| b.cmp(a));
    ids.iter_mut().zip(scores).for_each(|(id, (_, e))| *id = e as i64);
}

/// 1 / place^s with places permuted by the seed, so that the busy experts are spread over ranks.
fn zipf_chances(seed: u64, experts: usize, s: f64) -> Vec<f64> {
    let mut places = vec![0i64; experts];
    distinct(&mut Counter::new(seed, Use::Choice, u64::MAX, 0, 0), 0, experts, &mut places);
    places.iter().map(|&place| ((place + 1) as f64).powf(-s).max(f64::MIN_POSITIVE)).collect()
}

#[cfg(test)]
#[path = "routing_tests.rs"]
mod definitions;

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(experts: usize, top_k: usize) -> RoutingShape {
        RoutingShape { ranks: 8, experts, top_k, max_tokens: 128, none: 0.0, duplicate: 0.0, seed: 7 }
    }

    fn draw(text: &str, shape: RoutingShape, tokens: usize) -> Routed {
        let routing = Routing::parse(text).unwrap();
        Router::new(&routing, shape).unwrap().draw(3, 1, tokens)
    }

    #[test]
    fn every_form_prints_as_it_was_given() {
        for text in ["uniform", "v3-groups", "zipf:1.5", "hot:4", "file:/tmp/a:b.safetensors"] {
            assert_eq!(Routing::parse(text).unwrap().to_string(), text);
        }
        for (text, label) in
            [("hot:4", "hot:4"), ("file:/tmp/a:b.safetensors", "file:a:b.safetensors"), ("file:..", "file:..")]
        {
            assert_eq!(Routing::parse(text).unwrap().label(), label);
        }
        for text in ["", "uniform:3", "zipf", "zipf:x", "zipf:NaN", "zipf:-1", "hot:0", "hot:-1", "file:", "v3"] {
            let refused = Routing::parse(text).unwrap_err().to_string();
            assert!(refused.contains("--routing") && refused.contains(&format!("`{text}`")), "{refused}");
        }
    }

    #[test]
    fn choices_are_distinct_experts_in_every_routing() {
        for (experts, top_k) in [(256, 8), (8, 2), (8, 4), (64, 32), (16, 1)] {
            for text in ["uniform", "v3-groups", "zipf:1.1", "zipf:20", "hot:1", "hot:8"] {
                let routed = draw(text, shape(experts, top_k), 300);
                for ids in routed.topk_idx.chunks(top_k) {
                    assert!(ids.iter().all(|&e| (0..experts as i64).contains(&e)), "{text}: {ids:?}");
                    assert!((0..top_k).all(|k| !ids[..k].contains(&ids[k])), "{text}: {ids:?}");
                }
            }
        }
    }

    #[test]
    fn uniform_reaches_all_experts_about_equally() {
        let routed = draw("uniform", shape(64, 8), 4000);
        let mut load = [0; 64];
        routed.topk_idx.iter().for_each(|&e| load[e as usize] += 1);
        assert!(load.iter().all(|&n| (380..620).contains(&n)), "{load:?}");
    }

    #[test]
    fn v3_groups_uses_at_most_four_groups_and_all_of_them_over_time() {
        let routed = draw("v3-groups", shape(256, 8), 500);
        let mut groups = [0; 8];
        for ids in routed.topk_idx.chunks(8) {
            let mut of_token: Vec<i64> = ids.iter().map(|e| e / 32).collect();
            of_token.sort_unstable();
            of_token.dedup();
            assert!(of_token.len() <= 4);
            of_token.iter().for_each(|&g| groups[g as usize] += 1);
        }
        assert!(groups.iter().all(|&n| n > 150), "{groups:?}");
    }

    #[test]
    fn zipf_is_skewed_and_hot_is_hot() {
        let routed = draw("zipf:1.2", shape(64, 4), 2000);
        let mut load = [0; 64];
        routed.topk_idx.iter().for_each(|&e| load[e as usize] += 1);
        load.sort_unstable();
        assert!(load[63] > 1200 && load[0] < 60, "{load:?}");
        let routed = draw("hot:3", shape(64, 8), 100);
        assert!(routed.topk_idx.chunks(8).all(|ids| ids[..3] == [0, 1, 2] && ids[3..].iter().all(|&e| e > 2)));
    }

    #[test]
    fn routing_changes_with_iteration_and_rank_and_drops_choices_on_request() {
        let router = Router::new(&Routing::Uniform, RoutingShape { none: 0.3, ..shape(64, 4) }).unwrap();
        let first = router.draw(0, 0, 100);
        assert_eq!(first, router.draw(0, 0, 100));
        assert_ne!(first, router.draw(1, 0, 100));
        assert_ne!(first, router.draw(0, 1, 100));
        let dropped = first.topk_idx.iter().filter(|&&e| e == -1).count();
        assert!((80..160).contains(&dropped), "{dropped}");
        let counts: Vec<usize> = (0..400).map(|i| ragged_count(1, i, 0, 5)).collect();
        assert!((0..=5).all(|n| counts.contains(&n)) && counts.iter().all(|&n| n <= 5));
    }

    #[test]
    fn impossible_routings_are_refused_with_values() {
        for (text, experts, top_k, wanted) in [
            ("uniform", 8, 9, "--top-k is 9"),
            ("v3-groups", 12, 2, "multiple of 8"),
            ("v3-groups", 8, 5, "--routing is `v3-groups`"),
            ("hot:9", 8, 2, "at most 8"),
        ] {
            let refused = Router::new(&Routing::parse(text).unwrap(), shape(experts, top_k)).unwrap_err().to_string();
            assert!(refused.contains(wanted), "{refused}");
        }
    }
}
