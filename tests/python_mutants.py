#!/usr/bin/env python3
"""Plants one-line bugs in the Python package, one at a time, and demands that its tests catch each.

A mutant is a named (file, original text, mutated text, tests). The text must occur exactly once, so that a mutant cannot
rot in silence. Needs an interpreter in which the package and pytest are installed (--python, .venv-python by default).
Files of Python are changed in a copy of the installed package; for those of Rust the extension module is built again,
which needs cargo. Prints a table; exit status 0 only if all were caught. Arguments: names of mutants to run alone; or
--one-in N for every Nth one, from a first that the table decides; or --check, which only looks at the table.
"""

import argparse
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLACE = ROOT / "target" / "python-mutants"
PACKAGE, NATIVE = "bindings/python/tokenyard", "bindings/python/src"
CALLS, OPS, TOP = f"{PACKAGE}/_calls.py", f"{PACKAGE}/ops.py", f"{PACKAGE}/__init__.py"
BUFFER, CONTEXTS, CONFIG = (f"{PACKAGE}/deep_ep/{name}.py" for name in ("_buffer", "_contexts", "_config"))
ARRAYS, ARGUMENTS, CONTEXT = (f"{NATIVE}/{name}.rs" for name in ("arrays", "calls", "context"))
BENCH = f"{PACKAGE}/bench.py"
# Tests that are to notice.
DEEP_EP, OPERATORS, PLAIN = "test_deep_ep.py", "test_ops.py", "test_calls.py test_torch.py"

MUTANTS = [
    ("counts not rounded up", BUFFER, "[-(-rows // alignment) * alignment for rows in experts]", "list(experts)", DEEP_EP),
    ("the mask inverted", BUFFER, "(self._mask() != 0)", "(self._mask() == 0)", DEEP_EP),
    ("weights squared on their way back", BUFFER, "words = topk_weights.contiguous()", "words = topk_weights.square()", DEEP_EP),
    ("the second bias forgotten", BUFFER, "biases[0].float() + biases[1].float()", "biases[0].float()", DEEP_EP),
    ("a rank with more tokens not noticed", BUFFER, "if experts.pop() == 0:", "if experts.pop() >= 0:", DEEP_EP),
    ("scales taken for row-major", BUFFER, "column_major=self.words is not None", "column_major=False", DEEP_EP),
    ("exponents of the wrong block", BUFFER, "device=self.words.device) % 32", "device=self.words.device) % 16", DEEP_EP),
    ("experts of other ranks named", BUFFER, "got.token_experts[:, : self.choices].long()",
     "got.token_experts[:, : self.choices].long().abs()", DEEP_EP),
    ("a handle returned early", BUFFER, "    if kept is None:\n", "    if kept is handle:\n", DEEP_EP),
    ("too few rows for all ranks taken", BUFFER, "tokens = -(-rows // self.ranks)", "tokens = rows", DEEP_EP),
    ("tokens of no rank counted", BUFFER, "torch.where(used, topk_idx, num_experts).long()", "topk_idx.abs().long()", DEEP_EP),
    ("no new context for fp32 rows", CONTEXTS, " and self.fp32 >= other.fp32", "", DEEP_EP),
    ("a hint without scales", CONFIG, "128 * 8 + 128 * 4 + 128 * 4 + 8", "128 * 8 + 128 * 4 + 8", DEEP_EP),
    ("deep_ep without its utils", TOP, "_sys.modules[name], _sys.modules[f\"{name}.utils\"] = deep_ep, utils",
     "_sys.modules[name] = deep_ep", DEEP_EP),
    ("the first of equal choices taken for all", OPS, "match &= match.cumsum(1) == nth[:, None] + 1", "pass", OPERATORS),
    ("weights of rows that are none", OPS, " & (local >= 0)[:, None]", "", OPERATORS),
    ("rows of no token not cleared", OPS, "rows = torch.zeros(shape", "rows = torch.ones(shape", OPERATORS),
    ("gradients through weights that are lost", OPS, 'if kept.value.format.weights == "none" or (', "if True or (", OPERATORS),
    ("lost gradients not refused", OPS, "if torch.is_grad_enabled() and any(", "if False and any(", OPERATORS),
    ("handles kept for good", OPS, "            del _KEPT[key]", "            pass", OPERATORS),
    ("capacity for one choice of each token", CALLS, "min(self._top_k, experts)", "1", PLAIN),
    ("counts taken without their alignment", CALLS, "sum(-(-rows // align) * align for rows in experts)", "sum(experts)", PLAIN),
    ("strides of scales exchanged", ARGUMENTS, "call.view(&scales)?, token_bytes, word_bytes", "call.view(&scales)?, word_bytes, token_bytes",
     DEEP_EP),
    ("a payload left behind", ARGUMENTS, "    Ok((to.payload(payload), tokens))\n", "    let _ = payload;\n    Ok((to, tokens))\n", OPERATORS),
    ("calls not waited for", CONTEXT, "errors::wait(py, || self.stream.synchronize(self.patience))", "Ok::<(), PyErr>(())", PLAIN),
    ("gaps between rows not seen", ARRAYS, "Ok((self.len() > 1).then_some(rows_apart))", "Ok(Some(rows_apart).filter(|_| false))", PLAIN),
    ("sums written over what was there", CONTEXT, ".accumulate(accumulate)", ".accumulate(accumulate && false)", DEEP_EP),
    ("new rows in the context's format", CONTEXT, "format.unwrap_or(&handle.format)", "format.unwrap_or(&self.format)",
     PLAIN),
    ("rows of other tokens not compared", BENCH, "wanted = torch.full_like(found, 255)", "wanted = found.clone()", "test_bench.py"),
    ("a NaN within the bound", BENCH, "(~(error <= bound)).sum()", "(error > bound).sum()", "test_bench.py"),
    ("scales not compared", BENCH, "(words[rows] != _bytes(self.scales[tokens])).sum()", "(words[rows] != words[rows]).sum()",
     "test_bench.py"),
    ("capsules dropped before the call", ARGUMENTS, "self.capsules.borrow_mut().extend(capsule);", "drop(capsule);", "test_dlpack.py"),
]


