//! One rank of a run: builds its context and buffers, and then, a few iterations at a time, draws inputs, has the calls
//! enqueued, and has the reference compare what was left behind.
//!
//! On the rank's own thread, fiber or process. It waits for its own stream between those groups of iterations, and for
//! other ranks only where the run begins and ends.

use std::collections::BTreeSet;

use tokenyard::{AllToAll, ArenaPlace, CallStatistics, Device, DeviceKind, Error, Event, Proxy, Result, Stream, World};

use super::buffers::POISON;
use super::builder::builder;
use super::calls::{Caller, Given, Lane, Marks};
use super::faults::{Planned, check_errors, check_refused};
use super::gpus::sharing;
use super::hold::Hold;
use super::job::Job;
use super::link;
use super::meeting::Meeting;
use super::network;
use super::sample::{RankResult, Verdict};
use super::steps::steps;
use super::traffic::Traffic;
use super::wake::Wake;
use crate::cli::cases::case::Case;
use crate::cli::cases::inputs::Inputs;
use crate::cli::cases::routing::{Routed, Router, ragged_count};
use crate::cli::cases::words::{ArenaWord, FaultWord, Mode, WorldMode};
use crate::cli::reference::{
    self, Report, RowSource, SourceRank, Spec, check_combine, check_dispatch, quantized_row, quantized_scales,
};

/// What a rank has between nodes; of one node, nothing.
pub struct Between {
    /// Who drives its endpoint.
    pub proxy: Option<Proxy>,
    /// Where it meets the others before what is timed.
    pub meeting: Option<Meeting>,
}

/// Runs one rank from beginning to end. Collective.
///
/// # Errors
/// Whatever the library returns; wrong results are not errors but part of the verdict.
pub fn run(
    job: &Job,
    world: &World,
    device: &Device,
    between: &Between,
    progress: &dyn Fn(usize),
) -> Result<RankResult> {
    let world = world.clone().with_timeout(job.timeout);
    let mut rank = RankRun::new(job, &world, device, between)?;
    rank.prepare()?;
    let mut result = RankResult {
        rank: world.rank().index(),
        device_name: device.name(),
        sms: rank.caller.ep.sms(),
        arena_bytes: rank.caller.ep.plan().arena_bytes(),
        verdict: Verdict::new(),
        ..RankResult::default()
    };
    // Allocating, freeing and instantiating graphs may wait for a GPU's kernels, which may wait for other ranks.
    world.barrier("buffers ready")?;
    let gpu = device.kind() == DeviceKind::Cuda;
    if job.measured && !gpu {
        result.link_rate = link::rate(&world)? / turns(job, device, world.size());
    }
    let ran = rank.all_iterations(&mut result, progress);
    // The others would wait in vain for one that failed, whose error says more than theirs would.
    let failed = world.all_gather("iterations", &[u8::from(ran.is_err())]);
    ran?;
    if failed?.iter().any(|failed| failed != &[0]) {
        return Ok(result);
    }
    if job.measured && gpu {
        let rows: Vec<u64> = rank.traffic.rows().iter().map(|rows| rows / result.iterations.max(1)).collect();
        result.push_us = link::push(&world, &rank.caller, job.arena, &rows, job.case.row_bytes(), job.patience())?;
    }
    // Peers may still store into this rank's arena: flags of the last combine.
    world.barrier("end of run")?;
    Ok(result)
}

/// How many ranks take turns on a processor: all on one thread, and where there are fewer cores than ranks.
fn turns(job: &Job, device: &Device, ranks: usize) -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    match (device.kind(), job.case.world_mode) {
        (DeviceKind::Cuda, _) => 1.0,
        (DeviceKind::Cpu, WorldMode::OneThread) => ranks as f64,
        (DeviceKind::Cpu, WorldMode::Threads) => (ranks as f64 / cores as f64).max(1.0),
    }
}

/// One iteration that is under way.
struct Turn {
    i: usize,
    checked: bool,
    inputs: Inputs,
    /// Routing of all ranks, or of this one alone where nothing is compared.
    sources: Vec<SourceRank>,
    planned: Planned,
}

