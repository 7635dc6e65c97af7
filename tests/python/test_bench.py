"""`python -m tokenyard.bench`: ranks as threads and under torchrun, its JSON, its checks, and what it refuses."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading

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


def test_several_numbers_of_tokens(tmp_path, capsys):
    path = tmp_path / "bench.json"
    assert bench.main([*SMALL, "--world", "2", "--tokens", "3,1,40", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["results"]
    assert [(each["tokens"], each["checked"], each["mismatches"]) for each in found] == [(3, 4, 0), (1, 4, 0), (40, 4, 0)]
    said = capsys.readouterr().out
    assert all(f"cpu, {tokens} tokens, fp8" in said for tokens in (3, 1, 40)) and said.count("0 elements wrong") == 3


def test_one_wrong_result_of_several_is_a_failure(tmp_path, monkeypatch):
    kept = bench.measure
    monkeypatch.setattr(bench, "measure", lambda rank, *given: kept(rank, *given) | {"wrong": int(rank.shape.tokens == 3)})
    path = tmp_path / "bench.json"
    assert bench.main([*SMALL, "--world", "2", "--tokens", "3,1", "--json", str(path)]) == 1
    assert [each["verified"] for each in json.loads(path.read_text())["results"]] == [False, True]


@pytest.mark.parametrize("json_to", ["file", "-"])
def test_what_came_before_an_error_is_written(tmp_path, capsys, json_to):
    path = tmp_path / "bench.json"
    given = "-" if json_to == "-" else str(path)
    assert bench.main([*SMALL, "--world", "2", "--tokens", "3,2000000", "--json", given]) == 2
    out, said = capsys.readouterr()
    text = out if json_to == "-" else path.read_text()
    assert [each["tokens"] for each in json.loads(text)["results"]] == [3]
    assert json_to == "-" or out.count("0 elements wrong") == 1
    assert "max_tokens_per_rank is 2000000" in said


@pytest.mark.parametrize("failure,status", [(tokenyard.Error("no"), 1), (MemoryError("no"), None)])
def test_what_came_before_a_failure_is_written(monkeypatch, capsys, failure, status):
    kept = bench.measure

    def fails(rank, *given):
        if rank.shape.tokens == 4:
            raise failure
        return kept(rank, *given)

    monkeypatch.setattr(bench, "measure", fails)
    run = functools.partial(bench.main, [*SMALL, "--world", "1", "--tokens", "3,4", "--json", "-"])
    if status is None:
        with pytest.raises(type(failure)):
            run()
    else:
        assert run() == status
    assert [each["tokens"] for each in json.loads(capsys.readouterr().out)["results"]] == [3]


def test_wrong_results_are_printed(monkeypatch, capsys):
    kept = bench.measure
    monkeypatch.setattr(bench, "measure", lambda rank, *given: kept(rank, *given) | {"wrong": 7})
    assert bench.main([*SMALL, "--world", "1", "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["mismatches"] == 7


def test_only_the_first_is_checked(tmp_path):
    assert run(tmp_path, "--world", "2", "--check", "first")[1]["checked"] == 1
    assert run(tmp_path, "--world", "2", "--check", "2", "--warmup", "0")[1]["checked"] == 2


def under_torchrun(*options):
    """A run of two ranks by torchrun, which has ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend",
               "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "tokenyard.bench", *SMALL, *options]
    given = os.environ | {"TOKENYARD_PORT": rig.free_port(), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("group", ["env", "gloo"])
def test_under_torchrun(tmp_path, group):
    path = tmp_path / "bench.json"
    done = under_torchrun("--group", group, "--json", str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(path.read_text())
    assert (found["world"], found["launch"], found["verified"], found["checked"]) == (2, "env", True, 4)
    # Only rank 0 writes.
    assert done.stdout.count("elements wrong") == 1


def test_under_torchrun_the_first_rank_writes_what_came_before_an_error():
    done = under_torchrun("--group", "env", "--tokens", "3,2000000", "--json", "-")
    assert done.returncode != 0 and "max_tokens_per_rank is 2000000" in done.stderr, done.stderr[-3000:]
    # One document: were it two, this would not be JSON.
    assert [each["tokens"] for each in json.loads(done.stdout)["results"]] == [3]


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
    "a scale past the last": lambda got: got.scales[-1, 0:1].fill_(1),
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


def test_an_expert_named_twice_in_a_row_is_found(tmp_path, monkeypatch):
    whole = bench.Rank._dispatch

    def dispatch(self):
        handle = whole(self)
        # Each row names one of its experts once more, with the same weight, where a choice of another rank is.
        for experts, weights in zip(self.got.token_experts, self.got.token_weights):
            used, free = (experts >= 0).nonzero().flatten(), (experts < 0).nonzero().flatten()
            if len(used) and len(free):
                experts[free[0]], weights[free[0]] = experts[used[0]].clone(), weights[used[0]].clone()
        return handle

    monkeypatch.setattr(bench.Rank, "_dispatch", dispatch)
    # Two of the eight experts are a rank's, so that one of three choices is another's.
    status, found = run(tmp_path, "--world", "4", "--experts", "8", "--layout", "token")
    assert status == 1 and found["mismatches"] > 0


def test_json_of_a_wrong_run_is_json(tmp_path, monkeypatch):
    method, change = PLANTED["a sum never written"]
    monkeypatch.setattr(tokenyard.AllToAll, method, changed(method, change))
    bench.main([*SMALL, "--world", "2", "--json", str(tmp_path / "r.json")])

    def no_number(text):
        raise AssertionError(f"{text} is not JSON")

    found = json.loads((tmp_path / "r.json").read_text(), parse_constant=no_number)
    assert found["max_rel_err"] is None and not found["verified"]


def test_inputs_are_fresh_and_nowhere_zero():
    shape = bench.Shape(2, 64, 256, 32, 4)
    first, second, other = bench.inputs(shape, 0, 0), bench.inputs(shape, 1, 0), bench.inputs(shape, 0, 1)
    assert not torch.equal(first.ids, second.ids) and not torch.equal(first.ids, other.ids)
    assert not torch.equal(first.x, second.x) and first.x.count_nonzero() > 0.99 * first.x.numel()
    assert torch.equal(first.x, bench.inputs(shape, 0, 0).x)
    assert all(len(set(row)) == 4 for row in first.ids.tolist())


def test_iterations_leave_the_sets_of_rows_as_they_were_drawn():
    # Ranks that are processes draw each other's rows for the reference: what one of them writes, others do not see.
    shape = bench.Shape(2, 3, 128, 4, 2, "fp8")
    drawn = [[bench._rows.__wrapped__(shape, number, rank) for number in range(16)] for rank in range(2)]

    def work(world):
        rank = bench.Rank(world, shape, "fused", torch.device("cpu"), threading.Lock())
        for iteration in range(18):
            assert rank.iterate(iteration, True)[2] == 0
            for given, wanted in zip(rank.given, drawn[world.rank][iteration % 16]):
                assert torch.equal(given.view(torch.uint8), wanted.view(torch.uint8)), iteration

    bench.in_threads(2, work)
    for rank, number in ((rank, number) for rank in range(2) for number in range(16)):
        kept = bench._rows(shape, number, rank)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(kept, drawn[rank][number]))


REFUSED = [
    (["--top-k", "9"], "--top-k is 9: give at most the 7 of --experts"),
    (["--world", "8"], "--experts is 7: give at least one for each of the 8 ranks"),
    (["--mode", "graph"], "--mode graph needs a GPU: give --mode fused or split"),
    (["--hidden", "100"], "--hidden is 100: give a multiple of 128 for --dtype fp8"),
    (["--tokens", "0"], "argument --tokens: '0' is no positive number below 2^63"),
    (["--tokens", "1,,2"], "argument --tokens: '' is no positive number below 2^63"),
    (["--tokens", "4,x"], "argument --tokens: 'x' is no positive number below 2^63"),
    (["--seed", str(2**63)], "argument --seed: '9223372036854775808' is no positive number below 2^63"),
    (["--json", "/no/such/folder/r.json"], "argument --json: '/no/such/folder/r.json': there is no folder /no/such/folder"),
    (["--json", "/"], "argument --json: '/': that is a folder: give a file"),
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


@pytest.mark.parametrize("options,sentence", [
    (["--world", "65", "--experts", "65"], "configuration ranks of a node is 65"),
    (["--world", "1", "--experts", "3000"], "configuration placement is 3000 experts on a rank"),
    (["--tokens", "2000000"], "configuration max_tokens_per_rank is 2000000"),
    (["--sms", "9999"], "configuration sms is 9999"),
])
def test_limits_of_contexts_are_one_sentence(capsys, options, sentence):
    assert bench.main([*SMALL, "--world", "2", *options]) == 2
    out, said = capsys.readouterr()
    assert out == "" and said.startswith(f"tokenyard.bench: {sentence}") and said.count("\n") == 1


def test_a_large_seed_is_one():
    shape = bench.Shape(2, 3, 128, 4, 2, seed=2**63 - 1)
    assert bench.inputs(shape, 7, 1).ids.shape == bench.Reference(shape, 7).ids[3:].shape


def test_an_environment_without_a_number_of_ranks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(SystemExit) as ended:
        bench.main(SMALL)
    assert ended.value.code == 2 and "WORLD_SIZE is 'two': set it to the number of ranks" in capsys.readouterr().err


@contextlib.contextmanager
def ended(ranks):
    """Kills processes that are left at the end of a block, and those that take longer than any of these tests."""
    late = threading.Timer(150, lambda: [rank.kill() for rank in ranks])
    late.start()
    try:
        yield
    finally:
        late.cancel()
        for rank in ranks:
            rank.kill()
            rank.wait()


# Each rank's further options, and the environment's.
DIFFER = {
    "seed": (["--seed", "1"], ["--seed", "2"], {}, "--seed is 2 on rank 1 and 1 on rank 0: give all ranks the same options"),
    "iters": ([], ["--iters", "4"], {}, "--iters is 4 on rank 1 and 3 on rank 0: give all ranks the same options"),
    "tokens": ([], ["--tokens", "6,7"], {}, "--tokens is 6,7 on rank 1 and 6 on rank 0: give all ranks the same options"),
    "top-k": ([], ["--top-k", "2"], {}, "--top-k is 2 on rank 1 and 3 on rank 0: give all ranks the same options"),
}


@pytest.mark.parametrize("case", DIFFER)
def test_ranks_that_differ_are_refused(case):
    *options, given, sentence = DIFFER[case]
    given = given | {"TOKENYARD_PORT": rig.free_port(), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, "-m", "tokenyard.bench", *SMALL, *more], stderr=subprocess.PIPE, text=True,
                              env=os.environ | given | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
             for rank, more in enumerate(options)]
    with ended(ranks):
        for rank in ranks:
            said = rank.communicate(timeout=60)[1]
            assert rank.returncode == 2 and said.startswith(f"tokenyard.bench: {sentence}") and said.count("\n") == 1, said


def test_ranks_of_two_nodes(tmp_path):
    """Over the simulated network, with every element checked."""
    given = {"TOKENYARD_PORT": rig.free_port(), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "TOKENYARD_NODES": "1,1",
             "TOKENYARD_NETWORK": "simulated"}
    path = tmp_path / "bench.json"
    ranks = [subprocess.Popen([sys.executable, "-m", "tokenyard.bench", *SMALL, "--json", str(path)], stderr=subprocess.PIPE, text=True,
                              stdout=subprocess.DEVNULL, env=os.environ | given | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
             for rank in range(2)]
    with ended(ranks):
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], said
    found = json.loads(path.read_text())
    assert found["nodes"] == [1, 1] and found["mismatches"] == 0 and found["checked"] == found["iters"] + 1


# The benchmark for long, which says when a rank has its context.
LONG = """
import runpy, sys, tokenyard
whole = tokenyard.AllToAll.output
def output(self, *args, **named):
    sys.stdout.write("made\\n"); sys.stdout.flush()
    return whole(self, *args, **named)
tokenyard.AllToAll.output = output
tokenyard.AllToAll.__init__.__kwdefaults__["timeout"] = 2.0
sys.argv = ["tokenyard.bench", *sys.argv[1:], "--iters", "1000000", "--check", "first"]
runpy.run_module("tokenyard.bench", run_name="__main__", alter_sys=True)
"""


def started(*options, **environment):
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", LONG, *SMALL, *options], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)


def test_a_rank_that_is_killed_ends_the_others():
    given = {"TOKENYARD_PORT": rig.free_port(), "WORLD_SIZE": "2"}
    ranks = [started(**given, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    with ended(ranks):
        assert [rank.stdout.readline() for rank in ranks] == ["made\n"] * 2
        ranks[1].kill()
        ranks[1].communicate(timeout=60)
        said = ranks[0].communicate(timeout=60)[1]
        assert ranks[0].returncode == 1 and said.count("\n") == 1, said
        assert said.startswith(("tokenyard.bench: PeerLostError: ", "tokenyard.bench: BootstrapError: ")) and "rank 1" in said


def test_ctrl_c_ends_ranks_that_are_threads():
    running = started("--world", "2")
    with ended([running]):
        assert [running.stdout.readline() for _ in range(2)] == ["made\n"] * 2
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=10) == ("", "") and running.returncode == -signal.SIGINT
