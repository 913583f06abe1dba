"""A* over solution steps (A*-Decoding, arXiv 2505.13672): always extend the most promising beginning, in k ways.

A node is the beginning of a solution; f = g + h, and h = 1 - belief(node) comes from the judge or reward model. The
sources that we read do not give the paper's g. Ours adds ``regret`` times every fall of belief along the path, which
keeps f comparable across depths; ties go to the deeper node. The ``batch`` best nodes are expanded at once (1: the
search as published). The search ends when the best node is a whole solution, or after ``expansions``. Then the best
whole solution is the result, or the best beginning, written to its end.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from kvasir.scaling.primitives import Context, Seq
from kvasir.scaling.problem import Problem
from kvasir.scaling.scorer import scorer
from kvasir.scaling.steps import STEP, ScoredStrategy, discard_others, step
from kvasir.scaling.strategy import Result, at_least, by_majority


@dataclass(frozen=True)
class Config:
    """``judge``: the model whose belief counts ("" is the writer), or ``prm``: the reward model whose score does.
    ``tokens``: most tokens of a step."""

    k: int = 4
    expansions: int = 16
    batch: int = 1
    regret: float = 1.0
    tokens: int = 64
    judge: str = ""
    prm: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, k=self.k, expansions=self.expansions, batch=self.batch, tokens=self.tokens)
        at_least(0, regret=self.regret)


@dataclass(order=True)
class _Node:
    """A beginning, ordered as the frontier: by f, then the deeper, then the older."""

    f: float
    depth: int  # negative
    number: int
    seq: Seq = field(compare=False)
    g: float = field(compare=False, default=0.0)
    belief: float = field(compare=False, default=1.0)


class AStar(ScoredStrategy):
    async def run(self, context: Context, problem: Problem) -> Result:
        c = self.config
        writer, scored = context.endpoint(c.model), scorer(context, c)
        frontier = [_Node(0.0, 0, 0, context.open(writer, problem.messages))]
        whole: list[_Node] = []
        made, number, expanded, found = [], 0, 0, None
        while frontier and expanded < c.expansions and found is None:
            popped = [heapq.heappop(frontier) for _ in range(min(c.batch, len(frontier), c.expansions - expanded))]
            found = next((node for node in popped if node.seq.done), None)
            if found is not None:
                break
            parents = [node for node in popped for _ in range(c.k)]
            seqs = [seq for node in popped for seq in node.seq.fork(c.k)]

            async def extend(scope: Context, seq: Seq) -> float | None:
                return await scored.belief(scope, problem, seq) if await step(scope, seq, STEP, c.tokens) else None

            beliefs = await context.child(f"round{expanded}").map("extend", extend, seqs)
            expanded += len(popped)
            grew = {id(parent) for parent, sure in zip(parents, beliefs) if sure is not None}
            # A node without room for another step is as whole as it gets.
            whole += [node for node in popped if id(node) not in grew and node.seq.pieces]
            for parent, seq, sure in zip(parents, seqs, beliefs):
                if sure is None:
                    continue
                made.append((writer.name, seq.pieces[-1]))
                number += 1
                g = parent.g + c.regret * max(0.0, parent.belief - sure)
                node = _Node(g + 1.0 - sure, -len(seq.pieces), number, seq, g, sure)
                heapq.heappush(frontier, node)
                whole += [node] if seq.done else []
            if best := min(whole or frontier, default=None):
                context.keep(by_majority(problem, [best.seq.sample()]))
        found = found or min(whole or frontier, default=None)
        if found is None:
            return Result()
        left = context.run.sampling.max_tokens - found.seq.tokens
        if (
            not found.seq.done
            and left > 0
            and (piece := await found.seq.generate((), left, scope=context.child("rest"))) is not None
        ):
            made.append((writer.name, piece))
        discard_others(context.ledger, made, [found.seq])
        return by_majority(problem, [found.seq.sample()], expanded=expanded, nodes=number)
