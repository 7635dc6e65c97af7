"""`python -m tokenyard.bench`: ranks as threads and under torchrun, its JSON, its checks, and what it refuses."""

import json
import os
import socket
import subprocess
import sys

import pytest
import rig

torch = rig.the_torch()

import tokenyard  # noqa: E402
from tokenyard import bench  # noqa: E402

SMALL = ["--device", "cpu", "--tokens", "6", "--hidden", "256", "--experts", "7", "--top-k", "3", "--iters", "3"]
# Fields that the program's `tokenyard bench` has by the same names.
FIELDS = set("version device device_name world launch hidden experts top_k dtype combine_dtype tokens routing layout mode sms "
             "iters seed verified mismatches max_rel_err dispatch_us combine_us".split())


def run(tmp_path, *options):
    path = tmp_path / "bench.json"
    status = bench.main([*SMALL, *options, "--json", str(path)])
    return status, json.loads(path.read_text())


@pytest.mark.parametrize("layout", bench.LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp8", "bf16", "fp16", "fp32"])
def test_ranks_as_threads(tmp_path, capsys, layout, dtype):
    mode = "split" if dtype in ("fp8", "fp32") else "fused"
    status, found = run(tmp_path, "--world", "3", "--layout", layout, "--dtype", dtype, "--mode", mode)
    assert status == 0 and FIELDS <= set(found)
    assert (found["world"], found["launch"], found["layout"], found["mode"], found["dtype"]) == (3, "threads", layout, mode, dtype)
    # The warm-up, whose iteration is the first, and three timed ones.
    assert (found["verified"], found["mismatches"], found["checked"]) == (True, 0, 4)
    for name in ("dispatch_us", "combine_us"):
        times = found[name]
        assert set(times) == {"p50", "p95", "p99", "min", "max", "mean"}
        assert 0 < times["min"] <= times["p50"] <= times["p95"] <= times["p99"] <= times["max"]
    assert "0 elements wrong" in capsys.readouterr().out


def test_only_the_first_is_checked(tmp_path):
    assert run(tmp_path, "--world", "2", "--check", "first")[1]["checked"] == 1
    assert run(tmp_path, "--world", "2", "--check", "2", "--warmup", "0")[1]["checked"] == 2


@pytest.mark.parametrize("group", ["env", "gloo"])
def test_under_torchrun(tmp_path, group):
    path = tmp_path / "bench.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend",
               "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "tokenyard.bench", *SMALL, "--group", group, "--json", str(path)]
    given = os.environ | {"TOKENYARD_PORT": port, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(path.read_text())
    assert (found["world"], found["launch"], found["verified"], found["checked"]) == (2, "env", True, 4)
    # Only rank 0 writes.
    assert done.stdout.count("elements wrong") == 1


def changed(method, change):
    """A method of AllToAll after which rank 1's arrays are changed."""
    whole = getattr(tokenyard.AllToAll, method)

    def call(self, *args, **named):
        result = whole(self, *args, **named)
        if self.local_experts[0] > 0:
            change(*args)
        return result

    return call


def swapped(rows):
    rows[[0, 1]] = rows[[1, 0]]


PLANTED = {
    "an element of a sum": ("combine", lambda rows, handle, out: out[0, :1].mul_(1.1)),
    "sums exchanged": ("combine", lambda rows, handle, out: swapped(out)),
    "a sum never written": ("combine", lambda rows, handle, out: out[2, 7:8].fill_(float("nan"))),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_wrong_sums_are_found(tmp_path, monkeypatch, planted):
    method, change = PLANTED[planted]
    monkeypatch.setattr(tokenyard.AllToAll, method, changed(method, change))
    status, found = run(tmp_path, "--world", "2", "--dtype", "bf16")
    assert status == 1 and not found["verified"] and found["mismatches"] > 0


OUTPUTS = {
    "a bit of a row": lambda got: got.rows.view(torch.uint8)[1, 0:1].add_(1),
    "rows exchanged": lambda got: swapped(got.rows.view(torch.uint8)),
    "a row past the last": lambda got: got.rows.view(torch.uint8)[-1].zero_(),
    "a scale": lambda got: got.scales[0, 0:1].add_(1),
    "a count": lambda got: got.counts[0:1].add_(1),
    "an offset": lambda got: got.offsets[1:2].add_(1),
}


@pytest.mark.parametrize("planted", OUTPUTS)
def test_wrong_rows_are_found(tmp_path, monkeypatch, planted):
    whole = bench.Rank._dispatch

    def dispatch(self):
        handle = whole(self)
        if self.world.rank == 1:
            OUTPUTS[planted](self.got)
        return handle

    monkeypatch.setattr(bench.Rank, "_dispatch", dispatch)
    status, found = run(tmp_path, "--world", "2", "--top-k", "5")
    assert status == 1 and found["mismatches"] > 0


def test_inputs_are_fresh_and_nowhere_zero():
    shape = bench.Shape(2, 64, 256, 32, 4)
    first, second, other = bench.inputs(shape, 0, 0), bench.inputs(shape, 1, 0), bench.inputs(shape, 0, 1)
    assert not torch.equal(first.ids, second.ids) and not torch.equal(first.ids, other.ids)
    assert not torch.equal(first.x, second.x) and first.x.count_nonzero() > 0.99 * first.x.numel()
    assert torch.equal(first.x, bench.inputs(shape, 0, 0).x)
    assert all(len(set(row)) == 4 for row in first.ids.tolist())


REFUSED = [
    (["--top-k", "9"], "--top-k is 9: give at most the 7 of --experts"),
    (["--world", "8"], "--experts is 7: give at least one for each of the 8 ranks"),
    (["--mode", "graph"], "--mode graph needs a GPU: give --mode fused or split"),
    (["--hidden", "100"], "--hidden is 100: give a multiple of 128 for --dtype fp8"),
    (["--tokens", "0"], "argument --tokens: '0' is no positive number"),
    (["--group", "gloo"], "--group is gloo without torchrun's environment: run under torchrun, or leave --group out"),
    (["--layout", "other"], "argument --layout: invalid choice"),
    (["--colour", "red"], "unrecognized arguments: --colour red"),
]


@pytest.mark.parametrize("options,sentence", REFUSED)
def test_refused(capsys, options, sentence):
    with pytest.raises(SystemExit) as ended:
        bench.main([*SMALL, "--world", "2", *options])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"tokenyard.bench: {sentence}") and said.count("\n") == 1


def test_a_world_that_the_environment_denies(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit):
        bench.main([*SMALL, "--world", "2"])
    assert "--world is 2, and the environment has 4 ranks: leave --world out" in capsys.readouterr().err
