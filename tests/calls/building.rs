//! A context that one rank cannot build: every other rank ends with an error that names the rank and its reason, and
//! the next try works.
//!
//! ```text
//!  settings ─▶ the same ─▶ own memory, number at the proxy ─▶ arenas mapped ─▶ arena registered ─▶ connected ─▶ open
//! ```

use crate::rig;
use crate::transport_outside::loopback::{Endpoint, Loopback};

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rig::{EXPERTS, PATIENCE, Rig, builder, on_ranks, test_device};
use tokenyard::internals::base::{quoted, wait};
use tokenyard::network::{
    DeviceNeeds, Event, Limits, MAX_ADDRESS, Posted, RegionId, Released, Span, Transport, WriteImm,
};
use tokenyard::*;

// ---- a network that fails on request

/// What an endpoint does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Register,
    Address,
    Connect,
    Reset,
    /// Ends the proxy.
    Poll,
}

/// What an endpoint does, for the test to change while a proxy has it.
#[derive(Default)]
struct Knobs {
    fault: Mutex<Option<Fault>>,
    /// It was called after its `poll` had failed.
    called_again: AtomicBool,
    /// Runs as memory is registered, and as a connection is made.
    hold: Mutex<Option<(Fault, Hold)>>,
}

type Hold = Box<dyn FnMut() + Send>;

struct Faulty {
    inner: Endpoint,
    limits: Limits,
    knobs: Arc<Knobs>,
}

impl Faulty {
    /// Notes calls that come while `poll` fails.
    fn sound(&self) {
        if *self.knobs.fault.lock().unwrap() == Some(Fault::Poll) {
            self.knobs.called_again.store(true, Ordering::Relaxed);
        }
    }

    fn fail(&self, at: Fault) -> Result<()> {
        if let Some((place, hold)) = &mut *self.knobs.hold.lock().unwrap()
            && *place == at
        {
            hold();
        }
        match *self.knobs.fault.lock().unwrap() {
            Some(fault) if fault == at => Err(Error::transport(format!("{at:?} refused"), "of this test")),
            _ => Ok(()),
        }
    }
}

impl Transport for Faulty {
    fn nics(&self) -> usize {
        1
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn device_needs(&self) -> DeviceNeeds {
        self.inner.device_needs()
    }

    unsafe fn register(&mut self, span: Span) -> Result<RegionId> {
        self.fail(Fault::Register)?;
        // SAFETY: passed on to the caller.
        unsafe { self.inner.register(span) }
    }

    fn deregister(&mut self, region: RegionId) -> Result<Released> {
        self.inner.deregister(region)
    }

    fn address(&mut self, peer: Rank) -> Result<Vec<u8>> {
        match self.fail(Fault::Address) {
            Ok(()) => self.inner.address(peer),
            Err(_) => Ok(vec![0; MAX_ADDRESS + 1]),
        }
    }

    fn connect(&mut self, peer: Rank, address: &[u8]) -> Result<()> {
        self.fail(Fault::Connect)?;
        self.inner.connect(peer, address)
    }

    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        self.sound();
        self.inner.post(write)
    }

    fn send(&mut self, peer: Rank, message: &[u8]) -> Result<Posted> {
        self.sound();
        self.inner.send(peer, message)
    }

    fn flush(&mut self) -> Result<()> {
        self.sound();
        self.inner.flush()
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        self.fail(Fault::Poll)?;
        self.inner.poll(on_event)
    }

    fn reset(&mut self) -> Result<()> {
        self.fail(Fault::Reset)?;
        self.inner.reset()
    }
}

/// A rank's proxy over such an endpoint.
fn proxy(world: &World, network: &Loopback, limits: Limits, fault: Option<Fault>) -> (Proxy, Arc<Knobs>) {
    let knobs = Arc::new(Knobs { fault: Mutex::new(fault), ..Knobs::default() });
    let inner = network.endpoint(world.original(world.rank()));
    let endpoint = Faulty { inner, limits, knobs: knobs.clone() };
    let thread = ThreadConfig { core: None, spinners: 8 };
    let config = ProxyConfig { liveness: Liveness::default(), thread };
    (Proxy::spawn(world, Box::new(endpoint), config).unwrap(), knobs)
}

// ---- what the ranks get

