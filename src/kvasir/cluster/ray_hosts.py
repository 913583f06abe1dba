"""Replicas on the hosts of a Ray cluster: Ray finds the places, watches the keepers and restarts them.

Each replica is an actor with a placement group of its own; in the actor a keeper runs the engine process. Requests and
tokens never pass through Ray: the front connects to the keeper's port. Actors belong to the server that made them, and
end with it. ``ray`` (extra [cluster]) is imported when it is used: it takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import uuid
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from kvasir.client.crash_dump import version
from kvasir.client.engine_process import ENGINE
from kvasir.cluster import wire
from kvasir.cluster.certificates import Authority
from kvasir.cluster.keeper import Keeper
from kvasir.cluster.placement import Place
from kvasir.cluster.remote import RemoteChild
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError, install
from kvasir.logs import log, setup

# Ray's name for what all kvasir servers of a cluster share; ``kvasir cluster status`` looks here.
NAMESPACE = "kvasir"
# Seconds that Ray gets to find a place.
PLACE_SECONDS = 60.0
# Seconds that a replica's actor has to answer `kvasir cluster status`.
STATUS_SECONDS = 10.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a keeper, and the version of its kvasir."""

    host: str
    port: int
    version: str


class KeeperActor:
    """The actor: a keeper that listens on its host. ``identity``: see ``wire.Identity``. ``front``: the front's host;
    on the same one a keeper listens on loopback. ``facts``: told by ``status``."""

    def __init__(self, factory: str, identity: dict[str, bytes], front: str, level: str, facts: dict[str, Any]) -> None:
        setup(level)
        self._keeper, self._facts = Keeper(factory), facts
        self._identity, self._front = wire.Identity(**identity), front
        self._port = 0
        self._lock = asyncio.Lock()

    async def address(self) -> Address:
        """Listen, and return where."""
        import ray

        host = ray.util.get_node_ip_address()
        host = LOOPBACK if host == self._front else host
        async with self._lock:
            if not self._port:
                self._port = await self._keeper.listen(host, 0, self._identity.context(server=True))
        return Address(host, self._port, version())

    async def status(self) -> dict[str, Any]:
        """State and load of the engine process, for operators."""
        import ray

        child, beat = self._keeper.child, self._keeper.load
        load = beat and beat.load
        return {
            **self._facts,
            "host": ray.util.get_node_ip_address(),
            "gpu": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "version": version(),
            "pid": child.pid if child is not None else None,
            "state": "ready" if self._keeper.serving else "waiting for its front" if child is None else "starting",
            "running": beat.stats.num_running if beat else 0,
            "queued_tokens": load.queued_tokens if load else 0,
            "prompt_rate": load.prompt_rate if load else None,
        }

    async def close(self) -> None:
        """End the engine process."""
        await self._keeper.close()


