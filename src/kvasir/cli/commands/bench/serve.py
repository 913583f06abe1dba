"""``kvasir bench serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvasir.cli.arguments import (
    ApiKey,
    Commit,
    JSONFile,
)
from kvasir.cli.command import command
from kvasir.cli.options import check_output


@command(30)
def serve(
    url: Annotated[str, typer.Option(help="Running server, with or without /v1.")] = "http://127.0.0.1:8000",
    rate: Annotated[float, typer.Option(min=0, help="Requests per second, Poisson arrivals; 0: all at once.")] = 4.0,
    num_requests: Annotated[int, typer.Option("--num-requests", "-n", min=1, help="Number of requests.")] = 100,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 64,
    api_key: ApiKey = None,
    commit: Commit = None,
    output: JSONFile = None,
) -> None:
    """Measure a running server under open-loop load: TTFT, ITL and throughput."""
    from kvasir.bench import online

    check_output(output, make=True)
    online.run(
        url,
        rate=rate,
        num_requests=num_requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        api_key=api_key,
        output=output,
        commit=commit,
    )
