//! One rank of a run: builds its context and buffers, and then, iteration by iteration, draws inputs, enqueues dispatch,
//! experts and combine, takes times, and has the reference compare what was left behind.
//!
//! On the rank's own thread, fiber or process. It waits for its stream once an iteration; nothing that is timed has the
//! host in it but the enqueueing, which a barrier on the device holds back until every rank is there.

use std::time::Duration;

use tokenyard::{
    AllToAll, CombineSent, Device, DeviceKind, Dtype, Event, Graph, Handle, Placement, Result, Scales, Sent, Stream,
    Weights, World, kernels::bench,
};

use super::args::Check;
use super::buffers::{Buffers, POISON};
use super::case::Case;
use super::hold::Hold;
use super::inputs::{Inputs, ScaleKind};
use super::link;
use super::reference::{Faults, Report, RowSource, SourceRank, Spec, check_combine, check_dispatch};
use super::routing::{Routed, Router, ragged_count};
use super::sample::{RankResult, Span, Times, Verdict};
use super::words::{Mode, PlacementWord, WeightsWord, WorldMode};

/// What every rank of a run is told.
#[derive(Debug, Clone)]
pub struct Job {
    pub case: Case,
    /// Iterations before the timed ones.
    pub warmup: usize,
    pub check: Check,
    /// Progress deadline of every wait.
    pub timeout: Duration,
    /// Whether the links' rate is measured, and a timeline kept.
    pub measured: bool,
}

impl Job {
    /// How long all work of an iteration may take: waits have their own deadlines, kernels of a CPU device take long.
    fn patience(&self) -> Duration {
        self.timeout * 4 + Duration::from_secs(120)
    }

    pub fn iterations(&self) -> usize {
        self.warmup + self.case.iters
    }
}

/// Runs one rank from beginning to end. Collective.
///
/// # Errors
/// Whatever the library returns; wrong results are not errors but part of the verdict.
pub fn run(job: &Job, world: &World, device: &Device, progress: &dyn Fn(usize)) -> Result<RankResult> {
    let world = world.clone().with_timeout(job.timeout);
    let mut rank = RankRun::new(job, &world, device)?;
    let mut result = RankResult {
        rank: world.rank().index(),
        device_name: device.name(),
        sms: rank.ep.sms(),
        arena_bytes: rank.ep.plan().arena_bytes(),
        verdict: Verdict::new(),
        ..RankResult::default()
    };
    if job.measured {
        let rate = link::rate(&world, device, &rank.ep, &rank.stream, job.patience())?;
        result.link_rate = rate / turns(job, device, world.size());
    }
    for i in 0..job.iterations() {
        rank.iteration(i, &mut result)?;
        progress(i + 1);
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

/// The captured calls of graph mode.
struct Graphs {
    dispatch: Graph,
    combine: Graph,
    /// The captured combine reads it at every replay.
    _handle: Handle,
}

/// Time stamps of one iteration: dispatch, its middle where it is split, and end; the experts' end; combine likewise.
struct Marks {
    dispatch: [Event; 2],
    dispatch_middle: Option<Event>,
    experts: Event,
    combine: [Event; 2],
    combine_middle: Option<Event>,
}

struct RankRun<'a> {
    job: &'a Job,
    case: &'a Case,
    rank: usize,
    stream: Stream,
    ep: AllToAll,
    // Behind the context: its kernels use them.
    buffers: Buffers,
    router: Router,
    spec: Spec,
    hold: Hold,
    graphs: Option<Graphs>,
    /// Time of the timeline, and the event that it was taken from.
    clock: Option<(f64, Event)>,
}

impl Drop for RankRun<'_> {
    /// After an error kernels may still be under way; buffers and context stay until they are through.
    fn drop(&mut self) {
        let _ = self.stream.synchronize(self.job.patience());
    }
}

