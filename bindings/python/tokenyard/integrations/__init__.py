"""Adapters to frameworks that have an interface of their own for the exchange of tokens.

Each imports its framework only when it is used.
"""

from __future__ import annotations


def seconds(timeout: float) -> None:
    """Refuses what is no time for which calls wait for other ranks."""
    if not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is of another type: expected seconds, got {type(timeout).__name__}")
    if not 0 < timeout <= 1e9:
        raise ValueError(f"timeout is {timeout}: expected seconds above 0, up to 1e9, got {timeout}")
