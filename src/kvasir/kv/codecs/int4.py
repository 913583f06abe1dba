"""4-bit integers, a grid for every token and head, no rotation. Lossy; the control of ``int4_bdr``. 4.25 bits an
element at D = 128.

An outlier channel sets the range of its whole row and leaves few levels to all others, so models with such channels
fail with this codec. It exists to be measured against; use ``int4_bdr``.
"""

from __future__ import annotations

from kvasir.kv.quantized import IntegerCodec


class Int4Codec(IntegerCodec):
    """4-bit integers without a rotation."""

    kernel = "int4"
    page_slots = 64  # as large as a page of 16 in bf16; a block of the decode kernel lies in one page
    bits = 4
