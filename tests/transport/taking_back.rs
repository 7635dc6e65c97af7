//! P13 under fire: regions come and go while three ranks write to them and to a region that stays, as fast as they can.
//! One thread drives all ranks; or each rank has a thread, and posts while the others are inside `deregister`.
//!
//! ```text
//!  rank 0   register, announce ─▶ some writes of each writer have arrived ─▶ deregister … Done, fill ─▶ the next
//!  writers  ─── post to the newest region and to the one that stays, as long as a slot is free ───────────────▶
//! ```

use crate::rig::*;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokenyard::internals::base::Rank;
use tokenyard::internals::transport::network::imm::ImmValue;
use tokenyard::internals::transport::network::{Event, Place, Posted, RegionId, Released, Span, Transport, WriteImm};

const WRITERS: usize = 3;
const ROUNDS: usize = 200;
/// Writes of a writer that have not completed, or, to the region that stays, not arrived. Each has a slot.
const WINDOW: usize = 16;
/// Writes that a writer posts to a region and the one that stays once there is a newer region: the last ones, too late.
const LATE: usize = 8;
/// Lengths of writes, one after the other.
const BYTES: [usize; 4] = [8, 200, 1, 64];
/// Of four writes one goes to the region that stays.
const STAYING: u32 = 4;
/// The place in [`Field::aims`] of writes to the region that stays.
const STAYS: usize = usize::MAX;
/// Bytes of a region: a slot for each write.
const REGION: usize = WRITERS * WINDOW * SLOT;
/// What a region holds from `Done` on.
const GONE: u8 = 0xDD;
/// Bits of a write's number in its immediate; the writer is above them.
const NUMBER: u32 = 23;

/// What owner and writers share.
struct Field {
    /// How many regions there have been, and the newest address for each writer.
    newest: Mutex<(usize, Vec<Vec<u8>>)>,
    rounds: AtomicUsize,
    /// Slots with a write to the region that stays that has not arrived.
    busy: Vec<AtomicBool>,
    /// The newest write of each slot, and to which round's region it goes.
    numbers: Vec<AtomicU32>,
    aims: Vec<AtomicUsize>,
    /// No more writes.
    over: AtomicBool,
    /// Writers whose writes have all ended.
    resting: AtomicUsize,
    /// The threads end.
    quit: AtomicBool,
}

impl Field {
    fn new() -> Field {
        let slots = WRITERS * WINDOW;
        assert!(slots <= SLOTS);
        Field {
            newest: Mutex::new((0, Vec::new())),
            rounds: AtomicUsize::new(0),
            busy: (0..slots).map(|_| AtomicBool::new(false)).collect(),
            numbers: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            aims: (0..slots).map(|_| AtomicUsize::new(STAYS)).collect(),
            over: AtomicBool::new(false),
            resting: AtomicUsize::new(0),
            quit: AtomicBool::new(false),
        }
    }

    fn is_at_rest(&self) -> bool {
        self.over.load(SeqCst) && self.resting.load(SeqCst) == WRITERS
    }
}

/// Ends the threads of a field however its thread ends.
struct Quit<'a>(&'a Field);

impl Drop for Quit<'_> {
    fn drop(&mut self) {
        self.0.quit.store(true, SeqCst);
    }
}

fn slot(writer: usize, number: u32) -> usize {
    writer * WINDOW + number as usize % WINDOW
}

fn bytes(number: u32) -> usize {
    BYTES[number as usize / STAYING as usize % BYTES.len()]
}

fn region(round: usize) -> RegionId {
    RegionId(RECV_BUFFER.0 + round as u16 + 1)
}

/// How often a write has ended, by how.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Ends {
    sent: u32,
    dropped: u32,
    failed: u32,
}

#[derive(Default)]
struct Writer {
    /// 0, 1, …: of rank 1, 2, ….
    writer: usize,
    rounds: usize,
    /// Writes that were posted since there is a newer region.
    late: usize,
    /// Sources that have not been given back.
    sources: [bool; WINDOW],
    ends: Vec<Ends>,
    is_resting: bool,
}

