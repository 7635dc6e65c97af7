"""The calls behind `ElasticBuffer`: their tensors, and what handles keep of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Tuple

import torch

from .. import _choices, _growth
from .._calls import AllToAll
from .._errors import Found
from .._native import Error, Format, Output
from .._tensors import device_of, name_of
from . import _checks
from ._contexts import Kept, Normal, Offered, Wanted
from ._shared import Event, Rows, must_divide

if TYPE_CHECKING:
    from ._elastic import ElasticBuffer

# Of a token's payload.
_MOST_WORDS = 4096
_ROWS = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8)


class Place(NamedTuple):
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


class Scales:
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


class Call:
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
        most, sms = _checks.whole("num_max_tokens_per_rank", most, 0), _checks.whole("num_sms", sms, 0)
        self.buffer, self.given, self.rows = buffer, rows, _carried(rows)
        self.experts, self.most = must_divide(experts, buffer.num_ranks), most
        # Ends of experts are int32.
        most_aligned = ((1 << 31) - 1) // (self.experts // buffer.num_ranks)
        alignment = _checks.whole("expert_alignment", alignment, 1, most_aligned)
        self.topk_idx, self.topk_weights, self.alignment = topk_idx, topk_weights, alignment
        self.expand, self.zero, self.before, self.copies = expand, zero, before, copies
        self.sms = sms or None
        self.num_sms = sms or buffer.get_theoretical_num_sms(experts, topk_idx.shape[-1])
        self.scales = Scales(scales, rows, column_major)
        self.local_experts, self.choices = experts // buffer.num_ranks, topk_idx.shape[-1]

    def check(self, counted: bool, stats: Optional[torch.Tensor]) -> None:
        """Refuses arguments before other ranks are asked for anything. `stats`: what counts are added to."""
        tokens = len(self.rows)
        if stats is not None:
            _checks.shaped("cumulative_local_expert_recv_stats", stats, (self.local_experts,), (torch.int32,))
            if stats.stride(0) == 0 and self.local_experts > 1:
                raise ValueError("cumulative_local_expert_recv_stats has one number for all experts: give one for each")
        if self.topk_idx.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"topk_idx is {self.topk_idx.dtype}: give int64 or int32")
        if self.topk_idx.dim() != 2 or len(self.topk_idx) != tokens or not 1 <= self.choices <= 32:
            shape = list(self.topk_idx.shape)
            raise ValueError(f"topk_idx is {shape}: give [{tokens}, top_k], with top_k from 1 to 32")
        if self.topk_weights is not None:
            _checks.shaped("topk_weights", self.topk_weights, (tokens, self.choices), (torch.float32,))
        if self.rows.element_size() == 1 and self.rows.shape[1] % 128 != 0:
            raise ValueError(f"x has {self.rows.shape[1]} columns: give a multiple of 128 where elements are bytes")
        most = _MOST_WORDS - 2 * max(self.choices, self.buffer._choices)
        if self.scales.words > most:
            raise ValueError(
                f"the scale factors of x are {[tokens, self.scales.words]}: give at most {most} words, unless they are "
                "fp32 or packed UE8M0 by blocks of 128"
            )
        others = dict(topk_idx=self.topk_idx, topk_weights=self.topk_weights, cumulative_local_expert_recv_stats=stats)
        for name, tensor in {"scale factors of x": self.scales.given, **others}.items():
            if tensor is not None:
                _checks.beside(name, tensor, self.rows)
        _checks.event("previous_event_before_epilogue", self.before)
        if self.most == 0 and not counted:
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
        # Of few tokens it has the kernels of small calls, however many the context has room for.
        return Format(
            self.rows.shape[1], self.most or ep.format.max_tokens, dtype=name_of(self.rows), scales=self.scales.kind,
            combine_dtype=combine, weights=weights,
        )

    def sent(self) -> torch.Tensor:
        """The caller's choices as they go."""
        return _growth.named(self.topk_idx, self.experts, self.buffer.num_ranks)

    def offered(self) -> Offered:
        topk_idx = self.sent()
        parts = [_choices.words(topk_idx)] if self.expand else []
        if self.expand and self.topk_weights is not None:
            parts.append(self.topk_weights)
        parts += self.scales.payload()
        payload = torch.cat(parts, 1) if parts else None
        return Offered(self.rows, topk_idx, None if self.expand else self.topk_weights, self.scales.sent(), payload)

    def counted(self) -> Tuple[Any, Found]:
        """The host waits for the counts, and outputs have as many rows as come."""
        offered, (wanted, tokens) = self.offered(), self.context()

        def send(ep: AllToAll) -> Any:
            given = offered.within(ep, self.experts)
            return ep.dispatch_send(
                given.x, given.topk_idx, given.weights if self.weighed() else None, scales=given.scales,
                payload=given.payload, format=self.format(ep), counts=True,
            )

        def receive(ep: AllToAll, experts: List[int], sources: List[int], later: bool) -> Any:
            layout, align = "contiguous" if self.expand else "token", 1 if later else self.alignment
            made = Made(self, ep, ep.rows_of_counts(experts, sources, layout=layout, align=align), align)
            if self.before is not None and not later:
                self.before.current_stream_wait()
            return made.output, made

        done = self.buffer._normal.counted(self.rows, wanted, self.sms, tokens, send, receive)
        most = self.most or done.ep.format.max_tokens
        counts = [-(-rows // self.alignment) * self.alignment for rows in done.experts]
        return self.results(done.ep, done.handle, done.made, most, sum(done.sources), sum(counts), counts), done.found

    def capacity(self) -> Tuple[Any, Found]:
        """Nobody waits for counts; there are as many rows as can come."""
        offered, (wanted, most) = self.offered(), self.context()
        ep = self.buffer._normal.get(self.rows, wanted, self.sms, most)
        tokens = self.buffer.num_ranks * self.most
        expanded = tokens * min(self.choices, self.local_experts) + (self.alignment - 1) * self.local_experts
        expanded = -(-expanded // self.alignment) * self.alignment
        made, format = Made(self, ep, expanded if self.expand else tokens, self.alignment), self.format(ep)
        weights = offered.weights if self.weighed() else None
        given: Dict[str, Any] = dict(scales=offered.scales, payload=offered.payload, format=format)
        before, found = self.before, Found()
        try:
            if before is not None:

                def send() -> Any:
                    return ep.dispatch_send(offered.x, offered.topk_idx, weights, **given)

                handle = self.buffer._normal.dispatches.halves(
                    lambda: found.sending(send), lambda sent: before.current_stream_wait(),
                    lambda sent, _: found.receive(partial(ep.dispatch_recv, sent, made.output)), lambda sent: None,
                )
            else:
                handle = ep.dispatch_into(made.output, offered.x, offered.topk_idx, weights, **given)
        except Error as error:
            handle = found.take(error, "handle")
        return self.results(ep, handle, made, self.most, tokens, expanded, []), found

    def weighed(self) -> bool:
        return self.topk_weights is not None and not self.expand

    def results(
        self, ep: AllToAll, handle: Any, made: Made, most: int, tokens: int, expanded: int, counts: List[int]
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
            local = _growth.of_choices(made.local, self.choices, bool(counts))
            aligned = (unaligned + (self.alignment - 1)) // self.alignment * self.alignment
            ends = aligned.cumsum(0, dtype=torch.int32)
            sources = torch.arange(ranks, dtype=torch.int32, device=local.device)
            of_ranks = (made.source[:, :1] == sources).sum(0).cumsum(0, dtype=torch.int32)
        place = Place(
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
        return (rows if scales is None else (rows, scales)), experts, weights, place, topk_idx


class Made:
    """Tensors of a dispatch's output."""

    def __init__(self, call: Call, ep: AllToAll, capacity: int, align: int) -> None:
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
            given.update(offsets=self.offsets, row_expert=self.local, align=align, zero_padding=call.zero)
        else:
            self.local = make(capacity, ep.top_k)
            given["token_experts"] = self.local
            self.weights = make(capacity, ep.top_k, dtype=torch.float32)
            given["token_weights"] = self.weights
        if words:
            self.payload = given["payload"] = make(capacity, words, dtype=torch.float32)
        self.output = Output("contiguous" if call.expand else "token", self.rows, self.counts, **given)


class Again:
    """A dispatch of new rows by a handle."""

    def __init__(
        self,
        place: Place,
        rows: torch.Tensor,
        scales: Optional[torch.Tensor],
        topk_weights: Optional[torch.Tensor],
        column_major: bool,
        zero: bool,
        before: Event,
    ) -> None:
        kept = place.kept
        _checks.shaped("x", rows, (kept.tokens, kept.format.hidden), (rows.dtype,))
        _checks.beside("x", rows, place.source)
        if topk_weights is not None:
            _checks.shaped("topk_weights", topk_weights, (kept.tokens, place.choices), (torch.float32,))
            _checks.beside("topk_weights", topk_weights, rows)
        if scales is not None:
            _checks.beside("scale factors of x", scales, rows)
        _checks.event("previous_event_before_epilogue", before)
        self.place, self.given, self.rows, self.topk_weights = place, rows, _carried(rows), topk_weights
        self.scales, self.zero, self.before = Scales(scales, rows, column_major), zero, before

    def made(self) -> Tuple[Rows, Optional[torch.Tensor], Optional[torch.Tensor]]:
        kept, choices, rows = self.place.kept, self.place.choices, self.rows
        self.place.normal.dispatches.finish()
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
            if self.place.match is not None:
                weights = _of_choices(self.place.match, payload, 0)
            else:
                weights = payload[:, :choices].masked_fill(self.place.local < 0, 0)
        scales = self.scales.received(room, kept.capacity, payload)
        result = _given(out, self.given.dtype)
        local = None if self.place.match is not None else self.place.local.long()
        return (result if scales is None else (result, scales)), local, weights


def rows_of(x: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Rows and scales of `x`, of kinds that travel."""
    rows, scales = _checks.rows(x)
    if rows.dtype == torch.uint8 or "float4" in str(rows.dtype):
        raise NotImplementedError(f"x is {rows.dtype}: there are no nvfp4 rows; give fp8 or bf16 rows")
    if rows.dtype not in _ROWS:
        raise TypeError(f"x is {rows.dtype}: give bf16, fp16, fp32, fp8 (e4m3) or int8 rows")
    if scales is not None:
        if scales.element_size() != 4:
            raise TypeError(f"the scale factors of x are {scales.dtype}: give fp32, or four UE8M0 in each int32")
        if len(scales) != len(rows):
            raise ValueError(f"the scale factors of x are {list(scales.shape)}: give [{len(rows)}, words]")
    return rows, scales


def must_be_the_same(handle: Any, experts: Optional[int], most: Optional[int], alignment: Optional[int]) -> None:
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
    word = payload[:, begin : begin + match.shape[1]].gather(1, match.int().argmax(1, keepdim=True)).squeeze(1)
    return torch.where(match.any(1), word, 0)


def _places(source: torch.Tensor, most: int, ranks: int) -> torch.Tensor:
    """How many tokens came up to each one, int32 `[ranks * most]`, in the order of (rank, token)."""
    number = torch.where(source[:, 0] >= 0, source[:, 0] * most + source[:, 1], ranks * most).long()
    came = source.new_zeros(ranks * most + 1)
    return came.scatter_(0, number, 1)[:-1].cumsum(0, dtype=torch.int32)
