"""Logits to tokens: temperature, top-k, top-p, min-p and keyed noise in one pipeline without a full sort.

Every comparison uses one total order: the larger fp32 value first, the lower id first among equals. So a filter keeps
the same tokens on every device and in every batch, and a tie has one winner. Per row, in the order of the sampler's
stages:

    y = (x - max x) / temperature                  fp32, divisions rounded to nearest
    keep the top_k first;  of them the shortest run whose mass reaches top_p (weights exp(y) in fp32, sums in fp64);
    of them those with y >= log(min_p);            draw argmax(y + gumbel(stream, position, id))

The kernels walk a row in chunks: ``_chunk_tops`` finds each chunk's largest logit (rows x chunks programs); ``_cut``
(one program a row) takes the row's from them, ends greedy rows, and finds the filters' cut: the last kept (value, id);
``_draw`` (rows x chunks) adds noise to what is kept. The cut is a search over values with PIVOTS pivots a pass, each
pass giving count and mass of what lies at or above every pivot; chunks below the bracket are skipped, and once few
enough candidates are left they are packed, so that later passes read one block. Cost in bytes: the logits once
(greedy), twice (temperature) or some five times (filters over a flat distribution), from L2 where they fit.

Legend: M rows, V vocabulary, C chunks a row, B block (chunk) size, P pivots.
"""

from __future__ import annotations

import torch

from kvasir.kernels._triton import INTERPRETED, cdiv, jit, libdevice, next_power_of_2, pdl, tl, use_triton
from kvasir.kernels.noise import gumbel_of_word, gumbel_reference

GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it would leave nothing but overflow
CHUNK = 2048
PIVOTS = 8  # a bracket's counts fit one int64 as bytes
PACK = 8  # blocks of candidates that are packed
CUT_WARPS = 16
_LOW = 0x7FFFFFFF
NEG_INF = float("-inf")

# ------------------------------------------------------------------------------------------------------------ reference


def order_keys(x_RV: torch.Tensor) -> torch.Tensor:
    """[R, V] int64 keys, distinct within a row: larger fp32 value first, lower id first among equals."""
    bits = (x_RV + 0.0).view(torch.int32)  # + 0.0: the two zeros are equal
    ordered = bits ^ ((bits >> 31) & _LOW)
    last = x_RV.shape[-1] - 1
    return (ordered.long() << 32) | torch.arange(last, -1, -1, device=x_RV.device)


def ordered_values(keys: torch.Tensor) -> torch.Tensor:
    """The fp32 values that ``order_keys`` encoded."""
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & _LOW)).view(torch.float32)


def keep_top(x_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor, most: int) -> torch.Tensor:
    """Mask [R, V] bool of what top-k, and then top-p over what top-k left, keep.

    ``x_RV`` fp32 are log-weights whose row maximum is 0; ``top_k_R`` int64 in [1, V]; ``top_p_R`` float64, ``inf``
    where off; ``most``: the largest ``top_k_R`` (known to the host, so that nothing is read back). top-p keeps the
    shortest run of tokens, in order, whose mass reaches p; the first is always kept.
    """
    keys = order_keys(x_RV)
    ranked = keys.topk(most).values if most < x_RV.shape[-1] else keys.sort(dim=-1, descending=True).values
    within = torch.arange(ranked.shape[-1], device=x_RV.device) < top_k_R[:, None]
    # fp64 sums: zeros appended for a neighbour's larger k change no bit.
    weight = ordered_values(ranked).exp().double().masked_fill(~within, 0.0)
    mass = weight.cumsum(-1)
    kept = (within & (mass - weight < top_p_R[:, None] * mass[:, -1:])).sum(-1, keepdim=True).clamp_(min=1)
    return keys >= ranked.gather(-1, kept - 1)


