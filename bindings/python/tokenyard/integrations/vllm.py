"""Expert parallelism of vLLM by tokenyard, as all-to-all backends of vLLM. Imports torch, and vLLM when it is used.

    vllm serve ... --enable-expert-parallel --data-parallel-size 8 --all2all-backend tokenyard_high_throughput

vLLM loads `plugin` in each of its processes, by the entry point of this package; a script may call `register`
instead. There are two backends:

- `tokenyard_high_throughput`: activations in vLLM's standard format, a row for each (token, rank). The host waits for
  counts, and outputs have as many rows as come. In a CUDA graph nobody waits, counts stay on the device, and outputs
  have room for the tokens of all ranks.
- `tokenyard_low_latency`: activations in vLLM's batched format, `[local experts, ranks * max_num_tokens, hidden]`. Rows
  are quantised in dispatch where experts take fp8 in blocks of 128, and weights are applied in combine.

Layers of one shape share a context, which is made with the first of them for vLLM's `max_num_tokens`. Ids are int32 or
int64. The hidden size is a multiple of 8 elements, and of 128 where fp8 rows travel. Ranks may be on several hosts.
Not taken: microbatches (`--enable-dbo`), whose backends vLLM names in its own code, and elastic expert parallelism.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .._calls import AllToAll
from .._hosts import Hosts
from .._native import Format, Output
from .._tensors import TYPES
from .._worlds import World

__all__ = ["HIGH_THROUGHPUT", "LOW_LATENCY", "TESTED_VERSIONS", "plugin", "register"]

TESTED_VERSIONS = ("0.33.0",)
"""Versions of vLLM with which tests/python/test_vllm.py ran."""

HIGH_THROUGHPUT = "tokenyard_high_throughput"
"""The backend in vLLM's standard format."""
LOW_LATENCY = "tokenyard_low_latency"
"""The backend in vLLM's batched format."""

_NAMES = (HIGH_THROUGHPUT, LOW_LATENCY)
# The backends of vLLM that are treated alike where vLLM asks for names.
_LIKE = {HIGH_THROUGHPUT: "deepep_high_throughput", LOW_LATENCY: "deepep_low_latency"}
_BLOCK = 128
_ROUND_TOKENS = 16384
# Handles that are there from the start, as a capture may not make one.
_HANDLES = 8
_TIMEOUT = [600.0]

_LAYERS = "vllm.model_executor.layers.fused_moe"


def plugin() -> None:
    """What vLLM's plug-in loader calls. Of a vLLM that does not fit it logs a warning, and leaves all as it is."""
    try:
        register()
    except ImportError as missing:
        logging.getLogger("vllm.tokenyard").warning("no all-to-all backend of tokenyard: %s", missing)


def register(*, timeout: float = 600.0) -> None:
    """Makes the two backends choosable in this process; other backends go the way that they went. May be called again.

    `timeout`: seconds for which calls of contexts that are made from now on wait for other ranks. Raises `ImportError`
    where vLLM lacks what is extended; then nothing has been changed.
    """
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}: expected seconds above 0, got {timeout}")
    found = _Vllm()
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
            self.configs: List[Any] = [parallel.ParallelConfig, config.VllmConfig]
            self.current_config: Callable[[], Any] = config.get_current_vllm_config_or_none
            self.moe_config: Any = importlib.import_module(f"{_LAYERS}.config").FusedMoEParallelConfig
            self.utils: Any = importlib.import_module(f"{_LAYERS}.all2all_utils")
            self.make: Callable[..., Any] = self.utils.maybe_make_prepare_finalize
            self.manager: Callable[[], Any] = self.utils.get_ep_all2all_manager
            devices = "vllm.distributed.device_communicators"
            self.manager_base: Any = importlib.import_module(f"{devices}.base_device_communicator").All2AllManagerBase
            communicators = ((f"{devices}.cuda_communicator", "CudaCommunicator"),
                             (f"{devices}.cpu_communicator", "CpuCommunicator"))
            self.communicators = [getattr(importlib.import_module(module), name) for module, name in communicators]
            for communicator in self.communicators:
                if missing := {"cpu_group", "use_all2all"} - inspect.signature(communicator.__init__).parameters.keys():
                    raise AttributeError(f"{communicator.__name__} takes no {sorted(missing)}")
            for name in ("moe", "quant_config"):
                inspect.signature(self.make).parameters[name]
            self.properties = [
                (self.parallel_config, name, getattr(self.parallel_config, name).fget)
                for name in ("use_sequence_parallel_moe", "use_batched_dp_moe")
            ]
            self.batched = [
                (self.moe_config, name, getattr(self.moe_config, name).fget)
                for name in ("use_batched_activation_format", "needs_round_robin_routing_tables")
            ]
            getattr(self.moe_config, "use_all2all_kernels")
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
        for config in self.configs:
            self.rebuild(config, force=True)
        for owner, name, get in self.properties:
            setattr(owner, name, property(_as_others(get)))
        for owner, name, get in self.batched:
            setattr(owner, name, property(_or_low_latency(get)))
        for communicator in self.communicators:
            communicator.__init__ = self._with_manager(communicator.__init__)
        made = self._with_classes(self.make)
        for module in list(sys.modules.values()):
            # Those that imported the function by its name, too.
            if getattr(module, "__name__", "").startswith("vllm.") and (
                vars(module).get("maybe_make_prepare_finalize") is self.make
            ):
                setattr(module, "maybe_make_prepare_finalize", made)

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
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            wanted, given.arguments["use_all2all"] = given.arguments["use_all2all"], False
            init(*given.args, **given.kwargs)
            self.use_all2all = self.is_ep_communicator and wanted
            if self.use_all2all:
                manager = type("TokenyardAll2AllManager", (_Manager, base), {})
                self.all2all_manager = manager(self.cpu_group, given.arguments.get("tcp_store_group"))

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