impl Writer {
    /// Posts what there is room for, and polls once; answers how much happened.
    fn step<E: Transport>(&mut self, Node { endpoint, regions }: &mut Node<E>, field: &Field) -> usize {
        let is_behind = |rounds: usize| field.rounds.load(SeqCst) != rounds;
        if is_behind(self.rounds) && (self.rounds == 0 || self.late >= LATE) {
            let newest = field.newest.lock().unwrap_or_else(PoisonError::into_inner);
            endpoint.connect(Rank(0), &newest.1[self.writer]).unwrap();
            (self.rounds, self.late) = (newest.0, 0);
        }
        while self.rounds > 0
            && !field.over.load(SeqCst)
            && (self.late < LATE || !is_behind(self.rounds))
            && self.post(endpoint, regions, field)
        {
            self.late += usize::from(is_behind(self.rounds));
        }
        // Under way before a notice is read.
        endpoint.flush().unwrap();
        let Writer { writer, sources, ends, .. } = self;
        let events = endpoint.poll(&mut |event| {
            let (token, ended) = match event {
                Event::Sent { token } => (token as usize, Ends { sent: 1, ..Ends::default() }),
                Event::Dropped { token, .. } => (token as usize, Ends { dropped: 1, ..Ends::default() }),
                Event::Failed { token, .. } => (token as usize, Ends { failed: 1, ..Ends::default() }),
                other => panic!("{other:?}"),
            };
            let ends = &mut ends[token];
            *ends = Ends {
                sent: ends.sent + ended.sent,
                dropped: ends.dropped + ended.dropped,
                failed: ends.failed + ended.failed,
            };
            sources[token % WINDOW] = false;
            if ended.sent == 0 {
                field.busy[slot(*writer, token as u32)].store(false, SeqCst);
            }
        });
        let own = &field.busy[self.writer * WINDOW..(self.writer + 1) * WINDOW];
        let open = self.sources.contains(&true) || own.iter().any(|busy| busy.load(SeqCst));
        if field.over.load(SeqCst) && !open && !self.is_resting {
            self.is_resting = true;
            field.resting.fetch_add(1, SeqCst);
        }
        events.unwrap()
    }

    /// Posts the next write; false if there is no room.
    fn post<E: Transport>(&mut self, endpoint: &mut E, regions: &Regions, field: &Field) -> bool {
        let number = self.ends.len() as u32;
        let slot = slot(self.writer, number);
        if self.sources[number as usize % WINDOW] || field.busy[slot].load(SeqCst) {
            return false;
        }
        let aim = if number % STAYING == STAYING - 1 { STAYS } else { self.rounds - 1 };
        let target =
            Place { region: if aim == STAYS { RECV_BUFFER } else { region(aim) }, offset: (slot * SLOT) as u64 };
        let bytes = bytes(number);
        regions.source.write(slot * SLOT, &pattern(number, bytes));
        // The owner reads them the other way around.
        field.numbers[slot].store(number, SeqCst);
        field.aims[slot].store(aim, SeqCst);
        field.busy[slot].store(aim == STAYS, SeqCst);
        let imm = ImmValue::user(0, 0, (self.writer as u32) << NUMBER | number).unwrap();
        let nic = (number as usize % endpoint.nics()) as u8;
        let write = WriteImm { nic, target, imm, ..write(0, number, slot, bytes) };
        if endpoint.post(&write).unwrap() == Posted::Full {
            field.busy[slot].store(false, SeqCst);
            return false;
        }
        self.sources[number as usize % WINDOW] = true;
        self.ends.push(Ends::default());
        true
    }
}

