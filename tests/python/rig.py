"""Ranks as threads, a plain reference of dispatch and combine, and inputs with experts and weights that differ."""

import os
import random
import socket
import subprocess
import sys
import threading
import traceback

import numpy as np
import pytest

import tokenyard


def the_torch():
    """torch, without which a test is skipped, or fails under `TOKENYARD_STRICT`."""
    if os.environ.get("TOKENYARD_STRICT") == "1":
        import torch

        return torch
    return pytest.importorskip("torch")


def free_port():
    """A port of this host that nothing listens at, as text.

    Ports from 32768 on go to whoever connects to something, so one of those could be gone before it is used.
    """
    for _ in range(64):
        port = random.SystemRandom().randrange(10000, 32768)
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return str(port)
    raise OSError("none of 64 ports from 10000 to 32767 is free")


def has_libfabric():
    """Whether the library finds libfabric."""
    found = subprocess.run([sys.executable, "-m", "tokenyard", "doctor"], capture_output=True, text=True, timeout=60).stdout
    return "lacks  libfabric" not in found


def in_ranks(worlds, work):
    """Runs `work(world)` in a thread for each world; its results by rank, or the first exception."""
    results, failures = [None] * len(worlds), []

    def run(rank):
        try:
            results[rank] = work(worlds[rank])
        except BaseException as failure:  # noqa: BLE001: raised again below
            # At once, too: other ranks may wait for this one for long. Its frames hold contexts, and pytest holds it.
            traceback.print_exc()
            traceback.clear_frames(failure.__traceback__)
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(worlds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


class Case:
    """Tokens of each rank, and what comes of them. fp32 rows: sums differ from the reference by rounding alone."""

    def __init__(self, ranks=3, hidden=64, experts=7, top_k=3, tokens=9, seed=1):
        draw = np.random.default_rng(seed)
        self.ranks, self.hidden, self.experts, self.top_k, self.tokens = ranks, hidden, experts, top_k, tokens
        self.limits = dict(hidden=hidden, experts=experts, top_k=top_k, max_tokens_per_rank=tokens, device="cpu",
                           dtype="fp32", combine_dtype="fp32", timeout=20.0)
        self.count = [int(draw.integers(0, tokens + 1)) for _ in range(ranks)]
        self.count[0] = tokens
        self.x = [draw.standard_normal((n, hidden)).astype(np.float32) for n in self.count]
        self.ids = [self.choices(draw, n) for n in self.count]
        self.weights = [draw.random((n, top_k), dtype=np.float32) for n in self.count]

    def choices(self, draw, tokens):
        ids = np.stack([draw.permutation(self.experts)[: self.top_k] for _ in range(tokens)]) if tokens else np.zeros((0, self.top_k))
        ids = ids.astype(np.int64)
        ids[draw.random(ids.shape) < 0.1] = -1
        return ids

    def owner(self, expert):
        """The rank of an expert, by the library's documented rule."""
        return expert * self.ranks // self.experts

    def rows_of(self, expert):
        """The rows that an expert gets, in the order of (source rank, token)."""
        rows = [self.x[r][t] for r in range(self.ranks) for t in range(self.count[r]) if expert in self.ids[r][t]]
        return np.array(rows, dtype=np.float32).reshape(-1, self.hidden)

    @staticmethod
    def expert(number, rows):
        """What expert `number` computes: another function for each."""
        return rows * np.float32(number + 1) + np.float32(number)

    def sums(self, rank):
        """The weighted sums of a rank's tokens."""
        out = np.zeros((self.count[rank], self.hidden), dtype=np.float64)
        for t, k in np.ndindex(self.ids[rank].shape):
            e = self.ids[rank][t, k]
            if e >= 0:
                out[t] += self.weights[rank][t, k].astype(np.float64) * self.expert(e, self.x[rank][t])
        return out


# Nodes of the ranks that are threads. With 2, `deep_ep` links them by the network that TOKENYARD_NETWORK names.
NODES = int(os.environ.get("TOKENYARD_TEST_THREADS_OF_NODES", "1"))
assert NODES in (1, 2), f"TOKENYARD_TEST_THREADS_OF_NODES is {NODES}: give 1 or 2"
one_node = pytest.mark.skipif(NODES > 1, reason="is of one node")


def in_threads(device, ranks, work):
    """Runs `work(world)` in a thread for each rank; its results by rank. Ranks that share a GPU, "cuda", have a stream each."""

    def rank(world):
        if device == "cuda":
            import torch

            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.synchronize()
                result = work(world)
                torch.cuda.current_stream().synchronize()
        else:
            result = work(world)
        world.barrier()
        return result

    worlds = tokenyard.World.threads(ranks)
    if NODES == 2 and ranks > 1:
        worlds = [world.with_nodes([ranks // 2, ranks - ranks // 2]) for world in worlds]
    return in_ranks(worlds, rank)


def settle(device):
    """Waits for the current stream of a GPU. Before anything is copied from it where ranks share it: a copy to pageable
    memory holds the driver, while the work that it waits for may wait for another rank."""
    if device == "cuda":
        import torch

        torch.cuda.current_stream().synchronize()


def poisoned(shape, dtype=np.float32):
    """An array of NaNs, or of -77."""
    return np.full(shape, np.nan if np.issubdtype(dtype, np.floating) else -77, dtype=dtype)


__all__ = ["Case", "in_ranks", "in_threads", "poisoned", "settle", "the_torch", "tokenyard"]
