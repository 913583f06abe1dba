"""The base of policies that ask the last rows of a prompt which of its tokens stay, such as SnapKV.

Legend: N tokens in the cache, W rows of the window, M = N - W, G KV heads, R query heads of a KV head, C tokens kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from kvasir.errors import ConfigError
from kvasir.kv.policy import KVPolicy, Memory, best_places, last_places
from kvasir.types.sequence import NEVER


@dataclass(frozen=True)
class WindowConfig:
    budget: int = 2048  # tokens of a prompt that stay, on average over the layers
    window: int = 64  # last rows that are asked, whose tokens always stay
    pool: int = 5  # neighbours that a score is averaged over; odd

    def __post_init__(self) -> None:
        if self.window < 1 or self.budget <= self.window or self.pool < 1 or not self.pool % 2:
            raise ConfigError("window is at least 1, budget is larger than window, pool is odd")


class PromptWindow(KVPolicy):
    """Forgets tokens of the prompt once, when it is computed. Each KV head keeps its own."""

    phases = frozenset(("prompt",))
    evidence = "last_rows"
    by_head = True
    by_request = ("budget",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rows = config.window

    def next_due(self, num_prompt: int, length: int, count: int) -> int:
        return num_prompt if length < num_prompt and count + num_prompt - length > self.config.budget else NEVER

    def left(self, num_prompt: int, length: int, count: int) -> int:
        return self.config.budget

    def observe(self, memory: Memory, attention_GRLN: torch.Tensor, first: int) -> None:
        memory.notes[memory.layer] = self.asked(attention_GRLN[..., : -self.rows])

    def keep(self, memory: Memory, left: int) -> torch.Tensor:
        scores_GM = self.scores(memory.notes.pop(memory.layer))
        last = last_places(memory.count, self.rows, memory.pages.device).expand(len(scores_GM), -1)
        return torch.cat([best_places(scores_GM, left - self.rows), last], 1)

    @abstractmethod
    def asked(self, attention_GRWM: torch.Tensor) -> Any:
        """Notes of a layer, of the attention of the window's rows to the tokens before the window."""
        raise NotImplementedError

    def scores(self, noted: Any) -> torch.Tensor:
        """The scores [G, M] of the tokens before the window."""
        return noted


def smooth(scores_GN: torch.Tensor, pool: int) -> torch.Tensor:
    """Each score averaged with its neighbours, ``pool`` in all; beyond the ends stand zeros."""
    return F.avg_pool1d(scores_GN[:, None], pool, 1, pool // 2)[:, 0]


def mean_scores(attention_GRWM: torch.Tensor, pool: int) -> torch.Tensor:
    """SnapKV's scores [G, M]: means over rows and the query heads of a KV head, smoothed. Query heads are averaged
    because keys and values are stored once a KV head; the paper's code repeats them."""
    return smooth(attention_GRWM.mean((1, 2)), pool)


def whole_shares(shares: Sequence[float], total: int, most: int) -> list[int]:
    """Whole numbers of at most ``most`` each, as near to ``shares`` as that allows, whose sum is ``total``, or ``most``
    for each if that is less. What some cannot take goes to the others in equal parts, what is left over to the first.
    """
    found = [min(most, max(0, int(share))) for share in shares]
    total = min(total, most * len(found))
    while (missing := total - sum(found)) != 0:
        open_ = [i for i, n in enumerate(found) if (n < most if missing > 0 else n > 0)]
        step = max(1, abs(missing) // len(open_))
        for i in open_[: abs(missing)]:
            change = min(step, most - found[i]) if missing > 0 else -min(step, found[i])
            found[i] += change
            missing -= change
            if not missing:
                break
    return found
