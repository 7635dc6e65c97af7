//! Links that fall under a running storm and come up again: every write arrives once or fails within the deadline, and
//! the traffic of the other link goes on.

use crate::Verbs;
use crate::rig::{Backend, Cluster, Draw, PATIENCE, SLOT, number, pattern, write};
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};
use tokenyard::internals::base::Rank;
use tokenyard::internals::transport::network::{Event, Posted, Transport, WriteImm};

/// Names the net device of rxv1, or of the device in its place, whose link falls.
const NET_DEVICE: &str = "TOKENYARD_TEST_LINK";
/// How often the link falls, unless TOKENYARD_LINK_FALLS says more: 20 times take a minute. Then the pauses of the
/// other link are judged, too.
const FALLS: usize = 6;
/// Writes of a rank by a NIC that are outstanding.
const WINDOW: usize = 8;
/// Longest pause of the link that stays, beyond those of the machine itself.
const PAUSE: Duration = Duration::from_millis(100);
/// What a clock that wakes each millisecond may be late without being recorded.
const USUAL: Duration = Duration::from_millis(2);

/// A write of the storm.
#[derive(Debug, Clone, Copy)]
struct Flown {
    from: usize,
    nic: usize,
    slot: usize,
    bytes: usize,
    arrived: u32,
    sent: bool,
    failed: bool,
}

/// Pauses of the machine: when each ended, and how long it was.
#[derive(Clone, Default)]
struct Pauses(Arc<Mutex<Vec<(Instant, Duration)>>>);

impl Pauses {
    fn watch(&self, stop: Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
        let pauses = self.clone();
        spawn(move || {
            stay();
            let mut before = Instant::now();
            while !stop.load(Ordering::Relaxed) {
                sleep(Duration::from_millis(1));
                let now = Instant::now();
                if now - before > USUAL {
                    pauses.0.lock().unwrap_or_else(PoisonError::into_inner).push((now, now - before));
                }
                before = now;
            }
        })
    }

    /// How much of the time between two instants the machine paused.
    fn between(&self, from: Instant, to: Instant) -> Duration {
        let pauses = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let inside = |(end, length): &(Instant, Duration)| {
            let begin = (*end - *length).max(from);
            (*end).min(to).saturating_duration_since(begin)
        };
        pauses.iter().map(inside).sum()
    }
}

/// Keeps a thread on the processor whose pauses count.
fn stay() {
    let first = core_affinity::get_core_ids().unwrap_or_default().first().copied();
    first.map(core_affinity::set_for_current);
}

fn ip(state: &str) {
    let device = std::env::var(NET_DEVICE).unwrap_or_else(|_| "v1".to_owned());
    let status = Command::new("/sbin/ip").args(["link", "set", &device, state]).status().unwrap();
    assert!(status.success(), "ip link set {device} {state}: {status}");
}

#[test]
fn links_that_fall_under_a_storm() {
    fall(FALLS, false);
}

/// The queue pair of flushes breaks with the link, and what it held back arrives all the same.
#[test]
fn links_that_fall_while_immediates_wait_for_flushes() {
    fall(FALLS / 2, true);
}

