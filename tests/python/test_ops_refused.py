"""`tokenyard.ops` and `AllToAll`: what is refused is named, before anything is sent, and calls that follow are right."""

import gc
import os
import weakref

import numpy as np
import pytest

import tokenyard
from rig import Case

if os.environ.get("TOKENYARD_STRICT") == "1":
    import torch
else:
    torch = pytest.importorskip("torch")

from tokenyard import ops  # noqa: E402: after torch, without which there is no such module


class Layer:
    """A layer of one rank whose weights come with rows. Experts multiply by their number plus two."""

    def __init__(self, **more):
        self.case = case = Case(ranks=1, top_k=2, experts=5)
        room = dict(dispatch_payload_words=2 * case.top_k, payload_words=case.top_k)
        self.ep = tokenyard.AllToAll(tokenyard.World.threads(1)[0], **(case.limits | dict(weights="none") | room | more))
        self.x, self.ids, self.weights = (torch.from_numpy(part[0]) for part in (case.x, case.ids, case.weights))

    def dispatch(self, **more):
        return ops.dispatch(self.ep, self.x, self.ids, self.weights, **more)

    def run(self, x, ids, weights, **more):
        got = ops.dispatch(self.ep, x, ids, weights, **more)
        factor = torch.repeat_interleave(torch.arange(len(got.counts)) + 2.0, got.counts.long())
        rows = torch.zeros_like(got.rows)
        rows[: len(factor)] = got.rows[: len(factor)] * factor[:, None]
        return ops.combine(rows, got)

    def wanted(self, x, ids, weights):
        return x * (weights * (ids + 2) * (ids >= 0)).sum(1, keepdim=True)

    def must_be_right(self, choices=2):
        ids = self.ids[:, :choices]
        x, weights = self.x.clone().requires_grad_(), self.weights[:, :choices].clone().requires_grad_()
        x2, weights2 = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
        y, wanted = self.run(x, ids, weights), self.wanted(x2, ids, weights2)
        columns = torch.arange(y.shape[1]) % 5 + 1.0
        (y * columns).sum().backward(), (wanted * columns).sum().backward()
        for found, right in ((y, wanted), (x.grad, x2.grad), (weights.grad, weights2.grad)):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("choices", [1, 2])
def test_rows_have_weights_of_as_many_choices_as_a_call_has(choices):
    Layer().must_be_right(choices)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "masked", "token"])
def test_a_dispatch_that_found_an_error_is_finished_and_combined(layout, exact):
    layer = Layer()
    wrong = layer.ids.clone()
    wrong[1, 1] = layer.case.experts
    with pytest.raises(tokenyard.RoutingError) as raised:
        ops.dispatch(layer.ep, layer.x, wrong, layer.weights, layout=layout, exact=exact)
    got = raised.value.dispatched
    assert isinstance(got, ops.Dispatched) and (got.counts == 0).all()
    rows = got.rows if layout != "token" else torch.zeros_like(got.rows)
    assert (ops.combine(torch.ones_like(rows), got._replace(row_weights=None)) == 0).all()
    layer.must_be_right()


@pytest.mark.parametrize("operator", [False, True])
def test_a_dispatch_whose_error_comes_in_place_of_its_second_half_is_finished(operator, monkeypatch):
    """As on a GPU, where the sending half raises none: a call that raises an earlier call's error was not enqueued."""
    layer, receive = Layer(), tokenyard.AllToAll.dispatch_recv
    error = tokenyard.RoutingError("of the sending half")
    error.fatal, found = False, [error]

    def once(*given, **named):
        if found:
            raise found.pop()
        return receive(*given, **named)

    monkeypatch.setattr(tokenyard.AllToAll, "dispatch_recv", once)
    with pytest.raises(tokenyard.RoutingError, match="of the sending half") as raised:
        layer.dispatch(exact=True) if operator else layer.ep.dispatch(layer.x, layer.ids, exact=True)
    got = raised.value.dispatched
    assert len(got.rows) == int((layer.ids >= 0).sum())
    sums = ops.combine(got.rows, got) if operator else layer.ep.combine(got.rows, got.handle)
    assert sums.shape == layer.x.shape
    layer.must_be_right()


