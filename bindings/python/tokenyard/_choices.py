"""Which choice of its token each row is, which the library does not report: a payload brings each token's experts
beside its rows. Imports torch."""

from __future__ import annotations

from typing import Optional

import torch


def words(topk_idx: torch.Tensor) -> torch.Tensor:
    """The words of a payload that name each token's experts: int32 as the bits of fp32, `[tokens, top_k]`."""
    return topk_idx.to(torch.int32).view(torch.float32)


def of_rows(
    named: torch.Tensor, expert: torch.Tensor, local: torch.Tensor, source: Optional[torch.Tensor]
) -> torch.Tensor:
    """Which choice each row is, bool `[rows, top_k]`: one at most, and none for a row of no token.

    `named`: int32 `[rows, top_k]`, the experts of each row's token. `expert`: the row's own, in the same numbers.
    `local`: its local number, -1 for a row of no token. `source`: int32 `[rows, 2]`, rank and token, where tokens may
    name an expert several times."""
    match = (named == expert[:, None]) & (local >= 0)[:, None]
    if source is None:
        return match
    # Rows of one token at one expert are neighbours, in the order of its choices.
    key = torch.cat((source, local[:, None]), 1)
    again = torch.zeros_like(local, dtype=torch.bool)
    again[1:] = (key[1:] == key[:-1]).all(1)
    place = torch.arange(local.numel(), device=local.device)
    nth = place - torch.where(again, 0, place).cummax(0).values if place.numel() else place
    return match & (match.cumsum(1) == nth[:, None] + 1)