def sample_rows_ref(logits_MV: torch.Tensor, temperature_M: torch.Tensor, top_k_M: torch.Tensor, top_p_M: torch.Tensor,
                    min_p_M: torch.Tensor, stream_M: torch.Tensor, position_M: torch.Tensor,
                    vocab_size: int) -> torch.Tensor:
    """``sample_rows`` in plain torch. It sorts, and the host reads the batch's settings."""
    x_MV = logits_MV[:, :vocab_size].float()
    best_M, tokens_M = x_MV.max(-1)
    largest_M = best_M if vocab_size == logits_MV.shape[1] else logits_MV.float().amax(-1)
    hot = (temperature_M >= GREEDY_BELOW).nonzero()[:, 0]
    if len(hot):
        # Measured from the maximum, so that fp32 resolves the likely tokens at any temperature.
        y_RV = (x_MV[hot] - best_M[hot, None]).div_(temperature_M[hot, None])
        top_k, top_p, min_p = top_k_M[hot].long().clamp(1, vocab_size), top_p_M[hot].double(), min_p_M[hot].double()
        top_p = top_p.masked_fill(top_p >= 1.0, float("inf"))
        narrow = ((top_k < vocab_size) | top_p.isfinite()).nonzero()[:, 0]
        if len(narrow):
            keep = keep_top(y_RV[narrow], top_k[narrow], top_p[narrow], int(top_k[narrow].max()))
            y_RV[narrow] = y_RV[narrow].masked_fill(~keep, NEG_INF)
        y_RV.masked_fill_(y_RV < min_p.log().float()[:, None], NEG_INF)
        tokens_M[hot] = gumbel_reference(stream_M[hot], position_M[hot], vocab_size).add_(y_RV).argmax(-1)
    return torch.stack([tokens_M.float(), largest_M, best_M])


# -------------------------------------------------------------------------------------------------------------- kernels


@jit
def _ordered(x):
    """fp32 -> int32 in the same order, the two zeros equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _value(ordered):
    """The fp32 value of an ordered int32."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _key(ordered, at):
    """Value and id in one int64: distinct, and larger for the larger value, then for the lower id."""
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)


@jit
def _exp(y, INTERPRET: tl.constexpr):
    # The libm's, as torch's: Triton's own loses bits far from 0, and masses are compared with exact bounds.
    return tl.exp(y) if INTERPRET else libdevice.exp(y)


@jit
def _chunk_tops(logits, tops, row_stride, width, vocab_size, num_chunks, B: tl.constexpr, PDL: tl.constexpr):
    """One program: one chunk of one row. ``tops`` int64 [2, M, C]: the largest key among tokens, and among all columns.
    NaN counts as larger than any number."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * B + tl.arange(0, B)
    x = tl.load(logits + row * row_stride + at, mask=at < width, other=float("-inf")).to(tl.float32)
    key = _key(tl.where(x == x, _ordered(x), 0x7FFFFFFF), at)
    out = tops + row * num_chunks + chunk
    tl.store(out, tl.max(tl.where(at < vocab_size, key, -0x7FFFFFFFFFFFFFFF), axis=0))
    tl.store(out + tl.num_programs(0).to(tl.int64) * num_chunks, tl.max(key, axis=0))


@jit
def _block(x_row, packed_row, packed, chunk, num, best, temperature, B: tl.constexpr, K: tl.constexpr):
    """One block of a row's candidates: ordered y and id, from the packed ones or from the logits. Past the end: below
    all."""
    at = chunk * B + tl.arange(0, B)
    inside = at < num
    if packed:
        ordered = tl.load(packed_row + at, mask=inside, other=-0x80000000)
        ids = tl.load(packed_row + K * B + at, mask=inside, other=0)
    else:
        x = tl.load(x_row + at, mask=inside, other=float("-inf")).to(tl.float32)
        ordered = tl.where(inside, _ordered(tl.div_rn(x - best, temperature)), -0x80000000)
        ids = at
    return ordered, ids


@jit
def _reaches(tops_row, packed, chunk, best, temperature, low):
    """Whether a chunk may hold a candidate at or above ``low``. y grows with x, so the chunk's largest logit tells."""
    reaches = packed
    if not packed:
        reaches = _ordered(tl.div_rn(_value((tl.load(tops_row + chunk) >> 32).to(tl.int32)) - best, temperature)) >= low
    return reaches


