"""Log-probability and rank of each row's drawn token, and the model's confidence, from the logits alone.

    log-probability   x[token] - log sum exp x
    rank              1 + the number of larger logits
    confidence        minus the mean of the k largest log-probabilities (Fu et al. 2025, "Deep Think
                      with Confidence", eq. 2)

The kernels read a row once, in chunks: ``_chunk_parts`` leaves each chunk's largest logit and partial sums, and
``_merge_parts`` (one program a row) adds them up in a fixed order. The k largest logits of a row are in the k chunks
whose largest are largest: any other token has those k at or above it. So only these chunks are read again, into
registers, and the largest value is removed, with all its ties, until there are k. The sum of the k largest is the same
whichever of the ties are counted. Sums are in fp64, so that neither the order of a reduction nor the logits' dtype
shows in the fp32 result. Nothing depends on the other rows.

Legend: M rows, V vocabulary, C chunks a row, P programs a row, B columns of a chunk, K most of the largest.
"""

from __future__ import annotations

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl, use_triton
from kvasir.kernels.sample import _ordered, _value

CHUNK = 512
CHUNKS = 4  # chunks that a program reads
MOST = 32  # largest k of a confidence
MERGE_WARPS = 8


def mean_surprise(top_RK: torch.Tensor, count_R: torch.Tensor) -> torch.Tensor:
    """Minus the mean of the first ``count_R`` of a row's largest log-probabilities: [R] fp32, 0 where ``count_R`` is 0.
    It is computed in fp64, so that a row's value does not depend on its neighbours' counts."""
    count_R = count_R.clamp(max=top_RK.shape[-1])
    kept = torch.arange(top_RK.shape[-1], device=top_RK.device) < count_R[:, None]
    return (-top_RK.double().masked_fill(~kept, 0.0).sum(-1) / count_R.clamp(min=1)).float()


def report_rows_ref(logits_MV: torch.Tensor, token_M: torch.Tensor, most_M: torch.Tensor, vocab_size: int,
                    out_3M: torch.Tensor | None = None) -> torch.Tensor:
    """``report_rows`` in plain torch: reads the host for the most that a row asks of its confidence."""
    x_MV, at_M1 = logits_MV[:, :vocab_size].float(), token_M.long().clamp(0, vocab_size - 1)[:, None]
    logprobs_MV = torch.log_softmax(x_MV, -1)
    rank_M = (x_MV > x_MV.gather(1, at_M1)).sum(-1) + 1
    most = min(int(most_M.max()), vocab_size) if len(most_M) else 0
    found_3M = torch.stack([logprobs_MV.gather(1, at_M1)[:, 0], rank_M.float(),
                            mean_surprise(logprobs_MV.topk(most).values, most_M)])
    return found_3M if out_3M is None else out_3M.copy_(found_3M)


@jit
def _ordered_logits(at, inside):
    """Int32 keys in the order of the loaded logits, NaN above any number; columns that do not exist are below -inf."""
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, tl.where(x == x, _ordered(x), 0x7FFFFFFF), -0x80000000)


