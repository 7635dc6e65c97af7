//! tests/real.sh, which needs NICs and two hosts: every command of its dry run is one that the programs take, and the
//! script itself runs here, with another folder for the other host.

use crate::rig::{command, text};

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Networks of the script, each with options that make it run every step.
const NETWORKS: [&str; 3] = ["libfabric:efa", "verbs:mlx5_0,mlx5_1", "libfabric:tcp"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The script with arguments; none where bash lacks.
fn script(args: &[&str], variables: &[(&str, &str)]) -> Option<Output> {
    let mut bash = Command::new("bash");
    bash.current_dir(root()).arg("tests/real.sh").args(args).envs(variables.iter().copied());
    bash.output().inspect_err(|why| eprintln!("skipped: bash cannot be started ({why})")).ok()
}

/// All texts of a folder's Rust files.
fn sources(folder: &Path) -> String {
    let mut all = String::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            all += &sources(&path);
        } else if path.extension().is_some_and(|end| end == "rs") {
            all += &fs::read_to_string(path).unwrap();
        }
    }
    all
}

/// The steps, rows and commands that the dry run prints for a network.
struct Dry {
    printed: String,
    out: tempfile::TempDir,
}

impl Dry {
    fn of(network: &str) -> Option<Dry> {
        let out = tempfile::tempdir().unwrap();
        let folder = out.path().display().to_string();
        let args = ["--dry-run", "--peer", "peer", "--transport", network, "--allow-link-down", "--out", &folder];
        let output = script(&args, &[])?;
        assert!(output.status.success(), "{network}: {}", text(&output.stderr));
        // The folder on the peer.
        Some(Dry { printed: text(&output.stdout).replace("FOLDER/", &format!("{folder}/")), out })
    }

    /// What hosts run, for a row each.
    fn commands(&self) -> Vec<&str> {
        let lines = self.printed.lines().filter(|line| line.starts_with("  ") && line.contains(" $ "));
        lines.map(|line| line.split_once(" $ ").unwrap().1).collect()
    }

    /// The words of each command of this program, as far as a pipe.
    fn of_program(&self) -> Vec<Vec<&str>> {
        let own = self.commands().into_iter().filter_map(|typed| typed.strip_prefix("tokenyard "));
        own.map(|typed| typed.split(" | ").next().unwrap().split(' ').collect()).collect()
    }
}

#[test]
fn every_command_is_one_that_the_program_takes() {
    for network in NETWORKS {
        let Some(dry) = Dry::of(network) else { return };
        let mut kinds = Vec::new();
        for words in dry.of_program() {
            kinds.push(words[0]);
            let typed = words.join(" ");
            // plan takes what bench takes, and runs nothing.
            let tried = if words[0] == "bench" { typed.replacen("bench", "plan", 1) } else { typed.clone() };
            let mut command = command(&tried);
            for name in ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"] {
                command.env_remove(name);
            }
            if words[0] == "wire" {
                // It ends before it measures anything, but after its arguments were taken.
                let output = command.env_remove("MASTER_ADDR").output().unwrap();
                let why = text(&output.stderr);
                assert!(output.status.code() == Some(1) && why.contains("RANK"), "{typed}: {why}");
                continue;
            }
            let output = command.output().unwrap();
            assert!(output.status.success(), "{network}: {typed}: {}", text(&output.stderr));
        }
        let count = |kind: &str| kinds.iter().filter(|word| **word == kind).count();
        assert_eq!((count("bench"), count("wire"), count("doctor"), count("topology")), (21, 2, 4, 2), "{network}");
    }
}

