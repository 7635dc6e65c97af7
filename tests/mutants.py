#!/usr/bin/env python3
"""Plants one-line bugs in the kernels, one at a time, and demands that the suite catches each.

A mutant is a named (file, original text, mutated text). The text must occur exactly once, so that a mutant cannot rot
in silence. Works on copies of the tree under target/mutants, one a core. Prints a table; exit status 0 only if all were caught.
Arguments: names of mutants to run alone.
"""

import os
import pathlib
import queue
import shutil
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLACE = ROOT / "target" / "mutants"
WORKERS = min(os.cpu_count() or 1, 4)
SEND, RECEIVE = "kernels/dispatch_send.cuh", "kernels/dispatch_receive.cuh"
COMBINE, CONTEXT, DISPATCH, BARRIER = (
    "kernels/combine.cuh", "kernels/context.cuh", "kernels/dispatch.cuh", "kernels/barrier.cuh")
PARTIAL, NODES, TO_NODES, FROM_NODES = (
    "kernels/combine_send.cuh", "kernels/wire.cuh", "kernels/dispatch_wire.cuh", "kernels/combine_wire.cuh")
COUNTER, LINKS, MACHINE, WIRE = "proxy/counter.rs", "proxy/machine/links.rs", "proxy/machine.rs", "proxy/wire.rs"

# Rust and C++ without optimisation or debug information: most of the time goes into building.
QUICK = os.environ | {"CARGO_PROFILE_DEV_OPT_LEVEL": "0", "CARGO_PROFILE_DEV_DEBUG": "0",
                      "TOKENYARD_MACHINE_SEEDS": "400"}
