"""The part that processors share which add a number to the logits of some words while an answer thinks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from kvasir.decoding.processor import Bias, Processor
from kvasir.decoding.thinking import begin, ends_on, follow, word_ids


class WordBias(Processor):
    """Adds ``height`` to the words of ``config.words`` or ``config.ids``, for the output tokens from ``config.start``
    to ``config.stop`` and until thinking ends. Its state: the token ids, the marks of thinking, and where the answer
    stands."""

    reads = "index"

    @abstractmethod
    def height(self, index: int) -> float:
        """The bias, in logits, of the token after ``index`` output tokens."""
        raise NotImplementedError

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
        return None if over else (ids, self.height(index))

    def over(self, state) -> bool:
        return state[2].phase == "after"

    def ends_on(self, state) -> int:
        return ends_on(state[1], state[2])
