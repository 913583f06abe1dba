"""The logit processors of one open seat: their states, and what they want of each row along its path."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvasir.decoding.processor import ANY_TOKEN, PACKAGE, Processor
from kvasir.technique import load
from kvasir.types import ProcessorParams

# Most tokens of a forced run that are looked up at a time: those of the longest chain (engine/forcing.py).
MAX_RUN = 32


class RowBias(NamedTuple):
    """Biases of one row. ``ends_on`` [K]: they do not count if this token was drawn before the row (-1: they do)."""

    ids: np.ndarray
    values: np.ndarray
    ends_on: np.ndarray


@lru_cache(maxsize=256)
def load_processor(spec: str) -> Processor:
    """The processor of a spec. It keeps no state, so all requests share it. Raises ConfigError."""
    return load(PACKAGE, spec, Processor)


class Steering:
    """The processors of one sequence, in order, with their states after its known tokens."""

    def __init__(self, params: list[ProcessorParams], prompt: list[int], output: list[int]) -> None:
        self.processors = [load_processor(p.spec) for p in params]
        self._states: list[Any] = [p.state(prompt, own) for p, own in zip(self.processors, params)]
        self.bound = any(p.reads == "tokens" for p in self.processors)
        self.forces = any(p.forces for p in self.processors)
        self.advance(output)

    def advance(self, tokens: list[int]) -> None:
        """Take committed tokens."""
        self._states = [p.advance(s, tokens) for p, s in zip(self.processors, self._states)]

    def over(self) -> bool:
        """Whether no processor wants anything of a later row."""
        return all(p.over(s) for p, s in zip(self.processors, self._states))

    def bias(self, index: int, path: list[int], in_flight: bool) -> RowBias | None:
        """Return the biases of the row that predicts output token ``index``.

        ``in_flight``: the token before it is still being drawn. An id may occur several times; the values add up."""
        found = []
        for processor, state in zip(self.processors, self._states):
            one = processor.bias(state, index, path)
            if one is not None and len(one[0]):
                end = processor.ends_on(state) if in_flight else -1
                found.append((*one, np.full(len(one[0]), end, np.int64)))
        return RowBias(*map(np.concatenate, zip(*found))) if found else None

    def force(self, path: list[int]) -> tuple[int, str] | None:
        """Return the only token of a row and the processor that forces it; the first in the list wins."""
        for processor, state in zip(self.processors, self._states):
            if processor.forces and (token := processor.force(state, path)) is not None:
                return token, processor.name
        return None

    def instead(self, path: list[int]) -> tuple[int, int] | None:
        """Return the pair of ``Processor.instead`` of the first processor in the list that has one for this row."""
        for processor, state in zip(self.processors, self._states):
            if (pair := processor.instead(state, path)) is not None:
                return pair
        return None

    def run(self) -> list[int]:
        """Return the tokens that must follow the known ones."""
        run: list[int] = []
        while self.forces and len(run) < MAX_RUN and (found := self.force(run)) is not None:
            run.append(found[0])
        return run

    def near(self) -> bool:
        """Whether the next token, or the one after it, may be forced."""
        return self.forces and (self.force([]) is not None or self.force([ANY_TOKEN]) is not None)
