#!/usr/bin/env python3
"""Plants one-line bugs in the kernels, one at a time, and demands that the suite catches each.

A mutant is a named (file, original text, mutated text). The text must occur exactly once, so that a mutant cannot rot
in silence. Works on copies of the tree under target/mutants, one a core. Prints a table; exit status 0 only if all were caught.
Arguments: names of mutants to run alone; or --one-in N for every Nth one, from a first that the files' contents decide;
or --resume for all but those that an earlier run with --resume saw caught, unless they or their files have changed since,
which tests/data/mutants_caught.txt keeps, and --resume FOLDER... for those of some folders; or --check, which only looks at
the table and counts those that were caught as they stand.
"""

import hashlib
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from mutants_program import GROUPS as OF_PROGRAM
from mutants_stated import GROUPS as OF_LIBRARY
from mutants_table import (
    AGREEMENT, BUILDER, CALLS, CARDS, CASE, CPU, DEVICE, DRIVER, ERROR, EXECUTOR, FILES, FREE_MEMORY, HANDLE, HOST,
    INTERRUPT, IN_PLACE, LAUNCHES, MACHINE, MAILBOX, NEEDS, NIC, OPEN, OVER, PAIRS, PICK, PROJECTION, QUOTE, RECORDING,
    REGIONS, REMOTE, REPLAY, REPORT, SCHEDULE, SCHEDULER, SEEDED, SERVICE, SHAPE, STACKS, VIEW, VIEWS, WAIT, WORLD,
    TABLE)

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLACE = ROOT / "target" / "mutants"
PASSED = PLACE / "passed.txt"
CAUGHT = ROOT / "tests" / "data" / "mutants_caught.txt"
WORKERS = min(os.cpu_count() or 1, 4)
# Rust and C++ without optimisation or debug information: most of the time goes into building. Warnings are no errors,
# since a mutant may leave something unused.
QUICK = os.environ | {"CARGO_PROFILE_DEV_OPT_LEVEL": "0", "CARGO_PROFILE_DEV_DEBUG": "0", "CARGO_INCREMENTAL": "1",
                      "TOKENYARD_MACHINE_SEEDS": "400", "TOKENYARD_STRICT": "0"}
# The kernels without a mutant are compiled once; those with one share nothing.
UNCHANGED = QUICK | {"TOKENYARD_OBJECTS": os.environ.get("TOKENYARD_OBJECTS") or str(ROOT / "target" / "objects")}
QUICK.pop("TOKENYARD_OBJECTS", None)
# Metadata in one tile of several groups of tokens; in several, of half the size and with more rows of experts than a block
# has threads; and in several of which one has a faulty choice.
GROUPS_OF_TOKENS = "world=3,hidden=64,experts=12,top_k=3,tokens=150,max_tokens=150,iters=4"
HALVES = "world=3,sms=32,hidden=64,experts=1200,top_k=3,tokens=290,max_tokens=290,meta_tile=64,iters=4"
TILES = "world=3,hidden=64,experts=12,top_k=3,tokens=160,max_tokens=160,meta_tile=32,fault=routing,iters=6"
# Some blocks are dedicated senders.
DEDICATED = ("world=6,sms=4,hidden=128,experts=24,top_k=4,tokens=70,max_tokens=70,meta_tile=32,iters=4,"
         "world_mode=one-thread,hold_stores=yes")
# Completions that are later than whole messages (the seed has many), and a direction whose messages go link by link.
LATE = ("world=8,nodes=1+1+1+1+1+1+1+1,hidden=16,experts=8,top_k=1,weights=combine,tokens=2,max_tokens=2,sms=2,iters=24,"
        "world_mode=one-thread,seed=1")
# Dispatches ahead of their combines, of rows that are kept once: nothing else shows when those may be overwritten.
KEPT_ONCE = ("world=4,nodes=2+2,ahead=2,hidden=32,experts=16,top_k=4,tokens=24,max_tokens=24,sms=2,iters=8,"
             "double_buffer=no,world_mode=one-thread,hold_stores=yes,seed=1")
# Partial rows whose scales come after what they scale, and are polled in between.
SCALES_LATER = ("world=4,hidden=256,experts=8,top_k=1,partial=fp8,ll_tokens=256,tokens=24,max_tokens=24,sms=4,"
                 "iters=240,world_mode=one-thread,seed=1")
