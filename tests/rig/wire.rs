//! The table of `tokenyard wire`, read and checked.

use serde_json::Value;
use std::process::Command;

/// Too few pairs and too short slices to hold anything to a bar.
pub const SHORT: &str = "--pairs 2 --slice-ms 5";

/// The table that the command prints, and a status that fits it.
pub fn table(mut command: Command) -> Value {
    let output = command.args(["--json", "-"]).output().unwrap();
    let table = serde_json::from_slice(&output.stdout);
    let table: Value = table.unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    let rows = table["rows"].as_array().unwrap();
    let beyond = rows.iter().any(|row| row["within"] == false);
    assert_eq!(output.status.code(), Some(i32::from(beyond)), "{table}: {}", String::from_utf8_lossy(&output.stderr));
    table
}

/// Rows, medians and bars of a table of two short slices.
pub fn check(table: &Value, transport: &str, with_bars: usize) {
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
