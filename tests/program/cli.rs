//! The program as its users see it: exit status, sentences, and the objects it prints. On the CPU device.

use crate::rig;

use std::process::Command;
use std::time::{Duration, Instant};

use rig::{SHAPE, SMALL, command, object, refusal, run, text};
use serde_json::Value;

#[test]
fn unusable_arguments_are_named_with_their_value_and_what_would_do() {
    // What is typed; the argument and its value in the sentence; the valid values.
    for (typed, named, advice) in [
        ("bench --world 0", "--world is `0`", "from 1 to 512"),
        ("bench --world 513", "--world is `513`", "from 1 to 512"),
        ("bench --device cpu --world 65", "--world is `65`", "1 to 64, or plan"),
        ("plan --world 66 --ranks-per-node 1", "--ranks-per-node is `1,1", "64 nodes"),
        ("bench --world many", "--world is `many`", "from 1 to 512"),
        ("bench --device gpu", "--device is `gpu`", "cpu or cuda"),
        ("bench --launch fork", "--launch is `fork`", "threads, processes or env"),
        ("bench --preset v4", "--preset is `v4`", "kimi-k2"),
        ("bench --hidden 0", "--hidden is `0`", "whole number"),
        ("bench --hidden 7000", "--hidden is `7000`", "multiple of 128"),
        ("bench --preset qwen3-235b --hidden 100", "--hidden is `100`", "multiple of 8"),
        ("bench --preset gpt-oss-120b --dtype fp8", "--hidden is `2880`", "multiple of 128"),
        ("bench --experts 0", "--experts is `0`", "whole number"),
        ("bench --experts 20000 --world 2", "--experts is `20000`", "2047"),
        ("bench --experts 1365 --world 1 --duplicates 0", "--experts is `1365`", "1364"),
        ("bench --experts 819 --world 1 --top-k 16 --duplicates 0", "--experts is `819`", "818"),
        ("bench --device cpu --experts 16000 --world 8", "--experts is `16000`", "must not exceed 8192"),
        ("bench --world 2 --ranks-per-node 1 --max-tokens 1000000", "--max-tokens is `1000000`", "use 1 to"),
        ("bench --top-k 33", "--top-k is `33`", "from 1 to 32"),
        ("bench --experts 4 --top-k 5", "--top-k is `5`", "1 to 4"),
        ("bench --dtype int8", "--dtype is `int8`", "fp8, bf16, fp16 or fp32"),
        ("bench --scales f64", "--scales is `f64`", "f32 or ue8m0"),
        ("bench --dtype bf16 --scales f32", "--scales is `f32`", "--dtype fp8"),
        ("bench --dtype bf16 --quantize", "--quantize is `given`", "--dtype fp8"),
        ("bench --preset qwen3-235b --quantize", "--quantize is `given`", "these are bf16"),
        ("bench --quantize=yes", "--quantize is `yes`", "leave the value out"),
        ("bench --partial bf16", "--partial is `bf16`", "same, fp32 or fp8"),
        ("bench --preset gpt-oss-120b --partial fp8", "--hidden is `2880`", "fp8 partial rows"),
        ("bench --combine-dtype fp8", "--combine-dtype is `fp8`", "bf16, fp16 or fp32"),
        ("bench --tokens 1,-2", "--tokens is `1,-2`", "separated by commas"),
        ("bench --tokens 1,,2", "--tokens is `1,,2`", "separated by commas"),
        ("bench --tokens 64 --max-tokens 32", "--max-tokens is `32`", "at least 64"),
        ("bench --max-tokens 0", "--max-tokens is `0`", "whole number"),
        ("bench --routing random", "--routing is `random`", "uniform"),
        ("bench --routing hot:0", "--routing is `hot:0`", "at least 1"),
        ("bench --routing hot:999", "--routing is `hot:999`", "at most 256"),
        ("bench --experts 12 --top-k 2 --routing v3-groups", "--routing is `v3-groups`", "multiple of 8"),
        ("bench --routing file:/no/such/file", "--routing is `file:/no/such/file`", "cannot be read"),
        ("bench --weights never", "--weights is `never`", "dispatch, combine or none"),
        ("bench --layout token --weights combine", "--weights is `combine`", "dispatch or none"),
        ("bench --layout rows", "--layout is `rows`", "contiguous, masked or token"),
        ("bench --align 0", "--align is `0`", "whole number"),
        ("bench --layout masked --align 128", "--align is `128`", "leave it out"),
        ("bench --device cpu --capacity 2147483647", "--capacity is `2147483647`", "give fewer"),
        (
            "bench --device cpu --world 4 --max-tokens 1000000 --hidden 1048576",
            "--max-tokens is `1000000`",
            "--capacity",
        ),
        ("bench --capacity 0", "--capacity is `0`", "whole number"),
        ("bench --mode eager", "--mode is `eager`", "fused, split, graph or counts"),
        ("bench --device cpu --sms 1", "--sms is `1`", "at least 2"),
        ("bench --iters 0", "--iters is `0`", "whole number"),
        ("bench --warmup -1", "--warmup is `-1`", "whole number"),
        ("bench --seed one", "--seed is `one`", "whole number"),
        ("bench --seed 1 --seed 2", "--seed", "once"),
        ("bench --device cuda --world-mode one-thread", "--", "cpu"),
        ("bench --device cpu --world-mode one-thread --launch processes", "--world-mode is `one-thread`", "threads"),
        ("bench --check sometimes", "--check is `sometimes`", "all, first"),
        ("bench --timeout-ms 0", "--timeout-ms is `0`", "whole number"),
        ("bench --json /no/such/folder/a.json", "--json is `/no/such/folder/a.json`", "folder that exists"),
        ("bench --plot -", "--plot is `-`", "give a path"),
        ("bench --json /dev/fd/999", "--json is `/dev/fd/999`", "cannot be written"),
        ("bench --hidden", "--hidden has no value", "give one"),
        ("bench --ragged=3", "--ragged is `3`", "leave the value out"),
        ("bench --hiden 7168", "`--hiden` is not known", "--hidden"),
        ("bench 7168", "`7168` is not known", "--help"),
        ("bench --ranks-per-node 3,6", "--ranks-per-node is `3,6`", "agree"),
        ("bench --ranks-per-node 9", "--ranks-per-node is `9`", "at most"),
        (
            "bench --transport tcp",
            "--transport is `tcp`",
            "give sim, libfabric:tcp, libfabric:shm, libfabric:efa or verbs",
        ),
        ("bench --link fast", "--link is `fast`", "cx7"),
        ("plan --trace a.json", "--trace is `a.json`", "run bench"),
        ("plan --hidden 100", "--hidden is `100`", "multiple of 128"),
        ("verify --seeds 0", "--seeds is `0`", "whole number"),
        ("verify --schedules 0", "--schedules is `0`", "whole number"),
        ("verify --schedules 1 --device cuda", "--device is `cuda`", "give cpu"),
        ("verify --timeout-ms 0", "--timeout-ms is `0`", "whole number"),
        ("verify --replay ahead=0", "--replay is `ahead=0`", "1 to 8"),
        ("verify --replay ahead=2 --seeds 3", "--replay is `ahead=2`", "leave --seeds out"),
        ("verify --replay hidden=18446744073709551615", "`hidden=18446744073709551615`", "from 1 to 1048576"),
        ("verify --replay experts=9223372036854775807", "`experts=9223372036854775807`", "from 1 to 32768"),
        ("verify --replay experts=2147483647", "--replay is `experts=2147483647`", "from 1 to 32768"),
        ("verify --replay gap=2147483648", "--replay is `gap=2147483648`", "from 0 to 65536"),
        ("verify --replay sms=4294967296", "--replay is `sms=4294967296`", "from 1 to 1024"),
        ("verify --device cpu --replay sms=1", "--sms is `1`", "at least 2"),
        ("verify --replay iters=0", "--replay is `iters=0`", "from 1 to 10000000"),
        ("verify --replay nodes=18446744073709551615+2", "--replay is `nodes=18446744073709551615+2`", "from 1 to 64"),
        ("verify --replay hidden=128,hidden=256", "--replay is `hidden=256`", "give it once"),
        ("verify --device cpu --replay world=65,nodes=32+33", "--world is `65`", "1 to 64"),
        ("verify --device cpu --replay first_epoch=4294967295", "--first-epoch is `4294967295`", ""),
        // A case that is refused by design must be valid otherwise.
        ("verify --device cpu --replay scales=f32,nodes=1+4", "--ranks-per-node is `1,4`", "agree"),
        (
            "verify --device cpu --replay world=64,hidden=1048576,tokens=100000,max_tokens=100000,nodes=32+32",
            "--max-tokens is `100000`",
            "bytes of memory are free",
        ),
        ("verify --replay color=red", "--replay is `color=red`", "name=value"),
        ("simulate --nodes 2", "--link", "give it"),
        ("benchmark", "`benchmark` is not known", "bench, verify, plan, simulate, doctor, topology or wire"),
        ("", "no command", "bench, verify, plan, simulate, doctor, topology or wire"),
    ] {
        let typed =
            if typed.contains("--ranks-per-node") { format!("{typed} --device cpu") } else { typed.to_string() };
        let sentence = refusal(&typed);
        assert!(sentence.contains(named), "{typed}: {sentence}");
        assert!(sentence.contains(advice), "{typed}: {sentence}");
    }
}

