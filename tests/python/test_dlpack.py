"""Arrays that have `__dlpack__` alone: what they lend, for how long, and what of them is refused."""

import ctypes
import gc

import numpy as np
import pytest

import tokenyard
from rig import Case, in_ranks, poisoned, the_torch

BOUND = 1e-5
CPU, CUDA, METAL = 1, 2, 8
FLOAT, UINT, COMPLEX = 2, 1, 5
READ_ONLY, IS_COPIED = 1, 2


class Only:
    """What has `__dlpack__` alone, of an array of numpy or torch: no `shape`, no `__len__`."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **given):
        return self.array.__dlpack__(**given)


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("ordinal", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64)]


class Plain(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", Tensor)]


NEW = ctypes.pythonapi.PyCapsule_New
NEW.restype, NEW.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Hand:
    """A capsule by hand. `copies`: each is of a copy of its own, which holds nothing any more once the capsule is gone."""

    def __init__(self, array, copies=False, flags=None, major=1, **fields):
        self.array, self.copies, self.flags, self.major, self.fields = array, copies, flags, major, fields
        self.lent, self.kept, self.gone = 0, [], 0

    def __dlpack_device__(self):
        return self.fields.get("device", CPU), 0

    def __dlpack__(self, **given):
        if self.flags is None and "max_version" in given:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        array = self.array.copy() if self.copies else self.array
        shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
        strides = (ctypes.c_int64 * max(array.ndim, 1))(*(stride // array.itemsize for stride in array.strides))
        fields = dict(data=array.ctypes.data, device=CPU, ndim=array.ndim, code=FLOAT, bits=8 * array.itemsize, lanes=1,
                      shape=ctypes.addressof(shape), strides=ctypes.addressof(strides))
        tensor = Tensor(**(fields | self.fields))
        managed = Plain(tensor) if self.flags is None else Versioned(self.major, 0, None, None, self.flags, tensor)

        def end(_capsule):
            self.lent -= 1
            self.gone += 1
            if self.copies:
                array.fill(np.nan)

        end = DESTRUCTOR(end)
        self.lent += 1
        self.kept.append((array, shape, strides, managed, end))
        name = b"dltensor" if self.flags is None else b"dltensor_versioned"
        return NEW(ctypes.addressof(managed), name, ctypes.cast(end, ctypes.c_void_p))


def alone(**more):
    case = Case(ranks=1, seed=11)
    return case, tokenyard.AllToAll(tokenyard.World.threads(1)[0], **(case.limits | more))


def test_every_argument_by_dlpack_alone():
    case = Case(seed=12)

    def rank(world):
        ep = tokenyard.AllToAll(world, **case.limits, dispatch_payload_words=2, payload_words=2)
        r, n = world.rank, case.count[world.rank]
        arrays = {name: poisoned(shape, dtype) for name, shape, dtype in [
            ("rows", (60, case.hidden), np.float32), ("counts", (len(ep.local_experts),), np.int32),
            ("offsets", (len(ep.local_experts) + 1,), np.int32), ("source", (60, 2), np.int32),
            ("payload", (60, 2), np.float32)]}
        output = tokenyard.Output("contiguous", **{name: Only(array) for name, array in arrays.items()})
        words = np.ascontiguousarray(case.x[r][:, :2])
        for _ in range(2):
            handle = ep.dispatch_into(output, Only(case.x[r]), Only(case.ids[r]), Only(case.weights[r]), payload=Only(words))
            assert handle.tokens == n
            rows, offsets = arrays["rows"], arrays["offsets"]
            for i, expert in enumerate(ep.local_experts):
                part = slice(offsets[i], offsets[i] + arrays["counts"][i])
                np.testing.assert_array_equal(rows[part], case.rows_of(expert))
                np.testing.assert_array_equal(arrays["payload"][part], case.rows_of(expert)[:, :2])
                np.testing.assert_array_equal([case.x[s][t] for s, t in arrays["source"][part]], rows[part].tolist())
                rows[part] = case.expert(expert, rows[part])
            out, sums, times = poisoned((n, case.hidden)), poisoned((n, 2)), np.zeros(case.ranks, dtype=np.int64)
            ep.combine(Only(rows), handle, Only(out), payload=Only(arrays["payload"]), payload_out=Only(sums),
                       wait_times=Only(times))
            np.testing.assert_allclose(out, case.sums(r), rtol=BOUND, atol=BOUND)
            np.testing.assert_allclose(sums, words * (case.ids[r] >= 0).sum(1, keepdims=True), rtol=BOUND, atol=BOUND)
            assert (times >= 0).all() and times.any()
        world.barrier()

    in_ranks(tokenyard.World.threads(case.ranks), rank)


@pytest.mark.parametrize("flags", [None, 0, IS_COPIED, READ_ONLY])
def test_memory_that_lasts_as_long_as_the_capsule_is_read_before_that(flags):
    """Each capsule is of a copy, which is poisoned once the capsule is gone."""
    case, ep = alone(timeout=2.0)
    x, weights = Hand(case.x[0], copies=True, flags=flags), Hand(case.weights[0], copies=True, flags=flags)
    output, got = ep.output(case.x[0])
    handle = ep.dispatch_into(output, x, case.ids[0], weights)
    for i, expert in enumerate(ep.local_experts):
        part = slice(got.offsets[i], got.offsets[i] + got.counts[i])
        np.testing.assert_array_equal(got.rows[part], case.rows_of(expert))
        got.rows[part] = case.expert(expert, got.rows[part])
    rows = Hand(got.rows, copies=True, flags=flags)
    np.testing.assert_allclose(ep.combine(rows, handle, poisoned(case.x[0].shape)), case.sums(0), rtol=BOUND, atol=BOUND)
    again = poisoned(got.rows.shape)
    ep.dispatch_again(handle, x, again)
    np.testing.assert_array_equal(again[: len(case.rows_of(0))], case.rows_of(0))
    sent = ep.dispatch_send(x, case.ids[0], weights)
    ep.dispatch_recv(sent, output)
    np.testing.assert_array_equal(got.rows[: len(case.rows_of(0))], case.rows_of(0))
    del sent
    gc.collect()
    assert (x.lent, weights.lent, rows.lent) == (0, 0, 0) and x.gone == 3


def test_halves_in_rounds_keep_capsules_until_they_are_received():
    case, ep = alone(round_tokens=2)
    assert ep.rounds > 1
    x = Hand(case.x[0], copies=True)
    output, got = ep.output(case.x[0])
    sent = ep.dispatch_send(x, case.ids[0].copy(), case.weights[0].copy())
    gc.collect()
    handle = ep.dispatch_recv(sent, output)
    for i, expert in enumerate(ep.local_experts):
        part = slice(got.offsets[i], got.offsets[i] + got.counts[i])
        np.testing.assert_array_equal(got.rows[part], case.rows_of(expert))
        got.rows[part] = case.expert(expert, got.rows[part])
    half = ep.combine_send(rows := Hand(got.rows, copies=True), handle)
    out = poisoned(case.x[0].shape)
    ep.combine_recv(half, out)
    np.testing.assert_allclose(out, case.sums(0), rtol=BOUND, atol=BOUND)
    del sent, half
    gc.collect()
    assert (x.lent, rows.lent) == (0, 0)


def test_producers_that_the_caller_drops_at_once():
    case, ep = alone()
    for _ in range(20):
        output, got = ep.output(case.x[0])
        rows, counts = got.rows, got.counts
        dropped = tokenyard.Output("contiguous", Only(rows), Only(counts), offsets=Only(got.offsets))
        handle = ep.dispatch_into(dropped, Only(case.x[0].copy()), Only(case.ids[0].copy()), Only(case.weights[0].copy()))
        del dropped, output
        gc.collect()
        weighted = (case.weights[0] * (case.ids[0] >= 0)).sum(1, keepdims=True)
        out = ep.combine(rows, handle)
        np.testing.assert_allclose(out, case.x[0] * weighted, rtol=BOUND, atol=BOUND)


def test_what_dlpack_describes_and_no_call_takes():
    case, ep = alone(dispatch_payload_words=4)
    x, ids, weights = case.x[0], case.ids[0], case.weights[0]
    output, got = ep.output(x)

    def dispatch(given, **more):
        return lambda: ep.dispatch_into(output, given, ids, weights, **more)

    frozen = x.copy()
    frozen.flags.writeable = False
    wrong = [
        (ValueError, "x is on a device of DLPack's type 8", dispatch(Hand(x, device=METAL))),
        (ValueError, "x is on Cuda(3) and the context on Cpu", dispatch(Hand(x, device=CUDA, ordinal=3))),
        (TypeError, "x has elements of 1 of DLPack's type 5 of 64 bits", dispatch(Hand(x, code=COMPLEX, bits=64))),
        (TypeError, "x has elements of 1 of DLPack's type 2 of 64 bits", dispatch(Hand(x.astype(np.float64)))),
        (TypeError, "x has elements of 4 of DLPack's type 2 of 32 bits", dispatch(Hand(x, lanes=4))),
        (TypeError, "x has elements of type uint32: give rows of fp32", dispatch(Hand(x, code=UINT))),
        (ValueError, "x runs backwards", dispatch(Hand(x[::-1]))),
        (ValueError, "x has the shape []", dispatch(Hand(np.full((), 3, dtype=np.float32)))),
        (ValueError, "x has the shape [64]", dispatch(Hand(x[0]))),
        (ValueError, "x has the shape []", dispatch(Hand(x, ndim=-1))),
        (ValueError, "x has the shape []", dispatch(Hand(x, shape=None, strides=None))),
        (ValueError, "x has the strides", dispatch(Hand(np.zeros((9, 128), dtype=np.float32)[:, ::2]))),
        (ValueError, "payload has the strides", dispatch(x, payload=Hand(x[:, :2]))),
        (ValueError, "x is of version 2 of DLPack", dispatch(Hand(x, flags=0, major=2))),
        (BufferError, "already", dispatch(Raising(BufferError("already exported")))),
        (TypeError, "no arguments", dispatch(Raising(TypeError("no arguments")))),
        (TypeError, "PyCapsule", dispatch(Raising(None))),
        (ValueError, "rows is read-only", lambda: tokenyard.Output("contiguous", Only(frozen), got.counts)),
        (ValueError, "out is read-only", lambda: ep.combine(got.rows, handle, Only(frozen))),
        (ValueError, "out is read-only", lambda: ep.combine(got.rows, handle, Hand(x, flags=READ_ONLY))),
        (ValueError, "out comes as a copy", lambda: ep.combine(got.rows, handle, Hand(x, flags=IS_COPIED))),
        (ValueError, "rows has changed since the output was made",
         lambda: ep.dispatch_into(tokenyard.Output("contiguous", Hand(got.rows, copies=True), got.counts), x, ids, weights)),
        (TypeError, "give an array of torch, numpy or cupy, or an output", lambda: ep.dispatch(Only(x), ids, weights)),
    ]
    handle = ep.dispatch_into(output, Only(frozen), ids, weights)
    for kind, text, call in wrong:
        with pytest.raises(kind) as raised:
            call()
        assert text in str(raised.value), (text, str(raised.value))
    handle = ep.dispatch_into(output, Hand(x, flags=0), ids, weights)
    weighted = (weights * (ids >= 0)).sum(1, keepdims=True)
    np.testing.assert_allclose(ep.combine(got.rows, handle), x * weighted, rtol=BOUND, atol=BOUND)


class Raising:
    """A producer that raises, or gives no capsule."""

    def __init__(self, error):
        self.error = error

    def __dlpack_device__(self):
        return CPU, 0

    def __dlpack__(self, **_given):
        if self.error is not None:
            raise self.error
        return 17


def test_offsets_in_bytes_and_left_out_strides():
    case, ep = alone()
    wide = np.concatenate([poisoned((2, case.hidden)), case.x[0]])
    for more in ({}, {"strides": None}):
        output, got = ep.output(case.x[0])
        x = Hand(wide[2:], **more, byte_offset=2 * 4 * case.hidden, data=wide.ctypes.data)
        ep.dispatch_into(output, x, case.ids[0], case.weights[0])
        for i, expert in enumerate(ep.local_experts):
            np.testing.assert_array_equal(got.rows[got.offsets[i] :][: got.counts[i]], case.rows_of(expert))


def test_interfaces_without_a_stride_for_each_dimension_are_refused():
    case, ep = alone()

    class Interface:
        def __init__(self, array, strides):
            self.array, self.__array_interface__ = array, dict(array.__array_interface__, strides=strides)

    for strides in ((8,), (8, 4, 4)):
        with pytest.raises(ValueError, match=f"topk_weights: its array interface has {len(strides)} strides of 2 dimensions"):
            ep.dispatch(case.x[0], case.ids[0], Interface(case.weights[0], strides))
    ep.dispatch(case.x[0], case.ids[0], Interface(case.weights[0], None))


def test_tensors_of_torch_by_dlpack_alone():
    torch = the_torch()
    case, ep = alone(dtype="bf16", combine_dtype="bf16")
    x = torch.from_numpy(np.round(case.x[0] * 4) / 4).to(torch.bfloat16)
    output, got = ep.output(x)
    named = torch.zeros((case.tokens, 1), dtype=torch.bool)
    named[::2] = True
    weights = torch.full((case.tokens, 1), 0.5)
    handle = ep.dispatch_into(output, Only(x), Only(named), Only(weights))
    assert torch.equal(got.rows[: (case.tokens + 1) // 2], x[::2]) and got.counts[0] == (case.tokens + 1) // 2
    out = torch.full_like(x, float("nan"))
    ep.combine(Only(got.rows), handle, Only(out))
    assert torch.equal(out, x * 0.5 * named)
