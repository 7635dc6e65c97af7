//! Configurations drawn from seeds: shapes, types, layouts, routings, and how calls follow each other.
//!
//! Before the data path; pure. A configuration depends on its seed alone.

use tokenyard::internals::base::Dtype;

use super::case::Case;
use super::inputs::{Counter, ScaleKind, Use};
use super::limits::MAX_NICS;
use super::links::Link;
use super::routing::Routing;
use super::words::{
    DeviceWord, FaultWord, IndexWord, LayoutWord, MissingWord, Mode, NetworkWord, OrderWord, PartialWord,
    PlacementWord, SUMMED, WeightsWord, Word, WorldMode,
};

/// Ranks of a configuration at the most.
pub const RANKS: usize = 12;
/// Nodes of a configuration at the most.
pub const NODES: usize = 4;
/// Elements that a configuration dispatches at the most; larger draws get fewer tokens.
const ELEMENTS: usize = 2 << 20;
/// Ranks, columns and tokens of a schedule at the most.
const SMALL_RANKS: usize = 6;
const SMALL_HIDDEN: usize = 128;
const SMALL_TOKENS: usize = 6;

/// Draws from a stream of numbers.
struct Dice(Counter);

impl Dice {
    /// 0 to `bound` − 1.
    fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound)
    }

    /// True once in `n` times.
    fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// 1 to `most`, small numbers more often.
    fn small(&mut self, most: usize) -> usize {
        1 + self.below(most).min(self.below(most))
    }

    fn of<T: Copy>(&mut self, choices: &[T], default: T) -> T {
        choices.get(self.below(choices.len())).copied().unwrap_or(default)
    }

    fn word<T: Word>(&mut self, default: T) -> T {
        self.of(T::ALL, default)
    }
}

/// The configuration of a seed.
pub fn draw(seed: u64, device: DeviceWord) -> Case {
    with_missing(draw_present(seed, device), false)
}

/// The same, where no rank is missing.
fn draw_present(seed: u64, device: DeviceWord) -> Case {
    let mut dice = Dice(Counter::new(seed, Use::Choice, u64::MAX - 2, 0, 0));
    let dice = &mut dice;
    let mut case = Case { seed, world: 1 + dice.below(RANKS), ..Case::default() };
    draw_types(&mut case, dice);
    draw_layout(&mut case, dice);
    draw_shape(&mut case, dice);
    draw_routing(&mut case, dice);
    draw_schedule(&mut case, dice, device);
    draw_order(&mut case, dice);
    draw_choices(&mut case);
    draw_nodes(&mut case);
    draw_quantize(&mut case);
    draw_partial(&mut case);
    draw_in_place(&mut case);
    draw_drop(&mut case, false);
    draw_duplicates(&mut case);
    draw_handles(&mut case);
    draw_counts(&mut case);
    draw_again(&mut case);
    draw_mixed(&mut case);
    draw_payload(&mut case, false);
    draw_dispatch_payload(&mut case);
    case
}

/// The same, with rows that are quantised; types, scales and columns are adapted to that.
pub fn quantized(case: Case) -> Case {
    let drawn = if (case.seed / 2).is_multiple_of(2) { ScaleKind::F32 } else { ScaleKind::Ue8m0 };
    let scales = if case.scales == ScaleKind::None { drawn } else { case.scales };
    let case = Case { dtype: Dtype::Fp8E4m3, scales, quantize: true, ..case };
    Case { hidden: case.hidden.next_multiple_of(case.hidden_quantum()), in_place: false, ..case }
}

/// The same, in one node, with in-place output; the rest is adapted to that.
pub fn with_in_place(case: Case) -> Case {
    let mode = if case.mode.is_split() { Mode::Fused } else { case.mode };
    let fault = if case.fault == FaultWord::Overflow { FaultWord::None } else { case.fault };
    let case = Case { nodes: Vec::new(), link: Link::None, nics: None, round_tokens: None, ..case };
    let case = Case { layout: LayoutWord::Contiguous, scale_order: OrderWord::Row, gap: 0, mode, fault, ..case };
    let case = Case { missing: MissingWord::No, quantize: false, ahead: 1, ..case };
    let case = Case { drop_overflow: false, ..case };
    Case { again: false, mixed: false, dispatch_payload: 0, in_place: true, ..case }
}

