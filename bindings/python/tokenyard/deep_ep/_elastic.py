"""`deep_ep.ElasticBuffer`: the calls of DeepEP's version 2 by tokenyard's.

A dispatch without expansion is the token layout, one with expansion the contiguous layout. The weights of expanded
rows, and which choice each row is, come from a payload (`_choices`): each token's experts and weights beside its rows.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from .. import _choices, _growth
from .._calls import AllToAll
from .._native import Error, Format, Output, World
from .._tensors import device_of, name_of
from . import _config
from ._contexts import Kept, Normal, Offered, Wanted
from ._shared import Event, Rows, Streams, must_divide, world_of
from .utils import EventHandle, EventOverlap

Dispatched = Tuple[Rows, Optional[torch.Tensor], Optional[torch.Tensor], "EPHandle", EventOverlap]

_ROWS = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8)
# The experts' rows in combine.
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)


class EPHandle:
    """The handle of a dispatch, for combines and for dispatches of new rows. R ranks, L local experts, K choices, M
    rows.

    do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch. topk_idx: `[tokens,
    K]`, a copy unless `do_handle_copy` was off. num_recv_tokens, num_expanded_tokens: tokens received and rows of the
    expanded layout; without `do_cpu_sync`, as many as there can be. num_recv_tokens_per_expert_list: L counts, each
    rounded up to the alignment; empty without `do_cpu_sync`. psum_num_recv_tokens_per_scaleup_rank: int32 `[R]`, the
    tokens received from ranks up to each one. psum_num_recv_tokens_per_expert: int32 `[L]`: expanded, where each
    expert's rows end, which begin at the end before rounded up; else sums of the rounded counts.
    num_unaligned_recv_tokens_per_expert: int32 `[L]`. token_metadata_at_forward, channel_linked_list: None, as within a
    node."""

    token_metadata_at_forward: Optional[torch.Tensor] = None
    channel_linked_list: Optional[torch.Tensor] = None

    def __init__(self, call: _Call, place: _Place, topk_idx: torch.Tensor, num_sms: int) -> None:
        self.do_expand, self.num_experts, self.expert_alignment = call.expand, call.experts, call.alignment
        self.num_max_tokens_per_rank, self.num_sms, self.topk_idx = place.most, num_sms, topk_idx
        self.num_recv_tokens, self.num_expanded_tokens = place.tokens, place.expanded
        self.num_recv_tokens_per_expert_list = place.counts
        self.psum_num_recv_tokens_per_scaleup_rank = place.of_ranks
        self.psum_num_recv_tokens_per_expert = place.of_experts
        self.num_unaligned_recv_tokens_per_expert = place.unaligned
        self._place = place
        self._source_metadata: Optional[torch.Tensor] = None
        self._slots: Optional[torch.Tensor] = None

    @property
    def recv_src_metadata(self) -> torch.Tensor:
        """int32 `[num_recv_tokens, K + 2]`, for each token received in the order of (source rank, token): the source
        rank times num_max_tokens_per_rank plus the token; the source rank times K plus the first choice that is here;
        then the row of each choice in the expanded layout, -1 for none. Rows of no token are -1. Computed when it is
        read."""
        if self._source_metadata is None:
            self._source_metadata = self._place.metadata()
        return self._source_metadata

    @recv_src_metadata.setter
    def recv_src_metadata(self, value: torch.Tensor) -> None:
        self._source_metadata = value

    @property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """int32 `[tokens, K]`: this rank times num_max_tokens_per_rank plus the token's number among those that go to
        the choice's rank, for the first choice of each rank; -1 for the others. Computed when it is read."""
        if self._slots is None:
            self._slots = self._place.slots(self.topk_idx, self.num_experts)
        return self._slots


