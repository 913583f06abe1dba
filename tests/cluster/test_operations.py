"""Operators drain, restart, add and remove replicas: no request notices, and what cannot be done is refused."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from kvasir.api.server import create_app
from kvasir.api.text.text import Text
from kvasir.cluster import placement
from kvasir.cluster.placement import VISIBLE, another
from kvasir.config import EngineConfig, ServerConfig
from kvasir.errors import ConfigError, RequestError
from tests.api.fake_client import FakeClient, tokenizer
from tests.client.helpers import Reader, request, run, until
from tests.cluster.helpers import cluster, held

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def under_load(it, count: int = 12, tokens: int = 300) -> list[Reader]:
    readers = [Reader(it, request(i, n=1 + i % 3, max_tokens=tokens)) for i in range(count)]
    await until(lambda: all(r.events for r in readers) and any(held(it)))
    return readers


def test_a_rolling_restart_under_load_loses_and_doubles_nothing():
    async def body():
        async with cluster(2) as it:
            readers = await under_load(it)
            for number in (0, 1):
                pid = it.replicas[number].child.pid
                await it.restart(number)
                assert held(it)[number] == 0
                replica = it.replicas[number]
                await until(lambda replica=replica: replica.connected)
                assert replica.child.pid != pid
            for reader in readers:
                (await reader.task).check()
            assert it.num_restarts == 0 and it.num_quarantined == 0 and not it._journal

    run(body())


def test_a_restart_that_leaves_requests_behind_would_be_found(monkeypatch):
    """Negative control of the test above."""

    async def body():
        async with cluster(2) as it:
            readers = await under_load(it, 4, 60)
            monkeypatch.setattr(it, "_take_back", lambda replica: None)
            monkeypatch.setattr(it, "_leave_to_others", lambda replica: None)
            await it.restart(0)
            done = asyncio.gather(*(reader.task for reader in readers))
            await asyncio.wait_for(done, 5.0)

    with pytest.raises(TimeoutError):
        run(body())


def test_a_drained_replica_gets_nothing_and_comes_back():
    async def body():
        async with cluster(2) as it:
            readers = await under_load(it, 6)
            await it.drain(0)
            await it.drain(0)
            assert it.describe()[0]["state"] == "drained" and it.health().ready and "drained" in it.health().reason
            assert held(it)[0] == 0
            with pytest.raises(RequestError, match="no other one serves") as refused:
                await it.drain(1)
            assert refused.value.status == 409
            for reader in readers:
                (await reader.task).check()
            await it.restart(0)
            await until(lambda: it.replicas[0].connected)
            await it.drain(1)
            (await Reader(it, request(50)).task).check()
            assert it.stats().generation_tokens >= 20 and set(it.stats().by_replica) == {0, 1}

    run(body())


def test_replicas_are_added_and_removed(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(3)))

    async def body():
        async with cluster(2, num_threads=1) as it:
            assert await it.add() == 2
            await until(lambda: it.replicas[2].connected)
            with pytest.raises(RequestError, match="cores") as refused:
                await it.add()
            assert refused.value.status == 409
            readers = await under_load(it, 9)
            await it.remove(0)
            assert [one["id"] for one in it.describe()] == [1, 2]
            with pytest.raises(RequestError, match="no replica 0"):
                await it.drain(0)
            assert await it.add() == 0
            await until(lambda: it.replicas[0].connected)
            for reader in readers:
                (await reader.task).check()
            await until(lambda: it.stats().queued_seconds is not None)

    run(body())


def test_a_suspect_never_takes_down_another_replica(tmp_path, monkeypatch):
    """Its own replica does not come back; the others serve everybody else, and it waits until that is drained."""

    async def body():
        marker = str(tmp_path / "started")
        async with cluster(2, core="tardy", model=marker + "0", changes={"model": marker + "1"}) as it:
            bad = Reader(it, request(90, max_tokens=60, faults="exit@7"))
            await until(lambda: it._trial is not None)
            where = it._trial
            others = [Reader(it, request(i, max_tokens=300)) for i in range(4)]
            for reader in others:
                (await asyncio.wait_for(reader.task, 60)).check()
            assert it._trial is where and it._journal.get("r90").holder is None and not bad.task.done()
            await it.drain(where.number)
            await bad.task
            assert (bad.error.status, bad.error.code) == (503, "suspected") and it._trial is None
            assert sum(replica.num_restarts for replica in it.replicas) == 1
            (await Reader(it, request(99)).task).check()

    run(body())


def test_two_replicas_try_their_own_suspects(tmp_path):
    async def body():
        async with cluster(3) as it:
            bad = [Reader(it, request(90 + i, max_tokens=40, faults="exit@7")) for i in range(2)]
            await until(lambda: all(reader.events for reader in bad))
            homes = {it._journal.get(f"r{90 + i}").holder for i in range(2)}
            readers = [Reader(it, request(i, max_tokens=100)) for i in range(6)]
            for reader in bad:
                await asyncio.wait_for(reader.task, 60)
                assert reader.error.code == "quarantined"
            for reader in readers:
                (await reader.task).check()
            assert {r.number for r in it.replicas if r.num_restarts} == homes

    run(body())


def test_another_gpu_is_found_or_refused(monkeypatch):
    monkeypatch.setenv(VISIBLE, "0,3")
    assert another(EngineConfig(), [{VISIBLE: "0"}]).environment == {VISIBLE: "3"}
    with pytest.raises(ConfigError, match="all 2 GPUs"):
        another(EngineConfig(), [{VISIBLE: "0"}, {VISIBLE: "3"}])
    assert placement.gpus() == ["0", "3"]


def test_the_routes_take_the_admin_key_alone():
    text = Text(tokenizer)

    async def body():
        async with cluster(2) as it:
            for client, expected in ((it, 200), (FakeClient(), 409)):
                app = create_app(client, text, ServerConfig(api_key=("user",), admin_key="operator"))
                app.state.service.phase = "ready"
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                    for key, status in (("user", 401), ("operator", expected)):
                        headers = {"authorization": f"Bearer {key}"}
                        assert (await http.get("/admin/replicas", headers=headers)).status_code == status
                    headers = {"authorization": "Bearer operator"}
                    assert (await http.get("/v1/models", headers=headers)).status_code == 401
                    if client is it:
                        done = await http.post("/admin/replicas/1/drain", headers=headers)
                        assert [one["state"] for one in done.json()["data"]] == ["ready", "drained"]
                        assert (await http.post("/admin/replicas/0/drain", headers=headers)).status_code == 409
                        assert (await http.post("/admin/replicas/7/restart", headers=headers)).status_code == 404
            app = create_app(it, text, ServerConfig())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
                assert (await http.get("/admin/replicas")).status_code == 404, "off by default"

    run(body())
    with pytest.raises(ConfigError, match="admin_key"):
        ServerConfig(api_key=("same",), admin_key="same")
