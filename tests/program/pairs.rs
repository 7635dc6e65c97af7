//! The verdicts of `tests/gpu.sh pair` on two builds: benches/pairs.py on made-up numbers, and the whole on the CPU
//! device.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

/// p50s of build A, of build A again, and of build B, by alternation.
type Runs<'a> = [&'a [f64]; 3];

const QUIET: &[f64] = &[100.0, 100.2, 99.9, 100.1, 100.0, 99.8, 100.1];
const NOISY: &[f64] = &[100.0, 108.0, 93.0, 104.0, 97.0, 101.0, 95.0];

/// Runs an interpreter from the root of this repository; none where it lacks.
fn interpret(interpreter: &str, args: &[&str], variables: &[(&str, &str)]) -> Option<Output> {
    let mut command = Command::new(interpreter);
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(args).envs(variables.iter().copied());
    command.output().inspect_err(|why| eprintln!("skipped: {interpreter} cannot be started ({why})")).ok()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn times(of: &[f64], factor: f64) -> Vec<f64> {
    of.iter().map(|us| us * factor).collect()
}

fn result(dispatch_us: f64, ranks_per_node: u32) -> Value {
    json!({
        "tokens": 128, "world": 2, "ranks_per_node": ranks_per_node, "verified": true,
        "dispatch_us": {"p50": dispatch_us}, "combine_us": {"p50": 50.0},
    })
}

/// Writes a row's files as gpu.sh does.
fn write(folder: &Path, row: &str, runs: Runs<'_>, ranks_per_node: u32) {
    for (build, p50s) in ["a", "e", "b"].into_iter().zip(runs) {
        for (at, us) in p50s.iter().enumerate() {
            let found = json!({"results": [result(*us, ranks_per_node)]});
            std::fs::write(folder.join(format!("{row}.{}.{build}.json", at + 1)), found.to_string()).unwrap();
        }
    }
}

/// The table of some rows, and whether its status was 0; none without Python.
fn table(folder: &Path, rows: &str, ptxas: &[&str]) -> Option<(String, bool)> {
    let folder = folder.display().to_string();
    let output = interpret("python3", &[&["benches/pairs.py", &folder, "7", rows], ptxas].concat(), &[])?;
    assert_eq!(text(&output.stderr), "");
    Some((text(&output.stdout), output.status.success()))
}

/// The words of the line of a row's dispatch.
fn dispatch_of(table: &str, row: &str) -> String {
    let found = table.lines().find(|line| line.starts_with(&format!("{row} ")) && line.contains("dispatch"));
    found.unwrap_or_else(|| panic!("{row} is not in\n{table}")).split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_build_is_judged_by_one_percent_in_a_node_and_by_the_equal_pair_between_nodes() {
    let folder = tempfile::tempdir().unwrap();
    let b = |factor| times(QUIET, factor);
    let noisy = |factor| times(NOISY, factor);
    // Row, A and A again, B, ranks of a node, and the verdict.
    let rows = [
        ("same", QUIET, b(1.0), 2, "100.00 100.00 +0.0 % +0.0 % 0.2 % 1.0 % within"),
        ("under", QUIET, b(1.009), 2, "100.00 100.90 +0.9 % +0.0 % 0.2 % 1.0 % within"),
        ("over", QUIET, b(1.011), 2, "100.00 101.10 +1.1 % +0.0 % 0.2 % 1.0 % SLOWER"),
        ("faster", QUIET, b(0.98), 2, "100.00 98.00 -2.0 % +0.0 % 0.2 % 1.0 % faster"),
        ("unclear", NOISY, noisy(1.03), 2, "100.00 103.00 +3.0 % +0.0 % 7.0 % 1.0 % UNCLEAR"),
        ("nodes", NOISY, noisy(1.03), 1, "100.00 103.00 +3.0 % +0.0 % 7.0 % 7.0 % within"),
        ("nodes-quiet", QUIET, b(1.009), 1, "100.00 100.90 +0.9 % +0.0 % 0.2 % 0.2 % SLOWER"),
        ("nodes-slow", NOISY, noisy(1.1), 1, "100.00 110.00 +10.0 % +0.0 % 7.0 % 7.0 % SLOWER"),
    ];
    for (row, a, b, ranks_per_node, line) in &rows {
        write(folder.path(), row, [a, a, b], *ranks_per_node);
        let Some((table, good)) = table(folder.path(), row, &[]) else { return };
        assert_eq!(dispatch_of(&table, row), format!("{row} 128 dispatch {line}"));
        assert_eq!(good, line.ends_with("within") || line.ends_with("faster"), "{table}");
    }
    // One bad row among good ones decides.
    let (all, good) = table(folder.path(), "same,over,faster", &[]).unwrap();
    assert!(!good && all.lines().count() == 7, "{all}");
    // The equal pair is judged by its own column, and is no part of B's.
    write(folder.path(), "again", [QUIET, &times(QUIET, 1.02), QUIET], 2);
    let (again, good) = table(folder.path(), "again", &[]).unwrap();
    assert!(good && dispatch_of(&again, "again").contains(" +0.0 % +2.0 % "), "{again}");
}

#[test]
fn every_point_and_way_of_a_sweep_has_its_own_line() {
    let folder = tempfile::tempdir().unwrap();
    let point = |tokens: u32, dispatch: f64, combine: f64| {
        json!({
            "tokens": tokens, "world": 2, "ranks_per_node": 2, "verified": true,
            "dispatch_us": {"p50": dispatch, "p99": 1.0}, "combine_us": {"p50": combine, "p99": 2.0},
        })
    };
    let builds = [
        ("a", [point(1, 10.0, 30.0), point(128, 20.0, 40.0)]),
        ("e", [point(1, 10.0, 30.0), point(128, 20.0, 40.0)]),
        ("b", [point(1, 10.05, 30.0), point(128, 19.0, 42.0)]),
    ];
    for (build, results) in &builds {
        for at in 1..=7 {
            let path = folder.path().join(format!("sweep.{at}.{build}.json"));
            std::fs::write(path, json!({"results": results}).to_string()).unwrap();
        }
    }
    let Some((found, good)) = table(folder.path(), "sweep", &[]) else { return };
    let lines: Vec<String> =
        found.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).take(5).collect();
    let wanted = [
        "row tokens way A B B/A A'/A spread bound verdict",
        "sweep 1 dispatch 10.00 10.05 +0.5 % +0.0 % 0.0 % 1.0 % within",
        "sweep 1 combine 30.00 30.00 +0.0 % +0.0 % 0.0 % 1.0 % within",
        "sweep 128 dispatch 20.00 19.00 -5.0 % +0.0 % 0.0 % 1.0 % faster",
        "sweep 128 combine 40.00 42.00 +5.0 % +0.0 % 0.0 % 1.0 % SLOWER",
    ];
    assert_eq!(lines, wanted);
    assert!(!good);
}

#[test]
fn runs_that_are_missing_or_wrong_fail_their_row() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "short", [QUIET, QUIET, QUIET], 2);
    std::fs::remove_file(folder.path().join("short.7.e.json")).unwrap();
    std::fs::write(folder.path().join("short.3.b.json"), "{\"resul").unwrap();
    let Some((short, good)) = table(folder.path(), "short,never", &[]) else { return };
    assert!(!good && short.contains("FAILED: of 7 runs there are 7 of A, 6 of B, 6 of A'"), "{short}");
    assert!(short.contains("FAILED: of 7 runs there are 0 of A, 0 of B, 0 of A'"), "{short}");
    write(folder.path(), "wrong", [QUIET, QUIET, QUIET], 2);
    let mut unverified = result(100.0, 2);
    unverified["verified"] = json!(false);
    std::fs::write(folder.path().join("wrong.2.b.json"), unverified.to_string()).unwrap();
    let (wrong, good) = table(folder.path(), "wrong", &[]).unwrap();
    assert!(!good && wrong.contains("FAILED: results of b2 are not right"), "{wrong}");
}

