"""Operators of torch: values, gradients, compilation, and what they refuse."""

import os

import numpy as np
import pytest

import tokenyard
from rig import Case, in_threads, settle

if os.environ.get("TOKENYARD_STRICT") == "1":
    import torch
else:
    torch = pytest.importorskip("torch")

from tokenyard import ops  # noqa: E402: after torch, without which there is no such module


# "cuda": all ranks share a GPU, each with a stream of its own and a part of the multiprocessors.
DEVICE = os.environ.get("TOKENYARD_TEST_DEVICE", "cpu")
PLACE = {"device": "cuda:0", "sms": 16} if DEVICE == "cuda" else {}


def alive():
    """How many tensors stand for something."""
    return len(ops._KEPT) + tokenyard._native.operator_handles()


def context(world, case, **more):
    return tokenyard.AllToAll(world, **case.limits | PLACE | more)


def tensors(case, rank, grad=False):
    """Rows, experts and weights of a rank, as leaves."""
    x, weights = (torch.tensor(value[rank], device=DEVICE, requires_grad=grad) for value in (case.x, case.weights))
    return x, torch.tensor(case.ids[rank], device=DEVICE), weights


def factor(expert, hidden, dtype=torch.float32, device=DEVICE):
    """What an expert multiplies by: differs by expert and by column, and its gradient is another for each."""
    columns = torch.arange(hidden, dtype=dtype, device=device)
    return 1.0 + (columns + 3 * expert) % 7 / 4


def by_expert(got, experts, layout):
    """The slices of the rows of each local expert."""
    settle(DEVICE)
    for i, expert in enumerate(experts):
        if layout == "masked":
            yield expert, (i, slice(0, int(got.counts[i])))
        else:
            yield expert, slice(int(got.offsets[i]), int(got.offsets[i] + got.counts[i]))


def applied(got, ep, layout):
    """The experts' outputs, rows of each multiplied by its factor; NaN elsewhere, which nothing may read."""
    hidden, out = ep.format.hidden, torch.full_like(got.rows, float("nan"))
    if layout == "token":
        used = got.token_experts >= 0
        local = torch.stack([factor(e, hidden) for e in ep.local_experts])
        weights = torch.where(used, got.token_weights, 0.0)
        return got.rows * torch.einsum("rk,rkh->rh", weights, local[got.token_experts.clamp(min=0).long()])
    for expert, part in by_expert(got, ep.local_experts, layout):
        out[part] = got.rows[part] * factor(expert, hidden)
    return out


def reference(case, rank, seed_of_loss):
    """Output and gradients of a rank, in fp64 and without any communication."""
    x = torch.from_numpy(case.x[rank]).double().requires_grad_()
    weights = torch.from_numpy(case.weights[rank]).double().requires_grad_()
    ids = torch.from_numpy(case.ids[rank])
    factors = torch.stack([factor(e, case.hidden, torch.float64, "cpu") for e in range(case.experts)])
    used = torch.where(ids >= 0, weights, 0.0)
    y = x * torch.einsum("tk,tkh->th", used, factors[ids.clamp(min=0)])
    (y * towards(case, rank).double()).sum().backward()
    return y.detach(), x.grad, weights.grad


def towards(case, rank):
    """The gradient of the output."""
    draw = np.random.default_rng(100 + rank)
    return torch.from_numpy(draw.standard_normal((case.count[rank], case.hidden)).astype(np.float32))


def near(found, wanted, terms):
    """Equal but for the rounding of fp32 sums of so many terms, which are below 16."""
    assert found.shape == wanted.shape
    settle(DEVICE)
    difference = (found.detach().double().cpu() - wanted.detach().cpu()).abs()
    assert difference.numel() == 0 or float(difference.max()) <= terms * 16 * 2.0**-24, float(difference.max())


LIMITS = dict(dispatch_payload_words=6, payload_words=3)


@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "masked", "token"])
def test_values_and_gradients_of_rows_and_weights(layout, exact, duplicates):
    case = Case(seed=21)
    if duplicates:
        case.ids = [np.random.default_rng(r).integers(-1, case.experts, case.ids[r].shape) for r in range(case.ranks)]

    def rank(world):
        weights = "dispatch" if layout == "token" else "none"
        ep = context(world, case, **LIMITS, weights=weights, duplicates=duplicates)
        r = world.rank
        x, ids, w = tensors(case, r, grad=True)
        for _ in range(2):
            x.grad = w.grad = None
            got = ops.dispatch(ep, x, ids, w, layout=layout, exact=exact, align=1)
            settle(DEVICE)
            if got.row_weights is not None:
                rows = sum(len(case.rows_of(e)) for e in ep.local_experts) if not duplicates else None
                used = int((got.row_weights != 0).sum())
                assert rows is None or used == rows, "rows that are none have the weight 0, others their own"
            if exact:
                assert ops.host_counts(got)[0] == got.counts.tolist()
                assert len(ops.host_counts(got)[1]) == case.ranks
            y = ops.combine(applied(got, ep, layout), got)
            y.backward(towards(case, r).to(DEVICE))
            wanted, x_grad, w_grad = reference(case, r, r)
            near(y, wanted, 8 * case.top_k)
            near(x.grad, x_grad, 8 * case.top_k)
            near(w.grad, w_grad, 4 * case.hidden)

    in_threads(DEVICE, case.ranks, rank)


