"""Latents of keys and of values that all heads of a layer share: one layer's codec, of its four matrices.

Keys are made of their latents when they are read, and turned at their stored position. Values are never made:
attention sums their latents, and each head's result is brought out of the latent by one product.

Legend: T rows, G KV heads, H query heads, D head dim, R rank of a latent, P slots per page, W pages, N cached rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.attention.latent import per_head
from kvasir.kernels._triton import use_triton
from kvasir.kernels.lowrank_decode import Latents
from kvasir.kernels.rope import rotate
from kvasir.kernels.store_kv import store_rows
from kvasir.kv.codec import Codec, LayerCache, Plane, places_of
from kvasir.layers.products import linear
from kvasir.types import CacheRow

# Files of a folder with the matrices of a model's layers.
DESCRIPTION, WEIGHTS = "latents.json", "latents.safetensors"
# A layer's matrices there: keys [G D] to their latent and back, and values likewise.
PARTS = ("k_down", "k_up", "v_down", "v_up")


def latent_planes(k_width: int, v_width: int, dtype: torch.dtype) -> list[Plane]:
    """The planes of a layer with latents of these widths: one array each for all heads, and the token's position."""
    position = Plane("k_position", 1, torch.int32, shared=True)
    return [Plane("k", k_width, dtype, shared=True), Plane("v", v_width, dtype, shared=True), position]


@dataclass(frozen=True, slots=True)
class Maps:
    """One layer's matrices. ``k_down`` [R, G D] makes the latent of keys, and ``k_up`` [G D, R] keys of it; ``v_down``
    [R, G D] makes the latent of values, and ``v_up`` [G, D, R] the values of a group's heads."""

    k_down: torch.Tensor
    k_up: torch.Tensor
    v_down: torch.Tensor
    v_up: torch.Tensor

    @property
    def shapes(self) -> tuple[int, int, int]:
        """Ranks of keys and of values, and G D."""
        return len(self.k_down), len(self.v_down), self.k_up.shape[0]

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor], heads: int, device: torch.device, dtype: torch.dtype) -> Maps:
        """Maps from the stored matrices named in ``PARTS``."""
        parts = {name: tensors[name].to(device, dtype).contiguous() for name in PARTS}
        return cls(**parts | {"v_up": parts["v_up"].view(heads, -1, parts["v_up"].shape[1])})


class LatentLayer(Codec):
    """The codec of one layer, with latents of ranks ``k_rank`` and ``v_rank``."""

    kernel = "latents"
    turns = True

    def __init__(self, k_rank: int, v_rank: int) -> None:
        super().__init__()
        self.ranks = k_rank, v_rank
        self.maps: Maps | None = None

    def fill(self, maps: Maps, angles: torch.Tensor | None, exact: bool) -> None:
        """Take the layer's matrices, and its table of angles [positions, width]."""
        self.maps, self.angles, self.exact_rows = maps, angles, exact

    def planes(self, row: CacheRow, dtype: torch.dtype) -> list[Plane]:
        return latent_planes(*self.ranks, dtype)

    def write(
        self,
        cache: LayerCache,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        slots_T: torch.Tensor,
        shared: dict | None = None,
        positions_T: torch.Tensor | None = None,
    ) -> None:
        assert self.maps is not None and positions_T is not None, "attached, and given positions"
        shared = {} if shared is None else shared
        if use_triton(k_TGD):  # reads nothing back, so a CUDA graph can hold it
            if "positions" not in shared:
                shared["positions"] = positions_T.to(torch.int32).unsqueeze(-1)
            for name, x_TGD, down in (("k", k_TGD, self.maps.k_down), ("v", v_TGD, self.maps.v_down)):
                row_TR = linear(x_TGD.flatten(1).contiguous(), down, exact=self.exact_rows)
                store_rows(row_TR, cache.planes[name], slots_T)
            store_rows(shared["positions"], cache.planes["k_position"], slots_T)
            return
        keep = places_of(cache, slots_T, shared)["keep"]
        if "positions" not in shared:
            kept = positions_T if keep is None else positions_T[keep]
            shared["positions"] = kept.to(torch.int32).unsqueeze(-1)
        rows = {
            "k": linear(k_TGD.flatten(1).contiguous(), self.maps.k_down, exact=self.exact_rows),
            "v": linear(v_TGD.flatten(1).contiguous(), self.maps.v_down, exact=self.exact_rows),
        }
        for name, row in rows.items():
            row = row if keep is None else row[keep]
            cache.planes[name][shared["page"], 0, shared["offset"]] = row
        cache.planes["k_position"][shared["page"], 0, shared["offset"]] = shared["positions"]

    def read(
        self, cache: LayerCache, pages: torch.Tensor, shared: dict | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [..., G, W * P, D], and latents of values [..., G, W * P, R], the same for all heads."""
        assert self.maps is not None, "attached"
        pages = pages.long()
        latents, values = (cache.planes[name][pages][..., 0, :, :].flatten(-3, -2) for name in ("k", "v"))
        heads, dim = self.maps.v_up.shape[0], cache.head_dim
        rows_NGD = linear(latents.flatten(0, -2), self.maps.k_up, exact=self.exact_rows).view(-1, heads, dim)
        if self.angles is not None:
            rows_NGD = rotate(rows_NGD, *self._turns(cache, pages, {} if shared is None else shared))
        keys = rows_NGD.view(*latents.shape[:-1], heads, dim).transpose(-3, -2)
        return keys, values.unsqueeze(-3).expand(*keys.shape[:-1], values.shape[-1])

    def _turns(self, cache: LayerCache, pages: torch.Tensor, shared: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the cached rows, as ``rotate`` takes them; gathered once for all layers of one table.
        A slot that was never written may hold any position: nobody sees its key."""
        key = "turns", id(self.angles)
        if key not in shared:
            assert self.angles is not None
            at = cache.planes["k_position"][pages].flatten().long().clamp(0, len(self.angles) - 1)
            cos, sin = self.angles.index_select(0, at).view(len(at), 1, 2, -1).split(1, 2)
            shared[key] = cos, torch.cat((-sin, sin), 2)
        return shared[key]

    def results(self, cache: LayerCache, out_THR: torch.Tensor) -> torch.Tensor:
        assert self.maps is not None, "attached"
        up_GDR, (rows, heads, _) = self.maps.v_up, out_THR.shape
        share = heads // len(up_GDR)
        if self.exact_rows:
            return per_head(out_THR, up_GDR.mT.repeat_interleave(share, 0), True).contiguous()
        x_GXR = out_THR.unflatten(1, (len(up_GDR), share)).transpose(0, 1).flatten(1, 2)
        return torch.bmm(x_GXR, up_GDR.mT).view(len(up_GDR), rows, share, -1).transpose(0, 1).reshape(rows, heads, -1)

    def latents_of(self, cache: LayerCache) -> Latents:
        """The layer's cache and matrices, as the kernels take them."""
        assert self.maps is not None, "attached"
        planes, maps = cache.planes, self.maps
        return Latents(planes["k"], planes["v"], planes["k_position"], maps.k_up, maps.v_up, self.angles)
