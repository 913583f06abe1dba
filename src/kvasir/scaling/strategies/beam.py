"""Beam search over solution steps against a judge (Snell et al. 2024, arXiv 2408.03314).

At each step the best N / width of N beams continue, each in ``width`` ways. With ``lookahead``, a beam is scored by
where ``lookahead`` further steps at temperature 0 lead; these cost as many tokens again and are discarded. Pruned beams
are paid for: the ledger counts their tokens as discarded.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Sample
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem, majority
from kvasir.scaling.scorer import scorer
from kvasir.scaling.steps import Lookahead, ScoredStrategy, discard_others, extend_all
from kvasir.scaling.strategy import Result, at_least, result


@dataclass(frozen=True)
class Config:
    """``judge``: the model whose belief counts ("" is the writer), or ``prm``: the reward model whose score does."""

    N: int = 8
    width: int = 4
    steps: int = 16
    tokens: int = 64
    lookahead: int = 0
    judge: str = ""
    prm: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, N=self.N, width=self.width, steps=self.steps, tokens=self.tokens)
        at_least(0, lookahead=self.lookahead)
        if self.N % self.width:
            raise ConfigError(f"beam: N={self.N} must be a multiple of width={self.width}")


class Beam(ScoredStrategy):
    async def run(self, context: Context, problem: Problem) -> Result:
        c = self.config
        writer, scored = context.endpoint(c.model), scorer(context, c)
        if c.lookahead:
            scored = Lookahead(scored, c.lookahead, c.tokens)
        seqs = [context.open(writer, problem.messages) for _ in range(c.N)]
        beliefs, made = [0.5] * c.N, []
        for t in range(c.steps):
            beliefs, pieces = await extend_all(context.child(f"step{t}"), scored, problem, seqs, c.tokens, beliefs)
            made += [(writer.name, piece) for written in pieces for piece in written]
            if all(s.done for s in seqs) or not any(pieces) or t == c.steps - 1:
                break
            best = sorted(range(c.N), key=lambda i: (-beliefs[i], i))[: c.N // c.width]
            beliefs = [beliefs[i] for i in best for _ in range(c.width)]
            seqs = [s for i in best for s in (seqs[i], *seqs[i].fork(c.width - 1))]
        discard_others(context.ledger, made, seqs)
        samples: list[Sample] = [s.sample(i) for i, s in enumerate(seqs)]
        return result(problem, samples, majority(problem, samples, beliefs))
