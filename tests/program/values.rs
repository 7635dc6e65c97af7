//! What a bench on the CPU device reports, value by value: its options, bytes computed by hand, and times that its
//! timeline must confirm.

use crate::rig;

use rig::{object, run, text};
use serde_json::{Value, json};

#[test]
fn every_option_is_reported_as_it_was_given() {
    let given = "--world 3 --ranks-per-node 2,1 --link 8000:0:0 --preset mixtral-8x22b --hidden 256 --experts 9 \
                 --top-k 4 --dtype fp16 --combine-dtype fp32 --partial fp8 --tokens 7 --routing zipf:1.5 \
                 --layout token --mode graph --sms 5 --iters 2 --seed 11";
    let further = "--weights none --accumulate --ragged --max-tokens 9 --chunk-rows 3 --ll-tokens 2 --round-tokens 4 \
                   --warmup 2 --single-buffer --network hostile --check 2";
    let found = object(&format!("bench --device cpu {given} {further} --json -"));
    let options: Vec<String> = further.split(" --").map(|o| format!("--{}", o.trim_start_matches("--"))).collect();
    let wanted = json!({
        "device": "cpu", "world": 3, "ranks_per_node": "2,1", "transport": "sim", "link": "8000:0:0",
        "launch": "threads", "preset": "mixtral-8x22b", "hidden": 256, "experts": 9, "top_k": 4, "dtype": "fp16",
        "combine_dtype": "fp32", "partial": "fp8", "tokens": 7, "routing": "zipf:1.5", "layout": "token",
        "mode": "graph", "sms": 5, "iters": 2, "seed": 11, "verified": true, "mismatches": 0,
        "options": options,
    });
    for (field, value) in wanted.as_object().unwrap() {
        assert_eq!(&found[field], value, "{field}");
    }
    let preset = object("bench --device cpu --world 1 --preset gpt-oss-120b --tokens 1 --iters 1 --warmup 0 --json -");
    let shape = ["preset", "hidden", "experts", "top_k", "dtype", "combine_dtype"].map(|field| preset[field].clone());
    assert_eq!(json!(shape), json!(["gpt-oss-120b", 2880, 128, 4, "bf16", "bf16"]));
}

/// Rank e has expert e, and every token goes to experts 0, 1 and 2. Ranks 0 and 1 are a node, 2 and 3 the other.
const HOT: &str = "bench --device cpu --world 4 --ranks-per-node 2 --hidden 128 --experts 4 --top-k 3 --routing hot:3 \
                   --tokens 6 --iters 2 --warmup 0 --json -";

#[test]
fn bytes_are_the_rows_between_ranks_and_between_nodes() {
    // Rows of a token within nodes, by its source:
    //   0 sends to 1; rail 2 keeps its row            1
    //   1 sends to 0; rail 3 forwards to 2            2
    //   2 keeps its row; rail 0 keeps one, sends to 1 1
    //   3 sends to 2; rail 1 keeps one, sends to 0    2
    // 6 of 4 ranks, 6 tokens each: 9 a rank. Between nodes one a token: 6 a rank.
    let bytes = |options: &str| object(&format!("{HOT} {options}"))["bytes_per_rank"].clone();
    let wanted = |row: u64, partial: u64| {
        json!({
            "dispatch_nvlink": 9 * row, "dispatch_wire": 6 * row,
            "combine_nvlink": 9 * partial, "combine_wire": 6 * partial,
        })
    };
    // A row of 128 columns in fp8 has a scale of four bytes; so has a partial row in fp8.
    assert_eq!(bytes(""), wanted(128 + 4, 256));
    assert_eq!(bytes("--scales ue8m0 --partial fp8"), wanted(128 + 4, 128 + 4));
    assert_eq!(bytes("--dtype fp32 --partial fp32"), wanted(512, 512));
    // Rows travel quantised.
    assert_eq!(bytes("--quantize --combine-dtype fp32"), wanted(128 + 4, 512));
}

#[test]
fn the_floor_of_a_link_is_its_latency_and_the_bytes_over_its_rate() {
    // 8 Gb/s carry 1000 bytes a µs: 792 and 1536 bytes, after 500 µs, longer than any copy within a node.
    let found = object(&format!("{HOT} --link 8:500:0"));
    for (call, us) in [("dispatch", 500.792), ("combine", 501.536)] {
        assert!((found["floor_us"][call].as_f64().unwrap() - us).abs() < 1e-6, "{}", found["floor_us"]);
    }
}

/// The slices of a timeline that are no stages: name, begin and end in µs.
fn slices(timeline: &Value) -> Vec<(String, f64, f64)> {
    let events = timeline["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X");
    let slice = |event: &Value| {
        let (begin, length) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        (event["name"].as_str().unwrap().to_string(), begin, begin + length)
    };
    events.map(slice).collect()
}

