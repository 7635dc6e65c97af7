"""Calls that go on without ranks: masked by a call, by an array, or by a deadline."""

import gc
import threading
import time

import numpy as np
import pytest

import tokenyard
from rig import Case, in_ranks, poisoned

BOUND = 1e-5


class Without:
    """What a case comes to without some ranks: as if their tokens and experts were not there."""

    def __init__(self, case, absent):
        self.case, self.absent = case, set(absent)

    def here(self, expert):
        """Source and token of each row of an expert, in order."""
        case = self.case
        return [(s, t) for s in range(case.ranks) if s not in self.absent for t in range(case.count[s]) if expert in case.ids[s][t]]

    def sums(self, rank):
        case, out = self.case, np.zeros((self.case.count[rank], self.case.hidden))
        for t, k in np.ndindex(case.ids[rank].shape):
            e = case.ids[rank][t, k]
            if e >= 0 and case.owner(e) not in self.absent:
                out[t] += case.weights[rank][t, k].astype(np.float64) * case.expert(e, case.x[rank][t])
        return out


def call(ep, case, r, absent, layout="contiguous"):
    """A dispatch and a combine, with every row and sum as if `absent` were not there."""
    left = Without(case, absent)
    got = ep.dispatch(case.x[r], case.ids[r], case.weights[r], layout=layout, also=["source", "row_expert", "source_ranges"])
    rows, sources = poisoned(got.rows.shape), got.also["source"].reshape(*got.rows.shape[:-1], 2)
    for i, expert in enumerate(ep.local_experts):
        wanted = left.here(expert)
        part = (i, slice(0, got.counts[i])) if layout == "masked" else slice(got.offsets[i], got.offsets[i] + got.counts[i])
        assert got.counts[i] == len(wanted), (r, expert, absent)
        np.testing.assert_array_equal(sources[part], np.reshape(wanted, (-1, 2)))
        np.testing.assert_array_equal(got.rows[part], np.reshape([case.x[s][t] for s, t in wanted], (-1, case.hidden)))
        for s in range(case.ranks):
            assert got.also["source_ranges"][i, s] & 0xFFFFFFFF == sum(source == s for source, _ in wanted)
        rows[part] = case.expert(expert, got.rows[part])
    out = ep.combine(rows, got.handle, poisoned((case.count[r], case.hidden)))
    np.testing.assert_allclose(out, left.sums(r), rtol=BOUND, atol=BOUND)


def make(world, case, missing="masked", **more):
    return tokenyard.AllToAll(world, **(case.limits | dict(missing_ranks=missing) | more))


@pytest.mark.parametrize("how", ["call", "array"])
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_masked_ranks_are_left_out_of_rows_and_sums(how, layout):
    case = Case(ranks=4, experts=9, seed=51)
    gone, left = threading.Event(), threading.Barrier(3)

    def rank(world):
        ep, r = make(world, case), world.rank
        assert np.asarray(ep.rank_mask).tolist() == [0] * 4 and np.asarray(ep.rank_mask).dtype == np.int32
        for _ in range(2):
            call(ep, case, r, [], layout)
        world.barrier()
        if r == 2:
            gone.wait(60)
            return
        if how == "call":
            ep.mask_rank(2)
        else:
            np.asarray(ep.rank_mask)[2] = -5
        for _ in range(3):
            call(ep, case, r, [2], layout)
        if how == "array":
            np.asarray(ep.rank_mask)[2] = 0  # for good, all the same
        call(ep, case, r, [2], layout)
        assert ep.silent_ranks() == []
        left.wait(60)
        gone.set()

    in_ranks(tokenyard.World.threads(case.ranks), rank)


def test_deadlines_mask_who_is_silent_and_say_so():
    case = Case(ranks=3, seed=52)
    gone, left = threading.Event(), threading.Barrier(2)

    def rank(world):
        ep, r = make(world, case, "masked_at_deadline", timeout=2.0), world.rank
        call(ep, case, r, [])
        if r == 1:
            gone.wait(60)
            return
        start = time.monotonic()
        call(ep, case, r, [1])
        assert 1.5 < time.monotonic() - start < 15
        start = time.monotonic()
        for _ in range(5):
            call(ep, case, r, [1])
        assert time.monotonic() - start < 8 and np.asarray(ep.rank_mask).tolist() == [0, 1, 0]
        assert [silent[0] for silent in ep.silent_ranks()] in ([1], [])
        noted = ep.silent_ranks()
        left.wait(60)
        gone.set()
        return noted

    noted = [silent for silent in in_ranks(tokenyard.World.threads(case.ranks), rank) if silent]
    assert noted and all(silent == [(1, "dispatch", 2)] for silent in noted)


def test_a_rank_that_leaves_between_dispatch_and_combine():
    case = Case(ranks=3, seed=53)
    gone, left = threading.Event(), threading.Barrier(2)

    def rank(world):
        ep, r = make(world, case, "masked_at_deadline", timeout=2.0), world.rank
        got = ep.dispatch(case.x[r], case.ids[r], case.weights[r])
        if r == 1:
            gone.wait(60)
            return
        rows = poisoned(got.rows.shape)
        for i, expert in enumerate(ep.local_experts):
            part = slice(got.offsets[i], got.offsets[i] + got.counts[i])
            np.testing.assert_array_equal(got.rows[part], case.rows_of(expert))
            rows[part] = case.expert(expert, got.rows[part])
        out = ep.combine(rows, got.handle, poisoned((case.count[r], case.hidden)))
        np.testing.assert_allclose(out, Without(case, [1]).sums(r), rtol=BOUND, atol=BOUND)
        left.wait(60)
        gone.set()
        return ep.silent_ranks()

    silent = sum([found for found in in_ranks(tokenyard.World.threads(case.ranks), rank) if found], [])
    assert silent and set(silent) == {(1, "combine", 1)}