impl<'a> RankRun<'a> {
    fn new(job: &'a Job, world: &World, device: &Device) -> Result<RankRun<'a>> {
        let case = &job.case;
        let rank = world.rank().index();
        let ep = build(job, world, device)?;
        Ok(RankRun {
            job,
            case,
            rank,
            stream: device.new_stream()?,
            ep,
            buffers: Buffers::new(case, rank, device)?,
            router: case.router()?,
            spec: case.spec(POISON),
            hold: Hold::new(device)?,
            graphs: None,
            clock: None,
        })
    }

    fn iteration(&mut self, i: usize, result: &mut RankResult) -> Result<()> {
        let inputs = self.case.inputs(i as u64);
        let checked = self.job.check.covers(i);
        let tokens = self.tokens_of(i, self.rank);
        let routed = self.router.draw(i as u64, self.rank, tokens);
        if checked {
            self.buffers.poison(&self.stream, &inputs)?;
            self.stream.synchronize(self.job.patience())?;
            self.buffers.write_old()?;
        }
        if checked || i == 0 {
            // Nothing that is timed depends on the values of rows.
            self.buffers.upload_rows(&inputs, if checked { tokens } else { self.case.max_tokens })?;
        }
        self.buffers.upload_routing(&routed, tokens)?;
        let marks = self.enqueue(tokens)?;
        self.stream.synchronize(self.job.patience())?;
        self.ep.check()?;
        if i >= self.job.warmup {
            result.add_times(&times(&marks)?);
            self.count_bytes(&routed, tokens, result);
            self.keep_spans(i - self.job.warmup, marks, result)?;
        }
        if checked {
            let report = self.compare(i, &inputs)?;
            result.verdict.iterations += 1;
            result.verdict.add(report, &format!("iteration {i}"));
        }
        Ok(())
    }

    fn tokens_of(&self, i: usize, rank: usize) -> usize {
        if self.case.ragged { ragged_count(self.case.seed, i as u64, rank, self.case.tokens) } else { self.case.tokens }
    }

    /// Enqueues one iteration: all ranks leave the barrier together, before dispatch and before combine.
    fn enqueue(&mut self, tokens: usize) -> Result<Marks> {
        if self.case.mode == Mode::Graph && self.graphs.is_none() {
            self.graphs = Some(self.capture(tokens)?);
        }
        match self.case.mode {
            Mode::Graph => self.enqueue_graphs(),
            Mode::Fused => self.enqueue_fused(tokens),
            Mode::Split => self.enqueue_split(tokens),
        }
    }

    fn enqueue_fused(&self, tokens: usize) -> Result<Marks> {
        let (stream, buffers) = (&self.stream, &self.buffers);
        self.hold.enqueue(&self.ep, stream)?;
        let start = stream.record()?;
        let handle = self.ep.dispatch(stream, &buffers.tokens(tokens), &buffers.output())?;
        let end = stream.record()?;
        let experts = self.experts()?;
        self.ep.barrier(stream)?;
        let combine_start = stream.record()?;
        self.ep.combine(stream, &handle, &buffers.expert_rows(), &buffers.combined())?;
        let combine = [combine_start, stream.record()?];
        Ok(Marks { dispatch: [start, end], dispatch_middle: None, experts, combine, combine_middle: None })
    }

    fn enqueue_split(&self, tokens: usize) -> Result<Marks> {
        let (stream, buffers) = (&self.stream, &self.buffers);
        self.hold.enqueue(&self.ep, stream)?;
        let start = stream.record()?;
        let sent: Sent = self.ep.dispatch_send(stream, &buffers.tokens(tokens))?;
        let middle = stream.record()?;
        let handle = self.ep.dispatch_recv(stream, &sent, &buffers.output())?;
        let end = stream.record()?;
        let experts = self.experts()?;
        self.ep.barrier(stream)?;
        let combine_start = stream.record()?;
        let sent: CombineSent<'_> = self.ep.combine_send(stream, &handle, &buffers.expert_rows())?;
        let combine_middle = Some(stream.record()?);
        self.ep.combine_recv(stream, &sent, &buffers.combined())?;
        let combine = [combine_start, stream.record()?];
        Ok(Marks { dispatch: [start, end], dispatch_middle: Some(middle), experts, combine, combine_middle })
    }

    fn enqueue_graphs(&self) -> Result<Marks> {
        let stream = &self.stream;
        let launch = |which: fn(&Graphs) -> &Graph| self.graphs.as_ref().map_or(Ok(()), |g| which(g).launch(stream));
        self.hold.enqueue(&self.ep, stream)?;
        let start = stream.record()?;
        launch(|g| &g.dispatch)?;
        let end = stream.record()?;
        let experts = self.experts()?;
        self.ep.barrier(stream)?;
        let combine_start = stream.record()?;
        launch(|g| &g.combine)?;
        let combine = [combine_start, stream.record()?];
        Ok(Marks { dispatch: [start, end], dispatch_middle: None, experts, combine, combine_middle: None })
    }

    /// Records one dispatch and one combine.
    fn capture(&self, tokens: usize) -> Result<Graphs> {
        let (stream, buffers) = (&self.stream, &self.buffers);
        let (dispatch, handle) =
            record(stream, || self.ep.dispatch(stream, &buffers.tokens(tokens), &buffers.output()))?;
        let (combine, ()) =
            record(stream, || self.ep.combine(stream, &handle, &buffers.expert_rows(), &buffers.combined()))?;
        Ok(Graphs { dispatch, combine, _handle: handle })
    }

    /// Runs the benchmark's experts over what was dispatched.
    fn experts(&self) -> Result<Event> {
        bench::expert(&self.stream, &self.buffers.experts())?;
        self.stream.record()
    }

    /// Payload of an iteration between ranks: rows that leave, and partial rows that come home.
    fn count_bytes(&self, routed: &Routed, tokens: usize, result: &mut RankResult) {
        let mut rows = 0;
        for ids in routed.topk_idx.chunks(self.case.top_k).take(tokens) {
            let experts = ids.iter().filter_map(|&id| usize::try_from(id).ok());
            let mut ranks: Vec<u32> = experts.filter_map(|e| self.spec.expert_rank.get(e).copied()).collect();
            ranks.sort_unstable();
            ranks.dedup();
            rows += ranks.iter().filter(|&&rank| rank as usize != self.rank).count() as u64;
        }
        let (row, partial) = self.case.wire_bytes();
        result.dispatch_bytes += rows * row;
        result.combine_bytes += rows * partial;
    }

    /// Adds the iteration to the timeline, which begins with the first.
    fn keep_spans(&mut self, iteration: usize, marks: Marks, result: &mut RankResult) -> Result<()> {
        if !self.job.measured {
            return Ok(());
        }
        // From iteration to iteration, since events count in floats that lose the µs of a long run.
        let base = match &self.clock {
            Some((at, event)) => at + marks.dispatch[0].elapsed_us(event)?,
            None => 0.0,
        };
        let start = &marks.dispatch[0];
        let mut add = |name: &str, from: &Event, to: &Event| -> Result<()> {
            let (start_us, length_us) = (base + from.elapsed_us(start)?, to.elapsed_us(from)?);
            result.spans.push(Span { name: name.to_string(), iteration, start_us, length_us });
            Ok(())
        };
        let [_, end] = &marks.dispatch;
        match &marks.dispatch_middle {
            Some(middle) => {
                add("dispatch send", start, middle)?;
                add("dispatch receive", middle, end)?;
            }
            None => add("dispatch", start, end)?,
        }
        add("experts", end, &marks.experts)?;
        let [from, to] = &marks.combine;
        match &marks.combine_middle {
            Some(middle) => {
                add("combine send", from, middle)?;
                add("combine receive", middle, to)?;
            }
            None => add("combine", from, to)?,
        }
        let [start, _] = marks.dispatch;
        self.clock = Some((base, start));
        Ok(())
    }

    /// Has the reference compare this rank's outputs with what all ranks' inputs demand.
    fn compare(&self, i: usize, inputs: &Inputs) -> Result<Report> {
        let sources: Vec<SourceRank> = (0..self.case.world)
            .map(|rank| {
                let tokens = self.tokens_of(i, rank);
                let Routed { topk_idx, topk_weight } = self.router.draw(i as u64, rank, tokens);
                SourceRank { tokens, topk_idx, topk_weight }
            })
            .collect();
        let (rows, faults) = (Made(*inputs), Faults::default());
        let seen = self.buffers.read()?;
        let mut report =
            check_dispatch(&self.spec, &sources, &rows, &faults, self.rank, &self.buffers.dispatched(&seen));
        report.merge(check_combine(&self.spec, &sources, &rows, &faults, self.rank, &self.buffers.summed(&seen)));
        Ok(report)
    }
}

/// Inputs, as the reference asks for them.
struct Made(Inputs);

impl RowSource for Made {
    fn row(&self, rank: usize, token: usize, out: &mut [u8]) {
        self.0.fill_row(rank, token, out);
    }

