"""Acceptance of a trained drafter on held-out replies, in all and by task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from kvasir.learn.walk import correct, walk
from kvasir_lab.drafters import data as drafter_data
from kvasir_lab.drafters.data import BATCH_TOKENS, Batch, Texts


@torch.no_grad()
def acceptance(
    guesses: Callable[[Batch], Iterable[torch.Tensor]], depth: int, texts: Texts, device: torch.device
) -> dict[str, Any]:
    """Tokens a forward and acceptance by depth of greedy chains on greedy replies, in all and by task.

    ``guesses``: see `kvasir.learn.walk.correct`; ``depth``: how many of them.
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
