"""Nodes that are linked by a network: ranks are processes of one host, and nodes groups of them."""

import json
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

import tokenyard
from rig import Case, free_port, has_libfabric, in_ranks, poisoned

SECONDS = 60


def rank_of(network, nodes, rank, size, folder):
    """One rank of a job whose ranks meet by files."""
    calls = iter(range(1000))

    def all_gather(what, own, seconds):
        return by_files(pathlib.Path(folder), next(calls), rank, size, own)

    world = tokenyard.World.over(rank, size, all_gather).with_nodes(nodes)
    assert world.nodes == nodes
    case = Case(ranks=size, seed=31)
    source = {"source": "127.0.0.1"} if network == "tcp" else {}
    proxy = tokenyard.Proxy(world, network, seed=5, spinners=size, silence=10, **source)
    ep = tokenyard.AllToAll(world, **case.limits | {"timeout": SECONDS}, proxy=proxy)
    for _ in range(3):
        got = ep.dispatch(case.x[rank], case.ids[rank], case.weights[rank])
        rows = poisoned(got.rows.shape)
        for i, expert in enumerate(ep.local_experts):
            part = slice(int(got.offsets[i]), int(got.offsets[i] + got.counts[i]))
            np.testing.assert_array_equal(got.rows[part], case.rows_of(expert))
            rows[part] = case.expert(expert, got.rows[part])
        sums = ep.combine(rows, got.handle)
        np.testing.assert_allclose(sums, case.sums(rank), rtol=2e-5, atol=2e-5)
    world.barrier()
    return repr(proxy)


def by_files(folder, call, rank, size, own):
    """An all-gather of processes of one host."""
    import time

    (folder / f"{call}-{rank}.part").write_bytes(own)
    (folder / f"{call}-{rank}.part").rename(folder / f"{call}-{rank}")
    deadline = time.monotonic() + SECONDS
    paths = [folder / f"{call}-{other}" for other in range(size)]
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} waited {SECONDS} s for an all-gather of files")
        time.sleep(0.002)
    return [path.read_bytes() for path in paths]


