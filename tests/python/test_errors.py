"""Exceptions: their classes, fields and texts; waits that end; and that what follows works."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import tokenyard
from rig import Case, in_ranks


def alone(**more):
    case = Case(ranks=1)
    return case, tokenyard.AllToAll(tokenyard.World.threads(1)[0], **(case.limits | more))


def test_wrong_arguments_name_what_is_wrong_and_the_next_call_works():
    case, ep = alone()
    x, ids, weights = case.x[0], case.ids[0], case.weights[0]
    output, got = ep.output(x)
    read_only = np.zeros((4, case.hidden), dtype=np.float32)
    read_only.flags.writeable = False
    counts = np.zeros(case.experts, dtype=np.int32)
    wrong = [
        (TypeError, "x is a list", lambda: ep.dispatch([1], ids, weights)),
        (ValueError, "x has the shape", lambda: ep.dispatch(x[0], ids, weights)),
        (TypeError, "x has elements of type int32: give rows of fp32", lambda: ep.dispatch(x.astype(np.int32), ids, weights)),
        (TypeError, "x has elements of type <f8", lambda: ep.dispatch(x.astype(np.float64), ids, weights)),
        (ValueError, "x runs backwards", lambda: ep.dispatch(x[::-1], ids, weights)),
        (ValueError, "x has the strides", lambda: ep.dispatch(np.zeros((9, 128), dtype=np.float32)[:, ::2], ids, weights)),
        (ValueError, "topk_idx has the shape", lambda: ep.dispatch(x, ids[:-1], weights)),
        (TypeError, "topk_idx has elements of type float32", lambda: ep.dispatch(x, weights, weights)),
        (ValueError, "topk_weights has the shape", lambda: ep.dispatch(x, ids, weights[:, :-1])),
        (tokenyard.ArgumentError, "topk_weight", lambda: ep.dispatch(x, ids)),
        (ValueError, 'layout is "heap"', lambda: tokenyard.Output("heap", got.rows, got.counts)),
        (ValueError, "rows is read-only", lambda: tokenyard.Output("contiguous", read_only, counts)),
        (ValueError, "counts has the strides", lambda: tokenyard.Output("contiguous", got.rows, np.zeros(14, dtype=np.int32)[::2])),
        (ValueError, "rows has the shape", lambda: ep.dispatch_into(tokenyard.Output("contiguous", got.rows[:, :32], counts), x, ids, weights)),
        (ValueError, "out has the shape", lambda: ep.combine(got.rows, handle, x[:, :32])),
        (ValueError, 'device is "tpu"', lambda: alone(device="tpu")),
        (ValueError, "timeout is -1e0", lambda: alone(timeout=-1.0)),
        (tokenyard.ConfigError, "top_k is 0", lambda: alone(top_k=0)),
        (TypeError, "unexpected keyword", lambda: alone(hiden=3)),
        (ValueError, "hidden is -1: give 0 or more", lambda: alone(hidden=-1)),
        (TypeError, "experts is a NoneType: give a whole number", lambda: alone(experts=None)),
    ]
    handle = ep.dispatch_into(output, x, ids, weights)
    for kind, text, call in wrong:
        with pytest.raises(kind) as raised:
            call()
        assert text in str(raised.value), (text, str(raised.value))
    handle = ep.dispatch_into(output, x, ids, weights)
    out = ep.combine(got.rows, handle)
    weighted = (weights * (ids >= 0)).sum(1, keepdims=True)
    np.testing.assert_allclose(out, x * weighted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_routing_that_is_unusable_raises_with_the_handle_and_is_combined(exact):
    case, ep = alone()
    ids = case.ids[0].copy()
    ids[0] = [5, 5, 1]
    with pytest.raises(tokenyard.RoutingError, match="rank 0, dispatch 1") as raised:
        ep.dispatch(case.x[0], ids, case.weights[0], exact=exact)
    assert (raised.value.rank, raised.value.epoch, raised.value.fatal) == (0, 1, False)
    got = raised.value.dispatched
    assert (ep.combine(got.rows, got.handle, np.ones_like(case.x[0])) == 0).all()
    assert ep.dispatch(case.x[0], case.ids[0], case.weights[0]).handle is not None


@pytest.mark.parametrize("exact", [False, True])
def test_a_dispatch_while_another_is_in_flight_is_refused_at_once(exact):
    """Its counts never come, so nobody waits for them."""
    case, ep = alone()
    x, ids, weights = case.x[0], case.ids[0], case.weights[0]
    sent = ep.dispatch_send(x, ids, weights, counts=True)
    with pytest.raises(tokenyard.OrderError, match="sent and not received"):
        ep.dispatch(x, ids, weights, exact=exact)
    output, got = ep.output(x)
    sums = ep.combine(got.rows, ep.dispatch_recv(sent, output))
    np.testing.assert_allclose(sums, x * (weights * (ids >= 0)).sum(1, keepdims=True), rtol=1e-5, atol=1e-5)


def test_an_output_without_room_says_how_much_is_needed():
    case, ep = alone()
    with pytest.raises(tokenyard.CapacityError) as raised:
        ep.dispatch(case.x[0], case.ids[0], case.weights[0], capacity=3)
    assert (raised.value.given, raised.value.needed) == (3, int((case.ids[0] >= 0).sum()))


def test_a_rank_that_does_not_come_is_named_within_the_deadline():
    case = Case(ranks=2)
    limits = case.limits | {"timeout": 0.5}

    def rank(world):
        ep = tokenyard.AllToAll(world, **limits)
        if world.rank == 1:
            world.barrier()
            return None
        start = time.monotonic()
        with pytest.raises(tokenyard.TimeoutError) as raised:
            ep.dispatch(case.x[0], case.ids[0], case.weights[0])
        assert time.monotonic() - start < 10
        error = raised.value
        assert (error.rank, error.peer, error.epoch, error.fatal) == (0, 1, 1, True) and error.seconds >= 0.5
        assert error.wait in str(error)
        with pytest.raises(tokenyard.TimeoutError):
            ep.dispatch(case.x[0], case.ids[0], case.weights[0])
        world.barrier()

    in_ranks(tokenyard.World.threads(2), rank)


def test_an_exception_of_an_all_gather_is_passed_on():
    def all_gather(what, own, seconds):
        raise KeyError(f"no {what}")

    with pytest.raises(tokenyard.BootstrapError, match="all_gather raised KeyError"):
        tokenyard.World.over(0, 2, all_gather)
    world = tokenyard.World.over(0, 1, lambda what, own, seconds: [own])
    assert world.all_gather(b"hello") == [b"hello"]
    with pytest.raises(tokenyard.BootstrapError):
        tokenyard.World.over(0, 1, lambda what, own, seconds: [17])


def test_ctrl_c_ends_a_wait():
    world, _other = tokenyard.World.threads(2)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        world.barrier()
    assert time.monotonic() - start < 5
    timer.join()


def test_a_worlds_deadline_is_its_own():
    world, other = tokenyard.World.threads(2)
    assert world.timeout == 30.0
    hasty = world.with_timeout(0.2)
    assert (hasty.timeout, hasty.rank, hasty.size, world.timeout) == (0.2, 0, 2, 30.0)
    start = time.monotonic()
    with pytest.raises(tokenyard.BootstrapError, match="waited 200 ms"):
        hasty.barrier()
    assert time.monotonic() - start < 10
    for seconds in (-1.0, 2e9, float("nan")):
        with pytest.raises(ValueError, match="seconds is"):
            other.with_timeout(seconds)
    with pytest.raises(TypeError):
        other.with_timeout(None)


def test_a_signals_handler_that_would_wait_for_the_wait_that_it_interrupts_is_refused_at_once():
    world, other = tokenyard.World.threads(2)
    found = []

    def handler(*_):
        start = time.monotonic()
        with pytest.raises(tokenyard.BootstrapError, match="in the middle of another collective"):
            world.barrier()
        found.append(time.monotonic() - start)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        late = threading.Timer(1.0, other.barrier)
        late.start()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        world.barrier()
    finally:
        signal.signal(signal.SIGALRM, before)
    late.join()
    assert len(found) == 1 and found[0] < 5

    def gather(what, own, seconds):
        if what.startswith("barrier"):
            alone.all_gather(b"")
        return [own]

    alone = tokenyard.World.over(0, 1, gather)
    with pytest.raises(tokenyard.BootstrapError, match="in the middle of another collective"):
        alone.barrier()


def test_ctrl_c_ends_a_call_and_its_arrays_live_on():
    case = Case(ranks=2)
    limits = case.limits | {"timeout": 4.0}
    ready, done = threading.Event(), threading.Event()
    worlds = tokenyard.World.threads(2)

    def absent():
        ep = tokenyard.AllToAll(worlds[1], **limits)
        ready.set()
        done.wait(60)
        del ep

    other = threading.Thread(target=absent)
    other.start()
    ep = tokenyard.AllToAll(worlds[0], **limits)
    ready.wait(20)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ep.dispatch(case.x[0].copy(), case.ids[0].copy(), case.weights[0].copy())
    gc.collect()
    filler = [np.full((case.tokens, case.hidden), 7, dtype=np.float32) for _ in range(50)]
    time.sleep(5)  # the call ends by its own deadline
    with pytest.raises(tokenyard.TimeoutError):
        ep.dispatch(case.x[0], case.ids[0], case.weights[0])
    assert all((part == 7).all() for part in filler)
    done.set()
    other.join()


@pytest.mark.parametrize("inner", ["check", "dispatch"])
def test_a_handlers_call_does_not_take_what_the_call_found_that_it_interrupted(inner):
    """Its wait is still under way, though its kernel has ended."""
    case = Case(ranks=2)
    worlds = tokenyard.World.threads(2)
    limits = case.limits | {"timeout": 20.0}
    wrong = case.ids[0].copy()
    wrong[0] = 1
    found = []

    def other():
        ep = tokenyard.AllToAll(worlds[1], **limits)
        given = (case.x[1], case.ids[1], case.weights[1])
        time.sleep(0.6)
        ep.dispatch(*given)
        for _ in range(2 if inner == "dispatch" else 1):
            ep.dispatch(*given)
        worlds[1].barrier()

    def handler(*_):
        time.sleep(0.8)
        found.append(ep.check() if inner == "check" else ep.dispatch(case.x[0], case.ids[0], case.weights[0]).handle.tokens)

    thread = threading.Thread(target=other)
    thread.start()
    ep = tokenyard.AllToAll(worlds[0], **limits)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(tokenyard.RoutingError) as raised:
            ep.dispatch(case.x[0], wrong, case.weights[0])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert raised.value.handle.tokens == case.count[0] and found == [None if inner == "check" else case.count[0]]
    # Nothing is left of it.
    ep.dispatch(case.x[0], case.ids[0], case.weights[0])
    ep.check()
    worlds[0].barrier()
    thread.join()


def combined(way, ep, got, rows, out=None):
    """Makes a combine in one of several ways."""
    calls = {
        "call": lambda: ep.combine(rows, got.handle),
        "halves": lambda: ep.combine_recv(ep.combine_send(rows, got.handle), out),
    }
    if way in calls:
        return calls[way]()
    ops, torch = pytest.importorskip("tokenyard.ops"), pytest.importorskip("torch")
    if way == "operator in Python":
        with torch.enable_grad():
            return ops.combine(rows.requires_grad_(), got)
    return ops.combine(rows, got) if way == "operator" else ops.combine_into(out, rows, got)


@pytest.mark.parametrize("way", ["call", "halves", "operator", "operator into", "operator in Python"])
def test_a_combine_that_ctrl_c_ended_has_its_sums(way):
    case = Case(ranks=2)
    worlds = tokenyard.World.threads(2)
    limits, operators = case.limits | {"timeout": 20.0}, way.startswith("operator")
    usual = "operator" if operators else "call"
    as_given = pytest.importorskip("torch").tensor if operators else np.array
    sent, late = threading.Event(), threading.Event()

    def dispatch(ep, r):
        given = [as_given(value[r]) for value in (case.x, case.ids, case.weights)]
        return pytest.importorskip("tokenyard.ops").dispatch(ep, *given) if operators else ep.dispatch(*given)

    def experts(ep, got):
        rows = np.zeros(got.rows.shape, dtype=np.float32)
        for i, expert in enumerate(ep.local_experts):
            part = slice(int(got.offsets[i]), int(got.offsets[i]) + int(got.counts[i]))
            rows[part] = case.expert(expert, np.asarray(got.rows[part]))
        return as_given(rows)

    def other():
        ep = tokenyard.AllToAll(worlds[1], **limits)
        for _ in range(2):
            got = dispatch(ep, 1)
            sent.set()
            late.wait(20)
            combined(usual, ep, got, experts(ep, got))
        worlds[1].barrier()

    thread = threading.Thread(target=other)
    thread.start()
    ep = tokenyard.AllToAll(worlds[0], **limits)
    got = dispatch(ep, 0)
    out = as_given(np.full((case.count[0], case.hidden), np.nan, dtype=np.float32))
    sent.wait(20)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt) as raised:
        combined(way, ep, got, experts(ep, got), out)
    late.set()
    made = raised.value.out
    assert (made is out) == (way in ("halves", "operator into"))
    got = dispatch(ep, 0)
    combined(usual, ep, got, experts(ep, got))
    np.testing.assert_allclose(np.asarray(made), case.sums(0), rtol=1e-5, atol=1e-5)
    worlds[0].barrier()
    thread.join()


def test_an_interpreter_ends_with_calls_and_contexts_alive():
    program = """
