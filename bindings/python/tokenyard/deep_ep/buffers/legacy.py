"""`deep_ep.buffers.legacy`: the `Buffer` of version 1."""

from .._buffer import Buffer
from .._config import Config

__all__ = ["Buffer", "Config"]
