//! `tokenyard verify`: random configurations, three iterations or more each, every one compared with the reference.
//!
//! On the main thread; each configuration's ranks run on threads, or all on one under a seeded schedule. What a
//! configuration is follows from its seed alone; a failure prints it whole, so that it can be run again and changed.

use std::process::ExitCode;
use std::time::Duration;

use tokenyard::Error;
use tokenyard::base::Dtype;

use super::args::{Check, VerifyArgs};
use super::case::Case;
use super::config::{or_here, usable_gpus};
use super::inputs::{Counter, ScaleKind, Use};
use super::rank::Job;
use super::report::Progress;
use super::routing::Routing;
use super::sample::Verdict;
use super::tally::Tally;
use super::team;
use super::usage::Refusal;
use super::words::{
    DeviceWord, IndexWord, LayoutWord, Mode, OrderWord, PlacementWord, SUMMED, WeightsWord, Word, WorldMode,
};

/// Configurations by default.
const SEEDS: usize = 100;
/// From so many on, every pair of values occurs, if need be in configurations beyond.
const ALL_PAIRS: usize = 500;
/// Seeds that are looked at for a pair that is still missing.
const SEARCH: u64 = 20_000;
/// Progress deadline of a configuration: small runs that take longer hang.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Ranks of a configuration at the most.
const RANKS: usize = 8;
/// Elements that a configuration dispatches at the most; larger draws get fewer tokens.
const ELEMENTS: usize = 2 << 20;

/// Models' full sizes, for `--full`.
const FULL: [&str; 5] = [
    "world=8,hidden=7168,experts=256,top_k=8,dtype=fp8,scales=f32,tokens=128,max_tokens=128,routing=v3-groups,iters=3",
    "world=8,hidden=7168,experts=384,top_k=8,dtype=fp8,scales=ue8m0,scale_order=column,align=128,zero_padding=yes,\
     tokens=64,max_tokens=64,iters=3",
    "world=8,hidden=4096,experts=128,top_k=8,layout=token,partial_f32=yes,out_dtype=fp32,tokens=128,max_tokens=128,iters=3,\
     mode=split",
    "world=4,hidden=2880,experts=128,top_k=4,layout=masked,weights=combine,ragged=yes,tokens=128,max_tokens=128,iters=3",
    "world=8,hidden=6144,experts=8,top_k=2,accumulate=yes,ragged=yes,device_count=yes,mode=graph,tokens=128,max_tokens=160,\
     routing=zipf:1.2,iters=3",
];

