"""Programs that run with this folder on PYTHONPATH have groups of two nodes: tests of engines run so between hosts."""

import os

from tokenyard import _worlds

_over = _worlds.world_over


def of_two_nodes(rank, size, all_gather, *job):
    """A world over an all-gather, whose ranks are of two nodes if they are several."""
    if size > 1:
        os.environ["TOKENYARD_NODES"] = f"{size // 2},{size - size // 2}"
    world = _over(rank, size, all_gather)
    assert len(world.nodes) == min(size, 2), world.nodes
    return world


_worlds.world_over = of_two_nodes
