"""Grouped-query attention over the paged cache: projections, optional QK norm, RoPE, write, attend.

Legend: T rows, E model dim, H query heads, G KV heads, X = H + 2 G, D head dim.
"""

from __future__ import annotations

import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.kernels.activation import sigmoid
from kvasir.kernels.fused_qkv import HeadOps, fits, fused_qkv
from kvasir.kernels.rope import rotate
from kvasir.kv.codec import LayerCache
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rope import Angles
from kvasir.layers.spec import GQASpec
from kvasir.layers.steering import LayerHooks
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch


class Mixer:
    """Grouped-query attention of one layer. ``writes`` False: the layer attends to another layer's cache and has
    queries only."""

    varies = True  # its products are given the batch, so that adapters may change them

    def __init__(self, spec: GQASpec, hidden_size: int, place: Placement, writes: bool = True) -> None:
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.spec = spec
        self.attention = spec.attention()
        self.writes = writes
        self.fused, self.exact = place.fused, place.exact
        self.num_rotated = heads + kv_heads if writes else heads
        self.split = self.num_rotated, kv_heads  # what is rotated, and the values
        self.qkv = Linear(hidden_size, spec.widths(writes), bias=spec.qkv_bias, place=place)
        self.o = Linear(heads * dim, {"o": hidden_size}, bias=spec.o_bias, place=place)
        self.qk_norm: RMSNorm | None = None
        self.flat_norms: list[RMSNorm] = []  # of all query heads, and of all key heads where the layer has keys
        if spec.qk_norm is not None and spec.flat_norm:
            counts = (heads, kv_heads) if writes else (heads,)
            self.flat_norms = [RMSNorm(count * dim, spec.qk_norm, place) for count in counts]
        elif spec.qk_norm is not None:
            self.qk_norm = RMSNorm((self.num_rotated, dim), spec.qk_norm, place)
        self.unflat = [kv_heads * dim] if writes else []  # outputs without a flat norm: the values
        self.value_norm = None
        if spec.value_norm is not None and writes:
            self.value_norm = RMSNorm((kv_heads, dim), spec.value_norm, place)
            self.value_norm.weight.fill_(1.0)
        self.plain = not (spec.gated or spec.keys_are_values or spec.value_norm or self.flat_norms)
        # Whether the C kernels run it (``models/native_decoder.py``).
        self.native = self.plain and spec.query_scale is None
        self.sinks_H = torch.empty(heads, device=place.device, dtype=torch.float32) if spec.sinks else None
        self.heads_out = heads, dim  # what is between attention and o
        self.hooks: LayerHooks | None = None

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
        q_THD, gate_THD = self._enter(x_TE, angles, cache, backend, batch, norm)
        out_THD = backend.run(q_THD, cache, self.attention, batch.of(cache.group), sinks_H=self.sinks_H)
        if gate_THD is not None:
            out_THD = out_THD * sigmoid(gate_THD, self.exact)
        out_TE = out_THD.reshape(num_rows, spec.num_heads * spec.head_dim)
        if wanted_M is not None:
            out_TE, batch = out_TE.index_select(0, wanted_M), batch.only(wanted_M)
        if self.hooks is not None and batch.hooks is not None:
            return self.hooks.attend(out_TE, self.o, spec.num_heads, residual_TE, batch)
        return self.o(out_TE, residual_TN=residual_TE, batch=batch)

    def keep(
        self,
        x_TE: torch.Tensor,
        angles: Angles,
        cache: LayerCache,
        backend: AttentionBackend,
        batch: StepBatch,
        norm: RMSNorm | None = None,
    ) -> None:
        """Write keys and values as ``forward`` does, and attend to nothing."""
        self._enter(x_TE, angles, cache, backend, batch, norm)

    def _enter(
        self,
        x_TE: torch.Tensor,
        angles: Angles,
        cache: LayerCache,
        backend: AttentionBackend,
        batch: StepBatch,
        norm: RMSNorm | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries [T, H, D] as the backend takes them, and gates [T, H, D] if there are some; keys and values are in
        their pages."""
        spec, gate_THD = self.spec, None
        heads_TXD = self.qkv(x_TE, norm, batch=batch).view(x_TE.shape[0], -1, spec.head_dim)
        if not self.plain:
            heads_TXD, gate_THD = self._arrange(heads_TXD)
        codec, table = cache.codec, angles.table
        # Whether the backend takes queries in the cache's basis.
        in_basis = codec.fuses and codec.kernel in backend.codec_kernels
        turns = table is not None and (table.width == spec.head_dim or codec.fuses_partial or not self.writes)
        if self.fused and turns and fits(heads_TXD) and (in_basis or not self.writes):
            norm_of = None if self.qk_norm is None else self.qk_norm.parameters
            ops = HeadOps(spec.num_heads, table.table, angles.positions_T, norm_of, self.exact)
            if self.writes:
                q_THD = codec.write_fused(cache, heads_TXD, ops, batch.slots[cache.group])
            else:
                q_THD = codec.queries(fused_qkv(heads_TXD, ops)) if in_basis else fused_qkv(heads_TXD, ops)
        else:
            q_THD = self._write(heads_TXD, angles, cache, batch)
            q_THD = codec.queries(q_THD) if in_basis else q_THD
        if spec.query_scale is not None:
            q_THD = q_THD.mul_(angles.scale(spec.query_scale))
        return q_THD, gate_THD

    def _arrange(self, heads_TXD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries, keys and values [T, X, D] of a projection that has more or less than these; gates [T, H, D]."""
        heads, gate_THD = self.spec.num_heads, None
        if self.spec.gated:
            q_THD, gate_THD = heads_TXD[:, : 2 * heads].unflatten(1, (heads, 2)).unbind(2)
            heads_TXD = torch.cat((q_THD, heads_TXD[:, 2 * heads :]), 1)
        if self.writes and (self.spec.keys_are_values or self.value_norm is not None):
            qk, v_TGD = heads_TXD[:, : self.num_rotated], heads_TXD[:, -self.spec.num_kv_heads :]
            heads_TXD = torch.cat((qk, v_TGD if self.value_norm is None else self.value_norm(v_TGD.contiguous())), 1)
        if self.flat_norms:
            parts = heads_TXD.flatten(1).split([norm.weight.shape[0] for norm in self.flat_norms] + self.unflat, 1)
            normed = [norm(part) for norm, part in zip(self.flat_norms, parts)]
            heads_TXD = torch.cat((*normed, *parts[len(normed) :]), 1).view(heads_TXD.shape)
        return heads_TXD, gate_THD

    def _write(self, heads_TXD: torch.Tensor, angles: Angles, cache: LayerCache, batch: StepBatch) -> torch.Tensor:
        """Norm, rotate and write, one after the other. Returns rotated queries [T, H, D]."""
        qk, v_TGD = heads_TXD.split_with_sizes(self.split, 1) if self.writes else (heads_TXD, None)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        heads = self.spec.num_heads, self.spec.num_kv_heads
        if self.writes and cache.codec.turns:
            q_THD, k_TGD = qk.split_with_sizes(heads, 1)
            q_THD = q_THD if angles.table is None else rotate(q_THD.contiguous(), *angles.rows())
        else:
            q_THD = qk if angles.table is None else rotate(qk, *angles.rows())
            if self.writes:
                q_THD, k_TGD = q_THD.split_with_sizes(heads, 1)
        if self.writes:
            key = "write", cache.group, self.spec.num_kv_heads, self.spec.head_dim  # layers with rows of one shape
            shared = batch.scratch.setdefault(key, {})
            cache.codec.write(cache, k_TGD, v_TGD, batch.slots[cache.group], shared, batch.positions)
        return q_THD

    def slots(self) -> dict[str, Slot]:
        found = self.qkv.slots() | self.o.slots()
        if self.qk_norm is not None:
            heads, offset = self.spec.num_heads, self.spec.qk_norm.offset
            found["q_norm.weight"] = Slot(self.qk_norm.weight[:heads], offset, repeat=True)
            if self.writes:
                found["k_norm.weight"] = Slot(self.qk_norm.weight[heads:], offset, repeat=True)
        for name, norm in zip(("q_norm.weight", "k_norm.weight"), self.flat_norms):
            found[name] = Slot(norm.weight, self.spec.qk_norm.offset)
        if self.sinks_H is not None:
            found["sinks"] = Slot(self.sinks_H)
        return found