/// The errors of all ranks of a try, by rank; the world must still be usable. Waits for nobody until a deadline.
fn errors(world: &World, built: Result<AllToAll>, start: Instant) -> (Error, Vec<String>) {
    assert!(start.elapsed() < PATIENCE / 2, "a rank waited for {:?}", start.elapsed());
    let own = built.map(drop).unwrap_err();
    let all = world.all_gather("errors of this try", own.to_string().as_bytes()).unwrap();
    (own, all.iter().map(|text| String::from_utf8(text.clone()).unwrap()).collect())
}

/// Everyone but the culprit gets an error of bootstrap that names the culprit and all of its reason.
fn assert_notified(world: &World, culprit: Rank, what: &str, own: &Error, all: &[String]) {
    let (rank, reason) = (world.original(world.rank()), &all[culprit.index()]);
    if rank == culprit {
        return assert!(!matches!(own, Error::Bootstrap { .. }), "{what}: {own}");
    }
    let text = own.to_string();
    assert!(matches!(own, Error::Bootstrap { .. }) && !own.is_fatal(), "{what} of rank {culprit}: {own:?}");
    assert!(text.contains(&format!("rank {culprit} ")), "{what} of rank {culprit}: {text}");
    assert!(text.contains(&quoted(reason.as_bytes())), "{what} of rank {culprit}: «{text}» lacks «{reason}»");
}

// ---- settings

type Change = fn(AllToAllBuilder) -> AllToAllBuilder;

/// Settings that a rank refuses by itself: the name in its error, and the change.
const REFUSED: [(&str, Change); 27] = [
    ("hidden", |b| b.hidden(0)),
    ("hidden", |b| b.hidden((1 << 20) + 8)),
    ("hidden", |b| b.hidden(60)),
    ("hidden", |b| b.hidden(96).format(RowFormat::FP8_F32)),
    ("hidden", |b| b.tuning(|t| t.partial = Partial::Fp8)),
    ("experts", |b| b.experts(0)),
    ("experts", |b| b.experts((1 << 20) + 1)),
    ("top_k", |b| b.top_k(0)),
    ("top_k", |b| b.top_k(EXPERTS + 1)),
    ("max_tokens_per_rank", |b| b.max_tokens_per_rank(0)),
    ("max_tokens_per_rank", |b| b.max_tokens_per_rank((1 << 20) + 1)),
    ("quantize", |b| b.quantize(true)),
    ("combine_dtype", |b| b.combine_dtype(Dtype::Fp8E4m3)),
    ("placement", |b| b.placement(Placement::even(EXPERTS + 1, 2).unwrap())),
    ("placement", |b| b.placement(Placement::even(EXPERTS, 3).unwrap())),
    ("sms", |b| b.sms(1)),
    ("sms", |b| b.sms(1025)),
    ("handles", |b| b.tuning(|t| t.handles = 0)),
    ("handles", |b| b.tuning(|t| t.handles = 1025)),
    ("round_tokens", |b| b.tuning(|t| t.round_tokens = Some(0))),
    ("first_epoch", |b| b.tuning(|t| t.first_epoch = 0)),
    ("first_epoch", |b| b.tuning(|t| t.first_epoch = (1 << 42) + 1)),
    ("in_place rows", |b| b.tuning(|t| t.in_place = Some((0, 1)))),
    ("in_place align", |b| b.tuning(|t| t.in_place = Some((1, 0)))),
    ("in_place align", |b| b.tuning(|t| t.in_place = Some((64, i32::MAX as usize)))),
    ("in_place", |b| b.tuning(|t| (t.in_place, t.round_tokens) = (Some((64, 1)), Some(1)))),
    ("meta_tile", |b| b.tuning(|t| t.meta_tile = Some(0))),
];

#[test]
fn a_setting_that_one_rank_refuses_is_reported_to_the_others_with_its_reason() {
    on_ranks(2, |world| {
        let device = Device::cpu().unwrap();
        let mut taken = Vec::new();
        for (at, (name, change)) in REFUSED.iter().enumerate() {
            let culprit = Rank(at as u32 % 2);
            let good = builder(&world, &device);
            let (builder, start) = (if world.rank() == culprit { change(good) } else { good }, Instant::now());
            let built = builder.build();
            if built.is_ok() {
                taken.push(name);
                continue;
            }
            let (own, all) = errors(&world, built, start);
            assert_notified(&world, culprit, name, &own, &all);
            let reason = &all[culprit.index()];
            assert!(reason.starts_with(&format!("configuration {name} is ")), "{name}: {reason}");
            let other = &all[1 - culprit.index()];
            assert!(other.contains(&format!("rank {culprit} failed in configuration of a context: ")), "{other}");
            assert!(other.ends_with(&format!("mend rank {culprit} and begin again on every rank")), "{other}");
        }
        assert!(taken.is_empty(), "taken on both ranks: {taken:?}");
        Rig::new(&world).good_round(1);
        world.barrier("done").unwrap();
    });
}