/// The owner of the regions.
struct Owner {
    /// The memory of all regions, by round.
    taken: Memory,
    rounds: usize,
    /// Arrived writes of each writer to the newest region; `None`: it is being taken back.
    hits: Option<[usize; WRITERS]>,
    since: Instant,
    /// How often each write of each writer has arrived.
    arrived: [Vec<u32>; WRITERS],
    torn: Vec<(usize, u32)>,
}

impl Owner {
    fn new() -> Owner {
        let (taken, arrived) = (Memory::new(ROUNDS * REGION), Default::default());
        Owner { taken, rounds: 0, hits: None, since: Instant::now(), arrived, torn: Vec::new() }
    }

    /// Goes on with the newest region, and polls once; answers how much happened.
    fn step<E: Transport>(&mut self, node: &mut Node<E>, field: &Field) -> usize {
        let Some(newest) = self.rounds.checked_sub(1) else { return self.announce(node, field) };
        assert!(self.since.elapsed() < PATIENCE, "round {newest}: hits {:?}, or not taken back", self.hits);
        if self.hits.is_some_and(|hits| hits.iter().all(|hits| *hits > newest % 4)) {
            self.hits = None;
        }
        if self.hits.is_none()
            && !field.over.load(SeqCst)
            && node.endpoint.deregister(region(newest)).unwrap() == Released::Done
        {
            self.taken.fill(newest * REGION, REGION, GONE);
            if self.rounds < ROUNDS {
                return self.announce(node, field);
            }
            self.since = Instant::now();
            field.over.store(true, SeqCst);
        }
        self.poll(node, field)
    }

    fn announce<E: Transport>(&mut self, node: &mut Node<E>, field: &Field) -> usize {
        let span = Span::host(self.taken.span().base + (self.rounds * REGION) as u64, REGION);
        // SAFETY: accessed through raw pointers only, and dropped after the endpoints.
        let number = unsafe { node.endpoint.register(span) };
        assert_eq!(number, Ok(region(self.rounds)));
        self.rounds += 1;
        let addresses = (1..=WRITERS as u32).map(|rank| node.endpoint.address(Rank(rank)).unwrap()).collect();
        *field.newest.lock().unwrap() = (self.rounds, addresses);
        field.rounds.store(self.rounds, SeqCst);
        (self.hits, self.since) = (Some([0; WRITERS]), Instant::now());
        1
    }

    fn poll<E: Transport>(&mut self, Node { endpoint, regions }: &mut Node<E>, field: &Field) -> usize {
        let Owner { rounds, hits, arrived, torn, .. } = self;
        let events = endpoint.poll(&mut |event| {
            let Event::Imm { imm } = event else { panic!("{event:?}") };
            let (writer, number) = ((number(imm) >> NUMBER) as usize, number(imm) & ((1 << NUMBER) - 1));
            let times = &mut arrived[writer];
            times.resize(times.len().max(number as usize + 1), 0);
            times[number as usize] += 1;
            let slot = slot(writer, number);
            let aim = field.aims[slot].load(SeqCst);
            // A slot takes its next write once the last has completed, which may be before it arrives.
            if field.numbers[slot].load(SeqCst) != number {
                return;
            }
            if let Some(hits) = hits.as_mut().filter(|_| aim == *rounds - 1) {
                hits[writer] += 1;
            }
            // In other regions bytes of the slot's earlier writes may arrive later than those of this one.
            let seen = (aim == STAYS).then(|| regions.recv_buffer.read(slot * SLOT, bytes(number)));
            if seen.is_some_and(|seen| seen != pattern(number, bytes(number))) {
                torn.push((writer, number));
            }
            field.busy[slot].store(false, SeqCst);
        });
        events.unwrap()
    }

