//! `tokenyard simulate --calibrate`: projections beside known latencies.
//!
//! On the main thread. Two sorts: published latencies of other systems, which test network and link models; and
//! latencies that this project measured, which test the devices' costs.

use serde::Serialize;

use tokenyard::internals::transport::network::sim::models;

use super::costs::Costs;
use super::peers::{self, Site, System};
use super::plan::{Order, Pair, Plan};
use super::workload::Shape;
use super::world::Outcome;
use crate::cli::args::SimulateArgs;
use crate::cli::cases::presets;
use crate::cli::files;
use crate::cli::out::Out;
use crate::cli::progress::Progress;
use crate::cli::report::result::Percentiles;
use crate::cli::report::table::table;
use crate::cli::usage::Refusal;

/// Largest error of a projection, in per cent.
pub const LIMIT: f64 = 15.0;

/// NVLink, bytes per ns: DeepEP states 160 for the H800; of H100 and H200 bare stores reach 330.
const H800_NVLINK: f64 = 160.0;
const H100_NVLINK: f64 = 330.0;

/// Where a system was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// H800s and ConnectX-7, by DeepEP's authors.
    H800,
    /// H100s and ConnectX-7, by pplx-garden's authors.
    H100,
    /// H200s and EFA (p5en), by pplx-garden's authors.
    Efa,
}

/// Published: system, place, ranks, dispatch and combine in µs.
const PUBLISHED: [(System, Place, usize, f64, f64); 17] = [
    (System::DeepEp, Place::H800, 8, 77.0, 114.0),
    (System::DeepEp, Place::H800, 16, 118.0, 195.0),
    (System::DeepEp, Place::H800, 32, 155.0, 273.0),
    (System::DeepEp, Place::H800, 64, 173.0, 314.0),
    (System::DeepEp, Place::H800, 128, 192.0, 369.0),
    (System::DeepEp, Place::H800, 256, 194.0, 360.0),
    (System::DeepEp, Place::H100, 8, 42.6, 72.0),
    (System::DeepEp, Place::H100, 16, 123.9, 203.0),
    (System::DeepEp, Place::H100, 32, 159.1, 285.0),
    (System::DeepEp, Place::H100, 64, 177.9, 325.0),
    (System::Pplx, Place::H100, 8, 50.5, 65.3),
    (System::Pplx, Place::H100, 16, 110.2, 185.5),
    (System::Pplx, Place::H100, 32, 153.9, 266.3),
    (System::Pplx, Place::H100, 64, 187.5, 309.1),
    (System::Pplx, Place::Efa, 16, 214.8, 241.5),
    (System::Pplx, Place::Efa, 32, 229.1, 335.0),
    (System::Pplx, Place::Efa, 64, 266.7, 391.2),
];

/// A world that this project measured: machine, nodes, ranks of each, tokens, dispatch and combine in µs.
type Measured = (&'static str, usize, usize, usize, f64, f64);

const ONE_NODE: &str = "tokenyard, one node of H200";
const TWO_NODES: &str = "tokenyard, emulated NICs";

/// On 2 H200s, by the kernels of commit 6ac5175: benches/results/h200-x2, decode-1x2-cx7.json and, in the history of
/// the file, decode-2.json.
const MEASURED: [Measured; 6] = [
    (ONE_NODE, 1, 2, 1, 12.1, 11.1),
    (ONE_NODE, 1, 2, 16, 12.5, 12.3),
    (ONE_NODE, 1, 2, 128, 16.1, 18.0),
    (TWO_NODES, 2, 1, 1, 31.4, 26.3),
    (TWO_NODES, 2, 1, 16, 34.0, 31.7),
    (TWO_NODES, 2, 1, 128, 44.4, 58.2),
];
/// The emulated NIC, with ConnectX-7's rate. A small write takes it 7.5 us, including the link's own 2. Of many chunks
/// it copies the later ones while the link is busy with the earlier, and the last takes hardly longer than the link.
const EMULATED: &str = "400:7.2:0.3";
const EMULATED_STREAM: &str = "400:2.2:0.3";
/// Tokens up to which a message of the measured worlds is little more than one chunk.
const FEW_TOKENS: usize = 18;
/// The order of work in the measured worlds.
const MEASURED_ORDER: Order = Order { arrival_list: false, metadata_ahead: false, ..Order::DESIGN };

/// One known latency and its projection.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Point {
    pub system: String,
    pub ranks: usize,
    pub tokens: usize,
    pub phase: &'static str,
    pub known_us: f64,
    pub projected_us: f64,
    pub error_percent: f64,
}

