//! Virtual time: the network, all proxies, and the events of the devices, in the order of time.
//!
//! ```text
//!   device (dispatch.rs, combine.rs) ── Bell ──▶ doorbell word ──▶ Proxy::step ──▶ machine ──▶ simulated network
//!        ▲                                                                                        │
//!        └──────── Arrived, a crossing later ◀── flag ◀── machine ◀── Proxy::step ◀────────────────┘
//! ```
//!
//! All in one thread; the same seed gives the same result. Proxies spin: each polls without end, and every poll takes
//! time. While no proxy has anything to do, time leaps to the next event.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use tokenyard::Rank;
use tokenyard::internals::proxy::machine::{ContextConfig, Flag, Liveness, Machine, MachineConfig};
use tokenyard::internals::proxy::wire::{
    ChunkIdx, DIRECTIONS, Direction, LinkIdx, MessageShape, Nodes, Wire, WireInput,
};
use tokenyard::internals::transport::network::sim::models::Link;
use tokenyard::internals::transport::network::sim::{Clock, Network, SimConfig, SimEndpoint};
use tokenyard::internals::transport::network::{RegionId, Span, Transport};

use super::costs::Costs;
use super::plan::Plan;
use super::proxy::{CONTEXT, Proxy, Raised};
use super::workload::Shape;

/// Why a simulation failed, as a sentence.
pub type Outcome<T> = Result<T, String>;

/// Most packets of one phase and world, about: larger packets make a large world affordable.
const MOST_PACKETS: u64 = 1 << 19;
const LEAST_PACKET: u64 = 4096;
const LARGEST_PACKET: u64 = 1 << 16;
/// Time between two phases, after which all proxies are idle.
const GAP_NS: u64 = 20_000;
/// Address of spans, which nothing reads or writes.
const NOWHERE: u64 = 1 << 16;
/// Polls of each proxy without anything due, after which an unfinished world is stuck.
const STUCK_POLLS: usize = 4;
/// Longest virtual time, about 52 days: half the range of the network's clock.
const LONGEST_NS: u64 = 1 << 52;
/// Least time from one heartbeat to the next, in phases: heartbeats would otherwise fill a slow link.
const PHASES_PER_HEARTBEAT: f64 = 4.0;

/// An event at a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// The proxy can see a doorbell.
    Bell { rank: u32, link: u16, chunk: u16, chunks: u16, bytes: u32 },
    /// The device can see that a chunk has arrived.
    Arrived { rank: u32, source: u16, chunk: u16 },
    /// Counts of one source have reached a node.
    Meta { node: u32 },
    /// `rows` rows have reached a rank of their node, for `copies` experts there.
    Rows { rank: u32, rows: u32, copies: u32, pushed: bool },
}

/// Future events, by time.
#[derive(Debug, Default)]
pub struct Events {
    heap: BinaryHeap<Reverse<(u64, u64, What)>>,
    /// Breaks ties in the order of scheduling.
    number: u64,
}

impl Events {
    pub fn at(&mut self, at_ns: u64, what: What) {
        self.number += 1;
        self.heap.push(Reverse((at_ns, self.number, what)));
    }

    fn next_ns(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse((at_ns, ..))| *at_ns)
    }
}

/// The devices of all ranks in one phase.
pub trait Phase {
    fn direction(&self) -> Direction;
    /// Begins the phase on all ranks at a time.
    fn begin(&mut self, now_ns: u64, events: &mut Events);
    /// Handles an event other than a bell.
    fn happen(&mut self, what: What, now_ns: u64, events: &mut Events);
    /// Whether all ranks are done.
    fn is_over(&self) -> bool;
}

/// A world in virtual time.
pub struct World {
    costs: Costs,
    network: Network,
    wire: Wire,
    proxies: Vec<Proxy>,
    events: Events,
    /// The next poll of each proxy.
    polls: BinaryHeap<Reverse<(u64, u32)>>,
    idle: Vec<bool>,
    busy: usize,
    /// Writes that all proxies together have posted, and how many have completed.
    posted: u64,
    completed: u64,
    now_ns: u64,
    /// Epochs by direction.
    epochs: [u64; DIRECTIONS],
}