struct RankRun<'a> {
    job: &'a Job,
    case: &'a Case,
    rank: usize,
    caller: Caller,
    // Behind the context: its kernels use them.
    lanes: Vec<Lane>,
    wake: Option<Wake>,
    /// Whether the GPU has waited for the host to compare, or to begin.
    idled: bool,
    router: Router,
    spec: Spec,
    /// Ranks whose routing was unusable in an iteration so far.
    refusing: BTreeSet<usize>,
    /// Rows of this rank's tokens in timed iterations.
    traffic: Traffic,
    /// Time of the timeline, and the event that it was taken from.
    clock: Option<(f64, Event)>,
}

impl Drop for RankRun<'_> {
    /// After an error kernels may still be under way; buffers and context stay until they are through.
    fn drop(&mut self) {
        let _ = self.stream().synchronize(self.job.patience());
    }
}

impl<'a> RankRun<'a> {
    fn new(job: &'a Job, world: &World, device: &Device, between: &Between) -> Result<RankRun<'a>> {
        let case = &job.case;
        let rank = world.rank().index();
        let ep = build(job, world, device, between.proxy.as_ref())?;
        let seat = between.meeting.as_ref().map(|meeting| meeting.seat(rank, job.timeout));
        let hold = Hold::new(device, world.rank(), job.timeout)?;
        // What goes between nodes by emulated NICs takes the links of one.
        let linked = if seat.is_some() { world.clone().with_nodes(&[world.size()])? } else { world.clone() };
        let (lanes, own) = (case.ahead.min(job.iterations()), ep.own_output());
        Ok(RankRun {
            job,
            case,
            rank,
            caller: Caller::new(case, ep, device, job.measured, hold, seat)?,
            lanes: (0..lanes).map(|_| Lane::new(case, rank, device, own.clone())).collect::<Result<_>>()?,
            wake: if job.measured { Wake::establish(&linked, device, job.arena)? } else { None },
            idled: true,
            refusing: BTreeSet::new(),
            router: case.router()?,
            spec: case.spec(POISON),
            traffic: Traffic::new(&case.spec(POISON)),
            clock: None,
        })
    }

    fn stream(&self) -> &Stream {
        &self.caller.stream
    }

    /// Captures graphs, where there are any, for the buffers of the first iterations.
    fn prepare(&mut self) -> Result<()> {
        if self.case.mode != Mode::Graph {
            return Ok(());
        }
        let turns: Vec<Turn> = (0..self.lanes.len()).map(|i| self.draw(i)).collect();
        let given = self.given(&turns);
        self.caller.prepare(&mut self.lanes, &given)
    }

    fn given(&self, turns: &[Turn]) -> Vec<Given> {
        let given = |turn: &Turn| Given {
            tokens: turn.sources[self.rank].tokens,
            capacity: turn.planned.capacity(self.case, self.rank),
        };
        turns.iter().map(given).collect()
    }

    /// Runs all iterations; `progress` hears how many are done.
    fn all_iterations(&mut self, result: &mut RankResult, progress: &dyn Fn(usize)) -> Result<()> {
        let mut i = 0;
        while i < self.job.iterations() {
            let count = self.case.ahead.clamp(1, self.job.iterations() - i);
            self.iterations(i, count, result)?;
            i += count;
            progress(i);
        }
        Ok(())
    }

    /// Runs `count` iterations, each with buffers of its own, without a wait between their calls.
    fn iterations(&mut self, first: usize, count: usize, result: &mut RankResult) -> Result<()> {
        let turns: Vec<Turn> = (first..first + count).map(|i| self.draw(i)).collect();
        self.upload(&turns)?;
        // The host is long with an iteration that is compared: before it with poison and all ranks' inputs, behind it
        // with the reference.
        let compared = turns.iter().any(|turn| turn.checked);
        let wake = self.wake.as_ref().filter(|_| compared || self.idled);
        self.idled = compared;
        let marks = self.caller.enqueue(&self.lanes, &self.given(&turns), &steps(self.case, first, count), wake)?;
        self.stream().synchronize(self.job.patience())?;
        let errors = self.caller.take_errors()?;
        self.judge_errors(&turns, errors, result)?;
        for ((turn, marks), lane) in turns.iter().zip(marks).zip(&self.lanes) {
            if turn.checked {
                let report = self.compare(turn, lane)?;
                result.verdict.iterations += 1;
                result.verdict.add(report, &format!("iteration {}", turn.i));
            }
            if turn.i >= self.job.warmup && self.job.measured {
                result.add_times(&marks.times()?.unwrap_or_default());
                self.traffic.count(&self.spec, &turn.sources[self.rank], self.rank);
                let told = [self.caller.ep.dispatch_statistics(), self.caller.ep.combine_statistics()];
                keep_spans(&mut self.clock, turn.i - self.job.warmup, marks, &told, result)?;
                result.add_stages(&told);
            }
        }
        self.count_bytes(result);
        Ok(())
    }

    /// Inputs, routing and faults of an iteration.
    fn draw(&self, i: usize) -> Turn {
        let checked = self.job.check.covers(i);
        let source = |rank: usize| {
            if rank != self.rank && !checked {
                return SourceRank::default();
            }
            let tokens = self.tokens_of(i, rank);
            let Routed { topk_idx, topk_weight } = self.router.draw(i as u64, rank, tokens);
            SourceRank { tokens, topk_idx, topk_weight }
        };
        let mut sources: Vec<SourceRank> = (0..self.case.world).map(source).collect();
        let planned = Planned::draw(self.case, &self.spec, &mut sources, i);
        Turn { i, checked, inputs: self.case.inputs(i as u64), sources, planned }
    }

    fn tokens_of(&self, i: usize, rank: usize) -> usize {
        if self.case.ragged { ragged_count(self.case.seed, i as u64, rank, self.case.tokens) } else { self.case.tokens }
    }

    /// Poisons outputs and writes inputs of all of these iterations.
    fn upload(&mut self, turns: &[Turn]) -> Result<()> {
        let stream = &self.caller.stream;
        for (turn, lane) in turns.iter().zip(&mut self.lanes).filter(|(turn, _)| turn.checked) {
            lane.buffers.poison(stream, &turn.inputs)?;
        }
        stream.synchronize(self.job.patience())?;
        for (slot, (turn, lane)) in turns.iter().zip(&self.lanes).enumerate() {
            let source = &turn.sources[self.rank];
            if turn.checked {
                lane.buffers.write_old()?;
            }
            if turn.checked || turn.i == slot {
                // Nothing that is timed depends on the values of rows.
                let tokens = if turn.checked { source.tokens } else { self.case.max_tokens };
                lane.buffers.upload_rows(&turn.inputs, tokens)?;
            }
            lane.buffers.upload_routing(source)?;
        }
        Ok(())
    }

    /// Errors are wrong where none were planned, and where others were.
    fn judge_errors(&mut self, turns: &[Turn], errors: Vec<Error>, result: &mut RankResult) -> Result<()> {
        if matches!(self.case.fault, FaultWord::None | FaultWord::Forged) {
            return errors.into_iter().next().map_or(Ok(()), Err);
        }
        let planned: Vec<(&Planned, &[SourceRank])> =
            turns.iter().map(|turn| (&turn.planned, turn.sources.as_slice())).collect();
        let mut report = check_errors(&planned, &self.spec, self.rank, &errors);
        self.refusing.extend(turns.iter().flat_map(|turn| turn.planned.refusing()));
        report.merge(check_refused(&self.refusing, self.rank, &self.caller.ep.refused_sources()));
        let verdict = &mut result.verdict;
        verdict.overflows += errors.iter().filter(|e| matches!(e, Error::Capacity { .. })).count() as u64;
        verdict.refusals += errors.iter().filter(|e| matches!(e, Error::Routing { .. })).count() as u64;
        let numbers: Vec<String> = turns.iter().map(|turn| turn.i.to_string()).collect();
        verdict.add(report, &format!("iteration {}", numbers.join(", ")));
        Ok(())
    }

    /// Payload between ranks, and between nodes: rows that left, and sums that came home.
    fn count_bytes(&self, result: &mut RankResult) {
        let (row, partial) = self.case.row_bytes();
        let (rows, wire) = (self.traffic.nvlink_rows(), self.traffic.wire_rows());
        (result.dispatch_bytes, result.combine_bytes) = (rows * row, rows * partial);
        result.wire_bytes = [wire * row, wire * partial];
    }

    /// Has the reference compare this rank's outputs with what all ranks' inputs demand.
    fn compare(&self, turn: &Turn, lane: &Lane) -> Result<Report> {
        let Turn { sources, planned: Planned { faults, .. }, .. } = turn;
        let scales = self.case.quantize.then(|| self.case.reference_scales());
        let (rank, rows) = (self.rank, Made { inputs: turn.inputs, quantized: scales });
        let spec = turn.planned.spec(self.case, &self.spec, rank);
        lane.buffers.pull(&self.caller.stream)?;
        self.caller.stream.synchronize(self.job.patience())?;
        let seen = lane.buffers.read()?;
        let mut report = check_dispatch(&spec, sources, &rows, faults, rank, &lane.buffers.dispatched(&seen));
        report.merge(check_combine(&spec, sources, &rows, faults, rank, &lane.buffers.summed(&seen)));
        Ok(report)
    }
}

/// Adds an iteration to the timeline, which begins with the first.
fn keep_spans(
    clock: &mut Option<(f64, Event)>,
    iteration: usize,
    marks: Marks,
    told: &[Option<CallStatistics>; 2],
    result: &mut RankResult,
) -> Result<()> {
    // From iteration to iteration, since events count in floats that lose the µs of a long run.
    let base = match clock {
        Some((at, event)) => *at + marks.since(event)?,
        None => 0.0,
    };
    result.spans.extend(marks.spans(iteration, base, told)?);
    *clock = marks.into_start().map(|start| (base, start));
    Ok(())
}

/// Rows that were dispatched, as the reference asks for them.
struct Made {
    inputs: Inputs,
    /// The scales that rows got, where they were quantised.
    quantized: Option<reference::Scales>,
}

impl Made {
    /// The row of a token as it was given.
    fn given(&self, rank: usize, token: usize) -> Vec<u8> {
        let mut row = vec![0; self.inputs.row_bytes()];
        self.inputs.fill_row(rank, token, &mut row);
        row
    }
}

impl RowSource for Made {
    fn row(&self, rank: usize, token: usize, out: &mut [u8]) {
        match self.quantized {
            Some(scales) => quantized_row(scales, &self.given(rank, token), out),
            None => self.inputs.fill_row(rank, token, out),
        }
    }

