"""The device and dtype of a model's weights, and the places that stored tensors fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvasir.kernels.moe_rounding import Rounding
from kvasir.technique import Technique

# Types by their names in safetensors that fill a place for plain numbers.
NUMBERS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Placement:
    """Device, dtype and mode of a model's layers. ``exact``: exact mode. ``fused`` False: norms, RoPE, activations and
    products of few rows are torch's own, one after the other, to measure what fusing gains.

    ``formats``: the weight format (``layers/weight_format.py``) of a matrix that is filled through these slots; None:
    all are plain. ``activations``: the type in which products of many rows with quantised weights take these.
    ``rounding``: how experts round their rows in large steps with prompts; None: not. ``path``: what the names of slots
    begin with here, such as ``layers.0.mixer.``."""

    device: torch.device
    dtype: torch.dtype
    exact: bool = False
    fused: bool = True
    formats: Callable[[tuple[str, ...]], Technique] | None = None
    activations: Literal["bf16", "fp8"] = "bf16"
    rounding: Rounding | None = None
    path: str = ""

    def within(self, name: str) -> Placement:
        """The same placement for a part of the model, whose slots are named ``name``.something."""
        return replace(self, path=f"{self.path}{name}.")

    def plain(self, dtype: torch.dtype | None = None) -> Placement:
        """The same placement for weights that are plain in every checkpoint, perhaps in another type."""
        return replace(self, formats=None, dtype=dtype or self.dtype)


@dataclass(frozen=True, slots=True)
class Whole:
    """A plain matrix [N, K] of ``shape`` that may be given instead of its planes: ``put`` quantises it."""

    shape: tuple[int, int]
    put: Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one stored tensor, often a slice of a fused weight. ``offset`` is added to the stored value;
    ``repeat``: one stored vector fills every row of the target; ``index``: the part of the stored tensor that fills the
    target (empty: all of it), as ``models.stored.View`` gives it; ``types``: those that the stored tensor may have;
    ``random``: the range of random numbers that may stand for stored ones (None: that of weights and norms);
    ``whole``: the matrix whose first plane this is; ``collect``: takes the values for a target without memory."""

    target: torch.Tensor
    offset: float = 0.0
    repeat: bool = False
    index: tuple[int | slice, ...] = ()
    types: tuple[str, ...] = NUMBERS
    random: tuple[float, float] | None = None
    whole: Whole | None = None
    collect: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the stored tensor."""
        return self.target.shape[1:] if self.repeat else self.target.shape

    def through(self, index: tuple[int | slice, ...], transposed: bool) -> Slot:
        """The same place, filled by a part of a stored tensor, perhaps transposed."""
        return replace(self, target=self.target.mT if transposed else self.target, index=index)

    def rows(self, first: int, count: int) -> Slot | None:
        """The place of these rows of the stored tensor, its first dimension; None: they go elsewhere."""
        if not self.index:
            return replace(self, target=self.target[first : first + count])
        picked, rest = self.index[0], self.index[1:]
        if isinstance(picked, int):
            inside = first <= picked < first + count
            return replace(self, index=(picked - first, *rest)) if inside else None
        start, step = picked.start or 0, picked.step or 1
        begin = max(0, -(-(first - start) // step))
        end = min(len(self.target), -(-(first + count - start) // step))
        if begin >= end:
            return None
        at = start + begin * step - first
        part = slice(at, at + (end - begin - 1) * step + 1, step)
        return replace(self, target=self.target[begin:end], index=(part, *rest))

    def row(self, place: int) -> Slot | None:
        """The place of one row of the stored tensor, without its first dimension; None: it goes elsewhere."""
        found = self.rows(place, 1)
        if found is None:
            return None
        target = found.target if found.index and isinstance(found.index[0], int) else found.target[0]
        return replace(found, target=target, index=found.index[1:])

    def fill(self, stored: torch.Tensor) -> None:
        """Copy ``stored``, or the part of it that ``index`` names, into place, converting dtype and device."""
        stored = stored[self.index] if self.index else stored
        if self.collect is not None:
            self.collect(self.target, stored)
            return
        self.target.copy_(stored)
        if self.offset:
            self.target.add_(self.offset)
