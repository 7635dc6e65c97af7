//! Ranks as processes: starts the program once for each rank and collects what the ranks print.
//!
//! ```text
//!   parent  --fork, exec-->  rank r: same arguments and --as-rank; RANK, WORLD_SIZE, TOKENYARD_* in its environment,
//!                                    without the variables of the caller's own world
//!   parent  <----stdout----  a line of JSON for each point of the sweep, or a line with the error
//! ```
//!
//! Where the environment already describes a job (`--launch env`), nothing is started: this process is one of its
//! ranks, and rank 0 collects.
//!
//! The parent runs on the thread that runs the program, and reads on a thread for each rank. Ranks die with that
//! thread; it ends no other process.

use std::ffi::OsString;
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::prctl;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tokenyard::{Error, World};

use super::config::Config;
use super::network;
use super::random::random_bytes;
use super::sample::RankResult;
use super::team;
use crate::cli::out::Out;
use crate::cli::progress::Progress;
use crate::cli::status::Status;

/// The parent's process id, by which a rank notices that it is already an orphan.
const PARENT: &str = "TOKENYARD_PARENT";
/// Variables that the caller's own launcher may have set for another world.
const CALLERS_WORLD: [&str; 3] = ["TOKENYARD_NODES", "LOCAL_WORLD_SIZE", "TOKENYARD_ADDR"];
/// Time that ranks get to notice the death of another, beyond their own deadline.
const GRACE: Duration = Duration::from_secs(15);
/// Ports that ranks may meet at: below those that Linux gives to outgoing connections (from 32768 on by default), one
/// of which could be taken before rank 0 listens at it.
const PORTS: Range<u16> = 10_000..32_768;
/// How many of them are tried.
const PORTS_TRIED: usize = 64;
/// Time between two checks of the ranks.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// Starts the processes of ranks.
pub struct Launcher {
    /// A program that runs this program with its own arguments.
    program: Option<PathBuf>,
    /// The arguments of this run.
    args: Vec<OsString>,
}

impl Launcher {
    /// A launcher for a run with these arguments. Without a program no ranks can be started.
    pub fn new(program: Option<PathBuf>, args: Vec<OsString>) -> Launcher {
        Launcher { program, args }
    }

    /// Starts the program once more with the same arguments, and a pipe to its stdin and from its stdout.
    ///
    /// # Errors
    /// A sentence if it cannot be started.
    pub fn start_follower(&self) -> Result<Child, String> {
        let program = self.program()?;
        let mut command = Command::new(program);
        command.args(&self.args).arg("--as-rank").env(PARENT, std::process::id().to_string());
        let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        started.map_err(|error| {
            format!(
                "{}, the follower's program, cannot be started ({error}); free memory or processes",
                program.display()
            )
        })
    }

    /// The program that a rank runs.
    ///
    /// # Errors
    /// A sentence if there is none, or if this process is itself a rank: each rank would start ranks.
    fn program(&self) -> Result<&Path, String> {
        let advice =
            "start it as the program tokenyard (in Rust, name one to cli::Host::program), or give --launch threads";
        if is_rank() {
            let here = "this process is a rank that --launch processes started, and was not given its --as-rank";
            return Err(format!("{here}: the started program must pass its arguments on; {advice}"));
        }
        self.program.as_deref().ok_or_else(|| format!("there is no program to start for --launch processes; {advice}"))
    }
}

/// A line that a rank prints.
#[derive(Debug, Serialize, Deserialize)]
enum Line {
    Result(Box<RankResult>),
    Error {
        sentence: String,
        /// As by `team::remoteness`.
        remoteness: u8,
    },
}

/// Runs as one of the ranks: every point of the sweep, a line for each.
pub fn run_as_rank(config: &Config, out: &Out) -> Status {
    if let Err(sentence) = die_with_parent() {
        note!(out, "tokenyard: {sentence}");
        return Status::Failure;
    }
    let outcome = World::from_env().and_then(|world| network::place(world, &config.case)).and_then(|world| {
        each_point(config, &world, out, |result| {
            print(out, &Line::Result(Box::new(result)));
            Ok(())
        })
    });
    match outcome {
        Ok(()) => Status::Success,
        Err(error) => {
            print(out, &Line::Error { sentence: error.to_string(), remoteness: team::remoteness(&error) });
            Status::Failure
        }
    }
}

/// Runs every point of the sweep as the world's own rank, and hands over its results.
fn each_point(
    config: &Config,
    world: &World,
    out: &Out,
    mut take: impl FnMut(RankResult) -> tokenyard::Result<()>,
) -> tokenyard::Result<()> {
    let bar = if world.rank().index() == 0 { Progress::new(out) } else { Progress::hidden() };
    for &tokens in &config.tokens {
        let job = config.job(tokens);
        let show = |done: usize| bar.show(&format!("{tokens} tokens"), done, job.iterations());
        let result = team::run_own(&job, config.device, world, &show);
        bar.clear();
        take(result?)?;
    }
    Ok(())
}

