"""Parts that step-wise searches share: write one more step, and ask a judge about the beginning of a solution."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvasir.scaling.endpoint import Endpoint, Sample
from kvasir.scaling.ledger import Ledger
from kvasir.scaling.primitives import Context, Seq
from kvasir.scaling.problem import Problem
from kvasir.scaling.strategy import by_majority

STEP = ("\n",)  # What ends a step of a written scratchpad.


async def belief(context: Context, judge: Endpoint, problem: Problem, text: str) -> float:
    """P(the solution that begins like this is right), from the judge's next token; 1/2 when the judge refuses."""
    words = problem.prompts.verdicts
    found = await context.choose(judge, problem.prompts.judge_step(problem, text), words)
    return 0.5 if not found else math.exp(found[words[0]])


async def step(scope: Context, seq: Seq, until: Sequence[str], max_tokens: int) -> bool:
    """Write one more step of at most ``max_tokens`` and at most what the reply may still take.

    False when there is no room for another step.
    """
    left = min(max_tokens, scope.run.sampling.max_tokens - seq.tokens)
    piece = await seq.generate(until, left, scope=scope) if left > 0 else None
    return piece is not None and piece.tokens > 0


async def extend_all(
    scope: Context, judge: Endpoint, problem: Problem, seqs: Sequence[Seq], max_tokens: int, ended: Sequence[float]
) -> tuple[list[float], list[list[Sample]]]:
    """Write one more step of every sequence and keep the majority. Returns the judge's beliefs and the new pieces.

    A sequence that had already ended gets its value of ``ended``.
    """

    async def extend(scope: Context, i: int) -> float:
        if seqs[i].done:
            return ended[i]
        await step(scope, seqs[i], STEP, max_tokens)
        return await belief(scope, judge, problem, seqs[i].text)

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
