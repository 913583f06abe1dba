"""Measure what Ray costs a server of two replicas on this host: start, first tokens, and rate, in turns without it.

    python -m kvasir_lab.studies ray_cost OUT.json [--model nano] [--rounds 2] [--requests 60] [--rate 4]

Both servers have the same two engines. Without Ray they are child processes of the front; with it (`--cluster auto`)
they are actors that the front reaches over TCP with TLS. Ray itself is started and stopped with each server.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Annotated, Any

from kvasir.bench.online import load
from kvasir.bench.servers import serving
from kvasir_lab.study import Report, study

WAYS: dict[str, list[str]] = {"children": [], "ray": ["--cluster", "auto"]}
PROMPT, OUTPUT = 64, 64


def measure(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Seconds until the server is ready, and latencies under Poisson arrivals."""
    flags = ["--replicas", "2", "--num-threads", "1", *flags]
    with serving("kvasir", options.model, flags) as server:
        ready = server.wait()
        asyncio.run(load(server.url, 0.0, 8, PROMPT, OUTPUT, None))  # the first requests warm both replicas
        found = asyncio.run(load(server.url, options.rate, options.requests, PROMPT, OUTPUT, None))
        at_once = asyncio.run(load(server.url, 0.0, options.requests, PROMPT, OUTPUT, None))
    return {"ready_s": ready, **found, "at_once_output_tok_s": at_once["output_tok_s"]}


@study("ray-cost")
def main(
    report: Report,
    *,
    model: str = "nano",
    rounds: int = 2,
    requests: int = 60,
    rate: Annotated[float, "requests a second"] = 4.0,
) -> None:
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name, flags in WAYS.items():
            measured[name].append(measure(report.options, flags))
            print(f"round {number + 1}, {name}: {measured[name][-1]}", flush=True)
        report.arms = []
        for name, found in measured.items():
            numbers = [k for k, v in found[0].items() if isinstance(v, (int, float))]
            metrics = {key: statistics.median(f[key] for f in found) for key in numbers}
            config = {"replicas": 2, "num_threads": 1, "cluster": "auto" if WAYS[name] else None, "rounds": len(found)}
            report.add(name, config, {**metrics, "rounds": found})
