"""Parts that step-wise searches share: write one more step, and score the beginnings of solutions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvasir.scaling.endpoint import Endpoint, Sample
from kvasir.scaling.ledger import Ledger
from kvasir.scaling.primitives import Context, Seq
from kvasir.scaling.problem import Problem
from kvasir.scaling.scorer import StepScorer, check_scorer
from kvasir.scaling.scorer import belief as belief
from kvasir.scaling.strategy import Strategy, by_majority

STEP = ("\n",)  # What ends a step of a written scratchpad.


class ScoredStrategy(Strategy):
    """A strategy that scores beginnings of replies: ``prm`` names a reward model, ``judge`` a model that judges; with
    neither, the writer judges itself."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        asks_another = config.prm or getattr(config, "judge", "")
        self.needs = ("tokens",) if asks_another else ("tokens", "choose")  # type: ignore[misc]

    def check(self, all_: Sequence[Endpoint], prompts: Any) -> None:
        super().check(all_, prompts)
        check_scorer(self.name, self.config, all_)


class Lookahead(StepScorer):
    """Scores a beginning by where it leads: ``steps`` further steps at temperature 0, which are then discarded.

    This is the lookahead search of Snell et al. 2024 (arXiv 2408.03314). ``tokens``: most tokens of a step.
    """

    def __init__(self, inner: StepScorer, steps: int, tokens: int) -> None:
        super().__init__(inner.endpoint)
        self.inner, self.steps, self.tokens = inner, steps, tokens

    async def belief(self, context: Context, problem: Problem, seq: Seq) -> float:
        (ahead,), known = seq.fork(1), len(seq.pieces)
        try:
            for _ in range(self.steps):
                if ahead.done or not await step(context, ahead, STEP, self.tokens, temperature=0.0):
                    break
            return await self.inner.belief(context, problem, ahead)
        finally:
            ahead.truncate(known)


async def step(
    scope: Context, seq: Seq, until: Sequence[str], max_tokens: int, temperature: float | None = None
) -> bool:
    """Write one more step of at most ``max_tokens`` and at most what the reply may still take.

    False when there is no room for another step.
    """
    left = min(max_tokens, scope.run.sampling.max_tokens - seq.tokens)
    piece = await seq.generate(until, left, temperature, scope=scope) if left > 0 else None
    return piece is not None and piece.tokens > 0


async def extend_all(
    scope: Context, scorer: StepScorer, problem: Problem, seqs: Sequence[Seq], max_tokens: int, ended: Sequence[float]
) -> tuple[list[float], list[list[Sample]]]:
    """Write one more step of every sequence and keep the majority. Returns the scorer's beliefs and the new pieces.

    A sequence that had already ended gets its value of ``ended``.
    """

    async def extend(scope: Context, i: int) -> float:
        if seqs[i].done:
            return ended[i]
        await step(scope, seqs[i], STEP, max_tokens)
        return await scorer.belief(scope, problem, seqs[i])

    known = [len(seq.pieces) for seq in seqs]
    beliefs = await scope.map("extend", extend, range(len(seqs)))
    scope.keep(by_majority(problem, [seq.sample(i) for i, seq in enumerate(seqs)]))
    return beliefs, [seq.pieces[before:] for seq, before in zip(seqs, known)]


def discard_others(ledger: Ledger, made: Iterable[tuple[str, Sample]], kept: Sequence[Seq]) -> None:
    """Charge the pieces that are in none of ``kept`` as discarded.

    Forks share pieces, so each piece counts once.
    """
    alive = {id(piece) for seq in kept for piece in seq.pieces}
    for endpoint, piece in made:
        if id(piece) not in alive:
            ledger.discard(endpoint, piece.tokens)
