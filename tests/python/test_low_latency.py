"""Low-latency calls of `deep_ep` by operators in C: that they are used, and bring and refuse what calls in Python do."""

import gc
import signal
import sys
import threading
import weakref
from concurrent import futures
from types import SimpleNamespace

import pytest

import tokenyard
from rig import Case, settle, the_torch

torch = the_torch()

from torch._subclasses import FakeTensorMode  # noqa: E402: after torch
from test_eager import done, is_inside, needs_them, of_ranks, python_alone, way  # noqa: E402, F401: after torch, and fixtures
from test_ops import DEVICE, PLACE, tensors  # noqa: E402
from tokenyard import _eager, _native, deep_ep, ops  # noqa: E402
from tokenyard.deep_ep import _planned  # noqa: E402
from tokenyard.deep_ep._buffer import _Hook  # noqa: E402


def one_rank():
    """A case of one rank, its buffer and its tensors."""
    case = Case(1, tokens=9, hidden=512, experts=8, top_k=3)
    (world,) = tokenyard.World.threads(1)
    deep_ep.Buffer.low_latency_sms = PLACE.get("sms")
    x, ids, weights = tensors(case, 0)
    return case, deep_ep.Buffer(world, low_latency_mode=True), x.to(torch.bfloat16), ids, weights


@needs_them
@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("options", [{"use_fp8": False}, {}, {"round_scale": True, "use_ue8m0": True}], ids=str)
def test_low_latency_calls_of_deep_ep_are_those_of_python(options, hooks, python_alone):
    case = Case(2, tokens=9, hidden=512, experts=8, top_k=3)

    def run(world):
        deep_ep.Buffer.low_latency_sms = PLACE.get("sms")
        buffer = deep_ep.Buffer(world, low_latency_mode=True)
        x, ids, weights = tensors(case, world.rank)
        x, found = x.to(torch.bfloat16), []
        for _ in range(2):
            before = _native.operator_handles()
            rows, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, ids, case.tokens, case.experts, **options, return_recv_hook=hooks
            )
            assert (hook is None) != hooks
            if hook:
                assert handle.kept is None
                hook()
            used = _native.operator_handles() > before
            values, scales = rows if isinstance(rows, tuple) else (rows, None)
            by_counts = torch.ones(values.shape, dtype=torch.bfloat16, device=DEVICE) * counts[:, None, None]
            sums, _, hook = buffer.low_latency_combine(by_counts, ids, weights, handle, return_recv_hook=hooks)
            assert (hook is None) != hooks
            if hook:
                hook()
            settle(DEVICE)
            assert event.event is None
            found.append((used, values, scales, counts, handle, sums))
            # A call into given sums goes the other way, and may have this handle.
            buffer.low_latency_combine(by_counts, ids, weights, handle, out=torch.empty_like(sums))
        world.barrier()
        return found

    fast = of_ranks(2, run)
    python_alone()
    slow = of_ranks(2, run)
    for of_fast, of_slow in zip(fast, slow):
        for call, ((used, *a), (unused, *b)) in enumerate(zip(of_fast, of_slow)):
            # The first one makes the context.
            assert used == (call > 0) and not unused
            assert tuple(a[3])[2:] == tuple(b[3])[2:]
            torch.testing.assert_close(a[4], b[4], rtol=0, atol=0)
            torch.testing.assert_close(a[2], b[2], rtol=0, atol=0)
            torch.testing.assert_close(a[3][1], b[3][1], rtol=0, atol=0)
            for x, y in ((a[0], b[0]), (a[1], b[1]), (a[3][0], b[3][0])):
                assert (x is None) == (y is None)
                if x is None:
                    continue
                assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
                for expert, rows in enumerate(a[2].tolist()):
                    torch.testing.assert_close(x[expert, :rows].float(), y[expert, :rows].float(), rtol=0, atol=0)


