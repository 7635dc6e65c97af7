use super::machine::MAX_DEPTH;
use super::nics::part;
use super::*;
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Recorded machines.
const TREES: [&str; 9] = ["p5", "p5en", "p6-b200", "p4d", "g6", "hgx-h100", "gb200", "vm", "nd-h100-v5"];

fn path_of(tree: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/topology").join(tree)
}

fn recorded(tree: &str) -> Machine {
    record::read(&path_of(tree)).unwrap()
}

fn parsed(lines: &str) -> Machine {
    record::parse(&format!("tokenyard-topology 1\n{lines}")).unwrap()
}

fn chosen(machine: &Machine) -> Topology {
    Topology::of(machine, &Wanted::default()).unwrap()
}

/// Names of each GPU's NICs.
fn nics(topology: &Topology) -> Vec<String> {
    let names = |gpu: &GpuPlace| gpu.nics.iter().map(|nic| nic.name.clone()).collect::<Vec<_>>().join(" ");
    topology.gpus.iter().map(names).collect()
}

fn cores(topology: &Topology) -> Vec<String> {
    topology.gpus.iter().map(|gpu| gpu.cores.iter().copied().collect::<Cpus>().to_string()).collect()
}

/// Names of the NICs that are left out, with the reasons.
fn left_out(topology: &Topology) -> Vec<(String, WhyNot)> {
    topology.left_out.iter().map(|nic| (nic.name.clone().unwrap_or_default(), nic.why)).collect()
}

#[test]
fn lists_of_cpus_are_read_as_the_kernel_writes_them() {
    for (text, len) in [("", 0), ("0", 1), ("0-3,8", 5), ("8191", 1), ("0-8191", 8192), ("3,1-2", 3), ("1-3,2-4", 4)] {
        assert_eq!(Cpus::parse(text).unwrap().len(), len, "{text}");
    }
    for text in [
        "8192",
        "0-8192",
        "0-8191,0",
        "3-1",
        "-",
        "1-",
        "-1",
        "+1",
        " 1",
        "1,",
        ",1",
        "1--2",
        "0x1",
        "99999999999",
        "1-2-3",
    ] {
        assert_eq!(Cpus::parse(text), None, "{text}");
    }
    assert_eq!(Cpus::parse("5,0-2,7,6").unwrap().to_string(), "0-2,5-7");
    assert!(Cpus::listed("").is_err());
}

#[test]
fn addresses_are_read_in_all_forms_that_tools_write() {
    for (text, shown) in [
        ("0000:59:00.0", "0000:59:00.0"),
        ("00000000:5A:1F.7", "0000:5a:1f.7"),
        ("10000:01:00.0", "10000:01:00.0"),
        ("0101:00:00.0", "0101:00:00.0"),
    ] {
        assert_eq!(PciAddress::parse(text).unwrap().to_string(), shown);
    }
    let refused =
        ["", "59:00.0", "000:59:00.0", "0000:59:20.0", "0000:59:00.8", "0000:5:00.0", "0000:59:00", "+000:59:00.0"];
    for text in refused.into_iter().chain(["0000:59:00.00", "000000000:59:00.0", "0000:59:00.0 ", "0000:é9:00.0"]) {
        assert_eq!(PciAddress::parse(text), None, "{text}");
    }
}

