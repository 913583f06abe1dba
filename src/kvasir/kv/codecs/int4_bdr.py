"""4-bit integers after a block-diagonal Hadamard rotation (SAW-INT4, arXiv:2604.19157). Lossy. 4.25 bits an element at
D = 128.

Keys are rotated after QK norm and RoPE, so that an outlier channel is spread over its block before the row's range is
taken. The rotation is orthonormal: a query rotated the same way has the same scores. Values keep their basis unless
``rotate_v`` is set.

``order``: size of the rotation's blocks; 0: the largest that fits the head (the default; small orders lose much of the
gain). ``rotate_v``: values are rotated, too. ``signs``: fixed random signs before the rotation, against constant
offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.kv.quantized import IntegerCodec
from kvasir.kv.rotation import Rotation, largest_order


@dataclass(frozen=True, slots=True)
class Config:
    """Options of ``int4_bdr``; the module says what they do."""

    order: int = 0
    rotate_v: bool = False
    signs: bool = True


class Int4RotatedCodec(IntegerCodec):
    """4-bit integers of rotated keys."""

    kernel = "int4"
    page_slots = 64  # as large as a page of 16 in bf16; a block of the decode kernel lies in one page
    bits = 4

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._rotations: dict[int, Rotation] = {}

    def rotation(self, side: str, head_dim: int) -> Rotation | None:
        if side == "v" and not self.config.rotate_v:
            return None
        if head_dim not in self._rotations:
            self._rotations[head_dim] = Rotation(
                self.config.order or largest_order(head_dim), head_dim, self.config.signs
            )
        return self._rotations[head_dim]
