"""Low-rank keys and values under exact RoPE: a latent for all heads of each side (CARE's one-shot form, arXiv
2603.17946). Lossy below full rank.

A token keeps the latent of its keys, as they are before RoPE, the latent of its values, and its position. Keys are
made of their latents when they are read, and turned at the stored position. Values are never made: attention sums
their latents, and each head's result is brought out of the latent by one product. The latents come from a folder that
`kvasir convert lowrank` writes. Layers that it leaves out, those with a window, are cached as they are.

2 R elements and a position of 4 bytes a token and layer instead of 2 G D elements, and 2 R G D operations for every key
that is read. On a GPU the Triton backend makes keys inside its kernel (`kvasir.kernels.lowrank_decode`), for latents of
values of up to 512 elements.

Legend: T rows, G KV heads, D head dim, R rank of a latent, W pages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvasir import technique
from kvasir.errors import ConfigError
from kvasir.kernels.lowrank_decode import MAX_RANK
from kvasir.kv.codec import CODECS, CachedLayer, Codec, LayerCache, Plane
from kvasir.kv.latents import DESCRIPTION, PARTS, WEIGHTS, LatentLayer, Maps, latent_planes
from kvasir.plain_files import refuse_special
from kvasir.types import CacheRow

HOW = "Make one with `kvasir convert lowrank:rank=N MODEL FOLDER`, and give --kv-codec lowrank:folder=FOLDER."
WRONG_LAYER = "pages are written and read by the codec of `layer`"


@dataclass(frozen=True, slots=True)
class Config:
    """``folder``: what `kvasir convert lowrank` wrote for the served model."""

    folder: str = ""


class LowRankCodec(Codec):
    """Caches latents of keys and values, by the folder of a calibration."""

    kernel = "latents"
    page_slots = 64  # the product that makes keys of a page's latents has 64 rows
    turns = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.description = _describe(config.folder) if config.folder else None
        self.layers: dict[int, Codec] = {}
        ranks = [] if self.description is None else self.description["ranks"]
        if any(r is not None and r[1] > MAX_RANK for r in ranks):
            self.kernel = "wide latents"  # no kernel reads them

    def fingerprint(self) -> tuple:
        return (self.name, None if self.description is None else self.description["digest"])

    def planes(self, row: CacheRow, dtype: torch.dtype) -> list[Plane]:
        """The planes at full rank. A layer's own are those of ``layer``."""
        return latent_planes(row.heads * row.key_dim, row.heads * row.value_dim, dtype)

    def layer(self, index: int) -> Codec:
        if index not in self.layers:
            ranks = self._described()["ranks"]
            if index >= len(ranks):
                raise self._other(f"it has {len(ranks)} layers")
            self.layers[index] = (
                technique.load(CODECS, "plain", Codec) if ranks[index] is None else LatentLayer(*ranks[index])
            )
        return self.layers[index]

    def attach(self, layers: Sequence[CachedLayer], device: torch.device, dtype: torch.dtype, exact: bool) -> None:
        from safetensors import SafetensorError, safe_open

        found = self._described()
        plain = technique.load(CODECS, "plain", Codec)
        self.layers |= {cached.index: plain for cached in layers if cached.added}
        layers = [cached for cached in layers if not cached.added]
        if len(found["ranks"]) != 1 + max(cached.index for cached in layers):
            raise self._other(f"it has {len(found['ranks'])} layers")
        for cached in layers:
            heads = found["heads"][cached.index]
            if cached.row.latent or heads != [cached.row.heads, cached.row.key_dim]:
                raise self._other(
                    f"layer {cached.index} has {heads[0]} heads of {heads[1]} there, and {cached.row.heads} of "
                    f"{cached.row.key_dim} here"
                )
        try:
            with safe_open(Path(self.config.folder) / WEIGHTS, "pt") as stored:
                for cached in layers:
                    codec = self.layer(cached.index)
                    if isinstance(codec, LatentLayer):
                        parts = {name: stored.get_tensor(f"layers.{cached.index}.{name}") for name in PARTS}
                        maps = Maps.of(parts, cached.row.heads, device, dtype)
                        if maps.shapes != (*codec.ranks, cached.row.heads * cached.row.key_dim):
                            raise self._other(f"layer {cached.index} has matrices of other shapes")
                        codec.fill(maps, cached.angles, exact)
        except (OSError, SafetensorError) as e:
            raise ConfigError(f"lowrank:folder={self.config.folder}: cannot read {WEIGHTS}: {e}. {HOW}") from e

    def _described(self) -> dict[str, Any]:
        if self.description is None:
            raise ConfigError(f"kv_codec lowrank needs a calibration of the model. {HOW}")
        return self.description

    def _other(self, why: str) -> ConfigError:
        return ConfigError(f"lowrank:folder={self.config.folder} was made for another model: {why}. {HOW}")

    def write(
        self,
        cache: LayerCache,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        slots_T: torch.Tensor,
        shared: dict | None = None,
        positions_T: torch.Tensor | None = None,
    ) -> None:
        raise AssertionError(WRONG_LAYER)

    def read(
        self, cache: LayerCache, pages: torch.Tensor, shared: dict | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError(WRONG_LAYER)


def _describe(folder: str) -> dict[str, Any]:
    """The folder's description: ``ranks`` of keys and values by layer (None: cached as they are), ``heads`` and head
    dim by layer, ``digest`` of the matrices. Raises ConfigError."""
    refuse_special(Path(folder))
    try:
        found = json.loads((Path(folder) / DESCRIPTION).read_text())
        ranks, heads = found["ranks"], found["heads"]
        if len(ranks) != len(heads) or not all(r is None or (len(r) == 2 and min(r) >= 1) for r in ranks):
            raise ValueError("ranks and heads of every layer are wanted")
        if not isinstance(found["digest"], str):
            raise ValueError("a digest is wanted")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"lowrank:folder={folder} holds no calibration ({DESCRIPTION}: {e!r}). {HOW}") from e
    return found
