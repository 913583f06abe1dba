"""Costs of inference, call by call, and budgets that cannot be overspent.

Tokens of samples that were cut short count as ``discarded`` and are part of every total. A budget works in two phases:
a call reserves its worst case, and the unused part comes back when it ends. So concurrent calls cannot overspend
together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from kvasir.errors import ConfigError

Kind = Literal["sample", "score", "choose", "discard", "lost"]


class BudgetExceeded(Exception):
    """A call was not made because its worst case does not fit the budget. The strategy's best answer so far stands."""


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per million tokens: computed prompt tokens, cached prompt tokens, and generated tokens."""

    uncached: float = 0.0
    cached: float = 0.0
    generated: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """The cost of one call.

    ``uncached``, ``cached``: tokens of the prompt. ``generated``: generated tokens that were kept. ``discarded``:
    tokens generated in vain. ``scored``: positions whose log-probability was read; they belong to the prompt and are
    not added to totals. ``flops``: 2 x active parameters x computed tokens, without attention. ``seconds``: duration of
    the call, waiting included. ``kind``: ``discard`` moves tokens from kept to discarded later; ``lost`` is the cost
    seen of a failed call.
    """

    key: str = ""
    endpoint: str = ""
    kind: Kind = "sample"
    calls: int = 1
    uncached: int = 0
    cached: int = 0
    generated: int = 0
    discarded: int = 0
    scored: int = 0
    flops: float = 0.0
    dollars: float = 0.0
    seconds: float = 0.0


FIELDS = tuple(f.name for f in dataclasses.fields(Charge))
AMOUNTS = ("calls", "uncached", "cached", "generated", "discarded", "scored", "flops", "dollars", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Upper bounds; None sets no bound.

    ``tokens``: computed tokens of prompts and replies. ``generated``: tokens of replies, kept or not.
    """

    tokens: int | None = None
    generated: int | None = None
    dollars: float | None = None
    calls: int | None = None

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is not None and not value > 0:
                raise ConfigError(f"a budget of {f.name}={value:g} allows nothing: give a number above 0")


def plain(charge: Charge) -> dict[str, Any]:
    """A charge as JSON."""
    return {name: getattr(charge, name) for name in FIELDS}


def spent(charge: Charge) -> dict[str, float]:
    """A charge in the units of a budget."""
    made = charge.generated + charge.discarded
    return {"tokens": charge.uncached + made, "generated": made, "dollars": charge.dollars, "calls": charge.calls}


def total(charges: Iterable[Charge]) -> dict[str, float]:
    """The sum of every amount."""
    sums = dict.fromkeys(AMOUNTS, 0)
    for charge in charges:
        for name in AMOUNTS:
            sums[name] += getattr(charge, name)
    return sums


class Ledger:
    """The charges of one scope. They are charged to ``parent`` too, and both budgets hold."""

    def __init__(self, budget: Budget | None = None, parent: Ledger | None = None) -> None:
        self.budget = budget or Budget()
        self.parent = parent
        self.charges: list[Charge] = []
        self._used = dict.fromkeys(("tokens", "generated", "dollars", "calls"), 0.0)
        self._reserved = dict(self._used)

    def _scopes(self) -> list[Ledger]:
        return [self, *(self.parent._scopes() if self.parent else [])]

    def room(self, unit: str) -> float:
        """Remainder of a budget, here and in the scopes above, with reservations counted as used."""
        limits = [(getattr(s.budget, unit), s) for s in self._scopes()]
        return min(
            (limit - s._used[unit] - s._reserved[unit] for limit, s in limits if limit is not None),
            default=float("inf"),
        )

    def reserve(self, worst: Charge) -> dict[str, float]:
        """Reserve the worst case of a call. Pass the result to ``release``.

        Raises BudgetExceeded and reserves nothing when it does not fit.
        """
        wanted = spent(worst)
        for unit, amount in wanted.items():
            if amount > self.room(unit) * (1 + 1e-12):  # dollars are sums of fractions, which round
                raise BudgetExceeded(f"{amount:g} {unit} wanted, {max(0.0, self.room(unit)):g} left")
        self._move(wanted, 1)
        return wanted

    def release(self, reserved: dict[str, float]) -> None:
        """Give a reservation back."""
        self._move(reserved, -1)

    def _move(self, amounts: dict[str, float], sign: int) -> None:
        for scope in self._scopes():
            for unit, amount in amounts.items():
                scope._reserved[unit] += sign * amount

    def commit(self, charge: Charge) -> None:
        """Charge a call to this scope and those above."""
        for scope in self._scopes():
            scope.charges.append(charge)
            for unit, amount in spent(charge).items():
                scope._used[unit] += amount

    def discard(self, endpoint: str, tokens: int) -> None:
        """Count tokens that were charged as kept as discarded."""
        self.commit(Charge(endpoint=endpoint, kind="discard", calls=0, generated=-tokens, discarded=tokens))

    def total(self) -> dict[str, float]:
        return total(self.charges)

    def by_endpoint(self) -> dict[str, dict[str, float]]:
        return {
            name: total(c for c in self.charges if c.endpoint == name)
            for name in dict.fromkeys(c.endpoint for c in self.charges)
        }
