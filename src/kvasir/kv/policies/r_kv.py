"""R-KV: attended tokens stay, unless later ones say the same (arXiv 2505.24133).

Lossy. While the answer grows, ``buffer`` tokens are forgotten at once. A token's importance is the attention of the
last ``rows`` rows: the largest over the query heads of its KV head and over neighbours. Its redundancy is how alike its
key is to the others of its head, on average. The ``recent`` last of the keys that are more alike than ``threshold`` do
not count, so that the latest of a repetition stays. The score is ``mix`` of the first less ``1 - mix`` of the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from kvasir.errors import ConfigError
from kvasir.kv.policy import KVPolicy, Memory, best_places, last_places

BLOCK = 512  # keys that are compared with all others at a time, whatever the length: a mean has the same bits


@dataclass(frozen=True)
class Config:
    budget: int = 1024  # tokens that stay
    buffer: int = 128  # tokens that are forgotten at once
    rows: int = 8  # last rows that are asked, whose tokens always stay
    pool: int = 7  # neighbours over which the largest importance counts; odd
    mix: float = 0.1  # share of the importance in the score
    threshold: float = 0.5  # cosine from which two keys say the same
    recent: int = 1  # last of such keys that do not make a token redundant

    def __post_init__(self) -> None:
        fits = self.budget > self.rows > 0 and self.buffer >= self.rows and self.pool % 2 == 1
        if not fits or not 0 <= self.mix <= 1 or self.recent < 0:
            raise ConfigError(
                "r_kv: budget is larger than rows, buffer is not less than rows, pool is odd, mix is from 0 to 1"
            )


class RKV(KVPolicy):
    """Forgets, while the answer grows, tokens that are ignored or redundant."""

    phases = frozenset(("answer",))
    evidence = "last_rows"
    by_head = True
    query_agnostic = True
    by_request = ("budget",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rows = config.rows

    def next_due(self, num_prompt: int, length: int, count: int) -> int:
        c = self.config
        return max(length + c.budget + c.buffer - count, length + c.rows, num_prompt + c.rows)

    def left(self, num_prompt: int, length: int, count: int) -> int:
        return min(count, self.config.budget)

    def observe(self, memory: Memory, attention_GRLN: torch.Tensor, first: int) -> None:
        rows_GLN = attention_GRLN.amax(1)
        sums_GN = memory.notes.get(memory.layer, rows_GLN.new_zeros(len(rows_GLN), 0))
        sums_GN = F.pad(sums_GN, (0, rows_GLN.shape[2] - sums_GN.shape[1]))
        for row in range(rows_GLN.shape[1]):
            sums_GN = sums_GN + rows_GLN[:, row]
        memory.notes[memory.layer] = sums_GN

    def keep(self, memory: Memory, left: int) -> torch.Tensor:
        c, sums_GN = self.config, memory.notes.pop(memory.layer)
        scores_GN = F.max_pool1d(sums_GN[:, None] / c.rows, c.pool, 1, c.pool // 2)[:, 0]
        scores_GN = c.mix * scores_GN - (1 - c.mix) * redundancy(memory.keys(), c.threshold, c.recent)
        last = last_places(memory.count, c.rows, memory.pages.device).expand(len(scores_GN), -1)
        return torch.cat([best_places(scores_GN[:, : memory.count - c.rows], left - c.rows), last], 1)


def redundancy(k_GND: torch.Tensor, threshold: float, recent: int) -> torch.Tensor:
    """Likeness of each key to the others of its head [G, N]: the mean cosine under a softmax. The ``recent`` last keys
    that are more alike than ``threshold`` do not count."""
    unit_GND = F.normalize(k_GND.float(), dim=-1)
    count, means = unit_GND.shape[1], []
    for start in range(0, count, BLOCK):
        like_GBN = unit_GND[:, start : start + BLOCK] @ unit_GND.transpose(1, 2)
        own = torch.arange(start, min(start + BLOCK, count), device=k_GND.device)
        like_GBN[:, own - start, own] = 0
        alike = like_GBN > threshold
        from_the_end = alike.flip(-1).cumsum(-1).flip(-1)
        like_GBN[alike & (from_the_end <= recent)] = 0
        means.append(like_GBN.mean(-1))
    return torch.softmax(torch.cat(means, 1), -1)
