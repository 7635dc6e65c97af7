//! One rank's proxy: the real state machine over a simulated endpoint, in passes like those of `proxy::driver`, each of
//! which costs virtual time.
//!
//! On the simulation's thread. It never looks at payload: the network moves none.

use tokenyard::internals::base::{Rank, Result};
use tokenyard::internals::proxy::machine::{Answer, Flag, Input, Machine, Outputs, Report, WatchId};
use tokenyard::internals::proxy::wire::ContextIdx;
use tokenyard::internals::transport::network::sim::SimEndpoint;
use tokenyard::internals::transport::network::{Event, Posted, Transport, WriteImm};

use super::costs::Costs;

/// The only context.
pub const CONTEXT: ContextIdx = ContextIdx(0);

/// A proxy, and the words that its device writes for it.
#[derive(Debug)]
pub struct Proxy {
    pub machine: Machine,
    pub endpoint: SimEndpoint,
    pub doorbells: Vec<u64>,
    pub chunks: Vec<u64>,
    /// The watches in the order in which a pass checks them: group by group, as the driver does.
    order: Vec<u16>,
    /// How many watches this pass has checked.
    looked: usize,
    /// This pass has found a doorbell, so doorbells that it has already checked may have been rung since.
    worked: bool,
}

/// The outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    pub cost_ns: u64,
    /// A whole pass found nothing to do.
    pub idle: bool,
}

/// A flag, and the time from the begin of the step to its write.
pub type Raised = (u64, Flag);

/// The machine's outputs.
struct Hands<'a> {
    endpoint: Option<&'a mut SimEndpoint>,
    flags: &'a mut Vec<Raised>,
    after_ns: u64,
    problem: &'a mut Option<String>,
}

impl Hands<'_> {
    fn answer(&mut self, posted: Result<Posted>) -> Answer {
        match posted {
            Ok(Posted::Accepted) => Answer::Accepted,
            Ok(Posted::Full) => Answer::Full,
            Err(error) => {
                *self.problem = Some(error.to_string());
                Answer::Refused
            }
        }
    }
}

impl Outputs for Hands<'_> {
    fn post(&mut self, write: &WriteImm) -> Answer {
        let Some(endpoint) = &mut self.endpoint else { return Answer::Full };
        let posted = endpoint.post(write);
        self.answer(posted)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Answer {
        let Some(endpoint) = &mut self.endpoint else { return Answer::Full };
        let posted = endpoint.send(peer, message);
        self.answer(posted)
    }

    fn flag(&mut self, flag: Flag) {
        self.flags.push((self.after_ns, flag));
    }

    fn report(&mut self, report: Report) {
        *self.problem = Some(format!("{report:?}"));
    }
}

impl Proxy {
    /// A proxy around an open machine, with so many words.
    pub fn new(machine: Machine, endpoint: SimEndpoint, doorbells: usize, chunks: usize) -> Proxy {
        let groups = machine.groups(CONTEXT).iter();
        let order = groups.flat_map(|group| group.range()).map(|index| index as u16).collect();
        let (doorbells, chunks) = (vec![0; doorbells], vec![0; chunks]);
        Proxy { machine, endpoint, doorbells, chunks, order, looked: 0, worked: false }
    }

    /// The next step of a pass: one doorbell, or after all doorbells a poll and the clock. `Err` is a sentence.
    pub fn step(&mut self, now_ns: u64, costs: &Costs, flags: &mut Vec<Raised>) -> std::result::Result<Step, String> {
        let mut problem = None;
        let step = match self.next_rung() {
            Some(index) => self.doorbell(index, costs, flags, &mut problem),
            None => self.poll(now_ns, costs, flags, &mut problem)?,
        };
        problem.map_or(Ok(step), |sentence| Err(format!("rank {}: {sentence}", self.endpoint.rank())))
    }

    /// The next watch of this pass whose doorbell is rung.
    fn next_rung(&mut self) -> Option<usize> {
        let watches = self.machine.watches(CONTEXT);
        while let Some(&index) = self.order.get(self.looked) {
            let index = usize::from(index);
            self.looked += 1;
            if watches[index].is_rung(self.doorbells[watches[index].word as usize]) {
                return Some(index);
            }
        }
        None
    }

    fn doorbell(&mut self, index: usize, costs: &Costs, flags: &mut Vec<Raised>, problem: &mut Option<String>) -> Step {
        let Proxy { machine, endpoint, doorbells, chunks, .. } = self;
        let watch = machine.watches(CONTEXT)[index];
        let bytes = doorbells[watch.word as usize] as u32;
        let chunks = watch.chunks_word.map_or(0, |word| chunks[word as usize] as u32);
        let before = machine.stats().posts;
        let mut hands = Hands { endpoint: Some(endpoint), flags, after_ns: costs.post_ns, problem };
        let watch = WatchId { context: CONTEXT, index: index as u16 };
        machine.step(Input::Doorbell { watch, bytes, chunks }, &mut hands);
        let cost_ns = (machine.stats().posts - before).max(1) * costs.post_ns;
        self.worked = true;
        Step { cost_ns, idle: false }
    }

    fn poll(
        &mut self,
        now_ns: u64,
        costs: &Costs,
        flags: &mut Vec<Raised>,
        problem: &mut Option<String>,
    ) -> std::result::Result<Step, String> {
        let Proxy { machine, endpoint, .. } = self;
        self.looked = 0;
        let worked = std::mem::take(&mut self.worked);
        let before = machine.stats().posts;
        let mut after_ns = 0;
        let polled = endpoint.poll(&mut |event| {
            after_ns += costs.event_ns;
            let mut hands = Hands { endpoint: None, flags, after_ns, problem };
            machine.step(input(event), &mut hands);
        });
        polled.map_err(|error| error.to_string())?;
        machine.step(Input::Time { now_ns }, &mut Hands { endpoint: Some(endpoint), flags, after_ns, problem });
        let posts = machine.stats().posts - before;
        let looks_ns = machine.watches(CONTEXT).len() as u64 * costs.watch_ps / 1000;
        let cost_ns = costs.idle_poll_ns + looks_ns + after_ns + posts * costs.post_ns;
        Ok(Step { cost_ns, idle: !worked && after_ns == 0 && posts == 0 })
    }
}

fn input(event: Event<'_>) -> Input<'_> {
    match event {
        Event::Sent { token } => Input::Sent { token },
        Event::Failed { token, failure, .. } => Input::Failed { token, failure },
        Event::Dropped { token, .. } => Input::Dropped { token },
        Event::Imm { imm } => Input::Immediate { imm },
        Event::Message { peer, bytes } => Input::Message { peer, bytes },
    }
}
