"""``kvasir bench trace``, and cases with traces: send a recorded request stream to servers.

Our servers run between two runs of the peer's. Each server runs alone, in a process of its own, and gets the same
requests at the same times. A load names its rate, or its share of the peer's capacity: the rate at which the peer
completes requests that all wait at once. All capacities, ours included, are measured first; loads of one trace share
them. The result is written after every capacity and every load.

Our arms also report the relative error of predicted step times by kind of step: the mean over about the last 50 timed
steps of each load. Arms with a drafter report how many tokens were drafted and accepted during a load, its warm-up
included: without drafts a comparison with an arm that has no drafter says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.bench import client, traces
from kvasir.bench.case import Case, Peer
from kvasir.bench.client import Call
from kvasir.bench.compare import keeper, kept
from kvasir.bench.load import Load
from kvasir.bench.provenance import peer_version
from kvasir.bench.result import arm, finish, judged, ratios_of, result, spread
from kvasir.bench.servers import SHARED, Server, flags_of, serving
from kvasir.bench.startup import random_checkpoint
from kvasir.bench.worker import check_peer
from kvasir.bench.workloads import shape_folder
from kvasir.config import SchedulerConfig
from kvasir.errors import ConfigError
from kvasir.logs import log
from kvasir.models import checkpoint

# Milliseconds that the client may be late (p99); beyond this, the figures are partly the client's own.
LATE_MS = 5.0
# Requests that warm a server up before the first window.
WARMUP = 8
# Seconds without requests after a server's first ones, so that work of its idle time (ours captures graphs) is done.
REST = 8.0
# Least number of requests that wait at once when a capacity is measured, and how many wait for each that can run. Those
# that run from the beginning leave no prompts to the steps that are counted.
FULL, WAITING = 600, 3


@dataclass(slots=True)
class Measured:
    """One arm so far: a list of values for each metric, one a window, and the seconds until its server was ready."""

    values: dict[str, list[float]] = field(default_factory=dict)
    ready_s: list[float] = field(default_factory=list)


def run_case(
    case: Case,
    *,
    peer: bool,
    site: str | None,
    repeats: int | None,
    only: list[str] | None,
    output: Path | None,
    commit: str | None,
    data: Path = Path("."),
    capacity: float | None = None,
) -> None:
    """Measure a case of traces and show the result.

    ``data`` is the folder of the case's files. ``capacity`` is the peer's, from an earlier run that measured it.
    """
    keep = keeper(output, commit)
    finish(
        measure(case, data, with_peer=peer, site=site, repeats=repeats, only=only, capacity=capacity, keep=keep),
        output,
        commit,
    )


def run_load(
    load: Load,
    settings: dict[str, Any],
    *,
    model: str,
    shape: str | None,
    peer: str | None,
    site: str | None,
    data: Path,
    repeats: int,
    capacity: float | None,
    output: Path | None,
    commit: str | None,
) -> None:
    """Measure one load without a case file. The peer gets those of our settings that it knows by the same name."""
    against = Peer(peer, {k: v for k, v in settings.items() if k in SHARED}, (repeats, repeats)) if peer else None
    name = f"trace-{load.name}-{shape or model or 'embedded'}"
    case = Case(name, shape, model, repeats, {"kvasir": settings}, (), {load.name: load}, against)
    run_case(
        case,
        peer=peer is not None,
        site=site,
        repeats=repeats,
        only=None,
        output=output,
        commit=commit,
        data=data,
        capacity=capacity,
    )


def run_url(
    load: Load, url: str, *, data: Path, repeats: int, api_key: str | None, output: Path | None, commit: str | None
) -> None:
    """Measure one load against a server that is already running."""
    if load.share:
        raise ConfigError("a share of the peer's capacity needs the peer; give a rate instead")
    measured = Measured()
    for metrics in windows(client.root(url), load.calls(load.trace(data), load.rate), repeats, api_key):
        for key, value in metrics.items():
            measured.values.setdefault(f"{load.name}.{key}", []).append(value)
    finish(
        result(
            f"trace-{load.name}", [_entry("server", {"url": url, "loads": _described({load.name: load})}, [measured])]
        ),
        output,
        commit,
    )


def measure(
    case: Case,
    data: Path,
    *,
    with_peer: bool = True,
    site: str | None = None,
    repeats: int | None = None,
    only: list[str] | None = None,
    capacity: float | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda so_far: None,
) -> dict[str, Any]:
    """The case's result. ``keep`` gets the result so far after every capacity and every load of every server."""
    peer = case.peer if with_peer else None
    if peer:
        check_peer(peer.name, site)
    if unknown := [n for n in only or () if n not in case.traces]:
        raise ConfigError(f"the case has no trace '{unknown[0]}'; there are {', '.join(case.traces)}")
    loads = {n: load for n, load in case.traces.items() if not only or n in only}
    recorded = {n: load.trace(data) for n, load in loads.items()}
    if any(load.share for load in loads.values()) and not capacity and not peer:
        raise ConfigError("a share of the peer's capacity needs the peer, or its capacity from an earlier run")
    measured: dict[str, dict[str, Measured]] = {}
    # Requests a second, by stream and arm.
    capacities: dict[tuple[Any, ...], dict[str, float]] = {load.stream: {} for load in loads.values()}
    with contextlib.ExitStack() as stack:
        if not case.shape:
            folder, dummy = str(checkpoint.resolve(case.model)), {}
        else:
            folder = stack.enter_context(
                random_checkpoint(case.shape) if case.on_disk else shape_folder(case.shape, tokenizer=True)
            )
            dummy = {"served_model_name": case.shape} | ({} if case.on_disk else {"load_format": "dummy"})

        def visit(name: str, server: str, options: dict[str, Any], part: str, count: int) -> None:
            """One life of one server: every load, ``count`` windows each."""
            from kvasir.convert.checkpoint import plain_folder

            path = folder if server == "kvasir" else str(plain_folder(Path(folder)))
            with serving(server, path, flags_of({**dummy, **options}), site) as running:
                arm_so_far = measured.setdefault(part, {}).setdefault(name, Measured())
                arm_so_far.ready_s.append(running.wait())
                _warm_up(running.url, next(iter(loads.values())).calls(next(iter(recorded.values())), float("inf")))
                time.sleep(REST)
                for number, (n, load) in enumerate(loads.items()):
                    found = capacities[load.stream]
                    if load.share and not capacity:
                        if name not in found:
                            found[name] = saturate(running.url, load, recorded[n], most_at_once(case, peer))
                            log.info("%s completes %.2f requests a second of %s", name, found[name], n)
                        if part != "after":
                            arm_so_far.values[f"{n}.capacity_requests_s"] = [round(found[name], 3)]
                            keep(_result(case, loads, measured, site))
                        if peer.name not in found:
                            log.warning("%s is left out: the capacity of %s is not known", n, peer.name)
                            continue
                    rate = load.share * (capacity or found[peer.name]) if load.share else load.rate
                    calls = load.calls(recorded[n], rate)
                    counted = _drafts(running) if options.get("drafter") and server == "kvasir" else {}
                    if not count:
                        continue
                    for metrics in windows(
                        running.url, calls, min(count, load.windows or count), first=1 + number * count
                    ):
                        for key, value in metrics.items():
                            arm_so_far.values.setdefault(f"{n}.{key}", []).append(value)
                    for key, value in _drafts(running).items() if counted else ():
                        arm_so_far.values.setdefault(f"{n}.{key}", []).append(value - counted[key])
                    for kind, error in running.gauges("step_time_relative_error").items() if server == "kvasir" else ():
                        arm_so_far.values.setdefault(f"{n}.step_time_error_{kind}", []).append(error)
                    keep(_result(case, loads, measured, site))

        plans = [
            (name, "kvasir", settings, "own", case.windows.get(name, repeats or case.repeats))
            for name, settings in case.arms.items()
        ]
        if peer:
            before, after = peer.repeats
            plans = [(peer.name, peer.name, peer.options, "before", before), *plans]
            plans += [(peer.name, peer.name, peer.options, "after", after)] if after else []
        for plan in plans:
            with kept(lambda: any(so_far.values for arms in measured.values() for so_far in arms.values())) as state:
                visit(*plan)
            if state.told_to_end:
                break
    return _result(case, loads, measured, site)


