"""Tensors of torch on the CPU, and groups of torch.distributed as worlds of processes."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import tokenyard
from rig import Case, free_port, in_ranks

if os.environ.get("TOKENYARD_STRICT") == "1":
    import torch
else:
    torch = pytest.importorskip("torch")


def test_importing_tokenyard_does_not_import_torch():
    program = "import sys, tokenyard; print('torch' in sys.modules, 'numpy' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_of_each_dtype(dtype):
    case = Case(seed=5)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    # Elements that every dtype holds exactly, and factors of which no product is rounded.
    x = [torch.from_numpy(np.round(x * 4) / 4).to(dtype) for x in case.x]
    weights = [torch.from_numpy(np.ceil(weights * 4) / 4) for weights in case.weights]
    ids = [torch.from_numpy(ids) for ids in case.ids]
    limits = case.limits | {"dtype": name, "combine_dtype": name}
    step = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 2.0**-22}[dtype]

    def rank(world):
        ep, r = tokenyard.AllToAll(world, **limits), world.rank
        got = ep.dispatch(x[r], ids[r], weights[r])
        assert got.rows.dtype == dtype and got.counts.dtype == torch.int32
        for i, expert in enumerate(ep.local_experts):
            part = slice(int(got.offsets[i]), int(got.offsets[i] + got.counts[i]))
            wanted = [x[s][t] for s in range(case.ranks) for t in range(case.count[s]) if expert in case.ids[s][t]]
            assert torch.equal(got.rows[part], torch.stack(wanted) if wanted else x[0][:0])
            got.rows[part] *= 2.0 ** (expert % 3)
        out = ep.combine(got.rows, got.handle, tokens=case.count[r])
        assert out.dtype == dtype
        for t in range(case.count[r]):
            terms = [float(weights[r][t, k]) * 2.0 ** (e % 3) * x[r][t].double()
                     for k, e in enumerate(case.ids[r][t]) if e >= 0]
            wanted = sum(terms) if terms else torch.zeros(case.hidden, dtype=torch.float64)
            bound = step * (sum(term.abs() for term in terms) if terms else 0 * wanted)
            assert ((out[t].double() - wanted).abs() <= bound).all()
        world.barrier()

    in_ranks(tokenyard.World.threads(case.ranks), rank)


class Subclass(torch.Tensor):
    """What torch's functions of C do not take, so that it is asked in Python."""


@pytest.mark.parametrize("kind", [torch.nn.Parameter, lambda x: x.as_subclass(Subclass)])
def test_tensors_of_other_classes(kind):
    case = Case(ranks=1, seed=8)
    ep = tokenyard.AllToAll(tokenyard.World.threads(1)[0], **case.limits)
    x, ids, weights = (torch.from_numpy(value) for value in (case.x[0], case.ids[0], case.weights[0]))
    wide = torch.zeros(len(x), case.hidden + 16)
    wide[:, : case.hidden] = x
    for given in (x, wide[:, : case.hidden]):
        got = ep.dispatch(kind(given), ids, kind(weights))
        for i, expert in enumerate(ep.local_experts):
            part = slice(int(got.offsets[i]), int(got.offsets[i] + got.counts[i]))
            np.testing.assert_array_equal(got.rows[part].detach().numpy(), case.rows_of(expert))
    with pytest.raises(TypeError, match="x has the dtype torch.int8"):
        ep.dispatch(x.to(torch.int8), ids, weights)


def test_tensors_that_are_none_of_ours_are_refused():
    case = Case(ranks=1)
    ep = tokenyard.AllToAll(tokenyard.World.threads(1)[0], **case.limits)
    x, ids, weights = (torch.from_numpy(value) for value in (case.x[0], case.ids[0], case.weights[0]))
    with pytest.raises(TypeError, match="x has the dtype torch.complex64"):
        ep.dispatch(x.to(torch.complex64), ids, weights)
    with pytest.raises(ValueError, match="x is on meta"):
        ep.dispatch(x.to("meta"), ids, weights)
    output, _got = ep.output(x)
    with pytest.raises(TypeError, match="x has the layout torch.sparse"):
        ep.dispatch_into(output, x.to_sparse(), ids, weights)
    with pytest.raises(ValueError, match="x is a negative view"):
        ep.dispatch(torch._neg_view(x), ids, weights)


