"""The metrics of a server: names, help, labels, vLLM's names, and what a dashboard and an alert make of them. The table
is ``metrics.toml``; here are its schema and the functions that compute what the engine's statistics do not hold.

``/metrics``, the Grafana dashboard and the alert rules (``python -m tools.monitoring``) are made from this table, so
they cannot disagree. Names carry the prefix ``kvasir:`` in Prometheus, and counters end in ``_total`` there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

from kvasir.errors import ConfigError
from kvasir.tables import Row, load
from kvasir.types import EngineStats, LearnStats

FILE = Path(__file__).with_name("metrics.toml")

Kind = Literal["gauge", "counter", "histogram"]
# Sections of the dashboard, in order.
Section = Literal["Load", "Latency", "Tokens", "Cache", "Drafts", "Engine"]
# A metric's samples: one number (None: not known), or label values with their number.
Samples = float | None | Iterable[tuple[tuple[str, ...], float]]


class Alert(Row):
    """A rule of Prometheus. ``expr``: {name} stands for the metric's name there, with ``_total`` or ``_bucket``.
    ``hold``: how long it must be true."""

    name: str
    expr: str
    hold: str
    severity: Literal["warning", "critical"]
    summary: str


class Metric(Row):
    """A metric in the file. ``reads``: a field of the engine's statistics or a name of READS; None: the server measures
    it itself. ``buckets``: a name of the file's buckets, for a histogram. ``unit``: Grafana's word for the unit of the
    number, or of a second's increase of a counter."""

    name: str
    kind: Kind
    section: Section
    text: str
    reads: str | None = None
    labels: tuple[str, ...] = ()
    buckets: str = ""
    unit: str = "short"
    vllm: tuple[str, ...] = ()
    alert: Alert | None = None


class Table(Row):
    """Contents of the file. ``buckets``: upper bounds by name."""

    buckets: dict[str, tuple[float, ...]]
    metrics: tuple[Metric, ...]


@dataclass(frozen=True, slots=True)
class Definition:
    """A metric, as ``Metric`` says. ``read`` gets its samples from the engine's statistics."""

    name: str
    kind: Kind
    text: str
    section: Section
    read: Callable[[EngineStats], Samples] | None = None
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    unit: str = "short"
    vllm: tuple[str, ...] = ()
    alert: Alert | None = None

    @property
    def prometheus(self) -> str:
        """The name of its samples in Prometheus."""
        suffix = {"gauge": "", "counter": "_total", "histogram": "_bucket"}[self.kind]
        return f"kvasir:{self.name}{suffix}"


def _usage(s: EngineStats) -> float:
    return (s.num_pages - s.num_free_pages) / s.num_pages if s.num_pages else 0.0


def _by_drafter(s: EngineStats) -> Samples:
    for drafter, (count, right) in s.drafted_by.items():
        yield (drafter, "yes"), right
        yield (drafter, "no"), count - right


def _by_drafter_and_depth(s: EngineStats) -> Samples:
    for drafter, depths in s.drafted_by_depth.items():
        for depth, (tried, right) in enumerate(depths):
            yield (drafter, str(depth), "yes"), right
            yield (drafter, str(depth), "no"), tried - right


def _singles(values: dict[str, float] | dict[str, int]) -> Samples:
    return [((name,), value) for name, value in values.items()]


def _each(read: Callable[[EngineStats], float]) -> Callable[[EngineStats], Samples]:
    """A metric of each replica, or None where there is one engine."""
    return lambda s: [((str(number),), read(one)) for number, one in s.by_replica.items()] or None


def _learners(s: EngineStats) -> list[tuple[str, LearnStats]]:
    """Statistics of each drafter that learns, by the number of its replica; one engine is replica 0."""
    return [(str(number), one.learning) for number, one in (s.by_replica or {0: s}).items() if one.learning]


def _learned(name: str) -> Callable[[EngineStats], Samples]:
    return lambda s: [((replica,), getattr(learner, name)) for replica, learner in _learners(s)] or None