/// The draw, adapted to the arguments of `verify`.
pub fn as_asked(case: Case, quantize: bool, in_place: bool) -> Case {
    if quantize {
        quantized(case)
    } else if in_place {
        with_in_place(case)
    } else {
        case
    }
}

/// The same, of several nodes, between which messages are tampered with.
pub fn forged(case: Case) -> Case {
    let nodes = if case.several_nodes() { case.nodes.clone() } else { vec![1, case.world.saturating_sub(1)] };
    Case { nodes, fault: FaultWord::Forged, in_place: false, missing: MissingWord::No, ..case }
}

/// Some draws, with calls that go on without missing ranks; the rest is adapted to that, unless the case is to be
/// refused. From a stream of its own, as nodes are.
fn with_missing(case: Case, usable: bool) -> Case {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 21, 0, 0));
    if !dice.once_in(4) || case.in_place {
        return case;
    }
    let missing = if dice.once_in(2) { MissingWord::Able } else { MissingWord::One };
    let case = Case { missing, accumulate: false, round_tokens: None, ..case };
    if dice.once_in(3) && !usable {
        return case;
    }
    // Uneven nodes become one.
    let case = if case.uneven_nodes() {
        let case = Case { nodes: Vec::new(), link: Link::None, nics: None, chunk_rows: None, ..case };
        Case { double_buffer: true, network: NetworkWord::Hostile, ..case }
    } else {
        case
    };
    let late = case.several_nodes() && case.weights == WeightsWord::Combine;
    let weights = if late { WeightsWord::Dispatch } else { case.weights };
    let case = Case { weights, ..case };
    Case { partial: PartialWord::Same, payload: 0, gathered: false, dispatch_payload: 0, again: false, ..case }
}

/// The configuration of a seeded schedule: a tiny world on one thread, with much traffic between ranks and little else.
/// Every second configuration holds stores back.
pub fn draw_small(seed: u64) -> Case {
    with_missing(draw_small_present(seed), true)
}

/// The same, where no rank is missing.
fn draw_small_present(seed: u64) -> Case {
    let mut dice = Dice(Counter::new(seed, Use::Choice, u64::MAX - 3, 0, 0));
    let dice = &mut dice;
    let mut case = Case { seed, world: 2 + dice.below(SMALL_RANKS - 1), ..Case::default() };
    draw_types(&mut case, dice);
    draw_layout(&mut case, dice);
    // Configurations that are refused before anything runs have no schedule.
    if case.dtype != Dtype::Fp8E4m3 {
        case.scales = ScaleKind::None;
    }
    if case.layout == LayoutWord::Token && case.weights == WeightsWord::Combine {
        case.weights = WeightsWord::Dispatch;
    }
    case.align = case.align.min(4);
    let quantum = case.hidden_quantum();
    let least = 32usize.div_ceil(quantum);
    case.hidden = quantum * (least + dice.below(SMALL_HIDDEN / quantum - least + 1));
    case.experts = 1 + dice.below(10);
    case.top_k = dice.small(case.experts.min(4));
    case.tokens = dice.below(SMALL_TOKENS + 1);
    case.max_tokens = case.tokens.max(1) + dice.below(2);
    case.ragged = !dice.once_in(3);
    case.placement = dice.word(PlacementWord::Even);
    draw_routing(&mut case, dice);
    draw_schedule(&mut case, dice, DeviceWord::Cpu);
    draw_order(&mut case, dice);
    draw_choices(&mut case);
    draw_nodes(&mut case);
    draw_quantize(&mut case);
    case.quantize &= case.scales != ScaleKind::None;
    draw_partial(&mut case);
    case.hidden = case.hidden.next_multiple_of(case.hidden_quantum());
    // Three blocks and at least five ranks give dedicated sender blocks.
    case.sms = Some(if case.world > 4 && !case.several_nodes() { 3 } else { 2 });
    case.iters = 3 + dice.below(2);
    case.world_mode = WorldMode::OneThread;
    case.hold_stores = seed % 2 == 1;
    draw_in_place(&mut case);
    draw_drop(&mut case, true);
    draw_duplicates(&mut case);
    draw_handles(&mut case);
    draw_counts(&mut case);
    draw_again(&mut case);
    draw_mixed(&mut case);
    draw_payload(&mut case, true);
    draw_dispatch_payload(&mut case);
    case
}

