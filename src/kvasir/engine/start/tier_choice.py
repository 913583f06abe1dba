"""The tiers below the device: which ones the settings name, how large they are, and what cannot work."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvasir import technique
from kvasir.config import CacheConfig, EngineConfig
from kvasir.engine.pages.page_pool import pages_for
from kvasir.engine.pages.pages import PageManager
from kvasir.engine.pages.tiers import PageTiers
from kvasir.engine.start.build import Built
from kvasir.engine.start.sizing import GIB, available_memory, gib, token_bytes
from kvasir.errors import ConfigError
from kvasir.kv.tier import TIERS, Found, Place, Tier
from kvasir.logs import log
from kvasir.models.digest import digest
from kvasir.types import CacheGroup
from kvasir.version import __version__

# Share of free host memory that the host tier takes where a file tier needs one, and most pools of the device that it
# holds.
HOST_SHARE, HOST_POOLS = 0.25, 8
# Files of a container's limit and use of memory: cgroup v2, then v1.
CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
CGROUP = Path("/sys/fs/cgroup")


def free_host_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of host memory that may still be taken: what is free, and no more than the container's limit leaves."""
    free = available_memory()
    for limit_name, used_name in CGROUPS:
        try:
            limit, used = (cgroup / limit_name).read_text().strip(), int((cgroup / used_name).read_text())
        except (OSError, ValueError):
            continue
        if limit.isdecimal():
            free = min(free, max(0, int(limit) - used))
    return free


def host_bytes(config: EngineConfig, device: torch.device, pool_bytes: int) -> int:
    """Bytes of the host tier; 0: there is none. Raises ConfigError for more than the machine or its container has."""
    wanted, free = config.cache.kv_host_bytes, free_host_memory()
    if wanted is None:  # a file tier on a GPU passes its pages through host memory
        needed = device.type == "cuda" and config.cache.kv_disk is not None
        wanted = min(int(HOST_SHARE * free), HOST_POOLS * pool_bytes) if needed else 0
    if wanted > free:
        raise ConfigError(
            f"--kv-host-bytes {wanted} is more host memory than this machine or its container has left "
            f"({gib(free)}). Give {int(HOST_SHARE * free)} or less."
        )
    return wanted


def in_tiers(groups: Sequence[CacheGroup], width: int, on_cpu: bool) -> list[str]:
    """Lines about what tiers below the device would hold here, for a model of ``width`` bytes a number that is stored
    as it is. Windows and states are left out."""
    whole, free = [g for g in groups if g.window is None], free_host_memory()
    tokens = sum(token_bytes(whole, CacheConfig().kv_codec, width).values())
    if not tokens:
        return []
    share = int(HOST_SHARE * free)
    usual = "not needed for --kv-disk on a CPU" if on_cpu else "the usual size below --kv-disk"
    return [
        f"host: {gib(share)}, a quarter of free memory, holds {share / tokens:,.0f} tokens (--kv-host-bytes {share}; "
        f"{usual})",
        f"disk: {gib(100 * GIB)} hold {100 * GIB / tokens:,.0f} tokens, also after a restart (--kv-disk "
        f"PATH,bytes={100 * GIB})",
    ]


def chosen(config: EngineConfig, device: torch.device, pool_bytes: int) -> list[Tier]:
    """The tiers of the settings, from the top. Raises ConfigError."""

    def named(name: str, **options: object) -> Tier:
        cls, kind = technique.find(TIERS, name, Tier)
        return cls(technique.parse(kind, name, {key: str(value) for key, value in options.items()}))

    cache, tiers = config.cache, []
    if size := host_bytes(config, device, pool_bytes):
        tiers.append(named("host", bytes=size))
    if cache.kv_disk is not None:
        path, _, size_text = cache.kv_disk.rpartition(",bytes=")
        if not path or not size_text.isdecimal():
            raise ConfigError(
                f"kv_disk={cache.kv_disk!r} is not PATH,bytes=N: name a folder and how many bytes it may take, for "
                "example /var/cache/kvasir,bytes=100000000000"
            )
        tiers.append(named("disk", path=path, bytes=size_text, key=cache.kv_disk_key or ""))
    elif cache.kv_disk_key is not None:
        raise ConfigError("kv_disk_key names the secret of a folder: add --kv-disk PATH,bytes=N, or leave it out")
    return tiers + [technique.load(TIERS, spec, Tier) for spec in cache.kv_tier]


def open_tiers(
    config: EngineConfig, built: Built, pages: PageManager, in_flight: Callable[[], int | None]
) -> PageTiers | None:
    """The engine's tiers, open; None: there are none. Raises ConfigError where the settings do not go together."""
    asked = bool(config.cache.kv_host_bytes or config.cache.kv_disk or config.cache.kv_tier)
    if pages.index is None:
        if asked:
            raise ConfigError(
                "--kv-host-bytes and --kv-disk keep pages of the prefix cache, which is off here. Leave out "
                "--no-enable-prefix-caching and what turns it off, or leave out the tiers."
            )
        return None
    if built.info.pooling is not None and not asked:
        return None
    tiers = chosen(config, built.device, built.plan.total_bytes)
    if not tiers:
        return None
    pool = built.runner.pool
    root = _root(pages.index.root, built) if any(tier.lasting for tier in tiers) else b""
    found: list[list[Found]] = []
    try:
        for i, tier in enumerate(tiers):
            place = Place(pool, built.device, root, tiers[i - 1] if i else None)
            found.append(tier.open(place))
        if secret := next((tier.secret for tier in tiers if tier.secret is not None), None):
            pages.index.share(secret, root.hex())
    except BaseException:
        for tier in tiers[: len(found)]:
            tier.close()
        raise
    log.info("pages that leave the device go to %s", ", then to ".join(map(_described, tiers)))
    return PageTiers(
        pages,
        tiers,
        Place(pool, built.device, root),
        in_flight=in_flight,
        step_pages=pages_for(built.max_rows, pool.page_slots) + 1,
        found=found,
        verify=config.runner.check,
    )


def _described(tier: Tier) -> str:
    slots = sum(tier.num_slots)
    return f"{tier.name} ({slots:,} pages)"


def _root(prefix_root: bytes, built: Built) -> bytes:
    """Names everything that decides the bytes of a page, for pages that another process may read: the prefix root, the
    weights by content, and what computes: versions and the device."""
    device = torch.cuda.get_device_name(built.device) if built.device.type == "cuda" else platform.machine()
    parts = (prefix_root, digest(built.runner.model), __version__, torch.__version__, device)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