def _drafts(server: Server) -> dict[str, float]:
    """Draft tokens that one of our servers has verified so far, and how many of them it accepted."""
    return server.counters(("draft_tokens", "accepted_draft_tokens"))


def windows(
    url: str, calls: list[Call], count: int, api_key: str | None = None, first: int = 1
) -> Iterator[dict[str, Any]]:
    """Yield the metrics of ``count`` windows against a running server, after a few requests that warm it up.

    ``first`` is the number of the first window. Windows with other numbers have other prompts.
    """
    model = _warm_up(url, calls, api_key)
    for number in range(first, first + count):
        shifted = [dataclasses.replace(c, prompt=_shifted(c.prompt, number)) for c in calls]
        replies, lags = asyncio.run(client.replay(url, model, shifted, api_key))
        metrics = client.summarise(replies, shifted, lags)
        if metrics["failed"] == metrics["requests"]:
            raise ConfigError(f"no request of the window succeeded at {url}")
        late = max(metrics.get("client_late_ms_p99", 0.0), metrics.get("client_lag_ms_p99", 0.0))
        if late > LATE_MS:
            log.warning("the client itself was late by %.1f ms (p99), which is part of these figures", late)
        yield metrics
        log.info(
            "window %d of %d: %d requests, TTFT p50 %.0f ms",
            number - first + 1,
            count,
            metrics["requests"],
            metrics["ttft_ms_p50"],
        )