fn draw_types(case: &mut Case, dice: &mut Dice) {
    case.dtype = dice.word(Dtype::Bf16);
    // Scales of rows that are not fp8 are refused; some draws test that.
    if case.dtype == Dtype::Fp8E4m3 || dice.once_in(8) {
        case.scales = dice.word(ScaleKind::None);
    }
    case.combine_dtype = dice.of(SUMMED, Dtype::Bf16);
    case.out_dtype = dice.of(SUMMED, Dtype::Bf16);
    // fp8 is drawn in draw_partial.
    case.partial = if dice.once_in(4) { PartialWord::Fp32 } else { PartialWord::Same };
    case.weights = dice.word(WeightsWord::Dispatch);
    case.index = dice.of(&[IndexWord::I32, IndexWord::I64], IndexWord::I64);
    case.accumulate = dice.once_in(3);
}

fn draw_layout(case: &mut Case, dice: &mut Dice) {
    case.layout = dice.word(LayoutWord::Contiguous);
    let refused = case.layout == LayoutWord::Token && case.weights == WeightsWord::Combine;
    if refused && !dice.once_in(4) {
        case.weights = dice.of(&[WeightsWord::Dispatch, WeightsWord::None], WeightsWord::None);
    }
    if case.layout == LayoutWord::Contiguous {
        case.align = dice.of(&[1, 1, 2, 3, 8, 16, 128], 1);
        case.zero_padding = dice.once_in(2);
    }
    case.scale_order = dice.word(OrderWord::Row);
    case.input_scales = dice.word(OrderWord::Row);
    case.host_counts = dice.once_in(2);
    case.gap = dice.of(&[0, 0, 16, 48], 0);
}

fn draw_shape(case: &mut Case, dice: &mut Dice) {
    let quantum = case.hidden_quantum();
    case.hidden = quantum * dice.small(1024 / quantum);
    case.experts = match dice.below(8) {
        0 => 1 + dice.below(300),
        1 => dice.small(8),
        _ => dice.small(64),
    };
    let most = case.experts.min(32);
    case.top_k = if dice.once_in(6) { most } else { dice.small(most) };
    case.tokens = match dice.below(8) {
        0 => 0,
        1 | 2 => 1 + dice.below(64),
        _ => 1 + dice.below(12),
    };
    let elements = case.world * case.top_k * case.hidden;
    case.tokens = case.tokens.min((ELEMENTS / elements).max(1));
    case.max_tokens = case.tokens.max(1) + if dice.once_in(2) { dice.below(6) } else { 0 };
    case.ragged = dice.once_in(2);
    case.placement = dice.word(PlacementWord::Even);
}

fn draw_routing(case: &mut Case, dice: &mut Dice) {
    let groups_fit = case.experts.is_multiple_of(8) && case.experts / 2 >= case.top_k;
    case.routing = match dice.below(6) {
        0 => Routing::Zipf(1.2),
        1 => Routing::Hot(dice.small(case.experts - case.top_k + 1)),
        2 if groups_fit => Routing::V3Groups,
        _ => Routing::Uniform,
    };
    case.none_percent = dice.of(&[0, 0, 10, 60, 100], 0);
}

fn draw_schedule(case: &mut Case, dice: &mut Dice, device: DeviceWord) {
    case.mode = dice.of(&[Mode::Fused, Mode::Split, Mode::Graph], Mode::Fused);
    // A replayed graph must find a changing count in device memory.
    case.device_count = dice.once_in(3) || (case.mode == Mode::Graph && case.ragged);
    case.iters = 3 + dice.below(3);
    // Both parities are used once before flags wrap.
    let before_wrap = u64::from(u32::MAX) - 1 - dice.below(3) as u64;
    case.first_epoch = dice.once_in(6).then_some(before_wrap);
    let (sms, one_thread, hold) = (2 + dice.below(5), dice.once_in(2), dice.once_in(2));
    case.sms = dice.once_in(3).then_some(sms);
    if device == DeviceWord::Cpu && one_thread {
        case.world_mode = WorldMode::OneThread;
        case.hold_stores = hold;
    }
}

