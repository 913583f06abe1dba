"""``kvasir bench agents``, and cases with agents: sessions with growing prompts, sent to servers or simulated.

Every server runs alone, in a process of its own, and gets the same prompts: ours between two runs of the peer's, if
the peer has two. A session is a closed loop. It sends its next turn after its pause, which starts when the answer
before has come and its sub-agents have ended. Each run of a load draws other sessions, so that nothing is left of it in
a cache. The result is written after every run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.bench import client
from kvasir.bench.agents_load import AgentLoad, Session, every
from kvasir.bench.agents_report import Asked, by_tier, metrics, together
from kvasir.bench.agents_sim import SHAPE, shown_ratios, simulate
from kvasir.bench.case import Case, Peer
from kvasir.bench.client import Asker, Call
from kvasir.bench.compare import keeper, kept
from kvasir.bench.provenance import peer_version
from kvasir.bench.replay import LATE_MS, REST, WARMUP
from kvasir.bench.result import arm, finish, judged, percentile, ratios_of, result, spread
from kvasir.bench.servers import SHARED, flags_of, serving
from kvasir.bench.startup import random_checkpoint
from kvasir.bench.worker import check_peer
from kvasir.bench.workloads import shape_folder
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.models import checkpoint
from kvasir.progress import Progress

# Tokens of a page of the unlimited cache that the client computes: those of both engines' pages on a GPU.
PAGE = 16
# Number of the draw that warms a server up; runs count from 1.
WARM = 0
# Bounds of our ratios to the peer's.
NO_WORSE = {
    "ttft_ms_p50": {"at_most": 1.0},
    "ttft_ms_p99": {"at_most": 1.0},
    "itl_ms_p99": {"at_most": 1.0},
    "turns_s": {"at_least": 0.995},
}


@dataclass(slots=True)
class Measured:
    """One arm so far: by load, the metrics of its runs; and the seconds until its server was ready."""

    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    ready_s: list[float] = field(default_factory=list)


def run_case(
    case: Case,
    *,
    simulated: bool,
    peer: bool,
    site: str | None,
    repeats: int | None,
    only: list[str] | None,
    output: Path | None,
    commit: str | None,
) -> None:
    """Measure or simulate a case of agents, and show the result."""
    keep = keeper(output, commit)
    if simulated:
        if case.shape not in (None, SHAPE) or case.model:
            raise ConfigError(f"the simulation knows the step times of the shape {SHAPE} alone: choose that one")
        found = simulate(chosen(case, only), case.arms, name=f"{case.name}-simulated", keep=keep)
    else:
        found = measure(case, with_peer=peer, site=site, repeats=repeats, only=only, keep=keep)
    finish(found, output, commit)


def run_load(
    load: AgentLoad,
    settings: dict[str, Any],
    *,
    model: str,
    shape: str | None,
    peer: str | None,
    simulated: bool,
    site: str | None,
    repeats: int,
    output: Path | None,
    commit: str | None,
) -> None:
    """Measure or simulate one load without a case file. The peer gets those of our settings that it knows by the same
    name."""
    against = Peer(peer, {k: v for k, v in settings.items() if k in SHARED}, (repeats, repeats)) if peer else None
    name = f"agents-{load.name}-{shape or model or ('' if simulated else 'embedded')}".rstrip("-")
    case = Case(name, shape, model, repeats, {"kvasir": settings}, agents={load.name: load}, peer=against)
    run_case(
        case,
        simulated=simulated,
        peer=peer is not None,
        site=site,
        repeats=repeats,
        only=None,
        output=output,
        commit=commit,
    )


def run_url(
    loads: dict[str, AgentLoad],
    url: str,
    *,
    name: str,
    repeats: int,
    api_key: str | None,
    output: Path | None,
    commit: str | None,
) -> None:
    """Measure loads against a server that is already running."""
    measured = Measured()
    for n, load in loads.items():
        measured.runs[n] = [drive(client.root(url), load, i, api_key) for i in range(1, repeats + 1)]
    config = {"url": url, "loads": {n: load.described for n, load in loads.items()}}
    finish(result(name, [_entry("server", config, [measured])]), output, commit)


def chosen(case: Case, only: list[str] | None) -> dict[str, AgentLoad]:
    if unknown := [n for n in only or () if n not in case.agents]:
        raise ConfigError(f"the case has no agents '{unknown[0]}'; there are {', '.join(case.agents)}")
    return {n: load for n, load in case.agents.items() if not only or n in only}


def measure(
    case: Case,
    *,
    with_peer: bool = True,
    site: str | None = None,
    repeats: int | None = None,
    only: list[str] | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda so_far: None,
) -> dict[str, Any]:
    """The case's result. ``keep`` gets the result so far after every run."""
    peer = case.peer if with_peer else None
    if peer:
        check_peer(peer.name, site)
    loads = chosen(case, only)
    servers = [*case.arms.values(), *([peer.options] if peer else [])]
    for n, load in loads.items():
        _check_length(n, load, servers)
    measured: dict[str, dict[str, Measured]] = {}
    with contextlib.ExitStack() as stack:
        if not case.shape:
            folder, dummy = str(checkpoint.resolve(case.model)), {}
        else:
            folder = stack.enter_context(
                random_checkpoint(case.shape) if case.on_disk else shape_folder(case.shape, tokenizer=True)
            )
            dummy = {"served_model_name": case.shape} | ({} if case.on_disk else {"load_format": "dummy"})

        def visit(name: str, server: str, options: dict[str, Any], part: str, count: int) -> None:
            """One life of one server: every load, ``count`` runs each."""
            from kvasir.convert.checkpoint import plain_folder

            path = folder if server == "kvasir" else str(plain_folder(Path(folder)))
            with serving(server, path, flags_of({**dummy, **options}), site) as running:
                so_far = measured.setdefault(part, {}).setdefault(name, Measured())
                so_far.ready_s.append(running.wait())
                for load in loads.values():
                    _warm_up(running.url, load)
                time.sleep(REST)
                for n, load in loads.items():
                    for number in range(1, count + 1):
                        before = running.tier_hits()
                        values = drive(running.url, load, number, title=f"{n}, {name}")
                        values["tier_share"] = by_tier(values, before, running.tier_hits())
                        so_far.runs.setdefault(n, []).append(values)
                        keep(_result(case, loads, measured, site))

        plans = [(name, "kvasir", settings, "own", repeats or case.repeats) for name, settings in case.arms.items()]
        if peer:
            before, after = peer.repeats
            plans = [(peer.name, peer.name, peer.options, "before", before), *plans]
            plans += [(peer.name, peer.name, peer.options, "after", after)] if after else []
        for plan in plans:
            with kept(lambda: any(so_far.runs for arms in measured.values() for so_far in arms.values())) as state:
                visit(*plan)
            if state.told_to_end:
                break
    return _result(case, loads, measured, site)


