"""``kvasir cluster status``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvasir.cli.command import command

COLUMNS = ("server", "replica", "host", "gpu", "pid", "version", "state", "running", "queued_tokens", "prompt_rate")


@command(70)
def status(
    address: Annotated[str, typer.Option(help="Address of the Ray cluster; auto: that of this host.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every engine of every kvasir server in the cluster: host, version, state and load."""
    from kvasir.cluster import ray_hosts

    found = ray_hosts.status(address)
    if as_json:
        typer.echo(json.dumps(found))
        return
    rows = [COLUMNS, *([_text(one.get(name)) for name in COLUMNS] for one in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    if not found:
        typer.echo("no replica runs in this cluster: start them with `kvasir serve MODEL --replicas N --cluster auto`")


def _text(value: object) -> str:
    return "-" if value in (None, "") else f"{value:.0f}" if isinstance(value, float) else str(value)