def test_a_mask_of_another_thread_ends_a_wait():
    case = Case(ranks=2, seed=54)
    gone = threading.Event()

    def rank(world):
        ep = make(world, case, timeout=30.0)
        if world.rank == 1:
            gone.wait(60)
            return
        masks = threading.Timer(0.5, ep.mask_rank, [1])
        masks.start()
        start = time.monotonic()
        call(ep, case, 0, [1])
        assert 0.2 < time.monotonic() - start < 10
        masks.join()
        gone.set()

    in_ranks(tokenyard.World.threads(2), rank)


def test_a_context_that_is_gone_is_masked_like_any_other():
    case = Case(ranks=3, seed=55)
    dropped, left = threading.Event(), threading.Barrier(2)

    def rank(world):
        ep, r = make(world, case), world.rank
        call(ep, case, r, [])
        if r == 2:
            del ep
            gc.collect()
            dropped.set()
            return
        dropped.wait(60)
        ep.mask_rank(2)
        for _ in range(20):
            call(ep, case, r, [2])
        left.wait(60)

    in_ranks(tokenyard.World.threads(3), rank)


def test_all_others_are_silent():
    case = Case(ranks=4, seed=56)
    gone = threading.Event()

    def rank(world):
        ep = make(world, case, "masked_at_deadline", timeout=0.4)
        if world.rank != 3:
            gone.wait(60)
            return
        for _ in range(2):
            call(ep, case, 3, [0, 1, 2])
        assert ep.silent_ranks() == [(0, "dispatch", 1), (1, "dispatch", 1), (2, "dispatch", 1)]
        gone.set()

    in_ranks(tokenyard.World.threads(4), rank)


def test_the_mask_lives_as_long_as_what_holds_it():
    case = Case(ranks=1, seed=57)
    ep = make(tokenyard.World.threads(1)[0], case)
    mask = ep.rank_mask
    array = np.asarray(mask)
    with pytest.raises(AttributeError, match="on another device"):
        mask.__cuda_array_interface__
    array[0] = 1  # its own entry, which no call reads
    call(ep, case, 0, [])
    del ep
    gc.collect()
    array[0] = 7
    assert np.asarray(mask).tolist() == [7]
    del mask
    gc.collect()
    filler = [np.full(1, 3, dtype=np.int32) for _ in range(1000)]
    array[0] = 8
    assert array.tolist() == [8] and all(part[0] == 3 for part in filler)


def test_masks_that_cannot_be_are_refused():
    case = Case(ranks=1, seed=58)
    fatal = make(tokenyard.World.threads(1)[0], case, "fatal")
    for wrong in (lambda: fatal.rank_mask, lambda: fatal.mask_rank(0)):
        with pytest.raises(tokenyard.ArgumentError, match="without missing_ranks"):
            wrong()
    assert fatal.silent_ranks() == []
    ep = make(tokenyard.World.threads(1)[0], case)
    with pytest.raises(tokenyard.ArgumentError, match="it is this rank"):
        ep.mask_rank(0)
    with pytest.raises(tokenyard.ArgumentError, match="not in this world"):
        ep.mask_rank(1)
    for number in (-1, 2**32):
        with pytest.raises(ValueError, match=f"rank is {number}: give 0 or more, and less than 2\\^32"):
            ep.mask_rank(number)
    got = ep.dispatch(case.x[0], case.ids[0], case.weights[0])
    with pytest.raises(tokenyard.ArgumentError, match="accumulate"):
        ep.combine(got.rows, got.handle, np.zeros_like(case.x[0]), accumulate=True)
    with pytest.raises(tokenyard.ConfigError, match="dispatches by earlier handles|missing_ranks"):
        ep.dispatch_again(got.handle, case.x[0], got.rows)
    call(ep, case, 0, [])
    for more in (dict(payload_words=2), dict(dispatch_payload_words=2), dict(partial="fp8"), dict(round_tokens=2)):
        with pytest.raises(tokenyard.ConfigError, match="missing"):
            make(tokenyard.World.threads(1)[0], case, **more)


def test_ranks_that_wait_for_each_other_wait_as_long_as_the_calls_do():
    """Both show signs of life, so that each counts as missing for the other after eight deadlines."""
    case = Case(ranks=2, seed=59)

    def rank(world):
        ep, r = make(world, case, "masked_at_deadline", timeout=0.5), world.rank
        got = ep.dispatch(case.x[r], case.ids[r], case.weights[r])
        start = time.monotonic()
        if r == 0:
            call(ep, case, r, [1])
        else:
            out = ep.combine(np.ones_like(got.rows), got.handle)
            own = (case.weights[r] * (case.ids[r] >= (case.experts + 1) // 2)).sum(1, keepdims=True)
            np.testing.assert_allclose(out, own.repeat(case.hidden, 1), rtol=BOUND, atol=BOUND)
        assert time.monotonic() - start < 15
        call(ep, case, r, [1 - r])
        world.barrier()

    in_ranks(tokenyard.World.threads(2), rank)
