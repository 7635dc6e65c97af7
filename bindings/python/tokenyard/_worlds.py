"""Worlds of ranks.

Ranks of a group may be on several hosts. Each rank reports its host, and all of them divide the world into nodes alike.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, Callable, Dict, List, NoReturn, Optional, Sequence, Type

from . import _native
from ._native import BootstrapError, ConfigError, Error
from ._native import World as World

__all__ = ["World", "by_ranks", "gather_of", "host", "refuse", "world_of_group", "world_over"]

AllGather = Callable[[str, bytes, float], List[bytes]]


def refuse(kind: Type[Error], text: str) -> NoReturn:
    """Raises an error of this package's own, which leaves everything as it was."""
    error = kind(text)
    error.fatal = False
    raise error


def by_ranks(values: Sequence[str]) -> str:
    """Values with their ranks, for messages."""

    def ranks_of(value: str) -> str:
        ranks = [str(rank) for rank, each in enumerate(values) if each == value]
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:4])}{more}"

    return "; ".join(ranks_of(value) for value in dict.fromkeys(values))


def host() -> str:
    """This process's host. Processes that return the same can share memory: they have the kernel and the namespace of
    sockets in common, by which ranks of a node pass their memory. The name is for kernels that are copies of one."""
    return f"{socket.gethostname()} {_native.host()}"


def world_of_group(group: Any = None) -> World:
    """The world of a torch.distributed group of processes, by its all-gather; `None`: the default group. Ranks of a
    host are a node, unless `TOKENYARD_NODES` says otherwise.

    Collective. The group may be of any backend; its own timeout is the deadline. It is used when contexts are built,
    and not by dispatch and combine. `local_rank` is torchrun's LOCAL_RANK; without it, the rank's place among those
    of its host, or of a group of some of the job's processes the process's rank among all, modulo this host's GPUs: such
    a group takes the GPUs of these processes.

    Raises ValueError in a process that is none of the group's.
    """
    import torch
    import torch.distributed as dist

    all_gather = gather_of(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    stated = os.environ.get("LOCAL_RANK", "")
    job = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (rank, size)
    # Of some of a job's processes, those of their host that are none of the group are not known: hosts have as many ranks
    # as this one has GPUs.
    part = job[0] % (torch.cuda.device_count() or job[1]) if job[1] != size else None
    local_rank = int(stated) if stated.isdecimal() else part
    return world_over(rank, size, all_gather, *job, local_rank)


def gather_of(group: Any) -> AllGather:
    """The all-gather of a torch.distributed group of processes."""
    import torch.distributed as dist

    if dist.get_rank(group) < 0:
        raise ValueError(f"group is one without this process, rank {dist.get_rank()} of all: make its world in its members")

    def all_gather(what: str, own: bytes, seconds: float) -> List[bytes]:
        gathered: List[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own, group=group)
        return gathered

    return all_gather


def world_over(
    rank: int,
    size: int,
    all_gather: AllGather,
    job_rank: Optional[int] = None,
    job_size: Optional[int] = None,
    local_rank: Optional[int] = None,
) -> World:
    """The world of ranks that this all-gather reaches. `job_rank`, `job_size`: of the job that the ranks are of, by
    which `TOKENYARD_NODES` counts; by default they are the job. `local_rank`: by default this rank's place among those of
    its host. Collective."""
    own = {
        "host": host(), "nodes": os.environ.get("TOKENYARD_NODES"), "rank": rank if job_rank is None else job_rank,
        "job": size if job_size is None else job_size,
    }
    # The deadline is the all-gather's own.
    parts = all_gather("hosts of ranks", json.dumps(own).encode(), 30.0)
    ranks = [_report(each, part) for each, part in enumerate(parts)]
    nodes = _nodes(ranks)
    hosts = [each["host"] for each in ranks]
    if local_rank is None:
        local_rank = hosts[:rank].count(hosts[rank])
    world = World.over(rank, size, all_gather, local_rank=local_rank)
    return world if len(nodes) == 1 else world.with_nodes(nodes)


def _report(rank: int, part: bytes) -> Dict[str, Any]:
    """What a rank reports of its host."""
    try:
        report = json.loads(part)
        return {name: report[name] for name in ("host", "nodes", "rank", "job")}
    except (KeyError, TypeError, ValueError):
        refuse(
            BootstrapError,
            f"rank {rank} reports no host: see that all ranks have the same version of tokenyard, and make the same "
            "collective calls in the same order",
        )


def _nodes(ranks: List[Dict[str, Any]]) -> List[int]:
    """Sizes of nodes, by what all ranks report: all of them find the same, or raise the same."""
    given = {each["nodes"] for each in ranks}
    if len(given) > 1:
        named = by_ranks(["not set" if each["nodes"] is None else repr(each["nodes"]) for each in ranks])
        refuse(ConfigError, f"TOKENYARD_NODES is {named}: give all ranks the same, or none of them")
    (text,) = given
    labels = [each["host"] for each in ranks] if text is None else _labels(text, ranks)
    sizes: List[int] = []
    for rank, label in enumerate(labels):
        if rank and label == labels[rank - 1]:
            sizes[-1] += 1
        elif label in labels[:rank]:
            first, last = labels.index(label), rank
            refuse(
                ConfigError,
                f"ranks {first} and {last} of the group are of one node, and ranks between them are not: order the "
                "group's ranks by host, so that those of a host follow each other",
            )
        else:
            sizes.append(1)
    for rank in range(1, len(ranks)):
        if labels[rank] == labels[rank - 1] and ranks[rank]["host"] != ranks[rank - 1]["host"]:
            refuse(
                ConfigError,
                f"TOKENYARD_NODES is {text}: it has ranks {rank - 1} and {rank} of the group in one node, and they are "
                "on several hosts: leave it out, or give sizes of nodes that are on one host each",
            )
    return sizes


def _labels(text: str, ranks: List[Dict[str, Any]]) -> List[Any]:
    """The node of each rank by `TOKENYARD_NODES`, which counts the ranks of the job or those of the group."""
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    job = max(each["job"] for each in ranks)
    if not sizes or min(sizes) < 1 or sum(sizes) not in (job, len(ranks)):
        of_job = "" if job == len(ranks) else f" or the {job} ranks of the job"
        refuse(
            ConfigError,
            f"TOKENYARD_NODES is {text}: give sizes of at least 1 that add up to the {len(ranks)} ranks of the "
            f"group{of_job}",
        )
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    return [nodes[each["rank"] if len(nodes) == job else rank] for rank, each in enumerate(ranks)]
