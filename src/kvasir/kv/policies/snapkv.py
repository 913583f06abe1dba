"""SnapKV: the last rows of the prompt say which of its tokens stay (arXiv 2404.14469).

Lossy. The attention of the last ``window`` rows is averaged over the rows and over the query heads that share a KV
head, and smoothed by a mean over ``pool`` neighbours. Each KV head keeps its own best tokens, and the window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.kv.prompt_window import PromptWindow, WindowConfig, mean_scores


@dataclass(frozen=True)
class Config(WindowConfig):
    pass


class SnapKV(PromptWindow):
    """Keeps the same number of tokens in every layer."""

    def asked(self, attention_GRWM: torch.Tensor) -> torch.Tensor:
        return mean_scores(attention_GRWM, self.config.pool)
