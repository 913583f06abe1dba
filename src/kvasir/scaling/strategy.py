"""The seam of strategies: an async function over a `Context`, and its result.

A strategy is one module in `strategies/`. Given the results of its calls it is deterministic: no clock, no randomness
but ``context.rng``. It is anytime: it passes its best result so far to ``context.keep``, and a budget may end it at any
call. A call is identified by its place in its scope, which gives its seed and lets a resumed run find it. So concurrent
calls go through ``context.map``, which gives each a scope, and never through tasks of one's own. ``context.sample`` may
return fewer samples than asked, or none.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from kvasir.errors import ConfigError
from kvasir.scaling.endpoint import Endpoint, Sample
from kvasir.scaling.primitives import Context
from kvasir.scaling.problem import Problem, Result, majority, votes
from kvasir.technique import Technique, load

STRATEGIES = "kvasir.scaling.strategies"


def result(problem: Problem, samples: Sequence[Sample], chosen: Sample | None, **stats: Any) -> Result:
    """The result with ``chosen`` as its reply and the votes of all ``samples``."""
    return Result(chosen, problem.answer(chosen.text) if chosen else None, dict(votes(problem, samples)), stats)


def by_majority(problem: Problem, samples: Sequence[Sample], **stats: Any) -> Result:
    """The result of a majority vote over ``samples``."""
    return result(problem, samples, majority(problem, samples), **stats)


class Strategy(Technique, abc.ABC):
    """A method of test-time scaling. ``needs``: capabilities (`Caps`) that every endpoint it uses must have."""

    needs: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    async def run(self, context: Context, problem: Problem) -> Result:
        """Solve one problem.

        Raises BudgetExceeded when a budget ends it; the result kept last then counts.
        """

    def endpoints(self, all_: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """The endpoints that it uses: the one that ``model`` names, or the strongest.

        Strategies with tiers use all of them.
        """
        name, writers = getattr(self.config, "model", None), [e for e in all_ if e.caps.writes]
        if name is None:
            return writers
        chosen = [e for e in writers if e.name == name] if name else writers[-1:]
        if not chosen:
            raise ConfigError(f"{self.name}:model={name}: there are {', '.join(e.name for e in writers)}")
        return chosen

    def rewards(self) -> list[str]:
        """The reward models and judges that it asks, by name or folder."""
        return [name for name in (getattr(self.config, "prm", ""), getattr(self.config, "judge", "")) if name]

    def check(self, all_: Sequence[Endpoint], prompts: Any) -> None:
        """Refuse before the first call what cannot work. Raises ConfigError."""
        if not any(e.caps.writes for e in all_):
            raise ConfigError(f"{self.name} needs at least one model that writes")
        for endpoint in self.endpoints(all_):
            lacking = [need for need in self.needs if not getattr(endpoint.caps, need)]
            if lacking:
                raise ConfigError(
                    f"{self.name} needs {', '.join(lacking)}, which {endpoint.name} does not offer; "
                    "an engine endpoint offers all"
                )


def load_strategy(spec: str) -> Strategy:
    """Build a strategy from ``majority`` or ``squeeze_evolve:N=8,K=3,T=4``. Raises ConfigError with the choices."""
    return load(STRATEGIES, spec, Strategy)


def at_least(low: float, **values: float) -> None:
    """Raise ConfigError for the first value below ``low``."""
    for name, value in values.items():
        if not value >= low:
            raise ConfigError(f"{name}={value:g} must be at least {low:g}")
