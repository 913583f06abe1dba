"""Gumbel noise from a counter: the same number for (stream, position, token id) on every device, in every batch.

``argmax(logits / T + gumbel)`` draws from ``softmax(logits / T)``. Because the noise of a token is a pure function of
its request's stream, its position and its id, a draw does not depend on the batch, on chunking, on preemption or on
retries.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): key = stream (low
word, high word), counter = (token id // 4, position, 0, 0); output word ``token id % 4`` belongs to the token. The
32-bit words are bit-exact everywhere; so is v below. The logarithms are as exact as the device's libm: a few units in
the last place.

Legend: M rows, V vocabulary, Q = ceil(V / 4) counters a row.
"""

from __future__ import annotations

import numpy as np
import torch

from kvasir.kernels._triton import cdiv, jit, tl, use_triton

_WORD = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
# v = (word + 0.5) / 2^32 in fp32; rounding may reach 1, where log(1 - v) has no value.
_TOP_V = 1.0 - 2.0**-24


def philox(counter: tuple[np.ndarray, ...], key: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Philox4x32-10. ``counter``: four, ``key``: two arrays of uint64 holding 32-bit words, broadcast against each
    other. Returns four arrays of uint64 holding 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ (c1 ^ k0), p1 & _WORD, (p0 >> _SHIFT) ^ (c3 ^ k1), p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def gumbel_of_words(words: np.ndarray) -> torch.Tensor:
    """32-bit words (uint64, any shape) -> fp32 noise, finite for every word."""
    v = torch.from_numpy(words.astype(np.float32))
    # The uniform is u = 1 - v. Written in v, the upper tail (u near 1, where draws are decided) keeps 32 bits.
    v = v.add_(0.5).mul_(2.0**-32).clamp_(max=_TOP_V)
    return v.neg_().log1p_().neg_().log_().neg_()


def gumbel_reference(streams_M: torch.Tensor, positions_M: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The oracle: [M, V] fp32 on the device of ``streams_M``, computed on the CPU."""
    streams = streams_M.cpu().numpy().view(np.uint64)[:, None]
    positions = positions_M.cpu().numpy().astype(np.uint64)[:, None]
    quads = np.arange(-(-vocab_size // 4), dtype=np.uint64)[None, :]
    zero = np.zeros((1, 1), np.uint64)
    words = philox((quads, positions & _WORD, zero, zero), (streams & _WORD, streams >> _SHIFT))
    words_MV = np.stack(words, axis=-1).reshape(len(streams), quads.size * 4)[:, :vocab_size]
    return gumbel_of_words(words_MV).to(streams_M.device)


@jit
def gumbel_of_word(word):
    """One 32-bit word of the generator -> its noise, in a kernel."""
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = tl.minimum(v, 0.999999940395355)
    w = 1.0 - v
    # log1p(-v) without a libm call: the rounding error of 1 - v cancels in the quotient (Goldberg 1991, theorem 4).
    lost = tl.where(w == 1.0, 1.0, 1.0 - w)
    exponential = tl.where(w == 1.0, v, -tl.log(w) * (v / lost))
    return -tl.log(exponential)


@jit
def _store_gumbel(out, word, at, mask):
    tl.store(out + at, gumbel_of_word(word), mask=mask)


@jit
def _gumbel_kernel(streams, positions, out, vocab_size, BLOCK: tl.constexpr):
    """One program: BLOCK counters (4 * BLOCK tokens) of one row. Traffic: 16 bytes written a counter, nothing read."""
    row = tl.program_id(0)
    quad = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.load(streams + row)
    position = tl.load(positions + row).to(tl.uint32)
    c0 = quad.to(tl.uint32)
    zero = c0 * 0
    w0, w1, w2, w3 = tl.philox(stream, c0, zero + position, zero, zero)
    base = out + row.to(tl.int64) * vocab_size
    at = quad * 4
    _store_gumbel(base, w0, at, at < vocab_size)
    _store_gumbel(base, w1, at + 1, at + 1 < vocab_size)
    _store_gumbel(base, w2, at + 2, at + 2 < vocab_size)
    _store_gumbel(base, w3, at + 3, at + 3 < vocab_size)


def gumbel_triton(streams_M: torch.Tensor, positions_M: torch.Tensor, vocab_size: int,
                  block: int = 256) -> torch.Tensor:
    """The kernel: [M, V] fp32 on the GPU (or on the CPU under Triton's interpreter)."""
    out = torch.empty(len(streams_M), vocab_size, dtype=torch.float32, device=streams_M.device)
    if out.numel():
        grid = (len(streams_M), cdiv(cdiv(vocab_size, 4), block))
        _gumbel_kernel[grid](streams_M, positions_M, out, vocab_size, BLOCK=block)
    return out


def gumbel(streams_M: torch.Tensor, positions_M: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise [M, V] fp32, about -3.2 .. 22.9.

    ``streams_M``: the u64 noise stream of each row, as int64. ``positions_M`` int64: position of the predicting row
    (the index of the last known token), below 2^32. Row m depends on ``streams_M[m]`` and ``positions_M[m]`` alone.
    """
    if use_triton(streams_M):
        return gumbel_triton(streams_M, positions_M, vocab_size)
    return gumbel_reference(streams_M, positions_M, vocab_size)
