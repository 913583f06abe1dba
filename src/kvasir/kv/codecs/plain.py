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
        _, heads, size, dim = k_NGPD.shape
        block = size * dim
        if any(n % block for n in (k_NGPD.stride(0), k_NGPD.storage_offset(), v_NGPD.storage_offset())):
            return k_NGPD[pages], v_NGPD[pages]
        # One head of one page is a dense block, so the whole pool is a matrix of blocks and both planes are one gather of
        # rows. Heads come out before the last page axis: the reader, which wants [..., G, W, P, D], then copies nothing.
        plane = k_NGPD.untyped_storage().nbytes() // k_NGPD.element_size() // block
        blocks = k_NGPD.as_strided((plane, block), (block, 1), 0)
        first = torch.tensor([k_NGPD.storage_offset(), v_NGPD.storage_offset()]) // block
        rows = (first[:, None] + torch.arange(heads)).to(pages.device)
        index = pages.unsqueeze(-2) * (k_NGPD.stride(0) // block) + rows.view(2, *[1] * (pages.dim() - 1), heads, 1)
        data = blocks.index_select(0, index.flatten()).view(*index.shape, size, dim).transpose(-4, -3)
        return data[0], data[1]
