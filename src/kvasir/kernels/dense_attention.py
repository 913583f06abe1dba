"""Attention of long spans. It is compute-bound, so the keys are made dense first, for the hardware's tile copies.

A page of 16 slots is too small a piece for the tensor memory accelerator to fetch a block of 128 keys. One pass copies
the pages of every long span into dense scratch, and a causal FlashAttention-2 loop (arXiv:2307.08691) reads it through
tensor descriptors, which cost no registers and no address arithmetic. The pass moves 4 x keys x G x D x itemsize bytes,
a few per cent of the time of spans that are worth it (``worth_it``). Scratch is bounded (``SCRATCH_BYTES``): KV heads
that do not fit take turns.

A tile is BLOCK_M / R rows of one span times the R query heads that share a KV head. Tiles of the last rows see the most
keys and start first. The reference is ``paged_attention_ref``. FLOPs: 4 x rows x keys x H x D.

Legend: T rows, S spans, M rows x heads of a tile, H query heads, G KV heads, R = H / G, D head dim, N pages, W pages of
a table, P slots per page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from kvasir import tuned
from kvasir.kernels._triton import Launches, by_hand, cdiv, jit, next_power_of_2, tl
from kvasir.kernels.attention_tile import planned_span
from kvasir.kernels.hardware import send
from kvasir.kernels.hopper_attention import HopperShape, attend_gathered, can_serve_hopper
from kvasir.kernels.softmax_block import attend_block, sink_logits

BLOCK_N = 128  # keys of a block of the scratch; spans are padded to it with zeros
SCRATCH_BYTES = 256 << 20  # bytes of keys and values; KV heads that do not fit take turns
# (keys [G, slots, D], values, spans [m, 2], blocks of the longest, slots of a block, first KV head): fill the scratch
Gather = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int], None]
MIN_ROWS = tuned.DENSE_ROWS.value  # rows x query heads of a KV head; fewer are not worth the copy of their context


@dataclass(frozen=True, slots=True)
class Shape:
    """Build parameters of the kernel.

    Small tiles of one warpgroup overlap each other's products and exponentials on a multiprocessor: 539 TFLOP/s over 8k
    keys on an H200, where 128 x 128 on two warpgroups reaches 453. Triton 3.6's own warp specialisation does not apply
    to this loop; ``hopper_attention`` is the same loop with its warps placed by hand.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    lazy: bool = False  # rescale sums only where a maximum has grown enough, as in ``softmax_block``
    share: int = 0  # one power of two in so many by a polynomial (``exp2.SHARES``)

    @staticmethod
    def of(dim: int) -> Shape:
        """Shape that fits into Hopper's shared memory and registers, from the table of tuned numbers."""
        return Shape(*tuned.look_up(tuned.DENSE_ATTENTION.value, dim=dim))


@dataclass(slots=True)
class LongSpans:
    """The spans of one launch. ``items`` [n, 3] int32 on the device: span, first row in it, its first slot in the
    scratch; ``spans`` [m, 2] int32: span, first slot. ``slots``: slots of the scratch; ``blocks``: blocks of the
    longest span; ``shape``: the kernel's shape; ``launches``: those of the step."""

    items: torch.Tensor
    spans: torch.Tensor
    slots: int
    blocks: int
    shape: Shape | HopperShape
    launches: Launches = field(default_factory=Launches)


def worth_it(length: int, share: int) -> bool:
    """Whether a span of ``length`` rows is computed here. A key's copy moves 8 x D bytes for itself alone, its
    attention takes 4 x D x length x share FLOPs: on an H200 the copy costs as much as about 200 rows x heads."""
    return length * share >= MIN_ROWS


def can_serve(dtype: torch.dtype, dim: int) -> bool:
    """Whether the kernel takes these rows: 16 bits, of a width that the tile copies can move."""
    return dtype in (torch.bfloat16, torch.float16) and dim in (64, 128, 256)


