"""Multi-head latent attention over the paged cache: projections, norms, RoPE, one cached row for all heads, attend.

Heads read the cached latents through products of their own (`kvasir.attention.latent`). Rotary pairs are kept as first
half and second half of the rotary part; checkpoints with interleaved pairs are reordered as they are loaded.

Legend: T rows, E model dim, H heads, R rank of the latent, Q rotary elements, D elements of a query or key without
RoPE, V elements of a value, G KV heads of a writer.
"""

from __future__ import annotations

import torch

from kvasir.attention.backend import AttentionBackend
from kvasir.attention.latent import UpProjection, per_head
from kvasir.errors import ConfigError
from kvasir.kernels.latent_decode import FORMATS, Planes
from kvasir.kernels.latent_rows import fits, latent_rows
from kvasir.kernels.rope import rotate
from kvasir.kv.codec import LayerCache
from kvasir.layers.linear import Linear
from kvasir.layers.norm import RMSNorm
from kvasir.layers.rope import Angles
from kvasir.layers.spec import MLASpec
from kvasir.layers.steering import LayerHooks
from kvasir.layers.weights import Placement, Slot
from kvasir.types import StepBatch


class Mixer:
    """Latent attention of one layer."""

    native = False  # no C kernel reads latents
    sinks_H = None

    def __init__(self, spec: MLASpec, hidden_size: int, place: Placement, writes: bool = True) -> None:
        if not writes:
            raise ConfigError(
                "a layer that reads another layer's cache must have keys and values by head; layers with a latent "
                "(MLA) keep their own. Leave out cache_of for this layer."
            )
        heads, device, dtype = spec.num_heads, place.device, place.dtype
        self.spec, self.attention = spec, spec.attention()
        self.exact, self.fused = place.exact, place.fused
        # Products of the row with and without biases are two: a fused one has them for all its outputs or for none.
        biased = {name: width for name, width in spec.entries().items() if name in spec.biases}
        plain = {name: width for name, width in spec.entries().items() if name not in spec.biases}
        parts = ((biased, True), (plain, False))
        self.entries = [Linear(hidden_size, widths, bias=bias, place=place.plain()) for widths, bias in parts if widths]
        self.q_b = self.q_norm = self.norm = None
        if spec.q_rank is not None:
            self.q_b = Linear(spec.q_rank, {"q": heads * spec.qk_dim}, bias="q" in spec.biases, place=place.plain())
        if spec.norm is not None:
            self.norm = RMSNorm(spec.rank, spec.norm, place)
            self.q_norm = None if spec.q_rank is None else RMSNorm(spec.q_rank, spec.norm, place)
        self.up = UpProjection(
            torch.empty(heads, spec.nope_dim, spec.rank, device=device, dtype=dtype),
            torch.empty(heads, spec.value_dim, spec.rank, device=device, dtype=dtype),
            place.exact,
        )
        self.writer = None if spec.writer is None else Writer(spec, place)
        self.o = Linear(heads * spec.value_dim, {"o": hidden_size}, bias="o" in spec.biases, place=place)
        self.heads_out = heads, spec.value_dim  # what is between attention and o
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

        The latents go through the codec into their pages before anything attends to them. ``wanted_M``: the rows of the
        result, and of ``residual_TE``; None: all.
        """
        spec, num_rows = self.spec, x_TE.shape[0]
        q_THD = self._keep(x_TE, angles, cache, batch, norm)
        if spec.query_scale is not None:
            q_THD = q_THD.mul_(angles.scale(spec.query_scale))
        out_THV = backend.run_latent(q_THD, self.up, cache, self.attention, batch.of(cache.group))
        out_TE = out_THV.reshape(num_rows, spec.num_heads * spec.value_dim)
        if wanted_M is not None:
            out_TE, batch = out_TE.index_select(0, wanted_M), batch.only(wanted_M)
        if self.hooks is not None and batch.hooks is not None:
            return self.hooks.attend(out_TE, self.o, spec.num_heads, residual_TE, batch)
        return self.o(out_TE, residual_TN=residual_TE)

    def keep(
        self,
        x_TE: torch.Tensor,
        angles: Angles,
        cache: LayerCache,
        backend: AttentionBackend,
        batch: StepBatch,
        norm: RMSNorm | None = None,
    ) -> None:
        """Write the latents as ``forward`` does, and attend to nothing."""
        self._keep(x_TE, angles, cache, batch, norm)

    def _keep(
        self, x_TE: torch.Tensor, angles: Angles, cache: LayerCache, batch: StepBatch, norm: RMSNorm | None
    ) -> torch.Tensor:
        """Queries [T, H, D + Q] with RoPE; the rows are in their pages."""
        q_THD, row_TR = self._enter(x_TE, norm)
        if self.fused and cache.codec.kernel in FORMATS and fits(q_THD, row_TR):
            turning = None if angles.table is None else (angles.table.table, angles.positions_T)
            latent_norm = None if self.norm is None else self.norm.parameters
            planes = Planes.of(cache.planes, self.spec.rank, cache.codec.kernel)
            latent_rows(q_THD, row_TR, planes, batch.slots[cache.group], latent_norm, turning)
            return q_THD
        return self._write(q_THD, row_TR, angles, cache, batch)

    def _enter(self, x_TE: torch.Tensor, norm: RMSNorm | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H, D + Q] and the row to cache [T, R + Q], before RoPE and the latent's norm."""
        spec, found = self.spec, {}
        if norm is not None and len(self.entries) > 1:
            x_TE, norm = norm(x_TE), None
        for entry in self.entries:
            found |= zip(entry.widths, entry(x_TE, norm).split(list(entry.widths.values()), -1))
        if self.writer is not None:
            return self.writer(**found)
        q_TN = found["q"] if self.q_b is None else self.q_b(self._narrow(found["q_a"]))
        return q_TN.unflatten(-1, (spec.num_heads, spec.qk_dim)), found["kv_a"]

    def _narrow(self, q_TN: torch.Tensor) -> torch.Tensor:
        """The rows between the two products of queries, normed where the model does so, and dense."""
        return q_TN.contiguous() if self.q_norm is None else self.q_norm(q_TN)

    def _write(
        self, q_THD: torch.Tensor, row_TR: torch.Tensor, angles: Angles, cache: LayerCache, batch: StepBatch
    ) -> torch.Tensor:
        """Norm, rotate and write, one after the other. Returns rotated queries [T, H, D + Q]."""
        spec = self.spec
        latent_TR, rope_TQ = row_TR.split((spec.rank, spec.rope_dim), -1)
        if self.norm is not None:
            latent_TR = self.norm(latent_TR.contiguous())
        if angles.table is not None:
            # The rotary key is one more head, turned together with those of the queries.
            both = rotate(torch.cat((q_THD[..., spec.nope_dim :], rope_TQ.unsqueeze(1)), 1), *angles.rows())
            q_THD = torch.cat((q_THD[..., : spec.nope_dim], both[:, :-1]), -1)
            rope_TQ = both[:, -1]
        shared = batch.scratch.setdefault(("write", cache.group, 1, spec.row_dim), {})
        row_TR = torch.cat((latent_TR, rope_TQ), -1)
        cache.codec.write_row(cache, row_TR, batch.slots[cache.group], shared)
        return q_THD

    def slots(self) -> dict[str, Slot]:
        """Weight slots. Rotary parts have slots of their own, ``real`` and ``imag`` for the two elements of every pair,
        and each head has its own, so that views of stored tensors can fill them."""
        spec, found = self.spec, self.o.slots()
        products = [*self.entries, *([self.q_b] if self.q_b is not None else [])]
        for name, slot in [item for product in products for item in product.slots().items()]:
            part, _, leaf = name.rpartition(".")
            if part == "q" and self.writer is None:
                for head, rows in enumerate(slot.target.split(spec.qk_dim)):
                    found |= _pairs(f"q.{head}", leaf, rows, spec.nope_dim)
            elif part == "kv_a":
                found |= _pairs("kv_a", leaf, slot.target, spec.rank)
            else:
                found[name] = slot
        for name, norm in (("kv_norm", self.norm), ("q_a_norm", self.q_norm)):
            if norm is not None:
                found[f"{name}.weight"] = Slot(norm.weight, spec.norm.offset)
        for head, (key, value) in enumerate(zip(self.up.key_HDR, self.up.value_HVR)):
            found |= {f"kv_b.{head}.key.weight": Slot(key), f"kv_b.{head}.value.weight": Slot(value)}
        return found if self.writer is None else found | self.writer.slots()