#[test]
fn one_node_may_be_given() {
    // Results over nodes are tested in cli_nodes.
    let typed = format!("bench {SMALL} --ranks-per-node 3 --transport sim --link none --json -");
    assert_eq!(object(&typed)["ranks_per_node"], 3);
}

#[test]
fn help_and_version_are_no_errors() {
    for typed in ["--help", "--version", "bench --help", "help"] {
        let output = run(typed);
        assert!(output.status.success() && output.stderr.is_empty(), "{typed}");
        assert!(text(&output.stdout).contains("tokenyard"), "{typed}");
    }
    assert!(!text(&run("bench --help").stdout).contains("as-rank"), "what is internal stays hidden");
}

#[test]
fn plan_lists_every_buffer_without_gaps() {
    let plan = object("plan --device cpu --json -");
    let buffers = plan["buffers"].as_array().unwrap();
    let mut next = 0;
    for buffer in buffers {
        assert!(buffer["name"].as_str().is_some_and(|name| !name.is_empty()));
        assert_eq!(buffer["offset"].as_u64(), Some(next), "{buffer}");
        next += buffer["bytes"].as_u64().unwrap();
        assert_eq!(buffer.as_object().unwrap().len(), 3);
    }
    assert_eq!(plan["arena_bytes"].as_u64(), Some(next));
    assert_eq!(plan.as_object().unwrap().len(), 4);
    // 128 tokens of the V3 shape.
    assert!(next <= 256 << 20);
    let bytes = |options: &str| {
        let plan = object(&format!("plan --device cpu --ranks-per-node 4 --json - {options}"));
        plan["arena_bytes"].as_u64().unwrap()
    };
    assert!(bytes("--round-tokens 32") < bytes("") && bytes("--single-buffer") < bytes(""));
    for (tokens, most) in [(128, 256 << 20), (4096, 2u64 << 30)] {
        let plan = object(&format!("plan --device cpu --world 64 --ranks-per-node 8 --tokens {tokens} --json -"));
        assert!(plan["arena_bytes"].as_u64().is_some_and(|bytes| bytes <= most), "{tokens}: {}", plan["arena_bytes"]);
    }
    let shown = text(&run("plan --device cpu").stdout);
    assert!(shown.contains(&next.to_string()) && shown.contains("parities"), "{shown}");
}

