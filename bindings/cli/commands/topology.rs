//! `tokenyard topology`: the NICs and cores of each GPU, and why they were chosen; and records of machines.
//!
//! On the main thread. It reads /proc and /sys, or a record; it asks no driver and opens no device.

use std::path::Path;

use serde::Serialize;
use tokenyard::topology::{Cpus, GpuPlace, LeftOut, Machine, Nic, Topology, Wanted, record};

use crate::cli::args::TopologyArgs;
use crate::cli::files::{self, check_outputs};
use crate::cli::out::Out;
use crate::cli::report::table::left_table;
use crate::cli::status::Status;
use crate::cli::usage::Refusal;

#[derive(Serialize)]
struct TableObject<'a> {
    gpus: Vec<GpuObject>,
    left_out: Vec<NicObject>,
    notes: &'a [String],
}

#[derive(Serialize)]
struct GpuObject {
    gpu: String,
    node: Option<u32>,
    nics: Vec<NicObject>,
    nics_from: String,
    nics_shared: usize,
    cores: Vec<u32>,
    cores_from: String,
}

#[derive(Serialize)]
struct NicObject {
    address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// The reason, if it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

impl GpuObject {
    fn of(place: &GpuPlace) -> GpuObject {
        let nic = |nic: &Nic| NicObject { address: nic.address.to_string(), name: Some(nic.name.clone()), why: None };
        GpuObject {
            gpu: place.gpu.to_string(),
            node: place.node,
            nics: place.nics.iter().map(nic).collect(),
            nics_from: place.nics_from.to_string(),
            nics_shared: place.nics_shared,
            cores: place.cores.clone(),
            cores_from: place.cores_from.to_string(),
        }
    }
}

impl NicObject {
    fn left_out(nic: &LeftOut) -> NicObject {
        NicObject { address: nic.address.to_string(), name: nic.name.clone(), why: Some(nic.why.to_string()) }
    }
}

/// Prints the table of the machine or of a record.
///
/// # Errors
/// Unusable arguments or files.
pub fn topology(args: &TopologyArgs, out: &Out) -> Result<Status, Refusal> {
    if let (Some(path), Some(_)) = (&args.record, &args.from) {
        let advice = "it records this machine, and --from reads another's record; leave one of them out";
        return Err(Refusal::of("--record", path, advice));
    }
    check_outputs(args.json.as_deref(), &[("--record", args.record.as_deref())])?;
    let machine = match &args.from {
        Some(path) => record::read(Path::new(path)).map_err(|error| Refusal::of_file("--from", path, &error))?,
        None => Machine::here(),
    };
    let nics = args.nics.clone().unwrap_or_default();
    let mut wanted = Wanted::new(nics, args.cores.clone());
    if let Some(path) = &args.choice {
        wanted = wanted.and_file(Path::new(path)).map_err(|error| Refusal::of_file("--choice", path, &error))?;
    }
    let topology = Topology::of(&machine, &wanted).map_err(|error| Refusal::from_error(&error))?;
    let mut failures = Vec::new();
    if let Some(path) = &args.record {
        failures.extend(files::write(path, record::write(&machine).trim_end(), out).err());
    }
    if let Some(path) = &args.json {
        let object = TableObject {
            gpus: topology.gpus.iter().map(GpuObject::of).collect(),
            left_out: topology.left_out.iter().map(NicObject::left_out).collect(),
            notes: &topology.notes,
        };
        let text = serde_json::to_string_pretty(&object).map_err(|error| error.to_string());
        failures.extend(text.and_then(|text| files::write(path, &text, out)).err());
    }
    if args.json.as_deref() != Some("-") {
        say!(out, "{}", listing(&topology));
    }
    for sentence in &failures {
        note!(out, "tokenyard: {sentence}");
    }
    Ok(Status::from(failures.is_empty()))
}

fn listing(topology: &Topology) -> String {
    let row = |place: &GpuPlace| {
        let nics: Vec<&str> = place.nics.iter().map(|nic| nic.name.as_str()).collect();
        let shared = match place.nics_shared {
            0 => String::new(),
            others => format!(", shared with {others}"),
        };
        let cores: Cpus = place.cores.iter().copied().collect();
        vec![
            place.gpu.to_string(),
            place.node.map_or("-".to_string(), |node| node.to_string()),
            nics.join(","),
            format!("{}{shared}", place.nics_from),
            cores.to_string(),
            place.cores_from.to_string(),
        ]
    };
    let mut lines = Vec::new();
    if !topology.gpus.is_empty() {
        let rows: Vec<Vec<String>> = topology.gpus.iter().map(row).collect();
        lines.push(left_table(&["GPU", "node", "NICs", "by", "cores", "by"], &rows));
    }
    for nic in &topology.left_out {
        let name = nic.name.as_ref().map(|name| format!(" {name}")).unwrap_or_default();
        lines.push(format!("not used: {}{name}: {}", nic.address, nic.why));
    }
    lines.extend(topology.notes.iter().map(|note| format!("note: {note}")));
    lines.join("\n")
}
