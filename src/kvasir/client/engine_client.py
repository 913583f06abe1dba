"""The asynchronous engine: one replica behind the front. This module never imports torch."""

from __future__ import annotations

from collections.abc import Callable

from kvasir.client.engine_process import ENGINE
from kvasir.client.front import Front
from kvasir.client.replica import Replica
from kvasir.config import EngineConfig
from kvasir.types import AdapterInfo


class AsyncEngine(Front):
    """The implementation of ``interface.EngineClient`` for one engine process; see ``Front``."""

    def __init__(self, config: EngineConfig, *, factory: str = ENGINE) -> None:
        super().__init__([config], factory)

    @property
    def replica(self) -> Replica:
        """The only replica."""
        return self.replicas[0]

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Serve an adapter as ``name``, also after a restart of the process. Raises RequestError."""
        return await self.replica.adapters.load(name, path, self._teller())

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests of an adapter, wait for those in progress, and forget it. Raises RequestError."""
        await self.replica.adapters.unload(name, self._teller())

    def _teller(self) -> Callable[[object], None]:
        """A function that sends a message to the process. Raises RequestError where none may be sent."""
        if self._deadline is not None or not self.replica.connected:
            raise self._engine_down() if self._deadline is None else self._shutting_down()
        return self.replica.send
