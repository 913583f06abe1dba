"""Blocks of codes as numbers, in registers: what the kernels for weights as codes share. Their layouts are those of
``codes_gemv.LAYOUTS``; ``kernels.weight_codes`` and ``kernels.k_codes`` say what codes stand for.

A number of at most 6 bits is exact in bf16, so integer operations make both numbers of a byte at once: a *pair*, two
bf16 numbers in an int32, that of the even input in the low half. E2M1's bits stand in bf16's places with an exponent
126 too low, so one multiplication applies that and the group's scale. To stay in bf16's range it leaves out a factor of
2^32, which ``factor_of`` has: scales from 2^-100 to 2^33 are exact.

The numbers of a byte are neighbours in a row of x, too, and in a register of a tensor core. So the left operand of a
product is made where it is used, without a detour through shared memory (``tile_of``).

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
def prefetch(at, first, B, SECTORS: tl.constexpr):
    """Fetch so many sectors of 32 bytes of every row from the byte ``first`` on into the L2 cache, and wait for
    nothing. The rows exist; sectors end at B."""
    b = tl.minimum(first + tl.arange(0, SECTORS) * 32, B - 1)
    addresses = (at + b[None, :]).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses], dtype=tl.int32,
                              is_pure=False, pack=1)


@jit
def load_codes(at, high_at, live, first, B, LAYOUT: tl.constexpr, N: tl.constexpr, BYTES: tl.constexpr,
               WHOLE: tl.constexpr):
    """A block of codes from the byte ``first`` on, a byte each time; codes of six bits have the upper ones of both
    above the byte."""
    w = load_bytes(at, live, first + tl.arange(0, BYTES), B, WHOLE)
    if LAYOUT == 4 or LAYOUT == 5:
        upper = load_bytes(high_at, live, first // 2 + tl.arange(0, BYTES // 2), B // 2, WHOLE)
        w = w.to(tl.int16) | tl.reshape(tl.join(upper & 15, upper >> 4), [N, BYTES]).to(tl.int16) << 8
    return w


@jit
def spread(x, N: tl.constexpr, GROUPS: tl.constexpr, BYTES: tl.constexpr):
    """A number a group as a number a byte: [N, BYTES] of [N, GROUPS]; or [., 1]."""
    if GROUPS > 1:
        x = tl.reshape(tl.broadcast_to(x[:, :, None], [N, GROUPS, BYTES // GROUPS]), [N, BYTES])
    return x


@jit
def load_scales(scale_ptr, more_ptr, n, live, first, G, LAYOUT: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr,
                GROUPS: tl.constexpr):
    """Scales and zero points [N, GROUPS] of the outputs n from the group ``first`` on, as ``scales_of`` takes them. A
    kernel loads them a block ahead: nothing else hides their way. GROUP 0: ``factor_of``
    has the scales, and all inputs share a zero point."""
    g = tl.arange(0, GROUPS)
    if GROUP != 0:
        g += first
    at = n.to(tl.int64)[:, None] * G + g[None, :]
    mask = live[:, None] & (g < G)[None, :]
    if GROUP == 0:
        s = tl.full([1, 1], 1.0, tl.float32)
    elif LAYOUT == 5:  # 16 groups share a factor
        d = tl.load(more_ptr + n.to(tl.int64)[:, None] * (G // 16) + (g // 16)[None, :], mask=mask, other=0.0)
        s = tl.load(scale_ptr + at, mask=mask, other=0).to(tl.float32) * d.to(tl.float32)
    elif LAYOUT == 6:  # 8 groups share two factors, of the scale and of what is taken off
        factor = more_ptr + (n.to(tl.int64)[:, None] * (G // 8) + (g // 8)[None, :]) * 2
        d = tl.load(factor, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(scale_ptr + 2 * at, mask=mask, other=0).to(tl.float32) * d
    else:
        s = tl.load(scale_ptr + at, mask=mask, other=0)
    if ZEROS:
        z = tl.load(more_ptr + at, mask=mask, other=0)
    elif LAYOUT == 6:
        d = tl.load(factor + 1, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(scale_ptr + 2 * at + 1, mask=mask, other=0).to(tl.float32) * d
    else:
        z = tl.full([1, 1], 0, tl.uint8)
    return s, z


@jit
def scales_of(s, z, LAYOUT: tl.constexpr):
    """Scales and zero points in fp32."""
    if LAYOUT == 2:  # a power of two: fp32's exponent has the same bias
        wide = s.to(tl.int32)
        s = tl.where(wide == 0, 1 << 22, wide << 23).to(tl.float32, bitcast=True)
    elif LAYOUT == 3:  # E4M3's bits in fp32's places, with an exponent 120 too low
        wide = s.to(tl.int32)
        s = ((wide & 128) << 24 | (wide & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return s.to(tl.float32), z.to(tl.float32)


@jit
def factor_of(scale_ptr, more_ptr, n, live, LAYOUT: tl.constexpr, GROUP: tl.constexpr):
    """The factor of each output's sum."""
    if LAYOUT == 3:
        f = tl.load(more_ptr + n, mask=live, other=0.0)
    elif GROUP == 0:
        f = tl.load(scale_ptr + n, mask=live, other=0.0)
    else:
        f = tl.zeros_like(n).to(tl.float32) + 1.0
    if LAYOUT == 2 or LAYOUT == 3:
        f *= 4294967296.0
    return f


