//! One drawn world from start to end: machines, devices, network and clock, stepped in any order.

use super::device::{NodeFlags, Stream};
use super::draw::{Case, Draw, Fault, Plan, plan};
use super::net::{Arrival, Net};
use super::world::{Hands, Message, Shared, region};
use tokenyard::Rank;
use tokenyard::internals::proxy::machine::*;
use tokenyard::internals::proxy::wire::{ContextIdx, Direction, NicIdx};
use tokenyard::internals::transport::network::Reason;
use tokenyard::internals::transport::network::imm::{Decoded, ImmFields, ImmValue};

pub const LIVENESS: Liveness = Liveness { heartbeat_ns: 200_000, silence_ns: 2_000_000, first_contact_ns: 5_000_000 };
/// How late a loss may be noticed beyond the deadline: writes of stopped links that still arrive are signs of life,
/// and time passes between polls.
const SLACK_NS: u64 = 1_000_000;
/// A world that makes no progress for so long hangs.
const HANG_NS: u64 = 60_000_000;

/// Counts of events, over all seeds.
#[derive(Debug, Default, Clone, Copy)]
pub struct Totals {
    pub worlds: u64,
    pub writes: u64,
    pub chunks: u64,
    pub reorderings: u64,
    pub early: u64,
    pub full: u64,
    pub delays: u64,
    pub stops: u64,
    pub failed_writes: u64,
    pub deaths: u64,
    pub losses: u64,
    pub leaves: u64,
    pub wraps: u64,
    pub generations: u64,
    pub stale_immediates: u64,
    pub stale_completions: u64,
    pub bad_messages: u64,
    pub discarded: u64,
    pub uneven: u64,
}

impl Totals {
    pub fn fields(&self) -> [(&'static str, u64); 19] {
        [
            ("worlds", self.worlds),
            ("writes", self.writes),
            ("chunks arrived", self.chunks),
            ("reorderings", self.reorderings),
            ("early immediates", self.early),
            ("full queues", self.full),
            ("delays", self.delays),
            ("stopped links", self.stops),
            ("failed writes", self.failed_writes),
            ("dead ranks", self.deaths),
            ("losses reported", self.losses),
            ("leaves", self.leaves),
            ("epoch wraps", self.wraps),
            ("second generations", self.generations),
            ("stale immediates", self.stale_immediates),
            ("stale completions", self.stale_completions),
            ("malformed messages", self.bad_messages),
            ("chunks discarded", self.discarded),
            ("uneven worlds", self.uneven),
        ]
    }

    pub fn add(&mut self, other: &Totals) {
        let Totals { worlds, writes, chunks, reorderings, early, full, delays, stops, failed_writes, .. } = other;
        let Totals { deaths, losses, leaves, wraps, generations, stale_immediates, stale_completions, .. } = other;
        self.worlds += worlds;
        self.writes += writes;
        self.chunks += chunks;
        self.reorderings += reorderings;
        self.early += early;
        self.full += full;
        self.delays += delays;
        self.stops += stops;
        self.failed_writes += failed_writes;
        self.deaths += deaths;
        self.losses += losses;
        self.leaves += leaves;
        self.wraps += wraps;
        self.generations += generations;
        self.stale_immediates += stale_immediates;
        self.stale_completions += stale_completions;
        self.bad_messages += other.bad_messages;
        self.discarded += other.discarded;
        self.uneven += other.uneven;
    }
}

pub struct Universe {
    machines: Vec<Machine>,
    shared: Shared,
    net: Net,
    /// By context and rank; none for ranks outside the generation.
    streams: Vec<Vec<Option<Stream>>>,
    flags: Vec<NodeFlags>,
    /// By (from, to): newest write whose immediate was polled.
    newest: Vec<Vec<usize>>,
    /// By rank: strays of each sort that were put in.
    bad_messages: Vec<u64>,
    stale: Vec<u64>,
    late: Vec<u64>,
    silent: Vec<bool>,
    progress_at: u64,
    totals: Totals,
}

/// How long a peer that stopped at `struck_at` may stay unnoticed: longer if some had no sign of life of it before.
fn patience(struck_at: u64) -> u64 {
    if struck_at < 3 * LIVENESS.heartbeat_ns { LIVENESS.first_contact_ns } else { LIVENESS.silence_ns }
}

fn members(plan: &Plan) -> Vec<Vec<Rank>> {
    plan.wires[0].nodes().members().to_vec()
}

impl Universe {
    pub fn new(seed: u64) -> Universe {
        let mut draw = Draw(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x7479);
        let case = Case::new(&mut draw);
        let ranks = case.ranks;
        let machine =
            |rank| Machine::new(&MachineConfig { rank: Rank(rank as u32), world: ranks, liveness: LIVENESS }).unwrap();
        let plan = case.plan.clone();
        let net = Net::new(ranks, case.dead_fails, 0);
        let shared = Shared::new(case, plan, draw);
        let mut universe = Universe {
            machines: (0..ranks).map(machine).collect(),
            shared,
            net,
            streams: Vec::new(),
            flags: Vec::new(),
            newest: vec![vec![0; ranks]; ranks],
            bad_messages: vec![0; ranks],
            stale: vec![0; ranks],
            late: vec![0; ranks],
            silent: vec![false; ranks],
            progress_at: 0,
            totals: Totals { worlds: 1, ..Totals::default() },
        };
        let sizes: Vec<usize> = members(&universe.shared.plan).iter().map(Vec::len).collect();
        universe.totals.uneven = u64::from(sizes.iter().any(|size| *size != sizes[0]));
        if let Fault::Write(at) = universe.shared.case.fault {
            universe.shared.fail_at = Some(at);
        }
        universe.open();
        universe
    }

