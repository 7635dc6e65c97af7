//! Verbs under the contract, over the kernel's soft-RoCE: on one device, and between the ends of veth pairs. Its
//! devices are in the VM that `tests/verbs/vm.sh` boots:
//!
//! ```text
//! CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=tests/verbs/vm.sh cargo test --test verbs
//! ```
//!
//! `TOKENYARD_TEST_VERBS=mlx5_0,mlx5_1` names up to four other devices, which reach each other: the first takes the
//! place of rxe0 and rxv0, the next ones those of rxv1 to rxv3, for which the first stands in where there are fewer.

#[path = "../transport/contract.rs"]
mod contract;
#[path = "../transport/remote.rs"]
mod remote;
#[path = "../transport/rig.rs"]
mod rig;
#[path = "../transport/taking_back.rs"]
mod taking_back;

mod libfabric;
mod links;
#[cfg(feature = "cli")]
mod wire;
#[cfg(feature = "cli")]
#[path = "../rig/wire.rs"]
mod wire_table;

use remote::RemoteEndpoint;
use rig::Backend;
use std::path::Path;
use std::time::Duration;
use tokenyard::internals::base::Rank;
use tokenyard::internals::transport::network::verbs::{VerbsConfig, VerbsEndpoint};

/// The device that this one of the VM stands for.
fn device(name: &str) -> String {
    let Ok(given) = std::env::var("TOKENYARD_TEST_VERBS") else { return name.to_owned() };
    let given: Vec<&str> = given.split(',').collect();
    let place = name.strip_prefix("rxv").and_then(|number| number.parse().ok()).unwrap_or(0);
    given.get(place).unwrap_or(&given[0]).to_string()
}

/// Endpoints whose NICs use these devices: of even ranks, and of odd ones.
struct Verbs {
    even: &'static [&'static str],
    odd: &'static [&'static str],
    /// Immediates wait for a flush, as behind writes into a GPU's memory.
    flush: bool,
}

impl Backend for Verbs {
    type Endpoint = VerbsEndpoint;

    fn endpoints(&self, ranks: usize) -> Vec<VerbsEndpoint> {
        (0..ranks as u32).map(|rank| VerbsEndpoint::open(Rank(rank), self.config(rank)).unwrap()).collect()
    }

    fn is_there(&self) -> bool {
        let lacks = |device: &String| !Path::new("/sys/class/infiniband").join(device).exists();
        let Some(device) = self.even.iter().chain(self.odd).map(|name| device(name)).find(lacks) else { return true };
        println!("skipped: no device {device}; run this by tests/verbs/vm.sh");
        assert_ne!(std::env::var("TOKENYARD_STRICT").as_deref(), Ok("1"), "no device {device}");
        false
    }
}

impl Verbs {
    fn config(&self, rank: u32) -> VerbsConfig {
        let devices = if rank.is_multiple_of(2) { self.even } else { self.odd };
        let mut config = VerbsConfig::default();
        config.devices = devices.iter().map(|name| device(name)).collect();
        config.nics = devices.len();
        config.flush = Some(self.flush);
        // The VM's processors are emulated, and may not run this process for long.
        (config.let_go, config.resume_within) = (Duration::from_secs(5), Duration::from_secs(20));
        config
    }
}

/// As `Verbs`, each endpoint in a process of its own.
struct Processes(Verbs);

impl Backend for Processes {
    type Endpoint = RemoteEndpoint;

    fn endpoints(&self, ranks: usize) -> Vec<RemoteEndpoint> {
        let open = |rank: u32| {
            let devices = if rank.is_multiple_of(2) { self.0.even } else { self.0.odd };
            let devices: Vec<String> = devices.iter().map(|name| device(name)).collect();
            RemoteEndpoint::open(Rank(rank), &format!("verbs:{}", devices.join(",")), devices.len(), None)
        };
        (0..ranks as u32).map(open).collect()
    }

    fn is_there(&self) -> bool {
        self.0.is_there()
    }

    // A poll asks another process: a millisecond, on emulated processors.
    fn quiet_polls(&self) -> usize {
        50
    }
}

contract!(one_device, Verbs { even: &["rxe0"], odd: &["rxe0"], flush: false });
contract!(@ from_threads, Verbs { even: &["rxe0"], odd: &["rxe0"], flush: false }, regions_taken_back_from_threads);
contract!(two_pairs, Verbs { even: &["rxv0", "rxv2"], odd: &["rxv1", "rxv3"], flush: false });
contract!(with_flushes, Verbs { even: &["rxe0"], odd: &["rxe0"], flush: true });
// Storms take minutes like this, on emulated processors; endpoints of one process share nothing but the kernel, either.
contract!(@ between_processes, Processes(Verbs { even: &["rxv0"], odd: &["rxv1"], flush: false }),
    empty_write_skipped, message_torn_or_doubled, dead_peer_holds_everyone_up, late_write_after_reset,
    region_touched_after_it_was_taken_back);

/// Soft-RoCE has one partition, the default one, of which all ports are full members.
#[test]
fn partition_that_its_port_lacks() {
    let backend = Verbs { even: &["rxe0"], odd: &["rxe0"], flush: false };
    if !backend.is_there() {
        return;
    }
    let open = |pkey| {
        let mut config = backend.config(0);
        config.pkey = Some(pkey);
        VerbsEndpoint::open(Rank(0), config)
    };
    assert!(open(0xffff).is_ok() && open(0x7fff).is_ok());
    let why = open(0x9234).unwrap_err().to_string();
    assert!(why.contains("pkey is 0x9234") && why.contains("has 0xffff"), "{why}");
}
