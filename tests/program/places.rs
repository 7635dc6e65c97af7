//! The NICs and cores that the ranks of a bench take: which domains each of them opens at the double of EFA, and what
//! the kernel says of the CPUs of their proxies.

use crate::{double, rig};

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rig::{command, refusal, text};
use serde_json::{Value, json};
use tokenyard::internals::transport::network::libfabric::libfabric_sys::VARIABLE;
use tokenyard::topology::Machine;

const SHAPE: &str = "--device cpu --hidden 128 --experts 30 --top-k 3 --tokens 9 --timeout-ms 20000 --json -";
const TWO: &str = "--world 2 --ranks-per-node 1";

/// CPUs of different cores that this process may use.
fn cores() -> Vec<u32> {
    let machine = Machine::here();
    machine.one_of_each_core(machine.allowed())
}

/// What was seen of a run: NICs of the double that each process opened, and CPUs of each thread that is a proxy.
#[derive(Default)]
struct Seen {
    nics: BTreeMap<i32, BTreeSet<u32>>,
    /// By process and thread, the last that was seen: a thread has its name before it is pinned.
    cpus: BTreeMap<(i32, String), String>,
}

impl Seen {
    /// The double's file of a queue pair is `tyefa-SCOPE-qNIC-NUMBER`; its third word is the number of its process.
    fn look(&mut self, folder: &Path, run: u32) {
        for file in fs::read_dir(folder).unwrap().flatten() {
            let name = file.file_name().into_string().unwrap();
            let nic = name.split_once("-q").and_then(|(_, rest)| rest.split('-').next()?.parse().ok());
            let bytes = fs::read(file.path()).unwrap_or_default();
            let process = bytes.get(8..12).map(|word| i32::from_le_bytes(word.try_into().unwrap()));
            if let (Some(nic), Some(process @ 1..)) = (nic, process) {
                self.nics.entry(process).or_default().insert(nic);
            }
        }
        let children = fs::read_to_string(format!("/proc/{run}/task/{run}/children")).unwrap_or_default();
        for process in children.split_whitespace().filter_map(|word| word.parse().ok()).chain([run as i32]) {
            for task in fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten() {
                let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
                let status = read("status");
                let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
                if let (true, Some(cpus)) = (read("comm").trim() == "tokenyard proxy", cpus) {
                    let thread = task.file_name().into_string().unwrap();
                    self.cpus.insert((process, thread), cpus.trim().to_owned());
                }
            }
        }
    }

    /// CPUs of each proxy, of all processes.
    fn pinned(&self) -> Vec<&str> {
        let mut cpus: Vec<&str> = self.cpus.values().map(String::as_str).collect();
        cpus.sort_unstable();
        cpus
    }
}

fn sorted(cpus: [u32; 2]) -> Vec<String> {
    let mut cpus = cpus.map(|cpu| cpu.to_string());
    cpus.sort_unstable();
    cpus.to_vec()
}

/// Runs a bench and looks at it meanwhile.
fn watch(mut bench: Command, folder: &Path) -> (Output, Seen) {
    let bench = bench.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = bench.spawn().unwrap();
    let mut seen = Seen::default();
    // The objects of a few ranks fit into the pipe.
    while child.try_wait().unwrap().is_none() {
        seen.look(folder, child.id());
        std::thread::sleep(Duration::from_millis(1));
    }
    (child.wait_with_output().unwrap(), seen)
}