/// Memory that no rank has: every rank has its own error, and nobody waits for another.
#[test]
fn an_arena_that_no_rank_can_have_is_refused_on_all_of_them() {
    on_ranks(2, |world| {
        let device = Device::cpu().unwrap();
        let huge = builder(&world, &device).hidden(1 << 20).max_tokens_per_rank(1 << 20);
        let start = Instant::now();
        let (own, all) = errors(&world, huge.build(), start);
        assert!(matches!(own, Error::Device { .. }) && !own.is_fatal(), "{own:?}");
        assert!(all.iter().all(|text| text.contains("bytes")), "{all:?}");
        Rig::new(&world).good_round(1);
        world.barrier("done").unwrap();
    });
}

// ---- later steps

/// Ways for one rank of several nodes to fail.
const STEPS: [Step; 8] = [
    Step::Settings,
    Step::NoProxy,
    Step::Writes,
    Step::Regions,
    Step::Gone,
    Step::Of(Fault::Register),
    Step::Of(Fault::Address),
    Step::Of(Fault::Connect),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Settings,
    NoProxy,
    /// A network that writes too few bytes at once.
    Writes,
    /// A network that registers no arena.
    Regions,
    /// A proxy that has ended.
    Gone,
    Of(Fault),
}

impl Step {
    /// In the culprit's error, and in the errors of the others before the culprit's reason.
    fn words(self) -> (&'static str, &'static str) {
        let (settings, memory) = ("failed in configuration of a context: ", "failed in memory of a context: ");
        let (arena, connect) = ("has no arena on the network: ", "could not connect: ");
        match self {
            Step::Settings => ("configuration chunk_rows is 0", settings),
            Step::NoProxy => ("configuration proxy is missing", memory),
            Step::Writes => ("configuration largest chunk is ", memory),
            Step::Regions => ("configuration contexts is 0 so far", memory),
            Step::Gone => ("transport Poll refused", arena),
            Step::Of(Fault::Address) => ("endpoint of rank ", arena),
            Step::Of(Fault::Connect) => ("transport Connect refused", connect),
            Step::Of(_) => ("transport Register refused", arena),
        }
    }
}

/// The limits and the fault of the culprit's other proxy.
fn other_proxy(step: Step) -> Option<(Limits, Option<Fault>)> {
    match step {
        Step::Writes => Some((Limits { write_bytes: 1, ..Limits::NONE }, None)),
        Step::Regions => Some((Limits { regions: 0, ..Limits::NONE }, None)),
        Step::Gone => Some((Limits::NONE, Some(Fault::Poll))),
        _ => None,
    }
}

#[test]
fn an_endpoint_that_failed_is_not_called_again() {
    let network = Loopback::default();
    on_ranks(2, |world| {
        let world = world.with_nodes(&[1, 1]).unwrap();
        let (proxy, knobs) = proxy(&world, &network, Limits::NONE, None);
        let rig = Rig::with(&world, |builder| builder.proxy(&proxy));
        rig.good_round(0);
        world.barrier("a round").unwrap();
        if world.rank() == Rank(0) {
            *knobs.fault.lock().unwrap() = Some(Fault::Poll);
            wait::poll("the proxy's end", PATIENCE, || proxy.remote().end()).expect("the proxy goes on");
            // It may have been between two calls of one pass.
            knobs.called_again.store(false, Ordering::Relaxed);
        }
        drop(rig);
        assert!(!knobs.called_again.load(Ordering::Relaxed));
        world.barrier("done").unwrap();
    });
}

