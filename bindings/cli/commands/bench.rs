//! `tokenyard bench`: runs a sweep, merges the ranks' measurements, and writes the results.
//!
//! On the main thread; the ranks run on threads, fibers or in processes of their own.

use crate::cli::args::BenchArgs;
use crate::cli::cases::words::Launch;
use crate::cli::files;
use crate::cli::out::Out;
use crate::cli::progress::Progress;
use crate::cli::ranks::config::{Config, Purpose, check_memory, note_arena};
use crate::cli::ranks::gpus::note_sharing;
use crate::cli::ranks::launch::{self, Launcher};
use crate::cli::ranks::sample::RankResult;
use crate::cli::ranks::team;
use crate::cli::report::plot;
use crate::cli::report::result::{self, RunResult};
use crate::cli::report::trace;
use crate::cli::status::Status;
use crate::cli::usage::Refusal;

/// Runs the bench. Success: all runs ended and every comparison was right.
///
/// # Errors
/// Unusable arguments.
pub fn bench(args: &BenchArgs, launcher: &Launcher, out: &Out) -> Result<Status, Refusal> {
    let config = Config::new(args, Purpose::Run)?;
    if args.as_rank {
        return Ok(launch::run_as_rank(&config, out));
    }
    check_memory(&config.case, config.device, config.host_ranks())?;
    note_sharing(config.device, config.host_ranks(), out);
    note_arena(args.arena, config.arena, out);
    config.places.notes.iter().for_each(|sentence| note!(out, "tokenyard: {sentence}"));
    let runs = match run(&config, launcher, out) {
        Ok(Some(runs)) => runs,
        // The job's first rank reports.
        Ok(None) => return Ok(Status::Success),
        Err(sentence) => {
            note!(out, "tokenyard: {sentence}");
            return Ok(Status::Failure);
        }
    };
    let results: Vec<RunResult> = runs.iter().map(|(tokens, ranks)| merged(&config, *tokens, ranks)).collect();
    let written = write(&config, &results, runs, out);
    if !config.outputs.quiet() {
        say!(out, "{}", result::bench_table(&results));
        let stages = result::stages_table(&results);
        if !stages.is_empty() {
            say!(out, "\n{stages}");
        }
    }
    for sentence in results.iter().flat_map(|r| &r.sentences) {
        note!(out, "wrong: {sentence}");
    }
    if let Err(sentence) = &written {
        note!(out, "tokenyard: {sentence}");
    }
    let right = written.is_ok() && results.iter().all(|r| r.verified);
    Ok(right.into())
}

/// The ranks' results of each point.
type Runs = Vec<(usize, Vec<RankResult>)>;

fn run(config: &Config, launcher: &Launcher, out: &Out) -> Result<Option<Runs>, String> {
    let by_point = |points: Vec<Vec<RankResult>>| config.tokens.iter().copied().zip(points).collect();
    match config.launch {
        Launch::Threads => {}
        Launch::Processes => return Ok(Some(by_point(launch::run_processes(config, launcher)?))),
        Launch::Env => return Ok(launch::run_in_job(config, out)?.map(by_point)),
    }
    let bar = Progress::new(out);
    let mut runs = Vec::new();
    for &tokens in &config.tokens {
        let job = config.job(tokens);
        let show = |done: usize| bar.show(&format!("{tokens} tokens"), done, job.iterations());
        let ranks = team::run(&job, config.device, &show);
        bar.clear();
        runs.push((tokens, ranks.map_err(|error| error.to_string())?));
    }
    Ok(Some(runs))
}

fn merged(config: &Config, tokens: usize, ranks: &[RankResult]) -> RunResult {
    RunResult::merge(config, &config.point(tokens), ranks)
}

fn write(config: &Config, results: &[RunResult], runs: Runs, out: &Out) -> Result<(), String> {
    if let Some(path) = &config.outputs.json {
        files::write(path, &files::json(results).map_err(|error| error.to_string())?, out)?;
    }
    if let Some(path) = &config.outputs.plot {
        files::write(path, &plot::plot(results), out)?;
    }
    if let Some(path) = &config.outputs.trace {
        let named: Vec<(String, Vec<RankResult>)> =
            runs.into_iter().map(|(tokens, ranks)| (format!("{tokens} tokens"), ranks)).collect();
        files::write(path, &trace::trace(&named).map_err(|error| error.to_string())?, out)?;
    }
    Ok(())
}
