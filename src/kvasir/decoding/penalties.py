"""Penalties, bad words and replaced tokens: what the history of a row makes less likely, forbids, or puts in place.

The history is sparse: the ids that a sequence has used, and how often. So a step touches only those logits, and each
row of a draft sees the history that it is conditioned on: the sequence's, plus the draft tokens before the row.

The semantics are vLLM's: the repetition penalty counts prompt and output, presence and frequency the output alone.

Legend: K (row, id) pairs.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch


class History:
    """The distinct ids of a sequence, and how often each occurs in its output. Arrays grow; an id keeps its place."""

    def __init__(self, prompt: list[int], output: list[int]) -> None:
        """``prompt``: ids that count as seen but not as output (empty when only the output matters)."""
        ids = dict.fromkeys(prompt)
        self._place = {token: i for i, token in enumerate(ids)}
        self._ids = np.fromiter(ids, np.int64, len(ids))
        self._counts = np.zeros(len(ids), np.int32)
        self._size = len(ids)
        self.add(output)

    def add(self, tokens: list[int]) -> None:
        for token in tokens:
            place = self._place.get(token)
            if place is None:
                place = self._append(token)
            self._counts[place] += 1

    def _append(self, token: int) -> int:
        if self._size == len(self._ids):
            room = max(64, self._size)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.int32)])
        place = self._place[token] = self._size
        self._ids[place] = token
        self._size += 1
        return place

    def after(self, path: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [K] int64 and output counts [K] int32 of the history followed by the draft tokens ``path``.

        The history itself does not change."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        if not path:
            return ids, counts
        extra = Counter(path)
        new = [token for token in extra if token not in self._place]
        counts = np.concatenate([counts, np.zeros(len(new), np.int32)])
        place = {token: self._size + i for i, token in enumerate(new)}
        for token, times in extra.items():
            counts[self._place.get(token, place.get(token))] += times
        return np.concatenate([ids, np.asarray(new, np.int64)]), counts


def penalise(
    logits_MV: torch.Tensor,
    rows_K: torch.Tensor,
    ids_K: torch.Tensor,
    counts_K: torch.Tensor,
    strength_K3: torch.Tensor,
) -> None:
    """Apply the three penalties to ``logits_MV`` in place.

    The pairs (rows_K, ids_K) are distinct; ``counts_K``: output counts as fp32; ``strength_K3``: repetition, frequency
    and presence of each pair's row."""
    repetition, frequency, presence = strength_K3.unbind(1)
    x = logits_MV[rows_K, ids_K]
    x = torch.where(x > 0, x / repetition, x * repetition)
    logits_MV[rows_K, ids_K] = x - frequency * counts_K - presence * (counts_K > 0)


def replace(logits_MV: torch.Tensor, rows_K: torch.Tensor, ids_K: torch.Tensor, others_K: torch.Tensor) -> None:
    """Give the logit of each (row, id) to another id of the row, in place, and rule out the id itself.

    The pairs (rows_K, ids_K) are distinct. Other ids below 0 get nothing; one that is ruled out stays so."""
    at_K = torch.where(others_K < 0, ids_K, others_K)
    moved_K, there_K = logits_MV[rows_K, ids_K], logits_MV[rows_K, at_K]
    gone = logits_MV.new_full((), float("-inf"))
    logits_MV[rows_K, ids_K] = gone
    keeps_K = (others_K >= 0) & (there_K > gone)
    logits_MV[rows_K, at_K] = torch.where(keeps_K, moved_K, gone)


def banned_by_words(words: list[list[int]], output: list[int]) -> list[int]:
    """Return the ids that would complete one of ``words`` (lists of token ids) after ``output`` (or its last
    tokens)."""
    banned = []
    for *head, last in words:
        if not head or output[-len(head) :] == head:
            banned.append(last)
    return banned
