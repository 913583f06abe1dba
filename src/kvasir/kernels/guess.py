"""Guesses of guest rows: the likeliest tokens of a row under the noise that the draw which verifies them will have.

A guest row stands where the row that will verify its guess stands one step later: same stream, same position, so same
noise. What is likeliest here is what that row draws if its distribution is this one ("coupled" drafts):

    z = x / temperature + gumbel(stream, position, id)          greedy rows: z = x
    guess 0: the token that was drawn here, filters included; the others: the largest z
    probability of a guess: softmax(z)

``_chunk_guesses`` (rows x chunks programs) finds a chunk's largest z and its sum of exp(z); ``_merge_guesses`` (a
program a row) merges them. Rows that are no guests end at once, so a captured step of any mixture pays for its guests.

Legend: M rows, V vocabulary, K guesses a row, C chunks a row, B block (chunk) size.
"""

from __future__ import annotations

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, tl, use_triton
from kvasir.kernels.noise import gumbel_of_word, gumbel_reference
from kvasir.kernels.sample import GREEDY_BELOW

CHUNK = 1024
# Most guesses a row that the kernel takes: each is one more pass over a chunk in registers.
MOST = 8


def guess_rows_ref(logits_MV: torch.Tensor, token_M: torch.Tensor, temperature_M: torch.Tensor, stream_M: torch.Tensor,
                   position_M: torch.Tensor, wanted_M: torch.Tensor, vocab_size: int, count: int,
                   out: torch.Tensor | None = None) -> torch.Tensor:
    """``guess_rows`` in plain torch; the host reads which rows are wanted."""
    out = logits_MV.new_zeros(2 * count, len(logits_MV), dtype=torch.float32) if out is None else out
    rows = wanted_M.nonzero()[:, 0]
    if not len(rows):
        return out
    z_RV, temperature_R = logits_MV[rows, :vocab_size].float(), temperature_M[rows]
    hot = temperature_R >= GREEDY_BELOW
    if bool(hot.any()):
        noise = gumbel_reference(stream_M[rows][hot], position_M[rows][hot], vocab_size)
        z_RV[hot] = z_RV[hot] / temperature_R[hot, None] + noise
    log_RV = z_RV.log_softmax(-1)
    token_R1 = token_M[rows, None].long().clamp(0, vocab_size - 1)
    values, ids = log_RV.topk(min(count, vocab_size), -1)
    mine = ids == token_R1
    # The drawn token comes first; where it is none of the likeliest, a filter has removed them, and it takes the place
    # of the last.
    order = torch.where(mine, -1, torch.arange(ids.shape[1], device=ids.device)).argsort(stable=True, dim=-1)
    values, ids = values.gather(1, order), ids.gather(1, order)
    ids = torch.where(mine.any(-1, keepdim=True), ids, torch.cat([token_R1, ids[:, :-1]], 1))
    out[:, rows] = 0.0
    out[: ids.shape[1], rows] = ids.T.float()
    out[count : count + ids.shape[1], rows] = log_RV.gather(1, ids).exp().T
    return out


def guess_rows(logits_MV: torch.Tensor, token_M: torch.Tensor, temperature_M: torch.Tensor, stream_M: torch.Tensor,
               position_M: torch.Tensor, wanted_M: torch.Tensor, vocab_size: int, count: int,
               out: torch.Tensor | None = None) -> torch.Tensor:
    """Guess ``count`` tokens for each wanted row. Nothing is read back, so a CUDA graph may hold the call.

    ``logits_MV`` fp32, bf16 or fp16 [M, at least ``vocab_size``]. ``token_M``: the token that was drawn in each row, in
    any dtype; ``wanted_M`` bool; the others as `kernels.sample.sample_rows` takes them.

    Returns fp32 [2 count, M]: ids (exact below 2^24), then probabilities. Rows that are not wanted hold anything.
    Meaningless where a row holds NaN. ``count`` is at most ``MOST``."""
    guess = guess_rows_triton if use_triton(logits_MV) else guess_rows_ref
    return guess(logits_MV, token_M, temperature_M, stream_M, position_M, wanted_M, vocab_size, count, out)


