"""`deep_ep.ElasticBuffer`: the calls of DeepEP's version 2 by tokenyard's.

A dispatch without expansion is the token layout, one with expansion the contiguous layout. The weights of expanded
rows, and which choice each row is, come from a payload (`_choices`): each token's experts and weights beside its rows.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple, Union

import torch

from .._hosts import Hosts
from .._native import World
from .._tensors import name_of
from . import _checks, _config
from ._contexts import Normal
from ._elastic_calls import Again, Call, Place, must_be_the_same, rows_of
from ._shared import Event, Rows, Streams, world_of
from .utils import EventHandle, EventOverlap

Dispatched = Tuple[Rows, Optional[torch.Tensor], Optional[torch.Tensor], "EPHandle", EventOverlap]

# The experts' rows in combine.
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)


class EPHandle:
    """The handle of a dispatch, for combines and for dispatches of new rows. R ranks, L local experts, K choices.

    - do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
    - topk_idx: `[tokens, K]`, a copy unless `do_handle_copy` was off.
    - num_recv_tokens, num_expanded_tokens: tokens received, and rows of the expanded layout; without `do_cpu_sync` as
      many as there can be.
    - num_recv_tokens_per_expert_list: L counts, each rounded up to the alignment; without `do_cpu_sync` none.
    - psum_num_recv_tokens_per_scaleup_rank: int32 `[R]`, the tokens received from ranks up to each one.
    - psum_num_recv_tokens_per_expert: int32 `[L]`. Expanded, where the rows of each expert end; the next expert's begin
      there, rounded up to the alignment. Else the sums of the rounded counts up to each one.
    - num_unaligned_recv_tokens_per_expert: int32 `[L]`, the rows of each expert.
    - token_metadata_at_forward, channel_linked_list: None, as within a node."""

    token_metadata_at_forward: Optional[torch.Tensor] = None
    channel_linked_list: Optional[torch.Tensor] = None

    def __init__(self, call: Call, place: Place, topk_idx: torch.Tensor) -> None:
        self.do_expand, self.num_experts, self.expert_alignment = call.expand, call.experts, call.alignment
        self.num_max_tokens_per_rank, self.num_sms, self.topk_idx = place.most, call.num_sms, topk_idx
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
        the choice's rank, for the first choice of each rank; -1 for the others. Computed of topk_idx when it is read."""
        if self._slots is None:
            self._slots = self._place.slots(self.topk_idx, self.num_experts)
        return self._slots


