"""How exceptions are copied to other processes."""

from __future__ import annotations

from typing import Any, Dict, Tuple

from ._native import Error

# What a call made all the same: of this process alone, and of the context that made it.
_MADE = ("handle", "sent", "dispatched")


def _reduce(error: Error) -> Tuple[Any, Tuple[Any, ...], Dict[str, Any]]:
    """An exception for pickle and copy: its class, text and fields, without what belongs to a context."""
    return type(error), error.args, {name: value for name, value in vars(error).items() if name not in _MADE}


def make_picklable() -> None:
    """Lets exceptions go to other processes, as those of a worker of multiprocessing do."""
    setattr(Error, "__reduce__", _reduce)
