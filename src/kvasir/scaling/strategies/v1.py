"""Pairwise self-verification (V1-Infer, arXiv 2603.04304): N replies, and a Swiss tournament of judge calls.

A judge rates two replies; the winner gets a vote weighted by the margin, at least ``tau``. First every reply plays.
Then replies with fewer than ``degree`` different opponents play, then neighbours in the ranking, where a comparison is
least certain. The number of judge calls is exactly ``calls`` x the number of contestants, because pairs are judged when
they play and not all in advance. A schedule cannot rescue a weak judge: measure the judge first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Endpoint, Sample, find
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem
from kvasir.scaling.strategy import Result, Strategy, at_least, by_majority, result


@dataclass(frozen=True)
class Config:
    """Options of the tournament.

    ``calls``: judge calls for each contestant. ``judge``: the model that judges, by name or folder ("" is the writer;
    ``kvasir train pair_rl`` trains one). ``window``: how many ranks ahead a reply looks for an opponent. ``distinct``:
    replies with the same answer enter as one, the surest of them.
    """

    N: int = 16
    calls: float = 2.0
    degree: int = 2
    window: int = 8
    tau: float = 0.1
    distinct: bool = True
    judge: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        at_least(1, N=self.N, window=self.window)
        at_least(0, calls=self.calls, degree=self.degree, tau=self.tau)


@dataclass(slots=True)
class Table:
    """The standing after some games.

    ``score`` and ``weight``: sums over games of the weighted outcomes and of the weights.
    """

    count: int
    scale: int
    tau: float
    score: list[float] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    rated: list[list[int]] = field(default_factory=list)
    met: dict[tuple[int, int], int] = field(default_factory=dict)
    silent: int = 0  # games whose judge gave no ratings

    def __post_init__(self) -> None:
        self.score, self.weight, self.rated = [0.0] * self.count, [0.0] * self.count, [[] for _ in range(self.count)]

    def add(self, i: int, j: int, ratings: tuple[int, int] | None) -> None:
        """Add a game: outcome 1 for a win, 1/2 for a tie. A game without ratings is a tie of the least weight."""
        pair = (min(i, j), max(i, j))
        self.met[pair] = self.met.get(pair, 0) + 1
        self.silent += ratings is None
        a, b = ratings or (0, 0)
        w = max(abs(a - b) / (self.scale - 1), self.tau)
        y = 0.5 if a == b else float(a > b)
        for player, won in ((i, y), (j, 1 - y)):
            self.score[player] += w * won
            self.weight[player] += w
        if ratings is not None:
            self.rated[i].append(a)
            self.rated[j].append(b)

    def mean(self, i: int) -> float:
        """The margin-weighted share of games won."""
        return self.score[i] / self.weight[i] if self.weight[i] else 0.5

    def rating(self, i: int) -> float:
        return sum(self.rated[i]) / len(self.rated[i]) if self.rated[i] else 0.0

    def times(self, i: int, j: int) -> int:
        return self.met.get((min(i, j), max(i, j)), 0)

    def degree(self, i: int) -> int:
        """Number of different opponents it has met."""
        return sum(i in pair for pair in self.met)

    def ranking(self) -> list[int]:
        return sorted(range(self.count), key=lambda i: (-self.mean(i), -self.rating(i), i))


def coverage(table: Table, degree: int, satisfied: set[int]) -> list[tuple[int, int]]:
    """Games for players with too few opponents, each against the unmet player nearest in the standing.

    A player without unmet opponents is added to ``satisfied``.
    """
    needy = sorted(
        (i for i in range(table.count) if table.degree(i) < degree and i not in satisfied),
        key=lambda i: (table.degree(i), i),
    )
    free, games = set(range(table.count)), []
    for i in needy:
        if i not in free:
            continue
        unmet = [j for j in range(table.count) if j != i and not table.times(i, j)]
        if not unmet:
            satisfied.add(i)
        open_ = [j for j in unmet if j in free]
        if open_:
            j = min(open_, key=lambda j: (abs(table.mean(i) - table.mean(j)), table.degree(j), j))
            games.append((i, j))
            free -= {i, j}
    return games


def swiss(table: Table, window: int) -> list[tuple[int, int]]:
    """Games between neighbours in the ranking, first those that have not met and stand closest."""
    order = table.ranking()
    free, games = set(order), []
    for place, i in enumerate(order):
        near = [j for j in order[place + 1 : place + 1 + window] if j in free]
        if i in free and near:
            j = min(
                near,
                key=lambda j: (
                    table.times(i, j) > 0,
                    abs(table.mean(i) - table.mean(j)),
                    table.times(i, j),
                    order.index(j),
                ),
            )
            games.append((i, j))
            free -= {i, j}
    return games


class V1(Strategy):
    def check(self, all_: Sequence[Endpoint], prompts: Any) -> None:
        super().check(all_, prompts)
        judge = self.config.judge
        if judge and find(all_, judge).caps.reward:
            raise ConfigError(
                f"v1:judge={judge}: that model gives scores and writes no ratings; 'kvasir train pair_rl' makes a "
                f"judge of pairs, and best_of_n:by=prm,prm={judge} takes a reward model"
            )

    async def run(self, context: Context, problem: Problem) -> Result:
        c = self.config
        samples = await context.sample(context.endpoint(c.model), problem.messages, c.N)
        players = self._players(problem, samples)
        if len(players) < 2:
            return result(problem, samples, players[0] if players else None, games=0)
        context.keep(by_majority(problem, samples))
        judge = context.endpoint(c.judge or c.model)
        table = Table(len(players), problem.prompts.scale, c.tau)
        left, round_ = round(c.calls * len(players)), 0
        satisfied: set[int] = set()
        order = list(range(len(players)))
        context.rng("first").shuffle(order)
        games = list(zip(order[::2], order[1::2]))
        while left and games:
            games = games[:left]
            scope = context.child(f"round{round_}")
            rated = await scope.map(
                "game", lambda s, g: s.compare(judge, problem, players[g[0]].text, players[g[1]].text), games
            )
            for (i, j), ratings in zip(games, rated):
                table.add(i, j, ratings)
            left, round_ = left - len(games), round_ + 1
            context.keep(result(problem, samples, players[table.ranking()[0]]))
            games = coverage(table, c.degree, satisfied) or (swiss(table, c.window) if len(players) > 2 else [])
        best = players[table.ranking()[0]]
        return result(
            problem,
            samples,
            best,
            games=sum(table.met.values()),
            rounds=round_,
            silent=table.silent,
            contestants=len(players),
        )

    def _players(self, problem: Problem, samples: Sequence[Sample]) -> list[Sample]:
        """Replies that ended.

        With ``distinct``, one for each answer; those without an answer are left out if any reply has one.
        """
        whole = [s for s in samples if s.finish == "stop"] or list(samples)
        if not self.config.distinct:
            return whole
        best: dict[str, Sample] = {}
        for sample in whole:
            answer = problem.answer(sample.text)
            if answer is not None and (
                answer not in best or (sample.confidence or 0.0) > (best[answer].confidence or 0.0)
            ):
                best[answer] = sample
        return list(best.values()) or whole
