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
