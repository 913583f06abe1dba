"""``kvasir bench ladder``."""

from __future__ import annotations

from typing import Any

from kvasir.cli.arguments import (
    Commit,
    JSONFile,
    Model,
    Repeats,
    Shape,
    Workloads,
    model_and_settings,
)
from kvasir.cli.command import command
from kvasir.cli.options import check_output, with_settings
from kvasir.config import EngineConfig


@command(60)
@with_settings(EngineConfig, skip=("model",))
def ladder(
    model: Model = "",
    shape: Shape = None,
    workload: Workloads = None,
    repeats: Repeats = 5,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure what each optimisation adds, from everything off to everything on, one switch at a time."""
    from kvasir_lab.bench import ladder as command

    check_output(output, make=True)
    model, settings = model_and_settings(model, options)
    command.run(settings, model=model, shape=shape, workloads=workload, repeats=repeats, output=output, commit=commit)
