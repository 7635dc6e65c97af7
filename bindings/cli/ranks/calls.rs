//! The library's calls of one or several dispatches and their combines, enqueued in a given order and timed.
//!
//! On the rank's thread; it enqueues and returns, and never waits for the device or for another rank. Errors that leave
//! the context usable are kept for the comparison of results; the call that returned one is made again.

use std::cell::{Cell, OnceCell, RefCell};
use std::time::{Duration, Instant};

use tokenyard::{
    AllToAll, CallStatistics, CombineSent, Counts, Device, Error, Event, Graph, Handle, InPlaceOutput, Refused, Result,
    Sent, Stream, kernels::bench,
};

use super::buffers::Buffers;
use super::faults::is_passing;
use super::hold::Hold;
use super::job::Job;
use super::meeting::Attendee;
use super::sample::{Span, Times};
use super::steps::Step;
use super::wake::Wake;
use crate::cli::cases::case::Case;
use crate::cli::cases::words::Mode;

/// Most errors that are kept; only a broken library returns more.
const ERRORS: usize = 64;

/// The buffers of one dispatch and its combine, and in graph mode their captured calls.
pub struct InFlight {
    pub buffers: Buffers,
    graphs: Option<Graphs>,
}

impl InFlight {
    pub fn new(case: &Case, rank: usize, device: &Device, own: Option<InPlaceOutput>) -> Result<InFlight> {
        Ok(InFlight { buffers: Buffers::new(case, rank, device, own)?, graphs: None })
    }
}

/// The captured calls of graph mode.
struct Graphs {
    dispatch: Graph,
    again: Option<Graph>,
    combine: Graph,
    /// The later calls read it at every replay.
    _handle: Handle,
}

/// Arguments of one dispatch besides its buffers.
#[derive(Debug, Clone, Copy)]
pub struct Given {
    pub tokens: usize,
    /// Rows that the output claims to have room for.
    pub capacity: usize,
    /// If counts come first: whether the output has room for as many rows as they tell instead.
    pub fits: bool,
}

/// What the host learnt before rows were placed.
pub struct FirstCounts {
    pub counts: Counts,
    /// From before the sending call until the host had them, in µs.
    pub us: f64,
}

/// Where a time stamp is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Point {
    Dispatch,
    DispatchSent,
    Dispatched,
    Again,
    AgainDone,
    Experts,
    Combine,
    CombineSent,
    Combined,
}

/// Time stamps of one dispatch and its combine, and what the host learnt between.
#[derive(Default)]
pub struct Marks {
    events: [Option<Event>; 9],
    pub first_counts: Option<FirstCounts>,
}

impl Marks {
    fn take(&mut self, stream: &Stream, point: Point) -> Result<()> {
        self.events[point as usize] = Some(stream.record()?);
        Ok(())
    }

    /// Time from one point to another; `None` if one of them was not taken.
    fn between(&self, from: Point, to: Point) -> Result<Option<f64>> {
        match (&self.events[from as usize], &self.events[to as usize]) {
            (Some(from), Some(to)) => to.elapsed_us(from).map(Some),
            _ => Ok(None),
        }
    }

    /// Times of the calls; `None` if they were not timed.
    pub fn times(&self) -> Result<Option<Times>> {
        let dispatch = self.between(Point::Dispatch, Point::Dispatched)?;
        let combine = self.between(Point::Combine, Point::Combined)?;
        let parts = [
            self.between(Point::Dispatch, Point::DispatchSent)?,
            self.between(Point::DispatchSent, Point::Dispatched)?,
            self.between(Point::Combine, Point::CombineSent)?,
            self.between(Point::CombineSent, Point::Combined)?,
        ];
        let parts_us = match parts {
            [Some(a), Some(b), Some(c), Some(d)] => Some([a, b, c, d]),
            _ => None,
        };
        let times = dispatch.zip(combine);
        let again_us = self.between(Point::Again, Point::AgainDone)?;
        let counts_us = self.first_counts.as_ref().map(|first| first.us);
        Ok(times.map(|(dispatch_us, combine_us)| Times { dispatch_us, combine_us, parts_us, counts_us, again_us }))
    }

