"""Propose given tokens, for benchmarks, each spoiled with probability 1 - ``accept``. A *set* acceptance, not a method.
Exact.

``load`` takes {prompt ids as a tuple: the output of a plain run}. This measures the engine: the cost of a forward with
that many more rows, whatever real drafter may fill them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ConfigError
from kvasir.speculation.drafter import Ask, Drafter
from kvasir.speculation.tree import DraftTree
from kvasir.types import Sequence


@dataclass(frozen=True, slots=True)
class Config:
    accept: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.accept <= 1:
            raise ConfigError(f"replay:accept={self.accept:g} must lie in [0, 1]")


class Replay(Drafter):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._outputs: dict[tuple[int, ...], list[int]] = {}

    def load(self, weights: Any, version: int) -> None:
        self._outputs, self.version = dict(weights), version

    def open(self, seq: Sequence) -> None:
        # Drawn once a sequence: a spoiled token stays spoiled whenever it is proposed, and proposing costs nothing.
        rng = random.Random(f"{self.config.seed} {seq.request.prompt_ids} {seq.branch}")
        output = self._outputs.get(tuple(seq.request.prompt_ids), [])
        seq.state["replay"] = [token if rng.random() < self.config.accept else token ^ 1 for token in output]

    def propose(self, asks: list[Ask]) -> list[DraftTree]:
        return [
            DraftTree.chain(
                ask.seq.state["replay"][ask.seq.num_output :][: min(ask.max_nodes, ask.max_depth)], self.config.accept
            )
            for ask in asks
        ]