@needs_them
def test_what_low_latency_calls_refuse_is_what_they_refuse_in_python(monkeypatch):
    """Calls after one that the operator in C took: wrong tensors raise what they raise in Python, and write nothing."""
    case, buffer, x, ids, weights = one_rank()
    for _ in range(2):
        handle = buffer.low_latency_dispatch(x, ids, case.tokens, case.experts, use_fp8=False)[2]
    rows = torch.ones((case.experts, case.tokens, case.hidden), dtype=torch.bfloat16, device=DEVICE)
    dispatches = [
        (x.float(), ids), (x.view(torch.uint16), ids), (x[0], ids), (x, ids[0]), (x, ids.float()), (x, ids[:-1]), (x[:-1], ids),
        (torch.cat([x, x]), torch.cat([ids, ids])), (None, ids), (x, None),
    ]
    combines = [
        (rows.to(torch.float8_e4m3fn), ids, weights), (rows[:, :, :-1], ids, weights), (rows, ids[:-1], weights[:-1]),
        (rows, ids.float(), weights), (rows, ids, weights.half()), (rows, ids, weights[:-1]), (rows, ids, weights[:, :-1]),
        (None, ids, weights), (rows, None, weights), (rows, ids, None),
    ]

    def raised(call, *given):
        try:
            call(*given)
        except Exception as error:
            return type(error), str(error)
        return None

    def all_of():
        more = (case.tokens, case.experts, None, None, None, False)
        found = [raised(buffer.low_latency_dispatch, *given, *more) for given in dispatches]
        return found + [raised(buffer.low_latency_combine, *given, handle) for given in combines]

    fast = all_of()
    monkeypatch.setattr(_eager, "DEFINED", False)
    slow = all_of()
    monkeypatch.setattr(_eager, "DEFINED", True)
    for number, (one, other) in enumerate(zip(fast, slow)):
        assert one == other is not None, (number, one, other)
    with pytest.raises(ValueError, match="topk_weights has 6 choices a token: give the dispatch's, at most 3"):
        buffer.low_latency_combine(rows, ids.repeat(1, 2), weights.repeat(1, 2), handle)
    # What no context serves is refused before the one that is there goes.
    context = buffer._low_latency.made()
    many = torch.arange(33, device=DEVICE).expand(case.tokens, 33)
    for given, message in (
        ((x[:, :4], ids, 9, 8, None, None, None, False), "x has 4 columns: give a multiple of 8"),
        ((x[:, :0], ids, 9, 8, None, None, None, False), "x has 0 columns: give 1 to 1048576"),
        ((x[:, :64], ids, 9, 8), "with use_fp8 give a multiple of 128"), ((x, many, 9, 64), "topk_idx has 33 choices: give 1 to 32"),
        ((x, ids, 1 << 40, 8), "num_max_dispatch_tokens_per_rank has 1099511627776 tokens"),
        ((x, ids, 1 << 70, 8), "num_max_dispatch_tokens_per_rank has 1180591620717411303424 tokens"),
        ((x, ids, 9, 1 << 19), "num_experts has 524288 experts a rank: give 1 to 1364"),
        ((x.to("meta"), ids, 9, 8), "x is on meta: give a tensor on cpu or cuda"),
    ):
        with pytest.raises(ValueError, match=message):
            buffer.low_latency_dispatch(*given)
    assert buffer._low_latency.made() is context
    # Weights that are not contiguous, and fewer choices than the context has, are none for the operator.
    apart = torch.stack([weights, weights], 2)[:, :, 0]
    sums = buffer.low_latency_combine(rows, ids, apart, handle)[0]
    wanted = (weights * (ids >= 0)).sum(1, keepdim=True)
    torch.testing.assert_close(sums.float(), wanted.expand(-1, case.hidden), rtol=0.01, atol=0)
    fewer = buffer.low_latency_dispatch(x, ids[:, :2], case.tokens, case.experts, use_fp8=False)[2]
    sums = buffer.low_latency_combine(rows, ids[:, :2], weights[:, :2].contiguous(), fewer)[0]
    wanted = (weights * (ids >= 0))[:, :2].sum(1, keepdim=True)
    torch.testing.assert_close(sums.float(), wanted.expand(-1, case.hidden), rtol=0.01, atol=0)
    # Rows of another width make another context.
    for _ in range(2):
        wide = buffer.low_latency_dispatch(torch.cat([x, x], 1), ids, case.tokens, case.experts, use_fp8=False)[2]
        assert wide[3] == 2 * case.hidden


