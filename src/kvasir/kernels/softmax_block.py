"""The running softmax that the attention kernels share (FlashAttention-2, arXiv:2307.08691).

Two ideas of FlashAttention-4 (arXiv:2603.05451) are switches. LAZY: a row's sums are rescaled only once its maximum has
grown by more than 2^8, and as they stand until then; weights are up to 2^8, and the division at the end is the same, so
the result is exact up to rounding. SHARE: one power of two in SHARE by a polynomial (``kernels.exp2``).

Logarithms are to base 2, for which the hardware has an instruction. The reference is that of the kernels that call it.

Legend: M rows of a tile, N keys of a block, D head dim.
"""

from __future__ import annotations

from kvasir.kernels._triton import jit, tl
from kvasir.kernels.exp2 import exp2_shared

SLACK = 8.0  # powers of two by which a maximum may exceed the one in use; FlashAttention-4's choice


@jit
def attend_block(q, k, v, seen, scale, softcap, top, total, acc, CAPPED: tl.constexpr, MASKED: tl.constexpr,
                 LAZY: tl.constexpr = False, SHARE: tl.constexpr = 0, SLACK: tl.constexpr = SLACK):
    """Fold one block of keys into the running softmax of a tile: k [D, N], v [N, D], seen [M, N] or [1, N]. ``scale`` >
    0."""
    s = tl.dot(q, k, input_precision="ieee")
    factor = scale * 1.4426950408889634
    if CAPPED:
        factor = 1.4426950408889634
        s = cap(s, s * (scale / softcap), softcap)
    if MASKED:
        s = tl.where(seen, s, -float("inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * factor)
    if LAZY:  # a row that has seen nothing takes its first maximum: -inf + 8 is below it
        new_top = tl.where(new_top > top + SLACK, new_top, top)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a row that has seen nothing yet: exp2(-inf - 0) = 0
    p = exp2_shared(s * factor - base[:, None], SHARE)  # one fused multiply-add an element
    shrink = tl.exp2(top - base)
    if LAZY:
        if tl.max((new_top > top).to(tl.int32), 0) > 0:
            acc = acc * shrink[:, None]
    else:
        acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return new_top, total * shrink + tl.sum(p, 1), acc


@jit
def fold_columns(s, top, total):
    """Fold scores s [N, M], in base 2, into the running softmax of the columns. Returns its maximum, the weights of the
    scores [N, M], the factor by which earlier sums shrink, and the total of the weights."""
    new_top = tl.maximum(top, tl.max(s, 0))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a column that has seen nothing yet
    p = tl.exp2(s - base[None, :])
    shrink = tl.exp2(top - base)
    return new_top, p, shrink, total * shrink + tl.sum(p, 0)


@jit
def cap(s, size, softcap):
    """softcap * tanh(size), for ``size`` = s / softcap in the unit of the cap. The sign is that of s."""
    decay = tl.exp2(tl.abs(size) * -2.8853900817779268)
    return tl.where(s < 0, -softcap, softcap) * (1 - decay) / (1 + decay)


@jit
def sink_logits(sinks_ptr, head, live, top, total, acc):
    """Let a learned logit of each head join the softmax without a value."""
    sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
    peak = tl.maximum(top, sink)
    shrink = tl.exp2(top - peak)
    return peak, total * shrink + tl.exp2(sink - peak), acc * shrink[:, None]
