"""What calls of several formats refuse, and that the next call works."""

import time

import numpy as np
import pytest

import tokenyard
from rig import Case, in_ranks
from tokenyard import Format

SMALL = Format(32, 5, dtype="fp32", combine_dtype="fp32")


def alone(**more):
    case = Case(ranks=1, seed=41)
    return case, tokenyard.AllToAll(tokenyard.World.threads(1)[0], **(case.limits | more))


def test_shapes_that_are_not_the_calls_are_refused_rather_than_read_in_part():
    case, ep = alone(room_for=[SMALL], dispatch_payload_words=4, payload_words=12)
    _, other = alone()
    x, ids, weights, n = case.x[0], case.ids[0], case.weights[0], case.tokens
    payload, small = np.ascontiguousarray(x[:, :2]), np.ascontiguousarray(x[:5, :32])
    output, got = ep.output(x, payload_words=3)
    masked, held = ep.output(x, layout="masked")
    handle = ep.dispatch_into(masked, x, ids, weights)
    flat = ep.dispatch(x, ids, weights)
    strange = other.dispatch(x, ids, weights)
    half = other.dispatch_send(x, ids, weights)
    rows, zeros = flat.rows, lambda *shape, dtype=np.float32: np.zeros(shape, dtype=dtype)

    def make(layout="contiguous", **more):
        return tokenyard.Output(layout, got.rows, got.counts, **more)

    def again(handle, given, rows, **more):
        return lambda: ep.dispatch_again(handle, given, rows, **more)

    wrong = [
        (ValueError, "x has the shape [9, 128]: give [9, 64]", lambda: ep.dispatch(np.concatenate([x, x], 1), ids, weights)),
        (ValueError, "x has the shape [9, 64]: give [9, 32]", lambda: ep.dispatch(x, ids, weights, format=SMALL)),
        (ValueError, "rows has the shape", lambda: ep.dispatch_into(output, small, ids[:5], weights[:5], format=SMALL)),
        (tokenyard.ArgumentError, "at most 5 tokens", lambda: ep.dispatch(x[:, :32].copy(), ids, weights, format=SMALL)),
        (tokenyard.ArgumentError, "room", lambda: ep.dispatch(zeros(9, 4096), ids, weights, format=Format(4096, 9, dtype="fp32"))),
        (tokenyard.ArgumentError, "use 1 to 9", lambda: ep.dispatch(x, ids, weights, format=Format(64, 10, dtype="fp32"))),
        (tokenyard.ArgumentError, "use 1 to 9", lambda: ep.dispatch(x, ids, weights, capacity=9, format=Format(64, 2**63, dtype="fp32"))),
        (TypeError, "x has elements of type float32: give rows of fp16", lambda: ep.dispatch(x, ids, weights, format=Format(64, 9, dtype="fp16"))),
        (ValueError, "payload has the shape [9]: give an array of 2", lambda: ep.dispatch(x, ids, weights, payload=x[:, 0].copy())),
        (ValueError, "payload has the shape [8, 2]: give [9, 2]", lambda: ep.dispatch(x, ids, weights, payload=payload[:-1])),
        (TypeError, "payload has elements of type int32", lambda: ep.dispatch(x, ids, weights, payload=payload.view(np.int32))),
        (TypeError, "payload is a list", lambda: ep.dispatch(x, ids, weights, payload=[1])),
        (tokenyard.ArgumentError, "5 words of a token", lambda: ep.dispatch(x, ids, weights, payload=x[:, :5].copy())),
        (tokenyard.ArgumentError, "words of payload is 0", lambda: ep.dispatch(x, ids, weights, payload=zeros(9, 0))),
        (ValueError, "payload has the shape", lambda: ep.dispatch_into(output, x, ids, weights, payload=payload)),
        (tokenyard.ArgumentError, "payload of output", lambda: ep.dispatch_into(output, x, ids, weights)),
        (ValueError, "payload has the shape", lambda: ep.dispatch_recv(sent, output)),
        (ValueError, "payload has the shape", lambda: make(payload=zeros(3, 2))),
        (ValueError, "source_ranges has the shape [7, 2]: give [7, 1]", lambda: ep.dispatch_into(make(source_ranges=zeros(7, 2, dtype=np.int64)), x, ids, weights)),
        (ValueError, "source has the shape", lambda: make(source=zeros(len(got.rows), 3, dtype=np.int32))),
        (ValueError, "token_experts has the shape", lambda: ep.dispatch_into(make("token", token_experts=zeros(len(got.rows), 4, dtype=np.int32)), x, ids, weights)),
        (ValueError, "total_counts has the shape", lambda: make(total_counts=zeros(6, dtype=np.int32))),
        (TypeError, "wait_times has elements of type int32", lambda: make(wait_times=zeros(1, dtype=np.int32))),
        (ValueError, "also has 'sauce': give some of row_expert", lambda: ep.dispatch(x, ids, weights, also=["source", "sauce"])),
        (ValueError, "x has the shape", again(flat.handle, np.concatenate([x, x], 1), rows)),
        (ValueError, "rows has the shape", again(flat.handle, x, zeros(len(rows), 128))),
        (ValueError, "rows has the shape", again(flat.handle, x, zeros(rows.size))),
        (ValueError, "rows has the shape", again(handle, x, zeros(7, 10, 64))),
        (tokenyard.ArgumentError, "rows is", again(flat.handle, x, rows[:-1])),
        (ValueError, "row_payload has the shape", again(flat.handle, x, rows, payload=payload, row_payload=zeros(len(rows), 3))),
        (tokenyard.ArgumentError, "payload", again(flat.handle, x, rows, payload=payload)),
        (tokenyard.ArgumentError, "payload", again(flat.handle, x, rows, row_payload=zeros(len(rows), 2))),
        (tokenyard.ArgumentError, "count", again(flat.handle, x[:4], rows)),
        (ValueError, "rows has the shape [7, 10, 64]: give [7, 9, 64]", lambda: ep.combine(zeros(7, 10, 64), handle)),
        (ValueError, "payload has the shape", lambda: ep.combine(held.rows, handle, payload=zeros(7, 10, 2), payload_out=zeros(n, 2))),
        (ValueError, "payload_out has the shape", lambda: ep.combine(rows, flat.handle, payload=zeros(len(rows), 2), payload_out=zeros(n, 4, 2))),
        (ValueError, "payload_out has the shape", lambda: ep.combine(rows, flat.handle, payload=zeros(len(rows), 2), payload_out=zeros(n, 3))),
        (TypeError, "out has elements of type uint8", lambda: ep.combine(zeros(*rows.shape, dtype=np.uint8), flat.handle, dtype="fp8")),
        (ValueError, 'dtype is "f32"', lambda: ep.combine(rows, flat.handle, zeros(n, 64), dtype="f32")),
        (tokenyard.ArgumentError, "wait_times", lambda: ep.combine(rows, flat.handle, wait_times=zeros(0, dtype=np.int64))),
        (tokenyard.ArgumentError, "of another context", lambda: ep.combine(rows, strange.handle)),
        (tokenyard.ArgumentError, "of another context", again(strange.handle, x, rows)),
        (tokenyard.ArgumentError, "of another context", lambda: ep.dispatch_recv(half, ep.output(x)[0])),
        (tokenyard.ArgumentError, "of another context", lambda: ep.counts(half)),
        (TypeError, "not an instance of 'Format'", lambda: ep.dispatch_into(output, x, ids, weights, format="fp32")),
    ]
    sent = ep.dispatch_send(x, ids, weights, payload=payload)
    for kind, text, call in wrong:
        with pytest.raises(kind) as raised:
            call()
        assert text in str(raised.value), (text, str(raised.value))
    ep.dispatch_recv(sent, ep.output(x, payload_words=2)[0])
    other.dispatch_recv(half, other.output(x)[0])
    got = ep.dispatch(small, ids[:5], weights[:5], format=SMALL)
    weighted = (weights * (ids >= 0)).sum(1, keepdims=True)
    np.testing.assert_allclose(ep.combine(got.rows, got.handle), small * weighted[:5], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ep.combine(flat.rows * 0 + 1, flat.handle), weighted.repeat(64, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("more, text", [
    (dict(room_for=[Format(64, 10)]), "max_tokens is 10: use 1 to 9"), (dict(room_for=[Format(63, 9)]), "hidden is 63"),
    (dict(room_for=[Format(2**62, 9)]), "hidden"), (dict(room_for=[Format(64, 9, dtype="fp32", quantize=True)]), "quantize"),
    (dict(room_for=[Format(64, 9, combine_dtype="fp8")]), "combine_dtype"), (dict(partial="bf16"), 'partial is "bf16"'),
    (dict(round_tokens=0), "round_tokens is 0"), (dict(handles=0), "handles is 0"), (dict(handle_rows=2**60), "handle_rows"),
    (dict(payload_words=2**60), "payload_words"), (dict(dispatch_payload_words=4097), "use 0 to 4096"),
    (dict(missing_ranks="never"), 'missing_ranks is "never"'),
])
def test_contexts_that_cannot_be_are_refused(more, text):
    with pytest.raises(ValueError) as raised:
        alone(**more)
    assert text in str(raised.value)


def all_fail(call, **more):
    """Every rank's context is closed: by an error that says why where a rank finds it, and else by the deadline."""
    case = Case(seed=42)

    def rank(world):
        ep, start = tokenyard.AllToAll(world, **(case.limits | {"timeout": 2.0} | more)), time.monotonic()
        with pytest.raises((tokenyard.OrderError, tokenyard.TimeoutError)) as raised:
            call(ep, case, world.rank)
        assert raised.value.fatal and time.monotonic() - start < 15
        with pytest.raises(type(raised.value)):
            ep.dispatch(case.x[world.rank], case.ids[world.rank], case.weights[world.rank])
        world.barrier()
        return str(raised.value)

    texts = in_ranks(tokenyard.World.threads(case.ranks), rank)
    assert any("another format here than on rank" in text for text in texts), texts


def test_ranks_that_differ_in_what_they_state_get_an_error_each():
    other = Format(64, 9, dtype="fp32", combine_dtype="fp32", weights="none")

    def dispatch(ep, case, r):
        ep.dispatch(case.x[r], case.ids[r], None if r == 1 else case.weights[r], format=other if r == 1 else None)

    def words(ep, case, r):
        ep.dispatch(case.x[r], case.ids[r], case.weights[r], payload=case.x[r][:, : 1 + r % 2].copy())

    def dtype(ep, case, r):
        got = ep.dispatch(case.x[r], case.ids[r], case.weights[r])
        ep.combine(np.zeros(got.rows.shape, dtype=np.float16) if r == 2 else got.rows, got.handle, dtype="fp16" if r == 2 else None)

    all_fail(dispatch, room_for=[other])
    all_fail(words, dispatch_payload_words=2)
    all_fail(dtype)


def test_ranks_that_differ_in_room_get_an_error_each():
    case = Case(ranks=2)

    def rank(world):
        with pytest.raises(tokenyard.ConfigError, match="room="):
            tokenyard.AllToAll(world, **case.limits, room_for=[SMALL] * world.rank)

    in_ranks(tokenyard.World.threads(2), rank)
