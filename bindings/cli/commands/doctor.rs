//! `tokenyard doctor`: what this machine offers and lacks, and for each lack its cost and a remedy.
//!
//! On the main thread. It reads /proc, /sys and /dev and asks the driver; it changes nothing. It opens the libraries
//! that networks use, as a network would; where there are GPUs and NICs, it opens both for a moment to see how they
//! reach each other.

mod finding;
mod gpu;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use tokenyard::network::libfabric::{LibfabricConfig, LibfabricEndpoint, libfabric_sys};
use tokenyard::network::verbs::{VerbsConfig, VerbsEndpoint, ibverbs_sys};
use tokenyard::network::{self, Reach};
use tokenyard::{Device, Error};

use crate::cli::args::DoctorArgs;
use crate::cli::files::{self, check_outputs};
use crate::cli::out::Out;
use crate::cli::ranks::gpus::usable_gpus;
use crate::cli::status::Status;
use crate::cli::usage::Refusal;
use finding::Finding;

/// Examines the machine and prints the findings.
///
/// # Errors
/// Unusable arguments.
pub fn doctor(args: &DoctorArgs, out: &Out) -> Result<Status, Refusal> {
    check_outputs(args.json.as_deref(), &[])?;
    let machine = Machine { root: PathBuf::from("/") };
    let mut findings = vec![build()];
    findings.push(machine.driver());
    findings.extend(gpu::findings());
    findings.extend(transports());
    findings.extend([libfabric(libfabric_sys::Library::open()), libibverbs(ibverbs_sys::Library::open())]);
    findings.extend(machine.nics());
    findings.push(machine.rdma_nodes());
    findings.extend(reach());
    findings.push(machine.gdrcopy());
    findings.push(machine.dma_buf());
    findings.push(machine.memlock());
    findings.push(machine.huge_pages());
    findings.extend(machine.cores());
    let mut written = Ok(());
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&serde_json::json!({ "findings": findings }));
        written = text.map_err(|error| error.to_string()).and_then(|text| files::write(path, &text, out));
    }
    if args.json.as_deref() != Some("-") {
        say!(out, "{}", listing(&findings).trim_end());
    }
    Ok(match written {
        Ok(()) => Status::Success,
        Err(sentence) => {
            note!(out, "tokenyard: {sentence}");
            Status::Failure
        }
    })
}

fn listing(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let mark = if finding.lacking { "lacks" } else { "has" };
        text += &format!("{mark:<6} {:<13} {}\n", finding.topic, finding.what);
        for (label, line) in [("costs", finding.cost), ("do", finding.remedy)] {
            if let Some(line) = line {
                text += &format!("{:20} {label}: {line}\n", "");
            }
        }
    }
    let lacks = findings.iter().filter(|f| f.lacking).count();
    text + &format!("{} checked, {lacks} lacking\n", findings.len())
}

fn build() -> Finding {
    if Device::cuda_built() {
        return Finding::has("build", "kernels for GPUs and for the CPU device");
    }
    Finding::lacks(
        "build",
        "only kernels for the CPU device: nvcc was not found when this program was built",
        "no GPU can be used",
        "build again where nvcc is (PyPI: cuda-toolkit[nvcc,cudart,cccl]==13.0.*)",
    )
}

/// Networks between nodes.
fn transports() -> [Finding; 1] {
    let there = "simulated between threads of one process and between processes of one host; emulated between GPUs of one \
                 process; libfabric's tcp, shm and efa, where libfabric has them; verbs, by devices with an active port";
    [Finding::has("transports", there)]
}

/// How each NIC, by verbs or as EFA, reaches each GPU's memory. None without GPUs or NICs.
fn reach() -> Vec<Finding> {
    let efa = libfabric_sys::Library::open().and_then(|library| library.providers());
    let has_efa = efa.is_ok_and(|providers| providers.iter().any(|provider| provider == "efa"));
    let of_gpu = |gpu| {
        let (mut verbs, mut efa) = (VerbsConfig::default(), LibfabricConfig::new("efa"));
        (verbs.gpu, verbs.nics, efa.gpu) = (Some(gpu), network::imm::MAX_NICS, Some(gpu));
        let by_efa = has_efa.then(|| LibfabricEndpoint::reach_of(&efa)).and_then(Result::ok);
        let by_verbs = VerbsEndpoint::reach_of(&verbs).ok().filter(|_| by_efa.is_none());
        by_efa.or(by_verbs).unwrap_or_default()
    };
    (0..usable_gpus()).flat_map(of_gpu).map(|reach| reached(&reach)).collect()
}

