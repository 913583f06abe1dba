"""Attention of long spans for Hopper, warp-specialised as in FlashAttention 3 (arXiv:2407.08608).

It is the loop of ``dense_attention``, which stays the readable version and the fallback, with the warps, the shared
memory and the barriers placed by hand.

One warp fetches: it keeps a ring of key blocks and one of value blocks filled with tile copies, and gives its registers
away. Two warpgroups compute, 64 rows each. The product with a block's keys is issued together with the product with the
values of the block before it: the running sum is rescaled while the former runs, and the exponentials are taken while
the latter runs.

Every slot of a ring has a pair of barriers: ``full`` changes phase when a copy's bytes have arrived, ``free`` when both
consumers have read them. Block i is the (i // STAGES)-th of slot i % STAGES. Consumers wait for that phase of ``full``,
the producer for the one before it of ``free``, which a fresh barrier passes at once.

Slower on an H200: consumers that take turns to issue their products, as in the paper; a third stage; smaller blocks;
three consumers; warps that all fetch and compute. Programs that stay on their multiprocessor for several tiles hung.

Legend: M rows x heads of a consumer, N keys of a block, D head dim, the rest as in ``dense_attention``.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch

from kvasir import tuned
from kvasir.kernels._triton import Launches, gl, gluon_jit, hopper, next_power_of_2
from kvasir.kernels.exp2 import exp2_shared_by_hand
from kvasir.kernels.softmax_block import SLACK

if hopper is not None:
    mbarrier = hopper.mbarrier


@dataclass(frozen=True, slots=True)
class HopperShape:
    """Build parameters of the kernel: one warpgroup for each half of a tile's rows."""

    block_m: int
    block_n: int
    stages: int
    lazy: bool = False  # as in ``softmax_block``
    share: int = 0

    @staticmethod
    def of() -> HopperShape:
        """The shape of the table of tuned numbers, for every width that the kernel serves."""
        return HopperShape(*tuned.HOPPER_ATTENTION.value)


def can_serve_hopper(dtype: torch.dtype, dim: int, share: int, capped: bool, sinks: bool) -> bool:
    """Whether the kernel takes such layers."""
    return dtype in (torch.bfloat16, torch.float16) and dim in (64, 128) and share <= 64 and not capped and not sinks


# where one operand's blocks come from, their slots and their barriers
Ring = namedtuple("Ring", "desc slots full free")
# whole: blocks that every row sees; blocks: that any row sees
Tile = namedtuple("Tile", "head row span_row length context whole blocks")


@gluon_jit
def _ring(desc, STAGES: gl.constexpr):
    """A ring of STAGES free slots. A copy's bytes arrive once, and two consumers read them."""
    slots = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    return Ring(desc, slots, full, free)