import numpy as np, threading, tokenyard
worlds = tokenyard.World.threads(2)
limits = dict(hidden=64, experts=4, top_k=2, max_tokens_per_rank=4, device="cpu", dtype="fp32", timeout=2.0)
kept = [None, None]
def rank(r):
    kept[r] = tokenyard.AllToAll(worlds[r], **limits)
threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
def late():
    try: kept[0].dispatch(np.zeros((4, 64), np.float32), np.zeros((4, 2), np.int32) + [0, 3], np.ones((4, 2), np.float32))
    except tokenyard.Error as error: print(type(error).__name__, flush=True)
threading.Thread(target=late, daemon=True).start()
import time; time.sleep(0.3)
print("ends", flush=True)
"""
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended
    assert ended.stdout.startswith("ends") and ended.stderr == "", ended
    assert time.monotonic() - start < 30


def test_many_contexts_leave_nothing_behind():
    case = Case(ranks=1)

    def some(n):
        for _ in range(n):
            ep = tokenyard.AllToAll(tokenyard.World.threads(1)[0], **case.limits)
            got = ep.dispatch(case.x[0], case.ids[0], case.weights[0])
            ep.combine(got.rows, got.handle)
        gc.collect()
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * 4096, len(os.listdir("/proc/self/fd")), threading.active_count()

    some(50)
    before, after = some(50), some(300)
    assert after[0] < before[0] + (8 << 20), (before, after)
    assert after[1:] == before[1:]


def test_the_program_runs_with_ranks_as_threads_and_as_processes():
    command = [sys.executable, "-m", "tokenyard"]
    bench = ["bench", "--device", "cpu", "--world", "2", "--hidden", "128", "--experts", "4", "--top-k", "2", "--tokens",
             "4", "--iters", "2", "--warmup", "1", "--check", "all"]
    for more in ([], ["--launch", "processes"]):
        ended = subprocess.run([*command, *bench, *more], capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0 and "yes" in ended.stdout, ended
    ended = subprocess.run([*command, "bench", "--wold", "2"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "--wold" in ended.stderr, ended


def test_ranks_that_are_processes_are_started_by_the_command_of_a_target_folder(tmp_path):
    """pip --target puts the command into the folder's bin, not beside the interpreter."""
    (tmp_path / "tokenyard").symlink_to(os.path.dirname(tokenyard.__file__))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tokenyard").touch(mode=0o755)
    program = "import sys; sys.executable = '/nowhere/python'; from tokenyard.__main__ import command; print(command())"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(tmp_path / "bin" / "tokenyard")