def _or_low_latency(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda config: get(config) or (config.use_all2all_kernels and config.all2all_backend == LOW_LATENCY)


class _Manager:
    """vLLM's manager of these backends, beside its base class: the contexts of an expert-parallel group."""

    rank: int
    world_size: int
    cpu_group: Any

    def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)  # type: ignore[call-arg]
        if tcp_store_group is not None:
            raise NotImplementedError("elastic expert parallelism: choose another all2all_backend")
        self._hosts: Optional[Hosts] = None
        self._contexts: Dict[Tuple[Any, ...], AllToAll] = {}
        self._sms: Optional[int] = None

    def get_handle(self, kwargs: Dict[str, Any]) -> AllToAll:
        """The context for these arguments of `_context`, which layers share. Collective if it is new."""
        key = (*sorted(kwargs.items()), ("sms", self._sms))
        if key not in self._contexts:
            if self._hosts is None:
                self._hosts = Hosts(World.from_group(self.cpu_group))
            self._contexts[key] = _context(self._hosts, sms=self._sms, **kwargs)
        return self._contexts[key]

    def set_num_sms(self, num_sms: int) -> None:
        """Multiprocessors of contexts that are made from now on."""
        self._sms = num_sms

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
    ep = manager.get_handle(
        dict(
            backend=backend, hidden=moe.hidden_dim, experts=moe.num_experts, top_k=moe.experts_per_token,
            tokens=moe.max_num_tokens, dtype=names[moe.in_dtype], fp8=fp8, device=str(device),
        )
    )
    base = importlib.import_module(f"{_LAYERS}.modular_kernel").FusedMoEPrepareAndFinalizeModular
    kind, name = (_Batched, "Batched") if backend == LOW_LATENCY else (_Standard, "Standard")
    made: Any = type(f"Tokenyard{name}PrepareAndFinalize", (kind, base), {})
    return made(ep, manager.world_size, fp8, routing_tables)


def _in_blocks(quant_config: Any) -> bool:
    """Whether experts take fp8 rows in blocks of 128, which travel as such."""
    shape = quant_config.block_shape
    return quant_config.quant_dtype == torch.float8_e4m3fn and shape is not None and shape[1] == _BLOCK


