"""Two replicas of the model in the package, exact mode: the tokens of one engine, whichever replica served which part.

The requests are those of ``test_killed``: greedy and seeded, n = 3, a grammar, penalties, log-probabilities. Three
replicas do the same with drafters and codecs.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kvasir.client.engine_client import AsyncEngine
from kvasir.client.front import Front
from kvasir.cluster.cluster_client import ClusterClient
from kvasir.cluster.placement import Place
from kvasir.config import Settings
from kvasir.errors import ConfigError
from tests.client.helpers import beat
from tests.integration.test_killed import PARAMS, Read, requests, write_turn

OPTIONS = dict(
    model="nano",
    device="cpu",
    batch_invariant=True,
    num_threads=1,
    max_num_batched_tokens=64,
    cpu_cache_bytes=1 << 24,
    page_slots=16,
    max_model_len=512,
)


async def read_all(front: Front, kill_at: tuple[int, ...] = ()) -> list[Read]:
    """Run all requests at once. Whenever the readers together have as many tokens as ``kill_at`` says, kill the replica
    that holds the most requests."""
    reads, seen, kills = [Read() for _ in PARAMS], 0, list(kill_at)

    async def read(request, into: Read) -> None:
        nonlocal seen
        async for event in front.generate(request):
            into.take(event)
            seen += len(event.token_ids)
            if kills and seen >= kills[0]:
                kills.pop(0)
                busiest = max((r for r in front.replicas if r.connected), key=front._num_held)
                os.kill(busiest.child.pid, signal.SIGKILL)

    await asyncio.gather(*(read(r, into) for r, into in zip(requests(front.info, PARAMS), reads)))
    assert not kills, "the streams ended before the last kill"
    return reads


def replicas(router: str = "round_robin", last: dict | None = None, count: int = 2, **more) -> ClusterClient:
    settings = Settings.of(**OPTIONS, **more, replicas=count, router=router)
    config = settings.engine_only()
    placed = [Place(config, {})] * (count - 1)
    return ClusterClient(settings, placed=[*placed, Place(config.replace(**(last or {})), {})])


async def alone(**more) -> list[Read]:
    engine = AsyncEngine(Settings.of(**OPTIONS, **more).engine_only())
    await engine.start()
    try:
        return await read_all(engine)
    finally:
        await engine.stop(0.0)


def test_two_replicas_give_the_tokens_of_one_engine(tmp_path):
    hook = write_turn(tmp_path)

    async def run() -> None:
        expected = await alone(hook=hook)
        assert expected[3].tokens[0] != expected[3].tokens[1] and len(expected[6].prompt) == 64
        front = replicas(hook=hook)
        await front.start()
        try:
            calm = await read_all(front)
            await beat(*front.replicas)
            assert all(r.totals.now().generation_tokens > 0 and r.load.prompt_rate > 0 for r in front.replicas)
            assert all(front._prefixes.pages(r.number) for r in front.replicas), "engines report their pages"
            stormy = await read_all(front, kill_at=(120, 500))
            assert front.num_restarts == 2 and front.num_quarantined == 0
            for params, a, b, c in zip(PARAMS, expected, calm, stormy):
                assert a == b, params
                assert a == c, params
        finally:
            await front.stop(0.0)

    asyncio.run(run())


ALSO = [("draft_model:model=nano", "plain"), ("ngram", "fp8")]


@pytest.mark.parametrize(
    "drafter, codec", [("suffix", "int8"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ALSO)]
)
def test_three_replicas_draft_and_store_as_one_engine_does(drafter, codec, tmp_path):
    """Requests go on in another replica with another drafter's state, and with pages of a codec that rounds."""
    more = dict(hook=write_turn(tmp_path), drafter=drafter, draft_control="fixed", kv_codec=codec)

    async def run() -> None:
        expected = await alone(**more)
        front = replicas(count=3, **more)
        await front.start()
        try:
            assert await read_all(front, kill_at=(120, 500)) == expected
            await beat(*front.replicas)
            assert front.num_restarts == 2 and front.stats().accepted_tokens > 0
        finally:
            await front.stop(0.0)

    asyncio.run(run())


def test_a_replica_with_other_weights_is_refused():
    """Control of the test above: random weights under the same name, in the same shape."""

    async def run() -> None:
        front = replicas(last={"load_format": "dummy", "seed": 3})
        with pytest.raises(ConfigError, match="other weights"):
            await front.start()
        await front.stop(0.0)

    asyncio.run(run())
