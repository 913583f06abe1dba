"""Acceptance of a trained drafter, counted as in the engine: each reply is walked from draft to draft, greedily."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from kvasir.lab.drafters import data as drafter_data
from kvasir.lab.drafters.data import BATCH_TOKENS, Texts
from kvasir.lab.drafters.kind import Kind


def walk(right_JT: np.ndarray, begin: int, length: int) -> tuple[int, list[list[int]]]:
    """Forwards after a reply's first token when one chain is drafted a forward, and [tried, accepted] by depth.

    ``right_JT``: whether guess j of root p is token p + 2 + j. ``begin``, ``length``: where the reply starts and ends.
    """
    depth = len(right_JT)
    by_depth = [[0, 0] for _ in range(depth)]
    anchor, forwards = begin, 0  # The anchor is a known token; the forward that computes it draws the next one.
    while anchor < length - 1:
        accepted = 0
        for j in range(min(depth, length - 1 - anchor)):
            by_depth[j][0] += 1
            if not right_JT[j, anchor - 1]:
                break
            by_depth[j][1] += 1
            accepted += 1
        anchor += accepted + 1
        forwards += 1
    return forwards, by_depth


@torch.no_grad()
def acceptance(kind: Kind, texts: Texts) -> dict[str, Any]:
    """Tokens a forward and acceptance by depth of greedy chains on greedy replies, in all and by task."""
    rows: dict[int, list[int]] = {}  # task -> tokens, forwards
    totals = [[0, 0] for _ in range(kind.depth)]
    for batch in drafter_data.batches(texts, BATCH_TOKENS[kind.target.device.type], 0, 0):
        ids = batch.ids.to(kind.target.device)
        right = (
            torch.stack(
                [
                    F.pad(guess[:, : -2 - j] == ids[:, 2 + j :], (0, 2 + j))
                    if guess.shape[1] > 2 + j
                    else torch.zeros_like(guess).bool()
                    for j, guess in enumerate(kind.guesses(batch))
                ],
                1,
            )
            .cpu()
            .numpy()
        )
        for i, (begin, length, number) in enumerate(
            zip(batch.begins.tolist(), batch.lengths.tolist(), batch.texts.tolist())
        ):
            forwards, by_depth = walk(right[i], begin, length)
            row = rows.setdefault(int(texts.tasks[number]), [0, 0])
            row[0] += max(0, length - 1 - begin)
            row[1] += forwards
            for mine, theirs in zip(totals, by_depth):
                mine[0] += theirs[0]
                mine[1] += theirs[1]
    tokens, forwards = (sum(row[i] for row in rows.values()) for i in range(2))
    return {
        "replies": len(texts),
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / max(1, forwards),
        "by_depth": [accepted / max(1, tried) for tried, accepted in totals],
        "tried": [tried for tried, _ in totals],
        "by_task": {texts.specs[i]: row[0] / row[1] for i, row in sorted(rows.items()) if row[1]},
    }