# LL rows that are looked at between the two halves of a vector's store.
HALVES_LATER = ("world=4,hidden=512,experts=8,top_k=3,ll_tokens=256,tokens=24,max_tokens=24,sms=2,iters=240,"
                "world_mode=one-thread,seed=5")
GROUPS = OF_LIBRARY + OF_PROGRAM
MUTANTS = TABLE + [mutant for _, _, group in GROUPS for mutant in group]
# What catches a mutant, where it is stated: unit tests or a module of a test program, by the mutant's name.
STATED = {mutant[0]: (kind, words) for kind, words, group in GROUPS for mutant in group}

# What cargo's test programs print of one that fails.
FAILED = re.compile(r"^test .* \.\.\. FAILED$", re.MULTILINE)
# Seconds; some mutants never end.
LONGEST_CHECK = 200
LONGEST_BUILD = 900
# How often as long as a check takes that passes it may take, on a machine that is busy.
SLOWER = 4


def run_whole(command, folder, environment, limit):
    """Runs a command. What it started ends with it at the limit, such as tests of cargo test, which may hang for good."""
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **piped) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except BaseException:
            # Nobody has waited for it, so the number is still its own.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_tests(command, folder, environment, limit):
    """Runs a test program by cargo, up to the first test that fails: others may hang until their deadlines."""
    with tempfile.TemporaryFile() as out:
        process, ends, failed = None, time.monotonic() + limit, None
        try:
            process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, stdout=out, stderr=subprocess.STDOUT)
            while process.poll() is None and failed is None:
                if time.monotonic() > ends:
                    raise subprocess.TimeoutExpired(command, limit)
                time.sleep(0.1)
                failed = FAILED.search(text_of(out))
        finally:
            if process is not None and process.returncode is None:
                # Nobody has waited for it, so the number is still its own.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        # Where a test ended it, what others printed is none of its reasons.
        printed = failed[0] if failed else text_of(out)
    return subprocess.CompletedProcess(command, 1 if failed else process.returncode, printed, "")