#[test]
fn kernels_are_compared_by_name_and_may_not_take_more() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "same", [QUIET, QUIET, QUIET], 2);
    let head = "kernel arch registers stack spill_stores spill_loads\n";
    let path = |name: &str| folder.path().join(name).display().to_string();
    let compare = |a: &str, b: &str| {
        std::fs::write(path("a.txt"), format!("{head}{a}nvcc_seconds 63.1\n")).unwrap();
        std::fs::write(path("b.txt"), format!("{head}{b}nvcc_seconds 59.0\n")).unwrap();
        table(folder.path(), "same", &[&path("a.txt"), &path("b.txt")])
    };
    let (send, combine) = ("send sm_90a 128 0 0 0\n", "combine sm_90a 96 16 0 0\n");
    let Some((alike, good)) = compare(&format!("{send}{combine}"), &format!("{combine}{send}")) else { return };
    assert!(
        good && alike.ends_with("2 of 2 kernels of both builds are alike; the most registers: 128 -> 128\n"),
        "{alike}"
    );
    let (fewer, good) = compare(send, &format!("send sm_90 120 0 0 0\n{combine}")).unwrap();
    let rest = "0 bytes of stack, 0 + 0 spilled";
    let change = format!("send sm_90: 128 registers, {rest} -> 120 registers, {rest}\n");
    assert!(good && fewer.contains(&change) && fewer.contains("combine sm_90: in B alone, 96 registers"), "{fewer}");
    for worse in ["send sm_90a 130 0 0 0\n", "send sm_90a 128 8 4 0\n", "send sm_90a 128 8 0 4\n"] {
        let (table, good) = compare(&format!("{send}{combine}"), &format!("{worse}{combine}")).unwrap();
        assert!(!good && table.contains("spilled WORSE\n") && table.contains("1 of 2 kernels"), "{table}");
    }
    let (none, good) = compare(send, "other sm_90a 128 0 0 0\n").unwrap();
    assert!(!good && none.contains("the builds have no kernel in common"), "{none}");
    let (lacking, good) = table(folder.path(), "same", &[&path("a.txt"), &path("c.txt")]).unwrap();
    assert!(!good && lacking.contains(&format!("there is no {}", path("c.txt"))), "{lacking}");
}