/// The fields of the contract, in its order.
const FIELDS: [&str; 30] = [
    "version",
    "commit",
    "device",
    "device_name",
    "world",
    "ranks_per_node",
    "transport",
    "link",
    "launch",
    "preset",
    "hidden",
    "experts",
    "top_k",
    "dtype",
    "combine_dtype",
    "tokens",
    "routing",
    "layout",
    "mode",
    "sms",
    "iters",
    "seed",
    "verified",
    "mismatches",
    "max_rel_err",
    "dispatch_us",
    "combine_us",
    "bytes_per_rank",
    "floor_us",
    "arena_bytes",
];
const PARTS: [&str; 4] = ["dispatch_send_us", "dispatch_recv_us", "combine_send_us", "combine_recv_us"];

fn assert_percentiles(result: &Value, field: &str) {
    let of = |name: &str| result[field][name].as_f64().unwrap_or_else(|| panic!("{field}.{name} in {result}"));
    let (min, p50, p95, p99, max, mean) = (of("min"), of("p50"), of("p95"), of("p99"), of("max"), of("mean"));
    assert!(0.0 <= min && min <= p50 && p50 <= p95 && p95 <= p99 && p99 <= max, "{}", result[field]);
    assert!(min <= mean && mean <= max && max > 0.0, "{}", result[field]);
}

#[test]
fn bench_prints_the_object_of_the_contract_and_nothing_else() {
    let result = object(&format!("bench {SMALL} --json -"));
    let fields: Vec<&String> = result.as_object().unwrap().keys().collect();
    let mut wanted: Vec<&str> = FIELDS.to_vec();
    wanted.sort_unstable();
    assert_eq!(fields, wanted);
    assert_eq!((&result["verified"], &result["mismatches"]), (&Value::Bool(true), &Value::from(0)));
    assert_eq!((&result["world"], &result["ranks_per_node"]), (&Value::from(3), &Value::from(3)));
    assert_eq!((&result["transport"], &result["link"]), (&Value::from("sim"), &Value::from("none")));
    assert_percentiles(&result, "dispatch_us");
    assert_percentiles(&result, "combine_us");
    let bytes = &result["bytes_per_rank"];
    assert!(bytes["dispatch_nvlink"].as_u64() > Some(0) && bytes["combine_nvlink"].as_u64() > Some(0));
    assert_eq!((&bytes["dispatch_wire"], &bytes["combine_wire"]), (&Value::from(0), &Value::from(0)));
    assert!(result["floor_us"]["dispatch"].as_f64() > Some(0.0) && result["floor_us"]["combine"].as_f64() > Some(0.0));
    // In the order of the contract, as text.
    let printed = text(&run(&format!("bench {SMALL} --json -")).stdout);
    let places: Vec<Option<usize>> = FIELDS.iter().map(|f| printed.find(&format!("\"{f}\":"))).collect();
    assert!(places.is_sorted() && places[0].is_some(), "{printed}");
}

#[test]
fn results_name_the_options_that_no_other_field_shows() {
    let options = |typed: &str| object(&format!("bench {SMALL} --json - {typed}"))["options"].clone();
    assert_eq!(options(""), Value::Null);
    let typed = "--scales ue8m0 --weights none --accumulate --ragged --align 8 --capacity 200 --max-tokens 9 --warmup 0 --check 2";
    let listed: Vec<Value> = typed.split(" --").map(|o| format!("--{}", o.trim_start_matches("--")).into()).collect();
    assert_eq!(options(typed), Value::Array(listed));
}

