"""`deep_ep.buffer`, where version 1 of DeepEP has its `Buffer`."""

from ._buffer import Buffer
from ._config import Config
from .utils import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
