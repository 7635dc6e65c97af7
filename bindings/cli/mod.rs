//! The program `tokenyard` as a function: benchmark, verification, memory plan, projection, and a check of the machine.
//!
//! [`run`] reads the arguments, runs one command on the caller's thread, and returns its [`Status`]. The program's
//! stdout goes to the caller's writer. Runs share nothing: a process may run the program many times, from several
//! threads at once.
//!
//! ```
//! use tokenyard::cli::{Host, Status, run};
//!
//! let mut out = Vec::new();
//! let status = run(["plan", "--device", "cpu", "--world", "2", "--json", "-"], Host::new(&mut out));
//! assert_eq!(status, Status::Success);
//! assert!(out.starts_with(b"{"));
//! ```
//!
//! The environment is the caller's: the function changes no variable. On GPUs that several ranks share, set
//! `CUDA_DEVICE_MAX_CONNECTIONS=32` before the process's first CUDA call, as the program does in its `main`: kernels of
//! such ranks wait for one another, and by default their streams share 8 queues.
//!
//! Files; each uses only files below it:
//!
//! | place | holds |
//! |---|---|
//! | `commands/` | a file for each command: bench, verify, plan, simulate, doctor, topology, wire |
//! | `report/` | results as JSON, tables, plots, traces and files |
//! | `ranks/` | settings of a run, its ranks as threads, fibers or processes, their calls and their comparison |
//! | `args` | the command line: options and their help |
//! | `cases/` | configurations: words, limits, shapes, inputs, routing, links |
//! | `files`, `progress`, `logging` | files of results, the bar, the log |
//! | `out`, `usage`, `status` | streams, refusals, exit status |

// These macros panic if their stream is closed or full; `out` does not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

#[macro_use]
mod out;

mod args;
mod cases;
mod commands;
mod files;
mod logging;
mod progress;
mod ranks;
#[path = "../../tests/reference/mod.rs"]
mod reference;
mod report;
mod status;
mod usage;

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use clap::Parser;
use clap::error::ErrorKind;

use args::{Cli, Command};
use out::Out;
use ranks::launch::Launcher;
pub use status::Status;
use usage::Refusal;

/// The parts of a process that the program uses.
pub struct Host<'a> {
    out: &'a mut (dyn Write + Send),
    err: Option<&'a mut (dyn Write + Send)>,
    bars: bool,
    log: bool,
    program: Option<PathBuf>,
}

impl<'a> Host<'a> {
    /// A process of the caller. `out` gets the program's stdout; notes and refusals go to the process's stderr, without
    /// progress bars. There is no program to start ranks from, so `--launch processes` is refused. The library's log
    /// goes to the caller's logger, if there is one.
    pub fn new(out: &'a mut (dyn Write + Send)) -> Host<'a> {
        Host { out, err: None, bars: false, log: false, program: None }
    }

    /// The process of the program itself: ranks are started from its own file, stderr shows progress bars if it is a
    /// terminal, and `TOKENYARD_LOG` installs a logger that writes to stderr.
    pub fn process(out: &'a mut (dyn Write + Send)) -> Host<'a> {
        let program = std::env::current_exe().ok();
        Host { bars: std::io::stderr().is_terminal(), log: true, program, ..Host::new(out) }
    }

    /// A writer of notes and refusals in place of the process's stderr. It gets no progress bars. Ranks that are
    /// processes keep the process's stderr.
    pub fn err(self, err: &'a mut (dyn Write + Send)) -> Host<'a> {
        Host { err: Some(err), bars: false, ..self }
    }

    /// The program that `--launch processes` starts for each rank. It gets the arguments of this run and `--as-rank`,
    /// and must pass them to [`run`] with [`Host::process`], as the program `tokenyard` does.
    pub fn program(self, path: impl Into<PathBuf>) -> Host<'a> {
        Host { program: Some(path.into()), ..self }
    }
}

/// Runs the program with these arguments and waits for the command to end. The first argument is the command, not the
/// program's name.
///
/// An error of a writer never ends a command. If `out` fails with `BrokenPipe`, its reader has closed it: the command
/// continues without output and returns its own status. After any other error of `out` the status is
/// [`Status::Failure`]. Errors of the other writer are ignored.
pub fn run<A: Into<OsString>>(args: impl IntoIterator<Item = A>, host: Host<'_>) -> Status {
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    let out = Out::new(host.out, host.err, host.bars);
    let named = std::iter::once("tokenyard".into()).chain(args.iter().cloned());
    let earned = match Cli::try_parse_from(named) {
        Ok(cli) => prepared(host.log).and_then(|()| command(&cli.command, Launcher::new(host.program, args), &out)),
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            say!(out, "{}", error.to_string().trim_end());
            Ok(Status::Success)
        }
        Err(error) => Err(Refusal::from_parser(&error)),
    };
    let earned = earned.unwrap_or_else(|refusal| {
        note!(out, "tokenyard: {refusal}");
        Status::Unusable
    });
    out.status(earned)
}

/// Installs the logger that `TOKENYARD_LOG` asks for, which writes the library's log to stderr. Without that variable,
/// or with a logger that the process has already, nothing changes.
///
/// # Errors
/// What the variable is, if it is no level, and what to give.
pub fn install_logger() -> Result<(), String> {
    logging::install().map_err(|refusal| refusal.to_string())
}

/// Applies the environment before a command.
fn prepared(log: bool) -> Result<(), Refusal> {
    if log { logging::install() } else { Ok(()) }
}

fn command(command: &Command, launcher: Launcher, out: &Out) -> Result<Status, Refusal> {
    match command {
        Command::Bench(args) => commands::bench::bench(args, &launcher, out),
        Command::Verify(args) => commands::verify::verify(args, out),
        Command::Plan(args) => commands::plan::plan(args, out),
        Command::Simulate(args) => commands::simulate::simulate(args, out),
        Command::Doctor(args) => commands::doctor::doctor(args, out),
        Command::Topology(args) => commands::topology::topology(args, out),
        Command::Wire(args) => commands::wire::wire(args, &launcher, out),
    }
}
