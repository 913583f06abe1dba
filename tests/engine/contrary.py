"""A processor for tests that wants what a grammar forbids: it forces, exchanges and rules out tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvasir.decoding.processor import Processor


@dataclass(frozen=True)
class Config:
    """``push``: a token that is forced at place ``at`` of the output. ``token``, ``other``: a pair that is exchanged.
    ``ban``: a token that is ruled out by a bias. -1: none."""

    push: int = -1
    at: int = 0
    token: int = -1
    other: int = -1
    ban: int = -1


class Contrary(Processor):
    """Its state is the number of output tokens."""

    forces = True

    def __init__(self, config: Config = Config()) -> None:
        super().__init__(config)

    def state(self, prompt, params):
        return 0

    def advance(self, state, tokens):
        return state + len(tokens)

    def bias(self, state, index, path):
        return None if self.config.ban < 0 else (np.array([self.config.ban]), -float("inf"))

    def force(self, state, path):
        here = self.config.push >= 0 and state + len(path) == self.config.at
        return self.config.push if here else None

    def instead(self, state, path):
        return None if self.config.token < 0 else (self.config.token, self.config.other)
