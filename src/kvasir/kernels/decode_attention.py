"""Attention of single rows over paged keys and values. It is memory-bound, so the kernel is about keeping bytes in
flight.

The keys of a step are cut into chunks of one length, and one program computes one chunk for the query heads that share
a KV head (``key_chunks``). The device derives the length of a chunk from the contexts alone. So contexts of any mixture
are balanced, and the launch depends only on the number of rows: a CUDA graph can hold it and replay it with other
contexts. Programs without a chunk end at once. A sequence of one chunk is written directly. For a sequence of several,
the program that arrives last merges their partial results, always in the order of the keys, so that the same batch
gives the same bits.

Heads are the fastest axis of the grid: the heads of a page are neighbours in memory and are read at the same time.
Flash-decoding (the PyTorch blog, October 2023). The reference is ``paged_attention_ref`` with spans of one row. Bytes:
2 x keys x G x D x itemsize a sequence and layer, plus 8 x H x D for every chunk of a divided sequence.

Legend: T rows, S spans, B single rows, C chunks, M query heads of a tile, H query heads, G KV heads, R = H / G, D head
dim, N pages, W pages of a table, P slots per page.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvasir import tuned
from kvasir.kernels._triton import Launches, jit, launch, next_power_of_2, pdl, tl
from kvasir.kernels.hardware import multiprocessors, name_of
from kvasir.kernels.key_chunks import MIN_CHUNK, SHORT_CHUNK, arrive, find_chunk, keys_of, merged_at_once
from kvasir.kernels.softmax_block import attend_block, sink_logits

MAX_DIM = 512  # of a head


@dataclass(frozen=True, slots=True)
class Shape:
    """Build parameters of the kernel. ``at_once``: programs that fit on a multiprocessor; ``programs``: chunks of long
    work for each multiprocessor, several times ``at_once``."""

    block_n: int
    warps: int
    stages: int
    programs: int
    at_once: int = 3

    @staticmethod
    @functools.cache  # every layer asks
    def of(dim: int, dtype: torch.dtype, rows: int, share: int, load: float) -> Shape:
        """Shape for ``rows`` single rows, from the table of tuned numbers.

        ``dim``: a power of two. ``share``: query heads of a KV head. ``load``: rows x KV heads for each multiprocessor.

        Three to five programs fit on a multiprocessor of a Hopper GPU, with 160 to 192 KiB in flight together. Many
        rows need fewer blocks in flight in each program, since that many rows are read at once without cutting them.
        Few rows take fewer programs: fewer of them find no chunk, and there is less to merge. fp32 products live in
        registers, not on the tensor cores.

        Sequences of one length run in rounds of five programs. Where the last round would be too small to keep the
        memory busy and a round of four would not (``uneven``), programs that fit four times are faster by a twentieth,
        with up to two query heads a KV head; with four they lose a hundredth. Other widths fit another number of times.
        """
        uneven = dim == 128 and share <= 2 and load % 5 < 2 < load % 4
        return Shape(*tuned.look_up(tuned.DECODE_ATTENTION.value, dtype=name_of(dtype), dim=dim, rows=rows,
                                    uneven=uneven))


def kinds_of(dim: int, dtype: torch.dtype, max_rows: int, share: int, load: float) -> list[int]:
    """Numbers of rows that together take every variant the kernel is compiled in. ``load``: that of one row, as in
    ``Shape.of``."""
    kinds: dict[tuple, int] = {}
    for rows in range(1, max_rows + 1):
        shape = Shape.of(padded(dim), dtype, rows, share, rows * load)
        kinds.setdefault((shape.block_n, shape.warps, shape.stages, count_pad(rows)), rows)
    return list(kinds.values())


def padded(dim: int) -> int:
    """The width that the kernel computes with, for heads of ``dim``."""
    return max(16, next_power_of_2(dim))


def count_pad(rows: int) -> int:
    """The row count that the kernel is compiled for, for ``rows`` rows."""
    return max(16, next_power_of_2(rows))


@dataclass(slots=True)
class Rows:
    """The single-row spans of a step. ``spans`` [B] int32 on the device. ``arrived`` [B, G] int32 counters, zero
    between launches; launches of one stream may share them."""

    spans: torch.Tensor
    arrived: torch.Tensor


@jit(do_not_specialize=["table_row", "count", "wave", "budget", "window"])
def _decode_attention(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, arrived_ptr, sinks_ptr, table_ptr, context_ptr,
        row_start_ptr, spans_ptr,
        q_row, q_head, page_stride, head_stride, out_row, table_row, count, wave, budget, window, scale, softcap,
        H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr, COUNT_PAD: tl.constexpr, MIN_KEYS: tl.constexpr, SHORT_KEYS: tl.constexpr,
        R_PAD: tl.constexpr, MERGE: tl.constexpr,
        WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, WANT_LSE: tl.constexpr, PDL: tl.constexpr):
    """One chunk of keys of one sequence, for one KV head. Partial results: ``part`` [C, G, R, D] fp32, ``part_lse`` [C,
    G, R] in base 2. Only slots below a sequence's end are loaded; the others may hold NaN."""
    group, item = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = H // R
    if PDL:  # contexts and tables were there before the step's first layer; queries and new keys are the last kernel's
        tl.extra.cuda.gdc_launch_dependents()
    which, first, parts, chunk = find_chunk(item, context_ptr, spans_ptr, count, wave, budget, window, BLOCK_N,
                                            COUNT_PAD, MIN_KEYS, SHORT_KEYS,
                                            WINDOWED)
    if which < count:
        span, row, low, start, stop = keys_of(which, item - first, chunk, context_ptr, row_start_ptr, spans_ptr, window,
                                              BLOCK_N, WINDOWED)
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, D_PAD)
        n = tl.arange(0, BLOCK_N)
        head = group * R + m
        live = m < R
        table = table_ptr + span.to(tl.int64) * table_row
        pages = tl.load(table + (start + n) // P, mask=start + n < stop, other=0)
        if PDL:  # programs without a chunk need not wait: this kernel ends after those that do
            tl.extra.cuda.gdc_wait()
        q = tl.load(q_ptr + row * q_row + head[:, None] * q_head + d[None, :], mask=live[:, None] & (d < D)[None, :],
                    other=0.0)
        top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
        kv_head = group.to(tl.int64) * head_stride
        # One loop for whole blocks and the last one: a second loop would have to fill its pipeline again. Page ids are
        # fetched a block ahead and carried: keys whose address depends on a load of the same iteration would not be
        # pipelined (nor, in Triton 3.6, would ids carried over two iterations).
        for j0 in range(start, stop, BLOCK_N):
            j = j0 + n
            held = (j >= low) & (j < stop)
            at = pages.to(tl.int64) * page_stride + kv_head + (j % P) * D
            inside = held[:, None]
            if D != D_PAD:
                inside = inside & (d < D)[None, :]
            k = tl.load(k_ptr + at[:, None] + d[None, :], mask=inside, other=0.0)
            v = tl.load(v_ptr + at[:, None] + d[None, :], mask=inside, other=0.0)
            pages = tl.load(table + (j + BLOCK_N) // P, mask=j + BLOCK_N < stop, other=0)
            top, total, acc = attend_block(q, tl.trans(k), v, held[None, :], scale, softcap, top, total, acc, CAPPED,
                                           True)

        if parts == 1:
            if SINKS:
                top, total, acc = sink_logits(sinks_ptr, head, live, top, total, acc)
            out = out_ptr + row * out_row + head[:, None] * D + d[None, :]
            tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
            if WANT_LSE:
                tl.store(lse_ptr + row * H + head, (top + tl.log2(total)) * 0.6931471805599453, mask=live)
        else:
            at_part = (item.to(tl.int64) * G + group) * R + m
            tl.store(part_ptr + at_part[:, None] * D + d[None, :], acc / total[:, None],
                     mask=live[:, None] & (d < D)[None, :])
            tl.store(part_lse_ptr + at_part, top + tl.log2(total), mask=live)
            arrive(part_ptr, part_lse_ptr, arrived_ptr, out_ptr, lse_ptr, sinks_ptr, which, first, parts, row, group,
                   out_row,
                   H, R, D, D_PAD, R_PAD, MERGE, SINKS, WANT_LSE)


def decode_attention_triton(q_THD: torch.Tensor, k_NGPD: torch.Tensor, v_NGPD: torch.Tensor, table_SW: torch.Tensor,
                            context_S: torch.Tensor, row_start_S: torch.Tensor, rows: Rows, scale: float,
                            out_THD: torch.Tensor, *, window: int | None = None, softcap: float | None = None,
                            sinks_H: torch.Tensor | None = None, lse_TH: torch.Tensor | None = None,
                            shape: Shape | None = None, launches: Launches | None = None) -> None:
    """Compute ``paged_attention_ref`` for the spans of ``rows`` into their rows of ``out`` and ``lse`` (fp32).

    The host reads nothing back, and the launch depends on the number of rows only. ``k_NGPD``/``v_NGPD``: pages with a
    power of two of slots, strided by page and head.
    """
    _, heads, dim = q_THD.shape
    groups, size = k_NGPD.shape[1], k_NGPD.shape[2]
    count = rows.spans.shape[0]
    assert heads % groups == 0 and dim <= MAX_DIM and size & (size - 1) == 0, "unsupported shape"
    assert k_NGPD.stride() == v_NGPD.stride() and k_NGPD.stride()[2:] == (dim, 1), \
        "planes must be page-strided with dense slots"
    assert q_THD.stride(-1) == 1 and table_SW.stride(-1) == 1 and q_THD.dtype == k_NGPD.dtype, \
        "rows must be dense, of one dtype"
    assert rows.arrived.numel() >= count * groups, "one counter a row and KV head"
    share, dim_pad = heads // groups, padded(dim)
    shape = shape or Shape.of(dim_pad, q_THD.dtype, count, share, count * groups / multiprocessors(q_THD.device))
    wave = max(1, shape.at_once * multiprocessors(q_THD.device) // groups)
    # programs without a chunk take time, too
    budget = max(wave, shape.programs * multiprocessors(q_THD.device) // groups - count)
    chunks = count + budget  # sum of ceil(keys / chunk) <= count + keys / chunk
    part = torch.empty((chunks, heads, dim), dtype=torch.float32, device=q_THD.device)
    part_lse = torch.empty((chunks, heads), dtype=torch.float32, device=q_THD.device)
    share_pad = next_power_of_2(share)
    absent, early = q_THD, pdl(q_THD.device)  # stands in for pointers that the compiled variant never touches
    (launches or launch)(
        _decode_attention, (groups, chunks, 1),
        q_THD, k_NGPD, v_NGPD, out_THD, absent if lse_TH is None else lse_TH, part, part_lse, rows.arrived,
        absent if sinks_H is None else sinks_H,
        table_SW, context_S, row_start_S, rows.spans, q_THD.stride(0), q_THD.stride(1), k_NGPD.stride(0),
        k_NGPD.stride(1),
        out_THD.stride(0), table_SW.stride(0), count, wave, budget, window or 0, scale, softcap or 1.0,
        H=heads, R=share, P=size, D=dim, D_PAD=dim_pad, BLOCK_M=max(16, share_pad), BLOCK_N=shape.block_n,
        COUNT_PAD=count_pad(count), MIN_KEYS=max(MIN_CHUNK, shape.block_n), SHORT_KEYS=SHORT_CHUNK, R_PAD=share_pad,
        MERGE=merged_at_once(share, dim_pad, shape.warps), WINDOWED=window is not None, CAPPED=softcap is not None,
        SINKS=sinks_H is not None, WANT_LSE=lse_TH is not None, PDL=early, num_warps=shape.warps,
        num_stages=shape.stages, launch_pdl=early)


# ------------------------------------------------------------------------------------------------------------ test grid


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the test grid: rows after ``contexts`` cached positions each. ``programs``: as in ``Shape``, with
    one at once; None: chosen."""

    contexts: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    page_slots: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    programs: int | None = None


def grid() -> Iterator[Case]:
    mixed = (700, 0, 15, 300, 127, 128)
    for programs in (None, 1, 3):
        yield Case(contexts=mixed, programs=programs, heads=4, kv_heads=2)
    yield Case(contexts=(0,))
    yield Case(contexts=(1500,), sinks=True, softcap=4.0)  # more chunks than are merged at a time
    yield Case(contexts=tuple(range(20)) + (400,))
    yield Case(contexts=tuple(range(250, 261)))  # of nearly one length: none is cut
    for dim in (8, 80, 128, 256, 512):
        yield Case(contexts=(333, 5), dim=dim)
    for heads, kv_heads in ((1, 1), (3, 3), (7, 1), (12, 2), (16, 1), (20, 1)):
        yield Case(contexts=(290, 30), heads=heads, kv_heads=kv_heads)
    for page_slots in (32, 128):
        yield Case(contexts=(300, 64), page_slots=page_slots)
    for window in (1, 16, 21, 200):
        yield Case(contexts=mixed, window=window, programs=3)
    yield Case(contexts=mixed, softcap=2.0)
    yield Case(contexts=mixed, sinks=True)
    yield Case(contexts=mixed, window=250, softcap=3.0, sinks=True, page_slots=32)
