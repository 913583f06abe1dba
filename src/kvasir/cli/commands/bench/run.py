"""``kvasir bench run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.arguments import (
    Commit,
    JSONFile,
    Site,
)
from kvasir.cli.command import command
from kvasir.cli.options import check_output


@command(10)
def run_case(
    case: Annotated[Path, typer.Argument(metavar="CASE", help="Case file, e.g. bench/cases/llama-8b.toml.")],
    peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Also run the case's peer.")] = True,
    site: Site = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Number of measured rounds of ours; default: the case's.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", "-w", help="Workload of the case to run; repeatable; default: all.")
    ] = None,
    data: Annotated[Path, typer.Option(help="Folder with the case's traces.")] = Path("."),
    capacity: Annotated[
        float | None, typer.Option(min=0, help="Requests per second that the peer completed in an earlier run.")
    ] = None,
    commit: Commit = None,
    output: JSONFile = None,
) -> None:
    """Run a case: our arms in turns, between two runs of a peer, with the targets that were met or missed."""
    from kvasir.bench import agents, compare, replay
    from kvasir.bench import case as cases

    check_output(output, make=True)
    found = cases.read(case)
    if found.agents:
        agents.run_case(
            found, simulated=False, peer=peer, site=site, repeats=repeats, only=only, output=output, commit=commit
        )
    elif found.traces:
        replay.run_case(
            found,
            peer=peer,
            site=site,
            repeats=repeats,
            only=only,
            output=output,
            commit=commit,
            data=data,
            capacity=capacity,
        )
    else:
        compare.run_case(found, peer=peer, site=site, repeats=repeats, only=only, output=output, commit=commit)
