"""Several fake engines behind one front."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from kvasir.cluster.cluster_client import ClusterClient
from kvasir.cluster.placement import Place
from kvasir.config import Settings
from tests.client.helpers import Reader, request, until


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


# Timeouts of a cluster, by the signal that hurts it. Only a stopped process needs a short watchdog, which could end a
# healthy process on a busy machine.
TIMEOUTS = {signal.SIGKILL: dict(watchdog=60.0), signal.SIGSTOP: dict(watchdog=2.0, startup_timeout=20.0)}


def held(it: ClusterClient) -> list[int]:
    """Number of requests that each replica holds."""
    return [sum(entry.holder == replica.number for entry in it._journal) for replica in it.replicas]


def kill(it: ClusterClient, number: int, how: int = signal.SIGKILL) -> None:
    os.kill(it.replicas[number].child.pid, how)


def emitted(it, number: int) -> int:
    entry = it._journal.get(f"r{number}")
    return 10**6 if entry is None else sum(map(len, entry.request.emitted))


# States of a request's life: a request, and the condition under which it is in that state.
STATES = {
    "sent": (dict(), lambda it, i: True),
    "accepted and blocked": (dict(faults="block@0.2"), lambda it, i: it._journal.get(f"r{i}").accepted),
    "in its prompt": (dict(prompt=2000), lambda it, i: it._journal.get(f"r{i}").accepted),
    "at its first token": (dict(max_tokens=60), lambda it, i: emitted(it, i) > 0),
    "streaming": (dict(max_tokens=60), lambda it, i: emitted(it, i) > 25),
    "streaming branches": (dict(max_tokens=60, n=3), lambda it, i: emitted(it, i) > 60),
    "about to end": (dict(max_tokens=20), lambda it, i: emitted(it, i) > 18),
}


async def hurt_in_every_state(it: ClusterClient, hurt: Callable[[int], None]) -> None:
    """Hurt the replica that holds a request in each state of the request's life. Its tokens must come, each once."""
    for i, (name, (kind, reached)) in enumerate(STATES.items()):
        reader = Reader(it, request(i, **kind))
        await until(lambda i=i, reader=reader: it._journal.get(f"r{i}") is not None or reader.task.done())
        await until(lambda i=i, reader=reader, reached=reached: reader.task.done() or reached(it, i))
        entry = it._journal.get(f"r{i}")
        if entry is not None and entry.holder is not None:
            hurt(entry.holder)
        (await asyncio.wait_for(reader.task, 60)).check()
        await until(lambda: all(replica.connected for replica in it.replicas))
        assert not it._journal, name
    assert it.num_restarts >= 5 and it.num_quarantined == 0