    /// Opens the generation's contexts on all of its ranks.
    fn open(&mut self) {
        let plan = &self.shared.plan;
        self.streams.clear();
        self.flags.clear();
        for (context, wire) in plan.wires.iter().enumerate() {
            let first_epoch = plan.first_epochs[context];
            let arenas: Vec<_> = (0..self.machines.len()).map(|rank| region(context, rank)).collect();
            let mut streams: Vec<Option<Stream>> = (0..self.machines.len()).map(|_| None).collect();
            for rank in wire.nodes().members().iter().flatten() {
                let config = ContextConfig { generation: plan.generation, first_epoch, wire, arenas: &arenas };
                self.machines[rank.index()].open(ContextIdx(context as u8), &config).unwrap();
                streams[rank.index()] = Some(Stream::new(rank.index(), context, first_epoch));
            }
            self.streams.push(streams);
            self.flags.push(NodeFlags::new(self.machines.len(), first_epoch));
        }
    }

    fn alive(&self) -> Vec<usize> {
        (0..self.machines.len()).filter(|rank| !self.net.dead[*rank]).collect()
    }

    pub fn run(mut self) -> Totals {
        self.run_generation();
        let survivors = self.survivors();
        let again = self.shared.case.second_generation || self.shared.case.fault != Fault::None;
        if again && !survivors.is_empty() {
            self.collect();
            self.next_generation(&survivors);
            self.run_generation();
        }
        if self.shared.case.leave && self.shared.reports.is_empty() {
            self.leave();
        }
        self.collect();
        self.check_machines();
        self.totals
    }

    fn survivors(&self) -> Vec<Vec<Rank>> {
        let mut nodes = members(&self.shared.plan);
        nodes.iter_mut().for_each(|node| node.retain(|rank| !self.net.dead[rank.index()]));
        nodes.retain(|node| !node.is_empty());
        nodes
    }

    /// Runs until all programs are through, or until a fault has had all its consequences.
    fn run_generation(&mut self) {
        self.progress_at = self.shared.now;
        let mut fault_at = None;
        loop {
            self.advance();
            let moved = self.act();
            if moved {
                self.progress_at = self.shared.now;
            }
            fault_at = fault_at.or_else(|| self.strike());
            if let Some(at) = fault_at {
                self.check_reports(at);
                let until = at + patience(at) + LIVENESS.silence_ns + 2 * SLACK_NS;
                if self.shared.now > until.max(self.progress_at + 1_000_000) {
                    self.check_aftermath(at);
                    return;
                }
            } else {
                assert!(self.shared.reports.is_empty(), "reported without a fault: {:?}", self.shared.reports);
                if self.is_through() {
                    self.check_end();
                    return;
                }
                let idle = self.shared.now - self.progress_at;
                assert!(idle < HANG_NS, "hangs:\n{}", self.describe());
            }
        }
    }

