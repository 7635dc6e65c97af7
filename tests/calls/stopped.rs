//! A process that waits. Stopped for longer than its deadlines, it goes on, and its calls complete, as no peer was
//! late; and others have its cores meanwhile.
//!
//! Ranks are threads of one process: this test program starts itself again, and the test `ranks` plays them.

use crate::rig;

use rig::*;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Set for a test program that is the process to be stopped.
const PLAYS: &str = "TOKENYARD_TEST_STOPPED";
const DEADLINE: Duration = Duration::from_secs(2);
const STOPPED: Duration = Duration::from_secs(4);
/// Time that a loaded machine may add to a deadline.
const SLACK: Duration = Duration::from_secs(6);

#[test]
fn time_in_which_the_process_was_stopped_counts_against_no_deadline() {
    let mut ranks = Ranks::start("late");
    ranks.stop_for(STOPPED);
    ranks.send("go");
    ranks.carry_on();
    assert_eq!(ranks.word("outcome"), "completed");
}

#[test]
fn a_stopped_process_still_reports_a_missing_peer_soon_after_its_deadline() {
    let mut ranks = Ranks::start("never");
    ranks.stop_for(STOPPED);
    let continued = Instant::now();
    ranks.carry_on();
    let outcome = ranks.word("outcome");
    assert!(outcome.contains("rank 1") && outcome.contains("routing metadata"), "{outcome}");
    assert!(continued.elapsed() < DEADLINE + SLACK, "{:?} after it went on", continued.elapsed());
    ranks.send("go");
}

#[test]
fn a_rank_that_waits_leaves_its_core_to_others() {
    let mut ranks = Ranks::start("late");
    let (before, waited) = (ranks.processor_seconds(), Duration::from_secs(1));
    std::thread::sleep(waited);
    let used = ranks.processor_seconds() - before;
    ranks.send("go");
    assert_eq!(ranks.word("outcome"), "completed");
    assert!(used < waited.as_secs_f64() / 2.0, "{used} s of processor time in {waited:?}");
}

/// The process, which no failing test leaves behind.
struct Ranks {
    child: Child,
    printed: BufReader<std::process::ChildStdout>,
}

impl Ranks {
    /// Returns once rank 0 waits for rank 1.
    fn start(part: &str) -> Ranks {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["stopped::ranks", "--exact", "--nocapture", "--test-threads=1"])
            .env(PLAYS, part)
            .env("TOKENYARD_TEST_DEVICE", "cpu")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let printed = BufReader::new(child.stdout.take().unwrap());
        let mut ranks = Ranks { child, printed };
        assert_eq!(ranks.word("rank 0"), "waits");
        ranks
    }

    fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    fn stop_for(&self, time: Duration) {
        self.signal(nix::sys::signal::Signal::SIGSTOP);
        std::thread::sleep(time);
    }

    fn carry_on(&self) {
        self.signal(nix::sys::signal::Signal::SIGCONT);
    }

    /// What the process has used of all cores (`proc_pid_stat(5)`).
    fn processor_seconds(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        let ticks: f64 = [11, 12].map(|place: usize| fields[place].parse::<f64>().unwrap()).iter().sum();
        // SAFETY: it only returns a number.
        ticks / unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64
    }

    fn send(&mut self, word: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{word}").unwrap();
    }

    /// The rest of the next line that begins with `name: `.
    fn word(&mut self, name: &str) -> String {
        let mut line = String::new();
        while self.printed.read_line(&mut line).unwrap() > 0 {
            if let Some((_, rest)) = line.split_once(&format!("{name}: ")) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        panic!("the ranks ended and never printed «{name}»");
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The part of the process that is stopped; nothing where this program was started as a test.
#[test]
fn ranks() {
    let Ok(part) = std::env::var(PLAYS) else { return };
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |b| b.timeout(DEADLINE));
        rig.route_all(1);
        world.barrier("both are ready").unwrap();
        if rig.rank == 1 {
            std::io::stdin().read_line(&mut String::new()).unwrap();
            if part == "late" {
                // So that rank 0 looks at its clock before.
                std::thread::sleep(DEADLINE / 4);
                rig.round(MAX_TOKENS, rig.capacity).unwrap();
            }
            return;
        }
        let _handle = rig.enqueue(&rig.tokens(MAX_TOKENS), rig.capacity).unwrap();
        // Kernels of an idle executor start at once.
        std::thread::sleep(Duration::from_millis(100));
        println!("rank 0: waits");
        rig.stream.synchronize(PATIENCE).unwrap();
        let outcome = rig.ep.check().map_or_else(|error| error.to_string(), |()| "completed".into());
        println!("outcome: {outcome}");
    });
}
