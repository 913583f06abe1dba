"""``kvasir bench churn``, ``front`` and ``routing``, three more commands of ``bench.app``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvasir.cli.bench import JSONFile
from kvasir.cli.bench_steps import app
from kvasir.cli.options import Command, build_settings, check_output, with_settings
from kvasir.config import ServerConfig, Settings

__all__ = ["app"]


@app.command("churn", cls=Command)
@with_settings(Settings, skip=("model", "seed"))
def churn(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", show_default=False, help="Checkpoint; default: simulated engines.")
    ] = "",
    minutes: Annotated[float, typer.Option(min=0.05, help="Minutes of faults under load.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of requests and faults.")] = 0,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Kill and stop replicas and cut connections under load, and check every token.

    With a model its engines run in exact mode. The exit code is 1 when a request failed, or a token was doubled, lost
    or wrong.
    """
    from kvasir.bench import churn as command

    check_output(output, make=True)
    given = {name: value for name, value in options.items() if value is not None}
    exact = {"batch_invariant": True} if model else {}
    usual = {"replicas": 3, "watchdog": 3.0, "startup_timeout": 60.0, "crash_dumps": "", **exact}
    settings = build_settings({"model": model, **usual, **given})
    if not command.run(settings, minutes=minutes, seed=seed, simulated=not model, output=output):
        raise typer.Exit(1)


@app.command("front", cls=Command)
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
    from kvasir.bench import front as command
    from kvasir.bench import front_http

    check_output(output, make=True)
    counts = replicas or [1, 2, 4, 8, 16, 32, 64]
    if http:
        front_http.run(replicas=counts, tokens=tokens, at_once=at_once, output=output)
    else:
        command.run(replicas=counts, requests=requests, tokens=tokens, at_once=at_once, router=router, output=output)


@app.command("routing", cls=Command)
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
    from kvasir.bench import routing as command

    check_output(output, make=True)
    command.run(trace=trace, routers=router, replicas=replicas, requests=requests, speeds=speed or [1.0], output=output)
