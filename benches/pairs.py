"""Compares two builds that `tests/gpu.sh pair` ran alternately: a table of p50s, and of the GPU kernels' registers.

    python3 benches/pairs.py FOLDER ALTERNATIONS ROW[,ROW...] [PTXAS_A PTXAS_B]

FOLDER has ROW.K.BUILD.json of `tokenyard bench`: K counts alternations from 1, and BUILD is a, b, or e for the equal
pair, which is build A run a second time in each alternation. Exit status 0 only if every verdict is "within" or
"faster" and no kernel of B takes more registers or spills more.

Nothing but the standard library.
"""

import itertools
import json
import os
import random
import statistics
import sys

BUILDS = ("a", "b", "e")
WAYS = ("dispatch", "combine")
# Largest slowdown of a call inside a node, in parts of A's median.
BOUND = 0.01
# All ways to deal the runs of the equal pair into two halves are tried up to this number, else this many random ones.
MOST_DEALS = 5000
# The part of the deals that the spread covers.
COVERED = 0.95
HEADER = ("row", "tokens", "way", "A", "B", "B/A", "A'/A", "spread", "bound", "verdict")


def read(folder, row, alternations):
    """{build: {alternation: results}} of a row's files; missing and incomplete files are left out."""
    runs = {build: {} for build in BUILDS}
    for build, k in itertools.product(BUILDS, range(1, alternations + 1)):
        try:
            with open(os.path.join(folder, f"{row}.{k}.{build}.json"), encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            continue
        runs[build][k] = found.get("results", [found])
    return runs


def spread(runs):
    """By how much the medians of two halves of these runs differ, in parts of the median of all: 95 % of the ways to
    deal the runs give no more. Medians that differ by no more than this may be of the same build."""
    half = len(runs) // 2
    every = list(itertools.islice(itertools.combinations(range(len(runs)), half), MOST_DEALS + 1))
    if len(every) > MOST_DEALS:
        draw = random.Random(1)
        every = [tuple(sorted(draw.sample(range(len(runs)), half))) for _ in range(MOST_DEALS)]
    differences = []
    for deal in every:
        taken = set(deal)
        one = statistics.median(runs[at] for at in deal)
        other = statistics.median(run for at, run in enumerate(runs) if at not in taken)
        differences.append(abs(one - other))
    differences.sort()
    return differences[min(int(COVERED * len(differences)), len(differences) - 1)] / statistics.median(runs)


def verdict(change, noise, is_nodes):
    """A word on B's change against A, and the bound that decides: 1 %, between nodes the equal pair's spread."""
    bound = noise if is_nodes else BOUND
    if abs(change) <= bound:
        return bound, "within"
    if abs(change) <= noise:
        # Two runs of one build differ as much: it takes more alternations, or a quieter machine.
        return bound, "UNCLEAR"
    return bound, "faster" if change < 0 else "SLOWER"


def percent(part):
    return f"{100 * part:+.1f} %"


def lines_of(name, row, alternations):
    """The table's lines of one row: one for each number of tokens and way."""
    if any(len(row[build]) < alternations for build in BUILDS):
        counts = ", ".join(f"{len(row[build])} of {word}" for build, word in zip(BUILDS, ("A", "B", "A'")))
        blank = [""] * (len(HEADER) - 2)
        return [(name, *blank, f"FAILED: of {alternations} runs there are {counts}")]
    runs = {build: [row[build][k] for k in range(1, alternations + 1)] for build in BUILDS}
    lines = []
    for at, first in enumerate(runs["a"][0]):
        wrong = [f"{build}{k + 1}" for build in BUILDS for k, run in enumerate(runs[build]) if not run[at]["verified"]]
        for way in WAYS:
            p50 = {build: [run[at][f"{way}_us"]["p50"] for run in runs[build]] for build in BUILDS}
            a, b, again = (statistics.median(p50[build]) for build in BUILDS)
            noise = spread(p50["a"] + p50["e"])
            bound, word = verdict(b / a - 1, noise, first["ranks_per_node"] != first["world"])
            if wrong:
                word = f"FAILED: results of {', '.join(wrong)} are not right"
            medians = (f"{a:.2f}", f"{b:.2f}", percent(b / a - 1), percent(again / a - 1))
            cells = (name, str(first["tokens"]), way, *medians)
            lines.append((*cells, f"{100 * noise:.1f} %", f"{100 * bound:.1f} %", word))
    return lines


def read_ptxas(path):
    """{(kernel, architecture): (registers, stack, spilled stores, spilled loads)} from a ptxas.txt of build.rs. Older builds
    name their specialised kernels ty_*_plain*, and have the same code for sm_90a as later ones for sm_90."""
    found = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            words = line.split()
            if len(words) == 6 and words[2].isdigit():
                kernel, arch = words[0].replace("_plain", "_specialised"), words[1].removesuffix("a")
                found[(kernel, arch)] = tuple(int(word) for word in words[2:])
    return found


def compare_ptxas(path_a, path_b):
    """Lines on the kernels of two builds, and whether none of B's takes more registers or spills more than A's."""
    lacking = [path for path in (path_a, path_b) if not os.path.exists(path)]
    if lacking:
        return [f"registers are not compared: there is no {' and no '.join(lacking)}"], False
    a, b = read_ptxas(path_a), read_ptxas(path_b)
    both = sorted(set(a) & set(b))
    if not both:
        return ["registers are not compared: the builds have no kernel in common"], False
    lines, good = [], True
    for key in both:
        if a[key] == b[key]:
            continue
        worse = b[key][0] > a[key][0] or b[key][2] > a[key][2] or b[key][3] > a[key][3]
        good = good and not worse
        lines.append(f"{key[0]} {key[1]}: {registers(a[key])} -> {registers(b[key])}{' WORSE' if worse else ''}")
    for word, one, other in (("A", a, b), ("B", b, a)):
        alone = sorted(set(one) - set(other))
        lines += [f"{kernel} {arch}: in {word} alone, {registers(one[kernel, arch])}" for kernel, arch in alone]
    alike = sum(a[key] == b[key] for key in both)
    most = [max(found[0] for found in build.values()) for build in (a, b)]
    lines.append(f"{alike} of {len(both)} kernels of both builds are alike; the most registers: {most[0]} -> {most[1]}")
    return lines, good


def registers(found):
    taken, stack, stores, loads = found
    return f"{taken} registers, {stack} bytes of stack, {stores} + {loads} spilled"


def main():
    arguments = sys.argv[1:]
    if len(arguments) not in (3, 5) or not arguments[1].isdigit() or int(arguments[1]) == 0:
        sys.exit(__doc__)
    folder, alternations, names = arguments[0], int(arguments[1]), arguments[2].split(",")
    lines = [line for name in names for line in lines_of(name, read(folder, name, alternations), alternations)]
    widths = [max(len(line[at]) for line in [HEADER, *lines]) for at in range(len(HEADER) - 1)]
    for line in [HEADER, *lines]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, [*widths, 0])).rstrip())
    good = all(line[-1] in ("within", "faster") for line in lines)
    if len(arguments) == 5:
        notes, alike = compare_ptxas(*arguments[3:])
        print("\n" + "\n".join(notes))
        good = good and alike
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