class ElasticBuffer:
    """DeepEP's buffer of version 2. `group`: of torch.distributed, with any backend, or a `tokenyard.World`.
    Collective, as all calls but those that say so; ranks are those of one host.

    `num_max_tokens_per_rank`, `hidden` and `num_topk` are what contexts have room for from the start.
    `num_gpu_timeout_secs`: how long calls wait for another rank. `num_bytes` is kept to be read; memory is taken by
    what calls need. Of the others docs/deep_ep.md has what they do. Without `num_bytes`, `num_max_tokens_per_rank` and
    `hidden` are needed.

    Tensors are on a GPU or on the CPU. Calls of a kind that is new make a context first, which a capture cannot do."""

    round_tokens: int = 16384
    """Tokens of a rank in a round of calls: where a rank may have more, calls go in several rounds, and memory is that
    of one."""

    def __init__(
        self,
        group: Any,
        num_bytes: Optional[int] = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if num_cpu_bytes:
            raise NotImplementedError(f"num_cpu_bytes is {num_cpu_bytes}: there are no buffers of host memory; give 0")
        if num_max_tokens_per_rank < 0 or num_topk < 0 or num_topk > 32:
            raise ValueError(
                f"num_max_tokens_per_rank is {num_max_tokens_per_rank} and num_topk {num_topk}: give 0 or more, and of "
                "num_topk at most 32"
            )
        self._world: Optional[World] = world_of(group, None)
        self.group = group
        self.rank_idx, self.num_ranks = self._world.rank, self._world.size
        if num_bytes is None:
            num_bytes = _config.elastic_size_hint(
                self.num_ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction
            )
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes, num_max_tokens_per_rank
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute, self.explicitly_destroy = prefer_overlap_with_compute, explicitly_destroy
        self.num_allocated_qps = num_allocated_qps or (129 if allow_hybrid_mode else 17)
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self._choices = num_topk
        self._normal = Normal(self._world, float(num_gpu_timeout_secs), self.round_tokens)
        self._streams = Streams()

    def destroy(self) -> None:
        """Gives up the context, once no handle of it is alive. Calls are refused from now on."""
        self._normal.close()
        self._world = None

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that DeepEP asks for where all ranks are on one host. This library takes fewer, which `tokenyard plan`
        prints. Local."""
        ranks = group.size if isinstance(group, World) else group.size()
        return _config.elastic_size_hint(
            ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction
        )

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Waits until all ranks are here, and this rank's streams have done what they were given: the communication
        stream, too, with `use_comm_stream`; the whole GPU with `with_cpu_sync`."""
        world = self._open()
        cuda: Any = torch.cuda
        if cuda.is_initialized():
            if cuda.is_current_stream_capturing():
                raise RuntimeError("barrier waits on the host, which a capture cannot do: call it before")
            cuda.current_stream().synchronize()
            if use_comm_stream:
                self.get_comm_stream().synchronize()
            if with_cpu_sync:
                cuda.synchronize()
        world.barrier()

    @staticmethod
    def capture() -> EventHandle:
        """What the current stream has been given so far."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream on which calls run, of the current GPU."""
        return self._streams.of(torch.device("cuda", torch.cuda.current_device()))

    def get_physical_domain_size(self) -> Tuple[int, int]:
        """Hosts, and ranks of each: 1 and all ranks. Local."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> Tuple[int, int]:
        """As `get_physical_domain_size`. Local."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """A number of multiprocessors for callers that divide a GPU: 20, or 64 where overlap is not preferred, and at
        most what the GPU has. Calls take it where it is their `num_sms`; else contexts choose by themselves. Local."""
        sms, cuda = 20 if self.prefer_overlap_with_compute else 64, torch.cuda
        if cuda.is_available():
            sms = min(sms, int(cuda.get_device_properties(cuda.current_device()).multi_processor_count))
        return sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """DeepEP's number of queue pairs; there are none here. Local."""
        return min(16 * num_sms + 1 if self.allow_hybrid_mode else min(num_sms, 9), self.num_allocated_qps)

    # Calls

    def dispatch(
        self,
        x: Rows,
        topk_idx: Optional[torch.Tensor] = None,
        topk_weights: Optional[torch.Tensor] = None,
        cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
        num_experts: Optional[int] = None,
        num_max_tokens_per_rank: Optional[int] = None,
        expert_alignment: Optional[int] = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Optional[EPHandle] = None,
        do_handle_copy: bool = True,
        do_cpu_sync: Optional[bool] = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Dispatched:
        """Rows, experts, weights, handle and event. Without `do_expand` a row for each (token, rank) in the order of
        (source rank, token), experts int64 `[rows, top_k]` (numbers on this rank, -1 elsewhere) and weights fp32
        `[rows, top_k]`. With it a row for each choice, expert after expert, each one's first at a multiple of
        `expert_alignment`; None for the experts; weights fp32 `[rows]`, 0 in padding. None for weights that are not
        given.

        `x`: `[tokens, hidden]` in bf16, fp16, fp32, fp8 or int8, or such rows with scale factors of 4 bytes, `[tokens,
        words]` of any strides, which come beside the rows. `num_max_tokens_per_rank`: the same on all ranks; by default
        the buffer's. `do_cpu_sync` (default, but by a handle): the host waits for the counts, and there are as many
        rows as come; else as many as can come: ranks times num_max_tokens_per_rank, and expanded times the smaller of
        top_k and local experts, and room for the alignment. `previous_event_before_epilogue`: what the receiving half
        waits for. By a handle the rows are new ones of the same tokens, with new weights if they are given.

        An error of a dispatch that took place, such as `RoutingError`, has these results as its `dispatched`: combine
        them, as the other ranks do."""
        self._open()
        rows, scales = _rows_of(x)
        if do_zero_padding and not do_expand:
            raise ValueError("do_zero_padding is set without do_expand: rows of other dispatches have no padding")
        before = previous_event_before_epilogue
        if handle is not None:
            _must_be_the_same(handle, num_experts, num_max_tokens_per_rank, expert_alignment)
            place = self._placed(handle, do_expand)
            if topk_idx is not None or do_cpu_sync:
                raise ValueError("topk_idx or do_cpu_sync is given with handle, whose dispatch decided both: leave them out")
            again = _Again(place, rows, scales, topk_weights, use_tma_aligned_col_major_sf, do_zero_padding, before)
            given = [t for t in (rows, scales, topk_weights) if t is not None]
            (got, local, weights), event = self._on_comm(given, previous_event, async_with_compute_stream, again.made)
            return got, local, weights, handle, event
        if topk_idx is None or num_experts is None:
            raise ValueError("topk_idx or num_experts is missing: give both, or handle")
        must_divide(num_experts, self.num_ranks)
        most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        call = _Call(
            self, rows, scales, topk_idx, topk_weights, num_experts, most,
            1 if expert_alignment is None else expert_alignment, do_expand, do_zero_padding, use_tma_aligned_col_major_sf, before, num_sms, do_handle_copy,
        )
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            _must_be("cumulative_local_expert_recv_stats", stats, (call.local_experts,), torch.int32)
        counted = do_cpu_sync is None or do_cpu_sync
        inputs = [t for t in (rows, scales, topk_idx, topk_weights, stats) if t is not None]
        call.check(counted)

        def work() -> Any:
            results, failure = call.counted() if counted else call.capacity()
            if stats is not None:
                stats.add_(results[3].num_unaligned_recv_tokens_per_expert)
            if failure is not None:
                failure.dispatched = (*results, EventOverlap())
                raise failure
            return (*results, results[3]._place.tensors(), results[3].topk_idx)

        made, event = self._on_comm(inputs, previous_event, async_with_compute_stream, work)
        return made[0], made[1], made[2], made[3], event

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: Optional[torch.Tensor] = None,
        bias: Union[None, torch.Tensor, Tuple[torch.Tensor, torch.Tensor]] = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap]:
        """The sums `[tokens, hidden]` of each token's rows, without weights, in fp32 and rounded once; the weights of
        each choice `[tokens, top_k]`, 0 where a token has none, of `topk_weights` fp32 `[rows, top_k]` or, expanded,
        `[rows]`; and the event. `x`: bf16, fp16 or fp32 `[rows, hidden]`, as many rows as the dispatch made. `bias`:
        one or two tensors `[tokens, hidden]` of the same dtype, which are added before the rounding."""
        place = self._placed(handle, handle.do_expand if isinstance(handle, EPHandle) else False)
        kept, dtype = place.kept, x.dtype
        if dtype not in _SUMMED:
            raise TypeError(f"x is {dtype}: give bf16, fp16 or fp32 rows")
        _must_be("x", x, (kept.capacity, kept.format.hidden), dtype)
        if topk_weights is not None:
            wanted = (kept.capacity,) if handle.do_expand else (kept.capacity, place.choices)
            _must_be("topk_weights", topk_weights, wanted, torch.float32)
        biases = [] if bias is None else [bias] if isinstance(bias, torch.Tensor) else list(bias)
        if len(biases) > 2:
            raise ValueError(f"bias has {len(biases)} tensors: give at most 2")
        for tensor in biases:
            _must_be("bias", tensor, (kept.tokens, kept.format.hidden), dtype)
        inputs = [x, *biases] + ([topk_weights] if topk_weights is not None else [])
        before = previous_event_before_epilogue

        def work() -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
            given: Dict[str, Any] = {}
            if topk_weights is not None:
                given = place.weights_back(topk_weights)
            out = biases[0].float() if biases else x.new_empty((kept.tokens, kept.format.hidden))
            for tensor in biases[1:]:
                out = out + tensor.float()
            if biases and out is biases[0]:
                out = out.clone()
            if before is not None and not given:
                sent = kept.ep.combine_send(x, kept.handle, dtype=name_of(x))
                before.current_stream_wait()
                kept.ep.combine_recv(sent, out, accumulate=bool(biases))
            else:
                if before is not None:
                    before.current_stream_wait()
                kept.ep.combine(x, kept.handle, out, accumulate=bool(biases), dtype=name_of(x), **given)
            weights = given.get("payload_out")
            if weights is not None:
                weights = (weights.squeeze(2) if weights.dim() == 3 else weights)[:, : place.choices]
            return out.to(dtype), weights

        (out, weights), event = self._on_comm(inputs, previous_event, async_with_compute_stream, work)
        return out, weights, event

    # What version 2 has beside dispatch and combine.

    def engram_write(self, *given: Any, **named: Any) -> None:
        """Refused: `NotImplementedError`."""
        raise NotImplementedError("engram_write and engram_fetch: there is no remote cache; only dispatch and combine")

    engram_fetch = engram_write

    def pp_set_config(self, *given: Any, **named: Any) -> None:
        """Refused: `NotImplementedError`."""
        raise NotImplementedError("pp_set_config, pp_send and pp_recv: no pipelines; only dispatch and combine")

    pp_send = pp_recv = pp_set_config

    def all_gather(self, *given: Any, **named: Any) -> None:
        """Refused: `NotImplementedError`."""
        raise NotImplementedError("all_gather and its sessions: only dispatch and combine are here")

    create_agrs_session = destroy_agrs_session = agrs_new_session = all_gather
    agrs_set_config = agrs_get_inplace_tensor = all_gather

    # Inside

    def _open(self) -> World:
        if self._world is None:
            raise RuntimeError("this ElasticBuffer was destroyed: make a new one")
        return self._world

    def _placed(self, handle: Any, expand: bool) -> _Place:
        """What a handle of this buffer keeps."""
        self._open()
        if not isinstance(handle, EPHandle):
            raise TypeError(f"handle is a {type(handle).__name__}: give the EPHandle that dispatch returned")
        place = handle._place
        if place.normal is not self._normal:
            raise ValueError("handle is of another ElasticBuffer: give it to the one whose dispatch returned it")
        if expand != handle.do_expand:
            raise ValueError(f"do_expand is {expand}, and the handle's dispatch had {handle.do_expand}: give the same")
        return place

    def _on_comm(self, inputs: List[torch.Tensor], previous: Event, late: bool, work: Any) -> Tuple[Any, EventOverlap]:
        return self._streams.run(inputs, previous, late, work)


class _Place(NamedTuple):
    """What a handle keeps of its dispatch."""

    normal: Normal
    kept: Kept
    rank: int
    choices: int
    most: int
    """Tokens of a rank."""
    tokens: int
    expanded: int
    counts: List[int]
    of_ranks: torch.Tensor
    of_experts: torch.Tensor
    unaligned: torch.Tensor
    source: torch.Tensor
    """int32 `[rows, 2]`: rank and token."""
    local: torch.Tensor
    """int32 `[rows, choices]`: experts of each row, -1 for none; expanded `[rows]`."""
    match: Optional[torch.Tensor]
    """Expanded: which choice each row is, bool `[rows, choices]`."""

    def tensors(self) -> Tuple[Optional[torch.Tensor], ...]:
        """Those that other streams may read later."""
        return self.of_ranks, self.of_experts, self.unaligned, self.source, self.local, self.match

    def weights_back(self, topk_weights: torch.Tensor) -> Dict[str, Any]:
        """The payload of a combine that brings weights back. What rows have of choices elsewhere does not count."""
        ep, shape = self.kept.ep, (self.kept.tokens, self.choices)
        if self.match is not None:
            out = topk_weights.new_empty((shape[0], ep.top_k, 1))
            return dict(payload=topk_weights[:, None].contiguous(), payload_out=out)
        return dict(payload=topk_weights.masked_fill(self.local < 0, 0), payload_out=topk_weights.new_empty(shape))

    def metadata(self) -> torch.Tensor:
        """`EPHandle.recv_src_metadata`."""
        self._lend()
        table = self.source.new_full((self.tokens + 1, self.choices + 2), -1)
        used = self.source[:, 0] >= 0
        number = self.source[:, 0] * self.most + self.source[:, 1]
        choices = torch.arange(self.choices, device=number.device)
        if self.match is None:
            first = torch.where(self.local >= 0, choices, self.choices).amin(1) if self.choices else number
            table[:-1, 0] = torch.where(used, number, -1)
            table[:-1, 1] = torch.where(used, self.source[:, 0] * self.choices + first, -1)
            return table[:-1]
        place = _places(self.source, self.most, len(self.of_ranks))
        row = torch.where(used, place[torch.where(used, number, 0).long()] - 1, self.tokens).long()
        choice = self.match.int().argmax(1)
        table[row, 0] = number
        table[row, 2 + choice] = torch.arange(len(row), dtype=torch.int32, device=row.device)
        table[-1] = -1
        table = table[:-1]
        first = torch.where(table[:, 2:] >= 0, choices, self.choices).amin(1)
        table[:, 1] = torch.where(table[:, 0] >= 0, table[:, 0] // self.most * self.choices + first, -1)
        return table

    def slots(self, topk_idx: torch.Tensor, experts: int) -> torch.Tensor:
        """`EPHandle.dst_buffer_slot_idx`."""
        ranks = len(self.of_ranks)
        used = (topk_idx >= 0) & (topk_idx < experts)
        owner = torch.where(used, topk_idx // (experts // ranks), ranks).long()
        named = torch.zeros((len(owner), ranks + 1), dtype=torch.int32, device=owner.device).scatter_(1, owner, 1)
        slot = (named.cumsum(0) - 1).gather(1, owner) + self.rank * self.most
        later = (owner[:, :, None] == owner[:, None, :]).tril(-1).any(2)
        return torch.where(used & ~later, slot, -1).int()

    def _lend(self) -> None:
        for tensor in self.tensors():
            if tensor is not None and tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


class _Scales:
    """How scale factors of 4 bytes travel: as those of one of the library's formats, which have as many words, else in
    the payload. Their bits are not looked at."""

    def __init__(self, scales: Optional[torch.Tensor], rows: torch.Tensor, column_major: bool) -> None:
        self.given, self.column_major = scales, column_major
        self.kind: Optional[str] = None
        self.columns = 0 if scales is None else scales.shape[1]
        self.words = self.columns
        if scales is not None and rows.dtype in (torch.float8_e4m3fn, torch.int8):
            of_words = {-(-rows.shape[1] // 512): "ue8m0", -(-rows.shape[1] // 128): "fp32"}
            self.kind = of_words.get(self.columns)
            self.words = 0 if self.kind is not None else self.columns

    def sent(self) -> Optional[torch.Tensor]:
        """What dispatch takes as scales."""
        if self.given is None or self.kind is None:
            return None
        return self.given.view(torch.float32 if self.kind == "fp32" else torch.int32)

    def payload(self) -> List[torch.Tensor]:
        """What dispatch takes as words of its payload."""
        return [self.given.view(torch.float32)] if self.given is not None and self.words else []

    def room(self, rows: int, zero: bool) -> Optional[torch.Tensor]:
        """Where scales of rows go, in the order that the library writes."""
        if self.given is None:
            return None
        shape = (self.columns, -(-rows // 4) * 4) if self.column_major else (rows, self.columns)
        return (torch.zeros if zero else torch.empty)(shape, dtype=self.given.dtype, device=self.given.device)

    def native(self, room: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """That as the library's output."""
        if room is None or self.kind is None:
            return None
        return room.view(torch.float32 if self.kind == "fp32" else torch.int32)

    def received(
        self, room: Optional[torch.Tensor], rows: int, payload: Optional[torch.Tensor]
    ) -> Optional[torch.Tensor]:
        """`[rows, words]`, of the payload's last words if they travelled there."""
        if room is None or self.given is None:
            return None
        scales = room.t()[:rows] if self.column_major else room
        if self.words and payload is not None:
            scales.copy_(payload[:, payload.shape[1] - self.words :].view(self.given.dtype))
        return scales


class _Call:
    """A dispatch with routing."""

    def __init__(
        self,
        buffer: ElasticBuffer,
        rows: torch.Tensor,
        scales: Optional[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: Optional[torch.Tensor],
        experts: int,
        most: int,
        alignment: int,
        expand: bool,
        zero: bool,
        column_major: bool,
        before: Event,
        sms: int,
        copies: bool,
    ) -> None:
        self.buffer, self.given, self.rows, self.experts, self.most = buffer, rows, _carried(rows), experts, most
        self.topk_idx, self.topk_weights, self.alignment = topk_idx, topk_weights, alignment
        self.expand, self.zero, self.before, self.copies = expand, zero, before, copies
        self.sms = sms or None
        self.num_sms = sms or buffer.get_theoretical_num_sms(experts, topk_idx.shape[-1])
        self.scales = _Scales(scales, rows, column_major)
        self.local_experts, self.choices = experts // buffer.num_ranks, topk_idx.shape[-1]

    def check(self, counted: bool) -> None:
        """Refuses arguments before other ranks are asked for anything."""
        tokens = len(self.rows)
        if self.topk_idx.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"topk_idx is {self.topk_idx.dtype}: give int64 or int32")
        if self.topk_idx.dim() != 2 or len(self.topk_idx) != tokens or not 1 <= self.choices <= 32:
            shape = list(self.topk_idx.shape)
            raise ValueError(f"topk_idx is {shape}: give [{tokens}, top_k], with top_k from 1 to 32")
        if self.topk_weights is not None:
            _must_be("topk_weights", self.topk_weights, (tokens, self.choices), torch.float32)
        if self.alignment < 1:
            raise ValueError(f"expert_alignment is {self.alignment}: give 1 or more")
        if self.most < 0 or (self.most == 0 and not counted):
            raise ValueError(
                f"num_max_tokens_per_rank is {self.most}, and without do_cpu_sync it decides how many rows there are: "
                "give the most tokens of a rank"
            )
        if self.most and tokens > self.most:
            raise ValueError(f"x has {tokens} tokens, and num_max_tokens_per_rank is {self.most}: give at most as many")

    def context(self) -> Tuple[Wanted, Optional[int]]:
        """What the context must have, and for how many tokens; `None`: for as many as ranks have now."""
        choices = max(self.choices, self.buffer._choices)
        wanted = Wanted(
            self.rows.shape[1], self.experts, choices, self.rows.dtype == torch.float32, device_of(self.rows),
            2 * choices + self.scales.words,
        )
        return wanted, max(self.most, self.buffer.num_max_tokens_per_rank) or None

    def format(self, ep: AllToAll) -> Format:
        combine = "bf16" if self.rows.dtype == torch.float8_e4m3fn else name_of(self.rows)
        weights = "none" if self.topk_weights is None or self.expand else "dispatch"
        return Format(
            self.rows.shape[1], ep.format.max_tokens, dtype=name_of(self.rows), scales=self.scales.kind,
            combine_dtype=combine, weights=weights,
        )

    def offered(self) -> Offered:
        topk_idx = _growth.named(self.topk_idx, self.experts)
        parts = [_choices.words(topk_idx)] if self.expand else []
        if self.expand and self.topk_weights is not None:
            parts.append(self.topk_weights)
        parts += self.scales.payload()
        payload = torch.cat(parts, 1) if parts else None
        return Offered(self.rows, topk_idx, None if self.expand else self.topk_weights, self.scales.sent(), payload)

    def counted(self) -> Tuple[Any, Optional[Error]]:
        """The host waits for the counts, and outputs have as many rows as come."""
        offered, (wanted, tokens) = self.offered(), self.context()

        def send(ep: AllToAll) -> Any:
            given = offered.within(ep, self.experts)
            return ep.dispatch_send(
                given.x, given.topk_idx, given.weights if self.weighed() else None, scales=given.scales,
                payload=given.payload, format=self.format(ep), counts=True,
            )

        def receive(ep: AllToAll, experts: List[int], sources: List[int]) -> Any:
            made = _Made(self, ep, self.expanded(experts) if self.expand else sum(sources))
            if self.before is not None:
                self.before.current_stream_wait()
            return made.output, made

        done = self.buffer._normal.counted(self.rows, wanted, self.sms, tokens, send, receive)
        most = self.most or done.ep.format.max_tokens
        counts = [-(-rows // self.alignment) * self.alignment for rows in done.experts]
        return self.results(done.ep, done.handle, done.made, most, sum(done.sources), sum(counts), counts), done.failure

    def capacity(self) -> Tuple[Any, Optional[Error]]:
        """Nobody waits for counts; there are as many rows as can come."""
        offered, (wanted, most) = self.offered(), self.context()
        ep = self.buffer._normal.get(self.rows, wanted, self.sms, most)
        tokens = self.buffer.num_ranks * self.most
        expanded = tokens * min(self.choices, self.local_experts) + (self.alignment - 1) * self.local_experts
        expanded = -(-expanded // self.alignment) * self.alignment
        made, format, failure = _Made(self, ep, expanded if self.expand else tokens), self.format(ep), None
        weights = offered.weights if self.weighed() else None
        given: Dict[str, Any] = dict(scales=offered.scales, payload=offered.payload, format=format)
        try:
            if self.before is not None:
                sent = ep.dispatch_send(offered.x, offered.topk_idx, weights, **given)
                self.before.current_stream_wait()
                handle = ep.dispatch_recv(sent, made.output)
            else:
                handle = ep.dispatch_into(made.output, offered.x, offered.topk_idx, weights, **given)
        except Error as error:
            if not hasattr(error, "handle"):
                raise
            failure, handle = error, error.handle
        return self.results(ep, handle, made, self.most, tokens, expanded, []), failure

    def weighed(self) -> bool:
        return self.topk_weights is not None and not self.expand

    def expanded(self, experts: Sequence[int]) -> int:
        return sum(-(-rows // self.alignment) * self.alignment for rows in experts)

    def results(
        self, ep: AllToAll, handle: Any, made: _Made, most: int, tokens: int, expanded: int, counts: List[int]
    ) -> Any:
        kept = Kept(ep, handle, len(self.rows), made.capacity, self.format(ep))
        unaligned, ranks = made.counts[: self.local_experts], self.buffer.num_ranks
        match = None
        if made.offsets is not None and made.payload is not None:
            local, ends = made.local, made.offsets[: self.local_experts] + unaligned
            named = made.payload[:, : self.choices].view(torch.int32)
            match = _choices.of_rows(named, local + self.buffer.rank_idx * self.local_experts, local, made.source)
            # Rows of experts for growth have none of the caller's tokens.
            of_ranks = _places(made.source, most, ranks)[most - 1 :: most] if most else made.counts.new_zeros(ranks)
        else:
            local = made.local[:, : self.choices]
            aligned = (unaligned + (self.alignment - 1)) // self.alignment * self.alignment
            ends = aligned.cumsum(0, dtype=torch.int32)
            sources = torch.arange(ranks, dtype=torch.int32, device=local.device)
            of_ranks = (made.source[:, :1] == sources).sum(0).cumsum(0, dtype=torch.int32)
        place = _Place(
            self.buffer._normal, kept, self.buffer.rank_idx, self.choices, most, tokens, expanded, counts, of_ranks,
            ends, unaligned, made.source, local, match,
        )
        topk_idx = self.topk_idx.clone() if self.copies else self.topk_idx
        weights = None
        if self.topk_weights is not None:
            weights = made.weights[:, : self.choices] if made.weights is not None else _of_choices(
                match, made.payload, self.choices
            )
        rows = _given(made.rows, self.given.dtype)
        scales = self.scales.received(made.scales, made.capacity, made.payload)
        experts = None if self.expand else local.long()
        handle = EPHandle(self, place, topk_idx, self.num_sms)
        return (rows if scales is None else (rows, scales)), experts, weights, handle


class _Made:
    """Tensors of a dispatch's output."""

    def __init__(self, call: _Call, ep: AllToAll, capacity: int) -> None:
        self.capacity = capacity
        device, experts, words = call.rows.device, len(ep.local_experts), call.scales.words

        def make(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.rows, self.counts = make(capacity, call.rows.shape[1], dtype=call.rows.dtype), make(experts)
        self.source = make(capacity, 2)
        self.scales = call.scales.room(capacity, False)
        given: Dict[str, Any] = dict(scales=call.scales.native(self.scales), source=self.source)
        given["column_major"] = call.scales.column_major and call.scales.kind is not None
        self.offsets: Optional[torch.Tensor] = None
        self.weights: Optional[torch.Tensor] = None
        self.payload: Optional[torch.Tensor] = None
        if call.expand:
            self.offsets, self.local = make(experts + 1), make(capacity)
            words += call.choices * (1 if call.topk_weights is None else 2)
            given.update(offsets=self.offsets, row_expert=self.local, align=call.alignment, zero_padding=call.zero)
        else:
            self.local = make(capacity, ep.top_k)
            given["token_experts"] = self.local
            self.weights = make(capacity, ep.top_k, dtype=torch.float32)
            given["token_weights"] = self.weights
        if words:
            self.payload = given["payload"] = make(capacity, words, dtype=torch.float32)
        self.output = Output("contiguous" if call.expand else "token", self.rows, self.counts, **given)


class _Again:
    """A dispatch of new rows by a handle."""

    def __init__(
        self,
        place: _Place,
        rows: torch.Tensor,
        scales: Optional[torch.Tensor],
        topk_weights: Optional[torch.Tensor],
        column_major: bool,
        zero: bool,
        before: Event,
    ) -> None:
        kept = place.kept
        _must_be("x", rows, (kept.tokens, kept.format.hidden), rows.dtype)
        if topk_weights is not None:
            _must_be("topk_weights", topk_weights, (kept.tokens, place.choices), torch.float32)
        self.place, self.given, self.rows, self.topk_weights = place, rows, _carried(rows), topk_weights
        self.scales, self.zero, self.before = _Scales(scales, rows, column_major), zero, before

    def made(self) -> Tuple[Rows, Optional[torch.Tensor], Optional[torch.Tensor]]:
        kept, choices, rows = self.place.kept, self.place.choices, self.rows
        format = Format(
            kept.format.hidden, kept.format.max_tokens, dtype=name_of(rows), scales=self.scales.kind,
            weights=kept.format.weights,
        )
        make, size = torch.zeros if self.zero else torch.empty, (kept.capacity, rows.shape[1])
        out = make(size, dtype=rows.dtype, device=rows.device)
        room, given, payload = self.scales.room(kept.capacity, self.zero), {}, None
        words = ([] if self.topk_weights is None else [self.topk_weights]) + self.scales.payload()
        if words:
            sent = torch.cat(words, 1)
            payload = make((kept.capacity, sent.shape[1]), dtype=torch.float32, device=rows.device)
            given = dict(payload=sent, row_payload=payload)
        if self.before is not None:
            # There are no halves of it.
            self.before.current_stream_wait()
        kept.ep.dispatch_again(
            kept.handle, rows, out, scales=self.scales.sent(), row_scales=self.scales.native(room),
            column_major=self.scales.column_major and self.scales.kind is not None, format=format, **given,
        )
        weights = None
        if self.topk_weights is not None and payload is not None:
            weights = payload[:, :choices]
            if self.place.match is not None:
                weights = _of_choices(self.place.match, payload, 0)
        scales = self.scales.received(room, kept.capacity, payload)
        result = _given(out, self.given.dtype)
        local = None if self.place.match is not None else self.place.local.long()
        return (result if scales is None else (result, scales)), local, weights


def _rows_of(x: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Rows and scales of `x`, of kinds that travel."""
    rows, scales = x if isinstance(x, tuple) else (x, None)
    if rows.dtype == torch.uint8 or "float4" in str(rows.dtype):
        raise NotImplementedError(f"x is {rows.dtype}: there are no nvfp4 rows; give fp8 or bf16 rows")
    if rows.dtype not in _ROWS:
        raise TypeError(f"x is {rows.dtype}: give bf16, fp16, fp32, fp8 (e4m3) or int8 rows")
    if rows.dim() != 2:
        raise ValueError(f"x is {list(rows.shape)}: give [tokens, hidden]")
    if scales is not None:
        if scales.element_size() != 4:
            raise TypeError(f"the scale factors of x are {scales.dtype}: give fp32, or four UE8M0 in each int32")
        if scales.dim() != 2 or len(scales) != len(rows):
            raise ValueError(f"the scale factors of x are {list(scales.shape)}: give [{len(rows)}, words]")
    return rows, scales


def _must_be(name: str, tensor: torch.Tensor, shape: Tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}: give {dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}: give {list(shape)}")


def _must_be_the_same(handle: Any, experts: Optional[int], most: Optional[int], alignment: Optional[int]) -> None:
    """Refuses arguments that are not those of the handle's dispatch."""
    names = ("num_experts", "num_max_tokens_per_rank", "expert_alignment")
    for name, given in zip(names, (experts, most, alignment)):
        if given is not None and given != (known := getattr(handle, name, given)):
            raise ValueError(f"{name} is {given}, and the handle's dispatch had {known}: leave it out")


def _carried(rows: torch.Tensor) -> torch.Tensor:
    """Rows as the library takes them: bytes are bytes."""
    return rows.view(torch.float8_e4m3fn) if rows.dtype == torch.int8 else rows


def _given(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows as the caller gave them."""
    return rows if rows.dtype == dtype else rows.view(dtype)


def _of_choices(match: Optional[torch.Tensor], payload: Optional[torch.Tensor], begin: int) -> torch.Tensor:
    """The word of each row's choice, of those that begin at a column of the payload; 0 of a row that is none."""
    if match is None or payload is None:
        raise AssertionError("weights of rows without their choices")
    return torch.where(match, payload[:, begin : begin + match.shape[1]], 0).sum(1)


def _places(source: torch.Tensor, most: int, ranks: int) -> torch.Tensor:
    """How many tokens came up to each one, int32 `[ranks * most]`, in the order of (rank, token)."""
    number = torch.where(source[:, 0] >= 0, source[:, 0] * most + source[:, 1], ranks * most).long()
    came = source.new_zeros(ranks * most + 1)
    return came.scatter_(0, number, 1)[:-1].cumsum(0, dtype=torch.int32)
