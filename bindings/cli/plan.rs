//! `tokenyard plan`: every buffer of a rank's arena, without running.
//!
//! On the main thread; pure arithmetic of the library's plan, and printing.

use std::process::ExitCode;

use serde::Serialize;
use tokenyard::World;

use super::args::BenchArgs;
use super::config::{Config, Purpose};
use super::network;
use super::rank::builder;
use super::report::{self, table};
use super::usage::Refusal;

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

/// Prints the plan.
///
/// # Errors
/// Unusable arguments.
pub fn plan(args: &BenchArgs) -> Result<ExitCode, Refusal> {
    let config = Config::new(args, Purpose::Plan)?;
    let refused = |error: tokenyard::Error| Refusal::from_error(&error);
    let Some(world) = World::threads(config.case.world).into_iter().next() else { return Ok(ExitCode::FAILURE) };
    let world = network::place(world, &config.case).map_err(refused)?;
    let builder = builder(&config.case, &world).map_err(refused)?;
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
        println!("{}", table(&["buffer", "offset", "bytes"], &rows));
        let mib = object.arena_bytes as f64 / f64::from(1 << 20);
        println!("arena of a rank: {} bytes ({mib:.1} MiB)\n{explained}", object.arena_bytes);
        println!("{} ranks in nodes of {}", config.case.world, config.case.nodes_text());
    }
    Ok(match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(sentence) => {
            eprintln!("tokenyard: {sentence}");
            ExitCode::FAILURE
        }
    })
}
