"""Raise and lower the words of reflection in a triangular wave over the answer (CyclicReflex, arXiv 2506.11077).

The bias of "wait", "but" and "alternatively" goes 0, +amplitude, -amplitude, 0 over ``period`` tokens, until thinking
ends. It changes the distribution, as published; drafts and batches change nothing in it. Each word counts with and
without a space before it, unlike in the released code, whose list misses the forms with a space. A step costs one
addition a word.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.decoding.thinking import check_bias
from kvasir.decoding.word_bias import WordBias
from kvasir.errors import ConfigError

MAX_PERIOD = 1 << 31  # tokens; more than any context


@dataclass(frozen=True)
class Config:
    """``amplitude``: largest bias, in logits. ``period``: tokens. ``shift``: fraction of a period by which the wave is
    ahead. ``start``, ``stop``: output tokens between which it counts. ``words`` and ``ids`` are separated by |; ids
    take the place of words."""

    amplitude: float = 5.0
    period: int = 1200
    shift: float = 0.0
    start: int = 0
    stop: int = 8192
    words: str = "wait|Wait|but|But|Alternatively"
    ids: str = ""

    def __post_init__(self) -> None:
        check_bias("cyclic_reflex:amplitude", self.amplitude)
        if not 1 <= self.period <= MAX_PERIOD:
            raise ConfigError(f"cyclic_reflex:period is out of range: 1 to {MAX_PERIOD} tokens")
        if not 0 <= self.shift <= 1:
            raise ConfigError(f"cyclic_reflex:shift={self.shift:g} must lie in 0 to 1: it is a fraction of a period")


def wave(index: int, config: Config) -> float:
    """The bias of the token after ``index`` output tokens."""
    u = ((index + config.shift * config.period) % config.period) / config.period
    if u <= 0.25:
        return 4 * config.amplitude * u
    if u <= 0.75:
        return config.amplitude - 4 * config.amplitude * (u - 0.25)
    return 4 * config.amplitude * (u - 0.75) - config.amplitude


class CyclicReflex(WordBias):
    """The processor."""

    def __init__(self, config: Config = Config()) -> None:
        super().__init__(config)

    def height(self, index: int) -> float:
        return wave(index, self.config)
