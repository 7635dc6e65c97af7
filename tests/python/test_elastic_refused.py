"""What `ElasticBuffer` and `HybridEPBuffer` refuse before anything is sent, by the argument's name: the next call is right. And
what they take of odd strides, signs of zero and numbers."""


import pytest

import tokenyard
from rig import the_torch

torch = the_torch()

from test_hybrid import NeverWaits  # noqa: E402: after torch
from tokenyard.deep_ep import Buffer, ElasticBuffer, EventHandle, EventOverlap, HybridEPBuffer  # noqa: E402: after torch

HIDDEN, EXPERTS, TOKENS, TOP_K = 256, 6, 5, 3
DRAW = torch.Generator().manual_seed(3)
X = torch.randn((TOKENS, HIDDEN), generator=DRAW).bfloat16()
# A token without one choice, and none twice at an expert.
IDS = torch.stack([torch.randperm(EXPERTS, generator=DRAW)[:TOP_K] for _ in range(TOKENS)])
IDS[2, 1] = -1
WEIGHTS = torch.rand((TOKENS, TOP_K), generator=DRAW)
MAP = torch.zeros((TOKENS, EXPERTS + 1), dtype=torch.bool).scatter_(1, IDS.where(IDS >= 0, EXPERTS), True)[:, :EXPERTS].contiguous()
PROBS = torch.rand((TOKENS, EXPERTS), generator=DRAW)


def alone(kind):
    world = tokenyard.World.threads(1)[0]
    if kind is HybridEPBuffer:
        return kind(world, HIDDEN, 16, EXPERTS)
    return kind(world, num_max_tokens_per_rank=16, hidden=HIDDEN, num_gpu_timeout_secs=5)


def strided(tensor):
    """The same numbers, column after column."""
    return tensor.t().contiguous().t()


def elsewhere(tensor):
    return tensor.to("meta")


WHOLE = [(TypeError, "a float, 2.5: give a whole number", 2.5), (TypeError, "a str, '4': give a whole number", "4"),
         (TypeError, "a Tensor, .*: give a whole number", torch.ones(3))]


@pytest.mark.parametrize("how", [{}, {"do_expand": True}, {"do_cpu_sync": False}, {"do_expand": True, "do_cpu_sync": False}])
def test_a_dispatch_that_is_refused_sends_nothing(how):
    buffer = alone(ElasticBuffer)

    def dispatch(x=X, ids=IDS, weights=WEIGHTS, stats=None, **more):
        return buffer.dispatch(x, ids, weights, stats, **(dict(num_experts=EXPERTS) | how | more))

    def refused(kind, match, *given, **named):
        with pytest.raises(kind, match=match):
            dispatch(*given, **named)
        rows = dispatch()[0]
        assert len(rows) >= TOKENS

    for name in ("num_experts", "num_max_tokens_per_rank", "expert_alignment", "num_sms"):
        for kind, match, wrong in WHOLE:
            refused(kind, f"{name} is {match}", **{name: wrong})
    refused(ValueError, "num_sms is -1: give 0 or more", num_sms=-1)
    refused(ValueError, "num_max_tokens_per_rank is -1: give 0 or more", num_max_tokens_per_rank=-1)
    # Lists of all experts are made only of numbers that can be.
    refused(ValueError, f"num_experts is {1 << 31}: give at most 1048576", num_experts=1 << 31)
    # Ends of experts are int32.
    refused(ValueError, f"expert_alignment is {1 << 30}: give at most {((1 << 31) - 1) // EXPERTS}", expert_alignment=1 << 30)
    refused(TypeError, "topk_idx is a list: give a tensor", ids=IDS.tolist())
    refused(ValueError, r"topk_idx has the shape \[\]: give a tensor of 2 dimensions", ids=torch.tensor(3))
    for name in ("previous_event", "previous_event_before_epilogue"):
        for wrong in (object(), 3):
            refused(TypeError, f"{name} is a .*: give an EventHandle or EventOverlap", **{name: wrong})
    refused(ValueError, "topk_idx is on meta, and other tensors on cpu", ids=elsewhere(IDS))
    refused(ValueError, "topk_weights is on meta, and other tensors on cpu", weights=elsewhere(WEIGHTS))
    fp8 = X.to(torch.float8_e4m3fn)
    refused(ValueError, "x has 192 columns: give a multiple of 128", torch.zeros((TOKENS, 192), dtype=torch.int8))
    refused(ValueError, r"scale factors of x are \[5, 4091\]: give at most 4090 words", (fp8, torch.zeros(TOKENS, 4091)))
    assert dispatch((fp8, torch.ones(TOKENS, 4090)))[0][1].shape[1] == 4090
    refused(ValueError, "scale factors of x is on meta", (fp8, elsewhere(torch.ones(TOKENS, 2))))
    stats = torch.zeros(EXPERTS, dtype=torch.int32)
    refused(ValueError, "cumulative_local_expert_recv_stats is on meta", stats=elsewhere(stats))
    refused(ValueError, "cumulative_local_expert_recv_stats has one number for all", stats=stats[:1].expand(EXPERTS))
    # Each second number of a tensor may be what is counted.
    both = torch.zeros(2 * EXPERTS, dtype=torch.int32)
    dispatch(stats=both[::2])
    assert both[::2].tolist() == [int((IDS == e).sum()) for e in range(EXPERTS)] and not both[1::2].any()


