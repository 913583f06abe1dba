"""Turn a plan into tensors: the only place that turns sequences and page tables into what kernels read.

Everything is written into two staging buffers on the host (one of int64, one of int32, pinned when the device is a GPU)
and crosses to the device in two copies, whatever the number of requests.

Legend: T rows, S spans, W pages in the longest table, P slots per page, K pairs, A words of ancestor bits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kvasir.types import HOOK_SHIFT, Span, StepBatch

# A section of a staging buffer begins at a multiple of so many elements. Kernels are compiled again for pointers that
# are aligned otherwise.
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Frame:
    """A batch of one size at one place, whatever the plan. Padding rows hold token 0 and write to the dummy page.

    ``rows`` is the number of rows and ``wanted`` that of rows with logits, both multiples of ``ALIGNED``; ``memory`` is
    the int64 tensor on the device that holds every such batch. ``varied``: whether rows have variants; ``guests``:
    whether rows may hold guests."""

    rows: int
    wanted: int
    memory: torch.Tensor
    varied: bool = False
    guests: bool = False

    @staticmethod
    def words(rows: int, wanted: int, num_groups: int) -> int:
        """Number of int64 elements that ``memory`` must hold, a word of ancestor bits for each row among them."""
        return (2 + num_groups) * rows + wanted + rows // 2 + rows + rows

    def parts(
        self, num_groups: int
    ) -> tuple[
        torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor | None, torch.Tensor | None
    ]:
        """Token ids, positions and slots as the batch has them, the rows whose logits are wanted, the variants, and the
        guest of each row (-1: none)."""
        sizes = [*[self.rows] * (2 + num_groups), self.wanted]
        sizes += [self.rows // 2 if self.varied else 0, self.rows if self.guests else 0]
        ids, positions, *slots, wanted, variants, guests = self.memory[: sum(sizes)].split_with_sizes(sizes)
        variants = variants.view(torch.int32) if self.varied else None
        return ids, positions, tuple(slots), wanted, variants, guests if self.guests else None


class Packer:
    """Packs plans for one device. Buffers are reused: a batch is valid until the second ``pack`` after it, so that one
    launched step may be in flight while the next is packed."""

    def __init__(
        self, page_slots: int, num_groups: int, device: torch.device | str, states: Collection[int] = ()
    ) -> None:
        """``states``: the groups, by number, whose pages hold states. Their tables have two pages a sequence, read and
        written (`kvasir.kv.state`), and no slots."""
        self.page_slots = page_slots
        self.num_groups = num_groups
        self.states = states
        self.device = torch.device(device)
        self._buffers: list[dict[torch.dtype, tuple[torch.Tensor, np.ndarray]]] = [{}, {}]

    def pack(self, spans: list[Span], frame: Frame | None = None) -> StepBatch:
        """The batch of these spans; with ``frame``, of spans whose trees have at most 64 rows, in that frame."""
        self._buffers.reverse()
        num_spans, size = len(spans), self.page_slots
        lengths, starts = [s.length for s in spans], [s.start for s in spans]
        row_start = [0, *accumulate(lengths)]
        num_rows = row_start[-1]
        width = max(2 if self.states else 0, *(-(-(s.start + s.length) // size) for s in spans), 0)
        logit_rows = _logit_rows(spans, row_start)
        words = max((-(-s.length // 64) for s in spans if s.parents), default=0)
        varied = any(s.varied for s in spans) if frame is None else frame.varied

        padded, wanted_rows = (num_rows, len(logit_rows)) if frame is None else (frame.rows, frame.wanted)
        wide_sizes = [padded, padded, *[padded] * self.num_groups, wanted_rows]
        wide_sizes.append((padded + 1) // 2 if varied else 0)  # two variants in a word
        wide_sizes.append(padded if frame is not None and frame.guests else 0)
        wide_sizes.append(num_rows * words)  # behind all that lies at a fixed place in a frame
        moved = self._moved(spans)
        narrow_sizes = [num_spans + 1, num_spans, *[num_spans * width] * self.num_groups, *[num_spans] * len(moved)]
        wide, (ids, positions, *slots, wanted, variants, own, bits) = self._stage(torch.int64, wide_sizes)
        narrow, (first_row, context, *tables) = self._stage(torch.int32, narrow_sizes)
        tables = self._place(moved, tables)
        first_row[:], context[:], wanted[: len(logit_rows)] = row_start, starts, logit_rows
        if frame is not None:
            wanted[len(logit_rows) :] = 0
            for section in (ids, positions, *slots):
                section[num_rows:] = 0
        bits[:] = variants[:] = 0
        variants = variants.view(np.int32)
        guests = guest_rows(spans, row_start)
        own[:] = -1
        if len(own):
            for row, number in guests:
                own[row] = number
        borrowed: list[tuple[int, int]] = []
        groups = [(g, table.reshape(num_spans, width), slots[g]) for g, table in enumerate(tables)]
        for i, span in enumerate(spans):
            at, end = row_start[i], row_start[i + 1]
            if span.length == 1:
                known = span.tokens()
                if known:
                    ids[at] = known[0]
                else:
                    ids[at] = 0
                    borrowed.append((at, span.seat))
                positions[at] = span.start
            else:
                ids[at : end - len(span.guests)], ids[end - len(span.guests) : end], positions[at:end] = (
                    span.tokens(),
                    0,
                    tree_positions(span),
                )
            for g, table, slot in groups:
                if g in self.states:
                    table[i, :2], table[i, 2:], slot[at:end] = span.states, 0, 0
                else:
                    self._pages(span, g, table[i], slot[at:end])
            if span.parents:
                tree_ancestors(span.parents, bits.reshape(num_rows, words)[at:end])
            if varied:
                row_variants(span, variants[at:end])

        there = (
            wide.to(self.device, non_blocking=True)
            if frame is None
            else frame.memory[: len(wide)].copy_(wide, non_blocking=True)
        )
        ids_t, positions_t, *slots_t, wanted_t, variants_t, _, bits_t = _sections(there, wide_sizes)
        first_t, context_t, *tables_t = _sections(narrow.to(self.device, non_blocking=True), narrow_sizes)
        return StepBatch(
            input_ids=ids_t,
            positions=positions_t,
            row_start=first_t,
            context=context_t,
            tables=tuple(t.view(num_spans, width) for t in tables_t[: self.num_groups]),
            slots=tuple(slots_t),
            logit_rows=wanted_t,
            starts=starts,
            lengths=lengths,
            ancestors=bits_t.view(num_rows, words) if words else None,
            borrowed=self._pairs(borrowed),
            guests=self._pairs(guests) if frame is None else None,
            variants=variants_t.view(torch.int32)[:padded] if varied else None,
            prompts=[s.length > 1 and s.commit == "all" for s in spans],
            places=self._places(moved, tables_t[self.num_groups :]),
        )

    def _pairs(self, pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Pairs as two int64 [K] on the device; None: there are none."""
        return tuple(self.send(torch.tensor(pairs, dtype=torch.int64).T.contiguous())) if pairs else None

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send a small host tensor to the device without waiting for it."""
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def _stage(self, dtype: torch.dtype, sizes: list[int]) -> tuple[torch.Tensor, list[np.ndarray]]:
        """A host tensor of all sections together, and a numpy view of each."""
        total = sum(map(_padded, sizes))
        buffer = self._buffers[0].get(dtype)
        if buffer is None or len(buffer[1]) < total:
            tensor = torch.empty(max(256, 2 * total), dtype=dtype, pin_memory=self.device.type == "cuda")
            buffer = self._buffers[0][dtype] = tensor, tensor.numpy()
        tensor, array = buffer
        return tensor[:total], _sections(array, sizes)

    def _moved(self, spans: list[Span]) -> dict[int, list[int]]:
        """Places of the spans' first rows, by cache group in which some of their sequences have forgotten tokens."""
        forgetful = [s.seq.forgotten for s in spans if s.seq.forgotten]
        groups = [g for g in range(self.num_groups) if any(counts[g] for counts in forgetful)] if forgetful else []
        return {group: [s.seq.place(group, s.start) for s in spans] for group in groups}

    def _place(self, moved: dict[int, list[int]], sections: list[np.ndarray]) -> list[np.ndarray]:
        """Fill the sections behind those of the tables with places. Returns the tables."""
        for section, places in zip(sections[self.num_groups :], moved.values()):
            section[:] = places
        return sections[: self.num_groups]

    def _places(
        self, moved: dict[int, list[int]], contexts: list[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, list[int]] | None, ...]:
        """Places as a batch has them, from the sections on the device that hold them."""
        by_group = {group: (context, places) for context, (group, places) in zip(contexts, moved.items())}
        return tuple(map(by_group.get, range(self.num_groups))) if by_group else ()

    def _pages(self, span: Span, group: int, row: np.ndarray, slots: np.ndarray) -> None:
        """Fill one row of a group's page table (padded with the dummy page 0) and the slots the span writes."""
        size, table, start = self.page_slots, span.seq.tables[group], span.seq.place(group, span.start)
        used = -(-(start + span.length) // size)
        row[:used] = table[:used]
        row[used:] = 0
        if span.length == 1:
            slots[0] = table[start // size] * size + start % size
            return
        at = np.arange(start, start + span.length)
        slots[:] = row[at // size].astype(np.int64) * size + at % size


def pack(
    spans: list[Span], page_slots: int, device: torch.device | str, num_groups: int, states: Collection[int] = ()
) -> StepBatch:
    """Pack spans once, with buffers of their own."""
    return Packer(page_slots, num_groups, device, states).pack(spans)


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _sections(whole: Any, sizes: list[int]) -> list[Any]:
    """Views of a staging buffer, tensor or array: of ``sizes`` elements, each at a multiple of ``ALIGNED``."""
    starts = accumulate(map(_padded, sizes), initial=0)
    return [whole[start : start + size] for start, size in zip(starts, sizes)]


def _logit_rows(spans: list[Span], row_start: list[int]) -> list[int]:
    rows: list[int] = []
    for span, at in zip(spans, row_start):
        wanted = [r for kind in ("score", "sample", "pool", "guess") if (r := span.want.get(kind))]
        if len(wanted) == 1 and len(wanted[0]) == 1:
            rows.append(at + wanted[0][0])
        else:
            rows.extend(at + i for i in sorted({i for r in wanted for i in r}))
    return rows


def guest_rows(spans: list[Span], row_start: list[int]) -> list[tuple[int, int]]:
    """Rows of the step that hold guests, and the numbers of their embeddings."""
    return [
        (end - len(span.guests) + i, number)
        for span, end in zip(spans, row_start[1:])
        if span.guests
        for i, number in enumerate(span.guests)
    ]


def row_variants(span: Span, out: np.ndarray) -> None:
    """Write each row's variant into ``out`` [length]: the sequence's adapter and hooks, each from its first position
    on; that of the drafter for guests."""
    seq = span.seq
    if span.parents:
        positions = tree_positions(span)
        out[:] = np.where(positions >= seq.variant_from, seq.variant, 0)
        out[:] |= np.where(positions >= seq.hook_from, seq.hook << HOOK_SHIFT, 0)
    else:
        first = min(max(0, seq.variant_from - span.start), span.length)
        out[:first], out[first:] = 0, seq.variant
        if seq.hook:
            out[min(max(0, seq.hook_from - span.start), span.length) :] |= seq.hook << HOOK_SHIFT
    if span.guests:
        out[len(out) - len(span.guests) :] = seq.guest_variant


def tree_positions(span: Span) -> np.ndarray:
    """RoPE positions of a span's rows. A tree's row stands at its depth below the anchor, not at its slot."""
    if not span.parents:
        return np.arange(span.start, span.start + span.length)
    depth: list[int] = []
    for parent in span.parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return np.asarray(depth) + span.start


def tree_ancestors(parents: list[int], bits: np.ndarray) -> None:
    """Set ``bits[i]`` to row i's own bit and those of all its ancestors, 64 to a word."""
    for i, parent in enumerate(parents):
        if parent >= 0:
            bits[i] = bits[parent]
        bits[i, i // 64] |= np.int64(1) << np.int64(i % 64)
