"""Eager calls without gradients, by operators whose kernels are in C. Imports torch.

`ops` asks for them first, since torch's way through an operator in Python, and outputs that are made one by one in
Python, take the host longer than the call itself. They need torch 2.11 or later: `DEFINED` says whether this one has the
interface.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch
import torch.autograd.forward_ad

from . import _native
from ._errors import Found

DEFINED: bool = _native.define_operators()
"""Whether there are such operators."""

_forward: Any = torch.autograd.forward_ad
_C: Any = torch._C
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WEIGHTS, _SCALES = 1, 2


def _operator(name: str) -> Any:
    """What torch calls, without its layer in Python."""
    return getattr(torch.ops.tokenyard, name).default._op if DEFINED else None


_DISPATCH, _COMBINE = _operator("_dispatch"), _operator("_combine")


def plain(*tensors: Optional[torch.Tensor]) -> bool:
    """Whether a call with these tensors is one for them: nothing traces, transforms or differentiates it."""
    if not DEFINED or torch.compiler.is_compiling() or _C._len_torch_dispatch_stack() or _C._get_tracing_state():
        return False
    if _C._len_torch_function_stack() or _forward._current_level >= 0 or _C._functorch.peek_interpreter_stack():
        return False
    with_gradients = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or (with_gradients and tensor.requires_grad)):
            return False
    return True


_NOTHING = Found()


def _found(made: List[torch.Tensor], on_gpu: bool) -> Found:
    """What a call raised. On a GPU a call that made something raised nothing."""
    if made and on_gpu:
        return _NOTHING
    raised = _native.take_pending()
    return _NOTHING if raised is None else Found(raised)


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
    made: List[torch.Tensor] = _DISPATCH(
        x, topk_idx, x if topk_weights is None else topk_weights, x if scales is None else scales, plan | given
    )
    found = _found(made, x.is_cuda)
    if made and found:
        # An output without room has no rows.
        made[1].zero_()
    return made, found


def combine(
    rows: torch.Tensor, handle: torch.Tensor, topk_weights: Optional[torch.Tensor], tokens: int
) -> Optional[torch.Tensor]:
    """The sums. None: the call is none for this operator, as one whose handle was made in Python."""
    weighted = topk_weights is not None
    made: List[torch.Tensor] = _COMBINE(rows, handle, topk_weights if weighted else rows, tokens << 1 | weighted)
    _found(made, rows.is_cuda).raise_with(None)
    return made[0] if made else None