/// A record of a machine with two switches, each with a GPU and two EFA of the double, whose NUMA nodes have one of
/// these CPUs each.
fn record(folder: &Path, cpus: [u32; 2]) -> String {
    let [first, second] = cpus;
    let mut facts = format!("tokenyard-topology 1\nallowed {first},{second}\nnode 0 {first}\nnode 1 {second}\n");
    for (node, bus) in [(0, 1), (1, 5)] {
        let bridge = format!("0000:0{bus}:00.0");
        facts += &format!(
            "pci {bridge} 0604 1000:c030\npci 0000:0{}:00.0 0302 10de:2335 node={node} under={bridge}\n",
            bus + 3
        );
        for nic in 0..2 {
            let name = format!("rdmap{}s0", 2 * node + nic);
            facts +=
                &format!("pci 0000:0{}:00.0 0200 1d0f:efa2 node={node} under={bridge} rdma={name}\n", bus + 1 + nic);
        }
    }
    let path = folder.join("record");
    fs::write(&path, facts).unwrap();
    path.display().to_string()
}

#[test]
fn each_rank_opens_its_own_nics_and_its_proxy_keeps_its_own_core() {
    let Some(library) = double::efa() else { return };
    let [first, second, ..] = cores()[..] else { return println!("skipped: proxies of two ranks need two cores") };
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path(), [first, second]);
    let (own, name) = ([[0, 1], [2, 3]], |nic: &u32| format!("rdmap{nic}s0"));
    for (transport, options, nics) in [
        ("libfabric:efa", "--launch processes", own.map(Vec::from)),
        ("libfabric:efa", "--launch processes --nics 1", [vec![0], vec![2]]),
        // A lane more than NICs.
        ("libfabric:efa", "--launch processes --nics 3", own.map(Vec::from)),
        // As many lanes as devices are given.
        ("libfabric:efa:rdmap3s0,rdmap1s0", "--launch processes", [vec![1, 3], vec![1, 3]]),
        ("libfabric:efa:rdmap3s0,rdmap1s0", "--launch processes --nics 1", [vec![3], vec![3]]),
    ] {
        let files = tempfile::tempdir().unwrap();
        let typed = format!("bench --transport {transport} {TWO} {SHAPE} --iters 8 --topology {record} {options}");
        let mut bench = command(&typed);
        bench.env(VARIABLE, library).env("TOKENYARD_EFA_DIR", files.path());
        let (output, seen) = watch(bench, files.path());
        assert!(output.status.success(), "{typed}: {}", text(&output.stderr));
        let opened: Vec<Vec<u32>> = seen.nics.values().map(|nics| nics.iter().copied().collect()).collect();
        let nics: BTreeSet<Vec<u32>> = nics.into_iter().collect();
        assert_eq!((opened.len(), opened.into_iter().collect()), (2, nics), "{typed}");
        assert_eq!(seen.pinned(), sorted([first, second]), "{typed}");
        let result: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(result["verified"], true);
        let core = |rank: usize| json!([first, second][rank]);
        assert_eq!((&result["places"][0]["core"], &result["places"][1]["core"]), (&core(0), &core(1)));
        if transport == "libfabric:efa" {
            let own = own.map(|nics| json!(nics.iter().map(name).collect::<Vec<_>>()));
            assert_eq!([0, 1].map(|rank| result["places"][rank]["devices"].clone()), own, "{typed}");
        }
    }
}

#[test]
fn threads_over_any_network_keep_the_cores_that_are_given() {
    let [first, second, ..] = cores()[..] else { return println!("skipped: proxies of two ranks need two cores") };
    let folder = tempfile::tempdir().unwrap();
    let (output, seen) =
        watch(command(&format!("bench {TWO} {SHAPE} --iters 50 --cores {first},{second}")), folder.path());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(seen.pinned(), sorted([first, second]));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["places"], json!([{"core": first}, {"core": second}]));
    assert_eq!(result["options"][0], format!("--cores {}", tokenyard::topology::Cpus::from_iter([first, second])));
    // By default nothing is chosen where there is no NIC.
    let (output, seen) = watch(command(&format!("bench {TWO} {SHAPE} --iters 50")), folder.path());
    assert!(!seen.pinned().is_empty() && !seen.pinned().contains(&first.to_string().as_str()), "{:?}", seen.pinned());
    assert!(serde_json::from_slice::<Value>(&output.stdout).unwrap().get("places").is_none());
}

