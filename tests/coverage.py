"""Adds up the lines of the crate that tests reached: coverage.py LCOV LEAST. Exit status 1 below LEAST percent.

Counted is what runs without a GPU, without tests: of each file the lines before its test module.
"""

import fnmatch
import os
import sys

FOLDERS = ("bindings", "kernels", "proxy", "transport")
LEFT_OUT = ("kernels/ffi/*", "transport/network/*_sys/fabric.rs", "transport/network/*_sys/verbs.rs",
            "bindings/cli/commands/doctor/gpu.rs", "kernels/device/cuda*.rs", "kernels/base/cuda.rs",
            "transport/memory/cuda.rs", "*tests.rs", "*/tests/*")


def is_counted(path):
    return path.split("/")[0] in FOLDERS and not any(fnmatch.fnmatch(path, pattern) for pattern in LEFT_OUT)


def test_module(path):
    """The first line that is of tests alone."""
    with open(path, encoding="utf-8") as lines:
        begin = 0
        for number, line in enumerate(lines, 1):
            if line.startswith("#[cfg(test)]"):
                begin = number
            elif begin and not line.startswith("#["):
                # What else is for tests alone, or in another file, has code behind it.
                if "mod " in line and line.rstrip().endswith("{"):
                    return begin
                begin = 0
    return sys.maxsize


def reached(lcov):
    """By file, by line: whether some program ran it."""
    files = {}
    counted, end = None, 0
    with open(lcov, encoding="utf-8") as records:
        for record in records:
            kind, _, value = record.strip().partition(":")
            if kind == "SF":
                path = os.path.relpath(value)
                counted = files.setdefault(path, {}) if is_counted(path) else None
                end = test_module(path) if counted is not None else 0
            elif kind == "DA" and counted is not None:
                line, count = map(int, value.split(",")[:2])
                if line < end:
                    counted[line] = counted.get(line, False) or count > 0
    return files


def main():
    lcov, least = sys.argv[1], float(sys.argv[2])
    files = reached(lcov)
    for path, lines in sorted(files.items()):
        print(f"{path}: {sum(lines.values())}/{len(lines)}")
    hits, lines = (sum(f(file) for file in files.values()) for f in (lambda file: sum(file.values()), len))
    percent = 100 * hits / max(lines, 1)
    print(f"{percent:.2f}% of {lines} lines, {least:g}% demanded")
    sys.exit(0 if percent >= least else 1)


main()