impl Point {
    fn new(system: &str, ranks: usize, tokens: usize, combine: bool, known_us: f64, projected_us: f64) -> Point {
        let tenth = |value: f64| (value * 10.0).round() / 10.0;
        Point {
            system: system.to_owned(),
            ranks,
            tokens,
            phase: if combine { "combine" } else { "dispatch" },
            known_us,
            projected_us: tenth(projected_us),
            error_percent: tenth((projected_us / known_us - 1.0) * 100.0),
        }
    }

    pub fn is_within_limit(&self) -> bool {
        self.error_percent.abs() <= LIMIT
    }
}

/// Refuses options that would have no effect.
///
/// # Errors
/// If any option other than `--json` is given.
pub fn check(args: &SimulateArgs) -> Result<(), Refusal> {
    let given = [
        ("--nodes", args.nodes.map(|n| n.to_string())),
        ("--ranks-per-node", args.ranks_per_node.map(|n| n.to_string())),
        ("--link", args.link.clone()),
        ("--preset", args.preset.clone()),
        ("--tokens", args.tokens.as_ref().map(|list| format!("{:?}", list.0))),
        ("--chunk-rows", args.chunk_rows.map(|n| n.to_string())),
        ("--without", args.without.as_ref().map(|list| format!("{list:?}"))),
        ("--iters", args.iters.map(|n| n.to_string())),
        ("--seed", args.seed.map(|n| n.to_string())),
    ];
    match given.into_iter().find_map(|(name, value)| Some((name, value?))) {
        Some((name, value)) => Err(Refusal::of(name, value, "leave it out with --calibrate, whose worlds are fixed")),
        None => Ok(()),
    }
}

/// Projects all points and prints them.
///
/// # Errors
/// A sentence: a point could not be projected, exceeds the error limit, or could not be written.
pub fn run(json: Option<&str>, out: &Out) -> Outcome<()> {
    let bar = Progress::new(out);
    let points = points(usize::MAX, &|done, all| bar.show("calibration", done, all));
    bar.clear();
    let points = points?;
    if let Some(path) = json {
        let points = files::list(&points).map_err(|error| error.to_string())?;
        files::write(path, &format!("{{\"limit_percent\": {LIMIT:?}, \"points\": {points}}}"), out)?;
    }
    if json != Some("-") {
        say!(out, "{}", point_table(&points));
    }
    match points.iter().filter(|point| !point.is_within_limit()).count() {
        0 => Ok(()),
        outside => Err(format!("{outside} of {} projections are more than {LIMIT} % off", points.len())),
    }
}

/// All points of at most `most_ranks` ranks.
pub fn points(most_ranks: usize, show: &dyn Fn(usize, usize)) -> Outcome<Vec<Point>> {
    let mut points = Vec::new();
    let all = PUBLISHED.len() + MEASURED.len();
    for (done, &(system, place, ranks, dispatch, combine)) in PUBLISHED.iter().enumerate() {
        show(done, all);
        if ranks <= most_ranks {
            points.push(published(system, place, ranks, false, dispatch)?);
            points.push(published(system, place, ranks, true, combine)?);
        }
    }
    for (done, &(system, nodes, per_node, tokens, dispatch, combine)) in MEASURED.iter().enumerate() {
        show(PUBLISHED.len() + done, all);
        let projected = own(v3(nodes, per_node, tokens))?;
        let point = |of_combine, known, us| Point::new(system, nodes * per_node, tokens, of_combine, known, us);
        points.push(point(false, dispatch, projected.dispatch));
        points.push(point(true, combine, projected.combine));
    }
    Ok(points)
}

fn v3(nodes: usize, per_node: usize, tokens: usize) -> Shape {
    Shape { nodes, per_node, preset: &presets::PRESETS[0], tokens, seed: 1 }
}

fn published(system: System, place: Place, ranks: usize, combine: bool, known_us: f64) -> Outcome<Point> {
    let (name, model, nvlink_rate) = match (system, place) {
        (System::DeepEp, Place::H800) => ("DeepEP V1 on H800, CX-7", "cx7", H800_NVLINK),
        (System::DeepEp, _) => ("DeepEP V1 on H100, CX-7", "cx7", H100_NVLINK),
        (System::Pplx, Place::Efa) => ("pplx-garden on EFA", "efa-p5en", H100_NVLINK),
        (System::Pplx, _) => ("pplx-garden on CX-7", "cx7", H100_NVLINK),
    };
    let link = models::parse(model).map_err(|error| error.to_string())?;
    let site = Site { system, shape: v3(ranks / 8, 8, 128), link, nvlink_rate, combine };
    Ok(Point::new(name, ranks, 128, combine, known_us, peers::project(&site)?))
}

