"""Low-latency dispatches by the operator in C, which makes all tensors of a call at once."""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch

from .. import _native
from .._calls import AllToAll
from .._native import Format
from ._contexts import Kept


_NUMBERS = (torch.int32, torch.int64)


def usual(x: Optional[torch.Tensor], topk_idx: Optional[torch.Tensor], tokens: int) -> bool:
    """Whether tensors are of the kind that a dispatch takes; others are looked at one by one, to say what is wrong."""
    if x is None or topk_idx is None:
        return False
    shape, ids = x.shape, topk_idx.shape
    kinds = x.dtype == torch.bfloat16 and topk_idx.dtype in _NUMBERS and isinstance(tokens, int)
    return kinds and len(shape) == 2 and len(ids) == 2 and shape[0] == ids[0] and shape[0] <= tokens


class Shape:
    """What dispatches of a context and a format have in common."""

    __slots__ = ("ep", "format", "ranks", "plan", "number")

    def __init__(self, ep: AllToAll, format: Format, ranks: int) -> None:
        self.ep, self.format, self.ranks = ep, format, ranks
        self.plan = _plan(ep, format, ranks)
        self.number = self.plan.number


class Dispatched:
    """What the operator made of a call: handle, rows, counts, the view of sources, their ranges and, if there are any,
    the view of scales."""

    __slots__ = ("shape", "tokens", "made")

    def __init__(self, shape: Shape, tokens: int, made: List[torch.Tensor]) -> None:
        self.shape, self.tokens, self.made = shape, tokens, made

    def kept(self) -> Kept:
        """What calls in Python need."""
        handle, shape = self.made[0], self.shape
        found = _native.operator_handle(handle.data_ptr() if handle.is_cuda else int(handle))
        assert found is not None  # as long as the tensor lives
        return Kept(shape.ep, found[1], self.tokens, shape.ranks * shape.format.max_tokens, shape.format)

    def takes(self, topk_idx: Optional[torch.Tensor], topk_weights: Optional[torch.Tensor]) -> bool:
        """Whether a combine's choices are of the usual kind, as many as the context's."""
        if topk_idx is None or topk_weights is None:
            return False
        shape = topk_weights.shape
        same = len(shape) == 2 and shape == topk_idx.shape and shape[0] == self.tokens and topk_idx.dtype in _NUMBERS
        whole = same and topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        return whole and shape[1] == self.shape.ep.top_k


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
