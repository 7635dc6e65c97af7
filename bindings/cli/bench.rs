//! `tokenyard bench`: runs a sweep, merges what the ranks measured, and writes it where it was asked for.
//!
//! On the main thread; the ranks run on threads, fibers or in processes of their own.

use std::process::ExitCode;

use super::args::BenchArgs;
use super::buffers;
use super::config::{Config, Purpose, note_arena, note_sharing};
use super::launch;
use super::plot;
use super::rank::Job;
use super::report::{self, Progress, RunResult};
use super::sample::RankResult;
use super::team;
use super::trace;
use super::usage::Refusal;
use super::words::{DeviceWord, Launch};
use tokenyard::internals::base::memory::available_bytes;

/// Runs the bench. Success: everything ran and every comparison was right.
///
/// # Errors
/// Unusable arguments.
pub fn bench(args: &BenchArgs) -> Result<ExitCode, Refusal> {
    let config = Config::new(args, Purpose::Run)?;
    if args.as_rank {
        return Ok(launch::run_as_rank(&config));
    }
    check_memory(&config)?;
    note_sharing(config.device, config.case.world);
    note_arena(args.arena, config.arena);
    let runs = match run(&config) {
        Ok(runs) => runs,
        Err(sentence) => {
            note!("tokenyard: {sentence}");
            return Ok(ExitCode::FAILURE);
        }
    };
    let results: Vec<RunResult> = runs.iter().map(|(tokens, ranks)| merged(&config, *tokens, ranks)).collect();
    let written = write(&config, &results, runs);
    if !config.outputs.quiet() {
        say!("{}", report::bench_table(&results));
        let stages = report::stages_table(&results);
        if !stages.is_empty() {
            say!("\n{stages}");
        }
    }
    for sentence in results.iter().flat_map(|r| &r.sentences) {
        note!("wrong: {sentence}");
    }
    if let Err(sentence) = &written {
        note!("tokenyard: {sentence}");
    }
    let right = written.is_ok() && results.iter().all(|r| r.verified);
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Refuses ranks of the CPU device whose buffers together are larger than what is free: the system would end the program.
fn check_memory(config: &Config) -> Result<(), Refusal> {
    let case = &config.case;
    let need = case.world.saturating_mul(buffers::bytes(case));
    let free = available_bytes().filter(|free| config.device == DeviceWord::Cpu && need as u64 > *free);
    let Some(free) = free else { return Ok(()) };
    let (name, value, instead) = match case.capacity {
        Some(rows) => ("--capacity", rows, "fewer"),
        None => ("--max-tokens", case.max_tokens, "fewer, or a --capacity"),
    };
    let advice = format!("buffers of all ranks take {need} bytes, and {free} bytes of memory are free; give {instead}");
    Err(Refusal::of(name, value, advice))
}

/// What every rank of one point of the sweep is told.
pub fn job(config: &Config, tokens: usize) -> Job {
    Job {
        case: config.point(tokens),
        warmup: config.warmup,
        check: config.check,
        timeout: config.timeout,
        arena: config.arena,
        measured: true,
        stages: config.stages,
    }
}

/// The ranks' results of each point.
type Runs = Vec<(usize, Vec<RankResult>)>;

fn run(config: &Config) -> Result<Runs, String> {
    if config.launch == Launch::Processes {
        let points = launch::run_processes(config)?;
        return Ok(config.tokens.iter().copied().zip(points).collect());
    }
    let bar = Progress::new();
    let mut runs = Vec::new();
    for &tokens in &config.tokens {
        let job = job(config, tokens);
        let show = |done: usize| bar.show(&format!("{tokens} tokens"), done, job.iterations());
        let ranks = team::run(&job, config.device, &show);
        bar.clear();
        runs.push((tokens, ranks.map_err(|error| error.to_string())?));
    }
    Ok(runs)
}

fn merged(config: &Config, tokens: usize, ranks: &[RankResult]) -> RunResult {
    RunResult::merge(config, &config.point(tokens), ranks)
}

fn write(config: &Config, results: &[RunResult], runs: Runs) -> Result<(), String> {
    if let Some(path) = &config.outputs.json {
        report::write(path, &report::json(results).map_err(|error| error.to_string())?)?;
    }
    if let Some(path) = &config.outputs.plot {
        report::write(path, &plot::plot(results))?;
    }
    if let Some(path) = &config.outputs.trace {
        let named: Vec<(String, Vec<RankResult>)> =
            runs.into_iter().map(|(tokens, ranks)| (format!("{tokens} tokens"), ranks)).collect();
        report::write(path, &trace::trace(&named).map_err(|error| error.to_string())?)?;
    }
    Ok(())
}
