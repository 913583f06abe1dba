"""The places of the replicas on this host: one GPU each, or an equal share of the CPU's cores. Needs no torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvasir.client.child import Child
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Place:
    """Settings of one replica, what its process finds in its environment, and how one is started."""

    config: EngineConfig
    environment: dict[str, str]
    start: Callable[..., Any] = Child


class Hosts(Protocol):
    """The places that replicas may have."""

    def places(self, config: EngineConfig, count: int) -> list[Place]:
        """Places for ``count`` replicas. Raises ConfigError when more are asked for than fit."""

    def another(self, config: EngineConfig, taken: list[dict[str, str]]) -> Place:
        """A place for one more next to those with the environments ``taken``. Raises ConfigError."""

    def close(self) -> None:
        """Give all places back."""


class ThisHost:
    """The GPUs or cores of this host."""

    def places(self, config: EngineConfig, count: int) -> list[Place]:
        return places(config, count)

    def another(self, config: EngineConfig, taken: list[dict[str, str]]) -> Place:
        return another(config, taken)

    def close(self) -> None:
        """Do nothing: the places are free when their processes have ended."""


def places(config: EngineConfig, count: int) -> list[Place]:
    """Places for ``count`` replicas. Raises ConfigError when more are asked for than fit."""
    found = [] if config.model.device == "cpu" else gpus()
    if found or config.model.device == "cuda":
        if count > len(found):
            raise ConfigError(
                f"replicas={count}: each replica needs a GPU of its own, and {len(found)} can be seen here. "
                + (f"Use --replicas {len(found)}" if found else "Use --device cpu")
                + f", or make more visible ({VISIBLE})."
            )
        return [Place(config, {VISIBLE: gpu}) for gpu in found[:count]]
    cores = len(os.sched_getaffinity(0))
    threads = config.runner.num_threads or max(1, (cores - 1) // count)  # the front needs a core, too
    if count * threads > cores:
        fewer = max(1, cores // threads)
        raise ConfigError(
            f"replicas={count}: with {threads} compute threads each they need {count * threads} cores, and there are "
            f"{cores}. Use --replicas {fewer}" + (", or lower --num-threads." if threads > 1 else ".")
        )
    return [Place(config.replace(num_threads=threads), {}) for _ in range(count)]


def another(config: EngineConfig, taken: list[dict[str, str]]) -> Place:
    """A place for one more replica next to those with the environments ``taken``; its settings are ``config``. Raises
    ConfigError when this host has none left."""
    if any(VISIBLE in environment for environment in taken):
        used = {environment.get(VISIBLE) for environment in taken}
        left = [gpu for gpu in gpus() if gpu not in used]
        if not left:
            raise ConfigError(f"all {len(used)} GPUs have a replica. Remove one first, or start a server elsewhere.")
        return Place(config, {VISIBLE: left[0]})
    threads, cores = config.runner.num_threads or 1, len(os.sched_getaffinity(0))
    if (len(taken) + 1) * threads > cores:
        raise ConfigError(
            f"{len(taken) + 1} replicas with {threads} compute threads each need more than the {cores} cores. "
            "Remove one first, or start the server with a lower --num-threads."
        )
    return Place(config, {})


def gpus() -> list[str]:
    """Names of the GPUs that a process started here would see, as ``CUDA_VISIBLE_DEVICES`` writes them."""
    given = os.environ.get(VISIBLE)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        end = next((i for i, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
        return names[:end]  # CUDA, too, ignores what stands behind an invalid name
    return [str(i) for i in range(_count())]


def _count() -> int:
    """Number of NVIDIA GPUs, asked of the driver's library: torch is never imported here."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()
