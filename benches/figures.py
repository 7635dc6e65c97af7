"""Results of `tokenyard bench` as text: lines for the table of tests/gpu.sh.

    python3 benches/figures.py lines FILE.json    a line for each result of a file

Nothing but the standard library.
"""

import json
import sys

# Calls of so many tokens at the most are decode steps, whose p99 should stay near their p50.
DECODE_TOKENS = 128
STEADY = 1.3


def results_of(path):
    """The results of a file: one, or those of a sweep."""
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    return found.get("results", [found])


def ratio(us, floor):
    """How many times its floor something took."""
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


def main():
    arguments = sys.argv[1:]
    if len(arguments) == 2 and arguments[0] == "lines":
        for result in results_of(arguments[1]):
            print(line(result))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
