"""What tests of engines have in common: ranks that are forks of a program and their devices, where SGLang is, and tokens
whose experts are lines."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import sys
import time
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SGLANG = pathlib.Path(os.environ.get("TOKENYARD_SGLANG_FOLDER") or ROOT / "target" / "engines" / "sglang")
DEVICE = os.environ.get("TOKENYARD_TEST_DEVICE", "cpu")
LOCAL, TOP_K, HIDDEN = 3, 4, 512


def skip_without_sglang():
    """Skips a file of tests where SGLang, or a package that its import needs, is not there."""
    if sys.version_info < (3, 11):
        pytest.skip("SGLang is for Python 3.11 and later", allow_module_level=True)
    if os.environ.get("TOKENYARD_STRICT") == "1":
        return
    for package in ("torch", "transformers", "dill", "msgspec", "orjson", "PIL", "psutil", "pydantic"):
        pytest.importorskip(package, reason=f"could not import {package}: SGLang needs it")
    if not (SGLANG / "sglang" / "srt").is_dir():
        pytest.skip(f"could not find sglang in {SGLANG}: `tests/all.sh python` unpacks it", allow_module_level=True)


def fork_ranks(ranks, run_rank, seconds):
    """Runs `run_rank(rank)` in forks of this process, of which the first that fails ends the others, and so does the
    deadline. Ends this process, too, unless all are well."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run_rank, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    try:
        running = processes
        while running and all(process.exitcode in (0, None) for process in processes):
            if time.monotonic() > end:
                sys.exit(f"{ranks} ranks take more than {seconds} s")
            multiprocessing.connection.wait([process.sentinel for process in running], timeout=1.0)
            running = [process for process in processes if process.exitcode is None]
    finally:
        for process in processes:
            if process.exitcode is None:
                process.terminate()
            process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)


@contextlib.contextmanager
def without_gpus():
    """Engines are imported as on a machine without GPUs: their kernels are not there, and the process of which ranks are
    forks must not begin to use a GPU."""
    import torch

    before = torch.cuda.is_available, torch.cuda.device_count
    torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0
    try:
        yield
    finally:
        torch.cuda.is_available, torch.cuda.device_count = before


def on_its_device(rank):
    """New tensors are on the rank's device from here on: the CPU or, with `TOKENYARD_TEST_DEVICE=cuda`, a GPU, which
    ranks share where there are fewer."""
    import torch

    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))


def drawing(seed):
    """A generator of the rank's device."""
    import torch

    return torch.Generator(torch.get_default_device()).manual_seed(seed)


@contextlib.contextmanager
def another_stream(name):
    """A stream, and an event that was recorded, for work that is to be sent on the stream, after the event, and received
    on the current one. On the CPU both are stand-ins, which are compared with what is to happen."""
    import torch

    if DEVICE == "cuda":
        event = torch.cuda.Event()
        event.record()
        yield torch.cuda.Stream(), event
        return
    calls, current = [], types.SimpleNamespace(wait_stream=lambda other: calls.append(("received after", other)))

    @contextlib.contextmanager
    def on(stream):
        calls.append("sent on")
        yield
        calls.append("sent")

    side = types.SimpleNamespace(wait_event=lambda event: calls.append(event))
    before = torch.cuda.stream, torch.cuda.current_stream
    torch.cuda.stream, torch.cuda.current_stream = on, lambda: current
    try:
        yield side, name
    finally:
        torch.cuda.stream, torch.cuda.current_stream = before
    assert calls == [name, "sent on", "sent", ("received after", side)]


class Lines:
    """Tokens of all ranks, which each rank draws alike. Experts are lines, of columns that differ."""

    def __init__(self, counts, seed, quantise):
        """`quantise(x)`: rows as they are sent, and their scales or None."""
        import torch

        draw = drawing(seed)
        self.counts, self.experts = counts, LOCAL * len(counts)
        self.x = [torch.randn(count, HIDDEN, generator=draw).bfloat16() for count in counts]
        self.ids = [torch.rand(count, self.experts, generator=draw).argsort(1)[:, :TOP_K] for count in counts]
        for ids in self.ids:
            ids[torch.rand(ids.shape, generator=draw) < 0.15] = -1
        self.weights = [0.1 + torch.rand(ids.shape, generator=draw) for ids in self.ids]
        self.sent = [quantise(x) for x in self.x]
        self.slopes, self.shifts = torch.randn(2, self.experts, HIDDEN, generator=draw)

    def expert(self, number, rows):
        return rows * self.slopes[number] + self.shifts[number]

    def check_sums(self, rank, sums, given):
        """Each element of what comes back, where experts got the values `given` of the rank's tokens."""
        import torch

        assert sums.dtype == torch.bfloat16 and sums.shape == (self.counts[rank], HIDDEN)
        given = given.double()
        exact, terms = torch.zeros(2, *given.shape, dtype=torch.float64)
        for choice in range(TOP_K):
            ids = self.ids[rank][:, choice]
            weight = torch.where(ids >= 0, self.weights[rank][:, choice], 0.0).double()[:, None]
            slope, shift = self.slopes[ids.clamp(min=0)].double(), self.shifts[ids.clamp(min=0)].double()
            exact, terms = exact + weight * (given * slope + shift), terms + weight * ((given * slope).abs() + shift.abs())
        # Experts' rows, partial sums and sums are rounded to bf16.
        assert ((sums.double() - exact).abs() <= 3.1 * 2.0**-8 * terms).all()
        assert not (self.ids[rank] >= 0).any() or sums.abs().max() > 0.5