/// Lays a machine out as sysfs and procfs have it.
fn lay_out(machine: &Machine, root: &Path) {
    let put = |path: String, text: String| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text + "\n").unwrap();
    };
    let all: Cpus = machine.nodes.values().flat_map(Cpus::iter).collect();
    put("sys/devices/system/cpu/online".into(), all.to_string());
    put("proc/self/status".into(), format!("Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t{}", machine.allowed));
    for cpu in all.iter() {
        let core = machine.cores.iter().find(|core| core.contains(cpu));
        let core = core.map_or(cpu.to_string(), Cpus::to_string);
        // Old kernels have the second name alone.
        let name = if cpu % 2 == 0 { "core_cpus_list" } else { "thread_siblings_list" };
        put(format!("sys/devices/system/cpu/cpu{cpu}/topology/{name}"), core);
    }
    for (node, cpus) in &machine.nodes {
        put(format!("sys/devices/system/node/node{node}/cpulist"), cpus.to_string());
    }
    put("sys/devices/system/node/node77/cpulist".into(), String::new());
    fs::create_dir_all(root.join("sys/bus/pci/devices")).unwrap();
    fs::create_dir_all(root.join("sys/bus/pci/devices/not-an-address")).unwrap();
    for (nth, (address, device)) in machine.devices.iter().enumerate() {
        let above = machine.above(*address);
        let mut below = String::from("sys/devices/");
        for above in above.iter().rev() {
            match above {
                Above::Root(bus) => write!(below, "pci{bus}").unwrap(),
                Above::Bridge(bridge) => write!(below, "/{bridge}").unwrap(),
            }
        }
        let folder = format!("{below}/{address}");
        fs::create_dir_all(root.join(&folder)).unwrap();
        symlink(format!("../../../../{folder}"), root.join(format!("sys/bus/pci/devices/{address}"))).unwrap();
        put(format!("{folder}/class"), format!("0x{:04x}00", device.class));
        put(format!("{folder}/vendor"), format!("0x{:04x}", device.vendor));
        put(format!("{folder}/device"), format!("0x{:04x}", device.device));
        put(format!("{folder}/numa_node"), device.node.map_or("-1".into(), |node| node.to_string()));
        let node = device.node.and_then(|node| machine.nodes.get(&node));
        let local = if device.local.is_empty() { node } else { Some(&device.local) };
        if let Some(local) = local {
            put(format!("{folder}/local_cpulist"), local.to_string());
        }
        let Some(rdma) = &device.rdma else { continue };
        let port = format!("{folder}/infiniband/{}/ports/1", rdma.name);
        put(format!("{port}/lid"), "0x0".into());
        for (file, text) in [
            ("rate", rdma.rate_gbps.map(|rate| format!("{rate}.5 Gb/sec (4X NDR)"))),
            ("state", rdma.active.map(|active| if active { "4: ACTIVE" } else { "1: DOWN" }.to_string())),
            (
                "link_layer",
                rdma.link.map(|link| match link {
                    Link::Other => "Unspecified".to_string(),
                    known => format!("{known:?}"),
                }),
            ),
        ] {
            text.into_iter().for_each(|text| put(format!("{port}/{file}"), text));
        }
        if rdma.bond {
            put(format!("{folder}/net/eth{nth}/master/bonding/mode"), "802.3ad 4".into());
        }
        if let Some(node) = rdma.node {
            fs::create_dir_all(root.join(format!("{folder}/infiniband_verbs/uverbs{nth}"))).unwrap();
            if node {
                put(format!("dev/infiniband/uverbs{nth}"), String::new());
            }
        }
    }
}

/// The machine without what is not read: controllers that are no NICs of ours, and bridges above these alone.
fn without_others(machine: Machine) -> Machine {
    let ours: Vec<PciAddress> =
        machine.devices.iter().filter(|(_, device)| device.is_gpu() || device.is_nic()).map(|(&at, _)| at).collect();
    let above = ours.iter().flat_map(|&at| machine.above(at)).filter_map(|above| match above {
        Above::Bridge(bridge) => Some(bridge),
        Above::Root(_) => None,
    });
    let keep: std::collections::BTreeSet<PciAddress> = above.chain(ours.iter().copied()).collect();
    let devices =
        machine.devices.iter().filter(|(at, _)| keep.contains(at)).map(|(at, of)| (*at, of.clone())).collect();
    Machine { devices, ..machine }
}

#[test]
fn a_machine_is_read_from_sysfs_as_it_was_laid_out() {
    for tree in TREES {
        let mut machine = without_others(recorded(tree));
        machine.allowed = machine.allowed.iter().filter(|cpu| cpu % 5 != 3).collect();
        if let Some(rdma) = machine.devices.values_mut().rev().find_map(|device| device.rdma.as_mut()) {
            rdma.bond = true;
            rdma.node = Some(false);
            rdma.active = Some(false);
        }
        let folder = tempfile::tempdir().unwrap();
        lay_out(&machine, folder.path());
        let read = Machine::below(folder.path());
        assert_eq!(record::write(&read), record::write(&machine), "{tree}");
        assert_eq!(read, machine, "{tree}");
    }
}

#[test]
fn a_root_without_files_is_a_machine_without_facts() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(Machine::below(folder.path()), Machine::default());
    assert!(chosen(&Machine::default()).gpus.is_empty());
    // This machine, whatever it is.
    let here = Machine::here();
    assert!(!here.allowed().is_empty());
    assert_eq!(record::parse(&record::write(&here)).unwrap(), here);
}

#[test]
fn a_record_is_read_as_it_was_written() {
    for tree in TREES {
        let machine = recorded(tree);
        assert_eq!(record::parse(&record::write(&machine)).unwrap(), machine, "{tree}");
    }
    // Hyperthreads in no order, and cores of several sizes.
    let odd = parsed("allowed 0-9\ncores 0 5\ncores 1 4\ncores 2 6 7\ncores 3,8 9,10\n");
    assert_eq!(record::parse(&record::write(&odd)).unwrap(), odd);
    assert_eq!(odd.cores.len(), 5);
}