def text_of(file):
    """What is in a file so far; the program that writes it goes on where it was, as both have one position."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


class Worker:
    """A copy of the tree with a build folder of its own."""

    # How long checks took that passed.
    took = {}

    def __init__(self, number):
        # What caught mutants here, by its command: a name.
        self.caught = {}
        self.tree = PLACE / f"tree-{number}"
        self.target = PLACE / f"build-{number}"
        self.cargo = ["--no-default-features", "--features", "cli", "--target-dir", str(self.target)]

    def copy(self):
        """Makes the copy, in place of an earlier run's."""
        if self.tree.exists():
            shutil.rmtree(self.tree)
        # With new times: a build of an earlier run may be of a mutant that was written later than these files.
        shutil.copytree(ROOT, self.tree, copy_function=shutil.copy, ignore=shutil.ignore_patterns("target", ".git", ".venv*", ".gpu"))

    def seed(self):
        """Takes other crates from the build with coverage, if there is one: cargo builds them the same way here."""
        built, own = ROOT / "target" / "coverage" / "debug", self.target / "debug"
        if own.exists() or not built.exists():
            return

        def left_out(folder, names):
            libraries = (".rlib", ".rmeta", ".so", ".d")
            return {name for name in names if "tokenyard" in name or (folder.endswith("/deps") and not name.endswith(libraries))}

        # Compilers and linkers put new files in the place of old ones, so libraries take no room of their own.
        for folder, copy in (("deps", os.link), ("build", shutil.copy2), (".fingerprint", shutil.copy2)):
            shutil.copytree(built / folder, own / folder, copy_function=copy, ignore=left_out)

    def run(self, command, limit, environment=QUICK):
        return run_whole(command, self.tree, environment, limit)

    def build(self, environment=QUICK):
        return self.run(["cargo", "build", "-q", *self.cargo], LONGEST_BUILD, environment)

    def checks(self, file):
        """What the suite runs against a mutant of a file; the first that fails catches it."""
        program = str(self.target / "debug" / "tokenyard")
        cargo = ["cargo", "test", *self.cargo]

        def test(module, *parts):
            return [*cargo, "--test", *tests_of(module, parts)]

        worlds = [
            ("schedules", [program, "verify", "--schedules", "80", "--timeout-ms", "4000"]),
            ("seeds", [program, "verify", "--seeds", "60", "--timeout-ms", "2000"]),
            ("faults", test("faults")),
            ("nodes", test("nodes", "rounds", "another_dispatch")),
            ("contexts", test("contexts", "another_dispatch", "another_call", "threads_of_a_block", "closed_context", "the_first_launch")),
            ("several tiles", [program, "verify", "--replay", TILES]),
            ("smaller tiles", [program, "verify", "--replay", HALVES]),
            ("groups of tokens", [program, "verify", "--replay", GROUPS_OF_TOKENS]),
            ("dedicated senders", [program, "verify", "--timeout-ms", "4000", "--replay", DEDICATED]),
            ("rows kept once", [program, "verify", "--timeout-ms", "4000", "--replay", KEPT_ONCE]),
            ("scales later", [program, "verify", "--timeout-ms", "4000", "--replay", SCALES_LATER]),
            ("halves later", [program, "verify", "--timeout-ms", "4000", "--replay", HALVES_LATER]),
            ("late completions", [program, "verify", "--timeout-ms", "4000", "--replay", LATE]),
            ("overlap", test("overlap")),
            ("messages tampered with", [program, "verify", "--timeout-ms", "1000", "--schedules", "200", "--forge"]),
        ]
        in_place = [
            ("outputs in the arena", [program, "verify", "--schedules", "120", "--in-place", "--timeout-ms", "4000"]),
            ("in_place", test("in_place")),
        ]
        worlds = in_place + worlds if file == IN_PLACE else worlds + in_place
        # The proxy has tests of its own, which are quicker than whole worlds, and these have no emulated NIC.
        proxy = [("proxy_machine", test("proxy_machine"))]
        pick = [("unit tests", ["cargo", "test", *self.cargo, "--lib", "pick"])]
        nic = [("gpu_nic", test("gpu_nic"))]
        # What a context and its proxy agree on as it is built.
        service = [
            ("unit tests", ["cargo", "test", *self.cargo, "--lib", "service"]),
            ("transport_outside", test("transport_outside", "gathered")),
            ("nodes", test("nodes")),
        ]
        lib = ["cargo", "test", *self.cargo, "--lib"]
        # The program: what it does with its streams, its ranks' environment and files of its user.
        cli = [
            ("cli", test("cli", "reader", "full_disk", "caller", "trace", "log")),
            ("cli_run", test("cli_run")),
            ("unit tests", [*lib, "cli::cases::trace_file"]),
        ]
        contexts = [("contexts", test("contexts"))]
        overlaps = [("aliasing", test("aliasing"))]
        ownership = [("ownership", test("ownership"))]
        interrupts = [("interrupts", test("interrupts")), ("unit tests", [*lib, "base::"])]
        own = {
            CARDS: [("unit tests", [*lib, "cards"]), ("transport_outside", test("transport_outside", "gathered", "text"))],
            MACHINE: proxy + [("unit tests", [*lib, "driver"])],
            DRIVER: [("unit tests", [*lib, "driver"])],
            REGIONS: [("unit tests", [*lib, "regions"])],
            FREE_MEMORY: [("unit tests", [*lib, "memory"])],
            SCHEDULER: [("cli", test("cli", "stacks"))],
            LAUNCHES: [("unit tests", [*lib, "lack_of_memory"])],
            SCHEDULE: [("stopped", test("stopped"))],
            STACKS: [("unit tests", [*lib, "guard_pages"])],
            SEEDED: [("device", test("device", "world"))],
            CALLS: contexts + overlaps + ownership + [("unit tests", [*lib, "context::"])],
            VIEWS: overlaps + contexts,
            NEEDS: overlaps,
            SHAPE: contexts,
            BUILDER: [("faults", test("faults", "are_refused"))],
            VIEW: [("unit tests", [*lib, "device::view"])] + ownership,
            DEVICE: ownership + contexts,
            CPU: ownership + [("unit tests", [*lib, "given_up"])],
            RECORDING: ownership + contexts + [("unit tests", [*lib, "recording"])],
            OPEN: ownership,
            HANDLE: ownership,
            EXECUTOR: ownership,
            WORLD: contexts + [
                ("bootstrap", test("bootstrap", "ports", "again", "generation")), ("worlds", test("worlds", "sizes"))],
            REPORT: [("unit tests", [*lib, "report::"]), ("contexts", test("contexts", "other_orders")), ("nodes", test("nodes", "halves_go")),
                     ("overlap", test("overlap"))],
            ERROR: [("unit tests", [*lib, "error::"])],
            PAIRS: [("pairs", test("pairs"))],
            MAILBOX: [("tests/loom.rs", [*cargo, "--test", "loom"])],
            REMOTE: [("unit tests", [*lib, "driver"])],
            PROJECTION: [("unit tests", [*lib, "--", "simulate::tests::a_link", "simulate::tests::a_peer"])],
            CASE: [("unit tests", [*lib, "cli::cases::case"])],
            FILES: [("cli", test("cli", "files_that"))],
            REPLAY: [("cli", test("cli", "unusable_arguments"))],
            OVER: [("worlds", test("worlds"))],
            AGREEMENT: [("worlds", test("worlds"))],
            HOST: [("memory", test("memory", "limit"))],
            QUOTE: [("unit tests", [*lib, "quote"]), ("worlds", test("worlds", "texts_of_others"))],
            WAIT: interrupts,
            INTERRUPT: interrupts + [("ownership", test("ownership", "own_storage"))],
        }
        bootstrap = [
            ("unit tests", ["cargo", "test", *self.cargo, "--lib", "transport"]),
            ("bootstrap", test("bootstrap")),
            ("interrupts", test("interrupts")),
        ]
        if file in own:
            return own[file]
        if file.startswith("bindings/cli/"):
            return cli
        if file.startswith("transport/"):
            return bootstrap
        return service if file == SERVICE else pick + worlds if file == PICK else proxy if file.startswith("proxy/") else nic if file == NIC else worlds

    def checks_of(self, mutant):
        """What the suite runs against a mutant."""
        name, file, _, _ = mutant
        if name not in STATED:
            # What was taken on trust makes kernels run for ever, until the check's limit.
            return sorted(self.checks(file), key=lambda check: "on trust" in name and check[0] != "messages tampered with")
        kind, words = STATED[name]
        cargo = ["cargo", "test", *self.cargo]
        return [(words, [*cargo, "--lib", words] if kind == "unit" else [*cargo, "--test", *tests_of(words, ())])]

    def checks_of_all(self, mutants):
        """What the suite runs against any of the mutants, each once and in the same order in all places."""
        return list({tuple(command): (name, command) for mutant in mutants for name, command in self.checks_of(mutant)}.values())

    def thorough(self, mutant):
        """What the suite runs besides, for what the quick checks let through: as many schedules as all.sh."""
        name, file, _, _ = mutant
        program = str(self.target / "debug" / "tokenyard")
        schedules = [("all schedules", [program, "verify", "--schedules", "2000", "--timeout-ms", "4000"])]
        special = file in (NIC, FREE_MEMORY, SCHEDULER, SCHEDULE, STACKS, SEEDED, DEVICE, PAIRS, WAIT, INTERRUPT)
        separate = file.startswith(("proxy/", "transport/", "bindings/")) and file != PICK or special
        return [] if separate or name in STATED else schedules

    def caught_by(self, checks, longest=LONGEST_CHECK, hangs_are_caught=True, run_tests=run_tests):
        """The name of the check that fails, with its last line, or None; no name if its test program does not build, or
        if it passes its limit and that proves nothing. `run_tests` runs a test program."""
        for name, command in checks:
            limit = max(longest, SLOWER * self.took.get(name, 0))
            # Apart from the check, whose limit a build of a whole test program may pass: that would look like a catch.
            if command[0] == "cargo":
                arguments = command[:command.index("--")] if "--" in command else command
                try:
                    built = self.run([*arguments, "--no-run"], LONGEST_BUILD)
                except subprocess.TimeoutExpired:
                    return "", f"{name}: the test program is not built within {LONGEST_BUILD} s"
                if built.returncode != 0:
                    return "", f"{name}: the test program does not build: {built.stderr}"
            start = time.time()
            try:
                result = (run_tests if command[0] == "cargo" else run_whole)(command, self.tree, QUICK, limit)
            except subprocess.TimeoutExpired:
                if hangs_are_caught:
                    self.caught[tuple(command)] = name
                return name if hangs_are_caught else "", f"{name}: hung for {limit} s"
            if result.returncode != 0:
                self.caught[tuple(command)] = name
                lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
                # Of test programs: what panicked, with the line behind it.
                panics = [" ".join(lines[at:at + 2]) for at, line in enumerate(lines) if " panicked at " in line]
                return name, (panics or lines[-1:] or [f"exit status {result.returncode}"])[0]
            if command[0] == "cargo" and not re.search(r"\b[1-9]\d* passed", result.stdout):
                return "", f"{name}: no test ran"
            self.took[name] = max(self.took.get(name, 0), time.time() - start)
        return None

    def judge(self, mutant):
        """The outcome of a mutant: the check that caught it, None if none did, or why it does not count."""
        name, file, original, mutated = mutant
        path = self.tree / file
        text = path.read_text()
        path.write_text(text.replace(original, mutated))
        try:
            # Checks by cargo build what they run.
            if name not in STATED:
                try:
                    built = self.build()
                except subprocess.TimeoutExpired:
                    return "", f"is not built within {LONGEST_BUILD} s"
                if built.returncode != 0:
                    return "", f"does not compile: {built.stderr}"
            quick = self.caught_by(self.checks_of(mutant))
            # So many schedules take long on some machines even where nothing hangs, and end what hangs themselves.
            return quick or self.caught_by(self.thorough(mutant), LONGEST_BUILD, hangs_are_caught=False)
        finally:
            path.write_text(text)


