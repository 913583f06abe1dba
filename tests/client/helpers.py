"""The asynchronous engine with a fake core in a real process, and a reader that checks the events.

Time limits are generous: they end a test that hangs, and must not end one on a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from kvasir.client.engine_client import AsyncEngine
from kvasir.config import EngineConfig
from kvasir.errors import RequestError
from kvasir.types import Event, Request, SamplingParams
from tests.engine.fake_core import expected


def request(number: int = 0, *, max_tokens: int = 20, n: int = 1, faults: str = "", prompt: int = 3, **more) -> Request:
    return Request(
        id=f"r{number}",
        prompt_ids=[number] * prompt,
        params=SamplingParams(n=n, **more),
        seed=number,
        max_tokens=max_tokens,
        tenant=faults,
    )


@contextlib.asynccontextmanager
async def engine(core: str = "FakeCore", drain: float = 0.0, **options):
    it = AsyncEngine(EngineConfig.of(**{"watchdog": 60.0, **options}), factory=f"tests.engine.fake_core:{core}")
    await it.start()
    try:
        yield it
    finally:
        await it.stop(drain)


class Reader:
    """A reader of one request, to its end, that checks the contract of the events."""

    def __init__(self, it: AsyncEngine, wanted: Request) -> None:
        self.wanted, self.tokens, self.reasons = wanted, [[] for _ in range(wanted.params.n)], {}
        self.error: RequestError | None = None
        self.accepted = self.events = 0
        self.task = asyncio.create_task(self._read(it))

    async def _read(self, it: AsyncEngine) -> Reader:
        try:
            async for event in it.generate(self.wanted):
                self._take(event)
        except RequestError as e:
            self.error = e
        return self

    def _take(self, event: Event) -> None:
        assert event.kind != "error"
        if event.kind == "accepted":
            assert not self.accepted and not self.events
            self.accepted += 1
            return
        self.events += 1
        assert self.accepted and event.branch not in self.reasons, "tokens after the end of a branch"
        assert event.index == len(self.tokens[event.branch]), "a gap or a duplicate"
        self.tokens[event.branch] += event.token_ids
        if event.finish_reason:
            self.reasons[event.branch] = event.finish_reason

    def check(self) -> None:
        """Assert that the request ended normally with the right tokens."""
        assert self.error is None, (self.wanted, self.error)
        assert self.tokens == expected(self.wanted)
        assert self.reasons == {b: "length" for b in range(self.wanted.params.n)}

    def check_prefix(self) -> None:
        """Assert that the tokens so far are right."""
        for mine, right in zip(self.tokens, expected(self.wanted)):
            assert mine == right[: len(mine)]


async def until(condition, seconds: float = 120.0) -> None:
    """Wait until the condition holds; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


async def beat(*replicas) -> None:
    """Wait for a heartbeat of each replica's process that was made after this call. Its clock is this machine's."""
    now = time.monotonic()
    await until(lambda: all(replica.totals.now().time > now for replica in replicas))


def run(coroutine) -> None:
    """Run a test's coroutine, for five minutes at most."""
    asyncio.run(asyncio.wait_for(coroutine, 300))