def test_an_output_follows_its_tensors_to_other_memory():
    case = Case(ranks=1)
    ep = tokenyard.AllToAll(tokenyard.World.threads(1)[0], **case.limits)
    x, ids, weights = (torch.from_numpy(value) for value in (case.x[0], case.ids[0], case.weights[0]))
    output, got = ep.output(x)
    got.rows.data = torch.full_like(got.rows, float("nan"))
    ep.dispatch_into(output, x, ids, weights)
    for i, expert in enumerate(ep.local_experts):
        part = slice(int(got.offsets[i]), int(got.offsets[i] + got.counts[i]))
        np.testing.assert_array_equal(got.rows[part].numpy(), case.rows_of(expert))
    got.rows.data = torch.empty(3, case.hidden)
    with pytest.raises(ValueError, match="rows has changed since the output was made"):
        ep.dispatch_into(output, x, ids, weights)


def programs(page):
    """The Python programs of a page."""
    text = (pathlib.Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    return [part.partition("```")[0] for part in text.split("```python\n")[1:]]


def test_the_readmes_program_runs(capsys):
    (program,) = programs("README.md")
    exec(program, {})  # noqa: S102: the repository's own page
    said = capsys.readouterr().out
    # Sums of two weights of at most 1 times rows of about 4: three roundings to bf16.
    assert said.startswith("tensor(") and float(said[7:].split(",")[0].rstrip(")\n")) < 6 * 3 * 2.0**-8


def test_the_pages_programs_run():
    first, second = programs("docs/python.md")
    small = {"World.from_env()": "World.threads(1)[0]", "7168": "64", "rank=128": "rank=128, device='cpu'"}
    small["max_tokens_per_rank=4096"] = "max_tokens_per_rank=8, device='cpu'"
    for old, new in small.items():
        assert old in first + second
        first, second = first.replace(old, new), second.replace(old, new)
    x, weights = torch.randn(5, 64).bfloat16().requires_grad_(), torch.rand(5, 8).requires_grad_()
    given = {"x": x.detach(), "topk_idx": torch.arange(40).reshape(5, 8) * 6, "topk_weights": weights.detach()}
    given["experts"] = lambda rows, counts: rows
    exec(first, given)  # noqa: S102: the repository's own page
    wanted = x.float() * weights.sum(1, keepdim=True)
    assert ((given["y"].float() - wanted).abs() <= 2.0**-6 * wanted.abs()).all()
    exec(second, given | {"x": x, "topk_weights": weights})  # noqa: S102
    # Of the sum of y: the sum of the weights, and of the row. Bounds of bf16's roundings.
    total = weights.detach().sum(1, keepdim=True)
    assert ((x.grad.float() - total).abs() <= 2.0**-6 * total).all()
    row = x.detach().float().sum(1, keepdim=True)
    assert ((weights.grad - row).abs() <= 2.0**-6 * x.detach().float().abs().sum(1, keepdim=True)).all()


def test_the_program_of_the_page_of_formats_prints_what_it_says(capsys):
    (program,) = programs("docs/formats.md")
    given = {}
    exec(program, given)  # noqa: S102: the repository's own page
    said = capsys.readouterr().out.splitlines()
    for line, printed in zip((line for line in program.splitlines() if line.startswith("print")), said):
        wanted = line.partition("  # ")[2]
        assert wanted.startswith("below") or wanted.partition(": ")[0] == printed, (line, printed)
    assert len(said) == program.count("print(")
    # An e4m3 element is off by a sixteenth at most.
    x, values = given["x"][0].float(), given["values"].flatten()
    assert ((values - x).abs() <= x.abs().max() / 16).all() and (values - x).abs().max() > 0
    assert given["got"].rows[[0, 4, 5, 6, 8]].equal(given["x"][[0, 0, 1, 2, 1]])


def test_the_page_of_formats_has_the_shapes_that_outputs_have():
    page = (pathlib.Path(__file__).parents[2] / "docs/formats.md").read_text(encoding="utf-8")
    sizes = {"L": 3, "R": 2, "rows": 11, "top_k": 4, "words": 5, "1": 1, "2": 2}
    rows = re.findall(r"^\| `(\w+)` \| (int32|int64|fp32) `\[([^]]+)\]` \|", page, re.MULTILINE)
    shapes = {name: (dtype, eval("[" + shape + "]", {}, sizes)) for name, dtype, shape in rows}  # noqa: S307
    types = {"int32": torch.int32, "int64": torch.int64, "fp32": torch.float32}
    arrays = {name: torch.zeros(shape, dtype=types[dtype]) for name, (dtype, shape) in shapes.items()}
    assert len(arrays) == 11
    tokenyard.Output("contiguous", torch.zeros(11, 64), **arrays)
    for name, array in arrays.items():
        for wrong in (array[:-1], array.to(torch.float64)):
            if name != "wait_times" or wrong.dtype == torch.float64:
                with pytest.raises((ValueError, TypeError)):
                    tokenyard.Output("contiguous", torch.zeros(11, 64), **(arrays | {name: wrong}))


def test_the_program_of_deep_eps_page_runs():
    program, network = programs("docs/deep_ep.md")
    given = {"group": tokenyard.World.threads(1)[0]}
    try:
        exec(program, given)  # noqa: S102: the repository's own page
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "deep_ep"]:
            del sys.modules[name]
    try:
        exec(network, given)  # noqa: S102
    finally:
        tokenyard.set_network(None)
    assert given["buffer"].group_size == 1 and given["buffer"].num_nvl_bytes > 1 << 28


