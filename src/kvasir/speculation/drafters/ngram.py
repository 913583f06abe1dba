"""Prompt lookup: propose what followed the last n tokens earlier in this text. Exact; costs a few dictionary look-ups.

The longest n-gram, from ``max_match`` down to ``min_match`` tokens, that occurred before wins, at its latest place. The
copy may continue into itself, so loops go on for ever. It pays where output repeats the prompt: editing, extraction,
tables, code.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.errors import ConfigError
from kvasir.speculation.drafter import Ask, Drafter
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence

WINDOW = 1 << 14  # last tokens of a prompt that are searched


@dataclass(frozen=True, slots=True)
class Config:
    max_match: int = 4
    min_match: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise ConfigError(
                f"ngram:min_match={self.min_match},max_match={self.max_match}: "
                "they must satisfy 1 <= min_match <= max_match"
            )


class _Index:
    """Index of one text: for each n-gram, the position after its latest occurrence. ``end``: tokens indexed so far."""

    def __init__(self, first: int) -> None:
        self.end = first
        self.first = first
        self.follows: dict[tuple[int, ...], int] = {}


class Ngram(Drafter):
    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        return [self._chain(ask.seq, min(ask.max_nodes, ask.max_depth)) for ask in asks]

    def _chain(self, seq: Sequence, length: int) -> DraftTree:
        tokens = seq.tokens
        index = seq.state.get("ngram")
        if index is None:
            index = seq.state["ngram"] = _Index(max(0, len(tokens) - WINDOW))
        self._catch_up(index, tokens)
        for n in range(min(self.config.max_match, len(tokens)), self.config.min_match - 1, -1):
            at = index.follows.get(tuple(tokens[-n:]))
            if at is None:
                continue
            copied: list[int] = []
            for i in range(at, at + length):
                copied.append(tokens[i] if i < len(tokens) else copied[i - len(tokens)])
            return DraftTree.chain(copied, n / (n + 1))
        return DraftTree()

    def _catch_up(self, index: _Index, tokens: list[int]) -> None:
        """Index the n-grams that end before the last token, since only those have a continuation."""
        follows, low, high = index.follows, self.config.min_match, self.config.max_match
        for end in range(index.end, len(tokens) - 1):
            for n in range(low, min(high, end + 1 - index.first) + 1):
                follows[tuple(tokens[end + 1 - n : end + 1])] = end + 1
        index.end = max(index.end, len(tokens) - 1)
