"""Dispatch and combine through arrays of numpy, element by element against a plain reference."""

import time

import numpy as np
import pytest

import tokenyard
from rig import Case, in_ranks, poisoned

BOUND = 1e-5


def check_rows(case, ep, rows, counts, begin):
    for i, expert in enumerate(ep.local_experts):
        wanted = case.rows_of(expert)
        assert counts[i] == len(wanted)
        np.testing.assert_array_equal(rows[begin(i) : begin(i) + counts[i]], wanted)


@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("align", [1, 8])
def test_contiguous_rows_and_sums(ids, align):
    case = Case()

    def rank(world):
        ep = tokenyard.AllToAll(world, **case.limits)
        r = world.rank
        for _ in range(3):
            got = ep.dispatch(case.x[r], case.ids[r].astype(ids), case.weights[r], layout="contiguous", align=align)
            assert all(at % align == 0 for at in got.offsets)
            check_rows(case, ep, got.rows, got.counts, lambda i: got.offsets[i])
            for i, expert in enumerate(ep.local_experts):
                part = slice(got.offsets[i], got.offsets[i] + got.counts[i])
                got.rows[part] = case.expert(expert, got.rows[part])
            out = poisoned((case.tokens, case.hidden))
            assert ep.combine(got.rows, got.handle, out) is out
            np.testing.assert_allclose(out[: case.count[r]], case.sums(r), rtol=BOUND, atol=BOUND)
            assert np.isnan(out[case.count[r] :]).all()
        world.barrier()

    in_ranks(tokenyard.World.threads(case.ranks), rank)


def test_masked_rows_in_halves():
    case = Case(seed=2)

    def rank(world):
        ep = tokenyard.AllToAll(world, **case.limits)
        r = world.rank
        output, got = ep.output(case.x[r], layout="masked")
        sent = ep.dispatch_send(case.x[r], case.ids[r], case.weights[r])
        handle = ep.dispatch_recv(sent, output)
        with pytest.raises(ValueError, match="sent was received already"):
            ep.dispatch_recv(sent, output)
        for i, expert in enumerate(ep.local_experts):
            wanted = case.rows_of(expert)
            assert got.counts[i] == len(wanted)
            np.testing.assert_array_equal(got.rows[i, : got.counts[i]], wanted)
            got.rows[i, : got.counts[i]] = case.expert(expert, got.rows[i, : got.counts[i]])
        out = np.zeros((case.count[r], case.hidden), dtype=np.float32)
        for times in (1, 2):
            ep.combine_recv(ep.combine_send(got.rows, handle), out, accumulate=times == 2)
            np.testing.assert_allclose(out, times * case.sums(r), rtol=BOUND, atol=BOUND)
        world.barrier()

    in_ranks(tokenyard.World.threads(case.ranks), rank)


def test_token_rows_and_weights_of_combine():
    case = Case(seed=3, ranks=2)

    def rank(world):
        ep = tokenyard.AllToAll(world, **case.limits)
        r = world.rank
        got = ep.dispatch(case.x[r], case.ids[r], case.weights[r], layout="token")
        here = [(s, t) for s in range(case.ranks) for t in range(case.count[s])
                if any(e >= 0 and case.owner(e) == r for e in case.ids[s][t])]
        rows = got.rows[: len(here)]
        np.testing.assert_array_equal(rows, [case.x[s][t] for s, t in here])
        sums = np.zeros_like(rows)
        for n, row in enumerate(rows):
            for local, weight in zip(got.token_experts[n], got.token_weights[n]):
                if local >= 0:
                    sums[n] += weight * case.expert(ep.local_experts[local], row)
        got.rows[: len(here)] = sums
        out = ep.combine(got.rows, got.handle, tokens=case.count[r])
        np.testing.assert_allclose(out, case.sums(r), rtol=BOUND, atol=BOUND)

        late = tokenyard.AllToAll(world, **case.limits, weights="combine")
        got = late.dispatch(case.x[r], case.ids[r])
        for i, expert in enumerate(late.local_experts):
            part = slice(got.offsets[i], got.offsets[i] + got.counts[i])
            got.rows[part] = case.expert(expert, got.rows[part])
        weights = np.zeros((case.count[r], case.top_k), dtype=np.float32)
        weights[:] = case.weights[r]
        out = late.combine(got.rows, got.handle, tokens=case.count[r], topk_weights=weights)
        np.testing.assert_allclose(out, case.sums(r), rtol=BOUND, atol=BOUND)
        world.barrier()

    in_ranks(tokenyard.World.threads(case.ranks), rank)