    fn judge(&self, writers: &[Writer]) {
        let touched = |round: &usize| self.taken.read(round * REGION, REGION).iter().any(|byte| *byte != GONE);
        let touched: Vec<usize> = (0..ROUNDS).filter(touched).collect();
        assert!(touched.is_empty(), "regions written after they were taken back: {touched:?}");
        assert!(self.torn.is_empty(), "immediates without their payload: {:?}", self.torn);
        let (mut sent, mut dropped) = (0, 0);
        for Writer { writer, ends, .. } in writers {
            for (number, end) in ends.iter().enumerate() {
                let staying = number as u32 % STAYING == STAYING - 1;
                let is_sent = *end == Ends { sent: 1, ..Ends::default() };
                let is_dropped = *end == Ends { dropped: 1, ..Ends::default() };
                assert!(
                    is_sent || is_dropped && !staying,
                    "write {number} of writer {writer}, staying {staying}: {end:?}"
                );
                let came = self.arrived[*writer].get(number).copied().unwrap_or(0);
                // Of a region that was taken back, immediates may be lost with it.
                let least = u32::from(is_sent && staying);
                assert!(
                    (least..=u32::from(is_sent)).contains(&came),
                    "write {number} of writer {writer} came {came} times: {end:?}"
                );
                (sent, dropped) = (sent + usize::from(is_sent), dropped + usize::from(is_dropped));
            }
        }
        println!("{ROUNDS} regions, {sent} writes sent, {dropped} dropped");
        assert!(dropped > 0, "no write was too late");
    }
}

fn start<B: Backend>(backend: &B) -> (Owner, Cluster<B::Endpoint>, Vec<Writer>) {
    // Before the cluster, which a failing test drops first.
    let owner = Owner::new();
    let writers = (0..WRITERS).map(|writer| Writer { writer, ..Writer::default() }).collect();
    (owner, Cluster::new(backend, 1 + WRITERS), writers)
}

/// P13: from one thread.
pub fn regions_taken_back_under_a_storm<B: Backend>(backend: &B) {
    let field = Field::new();
    let (mut owner, mut cluster, mut writers) = start(backend);
    while !field.is_at_rest() {
        let mut nodes = cluster.nodes.iter_mut().flatten();
        owner.step(nodes.next().unwrap(), &field);
        writers.iter_mut().zip(nodes).for_each(|(writer, node)| _ = writer.step(node, &field));
    }
    let mut quiet = 0;
    while quiet < backend.quiet_polls() {
        let mut nodes = cluster.nodes.iter_mut().flatten();
        let mut events = owner.poll(nodes.next().unwrap(), &field);
        events += writers.iter_mut().zip(nodes).map(|(writer, node)| writer.step(node, &field)).sum::<usize>();
        quiet = if events == 0 { quiet + 1 } else { 0 };
    }
    drop(cluster);
    owner.judge(&writers);
}

/// P13: from a thread for each rank.
pub fn regions_taken_back_from_threads<B: Backend>(backend: &B) {
    let field = Field::new();
    let (mut owner, cluster, writers) = start(backend);
    let mut nodes = cluster.nodes.into_iter().flatten();
    let mut first = nodes.next().unwrap();
    let writers: Vec<Writer> = std::thread::scope(|scope| {
        let field = &field;
        let run = |(mut writer, mut node): (Writer, Node<B::Endpoint>)| {
            scope.spawn(move || {
                let _quit = Quit(field);
                while !field.quit.load(SeqCst) {
                    if writer.step(&mut node, field) == 0 {
                        std::thread::yield_now();
                    }
                }
                (writer, node)
            })
        };
        let threads: Vec<_> = writers.into_iter().zip(nodes).map(run).collect();
        let quit = Quit(field);
        let mut rested: Option<Instant> = None;
        while rested.is_none_or(|rested| rested.elapsed() < Duration::from_millis(100)) {
            assert!(!field.quit.load(SeqCst), "a writer's thread ended");
            if owner.step(&mut first, field) == 0 {
                std::thread::yield_now();
            }
            if rested.is_none() && field.is_at_rest() {
                rested = Some(Instant::now());
            }
        }
        drop(quit);
        // Endpoints go once nobody needs a peer's polls.
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        ended.into_iter().map(|(writer, _)| writer).collect()
    });
    drop(first);
    owner.judge(&writers);
}