/// The order of calls, and planned faults.
fn draw_order(case: &mut Case, dice: &mut Dice) {
    case.ahead = if dice.once_in(3) { 2 + dice.below(2) } else { 1 };
    // A barrier before every call keeps all ranks in step.
    case.lockstep = case.ahead == 1 && dice.once_in(4);
    case.fault = match dice.below(12) {
        0 => FaultWord::Routing,
        // The output of a captured call is fixed.
        1..=3 if case.mode != Mode::Graph => FaultWord::Overflow,
        _ => FaultWord::None,
    };
}

/// The nodes of a world, and the network between them. From a stream of its own, so that the rest does not depend on
/// it.
fn draw_nodes(case: &mut Case) {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 6, 0, 0));
    let dice = &mut dice;
    let count = 1 + dice.below(NODES.min(case.world));
    case.nodes = if dice.once_in(2) { even(case.world, count) } else { uneven(case.world, count, dice) };
    // Mostly the smallest tile, if it makes two tiles of a call's tokens.
    case.meta_tile = (case.max_tokens > 32 && !dice.once_in(8)).then_some(32);
    // Up to four rounds, the last one often shorter.
    case.round_tokens = dice.once_in(3).then(|| case.max_tokens.div_ceil(1 + dice.below(4)).max(1));
    if !case.several_nodes() {
        case.nodes.clear();
        case.ll_tokens = [None, Some(0), Some(case.max_tokens)][dice.below(3)];
        return;
    }
    // One row per chunk makes messages of many chunks; a decode step has one chunk.
    case.chunk_rows = (!dice.once_in(4)).then(|| dice.small(8));
    case.double_buffer = dice.once_in(2);
    case.nics = dice.once_in(2).then(|| 1 + dice.below(MAX_NICS as usize));
    if dice.once_in(4) {
        case.network = NetworkWord::Calm;
        case.link = dice.of(&[Link::None, Link::Cx7, Link::EfaP5, Link::EfaP5en], Link::None);
    }
}

/// Whether rows are quantised. From a stream of its own, as nodes are.
fn draw_quantize(case: &mut Case) {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 7, 0, 0));
    // Without scales it is refused; some draws test that.
    case.quantize = dice.once_in(if case.scales == ScaleKind::None { 16 } else { 2 });
}

/// Whether the case has in-place output. Some settings are adapted to it; cases with others keep theirs. From a stream
/// of its own, as nodes are.
fn draw_in_place(case: &mut Case) {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 9, 0, 0));
    if !dice.once_in(3) {
        return;
    }
    let adapted = Case { scale_order: OrderWord::Row, ahead: 1, gap: 0, round_tokens: None, ..case.clone() };
    if adapted.why_not_in_place().is_none() {
        *case = Case { in_place: true, ..adapted };
    }
}

/// Whether partial rows are fp8, with columns adapted to that. From a stream of its own, as nodes are.
fn draw_partial(case: &mut Case) {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 8, 0, 0));
    if dice.once_in(3) {
        case.partial = PartialWord::Fp8;
        // Other columns are refused; some draws test that.
        if !dice.once_in(16) {
            case.hidden = case.hidden.next_multiple_of(case.hidden_quantum());
        }
    }
}

/// Whether tokens may name experts several times, and how often they do. From a stream of its own, as nodes are.
fn draw_duplicates(case: &mut Case) {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 10, 0, 0));
    case.duplicate_percent = dice.once_in(3).then(|| dice.of(&[0, 20, 60, 100], 0));
}

/// Whether handles are compact. From a stream of its own, as nodes are.
fn draw_handles(case: &mut Case) {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 12, 0, 0));
    case.compact_handles = dice.once_in(2);
}

/// Whether rows go by earlier handles, where they can. From a stream of its own, as nodes are.
fn draw_again(case: &mut Case) {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 14, 0, 0));
    case.again = dice.once_in(2) && !case.in_place && (case.fault != FaultWord::Overflow || case.drop_overflow);
}

/// Whether calls of another format alternate with the case's. From a stream of its own, as nodes are.
fn draw_mixed(case: &mut Case) {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 16, 0, 0));
    case.mixed = dice.once_in(2) && !case.in_place;
}

/// Whether combine has a side payload, `usable` or perhaps refused. From a stream of its own, as nodes are.
fn draw_payload(case: &mut Case, usable: bool) {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 17, 0, 0));
    let (words, gathered) = (1 + dice.below(5), dice.once_in(2));
    // Some draws test that what cannot go together is refused.
    let refused = dice.once_in(4) && !usable;
    if !dice.once_in(3) && (refused || case.partial == PartialWord::Same) {
        case.payload = words;
        case.gathered = gathered && (refused || case.layout != LayoutWord::Token);
    }
}

