"""Attention over decoded codes, for spans whose codes no kernel reads directly: short chunks, large trees, exact mode.

The codes of each span are decoded into scratch that is laid out like pages, and ``paged_attention`` reads that. This
costs a copy of the span's context a layer, in bounded scratch: KV heads that do not fit take turns.

Legend: T rows, S spans, m of them here, W pages of a table, P slots per page, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvasir.kernels._triton import cdiv
from kvasir.kernels.dense_attention import SCRATCH_BYTES, Gather
from kvasir.kernels.hardware import send
from kvasir.kernels.paged_attention import Tiles, paged_attention_triton

BLOCK = 64  # slots that a program gathers


@dataclass(slots=True)
class GatheredSpans:
    """The spans of one launch. ``spans`` [m, 2] int32 on the device: span, its first slot in the scratch; ``table_SW``
    int32: pages of the scratch; ``slots``: slots of the scratch; ``blocks``: blocks of the longest span."""

    spans: torch.Tensor
    table_SW: torch.Tensor
    slots: int
    blocks: int
    tiles: list[Tiles]


def plan_gathered(starts: list[int], lengths: list[int], chosen: list[int], tiles: list[Tiles], page_slots: int,
                  device: torch.device | str) -> GatheredSpans:
    """Assign places in the scratch, on the host. ``tiles``: those of the chosen spans."""
    pages = [cdiv(starts[s] + lengths[s], page_slots) if s in set(chosen) else 0 for s in range(len(lengths))]
    table = torch.zeros(len(pages), max(pages, default=0), dtype=torch.int32)
    places, first = [], 0
    for s in chosen:
        table[s, :pages[s]] = torch.arange(first, first + pages[s])
        places.append((s, first * page_slots))
        # whole blocks
        first += cdiv(pages[s] * page_slots, max(BLOCK, page_slots)) * max(BLOCK, page_slots) // page_slots
    spans = torch.tensor(places, dtype=torch.int32)
    longest = max((starts[s] + lengths[s] for s in chosen), default=0)
    return GatheredSpans(send(spans, device), send(table, device), first * page_slots, cdiv(longest, BLOCK), tiles)


def gathered_attention(q_THD: torch.Tensor, kv_heads: int, page_slots: int, gather: Gather, context_S: torch.Tensor,
                       row_start_S: torch.Tensor, chosen: GatheredSpans, scale: float, out_THD: torch.Tensor, *,
                       window: int | None = None, softcap: float | None = None, sinks_H: torch.Tensor | None = None,
                       ancestors_TA: torch.Tensor | None = None, positions_T: torch.Tensor | None = None,
                       lse_TH: torch.Tensor | None = None, scratch_bytes: int = SCRATCH_BYTES) -> None:
    """Run ``paged_attention_triton`` over the chosen spans' pages as ``gather`` decodes them."""
    _, heads, dim = q_THD.shape
    share, slots = heads // kv_heads, chosen.slots
    head_bytes = 2 * slots * dim * q_THD.element_size()
    fits = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and head_bytes * kv_heads // n <= scratch_bytes]
    turns = 1 if lse_TH is not None else min(fits, default=kv_heads)
    at_once = kv_heads // turns
    k, v = torch.empty((2, at_once, slots, dim), dtype=q_THD.dtype, device=q_THD.device)
    as_pages = [x.as_strided((slots // page_slots, at_once, page_slots, dim), (page_slots * dim, slots * dim, dim, 1),
                             x.storage_offset())
                for x in (k, v)]
    for group in range(0, kv_heads, at_once):
        gather(k, v, chosen.spans, chosen.blocks, BLOCK, group)
        mine = slice(group * share, (group + at_once) * share)
        paged_attention_triton(q_THD[:, mine], *as_pages, chosen.table_SW, context_S, row_start_S, chosen.tiles, scale,
                               out_THD[:, mine],
                               window=window, softcap=softcap, sinks_H=None if sinks_H is None else sinks_H[mine],
                               ancestors_TA=ancestors_TA, positions_T=positions_T, lse_TH=lse_TH)