@needs_them
@pytest.mark.parametrize("hooks", [False, True])
def test_unusable_routing_of_a_low_latency_call_is_that_of_python(hooks, python_alone):
    """The other rank's rows are there, and this rank's sums are 0, whose tokens the dispatch went on without."""
    if DEVICE == "cuda":
        pytest.skip("a GPU tells of routing in a later call: run it without TOKENYARD_TEST_DEVICE")
    case = Case(2, tokens=9, hidden=512, experts=8, top_k=3)

    def run(world):
        buffer = deep_ep.Buffer(world, low_latency_mode=True)
        x, ids, weights = tensors(case, world.rank)
        x, found = x.to(torch.bfloat16), []
        for number in range(3):
            given = torch.full_like(ids, 99) if number == 2 and world.rank == 0 else ids
            raised = None
            try:
                got = buffer.low_latency_dispatch(
                    x, given, case.tokens, case.experts, use_fp8=False, return_recv_hook=hooks
                )
            except tokenyard.RoutingError as error:
                raised, got = type(error), error.dispatched
            if hooks:
                got[4]()
            sums, _, hook = buffer.low_latency_combine(got[0], ids, weights, got[2], return_recv_hook=hooks)
            if hooks:
                hook()
            found.append((raised, got[1], sums, got[2].planned is not None))
        world.barrier()
        return found

    fast = of_ranks(2, run)
    python_alone()
    slow = of_ranks(2, run)
    for rank, (of_fast, of_slow) in enumerate(zip(fast, slow)):
        for number, (one, other) in enumerate(zip(of_fast, of_slow)):
            assert one[0] == other[0] == (tokenyard.RoutingError if number == 2 and rank == 0 else None)
            assert one[3] == (number > 0) and not other[3]
            torch.testing.assert_close(one[1], other[1], rtol=0, atol=0)
            torch.testing.assert_close(one[2], other[2], rtol=0, atol=0)
            assert bool(one[2].any()) == (one[0] is None)


