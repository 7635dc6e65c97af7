#!/usr/bin/env python3
"""Where the host's time of calls through the Python package goes: samples of call stacks, as microseconds by function.

    python3 benches/python_stacks.py [--calls 16000] [--tokens 128] [--least 0.1] [--device cpu]

The calls are those of benches/python_cost.py, one rank, in a row as there; benches/stacks.c takes the samples. A function's
figure has those that it calls in it. Functions of the package's extension module have names where it was built with them:
`strip = false` in pyproject.toml (maturin), and addr2line.
"""

import argparse
import collections
import ctypes
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import python_cost

PERIOD_US = 100
CALLS = ("deep_ep LL dispatch", "deep_ep LL combine", "its function", "combine's function", "into's function", "an empty launch")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=python_cost.positive, default=16000)
    parser.add_argument("--tokens", type=python_cost.positive, default=128)
    parser.add_argument("--least", type=float, default=0.1, help="microseconds of functions that are printed")
    parser.add_argument("--device", default="cuda:0", choices=["cuda:0", "cpu"], help="cpu: to try the script itself")
    return parser.parse_args()


def sample(args, stacks, path):
    """Writes the samples. Returns each call's median, in microseconds."""
    times = collections.defaultdict(list)

    def work(world):
        with python_cost.torch.cuda.stream(python_cost.torch.cuda.Stream(0) if args.device != "cpu" else None):
            rank = python_cost.Rank(world, args)
            groups = [group for group in rank.calls() if any(name in CALLS for name in group)]
            if stacks.stacks_start(PERIOD_US) != 0:
                sys.exit("python_stacks.py: no memory or no thread for samples")
            for burst in range(args.calls // python_cost.BURST + 3):
                for group in groups:
                    rank.wait()
                    for _ in range(python_cost.BURST):
                        found = None
                        for name, call in group.items():
                            stacks.stacks_of(CALLS.index(name) + 1 if burst >= 3 and name in CALLS else 0)
                            begin = time.perf_counter_ns()
                            found = call(found)
                            times[name].append(time.perf_counter_ns() - begin)
                            stacks.stacks_of(0)
            rank.wait()
            if stacks.stacks_write(str(path).encode()) < 0:
                sys.exit(f"python_stacks.py: {path} cannot be written")

    python_cost.in_threads(1, work)
    return {name: python_cost.quantiles(times[name])["p50"] for name in CALLS if name in times}


def names_of(frames):
    """What functions of the extension module are called, by their frames."""
    module = python_cost.tokenyard._native.__file__
    offsets = sorted({frame.rsplit("+", 1)[1] for frame in frames if frame.startswith("_native")})
    if not offsets or shutil.which("addr2line") is None:
        return {}
    command = ["addr2line", "-f", "-C", "-e", module, *(f"0x{offset}" for offset in offsets)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = zip(offsets, lines[::2])
    return {offset: re.sub(r"::h[0-9a-f]{16}$", "", name) for offset, name in found if name != "??"}


def main():
    args = arguments()
    source = pathlib.Path(__file__).with_name("stacks.c")
    with tempfile.TemporaryDirectory() as folder:
        library, path = pathlib.Path(folder, "stacks.so"), pathlib.Path(folder, "samples.txt")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-lpthread", "-ldl"], check=True)
        medians = sample(args, ctypes.CDLL(str(library)), path)
        samples = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    names = names_of({frame for _, *frames in samples for frame in frames})

    def shown(frame):
        head, offset = frame.rsplit("+", 1)
        library, function = head.split(":", 1)
        # What is not exported goes by where it lies, to 256 bytes.
        return f"{library} {names.get(offset) or (function if function != '?' else f'at {offset[:-2]}00')}"

    for number, name in enumerate(CALLS, 1):
        stacks = [frames for call, *frames in samples if int(call) == number]
        if name not in medians or not stacks:
            continue
        counts = collections.Counter(function for frames in stacks for function in {shown(frame) for frame in frames})
        print(f"{name}: {medians[name]:.1f} us (p50), {len(stacks)} samples")
        for function, count in counts.most_common():
            share = medians[name] * count / len(stacks)
            if share >= args.least:
                print(f"  {share:6.2f}  {function}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