    /// The parts of an iteration on the timeline, which began at `base`, and the stages of its calls: each stage from
    /// the end of the stage before to the time when its last block completed it.
    pub fn spans(&self, iteration: usize, base: f64, stages: &[Option<CallStatistics>; 2]) -> Result<Vec<Span>> {
        let split = self.events[Point::DispatchSent as usize].is_some();
        let before = if self.events[Point::Again as usize].is_some() { Point::AgainDone } else { Point::Dispatched };
        let parts: &[(&str, Point, Point)] = if split {
            &[
                ("dispatch send", Point::Dispatch, Point::DispatchSent),
                ("dispatch receive", Point::DispatchSent, Point::Dispatched),
                ("dispatch again", Point::Again, Point::AgainDone),
                ("experts", before, Point::Experts),
                ("combine send", Point::Combine, Point::CombineSent),
                ("combine receive", Point::CombineSent, Point::Combined),
            ]
        } else {
            &[
                ("dispatch", Point::Dispatch, Point::Dispatched),
                ("dispatch again", Point::Again, Point::AgainDone),
                ("experts", before, Point::Experts),
                ("combine", Point::Combine, Point::Combined),
            ]
        };
        let mut spans = Vec::new();
        for &(name, from, to) in parts {
            let times = self.between(Point::Dispatch, from)?.zip(self.between(from, to)?);
            spans.extend(times.map(|(start, length_us)| Span {
                name: name.to_string(),
                iteration,
                start_us: base + start,
                length_us,
            }));
        }
        let calls = [("dispatch", Point::Dispatch), ("combine", Point::Combine)];
        for ((call, start), last) in calls.into_iter().zip(stages) {
            let Some((start, last)) = self.between(Point::Dispatch, start)?.zip(last.as_ref()) else { continue };
            let mut ends: Vec<(u64, &str)> = last.stages.iter().map(|stage| (stage.last_ns, stage.name)).collect();
            ends.sort_unstable();
            let mut from = 0.0;
            for (end, name) in ends {
                let end = end as f64 / 1000.0;
                let name = format!("{call}: {name}");
                spans.push(Span { name, iteration, start_us: base + start + from, length_us: end - from });
                from = end;
            }
        }
        Ok(spans)
    }

    /// Time from another event to the start of dispatch.
    pub fn since(&self, event: &Event) -> Result<f64> {
        self.events[Point::Dispatch as usize].as_ref().map_or(Ok(0.0), |start| start.elapsed_us(event))
    }

    /// The start of dispatch.
    pub fn into_start(self) -> Option<Event> {
        let [start, ..] = self.events;
        start
    }
}

/// A context, its stream, and the mode of calls.
pub struct Caller {
    pub ep: AllToAll,
    pub stream: Stream,
    mode: Mode,
    lockstep: bool,
    /// Whether a dispatch by each handle follows.
    again: bool,
    /// Whether time stamps are taken.
    timed: bool,
    patience: Duration,
    hold: Hold,
    /// A second meeting, if ranks leave the barrier at different times.
    attendee: Option<Attendee>,
    /// Errors so far that left the context usable.
    errors: RefCell<Vec<Error>>,
}

/// Results of calls that later calls need, by dispatch.
struct UnderWay {
    sent: Vec<Cell<Option<Sent>>>,
    handles: Vec<OnceCell<Handle>>,
    /// Rows that outputs claim to have room for.
    capacities: Vec<Cell<usize>>,
}

impl Caller {
    pub fn new(job: &Job, ep: AllToAll, device: &Device, hold: Hold, attendee: Option<Attendee>) -> Result<Caller> {
        Ok(Caller {
            stream: device.new_stream()?,
            hold,
            attendee,
            mode: job.case.mode,
            lockstep: job.case.lockstep,
            again: job.case.again,
            errors: RefCell::default(),
            timed: job.measured,
            patience: job.patience(),
            ep,
        })
    }