@needs_them
@pytest.mark.parametrize("kind", ["low latency", "ops", "into"])
def test_an_error_is_its_own_calls_where_a_signals_handler_calls_too(kind):
    """Each unusable dispatch raises, though handlers make good ones at any place; each handler's call is right."""
    if DEVICE == "cuda":
        pytest.skip("calls on a GPU raise what they find in a later check")
    case = Case(1, tokens=4, hidden=128, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    buffer, ep = deep_ep.Buffer(world, low_latency_mode=True), tokenyard.AllToAll(world, **case.limits)
    (x, ids, weights), signals = tensors(case, 0), []
    x16, wrong = x.to(torch.bfloat16), torch.full_like(ids, 99)
    rows, counts = torch.zeros(ep.capacity(), case.hidden), torch.zeros(case.experts, dtype=torch.int32)
    good = lambda ids: buffer.low_latency_dispatch(x16, ids, case.tokens, case.experts, use_fp8=False)  # noqa: E731
    calls = {
        "low latency": good, "ops": lambda ids: ops.dispatch(ep, x, ids, weights),
        "into": lambda ids: ops.dispatch_into(ep, rows, counts, x, ids, weights),
    }
    wanted = good(ids)[1].tolist()

    def handler(*_):
        # One at a time, as a handler of a program would.
        if not busy:
            busy.append(True)
            signals.append(good(ids)[1].tolist())
            busy.pop()

    busy, unnoticed = [], 0
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
        for _ in range(300):
            try:
                calls[kind](wrong)
                unnoticed += 1
            except tokenyard.RoutingError:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert unnoticed == 0 and len(signals) > 10 and all(found == wanted for found in signals), (unnoticed, len(signals))


def test_a_hook_receives_after_an_error_that_came_in_its_place():
    def hook_of(*raised):
        left = [*raised, None]

        def receive():
            calls.append(left[0])
            error = left.pop(0)
            if error is not None:
                raise error

        calls = []
        return _Hook(receive), calls

    earlier = tokenyard.RoutingError("an earlier call's")
    hook, calls = hook_of(earlier)
    with pytest.raises(tokenyard.RoutingError):
        hook()
    hook()
    assert calls == [earlier, None]
    with pytest.raises(ValueError, match="called already"):
        hook()
    # By the next call: the hook has the error, once.
    hook, calls = hook_of(earlier)
    hook.before_next()
    hook.before_next()
    assert calls == [earlier, None]
    with pytest.raises(tokenyard.RoutingError):
        hook()
    with pytest.raises(ValueError, match="called already"):
        hook()
    # Of a call that took place, or was received, there is no second.
    own = tokenyard.RoutingError("its own")
    own.handle = None
    received = ValueError("received already")
    received.received = True
    for error in (own, received):
        hook, calls = hook_of(error)
        hook.before_next()
        hook.before_next()
        assert calls == [error]
    # Two earlier calls' errors, of which the hook has the first.
    hook, calls = hook_of(earlier, tokenyard.OrderError("another's"))
    hook.before_next()
    assert len(calls) == 3
    with pytest.raises(tokenyard.RoutingError, match="an earlier call's"):
        hook()
    # What neither received nor is an error of the library leaves it to be received.
    for error in (ValueError("other memory"), KeyboardInterrupt()):
        hook, calls = hook_of(error)
        with pytest.raises(type(error)):
            hook.before_next()
        hook()
        assert calls == [error, None]


@needs_them
def test_halves_whose_tensors_changed_and_halves_that_ctrl_c_left():
    case, buffer, x, ids, weights = one_rank()

    def dispatch():
        return buffer.low_latency_dispatch(x, ids, case.tokens, case.experts, use_fp8=False, return_recv_hook=True)

    dispatch()[4]()
    rows, counts, handle, _, hook = dispatch()
    kept = rows.clone()
    memory = rows.data
    rows.data = kept
    with pytest.raises(ValueError, match="other memory than when it was sent"):
        hook()
    rows.data = memory
    hook()
    with pytest.raises(ValueError, match="called already"):
        hook()
    # Sent, and nobody has the number: the next one receives it first.
    for call in (dispatch, lambda: buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True)):
        sent = _eager.low_latency_made

        def interrupted(*made):
            _eager.low_latency_made = sent
            raise KeyboardInterrupt

        _eager.low_latency_made = interrupted
        with pytest.raises(KeyboardInterrupt):
            call()
        assert _eager.low_latency_made is sent
        call()[-1]()
    sums = buffer.low_latency_combine(rows, ids, weights, handle)[0]
    wanted = buffer.low_latency_combine(rows.clone(), ids, weights, handle, out=torch.empty_like(sums))[0]
    torch.testing.assert_close(sums, wanted, rtol=0, atol=0)
    settle(DEVICE)
    half = _native.newest_half()
    assert half is None


def interrupted_at(place, names, call):
    """Makes a call, with Ctrl-C before so many opcodes of functions with these names; whether it has as many."""
    left = [place]

    def opcodes(frame, event, _):
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return opcodes

    def calls(frame, *_):
        if frame.f_code.co_name not in names or not frame.f_code.co_filename.endswith("_buffer.py"):
            return None
        # Python 3.13 traces opcodes of a frame that has a trace alone.
        frame.f_trace = opcodes
        frame.f_trace_opcodes = True
        return opcodes

    # Python 3.12 looks whether any frame traces opcodes as a trace begins.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(calls)
    try:
        call()
        return left[0] <= 0
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)