def checked(name, file, old):
    """The file's text, in which `old` occurs once."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = text.count(old)
    if found != 1:
        sys.exit(f"{name}: its text occurs {found} times in {file}: renew the mutant")
    return text


def built(file, text):
    """The extension module of a tree with this text, in a copy of the repository."""
    tree = PLACE / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    (tree / file).write_text(text, encoding="utf-8")
    # The commit is of the repository, whose build is reused.
    given = os.environ | {"CARGO_TARGET_DIR": str(PLACE / "target"), "TOKENYARD_NVCC": "none", "PYO3_BUILD_EXTENSION_MODULE": "1",
                          "CARGO_PROFILE_RELEASE_OPT_LEVEL": "1", "CARGO_PROFILE_RELEASE_LTO": "false"}
    command = ["cargo", "build", "--release", "-q", "-p", "tokenyard-python"]
    done = subprocess.run(command, cwd=tree, env=given, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"the mutant of {file} does not build:\n{done.stderr[-2000:]}")
    return PLACE / "target" / "release" / "lib_native.so"


def survives(python, mutant):
    """Whether the tests pass with the mutant."""
    name, file, old, new, tests = mutant
    text = checked(name, file, old).replace(old, new)
    installed = subprocess.run([python, "-c", "import tokenyard; print(tokenyard.__path__[0])"], check=True,
                               capture_output=True, text=True).stdout.strip()
    site = PLACE / "site"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(installed, site / "tokenyard")
    if file.endswith(".rs"):
        shutil.copy2(built(file, text), site / "tokenyard" / "_native.abi3.so")
    else:
        (site / file.removeprefix("bindings/python/")).write_text(text, encoding="utf-8")
    command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
    given = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT / "tests" / "python", env=given, capture_output=True, timeout=600)
    except subprocess.TimeoutExpired:
        return False
    # 1: a test failed. Anything else says nothing of the mutant.
    if done.returncode not in (0, 1):
        sys.exit(f"{name}: pytest ended with {done.returncode}:\n{done.stdout.decode()[-2000:]}")
    return done.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--python", default=str(ROOT / ".venv-python" / "bin" / "python"))
    parser.add_argument("--one-in", type=int, default=1)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    for name, file, old, new, _tests in MUTANTS:
        checked(name, file, old)
        if old == new:
            sys.exit(f"{name} changes nothing")
    if given.check:
        return 0
    unknown = set(given.names) - {mutant[0] for mutant in MUTANTS}
    if unknown:
        sys.exit(f"no mutant is called {', '.join(sorted(unknown))}")
    first = int(hashlib.sha256(repr(MUTANTS).encode()).hexdigest(), 16) % given.one_in
    chosen = [mutant for mutant in MUTANTS if mutant[0] in given.names] or MUTANTS[first :: given.one_in]
    missed = []
    for mutant in chosen:
        start = time.monotonic()
        alive = survives(given.python, mutant)
        missed += [mutant[0]] * alive
        print(f"{'SURVIVES' if alive else 'caught':8} {time.monotonic() - start:5.0f} s  {mutant[0]}", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