def _pairs(name: str, leaf: str, rows: torch.Tensor, nope: int) -> dict[str, Slot]:
    """Slots of ``nope`` rows without RoPE, and of the rows that give the first and the second elements of pairs."""
    pairs = (len(rows) - nope) // 2
    sizes = {"nope": nope, "real": pairs, "imag": pairs} if pairs else {"nope": nope}
    return {f"{name}.{part}.{leaf}": Slot(x) for part, x in zip(sizes, rows.split(list(sizes.values())))}


class Writer:
    """Makes queries and cached rows of ordinary heads (`kvasir.layers.spec.LatentWriter`)."""

    def __init__(self, spec: MLASpec, place: Placement) -> None:
        writer = spec.writer
        side = writer.num_kv_heads * writer.head_dim
        self.spec, self.exact = spec, place.exact
        self.q_norm, self.k_norm = (RMSNorm(writer.head_dim, writer.norm, place) for _ in range(2))
        self.latent = Linear(2 * side, {"latent": spec.rank}, bias=False, place=place)
        self.rope = Linear(side, {"rope": spec.rope_dim}, bias=False, place=place) if spec.rope_dim else None
        self.q_rope_HDQ = torch.empty(
            spec.num_heads, spec.nope_dim, spec.rope_dim, device=place.device, dtype=place.dtype
        )

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H, D + Q] and rows [T, R + Q] of the projections [T, H * D], [T, G * D] and [T, G * D]."""
        spec, writer = self.spec, self.spec.writer
        q_THD = self.q_norm(q.reshape(-1, spec.num_heads, spec.nope_dim))
        k_TN = self.k_norm(k.reshape(-1, writer.num_kv_heads, writer.head_dim)).flatten(1)
        row_TR = self.latent(torch.cat((k_TN, v), -1))
        if self.rope is None:
            return q_THD, row_TR
        q_THD = torch.cat((q_THD, per_head(q_THD, self.q_rope_HDQ, self.exact)), -1)
        return q_THD, torch.cat((row_TR, self.rope(k_TN)), -1)

    def slots(self) -> dict[str, Slot]:
        found = {f"writer.{name}": slot for name, slot in self.latent.slots().items()}
        if self.rope is not None:
            found |= {f"writer.{name}": slot for name, slot in self.rope.slots().items()}
            found["writer.q_rope.weight"] = Slot(self.q_rope_HDQ)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            found[f"writer.{name}.weight"] = Slot(norm.weight, self.spec.writer.norm.offset)
        return found