def _warm_up(url: str, calls: list[Call], api_key: str | None = None) -> str:
    """Send a few requests at once. Returns the name of the served model."""
    model = client.served_model(url, api_key)
    # Reversed prompts have the same lengths, but no prefix of the window's.
    warmup = [Call(0.0, c.prompt[::-1], c.output) for c in calls[:WARMUP]]
    asyncio.run(client.replay(url, model, warmup, api_key))
    return model


def _shifted(prompt: list[int], number: int) -> list[int]:
    """Change a prompt for window ``number``, so that a prefix cache does not know it. Shared prefixes stay shared."""
    low, high = traces.IDS
    return [low + (t - low + number) % (high - low) for t in prompt]


def most_at_once(case: Case, peer: Peer | None) -> int:
    """The most sequences that run at once on any server of the case, over all its engines."""
    engines = ("replicas", "data_parallel_size")
    servers = [*case.arms.values(), *([peer.options] if peer else [])]
    usual = SchedulerConfig().max_num_seqs
    return max(
        options.get("max_num_seqs", usual) * max(options.get(name, 1) for name in engines) for options in servers
    )


def saturate(url: str, load: Load, trace: list[traces.Recorded], at_once: int) -> float:
    """Requests a second that the server completes when many wait: ``num_requests``, and at least FULL and WAITING times
    ``at_once``, the most that run at once."""
    count = max(load.num_requests, FULL, WAITING * at_once)
    calls = dataclasses.replace(load, num_requests=count).calls(trace, float("inf"))
    replies, _ = asyncio.run(client.replay(url, client.served_model(url), calls))
    return client.capacity(replies)


def _result(
    case: Case, loads: dict[str, Load], measured: dict[str, dict[str, Measured]], site: str | None
) -> dict[str, Any]:
    entries, pairs = [], [(name, case.first) for name in list(case.arms)[1:]]
    for name, settings in case.arms.items():
        if measured.get("own", {}).get(name, Measured()).values:
            entries.append(
                _entry(name, {"shape": case.shape, **settings, "loads": _described(loads)}, [measured["own"][name]])
            )
    drift, targets = {}, {}
    if "before" in measured:
        peer = case.peer.name
        parts = [
            measured[part][peer] for part in ("before", "after") if part in measured and measured[part][peer].values
        ]
        entries.append(_entry(peer, {"peer": peer, **case.peer.options, **peer_version(peer, site)}, parts))
        pairs += [(name, peer) for name in case.arms]
        if len(parts) == 2:
            for key, values in parts[1].values.items():
                before = statistics.median(parts[0].values.get(key, [0]))  # a life that failed midway lacks some
                if before and ".client_" not in key:
                    drift[f"{key} {peer} after/before"] = round(statistics.median(values) / before, 3)
    ratios = ratios_of(entries, pairs)
    if "before" in measured:
        bounds = {metric: bound for load in loads.values() for metric, bound in load.bounds().items()}
        targets = judged(bounds, ratios, f"{case.first}/{case.peer.name}")
    shown = (
        "ttft_ms_p50",
        "ttft_ms_p99",
        "itl_ms_p50",
        "itl_ms_p99",
        "tpot_ms_p50",
        "output_tok_s",
        "cached_tokens",
        "capacity_requests_s",
    )
    kept = {k: v for k, v in (ratios | drift).items() if k in targets or k.split(" ")[0].rsplit(".", 1)[-1] in shown}
    return result(case.name, entries, ratios=kept, limits={}, targets=targets)


def _described(loads: dict[str, Load]) -> dict[str, Any]:
    return {
        n: {f.name: getattr(load, f.name) for f in dataclasses.fields(load) if f.name not in ("name", "targets")}
        for n, load in loads.items()
    }


def _entry(name: str, config: dict[str, Any], parts: list[Measured]) -> dict[str, Any]:
    together: dict[str, list[float]] = {}
    for part in parts:
        for key, values in part.values.items():
            together.setdefault(key, []).extend(values)
    config = {k: v for k, v in config.items() if v is not None}
    ready = spread([s for part in parts for s in part.ready_s]) if any(p.ready_s for p in parts) else None
    return arm(
        name, config, ({"start_s": ready} if ready else {}) | {key: spread(values) for key, values in together.items()}
    )
