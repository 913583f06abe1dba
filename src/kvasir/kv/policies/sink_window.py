"""StreamingLLM's attention sinks: the first tokens and a window of the last ones stay (arXiv 2309.17453).

Lossy. Tokens leave the window ``slack`` at a time, so a row sees ``window`` to ``window + slack`` of the last tokens.
Keys keep the rotations of their positions, so this bounds the cache; it does not extend the context that a model was
trained for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.errors import ConfigError
from kvasir.kv.policy import KVPolicy, Memory, last_places


@dataclass(frozen=True)
class Config:
    sinks: int = 4  # first tokens that always stay
    window: int = 1024  # last tokens that always stay
    slack: int = 128  # tokens that are forgotten at once

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 1 or self.slack < 1:
            raise ConfigError("sink_window: sinks is at least 0, window and slack are at least 1")


class SinkWindow(KVPolicy):
    """Forgets what is neither among the first ``sinks`` tokens nor among the last ``window``."""

    phases = frozenset(("prompt", "answer"))
    query_agnostic = True
    by_request = ("window",)

    def next_due(self, num_prompt: int, length: int, count: int) -> int:
        c = self.config
        return length + max(1, c.sinks + c.window + c.slack - count)

    def left(self, num_prompt: int, length: int, count: int) -> int:
        return min(count, self.config.sinks + self.config.window)

    def keep(self, memory: Memory, left: int) -> torch.Tensor:
        device, sinks = memory.pages.device, min(self.config.sinks, left)
        first = torch.arange(sinks, device=device)[None]
        return torch.cat([first, last_places(memory.count, left - sinks, device)], 1)
