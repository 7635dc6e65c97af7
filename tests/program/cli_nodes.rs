//! The program with worlds of several nodes: options, sentences, and what a run reports. On the CPU device.

use crate::rig;

use rig::{command, object, refusal, run, text};
use serde_json::Value;

/// Small enough for a debug build; the nodes are given by each test.
const SMALL: &str = "--device cpu --world 5 --hidden 128 --experts 11 --top-k 4 --tokens 6 --iters 3";

#[test]
fn unusable_nodes_and_networks_are_named_with_what_would_do() {
    for (typed, named, advice) in [
        ("bench --device cpu --ranks-per-node 0", "--ranks-per-node is `0`", "8 or 3,5"),
        ("bench --device cpu --ranks-per-node 4,,4", "--ranks-per-node is `4,,4`", "8 or 3,5"),
        ("bench --device cpu --ranks-per-node 4,0,4", "--ranks-per-node is `4,0,4`", "8 or 3,5"),
        ("bench --device cpu --ranks-per-node 9", "--ranks-per-node is `9`", "at most"),
        ("bench --device cpu --ranks-per-node 3", "--ranks-per-node is `3`", "give 3,3,2"),
        ("bench --device cpu --ranks-per-node 3,6", "--ranks-per-node is `3,6`", "sum to 9 and the world has 8"),
        ("bench --device cpu --world 6 --ranks-per-node 3,4", "--ranks-per-node is `3,4`", "agree"),
        ("bench --device cpu --transport libfabric", "--transport is `libfabric`", "libfabric:tcp"),
        ("bench --device cpu --transport verbs:", "--transport is `verbs:`", "such as verbs:mlx5_0"),
        ("plan --device cpu --transport verbs:mlx5_0,a/b", "--transport is `verbs:mlx5_0,a/b`", "ibv_devices lists"),
        ("bench --device cpu --transport verbs:a,b,a", "--transport is `verbs:a,b,a`", "each once"),
        (
            "plan --device cpu --transport libfabric:efa:a,b,c,d,e",
            "--transport is `libfabric:efa:a",
            "at most 4 devices",
        ),
        ("wire --transport libfabric:tcp --pairs -1", "--pairs is `-1`", "whole number"),
        ("topology --cores -1", "--cores is `-1`", "CPUs below 8192"),
        ("bench --device cpu --transport verbs --link cx7", "--link is `cx7`", "--transport sim"),
        ("bench --device cpu --transport libfabric:tcp --link cx7", "--link is `cx7`", "--transport sim"),
        ("bench --device cpu --transport libfabric:tcp --network calm", "--network is `calm`", "--transport sim"),
        ("bench --device cpu --transport libfabric:shm", "--launch is `threads`", "processes"),
        ("bench --device cpu --transport libfabric:tcp --world-mode one-thread", "--transport is", "give sim"),
        ("bench --device cpu --link 400:5", "--link is `400:5`", "400:5:0.2"),
        ("bench --device cpu --link 0:5:0.2", "--link is `0:5:0.2`", "GBPS"),
        ("bench --device cpu --link 400:2000000:0", "--link is `400:2000000:0`", "GBPS"),
        ("bench --device cpu --world 3 --link cx7 --ranks-per-node 3", "--link is `cx7`", "leave it out"),
        ("bench --device cpu --network rough", "--network is `rough`", "calm or hostile"),
        ("bench --device cpu --chunk-rows 0", "--chunk-rows is `0`", "whole number"),
        ("plan --device cpu --ranks-per-node 3", "--ranks-per-node is `3`", "give 3,3,2"),
        ("verify --device cpu --replay world=4,nodes=2+3", "--ranks-per-node is `2,3`", "sum to 5"),
        ("verify --device cpu --replay world=4,nodes=4+0", "--replay is `nodes=4+0`", "from 1 to 64"),
        ("verify --device cpu --replay nodes=two", "--replay is `nodes=two`", "3+5"),
        ("verify --device cpu --replay nics=5", "--replay is `nics=5`", "from 1 to 4"),
        ("verify --device cpu --replay fault=forged", "fault is `forged`", "world_mode=one-thread"),
        ("verify --device cpu --replay network=rough", "--replay is `network=rough`", "calm or hostile"),
        ("verify --device cpu --replay link=fast", "--replay is `link=fast`", "cx7"),
        ("verify --device cpu --replay transport=tcp", "--replay is `transport=tcp`", "give sim"),
    ] {
        let sentence = refusal(typed);
        assert!(sentence.contains(named), "{typed}: {sentence}");
        assert!(sentence.contains(advice), "{typed}: {sentence}");
    }
}

