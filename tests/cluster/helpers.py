"""Several fake engines behind one front."""

from __future__ import annotations

import contextlib
import os
import signal

from kvasir.cluster.cluster_client import ClusterClient
from kvasir.cluster.placement import Place
from kvasir.config import Settings


@contextlib.asynccontextmanager
async def cluster(count: int = 2, core: str = "SlowCore", drain: float = 0.0, changes: dict | None = None, **options):
    """``changes``: other settings of the last replica."""
    settings = Settings.of(**{"watchdog": 60.0, "replicas": count, **options})
    config = settings.engine_only()
    placed = [Place(config, {})] * (count - 1) + [Place(config.replace(**(changes or {})), {})]
    it = ClusterClient(settings, factory=f"tests.engine.fake_core:{core}", placed=placed)
    await it.start()
    try:
        yield it
    finally:
        await it.stop(drain)


def held(it: ClusterClient) -> list[int]:
    """Number of requests that each replica holds."""
    return [sum(entry.holder == replica.number for entry in it._journal) for replica in it.replicas]


def kill(it: ClusterClient, number: int, how: int = signal.SIGKILL) -> None:
    os.kill(it.replicas[number].child.pid, how)
