//! The program as a function: runs that share a process, each with its own streams.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::sync::Barrier;

use serde_json::Value;
use tokenyard::cli::{Host, Status, run};

/// Small enough for a debug build, and still more than one rank, expert and token.
const SMALL: &str = "--device cpu --world 3 --hidden 128 --experts 7 --top-k 3 --tokens 5 --iters 3";

fn words(typed: &str) -> Vec<OsString> {
    typed.split_whitespace().map(OsString::from).collect()
}

/// Status, output and notes of a run.
fn ran(typed: &str) -> (Status, String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let status = run(words(typed), Host::new(&mut out).err(&mut err));
    (status, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
}

/// Takes so many bytes, then fails, and counts later attempts.
struct Failing {
    room: usize,
    kind: ErrorKind,
    tried: usize,
}

impl Write for Failing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.room == 0 {
            self.tried += 1;
            return Err(self.kind.into());
        }
        let taken = self.room.min(bytes.len());
        self.room -= taken;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_output_goes_to_the_writer_and_the_status_is_returned() {
    let (status, out, err) = ran(&format!("bench {SMALL} --json -"));
    assert_eq!((status, err.as_str()), (Status::Success, ""));
    let object: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(object["verified"], true);

    let (status, out, err) = ran("bench --device cpu --hidden 9");
    assert_eq!((status, out.as_str()), (Status::Unusable, ""));
    assert!(err.starts_with("tokenyard: argument --hidden is `9`"), "{err}");

    let (status, out, err) = ran("--help");
    assert_eq!((status, err.as_str()), (Status::Success, ""));
    assert!(out.contains("Usage: tokenyard <COMMAND>") && out.contains("bench"), "{out}");

    // The program's own name is no argument.
    let (status, _, err) = ran("tokenyard plan");
    assert_eq!(status, Status::Unusable);
    assert!(err.contains("command `tokenyard` is not known"), "{err}");
    assert_eq!([Status::Success, Status::Failure, Status::Unusable].map(u8::from), [0, 1, 2]);
}

#[test]
fn a_run_whose_writer_failed_leaves_nothing_to_the_next() {
    let plan = format!("plan {SMALL}");
    for (kind, expected) in [(ErrorKind::BrokenPipe, Status::Success), (ErrorKind::StorageFull, Status::Failure)] {
        for room in [0, 10] {
            let mut failing = Failing { room, kind, tried: 0 };
            let mut err = Vec::new();
            let status = run(words(&plan), Host::new(&mut failing).err(&mut err));
            let notes = String::from_utf8(err).unwrap();
            assert_eq!(status, expected, "{kind}: {notes}");
            assert_eq!(notes.lines().count(), usize::from(kind != ErrorKind::BrokenPipe), "{kind}: {notes}");
            assert_eq!(failing.tried, 1, "{kind}: nothing is written to a stream that ended");

            let (status, out, err) = ran(&plan);
            assert_eq!((status, err.as_str()), (Status::Success, ""), "after {kind}");
            assert!(out.contains("arena of a rank"), "{out}");
        }
    }
}

#[test]
fn a_writer_of_notes_that_fails_changes_nothing() {
    let mut failing = Failing { room: 0, kind: ErrorKind::StorageFull, tried: 0 };
    let mut out = Vec::new();
    let status = run(words("bench --device cpu --hidden 9"), Host::new(&mut out).err(&mut failing));
    assert_eq!((status, failing.tried, out.len()), (Status::Unusable, 1, 0));
}

#[test]
fn runs_on_two_threads_at_once_keep_their_outputs_separate() {
    let barrier = Barrier::new(3);
    let objects: Vec<(u64, Value)> = std::thread::scope(|scope| {
        let barrier = &barrier;
        let bench = move |seed: u64| {
            barrier.wait();
            // Ranks as threads with proxies, and ranks as fibers of one thread.
            let mode = if seed == 7 { "--ranks-per-node 1,2" } else { "--world-mode one-thread" };
            let (status, out, err) = ran(&format!("bench {SMALL} {mode} --seed {seed} --json -"));
            assert_eq!(status, Status::Success, "{err}");
            (seed, serde_json::from_str(&out).unwrap())
        };
        let failing = scope.spawn(move || {
            barrier.wait();
            let mut failing = Failing { room: 0, kind: ErrorKind::StorageFull, tried: 0 };
            let mut err = Vec::new();
            run(words(&format!("bench {SMALL} --json -")), Host::new(&mut failing).err(&mut err))
        });
        let runs = [7, 8].map(|seed| scope.spawn(move || bench(seed)));
        let objects = runs.into_iter().map(|run| run.join().unwrap()).collect();
        assert_eq!(failing.join().unwrap(), Status::Failure);
        objects
    });
    for (seed, object) in objects {
        assert_eq!((object["seed"].as_u64(), &object["verified"]), (Some(seed), &Value::Bool(true)));
    }
}

#[test]
fn ranks_as_processes_need_a_program_that_hands_its_arguments_on() {
    let processes = format!("bench {SMALL} --launch processes --json -");
    let (status, out, err) = ran(&processes);
    assert_eq!((status, out.as_str()), (Status::Failure, ""));
    assert!(err.contains("no program to start") && err.contains("Host::program"), "{err}");

    let started = |program: &str| {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let status = run(words(&processes), Host::new(&mut out).err(&mut err).program(program));
        (status, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    };
    let (status, out, err) = started(env!("CARGO_BIN_EXE_tokenyard"));
    assert_eq!(status, Status::Success, "{err}");
    let object: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&object["launch"], &object["verified"]), (&Value::from("processes"), &Value::Bool(true)));

    // One that does something else, and one that is not there.
    let (status, _, err) = started("true");
    assert_eq!(status, Status::Failure);
    assert!(err.contains("rank 0 ended with status 0") && err.contains("pass its arguments"), "{err}");
    let (status, _, err) = started("/nowhere/tokenyard");
    assert_eq!(status, Status::Failure);
    assert!(err.contains("/nowhere/tokenyard") && err.contains("rank 0"), "{err}");
}

#[test]
fn a_rank_that_was_not_started_as_one_starts_no_ranks() {
    let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_tokenyard"));
    let typed = format!("bench {SMALL} --launch processes");
    program.args(words(&typed)).env("TOKENYARD_PARENT", std::process::id().to_string());
    let output = program.output().unwrap();
    let sentence = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{sentence}");
    assert!(sentence.contains("this process is a rank") && sentence.contains("pass its arguments on"), "{sentence}");
}

#[test]
fn as_rank_is_refused_in_a_process_that_nobody_started_as_one() {
    let (status, out, err) = ran(&format!("bench {SMALL} --as-rank"));
    assert_eq!((status, out.as_str()), (Status::Failure, ""));
    assert!(err.contains("--as-rank is for processes"), "{err}");
    assert_eq!(nix::sys::prctl::get_pdeathsig(), Ok(None), "this process now ends with its parent");
}
