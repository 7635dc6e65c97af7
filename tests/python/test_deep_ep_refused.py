"""`tokenyard.deep_ep`: what calls refuse names the argument, and the next calls of the same Buffer are right."""

import gc
import os
import weakref

import pytest

import tokenyard
from rig import in_threads

if os.environ.get("TOKENYARD_STRICT") == "1":
    import torch
else:
    torch = pytest.importorskip("torch")

from tokenyard import deep_ep  # noqa: E402: after torch, without which there is no such module

TOKENS, HIDDEN, EXPERTS, CHOICES = 6, 256, 4, 2


class Calls:
    """Calls of one rank with the same tokens, of which some arguments are replaced."""

    def __init__(self, world, seed=1):
        draw = torch.Generator().manual_seed(seed)
        self.buffer = deep_ep.Buffer(world)
        self.x = torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16()
        self.ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:CHOICES] for _ in range(TOKENS)])
        self.weights = torch.rand(TOKENS, CHOICES, generator=draw)

    def normal(self, x=None, combine=None, given=None, **more):
        of_rank, _, of_expert, named, _ = self.buffer.get_dispatch_layout(self.ids, EXPERTS)
        how = dict(num_tokens_per_rank=of_rank, is_token_in_rank=named, num_tokens_per_expert=of_expert)
        how |= dict(topk_idx=self.ids, topk_weights=self.weights) | more
        rows, _, _, _, handle, _ = self.buffer.dispatch(self.x if x is None else x, **how)
        return self.buffer.combine(rows if given is None else given, handle, **(combine or {}))[0]

    def low_latency(self, x=None, ids=None, room=8, combine=None, **more):
        how = dict(use_fp8=False) | more
        x, ids = self.x if x is None else x, self.ids if ids is None else ids
        rows, _, handle, _, hook = self.buffer.low_latency_dispatch(x, ids, room, EXPERTS, **how)
        if hook is not None:
            hook()
        given = dict(x=rows, topk_idx=self.ids, topk_weights=self.weights, handle=handle) | (combine or {})
        y, _, hook = self.buffer.low_latency_combine(**given)
        if hook is not None:
            hook()
        return y

    def must_be_right(self):
        assert torch.equal(self.normal(), self.x)
        for hooks in (False, True):
            sums = self.low_latency(return_recv_hook=hooks, combine=dict(return_recv_hook=hooks))
            wanted = self.x.float() * self.weights.sum(1, keepdim=True)
            assert torch.allclose(sums.float(), wanted, rtol=0.02, atol=0.02)


