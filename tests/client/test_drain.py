"""The drain: running requests finish, the rest is journalled."""

from __future__ import annotations

import asyncio
import os
import signal
import stat

import pytest

from kvasir.client import journal, replica
from kvasir.client.engine_client import AsyncEngine
from kvasir.config import EngineConfig
from kvasir.errors import RequestError
from tests.client.helpers import Reader, engine, request, run, until
from tests.engine.fake_core import expected

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

# --------------------------------------------------------------------------------------------------------------- drain


def test_drain_lets_running_requests_finish_and_refuses_new_ones():
    async def body():
        async with engine("SlowCore", drain=120.0) as it:
            readers = [Reader(it, request(i, max_tokens=60)) for i in range(4)]
            await until(lambda: all(r.accepted for r in readers))
            stopping = asyncio.create_task(it.stop(20.0))
            await asyncio.sleep(0)
            assert it.health().live and not it.health().ready and it.health().reason == "draining"
            with pytest.raises(RequestError) as caught:
                await anext(it.generate(request(9)))
            assert (caught.value.status, caught.value.code) == (503, "shutting_down") and caught.value.retry_after
            for reader in readers:
                (await reader.task).check()
            await stopping

    run(body())


def test_what_the_drain_leaves_is_journalled_answered_and_can_be_resumed(tmp_path):
    path = tmp_path / "journal.jsonl"

    async def body():
        async with engine("SlowCore", journal=str(path)) as it:
            readers = [Reader(it, request(i, n=2, max_tokens=2000, logit_bias={5: 0.5}, faults="")) for i in range(3)]
            short = Reader(it, request(8, max_tokens=5))
            await until(lambda: all(r.events for r in readers))
            (await short.task).check()
            slow, hasty = (
                asyncio.create_task(it.stop(60.0)),
                asyncio.create_task(it.stop(0.1)),
            )  # a second SIGTERM shortens it
            await asyncio.gather(slow, hasty)
            for reader in readers:
                assert ((await reader.task).error.status, reader.error.code) == (503, "shutting_down")
                reader.check_prefix()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        left = journal.load(path)
        assert [r.id for r in left] == ["r0", "r1", "r2"] and [r.emitted for r in left] == [r.tokens for r in readers]
        async with engine() as it:
            for resumed, reader in zip(left, readers):
                tokens = [list(t) for t in resumed.emitted]
                async for event in it.generate(resumed):
                    tokens[event.branch] += event.token_ids
                assert tokens == expected(reader.wanted)

    run(body())


def test_a_journal_that_cannot_be_written_does_not_keep_readers_waiting(tmp_path):
    async def body():
        async with engine("SlowCore", journal=str(tmp_path / "no" / "folder")) as it:
            reader = Reader(it, request(1, max_tokens=2000))
            await until(lambda: reader.events)
            await it.stop(0)
            assert (await reader.task).error.code == "shutting_down"

    run(body())


def test_drain_survives_a_death():
    async def body():
        async with engine("SlowCore") as it:
            readers = [Reader(it, request(i, max_tokens=60)) for i in range(4)]
            await until(lambda: all(r.events for r in readers))
            stopping = asyncio.create_task(it.stop(120.0))
            await until(lambda: it._deadline is not None)
            os.kill(it.replica.child.pid, signal.SIGKILL)
            for reader in readers:
                (await reader.task).check()
            await stopping

    run(body())


def test_stop_in_every_state(tmp_path, monkeypatch):
    monkeypatch.setattr(replica, "MAX_BACKOFF_SECONDS", 5.0)

    async def body():
        fresh = AsyncEngine(EngineConfig(), factory="tests.engine.fake_core:FakeCore")
        await fresh.stop()
        spawned = AsyncEngine(EngineConfig(), factory="tests.engine.fake_core:FakeCore")
        spawned.start_process()
        await spawned.stop()
        async with engine("once", model=str(tmp_path / "m")) as it:  # stopped in its back-off
            os.kill(it.replica.child.pid, signal.SIGKILL)
            await until(lambda: it.replica.deaths >= 3)
            reader = Reader(it, request(1))
            await asyncio.sleep(0)
        assert (await reader.task).error.code == "shutting_down"

    run(body())
