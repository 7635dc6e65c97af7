"""The contexts behind a `Buffer`: made by the first call that needs them, which is collective as all calls are.

DeepEP's normal mode knows no most number of tokens, and a context does: `_growth` has how contexts grow.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch

from .. import _growth
from .._calls import AllToAll
from .._errors import Found
from .._native import Error, Format, Handle, World
from .._tensors import device_of


def _capturing(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_capture(x: torch.Tensor) -> None:
    if _capturing(x):
        raise RuntimeError("a capture needs a context that is not there: make the same calls once before it, eagerly")


class Wanted(NamedTuple):
    """What a normal call needs of its context, the same on all ranks."""

    hidden: int
    experts: int
    choices: int
    fp32: bool
    device: str
    words: int = 0
    """Of a token's payload in dispatch."""

    def covers(self, other: Wanted) -> bool:
        same = self.hidden == other.hidden and self.experts == other.experts and self.device == other.device
        room = self.choices >= other.choices and self.words >= other.words
        return same and room and self.fp32 >= other.fp32


class Offered(NamedTuple):
    """What a rank gives to a dispatch."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    weights: Optional[torch.Tensor]
    scales: Optional[torch.Tensor]
    payload: Optional[torch.Tensor] = None

    def within(self, ep: AllToAll, experts: int) -> Offered:
        """This, or where it is more than the context has room for the notice that goes in its place."""
        if self.x.shape[0] <= ep.format.max_tokens:
            return self
        ranks, choices = ep.ranks, self.topk_idx.shape[1]
        x, topk_idx = _growth.notice(self.x, experts, choices, ranks)

        def zeros(like: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
            return None if like is None else like.new_zeros((x.shape[0], like.shape[1]))

        return Offered(x, topk_idx, zeros(self.weights), zeros(self.scales), zeros(self.payload))


class Counted(NamedTuple):
    """A dispatch for whose counts the host waited."""

    ep: AllToAll
    handle: Handle
    made: Any
    experts: List[int]
    """Rows of each local expert."""
    sources: List[int]
    """Tokens from each rank."""
    found: Found
    """Unusable routing: the dispatch took place without this rank's tokens."""


class Normal:
    """The context of normal calls."""

    def __init__(self, world: World, timeout: float, round_tokens: int) -> None:
        self._world, self._timeout, self._round_tokens = world, timeout, round_tokens
        self._made: Optional[Tuple[Wanted, int, AllToAll]] = None

    def get(self, x: torch.Tensor, wanted: Wanted, sms: Optional[int], tokens: Optional[int] = None) -> AllToAll:
        """One for calls like this one. `tokens`: how many each rank may have, the same on all ranks; `None`: as many as
        any has now, if it must be made."""
        if self._made is not None and self._made[0].covers(wanted) and (tokens or 0) <= self._made[1]:
            return self._made[2]
        refuse_capture(x)
        return self._make(wanted, x.shape[0] if tokens is None else tokens, sms)

    def counted(
        self,
        x: torch.Tensor,
        wanted: Wanted,
        sms: Optional[int],
        tokens: Optional[int],
        send: Callable[[AllToAll], Any],
        receive: Callable[[AllToAll, List[int], List[int]], Tuple[Any, Any]],
    ) -> Counted:
        """A dispatch that makes larger contexts until all ranks' tokens have room. `send`: the sending half, with
        counts. `receive`: the output for so many rows, and what else is to be returned."""
        while True:
            ep = self.get(x, wanted, sms, tokens)
            found = Found()
            try:
                sent = send(ep)
            except Error as error:
                sent = found.take(error, "sent")
            experts, sources = ep.counts(sent)
            # Notices have rows, too.
            output, made = receive(ep, experts, sources)
            handle = found.receive(partial(ep.dispatch_recv, sent, output))
            if experts.pop() == 0:
                return Counted(ep, handle, made, experts, sources, found)
            # Some rank has more tokens than this context has room for, which goes before the new one is made.
            del ep, sent, output, made, handle
            self.grow(x, sms)

    def grow(self, x: torch.Tensor, sms: Optional[int]) -> None:
        """Makes room for the tokens that ranks have now."""
        if self._made is not None:
            self._make(self._made[0], x.shape[0], sms)

    def close(self) -> None:
        """Gives the context up."""
        self._made = None

    def _make(self, wanted: Wanted, tokens: int, sms: Optional[int]) -> AllToAll:
        before = 0 if self._made is None else self._made[1]
        if self._made is not None and self._made[0].hidden == wanted.hidden:
            wanted = wanted._replace(
                choices=max(wanted.choices, self._made[0].choices), fp32=wanted.fp32 or self._made[0].fp32,
                words=max(wanted.words, self._made[0].words),
            )
        # With an expert named several times, tokens times choices of a rank are at most 2^20.
        room = _growth.room(self._world, tokens, before, (1 << 20) // wanted.choices)
        ranks, experts = self._world.size, wanted.experts
        dtype = "fp32" if wanted.fp32 else "bf16"
        # Its memory first, as the new one may need it. Handles keep it as long as they live.
        self._made = None
        ep = AllToAll(
            self._world, hidden=wanted.hidden, experts=experts + ranks, top_k=wanted.choices, max_tokens_per_rank=room,
            device=wanted.device, dtype=dtype, combine_dtype=dtype, duplicates=True, payload_words=wanted.choices,
            dispatch_payload_words=wanted.words, placement=_growth.placement(experts, ranks), timeout=self._timeout,
            sms=sms, round_tokens=self._round_tokens if room > self._round_tokens else None,
        )
        self._made = (wanted, room, ep)
        return ep


class LowLatency:
    """The context of low-latency calls."""

    def __init__(self, world: World, timeout: float, shrinks: bool) -> None:
        self._world, self._timeout, self._shrinks = world, timeout, shrinks
        self._made: Optional[Tuple[Tuple[Any, ...], AllToAll]] = None

    def get(self, x: torch.Tensor, tokens: int, experts: int, choices: int, sms: Optional[int]) -> AllToAll:
        """One for calls like this one."""
        key = (tokens, x.shape[1], experts, x.device, choices)
        if self._made is not None and self._made[0][:4] == key[:4] and self._made[0][4] >= choices:
            return self._made[1]
        refuse_capture(x)
        self._made = None
        ep = AllToAll(
            self._world, hidden=x.shape[1], experts=experts, top_k=choices, max_tokens_per_rank=tokens,
            device=device_of(x), weights="combine", duplicates=True, timeout=self._timeout, sms=sms,
            missing_ranks="masked_at_deadline" if self._shrinks else "fatal",
        )
        self._made = (key, ep)
        return ep

    def made(self) -> Optional[AllToAll]:
        """The one that is there."""
        return None if self._made is None else self._made[1]

    def clean(self) -> None:
        """The next call, of all ranks, makes a new one, whose mask is empty."""
        self._made = None


class Kept(NamedTuple):
    """What a handle's calls need."""

    ep: AllToAll
    handle: Handle
    tokens: int
    capacity: int
    format: Format

