"""Tokens a forward of a drafter on known texts, counted as the engine would: from draft to draft, greedily.

Legend: B texts, J guesses of a draft, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch.nn import functional as F


def forwards(right_JT: np.ndarray, begin: int, length: int, chain: bool = False) -> Iterator[tuple[int, int, int]]:
    """Yield (root, tried, accepted) of each forward after a reply's first token, one chain of drafts a forward.

    ``right_JT``: whether guess j of root p is token p + 2 + j. ``begin``, ``length``: where the reply starts and ends.
    The root is the row before the last known token. ``chain``: guesses stand behind the last draft alone, so a forward
    that rejects a draft leaves none, and the next one tries 0.
    """
    anchor, drafts = begin, True  # The anchor is a known token; the forward that computes it draws the next one.
    while anchor < length - 1:
        most = min(len(right_JT), length - 1 - anchor) if drafts else 0
        accepted = 0
        while accepted < most and right_JT[accepted, anchor - 1]:
            accepted += 1
        yield anchor - 1, min(most, accepted + 1), accepted
        drafts = not chain or accepted == most
        anchor += accepted + 1


def walk(right_JT: np.ndarray, begin: int, length: int) -> tuple[int, list[list[int]]]:
    """Number of `forwards`, and [tried, accepted] by depth."""
    by_depth = [[0, 0] for _ in range(len(right_JT))]
    count = 0
    for _, tried, accepted in forwards(right_JT, begin, length):
        count += 1
        for depth in range(tried):
            by_depth[depth][0] += 1
            by_depth[depth][1] += depth < accepted
    return count, by_depth


@torch.no_grad()
def correct(guesses: Iterable[torch.Tensor], ids: torch.Tensor) -> np.ndarray:
    """Whether guess j of root p is token p + 2 + j [B, J, T], from guesses [B, T] of each j and the texts [B, T]."""
    found = [
        F.pad(guess[:, : -2 - j] == ids[:, 2 + j :], (0, 2 + j))
        if guess.shape[1] > 2 + j
        else torch.zeros_like(guess).bool()
        for j, guess in enumerate(guesses)
    ]
    return torch.stack(found, 1).cpu().numpy()