/// Runs as the rank of the job that the environment describes. Rank 0 gets the ranks' results for each point; the
/// others get none.
///
/// # Errors
/// A sentence of this rank.
pub fn run_in_job(config: &Config, out: &Out) -> Result<Option<Vec<Vec<RankResult>>>, String> {
    let run = || {
        let world = World::from_env()?.with_timeout(config.timeout);
        if world.size() != config.case.world {
            let advice = "it is the job's number of ranks; give it as --world, or leave --world out";
            return Err(Error::config("WORLD_SIZE", world.size(), advice));
        }
        let world = network::place(world, &config.case)?;
        let first = world.rank().index() == 0;
        let mut points = Vec::new();
        each_point(config, &world, out, |result| {
            let text = serde_json::to_vec(&result).map_err(|error| unreadable(&error))?;
            let all = world.all_gather("results", &text)?;
            if first {
                let ranks: serde_json::Result<_> = all.iter().map(|text| serde_json::from_slice(text)).collect();
                points.push(ranks.map_err(|error| unreadable(&error))?);
            }
            Ok(())
        })?;
        Ok(first.then_some(points))
    };
    run().map_err(|error: Error| error.to_string())
}

/// Ranks of another build have other results.
fn unreadable(error: &serde_json::Error) -> Error {
    Error::bootstrap(format!("results of ranks are unreadable ({error})"), "run the same program on all hosts")
}

fn print(out: &Out, line: &Line) {
    // Errors are ignored: the parent may have closed its end.
    if let Ok(text) = serde_json::to_string(line) {
        say!(out, "{text}");
    }
}

/// Has the kernel end this process when its parent ends.
pub fn die_with_parent() -> Result<(), String> {
    // Only processes that were started as ranks are changed.
    if is_rank() {
        let watched = prctl::set_pdeathsig(Signal::SIGKILL);
        watched.map_err(|error| format!("the parent's death cannot be watched ({error})"))?;
        // The parent may have ended before the watch began.
        if is_rank() {
            return Ok(());
        }
    }
    Err("--as-rank is for processes that --launch processes starts; leave it out".to_string())
}

/// Whether the parent of this process started it as a rank.
fn is_rank() -> bool {
    let parent = std::env::var(PARENT).ok().and_then(|id| id.parse::<u32>().ok());
    parent == Some(std::os::unix::process::parent_id())
}

/// Runs the sweep with a process for each rank; returns the ranks' results for each point.
///
/// # Errors
/// A sentence that names the ranks that failed, and how.
pub fn run_processes(config: &Config, launcher: &Launcher) -> Result<Vec<Vec<RankResult>>, String> {
    let mut ranks = start_all(config, launcher)?;
    let texts = std::thread::scope(|scope| {
        let read = |rank: &mut RankProcess| {
            let stdout = rank.child.stdout.take();
            std::thread::Builder::new().spawn_scoped(scope, move || {
                let mut text = String::new();
                // The exit status reports a death that cut the output off.
                let _ = stdout.map(|mut pipe| pipe.read_to_string(&mut text));
                text
            })
        };
        let readers: std::io::Result<Vec<_>> = ranks.iter_mut().map(read).collect();
        let readers = match readers {
            Ok(readers) => readers,
            Err(error) => {
                // Killed, so that the readers that there are come to an end.
                ranks.clear();
                return Err(format!("no thread to read a rank's output ({error}); raise the limit on threads"));
            }
        };
        wait_all(&mut ranks, config.timeout + GRACE);
        Ok(readers.into_iter().map(|reader| reader.join().unwrap_or_default()).collect::<Vec<String>>())
    })?;
    let outputs: Vec<Output> = texts.iter().map(|text| Output::parse(text)).collect();
    if let Some(sentence) = failure(&ranks, &outputs, config.tokens.len()) {
        return Err(sentence);
    }
    let mut points: Vec<Vec<RankResult>> = config.tokens.iter().map(|_| Vec::new()).collect();
    for output in outputs {
        points.iter_mut().zip(output.results).for_each(|(point, result)| point.push(result));
    }
    Ok(points)
}

