"""`tokenyard.deep_ep`: what DeepEP's callers and its own tests expect, against plain definitions."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

import tokenyard
from rig import in_threads, settle
from rig import free_port

if os.environ.get("TOKENYARD_STRICT") == "1":
    import torch
else:
    torch = pytest.importorskip("torch")

from tokenyard import deep_ep  # noqa: E402: after torch, without which there is no such module

RANKS, EXPERTS, TOP_K, HIDDEN = 3, 12, 4, 512
LOCAL = EXPERTS // RANKS
# "cuda": all ranks share a GPU, each with streams of its own and a part of the multiprocessors.
DEVICE = os.environ.get("TOKENYARD_TEST_DEVICE", "cpu")


class Tokens:
    """Tokens of all ranks. Rows are multiples of 1/4, which every dtype holds."""

    def __init__(self, counts=(9, 0, 5), seed=1, duplicates=False):
        draw = np.random.default_rng(seed)
        self.counts = counts
        rows = [np.round(draw.standard_normal((n, HIDDEN)) * 4).astype(np.float32) / 4 for n in counts]
        weights = [np.ceil(draw.random((n, TOP_K), dtype=np.float32) * 8) / 8 for n in counts]
        choices = []
        for n in counts:
            ids = draw.integers(0, EXPERTS, (n, TOP_K))
            if not duplicates:
                ids = np.argsort(draw.random((n, EXPERTS)), axis=1)[:, :TOP_K]
            choices.append(np.where(draw.random((n, TOP_K)) < 0.2, -1, ids))
        self.x, self.weights, self.ids = ([torch.from_numpy(v).to(DEVICE) for v in of] for of in (rows, weights, choices))

    def named(self, rank):
        """Which tokens of a rank go to which ranks."""
        return torch.stack([((self.ids[rank] // LOCAL == r) & (self.ids[rank] >= 0)).any(1) for r in range(RANKS)], 1)

    def received(self, rank):
        """(source, token) of each row of a normal dispatch at a rank, in order."""
        return [(s, t) for s in range(RANKS) for t in range(self.counts[s]) if self.named(s)[t, rank]]

    def of_expert(self, expert):
        """(source, token) of each row of an expert, in order; once for each choice that names it."""
        return [(s, t) for s in range(RANKS) for t in range(self.counts[s]) for e in self.ids[s][t] if e == expert]


def as_input(x, kind):
    """Rows as callers give them: with scales in strides that are not those of rows."""
    if kind in ("bf16", "fp32", "fp16"):
        return x.to({"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[kind])
    rows, scales = quantized(x.bfloat16(), kind)
    return rows, scales.T.contiguous().T


def quantized(x, kind):
    """DeepSeek's quantisation by blocks of 128 columns, as docs/design.md has it. On the CPU: a GPU's torch divides by a
    number by multiplying with its inverse."""
    device, x = x.device, x.cpu()
    blocks = x.float().view(x.shape[0], x.shape[1] // 128, 128)
    amax = blocks.abs().amax(2).clamp(min=1e-4)
    scale = amax / 448
    # Not 448 / amax, of which torch makes a reciprocal and a product.
    inverse = torch.full_like(amax, 448) / amax
    if kind == "ue8m0" or kind == "rounded":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
        inverse = 1 / scale
    rows = (blocks * inverse[..., None]).to(torch.float8_e4m3fn).view(x.shape)
    if kind == "ue8m0":
        exponents = (scale.view(torch.int32) >> 23).to(torch.uint8)
        return rows.to(device), exponents.view(torch.int32).to(device)
    return rows.to(device), scale.to(device)


def bits(tensor):
    """Something that torch can compare."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def same(found, wanted):
    settle(DEVICE)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(bits(found.contiguous()), bits(wanted.contiguous().to(found.device)))


def in_world(work, ranks=RANKS, **how):
    deep_ep.Buffer.timeout_seconds = 20.0
    if DEVICE == "cuda":
        # What a test left in a cycle has multiprocessors.
        gc.collect()
        deep_ep.Buffer.set_num_sms(8)
        deep_ep.Buffer.low_latency_sms = 8
    try:
        in_threads(DEVICE, ranks, lambda world: work(deep_ep.Buffer(world, **how)))
    finally:
        deep_ep.Buffer.num_sms, deep_ep.Buffer._sms, deep_ep.Buffer.low_latency_sms = 20, None, None


