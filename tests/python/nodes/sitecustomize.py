"""Programs that run with this folder on PYTHONPATH have groups of two nodes: tests of engines run so between hosts."""

import os

from tokenyard import _worlds

_over = _worlds.world_over


def _of_two_nodes(rank, size, all_gather, *job):
    if size > 1:
        os.environ["TOKENYARD_NODES"] = f"{size // 2},{size - size // 2}"
    return _over(rank, size, all_gather)


_worlds.world_over = _of_two_nodes
