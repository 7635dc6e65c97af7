//! All ranks of a run inside this process: a thread each, or all on one thread under one seeded schedule.
//!
//! Beside the data path, on the caller's thread, which waits for the ranks.

use std::sync::{Mutex, PoisonError};

use tokenyard::kernels::{SeededConfig, SeededReport, seeded_world};
use tokenyard::{Device, Error, Result, World};

use super::config::usable_gpus;
use super::rank::{self, Job};
use super::sample::RankResult;
use super::words::{DeviceWord, WorldMode};

/// Runs every rank and returns their results by rank; `progress` hears from rank 0.
///
/// # Errors
/// Of the ranks' errors the one that is most likely the cause.
pub fn run(job: &Job, device: DeviceWord, progress: &(dyn Fn(usize) + Sync)) -> Result<Vec<RankResult>> {
    run_reported(job, device, progress).0
}

/// As [`run`], and what the seeded schedule was if there was one.
pub fn run_reported(
    job: &Job,
    device: DeviceWord,
    progress: &(dyn Fn(usize) + Sync),
) -> (Result<Vec<RankResult>>, Option<SeededReport>) {
    let one_thread = job.case.world_mode == WorldMode::OneThread && device == DeviceWord::Cpu;
    if !one_thread {
        return (all_of(run_threads(job, device, progress)), None);
    }
    let (outcomes, report) = run_seeded(job, progress);
    let failure = report.failure.clone();
    (failure.map_or_else(|| all_of(outcomes), Err), Some(report))
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

/// How far an error is from the cause of a failed run: 0 for what a rank found about itself.
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
        // Where there are fewer GPUs than ranks, they share them.
        DeviceWord::Cuda => Device::cuda(rank % usable_gpus().max(1)),
    }
}

/// Runs the rank of this process.
///
/// # Errors
/// Whatever the library returns.
pub fn run_own(job: &Job, device: DeviceWord, world: &World, progress: &dyn Fn(usize)) -> Result<RankResult> {
    rank::run(job, world, &open(device, world.local_rank())?, progress)
}

fn run_threads(job: &Job, device: DeviceWord, progress: &(dyn Fn(usize) + Sync)) -> Vec<Result<RankResult>> {
    let worlds = World::threads(job.case.world);
    std::thread::scope(|scope| {
        let start = |world: World| {
            scope.spawn(move || {
                let quiet = |_: usize| {};
                let progress: &dyn Fn(usize) = if world.rank().index() == 0 { &progress } else { &quiet };
                run_own(job, device, &world, progress)
            })
        };
        let threads: Vec<_> = worlds.into_iter().map(start).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<RankResult>>| {
            thread.join().unwrap_or_else(|_| Err(broken("a rank's thread panicked")))
        };
        threads.into_iter().map(join).collect()
    })
}

fn run_seeded(job: &Job, progress: &(dyn Fn(usize) + Sync)) -> (Vec<Result<RankResult>>, SeededReport) {
    let worlds = World::threads(job.case.world);
    let outcomes: Mutex<Vec<Option<Result<RankResult>>>> = Mutex::new(vec![None; job.case.world]);
    let config = SeededConfig { seed: job.case.seed, hold_stores: job.case.hold_stores };
    let report = seeded_world(config, job.case.world, |index, device| {
        let quiet = |_: usize| {};
        let progress: &dyn Fn(usize) = if index == 0 { &progress } else { &quiet };
        let outcome = match worlds.get(index) {
            Some(world) => rank::run(job, world, &device, progress),
            None => Err(broken("a rank has no world")),
        };
        // No fiber yields while it holds the lock.
        let mut outcomes = outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = outcomes.get_mut(index) {
            *place = Some(outcome);
        }
    });
    let outcomes = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
    (outcomes.into_iter().map(|o| o.unwrap_or_else(|| Err(broken("a rank did not finish")))).collect(), report)
}

fn broken(what: &str) -> Error {
    Error::Device { what: what.to_string(), advice: "this is a defect of the program; please report it".to_string() }
}