PROCESS = """
import os, sys, time
sys.path.insert(0, os.environ["RIG"])
import numpy as np, torch, torch.distributed as dist, tokenyard
from rig import Case
way = sys.argv[1]
if way == "group":
    dist.init_process_group("gloo")
    world = tokenyard.World.from_group()
else:
    world = tokenyard.World.from_env()
case, r = Case(seed=6, ranks=2), world.rank
assert (world.size, r) == (2, int(os.environ["RANK"]))
ep = tokenyard.AllToAll(world, **case.limits)
got = ep.dispatch(torch.from_numpy(case.x[r]), torch.from_numpy(case.ids[r]), torch.from_numpy(case.weights[r]))
for i, expert in enumerate(ep.local_experts):
    part = slice(int(got.offsets[i]), int(got.offsets[i] + got.counts[i]))
    np.testing.assert_array_equal(got.rows[part].numpy(), case.rows_of(expert))
    got.rows[part] = torch.from_numpy(case.expert(expert, got.rows[part].numpy()))
out = ep.combine(got.rows, got.handle, tokens=case.count[r])
np.testing.assert_allclose(out.numpy(), case.sums(r), rtol=1e-5, atol=1e-5)
world.barrier()
print("right", flush=True)
if way == "group":
    # A thread of gloo may still drop tensors of the last collective. In torch 2.6 it needs the interpreter's lock for
    # that, and the end of the group waits for the thread with that lock.
    time.sleep(0.5)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("way", ["group", "env"])
def test_ranks_that_are_processes(way):
    common = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": free_port(), "TOKENYARD_PORT": free_port(), "RIG": os.path.dirname(__file__)}
    ranks = [subprocess.Popen([sys.executable, "-c", PROCESS, way], env=common | {"RANK": str(r), "LOCAL_RANK": str(r)},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r in range(2)]
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0 and out == "right\n", err


PARTS = """
import os, time, torch.distributed as dist, tokenyard
dist.init_process_group("gloo")
r, parts = dist.get_rank(), [[2], [0, 1]]
groups = [dist.new_group(part) for part in parts]
everyone = tokenyard.World.from_group()
if r in parts[1]:
    left = everyone.regroup(1, parts[1], group=groups[1])
    assert (left.rank, left.size, left.generation) == (r, 2, 1) and left.all_gather(b"%d" % r) == [b"0", b"1"]
for group, part in zip(groups, parts):
    if r in part:
        world = tokenyard.World.from_group(group)
        # Not the GPU of a rank of another group.
        assert (world.rank, world.size, world.local_rank) == (part.index(r), len(part), int(os.environ.get("LOCAL_RANK", r)))
        assert world.all_gather(b"%d" % r) == [b"%d" % other for other in part]
    else:
        try:
            tokenyard.World.from_group(group)
        except ValueError as refused:
            assert str(refused) == f"group is one without this process, rank {r} of all: make its world in its members", refused
        else:
            raise AssertionError("a world without this process")
dist.barrier()
print("right", flush=True)
# As above.
time.sleep(0.5)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("local", [True, False])
def test_groups_of_some_processes(local):
    common = os.environ | {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    common.pop("LOCAL_RANK", None)
    ranks = [subprocess.Popen([sys.executable, "-c", PARTS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=common | {"RANK": str(r)} | ({"LOCAL_RANK": str(r + 4)} if local else {})) for r in range(3)]
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0 and out == "right\n", err
