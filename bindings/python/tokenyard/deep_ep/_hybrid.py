"""`deep_ep.HybridEPBuffer`: HybridEP's calls by tokenyard's. Routing comes as a bool map of tokens and experts.

The map becomes choices, as many of each token as the token with the most has on any rank. The context is made for that
number, and for the most tokens of a rank. A rank with more of either sends a notice in place of its tokens (`_growth`),
and all ranks make a larger context and dispatch once more. On a GPU the device decides whether it sends the notice, so
the host waits for nothing but counts.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch

from .. import _choices, _growth
from .._calls import AllToAll
from .._errors import NO_EXPERT, Found
from .._hosts import Hosts
from .._native import Format, Output, World
from .._tensors import device_of, in_memory, name_of
from ..ops import _weigh
from . import _checks
from ._contexts import Counted, Kept, Unreceived, counted, refuse_capture
from ._shared import must_divide, world_of

_MOST_CHOICES = 32
_ROWS = (torch.bfloat16, torch.float16, torch.float32)
_Tensors = Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor]]


class HybridHandle(Tuple[Any, ...]):
    """The handle of a dispatch. Of `dispatch_with_permute` eleven members: [3] int32 `[1]`, the tokens that came, where
    the host knows them; [7] int32 `[local experts]`, the rows of each expert without padding; [8] the tokens of this
    rank; [10] int32 `[1]`, 1 where rows were dropped. Of `dispatch` seven: [3] int32 `[1]`, the rows; [4] bool
    `[rows, local experts]`, which experts each row is for; [5] the tokens of this rank. The others are None."""

    routed: _Routed


_ByExpert = Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], torch.Tensor, HybridHandle]
_ByRank = Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], HybridHandle]


class _Routed(NamedTuple):
    """What the calls of a handle need."""

    owner: Unreceived
    """Of the buffer."""
    kept: Kept
    experts: int
    choices: torch.Tensor
    """int64 `[tokens, top_k]`, -1 for none."""
    of_rows: torch.Tensor
    """Permuted: int32 `[rows]`, the local expert, -1 for none. Else int32 `[rows, top_k]`, at each choice's place."""
    rows: int
    """Rows that the caller gets; the layout may have more, which were dropped."""
    counts: torch.Tensor
    """Permuted: int64 `[local experts]`, padded rows of each."""
    permuted: bool


class _Routing(NamedTuple):
    """The routing of a call."""

    map: torch.Tensor
    """bool `[tokens, experts]`."""
    probs: Optional[torch.Tensor]
    """fp32 of that shape."""
    wrong: Optional[torch.Tensor]
    """bool, on the device: whether `topk_idx` names what is no expert."""


class _Made(NamedTuple):
    """A context, and what it was made for."""

    kind: Tuple[int, int, str]
    fp32: bool
    room: int
    ep: AllToAll


