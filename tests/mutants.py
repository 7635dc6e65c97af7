#!/usr/bin/env python3
"""Plants one-line bugs in the kernels, one at a time, and demands that the suite catches each.

A mutant is a named (file, original text, mutated text). The text must occur exactly once, so that a mutant cannot rot
in silence. Works on a copy of the tree under target/mutants. Prints a table; exit status 0 only if all were caught.
Arguments: names of mutants to run alone.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
COPY = ROOT / "target" / "mutants" / "tree"
TARGET = ROOT / "target" / "mutants" / "build"
SEND, RECEIVE = "kernels/dispatch_send.cuh", "kernels/dispatch_receive.cuh"
COMBINE, CONTEXT, DISPATCH, BARRIER = (
    "kernels/combine.cuh", "kernels/context.cuh", "kernels/dispatch.cuh", "kernels/barrier.cuh")
COUNTER, LINKS, MACHINE, WIRE = "proxy/counter.rs", "proxy/machine/links.rs", "proxy/machine.rs", "proxy/wire.rs"

# Rust and C++ without optimisation or debug information: most of the time goes into building.
QUICK = os.environ | {"CARGO_PROFILE_DEV_OPT_LEVEL": "0", "CARGO_PROFILE_DEV_DEBUG": "0",
                      "TOKENYARD_MACHINE_SEEDS": "400"}
CARGO = ["--no-default-features", "--target-dir", str(TARGET)]

# What the suite runs against a mutant; the first that fails catches it.
PROGRAM = str(TARGET / "debug" / "tokenyard")
CHECKS = [
    ("schedules", [PROGRAM, "verify", "--schedules", "80", "--timeout-ms", "4000"]),
    ("seeds", [PROGRAM, "verify", "--seeds", "60", "--timeout-ms", "2000"]),
    ("tests/faults.rs", ["cargo", "test", "-q", *CARGO, "--test", "faults"]),
]
# And against one of the proxy, which no kernel uses yet.
PROXY_CHECKS = [("tests/proxy_machine.rs", ["cargo", "test", "-q", *CARGO, "--test", "proxy_machine"])]

MUTANTS = [
    ("row tag without release", SEND,
     "store_release_sys(in_arena<u64>(c, rank, c.regions.row_tags",
     "store_relaxed_sys(in_arena<u64>(c, rank, c.regions.row_tags"),
    ("row tag before the other threads' stores", SEND,
     "  block_barrier();\n  // E7: as in publish_meta;", "  // E7: as in publish_meta;"),
    ("row tag raised in the wrong slot", SEND, "c.rank) + token, epoch);", "c.rank) + token / 2, epoch);"),
    ("META flag without release", SEND,
     "store_release_sys(in_arena<u64>(c, destination, c.regions.meta_flags",
     "store_relaxed_sys(in_arena<u64>(c, destination, c.regions.meta_flags"),
    ("META flag released to this rank alone", SEND,
     "store_release_sys(in_arena<u64>(c, destination, c.regions.meta_flags",
     "store_release_gpu(in_arena<u64>(c, destination, c.regions.meta_flags"),
    ("no barrier between marking and counting", SEND,
     "count, words);\n    block_barrier();\n    write_tile", "count, words);\n    write_tile"),
    ("a rank without tokens raises no flag", SEND,
     "  TokenCount input = token_count(a);\n  u32 experts_there",
     "  TokenCount input = token_count(a);\n  if (input.tokens == 0) return;\n  u32 experts_there"),
    ("off by one in a position", SEND, "((1u << (token % 32)) - 1)", "((2u << (token % 32)) - 1)"),
    ("duplicate expert not seen", SEND, "for (u32 j = 0; j < k; ++j)", "for (u32 j = 1; j < k; ++j)"),
    ("home slot counted from the wrong rank", SEND, "((1ull << destination) - 1)", "((2ull << destination) - 1)"),
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
    ("partial row tag without release", COMBINE,
     "store_release_sys(in_arena<u64>(c, home, c.regions.partial_tags", "store_relaxed_sys(in_arena<u64>(c, home, c.regions.partial_tags"),
    ("partial row tag before the row", COMBINE,
     "  block_barrier();\n  // E7: the row happens", "  // E7: the row happens"),
    ("combine flag before the weights", COMBINE,
     "    block_barrier();\n    // E7: the weights happen", "    // E7: the weights happen"),
    ("partial rows not waited for", COMBINE, "failed |= !wait_tag(c, TY_DIRECTION_COMBINE", "failed |= false && !wait_tag(c, TY_DIRECTION_COMBINE"),
    ("weight of the wrong choice", COMBINE, "float weight = load(weights + k);", "float weight = load(weights + c.top_k - 1 - k);"),
    ("a missing choice summed", COMBINE, "    if (row < 0) continue;\n", "    if (row < 0) row = 0;\n"),
    ("old value forgotten when accumulating", COMBINE, "add_rn(old.v[i], sum.v[i])", "add_rn(0.0f, sum.v[i])"),
    ("incomplete rank's row added", COMBINE, "if (load(&shared.incomplete[lowest_bit(left)])) continue;\n", ""),
    ("barrier lets go early", BARRIER, "u64 number = load(&state->barriers) + 1;", "u64 number = load(&state->barriers) + 1 - (c.rank == 0);"),
    ("handle marked received by send", DISPATCH, "if (!(a.phases & TY_PHASE_RECEIVE)) return;", "if (false) return;"),
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


def run(command, limit):
    return subprocess.run(command, cwd=COPY, env=QUICK, capture_output=True, text=True, timeout=limit)


def build():
    return run(["cargo", "build", "-q", *CARGO], 900)


def caught_by(checks):
    """The name of the check that fails, with its last line, or None."""
    for name, command in checks:
        try:
            result = run(command, 300)
        except subprocess.TimeoutExpired:
            return name, "hung for 300 s"
        if result.returncode != 0:
            lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
            return name, (lines[-1] if lines else f"exit status {result.returncode}")
    return None


def main():
    wanted = sys.argv[1:]
    if COPY.exists():
        shutil.rmtree(COPY)
    shutil.copytree(ROOT, COPY, ignore=shutil.ignore_patterns("target", ".git", ".venv"))
    if (unmutated := build()).returncode != 0:
        sys.exit("the tree does not build: " + unmutated.stderr)
    if (false_alarm := caught_by(CHECKS + PROXY_CHECKS)) is not None:
        sys.exit(f"the suite fails without any mutant: {false_alarm}")
    rows, survivors = [], 0
    for name, file, original, mutated in MUTANTS:
        if wanted and name not in wanted:
            continue
        path = COPY / file
        text = path.read_text()
        if text.count(original) != 1:
            sys.exit(f"mutant «{name}»: its original text stands {text.count(original)} times in {file}")
        path.write_text(text.replace(original, mutated))
        start = time.time()
        if (built := build()).returncode != 0:
            sys.exit(f"mutant «{name}» does not compile: {built.stderr}")
        result = caught_by(PROXY_CHECKS if file.startswith("proxy/") else CHECKS)
        path.write_text(text)
        survivors += result is None
        rows.append((name, f"caught by {result[0]}" if result else "SURVIVED", time.time() - start))
        print(f"{rows[-1][0]:50} {rows[-1][1]:32} {rows[-1][2]:5.1f} s", flush=True)
    print(f"{len(rows) - survivors} of {len(rows)} mutants caught")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
