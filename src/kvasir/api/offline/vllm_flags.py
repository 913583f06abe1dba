"""The flags of vLLM that kvasir has no setting for: accepted if they ask for what kvasir does anyway, accepted with a
line if they change nothing here, else refused by name. The table is ``vllm_flags.toml``.

So a start script written for vLLM either works unchanged, or the error says which flag is not served and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path

from kvasir.tables import Row, load

FILE = Path(__file__).with_suffix(".toml")
SPECULATION = "--speculative-config"


class OnlyAt(Row):
    """Names of one flag with the values that are accepted. ``server``: a server has a setting for it, and other
    commands have none."""

    flags: tuple[str, ...]
    values: tuple[str, ...]
    server: bool = False


class Told(Row):
    """Flags with one reason why they change nothing, or what to do instead."""

    why: str
    flags: tuple[str, ...]


class NotedValues(Row):
    """Values of one of our own flags that change nothing here."""

    flag: str
    values: tuple[str, ...]
    why: str


class Spelling(Row):
    """vLLM's words for a value of ours, and the arguments that mean the same."""

    flag: str
    values: tuple[str, ...]
    means: tuple[str, ...]


class Table(Row):
    """Contents of the file."""

    satisfied: tuple[str, ...]
    satisfied_offline: tuple[str, ...]
    only_at: tuple[OnlyAt, ...]
    instead: tuple[Told, ...]
    unserved: tuple[Told, ...]
    switches: tuple[Told, ...]
    values: tuple[Told, ...]
    values_noted: tuple[NotedValues, ...]
    spellings: tuple[Spelling, ...]


class Flags:
    """The table by flag.

    ``satisfied``: flags that ask for what kvasir does anyway. ``only_at``: names of a flag -> the values that are
    accepted. Both have an ``_offline`` for everything except a server. ``instead``: what to do instead of another
    value, by the flag's first name. ``unserved``: likewise for flags that are refused.
    ``switches`` and ``values``: why a flag without or with a value changes nothing; ``noted``: both. ``values_noted``:
    flag of ours -> value that changes nothing -> why. ``spellings``: flag -> vLLM's value -> our arguments. ``known``:
    every flag of vLLM that is named anywhere.
    """

    def __init__(self, table: Table) -> None:
        self.satisfied, self.satisfied_offline = table.satisfied, table.satisfied_offline
        self.only_at = {row.flags: row.values for row in table.only_at if not row.server}
        self.only_at_offline = {row.flags: row.values for row in table.only_at if row.server}
        self.instead = _by_flag(table.instead)
        self.unserved, self.switches, self.values = map(_by_flag, (table.unserved, table.switches, table.values))
        self.noted = self.switches | self.values
        self.values_noted: dict[str, dict[str, str]] = {}
        for noted in table.values_noted:
            self.values_noted.setdefault(noted.flag, {}).update(dict.fromkeys(noted.values, noted.why))
        self.spellings: dict[str, dict[str, tuple[str, ...]]] = {}
        for spelling in table.spellings:
            self.spellings.setdefault(spelling.flag, {}).update(dict.fromkeys(spelling.values, spelling.means))

    @cached_property
    def known(self) -> frozenset[str]:
        only_at = {flag for row in (*self.only_at, *self.only_at_offline) for flag in row}
        return frozenset({*self.satisfied, *self.noted, *self.unserved, *self.values_noted, SPECULATION} | only_at)

    def unserved_value(self, flag: str, given: str, served: Sequence[str]) -> str:
        """The message for a value that is not served, with what to do instead."""
        first = next((row[0] for row in self.only_at | self.only_at_offline if flag in row), flag)
        instead = self.instead.get(first, "")
        end = f" {instead[0].upper()}{instead[1:]}." if instead else ""
        return f"{given} is not served yet; only {' or '.join(served)} is.{end}"


def _by_flag(rows: Sequence[Told]) -> dict[str, str]:
    return {flag: row.why for row in rows for flag in row.flags}


@cache
def vllm_flags() -> Flags:
    """The table, which is read once."""
    return Flags(load(FILE, Table))