@gluon_jit
def _fetch(ring, row, i, STAGES: gl.constexpr):
    """Start the copy of block i, from ``row`` on, once its slot is free."""
    slot, full = i % STAGES, ring.full.index(i % STAGES)
    mbarrier.wait(ring.free.index(slot), (i // STAGES & 1) ^ 1)
    mbarrier.expect(full, ring.desc.block_type.nbytes)
    hopper.tma.async_copy_global_to_shared(ring.desc, [row, 0], full, ring.slots.index(slot))


@gluon_jit
def _produce(k, v, base, blocks, N: gl.constexpr, STAGES: gl.constexpr):
    """The fetching warp, in the order in which blocks are read: K0, K1, V0, K2, V1, ..."""
    _fetch(k, base, 0, STAGES)
    for j in range(1, blocks):
        _fetch(k, base + j * N, j, STAGES)
        _fetch(v, base + (j - 1) * N, j - 1, STAGES)
    _fetch(v, base + (blocks - 1) * N, blocks - 1, STAGES)


@gluon_jit
def _await(ring, i, STAGES: gl.constexpr, wanted=True):
    """Wait until block i has arrived."""
    mbarrier.wait(ring.full.index(i % STAGES), i // STAGES & 1, pred=wanted)


@gluon_jit
def _release(ring, i, STAGES: gl.constexpr):
    """Say that this consumer has read block i: one thread does, after a barrier of its warps."""
    mbarrier.arrive(ring.free.index(i % STAGES))


@gluon_jit
def _weigh(s, seen, factor, top, MASKED: gl.constexpr, LAZY: gl.constexpr, SHARE: gl.constexpr,
           SLACK: gl.constexpr = SLACK):
    """Weights of a block, as in ``attend_block``. Every row sees the first key, so no row is empty."""
    if MASKED:
        s = gl.where(seen, s, -float("inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * factor)
    if LAZY:
        new_top = gl.where(new_top > top + SLACK, new_top, top)
    return exp2_shared_by_hand(s * factor - new_top[:, None], SHARE), new_top, gl.exp2(top - new_top)


@gluon_jit
def _fold(q, k, v, p, shrink, acc, top, total, position, n, factor, j, blocks, STAGES: gl.constexpr,
          MASKED: gl.constexpr, LAZY: gl.constexpr, SHARE: gl.constexpr):
    """Weigh block j, whose keys have arrived, and add the values of block j - 1 with the weights ``p``. The sum before
    it is rescaled by ``shrink``; LAZY: before the products, and only where a row's factor is not one."""
    scores: gl.constexpr = n.type.layout.parent
    operand: gl.constexpr = p.type.layout
    M: gl.constexpr = q.shape[0]
    N: gl.constexpr = n.shape[0]
    keys = k.slots.index(j % STAGES).permute((1, 0))
    # no branch may stand between a product's issue and its wait
    if LAZY:  # noqa: SIM102  (compile time, then run time)
        if gl.max((shrink < 1.0).to(gl.int32), 0) > 0:
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, operand.parent))[:, None]
    s = hopper.warpgroup_mma(q, keys, gl.zeros([M, N], gl.float32, scores), use_acc=False, is_async=True)
    if not LAZY:
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, operand.parent))[:, None]
    _await(v, j - 1, STAGES)
    acc = hopper.warpgroup_mma(p, v.slots.index((j - 1) % STAGES), acc, is_async=True)
    s = hopper.warpgroup_mma_wait(1, deps=(s,))
    _release(k, j, STAGES)
    weights, top, shrink = _weigh(s, (j * N + n)[None, :] <= position[:, None], factor, top, MASKED, LAZY, SHARE)
    total = total * shrink + gl.sum(weights, 1)
    rounded = gl.convert_layout(weights.to(p.dtype), operand)
    # here, since the assembler takes no exponential past a branch, but all past the next wait
    _await(k, j + 1, STAGES, j + 1 < blocks)
    acc, _, rounded = hopper.warpgroup_mma_wait(0, deps=(acc, p, rounded))
    _release(v, j - 1, STAGES)
    return rounded, shrink, acc, top, total


@gluon_jit
def _rows(tile, m, R: gl.constexpr, R_PAD: gl.constexpr):
    """Row and head number m of the tile, and whether they exist."""
    local = tile.row + m // R_PAD
    return (tile.span_row + local).to(gl.int64), tile.head + m % R_PAD, (m % R_PAD < R) & (local < tile.length)


@gluon_jit
def _consume(rows, q_rows, k, v, tile, scale, ME: gl.constexpr, H: gl.constexpr, R: gl.constexpr, R_PAD: gl.constexpr,
             N: gl.constexpr,
             STAGES: gl.constexpr, WANT_LSE: gl.constexpr, LAZY: gl.constexpr, SHARE: gl.constexpr):
    """Rows x heads ME * M to (ME + 1) * M of the tile."""
    q_ptr, out_ptr, lse_ptr, q_row, q_head, out_row = rows
    blocks = tile.blocks
    M: gl.constexpr = q_rows.shape[1]
    D: gl.constexpr = q_rows.shape[2]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [M // 16, 1], [16, N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [M // 16, 1], [16, D, 16])
    # 16 bytes a thread, whole rows a warp
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [M // 16, 1], [1, 0])
    n = gl.arange(0, N, gl.SliceLayout(0, scores))
    m = ME * M + gl.arange(0, M, gl.SliceLayout(1, scores))
    d = gl.arange(0, D, gl.SliceLayout(0, wide))
    row, head, live = _rows(tile, ME * M + gl.arange(0, M, gl.SliceLayout(1, wide)), R, R_PAD)
    q = q_rows.index(ME)
    q.store(gl.load(q_ptr + row[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=live[:, None], other=0.0))
    hopper.fence_async_shared()  # products read shared memory by a proxy of their own
    gl.thread_barrier()

    position = tile.context + tile.row + m // R_PAD
    factor = scale * 1.4426950408889634
    _await(k, 0, STAGES)
    s = hopper.warpgroup_mma(q, k.slots.index(0).permute((1, 0)), gl.zeros([M, N], gl.float32, scores), use_acc=False)
    _release(k, 0, STAGES)
    top = gl.full([M], -float("inf"), gl.float32, gl.SliceLayout(1, scores))
    weights, top, shrink = _weigh(s, n[None, :] <= position[:, None], factor, top, True, LAZY, SHARE)
    total = gl.sum(weights, 1)
    p = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, sums, 2))
    acc = gl.zeros([M, D], gl.float32, sums)
    _await(k, 1, STAGES, blocks > 1)
    for j in range(1, tile.whole):
        p, shrink, acc, top, total = _fold(q, k, v, p, shrink, acc, top, total, position, n, factor, j, blocks, STAGES,
                                           False, LAZY, SHARE)
    for j in range(gl.maximum(tile.whole, 1), blocks):
        p, shrink, acc, top, total = _fold(q, k, v, p, shrink, acc, top, total, position, n, factor, j, blocks, STAGES,
                                           True, LAZY, SHARE)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
    _await(v, blocks - 1, STAGES)
    acc = hopper.warpgroup_mma(p, v.slots.index((blocks - 1) % STAGES), acc)

    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, sums))[:, None]
    # all warps are past the last product with the queries; in their place the result becomes whole rows
    q.store(acc.to(q.dtype))
    gl.thread_barrier()
    gl.store(out_ptr + row[:, None] * out_row + head[:, None] * D + d[None, :], q.load(wide), mask=live[:, None])
    if WANT_LSE:
        row, head, live = _rows(tile, m, R, R_PAD)
        gl.store(lse_ptr + (row * H + head), (top + gl.log2(total)) * 0.6931471805599453, mask=live)