#[test]
fn a_job_is_of_as_many_ranks_as_the_environment_says() {
    let job = |options: &str, variables: &[(&str, &str)]| {
        let mut bench =
            command(&format!("bench --launch env --device cpu --hidden 128 --experts 8 --top-k 2 {options}"));
        for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"] {
            bench.env_remove(name);
        }
        let output = bench.envs(variables.iter().copied()).output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let alone = [("RANK", "0"), ("WORLD_SIZE", "1"), ("TOKENYARD_TOKEN", "job"), ("TOKENYARD_PORT", port.as_str())];
    let (status, table, sentence) = job("--tokens 3 --iters 2", &alone);
    assert!(status == Some(0) && table.contains("yes"), "{table}{sentence}");
    let (status, _, sentence) = job("--world 2 --ranks-per-node 2", &alone);
    assert!(status == Some(1) && sentence.contains("WORLD_SIZE is 1") && sentence.contains("--world"), "{sentence}");
    let (status, _, sentence) = job("", &[]);
    assert!(status == Some(1) && sentence.contains("RANK"), "{sentence}");
    let (status, _, sentence) = job("--json /no/folder/r.json", &alone);
    assert!(status == Some(2) && sentence.contains("--json"), "{sentence}");
    for size in ["0", "513", "18446744073709551615"] {
        let (status, _, sentence) = job("", &[("RANK", "0"), ("WORLD_SIZE", size)]);
        let named = format!("variable WORLD_SIZE is `{size}`: a job of this program has 1 to 512 ranks");
        assert!(status == Some(2) && sentence.contains(&named), "{sentence}");
    }
    assert!(refusal("bench --device cpu --launch env --world-mode one-thread").contains("--world-mode"));
}

#[test]
fn no_transport_is_offered_that_does_not_exist() {
    for typed in ["--help", "bench --help", "plan --help", "verify --help", "simulate --help"] {
        let shown = text(&run(typed).stdout);
        assert!(shown.len() > 100, "{typed}: {shown}");
        let named: Vec<&str> = ["ibverbs", "not built yet"].into_iter().filter(|n| shown.contains(n)).collect();
        assert!(named.is_empty(), "{typed}: {named:?} in {shown}");
    }
}

#[test]
fn one_node_runs_with_a_network_that_it_does_not_need() {
    let options = "--ranks-per-node 5 --transport sim --link none --network hostile --chunk-rows 2";
    let result = object(&format!("bench {SMALL} {options} --json -"));
    assert_eq!((&result["verified"], &result["ranks_per_node"]), (&Value::Bool(true), &Value::from(5)));
    assert_eq!((&result["transport"], &result["link"]), (&Value::from("sim"), &Value::from("none")));
    let bytes = &result["bytes_per_rank"];
    assert_eq!((&bytes["dispatch_wire"], &bytes["combine_wire"]), (&Value::from(0), &Value::from(0)));
    let plan = text(&run(&format!("plan {SMALL} --ranks-per-node 5")).stdout);
    assert!(plan.contains("5 ranks in one node"), "{plan}");
}

#[test]
fn ranks_that_are_processes_verify_over_libfabric() {
    use tokenyard::internals::transport::network::libfabric::libfabric_sys::Library;
    if let Err(why) = Library::open() {
        println!("skipped: {why}");
        assert_ne!(std::env::var("TOKENYARD_STRICT").as_deref(), Ok("1"), "{why}");
        return;
    }
    for options in [
        "--world 4 --ranks-per-node 2 --transport libfabric:tcp --ragged",
        "--world 5 --ranks-per-node 2,2,1 --transport libfabric:tcp --layout masked",
        "--world 3 --ranks-per-node 2,1 --transport libfabric:shm --allow-old-shm",
    ] {
        let shape = "--hidden 128 --experts 10 --top-k 3 --tokens 9 --iters 3 --timeout-ms 60000";
        let result = object(&format!("bench --device cpu --launch processes {shape} {options} --json -"));
        assert_eq!(result["verified"], Value::Bool(true), "{options}: {result}");
        assert!(result["bytes_per_rank"]["dispatch_wire"].as_u64() > Some(0), "{options}: {result}");
        let named = result["transport"].as_str().unwrap();
        assert!(options.contains(named) && named.starts_with("libfabric:"), "{options}: {named}");
    }
    let mut bench = command(&format!("bench {SMALL} --ranks-per-node 1 --transport libfabric:tcp"));
    let output = bench.env("FI_PROVIDER", "efa").output().unwrap();
    let why = text(&output.stderr);
    assert!(output.status.code() == Some(1) && why.contains("FI_PROVIDER is `efa`") && why.contains("unset"), "{why}");
}

#[test]
fn every_mode_layout_and_schedule_verifies_over_nodes() {
    for options in [
        "--ranks-per-node 2,3",
        "--ranks-per-node 2,3 --mode split --layout masked --scales ue8m0 --quantize --network hostile --chunk-rows 1",
        "--ranks-per-node 1 --mode graph --layout token --dtype bf16 --weights none --chunk-rows 2",
        "--ranks-per-node 3,1,1 --mode graph --ragged --accumulate --align 16 --network hostile",
        "--ranks-per-node 4,1 --world-mode one-thread --weights combine --combine-dtype fp16 --chunk-rows 1",
        "--ranks-per-node 2,2,1 --world-mode one-thread --mode split --ragged --dtype fp32 --network hostile",
        "--ranks-per-node 2,3 --link 400:1:0.1",
        "--ranks-per-node 2,3 --partial fp8 --network hostile --chunk-rows 1",
        "--ranks-per-node 1 --partial fp8 --combine-dtype fp16 --layout token --mode split --accumulate",
    ] {
        let result = object(&format!("bench {SMALL} {options} --json -"));
        assert_eq!(result["verified"], Value::Bool(true), "{options}: {result}");
        let bytes = &result["bytes_per_rank"];
        assert!(bytes["dispatch_wire"].as_u64() > Some(0) && bytes["combine_wire"].as_u64() > Some(0), "{result}");
    }
}

