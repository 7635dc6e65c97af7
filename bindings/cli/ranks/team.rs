//! All ranks of a run inside this process: a thread each, or all on one thread under one seeded schedule.
//!
//! Beside the data path, on the caller's thread, which waits for the ranks.

use std::sync::{Mutex, PoisonError};

use tokenyard::internals::kernels::{SeededConfig, SeededReport, seeded_world};
use tokenyard::internals::transport::network::Transport;
use tokenyard::internals::transport::network::sim::{Counts, Network};
use tokenyard::{Device, Error, Proxy, Result, World};

use super::gpus::usable_gpus;
use super::job::Job;
use super::meeting::Meeting;
use super::network::{self, ProxyFiber, Shared};
use super::rank::{self, Between};
use super::sample::RankResult;
use crate::cli::cases::case::Case;
use crate::cli::cases::words::{DeviceWord, WorldMode};

/// Runs every rank and returns their results by rank; rank 0 reports to `progress`.
///
/// # Errors
/// The rank's error that is most likely the cause.
pub fn run(job: &Job, device: DeviceWord, progress: &(dyn Fn(usize) + Sync)) -> Result<Vec<RankResult>> {
    run_reported(job, device, progress).0
}

/// A seeded schedule, and the counts of its network.
pub struct Schedule {
    pub report: SeededReport,
    pub network: Counts,
}

/// As [`run`], with the seeded schedule if there was one.
pub fn run_reported(
    job: &Job,
    device: DeviceWord,
    progress: &(dyn Fn(usize) + Sync),
) -> (Result<Vec<RankResult>>, Option<Schedule>) {
    let one_thread = job.case.world_mode == WorldMode::OneThread && device == DeviceWord::Cpu;
    if !one_thread {
        return (run_threads(job, device, progress).and_then(all_of), None);
    }
    match run_seeded(job, progress) {
        Ok((outcomes, schedule)) => {
            let failure = schedule.report.failure.clone();
            (failure.map_or_else(|| all_of(outcomes), Err), Some(schedule))
        }
        Err(error) => (Err(error), None),
    }
}

fn all_of(outcomes: Vec<Result<RankResult>>) -> Result<Vec<RankResult>> {
    let mut results = Vec::new();
    let mut errors = Vec::new();
    for outcome in outcomes {
        match outcome {
            Ok(result) => results.push(result),
            Err(error) => errors.push(error),
        }
    }
    match cause(errors) {
        Some(error) => Err(error),
        None => Ok(results),
    }
}

/// The error that is most likely the cause of the others: a rank that fails makes its peers wait in vain.
pub fn cause(errors: Vec<Error>) -> Option<Error> {
    errors.into_iter().min_by_key(remoteness)
}

/// Distance of an error from the cause of a failed run: 0 for an error about the rank itself.
pub fn remoteness(error: &Error) -> u8 {
    match error {
        Error::Timeout { .. } | Error::PeerLost { .. } => 2,
        Error::Bootstrap { .. } | Error::Incomplete { .. } => 1,
        _ => 0,
    }
}

fn open(device: DeviceWord, rank: usize) -> Result<Device> {
    match device {
        DeviceWord::Cpu => Device::cpu(),
        // With fewer GPUs than ranks, ranks share them.
        DeviceWord::Cuda => Device::cuda(rank % usable_gpus().max(1)),
    }
}

/// Runs one rank that is a process, with its own device, and an endpoint with a proxy if there are several nodes.
///
/// # Errors
/// Whatever the library returns.
pub fn run_own(job: &Job, device: DeviceWord, world: &World, progress: &dyn Fn(usize)) -> Result<RankResult> {
    let device = open(device, world.local_rank())?;
    let several = job.case.several_nodes();
    let endpoint = several.then(|| network::process_endpoint(world, &device, job)).transpose()?;
    run_on(job, &device, world, endpoint, None, progress)
}

/// The same on a device.
fn run_on(
    job: &Job,
    device: &Device,
    world: &World,
    endpoint: Option<Box<dyn Transport>>,
    meeting: Option<Meeting>,
    progress: &dyn Fn(usize),
) -> Result<RankResult> {
    let core = job.places.of(world.rank().index()).core;
    let proxy = endpoint.map(|endpoint| network::spawn(world, endpoint, core)).transpose()?;
    rank::run(job, world, device, &Between { proxy, meeting }, progress)
}