#[test]
fn every_mode_layout_and_launch_verifies() {
    for options in [
        "--mode split --layout masked --scales ue8m0",
        "--quantize --layout masked",
        "--quantize --mode split --scales ue8m0 --ragged",
        "--mode graph --layout token --dtype bf16 --weights none",
        "--partial fp8",
        "--partial fp8 --mode graph --layout token --combine-dtype fp32 --accumulate",
        "--partial fp32 --combine-dtype fp16",
        "--mode graph --ragged --accumulate --align 16",
        "--world-mode one-thread --weights combine --combine-dtype fp16",
        "--world-mode one-thread --mode split --ragged --dtype fp32 --layout masked",
        "--launch processes",
        "--launch processes --mode graph --ragged --layout token --routing hot:2 --max-tokens 9",
    ] {
        let result = object(&format!("bench {SMALL} {options} --json -"));
        assert_eq!(result["verified"], Value::Bool(true), "{options}: {result}");
        assert_eq!(result.get("quantize").is_some(), options.contains("--quantize"), "{options}");
        let partial = options.strip_prefix("--partial ").and_then(|rest| rest.split(' ').next());
        assert_eq!(result.get("partial").and_then(Value::as_str), partial, "{options}");
        for part in PARTS {
            assert_eq!(result.get(part).is_some(), options.contains("split"), "{options}: {part}");
        }
    }
}

#[test]
fn partial_rows_of_fp8_bring_fewer_bytes_back() {
    let bytes = |partial: &str| {
        let small = SMALL.replace("--hidden 128", "--hidden 256");
        let result = object(&format!("bench {small} --partial {partial} --json -"));
        result["bytes_per_rank"]["combine_nvlink"].as_u64().unwrap()
    };
    // 256 elements and two scales, instead of 256 elements of two bytes; a mean over iterations is rounded down.
    let (same, fp8, fp32) = (bytes("same"), bytes("fp8"), bytes("fp32"));
    assert!(
        same > 0 && fp8.abs_diff(same * (256 + 8) / 512) <= 1 && fp32.abs_diff(2 * same) <= 1,
        "{same} {fp8} {fp32}"
    );
}

#[test]
fn all_tokens_may_be_none_and_zero() {
    let result = object(&format!("bench {SHAPE} --tokens 0 --json -"));
    assert_eq!((&result["verified"], &result["tokens"]), (&Value::Bool(true), &Value::from(0)));
    assert_eq!(result["bytes_per_rank"]["dispatch_nvlink"], 0);
}

#[test]
fn a_sweep_has_a_result_for_each_count_and_writes_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (json, plot, trace) = (path("r.json"), path("r.svg"), path("r.trace.json"));
    let output = run(&format!(
        "bench {SHAPE} --tokens 1,4,16 --iters 3 --mode split --json {json} --plot {plot} --trace {trace}"
    ));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("dispatch p50") && table.contains("d.send") && table.contains("yes"), "{table}");
    assert!(table.contains("p50/floor") && table.matches("x  ").count() == 6, "a ratio to each floor: {table}");

    let read = |path: &str| std::fs::read_to_string(path).unwrap();
    let swept: Value = serde_json::from_str(&read(&json)).unwrap();
    let tokens: Vec<u64> = swept["results"].as_array().unwrap().iter().filter_map(|r| r["tokens"].as_u64()).collect();
    assert_eq!(tokens, [1, 4, 16]);
    let svg = read(&plot);
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>") && svg.contains("dispatch floor"));
    assert_eq!(svg.matches("<polyline").count(), 6 + 4, "three curves of latency and two of bandwidth each way");
    for result in swept["results"].as_array().unwrap() {
        assert_plotted_bandwidth(&svg, result);
    }
    let timeline: Value = serde_json::from_str(&read(&trace)).unwrap();
    let events = timeline["traceEvents"].as_array().unwrap();
    let slices: Vec<&str> = events.iter().filter(|e| e["ph"] == "X").filter_map(|e| e["name"].as_str()).collect();
    // Points, ranks, iterations, and the parts of a split iteration with its experts; beside them the calls' stages.
    assert_eq!(slices.iter().filter(|name| !name.contains(':')).count(), 3 * 3 * 3 * 5);
    for stage in ["dispatch: rows placed", "combine: sums"] {
        assert_eq!(slices.iter().filter(|name| **name == stage).count(), 3 * 3 * 3, "{stage}");
    }
    assert!(events.iter().filter(|e| e["ph"] == "X").all(|e| e["ts"].is_number() && e["dur"].as_f64() >= Some(0.0)));
}

