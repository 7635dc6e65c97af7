"""SGLang's expert parallelism by tokenyard: a token dispatcher of its own kind. Imports torch.

    import tokenyard.integrations.sglang
    tokenyard.integrations.sglang.install()      # in each process, before its model is made

A server's processes do that on their own where `TOKENYARD_SGLANG=native` is set: the wheel has an entry point of the
group `sglang.srt.plugins`. Start the server with `--moe-a2a-backend deepep` in both cases. The dispatcher takes the
place of the one for DeepEP, since SGLang's models, memory and graphs ask for that backend by name; its backend
`customized` is known to `create_moe_dispatcher` alone, and `install("customized")` serves that.

The dispatcher returns SGLang's own outputs of DeepEP, so runners for those work. Steps that have prefill in them get a
row for each (token, rank), with as many rows as come; of `--deepep-mode auto`, others get rows by expert, with room for
SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK tokens of each rank. Rows of fp8 are quantised in dispatch. Sending and
receiving halves are `dispatch_a` and `dispatch_b`, and `combine_a` and `combine_b`, in both modes.

Each micro-batch of two-batch overlap has contexts of its own, since a context receives a call before it sends the next
of its kind. Layers share them, and they live as long as SGLang's other buffers. The first call of a mode makes one,
which is collective, as is a later call with more tokens than ever before, where all ranks dispatch once more.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from .. import _growth
from .._calls import AllToAll
from .._native import CombineSent, Format, Handle, Output, Sent
from .._tensors import TYPES, device_of, name_of
from .._worlds import World
from ..deep_ep._contexts import LowLatency, Normal, Offered, Wanted

__all__ = ["TESTED_VERSIONS", "install", "plugin"]

TESTED_VERSIONS = ("0.5.22", "0.5.23")
"""Versions of SGLang with which tests/python/test_sglang.py ran."""

# Tokens of a rank in a round of prefill, as in `tokenyard.deep_ep`.
_ROUND_TOKENS = 16384
# What a version needs to have, by module.
_MOE = "sglang.srt.layers.moe"
_NEEDED = {
    f"{_MOE}.fused_moe_triton.layer": ("create_moe_dispatcher", "MaybeTboDeepEPDispatcher"),
    f"{_MOE}.moe_runner.base": ("MoeRunnerConfig",),
    f"{_MOE}.token_dispatcher.base": ("BaseDispatcher",),
    f"{_MOE}.token_dispatcher.deepep": (
        "DeepEPBuffer", "DeepEPLLDispatchOutput", "DeepEPNormalDispatchOutput", "DeepEPPDispatchHooks",
        "_deepep_precompile_tp_barrier",
    ),
    f"{_MOE}.utils": (
        "DeepEPMode", "MoeA2ABackend", "get_deepep_mode", "get_deepep_output_dtype", "get_moe_a2a_backend",
        "is_tbo_enabled",
    ),
    "sglang.srt.environ": ("envs",),
    "sglang.srt.eplb.expert_distribution": ("get_global_expert_distribution_recorder",),
    "sglang.srt.layers": ("deep_gemm_wrapper",),
    "sglang.srt.layers.dp_attention": ("get_is_extend_in_batch",),
    "sglang.srt.runtime_context": ("get_parallel", "get_resources"),
}
_NORMAL_FIELDS = ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights", "num_recv_tokens_per_expert")
_MASKED_FIELDS = ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights", "masked_m", "expected_m")


def install(backend: str = "deepep", *, timeout: float = 100.0) -> None:
    """Makes layers that SGLang makes from now on, in this process, exchange tokens by tokenyard.

    `backend`: for which `--moe-a2a-backend`; other backends stay SGLang's. `timeout`: seconds for which a call waits
    for other ranks. A version of SGLang that lacks something raises `ImportError`, which names it.
    """
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}: expected seconds above 0, got {timeout}")
    engine = _engine()
    known = [member.value for member in engine.MoeA2ABackend]
    if backend not in known:
        raise ValueError(f"backend is {backend!r}: expected one of {known}, got {backend!r}")
    layer = importlib.import_module(f"{_MOE}.fused_moe_triton.layer")
    original = getattr(layer.create_moe_dispatcher, "before_tokenyard", layer.create_moe_dispatcher)

    @functools.wraps(original)
    def create_moe_dispatcher(moe_runner_config: Any, *others: Any, **by_name: Any) -> Any:
        if engine.get_moe_a2a_backend().value != backend:
            return original(moe_runner_config, *others, **by_name)
        return engine.dispatchers(moe_runner_config, timeout)

    setattr(create_moe_dispatcher, "before_tokenyard", original)
    setattr(layer, "create_moe_dispatcher", create_moe_dispatcher)


def plugin() -> None:
    """What SGLang's plugins call in each process: `install`, if `TOKENYARD_SGLANG` is `native`; nothing if it is unset.

    SGLang goes on after a plugin's exception, without what the user asked for. So the process ends here.
    """
    asked = os.environ.get("TOKENYARD_SGLANG", "")
    if not asked:
        return
    if asked != "native":
        raise SystemExit(f"TOKENYARD_SGLANG is {asked!r}: expected 'native' or nothing, got {asked!r}")
    try:
        install()
    except ImportError as failure:
        raise SystemExit(f"TOKENYARD_SGLANG is set: {failure}") from failure


@functools.lru_cache(maxsize=None)
def _engine() -> Any:
    """What is needed of SGLang, by its names there, and classes that have its own as bases."""
    try:
        version = importlib.import_module("sglang").__version__
    except ImportError as missing:
        raise ImportError(
            f"could not import sglang: expected a version as {TESTED_VERSIONS[-1]}, got {missing}"
        ) from missing
    engine = SimpleNamespace()
    for module, names in _NEEDED.items():
        for name in names:
            try:
                setattr(engine, name, getattr(importlib.import_module(module), name))
            except (ImportError, AttributeError) as missing:
                raise _other_version(f"no {module}.{name}", version) from missing
    outputs = {engine.DeepEPNormalDispatchOutput: _NORMAL_FIELDS, engine.DeepEPLLDispatchOutput: _MASKED_FIELDS}
    for kind, fields in outputs.items():
        if getattr(kind, "_fields", None) != fields:
            raise _other_version(f"a {kind.__name__} of other fields than {', '.join(fields)}", version)
    for name in ("hidden_size", "num_experts", "top_k"):
        if name not in getattr(engine.MoeRunnerConfig, "__dataclass_fields__", ()):
            raise _other_version(f"no MoeRunnerConfig.{name}", version)
    inner = type("TokenyardDispatcher", (_Dispatcher, engine.BaseDispatcher), {})
    both = type("TokenyardDispatchers", (_Dispatchers, engine.MaybeTboDeepEPDispatcher), {})
    engine.dispatchers = lambda config, timeout: both(engine, inner, config, timeout)
    return engine


def _other_version(has: str, version: str) -> ImportError:
    return ImportError(f"sglang has {has}: expected a version as {TESTED_VERSIONS[-1]}, got {version}")


class _Dispatchers:
    """A layer's dispatcher, beside SGLang's base class, which passes calls to `_inners`: one for each micro-batch."""

    def __init__(self, engine: Any, inner: Any, config: Any, timeout: float) -> None:
        engine.BaseDispatcher.__init__(self)
        self._inners = [inner(engine, config, timeout, index) for index in range(2 if engine.is_tbo_enabled() else 1)]
        # Its graphs, which know nothing of dispatchers, clean a buffer of DeepEP's when they come to a step of decode.
        state = engine.DeepEPBuffer._state()
        if state.buffer is None:
            state.buffer = SimpleNamespace(low_latency_mode=False)


class _Exchange:
    """The contexts of a micro-batch for one shape: for prefill, and for decode."""

    def __init__(self, world: World, timeout: float) -> None:
        self.normal = Normal(world, timeout, _ROUND_TOKENS)
        self.low_latency = LowLatency(world, timeout, False)


class _Tokens(NamedTuple):
    """A call's tokens, which prefill sends again where a context was too small."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class _Prefill(NamedTuple):
    """A dispatch of prefill that was sent."""

    tokens: _Tokens
    fp8: bool
    ep: AllToAll
    format: Format
    sent: Sent


