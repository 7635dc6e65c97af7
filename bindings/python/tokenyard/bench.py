"""Latency of the Python package's dispatch and combine: `python -m tokenyard.bench`, alone or under torchrun.

Under torchrun each process is a rank: the world comes from the environment, or with `--group gloo` from a group
of torch.distributed. Otherwise `--world` ranks are threads of this process. Options and fields of the JSON are those
of the program's `tokenyard bench`, as far as the package has them.

Each iteration has new routing and weights. Its rows are one of at most sixteen sets of random rows, and another one
than in the iteration before. Outputs are filled with NaNs before each call, and a barrier aligns the ranks. A GPU is
timed with CUDA events on the current stream, the CPU device with the clock. In checked iterations every element is
compared with a reference that each rank makes of all ranks' inputs. Quantiles are over iterations and ranks. Exit status: 0; 1 if a result was wrong, a rank failed, or results could not be written; 2 if options are
unusable, or differ among ranks.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import json
import math
import os
import statistics
import sys
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Sequence, Tuple, TypeVar

# Before CUDA starts: kernels of ranks that share a GPU wait for one another, so no kernel may be loaded meanwhile.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch  # noqa: E402

import tokenyard  # noqa: E402

from . import _program  # noqa: E402
from ._hosts import Hosts  # noqa: E402
from ._tensors import TYPES  # noqa: E402

# Functions of torch.cuda have no types.
_cuda: Any = torch.cuda
_T = TypeVar("_T")

UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
"""Half of the step between neighbours in [1, 2), by combine dtype."""
LAYOUTS, MODES = ("contiguous", "masked", "token"), ("fused", "split", "graph")
_NAME = "tokenyard.bench"
# What generators of random numbers take, and the library's numbers.
_MOST = 2**63
# Elements of all ranks' rows that are drawn once and kept.
_MOST_ROWS = 1 << 26


class Unusable(Exception):
    """Options that cannot be used together with this job."""


class Shape(NamedTuple):
    """What all ranks' calls have in common. Expert e is on rank e * world // experts."""

    world: int
    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: str = "bf16"
    layout: str = "contiguous"
    seed: int = 1

    @property
    def combine_dtype(self) -> str:
        """dtype of the experts' outputs and of the sums."""
        return "bf16" if self.dtype == "fp8" else self.dtype

    def experts_of(self, rank: int) -> List[int]:
        """Numbers of a rank's experts."""
        return [e for e in range(self.experts) if e * self.world // self.experts == rank]


class Inputs(NamedTuple):
    """One rank's tokens of one iteration, on the CPU."""

    x: torch.Tensor
    """`[tokens, hidden]` of the shape's dtype."""
    scales: Optional[torch.Tensor]
    """fp32 `[tokens, hidden / 128]` of fp8 rows."""
    ids: torch.Tensor
    """int64 `[tokens, top_k]`, each token's experts, all different."""
    weights: torch.Tensor
    """fp32 `[tokens, top_k]`."""


def _draw(shape: Shape, number: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(((shape.seed * 1_000_003 + number) * 4099 + rank) % _MOST)


@functools.lru_cache(maxsize=None)
def _rows(shape: Shape, number: int, rank: int) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """A rank's rows, and their scales if there are any. Nobody writes them."""
    draw = _draw(shape, number, rank)
    rows = torch.randn((shape.tokens, shape.hidden), generator=draw).to(TYPES[shape.dtype])
    if shape.dtype != "fp8":
        return rows, None
    return rows, torch.rand((shape.tokens, -(-shape.hidden // 128)), generator=draw) + 0.5


def inputs(shape: Shape, iteration: int, rank: int) -> Inputs:
    """A rank's tokens in an iteration: the same on every rank that asks. Routing and weights are of this iteration
    alone; rows come again, as to draw them would take most of the time."""
    kinds = min(16, _MOST_ROWS // (shape.world * shape.tokens * shape.hidden))
    # Sets that would be too large are drawn anew, and not kept.
    rows, scales = _rows(shape, iteration % kinds, rank) if kinds > 1 else _rows.__wrapped__(shape, iteration, rank)
    draw = _draw(shape, ~iteration, rank)
    ids = torch.rand((shape.tokens, shape.experts), generator=draw).argsort(1)[:, : shape.top_k].contiguous()
    return Inputs(rows, scales, ids, torch.rand((shape.tokens, shape.top_k), generator=draw) + 0.1)


class Reference:
    """What an iteration's calls must bring to each rank, from all ranks' inputs, by the library's documented rules.

    Experts' outputs are drawn for each token, and scaled and shifted differently for each expert. Tokens are numbered
    over all ranks: source rank * tokens + token.
    """

    def __init__(self, shape: Shape, iteration: int) -> None:
        self.shape = shape
        all_ranks = [inputs(shape, iteration, rank) for rank in range(shape.world)]
        self.x = torch.cat([each.x for each in all_ranks])
        scales = [each.scales for each in all_ranks if each.scales is not None]
        self.scales = torch.cat(scales) if scales else None
        self.ids = torch.cat([each.ids for each in all_ranks])
        self.weights = torch.cat([each.weights for each in all_ranks])
        draw = torch.Generator().manual_seed((shape.seed * 7919 + iteration) % _MOST)
        self.base = torch.randn((len(self.x), shape.hidden), generator=draw)
        self.factor = torch.rand(shape.experts, generator=draw) * 2 + 0.25
        self.shift = torch.randn(shape.experts, generator=draw)

    def of_expert(self, expert: int, tokens: torch.Tensor) -> torch.Tensor:
        """What an expert makes of tokens: `[len(tokens), hidden]` in the combine dtype."""
        rows = self.base[tokens] * self.factor[expert] + self.shift[expert]
        return rows.to(TYPES[self.shape.combine_dtype])

    def tokens_of(self, expert: int) -> torch.Tensor:
        """The tokens that name an expert, in the order of (source rank, token)."""
        return (self.ids == expert).any(1).nonzero()[:, 0]

    def tokens_at(self, rank: int) -> torch.Tensor:
        """The tokens of which any expert is on a rank, in order."""
        return (self.ids * self.shape.world // self.shape.experts == rank).any(1).nonzero()[:, 0]

    def counts(self, rank: int) -> List[int]:
        """Rows of each of a rank's experts."""
        return [len(self.tokens_of(e)) for e in self.shape.experts_of(rank)]

    def partial(self, rank: int, tokens: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """A rank's part of the sums of tokens, and the sums of magnitudes: fp64 `[len(tokens), hidden]` each."""
        exact = torch.zeros((len(tokens), self.shape.hidden), dtype=torch.float64)
        terms = torch.zeros_like(exact)
        for e in self.shape.experts_of(rank):
            named = self.ids[tokens] == e
            weight = (self.weights[tokens].double() * named).sum(1, keepdim=True)
            term = weight * self.of_expert(e, tokens).double()
            exact, terms = exact + term, terms + term.abs()
        return exact, terms

    def places(self, rank: int, capacity: int) -> Tuple[torch.Tensor, torch.Tensor, List[int]]:
        """Numbers of the output's rows that the call writes, the token of each, and where each expert's rows begin."""
        if self.shape.layout == "token":
            tokens = self.tokens_at(rank)
            return torch.arange(len(tokens)), tokens, []
        begins, rows, tokens_of = [0], [], []
        for place, e in enumerate(self.shape.experts_of(rank)):
            tokens = self.tokens_of(e)
            begin = place * capacity if self.shape.layout == "masked" else begins[-1]
            rows.append(begin + torch.arange(len(tokens)))
            tokens_of.append(tokens)
            begins.append(begins[-1] + len(tokens))
        nothing = [torch.zeros(0, dtype=torch.int64)]
        return torch.cat(rows + nothing), torch.cat(tokens_of + nothing), begins

    def wrong_rows(self, rank: int, got: Any) -> int:
        """Elements of an output, on the CPU, that differ from what they must be, those beside the rows among them."""
        capacity = got.rows.shape[1] if self.shape.layout == "masked" else len(got.rows)
        rows, tokens, begins = self.places(rank, capacity)
        found = _bytes(got.rows.reshape(-1, self.shape.hidden))
        wanted = torch.full_like(found, 255)
        wanted[rows] = _bytes(self.x[tokens])
        wrong = int((found != wanted).sum())
        wrong += sum(a != b for a, b in zip(got.counts.tolist(), self.counts(rank)))
        if got.scales is not None and self.scales is not None:
            words = _bytes(got.scales.reshape(len(found), -1))
            of_rows = torch.full_like(words, 255)
            of_rows[rows] = _bytes(self.scales[tokens])
            wrong += int((words != of_rows).sum())
        if self.shape.layout == "contiguous":
            wrong += sum(a != b for a, b in zip(got.offsets.tolist(), begins))
        if self.shape.layout == "token":
            own = self.shape.experts_of(rank)
            for row, token in zip(rows.tolist(), tokens.tolist()):
                pairs = zip(got.token_experts[row].tolist(), got.token_weights[row].tolist())
                named = zip(self.ids[token].tolist(), self.weights[token].tolist())
                came = collections.Counter(pair for pair in pairs if pair[0] >= 0)
                wanted_pairs = collections.Counter((own.index(e), weight) for e, weight in named if e in own)
                wrong += sum((came - wanted_pairs).values()) + sum((wanted_pairs - came).values())
        return int(wrong)

    def experts_rows(self, rank: int, capacity: int, all_rows: int) -> torch.Tensor:
        """What a rank gives to combine, `[all_rows, hidden]`: NaN in rows that are none of the call's."""
        rows, tokens, _ = self.places(rank, capacity)
        made = torch.full((all_rows, self.shape.hidden), float("nan")).to(TYPES[self.shape.combine_dtype])
        if self.shape.layout == "token":
            made[rows] = self.partial(rank, tokens)[0].to(made.dtype)
            return made
        begin = 0
        for e, count in zip(self.shape.experts_of(rank), self.counts(rank)):
            made[rows[begin : begin + count]] = self.of_expert(e, tokens[begin : begin + count])
            begin += count
        return made

    def sums(self, rank: int, nodes: Sequence[int]) -> Tuple[torch.Tensor, torch.Tensor]:
        """A rank's weighted sums, and the bound of their error by docs/design.md: fp64 `[tokens, hidden]`. `nodes`: ranks
        of each."""
        tokens = torch.arange(rank * self.shape.tokens, (rank + 1) * self.shape.tokens)
        unit = UNIT[self.shape.combine_dtype]
        exact = torch.zeros((len(tokens), self.shape.hidden), dtype=torch.float64)
        terms, lost = torch.zeros_like(exact), torch.zeros_like(exact)
        first = 0
        for node in nodes:
            of_node = torch.zeros_like(exact)
            for owner in range(first, first + node):
                part, sizes = self.partial(owner, tokens)
                of_node, terms, lost = of_node + part, terms + sizes, lost + unit * part.abs()
            exact = exact + of_node
            if not first <= rank < first + node:
                # A node's sum is rounded on its way to another node.
                lost = lost + unit * of_node.abs()
            first += node
        fp32 = (self.shape.top_k + self.shape.world + 2) * 2.0**-24 * terms
        return exact, 1.02 * (lost + unit * exact.abs() + fp32) + 1e-30

    def wrong_sums(self, rank: int, out: torch.Tensor, nodes: Sequence[int]) -> Tuple[int, float]:
        """Elements of a rank's sums, on the CPU, beyond the bound, and the largest error relative to its sum."""
        exact, bound = self.sums(rank, nodes)
        error = (out.double() - exact).abs()
        # A NaN is beyond every bound.
        wrong = int((~(error <= bound)).sum())
        relative = error / exact.abs().clamp(min=float(exact.abs().mean()) if exact.numel() else 1.0)
        return wrong, float(relative.nan_to_num(float("inf")).max()) if relative.numel() else 0.0


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of rows, so that NaNs and the sign of 0 count."""
    return rows.contiguous().view(torch.uint8)


def poison(*tensors: Optional[torch.Tensor]) -> None:
    """Fills tensors with bytes 0xff: NaNs, and -1 of integers."""
    for tensor in tensors:
        if tensor is not None:
            tensor.view(torch.uint8).fill_(255)


def quantiles(times: Sequence[float]) -> Dict[str, float]:
    """p50, p95, p99, min, max and mean of times, rounded to nanoseconds of microseconds."""
    ordered = sorted(times)

    def at(part: float) -> float:
        return ordered[min(int(len(ordered) * part), len(ordered) - 1)]

    found = dict(p50=statistics.median(ordered), p95=at(0.95), p99=at(0.99), min=ordered[0], max=ordered[-1])
    return {name: round(us, 3) for name, us in dict(found, mean=statistics.fmean(ordered)).items()}


class Clock:
    """Times of calls in microseconds: CUDA events on the current stream, or the host's clock."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.events = [_cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []

    def time(self, call: Callable[[], Any], align: Callable[[], None]) -> Tuple[float, Any]:
        """The microseconds of a call, and what it returned. On a GPU the host waits for the call, and `align` enqueues a
        barrier of the ranks' streams: hosts call some 100 us apart."""
        if not self.on_gpu:
            begin = time.perf_counter_ns()
            result = call()
            return (time.perf_counter_ns() - begin) / 1000, result
        # The stream is kept busy while the host enqueues the call, so that events bound the device's work alone.
        _cuda._sleep(400_000)
        align()
        self.events[0].record()
        result = call()
        self.events[1].record()
        self.events[1].synchronize()
        return self.events[0].elapsed_time(self.events[1]) * 1000, result


class Rank:
    """A rank's context, arrays and calls."""

    def __init__(self, world: tokenyard.World, shape: Shape, mode: str, device: torch.device, lock: threading.Lock,
                 sms: Optional[int] = None) -> None:
        self.world, self.shape, self.mode, self.device, self.lock = world, shape, mode, device, lock
        self.on_gpu = device.type == "cuda"
        self.hosts = Hosts(world)
        self.ep = self.hosts.context(
            hidden=shape.hidden, experts=shape.experts, top_k=shape.top_k, max_tokens_per_rank=shape.tokens,
            device=str(device), dtype=shape.dtype, scales="fp32" if shape.dtype == "fp8" else None,
            combine_dtype=shape.combine_dtype, sms=sms,
        )
        # Copies, on the CPU too: iterations write their own inputs here, and the sets of rows stay as they were drawn.
        copies = (None if t is None else t.to(device, copy=True) for t in inputs(shape, 0, world.rank))
        self.given = Inputs(*copies)  # type: ignore[arg-type]
        self.output, self.got = self.ep.output(self.given.x, layout=shape.layout)
        types, draw = TYPES[shape.combine_dtype], torch.Generator().manual_seed(world.rank)
        self.random = torch.randn(self.got.rows.shape, generator=draw).to(types).to(device)
        self.rows = self.random.clone()
        self.out = torch.empty((shape.tokens, shape.hidden), dtype=types, device=device)
        self.clock, self.handle = Clock(self.on_gpu), None
        self.graphs = self._capture() if mode == "graph" else None

    def _dispatch(self) -> Any:
        given = self.given
        if self.mode == "split":
            sent = self.ep.dispatch_send(given.x, given.ids, given.weights, scales=given.scales)
            return self.ep.dispatch_recv(sent, self.output)
        return self.ep.dispatch_into(self.output, given.x, given.ids, given.weights, scales=given.scales)

    def _combine(self, handle: Any) -> None:
        if self.mode == "split":
            self.ep.combine_recv(self.ep.combine_send(self.rows, handle), self.out)
        else:
            self.ep.combine(self.rows, handle, self.out)

    def _capture(self) -> List[Any]:
        self._combine(self._dispatch())
        self._wait()
        self.world.barrier()
        graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        with self.lock:
            with torch.cuda.graph(graphs[0], capture_error_mode="relaxed"):
                self.handle = self._dispatch()
            with torch.cuda.graph(graphs[1], capture_error_mode="relaxed"):
                self._combine(self.handle)
        self.world.barrier()
        return graphs

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()
        self.ep.check()

    def _cpu(self, tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        return None if tensor is None else tensor.cpu()

    def iterate(self, iteration: int, check: bool) -> Tuple[float, float, int, float]:
        """Microseconds of dispatch and of combine, wrong elements and the largest relative error of one iteration."""
        rank, wrong, error = self.world.rank, 0, 0.0
        for mine, drawn in zip(self.given, inputs(self.shape, iteration, rank)):
            if mine is not None and drawn is not None:
                mine.copy_(drawn)
        reference = Reference(self.shape, iteration) if check else None
        got = self.got
        poison(got.rows, got.counts, got.scales, got.offsets, got.token_experts, got.token_weights)
        self._wait()
        self.world.barrier()
        sending, handle = self.clock.time(self.graphs[0].replay if self.graphs else self._dispatch, self.ep.barrier)
        self._wait()
        if reference is not None:
            absent = ("handle", "payload", "also")
            copies: Dict[str, Any] = {n: self._cpu(t) for n, t in got._asdict().items() if n not in absent}
            copied = got._replace(**copies)
            wrong += reference.wrong_rows(rank, copied)
            capacity = self.rows.shape[1] if self.shape.layout == "masked" else self.rows.shape[0]
            made = reference.experts_rows(rank, capacity, self.rows.numel() // self.shape.hidden)
            self.rows.copy_(made.reshape(self.rows.shape))
        poison(self.out)
        self._wait()
        self.world.barrier()
        back, _ = self.clock.time(self.graphs[1].replay if self.graphs else lambda: self._combine(handle), self.ep.barrier)
        self._wait()
        if reference is not None:
            more, error = reference.wrong_sums(rank, self.out.cpu(), self.world.nodes)
            wrong += more
            self.rows.copy_(self.random)
        return sending, back, wrong, error


def measure(rank: Rank, iters: int, warmup: int, check: int) -> Dict[str, Any]:
    """A rank's times of `iters` iterations after `warmup`, of which every `check`th is checked; 0: none.

    The first iteration of all is checked in any case, as a warm-up or timed.
    """
    times: Dict[str, Any] = {"dispatch": [], "combine": [], "wrong": 0, "error": 0.0, "checked": 0}
    for n in range(warmup + iters):
        checks = n == 0 or (check > 0 and n >= warmup and (n - warmup) % check == 0)
        sending, back, wrong, error = rank.iterate(n, checks)
        times["wrong"] += wrong
        times["error"] = max(times["error"], error)
        times["checked"] += checks
        if n >= warmup:
            times["dispatch"].append(sending)
            times["combine"].append(back)
    return times


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{_NAME}: {message}\n")


def positive(text: str) -> int:
    """The number of an option, 1 or more, and less than 2^63."""
    if not text.isdecimal() or not 0 < int(text) < _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number below 2^63")
    return int(text)


def _several(text: str) -> List[int]:
    """The numbers of an option, with commas between them."""
    return [positive(each) for each in text.split(",")]


def from_zero(text: str) -> int:
    """The number of an option, which may be 0."""
    return 0 if text == "0" else positive(text)


def _check(text: str) -> int:
    return {"all": 1, "first": 0}[text] if text in ("all", "first") else positive(text)


def arguments(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The options of a command line. Ends the process with status 2 and one sentence if they are unusable."""
    parser = _Parser(prog="python -m tokenyard.bench", description=(__doc__ or "").splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--world", type=positive, help="ranks; under torchrun those of the environment")
    parser.add_argument("--tokens", type=_several, default=[128], help="tokens of each rank; several: 1,16,128")
    parser.add_argument("--hidden", type=positive, default=7168, help="columns of a row")
    parser.add_argument("--experts", type=positive, default=256, help="experts of all ranks")
    parser.add_argument("--top-k", type=positive, default=8, help="experts of a token")
    parser.add_argument("--dtype", choices=["fp8", "bf16", "fp16", "fp32"], default="fp8", help="fp8 has fp32 scales")
    parser.add_argument("--layout", choices=LAYOUTS, default="contiguous")
    parser.add_argument("--mode", choices=MODES, default="fused", help="graph: captured and replayed; split: in halves")
    parser.add_argument("--iters", type=positive, help="timed iterations [cpu 5, cuda 1000]")
    parser.add_argument("--warmup", type=from_zero, help="iterations before them [cpu 1, cuda 100]")
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--check", type=_check, help="all, first, or every Nth iteration [cpu all, cuda 16]")
    parser.add_argument("--sms", type=positive, help="SM budget of a kernel")
    parser.add_argument("--group", choices=["env", "gloo"], default="env", help="origin of the world under torchrun")
    parser.add_argument("--json", help="where results go; - is stdout, and then nothing else is printed")
    args = parser.parse_args(argv)
    on_cpu = args.device == "cpu"
    args.launch = "env" if "RANK" in os.environ and "WORLD_SIZE" in os.environ else "threads"
    if args.launch == "env":
        stated = os.environ["WORLD_SIZE"]
        if not stated.isdecimal() or not 0 < int(stated) < _MOST:
            parser.error(f"WORLD_SIZE is {stated!r}: set it to the number of ranks, as torchrun does")
        ranks = int(stated)
        if args.world not in (None, ranks):
            parser.error(f"--world is {args.world}, and the environment has {ranks} ranks: leave --world out")
        args.world = ranks
    elif args.group == "gloo":
        parser.error("--group is gloo without torchrun's environment: run under torchrun, or leave --group out")
    if not on_cpu and not gpu:
        parser.error("--device is cuda, and torch finds no GPU: give --device cpu")
    args.world = args.world or (8 if on_cpu else torch.cuda.device_count())
    if on_cpu and args.mode == "graph":
        parser.error("--mode graph needs a GPU: give --mode fused or split")
    if args.top_k > args.experts:
        parser.error(f"--top-k is {args.top_k}: give at most the {args.experts} of --experts")
    if args.experts < args.world:
        parser.error(f"--experts is {args.experts}: give at least one for each of the {args.world} ranks")
    if args.top_k > 32:
        parser.error(f"--top-k is {args.top_k}: give at most 32")
    size = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}[args.dtype]
    if args.hidden * size % 16 or args.hidden % 8 or (args.dtype == "fp8" and args.hidden % 128):
        step = 128 if args.dtype == "fp8" else 8
        parser.error(f"--hidden is {args.hidden}: give a multiple of {step} for --dtype {args.dtype}")
    # Rank 0 writes the file, which others need not be able to.
    if args.json not in (None, "-") and (args.launch == "threads" or os.environ["RANK"] == "0"):
        if (why := _program.no_file(args.json)) is not None:
            parser.error(f"argument --json: {args.json!r}: {why}")
    args.iters = args.iters or (5 if on_cpu else 1000)
    args.warmup = (1 if on_cpu else 100) if args.warmup is None else args.warmup
    args.check = (1 if on_cpu else 16) if args.check is None else args.check
    return args


def _text(value: Any) -> str:
    """An option's value as it is given."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _must_agree(world: tokenyard.World, args: argparse.Namespace) -> None:
    """Refuses options in which ranks differ. Collective."""
    own = {name: value for name, value in vars(args).items() if name != "json"}
    of_ranks = [json.loads(each) for each in world.all_gather(json.dumps(own).encode())]
    for rank, others in enumerate(of_ranks):
        for name in own:
            if others[name] != of_ranks[0][name]:
                option = f"--{name.replace('_', '-')}"
                raise Unusable(f"{option} is {_text(others[name])} on rank {rank} and {_text(of_ranks[0][name])} on rank 0: "
                               "give all ranks the same options")


class _Results:
    """What this process has: for each number of tokens the times of all ranks, and whether it writes them."""

    def __init__(self) -> None:
        self.times: List[List[Dict[str, Any]]] = []
        self.writes = False


def _run(world: tokenyard.World, args: argparse.Namespace, lock: threading.Lock, results: _Results) -> None:
    """A rank's part, which adds to the results what it has of each number of tokens."""
    results.writes = world.rank == 0
    _must_agree(world, args)
    device, sms = torch.device("cpu"), args.sms
    stream: Any = None
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
        local = world.local_rank if args.launch == "env" else world.rank
        device = torch.device("cuda", local % gpus)
        torch.cuda.set_device(device)
        shared = -(-args.world // gpus)
        if sms is None and args.launch == "threads" and shared > 1:
            sms = (torch.cuda.get_device_properties(device).multi_processor_count - 4) // shared
        stream = _cuda.Stream(device)
    for tokens in args.tokens:
        shape = Shape(args.world, tokens, args.hidden, args.experts, args.top_k, args.dtype, args.layout, args.seed)
        with torch.cuda.stream(stream):
            rank = Rank(world, shape, args.mode, device, lock, sms)
            found = {**measure(rank, args.iters, args.warmup, args.check), "nodes": world.nodes}
            results.times.append([json.loads(each) for each in world.all_gather(json.dumps(found).encode())])
            # All ranks' contexts, and rows, go before the next ones are made.
            del rank
            _rows.cache_clear()
            world.barrier()


def in_threads(ranks: int, work: Callable[[tokenyard.World], _T]) -> List[_T]:
    """`work(world)` of each rank in a thread, by rank; raises the first exception once all have ended."""
    results: Dict[int, _T] = {}
    failures: List[BaseException] = []

    def run(world: tokenyard.World) -> None:
        try:
            results[world.rank] = work(world)
        except BaseException as failure:  # noqa: BLE001: raised again below
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(world,)) for world in tokenyard.World.threads(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(ranks)]


def report(args: argparse.Namespace, tokens: int, ranks: List[Dict[str, Any]]) -> Dict[str, Any]:
    """The result for so many tokens from the times of all ranks, by the names of the program's JSON."""
    wrong, error = sum(each["wrong"] for each in ranks), max(each["error"] for each in ranks)
    shape = {name: getattr(args, name) for name in ("hidden", "experts", "top_k", "dtype")}
    return {
        "version": tokenyard.__version__,
        "torch": torch.__version__,
        "device": args.device,
        "device_name": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "world": args.world,
        "nodes": ranks[0]["nodes"],
        "launch": args.launch,
        **shape,
        "combine_dtype": "bf16" if args.dtype == "fp8" else args.dtype,
        "tokens": tokens,
        "routing": "uniform",
        "layout": args.layout,
        "mode": args.mode,
        "sms": args.sms,
        "iters": args.iters,
        "warmup": args.warmup,
        "seed": args.seed,
        "checked": min(each["checked"] for each in ranks),
        "verified": wrong == 0,
        "mismatches": wrong,
        # JSON has no infinity.
        "max_rel_err": error if math.isfinite(error) else None,
        "dispatch_us": quantiles([us for each in ranks for us in each["dispatch"]]),
        "combine_us": quantiles([us for each in ranks for us in each["combine"]]),
    }


def _of_all_ranks(args: argparse.Namespace, results: _Results) -> None:
    """Adds what this process has of each number of tokens."""
    if args.launch == "threads":
        lock = threading.Lock()
        in_threads(args.world, lambda world: _run(world, args, lock, results if world.rank == 0 else _Results()))
    elif args.group == "env":
        _run(tokenyard.World.from_env(), args, threading.Lock(), results)
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
        _run(tokenyard.World.from_group(), args, threading.Lock(), results)
        dist.destroy_process_group()


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the benchmark; rank 0 writes the results, also those from before an error. Returns the exit status."""
    args = arguments(argv)
    results = _Results()
    status = 0
    try:
        _of_all_ranks(args, results)
    except (Unusable, tokenyard.ConfigError, tokenyard.ArgumentError) as refused:
        _program.complain(_NAME, str(refused))
        status = 2
    except tokenyard.Error as failure:
        _program.complain(_NAME, f"{type(failure).__name__}: {failure}")
        status = 1
    except Exception:
        # Such as torch's, of memory.
        _written(args, results)
        raise
    written = _written(args, results)
    return status or written


def _written(args: argparse.Namespace, results: _Results) -> int:
    """Writes the results, if there are some and this process does. Returns the exit status."""
    reports = [report(args, tokens, ranks) for tokens, ranks in zip(args.tokens, results.times)]
    status = 0 if all(found["verified"] for found in reports) else 1
    if not (results.writes and reports):
        return status
    # As the program writes one, and several.
    text = json.dumps(reports[0] if len(args.tokens) == 1 else {"results": reports})
    if args.json == "-":
        return _program.say(_NAME, text) or status
    status = _program.say(_NAME, "\n".join(line for found in reports for line in _lines(args, found))) or status
    if args.json is not None:
        status = _program.write_file(_NAME, args.json, text) or status
    return status


def _lines(args: argparse.Namespace, found: Dict[str, Any]) -> List[str]:
    """What is printed of a result."""
    lines = [f"{args.world} ranks ({args.launch}) on {found['device_name']}, {found['tokens']} tokens, {args.dtype}, "
             f"{args.layout}, {args.mode}"]
    for name in ("dispatch", "combine"):
        times = found[f"{name}_us"]
        lines.append(f"  {name:8}  p50 {times['p50']:9.1f} us   p95 {times['p95']:9.1f} us")
    return [*lines, f"  {found['checked']} iterations checked: {found['mismatches']} elements wrong"]


if __name__ == "__main__":
    _program.end_by_ctrl_c()
    sys.exit(main())
