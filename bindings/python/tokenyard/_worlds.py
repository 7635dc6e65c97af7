"""Worlds of ranks."""

from __future__ import annotations

import os
from typing import Any, List

from ._native import World as World

__all__ = ["World", "world_of_group"]


def world_of_group(group: Any = None) -> World:
    """The world of a torch.distributed group of processes on one host, by its all-gather; `None`: the default group.

    Collective. The group may be of any backend; its own timeout is the deadline. It is used when contexts are built,
    and not by dispatch and combine. `local_rank` is torchrun's LOCAL_RANK; without it, the process's rank among all:
    a part of the job's processes takes the GPUs of these processes.

    Raises ValueError in a process that is none of the group's.
    """
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"group is one without this process, rank {dist.get_rank()} of all: make its world in its members")

    def all_gather(what: str, own: bytes, seconds: float) -> List[bytes]:
        gathered: List[Any] = [None] * size
        dist.all_gather_object(gathered, own, group=group)
        return gathered

    stated = os.environ.get("LOCAL_RANK", "")
    local_rank = int(stated) if stated.isdecimal() else dist.get_rank()
    return World.over(rank, size, all_gather, local_rank=local_rank)
