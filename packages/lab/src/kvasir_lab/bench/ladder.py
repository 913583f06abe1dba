"""``kvasir bench ladder``: measure how much each optimisation adds to decoding.

Arms go from everything off to everything on, one switch at a time. Prompts are cached, since computing them again would
take most of the time.
"""

from __future__ import annotations

from pathlib import Path

from kvasir.bench import compare, offline
from kvasir.bench.case import Case, Workload
from kvasir.bench.result import finish, ratios_of
from kvasir.bench.workloads import Batch
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.logs import log

# Switches, in the order in which they are turned on.
RUNGS = ("cuda_graphs", "overlap", "fused_kernels")
# Switches that change nothing on a CPU, which has no device that could run ahead.
FOR_A_GPU = ("cuda_graphs", "overlap")
# Default workloads of a shape.
DEFAULT = ("decode1:1:128:128", "decode64:64:1024:128")
# Lives of each arm, among which the rounds that count are divided.
LIVES = 2


def arms(settings: dict[str, object], rungs: tuple[str, ...]) -> dict[str, dict[str, object]]:
    """ "plain" with every switch off, then one arm for each rung, which keeps the switches before it on."""
    found = {"plain": settings | dict.fromkeys(rungs, False)}
    for i, rung in enumerate(rungs):
        found[f"+{rung}"] = settings | {r: rungs.index(r) <= i for r in rungs}
    return found


def reachable(settings: dict[str, object], rungs: tuple[str, ...]) -> tuple[str, ...]:
    """The rungs that can change anything on this device. Raises ConfigError where there is none."""
    import torch

    if settings.get("device", "auto") != "cpu" and torch.cuda.is_available():
        return rungs
    found = tuple(r for r in rungs if r not in FOR_A_GPU)
    if out := [r for r in rungs if r in FOR_A_GPU]:
        log.warning("the ladder goes without %s: on a CPU that changes nothing", " and ".join(out))
    if not found:
        raise ConfigError("no ladder: none of its switches changes anything on a CPU")
    return found


def run(
    settings: dict[str, object],
    *,
    model: str,
    shape: str | None,
    workloads: list[str] | None,
    repeats: int,
    output: Path | None,
    commit: str | None,
    rungs: tuple[str, ...] = RUNGS,
) -> None:
    for rung in rungs:
        try:
            EngineConfig.of(**{rung: False})
        except ConfigError as e:
            raise ConfigError(f"no ladder: {e}") from e
    rungs = reachable(settings, rungs)
    batches = [Batch.parse(w) for w in workloads or (DEFAULT if shape else offline.DEFAULT)]
    climbed, lives = arms(settings, rungs), min(LIVES, repeats)
    case = Case(
        f"ladder-{shape or model or 'embedded'}",
        shape,
        model,
        lives,
        climbed,
        tuple(Workload(b, b, {}) for b in batches),
        rounds=-(-repeats // lives),
        cached=True,
    )
    outcome = compare.measure(case, peer=False, site=None, keep=compare.keeper(output, commit))
    names = list(climbed)
    outcome["ratios"] |= ratios_of(outcome["arms"], list(zip(names[2:], names[1:])))
    finish(outcome, output, commit)