/// Runs the configurations. Success: all were right, or refused as they must be.
///
/// # Errors
/// Unusable arguments.
pub fn verify(args: &VerifyArgs) -> Result<ExitCode, Refusal> {
    let device = or_here(args.device)?;
    if let Some(text) = &args.replay {
        return replay(text, device);
    }
    let (count, first) = (args.seeds.unwrap_or(SEEDS), args.seed.unwrap_or(1));
    let mut session = Session { device, bar: Progress::new(), tally: Tally::default(), failures: 0, run: 0 };
    let ranks = ranks_here(device);
    for i in 0..count {
        session.bar.show("verify", i, count);
        session.run(&draw(first.wrapping_add(i as u64), device, ranks));
    }
    if count >= ALL_PAIRS {
        session.run_missing_pairs(first.wrapping_add(count as u64), ranks);
    }
    for text in FULL.iter().filter(|_| args.full) {
        let case = Case::parse(text)?;
        session.bar.clear();
        println!("full size: {case}");
        session.run(&Case { world: case.world.min(ranks), ..case });
    }
    session.bar.clear();
    println!("{}", session.tally.table());
    println!("{} configurations run on {}, {} failed", session.run, device.name(), session.failures);
    let missing = if count >= ALL_PAIRS { session.tally.missing() } else { Vec::new() };
    missing.iter().for_each(|pair| println!("never drawn: {pair}"));
    Ok(if session.failures == 0 && missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Ranks that this machine can give.
fn ranks_here(device: DeviceWord) -> usize {
    match device {
        DeviceWord::Cpu => RANKS,
        DeviceWord::Cuda => usable_gpus().clamp(1, RANKS),
    }
}

fn replay(text: &str, device: DeviceWord) -> Result<ExitCode, Refusal> {
    let case = Case::parse(text)?;
    if case.refused_by_design().is_none() {
        case.check()?;
    }
    if device == DeviceWord::Cuda && case.world > usable_gpus() {
        return Err(Refusal::of("--replay", text, format!("it needs {} GPUs; give --device cpu", case.world)));
    }
    let outcome = judge(&case, device);
    match &outcome {
        Outcome::Right(verdict) => println!("right: {} elements compared", verdict.compared),
        Outcome::Refused(error) => println!("refused by design: {error}"),
        Outcome::Wrong(sentences) => sentences.iter().for_each(|s| println!("wrong: {s}")),
    }
    Ok(if matches!(outcome, Outcome::Wrong(_)) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

struct Session {
    device: DeviceWord,
    bar: Progress,
    tally: Tally,
    failures: usize,
    run: usize,
}

impl Session {
    fn run(&mut self, case: &Case) {
        self.run += 1;
        let outcome = judge(case, self.device);
        self.tally.count(case, matches!(outcome, Outcome::Refused(_)));
        if let Outcome::Wrong(sentences) = outcome {
            self.failures += 1;
            self.bar.clear();
            println!("FAILED: tokenyard verify --device {} --replay '{case}'", self.device.name());
            sentences.iter().for_each(|sentence| println!("  {sentence}"));
        }
    }

    /// Runs further seeds until every pair of values has occurred.
    fn run_missing_pairs(&mut self, first: u64, ranks: usize) {
        for offset in 0..SEARCH {
            if self.tally.missing().is_empty() {
                return;
            }
            let case = draw(first.wrapping_add(offset), self.device, ranks);
            if self.tally.is_news(&case) {
                self.run(&case);
            }
        }
    }
}

/// What became of a configuration.
enum Outcome {
    Right(Verdict),
    /// Refused as it must be.
    Refused(Error),
    Wrong(Vec<String>),
}

fn judge(case: &Case, device: DeviceWord) -> Outcome {
    let job = Job { case: case.clone(), warmup: 0, check: Check::All, timeout: TIMEOUT, measured: false };
    let outcome = team::run(&job, device, &|_| {});
    match (outcome, case.refused_by_design()) {
        (Err(error), Some(field)) if names(&error, field) => Outcome::Refused(error),
        (Err(error), _) => Outcome::Wrong(vec![error.to_string()]),
        (Ok(_), Some(field)) => Outcome::Wrong(vec![format!("it ran, but should have been refused for its {field}")]),
        (Ok(ranks), None) => {
            let mut verdict = Verdict::new();
            ranks.iter().for_each(|rank| verdict.merge(rank.verdict.clone()));
            let complete = ranks.len() == case.world && ranks.iter().all(|r| r.verdict.iterations == case.iters as u64);
            if verdict.ok() && complete {
                return Outcome::Right(verdict);
            }
            if !complete {
                verdict.sentences.push("not every rank compared every iteration".to_string());
            }
            Outcome::Wrong(verdict.sentences)
        }
    }
}

/// Whether it is the configuration error that names this field.
fn names(error: &Error, field: &str) -> bool {
    matches!(error, Error::Config { name, .. } if *name == field)
}

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
fn draw(seed: u64, device: DeviceWord, ranks: usize) -> Case {
    let mut dice = Dice(Counter::new(seed, Use::Choice, u64::MAX - 2, 0, 0));
    let dice = &mut dice;
    let mut case = Case { seed, world: 1 + dice.below(ranks), ..Case::default() };
    draw_types(&mut case, dice);
    draw_layout(&mut case, dice);
    draw_shape(&mut case, dice);
    draw_routing(&mut case, dice);
    draw_schedule(&mut case, dice, device);
    case
}

fn draw_types(case: &mut Case, dice: &mut Dice) {
    case.dtype = dice.word(Dtype::Bf16);
    // Scales of rows that are not fp8 are refused; now and then that is looked at.
    if case.dtype == Dtype::Fp8E4m3 || dice.once_in(8) {
        case.scales = dice.word(ScaleKind::None);
    }
    case.combine_dtype = dice.of(SUMMED, Dtype::Bf16);
    case.out_dtype = dice.of(SUMMED, Dtype::Bf16);
    case.partial_f32 = dice.once_in(4);
    case.weights = dice.word(WeightsWord::Dispatch);
    case.index = dice.word(IndexWord::I64);
    case.accumulate = dice.once_in(3);
}

fn draw_layout(case: &mut Case, dice: &mut Dice) {
    case.layout = dice.word(LayoutWord::Contiguous);
    let refused = case.layout == LayoutWord::Token && case.weights == WeightsWord::Combine;
    if refused && !dice.once_in(4) {
        case.weights = dice.of(&[WeightsWord::Dispatch, WeightsWord::None], WeightsWord::None);
    }
    if case.layout == LayoutWord::Contiguous {
        case.align = dice.of(&[1, 1, 2, 4, 8, 16, 128], 1);
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
    case.mode = dice.word(Mode::Fused);
    // A replayed graph must find a changing count in device memory.
    case.device_count = dice.once_in(3) || (case.mode == Mode::Graph && case.ragged);
    case.iters = 3 + dice.below(3);
    // Both parities are used once before flags wrap.
    let near_wrap = u64::from(u32::MAX) - 1 - dice.below(3) as u64;
    case.first_epoch = dice.once_in(6).then_some(near_wrap);
    let (sms, one_thread, hold) = (2 + dice.below(5), dice.once_in(2), dice.once_in(2));
    case.sms = dice.once_in(3).then_some(sms);
    if device == DeviceWord::Cpu && one_thread {
        case.world_mode = WorldMode::OneThread;
        case.hold_stores = hold;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_draw_is_usable_or_refused_by_design_and_replays() {
        for seed in 0..3000 {
            let case = draw(seed, DeviceWord::Cpu, RANKS);
            if case.refused_by_design().is_none() {
                assert!(case.check().is_ok(), "{case}: {:?}", case.check());
            }
            assert_eq!(Case::parse(&case.to_string()), Ok(case));
        }
    }

    #[test]
    fn full_sizes_are_usable() {
        for text in FULL {
            let case = Case::parse(text).unwrap();
            assert!(case.check().is_ok(), "{text}: {:?}", case.check());
        }
    }

    #[test]
    fn five_hundred_draws_leave_few_pairs_to_be_looked_for() {
        let mut tally = Tally::default();
        for seed in 1..=500 {
            let case = draw(seed, DeviceWord::Cpu, RANKS);
            tally.count(&case, case.refused_by_design().is_some());
        }
        assert!(tally.missing().len() <= 3, "{:?}", tally.missing());
    }
}