def shape_for(dtype: torch.dtype, dim: int, share: int, device: torch.device | str, *, softcap: float | None = None,
              sinks: bool = False) -> Shape | HopperShape:
    """Shape of the faster kernel among those that can serve these layers on this device."""
    device = torch.device(device)
    return HopperShape.of() if by_hand(device) and can_serve_hopper(dtype, dim, share, softcap is not None,
                                                                    sinks) else Shape.of(dim)


def plan_long(starts: list[int], lengths: list[int], spans: list[int], share: int, device: torch.device | str,
              shape: Shape | HopperShape) -> LongSpans:
    """Cut ``spans`` of a step into tiles, on the host."""
    rows = shape.block_m // next_power_of_2(share)
    items, places, slots = [], [], 0
    for s in spans:
        places.append((s, slots))
        items += [(s, row, slots) for row in range(0, lengths[s], rows)]
        slots += cdiv(starts[s] + lengths[s], BLOCK_N) * BLOCK_N
    items.sort(key=lambda item: -(starts[item[0]] + item[1]))  # heavy ones first, so that the launch ends together
    blocks = max(cdiv(starts[s] + lengths[s], BLOCK_N) for s in spans)
    second = cdiv(3 * len(items), 4) * 4  # aligned: kernels are compiled again for unaligned pointers
    both = torch.zeros(second + 2 * len(places), dtype=torch.int32)
    both[:3 * len(items)] = torch.tensor(items, dtype=torch.int32).flatten()
    both[second:] = torch.tensor(places, dtype=torch.int32).flatten()
    both = send(both, device)
    return LongSpans(both[:3 * len(items)].view(-1, 3), both[second:].view(-1, 2), slots, blocks, shape)


