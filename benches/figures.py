"""Results of `tokenyard bench` as text: lines for the table of tests/gpu.sh, and the tables of README.md (headlines) and
docs/figures.md (every result that is kept).

    python3 benches/figures.py lines FILE.json    a line for each result of a file
    python3 benches/figures.py merge TO FROM...   results of several files in one
    python3 benches/figures.py readme             renews both tables from benches/results/*/*.json
    python3 benches/figures.py readme --check     status 1 if one of the two tables differs from the results

Nothing but the standard library.
"""

import json
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "benches", "results")
BEGIN = "<!-- Made by `python3 benches/figures.py readme` from benches/results/*/*.json: do not edit. -->\n"
END = "<!-- End of what benches/figures.py made. -->\n"

# Results that README.md shows: runs and their tokens.
HEADLINES = [
    ("h100-x2/decode-2", (1, 128)),
    ("h100-x2/prefill-2", (4096,)),
    ("h200-x2/decode-2", (1, 128)),
    ("h200-x2/prefill-2", (4096,)),
    ("h200-x4/decode-4", (1, 128)),
    ("h200-x4/prefill-4", (4096,)),
    ("h100-x2/decode-2x1-cx7", (1, 128)),
    ("h200-x2/decode-2x1-cx7", (1, 128)),
    ("h200-x2/prefill-1x2-cx7", (4096,)),
    ("h200-x4/decode-2x2-cx7", (1, 128)),
    ("h200-x4/decode-4x1-cx7", (1, 128)),
]

# Calls of at most so many tokens are decode steps, whose p99 should stay close to their p50.
DECODE_TOKENS = 128
STEADY = 1.3


def results_of(path):
    """The results of a file: one, or those of a sweep."""
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    return found.get("results", [found])


def ratio(us, floor):
    """A time as a multiple of its floor."""
    return f"{us / floor:.1f}" if floor > 0 else "–"


def micros(us):
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def floor_of(us):
    return micros(us) if us > 0 else "–"


def steadiness(times, tokens):
    """A word on the p99 of a decode step; nothing for larger calls."""
    if tokens > DECODE_TOKENS:
        return ""
    return " steady" if times["p99"] <= STEADY * times["p50"] else " UNSTEADY"


def line(result):
    """One result in a line."""

    def way(name):
        times, floor = result[f"{name}_us"], result["floor_us"][name]
        p99 = f"p99 {micros(times['p99'])}{steadiness(times, result['tokens'])}"
        return f"{name} {micros(times['p50'])} ({p99}, floor {floor_of(floor)}, x {ratio(times['p50'], floor)})"

    return f"T={result['tokens']}: {way('dispatch')}  {way('combine')}"


def gpus(result):
    """Number and kind of GPUs, and their nodes."""
    world, per_node = result["world"], result["ranks_per_node"]
    shared = result.get("ranks_per_gpu")
    text = f"{world} ranks, {shared} a {result['device_name']}" if shared else f"{world} × {result['device_name']}"
    return text if per_node == world else f"{text}, nodes of {per_node}"


def kept():
    """Path and result of all kept GPU results, in order, except those for performance.md: bare copies, runs in which the
    device recorded its stages, ranks that share GPUs, and one call with increasing numbers of SMs; and except calls whose
    counts come first, and calls by earlier handles, which have tables of their own."""
    return [(name, result) for name, result in verified() if not any(field in result for field in SPECIAL)]


# Fields of results with a table of their own.
SPECIAL = ("stages_us", "rows", "ranks_per_gpu", "counts_us", "again_us")


def verified():
    """Path and result of all kept GPU results of the program, in order."""
    found = []
    for folder in sorted(os.listdir(RESULTS)):
        place = os.path.join(RESULTS, folder)
        names = sorted(os.listdir(place)) if os.path.isdir(place) else []
        for name in (name for name in names if name.endswith(".json") and not name.startswith(("sms-", "python-cost", "host-cost", "compare-"))):
            for result in results_of(os.path.join(place, name)):
                if "rows" in result:
                    continue
                if not result["verified"]:
                    sys.exit(f"{place}/{name} was not verified; keep only results that are right")
                found.append((f"{folder}/{name.removesuffix('.json')}", result))
    return found