/// Projected medians of a world of this project.
fn own(shape: Shape) -> Outcome<Pair<f64>> {
    let emulated = if shape.tokens <= FEW_TOKENS { EMULATED } else { EMULATED_STREAM };
    let link = models::parse(if shape.nodes > 1 { emulated } else { "none" }).map_err(|error| error.to_string())?;
    let plan = Plan::new(shape, link.nics, MEASURED_ORDER, None);
    let (dispatch, combine) = super::run(&plan, &link, Costs::H200, 20, &|_| {})?;
    let median = |us: Vec<f64>| Percentiles::of(us).map_or(0.0, |p| p.p50);
    Ok(Pair { dispatch: median(dispatch.us), combine: median(combine.us) })
}

fn point_table(points: &[Point]) -> String {
    let head = ["system", "ranks", "tokens", "phase", "known", "projected", "error %", "within 15 %"];
    let rows: Vec<Vec<String>> = points
        .iter()
        .map(|p| {
            let within = if p.is_within_limit() { "yes" } else { "NO" };
            vec![
                p.system.clone(),
                p.ranks.to_string(),
                p.tokens.to_string(),
                p.phase.to_owned(),
                format!("{:.1}", p.known_us),
                format!("{:.1}", p.projected_us),
                format!("{:+.1}", p.error_percent),
                within.to_owned(),
            ]
        })
        .collect();
    format!("V3 shape, nodes of 8, times in us\n{}", table(&head, &rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_written_and_listed_with_its_error() {
        let point = Point::new("a system", 16, 128, true, 200.0, 190.06);
        let wanted = serde_json::json!({
            "system": "a system", "ranks": 16, "tokens": 128, "phase": "combine", "known_us": 200.0,
            "projected_us": 190.1, "error_percent": -5.0,
        });
        assert_eq!(serde_json::to_value(&point).unwrap(), wanted);
        let over = Point::new("another", 8, 64, false, 50.0, 57.6);
        assert_eq!((over.phase, over.error_percent, over.is_within_limit()), ("dispatch", 15.2, false));
        assert!(Point::new("at the limit", 8, 64, false, 50.0, 57.5).is_within_limit());
        assert!(!Point::new("below", 8, 64, false, 50.0, 42.4).is_within_limit());
        let table = point_table(&[point, over]);
        let cells = |line: &str| -> Vec<String> {
            line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_string).collect()
        };
        let lines: Vec<Vec<String>> = table.lines().skip(1).map(cells).collect();
        assert_eq!(lines[0], ["system", "ranks", "tokens", "phase", "known", "projected", "error %", "within 15 %"]);
        assert_eq!(lines[2], ["a system", "16", "128", "combine", "200.0", "190.1", "-5.0", "yes"]);
        assert_eq!(lines[3], ["another", "8", "64", "dispatch", "50.0", "57.6", "+15.2", "NO"]);
    }

    #[test]
    fn known_latencies_stand_beside_the_worlds_that_they_are_of() {
        let points = points(8, &|_, _| {}).unwrap();
        let found: Vec<_> = points
            .iter()
            .map(|point| (point.system.as_str(), point.ranks, point.tokens, point.phase, point.known_us))
            .collect();
        let (one, two) = ("tokenyard, one node of H200", "tokenyard, emulated NICs");
        let wanted = [
            ("DeepEP V1 on H800, CX-7", 8, 128, 77.0, 114.0),
            ("DeepEP V1 on H100, CX-7", 8, 128, 42.6, 72.0),
            ("pplx-garden on CX-7", 8, 128, 50.5, 65.3),
            (one, 2, 1, 12.1, 11.1),
            (one, 2, 16, 12.5, 12.3),
            (one, 2, 128, 16.1, 18.0),
            (two, 2, 1, 31.4, 26.3),
            (two, 2, 16, 34.0, 31.7),
            (two, 2, 128, 44.4, 58.2),
        ];
        let both = |(system, ranks, tokens, dispatch, combine)| {
            [(system, ranks, tokens, "dispatch", dispatch), (system, ranks, tokens, "combine", combine)]
        };
        assert_eq!(found, wanted.map(both).concat());
    }
}