@jit
def _twice(x):
    """A pair of the same number: of fp32 numbers that bf16 has."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits & -65536) | (bits >> 16 & 0xFFFF)


@jit
def halves_of(pairs):
    """The numbers of pairs in fp32: of the even and of the odd inputs."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)


@jit
def multiply_add(pairs, factors, terms, ASM: tl.constexpr):
    """Pairs times factors plus terms, which are pairs: exact here, since every result is in bf16."""
    if ASM:
        pairs = tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [pairs, factors, terms],
                                          dtype=tl.int32, is_pure=True, pack=1)
    else:
        even, odd = halves_of(pairs)
        even_factor, odd_factor = halves_of(factors)
        even_term, odd_term = halves_of(terms)
        even = (even * even_factor + even_term).to(tl.int32, bitcast=True)
        odd = (odd * odd_factor + odd_term).to(tl.int32, bitcast=True)
        pairs = (even >> 16 & 0xFFFF) | (odd & -65536)
    return pairs


@jit
def _pairs(w, s, z, LAYOUT: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, BYTES: tl.constexpr,
           ZEROS: tl.constexpr, ASM: tl.constexpr):
    """The pairs [N, BYTES] of bytes, or of codes of six bits as ``load_codes`` has them. E2M1 and E3M2: times their
    scale but for 2^32, and before it; ``u4``: less the zero point."""
    wide = w.to(tl.int32)
    if LAYOUT == 1:  # 128 + code has the code in its last places
        if ZEROS:
            terms = spread(_twice(-128.0 - z), N, GROUPS, BYTES)
        else:
            terms = tl.full([1, 1], -1022835960, tl.int32)  # -136
        pairs = multiply_add((wide * 0x1001) & 0x000F000F | 0x43004300, tl.full([1, 1], 0x3F803F80, tl.int32), terms,
                              ASM)
    elif LAYOUT == 4:
        bits = (wide * 0x20020) & 0x01E001E0 | (wide * 0x8002) & 0x02000200 | (wide * 0x100040) & -2147450880
        pairs = multiply_add(bits, tl.full([1, 1], 0x7D807D80, tl.int32), tl.full([1, 1], -2147450880, tl.int32), ASM)
    else:
        bits = (wide * 0x40040) & 0x01C001C0 | (wide * 0x01001000) & -2147450880
        factors = spread(_twice(s * 1.9807040628566084e28), N, GROUPS, BYTES)  # 2^(126 - 32)
        pairs = multiply_add(bits, factors, tl.full([1, 1], -2147450880, tl.int32), ASM)
    return pairs