#[test]
fn a_run_over_nodes_reports_them_and_the_floor_of_its_link() {
    let result = object(&format!("bench {SMALL} --ranks-per-node 2,3 --link 8:900:0 --json -"));
    assert_eq!((&result["ranks_per_node"], &result["link"]), (&Value::from("2,3"), &Value::from("8:900:0")));
    for way in ["dispatch", "combine"] {
        let floor = result["floor_us"][way].as_f64().unwrap();
        // A latency, and the bytes at 1000 a µs.
        let bytes = result["bytes_per_rank"][&format!("{way}_wire")].as_f64().unwrap();
        assert!((floor - 900.0 - bytes / 1000.0).abs() < 0.1, "{result}");
        // The rank that begins first waits at least that long; a rank that begins late may find everything arrived.
        assert!(result[&format!("{way}_us")]["max"].as_f64() >= Some(900.0), "{result}");
    }
    let even = object(&format!("bench {SMALL} --ranks-per-node 1 --json -"));
    assert_eq!(even["ranks_per_node"], 1);
    let bytes = &even["bytes_per_rank"];
    assert_eq!(bytes["dispatch_nvlink"], 0, "nodes of one rank have nothing within");
    assert!(bytes["dispatch_wire"].as_u64() > Some(0));
    let shown = text(&run(&format!("bench {SMALL} --ranks-per-node 2,3")).stdout);
    assert!(shown.contains("in nodes of 2,3, sim, link none") && shown.contains("wire out"), "{shown}");
    let plan = text(&run(&format!("plan {SMALL} --ranks-per-node 2,3")).stdout);
    assert!(plan.contains("5 ranks in nodes of 2,3"), "{plan}");
}

#[test]
fn by_default_the_cpu_device_has_nodes_of_four() {
    let shape = "--device cpu --hidden 128 --experts 16 --top-k 4 --tokens 2 --iters 1 --warmup 0";
    let result = object(&format!("bench {shape} --json -"));
    assert_eq!((&result["world"], &result["verified"]), (&Value::from(8), &Value::Bool(true)));
    assert_eq!(result["ranks_per_node"], 4);
}

#[test]
fn processes_verify_over_nodes() {
    for options in ["--ranks-per-node 2,3", "--ranks-per-node 1 --network hostile --chunk-rows 1 --mode split"] {
        let result = object(&format!("bench {SMALL} {options} --launch processes --json -"));
        assert_eq!((&result["verified"], &result["launch"]), (&Value::Bool(true), &Value::from("processes")));
    }
}

fn replay(case: &str) -> String {
    let output = command("verify --device cpu --replay").arg(case).output().unwrap();
    assert!(output.status.success(), "{case}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn verify_draws_nodes_and_replays_them() {
    let printed = text(&run("verify --device cpu --seeds 12 --seed 5").stdout);
    assert!(
        printed.contains("nodes: 1 in ") && printed.contains(" uneven)") && printed.contains(" 0 failed"),
        "{printed}"
    );
    let faults = "experts=9,top_k=3,tokens=5,max_tokens=5,chunk_rows=1,iters=4";
    for case in [
        "hidden=64,world=5,nodes=2+3,seed=3,accumulate=yes,nics=3",
        "hidden=64,world=6,nodes=1+2+3,seed=4,fault=overflow,mode=split,ahead=2",
        "hidden=128,world=6,nodes=1+2+3,seed=8,fault=overflow,partial=fp8,round_tokens=2",
        "hidden=64,world=6,nodes=3+3,seed=5,fault=routing,weights=combine",
        "hidden=64,world=4,nodes=1+1+1+1,seed=6,fault=overflow,layout=token,network=calm,link=cx7",
    ] {
        assert!(replay(&format!("{faults},{case}")).starts_with("right: "), "{case}");
    }
    let one_thread = format!("hidden=64,world=5,nodes=2+3,sms=2,world_mode=one-thread,hold_stores=yes,seed=7,{faults}");
    let first = replay(&one_thread);
    assert!(first.contains("schedule "), "{first}");
    assert_eq!(replay(&one_thread), first);
}

/// Completions that are later than whole messages: a link's message may be sent, and its staging be free again, while
/// an earlier message's staging of another link is not. Weights go link by link.
#[test]
fn a_relay_keeps_track_of_what_it_has_passed_on_however_late_completions_come() {
    let shape =
        "hidden=16,experts=8,top_k=1,weights=combine,tokens=2,max_tokens=2,sms=2,iters=24,world_mode=one-thread";
    for seed in [1, 5] {
        let printed = replay(&format!("world=8,nodes=1+1+1+1+1+1+1+1,seed={seed},{shape}"));
        assert!(printed.starts_with("right: "), "{printed}");
    }
}