/// The plot must show what each rank sent in one run over its time, and over the floor.
#[test]
fn files_that_would_block_or_overwrite_each_other_are_refused_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let pipe = at("pipe");
    nix::unistd::mkfifo(pipe.as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for option in ["--json", "--plot", "--trace"] {
        let sentence = refusal(&format!("bench {SMALL} {option} {pipe}"));
        assert!(sentence.contains(&format!("{option} is `{pipe}`")) && sentence.contains("give a file"), "{sentence}");
    }
    for words in ["plan --device cpu", "doctor", "topology", "simulate --calibrate"] {
        assert!(refusal(&format!("{words} --json {pipe}")).contains("give a file"), "{words}");
    }
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    assert!(refusal(&format!("bench {SMALL} --json {}", at("socket"))).contains("give a file"));

    let twice = |first: &str, second: &str| {
        let sentence = refusal(&format!("bench {SMALL} --json {first} --trace {second}"));
        assert!(sentence.contains("--trace is") && sentence.contains("--json goes to the same file"), "{sentence}");
    };
    twice(&at("new"), &at("new"));
    twice(&at("new"), &at("./new"));
    assert!(!std::path::Path::new(&at("new")).exists(), "a refusal leaves nothing behind");
    std::fs::write(at("old"), "kept").unwrap();
    std::os::unix::fs::symlink(at("old"), at("link")).unwrap();
    twice(&at("old"), &at("link"));
    assert_eq!(std::fs::read_to_string(at("old")).unwrap(), "kept");
}