    fn scales(&self, rank: usize, token: usize, out: &mut [u32]) {
        self.0.fill_scales(rank, token, out);
    }
}

/// Captures what `calls` enqueues. The capture ends also where they fail.
fn record<T>(stream: &Stream, calls: impl FnOnce() -> Result<T>) -> Result<(Graph, T)> {
    stream.begin_capture()?;
    let outcome = calls();
    let graph = stream.end_capture();
    let value = outcome?;
    Ok((graph?, value))
}

fn times(marks: &Marks) -> Result<Times> {
    let [start, end] = &marks.dispatch;
    let [combine_start, combine_end] = &marks.combine;
    let parts_us = match (&marks.dispatch_middle, &marks.combine_middle) {
        (Some(dispatch), Some(combine)) => Some([
            dispatch.elapsed_us(start)?,
            end.elapsed_us(dispatch)?,
            combine.elapsed_us(combine_start)?,
            combine_end.elapsed_us(combine)?,
        ]),
        _ => None,
    };
    Ok(Times { dispatch_us: end.elapsed_us(start)?, combine_us: combine_end.elapsed_us(combine_start)?, parts_us })
}

/// Builds the context of a rank. Collective.
fn build(job: &Job, world: &World, device: &Device) -> Result<AllToAll> {
    builder(&job.case, world)?.device(device.clone()).timeout(job.timeout).build()
}

/// The library's view of a case.
///
/// # Errors
/// If the placement is impossible.
pub fn builder(case: &Case, world: &World) -> Result<tokenyard::AllToAllBuilder> {
    let mut builder = AllToAll::builder(world)
        .hidden(case.hidden)
        .experts(case.experts)
        .top_k(case.top_k)
        .max_tokens(case.max_tokens)
        .dtype(case.dtype)
        .scales(match case.scales {
            ScaleKind::None => Scales::None,
            ScaleKind::F32 => Scales::F32,
            ScaleKind::Ue8m0 => Scales::Ue8m0,
        })
        .combine_dtype(case.combine_dtype)
        .partial_f32(case.partial_f32 && case.combine_dtype != Dtype::Fp32)
        .placement(match case.placement {
            PlacementWord::Even => Placement::even(case.experts, case.world)?,
            PlacementWord::Table => Placement::table(case.expert_rank(), case.world)?,
        })
        .weights(match case.weights {
            WeightsWord::Dispatch => Weights::Dispatch,
            WeightsWord::Combine => Weights::Combine,
            WeightsWord::None => Weights::None,
        });
    if let Some(sms) = case.sms {
        builder = builder.sms(sms as u32);
    }
    if let Some(epoch) = case.first_epoch {
        builder = builder.first_epoch(epoch);
    }
    Ok(builder)
}
