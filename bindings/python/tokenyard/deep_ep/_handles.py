"""Handles of `deep_ep.Buffer`: tuples with DeepEP's members, of which some are made when they are first looked at."""

from __future__ import annotations

from typing import Any, Callable, Iterator, Optional, Tuple

import torch

from . import _planned
from ._contexts import Kept


class _Handle(Tuple[Any, ...]):
    """A tuple that has all its members by `_members`, and what is there at once by `_known`."""

    def _members(self) -> Tuple[Any, ...]:
        raise NotImplementedError

    def _known(self) -> Tuple[Any, ...]:
        return tuple(super().__iter__())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members())

    def __getitem__(self, place: Any) -> Any:
        return self._members()[place]

    def __add__(self, other: Any) -> Any:
        return self._members() + other

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._members()!r}"


class NormalHandle(_Handle):
    """The handle of a normal dispatch: six members, as DeepEP's within a node.

    [0] rank_prefix_matrix int32 `[ranks, ranks]`, of which this rank's column is known: how many rows come from the
    sources up to each one; -1 elsewhere. [3] int32 `[rows]`: the token of each row at its source. [4] is_token_in_rank.
    The others are None: what DeepEP's kernels keep there is kept elsewhere."""

    kept: Kept
    prefixes: Callable[[], torch.Tensor]

    def _members(self) -> Tuple[Any, ...]:
        return (self.prefixes(), *self._known()[1:])

    def __getitem__(self, place: Any) -> Any:
        wanted = isinstance(place, slice) or place in (0, -6)
        return (self._members() if wanted else self._known())[place]


class LowLatencyHandle(_Handle):
    """The handle of a low-latency dispatch: int32 `[local experts, rows]`, the token of each row at its source; int64
    `[local experts, ranks]`, where the rows of each rank begin, times 2^32, plus how many they are; then
    num_max_dispatch_tokens_per_rank, hidden and num_experts."""

    planned: Optional[_planned.Dispatched] = None
    """What the operator in C made, if it did."""
    made: Optional[Tuple[_planned.Shape, torch.Tensor]] = None
    """The shape of such a dispatch, and its counts, in whose memory the first two members are."""
    _kept: Optional[Kept] = None
    _beside: Tuple[Any, ...] = ()

    @property
    def kept(self) -> Optional[Kept]:
        """What calls need; None before the hook has received the dispatch."""
        if self._kept is None and self.planned is not None:
            self._kept = _planned.kept(self.planned)
        return self._kept

    @kept.setter
    def kept(self, kept: Kept) -> None:
        self._kept = kept

    def _members(self) -> Tuple[Any, ...]:
        if self.made is None:
            return self._known()
        if not self._beside:
            shape, counts = self.made
            self._beside = shape.beside(counts)
        return (*self._beside, *self._known()[2:])