@jit(do_not_specialize=["table_row", "slots", "first_group"])
def _gather_pages(k_ptr, v_ptr, k_out, v_out, table_ptr, context_ptr, row_start_ptr, spans_ptr, page_stride,
                  head_stride, table_row,
                  slots, first_group, P: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """One block of slots of one span and KV head: page -> [G, slots, D]. Slots past the span's end become zeros."""
    block, group, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = tl.load(spans_ptr + place * 2)
    end = tl.load(context_ptr + span) + tl.load(row_start_ptr + span + 1) - tl.load(row_start_ptr + span)
    if block * BLOCK < end:
        j = block * BLOCK + tl.arange(0, BLOCK)
        d = tl.arange(0, D)
        page = tl.load(table_ptr + span.to(tl.int64) * table_row + j // P, mask=j < end, other=0).to(tl.int64)
        source = page * page_stride + (first_group + group).to(tl.int64) * head_stride + (j % P) * D
        target = (group.to(tl.int64) * slots + tl.load(spans_ptr + place * 2 + 1) + j) * D
        held = (j < end)[:, None]
        k = tl.load(k_ptr + source[:, None] + d[None, :], mask=held, other=0.0)
        v = tl.load(v_ptr + source[:, None] + d[None, :], mask=held, other=0.0)
        tl.store(k_out + target[:, None] + d[None, :], k)
        tl.store(v_out + target[:, None] + d[None, :], v)


@jit(do_not_specialize=["slots", "first_group"])
def _dense_attention(q_ptr, k_desc, v_desc, out_ptr, lse_ptr, sinks_ptr, context_ptr, row_start_ptr, items_ptr,
                     q_row, q_head, out_row, slots, first_group, scale, softcap,
                     H: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr,
                     CAPPED: tl.constexpr, SINKS: tl.constexpr, WANT_LSE: tl.constexpr, LAZY: tl.constexpr = False,
                     SHARE: tl.constexpr = 0):
    """One tile and KV head over dense keys [G x slots, D]."""
    tile, group = tl.program_id(0), tl.program_id(1)
    span = tl.load(items_ptr + tile * 3)
    first_row = tl.load(items_ptr + tile * 3 + 1)
    base = group * slots + tl.load(items_ptr + tile * 3 + 2)
    context, span_row, length = planned_span(span, context_ptr, row_start_ptr)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    n = tl.arange(0, BLOCK_N)
    local = first_row + m // R_PAD
    head = (first_group + group) * R + m % R_PAD
    live = (m % R_PAD < R) & (local < length)
    row = (span_row + local).to(tl.int64)
    q = tl.load(q_ptr + row[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=live[:, None], other=0.0)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    whole = (context + first_row + 1) // BLOCK_N * BLOCK_N  # blocks below it are seen by every row, and need no mask
    end = context + tl.minimum(first_row + BLOCK_M // R_PAD, length)
    for j0 in range(0, whole, BLOCK_N):
        k = k_desc.load([base + j0, 0])
        v = v_desc.load([base + j0, 0])
        top, total, acc = attend_block(q, tl.trans(k), v, None, scale, softcap, top, total, acc, CAPPED, False,
                                       LAZY, SHARE)
    for j0 in range(whole, end, BLOCK_N):
        k = k_desc.load([base + j0, 0])
        v = v_desc.load([base + j0, 0])
        seen = (j0 + n)[None, :] <= (context + local)[:, None]
        top, total, acc = attend_block(q, tl.trans(k), v, seen, scale, softcap, top, total, acc, CAPPED, True,
                                       LAZY, SHARE)
    if SINKS:
        top, total, acc = sink_logits(sinks_ptr, head, live, top, total, acc)
    out = out_ptr + row[:, None] * out_row + head[:, None] * D + d[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None])
    if WANT_LSE:
        tl.store(lse_ptr + row * H + head, (top + tl.log2(total)) * 0.6931471805599453, mask=live)


def gather_pages(k_NGPD: torch.Tensor, v_NGPD: torch.Tensor, table_SW: torch.Tensor, context_S: torch.Tensor,
                 row_start_S: torch.Tensor, long: LongSpans, first_group: int, num_groups: int, k: torch.Tensor,
                 v: torch.Tensor) -> None:
    """Copy some KV heads of the long spans into ``k``, ``v`` [num_groups * slots, D]."""
    long.launches(
        _gather_pages, (long.blocks, num_groups, long.spans.shape[0]),
        k_NGPD, v_NGPD, k, v, table_SW, context_S, row_start_S, long.spans, k_NGPD.stride(0), k_NGPD.stride(1),
        table_SW.stride(0),
        long.slots, first_group, P=k_NGPD.shape[2], D=k_NGPD.shape[3], BLOCK=BLOCK_N, num_warps=8)


def dense_attention_triton(q_THD: torch.Tensor, k_NGPD: torch.Tensor, v_NGPD: torch.Tensor, table_SW: torch.Tensor,
                           context_S: torch.Tensor, row_start_S: torch.Tensor, long: LongSpans, scale: float,
                           out_THD: torch.Tensor, *, softcap: float | None = None, sinks_H: torch.Tensor | None = None,
                           lse_TH: torch.Tensor | None = None, scratch_bytes: int = SCRATCH_BYTES,
                           gather: Gather | None = None) -> None:
    """Compute ``paged_attention_ref`` for the spans of ``long`` into their rows of ``out`` and ``lse`` (fp32).

    ``gather`` fills the scratch where pages do not have the rows' dtype. A plan with a ``HopperShape`` runs
    ``hopper_attention``.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    _, heads, dim = q_THD.shape
    groups = k_NGPD.shape[1]
    assert can_serve(q_THD.dtype, dim) and heads % groups == 0, "unsupported shape"
    assert gather or k_NGPD.stride() == v_NGPD.stride() and k_NGPD.stride()[2:] == (dim, 1) \
        and q_THD.dtype == k_NGPD.dtype, "planes must be page-strided with dense slots of the rows' dtype"
    assert q_THD.stride(-1) == 1 and table_SW.stride(-1) == 1, "rows must be dense"
    shape = long.shape
    head_bytes = 2 * long.slots * dim * q_THD.element_size()
    turns = next(n for n in range(1,
                                  groups + 1) if groups % n == 0 and (head_bytes * groups // n <= scratch_bytes
                                                                      or n == groups))
    at_once, share = groups // turns, heads // groups
    k, v = torch.empty((2, at_once * long.slots, dim), dtype=q_THD.dtype, device=q_THD.device)
    hopper = isinstance(shape, HopperShape)
    assert not hopper or can_serve_hopper(q_THD.dtype, dim, share, softcap is not None, sinks_H is not None), \
        "unsupported by this shape"
    descriptors = [] if hopper else [TensorDescriptor.from_tensor(x, [shape.block_n, dim]) for x in (k, v)]
    absent = q_THD  # stands in for pointers that the compiled variant never touches
    for group in range(0, groups, at_once):
        if gather is not None:
            gather(k.view(at_once, -1, dim), v.view(at_once, -1, dim), long.spans, long.blocks, BLOCK_N, group)
        else:
            gather_pages(k_NGPD, v_NGPD, table_SW, context_S, row_start_S, long, group, at_once, k, v)
        if hopper:
            attend_gathered(q_THD, k, v, out_THD, lse_TH, context_S, row_start_S, long.items, long.slots, share, group,
                            at_once, scale, shape, long.launches)
            continue
        long.launches(
            _dense_attention, (long.items.shape[0], at_once, 1),
            q_THD, *descriptors, out_THD, absent if lse_TH is None else lse_TH, absent if sinks_H is None else sinks_H,
            context_S, row_start_S,
            long.items, q_THD.stride(0), q_THD.stride(1), out_THD.stride(0), long.slots, group, scale, softcap or 1.0,
            H=heads, R=share, R_PAD=next_power_of_2(share), D=dim, BLOCK_M=shape.block_m, BLOCK_N=shape.block_n,
            CAPPED=softcap is not None,
            SINKS=sinks_H is not None, WANT_LSE=lse_TH is not None, LAZY=shape.lazy, SHARE=shape.share,
            num_warps=shape.warps, num_stages=shape.stages)


# ------------------------------------------------------------------------------------------------------------ test grid


SHORTEST = 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the test grid: ``spans`` as (start, length); those of at least ``SHORTEST`` rows are computed
    here."""

    spans: tuple[tuple[int, int], ...]
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    page_slots: int = 16
    softcap: float | None = None
    sinks: bool = False
    scratch_bytes: int = SCRATCH_BYTES


def grid() -> Iterator[Case]:
    yield Case(spans=((0, 200),))
    yield Case(spans=((40, 1), (300, 130), (0, 5), (17, 64)), heads=8, kv_heads=2)
    yield Case(spans=((128, 128),), dim=128, heads=4)
    yield Case(spans=((250, 40),), dim=256, page_slots=32)
    # one KV head at a time; three heads padded to four
    yield Case(spans=((33, 90), (5, 40)), heads=12, kv_heads=4, scratch_bytes=0)
    yield Case(spans=((60, 70),), heads=7, softcap=2.0, sinks=True)


def ragged() -> Iterator[Case]:
    """Ends of tiles, blocks and rings, and shares of every kind, for kernels that place them by hand."""
    yield Case(spans=((0, 20), (0, 127), (0, 128), (0, 129), (0, 256), (0, 257)), heads=4, dim=128)
    yield Case(spans=((3000, 200),), heads=8, kv_heads=2, dim=128)
    yield Case(spans=((3000, 200), (511, 65)), heads=4)
    yield Case(spans=((100, 28), (127, 33), (128, 32), (1, 700)), heads=3, kv_heads=3, dim=128)
    yield Case(spans=tuple((37 * i, 20 + 17 * i) for i in range(16)), heads=14, kv_heads=2, dim=128)
    yield Case(spans=((384, 384), (640, 90)), heads=8, dim=128, scratch_bytes=0)