class ElasticBuffer:
    """DeepEP's buffer of version 2. `group`: of torch.distributed, with any backend, or a `tokenyard.World`.
    Collective, as all calls but those that say so. Ranks may be on several hosts, as those of `Buffer`.

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
        sizes = dict(num_max_tokens_per_rank=num_max_tokens_per_rank, num_topk=num_topk, hidden=hidden)
        for name, number in sizes.items():
            _checks.whole(name, number, -(1 << 63))
        seconds = num_gpu_timeout_secs
        if not isinstance(seconds, (int, float)) or not 0 < seconds <= 1e9:
            raise ValueError(f"num_gpu_timeout_secs is {seconds!r}: give seconds above 0, up to 1e9")
        if num_max_tokens_per_rank < 0 or num_topk < 0 or num_topk > 32:
            raise ValueError(
                f"num_max_tokens_per_rank is {num_max_tokens_per_rank} and num_topk {num_topk}: give 0 or more, and of "
                "num_topk at most 32"
            )
        self._world: Optional[World] = world_of(group, None, float(seconds))
        self.group = group
        self.rank_idx, self.num_ranks, self._nodes = self._world.rank, self._world.size, self._world.nodes
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
        self._hosts = Hosts(self._world)
        self._normal = Normal(self._hosts, float(num_gpu_timeout_secs), self.round_tokens)
        self._streams = Streams()

    def destroy(self) -> None:
        """Gives up the context, once no handle of it is alive. Calls are refused from now on. Local; also done
        at the end of a block of `with`."""
        self._normal.close()
        self._hosts.close()
        self._world = None

    def __enter__(self) -> ElasticBuffer:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.destroy()

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
        """Hosts, and ranks of each; 1 and all ranks where hosts have different numbers of ranks. Local."""
        nodes = self._nodes
        return (len(nodes), nodes[0]) if len(set(nodes)) == 1 else (1, self.num_ranks)

    def get_logical_domain_size(self) -> Tuple[int, int]:
        """1 and all ranks: calls address ranks alike, wherever they are. Local."""
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
        rows, scales = rows_of(x)
        if do_zero_padding and not do_expand:
            raise ValueError("do_zero_padding is set without do_expand: rows of other dispatches have no padding")
        before = previous_event_before_epilogue
        if handle is not None:
            must_be_the_same(handle, num_experts, num_max_tokens_per_rank, expert_alignment)
            place = self._placed(handle, do_expand)
            if topk_idx is not None or do_cpu_sync:
                raise ValueError("topk_idx or do_cpu_sync is given with handle, whose dispatch had both: leave them out")
            again = Again(place, rows, scales, topk_weights, use_tma_aligned_col_major_sf, do_zero_padding, before)
            given = [t for t in (rows, scales, topk_weights) if t is not None]
            (got, local, weights), event = self._on_comm(given, previous_event, async_with_compute_stream, again.made)
            return got, local, weights, handle, event
        if topk_idx is None or num_experts is None:
            raise ValueError("topk_idx or num_experts is missing: give both, or handle")
        _checks.tensor("topk_idx", topk_idx, 2)
        most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        call = Call(
            self, rows, scales, topk_idx, topk_weights, num_experts, most,
            1 if expert_alignment is None else expert_alignment, do_expand, do_zero_padding,
            use_tma_aligned_col_major_sf, before, num_sms, do_handle_copy,
        )
        stats = cumulative_local_expert_recv_stats
        counted = do_cpu_sync is None or do_cpu_sync
        inputs = [t for t in (rows, scales, topk_idx, topk_weights, stats) if t is not None]
        call.check(counted, stats)

        def work() -> Any:
            (*results, place, kept_idx), found = call.counted() if counted else call.capacity()
            if stats is not None:
                stats.add_(place.unaligned)
            made = EPHandle(call, place, kept_idx)
            found.raise_with((*results, made, EventOverlap()), sent=call.sent, topk_idx=topk_idx)
            return (*results, made, place.tensors(), kept_idx)

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
        _checks.tensor("x", x, 2)
        kept, dtype = place.kept, x.dtype
        if dtype not in _SUMMED:
            raise TypeError(f"x is {dtype}: give bf16, fp16 or fp32 rows")
        _checks.shaped("x", x, (kept.capacity, kept.format.hidden), (dtype,))
        if topk_weights is not None:
            wanted = (kept.capacity,) if handle.do_expand else (kept.capacity, place.choices)
            _checks.shaped("topk_weights", topk_weights, wanted, (torch.float32,))
        biases = [] if bias is None else list(bias) if isinstance(bias, (tuple, list)) else [bias]
        if len(biases) > 2:
            raise ValueError(f"bias has {len(biases)} tensors: give at most 2")
        for tensor in biases:
            _checks.shaped("bias", tensor, (kept.tokens, kept.format.hidden), (dtype,))
        inputs = [x, *biases] + ([topk_weights] if topk_weights is not None else [])
        for name, tensor in zip(["x"] + ["bias"] * len(biases) + ["topk_weights"], inputs):
            _checks.beside(name, tensor, place.source)
        before = previous_event_before_epilogue
        _checks.event("previous_event_before_epilogue", before)

        def work() -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
            given: Dict[str, Any] = {}
            if topk_weights is not None:
                given = place.weights_back(topk_weights)
            out = x.new_empty((kept.tokens, kept.format.hidden), dtype=torch.float32 if biases else dtype)
            if biases:
                # Of any strides.
                out.copy_(biases[0])
            for tensor in biases[1:]:
                out += tensor.float()
            combines = self._normal.combines
            if before is not None and not given:
                combines.halves(
                    lambda: kept.ep.combine_send(x, kept.handle, dtype=name_of(x)),
                    lambda sent: before.current_stream_wait(),
                    lambda sent, _: kept.ep.combine_recv(sent, out, accumulate=bool(biases)),
                    lambda sent: None,
                )
            else:
                combines.finish()
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

    def _placed(self, handle: Any, expand: bool) -> Place:
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
