"""Compute-optimal scaling (Snell et al. 2024, arXiv 2408.03314): a strategy for each difficulty and budget.

Problems are split into bins by a predicted score, from the hardest (0) to the easiest. For each budget and bin, a table
has the strategy that was right most often there among those whose mean cost is within the budget. A table is fitted on
some problems and judged on others (`cross_fitted`), because picking the winner on the problems that are reported would
be leakage. The best single strategy, its control, is picked on the same problems as the table.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError
from kvasir.plain_files import refuse_special

BINS = 5  # The paper's quintiles.


@dataclass(frozen=True)
class Outcomes:
    """Results of one strategy: for each problem, its share of right ones (over seeds) and its mean cost."""

    right: Sequence[float]
    cost: Sequence[float]


@dataclass(frozen=True)
class PolicyTable:
    """``edges``: scores between the bins. ``choices``: by budget, the spec of each bin, in which ``{prm}`` stands for
    the reward model. ``pilot``: replies whose mean score is the prediction; 0 is the score at the prompt's end.
    ``currency``: the unit of the budgets. ``about``: what it was fitted on."""

    edges: tuple[float, ...]
    choices: Mapping[float, tuple[str, ...]]
    pilot: int = 0
    currency: str = "flops"
    about: Mapping[str, Any] = field(default_factory=dict)

    def bin(self, score: float) -> int:
        """The bin of a problem; 0 is the hardest."""
        return bisect.bisect_right(self.edges, score)

    def choose(self, score: float, budget: float) -> str:
        """The spec for a problem, of the largest budget that is at most ``budget``. Raises ConfigError when all are
        larger."""
        return self.row(budget)[self.bin(score)]

    def row(self, budget: float) -> tuple[str, ...]:
        """The choices of the largest budget that is at most ``budget`` (0: the largest). Raises ConfigError."""
        within = [b for b in sorted(self.choices) if not budget or b <= budget]
        if not within:
            known = ", ".join(f"{b:g}" for b in sorted(self.choices))
            raise ConfigError(f"the table has budgets of {known} {self.currency}, all above {budget:g}")
        return self.choices[within[-1]]

    def specs(self) -> list[str]:
        """Every spec of the table."""
        return list(dict.fromkeys(spec for row in self.choices.values() for spec in row))

    def save(self, file: Path) -> None:
        """Write the table as JSON."""
        told = asdict(self) | {"choices": {str(b): list(row) for b, row in self.choices.items()}}
        file.write_text(json.dumps(told, indent=2) + "\n")

    @classmethod
    def load(cls, file: Path) -> PolicyTable:
        """Read a table. Raises ConfigError for a file that is none."""
        refuse_special(file)
        try:
            told = json.loads(file.read_text())
            choices = {float(budget): tuple(map(str, row)) for budget, row in told["choices"].items()}
            found = cls(
                tuple(map(float, told["edges"])),
                choices,
                int(told.get("pilot", 0)),
                str(told.get("currency", "flops")),
                told.get("about", {}),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
            raise ConfigError(f"{file} is no policy table ({e}); 'kvasir lab policy' makes one") from e
        if not choices or any(len(row) != len(found.edges) + 1 for row in choices.values()):
            raise ConfigError(f"{file}: every budget needs {len(found.edges) + 1} strategies, one for each bin")
        return found


def quantiles(scores: Sequence[float], bins: int) -> tuple[float, ...]:
    """The edges that split ``scores`` into bins of equal size."""
    ordered = sorted(scores)
    return tuple(ordered[len(ordered) * i // bins] for i in range(1, bins))


def best(
    outcomes: Mapping[str, Outcomes], where: Sequence[int], budget: float, over: Sequence[int] | None = None
) -> str:
    """The strategy with the largest share of right results on the problems ``where``, among those within the budget.

    A strategy is within it by its mean cost on the problems ``over`` (None: ``where``), so that a table and a single
    strategy choose from the same ones. Ties go to the cheaper. When none is cheap enough, or there is no problem, it is
    the cheapest.
    """
    every = where if over is None else over
    costs = {spec: _mean(o.cost, every) for spec, o in outcomes.items()}
    within = [spec for spec in outcomes if costs[spec] <= budget]
    if not within or not where:
        return min(outcomes, key=lambda spec: costs[spec])
    return max(within, key=lambda spec: (_mean(outcomes[spec].right, where), -costs[spec]))


def _mean(values: Sequence[float], over: Sequence[int]) -> float:
    return sum(values[i] for i in over) / max(1, len(over))


def fit(
    scores: Sequence[float],
    outcomes: Mapping[str, Outcomes],
    budgets: Sequence[float],
    where: Sequence[int] | None = None,
    bins: int = BINS,
    **more: Any,
) -> PolicyTable:
    """The table of the problems ``where`` (None: all). ``more``: further fields of the table."""
    where = range(len(scores)) if where is None else where
    edges = quantiles([scores[i] for i in where], bins)
    table = PolicyTable(edges, {}, **more)
    members: list[list[int]] = [[] for _ in range(bins)]
    for i in where:
        members[table.bin(scores[i])].append(i)
    rows = {budget: tuple(best(outcomes, part, budget, where) for part in members) for budget in budgets}
    return PolicyTable(edges, rows, **more)


@dataclass(frozen=True)
class Judged:
    """A policy on problems that it was not fitted on: right [N] and cost [N] of the table and of the best single
    strategy."""

    table: Outcomes
    single: Outcomes


def cross_fitted(
    scores: Sequence[float], outcomes: Mapping[str, Outcomes], budget: float, folds: int = 2, bins: int = BINS
) -> Judged:
    """Fit on all folds but one and judge on that one, for each. A problem's fold is its number modulo ``folds``.

    The cost of predicting the difficulty is not in ``outcomes``; callers add it to the table's.
    """
    count = len(scores)
    picked: list[list[tuple[float, float]]] = [[(0.0, 0.0)] * count for _ in range(2)]
    for fold in range(folds):
        others = [i for i in range(count) if i % folds != fold]
        table, single = fit(scores, outcomes, [budget], others, bins), best(outcomes, others, budget)
        for i in range(fold, count, folds):
            for place, spec in enumerate((table.choose(scores[i], budget), single)):
                picked[place][i] = outcomes[spec].right[i], outcomes[spec].cost[i]
    return Judged(*(Outcomes(*map(list, zip(*pairs))) for pairs in picked))