def test_a_combine_that_is_refused_sends_nothing():
    buffer = alone(ElasticBuffer)
    rows, _, weights, handle, _ = buffer.dispatch(X, IDS, WEIGHTS, num_experts=EXPERTS)

    def refused(kind, match, x=rows, **named):
        with pytest.raises(kind, match=match):
            buffer.combine(x, handle, **named)
        assert torch.equal(buffer.combine(rows, handle)[0], X)

    for wrong in ([rows], None):
        refused(TypeError, f"x is a {type(wrong).__name__}: give a tensor", wrong)
    for name in ("previous_event", "previous_event_before_epilogue"):
        refused(TypeError, f"{name} is a int: give an EventHandle", **{name: 3})
        refused(TypeError, f"{name} is a int: give an EventHandle", topk_weights=weights, **{name: 3})
    refused(TypeError, "bias is a int: give a tensor", bias=3)
    refused(TypeError, "bias is a NoneType: give a tensor", bias=(X, None))
    for name, tensor in (("bias", X), ("topk_weights", weights)):
        refused(ValueError, f"{name} is on meta, and other tensors on cpu", **{name: elsewhere(tensor)})
    refused(ValueError, "x is on meta", elsewhere(rows))
    for name, call in (("x", dict(x=elsewhere(X))), ("topk_weights", dict(x=X, topk_weights=elsewhere(WEIGHTS)))):
        with pytest.raises(ValueError, match=f"{name} is on meta"):
            buffer.dispatch(handle=handle, **call)
    with pytest.raises(TypeError, match="previous_event_before_epilogue is a int"):
        buffer.dispatch(X, handle=handle, previous_event_before_epilogue=3)
    for event in (EventHandle(), EventOverlap()):
        buffer.combine(rows, handle, previous_event=event, previous_event_before_epilogue=event)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_biases_of_any_strides(dtype):
    buffer = alone(ElasticBuffer)
    rows, _, _, handle, _ = buffer.dispatch(X.to(dtype), IDS, num_experts=EXPERTS)
    bias = torch.randn((TOKENS, HIDDEN), generator=DRAW).to(dtype)
    kept = bias.clone()
    for given in (bias, strided(bias), torch.stack((bias, bias), 2)[:, :, 0], [bias]):
        assert torch.equal(buffer.combine(rows, handle, bias=given)[0], (X.float() + bias.float()).to(dtype))
    for given in ((strided(bias), bias), (bias, strided(bias))):
        wanted = (bias.float() + bias.float() + X.float()).to(dtype)
        assert torch.equal(buffer.combine(rows, handle, bias=given)[0], wanted)
    assert torch.equal(bias, kept)
    one = bias[:1].expand(TOKENS, HIDDEN)
    assert torch.equal(buffer.combine(rows, handle, bias=one)[0], (X.float() + bias[:1].float()).to(dtype))


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("expand", [False, True])
def test_weights_by_a_handle_are_those_of_the_first_dispatch(expand, sync):
    """To the bit: 0 of choices elsewhere and of rows of no token, negative zeros, infinity and NaN as given."""
    buffer = alone(ElasticBuffer)
    odd = WEIGHTS.clone()
    odd[0], odd[1, 0] = -0.0, float("nan")
    odd[1, 2], odd[3, 1] = float("inf"), float("-inf")
    how = dict(do_expand=expand)
    _, _, first, handle, _ = buffer.dispatch(X, IDS, odd, num_experts=EXPERTS, do_cpu_sync=sync, **how)
    again = buffer.dispatch(X, topk_weights=odd, handle=handle, **how)[2]
    assert torch.equal(first.view(torch.int32), again.view(torch.int32))
    used = torch.sort(first.flatten().view(torch.int32)).values
    wanted = torch.cat((odd[IDS >= 0], torch.zeros(first.numel() - int((IDS >= 0).sum()))))
    assert torch.equal(used, torch.sort(wanted.view(torch.int32)).values)