@gluon_jit(do_not_specialize=["slots", "first_group"])
def _hopper_attention(q_ptr, k_desc, v_desc, out_ptr, lse_ptr, context_ptr, row_start_ptr, items_ptr, q_row, q_head,
                      out_row, slots, first_group,
                      scale, H: gl.constexpr, R: gl.constexpr, R_PAD: gl.constexpr, D: gl.constexpr,
                      BLOCK_M: gl.constexpr,
                      BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WANT_LSE: gl.constexpr,
                      LAZY: gl.constexpr = False, SHARE: gl.constexpr = 0):
    """One tile and KV head over dense keys [G x slots, D]."""
    q_rows = gl.allocate_shared_memory(k_desc.dtype, [2, BLOCK_M // 2, D], k_desc.layout)
    k, v = _ring(k_desc, STAGES), _ring(v_desc, STAGES)
    hopper.fence_async_shared()
    gl.thread_barrier()

    # one KV head after the other, so that its keys stay in the L2 cache
    item, group = items_ptr + gl.program_id(0) * 3, gl.program_id(1)
    span, row = gl.load(item), gl.load(item + 1)
    base = group * slots + gl.load(item + 2)
    context = gl.load(context_ptr + span)
    span_row = gl.load(row_start_ptr + span)
    length = gl.load(row_start_ptr + span + 1) - span_row
    whole = (context + row + 1) // BLOCK_N
    blocks = (context + gl.minimum(row + BLOCK_M // R_PAD, length) + BLOCK_N - 1) // BLOCK_N
    tile = Tile((first_group + group) * R, row, span_row, length, context, whole, blocks)
    rows = q_ptr, out_ptr, lse_ptr, q_row, q_head, out_row
    FIRST: gl.constexpr = 0  # numbers among a partition's arguments must be marked as constants
    SECOND: gl.constexpr = 1
    gl.warp_specialize([(_consume, (rows, q_rows, k, v, tile, scale, FIRST, H, R, R_PAD, BLOCK_N, STAGES, WANT_LSE,
                                    LAZY, SHARE)),
                        (_consume, (rows, q_rows, k, v, tile, scale, SECOND, H, R, R_PAD, BLOCK_N, STAGES, WANT_LSE,
                                    LAZY, SHARE)),
                        (_produce, (k, v, base, blocks, BLOCK_N, STAGES))], [4, 1], [240, 24])


def attend_gathered(q_THD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_THD: torch.Tensor,
                    lse_TH: torch.Tensor | None, context_S: torch.Tensor, row_start_S: torch.Tensor,
                    items: torch.Tensor, slots: int, share: int, first_group: int, num_groups: int, scale: float,
                    shape: HopperShape, launches: Launches) -> None:
    """The tiles ``items`` of some KV heads, over their gathered keys and values [num_groups * slots, D]."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    _, heads, dim = q_THD.shape
    layout = gl.NVMMASharedLayout(128, 16, 2)  # rows of 64 numbers, swizzled as products read them
    descriptors = [TensorDescriptor.from_tensor(x, [shape.block_n, dim], layout) for x in (k, v)]
    launches(
        _hopper_attention, (items.shape[0], num_groups, 1),
        q_THD, *descriptors, out_THD, q_THD if lse_TH is None else lse_TH, context_S, row_start_S, items,
        q_THD.stride(0), q_THD.stride(1),
        out_THD.stride(0), slots, first_group, scale,
        H=heads, R=share, R_PAD=next_power_of_2(share), D=dim, BLOCK_M=shape.block_m, BLOCK_N=shape.block_n,
        STAGES=shape.stages,
        WANT_LSE=lse_TH is not None, LAZY=shape.lazy, SHARE=shape.share, num_warps=4)