/// Whether dispatch has a side payload, of less and of more words than a warp has lanes. From a stream of its own, as
/// nodes are.
fn draw_dispatch_payload(case: &mut Case) {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 22, 0, 0));
    let words = dice.of(&[1, 2, 3, 8, 40], 1);
    if dice.once_in(2) && !case.in_place {
        case.dispatch_payload = words;
    }
}

/// Whether rows without room are left out. In the token layout it is refused; some draws test that, unless the case is
/// to be `usable`. From a stream of its own, as nodes are.
fn draw_drop(case: &mut Case, usable: bool) {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 23, 0, 0));
    let (wanted, refused, often) = (dice.once_in(2), dice.once_in(16), dice.once_in(2));
    let takes = if case.layout == LayoutWord::Token { refused && !usable } else { wanted };
    case.drop_overflow = takes && !case.in_place;
    if case.drop_overflow && often && case.fault == FaultWord::None && case.mode != Mode::Graph {
        case.fault = FaultWord::Overflow;
    }
}

/// Whether counts come first in calls with halves. From a stream of its own, as nodes are.
fn draw_counts(case: &mut Case) {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 13, 0, 0));
    if case.mode == Mode::Split && dice.once_in(2) {
        case.mode = Mode::Counts;
    }
}

/// How tokens name what they go to: the order of choices, replicas, or ranks instead of experts, to which experts and
/// their placement are adapted. From a stream of its own, as nodes are.
fn draw_choices(case: &mut Case) {
    let mut dice = Dice(Counter::new(case.seed, Use::Choice, u64::MAX - 11, 0, 0));
    case.index_order = dice.word(OrderWord::Row);
    if dice.once_in(6) {
        case.index = IndexWord::Ranks;
        case.top_k = case.top_k.max(case.world);
        case.experts = case.experts.max(case.top_k);
        case.placement = PlacementWord::Even;
        case.routing = Routing::Uniform;
        let tokens = case.tokens.min((ELEMENTS / (case.world * case.top_k * case.hidden)).max(1));
        case.max_tokens -= case.tokens - tokens;
        case.tokens = tokens;
    }
    // Outputs have room for every expert.
    if dice.once_in(3) && case.experts <= 100 {
        case.replicas = 2 + dice.below(2);
    }
    let few = 1 + dice.below(case.top_k);
    if case.index != IndexWord::Ranks && dice.once_in(6) {
        case.call_top_k = Some(few);
    }
}

/// Nodes that differ by a rank at the most.
fn even(world: usize, count: usize) -> Vec<usize> {
    (0..count).map(|node| (node + 1) * world / count - node * world / count).collect()
}