@needs_them
def test_ctrl_c_at_any_place_of_a_hooks_calls_leaves_the_next_ones_right():
    case, buffer, x, ids, weights = one_rank()

    def dispatched():
        return buffer.low_latency_dispatch(x, ids, case.tokens, case.experts, use_fp8=False, return_recv_hook=True)

    def combined(rows, handle):
        return buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True)

    def trip():
        rows, _, handle, _, hook = dispatched()
        hook()
        sums, _, hook = combined(rows, handle)
        hook()
        settle(DEVICE)
        return sums, rows, handle

    trip()
    wanted, rows, handle = trip()
    names = ("_planned_send", "_planned_send_back", "_hook_of")
    for call in (dispatched, lambda: combined(rows, handle)):
        places = 1
        while interrupted_at(places, names, call):
            torch.testing.assert_close(trip()[0], wanted, rtol=0, atol=0)
            places += 1
        assert places > 20, "the call goes by functions of other names"
        # The one that was not interrupted is received before the next.
        torch.testing.assert_close(trip()[0], wanted, rtol=0, atol=0)


@needs_them
def test_a_hook_that_fails_has_the_handle():
    def receive():
        error = KeyboardInterrupt()
        error.handle = SimpleNamespace(number=7)
        raise error

    handle = SimpleNamespace(planned=None)
    with pytest.raises(KeyboardInterrupt):
        _planned.receive(SimpleNamespace(receive=receive), "shape", handle)
    assert handle.planned[0] == 7 and handle.planned[2] == "shape"


@needs_them
def test_unusable_routing_of_a_hooks_call_on_a_gpu():
    """The hook raises it in place of its work, and receives when it is called again; the next call is right."""
    if DEVICE != "cuda":
        pytest.skip("the CPU device tells of routing in the call itself: run it with TOKENYARD_TEST_DEVICE=cuda")
    case, buffer, x, ids, weights = one_rank()
    for given in (ids, torch.full_like(ids, 99), ids):
        got = buffer.low_latency_dispatch(x, given, case.tokens, case.experts, use_fp8=False, return_recv_hook=True)
        settle(DEVICE)
        if given is not ids:
            with pytest.raises(tokenyard.RoutingError):
                got[4]()
        got[4]()
        sums, _, hook = buffer.low_latency_combine(got[0], ids, weights, got[2], return_recv_hook=True)
        hook()
        settle(DEVICE)
        assert bool(sums.any()) == (given is ids)


@needs_them
@pytest.mark.parametrize("options", [{"use_fp8": False}, {}, {"round_scale": True, "use_ue8m0": True}], ids=str)
def test_small_results_share_memory_in_which_no_rows_lie(options):
    """A handle, which has small ones, would else keep the rows, which are large. Several calls share what they have."""
    case, buffer, x, ids, _ = one_rank()
    calls = []
    for _ in range(20):
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, case.tokens, case.experts, **options)
        calls.append((rows if isinstance(rows, tuple) else (rows,), (handle[0], handle[1], counts)))
    settle(DEVICE)
    # The first one is made in Python, and the next one's memory is its own, as those of plans of one call are.
    calls = calls[2:]
    memories = [{memory_of(tensor) for tensor in group} for call in calls for group in call]
    assert all(len(memory) == 1 for memory in memories)
    large, small = (set().union(*memories[first::2]) for first in (0, 1))
    assert (len(large), len(small)) == (18, 2) and not large & small
    every = [tensor for large, small in calls for tensor in (*large, *small)]
    assert all(is_inside(tensor) for tensor in every)
    for number, tensor in enumerate(every):
        tensor.fill_(1 + number)
    for number, tensor in enumerate(every):
        # Of rows that are fp8 not every number.
        wanted = torch.full_like(tensor, 1 + number).to(torch.float32)
        assert bool((tensor.to(torch.float32) == wanted).all()), f"another result lies in that of place {number}"
    buffer.destroy()


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