def test_gradients_of_a_dispatch_by_a_handle():
    case = Case(seed=22)

    def rank(world):
        ep, r = context(world, case, weights="none"), world.rank
        x, ids, _ = tensors(case, r, grad=True)
        with torch.no_grad():
            got = ops.dispatch(ep, x, ids)
        again = ops.dispatch_again(x, got)
        assert torch.equal(again[: int(got.offsets[-1])], got.rows[: int(got.offsets[-1])])
        assert not again[int(got.offsets[-1]) :].any()
        # The gradient of each row is its expert's factor.
        parts = by_expert(got, ep.local_experts, "contiguous")
        sum((again[part] * factor(e, case.hidden)).sum() for e, part in parts).backward()
        factors = torch.stack([factor(e, case.hidden) for e in range(case.experts)])
        wanted = torch.where((ids >= 0)[..., None], factors[ids.clamp(min=0)], 0.0).sum(1)
        near(x.grad, wanted.double(), case.top_k)

    in_threads(DEVICE, case.ranks, rank)


def layer(ep, layout="contiguous", **how):
    """A layer whose experts all do the same to each row, so that torch can compile it whole."""

    def run(x, ids, w):
        got = ops.dispatch(ep, x, ids, w, layout=layout, **how)
        return ops.combine(got.rows * 3.0 + 1.0, got)

    return run


