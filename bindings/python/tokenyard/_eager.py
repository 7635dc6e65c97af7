"""Eager calls without gradients, by operators whose kernels are in C. Imports torch.

`ops` asks for them first, since torch's way through an operator in Python, and outputs that are made one by one in
Python, take the host longer than the call itself. torch's way through an operator in C takes as long, so functions make
the same calls without it. They need torch 2.11 or later: `DEFINED` says whether this one has the interface.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch
import torch.autograd.forward_ad

from . import _native
from ._errors import Found

DEFINED: bool = _native.define_operators()
"""Whether there are such operators."""

_C: Any = torch._C
_is_compiling = torch.compiler.is_compiling
_increment: Any = getattr(torch.autograd.graph, "increment_version", None)
# Of that function, which first asks whether it was given one tensor. It leaves inference tensors out.
_increment_all: Any = getattr(_C, "_increment_version", None)
_WEIGHTS, _SCALES, _ROW_SCALES, _FIRST, _SECOND = 1, 2, 4, 8, 16
_ACCUMULATE = 2
_NAMES = (
    "_dispatch", "_dispatch_into", "_combine", "_combine_into", "_low_latency_dispatch", "_low_latency_send",
    "_low_latency_send_back", "_low_latency_combine",
)


def asked(operator: Any) -> Any:
    """An operator as a function, which looks whether the call is one for it."""

    def call(*given: Any) -> Tuple[List[torch.Tensor], int]:
        made: Tuple[List[torch.Tensor], int] = ([], 0)
        return operator(*given) if _native.is_usual(*given[:-1]) else made

    return call


def _calls() -> List[Any]:
    """What makes the calls, by these names: functions, or what torch calls for operators, without its layer in
    Python."""
    if not DEFINED:
        return [None] * len(_NAMES)
    operators = [getattr(torch.ops.tokenyard, name).default._op for name in _NAMES]
    direct = _native.direct_calls(operators)
    return [getattr(_native, "direct" + name) for name in _NAMES] if direct else [asked(each) for each in operators]


(
    _DISPATCH, _DISPATCH_INTO, _COMBINE, _COMBINE_INTO, LOW_LATENCY_DISPATCH, _LOW_LATENCY_SEND, _LOW_LATENCY_SEND_BACK,
    _LOW_LATENCY_COMBINE,
) = _calls()
"""`LOW_LATENCY_DISPATCH` takes tokens, their choices and a plan. It returns the plan's outputs and the handle's number for
`taken_handle`; one that is not positive is for `low_latency_made`. Tensors that are not as low-latency calls have them
make nothing."""


def usual() -> bool:
    """Whether there are calls, and torch compiles nothing. They look themselves whether something traces, transforms or
    differentiates them: such a call is none for them."""
    return DEFINED and not _is_compiling()


def trains(x: Any, topk_weights: Any) -> bool:
    """Whether a gradient is asked of one of these. Such a dispatch is none for these calls, and no plan is made for it."""
    if not torch.is_grad_enabled():
        return False
    return bool(getattr(x, "requires_grad", False) or getattr(topk_weights, "requires_grad", False))


_NOTHING = Found()


def _found(number: int) -> Found:
    """What a call raised, by its second result."""
    return _NOTHING if number >= 0 else Found(_native.take_pending(-number))


def dispatch(
    plan: int,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: Optional[torch.Tensor],
    scales: Optional[torch.Tensor],
) -> Tuple[List[torch.Tensor], Found]:
    """The handle, and the outputs of a plan, or nothing: then the call is none for this operator. And what it raised;
    with outputs, the call took place."""
    given = (_WEIGHTS if topk_weights is not None else 0) | (_SCALES if scales is not None else 0)
    made: List[torch.Tensor]
    made, number = _DISPATCH(
        x, topk_idx, x if topk_weights is None else topk_weights, x if scales is None else scales, plan | given
    )
    found = _found(number)
    if made and found.without_rows():
        made[1].zero_()
    return made, found


def low_latency_made(made: List[torch.Tensor], number: int) -> Tuple[List[torch.Tensor], int, Optional[Found]]:
    """What an operator made, the number of its handle or half, 0 for a call that made nothing, and what it raised, if
    it did."""
    if number > 0:
        return made, number, None
    return made, -number if made else 0, None if number == 0 else _found(number)


def low_latency_send(
    plan: int, x: torch.Tensor, topk_idx: torch.Tensor
) -> Tuple[List[torch.Tensor], int, Optional[Found]]:
    """The sending half, whose number is for `half_of`, and the outputs that its hook receives."""
    return low_latency_made(*_LOW_LATENCY_SEND(x, topk_idx, plan))


def low_latency_send_back(
    rows: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: int
) -> Tuple[List[torch.Tensor], int, Optional[Found]]:
    """The sending half of `low_latency_combine`, likewise, and the sums that its hook receives."""
    return low_latency_made(*_LOW_LATENCY_SEND_BACK(rows, topk_idx, topk_weights, handle))


def low_latency_combine(
    rows: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: int
) -> Optional[torch.Tensor]:
    """The sums of a dispatch, by its handle's number. None: likewise."""
    made: List[torch.Tensor]
    made, number = _LOW_LATENCY_COMBINE(rows, topk_idx, topk_weights, handle)
    if number < 0:
        _found(number).raise_with(made[0] if made else None, "out")
    return made[0] if made else None