@jit
def _quarter(x_row, word, at, vocab_size, temperature):
    """z of every fourth token of a chunk, from its word of noise; -inf past the end."""
    x = tl.load(x_row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    hot = temperature >= 1e-5
    z = tl.where(hot, x / tl.where(hot, temperature, 1.0) + gumbel_of_word(word), x)
    return tl.where(at < vocab_size, z, float("-inf"))


@jit
def _chunk_guesses(logits, tokens, temperatures, streams, positions, wanted, found, row_stride, vocab_size, num_chunks,
                   K: tl.constexpr, B: tl.constexpr):
    """One program: one chunk of one row. ``found`` fp32 [M, 2 K + 3, C]: values and ids of its largest z, in order, sum
    of exp(z - largest), and the z of the token that was drawn (-inf: it is in another chunk)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(wanted + row) != 0:
        quad = chunk * (B // 4) + tl.arange(0, B // 4)
        temperature, token = tl.load(temperatures + row), tl.load(tokens + row).to(tl.int32)
        c0 = quad.to(tl.uint32)
        zero = c0 * 0
        w0, w1, w2, w3 = tl.philox(tl.load(streams + row), c0, zero + tl.load(positions + row).to(tl.uint32), zero,
                                   zero)
        x_row, at = logits + row * row_stride, quad * 4
        z = tl.join(tl.join(_quarter(x_row, w0, at, vocab_size, temperature),
                            _quarter(x_row, w1, at + 1, vocab_size, temperature)),
                    tl.join(_quarter(x_row, w2, at + 2, vocab_size, temperature),
                            _quarter(x_row, w3, at + 3, vocab_size, temperature)))
        ids = tl.join(tl.join(at, at + 1), tl.join(at + 2, at + 3))
        z, ids = tl.reshape(z, (B,)), tl.reshape(ids, (B,))
        out = found + row * (2 * K + 3) * num_chunks + chunk
        own = tl.max(tl.where(ids == token, z, float("-inf")), axis=0)
        top = tl.max(z, axis=0)
        tl.store(out + 2 * K * num_chunks, tl.sum(tl.where(z > float("-inf"), tl.exp(z - top), 0.0), axis=0))
        tl.store(out + (2 * K + 1) * num_chunks, own)
        tl.store(out + (2 * K + 2) * num_chunks, top)
        for k in tl.static_range(K):
            best = tl.max(z, axis=0)
            which = tl.min(tl.where(z == best, ids, 0x7FFFFFFF), axis=0)
            tl.store(out + k * num_chunks, best)
            tl.store(out + (K + k) * num_chunks, which.to(tl.float32))
            z = tl.where(ids == which, float("-inf"), z)


@jit(do_not_specialize=["out_row"])
def _merge_guesses(found, tokens, wanted, out, out_row, num_chunks, vocab_size, K: tl.constexpr, K2: tl.constexpr,
                   C2: tl.constexpr):
    """One program: one row. Writes ids and probabilities, the drawn token first."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + row) != 0:
        token = tl.minimum(tl.maximum(tl.load(tokens + row).to(tl.int32), 0), vocab_size - 1)
        base = found + row * (2 * K + 3) * num_chunks
        c, k = tl.arange(0, C2), tl.arange(0, K2)
        inside = c < num_chunks
        top = tl.load(base + (2 * K + 2) * num_chunks + c, mask=inside, other=float("-inf"))
        most = tl.max(top, axis=0)
        mass = tl.load(base + 2 * K * num_chunks + c, mask=inside, other=0.0)
        total = tl.sum(tl.where(mass > 0.0, mass * tl.exp(top - most), 0.0), axis=0)
        own = tl.max(tl.load(base + (2 * K + 1) * num_chunks + c, mask=inside, other=float("-inf")), axis=0)
        tl.store(out + row, token.to(tl.float32))
        tl.store(out + K * out_row + row, tl.exp(own - most) / total)
        at = k[:, None] * num_chunks + c[None, :]
        there = (k < K)[:, None] & inside[None, :]
        z = tl.load(base + at, mask=there, other=float("-inf"))
        ids = tl.load(base + K * num_chunks + at, mask=there, other=0.0).to(tl.int32)
        z = tl.where(ids == token, float("-inf"), z)
        for i in tl.static_range(1, K):
            best = tl.max(tl.max(z, axis=1), axis=0)
            which = tl.min(tl.min(tl.where(z == best, ids, 0x7FFFFFFF), axis=1), axis=0)
            tl.store(out + i * out_row + row, which.to(tl.float32))
            tl.store(out + (K + i) * out_row + row, tl.exp(best - most) / total)
            z = tl.where(ids == which, float("-inf"), z)


def guess_rows_triton(logits_MV: torch.Tensor, token_M: torch.Tensor, temperature_M: torch.Tensor,
                      stream_M: torch.Tensor, position_M: torch.Tensor, wanted_M: torch.Tensor, vocab_size: int,
                      count: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """``guess_rows`` on the GPU (or in Triton's interpreter)."""
    assert 0 < count <= MOST and logits_MV.stride(1) == 1
    rows, chunks = len(logits_MV), cdiv(vocab_size, CHUNK)
    if out is None:
        out = torch.zeros(2 * count, rows, dtype=torch.float32, device=logits_MV.device)
    if rows:
        found = torch.empty(rows, 2 * count + 3, chunks, dtype=torch.float32, device=logits_MV.device)
        _chunk_guesses[(rows, chunks)](logits_MV, token_M, temperature_M, stream_M, position_M, wanted_M, found,
                                       logits_MV.stride(0), vocab_size, chunks, K=count, B=CHUNK, num_warps=4)
        _merge_guesses[(rows,)](found, token_M, wanted_M, out, out.stride(0), chunks, vocab_size, K=count,
                                K2=next_power_of_2(count), C2=next_power_of_2(chunks), num_warps=4)
    return out
