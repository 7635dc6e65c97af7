"""What is refused before a call is made, with the argument's name, what is expected and what came."""

from __future__ import annotations

import operator
from typing import Any, Callable, List, Optional, Tuple

import torch

from .._tensors import in_memory
from .utils import EventHandle, EventOverlap

_ROWS = (torch.bfloat16, torch.float16, torch.float32)
_NUMBERS = (torch.int32, torch.int64)
# Some versions of torch have no types there.
_subclasses: Any = torch._subclasses
_FAKE = _subclasses.FakeTensor


def tensor(name: str, given: Any, dims: int, dtypes: Optional[Tuple[torch.dtype, ...]] = None) -> None:
    """Refuses what is no tensor of so many dimensions and of one of these dtypes."""
    _fits(name, given, f"a tensor of {dims} dimensions", lambda shape: len(shape) == dims, dtypes)


def shaped(name: str, given: Any, shape: Tuple[int, ...], dtypes: Optional[Tuple[torch.dtype, ...]] = None) -> None:
    """Refuses another shape, and another dtype than these."""
    _fits(name, given, str(list(shape)), lambda found: tuple(found) == shape, dtypes)


def _fits(
    name: str, given: Any, wanted: str, fits: Callable[[torch.Size], bool], dtypes: Optional[Tuple[torch.dtype, ...]]
) -> None:
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name} is a {type(given).__name__}: give a tensor")
    if not fits(given.shape):
        raise ValueError(f"{name} has the shape {list(given.shape)}: give {wanted}")
    if dtypes is not None and given.dtype not in dtypes:
        raise TypeError(f"{name} is {given.dtype}: give {' or '.join(map(str, dtypes))}")
    if type(given) in (torch.Tensor, torch.nn.Parameter) and given.layout == torch.strided:
        in_memory(name, given)


def choices(given: Any) -> None:
    """Refuses what holds no experts' numbers."""
    tensor("topk_idx", given, 2, _NUMBERS)


def outputs(x: Any) -> None:
    """Refuses what no experts' outputs are."""
    _fits("x", x, "the experts' outputs", lambda _shape: True, _ROWS)


def low_latency_tokens(x: Any, topk_idx: Any, most: int, use_fp8: bool) -> None:
    """Refuses tensors that no low-latency dispatch takes. `most`: tokens of a rank."""
    tensor("x", x, 2, (torch.bfloat16,))
    choices(topk_idx)
    shaped("topk_idx", topk_idx, (x.shape[0], topk_idx.shape[1]))
    whole("num_max_dispatch_tokens_per_rank", most, 1)
    if x.shape[0] > most:
        raise ValueError(
            f"num_max_dispatch_tokens_per_rank is {most}, and x has {x.shape[0]} tokens: give as many as a rank may have, "
            "the same on all ranks"
        )
    if use_fp8 and x.shape[1] % 128 != 0:
        raise ValueError(f"x has {x.shape[1]} columns: with use_fp8 give a multiple of 128, which have a scale each")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"x is on {x.device}: give a tensor on cpu or cuda")
    beside("topk_idx", topk_idx, x)
    as_it_is("topk_idx", topk_idx)
    _aligned("x", x)


def _aligned(name: str, given: torch.Tensor) -> None:
    """Refuses rows that do not lie in memory as calls have them."""
    as_it_is(name, given)
    unit = 16 // given.element_size()
    pitch = given.stride(0) if given.shape[0] > 1 else given.shape[1]
    gaps = given.stride(1) != 1 or pitch < given.shape[1] or pitch % unit != 0
    if given.numel() > 0 and (gaps or given.data_ptr() % 16 != 0):
        raise ValueError(
            f"{name} has the strides {given.stride()} at {given.data_ptr():#x}: give contiguous rows that begin at multiples "
            "of 16 bytes"
        )


def as_it_is(name: str, given: torch.Tensor) -> None:
    """Refuses a tensor whose elements do not lie in memory as they are."""
    if given.layout != torch.strided or given.is_neg():
        kind = "a negative view" if given.layout == torch.strided else given.layout
        raise ValueError(f"{name} is {kind}: give a tensor with memory of its own")
    if given.numel() > 0 and (isinstance(given, _FAKE) or given.untyped_storage().nbytes() == 0):
        raise ValueError(f"{name} has no memory: give a tensor with elements")


