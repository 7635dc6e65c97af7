"""Contexts for callers who know no most number of tokens. Imports torch.

Each is made for the most tokens that any rank has then, rounded up. A rank that has more later sends, in place of its
tokens, a row to a further expert that each rank has for this alone. The counts of a dispatch come to the host before
its rows, so every rank sees it, and all of them make a larger context and dispatch once more.
"""

from __future__ import annotations

from typing import List, Tuple

import torch

from ._errors import NO_EXPERT
from ._tensors import in_memory
from ._worlds import World

# Fewest tokens for which a context is made.
_LEAST = 128


def room(world: World, tokens: int, before: int, limit: int = 1 << 20) -> int:
    """Tokens of a rank for which all ranks make a context, of which this one has so many now. Collective.

    `before`: what there is room for already. `limit`: up to which the number is rounded.
    """
    return max(before, rounded(most(world, tokens)[0], min(limit, world.most_tokens)))


def most(world: World, *numbers: int) -> List[int]:
    """The largest of each number among all ranks. Collective."""
    gathered = world.all_gather(" ".join(map(str, numbers)).encode())
    return [max(of_ranks) for of_ranks in zip(*([int(word) for word in others.split()] for others in gathered))]


def rounded(tokens: int, limit: int = 1 << 20) -> int:
    """Tokens for which a context is made where ranks have so many. `limit`: up to which the number is rounded."""
    return max(_LEAST, tokens, min(1 << max(tokens - 1, 0).bit_length(), limit))


def placement(experts: int, ranks: int) -> List[int]:
    """The rank of each expert, and then of the further ones."""
    return [e * ranks // experts for e in range(experts)] + list(range(ranks))


def named(topk_idx: torch.Tensor, experts: int, ranks: int, name: str = "topk_idx") -> torch.Tensor:
    """The caller's choices, of which none is a further expert: a number that no expert has takes their place."""
    in_memory(name, topk_idx)
    further = (topk_idx >= experts) & (topk_idx < experts + ranks)
    return topk_idx.masked_fill(further, NO_EXPERT)


def of_choices(came: torch.Tensor, choices: int, waits: bool) -> torch.Tensor:
    """The first columns of what came, as many as this rank's tokens have choices. Where the host `waits` for a call's
    counts, it refuses rows of tokens with more, for which it waits in contexts of more choices."""
    if waits and came.shape[1] > choices and bool((came[:, choices:] >= 0).any()):
        raise ValueError(
            f"topk_idx has {choices} choices a token, and another rank's has up to {came.shape[1]}: give topk_idx as many "
            "columns on all ranks, also where it has no rows"
        )
    return came[:, :choices]


def notice(x: torch.Tensor, experts: int, choices: int, ranks: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Rows and choices that a rank sends in place of its tokens: one row to the further expert of each rank."""
    rows = -(-ranks // choices)
    topk_idx = torch.full((rows * choices,), -1, dtype=torch.int64, device=x.device)
    topk_idx[:ranks] = torch.arange(experts, experts + ranks, device=x.device)
    return torch.zeros((rows, x.shape[1]), dtype=x.dtype, device=x.device), topk_idx.view(rows, choices)