#[test]
fn a_pair_runs_alternately_on_the_cpu_device_and_is_compared() {
    let folder = tempfile::tempdir().unwrap();
    let places = ["a", "b"].map(|name| {
        let place = folder.path().join(name);
        std::fs::create_dir(&place).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tokenyard"), place.join("tokenyard")).unwrap();
        place.display().to_string()
    });
    let out = folder.path().join("out").display().to_string();
    let variables = [("DEVICE", "cpu"), ("ROUNDS", "2"), ("OUT", out.as_str())];
    let Some(output) = interpret("bash", &["tests/gpu.sh", "pair", &places[0], &places[1]], &variables) else { return };
    let table = text(&output.stdout);
    // Verdicts on so few runs of so small calls are anyone's guess; none may fail to run.
    assert_eq!(text(&output.stderr), "");
    assert!(table.contains("2 alternations") && !table.contains("FAILED"), "{table}");
    for row in ["decode-2", "decode-graph-2", "prefill-2", "nodes-2x1-cx7"] {
        let lines = table.lines().filter(|line| line.starts_with(&format!("{row} "))).count();
        assert_eq!(lines, if row == "prefill-2" { 2 } else { 4 }, "{table}");
    }
    assert_eq!(table, std::fs::read_to_string(format!("{out}/table-pair.txt")).unwrap());
    let mut kept: Vec<_> = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    kept.sort();
    assert_eq!(kept, ["runs.tgz", "table-pair.txt"]);
}

#[test]
fn a_pair_that_does_not_exist_or_has_too_few_alternations_is_refused() {
    let Some(output) = interpret("bash", &["tests/gpu.sh", "pair", "/no/a", "/no/b", "fast"], &[("DEVICE", "cpu")])
    else {
        return;
    };
    let sentence = text(&output.stderr);
    assert!(!output.status.success() && sentence.contains("no pair fast; give some of decode, prefill"), "{sentence}");
    let output = interpret("bash", &["tests/gpu.sh", "pair", "/no/a", "/no/b"], &[("ROUNDS", "6")]).unwrap();
    let sentence = text(&output.stderr);
    assert!(!output.status.success() && sentence.contains("ROUNDS is 6: fewer than 7"), "{sentence}");
}
