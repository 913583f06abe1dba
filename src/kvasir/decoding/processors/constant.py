"""Add one constant to the logits of some words while the answer thinks: the control of the other processors.

A method that schedules its bias must beat this one at an equal mean. It changes the distribution; a step costs one
addition a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvasir.decoding.processor import Bias, Processor
from kvasir.decoding.thinking import begin, check_bias, ends_on, follow, word_ids


@dataclass(frozen=True)
class Config:
    """``value``: the bias, in logits. ``start``, ``stop``: output tokens between which it counts. ``words`` and ``ids``
    are separated by |; ids take the place of words."""

    value: float = -3.0
    start: int = 0
    stop: int = 8192
    words: str = "wait|Wait|but|But|Alternatively"
    ids: str = ""

    def __post_init__(self) -> None:
        check_bias("constant:value", self.value)


class Constant(Processor):
    """The processor. Its state: the token ids, the marks of thinking, and where the answer stands."""

    reads = "index"

    def __init__(self, config: Config = Config()) -> None:
        super().__init__(config)

    def prepare(self, encode, thinking):
        return {"words": word_ids(encode, self.config.words, self.config.ids)}

    def state(self, prompt, params) -> Any:
        return np.array(params.ids["words"], np.int64), params.thinking, begin(params.thinking)

    def advance(self, state, tokens):
        ids, thinking, thought = state
        return ids, thinking, follow(thinking, thought, tokens)

    def bias(self, state, index, path) -> Bias | None:
        ids, _, thought = self.advance(state, path)
        over = thought.phase == "after" or not self.config.start <= index < self.config.stop
        return None if over else (ids, self.config.value)

    def over(self, state) -> bool:
        return state[2].phase == "after"

    def ends_on(self, state) -> int:
        return ends_on(state[1], state[2])
