"""``kvasir bench agents``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvasir.cli.arguments import (
    ApiKey,
    Commit,
    JSONFile,
    Peer,
    Shape,
    Site,
    model_and_settings,
)
from kvasir.cli.command import command
from kvasir.cli.options import check_output, with_settings
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError


@command(240)
@with_settings(EngineConfig, skip=("model",))
def agents(
    case: Annotated[
        Path | None,
        typer.Option(help="Case file with loads, arms and a peer, e.g. bench/cases/agents-llama-8b.toml."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", "-w", help="Load of the case to run; repeatable; default: all.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Checkpoint folder or hub id; default: the model that ships in the package.")
    ] = "",
    shape: Shape = None,
    url: Annotated[str | None, typer.Option(help="Running server, with or without /v1; default: start one.")] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Run the scheduler in virtual time, with step times of llama-8b on an H200."),
    ] = False,
    sessions: Annotated[int | None, typer.Option(min=1, help="Number of sessions; default: 16.")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Turns of a session; default: 12.")] = None,
    system: Annotated[
        int | None, typer.Option(min=0, help="Tokens of the shared system prompt; default: 2000.")
    ] = None,
    task: Annotated[int | None, typer.Option(min=1, help="Mean tokens of a task; default: 2000.")] = None,
    result: Annotated[int | None, typer.Option(min=1, help="Mean tokens of a tool's result; default: 3500.")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each answer; default: 128.")] = None,
    pause: Annotated[float | None, typer.Option(min=0, help="Mean seconds that a tool takes; default: 3.")] = None,
    forks: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of turns after which sub-agents start; default: 0.05.")
    ] = None,
    load_seed: Annotated[int | None, typer.Option(help="Seed of the load; default: 0.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Start no turn after so many seconds; default: run all turns.")
    ] = None,
    peer: Peer = None,
    no_peer: Annotated[bool, typer.Option("--no-peer", help="Leave the case's peer out.")] = False,
    site: Site = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Number of runs; default: the case's, or 1.")] = None,
    api_key: ApiKey = None,
    commit: Commit = None,
    output: JSONFile = None,
    **options: Any,
) -> None:
    """Measure agents: prompts that grow turn by turn, pauses and sub-agents. First tokens, rates and cached shares."""
    from kvasir.bench import agents as command
    from kvasir.bench import case as cases
    from kvasir.bench.agents_load import AgentLoad

    check_output(output, make=True)
    drawn = {
        "sessions": sessions,
        "turns": turns,
        "system": system,
        "task": task,
        "result": result,
        "output": output_tokens,
        "pause": pause,
        "forks": forks,
        "seed": load_seed,
        "seconds": seconds,
    }
    drawn = {name: value for name, value in drawn.items() if value is not None}
    model, settings = model_and_settings(model, options)
    started: dict[str, Any] = {"peer": peer, "shape": shape, "model": model, **settings}
    if url and (
        told := [name for name in {**started, "simulate": simulate} if {**started, "simulate": simulate}[name]]
    ):
        raise ConfigError(
            f"{told[0]} is for a server that is started here, but --url names a running one: leave one of them out"
        )
    if case and (told := [name for name, value in {**drawn, **started}.items() if value]):
        raise ConfigError(f"{told[0]} stands in the case {case.name}: change it there, or leave --case out")
    if simulate and (peer or site or repeats):
        raise ConfigError("a simulation is the same each time and has no peer: leave out --peer and --repeats")
    if only and not case:
        raise ConfigError("--only names loads of a case: give the file with --case")
    found = cases.read(case) if case else None
    if found is not None and not found.agents:
        raise ConfigError(f"{case.name} has no [agents.NAME]; run it with: kvasir bench run {case.name}")
    load = AgentLoad.of(f"s{sessions or AgentLoad.sessions}", drawn)
    if url:
        loads = command.chosen(found, only) if found else {load.name: load}
        name = found.name if found else f"agents-{load.name}"
        command.run_url(loads, url, name=name, repeats=repeats or 1, api_key=api_key, output=output, commit=commit)
    elif found:
        command.run_case(
            found,
            simulated=simulate,
            peer=not no_peer,
            site=site,
            repeats=repeats,
            only=only,
            output=output,
            commit=commit,
        )
    else:
        command.run_load(
            load,
            settings,
            model=model,
            shape=shape,
            peer=peer,
            simulated=simulate,
            site=site,
            repeats=repeats or 1,
            output=output,
            commit=commit,
        )