@jit
def _cut(logits, tops, temperatures, top_ks, top_ps, min_ps, draws, scratch, packs, row_stride, vocab_size, num_chunks,
         C2: tl.constexpr, B: tl.constexpr, P: tl.constexpr, K: tl.constexpr, INTERPRET: tl.constexpr,
         PDL: tl.constexpr):
    """One program: one row. It writes the row's draw as if it were greedy, and in ``scratch`` int64 [4, M] the key of
    the last token that the filters keep (-1 when nothing is left to draw), the bits of the largest logit, and zeros for
    ``_draw``."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    tops_row, x_row, packed_row = tops + row * num_chunks, logits + row * row_stride, packs + row * 2 * K * B
    c = tl.arange(0, C2)
    top = tl.load(tops_row + c, mask=c < num_chunks, other=-0x7FFFFFFFFFFFFFFF)
    anywhere = tl.load(tops_row + num_rows * num_chunks + c, mask=c < num_chunks, other=-0x7FFFFFFFFFFFFFFF)
    best_key = tl.max(top, axis=0)
    best = _value((best_key >> 32).to(tl.int32))
    tl.store(draws + row, (0x7FFFFFFF - (best_key & 0x7FFFFFFF)).to(tl.float32))
    tl.store(draws + num_rows + row, _value((tl.max(anywhere, axis=0) >> 32).to(tl.int32)))
    tl.store(draws + 2 * num_rows + row, best)

    temperature = tl.load(temperatures + row)
    cut = tl.full((), -1, tl.int64)
    if (temperature >= 1e-5) & (tl.abs(best) < float("inf")):
        top_k, top_p = tl.maximum(tl.load(top_ks + row).to(tl.int32), 1), tl.load(top_ps + row).to(tl.float64)
        cut_value = tl.full((), -0x7F800001, tl.int32)  # ordered -inf
        cut_id = tl.full((), 0x7FFFFFFF, tl.int32)
        kept_mass = tl.full((), 0.0, tl.float64)
        at_low = vocab_size + 0
        packed, whole, num = False, False, vocab_size + 0  # whole: the packed candidates are all from some value up
        for stage in range(2):  # top-k by count, then top-p by mass
            by_mass = stage == 1
            if ((stage == 0) & (top_k < vocab_size)) | (by_mass & (top_p < 1.0)):
                # Kept is what is at or above the largest value at which the goal is reached: at ``low`` it is, at
                # ``high`` not.
                low, high = cut_value, tl.full((), 1, tl.int32)  # at_low: how many are at or above it, at most
                at_high, mass_high = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64)
                beyond, mass_beyond = at_high, mass_high  # of candidates above the packed ones
                goal = tl.where(kept_mass > 0.0, top_p * kept_mass, -1.0)
                if (not packed) | (not whole):
                    packed, num = False, vocab_size + 0
                hopeful = (not by_mass) & (top_k <= num_chunks)
                if hopeful:
                    # So many chunks' largest are as many tokens: the k-th of them is a bound from below.
                    ranked = tl.sort(top, descending=True)
                    bound = tl.max(tl.where(c == top_k - 1, ranked, -0x7FFFFFFFFFFFFFFF), axis=0)
                    low = _ordered(tl.div_rn(_value((bound >> 32).to(tl.int32)) - best, temperature))
                while high - low > 1:
                    if (not packed) & (hopeful | (at_low <= K * B) | (at_low - at_high <= K * B)):
                        whole = hopeful | (at_low <= K * B)
                        last = tl.where(whole, 1, high)
                        num = tl.full((), 0, tl.int32)
                        for chunk in range(num_chunks):
                            if _reaches(tops_row, False, chunk, best, temperature, low):
                                ordered, ids = _block(x_row, packed_row, False, chunk, vocab_size, best, temperature, B,
                                                      K)
                                take = (ordered >= low) & (ordered < last)
                                to = num + tl.cumsum(take.to(tl.int32), axis=0) - 1
                                tl.store(packed_row + to, ordered, mask=take & (to < K * B))
                                tl.store(packed_row + K * B + to, ids, mask=take & (to < K * B))
                                num += tl.sum(take.to(tl.int32), axis=0)
                        packed = num <= K * B  # else a bound from chunks that took in too many
                        at_low = tl.where(whole, num, at_low)
                        num = tl.where(packed, num, vocab_size)
                        beyond, mass_beyond = tl.where(whole, 0, at_high), tl.where(whole, 0.0, mass_high)
                        hopeful = False
                        tl.debug_barrier()  # the block is read back by other threads of this program
                    # Pivots stand evenly over y, the first at ``low``. Below some y there is little mass, whatever
                    # ``low``.
                    y_high = _value(high - 1)
                    y_low = tl.maximum(tl.maximum(_value(low), 8.0 * y_high - 18.0), -3.4e38)
                    p = tl.arange(0, P)
                    pivot = _ordered(y_low + (y_high - y_low) * (p.to(tl.float32) / P))
                    pivot = tl.where(p == 0, low, tl.minimum(tl.maximum(pivot, low + 1), high - 1))
                    # Byte i of a lane's ``passed``: how many of its candidates are at or above exactly i + 1 pivots.
                    passed_B = tl.zeros((B,), tl.int64)
                    mass_PB = tl.zeros((P, B), tl.float64)
                    least_B = tl.full((B,), 1, tl.int32)
                    most_B = tl.full((B,), -0x80000000, tl.int32)
                    for chunk in range(tl.where(packed, (num + B - 1) // B, num_chunks)):
                        if _reaches(tops_row, packed, chunk, best, temperature, low):
                            ordered, ids = _block(x_row, packed_row, packed, chunk, num, best, temperature, B, K)
                            weight = _exp(_value(ordered), INTERPRET).to(tl.float64)
                            above = ordered[None, :] >= pivot[:, None]
                            places = tl.sum(above.to(tl.int64), axis=0) * 8 - 8
                            passed_B += tl.where(places >= 0, tl.full((B,), 1, tl.int64) << tl.maximum(places, 0), 0)
                            mass_PB += tl.where(above, weight[None, :], 0.0)
                            within = (ordered >= low) & (ordered < high)
                            least_B = tl.where(within, tl.minimum(least_B, ordered), least_B)
                            most_B = tl.where(within, tl.maximum(most_B, ordered), most_B)
                    exactly = tl.sum(((passed_B[None, :] >> (p[:, None] * 8)) & 0xFF).to(tl.int32), axis=1)
                    count = tl.sum(tl.where(p[None, :] >= p[:, None], exactly[None, :], 0), axis=1) + beyond
                    mass = tl.sum(mass_PB, axis=1) + mass_beyond
                    goal = tl.where(by_mass & (goal < 0.0), top_p * tl.max(mass, axis=0), goal)
                    met = tl.where(by_mass, mass >= goal, count >= top_k) | (p == 0)
                    at_low = tl.min(tl.where(met, count, 0x7FFFFFFF), axis=0)
                    high_next = tl.minimum(high, tl.min(tl.where(met, 1, pivot), axis=0))
                    missed_count = tl.max(tl.where(met, 0, count), axis=0)
                    missed_mass = tl.max(tl.where(met, 0.0, mass), axis=0)
                    at_high = tl.maximum(at_high, missed_count)
                    mass_high = tl.maximum(mass_high, missed_mass)
                    low = tl.max(tl.where(met, pivot, low), axis=0)
                    # No candidate lies beyond the least and the most of the old bracket.
                    high = tl.minimum(high_next, tl.max(most_B, axis=0) + 1)
                    low = tl.minimum(tl.maximum(low, tl.min(least_B, axis=0)), high - 1)
                tied = at_low - at_high
                weight = _exp(_value(low), INTERPRET).to(tl.float64)
                short = tl.where(by_mass, tl.ceil((goal - mass_high) / tl.maximum(weight, 1e-300)),
                                 (top_k - at_high).to(tl.float64))
                short = tl.minimum(tl.maximum(short, 1.0), tl.maximum(tied, 1).to(tl.float64)).to(tl.int32)
                kept_mass = mass_high + short.to(tl.float64) * weight
                cut_id = tl.where(low == cut_value, cut_id, 0x7FFFFFFF)
                cut_value = low
                if short < tied:
                    seen = tl.full((), 0, tl.int32)
                    found = tl.full((), 0, tl.int32)
                    for chunk in range(tl.where(packed, (num + B - 1) // B, num_chunks)):
                        if _reaches(tops_row, packed, chunk, best, temperature, low):
                            ordered, ids = _block(x_row, packed_row, packed, chunk, num, best, temperature, B, K)
                            tie = ordered == low
                            order = seen + tl.cumsum(tie.to(tl.int32), axis=0)
                            found += tl.sum(tl.where(tie & (order == short), ids, 0), axis=0)
                            seen += tl.sum(tie.to(tl.int32), axis=0)
                    cut_id = found
        min_p = tl.load(min_ps + row).to(tl.float64)
        if min_p > 0.0:
            floor = _ordered(tl.log(min_p).to(tl.float32))
            cut_id = tl.where(floor > cut_value, 0x7FFFFFFF, cut_id)
            cut_value = tl.maximum(cut_value, floor)
        cut = _key(cut_value, cut_id)
    tl.store(scratch + row, cut)
    tl.store(scratch + num_rows + row, best.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(scratch + 2 * num_rows + row, -0x7FFFFFFFFFFFFFFF)
    tl.store(scratch + 3 * num_rows + row, 0)


@jit(do_not_specialize_on_alignment=["streams", "positions"])
def _draw(logits, tops, temperatures, streams, positions, draws, scratch, row_stride, vocab_size, num_chunks,
          B: tl.constexpr, PDL: tl.constexpr):
    """One program: the best of y + noise among what a chunk keeps. The last program of a row to end writes its
    token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, chunk, num_rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0).to(tl.int64)
    cut = tl.load(scratch + row)
    if cut != -1:
        best = tl.load(scratch + num_rows + row).to(tl.int32).to(tl.float32, bitcast=True)
        temperature = tl.load(temperatures + row)
        if _reaches(tops + row * num_chunks, False, chunk, best, temperature, (cut >> 32).to(tl.int32)):
            stream, position = tl.load(streams + row), tl.load(positions + row).to(tl.uint32)
            quad = (chunk * (B // 4) + tl.arange(0, B // 4)).to(tl.uint32)
            zero = quad * 0
            w0, w1, w2, w3 = tl.philox(stream, quad, zero + position, zero, zero)
            word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (B,))  # token 4 q + i has word i of quad q
            at = chunk * B + tl.arange(0, B)
            inside = at < vocab_size
            x = tl.load(logits + row * row_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
            y = tl.div_rn(x - best, temperature)
            keep = inside & (_key(_ordered(y), at) >= cut)
            score = tl.where(keep, gumbel_of_word(word) + y, float("-inf"))
            tl.atomic_max(scratch + 2 * num_rows + row, tl.max(_key(_ordered(score), at), axis=0))
        if tl.atomic_add(scratch + 3 * num_rows + row, 1) == num_chunks - 1:
            drawn = tl.atomic_max(scratch + 2 * num_rows + row, -0x7FFFFFFFFFFFFFFF)
            tl.store(draws + row, (0x7FFFFFFF - (drawn & 0x7FFFFFFF)).to(tl.float32))


def sample_rows_triton(logits_MV: torch.Tensor, temperature_M: torch.Tensor, top_k_M: torch.Tensor,
                       top_p_M: torch.Tensor, min_p_M: torch.Tensor, stream_M: torch.Tensor, position_M: torch.Tensor,
                       vocab_size: int, *, block: int = CHUNK) -> torch.Tensor:
    """``sample_rows`` on the GPU (or in Triton's interpreter). ``block``: power of two, columns of a chunk."""
    rows, width = logits_MV.shape
    assert 0 < vocab_size <= width < 1 << 24, "ids are exact in fp32 below 2^24"
    assert logits_MV.stride(1) == 1 and logits_MV.dtype in (torch.float32, torch.bfloat16, torch.float16)
    draws = torch.empty(3, rows, dtype=torch.float32, device=logits_MV.device)
    if not rows:
        return draws
    chunks = cdiv(width, block)
    assert chunks < 256, "a lane counts in bytes"
    tops = torch.empty(2, rows, chunks, dtype=torch.int64, device=logits_MV.device)
    scratch = torch.empty(4, rows, dtype=torch.int64, device=logits_MV.device)
    packs = torch.empty(rows, 2, PACK * block, dtype=torch.int32, device=logits_MV.device)
    stride = logits_MV.stride(0)
    early = pdl(logits_MV.device)
    overlap = {"PDL": early, "launch_pdl": early}
    # Without fusing, a * b + c rounds as it does in torch.
    _chunk_tops[(rows, chunks)](logits_MV, tops, stride, width, vocab_size, chunks, B=block, num_warps=4, **overlap)
    _cut[(rows,)](logits_MV, tops, temperature_M, top_k_M, top_p_M, min_p_M, draws, scratch, packs, stride, vocab_size,
                  chunks,
                  C2=next_power_of_2(chunks), B=block, P=PIVOTS, K=PACK, INTERPRET=INTERPRETED, num_warps=CUT_WARPS,
                  enable_fp_fusion=False,
                  **overlap)
    _draw[(rows, chunks)](logits_MV, tops, temperature_M, stream_M, position_M, draws, scratch, stride, vocab_size,
                          chunks, B=block,
                          num_warps=4, enable_fp_fusion=False, **overlap)
    return draws


def sample_rows(logits_MV: torch.Tensor, temperature_M: torch.Tensor, top_k_M: torch.Tensor, top_p_M: torch.Tensor,
                min_p_M: torch.Tensor, stream_M: torch.Tensor, position_M: torch.Tensor,
                vocab_size: int) -> torch.Tensor:
    """Draw one token a row. All arguments lie on one device; nothing is read back, so a CUDA graph may hold the call.

    ``logits_MV`` fp32, bf16 or fp16 [M, at least ``vocab_size``]; columns from ``vocab_size`` on are never drawn.
    ``temperature_M`` fp32, below 1e-5: greedy. ``top_k_M`` int32, ``vocab_size`` or more: off. ``top_p_M`` fp32 or
    fp64, 1 or more: off. ``min_p_M`` fp32 or fp64, 0: off. ``stream_M`` int64, the bits of the row's u64 noise stream;
    ``position_M`` int64, position of the predicting row. A request's own fp64 numbers draw what the host's sampler
    draws.

    Returns fp32 [3, M]: token id, largest of all columns (NaN if any is), largest of the first ``vocab_size``. A row
    whose largest is NaN or infinite has some id below ``vocab_size`` that means nothing.
    """
    draw = sample_rows_triton if use_triton(logits_MV) else sample_rows_ref
    return draw(logits_MV, temperature_M, top_k_M, top_p_M, min_p_M, stream_M, position_M, vocab_size)
