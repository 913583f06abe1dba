"""Measure what Ray costs a server of two replicas on this host: start, first tokens, and rate, in turns without it.

    python -m tools.ray_cost OUT.json [--model nano] [--rounds 2] [--requests 60] [--rate 4]

Both servers have the same two engines. Without Ray they are child processes of the front; with it (`--cluster auto`)
they are actors that the front reaches over TCP with TLS. Ray itself is started and stopped with each server.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

from kvasir.bench.online import load
from kvasir.bench.result import arm, result, write_json
from kvasir.bench.servers import serving

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for number in range(options.rounds):
        for name, flags in WAYS.items():
            rounds[name].append(measure(options, flags))
            print(f"round {number + 1}, {name}: {rounds[name][-1]}", flush=True)
        arms = []
        for name, found in rounds.items():
            numbers = [k for k, v in found[0].items() if isinstance(v, (int, float))]
            metrics = {key: statistics.median(f[key] for f in found) for key in numbers}
            config = {"replicas": 2, "num_threads": 1, "cluster": "auto" if WAYS[name] else None, "rounds": len(found)}
            arms.append(arm(name, config, {**metrics, "rounds": found}))
        write_json(options.output, result("ray-cost", arms))


if __name__ == "__main__":
    # `timeout` sends SIGTERM: the server must end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
