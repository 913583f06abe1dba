"""``kvasir bench speculation``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    Commit,
    JSONFile,
    Model,
    Repeats,
    Shape,
)
from kvasir.cli.command import command
from kvasir.cli.options import build_settings, check_output, with_settings
from kvasir.config import EngineConfig


@command(80)
@with_settings(EngineConfig, skip=("model", "drafter", "draft_control"))
def speculation(
    model: Model = "",
    shape: Shape = None,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help="Drafter; repeatable; default: ngram, suffix.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Task of the lab; repeatable; default: four of them.")
    ] = None,
    accept: Annotated[
        list[float] | None,
        typer.Option(min=0, max=1, help="With --shape: acceptance rate to simulate on replayed outputs; repeatable."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences at once; default: 4; repeatable with --shape.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Problems per task.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="With --shape: tokens per prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, help="Most tokens per output.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of the lab's tasks; 0 is greedy.")] = 0.0,
    host: Annotated[
        bool, typer.Option("--host", help="Measure only the drafters: their time per step and memory on the host.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="With --host: number of tokens to read.")] = 1_000_000,
    seconds: Annotated[
        float, typer.Option(min=1, help="With --shape: leave out the fixed depths after this many seconds.")
    ] = 300.0,
    repeats: Repeats = 3,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure drafts: forwards, acceptance by depth and tokens per second, compared with the engine without drafts."""
    from kvasir_lab.bench import drafting_host
    from kvasir_lab.bench import speculation as command

    check_output(output, make=True)
    if host:
        drafting_host.run(
            model, drafters=drafter, tasks=task, batches=batch or [256], num_tokens=tokens, output=output, commit=commit
        )
        return
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        shape=shape,
        drafters=drafter,
        tasks=task,
        accepts=accept,
        batch=batch or [4],
        count=count,
        prompt=prompt,
        output_tokens=output_tokens,
        temperature=temperature,
        repeats=repeats,
        seconds=seconds,
        output=output,
        commit=commit,
    )