def test_refused_arguments_are_named_and_leave_the_buffer_as_it_was():
    c = Calls(tokenyard.World.threads(1)[0])
    c.must_be_right()
    x, ids, w = c.x, c.ids, c.weights
    ones = torch.ones(TOKENS, 1, dtype=torch.int32)
    by_rank = dict(topk_idx=None, topk_weights=None)
    hooks = dict(return_recv_hook=True, combine=dict(return_recv_hook=True))
    stats = torch.zeros(3, dtype=torch.int64)
    wrong = [
        (TypeError, "x is a list: give a tensor", lambda: c.normal([1])),
        (ValueError, "x is a tuple of 1", lambda: c.normal((x,))),
        (ValueError, "x has the shape", lambda: c.normal(x[0])),
        (ValueError, "scales of x has the shape", lambda: c.normal((x.to(torch.float8_e4m3fn), torch.ones(TOKENS)))),
        (TypeError, "topk_idx is torch.float32: give torch.int32 or", lambda: c.normal(topk_idx=ids.float())),
        (TypeError, "topk_idx is torch.int16", lambda: c.buffer.get_dispatch_layout(ids.short(), EXPERTS)),
        (ValueError, "topk_idx has the shape [6]", lambda: c.buffer.get_dispatch_layout(ids[:, 0], EXPERTS)),
        (ValueError, "topk_idx has the shape [5, 2]: give [6, 2]", lambda: c.normal(topk_idx=ids[:5])),
        (ValueError, "topk_weights has the shape [6, 1]: give [6, 2]", lambda: c.normal(topk_weights=w[:, :1])),
        (ValueError, "topk_weights is given without topk_idx", lambda: c.normal(topk_idx=None)),
        # Numbers in place of bools would be taken for experts.
        (TypeError, "is_token_in_rank is torch.int32: give torch.bool", lambda: c.normal(is_token_in_rank=ones, **by_rank)),
        (ValueError, "is_token_in_rank has the shape", lambda: c.normal(is_token_in_rank=ones[:2].bool(), **by_rank)),
        (TypeError, "num_tokens_per_expert is a list", lambda: c.normal(num_tokens_per_expert=[1, 2, 3, 4])),
        (ValueError, "num_worst_tokens is -1", lambda: c.normal(num_worst_tokens=-1)),
        (TypeError, "num_worst_tokens is a float", lambda: c.normal(num_worst_tokens=64.5)),
        (TypeError, "expert_alignment is a float", lambda: c.normal(expert_alignment=1.5)),
        (ValueError, "bias has 3 tensors", lambda: c.normal(combine=dict(bias=(x, x, x)))),
        (ValueError, "bias has the shape [1, 256]: give [6, 256]", lambda: c.normal(combine=dict(bias=(x, x[:1])))),
        (TypeError, "bias is a list", lambda: c.normal(combine=dict(bias=[x]))),
        (ValueError, "topk_weights has the shape [2, 2]: give", lambda: c.normal(combine=dict(topk_weights=w[:2]))),
        (TypeError, "x is torch.float8_e4m3fn", lambda: c.normal(given=x.to(torch.float8_e4m3fn))),
        (TypeError, "x is a NoneType", lambda: c.buffer.combine(
            None, c.buffer.dispatch(x, is_token_in_rank=ones.bool(), num_tokens_per_expert=torch.zeros(EXPERTS))[4])),
        (ValueError, "x has the shape [256]", lambda: c.low_latency(x[0])),
        (ValueError, "num_max_dispatch_tokens_per_rank is 3, and x has 6 tokens", lambda: c.low_latency(room=3)),
        (ValueError, "num_max_dispatch_tokens_per_rank is -1", lambda: c.low_latency(room=-1)),
        (TypeError, "num_max_dispatch_tokens_per_rank is a float", lambda: c.low_latency(room=8.5)),
        # A choice without a weight would be lost.
        (ValueError, "topk_weights has the shape [6, 1]: give [6, 2]", lambda: c.low_latency(combine=dict(topk_weights=w[:, :1]))),
        (TypeError, "topk_weights is a NoneType", lambda: c.low_latency(combine=dict(topk_weights=None))),
        # What the hook would refuse is refused before anything is sent.
        (ValueError, "cumulative_local_expert_recv_stats has the shape", lambda: c.low_latency(
            **hooks, cumulative_local_expert_recv_stats=torch.zeros(3, dtype=torch.int32))),
        (ValueError, "dispatch_wait_recv_cost_stats has the shape [3]: give [1]", lambda: c.low_latency(
            **hooks, dispatch_wait_recv_cost_stats=stats)),
        (ValueError, "combine_wait_recv_cost_stats has the shape [3]: give [1]", lambda: c.low_latency(
            combine=dict(return_recv_hook=True, combine_wait_recv_cost_stats=stats))),
        (ValueError, "out has the shape [5, 256]: give [6, 256]", lambda: c.low_latency(
            combine=dict(return_recv_hook=True, out=torch.zeros(5, HIDDEN).bfloat16()))),
        (ValueError, "out has the strides", lambda: c.low_latency(
            combine=dict(return_recv_hook=True, out=torch.zeros(HIDDEN, TOKENS).bfloat16().t()))),
        (ValueError, "out has the strides (260, 1)", lambda: c.low_latency(
            combine=dict(return_recv_hook=True, out=torch.zeros(TOKENS, 260).bfloat16()[:, :HIDDEN]))),
        (ValueError, "out has the strides (256, 1)", lambda: c.low_latency(
            combine=dict(return_recv_hook=True, out=torch.zeros(1 + TOKENS * HIDDEN).bfloat16()[1:].view(TOKENS, HIDDEN)))),
        (ValueError, "out has the strides (0, 1)", lambda: c.low_latency(
            combine=dict(return_recv_hook=True, out=torch.zeros(HIDDEN).bfloat16().expand(TOKENS, HIDDEN)))),
        (ValueError, "out is a negative view", lambda: c.low_latency(
            combine=dict(return_recv_hook=True, out=torch._neg_view(torch.zeros(TOKENS, HIDDEN).bfloat16())))),
        (ValueError, "combine_wait_recv_cost_stats is a negative view", lambda: c.low_latency(
            combine=dict(return_recv_hook=True, combine_wait_recv_cost_stats=torch._neg_view(stats[:1].clone())))),
        (TypeError, "x is torch.float8_e4m3fn: give", lambda: c.low_latency(
            combine=dict(x=torch.zeros(EXPERTS, 8, HIDDEN).to(torch.float8_e4m3fn)))),
        (ValueError, "rank_to_mask is -1", lambda: c.buffer.low_latency_update_mask_buffer(-1, True)),
        (ValueError, "rank_to_mask is 1: give a rank below 1", lambda: c.buffer.low_latency_update_mask_buffer(1)),
        (ValueError, "mask_status has the shape [3]: give [1]", lambda: c.buffer.low_latency_query_mask_buffer(stats)),
        (TypeError, "out is torch.float64", lambda: c.low_latency(
            combine=dict(return_recv_hook=True, out=torch.zeros(TOKENS, HIDDEN).double()))),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind) as raised:
            call()
        assert text in str(raised.value), (text, str(raised.value))
        c.must_be_right()