def test_the_number_of_an_expert_that_is_none_is_in_the_error():
    buffer = alone(ElasticBuffer)
    for wrong in (-5, EXPERTS, EXPERTS + 1, 1 << 40, -(1 << 40)):
        ids = IDS.clone()
        ids[1, 1] = wrong
        with pytest.raises(tokenyard.RoutingError, match=f"choice 1 of token 1 names expert {wrong},"):
            buffer.dispatch(X, ids, num_experts=EXPERTS)


@pytest.mark.parametrize("kind", [ElasticBuffer, NeverWaits])
def test_routing_that_the_receiving_half_tells_of_is_raised_with_what_came(monkeypatch, kind):
    """As on a GPU, where the sending half's error comes in place of the receiving one's work, which is made again."""
    elastic, kept = kind is ElasticBuffer, tokenyard.AllToAll.dispatch_recv
    buffer = alone(kind) if elastic else NeverWaits(tokenyard.World.threads(1)[0], HIDDEN, 16, EXPERTS)
    found = [tokenyard.RoutingError("of the sending half")]
    found[0].fatal = False

    def receive(*given):
        if found:
            raise found.pop()
        return kept(*given)

    def dispatch():
        if elastic:
            how = dict(do_cpu_sync=False, previous_event_before_epilogue=buffer.capture())
            return buffer.dispatch(X, IDS, WEIGHTS, num_experts=EXPERTS, **how)
        return buffer.dispatch_with_permute(
            hidden=X, topk_idx=IDS, topk_weights=WEIGHTS, num_of_experts=EXPERTS, num_permuted_tokens=64, non_blocking=True)

    monkeypatch.setattr(tokenyard.AllToAll, "dispatch_recv", receive)
    with pytest.raises(tokenyard.RoutingError, match="of the sending half") as raised:
        dispatch()
    assert not found
    again = dispatch()
    # Rows that nothing came for hold anything.
    assert torch.equal(raised.value.dispatched[0][:TOKENS], again[0][:TOKENS]) and again[0][:TOKENS].any()


def test_what_constructors_refuse():
    world = tokenyard.World.threads(1)[0]
    for call in (lambda: ElasticBuffer(None, num_bytes=1), lambda: HybridEPBuffer(None, HIDDEN, 16, 2)):
        with pytest.raises(ValueError, match="group is None: give a group of torch.distributed, or a tokenyard.World"):
            call()
    later = tokenyard.World.threads(1)[0].regroup(1, [0])
    for call in (lambda: Buffer(later), lambda: ElasticBuffer(later, num_bytes=1), lambda: HybridEPBuffer(later, HIDDEN, 16, 2)):
        with pytest.raises(ValueError, match="group is a world of generation 1: give a group of these ranks alone"):
            call()
    for seconds in (0, -1, float("nan"), None, "3", 2e9):
        with pytest.raises(ValueError, match=f"num_gpu_timeout_secs is {seconds!r}: give seconds above 0"):
            ElasticBuffer(world, num_bytes=1, num_gpu_timeout_secs=seconds)
    for name in ("num_max_tokens_per_rank", "hidden", "num_topk"):
        with pytest.raises(TypeError, match=f"{name} is a float, 1.5: give a whole number"):
            ElasticBuffer(world, num_bytes=1, **{name: 1.5})
    for name in ("max_num_of_tokens_per_rank", "num_sms_dispatch_api", "num_sms_combine_api"):
        with pytest.raises(TypeError, match=f"{name} is a float, 1.5: give a whole number"):
            HybridEPBuffer(world, **(dict(hidden_dim=HIDDEN, max_num_of_tokens_per_rank=4, num_local_experts=2) | {name: 1.5}))
    for event in (3, object()):
        with pytest.raises(TypeError, match="previous_event is a .*: give an EventHandle"):
            Buffer(world).get_dispatch_layout(IDS, EXPERTS, previous_event=event)