/// Nodes of any sizes: the world is cut at random places.
fn uneven(world: usize, count: usize, dice: &mut Dice) -> Vec<usize> {
    let mut cuts = vec![0, world];
    while cuts.len() < count + 1 {
        let cut = 1 + dice.below(world - 1);
        if !cuts.contains(&cut) {
            cuts.push(cut);
        }
    }
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

#[cfg(test)]
#[path = "draw/tests.rs"]
mod shares;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::report::tally::Tally;

    #[test]
    fn every_draw_is_usable_or_refused_by_design_and_replays() {
        for seed in 0..3000 {
            let case = draw(seed, DeviceWord::Cpu);
            if case.refused_by_design().is_none() {
                assert!(case.check().is_ok(), "{case}: {:?}", case.check());
            }
            assert_eq!(Case::parse(&case.to_string()), Ok(case));
        }
    }

    #[test]
    fn five_hundred_draws_leave_few_pairs_missing() {
        let mut tally = Tally::default();
        for seed in 1..=500 {
            let case = draw(seed, DeviceWord::Cpu);
            tally.count(&case, case.refused_by_design().is_some());
        }
        assert!(tally.missing().len() <= 3, "{:?}", tally.missing());
    }

    #[test]
    fn schedules_are_usable_and_exercise_everything() {
        let cases: Vec<Case> = (1..=400).map(draw_small).collect();
        for case in &cases {
            assert!(case.refused_by_design().is_none() && case.check().is_ok(), "{case}: {:?}", case.check());
            assert_eq!(Case::parse(&case.to_string()), Ok(case.clone()));
            assert!((2..=SMALL_RANKS).contains(&case.world) && case.iters >= 3 && (32..=128).contains(&case.hidden));
        }
        let share = |what: fn(&Case) -> bool| cases.iter().filter(|case| what(case)).count();
        assert_eq!(share(|c| c.hold_stores), 200);
        assert!(share(|c| c.ahead > 1) > 90 && share(|c| c.ahead > 1 && c.accumulate) > 20);
        assert!(share(|c| c.fault == FaultWord::Overflow) > 20 && share(|c| c.fault == FaultWord::Routing) > 10);
        assert!(share(|c| c.partial == PartialWord::Fp8) > 100 && share(|c| c.partial == PartialWord::Fp32) > 40);
        assert!(share(|c| c.quantize && c.several_nodes()) > 10 && share(|c| c.quantize && !c.several_nodes()) > 3);
        assert!(share(|c| c.sms == Some(3) && c.tokens > 3) > 10);
        assert!(share(|c| c.tokens == 0) > 20 && share(|c| c.ragged) > 200 && share(|c| c.lockstep) > 30);
        assert!(Mode::ALL.iter().all(|mode| cases.iter().any(|c| c.mode == *mode && c.ahead > 1)));
    }

    #[test]
    fn every_draw_can_be_made_to_quantize() {
        for seed in 0..400 {
            for case in [draw(seed, DeviceWord::Cpu), draw_small(seed)].map(quantized) {
                let refused = case.refused_by_design();
                let stays = matches!(
                    refused,
                    Some("layout" | "gathered" | "payload_words" | "missing_ranks" | "drop_overflow")
                );
                assert!(case.quantize && (stays || case.check().is_ok()), "{case}: {refused:?}");
            }
        }
    }

    #[test]
    fn messages_of_every_schedule_can_be_tampered_with() {
        for case in (1..=300).map(|seed| forged(draw_small(seed))) {
            assert!(case.several_nodes() && case.fault == FaultWord::Forged, "{case}");
            assert!(case.refused_by_design().is_some() || case.check().is_ok(), "{case}: {:?}", case.check());
        }
    }

    #[test]
    fn a_world_is_cut_into_nodes_of_every_kind() {
        let mut dice = Dice(Counter::new(1, Use::Choice, 0, 0, 0));
        let mut sizes = std::collections::BTreeSet::new();
        for world in 1..=12 {
            for count in 1..=NODES.min(world) {
                let cut = even(world, count);
                assert!(cut.iter().max().unwrap() - cut.iter().min().unwrap() <= 1, "{cut:?}");
                for nodes in [cut, uneven(world, count, &mut dice)] {
                    assert_eq!((nodes.len(), nodes.iter().sum::<usize>()), (count, world), "{nodes:?}");
                    assert!(!nodes.contains(&0));
                    sizes.extend(nodes);
                }
            }
        }
        assert!(sizes.len() > 8);
    }

    #[test]
    fn draws_have_up_to_four_nodes() {
        let cases: Vec<Case> = (1..=400).map(|seed| draw(seed, DeviceWord::Cpu)).collect();
        let share = |what: fn(&Case) -> bool| cases.iter().filter(|case| what(case)).count();
        let several = share(Case::several_nodes);
        assert!((200..380).contains(&several), "{several}");
        assert!((2..=NODES).all(|n| cases.iter().filter(|c| c.nodes.len() == n).count() > 30));
        assert!(share(Case::uneven_nodes) > 100 && share(|c| c.several_nodes() && !c.uneven_nodes()) > 60);
        assert!(share(|c| c.several_nodes() && c.network == NetworkWord::Hostile) > several / 2);
        assert!(share(|c| c.round_tokens.is_some_and(|tokens| tokens < c.max_tokens)) > 60);
        let tiled = share(|c| c.meta_tile.is_some_and(|tokens| tokens < c.max_tokens));
        let whole = share(|c| c.meta_tile.is_none() && c.max_tokens > 32);
        assert!(tiled > 40 && whole > 2, "{tiled} {whole}");
        assert!(share(|c| c.chunk_rows == Some(1)) > 20 && share(|c| c.link != Link::None) > 20);
    }
}