def test_tensors_without_memory_are_named():
    """Some of them go through kernels of torch first, which would read what is not there."""
    world = tokenyard.World.threads(1)[0]
    c, room = Calls(world), dict(max_num_of_tokens_per_rank=TOKENS, num_local_experts=EXPERTS)
    elastic = deep_ep.ElasticBuffer(world, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN)
    hybrid = deep_ep.HybridEPBuffer(world, hidden_dim=HIDDEN, **room)
    for name in ("topk_idx", "topk_weights"):
        given = {"topk_idx": c.ids, "topk_weights": c.weights}
        given[name] = given[name].clone()
        given[name].untyped_storage().resize_(0)
        for call in (
            lambda: c.normal(**given),
            lambda: elastic.dispatch(c.x, **given, num_experts=EXPERTS),
            lambda: hybrid.dispatch_with_permute(hidden=c.x, **given, num_of_experts=EXPERTS),
        ):
            with pytest.raises(ValueError, match=f"{name} has no memory"):
                call()
    freed = {"out": torch.zeros(TOKENS, HIDDEN).bfloat16(), "combine_wait_recv_cost_stats": torch.zeros(1, dtype=torch.int64)}
    of_dispatch = {"cumulative_local_expert_recv_stats": torch.zeros(EXPERTS, dtype=torch.int32),
                   "dispatch_wait_recv_cost_stats": torch.zeros(1, dtype=torch.int64)}
    for name, tensor in {**freed, **of_dispatch}.items():
        tensor.untyped_storage().resize_(0)
        given = {name: tensor} if name in of_dispatch else {"combine": {name: tensor, "return_recv_hook": True}}
        with pytest.raises(ValueError, match=f"{name} has no memory"):
            c.low_latency(**given)
        c.must_be_right()
    stats = of_dispatch["cumulative_local_expert_recv_stats"]
    with pytest.raises(ValueError, match="cumulative_local_expert_recv_stats has no memory"):
        elastic.dispatch(
            c.x, topk_idx=c.ids, topk_weights=c.weights, num_experts=EXPERTS, cumulative_local_expert_recv_stats=stats)
    ids = c.ids.clone()
    ids.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="topk_idx has no memory"):
        c.buffer.get_dispatch_layout(ids, EXPERTS)
    c.must_be_right()


def test_choices_that_a_rank_has_no_columns_for_are_not_lost_in_silence():
    """Where a context has room for more choices already, as no rank learns of others' numbers then."""

    def run(world):
        draw = torch.Generator().manual_seed(world.rank)
        buffer = deep_ep.Buffer(world)
        x = torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16()

        def call(choices):
            ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:choices] for _ in range(TOKENS)])
            ids[:, -1] = EXPERTS - 1
            ids[:, :-1] = ids[:, :-1] % (EXPERTS - 1)
            of_rank, _, of_expert, named, _ = buffer.get_dispatch_layout(ids, EXPERTS)
            return buffer.dispatch(
                x, num_tokens_per_rank=of_rank, is_token_in_rank=named, num_tokens_per_expert=of_expert, topk_idx=ids,
                topk_weights=torch.ones(TOKENS, choices),
            )[1]

        came = [call(2).shape[1], call(1).shape[1]]
        # The last expert is on rank 1, and so is what rank 0 names second.
        try:
            call(2 - world.rank)
        except ValueError as error:
            came.append(str(error))
        return came

    first, second = in_threads("cpu", 2, run)
    assert first == [2, 1], first
    assert second[:2] == [2, 1] and "topk_idx has 1 choices a token, and another rank's has up to 2" in second[2], second