def test_slices_and_transposed_choices_need_no_copy():
    case = Case(seed=4, ranks=2)

    def rank(world):
        ep = tokenyard.AllToAll(world, **case.limits)
        r, n = world.rank, case.count[world.rank]
        wide = poisoned((n, case.hidden + 32))
        wide[:, : case.hidden] = case.x[r]
        ids = np.ascontiguousarray(case.ids[r].T).T
        weights = np.ascontiguousarray(case.weights[r].T).T
        got = ep.dispatch(wide[:, : case.hidden], ids, weights)
        check_rows(case, ep, got.rows, got.counts, lambda i: got.offsets[i])
        out = poisoned((n, case.hidden + 16))
        ep.combine(got.rows, got.handle, out[:, : case.hidden])
        weighted = [sum(case.weights[r][t, k] * (e >= 0) for k, e in enumerate(case.ids[r][t])) for t in range(n)]
        np.testing.assert_allclose(out[:, : case.hidden], case.x[r] * np.array(weighted).reshape(-1, 1), rtol=BOUND, atol=BOUND)
        assert np.isnan(out[:, case.hidden :]).all()
        world.barrier()

    in_ranks(tokenyard.World.threads(case.ranks), rank)


def test_quantised_rows_and_scales():
    """bf16 rows of small integers are exact in fp8 with their scales."""
    hidden, tokens = 256, 4

    def rank(world):
        ep = tokenyard.AllToAll(world, hidden=hidden, experts=2, top_k=1, max_tokens_per_rank=tokens, device="cpu",
                                dtype="fp8", scales="fp32", quantize=True)
        x = np.full((tokens, hidden), 448.0 if world.rank else -448.0, dtype=np.float32)
        bf16 = (x.view(np.uint32) >> 16).astype(np.uint16)
        got = ep.dispatch(bf16, np.full((tokens, 1), 1 - world.rank), np.ones((tokens, 1), dtype=np.float32))
        assert got.counts[0] == tokens
        assert (got.rows[:tokens] == (0xFE if world.rank else 0x7E)).all()
        np.testing.assert_array_equal(got.scales[:tokens], np.ones((tokens, 2), dtype=np.float32))
        world.barrier()

    in_ranks(tokenyard.World.threads(2), rank)