#[test]
fn devices_and_pipes_that_the_program_was_handed_are_written() {
    let output = run(&format!("bench {SMALL} --json /dev/null --plot /dev/null --trace /dev/null"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    // Its reader is this test.
    let output = run("plan --device cpu --json /dev/stderr");
    assert!(output.status.success() && text(&output.stdout).contains("arena of a rank"), "{}", text(&output.stderr));
    assert!(serde_json::from_slice::<Value>(&output.stderr).is_ok(), "{}", text(&output.stderr));
    let processes = format!("bench {SMALL} --launch processes --json /dev/stderr");
    let output = run(&processes);
    assert!(output.status.success() && serde_json::from_slice::<Value>(&output.stderr).is_ok(), "{processes}");
}

fn assert_plotted_bandwidth(svg: &str, result: &Value) {
    let number = |value: &Value| value.as_f64().unwrap();
    for way in ["dispatch", "combine"] {
        let bytes = &result["bytes_per_rank"];
        let bytes = number(&bytes[format!("{way}_nvlink")]) + number(&bytes[format!("{way}_wire")]);
        assert!(bytes > 0.0, "{result}");
        for (at, us) in [("p50", &result[format!("{way}_us")]["p50"]), ("floor", &result["floor_us"][way])] {
            let point = format!("<title>{way} at {at}, {} tokens: ", result["tokens"]);
            let shown = svg.split(&point).nth(1).and_then(|rest| rest.split_once(" GB/s</title>")).unwrap().0;
            let wanted = bytes / number(us) / 1000.0;
            assert!((shown.parse::<f64>().unwrap() - wanted).abs() <= 1e-6, "{point}{shown}, and not {wanted}");
        }
    }
}

#[test]
fn a_world_of_one_rank_has_no_bandwidth_to_plot() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("r.svg").display().to_string();
    let output =
        run(&format!("bench --device cpu --world 1 --hidden 128 --experts 7 --top-k 3 --tokens 1,4 --plot {plot}"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let svg = std::fs::read_to_string(plot).unwrap();
    assert!(svg.contains("height=\"460\"") && !svg.contains("GB/s") && svg.trim_end().ends_with("</svg>"), "{svg}");
}

#[test]
fn an_output_that_is_too_small_fails_with_what_is_needed() {
    let output = run(&format!("bench {SMALL} --capacity 2 --json -"));
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
    let sentence = text(&output.stderr);
    assert!(sentence.contains("needs") && sentence.contains("has 2"), "{sentence}");
}

#[test]
fn verify_draws_runs_and_replays() {
    let output = run("verify --device cpu --seeds 8 --seed 3");
    let table = text(&output.stdout);
    assert!(output.status.success(), "{table}{}", text(&output.stderr));
    assert!(table.contains("dtype x layout") && table.contains("8 configurations run on cpu, 0 failed"), "{table}");
    let output = run("verify --device cpu --seeds 3 --seed 3 --quantize");
    let table = text(&output.stdout);
    let pairs = table.lines().find(|line| line.contains("dtype x quantize")).unwrap_or_default();
    assert!(output.status.success() && pairs.contains("1 of 5"), "{table}{}", text(&output.stderr));
    let replay = |text: &str| command("verify --device cpu --replay").arg(text).output().unwrap();
    let refused = replay("world=2,quantize=yes");
    assert!(refused.status.success() && text(&refused.stdout).starts_with("refused by design: "));
    let right = replay("world=2,hidden=64,tokens=3,max_tokens=4,ragged=yes,iters=3,seed=9");
    assert!(right.status.success() && text(&right.stdout).starts_with("right: "), "{}", text(&right.stdout));
    let refused = replay("world=2,layout=token,weights=combine");
    assert!(refused.status.success() && text(&refused.stdout).starts_with("refused by design: "));
    assert_eq!(replay("world=2,hidden=9").status.code(), Some(2));
}

#[test]
fn verify_ends_when_its_time_is_over() {
    let output = run("verify --device cpu --seeds 1000000 --seconds 1");
    let (printed, refused) = (text(&output.stdout), run("verify --replay ahead=2 --seconds 1"));
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    let (_, last) = printed.trim_end().rsplit_once('\n').unwrap();
    let ran: usize = last.strip_suffix(" configurations run on cpu, 0 failed").unwrap().parse().unwrap();
    assert!((1..10_000).contains(&ran), "{ran}");
    // Pairs that had no time are not missed, and that is said.
    assert!(!printed.contains("never drawn"), "{printed}");
    assert!(printed.contains("the time was over before all 1000000 random configurations"), "{printed}");
    assert!(text(&refused.stderr).contains("leave --seconds out"));
}

#[test]
fn seeded_schedules_are_distinct_verified_and_replay_exactly() {
    let output = run("verify --schedules 30 --seed 7");
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    assert!(printed.contains("30 schedules run, 15 of them with held stores: 30 distinct traces, "), "{printed}");
    assert!(printed.contains(" switches, 1 run twice") && printed.contains("0 failed"), "{printed}");
    assert!(!printed.contains("configurations run"), "without --seeds these alone: {printed}");
    assert_eq!(text(&run("verify --schedules 30 --seed 7").stdout), printed);

    let replay = || {
        let case = "world=3,hidden=64,tokens=4,max_tokens=5,ragged=yes,mode=split,ahead=3,accumulate=yes,sms=2,\
                    world_mode=one-thread,hold_stores=yes,iters=5,seed=11";
        let output = command("verify --device cpu --replay").arg(case).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stdout));
        text(&output.stdout)
    };
    let first = replay();
    assert!(first.starts_with("right: ") && first.contains("schedule "), "{first}");
    assert_eq!(replay(), first);
}

#[test]
fn planned_faults_are_reported_and_the_next_iteration_is_right() {
    for case in [
        "world=3,experts=6,tokens=4,max_tokens=4,fault=overflow,iters=4,seed=5",
        "world=3,experts=6,tokens=4,max_tokens=4,fault=overflow,iters=4,seed=6,layout=masked,mode=split,ahead=2",
        "world=3,experts=6,tokens=4,max_tokens=4,fault=overflow,iters=4,seed=7,layout=token,accumulate=yes",
        "world=3,experts=6,tokens=4,max_tokens=4,fault=routing,iters=4,seed=8,weights=combine,index=i32",
        "world=3,experts=6,tokens=4,max_tokens=4,fault=routing,iters=4,seed=9,mode=graph,ahead=2,device_count=yes",
        "world=3,experts=6,tokens=4,max_tokens=4,fault=routing,iters=4,seed=10,world_mode=one-thread,lockstep=yes",
    ] {
        let output = command("verify --device cpu --timeout-ms 5000 --replay").arg(case).output().unwrap();
        let printed = text(&output.stdout);
        assert!(output.status.success() && printed.starts_with("right: "), "{case}: {printed}{}", text(&output.stderr));
    }
    let summary = text(&run("verify --schedules 60").stdout);
    let seen = summary.lines().find(|line| line.contains("refused routings seen")).unwrap_or_default();
    let counts: Vec<u64> = seen.split([' ', ',']).filter_map(|word| word.parse().ok()).take(2).collect();
    assert!(counts.len() == 2 && counts.iter().all(|n| *n > 0), "{summary}");
}

#[test]
fn an_unusable_trace_file_is_named_with_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let header = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let no_weights = r#"{"topk_idx":{"dtype":"I32","shape":[3,5,3],"data_offsets":[0,180]}}"#;
    for (name, bytes) in [
        ("empty", Vec::new()),
        ("noise", vec![0xff; 64]),
        ("cut", header(no_weights)),
        ("lacking", [header(no_weights), vec![0; 180]].concat()),
    ] {
        let path = folder.path().join(format!("{name}.safetensors")).display().to_string();
        std::fs::write(&path, bytes).unwrap();
        let sentence = refusal(&format!("bench {SMALL} --routing file:{path}"));
        assert!(sentence.contains("--routing") && sentence.contains(&path), "{name}: {sentence}");
    }
}

#[test]
fn doctor_names_every_lack_with_its_cost_and_what_to_do() {
    let findings = object("doctor --json -");
    let findings = findings["findings"].as_array().unwrap();
    let topics = ["build", "driver", "GPUs", "transports", "libfabric", "libibverbs", "NICs", "RDMA nodes"];
    for topic in topics.into_iter().chain(["GDRCopy", "dma-buf", "memlock", "huge pages", "cores", "proxy cores"]) {
        assert!(findings.iter().any(|f| f["topic"] == topic), "{topic}");
    }
    for finding in findings.iter().filter(|f| f["lacking"] == true) {
        assert!(finding["cost"].is_string() && finding["remedy"].is_string(), "{finding}");
    }
    let shown = text(&run("doctor").stdout);
    assert!(shown.contains(" checked, ") && shown.contains("cores"), "{shown}");
}

