"""Make a switch to another thought less likely while the present one is young (TIP, arXiv 2501.18585).

The words of a switch lose ``alpha`` for ``beta`` tokens after a thought begins. A thought begins with the answer, and
with every such word. It changes the distribution, and it reads tokens: a step costs the host what a penalty does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvasir.decoding.processor import Bias, Processor
from kvasir.decoding.thinking import begin, check_bias, follow, word_ids
from kvasir.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """``alpha``: what is taken from the logits. ``beta``: tokens for which it is, after a thought began. ``words`` and
    ``ids`` are separated by |; ids take the place of words."""

    alpha: float = 3.0
    beta: int = 600
    words: str = "Alternatively|alternatively"
    ids: str = ""

    def __post_init__(self) -> None:
        check_bias("tip:alpha", self.alpha)
        if self.beta < 1:
            raise ConfigError("tip:beta must be at least 1 token")


class Tip(Processor):
    """The processor. Its state: the token ids (twice), the marks of thinking, where the answer stands, and the tokens
    since the thought began (its first included)."""

    def __init__(self, config: Config = Config()) -> None:
        super().__init__(config)

    def prepare(self, encode, thinking):
        return {"words": word_ids(encode, self.config.words, self.config.ids)}

    def state(self, prompt, params) -> Any:
        return (
            np.array(params.ids["words"], np.int64),
            frozenset(params.ids["words"]),
            params.thinking,
            begin(params.thinking),
            0,
        )

    def advance(self, state, tokens):
        ids, words, thinking, thought, age = state
        for token in tokens:
            age = 1 if token in words else age + 1
        return ids, words, thinking, follow(thinking, thought, tokens), age

    def bias(self, state, index, path) -> Bias | None:
        ids, *_, thought, age = self.advance(state, path)
        return None if thought.phase == "after" or age >= self.config.beta else (ids, -self.config.alpha)

    def over(self, state) -> bool:
        return state[3].phase == "after"
