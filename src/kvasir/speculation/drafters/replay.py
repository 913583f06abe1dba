"""For benchmarks: proposes tokens it was given, each spoiled with probability 1 - accept. *Set* acceptance, not a method.

``load`` takes {prompt ids as a tuple: the output of a plain run}. What it measures is the engine: what a forward of so many
more rows costs, whatever real drafter may fill them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from kvasir.speculation.drafter import Ask, Drafter
from kvasir.speculation.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Config:
    accept: float = 1.0
    seed: int = 0


class Replay(Drafter):
    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())
        self._outputs: dict[tuple[int, ...], list[int]] = {}

    def load(self, weights: Any, version: int) -> None:
        super().load(weights, version)
        self._outputs = dict(weights)

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        trees = []
        for ask in asks:
            seq, accept = ask.seq, self.config.accept
            output = self._outputs.get(tuple(seq.request.prompt_ids), [])
            done = seq.num_output
            tokens = []
            for place, token in enumerate(output[done:done + min(ask.max_nodes, ask.max_depth)], done):
                # By place, so that a token that was spoiled once is spoiled whenever it is proposed.
                right = random.Random(hash((self.config.seed, len(seq.request.prompt_ids), seq.request.prompt_ids[-1], place))).random() < accept
                tokens.append(token if right else token ^ 1)
            trees.append(DraftTree.chain(tokens, accept))
        return trees
