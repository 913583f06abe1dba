"""The common base of the quantising codecs: a codec made of ``encode`` and ``decode``.

A row is one token's key or value of one head. Rows are encoded alone, and need no row after them (the round-trip rule).

Legend: T rows of a step, G KV heads, D head dim, P slots per page, W pages.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from kvasir.errors import ConfigError
from kvasir.kernels.fused_qkv import HeadOps
from kvasir.kernels.quantize import dequantize, pack_nibbles, quantize, unpack_nibbles
from kvasir.kernels.quantized_qkv import quantized_qkv, turn
from kvasir.kv.codec import Codec, LayerCache, Plane, places_of
from kvasir.types import CacheRow

# Elements of a latent that share a scale: an outlier costs precision in its own block only.
LATENT_BLOCK = 128
ROPE = "k_rope"  # plane of a latent row's rotary elements, in the model's dtype


def blocks_of_latent(rank: int) -> list[int]:
    """Sizes of the blocks of a latent: the last one may be shorter."""
    return [min(LATENT_BLOCK, rank - first) for first in range(0, rank, LATENT_BLOCK)]


class QuantizedCodec(Codec):
    """A codec made of three functions: ``side`` (planes of keys or of values), ``encode`` and ``decode``. A subclass
    with a rotation overrides ``rotation``."""

    native = True

    @abstractmethod
    def side(self, head_dim: int) -> dict[str, tuple[int, torch.dtype]]:
        """Planes of keys or values by suffix ('' is the codes): width and dtype."""
        raise NotImplementedError

    @abstractmethod
    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows [..., D], already in the cache's basis, as planes by suffix."""
        raise NotImplementedError

    @abstractmethod
    def decode(self, planes: dict[str, torch.Tensor], head_dim: int) -> torch.Tensor:
        """fp32 rows [..., D] in the cache's basis."""
        raise NotImplementedError

    def write_fused(
        self, cache: LayerCache, heads_TXD: torch.Tensor, ops: HeadOps, slots_T: torch.Tensor
    ) -> torch.Tensor:
        rotation = self.rotation("k", cache.head_dim)
        values = self.rotation("v", cache.head_dim) is not None
        basis = None if rotation is None else rotation.basis(heads_TXD.dtype, heads_TXD.device, values)
        return quantized_qkv(heads_TXD, ops, cache.planes, slots_T, self.kernel, basis)

    def queries(self, q_THD: torch.Tensor) -> torch.Tensor:
        rotation = self.rotation("k", q_THD.shape[2])
        return q_THD if rotation is None else turn(q_THD, rotation.basis(q_THD.dtype, q_THD.device, False))

    def restore(self, out_THD: torch.Tensor) -> None:
        rotation = self.rotation("v", out_THD.shape[2])
        if rotation is not None:
            out_THD.copy_(rotation.undo_product(out_THD))

    def planes(self, row: CacheRow, dtype: torch.dtype) -> list[Plane]:
        if row.latent:
            blocks = [self.side(size) for size in blocks_of_latent(row.latent)]
            found = [
                Plane("k" + suffix, sum(block[suffix][0] for block in blocks), form)
                for suffix, (_, form) in blocks[0].items()
            ]
            rope = row.key_dim - row.latent
            return [*found, Plane(ROPE, rope, dtype)] if rope else found
        self.rotation("k", row.key_dim)  # refuses a head dim that it does not fit
        sides = {"k": self.side(row.key_dim), "v": self.side(row.value_dim)}
        return [Plane(side + suffix, *sides[side][suffix]) for suffix in sides["k"] for side in ("k", "v")]

    def write(
        self,
        cache: LayerCache,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        slots_T: torch.Tensor,
        shared: dict | None = None,
        positions_T: torch.Tensor | None = None,
    ) -> None:
        shared = places_of(cache, slots_T, {} if shared is None else shared)
        for side, x_TGD in (("k", k_TGD), ("v", v_TGD)):
            if shared["keep"] is not None:
                x_TGD = x_TGD[shared["keep"]]
            rotation = self.rotation(side, x_TGD.shape[-1])
            if rotation is not None:
                x_TGD = rotation.apply(x_TGD).to(x_TGD.dtype)  # rounded to the model's dtype, as a kernel would find it
            for suffix, values in self.encode(x_TGD).items():
                cache.planes[side + suffix][shared["page"], :, shared["offset"]] = values

    def write_row(
        self, cache: LayerCache, row_TD: torch.Tensor, slots_T: torch.Tensor, shared: dict | None = None
    ) -> None:
        """Encode the latent in blocks of ``LATENT_BLOCK``, each as a row of its own; rotary elements stay."""
        shared = places_of(cache, slots_T, {} if shared is None else shared)
        if shared["keep"] is not None:
            row_TD = row_TD[shared["keep"]]
        blocks = [self.encode(block) for block in row_TD[:, : cache.latent].split(LATENT_BLOCK, -1)]
        for suffix in blocks[0]:
            cache.planes["k" + suffix][shared["page"], 0, shared["offset"]] = torch.cat([b[suffix] for b in blocks], -1)
        if ROPE in cache.planes:
            cache.planes[ROPE][shared["page"], 0, shared["offset"]] = row_TD[:, cache.latent :]

    def read(
        self, cache: LayerCache, pages: torch.Tensor, shared: dict | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if cache.latent:
            k = self._read_latent(cache, pages.long())
            return k, k[..., : cache.latent]
        k, v = (self._read(cache, side, pages.long()) for side in ("k", "v"))
        return k, v

    def _read_latent(self, cache: LayerCache, pages: torch.Tensor) -> torch.Tensor:
        """[..., 1, W * P, D] in the model's dtype."""
        found = {name: plane[pages].transpose(-4, -3).flatten(-3, -2) for name, plane in cache.planes.items()}
        rope = found.pop(ROPE, None)
        sizes = blocks_of_latent(cache.latent)
        parts = {
            name[1:]: plane.split([self.side(size)[name[1:]][0] for size in sizes], -1) for name, plane in found.items()
        }
        blocks = [self.decode({name: part[i] for name, part in parts.items()}, size) for i, size in enumerate(sizes)]
        decoded = [block.to(cache.dtype) for block in blocks]
        return torch.cat(decoded if rope is None else [*decoded, rope], -1)

    def _read(self, cache: LayerCache, side: str, pages: torch.Tensor) -> torch.Tensor:
        """[..., G, W * P, D] in the model's dtype and basis."""
        found = {
            name[1:]: plane[pages].transpose(-4, -3).flatten(-3, -2)
            for name, plane in cache.planes.items()
            if name[0] == side
        }
        x = self.decode(found, cache.head_dim)
        rotation = self.rotation(side, cache.head_dim)
        return (x if rotation is None else rotation.undo(x)).to(cache.dtype)


class IntegerCodec(QuantizedCodec):
    """Integers of 4 or 8 bits on each row's own grid, with an fp16 scale and bias."""

    fuses = True
    bits = 8

    def side(self, head_dim: int) -> dict[str, tuple[int, torch.dtype]]:
        if head_dim % 2:
            raise ConfigError(
                f"'{self.name}' packs two elements into a byte and needs an even head dim, not {head_dim}. "
                "Use --kv-codec plain."
            )
        return {"": (head_dim * self.bits // 8, torch.uint8), "_meta": (2, torch.float16)}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, meta = quantize(x, self.bits)
        return {"": pack_nibbles(codes) if self.bits == 4 else codes, "_meta": meta}

    def decode(self, planes: dict[str, torch.Tensor], head_dim: int) -> torch.Tensor:
        codes = unpack_nibbles(planes[""]) if self.bits == 4 else planes[""]
        return dequantize(codes, planes["_meta"], self.bits)
