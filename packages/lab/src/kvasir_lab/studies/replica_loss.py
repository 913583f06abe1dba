"""Kill one of several replicas under load, and measure what its clients notice and when the rate is back.

    python -m kvasir_lab.studies replica_loss RESULT.json [--model MODEL | --shape llama-8b] [--replicas 2]
        [--share 0.8]
        [--seconds 60] [--kill-at 20] [--flags "FLAGS OF kvasir serve"]

First it measures how many requests a second the server completes when all come at once. Then requests come at equal
distances, at ``--share`` of that rate, and the engine process of one replica gets SIGKILL. The server moves its
requests to the others and starts it again.

The rate is *back* at the first time from which on the last ``WINDOW`` seconds always have at least ``BACK`` of the
tokens that came before the kill. First tokens are back when their median over such a window stays at most twice that of
before. Both count in seconds from the kill. About four minutes with an 8B shape on two GPUs and ``--seconds 150``: the
queue that grows while one replica is alone lasts longer than the start of the other. The capacity is written at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from kvasir.bench.client import Call, Reply, replay, served_model
from kvasir.bench.result import percentile
from kvasir.bench.servers import Server, serving
from kvasir.bench.workloads import shape_folder
from kvasir_lab.study import Report, study

WINDOW, STEP, BACK = 2.0, 0.25, 0.95
ENGINE = "kvasir.client.engine_process"


def engines(server: Server) -> list[int]:
    """Process ids of the server's engines, the first replica's first."""
    import psutil

    found = []
    for process in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):  # one that has just ended
            if ENGINE in " ".join(process.cmdline()):
                found.append((process.create_time(), process.pid))
    return [pid for _, pid in sorted(found)]


def calls(count: int, distance: float, prompt: int, output: int, seed: int) -> list[Call]:
    """Requests of random tokens, ``distance`` seconds apart. Another ``seed`` makes other prompts, which are not
    cached."""
    draw = random.Random(seed)
    return [Call(i * distance, [300 + draw.randrange(600) for _ in range(prompt)], output) for i in range(count)]


def capacity(server: Server, model: str, at_once: int, prompt: int, output: int) -> float:
    """Requests a second when ``at_once`` come at the same time, the second time."""
    for seed in (1, 2):
        began = time.perf_counter()
        asyncio.run(replay(server.url, model, calls(at_once, 0.0, prompt, output, seed)))
    return at_once / (time.perf_counter() - began)


def tokens_of(replies: list[Reply]) -> list[tuple[float, float]]:
    """Time and tokens of every event. An event may hold several tokens, which the server counts at the end."""
    return [(at, reply.completion / len(reply.events)) for reply in replies for at in reply.events]


def seconds_back(value: Callable[[float], bool], end: float) -> float | None:
    """The first of the times 0, ``STEP``, ... from which on ``value`` holds up to ``end``; None: it does not hold
    there."""
    back = None
    for step in range(int(end / STEP), -1, -1):
        if not value(step * STEP):
            break
        back = step * STEP
    return back


def judge(replies: list[Reply], began: float, killed: float, ended: float) -> dict[str, Any]:
    """Metrics of one window. ``began``, ``killed``: times of the first request and of the kill. ``ended``: when the
    last request was due."""
    tokens = tokens_of(replies)
    before = sum(n for at, n in tokens if began + WINDOW <= at < killed) / (killed - began - WINDOW)
    waits = [(r.due, (r.events[0] if r.events else r.ended) - r.due) for r in replies]
    usual = [wait for due, wait in waits if due < killed - WINDOW]
    after = [wait for due, wait in waits if due >= killed]

    def rate(at: float) -> float:
        return sum(n for t, n in tokens if at - WINDOW <= t - killed < at) / WINDOW

    def quick(at: float) -> bool:
        own = [wait for due, wait in waits if at - WINDOW <= due - killed < at]
        return not own or statistics.median(own) <= 2 * statistics.median(usual)

    span = ended - killed
    return {
        "requests": len(replies),
        "failed": sum(reply.status != 200 for reply in replies),
        "tokens_s_before": round(before, 1),
        "tokens_s_least": round(min(rate(step * STEP) for step in range(int(span / STEP) + 1)), 1),
        "seconds_until_rate": seconds_back(lambda at: rate(at) >= BACK * before, span),
        "seconds_until_first_tokens": seconds_back(quick, span),
        "ttft_ms_p50_before": round(1e3 * percentile(usual, 0.5), 1),
        "ttft_ms_p99_before": round(1e3 * percentile(usual, 0.99), 1),
        "ttft_ms_p50_after": round(1e3 * percentile(after, 0.5), 1),
        "ttft_ms_p99_after": round(1e3 * percentile(after, 0.99), 1),
    }


async def window(server: Server, model: str, load: list[Call], kill_at: float) -> dict[str, Any]:
    """Send ``load`` and kill the last replica on the way. Returns the metrics, with the seconds until its new process
    was seen."""
    before = engines(server)
    began = time.perf_counter()
    running = asyncio.create_task(replay(server.url, model, load))
    await asyncio.sleep(kill_at)
    os.kill(before[-1], signal.SIGKILL)
    killed, started = time.perf_counter(), None
    while started is None and not running.done():
        await asyncio.sleep(0.05)
        if set(engines(server)) - set(before):
            started = round(time.perf_counter() - killed, 2)
    replies, _ = await running
    return judge(replies, began, killed, began + load[-1].due) | {"seconds_until_process": started}


@study("replica-loss")
def main(
    report: Report,
    *,
    model: Annotated[str, "checkpoint; default: the model in the package"] = "",
    shape: Annotated[str, "a shape with random weights, in place of a model"] = "",
    replicas: int = 2,
    share: Annotated[float, "share of the measured capacity"] = 0.8,
    seconds: float = 60.0,
    kill_at: float = 20.0,
    at_once: Annotated[int, "requests at once, to measure the capacity"] = 256,
    prompt: int = 512,
    tokens: Annotated[int, "tokens of an answer"] = 128,
    flags: Annotated[str, "more flags of kvasir serve, as one text"] = "",
) -> None:
    config = {"model": shape or Path(model).name or "base", "replicas": replicas, "share": share}
    config |= {"prompt": prompt, "tokens": tokens, "flags": flags}
    with contextlib.ExitStack() as stack:
        served, more = model, ["--replicas", str(replicas), *shlex.split(flags)]
        if shape:
            served = str(stack.enter_context(shape_folder(shape, tokenizer=True)))
            more += ["--load-format", "dummy"]
        server = stack.enter_context(serving("kvasir", served, more))
        start_s = server.wait()
        name = served_model(server.url)
        found = capacity(server, name, at_once, prompt, tokens)
        rate = share * found
        kept = {"start_s": start_s, "capacity_requests_s": round(found, 2), "rate_requests_s": round(rate, 2)}
        report.add("capacity", config, kept)
        metrics = asyncio.run(window(server, name, calls(int(seconds * rate), 1 / rate, prompt, tokens, 0), kill_at))
    report.arms = []
    report.add("killed", config, kept | metrics)
