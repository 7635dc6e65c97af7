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
of its kind. Layers share them, and they live as long as SGLang's other buffers: the context of decode for as many
choices of a token as the layer has, since graphs that were captured use it. The first call of a mode makes one,
which is collective, as is a later prefill with more tokens than ever before, where all ranks dispatch once more.

A rank with unusable routing takes part without its tokens: `dispatch_b` receives, and then raises the `RoutingError`,
whose `dispatched` has SGLang's output for `combine`. Other ranks' sums are right. In decode on a GPU, where the host
does not wait, a later call raises it. A call that raises without `dispatched` may be repeated, unless the error is
fatal.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, TypeVar

import torch

from .. import _growth
from .._calls import AllToAll
from .._errors import Found
from .._hosts import Hosts
from .._native import CombineSent, Error, Format, Handle, Output, RoutingError, Sent
from .._tensors import TYPES, device_of, name_of, no_gradient
from .._worlds import World
from ..deep_ep._checks import as_it_is, beside
from ..deep_ep._contexts import LowLatency, Normal, Offered, Wanted, weights_of
from . import seconds

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
    seconds(timeout)
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

    SGLang goes on after any exception of a plugin, without what the user asked for. So the process ends here.
    """
    asked = os.environ.get("TOKENYARD_SGLANG", "")
    if not asked:
        return
    if asked != "native":
        raise SystemExit(f"TOKENYARD_SGLANG is {asked!r}: expected 'native' or nothing, got {asked!r}")
    try:
        install()
    except Exception as failure:
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

    def __init__(self, hosts: Hosts, timeout: float) -> None:
        self.normal = Normal(hosts, timeout, _ROUND_TOKENS)
        self._hosts, self._timeout = hosts, timeout
        self._low_latency: Dict[int, LowLatency] = {}

    def low_latency(self, choices: int) -> LowLatency:
        """For tokens of so many choices. Contexts stay: graphs of other layers have captured them."""
        if choices not in self._low_latency:
            self._low_latency[choices] = LowLatency(self._hosts, self._timeout, False)
        return self._low_latency[choices]


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
    found: Found


class _Decode(NamedTuple):
    """A dispatch of decode that was sent, and what receives it."""

    tokens: _Tokens
    ep: AllToAll
    sent: Sent
    output: Output
    rows: torch.Tensor
    scales: Optional[torch.Tensor]
    counts: torch.Tensor
    found: Found


_Call = TypeVar("_Call", _Prefill, _Decode)


class _Received(NamedTuple):
    """A dispatch that was received, for combine."""

    ep: AllToAll
    handle: Handle
    weighted: Optional[torch.Size]
    """Shape of the weights that combine takes."""


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
        self._kept: Optional[_Received] = None
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
        self._expect("dispatch_a")
        mode = self._mode.resolve(self._engine.get_is_extend_in_batch())
        prefill = mode == self._engine.DeepEPMode.NORMAL
        # SGLang's experts of prefill take fp8 rows by DeepGEMM alone.
        fp8 = self._fp8[mode] and (not prefill or self._engine.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM)
        ids, weights = _checked(hidden_states, topk_output, self._hidden, fp8)
        if not len(ids) and ids.shape[1] < self._top_k:
            ids, weights = ids.new_empty((0, self._top_k)), weights.new_empty((0, self._top_k))
        tokens = _Tokens(hidden_states.contiguous(), ids.contiguous(), weights.contiguous())
        self._engine._deepep_precompile_tp_barrier()
        self._sent = self._send_prefill(tokens, fp8) if prefill else self._send_decode(tokens, fp8)

    def dispatch_b(self) -> Any:
        """Receives what all ranks sent. Raises the `RoutingError` of this rank's tokens, if there is one."""
        self._expect("dispatch_b")
        try:
            return self._receive_prefill() if isinstance(self._sent, _Prefill) else self._receive_decode()
        except Error as error:
            if error.fatal:
                self._sent = None
            raise

    def combine(self, combine_input: Any) -> torch.Tensor:
        """The sums `[tokens, hidden]` of the experts' outputs, in their dtype."""
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: Any) -> None:
        """Sends the experts' outputs of the last dispatch: rows by expert, which the weights of `combine_input`
        multiply, or sums of a rank's experts with their weights. bf16 or fp16."""
        self._expect("combine_a")
        assert self._kept is not None
        ep, handle, weighted = self._kept
        rows, _ids, weights = combine_input
        if not isinstance(rows, torch.Tensor) or rows.dtype not in _ROWS:
            wanted = "torch.bfloat16 or torch.float16"
            raise TypeError(f"hidden_states of combine_input is of another dtype: expected {wanted}, got {_kind(rows)}")
        given: Dict[str, Any] = {"dtype": name_of(rows)}
        no_gradient("SGLang's combine", rows)
        if weighted is not None:
            if not isinstance(weights, torch.Tensor) or weights.shape != weighted:
                raise ValueError(f"topk_weights of combine_input: expected {[*weighted]}, got {_kind(weights)}")
            no_gradient("SGLang's combine", weights)
            given["topk_weights"] = weights_of(ep, weights.float())
        out = torch.empty((handle.tokens, self._hidden), dtype=rows.dtype, device=rows.device)
        stream = self._overlapped(rows)
        # Kernels of the experts were compiled since the dispatch, for longer than others wait.
        self._engine._deepep_precompile_tp_barrier()
        try:
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                sent = ep.combine_send(rows, handle, **given)
        except BaseException as error:
            # By Ctrl-C, say, while it was under way: it is to be received.
            if hasattr(error, "sent") and not isinstance(error, Error):
                self._kept, self._combining = None, (ep, error.sent, out, stream)
            raise
        self._kept, self._combining = None, (ep, sent, out, stream)

    def combine_b(self) -> torch.Tensor:
        """Receives the sums."""
        self._expect("combine_b")
        combining, self._combining = self._combining, None
        assert combining is not None
        ep, sent, out, stream = combining
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        try:
            ep.combine_recv(sent, out)
        except Error as error:
            if out.is_cuda and not error.fatal:
                # An error of an earlier call, in place of which this one is to be made again.
                self._combining = combining
            raise
        return out

    # Inside

    def _expect(self, call: str) -> None:
        """Refuses calls that are not the next."""
        if self._sent is not None:
            due = ["dispatch_b"]
        elif self._combining is not None:
            due = ["combine_b"]
        else:
            due = ["dispatch_a"] if self._kept is None else ["combine_a", "dispatch_a"]
        if call not in due:
            raise RuntimeError(f"{call} is out of order: expected {' or '.join(due)} of this dispatcher, got {call}")

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
        hosts, exchanges = shared.setdefault("hosts", {}), shared.setdefault("exchanges", {})
        if self._group not in hosts:
            hosts[self._group] = Hosts(World.from_group(self._group))
        key = (self._group, self._index, self._hidden, self._experts, self._room, device, self._timeout)
        if key not in exchanges:
            exchanges[key] = _Exchange(hosts[self._group], self._timeout)
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
        return self._send(
            lambda: ep.dispatch_send(offered.x, offered.topk_idx, offered.weights, format=format, counts=True),
            lambda sent, found: _Prefill(tokens, fp8, ep, format, sent, found),
        )

    def _send(self, send: Callable[[], Sent], call_of: Callable[[Sent, Found], _Call]) -> _Call:
        """What was sent, which is received also where it could not be complete."""
        found = Found()
        try:
            sent = send()
        except RoutingError as error:
            # It goes on without this rank's tokens. Raised once it was received.
            sent = found.take(error, "sent")
        except BaseException as error:
            # Ctrl-C while it was under way.
            if hasattr(error, "sent") and not isinstance(error, Error):
                self._sent = call_of(error.sent, found)
            raise
        return call_of(sent, found)

    def _received(self, call: Any, output: Output) -> Found:
        """Receives, and keeps what combine needs. What this returns is raised with the results, if it is an error."""
        found: Found = call.found
        try:
            handle = found.receive(lambda: call.ep.dispatch_recv(call.sent, output))
        except BaseException as error:
            # It took place, also before a Ctrl-C in its wait.
            handle = found.take(error, "handle")
        weighted = None if isinstance(call, _Prefill) else call.tokens.weights.shape
        self._sent, self._kept = None, _Received(call.ep, handle, weighted)
        return found

    def _receive_prefill(self) -> Any:
        while True:
            # The only reference beside `self._sent`: a context that is too small goes before the new one is made.
            call: _Prefill = self._sent
            x, ids, _weights = call.tokens
            experts, sources = call.found.receive(functools.partial(call.ep.counts, call.sent))
            output, got = call.ep.output(x, layout="token", capacity=sum(sources), format=call.format)
            if experts.pop() == 0:
                break
            # Some rank has more tokens than this context has room for.
            try:
                call.found.receive(functools.partial(call.ep.dispatch_recv, call.sent, output))
            except BaseException as error:
                # Also before a Ctrl-C in its wait, which is raised with the results. Otherwise nothing took place.
                call.found.take(error, "handle")
            self._sent = None
            tokens, fp8, found = call.tokens, call.fp8, call.found
            del call, output, got
            self._exchange(device_of(x)).normal.grow(x, None)
            self._sent = self._send_prefill(tokens, fp8)
            if found and not self._sent.found:
                self._sent = self._sent._replace(found=found)
        found = self._received(call, output)
        align = 128 if self._engine.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM else 1
        counts: List[int] = [-(-rows // align) * align for rows in experts]
        recorder = self._engine.get_global_expert_distribution_recorder()
        if recorder.recording:
            recorder.on_deepep_dispatch_normal(counts, **_layout(ids, self._experts, self._ranks))
        choices = ids.shape[1]
        assert got.token_experts is not None and got.token_weights is not None
        made = self._engine.DeepEPNormalDispatchOutput(
            got.rows, got.scales, _growth.of_choices(got.token_experts, choices, True).long(),
            got.token_weights[:, :choices].contiguous(), counts,
        )
        found.raise_with(made, sent=lambda: _growth.named(ids, self._experts, self._ranks), topk_idx=ids)
        return made

    def _send_decode(self, tokens: _Tokens, fp8: bool) -> _Decode:
        x = tokens.x
        if x.shape[0] > self._room:
            raise ValueError(
                f"hidden_states has {x.shape[0]} tokens: expected at most the {self._room} of "
                f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK, got {x.shape[0]}"
            )
        choices = tokens.ids.shape[1]
        low_latency = self._exchange(device_of(x)).low_latency(choices)
        ep = low_latency.get(x, self._room, self._experts, choices, None)
        scales = self._scales(self._engine.deep_gemm_wrapper.DEEPGEMM_BLACKWELL, fp8)
        format = Format(
            self._hidden, self._room, dtype="fp8" if fp8 else name_of(x), scales=scales, quantize=fp8,
            combine_dtype=name_of(x), weights="combine",
        )
        # Scales as DeepGEMM's TMA asks.
        output, got = ep.output(
            x, layout="masked", capacity=self._ranks * self._room, format=format, column_major=True
        )
        return self._send(
            lambda: ep.dispatch_send(x, tokens.ids, format=format),
            lambda sent, found: _Decode(tokens, ep, sent, output, got.rows, got.scales, got.counts, found),
        )

    def _receive_decode(self) -> Any:
        call: _Decode = self._sent
        found = self._received(call, call.output)
        self._engine.get_global_expert_distribution_recorder().on_deepep_dispatch_low_latency(call.counts)
        chosen = call.tokens.ids.numel() * self._ranks
        made = self._engine.DeepEPLLDispatchOutput(
            call.rows, call.scales, call.tokens.ids, call.tokens.weights, call.counts,
            (chosen + self._experts) // self._experts,
        )
        found.raise_with(made)
        return made


# What travels unless it is quantised, and what comes back.
_ROWS = (torch.bfloat16, torch.float16)


def _kind(given: Any) -> str:
    """What was given in place of a tensor that is wanted."""
    return f"{given.dtype} {[*given.shape]}" if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"


def _checked(x: torch.Tensor, topk_output: Any, hidden: int, fp8: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 and weights fp32 of tokens. Refuses what no dispatch can take."""
    if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.shape[1] != hidden:
        got = [*x.shape] if isinstance(x, torch.Tensor) else _kind(x)
        raise ValueError(f"hidden_states is of another shape: expected [tokens, {hidden}], got {got}")
    if x.dtype not in _ROWS[: 1 if fp8 else 2]:
        wanted = "torch.bfloat16, which is quantised" if fp8 else "torch.bfloat16 or torch.float16"
        raise TypeError(f"hidden_states is of another dtype: expected {wanted}, got {x.dtype}")
    ids, weights = getattr(topk_output, "topk_ids", None), getattr(topk_output, "topk_weights", None)
    if not isinstance(ids, torch.Tensor) or not isinstance(weights, torch.Tensor):
        raise TypeError(f"topk_output: expected one with topk_ids and topk_weights, got a {type(topk_output).__name__}")
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids: expected int32 or int64 [{x.shape[0]}, top_k], got {_kind(ids)}")
    if weights.shape != ids.shape or not weights.is_floating_point():
        raise ValueError(f"topk_weights: expected floating-point {[*ids.shape]} as topk_ids, got {_kind(weights)}")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"hidden_states is on {x.device}: expected a tensor on cpu or cuda")
    for name, tensor in (("topk_ids", ids), ("topk_weights", weights)):
        beside(name, tensor, x)
        as_it_is(name, tensor)
    as_it_is("hidden_states", x)
    no_gradient("SGLang's dispatch", x, weights)
    return ids.to(torch.int64), weights.float()


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
