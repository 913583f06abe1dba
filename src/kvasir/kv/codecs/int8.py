"""8-bit integers, a grid for every token and head. Lossy: about a 500th of a row's range. 8.25 bits an element at D =
128.

Half the bytes of bf16. Needs no rotation: 256 levels leave room for outliers.
"""

from __future__ import annotations

from kvasir.kv.quantized import IntegerCodec


class Int8Codec(IntegerCodec):
    """8-bit integers without a rotation."""

    kernel = "int8"
    latents = True
    page_slots = 32  # as large as a page of 16 in bf16; a block of the decode kernel lies in one page
    bits = 8