@jit
def _whole(code):
    """Codes 0 .. 255 in fp32: the last places of 2^23 have them."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@jit
def weights_of(w, s, z, LAYOUT: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, BYTES: tl.constexpr,
               ZEROS: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr):
    """The weights fp32 of the even and the odd inputs of a block of bytes, but for ``factor_of``; of 8 bits all, twice.
    Without SCALED those of ``i8`` and ``u4`` are without their group's scale, too."""
    if LAYOUT == 0:
        even = ((w.to(tl.int32) & 255) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0
        odd = even
    elif LAYOUT == 6:
        s, z = spread(s, N, GROUPS, BYTES), spread(z, N, GROUPS, BYTES)
        even = _whole(w & 15) * s - z
        odd = _whole(w >> 4) * s - z
    elif LAYOUT == 5:
        s = spread(s, N, GROUPS, BYTES)
        even = (_whole(w & 15 | w >> 4 & 48) - 32) * s
        odd = (_whole(w >> 4 & 15 | w >> 6 & 48) - 32) * s
    else:
        even, odd = halves_of(_pairs(w, s, z, LAYOUT, N, GROUPS, BYTES, ZEROS, ASM))
    if LAYOUT <= 1 and SCALED:
        s = spread(s, N, GROUPS, BYTES)
        even *= s
        odd *= s
    return even, odd


@jit
def in_order(pairs, dtype: tl.constexpr, N: tl.constexpr, WORDS: tl.constexpr):
    """The numbers of pairs [N, WORDS] in ``dtype`` and in the order of their inputs: [N, 2 WORDS]."""
    if dtype == tl.bfloat16:
        even = (pairs & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        odd = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        even, odd = halves_of(pairs)
    return tl.reshape(tl.join(even.to(dtype), odd.to(dtype)), [N, 2 * WORDS])


@jit
def tile_of(w, s, z, dtype: tl.constexpr, LAYOUT: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
            BYTES: tl.constexpr, PAIR: tl.constexpr, ZEROS: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr):
    """``weights_of`` as [N, inputs] in ``dtype``, in the order of the inputs."""
    if dtype == tl.bfloat16 and (LAYOUT >= 2 and LAYOUT <= 4 or LAYOUT == 1 and not SCALED):
        y = in_order(_pairs(w, s, z, LAYOUT, N, GROUPS, BYTES, ZEROS, ASM), dtype, N, BYTES)
    else:
        even, odd = weights_of(w, s, z, LAYOUT, N, GROUPS, BYTES, ZEROS, SCALED, ASM)
        y = even.to(dtype)
        if PAIR == 2:
            y = tl.reshape(tl.join(y, odd.to(dtype)), [N, 2 * BYTES])
    return y


@jit
def expert_at(w_ptr, scale_ptr, more_ptr, rows, B, G, ZEROS: tl.constexpr):
    """The planes of an expert's matrix, which stands after so many ``rows`` of those before it."""
    if ZEROS:
        more_ptr += rows * G
    else:
        more_ptr += rows
    return w_ptr + rows * B, scale_ptr + rows * G, more_ptr


@jit
def inputs_of(x_ptr, b, B, PAIR: tl.constexpr, WHOLE: tl.constexpr):
    """The even and the odd inputs of the bytes b of one row, in fp32; of 8 bits all, twice. The two bf16 inputs of a
    byte are loaded as one word, so that a layout's change moves them together: x begins at a whole word."""
    if PAIR == 1:
        at = x_ptr + b
        if WHOLE:
            even = tl.load(at).to(tl.float32)
        else:
            even = tl.load(at, mask=b < B, other=0.0).to(tl.float32)
        odd = even
    elif x_ptr.dtype.element_ty == tl.bfloat16:
        words = x_ptr.to(tl.pointer_type(tl.int32)) + b
        if WHOLE:
            pairs = tl.load(words)
        else:
            pairs = tl.load(words, mask=b < B, other=0)
        even, odd = halves_of(pairs)
    else:
        even = tl.load(x_ptr + 2 * b, mask=b < B, other=0.0).to(tl.float32)
        odd = tl.load(x_ptr + 2 * b + 1, mask=b < B, other=0.0).to(tl.float32)
    return even, odd
