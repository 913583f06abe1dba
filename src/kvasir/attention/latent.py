"""Latents and the heads that read them: the products that bring queries into the latent's basis and results out of it.

A latent layer caches one row c of rank R and one rotary key of width Q for all heads. Head h reads the key [K_h c,
rotary key] and the value V_h c. Its score q . K_h c is (K_h^T q) . c, and its result sum p V_h c is V_h sum p c:
absorbed, all heads attend to the cached rows themselves. Expanded, keys and values are made of the rows first. Both are
the same sums in another order (DeepSeek-V2, arXiv:2405.04434, section 2.1).

FLOPs of a row and a cached row: absorbed 2 H (2 R + Q); expanded 2 H (D + Q + V), and 2 H R (D + V) once for each
cached row.

Legend: T rows, N cached rows, H query heads, R rank, Q width of the rotary key, D elements of a key and V of a value
that a head makes of the latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.kernels._triton import use_triton
from kvasir.kernels.matmul import matmul_invariant

# Rows of a product in exact mode on a CPU, and its fewest columns, as in ``layers.linear``.
TILE, NARROW = 32, 16


@dataclass(frozen=True, slots=True)
class UpProjection:
    """The products of a layer's heads with the latent. ``key_HDR``, ``value_HVR``: in the model's dtype. ``exact``: a
    row's bits do not depend on its batch."""

    key_HDR: torch.Tensor
    value_HVR: torch.Tensor
    exact: bool = False

    @property
    def rank(self) -> int:
        return self.key_HDR.shape[2]

    def absorb(self, q_THD: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, D + Q] of heads in the latent's basis, [T, H, R + Q]; their last Q elements stay."""
        nope = self.key_HDR.shape[1]
        q_THQ = q_THD[..., nope:]
        if not q_THD.is_cuda:
            return torch.cat((per_head(q_THD[..., :nope], self.key_HDR, self.exact), q_THQ), -1)
        out_THR = q_THD.new_empty(*q_THD.shape[:2], self.rank + q_THQ.shape[2])
        per_head(q_THD[..., :nope], self.key_HDR, self.exact, out_THR[..., : self.rank])
        out_THR[..., self.rank :] = q_THQ
        return out_THR

    def project(self, x_THR: torch.Tensor, out_THV: torch.Tensor | None = None) -> torch.Tensor:
        """Results [T, H, R] in the latent's basis as results of the heads, [T, H, V]."""
        return per_head(x_THR, self.value_HVR.mT, self.exact, out_THV)

    def expand(self, rows_NR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [H, N, D + Q] and values [H, N, V] of cached rows [N, R + Q]."""
        latent_NR, rope_NQ = rows_NR[:, : self.rank], rows_NR[:, self.rank :]
        heads = self.key_HDR.shape[0]
        k = torch.cat((latent_NR @ self.key_HDR.mT, rope_NQ.expand(heads, -1, -1)), -1)
        return k, latent_NR @ self.value_HVR.mT


def per_head(
    x_THK: torch.Tensor, weight_HKN: torch.Tensor, exact: bool, out_THN: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of each head times the head's own matrix: [T, H, N], in ``out`` if there is one.

    In exact mode every product has one order of summation (`kvasir.layers.linear`): on a GPU that of
    ``kernels.matmul``; on a CPU all products have ``TILE`` rows of densely stored inputs.
    """
    if exact:
        found = _per_head_exact(x_THK, weight_HKN)
        return found if out_THN is None else out_THN.copy_(found)
    if out_THN is None:
        return torch.bmm(x_THK.transpose(0, 1), weight_HKN).transpose(0, 1)
    torch.bmm(x_THK.transpose(0, 1), weight_HKN, out=out_THN.transpose(0, 1))
    return out_THN


def _per_head_exact(x_THK: torch.Tensor, weight_HKN: torch.Tensor) -> torch.Tensor:
    if use_triton(x_THK):
        products = [matmul_invariant(x_THK[:, head], weight_KN.t()) for head, weight_KN in enumerate(weight_HKN)]
        return torch.stack(products, 1)
    rows, heads, width = *x_THK.shape[:2], weight_HKN.shape[2]
    if width < NARROW:
        weight_HKN = torch.nn.functional.pad(weight_HKN, (0, NARROW - width))
    tiles_HTK = x_THK.new_zeros(heads, -(-rows // TILE) * TILE, x_THK.shape[2])
    tiles_HTK[:, :rows] = x_THK.transpose(0, 1)
    out_THN = x_THK.new_empty(rows, heads, width)
    for first in range(0, rows, TILE):
        count = min(TILE, rows - first)
        tile = tiles_HTK[:, first : first + TILE].contiguous()
        for head, weight_KN in enumerate(weight_HKN):
            out_THN[first : first + count, head] = (tile[head] @ weight_KN)[:count, :width]
    return out_THN
