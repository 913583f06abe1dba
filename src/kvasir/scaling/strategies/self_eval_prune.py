"""Start n replies, ask the model after a prefix which are worth continuing, and drop the rest.

This is mid-generation self-evaluation (Manvi et al. 2024, arXiv 2410.02725). The question's wording and the schedule
are not public; these are ours. The probe is P(yes) as the next token after the question. It costs one prompt and does
not disturb the reply. The probe of an untrained model says little: compare with majority at the same cost before
trusting it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvasir.errors import ConfigError
from kvasir.scaling.primitives import Context, Seq
from kvasir.scaling.problem import Problem
from kvasir.scaling.scorer import scorer
from kvasir.scaling.steps import ScoredStrategy
from kvasir.scaling.strategy import Result, at_least, by_majority, result


@dataclass(frozen=True)
class Config:
    """Options of the pruning.

    ``prefix``: tokens before the first probe. ``keep``: share of the replies that continue. ``pick``: the surest by a
    last probe (self), or a majority of those that continued. ``judge``: the model that is asked ("" is the writer), or
    ``prm``: the reward model whose score is the probe.
    """

    n: int = 8
    prefix: int = 32
    keep: float = 0.5
    pick: str = "self"
    judge: str = ""
    prm: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, n=self.n, prefix=self.prefix)
        if not 0 < self.keep <= 1:
            raise ConfigError(f"self_eval_prune:keep={self.keep:g} must lie in (0, 1]")
        if self.pick not in ("self", "majority"):
            raise ConfigError(f"self_eval_prune:pick={self.pick} is neither self nor majority")


class SelfEvalPrune(ScoredStrategy):
    async def run(self, context: Context, problem: Problem) -> Result:
        c, endpoint = self.config, context.endpoint(self.config.model)
        probed = scorer(context, c)

        async def start(scope: Context, _: int) -> Seq:
            seq = scope.open(endpoint, problem.messages)
            await seq.generate(max_tokens=min(c.prefix, context.run.sampling.max_tokens))
            return seq

        async def probe(scope: Context, seq: Seq) -> float:
            return await probed.belief(scope, problem, seq)

        async def finish(scope: Context, seq: Seq) -> None:
            if not seq.done and (left := context.run.sampling.max_tokens - seq.tokens) > 0:
                await seq.generate(max_tokens=left)

        seqs = [s for s in await context.map("start", start, range(c.n)) if s.pieces]
        if not seqs:
            return by_majority(problem, [])
        beliefs = await context.map("probe", probe, seqs)
        order = sorted(range(len(seqs)), key=lambda i: (-beliefs[i], i))
        num_kept = max(1, math.ceil(c.keep * len(seqs)))
        for i in order[num_kept:]:
            seqs[i].truncate(0)
        left = [seqs[i] for i in sorted(order[:num_kept])]
        await context.map("finish", finish, left)
        samples = [seq.sample(i) for i, seq in enumerate(left)]
        voted = by_majority(problem, samples, pruned=len(seqs) - num_kept)
        if c.pick == "majority":
            return voted
        context.keep(voted)
        last = await context.map("last", probe, left)
        best = max(range(len(left)), key=lambda i: (samples[i].finish == "stop", last[i], -samples[i].tokens, -i))
        return result(problem, samples, samples[best], pruned=len(seqs) - num_kept)
