"""Replicas on other hosts: whenever a connection is cut, nothing is lost or doubled, and the engine process stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from kvasir.client.journal import Entry
from kvasir.cluster import keeper, wire
from kvasir.cluster.remote import RemoteChild
from kvasir.config import Settings
from kvasir.errors import ConfigError
from tests.client.helpers import Reader, request, run, until
from tests.cluster.helpers import TIMEOUTS, held, hurt_in_every_state
from tests.cluster.remote import Host, remote_cluster

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def cut_in_every_state(count: int) -> None:
    async with remote_cluster(count) as (it, hosts):
        pids = [host.keeper.child.pid for host in hosts]
        assert all(b"KVASIR_PLACE=here" in Path(f"/proc/{pid}/environ").read_bytes() for pid in pids)
        await hurt_in_every_state(it, lambda holder: hosts[holder].cut())
        assert [host.keeper.child.pid for host in hosts] == pids, "the engine processes stay"


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_cut_in_any_state_loses_and_doubles_nothing(count):
    run(cut_in_every_state(count))


def test_a_front_that_does_not_raise_the_epoch_is_caught(monkeypatch):
    """Negative control: the engine process stays, so its late events and its ends come over the next connection."""

    def rewind(self: Entry) -> None:
        self.holder, self.fresh = None, 0

    async def body():
        async with remote_cluster(1) as (it, hosts):
            readers = [Reader(it, request(i, max_tokens=80)) for i in range(4)]
            await until(lambda: all(r.events > 2 for r in readers))
            hosts[0].cut()
            for reader in readers:
                (await reader.task).check()

    run(body())
    monkeypatch.setattr(Entry, "rewind", rewind)
    with pytest.raises(AssertionError):
        run(body())


def test_requests_of_a_host_that_hangs_go_on_elsewhere():
    """Its keeper does not answer: that tells little of the requests. Those of an engine that hangs under a keeper which
    answers are suspects, and wait for it."""

    async def body():
        async with remote_cluster(2, watchdog=2.0, startup_timeout=60.0) as (it, hosts):
            readers = [Reader(it, request(i, n=1 + i % 3, max_tokens=150)) for i in range(8)]
            await until(lambda: all(r.events for r in readers) and all(held(it)))
            keeper = hosts[1].keeper
            child = keeper.child
            hosts[1].down, keeper.child, keeper._front = True, None, None
            for reader in readers:
                (await reader.task).check()
            assert not it.replicas[1].connected and it.replicas[1].why_down and it.health().ready
            hosts[1].down, keeper.child = False, child
            await until(lambda: it.replicas[1].connected)
            assert it.num_quarantined == 0 and keeper.child is child

    run(body())


def test_requests_that_were_cancelled_before_a_cut_end():
    async def body():
        async with remote_cluster(1) as (it, hosts):
            reader = Reader(it, request(1, max_tokens=400))
            await until(lambda: reader.events > 5)
            hosts[0].cut()
            assert await it.cancel("r1")
            await reader.task
            assert reader.reasons == {0: "cancelled"} and not it._journal
            reader.check_prefix()

    run(body())


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_dead_or_hanging_process_is_replaced_and_its_requests_go_on(how):
    async def body():
        async with remote_cluster(2, **TIMEOUTS[how]) as (it, hosts):
            readers = [Reader(it, request(i, n=1 + i % 3, max_tokens=150)) for i in range(8)]
            await until(lambda: all(r.events for r in readers) and all(held(it)))
            pid = hosts[1].keeper.child.pid
            os.kill(pid, how)
            for reader in readers:
                (await reader.task).check()
            await until(lambda: it.replicas[1].connected and it.num_restarts == 1)
            assert hosts[1].keeper.child.pid != pid and it.num_quarantined == 0

    run(body())


def test_a_poisonous_request_is_found_from_afar():
    async def body():
        async with remote_cluster(2) as (it, _):
            bad = Reader(it, request(90, max_tokens=30, faults="exit@7"))
            readers = [Reader(it, request(i, max_tokens=100)) for i in range(6)]
            await bad.task
            assert (bad.error.status, bad.error.code) == (500, "quarantined") and len(bad.tokens[0]) == 7
            for reader in readers:
                (await reader.task).check()

    run(body())


def test_a_host_that_is_down_is_waited_for_while_others_serve(monkeypatch):
    async def body():
        async with remote_cluster(2) as (it, hosts):
            hosts[0].down = True
            hosts[0].cut()
            await until(lambda: not it.replicas[0].connected)
            (await Reader(it, request(1)).task).check()
            assert it.health().ready and not it.replicas[0].connected
            hosts[0].down = False
            await until(lambda: it.replicas[0].connected)

    run(body())


def test_a_process_without_a_front_ends(monkeypatch):
    monkeypatch.setattr(keeper, "PATIENCE_SECONDS", 0.2)

    async def body():
        async with remote_cluster(1) as (it, hosts):
            hosts[0].down = True
            hosts[0].cut()
            await until(lambda: hosts[0].keeper.child is None)
            hosts[0].down = False
            (await Reader(it, request(1)).task).check()

    run(body())


def test_a_process_that_starts_ends_when_its_front_is_gone(monkeypatch):
    monkeypatch.setattr(keeper, "PATIENCE_SECONDS", 0.2)

    async def body():
        host = Host("sleeping")
        front = RemoteChild(host.open, Settings.of().engine_only())
        start = asyncio.create_task(front.ready(60.0))
        await until(lambda: host.keeper.child is not None)
        child = host.keeper.child
        host.cut()
        await asyncio.gather(start, return_exceptions=True)
        await front.reap(0.0)
        await until(lambda: child.flight.closed)
        assert host.keeper.child is None
        await host.close()

    run(body())


def test_the_end_of_a_process_leaves_the_next_one_alone():
    """A front may come back while the process that it had is ending."""

    class Ending:
        def __init__(self) -> None:
            self.ended = asyncio.Event()

        def send(self, frame: bytes) -> None: ...

        async def reap(self, patience: float) -> None:
            await self.ended.wait()

    async def body():
        it, child = keeper.Keeper(), Ending()
        pumps = [asyncio.create_task(asyncio.sleep(600)) for _ in range(2)]
        it.child, it._ready, it._pump = child, object(), pumps[0]
        end = asyncio.create_task(it._end())
        await until(lambda: it.child is None)
        it._pump = pumps[1]
        child.ended.set()
        await end
        assert pumps[0].cancelled() and not pumps[1].done() and it._pump is pumps[1]
        pumps[1].cancel()

    run(body())


def test_a_refusal_comes_through():
    async def body():
        with pytest.raises(ConfigError, match="gpu-memory-utilization"):
            async with remote_cluster(1, "refusing"):
                pass

    run(body())


def test_tls_lets_only_the_front_in():
    pytest.importorskip("cryptography")
    from kvasir.cluster.certificates import Authority

    ours, others = Authority(), Authority()

    async def says(port: int, identity: wire.Identity | None) -> bytes:
        """Whatever a keeper says to a hello of this caller."""
        tls = identity and identity.context(server=False)
        name = wire.KEEPER if tls else None
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=name)
        writer.write(b"\0\0\0\1x")
        with contextlib.suppress(OSError):
            found = await asyncio.wait_for(reader.read(), 10)
        writer.transport.abort()
        return found

    async def body():
        host = Host("SlowCore")
        port = await host.keeper.listen("127.0.0.1", 0, ours.identity(wire.KEEPER).context(server=True))
        for identity in (None, others.identity(wire.FRONT), ours.identity(wire.KEEPER)):
            with contextlib.suppress(OSError):
                assert not await says(port, identity)
        assert host.keeper._attached is None, "nobody reached the keeper"
        with contextlib.suppress(OSError):
            await says(port, ours.identity(wire.FRONT))
        assert host.keeper._attached is not None
        impostor = ours.identity(wire.FRONT)
        fake = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0, ssl=impostor.context(server=True))
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            await says(fake.sockets[0].getsockname()[1], ours.identity(wire.FRONT))
        fake.close()
        await host.close()

    run(body())


def test_tokens_come_over_tls():
    pytest.importorskip("cryptography")
    from kvasir.cluster.certificates import Authority

    ours = Authority()

    async def body():
        async with remote_cluster(1) as (it, hosts):
            port = await hosts[0].keeper.listen("127.0.0.1", 0, ours.identity(wire.KEEPER).context(server=True))
            tls = ours.identity(wire.FRONT).context(server=False)

            async def link():
                streams = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=wire.KEEPER)
                hosts[0].connections.append(streams[1])
                return streams

            hosts[0].link = link
            hosts[0].cut()
            reader = Reader(it, request(1, max_tokens=100))
            await until(lambda: reader.events > 5)
            hosts[0].cut()
            (await reader.task).check()
            assert len(hosts[0].connections) == 3

    run(body())