impl World {
    /// Opens a context on every rank, all connected.
    ///
    /// # Errors
    /// A sentence: something does not fit the wire.
    pub fn new(shape: &Shape, plan: &Plan, link: &Link, costs: Costs) -> Outcome<World> {
        let refused = |error: tokenyard::Error| error.to_string();
        let nodes =
            (0..shape.nodes).map(|node| (0..shape.per_node).map(|l| Rank(shape.rank(node, l) as u32)).collect());
        let mut shapes = [MessageShape { first_bytes: 0, chunk_bytes: 0, chunks: 0, rows_offset: 0 }; DIRECTIONS];
        shapes[Direction::Dispatch.index()] = plan.shape(Direction::Dispatch);
        shapes[Direction::Combine.index()] = plan.shape(Direction::Combine);
        let nodes = Nodes::new(nodes.collect()).map_err(refused)?;
        let input = WireInput { nodes, nics: link.nics, shapes, staging_offset: 0, recv_buffer_offset: 0 };
        let sized = Wire::new(input.clone()).map_err(refused)?;
        let wire = Wire::new(WireInput { recv_buffer_offset: sized.staging_bytes(), ..input }).map_err(refused)?;
        let network = Network::new(shape.ranks(), config(shape, link)).map_err(refused)?;
        let proxies = open(shape, &wire, &network, liveness(plan, link)).map_err(refused)?;
        let ranks = proxies.len();
        Ok(World {
            costs,
            network,
            wire,
            proxies,
            events: Events::default(),
            polls: (0..ranks as u32).map(|rank| Reverse((u64::from(rank) % costs.idle_poll_ns.max(1), rank))).collect(),
            idle: vec![true; ranks],
            busy: 0,
            posted: 0,
            completed: 0,
            now_ns: 0,
            epochs: [0; DIRECTIONS],
        })
    }

    /// Writes that all proxies together have posted so far.
    pub fn posts(&self) -> u64 {
        self.posted
    }

    /// Runs a phase until nothing is in flight except heartbeats, which are always in flight on a slow link.
    ///
    /// # Errors
    /// A sentence: a proxy reported a problem, the world is stuck, or virtual time has run out.
    pub fn run(&mut self, phase: &mut impl Phase) -> Outcome<()> {
        self.epochs[phase.direction().index()] += 1;
        phase.begin(self.now_ns + GAP_NS, &mut self.events);
        let mut nothing_due = 0;
        loop {
            let event_ns = self.events.next_ns();
            if event_ns.is_none() && self.busy == 0 && self.posted == self.completed {
                nothing_due += 1;
                if phase.is_over() {
                    return Ok(());
                }
                if nothing_due > STUCK_POLLS * self.proxies.len() {
                    return Err(format!("{:?} is stuck at {} ns", phase.direction(), self.now_ns));
                }
            } else {
                nothing_due = 0;
            }
            if self.now_ns > LONGEST_NS {
                let days = LONGEST_NS / 86_400_000_000_000;
                return Err(format!("the projected world ran for {days} days; give fewer --iters, or a faster --link"));
            }
            let Some(Reverse((poll_ns, rank))) = self.polls.peek().copied() else { return Ok(()) };
            match event_ns {
                Some(event_ns) if event_ns <= poll_ns => self.event(phase),
                _ => {
                    self.polls.pop();
                    self.poll(rank, poll_ns, phase.direction())?;
                }
            }
        }
    }

    fn event(&mut self, phase: &mut impl Phase) {
        let Some(Reverse((at_ns, _, what))) = self.events.heap.pop() else { return };
        self.now_ns = self.now_ns.max(at_ns);
        match what {
            What::Bell { rank, link, chunk, chunks, bytes } => {
                let direction = phase.direction();
                let epoch = self.epochs[direction.index()];
                let proxy = &mut self.proxies[rank as usize];
                let (link, chunk) = (LinkIdx(link), ChunkIdx(chunk));
                if chunk.0 == 0 {
                    proxy.chunks[self.wire.chunks_word(direction, epoch, link)] = u64::from(chunks);
                }
                let word = self.wire.doorbell_word(direction, epoch, link, chunk);
                proxy.doorbells[word] = epoch << 32 | u64::from(bytes);
            }
            what => phase.happen(what, at_ns, &mut self.events),
        }
    }

