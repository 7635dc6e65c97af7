"""Ranks on several hosts, simulated on one: buffers and layers of engines, whose code is the same as on one host.

Ranks are forks of a program, in gloo groups, whose nodes `TOKENYARD_NODES` names, or whose hosts a test names. What
calls must return is in the tests of one host, which run here over nodes.
"""

import importlib
import json
import logging
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback

import pytest

import tokenyard
from rig import has_libfabric, in_ranks, the_torch
from tokenyard import _hosts, _worlds

torch = the_torch()

RANKS = 4
ROOT = pathlib.Path(__file__).resolve().parents[2]
SIMULATED = "simulated:seed=5"


# The ranks of a scenario


def fork_all(ranks, work, seconds):
    """Runs `work(rank)` in forks of this process; what each returns, or the text of what it raised; None of a rank that
    ended without a word."""
    fork = multiprocessing.get_context("fork")
    reports = [fork.Pipe(False) for _ in range(ranks)]

    def run(rank):
        try:
            reports[rank][1].send(["returned", work(rank)])
        except BaseException as error:
            traceback.print_exc()
            reports[rank][1].send([type(error).__name__, str(error)])
        finally:
            sys.stderr.flush()
            os._exit(0)

    processes = [fork.Process(target=run, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for _, sender in reports:
        sender.close()
    end, results = time.monotonic() + seconds, []
    for report, _ in reports:
        try:
            came = report.poll(max(end - time.monotonic(), 0.0))
            results.append(report.recv() if came else ["hung", f"more than {seconds} s"])
        except EOFError:
            results.append(None)
    for process in processes:
        process.join(1)
        process.kill()
        process.join()
    return results


def grouped(scenario, nodes, network, folder):
    """The work of a rank of a scenario."""

    def work(rank):
        import torch.distributed as dist

        for name, value in (("TOKENYARD_NODES", nodes), ("TOKENYARD_NETWORK", network)):
            value = value(rank) if callable(value) else value
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        store = dist.FileStore(os.path.join(folder, "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        made = scenario(rank)
        if scenario not in (killed, shrunk):
            dist.barrier()
        return made

    return work


def as_ranks_of(name):
    """A file of tests whose ranks are this process's, and their world that of the group."""
    tests = importlib.import_module(name)

    def in_threads(_device, ranks, work):
        assert ranks == RANKS
        if name == "test_deep_ep":
            # As engines do, which know no World.
            import torch.distributed as dist

            return work(dist.group.WORLD)
        return work(tokenyard.World.from_group())

    tests.in_threads = in_threads
    return tests


def buffers():
    """Every kind of call of all buffers."""
    deep = as_ranks_of("test_deep_ep")
    deep.RANKS, deep.LOCAL = RANKS, deep.EXPERTS // RANKS
    deep.Tokens.__init__.__defaults__ = ((9, 0, 5, 12), *deep.Tokens.__init__.__defaults__[1:])
    deep.in_world.__defaults__ = (RANKS,)
    for kind, duplicates in (("bf16", False), ("fp32", True), ("ue8m0", False)):
        deep.test_normal_calls(kind, duplicates)
    deep.test_dispatch_by_a_handle_and_to_ranks()
    deep.test_normal_calls_without_a_wait_for_counts()
    for fp8, how in (deep.WAYS[0], deep.WAYS[1], deep.WAYS[3]):
        for hooks in (False, True):
            deep.test_low_latency_calls(fp8, how, hooks)
    elastic = as_ranks_of("test_elastic")
    elastic.test_ranks_alignments_and_experts_named_twice(RANKS, 16, True)
    elastic.test_ranks_alignments_and_experts_named_twice(RANKS, 1, False)
    hybrid = as_ranks_of("test_hybrid")
    hybrid.test_permuted(RANKS, 16)
    hybrid.test_by_handle_and_backward(RANKS)
    hybrid.test_rows_by_rank(RANKS)
    return tokenyard.World.from_group().nodes


def a_trip(buffer, tokens=3, experts=8, low_latency=False):
    """Dispatch and combine of ones times the rank and one; each expert's rank adds its number."""
    rank, size = buffer.rank, buffer.group_size
    x = torch.full((tokens, 128), rank + 1.0, dtype=torch.bfloat16)
    ids = torch.arange(tokens * 2).view(tokens, 2) % experts
    ones = torch.ones(ids.shape)
    if low_latency:
        got, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, 16, experts, use_fp8=False)
        y, _, _ = buffer.low_latency_combine(got * 2, ids, ones, handle)
        assert torch.equal(y, x * 4)
        return handle
    of_rank, _, of_expert, named, _ = buffer.get_dispatch_layout(ids, experts)
    got, _, _, _, handle, _ = buffer.dispatch(
        x, num_tokens_per_rank=of_rank, is_token_in_rank=named, num_tokens_per_expert=of_expert, topk_idx=ids,
        topk_weights=ones,
    )
    y, _, _ = buffer.combine(got * (rank + 1), handle)
    wanted = x * (named * torch.arange(1, size + 1)).sum(1, keepdim=True)
    assert torch.equal(y, wanted.bfloat16())
    return handle


def group_buffer(group=None, **how):
    import torch.distributed as dist
    from tokenyard import deep_ep

    deep_ep.Buffer.timeout_seconds = 20.0
    return deep_ep.Buffer(group if group is not None else dist.group.WORLD, **how)


def raised(work):
    """The class and text of what `work` raises."""
    try:
        work()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def dist_barrier():
    import torch.distributed as dist

    dist.barrier()


# Scenarios


def every_call(rank):
    return buffers()


def layers(rank):
    """The contexts of transformers' and vLLM's own backends. Expert e multiplies by e + 1."""
    import torch.distributed as dist
    from tokenyard import ops
    from tokenyard._errors import Found
    from tokenyard.integrations import transformers, vllm

    group, experts, draw = dist.group.WORLD, 8, torch.Generator().manual_seed(rank)
    tokens = (5, 0, 200, 2)[rank]
    x, weights = torch.randn((tokens, 64), generator=draw), torch.rand((tokens, 2), generator=draw)
    ids = torch.rand((tokens, experts), generator=draw).argsort(1)[:, :2]
    wanted = x * (weights * (ids + 1)).sum(1, keepdim=True)
    exchange = transformers._exchange((group, 64, experts, 2, "fp32", "cpu"), 20.0)
    # Twice: the second time with more tokens than the context has room for.
    for count in (min(tokens, 100), tokens):
        got, local = exchange.dispatch(x[:count], ids[:count], weights[:count], Found())
        # Rows that no token has are 0; weights are applied in combine.
        y = ops.combine(got.rows * (rank * experts // RANKS + local + 1), got)
        torch.testing.assert_close(y, wanted[:count], rtol=1e-5, atol=1e-5)

    class Base:
        def __init__(self, cpu_group, tcp_store_group=None):
            self.cpu_group = cpu_group

    manager = type("Manager", (vllm._Manager, Base), {})(group)
    for backend in (vllm.HIGH_THROUGHPUT, vllm.LOW_LATENCY):
        (ep,) = manager.get_handle(
            dict(backend=backend, hidden=64, experts=experts, top_k=2, tokens=256, dtype="fp32", fp8=False, device="cpu")
        )
        low = backend == vllm.LOW_LATENCY
        numbers = torch.tensor(ep.local_experts) + 1
        got = ep.dispatch(x, ids, None if low else weights, layout="masked" if low else "token")
        if low:
            y = ep.combine(got.rows * numbers[:, None, None], got.handle, topk_weights=weights)
        else:
            here = got.token_experts >= 0
            factor = torch.where(here, numbers[got.token_experts.clamp(min=0).long()] * got.token_weights, 0.0)
            y = ep.combine(got.rows * factor.sum(1, keepdim=True), got.handle)
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    found = len(_hosts._OPENED)
    dist_barrier()
    manager.destroy()
    del ep, got, exchange
    return [found, len(_hosts._OPENED)]


def lifetimes(rank):
    """Buffers share a proxy, and give it up in any order."""
    found = {}
    first, second = group_buffer(), group_buffer()
    kept = a_trip(first)
    a_trip(second, low_latency=True)
    found["shared"] = len(_hosts._OPENED)
    first.destroy()
    a_trip(second)
    found["with one destroyed"] = len(_hosts._OPENED)
    second.destroy()
    found["with all destroyed"] = len(_hosts._OPENED)
    del kept, first, second
    # On some ranks an old buffer lives on, whose peers have gone: all ranks open another network.
    old = group_buffer()
    a_trip(old)
    dist_barrier()
    if rank % 2:
        del old
    new = group_buffer()
    a_trip(new)
    found["beside an old one"] = len(_hosts._OPENED)
    new.destroy()
    # A dropped buffer, without a call.
    buffer = group_buffer()
    del buffer
    return found


def many_contexts(rank):
    """More contexts than a proxy serves."""
    made = [group_buffer() for _ in range(3)]
    handles = [a_trip(buffer, low_latency=low) for buffer in made for low in (False, True)]
    for buffer in reversed(made):
        a_trip(buffer, low_latency=True)
        a_trip(buffer)
    return [len(_hosts._OPENED), len({id(handle.kept.ep) for handle in handles})]


def refused(rank):
    """What ranks do not agree on, or cannot open; the group is as good as before."""
    found = raised(group_buffer)
    tokenyard.set_network("simulated", seed=9)
    os.environ["TOKENYARD_NODES"] = "2,2"
    buffer = group_buffer()
    a_trip(buffer)
    assert buffer._world.nodes == [2, 2]
    return found


def killed(rank):
    """A rank ends in the middle of a job."""
    tokenyard.set_network("simulated", silence=1.5)
    buffer = group_buffer()
    buffer._normal._timeout = 6.0
    a_trip(buffer)
    # What it sent may still be on its way when its own trip has ended.
    dist_barrier()
    if rank == RANKS - 1:
        os._exit(0)
    began = time.monotonic()
    found = raised(lambda: a_trip(buffer))
    return [*found, time.monotonic() - began]


def shrunk(rank):
    """A rank ends in the middle of a job, and low-latency calls go on without it: nothing else is lost, of whichever
    node."""
    tokenyard.set_network("simulated", silence=1.5)
    buffer = group_buffer(enable_shrink=True)
    buffer._low_latency._timeout = 2.0
    a_trip(buffer)
    a_trip(buffer, low_latency=True)
    dist_barrier()
    if rank == RANKS - 1:
        os._exit(0)
    x = torch.full((3, 128), rank + 1.0, dtype=torch.bfloat16)
    ids, ones, mask = torch.arange(6).view(3, 2) % 8, torch.ones(3, 2), torch.zeros(RANKS, dtype=torch.int32)
    # Two experts of each rank. In the first call the last rank is silent; in later ones it is masked from the start.
    for _ in range(3):
        got, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, 16, 8, use_fp8=False)
        assert counts.tolist() == [RANKS - 1] * 2, counts
        y, _, _ = buffer.low_latency_combine(got * 2, ids, ones, handle)
        assert torch.equal(y, x * 2 * (ids < 6).sum(1, keepdim=True)), y[:, 0]
        buffer.low_latency_query_mask_buffer(mask)
        assert mask.tolist() == [0, 0, 0, 1], mask
    return [buffer._world.nodes, len(_hosts._OPENED)]


def by_hosts(rank):
    """Nodes are hosts, which ranks report."""
    import torch.distributed as dist

    found = {}
    for name, hosts in (("two", "aabb"), ("uneven", "abbb"), ("mixed", "abab")):
        _worlds.host = lambda hosts=hosts: hosts[rank]
        made = []
        error = raised(lambda: made.append(tokenyard.World.from_group()))
        found[name] = error or [made[0].nodes, made[0].local_rank]
    _worlds.host = lambda: "aabb"[rank]
    # Part of the ranks, across hosts and on one.
    for members in ([1, 2], [2, 3]):
        group = dist.new_group(members)
        if rank in members:
            buffer = group_buffer(group)
            a_trip(buffer, low_latency=True)
            found[str(members)] = [buffer._world.nodes, len(_hosts._OPENED)]
            buffer.destroy()
    dist.barrier()
    # The variable, which counts ranks of the job.
    os.environ["TOKENYARD_NODES"] = "1,1,1,1"
    found["one node each"] = tokenyard.World.from_group().nodes
    os.environ["TOKENYARD_NODES"] = "2,2"
    part = dist.new_group([1, 2])
    found["part"] = tokenyard.World.from_group(part).nodes if rank in (1, 2) else None
    os.environ["TOKENYARD_NODES"] = "4"
    found["a node of two hosts"] = raised(tokenyard.World.from_group)
    return found


def automatic(rank):
    """Without a network stated: the first of EFA, verbs and TCP that all ranks can open, and what is logged."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tokenyard").addHandler(handler)
    buffer = group_buffer()
    a_trip(buffer)
    without_nics = [list(lines), [opened.network for opened in _hosts._OPENED]]
    buffer.destroy()
    lines.clear()
    # NICs that are there, and cannot be opened.
    _hosts._nics = lambda: ["efa", "verbs"] if rank else ["verbs"]
    buffer = group_buffer()
    a_trip(buffer)
    return [without_nics, [list(lines), [opened.network for opened in _hosts._OPENED]]]


def one_named(other, rank=2):
    """The network of all ranks but one."""
    return lambda own: other if own == rank else SIMULATED


TCP = "tcp:source=127.0.0.1,silence=10"
SCENARIOS = {
    "simulated 2,2": (every_call, "2,2", SIMULATED),
    "simulated 1,3": (every_call, "1,3", SIMULATED),
    "tcp 3,1": (every_call, "3,1", TCP),
    "layers": (layers, "1,3", SIMULATED),
    "lifetimes": (lifetimes, "2,2", SIMULATED),
    "lifetimes tcp": (lifetimes, "2,2", TCP),
    "many contexts": (many_contexts, "2,2", SIMULATED),
    "another network": (refused, "2,2", one_named(TCP)),
    "another seed": (refused, "2,2", one_named("simulated:seed=6")),
    "no network": (refused, "2,2", one_named("ib")),
    "no option": (refused, "2,2", one_named("tcp:nic=1")),
    "no number": (refused, "2,2", one_named("tcp:nics=two")),
    "no device": (refused, "2,2", "verbs:names=no-such-device"),
    "no address of one": (refused, "2,2", lambda rank: "tcp:source=203.0.113.77" if rank == 2 else "tcp:source=127.0.0.1"),
    "other nodes": (refused, lambda rank: "2,2" if rank else "1,3", SIMULATED),
    "other ranks": (refused, "2,3", SIMULATED),
    "killed": (killed, "2,2", SIMULATED),
    "shrunk": (shrunk, "2,2", SIMULATED),
    "by hosts": (by_hosts, None, SIMULATED),
    "automatic": (automatic, "2,2", None),
}


def program(names):
    """Runs scenarios, and prints what their ranks returned."""
    torch.set_num_threads(1)
    # Once, before the forks.
    for module in ("torch.testing", "tokenyard.deep_ep", "tokenyard.integrations.transformers", "tokenyard.integrations.vllm"):
        importlib.import_module(module)

    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            results = fork_all(RANKS, grouped(*SCENARIOS[name], folder), 100)
            print(json.dumps([name, results]), flush=True)
            print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


@pytest.fixture(scope="module")
def ran():
    """What ranks returned, by scenario."""
    libfabric = has_libfabric()
    names = [name for name, (_, _, network) in SCENARIOS.items() if libfabric or network == SIMULATED]
    made = subprocess.run([sys.executable, __file__, *names], capture_output=True, text=True, timeout=600)
    results = dict(json.loads(line) for line in made.stdout.splitlines() if line.startswith("["))

    def of(name):
        if name not in names:
            pytest.skip("install libfabric")
        assert name in results, made.stderr
        return results[name], made.stderr

    return of


def returned(ran, name):
    """What each rank returned."""
    results, errors = ran(name)
    assert all(result is not None and result[0] == "returned" for result in results), (results, errors)
    return [result[1] for result in results]


@pytest.mark.parametrize("name", ["simulated 2,2", "simulated 1,3", "tcp 3,1"])
def test_all_buffers_between_nodes(ran, name):
    assert returned(ran, name) == [[int(size) for size in name.split()[1].split(",")]] * RANKS


def test_layers_of_engines_between_nodes(ran):
    assert returned(ran, "layers") == [[1, 0]] * RANKS


@pytest.mark.parametrize("name", ["lifetimes", "lifetimes tcp"])
def test_buffers_share_a_proxy_and_the_last_one_gives_it_up(ran, name):
    for rank, found in enumerate(returned(ran, name)):
        assert found == {
            "shared": 1, "with one destroyed": 1, "with all destroyed": 0, "beside an old one": 2 - rank % 2,
        }


def test_more_contexts_than_a_proxy_serves(ran):
    assert returned(ran, "many contexts") == [[2, 6]] * RANKS


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("another network", "ConfigError", "simulated, seed=5 on ranks 0, 1, 3; tcp, silence=10.0 on rank 2: set"),
        ("another seed", "ConfigError", "simulated, seed=5 on ranks 0, 1, 3; simulated, seed=6 on rank 2: set"),
        ("no network", "ConfigError", "rank 2: TOKENYARD_NETWORK is 'ib': give one of auto, verbs"),
        ("no option", "ConfigError", "rank 2: TOKENYARD_NETWORK is 'tcp:nic=1': give OPTION=VALUE for 'nic=1'"),
        ("no number", "ConfigError", "rank 2: TOKENYARD_NETWORK is 'tcp:nics=two': nics is a number, and 'two' is none"),
        ("no device", "TransportError", ""),
        ("other nodes", "ConfigError", "TOKENYARD_NODES is '1,3' on rank 0; '2,2' on ranks 1, 2, 3: give"),
        ("other ranks", "ConfigError", "TOKENYARD_NODES is 2,3: give sizes of at least 1 that add up to the 4 ranks"),
    ],
)
def test_what_ranks_do_not_agree_on_is_an_error_on_all(ran, name, kind, text):
    found = returned(ran, name)
    assert all(each is not None and each[0] == kind and text in each[1] for each in found), found


def test_a_network_that_one_rank_cannot_open_is_an_error_on_all(ran):
    found = returned(ran, "no address of one")
    assert [kind for kind, _ in found] == ["TransportError"] * RANKS
    for rank in (0, 1, 3):
        assert found[rank][1].startswith("rank 2 could not open the network tcp: ") and found[2][1] in found[rank][1]


def test_a_rank_that_is_killed_is_missed_by_all(ran):
    results, errors = ran("killed")
    assert results[-1] is None, results
    for result in results[:-1]:
        assert result[0] == "returned", (results, errors)
        kind, text, seconds = result[1]
        assert kind in ("PeerLostError", "TimeoutError") and seconds < 40, result
    # The rank of the other node with the same place writes to it, and so knows which one is lost.
    kind, text, _ = results[1][1]
    assert kind == "PeerLostError" and "lost rank 3" in text


def test_a_rank_that_is_killed_is_gone_on_without(ran):
    results, errors = ran("shrunk")
    assert results == [*[["returned", [[2, 2], 1]]] * 3, None], (results, errors)


def test_nodes_are_the_hosts_that_ranks_report(ran):
    for rank, found in enumerate(returned(ran, "by hosts")):
        assert found["two"] == [[2, 2], rank % 2] and found["uneven"] == [[1, 3], max(rank - 1, 0)]
        kind, text = found["mixed"]
        assert kind == "ConfigError" and "ranks 0 and 2 of the group are of one node" in text
        assert found.get("[1, 2]") == ([[1, 1], 1] if rank in (1, 2) else None)
        assert found.get("[2, 3]") == ([[2], 0] if rank > 1 else None)
        assert found["one node each"] == [1] * 4 and found["part"] == ([1, 1] if rank in (1, 2) else None)
        kind, text = found["a node of two hosts"]
        assert kind == "ConfigError" and "has ranks 1 and 2 of the group in one node" in text


def test_the_network_is_chosen_where_none_is_stated(ran):
    for rank, ((lines, networks), (more, others)) in enumerate(returned(ran, "automatic")):
        assert networks == others == ["tcp"]
        if rank:
            # One rank warns for all.
            assert not lines and not more
            continue
        assert len(lines) == 1 and "TCP links them" in lines[0]
        # The warning about TCP comes once, and only networks that all ranks have NICs for are tried.
        assert len(more) == 1 and more[0].startswith("the network verbs is left out: ")


EXIT = """
import os, sys, time
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
rank = int(sys.argv[3])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
from test_hosts import a_trip, group_buffer
buffer = group_buffer()
handle = a_trip(buffer)
low = a_trip(buffer, low_latency=True)
# The other rank is still in its last call when this one ends, which destroys nothing.
last = a_trip(buffer, tokens=40)
print("right", flush=True)
if rank == 0:
    sys.exit(0)
import tokenyard._hosts
assert len(tokenyard._hosts._CONTEXTS) >= 2
"""


def test_an_interpreter_ends_with_buffers_alive(tmp_path):
    tests = str(pathlib.Path(__file__).parent)
    env = os.environ | {"TOKENYARD_NODES": "1,1", "TOKENYARD_NETWORK": SIMULATED, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", EXIT, tests, str(tmp_path / "store"), str(rank)], env=env, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=60)
        assert rank.returncode == 0 and out == "right\n", err


# On one process


def test_ranks_that_are_threads_have_nodes_of_their_world():
    tokenyard.set_network("simulated", seed=3)
    try:
        from tokenyard import deep_ep

        def work(world):
            world = world.with_nodes([1, 2])
            buffer = deep_ep.Buffer(world)
            a_trip(buffer, experts=6)
            a_trip(buffer, experts=6, low_latency=True)
            hybrid = deep_ep.HybridEPBuffer(world, 128, 16, 2)
            places = (hybrid.num_of_nodes, hybrid.node_rank, hybrid.local_rank, hybrid.num_of_hybrid_ep_ranks_per_nvlink_domain)
            elastic = deep_ep.ElasticBuffer(world.with_nodes([1, 1, 1]), num_bytes=0)
            with pytest.raises(tokenyard.ConfigError, match="enable_shrink is .*: give the same on all ranks"):
                deep_ep.Buffer(world, enable_shrink=world.rank != 1)
            return [*places, elastic.get_physical_domain_size(), elastic.get_logical_domain_size()]

        found = in_ranks(tokenyard.World.threads(3), work)
    finally:
        tokenyard.set_network(None)
    assert found == [[2, 0, 0, 1, (3, 1), (1, 3)], [2, 1, 0, 2, (3, 1), (1, 3)], [2, 1, 1, 2, (3, 1), (1, 3)]]


def test_more_tokens_than_nodes_have_room_for_are_not_asked_for():
    worlds = tokenyard.World.threads(3)
    assert [worlds[0].with_nodes(nodes).most_tokens for nodes in ([3], [1, 2], [1, 1, 1])] == [1 << 20, 132095, 88063]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (dict(network="ib"), "network is 'ib': give one of auto, verbs, efa, tcp, shm, simulated"),
        (dict(network="verbs", nics=0), "network has nics=0: give 1 to 4"),
        (dict(network="verbs", nics="2"), "network has nics='2': give a whole number"),
        (dict(network="verbs", nics=1.5), "network has nics=1.5: give a whole number"),
        (dict(network="tcp", silence=0), "network has silence=0: give 0.2 to 86400"),
        (dict(network="tcp", silence=float("inf")), "network has silence=inf: give 0.2 to 86400"),
        (dict(network="tcp", silence="3"), "network has silence='3': give a number"),
        (dict(network="simulated", seed=1 << 64), "network has seed=18446744073709551616: give 0 to"),
        (dict(network="tcp", core=True), "network has core=True: give a whole number"),
        (dict(network="tcp", source=5), "network has source=5: give the text of a local address"),
        (dict(network="verbs", names="mlx5_0"), "network has names='mlx5_0': give a list of names"),
        (dict(network="verbs", names=[5]), "network has names=.5.: give a list of names"),
        (dict(network="verbs", names=[]), "network has names=..: give a list of names"),
    ],
)
def test_what_set_network_refuses(given, text):
    with pytest.raises((TypeError, ValueError), match=text):
        tokenyard.set_network(**given)
    assert _hosts._CHOSEN == [None]


def test_options_of_the_variable(monkeypatch):
    monkeypatch.setenv("TOKENYARD_NETWORK", "verbs:names=mlx5_0+mlx5_1,nics=2,silence=2.5,core=3")
    assert _hosts._stated() == ("verbs", {"names": ["mlx5_0", "mlx5_1"], "nics": 2, "silence": 2.5, "core": 3})
    assert _hosts._stated().terms() == "verbs, nics=2, silence=2.5"
    monkeypatch.setenv("TOKENYARD_NETWORK", "")
    assert _hosts._stated() == ("auto", {})
    monkeypatch.delenv("TOKENYARD_NETWORK")
    assert _hosts._stated() == ("auto", {})


def test_tcp_takes_an_address_that_other_hosts_reach(monkeypatch):
    ways = []
    monkeypatch.setattr(_hosts, "_toward", lambda other: ways.append(other) or "10.0.0.1")
    here, there = {"host": "a", "address": "127.0.0.1"}, {"host": "b", "address": "10.0.0.2"}
    assert _hosts._source(here, [here, here, there]) == "10.0.0.1" and ways == ["10.0.0.2"]
    assert _hosts._source(there, [here, there]) == "10.0.0.2"
    # All on one host, as simulated nodes are; none known.
    assert _hosts._source(here, [here, here]) == "127.0.0.1" and ways == ["10.0.0.2"]
    nothing = {"host": "b", "address": None}
    assert _hosts._source(nothing, [here, nothing]) is None and _hosts._source(here, [here, nothing]) is None


def test_nics_near_a_gpu():
    record = str(ROOT / "tests" / "data" / "topology" / "p5")
    assert _hosts.near("0000:64:00.0", "--from", record) == ["rdmap96s0", "rdmap97s0", "rdmap98s0", "rdmap99s0"]
    assert _hosts.near("0000:00:00.0", "--from", record) == []


def test_nics_of_a_rank_are_of_its_network_and_near_its_gpu(monkeypatch):
    """Stand-ins for a GPU and NICs; the proxy notes what it is given."""
    from types import SimpleNamespace as Things

    numbers = Things(pci_domain_id=0, pci_bus_id=0x64, pci_device_id=0)
    made, near = [], {"0000:64:00.0": ["rdmap96s0", "mlx5_9", "rdmap97s0"]}
    monkeypatch.setattr(_hosts.sys.modules["torch"].cuda, "get_device_properties", lambda gpu: {3: numbers}[gpu])
    monkeypatch.setattr(_hosts, "_kinds", lambda: {"rdmap96s0": "efa", "rdmap97s0": "efa", "mlx5_9": "verbs"})
    monkeypatch.setattr(_hosts, "near", near.get)
    monkeypatch.setattr(_hosts, "Proxy", lambda world, network, **options: made.append((network, options)) or Things())
    world = tokenyard.World.threads(1)[0]
    hosts = _hosts.Hosts(world)
    for stated, network, gpu, nics, names in (
        ({}, "efa", 3, 2, ["rdmap96s0", "rdmap97s0"]), ({}, "verbs", 3, 1, ["mlx5_9"]), ({}, "efa", None, 1, []),
        ({"names": list("abcdef")}, "efa", 3, 4, list("abcdef")), ({"nics": 3}, "efa", 3, 3, ["rdmap96s0", "rdmap97s0"]),
        # Of TCP, where no RDMA NIC serves: others refuse what they would leave unread.
        ({"source": "10.0.0.5"}, "verbs", 3, 1, ["mlx5_9"]),
    ):
        hosts._network, hosts._here = _hosts._Network("auto", stated), 8
        opened = hosts._open_one(network, gpu)
        assert made.pop() == (network, dict(silence=10.0, spinners=16, gpu=gpu, nics=nics, names=names))
        # A context on another GPU needs another proxy, one on the CPU does not; nor does one of another statement.
        asked = [opened.serves(world, hosts._network, other) for other in (gpu, None, 5)]
        assert asked == [True, True, False] and not opened.serves(world, _hosts._Network("auto", {"nics": 4}), gpu)


if __name__ == "__main__":
    program(sys.argv[1:] or SCENARIOS)
