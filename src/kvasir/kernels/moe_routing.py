"""Routing of a mixture of experts on the device: the experts of each row, and the pairs sorted by expert.

A *pair* is a row with one of its experts. ``_route`` picks the experts of each row. ``_sort`` writes the pairs sorted
by expert, and the list of *tiles*: up to BLOCK_M pairs of one expert. For many pairs, ``_rank`` ranks the pairs of a
block that share an expert, and ``_place`` turns counts into offsets. The cost is waiting: for other warps, and for one
load after the other.

Legend: T rows, X experts, K experts per row, P = T * K pairs, B blocks of pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl

FEW_PAIRS = 4096  # pairs up to which each is compared with all others
BLOCK, PART = 512, 16  # pairs that PART others are compared with at a time: as few loads in a row as registers allow
TINY = 1e-20  # least sum of scores that weights are divided by
ELEMENTS = 8192  # pairs, or blocks, x experts that a program holds


def route_reference(logits_TX: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, K] (fp32; fp64 stays), the largest first, the lower expert first among equals; expert ids [T, K]
    int64."""
    weights_TX = logits_TX.softmax(-1, dtype=torch.promote_types(logits_TX.dtype, torch.float32))
    ids_TK = logits_TX.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights_TK = weights_TX.gather(1, ids_TK)
    return (weights_TK / weights_TK.sum(-1, keepdim=True) if renormalize else weights_TK), ids_TK


