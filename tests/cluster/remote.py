"""Replicas behind keepers, in one process: each connection is a pair of sockets, which tests cut."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket

from kvasir.cluster.cluster_client import ClusterClient
from kvasir.cluster.keeper import Keeper
from kvasir.cluster.placement import Place
from kvasir.cluster.remote import RemoteChild
from kvasir.config import Settings

PLACE = {"KVASIR_PLACE": "here"}  # in the environment of each engine process


class Host:
    """A keeper of a fake core and the connections to it. ``down``: it cannot be reached."""

    def __init__(self, core: str) -> None:
        self.keeper = Keeper(f"tests.engine.fake_core:{core}", PLACE)
        self.connections: list[asyncio.StreamWriter] = []
        self.served: list[asyncio.Task] = []
        self.down = False

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self.link()

    async def link(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.down:
            raise ConnectionRefusedError("the host is down")
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=theirs, limit=1 << 20)
        self.served.append(asyncio.create_task(self.keeper.attach(reader, writer)))
        streams = await asyncio.open_connection(sock=ours, limit=1 << 20)
        self.connections.append(streams[1])
        return streams

    def cut(self) -> None:
        """Cut the connection; what was not read yet is lost."""
        self.connections[-1].transport.abort()

    async def close(self) -> None:
        await self.keeper.close()
        await asyncio.gather(*self.served, return_exceptions=True)


@contextlib.asynccontextmanager
async def remote_cluster(count: int = 2, core: str = "SlowCore", **options):
    """A client and its hosts."""
    settings = Settings.of(**{"watchdog": 60.0, "replicas": count, **options})
    hosts = [Host(core) for _ in range(count)]
    placed = [Place(settings.engine_only(), {}, functools.partial(RemoteChild, host.open)) for host in hosts]
    it = ClusterClient(settings, placed=placed)
    try:
        await it.start()
        try:
            yield it, hosts
        finally:
            await it.stop(0.0)
    finally:
        for host in hosts:
            await host.close()