#[test]
fn every_test_program_filter_and_variable_is_there() {
    let builder = fs::read_to_string(root().join("tests/gpu.sh")).unwrap();
    let all: String = ["bindings", "transport", "tests"].iter().map(|folder| sources(&root().join(folder))).collect();
    let mut programs = BTreeSet::new();
    for network in NETWORKS {
        let Some(dry) = Dry::of(network) else { return };
        for typed in dry.commands() {
            let mut words = typed.split(' ').skip_while(|word| *word == "env" || word.contains('='));
            let program = words.next().unwrap();
            if !["transport", "calls", "verbs"].contains(&program) {
                continue;
            }
            programs.insert(program.to_owned());
            assert!(builder.contains(&format!(" --test {program}")), "tests/gpu.sh builds no {program}");
            let of_program = sources(&root().join("tests").join(program));
            let filter = words.next().unwrap();
            for part in filter.split("::").filter(|part| !part.is_empty()) {
                let found = [format!("mod {part};"), format!("fn {part}("), format!("!({part},"), format!("@ {part},")];
                assert!(found.iter().any(|found| of_program.contains(found)), "{program} has no {filter}: {part}");
            }
        }
        for word in dry.printed.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
            let known = !word.starts_with("TOKENYARD_") || all.contains(&format!("\"{word}\""));
            assert!(known, "{network}: nothing reads {word}");
        }
        let life = fs::read_to_string(root().join("tests/calls/kills/life.rs")).unwrap();
        let points: Vec<&str> = dry.printed.split("TOKENYARD_TEST_KILL_POINT=").skip(1).collect();
        assert_eq!(points.len(), 4, "{}", dry.printed);
        for point in points.iter().map(|point| point.split(' ').next().unwrap()) {
            assert!(life.contains(&format!("\n    {point},\n")), "there is no point {point}");
        }
        // The doctor's line that the script looks for.
        let looked_for = dry.printed.split("^has  *").nth(1).and_then(|rest| rest.split('\'').next()).unwrap();
        let doctor = fs::read_to_string(root().join("bindings/cli/commands/doctor.rs")).unwrap();
        assert!(doctor.contains(&format!("Finding::has(\"{looked_for}\"")), "the doctor has no line {looked_for}");
    }
    assert_eq!(programs.into_iter().collect::<Vec<_>>(), ["calls", "transport", "verbs"]);
}

#[test]
fn every_row_says_why_and_how_long_and_results_have_names_of_their_own() {
    for network in NETWORKS {
        let Some(dry) = Dry::of(network) else { return };
        let of = |begin: &str| dry.printed.lines().filter(|line| line.starts_with(begin)).count();
        let rows: Vec<&str> =
            dry.printed.lines().filter(|line| line.contains("/") && line.contains("  at most ")).collect();
        assert!(
            rows.len() > 30 && of("  purpose  ") == rows.len() && of("  success  ") == rows.len(),
            "{}",
            dry.printed
        );
        let names: BTreeSet<&str> = rows.iter().map(|row| row.split("  ").next().unwrap()).collect();
        assert_eq!(names.len(), rows.len(), "two rows share a name: {rows:?}");
        let steps = dry.printed.lines().filter_map(|line| line.strip_prefix("== "));
        let limits =
            steps.map(|step| step.split("at most ").nth(1).unwrap().trim_end_matches(" s").parse::<u32>().unwrap());
        let limits: Vec<u32> = limits.collect();
        assert!(limits.len() == 11 && limits.iter().sum::<u32>() <= 3600, "not within an hour: {limits:?}");
        let mut written = BTreeSet::new();
        for words in dry.of_program() {
            let value = |option: &str| words.iter().position(|word| *word == option).map(|at| words[at + 1]);
            let Some(path) = value("--json").map(Path::new) else { continue };
            assert_eq!(path.parent(), Some(dry.out.path()));
            let (stem, end) = (path.file_stem().unwrap().to_str().unwrap(), path.extension().unwrap());
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            let kept = ["decode-", "prefill-", "wire-"].iter().any(|begin| stem.starts_with(begin));
            assert!((kept || stem.starts_with("arena-")) && stem.chars().all(plain) && end == "json", "{path:?}");
            // benches/figures.py shows all that is kept, as runs on GPUs.
            assert!(words[0] == "wire" || value("--device") == Some("cuda"), "{words:?}");
            if let Some(world) = value("--world") {
                assert!(stem.contains("2x8") && world == "16", "{words:?}");
            }
            assert!(written.insert(path), "{path:?} is written twice");
        }
        assert!(written.len() >= 9, "{written:?}");
    }
}

