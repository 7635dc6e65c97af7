//! `tokenyard topology` for recorded machines. The tables are written by hand from descriptions of the machines, each
//! of which is named beside its table and in the record.

use crate::rig;

use std::fs;

use rig::{command, object, refusal, run, text};
use serde_json::{Value, json};

/// A GPU: its address, its NICs, the place that they are chosen by, and its cores.
type Row = (&'static str, &'static [&'static str], &'static str, (u32, u32));

fn of(tree: &str) -> String {
    format!("topology --from tests/data/topology/{tree}")
}

/// The table must be these GPUs, with the cores of a node in order; and these NICs must be left out.
fn assert_table(tree: &str, rows: &[Row], nodes: &[u32], left_out: &[&str]) -> Value {
    let table = object(&format!("{} --json -", of(tree)));
    let gpus = table["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), rows.len(), "{tree}");
    for ((gpu, (address, nics, from, (first, last))), node) in gpus.iter().zip(rows).zip(nodes) {
        let names: Vec<&str> =
            gpu["nics"].as_array().unwrap().iter().map(|nic| nic["name"].as_str().unwrap()).collect();
        assert_eq!((gpu["gpu"].as_str(), names.as_slice()), (Some(*address), *nics), "{tree}");
        assert_eq!((gpu["nics_from"].as_str(), &gpu["node"]), (Some(*from), &json!(node)), "{tree} {address}");
        let sharers = rows.iter().filter(|row| row.1.iter().any(|nic| nics.contains(nic))).count();
        assert_eq!(gpu["nics_shared"], json!(sharers - 1), "{tree} {address}");
        let cores: Vec<u32> = (*first..=*last).collect();
        assert_eq!(gpu["cores"], json!(cores), "{tree} {address}");
        assert_eq!(gpu["cores_from"], json!(format!("NUMA node {node}")), "{tree} {address}");
    }
    let out: Vec<&str> =
        table["left_out"].as_array().unwrap().iter().map(|nic| nic["name"].as_str().unwrap()).collect();
    assert_eq!(out, left_out, "{tree}");
    table
}

/// Eight GPUs, four of each of two nodes.
const FOUR_AND_FOUR: [u32; 8] = [0, 0, 0, 0, 1, 1, 1, 1];

#[test]
fn p5_has_four_efa_for_each_gpu() {
    // Amazon's p5.48xlarge: 32 EFA, 8 GPUs, 96 cores in 2 nodes. Each switch has one GPU and four EFA (1d0f:efa1), by
    // the paths of the capture: 53 has 4f to 52, and so on. 48 cores of a node are 12 for each of 4 GPUs.
    let rows: [Row; 8] = [
        ("0000:53:00.0", &["rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0"], "bridge 0000:45:00.0", (0, 11)),
        ("0000:64:00.0", &["rdmap96s0", "rdmap97s0", "rdmap98s0", "rdmap99s0"], "bridge 0000:56:00.0", (12, 23)),
        ("0000:75:00.0", &["rdmap113s0", "rdmap114s0", "rdmap115s0", "rdmap116s0"], "bridge 0000:67:00.0", (24, 35)),
        ("0000:86:00.0", &["rdmap130s0", "rdmap131s0", "rdmap132s0", "rdmap133s0"], "bridge 0000:78:00.0", (36, 47)),
        ("0000:97:00.0", &["rdmap147s0", "rdmap148s0", "rdmap149s0", "rdmap150s0"], "bridge 0000:89:00.0", (48, 59)),
        ("0000:a8:00.0", &["rdmap164s0", "rdmap165s0", "rdmap166s0", "rdmap167s0"], "bridge 0000:9a:00.0", (60, 71)),
        ("0000:b9:00.0", &["rdmap181s0", "rdmap182s0", "rdmap183s0", "rdmap184s0"], "bridge 0000:ab:00.0", (72, 83)),
        ("0000:ca:00.0", &["rdmap198s0", "rdmap199s0", "rdmap200s0", "rdmap201s0"], "bridge 0000:bc:00.0", (84, 95)),
    ];
    assert_eq!(assert_table("p5", &rows, &FOUR_AND_FOUR, &[])["notes"], json!([]));
}

#[test]
fn p5en_has_two_efa_of_its_switch_and_twelve_cores_of_its_node_for_each_gpu() {
    // Amazon's p5en.48xlarge: 16 EFA, 8 GPUs. Each of four switches has two GPUs and four EFA (1d0f:efa2): 59 and 5a
    // have 55 to 58, in order. 96 cores of two hyperthreads; CPU 96 is the second one of core 0.
    let rows: [Row; 8] = [
        ("0000:59:00.0", &["rdmap85s0", "rdmap86s0"], "bridge 0000:45:00.0", (0, 11)),
        ("0000:5a:00.0", &["rdmap87s0", "rdmap88s0"], "bridge 0000:45:00.0", (12, 23)),
        ("0000:72:00.0", &["rdmap110s0", "rdmap111s0"], "bridge 0000:5e:00.0", (24, 35)),
        ("0000:73:00.0", &["rdmap112s0", "rdmap113s0"], "bridge 0000:5e:00.0", (36, 47)),
        ("0000:8b:00.0", &["rdmap135s0", "rdmap136s0"], "bridge 0000:77:00.0", (48, 59)),
        ("0000:8c:00.0", &["rdmap137s0", "rdmap138s0"], "bridge 0000:77:00.0", (60, 71)),
        ("0000:a4:00.0", &["rdmap160s0", "rdmap161s0"], "bridge 0000:90:00.0", (72, 83)),
        ("0000:a5:00.0", &["rdmap162s0", "rdmap163s0"], "bridge 0000:90:00.0", (84, 95)),
    ];
    assert_table("p5en", &rows, &FOUR_AND_FOUR, &[]);
}

#[test]
fn p6_b200_has_one_efa_for_each_gpu_and_two_connectx_that_are_not_the_network() {
    // Amazon's p6-b200.48xlarge: 8 EFA (1d0f:efa3), 8 GPUs, two of each behind each of four switches. The ConnectX
    // functions 73 and 74 are for managing NVLink: they are behind a switch, too, but reach two GPUs of eight.
    let rows: [Row; 8] = [
        ("0000:51:00.0", &["rdmap79s0"], "bridge 0000:45:00.0", (0, 11)),
        ("0000:52:00.0", &["rdmap80s0"], "bridge 0000:45:00.0", (12, 23)),
        ("0000:62:00.0", &["rdmap96s0"], "bridge 0000:56:00.0", (24, 35)),
        ("0000:63:00.0", &["rdmap97s0"], "bridge 0000:56:00.0", (36, 47)),
        ("0000:75:00.0", &["rdmap113s0"], "bridge 0000:67:00.0", (48, 59)),
        ("0000:76:00.0", &["rdmap114s0"], "bridge 0000:67:00.0", (60, 71)),
        ("0000:86:00.0", &["rdmap132s0"], "bridge 0000:7a:00.0", (72, 83)),
        ("0000:87:00.0", &["rdmap133s0"], "bridge 0000:7a:00.0", (84, 95)),
    ];
    let table = assert_table("p6-b200", &rows, &FOUR_AND_FOUR, &["ibp115s0f0", "ibp116s0f0"]);
    assert_eq!(table["left_out"][0]["why"], "NICs of another kind reach more GPUs or are faster");
}

#[test]
fn p4d_shares_an_efa_without_rdma_write_between_two_gpus() {
    // Amazon's p4d.24xlarge: 4 EFA (1d0f:efa0), 8 GPUs, 48 cores. One EFA and two GPUs on each of four root buses, and
    // no bridge in the virtual machine. EFA of p4d has RDMA read alone (docs.aws.amazon.com, "Elastic Fabric Adapter").
    let rows: [Row; 8] = [
        ("0000:10:1c.0", &["rdmap16s27"], "root bus 0000:10", (0, 5)),
        ("0000:10:1d.0", &["rdmap16s27"], "root bus 0000:10", (6, 11)),
        ("0000:20:1c.0", &["rdmap32s27"], "root bus 0000:20", (12, 17)),
        ("0000:20:1d.0", &["rdmap32s27"], "root bus 0000:20", (18, 23)),
        ("0000:90:1c.0", &["rdmap144s27"], "root bus 0000:90", (24, 29)),
        ("0000:90:1d.0", &["rdmap144s27"], "root bus 0000:90", (30, 35)),
        ("0000:a0:1c.0", &["rdmap160s27"], "root bus 0000:a0", (36, 41)),
        ("0000:a0:1d.0", &["rdmap160s27"], "root bus 0000:a0", (42, 47)),
    ];
    let table = assert_table("p4d", &rows, &FOUR_AND_FOUR, &[]);
    let notes = table["notes"].as_array().unwrap();
    assert!(notes[0].as_str().unwrap().contains("1d0f:efa0) has no RDMA write"), "{notes:?}");
    assert_eq!(notes[1], "several GPUs share a NIC");
}

#[test]
fn g6_has_one_efa_for_all_gpus() {
    // Amazon's g6.48xlarge: one EFA, on node 0; each of 8 GPUs is below a root port of its own.
    let near = "NUMA node 0";
    let far = "none nearer";
    let rows: [Row; 8] = [
        ("0000:9f:00.0", &["rdmap150s0"], near, (0, 11)),
        ("0000:a1:00.0", &["rdmap150s0"], near, (12, 23)),
        ("0000:a3:00.0", &["rdmap150s0"], near, (24, 35)),
        ("0000:a5:00.0", &["rdmap150s0"], near, (36, 47)),
        ("0000:ae:00.0", &["rdmap150s0"], far, (48, 59)),
        ("0000:b0:00.0", &["rdmap150s0"], far, (60, 71)),
        ("0000:b2:00.0", &["rdmap150s0"], far, (72, 83)),
        ("0000:b4:00.0", &["rdmap150s0"], far, (84, 95)),
    ];
    assert_table("g6", &rows, &FOUR_AND_FOUR, &[]);
}

#[test]
fn an_hgx_h100_has_a_connectx_behind_each_gpus_switch_and_storage_apart() {
    // DGX H100 User Guide, table 6: mlx5_0 is of GPU 0, mlx5_3 of GPU 1, and so on. What it does not list are the two
    // ports of each of two cards for storage and management. 112 cores are 14 for each GPU.
    let rows: [Row; 8] = [
        ("0000:1b:00.0", &["mlx5_0"], "bridge 0000:16:00.0", (0, 13)),
        ("0000:43:00.0", &["mlx5_3"], "bridge 0000:3e:00.0", (14, 27)),
        ("0000:52:00.0", &["mlx5_4"], "bridge 0000:4d:00.0", (28, 41)),
        ("0000:61:00.0", &["mlx5_5"], "bridge 0000:5c:00.0", (42, 55)),
        ("0000:9d:00.0", &["mlx5_6"], "bridge 0000:98:00.0", (56, 69)),
        ("0000:c3:00.0", &["mlx5_9"], "bridge 0000:be:00.0", (70, 83)),
        ("0000:d1:00.0", &["mlx5_10"], "bridge 0000:cc:00.0", (84, 97)),
        ("0000:df:00.0", &["mlx5_11"], "bridge 0000:da:00.0", (98, 111)),
    ];
    let table = assert_table("hgx-h100", &rows, &FOUR_AND_FOUR, &["mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"]);
    let storage = "behind no GPU's bridge, as others are: for storage or management";
    assert_eq!(table["left_out"][0], json!({"address": "0000:29:00.0", "name": "mlx5_1", "why": storage}));
}

#[test]
fn a_gb200_tray_has_a_connectx_of_its_node_for_each_gpu() {
    // Two Grace processors of 72 cores, each with two GPUs and two ConnectX-7, all below root ports of their own, and a
    // BlueField-3, which is Ethernet and not of the GPUs' network.
    let rows: [Row; 4] = [
        ("0008:01:00.0", &["ibp3s0"], "NUMA node 0", (0, 35)),
        ("0009:01:00.0", &["ibP2p3s0"], "NUMA node 0", (36, 71)),
        ("0018:01:00.0", &["ibP16p3s0"], "NUMA node 1", (72, 107)),
        ("0019:01:00.0", &["ibP18p3s0"], "NUMA node 1", (108, 143)),
    ];
    assert_table("gb200", &rows, &[0, 0, 1, 1], &["roceP6p3s0", "roceP22p3s0"]);
}

#[test]
fn virtual_machines_without_bridges_deal_nics_out_in_order() {
    // The host's GPUs and NICs were passed on in the same order. One node; 96 CPUs are 12 for each GPU.
    let near = "NUMA node 0";
    let rows: [Row; 8] = [
        ("0000:05:00.0", &["mlx5_0"], near, (0, 11)),
        ("0000:06:00.0", &["mlx5_1"], near, (12, 23)),
        ("0000:07:00.0", &["mlx5_2"], near, (24, 35)),
        ("0000:08:00.0", &["mlx5_3"], near, (36, 47)),
        ("0000:09:00.0", &["mlx5_4"], near, (48, 59)),
        ("0000:0a:00.0", &["mlx5_5"], near, (60, 71)),
        ("0000:0b:00.0", &["mlx5_6"], near, (72, 83)),
        ("0000:0c:00.0", &["mlx5_7"], near, (84, 95)),
    ];
    assert_table("vm", &rows, &[0; 8], &[]);
    // Azure's own file pairs 0001 with 0101, 0002 with 0102, 0003 with 0103, 0008 with 0104, and so on.
    let far = "NUMA node 1";
    let rows: [Row; 8] = [
        ("0001:00:00.0", &["mlx5_0"], near, (0, 11)),
        ("0002:00:00.0", &["mlx5_1"], near, (12, 23)),
        ("0003:00:00.0", &["mlx5_2"], near, (24, 35)),
        ("0008:00:00.0", &["mlx5_3"], near, (36, 47)),
        ("0009:00:00.0", &["mlx5_4"], far, (48, 59)),
        ("000a:00:00.0", &["mlx5_5"], far, (60, 71)),
        ("000b:00:00.0", &["mlx5_6"], far, (72, 83)),
        ("000c:00:00.0", &["mlx5_7"], far, (84, 95)),
    ];
    assert_table("nd-h100-v5", &rows, &FOUR_AND_FOUR, &[]);
}

#[test]
fn the_table_is_printed_with_reasons() {
    let shown = text(&run(&of("p6-b200")).stdout);
    let lines: Vec<&str> = shown.lines().collect();
    let cells = |line: &str| {
        let cells = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty());
        cells.map(str::to_string).collect::<Vec<String>>()
    };
    assert_eq!(cells(lines[0]), ["GPU", "node", "NICs", "by", "cores", "by"]);
    let first = ["0000:51:00.0", "0", "rdmap79s0", "bridge 0000:45:00.0", "0-11", "NUMA node 0"];
    assert_eq!(cells(lines[2]), first);
    assert_eq!(lines[10], "not used: 0000:73:00.0 ibp115s0f0: NICs of another kind reach more GPUs or are faster");
    assert_eq!(lines.len(), 12, "{shown}");
    let shown = text(&run(&of("p4d")).stdout);
    assert!(shown.contains("root bus 0000:10, shared with 1") && shown.contains("\nnote: EFA of this gen"), "{shown}");
}

#[test]
fn options_and_a_file_choose_instead() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("choice");
    fs::write(&file, "gpu 0000:5a:00.0 nics=rdmap163s0 cores=95\n").unwrap();
    let file = file.display();
    let table = object(&format!("{} --nics 1 --cores 0-7,96-103 --choice {file} --json -", of("p5en")));
    assert_eq!(table["gpus"][0]["nics"], json!([{"address": "0000:55:00.0", "name": "rdmap85s0"}]));
    // Eight cores for eight GPUs, although the hyperthreads are sixteen.
    assert_eq!(table["gpus"][7]["cores"], json!([7]));
    assert_eq!((&table["gpus"][1]["nics_from"], &table["gpus"][1]["cores"]), (&json!("given"), &json!([95])));
}

