"""The logit processors of one open seat: their states, and what they want of each row along its path."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kvasir.decoding.processor import ANY_TOKEN, PACKAGE, Processor
from kvasir.technique import load
from kvasir.types import ProcessorParams

# Most tokens of a forced run that are looked up at a time: those of the longest chain (engine/drafts/forcing.py).
MAX_RUN = 32


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

    def commit(self, tokens: list[int]) -> list[int]:
        """Take committed tokens. Returns the numbers of those that were forced, whether they came in a chain or not."""
        if not self.forces:
            self.advance(tokens)
            return []
        forced = []
        for i in range(len(tokens)):
            if self.force([]) is not None:
                forced.append(i)
            self.advance(tokens[i : i + 1])
        return forced

    def over(self) -> bool:
        """Whether no processor wants anything of a later row."""
        return all(p.over(s) for p, s in zip(self.processors, self._states))

    def bias(self, index: int, path: list[int], in_flight: bool) -> list[tuple[np.ndarray, float | np.ndarray, int]]:
        """Return the biases of the row that predicts output token ``index``: ids, values, and the token that makes them
        void if it was drawn before the row (-1: none). Biases of one id add up.

        ``in_flight``: the token before the row is still being drawn."""
        found = []
        for processor, state in zip(self.processors, self._states):
            if (one := processor.bias(state, index, path)) is not None:
                found.append((*one, processor.ends_on(state) if in_flight else -1))
        return found

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

    def minds(self, path: list[int], token: int) -> bool:
        """Whether a row may draw something other than ``token`` where nothing else is left: another token is forced
        there, or it is exchanged or ruled out."""
        forced, pair = self.force(path), self.instead(path)
        return forced is not None and forced[0] != token or pair is not None and pair[0] == token

    def run(self) -> list[int]:
        """Return the tokens that must follow the known ones."""
        run: list[int] = []
        while self.forces and len(run) < MAX_RUN and (found := self.force(run)) is not None:
            run.append(found[0])
        return run

    def near(self) -> bool:
        """Whether the next token, or the one after it, may be forced."""
        return self.forces and (self.force([]) is not None or self.force([ANY_TOKEN]) is not None)
