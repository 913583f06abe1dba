"""Add one constant to the logits of some words while the answer thinks: the control of the other processors.

A method that schedules its bias must beat this one at an equal mean. It changes the distribution; a step costs one
addition a word.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.decoding.thinking import check_bias
from kvasir.decoding.word_bias import WordBias


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


class Constant(WordBias):
    """The processor."""

    def __init__(self, config: Config = Config()) -> None:
        super().__init__(config)

    def height(self, index: int) -> float:
        return self.config.value