def dispatch_into(
    plan: int,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: Optional[torch.Tensor],
    scales: Optional[torch.Tensor],
    rows: torch.Tensor,
    counts: torch.Tensor,
    row_scales: Optional[torch.Tensor],
    first: Optional[torch.Tensor],
    second: Optional[torch.Tensor],
) -> Optional[torch.Tensor]:
    """The handle of a dispatch into tensors of the caller. `first` and `second`: offsets alone, or in the token layout
    experts and weights of tokens. None: the call is none for this operator. An error of a call that took place has the
    handle as its `handle`."""
    if topk_weights is None:
        topk_weights = x
    else:
        plan |= _WEIGHTS
    if scales is None:
        scales = x
    else:
        plan |= _SCALES
    if row_scales is None:
        row_scales = x
    else:
        plan |= _ROW_SCALES
    if first is None:
        first = x
    else:
        plan |= _FIRST
    if second is None:
        second = x
    else:
        plan |= _SECOND
    made: List[torch.Tensor]
    made, number = _DISPATCH_INTO(x, topk_idx, topk_weights, scales, rows, counts, row_scales, first, second, plan)
    if number < 0:
        _found(number).raise_with(made[0] if made else None, "handle")
    return made[0] if made else None


def combine_into(
    rows: torch.Tensor,
    handle: torch.Tensor,
    topk_weights: Optional[torch.Tensor],
    out: torch.Tensor,
    accumulate: bool,
) -> bool:
    """Makes sums in a tensor of the caller. False: the call is none for this operator."""
    weighted = topk_weights is not None
    flags = (_ACCUMULATE if accumulate else 0) | weighted
    made: List[torch.Tensor]
    made, number = _COMBINE_INTO(rows, handle, topk_weights if weighted else rows, out, flags)
    if number < 0:
        _found(number).raise_with(out if made else None, "out")
    return bool(made)


def written(*tensors: Optional[torch.Tensor]) -> None:
    """Counts a write, so that backward refuses a tensor that it saved before."""
    counted = [tensor for tensor in tensors if tensor is not None]
    if DEFINED and _increment_all is not None:
        _increment_all(counted)
        return
    # Versions of torch before those take one at a time.
    for tensor in counted if _increment is not None else ():
        if not tensor.is_inference():
            _increment(tensor)


def combine(
    rows: torch.Tensor, handle: torch.Tensor, topk_weights: Optional[torch.Tensor], tokens: int
) -> Optional[torch.Tensor]:
    """The sums. None: the call is none for this operator, as one whose handle was made in Python."""
    weighted = topk_weights is not None
    made: List[torch.Tensor]
    made, number = _COMBINE(rows, handle, topk_weights if weighted else rows, tokens << 1 | weighted)
    if number < 0:
        _found(number).raise_with(made[0] if made else None, "out")
    return made[0] if made else None
