//! `tokenyard plan`: every buffer of a rank's arena, without running.
//!
//! On the main thread; pure arithmetic of the library's plan, which a run asks for too before it begins, and printing.

use std::process::ExitCode;

use serde::Serialize;
use tokenyard::{AllToAllBuilder, Error, World};

use super::args::BenchArgs;
use super::case::Case;
use super::config::{Config, Purpose};
use super::network;
use super::rank::builder;
use super::report::{self, table};
use super::usage::Refusal;
use super::words::DeviceWord;

#[derive(Serialize)]
struct PlanObject {
    arena_bytes: u64,
    buffers: Vec<BufferObject>,
}

#[derive(Serialize)]
struct BufferObject {
    name: String,
    offset: u64,
    bytes: u64,
}

/// "8 ranks in one node", "64 ranks in 8 nodes of 8" or "8 ranks in nodes of 3,5".
fn nodes(case: &Case) -> String {
    let world = case.world;
    match (case.node_sizes().as_slice(), case.uneven_nodes()) {
        ([1], _) => "one rank".to_string(),
        ([_], _) => format!("{world} ranks in one node"),
        (sizes @ [first, ..], false) => format!("{world} ranks in {} nodes of {first}", sizes.len()),
        _ => format!("{world} ranks in nodes of {}", case.nodes_text()),
    }
}

/// What the library is asked for on each rank, if it can serve that.
///
/// # Errors
/// What it refuses, by the option that says so.
pub fn planned(case: &Case, device: DeviceWord) -> Result<AllToAllBuilder, Refusal> {
    let refused = |error: Error| match error {
        Error::Config { name, value, advice } => Refusal::of(&format!("--{}", name.replace('_', "-")), value, advice),
        other => Refusal::from_error(&other),
    };
    // Without a device it is the CPU's blocks that are looked at.
    let case = &Case { sms: case.sms.filter(|_| device == DeviceWord::Cpu), ..case.clone() };
    let first = World::threads(case.world).into_iter().next();
    let world = first.ok_or_else(|| Refusal::of("--world", case.world, "give 1 at least"))?;
    let world = network::place(world, case).map_err(refused)?;
    let builder = network::attach(builder(case, &world).map_err(refused)?, None, case);
    builder.plan().map_err(refused)?;
    Ok(builder)
}

/// Prints the plan.
///
/// # Errors
/// Unusable arguments.
pub fn plan(args: &BenchArgs) -> Result<ExitCode, Refusal> {
    for (name, path) in [("--plot", &args.plot), ("--trace", &args.trace)] {
        if let Some(path) = path {
            return Err(Refusal::of(name, path, "nothing runs that could be drawn; leave it out, or run bench"));
        }
    }
    let config = Config::new(args, Purpose::Plan)?;
    let refused = |error: tokenyard::Error| Refusal::from_error(&error);
    let builder = planned(&config.case, config.device)?;
    let plan = builder.plan().map_err(refused)?;
    let explained = builder.explain_plan().map_err(refused)?;
    let object = PlanObject {
        arena_bytes: plan.arena_bytes(),
        buffers: plan
            .buffers()
            .iter()
            .map(|b| BufferObject { name: b.name.clone(), offset: b.offset, bytes: b.bytes })
            .collect(),
    };
    let mut outcome = Ok(());
    if let Some(path) = &config.outputs.json {
        let text = serde_json::to_string_pretty(&object).map_err(|error| error.to_string());
        outcome = text.and_then(|text| report::write(path, &text));
    }
    if !config.outputs.quiet() {
        let rows: Vec<Vec<String>> =
            object.buffers.iter().map(|b| vec![b.name.clone(), b.offset.to_string(), b.bytes.to_string()]).collect();
        say!("{}", table(&["buffer", "offset", "bytes"], &rows));
        let mib = object.arena_bytes as f64 / f64::from(1 << 20);
        say!("arena of a rank: {} bytes ({mib:.1} MiB)\n{explained}", object.arena_bytes);
        say!("{}", nodes(&config.case));
    }
    Ok(match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(sentence) => {
            note!("tokenyard: {sentence}");
            ExitCode::FAILURE
        }
    })
}
