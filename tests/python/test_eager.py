"""Eager calls by operators in C: that they are used, and bring what operators in Python do."""

import gc
import io
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest

import tokenyard
from rig import Case, in_threads, settle, the_torch

torch = the_torch()

from test_ops import DEVICE, PLACE, tensors  # noqa: E402: after torch, without which there is no such module
from tokenyard import _eager, _native, ops  # noqa: E402
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
QUANTIZED = {"dtype": "fp8", "scales": "fp32", "quantize": True, "combine_dtype": "bf16"}
needs_them = pytest.mark.skipif(VERSION < (2, 11), reason="torch before 2.11 has no such interface: install a later one")


def of_ranks(ranks, work):
    """What `work(world)` returned to each rank."""
    return in_threads(DEVICE, ranks, work)


def done(ep):
    settle(DEVICE)
    ep.check()


def refusals(calls):
    """What each call raises: its place, the class and the text."""
    found = []
    for number, call in enumerate(calls):
        with pytest.raises(Exception) as raised:
            call()
        found.append((number, raised.type, str(raised.value)))
    return found


def is_inside(tensor):
    """Whether a tensor ends where its storage does, or before."""
    last = tensor.storage_offset() + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


# Attributes of `_eager`, and the operators whose calls they make.
CALLS = {
    "_DISPATCH": "_dispatch", "_DISPATCH_INTO": "_dispatch_into", "_COMBINE": "_combine", "_COMBINE_INTO": "_combine_into",
    "LOW_LATENCY_DISPATCH": "_low_latency_dispatch", "_LOW_LATENCY_SEND": "_low_latency_send",
    "_LOW_LATENCY_SEND_BACK": "_low_latency_send_back", "_LOW_LATENCY_COMBINE": "_low_latency_combine",
}


@pytest.fixture(params=["functions", "operators"], autouse=True)
def way(request, monkeypatch):
    """Calls go by functions, and once more by torch's operators, which are for profiles."""
    if request.param == "operators":
        if VERSION < (2, 11):
            pytest.skip("torch before 2.11 has no such interface: install a later one")
        for attribute, name in CALLS.items():
            operator = getattr(torch.ops.tokenyard, name).default._op
            monkeypatch.setattr(_eager, attribute, _eager.asked(operator))
    return request.param


@pytest.fixture
def python_alone(monkeypatch):
    """A way to have calls go through operators in Python."""

    def begin():
        monkeypatch.setattr(_eager, "DEFINED", False)

    return begin


def test_they_are_there_from_torch_2_11_on():
    assert _eager.DEFINED == (VERSION >= (2, 11))
    assert _native.define_operators() == _eager.DEFINED


@needs_them
def test_calls_go_by_functions_but_where_a_profiler_runs(way):
    if way == "operators":
        pytest.skip("the functions alone look for a profiler")
    for attribute, name in CALLS.items():
        assert getattr(_eager, attribute) is getattr(_native, "direct" + name)
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    with tokenyard.AllToAll(world, **case.limits | PLACE) as ep:
        x, ids, weights = tensors(case, 0)

        def calls():
            got = ops.dispatch(ep, x, ids, weights)
            sums = ops.combine(got.rows, got)
            handle = ops.dispatch_into(ep, got.rows, got.counts, x, ids, weights, offsets=got.offsets)
            ops.combine_into(sums, got.rows, got._replace(handle=handle))
            done(ep)
            return got.rows, sums

        wanted = calls()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            seen = calls()
        names = [event.name for event in profile.events()]
        for name in ("_dispatch", "_combine", "_dispatch_into", "_combine_into"):
            assert names.count(f"tokenyard::{name}") == 1, names
        given = x.clone().requires_grad_()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            got = ops.dispatch(ep, given, ids, weights)
            sums = ops.combine(got.rows.detach().requires_grad_(), got)
            for written in (
                lambda: ops.dispatch_into(ep, got.rows, got.counts, given, ids, weights, offsets=got.offsets),
                lambda: ops.combine_into(x, got.rows, got),
            ):
                with pytest.raises(RuntimeError, match="has no gradient"):
                    written()
        done(ep)
        for tensor in (got.rows, sums):
            assert "tokenyard" in tensor.grad_fn.name(), tensor.grad_fn
        plans = len(ep._plans)
        for capacity in range(16, 20):
            ops.dispatch(ep, given, ids, weights, capacity=capacity)
        done(ep)
        assert len(ep._plans) == plans
        for a, b in zip(wanted, seen):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@needs_them