def tests_of(module, parts):
    """The test program of a module, and what chooses its tests: all of them, or those whose names have one of the parts."""
    # Other folders hold parts of a program, and the one for verbs needs a VM.
    files = [file for file in ROOT.glob(f"tests/*/{module}.rs") if (file.parent / "main.rs").exists() and file.parent.name != "verbs"]
    if len(files) != 1:
        sys.exit(f"{len(files)} files of test programs are called {module}.rs: it must be one")
    file = files[0]
    names = re.findall(r"#\[test\]\n\s*fn (\w+)", file.read_text())
    chosen = [f"{module}::{name}" for name in names if any(part in name for part in parts)]
    if parts and not chosen:
        sys.exit(f"no test of {file} has one of {parts} in its name")
    return [file.parent.name, "--", *(["--exact", *chosen] if parts else [f"{module}::"])]


def check_texts():
    """Refuses a table whose texts do not each stand once in their file, or whose checks name tests that are not there."""
    for mutant in MUTANTS:
        name, file, original, _ = mutant
        found = (ROOT / file).read_text().count(original)
        if found != 1:
            sys.exit(f"mutant «{name}»: its original text stands {found} times in {file}")
        Worker(0).checks_of(mutant)


def tree_of(worker):
    """A hash of all that a worker has but the list of those caught."""
    files = sorted(path for path in worker.tree.rglob("*") if path.is_file() and path.suffix != ".pyc" and path.name != CAUGHT.name)
    parts = (hashlib.sha256(str(path.relative_to(worker.tree)).encode() + path.read_bytes()).digest() for path in files)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def prepare():
    """Builds the tree in as many places."""
    workers, problems = [Worker(number) for number in range(WORKERS)], []
    for worker in workers:
        worker.copy()
        worker.seed()

    def work(worker):
        if (unmutated := worker.build(UNCHANGED)).returncode != 0:
            problems.append("the tree does not build: " + unmutated.stderr)

    in_threads(work, workers)
    if problems:
        sys.exit(problems[0])
    return workers