def plain(x, ids, w):
    """What it returns."""
    return torch.where(ids >= 0, w, 0.0).sum(1, keepdim=True) * (x * 3.0 + 1.0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole_with_gradients(backend):
    case = Case(ranks=1, seed=23)
    ep = context(tokenyard.World.threads(1)[0], case, **LIMITS, weights="none")
    compiled = torch.compile(layer(ep), fullgraph=True, backend=backend)
    for tokens in (case.tokens, case.tokens - 2, case.tokens - 3):
        x, ids, w = (t.detach()[:tokens].clone() for t in tensors(case, 0))
        x.requires_grad_(), w.requires_grad_()
        y = compiled(x, ids, w)
        near(y, plain(x, ids, w).detach().double(), 16)
        y.backward(towards(case, 0)[:tokens].to(DEVICE))
        given = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
        plain(given[0], ids, given[1]).backward(towards(case, 0)[:tokens].double().to(DEVICE))
        near(x.grad, given[0].grad, 16)
        near(w.grad, given[1].grad, 4 * case.hidden)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are of a GPU")
@pytest.mark.parametrize("gradients", [False, True])
def test_compiled_into_graphs(gradients):
    case = Case(ranks=1, seed=29)
    ep = context(tokenyard.World.threads(1)[0], case, **LIMITS, weights="none")
    calls, dispatch_into = [], ep.dispatch_into
    ep.dispatch_into = lambda *given, **how: calls.append(1) or dispatch_into(*given, **how)
    compiled = torch.compile(layer(ep), fullgraph=True, mode="reduce-overhead")
    seen = []
    for step in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        x, ids, w = tensors(Case(ranks=1, seed=29 + step), 0, grad=gradients)
        y = compiled(x, ids, w)
        near(y.detach(), plain(x, ids, w).detach().double(), 16)
        if gradients:
            y.backward(towards(case, 0).to(DEVICE))
            given = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
            plain(given[0], ids, given[1]).backward(towards(case, 0).double().to(DEVICE))
            near(x.grad, given[0].grad, 16)
            near(w.grad, given[1].grad, 4 * case.hidden)
        seen.append(len(calls))
        ep.check()
    # A replay calls nothing of Python.
    assert seen[-1] == seen[-3] > 0


@pytest.mark.parametrize("placement", [[0] * 6 + [1] * 6, [1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0], [0, 1] * 6])
def test_numbers_of_local_experts(placement):
    case = Case(ranks=2, experts=12, seed=30)

    def rank(world):
        ep = context(world, case, placement=placement)
        local = torch.tensor([3, 0, -1, 5, 2, 1, 4], dtype=torch.int32, device=DEVICE)
        numbers = ops._numbers(ep, local)
        own = [e for e in range(12) if placement[e] == world.rank]
        settle(DEVICE)
        assert numbers.dtype == torch.int32 and numbers[local >= 0].tolist() == [own[i] for i in (3, 0, 5, 2, 1, 4)]

    in_threads(DEVICE, 2, rank)


def test_compiled_ranks():
    case = Case(seed=24)

    def rank(world):
        r = world.rank
        ep = context(world, case)
        world.barrier()
        compiled = torch.compile(layer(ep, capacity=80), fullgraph=True, backend="aot_eager")
        x, ids, w = tensors(case, r)
        for _ in range(3):
            near(compiled(x, ids, w), plain(x, ids, w).double(), 16)

    in_threads(DEVICE, case.ranks, rank)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_calls_of_which_nothing_is_used(monkeypatch, backend):
    """Other ranks wait for them, so they are made, in the order of the source."""
    if backend == "inductor" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        pytest.skip("Inductor leaves them out before torch 2.10")
    if backend == "inductor" and DEVICE == "cuda":
        pytest.skip("Inductor needs Triton for GPUs")
    case = Case(ranks=1, seed=28)
    ep = context(tokenyard.World.threads(1)[0], case)
    x, ids, w = tensors(case, 0)
    made = []
    for name, place in (("dispatch_into", 2), ("dispatch_send", 1), ("dispatch_recv", None), ("combine", None)):
        call = getattr(tokenyard.AllToAll, name)

        def noted(*given, _name=name, _place=place, _call=call, **named):
            made.append(_name if _place is None else (_name, given[_place].shape[0]))
            return _call(*given, **named)

        monkeypatch.setattr(tokenyard.AllToAll, name, noted)

    def step(x, ids, w):
        got = ops.dispatch(ep, x[:3], ids[:3], w[:3])
        ops.dispatch(ep, x[:5], ids[:5], w[:5])
        ops.combine(got.rows * 2.0, got)
        ops.dispatch_recv(ep, ops.dispatch_send(ep, x[:4], ids[:4], w[:4]), 4)
        last = ops.dispatch(ep, x[:2], ids[:2], w[:2])
        return x + 1.0, last.counts

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for _ in range(2):
        made.clear()
        y, counts = compiled(x, ids, w)
        assert torch.equal(y, x + 1.0) and counts.sum() == (ids[:2] >= 0).sum()
        assert made == [
            ("dispatch_into", 3), ("dispatch_into", 5), "combine", ("dispatch_send", 4), "dispatch_recv", ("dispatch_into", 2),
        ]


def test_exact_dispatches_of_several_threads():
    case = Case(ranks=1, seed=29)
    ep = context(tokenyard.World.threads(1)[0], case)
    x, ids, w = tensors(case, 0)

    def thread(number):
        for _ in range(40):
            got = ops.dispatch(ep, x, ids, w, exact=True)
            near(ops.combine(got.rows, got), (w * (ids >= 0)).sum(1, keepdim=True).double() * x, 16)

    in_threads(DEVICE, 3, lambda world: thread(world.rank))


def test_halves_and_given_outputs_compiled_whole():
    case = Case(ranks=1, seed=25)
    ep = context(tokenyard.World.threads(1)[0], case)
    x, ids, w = tensors(case, 0)

    def halves(x, ids, w):
        sent = ops.dispatch_send(ep, x, ids, w)
        between = x.sum()
        got = ops.dispatch_recv(ep, sent, x.shape[0])
        rows = got.rows * 3.0 + 1.0
        return ops.combine_recv(ops.combine_send(rows, got), rows, got), between

    def into(x, ids, w, rows, counts, offsets, out):
        handle = ops.dispatch_into(ep, rows, counts, x, ids, w, offsets=offsets)
        got = ops.Dispatched(rows, counts, handle, x.shape[0])
        ops.combine_into(out, rows * 3.0 + 1.0, got)
        ops.combine_into(out, rows * 3.0 + 1.0, got, accumulate=True)

    for function in (halves, torch.compile(halves, fullgraph=True, backend="aot_eager")):
        y, between = function(x, ids, w)
        near(y, plain(x, ids, w).double(), 16)
        assert torch.equal(between, x.sum())
    rows, counts = (torch.empty(ep.capacity(), case.hidden, device=DEVICE), torch.empty(case.experts, dtype=torch.int32, device=DEVICE))
    offsets = torch.empty(case.experts + 1, dtype=torch.int32, device=DEVICE)
    out = torch.empty(case.tokens, case.hidden, device=DEVICE)
    for function in (into, torch.compile(into, fullgraph=True, backend="aot_eager")):
        out.fill_(float("nan")), counts.fill_(-1), offsets.fill_(-1)
        function(x, ids, w, rows, counts, offsets, out)
        near(out, 2 * plain(x, ids, w).double(), 32)
        assert counts.tolist() == [len(case.rows_of(e)) for e in range(case.experts)]
        assert offsets.tolist() == np.cumsum([0, *counts.tolist()]).tolist()


def test_torchs_own_checks():
    case = Case(ranks=1, seed=26)
    ep = context(tokenyard.World.threads(1)[0], case, **LIMITS, weights="none")
    x, ids, w = tensors(case, 0, grad=True)
    given = (x, ids, w, None, ep.number, 0, "contiguous", 1, ep.capacity(), True, True, False)
    # Two calls give two handles, which the check of compiled code would compare; on a GPU a copy of one is none.
    some = ("test_schema", "test_autograd_registration", "test_faketensor")
    most = (*some, "test_aot_dispatch_dynamic") if DEVICE == "cpu" else ("test_autograd_registration",)
    torch.library.opcheck(torch.ops.tokenyard.dispatch.default, given, test_utils=some)
    exact = (x, ids, w, None, ep.number, 0, "masked", 1, ops.EXACT, True, True, False)
    torch.library.opcheck(torch.ops.tokenyard.dispatch.default, exact, test_utils=some)
    got = ops.dispatch(ep, x, ids, w)
    rows = got.rows.detach().clone().requires_grad_()
    torch.library.opcheck(torch.ops.tokenyard.combine.default, (rows, got.handle, None, case.tokens, False), test_utils=most)
    torch.library.opcheck(torch.ops.tokenyard.dispatch_again.default, (x, got.handle, got.rows.shape, False), test_utils=most)
    words = got.row_weights.detach().unsqueeze(1)
    given = (rows.detach(), got.handle, words, case.tokens, case.top_k, False)
    torch.library.opcheck(torch.ops.tokenyard.combine_words.default, given, test_utils=most)
    out = torch.zeros(case.tokens, case.hidden, device=DEVICE)
    given = (rows.detach(), got.handle, None, out, True)
    torch.library.opcheck(torch.ops.tokenyard.combine_into.default, given, test_utils=most)


def test_what_operators_refuse():
    case = Case(ranks=1, seed=27)
    ep = context(tokenyard.World.threads(1)[0], case)
    x, ids, w = tensors(case, 0, grad=True)
    got = ops.dispatch(ep, x, ids, w)
    with pytest.raises(ValueError, match="the host did not wait for: dispatch with exact=True"):
        ops.host_counts(got)
    with pytest.raises(RuntimeError, match="combine has weights from dispatch, so there is no gradient: use a format"):
        got.rows.sum().backward()
    with pytest.raises(RuntimeError, match="so there is no gradient"):
        ops.combine(got.rows, got).sum().backward()
    x, w = x.detach(), w.detach()
    sent = ops.dispatch_send(ep, x, ids, w)
    got = ops.dispatch_recv(ep, sent, case.tokens)
    with pytest.raises(ValueError, match="sent was received already"):
        ops.dispatch_recv(ep, sent, case.tokens)
    rows, leaf = got.rows.clone().requires_grad_(), x.clone().requires_grad_()
    for refused in (
        lambda: ops.dispatch_send(ep, leaf, ids, w),
        lambda: ops.dispatch_into(ep, got.rows, got.counts, leaf, ids, w),
        lambda: ops.combine_send(rows, got),
        lambda: ops.combine_into(x, rows, got),
        lambda: ops.combine(rows, got, topk_weights=w),
    ):
        with pytest.raises(RuntimeError, match="has no gradient: use dispatch and combine of tokenyard.ops, or call it under"):
            refused()
    # A number is as good as the tensor itself on the CPU, as long as that is alive.
    copied = got._replace(handle=got.handle.clone())
    if DEVICE == "cpu":
        torch.testing.assert_close(ops.combine(got.rows, copied), ops.combine(got.rows, got))
    del got
    with pytest.raises(ValueError, match="handle stands for nothing that is alive"):
        ops.combine(copied.rows, copied)
    for wrong in (torch.zeros(1), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="give the int64 .1. of a dispatch"):
            ops.combine(copied.rows, copied._replace(handle=wrong))
    kept = alive()
    many = [ops.dispatch(ep, x, ids, w).handle for _ in range(20)]
    assert alive() == kept + 20
    del many
    assert alive() == kept
    number = ep.number
    del ep, refused, sent
    with pytest.raises(ValueError, match=f"context {number} is closed"):
        torch.ops.tokenyard.dispatch_send(x, ids, w, None, number, 0)
