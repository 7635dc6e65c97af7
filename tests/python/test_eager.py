"""Eager calls by operators in C: that they are used, and bring what operators in Python do."""

import gc
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
                made = ops._made(x, ep, ep.format, layout, capacity, False, False)
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


@needs_them
@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("options", [{"use_fp8": False}, {}, {"round_scale": True, "use_ue8m0": True}], ids=str)
def test_low_latency_calls_of_deep_ep_are_those_of_python(options, hooks, python_alone):
    from tokenyard import deep_ep

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
            if DEVICE == "cuda":
                torch.cuda.current_stream().synchronize()
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
    from tokenyard import deep_ep

    case = Case(1, tokens=9, hidden=512, experts=8, top_k=3)
    (world,) = tokenyard.World.threads(1)
    deep_ep.Buffer.low_latency_sms = PLACE.get("sms")
    buffer = deep_ep.Buffer(world, low_latency_mode=True)
    x, ids, weights = tensors(case, 0)
    x = x.to(torch.bfloat16)
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
        ((x, ids, 9, 1 << 19), "num_experts has 524288 experts a rank: give 1 to 2047"),
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
    from tokenyard import deep_ep

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
    from tokenyard import deep_ep

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
    from tokenyard.deep_ep._buffer import _Hook

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
    from tokenyard import deep_ep

    case = Case(1, tokens=9, hidden=512, experts=8, top_k=3)
    (world,) = tokenyard.World.threads(1)
    deep_ep.Buffer.low_latency_sms = PLACE.get("sms")
    buffer = deep_ep.Buffer(world, low_latency_mode=True)
    x, ids, weights = tensors(case, 0)
    x = x.to(torch.bfloat16)

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
        sent = _eager.low_latency_sent

        def interrupted(*made):
            _eager.low_latency_sent = sent
            raise KeyboardInterrupt

        _eager.low_latency_sent = interrupted
        with pytest.raises(KeyboardInterrupt):
            call()
        assert _eager.low_latency_sent is sent
        call()[-1]()
    sums = buffer.low_latency_combine(rows, ids, weights, handle)[0]
    wanted = buffer.low_latency_combine(rows.clone(), ids, weights, handle, out=torch.empty_like(sums))[0]
    torch.testing.assert_close(sums, wanted, rtol=0, atol=0)
    if DEVICE == "cuda":
        torch.cuda.current_stream().synchronize()
    half = _native.newest_half()
    assert half is None


@needs_them
def test_a_hook_that_fails_has_the_handle():
    from types import SimpleNamespace

    from tokenyard.deep_ep import _planned

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
    from tokenyard import deep_ep

    if DEVICE != "cuda":
        pytest.skip("the CPU device tells of routing in the call itself: run it with TOKENYARD_TEST_DEVICE=cuda")
    case = Case(1, tokens=9, hidden=512, experts=8, top_k=3)
    (world,) = tokenyard.World.threads(1)
    deep_ep.Buffer.low_latency_sms = PLACE.get("sms")
    buffer = deep_ep.Buffer(world, low_latency_mode=True)
    x, ids, weights = tensors(case, 0)
    x = x.to(torch.bfloat16)
    for given in (ids, torch.full_like(ids, 99), ids):
        got = buffer.low_latency_dispatch(x, given, case.tokens, case.experts, use_fp8=False, return_recv_hook=True)
        torch.cuda.current_stream().synchronize()
        if given is not ids:
            with pytest.raises(tokenyard.RoutingError):
                got[4]()
        got[4]()
        sums, _, hook = buffer.low_latency_combine(got[0], ids, weights, got[2], return_recv_hook=True)
        hook()
        torch.cuda.current_stream().synchronize()
        assert bool(sums.any()) == (given is ids)


@needs_them
def test_handles_that_nobody_takes_go():
    from tokenyard import deep_ep

    case = Case(1, tokens=9, hidden=512, experts=8, top_k=3)
    (world,) = tokenyard.World.threads(1)
    deep_ep.Buffer.low_latency_sms = PLACE.get("sms")
    buffer = deep_ep.Buffer(world, low_latency_mode=True)
    x, ids, weights = tensors(case, 0)
    x = x.to(torch.bfloat16)
    handle = buffer.low_latency_dispatch(x, ids, case.tokens, case.experts)[2]
    (shape,) = buffer._low_latency.shapes.values()
    gc.collect()
    before = _native.operator_handles()
    numbers = [_eager.low_latency_dispatch(shape.number, x, ids)[1] for _ in range(18)]
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
    if DEVICE == "cuda":
        torch.cuda.current_stream().synchronize()
    del handle


@needs_them
def test_a_buffer_that_is_destroyed_lets_go_of_its_context():
    from tokenyard import deep_ep

    case = Case(1, tokens=9, hidden=512, experts=8, top_k=3)
    (world,) = tokenyard.World.threads(1)
    deep_ep.Buffer.low_latency_sms = PLACE.get("sms")
    buffer = deep_ep.Buffer(world, low_latency_mode=True)
    x, ids, weights = tensors(case, 0)
    for _ in range(2):
        handle = buffer.low_latency_dispatch(x.to(torch.bfloat16), ids, case.tokens, case.experts)[2]
    assert handle.planned is not None
    context = weakref.ref(buffer._low_latency.made())
    buffer.destroy()
    assert context() is not None
    del handle
    assert context() is None