def _capturing(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class _Both:
    """What the classes of both formats have in common."""

    _format: str

    def __init__(self, ep: AllToAll, ranks: int, fp8: bool, routing_tables: Any) -> None:
        super().__init__()
        self._modular: Any = importlib.import_module(f"{_LAYERS}.modular_kernel")
        self._quantize: Any = importlib.import_module(f"{_LAYERS}.utils")
        self._reduce: Any = importlib.import_module(f"{_LAYERS}.topk_weight_and_reduce")
        self._ep, self._ranks, self._fp8 = ep, ranks, fp8
        self._physical: Optional[torch.Tensor] = None if routing_tables is None else routing_tables[0]
        self._handle: Any = None

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
        return False

    def _start(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, on_input: bool
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, weights and ids as dispatch takes them."""
        if on_input:
            if topk_ids.shape[1] != 1:
                raise ValueError(f"apply_router_weight_on_input: expected a top_k of 1, got {topk_ids.shape[1]}")
            a1 = a1 * topk_weights.to(a1.dtype)
        if a1.shape[0] > self._ep.format.max_tokens:
            raise ValueError(f"a1: expected at most {self._ep.format.max_tokens} tokens, got {a1.shape[0]}")
        if self._physical is not None:
            if self._physical.device != topk_ids.device:
                self._physical = self._physical.to(topk_ids.device)
            physical = self._physical[topk_ids.clamp(min=0).long()].to(topk_ids.dtype)
            topk_ids = torch.where(topk_ids < 0, topk_ids, physical)
        return a1.contiguous(), topk_weights.float().contiguous(), topk_ids.contiguous()

    def _take(self) -> Any:
        """The handle of the dispatch that is combined."""
        if self._handle is None:
            raise RuntimeError("finalize: expected one after each prepare whose receiver ran, got none before it")
        handle, self._handle = self._handle, None
        return handle

    def prepare(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> Any:
        started = self.prepare_async(
            a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config,
            defer_input_quant,
        )
        return started()

    def prepare_async(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> Callable[[], Any]:
        raise NotImplementedError

    def finalize(
        self, output: torch.Tensor, fused_expert_output: torch.Tensor, topk_weights: torch.Tensor,
        topk_ids: torch.Tensor, apply_router_weight_on_input: bool, weight_and_reduce_impl: Any,
    ) -> None:
        self.finalize_async(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        )()

    def finalize_async(
        self, output: torch.Tensor, fused_expert_output: torch.Tensor, topk_weights: torch.Tensor,
        topk_ids: torch.Tensor, apply_router_weight_on_input: bool, weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        raise NotImplementedError

    def _return(self, rows: torch.Tensor, out: torch.Tensor, weights: Optional[torch.Tensor]) -> Callable[[], None]:
        """Sends rows back; their sums are in `out` after the receiver."""
        handle, ep = self._take(), self._ep
        sent = ep.combine_send(rows, handle, topk_weights=weights)
        held = [rows, weights, handle]

        def receive() -> None:
            ep.combine_recv(sent, out)
            held.clear()

        return receive


class _Standard(_Both):
    """vLLM's standard format: a row for each (token, rank), in the order of (source rank, token)."""

    _format = "Standard"

    def max_num_tokens_per_rank(self) -> Optional[int]:
        return None

    def prepare_async(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> Callable[[], Any]:
        x, weights, ids = self._start(a1, topk_weights, topk_ids, num_experts, apply_router_weight_on_input)
        scales: Optional[torch.Tensor] = None
        format, early = self._ep.format, self._fp8 and not defer_input_quant
        if early:
            x, scales = self._quantised(x, quant_config, quant_config.a1_scale)
            format = self._ep.formats[1]
        capturing = _capturing(x)
        sent = self._ep.dispatch_send(x, ids, weights, scales=scales, format=format, counts=not capturing)
        most, choices, dtype, held = x.shape[0], ids.shape[1], ids.dtype, [x, weights, ids, scales]

        def receive() -> Any:
            counts: Optional[List[int]] = None
            if capturing:
                # Ranks that replay graphs together have as many tokens as this one: vLLM pads them.
                capacity = self._ranks * most
            else:
                counts, sources = self._ep.counts(sent)
                capacity = sum(sources)
            output, got = self._ep.output(a1, layout="token", capacity=capacity, format=format)
            self._handle = self._ep.dispatch_recv(sent, output)
            # What the halves read lived until here.
            held.clear()
            rows, row_scales = got.rows, got.scales
            assert got.token_experts is not None and got.token_weights is not None
            local = got.token_experts[:, :choices]
            # Experts of vLLM take no -1, but global numbers of which other ranks' are skipped.
            first = next(iter(self._ep.local_experts), 0)
            elsewhere = num_experts - 1 if first == 0 else 0
            numbers = torch.where(local < 0, elsewhere, local + first).to(dtype)
            meta = self._modular.ExpertTokensMetadata(
                expert_num_tokens=got.counts,
                expert_num_tokens_cpu=None if counts is None else torch.tensor(counts, dtype=torch.int32),
            )
            if not early and not defer_input_quant and rows.numel():
                rows, row_scales = self._quantised(rows, quant_config, quant_config.a1_scale)
            return rows, row_scales, meta, numbers, got.token_weights[:, :choices]

        return receive

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
        if fused_expert_output.numel():
            if isinstance(weight_and_reduce_impl, self._reduce.TopKWeightAndReduceDelegate):
                weight_and_reduce_impl = self._reduce.TopKWeightAndReduceContiguous()
            fused_expert_output = weight_and_reduce_impl.apply(
                output=None, fused_expert_output=fused_expert_output, topk_weights=topk_weights, topk_ids=topk_ids,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        return self._return(fused_expert_output.view(-1, output.shape[1]), output, None)


class _Batched(_Both):
    """vLLM's batched format: rows by local expert, with room for the tokens of all ranks."""

    _format = "BatchedExperts"
    _packed = False

    def post_init_setup(self, fused_experts: Any) -> None:
        """Sends powers of two as scales where experts take them packed."""
        self._packed = self._fp8 and fused_experts.supports_packed_ue8m0_act_scales()

    def max_num_tokens_per_rank(self) -> Optional[int]:
        return self._ep.format.max_tokens

    def prepare_async(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> Callable[[], Any]:
        if defer_input_quant:
            raise NotImplementedError("defer_input_quant: expected experts that take quantised rows")
        x, _weights, ids = self._start(a1, topk_weights, topk_ids, num_experts, apply_router_weight_on_input)
        ep, format = self._ep, self._ep.format
        if self._fp8:
            format = ep.formats[2 if self._packed else 1]
        experts, capacity = len(ep.local_experts), self._ranks * format.max_tokens
        rows = torch.empty((experts, capacity, format.hidden), dtype=TYPES[format.dtype], device=x.device)
        counts = torch.empty(experts, dtype=torch.int32, device=x.device)
        words: Optional[torch.Tensor] = None
        if self._fp8:
            # The row's number lies last, and columns begin at multiples of 16 bytes.
            columns, word = (4 * _BLOCK, torch.int32) if self._packed else (_BLOCK, torch.float32)
            shape = (experts, -(-format.hidden // columns), -(-capacity // 4) * 4)
            words = torch.empty(shape, dtype=word, device=x.device)
        output = Output("masked", rows, counts, scales=words, column_major=words is not None)
        sent, held = ep.dispatch_send(x, ids, format=format), [x, ids]

        def receive() -> Any:
            self._handle = ep.dispatch_recv(sent, output)
            held.clear()
            meta = self._modular.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None)
            if words is not None:
                return rows, words.transpose(1, 2)[:, :capacity], meta, None, None
            return (*self._quantised(rows, quant_config), meta, None, None)

        return receive

    def _quantised(self, rows: torch.Tensor, quant_config: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Rows as experts take them, by vLLM's kernels, where other rows than theirs have travelled."""
        if quant_config.quant_dtype in (None, "nvfp4"):
            # Experts quantise nvfp4 themselves.
            return rows, None
        x, scales = self._quantize.moe_kernel_quantize_input(
            rows.flatten(0, 1), quant_config.a1_scale, quant_config.quant_dtype, quant_config.per_act_token_quant,
            quant_config.block_shape,
        )
        scales = self._quantize.normalize_batched_scales_shape(scales, rows.shape[0])
        return x.view(*rows.shape[:2], -1), scales

    def finalize_async(
        self, output: torch.Tensor, fused_expert_output: torch.Tensor, topk_weights: torch.Tensor,
        topk_ids: torch.Tensor, apply_router_weight_on_input: bool, weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        if not isinstance(weight_and_reduce_impl, self._reduce.TopKWeightAndReduceDelegate):
            raise ValueError(
                "weight_and_reduce_impl: expected TopKWeightAndReduceDelegate, as combine applies weights, "
                f"got {type(weight_and_reduce_impl).__name__}"
            )
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        weights = torch.nn.functional.pad(weights.float(), (0, self._ep.top_k - weights.shape[1])).contiguous()
        return self._return(fused_expert_output, output, weights)
