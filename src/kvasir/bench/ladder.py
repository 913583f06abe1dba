"""``kvasir bench ladder``: what each optimisation adds. Arms from everything off to everything on, one switch a rung."""

from __future__ import annotations

from pathlib import Path

from kvasir.bench import compare
from kvasir.bench.case import Case, Workload
from kvasir.bench.result import finish, ratios_of
from kvasir.bench.workloads import Batch
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError

RUNGS = ("cuda_graphs", "overlap", "fused_kernels")  # in the order in which they are turned on
DEFAULT = ("decode1:1:128:128", "decode64:64:1024:128")


def arms(settings: dict[str, object], rungs: tuple[str, ...]) -> dict[str, dict[str, object]]:
    """"plain" with every switch off, then one arm a rung, which keeps those before it."""
    found = {"plain": settings | dict.fromkeys(rungs, False)}
    for i, rung in enumerate(rungs):
        found[f"+{rung}"] = settings | {r: rungs.index(r) <= i for r in rungs}
    return found


def run(settings: dict[str, object], *, model: str, shape: str | None, workloads: list[str] | None, repeats: int, output: Path | None,
        commit: str | None, rungs: tuple[str, ...] = RUNGS) -> None:
    for rung in rungs:
        try:
            EngineConfig.of(**{rung: False})
        except ConfigError as e:
            raise ConfigError(f"no ladder: {e}") from e
    batches = [Batch.parse(w) for w in workloads or DEFAULT]
    climbed = arms(settings, rungs)
    case = Case(f"ladder-{shape or model or 'embedded'}", "what each optimisation adds", shape, model, repeats, climbed,
                tuple(Workload(b, b, {}) for b in batches))
    outcome = compare.measure(case, peer=False, site=None, keep=compare.keeper(output, commit))
    names = list(climbed)
    outcome["ratios"] |= ratios_of(outcome["arms"], list(zip(names[2:], names[1:])))
    finish(outcome, output, commit)