/// Runs one iteration of one rank: the result, and its slices.
fn timed(options: &str) -> (Value, Vec<(String, f64, f64)>) {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("t.json").display().to_string();
    let shape = "--device cpu --world 1 --hidden 512 --experts 4 --top-k 2 --tokens 64 --iters 1 --warmup 0";
    let output = run(&format!("bench {shape} {options} --trace {trace} --json -"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let timeline = serde_json::from_str(&std::fs::read_to_string(trace).unwrap()).unwrap();
    (serde_json::from_str(&text(&output.stdout)).unwrap(), slices(&timeline))
}

/// Two times of one clock, one of them in whole ns.
fn assert_close(what: &str, found: f64, wanted: f64) {
    assert!((found - wanted).abs() < 0.01, "{what}: {found}, and not {wanted}");
}

#[test]
fn times_of_halves_are_those_of_the_timeline_and_add_up() {
    let (result, slices) = timed("--mode split");
    let of = |name: &str| slices.iter().find(|slice| slice.0 == name).unwrap_or_else(|| panic!("{name}: {slices:?}"));
    let names = ["dispatch send", "dispatch receive", "experts", "combine send", "combine receive"];
    let [dispatch_send, dispatch_recv, experts, combine_send, combine_recv] = names.map(of);
    // One after the other; only before the combine is the barrier of lockstep.
    assert_close("begin", dispatch_send.1, 0.0);
    assert_close("dispatch receive", dispatch_recv.1, dispatch_send.2);
    assert_close("experts", experts.1, dispatch_recv.2);
    assert!(combine_send.1 >= experts.2, "{slices:?}");
    assert_close("combine receive", combine_recv.1, combine_send.2);
    for (field, (begin, end)) in [
        ("dispatch_send_us", (dispatch_send.1, dispatch_send.2)),
        ("dispatch_recv_us", (dispatch_recv.1, dispatch_recv.2)),
        ("combine_send_us", (combine_send.1, combine_send.2)),
        ("combine_recv_us", (combine_recv.1, combine_recv.2)),
        ("dispatch_us", (dispatch_send.1, dispatch_recv.2)),
        ("combine_us", (combine_send.1, combine_recv.2)),
    ] {
        assert_close(field, result[field]["p50"].as_f64().unwrap(), end - begin);
    }
}

#[test]
fn calls_whose_counts_come_first_have_times_of_counts_and_of_flags() {
    for option in ["--counts-first", "--mode counts"] {
        let (result, _) = timed(option);
        let of = |field: &str| result[field]["p50"].as_f64().unwrap_or_else(|| panic!("{field}: {result}"));
        assert_eq!(result["mode"], "counts");
        assert!(of("counts_us") > 0.0 && of("flag_us") > 0.0, "{result}");
    }
    let both = run("bench --device cpu --counts-first --mode graph");
    assert!(!both.status.success() && text(&both.stderr).contains("--counts-first"), "{}", text(&both.stderr));
}

#[test]
fn stages_of_a_call_lie_end_to_end_from_its_begin() {
    let (result, slices) = timed("--mode fused");
    for call in ["dispatch", "combine"] {
        let whole = slices.iter().find(|slice| slice.0 == call).unwrap();
        assert_close(call, result[format!("{call}_us")]["p50"].as_f64().unwrap(), whole.2 - whole.1);
        let stages: Vec<_> = slices.iter().filter(|slice| slice.0.starts_with(&format!("{call}: "))).collect();
        assert!(stages.len() >= 4, "{slices:?}");
        assert_close("the first stage", stages[0].1, whole.1);
        stages.windows(2).for_each(|two| assert_close("a stage", two[1].1, two[0].2));
        // The device counts from its first block, a little after the host's mark.
        let last = stages[stages.len() - 1].2 - whole.1;
        let stages = result["stages_us"].as_array().unwrap().iter();
        let lasts = stages.filter(|stage| stage["stage"].as_str().unwrap().starts_with(&format!("{call}: ")));
        let latest = lasts.map(|stage| stage["last"].as_f64().unwrap()).fold(0.0, f64::max);
        assert_close("the last stage", last, latest);
        assert!(last <= whole.2 - whole.1, "{slices:?}");
    }
    for stage in result["stages_us"].as_array().unwrap() {
        let [first, median, last] = ["first", "median", "last"].map(|at| stage[at].as_f64().unwrap());
        assert!(first <= median && median <= last, "{stage}");
    }
}

#[test]
fn planned_faults_are_counted_by_kind() {
    // Draws of few ranks in one node: an output too small, and routing that is refused.
    for (seeds, schedules, wanted) in
        [(2481, 661, "1 overflows, 0 refused routings seen"), (3992, 1284, "0 overflows, 1 refused routings seen")]
    {
        let output = run(&format!("verify --device cpu --seeds 1 --seed {seeds}"));
        let printed = text(&output.stdout);
        assert!(output.status.success(), "{printed}");
        assert!(printed.ends_with(&format!("\n{wanted}\n1 configurations run on cpu, 0 failed\n")), "{printed}");
        let printed = text(&run(&format!("verify --schedules 1 --seed {schedules}")).stdout);
        assert!(printed.ends_with(&format!("\n{wanted}; 0 failed\n")), "{printed}");
    }
}
