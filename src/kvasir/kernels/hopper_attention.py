"""Attention of long spans for Hopper, warp-specialised as FlashAttention 3 (arXiv:2407.08608): the loop of ``dense_attention``,
which stays the readable version and the fallback, with the warps, the shared memory and the barriers placed by hand.

One warp fetches: it keeps a ring of key blocks and one of value blocks filled with tile copies, and gives its registers away.
Two warpgroups compute, 64 rows each: the product of a block's keys is issued together with that of the values of the block
before it, whose sum shrinks while the former runs, and the exponentials are taken while the latter runs.

Barriers are a pair for every slot of a ring: ``full`` changes phase when a copy's bytes have arrived, ``free`` when all consumers
have. A program's block i is the (i // STAGES)-th of slot i % STAGES: consumers wait for that phase of ``full``, the producer for the
one before it of ``free``, which a fresh barrier passes at once.

Legend: M rows x heads of a consumer, N keys of a block, D head dim, the rest as in ``dense_attention``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.kernels._triton import Launches, gl, gluon_jit, hopper, next_power_of_2
from kvasir.kernels.hardware import multiprocessors

if hopper is not None:
    mbarrier = hopper.mbarrier


@dataclass(frozen=True, slots=True)
class HopperShape:
    """How the kernel is built. ``consumers``: partitions that compute, with a warpgroup for every 64 of their rows. 0: no warp is set
    apart, and one thread fetches a slot's next block when all have read the last. ``turns``: two consumers take turns to issue their
    products, so that one's exponentials meet the other's products. ``stay``: a program a multiprocessor, for all its tiles, so that the
    next one's keys are fetched while a result is stored."""

    block_m: int = 128
    block_n: int = 128
    stages: int = 2
    consumers: int = 2
    turns: bool = False
    stay: bool = False

    @property
    def warps(self) -> int:
        """Of a consumer."""
        return self.block_m // 16 // max(1, self.consumers)

    @property
    def registers(self) -> int:
        """Of a consumer's thread: 24, the fewest there are, stay with each of the fetching warpgroup."""
        return min(240, (512 - 24) * 64 // self.block_m // 8 * 8)


VARIANTS = (HopperShape(), HopperShape(stay=True), HopperShape(turns=True, stay=True), HopperShape(stages=3, stay=True))  # timed


def can_serve_hopper(dtype: torch.dtype, dim: int, share: int, capped: bool, sinks: bool) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and dim in (64, 128) and share <= 64 and not capped and not sinks


@gluon_jit
def _count(tiles, STAY: gl.constexpr):
    """How many of the launch's tiles this program takes: one a round, in rounds that go to and fro, so that heavy and light ones add up."""
    if not STAY:
        return 1
    rounds = tiles // gl.num_programs(0)
    return rounds + (_tile(rounds) < tiles).to(gl.int32)


@gluon_jit
def _tile(taken):
    program, programs = gl.program_id(0), gl.num_programs(0)
    return taken * programs + gl.where(taken % 2 == 0, program, programs - 1 - program)


@gluon_jit
def _place(tile, spans, ROWS: gl.constexpr, N: gl.constexpr, STAY: gl.constexpr):
    """Of a tile: its KV head, the scratch's row of its first key, its context, first row, the span's first row and length, and the blocks that
    every row sees and that any row sees. Rounds need tiles of all KV heads by weight; otherwise one KV head follows the other."""
    items_ptr, context_ptr, row_start_ptr, slots, groups, tiles = spans
    items = tiles // groups
    group, item = tile // items, tile % items
    if STAY:
        group, item = tile % groups, tile // groups
    span = gl.load(items_ptr + item * 3)
    first_row = gl.load(items_ptr + item * 3 + 1)
    base = group * slots + gl.load(items_ptr + item * 3 + 2)
    context = gl.load(context_ptr + span)
    span_row = gl.load(row_start_ptr + span)
    length = gl.load(row_start_ptr + span + 1) - span_row
    whole = (context + first_row + 1) // N
    blocks = (context + gl.minimum(first_row + ROWS, length) + N - 1) // N
    return group, base, context, first_row, span_row, length, whole, blocks


@gluon_jit
def _await(barriers, i, wanted, STAGES: gl.constexpr):
    """Until the program's block i has arrived."""
    mbarrier.wait(barriers.index(i % STAGES), i // STAGES & 1, pred=wanted)


@gluon_jit
def _fetch(kept, row, i, wanted, STAGES: gl.constexpr):
    """Start the copy of the program's block i into its slot, which is free."""
    desc, ring, full, _ = kept
    barrier = full.index(i % STAGES)
    mbarrier.expect(barrier, desc.block_type.nbytes, pred=wanted)
    hopper.tma.async_copy_global_to_shared(desc, [row, 0], barrier, ring.index(i % STAGES), pred=wanted)


@gluon_jit
def _produce(k, v, spans, ROWS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, STAY: gl.constexpr):
    """The fetching warp, in the order in which a tile's blocks are read: K0, K1, V0, K2, V1, ..."""
    done = 0
    for taken in range(_count(spans[5], STAY)):
        _, base, _, _, _, _, _, blocks = _place(_tile(taken), spans, ROWS, N, STAY)
        for j in range(blocks + 1):
            i = done + j
            mbarrier.wait(k[3].index(i % STAGES), (i // STAGES & 1) ^ 1, pred=j < blocks)
            _fetch(k, base + j * N, i, j < blocks, STAGES)
            if j > 0:
                mbarrier.wait(v[3].index((i - 1) % STAGES), ((i - 1) // STAGES & 1) ^ 1)
                _fetch(v, base + (j - 1) * N, i - 1, True, STAGES)
        done += blocks


@gluon_jit
def _release(kept, row, i, wanted, STAGES: gl.constexpr, APART: gl.constexpr):
    """These warps have read the program's block i: tell the producer, or where there is none, fetch the slot's next block, if there is one in
    the tile, from ``row``."""
    if APART:
        mbarrier.arrive(kept[3].index(i % STAGES))  # one thread, after a barrier of this consumer's warps
    else:
        gl.thread_barrier()
        _fetch(kept, row, i + STAGES, wanted, STAGES)


@gluon_jit
def _rows(first_row, span_row, length, first_head, m, R: gl.constexpr, R_PAD: gl.constexpr):
    """Row and head of the tile's m-th, and whether there is one."""
    local = first_row + m // R_PAD
    return (span_row + local).to(gl.int64), first_head + m % R_PAD, (m % R_PAD < R) & (local < length)


@gluon_jit
def _weigh(s, seen, factor, top, MASKED: gl.constexpr):
    """``weigh_block``, where every row has seen a key: all see the first."""
    if MASKED:
        s = gl.where(seen, s, -float("inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * factor)
    return gl.exp2(s * factor - new_top[:, None]), new_top, gl.exp2(top - new_top)


@gluon_jit
def _fold(q, k, v, turn, p, shrink, acc, top, total, position, n, factor, base, j, blocks, done, folded, ME: gl.constexpr, N: gl.constexpr,
          STAGES: gl.constexpr, APART: gl.constexpr, TURNS: gl.constexpr, MASKED: gl.constexpr):
    """Weights of block j, whose keys have arrived, and the sum with the values of block j - 1, whose weights are ``p`` and for which the sum
    before it shrinks by ``shrink``. ``done``, ``folded``: blocks of this program's earlier tiles, and calls for them."""
    M: gl.constexpr = q.shape[0]
    scores: gl.constexpr = n.type.layout.parent
    operand: gl.constexpr = p.type.layout
    i = done + j
    if TURNS:  # the first consumer begins: its barrier is one phase ahead
        mbarrier.wait(turn.index(ME), (folded + j + ME) & 1)
    s = hopper.warpgroup_mma(q, k[1].index(i % STAGES).permute((1, 0)), gl.zeros([M, N], gl.float32, scores), use_acc=False, is_async=True)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, operand.parent))[:, None]
    _await(v[2], i - 1, True, STAGES)
    acc = hopper.warpgroup_mma(p, v[1].index((i - 1) % STAGES), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turn.index(1 - ME))
    s = hopper.warpgroup_mma_wait(1, deps=(s,))
    _release(k, base + (j + STAGES) * N, i, j + STAGES < blocks, STAGES, APART)
    weights, top, shrink = _weigh(s, (j * N + n)[None, :] <= position[:, None], factor, top, MASKED)
    total = total * shrink + gl.sum(weights, 1)
    rounded = gl.convert_layout(weights.to(p.dtype), operand)
    _await(k[2], i + 1, j + 1 < blocks, STAGES)  # here, since the assembler takes no exponential past a branch, but all past the next wait
    acc, _, rounded = hopper.warpgroup_mma_wait(0, deps=(acc, p, rounded))
    _release(v, base + (j - 1 + STAGES) * N, i - 1, j - 1 + STAGES < blocks, STAGES, APART)
    return rounded, shrink, acc, top, total


@gluon_jit
def _queries(q_ptr, q_row, q_head, first_row, span_row, length, first_head, wanted, ME: gl.constexpr, R: gl.constexpr, R_PAD: gl.constexpr,
             D: gl.constexpr, M: gl.constexpr, wide: gl.constexpr):
    """This consumer's of a tile, in registers."""
    row, head, live = _rows(first_row, span_row, length, first_head, ME * M + gl.arange(0, M, gl.SliceLayout(1, wide)), R, R_PAD)
    places = row[:, None] * q_row + head[:, None] * q_head + gl.arange(0, D, gl.SliceLayout(0, wide))[None, :]
    return gl.load(q_ptr + places, mask=(live & wanted)[:, None], other=0.0)


@gluon_jit
def _consume(given, ME: gl.constexpr, H: gl.constexpr, R: gl.constexpr, R_PAD: gl.constexpr, D: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
             STAGES: gl.constexpr, CONSUMERS: gl.constexpr, TURNS: gl.constexpr, STAY: gl.constexpr, WANT_LSE: gl.constexpr):
    """Rows x heads ME * M to (ME + 1) * M of the program's tiles."""
    q_ptr, out_ptr, lse_ptr, q_row, q_head, out_row, first_group, scale, q_rows, k, v, turn, spans = given
    APART: gl.constexpr = CONSUMERS > 0
    ROWS: gl.constexpr = M * max(1, CONSUMERS) // R_PAD
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [M // 16, 1], [16, N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [M // 16, 1], [16, D, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [M // 16, 1], [1, 0])  # 16 bytes a thread, whole rows a warp
    q = q_rows.index(ME)
    n = gl.arange(0, N, gl.SliceLayout(0, scores))
    factor = scale * 1.4426950408889634
    count = _count(spans[5], STAY)
    done = 0
    group, base, context, first_row, span_row, length, whole, blocks = _place(_tile(0), spans, ROWS, N, STAY)
    rows = _queries(q_ptr, q_row, q_head, first_row, span_row, length, (first_group + group) * R, True, ME, R, R_PAD, D, M, wide)
    for taken in range(count):
        if not APART:
            for j in gl.static_range(STAGES):
                _fetch(k, base + j * N, done + j, j < blocks, STAGES)
                _fetch(v, base + j * N, done + j, j < blocks, STAGES)
        gl.thread_barrier()  # the result before has left the queries' place
        q.store(rows)
        hopper.fence_async_shared()  # products read shared memory by a proxy of their own
        gl.thread_barrier()

        folded = done - taken
        position = context + first_row + (ME * M + gl.arange(0, M, gl.SliceLayout(1, scores))) // R_PAD
        _await(k[2], done, True, STAGES)
        s = hopper.warpgroup_mma(q, k[1].index(done % STAGES).permute((1, 0)), gl.zeros([M, N], gl.float32, scores), use_acc=False)
        _release(k, base + STAGES * N, done, blocks > STAGES, STAGES, APART)
        top = gl.full([M], -float("inf"), gl.float32, gl.SliceLayout(1, scores))
        weights, top, shrink = _weigh(s, n[None, :] <= position[:, None], factor, top, True)
        total = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, sums, 2))
        acc = gl.zeros([M, D], gl.float32, sums)
        _await(k[2], done + 1, blocks > 1, STAGES)
        for j in range(1, whole):
            p, shrink, acc, top, total = _fold(q, k, v, turn, p, shrink, acc, top, total, position, n, factor, base, j, blocks, done, folded,
                                               ME, N, STAGES, APART, TURNS, False)
        for j in range(gl.maximum(whole, 1), blocks):
            p, shrink, acc, top, total = _fold(q, k, v, turn, p, shrink, acc, top, total, position, n, factor, base, j, blocks, done, folded,
                                               ME, N, STAGES, APART, TURNS, True)
        done += blocks
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
        _await(v[2], done - 1, True, STAGES)
        acc = hopper.warpgroup_mma(p, v[1].index((done - 1) % STAGES), acc, is_async=True)
        first_head, old_first_row, old_span_row, old_length = (first_group + group) * R, first_row, span_row, length
        if STAY:  # the next tile's numbers and queries are loaded meanwhile; without a next one, this one's numbers again
            more = taken + 1 < count
            group, base, context, first_row, span_row, length, whole, blocks = _place(_tile(gl.where(more, taken + 1, taken)), spans, ROWS, N, STAY)
        acc = hopper.warpgroup_mma_wait(0, deps=(acc, p))[0]
        if APART:
            mbarrier.arrive(v[3].index((done - 1) % STAGES))
        if STAY:
            rows = _queries(q_ptr, q_row, q_head, first_row, span_row, length, (first_group + group) * R, more, ME, R, R_PAD, D, M, wide)

        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, sums))[:, None]
        q.store(acc.to(q.dtype))  # all warps are past the last product with the queries; in their place the result becomes whole rows
        gl.thread_barrier()
        row, head, live = _rows(old_first_row, old_span_row, old_length, first_head, ME * M + gl.arange(0, M, gl.SliceLayout(1, wide)), R, R_PAD)
        places = row[:, None] * out_row + head[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, wide))[None, :]
        gl.store(out_ptr + places, q.load(wide), mask=live[:, None])
        if WANT_LSE:
            m = ME * M + gl.arange(0, M, gl.SliceLayout(1, scores))
            row, head, live = _rows(old_first_row, old_span_row, old_length, first_head, m, R, R_PAD)
            gl.store(lse_ptr + (row * H + head), (top + gl.log2(total)) * 0.6931471805599453, mask=live)


@gluon_jit(do_not_specialize=["slots", "first_group", "groups", "tiles"])
def _hopper_attention(q_ptr, k_desc, v_desc, out_ptr, lse_ptr, context_ptr, row_start_ptr, items_ptr, q_row, q_head, out_row, slots, first_group,
                      groups, tiles, scale, H: gl.constexpr, R: gl.constexpr, R_PAD: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr,
                      BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, TURNS: gl.constexpr, REGISTERS: gl.constexpr,
                      STAY: gl.constexpr, WANT_LSE: gl.constexpr):
    """Tiles of every KV head over dense keys [groups x slots, D]."""
    COUNT: gl.constexpr = max(1, CONSUMERS)
    M: gl.constexpr = BLOCK_M // COUNT
    q_rows = gl.allocate_shared_memory(k_desc.dtype, [COUNT, M, D], k_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=COUNT)
        mbarrier.init(v_free.index(i), count=COUNT)
    mbarrier.init(turn.index(0), count=1)
    mbarrier.init(turn.index(1), count=1)
    hopper.fence_async_shared()
    gl.thread_barrier()

    k = k_desc, k_ring, k_full, k_free
    v = v_desc, v_ring, v_full, v_free
    spans = items_ptr, context_ptr, row_start_ptr, slots, groups, tiles
    given = q_ptr, out_ptr, lse_ptr, q_row, q_head, out_row, first_group, scale, q_rows, k, v, turn, spans
    FIRST: gl.constexpr = 0  # numbers among a partition's arguments must be marked as constants
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    if CONSUMERS == 0:
        _consume(given, FIRST, H, R, R_PAD, D, M, BLOCK_N, STAGES, CONSUMERS, TURNS, STAY, WANT_LSE)
    elif CONSUMERS == 1:
        gl.warp_specialize([(_consume, (given, FIRST, H, R, R_PAD, D, M, BLOCK_N, STAGES, CONSUMERS, TURNS, STAY, WANT_LSE)),
                            (_produce, (k, v, spans, BLOCK_M // R_PAD, BLOCK_N, STAGES, STAY))], [1], [24])
    elif CONSUMERS == 2:
        gl.warp_specialize([(_consume, (given, FIRST, H, R, R_PAD, D, M, BLOCK_N, STAGES, CONSUMERS, TURNS, STAY, WANT_LSE)),
                            (_consume, (given, SECOND, H, R, R_PAD, D, M, BLOCK_N, STAGES, CONSUMERS, TURNS, STAY, WANT_LSE)),
                            (_produce, (k, v, spans, BLOCK_M // R_PAD, BLOCK_N, STAGES, STAY))], [M // 16, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([(_consume, (given, FIRST, H, R, R_PAD, D, M, BLOCK_N, STAGES, CONSUMERS, TURNS, STAY, WANT_LSE)),
                            (_consume, (given, SECOND, H, R, R_PAD, D, M, BLOCK_N, STAGES, CONSUMERS, TURNS, STAY, WANT_LSE)),
                            (_consume, (given, THIRD, H, R, R_PAD, D, M, BLOCK_N, STAGES, CONSUMERS, TURNS, STAY, WANT_LSE)),
                            (_produce, (k, v, spans, BLOCK_M // R_PAD, BLOCK_N, STAGES, STAY))], [M // 16, M // 16, 1], [REGISTERS, REGISTERS, 24])


def attend_gathered(q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_THD: torch.Tensor, lse_TH: torch.Tensor | None,
                    context_S: torch.Tensor, row_start_S: torch.Tensor, items: torch.Tensor, slots: int, share: int, first_group: int,
                    num_groups: int, scale: float, shape: HopperShape, launches: Launches) -> None:
    """The tiles ``items`` of some KV heads, over their gathered keys and values [num_groups * slots, D]."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    _, heads, dim = q_THD.shape
    layout = gl.NVMMASharedLayout(128, 16, 2)  # rows of 64 numbers, swizzled as products read them
    descriptors = [TensorDescriptor.from_tensor(x, [shape.block_n, dim], layout) for x in (k, v)]
    tiles = items.shape[0] * num_groups
    programs = min(tiles, multiprocessors(q_THD.device)) if shape.stay else tiles
    launches(
        _hopper_attention, (programs, 1, 1),
        q_THD, *descriptors, out_THD, q_THD if lse_TH is None else lse_TH, context_S, row_start_S, items, q_THD.stride(0), q_THD.stride(1),
        out_THD.stride(0), slots, first_group, num_groups, tiles, scale,
        H=heads, R=share, R_PAD=next_power_of_2(share), D=dim, BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, STAGES=shape.stages,
        CONSUMERS=shape.consumers, TURNS=shape.turns, REGISTERS=shape.registers, STAY=shape.stay, WANT_LSE=lse_TH is not None,
        num_warps=shape.warps)