@needs_them
def test_calls_of_another_stream_and_of_a_capture_share_no_memory():
    if not torch.device(DEVICE).type == "cuda":
        pytest.skip("the CPU device has no streams of torch: run it on a GPU")
    case, buffer, x, ids, _ = one_rank()

    def memory():
        return memory_of(buffer.low_latency_dispatch(x, ids, case.tokens, case.experts)[2][0])

    memory()
    memory()
    first = memory()
    assert memory() == first
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = memory()
        assert other == memory() != first
    assert memory() == first
    third = torch.cuda.Stream()
    third.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(third):
        assert memory() not in (first, other)
    torch.cuda.current_stream().wait_stream(third)
    with torch.cuda.stream(side):
        assert memory() == other
    torch.cuda.current_stream().wait_stream(side)
    settle(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = buffer.low_latency_dispatch(x, ids, case.tokens, case.experts)[2][0]
    assert memory_of(captured) not in (first, other)
    graph.replay()
    settle(DEVICE)
    # Numbers of tokens; the graph's memory is its own after its handle went, too.
    wanted = captured.clone()
    captured.fill_(-7)
    more = [buffer.low_latency_dispatch(x, ids, case.tokens, case.experts)[2][0] for _ in range(40)]
    kept = [sources.clone() for sources in more]
    graph.replay()
    settle(DEVICE)
    assert torch.equal(captured, wanted) and all(torch.equal(a, b) for a, b in zip(more, kept))
    del graph, captured
    buffer.destroy()


def unusual(x, ids):
    """Arguments of a low-latency dispatch that no call takes, and what is said of them."""
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    columns, tokens = x.shape[1], x.shape[0]
    wide = torch.zeros(tokens, columns + 2, dtype=x.dtype, device=x.device)
    return [
        ((x, ids.to("meta")), "topk_idx is on meta"), ((x.t().contiguous().t(), ids), "x has the strides"),
        ((x[:1].expand(tokens, columns), ids), "x has the strides"), ((wide[:, :columns], ids), "x has the strides"),
        ((wide[1:2, :columns], ids[:1]), "x has the strides"), ((freed, ids), "x has no memory"),
        ((x.to_sparse(), ids), "x is torch.sparse_coo"), ((x._neg_view(), ids), "x is a negative view"),
        ((FakeTensorMode().from_tensor(x), ids), "x has no memory"),
        ((x, ids, torch.zeros(5, dtype=torch.int32, device=x.device)), "cumulative_local_expert_recv_stats has the shape"),
        ((x, ids, None, torch.zeros(5, dtype=torch.int64, device=x.device)), "dispatch_wait_recv_cost_stats has the shape"),
    ]


@pytest.mark.parametrize("choices, most", [(4, 1364), (16, 818)])
def test_limits_that_are_looked_at_early_are_the_builders(choices, most):
    """A context of as many experts as may repeat makes right calls, and one of one more is refused, in both places."""
    case = Case(1, tokens=5, hidden=64, experts=most, top_k=choices)
    (world,) = tokenyard.World.threads(1)
    x, ids, weights = tensors(case, 0)
    # One expert twice, and the last one.
    ids[:, 0], ids[:, 1], ids[:, 2] = most - 1, most - 2, most - 2
    deep_ep._checks.low_latency(x, case.tokens, most, choices)
    with tokenyard.AllToAll(world, **case.limits | PLACE, duplicates=True) as ep:
        got = ops.dispatch(ep, x, ids, weights)
        sums = ops.combine(got.rows, got)
        done(ep)
    there = ids >= 0
    torch.testing.assert_close(got.counts, torch.bincount(ids[there], minlength=most).to(torch.int32))
    wanted = x * (weights * there).sum(1, keepdim=True)
    torch.testing.assert_close(sums, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="experts"):
        deep_ep._checks.low_latency(x, case.tokens, most + 1, choices)
    with pytest.raises(ValueError, match="experts"):
        tokenyard.AllToAll(world, **case.limits | PLACE | {"experts": most + 1}, duplicates=True)


def test_tensors_that_no_low_latency_call_takes_are_refused_before_a_context_is_made():
    """Other ranks make none for such a call, so the rank would wait for them, and lose the one that was there."""
    case, buffer, x, ids, weights = one_rank()
    for given, message in unusual(x, ids):
        with pytest.raises(ValueError, match=message):
            buffer.low_latency_dispatch(*given[:2], case.tokens, case.experts, *given[2:], use_fp8=False)
        assert buffer._low_latency.made() is None


def test_a_low_latency_call_that_is_refused_leaves_the_one_before_to_its_hook():
    case, buffer, x, ids, weights = one_rank()
    named = dict(use_fp8=False, return_recv_hook=True)
    buffer.low_latency_dispatch(x, ids, case.tokens, case.experts, **named)[-1]()
    rows, _counts, handle, _event, hook = buffer.low_latency_dispatch(x, ids, case.tokens, case.experts, **named)
    for given, message in unusual(x, ids)[:9]:
        for hooks in (False, True):
            with pytest.raises(ValueError, match=message):
                buffer.low_latency_dispatch(*given, case.tokens, case.experts, use_fp8=False, return_recv_hook=hooks)
            assert buffer._dispatched.waits()
    hook()
    sums = buffer.low_latency_combine(rows, ids, weights, handle)[0]
    wanted = (weights * (ids >= 0)).sum(1, keepdim=True) * x.float()
    torch.testing.assert_close(sums.float(), wanted, rtol=0.02, atol=0.02)


def test_contexts_of_buffers_wait_as_long_as_their_calls(monkeypatch):
    (world,) = tokenyard.World.threads(1)
    for kind, more in ((deep_ep.Buffer, ()), (deep_ep.HybridEPBuffer, (64, 8, 2))):
        monkeypatch.setattr(kind, "timeout_seconds", 90.0)
        assert kind(world, *more)._open().timeout == 90.0
    sizes = dict(num_max_tokens_per_rank=8, hidden=128, num_topk=1)
    for seconds, longest in ((3, 30.0), (70, 70.0)):
        assert deep_ep.ElasticBuffer(world, **sizes, num_gpu_timeout_secs=seconds)._open().timeout == longest
    assert world.timeout == 30.0


@needs_them
def test_handles_that_nobody_takes_go():
    # In a thread of its own, since calls that Ctrl-C ended in other tests may have left some to this one.
    with futures.ThreadPoolExecutor(1) as threads:
        threads.submit(leave_handles).result()


def leave_handles():
    case, buffer, x, ids, weights = one_rank()
    handle = buffer.low_latency_dispatch(x, ids, case.tokens, case.experts)[2]
    (shape,) = buffer._low_latency.shapes.values()
    gc.collect()
    before = _native.operator_handles()
    numbers = [_eager.LOW_LATENCY_DISPATCH(x, ids, shape.number)[1] for _ in range(18)]
    assert len(set(numbers)) == 18 and min(numbers) > 0 and _native.operator_handles() == before + 16
    assert _native.taken_handle(numbers[1]) is None
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(_native.taken_handle(numbers[3])))
    thread.start()
    thread.join()
    assert elsewhere == [None]
    # In any order, and once.
    taken = [_native.taken_handle(numbers[place]) for place in (3, 5, 2, 4, *range(6, 18))]
    assert all(taken) and _native.taken_handle(numbers[3]) is None and _native.operator_handles() == before + 16
    rows = torch.ones((case.experts, case.tokens, case.hidden), dtype=torch.bfloat16, device=DEVICE)
    assert _eager.low_latency_combine(rows, ids, weights, numbers[5]) is not None
    del taken
    assert _native.operator_handles() == before
    assert _eager.low_latency_combine(rows, ids, weights, numbers[5]) is None
    settle(DEVICE)
    del handle


@needs_them
def test_a_buffer_that_is_destroyed_lets_go_of_its_context():
    case, buffer, x, ids, weights = one_rank()
    for _ in range(2):
        handle = buffer.low_latency_dispatch(x, ids, case.tokens, case.experts)[2]
    assert handle.planned is not None
    context = weakref.ref(buffer._low_latency.made())
    buffer.destroy()
    assert context() is not None
    del handle
    assert context() is None
