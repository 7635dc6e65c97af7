"""tokenyard moves tokens to experts and back in Mixture-of-Experts inference.

    world = tokenyard.World.from_env()                       # torchrun; or World.threads(n), World.from_group(group)
    ep = tokenyard.AllToAll(world, hidden=7168, experts=256, top_k=8, max_tokens_per_rank=128)
    got = ep.dispatch(x, topk_idx, topk_weights)             # got.rows: expert after expert; got.counts: rows of each
    y = ep.combine(experts(got.rows, got.counts), got.handle)

Arrays are torch tensors, or have `__array_interface__` (numpy) or `__cuda_array_interface__` (cupy). torch is imported
only if tensors come. Rows in numpy are uint16 for bf16 and uint8 for fp8, which numpy lacks.
"""

import sys as _sys

from ._calls import AllToAll, Dispatched
from ._errors import make_picklable as _make_picklable
from ._hosts import set_network
from ._native import (
    ArgumentError,
    BootstrapError,
    CapacityError,
    ClosedError,
    CombineSent,
    ConfigError,
    DeviceError,
    Error,
    Format,
    GenerationError,
    Handle,
    IncompleteError,
    InterruptedError,
    OrderError,
    Output,
    PeerLostError,
    Proxy,
    RankMask,
    RoutingError,
    Sent,
    TimeoutError,
    TransportError,
    must_be_main as _must_be_main,
    version as __version__,
)
from ._worlds import World

_must_be_main()
_make_picklable()


def install_as(name: str) -> None:
    """Makes `import deep_ep` get `tokenyard.deep_ep` in this process; `name`: "deep_ep". Before others import it."""
    if name != "deep_ep":
        raise ValueError(f"name is {name!r}: give 'deep_ep'")
    there = _sys.modules.get(name)
    if there is not None and there is not _sys.modules.get("tokenyard.deep_ep"):
        place = getattr(there, "__file__", None) or list(getattr(there, "__path__", ())) or "no file"
        raise RuntimeError(f"{name} is imported already, from {place}: call this earlier")
    from .deep_ep import _names

    _names.take(name)


__all__ = [
    "AllToAll", "ArgumentError", "BootstrapError", "CapacityError", "ClosedError", "CombineSent", "ConfigError",
    "DeviceError", "Dispatched", "Error", "Format", "GenerationError", "Handle", "IncompleteError",
    "InterruptedError", "OrderError", "Output", "PeerLostError", "Proxy", "RankMask", "RoutingError", "Sent", "TimeoutError",
    "TransportError", "World", "__version__", "install_as", "set_network",
]
