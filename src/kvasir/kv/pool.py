"""The bytes of the KV cache: one tensor of pages per cache group, in the block-major layout of ``kv/codec.py``.

A page of a group is one contiguous run of bytes that holds every layer of the group, so that copying, moving or storing
a page is one operation whatever the number of layers and whatever each of them keeps. Who owns which page is the
business of ``engine/pages/pages.py``.

Legend: N pages, G KV heads, P slots per page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvasir.kv.codec import Codec, LayerCache, planes_of
from kvasir.kv.state import StateCache, aligned, state_bytes, state_view
from kvasir.types import CacheGroup, CacheRow, PageCopy


def _plane_bytes(row: CacheRow, codec: Codec, page_slots: int, dtype: torch.dtype) -> list[int]:
    return [aligned(p.heads(row) * page_slots * p.width * p.dtype.itemsize) for p in planes_of(codec, row, dtype)]


def _zeros(num_pages: int, page_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeroed pages. On a CPU they come from numpy, whose memory the system has zeroed and which costs nothing until it
    is touched; torch would write the zeros itself."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_pages, page_bytes), np.uint8))
    return torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)


class KVPool:
    """The pages of every group, all allocated up front. Raises torch's out-of-memory error when they do not fit."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        codec: Codec,
        num_pages: Sequence[int],
        page_slots: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        assert len(groups) == len(num_pages) and page_slots > 0, "one page count a group"
        self.groups = tuple(groups)
        self.codec = codec
        self.page_slots = page_slots
        self.num_pages = tuple(num_pages)
        sizes = [self.page_bytes_of(g, codec, page_slots, dtype) for g in groups]
        self.pages = [_zeros(n, size, torch.device(device)) for n, size in zip(num_pages, sizes)]
        self._dtype = dtype
        # Recorded behind each change of pages outside steps, for copies on other streams; None: there are none.
        self.changed: torch.cuda.Event | None = None
        # By group, made when first asked for.
        self._slot_words: dict[int, tuple[torch.Tensor, torch.Tensor, torch.dtype]] = {}
        self._layers = {
            layer: self._view(i, at, dtype) for i, group in enumerate(groups) for at, layer in enumerate(group.layers)
        }

    @staticmethod
    def page_bytes_of(group: CacheGroup, codec: Codec, page_slots: int, dtype: torch.dtype) -> int:
        """Bytes of one page of ``group``, without a pool: for sizing."""
        if group.kind == "state":
            return state_bytes(group, dtype)
        layers = zip(group.layers, group.rows)
        return sum(sum(_plane_bytes(row, codec.layer(index), page_slots, dtype)) for index, row in layers)

    def page_bytes(self, group: int) -> int:
        """Bytes of one page of ``group``."""
        return self.pages[group].shape[1]

    def bytes_per_token(self) -> float:
        """Bytes one token takes while every group still holds it. States take none."""
        return sum(p.shape[1] for g, p in zip(self.groups, self.pages) if g.kind == "pages") / self.page_slots

    def state_share(self) -> float:
        """Share of the pool's bytes that pages of states have; 0 for a model without recurrent layers."""
        sizes = [n * self.page_bytes(g) for g, n in enumerate(self.num_pages)]
        return sum(size for group, size in zip(self.groups, sizes) if group.kind == "state") / max(1, sum(sizes))

    def layer(self, index: int) -> Any:
        """The `LayerCache` or `StateCache` of model layer ``index``: strided views into its group's pages."""
        return self._layers[index]

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages. Every source is read before any target is written; a target may appear once."""
        for group in {c.group for c in copies}:
            mine = [c for c in copies if c.group == group]
            words = self.pages[group].view(torch.int64)
            pairs = torch.tensor([[c.source for c in mine], [c.target for c in mine]], pin_memory=words.is_cuda)
            # From pinned memory, so that the copy does not wait for a step in flight.
            source, target = pairs.to(words.device, non_blocking=True)
            words.index_copy_(0, target, words.index_select(0, source))
        self._note_change()

    def move_slots(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the bytes of whole slots (page * page_slots + place): every layer, codes and scales, unchanged. Every
        source is read before any target is written; a target may appear once."""
        if group not in self._slot_words:
            self._slot_words[group] = self._words_of_a_slot(self.groups[group], self._dtype)
        base, step, unit = self._slot_words[group]
        words = self.pages[group].view(-1).view(unit)
        slots = torch.tensor([sources, targets], pin_memory=words.is_cuda).to(words.device, non_blocking=True)
        pages, places = slots // self.page_slots, slots % self.page_slots
        at = (pages * (self.page_bytes(group) // unit.itemsize))[..., None] + base + places[..., None] * step
        words[at[1]] = words[at[0]]
        self._note_change()

    def move_kept(self, layer: int, table: Sequence[int], places_GC: torch.Tensor, targets: Sequence[int]) -> None:
        """Move the tokens of a sequence that stay in a layer: from ``places_GC`` (int64, [G, C] or [1, C] for all
        heads), counted over the pages ``table``, to the first C places of the pages ``targets``. Their bytes stay as
        they are: codes, scales, and what a KV policy stores beside them. All are read before one is written."""
        device, size, count = places_GC.device, self.page_slots, places_GC.shape[1]
        both = torch.tensor([*table, *targets], dtype=torch.int64, pin_memory=device.type == "cuda")
        sources, targets_W = both.to(device, non_blocking=True).split([len(table), len(targets)])
        at = torch.arange(count, device=device)
        pages_GC, to_C = sources[places_GC // size], targets_W[at // size]
        for plane in self._layers[layer].planes.values():
            plane = plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane  # no type of 8 bits can be indexed
            heads = torch.arange(plane.shape[1], device=device)[:, None]
            plane[to_C[None], heads, (at % size)[None]] = plane[pages_GC, heads, places_GC % size]
        self._note_change()

    def clear(self, group: int, pages: Sequence[int]) -> None:
        """Fill pages with zeros."""
        for page in pages:
            self.pages[group][page].zero_()
        self._note_change()

    def poison(self, group: int, pages: Sequence[int]) -> None:
        """Fill pages with ones: NaN in every float format, so that a read of an unwritten slot shows (poison mode)."""
        self.pages[group][torch.as_tensor(pages, dtype=torch.int64, device=self.pages[group].device)] = 0xFF
        self._note_change()

    def _note_change(self) -> None:
        if self.changed is not None:
            self.changed.record()

    def _words_of_a_slot(self, group: CacheGroup, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
        """The places of slot 0's words in a page of ``group``, each word's distance from slot to slot, and the word
        type: the widest in which every row of every plane is a whole number of words."""
        found = [  # of every plane of every layer: its heads, the bytes of a slot of one head, its own bytes
            (plane.heads(row), plane.width * plane.dtype.itemsize, size)
            for codec, row in zip(map(self.codec.layer, group.layers), group.rows)
            for plane, size in zip(planes_of(codec, row, dtype), _plane_bytes(row, codec, self.page_slots, dtype))
        ]
        unit = next(
            u
            for u in (torch.int64, torch.int32, torch.int16, torch.uint8)
            if not any(slot % u.itemsize for _, slot, _ in found)
        )
        base, step, at = [], [], 0
        for num_heads, slot, size in found:
            words = slot // unit.itemsize
            heads = at // unit.itemsize + np.arange(num_heads)[:, None] * self.page_slots * words
            base.append((heads + np.arange(words)).ravel())
            step.append(np.full(num_heads * words, words))
            at += size
        device = self.pages[0].device
        return (
            torch.from_numpy(np.concatenate(base)).to(device),
            torch.from_numpy(np.concatenate(step)).to(device),
            unit,
        )

    def _view(self, index: int, place: int, dtype: torch.dtype) -> LayerCache | StateCache:
        """The planes of the layer at ``place`` in group ``index``."""
        group, raw = self.groups[index], self.pages[index]
        if group.kind == "state":
            return state_view(group, index, place, raw, dtype)
        row, codecs = group.rows[place], [self.codec.layer(i) for i in group.layers[: place + 1]]
        offset = sum(sum(_plane_bytes(r, c, self.page_slots, dtype)) for r, c in zip(group.rows[:place], codecs))
        planes, codec = {}, codecs[-1]
        sizes = _plane_bytes(row, codec, self.page_slots, dtype)
        for plane, size in zip(planes_of(codec, row, dtype), sizes):
            typed = raw.view(plane.dtype)
            shape = (raw.shape[0], plane.heads(row), self.page_slots, plane.width)
            strides = (typed.stride(0), self.page_slots * plane.width, plane.width, 1)
            planes[plane.name] = typed.as_strided(shape, strides, offset // plane.dtype.itemsize)
            offset += size
        return LayerCache(planes, codec, index, self.page_slots, row.key_dim, dtype, latent=row.latent)
