"""Powers of two for a softmax, a share of them by a polynomial on the multipliers instead of the unit for exponentials.

A multiprocessor's unit for exponentials gives 16 results a cycle; the multipliers are partly idle in an attention loop.
FlashAttention-4 (arXiv:2603.05451) therefore computes a share of the exponentials by Cody and Waite's reduction: x is
rounded to a whole number n by an addition, a polynomial gives 2^(x - n), and n is added to its exponent's bits. The
polynomial of degree 3 errs by at most 7.5e-5 relative, a quarter of the rounding of fp16 (4.9e-4 of half a step) and a
twentieth of that of bf16.
"""

from __future__ import annotations

from typing import Any

import torch

from kvasir.kernels._triton import INTERPRETED, gl, gluon_jit, jit, tl

# 2^f for f in [-0.5, 0.5], least largest relative error of degree 3 (Remez, fitted here).
COEFFICIENTS = (0.9999280726, 0.6932609886, 0.2426111385, 0.0551716601)
MAX_ERROR = 7.6e-5  # relative, of the polynomial and its roundings in fp32
LOWEST = -126.0  # smaller powers are taken for 2^-126, which a softmax cannot tell from zero
ROUNDER = 12582912.0  # 1.5 * 2^23: a sum with it has no fraction, and the whole number in its low bits
SHARES = (0, 4, 8)  # one element of so many by the polynomial; 0: none


def exp2_reference(x: torch.Tensor) -> torch.Tensor:
    """2^x of fp32 numbers up to 127, by the polynomial, step by step as the kernels compute it."""
    shifted = x.clamp(min=LOWEST) + ROUNDER
    rest = x.clamp(min=LOWEST) - (shifted - ROUNDER)
    a, b, c, d = COEFFICIENTS
    power = ((d * rest + c) * rest + b) * rest + a
    return (power.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)


def _bits(number: float) -> str:
    """An fp32 constant as PTX spells it."""
    return f"0f{int(torch.tensor(number, dtype=torch.float32).view(torch.int32)) & 0xFFFFFFFF:08X}"


def _assembly(share: int) -> str:
    """PTX of ``share`` powers, the last by the polynomial. Results are written when all arguments have been read."""
    a, b, c, d = map(_bits, COEFFICIENTS)
    unit = "".join(f"ex2.approx.ftz.f32 e{i}, ${share + i};\n" for i in range(share - 1))
    give = "".join(f"mov.f32 ${i}, e{i};\n" for i in range(share - 1))
    return f"""{{
.reg .f32 e<{share}>, x, s, w, f, p;
.reg .b32 i, j;
max.f32 x, ${2 * share - 1}, {_bits(LOWEST)};
add.rn.f32 s, x, {_bits(ROUNDER)};
sub.rn.f32 w, s, {_bits(ROUNDER)};
sub.rn.f32 f, x, w;
fma.rn.f32 p, f, {d}, {c};
fma.rn.f32 p, p, f, {b};
fma.rn.f32 p, p, f, {a};
mov.b32 i, s;
shl.b32 i, i, 23;
mov.b32 j, p;
add.s32 j, j, i;
{unit}{give}mov.b32 ${share - 1}, j;
}}"""


def _constraints(share: int) -> str:
    return ",".join(["=f"] * share + ["f"] * share)


def _constant(text: str) -> Any:
    """A text that kernels may read."""
    return text if tl is None else tl.constexpr(text)


FOUR, EIGHT = (_constant(_assembly(n)) for n in SHARES[1:])
FOUR_REGISTERS, EIGHT_REGISTERS = (_constant(_constraints(n)) for n in SHARES[1:])


@jit
def _polynomial(x):
    """``exp2_reference`` in plain Triton."""
    x = tl.maximum(x, -126.0)
    shifted = x + 12582912.0
    rest = x - (shifted - 12582912.0)
    power = ((0.0551716601 * rest + 0.2426111385) * rest + 0.6932609886) * rest + 0.9999280726
    return (power.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)


@jit
def exp2_shared(x, SHARE: tl.constexpr, INTERPRETED: tl.constexpr = INTERPRETED):
    """2^x in fp32; of ``SHARE`` elements of a thread one by the polynomial. The interpreter has no assembly: there, all
    are."""
    if SHARE == 0:
        return tl.exp2(x)
    elif INTERPRETED:
        return _polynomial(x)
    elif SHARE == 4:
        return tl.inline_asm_elementwise(FOUR, FOUR_REGISTERS, [x], tl.float32, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(EIGHT, EIGHT_REGISTERS, [x], tl.float32, is_pure=True, pack=8)


@gluon_jit
def exp2_shared_by_hand(x, SHARE: gl.constexpr):
    """``exp2_shared`` for kernels whose layouts are placed by hand."""
    if SHARE == 0:
        return gl.exp2(x)
    elif SHARE == 4:
        return gl.inline_asm_elementwise(FOUR, FOUR_REGISTERS, [x], gl.float32, is_pure=True, pack=4)
    else:
        return gl.inline_asm_elementwise(EIGHT, EIGHT_REGISTERS, [x], gl.float32, is_pure=True, pack=8)
