//! One rank of a run: builds its context and buffers. Then, a few iterations at a time, it draws inputs, enqueues the
//! calls, and compares the outputs with the reference.
//!
//! On the rank's own thread, fiber or process. It waits for its own stream between groups of iterations, and for other
//! ranks only at the begin and end of the run.

use std::collections::BTreeSet;

use tokenyard::{
    AllToAll, ArenaPlace, CallStatistics, Device, DeviceKind, Error, Event, Proxy, Rank, Result, Stream, World,
};

use super::buffers::POISON;
use super::builder::builder;
use super::calls::{Caller, FirstCounts, Given, InFlight, Marks};
use super::faults::{Planned, check_errors, check_refused};
use super::flag;
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
use crate::cli::cases::routing::{Router, ragged_count};
use crate::cli::cases::words::{ArenaWord, FaultWord, Mode, WorldMode};
use crate::cli::reference::{
    self, ObservedDispatch, Report, RowSource, SourceRank, Spec, check_combine, check_dispatch, check_payload,
    quantized_row, quantized_scales,
};

/// A rank's means between nodes; nothing in a world of one node.
pub struct Between {
    /// The proxy that drives its endpoint.
    pub proxy: Option<Proxy>,
    /// Where all ranks meet before timed calls.
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
        result.link_rate = link::rate(&world)? / ranks_per_core(job, device, world.size());
    }
    let ran = rank.all_iterations(&mut result, progress);
    // Other ranks would wait in vain for a failed rank, whose own error is the most useful.
    let failed = world.all_gather("iterations", &[u8::from(ran.is_err())]);
    ran?;
    if failed?.iter().any(|failed| failed != &[0]) {
        return Ok(result);
    }
    if job.measured && job.case.mode == Mode::Counts {
        result.flag_us = flag::times(&rank.caller, job.case.iters, job.patience())?;
    }
    if job.measured && gpu {
        let rows: Vec<u64> = rank.traffic.rows().iter().map(|rows| rows / result.iterations.max(1)).collect();
        result.push_us = link::push(&world, &rank.caller, job.arena, &rows, job.case.row_bytes(), job.patience())?;
    }
    // Peers may still store flags of the last combine into this rank's arena.
    world.barrier("end of run")?;
    Ok(result)
}

/// Ranks per processor core: all ranks if they are on one thread; more than 1 also with fewer cores than ranks.
fn ranks_per_core(job: &Job, device: &Device, ranks: usize) -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    match (device.kind(), job.case.world_mode) {
        (DeviceKind::Cuda, _) => 1.0,
        (DeviceKind::Cpu, WorldMode::OneThread) => ranks as f64,
        (DeviceKind::Cpu, WorldMode::Threads) => (ranks as f64 / cores as f64).max(1.0),
    }
}

/// The inputs of one iteration.
struct Drawn {
    i: usize,
    checked: bool,
    inputs: Inputs,
    /// Routing of all ranks, or only of this rank if nothing is compared.
    sources: Vec<SourceRank>,
    planned: Planned,
}

/// Calls of one format: those of the case, or of the case with which it alternates.
struct Side {
    case: Case,
    in_flight: Vec<InFlight>,
    router: Router,
    spec: Spec,
}

impl Side {
    fn new(job: &Job, case: &Case, rank: usize, device: &Device, ep: &AllToAll) -> Result<Side> {
        let (in_flight, own) = (case.ahead.min(job.iterations()), ep.in_place());
        let in_flight =
            (0..in_flight).map(|_| InFlight::new(case, rank, device, own.clone())).collect::<Result<_>>()?;
        Ok(Side { in_flight, router: case.router()?, spec: case.spec(POISON), case: case.clone() })
    }
}

struct RankRun<'a> {
    job: &'a Job,
    rank: usize,
    caller: Caller,
    // Dropped after the context, whose kernels use their buffers. The first is the case's own.
    sides: Vec<Side>,
    wake: Option<Wake>,
    /// Whether the GPU has been idle while the host compared, or before the first iteration.
    idled: bool,
    /// Ranks whose routing was unusable in some iteration so far.
    refusing: BTreeSet<usize>,
    /// Rows of this rank's tokens in timed iterations.
    traffic: Traffic,
    /// A time of the timeline, and its event.
    clock: Option<(f64, Event)>,
}

