"""The entries of the table of tuned numbers (``tuned``), and the look-up of shapes in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Conditions = Mapping[str, int | str | bool]
Rows = tuple[tuple[Conditions, tuple], ...]

H200 = "NVIDIA H200"


@dataclass(frozen=True, slots=True)
class Tuned(Generic[T]):
    """One tuned number or table of shapes.

    ``readers``: the symbols that take the value from here. ``machine``: what it was measured on. ``results``: the files
    below ``bench/results`` that hold the measurement; none: chosen while the code was written, and no result was kept.
    ``command``: times the alternatives again; empty: no script for it is kept.
    """

    value: T
    meaning: str
    readers: tuple[str, ...]
    machine: str
    results: tuple[str, ...]
    command: str


def unmeasured(value: T, meaning: str, readers: tuple[str, ...], command: str, machine: str = H200) -> Tuned[T]:
    """Return an entry of which no result is kept."""
    return Tuned(value, meaning, readers, machine, (), command)


def look_up(table: Rows, /, **facts: Any) -> tuple:
    """Return the shape of the first row whose conditions hold.

    A condition names a fact. A number is the largest value of the fact; a word or a flag is its exact value.
    """
    return next(
        shape for conditions, shape in table if all(_holds(facts[name], conditions[name]) for name in conditions)
    )


def _holds(fact: Any, condition: int | str | bool) -> bool:
    return fact == condition if isinstance(condition, str | bool) else fact <= condition