def _kl(s: EngineStats) -> Samples:
    return [((replica, str(i)), kl) for replica, it in _learners(s) for i, kl in enumerate(it.kl_by_depth)] or None


def _accepted_by_depth(s: EngineStats) -> Samples:
    return [((str(depth),), right) for depth, (_, right) in enumerate(s.accepted_by_depth)]


def _per_forward(s: EngineStats) -> Samples:
    return s.generation_tokens / s.forwards if s.forwards else None


def _tiers(name: str) -> Callable[[EngineStats], Samples]:
    """A number of each tier of the cache that has it."""
    return lambda s: [((tier,), counts[name]) for tier, counts in s.tiers.items() if name in counts] or None


def _split_tiers(**values: str) -> Callable[[EngineStats], Samples]:
    """Several numbers of each tier as one metric, by the value of its second label."""
    return lambda s: (
        [
            ((tier, value), counts[name])
            for tier, counts in s.tiers.items()
            for value, name in values.items()
            if name in counts
        ]
        or None
    )


READS: dict[str, Callable[[EngineStats], Samples]] = {
    "replica_requests_running": _each(attrgetter("num_running")),
    "replica_requests_waiting": _each(attrgetter("num_waiting")),
    "replica_prompt_tokens": _each(attrgetter("prompt_tokens")),
    "replica_generation_tokens": _each(attrgetter("generation_tokens")),
    "replica_kv_cache_usage": _each(_usage),
    "replica_restarts": _each(attrgetter("restarts")),
    "kv_cache_usage": _usage,
    "tier_bytes": lambda s: _singles(s.tier_bytes) or None,
    "tier_used_bytes": lambda s: _singles(s.tier_used) or None,
    "tier_hit_tokens": _tiers("hit_tokens"),
    "tier_waits": _tiers("waits"),
    "tier_wait_seconds": _tiers("wait_seconds"),
    "tier_copied_bytes": _split_tiers(down="written_bytes", up="read_bytes"),
    "tier_evicted_pages": _split_tiers(copied="evicted_kept", lost="evicted_lost"),
    "tier_failed_pages": _split_tiers(write="failed_pages", read="broken_pages"),
    "accepted_draft_tokens_per_depth": _accepted_by_depth,
    "draft_tokens_by_drafter": _by_drafter,
    "draft_tokens_by_drafter_and_depth": _by_drafter_and_depth,
    "tokens_per_forward": _per_forward,
    **{
        f"learn_{name}": _learned(name) for name in ("version", "busy_share", "traced", "dropped", "swaps", "rollbacks")
    },
    "learn_kl": _kl,
    "step_time_relative_error": lambda s: _singles(s.step_time_error),
    "requests_failed": lambda s: _singles(s.failed),
    "startup_seconds": lambda s: _singles(s.startup),
}


def read_definitions(file: Path = FILE) -> tuple[Definition, ...]:
    """The metrics of a file, in its order. Raises ConfigError that names the file and the field."""
    table = load(file, Table)
    fields = {field.name: attrgetter(field.name) for field in dataclasses.fields(EngineStats)}
    reads, found = fields | READS, []
    for i, row in enumerate(table.metrics):
        where = f"{file}: `$.metrics[{i}]` ({row.name})"
        if row.reads is not None and row.reads not in reads:
            raise ConfigError(f"{where}: nothing is called reads = {row.reads!r}")
        if (row.kind == "histogram") != bool(row.buckets) or (row.buckets and row.buckets not in table.buckets):
            names = ", ".join(table.buckets)
            raise ConfigError(f"{where}: a histogram, and nothing else, has buckets, which are one of {names}")
        more = {name: getattr(row, name) for name in ("labels", "unit", "vllm", "alert")}
        read, buckets = reads[row.reads] if row.reads else None, table.buckets.get(row.buckets, ())
        found.append(Definition(row.name, row.kind, row.text, row.section, read, buckets=buckets, **more))
    return tuple(found)


DEFINITIONS = read_definitions()
BY_NAME = {definition.name: definition for definition in DEFINITIONS}