impl Drop for RankRun<'_> {
    /// After an error kernels may still run; buffers and context stay until they end.
    fn drop(&mut self) {
        let _ = self.stream().synchronize(self.job.patience());
    }
}

impl<'a> RankRun<'a> {
    fn new(job: &'a Job, world: &World, device: &Device, between: &Between) -> Result<RankRun<'a>> {
        let case = &job.case;
        let rank = world.rank().index();
        let ep = build(job, world, device, between.proxy.as_ref())?;
        let attendee = between.meeting.as_ref().map(|meeting| meeting.attendee(rank, job.timeout));
        let hold = Hold::new(device, world.rank(), job.timeout)?;
        // Emulated NICs carry traffic between nodes over the links within the host.
        let linked = if attendee.is_some() { world.clone().with_nodes(&[world.size()])? } else { world.clone() };
        let mut sides = vec![Side::new(job, case, rank, device, &ep)?];
        if case.mixed {
            sides.push(Side::new(job, &case.other(), rank, device, &ep)?);
        }
        Ok(RankRun {
            job,
            rank,
            caller: Caller::new(job, ep, device, hold, attendee)?,
            sides,
            wake: if job.measured { Wake::establish(&linked, device, job.arena)? } else { None },
            idled: true,
            refusing: BTreeSet::new(),
            traffic: Traffic::new(&case.spec(POISON)),
            clock: None,
        })
    }

    fn stream(&self) -> &Stream {
        &self.caller.stream
    }

    /// Captures graphs in graph mode, for the buffers of the first iterations.
    fn prepare(&mut self) -> Result<()> {
        if self.job.case.mode != Mode::Graph {
            return Ok(());
        }
        for side in 0..self.sides.len() {
            let drawn: Vec<Drawn> = (0..self.sides[side].in_flight.len()).map(|i| self.draw(side, i)).collect();
            let given = self.given(side, &drawn);
            self.caller.prepare(&mut self.sides[side].in_flight, &given)?;
        }
        Ok(())
    }

    fn given(&self, side: usize, drawn: &[Drawn]) -> Vec<Given> {
        let given = |each: &Drawn| Given {
            tokens: each.sources[self.rank].tokens,
            capacity: each.planned.capacity(&self.sides[side].case, self.rank),
            fits: each.planned.fits(self.rank),
        };
        drawn.iter().map(given).collect()
    }

    /// Runs all iterations; `progress` gets the number of completed ones.
    fn all_iterations(&mut self, result: &mut RankResult, progress: &dyn Fn(usize)) -> Result<()> {
        let mut i = 0;
        while i < self.job.iterations() {
            let count = self.job.case.ahead.clamp(1, self.job.iterations() - i);
            self.iterations(i, count, result)?;
            i += count;
            progress(i);
        }
        Ok(())
    }

    /// Runs `count` iterations, each with its own buffers, without a wait between their calls.
    fn iterations(&mut self, first: usize, count: usize, result: &mut RankResult) -> Result<()> {
        let side = first / self.job.case.ahead % self.sides.len();
        let drawn: Vec<Drawn> = (first..first + count).map(|i| self.draw(side, i)).collect();
        self.upload(side, &drawn)?;
        // The host takes long for a compared iteration: before it for poison and all ranks' inputs, after it for the
        // reference.
        let compared = drawn.iter().any(|each| each.checked);
        let wake = self.wake.as_ref().filter(|_| compared || self.idled);
        self.idled = compared;
        let (given, steps) = (self.given(side, &drawn), steps(&self.job.case, first, count));
        let marks = self.caller.enqueue(&self.sides[side].in_flight, &given, &steps, wake)?;
        self.stream().synchronize(self.job.patience())?;
        let errors = self.caller.take_errors()?;
        self.judge_errors(side, &drawn, errors, result)?;
        for ((each, marks), flight) in drawn.iter().zip(marks).zip(&self.sides[side].in_flight) {
            if each.checked {
                let (report, strays) = self.compare(side, each, flight, marks.first_counts.as_ref())?;
                let where_ = format!("iteration {}", each.i);
                result.verdict.iterations += 1;
                result.verdict.add_strays(strays, &where_);
                result.verdict.add(report, &where_);
            }
            if each.i >= self.job.warmup && self.job.measured && side == 0 {
                result.add_times(&marks.times()?.unwrap_or_default());
                self.traffic.count(&self.sides[side].spec, &each.sources[self.rank], self.rank);
                let stages = [self.caller.ep.dispatch_statistics(), self.caller.ep.combine_statistics()];
                keep_spans(&mut self.clock, each.i - self.job.warmup, marks, &stages, result)?;
                result.add_stages(&stages);
            }
        }
        self.count_bytes(result);
        Ok(())
    }

    /// Inputs, routing and faults of an iteration.
    fn draw(&self, side: usize, i: usize) -> Drawn {
        let Side { case, router, spec, .. } = &self.sides[side];
        let checked = self.job.check.covers(i);
        let source = |rank: usize| {
            if rank != self.rank && !checked {
                return SourceRank::default();
            }
            let tokens = if case.ragged { ragged_count(case.seed, i as u64, rank, case.tokens) } else { case.tokens };
            case.source(rank, tokens, router.draw(i as u64, rank, tokens))
        };
        let mut sources: Vec<SourceRank> = (0..case.world).map(source).collect();
        let mut planned = Planned::draw(case, spec, &mut sources, i);
        if checked && case.mode == Mode::Counts {
            planned.fit(spec, &sources, self.rank);
        }
        Drawn { i, checked, inputs: case.inputs(i as u64), sources, planned }
    }

    /// Poisons outputs and writes inputs of all of these iterations.
    fn upload(&mut self, side: usize, drawn: &[Drawn]) -> Result<()> {
        let (stream, first) = (&self.caller.stream, self.job.case.ahead * self.sides.len());
        let Side { case, in_flight, .. } = &mut self.sides[side];
        for (each, flight) in drawn.iter().zip(&mut *in_flight).filter(|(each, _)| each.checked) {
            flight.buffers.poison(stream, &each.inputs)?;
        }
        stream.synchronize(self.job.patience())?;
        for (each, flight) in drawn.iter().zip(in_flight) {
            let source = &each.sources[self.rank];
            if each.checked {
                flight.buffers.write_old()?;
            }
            if each.checked || each.i < first {
                // Times do not depend on the values of rows.
                let tokens = if each.checked { source.tokens } else { case.max_tokens };
                flight.buffers.upload_rows(&each.inputs, tokens)?;
            }
            flight.buffers.upload_routing(source)?;
        }
        Ok(())
    }

    /// Unplanned errors are wrong, and so are missing ones.
    fn judge_errors(
        &mut self,
        side: usize,
        drawn: &[Drawn],
        errors: Vec<Error>,
        result: &mut RankResult,
    ) -> Result<()> {
        // Those that are missing here refuse nothing here.
        let missing = self.job.case.sources_missing_from(self.rank);
        if matches!(self.job.case.fault, FaultWord::None | FaultWord::Forged) {
            return errors.into_iter().next().map_or(Ok(()), Err);
        }
        let planned: Vec<(&Planned, &[SourceRank])> =
            drawn.iter().map(|each| (&each.planned, each.sources.as_slice())).collect();
        let mut report = check_errors(&planned, &self.sides[side].spec, self.rank, &errors);
        self.refusing.extend(drawn.iter().flat_map(|each| each.planned.refusing()).filter(|rank| !missing[*rank]));
        report.merge(check_refused(&self.refusing, self.rank, &self.caller.ep.refused_sources()));
        let verdict = &mut result.verdict;
        verdict.overflows += errors.iter().filter(|e| matches!(e, Error::Capacity { .. })).count() as u64;
        verdict.refusals += errors.iter().filter(|e| matches!(e, Error::Routing { .. })).count() as u64;
        let numbers: Vec<String> = drawn.iter().map(|each| each.i.to_string()).collect();
        verdict.add(report, &format!("iteration {}", numbers.join(", ")));
        Ok(())
    }

    /// Payload between ranks, and between nodes: rows sent, and sums that came back.
    fn count_bytes(&self, result: &mut RankResult) {
        let (row, partial) = self.job.case.row_bytes();
        let (rows, wire) = (self.traffic.nvlink_rows(), self.traffic.wire_rows());
        (result.dispatch_bytes, result.combine_bytes) = (rows * row, rows * partial);
        result.wire_bytes = [wire * row, wire * partial];
    }

    /// Compares this rank's outputs with the reference, computed from all ranks' inputs; and indices that stray.
    fn compare(
        &self,
        side: usize,
        each: &Drawn,
        flight: &InFlight,
        first: Option<&FirstCounts>,
    ) -> Result<(Report, Vec<String>)> {
        let Side { case, spec, .. } = &self.sides[side];
        let (Drawn { sources, .. }, faults) = (each, &each.planned.faults_of(self.rank));
        let scales = case.quantize.then(|| case.reference_scales());
        let (rank, rows) = (self.rank, Made { inputs: each.inputs, quantized: scales });
        let spec = each.planned.spec(case, spec, rank);
        flight.buffers.pull(&self.caller.stream)?;
        self.caller.stream.synchronize(self.job.patience())?;
        let seen = flight.buffers.read()?;
        let first_counts = first.map(|first| (first.counts.experts.as_slice(), first.counts.sources.as_slice()));
        let dispatched = ObservedDispatch { first_counts, ..flight.buffers.dispatched(&seen) };
        let mut report = check_dispatch(&spec, sources, &rows, faults, rank, &dispatched);
        report.merge(check_combine(&spec, sources, &rows, faults, rank, &flight.buffers.summed(&seen)));
        if let Some(payload) = flight.buffers.payload(&seen) {
            report.merge(check_payload(&spec, sources, &rows, faults, rank, &payload));
        }
        Ok((report, flight.buffers.strays(&seen)))
    }
}

/// Adds an iteration to the timeline, which begins with the first iteration.
fn keep_spans(
    clock: &mut Option<(f64, Event)>,
    iteration: usize,
    marks: Marks,
    stages: &[Option<CallStatistics>; 2],
    result: &mut RankResult,
) -> Result<()> {
    // From iteration to iteration, since events count in floats, which lose the µs of a long run.
    let base = match clock {
        Some((at, event)) => *at + marks.since(event)?,
        None => 0.0,
    };
    result.spans.extend(marks.spans(iteration, base, stages)?);
    *clock = marks.into_start().map(|start| (base, start));
    Ok(())
}

/// Dispatched rows, for the reference.
struct Made {
    inputs: Inputs,
    /// The kind of scales, if rows were quantised.
    quantized: Option<reference::Scales>,
}

impl Made {
    /// The input row of a token.
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