    /// Makes a call, again after each error of an earlier call.
    fn call<T>(&self, call: impl Fn() -> Result<T>) -> Result<T> {
        loop {
            match call() {
                Err(error) if is_passing(&error) && self.errors.borrow().len() < ERRORS => {
                    self.errors.borrow_mut().push(error);
                }
                outcome => return outcome,
            }
        }
    }

    /// As [`call`](Self::call), for a receiving half, which returns its argument if it is refused.
    fn receive<S, T>(&self, given: S, call: impl Fn(S) -> std::result::Result<T, Refused<S>>) -> Result<T> {
        let given = Cell::new(Some(given));
        self.call(|| {
            let Some(sent) = given.take() else {
                let what = "a receive that gave nothing back".to_owned();
                return Err(Error::device(what, "this is a defect of the program; please report it"));
            };
            call(sent).map_err(|refused| {
                given.set(Some(*refused.given));
                refused.error
            })
        })
    }

    /// The errors since the last `take_errors`; the stream must be idle.
    pub fn take_errors(&self) -> Result<Vec<Error>> {
        self.call(|| self.ep.check())?;
        self.hold.check()?;
        self.attendee.as_ref().map_or(Ok(()), Attendee::check)?;
        Ok(self.errors.take())
    }

    /// Runs `enqueue` on a held stream after a barrier, so that all ranks run the enqueued work at the same time.
    pub fn together<T>(&self, enqueue: impl FnOnce() -> Result<T>) -> Result<T> {
        let held = self.hold.hold(&self.stream)?;
        let outcome = self.align().and_then(|()| enqueue());
        drop(held);
        outcome
    }

    /// Captures the calls of each dispatch, in graph mode. Instantiating a graph may wait for kernels of the same GPU,
    /// so no rank may have launched a kernel that waits for others: all ranks capture, then they meet.
    pub fn prepare(&self, in_flight: &mut [InFlight], given: &[Given]) -> Result<()> {
        if self.mode == Mode::Graph {
            for (flight, given) in in_flight.iter_mut().zip(given) {
                flight.graphs = Some(self.capture(&flight.buffers, *given)?);
            }
        }
        Ok(())
    }

    /// Enqueues the steps, after `wake` if given; `given` has an entry for each dispatch that the steps name.
    pub fn enqueue(
        &self,
        in_flight: &[InFlight],
        given: &[Given],
        steps: &[Step],
        wake: Option<&Wake>,
    ) -> Result<Vec<Marks>> {
        // The host waits for counts, so work cannot wait for the host.
        let holds = self.timed && self.mode != Mode::Counts;
        let held = if holds { Some(self.hold.hold(&self.stream)?) } else { None };
        // After the hold, so that the links are not idle again while the host enqueues the rest.
        let woken = wake.map_or(Ok(()), |wake| wake.enqueue(&self.stream));
        let marks = woken.and_then(|()| self.enqueue_all(in_flight, given, steps));
        drop(held);
        marks
    }

