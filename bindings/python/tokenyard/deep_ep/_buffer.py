"""`deep_ep.Buffer`: DeepEP's calls by tokenyard's."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import torch

from .. import _eager, _growth, _native
from .._calls import AllToAll
from .._errors import renumber
from .._hosts import Hosts
from .._native import Error, Format, Output, World
from .._tensors import device_of, name_of
from . import _checks, _config, _planned
from ._config import Config
from ._contexts import Kept, LowLatency, Normal, Offered, Wanted, weights_of
from ._shared import Event, Rows, Streams, must_divide, world_of
from .utils import EventHandle, EventOverlap

Hook = Optional[Callable[[], None]]


class NormalHandle(Tuple[Any, ...]):
    """The handle of a normal dispatch: six members, as DeepEP's within a node.

    [0] rank_prefix_matrix int32 `[ranks, ranks]`, of which this rank's column is known: how many rows come from the
    sources up to each one; -1 elsewhere. [3] int32 `[rows]`: the token of each row at its source. [4] is_token_in_rank.
    The others are None: what DeepEP's kernels keep there is kept elsewhere."""

    kept: Kept
    prefixes: Callable[[], torch.Tensor]

    def __getitem__(self, place: Any) -> Any:
        return tuple(self)[place] if isinstance(place, slice) or place in (0, -6) else super().__getitem__(place)

    def __iter__(self) -> Iterator[Any]:
        members = super().__iter__()
        next(members)
        yield self.prefixes()
        yield from members


class LowLatencyHandle(Tuple[Any, ...]):
    """The handle of a low-latency dispatch: int32 `[local experts, rows]`, the token of each row at its source; int64
    `[local experts, ranks]`, where the rows of each rank begin, times 2^32, plus how many they are; then
    num_max_dispatch_tokens_per_rank, hidden and num_experts."""

    planned: Optional[_planned.Dispatched] = None
    """What the operator in C made, if it did."""
    _kept: Optional[Kept] = None

    @property
    def kept(self) -> Optional[Kept]:
        """What calls need; None before the hook has received the dispatch."""
        if self._kept is None and self.planned is not None:
            self._kept = _planned.kept(self.planned)
        return self._kept

    @kept.setter
    def kept(self, kept: Kept) -> None:
        self._kept = kept


