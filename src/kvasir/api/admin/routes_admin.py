"""Routes for operators of replicas: list, add, remove, drain and restart. Only with ``--admin-key``."""

from __future__ import annotations

from starlette.responses import Response

from kvasir.api.admin.routes_status import reply
from kvasir.api.http.service import Service
from kvasir.cluster.cluster_client import ClusterClient
from kvasir.errors import RequestError


class AdminRoutes:
    """The routes of a service; each public method is one. A change is answered with the list of all replicas."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def _cluster(self) -> ClusterClient:
        client = self.service.client
        if not isinstance(client, ClusterClient):
            raise RequestError(
                "this server has one engine and no replicas: start it with --replicas 2 or more",
                status=409,
                code="no_replicas",
            )
        self.service.require_ready()
        return client

    async def replicas(self) -> Response:
        """State and load of every replica."""
        return reply({"object": "list", "data": self._cluster().describe()})

    async def drain(self, number: int) -> Response:
        """End a replica's process; its requests go on elsewhere from their tokens. 200 once it has ended."""
        await self._cluster().drain(number)
        return await self.replicas()

    async def restart(self, number: int) -> Response:
        """Drain a replica, and start its next process. 200 once that starts; the list says when it is ready."""
        await self._cluster().restart(number)
        return await self.replicas()

    async def add(self) -> Response:
        """Start one more replica on this host. 200 once it starts."""
        await self._cluster().add()
        return await self.replicas()

    async def remove(self, number: int) -> Response:
        """Drain a replica for good. 200 once its process has ended."""
        await self._cluster().remove(number)
        return await self.replicas()
