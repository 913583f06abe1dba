"""Evolution over candidates with models of different cost (Squeeze Evolve, arXiv 2604.07725).

The strongest model writes the first population and recombines the hard groups. The cheapest recombines the others; a
group that agrees may need no model at all. A loop scores every candidate, selects M groups of K, measures each group's
difficulty, routes the groups to tiers, recombines and updates. Difficulty is minus the group's mean confidence by one
scorer, or its number of different answers. With one model this is `rsa`; with T=1 a majority of N.

We differ from the authors' code on purpose. Consensus compares canonical answers. A hard group always gets the strong
model, for both signals. Quotas are exact (``route=rank``; percentiles exist as well).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ConfigError
from kvasir.scaling import evolution as ops
from kvasir.scaling.endpoint import Endpoint
from kvasir.scaling.evolution import Candidate
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem
from kvasir.scaling.strategy import Result, Strategy, at_least, by_majority, result

CHOICES = {
    "route": ("rank", "percentile", "threshold", "random"),
    "fitness": ("confidence", "diversity", "shuffled"),
    "select": ("uniform", "weighted"),
    "update": ("replace", "accumulate"),
    "lite": ("none", "agree"),
    "final": ("majority", "confidence", "synthesize"),
}


@dataclass(frozen=True)
class Config:
    """N candidates, groups of K, T loops with the first population as one, M groups a loop (0: N).

    ``p``: percent of the groups for the strongest tier. With more tiers ``10/30``: 10 % to the last, up to 30 % to the
    one before. ``threshold``: difficulties instead, for ``route=threshold``. ``route=random``: the control, which sends
    as many groups up but picks them at random. ``fitness=shuffled``: the control, which deals confidences out at
    random. ``scorer``: the model whose confidence counts for all ("": the cheapest). ``zeta``: temperature of weighted
    selection. ``lite=agree``: a group that agrees costs nothing. ``consensus``, ``patience``: stop when all have
    agreed, or the leader has stood, for this many loops (0: never).
    """

    N: int = 16
    K: int = 4
    T: int = 10
    M: int = 0
    p: str = "50"
    threshold: str = ""
    route: str = "rank"
    fitness: str = "confidence"
    scorer: str = ""
    select: str = "uniform"
    zeta: float = 0.5
    update: str = "replace"
    lite: str = "none"
    final: str = "majority"
    consensus: int = 0
    patience: int = 0

    def __post_init__(self) -> None:
        at_least(1, K=self.K, T=self.T)
        at_least(0, M=self.M, consensus=self.consensus, patience=self.patience)
        if self.K > self.N:
            raise ConfigError(f"squeeze_evolve: K={self.K} of N={self.N} candidates cannot form a group")
        if self.T > 2 and self.update == "replace" and self.groups < self.K:
            raise ConfigError(
                f"squeeze_evolve: M={self.groups} groups leave fewer than K={self.K} candidates for the third loop; "
                "take M >= K"
            )
        if not self.zeta > 0:
            raise ConfigError(f"squeeze_evolve: zeta={self.zeta:g} must be above 0")
        for name, words in CHOICES.items():
            if getattr(self, name) not in words:
                raise ConfigError(f"squeeze_evolve:{name}={getattr(self, name)} is not one of {', '.join(words)}")
        bounds = self.bounds
        if any(a > b for a, b in zip(bounds, bounds[1:])) and self.route != "threshold":
            raise ConfigError(
                f"squeeze_evolve:p={self.p}: percentages rise from the strongest tier down, for example 10/30"
            )
        if any(a < b for a, b in zip(bounds, bounds[1:])) and self.route == "threshold":
            raise ConfigError(
                f"squeeze_evolve:threshold={self.threshold}: difficulties fall from the strongest tier down, "
                "for example 3/2"
            )
        if self.route != "threshold" and not all(0 <= b <= 100 for b in bounds):
            raise ConfigError(f"squeeze_evolve:p={self.p}: percentages lie in 0..100")

    @property
    def groups(self) -> int:
        return self.M or self.N

    @property
    def bounds(self) -> tuple[float, ...]:
        """``p`` or ``threshold`` as numbers."""
        text = self.threshold if self.route == "threshold" else self.p
        try:
            found = tuple(float(part) for part in text.split("/"))
        except ValueError as e:
            raise ConfigError(f"squeeze_evolve: '{text}' is not a number, or several joined by /") from e
        if not all(map(math.isfinite, found)):
            raise ConfigError(f"squeeze_evolve: '{text}' must be finite")
        return found


class SqueezeEvolve(Strategy):
    def check(self, all_: Sequence[Endpoint], prompts: Any) -> None:
        super().check(all_, prompts)
        all_ = self.endpoints(all_)
        c = self.config
        if len(all_) > 1 and len(c.bounds) != len(all_) - 1:
            raise ConfigError(
                f"squeeze_evolve: {len(all_)} models need {len(all_) - 1} bounds, "
                f"got {len(c.bounds)} ({'/'.join(map(str, c.bounds))})"
            )
        if prompts.most < c.K:
            raise ConfigError(
                f"squeeze_evolve: K={c.K} is more than the {prompts.most} candidates a prompt of this task may hold"
            )
        if self._scores(len(all_)):
            scorer = self._scorer(all_)
            if not scorer.caps.score and not (len(all_) == 1 and scorer.caps.logprobs):
                raise ConfigError(
                    f"squeeze_evolve: {scorer.name} cannot score what other models write; name a scorer that can, "
                    "or take fitness=diversity"
                )

    def _scorer(self, all_: Sequence[Endpoint]) -> Endpoint:
        named = [e for e in all_ if e.name == self.config.scorer] if self.config.scorer else all_[:1]
        if not named:
            raise ConfigError(
                f"squeeze_evolve:scorer={self.config.scorer}: there are {', '.join(e.name for e in all_)}"
            )
        return named[0]

    def _scores(self, tiers: int) -> bool:
        """Whether confidences decide anything."""
        c = self.config
        return (
            tiers > 1
            and c.fitness != "diversity"
            and c.route != "random"
            or c.select == "weighted"
            or c.final == "confidence"
        )

    async def run(self, context: Context, problem: Problem) -> Result:
        c, tiers = self.config, context.endpoints
        scorer = self._scorer(tiers)
        population = [Candidate(s, problem.messages) for s in await context.sample(tiers[-1], problem.messages, c.N)]
        populations, loops, agreeing, standing, leader = [[x.text for x in population]], [], 0, 0, None
        for t in range(1, c.T):
            context.keep(self._outcome(problem, population, populations, loops))
            if len(population) < c.K:
                break
            scope = context.child(f"loop{t}")
            if self._scores(len(tiers)):
                await scope.map("score", lambda s, x: ops.confidence(s, scorer, x), population)
            groups = [[population[i] for i in g] for g in self._select(scope, population)]
            difficulty = self._difficulty(scope, problem, groups)
            routes = self._route(scope, difficulty, len(tiers))
            stats = ops.described(
                problem, population, loop=t, routes={e.name: routes.count(i) for i, e in enumerate(tiers)}, lite=0
            )
            made = await scope.map(
                "group", lambda s, job: self._recombine(s, problem, *job), list(zip(groups, (tiers[r] for r in routes)))
            )
            stats["lite"] = sum(new in group for new, group in zip(made, groups))
            loops.append(stats)
            scope.emit("loop", **stats)
            population = made if c.update == "replace" else [*population, *(m for m in made if m not in population)]
            populations.append([x.text for x in population])
            now = ops.leader(problem, population)
            agreeing = agreeing + 1 if ops.unanimous(problem, population) else 0
            standing = 0 if now is None else standing + 1 if now == leader else 1
            leader = now
            if c.consensus and agreeing >= c.consensus or c.patience and standing >= c.patience:
                break
        if c.final == "majority" or not population:
            return self._outcome(problem, population, populations, loops)
        return await self._final(context, problem, population, populations, loops, scorer)

    def _select(self, scope: Context, population: Sequence[Candidate]) -> list[list[int]]:
        c = self.config
        if c.select == "uniform":
            return ops.uniform_groups(scope.rng("select"), len(population), c.groups, c.K)
        known = [x.confidence for x in population if x.confidence is not None]
        low = min(known, default=0.0)
        return ops.weighted_groups(
            scope.rng("select"),
            [low if x.confidence is None else x.confidence for x in population],
            c.groups,
            c.K,
            c.zeta,
        )

    def _difficulty(self, scope: Context, problem: Problem, groups: Sequence[Sequence[Candidate]]) -> list[float]:
        if self.config.fitness == "diversity":
            return [ops.diversity_difficulty(problem, g) for g in groups]
        found = [ops.confidence_difficulty(g) for g in groups]
        if self.config.fitness == "shuffled":
            scope.rng("shuffle").shuffle(found)
        return found

    def _route(self, scope: Context, difficulty: Sequence[float], tiers: int) -> list[int]:
        c = self.config
        if tiers == 1:
            return [0] * len(difficulty)
        if c.route == "random":
            return ops.route_by_rank(scope.rng("ties"), [0.0] * len(difficulty), c.bounds)
        if c.route == "rank":
            return ops.route_by_rank(scope.rng("ties"), difficulty, c.bounds)
        return (ops.route_by_percentile if c.route == "percentile" else ops.route_by_threshold)(difficulty, c.bounds)

    async def _recombine(
        self, scope: Context, problem: Problem, group: Sequence[Candidate], endpoint: Endpoint
    ) -> Candidate:
        """One new candidate from a group.

        It is the group's surest member when the group agrees and ``lite`` allows it, or when the prompt has grown too
        long.
        """
        if self.config.lite == "agree" and (same := ops.agreed(problem, group)) is not None:
            return same
        messages = problem.prompts.recombine(problem, [x.text for x in group])
        made = await scope.sample(endpoint, messages)
        return Candidate(made[0], messages) if made else ops.surest(group)

    @staticmethod
    def _outcome(
        problem: Problem, population: Sequence[Candidate], populations: list[list[str]], loops: list[dict]
    ) -> Result:
        found = by_majority(problem, [x.sample for x in population], loops=list(loops))
        found.populations = list(populations)
        return found

    async def _final(
        self,
        context: Context,
        problem: Problem,
        population: list[Candidate],
        populations: list[list[str]],
        loops: list[dict],
        scorer: Endpoint,
    ) -> Result:
        """The surest candidate, or what the strongest model makes of the survivors."""
        context.keep(self._outcome(problem, population, populations, loops))
        scope = context.child("final")
        samples = [x.sample for x in population]
        if self.config.final == "confidence":
            await scope.map("score", lambda s, x: ops.confidence(s, scorer, x), population)
            chosen = ops.surest(population).sample
        else:
            texts = [x.text for x in population[: problem.prompts.most]]
            made = await scope.sample(context.endpoints[-1], problem.prompts.recombine(problem, texts), temperature=0.0)
            chosen = made[0] if made else None
        found = (
            result(problem, samples, chosen, loops=loops)
            if chosen
            else self._outcome(problem, population, populations, loops)
        )
        found.populations = populations
        return found