/// The program's refusal of a trace, which must come within a minute.
fn trace_refused(path: &std::path::Path) -> String {
    use std::process::Stdio;
    let mut command = command(&format!("bench {SMALL} --routing file:{}", path.display()));
    let mut program = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while program.try_wait().unwrap().is_none() && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = program.kill();
    let output = program.wait_with_output().unwrap();
    let sentence = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{}: {sentence}", path.display());
    assert_eq!(sentence.trim_end().lines().count(), 1, "{sentence}");
    sentence
}

#[test]
fn a_trace_that_would_hang_or_fill_the_memory_is_refused() {
    use std::os::unix::fs::FileExt;
    let folder = tempfile::tempdir().unwrap();
    let sparse = |name: &str, header: &[u8], header_bytes: u64, bytes: u64| {
        let path = folder.path().join(name);
        let file = std::fs::File::create(&path).unwrap();
        file.write_all_at(&header_bytes.to_le_bytes(), 0).unwrap();
        file.write_all_at(header, 8).unwrap();
        file.set_len(bytes).unwrap();
        path
    };
    // 2 TiB for each of the tensors.
    let header = r#"{"topk_idx":{"dtype":"I32","shape":[3,61083979000,3],"data_offsets":[0,2199023244000]},"#
        .to_owned()
        + r#""topk_weight":{"dtype":"F32","shape":[3,61083979000,3],"data_offsets":[2199023244000,4398046488000]}}"#;
    let header_bytes = header.len() as u64;
    let sentence = trace_refused(&sparse("large", header.as_bytes(), header_bytes, 1 << 42));
    assert!(sentence.contains("4398046511104 bytes") && sentence.contains("at most 268435456"), "{sentence}");

    let sentence = trace_refused(&sparse("head", b"{", 98_000_000, 98_000_008));
    assert!(sentence.contains("98000000 bytes") && sentence.contains("at most 1048576"), "{sentence}");

    let fifo = folder.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(trace_refused(&fifo).contains("not a regular file"));
}

#[test]
fn ranks_as_processes_make_a_world_of_their_own_whatever_their_caller_belongs_to() {
    // Two nodes, nodes of one rank, and a name that no rank could take.
    for (name, value) in [("TOKENYARD_NODES", "1,2"), ("LOCAL_WORLD_SIZE", "1"), ("TOKENYARD_ADDR", "a b")] {
        let typed = format!("bench {SMALL} --launch processes");
        let output = command(&typed).env(name, value).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{name}={value}: {}", text(&output.stderr));
    }
}

/// Processes that a process started.
fn children(id: u32) -> Vec<i32> {
    let text = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|id| id.parse().ok()).collect()
}

