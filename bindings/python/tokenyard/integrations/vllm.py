"""Expert parallelism of vLLM by tokenyard, as all-to-all backends of vLLM. Imports torch, and vLLM when it is used.

    vllm serve ... --enable-expert-parallel --data-parallel-size 8 --all2all-backend tokenyard_high_throughput

vLLM loads `plugin` in each of its processes, by the entry point of this package; a script may call `register`
instead. There are two backends:

- `tokenyard_high_throughput`: activations in vLLM's standard format, a row for each (token, rank). The host waits for
  counts, and outputs have as many rows as come. In a CUDA graph nobody waits, counts stay on the device, and outputs
  have room for the tokens of all ranks.
- `tokenyard_low_latency`: activations in vLLM's batched format, `[local experts, ranks * max_num_tokens, hidden]`. Rows
  are quantised in dispatch where experts take fp8 in blocks of 128, and weights are applied in combine.

Layers of one shape share a context, which is made with the first of them for vLLM's `max_num_tokens`. With
microbatches (`--enable-dbo`, `--ubatch-size`) they share one for each microbatch. Ids are int32 or int64. vLLM pads the
hidden size until a row has a multiple of 16 bytes; where fp8 rows travel, it is a multiple of 128. Ranks may be on
several hosts. Not taken: elastic expert parallelism, which is refused with the configuration.

Errors. What a call cannot take is refused with an exception that names the argument, before anything is sent. An id
that no expert has raises `RoutingError` from the receiver, on a GPU perhaps from a later call: the dispatch took place without this rank's tokens, the
exception has the receiver's result as `dispatched`, and `finalize` is to follow, as the other ranks wait for it. Work
in CUDA graphs raises nothing; what it found is raised at the beginning of the worker's next step.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from .. import _growth
from .._calls import AllToAll
from .._errors import Found
from .._hosts import Hosts
from .._native import Format, Handle, Output, Sent
from .._tensors import TYPES, capturing as _capturing, must_be_tensors, no_gradient
from .._worlds import World
from ..deep_ep._checks import as_it_is, beside
from ..deep_ep._contexts import weights_of
from . import _vllm_microbatches, seconds

# Some versions of torch have no type of it. 1: elements share memory.
_overlaps: Callable[[torch.Tensor], int] = getattr(torch, "_debug_has_internal_overlap")

__all__ = ["HIGH_THROUGHPUT", "LOW_LATENCY", "TESTED_VERSIONS", "plugin", "register"]

TESTED_VERSIONS = ("0.33.0",)
"""Versions of vLLM with which tests/python/test_vllm.py ran."""

HIGH_THROUGHPUT = "tokenyard_high_throughput"
"""The backend in vLLM's standard format."""
LOW_LATENCY = "tokenyard_low_latency"
"""The backend in vLLM's batched format."""

_NAMES = (HIGH_THROUGHPUT, LOW_LATENCY)
# The backends of vLLM that are treated alike where vLLM asks for names: their formats are the same.
_LIKE = {HIGH_THROUGHPUT: "deepep_high_throughput", LOW_LATENCY: "deepep_low_latency"}
_BLOCK = 128
_ROUND_TOKENS = 16384
# Handles that are there from the start, as a capture may not make one.
_HANDLES = 8
_TIMEOUT = [600.0]
# The managers of this process, whose contexts each step of the worker checks.
_MANAGERS: "weakref.WeakSet[_Manager]" = weakref.WeakSet()

_LAYERS = "vllm.model_executor.layers.fused_moe"


def plugin() -> None:
    """What vLLM's plug-in loader calls. Of a vLLM that does not fit it logs a warning, and leaves all as it is."""
    try:
        register()
    except ImportError as missing:
        logging.getLogger("vllm.tokenyard").warning("no all-to-all backend of tokenyard: %s", missing)


def register(*, timeout: Optional[float] = None) -> None:
    """Makes the two backends choosable in this process; other backends go the way that they went. May be called again.

    `timeout`: seconds for which calls of contexts that are made from now on wait for other ranks, by default what an
    earlier call stated, or else 600. Raises `ImportError` where vLLM lacks what is extended; then nothing has been
    changed.
    """
    if timeout is not None:
        seconds(timeout)
    found = _Vllm()
    if timeout is not None:
        _TIMEOUT[0] = timeout
    if HIGH_THROUGHPUT not in found.backends.__args__:
        found.extend()