@pytest.mark.parametrize(("network", "nodes"), [("simulated", [1, 1]), ("simulated", [2, 1]), ("tcp", [1, 1])])
def test_ranks_of_several_nodes(network, nodes, tmp_path):
    if network == "tcp" and not has_libfabric():
        pytest.skip("install libfabric")
    size = sum(nodes)
    start = [[sys.executable, __file__, network, json.dumps(nodes), str(rank), str(size), str(tmp_path)] for rank in range(size)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in start]
    said = [rank.communicate(timeout=2 * SECONDS) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, said
    assert {out.strip() for out, _ in said} == {f"<tokenyard.Proxy over {network}>"}


def test_what_nodes_and_proxies_refuse():
    world = tokenyard.World.threads(1)[0]
    assert world.nodes == [1]
    with pytest.raises(tokenyard.ConfigError, match="nodes"):
        world.with_nodes([2])
    with pytest.raises(ValueError, match='network is "ib": give one of verbs, efa, tcp, shm, simulated'):
        tokenyard.Proxy(world, "ib")
    with pytest.raises(ValueError, match="silence is -1e0: give seconds"):
        tokenyard.Proxy(world, "simulated", silence=-1)
    with pytest.raises(tokenyard.TransportError):
        tokenyard.Proxy(world, "verbs", names=["no-such-device"])
    unread = [("simulated", "names", ["x"]), ("simulated", "source", "127.0.0.1"), ("simulated", "nics", 3), ("shm", "source", "x"),
              ("verbs", "source", "127.0.0.1"), ("tcp", "gpu", 0), ("shm", "names", ["x"])]
    for network, name, value in unread:
        with pytest.raises(tokenyard.ConfigError, match=f"{name} is given for (?i:{network}): leave it out, or use another"):
            tokenyard.Proxy(world, network, **{name: value})


@pytest.mark.parametrize(("name", "value", "bits"), [("n", -1, 64), ("n", 1 << 64, 64), ("nics", -1, 64), ("generation", 1 << 32, 32),
                                                     ("members", -1, 32), ("sizes", -1, 64), ("local_rank", -2, 64),
                                                     ("sms", 1 << 33, 32), ("placement", -1, 32), ("hidden", -1, 64)])
def test_numbers_that_are_none_are_named(name, value, bits):
    world = tokenyard.World.threads(1)[0]
    calls = {
        "n": tokenyard.World.threads, "nics": lambda given: tokenyard.Proxy(world, "simulated", nics=given),
        "generation": lambda given: world.regroup(given, [0]), "members": lambda given: world.regroup(1, [given]),
        "sizes": lambda given: world.with_nodes([given]), "hidden": lambda given: tokenyard.Format(given, 1),
        "local_rank": lambda given: tokenyard.World.over(0, 1, lambda _what, own, _seconds: [own], local_rank=given),
        "sms": lambda given: tokenyard.AllToAll(world, **Case(ranks=1).limits, sms=given),
        "placement": lambda given: tokenyard.AllToAll(world, **Case(ranks=1).limits, placement=[given] * 7),
    }
    with pytest.raises(ValueError, match=f"{name} is {value}: give 0 or more, and less than 2\\^{bits}"):
        calls[name](value)
    with pytest.raises(TypeError, match=f"{name} is a str: give a whole number"):
        calls[name]("one")


HANDLERS = """
import signal, tokenyard
def caught():
    with open("/proc/self/status") as status:
        mask = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))
    return [n for n in range(1, 32) if mask >> n - 1 & 1]
signal.signal(signal.SIGTERM, lambda *_: print("own", flush=True))
before = caught()
proxy = tokenyard.Proxy(tokenyard.World.threads(1)[0], "tcp", source="127.0.0.1")
assert caught() == before, (before, caught())
signal.raise_signal(signal.SIGTERM)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_network_leaves_handlers_of_signals_as_they_are():
    if not has_libfabric():
        pytest.skip("install libfabric")
    ended = subprocess.run([sys.executable, "-c", HANDLERS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "own\ninterrupted\n", "")


SURVIVORS = """
import os, tokenyard
world = tokenyard.World.from_env().with_nodes([1, 2])
world.barrier()
if world.rank == 1:
    os._exit(0)
left = world.regroup(1, [0, 2])
print(left.nodes, left.all_gather(b"%d" % world.rank))
"""


def test_survivors_of_nodes_that_a_program_stated_regroup():
    given = os.environ | {"TOKENYARD_PORT": free_port(), "WORLD_SIZE": "3", "TOKENYARD_TIMEOUT_MS": "20000"}
    ranks = [subprocess.Popen([sys.executable, "-c", SURVIVORS], env=given | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(3)]
    try:
        said = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in said] == ["[1, 1] [b'0', b'2']\n", "", "[1, 1] [b'0', b'2']\n"], said


class Ranks:
    """An all-gather of threads."""

    def __init__(self, size):
        self.parts, self.barrier = [b""] * size, threading.Barrier(size, timeout=20)

    def of(self, rank):
        def all_gather(what, own, seconds):
            self.parts[rank] = own
            self.barrier.wait()
            parts = list(self.parts)
            self.barrier.wait()
            return parts

        return all_gather


def test_survivors_of_a_world_over_an_all_gather_regroup():
    first, left = Ranks(3), Ranks(2)
    case = Case(ranks=3)

    def rank(number):
        world = tokenyard.World.over(number, 3, first.of(number))
        with pytest.raises(tokenyard.ConfigError, match="regroup over one of the members alone"):
            world.regroup(1, [0, 2])
        with pytest.raises(ValueError, match="group is given beside all_gather"):
            world.regroup(1, [0, 2], all_gather=first.of(number), group=object())
        if number == 1:
            return None
        survivors = world.regroup(1, [0, 2], all_gather=left.of(number // 2))
        ep = tokenyard.AllToAll(survivors, **case.limits)
        got = ep.dispatch(case.x[number], case.ids[number], case.weights[number])
        ep.combine(got.rows, got.handle)
        return survivors.rank, survivors.size, survivors.generation, survivors.all_gather(b"%d" % number)

    assert in_ranks(range(3), rank) == [(0, 2, 1, [b"0", b"2"]), None, (1, 2, 1, [b"0", b"2"])]


@pytest.mark.parametrize("anew", [False, True])
def test_survivors_between_nodes(anew):
    """With the proxies that they have, and with proxies that are opened over their world, in which rank 3 is rank 2."""
    first, left, members = Ranks(4), Ranks(3), [0, 1, 3]
    case = Case(ranks=4, experts=9)

    def rank(number):
        world = tokenyard.World.over(number, 4, first.of(number)).with_nodes([2, 2])
        proxy = tokenyard.Proxy(world, "simulated", spinners=4, silence=10)
        before = tokenyard.AllToAll(world, **case.limits, proxy=proxy)
        before.combine((got := before.dispatch(case.x[number], case.ids[number], case.weights[number])).rows, got.handle)
        if number not in members:
            return
        world = world.regroup(1, members, all_gather=left.of(members.index(number)))
        assert world.nodes == [2, 1]
        if anew:
            proxy = tokenyard.Proxy(world, "simulated", spinners=4, silence=10)
        ep = tokenyard.AllToAll(world, **case.limits, proxy=proxy)
        got = ep.dispatch(case.x[number], case.ids[number], case.weights[number])
        rows = poisoned(got.rows.shape)
        for i, expert in enumerate(ep.local_experts):
            assert case.owner(expert) == number
            part = slice(int(got.offsets[i]), int(got.offsets[i] + got.counts[i]))
            sources = [case.x[r][t] for r in members for t in range(case.count[r]) if expert in case.ids[r][t]]
            np.testing.assert_array_equal(got.rows[part], np.array(sources, np.float32).reshape(-1, case.hidden))
            rows[part] = case.expert(expert, got.rows[part])
        # Without what experts of the lost rank would add.
        wanted = np.zeros((case.count[number], case.hidden))
        for t, k in np.ndindex(case.ids[number].shape):
            e = case.ids[number][t, k]
            if e >= 0 and case.owner(e) in members:
                wanted[t] += case.weights[number][t, k].astype(np.float64) * case.expert(e, case.x[number][t])
        np.testing.assert_allclose(ep.combine(rows, got.handle), wanted, rtol=2e-5, atol=2e-5)

    in_ranks(range(4), rank)


if __name__ == "__main__":
    network, nodes, rank, size, folder = sys.argv[1:]
    print(rank_of(network, json.loads(nodes), int(rank), int(size), folder))