class Buffer:
    """DeepEP's communication buffer. The byte sizes and queue pairs are kept to be read; memory is taken by what calls
    need. `group`: of torch.distributed, with any backend, or a `tokenyard.World`; `comm`: an MPI communicator instead.
    Collective, as all calls but those that say so. Ranks may be on several hosts, linked by the network of
    `set_network` or `TOKENYARD_NETWORK`, which is opened here.

    Tensors are on a GPU or on the CPU. Calls of a kind that is new, or has more tokens, experts or choices than before,
    make a context first, which a capture cannot do."""

    num_sms: int = 20
    timeout_seconds: float = 100.0
    """After how long a call gives up waiting for another rank."""
    round_tokens: int = 16384
    """Tokens of a rank in a round of normal calls: where a rank may have more, calls go in several rounds, and memory
    is that of one."""
    low_latency_sms: Optional[int] = None
    """How many multiprocessors low-latency calls take of contexts that are made from now on; `None`: all."""
    _sms: Optional[int] = None

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: Optional[bool] = None,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        if group is None and comm is None:
            raise ValueError("group and comm are both missing: give one of them")
        self.group = group if group is not None else comm
        self._world: Optional[World] = world_of(group, comm, self.timeout_seconds)
        self.rank, self.group_size = self._world.rank, self._world.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy, self.enable_shrink = (
            low_latency_mode, explicitly_destroy, enable_shrink,
        )
        self._hosts = Hosts(self._world)
        self._normal = Normal(self._hosts, self.timeout_seconds, self.round_tokens)
        self._low_latency = LowLatency(self._hosts, self.timeout_seconds, enable_shrink)
        self._streams = Streams()
        self._dispatched: Optional[_Hook] = None
        self._combined: Optional[_Hook] = None

    def destroy(self) -> None:
        """Gives up the contexts, once no handle of theirs is alive. Calls are refused from now on. Local; also done
        at the end of a block of `with`."""
        self._normal.close()
        self._low_latency.close()
        self._hosts.close()
        self._dispatched = self._combined = None
        self._world = None

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.destroy()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether there are kernels for Hopper."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """How many multiprocessors normal calls of contexts take that are made from now on."""
        if new_num_sms <= 0 or new_num_sms % 2 != 0:
            raise ValueError(f"new_num_sms is {new_num_sms}: give an even number above 0")
        Buffer.num_sms = Buffer._sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """What the current stream has been given so far."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that DeepEP asks for. This library takes fewer, which `tokenyard plan` prints."""
        return _config.low_latency_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """DeepEP's settings, for any number of ranks."""
        return _config.dispatch_config(Buffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """DeepEP's settings, for any number of ranks."""
        return _config.combine_config(Buffer.num_sms, num_ranks)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream on which calls run, of the current GPU."""
        return self._streams.of(torch.device("cuda", torch.cuda.current_device()))

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: Optional[torch.Size] = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """A tensor that may be written, of no use to calls: their memory is their own."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.zeros(size if size is not None else (128,), dtype=dtype, device=device)

    # Normal mode

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor, EventOverlap]:
        """Tokens for each rank int32 `[ranks]`, for each host int32 `[hosts]` where there are several (else None), and for
        each expert int32 `[num_experts]`, and which token goes to which rank bool `[tokens, ranks]`, of `topk_idx`
        `[tokens, top_k]` with -1 for none. Local."""
        ranks, nodes = self._open().size, self._open().nodes
        must_divide(num_experts, ranks)
        _checks.choices(topk_idx)

        def work() -> Tuple[torch.Tensor, ...]:
            # What is no expert is refused by dispatch.
            used = (topk_idx >= 0) & (topk_idx < num_experts)
            experts = topk_idx.new_zeros(num_experts + 1, dtype=torch.int32)
            place = torch.where(used, topk_idx, num_experts).long()
            experts.scatter_add_(0, place.flatten(), torch.ones_like(place.flatten(), dtype=torch.int32))
            owner = torch.where(used, topk_idx // (num_experts // ranks), ranks).long()
            named = torch.zeros((topk_idx.shape[0], ranks + 1), dtype=torch.bool, device=topk_idx.device)
            named.scatter_(1, owner, True)
            named = named[:, :ranks].contiguous()
            of_nodes: Any = torch.tensor_split(named, list(itertools.accumulate(nodes))[:-1], 1)
            of_host = torch.stack([of_node.any(1).sum(dtype=torch.int32) for of_node in of_nodes])
            return named.sum(0, dtype=torch.int32), of_host, experts[:num_experts], named

        (of_rank, of_host, of_expert, named), event = self._on_comm([topk_idx], previous_event, async_finish, work)
        return of_rank, of_host if len(nodes) > 1 else None, of_expert, named, event

    def dispatch(
        self,
        x: Rows,
        handle: Optional[Tuple[Any, ...]] = None,
        num_tokens_per_rank: Optional[torch.Tensor] = None,
        num_tokens_per_rdma_rank: Optional[torch.Tensor] = None,
        is_token_in_rank: Optional[torch.Tensor] = None,
        num_tokens_per_expert: Optional[torch.Tensor] = None,
        topk_idx: Optional[torch.Tensor] = None,
        topk_weights: Optional[torch.Tensor] = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Optional[Config] = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[
        Rows, Optional[torch.Tensor], Optional[torch.Tensor], Optional[List[int]], Optional[NormalHandle], EventOverlap
    ]:
        """A row for each (token, rank), in the order of (source rank, token): rows, experts of each row int64
        `[rows, top_k]` (numbers on this rank, -1 elsewhere), weights, rows of each local expert rounded up to
        `expert_alignment`, handle, event. By a handle: rows and event, other results None.

        `x`: bf16, fp16 or fp32 `[tokens, hidden]`, or fp8 with scales (fp32 `[tokens, hidden / 128]` or packed UE8M0
        int32 `[tokens, hidden / 512]`, of any strides). Without `topk_idx` tokens go to the ranks of
        `is_token_in_rank`. An error of a dispatch that took place, such as `RoutingError`, has these results as its
        `dispatched`: combine them, as the other ranks do. The host waits for the counts, unless `num_worst_tokens` says
        how many rows there are: at least as many as can come, ranks times the most tokens of a rank."""
        rows, scales = _checks.rows(x)
        inputs = [t for t in (rows, scales, topk_idx, topk_weights, is_token_in_rank) if t is not None]
        if handle is not None:
            kept = _kept(handle, NormalHandle)
            if topk_idx is not None or topk_weights is not None:
                raise ValueError("topk_idx and topk_weights are the handle's: leave them out, or leave handle out")

            def again() -> Rows:
                self._normal.dispatches.finish()
                return _again(kept, rows, scales)

            received, event = self._on_comm(inputs, previous_event, async_finish, again)
            return received, None, None, None, None, event
        ranks = self._open().size
        _checks.routing(rows.shape[0], ranks, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights)
        assert num_tokens_per_expert is not None and is_token_in_rank is not None
        named, experts = is_token_in_rank, num_tokens_per_expert.shape[0]
        must_divide(experts, ranks)
        _checks.whole("num_worst_tokens", num_worst_tokens, 0)
        expert_alignment = _checks.whole("expert_alignment", expert_alignment, 1)

        def work() -> Any:
            call = _Normal(self, rows, scales, topk_idx, topk_weights, named, experts)
            return call.worst(num_worst_tokens) if num_worst_tokens > 0 else call.counted(expert_alignment)

        (received, local, weights, counts, made), event = self._on_comm(inputs, previous_event, async_finish, work)
        return received, local, weights, counts, made, event

    def combine(
        self,
        x: torch.Tensor,
        handle: Tuple[Any, ...],
        topk_weights: Optional[torch.Tensor] = None,
        bias: Union[None, torch.Tensor, Tuple[torch.Tensor, torch.Tensor]] = None,
        config: Optional[Config] = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap]:
        """The sums of the rows of each token over ranks, without weights, and of `topk_weights` fp32 `[rows, top_k]`.
        `bias`: one or two tensors `[tokens, hidden]` that are added. Sums are fp32, rounded once."""
        kept = _kept(handle, NormalHandle)
        biases = _checks.sums(x, topk_weights, bias, kept.tokens, kept.format.hidden)
        inputs = [x, *biases] + ([topk_weights] if topk_weights is not None else [])

        def work() -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
            given: Dict[str, Any] = {}
            if topk_weights is not None:
                words = topk_weights.contiguous()
                given.update(payload=words, payload_out=words.new_empty((kept.tokens, words.shape[1])))
            if biases:
                out = biases[0].float() if len(biases) == 1 else biases[0].float() + biases[1].float()
                out = out.contiguous()
                out = out.clone() if out is biases[0] else out
                kept.ep.combine(x, kept.handle, out, accumulate=True, dtype=name_of(x), **given)
                out = out.to(x.dtype)
            else:
                out = kept.ep.combine(x, kept.handle, dtype=name_of(x), **given)
            return out, given.get("payload_out")

        (out, weights), event = self._on_comm(inputs, previous_event, async_finish, work)
        return out, weights, event

    # Low latency

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing: low-latency calls find their memory as they need it, also after normal ones. Local."""
        self._open()

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
        dispatch_wait_recv_cost_stats: Optional[torch.Tensor] = None,
        x_global_scale: Optional[torch.Tensor] = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        use_nvfp4: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Hook]:
        """A row for each (token, expert): `[local experts, ranks * num_max_dispatch_tokens_per_rank, hidden]` in bf16, or
        fp8 with scales whose last two dimensions are column-major (fp32, or with `use_ue8m0` packed int32; with
        `round_scale` powers of two), rows of each expert int32 `[local experts]`, handle, event and hook.

        With `return_recv_hook` rows are there after `hook()`, and counts, too. An error of a dispatch that took place,
        such as `RoutingError`, has these results as its `dispatched`: call their hook, and combine them. The stats are
        added to: rows of each local expert, and nanoseconds (DeepEP: cycles) waited for each rank."""
        kind: Optional[Tuple[Any, ...]] = None
        special = use_nvfp4 or async_finish
        if not special and cumulative_local_expert_recv_stats is dispatch_wait_recv_cost_stats is x_global_scale is None:
            if isinstance(num_max_dispatch_tokens_per_rank, int) and isinstance(num_experts, int):
                kind = (num_max_dispatch_tokens_per_rank, num_experts, bool(use_fp8), bool(round_scale), bool(use_ue8m0))
                shape = self._low_latency.shapes.get(kind)
                if shape is not None and _eager.usual():
                    planned_call = self._planned_send if return_recv_hook else self._planned_dispatch
                    planned = planned_call(shape, x, topk_idx)
                    if planned is not None:
                        return planned
        return self._low_latency_dispatch(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats, x_global_scale, use_fp8, round_scale, use_ue8m0, use_nvfp4, async_finish,
            return_recv_hook, kind,
        )

    def _low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Optional[torch.Tensor],
        dispatch_wait_recv_cost_stats: Optional[torch.Tensor],
        x_global_scale: Optional[torch.Tensor],
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        use_nvfp4: bool,
        async_finish: bool,
        return_recv_hook: bool,
        kind: Optional[Tuple[Any, ...]],
    ) -> Tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Hook]:
        """A call that is the first of its kind, or none for the operator in C."""
        if use_nvfp4 or x_global_scale is not None:
            raise NotImplementedError("use_nvfp4 and x_global_scale: there are no nvfp4 rows; use fp8 or bf16 rows")
        if use_ue8m0 and not (use_fp8 and round_scale):
            raise ValueError("use_ue8m0 is set: set use_fp8 and round_scale, too, as such scales are powers of two")
        if async_finish and return_recv_hook:
            raise ValueError("async_finish and return_recv_hook are both set: set one of them")
        _checks.low_latency_tokens(x, topk_idx, num_max_dispatch_tokens_per_rank, use_fp8)
        ranks = self._open().size
        must_divide(num_experts, ranks)
        _checks.stats("cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats, x, num_experts // ranks, 4)
        _checks.stats("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, x, ranks, 8)
        ep = self._low_latency.get(
            x, num_max_dispatch_tokens_per_rank, num_experts, topk_idx.shape[1], Buffer.low_latency_sms
        )
        call = _LowLatency(ep, x, num_max_dispatch_tokens_per_rank, ranks, use_fp8, round_scale, use_ue8m0)
        if kind is not None and round_scale == use_ue8m0:
            # Further calls go by the operator in C, which has no powers of two as fp32 scales.
            if kind not in self._low_latency.shapes:
                members = (num_max_dispatch_tokens_per_rank, x.shape[1], num_experts)
                self._low_latency.shapes[kind] = _planned.Shape(ep, call.format, ranks, members)
        output = call.output(cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats)
        if self._dispatched is not None:
            self._dispatched.before_next()
        handle = LowLatencyHandle((call.source, call.ranges, num_max_dispatch_tokens_per_rank, x.shape[1], num_experts))
        if return_recv_hook:

            def results(sent: Any) -> Any:
                # Combine needs the handle, which the hook completes.
                self._dispatched = _Hook(lambda: _receive(call, sent, output, handle))
                return call.rows(), call.counts, handle, EventOverlap(), self._dispatched

            try:
                made: Tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Hook] = results(
                    ep.dispatch_send(x, topk_idx, format=call.format)
                )
            except BaseException as error:
                # Unusable routing: the dispatch goes on without this rank's tokens, and is to be received. So is one
                # that Ctrl-C was for.
                if hasattr(error, "sent"):
                    setattr(error, "dispatched", results(error.sent))
                raise
            return made

        def work() -> None:
            try:
                call.received(ep.dispatch_into(output, x, topk_idx, format=call.format), handle)
            except BaseException as error:
                if hasattr(error, "handle"):
                    call.received(error.handle, handle)
                    setattr(error, "dispatched", (call.rows(), call.counts, handle, EventOverlap(), None))
                raise

        _none, event = self._on_comm([x, topk_idx, *call.tensors()], None, async_finish, work)
        return call.rows(), call.counts, handle, event, None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Optional[torch.Tensor] = None,
        combine_wait_recv_cost_stats: Optional[torch.Tensor] = None,
        overlap: bool = False,
        src_signals: Optional[torch.Tensor] = None,
        src_signal_expect_value: int = 0,
        packed_recv_count: Optional[torch.Tensor] = None,
        comp_signal: Optional[torch.Tensor] = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 3,
    ) -> Tuple[torch.Tensor, EventOverlap, Hook]:
        """The weighted sums `[tokens, hidden]` of the experts' outputs `[local experts, rows, hidden]`, in `out` if it is
        given, event and hook. With `zero_copy` as without."""
        special = use_logfmt or async_finish or overlap
        if not special and out is combine_wait_recv_cost_stats is src_signals is comp_signal is None:
            planned = getattr(handle, "planned", None)
            if planned is not None and self._world is not None and _eager.usual():
                if self._combined is not None:
                    self._combined.before_next()
                if return_recv_hook:
                    sent = self._planned_send_back(x, topk_idx, topk_weights, planned[0])
                    if sent is not None:
                        return sent
                else:
                    sums = _eager.low_latency_combine(x, topk_idx, topk_weights, planned[0])
                    if sums is not None:
                        return sums, EventOverlap(), None
        return self._low_latency_combine(
            x, topk_idx, topk_weights, handle, use_logfmt, async_finish, return_recv_hook, out,
            combine_wait_recv_cost_stats, overlap, src_signals, comp_signal,
        )

    def _low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Tuple[Any, ...],
        use_logfmt: bool,
        async_finish: bool,
        return_recv_hook: bool,
        out: Optional[torch.Tensor],
        combine_wait_recv_cost_stats: Optional[torch.Tensor],
        overlap: bool,
        src_signals: Optional[torch.Tensor],
        comp_signal: Optional[torch.Tensor],
    ) -> Tuple[torch.Tensor, EventOverlap, Hook]:
        """A call that is none for the operator in C."""
        if use_logfmt:
            raise NotImplementedError("use_logfmt: partial rows are bf16; leave it out")
        if overlap or src_signals is not None or comp_signal is not None:
            raise NotImplementedError("overlap, src_signals and comp_signal: combine takes no signals; leave them out")
        if async_finish and return_recv_hook:
            raise ValueError("async_finish and return_recv_hook are both set: set one of them")
        kept = _kept(handle, LowLatencyHandle)
        _checks.choices(topk_idx)
        _checks.shaped("topk_weights", topk_weights, tuple(topk_idx.shape), (torch.float32,))
        _checks.outputs(x)
        if topk_idx.shape[0] != kept.tokens:
            raise ValueError(f"topk_idx has {topk_idx.shape[0]} tokens: give the {kept.tokens} of the dispatch")
        _checks.stats("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, x, self.group_size, 8)
        if out is not None:
            _checks.sums_out(out, x, (kept.tokens, kept.format.hidden))
        else:
            out = torch.empty((kept.tokens, kept.format.hidden), dtype=x.dtype, device=x.device)
        ep, result, weights = kept.ep, out, weights_of(kept.ep, topk_weights)
        times = combine_wait_recv_cost_stats
        if self._combined is not None:
            self._combined.before_next()
        if return_recv_hook:

            def hook(sent: Any) -> _Hook:
                return _Hook(lambda: ep.combine_recv(sent, result, wait_times=times))

            try:
                self._combined = hook(ep.combine_send(x, kept.handle, topk_weights=weights, dtype=name_of(x)))
            except BaseException as error:
                # Ctrl-C in its wait: the next combine receives it.
                if hasattr(error, "sent"):
                    self._combined = hook(error.sent)
                raise
            return out, EventOverlap(), self._combined

        def work() -> None:
            ep.combine(x, kept.handle, result, topk_weights=weights, dtype=name_of(x), wait_times=times)

        _none, event = self._on_comm([x, weights, out], None, async_finish, work)
        return out, event, None

    def _receive_before(self, shape: _planned.Shape, x: torch.Tensor, topk_idx: torch.Tensor) -> None:
        """Receives the dispatch that was sent last, if its hook has not, unless the next one is refused."""
        if self._dispatched is not None and self._dispatched.waits():
            _checks.low_latency_tokens(x, topk_idx, shape.members[0], shape.scaled)
            self._dispatched.before_next()

    def _planned_dispatch(
        self, shape: _planned.Shape, x: torch.Tensor, topk_idx: torch.Tensor
    ) -> Optional[Tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Hook]]:
        """A low-latency dispatch by the operator in C; None where the call is to be looked at, or is none for it."""
        if self._dispatched is not None:
            self._receive_before(shape, x, topk_idx)
        found = results = None
        made, number = _eager.LOW_LATENCY_DISPATCH(x, topk_idx, shape.number)
        if number <= 0:
            made, number, found = _eager.low_latency_made(made, number)
        if number:
            handle = LowLatencyHandle((made[2], made[3], *shape.members))
            handle.planned = (number, _native.taken_handle(number), shape)
            results = (made[0], made[4]) if shape.scaled else made[0], made[1], handle, EventOverlap(), None
        if found is not None:
            found.raise_with(results)
        return results

    def _planned_send(
        self, shape: _planned.Shape, x: torch.Tensor, topk_idx: torch.Tensor
    ) -> Optional[Tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Hook]]:
        """Its sending half. Combine needs the handle, which the hook completes."""
        self._receive_before(shape, x, topk_idx)
        results = half = None
        try:
            made, number, found = _eager.low_latency_send(shape.number, x, topk_idx)
            half = _native.half_of(number) if number else None
            if half is not None:
                handle = LowLatencyHandle((made[2], made[3], *shape.members))
                self._dispatched = _Hook(functools.partial(_planned.receive, half, shape, handle))
                rows: Rows = (made[0], made[4]) if shape.scaled else made[0]
                results = rows, made[1], handle, EventOverlap(), self._dispatched
                _native.half_is_kept(number)
        except BaseException:
            # Ctrl-C after it was sent: the next dispatch receives it.
            self._dispatched = _hook_of(half, self._dispatched)
            raise
        if found is not None:
            # Unusable routing: the dispatch goes on without this rank's tokens, and is to be received.
            found.raise_with(results)
        return results

    def _planned_send_back(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: int
    ) -> Optional[Tuple[torch.Tensor, EventOverlap, Hook]]:
        """The sending half of a combine by the operator; None likewise."""
        half = None
        try:
            made, number, found = _eager.low_latency_send_back(x, topk_idx, topk_weights, handle)
            half = _native.half_of(number) if number else None
            if half is not None:
                # After an error the next combine receives it.
                self._combined = _Hook(half.receive)
                _native.half_is_kept(number)
        except BaseException:
            self._combined = _hook_of(half, self._combined)
            raise
        if found is not None:
            found.raise_with(None)
        return None if half is None else (made[0], EventOverlap(), self._combined)

    def get_next_low_latency_combine_buffer(self, handle: Tuple[Any, ...]) -> torch.Tensor:
        """A tensor `[local experts, rows, hidden]` for the experts' outputs."""
        kept = _kept(handle, LowLatencyHandle)
        experts = len(kept.ep.local_experts)
        return torch.empty((experts, kept.capacity, kept.format.hidden), dtype=torch.bfloat16, device=handle[0].device)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Goes on without a rank, with `enable_shrink`. A rank that has been masked comes back by
        `low_latency_clean_mask_buffer` alone. Local."""
        rank_to_mask = _checks.whole("rank_to_mask", rank_to_mask, 0)
        if rank_to_mask >= self.group_size:
            raise ValueError(f"rank_to_mask is {rank_to_mask}: give a rank below {self.group_size}")
        if mask:
            self._masking().mask_rank(rank_to_mask)
        elif int(self._mask()[rank_to_mask]):
            raise ValueError(f"rank {rank_to_mask} has been masked: it comes back by low_latency_clean_mask_buffer")

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes the mask, int32 `[ranks]`, of which 1 is a rank that is masked. Local."""
        _checks.shaped("mask_status", mask_status, (self.group_size,))
        mask_status.copy_((self._mask() != 0).to(mask_status.dtype))

    def low_latency_clean_mask_buffer(self) -> None:
        """Takes back all masks: the next low-latency call makes a new context, with all ranks."""
        self._low_latency.clean()

    # Inside

    def _open(self) -> World:
        if self._world is None:
            raise RuntimeError("this Buffer was destroyed: make a new one")
        return self._world

    def _masking(self) -> AllToAll:
        ep = self._low_latency.made()
        if ep is None:
            raise RuntimeError("there is no mask before the first low-latency call: make one")
        return ep

    def _mask(self) -> torch.Tensor:
        if not self.enable_shrink or self._low_latency.made() is None:
            return torch.zeros(self.group_size, dtype=torch.int32, device="cpu")
        mask = self._masking().rank_mask
        if hasattr(mask, "__cuda_array_interface__"):
            return torch.as_tensor(mask, device="cuda")
        import numpy

        return torch.from_numpy(numpy.asarray(mask).copy())

    def _on_comm(
        self, inputs: List[torch.Tensor], previous: Event, async_finish: bool, work: Callable[[], Any]
    ) -> Tuple[Any, EventOverlap]:
        self._open()
        return self._streams.run(inputs, previous, async_finish, work)


# Errors of earlier calls that may come one after the other: a dispatch's and a combine's.
_EARLIER = 2


class _Hook:
    """The receiving half of a low-latency call. DeepEP's callers may send the next call of the same kind before they
    call the hook. A context receives one call before it sends the next, so `before_next` receives, and the hook then
    waits for that."""

    def __init__(self, receive: Callable[[], Any]) -> None:
        self._receive: Optional[Callable[[], Any]] = receive
        self._event: Optional[EventHandle] = None
        self._failure: Optional[Error] = None
        self._called = False

    def __call__(self) -> None:
        if self._called:
            raise ValueError("this hook was called already: call the hook of each call once")
        if self._receive is not None:
            # An error that came in its place, such as an earlier call's on a GPU, leaves it to another call of the hook.
            self._receive()
        self._called, self._receive = True, None
        if self._event is not None:
            self._event.current_stream_wait()
        if self._failure is not None:
            raise self._failure

    def waits(self) -> bool:
        """Whether it is still to be received."""
        return self._receive is not None

    def before_next(self) -> None:
        """Receives, unless the hook has. What this raises is for the caller of the hook."""
        for _ in range(_EARLIER + 1):
            if self._receive is None:
                return
            try:
                self._receive()
            except Error as failure:
                self._failure = self._failure or failure
                if not (hasattr(failure, "handle") or getattr(failure, "fatal", False)):
                    # An earlier call's error came in its place.
                    continue
            except ValueError as refused:
                # It was received, by a hook whose wait Ctrl-C ended. What was refused is left to the hook.
                if not getattr(refused, "received", False):
                    raise
            self._receive, self._event = None, EventHandle()


def _hook_of(half: Optional[_native.Half], before: Optional[_Hook]) -> Optional[_Hook]:
    """The hook of a half that was sent when an exception came, which may have been before its number was there; or the
    one before."""
    newest = _native.newest_half()
    half = half or newest
    return before if half is None else _Hook(half.receive)


class _Normal:
    """A normal dispatch with routing."""

    def __init__(
        self,
        buffer: Buffer,
        x: torch.Tensor,
        scales: Optional[torch.Tensor],
        topk_idx: Optional[torch.Tensor],
        topk_weights: Optional[torch.Tensor],
        named: torch.Tensor,
        experts: int,
    ) -> None:
        self.buffer, self.x, self.scales, self.experts, self.named = buffer, x, scales, experts, named
        self.ranks = buffer.group_size
        self.by_rank = topk_idx is None
        self.asked, self.topk_idx = topk_idx, named if topk_idx is None else _growth.named(topk_idx, experts, self.ranks)
        self.topk_weights = None if self.by_rank else topk_weights
        self.choices = self.topk_idx.shape[1]
        self.wanted = Wanted(x.shape[1], experts, self.choices, x.dtype == torch.float32, device_of(x))

    def format(self, ep: AllToAll) -> Format:
        scales = None
        if self.scales is not None:
            scales = "fp32" if self.scales.dtype == torch.float32 else "ue8m0"
        weights = "none" if self.topk_weights is None else "dispatch"
        combine = "bf16" if self.x.dtype == torch.float8_e4m3fn else name_of(self.x)
        return Format(
            self.wanted.hidden, ep.format.max_tokens, dtype=name_of(self.x), scales=scales, combine_dtype=combine,
            weights=weights,
        )

    def counted(self, alignment: int) -> Any:
        """The host waits for the counts, and outputs have as many rows as come."""
        offered = Offered(self.x, self.topk_idx, self.topk_weights, self.scales)

        def send(ep: AllToAll) -> Any:
            given = offered.within(ep, self.experts)
            return ep.dispatch_send(
                given.x, given.topk_idx, given.weights, scales=given.scales, format=self.format(ep), counts=True
            )

        def receive(ep: AllToAll, experts: List[int], sources: List[int], later: bool) -> Any:
            return ep.output(self.x, layout="token", capacity=sum(sources), format=self.format(ep), also=("source",))

        normal = self.buffer._normal
        ep, handle, got, experts, sources, found = normal.counted(
            self.x, self.wanted, Buffer._sms, None, send, receive
        )
        counts = [-(-rows // alignment) * alignment for rows in experts]
        kept = Kept(ep, handle, self.x.shape[0], sum(sources), self.format(ep))
        results = self.results(got, kept, counts, lambda: torch.tensor(sources, dtype=torch.int32, device="cpu").cumsum(0))
        found.raise_with((*results, EventOverlap()), sent=lambda: self.topk_idx, topk_idx=self.asked)
        return results

    def worst(self, rows: int) -> Any:
        """Nobody waits for counts; there are as many rows as the caller says."""
        tokens = -(-rows // self.ranks)
        if self.x.shape[0] > tokens:
            raise ValueError(
                f"num_worst_tokens is {rows}, for {tokens} tokens of each of {self.ranks} ranks, and x has "
                f"{self.x.shape[0]}: give at least ranks times the most tokens of a rank"
            )
        ep = self.buffer._normal.get(self.x, self.wanted, Buffer._sms, tokens)
        format = self.format(ep)
        output, got = ep.output(self.x, layout="token", capacity=rows, format=format, also=("source",))
        def results(handle: Any) -> Any:
            kept = Kept(ep, handle, self.x.shape[0], rows, format)
            return self.results(got, kept, [], lambda: _prefixes(got.also["source"], self.ranks) if got.also else None)

        try:
            return results(
                ep.dispatch_into(
                    output, self.x, self.topk_idx, self.topk_weights, scales=self.scales, format=format
                )
            )
        except BaseException as error:
            if hasattr(error, "handle"):
                renumber(error, self.topk_idx, self.asked)
                setattr(error, "dispatched", (*results(error.handle), EventOverlap()))
            raise

    def results(self, got: Any, kept: Kept, counts: List[int], prefix: Callable[[], Any]) -> Any:
        rank, ranks, device = self.buffer.rank, self.ranks, self.x.device
        source = got.also["source"]

        def prefixes() -> torch.Tensor:
            matrix = torch.full((ranks, ranks), -1, dtype=torch.int32, device=device)
            matrix[:, rank] = prefix().to(device=device, dtype=torch.int32)
            return matrix

        handle = NormalHandle((None, None, None, source[:, 1], self.named, None))
        handle.kept, handle.prefixes = kept, prefixes
        local = weights = None
        if not self.by_rank:
            local = _growth.of_choices(got.token_experts, self.choices, bool(counts)).long()
            if self.topk_weights is not None:
                weights = got.token_weights[:, : self.choices]
        rows = got.rows if self.scales is None else (got.rows, got.scales)
        return rows, local, weights, counts, handle


class _LowLatency:
    """Tensors of a low-latency dispatch."""

    def __init__(
        self, ep: AllToAll, x: torch.Tensor, tokens: int, ranks: int, fp8: bool, round_scale: bool, ue8m0: bool
    ) -> None:
        self.ep, self.x, self.capacity = ep, x, ranks * tokens
        self.expands = fp8 and round_scale and not ue8m0
        scales = None if not fp8 else "ue8m0" if round_scale else "fp32"
        hidden, experts, device = x.shape[1], len(ep.local_experts), x.device
        self.format = _low_latency_format(hidden, tokens, scales)
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.x_out = torch.empty((experts, self.capacity, hidden), dtype=dtype, device=device)
        self.counts = torch.empty(experts, dtype=torch.int32, device=device)
        self.sources = torch.empty((experts * self.capacity, 2), dtype=torch.int32, device=device)
        self.ranges = torch.empty((experts, ranks), dtype=torch.int64, device=device)
        self.words: Optional[torch.Tensor] = None
        self.scales: Optional[torch.Tensor] = None
        lead = -(-self.capacity // 4) * 4
        if fp8:
            columns, word = (512, torch.int32) if round_scale else (128, torch.float32)
            self.words = torch.empty((experts, -(-hidden // columns), lead), dtype=word, device=device)
            self.scales = self.words
        if self.expands:
            self.scales = torch.empty((experts, hidden // 128, lead), dtype=torch.float32, device=device)

    @property
    def source(self) -> torch.Tensor:
        """The token of each row at its source."""
        return self.sources[:, 1].view(len(self.ep.local_experts), self.capacity)

    def tensors(self) -> List[torch.Tensor]:
        made = [self.x_out, self.counts, self.sources, self.ranges, self.words, self.scales]
        return [tensor for tensor in made if tensor is not None]

    def output(self, totals: Optional[torch.Tensor], times: Optional[torch.Tensor]) -> Output:
        return Output(
            "masked", self.x_out, self.counts, scales=self.words, column_major=self.words is not None,
            source=self.sources, source_ranges=self.ranges, total_counts=totals, wait_times=times,
        )

    def rows(self) -> Rows:
        """What the caller gets: scales with the row's number first, which lies last."""
        if self.scales is None:
            return self.x_out
        return self.x_out, self.scales.transpose(1, 2)[:, : self.capacity]

    def received(self, handle: Any, into: LowLatencyHandle) -> None:
        """Completes handle and scales."""
        into.kept = Kept(self.ep, handle, self.x.shape[0], self.capacity, self.format)
        if self.expands and self.words is not None and self.scales is not None:
            blocks = self.scales.shape[1]
            shifts = torch.arange(0, 8 * blocks, 8, dtype=torch.int32, device=self.words.device) % 32
            exponents = (self.words.repeat_interleave(4, 1)[:, :blocks] >> shifts[:, None]) & 255
            self.scales.copy_((exponents << 23).view(torch.float32))


@functools.lru_cache(maxsize=64)
def _low_latency_format(hidden: int, tokens: int, scales: Optional[str]) -> Format:
    """bf16 rows, or with scales fp8 rows that dispatch makes of bf16."""
    dtype = "bf16" if scales is None else "fp8"
    return Format(hidden, tokens, dtype=dtype, scales=scales, quantize=scales is not None, weights="combine")


def _receive(call: _LowLatency, sent: Any, output: Output, handle: LowLatencyHandle) -> None:
    """The receiving half of a low-latency dispatch. Completes the handle also where the call found an error."""
    try:
        call.received(call.ep.dispatch_recv(sent, output), handle)
    except BaseException as error:
        if hasattr(error, "handle"):
            call.received(error.handle, handle)
        raise


def _kept(handle: Any, kind: Any) -> Kept:
    """What a handle's calls need."""
    if not isinstance(handle, kind):
        raise TypeError(f"handle is a {type(handle).__name__}: give what the dispatch of the same mode returned")
    kept: Optional[Kept] = getattr(handle, "kept", None)
    if kept is None:
        raise RuntimeError("handle is of a dispatch that was not received: call its hook first")
    return kept


def _again(kept: Kept, x: torch.Tensor, scales: Optional[torch.Tensor]) -> Rows:
    """New rows of an earlier dispatch's tokens."""
    words = None if scales is None else "fp32" if scales.dtype == torch.float32 else "ue8m0"
    format = Format(
        kept.format.hidden, kept.format.max_tokens, dtype=name_of(x), scales=words, weights=kept.format.weights
    )
    rows = torch.empty((kept.capacity, x.shape[1]), dtype=x.dtype, device=x.device)
    row_scales = None if scales is None else scales.new_empty((kept.capacity, scales.shape[1]))
    kept.ep.dispatch_again(kept.handle, x, rows, scales=scales, row_scales=row_scales, format=format)
    return rows if row_scales is None else (rows, row_scales)


def _prefixes(source: torch.Tensor, ranks: int) -> torch.Tensor:
    """How many rows come from the sources up to each one; rows that are none have source -1."""
    return (source[:, :1] == torch.arange(ranks, device=source.device)).sum(0).cumsum(0)