def test_ctrl_c_in_an_all_gather_is_ctrl_c_and_other_exceptions_are_causes():
    def interrupted(what, own, seconds):
        raise KeyboardInterrupt

    def wrong(what, own, seconds):
        raise KeyError("key")

    with pytest.raises(KeyboardInterrupt):
        tokenyard.World.over(0, 2, interrupted)
    with pytest.raises(tokenyard.BootstrapError) as raised:
        tokenyard.World.over(0, 2, wrong)
    assert isinstance(raised.value.__cause__, KeyError)


def test_the_child_of_a_fork_is_refused_and_ends_cleanly():
    program = """
import os, sys, numpy as np, tokenyard
world = tokenyard.World.threads(1)[0]
ep = tokenyard.AllToAll(world, hidden=64, experts=4, top_k=2, max_tokens_per_rank=4, device="cpu", dtype="fp32", timeout=2.0)
given = np.zeros((4, 64), np.float32), np.zeros((4, 2), np.int32) + [0, 3], np.ones((4, 2), np.float32)
ep.dispatch(*given)
child = os.fork()
if child == 0:
    for call in (lambda: ep.dispatch(*given), world.barrier, ep.check):
        try:
            call()
        except RuntimeError as error:
            assert "before a fork" in str(error)
        else:
            raise AssertionError("not refused")
    del ep, world
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
ep.dispatch(*given)
world.barrier()
print("right")
"""
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "right\n", "")
    assert time.monotonic() - start < 20