def check_before(workers, mutants):
    """Demands that what is to be run against the mutants passes without any: a run that resumes notes at once what is
    caught. It takes the word of former ones with the same tree."""
    waiting, tree = queue.SimpleQueue(), tree_of(workers[0])
    passed = dict(line.split() for line in PASSED.read_text().splitlines()) if PASSED.exists() else {}
    keys = [hashlib.sha256((tree + repr(check)).encode()).hexdigest() for check in workers[0].checks_of_all(mutants)]
    for number, key in enumerate(keys):
        if key not in passed:
            waiting.put(number)
            continue
        name = workers[0].checks_of_all(mutants)[number][0]
        Worker.took[name] = max(Worker.took.get(name, 0), float(passed[key]))

    def work(worker):
        checks = worker.checks_of_all(mutants)
        while (number := next_of(waiting)) is not None:
            start = time.time()
            must_pass(worker, checks[number], LONGEST_BUILD)
            with PASSED.open("a") as file:
                file.write(f"{keys[number]} {time.time() - start:.1f}\n")

    in_threads(work, workers)


def check_after(workers):
    """Demands that what caught mutants passes without any."""

    def work(worker):
        for command, name in list(worker.caught.items()):
            must_pass(worker, (name, list(command)), LONGEST_CHECK)

    in_threads(work, workers)