@pytest.mark.parametrize("layout", ["contiguous", "masked", "token"])
def test_exact_outputs_have_the_rows_that_come(layout):
    case = Case(seed=8)

    def rank(world):
        ep, r = tokenyard.AllToAll(world, **case.limits), world.rank
        got = ep.dispatch(case.x[r], case.ids[r], case.weights[r], layout=layout, align=4, exact=True)
        wanted = [case.rows_of(expert) for expert in ep.local_experts]
        np.testing.assert_array_equal(got.counts, [len(rows) for rows in wanted])
        if layout == "contiguous":
            assert len(got.rows) == sum(-(-len(rows) // 4) * 4 for rows in wanted)
            check_rows(case, ep, got.rows, got.counts, lambda i: got.offsets[i])
        elif layout == "masked":
            assert got.rows.shape[1] == max(len(rows) for rows in wanted)
            for i, rows in enumerate(wanted):
                np.testing.assert_array_equal(got.rows[i, : len(rows)], rows)
        else:
            here = [case.x[s][t] for s in range(case.ranks) for t in range(case.count[s])
                    if any(e >= 0 and case.owner(e) == r for e in case.ids[s][t])]
            np.testing.assert_array_equal(got.rows, here)
        world.barrier()

    in_ranks(tokenyard.World.threads(case.ranks), rank)


def test_new_rows_by_an_earlier_handle_and_payloads_of_combine():
    case = Case(seed=9)

    def rank(world):
        ep, r = tokenyard.AllToAll(world, **case.limits, payload_words=2 * case.top_k), world.rank
        got = ep.dispatch(case.x[r], case.ids[r], case.weights[r])
        rows = np.zeros_like(got.rows)
        ep.dispatch_again(got.handle, case.x[r] * 3, rows)
        payload = poisoned((len(rows), 2))
        for i, expert in enumerate(ep.local_experts):
            part = slice(got.offsets[i], got.offsets[i] + got.counts[i])
            np.testing.assert_array_equal(rows[part], case.rows_of(expert) * np.float32(3))
            payload[part] = np.stack([rows[part, 0] * (expert + 1), np.full(got.counts[i], -0.0, np.float32)], axis=1)
        n = case.count[r]
        gathered, summed = poisoned((n, case.top_k, 2)), poisoned((n, 2))
        ep.combine(rows, got.handle, tokens=n, payload=payload, payload_out=gathered)
        out = ep.combine(rows, got.handle, tokens=n, payload=payload, payload_out=summed)
        wanted = np.zeros((n, case.top_k, 2), dtype=np.float32)
        for t, k in np.ndindex(case.ids[r].shape):
            if (e := case.ids[r][t, k]) >= 0:
                wanted[t, k] = [case.x[r][t, 0] * np.float32(3) * np.float32(e + 1), -0.0]
        np.testing.assert_array_equal(gathered.view(np.uint32), wanted.view(np.uint32))
        np.testing.assert_allclose(summed, wanted.sum(1), rtol=BOUND, atol=BOUND)
        weighted = (case.weights[r] * (case.ids[r] >= 0)).sum(1, keepdims=True)
        np.testing.assert_allclose(out, 3 * case.x[r] * weighted, rtol=BOUND, atol=BOUND)
        with pytest.raises(ValueError, match="one of payload and payload_out is missing"):
            ep.combine(rows, got.handle, tokens=n, payload=payload)
        world.barrier()

    in_ranks(tokenyard.World.threads(case.ranks), rank)


def test_a_single_row_with_gaps_is_refused_and_nothing_is_stored_beside_it():
    case = Case(ranks=1)
    ep = tokenyard.AllToAll(tokenyard.World.threads(1)[0], **case.limits)
    ids, weights = case.ids[0][:1], case.weights[0][:1]
    wide = np.arange(case.hidden * 4, dtype=np.float32).reshape(case.hidden, 4)
    with pytest.raises(ValueError, match="x has the strides"):
        ep.dispatch(wide[:, :1].T, ids, weights)
    got = ep.dispatch(case.x[0][:1], ids, weights)
    with pytest.raises(ValueError, match="out has the strides"):
        ep.combine(got.rows, got.handle, wide[:, :1].T)
    np.testing.assert_array_equal(wide.ravel(), np.arange(wide.size))
    np.testing.assert_allclose(ep.combine(got.rows, got.handle), case.x[0][:1] * (weights * (ids >= 0)).sum(), rtol=BOUND)


def test_an_expert_named_several_times_fits_every_layout():
    tokens, limits = 3, dict(hidden=64, experts=2, top_k=3, max_tokens_per_rank=3, device="cpu", dtype="fp32",
                             combine_dtype="fp32", duplicates=True)
    ep = tokenyard.AllToAll(tokenyard.World.threads(1)[0], **limits)
    x = np.random.default_rng(1).standard_normal((tokens, 64)).astype(np.float32)
    ids, weights = np.ones((tokens, 3), dtype=np.int32), np.full((tokens, 3), 0.5, dtype=np.float32)
    for layout in ("contiguous", "masked"):
        got = ep.dispatch(x, ids, weights, layout=layout)
        assert got.counts.tolist() == [0, 9]
        np.testing.assert_allclose(ep.combine(got.rows, got.handle), 1.5 * x, rtol=BOUND)


def test_threads_of_one_context_get_the_errors_of_their_own_calls():
    case = Case(ranks=1)
    ep = tokenyard.AllToAll(tokenyard.World.threads(1)[0], **case.limits)
    bad = case.ids[0].copy()
    bad[0] = 1

    def thread(number):
        outcomes = []
        for _ in range(60):
            try:
                ep.dispatch(case.x[0], bad if number else case.ids[0], case.weights[0])
                outcomes.append(False)
            except tokenyard.RoutingError:
                outcomes.append(True)
        return outcomes

    right, wrong = in_ranks([0, 1], thread)
    assert not any(right) and all(wrong)


def test_exact_dispatches_of_several_threads_come_one_after_the_other():
    case = Case(ranks=1)
    ep = tokenyard.AllToAll(tokenyard.World.threads(1)[0], **case.limits)
    wanted = [len(case.rows_of(expert)) for expert in range(case.experts)]

    def thread(number):
        for step in range(60):
            got = ep.dispatch(case.x[0], case.ids[0], case.weights[0], exact=(number + step) % 3 != 0)
            assert list(got.counts) == wanted
        return None

    in_ranks([0, 1, 2], thread)
    # A call that fails lets go of the context, too.
    with pytest.raises(TypeError):
        ep.dispatch(case.x[0], None, case.weights[0], exact=True)
    in_ranks([0, 1], thread)


def test_new_rows_are_in_the_format_of_the_handles_dispatch():
    case = Case(ranks=1, seed=13)
    other = tokenyard.Format(case.hidden, case.tokens, dtype="fp16", combine_dtype="fp32")
    ep = tokenyard.AllToAll(tokenyard.World.threads(1)[0], **case.limits, room_for=[other])
    x = case.x[0].astype(np.float16)
    got = ep.dispatch(x, case.ids[0], case.weights[0], format=other)
    again = poisoned(got.rows.shape, np.float16)
    ep.dispatch_again(got.handle, -x, again)
    for i in range(len(ep.local_experts)):
        part = slice(int(got.offsets[i]), int(got.offsets[i] + got.counts[i]))
        np.testing.assert_array_equal(again[part], -got.rows[part])


def test_a_barrier_of_streams_waits_for_every_rank_and_names_one_that_is_missing():
    came, through = [], []

    def rank(world):
        with tokenyard.AllToAll(world, **Case().limits | {"timeout": 2.0}) as ep:
            world.barrier()
            if world.rank == 1:
                time.sleep(0.3)
                came.append(1)
            ep.barrier()
            through.append(list(came))
            world.barrier()
            if world.rank == 0:
                with pytest.raises(tokenyard.TimeoutError, match="barrier"):
                    ep.barrier()
            world.barrier()
        with pytest.raises(tokenyard.ClosedError):
            ep.barrier()

    in_ranks(tokenyard.World.threads(2), rank)
    assert through == [[1], [1]]
