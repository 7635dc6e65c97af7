//! `tokenyard plan`: every buffer of a rank's arena, without running, beside what DeepEP asks for.
//!
//! On the main thread; printing and pure arithmetic of the library's plan, which a run computes too before it begins.

use serde::Serialize;

use crate::cli::args::BenchArgs;
use crate::cli::cases::case::Case;
use crate::cli::files;
use crate::cli::out::Out;
use crate::cli::ranks::builder::planned;
use crate::cli::ranks::config::{Config, Purpose};
use crate::cli::report::deepep::SizeHints;
use crate::cli::report::table::table;
use crate::cli::status::Status;
use crate::cli::usage::Refusal;

#[derive(Serialize)]
struct PlanObject {
    arena_bytes: u64,
    /// Of each handle that is allocated when a context is built.
    handle_bytes: u64,
    buffers: Vec<BufferObject>,
    deepep: SizeHints,
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

/// Prints the plan.
///
/// # Errors
/// Unusable arguments.
pub fn plan(args: &BenchArgs, out: &Out) -> Result<Status, Refusal> {
    for (name, path) in [("--plot", &args.plot), ("--trace", &args.trace)] {
        if let Some(path) = path {
            return Err(Refusal::of(name, path, "a plan runs nothing that could be drawn; leave it out, or run bench"));
        }
    }
    let config = Config::new(args, Purpose::Plan)?;
    let refused = |error: tokenyard::Error| Refusal::from_error(&error);
    let builder = planned(&config.case, config.device)?;
    let plan = builder.plan().map_err(refused)?;
    let object = PlanObject {
        arena_bytes: plan.arena_bytes(),
        handle_bytes: plan.handle_bytes(),
        buffers: plan
            .buffers()
            .iter()
            .map(|b| BufferObject { name: b.name.clone(), offset: b.offset, bytes: b.bytes })
            .collect(),
        deepep: SizeHints::of(&config.case),
    };
    let mut outcome = Ok(());
    if let Some(path) = &config.outputs.json {
        let text = serde_json::to_string_pretty(&object).map_err(|error| error.to_string());
        outcome = text.and_then(|text| files::write(path, &text, out));
    }
    if !config.outputs.quiet() {
        let rows: Vec<Vec<String>> =
            object.buffers.iter().map(|b| vec![b.name.clone(), b.offset.to_string(), b.bytes.to_string()]).collect();
        say!(out, "{}", table(&["buffer", "offset", "bytes"], &rows));
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        say!(out, "arena of a rank: {} bytes ({:.1} MiB)", object.arena_bytes, mib(object.arena_bytes));
        say!(out, "each handle: {} bytes ({:.2} MiB)", object.handle_bytes, mib(object.handle_bytes));
        let normal = object.deepep.normal_bytes.map_or_else(
            || "has no configuration for so many ranks".to_string(),
            |bytes| format!("asks for {bytes} bytes ({:.1} MiB)", mib(bytes)),
        );
        let low_latency = object.deepep.low_latency_bytes;
        say!(
            out,
            "DeepEP for the same: its low-latency mode asks for {low_latency} bytes ({:.1} MiB), its normal mode {normal}",
            mib(low_latency)
        );
        say!(out, "{}", plan.explain());
        say!(out, "{}", nodes(&config.case));
    }
    Ok(match outcome {
        Ok(()) => Status::Success,
        Err(sentence) => {
            note!(out, "tokenyard: {sentence}");
            Status::Failure
        }
    })
}
