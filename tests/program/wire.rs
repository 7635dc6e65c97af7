//! `tokenyard wire`: this library beside a bare loop over the same network.

use crate::{double, rig, wire_table};

use rig::{command, refusal, text};
use tokenyard::internals::transport::network::libfabric::libfabric_sys::{Library, VARIABLE};
use wire_table::{SHORT, check, table};

#[test]
fn both_ways_are_measured_over_tcp() {
    if let Err(why) = Library::open() {
        println!("skipped: {why}");
        assert_ne!(std::env::var("TOKENYARD_STRICT").as_deref(), Ok("1"), "{why}");
        return;
    }
    check(&table(command(&format!("wire --transport libfabric:tcp {SHORT}"))), "libfabric:tcp", 3);
}

#[test]
fn both_ways_are_measured_over_the_double_of_efa() {
    let Some(library) = double::efa() else { return };
    let mut wire = command(&format!("wire --transport libfabric:efa {SHORT}"));
    wire.env(VARIABLE, library);
    check(&table(wire), "libfabric:efa", 5);
}

#[test]
fn what_cannot_be_measured_is_refused_and_what_fails_names_itself() {
    assert!(refusal("wire --transport sim").contains("no bare loop; give libfabric:tcp,"));
    assert!(refusal("wire --transport verbs:,").contains("verbs:mlx5_0"));
    assert!(refusal("wire --transport libfabric:tcp --pairs 0").contains("--pairs"));
    let orphan = command("wire --transport libfabric:tcp --as-rank").output().unwrap();
    assert!(!orphan.status.success() && text(&orphan.stderr).contains("--as-rank"), "{}", text(&orphan.stderr));
    let nowhere = command(&format!("wire --transport libfabric:tcp {SHORT}")).env(VARIABLE, "/nowhere.so").output();
    let nowhere = nowhere.unwrap();
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(text(&nowhere.stderr).contains("/nowhere.so"), "{}", text(&nowhere.stderr));
    // No machine has this device; one without the library or any device says that instead.
    let nowhere = command(&format!("wire --transport verbs:nowhere {SHORT}")).output().unwrap();
    assert_eq!(nowhere.status.code(), Some(1));
    let why = text(&nowhere.stderr);
    assert!(why.contains("\"nowhere\"") || why.contains("libibverbs"), "{why}");
}
