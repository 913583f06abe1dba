"""Draw replies until the model believes that another one would do no better (Manvi et al. 2024, arXiv 2410.02725).

After every reply the model is asked about it, for the cost of a prompt: P(Yes) as the next token, or the score of a
reward model (``prm``). Sampling stops when the highest belief reaches ``threshold``, or after ``n`` replies; the reply
believed in most is the result. The i-th reply, from 0, is drawn at the temperature min(1, ``first`` + ``rise`` * i):
careful at first, and more diverse the longer nothing convinces. The paper's thresholds and schedule are not public, and
these are ours. The belief of an untrained model says little: ``kvasir train self_eval`` trains it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.scaling.primitives import Context, Seq
from kvasir.scaling.problem import Problem
from kvasir.scaling.scorer import scorer
from kvasir.scaling.steps import ScoredStrategy
from kvasir.scaling.strategy import Result, at_least, by_majority, result

HOTTEST = 1.0  # The largest temperature of the schedule; above it models write nonsense.


@dataclass(frozen=True)
class Config:
    """Options of the sampling.

    ``n``: most replies. ``wave``: replies drawn at a time; more are quicker and stop later. ``threshold``: 0 takes the
    first reply, and above 1 all are drawn. ``judge``: the model that is asked ("" is the writer), or ``prm``: the
    reward model.
    """

    n: int = 16
    threshold: float = 0.9
    first: float = 0.2
    rise: float = 0.1
    wave: int = 1
    judge: str = ""
    prm: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, n=self.n, wave=self.wave)
        at_least(0, threshold=self.threshold, first=self.first, rise=self.rise)


def temperature(config: Config, i: int) -> float:
    """Temperature of reply ``i``, from 0."""
    return min(HOTTEST, config.first + config.rise * i)


class AdaptiveSelfEval(ScoredStrategy):
    async def run(self, context: Context, problem: Problem) -> Result:
        c, endpoint = self.config, context.endpoint(self.config.model)
        asked = scorer(context, c)

        async def draw(scope: Context, i: int) -> tuple[Seq, float]:
            seq = scope.open(endpoint, problem.messages)
            if await seq.generate(temperature=temperature(c, i)) is None:
                return seq, 0.0
            return seq, await asked.belief(scope, problem, seq)

        replies: list[Seq] = []
        beliefs: list[float] = []
        best = 0
        while len(replies) < c.n:
            wave = range(len(replies), min(c.n, len(replies) + c.wave))
            for seq, belief in await context.map(f"wave{len(replies)}-", draw, wave):
                replies.append(seq)
                beliefs.append(belief)
            samples = [seq.sample(i) for i, seq in enumerate(replies)]
            best = max(range(len(replies)), key=lambda i: (replies[i].done, beliefs[i], -i))
            context.keep(result(problem, samples, samples[best], drawn=len(replies)))
            if beliefs[best] >= c.threshold:
                break
        if not any(seq.pieces for seq in replies):
            return by_majority(problem, [])
        samples = [seq.sample(i) for i, seq in enumerate(replies)]
        return result(
            problem, samples, samples[best], drawn=len(replies), beliefs=[round(belief, 5) for belief in beliefs]
        )