    /// Moves the clock: a little, or to the next thing that can happen if nothing moves.
    fn advance(&mut self) {
        let idle = self.shared.now - self.progress_at;
        let step = if idle > 30_000 { 20_000 } else { 400 };
        self.shared.now += self.shared.draw.within(step / 8, step);
        let now = self.shared.now;
        if self.net.advance(now, &mut self.shared) {
            self.progress_at = now;
        }
    }

    /// Lets a device and a proxy go on; all of them once nothing moves, so that nobody misses a heartbeat by bad luck.
    fn act(&mut self) -> bool {
        let alive = self.alive();
        if self.shared.now - self.progress_at > 30_000 {
            return alive.iter().fold(false, |moved, rank| self.act_on(*rank, *rank) | moved);
        }
        let device = alive[self.shared.draw.index(alive.len())];
        let proxy = alive[self.shared.draw.index(alive.len())];
        self.act_on(device, proxy)
    }

    fn act_on(&mut self, device: usize, proxy: usize) -> bool {
        let mut moved = false;
        let (lazy, _) = self.shared.case.lazy[device];
        if !self.silent[device] && self.shared.draw.below(lazy) < 2 {
            for _ in 0..self.shared.draw.within(1, 6) {
                let context = self.shared.draw.index(self.streams.len());
                let Some(stream) = &mut self.streams[context][device] else { continue };
                moved |= stream.step(&mut self.shared, &mut self.flags[context]);
            }
        }
        if !self.silent[proxy] {
            moved |= self.poll_once(proxy);
        }
        moved
    }

    /// A pass of one rank's driver: doorbells, events, time. A whole pass leaves nothing to be done.
    fn poll_once(&mut self, rank: usize) -> bool {
        self.stray(rank);
        let (_, lazy) = self.shared.case.lazy[rank];
        let whole = self.shared.draw.once_in(4);
        let mut moved = false;
        moved |= self.look(rank, if whole { 1 } else { lazy });
        let mut events = self.net.recv_buffer[rank].len();
        if !whole && events > 0 {
            events = self.shared.draw.index(events + 1);
        }
        for _ in 0..events {
            let at = self.shared.draw.index(self.net.recv_buffer[rank].len());
            let arrival = self.net.recv_buffer[rank].swap_remove(at);
            moved |= !matches!(arrival, Arrival::Message { .. } | Arrival::Stray(_) | Arrival::Late { .. });
            self.poll(rank, arrival);
        }
        let now_ns = self.shared.now;
        self.step(rank, Input::Time { now_ns });
        if whole {
            let looks = (0..1000).take_while(|_| self.look(rank, 1)).count();
            assert!(looks < 1000, "a doorbell of rank {rank} is taken again and again");
            self.assert_nothing_waits(rank);
        }
        moved
    }

    fn step(&mut self, rank: usize, input: Input<'_>) {
        let mut hands = Hands { rank, shared: &mut self.shared, net: &mut self.net };
        self.machines[rank].step(input, &mut hands);
    }

    /// Looks at the doorbells that the machine watches, in groups as the driver does.
    fn look(&mut self, rank: usize, lazy: u64) -> bool {
        let mut moved = false;
        for context in 0..self.shared.plan.wires.len() {
            let context = ContextIdx(context as u8);
            let mut groups = Vec::new();
            for at in 0..self.machines[rank].groups(context).len() {
                let group = self.machines[rank].groups(context)[at];
                groups.push((group.range().start, group.range().end));
                if self.may_ring(rank, context, group) {
                    group.range().for_each(|index| moved |= self.look_at(rank, context, index, lazy));
                    self.machines[rank].even_out(context, at);
                }
            }
            // They stand in the order in which a rank looks at its peers.
            groups.sort_unstable();
            let links = groups.iter().fold(0, |links, &(start, end)| {
                assert_eq!(start, links, "groups leave a link out");
                end
            });
            assert_eq!(links, self.machines[rank].watches(context).len());
        }
        moved
    }

