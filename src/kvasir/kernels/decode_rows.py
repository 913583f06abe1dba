"""Both ends of a decode step: the inputs of its rows, gathered on the device, and the drawn tokens, put back.

As torch calls these are some fifteen launches of a few microseconds each, a twentieth of the fastest steps; here each
end is one kernel. Bytes: about 4 W a row and page table.

Legend: R rows that the device keeps, B rows of the step, M rows of a slice of it, K page tables of a sequence, W pages
of a table, P slots per page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.kernels._triton import cdiv, jit, pdl, tl, use_triton

BLOCK = 1024  # pages of a program


@dataclass(frozen=True, slots=True)
class Kept:
    """The state that the device keeps of all rows. ``token`` [R] and ``top_k`` [R] int32; ``temperature``, ``top_p``,
    ``min_p`` [R] fp32; ``stream`` [R, 2] int32, low and high word; ``tables`` [K, R, W] int32. ``forgotten`` [K, R]
    int32: tokens that are not in the pages of a table any more; None: nothing is ever forgotten."""

    token: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    stream: torch.Tensor
    tables: torch.Tensor
    forgotten: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """The inputs of a step's rows. ``ids`` [B] int64, ``context`` [B] int32: positions, ``tables`` [K, B, W] int32,
    ``slots`` [K, B] int64: the slot of each row's key and value; ``places`` [K, B] int32: its place in the pages of
    each table (None: its position, as nothing is ever forgotten). The rest is as ``kernels.sample`` takes it:
    ``temperature``, ``top_p``, ``min_p`` [B] fp32, ``top_k`` [B] int32, ``stream`` [B] int64."""

    ids: torch.Tensor
    context: torch.Tensor
    tables: torch.Tensor
    slots: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    stream: torch.Tensor
    places: torch.Tensor | None = None


def open_rows_reference(kept: Kept, rows_B: torch.Tensor, starts_B: torch.Tensor, page_slots: int,
                        given_B: torch.Tensor | None = None) -> Opened:
    """The inputs of a step. ``rows_B`` int64: places in ``kept``; ``starts_B`` int64: positions; ``given_B`` int64:
    tokens of drafts, or -1 for the row's own token."""
    tables, places_KB = kept.tables.index_select(1, rows_B), None
    at_KB = starts_B.expand(len(tables), -1)
    if kept.forgotten is not None:
        at_KB = at_KB - kept.forgotten.index_select(1, rows_B)
        places_KB = at_KB.int()
    slots = tables.gather(2, (at_KB // page_slots)[..., None])[..., 0] * page_slots + at_KB % page_slots
    ids_B = kept.token.index_select(0, rows_B).long()
    if given_B is not None:
        ids_B = torch.where(given_B < 0, ids_B, given_B)
    numbers = kept.temperature, kept.top_k, kept.top_p, kept.min_p
    temperature, top_k, top_p, min_p = (x.index_select(0, rows_B) for x in numbers)
    stream = kept.stream.index_select(0, rows_B).view(torch.int64)[:, 0]
    return Opened(ids_B, starts_B.int(), tables, slots, temperature, top_k, top_p, min_p, stream, places_KB)


def close_rows_reference(draws_3M: torch.Tensor, out_3M: torch.Tensor, token_R: torch.Tensor, rows_M: torch.Tensor,
                         vocab_size: int) -> None:
    """Copy the draws of ``kernels.sample`` to ``out_3M``, and their tokens to the rows they belong to. Tokens are
    clamped: the draw of a row of NaN must not be out of range."""
    out_3M.copy_(draws_3M)
    token_R.index_copy_(0, rows_M, draws_3M[0].int().clamp_(0, vocab_size - 1))


@jit(do_not_specialize=["num_kept"], do_not_specialize_on_alignment=["starts_ptr", "given_ptr"])
def _open_rows(rows_ptr, starts_ptr, given_ptr, token_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, stream_ptr,
               tables_ptr, forgotten_ptr,
               ids_out, context_out, tables_out, slots_out, temperature_out, top_k_out, top_p_out, min_p_out,
               stream_out, places_out,
               num_kept, W, K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, GIVEN: tl.constexpr,
               FORGETS: tl.constexpr):
    """One row, BLOCK pages of each of its tables; the first block has the row's numbers, too."""
    b, num_rows = tl.program_id(0), tl.num_programs(0)
    row, start = tl.load(rows_ptr + b), tl.load(starts_ptr + b)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for k in tl.static_range(K):
        table = tables_ptr + (k * num_kept + row) * W
        tl.store(tables_out + (k * num_rows + b).to(tl.int64) * W + page, tl.load(table + page, mask=page < W, other=0),
                 mask=page < W)
        if tl.program_id(1) == 0:
            at = start
            if FORGETS:
                at = start - tl.load(forgotten_ptr + k * num_kept + row)
                tl.store(places_out + k * num_rows + b, at.to(tl.int32))
            tl.store(slots_out + k * num_rows + b, tl.load(table + at // P).to(tl.int64) * P + at % P)
    if tl.program_id(1) == 0:
        token = tl.load(token_ptr + row).to(tl.int64)
        if GIVEN:
            given = tl.load(given_ptr + b)
            token = tl.where(given < 0, token, given)
        tl.store(ids_out + b, token)
        tl.store(context_out + b, start.to(tl.int32))
        tl.store(temperature_out + b, tl.load(temperature_ptr + row))
        tl.store(top_k_out + b, tl.load(top_k_ptr + row))
        tl.store(top_p_out + b, tl.load(top_p_ptr + row))
        tl.store(min_p_out + b, tl.load(min_p_ptr + row))
        tl.store(stream_out + 2 * b, tl.load(stream_ptr + 2 * row))
        tl.store(stream_out + 2 * b + 1, tl.load(stream_ptr + 2 * row + 1))


@jit(do_not_specialize=["num_rows", "draws_row", "out_row"], do_not_specialize_on_alignment=["out_ptr", "rows_ptr"])
def _close_rows(draws_ptr, out_ptr, token_ptr, rows_ptr, num_rows, draws_row, out_row, vocab_size, BLOCK: tl.constexpr,
                PDL: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = m < num_rows
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in tl.static_range(3):
        draw = tl.load(draws_ptr + i * draws_row + m, mask=inside, other=0.0)
        tl.store(out_ptr + i * out_row + m, draw, mask=inside)
        if i == 0:
            token = tl.minimum(tl.maximum(draw.to(tl.int32), 0), vocab_size - 1)
            tl.store(token_ptr + tl.load(rows_ptr + m, mask=inside, other=0), token, mask=inside)


def open_rows(kept: Kept, rows_B: torch.Tensor, starts_B: torch.Tensor, page_slots: int,
              given_B: torch.Tensor | None = None) -> Opened:
    """Compute ``open_rows_reference``, in one launch on a GPU. It does not start early: a step's first kernel waits for
    all work before it, and later kernels may rely on that."""
    if not use_triton(rows_B):
        return open_rows_reference(kept, rows_B, starts_B, page_slots, given_B)
    size, device, (num_tables, num_kept, width) = rows_B.shape[0], rows_B.device, kept.tables.shape
    assert kept.tables.is_contiguous() and kept.stream.is_contiguous(), "tables and streams lie densely"

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape or size, dtype=dtype, device=device)

    places = None if kept.forgotten is None else empty(torch.int32, num_tables, size)
    opened = Opened(empty(torch.int64), empty(torch.int32), empty(torch.int32, num_tables, size, width),
                    empty(torch.int64, num_tables, size),
                    empty(torch.float32), empty(torch.int32), empty(torch.float32), empty(torch.float32),
                    empty(torch.int64), places)
    forgets = kept.forgotten is not None
    if size:
        _open_rows[(size, cdiv(width, BLOCK))](
            rows_B, starts_B, starts_B if given_B is None else given_B, kept.token, kept.temperature, kept.top_k,
            kept.top_p, kept.min_p, kept.stream,
            kept.tables, kept.forgotten if forgets else kept.tables, opened.ids, opened.context, opened.tables,
            opened.slots, opened.temperature, opened.top_k, opened.top_p, opened.min_p,
            opened.stream.view(torch.int32), places if forgets else opened.context,
            num_kept, width, K=num_tables, P=page_slots, BLOCK=BLOCK,
            GIVEN=given_B is not None, FORGETS=forgets, num_warps=4)
    return opened


def close_rows(draws_3M: torch.Tensor, out_3M: torch.Tensor, token_R: torch.Tensor, rows_M: torch.Tensor,
               vocab_size: int) -> None:
    """Do what ``close_rows_reference`` does, in one launch on a GPU. Of a row that occurs twice, either token may
    stay."""
    if not use_triton(draws_3M):
        return close_rows_reference(draws_3M, out_3M, token_R, rows_M, vocab_size)
    size, early = rows_M.shape[0], pdl(draws_3M.device)
    _close_rows[(cdiv(size, 256),)](draws_3M, out_3M, token_R, rows_M, size, draws_3M.stride(0), out_3M.stride(0),
                                    vocab_size, BLOCK=256, PDL=early,
                                    num_warps=4, launch_pdl=early)