#[test]
fn a_step_that_fails_on_one_rank_is_reported_to_the_others_and_leaves_room_for_the_next_try() {
    let network = Loopback::default();
    on_ranks(3, |world| {
        let world = world.with_nodes(&[2, 1]).unwrap();
        let (own_proxy, knobs) = proxy(&world, &network, Limits::NONE, None);
        for (at, step) in (0..3).flat_map(|_| STEPS).enumerate() {
            let culprit = Rank((at / STEPS.len()) as u32);
            let is_culprit = world.rank() == culprit;
            let other = other_proxy(step).filter(|_| is_culprit).map(|(limits, fault)| {
                let elsewhere = Loopback::default();
                let (other, _) = proxy(&world, &elsewhere, limits, fault);
                if fault.is_some() {
                    wait::poll("the proxy's end", PATIENCE, || other.remote().end()).expect("the proxy goes on");
                }
                other
            });
            if let (Step::Of(fault), true) = (step, is_culprit) {
                *knobs.fault.lock().unwrap() = Some(fault);
            }
            let mut building = builder(&world, &test_device(&world));
            if !(is_culprit && step == Step::NoProxy) {
                building = building.proxy(other.as_ref().unwrap_or(&own_proxy));
            }
            if is_culprit && step == Step::Settings {
                building = building.tuning(|t| t.chunk_rows = Some(0));
            }
            let start = Instant::now();
            let (own, all) = errors(&world, building.build(), start);
            *knobs.fault.lock().unwrap() = None;
            let what = format!("{step:?}");
            assert_notified(&world, culprit, &what, &own, &all);
            let (reason, before) = step.words();
            for (rank, text) in all.iter().enumerate() {
                let wanted = if rank == culprit.index() { reason } else { before };
                assert!(text.contains(wanted), "{what} of rank {culprit}, on rank {rank}: «{text}» lacks «{wanted}»");
            }
            assert_eq!(own.is_fatal(), is_culprit && step == Step::Gone, "{what}: {own:?}");
        }
        let rig = Rig::with(&world, |builder| builder.proxy(&own_proxy));
        (0..2).for_each(|salt| rig.good_round(salt));
        world.barrier("done").unwrap();
    });
}

/// The first context of a later generation resets the network.
#[test]
fn a_network_that_is_not_reset_on_one_rank_is_reported_to_the_others() {
    let network = Loopback::default();
    on_ranks(2, |world| {
        let world = world.with_nodes(&[1, 1]).unwrap();
        let (proxy, knobs) = proxy(&world, &network, Limits::NONE, None);
        Rig::with(&world, |builder| builder.proxy(&proxy)).good_round(0);
        for (generation, culprit) in [(1, Rank(0)), (2, Rank(1))] {
            let later = world.regroup(generation, &[Rank(0), Rank(1)]).unwrap();
            *knobs.fault.lock().unwrap() = (later.rank() == culprit).then_some(Fault::Reset);
            let start = Instant::now();
            let built = builder(&later, &test_device(&later)).proxy(&proxy).build();
            let (own, all) = errors(&later, built, start);
            assert_notified(&later, culprit, "reset", &own, &all);
            assert!(all[culprit.index()].contains("transport Reset refused"), "{all:?}");
            *knobs.fault.lock().unwrap() = None;
            Rig::with(&later, |builder| builder.proxy(&proxy)).good_round(1);
            later.barrier("done").unwrap();
        }
    });
}

// ---- interrupts