class _Vllm:
    """The pieces of vLLM that are extended, all of which are looked up before any is changed."""

    def __init__(self) -> None:
        vllm = importlib.import_module("vllm")
        try:
            config = importlib.import_module("vllm.config")
            parallel = importlib.import_module("vllm.config.parallel")
            self.backends: Any = parallel.All2AllBackend
            self.parallel_config: Any = parallel.ParallelConfig
            self.vllm_config: Any = config.VllmConfig
            self.finish_config: Callable[..., None] = config.VllmConfig.__post_init__
            self.current_config: Callable[[], Any] = config.get_current_vllm_config_or_none
            self.moe_config: Any = importlib.import_module(f"{_LAYERS}.config").FusedMoEParallelConfig
            self.utils: Any = importlib.import_module(f"{_LAYERS}.all2all_utils")
            self.make: Callable[..., Any] = self.utils.maybe_make_prepare_finalize
            self.round_up: Callable[..., int] = self.utils.maybe_roundup_layer_hidden_size
            self.manager: Callable[[], Any] = self.utils.get_ep_all2all_manager
            devices = "vllm.distributed.device_communicators"
            self.manager_base: Any = importlib.import_module(f"{devices}.base_device_communicator").All2AllManagerBase
            communicators = ((f"{devices}.cuda_communicator", "CudaCommunicator"),
                             (f"{devices}.cpu_communicator", "CpuCommunicator"))
            self.communicators = [getattr(importlib.import_module(module), name) for module, name in communicators]
            for communicator in self.communicators:
                if missing := {"cpu_group", "use_all2all"} - inspect.signature(communicator.__init__).parameters.keys():
                    raise AttributeError(f"{communicator.__name__} takes no {sorted(missing)}")
            asked = ((self.make, ("moe", "quant_config")),
                     (self.round_up, ("hidden_size", "act_dtype", "moe_parallel_config")))
            for function, names in asked:
                for name in names:
                    inspect.signature(function).parameters[name]
            self.properties = [
                (self.parallel_config, name, getattr(self.parallel_config, name).fget)
                for name in ("use_sequence_parallel_moe", "use_batched_dp_moe")
            ]
            # Experts that cannot take the standard format after a dispatch ask for DeepEP's backend of that format.
            self.named = [
                (self.moe_config, name, getattr(self.moe_config, name).fget, backend)
                for name, backend in (
                    ("use_batched_activation_format", LOW_LATENCY), ("needs_round_robin_routing_tables", LOW_LATENCY),
                    ("use_deepep_ht_kernels", HIGH_THROUGHPUT),
                )
            ]
            getattr(self.moe_config, "use_all2all_kernels")
            for name in ("use_ubatching", "num_ubatches"):
                getattr(self.parallel_config, name)
            for name in ("all2all_backend", "enable_elastic_ep"):
                self.parallel_config.__dataclass_fields__[name]
            self.batches: Any = importlib.import_module(_vllm_microbatches.MODULE)
            for name in (*_vllm_microbatches.HOOKS, "_CURRENT_CONTEXTS"):
                getattr(self.batches, name)
            self.microbatch: Any = self.batches.UBatchContext
            self.leave: Callable[..., Any] = self.microbatch.__exit__
            self.pass_on: Callable[[Any], None] = self.microbatch._cpu_yield
            self.worker: Any = importlib.import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
            self.step: Callable[..., Any] = self.worker.execute_model
            modular = importlib.import_module(f"{_LAYERS}.modular_kernel")
            for name in ("FusedMoEPrepareAndFinalizeModular", "FusedMoEActivationFormat", "ExpertTokensMetadata"):
                getattr(modular, name)
            self.rebuild: Any = importlib.import_module("pydantic.dataclasses").rebuild_dataclass
            self.backends.__args__
        except (ImportError, AttributeError, KeyError) as missing:
            raise ImportError(
                f"vllm's interface is another one: expected that of {TESTED_VERSIONS[-1]}, "
                f"got {getattr(vllm, '__version__', 'no version')}: {missing}"
            ) from missing

    def extend(self) -> None:
        """Makes the changes. None of them does anything where another backend is chosen."""
        self.backends.__args__ = (*self.backends.__args__, *_NAMES)
        self.vllm_config.__post_init__ = _with_microbatches(self.finish_config)
        for config in (self.parallel_config, self.vllm_config):
            self.rebuild(config, force=True)
        # Choices of arguments are kept from the first parser on.
        choices = getattr(sys.modules.get("vllm.engine.arg_utils"), "_compute_kwargs", None)
        if choices is not None:
            choices.cache_clear()
        for owner, name, get in self.properties:
            setattr(owner, name, property(_as_others(get)))
        for owner, name, get, backend in self.named:
            setattr(owner, name, property(_or_named(get, backend)))
        self.worker.execute_model = _with_check(self.step)
        self.microbatch.__exit__ = _vllm_microbatches.with_failure(
            self.leave, lambda: self.batches._CURRENT_CONTEXTS if _MANAGERS else []
        )
        self.microbatch._cpu_yield = _vllm_microbatches.or_failure(self.pass_on)
        for communicator in self.communicators:
            communicator.__init__ = self._with_manager(communicator.__init__)
        functions = {
            "maybe_make_prepare_finalize": (self.make, self._with_classes(self.make)),
            "maybe_roundup_layer_hidden_size": (self.round_up, _with_rows(self.round_up)),
        }
        for module in list(sys.modules.values()):
            # Those that imported a function by its name, too.
            if getattr(module, "__name__", "").startswith("vllm."):
                for name, (before, after) in functions.items():
                    if vars(module).get(name) is before:
                        setattr(module, name, after)

    def _with_manager(self, init: Callable[..., None]) -> Callable[..., None]:
        """A communicator's constructor, which has a manager of these backends if one is configured."""
        signature, current, base = inspect.signature(init), self.current_config, self.manager_base

        @functools.wraps(init)
        def with_manager(self: Any, *args: Any, **kwargs: Any) -> None:
            config = current()
            backend = None if config is None else config.parallel_config.all2all_backend
            if backend not in _NAMES:
                init(self, *args, **kwargs)
                return
            _must_stay(config.parallel_config)
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            wanted, given.arguments["use_all2all"] = given.arguments["use_all2all"], False
            init(*given.args, **given.kwargs)
            self.use_all2all = self.is_ep_communicator and wanted
            if self.use_all2all:
                kind = type("TokenyardAll2AllManager", (_Manager, base), {})
                manager = kind(self.cpu_group, given.arguments.get("tcp_store_group"))
                manager.number_microbatches(config.parallel_config, self.device)
                self.all2all_manager = manager

        return with_manager

    def _with_classes(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """`maybe_make_prepare_finalize`, which makes classes of these backends if one is configured."""
        signature, manager_of = inspect.signature(make), self.manager

        @functools.wraps(make)
        def with_classes(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            moe = given["moe"]
            parallel = moe.moe_parallel_config
            if parallel.all2all_backend not in _NAMES or not parallel.use_all2all_kernels:
                return make(*args, **kwargs)
            manager = given.get("all2all_manager") or manager_of()
            return prepare_finalize(moe, given.get("quant_config"), manager, given.get("routing_tables"))

        return with_classes


class _Otherwise:
    """A configuration, of which the backend has the name of another."""

    def __init__(self, config: Any) -> None:
        self._config, self.all2all_backend = config, _LIKE[config.all2all_backend]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _as_others(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda config: get(_Otherwise(config) if config.all2all_backend in _NAMES else config)


def _or_named(get: Callable[[Any], Any], backend: str) -> Callable[[Any], Any]:
    return lambda config: get(config) or (config.use_all2all_kernels and config.all2all_backend == backend)


def _must_stay(parallel: Any) -> None:
    """Refuses ranks that come and go."""
    if parallel.enable_elastic_ep:
        raise NotImplementedError(
            f"enable_elastic_ep: expected False with {parallel.all2all_backend}, whose ranks stay the same, got True; "
            "leave --enable-elastic-ep out, or choose another --all2all-backend"
        )


def _with_microbatches(finish: Callable[..., None]) -> Callable[..., None]:
    """`VllmConfig.__post_init__`, which takes microbatches for backends that it knows by their names alone."""

    @functools.wraps(finish)
    def with_microbatches(self: Any, *args: Any, **kwargs: Any) -> None:
        parallel = self.parallel_config
        backend = parallel.all2all_backend
        named = backend in _NAMES
        if named:
            _must_stay(parallel)
        if not named or not parallel.use_ubatching:
            finish(self, *args, **kwargs)
            return
        # What else goes by the name is right as well: no CUDA graphs of the standard format, whose microbatches let
        # the host wait for counts.
        parallel.all2all_backend = _LIKE[backend]
        try:
            finish(self, *args, **kwargs)
        finally:
            parallel.all2all_backend = backend

    return with_microbatches


def _with_rows(round_up: Callable[..., int]) -> Callable[..., int]:
    """`maybe_roundup_layer_hidden_size`, by which rows of these backends have a multiple of 16 bytes."""
    signature = inspect.signature(round_up)

    @functools.wraps(round_up)
    def with_rows(*args: Any, **kwargs: Any) -> int:
        given = signature.bind(*args, **kwargs).arguments
        parallel, hidden = given["moe_parallel_config"], int(given["hidden_size"])
        if parallel.all2all_backend not in _NAMES:
            return round_up(*args, **kwargs)
        columns = 16 // given["act_dtype"].itemsize
        return -(-hidden // columns) * columns if parallel.use_all2all_kernels else hidden

    return with_rows


def _with_check(step: Callable[..., Any]) -> Callable[..., Any]:
    """The worker's step, which first raises what earlier ones found: replays of graphs raise nothing themselves."""

    @functools.wraps(step)
    def with_check(*args: Any, **kwargs: Any) -> Any:
        for manager in list(_MANAGERS):
            manager.check()
        return step(*args, **kwargs)

    return with_check


class _Manager:
    """vLLM's manager of these backends, beside its base class: the contexts of an expert-parallel group."""

    rank: int
    world_size: int
    cpu_group: Any

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)  # type: ignore[call-arg]
        self._hosts: Optional[Hosts] = None
        self._contexts: Dict[Tuple[Any, ...], List[AllToAll]] = {}
        self._microbatches, self._sms, self._low_latency = 1, None, False
        _MANAGERS.add(self)

    def number_microbatches(self, parallel: Any, device: torch.device) -> None:
        """Sets how many contexts each shape has, by vLLM's `ParallelConfig`."""
        self._low_latency = parallel.all2all_backend == LOW_LATENCY
        if parallel.use_ubatching:
            self._microbatches = int(parallel.num_ubatches)
            if device.type == "cuda" and not self._low_latency:
                # What vLLM leaves to communication while the other microbatch computes; 0 leaves all to both.
                self._sms = importlib.import_module("vllm.envs").VLLM_DBO_COMM_SMS or None

    def get_handle(self, kwargs: Dict[str, Any]) -> List[AllToAll]:
        """The contexts for these arguments of `_context`, one for each microbatch, which layers share. Collective if
        they are new."""
        key = tuple(sorted(kwargs.items()))
        if key not in self._contexts:
            if self._hosts is None:
                self._hosts = Hosts(World.from_group(self.cpu_group))
            hosts = self._hosts
            self._contexts[key] = [_context(hosts, sms=self._sms, **kwargs) for _ in range(self._microbatches)]
        return self._contexts[key]

    def check(self) -> None:
        """Raises what calls of the contexts found, on a GPU in captured graphs, too."""
        for contexts in list(self._contexts.values()):
            for ep in contexts:
                ep.check()

    def max_sms_used(self) -> Optional[int]:
        """Multiprocessors that vLLM keeps from other kernels of microbatches at most; None: as many as it likes."""
        return 0 if self._low_latency else None

    def dispatch(self, *given: Any, **named: Any) -> Any:
        """What vLLM calls for layers without expert parallelism, for which there is no dispatch."""
        raise NotImplementedError(
            "enable_expert_parallel: expected True with these backends and --data-parallel-size above 1, got False"
        )

    dispatch_router_logits = combine = dispatch

    def set_num_sms(self, num_sms: int) -> None:
        """Nothing: contexts have theirs from the start."""

    def destroy(self) -> None:
        """Gives up the contexts; those that classes have live as long as these."""
        self._contexts.clear()
        if self._hosts is not None:
            self._hosts.close()
        self._hosts = None


def _context(
    hosts: Hosts, *, backend: str, hidden: int, experts: int, top_k: int, tokens: int, dtype: str, fp8: bool,
    device: str, sms: Optional[int],
) -> AllToAll:
    """A context for `tokens` of each rank, with experts where vLLM's linear placement has them."""
    low, ranks = backend == LOW_LATENCY, hosts.world.size
    first = Format(hidden, tokens, dtype=dtype, combine_dtype=dtype, weights="combine" if low else "dispatch")
    more: List[Format] = []
    for scales in (("fp32", "ue8m0") if low else ("fp32",)) if fp8 else ():
        more.append(
            Format(
                hidden, tokens, dtype="fp8", scales=scales, quantize=low, combine_dtype=dtype, weights=first.weights
            )
        )
    sizes = [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]
    return hosts.context(
        hidden=hidden, experts=experts, top_k=top_k, max_tokens_per_rank=tokens, device=device, dtype=dtype,
        combine_dtype=dtype, weights=first.weights, room_for=more, duplicates=True, timeout=_TIMEOUT[0], sms=sms,
        placement=[rank for rank, size in enumerate(sizes) for _ in range(size)], handles=_HANDLES,
        handle_rows=ranks * tokens * (sizes[hosts.world.rank] if low else 1),
        round_tokens=_ROUND_TOKENS if tokens > _ROUND_TOKENS and not low else None,
    )


def prepare_finalize(moe: Any, quant_config: Any, manager: Any, routing_tables: Any = None) -> Any:
    """vLLM's `FusedMoEPrepareAndFinalizeModular` for a layer, over a context of the manager.

    `moe`: vLLM's `FusedMoEConfig`; `routing_tables`: of vLLM's round-robin placement, for the batched format."""
    backend = moe.moe_parallel_config.all2all_backend
    names = {dtype: name for name, dtype in TYPES.items() if name in ("bf16", "fp16", "fp32")}
    if moe.in_dtype not in names:
        raise TypeError(f"in_dtype is of another kind: expected one of {list(names)}, got {moe.in_dtype}")
    device = torch.device(moe.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    fp8 = quant_config is not None and _in_blocks(quant_config)
    if fp8 and moe.hidden_dim % _BLOCK:
        raise ValueError(
            f"hidden_dim: expected a multiple of {_BLOCK}, as fp8 rows travel in such blocks, got {moe.hidden_dim}"
        )
    contexts = manager.get_handle(
        dict(
            backend=backend, hidden=moe.hidden_dim, experts=moe.num_experts, top_k=moe.experts_per_token,
            tokens=moe.max_num_tokens, dtype=names[moe.in_dtype], fp8=fp8, device=str(device),
        )
    )
    base = importlib.import_module(f"{_LAYERS}.modular_kernel").FusedMoEPrepareAndFinalizeModular
    kind, name = (_Batched, "Batched") if backend == LOW_LATENCY else (_Standard, "Standard")
    made: Any = type(f"Tokenyard{name}PrepareAndFinalize", (kind, base), {})
    return made(contexts, manager.world_size, moe.num_experts, fp8, routing_tables)


def _in_blocks(quant_config: Any) -> bool:
    """Whether experts take fp8 rows in blocks of 128, which travel as such."""
    shape = quant_config.block_shape
    return quant_config.quant_dtype == torch.float8_e4m3fn and shape is not None and shape[1] == _BLOCK


def _of_tensor(quant_config: Any) -> bool:
    """Whether a scale is of all rows of a tensor, by their values: then rows that hold nothing must not count."""
    return (
        isinstance(quant_config.quant_dtype, torch.dtype) and quant_config.a1_scale is None
        and quant_config.block_shape is None and not quant_config.per_act_token_quant
    )


class _Kept(NamedTuple):
    """A dispatch that was received and not combined yet."""

    handle: Handle
    shape: Tuple[int, ...]
    """Of the rows that it brought, without columns."""


class _Both:
    """What the classes of both formats have in common. They hold a dispatch of each microbatch until `finalize`."""

    _format: str

    def __init__(
        self, contexts: List[AllToAll], ranks: int, experts: int, fp8: bool, routing_tables: Any
    ) -> None:
        super().__init__()
        self._modular: Any = importlib.import_module(f"{_LAYERS}.modular_kernel")
        self._quantize: Any = importlib.import_module(f"{_LAYERS}.utils")
        self._reduce: Any = importlib.import_module(f"{_LAYERS}.topk_weight_and_reduce")
        self._batches: Any = importlib.import_module(_vllm_microbatches.MODULE)
        self._contexts, self._ranks, self._experts, self._fp8 = contexts, ranks, experts, fp8
        # A copy on the host until the first call, as vLLM's sleep discards what was made with a model's weights.
        self._physical: Optional[torch.Tensor] = None if routing_tables is None else routing_tables[0].cpu().clone()
        self._kept: List[Optional[_Kept]] = [None] * len(contexts)

    @property
    def activation_format(self) -> Any:
        return getattr(self._modular.FusedMoEActivationFormat, self._format)

    def num_dispatchers(self) -> int:
        return self._ranks

    def output_is_reduced(self) -> bool:
        return True

    def topk_indices_dtype(self) -> Optional[torch.dtype]:
        """None: int32 and int64 are taken."""
        return None

    def supports_async(self) -> bool:
        return True

    def supports_dbo(self) -> bool:
        """Whether vLLM's configuration had microbatches when the layer was made."""
        return len(self._contexts) > 1

    def _microbatch(self) -> int:
        """The number of the calling thread's microbatch."""
        number = int(self._batches.dbo_current_ubatch_id())
        if number >= len(self._contexts):
            raise RuntimeError(
                f"microbatch {number}: expected at most {len(self._contexts)} microbatches, as vLLM's configuration "
                "had when the layer was made"
            )
        return number

    def _lent(self, *tensors: Optional[torch.Tensor]) -> None:
        """Tensors that the current stream uses, of which another stream is the owner where there are microbatches."""
        if self._batches.dbo_enabled():
            for tensor in tensors:
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream())

    def _start(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, on_input: bool
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, weights and ids as dispatch takes them. What it cannot take is refused, as then nothing is sent yet."""
        ep = self._contexts[0]
        hidden, dtype, most = ep.format.hidden, TYPES[ep.format.dtype], ep.format.max_tokens
        must_be_tensors(a1=a1, topk_ids=topk_ids, topk_weights=topk_weights)
        if a1.dim() != 2 or a1.shape[1] != hidden:
            raise ValueError(f"a1 is of another shape: expected [tokens, {hidden}], got {[*a1.shape]}")
        if a1.dtype != dtype:
            raise TypeError(f"a1 is of another dtype: expected {dtype}, got {a1.dtype}")
        if a1.shape[0] > most:
            raise ValueError(f"a1: expected at most {most} tokens, got {a1.shape[0]}")
        if topk_ids.dim() != 2 or topk_ids.shape[0] != a1.shape[0] or not 1 <= topk_ids.shape[1] <= ep.top_k:
            raise ValueError(
                f"topk_ids is of another shape: expected [{a1.shape[0]}, 1 to {ep.top_k}], got {[*topk_ids.shape]}"
            )
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"topk_ids is of another dtype: expected torch.int32 or torch.int64, got {topk_ids.dtype}")
        _must_weigh(topk_weights, topk_ids)
        no_gradient("prepare", a1, topk_weights)
        if num_experts != self._experts:
            raise ValueError(f"num_experts: expected the layer's {self._experts}, got {num_experts}")
        if on_input:
            if topk_ids.shape[1] != 1:
                raise ValueError(f"apply_router_weight_on_input: expected a top_k of 1, got {topk_ids.shape[1]}")
            a1 = a1 * topk_weights.to(a1.dtype)
        if self._physical is not None:
            if self._physical.device != topk_ids.device:
                self._physical = self._physical.to(topk_ids.device)
            # Numbers that no expert has stay what they are, for dispatch to find them.
            known = (topk_ids >= 0) & (topk_ids < len(self._physical))
            physical = self._physical[topk_ids.clamp(0, len(self._physical) - 1).long()].to(topk_ids.dtype)
            topk_ids = torch.where(known, physical, topk_ids)
        return a1.contiguous(), topk_weights.float().contiguous(), topk_ids.contiguous()

    def _receive(self, microbatch: int, sent: Sent, output: Output, shape: Tuple[int, ...], found: Found) -> None:
        """Receives a dispatch, and keeps its handle for `finalize`."""
        try:
            handle = found.receive(lambda: self._contexts[microbatch].dispatch_recv(sent, output))
        except BaseException as error:
            # It took place, also before a Ctrl-C in its wait.
            handle = found.take(error, "handle")
        self._kept[microbatch] = _Kept(handle, shape)

    def prepare(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> Any:
        started = self.prepare_async(
            a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config,
            defer_input_quant,
        )
        return _ended(started)

    def prepare_async(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> Any:
        raise NotImplementedError

    def finalize(
        self, output: torch.Tensor, fused_expert_output: torch.Tensor, topk_weights: torch.Tensor,
        topk_ids: torch.Tensor, apply_router_weight_on_input: bool, weight_and_reduce_impl: Any,
    ) -> None:
        _ended(self.finalize_async(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        ))

    def finalize_async(
        self, output: torch.Tensor, fused_expert_output: torch.Tensor, topk_weights: torch.Tensor,
        topk_ids: torch.Tensor, apply_router_weight_on_input: bool, weight_and_reduce_impl: Any,
    ) -> Any:
        raise NotImplementedError

    def _must_fit(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Refuses what `_return` cannot take, for then a combine would be sent that nobody receives."""
        ep, kept = self._contexts[0], self._kept[self._microbatch()]
        if kept is None:
            raise RuntimeError("finalize: expected one after each prepare whose receiver ran, got none before it")
        tokens, hidden = kept.handle.tokens, ep.format.hidden
        must_be_tensors(output=out, fused_expert_output=rows)
        for name, tensor in (("output", out), ("fused_expert_output", rows)):
            as_it_is(name, tensor)
        beside("output", out, rows)
        if _overlaps(out) == 1:
            raise ValueError(f"output has the strides {out.stride()}: expected elements of their own memory")
        if out.dim() != 2 or out.shape[0] != tokens or not 1 <= out.shape[1] <= hidden:
            raise ValueError(f"output is of another shape: expected [{tokens}, up to {hidden}], got {[*out.shape]}")
        if out.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"output is of another dtype: expected bfloat16, float16 or float32, got {out.dtype}")
        wanted = (*kept.shape, out.shape[1])
        if rows.shape != wanted:
            raise ValueError(f"fused_expert_output is of another shape: expected {[*wanted]}, got {[*rows.shape]}")
        dtype = TYPES[ep.format.combine_dtype]
        if rows.dtype != dtype:
            raise TypeError(f"fused_expert_output is of another dtype: expected {dtype}, got {rows.dtype}")
        no_gradient("finalize", rows)

    def _return(
        self, rows: torch.Tensor, out: torch.Tensor, weights: Optional[torch.Tensor]
    ) -> Callable[[], None]:
        """Sends rows back, which `_must_fit` has seen; their sums are in `out` after the receiver."""
        microbatch = self._microbatch()
        ep, kept = self._contexts[microbatch], self._kept[microbatch]
        assert kept is not None
        missing = ep.format.hidden - out.shape[1]
        if missing:
            # Experts that drop the padding of the hidden size.
            rows = torch.nn.functional.pad(rows, (0, missing))
        rows, found = rows.contiguous(), Found()
        # On a GPU an error of the dispatch may come in place of either half, which is then made again.
        sent = found.receive(lambda: ep.combine_send(rows, kept.handle, topk_weights=weights))
        self._kept[microbatch] = None
        held = [rows, weights, kept]

        def receive() -> None:
            fits = not missing and out.is_contiguous() and out.data_ptr() % 16 == 0
            sums = out if fits else out.new_empty((out.shape[0], ep.format.hidden))
            found.receive(lambda: ep.combine_recv(sent, sums))
            if sums is not out:
                out.copy_(sums[:, : out.shape[1]])
            held.clear()
            found.raise_with(None)

        return receive


def _ended(started: Any) -> Any:
    """What an asynchronous call comes to: a receiver, or a hook that runs before it."""
    hook, receiver = started if isinstance(started, tuple) else (None, started)
    if hook is not None:
        hook()
    return receiver()


def _must_weigh(topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights is of another shape: expected that of topk_ids, {[*topk_ids.shape]}, "
            f"got {[*topk_weights.shape]}"
        )


class _Standard(_Both):
    """vLLM's standard format: a row for each (token, rank), in the order of (source rank, token).

    A microbatch lets the other one compute before the host waits for counts, and again while sums come. It sends and
    receives on vLLM's stream for communication.
    """

    _format = "Standard"

    def max_num_tokens_per_rank(self) -> Optional[int]:
        return None

    def prepare_async(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> Callable[[], Any]:
        x, weights, ids = self._start(a1, topk_weights, topk_ids, num_experts, apply_router_weight_on_input)
        scales: Optional[torch.Tensor] = None
        microbatch, batches, found = self._microbatch(), self._batches, Found()
        ep = self._contexts[microbatch]
        format, early = ep.format, self._fp8 and not defer_input_quant
        if early:
            x, scales = self._quantised(x, quant_config, quant_config.a1_scale)
            format = ep.formats[1]
        capturing = _capturing(x)
        batches.dbo_yield_and_switch_from_compute_to_comm()
        self._lent(x, weights, ids, scales)
        # Received also where routing is unusable: other ranks go on.
        sent: Sent = found.sending(
            lambda: ep.dispatch_send(x, ids, weights, scales=scales, format=format, counts=not capturing)
        )
        most, choices, dtype, held = x.shape[0], ids.shape[1], ids.dtype, [x, weights, ids, scales]

        def receive() -> Any:
            counts: Optional[List[int]] = None
            if capturing:
                # Ranks that replay graphs together have as many tokens as this one: vLLM pads them.
                capacity = self._ranks * most
            else:
                counts, sources = found.receive(lambda: ep.counts(sent))
                capacity = sum(sources)
            output, got = ep.output(a1, layout="token", capacity=capacity, format=format)
            self._receive(microbatch, sent, output, (capacity,), found)
            # What the halves read lived until here.
            held.clear()
            return counts, got

        def finish(received: Any) -> Any:
            counts, got = received
            rows, row_scales = got.rows, got.scales
            assert got.token_experts is not None and got.token_weights is not None
            self._lent(rows, row_scales, got.token_experts, got.token_weights, got.counts)
            local = _growth.of_choices(got.token_experts, choices, counts is not None)
            # Experts of vLLM take no -1, but global numbers of which other ranks' are skipped.
            first = next(iter(ep.local_experts), 0)
            elsewhere = num_experts - 1 if first == 0 else 0
            numbers = torch.where(local < 0, elsewhere, local + first).to(dtype)
            meta = self._modular.ExpertTokensMetadata(
                expert_num_tokens=got.counts,
                expert_num_tokens_cpu=None if counts is None else torch.tensor(counts, dtype=torch.int32, device="cpu"),
            )
            if not early and not defer_input_quant and rows.numel():
                if capturing and _of_tensor(quant_config):
                    rows.masked_fill_((local < 0).all(1, keepdim=True), 0)
                rows, row_scales = self._quantised(rows, quant_config, quant_config.a1_scale)
            prepared = (rows, row_scales, meta, numbers, got.token_weights[:, :choices].contiguous())
            found.raise_with(prepared)
            return prepared

        if not batches.dbo_enabled():
            return lambda: finish(receive())
        received = receive()
        batches.dbo_switch_to_compute_sync()
        return lambda: finish(received)

    def _quantised(
        self, x: torch.Tensor, quant_config: Any, scale: Any
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Rows as experts take them, by vLLM's kernels."""
        if quant_config.quant_dtype is None:
            return x, None
        if quant_config.quant_dtype == "nvfp4":
            scale = quant_config.a1_gscale
        made: Tuple[torch.Tensor, Optional[torch.Tensor]] = self._quantize.moe_kernel_quantize_input(
            x, scale, quant_dtype=quant_config.quant_dtype, per_act_token_quant=quant_config.per_act_token_quant,
            block_shape=quant_config.block_shape, is_scale_swizzled=quant_config.is_scale_swizzled,
        )
        return made

    def finalize_async(
        self, output: torch.Tensor, fused_expert_output: torch.Tensor, topk_weights: torch.Tensor,
        topk_ids: torch.Tensor, apply_router_weight_on_input: bool, weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        batches, rows = self._batches, fused_expert_output
        if rows.numel():
            if isinstance(weight_and_reduce_impl, self._reduce.TopKWeightAndReduceDelegate):
                weight_and_reduce_impl = self._reduce.TopKWeightAndReduceContiguous()
            rows = weight_and_reduce_impl.apply(
                output=None, fused_expert_output=rows, topk_weights=topk_weights, topk_ids=topk_ids,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        self._must_fit(rows, output)
        batches.dbo_yield_and_switch_from_compute_to_comm()
        self._lent(rows, output)
        received = self._return(rows, output, None)
        batches.dbo_switch_to_compute()

        def receive() -> None:
            batches.dbo_switch_to_comm()
            received()
            batches.dbo_yield_and_switch_from_comm_to_compute()

        return receive


class _Batched(_Both):
    """vLLM's batched format: rows by local expert, with room for the tokens of all ranks.

    Asynchronous calls return a hook, which receives, and a receiver. A microbatch's hook runs in the other one's
    thread, before that sends.
    """

    _format = "BatchedExperts"
    _packed = False

    def post_init_setup(self, fused_experts: Any) -> None:
        """Sends powers of two as scales where experts take them packed."""
        self._packed = self._fp8 and fused_experts.supports_packed_ue8m0_act_scales()

    def max_num_tokens_per_rank(self) -> Optional[int]:
        return self._contexts[0].format.max_tokens

    def prepare_async(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> Tuple[Callable[[], None], Callable[[], Any]]:
        if defer_input_quant:
            raise NotImplementedError("defer_input_quant: expected experts that take quantised rows, got True")
        x, _weights, ids = self._start(a1, topk_weights, topk_ids, num_experts, apply_router_weight_on_input)
        microbatch, found = self._microbatch(), Found()
        ep = self._contexts[microbatch]
        format = ep.format
        if self._fp8:
            format = ep.formats[2 if self._packed else 1]
        experts, capacity = len(ep.local_experts), self._ranks * format.max_tokens
        output, got = ep.output(x, layout="masked", capacity=capacity, format=format, column_major=True)
        sent: Sent = found.sending(lambda: ep.dispatch_send(x, ids, format=format))
        held = [x, ids]

        def hook() -> None:
            self._receive(microbatch, sent, output, (experts, capacity), found)
            held.clear()

        def receive() -> Any:
            if held:
                hook()
            meta = self._modular.ExpertTokensMetadata(expert_num_tokens=got.counts, expert_num_tokens_cpu=None)
            made: Tuple[torch.Tensor, Optional[torch.Tensor]] = (got.rows, got.scales)
            if not self._fp8:
                made = self._quantised(got.rows, got.counts, quant_config)
            prepared = (*made, meta, None, None)
            found.raise_with(prepared)
            return prepared

        return hook, receive

    def _quantised(
        self, rows: torch.Tensor, counts: torch.Tensor, quant_config: Any
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Rows as experts take them, by vLLM's kernels, where other rows than theirs have travelled."""
        if quant_config.quant_dtype in (None, "nvfp4"):
            # Experts quantise nvfp4 themselves.
            return rows, None
        if _of_tensor(quant_config):
            unused = torch.arange(rows.shape[1], device=rows.device) >= counts[:, None]
            rows.masked_fill_(unused[..., None], 0)
        x, scales = self._quantize.moe_kernel_quantize_input(
            rows.flatten(0, 1), quant_config.a1_scale, quant_config.quant_dtype, quant_config.per_act_token_quant,
            quant_config.block_shape,
        )
        scales = self._quantize.normalize_batched_scales_shape(scales, rows.shape[0])
        return x.view(*rows.shape[:2], -1), scales

    def finalize_async(
        self, output: torch.Tensor, fused_expert_output: torch.Tensor, topk_weights: torch.Tensor,
        topk_ids: torch.Tensor, apply_router_weight_on_input: bool, weight_and_reduce_impl: Any,
    ) -> Tuple[Callable[[], None], Callable[[], None]]:
        if not isinstance(weight_and_reduce_impl, self._reduce.TopKWeightAndReduceDelegate):
            raise ValueError(
                "weight_and_reduce_impl: expected TopKWeightAndReduceDelegate, as combine applies weights, "
                f"got {type(weight_and_reduce_impl).__name__}"
            )
        self._must_fit(fused_expert_output, output)
        _must_weigh(topk_weights, topk_ids)
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        top_k = self._contexts[0].top_k
        if topk_weights.shape[0] != output.shape[0] or topk_weights.shape[1] > top_k:
            raise ValueError(
                f"topk_weights is of another shape: expected [{output.shape[0]}, up to {top_k}], got {[*weights.shape]}"
            )
        no_gradient("finalize", weights)
        weights = weights_of(self._contexts[0], weights.float())
        # The other microbatch's half, which was sent before this one.
        self._batches.dbo_maybe_run_recv_hook()
        return self._return(fused_expert_output, output, weights), lambda: None