#[test]
fn unusable_options_are_named() {
    let usual = ["--dry-run", "--peer", "peer", "--transport", "libfabric:efa"];
    let with = |more: &[&'static str]| [&usual[..], more].concat();
    for (args, sentence) in [
        (vec!["--dry-run", "--transport", "libfabric:efa"], "--peer is missing"),
        (vec!["--dry-run", "--peer", "peer"], "give libfabric:efa, verbs or verbs:DEVICE"),
        (vec!["--dry-run", "--peer", "peer", "--transport", "sim"], "--transport is `sim`"),
        (with(&["cpu", "fast"]), "there is no step fast: give some of preflight health"),
        (with(&["--nics", "0"]), "--nics is `0`"),
        (with(&["--gpus", "x"]), "--gpus is `x`"),
        (with(&["--machine", "../x"]), "--machine is `../x`"),
        (with(&["--gpus", "00"]), "--gpus is `00`"),
        (with(&["--port"]), "--port has no value"),
        (with(&["--port", "65400"]), "--port is `65400`: give a port from 1000 to 65300"),
        (with(&["--addr", "--out"]), "--addr has no value"),
        (with(&["--addr", "a;b"]), "--addr is `a;b`"),
        (with(&["--transport", "verbs:mlx5_0,a b"]), "name devices by commas"),
        (with(&[""]), "there is no step : give some of preflight health"),
        (vec!["--peer", "peer", "--transport", "libfabric:tcp", "--dir", "/nowhere"], "build it by tests/gpu.sh build"),
    ] {
        let Some(output) = script(&args, &[]) else { return };
        let refusal = text(&output.stderr);
        assert!(output.status.code() == Some(2) && refusal.contains(sentence), "{args:?}: {refusal}");
    }
}

/// Two hosts of this one: a shell in place of ssh.
struct Hosts {
    folder: tempfile::TempDir,
    ssh: String,
}

impl Hosts {
    fn new() -> Hosts {
        let folder = tempfile::tempdir().unwrap();
        let program = Path::new(env!("CARGO_BIN_EXE_tokenyard"));
        std::os::unix::fs::symlink(program, folder.path().join("tokenyard")).unwrap();
        let ssh = folder.path().join("ssh");
        let shell = "shift\nexport SSH_CONNECTION='127.0.0.1 1 127.0.0.1 22'\nexec bash -c \"$*\"\n";
        fs::write(&ssh, shell).unwrap();
        let ssh = format!("bash {}", ssh.display());
        Hosts { folder, ssh }
    }

    /// Status, and what was printed; none where something lacks.
    fn run(&self, args: &[&str], port: &str) -> Option<(Option<i32>, String)> {
        use tokenyard::internals::transport::network::libfabric::libfabric_sys::Library;
        if let Err(why) = Library::open() {
            println!("skipped: {why}");
            assert_ne!(std::env::var("TOKENYARD_STRICT").as_deref(), Ok("1"), "{why}");
            return None;
        }
        let dir = self.folder.path().display().to_string();
        let usual = ["--peer", "other", "--transport", "libfabric:tcp", "--gpus", "0", "--dir", &dir, "--port", port];
        let output = script(&[&usual, args].concat(), &[("SSH", self.ssh.as_str()), ("SMALL", "1")])?;
        let logs = fs::read_dir(self.folder.path().join("out")).into_iter().flatten().flatten();
        let logs = logs.filter(|entry| entry.path().extension().is_some_and(|end| end == "log"));
        let logs = logs.map(|entry| format!("-- {:?}\n{}", entry.path(), text(&fs::read(entry.path()).unwrap())));
        let printed = format!("{}{}", text(&output.stdout), text(&output.stderr));
        println!("{printed}{}", logs.collect::<String>());
        Some((output.status.code(), printed))
    }
}

#[test]
fn ranks_of_two_hosts_run_verify_and_name_the_killed() {
    let hosts = Hosts::new();
    let Some((status, printed)) = hosts.run(&["preflight", "cpu", "gpu", "kill"], "27611") else { return };
    let passed =
        |row: &str| printed.lines().any(|line| line.contains(&format!(" {row} ")) && line.contains(" passed "));
    for row in [
        "facts",
        "port-here",
        "port-there",
        "doctor-there",
        "topology-there",
        "cpu-decode-2x2-tcp",
        "cpu-split-2x2-tcp",
        "cpu-prefill-2x1-tcp",
        "bench-without-rank-3",
        "bench-without-rank-0",
        "bench-again",
    ] {
        assert!(passed(row), "{row}: {printed}");
    }
    let skipped = ["no GPU on one of the hosts", "needs the test program calls"];
    assert!(skipped.iter().all(|why| printed.contains(why)), "{printed}");
    assert_eq!(status, Some(0), "{printed}");
    let out = hosts.folder.path().join("out");
    assert!(fs::read_to_string(out.join("topology-there")).is_ok_and(|record| !record.is_empty()));
    let log = fs::read_to_string(out.join("cpu-decode-2x2-tcp.log")).unwrap();
    // Rank 0 alone reports.
    assert!(log.lines().any(|line| line.starts_with("[0] ") && line.contains("dispatch")), "{log}");
    assert!(log.contains("[3] ended with status 0") && !log.contains("[3] tokens"), "{log}");
}

#[test]
fn rows_that_fail_are_named_and_decide() {
    let hosts = Hosts::new();
    let Some((status, printed)) = hosts.run(&["--nics", "9", "cpu"], "27911") else { return };
    let failed = printed.lines().filter(|line| line.contains(" FAILED ")).count();
    assert!(status == Some(1) && failed >= 5, "{printed}");
}
