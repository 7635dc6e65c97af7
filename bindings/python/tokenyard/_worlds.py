"""Worlds of ranks."""

from __future__ import annotations

from typing import Any, List

from ._native import World as World

__all__ = ["World", "world_of_group"]


def world_of_group(group: Any = None) -> World:
    """The world of a torch.distributed group of processes on one host, by its all-gather; `None`: the default group.

    Collective. The group may be of any backend; its own timeout is the deadline. It is used when contexts are built,
    and not by dispatch and combine.
    """
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(what: str, own: bytes, seconds: float) -> List[bytes]:
        gathered: List[Any] = [None] * size
        dist.all_gather_object(gathered, own, group=group)
        return gathered

    return World.over(rank, size, all_gather)
