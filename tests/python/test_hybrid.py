"""`tokenyard.deep_ep.HybridEPBuffer` against plain definitions: every row, probability and sum of tokens by a map."""

import itertools
import os
import sys

import numpy as np
import pytest

import tokenyard
from rig import in_threads, settle

if os.environ.get("TOKENYARD_STRICT") == "1":
    import torch
else:
    torch = pytest.importorskip("torch")

from tokenyard import deep_ep  # noqa: E402: after torch, without which there is no such module

HIDDEN, LOCAL = 256, 3
# "cuda": all ranks share a GPU, each with streams of its own and a part of the multiprocessors.
DEVICE = os.environ.get("TOKENYARD_TEST_DEVICE", "cpu")
# Ranks learn soon that another one failed.
deep_ep.HybridEPBuffer.timeout_seconds = 15.0


class Tokens:
    """Tokens of all ranks: of each rank some that go to no expert, to one and to all. Rows and probabilities are
    multiples of 1/4 and 1/64, so that sums are exact in any order."""

    def __init__(self, ranks, counts=None, density=0.3, seed=1):
        draw = np.random.default_rng(seed)
        self.ranks, self.experts = ranks, ranks * LOCAL
        self.counts = counts or [9, 0, 5, 17, 2, 1, 12, 3][:ranks]
        self.map, self.probs, self.x = [], [], []
        for count in self.counts:
            named = draw.random((count, self.experts)) < density
            named[0:1], named[2:3] = False, True
            self.map.append(torch.from_numpy(named).to(DEVICE))
            self.probs.append(torch.from_numpy(np.ceil(draw.random(named.shape) * 64).astype(np.float32) / 64 * named).to(DEVICE))
            rows = np.round(draw.standard_normal((count, HIDDEN)) * 4).astype(np.float32) / 4
            self.x.append(torch.from_numpy(rows).to(DEVICE))

    def again(self, seed):
        """Other rows and probabilities of the same tokens."""
        other = Tokens(self.ranks, self.counts, seed=seed)
        other.map = self.map
        other.probs = [(probs + 1 / 64) * named for probs, named in zip(other.probs, self.map)]
        return other

    def places(self, rank, align=1):
        """What each permuted row of a rank is: (expert, source, token), or None of padding."""
        rows = []
        for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
            own = [(expert, s, t) for s in range(self.ranks) for t in range(self.counts[s]) if self.map[s][t, expert]]
            rows += own + [None] * (-len(own) % align)
        return rows

    def received(self, rank):
        """(source, token) of each row of a dispatch that does not permute."""
        own = slice(rank * LOCAL, (rank + 1) * LOCAL)
        return [(s, t) for s in range(self.ranks) for t in range(self.counts[s]) if self.map[s][t, own].any()]

    def counts_of(self, rank, align=1):
        """Rows of each expert of a rank, padded."""
        own = [int(sum(named[:, e].sum() for named in self.map)) for e in range(rank * LOCAL, (rank + 1) * LOCAL)]
        return [-(-rows // align) * align for rows in own]


def rows_of(of_source, places):
    """Rows at places, zeros where there is none. `of_source`: tensors of each rank."""
    like = of_source[0]
    rows = [torch.zeros(like.shape[1:], dtype=like.dtype) if p is None else of_source[p[-2]][p[-1]].cpu() for p in places]
    return torch.stack(rows) if rows else torch.zeros((0, *like.shape[1:]), dtype=like.dtype)


def probs_of(tokens, places):
    """The probability of each permuted row."""
    return torch.tensor([0.0 if p is None else tokens.probs[p[1]][p[2], p[0]].item() for p in places], dtype=torch.float32)


def same(found, wanted):
    """Whether tensors have the same bits."""
    found, wanted = found.cpu(), wanted.cpu()
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, (found.shape, wanted.shape, found.dtype)
    return found.numel() == 0 or torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def factor(expert):
    """What an expert multiplies its rows by: of each another number."""
    return float(expert % 7 + 1)


def sums(tokens, rank, x):
    """The sums of a rank's tokens where each expert multiplies by its factor, at f64."""
    factors = torch.tensor([factor(e) for e in range(tokens.experts)], dtype=torch.float64)
    return x[rank].cpu().double() * (tokens.map[rank].cpu() * factors).sum(1, keepdim=True)


# Where ranks share a GPU, the old and the new context of all of them fit.
def made(world, kind=deep_ep.HybridEPBuffer, **how):
    return kind(world, HIDDEN, 16, LOCAL, **{"num_sms_dispatch_api": 32 // world.size, **how})


def check_permuted(tokens, rank, got, align, dtype):
    """A dispatch with as many rows as come."""
    rows, probs, scales, counts, handle = got
    places = tokens.places(rank, align)
    settle(DEVICE)
    assert same(rows, rows_of([x.to(dtype) for x in tokens.x], places)) and scales is None
    assert probs is None or same(probs, probs_of(tokens, places))
    assert counts.tolist() == tokens.counts_of(rank, align) and counts.dtype == torch.int64
    assert handle[7].tolist() == tokens.counts_of(rank) and handle[8] == tokens.counts[rank]
    assert handle[3].tolist() == [len(tokens.received(rank))] and handle[-1].tolist() == [0]
    assert counts.device.type == handle[3].device.type == "cpu" and len(handle) == 11


def check_combined(buffer, tokens, rank, handle, places, dtype, x, rows, probs=None):
    """Experts multiply rows by their factors, and combine brings sums and, of `probs`, what belongs to each choice."""
    # What is in padding has no effect.
    of_row = torch.tensor([float("nan") if p is None else factor(p[0]) for p in places], device=DEVICE)
    outputs = (rows.float() * of_row[:, None]).to(dtype)
    out, back = buffer.combine_with_unpermute(hidden=outputs, probs=probs, handle=handle)
    settle(DEVICE)
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[dtype]
    exact = sums(tokens, rank, x)
    # One rounding of each rank's part and one of the sum; all terms have one sign.
    assert ((out.cpu().double() - exact).abs() <= 2.1 * unit * exact.abs()).all() and out.dtype == dtype
    assert out.shape == (tokens.counts[rank], HIDDEN)
    return back


@pytest.mark.parametrize("align", [None, 1, 16, 32, 128])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_permuted(ranks, align):
    tokens = Tokens(ranks)

    def work(world):
        rank, buffer = world.rank, made(world)
        places = tokens.places(rank, align or 1)
        for dtype, with_probs in ((torch.bfloat16, True), (torch.float32, True), (torch.float16, False)):
            got = buffer.dispatch_with_permute(
                hidden=tokens.x[rank].to(dtype), routing_map=tokens.map[rank], num_of_experts_per_rank=LOCAL,
                probs=tokens.probs[rank] if with_probs else None, pad_multiple=align,
            )
            assert (got[1] is not None) == with_probs
            check_permuted(tokens, rank, got, align or 1, dtype)
            back = check_combined(buffer, tokens, rank, got[4], places, dtype, tokens.x, got[0], got[1])
            assert back is None if got[1] is None else same(back, tokens.probs[rank])

    in_threads(DEVICE, ranks, work)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_by_handle_and_backward(ranks):
    """New rows go where the first ones went, and gradients of probabilities return to [tokens, experts]: a rank's own
    number for each of its rows, so that no two choices can be exchanged."""
    tokens, align = Tokens(ranks), 16
    new = tokens.again(seed=7)

    def work(world):
        rank, buffer = world.rank, made(world)
        x, named = tokens.x[rank].bfloat16(), tokens.map[rank]
        got = buffer.dispatch_with_permute(hidden=x, routing_map=named, probs=tokens.probs[rank], pad_multiple=align)
        handle, places = got[4], tokens.places(rank, align)
        number = {p: float(n + 1 + 1000 * rank) for n, p in enumerate(places) if p is not None}
        grads = torch.tensor([number.get(p, float("nan")) for p in places], device=DEVICE)
        back = check_combined(buffer, tokens, rank, handle, places, torch.bfloat16, tokens.x, got[0], grads)
        wanted, all_numbers = torch.zeros(tokens.map[rank].shape), {}
        for other in range(ranks):
            there = enumerate(tokens.places(other, align))
            all_numbers.update({p: float(n + 1 + 1000 * other) for n, p in there if p is not None})
        for (expert, source, token), value in all_numbers.items():
            if source == rank:
                wanted[token, expert] = value
        assert same(back, wanted)
        # The backward of a combine: rows by the handle, without routing; then with other probabilities, and more rows.
        more = buffer.dispatch_with_permute(
            hidden=new.x[rank].bfloat16(), handle=handle, pad_multiple=align, scaling_factor=None,
            num_permuted_tokens=torch.tensor(len(places)),
        )
        settle(DEVICE)
        assert same(more[0], rows_of([x.bfloat16() for x in new.x], places)) and more[1] is None
        assert more[3].tolist() == tokens.counts_of(rank, align) and more[4] is handle
        more = buffer.dispatch_with_permute(
            hidden=new.x[rank].bfloat16(), probs=new.probs[rank], handle=handle, num_permuted_tokens=len(places) + 5
        )
        settle(DEVICE)
        longer = places + [None] * 5
        assert same(more[0], rows_of([x.bfloat16() for x in new.x], longer)) and same(more[1], probs_of(new, longer))
        # A handle may be combined again, also after a dispatch by it, and with further rows, which do not count.
        more[0][len(places):] = float("nan")
        check_combined(buffer, tokens, rank, handle, longer, torch.bfloat16, new.x, more[0])

    in_threads(DEVICE, ranks, work)


class NeverWaits(deep_ep.HybridEPBuffer):
    """Calls with `non_blocking` as on a GPU, where the host knows no counts."""

    @staticmethod
    def _host_waits(hidden):
        return False


@pytest.mark.parametrize("way", ["waits", "non_blocking", "never_waits"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_that_the_caller_states(ranks, way):
    tokens, align, non_blocking = Tokens(ranks), 16, way != "waits"

    def work(world):
        rank, buffer = world.rank, made(world, NeverWaits if way == "never_waits" else deep_ep.HybridEPBuffer)
        x, named, probs = tokens.x[rank].bfloat16(), tokens.map[rank], tokens.probs[rank]
        places = tokens.places(rank, align)
        stated = len(places) + 3 * align
        for _ in range(2):
            rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(
                hidden=x, routing_map=named, probs=probs, pad_multiple=align, num_permuted_tokens=stated,
                non_blocking=non_blocking, fuse_permute_dispatch=True,
            )
            all_places = places + [None] * 3 * align
            settle(DEVICE)
            assert same(rows, rows_of([x.bfloat16() for x in tokens.x], all_places))
            assert same(row_probs, probs_of(tokens, all_places))
            assert counts.tolist() == tokens.counts_of(rank, align) and counts.dtype == torch.int64
            assert counts.device.type == (DEVICE if non_blocking else "cpu") and handle[-1].tolist() == [0]
            back = check_combined(
                buffer, tokens, rank, handle, all_places, torch.bfloat16, tokens.x, rows, row_probs
            )
            assert same(back, probs)

    in_threads(DEVICE, ranks, work)


@pytest.mark.skipif(DEVICE != "cpu", reason="what a rank lacks is an error of a later call on a GPU")
def test_what_does_not_fit_where_the_host_never_waits():
    """Ranks that all have more tokens than before make room. A rank with a token of more choices than before gets an
    error, and no wrong rows."""
    ranks = 2
    small, large = Tokens(ranks, counts=[5, 4], density=0), Tokens(ranks, counts=[200, 200])
    for named in small.map:
        named[:] = False
        named[:, :2] = True
    more = Tokens(ranks, counts=[5, 4], density=0.9)

    def work(world):
        rank = world.rank

        def call(buffer, tokens):
            return buffer.dispatch_with_permute(
                hidden=tokens.x[rank].bfloat16(), routing_map=tokens.map[rank], non_blocking=True,
                num_permuted_tokens=len(tokens.places(rank)),
            )

        buffer = made(world, NeverWaits)
        for tokens in (small, large, small):
            assert same(call(buffer, tokens)[0], rows_of([x.bfloat16() for x in tokens.x], tokens.places(rank)))
        narrow = made(world, NeverWaits)
        call(narrow, small)
        with pytest.raises(tokenyard.RoutingError):
            call(narrow, more)

    in_threads(DEVICE, ranks, work)


@pytest.mark.parametrize("way", ["waits", "non_blocking", "never_waits"])
def test_rows_beyond_those_stated_are_dropped(way):
    """The last rows are dropped on the rank that has too few, whose flag says so; sums lack them, and nothing else."""
    tokens, align, ranks = Tokens(3, counts=[9, 4, 5]), 2, 3
    short = len(tokens.places(1, align)) - 6

    def work(world):
        rank, buffer = world.rank, made(world, NeverWaits if way == "never_waits" else deep_ep.HybridEPBuffer)
        places = tokens.places(rank, align)
        kept = places[:short] if rank == 1 else places
        got = buffer.dispatch_with_permute(
            hidden=tokens.x[rank].bfloat16(), routing_map=tokens.map[rank], probs=tokens.probs[rank],
            pad_multiple=align, num_permuted_tokens=len(kept), non_blocking=way != "waits",
        )
        settle(DEVICE)
        assert same(got[0], rows_of([x.bfloat16() for x in tokens.x], kept)) and same(got[1], probs_of(tokens, kept))
        assert got[4][-1].tolist() == [int(rank == 1)] and sum(got[3].tolist()) == len(kept)
        full = tokens.counts_of(rank, align)
        assert all(found <= wanted for found, wanted in zip(got[3].tolist(), full))
        assert got[3].tolist()[0] == full[0]
        ends = itertools.accumulate(got[3].tolist())
        here = [sum(place is not None for place in kept[end - rows : end]) for end, rows in zip(ends, got[3].tolist())]
        assert got[4][7].tolist() == here
        out, back = buffer.combine_with_unpermute(hidden=got[0], probs=got[1], handle=got[4])
        again = buffer.dispatch_with_permute(
            hidden=tokens.x[rank].bfloat16(), handle=got[4], num_permuted_tokens=len(places)
        )[0]
        settle(DEVICE)
        lost = [p for p in tokens.places(1, align)[short:] if p is not None]
        map_, probs = tokens.map[rank].cpu().clone(), tokens.probs[rank].cpu().clone()
        for expert, source, token in lost:
            if source == rank:
                map_[token, expert], probs[token, expert] = False, 0
        exact = tokens.x[rank].cpu().double() * map_.sum(1, keepdim=True)
        assert ((out.cpu().double() - exact).abs() <= 2.1 * 2.0**-8 * exact.abs()).all() and same(back, probs)
        assert same(again, rows_of([x.bfloat16() for x in tokens.x], kept + [None] * (len(places) - len(kept))))

    in_threads(DEVICE, ranks, work)
    assert any(p is not None for p in tokens.places(1, align)[short:])


@pytest.mark.parametrize("as_bytes", [False, True])
def test_fp8(as_bytes):
    """fp8 rows with their scales, also as bytes; other rows leave scales aside."""
    tokens, ranks, align = Tokens(4), 4, 32
    draw = torch.Generator().manual_seed(3)
    x = [torch.randint(0, 256, (n, HIDDEN), dtype=torch.uint8, generator=draw).to(DEVICE) for n in tokens.counts]
    x = x if as_bytes else [rows.view(torch.float8_e4m3fn) for rows in x]
    scales = [torch.rand(n, HIDDEN // 128, generator=draw).to(DEVICE) for n in tokens.counts]

    def work(world):
        rank, buffer = world.rank, made(world, use_fp8=True)
        given = dict(hidden=x[rank], scaling_factor=scales[rank])
        places, ranks_rows = tokens.places(rank, align), tokens.received(rank)
        rows, probs, row_scales, counts, handle = buffer.dispatch_with_permute(
            **given, routing_map=tokens.map[rank], probs=tokens.probs[rank], pad_multiple=align, use_fp8=True
        )
        for found, found_scales in ((rows, row_scales), buffer.dispatch_with_permute(**given, handle=handle)[0:3:2]):
            settle(DEVICE)
            assert same(found.view(torch.uint8), rows_of([r.view(torch.uint8) for r in x], places))
            assert same(found_scales, rows_of(scales, places)) and found.dtype == x[rank].dtype
        assert same(probs, probs_of(tokens, places)) and counts.tolist() == tokens.counts_of(rank, align)
        # Experts' outputs are bf16.
        outputs = rows_of([t.bfloat16() for t in tokens.x], places).to(DEVICE)
        check_combined(buffer, tokens, rank, handle, places, torch.bfloat16, tokens.x, outputs)
        got = buffer.dispatch(**given, routing_map=tokens.map[rank])
        settle(DEVICE)
        assert same(got[0].view(torch.uint8), rows_of([r.view(torch.uint8) for r in x], ranks_rows))
        assert same(got[2], rows_of(scales, ranks_rows))
        other = buffer.dispatch_with_permute(
            hidden=tokens.x[rank].bfloat16(), routing_map=tokens.map[rank], scaling_factor=scales[rank]
        )
        assert other[2] is None

    in_threads(DEVICE, ranks, work)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_by_rank(ranks):
    """`dispatch` and `combine`, which do not permute."""
    tokens = Tokens(ranks)
    new = tokens.again(seed=5)

    def work(world):
        rank, buffer = world.rank, made(world)
        places, own = tokens.received(rank), slice(rank * LOCAL, (rank + 1) * LOCAL)
        local = torch.zeros(tokens.experts, dtype=torch.bool)
        local[own] = True
        for with_probs in (True, False):
            rows, probs, scales, handle = buffer.dispatch(
                tokens.x[rank].bfloat16(), routing_map=tokens.map[rank], probs=tokens.probs[rank] if with_probs else None
            )
            settle(DEVICE)
            assert same(rows, rows_of([x.bfloat16() for x in tokens.x], places)) and scales is None
            assert (probs is not None) == with_probs
            if probs is not None:
                assert same(probs, rows_of([of_source.cpu() * local for of_source in tokens.probs], places))
            named = rows_of(tokens.map, places)[:, own]
            assert len(handle) == 7 and same(handle[4], named)
            assert handle[3].tolist() == [len(places)] and handle[5] == tokens.counts[rank]
            # The row's experts' sum, as a caller computes it that permutes by itself.
            factors = torch.tensor([factor(e) for e in range(tokens.experts)])[own]
            outputs = (rows.float().cpu() * (named * factors).sum(1, keepdim=True)).bfloat16().to(DEVICE)
            given = rows_of(tokens.probs, places).to(DEVICE)
            out, back = buffer.combine(outputs, given if with_probs else None, handle)
            settle(DEVICE)
            exact = sums(tokens, rank, tokens.x)
            assert ((out.cpu().double() - exact).abs() <= 2.1 * 2.0**-8 * exact.abs()).all()
            assert back is None if not with_probs else same(back, tokens.probs[rank])
            rows, probs, _, again = buffer.dispatch(new.x[rank].bfloat16(), probs=new.probs[rank], handle=handle)
            settle(DEVICE)
            assert same(rows, rows_of([x.bfloat16() for x in new.x], places)) and again is handle
            assert same(probs, rows_of([of_source.cpu() * local for of_source in new.probs], places))

    in_threads(DEVICE, ranks, work)


def test_by_choices():
    """`topk_idx` and `topk_weights` in place of the map, with -1 for none."""
    tokens, ranks, choices = Tokens(2, density=0.2), 2, 6

    def work(world):
        rank, buffer = world.rank, made(world)
        idx = torch.full((tokens.counts[rank], choices), -1)
        weights = torch.zeros(tokens.counts[rank], choices)
        for token, named in enumerate(tokens.map[rank].cpu()):
            experts = named.nonzero()[:, 0].flip(0)
            idx[token, choices - len(experts):] = experts
            weights[token, choices - len(experts):] = tokens.probs[rank].cpu()[token, experts]
        given = dict(topk_idx=idx.to(DEVICE), topk_weights=weights.to(DEVICE), num_of_experts=tokens.experts)
        got = buffer.dispatch_with_permute(hidden=tokens.x[rank].bfloat16(), **given)
        check_permuted(tokens, rank, got, 1, torch.bfloat16)
        rows, probs, _, _ = buffer.dispatch(tokens.x[rank].bfloat16(), **given)
        local = torch.zeros(tokens.experts, dtype=torch.bool)
        local[rank * LOCAL : (rank + 1) * LOCAL] = True
        places = tokens.received(rank)
        settle(DEVICE)
        assert same(rows, rows_of([x.bfloat16() for x in tokens.x], places))
        assert same(probs, rows_of([of_source.cpu() * local for of_source in tokens.probs], places))

    in_threads(DEVICE, ranks, work)


@pytest.mark.parametrize("permutes", [True, False])
def test_more_tokens_and_choices_than_before(permutes):
    """Each call has more than the one before, on another rank each time: of tokens, of choices of few tokens (fewer than
    a notice needs) and of many. Later contexts have room for what earlier ones had, and no further call makes one."""
    ranks = 4
    few = Tokens(ranks, counts=[1, 1, 1, 1], density=0)
    assert not any(named.any() for named in few.map)
    calls = [few]
    for counts, rank, named in (
        ([1, 1, 2, 1], 2, 2), ([40, 30, 0, 3], 0, 5), ([140, 0, 3, 1], 0, 5), ([1, 1, 1, 300], 3, 5), ([3, 9, 9, 9], 1, 9),
        ([1, 520, 1, 1], 1, 2),
    ):
        tokens = Tokens(ranks, counts=counts, density=0)
        for rows, probs in zip(tokens.map, tokens.probs):
            rows[:] = False
            rows[:, 0] = True
            rows[:, (rank + 5) % 12] = True
        tokens.map[rank][-1, :] = torch.arange(tokens.experts, device=DEVICE) < max(named, 2)
        tokens.probs = [(named / 8 + torch.arange(12, device=DEVICE) / 16) * rows for rows in tokens.map]
        calls.append(tokens)

    def work(world):
        # On a GPU that the ranks share, all its seven contexts and what else there is fit.
        rank, buffer = world.rank, made(world, num_sms_dispatch_api=2)
        contexts, kept = [], []
        for tokens in calls + calls:
            x = tokens.x[rank].bfloat16()
            if permutes:
                got = buffer.dispatch_with_permute(hidden=x, routing_map=tokens.map[rank], probs=tokens.probs[rank])
                check_permuted(tokens, rank, got, 1, torch.bfloat16)
                back = check_combined(
                    buffer, tokens, rank, got[4], tokens.places(rank), torch.bfloat16, tokens.x, got[0], got[1]
                )
            else:
                got = buffer.dispatch(x, routing_map=tokens.map[rank], probs=tokens.probs[rank])
                rows, probs, _, handle = got
                settle(DEVICE)
                assert same(rows, rows_of([x.bfloat16() for x in tokens.x], tokens.received(rank)))
                back = buffer.combine(rows, probs, handle)[1]
                settle(DEVICE)
            assert same(back, tokens.probs[rank])
            contexts.append(buffer._made.ep.number)
            if DEVICE == "cuda":
                # Where ranks share a GPU, a context may not go while another rank's call waits (docs/python.md).
                kept.append(got)
        changes = [one != other for one, other in zip(contexts, contexts[1:])]
        assert changes == [True] * 6 + [False] * 7, changes
        assert buffer._made.ep.top_k == 9 and buffer._made.ep.format.max_tokens == 1024
        settle(DEVICE)
        world.barrier()

    in_threads(DEVICE, ranks, work)


def test_in_rounds():
    """Calls of more tokens than a round has."""

    class InRounds(deep_ep.HybridEPBuffer):
        round_tokens = 64

    tokens, ranks, align = Tokens(2, counts=[200, 90]), 2, 16

    def work(world):
        rank, buffer = world.rank, made(world, InRounds)
        given = dict(hidden=tokens.x[rank].bfloat16(), routing_map=tokens.map[rank], probs=tokens.probs[rank])
        got = buffer.dispatch_with_permute(**given, pad_multiple=align)
        assert buffer._made.ep.rounds > 1
        check_permuted(tokens, rank, got, align, torch.bfloat16)
        places = tokens.places(rank, align)
        back = check_combined(buffer, tokens, rank, got[4], places, torch.bfloat16, tokens.x, got[0], got[1])
        assert same(back, tokens.probs[rank])
        again = buffer.dispatch_with_permute(hidden=given["hidden"], probs=given["probs"], handle=got[4])
        settle(DEVICE)
        assert same(again[0], got[0]) and same(again[1], got[1])
        rows, probs, _, handle = buffer.dispatch(**given)
        settle(DEVICE)
        assert same(rows, rows_of([x.bfloat16() for x in tokens.x], tokens.received(rank)))
        back = buffer.combine(rows, probs, handle)[1]
        settle(DEVICE)
        assert same(back, tokens.probs[rank])

    in_threads(DEVICE, ranks, work)


def test_errors():
    def work(world):
        rank, buffer = world.rank, made(world)
        tokens = Tokens(2)
        x, named, probs = tokens.x[rank].bfloat16(), tokens.map[rank], tokens.probs[rank]
        count = tokens.counts[rank]

        def refused(error, text, call, **given):
            with pytest.raises(error) as caught:
                call(**given)
            assert text in str(caught.value), caught.value

        permuted, combined = buffer.dispatch_with_permute, buffer.combine_with_unpermute
        refused(ValueError, "routing_map is missing", permuted, hidden=x)
        refused(ValueError, f"give bool [{count}, experts]", permuted, hidden=x, routing_map=named.int())
        refused(ValueError, f"give bool [{count}, experts]", permuted, hidden=x, routing_map=named.new_zeros(3, 6)[:, :6])
        refused(ValueError, f"give float32 [{count}, 6]", permuted, hidden=x, routing_map=named, probs=probs.double())
        refused(ValueError, "give a multiple of the 2 ranks", permuted, hidden=x, routing_map=named[:, :5])
        refused(ValueError, "give 3", permuted, hidden=x, routing_map=named, num_of_experts_per_rank=4)
        refused(ValueError, "pad_multiple is -1", permuted, hidden=x, routing_map=named, pad_multiple=-1)
        refused(ValueError, "hidden has the shape [256]: give a tensor of 2", permuted, hidden=torch.zeros(256), routing_map=named)
        for rows in (None, -16, 24):
            refused(ValueError, f"num_permuted_tokens is {rows}", permuted, hidden=x, routing_map=named, pad_multiple=16,
                    num_permuted_tokens=rows, non_blocking=True)
        refused(TypeError, "handle is a NoneType", combined, hidden=x)
        refused(TypeError, "handle is a tuple", combined, hidden=x, handle=(1, 2))
        refused(ValueError, "max_num_of_tokens_per_rank is -1", lambda: deep_ep.HybridEPBuffer(world, HIDDEN, -1, LOCAL))
        rows, row_probs, _, _, handle = permuted(hidden=x, routing_map=named, probs=probs)
        refused(ValueError, f"give the {rows.shape[0]} of the dispatch", combined, hidden=rows[:-1], handle=handle)
        refused(ValueError, "give float32 [", combined, hidden=rows, probs=row_probs[:-1], handle=handle)
        refused(ValueError, "handle is of the other dispatch", buffer.combine, hidden=rows, handle=handle)
        refused(ValueError, f"give float32 [{count}, 6]", permuted, hidden=x, probs=probs[:, :3], handle=handle)
        refused(ValueError, f"give the {count} of the handle's", permuted, hidden=x.new_zeros(count + 1, HIDDEN), handle=handle)
        # More choices than any context has, on one rank: all ranks learn of it, and go on.
        wide = torch.zeros((2, 40), dtype=torch.bool, device=DEVICE)
        wide[:, : 40 if rank == 1 else 2] = True
        refused(ValueError, "goes to 40 experts: 32 is the most", permuted, hidden=x[:2] if count else x.new_zeros(2, HIDDEN),
                routing_map=wide)
        rows, row_probs, _, _, handle = permuted(hidden=x, routing_map=named, probs=probs)
        assert same(combined(hidden=rows, probs=row_probs, handle=handle)[1], probs)

    in_threads(DEVICE, 2, work)


def test_names_of_the_module():
    tokenyard.install_as("deep_ep")
    try:
        from deep_ep import HybridEPBuffer
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "deep_ep"]:
            del sys.modules[name]
    assert HybridEPBuffer is deep_ep.HybridEPBuffer
