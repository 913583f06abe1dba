"""``kvasir bench front``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvasir.cli.arguments import (
    JSONFile,
)
from kvasir.cli.command import command
from kvasir.cli.options import check_output
from kvasir.config import ServerConfig


@command(180)
def front(
    replicas: Annotated[list[int] | None, typer.Option(help="Replicas; repeatable; default: 1 to 64.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 2000,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 100,
    at_once: Annotated[int, typer.Option(min=1, help="Requests that run at once on each replica.")] = 32,
    router: Annotated[str, typer.Option(help="Rule by which replicas get requests.")] = ServerConfig().router,
    http: Annotated[bool, typer.Option("--http", help="The whole server; as many requests as run at once.")] = False,
    output: JSONFile = None,
) -> None:
    """Measure what the front of many replicas costs: processor time a token, and requests a second."""
    from kvasir_lab.bench import front as command
    from kvasir_lab.bench import front_http

    check_output(output, make=True)
    counts = replicas or [1, 2, 4, 8, 16, 32, 64]
    if http:
        front_http.run(replicas=counts, tokens=tokens, at_once=at_once, output=output)
    else:
        command.run(replicas=counts, requests=requests, tokens=tokens, at_once=at_once, router=router, output=output)