@jit(do_not_specialize_on_alignment=["tokens"])
def _chunk_parts(logits, tokens, tops, parts, row_stride, vocab_size, S: tl.constexpr, B: tl.constexpr,
                 PDL: tl.constexpr):
    """One program: S chunks of one row. ``tops`` int32 [M, C]: each chunk's largest logit. ``parts`` fp64 [3, M, P]:
    the program's largest (0 where there is none above -inf), its sum of exp(x - largest), and how many are larger than
    the token's."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, program, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = tl.minimum(tl.maximum(tl.load(tokens + row).to(tl.int32), 0), vocab_size - 1)
    chunk = program * S + tl.arange(0, S)
    at = chunk[:, None] * B + tl.arange(0, B)[None, :]
    keys = _ordered_logits(logits + row * row_stride + at, at < vocab_size)
    tl.store(tops + row * programs * S + chunk, tl.max(keys, axis=1))

    keys = tl.reshape(keys, (S * B,), can_reorder=True)
    top, exists = tl.max(keys, axis=0), keys != -0x80000000
    base = tl.where(top > -0x7F800001, _value(top), 0.0)  # ordered -inf
    weight = tl.where(exists, tl.exp(_value(keys) - base), 0.0).to(tl.float64)
    own = tl.load(logits + row * row_stride + token).to(tl.float32)
    larger = tl.sum((exists & (keys > _ordered(own))).to(tl.int32), axis=0)
    out, step = parts + row * programs + program, tl.num_programs(0).to(tl.int64) * programs
    tl.store(out, base.to(tl.float64))
    tl.store(out + step, tl.sum(weight, axis=0))
    tl.store(out + 2 * step, larger.to(tl.float64))


@jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=["tokens", "most", "out"])
def _merge_parts(logits, tokens, most, tops, parts, out, row_stride, out_stride, vocab_size, programs, chunks,
                 P2: tl.constexpr, C2: tl.constexpr,
                 K: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """One program: one row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    p, step = tl.arange(0, P2), tl.num_programs(0).to(tl.int64) * programs
    part = parts + row * programs + p
    base = tl.load(part, mask=p < programs, other=0.0)
    weight = tl.load(part + step, mask=p < programs, other=0.0)
    larger = tl.sum(tl.load(part + 2 * step, mask=p < programs, other=0.0), axis=0)
    best = tl.max(tl.where(weight > 0.0, base, float("-inf")), axis=0)
    scale = tl.log(tl.sum(tl.where(weight > 0.0, weight * tl.exp(base - best), 0.0), axis=0))  # log sum exp(x - best)
    token = tl.minimum(tl.maximum(tl.load(tokens + row).to(tl.int32), 0), vocab_size - 1)
    own = tl.load(logits + row * row_stride + token).to(tl.float64)
    tl.store(out + row, (own - best - scale).to(tl.float32))
    tl.store(out + out_stride + row, (larger + 1.0).to(tl.float32))

    count = tl.minimum(tl.minimum(tl.load(most + row).to(tl.int32), vocab_size), K)
    confidence = tl.full((), 0.0, tl.float64)
    if count > 0:
        c, j = tl.arange(0, C2), tl.arange(0, K)
        top = tl.load(tops + row * chunks + c, mask=c < chunks, other=-0x80000000)
        ranked = tl.sort((top.to(tl.int64) << 32) | c, descending=True)
        first = tl.sum(tl.where(tl.arange(0, C2 // K)[:, None] == 0, tl.reshape(ranked, (C2 // K, K)), 0), axis=0)
        at = (first & 0x7FFFFFFF).to(tl.int32)[:, None] * B + tl.arange(0, B)[None, :]
        keys = _ordered_logits(logits + row * row_stride + at, (j < count)[:, None] & (at < vocab_size))
        keys = tl.reshape(keys, (K * B,), can_reorder=True)
        left, last = count, tl.full((), 0x7FFFFFFF, tl.int32)
        while left > 0:
            last = tl.max(tl.where(keys < last, keys, -0x80000000), axis=0)
            # at least one in rows of NaN, too: they end
            tied = tl.maximum(tl.sum((keys == last).to(tl.int32), axis=0), 1)
            taken = tl.minimum(tied, left)
            confidence += taken.to(tl.float64) * (best - _value(last).to(tl.float64))
            left -= taken
        confidence = confidence / count.to(tl.float64) + scale
    tl.store(out + 2 * out_stride + row, confidence.to(tl.float32))


def report_rows_triton(logits_MV: torch.Tensor, token_M: torch.Tensor, most_M: torch.Tensor, vocab_size: int,
                       out_3M: torch.Tensor | None = None, *, block: int = CHUNK) -> torch.Tensor:
    """``report_rows`` on the GPU (or in Triton's interpreter). ``block``: power of two, columns of a chunk."""
    rows, width = logits_MV.shape
    assert 0 < vocab_size <= width < 1 << 24, "ranks are exact in fp32 below 2^24"
    assert logits_MV.stride(1) == 1 and logits_MV.dtype in (torch.float32, torch.bfloat16, torch.float16)
    out_3M = torch.empty(3, rows, dtype=torch.float32, device=logits_MV.device) if out_3M is None else out_3M
    assert out_3M.stride(1) == 1 and token_M.is_contiguous() and most_M.is_contiguous()
    if not rows:
        return out_3M
    programs = cdiv(vocab_size, CHUNKS * block)
    chunks = programs * CHUNKS
    tops = torch.empty(rows, chunks, dtype=torch.int32, device=logits_MV.device)
    parts = torch.empty(3, rows, programs, dtype=torch.float64, device=logits_MV.device)
    early = pdl(logits_MV.device)
    _chunk_parts[(rows, programs)](logits_MV, token_M, tops, parts, logits_MV.stride(0), vocab_size, S=CHUNKS, B=block,
                                   PDL=early,
                                   num_warps=4, launch_pdl=early)
    _merge_parts[(rows,)](logits_MV, token_M, most_M, tops, parts, out_3M, logits_MV.stride(0), out_3M.stride(0),
                          vocab_size, programs, chunks,
                          P2=next_power_of_2(programs), C2=max(MOST, next_power_of_2(chunks)), K=MOST, B=block,
                          PDL=early, num_warps=MERGE_WARPS, launch_pdl=early)
    return out_3M


def report_rows(logits_MV: torch.Tensor, token_M: torch.Tensor, most_M: torch.Tensor, vocab_size: int,
                out_3M: torch.Tensor | None = None) -> torch.Tensor:
    """Report log-probability, rank and confidence of one token a row. All arguments lie on one device and nothing is
    read back, so a CUDA graph may hold the call.

    ``logits_MV`` fp32, bf16 or fp16 [M, at least ``vocab_size``]; columns from ``vocab_size`` on do not exist.
    ``token_M``: ids of any dtype (for example as ``sample_rows`` returns them). ``most_M`` int: the k of a row's
    confidence, at most ``MOST``; beyond ``vocab_size``: all tokens; 0: none. ``out_3M``: the memory for the result.

    Returns fp32 [3, M]: log-probability (natural), rank (1: no logit is larger), confidence (0 where k is 0). The
    numbers of a row that holds NaN or infinity, or nothing but -inf, are meaningless.
    """
    report = report_rows_triton if use_triton(logits_MV) else report_rows_ref
    return report(logits_MV, token_M, most_M, vocab_size, out_3M)