fn reached(reach: &Reach) -> Finding {
    if reach.way.is_some() {
        return Finding::has("GPUDirect", reach.to_string());
    }
    Finding::lacks(
        "GPUDirect",
        reach.to_string(),
        "arenas of several nodes lie in host memory, which GPUs reach over PCIe: some 1 ms a call",
        "use the driver's open kernel modules with Linux 5.12 and rdma-core 34 or later, or modprobe nvidia_peermem",
    )
}

/// What an error found, without its advice.
fn what_of(error: Error) -> String {
    match error {
        Error::Transport { what, .. } => what,
        other => other.to_string(),
    }
}

/// The version and place of libfabric.
fn libfabric(opened: tokenyard::Result<&'static libfabric_sys::Library>) -> Finding {
    match opened {
        Ok(library) => Finding::has("libfabric", format!("{} at {}", library.version(), library.path().display())),
        Err(error) => Finding::lacks(
            "libfabric",
            what_of(error),
            "no network over EFA, TCP or shared memory by libfabric",
            "install libfabric1 (on AWS the EFA installer), or set TOKENYARD_LIBFABRIC to its path",
        ),
    }
}

/// The place of libibverbs, and what it offers.
fn libibverbs(opened: tokenyard::Result<&'static ibverbs_sys::Library>) -> Finding {
    match opened {
        Ok(library) => Finding::has("libibverbs", format!("{}: {}", library.path().display(), library.offers())),
        Err(error) => Finding::lacks(
            "libibverbs",
            what_of(error),
            "no network over ConnectX and other NICs for RoCE or InfiniBand",
            "install libibverbs1 and ibverbs-providers, or set TOKENYARD_LIBIBVERBS to its path",
        ),
    }
}

/// Numbers of a list such as `0-3,8`.
fn numbers(list: &str) -> BTreeSet<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<u32>().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

/// Whether there is a core for every rank's proxy, which polls, beside the rank's own core.
fn proxy_cores(cores: usize, ranks: usize) -> Finding {
    let spare = cores.saturating_sub(ranks);
    let what =
        format!("{spare} of {cores} usable cores are spare beside one for each rank ({ranks}), for as many proxies");
    if spare >= ranks {
        return Finding::has("proxy cores", what);
    }
    Finding::lacks(
        "proxy cores",
        what,
        "between nodes a proxy without its own core yields, and answers only when it is scheduled",
        "nothing for one node; else give the process two cores for each rank, close to its GPU and NIC",
    )
}

/// The file system to examine; another root in tests.
struct Machine {
    root: PathBuf,
}