def choose_reference(scores_TX: torch.Tensor, correction_X: torch.Tensor | None, top_k: int, renormalize: bool,
                     scale: float, groups: int = 1, top_groups: int = 1,
                     best: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by scores (softmax or sigmoid, fp32): weights [T, K] and expert ids [T, K] int64, the best choice first.

    ``correction_X`` counts for the choice alone. Of several ``groups`` of experts, those of the ``top_groups`` may be
    chosen whose ``best`` best scores sum to most. ``renormalize``: weights sum to one before ``scale``. Source:
    DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
    """
    choice_TX = scores_TX if correction_X is None else scores_TX + correction_X
    if groups > 1:
        by_group = choice_TX.unflatten(-1, (groups, -1))
        sums = by_group.topk(min(best, by_group.shape[-1]), -1).values.sum(-1)
        kept = torch.zeros(sums.shape, dtype=torch.bool, device=scores_TX.device)
        kept.scatter_(1, sums.topk(top_groups, -1).indices, True)
        choice_TX = by_group.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    ids_TK = choice_TX.topk(top_k, -1).indices
    weights_TK = scores_TX.gather(-1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp(min=TINY)
    return (weights_TK if scale == 1 else weights_TK * scale), ids_TK


# -------------------------------------------------------------------------------------------------------------- kernels


@jit
def _keys(values, x, X: tl.constexpr, X_PAD: tl.constexpr):
    """Distinct int64 keys in the order of fp32 values, the lower expert first among equals."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # the two zeros are equal
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (X_PAD - 1 - x).to(tl.int64)
    return tl.where(x < X, key, -0x8000000000000000)  # below a NaN with a sign, too


@jit
def _pick(logits, x, X: tl.constexpr, X_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
          RENORMALIZE: tl.constexpr):
    """Top-k of the softmax of a row's logits [X_PAD] fp32 (-inf past the last expert): ids and weights [K_PAD], the
    largest first.

    Each choice is one reduction: the largest key holds the expert and its logit. Keys are distinct integers, so that
    even a row of NaN picks K different experts, and its pairs get places of their own.
    """
    choice = tl.arange(0, K_PAD)
    key = _keys(logits, x, X, X_PAD)
    ids = tl.zeros([K_PAD], tl.int32)
    weights = tl.zeros([K_PAD], tl.float32)
    most = 0.0
    for k in tl.static_range(TOP_K):
        top = tl.max(key, 0)
        ordered = (top >> 32).to(tl.int32)
        logit = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        if k == 0:
            most = logit
        expert = X_PAD - 1 - (top & 0xFFFFFFFF).to(tl.int32)
        ids = tl.where(choice == k, expert, ids)
        weights = tl.where(choice == k, tl.exp(logit - most), weights)
        key = tl.where(x == expert, -0x8000000000000000, key)
    return ids, weights / (tl.sum(weights, 0) if RENORMALIZE else tl.sum(tl.exp(logits - most), 0))


@jit(do_not_specialize=["logits_row"])
def _route(logits_ptr, weights_ptr, ids_ptr, logits_row, X: tl.constexpr, X_PAD: tl.constexpr, TOP_K: tl.constexpr,
           K_PAD: tl.constexpr,
           RENORMALIZE: tl.constexpr, PDL: tl.constexpr):
    """Pick the experts of one row: weights [T, K] fp32, ids [T, K] int32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    x, choice = tl.arange(0, X_PAD), tl.arange(0, K_PAD)
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_row + x, mask=x < X, other=-float("inf")).to(tl.float32)
    ids, weights = _pick(logits, x, X, X_PAD, TOP_K, K_PAD, RENORMALIZE)
    at = row.to(tl.int64) * TOP_K + choice
    tl.store(ids_ptr + at, ids, mask=choice < TOP_K)
    tl.store(weights_ptr + at, weights, mask=choice < TOP_K)


@jit(do_not_specialize=["logits_row"])
def _route_sigmoid(logits_ptr, correction_ptr, weights_ptr, ids_ptr, logits_row, scale, X: tl.constexpr,
                   X_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr, RENORMALIZE: tl.constexpr,
                   CORRECTED: tl.constexpr, PDL: tl.constexpr):
    """Pick the experts of one row by the sigmoids of its logits fp32, as ``choose_reference`` does."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    x, choice = tl.arange(0, X_PAD), tl.arange(0, K_PAD)
    scores = tl.sigmoid(tl.load(logits_ptr + row.to(tl.int64) * logits_row + x, mask=x < X, other=0.0))
    wanted = scores
    if CORRECTED:
        wanted += tl.load(correction_ptr + x, mask=x < X, other=0.0)
    key = _keys(wanted, x, X, X_PAD)
    ids = tl.zeros([K_PAD], tl.int32)
    weights = tl.zeros([K_PAD], tl.float32)
    for k in tl.static_range(TOP_K):
        expert = X_PAD - 1 - (tl.max(key, 0) & 0xFFFFFFFF).to(tl.int32)
        ids = tl.where(choice == k, expert, ids)
        weights = tl.where(choice == k, tl.sum(tl.where(x == expert, scores, 0.0), 0), weights)
        key = tl.where(x == expert, -0x8000000000000000, key)
    if RENORMALIZE:
        weights = weights / tl.maximum(tl.sum(weights, 0), 1e-20)
    at = row.to(tl.int64) * TOP_K + choice
    tl.store(ids_ptr + at, ids, mask=choice < TOP_K)
    tl.store(weights_ptr + at, weights * scale, mask=choice < TOP_K)


@jit
def _counted(ids_ptr, first, stop, X_PAD: tl.constexpr, CHUNK: tl.constexpr):
    """Number of the pairs first .. stop that each expert has: [X_PAD]."""
    q = tl.arange(0, CHUNK)
    found = tl.zeros([X_PAD], tl.int32)
    for start in range(first, stop, CHUNK):
        live = start + q < stop
        found += tl.histogram(tl.load(ids_ptr + start + q, mask=live, other=0), X_PAD, mask=live)
    return found


@jit
def _list_tiles(total, block, num_blocks, tiles_ptr, num_tiles_ptr, X_PAD: tl.constexpr, BLOCK_M: tl.constexpr):
    """This block's share of the tiles of ``total`` [X_PAD] pairs of each expert: (expert, first, stop), sorted pairs
    first .. stop."""
    x = tl.arange(0, X_PAD)
    first = tl.cumsum(total, 0) - total
    count = (total + BLOCK_M - 1) // BLOCK_M
    tile = tl.cumsum(count, 0) - count
    for i in range(block, tl.max(count, 0), num_blocks):
        at = tiles_ptr + (tile + i) * 3
        tl.store(at, x, mask=i < count)
        tl.store(at + 1, first + i * BLOCK_M, mask=i < count)
        tl.store(at + 2, tl.minimum(first + (i + 1) * BLOCK_M, first + total), mask=i < count)
    if block == 0:
        tl.store(num_tiles_ptr, tl.sum(count, 0))


@jit(do_not_specialize=["num_pairs"])
def _sort(ids_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_pairs, X_PAD: tl.constexpr, BLOCK_P: tl.constexpr,
          CHUNK: tl.constexpr,
          BLOCK_M: tl.constexpr, PDL: tl.constexpr):
    """Few pairs: the place of each is the number of pairs that come before it, by expert and then by row. The last
    program lists the tiles."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    if block < tl.num_programs(0) - 1:
        p, q = block * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, CHUNK)
        mine = tl.load(ids_ptr + p, mask=p < num_pairs, other=0) * num_pairs + p
        before = tl.zeros([BLOCK_P, CHUNK], tl.int32)
        for start in range(0, num_pairs, CHUNK):
            theirs = tl.load(ids_ptr + start + q, mask=start + q < num_pairs, other=X_PAD) * num_pairs + start + q
            before += (theirs[None, :] < mine[:, None]).to(tl.int32)
        tl.store(order_ptr + tl.sum(before, 1), p, mask=p < num_pairs)
    else:
        _list_tiles(_counted(ids_ptr, 0, num_pairs, X_PAD, CHUNK), 0, 1, tiles_ptr, num_tiles_ptr, X_PAD, BLOCK_M)


@jit(do_not_specialize=["num_pairs"])
def _rank(ids_ptr, ranks_ptr, counts_ptr, num_pairs, X: tl.constexpr, X_PAD: tl.constexpr, BLOCK_P: tl.constexpr,
          PART: tl.constexpr,
          PDL: tl.constexpr):
    """Many pairs: the rank [P] of each among those of its block and expert, and counts [B, X]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, x = tl.program_id(0), tl.arange(0, X_PAD)
    first = block * BLOCK_P
    stop = tl.minimum(first + BLOCK_P, num_pairs)
    q = first + tl.arange(0, BLOCK_P)
    theirs = tl.load(ids_ptr + q, mask=q < stop, other=-1)
    for part in range(first, stop, PART):
        p = part + tl.arange(0, PART)
        mine = tl.load(ids_ptr + p, mask=p < stop, other=0)
        before = (theirs[None, :] == mine[:, None]) & (q[None, :] < p[:, None])
        tl.store(ranks_ptr + p, tl.sum(before.to(tl.int32), 1), mask=p < stop)
    tl.store(counts_ptr + block * X + x, _counted(ids_ptr, first, stop, X_PAD, BLOCK_P), mask=x < X)


@jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place(ids_ptr, ranks_ptr, counts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_pairs, num_blocks, X: tl.constexpr,
           X_PAD: tl.constexpr,
           BLOCK_P: tl.constexpr, PART: tl.constexpr, COUNT_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
           PDL: tl.constexpr):
    """Sort a block of many pairs. Each program adds up all blocks' counts for itself, which is cheaper than another
    launch."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, x = tl.program_id(0), tl.arange(0, X_PAD)
    total = tl.zeros([COUNT_BLOCKS, X_PAD], tl.int32)
    before = tl.zeros([COUNT_BLOCKS, X_PAD], tl.int32)
    for start in range(0, num_blocks, COUNT_BLOCKS):
        b = start + tl.arange(0, COUNT_BLOCKS)[:, None]
        counts = tl.load(counts_ptr + b * X + x[None, :], mask=(b < num_blocks) & (x < X)[None, :], other=0)
        total += counts
        before += tl.where(b < block, counts, 0)
    total = tl.sum(total, 0)
    base = tl.cumsum(total, 0) - total + tl.sum(before, 0)
    stop = tl.minimum((block + 1) * BLOCK_P, num_pairs)
    for part in range(block * BLOCK_P, stop, PART):
        p = part + tl.arange(0, PART)
        mine = tl.load(ids_ptr + p, mask=p < stop, other=0)
        place = tl.sum(tl.where(x[None, :] == mine[:, None], base[None, :], 0), 1)
        place += tl.load(ranks_ptr + p, mask=p < stop, other=0)
        tl.store(order_ptr + place, p, mask=p < stop)
    _list_tiles(total, block, num_blocks, tiles_ptr, num_tiles_ptr, X_PAD, BLOCK_M)


class Routing(NamedTuple):
    """A step's routing. weights [T, K] fp32, ids [T, K] int32. order [P] int32: pairs (row * K + choice) sorted by
    expert. tiles [n, 3] int32: expert, first and stop in ``order``; num_tiles [1] int32: the number of tiles in use."""

    weights: torch.Tensor
    ids: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor


def max_tiles(num_rows: int, num_experts: int, top_k: int, block_m: int) -> int:
    """The most tiles that any routing can need: every expert with rows may leave one tile nearly empty."""
    pairs = num_rows * top_k
    return min(pairs, (pairs + min(num_experts, pairs) * (block_m - 1)) // block_m)


def choose_sigmoid_triton(logits_TX: torch.Tensor, correction_X: torch.Tensor | None, top_k: int, renormalize: bool,
                          scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``choose_reference`` of the sigmoids of logits fp32, for one group: weights fp32 and ids int32, [T, K]
    each."""
    num_rows, num_experts = logits_TX.shape
    assert logits_TX.dtype == torch.float32 and logits_TX.stride(1) == 1 and 0 < top_k <= num_experts, \
        "dense rows of logits, at most one pair an expert"
    weights = torch.empty((num_rows, top_k), dtype=torch.float32, device=logits_TX.device)
    ids = torch.empty((num_rows, top_k), dtype=torch.int32, device=logits_TX.device)
    overlap, x_pad = pdl(logits_TX.device), max(32, next_power_of_2(num_experts))
    if num_rows:
        _route_sigmoid[(num_rows,)](
            logits_TX, logits_TX if correction_X is None else correction_X, weights, ids, logits_TX.stride(0), scale,
            X=num_experts, X_PAD=x_pad, TOP_K=top_k, K_PAD=next_power_of_2(top_k), RENORMALIZE=renormalize,
            CORRECTED=correction_X is not None, PDL=overlap, num_warps=max(1, x_pad // 512), launch_pdl=overlap)
    return weights, ids


def route_triton(logits_TX: torch.Tensor, top_k: int, renormalize: bool, block_m: int,
                 routed: tuple[torch.Tensor, torch.Tensor] | None = None) -> Routing:
    """Route and sort on the device, in two launches, or three where there are many pairs. A row's bits depend on its
    logits alone. ``routed``: weights fp32 and ids int32, [T, K] each and dense, that were found already."""
    num_rows, num_experts = logits_TX.shape
    assert num_rows and logits_TX.stride(1) == 1 and 0 < top_k <= num_experts, \
        "dense rows of logits, at most one pair an expert"
    pairs, x_pad = num_rows * top_k, max(32, next_power_of_2(num_experts))  # a histogram has at least a lane a bin

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits_TX.device)

    order = ints(pairs)
    tiles, num_tiles = ints(max_tiles(num_rows, num_experts, top_k, block_m), 3), ints(1)
    overlap = pdl(logits_TX.device)
    early = {"PDL": overlap, "launch_pdl": overlap}
    if routed is not None:
        weights, ids = routed
        assert ids.dtype == torch.int32 and ids.is_contiguous() and weights.is_contiguous(), "dense, int32"
    else:
        weights = torch.empty((num_rows, top_k), dtype=torch.float32, device=logits_TX.device)
        ids = ints(num_rows, top_k)
        _route[(num_rows,)](logits_TX, weights, ids, logits_TX.stride(0), X=num_experts, X_PAD=x_pad, TOP_K=top_k,
                            K_PAD=next_power_of_2(top_k),
                            RENORMALIZE=renormalize, num_warps=max(1, x_pad // 512), **early)
    if pairs <= FEW_PAIRS:
        _sort[(cdiv(pairs, PART) + 1,)](ids, order, tiles, num_tiles, pairs, X_PAD=x_pad, BLOCK_P=PART, CHUNK=BLOCK,
                                        BLOCK_M=block_m, num_warps=4, **early)
        return Routing(weights, ids, order, tiles, num_tiles)
    blocks = cdiv(pairs, BLOCK)
    ranks, counts = ints(pairs), ints(blocks, num_experts)
    sizes = dict(X=num_experts, X_PAD=x_pad, BLOCK_P=BLOCK, num_warps=8, **early)
    _rank[(blocks,)](ids, ranks, counts, pairs, PART=4 * PART, **sizes)
    _place[(blocks,)](ids, ranks, counts, order, tiles, num_tiles, pairs, blocks, PART=max(8, ELEMENTS // x_pad),
                      COUNT_BLOCKS=max(8, ELEMENTS // x_pad), BLOCK_M=block_m, **sizes)
    return Routing(weights, ids, order, tiles, num_tiles)