    fn scales(&self, rank: usize, token: usize, out: &mut [u32]) {
        match self.quantized {
            Some(scales) => quantized_scales(scales, &self.given(rank, token), out),
            None => self.inputs.fill_scales(rank, token, out),
        }
    }
}

/// Multiprocessors of a shared GPU that no rank's calls take.
const SPARE_MULTIPROCESSORS: u32 = 4;

/// Builds the context of a rank. Collective.
fn build(job: &Job, world: &World, device: &Device, proxy: Option<&Proxy>) -> Result<AllToAll> {
    let case = &job.case;
    let builder = network::attach(builder(case, world)?, proxy, case);
    let place = match job.arena {
        ArenaWord::Device => ArenaPlace::Device,
        ArenaWord::Host => ArenaPlace::Host,
    };
    let mut builder = builder.device(device.clone()).timeout(job.timeout).tuning(|tuning| {
        tuning.handles = case.ahead;
        tuning.arena = place;
        tuning.statistics = job.stages;
    });
    let sharers = if device.kind() == DeviceKind::Cuda { sharing(case.world) } else { 1 };
    if case.sms.is_none() && sharers > 1 {
        // Blocks wait for other ranks' blocks, so those of all must fit at once, beside the small kernels that other
        // ranks run before theirs.
        let nic = proxy.map_or(0, |proxy| proxy.device_needs().blocks);
        let room = device.multiprocessors().saturating_sub(SPARE_MULTIPROCESSORS) / sharers as u32;
        builder = builder.sms(room.saturating_sub(nic).max(2));
    }
    builder.build()
}