def low_latency(x: torch.Tensor, tokens: int, experts: int, choices: int) -> None:
    """Refuses what no context serves: the limits of its builder (bindings/api/builder.rs), where experts may repeat.
    `experts`: of a rank."""
    for name, found, most in (
        ("x", x.shape[1], 1 << 20), ("num_max_dispatch_tokens_per_rank", tokens, 1 << 20), ("topk_idx", choices, 32),
        ("num_experts", experts, 1364 if choices < 16 else 818),
    ):
        if not 0 < found <= most:
            what = {"x": "columns", "topk_idx": "choices", "num_experts": "experts a rank"}.get(name, "tokens")
            raise ValueError(f"{name} has {found} {what}: give 1 to {most}")
    if x.shape[1] % 8 != 0:
        raise ValueError(f"x has {x.shape[1]} columns: give a multiple of 8, as rows are multiples of 16 bytes")


def rows(given: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Rows and scales of normal calls."""
    if isinstance(given, tuple) and len(given) != 2:
        raise ValueError(f"x is a tuple of {len(given)}: give a tensor, or a tensor and its scales")
    x, scales = given if isinstance(given, tuple) else (given, None)
    tensor("x", x, 2)
    if scales is not None:
        tensor("scales of x", scales, 2)
    return x, scales


def routing(tokens: int, ranks: int, named: Any, counts: Any, topk_idx: Any, topk_weights: Any) -> None:
    """Refuses routing of normal calls that does not fit these tokens."""
    if named is None or counts is None:
        raise ValueError("is_token_in_rank or num_tokens_per_expert is missing: give what get_dispatch_layout returns")
    tensor("num_tokens_per_expert", counts, 1)
    if topk_idx is None:
        if topk_weights is not None:
            raise ValueError("topk_weights is given without topk_idx: give both, or neither")
        shaped("is_token_in_rank", named, (tokens, ranks), (torch.bool,))
        return
    choices(topk_idx)
    shaped("topk_idx", topk_idx, (tokens, topk_idx.shape[1]))
    if topk_weights is not None:
        shaped("topk_weights", topk_weights, tuple(topk_idx.shape), (torch.float32,))


def sums(x: Any, topk_weights: Any, bias: Any, tokens: int, hidden: int) -> List[torch.Tensor]:
    """The biases of a normal combine."""
    tensor("x", x, 2, _ROWS)
    if topk_weights is not None:
        tensor("topk_weights", topk_weights, 2, (torch.float32,))
        shaped("topk_weights", topk_weights, (x.shape[0], topk_weights.shape[1]))
    biases: Tuple[Any, ...] = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
    if len(biases) > 2:
        raise ValueError(f"bias has {len(biases)} tensors: give one or two")
    for one in biases:
        shaped("bias", one, (tokens, hidden), _ROWS)
    return list(biases)


def whole(name: str, given: Any, least: int, most: Optional[int] = None) -> int:
    """The number. Refuses what is no whole number, too small or too large."""
    try:
        number = operator.index(given)
    except (TypeError, RuntimeError):
        # RuntimeError: of a tensor of several numbers.
        raise TypeError(f"{name} is a {type(given).__name__}, {given!r}: give a whole number") from None
    if number < least:
        raise ValueError(f"{name} is {number}: give {least} or more")
    if most is not None and number > most:
        raise ValueError(f"{name} is {number}: give at most {most}")
    return number


def event(name: str, given: Any) -> None:
    """Refuses what no stream can wait for."""
    if given is not None and not isinstance(given, (EventHandle, EventOverlap)):
        raise TypeError(f"{name} is a {type(given).__name__}: give an EventHandle or EventOverlap of deep_ep")


def stats(name: str, given: Any, x: torch.Tensor, length: int, size: int) -> None:
    """Refuses statistics that no call can add to: before its first half is sent, as the second half writes them."""
    if given is None:
        return
    shaped(name, given, (length,), (torch.int32 if size == 4 else torch.int64,))
    beside(name, given, x)
    as_it_is(name, given)
    if not given.is_contiguous():
        raise ValueError(f"{name} has the strides {given.stride()}: give a contiguous tensor")


def sums_out(given: Any, x: torch.Tensor, shape: Tuple[int, int]) -> None:
    """Refuses what no low-latency combine can write sums to."""
    shaped("out", given, shape, _ROWS)
    beside("out", given, x)
    _aligned("out", given)


def beside(name: str, given: torch.Tensor, x: torch.Tensor) -> None:
    """Refuses a tensor of another device than rows are on."""
    if given.device != x.device:
        raise ValueError(f"{name} is on {given.device}, and other tensors on {x.device}: give tensors of one device")
