"""A reward model that is a table: it reads a beginning and gives the probability that it becomes right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvasir.scaling.endpoint import Caps, Refused, Sample, Score
from tests.scaling.tabular import Tabular, answer


class Reward(Tabular):
    """``of``: the score of a text."""

    caps = Caps(score=True, reward=True, writes=False)

    def __init__(self, name: str = "prm", of: Callable[[str], float] | None = None, **options) -> None:
        super().__init__(name, **options)
        self.of = of or (lambda text: {"1": 0.8, None: 0.5}.get(answer(text), 0.2))

    def draw(self, prompt, n, sampling, seed, group=None):
        raise Refused("a reward model writes nothing")

    async def choose(self, prompt, options, usage):
        raise Refused("a reward model chooses nothing")

    async def score(self, prompt, sample: Sample, usage) -> Score:
        self.read(prompt, usage, sample.ids)
        await asyncio.sleep(0)
        return Score(0.0, 0.0, max(1, len(sample.ids)), reward=self.of(sample.text))
