"""Keys and values as the model computed them, in the model's dtype. Exact. 2 x G x D x itemsize bytes a token and layer."""

from __future__ import annotations

import torch

from kvasir.kernels.store_kv import store_kv
from kvasir.kv.codec import Codec, LayerCache, Plane


class PlainCodec(Codec):
    exact = True
    kernel = "plain"

    def planes(self, head_dim: int, dtype: torch.dtype) -> list[Plane]:
        return [Plane("k", head_dim, dtype), Plane("v", head_dim, dtype)]

    def write(self, cache: LayerCache, k_TGD: torch.Tensor, v_TGD: torch.Tensor, slots_T: torch.Tensor) -> None:
        store_kv(k_TGD, v_TGD, cache.planes["k"], cache.planes["v"], slots_T)

    def read(self, cache: LayerCache, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k_NGPD, v_NGPD = cache.planes["k"], cache.planes["v"]
        count, heads, size, dim = k_NGPD.shape
        block, pages = size * dim, pages.to(torch.int64)
        beside = v_NGPD.storage_offset() - k_NGPD.storage_offset()
        if beside % block:  # odd widths, whose planes are padded to their alignment
            return k_NGPD[pages], v_NGPD[pages]
        # One head of one page is a dense block, so the pool is a matrix of blocks and a read one gather of its rows. Heads
        # come out before the last page axis: a reader that wants [..., G, W * P, D] then copies nothing. K and V share one
        # allocation: the C allocator gives two that are freed together back to the system, and every layer faults them in.
        apart, beside = k_NGPD.stride(0) // block, beside // block
        blocks = k_NGPD.as_strided(((count - 1) * apart + beside + heads, block), (block, 1))
        index = pages.unsqueeze(-2) * apart + torch.arange(heads, device=pages.device).unsqueeze(1)
        both = torch.stack([index, index + beside])
        data = blocks.index_select(0, both.flatten()).view(*both.shape, size, dim).transpose(-4, -3)
        return data[0], data[1]
