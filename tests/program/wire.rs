//! `tokenyard wire`: this library beside a bare loop over the same network.

use crate::{double, rig};

use rig::{command, refusal, text};
use serde_json::Value;
use std::process::Command;
use tokenyard::internals::transport::network::libfabric::libfabric_sys::{Library, VARIABLE};

/// Too few pairs and too short slices to hold anything to a bar.
const SHORT: &str = "--pairs 2 --slice-ms 5";

fn table(mut command: Command) -> Value {
    let output = command.args(["--json", "-"]).output().unwrap();
    let table = serde_json::from_slice(&output.stdout);
    let table: Value = table.unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)));
    let rows = table["rows"].as_array().unwrap();
    let beyond = rows.iter().any(|row| row["within"] == false);
    assert_eq!(output.status.code(), Some(i32::from(beyond)), "{table}: {}", text(&output.stderr));
    table
}

fn check(table: &Value, transport: &str, with_bars: usize) {
    assert_eq!((&table["transport"], &table["pairs"], &table["slice_ms"]), (&transport.into(), &2.into(), &5.into()));
    let rows = table["rows"].as_array().unwrap();
    let units: Vec<&str> = rows.iter().map(|row| row["unit"].as_str().unwrap()).collect();
    assert_eq!(units, ["us", "bytes/s", "bytes/s", "ns", "ns"]);
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        assert!(number("own") > 0.0 && number("bare") > 0.0, "{row}");
        let result = |name: &str| row["result"][name].as_f64().unwrap();
        assert!(result("low") <= result("median") && result("median") <= result("high"), "{row}");
        // The medians of two pairs are means, or the upper values: by whichever, they compare as no pair is beyond.
        // A pause of the machine in one slice may make the pairs differ at will.
        let rough = match row["compared"].as_str() {
            Some("ratio") => number("own") / number("bare"),
            _ => number("own") - number("bare"),
        };
        let slack = 1e-9 * (1.0 + rough.abs());
        assert!(result("low") - slack <= rough && rough <= result("high") + slack, "{row}");
    }
    assert_eq!(rows.iter().filter(|row| row.get("bar").is_some()).count(), with_bars);
}

#[test]
fn both_ways_are_measured_over_tcp() {
    if let Err(why) = Library::open() {
        println!("skipped: {why}");
        assert_ne!(std::env::var("TOKENYARD_STRICT").as_deref(), Ok("1"), "{why}");
        return;
    }
    check(&table(command(&format!("wire --transport libfabric:tcp {SHORT}"))), "libfabric:tcp", 3);
}

#[test]
fn both_ways_are_measured_over_the_double_of_efa() {
    let Some(library) = double::efa() else { return };
    let mut wire = command(&format!("wire --transport libfabric:efa {SHORT}"));
    wire.env(VARIABLE, library);
    check(&table(wire), "libfabric:efa", 5);
}

#[test]
fn what_cannot_be_measured_is_refused_and_what_fails_names_itself() {
    assert!(refusal("wire --transport sim").contains("give one over libfabric"));
    assert!(refusal("wire --transport libfabric:tcp --pairs 0").contains("--pairs"));
    let orphan = command("wire --transport libfabric:tcp --as-rank").output().unwrap();
    assert!(!orphan.status.success() && text(&orphan.stderr).contains("--as-rank"), "{}", text(&orphan.stderr));
    let nowhere = command(&format!("wire --transport libfabric:tcp {SHORT}")).env(VARIABLE, "/nowhere.so").output();
    let nowhere = nowhere.unwrap();
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(text(&nowhere.stderr).contains("/nowhere.so"), "{}", text(&nowhere.stderr));
}