fn fall(usual: usize, flush: bool) {
    let backend = Verbs { even: &["rxv0", "rxv2"], odd: &["rxv1", "rxv3"], flush };
    if !backend.is_there() {
        return;
    }
    if std::env::var_os("TOKENYARD_TEST_VERBS").is_some() && std::env::var_os(NET_DEVICE).is_none() {
        println!("skipped: {NET_DEVICE} names no net device whose link may fall");
        return;
    }
    let asked = std::env::var("TOKENYARD_LINK_FALLS").ok();
    let all = asked.as_ref().map_or(usual, |text| text.parse().unwrap());
    let (stop, falls, pauses) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)), Pauses::default());
    stay();
    let clock = pauses.watch(stop.clone());
    let mut cluster = Cluster::new(&backend, 2);
    // What has arrived over the link that falls.
    let over_it = Arc::new(AtomicUsize::new(0));
    let toggler = {
        let (falls, over_it) = (falls.clone(), over_it.clone());
        spawn(move || {
            let (mut draw, mut stops) = (Draw::new(7), 0);
            for _ in 0..all {
                sleep(Duration::from_millis(300));
                ip("down");
                // What is in the queues of the processor's network stack still arrives.
                sleep(Duration::from_millis(50));
                let before = over_it.load(Ordering::Relaxed);
                sleep(Duration::from_millis(50 + draw.below(1900) as u64));
                stops += usize::from(over_it.load(Ordering::Relaxed) == before);
                ip("up");
                falls.fetch_add(1, Ordering::Relaxed);
            }
            stops
        })
    };
    let mut draw = Draw::new(3);
    let mut flown: Vec<Flown> = Vec::new();
    let mut open: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for (rank, nic) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        open.insert((rank, nic), (nic * WINDOW..(nic + 1) * WINDOW).collect());
    }
    let mut last = [Instant::now(); 2];
    let mut longest = [Duration::ZERO; 2];
    let mut ended: Option<Instant> = None;
    let (mut unended, mut posted_all) = (Vec::new(), false);
    loop {
        if falls.load(Ordering::Relaxed) == all {
            let ended = *ended.get_or_insert_with(Instant::now);
            let over = |w: &Flown| w.failed || w.sent && w.arrived > 0;
            if !std::mem::replace(&mut posted_all, true) {
                unended = (0..flown.len()).collect();
                let now = Instant::now();
                let own = (now - last[1]).saturating_sub(pauses.between(last[1], now));
                longest[1] = longest[1].max(own);
            }
            unended.retain(|number: &usize| !over(&flown[*number]));
            // A write that comes twice, behind the last of them, comes by then.
            if unended.is_empty() && ended.elapsed() > Duration::from_secs(1) {
                break;
            }
            assert!(ended.elapsed() < PATIENCE, "writes do not end behind the last fall: {unended:?}");
        }
        for ((rank, nic), slots) in open.iter_mut().filter(|_| ended.is_none()) {
            while let Some(slot) = slots.pop() {
                let bytes = [0, 1, draw.below(SLOT), SLOT][draw.below(4)];
                let number = flown.len() as u32;
                cluster.regions(*rank).source.write(slot * SLOT, &pattern(number, bytes));
                let posted = WriteImm { nic: *nic as u8, ..write(1 - rank, number, slot, bytes) };
                if cluster.endpoint(*rank).post(&posted).unwrap() == Posted::Full {
                    slots.push(slot);
                    break;
                }
                let (from, nic) = (*rank, *nic);
                flown.push(Flown { from, nic, slot, bytes, arrived: 0, sent: false, failed: false });
            }
        }
        let before = last;
        cluster.pump(&mut |rank, regions, event| {
            let at = match event {
                Event::Imm { imm } => {
                    let number = number(imm);
                    let w = &mut flown[number as usize];
                    assert_eq!((w.from, w.arrived), (1 - rank, 0), "write {number} came twice, or astray: {w:?}");
                    let seen = regions.recv_buffer.read(w.slot * SLOT, w.bytes);
                    assert!(seen == pattern(number, w.bytes), "write {number} is torn");
                    w.arrived += 1;
                    last[w.nic] = Instant::now();
                    over_it.fetch_add(usize::from(w.nic == 0), Ordering::Relaxed);
                    number as usize
                }
                Event::Sent { token } => {
                    let w = &mut flown[token as usize];
                    assert!(!w.sent && !w.failed, "write {token} completed twice: {w:?}");
                    w.sent = true;
                    token as usize
                }
                Event::Failed { token, peer, failure } => {
                    let w = &mut flown[token as usize];
                    assert!(!w.sent && !w.failed && peer == Rank(rank as u32 ^ 1), "write {token}: {w:?}");
                    println!("write {token} failed after {} falls: {failure}", falls.load(Ordering::Relaxed));
                    w.failed = true;
                    token as usize
                }
                other => panic!("{other:?}"),
            };
            let w = flown[at];
            if w.sent && w.arrived > 0 {
                open.entry((w.from, w.nic)).or_default().push(w.slot);
            }
        });
        for nic in 0..2 {
            if last[nic] == before[nic] || ended.is_some() {
                continue;
            }
            let gap = last[nic] - before[nic];
            let own = gap.saturating_sub(pauses.between(before[nic], last[nic]));
            longest[nic] = longest[nic].max(own);
        }
    }
    let stops = toggler.join().unwrap();
    stop.store(true, Ordering::Relaxed);
    clock.join().unwrap();
    let count = |of: fn(&&Flown) -> bool| flown.iter().filter(of).count();
    println!(
        "{} writes, {} failed, {stops} stops of the link that fell, longest pauses {longest:?}",
        flown.len(),
        count(|w| w.failed)
    );
    let lost: Vec<(usize, &Flown)> =
        flown.iter().enumerate().filter(|(_, w)| !w.failed && (!w.sent || w.arrived != 1)).collect();
    assert!(lost.is_empty(), "writes were lost: {lost:?}");
    // No fall is as long as a connection may take to resume.
    assert_eq!(count(|w| w.failed), 0, "writes failed");
    assert!(stops >= all / 2, "the link fell {all} times, and its traffic stopped {stops} times");
    // A time is judged where it was asked for, on a machine that does nothing else.
    assert!(asked.is_none() || longest[1] < PAUSE, "the link that stayed up paused for {:?}", longest[1]);
}
