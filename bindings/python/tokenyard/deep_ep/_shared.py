"""What `Buffer` and `ElasticBuffer` share: ranks, and the streams on which their calls run."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch

from .._native import World
from .._worlds import world_of_group, world_over
from . import _checks
from .utils import EventHandle, EventOverlap

Event = Optional[Union[EventOverlap, EventHandle]]
Rows = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]

# Of a context, which has one for growth on each rank besides: what is more is refused before lists of all are made.
_MOST_EXPERTS = 1 << 20


class Streams:
    """The communication streams of a buffer, one of each GPU."""

    def __init__(self) -> None:
        self._made: Dict[torch.device, torch.cuda.Stream] = {}

    def of(self, device: torch.device) -> torch.cuda.Stream:
        """That of a GPU."""
        if device not in self._made:
            # Some versions of torch have no types there.
            make: Any = torch.cuda.Stream
            self._made[device] = make(device, priority=-1)
        return self._made[device]

    def run(
        self, inputs: List[torch.Tensor], previous: Event, async_finish: bool, work: Callable[[], Any]
    ) -> Tuple[Any, EventOverlap]:
        """Runs work on the current stream, after `previous`; or what may finish later on the communication stream, after
        `previous` or what the current stream has. `inputs`: the tensors that work reads; those that it returns are
        noticed."""
        _checks.event("previous_event", previous)
        device = inputs[0].device
        if device.type != "cuda":
            return work(), EventOverlap()
        if not async_finish:
            # The current stream would wait for the call at once. Contexts keep their calls in order on whichever streams.
            if previous is not None:
                previous.current_stream_wait()
            return work(), EventOverlap()
        comm, current = self.of(device), torch.cuda.current_stream(device)
        handle = previous.event if isinstance(previous, EventOverlap) else previous
        if handle is not None and handle.event is not None:
            comm.wait_event(handle.event)
        else:
            comm.wait_stream(current)
        try:
            with torch.cuda.stream(comm):
                made = work()
        except BaseException:
            # What was enqueued all the same uses tensors that the caller may let go of.
            current.wait_stream(comm)
            raise
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing:
            # Memory of the communication stream, which the current one uses.
            for tensor in _tensors(made):
                tensor.record_stream(current)
        if not capturing:
            for tensor in inputs:
                tensor.record_stream(comm)
        return made, EventOverlap(EventHandle(comm), tuple(inputs))


def world_of(group: Any, comm: Any, seconds: float) -> World:
    """The world of a group of torch.distributed or of an MPI communicator, or a world of the first generation. Its ranks
    wait for each other as long as calls do, where that is longer than they would."""
    world = _world_of(group, comm)
    return world.with_timeout(seconds) if seconds > world.timeout else world


def _world_of(group: Any, comm: Any) -> World:
    """Contexts over a later generation leave out lost ranks' experts, and DeepEP's callers divide all experts among the
    ranks."""
    if isinstance(group, World):
        if group.generation != 0:
            raise ValueError(
                f"group is a world of generation {group.generation}: give a group of these ranks alone, or a world that is "
                "made of it anew"
            )
        return group
    if group is None and comm is None:
        raise ValueError("group is None: give a group of torch.distributed, or a tokenyard.World")
    if group is not None:
        return world_of_group(group)

    def all_gather(what: str, own: bytes, seconds: float) -> List[bytes]:
        gathered: List[bytes] = comm.allgather(own)
        return gathered

    return world_over(comm.Get_rank(), comm.Get_size(), all_gather)


def must_divide(experts: Any, ranks: int) -> int:
    """The number of experts. Refuses numbers that ranks cannot share."""
    number = _checks.whole("num_experts", experts, -(1 << 63), _MOST_EXPERTS)
    if number <= 0 or number % ranks != 0:
        raise ValueError(f"num_experts is {number}: give a multiple of the {ranks} ranks")
    return number


def _tensors(made: Any) -> List[torch.Tensor]:
    """The tensors among results."""
    if isinstance(made, torch.Tensor):
        return [made]
    if isinstance(made, (tuple, list)):
        return [tensor for member in tuple.__iter__(tuple(made)) for tensor in _tensors(member)]
    return []