#[test]
fn this_machine_is_recorded_and_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let (record, json) = (folder.path().join("record"), folder.path().join("json"));
    let here = run(&format!("topology --record {} --json {}", record.display(), json.display()));
    assert!(here.status.success(), "{}", text(&here.stderr));
    let again = run(&format!("topology --from {}", record.display()));
    assert_eq!(text(&here.stdout), text(&again.stdout));
    let facts = fs::read_to_string(&record).unwrap();
    assert!(facts.starts_with("tokenyard-topology 1\nallowed "), "{facts}");
    assert!(serde_json::from_str::<Value>(&fs::read_to_string(&json).unwrap()).unwrap()["gpus"].is_array());
    let status = command(&format!("topology --record {}/none/record", folder.path().display())).status().unwrap();
    assert_eq!(status.code(), Some(2));
}

#[test]
fn bad_records_and_choices_are_refused_in_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bad");
    let path = file.display().to_string();
    fs::write(&file, "tokenyard-topology 1\nallowed 0-3\npci 0000:01:00.0 0302 10de:2330 under=0000:01:00.0\n")
        .unwrap();
    for (words, named) in [
        (
            format!("topology --from {path}"),
            "line 3, device 0000:01:00.0: it is under more than 32 bridges, or under itself",
        ),
        ("topology --from /dev/zero".to_string(), "argument --from is `/dev/zero`: no regular file"),
        ("topology --from /none".to_string(), "argument --from is `/none`: unreadable: No such file"),
        (format!("{} --choice {path}", of("p5")), "argument --choice is"),
        (format!("{} --nics mlx5_0", of("p5")), "NIC is mlx5_0: no such RDMA device; there are: rdmap79s0"),
        (format!("{} --nics 0", of("p5")), "argument --nics is `0`: give a number from 1 to 256"),
        (format!("{} --cores 96", of("p5")), "this process may not use CPU 96; give some of 0-95"),
        (format!("{} --cores 3-1", of("p5")), "argument --cores is `3-1`: give CPUs below 8192"),
        (format!("{} --record /dev/null", of("p5")), "argument --record is `/dev/null`: it records this machine"),
    ] {
        let sentence = refusal(&words);
        assert!(sentence.contains(named), "{words}: {sentence}");
    }
}