@pytest.mark.parametrize("operator", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c_in_the_receiving_half_of_an_exact_dispatch_loses_nothing(monkeypatch, operator, late):
    layer, receive = Layer(), tokenyard.AllToAll.dispatch_recv

    def interrupted(*given, **named):
        error = KeyboardInterrupt()
        if late:
            error.handle = receive(*given, **named)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(tokenyard.AllToAll, "dispatch_recv", interrupted)
        with pytest.raises(KeyboardInterrupt) as raised:
            layer.dispatch(exact=True) if operator else layer.ep.dispatch(layer.x, layer.ids, exact=True)
    if late:
        # It took place: what was made is complete.
        got = raised.value.dispatched
        assert not hasattr(raised.value, "sent") and len(got.rows) == int((layer.ids >= 0).sum())
        # Rows of an expert are in the order of tokens.
        pairs = sorted((e, t) for t, row in enumerate(layer.ids.tolist()) for e in row if e >= 0)
        assert torch.equal(got.rows, layer.x[[token for _expert, token in pairs]])
        sums = ops.combine(got.rows, got) if operator else layer.ep.combine(got.rows, got.handle)
        assert sums.shape == layer.x.shape
    else:
        assert not hasattr(raised.value, "dispatched")
        output, got = layer.ep.output(layer.x, payload_words=4 if operator else 0)
        handle = layer.ep.dispatch_recv(raised.value.sent, output)
        assert got.counts.sum() == (layer.ids >= 0).sum() and handle.tokens == len(layer.x)
    layer.must_be_right()


@pytest.mark.parametrize("operator", [False, True])
def test_a_dispatch_out_of_order_does_not_wait_for_its_counts(operator):
    """As after a Ctrl-C in the first one: the error is that of the order, at once."""
    layer = Layer(timeout=10.0)
    sent = layer.ep.dispatch_send(layer.x, layer.ids, counts=True)
    with pytest.raises(tokenyard.OrderError, match="dispatch 1 was sent and not received"):
        layer.dispatch(exact=True) if operator else layer.ep.dispatch(layer.x, layer.ids, exact=True)
    layer.ep.dispatch_recv(sent, layer.ep.output(layer.x)[0])
    layer.must_be_right()


def test_an_output_without_room_can_be_combined():
    layer = Layer()
    with pytest.raises(tokenyard.CapacityError) as raised:
        layer.dispatch(capacity=2)
    got = raised.value.dispatched
    assert (got.rows == 0).all() and (got.row_weights == 0).all()
    with pytest.raises(tokenyard.IncompleteError):
        ops.combine(got.rows, got)
    layer.must_be_right()


def test_what_operators_refuse():
    layer, other = Layer(), Layer()
    x, ids, weights, more = layer.x, layer.ids, layer.weights, len(layer.x) + 1
    layer.must_be_right()

    def half(call):
        """With a half in flight, which is received afterwards."""
        sent = ops.dispatch_send(layer.ep, x, ids)
        try:
            call(sent)
        finally:
            ops.dispatch_recv(layer.ep, sent, len(x))

    def in_halves(got, tokens):
        sent = ops.combine_send(got.rows, got)
        try:
            ops.combine_recv(sent, got.rows, got._replace(tokens=tokens))
        finally:
            ops.combine_recv(sent, got.rows, got)

    wrong = [
        (ValueError, 'layout is "heap"', lambda: layer.dispatch(layout="heap")),
        (ValueError, 'layout is "heap"', lambda: layer.dispatch(layout="heap", exact=True)),
        (ValueError, "align is 0", lambda: layer.dispatch(align=0, exact=True)),
        (ValueError, "capacity is -1", lambda: layer.dispatch(capacity=-1)),
        (ValueError, "capacity is -2", lambda: layer.dispatch(capacity=-2)),
        (ValueError, "format is 1: give a number of ep.formats, 0 to 0", lambda: layer.dispatch(format=1)),
        (ValueError, "format is -1", lambda: layer.dispatch(format=-1)),
        (ValueError, "format is 7", lambda: ops.dispatch_send(layer.ep, x, ids, format=7)),
        (ValueError, "topk_weights is torch.float32", lambda: ops.dispatch(layer.ep, x, ids, weights[:, :1])),
        (ValueError, "topk_weights is torch.int64", lambda: ops.dispatch(layer.ep, x, ids, ids)),
        (ValueError, "topk_idx is torch.int64", lambda: ops.dispatch(layer.ep, x, ids[:, [0, 1, 1]], weights[:, [0, 1, 1]])),
        (TypeError, "x is a NoneType: give a torch tensor", lambda: ops.dispatch(layer.ep, None, ids)),
        (TypeError, "topk_idx is a list: give a torch tensor", lambda: ops.dispatch(layer.ep, x, [0])),
        (ValueError, f"tokens is {more}, and the dispatch had {len(x)}: give as many", lambda: layer.ep.combine(
            kept.rows, layer.ep.dispatch(x, ids).handle, tokens=more)),
        (ValueError, f"tokens is {more}, and the dispatch had", lambda: ops.combine(kept.rows, kept._replace(tokens=more))),
        (ValueError, f"tokens is {more}, and the dispatch had", lambda: in_halves(kept, more)),
        (ValueError, "sent is of context", lambda: half(lambda sent: ops.dispatch_recv(other.ep, sent, len(x)))),
        (ValueError, "sent is the tensor of a Handle: give that of a Sent",
         lambda: ops.dispatch_recv(layer.ep, layer.dispatch().handle, len(x))),
        (ValueError, "sent is the tensor of a Sent: give that of a CombineSent",
         lambda: half(lambda sent: ops.combine_recv(sent, x, kept))),
        (ValueError, "handle is the tensor of a Sent: give that of a Handle",
         lambda: half(lambda sent: ops.combine(kept.rows, kept._replace(handle=sent)))),
    ]
    kept = layer.dispatch()
    for kind, text, call in wrong:
        with pytest.raises(kind) as raised:
            call()
        assert text in str(raised.value), (text, str(raised.value))
        layer.must_be_right()


def test_backward_refuses_a_tensor_that_an_operator_has_written():
    layer = Layer()
    got, factor = layer.dispatch(), torch.ones(1, requires_grad=True)
    for write in (
        lambda out: ops.combine_into(out, got.rows, got),
        lambda out: ops.dispatch_into(layer.ep, out, torch.empty_like(got.counts), layer.x, layer.ids,
                                      offsets=torch.empty_like(got.offsets)),
    ):
        out = torch.zeros(layer.ep.capacity(), layer.case.hidden)
        y = (factor * out).sum()
        write(out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    with torch.inference_mode():
        ops.combine_into(torch.zeros_like(layer.x), got.rows, got)


def test_tangents_are_not_lost_in_silence():
    layer = Layer()
    forward = torch.autograd.forward_ad
    with pytest.raises(RuntimeError, match="no forward-mode gradient"):
        torch.func.jvp(lambda x: layer.run(x, layer.ids, layer.weights), (layer.x,), (layer.x,))
    got = layer.dispatch()
    with forward.dual_level():
        with pytest.raises(RuntimeError, match="no forward-mode gradient"):
            ops.combine(forward.make_dual(got.rows, got.rows), got)
        torch.testing.assert_close(
            layer.run(layer.x, layer.ids, layer.weights), layer.wanted(layer.x, layer.ids, layer.weights)
        )


@pytest.mark.parametrize("given", [dict(layout="heap"), dict(align=0), dict(align=-1), dict(also="sources"), dict(also=3)])
def test_a_refused_exact_dispatch_sends_nothing(given):
    layer = Layer()
    with pytest.raises((ValueError, TypeError), match=f"{[*given][0]} (is|has)"):
        layer.ep.dispatch(layer.x, layer.ids, exact=True, **given)
    layer.must_be_right()


def test_an_exact_dispatch_without_memory_for_its_output_can_be_received(monkeypatch):
    layer = Layer()

    def without(*given, **more):
        raise MemoryError("none")

    for call, owner, name in (
        (lambda: layer.ep.dispatch(layer.x, layer.ids, exact=True), layer.ep, "output"),
        (lambda: layer.dispatch(exact=True), ops, "_made"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, without)
            with pytest.raises(MemoryError) as raised:
                call()
        output, got = layer.ep.output(layer.x, payload_words=4 if owner is ops else 0)
        handle = layer.ep.dispatch_recv(raised.value.sent, output)
        assert got.counts.sum() == (layer.ids >= 0).sum() and handle.tokens == len(layer.x)
        layer.must_be_right()


def test_numbers_that_are_none_are_named():
    layer = Layer()
    ep, x, ids = layer.ep, layer.x, layer.ids
    got = ep.dispatch(x, ids)
    wrong = [
        (ValueError, "capacity is -1", lambda: ep.dispatch(x, ids, capacity=-1)),
        (TypeError, "capacity is a float", lambda: ep.dispatch(x, ids, capacity=1.5)),
        (TypeError, "align is a str", lambda: ep.dispatch(x, ids, align="a")),
        (TypeError, "format is a int", lambda: ep.dispatch(x, ids, format=3)),
        (ValueError, "tokens is -1", lambda: ep.combine(got.rows, got.handle, tokens=-1)),
        (ValueError, "dtype is 'bf17'", lambda: ep.combine(got.rows, got.handle, dtype="bf17")),
        # The sums would be added to memory that nobody has written.
        (ValueError, "out is missing", lambda: ep.combine(got.rows, got.handle, accumulate=True)),
        (TypeError, "stream is 'abc'", lambda: ep.combine(got.rows, got.handle, stream="abc")),
        (TypeError, "stream is -3", lambda: ep.combine(got.rows, got.handle, stream=-3)),
        (ValueError, "top_k is -1", lambda: Layer(top_k=-1)),
        (TypeError, "experts is a float", lambda: Layer(experts=4.0)),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind) as raised:
            call()
        assert text in str(raised.value), (text, str(raised.value))
        layer.must_be_right()


def test_outputs_of_equal_numbers_are_not_those_of_others():
    layer = Layer(dispatch_payload_words=0, payload_words=0)
    room = torch.tensor(24)

    def rows(**more):
        return len(ops.dispatch(layer.ep, layer.x, layer.ids, **more).rows)

    assert rows(capacity=24) == 24 == rows(capacity=room) == rows(capacity=np.int64(24), drop_overflow=np.True_)
    room.fill_(20)
    assert rows(capacity=room) == 20
    for more in (dict(capacity=24.0), dict(capacity=24, align=1.0), dict(capacity="24")):
        with pytest.raises(TypeError, match="(capacity|align) is a (float|str): give a whole number"):
            rows(**more)


def test_tensors_without_memory_are_named():
    layer = Layer()
    freed = layer.x.clone()
    freed.untyped_storage().resize_(0)
    nested = torch.nested.nested_tensor([layer.x[:2], layer.x[2:]])
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(layer.x.shape)
    for x in (freed, fake):
        with pytest.raises(ValueError, match="x has no memory"):
            layer.ep.dispatch(x, layer.ids)
    # Rows' weights are computed by torch's own kernels, which would read what is not there.
    for name in ("topk_idx", "topk_weights"):
        given = {"topk_idx": layer.ids, "topk_weights": layer.weights}
        given[name] = given[name].clone()
        given[name].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"{name} has no memory, as its storage was freed"):
            ops.dispatch(layer.ep, layer.x, **given)
    with pytest.raises(TypeError, match="x is a tensor without one memory"):
        layer.ep.dispatch(nested, layer.ids)
    with pytest.raises(TypeError, match="topk_idx is a tensor without one memory"):
        torch.vmap(lambda ids: layer.ep.dispatch(layer.x, ids).rows)(layer.ids[None])
    layer.must_be_right()


@pytest.mark.parametrize("how", ["plain", "exact", "operator"])
def test_errors_are_gone_once_they_are_caught(how):
    """An exception in a frame that it has itself would keep handles, and so memory, until garbage is collected."""
    layer = Layer()
    wrong = torch.full_like(layer.ids, 99)
    gc.collect()
    gc.disable()
    try:
        try:
            if how == "operator":
                ops.dispatch(layer.ep, layer.x, wrong, layer.weights, exact=True)
            else:
                layer.ep.dispatch(layer.x, wrong, exact=how == "exact")
        except tokenyard.RoutingError as error:
            gone = weakref.ref(error.dispatched.rows)
        assert gone() is None
    finally:
        gc.enable()
