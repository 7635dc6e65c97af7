//! `tokenyard simulate`: not built yet; its options are read, so that what is unusable is named all the same.
//!
//! On the main thread.

use std::process::ExitCode;

use super::args::SimulateArgs;
use super::config::check_output;
use super::presets;
use super::usage::Refusal;

/// Says that it is not built yet.
///
/// # Errors
/// Always: unusable arguments, or that.
pub fn simulate(args: &SimulateArgs) -> Result<ExitCode, Refusal> {
    if let Some(name) = &args.preset {
        presets::find(name).map_err(|error| Refusal::from_error(&error))?;
    }
    check_output("--json", args.json.as_deref(), true)?;
    Err(Refusal::command_not_built("simulate", "worlds of several nodes; bench runs one node"))
}
