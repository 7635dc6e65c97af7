//! The program `tokenyard`: benchmark, verification, memory plan, and what a machine offers.
//!
//! Reads the command line, runs one command, and ends with its status: 0 if everything that was asked for ran and every
//! comparison was right, 1 if not or if stdout could not be written (`out`), 2 for unusable arguments, with one sentence
//! on stderr.

// A program has no readers of documentation but those of its source.
#![allow(missing_docs)]
// They panic where their stream is closed or full; `out` does not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

#[macro_use]
mod out;

mod args;
mod bench;
mod buffers;
mod calls;
mod case;
mod config;
mod doctor;
mod doctor_gpu;
mod draw;
mod faults;
mod forge;
mod hold;
mod inputs;
mod launch;
mod link;
mod links;
mod meeting;
mod network;
mod plan;
mod plot;
mod presets;
mod rank;
#[path = "../../tests/reference/mod.rs"]
mod reference;
mod report;
mod routing;
mod sample;
mod schedules;
mod simulate;
mod steps;
mod tally;
mod team;
mod trace;
mod trace_file;
mod traffic;
mod usage;
mod verify;
mod wake;
mod words;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use args::{Cli, Command};
use usage::Refusal;

/// Status for unusable arguments.
const UNUSABLE: u8 = 2;

fn main() -> ExitCode {
    separate_streams();
    let earned = match Cli::try_parse() {
        Ok(cli) => run(&cli.command).unwrap_or_else(|refusal| refuse(&refusal)),
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            out::settle(error.print().and_then(|()| std::io::stdout().flush()));
            ExitCode::SUCCESS
        }
        Err(error) => refuse(&Refusal::from_parser(&error)),
    };
    out::status(earned)
}

/// Kernels of ranks that share a GPU wait for one another, so their streams must not share one of its queues, of which a
/// driver makes 8 unless told otherwise.
fn separate_streams() {
    const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(QUEUES).is_none() {
        // SAFETY: nothing else runs yet that could read the environment.
        unsafe { std::env::set_var(QUEUES, "32") };
    }
}

fn run(command: &Command) -> Result<ExitCode, Refusal> {
    match command {
        Command::Bench(args) => bench::bench(args),
        Command::Verify(args) => verify::verify(args),
        Command::Plan(args) => plan::plan(args),
        Command::Simulate(args) => simulate::simulate(args),
        Command::Doctor(args) => doctor::doctor(args),
    }
}

fn refuse(refusal: &Refusal) -> ExitCode {
    note!("tokenyard: {refusal}");
    ExitCode::from(UNUSABLE)
}
