"""Acceptance of a trained drafter, counted as in the engine: each reply is walked from draft to draft, greedily."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from kvasir.lab.drafters import data as drafter_data
from kvasir.lab.drafters.data import BATCH_TOKENS, Batch, Texts


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


@torch.no_grad()
def acceptance(
    guesses: Callable[[Batch], Iterable[torch.Tensor]], depth: int, texts: Texts, device: torch.device
) -> dict[str, Any]:
    """Tokens a forward and acceptance by depth of greedy chains on greedy replies, in all and by task.

    ``guesses``: see `correct`; ``depth``: how many of them.
    """
    rows: dict[int, list[int]] = {}  # task -> tokens, forwards
    totals = [[0, 0] for _ in range(depth)]
    for batch in drafter_data.batches(texts, BATCH_TOKENS[device.type], 0, 0):
        right = correct(guesses(batch), batch.ids.to(device))
        for i, (begin, length, number) in enumerate(
            zip(batch.begins.tolist(), batch.lengths.tolist(), batch.texts.tolist())
        ):
            count, by_depth = walk(right[i], begin, length)
            row = rows.setdefault(int(texts.tasks[number]), [0, 0])
            row[0] += max(0, length - 1 - begin)
            row[1] += count
            for mine, theirs in zip(totals, by_depth):
                mine[0] += theirs[0]
                mine[1] += theirs[1]
    tokens, count = (sum(row[i] for row in rows.values()) for i in range(2))
    return {
        "replies": len(texts),
        "tokens": tokens,
        "forwards": count,
        "tokens_per_forward": tokens / max(1, count),
        "by_depth": [accepted / max(1, tried) for tried, accepted in totals],
        "tried": [tried for tried, _ in totals],
        "by_task": {texts.specs[i]: row[0] / row[1] for i, row in sorted(rows.items()) if row[1]},
    }
