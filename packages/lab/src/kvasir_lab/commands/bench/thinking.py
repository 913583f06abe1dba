"""``kvasir bench thinking``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    Commit,
    JSONFile,
    Repeats,
    Site,
    model_and_settings,
)
from kvasir.cli.command import command
from kvasir.cli.options import check_output, with_settings
from kvasir.config import EngineConfig


@command(220)
@with_settings(EngineConfig, skip=("model",))
def thinking(
    shape: Annotated[str, typer.Option(help="Known model shape, with random weights.")] = "llama-8b",
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 64,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of each prompt.")] = 1024,
    peer: Annotated[str | None, typer.Option(help="Server to compare with, started after ours: vllm.")] = None,
    site: Site = None,
    repeats: Repeats = 3,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure what thinking_token_budget costs between tokens, while budgets are far and while they end the thinking.

    vLLM 0.25.1 has it in its first model runner only: set VLLM_USE_V2_MODEL_RUNNER=0.
    """
    from kvasir_lab.bench import thinking as command

    check_output(output, make=True)
    command.run(
        model_and_settings("", options)[1],
        shape=shape,
        batch=batch,
        prompt=prompt,
        repeats=repeats,
        output=output,
        peer=peer,
        site=site,
        commit=commit,
    )
