#!/usr/bin/env python3
"""Runs the suite against a seeded sample of cargo-mutants' mutants of the Rust of proxy/, transport/ and bindings/.

    python3 tests/rust_mutants.py           goes on where an earlier run stopped (target/mutants/sample.txt)
    python3 tests/rust_mutants.py --list    prints the sample

Needs cargo-mutants (`cargo install cargo-mutants`), which lists the mutants; this script runs them, on copies of the
tree as tests/mutants.py does, with the tests that reach a file first. Every survivor must be judged in
tests/data/survivors.txt, a line each. Exit status 0 only if all of the sample ran, at most a tenth survived, and each
survivor is judged.
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
OUTCOMES = mutants.PLACE / "sample.txt"
JUDGED = ROOT / "tests" / "data" / "survivors.txt"
SEED, SAMPLE = 1, 60
FOLDERS = ("proxy", "transport", "bindings")
# Test programs by the folder of a mutant, those that reach it first; then all others.
FIRST = {"proxy": ["proxy", "calls"], "transport": ["transport", "calls"], "bindings/api": ["calls"], "bindings/cli": ["program"]}
PROGRAMS = ["calls", "program", "proxy", "transport", "rules", "proxy_quiet"]
# Seconds a test program may take.
LONGEST = 900


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
    # The program mounts the tests' reference.
    found = named(sorted((mutant for mutant in listed if ".." not in mutant["file"]), key=place))
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


def checks(worker, file):
    """Commands by name: unit tests, then the test programs."""
    cargo = ["cargo", "test", "-q", *worker.cargo]
    first = next((programs for folder, programs in FIRST.items() if file.startswith(folder + "/")), [])
    ordered = first + [program for program in PROGRAMS if program not in first]
    return [("unit tests", [*cargo, "--lib"])] + [(program, [*cargo, "--test", program]) for program in ordered]


def judge(worker, mutant):
    """`caught by ...`, `SURVIVED`, or `does not build`."""
    path = worker.tree / mutant["file"]
    text = path.read_text()
    path.write_text(mutated(text, mutant))
    try:
        if worker.build().returncode != 0:
            return "does not build"
        for name, command in checks(worker, mutant["file"]):
            try:
                built = worker.run([*command, "--no-run"], mutants.LONGEST_BUILD)
            except subprocess.TimeoutExpired:
                return f"{name} is not built within {mutants.LONGEST_BUILD} s"
            if built.returncode != 0:
                # An outcome is a line, and what follows the tab is the mutant.
                return f"{name} is not built: {' '.join(built.stderr[-300:].split())}"
            try:
                failed = worker.run(command, LONGEST).returncode != 0
            except subprocess.TimeoutExpired:
                failed = True
            if failed:
                return f"caught by {name}"
        return "SURVIVED"
    finally:
        path.write_text(text)


def recorded():
    """Outcomes by name of a mutant."""
    lines = OUTCOMES.read_text().splitlines() if OUTCOMES.exists() else []
    return dict(reversed(line.split("\t", 1)) for line in lines)


def run(waiting):
    """Runs what waits, and records each outcome at once."""
    OUTCOMES.parent.mkdir(parents=True, exist_ok=True)

    def work(worker):
        while True:
            try:
                name, mutant = waiting.get_nowait()
            except queue.Empty:
                return
            start = time.time()
            outcome = judge(worker, mutant)
            with OUTCOMES.open("a") as outcomes:
                outcomes.write(f"{outcome}\t{name}\n")
            print(f"{name[:90]:90} {outcome:24} {time.time() - start:5.1f} s", flush=True)

    threads = [threading.Thread(target=work, args=(mutants.Worker(number),)) for number in range(mutants.WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def counts(outcome):
    """Whether a mutant was built, and so belongs to the sample."""
    return outcome == "SURVIVED" or outcome.startswith("caught")


def sample(names, outcomes):
    """The first mutants of which as many as wanted are built, or not yet known to fail; and those not yet run."""
    chosen, waiting = [], []
    for name in names:
        if name not in outcomes:
            waiting.append(name)
        elif not counts(outcomes[name]):
            continue
        chosen.append(name)
        if len(chosen) == SAMPLE:
            break
    return chosen, waiting


def main():
    found = drawn()
    chosen, waiting = sample(found, recorded())
    if sys.argv[1:] == ["--list"]:
        print("\n".join(chosen))
        return
    while waiting:
        places = queue.SimpleQueue()
        for name in waiting:
            places.put((name, found[name]))
        run(places)
        chosen, waiting = sample(found, recorded())
    outcomes = recorded()
    survivors = [name for name in chosen if outcomes[name] == "SURVIVED"]
    judged = JUDGED.read_text() if JUDGED.exists() else ""
    unjudged = [name for name in survivors if name not in judged]
    print(f"{len(survivors)} of {len(chosen)} survived, {len(unjudged)} of them not judged")
    sys.exit(1 if 10 * len(survivors) > len(chosen) or unjudged else 0)


if __name__ == "__main__":
    main()
