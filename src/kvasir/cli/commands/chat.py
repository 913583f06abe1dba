"""``kvasir chat``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    ApiKey,
    MaxTokens,
    Model,
    Temperature,
    given,
)
from kvasir.cli.command import command
from kvasir.cli.options import build_settings, with_settings
from kvasir.config import EngineConfig


@command(20)
@with_settings(EngineConfig, skip=("model",))
def chat(
    model: Model = "",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Running server to talk to instead, e.g. http://127.0.0.1:8000.")
    ] = None,
    api_key: ApiKey = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    **options: Any,
) -> None:
    """Talk to a model in the terminal."""
    from kvasir.cli import chat as command

    sampling = given(temperature=temperature, max_tokens=max_tokens)
    command.run(
        build_settings({"model": model, **options}, EngineConfig),
        system=system,
        url=url,
        api_key=api_key,
        sampling=sampling,
    )
