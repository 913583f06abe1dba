"""Rule out the tokens that a row's bit mask does not allow: -inf is written where a bit is 0. No logit is read.

A mask is a bit for each token, so that what a grammar allows crosses from the host in 1/32 of the logits' numbers.

Legend: M rows of logits, K masked rows, V vocabulary, W mask words, B columns of a program.
"""

from __future__ import annotations

import torch

from kvasir.kernels._triton import cdiv, jit, tl, use_triton

BLOCK = 4096


def mask_rows_ref(logits_MV: torch.Tensor, row_K: torch.Tensor, words_KW: torch.Tensor) -> torch.Tensor:
    """``mask_rows`` in plain torch."""
    bits = (words_KW[:, :, None] >> torch.arange(32, device=words_KW.device, dtype=torch.int32)) & 1
    allowed_KV = bits.view(len(row_K), -1)[:, : logits_MV.shape[1]] != 0
    logits_MV[row_K] = logits_MV[row_K].masked_fill(~allowed_KV, float("-inf"))
    return logits_MV


@jit(do_not_specialize_on_alignment=["rows", "words"])
def _mask(logits, rows, words, row_stride, width, num_words, B: tl.constexpr):
    """One program: B columns of one masked row."""
    masked, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    row = tl.load(rows + masked)
    word = tl.load(words + masked * num_words + at // 32, mask=at < width, other=-1)
    tl.store(logits + row * row_stride + at, float("-inf"), mask=(at < width) & (((word >> (at % 32)) & 1) == 0))


def mask_rows_triton(logits_MV: torch.Tensor, row_K: torch.Tensor, words_KW: torch.Tensor, *,
                     block: int = BLOCK) -> torch.Tensor:
    """``mask_rows`` on the GPU (or in Triton's interpreter). ``block``: power of two, columns of a program."""
    width, (masked, num_words) = logits_MV.shape[1], words_KW.shape
    assert logits_MV.stride(1) == 1 and words_KW.is_contiguous() and 32 * num_words >= width
    if masked:
        _mask[(masked, cdiv(width, block))](logits_MV, row_K, words_KW, logits_MV.stride(0), width, num_words, B=block,
                                            num_warps=4)
    return logits_MV


def mask_rows(logits_MV: torch.Tensor, row_K: torch.Tensor, words_KW: torch.Tensor) -> torch.Tensor:
    """Set to -inf, in place, what the masks do not allow; returns ``logits_MV``. Nothing is read back.

    ``logits_MV`` [M, at most 32 W] of any float dtype. ``row_K`` int64: the masked rows, each at most once.
    ``words_KW`` int32, contiguous: bit i % 32 of word i // 32 allows token i.
    """
    mask = mask_rows_triton if use_triton(logits_MV) else mask_rows_ref
    return mask(logits_MV, row_K, words_KW)
