"""The client of several replicas: one front, a router, and one supervised engine process a replica.

Whatever dies, its requests go on in another replica from the tokens that readers have. All replicas must have the same
weights, which each proves with a digest when it says hello.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Sequence

from kvasir import technique
from kvasir.client import messages
from kvasir.client.adapters import Registry
from kvasir.client.child import Child
from kvasir.client.engine_client import AsyncEngine
from kvasir.client.engine_process import ENGINE
from kvasir.client.front import Front
from kvasir.client.journal import Entry
from kvasir.client.replica import Replica
from kvasir.cluster.placement import Hosts, Place, ThisHost
from kvasir.cluster.prefixes import PrefixMap
from kvasir.cluster.router import ROUTERS, Candidate, Guarded, Router
from kvasir.compose import compose
from kvasir.config import EngineConfig, Settings
from kvasir.errors import ConfigError, RequestError
from kvasir.types import AdapterInfo, EngineStats, ModelInfo, Request

# Facts of a model that all replicas must share: requests are checked against those of one, and run on any.
SHARED = ("weights", "name", "max_model_len", "vocab_size", "tokenizer_size", "eos_ids", "drafters", "priorities")


def open_client(settings: Settings) -> Front:
    """The client of one engine, or of several replicas. Raises ConfigError where these do not fit."""
    if settings.server.cluster:
        from kvasir.cluster.ray_hosts import RayHosts

        return ClusterClient(settings, hosts=RayHosts(settings.server.cluster))
    return ClusterClient(settings) if settings.server.replicas > 1 else AsyncEngine(settings.engine_only())


def with_replicas(config: EngineConfig, replicas: int) -> Settings:
    """Settings of a server with ``config`` and so many replicas. Raises ConfigError."""
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(EngineConfig)}
    return compose(Settings, {"replicas": replicas}, Settings(**sections))


class ClusterClient(Front):
    """The implementation of ``interface.EngineClient`` for several replicas; see ``Front``. Raises ConfigError for
    settings that do not work with replicas.

    ``hosts``: where the replicas run; by default on this host's GPUs or cores. ``placed``: the places of the first.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        factory: str = ENGINE,
        placed: Sequence[Place] | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        if settings.server.allow_runtime_lora:
            raise ConfigError(
                "--allow-runtime-lora does not work with --replicas yet. Name the adapters at the start: --lora-modules"
            )
        self.router = Guarded(technique.load(ROUTERS, settings.server.router, Router))
        self._hosts = hosts or ThisHost()
        placed = placed or self._hosts.places(settings.engine_only(), settings.server.replicas)
        self._prefixes = PrefixMap()
        configs, environments = [place.config for place in placed], [place.environment for place in placed]
        starts = [place.start for place in placed]
        super().__init__(configs, factory, environments, self._prefixes.secret, starts)
        self._factory, self._environments = factory, environments  # by number
        self._removed: set[int] = set()  # drained for good; the next one that is added takes the place of one
        self._operation = asyncio.Lock()  # operators drain, restart, add and remove one replica at a time
        # Submissions that a replica's latest report does not count: number and uncached tokens, by replica.
        self._sent: list[deque[tuple[int, int]]] = [deque() for _ in placed]

    # ----------------------------------------------------------------------------------------------------- the replicas

    def hello(self, replica: Replica, info: ModelInfo) -> None:
        """Take a replica that computes what the others do. Raises ConfigError for another one."""
        if not hasattr(self, "info"):
            self.info = dataclasses.replace(info)
        for name in SHARED:
            mine, theirs = getattr(info, name), getattr(self.info, name)
            if mine != theirs:
                what = "other weights" if name == "weights" else f"{name}={mine!r}, not {theirs!r}"
                raise ConfigError(
                    f"replica {replica.number} has {what}: all replicas must serve the same model with the same "
                    "settings. If the checkpoint has changed, restart the server."
                )
        self.info.kv_capacity_tokens = min(self.info.kv_capacity_tokens, info.kv_capacity_tokens)

    async def agree(self) -> None:
        """Start the replicas again whose clock chose other backends than the first's: they have other bits."""
        first = self.replicas[0].info.timed
        for replica in self.replicas:
            if replica.info.timed != first:
                await replica.start_again(**first)

    def died(self, replica: Replica, child: Child, why: str) -> None:
        """Forget what the process had cached and queued, and let its requests go on elsewhere."""
        self._prefixes.forget(replica.number)
        self._sent[replica.number].clear()
        super().died(replica, child, why)

    def pages(self, replica: Replica, news: messages.PageNews) -> None:
        """Note which pages a replica has stored and evicted."""
        if self._prefixes.take(replica.number, news):
            replica.send(messages.TellPages())

    def told_until(self, replica: Replica, number: int) -> None:
        """Ask a replica for all its pages where some news were lost."""
        if self._prefixes.missed(replica.number, number):
            replica.send(messages.TellPages())

    # ---------------------------------------------------------------------------------------------------------- routing

    def choose(self, request: Request, ready: list[Replica]) -> Replica:
        """Ask the router for one of ``ready``, and note what it gets."""
        keys: dict[tuple, list[bytes]] = {}  # by root and page size, which replicas nearly always share
        for replica in ready:
            kind = replica.info.prefix_root, replica.info.page_slots
            if kind not in keys:
                keys[kind] = self._prefixes.keys(request, replica.info)
        rates = [replica.load.prompt_rate for replica in ready if replica.load.prompt_rate is not None]
        usual = sum(rates) / len(rates) if rates else 1.0  # of a replica that has not reported yet
        candidates = [self._candidate(replica, keys, len(request.prompt_ids), usual) for replica in ready]
        chosen = self.router.choose(request, candidates)
        self._sent[chosen.number].append((self.replicas[chosen.number].submits + 1, self._own(request, chosen)))
        info = self.replicas[chosen.number].info
        self._prefixes.expect(chosen.number, request.id, keys[info.prefix_root, info.page_slots])
        return self.replicas[chosen.number]

    def _own(self, request: Request, candidate: Candidate) -> int:
        return max(1, len(request.prompt_ids) + len(request.emitted[0]) - candidate.cached)

    def _candidate(self, replica: Replica, keys: dict[tuple, list[bytes]], num_prompt: int, usual: float) -> Candidate:
        load, sent, info = replica.load, self._sent[replica.number], replica.info
        pages = self._prefixes.cached(replica.number, keys[info.prefix_root, info.page_slots])
        while sent and sent[0][0] <= replica.reported:
            sent.popleft()
        return Candidate(
            number=replica.number,
            queued=load.queued_tokens + sum(tokens for _, tokens in sent),
            rate=usual if load.prompt_rate is None else load.prompt_rate,
            decodes=load.decodes,
            cached=min(pages * info.page_slots, num_prompt - 1),
        )

    def finished(self, entry: Entry) -> None:
        """Stop expecting pages of a request: its replica has told them before its end."""
        self._prefixes.settle(entry.id)

    def _rewind(self, entry: Entry) -> None:
        self._prefixes.settle(entry.id)
        super()._rewind(entry)

    # ------------------------------------------------------------------------------------------------------- operations

    def describe(self) -> list[dict[str, object]]:
        """State and load of every replica that was not removed."""
        return [
            {
                "id": replica.number,
                "state": "ready" if replica.connected else "failed" if replica.failed else replica.why_down or "down",
                "reason": replica.why_down,
                "requests": self._num_held(replica),
                "queued_tokens": replica.load.queued_tokens if replica.connected else 0,
                "decodes": replica.load.decodes if replica.connected else 0,
                "restarts": replica.num_restarts,
            }
            for replica in self.replicas
            if replica.number not in self._removed
        ]

    async def drain(self, number: int) -> None:
        """Let a replica's requests go on elsewhere, from their tokens, and end its process. Raises RequestError: 404
        for an unknown number, 409 for the only replica that serves."""
        async with self._operation:
            await self._drain(self._known(number))

    async def restart(self, number: int) -> None:
        """Drain a replica, unless it is drained, and start another process; return when it starts. Raises RequestError
        as ``drain`` does."""
        async with self._operation:
            replica = self._known(number)
            if not replica.out:
                await self._drain(replica)
            replica.resume()

    async def remove(self, number: int) -> None:
        """Drain a replica for good. Raises RequestError as ``drain`` does."""
        async with self._operation:
            replica = self._known(number)
            if not replica.out:
                await self._drain(replica)
            replica.drained = True
            self._removed.add(number)

    async def add(self) -> int:
        """Start one more replica, and return its number. Raises RequestError (409) when this host has no place left."""
        async with self._operation:
            self._check_open()
            if self._removed:
                number = min(self._removed)
                self._removed.discard(number)
                self.replicas[number].resume()
                return number
            try:
                place = await asyncio.to_thread(self._hosts.another, self.replicas[0].config, self._environments)
            except ConfigError as e:
                raise RequestError(str(e), status=409, code="no_place_left") from e
            replica = Replica(
                len(self.replicas),
                place.config,
                self._factory,
                self,
                Registry(self._journal),
                place.environment,
                self._prefixes.secret,
                place.start,
            )
            self._sent.append(deque())
            self._environments.append(place.environment)
            self.replicas.append(replica)
            replica.resume()
            return replica.number

    async def _stop(self) -> None:
        try:
            await super()._stop()
        finally:
            self._hosts.close()

    def _check_open(self) -> None:
        if self._deadline is not None:
            raise self._shutting_down()
        if not self._started:
            raise RequestError("the engine is not started", status=503, code="not_started")

    def _known(self, number: int) -> Replica:
        self._check_open()
        if not 0 <= number < len(self.replicas) or number in self._removed:
            raise RequestError(f"there is no replica {number}", status=404, code="replica_not_found")
        return self.replicas[number]

    async def _drain(self, replica: Replica) -> None:
        if replica.drained:
            return
        if not any(other.connected for other in self.replicas if other is not replica):
            raise RequestError(
                f"replica {replica.number} cannot be drained: no other one serves now. Add or restart one first, or "
                "stop the server.",
                status=409,
                code="last_replica",
            )
        orderly, replica.connected = replica.connected, False  # nothing new is sent to it
        if orderly:
            self._take_back(replica)
        self._prefixes.forget(replica.number)
        self._sent[replica.number].clear()
        self._leave_to_others(replica)
        await replica.drain(orderly)

    def stats(self) -> EngineStats:
        """Those of all replicas together, with each one's own, and the seconds of work that are queued."""
        stats = super().stats()
        stats.by_replica = {
            r.number: dataclasses.replace(r.totals.now(), restarts=r.num_restarts)
            for r in self.replicas
            if r.number not in self._removed
        }
        up = [r for r in self.replicas if r.connected and r.load.prompt_rate]
        if up:
            queued = sum(r.load.queued_tokens + sum(tokens for _, tokens in self._sent[r.number]) for r in up)
            stats.queued_seconds = queued / sum(r.load.prompt_rate for r in up)
        return stats

    # --------------------------------------------------------------------------------------------------------- adapters

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Refuse: replicas serve the adapters of the start."""
        raise RequestError("adapters of replicas are named at the start: --lora-modules", code="no_runtime_adapters")

    async def unload_adapter(self, name: str) -> None:
        """Refuse: replicas serve the adapters of the start."""
        raise RequestError("adapters of replicas are named at the start: --lora-modules", code="no_runtime_adapters")
