"""Attack a running server with clients that ask for very long answers, and measure what is left for the others.

    python -m kvasir_lab.studies attack_http RESULT.json [--model MODEL] [--seconds 25] [--attackers 0,1,10,50]

The simulation of this is ``kvasir_lab/studies/simulate_attack.py``; here everything runs, over HTTP. Forty honest keys
send requests of 64 prompt tokens and 32 output tokens at random times, together at a quarter of the rate that the
server completes when 16 are open. Each attacker has a key of its own and keeps 4 requests of 3,000 output tokens open,
without streaming, so that the client costs little. Every arm is a server of its own: as it is by default (``fcfs``),
with ``--max-output-tokens 128`` for every key and nothing else, with a fair share between keys (``fair``), with one
that takes running places sooner, and with a fair share and ``--max-output-tokens 128``.

An honest token counts as served if it arrives before the attack ends. About 10 minutes on two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from typing import Any
from urllib.parse import urlsplit

from kvasir.bench.client import Call, replay, served_model
from kvasir.bench.result import percentile
from kvasir.bench.servers import Server, serving
from kvasir_lab.study import Arms, Report, study

SHARE, HONEST_KEYS, PROMPT, OUTPUT = 0.25, 40, 64, 32
OPEN, LONG = 4, 3000
SETTINGS: dict[str, list[str]] = {
    "fcfs": [],
    "a cap": ["--max-output-tokens", "128"],
    "fair": ["--scheduling-policy", "fair"],
    "fair:displace=512": ["--scheduling-policy", "fair:displace=512"],
    "fair and a cap": ["--scheduling-policy", "fair", "--max-output-tokens", "128"],
}


def keys(count: int) -> list[str]:
    """Keys of all clients, honest ones first."""
    return [f"honest{i}" for i in range(HONEST_KEYS)] + [f"attacker{i}" for i in range(count)]


def prompt(draw: random.Random, vocabulary: int = 900) -> list[int]:
    return [300 + draw.randrange(vocabulary) for _ in range(PROMPT)]


async def attack(server: Server, model: str, key: str, draw: random.Random, seconds: float) -> int:
    """Keep one long request open until the time is over. Returns how many were answered."""
    place, answered, end = urlsplit(server.url), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        body = json.dumps({"model": model, "prompt": prompt(draw), "max_tokens": LONG, "ignore_eos": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            writer.write(head.encode() + body)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(), end - time.perf_counter())
                answered += 1
        finally:
            writer.close()
    return answered


def capacity(server: Server, model: str) -> float:
    """Honest requests a second with 16 open, and nobody else."""
    draw = random.Random(1)
    calls = [Call(0.0, prompt(draw), OUTPUT) for _ in range(16)]
    asyncio.run(replay(server.url, model, calls, "honest0"))  # warm
    started, rounds = time.perf_counter(), 4
    for _ in range(rounds):
        asyncio.run(replay(server.url, model, calls, "honest0"))
    return rounds * len(calls) / (time.perf_counter() - started)


async def window(server: Server, model: str, attackers: int, rate: float, seconds: float) -> dict[str, Any]:
    """Metrics of the honest keys while so many attackers are at work."""
    draw, due, calls = random.Random(2), 0.0, []
    while (due := due + draw.expovariate(rate)) < seconds:
        calls.append(Call(due, prompt(draw), OUTPUT, api_key=draw.choice(keys(0))))
    end = time.perf_counter() + seconds
    attacks = [
        asyncio.create_task(attack(server, model, key, draw, seconds))
        for key in keys(attackers)[HONEST_KEYS:]
        for _ in range(OPEN)
    ]
    replies, _ = await replay(server.url, model, calls)
    answered = sum(await asyncio.gather(*attacks))
    early = [reply for reply in replies if reply.due < end - 0.1 * seconds]
    # An event may hold several tokens, so those of an answer that has ended are counted by the server.
    served = sum(r.completion if r.ended < end else sum(at < end for at in r.events) for r in early)
    # A request that still waits counts with the wait that it has had, or the worst case would look best.
    waits = [(min(reply.events[0], end) if reply.events else end) - reply.due for reply in replies]
    return {
        "honest_requests": len(replies),
        "honest_failed": sum(reply.status != 200 for reply in replies),
        "honest_served_share": round(served / (OUTPUT * len(early)), 4) if early else None,
        "honest_ttft_ms_p50": round(1e3 * percentile(waits, 0.5), 1),
        "honest_ttft_ms_p99": round(1e3 * percentile(waits, 0.99), 1),
        "attacks_answered": answered,
    }


@study("attack-http")
def main(report: Report, *, model: str = "", seconds: float = 25.0, attackers: str = "0,1,10,50") -> Arms:
    counts, rate = [int(count) for count in attackers.split(",")], 0.0
    for name, flags in SETTINGS.items():
        shared = ["--max-num-seqs", "32", *(part for key in keys(max(counts)) for part in ("--api-key", key))]
        with serving("kvasir", model, [*shared, *flags]) as server:
            server.wait("/health")  # the path that needs no key
            served = served_model(server.url, "honest0")
            rate = rate or SHARE * capacity(server, served)
            asyncio.run(replay(server.url, served, [Call(0.0, [300] * PROMPT, OUTPUT)] * 16, "honest0"))
            for count in counts:
                metrics = asyncio.run(window(server, served, count, rate, seconds))
                settings = {"flags": " ".join(flags), "attackers": count, "honest_requests_s": round(rate, 2)}
                yield f"{count} attackers, {name}", settings, metrics
