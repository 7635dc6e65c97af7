#!/usr/bin/env python3
"""Runs the suite against a seeded sample of cargo-mutants' mutants of the Rust of proxy/, transport/ and bindings/.

    python3 tests/rust_mutants.py           runs the mutants of the sample that have no valid outcome
    python3 tests/rust_mutants.py --list    prints the sample

Needs cargo-mutants (`cargo install cargo-mutants`), which lists the mutants, and what tests/verbs/vm.sh --setup installs.
This script runs them, on copies of the tree as tests/mutants.py does, with the tests that reach a file first. Outcomes are
kept in tests/data/sample.txt, a line each: outcome, fingerprint, name. An outcome is valid until the text of the mutated
function changes, whatever changes elsewhere; delete its line to run the mutant anew. Every survivor must be judged in
tests/data/survivors.txt, a line each: its name as --list prints it, a tab, and the judgement. Exit status 0 only if all of
the sample ran, at most a tenth survived, and each survivor is judged.
"""

import hashlib
import json
import queue
import re
import shutil
import subprocess
import sys
import threading
import time

import mutants

ROOT = mutants.ROOT
OUTCOMES = ROOT / "tests" / "data" / "sample.txt"
JUDGED = ROOT / "tests" / "data" / "survivors.txt"
SEED, SAMPLE = 1, 60
FOLDERS = ("proxy", "transport", "bindings")
# Test programs by the folder of a mutant, those that reach it first; then all others.
FIRST = {"proxy": ["proxy", "calls"], "transport": ["transport", "calls"], "bindings/api": ["calls"], "bindings/cli": ["program"]}
PROGRAMS = ["calls", "program", "proxy", "transport", "rules", "proxy_quiet"]
# What only the devices of the VM of tests/verbs/vm.sh run; for its mutants, the program verbs runs there last.
IN_VM = "transport/network/verbs/"
# Seconds a test program may take; and in the VM, whose processors are emulated.
LONGEST, LONGEST_IN_VM = 400, 1500
mutants.QUICK["VM_TIMEOUT"] = str(LONGEST_IN_VM)
# Mutants that do not build are replaced by others, at most so many.
MOST_REPLACED = 60
# Held while the file of outcomes is read and written.
RECORDING = threading.Lock()


def named(listed):
    """Mutants by names without line numbers, so that a change elsewhere leaves the sample as it is."""
    found = {}
    for mutant in listed:
        name = re.sub(r":\d+:\d+:", ":", mutant["name"])
        alike = sum(1 for other in found if other.split(" #")[0] == name)
        found[f"{name} #{alike + 1}" if alike else name] = mutant
    return found


def drawn():
    """All mutants by name, in an order that the seed decides."""
    if shutil.which("cargo-mutants") is None:
        sys.exit("tests/rust_mutants.py needs cargo-mutants: cargo install cargo-mutants")
    command = ["cargo", "mutants", "--list", "--json"]
    for folder in FOLDERS:
        command += ["--file", f"{folder}/**"]
    listed = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    # The program mounts the tests' reference. Generated files are compared with what generates them.
    own = [mutant for mutant in listed if ".." not in mutant["file"] and "_sys/" not in mutant["file"]]
    found = named(sorted(own, key=place))
    ordered = sorted(found, key=lambda name: hashlib.sha256(f"{SEED} {name}".encode()).digest())
    return {name: found[name] for name in ordered}


def place(mutant):
    return mutant["file"], mutant["span"]["start"]["line"], mutant["span"]["start"]["column"], mutant["name"]


def offset(text, place):
    """Of a line and column, both counted from 1."""
    lines = text.split("\n")
    return sum(len(line) + 1 for line in lines[: place["line"] - 1]) + place["column"] - 1


def mutated(text, mutant):
    span = mutant["span"]
    begin, end = offset(text, span["start"]), offset(text, span["end"])
    return text[:begin] + mutant["replacement"] + text[end:]


def unit_tests(worker):
    return ["cargo", "test", "-q", *worker.cargo, "--lib"]


def checks(worker, file):
    """Commands by name: unit tests, then the test programs."""
    cargo = ["cargo", "test", "-q", *worker.cargo]
    first = next((programs for folder, programs in FIRST.items() if file.startswith(folder + "/")), [])
    ordered = first + [program for program in PROGRAMS if program not in first]
    return [("unit tests", unit_tests(worker))] + [(program, [*cargo, "--test", program]) for program in ordered]


def checks_in_vm(worker, file):
    if not file.startswith(IN_VM):
        return []
    runner = f"target.x86_64-unknown-linux-gnu.runner={json.dumps(str(worker.tree / 'tests' / 'verbs' / 'vm.sh'))}"
    return [("verbs", ["cargo", "--config", runner, "test", "-q", *worker.cargo, "--test", "verbs", "--", "--test-threads=1"])]


