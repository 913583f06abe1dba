"""Steps that are gone through without running a kernel, so that the kernels they need are compiled before anybody waits
for them.

With empty caches an 8B model's first steps need some forty kernels, each of which takes half a second to compile. Gone
through at the start, they are compiled on all cores in parallel, while the start does other things. The torch calls
between them do run, on numbers that mean nothing, so no kernel's result may become an index in one of them.

Legend: T rows, E model dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from kvasir.engine.pages.page_pool import pages_for
from kvasir.engine.ways.graph_buckets import SHARED_ROWS
from kvasir.kernels._triton import INTERPRETED, use_triton
from kvasir.kernels.compile_ahead import rehearsing
from kvasir.kernels.decode_rows import close_rows, open_rows
from kvasir.kernels.mask_rows import mask_rows
from kvasir.kernels.noise import gumbel
from kvasir.kernels.report import report_rows
from kvasir.kernels.sample import sample_rows
from kvasir.logs import log
from kvasir.types import StepBatch, Together

if TYPE_CHECKING:
    from kvasir.engine.ways.step_way import StepParts

# Sizes of steps: those that products have kernels of their own for, and one whose products are all the BLAS's.
ROWS = (1, 8, 16, 32, 64, 128)


@torch.inference_mode()
def rehearse(parts: StepParts, max_drafts: int = 0, trees: bool = False) -> None:
    """Go through all kinds of attention and the first steps; with drafts, also through those that verify up to
    ``max_drafts`` of a sequence. ``trees``: also through trees, for a draft model that grows them. A kernel that fails
    here is compiled when it is met, or fails there."""
    if INTERPRETED or not use_triton(parts.seats.words):
        return
    calls: list[partial[None]] = [partial(_draw, parts)]  # first what takes the compiler longest
    calls += [
        partial(_attend, parts, layer, spans)
        for spec, layer in parts.model.spec.attentions().items()
        for spans in parts.backend.kinds(spec, parts.sampler.max_seqs)
    ]
    calls += [partial(_forward, parts, rows) for rows in ROWS]
    if parts.num_variants:  # the first request of an adapter would hold up all others
        calls += [partial(_forward, parts, rows, True) for rows in (*ROWS, 2 * ROWS[-1])]
    if max_drafts:  # the first drafted steps would hold up everybody, and so look dear
        calls += _drafted(parts, max_drafts)
    if max_drafts or trees:
        calls += _trees(parts)
    with rehearsing():
        for call in calls:
            try:
                call()
            except Exception as error:
                # Nobody has asked for it yet, and an engine that ended here would end again after every restart.
                what = call.func.__name__ + str(call.args[1:])[:60]
                log.warning("kernels are not compiled ahead: %s (%s: %s)", what, type(error).__name__, error)


def _drafted(parts: StepParts, max_drafts: int) -> list[partial[None]]:
    """Captured steps of drafts, of which a kernel has a variant for each power of two of rows."""
    most, sizes = min(SHARED_ROWS, parts.sampler.max_seqs * (1 + max_drafts)), [16]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    calls: list[partial[None]] = [partial(_draw, parts, True)]
    calls += [
        partial(_attend, parts, layer, [(0, 1)] * rows, form)
        for layer in parts.model.spec.attentions().values()
        for form in parts.backend.together()
        for rows in sizes
    ]
    return calls


def _trees(parts: StepParts) -> list[partial[None]]:
    """Steps of trees that are not captured whole: beside prompts, and in a model that grows them."""
    return [
        partial(_attend, parts, layer, spans, 1)
        for spec, layer in parts.model.spec.attentions().items()
        for spans in parts.backend.kinds(spec, parts.sampler.max_seqs)
        if spans[0][1] > 1
    ]


def _attend(parts: StepParts, layer: int, spans: list[tuple[int, int]], most: int = 0) -> None:
    """Attend a step of spans (positions before, rows). ``most``: 1: as if one of them were a tree; larger: as if its
    rows were drafts in a captured step of spans of at most so many."""
    spec = parts.model.spec.layers[layer].mixer.attention()
    batch = _batch(parts, spans)
    if most:
        batch.ancestors = torch.ones_like(batch.positions)[:, None]
    if most > 1:
        batch.together = Together(torch.zeros_like(batch.positions), torch.ones_like(batch.positions), most)
    q_THD = torch.zeros(
        len(batch.input_ids), spec.num_heads, spec.head_dim, dtype=parts.model.place.dtype, device=parts.device
    )
    parts.backend.plan(batch)
    parts.backend.run(q_THD, parts.caches[layer], spec, batch, sinks_H=parts.model.blocks[layer].mixer.sinks_H)


def _forward(parts: StepParts, rows: int, varied: bool = False) -> None:
    """Run a step of single rows, with every kind of layer twice: the first layer of a step finds no result that is
    still to be added. ``varied``: as if rows had variants."""
    model, batch = parts.model, _batch(parts, [(0, 1)] * rows)
    if varied:
        batch.variants = zeros_T = torch.zeros(rows, dtype=torch.int32, device=parts.device)
        batch = model.begin(batch)
        if batch.hooks is not None:  # no kernel has written them, and what records takes them for places
            batch = replace(batch, variants=zeros_T, hooks=zeros_T)
    parts.backend.plan(batch)
    stream, angles = model.stream(batch.input_ids, model.embed(batch.input_ids)), model.angles(batch.positions)
    for i in {layer: i for i, layer in enumerate(model.spec.layers)}.values():
        for _ in range(2):
            model.blocks[i].forward(stream, angles[i], parts.caches[i], parts.backend, batch)
    model.logits(stream.value())


def _draw(parts: StepParts, drafted: bool = False) -> None:
    """Draw and report as decodes do that stay on the device, and as the sampler does. ``drafted``: rows know their
    tokens."""
    sampler, seats, device = parts.sampler, parts.seats, parts.device
    places = torch.zeros(1, dtype=torch.int64, device=device)
    opened = open_rows(seats.kept, places, places, parts.pool.page_slots, places if drafted else None)
    how = opened.temperature, opened.top_k, opened.top_p, opened.min_p, opened.stream, places
    logits = torch.zeros(1, sampler.vocab_size, dtype=parts.model.place.dtype, device=device)
    drawn = sample_rows(logits, *how, sampler.tokenizer_size)
    close_rows(drawn, torch.zeros_like(drawn), seats.token, places, sampler.vocab_size)
    report_rows(logits, drawn[0], seats.sure[:1], sampler.tokenizer_size)
    sample_rows(logits.float(), *how, sampler.tokenizer_size)
    report_rows(logits.float(), places, places.int(), sampler.tokenizer_size)
    gumbel(places, places, sampler.tokenizer_size)
    words = torch.zeros(1, -(-sampler.vocab_size // 32), dtype=torch.int32, device=device)
    mask_rows(logits.float(), places, words)


def _batch(parts: StepParts, spans: list[tuple[int, int]]) -> StepBatch:
    """A batch of spans (positions before, rows) that all lie on the dummy page."""
    width = pages_for(max(map(sum, spans)), parts.pool.page_slots)
    if parts.packer.states:
        width = max(width, 2)  # the pages that a span reads and writes
    table = torch.zeros(len(spans), width, dtype=torch.int32, device=parts.device)
    return batch_of(spans, (table,) * len(parts.pool.groups))


def batch_of(spans: list[tuple[int, int]], tables: tuple[torch.Tensor, ...]) -> StepBatch:
    """A batch of spans (positions before, rows) over these page tables, whose tokens and positions mean nothing."""
    starts, lengths = map(list, zip(*spans))
    ends, device = list(accumulate(lengths, initial=0)), tables[0].device
    row_start, context = (torch.tensor(words, dtype=torch.int32, device=device) for words in (ends, starts))
    zeros_T = torch.zeros(ends[-1], dtype=torch.int64, device=device)
    return StepBatch(
        input_ids=zeros_T,
        positions=zeros_T,
        row_start=row_start,
        context=context,
        tables=tables,
        slots=(zeros_T,) * len(tables),
        logit_rows=torch.arange(ends[-1], device=device),
        starts=starts,
        lengths=lengths,
    )
