"""H2O: tokens that were attended to most, and the last ones, stay (arXiv 2306.14048).

Lossy. A token's score is the sum of the attention that all rows since have given it, a mean over the query heads that
share its KV head. When the prompt is computed, each KV head keeps its share of heavy and of recent tokens. While the
answer grows, tokens are forgotten ``slack`` at a time, and scores go on to grow in between.

``noise=true`` scores as Keyformer does (arXiv 2403.09054): standard Gumbel noise is added to each logit, and the sum is
divided by a temperature that rises from 1 to 2 as the answer grows. The noise is a function of the request's stream,
layer, head, row and place, so that it does not depend on what else runs. Attention itself has no noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvasir.errors import ConfigError
from kvasir.kernels.noise import gumbel
from kvasir.kv.codec import Plane
from kvasir.kv.policy import KVPolicy, Memory, best_places, last_places
from kvasir.types import CacheRow
from kvasir.types.sequence import branch_stream

SCORE = "k_attended"


@dataclass(frozen=True)
class Config:
    heavy: float = 0.1  # share of the prompt's length: tokens that stay for their score
    recent: float = 0.1  # share of the prompt's length: last tokens that stay
    slack: int = 128  # tokens of the answer that are forgotten at once
    least: int = 16  # heavy and recent tokens at least, each
    noise: bool = False  # score by perturbed logits
    heat: float = 0.01  # by how much a token of the answer raises the temperature of the noise, up to 2

    def __post_init__(self) -> None:
        if not (0 <= self.heavy <= 1 and 0 < self.recent <= 1 and self.slack > 0 and self.least > 0):
            raise ConfigError("h2o: heavy and recent are shares from 0 to 1; slack and least are at least 1")


class H2O(KVPolicy):
    """Forgets the tokens of the lowest sums of attention, of the prompt and of the answer."""

    phases = frozenset(("prompt", "answer"))
    evidence = "all_rows"
    by_head = True
    query_agnostic = True
    by_request = ("heavy", "recent")

    def planes(self, row: CacheRow) -> list[Plane]:
        return [Plane(SCORE, 1, torch.float32)]

    def recent(self, num_prompt: int) -> int:
        return max(self.config.least, int(self.config.recent * num_prompt))

    def budget(self, num_prompt: int) -> int:
        return max(self.config.least, int(self.config.heavy * num_prompt)) + self.recent(num_prompt)

    def next_due(self, num_prompt: int, length: int, count: int) -> int:
        budget = self.budget(num_prompt)
        if length < num_prompt:
            return num_prompt if count + num_prompt - length > budget else self._later(num_prompt, length, count)
        return self._later(num_prompt, length, count)

    def _later(self, num_prompt: int, length: int, count: int) -> int:
        """The position at which the answer has filled the budget and the slack."""
        return max(length + self.budget(num_prompt) + self.config.slack - count, length + 1, num_prompt + 1)

    def left(self, num_prompt: int, length: int, count: int) -> int:
        return min(count, self.budget(num_prompt))

    def observe(self, memory: Memory, attention_GRLN: torch.Tensor, first: int) -> None:
        if self.config.noise:
            attention_GRLN = self._perturbed(memory, attention_GRLN, first)
        add_rows(memory, SCORE, attention_GRLN.mean(1))

    def _perturbed(self, memory: Memory, attention_GRLN: torch.Tensor, first: int) -> torch.Tensor:
        """softmax((x + z) / tau) over what a row sees, from softmax(x): log-weights are logits less a constant."""
        groups, share, length, count = attention_GRLN.shape
        heads, device, noisy = groups * share, attention_GRLN.device, torch.zeros_like(attention_GRLN)
        streams = [branch_stream(memory.stream, 1 + memory.layer * heads + head) for head in range(heads)]
        streams_H = torch.tensor(np.array(streams, np.uint64).view(np.int64), device=device)
        for row in range(length):
            end, position = count - length + row + 1, first + row
            tau = min(2.0, 1 + self.config.heat * max(0, position - memory.num_prompt))
            noise_HN = gumbel(streams_H, torch.full_like(streams_H, position), end)
            x_GRN = attention_GRLN[:, :, row, :end].log() + noise_HN.view(groups, share, end)
            noisy[:, :, row, :end] = torch.softmax(x_GRN / tau, -1)
        return noisy

    def keep(self, memory: Memory, left: int) -> torch.Tensor:
        recent = min(self.recent(memory.num_prompt), left)
        scores_GN = memory.plane(SCORE)[..., 0]
        last = last_places(memory.count, recent, memory.pages.device).expand(len(scores_GN), -1)
        return torch.cat([best_places(scores_GN[:, : memory.count - recent], left - recent), last], 1)


def add_rows(memory: Memory, name: str, rows_GLN: torch.Tensor) -> None:
    """Add what L rows gave each of N tokens to a plane. The rows are the last L tokens, whose own sums start here.
    Rows are added one after the other, so that a sum has the same bits however the rows were cut into spans."""
    length = rows_GLN.shape[1]
    sums_GN = memory.plane(name)[..., 0]
    sums_GN[:, memory.count - length :] = 0
    for row in range(length):
        sums_GN += rows_GLN[:, row]
    memory.store(name, sums_GN[..., None])
