"""Keys and values as the model computed them, in the model's dtype. Exact. 2 x G x D x itemsize bytes a token and
layer; for a latent its own width x itemsize."""

from __future__ import annotations

import numpy as np
import torch

from kvasir.kernels._triton import use_triton
from kvasir.kernels.fused_qkv import HeadOps, fused_qkv
from kvasir.kernels.store_kv import row_index, row_view, store_kv, store_rows
from kvasir.kv.codec import Codec, LayerCache, Plane
from kvasir.types import CacheRow


class PlainCodec(Codec):
    """Stores keys and values unchanged."""

    exact = True
    kernel = "plain"
    fuses = True
    fuses_partial = True
    native = True
    latents = True

    def planes(self, row: CacheRow, dtype: torch.dtype) -> list[Plane]:
        keys = [Plane("k", row.key_dim, dtype)]
        return keys if row.latent else [*keys, Plane("v", row.value_dim, dtype)]

    def write(
        self,
        cache: LayerCache,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        slots_T: torch.Tensor,
        shared: dict | None = None,
        positions_T: torch.Tensor | None = None,
    ) -> None:
        if not self._copied(cache, {"k": k_TGD, "v": v_TGD}, slots_T, shared):
            store_kv(k_TGD, v_TGD, cache.planes["k"], cache.planes["v"], slots_T)

    def write_row(
        self, cache: LayerCache, row_TD: torch.Tensor, slots_T: torch.Tensor, shared: dict | None = None
    ) -> None:
        if not self._copied(cache, {"k": row_TD}, slots_T, shared):
            store_rows(row_TD, cache.planes["k"], slots_T)

    def _copied(
        self, cache: LayerCache, rows: dict[str, torch.Tensor], slots_T: torch.Tensor, shared: dict | None
    ) -> bool:
        """Whether torch has stored the rows of these planes; else a kernel takes them."""
        shared, first = {} if shared is None else shared, rows["k"]
        if "rows" not in shared:
            shared["rows"] = None if use_triton(first) else row_index(slots_T, cache.planes["k"])
        index = shared["rows"]
        if index is None:
            return False
        for name, row in rows.items():
            if name not in cache.views:
                cache.views[name] = row_view(cache.planes[name])
            cache.views[name].index_copy_(0, index, row.reshape(-1, row.shape[-1]))
        return True

    def write_fused(
        self, cache: LayerCache, heads_TXD: torch.Tensor, ops: HeadOps, slots_T: torch.Tensor
    ) -> torch.Tensor:
        return fused_qkv(heads_TXD, ops, cache.planes["k"], cache.planes["v"], slots_T)

    def read(
        self, cache: LayerCache, pages: torch.Tensor, shared: dict | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shared = {} if shared is None else shared
        if not shared:
            self._locate(cache, pages, shared)
        if "blocks" not in shared:
            found = [
                plane[shared["pages"]].transpose(-4, -3).flatten(-3, -2)
                for plane in (cache.planes["k"], cache.planes.get("v"))
                if plane is not None
            ]
            return (found[0], found[-1][..., : cache.latent]) if cache.latent else (found[0], found[1])
        if "blocks" not in cache.views:
            k_NGPD = cache.planes["k"]
            count, heads, size, dim = k_NGPD.shape
            apart, beside = self._steps(cache)
            cache.views["blocks"] = k_NGPD.as_strided(
                ((count - 1) * apart + beside + heads, size * dim), (size * dim, 1)
            )
        sides = cache.views["blocks"].index_select(0, shared["blocks"]).view(shared["shape"]).unbind()
        return (sides[0], sides[0][..., : cache.latent]) if cache.latent else (sides[0], sides[1])

    def blocks_of(self, cache: LayerCache, pages: np.ndarray) -> tuple[torch.Tensor, tuple[int, ...]] | None:
        """Rows of the matrix of blocks to gather for pages [..., W], and the shape of the result, [2, ..., G, W * P,
        D], or [1, ...] for latent rows.

        One head of one page is a dense block, so the pool is a matrix of blocks, and a read is one gather of its rows.
        K and V share one allocation: the C allocator would return two that are freed together to the system and fault
        them in again. None: pages of odd widths, whose planes are padded to their alignment, and pages of layers that
        differ in width, are no such matrix.
        """
        k_NGPD = cache.planes["k"]
        v_NGPD = k_NGPD if cache.latent else cache.planes["v"]
        _, heads, size, dim = k_NGPD.shape
        if k_NGPD.shape != v_NGPD.shape or k_NGPD.stride(0) % (size * dim):
            return None
        if (v_NGPD.storage_offset() - k_NGPD.storage_offset()) % (size * dim):
            return None
        apart, beside = self._steps(cache)
        index = pages[..., None, :] * apart + np.arange(heads)[:, None]  # numpy: see ``row_index``
        both = index[None] if cache.latent else np.stack([index, index + beside])  # [2, ..., G, W]
        return torch.from_numpy(both.ravel()), (*both.shape[:-1], both.shape[-1] * size, dim)

    def _steps(self, cache: LayerCache) -> tuple[int, int]:
        """Blocks from a page to the next, and from a head's keys to its values."""
        k_NGPD = cache.planes["k"]
        v_NGPD = k_NGPD if cache.latent else cache.planes["v"]
        block = k_NGPD.shape[2] * k_NGPD.shape[3]
        return k_NGPD.stride(0) // block, (v_NGPD.storage_offset() - k_NGPD.storage_offset()) // block

    def _locate(self, cache: LayerCache, pages: torch.Tensor, shared: dict) -> None:
        shared["pages"] = pages = pages.to(torch.int64)
        found = self.blocks_of(cache, pages.cpu().numpy())
        if found is not None:
            shared["blocks"], shared["shape"] = found[0].to(pages.device), found[1]