#[test]
fn a_bad_record_is_refused_with_its_line_and_what_to_give() {
    let bridge = "pci 0000:01:00.0 0604 1000:c030";
    for (lines, words) in [
        ("", "without allowed CPUs"),
        ("allowed 0-3\nallowed 0-3", "line 3, `allowed 0-3`: there is such a line before"),
        ("allowed", "line 2, `allowed`: give one list of CPUs"),
        ("allowed 0-9999", "line 2, `allowed 0-9999`: give CPUs below 8192"),
        ("allowed 0-3\n# comment\n\nwhat 1", "line 5, `what 1`: a line begins with"),
        ("cores 0-1 2", "equally long"),
        ("cores", "equally long"),
        ("cores 0-3 3-6", "CPU 3 is in a core already"),
        ("node 0", "give a node's number"),
        ("node 1024 0", "a number below 1024"),
        ("node 0 0-3\nnode 1 3-4", "CPU 3 is in another node"),
        ("node 0 0\nnode 0 1", "each node once"),
        ("pci 0000:01:00 0302 10de:2330", "line 2, `pci 0000:01:00 0302 10de:2330`: give an address"),
        ("pci 0000:01:00.0 0302 10de", "two ids"),
        ("pci 0000:01:00.0 302 10de:2330", "a class"),
        ("pci 0000:01:00.0 0302 10de:2330 node", "a number below"),
        ("pci 0000:01:00.0 0302 10de:2330 node=0 node=0", "node is given twice"),
        ("pci 0000:01:00.0 0302 10de:2330 colour=red", "facts are node"),
        ("pci 0000:01:00.0 0200 15b3:1021 rate=5", "give rdma=NAME"),
        ("pci 0000:01:00.0 0200 15b3:1021 rdma=a/b", "a name of at most 63"),
        ("pci 0000:01:00.0 0200 15b3:1021 rdma=a port=up", "port is active or down"),
        ("pci 0000:01:00.0 0200 15b3:1021 rdma=a link=token-ring", "infiniband, ethernet or other"),
        ("pci 0000:01:00.0 0200 15b3:1021 rdma=a\npci 0000:02:00.0 0200 15b3:1021 rdma=a", "another device has that"),
        (&format!("{bridge}\n{bridge}"), "line 2 has the same address"),
        (
            &format!("allowed 0\n{bridge} under=0000:00:00.0"),
            "line 3, device 0000:01:00.0: no line has the bridge 0000:00:00.0",
        ),
        (&format!("allowed 0\n{bridge} under=0000:01:00.0"), "under itself"),
        (
            &format!("allowed 0\n{bridge} under=0000:02:00.0\npci 0000:02:00.0 0604 1000:c030 under=0000:01:00.0"),
            "line 3, device 0000:01:00.0: it is under more than 32 bridges, or under itself",
        ),
        ("\x1b[31mred", "`\\u{1b}[31mred`"),
    ] {
        let error = record::parse(&format!("tokenyard-topology 1\n{lines}")).unwrap_err().to_string();
        assert!(error.contains(words) && error.lines().count() == 1, "{lines}: {error}");
    }
    for (text, words) in [
        ("", "is empty: the first line"),
        ("tokenyard-topology 2\nallowed 0", "line 1, `tokenyard-topology 2`: the first line of this version"),
        (&"#".repeat(record::MAX_BYTES + 1), "longer than 1048576 bytes"),
    ] {
        let error = record::parse(text).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn devices_and_bridges_are_limited() {
    let many = |count: u32| {
        let lines = (0..count).map(|n| format!("pci {n:04x}:00:00.0 0604 1000:c030\n")).collect::<String>();
        record::parse(&format!("tokenyard-topology 1\nallowed 0\n{lines}")).map_err(|error| error.to_string())
    };
    assert_eq!(many(4096).unwrap().devices().len(), 4096);
    assert!(many(4097).unwrap_err().contains("more than 4096 devices"));
    let nested = |depth: usize| {
        let mut lines = String::from("tokenyard-topology 1\nallowed 0\npci 0000:00:00.0 0604 1000:c030\n");
        for at in 1..=depth {
            writeln!(lines, "pci 0000:{at:02x}:00.0 0604 1000:c030 under=0000:{:02x}:00.0", at - 1).unwrap();
        }
        record::parse(&lines).map_err(|error| error.to_string())
    };
    let deepest = PciAddress::parse(&format!("0000:{MAX_DEPTH:02x}:00.0")).unwrap();
    assert_eq!(nested(MAX_DEPTH).unwrap().above(deepest).len(), MAX_DEPTH + 1);
    assert!(nested(MAX_DEPTH + 1).unwrap_err().contains("under more than 32 bridges"));
}

#[test]
fn records_of_thousands_of_devices_are_decided_soon() {
    let start = Instant::now();
    let mut lines = String::from("allowed 0-3\n");
    for at in 0..MAX_DEPTH - 1 {
        let under = at.checked_sub(1).map_or(String::new(), |at| format!(" under=0000:{at:02x}:00.0"));
        writeln!(lines, "pci 0000:{at:02x}:00.0 0604 1000:c030{under}").unwrap();
    }
    for at in 0..2000 {
        let under = format!("under=0000:{:02x}:00.0", MAX_DEPTH - 2);
        writeln!(lines, "pci {:04x}:00:00.0 0302 10de:2330 {under}", 1 + at).unwrap();
        writeln!(lines, "pci {:04x}:01:00.0 0207 15b3:1021 {under} rdma=mlx5_{at}", 1 + at).unwrap();
    }
    assert_eq!(nics(&chosen(&parsed(&lines)))[1999], "mlx5_1999");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn files_that_are_no_records_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |path: &Path| record::read(path).unwrap_err().to_string();
    assert!(refused(&folder.path().join("none")).contains("is unreadable: No such file"));
    assert!(refused(folder.path()).contains("no regular file"));
    assert!(refused(Path::new("/dev/zero")).contains("no regular file"));
    let file = folder.path().join("file");
    fs::write(&file, [0xff; 9]).unwrap();
    assert!(refused(&file).contains("not text"));
    fs::write(&file, vec![b'#'; record::MAX_BYTES + 1]).unwrap();
    assert!(refused(&file).contains("longer than 1048576 bytes"));
}

#[test]
fn parts_are_equal_in_order_and_never_empty() {
    let dealt = |items: usize, sharers: usize| -> Vec<Vec<usize>> {
        let items: Vec<usize> = (0..items).collect();
        (0..sharers).map(|at| part(&items, sharers, at)).collect()
    };
    assert_eq!(dealt(4, 2), [[0, 1], [2, 3]]);
    assert_eq!(dealt(1, 2), [[0], [0]]);
    assert_eq!(dealt(2, 4), [[0], [0], [1], [1]]);
    assert_eq!(dealt(5, 2), [vec![0, 1], vec![2, 3, 4]]);
    assert_eq!(dealt(3, 3), [[0], [1], [2]]);
    assert_eq!(dealt(0, 2), [[0; 0], [0; 0]]);
}

/// A switch with two GPUs and a NIC, a NIC beside it on the same root bus, and one elsewhere.
fn switch(nics: [&str; 3]) -> Machine {
    let [behind, beside, elsewhere] = nics;
    parsed(
        &format!(
            "allowed 0-7\nnode 0 0-3\nnode 1 4-7\npci 0000:00:01.0 0604 8086:1 node=0\n\
         pci 0000:01:00.0 0604 1000:c030 under=0000:00:01.0\n\
         pci 0000:02:00.0 0302 10de:2330 node=0 under=0000:01:00.0\n\
         pci 0000:02:01.0 0302 10de:2330 node=0 under=0000:01:00.0\n\
         pci 0000:02:02.0 0207 15b3:1021 node=0 under=0000:01:00.0 rdma=behind {behind}\n\
         pci 0000:00:02.0 0207 15b3:1021 node=0 rdma=beside {beside}\n\
         pci 0000:80:00.0 0207 15b3:1021 node=1 rdma=elsewhere {elsewhere}\n"
        )
        .replace("8086:1 ", "8086:0001 "),
    )
}

fn names(pairs: &[(&str, WhyNot)]) -> Vec<(String, WhyNot)> {
    pairs.iter().map(|(name, why)| ((*name).to_string(), *why)).collect()
}

#[test]
fn nics_that_are_not_of_the_gpus_network_are_left_out_with_the_reason() {
    for (facts, used, out) in [
        // Those beside are for storage.
        (["", "", ""], "behind", &[("beside", WhyNot::Apart), ("elsewhere", WhyNot::Apart)][..]),
        (["bond=yes", "", "bond=yes"], "beside", &[("behind", WhyNot::Bond), ("elsewhere", WhyNot::Bond)]),
        (["bond=yes", "bond=yes", "bond=yes"], "behind", &[("beside", WhyNot::Apart), ("elsewhere", WhyNot::Apart)]),
        (["port=down", "port=active", ""], "beside", &[("behind", WhyNot::Down)]),
        (["port=down", "port=down", "port=down"], "behind", &[("beside", WhyNot::Apart), ("elsewhere", WhyNot::Apart)]),
        (["verbs=no", "verbs=yes", "verbs=no"], "beside", &[("behind", WhyNot::NoNode), ("elsewhere", WhyNot::NoNode)]),
        // A kind that reaches GPUs by a bridge comes before a faster one.
        (
            ["link=ethernet rate=100", "link=infiniband rate=400", "link=infiniband rate=400"],
            "behind",
            &[("beside", WhyNot::OtherKind), ("elsewhere", WhyNot::OtherKind)],
        ),
        (["port=down", "rate=400", "rate=200"], "beside", &[("elsewhere", WhyNot::Slower), ("behind", WhyNot::Down)]),
    ] {
        let topology = chosen(&switch(facts));
        assert_eq!(nics(&topology), [used, used], "{facts:?}");
        let mut wanted = names(out);
        let mut found = left_out(&topology);
        wanted.sort_by(|a, b| a.0.cmp(&b.0));
        found.retain(|(name, why)| (name.as_str(), *why) != ("elsewhere", WhyNot::Beyond));
        found.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(found, wanted, "{facts:?}");
    }
}

#[test]
fn nics_reached_by_c2c_are_a_second_class() {
    let mut machine = switch(["rate=400", "rate=400", "rate=400"]);
    machine.devices.values_mut().filter(|device| device.is_gpu()).for_each(|device| device.device = 0x2941);
    let topology = chosen(&machine);
    assert_eq!(nics(&topology), ["behind", "behind"]);
    let out = names(&[("beside", WhyNot::SecondClass), ("elsewhere", WhyNot::SecondClass)]);
    assert_eq!(left_out(&topology), out);
    let named = WantedNics::Named(vec!["behind".into(), "beside".into()]);
    let both = Topology::of(&machine, &Wanted::new(named, None)).unwrap();
    assert_eq!(left_out(&both), names(&[("beside", WhyNot::Beyond), ("elsewhere", WhyNot::NotNamed)]));
}

#[test]
fn a_gpu_without_nics_of_its_own_takes_those_of_the_next_bridge_that_nobody_is_nearer_to() {
    // Two switches below one. The first has a GPU and a NIC, the second a GPU; one more NIC is below the upper one.
    let lines = "allowed 0-3\npci 0000:01:00.0 0604 1000:c030\npci 0000:02:00.0 0604 1000:c030 under=0000:01:00.0\n\
                 pci 0000:02:01.0 0604 1000:c030 under=0000:01:00.0\npci 0000:03:00.0 0302 10de:2330 under=0000:02:00.0\n\
                 pci 0000:03:01.0 0200 15b3:1021 under=0000:02:00.0 rdma=first\n\
                 pci 0000:04:00.0 0302 10de:2330 under=0000:02:01.0\n";
    let with = format!("{lines}pci 0000:02:02.0 0200 15b3:1021 under=0000:01:00.0 rdma=upper\n");
    assert_eq!(nics(&chosen(&parsed(&with))), ["first", "upper"]);
    let shared = chosen(&parsed(lines));
    assert_eq!(nics(&shared), ["first", "first"]);
    assert_eq!(shared.gpus.iter().map(|gpu| gpu.nics_shared).collect::<Vec<_>>(), [1, 1]);
    assert_eq!(shared.gpus[1].nics_from, NicsFrom::Bridge(PciAddress::parse("0000:01:00.0").unwrap()));
    assert!(shared.notes.iter().any(|note| note.contains("share a NIC")));
}

#[test]
fn lanes_go_round_a_gpus_nics() {
    let topology = chosen(&recorded("p5"));
    let name = |lane| topology.gpus[0].nic(lane).map(|nic| nic.name.as_str());
    assert_eq!([0, 3, 4].map(name), [Some("rdmap79s0"), Some("rdmap82s0"), Some("rdmap79s0")]);
    let none = chosen(&parsed("allowed 0\npci 0000:01:00.0 0302 10de:2330\n"));
    assert_eq!((none.gpus[0].nic(0), none.gpus[0].nics_from), (None, NicsFrom::Nowhere));
}

/// Two nodes of four cores with two hyperthreads, CPU n + 8 beside CPU n, and GPUs of these nodes (- is unknown).
fn gpus_of_nodes(allowed: &str, gpus: &[&str]) -> Machine {
    let mut lines = format!("allowed {allowed}\ncores 0-7 8-15\nnode 0 0-3,8-11\nnode 1 4-7,12-15\n");
    for (at, node) in gpus.iter().enumerate() {
        let node = if *node == "-" { String::new() } else { format!("node={node}") };
        writeln!(lines, "pci 0000:{:02x}:00.0 0302 10de:2330 {node}", at + 1).unwrap();
    }
    parsed(&lines)
}

#[test]
fn cores_are_of_the_gpus_node_within_the_affinity_one_hyperthread_each() {
    for (allowed, gpus, wanted) in [
        ("0-15", &["0", "0", "1", "1"][..], &["0-1", "2-3", "4-5", "6-7"][..]),
        // Of the first core the second hyperthread alone is allowed.
        ("1-15", &["0", "1"], &["1-3,8", "4-7"]),
        ("8-15", &["0", "0", "1"], &["8-9", "10-11", "12-15"]),
        // Nothing of node 1 is allowed, so its GPUs share node 0 with the others.
        ("0-3,8-11", &["0", "0", "1", "1"], &["0", "1", "2", "3"]),
        // No node is known: all cores in order.
        ("0-15", &["-", "-", "-", "-"], &["0-1", "2-3", "4-5", "6-7"]),
        // One is known; the others take the node that it leaves.
        ("0-15", &["-", "1", "-"], &["0-1", "4-7", "2-3"]),
        // Both are taken: each joins the node with fewer GPUs.
        ("0-15", &["0", "0", "1", "-"], &["0-1", "2-3", "4-5", "6-7"]),
        // Fewer cores than GPUs.
        ("0,4", &["0", "0", "1"], &["0", "0", "4"]),
        ("0", &["1", "1"], &["0", "0"]),
    ] {
        let topology = chosen(&gpus_of_nodes(allowed, gpus));
        assert_eq!(cores(&topology), wanted, "{allowed} {gpus:?}");
        let shared = topology.notes.iter().any(|note| note.contains("share a core"));
        assert_eq!(shared, allowed.len() < 4, "{allowed} {gpus:?}");
    }
    let from = |allowed, gpus| chosen(&gpus_of_nodes(allowed, gpus)).gpus.iter().map(|gpu| gpu.cores_from).collect();
    let wanted: Vec<CoresFrom> = from("0-3", &["0", "1", "-"]);
    assert_eq!(wanted, [CoresFrom::Node(0), CoresFrom::Elsewhere(Some(1)), CoresFrom::Elsewhere(None)]);
}

#[test]
fn an_unknown_node_is_found_by_local_cpus() {
    let gpu = "pci 0000:01:00.0 0302 10de:2330";
    for (cpus, node) in [(" cpus=4-5", Some(1)), (" cpus=0-7", None), ("", None)] {
        let machine = parsed(&format!("allowed 0-7\nnode 0 0-3\nnode 1 4-7\n{gpu}{cpus}\n"));
        assert_eq!(chosen(&machine).gpus[0].node, node, "{cpus}");
    }
}

#[test]
fn users_choose_nics_and_cores() {
    let machine = recorded("p5en");
    let of = |nics: &str, cores: Option<&str>| {
        let wanted = Wanted::new(WantedNics::parse(nics).unwrap(), cores.map(|list| Cpus::listed(list).unwrap()));
        Topology::of(&machine, &wanted).map_err(|error| error.to_string())
    };
    // One NIC each; the second ones are left out.
    let one = of("1", None).unwrap();
    assert_eq!(nics(&one)[..2], ["rdmap85s0", "rdmap87s0"]);
    assert_eq!(left_out(&one)[0], ("rdmap86s0".to_string(), WhyNot::Beyond));
    // Named ones, by name and by address, are dealt out by bridges, nodes, or anyhow.
    let two = of("0000:55:00.0,rdmap135s0", Some("0-7,96-103")).unwrap();
    let wanted = ["85", "85", "85", "85", "135", "135", "135", "135"].map(|n| format!("rdmap{n}s0"));
    assert_eq!(nics(&two), wanted);
    assert_eq!(cores(&two), ["0", "1", "2", "3", "4", "5", "6", "7"]);
    assert_eq!(of("mlx5_0", None).unwrap_err().split("there are: ").count(), 2);
    let refused = of("1", Some("0-3,192")).unwrap_err();
    assert!(refused.contains("this process may not use CPU 192; give some of 0-191"), "{refused}");
    for text in ["0", "257", "", "a,a", "a b", "a,,b", "mlx5/0"] {
        assert!(WantedNics::parse(text).is_err(), "{text}");
    }
}

#[test]
fn a_file_chooses_for_single_gpus() {
    let machine = recorded("p5en");
    let of = |text: &str| Topology::of(&machine, &Wanted::default().and_text(text)?);
    let text = "# by hand\n\ngpu 0000:5a:00.0 nics=0000:58:00.0,rdmap85s0\ngpu 00000000:A5:00.0 cores=95,50 # far\n";
    let topology = of(text).unwrap();
    assert_eq!(nics(&topology)[..3], ["rdmap85s0 rdmap86s0", "rdmap88s0 rdmap85s0", "rdmap110s0 rdmap111s0"]);
    assert_eq!(topology.gpus[1].nics_from, NicsFrom::File);
    assert_eq!((cores(&topology)[7].as_str(), topology.gpus[7].cores_from), ("50,95", CoresFrom::File));
    assert_eq!(left_out(&topology), names(&[("rdmap87s0", WhyNot::Beyond)]));
    for (text, words) in [
        ("gpu 0000:5a:00.0", "line 1, `gpu 0000:5a:00.0`: give nics=LIST, cores=LIST or both"),
        ("\ngpu 5a cores=0", "line 2, `gpu 5a cores=0`: give gpu and its PCI address"),
        ("gpu 0000:5a:00.0 cores=0 cores=1", "each once"),
        ("gpu 0000:5a:00.0 cores=x", "give CPUs below 8192"),
        ("gpu 0000:5a:00.0 cores=0\ngpu 0000:5a:00.0 cores=1", "line 1 is of the same GPU"),
        ("gpu 0000:11:00.0 cores=0", "line 1, no such GPU"),
        ("gpu 0000:5a:00.0 nics=mlx5_0", "NIC is mlx5_0: no such RDMA device"),
        ("gpu 0000:5a:00.0 cores=0,96", "line 1, CPU 96: another CPU of the list is a hyperthread of its core"),
        ("gpu 0000:5a:00.0 cores=200", "line 1, 200: this process may not use CPU 200"),
    ] {
        let error = of(text).unwrap_err().to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
}

#[test]
fn every_tree_divides_all_nics_and_cores_without_sharing() {
    for tree in TREES {
        let (machine, topology) = (recorded(tree), chosen(&recorded(tree)));
        let mut all: Vec<u32> = topology.gpus.iter().flat_map(|gpu| gpu.cores.clone()).collect();
        all.sort_unstable();
        assert_eq!(all, machine.one_of_each_core(machine.allowed()), "{tree}");
        let used = topology.gpus.iter().flat_map(|gpu| gpu.nics.iter().map(|nic| nic.address));
        let used: std::collections::BTreeSet<PciAddress> = used.collect();
        let nics = machine.devices().values().filter(|device| device.is_nic()).count();
        assert_eq!(used.len() + topology.left_out.len(), nics, "{tree}");
        let emulated = topology.notes.iter().any(|note| note.contains("has no RDMA write"));
        assert_eq!(emulated, tree == "p4d", "{tree}");
    }
}

/// Names of the NICs of ranks without addresses, for a network.
fn devices(tree: &str, kind: NicKind, ranks: usize) -> Vec<String> {
    let topology = Topology::of(&recorded(tree), &Wanted::default().of_kind(kind)).unwrap();
    let ranks = topology.ranks(&vec![None; ranks]).unwrap();
    ranks.iter().map(|rank| rank.devices.join(" ")).collect()
}

#[test]
fn ranks_take_the_nics_of_their_gpus_that_their_network_uses() {
    // As tests/program/topology.rs has them, from descriptions of the machines.
    let p5 = devices("p5", NicKind::Efa, 8);
    assert_eq!((p5[0].as_str(), p5.len()), ("rdmap79s0 rdmap80s0 rdmap81s0 rdmap82s0", 8));
    assert_eq!(p5[7], "rdmap198s0 rdmap199s0 rdmap200s0 rdmap201s0");
    let p5en = ["rdmap85s0 rdmap86s0", "rdmap87s0 rdmap88s0", "rdmap110s0 rdmap111s0", "rdmap112s0 rdmap113s0"];
    assert_eq!(devices("p5en", NicKind::Efa, 4), p5en);
    assert_eq!(devices("p4d", NicKind::Efa, 3), ["rdmap16s27", "rdmap16s27", "rdmap32s27"]);
    assert_eq!(devices("g6", NicKind::Efa, 8), ["rdmap150s0"; 8]);
    // Storage and management are left out, and what is no EFA is no network of verbs here.
    let hgx = ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"];
    assert_eq!(devices("hgx-h100", NicKind::Verbs, 8), hgx);
    assert_eq!(devices("hgx-h100", NicKind::Efa, 8), [""; 8]);
    assert_eq!(devices("p5", NicKind::Verbs, 8), [""; 8]);
    assert_eq!(devices("p6-b200", NicKind::Verbs, 1), ["ibp115s0f0"], "where verbs is asked for");
    let wanted = |kind, text| Wanted::default().of_kind(kind).and_text(text).unwrap();
    let efa = wanted(NicKind::Verbs, "gpu 0000:53:00.0 nics=rdmap79s0");
    let refused = Topology::of(&recorded("p5"), &efa).unwrap_err().to_string();
    assert!(refused.contains("rdmap79s0") && refused.contains("it is an EFA, which verbs does not use"), "{refused}");
    let connectx = Wanted::new(WantedNics::Named(vec!["mlx5_0".into()]), None).of_kind(NicKind::Efa);
    let refused = Topology::of(&recorded("hgx-h100"), &connectx).unwrap_err().to_string();
    assert!(refused.contains("it is no EFA, which libfabric:efa does not use"), "{refused}");
}

#[test]
fn ranks_of_a_gpu_divide_its_cores_and_proxies_never_share_one() {
    let topology = chosen(&recorded("p5en"));
    let [first, last] = ["0000:59:00.0", "0000:a5:00.0"].map(PciAddress::parse);
    let ranks = topology.ranks(&[first, last, first, first]).unwrap();
    let cores: Vec<String> =
        ranks.iter().map(|rank| rank.cores.iter().copied().collect::<Cpus>().to_string()).collect();
    assert_eq!(cores, ["0-3", "84-95", "4-7", "8-11"]);
    assert_eq!(ranks[0].devices, ranks[2].devices);
    assert_eq!(topology.proxy_cores(&ranks), Ok(vec![3, 95, 7, 11]));
    let more: Vec<RankPlace> = topology.ranks(&[None; 10]).unwrap();
    assert_eq!((&more[0].cores, &more[8].cores), (&(0..6).collect(), &(6..12).collect()), "10 ranks, 8 GPUs");
    let unknown = topology.ranks(&[PciAddress::parse("0000:00:00.0")]).unwrap_err().to_string();
    assert!(unknown.contains("GPU is 0000:00:00.0: the topology has 0000:59:00.0, "), "{unknown}");

    // CPU 96 is the second hyperthread of CPU 0's core.
    let with = |text: &str, cores| {
        let wanted = Wanted::new(WantedNics::Chosen, cores).and_text(text).unwrap();
        Topology::of(&recorded("p5en"), &wanted).unwrap()
    };
    let twins = with("gpu 0000:59:00.0 cores=0\ngpu 0000:5a:00.0 cores=96\n", None);
    let refused = twins.proxy_cores(&twins.ranks(&[None; 2]).unwrap()).unwrap_err().to_string();
    assert!(
        refused.contains("cores is 96: 2 proxies spin") && refused.contains("rank 1 has no free core"),
        "{refused}"
    );
    assert!(twins.notes.iter().any(|note| note.contains("share a core")), "{:?}", twins.notes);
    // The rank with the least choice takes its core first.
    let overlapping = with("gpu 0000:59:00.0 cores=0-1\ngpu 0000:5a:00.0 cores=97\n", None);
    assert_eq!(overlapping.proxy_cores(&overlapping.ranks(&[None; 2]).unwrap()), Ok(vec![0, 97]));

    // Fewer cores than proxies, although there are as many CPUs.
    let few = with("", Cpus::parse("0-3,96-99"));
    let ranks = few.ranks(&[None; 8]).unwrap();
    let refused = few.proxy_cores(&ranks).unwrap_err().to_string();
    assert!(refused.contains("8 proxies spin") && refused.contains("may use 4 cores (CPUs 0-3)"), "{refused}");
    let none = Topology::of(&recorded("p5en").within(&Cpus::default()), &Wanted::default()).unwrap();
    let refused = none.proxy_cores(&none.ranks(&[None]).unwrap()).unwrap_err().to_string();
    assert!(refused.contains("cores is none") && refused.contains("may use 0 cores"), "{refused}");
}

#[test]
fn without_gpus_ranks_divide_all_cores_and_choose_no_nics() {
    let machine = parsed("allowed 0-7\ncores 0-3 4-7\nnode 0 0-7\npci 0000:01:00.0 0200 15b3:1021 rdma=mlx5_0\n");
    let topology = chosen(&machine);
    let ranks = topology.ranks(&[None, PciAddress::parse("0000:02:00.0")]).unwrap();
    assert_eq!(ranks[0], RankPlace { devices: Vec::new(), cores: vec![0, 1] });
    assert_eq!(topology.proxy_cores(&ranks), Ok(vec![1, 3]));
    assert_eq!(topology.ranks(&[]), Ok(Vec::new()));
    let within = chosen(&machine.within(&Cpus::parse("2-9").unwrap()));
    assert_eq!(within.cores, [2, 3, 4, 5], "of this process alone, one CPU of each core");
}

#[test]
fn a_record_is_known_by_its_first_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    for (text, is) in [
        ("# made by hand\n\ntokenyard-topology 1\n", true),
        ("tokenyard-topology 2\n", true),
        ("gpu 0000:59:00.0 cores=0\ntokenyard-topology 1\n", false),
        ("", false),
    ] {
        fs::write(&file, text).unwrap();
        assert_eq!(record::is_record(&file), Ok(is), "{text}");
    }
    assert!(record::is_record(folder.path()).is_err_and(|why| why.to_string().contains("no regular file")));
}

/// Steele's and Vigna's splitmix64.
fn next(state: &mut u64) -> usize {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 1) as usize
}

/// Changes a byte, or a word or a line into another one of the text.
fn mutate(text: &mut Vec<u8>, state: &mut u64) {
    let at = next(state) % text.len().max(1);
    let ends = |text: &[u8], from: usize, by: fn(&u8) -> bool| {
        let first = text[..from].iter().rposition(by).map_or(0, |before| before + 1);
        first..text[from..].iter().position(by).map_or(text.len(), |length| from + length)
    };
    let word: fn(&u8) -> bool = |b| matches!(b, b' ' | b'\n' | b'=' | b':' | b',' | b'-');
    let line: fn(&u8) -> bool = |b| *b == b'\n';
    match next(state) % 8 {
        0 if at < text.len() => text[at] = next(state) as u8,
        1 if at < text.len() => drop(text.remove(at)),
        2 => text.insert(at, b"0123456789abcdef:.-,= \n#"[next(state) % 24]),
        3 if next(state).is_multiple_of(64) => text.truncate(at),
        choice if at < text.len() => {
            let by = if choice == 7 { line } else { word };
            let from = next(state) % text.len();
            let other = text[ends(text, from, by)].to_vec();
            let range = ends(text, at, by);
            text.splice(range, other);
        }
        _ => {}
    }
}

#[test]
fn a_million_mutations_of_records_are_read_or_refused() {
    let wanted = Wanted::default().and_text("gpu 0000:10:1c.0 cores=0-5 nics=rdmap16s27\n").unwrap();
    let (mut state, mut mutations, mut read, mut refused, mut accepted) = (1, 0, 0, 0, 0);
    let sources: Vec<Vec<u8>> = ["p4d", "vm"].iter().map(|tree| fs::read(path_of(tree)).unwrap()).collect();
    while mutations < 1_000_000 {
        let mut text = sources[next(&mut state) % sources.len()].clone();
        let count = 1 + next(&mut state) % 31;
        (0..count).for_each(|_| mutate(&mut text, &mut state));
        mutations += count;
        match record::parse(&String::from_utf8_lossy(&text)) {
            Ok(machine) => {
                read += 1;
                let topology = Topology::of(&machine, &Wanted::default()).unwrap();
                assert!(topology.gpus.iter().all(|gpu| gpu.nics.len() <= machine.devices().len()));
                // It names a GPU, a NIC and CPUs that the record may lack now.
                accepted += usize::from(Topology::of(&machine, &wanted).is_ok());
            }
            Err(error) => {
                refused += 1;
                assert!(!error.to_string().contains(char::is_control), "{error:?}");
            }
        }
    }
    assert!(read > 1000 && refused > 1000 && accepted > 100, "{read} read, {refused} refused, {accepted} accepted");
}