def drive(url: str, load: AgentLoad, number: int, api_key: str | None = None, title: str = "agents") -> dict[str, Any]:
    """The metrics of one run of a load against a running server. Another ``number`` draws other sessions."""
    sessions = load.draw(number)
    asked, lags = asyncio.run(_converse(url, client.served_model(url, api_key), load, sessions, api_key, title))
    found = metrics(asked, load.output, PAGE)
    if found["failed"] == found["turns"]:
        raise ConfigError(f"no turn of the load succeeded at {url}")
    if lags:
        found["client_lag_ms_p99"] = round(1000 * percentile(lags, 0.99), 3)
        if found["client_lag_ms_p99"] > LATE_MS:
            log.warning("the client was late by %.1f ms (p99), as part of these figures", found["client_lag_ms_p99"])
    return found


async def _converse(
    url: str, model: str, load: AgentLoad, sessions: list[Session], api_key: str | None, title: str
) -> tuple[list[Asked], list[float]]:
    """Send all turns of all sessions. Returns them as they were answered, and how late the event loop ran."""
    asked: list[Asked] = []
    total = sum(len(s.prompts) for s in every(sessions))
    with Progress(title, brief=True, still=True) as bar:
        async with Asker(url, model, api_key) as asker:
            until = time.perf_counter() + (load.seconds or float("inf"))

            async def converse(session: Session) -> None:
                for turn, pause in enumerate(session.pauses):
                    if time.perf_counter() + pause >= until:
                        return
                    reply = await asker.ask(Call(pause, session.prompt(turn), load.output))
                    asked.append(Asked(session, turn, reply))
                    bar.show(len(asked), total)
                    await asyncio.gather(*map(converse, session.agents.get(turn, ())))

            await asyncio.gather(*map(converse, sessions))
        return asked, asker.lags


def _warm_up(url: str, load: AgentLoad) -> None:
    """Send first and last prompts of a few sessions at once, so that steps of such shapes have run before."""
    sessions = load.draw(WARM)[: WARMUP // 2]
    ends = [(s, turn) for s in sessions for turn in dict.fromkeys((0, len(s.prompts) - 1))]
    calls = [Call(0.0, s.prompt(turn), load.output) for s, turn in ends]
    asyncio.run(client.replay(url, client.served_model(url), calls))


def _check_length(name: str, load: AgentLoad, servers: list[dict[str, Any]]) -> None:
    known = [options["max_model_len"] for options in servers if options.get("max_model_len")]
    if known and load.longest > min(known):
        raise ConfigError(
            f"agents {name}: a prompt and its answer may have {load.longest} tokens, and max_model_len={min(known)}: "
            "raise it, or lower the turns or their lengths"
        )


def _result(
    case: Case, loads: dict[str, AgentLoad], measured: dict[str, dict[str, Measured]], site: str | None
) -> dict[str, Any]:
    entries, pairs = [], [(name, case.first) for name in list(case.arms)[1:]]
    described = {n: load.described for n, load in loads.items()}
    for name, settings in case.arms.items():
        if measured.get("own", {}).get(name, Measured()).runs:
            config = {"shape": case.shape, **settings, "loads": described}
            entries.append(_entry(name, config, [measured["own"][name]]))
    targets: dict[str, Any] = {}
    parts = [measured[part] for part in ("before", "after") if part in measured]
    if case.peer and (runs := [part[case.peer.name] for part in parts if part[case.peer.name].runs]):
        peer = case.peer.name
        entries.append(_entry(peer, {"peer": peer, **case.peer.options, **peer_version(peer, site)}, runs))
        pairs += [(name, peer) for name in case.arms]
    ratios = shown_ratios(ratios_of(entries, pairs))
    if case.peer:
        bounds = {f"{n}.{metric}": bound for n in loads for metric, bound in NO_WORSE.items()}
        targets = judged(bounds, ratios, f"{case.first}/{case.peer.name}")
    return result(case.name, entries, ratios=ratios, targets=targets)


def _entry(name: str, config: dict[str, Any], parts: list[Measured]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if ready := [s for part in parts for s in part.ready_s]:
        found["start_s"] = spread(ready)
    for n in dict.fromkeys(n for part in parts for n in part.runs):
        runs = [run for part in parts for run in part.runs.get(n, [])]
        found |= {f"{n}.{key}": value for key, value in together(runs).items()}
    return arm(name, {k: v for k, v in config.items() if v is not None}, found)