/// The same command on one CPU alone.
fn on(cpu: u32, mut command: Command) -> Output {
    // SAFETY: between fork and exec it sets this process's affinity, by a system call on memory of its own.
    unsafe {
        command.pre_exec(move || {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(cpu as usize, &mut set);
            let code = libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
            if code == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    command.output().unwrap()
}

#[test]
fn too_few_cores_are_named_and_nothing_hangs() {
    let cores = cores();
    let first = cores[0];
    let sentence = refusal(&format!("bench {TWO} {SHAPE} --cores {first}"));
    assert!(sentence.contains("cores is") && sentence.contains("2 proxies spin on this host"), "{sentence}");
    assert!(sentence.contains(&format!("may use 1 cores (CPUs {first})")), "{sentence}");
    let [_, second, ..] = cores[..] else { return println!("skipped: the rest needs two cores") };
    // The process's affinity counts, not the machine's.
    let output = on(first, command(&format!("bench {TWO} {SHAPE} --cores {second}")));
    let sentence = text(&output.stderr);
    assert!(output.status.code() == Some(2) && sentence.contains(&format!("may not use CPU {second}")), "{sentence}");
    let Some(library) = double::efa() else { return };
    let folder = tempfile::tempdir().unwrap();
    let record = record(folder.path(), [first, second]);
    let mut bench = command(&format!("bench {TWO} {SHAPE} --iters 3 --transport libfabric:efa --topology {record}"));
    bench.env(VARIABLE, library).env("TOKENYARD_EFA_DIR", folder.path());
    let output = on(first, bench);
    let notes = text(&output.stderr);
    assert!(output.status.success(), "{notes}");
    assert!(notes.contains("4 threads spin, and this process may use 1 cores (CPUs "), "{notes}");
    assert!(notes.contains("proxies are not pinned: ") && notes.contains("has no free core left"), "{notes}");
    let places = serde_json::from_slice::<Value>(&output.stdout).unwrap()["places"].clone();
    assert_eq!(places, json!([{"devices": ["rdmap0s0", "rdmap1s0"]}, {"devices": ["rdmap2s0", "rdmap3s0"]}]));
}

#[test]
fn files_and_options_that_do_not_fit_are_refused_in_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("table");
    fs::write(&table, "gpu 0000:53:00.0 nics=rdmap79s0\n").unwrap();
    let table = table.display();
    for (options, named) in [
        ("--ranks-per-node 2 --cores 0".to_string(), "argument --cores is `0`: the ranks have no proxy threads"),
        (format!("{TWO} --world-mode one-thread --topology {table}"), "no proxy threads"),
        (format!("{TWO} --topology /none"), "argument --topology is `/none`: unreadable"),
        (format!("{TWO} --topology {table}"), "line 1, no such GPU"),
        (format!("{TWO} --topology tests/data/topology/../../all.sh"), "argument --topology is"),
        (format!("{TWO} --cores 3-1"), "argument --cores is `3-1`: give CPUs below 8192"),
        (format!("{TWO} --transport libfabric:tcp:eth0"), "give sim, libfabric:tcp"),
        (format!("{TWO} --transport libfabric:efa:"), "such as libfabric:efa:rdmap79s0,rdmap80s0"),
    ] {
        let options = if options.contains("--world") { options } else { format!("--world 2 {options}") };
        let sentence = refusal(&format!("bench {SHAPE} {options}"));
        assert!(sentence.contains(named), "{options}: {sentence}");
    }
    // The domains of a recorded machine are not those of the double.
    let Some(library) = double::efa() else { return };
    let mut bench =
        command(&format!("bench {TWO} {SHAPE} --transport libfabric:efa --topology tests/data/topology/p5"));
    let output = bench.env(VARIABLE, library).output().unwrap();
    let sentence = text(&output.stderr);
    assert!(
        !output.status.success() && sentence.contains("rdmap79s0") && sentence.contains("rdmap0s0-rdm"),
        "{sentence}"
    );
}
