//! How often draws have each value of each field, against the chance that the draw's definition gives. Nothing runs.
//!
//! A chance is stated for a population: the cases whose other fields leave this one free. So the chance is simple, and
//! a value that only some cases may have is seen in the others.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::cli::report::tally::Tally;

/// Seeds of configurations and of schedules.
const DRAWN: u64 = 4000;
/// Cases of a population at the least.
const LEAST: usize = 20;
/// Fields whose chances are simple in some cases only.
const PARTLY: [&str; 5] = ["hidden", "experts", "top_k", "tokens", "lockstep"];
/// Most standard deviations that a share is off: one of 37 000 shares of true chances would be.
const SIGMAS: f64 = 4.2;

/// The chances of a field's values in a population.
#[derive(Clone)]
struct Chances {
    /// The field, as a case prints it.
    field: &'static str,
    population: fn(&Case) -> bool,
    /// What of the value has a chance of its own, if not all of it as printed.
    kind: Option<fn(&Case) -> String>,
    /// All values that may occur.
    of: Vec<(String, f64)>,
}

/// Chances by value.
fn by<const N: usize>(chances: [(&str, f64); N]) -> Vec<(String, f64)> {
    chances.into_iter().map(|(value, chance)| (value.to_string(), chance)).collect()
}

/// Equal chances of some values, which together have the chance `of_all`.
fn alike<V: ToString>(of_all: f64, values: impl IntoIterator<Item = V>) -> Vec<(String, f64)> {
    let values: Vec<String> = values.into_iter().map(|value| value.to_string()).collect();
    let chance = of_all / values.len() as f64;
    values.into_iter().map(|value| (value, chance)).collect()
}

/// Chances of yes and no.
fn yes(chance: f64) -> Vec<(String, f64)> {
    by([("yes", chance), ("no", 1.0 - chance)])
}

fn never() -> Vec<(String, f64)> {
    by([("no", 1.0)])
}

/// The chance that the smaller of two numbers from 1 to `most` is `value`: both are at least that, and not both above.
fn small(most: usize, value: usize) -> f64 {
    let at_least = |value: usize| ((most + 1 - value) as f64 / most as f64).powi(2);
    at_least(value) - at_least(value + 1)
}

/// The chance that the smaller of two numbers is in each quarter of their range: 7, 5, 3 and 1 sixteenths.
fn quarters() -> Vec<(String, f64)> {
    by([("1st", 7.0 / 16.0), ("2nd", 5.0 / 16.0), ("3rd", 3.0 / 16.0), ("4th", 1.0 / 16.0)])
}

fn quarter(value: usize, most: usize) -> String {
    ["1st", "2nd", "3rd", "4th"][(value - 1) * 4 / most].to_string()
}

fn all(_: &Case) -> bool {
    true
}

fn one_node(case: &Case) -> bool {
    !case.several_nodes()
}

/// Where tokens name ranks, experts and their placement are adapted.
fn by_expert(case: &Case) -> bool {
    case.index != IndexWord::Ranks
}

fn fp8(case: &Case) -> bool {
    case.dtype == Dtype::Fp8E4m3
}

/// Fields that in-place output sets are free in the other cases.
fn not_in_place(case: &Case) -> bool {
    !case.in_place
}

/// Rows can go by earlier handles.
fn may_go_again(case: &Case) -> bool {
    !case.in_place && (case.fault != FaultWord::Overflow || case.drop_overflow)
}

/// In-place output is possible, once the fields that it sets are set.
fn may_be_in_place(case: &Case) -> bool {
    let kind = case.layout == LayoutWord::Contiguous && !case.mode.is_split();
    kind && one_node(case) && !case.quantize && case.fault != FaultWord::Overflow
}

/// A case and its fields, as printed.
struct Drawn {
    case: Case,
    fields: Vec<(&'static str, String)>,
}

impl Drawn {
    fn of(cases: impl IntoIterator<Item = Case>) -> Vec<Drawn> {
        cases.into_iter().map(|case| Drawn { fields: case.fields(), case }).collect()
    }