def headlines():
    """Path and result of each row of README.md, in its order."""
    found = {(name, result["tokens"]): result for name, result in kept()}
    for key in ((name, tokens) for name, all_tokens in HEADLINES for tokens in all_tokens):
        if key not in found:
            sys.exit(f"{key[0]} of {key[1]} tokens is not kept; take it out of HEADLINES in benches/figures.py")
        yield key[0], found[key]


def table(results):
    rows = [
        "| run | GPUs | tokens | dispatch | floor | × | combine | floor | × | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results:
        cells = [name, gpus(result), str(result["tokens"])]
        for way in ("dispatch", "combine"):
            times, floor = result[f"{way}_us"], result["floor_us"][way]
            cells += [f"{micros(times['p50'])} ({micros(times['p99'])})", floor_of(floor), ratio(times["p50"], floor)]
        cells.append(result["commit"][:7])
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def of_counts(result):
    """The cells of a result whose counts come first."""
    counts, flag = result["counts_us"]["p50"], result["flag_us"]["p50"]
    return [micros(counts), micros(flag), micros(counts - flag)]


def of_again(result):
    """The cells of a result with dispatches by earlier handles."""
    fresh, again = result["dispatch_us"]["p50"], result["again_us"]["p50"]
    return [micros(fresh), micros(again), f"{again / fresh:.2f}"]


def special(field, title, heads, cells):
    """A table of the results that have a field."""
    rows = [f"| run | GPUs | tokens | {' | '.join(heads)} | commit |", "|---" * (len(heads) + 4) + "|"]
    for name, result in verified():
        if field in result:
            all_cells = [name, gpus(result), str(result["tokens"]), *cells(result), result["commit"][:7]]
            rows.append("| " + " | ".join(all_cells) + " |")
    return f"{title}\n\n" + "\n".join(rows) + "\n"


def figures():
    """The tables of docs/figures.md."""
    counts = "Counts first: from before the launch until the host has them, and the same of a kernel that raises a flag."
    again = "Again: a dispatch, and one by its handle in the same run."
    return "\n".join(
        [
            table(kept()),
            special("counts_us", counts, ["counts", "flag", "difference"], of_counts),
            special("again_us", again, ["dispatch", "again", "ratio"], of_again),
        ]
    )


# What makes each file's tables.
TABLES = {"README.md": lambda: table(headlines()), "docs/figures.md": figures}


def renewed(file, text):
    """The file's text with a new table."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{file} lacks its markers; put back these lines:\n{BEGIN}{END}")
    return before + BEGIN + "\n" + TABLES[file]() + "\n" + END + after


def merge(to, files):
    """Results of several files, in one."""
    results = [result for file in files for result in results_of(file)]
    with open(to, "w", encoding="utf-8") as file:
        file.write('{"results": [\n' + ",\n".join(map(json.dumps, results)) + "\n]}\n")


def readme(check):
    for name in TABLES:
        path = os.path.join(ROOT, name)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        wanted = renewed(name, text)
        if text == wanted:
            continue
        if check:
            sys.exit(f"{name} is not in step with benches/results; run python3 benches/figures.py readme")
        with open(path, "w", encoding="utf-8") as file:
            file.write(wanted)


def main():
    arguments = sys.argv[1:]
    if len(arguments) == 2 and arguments[0] == "lines":
        for result in results_of(arguments[1]):
            print(line(result))
    elif len(arguments) > 2 and arguments[0] == "merge":
        merge(arguments[1], arguments[2:])
    elif arguments in (["readme"], ["readme", "--check"]):
        readme(check=len(arguments) == 2)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
