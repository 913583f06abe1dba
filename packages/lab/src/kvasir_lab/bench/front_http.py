"""Cost of the whole server: processor time a token with HTTP, over simulated engines.

    python -m kvasir_lab.bench.front_http PORT REPLICAS FOLDER     the server, which `measure` starts in its own process

The engines run in the server's process, and their time is left out, as in ``front``. All answers stream at once, and
every token has text, so that it is an event of its own unless the server falls behind.
"""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from kvasir.bench import client
from kvasir.bench.client import Call
from kvasir.bench.result import arm, finish, result
from kvasir.bench.servers import END_SECONDS, Server, free_port
from kvasir.bench.workloads import shape_folder
from kvasir.cluster.cluster_client import ClusterClient
from kvasir.cluster.placement import Place
from kvasir.config import Settings
from kvasir_lab.bench.front import Clock, SimulatedChild

SHAPE, NAME = "llama-8b", "simulated"  # only the shape's vocabulary counts
PROMPT = 64  # tokens
WARMUP = 16  # requests
APART = 0.002  # seconds between two arrivals


def measure(replicas: int, at_once: int, tokens: int) -> dict[str, float]:
    """Stream ``at_once`` answers of ``tokens`` each from a server of simulated replicas. Returns the metrics. Raises
    ConfigError where a request failed."""
    port = free_port()
    with shape_folder(SHAPE, tokenizer=True) as folder:
        argv = [sys.executable, "-m", "kvasir_lab.bench.front_http", str(port), str(replicas), folder]
        started = time.perf_counter()
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        server = Server("kvasir", port, process, started)

        def spent() -> float:
            """Processor seconds of the server so far."""
            process.stdin.write("\n")
            process.stdin.flush()
            return float(process.stdout.readline())

        try:
            server.wait()
            calls = [Call(APART * i, [i % 1000] * PROMPT, tokens) for i in range(at_once)]
            client.send(server.url, NAME, NAME, calls[:WARMUP])
            began, before = time.monotonic(), spent()
            replies = client.send(server.url, NAME, NAME, calls)
            wall, cpu = time.monotonic() - began, spent() - before
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=END_SECONDS)
    sent = at_once * tokens
    return {
        "server_us_token": round(1e6 * cpu / sent, 2),
        "server_tokens_s": round(sent / cpu),
        "tokens_per_event": round(sent / sum(len(reply.events) for reply in replies), 3),
        "tokens_s_as_run": round(sent / wall, 1),
    }


def run(*, replicas: list[int], tokens: int, at_once: int, output: Path | None) -> None:
    """Measure with each number of replicas, print and write. ``at_once``: streams on each replica."""
    arms = []
    for count in replicas:
        metrics = measure(count, at_once * count, tokens)
        arms.append(arm(f"{count} replicas", {"tokens": tokens, "at_once": at_once * count}, metrics))
    finish(result("front-http", arms), output)


def run_server(port: int, replicas: int, folder: str) -> None:
    """Serve simulated engines until SIGTERM. For each line of stdin, a line says the processor seconds so far."""
    from kvasir.api.server import serve

    clock = Clock()

    def answer() -> None:
        for _ in sys.stdin:
            print(time.process_time() - clock.engines, flush=True)

    threading.Thread(target=answer, daemon=True).start()
    options = dict(model=folder, served_model_name=NAME, port=port, log_stats=False)
    settings = Settings.of(replicas=replicas, watchdog=600.0, max_num_seqs=1024, **options)
    placed = [Place(settings.engine_only(), {}, functools.partial(SimulatedChild, clock))] * replicas
    serve(settings, ClusterClient(settings, placed=placed))


if __name__ == "__main__":
    run_server(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