MUTANTS = [
    ("row tag without release", SEND,
     "store_release_sys(in_arena<u64>(c, rank, c.regions.row_tags",
     "store_relaxed_sys(in_arena<u64>(c, rank, c.regions.row_tags"),
    ("row tag before the other threads' stores", SEND,
     "  block_barrier();\n  // N2: as N1;", "  // N2: as N1;"),
    ("row tag raised in the wrong slot", SEND, "source) + token, epoch);", "source) + token / 2, epoch);"),
    ("META flag without release", SEND,
     "store_release_sys(in_arena<u64>(c, destination, c.regions.meta_flags",
     "store_relaxed_sys(in_arena<u64>(c, destination, c.regions.meta_flags"),
    ("META flag released to this rank alone", SEND,
     "store_release_sys(in_arena<u64>(c, destination, c.regions.meta_flags",
     "store_release_gpu(in_arena<u64>(c, destination, c.regions.meta_flags"),
    ("no barrier between marking and counting", SEND,
     "shared, tile);\n    block_barrier();\n    write_tile", "shared, tile);\n    write_tile"),
    ("a rank without tokens raises no flag", SEND,
     "  raise_meta_flag(c, epoch, destination, c.rank,",
     "  if (in.tokens == 0) return;\n  raise_meta_flag(c, epoch, destination, c.rank,"),
    ("off by one in a position", SEND, "((1u << (token % 32)) - 1)", "((2u << (token % 32)) - 1)"),
    ("duplicate expert not seen", SEND, "for (u32 j = 0; j < k; ++j)", "for (u32 j = 1; j < k; ++j)"),
    ("home slot counted from the wrong rank", SEND, "bits_below(ranks, tile.destination)", "bits_below(ranks, tile.destination + 1)"),
    ("parity ignored", CONTEXT, "(epoch & 1) * region.parity_stride", "0 * region.parity_stride"),
    ("stale tag or flag accepted", CONTEXT,
     "  u64 seen = load_acquire_sys(word);\n  if ((seen >> shift) == expected) return true;",
     "  u64 seen = load_acquire_sys(word);\n  if ((seen >> shift) != 0) return true;"),
    ("epoch advanced by every block", CONTEXT, "+ 1 != block_count()) return false;", "+ 1 == 0) return false;"),
    ("order not checked", CONTEXT, "if (sends == (sent == received)) return", "if (sends || sent != received) return"),
    ("rows of the source itself counted as earlier", RECEIVE,
     "rows_before(c, epoch, static_cast<u32>(expert), source) +",
     "rows_before(c, epoch, static_cast<u32>(expert), source + 1) +"),
    ("row tag not waited for", RECEIVE, "failed = !wait_tag(c, TY_DIRECTION_DISPATCH", "failed = false && !wait_tag(c, TY_DIRECTION_DISPATCH"),
    ("segment starts read too early", RECEIVE,
     "store(&shared.start[experts], carry);\n  block_barrier();", "store(&shared.start[experts], carry);"),
    ("counts read too early", RECEIVE,
     "rows_before(c, epoch, e, c.ranks));\n  block_barrier();", "rows_before(c, epoch, e, c.ranks));"),
    ("alignment forgotten", RECEIVE, "/ align * align;", "/ align * align + rows % 2;"),
    ("overflow not noticed", RECEIVE, "needed <= a.output.capacity", "needed <= a.output.capacity + 1"),
    ("partial row tag without release", PARTIAL,
     "store_release_sys(in_arena<u64>(c, owner.rank, c.regions.partial_tags",
     "store_relaxed_sys(in_arena<u64>(c, owner.rank, c.regions.partial_tags"),
    ("partial row tag before the row", PARTIAL,
     "  block_barrier();\n  // N4: the row happens", "  // N4: the row happens"),
    ("flag of weights before the weights", PARTIAL,
     "    block_barrier();\n    // N10: the weights happen", "    // N10: the weights happen"),
    ("partial rows not waited for", PARTIAL, "failed |= !wait_tag(c, TY_DIRECTION_COMBINE, tag", "failed |= false && !wait_tag(c, TY_DIRECTION_COMBINE, tag"),
    ("weight of the wrong choice", PARTIAL, "float weight = load(weights + k);", "float weight = load(weights + c.top_k - 1 - k);"),
    ("a missing choice summed", PARTIAL, "    if (row < 0) continue;\n", "    if (row < 0) row = 0;\n"),
    ("old value forgotten when accumulating", COMBINE, "add_rn(old.v[i], sum.v[i])", "add_rn(0.0f, sum.v[i])"),
    ("incomplete rank's row added", PARTIAL, "    if (!((parts.present >> lowest_bit(left)) & 1)) continue;\n", ""),
    ("barrier lets go early", BARRIER, "u64 number = load(&state->barriers) + 1;", "u64 number = load(&state->barriers) + 1 - (c.rank == 0);"),
    ("handle marked received by send", DISPATCH, "if (!(a.phases & TY_PHASE_RECEIVE)) return;", "if (false) return;"),
    ("free flag ignored", CONTEXT, "if (!c.single || epoch == c.first_epoch) return true;", "if (c.first_epoch != 0) return true;"),
    ("free flag of the epoch before", CONTEXT, "word, epoch - 1,", "word, epoch - 2,"),
    ("E1: doorbell without release", NODES,
     "  fence_acq_rel_sys();\n  store_release_sys(pointer<u64>(c.wire.doorbells)", "  store_relaxed_sys(pointer<u64>(c.wire.doorbells)"),
    ("E1: doorbell for this device alone", NODES,
     "  fence_acq_rel_sys();\n  store_release_sys(pointer<u64>(c.wire.doorbells)", "  store_release_gpu(pointer<u64>(c.wire.doorbells)"),
    ("E1: row counted before the barrier", TO_NODES,
     "  block_barrier();\n  for (u32 link = thread_index(); link < l.targets; link += block_threads())\n    if ((nodes",
     "  for (u32 link = thread_index(); link < l.targets; link += block_threads())\n    if ((nodes"),
    ("doorbell before the last row", NODES, "!= rows_here + (chunk == 0 ? 1 : 0)) return;", "!= rows_here + (chunk == 0 ? 1 : 0) - (rows_here > 1)) return;"),
    ("empty message not sent", NODES, "  store(counter, 0u);\n", "  store(counter, 0u);\n  if (rows == 0 && l.row_bytes != 0) return;\n"),
    ("E6: relayed whatever the host says", NODES, "if (load_relaxed_sys(host) != expected) return false;", "if (load_relaxed_sys(host) == 0) return false;"),
    ("staging parity ignored", NODES, "l.staging + (epoch & 1) * l.staging_parity", "l.staging + 0 * l.staging_parity"),
    ("E10: staging packed before the network read it", NODES, "if (epoch - c.first_epoch < 2) return true;\n  const u64 *word = pointer<const u64>(c.wire.free)",
     "if (epoch != 0) return true;\n  const u64 *word = pointer<const u64>(c.wire.free)"),
    ("N9: row numbers read before they are there", TO_NODES, "failed |= !wait_tag(c, direction, packed_word", "failed |= false && !wait_tag(c, direction, packed_word"),
    ("forwarded before its chunk landed", TO_NODES, "epoch, j, chunk_of_row(l, row));", "epoch, j, 0);"),
    ("token number of the home lost", TO_NODES, "store(meta.tokens + row, load(pointer<const i32>(in.idx - 4 + row * in.idx_pitch)));",
     "store(meta.tokens + row, static_cast<i32>(row));"),
    ("node sum sent before all partial rows", FROM_NODES, "if (block_any(partials_fail(c, epoch, 1 + j, row, parts))) return false;", "block_barrier();"),
    ("weights forwarded before they landed", FROM_NODES, "thread_index() == 0 && !wait_landed(c, TY_DIRECTION_COMBINE, TY_LANE_WEIGHTS, epoch, j, 0);",
     "false && !wait_landed(c, TY_DIRECTION_COMBINE, TY_LANE_WEIGHTS, epoch, j, 0);"),
    ("home sum before its chunk landed", COMBINE, "chunk_of_row(l, static_cast<u32>(row)))", "0)"),
    ("a second thread looks at host memory", DISPATCH, "if (thread_index() == 0) relay_dispatch(a, turn.epoch);", "if (thread_index() < 2) relay_dispatch(a, turn.epoch);"),
    ("chunk flagged one shard early", COUNTER, "if now == self.full { Counted::Landed",
     "if now.count_ones() + 1 >= self.full.count_ones() { Counted::Landed"),
    ("parity ignored when counting", COUNTER, "let slot = (epoch & 1) as usize * self.sources",
     "let slot = 0 * self.sources"),
    ("staging free after the first completion", LINKS, "if under_way.whole && under_way.posts == 0 {",
     "if under_way.whole {"),
    ("full queue drops a shard", LINKS, "                Answer::Full => {\n",
     "                Answer::Full => {\n                    left &= !(1 << nic);\n"),
    ("first blocked link holds up the others", MACHINE, "        for _ in 0..self.blocked.len() {",
     "        for _ in 0..self.blocked.len().min(1) {"),
    ("wire inbox parity ignored", WIRE, "self.inbox(direction).at(epoch, source.index())",
     "self.inbox(direction).at(0, source.index())"),
    ("empty shard not posted", LINKS, "Some(write) => out.post(&write),",
     "Some(write) if write.bytes == 0 => Answer::Accepted,\n                Some(write) => out.post(&write),"),
    ("stale generation counted", MACHINE, "if context.generation() != imm.generation() {", "if false {"),
]