def test_choices_and_weights_that_do_not_fit_are_refused():
    case, ep = alone(weights="combine")
    got = ep.dispatch(case.x[0], case.ids[0])
    for shape in ((case.tokens, case.top_k + 1), (case.tokens - 1, case.top_k), (case.top_k, case.tokens)):
        with pytest.raises(ValueError, match="topk_weights has the shape"):
            ep.combine(got.rows, got.handle, topk_weights=np.ones(shape, dtype=np.float32))
    with pytest.raises(TypeError, match="topk_idx has elements of type uint8: give int32 or int64"):
        ep.dispatch(case.x[0], case.ids[0].astype(np.uint8))
    with pytest.raises(ValueError, match='dtype is "bfloat16": give one of bf16'):
        alone(dtype="bfloat16")
    with pytest.raises(ValueError, match="give seconds from 0 to 1e9"):
        alone(timeout=float("inf"))


def test_a_signals_handler_may_use_the_context_whose_call_it_interrupts():
    case = Case(ranks=2)
    worlds, seen = tokenyard.World.threads(2), []

    def late():
        ep = tokenyard.AllToAll(worlds[1], **case.limits)
        time.sleep(0.6)
        ep.dispatch(case.x[1], case.ids[1], case.weights[1])
        worlds[1].barrier()

    other = threading.Thread(target=late)
    other.start()
    ep = tokenyard.AllToAll(worlds[0], **case.limits)

    def handler(number, frame):
        seen.append(ep.check())

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    ep.dispatch(case.x[0], case.ids[0], case.weights[0])
    assert seen == [None]
    signal.signal(signal.SIGALRM, before)
    worlds[0].barrier()
    other.join()


def test_doctor_says_which_wheel_this_is():
    printed = subprocess.run([sys.executable, "-m", "tokenyard", "doctor"], capture_output=True, text=True, timeout=60)
    first, *others = printed.stdout.splitlines()
    assert first.startswith(f"has    wheel         tokenyard {tokenyard.__version__}, cp39-abi3-manylinux_"), first
    assert any(line.startswith(("has    driver", "lacks  driver")) for line in others)
