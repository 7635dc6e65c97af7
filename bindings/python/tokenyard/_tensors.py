"""What torch calls what this library names. Imports torch."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch

TYPES: Dict[str, torch.dtype] = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn,
    "i32": torch.int32, "i64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in TYPES.items()}


def name_of(tensor: torch.Tensor) -> str:
    """The library's name of a tensor's dtype; torch's of one that it has not, which the call refuses."""
    return _NAMES.get(tensor.dtype, str(tensor.dtype))


def must_be_tensors(but_none: bool = False, **tensors: Any) -> None:
    """Refuses what is no tensor. `but_none`: nor None."""
    for name, tensor in tensors.items():
        if not (isinstance(tensor, torch.Tensor) or (but_none and tensor is None)):
            raise TypeError(f"{name} is a {type(tensor).__name__}: give a torch tensor")


def in_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor whose storage was freed, of which torch's own kernels would read all the same."""
    if tensor.numel() > 0 and tensor.device.type in ("cpu", "cuda") and tensor.untyped_storage().nbytes() == 0:
        raise ValueError(f"{name} has no memory, as its storage was freed: give a tensor with elements")


def no_gradient(what: str, *tensors: Optional[torch.Tensor]) -> None:
    """Refuses tensors whose gradient would be lost."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError(
            f"{what} has no gradient: use dispatch and combine of tokenyard.ops, or call it under torch.no_grad()"
        )


def capturing(tensor: torch.Tensor) -> bool:
    """Whether calls with a tensor are captured into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def device_of(tensor: torch.Tensor) -> str:
    """A tensor's device, as contexts take it."""
    return f"cuda:{tensor.device.index or 0}" if tensor.is_cuda else "cpu"