class RayHosts:
    """The places of one server's replicas. ``address``: "auto" joins the cluster of this host, or starts one here; else
    that of a head. Raises ConfigError where Ray is not installed or does not answer."""

    def __init__(self, address: str, factory: str = ENGINE) -> None:
        self._ray = connect(address)
        self._factory, self._authority = factory, Authority()
        self._tls = self._authority.identity(wire.FRONT).context(server=False)
        self._name = uuid.uuid4().hex[:8]
        self._held: list[tuple[Any, Any]] = []  # placement group and actor

    def places(self, config: EngineConfig, count: int) -> list[Place]:
        """Places for ``count`` replicas. Raises ConfigError when the cluster has fewer."""
        found = self._ray.cluster_resources()
        if config.model.device == "cpu" or not found.get("GPU"):
            if config.model.device == "cuda":
                raise ConfigError("--device cuda: no host of the Ray cluster has a GPU")
            cores = int(found.get("CPU", 0))
            threads = config.runner.num_threads or max(1, (cores - 1) // count)  # the front needs a core, too
            config = config.replace(num_threads=threads)
        return [self.another(config, [{}] * number) for number in range(count)]

    def another(self, config: EngineConfig, taken: list[dict[str, str]]) -> Place:
        """A place for one more replica next to ``taken``. Raises ConfigError when the cluster has none left."""
        ray, needs = self._ray, _needs(config, self._ray.cluster_resources())
        group = ray.util.placement_group([needs], strategy="STRICT_PACK")
        if not group.wait(PLACE_SECONDS):
            ray.util.remove_placement_group(group)
            free = {name: ray.available_resources().get(name, 0) for name in needs}
            raise ConfigError(
                f"replica {len(taken)} needs {needs} of one host, and the Ray cluster has {free} free. Use fewer "
                "--replicas, or add hosts: ray start --address HEAD"
            )
        identity = self._authority.identity(wire.KEEPER)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        actor = (
            ray.remote(KeeperActor)
            .options(
                name=f"{self._name}-{len(taken)}-{uuid.uuid4().hex[:4]}",
                namespace=NAMESPACE,
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                scheduling_strategy=strategy,
                max_restarts=-1,
            )
            .remote(
                self._factory,
                {name: getattr(identity, name) for name in ("certificate", "key", "authority")},
                ray.util.get_node_ip_address(),
                "INFO",
                {"server": self._name, "replica": len(taken), "model": config.model.model},
            )
        )
        self._held.append((group, actor))
        return Place(config, {}, functools.partial(RemoteChild, functools.partial(self._link, actor)))

    async def _link(self, actor: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the keeper in ``actor``, which is another one at another address after a restart."""
        try:
            at = await actor.address.remote()
        except self._ray.exceptions.RayError as e:
            raise ConnectionError(f"its actor does not answer ({type(e).__name__})") from e
        if at.version != version():
            raise ConfigError(f"host {at.host} has kvasir {at.version}, and this one {version()}. Install the same.")
        return await asyncio.open_connection(
            at.host, at.port, ssl=self._tls, server_hostname=wire.KEEPER, limit=1 << 20
        )

    def close(self) -> None:
        """Give all places back, and leave the cluster."""
        for group, actor in self._held:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
                self._ray.util.remove_placement_group(group)
        self._ray.shutdown()


def _needs(config: EngineConfig, found: dict[str, float]) -> dict[str, float]:
    """Resources that a replica takes of one host: a GPU and a core, or the cores of its threads."""
    if config.model.device == "cpu" or not found.get("GPU"):
        return {"CPU": config.runner.num_threads or 1}
    return {"GPU": 1, "CPU": 1}


def connect(address: str) -> Any:
    """Join the Ray cluster at ``address``, and return the module ``ray``. "auto": that of this host; where there is
    none, one is started. Raises ConfigError."""
    if find_spec("ray") is None:
        raise ConfigError(f"--cluster needs Ray. Install it: {install('cluster')}")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what CPU actors see of GPUs stays as it is
    import ray
    import ray.util.scheduling_strategies

    common = {"namespace": NAMESPACE, "logging_level": "WARNING", "ignore_reinit_error": True}
    try:
        ray.init(address=address, **common)
    except ConnectionError as e:
        if address != "auto":
            raise ConfigError(f"no Ray cluster answers at {address}: {e}. Start one: ray start --head") from e
        log.info("no Ray cluster runs here, so one is started")
        ray.init(address="local", include_dashboard=False, **common)
    return ray


def status(address: str) -> list[dict[str, Any]]:
    """State and load of every replica of every kvasir server in the cluster. Raises ConfigError."""
    if find_spec("ray") is None:
        raise ConfigError(f"this needs Ray. Install it: {install('cluster')}")
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level="ERROR", ignore_reinit_error=True)
    except ConnectionError as e:
        raise ConfigError(f"no Ray cluster answers at {address}: {e}. Give its address with --address") from e
    found = []
    for name in sorted(ray.util.list_named_actors()):
        server, replica, *_ = name.split("-")
        facts = {"server": server, "replica": int(replica)}
        try:
            found.append(ray.get(ray.get_actor(name, namespace=NAMESPACE).status.remote(), timeout=STATUS_SECONDS))
        except (ray.exceptions.RayError, ValueError) as e:
            found.append({**facts, "state": f"its actor does not answer ({type(e).__name__})"})
    return found
