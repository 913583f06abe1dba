"""``kvasir bench routing``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.arguments import (
    JSONFile,
)
from kvasir.cli.command import command
from kvasir.cli.options import check_output


@command(190)
def routing(
    trace: Annotated[Path, typer.Argument(help="Mooncake's trace.")] = Path(
        "bench/traces/mooncake/conversation_trace.jsonl.gz"
    ),
    router: Annotated[list[str] | None, typer.Option(help="Router; repeatable; default: all of ours.")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Simulated engines.")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the trace, from its beginning.")] = 600,
    speed: Annotated[
        list[float] | None, typer.Option(help="Arrivals, as a multiple of the recorded rate; repeatable; default: 1.")
    ] = None,
    output: JSONFile = None,
) -> None:
    """Compare routers on a recorded trace with simulated engines: cached tokens, and seconds to the first token."""
    from kvasir_lab.bench import routing as command

    check_output(output, make=True)
    command.run(trace=trace, routers=router, replicas=replicas, requests=requests, speeds=speed or [1.0], output=output)
