"""Blocks of codes as numbers, in registers: what the kernels for weights as codes share. Their layouts are those of
``codes_gemv.LAYOUTS``; ``kernels.weight_codes`` and ``kernels.k_codes`` say what codes stand for.

Legend: N rows of W, B bytes and G groups of a row.
"""

from __future__ import annotations

from kvasir.kernels._triton import jit, tl


@jit
def load_bytes(at, live, b, B, WHOLE: tl.constexpr):
    """A block of bytes. It is read once, and should not evict anything from the L2 cache."""
    if WHOLE:
        w = tl.load(at + b[None, :], eviction_policy="evict_first")
    else:
        w = tl.load(at + b[None, :], mask=live[:, None] & (b < B)[None, :], other=0, eviction_policy="evict_first")
    return w


@jit
def load_codes(at, high_at, live, b, B, LAYOUT: tl.constexpr, WHOLE: tl.constexpr):
    """A block of codes, a byte each time; codes of six bits have the upper ones of both above the byte."""
    w = load_bytes(at, live, b, B, WHOLE)
    if LAYOUT == 4 or LAYOUT == 5:
        upper = load_bytes(high_at, live, b // 2, B // 2, WHOLE).to(tl.int16)
        w = w.to(tl.int16) | (upper >> (b % 2 * 4)[None, :].to(tl.int16) & 15) << 8
    return w


@jit
def _number(code, zero, LAYOUT: tl.constexpr):
    """fp32 numbers of codes, before their scale. The bits of E2M1 and E3M2 stand in fp32's places, with an exponent 126
    or 124 too low."""
    if LAYOUT == 5:
        y = code.to(tl.float32) - 32
    elif LAYOUT == 6:
        y = code.to(tl.float32)
    elif LAYOUT == 4:
        wide = code.to(tl.int32)
        y = ((wide & 32) << 26 | (wide & 31) << 21).to(tl.float32, bitcast=True) * 2.1267647932558654e37
    elif LAYOUT >= 2:
        wide = code.to(tl.int32)
        y = ((wide & 8) << 28 | (wide & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif LAYOUT == 1:
        y = code.to(tl.float32) - zero
    else:
        y = code.to(tl.float32)
    return y


@jit
def _spread(x, N: tl.constexpr, GROUPS: tl.constexpr, BYTES: tl.constexpr):
    """A number a group as a number a byte: [N, BYTES] of [N, GROUPS]; or [N, 1]."""
    if GROUPS > 1:
        x = tl.reshape(tl.broadcast_to(x[:, :, None], [N, GROUPS, BYTES // GROUPS]), [N, BYTES])
    return x


@jit
def scales_of(scale_ptr, more_ptr, n, live, first, G, LAYOUT: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr,
            GROUPS: tl.constexpr):
    """Scales fp32 [N, GROUPS] of the outputs n for the inputs from ``first`` on, and zero points. GROUP 0: the scales
    of all inputs, which ``factor_of`` multiplies with later."""
    if GROUP == 0:
        g = tl.zeros([1], tl.int32)
    else:
        g = first // GROUP + tl.arange(0, GROUPS)
    at = n.to(tl.int64)[:, None] * G + g[None, :]
    mask = live[:, None] & (g < G)[None, :]
    if GROUP == 0:
        s = tl.zeros_like(at).to(tl.float32) + 1.0
    elif LAYOUT == 2:  # a power of two: fp32's exponent has the same bias
        wide = tl.load(scale_ptr + at, mask=mask, other=0).to(tl.int32)
        s = tl.where(wide == 0, 1 << 22, wide << 23).to(tl.float32, bitcast=True)
    elif LAYOUT == 3:  # E4M3's bits in fp32's places, with an exponent 120 too low
        wide = tl.load(scale_ptr + at, mask=mask, other=0).to(tl.int32)
        s = ((wide & 128) << 24 | (wide & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif LAYOUT == 5:  # 16 groups share a factor
        d = tl.load(more_ptr + n.to(tl.int64)[:, None] * (G // 16) + (g // 16)[None, :], mask=mask, other=0.0)
        s = tl.load(scale_ptr + at, mask=mask, other=0).to(tl.float32) * d.to(tl.float32)
    elif LAYOUT == 6:  # 8 groups share two factors, of the scale and of what is taken off
        factor = more_ptr + (n.to(tl.int64)[:, None] * (G // 8) + (g // 8)[None, :]) * 2
        d = tl.load(factor, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(scale_ptr + 2 * at, mask=mask, other=0).to(tl.float32) * d
    else:
        s = tl.load(scale_ptr + at, mask=mask, other=0.0)
    if ZEROS:
        z = tl.load(more_ptr + at, mask=mask, other=0).to(tl.float32)
    elif LAYOUT == 6:
        d = tl.load(factor + 1, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(scale_ptr + 2 * at + 1, mask=mask, other=0).to(tl.float32) * d
    else:
        z = tl.zeros_like(s) + 8.0
    return s, z


@jit
def factor_of(scale_ptr, more_ptr, n, live, LAYOUT: tl.constexpr, GROUP: tl.constexpr):
    """The factor of each output's sum."""
    if LAYOUT == 3:
        f = tl.load(more_ptr + n, mask=live, other=0.0)
    elif GROUP == 0:
        f = tl.load(scale_ptr + n, mask=live, other=0.0)
    else:
        f = tl.zeros_like(n).to(tl.float32) + 1.0
    return f


@jit
def weights_of(w, s, z, LAYOUT: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, BYTES: tl.constexpr):
    """The weights fp32 of the even and the odd inputs of a block of bytes; of 8 bits all, twice."""
    s = _spread(s, N, GROUPS, BYTES)
    z = _spread(z, N, GROUPS, BYTES)
    if LAYOUT == 0:
        even = _number(w, z, LAYOUT) * s
        odd = even
    elif LAYOUT == 6:
        even = _number(w & 15, z, LAYOUT) * s - z
        odd = _number(w >> 4, z, LAYOUT) * s - z
    elif LAYOUT == 4 or LAYOUT == 5:
        even = _number(w & 15 | w >> 4 & 48, z, LAYOUT) * s
        odd = _number(w >> 4 & 15 | w >> 6 & 48, z, LAYOUT) * s
    else:
        even = _number(w & 15, z, LAYOUT) * s
        odd = _number(w >> 4, z, LAYOUT) * s
    return even, odd


@jit
def expert_at(w_ptr, scale_ptr, more_ptr, rows, B, G, ZEROS: tl.constexpr):
    """The planes of an expert's matrix, which stands after so many ``rows`` of those before it."""
    if ZEROS:
        more_ptr += rows * G
    else:
        more_ptr += rows
    return w_ptr + rows * B, scale_ptr + rows * G, more_ptr