def test_biases_of_any_strides_are_added():
    c = Calls(tokenyard.World.threads(1)[0])
    columns = torch.randn(HIDDEN, TOKENS).t()
    for bias in (columns, columns.bfloat16(), (columns, c.x), c.x[:1].float().expand(TOKENS, HIDDEN)):
        total = sum(part.float() for part in (bias if isinstance(bias, tuple) else (bias,)))
        before = [part.clone() for part in (bias if isinstance(bias, tuple) else (bias,))]
        assert torch.equal(c.normal(combine=dict(bias=bias)), (total + c.x.float()).bfloat16())
        assert all(map(torch.equal, before, bias if isinstance(bias, tuple) else (bias,)))


@pytest.mark.parametrize("how", ["counted", "worst", "hook"])
def test_a_dispatch_with_an_expert_that_is_none_is_finished_and_combined(how):
    def work(world):
        c = Calls(world, seed=world.rank)
        wrong, failure = c.ids.clone(), None
        if world.rank == 0:
            wrong[1, 1] = EXPERTS
        of_rank, _, of_expert, named, _ = c.buffer.get_dispatch_layout(wrong, EXPERTS)
        try:
            if how == "hook":
                got = c.buffer.low_latency_dispatch(c.x, wrong, 8, EXPERTS, use_fp8=False, return_recv_hook=True)
            else:
                got = c.buffer.dispatch(
                    c.x, None, of_rank, None, named, of_expert, wrong, c.weights,
                    num_worst_tokens=2 * TOKENS if how == "worst" else 0,
                )
        except tokenyard.RoutingError as error:
            failure, got = error, error.dispatched
        assert (failure is not None) == (world.rank == 0)
        assert failure is None or f"token 1 names expert {EXPERTS}," in str(failure)
        if how == "hook":
            rows, _, handle, _, hook = got
            hook()
            sums, _, hook = c.buffer.low_latency_combine(rows, wrong, c.weights, handle, return_recv_hook=True)
            hook()
            wanted = c.x.float() * c.weights.sum(1, keepdim=True)
        else:
            rows, _, _, _, handle, _ = got
            sums, wanted = c.buffer.combine(rows, handle)[0], c.x * named.sum(1, keepdim=True)
        # Nothing of the rank that made the mistake was sent.
        wanted = torch.zeros(TOKENS, HIDDEN) if world.rank == 0 else wanted.float()
        assert torch.allclose(sums.float(), wanted, rtol=0.02, atol=0.02)
        world.barrier()

    in_threads("cpu", 2, work)


@pytest.mark.parametrize("token", [999, 1])
def test_an_error_of_an_earlier_call_keeps_its_numbers(monkeypatch, token):
    """As on a GPU, where the wait for counts may tell of it."""
    c, kept = Calls(tokenyard.World.threads(1)[0]), tokenyard.AllToAll.counts
    text = f"rank 0, dispatch 1: choice 1 of token {token} names expert 2147483647, which does not exist"
    found = [tokenyard.RoutingError(text)]
    found[0].fatal = False

    def counts(*given):
        if found:
            raise found.pop()
        return kept(*given)

    monkeypatch.setattr(tokenyard.AllToAll, "counts", counts)
    of_rank, _, of_expert, named, _ = c.buffer.get_dispatch_layout(c.ids, EXPERTS)
    with pytest.raises(tokenyard.RoutingError) as raised:
        c.buffer.dispatch(c.x, None, of_rank, None, named, of_expert, c.ids, c.weights)
    assert str(raised.value) == text and len(raised.value.dispatched) == 6


@pytest.mark.parametrize("how", ["counted", "worst", "elastic counted", "elastic"])
def test_errors_are_gone_once_they_are_caught(how):
    """As of other calls: an exception in a frame that it has itself would keep what it holds until gc."""
    c = Calls(tokenyard.World.threads(1)[0])
    wrong = torch.full_like(c.ids, 99)
    elastic = deep_ep.ElasticBuffer(tokenyard.World.threads(1)[0], num_max_tokens_per_rank=TOKENS, hidden=HIDDEN)
    gc.collect()
    gc.disable()
    try:
        try:
            if how.startswith("elastic"):
                elastic.dispatch(c.x, topk_idx=wrong, num_experts=EXPERTS, do_cpu_sync=how.endswith("counted"))
            else:
                c.normal(topk_idx=wrong, num_worst_tokens=TOKENS if how == "worst" else 0)
        except tokenyard.RoutingError as error:
            gone = weakref.ref(error.dispatched[0])
        assert gone() is None
    finally:
        gc.enable()