    fn enqueue_all(&self, in_flight: &[InFlight], given: &[Given], steps: &[Step]) -> Result<Vec<Marks>> {
        let under_way = UnderWay {
            sent: given.iter().map(|_| Cell::default()).collect(),
            handles: given.iter().map(|_| OnceCell::new()).collect(),
            capacities: given.iter().map(|given| Cell::new(given.capacity)).collect(),
        };
        let mut returning: Vec<Option<CombineSent>> = given.iter().map(|_| None).collect();
        let mut marks: Vec<Marks> = given.iter().map(|_| Marks::default()).collect();
        for &step in steps {
            let (Step::SendDispatch(i)
            | Step::ReceiveDispatch(i)
            | Step::Experts(i)
            | Step::SendCombine(i)
            | Step::ReceiveCombine(i)) = step;
            let (flight, marks) = (&in_flight[i], &mut marks[i]);
            match step {
                Step::SendDispatch(_) => self.send_dispatch(flight, given[i], &under_way, i, marks)?,
                Step::ReceiveDispatch(_) => {
                    self.receive_dispatch(flight, &under_way, i, marks)?;
                    self.dispatch_again(flight, given[i], under_way.handles[i].get(), marks)?;
                }
                Step::Experts(_) => {
                    // SAFETY: the buffers hold the output of a dispatch of their own case.
                    unsafe { bench::expert(&self.stream, &flight.buffers.experts(under_way.capacities[i].get()))? };
                    self.mark(marks, Point::Experts)?;
                }
                Step::SendCombine(_) => returning[i] = self.send_combine(flight, under_way.handles[i].get(), marks)?,
                Step::ReceiveCombine(_) => self.receive_combine(flight, returning[i].take(), marks)?,
            }
        }
        Ok(marks)
    }

    fn mark(&self, marks: &mut Marks, point: Point) -> Result<()> {
        if self.timed { marks.take(&self.stream, point) } else { Ok(()) }
    }

    /// The barrier before a call, in lockstep.
    fn meet(&self) -> Result<()> {
        if self.lockstep { self.align() } else { Ok(()) }
    }

    /// Lets the streams of all ranks continue at the same time.
    fn align(&self) -> Result<()> {
        self.call(|| self.ep.barrier(&self.stream))?;
        self.attendee.as_ref().map_or(Ok(()), |attendee| attendee.meet(&self.stream))
    }

    fn send_dispatch(
        &self,
        flight: &InFlight,
        given: Given,
        way: &UnderWay,
        i: usize,
        marks: &mut Marks,
    ) -> Result<()> {
        self.meet()?;
        let (stream, buffers) = (&self.stream, &flight.buffers);
        if self.timed && self.mode == Mode::Counts {
            // The host's clock runs from here on.
            stream.synchronize(self.patience)?;
        }
        self.mark(marks, Point::Dispatch)?;
        match (&flight.graphs, self.mode) {
            (Some(graphs), _) => graphs.dispatch.launch(stream)?,
            (None, Mode::Counts) => {
                let began = Instant::now();
                let sent = self.call(|| self.ep.dispatch_send_counts(stream, &buffers.tokens(given.tokens)))?;
                let counts = self.call(|| self.ep.counts(&sent, self.patience))?;
                let us = began.elapsed().as_secs_f64() * 1e6;
                if given.fits {
                    let layout = counts.fit(buffers.output(given.capacity).layout);
                    way.capacities[i].set(layout.rows(1).unwrap_or(given.capacity));
                }
                marks.first_counts = Some(FirstCounts { counts, us });
                way.sent[i].set(Some(sent));
                return self.mark(marks, Point::DispatchSent);
            }
            (None, Mode::Split) => {
                let sent = self.call(|| self.ep.dispatch_send(stream, &buffers.tokens(given.tokens)))?;
                way.sent[i].set(Some(sent));
                return self.mark(marks, Point::DispatchSent);
            }
            (None, _) => {
                let output = buffers.output(given.capacity);
                let handle = self.call(|| self.ep.dispatch(stream, &buffers.tokens(given.tokens), &output))?;
                let _ = way.handles[i].set(handle);
            }
        }
        self.mark(marks, Point::Dispatched)
    }

    /// Whether inputs are overwritten between the halves of a call, which callers may do.
    fn spoils(&self) -> bool {
        !self.timed && self.ep.rounds() == 1
    }

    fn receive_dispatch(&self, flight: &InFlight, way: &UnderWay, i: usize, marks: &mut Marks) -> Result<()> {
        let Some(sent) = way.sent[i].take() else { return Ok(()) };
        if self.spoils() {
            flight.buffers.spoil_tokens(&self.stream)?;
        }
        let output = flight.buffers.output(way.capacities[i].get());
        let handle = self.receive(sent, |sent| self.ep.dispatch_recv(&self.stream, sent, &output))?;
        let _ = way.handles[i].set(handle);
        self.mark(marks, Point::Dispatched)
    }