#[test]
fn a_rank_that_dies_is_named_and_the_others_do_not_hang() {
    use std::process::Stdio;
    let many = format!("bench {SHAPE} --launch processes --iters 1000000 --check first --timeout-ms 2000");
    let program = command(&many).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    let ranks = loop {
        let ranks = children(program.id());
        if ranks.len() == 3 || started.elapsed() > Duration::from_secs(20) {
            break ranks;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(ranks.len(), 3);
    std::thread::sleep(Duration::from_millis(500));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(ranks[1]), nix::sys::signal::Signal::SIGKILL).unwrap();
    let output = program.wait_with_output().unwrap();
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    assert_eq!(output.status.code(), Some(1));
    let sentence = text(&output.stderr);
    assert!(sentence.contains("rank 1 was ended by signal 9"), "{sentence}");
}

/// The lines of a log, which is all that goes to stderr.
fn logged(typed: &str, levels: &str) -> Vec<String> {
    let output = command(typed).env("TOKENYARD_LOG", levels).output().unwrap();
    assert!(output.status.success(), "{typed}: {}", text(&output.stderr));
    let _: Value = serde_json::from_str(&text(&output.stdout)).expect("nothing of it goes to stdout");
    // The machine's cores decide about the warning.
    text(&output.stderr).lines().filter(|line| !line.contains("threads spin")).map(str::to_string).collect()
}

#[test]
fn the_log_is_off_unless_asked_for_and_calls_write_nothing() {
    let typed = format!("bench {SMALL} --ranks-per-node 1,2 --json -");
    assert!(logged(&typed, "").is_empty());
    let lines = logged(&typed, "debug");
    let of = |target: &str| lines.iter().filter(|line| line.contains(&format!(" tokenyard::{target}: "))).count();
    let built =
        lines.iter().filter(|line| line.starts_with("info tokenyard::context: rank ") && line.contains("built"));
    assert_eq!((built.count(), of("context"), of("proxy")), (3, 6, 6), "{lines:#?}");
    assert!(of("world") > 0 && of("network") > 0 && of("memory") > 0, "{lines:#?}");
    // More calls, not one line more.
    assert_eq!(logged(&typed.replace("--iters 3", "--iters 40"), "debug").len(), lines.len());
    let proxies = logged(&typed, "error,proxy=info");
    assert!(proxies.len() == 6 && proxies.iter().all(|line| line.contains(" tokenyard::proxy: ")), "{proxies:#?}");
    let processes = logged(&typed.replace("--json", "--launch processes --json"), "world=info");
    assert_eq!(processes.iter().filter(|line| line.contains("joined generation 0")).count(), 3, "{processes:#?}");
}

#[test]
fn an_unusable_log_level_is_refused_with_those_that_there_are() {
    for (levels, typed) in [("loud", "plan --device cpu"), ("info,socks=debug", "doctor")] {
        let output = command(typed).env("TOKENYARD_LOG", levels).output().unwrap();
        let sentence = text(&output.stderr);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{sentence}");
        assert!(sentence.contains(&format!("TOKENYARD_LOG is `{levels}`")), "{sentence}");
        assert!(sentence.contains("error, warn, info or debug") && sentence.contains("proxy"), "{sentence}");
    }
}

/// Commands that print to stdout, each with little work.
const PRINTING: [&str; 10] = [
    "bench --device cpu --world 2 --hidden 128 --experts 4 --top-k 2 --tokens 1,2 --iters 1 --warmup 0",
    "bench --device cpu --world 2 --hidden 128 --experts 4 --top-k 2 --tokens 1 --iters 1 --warmup 0 --json -",
    "plan --device cpu",
    "doctor",
    "doctor --json -",
    "topology --from tests/data/topology/p5",
    "verify --device cpu --seeds 1",
    "verify --schedules 2",
    "simulate --nodes 2 --ranks-per-node 2 --link cx7 --tokens 8 --iters 3",
    "--help",
];

#[test]
fn a_reader_that_leaves_costs_neither_the_work_nor_its_status() {
    let failing = format!("{} --plot /dev/full", PRINTING[0]);
    for (typed, status) in PRINTING.iter().map(|typed| (*typed, 0)).chain([(failing.as_str(), 1)]) {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command(typed).stdout(writer).output().unwrap();
        let printed = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{typed}: {printed}");
        assert!(!printed.contains("stdout") && !printed.contains("panicked"), "{typed}: {printed}");
    }
}

/// The standard library then opens /dev/null in its place, so that no file of the program is taken for stdout.
#[test]
fn a_stdout_that_the_shell_closed_costs_neither_the_work_nor_its_status() {
    let folder = tempfile::tempdir().unwrap();
    let written = folder.path().join("result.json");
    let to_a_file = format!("{} --json {}", PRINTING[0], written.display());
    for (typed, status) in
        PRINTING.iter().copied().chain([to_a_file.as_str()]).map(|typed| (typed, 0)).chain([("bench --world 0", 2)])
    {
        let closed = format!("exec \"$0\" {typed} >&-");
        let output = Command::new("sh").args(["-c", &closed, env!("CARGO_BIN_EXE_tokenyard")]).output().unwrap();
        let printed = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{typed}: {printed}");
        assert!(output.stdout.is_empty() && !printed.contains("panicked"), "{typed}: {printed}");
    }
    let _: Value = serde_json::from_str(&std::fs::read_to_string(written).unwrap()).expect("nothing else is in it");
}

/// Each device thread has its own stack; there is no room for the stacks of 1024 blocks.
#[test]
fn a_lack_of_memory_for_stacks_is_reported() {
    let typed = "bench --device cpu --world 2 --hidden 128 --experts 4 --top-k 2 --tokens 2 --sms 1024 --iters 3";
    let limited = format!("ulimit -v 1500000; exec {} {typed}", env!("CARGO_BIN_EXE_tokenyard"));
    let output = Command::new("sh").args(["-c", &limited]).output().unwrap();
    let printed = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("the CPU device lacks memory: use fewer blocks"), "{printed}");
}

/// Stacks that no address space has room for.
#[test]
fn a_lack_of_threads_is_one_sentence_and_status_1() {
    for (launch, why) in [("threads", "no thread for a rank"), ("processes", "no thread to read a rank's output")] {
        let words = format!("bench {SMALL} --launch {launch}");
        let mut command = command(&words);
        // Ranks are killed as they end: one that counts coverage would leave half a file.
        command.env("LLVM_PROFILE_FILE", "/dev/null").env("RUST_MIN_STACK", (1u64 << 47).to_string());
        let output = command.output().unwrap();
        let printed = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{launch}: {printed}");
        assert!(printed.contains(why) && printed.contains("raise the limit on threads"), "{launch}: {printed}");
    }
}

#[test]
fn a_full_disk_behind_stdout_is_one_sentence_and_status_1() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for typed in PRINTING {
        let output = command(typed).stdout(full()).output().unwrap();
        let printed = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{typed}: {printed}");
        assert_eq!(printed.matches("stdout cannot be written").count(), 1, "{typed}: {printed}");
        assert!(printed.contains("No space left") && !printed.contains("panicked"), "{typed}: {printed}");
        // Nor does stderr end it.
        let status = command(typed).stdout(full()).stderr(full()).status().unwrap();
        assert_eq!(status.code(), Some(1), "{typed}");
    }
    let refused = command("bench --world 0").stderr(full()).status().unwrap();
    assert_eq!(refused.code(), Some(2));
}
