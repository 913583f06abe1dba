"""Grouped-query attention over the paged cache: projections, optional QK norm, RoPE, write, attend.

Legend: T rows, E model dim, H query heads, G KV heads, X = H + 2 G, D head dim.
"""

from __future__ import annotations

import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.kernels.fused_qkv import HeadOps, fits, fused_qkv
from kvasir.kernels.rope import rotate
from kvasir.kv.codec import LayerCache
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rope import Angles
from kvasir.layers.spec import GQASpec
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch


class Mixer:
    """Grouped-query attention of one layer. ``writes`` False: the layer attends to another layer's cache and has
    queries only."""

    native = True  # the C kernels run it (``models/native_decoder.py``)
    varies = True  # its products are given the batch, so that adapters may change them

    def __init__(self, spec: GQASpec, hidden_size: int, place: Placement, writes: bool = True) -> None:
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.spec = spec
        self.attention = spec.attention()
        self.writes = writes
        self.fused, self.exact = place.fused, place.exact
        widths = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim} if writes else {"q": heads * dim}
        self.num_rotated = heads + kv_heads if writes else heads
        self.split = self.num_rotated, kv_heads  # what is rotated, and the values
        self.qkv = Linear(hidden_size, widths, bias=spec.qkv_bias, place=place)
        self.o = Linear(heads * dim, {"o": hidden_size}, bias=spec.o_bias, place=place)
        self.qk_norm = None
        if spec.qk_norm is not None:
            self.qk_norm = RMSNorm((self.num_rotated, dim), spec.qk_norm, place)
        self.sinks_H = torch.empty(heads, device=place.device, dtype=torch.float32) if spec.sinks else None

    def forward(
        self,
        x_TE: torch.Tensor,
        angles: Angles,
        cache: LayerCache,
        backend: AttentionBackend,
        batch: StepBatch,
        norm: RMSNorm | None = None,
        residual_TE: torch.Tensor | None = None,
        wanted_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of x, or of ``norm``(x): [T, E] -> [T, E]. ``residual_TE`` is added, and its memory may be used for
        the result.

        K/V go through the codec into their pages before anything attends to them. ``wanted_M``: the rows of the result,
        and of ``residual_TE``; None: all.
        """
        spec, num_rows = self.spec, x_TE.shape[0]
        heads_TXD = self.qkv(x_TE, norm, batch=batch).view(num_rows, -1, spec.head_dim)
        codec = cache.codec
        # Whether the backend takes queries in the cache's basis.
        in_basis = codec.fuses and codec.kernel in backend.codec_kernels
        if self.fused and fits(heads_TXD) and (in_basis or not self.writes):
            norm_of = None if self.qk_norm is None else self.qk_norm.parameters
            ops = HeadOps(spec.num_heads, angles.table.table, angles.positions_T, norm_of, self.exact)
            if self.writes:
                q_THD = codec.write_fused(cache, heads_TXD, ops, batch.slots[cache.group])
            else:
                q_THD = codec.queries(fused_qkv(heads_TXD, ops)) if in_basis else fused_qkv(heads_TXD, ops)
        else:
            q_THD = self._write(heads_TXD, angles, cache, batch)
            q_THD = codec.queries(q_THD) if in_basis else q_THD
        out_THD = backend.run(q_THD, cache, self.attention, batch, sinks_H=self.sinks_H)
        out_TE = out_THD.reshape(num_rows, spec.num_heads * spec.head_dim)
        if wanted_M is not None:
            out_TE, batch = out_TE.index_select(0, wanted_M), batch.only(wanted_M)
        return self.o(out_TE, residual_TN=residual_TE, batch=batch)

    def _write(self, heads_TXD: torch.Tensor, angles: Angles, cache: LayerCache, batch: StepBatch) -> torch.Tensor:
        """Norm, rotate and write, one after the other. Returns rotated queries [T, H, D]."""
        qk, v_TGD = heads_TXD.split_with_sizes(self.split, 1) if self.writes else (heads_TXD, None)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        q_THD = rotate(qk, *angles.rows())
        if self.writes:
            q_THD, k_TGD = q_THD.split_with_sizes((self.spec.num_heads, self.spec.num_kv_heads), 1)
            shared = batch.scratch.setdefault(("write", cache.group), {})
            cache.codec.write(cache, k_TGD, v_TGD, batch.slots[cache.group], shared)
        return q_THD

    def slots(self) -> dict[str, Slot]:
        found = self.qkv.slots() | self.o.slots()
        if self.qk_norm is not None:
            heads, offset = self.spec.num_heads, self.spec.qk_norm.offset
            found["q_norm.weight"] = Slot(self.qk_norm.weight[:heads], offset, repeat=True)
            if self.writes:
                found["k_norm.weight"] = Slot(self.qk_norm.weight[heads:], offset, repeat=True)
        if self.sinks_H is not None:
            found["sinks"] = Slot(self.sinks_H)
        return found
