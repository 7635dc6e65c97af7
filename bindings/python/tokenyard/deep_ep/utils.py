"""Events, as in `deep_ep.utils`."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

__all__ = ["EventHandle", "EventOverlap"]

# Some versions of torch have no types there.
_cuda: Any = torch.cuda


class EventHandle:
    """What the current stream has been given so far. On a machine without GPUs, and on the CPU device, nothing."""

    def __init__(self, stream: Optional[torch.cuda.Stream] = None) -> None:
        self.event: Optional[torch.cuda.Event] = None
        if stream is not None or _cuda.is_initialized():
            self.event = _cuda.Event()
            self.event.record(_cuda.current_stream() if stream is None else stream)

    def current_stream_wait(self) -> None:
        """The current stream waits for it."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An event that a stream may wait for, as a context manager after its block. Without an event it waits for nothing.

    `extra_tensors` live as long as this object."""

    event: Optional[EventHandle] = None
    extra_tensors: Optional[Tuple[Any, ...]] = None
    _release: bool = False

    def __init__(self, event: Optional[EventHandle] = None, extra_tensors: Optional[Tuple[Any, ...]] = None) -> None:
        if event is not None or extra_tensors is not None:
            self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """The current stream waits for the event. `release_handle`: this object lets go of it."""
        if self.event is not None:
            self.event.current_stream_wait()
        if release_handle:
            self.event = self.extra_tensors = None

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """This object, for a `with` block after which it lets go of the event."""
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.current_stream_wait(self._release)
        self._release = False
