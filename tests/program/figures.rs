//! The output of benches/figures.py for results, for README.md and docs/figures.md among others; and tests/gpu.sh,
//! which shows it, reports what it cannot do.

use crate::rig;

use std::path::Path;
use std::process::{Command, Output};

use rig::{object, text};
use serde_json::{Value, json};

/// Runs a file of this repository; none where its interpreter lacks.
fn interpret(interpreter: &str, file: &str, args: &[&str]) -> Option<Output> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let output = Command::new(interpreter).arg(file).args(args).output();
    output.inspect_err(|why| eprintln!("skipped: {interpreter} cannot be started ({why})")).ok()
}

#[test]
fn each_result_becomes_a_line_and_decode_steps_a_word_on_their_p99() {
    let mut decode =
        object("bench --device cpu --world 2 --hidden 128 --experts 4 --top-k 2 --tokens 4 --iters 3 --json -");
    decode["dispatch_us"] = json!({"p50": 20.0, "p99": 26.0});
    decode["combine_us"] = json!({"p50": 20.0, "p99": 26.1});
    decode["floor_us"] = json!({"dispatch": 8.0, "combine": 0.0});
    let prefill = [("tokens", json!(4096)), ("dispatch_us", json!({"p50": 366.0, "p99": 999.0}))];
    let mut second = decode.clone();
    prefill.into_iter().for_each(|(name, value)| second[name] = value);
    let lines_of = |found: &Value| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r.json");
        std::fs::write(&path, found.to_string()).unwrap();
        let output = interpret("python3", "benches/figures.py", &["lines", &path.display().to_string()])?;
        assert!(output.status.success(), "{}", text(&output.stderr));
        Some(text(&output.stdout))
    };
    let first =
        "T=4: dispatch 20.0 (p99 26.0 steady, floor 8.0, x 2.5)  combine 20.0 (p99 26.1 UNSTEADY, floor –, x –)\n";
    let Some(one) = lines_of(&decode) else { return };
    assert_eq!(one, first);
    let swept = lines_of(&json!({"results": [decode, second]})).unwrap();
    assert_eq!(swept.lines().count(), 2);
    assert!(swept.starts_with(first) && swept.contains("T=4096: dispatch 366 (p99 999, floor 8.0"), "{swept}");
}

#[test]
fn each_value_of_a_result_is_in_its_column() {
    let result = json!({
        "world": 6, "ranks_per_node": 6, "device_name": "GPU", "tokens": 77, "commit": "0123456789",
        "dispatch_us": {"p50": 12.34, "p99": 99.96, "min": 1.0, "p95": 2.0, "max": 3.0, "mean": 4.0},
        "combine_us": {"p50": 150.4, "p99": 250.6, "min": 5.0, "p95": 6.0, "max": 7.0, "mean": 8.0},
        "floor_us": {"dispatch": 4.5, "combine": 50.5},
    });
    let with = |field: &str, value: Value| {
        let mut result = result.clone();
        result[field] = value;
        result
    };
    let mut results = json!([
        result,
        with("ranks_per_node", json!("4,2")),
        with("ranks_per_gpu", json!(3)),
        with("device_name", json!("CPU")),
        with("floor_us", json!({"dispatch": 0.0, "combine": 0.0})),
    ]);
    (results[3]["ranks_per_gpu"], results[3]["ranks_per_node"]) = (json!(2), json!(3));
    let script = "import json, sys; sys.path.insert(0, 'benches'); import figures; \
                  print(figures.table(('h/r', result) for result in json.loads(sys.argv[1])), end='')";
    let mut python = Command::new("python3");
    python.current_dir(env!("CARGO_MANIFEST_DIR")).args(["-B", "-c", script, &results.to_string()]);
    let Ok(output) = python.output().inspect_err(|why| eprintln!("skipped: python3 cannot be started ({why})")) else {
        return;
    };
    let row = |gpus: &str, floors: [&str; 4]| {
        let [dispatch, x, combine, y] = floors;
        format!("| h/r | {gpus} | 77 | 12.3 (100.0) | {dispatch} | {x} | 150 (251) | {combine} | {y} | 0123456 |")
    };
    let floors = ["4.5", "2.7", "50.5", "3.0"];
    let wanted = [
        "| run | GPUs | tokens | dispatch | floor | × | combine | floor | × | commit |".to_string(),
        "|---|---|---|---|---|---|---|---|---|---|".to_string(),
        row("6 × GPU", floors),
        row("6 × GPU, nodes of 4,2", floors),
        row("6 ranks, 3 a GPU", floors),
        row("6 ranks, 2 a CPU, nodes of 3", floors),
        row("6 × GPU", ["–", "–", "–", "–"]),
    ];
    let found = text(&output.stdout);
    assert_eq!(found.lines().collect::<Vec<_>>(), wanted, "{}", text(&output.stderr));
}

#[test]
fn merged_files_keep_every_result_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let write = |name: &str, found: &Value| std::fs::write(path(name), found.to_string()).unwrap();
    write("b.json", &json!({"results": [{"tokens": 1}, {"tokens": 2}]}));
    write("a.json", &json!({"tokens": 3, "sms": 4}));
    let files = [path("m.json"), path("b.json"), path("a.json")];
    let args: Vec<&str> = std::iter::once("merge").chain(files.iter().map(String::as_str)).collect();
    let Some(output) = interpret("python3", "benches/figures.py", &args) else { return };
    assert!(output.status.success(), "{}", text(&output.stderr));
    let merged: Value = serde_json::from_str(&std::fs::read_to_string(path("m.json")).unwrap()).unwrap();
    assert_eq!(merged, json!({"results": [{"tokens": 1}, {"tokens": 2}, {"tokens": 3, "sms": 4}]}));
}

#[test]
fn readme_and_figures_show_the_results_that_are_kept() {
    let Some(output) = interpret("python3", "benches/figures.py", &["readme", "--check"]) else { return };
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn gpu_checks_refuse_a_section_that_they_do_not_have() {
    let Some(output) = interpret("bash", "tests/gpu.sh", &["run", "/no/binaries", "/no/results", "decode", "fast"])
    else {
        return;
    };
    let sentence = text(&output.stderr);
    assert!(!output.status.success() && sentence.contains("no section fast; give some of checks verify"), "{sentence}");
}
