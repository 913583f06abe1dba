"""LazyEviction: tokens that are attended to again and again stay, even through quiet times (arXiv 2506.15969).

Lossy. For each token and KV head two numbers are kept: the last step of the answer in which some query head gave it at
least ``alpha``, and the longest interval between two such steps. Every ``window`` steps, while more than ``budget``
tokens are in the cache, those go whose silence is long for their own interval. The last ``window`` tokens always stay.

The paper's code repeats keys and values for every query head; here a KV head counts a hit if one of its query heads
does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.errors import ConfigError
from kvasir.kv.codec import Plane
from kvasir.kv.policy import KVPolicy, Memory, best_places, last_places
from kvasir.types import CacheRow

PLANE = "k_recurrence"  # the last step with a hit, and the longest interval


@dataclass(frozen=True)
class Config:
    budget: int = 2048  # tokens that stay
    window: int = 128  # steps of the answer from one forgetting to the next, and last tokens that always stay
    alpha: float = 1e-4  # the least weight that counts as attention

    def __post_init__(self) -> None:
        if self.window < 1 or self.budget <= self.window or not 0 < self.alpha < 1:
            raise ConfigError("lazy_eviction: window is at least 1, budget is larger, alpha is between 0 and 1")


class LazyEviction(KVPolicy):
    """Forgets, while the answer grows, the tokens that are least likely to be attended to again."""

    phases = frozenset(("answer",))
    evidence = "answer_rows"
    by_head = True
    query_agnostic = True
    by_request = ("budget",)

    def planes(self, row: CacheRow) -> list[Plane]:
        return [Plane(PLANE, 2, torch.float32)]

    def next_due(self, num_prompt: int, length: int, count: int) -> int:
        c = self.config
        steps = max(length - num_prompt, 0)
        over = c.budget + 1 - count + length - num_prompt  # the first step with more than the budget
        return num_prompt + max(steps // c.window + 1, -(-over // c.window)) * c.window

    def left(self, num_prompt: int, length: int, count: int) -> int:
        return min(count, self.config.budget)

    def observe(self, memory: Memory, attention_GRLN: torch.Tensor, first: int) -> None:
        rows_GLN = attention_GRLN.amax(1)
        heads, length, count = rows_GLN.shape
        known = count - length
        last_GN, longest_GN = rows_GLN.new_zeros(2, heads, count)
        if memory.notes.setdefault(memory.layer, False):
            old_GN2 = memory.plane(PLANE)[:, :known]
            last_GN[:, :known], longest_GN[:, :known] = old_GN2[..., 0], old_GN2[..., 1]
        memory.notes[memory.layer] = True
        for row in range(length):
            step, end = first + row - memory.num_prompt + 1, count - length + row + 1
            last_GN[:, end - 1] = step - 1
            hit = rows_GLN[:, row, :end] >= self.config.alpha
            silence = step - last_GN[:, :end]
            longest_GN[:, :end] = torch.where(hit, torch.maximum(longest_GN[:, :end], silence), longest_GN[:, :end])
            last_GN[:, :end] = torch.where(hit, torch.full_like(silence, step), last_GN[:, :end])
        memory.store(PLANE, torch.stack([last_GN, longest_GN], -1))

    def keep(self, memory: Memory, left: int) -> torch.Tensor:
        last_GN, longest_GN = memory.plane(PLANE).unbind(-1)
        scores_GN = importance(memory.length - memory.num_prompt - last_GN, longest_GN)
        window = min(self.config.window, left)
        last = last_places(memory.count, window, memory.pages.device).expand(len(scores_GN), -1)
        return torch.cat([best_places(scores_GN[:, : memory.count - window], left - window), last], 1)


def importance(silence: torch.Tensor, longest: torch.Tensor) -> torch.Tensor:
    """The score of tokens that were last attended to ``silence`` steps ago, at intervals of at most ``longest``: it
    decays when a silence exceeds the token's own intervals, and short intervals count more."""
    recurring = 2 / (1 + torch.exp(longest - 1))
    return 2 / (1 + torch.exp(1 + silence / (longest + 1e-5))) + torch.where(longest > 0, recurring, 0)
