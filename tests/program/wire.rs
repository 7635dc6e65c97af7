//! `tokenyard wire`: this library beside a bare loop over the same network.

use crate::{double, rig, wire_table};

use rig::{command, refusal, text};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};
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
fn two_ranks_of_a_job_measure_and_the_first_reports() {
    if Library::open().is_err() {
        return;
    }
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let rank = |rank: &str, size: &str| {
        let mut wire = command(&format!("wire --transport libfabric:tcp --launch env {SHORT}"));
        wire.envs([("RANK", rank), ("WORLD_SIZE", size), ("TOKENYARD_TOKEN", "wire")]);
        wire.env("TOKENYARD_PORT", port.to_string());
        wire
    };
    let alone = rank("0", "1").output().unwrap();
    let sentence = text(&alone.stderr);
    assert!(alone.status.code() == Some(1) && sentence.contains("between 2 ranks; start 2"), "{sentence}");
    let follower = rank("1", "2").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    check(&table(rank("0", "2")), "libfabric:tcp", 3);
    let follower = follower.wait_with_output().unwrap();
    assert!(follower.status.success() && follower.stdout.is_empty(), "{}", text(&follower.stderr));
    assert!(refusal("wire --transport libfabric:tcp --launch threads").contains("give processes or env"));
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

/// Waits for a process that ends soon; the others are killed.
fn ended(mut child: Child) -> Output {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(25) {
            child.kill().unwrap();
            panic!("still there: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

#[test]
fn a_pipe_in_place_of_a_library_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("libfabric.so");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut wire = command(&format!("wire --transport libfabric:tcp {SHORT}"));
    let output = ended(wire.env(VARIABLE, &pipe).stderr(Stdio::piped()).spawn().unwrap());
    let why = text(&output.stderr);
    assert!(output.status.code() == Some(1) && why.contains("libfabric.so cannot be opened: it is no file"), "{why}");
}

#[test]
fn a_follower_that_is_killed_is_named() {
    let Some(library) = double::efa() else { return };
    let mut wire = command("wire --transport libfabric:efa --pairs 1000 --slice-ms 5");
    let leader = wire.env(VARIABLE, library).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let children = format!("/proc/{0}/task/{0}/children", leader.id());
    let begun = Instant::now();
    let follower = loop {
        let found = std::fs::read_to_string(&children).unwrap();
        if let Ok(follower) = found.trim().parse() {
            break nix::unistd::Pid::from_raw(follower);
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "it started no follower");
        std::thread::sleep(Duration::from_millis(1));
    };
    nix::sys::signal::kill(follower, nix::sys::signal::Signal::SIGKILL).unwrap();
    let output = ended(leader);
    let why = text(&output.stderr);
    assert!(output.status.code() == Some(1) && why.contains("the follower ended with signal: 9"), "{why}");
}
