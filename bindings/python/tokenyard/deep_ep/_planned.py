"""Low-latency dispatches by the operator in C, which makes all tensors of a call at once."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple

import torch

from .. import _eager, _native
from .._calls import AllToAll
from .._native import Format
from ._contexts import Kept
from .utils import EventOverlap


class Dispatched(NamedTuple):
    """What the operator made of a call."""

    ep: AllToAll
    format: Format
    tokens: int
    """Of this rank."""
    capacity: int
    """Rows of each expert."""
    made: List[torch.Tensor]

    @property
    def handle(self) -> torch.Tensor:
        """What combine's operator takes."""
        return self.made[0]

    def kept(self) -> Kept:
        """What calls in Python need."""
        handle = self.made[0]
        found = _native.operator_handle(handle.data_ptr() if handle.is_cuda else int(handle))
        assert found is not None  # as long as the tensor lives
        return Kept(self.ep, found[1], self.tokens, self.capacity, self.format)

    def results(self, handle: Any, experts: int) -> Tuple[Any, torch.Tensor, Any, EventOverlap, None]:
        """What a low-latency dispatch returns."""
        rows: Any = self.made[1] if self.format.scales is None else (self.made[1], self.made[5])
        members = handle((self.made[3], self.made[4], self.format.max_tokens, self.format.hidden, experts))
        members.planned = self
        return rows, self.made[2], members, EventOverlap(), None


def dispatch(
    ep: AllToAll, x: torch.Tensor, topk_idx: torch.Tensor, format: Format, ranks: int
) -> Tuple[Optional[Dispatched], Optional[BaseException]]:
    """The call, or None if it is none for the operator. And what it raised; with results, the call took place."""
    plan = ep.planned(("low latency", format), lambda: _plan(ep, format, ranks))
    made, raised = _eager.dispatch(ep, plan, x, topk_idx, None, None)
    return Dispatched(ep, format, x.shape[0], ranks * format.max_tokens, made) if made else None, raised


def _plan(ep: AllToAll, format: Format, ranks: int) -> _native.Plan:
    experts, capacity = len(ep.local_experts), ranks * format.max_tokens
    outputs: List[Tuple[str, Tuple[int, ...], str]] = [
        ("rows", (experts, capacity, format.hidden), format.dtype), ("counts", (experts,), "i32"),
        ("source", (experts * capacity, 2), "i32"), ("source_ranges", (experts, ranks), "i64"),
    ]
    # The token of each row, of its rank and token.
    views: List[Tuple[str, Tuple[int, ...], Tuple[int, ...], int]] = [
        ("source", (experts, capacity), (2 * capacity, 2), 1)
    ]
    if format.scales is not None:
        columns, word = (128, "fp32") if format.scales == "fp32" else (512, "i32")
        words, lead = -(-format.hidden // columns), -(-capacity // 4) * 4
        outputs.append(("scales", (experts, words, lead), word))
        # What the caller gets: the row's number first, which lies last.
        views.append(("scales", (experts, capacity, words), (words * lead, 1, lead), 0))
    return ep.prepare(format, "masked", outputs, column_major=format.scales is not None, views=views)