def caught_by(worker, file):
    return worker.caught_by(checks(worker, file), LONGEST) or worker.caught_by(checks_in_vm(worker, file), LONGEST_IN_VM)


def judge(worker, mutant):
    """`caught by ...`, `SURVIVED`, or why it does not count."""
    path = worker.tree / mutant["file"]
    text = path.read_text()
    path.write_text(mutated(text, mutant))
    try:
        try:
            if worker.run([*unit_tests(worker), "--no-run"], mutants.LONGEST_BUILD).returncode != 0:
                return "does not build"
        except subprocess.TimeoutExpired:
            return f"is not built within {mutants.LONGEST_BUILD} s"
        caught = caught_by(worker, mutant["file"])
        if caught is None:
            return "SURVIVED"
        name, why = caught
        # An outcome is a line of fields between tabs.
        return f"caught by {name}" if name else " ".join(why[-300:].split())
    finally:
        path.write_text(text)


def fingerprint(name, mutant):
    """Of a mutant and of the function that it changes; of the whole file for a mutant outside functions."""
    text = (ROOT / mutant["file"]).read_text()
    if mutant["function"] is not None:
        span = mutant["function"]["span"]
        text = text[offset(text, span["start"]) : offset(text, span["end"])]
    return hashlib.sha256(f"{name}\n{text}".encode()).hexdigest()[:16]


def recorded(found):
    """Outcomes by name, of mutants whose functions are still as they were."""
    lines = [line.split("\t") for line in OUTCOMES.read_text().splitlines()] if OUTCOMES.exists() else []
    return {name: outcome for outcome, of, name in lines if name in found and of == fingerprint(name, found[name])}


def record(found, name, outcome):
    """Adds an outcome. Outcomes that are no longer valid leave the file."""
    with RECORDING:
        outcomes = sorted((recorded(found) | {name: outcome}).items())
        lines = [f"{outcome}\t{fingerprint(name, found[name])}\t{name}\n" for name, outcome in outcomes]
        OUTCOMES.write_text("".join(lines))


def prepared(files):
    """Workers, once all tests that reach these files have passed on the tree itself."""
    workers = [mutants.Worker(number) for number in range(mutants.WORKERS)]
    if (built := workers[0].build()).returncode != 0:
        sys.exit(f"the tree does not build: {built.stderr}")
    alarm = caught_by(workers[0], next((file for file in files if file.startswith(IN_VM)), ""))
    if alarm is not None:
        sys.exit(f"the suite fails without any mutant: {alarm}")
    return workers


def run(found, waiting, workers):
    """Runs what waits, and records each outcome at once."""
    def work(worker):
        while (name := mutants.next_of(waiting)) is not None:
            start = time.time()
            outcome = judge(worker, found[name])
            record(found, name, outcome)
            print(f"{name[:90]:90} {outcome:24} {time.time() - start:5.1f} s", flush=True)

    mutants.in_threads(work, workers)


def counts(outcome):
    """Whether a mutant was built, and so belongs to the sample."""
    return outcome == "SURVIVED" or outcome.startswith("caught")


def sample(names, outcomes):
    """The first mutants of which as many as wanted are built, or not yet known to fail; and those not yet run."""
    chosen, waiting, replaced = [], [], 0
    for name in names:
        if name not in outcomes:
            waiting.append(name)
        elif not counts(outcomes[name]):
            replaced += 1
            if replaced > MOST_REPLACED:
                sys.exit(f"{replaced} mutants do not build: see {OUTCOMES}")
            continue
        chosen.append(name)
        if len(chosen) == SAMPLE:
            break
    return chosen, waiting


def main():
    found = drawn()
    chosen, waiting = sample(found, recorded(found))
    if sys.argv[1:] == ["--list"]:
        print("\n".join(chosen))
        return
    workers = prepared([found[name]["file"] for name in waiting]) if waiting else []
    while waiting:
        places = queue.SimpleQueue()
        for name in waiting:
            places.put(name)
        run(found, places, workers)
        chosen, waiting = sample(found, recorded(found))
    outcomes = recorded(found)
    survivors = [name for name in chosen if outcomes[name] == "SURVIVED"]
    lines = JUDGED.read_text().splitlines() if JUDGED.exists() else []
    judged = {name for name, tab, why in (line.partition("\t") for line in lines) if tab and why.strip()}
    unjudged = [name for name in survivors if name not in judged]
    print(f"{len(survivors)} of {len(chosen)} survived, {len(unjudged)} of them not judged")
    sys.exit(1 if 10 * len(survivors) > len(chosen) or unjudged else 0)


if __name__ == "__main__":
    main()