class _Decode(NamedTuple):
    """A dispatch of decode that was sent, and what receives it."""

    tokens: _Tokens
    ep: AllToAll
    sent: Sent
    output: Output
    rows: torch.Tensor
    scales: Optional[torch.Tensor]
    counts: torch.Tensor


class _Dispatcher:
    """A micro-batch's dispatcher, beside SGLang's base class, whose constructor sets the attributes below."""

    quant_config: Any
    overlap_args: Any
    expert_mask_gpu = None

    def __init__(self, engine: Any, config: Any, timeout: float, index: int) -> None:
        super().__init__()
        self._engine, self._timeout, self._index = engine, timeout, index
        self._hidden, self._experts = int(config.hidden_size), int(config.num_experts)
        # 0.5.22 has none here, and asks for the server's.
        self.runner_backend = getattr(config, "runner_backend", None)
        self._group = engine.get_parallel().tp_group.device_group
        self._ranks = torch.distributed.get_world_size(self._group)
        if self._experts % self._ranks != 0:
            raise ValueError(
                f"num_experts is {self._experts}: expected a multiple of the {self._ranks} ranks, got {self._experts}"
            )
        # Where shared experts are among the choices, SGLang gives a rank without tokens fewer columns than the others,
        # unless the backend is of DeepEP's class.
        self._top_k = int(config.top_k or 0)
        self._mode = engine.get_deepep_mode()
        self._room = int(engine.envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get())
        self._hooks = engine.DeepEPPDispatchHooks()
        self._fp8: Dict[Any, bool] = {}
        self.set_quant_config({})
        self._sent: Any = None
        self._kept: Optional[Tuple[AllToAll, Handle]] = None
        self._combining: Optional[Tuple[AllToAll, CombineSent, torch.Tensor, Any]] = None

    # SGLang's calls

    def set_quant_config(self, quant_config: Dict[str, Any]) -> None:
        """What rows the experts want, in each mode."""
        self.quant_config = quant_config
        modes = self._engine.DeepEPMode
        for mode in (modes.NORMAL, modes.LOW_LATENCY):
            asked = SimpleNamespace(quant_config=quant_config, dispatch_mode=mode, runner_backend=self.runner_backend)
            dtype = self._engine.get_deepep_output_dtype(asked).value
            # SGLang, too, takes fp8 for int8 on GPUs.
            if dtype not in ("bf16", "fp8", "int8"):
                raise NotImplementedError(f"dispatcher_output_dtype is {dtype}: expected bf16 or fp8, got {dtype}")
            self._fp8[mode] = dtype != "bf16"

    def register_deepep_dispatch_hook(self, hook: Callable[[Any], None]) -> Any:
        """`hook(self)` runs between the halves of each `dispatch`."""
        return self._hooks.register_hook(hook)

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        """SGLang's output of a dispatch for the step's mode."""
        self.dispatch_a(hidden_states, topk_output)
        self._hooks(self)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: Any) -> None:
        """Sends `hidden_states` `[tokens, hidden]`, bf16 (or, if it is not quantised, fp16), to the experts of
        `topk_output`."""
        self._expect("dispatch_a", self._sent is None and self._combining is None)
        if hidden_states.dim() != 2 or hidden_states.shape[1] != self._hidden:
            raise ValueError(
                f"hidden_states is of another shape: expected [tokens, {self._hidden}], got {[*hidden_states.shape]}"
            )
        ids, weights = topk_output.topk_ids.to(torch.int64), topk_output.topk_weights.float()
        if not len(ids) and ids.shape[1] < self._top_k:
            ids, weights = ids.new_empty((0, self._top_k)), weights.new_empty((0, self._top_k))
        tokens = _Tokens(hidden_states.contiguous(), ids.contiguous(), weights.contiguous())
        mode = self._mode.resolve(self._engine.get_is_extend_in_batch())
        self._engine._deepep_precompile_tp_barrier()
        if mode == self._engine.DeepEPMode.NORMAL:
            # SGLang's experts of prefill take fp8 rows by DeepGEMM alone.
            deep_gemm = self._engine.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM
            self._sent = self._send_prefill(tokens, self._fp8[mode] and deep_gemm)
        else:
            self._sent = self._send_decode(tokens, self._fp8[mode])

    def dispatch_b(self) -> Any:
        """Receives what all ranks sent."""
        sent, self._sent = self._sent, None
        self._expect("dispatch_b", sent is not None)
        return self._receive_prefill(sent) if isinstance(sent, _Prefill) else self._receive_decode(sent)

    def combine(self, combine_input: Any) -> torch.Tensor:
        """The sums `[tokens, hidden]` of the experts' outputs, in their dtype."""
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: Any) -> None:
        """Sends the experts' outputs of the last dispatch: rows by expert, which the weights of `combine_input`
        multiply, or sums of a rank's experts with their weights."""
        rows, _ids, weights = combine_input
        kept, self._kept = self._kept, None
        self._expect("combine_a", kept is not None)
        assert kept is not None
        ep, handle = kept
        given: Dict[str, Any] = {"dtype": name_of(rows)}
        if rows.dim() == 3:
            missing = ep.top_k - weights.shape[1]
            given["topk_weights"] = torch.nn.functional.pad(weights.float(), (0, missing)).contiguous()
        out = torch.empty((handle.tokens, self._hidden), dtype=rows.dtype, device=rows.device)
        stream = self._overlapped(rows)
        if stream is None:
            sent = ep.combine_send(rows, handle, **given)
        else:
            with torch.cuda.stream(stream):
                sent = ep.combine_send(rows, handle, **given)
        self._combining = (ep, sent, out, stream)

    def combine_b(self) -> torch.Tensor:
        """Receives the sums."""
        combining, self._combining = self._combining, None
        self._expect("combine_b", combining is not None)
        assert combining is not None
        ep, sent, out, stream = combining
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        ep.combine_recv(sent, out)
        return out

    # Inside

    def _expect(self, call: str, fits: bool) -> None:
        if not fits:
            raise RuntimeError(
                f"{call} is out of order: expected dispatch_a, dispatch_b, combine_a and combine_b one after the other"
            )

    def _overlapped(self, rows: torch.Tensor) -> Any:
        """The stream of single-batch overlap, on which combine is sent beside shared experts."""
        if self.overlap_args is None:
            return None
        if self.overlap_args.overlap or self.overlap_args.signal is not None:
            raise NotImplementedError(
                "combine overlaps the down GEMM: expected overlap with shared experts alone, got signals of blocks"
            )
        stream = self.overlap_args.stream
        stream.wait_event(self.overlap_args.wait_event)
        if rows.is_cuda and not torch.cuda.is_current_stream_capturing():
            rows.record_stream(stream)
        return stream

    def _exchange(self, device: str) -> _Exchange:
        """The contexts that layers of this shape share, kept where SGLang keeps its buffers."""
        shared = self._engine.get_resources().buffers.setdefault("tokenyard", {})
        worlds, exchanges = shared.setdefault("worlds", {}), shared.setdefault("exchanges", {})
        if self._group not in worlds:
            worlds[self._group] = World.from_group(self._group)
        key = (self._group, self._index, self._hidden, self._experts, self._room, device)
        if key not in exchanges:
            exchanges[key] = _Exchange(worlds[self._group], self._timeout)
        made: _Exchange = exchanges[key]
        return made

    def _scales(self, blackwell: bool, fp8: bool) -> Optional[str]:
        return None if not fp8 else "ue8m0" if blackwell else "fp32"

    def _send_prefill(self, tokens: _Tokens, fp8: bool) -> _Prefill:
        x, choices = tokens.x, tokens.ids.shape[1]
        wanted = Wanted(self._hidden, self._experts, choices, False, device_of(x))
        ep = self._exchange(device_of(x)).normal.get(x, wanted, None)
        scales = self._scales(self._engine.deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0, fp8)
        format = Format(
            self._hidden, ep.format.max_tokens, dtype="fp8" if fp8 else name_of(x), scales=scales, quantize=fp8,
            combine_dtype=name_of(x), weights="dispatch",
        )
        ids = _growth.named(tokens.ids, self._experts, self._ranks)
        offered = Offered(x, ids, tokens.weights, None).within(ep, self._experts)
        sent = ep.dispatch_send(offered.x, offered.topk_idx, offered.weights, format=format, counts=True)
        return _Prefill(tokens, fp8, ep, format, sent)

    def _receive_prefill(self, call: _Prefill) -> Any:
        while True:
            x, ids, _weights = call.tokens
            experts, sources = call.ep.counts(call.sent)
            output, got = call.ep.output(x, layout="token", capacity=sum(sources), format=call.format)
            handle = call.ep.dispatch_recv(call.sent, output)
            if experts.pop() == 0:
                break
            # Some rank has more tokens than this context has room for, which goes before the new one is made.
            tokens, fp8 = call.tokens, call.fp8
            del call, output, got, handle
            self._exchange(device_of(x)).normal.grow(x, None)
            call = self._send_prefill(tokens, fp8)
        self._kept = (call.ep, handle)
        align = 128 if self._engine.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM else 1
        counts: List[int] = [-(-rows // align) * align for rows in experts]
        recorder = self._engine.get_global_expert_distribution_recorder()
        if recorder.recording:
            recorder.on_deepep_dispatch_normal(counts, **_layout(ids, self._experts, self._ranks))
        choices = ids.shape[1]
        assert got.token_experts is not None and got.token_weights is not None
        return self._engine.DeepEPNormalDispatchOutput(
            got.rows, got.scales, got.token_experts[:, :choices].long(), got.token_weights[:, :choices].contiguous(),
            counts,
        )

    def _send_decode(self, tokens: _Tokens, fp8: bool) -> _Decode:
        x = tokens.x
        if x.shape[0] > self._room:
            raise ValueError(
                f"hidden_states has {x.shape[0]} tokens: expected at most the {self._room} of "
                f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK, got {x.shape[0]}"
            )
        ep = self._exchange(device_of(x)).low_latency.get(x, self._room, self._experts, tokens.ids.shape[1], None)
        scales = self._scales(self._engine.deep_gemm_wrapper.DEEPGEMM_BLACKWELL, fp8)
        format = Format(
            self._hidden, self._room, dtype="fp8" if fp8 else name_of(x), scales=scales, quantize=fp8,
            combine_dtype=name_of(x), weights="combine",
        )
        local, capacity = len(ep.local_experts), self._ranks * self._room
        rows = torch.empty((local, capacity, self._hidden), dtype=TYPES[format.dtype], device=x.device)
        counts = torch.empty(local, dtype=torch.int32, device=x.device)
        words: Optional[torch.Tensor] = None
        if scales is not None:
            # The row's number first, and columns 16 bytes apart or a multiple, as DeepGEMM's TMA asks.
            columns, word = (128, torch.float32) if scales == "fp32" else (512, torch.int32)
            shape = (local, -(-self._hidden // columns), -(-capacity // 4) * 4)
            words = torch.empty(shape, dtype=word, device=x.device)
        output = Output("masked", rows, counts, scales=words, column_major=words is not None)
        sent = ep.dispatch_send(x, tokens.ids, format=format)
        row_scales = None if words is None else words.transpose(1, 2)[:, :capacity]
        return _Decode(tokens, ep, sent, output, rows, row_scales, counts)

    def _receive_decode(self, call: _Decode) -> Any:
        self._kept = (call.ep, call.ep.dispatch_recv(call.sent, call.output))
        self._engine.get_global_expert_distribution_recorder().on_deepep_dispatch_low_latency(call.counts)
        chosen = call.tokens.ids.numel() * self._ranks
        return self._engine.DeepEPLLDispatchOutput(
            call.rows, call.scales, call.tokens.ids, call.tokens.weights, call.counts,
            (chosen + self._experts) // self._experts,
        )


def _layout(ids: torch.Tensor, experts: int, ranks: int) -> Dict[str, Any]:
    """How many of this rank's tokens go to each rank and expert, for SGLang's record of the distribution."""
    used = (ids >= 0) & (ids < experts)
    of_expert = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    place = torch.where(used, ids, experts)
    of_expert.scatter_add_(0, place.flatten(), torch.ones_like(place.flatten(), dtype=torch.int32))
    named = torch.zeros((ids.shape[0], ranks + 1), dtype=torch.int32, device=ids.device)
    named.scatter_(1, torch.where(used, ids // (experts // ranks), ranks), 1)
    return {
        "num_tokens_per_rank": named[:, :ranks].sum(0, dtype=torch.int32), "num_tokens_per_rdma_rank": None,
        "num_tokens_per_expert": of_expert[:experts],
    }