    fn may_ring(&self, rank: usize, context: ContextIdx, group: Group) -> bool {
        let Some(Row { word, epoch }) = group.row else { return true };
        let doorbells = &self.shared.sides[context.index()][rank].words.doorbells;
        for (watch, word) in self.machines[rank].watches(context)[group.range()].iter().zip(word..) {
            let Watch { word: watched, epoch: wanted, asleep, .. } = *watch;
            assert_eq!((watched, wanted, asleep), (word, epoch, false), "a link of rank {rank} has left its row");
        }
        doorbells[word as usize..][..usize::from(group.links)].iter().any(|word| (word >> 32) as u32 == epoch)
    }

    fn look_at(&mut self, rank: usize, context: ContextIdx, index: usize, lazy: u64) -> bool {
        let watch = self.machines[rank].watches(context)[index];
        let words = &self.shared.sides[context.index()][rank].words;
        let word = words.doorbells[watch.word as usize];
        if !watch.is_rung(word) || self.shared.draw.below(lazy) > 1 {
            return false;
        }
        let chunks = watch.chunks_word.map_or(0, |at| words.chunks[at as usize] as u32);
        let watch = WatchId { context, index: index as u16 };
        self.step(rank, Input::Doorbell { watch, bytes: word as u32, chunks });
        true
    }

    fn poll(&mut self, rank: usize, arrival: Arrival) {
        match arrival {
            Arrival::Sent(op) | Arrival::Failed(op) => {
                self.net.polled(op);
                let message = self.shared.message_of_op(&self.net.ops[op]);
                self.shared.tally(message).completed += 1;
                let token = self.net.ops[op].write.token;
                if matches!(arrival, Arrival::Failed(_)) {
                    self.step(rank, Input::Failed { token, failure: Reason::Other.into() });
                } else {
                    self.step(rank, Input::Sent { token });
                }
            }
            Arrival::Imm(op) => {
                let (from, imm) = (self.net.ops[op].from, self.net.ops[op].write.imm);
                self.totals.reorderings += u64::from(self.newest[from][rank] > op);
                self.newest[from][rank] = self.newest[from][rank].max(op);
                let message = self.shared.message_of_op(&self.net.ops[op]);
                let consumed = self.shared.sides[message.context][rank].consumed[message.direction.index()];
                self.totals.early += u64::from(message.epoch == consumed + 2);
                if let Some(Decoded::Own(fields)) = imm.decode() {
                    self.shared.tally(message).shards[usize::from(fields.chunk)] += 1;
                }
                self.step(rank, Input::Immediate { imm });
            }
            Arrival::Stray(imm) => self.step(rank, Input::Immediate { imm }),
            Arrival::Late { token } => self.step(rank, Input::Failed { token, failure: Reason::Flushed.into() }),
            Arrival::Message { peer, bytes } => self.step(rank, Input::Message { peer, bytes: &bytes }),
        }
    }

    /// Now and then something arrives that is not of this generation, or not well-formed.
    fn stray(&mut self, rank: usize) {
        let draw = &mut self.shared.draw;
        if draw.once_in(200) {
            let peer = Rank(draw.index(self.machines.len()) as u32);
            let bytes = (0..draw.below(40)).map(|_| draw.next() as u8).collect();
            self.bad_messages[rank] += 1;
            self.net.recv_buffer[rank].push(Arrival::Message { peer, bytes });
        }
        if draw.once_in(200) {
            let generation = (self.shared.plan.generation + draw.within(1, 3) as u8) & 3;
            let fields = ImmFields {
                generation,
                context: draw.below(4) as u8,
                kind: Direction::ALL[draw.index(3)].kind(),
                epoch: draw.below(4) as u8,
                source: Rank(draw.index(self.machines.len()) as u32),
                chunk: draw.below(4) as u16,
                nic: NicIdx(draw.below(4) as u8).0,
            };
            self.stale[rank] += 1;
            self.net.recv_buffer[rank].push(Arrival::Stray(ImmValue::new(&fields).unwrap()));
        }
    }