class HybridEPBuffer:
    """HybridEP's communication buffer. `group`: of torch.distributed, with any backend, or a `tokenyard.World`.

    `max_num_of_tokens_per_rank` is the number of tokens that the context has room for from the start; ranks may have
    other numbers of tokens, none included, and more. A context is made by the first call, and again by a call with
    another hidden size, number of experts or device, with fp32 rows for the first time, with more tokens on some rank
    than there is room for, or with more choices of some token than any had before. All calls are collective."""

    timeout_seconds: float = 100.0
    """After how long a call gives up waiting for another rank."""
    round_tokens: int = 16384
    """Tokens of a rank in a round. Calls go in several rounds where a rank may have more; memory is that of one."""

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: Optional[int] = None,
        num_sms_combine_api: Optional[int] = None,
        num_sms_preprocessing_api: Optional[int] = None,
        num_blocks_permute: Optional[int] = None,
        num_blocks_unpermute: Optional[int] = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: Optional[int] = None,
        use_mnnvl: Optional[bool] = None,
    ) -> None:
        tokens = _checks.whole("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank, 0)
        sms = dict(num_sms_dispatch_api=num_sms_dispatch_api, num_sms_combine_api=num_sms_combine_api)
        known = [_checks.whole(name, number, 0) for name, number in sms.items() if number is not None]
        self.group = group
        self._world: Optional[World] = world_of(group, None, self.timeout_seconds)
        self.rank, self.group_size = self._world.rank, self._world.size
        nodes = self._world.nodes
        self.num_of_nodes, self.node_rank = len(nodes), sum(sum(nodes[: i + 1]) <= self.rank for i in range(len(nodes)))
        self.local_rank = self.rank - sum(nodes[: self.node_rank])
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = nodes[self.node_rank]
        self._hosts = Hosts(self._world)
        self._tokens, self._sms = tokens, max(known, default=0) or None
        self._made: Optional[_Made] = None
        self._dispatches = Unreceived()

    def destroy(self) -> None:
        """Gives up the context, once no handle of it is alive. Calls are refused from now on. Local; also done at the
        end of a block of `with`."""
        self._made = self._world = None
        self._dispatches.drop()
        self._hosts.close()

    def __enter__(self) -> HybridEPBuffer:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.destroy()

    def empty_jit_cache(self) -> None:
        """Nothing: no kernels are compiled at run time. Local."""

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: Optional[torch.Tensor] = None,
        topk_weights: Optional[torch.Tensor] = None,
        num_of_experts_per_rank: Optional[int] = None,
        num_of_experts: Optional[int] = None,
        use_fp8: Optional[bool] = None,
        routing_map: Optional[torch.Tensor] = None,
        probs: Optional[torch.Tensor] = None,
        scaling_factor: Optional[torch.Tensor] = None,
        num_permuted_tokens: Optional[int] = None,
        pad_multiple: Optional[int] = None,
        handle: Optional[Tuple[Any, ...]] = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: Optional[int] = None,
        use_host_meta: Optional[bool] = None,
    ) -> _ByExpert:
        """A row for each (token, expert), expert after expert in the order of (source rank, token), the rows of each
        expert padded with zeros to a multiple of `pad_multiple`: rows `[rows, hidden]`, probabilities fp32 `[rows]`,
        scales fp32 `[rows, hidden / 128]`, padded rows of each expert int64 `[local experts]`, handle.

        `hidden` `[tokens, hidden]`: bf16, fp16, fp32, or fp8 (also as uint8) with `scaling_factor`. `routing_map` bool
        and `probs` fp32 `[tokens, experts]`; or `topk_idx`, -1 for none, and `topk_weights` `[tokens, top_k]`. By
        `handle` new rows, and probabilities if they are given, go to the places of that dispatch. Numbers in `topk_idx`
        that are no experts raise `ValueError`; where nobody waits for counts, a later call raises `RoutingError`.

        There are as many rows as come, or `num_permuted_tokens`: then further rows are zeros, and `handle[-1]` is 1 if
        the last rows were dropped because more came. The host waits for counts, unless `non_blocking` is set and rows
        are on a GPU."""
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        self._open()
        # 0 is 1, as None is.
        align = 0 if pad_multiple is None else _checks.whole("pad_multiple", pad_multiple, 0, (1 << 31) - 1)
        align = max(1, align)
        rows = None if num_permuted_tokens is None else _checks.whole("num_permuted_tokens", num_permuted_tokens, 0)
        if non_blocking and (rows is None or rows % align != 0):
            raise ValueError(
                f"num_permuted_tokens is {rows}: with non_blocking give 0 or more, a multiple of pad_multiple, {align}"
            )
        with torch.no_grad():
            if handle is not None:
                routed = self._routed(handle, permuted=True)
                probs = _probs_of(hidden, topk_idx, topk_weights, probs, routed.experts)
                again = _again(routed, _Input(hidden, scaling_factor), probs)
                return (*_cut(again, routed.rows, rows), routed.counts, _as_handle(handle))
            given = _Input(hidden, scaling_factor)
            routing = _routing_of(hidden, routing_map, probs, topk_idx, topk_weights, num_of_experts)
            call = _Call(self, given, routing, num_of_experts_per_rank)
            if non_blocking and rows is not None and not self._host_waits(hidden):
                return call.unwaited(rows, align)
            call.must_name_experts()
            return call.permuted(rows, align)

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: Optional[torch.Tensor] = None,
        handle: Optional[Tuple[Any, ...]] = None,
        pad_multiple: Optional[int] = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: Optional[int] = None,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """The sums `[tokens, hidden]` of the rows of each token, without weights, and `probs` fp32 `[rows]` as
        `[tokens, experts]`, 0 where a token does not go. Sums are fp32; each rank's part and the sum are rounded once.
        `handle`: of `dispatch_with_permute`."""
        return self._combine(hidden, probs, self._routed(handle, permuted=True))

    def dispatch(
        self,
        hidden: torch.Tensor,
        scaling_factor: Optional[torch.Tensor] = None,
        topk_idx: Optional[torch.Tensor] = None,
        topk_weights: Optional[torch.Tensor] = None,
        num_of_experts: Optional[int] = None,
        probs: Optional[torch.Tensor] = None,
        routing_map: Optional[torch.Tensor] = None,
        num_dispatched_tokens_tensor: Optional[torch.Tensor] = None,
        num_dispatched_tokens: Optional[int] = None,
        handle: Optional[Tuple[Any, ...]] = None,
    ) -> _ByRank:
        """A row for each (token, rank), in the order of (source rank, token): rows, probabilities fp32
        `[rows, experts]`, 0 but for this rank's experts, scales, handle. Arguments are those of
        `dispatch_with_permute`. The host waits for counts."""
        with torch.no_grad():
            if handle is not None:
                routed = self._routed(handle, permuted=False)
                probs = _probs_of(hidden, topk_idx, topk_weights, probs, routed.experts)
                return (*_again(routed, _Input(hidden, scaling_factor), probs), _as_handle(handle))
            self._open()
            given = _Input(hidden, scaling_factor)
            routing = _routing_of(hidden, routing_map, probs, topk_idx, topk_weights, num_of_experts)
            call = _Call(self, given, routing, None)
            call.must_name_experts()
            return call.by_rank()

    def combine(
        self, hidden: torch.Tensor, probs: Optional[torch.Tensor] = None, handle: Optional[Tuple[Any, ...]] = None
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """The sums `[tokens, hidden]` of the rows of each token over ranks, and `probs` as fp32 `[tokens, experts]`.
        `probs` is given as fp32 `[rows, experts]`, of which this rank's experts count. `handle`: of `dispatch`."""
        return self._combine(hidden, probs, self._routed(handle, permuted=False))

    # Inside

    @staticmethod
    def _host_waits(hidden: torch.Tensor) -> bool:
        """Whether calls are done when they return, with `non_blocking` as without."""
        return not hidden.is_cuda

    def _open(self) -> World:
        if self._world is None:
            raise RuntimeError("this HybridEPBuffer was destroyed: make a new one")
        return self._world

    def _routed(self, handle: Optional[Tuple[Any, ...]], permuted: bool) -> _Routed:
        """What the calls of a handle of this buffer need."""
        self._open()
        by = "dispatch_with_permute" if permuted else "dispatch"
        if not isinstance(handle, HybridHandle):
            raise TypeError(f"handle is a {type(handle).__name__}: give what {by} returned")
        if handle.routed.permuted != permuted:
            raise ValueError(f"handle is of the other dispatch: give what {by} returned")
        if handle.routed.owner is not self._dispatches:
            raise ValueError("handle is of another HybridEPBuffer: give it to the one whose dispatch returned it")
        return handle.routed

    def _combine(
        self, hidden: torch.Tensor, probs: Optional[torch.Tensor], routed: _Routed
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        _checks.tensor("hidden", hidden, 2, _ROWS)
        kept, rows = routed.kept, hidden.shape[0]
        _checks.beside("hidden", hidden, routed.of_rows)
        if rows < routed.rows:
            raise ValueError(f"hidden has {rows} rows: give the {routed.rows} of the dispatch")
        _checks.shaped("hidden", hidden, (rows, kept.format.hidden))
        if probs is not None:
            _must_be_probs(probs, [rows] if routed.permuted else [rows, routed.experts], hidden)
        with torch.no_grad():
            hidden = _resized(hidden, routed.rows, kept.capacity)
            if probs is None:
                return kept.ep.combine(hidden, kept.handle, dtype=name_of(hidden)), None
            words = _resized(probs, routed.rows, kept.capacity)
            tokens, choices = routed.choices.shape
            if routed.permuted:
                # Each choice is one row, whose word comes back with its bits.
                words = words.reshape(-1, 1)
                got = words.new_empty((tokens, choices, 1))
            else:
                # Each row has the words of the token's choices here, and ranks' words are added up.
                of_rows, first = routed.of_rows, self.rank * (routed.experts // self.group_size)
                place = (of_rows.clamp(min=0) + first).long()
                words = torch.where(of_rows >= 0, words.gather(1, place), 0)
                got = words.new_empty((tokens, choices))
            out = kept.ep.combine(
                hidden, kept.handle, dtype=name_of(hidden), payload=words, payload_out=got
            )
            return out, _spread(got.view(tokens, choices), routed.choices, routed.experts)

    def _context(self, given: _Input, experts: int, routing_map: torch.Tensor) -> AllToAll:
        """The context for a call like this one, made if ranks have none. What decides is the same on all ranks."""
        # It may make a larger context.
        self._dispatches.finish()
        made, kind = self._made, (given.x.shape[1], experts, device_of(given.x))
        if made is not None and made.kind == kind and made.fp32 >= given.fp32:
            return made.ep
        return self._make(given, experts, routing_map)

    def _make(self, given: _Input, experts: int, routing_map: torch.Tensor) -> AllToAll:
        """Makes a context for the tokens and choices that ranks have now, and had. Collective."""
        refuse_capture(given.x)
        x, made = given.x, self._made
        tokens, choices = x.shape[0], int(routing_map.sum(1).max()) if x.shape[0] else 0
        before, fp32 = self._tokens, given.fp32
        if made is not None and made.kind[0] == x.shape[1]:
            before, fp32 = max(before, made.room), fp32 or made.fp32
            choices = max(choices, min(made.ep.top_k, experts))
        world = self._open()
        tokens, choices = _growth.most(world, max(tokens, before), max(choices, 1))
        if choices > _MOST_CHOICES:
            raise ValueError(f"a token of some rank goes to {choices} experts: {_MOST_CHOICES} is the most")
        ranks = self.group_size
        room, dtype = _growth.rounded(tokens, world.most_tokens), "fp32" if fp32 else "bf16"
        # Its memory first, as the new one may need it. Handles keep it as long as they live.
        self._made = made = None
        self._dispatches.drop()
        ep = self._hosts.context(
            hidden=x.shape[1], experts=experts + ranks, top_k=choices, max_tokens_per_rank=room,
            device=device_of(x), dtype=dtype, combine_dtype=dtype, weights="none", payload_words=choices,
            dispatch_payload_words=2 * choices, placement=_growth.placement(experts, ranks),
            timeout=self.timeout_seconds, sms=self._sms,
            round_tokens=self.round_tokens if room > self.round_tokens else None,
        )
        self._made = _Made((x.shape[1], experts, device_of(x)), fp32, room, ep)
        return ep


class _Input:
    """Rows of a call, and their scales."""

    def __init__(self, hidden: torch.Tensor, scales: Optional[torch.Tensor]) -> None:
        _checks.tensor("hidden", hidden, 2, (*_ROWS, torch.float8_e4m3fn, torch.uint8))
        self.as_bytes = hidden.dtype == torch.uint8
        self.x = hidden.view(torch.float8_e4m3fn) if self.as_bytes else hidden
        # HybridEP's callers give scales of other rows, too.
        self.scales = scales if self.x.dtype == torch.float8_e4m3fn else None
        if self.scales is not None:
            _checks.tensor("scaling_factor", scales, 2, (torch.float32, torch.int32))
            tokens, columns = hidden.shape
            block = 128 if self.scales.dtype == torch.float32 else 512
            _checks.shaped("scaling_factor", self.scales, (tokens, -(-columns // block)))
            _checks.beside("scaling_factor", self.scales, hidden)
        self.fp32 = self.x.dtype == torch.float32

    def format(self, max_tokens: int) -> Format:
        """The format of a call."""
        scales = None if self.scales is None else "fp32" if self.scales.dtype == torch.float32 else "ue8m0"
        combine = "bf16" if self.x.dtype == torch.float8_e4m3fn else name_of(self.x)
        return Format(
            self.x.shape[1], max_tokens, dtype=name_of(self.x), scales=scales, combine_dtype=combine, weights="none"
        )

    def out(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in the caller's dtype."""
        return rows.view(torch.uint8) if self.as_bytes else rows


class _Call:
    """A dispatch with routing."""

    def __init__(
        self,
        buffer: HybridEPBuffer,
        given: _Input,
        routing: _Routing,
        experts_per_rank: Optional[int],
    ) -> None:
        self.buffer, self.given, (self.map, self.probs, self.wrong) = buffer, given, routing
        self.ranks, self.experts = buffer.group_size, self.map.shape[1]
        must_divide(self.experts, self.ranks)
        if experts_per_rank is not None and experts_per_rank * self.ranks != self.experts:
            raise ValueError(
                f"num_of_experts_per_rank is {experts_per_rank}, and routing_map has {self.experts} experts for "
                f"{self.ranks} ranks: give {self.experts // self.ranks}"
            )
        self.local = self.experts // self.ranks

    def must_name_experts(self) -> None:
        """Refuses numbers in `topk_idx` that are no experts. The host waits for the device."""
        if self.wrong is not None and bool(self.wrong):
            raise ValueError(f"topk_idx names what is no expert: give 0 to {self.experts - 1}, or -1 for none")

    def permuted(self, rows: Optional[int], align: int) -> _ByExpert:
        """The host waits for the counts."""

        def padded_of(experts: List[int]) -> List[int]:
            return [-(-count // align) * align for count in experts]

        done, choices = self.counted(
            "contiguous", align, lambda experts, sources: max(sum(padded_of(experts)), rows or 0)
        )
        padded, sources = padded_of(done.experts), done.sources
        needed = sum(padded)
        rows = needed if rows is None else rows
        got, kept = done.made, self.kept(done.ep, done.handle, max(needed, rows))
        device = self.given.x.device
        ends = list(itertools.accumulate(padded))
        starts = [0, *ends[:-1]]
        dropped = any(start + count > rows for start, count in zip(starts, done.experts) if count)
        if needed > rows:
            # What is past the rows is dropped, and experts have what is left.
            padded = [min(end, rows) - min(start, rows) for start, end in zip(starts, ends)]
            got.counts[: self.local].clamp_(max=torch.tensor(padded, dtype=torch.int32, device=device))
        flag = torch.full((1,), int(dropped), dtype=torch.int32, device=device)
        routed = _Routed(
            self.buffer._dispatches, kept, self.experts, choices, got.also["row_expert"], rows,
            torch.tensor(padded, dtype=torch.int64, device="cpu"), True,
        )
        came = torch.tensor([sum(sources)], dtype=torch.int32, device="cpu")
        results = self.results(got, routed, (None, None, None, came, None, None, None, got.counts[: self.local],
                                             choices.shape[0], None, flag))
        done.found.raise_with(results)
        return results

    def unwaited(self, rows: int, align: int) -> _ByExpert:
        """Nobody waits for counts. Every rank has as many tokens as the context has room for, or fewer."""
        x = self.given.x
        ep = self.buffer._context(self.given, self.experts, self.map)
        if x.shape[0] > ep.format.max_tokens:
            ep = self.buffer._make(self.given, self.experts, self.map)
        choices, over = _choices_of(self.map, ep.top_k)
        # A token with more choices, or of what is no expert, is one that cannot be sent: an error of a later call.
        refused = over if self.wrong is None else over | self.wrong
        sent_choices = torch.where(refused, NO_EXPERT, choices)
        output, got = self.output(ep, "contiguous", align, rows, drop=True)
        found = Found()

        def send() -> Any:
            return self.send(ep, x, sent_choices, self.given.scales, choices, False)

        handle = self.buffer._dispatches.halves(
            lambda: found.sending(send), lambda sent: output,
            lambda sent, output: found.receive(partial(ep.dispatch_recv, sent, output)),
        )
        kept = self.kept(ep, handle, rows)
        padded = got.offsets[: self.local + 1].long().diff()
        routed = _Routed(
            self.buffer._dispatches, kept, self.experts, choices, got.also["row_expert"], rows, padded, True
        )
        flag = (got.also["row_count"] > rows).int()
        results = self.results(got, routed, (None,) * 7 + (got.counts[: self.local], choices.shape[0], None, flag))
        found.raise_with(results)
        return results

    def by_rank(self) -> _ByRank:
        """A row for each (token, rank). The host waits for the counts."""
        done, choices = self.counted("token", 1, lambda experts, sources: sum(sources))
        got, kept = done.made, self.kept(done.ep, done.handle, sum(done.sources))
        places = torch.where(got.token_experts >= 0, got.token_experts, self.local).long()
        named = torch.zeros((places.shape[0], self.local + 1), dtype=torch.bool, device=places.device)
        named = named.scatter_(1, places, True)[:, : self.local]
        routed = _Routed(
            self.buffer._dispatches, kept, self.experts, choices, got.token_experts, kept.capacity, got.counts, False
        )
        came = torch.tensor([kept.capacity], dtype=torch.int32, device="cpu")
        rows, probs, scales, _counts, handle = self.results(
            got, routed, (None, None, None, came, named.contiguous(), choices.shape[0], None)
        )
        done.found.raise_with((rows, probs, scales, handle))
        return rows, probs, scales, handle

    def counted(
        self, layout: str, align: int, room: Callable[[List[int], List[int]], int], later: bool = False
    ) -> Tuple[Counted, torch.Tensor]:
        """Sends tokens until every rank has room for them: what came, and choices. `room`: the rows of an output for
        counts of experts and of sources. `later`: rows are nobody's."""
        all_later = later

        def receive(ep: AllToAll, experts: List[int], sources: List[int], later: bool) -> Tuple[Output, Any]:
            if experts[-1] == 0 and not later and not all_later:
                return self.output(ep, layout, align, room(experts[:-1], sources))
            # Notices, too, are received first, as each dispatch must be.
            return self.output(ep, layout, 1, sum(experts if layout == "contiguous" else sources))

        def repeat() -> None:
            self.buffer._make(self.given, self.experts, self.map)
            self.counted(layout, align, room, later=True)

        while True:
            ep = self.buffer._context(self.given, self.experts, self.map)
            choices, over = _choices_of(self.map, ep.top_k)
            done = counted(
                self.buffer._dispatches, ep, lambda ep: self.send_or_notify(ep, choices, over, layout), receive, repeat
            )
            if done.experts.pop() == 0:
                return done, choices
            # Some rank needs a larger context.
            del ep, done
            self.buffer._make(self.given, self.experts, self.map)

    def send_or_notify(self, ep: AllToAll, choices: torch.Tensor, over: torch.Tensor, layout: str) -> Any:
        """Sends tokens, or where they are more than the context has room for the notice that goes in their place.
        `over`: whether a token has more choices."""
        x, scales = self.given.x, self.given.scales
        slots = x.shape[0] * ep.top_k
        if x.shape[0] > ep.format.max_tokens or (slots < self.ranks and bool(over)):
            notice_x, sent_choices = _growth.notice(x, self.experts, ep.top_k, self.ranks)
            notice_scales = None if scales is None else scales.new_zeros((notice_x.shape[0], scales.shape[1]))
            return self.send(ep, notice_x, sent_choices, notice_scales, sent_choices, True, layout)
        sent_choices = choices
        if slots >= self.ranks:
            notice = torch.full((slots,), -1, dtype=torch.int64, device=x.device)
            notice[: self.ranks] = torch.arange(self.experts, self.experts + self.ranks, device=x.device)
            sent_choices = torch.where(over, notice.view_as(choices), choices)
        return self.send(ep, x, sent_choices, scales, choices, True, layout)

    def send(
        self,
        ep: AllToAll,
        x: torch.Tensor,
        sent_choices: torch.Tensor,
        scales: Optional[torch.Tensor],
        choices: torch.Tensor,
        counts: bool,
        layout: str = "contiguous",
    ) -> Any:
        payload = None
        if self.probs is not None:
            # Those of a notice are of no use.
            same = x is self.given.x
            weights = _gathered(self.probs, choices) if same else x.new_zeros(choices.shape, dtype=torch.float32)
            payload = torch.cat((_choices.words(choices), weights), 1) if layout == "contiguous" else weights
        return ep.dispatch_send(
            x, sent_choices, scales=scales, payload=payload, format=self.given.format(ep.format.max_tokens),
            counts=counts,
        )

    def output(
        self, ep: AllToAll, layout: str, align: int, capacity: int, drop: bool = False
    ) -> Tuple[Output, Any]:
        """An output of so many rows, and its tensors. `drop`: rows without room are left out."""
        format = self.given.format(ep.format.max_tokens)
        words = 0 if self.probs is None else ep.top_k * (2 if layout == "contiguous" else 1)
        also = ("row_expert", "row_count") if layout == "contiguous" else ()
        output, got = ep.output(
            self.given.x, layout=layout, align=align, capacity=capacity, payload_words=words, format=format, also=also,
            drop_overflow=drop,
        )
        _clear(got.rows, got.scales)
        return output, got

    def kept(self, ep: AllToAll, handle: Any, capacity: int) -> Kept:
        """What later calls of a handle need."""
        return Kept(ep, handle, self.given.x.shape[0], capacity, self.given.format(ep.format.max_tokens))

    def results(self, got: Any, routed: _Routed, members: Tuple[Any, ...]) -> _ByExpert:
        probs = None if got.payload is None else _row_probs(routed, got.payload, self.buffer.rank)
        handle = HybridHandle(members)
        handle.routed = routed
        made = (self.given.out(got.rows), probs, got.scales)
        return (*_cut(made, routed.rows, routed.rows), routed.counts, handle)


def _again(routed: _Routed, given: _Input, probs: Optional[torch.Tensor]) -> _Tensors:
    """New rows of an earlier dispatch's tokens, in its layout."""
    kept, x, scales = routed.kept, given.x, given.scales
    if x.shape[0] != kept.tokens:
        raise ValueError(f"hidden has {x.shape[0]} tokens: give the {kept.tokens} of the handle's dispatch")
    _checks.shaped("hidden", x, (kept.tokens, kept.format.hidden))
    _checks.beside("hidden", x, routed.of_rows)
    rows = torch.empty((kept.capacity, x.shape[1]), dtype=x.dtype, device=x.device)
    row_scales = None if scales is None else scales.new_empty((kept.capacity, scales.shape[1]))
    _clear(rows, row_scales)
    payload = got = None
    if probs is not None:
        _must_be_probs(probs, [routed.choices.shape[0], routed.experts], x)
        weights = _gathered(probs, routed.choices)
        payload = torch.cat((_choices.words(routed.choices), weights), 1) if routed.permuted else weights
        got = payload.new_empty((kept.capacity, payload.shape[1]))
    format = Format(
        kept.format.hidden, kept.format.max_tokens, dtype=name_of(x), scales=given.format(1).scales,
        combine_dtype=kept.format.combine_dtype, weights="none",
    )
    routed.owner.finish()
    kept.ep.dispatch_again(
        kept.handle, x, rows, scales=scales, row_scales=row_scales, payload=payload, row_payload=got, format=format
    )
    row_probs = None if got is None else _row_probs(routed, got, None)
    return given.out(rows), row_probs, row_scales


def _row_probs(routed: _Routed, payload: torch.Tensor, rank: Optional[int]) -> torch.Tensor:
    """Permuted: fp32 `[rows]`, of the choice that each row is. Else fp32 `[rows, experts]`."""
    ep = routed.kept.ep
    if routed.permuted:
        made = {"row_expert": routed.of_rows, "payload": payload, "row_weights": payload.new_empty(payload.shape[0])}
        _weigh(ep, made)
        return made["row_weights"]
    first = ep.local_experts[0]
    return _spread(payload, torch.where(routed.of_rows >= 0, routed.of_rows + first, -1).long(), routed.experts)


def _choices_of(routing_map: torch.Tensor, choices: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token int64 `[tokens, choices]`, in ascending order, -1 for none; and a bool, on the device,
    whether some token has more."""
    tokens, experts = routing_map.shape
    number = routing_map.cumsum(1)
    place = torch.where(routing_map, number - 1, choices).clamp(max=choices)
    made = torch.full((tokens, choices + 1), -1, dtype=torch.int64, device=routing_map.device)
    made.scatter_(1, place, torch.arange(experts, device=routing_map.device).expand(tokens, experts))
    return made[:, :choices].contiguous(), (number[:, -1] > choices).any()


def _gathered(probs: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """Of each choice its probability, 0 of none."""
    return torch.where(choices >= 0, probs.gather(1, choices.clamp(min=0)), 0)


def _spread(words: torch.Tensor, choices: torch.Tensor, experts: int) -> torch.Tensor:
    """`[rows, experts]` of `[rows, choices]`, 0 where there is none."""
    made = words.new_zeros((words.shape[0], experts + 1))
    made.scatter_(1, torch.where((choices >= 0) & (choices < experts), choices, experts), words)
    return made[:, :experts].contiguous()


def _routing_of(
    hidden: torch.Tensor,
    routing_map: Optional[torch.Tensor],
    probs: Optional[torch.Tensor],
    topk_idx: Optional[torch.Tensor],
    topk_weights: Optional[torch.Tensor],
    experts: Optional[int],
) -> _Routing:
    """The routing of a call."""
    wrong = None
    if routing_map is None:
        if topk_idx is None or experts is None:
            raise ValueError("routing_map is missing: give it, or topk_idx and num_of_experts, or handle")
        experts = _checks.whole("num_of_experts", experts, 1, 1 << 20)
        given = _probs_of(hidden, topk_idx, topk_weights, probs, experts)
        choices = topk_idx.long()
        wrong = ((choices < -1) | (choices >= experts)).any()
        words = torch.ones(choices.shape, dtype=torch.float32, device=choices.device)
        routing_map, probs = _spread(words, choices, experts) > 0, given
    tokens = hidden.shape[0]
    if not isinstance(routing_map, torch.Tensor):
        raise TypeError(f"routing_map is a {type(routing_map).__name__}: give a tensor")
    if routing_map.dtype != torch.bool or routing_map.dim() != 2 or routing_map.shape[0] != tokens:
        found = f"routing_map is {routing_map.dtype} {list(routing_map.shape)}"
        raise ValueError(f"{found}: give bool [{tokens}, experts], as hidden has rows")
    _checks.beside("routing_map", routing_map, hidden)
    in_memory("routing_map", routing_map)
    if probs is not None:
        _must_be_probs(probs, list(routing_map.shape), hidden)
    return _Routing(routing_map, probs, wrong)


def _must_be_probs(probs: Any, shape: List[int], hidden: torch.Tensor) -> None:
    """Refuses what are no probabilities of this shape."""
    if not isinstance(probs, torch.Tensor):
        raise TypeError(f"probs is a {type(probs).__name__}: give a tensor")
    if probs.dtype != torch.float32 or list(probs.shape) != shape:
        raise ValueError(f"probs is {probs.dtype} {list(probs.shape)}: give float32 {shape}")
    _checks.beside("probs", probs, hidden)
    in_memory("probs", probs)


def _probs_of(
    hidden: torch.Tensor,
    topk_idx: Optional[torch.Tensor],
    topk_weights: Optional[torch.Tensor],
    probs: Optional[torch.Tensor],
    experts: int,
) -> Optional[torch.Tensor]:
    """Probabilities of all experts."""
    if topk_idx is None:
        return probs
    _checks.choices(topk_idx)
    _checks.shaped("topk_idx", topk_idx, (hidden.shape[0], topk_idx.shape[1]))
    _checks.beside("topk_idx", topk_idx, hidden)
    in_memory("topk_idx", topk_idx)
    if probs is not None:
        raise ValueError("probs is given with topk_idx: give topk_weights in its place")
    if topk_weights is None:
        return None
    _checks.shaped("topk_weights", topk_weights, tuple(topk_idx.shape), (torch.float32,))
    _checks.beside("topk_weights", topk_weights, hidden)
    in_memory("topk_weights", topk_weights)
    return _spread(topk_weights, topk_idx.long(), experts)


def _clear(rows: torch.Tensor, scales: Optional[torch.Tensor]) -> None:
    """Rows that none fills are 0."""
    rows.view(torch.uint8).zero_()
    if scales is not None:
        scales.zero_()


def _resized(rows: torch.Tensor, used: int, wanted: int) -> torch.Tensor:
    """The first `used` rows and zeros, `wanted` in all."""
    if rows.shape[0] == used == wanted:
        return rows.contiguous()
    made = rows.new_zeros((wanted, *rows.shape[1:]))
    made[:used] = rows[:used]
    return made


def _cut(made: _Tensors, used: int, wanted: Optional[int]) -> _Tensors:
    """As many rows as the caller asks for, of which the first `used` count."""
    rows, probs, scales = made
    wanted = used if wanted is None else wanted

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:wanted] if wanted <= used else _resized(tensor, used, wanted)

    return cut(rows), None if probs is None else cut(probs), None if scales is None else cut(scales)


def _as_handle(handle: Tuple[Any, ...]) -> HybridHandle:
    assert isinstance(handle, HybridHandle)
    return handle