fn run_threads(job: &Job, device: DeviceWord, progress: &(dyn Fn(usize) + Sync)) -> Result<Vec<Result<RankResult>>> {
    let worlds = network::worlds(&job.case)?;
    let network = network::real_time(job, device, |rank| open(device, rank))?;
    let network = network.as_ref();
    Ok(std::thread::scope(|scope| {
        let start = |world: World| {
            // Where there is no thread, the rank's world is dropped, which the other ranks notice.
            std::thread::Builder::new().spawn_scoped(scope, move || {
                let quiet = |_: usize| {};
                let progress: &dyn Fn(usize) = if world.rank().index() == 0 { &progress } else { &quiet };
                let device = open(device, world.rank().index())?;
                let endpoint = network.map(|network| network.endpoint(&world, &device)).transpose()?;
                let nic_us = network.and_then(Shared::nic_us);
                let meeting = network.and_then(Shared::meeting).cloned();
                Ok(RankResult { nic_us, ..run_on(job, &device, &world, endpoint, meeting, progress)? })
            })
        };
        let threads: Vec<_> = worlds.into_iter().map(start).collect();
        let join = |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, Result<RankResult>>>| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| Err(broken("a rank's thread panicked"))),
            Err(error) => Err(Error::device(
                format!("no thread for a rank: {error}"),
                "raise the limit on threads, or use fewer ranks",
            )),
        };
        threads.into_iter().map(join).collect()
    }))
}

/// The ranks of a world on one thread, and with several nodes their proxies, whose fibers follow the ranks' fibers.
struct Fibers {
    worlds: Vec<World>,
    network: Option<Network>,
    /// Each rank takes and drops its proxy, so that its driver ends.
    proxies: Mutex<Vec<Option<Proxy>>>,
    drivers: Mutex<Vec<Option<ProxyFiber>>>,
}

impl Fibers {
    fn new(case: &Case) -> Result<Fibers> {
        let worlds = network::worlds(case)?;
        let (mut proxies, mut drivers) = (Vec::new(), Vec::new());
        let network = network::virtual_time(case)?;
        if let Some(network) = &network {
            for world in &worlds {
                let (proxy, driver) = network::fiber(network, world, case)?;
                proxies.push(Some(proxy));
                drivers.push(Some(driver));
            }
        }
        Ok(Fibers { worlds, network, proxies: Mutex::new(proxies), drivers: Mutex::new(drivers) })
    }

    fn count(&self) -> usize {
        self.worlds.len() + self.drivers.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Runs the proxy of a rank.
    fn drive(&self, rank: usize) -> Result<()> {
        let driver = take(&self.drivers, rank).ok_or_else(|| broken("a rank has no proxy"))?;
        driver.run();
        Ok(())
    }
}

/// Takes a rank's entry. No fiber yields while it holds the lock.
fn take<T>(all: &Mutex<Vec<Option<T>>>, rank: usize) -> Option<T> {
    all.lock().unwrap_or_else(PoisonError::into_inner).get_mut(rank).and_then(Option::take)
}

fn run_seeded(job: &Job, progress: &(dyn Fn(usize) + Sync)) -> Result<(Vec<Result<RankResult>>, Schedule)> {
    let fibers = Fibers::new(&job.case)?;
    let ranks = fibers.worlds.len();
    let outcomes: Mutex<Vec<Option<Result<RankResult>>>> = Mutex::new(vec![None; ranks]);
    let config = SeededConfig { seed: job.case.seed, hold_stores: job.case.hold_stores, stopped: None };
    let report = seeded_world(config, fibers.count(), |index, device| {
        let quiet = |_: usize| {};
        let progress: &dyn Fn(usize) = if index == 0 { &progress } else { &quiet };
        let (place, outcome) = match fibers.worlds.get(index) {
            Some(world) => {
                let proxy = take(&fibers.proxies, index);
                (index, rank::run(job, world, &device, &Between { proxy, meeting: None }, progress))
            }
            None => match fibers.drive(index - ranks) {
                Ok(()) => return,
                Err(error) => (index - ranks, Err(error)),
            },
        };
        // No fiber yields while it holds the lock. The first error of a rank or its proxy stays.
        let mut outcomes = outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = outcomes.get_mut(place).filter(|place| !matches!(place, Some(Err(_)))) {
            *place = Some(outcome);
        }
    });
    let outcomes = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
    let finished = |outcome: Option<_>| outcome.unwrap_or_else(|| Err(broken("a rank did not finish")));
    let network = fibers.network.map_or_else(Counts::default, |network| network.counts());
    Ok((outcomes.into_iter().map(finished).collect(), Schedule { report, network }))
}

fn broken(what: &str) -> Error {
    Error::device(what.to_string(), "this is a defect of the program; please report it")
}
