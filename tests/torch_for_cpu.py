#!/usr/bin/env python3
"""Installs torch from PyPI without the CUDA libraries that it needs a GPU for, which are four fifths of its size.

PyPI's torch for Linux is linked with cuBLAS, cuDNN, NCCL and others, and loads them as it is imported, but calls none of
them on a machine without a GPU. This installs torch alone, takes those libraries off the list of what it requires, and
puts an empty library in the place of each that then cannot be found. It installs the rest as ever: what runs without a
GPU, such as the CUDA runtime, which says that there is none.

Runs in the environment that torch is for: PYTHON tests/torch_for_cpu.py REQUIREMENT [--without PACKAGE ...]. An
environment that has torch already keeps it, where it satisfies the requirement. Exit status 0 if torch then works.
"""

import argparse
import importlib.metadata
import pathlib
import re
import subprocess
import sys

# What torch calls where there is no GPU, of the packages with CUDA libraries: the runtime, and the profiler's interface.
CALLED = {"nvidia-cuda-runtime", "nvidia-cuda-cupti"}
# The same, of the parts that the package cuda-toolkit stands for.
CALLED_PARTS = {"cudart", "cupti"}
# Loaded by libtorch_python.so, or as something is called that torch may need without a GPU.
ENTRANCES = ("libtorch_python.so", "libtorch_cuda_linalg.so")


def pip(*arguments):
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def install(*requirements):
    if requirements:
        pip("install", "-q", "--no-compile", "--disable-pip-version-check", *requirements)


def without_libraries(requirement, without):
    """A requirement of torch's, with the CUDA libraries among its extras left out; None if all of it is left out."""
    name = re.match(r"[\w.-]+", requirement).group().lower()
    if name in without:
        return None
    if name.startswith("nvidia-"):
        return requirement if re.sub(r"-cu\d+$", "", name) in CALLED else None
    if name != "cuda-toolkit":
        return requirement
    parts = re.search(r"\[([\w,-]+)\]", requirement)
    called = ",".join(part for part in parts[1].split(",") if part in CALLED_PARTS) if parts else ""
    return re.sub(r"\[[\w,-]+\]", f"[{called}]", requirement) if called else None


def leave_out(without):
    """Takes what torch calls with a GPU alone off its requirements, so that pip installs it for no other package."""
    distribution = importlib.metadata.distribution("torch")
    metadata = next(pathlib.Path(file.locate()) for file in distribution.files if file.match("*.dist-info/METADATA"))
    lines = []
    for line in metadata.read_text().splitlines(keepends=True):
        key, _, requirement = line.partition(": ")
        if key == "Requires-Dist":
            kept = without_libraries(requirement, without)
            line = f"{key}: {kept}" if kept else ""
        lines.append(line)
    metadata.write_text("".join(lines))
    return pathlib.Path(distribution.locate_file("torch")) / "lib"


def looked_at(folder):
    """What the loader says of torch's libraries, all symbols included."""
    said = [subprocess.run(["ldd", "-r", folder / name], check=False, capture_output=True, text=True) for name in ENTRANCES]
    return "".join(result.stdout + result.stderr for result in said)


def library(path, text, *options):
    compiler = ["g++", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path, "-x", "c", "-", "-x", "none", *options]
    subprocess.run(compiler, check=True, input=text, text=True)


def put_empty_libraries(folder):
    """Puts an empty library in the place of each that torch loads and that is not there, and one behind them with all
    their functions, as some have their addresses taken. Each returns 1, an error in all these libraries."""
    missing = sorted(set(re.findall(r"(\S+) => not found", looked_at(folder))))
    if not missing:
        return
    # A library that states no versions must not have the symbols that are wanted of it by version; another may.
    functions = folder / "libtorch_for_cpu.so"
    library(functions, "")
    for name in missing:
        library(folder / name, "", "-Wl,--no-as-needed", f"-Wl,-rpath,{folder}", functions)
    # Those of Python are the interpreter's.
    wanted = sorted(set(re.findall(r"undefined symbol: (\w+)", looked_at(folder))))
    library(functions, "".join(f"int {name}(void) {{ return 1; }}\n" for name in wanted if not re.match("_?Py", name)))


WORKS = """
import torch
assert not torch.cuda.is_available()
assert torch.allclose(torch.ones(8, 8) @ torch.linalg.inv(torch.eye(8) * 2), torch.full((8, 8), 0.5))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirement")
    parser.add_argument("--without", action="append", default=[])
    options = parser.parse_args()
    pip("install", "-q", "--no-compile", "--disable-pip-version-check", "--no-deps", options.requirement)
    folder = leave_out(options.without)
    install(options.requirement)
    put_empty_libraries(folder)
    if subprocess.run([sys.executable, "-c", WORKS], check=False).returncode != 0:
        sys.exit(f"{options.requirement} does not work without its CUDA libraries: install it with them")


if __name__ == "__main__":
    main()
