"""Store a checkpoint packed: bf16 weights in about two thirds of their bytes. Exact (``models/packed.py``).

Only kvasir reads packed folders. `kvasir convert unpack` makes the plain one that other programs read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir.convert.converter import Converter, Source
from kvasir.errors import ConfigError

if TYPE_CHECKING:
    from kvasir.convert.converter import Tensors

MIB = 1 << 20


@dataclass(frozen=True)
class Config:
    """``shard_mib``: most MiB of weights in a shard, before packing (one tensor at least)."""

    shard_mib: int = 4096

    def __post_init__(self) -> None:
        if self.shard_mib < 1:
            raise ConfigError(f"pack: shard_mib={self.shard_mib} must be at least 1")


class Pack(Converter):
    """The same tensors in packed shards."""

    exact = True
    packed = True

    @property
    def shard_bytes(self) -> int:
        return self.config.shard_mib * MIB

    def tensors(self, source: Source, tensors: Tensors) -> Tensors:
        return tensors
