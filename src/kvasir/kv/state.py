"""State pages: what recurrent layers keep of a sequence, in pages of the pool.

A state page holds, layer after layer, the planes that each mixer asks for (`kvasir.types.StatePlane`). So a snapshot
is a copy of one page, whatever the mixers. A sequence has two entries in its table of such a group: the page that a
step reads, and the page that a span of more than ``LOOK_AHEAD`` rows writes. Shorter spans change only what follows
their start in the page that they read, so that a step can be run again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvasir.types import CacheGroup, StatePlane

ALIGN = 16  # bytes; every plane starts at a multiple, so that vector loads and views as any dtype work


def aligned(num_bytes: int) -> int:
    """Round up to the start of the next plane."""
    return -(-num_bytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class StateCache:
    """One recurrent layer's view of its group's pool: ``planes[name]`` is a strided [N, *shape] tensor of N pages."""

    planes: dict[str, torch.Tensor]
    group: int
    dtype: torch.dtype  # the model's


def _dtype(group: CacheGroup, plane: StatePlane, dtype: torch.dtype) -> torch.dtype:
    own = getattr(torch, group.state_dtype)
    return {"state": own, "float32": torch.float32, "model": dtype, "position": torch.int64}[plane.kind]


def _plane_bytes(group: CacheGroup, plane: StatePlane, dtype: torch.dtype) -> int:
    return aligned(math.prod(plane.shape) * _dtype(group, plane, dtype).itemsize)


def state_bytes(group: CacheGroup, dtype: torch.dtype) -> int:
    """Bytes of one page of a group of states."""
    return sum(_plane_bytes(group, plane, dtype) for planes in group.states for plane in planes)


def state_view(group: CacheGroup, index: int, place: int, raw: torch.Tensor, dtype: torch.dtype) -> StateCache:
    """The planes of the layer at ``place`` in group ``index``, whose pages are the rows of ``raw`` [N, bytes] uint8."""
    at, planes = sum(_plane_bytes(group, plane, dtype) for own in group.states[:place] for plane in own), {}
    for plane in group.states[place]:
        kind = _dtype(group, plane, dtype)
        typed = raw.view(kind)
        inner = [math.prod(plane.shape[i + 1 :]) for i in range(len(plane.shape))]
        shape, strides = (raw.shape[0], *plane.shape), (typed.stride(0), *inner)
        planes[plane.name] = typed.as_strided(shape, strides, at // kind.itemsize)
        at += _plane_bytes(group, plane, dtype)
    return StateCache(planes, index, dtype)
