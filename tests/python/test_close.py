"""Worlds and contexts that are closed, in any order; exceptions and formats in other processes; what gc collects."""

import copy
import gc
import itertools
import pickle
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import tokenyard
from rig import Case, in_ranks


def alone(**more):
    case = Case(ranks=1)
    return case, tokenyard.AllToAll(tokenyard.World.threads(1)[0], **(case.limits | more))


def test_calls_on_a_closed_context_and_a_closed_world_say_so():
    case = Case(ranks=1)
    x, ids, weights = case.x[0], case.ids[0], case.weights[0]
    with tokenyard.World.threads(1)[0] as world:
        with tokenyard.AllToAll(world, **case.limits) as ep:
            got = ep.dispatch(x, ids, weights)
            output = ep.output(x)[0]
            assert not ep.closed
        assert ep.closed
        # The world goes on, and another context of it.
        assert world.all_gather(b"on") == [b"on"]
        other = tokenyard.AllToAll(world, **case.limits)
    calls = [
        lambda: ep.dispatch(x, ids, weights), lambda: ep.dispatch(x, ids, weights, exact=True),
        lambda: ep.dispatch_into(output, x, ids, weights), lambda: ep.dispatch_send(x, ids, weights),
        lambda: ep.combine(got.rows, got.handle), lambda: ep.combine_send(got.rows, got.handle),
        lambda: ep.dispatch_again(got.handle, x, got.rows), ep.check, ep.silent_ranks, lambda: ep.rank_mask,
        lambda: ep.mask_rank(0), world.barrier, lambda: world.all_gather(b""), lambda: world.regroup(1, [0]),
        lambda: tokenyard.AllToAll(world, **case.limits),
    ]
    for call in calls:
        with pytest.raises(tokenyard.ClosedError, match="is closed") as raised:
            call()
        assert isinstance(raised.value, RuntimeError) and raised.value.fatal
    # What is known stays known, and closing again is nothing.
    assert (world.rank, world.size, world.local_rank, world.generation) == (0, 1, 0, 0) and "closed" in repr(world)
    assert (ep.rounds, ep.local_experts, ep.capacity()) == (other.rounds, other.local_experts, other.capacity())
    ep.close(), world.close()
    # A context outlives the world that made it.
    again = other.dispatch(x, ids, weights)
    np.testing.assert_array_equal(other.combine(again.rows, again.handle), other.combine(again.rows, again.handle))
    with pytest.raises(ZeroDivisionError), other:
        raise ZeroDivisionError
    assert other.closed


@pytest.mark.parametrize("order", [*itertools.permutations(["context", "world", "handle", "half"])])
def test_things_are_closed_in_any_order(order):
    case, given = Case(ranks=1), {}
    given["world"] = tokenyard.World.threads(1)[0]
    given["context"] = tokenyard.AllToAll(given["world"], **case.limits)
    given["handle"] = given["context"].dispatch(case.x[0], case.ids[0], case.weights[0])
    given["half"] = given["context"].dispatch_send(case.x[0], case.ids[0], case.weights[0])
    for name in order:
        thing = given.pop(name)
        if name in ("context", "world"):
            thing.close(), thing.close()
        del thing


def test_a_context_is_closed_after_the_call_of_another_thread():
    case = Case(ranks=2)
    limits, met = case.limits | {"timeout": 1.5}, []

    def rank(world):
        ep = tokenyard.AllToAll(world, **limits)
        if world.rank == 1:
            world.barrier()
            return

        def call():
            with pytest.raises(tokenyard.TimeoutError):
                ep.dispatch(case.x[0], case.ids[0], case.weights[0])
            met.append("call")

        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.3)
        ep.close()
        met.append("close")
        thread.join()
        with pytest.raises(tokenyard.ClosedError):
            ep.check()
        world.barrier()

    in_ranks(tokenyard.World.threads(2), rank)
    assert sorted(met) == ["call", "close"]


def test_closed_contexts_give_their_memory_back_while_their_objects_live():
    case = Case(ranks=1)
    kept = []

    def some(n):
        for _ in range(n):
            ep = tokenyard.AllToAll(tokenyard.World.threads(1)[0], **(case.limits | {"max_tokens_per_rank": 2048}))
            ep.dispatch(case.x[0], case.ids[0], case.weights[0])
            ep.close()
            kept.append(ep)
        gc.collect()
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * 4096

    before, after = some(10), some(60)
    assert after < before + (16 << 20), (before, after)


def test_the_child_of_a_fork_closes_nothing():
    program = """
import os, sys, numpy as np, tokenyard
given = np.zeros((4, 64), np.float32), np.zeros((4, 2), np.int32) + [0, 3], np.ones((4, 2), np.float32)
limits = dict(hidden=64, experts=4, top_k=2, max_tokens_per_rank=4, device="cpu", dtype="fp32", timeout=2.0)
with tokenyard.World.threads(1)[0] as world, tokenyard.AllToAll(world, **limits) as ep:
    child = os.fork()
    if child == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ep.dispatch(*given)
    world.barrier()
print("right")
"""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "right\n", "")


@pytest.mark.parametrize("with_context", [False, True])
def test_a_world_that_its_own_all_gather_refers_to_is_collected(with_context):
    class Group:
        def gather(self, what, own, seconds):
            return [own]

    group = Group()
    group.world = tokenyard.World.over(0, 1, group.gather)
    assert group.world.all_gather(b"one") == [b"one"]
    case = Case(ranks=1)
    ep = tokenyard.AllToAll(group.world, **case.limits) if with_context else None
    gone = weakref.ref(group)
    gc.collect()
    assert gone() is not None and group.world.all_gather(b"two") == [b"two"]
    del group
    gc.collect()
    assert gone() is None
    if ep is not None:
        ep.dispatch(case.x[0], case.ids[0], case.weights[0])


def test_all_gathers_of_worlds_that_call_each_other_are_their_own():
    calls = []

    def inner(what, own, seconds):
        calls.append("inner")
        return [own]

    def outer(what, own, seconds):
        calls.append("outer")
        return world.all_gather(own)

    world = tokenyard.World.over(0, 1, inner)
    other = tokenyard.World.over(0, 1, outer)
    calls.clear()
    assert other.all_gather(b"own") == [b"own"] and calls == ["outer", "inner"]
    world.close()
    with pytest.raises(tokenyard.BootstrapError) as raised:
        other.barrier()
    assert isinstance(raised.value.__cause__, tokenyard.ClosedError)


@pytest.mark.parametrize("exact", [False, True])
def test_exceptions_go_to_other_processes_without_what_belongs_to_a_context(exact):
    case, ep = alone()
    with pytest.raises(tokenyard.RoutingError) as raised:
        ep.dispatch(case.x[0], np.full_like(case.ids[0], 99), case.weights[0], exact=exact)
    error = raised.value
    for copied in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(copied) is tokenyard.RoutingError and str(copied) == str(error)
        assert (copied.rank, copied.epoch, copied.fatal) == (0, 1, False)
        assert not any(hasattr(copied, name) for name in ("handle", "sent", "dispatched"))
    assert error.dispatched.handle is not None
    ep.combine(error.dispatched.rows, error.dispatched.handle)


def test_a_format_is_copied_and_goes_to_other_processes():
    format = tokenyard.Format(512, 7, dtype="fp8", scales="ue8m0", quantize=True, combine_dtype="fp16", weights="none")
    for copied in (pickle.loads(pickle.dumps(format)), copy.deepcopy(format), copy.copy(format)):
        assert copied == format and repr(copied) == repr(format)
    for thing in (alone()[1], tokenyard.World.threads(1)[0]):
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(thing)