# HybridEPBuffer


@pytest.mark.parametrize("permutes", [True, False])
def test_hybrid_dispatches_that_are_refused_send_nothing(permutes):
    buffer = alone(HybridEPBuffer)
    call = buffer.dispatch_with_permute if permutes else buffer.dispatch
    rows = int(MAP.sum()) if permutes else int(MAP.any(1).sum())

    def dispatch(**how):
        return call(**(dict(hidden=X, routing_map=MAP) | how))

    def refused(kind, match, **how):
        with pytest.raises(kind, match=match):
            dispatch(**how)
        assert len(dispatch()[0]) == rows

    refused(TypeError, "hidden is a list: give a tensor", hidden=[X])
    for dtype in (torch.float64, torch.int8):
        refused(TypeError, f"hidden is {dtype}: give", hidden=X.to(dtype))
    refused(TypeError, "routing_map is a list: give a tensor", routing_map=MAP.tolist())
    refused(ValueError, "routing_map is on meta", routing_map=elsewhere(MAP))
    refused(TypeError, "probs is a list: give a tensor", probs=PROBS.tolist())
    refused(ValueError, "probs is on meta", probs=elsewhere(PROBS))
    fp8 = X.to(torch.float8_e4m3fn)
    for kind, match, scales in (
        (TypeError, "is torch.float16: give torch.float32 or torch.int32", torch.ones(TOKENS, 2).half()),
        (TypeError, "is a list: give a tensor", [1.0]),
        (ValueError, r"has the shape \[5, 3\]: give \[5, 2\]", torch.ones(TOKENS, 3)),
        (ValueError, r"has the shape \[5, 2\]: give \[5, 1\]", torch.ones(TOKENS, 2, dtype=torch.int32)),
        (ValueError, r"has the shape \[4, 2\]: give \[5, 2\]", torch.ones(TOKENS - 1, 2)),
        (ValueError, "is on meta", elsewhere(torch.ones(TOKENS, 2))),
    ):
        refused(kind, f"scaling_factor {match}", hidden=fp8, scaling_factor=scales)
    chosen = dict(routing_map=None, topk_idx=IDS, topk_weights=WEIGHTS, num_of_experts=EXPERTS)
    for wrong in (EXPERTS, EXPERTS + 1, 1 << 40, -2, -(1 << 40)):
        ids = IDS.clone()
        ids[1, 1] = wrong
        refused(ValueError, "topk_idx names what is no expert: give 0 to 5, or -1 for none", **(chosen | dict(topk_idx=ids)))
    refused(TypeError, "topk_idx is torch.float32: give torch.int32 or torch.int64", **(chosen | dict(topk_idx=IDS.float())))
    refused(ValueError, r"topk_idx has the shape \[4, 3\]: give \[5, 3\]", **(chosen | dict(topk_idx=IDS[:4])))
    for shape in ((5, 4), (5, 2), (6, 3)):
        refused(ValueError, r"topk_weights has the shape .*: give \[5, 3\]", **(chosen | dict(topk_weights=torch.ones(shape))))
    refused(TypeError, "topk_weights is torch.bfloat16: give torch.float32", **(chosen | dict(topk_weights=WEIGHTS.bfloat16())))
    refused(ValueError, "probs is given with topk_idx: give topk_weights in its place", **(chosen | dict(probs=PROBS)))
    for kind, match, wrong in WHOLE:
        refused(kind, f"num_of_experts is {match}", **(chosen | dict(num_of_experts=wrong)))
    for wrong in (0, -6, 1 << 21):
        refused(ValueError, f"num_of_experts is {wrong}: give", **(chosen | dict(num_of_experts=wrong)))
    if permutes:
        for name in ("num_permuted_tokens", "pad_multiple"):
            for kind, match, wrong in WHOLE:
                refused(kind, f"{name} is {match}", **{name: wrong})
            refused(ValueError, f"{name} is -3: give 0 or more", **{name: -3})
        refused(ValueError, f"pad_multiple is {1 << 31}: give at most", pad_multiple=1 << 31)
    # By a handle.
    handle = dispatch()[-1]
    for kind, match, how in (
        (ValueError, r"hidden has the shape \[5, 128\]: give \[5, 256\]", dict(hidden=X[:, :128].contiguous())),
        (ValueError, "hidden is on meta", dict(hidden=elsewhere(X))),
        (TypeError, "probs is a list", dict(hidden=X, probs=[1])),
        (ValueError, "topk_weights has the shape", dict(hidden=X, topk_idx=IDS, topk_weights=WEIGHTS[:, :2])),
    ) + (((ValueError, "num_permuted_tokens is -3", dict(hidden=X, num_permuted_tokens=-3)),) if permutes else ()):
        with pytest.raises(kind, match=match):
            call(handle=handle, **how)
    with pytest.raises(ValueError, match="handle is of another HybridEPBuffer: give it to the one"):
        other = alone(HybridEPBuffer)
        (other.dispatch_with_permute if permutes else other.dispatch)(hidden=X, handle=handle)