/// A rank's process; killed if dropped before it ends.
struct RankProcess {
    rank: usize,
    child: Child,
    status: Option<ExitStatus>,
    killed: bool,
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        if self.status.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn start_all(config: &Config, launcher: &Launcher) -> Result<Vec<RankProcess>, String> {
    let program = launcher.program()?;
    let token = random_token()?;
    let port = free_port()?;
    let start = |rank: usize| {
        let mut command = Command::new(program);
        for name in CALLERS_WORLD {
            command.env_remove(name);
        }
        let child = command
            .args(&launcher.args)
            .arg("--as-rank")
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", config.case.world.to_string())
            .env("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string())
            .env("TOKENYARD_PORT", port.to_string())
            .env("TOKENYARD_TOKEN", &token)
            .env("TOKENYARD_TIMEOUT_MS", config.timeout.as_millis().to_string())
            .env(PARENT, std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| {
                let program = program.display();
                format!("{program}, the program of rank {rank}, cannot be started ({error}); free memory or processes")
            })?;
        Ok(RankProcess { rank, child, status: None, killed: false })
    };
    (0..config.case.world).map(start).collect()
}

/// 128 random bits: strangers on the port are turned away.
fn random_token() -> Result<String, String> {
    Ok(random_bytes::<16>()?.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A local port that is free now.
fn free_port() -> Result<u16, String> {
    let mut last = String::new();
    for _ in 0..PORTS_TRIED {
        let port = PORTS.start + u16::from_ne_bytes(random_bytes()?) % (PORTS.end - PORTS.start);
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(_) => return Ok(port),
            Err(error) => last = error.to_string(),
        }
    }
    let Range { start, end } = PORTS;
    Err(format!("none of {PORTS_TRIED} ports from {start} to {} is free ({last})", end - 1))
}

/// Waits until all ranks ended. Once one has, for it failed or has left the last collective, the others get `limit`.
fn wait_all(ranks: &mut [RankProcess], limit: Duration) {
    let mut deadline: Option<Instant> = None;
    loop {
        for rank in ranks.iter_mut().filter(|rank| rank.status.is_none()) {
            rank.status = rank.child.try_wait().unwrap_or(None);
            if rank.status.is_some() && deadline.is_none() {
                deadline = Some(Instant::now() + limit);
            }
        }
        if ranks.iter().all(|rank| rank.status.is_some()) {
            return;
        }
        if deadline.is_some_and(|at| Instant::now() >= at) {
            for rank in ranks.iter_mut().filter(|rank| rank.status.is_none()) {
                rank.killed = rank.child.kill().is_ok();
                rank.status = rank.child.wait().ok();
            }
            return;
        }
        std::thread::sleep(CHECK_EVERY);
    }
}

/// The output of one rank.
#[derive(Default)]
struct Output {
    results: Vec<RankResult>,
    error: Option<(u8, String)>,
}

impl Output {
    fn parse(text: &str) -> Output {
        let mut output = Output::default();
        for line in text.lines() {
            match serde_json::from_str(line) {
                Ok(Line::Result(result)) => output.results.push(*result),
                Ok(Line::Error { sentence, remoteness }) => output.error = Some((remoteness, sentence)),
                // Cut off by a death.
                Err(_) => {}
            }
        }
        output
    }
}

/// Why the run failed, if it did: deaths first, then the error nearest to the cause.
fn failure(ranks: &[RankProcess], outputs: &[Output], points: usize) -> Option<String> {
    let deaths: Vec<String> = ranks
        .iter()
        .zip(outputs)
        .filter(|(rank, output)| !rank.killed && output.error.is_none() && output.results.len() < points)
        .map(|(rank, _)| format!("rank {} {}", rank.rank, describe(rank.status)))
        .collect();
    let errors = outputs.iter().filter_map(|output| output.error.clone());
    let nearest = errors.min_by_key(|(remoteness, _)| *remoteness).map(|(_, sentence)| sentence);
    let killed: Vec<String> = ranks.iter().filter(|rank| rank.killed).map(|rank| rank.rank.to_string()).collect();
    let mut parts = deaths;
    parts.extend(nearest);
    match killed.as_slice() {
        [] => {}
        [one] => parts.push(format!("rank {one} did not end by itself and was killed")),
        all => parts.push(format!("ranks {} did not end by themselves and were killed", all.join(", "))),
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn describe(status: Option<ExitStatus>) -> String {
    match status {
        Some(status) => match (status.signal(), status.code()) {
            (Some(signal), _) => format!("was ended by signal {signal}"),
            (_, Some(0)) => {
                "ended with status 0 before its results were complete: the started program must pass its arguments to \
                 tokenyard::cli::run"
                    .to_string()
            }
            (_, Some(code)) => format!("ended with status {code} before its results were complete"),
            _ => "ended in an unknown way".to_string(),
        },
        None => "could not be waited for".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_does_not_end_behind_the_others_is_killed_and_named() {
        let rank = |rank, script| {
            let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            RankProcess { rank, child, status: None, killed: false }
        };
        let mut ranks = [rank(0, "exec true"), rank(1, "exec sleep 20")];
        let begun = Instant::now();
        wait_all(&mut ranks, Duration::from_millis(100));
        assert!(begun.elapsed() < Duration::from_secs(15), "waited for the rank that hangs");
        assert_eq!((ranks[0].killed, ranks[1].killed), (false, true));
        let outputs = [Output::default(), Output::default()];
        let sentence = failure(&ranks, &outputs, 0);
        assert_eq!(sentence.as_deref(), Some("rank 1 did not end by itself and was killed"));
    }
}