    fn printed(&self, field: &str) -> String {
        self.fields.iter().find(|(name, _)| *name == field).unwrap().1.clone()
    }
}

/// Chances of a field in a population, by value as printed or by kind of value.
macro_rules! chances {
    ($field:ident, $population:expr, $of:expr) => {
        Chances { field: stringify!($field), population: $population, kind: None, of: $of }
    };
    ($field:ident, $population:expr, $kind:expr, $of:expr) => {
        Chances { field: stringify!($field), population: $population, kind: Some($kind), of: $of }
    };
}

/// Fields that configurations and schedules draw alike.
fn common() -> Vec<Chances> {
    let third = 1.0 / 3.0;
    vec![
        chances!(transport, all, by([("sim", 1.0)])),
        chances!(network, one_node, by([("hostile", 1.0)])),
        chances!(network, Case::several_nodes, by([("hostile", 0.75), ("calm", 0.25)])),
        chances!(link, |c| c.network == NetworkWord::Hostile, by([("none", 1.0)])),
        chances!(link, |c| c.network == NetworkWord::Calm, alike(1.0, ["none", "cx7", "efa-p5", "efa-p5en"])),
        chances!(nics, one_node, by([("-", 1.0)])),
        chances!(nics, Case::several_nodes, [by([("-", 0.5)]), alike(0.5, 1..=4)].concat()),
        chances!(chunk_rows, one_node, by([("-", 1.0)])),
        chances!(
            chunk_rows,
            Case::several_nodes,
            [by([("-", 0.25)]), (1..=8).map(|rows| (rows.to_string(), 0.75 * small(8, rows))).collect()].concat()
        ),
        chances!(double_buffer, one_node, by([("yes", 1.0)])),
        chances!(double_buffer, Case::several_nodes, yes(0.5)),
        chances!(ll_tokens, Case::several_nodes, by([("-", 1.0)])),
        chances!(ll_tokens, one_node, ll_tokens, alike(1.0, ["-", "0", "all"])),
        chances!(round_tokens, not_in_place, |c| flag(c.round_tokens.is_some()), yes(third)),
        chances!(round_tokens, |c| c.in_place, by([("-", 1.0)])),
        chances!(dtype, all, alike(1.0, ["fp8", "bf16", "fp16", "fp32"])),
        chances!(scales, fp8, alike(1.0, ["none", "f32", "ue8m0"])),
        chances!(combine_dtype, all, alike(1.0, ["bf16", "fp16", "fp32"])),
        chances!(out_dtype, all, alike(1.0, ["bf16", "fp16", "fp32"])),
        // A third fp8; of the others a quarter fp32.
        chances!(partial, all, by([("fp8", third), ("fp32", 1.0 / 6.0), ("same", 0.5)])),
        chances!(placement, by_expert, alike(1.0, ["even", "table"])),
        chances!(placement, |c| !by_expert(c), by([("even", 1.0)])),
        chances!(weights, |c| c.layout != LayoutWord::Token, alike(1.0, ["dispatch", "combine", "none"])),
        chances!(layout, all, alike(1.0, ["contiguous", "masked", "token"])),
        chances!(align, |c| c.layout != LayoutWord::Contiguous, by([("1", 1.0)])),
        chances!(capacity, all, by([("-", 1.0)])),
        chances!(in_place, may_be_in_place, yes(third)),
        chances!(in_place, |c| !may_be_in_place(c), never()),
        chances!(scale_order, not_in_place, alike(1.0, ["row", "column"])),
        chances!(scale_order, |c| c.in_place, by([("row", 1.0)])),
        chances!(input_scales, all, alike(1.0, ["row", "column"])),
        chances!(index, all, by([("ranks", 1.0 / 6.0), ("i32", 5.0 / 12.0), ("i64", 5.0 / 12.0)])),
        chances!(index_order, all, alike(1.0, ["row", "column"])),
        chances!(replicas, |c| c.experts <= 100, [by([("1", 2.0 * third)]), alike(third, [2, 3])].concat()),
        chances!(zero_padding, |c| c.layout == LayoutWord::Contiguous, yes(0.5)),
        chances!(zero_padding, |c| c.layout != LayoutWord::Contiguous, never()),
        chances!(drop_overflow, |c| c.layout != LayoutWord::Token && !c.in_place, yes(0.5)),
        chances!(drop_overflow, |c| c.in_place, never()),
        chances!(accumulate, all, yes(third)),
        chances!(device_count, |c| c.mode != Mode::Graph || !c.ragged, yes(third)),
        chances!(device_count, |c| c.mode == Mode::Graph && c.ragged, by([("yes", 1.0)])),
        chances!(host_counts, all, yes(0.5)),
        chances!(gap, not_in_place, by([("0", 0.5), ("16", 0.25), ("48", 0.25)])),
        chances!(gap, |c| c.in_place, by([("0", 1.0)])),
        chances!(routing, |c| !by_expert(c), by([("uniform", 1.0)])),
        chances!(
            routing,
            |c| by_expert(c) && groups_fit(c),
            kind_of_routing,
            alike(1.0, ["zipf:1.2", "hot", "v3-groups", "-", "-", "-"])
        ),
        chances!(
            routing,
            |c| by_expert(c) && !groups_fit(c),
            kind_of_routing,
            alike(1.0, ["zipf:1.2", "hot", "-", "-", "-", "-"])
        ),
        chances!(none_percent, all, by([("0", 0.4), ("10", 0.2), ("60", 0.2), ("100", 0.2)])),
        chances!(duplicate_percent, all, [by([("-", 2.0 * third)]), alike(third, [0, 20, 60, 100])].concat()),
        chances!(compact_handles, all, yes(0.5)),
        chances!(again, may_go_again, yes(0.5)),
        chances!(again, |c| !may_go_again(c), never()),
        chances!(mixed, not_in_place, yes(0.5)),
        chances!(mixed, |c| c.in_place, never()),
        chances!(missing, all, by([("no", 1.0)])),
        chances!(payload, |c| c.partial == PartialWord::Same, |c| flag(c.payload > 0), yes(2.0 * third)),
        chances!(payload, |c| c.payload > 0, alike(1.0, [1, 2, 3, 4, 5])),
        chances!(gathered, |c| c.payload > 0 && c.layout != LayoutWord::Token, yes(0.5)),
        chances!(gathered, |c| c.payload == 0, never()),
        chances!(dispatch_payload, not_in_place, |c| flag(c.dispatch_payload > 0), yes(0.5)),
        chances!(dispatch_payload, |c| c.dispatch_payload > 0, alike(1.0, [1, 2, 3, 8, 40])),
        chances!(dispatch_payload, |c| c.in_place, by([("0", 1.0)])),
        chances!(call_top_k, by_expert, |c| flag(c.call_top_k.is_some()), yes(1.0 / 6.0)),
        chances!(call_top_k, |c| !by_expert(c), by([("-", 1.0)])),
        chances!(mode, all, by([("fused", third), ("graph", third), ("split", third / 2.0), ("counts", third / 2.0)])),
        chances!(ahead, not_in_place, by([("1", 2.0 * third), ("2", 1.0 / 6.0), ("3", 1.0 / 6.0)])),
        chances!(ahead, |c| c.in_place, by([("1", 1.0)])),
        chances!(lockstep, |c| c.ahead == 1 && !c.in_place, yes(0.25)),
        chances!(lockstep, |c| c.ahead > 1, never()),
        chances!(
            fault,
            |c| c.mode != Mode::Graph && !c.drop_overflow,
            by([("routing", 1.0 / 12.0), ("overflow", 0.25), ("none", 2.0 * third)])
        ),
        // Half of those without another fault have it.
        chances!(
            fault,
            |c| c.mode != Mode::Graph && c.drop_overflow,
            by([("routing", 1.0 / 12.0), ("overflow", 0.25 + third), ("none", third)])
        ),
        chances!(fault, |c| c.mode == Mode::Graph, by([("routing", 1.0 / 12.0), ("none", 11.0 / 12.0)])),
        chances!(
            first_epoch,
            all,
            [by([("-", 5.0 / 6.0)]), alike(1.0 / 6.0, [4_294_967_292_u64, 4_294_967_293, 4_294_967_294])].concat()
        ),
        chances!(seed, all, |_| "its own".to_string(), by([("its own", 1.0)])),
    ]
}

fn flag(on: bool) -> String {
    if on { "yes" } else { "no" }.to_string()
}

fn ll_tokens(case: &Case) -> String {
    match case.ll_tokens {
        None => "-".to_string(),
        Some(tokens) if tokens == case.max_tokens => "all".to_string(),
        Some(tokens) => tokens.to_string(),
    }
}

/// In how many parts the tokens are cut.
fn rounds(case: &Case) -> String {
    let round = case.round_tokens.unwrap();
    (1..=5).find(|parts| case.max_tokens.div_ceil(*parts) == round).unwrap().to_string()
}

fn groups_fit(case: &Case) -> bool {
    case.experts.is_multiple_of(8) && case.experts / 2 >= case.top_k
}

fn kind_of_routing(case: &Case) -> String {
    match case.routing {
        Routing::Uniform => "-".to_string(),
        Routing::Hot(_) => "hot".to_string(),
        ref other => other.to_string(),
    }
}

/// Number of nodes, for `least` to `most` ranks, each number of ranks equally likely: 1 to as many as ranks, at most 4.
fn nodes(least: usize, most: usize) -> Vec<(String, f64)> {
    let of = |count: usize, ranks: usize| if count <= ranks.min(4) { 1.0 / ranks.min(4) as f64 } else { 0.0 };
    let mean = |count| (least..=most).map(|ranks| of(count, ranks)).sum::<f64>() / (most + 1 - least) as f64;
    (1..=4).map(|count| (count.to_string(), mean(count))).collect()
}

/// Whether nodes of an even share are of one size.
fn is_divided(case: &Case) -> bool {
    case.several_nodes() && case.world.is_multiple_of(case.nodes.len())
}

/// Fields of configurations that schedules draw otherwise.
fn of_configurations() -> Vec<Chances> {
    let third = 1.0 / 3.0;
    vec![
        // What is refused by design.
        chances!(drop_overflow, |c| c.layout == LayoutWord::Token, yes(1.0 / 16.0)),
        // One in four may be refused.
        chances!(payload, |c| c.partial != PartialWord::Same, |c| flag(c.payload > 0), yes(1.0 / 6.0)),
        chances!(
            gathered,
            |c| c.payload > 0 && c.layout == LayoutWord::Token && c.partial == PartialWord::Same,
            yes(1.0 / 8.0)
        ),
        chances!(
            gathered,
            |c| c.payload > 0 && c.layout == LayoutWord::Token && c.partial != PartialWord::Same,
            yes(0.5)
        ),
        chances!(world, all, alike(1.0, 1..=12)),
        chances!(nodes, all, |c| c.node_sizes().len().to_string(), nodes(1, 12)),
        // Half of the worlds are cut evenly; of random cuts into three or four nodes hardly any is even.
        chances!(nodes, |c| is_divided(c) && c.nodes.len() > 2 && c.world >= 8, |c| flag(c.uneven_nodes()), yes(0.49)),
        chances!(nodes, |c| c.several_nodes() && !is_divided(c), |c| flag(c.uneven_nodes()), by([("yes", 1.0)])),
        // From 10 tokens on, halves, thirds and quarters differ.
        chances!(round_tokens, |c| c.round_tokens.is_some() && c.max_tokens > 9, rounds, alike(1.0, 1..=4)),
        chances!(meta_tile, |c| c.max_tokens <= 32, by([("-", 1.0)])),
        chances!(meta_tile, |c| c.max_tokens > 32, by([("32", 7.0 / 8.0), ("-", 1.0 / 8.0)])),
        chances!(hidden, |c| fp8(c) || c.partial != PartialWord::Fp8, |c| quarter(c.hidden, 1024), quarters()),
        chances!(
            hidden,
            fp8,
            |c| (c.hidden / 128).to_string(),
            (1..=8).map(|n| (n.to_string(), small(8, n))).collect()
        ),
        // One in 16 keeps its columns, of which about one in 16 are a multiple of 128 anyway.
        chances!(
            hidden,
            |c| !fp8(c) && c.partial == PartialWord::Fp8,
            |c| flag(c.hidden.is_multiple_of(128)),
            yes(1.0 - 15.0 / 256.0)
        ),
        chances!(replicas, |c| c.experts > 100, by([("1", 1.0)])),
        chances!(experts, by_expert, kind_of_experts, experts()),
        // One in six has as many as possible.
        chances!(
            top_k,
            |c| by_expert(c) && c.experts >= 32,
            |c| quarter(c.top_k, 32),
            quarters()
                .into_iter()
                .map(|(at, chance)| (at.clone(), 5.0 / 6.0 * chance + if at == "4th" { 1.0 / 6.0 } else { 0.0 }))
                .collect()
        ),
        chances!(
            top_k,
            |c| by_expert(c) && c.experts >= 32,
            |c| flag(c.top_k == 32),
            yes(1.0 / 6.0 + 5.0 / 6.0 * small(32, 32))
        ),
        chances!(
            scales,
            |c| !fp8(c),
            by([("none", 7.0 / 8.0 + 1.0 / 24.0), ("f32", 1.0 / 24.0), ("ue8m0", 1.0 / 24.0)])
        ),
        chances!(quantize, |c| c.scales == ScaleKind::None, yes(1.0 / 16.0)),
        chances!(quantize, |c| c.scales != ScaleKind::None, yes(0.5)),
        // Of a third that would be refused three quarters are drawn again, among the other two.
        chances!(
            weights,
            |c| c.layout == LayoutWord::Token,
            by([("combine", 1.0 / 12.0), ("dispatch", 11.0 / 24.0), ("none", 11.0 / 24.0)])
        ),
        chances!(
            align,
            |c| c.layout == LayoutWord::Contiguous,
            [by([("1", 2.0 / 7.0)]), alike(5.0 / 7.0, [2, 3, 8, 16, 128])].concat()
        ),
        // One in eight none, two of 1 to 64, five of 1 to 12; large rows get fewer.
        chances!(
            tokens,
            |c| c.world * c.top_k * c.hidden <= ELEMENTS / 64,
            kind_of_tokens,
            by([
                ("0", 1.0 / 8.0),
                ("up to 12", 5.0 / 8.0 + 2.0 / 8.0 * 12.0 / 64.0),
                ("up to 64", 2.0 / 8.0 * 52.0 / 64.0)
            ])
        ),
        chances!(
            max_tokens,
            all,
            |c| (c.max_tokens - c.tokens.max(1)).to_string(),
            [by([("0", 7.0 / 12.0)]), alike(5.0 / 12.0, 1..=5)].concat()
        ),
        chances!(ragged, all, yes(0.5)),
        chances!(sms, all, [by([("-", 2.0 * third)]), alike(third, 2..=6)].concat()),
        chances!(world_mode, all, alike(1.0, ["one-thread", "threads"])),
        chances!(hold_stores, |c| c.world_mode == WorldMode::OneThread, yes(0.5)),
        chances!(hold_stores, |c| c.world_mode == WorldMode::Threads, never()),
        chances!(iters, all, alike(1.0, 3..=5)),
    ]
}

/// One in eight has 1 to 300 experts, one 1 to 8 and the others 1 to 64, few more often.
fn experts() -> Vec<(String, f64)> {
    let up_to_8: f64 = (1..=8).map(|n| small(64, n)).sum();
    by([
        ("up to 8", 1.0 / 8.0 * 8.0 / 300.0 + 1.0 / 8.0 + 6.0 / 8.0 * up_to_8),
        ("up to 64", 1.0 / 8.0 * 56.0 / 300.0 + 6.0 / 8.0 * (1.0 - up_to_8)),
        ("up to 300", 1.0 / 8.0 * 236.0 / 300.0),
    ])
}

fn within(value: usize, bounds: &[usize]) -> String {
    let bound = bounds.iter().find(|bound| value <= **bound);
    bound.map_or_else(|| format!("{value}"), |bound| format!("up to {bound}"))
}

fn kind_of_experts(case: &Case) -> String {
    within(case.experts, &[8, 64, 300])
}

fn kind_of_tokens(case: &Case) -> String {
    if case.tokens == 0 { "0".to_string() } else { within(case.tokens, &[12, 64]) }
}

/// Fields of schedules that configurations draw otherwise.
fn of_schedules() -> Vec<Chances> {
    let third = 1.0 / 3.0;
    let few_blocks = |c: &Case| one_node(c) && c.world > 4;
    vec![
        chances!(drop_overflow, |c| c.layout == LayoutWord::Token, never()),
        chances!(payload, |c| c.partial != PartialWord::Same, |c| flag(c.payload > 0), never()),
        chances!(gathered, |c| c.layout == LayoutWord::Token, never()),
        chances!(world, all, alike(1.0, 2..=6)),
        chances!(nodes, all, |c| c.node_sizes().len().to_string(), nodes(2, 6)),
        chances!(meta_tile, all, by([("-", 1.0)])),
        // Columns are multiples of 128, of 8, or of 4 where all types have 32 bits.
        chances!(hidden, |c| fp8(c), by([("128", 1.0)])),
        chances!(
            hidden,
            |c| !fp8(c) && c.partial != PartialWord::Fp8 && c.hidden_quantum() == 8,
            alike(1.0, (32..=128).step_by(8))
        ),
        chances!(experts, by_expert, alike(1.0, 1..=10)),
        chances!(top_k, |c| by_expert(c) && c.experts >= 4, |c| quarter(c.top_k, 4), quarters()),
        chances!(top_k, |c| by_expert(c) && c.experts == 1, by([("1", 1.0)])),
        chances!(scales, |c| !fp8(c), by([("none", 1.0)])),
        chances!(quantize, |c| c.scales == ScaleKind::None, never()),
        chances!(quantize, |c| c.scales != ScaleKind::None, yes(0.5)),
        chances!(weights, |c| c.layout == LayoutWord::Token, by([("dispatch", 13.0 / 24.0), ("none", 11.0 / 24.0)])),
        chances!(
            align,
            |c| c.layout == LayoutWord::Contiguous,
            by([("1", 2.0 / 7.0), ("2", 1.0 / 7.0), ("3", 1.0 / 7.0), ("4", 3.0 / 7.0)])
        ),
        chances!(tokens, all, alike(1.0, 0..=6)),
        chances!(max_tokens, all, |c| (c.max_tokens - c.tokens.max(1)).to_string(), alike(1.0, 0..=1)),
        chances!(ragged, all, yes(2.0 * third)),
        chances!(sms, few_blocks, by([("3", 1.0)])),
        chances!(sms, |c| !(one_node(c) && c.world > 4), by([("2", 1.0)])),
        chances!(world_mode, all, by([("one-thread", 1.0)])),
        chances!(hold_stores, |c| c.seed % 2 == 1, by([("yes", 1.0)])),
        chances!(hold_stores, |c| c.seed % 2 == 0, never()),
        chances!(iters, all, alike(1.0, 3..=4)),
    ]
}

/// What is wrong with the shares of a field's values in its population.
fn faults(cases: &[Drawn], chances: &Chances) -> Vec<String> {
    let population: Vec<&Drawn> = cases.iter().filter(|drawn| (chances.population)(&drawn.case)).collect();
    let (field, count) = (chances.field, population.len() as f64);
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for drawn in &population {
        let value = chances.kind.map_or_else(|| drawn.printed(field), |kind| kind(&drawn.case));
        *seen.entry(value).or_default() += 1;
    }
    let mut wanted: BTreeMap<&str, f64> = BTreeMap::new();
    chances.of.iter().for_each(|(value, chance)| *wanted.entry(value.as_str()).or_default() += chance);
    let mut faults = Vec::new();
    if population.len() < LEAST || (wanted.values().sum::<f64>() - 1.0).abs() > 1e-9 {
        faults.push(format!("{field}: {count} cases, and chances of {wanted:?}"));
    }
    let unknown = seen.keys().filter(|value| !wanted.contains_key(value.as_str()));
    faults.extend(unknown.map(|value| format!("{field} has {value}")));
    for (value, chance) in wanted {
        let times = seen.get(value).copied().unwrap_or(0);
        let off = (times as f64 - chance * count).abs();
        let most = SIGMAS * (chance * (1.0 - chance) * count).sqrt();
        if off > most + 1e-6 || times == 0 {
            faults.push(format!("{field} {value}: {times} of {count}, and not {:.1} ± {most:.1}", chance * count));
        }
    }
    faults
}

/// Every field must have chances, and every share must be as they say.
fn assert_shares(cases: &[Drawn], chances: &[Chances]) {
    let stated: BTreeSet<&str> = chances.iter().map(|chances| chances.field).collect();
    let fields: BTreeSet<&str> = Case::default().fields().into_iter().map(|(name, _)| name).collect();
    assert_eq!(stated, fields, "fields with chances, and all fields");
    for field in fields.iter().filter(|field| !PARTLY.contains(field)) {
        let stated = |case: &Case| chances.iter().any(|c| c.field == *field && (c.population)(case));
        let without = cases.iter().find(|drawn| !stated(&drawn.case));
        assert!(without.is_none(), "{field} has no chances in {}", without.unwrap().case);
    }
    let faults: Vec<String> = chances.iter().flat_map(|chances| faults(cases, chances)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_value_of_every_field_has_its_share_of_configurations() {
    let cases = Drawn::of((1..=DRAWN).map(|seed| draw_present(seed, DeviceWord::Cpu)));
    assert_shares(&cases, &[common(), of_configurations()].concat());
    for case in cases.iter().map(|drawn| &drawn.case) {
        // Partial rows of fp8 that are refused by design have the columns of another type.
        let quantum = if !fp8(case) && case.partial == PartialWord::Fp8 { 4 } else { case.hidden_quantum() };
        assert!(case.hidden.is_multiple_of(quantum) && (4..=1024).contains(&case.hidden), "{case}");
        assert!((1..=case.experts.min(32)).contains(&case.top_k) && case.experts <= 300, "{case}");
        // Columns may be rounded up to the next multiple of 128 after the tokens are drawn.
        let elements = case.world * case.top_k * case.hidden.saturating_sub(127).max(1) * case.tokens;
        assert!(case.tokens <= 64 && elements <= ELEMENTS, "{case}");
        if let Routing::Hot(hot) = case.routing {
            assert!((1..=case.experts - case.top_k + 1).contains(&hot), "{case}");
        }
    }
}

#[test]
fn every_value_of_every_field_has_its_share_of_schedules() {
    let cases = Drawn::of((1..=DRAWN).map(draw_small_present));
    assert_shares(&cases, &[common(), of_schedules()].concat());
}

/// One in four without in-place output has calls that go on without missing ranks, of which one in three stays as it
/// was, perhaps to be refused; of schedules none.
#[test]
fn ranks_are_missing_from_their_share_of_draws() {
    let third = 1.0 / 3.0;
    let missing = chances!(missing, not_in_place, by([("no", 0.75), ("able", 0.125), ("one", 0.125)]));
    let none = chances!(missing, |c| c.in_place, by([("no", 1.0)]));
    let cases = |draw: fn(u64) -> Case| Drawn::of((1..=DRAWN).map(draw));
    for (drawn, kept) in [(cases(|seed| draw(seed, DeviceWord::Cpu)), third), (cases(draw_small), 0.0)] {
        let faulty: Vec<String> = [&missing, &none].iter().flat_map(|chances| faults(&drawn, chances)).collect();
        assert!(faulty.is_empty(), "{faulty:?}");
        let tolerant: Vec<&Case> = drawn.iter().map(|d| &d.case).filter(|c| c.missing != MissingWord::No).collect();
        // Of cases that need no adaptation few are left.
        let adapted = tolerant.iter().filter(|case| case.why_nobody_is_missing().is_none()).count() as f64;
        let share = adapted / tolerant.len() as f64;
        assert!((share - (1.0 - kept)).abs() < 0.06, "{share}");
    }
}

#[test]
fn gpus_run_the_configurations_of_the_cpu_without_its_schedules() {
    for seed in 1..=200 {
        let of_cpu = draw(seed, DeviceWord::Cpu);
        let wanted = Case { world_mode: WorldMode::Threads, hold_stores: false, ..of_cpu };
        assert_eq!(draw(seed, DeviceWord::Cuda), wanted);
    }
}

#[test]
fn every_pair_of_values_is_among_500_configurations_and_is_found_after_fewer() {
    // As `verify` does from 500 seeds on; after fewer seeds further ones are searched for.
    for (first, seeds, most) in [(1, 500, 0), (1_000_000, 500, 0), (1, 40, 64), (u64::MAX - 20, 40, 64)] {
        let mut tally = Tally::default();
        let mut further = 0;
        for offset in 0..3000 {
            let case = draw(first.wrapping_add(offset), DeviceWord::Cpu);
            let searched = offset >= seeds;
            if !searched || tally.is_news(&case) {
                tally.count(&case, case.refused_by_design().is_some());
                further += usize::from(searched);
            }
        }
        let missing = tally.missing();
        assert!(missing.is_empty() && further <= most, "{further} further ones after {first}, without {missing:?}");
    }
}

#[test]
fn adapted_draws_keep_what_the_adaptation_leaves_free() {
    let kinds = |cases: &[Case], field: &str| {
        Drawn::of(cases.iter().cloned()).iter().map(|drawn| drawn.printed(field)).collect::<BTreeSet<String>>().len()
    };
    let drawn: Vec<Case> = (1..=300).map(|seed| draw(seed, DeviceWord::Cpu)).collect();
    // Fields that an adaptation sets, each to the values that it allows.
    let quantised: &[(&str, usize)] = &[("dtype", 1), ("quantize", 1), ("scales", 2), ("in_place", 1)];
    let in_place: &[(&str, usize)] = &[
        ("nodes", 1),
        ("link", 1),
        ("nics", 1),
        ("round_tokens", 1),
        ("layout", 1),
        ("scale_order", 1),
        ("gap", 1),
        ("quantize", 1),
        ("ahead", 1),
        ("in_place", 1),
        ("drop_overflow", 1),
        ("again", 1),
        ("mixed", 1),
        ("dispatch_payload", 1),
        ("missing", 1),
        ("mode", 2),
        ("fault", 2),
    ];
    for (quantise, at_once, set) in [(true, false, quantised), (false, true, in_place)] {
        let adapted: Vec<Case> = drawn.iter().map(|case| as_asked(case.clone(), quantise, at_once)).collect();
        for (field, _) in Case::default().fields() {
            let given = set.iter().find(|(name, _)| *name == field).map(|(_, values)| *values);
            let (before, after) = (kinds(&drawn, field), kinds(&adapted, field));
            match given {
                Some(values) => assert_eq!(after, values, "{field}"),
                None if field == "hidden" => assert!(after > 4, "{field}"),
                None => assert_eq!(after, before, "{field}"),
            }
        }
        assert!(!at_once || adapted.iter().all(|case| case.why_not_in_place().is_none()));
    }
    assert_eq!(as_asked(drawn[0].clone(), false, false), drawn[0]);
}
