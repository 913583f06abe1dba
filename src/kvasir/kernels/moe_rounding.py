"""Token rounding (SonicMoE, arXiv:2512.14080, section 5): each expert's rows become a multiple of a tile. Lossy.

A grouped product computes whole tiles. Where an expert has 130 rows and a tile holds 128, the second tile is nearly
empty. Token rounding chooses the top-k experts of each row first. Then it rounds the number of rows of each expert to a
multiple of the tile: it drops the rows that weigh the expert least, or adds the rows that want it most among those that
did not choose it. So which experts a row sees depends on the other rows of its step, and some rows see fewer than
``top_k`` experts, or none.

The rank of a row at an expert: first all rows that chose it, by their weights, then all others, by the expert's
probability; the lower row first among equals. Rows that are *fixed* keep their top-k, count for the tile, and are never
added: decodes, and drafts that are verified. Source of the rank and of the three ways to round: the paper's algorithm 4
and the token-rounding benchmark of its repository. What differs: there the weight of a pair is the expert's
probability, whatever the model does. Here a row that chose the expert keeps its weight, and a row that is added has the
probability over the same sum: that of the row's own top-k where the model renormalises.

Five launches and no host read: ``_rank`` writes a sortable key for each row and expert, ``_threshold`` finds each
expert's count and least key, ``_list_rows`` lists rows and tiles, ``_list_pairs`` lists the pairs of each row, and
``_sum_listed`` adds them. Bytes of the first four: some 20 a row and expert.

Legend: T rows, X experts, K experts per row, M rows of a tile, P pairs after rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from kvasir.kernels._triton import cdiv, jit, next_power_of_2, pdl, tl
from kvasir.kernels.moe_routing import Routing

Direction = Literal["nearest", "up", "down"]
DIRECTIONS: tuple[Direction, ...] = ("nearest", "up", "down")
TILE = 128  # rows of a tile, as published; every tile of the kernels for prompts divides it
ELEMENTS = 2048  # rows x experts of a program: with more, registers do not hold them
CHUNK = 4096  # rows that a program looks at at a time


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rounding of each expert's rows, to a multiple of ``tile``."""

    direction: Direction
    tile: int = TILE

    def least_rows(self, num_experts: int, top_k: int) -> int:
        """Rows from which a step is rounded: with fewer, an expert has less than a tile on average, and rounding would
        take all rows of many experts away."""
        return cdiv(self.tile * num_experts, top_k)

    def most_pairs(self, num_rows: int, num_experts: int, top_k: int) -> int:
        """The most pairs that rounding can leave."""
        more = {"nearest": self.tile // 2, "up": self.tile - 1, "down": 0}[self.direction]
        return min(num_rows * num_experts, num_rows * top_k + num_experts * more)


def rounded_counts(counts_X: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Counts int64 as multiples of the tile. A half goes to the even multiple, as torch rounds."""
    tiles = counts_X / rounding.tile
    tiles = {"nearest": tiles.round, "up": tiles.ceil, "down": tiles.floor}[rounding.direction]()
    return tiles.long() * rounding.tile


def round_reference(logits_TX: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor, renormalize: bool,
                    rounding: Rounding, fixed_T: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs after rounding [T, X] bool, and their weights [T, X] in the weights' dtype, 0 elsewhere.

    ``weights_TK`` and ``ids_TK`` are those of ``moe_routing.route_reference``. ``fixed_T`` bool: None: no row is.
    """
    num_rows = len(logits_TX)
    probabilities_TX = logits_TX.softmax(-1, dtype=weights_TK.dtype)
    chosen_TX = torch.zeros_like(logits_TX, dtype=torch.bool).scatter_(1, ids_TK.long(), True)
    own_TX = torch.zeros_like(probabilities_TX).scatter_(1, ids_TK.long(), weights_TK)
    sums_T1 = (probabilities_TX * chosen_TX).sum(-1, keepdim=True) if renormalize else 1.0
    fixed_T1 = torch.zeros_like(chosen_TX[:, :1]) if fixed_T is None else fixed_T.bool().unsqueeze(1)
    counts_X, fixed_X = chosen_TX.sum(0), (chosen_TX & fixed_T1).sum(0)
    most_X = fixed_X + (num_rows - fixed_T1.sum())
    wanted_X = rounded_counts(counts_X, rounding).clamp(min=fixed_X, max=most_X)
    kinds_TX = torch.where(chosen_TX, torch.where(fixed_T1, 3, 2), torch.where(fixed_T1, 0, 1))
    values_TX = torch.where(chosen_TX & ~fixed_T1, own_TX, probabilities_TX).float().nan_to_num(0.0)
    keys_TX = values_TX.view(torch.int32).long() * (kinds_TX != 3) + (kinds_TX << 32)
    order_TX = keys_TX.argsort(dim=0, descending=True, stable=True)
    places_TX = torch.empty_like(order_TX).scatter_(
        0, order_TX, torch.arange(num_rows, device=order_TX.device).unsqueeze(1).expand_as(order_TX))
    kept_TX = places_TX < wanted_X
    return kept_TX, torch.where(chosen_TX, own_TX, probabilities_TX / sums_T1) * kept_TX


# -------------------------------------------------------------------------------------------------------------- kernels


@jit
def _row_block(logits_ptr, weights_ptr, ids_ptr, t, x, num_rows, logits_row, X: tl.constexpr, TOP_K: tl.constexpr):
    """Read the rows t at the experts x: probabilities, whether the row chose the expert, its weight there, and the sum
    of the probabilities that the row chose [rows, 1]."""
    inside = (t < num_rows)[:, None] & (x < X)[None, :]
    logits = tl.load(logits_ptr + t.to(tl.int64)[:, None] * logits_row + x[None, :], mask=inside,
                     other=-float("inf")).to(tl.float32)
    most = tl.max(logits, 1)
    powers = tl.exp(logits - tl.where(t < num_rows, most, 0.0)[:, None])
    probabilities = powers / tl.where(t < num_rows, tl.sum(powers, 1), 1.0)[:, None]
    chosen = tl.zeros(logits.shape, tl.int32)
    weights = tl.zeros(logits.shape, tl.float32)
    for k in tl.static_range(TOP_K):
        at = t * TOP_K + k
        mine = x[None, :] == tl.load(ids_ptr + at, mask=t < num_rows, other=-1)[:, None]
        chosen += mine.to(tl.int32)
        weights = tl.where(mine, tl.load(weights_ptr + at, mask=t < num_rows, other=0.0)[:, None], weights)
    total = tl.sum(tl.where(chosen > 0, probabilities, 0.0), 1)[:, None]
    return probabilities, chosen, weights, total


@jit(do_not_specialize=["num_rows", "logits_row"])
def _rank(logits_ptr, weights_ptr, ids_ptr, fixed_ptr, keys_ptr, num_rows, logits_row, X: tl.constexpr,
          X_PAD: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, ANY_FIXED: tl.constexpr, PDL: tl.constexpr):
    """Keys [X, T] int32 of a block of rows: the larger, the sooner an expert takes the row; -1: never.

    The bits of a number from 0 to 1 are below 2^30 and in its order. A row that chose the expert has 2^30 more, a fixed
    one the largest key.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t, x = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, X_PAD)
    probabilities, chosen, weights, _ = _row_block(logits_ptr, weights_ptr, ids_ptr, t, x, num_rows, logits_row, X,
                                                   TOP_K)
    value = tl.where(chosen > 0, weights, probabilities)
    value = tl.where(value == value, value, 0.0)  # a row of NaN comes last, and its key is a key
    key = value.to(tl.int32, bitcast=True) + tl.where(chosen > 0, 1 << 30, 0)
    if ANY_FIXED:
        fixed = tl.load(fixed_ptr + t, mask=t < num_rows, other=0).to(tl.int32)[:, None]
        key = tl.where(fixed != 0, tl.where(chosen > 0, 0x7FFFFFFF, -1), key)
    tl.store(keys_ptr + x.to(tl.int64)[None, :] * num_rows + t[:, None], key,
             mask=(t < num_rows)[:, None] & (x < X)[None, :])


@jit
def _at_least(keys_ptr, least, num_rows, CHUNK: tl.constexpr):
    """Number of keys of an expert that are ``least`` or more."""
    t = tl.arange(0, CHUNK)
    found = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_rows, CHUNK):
        found += (tl.load(keys_ptr + start + t, mask=start + t < num_rows, other=-1) >= least).to(tl.int32)
    return tl.sum(found, 0)


@jit(do_not_specialize=["num_rows"])
def _threshold(keys_ptr, counts_ptr, least_ptr, ties_ptr, num_rows, UP: tl.constexpr, DOWN: tl.constexpr,
               TILE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Find the rows that one expert gets after rounding, the least key of these, and how many of them have it.

    The least key is found bit by bit, from the top.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    keys_ptr += expert.to(tl.int64) * num_rows
    count = _at_least(keys_ptr, 1 << 30, num_rows, CHUNK)
    tiles, rest = count // TILE, count % TILE
    if UP:
        tiles += (rest > 0).to(tl.int32)
    elif not DOWN:
        tiles += ((2 * rest > TILE) | ((2 * rest == TILE) & (tiles % 2 == 1))).to(tl.int32)
    wanted = tl.minimum(tl.maximum(tiles * TILE, _at_least(keys_ptr, 0x7FFFFFFF, num_rows, CHUNK)),
                        _at_least(keys_ptr, 0, num_rows, CHUNK))
    least = 0
    for i in range(31):
        more = least | (1 << (30 - i))
        if _at_least(keys_ptr, more, num_rows, CHUNK) >= wanted:
            least = more
    above = 0
    if least < 0x7FFFFFFF:
        above = _at_least(keys_ptr, least + 1, num_rows, CHUNK)
    tl.store(counts_ptr + expert, wanted)
    tl.store(least_ptr + expert, least)
    tl.store(ties_ptr + expert, wanted - above)


@jit(do_not_specialize=["num_rows"])
def _list_rows(keys_ptr, counts_ptr, least_ptr, ties_ptr, rows_ptr, places_ptr, at_ptr, tiles_ptr, num_tiles_ptr,
               num_rows, X: tl.constexpr, X_PAD: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
               BLOCK_M: tl.constexpr, PDL: tl.constexpr):
    """List the rows of one expert, in ascending order, and its tiles. ``at`` [X, T]: the place of each pair, -1: there
    is no such pair. ``places`` [P]: each pair's own place."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, x = tl.program_id(0), tl.arange(0, X_PAD)
    counts = tl.load(counts_ptr + x, mask=x < X, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(x < expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(x < expert, tiles, 0), 0)
    count = tl.load(counts_ptr + expert)
    least, ties = tl.load(least_ptr + expert), tl.load(ties_ptr + expert)
    if expert == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles, 0))
    i = tl.arange(0, TILES)
    for start in range(0, (count + BLOCK_M - 1) // BLOCK_M, TILES):
        begin = first + (start + i) * BLOCK_M
        to, live = tiles_ptr + (first_tile + start + i) * 3, begin < first + count
        tl.store(to, expert + tl.zeros([TILES], tl.int32), mask=live)
        tl.store(to + 1, begin, mask=live)
        tl.store(to + 2, tl.minimum(begin + BLOCK_M, first + count), mask=live)
    base = expert.to(tl.int64) * num_rows
    t = tl.arange(0, CHUNK)
    listed, tied = 0, 0
    for start in range(0, num_rows, CHUNK):
        live = start + t < num_rows
        key = tl.load(keys_ptr + base + start + t, mask=live, other=-1)
        equal = ((key == least) & live).to(tl.int32)
        kept = ((key > least) | ((equal > 0) & (tied + tl.cumsum(equal, 0) <= ties))).to(tl.int32)
        place = first + listed + tl.cumsum(kept, 0) - 1
        tl.store(rows_ptr + place, start + t, mask=kept > 0)
        tl.store(places_ptr + place, place, mask=kept > 0)
        tl.store(at_ptr + base + start + t, tl.where(kept > 0, place, -1), mask=live)
        listed += tl.sum(kept, 0)
        tied += tl.sum(equal, 0)


@jit(do_not_specialize=["num_rows", "logits_row"])
def _list_pairs(logits_ptr, weights_ptr, ids_ptr, at_ptr, found_ptr, found_weights_ptr, num_found_ptr, num_rows,
                logits_row, X: tl.constexpr, X_PAD: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr,
                BLOCK_T: tl.constexpr, PDL: tl.constexpr):
    """The places and weights [T, X] of the pairs of a block of rows, by expert, and their numbers [T]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t, x = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, X_PAD)
    probabilities, chosen, weights, total = _row_block(logits_ptr, weights_ptr, ids_ptr, t, x, num_rows, logits_row, X,
                                                       TOP_K)
    if RENORMALIZE:
        probabilities /= tl.where((t < num_rows)[:, None], total, 1.0)
    inside = (t < num_rows)[:, None] & (x < X)[None, :]
    place = tl.load(at_ptr + x.to(tl.int64)[None, :] * num_rows + t[:, None], mask=inside, other=-1)
    kept = (place >= 0).to(tl.int32)
    to = t.to(tl.int64)[:, None] * X + tl.cumsum(kept, 1) - 1
    tl.store(found_ptr + to, place, mask=kept > 0)
    tl.store(found_weights_ptr + to, tl.where(chosen > 0, weights, probabilities), mask=kept > 0)
    tl.store(num_found_ptr + t, tl.sum(kept, 1), mask=t < num_rows)


@jit
def _sum_listed(y_ptr, found_ptr, weights_ptr, num_found_ptr, out_ptr, E: tl.constexpr, X: tl.constexpr,
                BLOCK_E: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr):
    """BLOCK_E outputs of one row: its pairs' results y [P, E] times their weights, by expert, in fp32, plus the old
    value of out if RESIDUAL."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    acc = tl.zeros([BLOCK_E], tl.float32)
    for i in range(0, tl.load(num_found_ptr + row)):
        place = tl.load(found_ptr + row * X + i).to(tl.int64)
        acc += tl.load(weights_ptr + row * X + i) * tl.load(y_ptr + place * E + e, mask=e < E,
                                                            other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(out_ptr + row * E + e, mask=e < E, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * E + e, acc.to(out_ptr.dtype.element_ty), mask=e < E)


# ------------------------------------------------------------------------------------------------------------ launchers


class Rounded(NamedTuple):
    """The pairs of a step after rounding, sorted by expert. ``gather``: ``order`` is each pair's row; ``stay``: its
    ``order`` is each pair's own place. ``found`` [T, X] int32, ``weights`` [T, X] fp32: the places and weights of each
    row's pairs, of which ``num_found`` [T] int32 are in use. ``at`` [X, T] int32: a pair's place; -1: there is none."""

    gather: Routing
    stay: Routing
    found: torch.Tensor
    weights: torch.Tensor
    num_found: torch.Tensor
    at: torch.Tensor


def round_triton(logits_TX: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor, renormalize: bool,
                 rounding: Rounding, block_m: int, fixed_T: torch.Tensor | None = None) -> Rounded:
    """Compute ``round_reference`` and list the pairs as grouped products read them, in tiles of ``block_m``. The host
    reads nothing back. ``weights_TK`` fp32 and ``ids_TK`` int32 are dense, as is ``fixed_T``."""
    (num_rows, num_experts), top_k, device = logits_TX.shape, ids_TK.shape[1], logits_TX.device
    assert num_rows and logits_TX.stride(1) == 1 and ids_TK.dtype == torch.int32 and ids_TK.is_contiguous(), \
        "dense rows"
    x_pad = max(16, next_power_of_2(num_experts))

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    keys, at = ints(num_experts, num_rows), ints(num_experts, num_rows)
    counts, least, ties = ints(num_experts), ints(num_experts), ints(num_experts)
    most = rounding.most_pairs(num_rows, num_experts, top_k)
    rows, places = ints(most), ints(most)
    tiles, num_tiles = ints(min(most, cdiv(most + num_experts * (block_m - 1), block_m)), 3), ints(1)
    found, num_found = ints(num_rows, num_experts), ints(num_rows)
    weights = torch.empty(num_rows, num_experts, dtype=torch.float32, device=device)
    overlap = pdl(device)
    early = {"PDL": overlap, "launch_pdl": overlap}
    block_t = max(1, ELEMENTS // x_pad)
    chunk = min(CHUNK, next_power_of_2(num_rows))
    shape = {"X": num_experts, "X_PAD": x_pad}
    _rank[(cdiv(num_rows, block_t),)](
        logits_TX, weights_TK, ids_TK, logits_TX if fixed_T is None else fixed_T, keys, num_rows, logits_TX.stride(0),
        **shape, TOP_K=top_k, BLOCK_T=block_t, ANY_FIXED=fixed_T is not None, num_warps=4, **early)
    _threshold[(num_experts,)](
        keys, counts, least, ties, num_rows, UP=rounding.direction == "up", DOWN=rounding.direction == "down",
        TILE=rounding.tile, CHUNK=chunk, num_warps=8, **early)
    _list_rows[(num_experts,)](
        keys, counts, least, ties, rows, places, at, tiles, num_tiles, num_rows, **shape, CHUNK=chunk, TILES=32,
        BLOCK_M=block_m, num_warps=8, **early)
    _list_pairs[(cdiv(num_rows, block_t),)](
        logits_TX, weights_TK, ids_TK, at, found, weights, num_found, num_rows, logits_TX.stride(0), **shape,
        TOP_K=top_k, RENORMALIZE=renormalize, BLOCK_T=block_t, num_warps=4, **early)
    gather = Routing(weights_TK, ids_TK, rows, tiles, num_tiles)
    return Rounded(gather, gather._replace(order=places), found, weights, num_found, at)


def sum_listed_triton(y_PE: torch.Tensor, rounded: Rounded, out_TE: torch.Tensor, residual: bool) -> None:
    """Write each row's weighted sum to ``out_TE``, or add it there."""
    (num_rows, dim), overlap = out_TE.shape, pdl(out_TE.device)
    block_e = min(1024, next_power_of_2(dim))
    _sum_listed[(num_rows, cdiv(dim, block_e))](
        y_PE, rounded.found, rounded.weights, rounded.num_found, out_TE, E=dim, X=rounded.found.shape[1],
        BLOCK_E=block_e, RESIDUAL=residual, num_warps=4, PDL=overlap, launch_pdl=overlap)


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the test grid. ``fixed``: one row in so many is fixed (0: none). ``same``: all rows have the same
    logits, so that every rank is a tie."""

    rows: int
    experts: int = 8
    top_k: int = 2
    direction: Direction = "nearest"
    tile: int = 16
    fixed: int = 0
    renormalize: bool = True
    same: bool = False
    dim: int = 32
    width: int = 16


def grid() -> Iterator[Case]:
    for direction in DIRECTIONS:
        for rows in (1, 33, 150):
            yield Case(rows=rows, direction=direction)
        yield Case(rows=200, experts=5, top_k=3, direction=direction, tile=32, fixed=4, renormalize=False)
        yield Case(rows=90, experts=40, top_k=4, direction=direction, tile=8, fixed=3)
        yield Case(rows=75, direction=direction, same=True)
    yield Case(rows=20, experts=5, top_k=3, fixed=4, renormalize=False, tile=8, dim=72)
    yield Case(rows=24, experts=4, top_k=4, direction="up", tile=64)  # more than there are rows
    yield Case(rows=24, experts=1, top_k=1)  # a half goes to the even multiple
    yield Case(rows=30, fixed=1)  # nothing may change