def must_pass(worker, check, longest):
    """Ends the run if a check fails on the tree itself."""
    # Programs are what the last mutant left; checks by cargo build their own.
    if check[1][0] != "cargo" and (unmutated := worker.build()).returncode != 0:
        sys.exit("the tree does not build: " + unmutated.stderr)
    # To its end, so that it says why.
    if (false_alarm := worker.caught_by([check], longest, run_tests=run_whole)) is not None:
        sys.exit(f"the suite fails without any mutant: {false_alarm}")


def next_of(waiting):
    """The next of a queue; None if none is left."""
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


def in_threads(work, workers):
    """Does the work with each worker, in a thread of its own. What ends a thread ends the run, once all have ended."""
    failures = []

    def attempt(worker):
        try:
            work(worker)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=attempt, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def fingerprint(mutant):
    """Of a mutant and of the file that it changes."""
    return hashlib.sha256(repr(mutant).encode() + (ROOT / mutant[1]).read_bytes()).hexdigest()[:16]


def caught_before():
    """The fingerprints of mutants that earlier runs with --resume saw caught."""
    return {line.split()[0] for line in CAUGHT.read_text().splitlines()} if CAUGHT.exists() else set()


def forget_changed():
    """Leaves in the list of those caught the mutants that stand in the table as they were then."""
    known, caught = map(fingerprint, MUTANTS), caught_before()
    lines = [f"{mark} {mutant[0]}\n" for mark, mutant in zip(known, MUTANTS) if mark in caught]
    CAUGHT.write_text("".join(lines))


def chosen(arguments):
    """The mutants that the arguments ask for."""
    if arguments[:1] == ["--resume"]:
        caught, folders = caught_before(), tuple(arguments[1:]) or ""
        left = [mutant for mutant in MUTANTS if mutant[1].startswith(folders) and fingerprint(mutant) not in caught]
        # File by file: what a file is built into must be built again for the one before, too.
        return sorted(left, key=lambda mutant: mutant[1])
    if arguments[:1] == ["--one-in"]:
        parts = int(arguments[1])
        contents = b"".join((ROOT / file).read_bytes() for file in sorted({file for _, file, _, _ in MUTANTS}))
        return MUTANTS[hashlib.sha256(contents).digest()[0] % parts :: parts]
    known = {mutant[0] for mutant in MUTANTS}
    if unknown := [name for name in arguments if name not in known]:
        sys.exit(f"no mutant is called «{unknown[0]}»")
    return [mutant for mutant in MUTANTS if not arguments or mutant[0] in arguments]


def main():
    check_texts()
    if sys.argv[1:] == ["--check"]:
        caught = caught_before()
        print(f"{sum(fingerprint(mutant) in caught for mutant in MUTANTS)} of {len(MUTANTS)} mutants were seen caught as they stand")
        return
    mutants, missed, resumes = chosen(sys.argv[1:]), [], sys.argv[1:2] == ["--resume"]
    if resumes:
        forget_changed()
    waiting = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)

    def work(worker):
        while (mutant := next_of(waiting)) is not None:
            start = time.time()
            result = worker.judge(mutant)
            verdict = "SURVIVED" if result is None else f"caught by {result[0]}" if result[0] else result[1]
            if result is None or not result[0]:
                missed.append(mutant[0])
            elif resumes:
                with CAUGHT.open("a") as caught:
                    caught.write(f"{fingerprint(mutant)} {mutant[0]}\n")
            print(f"{mutant[0]:50} {verdict:32} {time.time() - start:5.1f} s", flush=True)

    workers = prepare()
    if resumes:
        check_before(workers, mutants)
    in_threads(work, workers)
    if not resumes:
        check_after(workers)
    print(f"{len(mutants) - len(missed)} of {len(mutants)} mutants caught")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