#[test]
fn a_rank_that_is_interrupted_while_it_builds_is_named_on_the_others_and_they_build_again_in_a_new_world() {
    for (place, collective) in [(Fault::Register, "proxy addresses"), (Fault::Connect, "proxies connected")] {
        let network = Loopback::default();
        // Rank 0 is slow until rank 1 has been interrupted.
        let (slow, interrupted) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        on_ranks(2, |world| {
            let world = world.with_nodes(&[1, 1]).unwrap();
            let (proxy, knobs) = proxy(&world, &network, Limits::NONE, None);
            let build = || builder(&world, &test_device(&world)).proxy(&proxy).build();
            let start = Instant::now();
            let error = if world.rank() == Rank(0) {
                let (slow, interrupted) = (slow.clone(), interrupted.clone());
                let hold: Hold = Box::new(move || {
                    slow.store(true, Ordering::Release);
                    let late = Instant::now() + PATIENCE;
                    while !interrupted.load(Ordering::Acquire) && Instant::now() < late {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                });
                *knobs.hold.lock().unwrap() = Some((place, hold));
                let error = build().map(drop).unwrap_err();
                *knobs.hold.lock().unwrap() = None;
                error
            } else {
                let asked = slow.clone();
                let built = Interrupt::asking(move || asked.load(Ordering::Acquire)).during(build);
                interrupted.store(true, Ordering::Release);
                built.map(drop).unwrap_err()
            };
            assert!(start.elapsed() < PATIENCE / 2 && error.is_fatal(), "{:?}, {error:?}", start.elapsed());
            let text = error.to_string();
            if world.rank() == Rank(0) {
                let expected = format!("rank 1 was interrupted in collective \"{collective}\" while rank 0 has not");
                assert!(matches!(error, Error::Bootstrap { .. }) && text.contains(&expected), "{text}");
            } else {
                assert!(matches!(error, Error::Interrupted { what, .. } if what == collective), "{error:?}");
                assert!(text.contains("form a new world"), "{text}");
            }
            let later = world.regroup(1, &[Rank(0), Rank(1)]).unwrap();
            Rig::with(&later, |builder| builder.proxy(&proxy)).good_round(1);
            later.barrier("done").unwrap();
        });
    }
}

// ---- every collective

/// An all-gather among threads, which fails on all of them in a chosen call of rank 1.
struct Table {
    meeting: Mutex<Meeting>,
    changed: Condvar,
    /// The call of rank 1 that fails.
    failing: usize,
    calls: AtomicUsize,
}

#[derive(Default)]
struct Meeting {
    number: u64,
    parts: [Option<Vec<u8>>; 2],
    last: Vec<Vec<u8>>,
    failed: Option<Error>,
    steps: Vec<String>,
}

impl Table {
    fn new(failing: usize) -> Arc<Table> {
        let (meeting, changed) = (Mutex::default(), Condvar::new());
        Arc::new(Table { meeting, changed, failing, calls: AtomicUsize::new(0) })
    }

    fn meet(&self, rank: usize, what: &str, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let mut meeting = self.meeting.lock().unwrap();
        if rank == 1 {
            meeting.steps.push(what.to_owned());
            if self.calls.fetch_add(1, Ordering::Relaxed) == self.failing {
                let error = Error::transport(format!("the gather of {what}"), "of this test");
                meeting.failed = Some(error.clone());
                self.changed.notify_all();
                return Err(error);
            }
        }
        let number = meeting.number;
        meeting.parts[rank] = Some(own.to_vec());
        if meeting.parts.iter().all(Option::is_some) {
            meeting.last = meeting.parts.iter_mut().filter_map(Option::take).collect();
            meeting.number += 1;
            self.changed.notify_all();
        }
        let open = |meeting: &mut Meeting| meeting.number == number && meeting.failed.is_none();
        let (meeting, late) = self.changed.wait_timeout_while(meeting, timeout, open).unwrap();
        match &meeting.failed {
            Some(error) if meeting.number == number => Err(error.clone()),
            _ if late.timed_out() => Err(Error::bootstrap(format!("nobody came to {what}"), "of this test")),
            _ => Ok(meeting.last.clone()),
        }
    }
}

#[test]
fn a_collective_of_a_build_that_fails_is_the_error_of_all_ranks_and_a_new_world_builds() {
    const STEPS: [&str; 10] = [
        "configuration of a context",
        "configuration",
        "memory of a context",
        "arena cards",
        "exchange_fds",
        "exchange_fds outcome",
        "arenas mapped",
        "proxy addresses",
        "proxies connected",
        "context ready",
    ];
    let network = Loopback::default();
    // The first call forms the world. The last table fails in none.
    let tables: Vec<Arc<Table>> = (1..=STEPS.len()).chain([usize::MAX]).map(Table::new).collect();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (network, tables) = (&network, &tables);
            scope.spawn(move || {
                let mut kept = None;
                for (at, table) in tables.iter().enumerate() {
                    let own = table.clone();
                    let gather = move |what: &str, part: &[u8], timeout: Duration| own.meet(rank, what, part, timeout);
                    let world = World::over(rank, 2, None, gather).unwrap().with_nodes(&[1, 1]).unwrap();
                    let (proxy, _) = kept.get_or_insert_with(|| proxy(&world, network, Limits::NONE, None));
                    let start = Instant::now();
                    let Some(step) = STEPS.get(at) else {
                        Rig::with(&world, |builder| builder.proxy(proxy)).good_round(1);
                        world.barrier("done").unwrap();
                        let steps = table.meeting.lock().unwrap().steps.clone();
                        assert_eq!(steps[1..=STEPS.len()], STEPS, "the collectives of a build");
                        continue;
                    };
                    let built = builder(&world, &test_device(&world)).proxy(proxy).build().map(drop);
                    let expected = Error::transport(format!("the gather of {step}"), "of this test").ending();
                    assert_eq!(built, Err(expected), "on rank {rank}");
                    assert!(start.elapsed() < PATIENCE / 2, "{step}: {:?}", start.elapsed());
                    let later = world.barrier("later").unwrap_err().to_string();
                    assert!(later.contains(&format!("collective \"{step}\" failed")), "{later}");
                }
            });
        }
    });
}
