"""Predict how difficult a problem is, and let a table pick the strategy (Snell et al. 2024, arXiv 2408.03314).

The prediction is the score of a reward model at the end of the prompt, one prompt and no token, or the mean score of a
few pilot replies (the paper's), as the table says. Its bin and the ``budget`` choose a strategy, which then runs as if
it was alone. ``kvasir lab policy`` fits a table. The prediction is charged, and pilot replies are discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError
from kvasir.scaling.difficulty import predicted
from kvasir.scaling.endpoint import Endpoint
from kvasir.scaling.policy_table import PolicyTable
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem
from kvasir.scaling.scorer import check_scorer
from kvasir.scaling.strategy import Result, Strategy, at_least, load_strategy


@dataclass(frozen=True)
class Config:
    """``table``: file of the table; ``prm``: the reward model; ``budget``: of a problem, in the table's unit (0: the
    table's largest)."""

    table: str = ""
    prm: str = ""
    budget: float = 0.0
    model: str = ""

    def __post_init__(self) -> None:
        at_least(0, budget=self.budget)


class ComputeOptimal(Strategy):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._table: PolicyTable | None = None
        self._chosen: dict[str, Strategy] = {}

    @property
    def table(self) -> PolicyTable:
        """The table, read when it is first needed. Raises ConfigError."""
        if self._table is None:
            if not self.config.table:
                raise ConfigError("compute_optimal needs a table: compute_optimal:table=FILE,prm=NAME")
            self._table = PolicyTable.load(Path(self.config.table))
        return self._table

    def chosen(self) -> dict[str, Strategy]:
        """The strategies of the budget, by spec in the table."""
        if not self._chosen:
            for spec in self.table.row(self.config.budget):
                self._chosen[spec] = load_strategy(spec.replace("{prm}", self.config.prm))
        return self._chosen

    def rewards(self) -> list[str]:
        return [*super().rewards(), *(r for strategy in self.chosen().values() for r in strategy.rewards())]

    def check(self, all_: Sequence[Endpoint], prompts: Any) -> None:
        super().check(all_, prompts)
        if not self.config.prm:
            raise ConfigError("compute_optimal needs a reward model: compute_optimal:table=FILE,prm=NAME")
        check_scorer(self.name, self.config, all_)  # before the file is read, which a stranger may have named
        for strategy in self.chosen().values():
            strategy.check(all_, prompts)

    async def run(self, context: Context, problem: Problem) -> Result:
        c, table = self.config, self.table
        score = await predicted(
            context.child("difficulty"), problem, context.endpoint(c.prm), context.endpoint(c.model), table.pilot
        )
        spec = table.row(c.budget)[table.bin(score)]
        found = await self.chosen()[spec].run(context.child("chosen"), problem)
        return replace(found, stats={**found.stats, "bin": table.bin(score), "chosen": spec, "score": round(score, 5)})