@pytest.mark.parametrize("layout", ["contiguous", "masked", "token"])
def test_small_outputs_of_several_calls_share_memory(layout):
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    with tokenyard.AllToAll(world, **case.limits | PLACE) as ep:
        x, ids, weights = tensors(case, 0)
        calls = []
        for _ in range(33):
            got = ops.dispatch(ep, x, ids, weights, layout=layout)
            small = [got.counts, got.offsets, got.token_experts, got.token_weights]
            calls.append((got, [tensor for tensor in small if tensor is not None and tensor.dtype == torch.int32]))
        done(ep)
        memories = [{tensor.untyped_storage().data_ptr() for tensor in small} for _, small in calls]
        assert all(len(memory) == 1 for memory in memories) and len(set().union(*memories)) == 3
        assert not set().union(*memories) & {got.rows.untyped_storage().data_ptr() for got, _ in calls}
        every = [tensor for _, small in calls for tensor in small]
        for number, tensor in enumerate(every):
            assert is_inside(tensor)
            tensor.fill_(number)
        assert all(bool((tensor == number).all()) for number, tensor in enumerate(every))


@needs_them
@pytest.mark.parametrize("bytes_left", [0, 600])
def test_memory_that_was_freed_is_not_shared(bytes_left):
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    with tokenyard.AllToAll(world, **case.limits | PLACE) as ep:
        x, ids, weights = tensors(case, 0)
        for _ in range(3):
            for _ in range(2):
                got = ops.dispatch(ep, x, ids, weights)
            done(ep)
            got.counts.untyped_storage().resize_(bytes_left)
            del got
            again = ops.dispatch(ep, x, ids, weights)
            done(ep)
            assert again.counts.tolist() == torch.bincount(ids.flatten().cpu(), minlength=4).tolist()


@needs_them
def test_calls_that_something_watches_go_by_the_operator_in_python():
    """A mode sees them, and a function's trace and derivatives by torch.func are of its tensors."""
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    seen = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with tokenyard.AllToAll(world, **case.limits | PLACE) as ep:
        x, ids, weights = tensors(case, 0)
        for mode in (Calls, Functions):
            seen.clear()
            with mode():
                got = ops.dispatch(ep, x, ids, weights)
                ops.combine(got.rows, got)
            done(ep)
            for name in ("dispatch", "combine"):
                assert any(f"tokenyard.{name}" in one for one in seen), seen
        with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode gradient"):
            ops.dispatch(ep, torch.autograd.forward_ad.make_dual(x, x), ids, weights)


