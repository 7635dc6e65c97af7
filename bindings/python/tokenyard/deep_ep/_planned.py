"""Low-latency dispatches by the operator in C, which makes all tensors of a call at once."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

from .. import _native
from .._calls import AllToAll
from .._native import Format
from ._contexts import Kept


class Shape:
    """What dispatches of a context and a format have in common."""

    __slots__ = ("ep", "format", "members", "capacity", "scaled", "plan", "number")

    def __init__(self, ep: AllToAll, format: Format, ranks: int, members: Tuple[int, int, int]) -> None:
        """`members`: the last of their handles."""
        self.ep, self.format, self.members = ep, format, members
        self.capacity, self.scaled = ranks * format.max_tokens, format.scales is not None
        self.plan = _plan(ep, format, ranks)
        self.number = self.plan.number


Dispatched = Tuple[int, Optional[_native.Handle], Shape]
"""A dispatch by the operator: its handle's number, for the operator, and the handle, for calls in Python."""


def kept(dispatched: Dispatched) -> Kept:
    """What calls in Python need."""
    _number, handle, shape = dispatched
    if handle is None:
        raise RuntimeError("the handle of a call was lost in signal handlers' calls: dispatch again")
    return Kept(shape.ep, handle, handle.tokens, shape.capacity, shape.format)


def receive(half: _native.Half, shape: Shape, handle: Any) -> None:
    """The hook of a dispatch: receives it, and completes its handle, also where the call found an error."""
    try:
        received = half.receive()
    except BaseException as error:
        received = getattr(error, "handle", None)
        if received is not None:
            handle.planned = (received.number, received, shape)
        raise
    assert received is not None  # of a dispatch
    handle.planned = (received.number, received, shape)


def _plan(ep: AllToAll, format: Format, ranks: int) -> _native.Plan:
    experts, capacity = len(ep.local_experts), ranks * format.max_tokens
    # Rows, counts, sources, their ranges and, if there are any, scales.
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
    return ep.prepare(
        format, "masked", outputs, column_major=format.scales is not None, views=views,
        # A handle has the small ones, and outlives the rows. To make memory takes as long as all other work in C.
        together=[["rows", "scales"], ["source", "source_ranges", "counts"]], shared=1,
    )