    /// After a whole pass, every rung chunk that has room is posted: no blocked link holds up another.
    fn assert_nothing_waits(&self, rank: usize) {
        for (context, wire) in self.shared.plan.wires.iter().enumerate() {
            for direction in Direction::ALL {
                let rung = self.shared.sides[context][rank].rung[direction.index()];
                for to in wire.targets(direction, Rank(rank as u32)) {
                    for epoch in [rung.saturating_sub(1), rung] {
                        self.assert_posted(Message { context, direction, from: rank, to: to.index(), epoch });
                    }
                }
            }
        }
    }

    fn assert_posted(&self, message: Message) {
        let Some(tally) = self.shared.tallies.get(&message) else { return };
        let wire = self.shared.wire(message.context);
        let nics = wire.nics();
        // Chunks go in order, and their doorbells may be rung in another: only whole messages are sure to go.
        let whole = tally.rung == message.chunks(wire);
        let posted = tally.posted == usize::from(tally.rung) * usize::from(nics);
        if !whole || posted || self.shared.lost(message.from, message.to) || self.is_behind_another(&message) {
            return;
        }
        let full = (0..nics).any(|nic| !self.net.has_room(&self.shared.case, message.from, message.to, nic));
        assert!(full, "{message:?} is not posted although there is room: {tally:?}");
    }

    /// Whether the epoch before has not been posted in full, so that this one must wait.
    fn is_behind_another(&self, message: &Message) -> bool {
        let before = Message { epoch: message.epoch.wrapping_sub(1), ..*message };
        let wire = self.shared.wire(message.context);
        let all = usize::from(before.chunks(wire)) * usize::from(wire.nics());
        self.shared.tallies.get(&before).is_some_and(|tally| tally.posted < all)
    }

    /// Whether the fault has struck; a death does here.
    fn strike(&mut self) -> Option<u64> {
        match self.shared.case.fault {
            Fault::None => None,
            Fault::Write(_) => {
                self.shared.failed?;
                self.totals.failed_writes += 1;
                Some(self.shared.now)
            }
            Fault::Death { at, rank } => {
                if self.shared.posts < at || self.net.dead[rank] {
                    return None;
                }
                self.net.kill(rank);
                self.totals.deaths += 1;
                Some(self.shared.now)
            }
        }
    }

    /// Expected reports: (rank, lost rank).
    fn expected(&self) -> Vec<(usize, usize)> {
        let linked = |rank: usize, peer: usize| {
            let rank = Rank(rank as u32);
            let wires = self.shared.plan.wires.iter();
            let mut lists = wires.flat_map(|wire| {
                Direction::ALL.into_iter().flat_map(move |d| [wire.targets(d, rank), wire.sources(d, rank)])
            });
            lists.any(|list| list.contains(&Rank(peer as u32)))
        };
        match self.shared.case.fault {
            Fault::None => Vec::new(),
            Fault::Write(_) => self.shared.failed.map_or(Vec::new(), |(a, b)| vec![(a, b), (b, a)]),
            Fault::Death { rank: dead, .. } => {
                let others = (0..self.machines.len()).filter(|rank| *rank != dead && linked(*rank, dead));
                others.map(|rank| (rank, dead)).collect()
            }
        }
    }

