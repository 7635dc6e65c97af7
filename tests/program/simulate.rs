//! `tokenyard simulate` as its users see it: exit status, sentences, and the objects it prints.

use crate::rig;

use std::process::Output;

use rig::text;
use serde_json::Value;

fn run(words: &str) -> Output {
    rig::run(&format!("simulate {words}"))
}

fn object(words: &str) -> Value {
    rig::object(&format!("simulate {words} --json -"))
}

fn refusal(words: &str) -> String {
    rig::refusal(&format!("simulate {words}"))
}

#[test]
fn unusable_arguments_are_named_with_their_value_and_what_would_do() {
    let world = "--nodes 2 --ranks-per-node 2 --link cx7";
    for (typed, named, advice) in [
        ("--nodes 2 --ranks-per-node 8", "--link", "give it"),
        ("--ranks-per-node 8 --link cx7", "--nodes", "give it"),
        ("--nodes 0 --ranks-per-node 8 --link cx7", "--nodes is `0`", "from 1 to 2048"),
        ("--nodes 257 --ranks-per-node 8 --link cx7", "--nodes is `257`", "256 nodes of 8"),
        ("--nodes 2 --ranks-per-node 17 --link cx7", "--ranks-per-node is `17`", "from 1 to 16"),
        ("--nodes 2 --ranks-per-node 8 --link cx8", "--link is `cx8`", "efa-p5en"),
        ("--nodes 2 --ranks-per-node 8 --link 400:1e9:0", "--link is `400:1e9:0`", "1000000 us"),
        ("--nodes 256 --ranks-per-node 8 --link cx7 --tokens 1048576", "--tokens is `1048576`", "give at most"),
        (&format!("{world} --preset v4"), "--preset is `v4`", "kimi-k2"),
        (&format!("{world} --tokens many"), "--tokens is `many`", "separated by commas"),
        (&format!("{world} --chunk-rows 0"), "--chunk-rows is `0`", "whole number"),
        (&format!("{world} --iters 0"), "--iters is `0`", "whole number"),
        (&format!("{world} --seed one"), "--seed is `one`", "whole number"),
        (
            &format!("{world} --without luck"),
            "--without is `luck`",
            "arrival-list, meta-ahead, early-sums or spread-meta",
        ),
        (&format!("{world} --json /no/such/folder/a.json"), "--json is `/no/such/folder/a.json`", "folder that exists"),
        (&format!("{world} --calibrate"), "--nodes is `2`", "leave it out"),
    ] {
        let sentence = refusal(typed);
        assert!(sentence.contains(named), "{typed}: {sentence}");
        assert!(sentence.contains(advice), "{typed}: {sentence}");
    }
}

#[test]
fn the_object_has_the_keys_of_the_contract() {
    let found = object("--nodes 2 --ranks-per-node 4 --link cx7 --iters 2 --seed 9");
    for (key, value) in [("nodes", 2), ("ranks_per_node", 4), ("ranks", 8), ("tokens", 128), ("seed", 9), ("iters", 2)]
    {
        assert_eq!(found[key], value, "{key}");
    }
    assert_eq!((found["link"].as_str(), found["preset"].as_str()), (Some("cx7"), Some("v3")));
    for phase in ["dispatch", "combine"] {
        let times = &found[format!("{phase}_us")];
        let at = |key: &str| times[key].as_f64().unwrap_or_else(|| panic!("{phase}_us has no {key}: {times}"));
        let floor = found["floor_us"][phase].as_f64().expect("floor");
        assert!(floor > 2.0 && floor < at("min") && at("min") <= at("p50") && at("p50") <= at("p95"), "{found}");
        assert!(at("p95") <= at("p99") && at("p99") <= at("max"), "{found}");
        assert!(found["messages_per_rank"][phase].as_f64().expect("messages") >= 1.0, "{found}");
        let bytes = |path: &str| found["bytes_per_rank"][format!("{phase}_{path}")].as_u64().expect("bytes");
        assert!(bytes("wire") > 900_000 && bytes("nvlink") > 900_000, "{found}");
    }
}

#[test]
fn one_node_has_no_messages_and_a_sweep_has_a_result_for_each_count() {
    let found = object("--nodes 1 --ranks-per-node 8 --link cx7 --tokens 16,128 --iters 2");
    let results = found["results"].as_array().expect("results");
    assert_eq!(results.len(), 2);
    for result in results {
        assert_eq!(result["messages_per_rank"]["dispatch"], 0.0);
        assert_eq!(result["bytes_per_rank"]["combine_wire"], 0);
    }
    assert!(results[0]["dispatch_us"]["p50"].as_f64() < results[1]["dispatch_us"]["p50"].as_f64());
}

#[test]
fn the_same_command_prints_the_same() {
    let words = "--nodes 3 --ranks-per-node 2 --link 100:5:0.2 --preset qwen3-235b --tokens 32 --iters 2";
    let (once, again) = (run(words), run(words));
    assert!(once.status.success() && once.stdout == again.stdout, "{}{}", text(&once.stdout), text(&again.stdout));
    let table = text(&once.stdout);
    assert!(table.contains("projected: 3 nodes x 2 over 100:5:0.2") && table.contains("floor"), "{table}");
    assert!(once.stderr.is_empty(), "{}", text(&once.stderr));
}

#[test]
fn the_object_goes_to_a_file_beside_the_table() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.json");
    let output = run(&format!("--nodes 2 --ranks-per-node 1 --link none --iters 1 --json {}", path.display()));
    assert!(output.status.success() && text(&output.stdout).contains("projected"), "{}", text(&output.stderr));
    let found: Value = serde_json::from_str(&std::fs::read_to_string(&path).expect("written")).expect("JSON");
    assert_eq!(found["bytes_per_rank"]["dispatch_nvlink"], 0);
}