def test_experts_that_are_none_where_nobody_waits():
    buffer = NeverWaits(tokenyard.World.threads(1)[0], HIDDEN, 16, EXPERTS)
    ids = IDS.clone()
    ids[1, 1] = EXPERTS
    given = dict(hidden=X, num_of_experts=EXPERTS, non_blocking=True, num_permuted_tokens=20)
    # On the CPU this call has what a later one has on a GPU.
    with pytest.raises(tokenyard.RoutingError):
        buffer.dispatch_with_permute(topk_idx=ids, **given)
    rows, _, _, counts, _ = buffer.dispatch_with_permute(topk_idx=IDS, **given)
    assert len(rows) == 20 and counts.tolist() == MAP.sum(0).tolist()


@pytest.mark.parametrize("permutes", [True, False])
def test_hybrid_combines_that_are_refused_send_nothing(permutes):
    buffer, other = alone(HybridEPBuffer), alone(HybridEPBuffer)
    dispatch = buffer.dispatch_with_permute if permutes else buffer.dispatch
    combine = buffer.combine_with_unpermute if permutes else buffer.combine
    rows, probs, *_, handle = dispatch(hidden=X, routing_map=MAP, probs=PROBS)
    factor = MAP.sum(1, keepdim=True) if permutes else 1
    n = len(rows)

    def refused(kind, match, **how):
        with pytest.raises(kind, match=match):
            combine(**(dict(hidden=rows, handle=handle) | how))
        out, back = combine(hidden=rows, probs=probs, handle=handle)
        assert torch.equal(out, (X.float() * factor).bfloat16()) and torch.equal(back, PROBS * MAP)

    refused(TypeError, "hidden is a list: give a tensor", hidden=[rows])
    refused(TypeError, "hidden is torch.uint8: give", hidden=rows.to(torch.uint8))
    refused(ValueError, rf"hidden has the shape \[{n}, 128\]: give \[{n}, 256\]", hidden=rows[:, :128].contiguous())
    refused(ValueError, r"hidden has the shape \[256\]: give a tensor of 2", hidden=rows[0])
    refused(ValueError, "hidden is on meta", hidden=elsewhere(rows))
    wrong = [(n, 2), (n + 1,)] if permutes else [(n,), (n, EXPERTS - 1), (n, 2 * EXPERTS)]
    for shape in wrong:
        refused(ValueError, rf"probs is torch.float32 \[.*\]: give float32 \[{n}", probs=torch.ones(shape))
    refused(TypeError, "probs is a list: give a tensor", probs=[1.0])
    refused(ValueError, "probs is on meta", probs=elsewhere(probs))
    for call in (other.combine_with_unpermute, other.combine):
        with pytest.raises(ValueError, match="handle is of (another HybridEPBuffer|the other dispatch): give"):
            call(hidden=rows, handle=handle)