impl Machine {
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.path(path)).ok().map(|text| text.trim().to_string())
    }

    /// Names in a folder, sorted; none if it does not exist.
    fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(path)) else { return Vec::new() };
        let mut names: Vec<String> = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// The number after `key` in a file of lines.
    fn number(&self, path: &str, key: &str) -> Option<u64> {
        let text = self.text(path)?;
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse().ok()
    }

    fn driver(&self) -> Finding {
        let lack = |what: String| {
            Finding::lacks("driver", what, "no GPU can be used", "install the NVIDIA driver, version 580 or later")
        };
        let Some(text) = self.text("/proc/driver/nvidia/version") else {
            return lack("no NVIDIA kernel driver".to_string());
        };
        let words = text.lines().next().unwrap_or("").split_whitespace();
        let version = words.filter(|w| w.contains('.')).find(|w| w.starts_with(|c: char| c.is_ascii_digit()));
        let major = version.and_then(|v| v.split('.').next()).and_then(|v| v.parse::<u32>().ok());
        match (version, major) {
            (Some(version), Some(580..)) => Finding::has("driver", format!("NVIDIA {version}")),
            (Some(version), _) => lack(format!("NVIDIA {version} is too old for CUDA 13.0")),
            (None, _) => lack("an NVIDIA driver that does not show its version".to_string()),
        }
    }

    /// RDMA NICs.
    fn nics(&self) -> Vec<Finding> {
        let folder = "/sys/class/infiniband";
        let names = self.names(folder);
        if names.is_empty() {
            return vec![Finding::lacks(
                "NICs",
                "no RDMA NIC",
                "one node; several are linked by libfabric's tcp alone, through the kernel",
                "nothing for one node; for several, a ConnectX or EFA NIC with its kernel driver",
            )];
        }
        let nic = |name: &String| {
            let base = format!("{folder}/{name}");
            let driver = fs::read_link(self.path(&format!("{base}/device/driver")));
            let driver = driver.ok().and_then(|d| d.file_name().map(|n| n.to_string_lossy().into_owned()));
            let at = |file: &str| self.text(&format!("{base}/{file}")).unwrap_or_else(|| "unknown".to_string());
            let (rate, state) = (at("ports/1/rate"), at("ports/1/state"));
            let what = format!(
                "{name}: {}, {rate}, port {state}, {}, NUMA node {}",
                driver.as_deref().unwrap_or("no PCI driver"),
                at("ports/1/link_layer"),
                at("device/numa_node"),
            );
            if state.contains("ACTIVE") {
                Finding::has("NICs", what)
            } else {
                Finding::lacks("NICs", what, "this NIC carries nothing", "bring its link up and check the cable")
            }
        };
        names.iter().map(nic).collect()
    }

    /// The path of a library that is opened at run time.
    fn library(&self, file: &str) -> Option<PathBuf> {
        let usual = ["/opt/amazon/efa/lib", "/opt/amazon/efa/lib64", "/usr/local/lib", "/usr/lib/x86_64-linux-gnu"];
        let more = ["/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/lib/x86_64-linux-gnu", "/lib64"];
        let set = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let set: Vec<PathBuf> = std::env::split_paths(&set).filter(|p| p.is_absolute()).collect();
        let usual = usual.iter().chain(&more).map(|folder| self.path(folder));
        set.into_iter().chain(usual).map(|folder| folder.join(file)).find(|path| path.exists())
    }

    /// The device nodes through which programs reach RDMA NICs.
    fn rdma_nodes(&self) -> Finding {
        let nodes = self.names("/dev/infiniband");
        let devices = nodes.iter().filter(|name| name.starts_with("uverbs")).count();
        if devices > 0 {
            let manager = if nodes.iter().any(|name| name == "rdma_cm") { "and rdma_cm" } else { "no rdma_cm" };
            return Finding::has("RDMA nodes", format!("{devices} uverbs in /dev/infiniband, {manager}"));
        }
        Finding::lacks(
            "RDMA nodes",
            "no /dev/infiniband/uverbs*",
            "no program here reaches an RDMA NIC",
            "nothing for one node; else load ib_uverbs, and pass /dev/infiniband into the container",
        )
    }

    fn gdrcopy(&self) -> Finding {
        let (library, node) = (self.library("libgdrapi.so.2"), self.path("/dev/gdrdrv").exists());
        let lack = |what: &str, remedy| {
            let cost = "flags from proxies lie in pinned host memory, which GPUs poll over PCIe: some 1 µs more for each \
                        phase between nodes";
            Finding::lacks("GDRCopy", what, cost, remedy)
        };
        match (library, node) {
            (Some(library), true) => Finding::has("GDRCopy", format!("/dev/gdrdrv and {}", library.display())),
            (Some(_), false) => {
                lack("libgdrapi.so.2, but no /dev/gdrdrv", "nothing for one node; else load GDRCopy's module gdrdrv")
            }
            (None, true) => {
                lack("/dev/gdrdrv, but libgdrapi.so.2 was not found", "install GDRCopy's library, version 2")
            }
            (None, false) => lack(
                "no /dev/gdrdrv, and libgdrapi.so.2 was not found",
                "nothing for one node; else install GDRCopy 2 and load its module gdrdrv",
            ),
        }
    }

    /// How a NIC can register GPU memory.
    fn dma_buf(&self) -> Finding {
        let release = self.text("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut numbers = release.split(['.', '-']).map(|n| n.parse::<u32>().unwrap_or(0));
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let peermem = self.path("/sys/module/nvidia_peermem").exists();
        if version >= (5, 12) {
            return Finding::has("dma-buf", format!("kernel {release} registers GPU memory by dma-buf"));
        }
        if peermem {
            return Finding::has("dma-buf", format!("kernel {release} is too old, but nvidia_peermem is loaded"));
        }
        Finding::lacks(
            "dma-buf",
            format!("kernel {release} is older than 5.12 and nvidia_peermem is not loaded"),
            "NICs cannot reach GPU memory: rows between nodes would go through host memory",
            "nothing for one node; else a newer kernel, or modprobe nvidia_peermem",
        )
    }

    fn memlock(&self) -> Finding {
        let text = self.text("/proc/self/limits").unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"));
        let limit = line.and_then(|line| line.split_whitespace().next()).unwrap_or("unknown").to_string();
        let bytes = limit.parse::<u64>().ok();
        if limit == "unlimited" || bytes.is_some_and(|b| b >= 64 << 30) {
            return Finding::has("memlock", format!("limit {limit}"));
        }
        Finding::lacks(
            "memlock",
            format!("limit {limit} bytes of locked memory"),
            "registering a larger arena with a NIC fails",
            "nothing for one node; else ulimit -l unlimited, or memlock in /etc/security/limits.conf",
        )
    }

    fn huge_pages(&self) -> Finding {
        let pages = self.number("/proc/meminfo", "HugePages_Free:").unwrap_or(0);
        let kilobytes = self.number("/proc/meminfo", "Hugepagesize:").unwrap_or(0);
        if pages > 0 {
            return Finding::has("huge pages", format!("{pages} free pages of {kilobytes} KiB"));
        }
        let transparent = self.text("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        if transparent.contains("[always]") || transparent.contains("[madvise]") {
            return Finding::has("huge pages", format!("none reserved; transparent ones: {transparent}"));
        }
        Finding::lacks(
            "huge pages",
            "none reserved, and no transparent ones",
            "host arenas take longer to register, and their copies miss the TLB more often",
            "sysctl vm.nr_hugepages=1024, or enable transparent_hugepage",
        )
    }

    /// Cores by NUMA node, and whether there are enough of them.
    fn cores(&self) -> Vec<Finding> {
        let folder = "/sys/devices/system/node";
        let is_node = |name: &String| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok());
        let status = self.text("/proc/self/status").unwrap_or_default();
        let allowed = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).map_or("unknown", str::trim);
        let usable = numbers(allowed);
        let node = |name: String| {
            let cores = self.text(&format!("{folder}/{name}/cpulist")).unwrap_or_default();
            let here = numbers(&cores).intersection(&usable).count();
            Finding::has("cores", format!("{name}: {cores}, {here} of them usable"))
        };
        let mut findings: Vec<Finding> = self.names(folder).into_iter().filter(is_node).map(node).collect();
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        findings.push(Finding::has("cores", format!("this process may use {allowed} ({available} at once)")));
        findings.push(proxy_cores(available, Device::cuda_count().max(1)));
        findings
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard::network::Way;

    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = folder.path().to_path_buf();
        (folder, Machine { root })
    }

    #[test]
    fn an_empty_machine_lacks_everything_with_cost_and_remedy() {
        let (_folder, machine) = machine(&[]);
        let mut findings = vec![machine.driver(), machine.gdrcopy(), machine.dma_buf(), machine.memlock()];
        findings.extend([machine.huge_pages(), machine.rdma_nodes()]);
        findings.extend(machine.nics());
        for finding in findings {
            assert!(finding.lacking && finding.cost.is_some() && finding.remedy.is_some(), "{finding:?}");
        }
    }

    #[test]
    fn everything_that_is_there_is_found() {
        let (_folder, machine) = machine(&[
            ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06  Release\n"),
            ("proc/sys/kernel/osrelease", "5.14.0-503.el9\n"),
            ("proc/self/limits", "Limit   Soft\nMax locked memory   unlimited   unlimited  bytes\n"),
            ("proc/meminfo", "HugePages_Free:      12\nHugepagesize:       2048 kB\n"),
            ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
            ("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n"),
            ("dev/gdrdrv", ""),
            ("usr/lib64/libgdrapi.so.2", ""),
            ("dev/infiniband/uverbs0", ""),
            ("dev/infiniband/uverbs1", ""),
            ("proc/self/status", "Name: doctor\nCpus_allowed_list:\t2-5,8\n"),
            ("sys/devices/system/node/node0/cpulist", "0-3\n"),
            ("sys/devices/system/node/node1/cpulist", "4-9\n"),
            ("sys/devices/system/node/possible", "0-1\n"),
        ]);
        let mut findings = vec![machine.driver(), machine.dma_buf(), machine.memlock(), machine.huge_pages()];
        findings.extend([machine.gdrcopy(), machine.rdma_nodes()]);
        for finding in findings {
            assert!(!finding.lacking, "{finding:?}");
        }
        assert!(machine.rdma_nodes().what.contains("2 uverbs in /dev/infiniband, no rdma_cm"));
        let cores: Vec<String> = machine.cores().into_iter().map(|finding| finding.what).collect();
        assert_eq!(cores[..2], ["node0: 0-3, 2 of them usable", "node1: 4-9, 3 of them usable"]);
        assert!(cores[2].contains("may use 2-5,8"), "{cores:?}");
        let nics = machine.nics();
        assert!(nics[0].what.contains("mlx5_0") && nics[0].what.contains("400 Gb/sec"), "{nics:?}");
        assert!(machine.driver().what.contains("580.65.06"));
    }

    #[test]
    fn half_of_gdrcopy_is_a_lack_that_names_the_other_half() {
        let (_folder, node) = machine(&[("dev/gdrdrv", "")]);
        assert!(node.gdrcopy().lacking && node.gdrcopy().what.starts_with("/dev/gdrdrv, but"));
        let (_folder, library) = machine(&[("usr/lib/libgdrapi.so.2", "")]);
        assert!(library.gdrcopy().lacking && library.gdrcopy().what.starts_with("libgdrapi.so.2, but"));
    }

    #[test]
    fn each_proxy_needs_a_core_beside_that_of_its_rank() {
        for (cores, ranks, lacking) in [(2, 1, false), (1, 1, true), (16, 8, false), (15, 8, true), (0, 1, true)] {
            assert_eq!(proxy_cores(cores, ranks).lacking, lacking, "{cores} cores, {ranks} ranks");
        }
        assert_eq!(numbers("0-3,8, 10-11"), [0, 1, 2, 3, 8, 10, 11].into());
        assert!(numbers("unknown").is_empty() && numbers("").is_empty() && numbers("3-1").is_empty());
    }

    #[test]
    fn a_gpu_that_a_nic_does_not_reach_is_a_lack_and_one_that_it_reaches_says_how() {
        let mut reach = Reach::unknown("mlx5_3", 1);
        assert!(reached(&reach).lacking && reached(&reach).what.contains("mlx5_3 reaches no memory of GPU 1"));
        (reach.way, reach.lacking) = (Some(Way::DmaBuf), vec![(Way::DataDirect, "no function for it".into())]);
        let what = "mlx5_3 reaches memory of GPU 1 by dma-buf, with a flush; data direct: no function for it";
        assert_eq!(reached(&reach), Finding::has("GPUDirect", what));
    }

    #[test]
    fn a_library_that_is_not_there_is_a_lack_and_one_that_is_has_its_path() {
        let nowhere = std::path::Path::new("/nowhere/lib.so");
        let findings = [libfabric(libfabric_sys::Library::at(nowhere)), libibverbs(ibverbs_sys::Library::at(nowhere))];
        for (finding, variable) in findings.iter().zip([libfabric_sys::VARIABLE, ibverbs_sys::VARIABLE]) {
            assert!(finding.lacking && finding.what.starts_with("/nowhere/lib.so cannot be opened"), "{finding:?}");
            assert!(finding.remedy.unwrap().contains(variable), "{finding:?}");
        }
        if let Ok(library) = libfabric_sys::Library::open() {
            let what = format!("{} at {}", library.version(), library.path().display());
            assert_eq!(libfabric(Ok(library)), Finding::has("libfabric", what));
        }
    }

    #[test]
    fn an_old_driver_is_a_lack() {
        let (_folder, machine) = machine(&[("proc/driver/nvidia/version", "NVRM version: x  535.104.05  y\n")]);
        assert!(machine.driver().lacking && machine.driver().what.contains("535.104.05"));
    }

    /// A file's text, or a missing file.
    fn one(path: &str, text: &str) -> (tempfile::TempDir, Machine) {
        machine(&[(path, text)])
    }

    #[test]
    fn findings_are_listed_and_written_with_their_own_values() {
        let findings =
            [Finding::has("cores", "four of them"), Finding::lacks("NICs", "none", "no other node", "buy some")];
        assert_eq!(
            listing(&findings),
            "has    cores         four of them\n\
             lacks  NICs          none\n                     costs: no other node\n                     do: buy some\n\
             2 checked, 1 lacking\n"
        );
        assert_eq!(
            serde_json::to_value(&findings).unwrap(),
            serde_json::json!([
                {"topic": "cores", "lacking": false, "what": "four of them"},
                {"topic": "NICs", "lacking": true, "what": "none", "cost": "no other node", "remedy": "buy some"},
            ])
        );
    }

    #[test]
    fn a_nic_is_described_by_its_driver_rate_state_link_and_node() {
        let folder = "sys/class/infiniband/mlx5_1";
        let (root, machine) = machine(&[
            (&format!("{folder}/ports/1/rate"), "200 Gb/sec (4X HDR)\n"),
            (&format!("{folder}/ports/1/state"), "4: ACTIVE\n"),
            (&format!("{folder}/ports/1/link_layer"), "Ethernet\n"),
            (&format!("{folder}/device/numa_node"), "1\n"),
            ("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n"),
            ("sys/bus/pci/drivers/mlx5_core/bind", ""),
        ]);
        let drivers = root.path().join("sys/bus/pci/drivers/mlx5_core");
        std::os::unix::fs::symlink(drivers, root.path().join(folder).join("device/driver")).unwrap();
        let [down, active] = <[Finding; 2]>::try_from(machine.nics()).unwrap();
        assert_eq!(active.what, "mlx5_1: mlx5_core, 200 Gb/sec (4X HDR), port 4: ACTIVE, Ethernet, NUMA node 1");
        assert_eq!(down.what, "mlx5_0: no PCI driver, unknown, port 1: DOWN, unknown, NUMA node unknown");
        assert_eq!((active.lacking, down.lacking), (false, true));
    }

    #[test]
    fn limits_are_held_on_both_sides() {
        for (version, lacking) in [("579.99.1", true), ("580.0.1", false), ("1000.1", false)] {
            let (_folder, machine) = one("proc/driver/nvidia/version", &format!("NVRM version: x  {version}  y\n"));
            let found = machine.driver();
            let wanted = if lacking { " is too old for CUDA 13.0" } else { "" };
            assert_eq!((found.lacking, found.what), (lacking, format!("NVIDIA {version}{wanted}")));
        }
        for (release, lacking) in [("5.11.9-1", true), ("5.12.0", false), ("4.18.0", true), ("6.1.0-13", false)] {
            let (folder, machine) = one("proc/sys/kernel/osrelease", release);
            assert_eq!(machine.dma_buf().lacking, lacking, "{release}");
            fs::create_dir_all(folder.path().join("sys/module/nvidia_peermem")).unwrap();
            let with =
                if lacking { "is too old, but nvidia_peermem is loaded" } else { "registers GPU memory by dma-buf" };
            assert_eq!(machine.dma_buf(), Finding::has("dma-buf", format!("kernel {release} {with}")));
        }
        for (limit, lacking) in [("68719476735", true), ("68719476736", false), ("unlimited", false), ("8192", true)] {
            let (_folder, machine) = one("proc/self/limits", &format!("Max locked memory   {limit}   9   bytes\n"));
            let found = machine.memlock();
            let wanted = if lacking { " bytes of locked memory" } else { "" };
            assert_eq!((found.lacking, found.what), (lacking, format!("limit {limit}{wanted}")));
        }
        for (free, transparent, what) in [
            (3, "", "3 free pages of 2048 KiB"),
            (0, "always [madvise] never", "none reserved; transparent ones: always [madvise] never"),
            (0, "always madvise [never]", "none reserved, and no transparent ones"),
        ] {
            let about = format!("HugePages_Total:  9\nHugePages_Free:   {free}\nHugepagesize:    2048 kB\n");
            let (_folder, machine) =
                machine(&[("proc/meminfo", &about), ("sys/kernel/mm/transparent_hugepage/enabled", transparent)]);
            let found = machine.huge_pages();
            assert_eq!((found.what.as_str(), found.lacking), (what, what.ends_with("no transparent ones")));
        }
    }

    #[test]
    fn device_nodes_and_cores_are_counted() {
        let (_folder, machine) = machine(&[
            ("dev/infiniband/uverbs0", ""),
            ("dev/infiniband/uverbs3", ""),
            ("dev/infiniband/uverbs4", ""),
            ("dev/infiniband/issm0", ""),
            ("dev/infiniband/rdma_cm", ""),
            ("dev/gdrdrv", ""),
            ("usr/lib/libgdrapi.so.2", ""),
        ]);
        assert_eq!(machine.rdma_nodes(), Finding::has("RDMA nodes", "3 uverbs in /dev/infiniband, and rdma_cm"));
        let gdrcopy = machine.gdrcopy();
        assert!(
            gdrcopy.what.starts_with("/dev/gdrdrv and /") && gdrcopy.what.ends_with("/libgdrapi.so.2"),
            "{gdrcopy:?}"
        );
        let what = |cores, ranks| proxy_cores(cores, ranks).what;
        let text = "usable cores are spare beside one for each rank";
        assert_eq!(what(16, 6), format!("10 of 16 {text} (6), for as many proxies"));
        assert_eq!(what(3, 8), format!("0 of 3 {text} (8), for as many proxies"));
    }
}
