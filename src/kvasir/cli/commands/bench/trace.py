"""``kvasir bench trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    ApiKey,
    Commit,
    JSONFile,
    Model,
    Peer,
    Repeats,
    Shape,
    Site,
    model_and_settings,
)
from kvasir.cli.command import command
from kvasir.cli.options import check_output, with_settings
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError


@command(40)
@with_settings(EngineConfig, skip=("model",))
def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Trace: Azure's csv or Mooncake's JSON lines (.gz).")],
    model: Model = "",
    shape: Shape = None,
    url: Annotated[str | None, typer.Option(help="Running server, with or without /v1; default: start one.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second; default with recorded arrivals: as recorded.")
    ] = None,
    share: Annotated[
        float | None, typer.Option(min=0.01, help="Rate as a share of the peer's capacity, which is measured first.")
    ] = None,
    capacity: Annotated[
        float | None, typer.Option(min=0, help="Requests per second that the peer completed in an earlier run.")
    ] = None,
    arrivals: Annotated[str, typer.Option(help="Arrival times: poisson or recorded.")] = "poisson",
    num_requests: Annotated[
        int, typer.Option("--num-requests", "-n", min=1, help="Least number of requests per window.")
    ] = 1000,
    seconds: Annotated[float, typer.Option(min=0, help="Least length of a window, in seconds.")] = 60.0,
    clip: Annotated[int | None, typer.Option(min=1, help="Cut prompts to this many tokens.")] = None,
    scale: Annotated[float, typer.Option(min=0, help="Factor for all lengths, for models with a short context.")] = 1.0,
    peer: Peer = None,
    site: Site = None,
    repeats: Repeats = 1,
    api_key: ApiKey = None,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Replay a recorded request stream, open loop: TTFT, ITL, throughput and cached tokens, also of a peer."""
    from kvasir.bench import replay

    check_output(output, make=True)
    table = {
        "file": str(file.name),
        "rate": rate,
        "share": share,
        "arrivals": arrivals,
        "num_requests": num_requests,
        "seconds": seconds,
        "clip": clip,
        "scale": scale,
    }
    load = replay.Load.of(file.name.split(".")[0], table)
    model, settings = model_and_settings(model, options)
    if url:
        given = {"peer": peer, "shape": shape, "model": model}
        if told := [*(name for name in given if given[name]), *settings]:
            raise ConfigError(
                f"{told[0]} is for a server that is started here, but --url names a running one: leave one of them out"
            )
        replay.run_url(load, url, data=file.parent, repeats=repeats, api_key=api_key, output=output, commit=commit)
        return
    replay.run_load(
        load,
        settings,
        model=model,
        shape=shape,
        peer=peer,
        site=site,
        data=file.parent,
        repeats=repeats,
        capacity=capacity,
        output=output,
        commit=commit,
    )
