"""benches/compare.py on CPU ranks, the backend of benches/collectivex.py against the reference, benches/python_cost.py."""

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest
import rig

torch = rig.the_torch()

import torch.distributed as dist  # noqa: E402

import tokenyard  # noqa: E402
from tokenyard import bench  # noqa: E402

BENCHES = pathlib.Path(__file__).parents[2] / "benches"


def script(name):
    spec = importlib.util.spec_from_file_location(name, BENCHES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compare, collectivex, python_cost = script("compare"), script("collectivex"), script("python_cost")
SMALL = ["--device", "cpu", "--tokens", "6", "--hidden", "64", "--experts", "8", "--top-k", "3", "--rounds", "2", "--iters", "1"]
RUN = ["tokenyard AllToAll", "tokenyard deep_ep, normal", "tokenyard deep_ep, low latency", "torch all_to_all_single"]


@pytest.mark.parametrize("torchrun", [False, True])
def test_compare(tmp_path, torchrun):
    launch, ranks = ([], ["--world", "2"])
    if torchrun:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        ranks = []
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg")]
    done = subprocess.run([sys.executable, *launch, str(BENCHES / "compare.py"), *SMALL, *ranks, *files], capture_output=True,
                          text=True, timeout=180, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["world"] == (4 if torchrun else 2) and {"commit", "date", "device_name", "torch", "version"} <= set(found)
    by_name = {each["name"]: each for each in found["results"]}
    # Every contender is in the table, also those that did not run.
    assert list(by_name) == [kind.name for kind in compare.CONTENDERS]
    assert all(f"| {name} |" in done.stdout for name in by_name)
    svg = (tmp_path / "r.svg").read_text()
    for name in RUN:
        each = by_name[name]
        assert (each["wrong"], each["differ"], each["checked"]) == (0, 0, 4), each
        assert each["dispatch_us"]["p50"] > 0 and each["combine_us"]["p95"] > 0 and f">{name}<" in svg
    for each in by_name.values():
        assert "missing" in each or each["wrong"] == each["differ"] == 0


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield argparse.Namespace(world=1, tokens=6, hidden=64, experts=8, top_k=3, seed=1, warmup=0, rounds=1, iters=1)
    dist.destroy_process_group()


def test_a_wrong_contender_is_found(alone, monkeypatch):
    right = compare.Permuted.combine

    def wrong(self, got, rows):
        return right(self, (*got[:-1], got[-1].flip(0)), rows)

    monkeypatch.setattr(compare.Permuted, "combine", wrong)
    monkeypatch.setattr(compare, "CONTENDERS", [compare.Plain, compare.Permuted, compare.Absent("no such", "no_such_module")])
    plain, permuted, absent = compare.measure(alone, 0, torch.device("cpu"))
    assert (plain["wrong"], plain["differ"]) == (0, 0) and permuted["wrong"] > 0 and permuted["differ"] > 0
    assert absent == {"name": "no such", "missing": "not installed: no_such_module"}


def test_sums_that_an_earlier_contender_left_are_not_taken_for_another_ones(alone, monkeypatch):
    out = torch.empty(6, 64, dtype=torch.bfloat16)

    class First(compare.Plain):
        def combine(self, got, rows):
            return self.ep.combine(rows, got.handle, out)

    class Idle(compare.Plain):
        name = "writes nothing, where the first one wrote"

        def combine(self, got, rows):
            return out

    monkeypatch.setattr(compare, "CONTENDERS", [First, Idle])
    first, idle = compare.measure(alone, 0, torch.device("cpu"))
    assert first["wrong"] == 0 and idle["wrong"] == idle["differ"] == 6 * 64


class Replayed:
    """In place of CUDA graphs: calls that read and write arrays of their own."""

    def __init__(self, job, contender):
        self.contender, given = contender, bench.inputs(job.shape, 0, job.rank)
        self.given = [each.clone() for each in (given.x, given.ids, given.weights)]
        self.output, self.got = contender.ep.output(self.given[0])
        self.rows, self.sums = torch.zeros_like(self.got.rows), torch.zeros_like(self.given[0])

    def dispatch(self):
        self.got = self.got._replace(handle=self.contender.ep.dispatch_into(self.output, *self.given))

    def combine(self):
        self.contender.ep.combine(self.rows, self.got.handle, self.sums)


class Calls(bench.Clock):
    def __init__(self):
        super().__init__(False)
        self.calls = []

    def time(self, call, align):
        self.calls.append(call)
        return super().time(call, align)


def test_replays_are_timed_alone_and_their_sums_are_of_new_tokens(alone):
    job = compare.Job(alone, 0, torch.device("cpu"))
    contender, clock = compare.Plain(job), Calls()
    graphs, times = Replayed(job, contender), {"dispatch": [], "combine": []}
    for number in (3, 4):
        given = bench.inputs(job.shape, number, 0)
        exact, bound = job.reference(given)
        found = compare.once(job, clock, contender, given, times, graphs)
        assert ((found - exact).abs() <= bound).all()
        # Nothing is left for a replay that writes nothing.
        assert graphs.got.rows.isnan().all() and graphs.rows.isnan().all() and graphs.sums.isnan().all()
        assert not given.x.isnan().any()
    assert clock.calls == [graphs.dispatch, graphs.combine] * 2 and len(times["dispatch"]) == len(times["combine"]) == 2
    assert compare.Graphs.of(job, compare.Normal) == (None, "its calls wait on the host")


def test_a_gpus_table_has_the_hosts_times_beside_it():
    def of_rank(us, **more):
        part = {"dispatch": [us], "combine": [us + 1]}
        host = {"dispatch": [us + 10], "combine": [us + 11]}
        return {"wrong": 0, "differ": 2, "checked": 2, **part, "host": host, **more}

    results = [compare.summary("one", [of_rank(1.0, timed="graph"), of_rank(3.0, timed="graph")]),
               compare.summary("other", [of_rank(5.0, timed="events", not_captured="why")] * 2),
               compare.summary("absent", [{"missing": "not installed"}])]
    assert results[1]["not_captured"] == "why" and results[0]["dispatch_host_us"]["max"] == 13.0
    head, _, one, other, absent = compare.table(results)
    assert head.count("|") == one.count("|") == other.count("|") == absent.count("|") == 9
    assert one == "| one | 2.0 / 3.0 | 3.0 / 4.0 | 5.0 | a graph | 12.0 | 13.0 | 4 |"
    assert other == "| other | 5.0 / 5.0 | 6.0 / 6.0 | 11.0 | events, host waits included | 15.0 | 16.0 | 4 |"
    without = compare.table([{key: value for key, value in each.items() if "host" not in key} for each in results])
    assert without[0] == "| contender | dispatch p50 / p95, µs | combine p50 / p95, µs | both p50, µs | elements wrong |"


COST = ["--device", "cpu", "--tokens", "2", "--calls", "2"]
REFUSED = {
    "compare": [
        (["--world", "0"], "argument --world: '0' is no positive number"),
        (["--world", "-2"], "argument --world: '-2' is no positive number"),
        (["--tokens", "0"], "argument --tokens: '0' is no positive number"),
        (["--rounds", "0"], "argument --rounds: '0' is no positive number"),
        (["--world", "3"], "--experts is 8: give a multiple of the 3 ranks, and at least --top-k"),
        (["--hidden", "63"], "--hidden is 63: give a multiple of 8"),
        (["--json", "/no/such/folder/r"], "--json is '/no/such/folder/r': there is no folder /no/such/folder"),
        (["--plot", "/"], "--plot is '/': that is a folder"),
    ],
    "python_cost": [
        (["--ranks", "3"], "--ranks is '3': give numbers as in 1,2 that divide the 256 experts"),
        (["--ranks", "1,"], "--ranks is '1,': give numbers as in 1,2"),
        (["--calls", "0"], "argument --calls: '0' is no positive number"),
        (["--replays", "99"], "--replays is 99: give 100 or more"),
        (["--json", "/"], "--json is '/': that is a folder"),
    ],
}
EACH = [(name, *case) for name, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize("name,options,sentence", EACH)
def test_options_that_are_unusable(name, options, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *(SMALL if name == "compare" else COST), *options])
    with pytest.raises(SystemExit) as ended:
        {"compare": compare, "python_cost": python_cost}[name].main()
    assert ended.value.code == 2 and f"error: {sentence}" in capsys.readouterr().err


def test_compare_under_half_of_an_environment(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["compare", *SMALL])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert ended.value.code == 2 and "WORLD_SIZE is '', and RANK is set: start with torchrun" in capsys.readouterr().err


def test_what_calls_cost(tmp_path):
    path = tmp_path / "cost.json"
    done = subprocess.run([sys.executable, str(BENCHES / "python_cost.py"), *COST, "--ranks", "1,2", "--json", str(path)],
                          capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())["results"]
    assert [result["ranks"] for result in results] == [1, 2]
    for result in results:
        assert result["replay"] is None and {"dispatch_into", "ops.combine", "deep_ep LL combine"} <= set(result["host_us"])
        for name, times in result["host_us"].items():
            assert 0 < times["p50"] <= times["p99"] and f"  host    {name} " in done.stdout


@pytest.mark.parametrize("mode", ["normal", "low-latency"])
def test_collectivex(mode):
    shape = bench.Shape(3, 7, 64, 6, 3, "bf16", "token" if mode == "normal" else "masked")
    reference, per_rank = bench.Reference(shape, 5), shape.experts // shape.world

    def rank(world):
        class Backend(collectivex.TokenyardBackend):
            name = "tokenyard-in-threads"

            def world(self):
                return world

        backend = Backend(types.SimpleNamespace(mode=mode, experts=shape.experts), world.rank, world.size, world.rank, "cpu")
        backend.create_buffer(types.SimpleNamespace(hidden=64, experts=6, topk=3, max_tokens_per_rank=9))
        given = bench.inputs(shape, 5, world.rank)
        problem = backend.make_problem(shape.tokens, given.ids, given.weights, given.x)
        for _ in range(2):
            # The second dispatch comes without a combine of the first.
            handle = backend.dispatch(problem)
        view = backend.inspect_dispatch(problem, handle)
        _, tokens, _ = reference.places(world.rank, 0)
        assert backend.recv_tokens(handle) == len(tokens) == len(view.payload)
        assert torch.equal(view.payload, reference.x[tokens])
        assert view.local_expert_counts.tolist() == reference.counts(world.rank)
        if mode == "normal":
            for n, token in enumerate(tokens.tolist()):
                named = zip(reference.ids[token].tolist(), reference.weights[token].tolist())
                wanted = sorted(pair for pair in named if pair[0] // per_rank == world.rank)
                pairs = zip(view.expert_ids[n].tolist(), view.weights[n].tolist())
                assert sorted(pair for pair in pairs if pair != (-1, 0.0)) == wanted
            transformed = reference.partial(world.rank, tokens)[0]
        else:
            counts = torch.tensor(reference.counts(world.rank))
            own = torch.tensor(shape.experts_of(world.rank))
            assert torch.equal(view.expert_ids, own.repeat_interleave(counts))
            parts = [reference.of_expert(e, reference.tokens_of(e)) for e in shape.experts_of(world.rank)]
            transformed = torch.cat(parts)
        out = backend.combine_transformed(problem, handle, transformed)
        assert reference.wrong_sums(world.rank, out, world.nodes)[0] == 0
        # As in CollectiveX's loops: combine again by the same handle, of what came.
        for _ in range(2):
            backend.stage(problem, handle)
            out = backend.combine(problem, handle).double()
        ids = reference.ids[world.rank * 7 : world.rank * 7 + 7]
        ranks = torch.tensor([len({e // per_rank for e in row}) for row in ids.tolist()])
        factor = ranks if mode == "normal" else given.weights.double().sum(1)
        wanted = given.x.double() * factor[:, None]
        assert ((out - wanted).abs() <= 3 * 2.0**-8 * wanted.abs() + 1e-6).all()
        world.barrier()

    rig.in_ranks(tokenyard.World.threads(3), rank)


@pytest.mark.parametrize("mode", ["normal", "low-latency"])
def test_collectivex_makes_a_buffer_anew(mode, monkeypatch):
    worlds = iter([tokenyard.World.threads(1)[0], tokenyard.World.threads(1)[0]])
    monkeypatch.setattr(collectivex.TokenyardBackend, "world", lambda self: next(worlds))
    backend = collectivex.TokenyardBackend(types.SimpleNamespace(mode=mode), 0, 1, 0, "cpu")
    x, ids = torch.randn(7, 64).bfloat16(), torch.tensor([[0, 5]] * 7)
    problem = backend.make_problem(7, ids, torch.ones(7, 2), x)
    with pytest.raises(RuntimeError, match="there is no buffer: call create_buffer first"):
        backend.dispatch(problem)
    for experts in (6, 9):
        backend.create_buffer(types.SimpleNamespace(hidden=64, experts=experts, topk=2, max_tokens_per_rank=7))
        handle = backend.dispatch(problem)
        counts = backend.inspect_dispatch(problem, handle).local_expert_counts
        assert counts.tolist() == [7 * (e in (0, 5)) for e in range(experts)]


def test_a_rank_of_compare_that_is_killed_is_named(monkeypatch, capsys):
    def spawn(*given, **named):
        raise torch.multiprocessing.ProcessExitedException("process 1 terminated with signal SIGKILL", 1, 7, -9, "SIGKILL")

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    monkeypatch.setattr(sys, "argv", ["compare", *SMALL])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert ended.value.code == 1 and capsys.readouterr().err == "compare.py: rank 1 ended: process 1 terminated with signal SIGKILL\n"


def test_collectivex_refuses_other_modes():
    with pytest.raises(ValueError, match="args.mode is 'other': give one of normal, low-latency"):
        collectivex.TokenyardBackend(types.SimpleNamespace(mode="other"), 0, 1, 0, "cpu")
