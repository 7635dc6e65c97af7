//! Regions of the network over verbs that are taken back, held to the double of libibverbs. Each case runs in a process
//! of its own, since the double reads its settings from the environment.

use crate::double;
use crate::rig::{Memory, SLOT};
use std::process::Command;
use tokenyard::internals::base::Rank;
use tokenyard::internals::transport::network::verbs::{VerbsConfig, VerbsEndpoint};
use tokenyard::internals::transport::network::{Released, Transport};

/// Set in the process of a case: the double's log.
const LOG: &str = "TOKENYARD_IBVERBS_LOG";
const DEVICE: [(&str, &str); 1] = [("DEVICES", "mlx5_0")];

/// Runs the case of a test in a process of its own, with devices and other settings of the double.
pub fn alone(test: &str, settings: &[(&str, &str)], case: fn()) {
    if std::env::var_os(LOG).is_some() {
        return case();
    }
    let Some(library) = double::ibverbs() else { return };
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env("TOKENYARD_LIBIBVERBS", library)
        .envs(settings.iter().map(|(name, value)| (format!("TOKENYARD_IBVERBS_{name}"), value)))
        .env(LOG, folder.path().join("log"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn endpoint(rank: u32) -> VerbsEndpoint {
    let mut config = VerbsConfig::default();
    config.devices = vec!["mlx5_0".into()];
    VerbsEndpoint::open(Rank(rank), config).unwrap()
}

#[test]
fn region_registered_after_it_was_taken_back() {
    alone("verbs_regions::region_registered_after_it_was_taken_back", &DEVICE, || {
        // Before the endpoint, which a failing test drops first.
        let memory = Memory::new(SLOT);
        let mut endpoint = endpoint(0);
        // SAFETY: dropped after the endpoint.
        let region = unsafe { endpoint.register(memory.span()) }.unwrap();
        let events = || double::ibverbs_log(std::env::var_os(LOG).unwrap().as_ref());
        let deregistered = || events().iter().filter(|event| event["event"] == "deregister").count();
        let before = deregistered();
        assert_eq!(endpoint.deregister(region), Ok(Released::Done));
        assert_eq!(deregistered(), before + 1, "peers can still write to it");
    });
}

#[test]
fn address_that_has_a_place_of_a_region_without_its_length() {
    alone("verbs_regions::address_that_has_a_place_of_a_region_without_its_length", &DEVICE, || {
        let memory = Memory::new(SLOT);
        let mut ends = [endpoint(0), endpoint(1)];
        // SAFETY: dropped after the endpoints.
        let region = unsafe { ends[1].register(memory.span()) }.unwrap();
        let mut connect = |from: usize| {
            let address = ends[1 - from].address(Rank(from as u32)).unwrap();
            ends[from].connect(Rank(1 - from as u32), &address).unwrap();
        };
        connect(0);
        connect(1);
        // Rank 0 has yet to let go of it.
        assert_eq!(ends[1].deregister(region), Ok(Released::Busy));
        let address = ends[1].address(Rank(0)).unwrap();
        assert_eq!(ends[0].connect(Rank(1), &address), Ok(()));
    });
}