@needs_them
def test_functions_take_no_arguments_but_tensors():
    """Whatever they are given in place of these, nothing is called."""
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    with tokenyard.AllToAll(world, **case.limits | PLACE) as ep:
        x, ids, weights = tensors(case, 0)
        plan = ep.plan(0, "contiguous", 1, None)
        got = ops.dispatch(ep, x, ids, weights)
        out = torch.empty_like(x)
        before = _native.operator_handles()

        class Other(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                ran.append(function)
                return super().__torch_function__(function, types, args, kwargs or {})

        ran = []

        def none(call, *given):
            made, number = call(*given)
            assert made == [] and number <= 0
            raised = _native.take_pending(-number)
            assert (raised is not None) == (number < 0)
            assert raised is None or isinstance(raised, (TypeError, ValueError)), raised

        odd = [
            None, 7, "x", object(), [1.0], x.to_sparse(), torch.empty_like(x, device="meta"), x.to(torch.complex64),
            torch._neg_view(x), torch.empty(0, device=DEVICE), x.as_subclass(Other),
        ]
        for value in odd:
            for given in ((value, ids, weights, x), (x, value, weights, x), (x, ids, value, x)):
                none(_native.direct_dispatch, *given, plan | 1)
            for given in ((value, got.handle, weights), (got.rows, value, weights)):
                none(_native.direct_combine, *given, case.tokens << 1)
                none(_native.direct_combine_into, *given, out, 0)
            none(_native.direct_combine_into, got.rows, got.handle, weights, value, 0)
        assert not ran
        # Of a plan, all the rest are none of the call's.
        made, number = _native.direct_dispatch(x, ids, weights, None, plan | 1)
        assert number == 0 and len(made) > 1
        for number in (0, 3, -1, 1 << 62, (1 << 63) - 1, -(1 << 63)):
            none(_native.direct_dispatch, x, ids, weights, x, number)
            none(_native.direct_low_latency_dispatch, x, ids, number)
            none(_native.direct_low_latency_send_back, x, ids, weights, number)
        with pytest.raises(OverflowError):
            _native.direct_dispatch(x, ids, weights, x, 1 << 63)
        with pytest.raises(TypeError):
            _native.direct_combine_into(got.rows, got.handle, weights, out)
        assert _native.direct_combine_into(got.rows, got.handle, None, out, 0)[0] == [out]
        del made
        gc.collect()
        done(ep)
        assert _native.operator_handles() == before


@needs_them
@pytest.mark.parametrize("layout", ["contiguous", "masked", "token"])
@pytest.mark.parametrize("more", [{}, QUANTIZED, {"weights": "combine"}, {"weights": "none"}], ids=str)
def test_values_are_those_of_operators_in_python(layout, more, python_alone):
    if layout == "token" and more.get("weights") == "combine":
        more = {"weights": "dispatch"}  # the only one of this layout
    case = Case(2, tokens=9, hidden=512, experts=8, top_k=3)

    def run(world):
        with tokenyard.AllToAll(world, **case.limits | more | PLACE) as ep:
            x, ids, weights = tensors(case, world.rank)
            x = x.to(torch.bfloat16) if "quantize" in more else x
            brought = weights if more.get("weights", "dispatch") == "dispatch" else None
            late = {"topk_weights": weights} if more.get("weights") == "combine" else {}
            results = []
            for capacity in (None, ep.capacity(layout) + 3):
                before = _native.operator_handles()
                got = ops.dispatch(ep, x, ids, brought, layout=layout, capacity=capacity)
                used = _native.operator_handles() > before
                rows = got.rows.to(torch.bfloat16 if "quantize" in more else torch.float32)
                # Rows that none has may be anything, and nothing reads them.
                sums = ops.combine(rows, got, **late)
                done(ep)
                assert got.tokens == case.count[world.rank] and got.handle.shape == (1,) and got.handle.dtype == torch.int64
                assert got.handle.device == x.device and sums.shape == x.shape
                results.append((used, got, sums))
            return results

    fast = of_ranks(2, run)
    python_alone()
    slow = of_ranks(2, run)
    for of_fast, of_slow in zip(fast, slow):
        for (used, a, sums), (unused, b, wanted) in zip(of_fast, of_slow):
            assert used and not unused
            torch.testing.assert_close(sums, wanted, rtol=0, atol=0)
            torch.testing.assert_close(a.counts, b.counts, rtol=0, atol=0)
            for name in ("rows", "scales", "offsets", "token_experts", "token_weights"):
                x, y = getattr(a, name), getattr(b, name)
                assert (x is None) == (y is None), name
                if x is not None:
                    assert (x.shape, x.dtype, x.stride(), x.device) == (y.shape, y.dtype, y.stride(), y.device), name
                    assert is_inside(x), name
            # It refuses a storage with tensors of two dtypes.
            torch.save([getattr(a, name) for name in ("rows", "scales", "offsets", "counts", "token_experts", "token_weights")], io.BytesIO())
            if layout == "contiguous":
                torch.testing.assert_close(a.offsets, b.offsets, rtol=0, atol=0)
                used_rows = int(a.offsets[-1])
                torch.testing.assert_close(a.rows[:used_rows].float(), b.rows[:used_rows].float(), rtol=0, atol=0)
                if a.scales is not None:
                    torch.testing.assert_close(a.scales[:used_rows], b.scales[:used_rows], rtol=0, atol=0)


@needs_them
@pytest.mark.parametrize("layout", ["contiguous", "masked", "token"])
@pytest.mark.parametrize("more", [{}, QUANTIZED, {"weights": "combine"}, {"align": 4}], ids=str)
def test_tensors_of_the_caller_get_what_operators_in_python_bring(layout, more, python_alone):
    more = dict(more)
    align = more.pop("align", 1)
    if layout != "contiguous":
        align = 1  # there is none elsewhere
    if layout == "token":
        more.pop("weights", None)
    case = Case(2, tokens=9, hidden=512, experts=8, top_k=3)

    def run(world):
        with tokenyard.AllToAll(world, **case.limits | more | PLACE) as ep:
            x, ids, weights = tensors(case, world.rank)
            late = {"topk_weights": weights} if more.get("weights") == "combine" else {}
            x, brought = x.to(torch.bfloat16) if "quantize" in more else x, None if late else weights
            results = []
            for capacity in (ep.capacity(layout, align), ep.capacity(layout, align) + 5):
                before = _native.operator_handles()
                made = ops._made(x, ep, ep.format, layout, capacity, False, False, False)
                for tensor in made.values():
                    tensor.view(torch.uint8).fill_(0x5A)
                versions = {name: tensor._version for name, tensor in made.items()}
                others = {"row_scales" if name == "scales" else name: made[name] for name in made if name not in ("rows", "counts")}
                handle = ops.dispatch_into(ep, made["rows"], made["counts"], x, ids, brought, layout=layout, align=align, **others)
                used = _native.operator_handles() > before
                assert all(tensor._version > versions[name] for name, tensor in made.items())
                got = ops.Dispatched(made["rows"], made["counts"], handle, case.count[world.rank])
                rows = got.rows.to(torch.bfloat16 if "quantize" in more else torch.float32)
                out = torch.full_like(x, 7.0)
                version = out._version
                ops.combine_into(out, rows, got, **late)
                once = out.clone()
                ops.combine_into(out, rows, got, accumulate=True, **late)
                assert out._version > version + 1
                done(ep)
                # Handles are counted, so they live on.
                results.append((used, made, once, out, handle))
            return results

    fast = of_ranks(2, run)
    python_alone()
    slow = of_ranks(2, run)
    for of_fast, of_slow in zip(fast, slow):
        for (used, a, *sums, _), (unused, b, *wanted, _) in zip(of_fast, of_slow):
            assert used and not unused
            torch.testing.assert_close(sums, wanted, rtol=0, atol=0)
            assert not torch.equal(sums[0], sums[1])
            for name, tensor in a.items():
                # What no row has is as it was, in both.
                same = tensor.view(torch.uint8) == b[name].view(torch.uint8)
                assert same.all(), name


@needs_them
def test_tensors_of_the_caller_are_refused_as_in_python(python_alone):
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    with tokenyard.AllToAll(world, **case.limits | PLACE) as ep:
        x, ids, weights = tensors(case, 0)
        got = ops.dispatch(ep, x, ids, weights)
        rows, counts, offsets, out = got.rows, got.counts, got.offsets, torch.empty_like(x)
        freed = torch.empty_like(rows)
        freed.untyped_storage().resize_(0)
        leaf = torch.zeros_like(rows, requires_grad=True)

        def into(rows=rows, counts=counts, x=x, ids=ids, weights=weights, **how):
            return lambda: ops.dispatch_into(ep, rows, counts, x, ids, weights, **how)

        def sums(out=out, rows=rows, got=got, **how):
            return lambda: ops.combine_into(out, rows, got, **how)

        experts, words = ids.new_zeros((len(rows), 2), dtype=torch.int32), torch.zeros(len(rows), 2, device=DEVICE)
        calls = [
            into(rows=rows[:, :128]), into(rows=rows.double()), into(rows=rows.t()), into(rows=freed), into(rows=rows[0]),
            into(rows=rows.unsqueeze(0)), into(counts=counts.long()), into(counts=counts[:3]), into(counts=counts.view(2, 2)),
            into(counts=torch.zeros(8, dtype=torch.int32, device=DEVICE)[::2]),
            into(offsets=offsets[:3]), into(offsets=offsets.float()), into(row_scales=weights), into(scales=weights),
            into(layout="masked"), into(layout="token", token_experts=experts[:3], token_weights=words),
            into(layout="token", token_experts=experts, token_weights=words[:, :1]),
            into(token_experts=experts), into(token_weights=words), into(layout="other"), into(align=0), into(align=-1),
            into(rows=x), into(ids=ids[:3]), into(weights=None), into(x=x[:, :8]), into(format=3), into(rows=rows.to_sparse()),
            into(rows=leaf, x=x.clone().requires_grad_()),
            sums(out=out[:3]), sums(out=out[:, :8]), sums(out=out.long()), sums(out=out.t().contiguous().t()), sums(out=rows),
            sums(out=freed), sums(rows=rows[:, :8]), sums(rows=rows.long()), sums(topk_weights=weights),
            sums(got=got._replace(handle=torch.zeros(1, dtype=torch.int64, device=DEVICE))),
            sums(got=got._replace(handle=got.handle.float())), sums(out=leaf[: case.tokens]),
        ]
        if DEVICE == "cuda":
            calls += [into(rows=rows.cpu()), into(counts=counts.cpu()), sums(out=out.cpu())]

        fast = refusals(calls)
        python_alone()
        for found, wanted in zip(fast, refusals(calls)):
            assert found == wanted
        # Nothing of it took place.
        done(ep)
        ops.combine_into(out, rows, got)
        torch.testing.assert_close(out, ops.combine(rows, got), rtol=0, atol=0)
        done(ep)


@needs_them
@pytest.mark.parametrize("in_python", [False, True])
def test_unusable_routing_into_tensors_of_the_caller_has_the_handle(in_python, python_alone):
    if DEVICE == "cuda":
        pytest.skip("calls on a GPU raise what they find in a later check")
    if in_python:
        python_alone()
    case = Case(2, tokens=5, hidden=256, experts=4, top_k=2)

    def run(world):
        with tokenyard.AllToAll(world, **case.limits) as ep:
            x, ids, weights = tensors(case, world.rank)
            rows, counts = torch.zeros(ep.capacity(), case.hidden), torch.zeros(2, dtype=torch.int32)
            if world.rank == 1:
                ids[0, 0] = 4
                with pytest.raises(tokenyard.RoutingError) as raised:
                    ops.dispatch_into(ep, rows, counts, x, ids, weights)
                handle = raised.value.handle
                del raised.value.handle
            else:
                handle = ops.dispatch_into(ep, rows, counts, x, ids, weights)
            out = torch.empty_like(x)
            ops.combine_into(out, rows, ops.Dispatched(rows, counts, handle, case.count[world.rank]))
            world.barrier()
            return out

    first, second = of_ranks(2, run)
    assert first.abs().sum() > 0 and second.abs().sum() == 0


@needs_them
@pytest.mark.parametrize("in_python", [False, True])
def test_outputs_that_cannot_be_written_are_refused(in_python, python_alone):
    if in_python:
        python_alone()
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    with tokenyard.AllToAll(world, **case.limits | PLACE) as ep:
        x, ids, weights = tensors(case, 0)
        got = ops.dispatch(ep, x, ids, weights)
        rows, counts = torch.empty_like(got.rows), torch.empty_like(got.counts)
        negative = [torch._neg_view(torch.zeros_like(tensor)) for tensor in (rows, counts, x)]
        graph = torch.ones_like(rows).requires_grad_() * 2
        for kind, text, call in (
            (ValueError, "rows is a negative view", lambda: ops.dispatch_into(ep, negative[0], counts, x, ids, weights)),
            (ValueError, "counts is a negative view", lambda: ops.dispatch_into(ep, rows, negative[1], x, ids, weights)),
            (ValueError, "out is a negative view", lambda: ops.combine_into(negative[2], got.rows, got)),
            (RuntimeError, "has no gradient", lambda: ops.dispatch_into(ep, graph, counts, x, ids, weights)),
            (TypeError, "x is a NoneType: give a torch tensor", lambda: ops.dispatch_into(ep, rows, counts, None, ids, weights)),
            (TypeError, "topk_idx is a list", lambda: ops.dispatch_into(ep, rows, counts, x, [[0, 1]], weights)),
            (TypeError, "rows is a NoneType", lambda: ops.dispatch_into(ep, None, counts, x, ids, weights)),
            (TypeError, "out is a NoneType", lambda: ops.combine_into(None, got.rows, got)),
            (TypeError, "rows is a NoneType", lambda: ops.combine_into(x, None, got)),
        ):
            with pytest.raises(kind, match=text):
                call()
        # A call that is refused writes nothing.
        product = (rows * torch.ones_like(rows).requires_grad_()).sum()
        with pytest.raises(tokenyard.ArgumentError, match="expert_count"):
            ops.dispatch_into(ep, rows, counts[:3], x, ids, weights)
        product.backward()
        done(ep)


@needs_them
def test_operators_within_calls_of_the_package():
    if DEVICE == "cuda":
        pytest.skip("calls on a GPU wait for nobody, so no handler of a signal runs in them")
    # What goes wrong there ends the process.
    program = [sys.executable, "-W", "ignore", "-c", "import test_eager; test_eager.within_calls()"]
    ran = subprocess.run(program, cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr


def within_calls():
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    ep = tokenyard.AllToAll(tokenyard.World.threads(1)[0], **case.limits)
    x, ids, weights = tensors(case, 0)
    got = ops.dispatch(ep, x, ids, weights)
    wanted, sums = ops.combine(got.rows, got), []

    class Asked:
        @property
        def __array_interface__(self):
            sums.append(ops.combine(got.rows, got))
            return x.numpy().__array_interface__

    ep.dispatch_into(ep.output(x.numpy())[0], Asked(), ids.numpy(), weights.numpy())
    # The handler of a signal, in the wait of a call of another context.
    worlds, late, go = tokenyard.World.threads(2), Case(2, tokens=5, hidden=256, experts=4, top_k=2), threading.Event()

    def peer():
        with tokenyard.AllToAll(worlds[1], **late.limits) as other:
            go.wait()
            ops.dispatch(other, *tensors(late, 1))
            worlds[1].barrier()

    def handler(*_):
        sums.append(ops.combine(got.rows, got))
        go.set()

    thread = threading.Thread(target=peer)
    thread.start()
    former = signal.signal(signal.SIGALRM, handler)
    try:
        with tokenyard.AllToAll(worlds[0], **late.limits) as own:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            ops.dispatch(own, *tensors(late, 0))
            worlds[0].barrier()
    finally:
        signal.signal(signal.SIGALRM, former)
        go.set()
        thread.join()
    assert len(sums) >= 2
    for found in sums:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@needs_them
def test_calls_that_they_are_not_for_go_through_operators_in_python():
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    with tokenyard.AllToAll(world, **case.limits | PLACE, weights="none") as ep:
        x, ids, _ = tensors(case, 0)
        leaf = x.clone().requires_grad_()
        # Handles of former tests in reference cycles.
        gc.collect()
        before = _native.operator_handles()
        kept = [ops.dispatch(ep, leaf, ids), ops.dispatch(ep, x, ids, exact=True)]
        assert _native.operator_handles() == before
        with torch.no_grad():
            kept.append(ops.dispatch(ep, leaf, ids))
        with torch.inference_mode():
            kept.append(ops.dispatch(ep, x, ids))
            assert kept[-1].rows.is_inference()
        assert _native.operator_handles() == before + 2
        # Handles of either go with calls of either.
        wanted = ops.combine(kept[2].rows, kept[2])
        for got in kept:
            torch.testing.assert_close(ops.combine(got.rows.detach().clone(), got), wanted, rtol=0, atol=0)
            if not got.handle.is_inference():
                rows = got.rows.detach().clone().requires_grad_()
                ops.combine(rows, got).sum().backward()
                assert rows.grad is not None and rows.grad.abs().sum() > 0
        torch.testing.assert_close(ops.dispatch_again(x, kept[2])[: kept[2].offsets[-1]], kept[2].rows[: kept[2].offsets[-1]])
        done(ep)
        del kept, got
        assert _native.operator_handles() == before


@needs_them
def test_what_is_refused_is_refused_as_in_python(python_alone):
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    with tokenyard.AllToAll(world, **case.limits | PLACE) as ep:
        x, ids, weights = tensors(case, 0)
        got = ops.dispatch(ep, x, ids, weights)
        freed = torch.empty_like(x)
        freed.untyped_storage().resize_(0)
        calls = [
            lambda: ops.dispatch(ep, x.double(), ids, weights),
            lambda: ops.dispatch(ep, x[:, :128], ids, weights),
            lambda: ops.dispatch(ep, x.t(), ids, weights),
            lambda: ops.dispatch(ep, x, ids[:3], weights),
            lambda: ops.dispatch(ep, x, ids.float(), weights),
            lambda: ops.dispatch(ep, x, ids, weights.half()),
            lambda: ops.dispatch(ep, x, ids, None),
            lambda: ops.dispatch(ep, x, ids, weights, scales=weights),
            lambda: ops.dispatch(ep, freed, ids, weights),
            lambda: ops.dispatch(ep, x.to_sparse(), ids, weights),
            lambda: ops.dispatch(ep, x.repeat(30, 1), ids.repeat(30, 1), weights.repeat(30, 1)),
            lambda: ops.dispatch(ep, x, ids, weights, layout="other"),
            lambda: ops.dispatch(ep, x, ids, weights, align=0),
            lambda: ops.dispatch(ep, x, ids, weights, capacity=1 << 61),
            lambda: ops.dispatch(ep, x, ids, weights, capacity=-1),
            lambda: ops.combine(got.rows[:, :128], got),
            lambda: ops.combine(got.rows.t().contiguous().t(), got),
            lambda: ops.combine(got.rows.long(), got),
            lambda: ops.combine(got.rows, got, topk_weights=weights),
            lambda: ops.combine(got.rows, got._replace(tokens=3)),
            lambda: ops.combine(got.rows, got._replace(handle=got.handle.float())),
            lambda: ops.combine(got.rows, got._replace(handle=torch.zeros(1, dtype=torch.int64, device=DEVICE))),
        ]
        if DEVICE == "cuda":
            calls.append(lambda: ops.dispatch(ep, x.cpu(), ids, weights))

        fast = refusals(calls)
        python_alone()
        for (number, kind, text), (_, wanted, said) in zip(fast, refusals(calls)):
            # Where sizes overflow, torch says it in its own words.
            assert kind is wanted or number == 13, (number, text, said)
            assert number == 13 or text == said
        done(ep)
        assert ops.combine(got.rows, got).shape == x.shape


@needs_them
@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("weights_of", ["dispatch", "combine"])
def test_unusable_routing_has_what_was_made(weights_of, in_python, python_alone):
    """The other rank's sums are those of a call without it, by rows of this rank's experts, too."""
    if DEVICE == "cuda":
        pytest.skip("calls on a GPU raise what they find in a later check")
    case = Case(2, tokens=5, hidden=256, experts=4, top_k=2)
    if in_python:
        python_alone()

    def run(world):
        with tokenyard.AllToAll(world, **case.limits, weights=weights_of) as ep:
            x, ids, weights = tensors(case, world.rank)
            given, later = (weights, None) if weights_of == "dispatch" else (None, weights)
            sums = []
            for unusable in (False, True):
                if unusable and world.rank == 1:
                    with pytest.raises(tokenyard.RoutingError) as raised:
                        ops.dispatch(ep, x, torch.full_like(ids, 4), given)
                    got = raised.value.dispatched
                    del raised.value.dispatched
                else:
                    got = ops.dispatch(ep, x, ids, given)
                sums.append(ops.combine(got.rows, got, topk_weights=later))
                del got
            world.barrier()
            return sums

    (usable, first), (_, second) = of_ranks(2, run)
    assert first.abs().sum() > 0 and second.abs().sum() == 0
    torch.testing.assert_close(first, usable, rtol=0, atol=0)

    def short(world):
        with tokenyard.AllToAll(world, **case.limits) as ep:
            x, ids, weights = tensors(case, world.rank)
            with pytest.raises(tokenyard.CapacityError) as raised:
                ops.dispatch(ep, x, ids, weights, capacity=1)
            assert raised.value.dispatched.rows.abs().sum() == 0
            world.barrier()

    of_ranks(2, short)


@pytest.mark.parametrize("in_python", [False, True])
def test_one_tensor_on_meta_is_refused(in_python, python_alone):
    """torch would have a fake answer, and the outputs would be whatever was in their memory."""
    if in_python:
        python_alone()
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    with tokenyard.AllToAll(world, **case.limits | PLACE) as ep:
        x, ids, weights = tensors(case, 0)
        got, out = ops.dispatch(ep, x, ids, weights), torch.empty_like(x)
        on_meta = got._replace(handle=got.handle.to("meta"))
        calls = [
            ("x", lambda: ops.dispatch(ep, x.to("meta"), ids, weights)),
            ("topk_idx", lambda: ops.dispatch(ep, x, ids.to("meta"), weights)),
            ("topk_weights", lambda: ops.dispatch(ep, x, ids, weights.to("meta"))),
            ("topk_idx", lambda: ops.dispatch_into(ep, got.rows, got.counts, x, ids.to("meta"), weights)),
            ("topk_idx", lambda: ops.dispatch_send(ep, x, ids.to("meta"), weights)),
            ("x", lambda: ops.dispatch_again(x.to("meta"), got)),
            ("handle", lambda: ops.combine(got.rows, on_meta)), ("rows", lambda: ops.combine(got.rows.to("meta"), got)),
            ("handle", lambda: ops.combine_into(out, got.rows, on_meta)), ("rows", lambda: ops.combine_send(got.rows.to("meta"), got)),
        ]
        for name, call in calls:
            with pytest.raises(ValueError, match=f"{name} is on meta"):
                call()
        assert ops.combine(got.rows, got).shape == x.shape
        done(ep)


@pytest.mark.parametrize("in_python", [False, True])
def test_views_of_memory_that_was_freed_are_refused(in_python, python_alone):
    if in_python:
        python_alone()
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    with tokenyard.AllToAll(world, **case.limits | PLACE) as ep:
        x, ids, weights = tensors(case, 0)
        got = ops.dispatch(ep, x, ids, weights)
        freed = torch.cat([x, x])[5:]
        handle = torch.zeros(9, dtype=torch.int64, device=DEVICE)[8:]
        freed.untyped_storage().resize_(0)
        handle.untyped_storage().resize_(0)
        for call in (lambda: ops.dispatch(ep, freed, ids, weights), lambda: ep.dispatch(freed, ids, weights)):
            with pytest.raises(ValueError, match="x has no memory"):
                call()
        with pytest.raises(ValueError, match="handle has no memory"):
            ops.combine(got.rows, got._replace(handle=handle))
        with pytest.raises(TypeError, match="handle is a NoneType"):
            ops.combine(got.rows, got._replace(handle=None))
        done(ep)


@needs_them
def test_numbers_that_are_no_plan_and_plans_of_closed_contexts():
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    ep = tokenyard.AllToAll(world, **case.limits | PLACE)
    x, ids, weights = tensors(case, 0)
    for number in (0, 3, -1, 1 << 62, (1 << 63) - 1, -(1 << 63)):
        assert torch.ops.tokenyard._dispatch(x, ids, weights, x, number) == ([], 0)
        assert torch.ops.tokenyard._dispatch_into(x, ids, weights, x, x, ids, x, x, x, number) == ([], 0)
        assert all(_native.take_pending(number) is None for number in (0, 1, -1, 1 << 62))
    plan = ep.plan(0, "contiguous", 1, None)
    for capacity in range(100):
        ep.plan(0, "contiguous", 1, 20 + capacity)
    assert len(ep._plans) <= 64
    # The number of a plan that was let go of stands for nothing, not for another one.
    assert torch.ops.tokenyard._dispatch(x, ids, weights, x, plan | 1) == ([], 0)
    got = ops.dispatch(ep, x, ids, weights)
    plan = ep.plan(0, "contiguous", 1, None)
    done(ep)
    ep.close()
    assert torch.ops.tokenyard._dispatch(x, ids, weights, x, plan | 1) == ([], 0)
    with pytest.raises(tokenyard.ClosedError):
        ops.dispatch(ep, x, ids, weights)
    with pytest.raises((tokenyard.ClosedError, ValueError), match="closed"):
        ops.combine(got.rows, got)


@needs_them
def test_threads_get_the_errors_of_their_own_calls():
    if DEVICE == "cuda":
        pytest.skip("calls on a GPU raise what they find in a later check")
    case = Case(1, tokens=5, hidden=256, experts=4, top_k=2)
    found = []

    def work(number):
        (world,) = tokenyard.World.threads(1)
        with tokenyard.AllToAll(world, **case.limits) as ep:
            x, ids, weights = tensors(case, 0)
            ids = ids.clone()
            if number % 2:
                ids[number % 5, 1] = 40
            for _ in range(30):
                try:
                    got = ops.dispatch(ep, x, ids, weights)
                    found.append((number, "fine"))
                    ops.combine(got.rows, got)
                except tokenyard.RoutingError:
                    found.append((number, "routing"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 120 and all((kind == "routing") == bool(number % 2) for number, kind in found)


@needs_them
def test_a_gpu_has_room_for_so_many_handles_and_then_makes_them_in_python():
    if DEVICE != "cuda":
        pytest.skip("handles on the CPU device are as many as memory has room for: run it with TOKENYARD_TEST_DEVICE=cuda")
    case = Case(1, tokens=1, hidden=256, experts=4, top_k=2)
    (world,) = tokenyard.World.threads(1)
    with tokenyard.AllToAll(world, **case.limits | PLACE) as ep:
        x, ids, weights = tensors(case, 0)
        many = [ops.dispatch(ep, x, ids, weights) for _ in range(4100)]
        assert _native.operator_handles() == 4096
        wanted = ops.combine(many[0].rows, many[0])
        torch.testing.assert_close(ops.combine(many[-1].rows, many[-1]), wanted)
        done(ep)
        del many
        assert _native.operator_handles() == 0
