//! Whole runs over libfabric's provider efa, as its double plays it, with devices and versions that differ.

use crate::{double, rig};

use rig::{command, text};
use serde_json::Value;
use std::process::Output;
use tokenyard::internals::transport::network::libfabric::libfabric_sys::VARIABLE;

const SHAPE: &str = "--hidden 128 --experts 30 --top-k 3 --tokens 9 --iters 3 --timeout-ms 20000";
const PROCESSES: &str = "--world 4 --ranks-per-node 2 --launch processes";

/// A run over the double with its settings; `None` if the double cannot be had.
fn bench(options: &str, settings: &[(&str, &str)]) -> Option<Output> {
    let library = double::efa()?;
    let typed = format!("bench --device cpu --transport libfabric:efa {SHAPE} {options} --json -");
    let settings = settings.iter().map(|(name, value)| (format!("TOKENYARD_EFA_{name}"), value));
    Some(command(&typed).env(VARIABLE, library).envs(settings).output().unwrap())
}

#[test]
fn runs_verify_with_one_nic_and_several_whatever_the_library_and_device_are() {
    for (options, settings) in [
        ("--world 4 --ranks-per-node 2 --launch processes --ragged --nics 4", &[][..]),
        ("--world 5 --ranks-per-node 2,2,1 --launch processes --layout masked", &[]),
        ("--world 3 --ranks-per-node 1 --launch threads --nics 2", &[("DUPLICATES", "500"), ("DELAYS", "500")]),
        (PROCESSES, &[("VERSION", "1.18"), ("DEVICE", "0xefa2")]),
        (PROCESSES, &[("VERSION", "2.4"), ("DIRECT", "0")]),
        (PROCESSES, &[("DEPTH", "32"), ("BATCH", "4")]),
    ] {
        let Some(output) = bench(options, settings) else { return };
        assert!(output.status.success(), "{options} {settings:?}: {}", text(&output.stderr));
        let result: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&result["verified"], &result["transport"]), (&Value::Bool(true), &Value::from("libfabric:efa")));
        assert!(result["bytes_per_rank"]["dispatch_wire"].as_u64() > Some(0), "{options}: {result}");
    }
}

#[test]
fn what_would_emulate_writes_or_lose_them_is_an_error_with_advice() {
    let variable = "FI_EFA_USE_UNSOLICITED_WRITE_RECV";
    if let Some(library) = double::efa() {
        let typed = format!("bench --device cpu --transport libfabric:efa {SHAPE} {PROCESSES}");
        let output = command(&typed).env(VARIABLE, library).env(variable, "OFF").output().unwrap();
        let sentence = text(&output.stderr);
        assert!(!output.status.success() && sentence.contains(variable) && sentence.contains("unset it"), "{sentence}");
    }
    for (settings, named, advice) in [
        (&[("VERSION", "1.17")][..], "may emulate writes", "needs 1.18 or later"),
        (&[("RDMA", "0")], "emulates the writes of NIC rdmap0s0-rdm", "use a device with RDMA writes"),
        (&[("NICS", "0")], "has no provider efa", "choose another provider"),
        // Registration of the arenas.
        (&[("PAGES", "8")], "opens no memory region", "use huge pages"),
        // The completion queue's.
        (&[("FAIL_UNSOLICITED", "5")], "reports an error of no write", "reset the endpoint"),
    ] {
        let Some(output) = bench("--world 2 --ranks-per-node 1 --launch processes", settings) else { return };
        let sentence = text(&output.stderr);
        assert!(!output.status.success(), "{settings:?}: {sentence}");
        assert!(sentence.contains(named) && sentence.contains(advice), "{settings:?}: {sentence}");
    }
}