    /// The dispatch by the handle, if the case has one.
    fn dispatch_again(
        &self,
        flight: &InFlight,
        given: Given,
        handle: Option<&Handle>,
        marks: &mut Marks,
    ) -> Result<()> {
        if !self.again {
            return Ok(());
        }
        self.meet()?;
        self.mark(marks, Point::Again)?;
        let (stream, buffers) = (&self.stream, &flight.buffers);
        let rows = buffers.new_rows(given.tokens);
        match (flight.graphs.as_ref().and_then(|graphs| graphs.again.as_ref()), handle) {
            (Some(graph), _) => graph.launch(stream)?,
            (None, Some(handle)) if self.mode.is_split() => {
                let sent = self.call(|| self.ep.dispatch_again_send(stream, handle, &rows))?;
                if self.spoils() {
                    buffers.spoil_rows(stream)?;
                }
                self.receive(sent, |sent| self.ep.dispatch_again_recv(stream, sent, &buffers.placed()))?;
            }
            (None, Some(handle)) => {
                self.call(|| self.ep.dispatch_again(stream, handle, &rows, &buffers.placed()))?;
            }
            (None, None) => {}
        }
        self.mark(marks, Point::AgainDone)
    }

    fn send_combine(
        &self,
        flight: &InFlight,
        handle: Option<&Handle>,
        marks: &mut Marks,
    ) -> Result<Option<CombineSent>> {
        self.meet()?;
        self.mark(marks, Point::Combine)?;
        let (stream, buffers) = (&self.stream, &flight.buffers);
        match (&flight.graphs, handle) {
            (Some(graphs), _) => graphs.combine.launch(stream)?,
            (None, Some(handle)) if self.mode.is_split() => {
                let sent = self.call(|| self.ep.combine_send(stream, handle, &buffers.expert_rows()))?;
                self.mark(marks, Point::CombineSent)?;
                return Ok(Some(sent));
            }
            (None, Some(handle)) => {
                self.call(|| self.ep.combine(stream, handle, &buffers.expert_rows(), &buffers.combined()))?;
            }
            (None, None) => {}
        }
        self.mark(marks, Point::Combined)?;
        Ok(None)
    }

    fn receive_combine(&self, flight: &InFlight, sent: Option<CombineSent>, marks: &mut Marks) -> Result<()> {
        let Some(sent) = sent else { return Ok(()) };
        if self.spoils() {
            flight.buffers.spoil_expert_rows(&self.stream)?;
        }
        self.receive(sent, |sent| self.ep.combine_recv(&self.stream, sent, &flight.buffers.combined()))?;
        self.mark(marks, Point::Combined)
    }

    /// Records one dispatch and one combine.
    fn capture(&self, buffers: &Buffers, given: Given) -> Result<Graphs> {
        let stream = &self.stream;
        let output = buffers.output(given.capacity);
        let (dispatch, handle) =
            record(stream, || self.call(|| self.ep.dispatch(stream, &buffers.tokens(given.tokens), &output)))?;
        let rows = buffers.new_rows(given.tokens);
        let again = || self.call(|| self.ep.dispatch_again(stream, &handle, &rows, &buffers.placed()));
        let again = if self.again { Some(record(stream, again)?.0) } else { None };
        let combine = || self.call(|| self.ep.combine(stream, &handle, &buffers.expert_rows(), &buffers.combined()));
        let (combine, ()) = record(stream, combine)?;
        Ok(Graphs { dispatch, again, combine, _handle: handle })
    }
}

/// Captures the work that `calls` enqueues. The capture ends even if they fail.
fn record<T>(stream: &Stream, calls: impl FnOnce() -> Result<T>) -> Result<(Graph, T)> {
    stream.begin_capture()?;
    let outcome = calls();
    let graph = stream.end_capture();
    let value = outcome?;
    Ok((graph?, value))
}
