"""Calls of `tokenyard.deep_ep` that an exception ends between their halves: Ctrl-C in a wait, no memory for an output. The
buffer goes on, and the next calls of all ranks are right. Buffers as context managers."""

import gc
import os
import signal
import threading
import time
import traceback

import pytest

import tokenyard
from rig import in_ranks, the_torch

torch = the_torch()

from test_hybrid import NeverWaits  # noqa: E402: after torch
from tokenyard import _eager, ops  # noqa: E402
from tokenyard._errors import Found  # noqa: E402
from tokenyard.deep_ep import Buffer, ElasticBuffer, EventHandle, HybridEPBuffer  # noqa: E402

HIDDEN, LOCAL, TOP_K, RANKS, ALIGN = 256, 2, 2, 2, 4
EXPERTS = LOCAL * RANKS
COUNTS = (5, 3)
# Ranks learn soon that another one failed.
SECONDS = 15


class Tokens:
    """Tokens of two ranks, and by loops what comes of them."""

    def __init__(self, seed, counts=COUNTS):
        draw, self.counts = torch.Generator().manual_seed(seed), counts
        self.x = [torch.randint(-8, 9, (n, HIDDEN), generator=draw).bfloat16() for n in counts]
        self.ids = [torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(n)]) for n in counts]
        self.weights = [torch.randint(1, 9, (n, TOP_K), generator=draw) / 8 for n in counts]

    def map(self, rank):
        return torch.zeros((self.counts[rank], EXPERTS), dtype=torch.bool).scatter_(1, self.ids[rank], True)

    def rows(self, rank, expand=False):
        """The rows that a rank gets: one for each token, or for each choice, expert after expert."""
        own = range(rank * LOCAL, (rank + 1) * LOCAL)
        places = [(s, t) for s in range(RANKS) for t in range(self.counts[s])]
        named = {(s, t): [e for e in own if e in self.ids[s][t]] for s, t in places}
        chosen = [p for e in own for p in places if e in named[p]] if expand else [p for p in places if named[p]]
        return torch.stack([self.x[s][t] for s, t in chosen])

    def times(self, rank, expand=False):
        """How many rows each token of a rank has."""
        rows = [len(ids) if expand else len({int(e) // LOCAL for e in ids}) for ids in self.ids[rank]]
        return torch.tensor(rows)[:, None]

    def places(self, rank, expand=False):
        """Where the rows of a rank are: for each choice, expert after expert from a multiple of ALIGN on, or row after row."""
        if not expand:
            return list(range(len(self.rows(rank))))
        numbers, begin = [], 0
        for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
            rows = sum(int((ids == expert).sum()) for ids in self.ids)
            numbers += range(begin, begin + rows)
            begin += -(-rows // ALIGN) * ALIGN
        return numbers


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A rank that waits for one that failed does not for long."""
    for kind in (Buffer, HybridEPBuffer):
        monkeypatch.setattr(kind, "timeout_seconds", float(SECONDS))


class Normal:
    """Calls of `Buffer`'s normal mode."""

    expand = False

    def __init__(self, world):
        self.rank, self.buffer = world.rank, Buffer(world)

    def dispatch(self, tokens):
        ids = tokens.ids[self.rank]
        layout = self.buffer.get_dispatch_layout(ids, EXPERTS)
        got = self.buffer.dispatch(
            tokens.x[self.rank], is_token_in_rank=layout[3], num_tokens_per_expert=layout[2], topk_idx=ids,
            topk_weights=tokens.weights[self.rank],
        )
        return got[0], got[4]

    def again(self, tokens, handle):
        return self.buffer.dispatch(tokens.x[self.rank], handle=handle)[0]

    def combine(self, rows, handle):
        return self.buffer.combine(rows, handle)[0]


class Elastic:
    """Calls of `ElasticBuffer`. `how`: of dispatch."""

    before = None

    def __init__(self, world, buffer=None, **how):
        self.rank, self.how, self.expand = world.rank, how, how.get("do_expand", False)
        room = dict(num_max_tokens_per_rank=8, hidden=HIDDEN, num_gpu_timeout_secs=SECONDS)
        self.buffer = ElasticBuffer(world, **room) if buffer is None else buffer

    def dispatch(self, tokens, **how):
        rank = self.rank
        got = self.buffer.dispatch(
            tokens.x[rank], tokens.ids[rank], tokens.weights[rank], num_experts=EXPERTS,
            previous_event_before_epilogue=self.before, **(self.how | how),
        )
        return got[0], got[3]

    def again(self, tokens, handle):
        return self.buffer.dispatch(tokens.x[self.rank], handle=handle, do_expand=self.expand)[0]

    def combine(self, rows, handle):
        return self.buffer.combine(rows, handle, previous_event_before_epilogue=self.before)[0]


class Hybrid:
    """Calls of `HybridEPBuffer`, which permute or not."""

    def __init__(self, world, expand, kind=HybridEPBuffer, **how):
        self.rank, self.expand, self.how = world.rank, expand, how
        self.buffer = kind(world, HIDDEN, 16, LOCAL)

    def dispatch(self, tokens):
        given = dict(hidden=tokens.x[self.rank], routing_map=tokens.map(self.rank))
        if self.expand:
            rows, _, _, _, handle = self.buffer.dispatch_with_permute(**given, **self.how)
        else:
            rows, _, _, handle = self.buffer.dispatch(**given)
        return rows, handle

    def again(self, tokens, handle):
        if self.expand:
            return self.buffer.dispatch_with_permute(hidden=tokens.x[self.rank], handle=handle)[0]
        return self.buffer.dispatch(tokens.x[self.rank], handle=handle)[0]

    def combine(self, rows, handle):
        call = self.buffer.combine_with_unpermute if self.expand else self.buffer.combine
        return call(hidden=rows, handle=handle)[0]


KINDS = {
    "normal": Normal,
    "elastic": Elastic,
    "elastic expanded": lambda world: Elastic(world, do_expand=True, expert_alignment=ALIGN),
    "hybrid": lambda world: Hybrid(world, False),
    "hybrid permuted": lambda world: Hybrid(world, True, pad_multiple=ALIGN),
    "hybrid unwaited": lambda world: Hybrid(world, True, NeverWaits, pad_multiple=ALIGN, num_permuted_tokens=32, non_blocking=True),
}


def right(calls, tokens):
    """A dispatch, and a combine of it: the handle."""
    (rows, handle), rank = calls.dispatch(tokens), calls.rank
    wanted = tokens.rows(rank, calls.expand)
    places = tokens.places(rank, calls.expand)
    assert torch.equal(rows[list(places)], wanted)
    assert torch.equal(calls.combine(rows, handle), tokens.x[rank] * tokens.times(rank, calls.expand))
    return handle


def go_on(calls, first, handle):
    """Calls after what was left. Those by an old handle come first."""
    rows = calls.again(Tokens(2), handle)
    assert torch.equal(calls.combine(rows, handle), Tokens(2).x[calls.rank] * first.times(calls.rank, calls.expand))
    for seed in (3, 4):
        right(calls, Tokens(seed))


def beside(make, own, of_other, late=0.0):
    """Rank 0 here and rank 1 in a thread, each with a dispatch, then `own(calls, handle)` and, later by some seconds,
    `of_other(calls, handle)`; after that both go on."""
    worlds, failures, first = tokenyard.World.threads(RANKS), [], Tokens(1)

    def other():
        try:
            calls = make(worlds[1])
            handle = right(calls, first)
            time.sleep(late)
            of_other(calls, handle)
            go_on(calls, first, handle)
        except BaseException as failure:  # noqa: BLE001: raised again below
            traceback.print_exc()
            failures.append(failure)

    thread = threading.Thread(target=other)
    thread.start()
    calls = make(worlds[0])
    handle = right(calls, first)
    own(calls, handle)
    go_on(calls, first, handle)
    thread.join()
    if failures:
        raise failures[0]


def interrupted(tokens):
    """A dispatch of these tokens that Ctrl-C ends."""

    def call(calls, handle):
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                calls.dispatch(tokens)
        finally:
            # Where the call came to an end before, Ctrl-C would end the tests.
            timer.cancel()
            timer.join()

    return call


def whole(tokens):
    """A dispatch of these tokens that is right."""

    def call(calls, handle):
        rows, _ = calls.dispatch(tokens)
        assert torch.equal(rows[tokens.places(calls.rank, calls.expand)], tokens.rows(calls.rank, calls.expand))

    return call


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_in_the_wait_for_another_rank(kind):
    """The dispatch that Ctrl-C ended is one of the other rank's, whose result is right."""

    beside(KINDS[kind], interrupted(Tokens(9)), whole(Tokens(9)), late=0.7)


@pytest.mark.parametrize("kind", ["normal", "elastic grows", "hybrid", "hybrid permuted"])
def test_ctrl_c_in_a_call_of_more_tokens_than_there_is_room_for(kind):
    """All ranks make a larger context, and the call that Ctrl-C ended comes again in the next one."""
    made = {"elastic grows": lambda world: Elastic(world, ElasticBuffer(world, num_bytes=1, num_gpu_timeout_secs=SECONDS))}
    # More than the context that the first call made has room for.
    many = Tokens(9, counts=(200, 3))

    beside((KINDS | made)[kind], interrupted(many), whole(many), late=0.7)


class Raises(EventHandle):
    """An event for which no stream can wait."""

    def current_stream_wait(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("call", ["dispatch", "combine"])
@pytest.mark.parametrize("sync", [True, False])
def test_an_exception_between_halves(sync, call):
    def half(calls, handle, **how):
        if call == "dispatch":
            calls.dispatch(Tokens(9))
        else:
            rows = torch.zeros((len(calls.again(Tokens(5), handle)), HIDDEN)).bfloat16()
            calls.combine(rows, handle)

    def raising(calls, handle):
        calls.before = Raises()
        with pytest.raises(ZeroDivisionError):
            half(calls, handle)
        calls.before = EventHandle()

    beside(lambda world: Elastic(world, do_cpu_sync=sync), raising, half)


@pytest.mark.parametrize("kind", ["elastic", "hybrid"])
def test_no_memory_for_the_output(kind):
    """The next call takes what was left in an output that is as small as can be."""
    huge = 1 << 42

    def without_memory(calls, handle):
        with pytest.raises(RuntimeError, match="memory"):
            if kind == "elastic":
                calls.dispatch(Tokens(9), expert_alignment=((1 << 31) - 1) // LOCAL)
            else:
                given = dict(hidden=Tokens(9).x[0], routing_map=Tokens(9).map(0))
                calls.buffer.dispatch_with_permute(**given, num_permuted_tokens=huge)

    made = {"elastic": lambda world: Elastic(world, do_expand=True, expert_alignment=ALIGN), "hybrid": KINDS["hybrid permuted"]}
    beside(made[kind], without_memory, lambda calls, handle: calls.dispatch(Tokens(9)))


@pytest.mark.parametrize("in_c", [False, True])
def test_ctrl_c_in_the_hooks_half_of_a_low_latency_call(in_c, monkeypatch):
    """A dispatch and a combine whose sending half Ctrl-C ended are received by the next ones, which operators in C or
    calls in Python have sent."""
    if in_c and not _eager.DEFINED:
        pytest.skip("torch before 2.11 has no interface for operators in C")
    monkeypatch.setattr(_eager, "DEFINED", in_c)
    sent, interrupted_ranks = _eager.low_latency_made, {}

    def by_operator(made, number):
        found = sent(made, number)
        if interrupted_ranks.pop(threading.get_ident(), None) is None:
            return found
        assert found[1] > 0 and found[2] is None
        return (*found[:2], Found(KeyboardInterrupt()))

    monkeypatch.setattr(_eager, "low_latency_made", by_operator)
    first = Tokens(1)

    def right_once(buffer, tokens):
        rank = buffer.rank
        x, ids, weights = tokens.x[rank], tokens.ids[rank], tokens.weights[rank]
        rows, _, handle, _, hook = buffer.low_latency_dispatch(x, ids, 8, EXPERTS, use_fp8=False, return_recv_hook=True)
        hook()
        out, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True)
        hook()
        assert torch.equal(out, (x.float() * weights.sum(1, keepdim=True)).bfloat16())
        return rows, handle

    def interrupted(native, name):
        """A context whose next sending half takes place, and then raises."""
        if in_c:
            interrupted_ranks[threading.get_ident()] = name
            return
        call = getattr(native, name)

        def once(*arguments, **named):
            del native.__dict__[name]
            error = KeyboardInterrupt()
            error.sent = call(*arguments, **named)
            raise error

        native.__dict__[name] = once

    def work(world):
        buffer = Buffer(world, low_latency_mode=True)
        # The first call of its kind is one in Python.
        right_once(buffer, first)
        rows, handle = right_once(buffer, first)
        assert (handle.planned is not None) == in_c
        ep, tokens = buffer._low_latency.made(), Tokens(5)
        x, ids, weights = tokens.x[world.rank], tokens.ids[world.rank], tokens.weights[world.rank]
        for name in ("dispatch_send", "combine_send"):
            if world.rank == 0:
                interrupted(ep, name)
            try:
                if name == "dispatch_send":
                    buffer.low_latency_dispatch(x, ids, 8, EXPERTS, use_fp8=False, return_recv_hook=True)[4]()
                else:
                    buffer.low_latency_combine(rows, first.ids[world.rank], weights, handle, return_recv_hook=True)[2]()
                assert world.rank == 1
            except KeyboardInterrupt:
                assert world.rank == 0
            right_once(buffer, Tokens(6))

    in_ranks(tokenyard.World.threads(RANKS), work)


@pytest.mark.parametrize("in_c", [False, True])
@pytest.mark.parametrize("kind", ["low latency", "worst", "ops"])
def test_ctrl_c_in_a_call_leaves_what_it_made(kind, in_c, monkeypatch):
    """Wherever in a dispatch of this rank Ctrl-C comes, what was made is the exception's, with all rows."""
    monkeypatch.setattr(_eager, "DEFINED", in_c and _eager.DEFINED)
    (world,) = tokenyard.World.threads(1)
    buffer = Buffer(world, low_latency_mode=True)
    ep = tokenyard.AllToAll(world, hidden=2048, experts=4, top_k=1, max_tokens_per_rank=128, device="cpu")
    x, ids = torch.randn(128, 2048).bfloat16(), torch.arange(128)[:, None] % 4
    weights = torch.rand(128, 1)

    def normal():
        ranks, _, experts, named, _ = buffer.get_dispatch_layout(ids, 4)
        return buffer.dispatch(
            x, num_tokens_per_rank=ranks, is_token_in_rank=named, num_tokens_per_expert=experts, topk_idx=ids,
            topk_weights=weights, num_worst_tokens=128,
        )

    def sums(got):
        if kind == "low latency":
            return buffer.low_latency_combine(got[0], ids, weights, got[2])[0]
        return buffer.combine(got[0], got[4])[0] if kind == "worst" else ops.combine(got.rows, got)

    dispatch = {
        "low latency": lambda: buffer.low_latency_dispatch(x, ids, 128, 4, use_fp8=False),
        "worst": normal, "ops": lambda: ops.dispatch(ep, x, ids, weights),
    }[kind]
    got = dispatch()
    wanted = sums(got)

    def interrupt(*_):
        raise KeyboardInterrupt

    before, interrupted = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        for number in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.00005 * number)
                got = dispatch()
                time.sleep(0.01)
            except KeyboardInterrupt as error:
                # Before and after the call, in Python of the buffer, there may be nothing of it.
                if hasattr(error, "dispatched"):
                    interrupted += 1
                    got = error.dispatched
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert torch.equal(sums(got), wanted)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 5, interrupted


def test_an_error_of_order_is_raised_at_once():
    """No counts are waited for of a dispatch that was not sent."""
    world, tokens = tokenyard.World.threads(1)[0], Tokens(1)
    buffer = ElasticBuffer(world, num_max_tokens_per_rank=8, hidden=HIDDEN, num_gpu_timeout_secs=SECONDS)
    given = dict(num_experts=EXPERTS, num_max_tokens_per_rank=8)
    _, _, _, handle, _ = buffer.dispatch(tokens.x[0], tokens.ids[0], **given)
    # By a caller who does not go through the buffer.
    half = handle._place.kept.ep.dispatch_send(tokens.x[0], tokens.ids[0], format=handle._place.kept.format)
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(tokenyard.OrderError, match="was sent and not received") as raised:
            buffer.dispatch(tokens.x[0], tokens.ids[0], **given)
        assert not hasattr(raised.value, "dispatched") and time.monotonic() - start < SECONDS / 2
    del half


@pytest.mark.parametrize("kind", ["normal", "elastic", "hybrid"])
def test_buffers_as_context_managers(kind):
    def work(world):
        with pytest.raises(ZeroDivisionError):
            calls = KINDS[kind](world)
            with calls.buffer as buffer:
                assert buffer is calls.buffer
                handle = right(calls, Tokens(1))
                raise ZeroDivisionError
        for call in (lambda: calls.dispatch(Tokens(1)), lambda: calls.again(Tokens(1), handle)):
            with pytest.raises(RuntimeError, match=f"this {type(buffer).__name__} was destroyed: make a new one"):
                call()
        # Once more, also beside destroy.
        with buffer:
            buffer.destroy()
        gc.collect()
        right(KINDS[kind](world), Tokens(2))

    in_ranks(tokenyard.World.threads(RANKS), work)