    /// Nobody else is reported, nobody twice, and nobody late.
    fn check_reports(&self, struck_at: u64) {
        // A failed write is noticed with its completion, and by the other side for lack of heartbeats from then on.
        let mut from = struck_at;
        if let Fault::Write(_) = self.shared.case.fault {
            match self.shared.reports.first() {
                Some((_, at, _)) => from = *at,
                None => return,
            }
        }
        let deadline = from + patience(from) + LIVENESS.heartbeat_ns + SLACK_NS;
        let expected = self.expected();
        for (rank, at, report) in &self.shared.reports {
            let Report::PeerLost { peer, cause } = report else { panic!("rank {rank}: {report:?}") };
            assert!(expected.contains(&(*rank, peer.index())), "rank {rank} lost rank {peer} for nothing: {cause:?}");
            assert!(*at <= deadline, "rank {rank} noticed the loss of rank {peer} {} ns late", at - deadline);
        }
        let mut pairs: Vec<_> =
            self.shared.reports.iter().map(|(rank, _, r)| format!("{rank}{:?}", peer_of(r))).collect();
        pairs.sort();
        assert!(pairs.windows(2).all(|two| two[0] != two[1]), "reported twice: {pairs:?}");
        if self.shared.now > deadline + SLACK_NS {
            assert_eq!(self.shared.reports.len(), expected.len(), "of {expected:?} came {:?}", self.shared.reports);
        }
    }

    /// All traffic between ranks that have not lost each other has arrived.
    fn check_aftermath(&mut self, struck_at: u64) {
        self.check_reports(struck_at);
        let expected = self.expected();
        assert_eq!(self.shared.reports.len(), expected.len(), "of {expected:?} came {:?}", self.shared.reports);
        let dead_fails = self.shared.case.dead_fails;
        for (message, tally) in &self.shared.tallies {
            let Message { from, to, .. } = *message;
            let wire = self.shared.wire(message.context);
            if self.net.dead[from] {
                continue;
            }
            let whole = tally.rung == message.chunks(wire);
            // Writes to a dead peer that never complete fill a NIC's queue for good, for all peers.
            let full = (0..wire.nics()).any(|nic| !self.net.has_room(&self.shared.case, from, to, nic));
            let cut = self.net.dead[to] || self.shared.lost(from, to) || (!dead_fails && full);
            if !cut {
                let arrived = if whole { tally.arrived == tally.rung } else { tally.arrived <= tally.rung };
                assert!(arrived, "{message:?} of two survivors has not arrived: {tally:?}");
            }
            if whole && (!cut || dead_fails) {
                assert!(tally.freed, "the staging of {message:?} is never freed: {tally:?}");
            }
        }
        self.totals.losses += expected.len() as u64;
    }

    fn is_through(&self) -> bool {
        let through = self.streams.iter().flatten().flatten().all(|stream| stream.phase(&self.shared).is_none());
        // Completions may still come after the last flag.
        through && self.net.under_way == 0
    }

    fn check_end(&mut self) {
        for (message, tally) in &self.shared.tallies {
            let chunks = message.chunks(self.shared.wire(message.context));
            assert!(tally.rung == chunks && tally.arrived == chunks && tally.freed, "{message:?}: {tally:?}");
        }
        for rank in self.alive() {
            for context in 0..self.shared.plan.wires.len() as u8 {
                let left = self.machines[rank].under_way(ContextIdx(context));
                assert_eq!(left, 0, "rank {rank} still waits for completions of context {context}");
            }
        }
        for (messages, wire) in self.shared.plan.first_epochs.iter().zip(&self.shared.plan.wires) {
            let last = self.shared.sides.iter().flatten().flat_map(|side| side.consumed).max().unwrap_or(0);
            let wrapped = wire.nodes().members().len() > 1 && messages >> 32 == 0 && last >> 32 == 1;
            self.totals.wraps += u64::from(wrapped);
        }
    }

    /// Closes everything and opens the next generation on fresh memory: nothing of the old one may count.
    fn next_generation(&mut self, survivors: &[Vec<Rank>]) {
        for machine in &mut self.machines {
            (0..4).for_each(|context| machine.close(ContextIdx(context)));
        }
        let late = self.late();
        let generation = (self.shared.plan.generation + 1) & 3;
        let next = plan(&mut self.shared.draw, survivors, generation);
        let case = Case { fault: Fault::None, ..self.shared.case.clone() };
        let (now, dead) = (self.shared.now, self.net.dead.clone());
        self.net = Net::new(self.machines.len(), case.dead_fails, now);
        self.net.dead = dead;
        self.shared = Shared::new(case, next, Draw(self.shared.draw.next()));
        self.shared.now = now;
        self.newest.iter_mut().for_each(|row| row.fill(0));
        self.open();
        self.totals.generations += 1;
        for (rank, arrival) in late {
            self.stale[rank] += u64::from(matches!(arrival, Arrival::Stray(_)));
            self.late[rank] += u64::from(matches!(arrival, Arrival::Late { .. }));
            self.net.recv_buffer[rank].push(arrival);
        }
    }