    fn words(&self, rank: usize, token: usize, out: &mut [u32]) {
        self.inputs.fill_words(rank, token, out);
    }
}

/// SMs of a shared GPU that no rank's calls take.
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
        tuning.handles = case.ahead * if case.mixed { 2 } else { 1 };
        // Calls that are not captured enlarge them.
        if case.compact_handles && case.mode != Mode::Graph {
            tuning.handle_rows = Some(0);
        }
        tuning.arena = place;
        tuning.statistics = job.stages;
    });
    let sharers = if device.kind() == DeviceKind::Cuda { sharing(job.host_ranks) } else { 1 };
    if case.sms.is_none() && sharers > 1 {
        // Blocks wait for other ranks' blocks, so the blocks of all ranks must fit at once, beside the small kernels
        // that other ranks run before their calls.
        let nic = proxy.map_or(0, |proxy| proxy.device_needs().blocks);
        let room = device.multiprocessors().saturating_sub(SPARE_MULTIPROCESSORS) / sharers as u32;
        builder = builder.sms(room.saturating_sub(nic).max(2));
    }
    let ep = builder.build()?;
    for rank in case.masked_by(world.rank().index()).iter().zip(0..).filter(|(missing, _)| **missing) {
        ep.mask_rank(Rank(rank.1))?;
    }
    Ok(ep)
}
