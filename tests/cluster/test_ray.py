"""Replicas on a Ray cluster of this host: places, restarts of actors, and the tokens of one engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvasir.client.crash_dump import version
from kvasir.cluster.cluster_client import ClusterClient
from kvasir.config import EngineConfig, Settings
from kvasir.errors import ConfigError, RequestError
from tests.client.helpers import Reader, request, run, until
from tests.cluster.helpers import held
from tools.checkout import python_path


def test_without_ray_the_error_says_how_to_install_it(monkeypatch):
    from kvasir.cluster import ray_hosts

    monkeypatch.setattr(ray_hosts, "find_spec", lambda name: None)
    for call in (ray_hosts.RayHosts, ray_hosts.status):
        with pytest.raises(ConfigError, match="pip install ray cryptography"):
            call("auto")


@pytest.fixture(scope="module")
def ray():
    """One local cluster for the whole run: to start one takes ten seconds."""
    ray = pytest.importorskip("ray")
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", python_path())
    ray.init(address="local", namespace="kvasir", num_cpus=3, include_dashboard=False, logging_level="ERROR")
    patch.setattr(ray, "shutdown", lambda: None)
    yield ray
    patch.undo()
    ray.shutdown()


@contextlib.asynccontextmanager
async def ray_cluster(count: int = 2, **options):
    from kvasir.cluster.ray_hosts import RayHosts

    given = {"device": "cpu", "num_threads": 1, "watchdog": 60.0, "replicas": count, "cluster": "auto"} | options
    settings = Settings.of(**given)
    hosts = RayHosts("auto", "tests.engine.fake_core:SlowCore")
    it = ClusterClient(settings, hosts=hosts)
    await it.start()
    try:
        yield it, hosts
    finally:
        await it.stop(0.0)


@pytest.mark.slow
def test_whatever_dies_under_ray_every_request_gets_its_tokens(ray):
    async def body():
        async with ray_cluster() as (it, hosts):
            readers = [Reader(it, request(i, n=1 + i % 3, max_tokens=200)) for i in range(8)]
            await until(lambda: all(r.events for r in readers) and all(held(it)))
            first = await hosts._held[0][1].status.remote()
            os.kill(first["pid"], signal.SIGKILL)  # the engine process
            await until(lambda: it.num_restarts == 1 and it.replicas[0].connected)
            more = [Reader(it, request(20 + i, max_tokens=400)) for i in range(8)]
            await until(lambda: all(r.events for r in more) and all(held(it)))
            actor = hosts._held[1][1]
            ray.kill(actor, no_restart=False)  # the actor, with its keeper
            for reader in (*readers, *more):
                (await reader.task).check()
            await until(lambda: it.replicas[1].connected and it.num_restarts == 2)
            assert it.num_quarantined == 0
            state = await actor.status.remote()
            assert state["state"] == "ready" and state["version"] == version()

    run(body())


@pytest.mark.slow
def test_a_stopped_actor_is_left_out_until_it_goes_on(ray):
    """Its keeper hangs, so nobody can end the engine process, and Ray notices nothing."""

    async def body():
        async with ray_cluster(watchdog=3.0) as (it, hosts):
            readers = [Reader(it, request(i, n=1 + i % 3, max_tokens=200)) for i in range(8)]
            await until(lambda: all(r.events for r in readers) and all(held(it)))
            engine = (await hosts._held[1][1].status.remote())["pid"]
            actor = int(Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(actor, signal.SIGSTOP)
            try:
                for reader in readers:
                    (await reader.task).check()
                assert it.health().ready and not it.replicas[1].connected
                (await Reader(it, request(20)).task).check()
            finally:
                os.kill(actor, signal.SIGCONT)
            await until(lambda: it.replicas[1].connected)
            more = [Reader(it, request(30 + i, max_tokens=60)) for i in range(8)]
            for reader in more:
                (await reader.task).check()
            assert it.num_quarantined == 0

    run(body())


@pytest.mark.slow
def test_places_are_found_refused_and_given_back(ray, monkeypatch):
    monkeypatch.setattr("kvasir.cluster.ray_hosts.PLACE_SECONDS", 3.0)

    async def body():
        async with ray_cluster(2) as (it, _):
            assert await it.add() == 2
            await until(lambda: it.replicas[2].connected)
            with pytest.raises(RequestError, match="ray start") as refused:
                await it.add()
            assert refused.value.status == 409
            await it.remove(2)
            (await Reader(it, request(1)).task).check()

    run(body())
    from kvasir.cluster.ray_hosts import RayHosts

    with pytest.raises(ConfigError, match="no host of the Ray cluster has a GPU"):
        RayHosts("auto").places(EngineConfig.of(device="cuda"), 1)


@pytest.mark.slow
def test_the_status_shows_engines_load_and_versions(ray):
    from kvasir.cli.cluster import app

    async def body():
        async with ray_cluster(2) as (it, _):
            reader = Reader(it, request(1, max_tokens=4000))
            await until(lambda: reader.events)
            shown = CliRunner().invoke(app, ["status", "--json"])
            found = json.loads(shown.stdout)
            assert [one["replica"] for one in found] == [0, 1] and {one["version"] for one in found} == {version()}
            assert all(one["state"] == "ready" and one["host"] for one in found)
            assert "prompt_rate" in CliRunner().invoke(app, ["status"]).stdout
            await it.cancel("r1")
            await reader.task

    run(body())
