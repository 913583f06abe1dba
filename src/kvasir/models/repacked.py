"""Slots whose stored tensor has another layout than the plane that it fills: codes packed along outputs, or in another
order, and scales that are stored as divisors. They are repacked part by part, on the plane's device.

Legend: N outputs, K inputs, G groups, W words of eight 4-bit codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvasir.kernels.weight_codes import pack_nibbles
from kvasir.layers.weights import Slot

WORD = 8  # codes of 4 bits in an int32
# Places in the order of AWQ: the code of output i of eight stands at this place of its word.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Repacked(Slot):
    """A slot filled by ``convert`` of some rows of the stored tensor. A stored row becomes ``share`` = (count, of)
    rows, or with ``across`` columns, of the target: ``count`` of them for every ``of`` stored rows. ``given``: the
    shape of the stored tensor, or of the part of it that ``index`` names: bytes of every block, of all rows."""

    convert: Callable[[torch.Tensor], torch.Tensor] | None = None
    given: tuple[int, ...] = ()
    share: tuple[int, int] = (1, 1)
    across: bool = False

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.given)

    def rows(self, first: int, count: int) -> Slot:
        more, of = self.share
        assert first % of == 0 and count % of == 0, f"parts of whole words: rows {first} + {count}"
        start, stop = first // of * more, (first + count) // of * more
        target = self.target[:, start:stop] if self.across else self.target[start:stop]
        return replace(self, target=target, given=(count, *self.given[1:]))

    def through(self, index: tuple[int | slice, ...], transposed: bool) -> Slot:
        whole = all(isinstance(pick, slice) and pick == slice(None) for pick in index[:1])
        assert whole and not transposed, "all rows of a repacked tensor are read"
        return replace(self, index=index)

    def fill(self, stored: torch.Tensor) -> None:
        self.target.copy_(self.convert(stored[self.index] if self.index else stored))


def nibbles(words: torch.Tensor, places: tuple[int, ...] = tuple(range(WORD))) -> torch.Tensor:
    """Codes uint8 [..., 8 W] of int32 words [..., W]; ``places``: those of eight codes in their word, from the lowest
    bits on."""
    shifts = torch.tensor(places, dtype=torch.int32, device=words.device) * 4
    return (words[..., None] >> shifts & 15).to(torch.uint8).flatten(-2)


def awq_codes(slot: Slot, types: tuple[str, ...] = ("I32",)) -> Repacked:
    """The slot of a plane uint8 [N, K / 2], filled by AWQ's ``qweight`` int32 [K, N / 8]."""
    outputs, half = slot.target.shape

    def convert(words_KW: torch.Tensor) -> torch.Tensor:
        return pack_nibbles(nibbles(words_KW, AWQ_PLACES).t())

    return Repacked(
        slot.target, types=types, convert=convert, given=(2 * half, outputs // WORD), share=(1, 2), across=True
    )


def zeros_by_group(slot: Slot, places: tuple[int, ...], plus: int = 0) -> Repacked:
    """The slot of zero points uint8 [N, G], filled by ``qzeros`` int32 [G, N / 8]. ``plus`` is added to each."""
    outputs, groups = slot.target.shape

    def convert(words_GW: torch.Tensor) -> torch.Tensor:
        return nibbles(words_GW, places).t() + plus

    return Repacked(slot.target, types=("I32",), convert=convert, given=(groups, outputs // WORD), across=True)


def zeros_by_output(slot: Slot) -> Repacked:
    """The slot of zero points uint8 [N, G], filled by int32 words [N / 8, G] that pack outputs (compressed-tensors)."""
    outputs, groups = slot.target.shape

    def convert(words_WG: torch.Tensor) -> torch.Tensor:
        return nibbles(words_WG.t()).t()

    return Repacked(slot.target, types=("I32",), convert=convert, given=(outputs // WORD, groups), share=(WORD, 1))


def divisor(slot: Slot) -> Repacked:
    """The slot of a factor for every output, filled by one stored divisor."""
    return Repacked(slot.target, types=slot.types, convert=torch.reciprocal, given=())


def in_words(slot: Slot, signed: bool) -> Repacked:
    """The slot of a plane of codes, filled by GPTQ's ``qweight`` int32 [K / 8, N], or [K / 4, N] for codes of 8 bits.
    ``signed``: stored codes have 128 added."""
    words = slot.target.view(torch.int32)
    flip = 0x80808080 - (1 << 32) if signed else 0

    def convert(words_WN: torch.Tensor) -> torch.Tensor:
        return words_WN.t() ^ flip

    return Repacked(words, types=("I32",), convert=convert, given=(words.shape[1], words.shape[0]), across=True)


def as_words(slot: Slot) -> Slot:
    """The slot of a plane of bytes, filled by int32 words that hold the same bytes."""
    return replace(slot, target=slot.target.view(torch.int32), types=("I32",))


def offset_words(slot: Slot) -> Repacked:
    """The slot of a plane of signed codes, filled by int32 words of the same codes with 128 added."""
    words = slot.target.view(torch.int32)
    flip = 0x80808080 - (1 << 32)
    return Repacked(words, types=("I32",), convert=lambda stored: stored ^ flip, given=tuple(words.shape))