class Worker:
    """A copy of the tree with a build folder of its own."""

    def __init__(self, number):
        self.tree = PLACE / f"tree-{number}"
        self.target = PLACE / f"build-{number}"
        self.cargo = ["--no-default-features", "--target-dir", str(self.target)]
        if self.tree.exists():
            shutil.rmtree(self.tree)
        shutil.copytree(ROOT, self.tree, ignore=shutil.ignore_patterns("target", ".git", ".venv", ".gpu"))

    def run(self, command, limit):
        return subprocess.run(command, cwd=self.tree, env=QUICK, capture_output=True, text=True, timeout=limit)

    def build(self):
        return self.run(["cargo", "build", "-q", *self.cargo], 900)

    def checks(self, file=""):
        """What the suite runs against a mutant of a file, any file without one; the first that fails catches it."""
        program = str(self.target / "debug" / "tokenyard")
        test = ["cargo", "test", "-q", *self.cargo, "--test"]
        worlds = [
            ("schedules", [program, "verify", "--schedules", "80", "--timeout-ms", "4000"]),
            ("seeds", [program, "verify", "--seeds", "60", "--timeout-ms", "2000"]),
            ("tests/faults.rs", [*test, "faults"]),
        ]
        # The proxy has tests of its own, which are quicker than whole worlds.
        proxy = [("tests/proxy_machine.rs", [*test, "proxy_machine"])]
        return worlds + proxy if not file else proxy if file.startswith("proxy/") else worlds

    def caught_by(self, checks):
        """The name of the check that fails, with its last line, or None."""
        for name, command in checks:
            try:
                result = self.run(command, 300)
            except subprocess.TimeoutExpired:
                return name, "hung for 300 s"
            if result.returncode != 0:
                lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
                return name, (lines[-1] if lines else f"exit status {result.returncode}")
        return None

    def judge(self, mutant):
        """What became of a mutant: who caught it, None if nobody did, or why it does not count."""
        name, file, original, mutated = mutant
        path = self.tree / file
        text = path.read_text()
        path.write_text(text.replace(original, mutated))
        try:
            if (built := self.build()).returncode != 0:
                return "", f"does not compile: {built.stderr}"
            return self.caught_by(self.checks(file))
        finally:
            path.write_text(text)


def check_texts():
    """Refuses a table whose texts do not each stand once in their file."""
    for name, file, original, _ in MUTANTS:
        found = (ROOT / file).read_text().count(original)
        if found != 1:
            sys.exit(f"mutant «{name}»: its original text stands {found} times in {file}")


def prepare():
    """Builds the tree in as many places, and demands that the suite passes without any mutant."""
    first = Worker(0)
    if (unmutated := first.build()).returncode != 0:
        sys.exit("the tree does not build: " + unmutated.stderr)
    if (false_alarm := first.caught_by(first.checks())) is not None:
        sys.exit(f"the suite fails without any mutant: {false_alarm}")
    return [first] + [Worker(number) for number in range(1, WORKERS)]


def main():
    check_texts()
    waiting = queue.SimpleQueue()
    for mutant in MUTANTS:
        if not sys.argv[1:] or mutant[0] in sys.argv[1:]:
            waiting.put(mutant)
    total, missed = waiting.qsize(), []

    def work(worker):
        while True:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            start = time.time()
            result = worker.judge(mutant)
            verdict = "SURVIVED" if result is None else f"caught by {result[0]}" if result[0] else result[1]
            if result is None or not result[0]:
                missed.append(mutant[0])
            print(f"{mutant[0]:50} {verdict:32} {time.time() - start:5.1f} s", flush=True)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in prepare()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{total - len(missed)} of {total} mutants caught")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