    fn poll(&mut self, rank: u32, at_ns: u64, direction: Direction) -> Outcome<()> {
        self.network.advance_ns(at_ns.saturating_sub(self.network.now_ns()));
        self.now_ns = self.now_ns.max(at_ns);
        let mut flags: Vec<Raised> = Vec::new();
        let proxy = &mut self.proxies[rank as usize];
        let (posts, completions) = (proxy.machine.stats().posts, proxy.machine.stats().completions);
        let step = proxy.step(at_ns, &self.costs, &mut flags)?;
        self.posted += proxy.machine.stats().posts - posts;
        self.completed += proxy.machine.stats().completions - completions;
        for (after_ns, flag) in flags {
            let Flag::Arrived { direction: of, source, chunk, epoch, .. } = flag else { continue };
            if of != direction || epoch != self.epochs[direction.index()] {
                return Err(format!("rank {rank} sees a chunk of {of:?} {epoch} during another phase"));
            }
            let what = What::Arrived { rank, source: source.0, chunk: chunk.0 };
            self.events.at(at_ns + after_ns + self.costs.crossing_ns, what);
        }
        let was_idle = std::mem::replace(&mut self.idle[rank as usize], step.idle);
        self.busy = self.busy + usize::from(was_idle && !step.idle) - usize::from(!was_idle && step.idle);
        let next_ns = at_ns + step.cost_ns.max(1);
        self.polls.push(Reverse((if self.busy == 0 { self.leap(next_ns) } else { next_ns }, rank)));
        Ok(())
    }

    /// While all are idle: when a proxy whose next poll would be at `next_ns` has something to do.
    fn leap(&self, next_ns: u64) -> u64 {
        let due_ns = [self.events.next_ns(), self.network.next_due_ns()].into_iter().flatten().min();
        due_ns.map_or(next_ns, |due_ns| next_ns.max(due_ns))
    }
}

fn config(shape: &Shape, link: &Link) -> SimConfig {
    let world_bytes = (shape.ranks() * shape.tokens * shape.preset.top_k) as u64 * shape.sum_bytes();
    let packet = (world_bytes / MOST_PACKETS).next_power_of_two().clamp(LEAST_PACKET, LARGEST_PACKET);
    SimConfig {
        seed: shape.seed,
        clock: Clock::Virtual { tick_ns: 0 },
        nics: link.models(),
        packet_bytes: packet as u32,
        poll_batch: 16,
        payload: false,
        ..SimConfig::calm()
    }
}

/// As on a real machine, except that no rank dies: silence means nothing, and heartbeats take little of the slowest
/// link.
fn liveness(plan: &Plan, link: &Link) -> Liveness {
    let Shape { nodes, tokens, preset, .. } = plan.shape;
    let peers = nodes.saturating_sub(1);
    let messages = peers * plan.chunks(Direction::Dispatch, tokens).max(plan.chunks(Direction::Combine, tokens));
    let bytes = (peers.min(preset.top_k) * tokens) as u64 * plan.shape.sum_bytes();
    let phase_us = link.floor_us(bytes as f64) + link.nic.latency_us + messages as f64 * link.nic.per_message_us;
    let default = Liveness::default();
    let heartbeat_ns = default.heartbeat_ns.max((PHASES_PER_HEARTBEAT * phase_us * 1e3) as u64);
    Liveness { heartbeat_ns, silence_ns: u64::MAX, first_contact_ns: u64::MAX }
}

/// Endpoints, connected to all peers that they post to or receive from, and machines with the context open.
fn open(shape: &Shape, wire: &Wire, network: &Network, liveness: Liveness) -> tokenyard::Result<Vec<Proxy>> {
    let ranks = || (0..shape.ranks()).map(|rank| Rank(rank as u32));
    let bytes = (wire.staging_bytes() + wire.recv_buffer_bytes()).max(1) as usize;
    let mut endpoints: Vec<SimEndpoint> = ranks().map(|rank| network.endpoint(rank)).collect::<Result<_, _>>()?;
    for endpoint in &mut endpoints {
        // SAFETY: this network moves no payload, so nothing ever reads or writes the span.
        unsafe { endpoint.register(Span::host(NOWHERE, bytes))? };
    }
    // All peers are given the same address.
    let addresses = endpoints.iter_mut().map(|end| end.address(Rank(0))).collect::<Result<Vec<_>, _>>()?;
    let arenas = vec![RegionId(0); shape.ranks()];
    let counts = wire.word_counts();
    let mut proxies = Vec::new();
    for (rank, mut endpoint) in ranks().zip(endpoints) {
        let mut peers = wire.targets(Direction::Dispatch, rank);
        peers.extend(wire.targets(Direction::Combine, rank));
        peers.sort_unstable();
        peers.dedup();
        for peer in peers {
            endpoint.connect(peer, &addresses[peer.index()])?;
        }
        let mut machine = Machine::new(&MachineConfig { rank, world: shape.ranks(), liveness })?;
        machine.open(CONTEXT, &ContextConfig { generation: 0, first_epoch: 1, wire, arenas: &arenas })?;
        proxies.push(Proxy::new(machine, endpoint, counts.doorbells, counts.chunks));
    }
    Ok(proxies)
}
