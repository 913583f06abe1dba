"""Cost of the front: processor time a token and requests a second that one front carries, over simulated engines.

The engines run in this process, and the processor time that they take is left out: a front sees their frames, and
decodes, journals and delivers them as it does those of real ones.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvasir.bench.result import arm, finish, result
from kvasir.bench.simulated_core import STEP_SECONDS, SimulatedCore
from kvasir.client import ipc, messages
from kvasir.client.engine_process import REPORT_SECONDS
from kvasir.cluster.cluster_client import ClusterClient
from kvasir.cluster.placement import Place
from kvasir.cluster.remote import RemoteFlight
from kvasir.config import EngineConfig, Settings
from kvasir.types import Request, SamplingParams


class Clock:
    """Processor seconds that the engines took."""

    def __init__(self) -> None:
        self.engines = 0.0

    def of(self, work: Callable[[], Any]) -> Any:
        """Do ``work`` for an engine."""
        before = time.process_time()
        try:
            return work()
        finally:
            self.engines += time.process_time() - before


class SimulatedChild:
    """A simulated engine in this process, with the methods of ``client.child.Child``."""

    crash, killed, ended_from_outside, ended = "", False, False, 0.0

    def __init__(self, clock: Clock, config: EngineConfig, **_: Any) -> None:
        self.config, self._clock = config, clock
        self._core = SimulatedCore(config)
        self._inbound, self._outbound = ipc.Decoder(messages.ToEngine), ipc.Decoder(messages.ToClient)
        self._ready: list[bytes] = []
        self._stopped, self._submits, self._beat = False, 0, 0.0
        self.at_work: list[int] | None = []
        self.launches: list[ipc.FlightStep] = []
        self.flight = RemoteFlight()

    async def ready(self, timeout: float) -> messages.Ready:
        self._core.join(b"")
        return messages.Ready(self._core.info, {})

    def send(self, frame: bytes) -> None:
        self._clock.of(functools.partial(self._take, frame))

    def _take(self, frame: bytes) -> None:
        message = self._inbound.body(frame[ipc.HEADER.size :])
        if isinstance(message, messages.Submit):
            self._submits += 1
            self._tell(self._core.submit(message.request))
        elif isinstance(message, messages.Stop):
            self._stopped = True

    def _tell(self, events: list) -> None:
        if events:
            self._ready.append(ipc.encode(messages.Events(events))[ipc.HEADER.size :])

    def _step(self) -> None:
        self.flight.progress += 1
        self._tell(self._core.advance())
        if (now := time.monotonic()) >= self._beat:
            self._beat = now + REPORT_SECONDS
            beat = messages.Heartbeat(self._core.stats(), self._core.load(), self._submits, 0)
            self._ready.append(ipc.encode(beat)[ipc.HEADER.size :])

    async def receive(self) -> Any | None:
        while not self._ready and not self._stopped:
            await asyncio.sleep(STEP_SECONDS)
            self._clock.of(self._step)
        return self._outbound.body(self._ready.pop(0)) if self._ready else None

    async def reap(self, patience: float) -> None:
        self._stopped = True

    def kill(self) -> None:
        self._stopped = True

    def dump_stacks(self) -> None:
        pass

    def obituary(self) -> str:
        return "the simulated engine ended"


async def measure(replicas: int, requests: int, tokens: int, at_once: int, router: str) -> dict[str, float]:
    """Send ``requests`` of ``tokens`` each to simulated replicas. Returns the metrics."""
    clock = Clock()
    settings = Settings.of(replicas=replicas, router=router, watchdog=600.0, max_num_seqs=1024)
    placed = [Place(settings.engine_only(), {}, functools.partial(SimulatedChild, clock))] * replicas
    client = ClusterClient(settings, placed=placed)
    await client.start()
    waiting, seen = iter(range(requests)), 0

    async def reader() -> None:
        nonlocal seen
        for i in waiting:
            prompt = [i % 1000] * 500
            request = Request(id=f"r{i}", prompt_ids=prompt, params=SamplingParams(), seed=i, max_tokens=tokens)
            async for event in client.generate(request):
                seen += len(event.token_ids)

    began, started = time.process_time(), time.monotonic()
    await asyncio.gather(*(reader() for _ in range(at_once)))
    wall, cpu = time.monotonic() - started, time.process_time() - began - clock.engines
    await client.stop(0.0)
    assert seen == requests * tokens, f"{seen} tokens instead of {requests * tokens}"
    return {
        "front_us_token": round(1e6 * cpu / seen, 2),
        "front_us_request": round(1e6 * cpu / requests, 1),
        "front_requests_s": round(requests / cpu, 1),
        "tokens_s_as_run": round(seen / wall, 1),
    }


def run(*, replicas: list[int], requests: int, tokens: int, at_once: int, router: str, output: Path | None) -> None:
    """Measure with each number of replicas, print and write."""
    arms = []
    for count in replicas:
        metrics = asyncio.run(measure(count, requests, tokens, at_once * count, router))
        config = {"requests": requests, "tokens": tokens, "at_once": at_once * count, "router": router}
        arms.append(arm(f"{count} replicas", config, metrics))
    found = result("front", arms)
    finish(found, output)