def dispatched(buffer, tokens, x, weights=True, **how):
    r = buffer.rank
    of_rank, of_rdma_rank, of_expert, named, _ = buffer.get_dispatch_layout(tokens.ids[r], EXPERTS)
    nodes = buffer._world.nodes
    first_ranks = [sum(nodes[:node]) for node in range(len(nodes))]
    for node, first in enumerate(first_ranks if len(nodes) > 1 else []):
        there = set(range(first, first + nodes[node]))
        wanted = sum(bool(there & {e // LOCAL for e in ids if e >= 0}) for ids in tokens.ids[r].tolist())
        assert of_rdma_rank.dtype == torch.int32 and int(of_rdma_rank[node]) == wanted
    assert len(nodes) > 1 or of_rdma_rank is None
    given = dict(topk_idx=tokens.ids[r], topk_weights=tokens.weights[r] if weights else None) | how
    got = buffer.dispatch(
        x, num_tokens_per_rank=of_rank, is_token_in_rank=named, num_tokens_per_expert=of_expert, **given
    )
    settle(DEVICE)
    return got


def test_the_layout_of_a_dispatch():
    tokens = Tokens()

    def work(buffer):
        r = buffer.rank
        of_rank, _, of_expert, named, event = buffer.get_dispatch_layout(tokens.ids[r], EXPERTS, async_finish=True)
        event.current_stream_wait()
        same(named, tokens.named(r))
        same(of_rank, tokens.named(r).sum(0, dtype=torch.int32))
        same(of_expert, torch.stack([(tokens.ids[r] == e).sum(dtype=torch.int32) for e in range(EXPERTS)]))

    in_world(work)


@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32", "fp32 scales", "ue8m0"])
def test_normal_calls(kind, duplicates):
    tokens = Tokens(duplicates=duplicates)

    def work(buffer):
        r = buffer.rank
        given = as_input(tokens.x[r], kind)
        inputs = [as_input(x, kind) for x in tokens.x]
        for alignment in (1, 8):
            got, local, weights, counts, handle, event = dispatched(
                buffer, tokens, given, expert_alignment=alignment, async_finish=True, previous_event=buffer.capture()
            )
            event.current_stream_wait()
            settle(DEVICE)
            rows = tokens.received(r)
            members = list(zip(got, given)) if isinstance(given, tuple) else [(got, given)]
            for i, (member, own) in enumerate(members):
                of = [given[i] if isinstance(given, tuple) else given for given in inputs]
                wanted = torch.stack([bits(of[s])[t] for s, t in rows]) if rows else bits(own)[:0]
                assert member.dtype == own.dtype and torch.equal(bits(member), wanted)
            ids = torch.stack([tokens.ids[s][t] for s, t in rows])
            here = ids // LOCAL == r
            same(local, torch.where(here & (ids >= 0), ids - r * LOCAL, -1))
            of_rows = torch.stack([tokens.weights[s][t] for s, t in rows])
            assert torch.equal(weights[local >= 0], of_rows[local >= 0])
            plain = [len(tokens.of_expert(r * LOCAL + e)) for e in range(LOCAL)]
            assert counts == [-(-n // alignment) * alignment for n in plain]
            sources = [sum(s == source for s, _ in rows) for source in range(RANKS)]
            assert handle[0][:, r].tolist() == np.cumsum(sources).tolist()
            assert handle[3].tolist() == [t for _, t in rows]
            same(handle[4], tokens.named(r))
            first, *_, last = handle
            assert torch.equal(first, handle[0]) and last is None and torch.equal(handle[:2][0], first)
        combined(buffer, tokens, handle, rows, local, weights, kind)

    in_world(work)


def combined(buffer, tokens, handle, rows, local, weights, kind):
    """Sums over ranks of what each expert rank returns, of weights, and with biases."""
    r, dtype = buffer.rank, {"fp32": torch.float32, "fp16": torch.float16}.get(kind, torch.bfloat16)
    # Each rank returns its number plus one times the row, so sums tell ranks apart. All are exact in bf16.
    back = torch.stack([torch.round(tokens.x[s][t]) * (r + 1) for s, t in rows]).to(dtype)
    wanted = torch.round(tokens.x[r]) * (tokens.named(r) * torch.arange(1, RANKS + 1, device=DEVICE)).sum(1, keepdim=True)
    y, no_weights, _ = buffer.combine(back, handle)
    same(y, wanted.to(dtype))
    assert no_weights is None
    used = torch.where(local >= 0, weights, 0.0)
    ones = torch.ones_like(y)
    y, y_weights, event = buffer.combine(back, handle, topk_weights=used, bias=ones, async_finish=True)
    event.current_stream_wait()
    same(y, (wanted + 1).to(dtype))
    same(y_weights, torch.where(tokens.ids[r] >= 0, tokens.weights[r], 0.0))
    y, _, _ = buffer.combine(back, handle, bias=(ones, 2 * ones))
    same(y, (wanted + 3).to(dtype))


def test_dispatch_by_a_handle_and_to_ranks():
    tokens = Tokens(seed=2)

    def work(buffer):
        r = buffer.rank
        x = tokens.x[r].bfloat16()
        _, _, _, _, handle, _ = dispatched(buffer, tokens, x)
        # Its context stays: memory that is freed waits for the whole GPU, and so for calls of ranks that share it.
        first = handle
        rows = tokens.received(r)
        for dtype in (torch.bfloat16, torch.float32):
            if dtype == torch.float32:
                # Room for fp32 rows, which all ranks make.
                _, _, _, _, handle, _ = dispatched(buffer, tokens, tokens.x[r])
            again, *nothing, event = buffer.dispatch((-2 * tokens.x[r]).to(dtype), handle=handle)
            assert nothing == [None] * 4
            settle(DEVICE)
            handle.kept.ep.check()
            same(again, torch.stack([-2 * tokens.x[s][t] for s, t in rows]).to(dtype))
        got, local, weights, counts, handle, _ = dispatched(buffer, tokens, x, topk_idx=None, topk_weights=None)
        same(got, torch.stack([tokens.x[s][t] for s, t in rows]).bfloat16())
        assert local is None and weights is None
        y, _, _ = buffer.combine(got, handle)
        same(y, (tokens.x[r] * tokens.named(r).sum(1, keepdim=True)).bfloat16())
        assert first.kept.ep is not handle.kept.ep

    in_world(work)


@pytest.mark.parametrize("round_tokens", [16384, 200])
def test_a_rank_may_have_more_tokens_than_ever_before(round_tokens, monkeypatch):
    monkeypatch.setattr(deep_ep.Buffer, "round_tokens", round_tokens)

    def work(buffer):
        r = buffer.rank
        for seed, counts in enumerate([(3, 2, 1), (3, 700, 1), (130, 2, 900), (1, 0, 2000)]):
            tokens = Tokens(counts, seed=seed)
            for kind in ("bf16", "fp32 scales"):
                given = as_input(tokens.x[r], kind)
                got, _, _, _, handle, _ = dispatched(buffer, tokens, given)
                got = got[0] if isinstance(got, tuple) else got
                inputs = [as_input(x, kind) for x in tokens.x]
                inputs = [x[0] if isinstance(x, tuple) else x for x in inputs]
                rows = tokens.received(r)
                assert torch.equal(bits(got), torch.stack([bits(inputs[s])[t] for s, t in rows]))
            y, _, _ = buffer.combine(torch.ones((len(rows), HIDDEN), dtype=torch.bfloat16, device=DEVICE), handle)
            same(y, tokens.named(r).sum(1, keepdim=True).expand(-1, HIDDEN).bfloat16())

    in_world(work)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU a later call raises what this one found")
@pytest.mark.parametrize("wrong", [EXPERTS, EXPERTS + 1, EXPERTS + RANKS, 1 << 40])
def test_experts_that_are_none(wrong):
    tokens = Tokens(seed=10)
    right = Tokens(seed=10)
    tokens.ids[0][3, 1] = wrong
    # The others' dispatch goes on without this rank's tokens.
    right.ids[0][:] = -1

    def work(buffer):
        r = buffer.rank
        for low_latency, worst in ((False, 0), (False, 3 * 9), (True, 0)):
            failure = None
            try:
                if low_latency:
                    got = buffer.low_latency_dispatch(tokens.x[r].bfloat16(), tokens.ids[r], 16, EXPERTS, use_fp8=False)
                else:
                    got = dispatched(buffer, tokens, tokens.x[r].bfloat16(), num_worst_tokens=worst)
            except tokenyard.RoutingError as error:
                failure, got = error, error.dispatched
            assert (failure is not None) == (r == 0)
            if low_latency:
                rows, counts, handle, *_ = got
                assert counts.tolist() == [len(right.of_expert(r * LOCAL + e)) for e in range(LOCAL)]
                y, _, _ = buffer.low_latency_combine(torch.ones_like(rows), tokens.ids[r], tokens.weights[r], handle)
            else:
                rows, _, _, counts, handle, _ = got
                same(rows[: len(right.received(r))], torch.stack([right.x[s][t] for s, t in right.received(r)]).bfloat16())
                y, _, _ = buffer.combine(torch.ones_like(rows), handle)
                same(y, right.named(r).sum(1, keepdim=True).expand(-1, HIDDEN).bfloat16())
            assert y.shape == tokens.x[r].shape

    in_world(work)


def test_normal_calls_without_a_wait_for_counts():
    tokens = Tokens(seed=3)

    def work(buffer):
        r = buffer.rank
        x = tokens.x[r].bfloat16()
        rows, most = tokens.received(r), RANKS * max(tokens.counts)
        got, local, weights, counts, handle, _ = dispatched(buffer, tokens, x, num_worst_tokens=most)
        assert got.shape[0] == most and counts == []
        same(got[: len(rows)], torch.stack([tokens.x[s][t] for s, t in rows]).bfloat16())
        assert (local[len(rows) :] == -1).all()
        sources = [sum(s == source for s, _ in rows) for source in range(RANKS)]
        assert handle[0][:, r].tolist() == np.cumsum(sources).tolist()
        y, _, _ = buffer.combine(torch.full_like(got, 2.0), handle)
        same(y, (2 * tokens.named(r).sum(1, keepdim=True)).expand(-1, HIDDEN).bfloat16())
        buffer._open().barrier()
        if tokens.counts[r] > 1:
            with pytest.raises(ValueError, match=f"num_worst_tokens is 3, for 1 tokens of each of {RANKS} ranks, and x has"):
                dispatched(buffer, tokens, x, num_worst_tokens=3)

    in_world(work)


WAYS = [(False, {}), (True, {}), (True, {"round_scale": True}), (True, {"round_scale": True, "use_ue8m0": True})]


def low_latency(buffer, tokens, hooks, n=16, fp8=True, **how):
    """A checked dispatch; returns its handle."""
    r = buffer.rank
    x = tokens.x[r].bfloat16()
    totals = torch.full((LOCAL,), 100, dtype=torch.int32, device=DEVICE)
    times = torch.zeros(RANKS, dtype=torch.int64, device=DEVICE)
    got, counts, handle, event, hook = buffer.low_latency_dispatch(
        x, tokens.ids[r], n, EXPERTS, cumulative_local_expert_recv_stats=totals, dispatch_wait_recv_cost_stats=times,
        use_fp8=fp8, async_finish=not hooks, return_recv_hook=hooks, **how,
    )
    hook() if hooks else event.current_stream_wait()
    settle(DEVICE)
    rows, scales = got if fp8 else (got, None)
    assert rows.shape == (LOCAL, RANKS * n, HIDDEN) and handle[2:] == (n, HIDDEN, EXPERTS)
    kind = "ue8m0" if how.get("use_ue8m0") else "rounded" if how.get("round_scale") else "fp32 scales"
    for e in range(LOCAL):
        wanted = tokens.of_expert(r * LOCAL + e)
        assert int(counts[e]) == len(wanted) and int(totals[e]) == 100 + len(wanted)
        assert handle[0][e, : len(wanted)].tolist() == [t for _, t in wanted]
        begin = 0
        for s in range(RANKS):
            length = sum(source == s for source, _ in wanted)
            assert int(handle[1][e, s]) == (begin << 32 | length)
            begin += length
        plain = torch.stack([tokens.x[s][t] for s, t in wanted]).bfloat16() if wanted else x[:0]
        if fp8:
            of_row, of_scale = quantized(plain, kind)
            same(rows[e, : len(wanted)], of_row)
            same(scales[e, : len(wanted)], of_scale)
            assert scales.stride(1) == 1 and scales.stride(2) % 4 == 0
        else:
            same(rows[e, : len(wanted)], plain)
    assert (times >= 0).all()
    return handle


def low_latency_combined(buffer, tokens, handle, hooks, n=16):
    r = buffer.rank
    back = torch.full((LOCAL, RANKS * n, HIDDEN), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    for e in range(LOCAL):
        for place, (s, t) in enumerate(tokens.of_expert(r * LOCAL + e)):
            back[e, place] = torch.round(tokens.x[s][t]) * (r * LOCAL + e + 1)
    out = tokens.x[r].bfloat16() * float("nan") if hooks else None
    times = torch.zeros(RANKS, dtype=torch.int64, device=DEVICE)
    y, event, hook = buffer.low_latency_combine(
        back, tokens.ids[r], tokens.weights[r], handle, async_finish=not hooks, return_recv_hook=hooks, out=out,
        combine_wait_recv_cost_stats=times,
    )
    hook() if hooks else event.current_stream_wait()
    settle(DEVICE)
    assert out is None or y is out
    used = torch.where(tokens.ids[r] >= 0, tokens.weights[r], 0.0).double()
    terms = torch.round(tokens.x[r]).double().abs() * (used * (tokens.ids[r] + 1)).sum(1, keepdim=True)
    wanted = torch.round(tokens.x[r]).double() * (used * (tokens.ids[r] + 1)).sum(1, keepdim=True)
    # One rounding of each rank's sum to bf16, one of their sum.
    assert ((y.double() - wanted).abs() <= 2.0**-7 * terms).all()


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize(("fp8", "how"), WAYS)
def test_low_latency_calls(fp8, how, hooks):
    def work(buffer):
        for seed in (4, 5):
            tokens = Tokens(seed=seed, duplicates=seed == 5)
            low_latency_combined(buffer, tokens, low_latency(buffer, tokens, hooks, fp8=fp8, **how), hooks)

    in_world(work, low_latency_mode=True)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_low_latency_calls_of_a_kind_are_in_flight(order):
    batches = [Tokens(seed=10), Tokens(seed=11, counts=(16, 3, 2))]

    def work(buffer):
        r = buffer.rank
        sent = [buffer.low_latency_dispatch(tokens.x[r].bfloat16(), tokens.ids[r], 16, EXPERTS, use_fp8=False,
                                            return_recv_hook=True) for tokens in batches]
        for one in order:
            sent[one][-1]()
        sums = []
        for tokens, (rows, counts, handle, _, _) in zip(batches, sent):
            settle(DEVICE)
            back = torch.full_like(rows, float("nan"))
            for e in range(LOCAL):
                wanted = tokens.of_expert(r * LOCAL + e)
                assert int(counts[e]) == len(wanted)
                for place, (s, t) in enumerate(wanted):
                    same(rows[e, place], tokens.x[s][t].bfloat16())
                    back[e, place] = r * LOCAL + e + 1
            sums.append(buffer.low_latency_combine(back, tokens.ids[r], tokens.weights[r], handle, return_recv_hook=True))
        for one in order:
            sums[one][-1]()
        settle(DEVICE)
        for tokens, (y, _, _) in zip(batches, sums):
            wanted = (torch.where(tokens.ids[r] >= 0, tokens.weights[r], 0.0) * (tokens.ids[r] + 1)).sum(1, keepdim=True)
            assert ((y.float() - wanted).abs() <= 2.0**-7 * wanted).all()

    in_world(work, low_latency_mode=True)


def test_a_hook_waits_for_what_received_before_it(monkeypatch):
    from tokenyard.deep_ep import _buffer

    done = []

    class Event:
        def current_stream_wait(self):
            done.append("waited")

    def fails():
        raise tokenyard.OrderError("as a receive fails")

    monkeypatch.setattr(_buffer, "EventHandle", Event)
    early, late, failing = (_buffer._Hook(work) for work in (*2 * (lambda: done.append("received"),), fails))
    early.before_next()
    early.before_next()
    assert done == ["received"]
    early()
    assert done == ["received", "waited"]
    late()
    late.before_next()
    assert done == ["received", "waited", "received"]
    # Whoever sends the next call is not the one to learn of this.
    failing.before_next()
    with pytest.raises(tokenyard.OrderError, match="as a receive fails"):
        failing()


def test_low_latency_and_normal_calls_alternate_and_two_handles_live():
    first, second = Tokens(seed=6), Tokens(seed=7, counts=(16, 3, 2))

    def work(buffer):
        for _ in range(2):
            one = low_latency(buffer, first, True, fp8=False)
            two = low_latency(buffer, second, False)
            low_latency(buffer, second, True)
            _, _, _, _, handle, _ = dispatched(buffer, second, second.x[buffer.rank].bfloat16())
            buffer.clean_low_latency_buffer(16, HIDDEN, EXPERTS)
            low_latency_combined(buffer, second, two, True)
            low_latency_combined(buffer, first, one, False)
            settle(DEVICE)
            y, _, _ = buffer.combine(torch.ones((len(second.received(buffer.rank)), HIDDEN), device=DEVICE).bfloat16(), handle)
            settle(DEVICE)
            assert torch.equal(y[:, 0], second.named(buffer.rank).sum(1).bfloat16())
            assert buffer.get_next_low_latency_combine_buffer(one).shape == (LOCAL, 16 * RANKS, HIDDEN)

    in_world(work)


def test_a_masked_rank_is_gone_on_without():
    tokens = Tokens(seed=8, counts=(5, 4, 6))

    def work(buffer):
        mask = torch.full((RANKS,), -1, dtype=torch.int32, device=DEVICE)
        buffer.low_latency_query_mask_buffer(mask)
        assert mask.tolist() == [0, 0, 0]
        low_latency_combined(buffer, tokens, low_latency_of(buffer, tokens), True)
        buffer._open().barrier()
        if buffer.rank != 2:
            buffer.low_latency_update_mask_buffer(2, True)
            _, counts, handle, _, hook = buffer.low_latency_dispatch(
                tokens.x[buffer.rank].bfloat16(), tokens.ids[buffer.rank], 16, EXPERTS, return_recv_hook=True
            )
            hook()
            settle(DEVICE)
            assert counts.tolist() == [
                sum(s != 2 for s, _ in tokens.of_expert(buffer.rank * LOCAL + e)) for e in range(LOCAL)
            ]
            buffer.low_latency_query_mask_buffer(mask)
            assert mask.tolist() == [0, 0, 1]
            with pytest.raises(ValueError, match="rank 2 has been masked: it comes back by"):
                buffer.low_latency_update_mask_buffer(2, False)
        buffer._open().barrier()
        buffer.low_latency_clean_mask_buffer()
        low_latency_combined(buffer, tokens, low_latency_of(buffer, tokens), True)
        buffer.low_latency_query_mask_buffer(mask)
        assert mask.tolist() == [0, 0, 0]

    def low_latency_of(buffer, tokens):
        _, _, handle, _, hook = buffer.low_latency_dispatch(
            tokens.x[buffer.rank].bfloat16(), tokens.ids[buffer.rank], 16, EXPERTS, return_recv_hook=True
        )
        hook()
        return handle

    in_world(work, enable_shrink=True)


def test_size_hints_and_settings_are_deepeps():
    assert deep_ep.Buffer.get_low_latency_rdma_size_hint(1024, 6144, 8, 256) == 13_086_230_656
    config = deep_ep.Buffer.get_dispatch_config(8)
    assert (config.num_sms, config.num_max_nvl_chunked_send_tokens) == (20, 6)
    # By hand: 10 channels, 8 ranks: 5 words each, and 256 tokens of 14336 + 1024 + 512 + 512 + 8 bytes.
    wanted = 80 * 5 * 4 + 80 * 256 * (14336 + 2056)
    assert config.get_nvl_buffer_size_hint(14336, 8) == -(-wanted // 128) * 128
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0
    config = deep_ep.Buffer.get_combine_config(16)
    wanted = 20 * 18 * 2 * 4 + 20 * 132 * (14336 + 2056 + 16) * 2
    assert config.get_rdma_buffer_size_hint(14336, 16) == -(-wanted // 128) * 128
    for ranks in (1, 2, 3, 8, 12, 64, 160, 200):
        assert deep_ep.Buffer.get_dispatch_config(ranks).num_sms == 20
    with pytest.raises(ValueError, match="give an even number"):
        deep_ep.Buffer.set_num_sms(3)
    with pytest.raises(ValueError, match="num_max_rdma_chunked_send_tokens is 100: give at most half"):
        deep_ep.Config(20, 6, 256, 100, 100)


def test_what_is_refused():
    tokens = Tokens(counts=(4,), seed=9)

    def work(buffer):
        x, ids, w = tokens.x[0].bfloat16(), tokens.ids[0], tokens.weights[0]
        for argument in ("use_nvfp4", "x_global_scale"):
            with pytest.raises(NotImplementedError, match="use_nvfp4 and x_global_scale"):
                buffer.low_latency_dispatch(x, ids, 8, EXPERTS, **{argument: torch.ones(())})
        with pytest.raises(ValueError, match="use_ue8m0 is set: set use_fp8 and round_scale"):
            buffer.low_latency_dispatch(x, ids, 8, EXPERTS, use_ue8m0=True)
        with pytest.raises(TypeError, match="x is torch.float32: give torch.bfloat16"):
            buffer.low_latency_dispatch(x.float(), ids, 8, EXPERTS)
        _, _, handle, _, hook = buffer.low_latency_dispatch(x, ids, 8, EXPERTS, return_recv_hook=True)
        back = torch.zeros(EXPERTS, 8, HIDDEN, device=DEVICE).bfloat16()
        with pytest.raises(RuntimeError, match="handle is of a dispatch that was not received: call its hook first"):
            buffer.low_latency_combine(back, ids, w, handle)
        hook()
        with pytest.raises(ValueError, match="this hook was called already"):
            hook()
        for argument in ("use_logfmt", "overlap"):
            with pytest.raises(NotImplementedError, match=argument):
                buffer.low_latency_combine(back, ids, w, handle, **{argument: True})
        with pytest.raises(ValueError, match="topk_idx has 3 tokens: give the 4 of the dispatch"):
            buffer.low_latency_combine(back, ids[:3], w[:3], handle)
        with pytest.raises(TypeError, match="handle is a LowLatencyHandle: give what the dispatch of the same mode"):
            buffer.combine(x, handle)
        with pytest.raises(ValueError, match="num_experts is 0: give a multiple of the 1 ranks"):
            buffer.get_dispatch_layout(ids, 0)
        with pytest.raises(ValueError, match="is_token_in_rank or num_tokens_per_expert is missing"):
            buffer.dispatch(x, topk_idx=ids)
        with pytest.raises(ValueError, match="num_max_dispatch_tokens_per_rank is 2, and x has 4 tokens"):
            buffer.low_latency_dispatch(x, ids, 2, EXPERTS)
        buffer.destroy()
        with pytest.raises(RuntimeError, match="this Buffer was destroyed"):
            buffer.get_dispatch_layout(ids, EXPERTS)
        with pytest.raises(RuntimeError, match="this Buffer was destroyed"):
            buffer.low_latency_dispatch(x, ids, 8, EXPERTS)

    in_world(work, ranks=1)
    with pytest.raises(ValueError, match="group and comm are both missing"):
        deep_ep.Buffer(None)


PROCESS = """
import os, tokenyard
tokenyard.install_as("deep_ep")
import torch, torch.distributed as dist
from deep_ep import Buffer, Config, EventHandle, EventOverlap, topk_idx_t
from deep_ep.utils import EventOverlap as same
assert same is EventOverlap and topk_idx_t == torch.int64
dist.init_process_group("gloo")
buffer = Buffer(dist.group.WORLD, 1 << 20, 0, low_latency_mode=False, num_qps_per_rank=1, explicitly_destroy=True)
assert (buffer.rank, buffer.group_size, buffer.group) == (dist.get_rank(), 2, dist.group.WORLD)
x = torch.full((2 + buffer.rank, 16), 1.0 + buffer.rank).bfloat16()
ids = torch.tensor([[0, 3], [1, -1], [2, 3]])[: x.shape[0]]
of_rank, _, of_expert, named, event = buffer.get_dispatch_layout(ids, 4)
got, local, weights, counts, handle, event = buffer.dispatch(
    x, num_tokens_per_rank=of_rank, is_token_in_rank=named, num_tokens_per_expert=of_expert, topk_idx=ids,
    topk_weights=torch.ones_like(ids, dtype=torch.float32), config=Buffer.get_dispatch_config(2))
assert counts == [[2, 2], [1, 3]][buffer.rank], counts
y, _, _ = buffer.combine(got, handle)
assert torch.equal(y, x * named.sum(1, keepdim=True)), y
buffer.destroy()
dist.destroy_process_group()
print("right", flush=True)
"""


def test_an_engine_imports_deep_ep_over_a_group():
    port = free_port()
    common = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [subprocess.Popen([sys.executable, "-c", PROCESS], env=common | {"RANK": str(r), "LOCAL_RANK": str(r)},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r in range(2)]
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0 and out == "right\n", err
