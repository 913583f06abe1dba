"""``kvasir generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    MaxTokens,
    Model,
    Replicas,
    Temperature,
    given,
)
from kvasir.cli.command import command
from kvasir.cli.options import build_settings, check_output, with_settings
from kvasir.config import EngineConfig


@command(30)
@with_settings(EngineConfig, skip=("model", "seed"))
def generate(
    model: Model = "",
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Prompt to complete.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--input", "-i", help="File with one prompt, or .jsonl with one request per line; - is stdin."),
    ] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Read the input as JSON lines, whatever its name.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON lines to this file instead of text to stdout.")
    ] = None,
    errors: Annotated[
        Path | None, typer.Option(help="File for the lines of a batch that failed; default: the output.")
    ] = None,
    max_output_tokens: Annotated[
        int, typer.Option(min=0, help="Most tokens of an answer in a batch, whatever its line asks for; 0: no limit.")
    ] = 0,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Send a single prompt through the chat template, or as it is; default: through the template where the "
            "model has one.",
            show_default=False,
        ),
    ] = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    params: Annotated[
        str | None, typer.Option(help='Other sampling parameters as JSON, e.g. \'{"top_p": 0.9, "seed": 7}\'.')
    ] = None,
    data_parallel_size: Replicas = 1,
    **options: Any,
) -> None:
    """Answer a prompt from the command line or a file, or many.

    A single prompt is a user's message where the model has a chat template; --raw continues the text instead. A line of
    JSON is {"prompt": "..."}, {"messages": [...]} or {"prompt_token_ids": [...]}, plus any sampling parameter. A line
    that cannot be served gives a line with "error" and exit code 3, and does not stop the others. Answers are written
    in order as they finish; an interrupt keeps all finished ones.

    A file in OpenAI's batch format (custom_id, method, url, body) is answered in that format. Run again with the same
    --output, it skips what is answered there and tries the rest.
    """
    from kvasir.cli import generate as command

    check_output(output)
    check_output(errors)
    shared = command.parse_params(params) | given(temperature=temperature, max_tokens=max_tokens)
    config = build_settings({"model": model, **options}, EngineConfig)
    command.run(
        config,
        prompt=prompt,
        source=file,
        jsonl=jsonl,
        output=output,
        shared=shared,
        chat=chat,
        errors=errors,
        max_output_tokens=max_output_tokens,
        replicas=data_parallel_size,
    )