    /// Events of this generation that are polled in the next: immediates that were delivered (or left by writes that
    /// were cut off), and completions of all that a reset transport had outstanding.
    fn late(&mut self) -> Vec<(usize, Arrival)> {
        let mut late = Vec::new();
        for rank in 0..self.machines.len() {
            for arrival in std::mem::take(&mut self.net.recv_buffer[rank]) {
                match arrival {
                    Arrival::Imm(op) => late.push((rank, Arrival::Stray(self.net.ops[op].write.imm))),
                    Arrival::Stray(_) => self.stale[rank] -= 1,
                    Arrival::Late { token } => late.push((rank, Arrival::Late { token })),
                    Arrival::Message { .. } => late.push((rank, arrival)),
                    Arrival::Sent(_) | Arrival::Failed(_) => {}
                }
            }
        }
        for op in self.net.ops.iter().rev().take(5) {
            late.push((op.to(), Arrival::Stray(op.write.imm)));
        }
        for op in self.net.ops.iter().filter(|op| !op.completed) {
            late.push((op.from, Arrival::Late { token: op.write.token }));
        }
        late.retain(|(rank, _)| !self.net.dead[*rank]);
        late
    }

    /// One rank leaves in good order and is silent: nobody takes that for a loss.
    fn leave(&mut self) {
        let ranks = self.alive();
        let leaver = ranks[self.shared.draw.index(ranks.len())];
        self.machines[leaver].leave();
        while !self.machines[leaver].has_left() {
            self.advance();
            self.poll_once(leaver);
        }
        self.silent[leaver] = true;
        let until = self.shared.now + LIVENESS.silence_ns * 3 / 2;
        while self.shared.now < until {
            self.advance();
            self.act();
        }
        assert!(self.shared.reports.is_empty(), "rank {leaver} left: {:?}", self.shared.reports);
        self.totals.leaves += 1;
    }

    /// Adds up what the network of a generation saw.
    fn collect(&mut self) {
        self.totals.writes += self.shared.posts;
        self.totals.full += self.shared.full;
        self.totals.delays += self.net.delays;
        self.totals.stops += self.net.stops;
        self.totals.chunks += self.shared.tallies.values().map(|t| u64::from(t.arrived)).sum::<u64>();
    }

    /// The machines' counts equal the inputs.
    fn check_machines(&mut self) {
        for rank in self.alive() {
            while let Some(arrival) = self.net.recv_buffer[rank].pop() {
                self.poll(rank, arrival);
            }
            let stats = *self.machines[rank].stats();
            assert_eq!((stats.duplicates, stats.impossible, stats.bad_doorbells), (0, 0, 0), "rank {rank}: {stats:?}");
            assert_eq!(stats.stale_immediates, self.stale[rank], "rank {rank}: stale immediates");
            assert_eq!(stats.stale_completions, self.late[rank], "rank {rank}: stale completions");
            assert_eq!(stats.bad_messages, self.bad_messages[rank], "rank {rank}: malformed messages");
            self.totals.stale_immediates += stats.stale_immediates;
            self.totals.stale_completions += stats.stale_completions;
            self.totals.bad_messages += stats.bad_messages;
            self.totals.discarded += stats.discarded;
        }
    }

    fn describe(&self) -> String {
        let streams = self.streams.iter().flatten().flatten().filter(|s| s.phase(&self.shared).is_some());
        let lines: Vec<String> = streams.map(|s| s.describe(&self.shared)).collect();
        format!("nodes {:?}\n{}", members(&self.shared.plan), lines.join("\n"))
    }
}

fn peer_of(report: &Report) -> Option<Rank> {
    match report {
        Report::PeerLost { peer, .. } => Some(*peer),
        Report::BadDoorbell { .. } => None,
    }
}
